//! Many threads change names of one directory ([`braidfs_testkit::shared_dir`]), each its own ones or all the same.

use braidfs::{Cred, Error, FileKind, InodeNo, MkfsOptions, MountOptions, Placement, RenameMode, Volume, mkfs};
use braidfs_device::{Device, MemDevice};
use braidfs_testkit::env_number;
use braidfs_testkit::shared_dir::{NAMES, listed, new, run};
use braidfs_testkit::walk::fsck;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

mod tests {
    use super::*;

    const NONE: Vec<String> = Vec::new();

    #[test]
    fn names_of_many_threads() {
        NAMES.iter().for_each(|n| assert_eq!(run(Placement::Inherit, *n, false), NONE));
    }

    #[test]
    fn names_of_many_threads_after_a_crash() {
        NAMES.iter().for_each(|n| assert_eq!(run(Placement::Inherit, *n, true), NONE));
    }

    #[test]
    fn files_of_several_domains() {
        assert_eq!(run(Placement::Spread, NAMES[0], false), NONE);
        assert_eq!(run(Placement::Spread, NAMES[0], true), NONE);
    }
}

/// Several threads make, move and remove the same names: who wins is open, but each name is had by one at a time.
mod in_common {
    use super::*;
    use std::sync::atomic::AtomicI64;

    /// More than a volume on a small machine has slots for threads.
    const MANY: usize = 24;
    const NAMES: usize = 60;

    fn name(n: usize) -> Vec<u8> {
        format!("{n:03}{}", "-".repeat(100)).into_bytes()
    }

    /// Whether it was done; any other reason than that the name is there, or not there, is none.
    fn done<T>(r: braidfs::Result<T>) -> bool {
        match r {
            Ok(_) => true,
            Err(Error::Exists | Error::NotFound) => false,
            Err(e) => panic!("{e}"),
        }
    }

    #[test]
    fn the_same_names() {
        let device: Arc<dyn Device> = Arc::new(MemDevice::soiled((64 << 20) / 4096));
        let options = MkfsOptions { domains: Some(3), placement: Placement::Spread, ..MkfsOptions::default() };
        mkfs::format(std::slice::from_ref(&device), &options).unwrap();
        let options = || MountOptions { background: false, share_dirs: true, ..MountOptions::default() };
        let v = Volume::mount(vec![device.clone()], options()).unwrap();
        let dir = |name: &[u8]| v.create(InodeNo::ROOT, name, &new(FileKind::Dir), &Cred::root()).unwrap().ino;
        let (a, b) = (dir(b"a"), dir(b"b"));
        for d in [a, b] {
            for n in 0..40 {
                let name = format!("kept{n}{}", "-".repeat(200));
                v.create(d, name.as_bytes(), &new(FileKind::File), &Cred::root()).unwrap();
            }
        }
        // of each name in each directory: how often it came, less how often it went
        let had: Vec<[AtomicI64; 2]> = (0..NAMES).map(|_| Default::default()).collect();
        let stop = AtomicBool::new(false);
        let ops = env_number("BRAIDFS_THREAD_OPS", 6_000) / 4;
        std::thread::scope(|s| {
            let threads: Vec<_> = (0..MANY)
                .map(|me| {
                    let (v, had) = (&v, &had);
                    s.spawn(move || {
                        let mut random = fastrand::Rng::with_seed(me as u64);
                        let mut last = v.getattr(a).map(|x| (x.mtime, x.ctime)).unwrap();
                        for _ in 0..ops {
                            let (n, m, side) = (random.usize(..NAMES), random.usize(..NAMES), random.usize(..2));
                            let (d, e) = if side == 0 { (a, b) } else { (b, a) };
                            let kind = if random.u8(..16) == 0 { FileKind::Dir } else { FileKind::File };
                            match random.u8(..10) {
                                0..4 if done(v.create(d, &name(n), &new(kind), &Cred::root())) => {
                                    had[n][side].fetch_add(1, SeqCst);
                                }
                                4..7 => match v.unlink(d, &name(n)) {
                                    Err(Error::IsDir)
                                        if done(v.rmdir(d, &name(n)).map_err(|e| match e {
                                            // somebody put a file there meanwhile
                                            Error::NotDir => Error::NotFound,
                                            e => e,
                                        })) =>
                                    {
                                        had[n][side].fetch_sub(1, SeqCst);
                                    }
                                    Err(Error::IsDir) => {}
                                    r => {
                                        had[n][side].fetch_sub(i64::from(done(r)), SeqCst);
                                    }
                                },
                                7..9 if done(v.rename(d, &name(n), e, &name(m), RenameMode::NoReplace)) => {
                                    had[n][side].fetch_sub(1, SeqCst);
                                    had[m][1 - side].fetch_add(1, SeqCst);
                                }
                                9 => {
                                    let _ = v.rename(d, &name(n), e, &name(n), RenameMode::Exchange);
                                }
                                _ => {}
                            }
                            let now = v.getattr(a).map(|x| (x.mtime, x.ctime)).unwrap();
                            assert!(now.0 >= last.0 && now.1 >= last.1, "{now:?} after {last:?}");
                            last = now;
                        }
                    })
                })
                .collect();
            let (v, stop) = (&v, &stop);
            s.spawn(move || {
                for n in 0u16.. {
                    if stop.load(SeqCst) {
                        break;
                    }
                    v.commit_domain(braidfs::DomainId(n % 3), n.is_multiple_of(7)).unwrap();
                    for d in [a, b] {
                        let kept = listed(v, d).keys().filter(|n| n.starts_with("kept")).count();
                        assert_eq!(kept, 40);
                    }
                    std::thread::sleep(std::time::Duration::from_millis(5));
                }
            });
            let all: Vec<_> = threads.into_iter().map(|t| t.join()).collect();
            stop.store(true, SeqCst);
            all.into_iter().for_each(|r| r.unwrap());
        });
        println!("{} names changed beside others", v.changed_beside());
        assert!(v.changed_beside() > 1000);
        for (n, had) in had.iter().enumerate() {
            for (side, d) in [a, b].into_iter().enumerate() {
                let there = done(v.lookup(d, &name(n)));
                assert_eq!(had[side].load(SeqCst), i64::from(there), "name {n} of directory {side}");
            }
        }
        let names = |v: &Volume| [a, b].map(|d| listed(v, d));
        let before = names(&v);
        v.unmount().unwrap();
        let v = Volume::mount(vec![device.clone()], options()).unwrap();
        assert_eq!(names(&v), before);
        // what is removed leaves nothing
        for (d, names) in [a, b].into_iter().zip(before) {
            for name in names.keys() {
                v.unlink(d, name.as_bytes()).or_else(|_| v.rmdir(d, name.as_bytes())).unwrap();
            }
        }
        v.rmdir(InodeNo::ROOT, b"a").unwrap();
        v.rmdir(InodeNo::ROOT, b"b").unwrap();
        v.unmount().unwrap();
        fsck(std::slice::from_ref(&device)).unwrap();
    }

