//! Many threads make, remove and rename names in one directory, each its own ones, while another one commits: what each
//! thread did is what the directory says, at once, at the end, after a crash and after a mount.
//!
//! `BRAIDFS_SEED`, `BRAIDFS_THREAD_OPS` (per thread, default 6 000). Not deterministic: the seed repeats the operations, not
//! their order. With the feature `planted-bugs`: that a bucket which a commit leaves out is seen.

use braidfs::{
    Cred, Error, FileKind, InodeNo, MkfsOptions, MountOptions, NewNode, Placement, RenameMode, Volume, mkfs,
};
use braidfs_device::{Device, MemDevice};
use braidfs_testkit::env_number;
use braidfs_testkit::walk::fsck;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

const THREADS: u64 = 6;
/// Names of each thread: with these a directory has some hundred buckets, or three.
const NAMES: [u64; 2] = [1500, 60];

fn new(kind: FileKind) -> NewNode<'static> {
    NewNode { kind, mode: 0o755, umask: 0, rdev: 0, target: b"" }
}

/// A thread: the numbers of the inodes that its names have, in the shared directory and in one of its own.
#[derive(Debug, Clone, Default)]
struct Names {
    shared: BTreeMap<String, InodeNo>,
    own: BTreeMap<String, InodeNo>,
}

struct Work<'v> {
    v: &'v Volume,
    shared: InodeNo,
    own: InodeNo,
    me: u64,
    names: Names,
    /// Names of the shared directory that changed since they were looked at last.
    changed: BTreeSet<String>,
    random: fastrand::Rng,
}

impl Work<'_> {
    fn name(&mut self, names: u64) -> String {
        // long ones fill a bucket soon
        let n = self.random.u64(0..names);
        format!("{}.{n}{}", self.me, "-".repeat((n % 40) as usize))
    }
    fn look(&self, dir: InodeNo, name: &str) -> Option<InodeNo> {
        match self.v.lookup(dir, name.as_bytes()) {
            Ok(a) => Some(a.ino),
            Err(Error::NotFound) => None,
            Err(e) => panic!("{name}: {e}"),
        }
    }
    /// One operation on names of its own, whose answer is known.
    fn step(&mut self, names: u64) {
        let (v, shared, own) = (self.v, self.shared, self.own);
        let (a, b) = (self.name(names), self.name(names));
        let made = |r: braidfs::Result<braidfs::Attr>| match r {
            Ok(a) => Some(a.ino),
            Err(Error::Exists) => None,
            Err(e) => panic!("{e}"),
        };
        let mv = |from: InodeNo, a: &str, to: InodeNo, b: &str, mode| match v.rename(
            from,
            a.as_bytes(),
            to,
            b.as_bytes(),
            mode,
        ) {
            Ok(()) => true,
            Err(Error::NotFound | Error::Exists) => false,
            Err(e) => panic!("{a} to {b}: {e}"),
        };
        self.changed.extend([a.clone(), b.clone()]);
        let times = || v.getattr(shared).map(|a| (a.mtime, a.ctime)).unwrap();
        let before = times();
        let Names { shared: here, own: there } = &mut self.names;
        match self.random.u32(0..16) {
            0..=5 => {
                let got = made(v.create(shared, a.as_bytes(), &new(FileKind::File), &Cred::root()));
                assert_eq!(got.is_some(), !here.contains_key(&a), "create {a}");
                here.extend(got.map(|ino| (a.clone(), ino)));
            }
            6..=9 => {
                let got = v.unlink(shared, a.as_bytes());
                assert_eq!(got.is_ok(), here.remove(&a).is_some(), "unlink {a}: {got:?}");
            }
            10 => {
                let got = made(v.create(own, b.as_bytes(), &new(FileKind::File), &Cred::root()));
                assert_eq!(got.is_some(), !there.contains_key(&b), "create {b} apart");
                there.extend(got.map(|ino| (b.clone(), ino)));
            }
            // from its own directory to the shared one, the other way, and within
            11 => {
                let free = !here.contains_key(&a);
                let moved = mv(own, &b, shared, &a, RenameMode::NoReplace);
                assert_eq!(moved, free && there.contains_key(&b), "{b} to {a}");
                if moved {
                    here.extend(there.remove(&b).map(|ino| (a.clone(), ino)));
                }
            }
            12 => {
                let moved = mv(shared, &a, own, &b, RenameMode::Replace);
                assert_eq!(moved, here.contains_key(&a), "{a} to {b} apart");
                // two names of one inode both stay
                if moved && here.get(&a) != there.get(&b) {
                    there.extend(here.remove(&a).map(|ino| (b.clone(), ino)));
                }
            }
            13 => {
                let moved = mv(shared, &a, shared, &b, RenameMode::Replace);
                assert_eq!(moved, here.contains_key(&a), "{a} to {b}");
                if here.get(&a) != here.get(&b)
                    && let Some(ino) = here.remove(&a)
                {
                    here.insert(b.clone(), ino);
                }
            }
            14 => {
                let both = here.contains_key(&a) && there.contains_key(&b);
                assert_eq!(mv(shared, &a, own, &b, RenameMode::Exchange), both, "{a} and {b}");
                if both {
                    let (x, y) = (here[&a], there[&b]);
                    here.insert(a.clone(), y);
                    there.insert(b.clone(), x);
                }
            }
            _ => {
                let got = here.get(&a).map(|ino| made(v.link(*ino, shared, b.as_bytes())));
                if let Some(got) = got {
                    assert_eq!(got.is_some(), !here.contains_key(&b), "link {a} {b}");
                    here.extend(got.map(|ino| (b.clone(), ino)));
                }
            }
        }
        // whoever changed it: nobody sets it back
        assert!(times() >= before, "{:?} after {before:?}", times());
        assert_eq!(self.look(shared, &a), self.names.shared.get(&a).copied(), "{a}");
        assert_eq!(self.look(shared, &b), self.names.shared.get(&b).copied(), "{b}");
    }
}

