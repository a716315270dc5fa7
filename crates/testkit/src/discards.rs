//! Crashes of a volume that discards what has become free (the mount option `discard`), and that becomes read-only and writable
//! again, which makes all durable.
//!
//! Files of some MiB are made, synced or not, and removed, on a device that records. Each file has a content of its own, which it
//! never changes. After a crash those that were synced are there, whole; those whose removal was synced are not; of all others each
//! block reads as it was written or as zeros. Where the volume was made read-only it is clean, with nothing left to replay.

use crate::ops::fill;
use crate::small::two_directories;
use crate::states::{Budget, CrashState, Log};
use crate::torn::{ANY_COPY, nothing_but};
use braidfs::{Cred, Error, InodeNo, MkfsOptions, MountOptions, Remount, Volume, mkfs};
use braidfs_check::{FsckOptions, check};
use braidfs_device::{Device, Event, MemDevice, RecordDevice};
use std::collections::BTreeMap;
use std::sync::Arc;

const MIB: usize = 1 << 20;
const BLOCK: usize = 4096;
/// Of the device: half of it is in use most of the time.
const BLOCKS: u64 = 40 * MIB as u64 / BLOCK as u64;
/// Steps of a run.
const STEPS: usize = 70;
/// States of each moment that are looked at.
const STATES: usize = 4;
/// Files, at most.
const FILES: usize = 10;

/// Bytes of files, by the number that is their name and the seed of their content.
type Files = BTreeMap<u32, usize>;

/// What a crash may leave.
#[derive(Clone, Default)]
struct Promised {
    /// Is there.
    synced: Files,
    /// May be there; all of `synced` is in it.
    known: Files,
    /// The volume is read-only.
    retired: bool,
}

/// What was looked at.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seen {
    /// States.
    pub states: usize,
    /// Of these, such as a volume has that is read-only.
    pub retired: usize,
    /// Segments that were discarded.
    pub discards: usize,
}

fn text(e: Error) -> String {
    e.to_string()
}

fn options() -> MountOptions {
    MountOptions {
        cache_bytes: 16 * MIB as u64,
        background: false,
        serial: true,
        discard: true,
        ..MountOptions::default()
    }
}

/// A volume with two directories of different domains.
fn made(sums: bool) -> Result<(Arc<RecordDevice>, [InodeNo; 2]), String> {
    let device = Arc::new(MemDevice::soiled(BLOCKS));
    let how = MkfsOptions {
        domains: Some(2),
        group_bytes: Some(4 * MIB as u64),
        data_checksums: sums,
        ..MkfsOptions::default()
    };
    mkfs::format(&[device.clone() as Arc<dyn Device>], &how).map_err(text)?;
    let v = Volume::mount(vec![device.clone()], options()).map_err(text)?;
    let dirs = two_directories(&v);
    v.unmount().map_err(text)?;
    Ok((Arc::new(RecordDevice::new(device.snapshot())), dirs))
}

/// A run: what is promised after each of its steps, and how long the log was then.
struct Run {
    v: Volume,
    dirs: [InodeNo; 2],
    rng: fastrand::Rng,
    next: u32,
    now: Promised,
}

impl Run {
    fn dir(&self, n: u32) -> InodeNo {
        self.dirs[n as usize % 2]
    }

    fn make(&mut self, sync: bool) -> Result<(), Error> {
        let n = self.next;
        self.next += 1;
        let len = self.rng.usize(1..3 * MIB);
        let f = self.v.open(self.v.create(self.dir(n), name(n).as_bytes(), &new(), &Cred::root())?.ino)?;
        self.now.known.insert(n, len);
        match self.v.write(&f, 0, &fill(n, 0, len)) {
            Ok(written) => _ = self.now.known.insert(n, written),
            Err(Error::NoSpace) => _ = self.now.known.insert(n, 0),
            Err(e) => return Err(e),
        }
        if sync {
            self.v.fsync(f.ino(), false)?;
            self.now.synced.insert(n, self.now.known[&n]);
        }
        Ok(())
    }

    /// Removes a file that is there.
    fn remove(&mut self, there: &mut Vec<u32>) -> Result<(), Error> {
        let n = there.swap_remove(self.rng.usize(..there.len()));
        self.now.synced.remove(&n);
        self.v.unlink(self.dir(n), name(n).as_bytes())
    }

    /// All is as it is now.
    fn synced(&mut self, there: &[u32]) {
        self.now.known.retain(|n, _| there.contains(n));
        self.now.synced = self.now.known.clone();
    }

    /// One step, chosen at random.
    fn step(&mut self, there: &mut Vec<u32>) -> Result<(), Error> {
        if self.now.retired {
            self.now.retired = false;
            return self.v.remount(&Remount { read_only: Some(false), ..Remount::default() });
        }
        match self.rng.u8(..20) {
            0..8 if there.len() < FILES => {
                let sync = self.rng.bool();
                there.push(self.next);
                self.make(sync)?;
            }
            0..12 if !there.is_empty() => self.remove(there)?,
            12..15 => {
                self.v.sync()?;
                self.synced(there);
            }
            15 => {
                self.v.remount(&Remount { read_only: Some(true), ..Remount::default() })?;
                self.synced(there);
                self.now.retired = true;
            }
            _ => self.v.discard_freed(),
        }
        Ok(())
    }
}

fn new() -> braidfs::NewNode<'static> {
    crate::small::new_node(braidfs::FileKind::File)
}