    /// Whether a name is taken needs neither a number nor a block.
    #[test]
    fn a_name_that_is_taken_on_a_full_volume() {
        let device: Arc<dyn Device> = Arc::new(MemDevice::soiled((24 << 20) / 4096));
        let options = MkfsOptions { domains: Some(1), ..MkfsOptions::default() };
        mkfs::format(std::slice::from_ref(&device), &options).unwrap();
        let options = || MountOptions { background: false, share_dirs: true, ..MountOptions::default() };
        let v = Volume::mount(vec![device.clone()], options()).unwrap();
        let d = v.create(InodeNo::ROOT, b"a", &new(FileKind::Dir), &Cred::root()).unwrap().ino;
        for n in 0..60 {
            v.create(d, &name(n), &new(FileKind::File), &Cred::root()).unwrap();
        }
        v.unmount().unwrap();
        let v = Volume::mount(vec![device.clone()], options()).unwrap();
        // all buckets are in memory, and the directory is shared
        assert_eq!(listed(&v, d).len(), 60);
        v.create(d, b"first", &new(FileKind::File), &Cred::root()).unwrap();
        let made = v.create(d, b"big", &new(FileKind::File), &Cred::root()).unwrap().ino;
        let f = v.open(made).unwrap();
        let full = |at: u64, len: usize| matches!(v.write(&f, at, &vec![1; len]), Err(Error::NoSpace));
        let at = (0u64..100).find(|i| full(i << 20, 1 << 20)).expect("it never is full") << 20;
        let at = (0u64..512).map(|i| at + (i << 12)).find(|at| full(*at, 4096)).unwrap();
        assert!(full(at, 4096));
        // what data leaves goes for inodes
        let more = |n: usize| v.create(d, format!("more{n}").as_bytes(), &new(FileKind::File), &Cred::root());
        let fails = (0..100_000).find_map(|n| more(n).err()).expect("it never is full");
        assert!(matches!(fails, Error::NoSpace), "{fails:?}");
        // nobody has looked the names up
        for n in 0..60 {
            let got = v.create(d, &name(n), &new(FileKind::File), &Cred::root());
            assert!(matches!(got, Err(Error::Exists)), "{n}: {got:?}");
        }
        drop(f);
        v.unmount().unwrap();
        fsck(std::slice::from_ref(&device)).unwrap();
    }
}
