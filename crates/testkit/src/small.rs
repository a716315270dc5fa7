//! Small volumes in memory, and files whose content tells the place of each word: what tests of sizes and of tenants
//! begin with.
//!
//! Everything here panics where something fails that the test did not ask about.

use crate::walk::fsck;
use braidfs::{Cred, DeviceSet, Error, FileKind, InodeNo, MkfsOptions, MountOptions, NewNode, OpenFile, Volume, mkfs};
use braidfs_device::{CutDevice, Device, MemDevice};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The root directory.
pub const ROOT: InodeNo = InodeNo::ROOT;
/// Bytes of a mebibyte.
pub const MIB: u64 = 1 << 20;
/// Bytes of a block.
pub const BLOCK: u64 = 4096;
/// For [`fill`]: until there is no room.
pub const ALL: u64 = u64::MAX / MIB;

/// An empty device of so many MiB.
pub fn memory(mib: u64) -> Arc<dyn Device> {
    Arc::new(MemDevice::soiled(mib * MIB / BLOCK))
}

/// The same devices, as what a volume is mounted on.
pub fn devices_of<D: Device + 'static>(all: &[Arc<D>]) -> Vec<Arc<dyn Device>> {
    all.iter().map(|d| d.clone() as Arc<dyn Device>).collect()
}

/// Devices of their own with the content that these have now.
pub fn copies_of(images: &[Arc<MemDevice>]) -> Vec<Arc<dyn Device>> {
    images.iter().map(|d| Arc::new(MemDevice::from_image(d.snapshot())) as Arc<dyn Device>).collect()
}

/// A volume on the first `mib` MiB of each device.
pub fn format(devices: &[Arc<dyn Device>], mib: &[u64], how: &MkfsOptions) {
    let cut = |(d, mib): (&Arc<dyn Device>, &u64)| {
        Arc::new(CutDevice::new(Arc::clone(d), mib * MIB / BLOCK)) as Arc<dyn Device>
    };
    let parts: Vec<_> = devices.iter().zip(mib).map(cut).collect();
    mkfs::format(&parts, how).unwrap();
}

/// Unmounts; the volume must be right then.
pub fn close(v: Volume, devices: &[Arc<dyn Device>]) {
    v.unmount().unwrap();
    fsck(devices).unwrap();
}

/// What is made with mode 0755.
pub fn new_node(kind: FileKind) -> NewNode<'static> {
    NewNode { kind, mode: 0o755, umask: 0, rdev: 0, target: b"" }
}

/// Makes an inode, by root.
pub fn create(v: &Volume, dir: InodeNo, name: &str, kind: FileKind) -> InodeNo {
    v.create(dir, name.as_bytes(), &new_node(kind), &Cred::root()).unwrap().ino
}

/// A new file, open.
pub fn file(v: &Volume, dir: InodeNo, name: &str) -> OpenFile {
    v.open(create(v, dir, name, FileKind::File)).unwrap()
}

/// A MiB of content for offset `at`, a multiple of 8: it tells the place of each word.
pub fn content(at: u64) -> Vec<u8> {
    (0..MIB / 8).flat_map(|i| (at / 8 + i).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()).collect()
}

/// MiB number `n` of such content.
pub fn piece(n: u64) -> Vec<u8> {
    content(n * MIB)
}

/// Mounts, with a small cache and nothing in the background.
pub fn mount(devices: &[Arc<dyn Device>]) -> Volume {
    let options = MountOptions { cache_bytes: 32 * MIB, background: false, ..MountOptions::default() };
    Volume::mount(devices.to_vec(), options).unwrap()
}

/// The devices of these numbers.
pub fn set(numbers: &[usize]) -> DeviceSet {
    DeviceSet::of(numbers.iter().copied()).unwrap()
}

/// Appends until there is no room, or to `most` MiB; bytes that the file has then.
pub fn fill(v: &Volume, f: &OpenFile, most: u64) -> u64 {
    let mut at = v.getattr(f.ino()).unwrap().size;
    while at < most * MIB {
        let len = (most * MIB - at).min(MIB);
        match v.write(f, at, &content(at)[..len as usize]) {
            Ok(n) => at += n as u64,
            Err(Error::NoSpace) => break,
            Err(e) => panic!("at {at}: {e}"),
        }
    }
    at
}

