//! Threads that work while nobody asks: interval commits, checkpoints before the journal is tight, dirty data under
//! memory pressure, cleaning, discarding, files in pieces made whole, the GC after a crash; a commit that many fsyncs gain by.

use super::MountedVolume;
use super::memory_calls::Calls;
use super::moves::Moves;
use super::tidy::Quiet;
use crate::cell::frames;
use crate::domain::Domain;
use crate::domain::own_work::as_own;
use crate::error::{Error, Result};
use crate::panics::{caught, error_of};
use braidfs_format::BLOCK_BYTES;
use braidfs_sync::{IdleCondvar, Mutex, rank, workers};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often the threads look.
const TICK: Duration = Duration::from_millis(100);
/// A domain's journal is checkpointed in the background from this part on, in 1/16.
const CHECKPOINT_SIXTEENTHS: u64 = 6;
/// Removed directories per domain whose numbers may wait for a checkpoint.
const QUARANTINED_MAX: usize = 16_384;
/// Of a volume whose writers cache what they wrote themselves: with so many dirty pages it is committed before the interval
/// is over, or with this part of the cache's memory.
const DIRTY_PAGES: u64 = 16_384;
const DIRTY_PART: u64 = 8;
/// So often it looks who uses more than a soft limit.
const SOFT_LIMITS: Duration = Duration::from_secs(1);
/// So long a look that has panicked is not taken again.
const REST: Duration = Duration::from_secs(10);
/// What a panic is said to have been in.
const WORK: &str = "the background's work for a domain";

#[derive(Debug, Default)]
struct Stop {
    flag: Mutex<bool, rank::StopFlag>,
    wake: IdleCondvar,
}

impl Stop {
    /// Waits for so long, or until the threads are to stop: whether they are.
    fn within(&self, time: Duration) -> bool {
        let mut flag = self.flag.lock();
        if !*flag {
            self.wake.wait_for(&mut flag, time);
        }
        *flag
    }
}

/// The threads of one volume; stopped and joined by [`Self::stop`].
#[derive(Debug)]
pub(crate) struct Background {
    stop: Arc<Stop>,
    /// Of who is short of memory.
    calls: Arc<Calls>,
    threads: Vec<JoinHandle<()>>,
}

impl Background {
    fn new(mounted: &MountedVolume) -> Self {
        Self { stop: Arc::default(), calls: mounted.calls.clone(), threads: Vec::new() }
    }

    /// Of a volume that is read-only: there is nothing to write, but what is read comes into memory.
    pub fn start_for_readers(mounted: Arc<MountedVolume>) -> Result<Self> {
        let mut b = Self::new(&mounted);
        b.spawn_cache(mounted)?;
        Ok(b)
    }

    /// Of a volume that is writable. Others have ended.
    pub fn start(mounted: Arc<MountedVolume>) -> Result<Self> {
        let mut b = Self::new(&mounted);
        let stop = b.stop.clone();
        b.calls.begin();
        // a thread per domain up to the CPUs, so that domains commit and checkpoint side by side; where they may be on
        // different devices one each, so that none waits for another's
        let cpus = workers::cpus();
        let started = Instant::now();
        let n = if mounted.store.devices() > 1 { usize::MAX } else { cpus }.clamp(1, mounted.domains.len());
        for t in 0..n {
            let (mounted, stop) = (mounted.clone(), stop.clone());
            b.spawn(format!("braidfs-bg-{t}"), move || run(&mounted, &stop, started, (t, n)))?;
        }
        let (volume, end) = (mounted.clone(), stop.clone());
        b.spawn("braidfs-volume".into(), move || look_after_volume(&volume, &end))?;
        let (tenants, end) = (mounted.clone(), stop.clone());
        b.spawn("braidfs-moves".into(), move || {
            let mut moves = Moves::default();
            let mut look = Look::new("moves of tenants");
            while !end.within(SOFT_LIMITS) {
                let _ = look.take(|| tenants.move_tenants(&mut moves, &|| *end.flag.lock()));
            }
        })?;
        b.spawn_cache(mounted.clone())?;
        let memory = mounted.clone();
        // another thread than those above: they may be at a commit for long, and memory is short now
        b.spawn("braidfs-memory".into(), move || memory.serve_calls())?;
        b.spawn("braidfs-gc".into(), move || {
            if mounted.maybe_stale.load(Ordering::Relaxed) && !*stop.flag.lock() {
                let collect = || mounted.collect_stale(&|| *stop.flag.lock());
                match caught("the background GC", collect) {
                    Some(Ok(all)) if all.mended > 0 => {
                        tracing::info!("background GC mended {} cross-domain links", all.mended);
                    }
                    None | Some(Ok(_)) => {}
                    Some(Err(e)) => tracing::warn!("background GC: {e}"),
                }
            }
        })?;
        Ok(b)
    }

