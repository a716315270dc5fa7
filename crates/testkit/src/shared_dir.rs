//! Many threads make, remove and rename names in one directory, each its own ones, while another one commits: what each
//! thread did is what the directory says, at once, at the end, after a crash and after a mount.
//!
//! `BRAIDFS_SEED`, `BRAIDFS_THREAD_OPS` (per thread, default 6 000). Not deterministic: the seed repeats the operations, not
//! their order.

use crate::env_number;
use crate::states::{Log, since};
use crate::walk::fsck;
use braidfs::{
    Cred, Error, FileKind, InodeNo, MkfsOptions, MountOptions, NewNode, Placement, RenameMode, Volume, mkfs,
};
use braidfs_device::{Device, MemDevice, RecordDevice};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

const THREADS: u64 = 6;
/// At random, beside the one at the moment of the sync and the one at the end.
const CRASHES: usize = 6;
/// Names of each thread: with these a directory has some hundred buckets, or three.
pub const NAMES: [u64; 2] = [1500, 60];

/// A new inode of root's.
pub fn new(kind: FileKind) -> NewNode<'static> {
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

/// The names of a directory.
pub fn listed(v: &Volume, dir: InodeNo) -> BTreeMap<String, InodeNo> {
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

/// A run: half of the operations, a sync, some more, and a crash or the end. What was wrong after the next mount. The crashes come
/// when the sync had returned, or later, and lose what was not flushed, or a part of it.
pub fn run(placement: Placement, names: u64, crash: bool) -> Vec<String> {
    let seed = crate::seed();
    let ops = env_number("BRAIDFS_THREAD_OPS", 6_000);
    println!("BRAIDFS_SEED={seed}");
    let record = Arc::new(RecordDevice::soiled((256 << 20) / 4096));
    let device: Arc<dyn Device> = record.clone();
    let options = MkfsOptions { domains: Some(3), placement, ..MkfsOptions::default() };
    mkfs::format(std::slice::from_ref(&device), &options).unwrap();
    let v = mount(&device);
    let shared = v.create(InodeNo::ROOT, b"shared", &new(FileKind::Dir), &Cred::root()).unwrap().ino;
    let barrier = Barrier::new(THREADS as usize + 1);
    let stop = AtomicBool::new(false);
    let commits = |v: &Volume, n: u64| v.commit_domain(braidfs::DomainId((n % 3) as u16), n.is_multiple_of(7)).unwrap();
    let (all, synced): (Vec<_>, usize) = std::thread::scope(|s| {
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
        let synced = record.log_len();
        barrier.wait();
        let all = threads.into_iter().map(|t| t.join().unwrap()).collect();
        stop.store(true, SeqCst);
        committer.join().unwrap();
        (all, synced)
    });
    if !crash {
        assert_eq!(differing(&v, &all), Vec::<String>::new(), "before the end");
        v.unmount().unwrap();
        return after(&device, &all);
    }
    v.crash();
    let log = Log::of(&record);
    let mut random = fastrand::Rng::with_seed(seed);
    let wrong = since(&log, synced, CRASHES, &mut random).into_iter().find_map(|state| {
        let image: Arc<dyn Device> = Arc::new(MemDevice::from_image(log.image(&state)));
        let wrong = after(&image, &all);
        (!wrong.is_empty()).then(|| [vec![state.to_string()], wrong].concat())
    });
    wrong.unwrap_or_default()
}

/// Mounts it, with nothing in the background.
fn mount(device: &Arc<dyn Device>) -> Volume {
    Volume::mount(vec![device.clone()], MountOptions { background: false, ..MountOptions::default() }).unwrap()
}

/// What is wrong on the device after an unmount or a crash.
fn after(device: &Arc<dyn Device>, all: &[(Names, BTreeSet<String>)]) -> Vec<String> {
    let v = mount(device);
    let mut wrong = differing(&v, all);
    v.unmount().unwrap();
    wrong.extend(fsck(std::slice::from_ref(device)).err());
    wrong
}