/// Two directories, of different domains.
pub fn two_directories(v: &Volume) -> [InodeNo; 2] {
    let a = create(v, ROOT, "a", FileKind::Dir);
    let other = |n: &u32| {
        let b = create(v, ROOT, &format!("b{n}"), FileKind::Dir);
        (v.domain_of(a).unwrap() != v.domain_of(b).unwrap()).then_some(b)
    };
    [a, (0..64).find_map(|n| other(&n)).expect("a second domain")]
}

/// Groups that are no domain's.
pub fn groups_of_nobody(v: &Volume) -> u32 {
    v.super_block().groups.get() - v.domains().iter().map(|d| d.groups).sum::<u32>()
}

/// Blocks that were moved so that a group became another domain's.
pub fn relocated(v: &Volume) -> u64 {
    v.domains().iter().map(|d| d.relocated_blocks).sum()
}

/// A directory with files of 512 KiB, so many MiB in all as there is room for or `most`; of them three in four are removed
/// then, so that each group is in use to a quarter. `between` is done before they are. The files that are there.
pub fn in_pieces(v: &Volume, dir: InodeNo, most: u64, between: impl FnOnce()) -> Vec<OpenFile> {
    let mut files = Vec::new();
    let half = |f: &OpenFile| v.write(f, 0, &content(0)[..(MIB / 2) as usize]);
    while (files.len() as u64) < 2 * most {
        let f = file(v, dir, &format!("f{}", files.len()));
        match half(&f) {
            Ok(n) if n as u64 == MIB / 2 => files.push(f),
            Ok(_) | Err(Error::NoSpace) => break,
            Err(e) => panic!("file {}: {e}", files.len()),
        }
    }
    v.sync().unwrap();
    between();
    let (kept, gone): (Vec<_>, Vec<_>) = files.into_iter().enumerate().partition(|(n, _)| n % 4 == 1);
    gone.iter().for_each(|(n, _)| v.unlink(dir, format!("f{n}").as_bytes()).unwrap());
    drop(gone);
    v.sync().unwrap();
    kept.into_iter().map(|(_, f)| f).collect()
}

/// A domain that is full, by one file and its size, beside another one in pieces ([`in_pieces`] of 72 MiB), and its files.
pub fn full_beside_pieces(v: &Volume) -> ((OpenFile, u64), Vec<OpenFile>) {
    let [one, two] = two_directories(v);
    let (f, mut size) = (file(v, one, "f"), 0);
    let kept = in_pieces(v, two, 72, || {
        size = fill(v, &f, ALL);
        v.sync().unwrap();
    });
    ((f, size), kept)
}

/// A file is `size` bytes long, as [`fill`] wrote them.
pub fn holds(v: &Volume, f: &OpenFile, size: u64) {
    assert_eq!(v.getattr(f.ino()).unwrap().size, size, "inode {}", f.ino());
    let mut got = vec![0; MIB as usize];
    for n in 0..size.div_ceil(MIB) {
        let len = v.read(f, n * MIB, &mut got).unwrap();
        assert_eq!(len as u64, (size - n * MIB).min(MIB), "MiB {n} of inode {}", f.ino());
        assert!(got[..len] == piece(n)[..len], "MiB {n} of inode {} is another", f.ino());
    }
}

/// Has threads stop, also where the one that they work for fails: the test would not end.
pub struct Ended<'a>(pub &'a AtomicBool);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Does `change` beside so many threads, which go round by round until it is done, three times at least. Who a thread is,
/// and its round, it is told.
pub fn beside(threads: u8, round: impl Fn(u8, u64) + Sync, change: impl FnOnce()) {
    let done = AtomicBool::new(false);
    std::thread::scope(|s| {
        for n in 0..threads {
            let (round, done) = (&round, &done);
            s.spawn(move || {
                let mut at = 0;
                while !done.load(Ordering::Relaxed) || at < 3 {
                    round(n, at);
                    at += 1;
                }
            });
        }
        let _ended = Ended(&done);
        change();
    });
}
