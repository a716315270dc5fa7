//! Runs workloads, and judges every crash of each. On several threads; a sequence is one piece of work.

use super::oracle::Oracle;
use super::states::{CrashState, at_point, points};
use super::workload::Base;
use crate::ops::{Op, to_rust};
use crate::run::{Runner, Setup, mount};
use crate::walk::{Seen, fsck, walk};
use braidfs::{Cred, FileKind, NewNode, NodeId, Volume};
use braidfs_device::{Device, MemDevice, RecordDevice};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How much to do.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Crashes per point of the log.
    pub per_point: usize,
    /// Fsck, use and mount again after each so many crashes (1: all). The rest is recovered and judged.
    pub deep_every: u64,
    /// Stop after this long.
    pub time: Duration,
    /// Stop after this many crashes.
    pub states: u64,
    /// Stop after this many failing sequences.
    pub failures: usize,
    /// Of the random choices.
    pub seed: u64,
    /// Threads.
    pub threads: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            per_point: 100,
            deep_every: 1,
            time: Duration::MAX,
            states: u64::MAX,
            failures: 10,
            seed: 0,
            threads: std::thread::available_parallelism().map_or(2, usize::from),
        }
    }
}

/// What was done.
#[derive(Debug, Default)]
pub struct Report {
    /// Sequences run.
    pub sequences: u64,
    /// Crashes judged.
    pub states: u64,
    /// What failed, each with how to do it again.
    pub failures: Vec<String>,
    /// How long it took.
    pub time: Duration,
}

/// How a sequence ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Power fails.
    Crash,
    /// It is unmounted; power may fail during that.
    Unmount,
}

fn same_tree(a: &Seen, b: &Seen) -> Result<(), String> {
    if a.nodes.len() != b.nodes.len() {
        return Err(format!("{} objects, then {}", a.nodes.len(), b.nodes.len()));
    }
    for (key, x) in &a.nodes {
        let Some(y) = b.nodes.get(key) else { return Err(format!("{} is gone", a.path(*key))) };
        let mut y = y.clone();
        // Relinking a lost entry may touch its directory.
        y.mtime = if x.stat.kind == FileKind::Dir { x.mtime } else { y.mtime };
        if *x != y {
            return Err(format!("{}: {:?}, then {:?}", a.path(*key), x.stat, y.stat));
        }
    }
    Ok(())
}

/// A recovered volume must do work like any other.
fn use_it(vol: &Volume) -> braidfs::Result<()> {
    let new = NewNode { kind: FileKind::File, mode: 0o600, umask: 0, rdev: 0, target: b"" };
    let a = vol.create(NodeId::ROOT, b"after-the-crash", &new, &Cred::root())?;
    let f = vol.open(a.ino)?;
    vol.write(&f, 0, &[7; 5000])?;
    vol.fsync(a.ino, false)?;
    vol.unlink(NodeId::ROOT, b"after-the-crash")
}

/// Recovers one crash and judges it.
///
/// # Errors
/// What is wrong.
pub fn check_state(
    setup: &Setup,
    log: &RecordDevice,
    state: &CrashState,
    judge: &Oracle<'_>,
    deep: bool,
) -> Result<(), String> {
    let device: Arc<dyn Device> = Arc::new(MemDevice::from_image(state.image(log)));
    let vol = mount(std::slice::from_ref(&device), setup.data).map_err(|e| format!("recovery: {e}"))?;
    let seen = walk(&vol).map_err(|e| format!("after recovery: {e}"))?;
    judge.judge(&seen)?;
    if !deep {
        vol.crash();
        return Ok(());
    }
    use_it(&vol).map_err(|e| format!("the recovered volume does not work: {e}"))?;
    vol.unmount().map_err(|e| format!("unmount after recovery: {e}"))?;
    fsck(std::slice::from_ref(&device)).map_err(|e| format!("after recovery and unmount: {e}"))?;
    let vol = mount(&[device], setup.data).map_err(|e| format!("second mount: {e}"))?;
    let again = walk(&vol).map_err(|e| format!("after the second mount: {e}"))?;
    vol.crash();
    same_tree(&seen, &again).map_err(|e| format!("the second mount shows something else: {e}"))
}

