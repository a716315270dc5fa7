//! One file that several threads overwrite, with and without a scheduler: no write is torn or lost, not by readers, not by
//! commits, and not by a crash.
//!
//! `BRAIDFS_SEED`, `BRAIDFS_THREAD_OPS` (per thread, default 20 000) for real threads; `BRAIDFS_SHARED_RUNS` (default 60) for
//! runs under the scheduler.

use braidfs::{Cred, FileKind, MkfsOptions, MountOptions, NewNode, NodeId, OpenFile, SetAttr, Volume, mkfs};
use braidfs_device::{Device, MemDevice};
use braidfs_testkit::env_number;
use braidfs_testkit::walk::fsck;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

const PAGE: usize = 4096;
/// Pages that all write, always all of them.
const COMMON: usize = 3;
const THREADS: usize = 3;
/// The common pages, and one of each thread.
const PAGES: usize = COMMON + THREADS;

/// Content that says which write it is of.
fn stamped(stamp: u64, pages: usize) -> Vec<u8> {
    stamp.to_le_bytes().repeat(pages * PAGE / 8)
}

/// The stamps of some pages, or of the words of them, where they are not the same.
fn stamps(bytes: &[u8]) -> Vec<u64> {
    let mut all: Vec<u64> = bytes.as_chunks::<8>().0.iter().map(|w| u64::from_le_bytes(*w)).collect();
    all.dedup();
    all
}

fn create(v: &Volume) -> NodeId {
    let file = NewNode { kind: FileKind::File, mode: 0o644, umask: 0, rdev: 0, target: b"" };
    let ino = v.create(NodeId::ROOT, b"f", &file, &Cred::root()).unwrap().ino;
    let f = v.open(ino).unwrap();
    v.write(&f, 0, &stamped(0, PAGES)).unwrap();
    v.sync().unwrap();
    ino
}

/// The common pages, as one read finds them.
fn common(v: &Volume, f: &OpenFile) -> Vec<u64> {
    let mut buf = vec![0; COMMON * PAGE];
    assert_eq!(v.read(f, 0, &mut buf).unwrap(), buf.len());
    stamps(&buf)
}

/// Two that overwrite, two that look, and one that does all else to the file that concerns its pages, over many commits.
fn overwritten_over_commits(cached_above: bool) {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new((128 << 20) / 4096));
    mkfs::format(std::slice::from_ref(&device), &MkfsOptions { domains: Some(1), ..MkfsOptions::default() }).unwrap();
    let options = MountOptions {
        commit_interval: Duration::from_millis(5),
        background: true,
        cached_above,
        ..MountOptions::default()
    };
    let v = Volume::mount(vec![device.clone()], options.clone()).unwrap();
    let ino = create(&v);
    let ops = env_number("BRAIDFS_THREAD_OPS", 20_000) * 5;
    let (stop, next) = (AtomicBool::new(false), AtomicU64::new(1));
    // the last of its own page that each thread wrote
    let own: Vec<u64> = std::thread::scope(|s| {
        let writers: Vec<_> = (0..2)
            .map(|t| {
                let (v, next) = (&v, &next);
                s.spawn(move || {
                    let f = v.open(ino).unwrap();
                    let mut last = 0;
                    for n in 0..ops {
                        let stamp = next.fetch_add(1, SeqCst);
                        if n % 3 == 0 {
                            assert_eq!(v.write(&f, 0, &stamped(stamp, COMMON)).unwrap(), COMMON * PAGE);
                        } else {
                            let at = ((COMMON + t) * PAGE) as u64;
                            v.write(&f, at, &stamped(stamp, 1)).unwrap();
                            last = stamp;
                        }
                    }
                    last
                })
            })
            .collect();
        let others = [
            s.spawn(|| {
                let f = v.open(ino).unwrap();
                while !stop.load(SeqCst) {
                    let seen = common(&v, &f);
                    assert!(seen.len() == 1, "torn: {seen:?}");
                }
            }),
            s.spawn(|| {
                let f = v.open(ino).unwrap();
                let mut buf = vec![0; PAGE];
                while !stop.load(SeqCst) {
                    // each writer's own page never goes back
                    let mut last = [0; 2];
                    for _ in 0..1000 {
                        for (t, last) in last.iter_mut().enumerate() {
                            v.read(&f, ((COMMON + t) * PAGE) as u64, &mut buf).unwrap();
                            let seen = stamps(&buf);
                            assert!(seen.len() == 1 && seen[0] >= *last, "{seen:?} after {last}");
                            *last = seen[0];
                        }
                    }
                }
            }),
            s.spawn(|| {
                let f = v.open(ino).unwrap();
                let mut n = 0u64;
                while !stop.load(SeqCst) {
                    n += 1;
                    match n % 5 {
                        0 => v.fsync(ino, n.is_multiple_of(2)).unwrap(),
                        1 => _ = v.append(&f, &[7; 100]).unwrap(),
                        2 => {
                            let size = Some((PAGES * PAGE) as u64 + n % 9000);
                            _ = v.setattr(ino, &SetAttr { size, ..SetAttr::default() }).unwrap();
                        }
                        3 => _ = v.setattr(ino, &SetAttr { mode: Some(0o600), ..SetAttr::default() }).unwrap(),
                        _ => std::thread::sleep(Duration::from_millis(n % 4)),
                    }
                }
            }),
        ];
        let own = writers.into_iter().map(|t| t.join()).collect::<Vec<_>>();
        stop.store(true, SeqCst);
        others.into_iter().for_each(|t| t.join().unwrap());
        own.into_iter().map(|r| r.unwrap()).collect()
    });
    assert!(v.domains().iter().all(|d| d.failed.is_none()));
    let look = |v: &Volume| {
        let f = v.open(ino).unwrap();
        let mut buf = vec![0; PAGES * PAGE];
        v.read(&f, 0, &mut buf).unwrap();
        buf
    };
    let before = look(&v);
    for (t, last) in own.iter().enumerate() {
        assert_eq!(stamps(&before[(COMMON + t) * PAGE..][..PAGE]), [*last]);
    }
    v.unmount().unwrap();
    fsck(std::slice::from_ref(&device)).unwrap();
    let v = Volume::mount(vec![device], options).unwrap();
    assert!(look(&v) == before, "what was written is there after a mount");
    v.unmount().unwrap();
}