fn name(n: u32) -> String {
    format!("{n}")
}

/// The content of a file that is there.
fn content(v: &Volume, dir: InodeNo, n: u32) -> Result<Option<Vec<u8>>, String> {
    let a = match v.lookup(dir, name(n).as_bytes()) {
        Err(Error::NotFound) => return Ok(None),
        found => found.map_err(|e| format!("file {n}: {e}"))?,
    };
    let mut all = vec![0; a.size as usize];
    let f = v.open(a.ino).map_err(text)?;
    let len = v.read(&f, 0, &mut all).map_err(|e| format!("file {n}: {e}"))?;
    if len == all.len() { Ok(Some(all)) } else { Err(format!("file {n}: {len} bytes of {}", all.len())) }
}

/// Whether each block is as it was written, or zeros.
fn is_own(n: u32, bytes: &[u8]) -> bool {
    let want = fill(n, 0, bytes.len());
    bytes.chunks(BLOCK).zip(want.chunks(BLOCK)).all(|(got, want)| got == want || got.iter().all(|b| *b == 0))
}

/// Whether the devices say that nothing is left to replay.
fn is_clean(device: &Arc<dyn Device>) -> Result<bool, String> {
    let quick = FsckOptions { repair: false, force: false };
    let report = check(std::slice::from_ref(device), &quick, &braidfs::JournalReplay, &|_, _, _| {});
    report.map(|r| r.clean_skip).map_err(|e| format!("fsck failed: {e}"))
}

/// A state, of a moment after which one step more may have been done or not.
fn look(device: &Arc<dyn Device>, dirs: [InodeNo; 2], before: &Promised, after: &Promised) -> Result<(), String> {
    nothing_but(ANY_COPY, std::slice::from_ref(device))?;
    let v = Volume::mount(vec![Arc::clone(device)], options()).map_err(text)?;
    let known = before.known.iter().chain(&after.known).map(|(n, _)| *n);
    for n in known.collect::<std::collections::BTreeSet<_>>() {
        let must = before.synced.get(&n).filter(|_| after.synced.contains_key(&n));
        match (content(&v, dirs[n as usize % 2], n)?, must) {
            (None, None) => {}
            (None, Some(_)) => return Err(format!("file {n} was synced, and is not there")),
            (Some(got), Some(len)) if got != fill(n, 0, *len) => {
                return Err(format!("file {n} was synced with {len} bytes, and has {} others", got.len()));
            }
            (Some(got), _) if !is_own(n, &got) => return Err(format!("file {n} has what nobody wrote to it")),
            _ => {}
        }
    }
    for dir in dirs {
        let (all, _) = crate::subject::listing(&v, dir, u64::MAX).map_err(text)?;
        let is_known = |name: &Vec<u8>| {
            let n = std::str::from_utf8(name).ok().and_then(|n| n.parse().ok());
            n.is_some_and(|n: u32| before.known.contains_key(&n) || after.known.contains_key(&n))
        };
        if let Some(name) = all.keys().find(|name| !is_known(name)) {
            return Err(format!("{} was removed, and is there", String::from_utf8_lossy(name)));
        }
    }
    v.sync().map_err(text)?;
    v.discard_freed();
    v.unmount().map_err(text)?;
    nothing_but(|_| false, std::slice::from_ref(device)).map_err(|e| format!("after an unmount: {e}"))
}

/// Crashes a run at every flush and behind every step.
///
/// # Errors
/// The first state that is none of those that may be.
pub fn crashes_of_a_run(seed: u64, sums: bool) -> Result<Seen, String> {
    let (device, dirs) = made(sums)?;
    let v = Volume::mount(vec![device.clone()], options()).map_err(text)?;
    let mut run = Run { v, dirs, rng: fastrand::Rng::with_seed(seed), next: 0, now: Promised::default() };
    let mut there = Vec::new();
    let mut steps = vec![(device.log_len(), run.now.clone())];
    for _ in 0..STEPS {
        run.step(&mut there).map_err(|e| format!("seed {seed}, step {}: {e}", steps.len()))?;
        steps.push((device.log_len(), run.now.clone()));
    }
    run.v.crash();
    let log = Log::of(&device);
    let discards = log.events.iter().filter(|e| matches!(e, Event::Discard { .. })).count();
    let mut seen = Seen { discards, ..Seen::default() };
    let few = Budget { subsets: 2, samples: 4 };
    for upto in log.points(steps[0].0, steps.iter().map(|s| s.0)) {
        let done = steps.iter().rposition(|s| s.0 <= upto).unwrap_or(0);
        let before = &steps[done].1;
        let after = steps.get(done + 1).map_or(before, |s| &s.1);
        // the first one loses all
        let mut keeps = crate::resize::keeps(&log, upto, &few, &mut run.rng);
        while keeps.len() > STATES {
            keeps.swap_remove(run.rng.usize(1..keeps.len()));
        }
        for keep in keeps {
            let state = CrashState { upto, keep };
            let image: Arc<dyn Device> = Arc::new(MemDevice::from_image(log.image(&state)));
            seen.states += 1;
            let retired = before.retired && upto == steps[done].0;
            seen.retired += usize::from(retired);
            let wrong = |e| format!("seed {seed}, after {done} steps, {state}: {e}");
            if retired && !is_clean(&image).map_err(wrong)? {
                return Err(wrong("it became read-only, and something is left to replay".into()));
            }
            look(&image, dirs, before, after).map_err(wrong)?;
        }
    }
    Ok(seen)
}