fn listed(v: &Volume, dir: InodeNo) -> BTreeMap<String, InodeNo> {
    let mut all = BTreeMap::new();
    v.readdir(dir, 0, &mut |e| {
        if e.name != b"." && e.name != b".." {
            assert_eq!(all.insert(String::from_utf8(e.name.to_vec()).unwrap(), e.ino), None, "listed twice");
        }
        true
    })
    .unwrap();
    all
}

/// What differs between the directories and what the threads know, but for names that changed since.
fn differing(v: &Volume, all: &[(Names, BTreeSet<String>)]) -> Vec<String> {
    let shared = v.lookup(InodeNo::ROOT, b"shared").unwrap().ino;
    let changed: BTreeSet<&String> = all.iter().flat_map(|(_, changed)| changed).collect();
    let there = listed(v, shared);
    let known: BTreeMap<&String, InodeNo> = all.iter().flat_map(|(n, _)| &n.shared).map(|(n, ino)| (n, *ino)).collect();
    let mut wrong: Vec<String> =
        known.iter().filter(|(n, _)| !changed.contains(*n)).map(|(n, _)| (*n).clone()).collect();
    wrong.retain(|n| {
        there.get(n) != known.get(n) || v.lookup(shared, n.as_bytes()).map(|a| a.ino).ok() != there.get(n).copied()
    });
    wrong.extend(there.keys().filter(|n| !known.contains_key(n) && !changed.contains(n)).cloned());
    wrong
}

/// A run: half of the operations, a sync, some more, and a crash or the end. What was wrong after the next mount.
fn run(placement: Placement, names: u64, crash: bool) -> Vec<String> {
    let seed = braidfs_testkit::seed();
    let ops = env_number("BRAIDFS_THREAD_OPS", 6_000);
    println!("BRAIDFS_SEED={seed}");
    let device: Arc<dyn Device> = Arc::new(MemDevice::new((256 << 20) / 4096));
    let options = MkfsOptions { domains: Some(3), placement, ..MkfsOptions::default() };
    mkfs::format(std::slice::from_ref(&device), &options).unwrap();
    let mount = || Volume::mount(vec![device.clone()], MountOptions { background: false, ..MountOptions::default() });
    let v = mount().unwrap();
    let shared = v.create(InodeNo::ROOT, b"shared", &new(FileKind::Dir), &Cred::root()).unwrap().ino;
    let barrier = Barrier::new(THREADS as usize + 1);
    let stop = AtomicBool::new(false);
    let commits = |v: &Volume, n: u64| v.commit_domain(braidfs::DomainId((n % 3) as u16), n.is_multiple_of(7)).unwrap();
    let all: Vec<_> = std::thread::scope(|s| {
        let threads: Vec<_> = (0..THREADS)
            .map(|me| {
                let (v, barrier) = (&v, &barrier);
                s.spawn(move || {
                    let own = format!("own{me}");
                    let own = v.create(InodeNo::ROOT, own.as_bytes(), &new(FileKind::Dir), &Cred::root()).unwrap().ino;
                    let random = fastrand::Rng::with_seed(seed.wrapping_add(me));
                    let (names_of_mine, changed) = Default::default();
                    let mut w = Work { v, shared, own, me, names: names_of_mine, changed, random };
                    for _ in 0..ops {
                        w.step(names);
                        // also with one processor the threads take turns, and the directory is shared
                        std::thread::yield_now();
                    }
                    barrier.wait();
                    // the other thread syncs
                    barrier.wait();
                    let synced = w.names.clone();
                    w.changed.clear();
                    if crash {
                        // names that a commit takes, or does not
                        (0..ops / 20).for_each(|_| w.step(names));
                    }
                    (synced, w.changed)
                })
            })
            .collect();
        let (v, stop) = (&v, &stop);
        let committer = s.spawn(move || {
            let mut n = 0;
            while !stop.load(SeqCst) {
                commits(v, n);
                n += 1;
                std::thread::sleep(std::time::Duration::from_millis(15));
            }
        });
        barrier.wait();
        v.sync().unwrap();
        barrier.wait();
        let all = threads.into_iter().map(|t| t.join().unwrap()).collect();
        stop.store(true, SeqCst);
        committer.join().unwrap();
        all
    });
    if crash {
        v.crash();
    } else {
        assert_eq!(differing(&v, &all), Vec::<String>::new(), "before the end");
        v.unmount().unwrap();
    }
    let v = mount().unwrap();
    let mut wrong = differing(&v, &all);
    v.unmount().unwrap();
    wrong.extend(fsck(std::slice::from_ref(&device)).err());
    wrong
}

#[cfg(not(feature = "planted-bugs"))]
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
#[cfg(not(feature = "planted-bugs"))]
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
        let device: Arc<dyn Device> = Arc::new(MemDevice::new((64 << 20) / 4096));
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
        let device: Arc<dyn Device> = Arc::new(MemDevice::new((24 << 20) / 4096));
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

#[cfg(feature = "planted-bugs")]
#[test]
fn a_bucket_that_a_commit_leaves_out_is_seen() {
    use braidfs::planted::{Bug, plant};
    plant(Some(Bug::BucketLeftOut));
    let wrong = run(Placement::Inherit, NAMES[0], true);
    plant(None);
    assert!(!wrong.is_empty());
}
