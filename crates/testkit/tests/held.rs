//! Inodes that are held by number, as a kernel holds what it was told of: against removals by other threads, under a
//! background committer, with cells that leave memory, over domains, and across a crash.
//!
//! `BRAIDFS_SEED`. Not deterministic: the seed repeats the operations, not their order.

use braidfs::{
    Cred, Error, FileKind, InodeNo, MkfsOptions, MountOptions, NewNode, Placement, RenameMode, Volume, mkfs,
};
use braidfs_device::{Device, Keep, MemDevice, RecordDevice};
use braidfs_testkit::env_number;
use braidfs_testkit::walk::{fsck, walk};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

const ROOT: InodeNo = InodeNo::ROOT;
/// How long threads run.
const SECONDS: Duration = Duration::from_secs(2);

fn new(kind: FileKind) -> NewNode<'static> {
    NewNode { kind, mode: 0o755, umask: 0, rdev: 0, target: b"" }
}

fn mount(device: &Arc<dyn Device>, cache_bytes: u64) -> Volume {
    let options = MountOptions {
        commit_interval: Duration::from_millis(10),
        background: true,
        cache_bytes,
        ..MountOptions::default()
    };
    Volume::mount(vec![device.clone()], options).unwrap()
}

fn made(domains: u16) -> Arc<MemDevice> {
    let device = Arc::new(MemDevice::soiled(65536));
    let options = MkfsOptions { domains: Some(domains), placement: Placement::Spread, ..MkfsOptions::default() };
    mkfs::format(&[device.clone() as Arc<dyn Device>], &options).unwrap();
    device
}

/// Any answer but a broken volume's.
fn sane<T>(r: Result<T, Error>) {
    if let Err(e @ (Error::Io(_) | Error::Corrupt(_) | Error::DomainFailed { .. })) = r {
        panic!("{e}");
    }
}

#[test]
fn what_is_held_is_not_lost_to_other_threads() {
    let device: Arc<dyn Device> = made(4);
    let v = mount(&device, 1 << 20);
    let dirs: Vec<InodeNo> = (0..4)
        .map(|n| v.create(ROOT, format!("d{n}").as_bytes(), &new(FileKind::Dir), &Cred::root()).unwrap().ino)
        .collect();
    let seed = env_number("BRAIDFS_SEED", 1);
    let (met, ended) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|s| {
        for t in 0..3 {
            let (v, dirs, ended) = (&v, &dirs, &ended);
            s.spawn(move || {
                let mut r = fastrand::Rng::with_seed(seed * 100 + t);
                while ended.load(Relaxed) < 2 {
                    let (a, b) = (dirs[r.u64(..4) as usize], dirs[r.u64(..4) as usize]);
                    let (x, y) = ([b'a' + r.u64(..3) as u8], [b'a' + r.u64(..3) as u8]);
                    match r.u64(..7) {
                        0 => sane(v.create(a, &x, &new(FileKind::Dir), &Cred::root())),
                        1 | 2 => sane(v.create(a, &x, &new(FileKind::File), &Cred::root())),
                        3 => sane(v.unlink(a, &x)),
                        4 => sane(v.rmdir(a, &x)),
                        5 => sane(v.rename(a, &x, b, &y, RenameMode::Replace)),
                        _ => sane(v.rename(a, &x, b, &y, RenameMode::Exchange)),
                    }
                }
            });
        }
        for t in 0..2 {
            let (v, dirs, met, ended) = (&v, &dirs, &met, &ended);
            s.spawn(move || {
                let mut r = fastrand::Rng::with_seed(seed * 100 + 50 + t);
                let mut mine = Vec::new();
                // a busy machine may take longer to meet any
                let begun = Instant::now();
                while begun.elapsed() < SECONDS || (met.load(Relaxed) == 0 && begun.elapsed() < 30 * SECONDS) {
                    if let Ok(a) = v.lookup_held(dirs[r.u64(..4) as usize], &[b'a' + r.u64(..3) as u8]) {
                        mine.push(a);
                    }
                    if r.u64(..200) == 0 {
                        sane(v.readdir_held(dirs[r.u64(..4) as usize], 0, &mut |_, attr| {
                            mine.extend(attr.copied());
                            true
                        }));
                    }
                    if mine.len() > 100 || r.u64(..30) == 0 {
                        for a in mine.drain(..) {
                            let now = v.getattr(a.ino).unwrap_or_else(|e| panic!("held {} is lost: {e}", a.ino));
                            assert_eq!(now.generation, a.generation, "the number of a held inode was given again");
                            met.fetch_add(usize::from(now.nlink == 0), Relaxed);
                            v.forget(a.ino, |g| g == a.generation, 1);
                        }
                    }
                }
                for a in mine {
                    v.forget(a.ino, |g| g == a.generation, 1);
                }
                ended.fetch_add(1, Relaxed);
            });
        }
    });
    assert!(met.load(Relaxed) > 0, "no inode was removed while it was held");
    let s = v.held();
    assert_eq!((s.inodes, s.orphans, s.excess), (0, 0, 0));
    walk(&v).unwrap();
    v.unmount().unwrap();
    fsck(std::slice::from_ref(&device)).unwrap();
}

