//! Crashes of threads that overwrite, sync and clean one file, with a schedule from the seed. What is found of a page is of
//! a write that had begun, and not of an older one than a sync promised.

use super::threads::Switching;
use crate::run::{Setup, quiet_mount};
use crate::shared_file::{COMMON, PAGE, PAGES, THREADS, common, create, stamped, stamps};
use crate::states::{self, CrashState, Log};
use braidfs::{
    Cred, DataMode, FallocMode, FileKind, InodeNo, MountOptions, NewNode, Overwrite, Result as FsResult, SetAttr,
    SetTime, Timestamp, Volume, mkfs,
};
use braidfs_device::{Device, MemDevice, RecordDevice, WriteOp};
use braidfs_sync::schedule;
use std::collections::BTreeSet;
use std::io;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};

/// Operations of each thread.
const OPS: usize = 40;
/// Crashes of each run at random, and as many at most as soon as a sync has returned.
const CRASHES: usize = 20;

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

/// A device at which every few batches and flushes the thread waits long: others write, sync and commit meanwhile.
#[derive(Debug)]
struct Slow {
    device: Switching,
    calls: AtomicUsize,
}

impl Slow {
    fn wait(&self) {
        if self.calls.fetch_add(1, SeqCst).is_multiple_of(WAITS) {
            (0..TURNS).for_each(|_| schedule::point());
        }
    }
}

/// One of so many batches and flushes waits, for so many turns.
const WAITS: usize = 3;
const TURNS: usize = 60;

