//! Data that commits left alone (`data=writeback`) is written while nothing is free: its inodes' records are written once more, and
//! the commit of those has its blocks.

use crate::types::*;
use crate::volume::{OpenFile, Volume};
use crate::{Error, mkfs};
use braidfs_device::{Device, MemDevice};
use std::sync::Arc;

/// More than a commit finds blocks that nobody has reserved: each has a block of its own, with its attribute.
const FILES: usize = 450;

fn mount(device: &Arc<dyn Device>) -> Volume {
    let o = MountOptions { background: false, data: DataMode::Writeback, ..MountOptions::default() };
    Volume::mount(vec![device.clone()], o).unwrap()
}

fn make(v: &Volume, name: &[u8]) -> OpenFile {
    let new = NewNode { kind: FileKind::File, mode: 0o644, umask: 0, rdev: 0, target: b"" };
    v.open(v.create(InodeNo::ROOT, name, &new, &Cred::root()).unwrap().ino).unwrap()
}

fn content(n: usize) -> [u8; 4096] {
    [n as u8; 4096]
}

/// A volume of one domain with files of a page each, of which everything but that is durable.
fn with_late_data() -> (Arc<dyn Device>, Volume, Vec<InodeNo>) {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(16384));
    let (group_bytes, journal_bytes) = (Some(16 << 20), Some(4 << 20));
    let o = MkfsOptions { domains: Some(1), group_bytes, journal_bytes, ..MkfsOptions::default() };
    mkfs::format(std::slice::from_ref(&device), &o).unwrap();
    let v = mount(&device);
    let one = |n| {
        let f = make(&v, format!("{n}").as_bytes());
        v.setxattr(f.ino(), b"user.a", &[1; 2500], XattrMode::Set).unwrap();
        assert_eq!(v.write(&f, 0, &content(n)).unwrap(), 4096);
        f.ino()
    };
    let files = (0..FILES).map(one).collect();
    v.commit_domain(DomainId(0), false).unwrap();
    assert!(v.mounted().domains[0].memory.dirty() >= FILES as u64, "the commit has left them alone");
    (device, v, files)
}

/// Nothing is lost, and the domain works.
fn holds_all(device: &Arc<dyn Device>, v: Volume, files: &[InodeNo]) {
    v.sync().unwrap();
    assert_eq!(v.domains()[0].failed, None);
    v.crash();
    let v = mount(device);
    for (n, ino) in files.iter().enumerate() {
        let mut page = [0; 4096];
        assert_eq!(v.read(&v.open(*ino).unwrap(), 0, &mut page).unwrap(), 4096);
        assert!(page == content(n), "{n}");
    }
    v.unmount().unwrap();
}

/// Writes until there is room for a few blocks more: nobody has to look for any.
fn fill(v: &Volume) -> OpenFile {
    let (large, d) = (make(v, b"large"), &v.mounted().domains[0]);
    while d.space.available() > 16 {
        let blocks = (d.space.available() - 8).min(256) as usize;
        v.append(&large, &vec![7; blocks * 4096]).unwrap();
    }
    large
}

#[test]
fn a_write_that_finds_no_room_has_it_written() {
    let (device, v, files) = with_late_data();
    let large = fill(&v);
    let full = loop {
        if let Err(e) = v.append(&large, &[7; 4096]) {
            break e;
        }
    };
    assert!(matches!(full, Error::NoSpace), "{full}");
    drop(large);
    holds_all(&device, v, &files);
}

#[test]
fn a_sync_writes_it() {
    let (device, v, files) = with_late_data();
    drop(fill(&v));
    holds_all(&device, v, &files);
}

#[test]
fn fsyncs_write_it() {
    let (device, v, files) = with_late_data();
    drop(fill(&v));
    files.iter().for_each(|ino| v.fsync(*ino, false).unwrap());
    holds_all(&device, v, &files);
}