#[test]
fn threads_overwrite_one_file_over_commits() {
    overwritten_over_commits(false);
}

#[test]
fn threads_overwrite_one_file_whose_written_pages_are_given_up() {
    overwritten_over_commits(true);
}

#[cfg(feature = "schedule")]
mod crashes {
    use super::*;
    use braidfs::Timestamp;
    use braidfs::types::Overwrite;
    use braidfs_device::RecordDevice;
    use braidfs_sync::schedule;
    use braidfs_testkit::crash::threads::Switching;
    use braidfs_testkit::run::{Setup, quiet_mount};
    use braidfs_testkit::states::{self, Log};
    use std::sync::{Mutex, PoisonError};

    /// Operations of each thread.
    const OPS: usize = 40;
    /// Crashes of each run.
    const CRASHES: usize = 40;

    /// A clock whose ticks are longer than a run: nearly all overwrites change nothing but bytes.
    fn still() -> Timestamp {
        Timestamp { sec: 1_700_000_000, nsec: 0 }
    }

    fn options(setup: &Setup) -> MountOptions {
        MountOptions { clock: Some(still), ..quiet_mount(setup) }
    }

    /// What a thread did, from one moment to another, and the length of the log at both.
    #[derive(Clone, Copy, Debug)]
    struct Done {
        what: What,
        time: (u64, u64),
        log: (usize, usize),
    }

    #[derive(Clone, Copy, Debug, PartialEq)]
    enum What {
        /// Pages from the first to before the last.
        Write(usize, usize, u64),
        Sync,
    }

    #[derive(Default)]
    struct Notes {
        done: Mutex<Vec<Done>>,
        time: AtomicU64,
    }

    impl Notes {
        fn note<R>(&self, what: What, log: &dyn Fn() -> usize, f: impl FnOnce() -> R) -> R {
            let now = || self.time.fetch_add(1, SeqCst) + 1;
            let mut done = Done { what, time: (now(), u64::MAX), log: (log(), usize::MAX) };
            // one under way may be found by a crash
            let at = {
                let mut all = self.done.lock().unwrap_or_else(PoisonError::into_inner);
                all.push(done);
                all.len() - 1
            };
            let r = f();
            (done.time.1, done.log.1) = (now(), log());
            self.done.lock().unwrap_or_else(PoisonError::into_inner)[at] = done;
            r
        }
    }