#[test]
fn many_orphans_that_are_held_leave_memory_and_come_back() {
    let record = Arc::new(RecordDevice::new(made(2).snapshot()));
    let device: Arc<dyn Device> = record.clone();
    let v = mount(&device, 1 << 20);
    // as much as a commit's list of orphans may have to hold at once
    let count = 6000;
    v.sync().unwrap();
    let free = v.statfs();
    let mut held = Vec::new();
    for n in 0..count {
        let kind = if n % 5 == 0 { FileKind::Dir } else { FileKind::File };
        let name = format!("n{n}");
        let a = v.create(ROOT, name.as_bytes(), &new(kind), &Cred::root()).unwrap();
        v.hold(a.ino, |g| g == a.generation).unwrap();
        if kind == FileKind::File {
            v.write(&v.open(a.ino).unwrap(), 0, &[n as u8; 5000]).unwrap();
            v.unlink(ROOT, name.as_bytes()).unwrap();
        } else {
            v.rmdir(ROOT, name.as_bytes()).unwrap();
        }
        held.push(a);
    }
    v.sync().unwrap();
    let all = record.log_len();
    assert_eq!(v.held().orphans, count);
    for (n, a) in held.iter().enumerate() {
        let now = v.getattr(a.ino).unwrap();
        assert_eq!((now.generation, now.nlink), (a.generation, 0));
        if n % 5 != 0 {
            let mut buf = [0; 5000];
            assert_eq!(v.read(&v.open(a.ino).unwrap(), 0, &mut buf).unwrap(), 5000);
            assert_eq!(buf, [n as u8; 5000]);
        }
    }
    let (first, rest) = held.split_at(count / 2);
    for a in first {
        v.forget(a.ino, |g| g == a.generation, 1);
    }
    assert!(first.iter().all(|a| v.getattr(a.ino).map_or(true, |now| now.generation != a.generation)));
    v.sync().unwrap();
    let half = record.log_len();
    v.crash();
    // all were held when it crashed, or the rest was; what no flush covered is lost
    for (upto, held) in [(all, &held[..]), (half, rest)] {
        let device: Arc<dyn Device> = Arc::new(record.crash_image(upto, &mut |_| Keep::None));
        let v = mount(&device, 1 << 20);
        assert!(held.iter().all(|a| v.getattr(a.ino).map_or(true, |now| now.generation != a.generation)));
        v.unmount().unwrap();
        let v = mount(&device, 1 << 20);
        let now = v.statfs();
        assert_eq!(now.inodes_free, free.inodes_free);
        assert!(now.free + 64 >= free.free, "{} blocks less free", free.free - now.free);
        v.unmount().unwrap();
        fsck(std::slice::from_ref(&device)).unwrap();
    }
}