/// Runs one sequence and judges its crashes; the number of them.
///
/// # Errors
/// The first crash that is not as it must be.
pub fn check_sequence(
    base: &Base,
    ops: &[Op],
    end: End,
    limits: &Limits,
    seed: u64,
    count: &AtomicU64,
    stop: &dyn Fn() -> bool,
) -> Result<(), String> {
    let mut r = Runner::new(&base.setup, base.image.clone(), base.model.clone(), base.keys.clone())?;
    ops.iter().try_for_each(|op| r.apply(op))?;
    let (log, mut history) = (r.device().clone(), r.history.clone());
    match end {
        End::Crash => r.abandon(),
        End::Unmount => {
            r.unmount()?;
            history.push_unmount(log.log_len());
        }
    }
    let mut rng = fastrand::Rng::with_seed(seed);
    for upto in points(&log) {
        let judge = Oracle::new(&history, history.completed(upto));
        for state in at_point(&log, upto, limits.per_point, &mut rng) {
            if stop() {
                return Ok(());
            }
            let n = count.fetch_add(1, Ordering::Relaxed);
            let deep = n.is_multiple_of(limits.deep_every.max(1));
            catch_unwind(AssertUnwindSafe(|| check_state(&base.setup, &log, &state, &judge, deep)))
                .unwrap_or_else(|_| Err("panic (see above)".into()))
                .map_err(|e| format!("{state}\n  {e}"))?;
        }
    }
    Ok(())
}

/// Runs all of `sequences` on all of `bases`, in an order that the seed gives, until a limit is reached. `progress` is
/// called now and then.
pub fn explore(
    bases: &[Base],
    sequences: &[Vec<Op>],
    limits: &Limits,
    progress: &(dyn Fn(u64, u64, usize) + Sync),
) -> Report {
    let start = Instant::now();
    let mut order: Vec<(usize, usize)> =
        (0..sequences.len()).flat_map(|s| (0..bases.len()).map(move |b| (s, b))).collect();
    fastrand::Rng::with_seed(limits.seed).shuffle(&mut order);
    let (next, states, done) = (AtomicUsize::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let failures: Mutex<Vec<String>> = Mutex::default();
    let failed = || failures.lock().map_or(usize::MAX, |f| f.len());
    let stop = || {
        start.elapsed() >= limits.time || states.load(Ordering::Relaxed) >= limits.states || failed() >= limits.failures
    };
    let work = || {
        while !stop() {
            let i = next.fetch_add(1, Ordering::Relaxed);
            let Some((s, b)) = order.get(i).copied() else { break };
            let (base, ops) = (&bases[b], &sequences[s]);
            let end = if i % 4 == 0 { End::Unmount } else { End::Crash };
            let seed = limits.seed ^ (i as u64) << 20;
            let result =
                catch_unwind(AssertUnwindSafe(|| check_sequence(base, ops, end, limits, seed, &states, &stop)))
                    .unwrap_or_else(|_| Err("panic (see above)".into()));
            if let Err(e) = result {
                let list: String = ops.iter().map(|o| format!("    {},\n", to_rust(o))).collect();
                let text = format!("{}, end {end:?}, sequence:\n{list}  {e}", base.name);
                if let Ok(mut f) = failures.lock() {
                    f.push(text);
                }
            }
            let n = done.fetch_add(1, Ordering::Relaxed) + 1;
            if n % 64 == 0 {
                progress(n, states.load(Ordering::Relaxed), failed());
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..limits.threads.max(1) {
            scope.spawn(work);
        }
    });
    Report {
        sequences: done.into_inner(),
        states: states.into_inner(),
        failures: failures.into_inner().unwrap_or_default(),
        time: start.elapsed(),
    }
}
