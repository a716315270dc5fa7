//! Threads that work while nobody asks: interval commits, checkpoints before the journal is tight, dirty data under
//! memory pressure, cleaning, discarding, files in pieces made whole, the GC after a crash; a commit that many fsyncs gain by.

use super::MountedVolume;
use super::memory_calls::Calls;
use super::moves::Moves;
use super::tidy::Quiet;
use crate::cell::frames;
use crate::error::{Error, Result};
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
    pub fn start(mounted: Arc<MountedVolume>) -> Result<Self> {
        let stop = Arc::new(Stop::default());
        let mut b = Self { stop: stop.clone(), calls: mounted.calls.clone(), threads: Vec::new() };
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
        let (tenants, end) = (mounted.clone(), stop.clone());
        b.spawn("braidfs-moves".into(), move || {
            let mut moves = Moves::default();
            while !end.within(SOFT_LIMITS) {
                tenants.move_tenants(&mut moves, &|| *end.flag.lock());
            }
        })?;
        // Inodes and names come into memory by look-ups, whom nobody asks to make room: this thread waits for no device.
        let (cache, end) = (mounted.clone(), stop.clone());
        b.spawn("braidfs-cache".into(), move || {
            while !end.within(TICK) {
                cache.keep_to_budget();
            }
        })?;
        let memory = mounted.clone();
        // another thread than those above: they may be at a commit for long, and memory is short now
        b.spawn("braidfs-memory".into(), move || memory.serve_calls())?;
        b.spawn("braidfs-gc".into(), move || {
            if mounted.maybe_stale.load(Ordering::Relaxed) && !*stop.flag.lock() {
                match mounted.collect_stale(&|| *stop.flag.lock()) {
                    Ok(0) => {}
                    Ok(n) => tracing::info!("background GC mended {n} cross-domain links"),
                    Err(e) => tracing::warn!("background GC: {e}"),
                }
            }
        })?;
        Ok(b)
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
    let (mut last_commit, mut last_look) = (Instant::now(), Instant::now());
    let mut quiet = Quiet::default();
    while !stop.within(TICK) {
        let due = last_commit.elapsed() >= mounted.shared.runtime.commit_interval();
        let early = mounted.much_is_dirty();
        if due {
            last_commit = Instant::now();
        }
        let is_quiet = quiet.look(mounted);
        let mut tidies = mounted.shared.options.defragment && is_quiet;
        // domains may be added
        for d in mounted.domains.iter().skip(t).step_by(n) {
            if d.failed().is_some() {
                continue;
            }
            d.run_near();
            // errors fail the domain, which says so in the log
            let gains = d.commit_gains();
            if !d.keeps_journal() {
                // nobody is promised anything: it writes for want of memory and room only
                if due {
                    let _ = d.write_excess_tables();
                }
                mounted.discard_freed(d);
                let _ = mounted.clean_at_pace(d, false, started.elapsed());
                continue;
            }
            if due || early {
                let _ = d.flush_lazy();
            }
            if due || early || gains {
                let _ = d.commit();
            }
            if due {
                let _ = mounted.empty_sparse(d);
            }
            // a directory made and removed within one transaction leaves no trace in the journal
            if d.journal.used() * 16 > d.journal.blocks() * CHECKPOINT_SIXTEENTHS
                || d.quarantined_numbers() > QUARANTINED_MAX
            {
                let _ = d.commit();
                let _ = d.checkpoint();
            }
            mounted.discard_freed(d);
            let _ = mounted.clean_at_pace(d, is_quiet, started.elapsed());
            tidies = tidies && !mounted.tidy(d, &mut quiet);
        }
        if t == 0 {
            if due && let Err(e) = mounted.reap_zombies() {
                tracing::warn!("reclaiming replaced files: {e}");
            }
            if last_look.elapsed() >= SOFT_LIMITS {
                last_look = Instant::now();
                mounted.look_at_soft_limits();
                mounted.look_at_quotas();
            }
            mounted.balance_memory();
            frames::trim();
        }
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