    /// Inodes and names come into memory by look-ups, whom nobody asks to make room: this thread waits for no device.
    fn spawn_cache(&mut self, mounted: Arc<MountedVolume>) -> Result<()> {
        let end = self.stop.clone();
        self.spawn("braidfs-cache".into(), move || {
            let mut look = Look::new("a look at the cache");
            while !end.within(TICK) {
                let _ = look.take(|| {
                    mounted.keep_to_budget();
                    frames::trim();
                });
            }
        })
    }

    fn spawn(&mut self, name: String, f: impl FnOnce() + Send + 'static) -> Result<()> {
        self.threads.push(std::thread::Builder::new().name(name).spawn(f).map_err(Error::Io)?);
        Ok(())
    }

    pub fn stop(&mut self) {
        *self.stop.flag.lock() = true;
        self.stop.wake.notify_all();
        self.calls.end();
        for t in self.threads.drain(..) {
            if t.join().is_err() {
                tracing::error!("a background thread panicked");
            }
        }
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The work of thread `t` of `n`, which began at `started`: domains `t`, `t + n`, …
fn run(mounted: &MountedVolume, stop: &Stop, started: Instant, (t, n): (usize, usize)) {
    workers::become_own();
    let mut last_commit = Instant::now();
    let mut quiet = Quiet::default();
    let mut looks = Look::new("a look at the volume");
    while !stop.within(TICK) {
        let due = last_commit.elapsed() >= mounted.shared.runtime.commit_interval();
        if due {
            last_commit = Instant::now();
        }
        let looked = looks.take(|| (mounted.much_is_dirty(), quiet.look(mounted)));
        let (early, is_quiet) = looked.unwrap_or_default();
        let mut tidies = mounted.shared.options.defragment && is_quiet;
        // domains may be added
        for d in mounted.domains.iter().skip(t).step_by(n) {
            if d.failed().is_some() {
                continue;
            }
            let work = || {
                look_after(mounted, d, started, (due, early, is_quiet));
                if d.keeps_journal() {
                    tidies = tidies && !mounted.tidy(d);
                }
            };
            // what it was at is half done; the others, and those who wait for this one, go on
            if caught(WORK, work).is_none() {
                d.fail(&error_of(WORK));
            }
        }
    }
}

/// What the volume needs as a whole. Its thread may have to wait for the device of any domain, but no domain's commits wait for it.
fn look_after_volume(mounted: &MountedVolume, stop: &Stop) {
    workers::become_own();
    let (mut last_reaped, mut last_look) = (Instant::now(), Instant::now());
    let mut look = Look::new("the background's work for the volume");
    while !stop.within(TICK) {
        let _ = look.take(|| {
            if last_reaped.elapsed() >= mounted.shared.runtime.commit_interval() {
                last_reaped = Instant::now();
                if let Err(e) = mounted.reap_zombies() {
                    tracing::warn!("reclaiming replaced files: {e}");
                }
            } else {
                mounted.reap_if_due();
            }
            if last_look.elapsed() >= SOFT_LIMITS {
                last_look = Instant::now();
                mounted.look_at_soft_limits();
                mounted.look_at_quotas();
            }
            mounted.balance_memory();
        });
    }
}

/// What one domain needs at a look: with the commit `due`, or `early`, and the volume quiet or not.
fn look_after(mounted: &MountedVolume, d: &Arc<Domain>, started: Instant, (due, early, is_quiet): (bool, bool, bool)) {
    d.run_near();
    // errors fail the domain, which says so in the log
    let gains = d.commit_gains();
    if !d.keeps_journal() {
        // nobody is promised anything: it writes for want of memory and room only
        if due {
            let _ = d.write_excess_tables();
        }
        mounted.discard_freed(d);
        let _ = as_own(|| mounted.clean_at_pace(d, false, started.elapsed()));
        return;
    }
    if due || early {
        let _ = mounted.flush_with_room(d, Domain::flush_lazy);
    }
    if due || early || gains {
        let _ = d.commit();
    }
    if due {
        let _ = as_own(|| mounted.empty_sparse(d));
    }
    // a directory made and removed within one transaction leaves no trace in the journal
    if d.journal.used() * 16 > d.journal.blocks() * CHECKPOINT_SIXTEENTHS || d.quarantined_numbers() > QUARANTINED_MAX {
        let _ = d.commit();
        let _ = d.checkpoint();
    }
    mounted.discard_freed(d);
    let _ = as_own(|| mounted.clean_at_pace(d, is_quiet, started.elapsed()));
}

/// What a thread of the background does again and again. After a panic it rests, and goes on: what it was at may have gone by then.
pub(super) struct Look {
    what: &'static str,
    rests_until: Option<Instant>,
}

impl Look {
    /// Of `what`, as the log calls it.
    pub(super) fn new(what: &'static str) -> Self {
        Self { what, rests_until: None }
    }

    /// Takes one; `None` where it panics or rests.
    pub(super) fn take<T>(&mut self, look: impl FnOnce() -> T) -> Option<T> {
        if self.rests_until.is_some_and(|until| Instant::now() < until) {
            return None;
        }
        let done = caught(self.what, look);
        self.rests_until = done.is_none().then(|| Instant::now() + REST);
        done
    }
}

impl MountedVolume {
    /// Whether pages that wait for a commit should not wait for the interval's end: [`MountOptions::cached_above`].
    ///
    /// [`MountOptions::cached_above`]: crate::types::MountOptions::cached_above
    fn much_is_dirty(&self) -> bool {
        let many = DIRTY_PAGES.min(self.cache_budget() / BLOCK_BYTES as u64 / DIRTY_PART);
        // those of domains without a journal wait for no commit
        let waiting = || self.domains.iter().filter(|d| d.keeps_journal()).map(|d| d.memory.dirty()).sum::<u64>();
        self.shared.options.cached_above && waiting() > many
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::*;
    use crate::volume::Volume;
    use braidfs_device::{Device, Effect, FaultDevice, MemDevice, Op, Rule};

    #[test]
    fn a_panic_in_one_domain_leaves_the_others_their_commits() {
        let faults = Arc::new(FaultDevice::new(Arc::new(MemDevice::new(16384)), 1));
        let device: Arc<dyn Device> = faults.clone();
        let o = MkfsOptions { domains: Some(3), placement: Placement::Spread, ..MkfsOptions::default() };
        crate::mkfs::format(std::slice::from_ref(&device), &o).unwrap();
        let commit_interval = Duration::from_millis(1);
        let o = MountOptions { background: false, commit_interval, ..MountOptions::default() };
        let v = Volume::mount(vec![device], o).unwrap();
        let m = v.mounted().clone();
        // some of each domain
        for i in 0..12 {
            let node = NewNode { kind: FileKind::File, mode: 0o755, umask: 0, rdev: 0, target: b"" };
            v.create(InodeNo::ROOT, format!("f{i}").as_bytes(), &node, &Cred::root()).unwrap();
        }
        assert!(m.domains.iter().all(|d| d.has_changes()));
        faults.add(Rule::new(Op::Write, Effect::Panic).times(1));
        let stop = Arc::new(Stop::default());
        let (mounted, end) = (m.clone(), stop.clone());
        let one = std::thread::spawn(move || run(&mounted, &end, Instant::now(), (0, 1)));
        let began = Instant::now();
        let is_done = || m.domains.iter().all(|d| d.failed().is_some() || !d.has_changes());
        while !is_done() && began.elapsed() < Duration::from_secs(60) && !one.is_finished() {
            std::thread::sleep(Duration::from_millis(10));
        }
        *stop.flag.lock() = true;
        stop.wake.notify_all();
        one.join().expect("the thread goes on");
        assert_eq!(m.domains.iter().filter(|d| d.failed().is_some()).count(), 1);
        assert!(is_done(), "the others commit");
        v.crash();
    }

    #[test]
    fn a_look_that_panics_rests_and_comes_back() {
        let mut look = Look::new("a test");
        assert_eq!(look.take(|| 1), Some(1));
        assert_eq!(look.take(|| -> i32 { panic!("on purpose") }), None);
        assert_eq!(look.take(|| 1), None, "it rests");
        look.rests_until = Some(Instant::now());
        assert_eq!(look.take(|| 1), Some(1));
    }
}