impl Device for Slow {
    fn blocks(&self) -> u64 {
        self.device.blocks()
    }
    fn read(&self, block: u64, buf: &mut [u8]) -> io::Result<()> {
        self.device.read(block, buf)
    }
    fn write_batch(&self, ops: &[WriteOp<'_>]) -> io::Result<()> {
        self.wait();
        self.device.write_batch(ops)
    }
    fn flush(&self) -> io::Result<()> {
        self.wait();
        self.device.flush()
    }
    fn discard(&self, block: u64, blocks: u64) -> io::Result<()> {
        self.device.discard(block, blocks)
    }
    fn name(&self) -> String {
        self.device.name()
    }
}

/// Blocks of the file that fills the segment in which the shared one lies, and how many of them go again: the cleaner has
/// something to do.
const FILLER: u64 = 700;
const HOLE: u64 = 420;

/// Makes a file behind the shared one, and most of what lies in the same segment free.
fn fill(v: &Volume) -> FsResult<()> {
    let file = NewNode { kind: FileKind::File, mode: 0o644, umask: 0, rdev: 0, target: b"" };
    let f = v.open(v.create(InodeNo::ROOT, b"g", &file, &Cred::root())?.ino)?;
    v.write(&f, 0, &vec![1; FILLER as usize * PAGE])?;
    v.sync()?;
    v.fallocate(&f, FallocMode::PunchHole, 0, HOLE * PAGE as u64)?;
    v.sync()
}

/// One thread's operations.
fn work(v: &Volume, ino: InodeNo, thread: usize, seed: u64, notes: &Notes, log: &dyn Fn() -> usize) -> FsResult<()> {
    let mut rng = fastrand::Rng::with_seed(seed * 31 + thread as u64);
    let f = v.open(ino)?;
    for n in 0..OPS {
        let stamp = (thread * OPS + n + 1) as u64;
        // some as those of a kernel's cache
        let write = if n % 2 == 0 { Volume::write } else { Volume::write_accepted_keeping_times };
        match rng.u8(..20) {
            0..7 => {
                let own = COMMON + thread;
                let at = (own * PAGE) as u64;
                notes.note(What::Write(own, own + 1, stamp), log, || write(v, &f, at, &stamped(stamp, 1)))?;
            }
            7..12 => {
                notes.note(What::Write(0, COMMON, stamp), log, || write(v, &f, 0, &stamped(stamp, COMMON)))?;
            }
            12..14 => {
                let seen = common(v, &f)?;
                assert!(seen.len() == 1, "torn: {seen:?}");
            }
            14 => _ = v.clean(1)?,
            15..18 => notes.note(What::Sync, log, || v.fsync(ino, rng.bool()))?,
            18 => notes.note(What::Sync, log, || v.sync())?,
            _ if rng.bool() => _ = v.append(&f, &[7; 100])?,
            _ if rng.bool() => _ = v.setattr(ino, &SetAttr { mode: Some(0o600), ..SetAttr::default() })?,
            _ => {
                let time = Some(SetTime::At(Timestamp { sec: 1_700_000_000, nsec: rng.u32(..9) }));
                let set = SetAttr { mtime: time, ctime: time, ..SetAttr::default() };
                if v.setattr_beside(ino, |_| true, &set)?.is_none() {
                    v.setattr(ino, &set)?;
                }
            }
        }
        schedule::point();
    }
    Ok(())
}

/// Whether a page may hold what this write put there, after a crash with `upto` events. `None` is what was there first.
fn allowed(all: &[Done], page: usize, stamp: u64, upto: usize) -> Result<(), String> {
    let on_page = |d: &Done| matches!(d.what, What::Write(a, b, _) if (a..b).contains(&page));
    let synced = all.iter().filter(|d| d.what == What::Sync && d.log.1 <= upto).map(|d| d.time.0).max().unwrap_or(0);
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

/// A run and crashes of it; how many, and how many blocks the cleaner moved.
///
/// # Errors
/// What a crash left that it must not, or of any operation.
pub fn run(seed: u64) -> Result<(usize, u64), String> {
    let err = |e: braidfs::Error| format!("seed {seed}: {e}");
    let mut setup = Setup { cache: 16 << 20, ..Setup::vary(seed) };
    setup.mkfs.domains = Some(1 + (seed % 2) as u16);
    setup.mkfs.group_bytes = Some(16 << 20);
    if !seed.is_multiple_of(4) {
        (setup.overwrite, setup.data, setup.mkfs.data_checksums) = (Overwrite::Auto, DataMode::Ordered, false);
    }
    let blank = Arc::new(MemDevice::soiled(setup.bytes / PAGE as u64));
    mkfs::format(&[blank.clone() as Arc<dyn Device>], &setup.mkfs).map_err(err)?;
    let device = Arc::new(RecordDevice::new(blank.snapshot()));
    let slow: Arc<dyn Device> = Arc::new(Slow { device: Switching(device.clone()), calls: AtomicUsize::new(0) });
    let v = Volume::mount(vec![slow], options(&setup)).map_err(err)?;
    let ino = create(&v).map_err(err)?;
    fill(&v).map_err(err)?;
    let (notes, begun) = (Notes::default(), device.log_len());
    let log = || device.log_len();
    let body = |t: usize| {
        let (v, notes, log) = (&v, &notes, &log);
        Box::new(move || work(v, ino, t, seed, notes, log)) as schedule::Body<'_, FsResult<()>>
    };
    let (_, done) = schedule::run(seed, (0..THREADS).map(body).collect());
    done.into_iter().collect::<FsResult<()>>().map_err(err)?;
    let cleaned = v.domains().iter().map(|d| d.cleaned_blocks).sum();
    let all = notes.done.into_inner().unwrap_or_else(PoisonError::into_inner);
    let log = Log::of(&device);
    v.crash();
    // blocks that are overwritten where they lie may be found in part
    let in_place = setup.overwrites();
    let mut rng = fastrand::Rng::with_seed(!seed);
    let mut crashes: Vec<CrashState> =
        std::iter::repeat_with(|| states::random(&log, &mut rng)).filter(|c| c.upto >= begun).take(CRASHES).collect();
    // with nothing but what each sync could count on
    let returned = all.iter().filter(|d| d.what == What::Sync && d.log.1 <= log.events.len()).map(|d| d.log.1);
    let returned: BTreeSet<usize> = returned.collect();
    crashes.extend(rng.choose_multiple(returned, CRASHES).into_iter().map(|upto| log.without_unflushed(upto)));
    for crash in &crashes {
        let device: Arc<dyn Device> = Arc::new(MemDevice::from_image(log.image(crash)));
        let found = (|| {
            let v = Volume::mount(vec![device], options(&setup))?;
            let mut buf = vec![0; PAGES * PAGE];
            let n = v.read(&v.open(ino)?, 0, &mut buf)?;
            buf.truncate(n);
            v.crash();
            Ok(buf)
        })();
        let buf = found.map_err(err)?;
        judge(&all, &buf, crash.upto, in_place).map_err(|e| format!("seed {seed}, {crash}: {e}"))?;
    }
    Ok((crashes.len(), cleaned))
}

/// Whether the file may be so after a crash with `upto` events.
fn judge(all: &[Done], buf: &[u8], upto: usize, in_place: bool) -> Result<(), String> {
    if buf.len() != PAGES * PAGE {
        return Err(format!("{} bytes", buf.len()));
    }
    for page in 0..PAGES {
        let found = stamps(&buf[page * PAGE..][..PAGE]);
        if !in_place && found.len() > 1 {
            return Err(format!("page {page} is torn: {found:?}"));
        }
        for stamp in found {
            allowed(all, page, stamp, upto).map_err(|e| format!("page {page}: {e}"))?;
        }
    }
    let range = stamps(&buf[..COMMON * PAGE]);
    if in_place || range.len() == 1 { Ok(()) } else { Err(format!("a write is there in part: {range:?}")) }
}