    /// One thread's operations.
    fn work(v: &Volume, ino: NodeId, thread: usize, seed: u64, notes: &Notes, log: &dyn Fn() -> usize) {
        let mut rng = fastrand::Rng::with_seed(seed * 31 + thread as u64);
        let f = v.open(ino).unwrap();
        for n in 0..OPS {
            let stamp = (thread * OPS + n + 1) as u64;
            match rng.u8(..20) {
                0..8 => {
                    let own = COMMON + thread;
                    let data = stamped(stamp, 1);
                    let at = (own * PAGE) as u64;
                    notes.note(What::Write(own, own + 1, stamp), log, || v.write(&f, at, &data).unwrap());
                }
                8..14 => {
                    let data = stamped(stamp, COMMON);
                    notes.note(What::Write(0, COMMON, stamp), log, || v.write(&f, 0, &data).unwrap());
                }
                14..17 => {
                    let seen = common(v, &f);
                    assert!(seen.len() == 1, "torn: {seen:?}");
                }
                17 => notes.note(What::Sync, log, || v.fsync(ino, rng.bool()).unwrap()),
                18 => notes.note(What::Sync, log, || v.sync().unwrap()),
                _ if rng.bool() => _ = v.append(&f, &[7; 100]).unwrap(),
                _ => _ = v.setattr(ino, &SetAttr { mode: Some(0o600), ..SetAttr::default() }).unwrap(),
            }
            schedule::point();
        }
    }

    /// Whether a page may hold what this write put there, after a crash with `upto` events. `None` is what was there first.
    fn allowed(all: &[Done], page: usize, stamp: u64, upto: usize) -> Result<(), String> {
        let on_page = |d: &Done| matches!(d.what, What::Write(a, b, _) if (a..b).contains(&page));
        let synced =
            all.iter().filter(|d| d.what == What::Sync && d.log.1 <= upto).map(|d| d.time.0).max().unwrap_or(0);
        let found = all.iter().find(|d| matches!(d.what, What::Write(.., s) if s == stamp));
        let end = match found {
            None if stamp == 0 => 0,
            Some(d) if on_page(d) && d.log.0 <= upto => d.time.1,
            _ => return Err(format!("stamp {stamp} was not written by then: {found:?}")),
        };
        // a write that a sync promised, which began after this one had ended
        match all.iter().find(|d| on_page(d) && d.time.1 < synced && end < d.time.0) {
            Some(lost) => Err(format!("{lost:?} is lost, which a sync from {synced} on promised; found {found:?}")),
            None => Ok(()),
        }
    }

    /// A run and crashes of it; how many states.
    fn run(seed: u64) -> usize {
        let setup = Setup { cache: 16 << 20, ..Setup::vary(seed) };
        let blank = Arc::new(MemDevice::new(setup.bytes / 4096));
        mkfs::format(&[blank.clone() as Arc<dyn Device>], &setup.mkfs).unwrap();
        let device = Arc::new(RecordDevice::new(blank.snapshot()));
        let switching: Arc<dyn Device> = Arc::new(Switching(device.clone()));
        let v = Volume::mount(vec![switching], options(&setup)).unwrap();
        let ino = create(&v);
        let (notes, begun) = (Notes::default(), device.log_len());
        let log = || device.log_len();
        let body = |t: usize| {
            let (v, notes, log) = (&v, &notes, &log);
            Box::new(move || work(v, ino, t, seed, notes, log)) as schedule::Body<'_, ()>
        };
        schedule::run(seed, (0..THREADS).map(body).collect());
        let all = notes.done.into_inner().unwrap();
        let log = Log::of(&device);
        v.crash();
        // blocks that an fsync overwrites where they lie may be found in part
        let in_place = setup.overwrite == Overwrite::Auto;
        let mut rng = fastrand::Rng::with_seed(!seed);
        let mut crashes = 0;
        while crashes < CRASHES {
            let crash = states::random(&log, &mut rng);
            if crash.upto < begun {
                continue;
            }
            crashes += 1;
            let device: Arc<dyn Device> = Arc::new(MemDevice::from_image(log.image(&crash)));
            let v = Volume::mount(vec![device], options(&setup)).unwrap();
            let mut buf = vec![0; PAGES * PAGE];
            assert_eq!(v.read(&v.open(ino).unwrap(), 0, &mut buf).unwrap(), buf.len());
            for page in 0..PAGES {
                let found = stamps(&buf[page * PAGE..][..PAGE]);
                assert!(in_place || found.len() == 1, "seed {seed}, {crash}: page {page} is torn: {found:?}");
                for stamp in found {
                    if let Err(e) = allowed(&all, page, stamp, crash.upto) {
                        panic!("seed {seed}, {crash}: page {page}: {e}");
                    }
                }
            }
            let range = stamps(&buf[..COMMON * PAGE]);
            assert!(in_place || range.len() == 1, "seed {seed}, {crash}: a write is there in part: {range:?}");
            v.crash();
        }
        crashes
    }

    #[test]
    fn every_crash_finds_whole_writes_and_what_was_synced() {
        let runs = env_number("BRAIDFS_SHARED_RUNS", 60);
        let first = env_number("BRAIDFS_SEED", 1);
        let crashes: usize = (first..first + runs).map(run).sum();
        println!("{crashes} crashes of {runs} runs");
    }
}
