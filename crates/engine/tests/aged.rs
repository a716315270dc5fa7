//! An overwrite and its fsync take the same work whatever the number of extents: counted, not timed. Steps are counted in
//! debug builds.
#![cfg(debug_assertions)]

use braidfs::OpenHow;
use braidfs::device::{Device, MemDevice, WriteOp};
use braidfs::extent_steps;
use braidfs::{Cred, MkfsOptions, MountOptions, Volume, mkfs};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A block of data begins with this.
const DATA: &[u8; 8] = b"the data";

/// Memory that forgets blocks of data, so that a large file takes none, and counts the others.
#[derive(Debug)]
struct Hollow {
    memory: MemDevice,
    metadata: AtomicU64,
}

impl Device for Hollow {
    fn blocks(&self) -> u64 {
        self.memory.blocks()
    }
    fn read(&self, block: u64, buf: &mut [u8]) -> io::Result<()> {
        self.memory.read(block, buf)
    }
    fn write_batch(&self, ops: &[WriteOp<'_>]) -> io::Result<()> {
        for op in ops.iter().filter(|op| !op.bufs[0].starts_with(DATA)) {
            self.metadata.fetch_add(op.bufs.iter().map(|b| b.len() as u64 / 4096).sum(), Relaxed);
            self.memory.write_batch(&[WriteOp { block: op.block, bufs: op.bufs.clone() }])?;
        }
        Ok(())
    }
    fn flush(&self) -> io::Result<()> {
        self.memory.flush()
    }
    fn discard(&self, block: u64, blocks: u64) -> io::Result<()> {
        self.memory.discard(block, blocks)
    }
    fn name(&self) -> String {
        "hollow".into()
    }
}

/// Work of one overwrite with its share of fsyncs and commits.
#[derive(Debug)]
struct Work {
    steps: f64,
    blocks: f64,
}

fn volume(cache_bytes: u64) -> (Arc<Hollow>, Volume) {
    let device = Arc::new(Hollow { memory: MemDevice::new(1 << 20), metadata: AtomicU64::new(0) });
    let devices: Vec<Arc<dyn Device>> = vec![device.clone()];
    mkfs::format(&devices, &MkfsOptions { domains: Some(1), ..MkfsOptions::default() }).unwrap();
    let options = MountOptions {
        background: false,
        serial: true,
        commit_interval: std::time::Duration::from_secs(3600),
        cache_bytes,
        ..MountOptions::default()
    };
    (device, Volume::mount(devices, options).unwrap())
}

/// Creates files in a directory that has `names`, a commit every thousand.
fn create(names: u64) -> Work {
    let (device, v) = volume(1 << 30);
    let me = Cred::root();
    v.mkdir_path(b"d", 0o755, &me).unwrap();
    let how = OpenHow { write: true, create: true, exclusive: true, mode: 0o644, ..OpenHow::default() };
    let make = |i: u64| drop(v.open_path(format!("d/file-{i:07}").as_bytes(), how, &me).unwrap());
    (0..names).for_each(make);
    v.sync().unwrap();
    let (steps, written) = (extent_steps(), device.metadata.load(Relaxed));
    let more = 4000;
    for i in 0..more {
        make(names + i);
        if i % 1000 == 999 {
            v.sync().unwrap();
        }
    }
    let per = |n: u64| n as f64 / more as f64;
    Work { steps: per(extent_steps() - steps), blocks: per(device.metadata.load(Relaxed) - written) }
}

/// Overwrites random blocks of a file whose `blocks` blocks are an extent each.
fn overwrite(blocks: u64, nocow: bool) -> Work {
    let (device, v) = volume(64 << 20);
    let how = OpenHow { read: true, write: true, create: true, mode: 0o644, ..OpenHow::default() };
    let f = v.open_path(b"f", how, &Cred::root()).unwrap();
    let mut page = [7u8; 4096];
    page[..8].copy_from_slice(DATA);
    // the odd ones lie behind all even ones
    for first in 0..2 {
        for b in (first..blocks).step_by(2) {
            v.write(&f, b * 4096, &page).unwrap();
        }
        v.sync().unwrap();
    }
    if nocow {
        let flags = braidfs::format::inode::NOCOW;
        v.setattr(f.ino(), &braidfs::SetAttr { flags: Some(flags), ..braidfs::SetAttr::default() }).unwrap();
        v.sync().unwrap();
    }
    let overwrites = 8000u64;
    let (steps, written) = (extent_steps(), device.metadata.load(Relaxed));
    for i in 0..overwrites {
        let b = (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20) % blocks;
        v.write(&f, b * 4096, &page).unwrap();
        if i % 50 == 49 {
            v.fsync(f.ino(), false).unwrap();
        }
        if i % 2000 == 1999 {
            v.sync().unwrap();
        }
    }
    let per = |n: u64| n as f64 / overwrites as f64;
    Work { steps: per(extent_steps() - steps), blocks: per(device.metadata.load(Relaxed) - written) }
}

#[test]
fn an_overwrite_costs_the_same_with_a_hundred_thousand_extents() {
    for nocow in [false, true] {
        let (few, many) = (overwrite(10_000, nocow), overwrite(100_000, nocow));
        println!("nocow {nocow}: {few:?} with 10,000 extents, {many:?} with 100,000");
        assert!(many.steps <= few.steps * 1.2 + 2.0, "{many:?} with 100,000 extents, {few:?} with 10,000");
        assert!(many.blocks <= few.blocks + 0.5, "{many:?} with 100,000 extents, {few:?} with 10,000");
    }
}

/// With many names each has a bucket of its own to be written, with few some share one; a bucket costs the same.
#[test]
fn a_create_costs_by_the_buckets_that_change() {
    let (few, many) = (create(10_000), create(100_000));
    println!("{few:?} with 10,000 names, {many:?} with 100,000");
    assert!(many.blocks <= few.blocks + 1.0, "{many:?} with 100,000 names, {few:?} with 10,000");
    let per_block = |w: &Work| w.steps / w.blocks;
    assert!(per_block(&many) <= per_block(&few) * 1.2 + 1.0, "{many:?} with 100,000 names, {few:?} with 10,000");
}
