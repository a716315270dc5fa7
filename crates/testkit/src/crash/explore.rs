//! Runs the workloads of a plan on several threads, and judges every crash of each.

use super::check::{Checker, Counts, Depth, Failure, Level, times};
use super::plan::{End, Pairs, Part, Plan, Workload};
use super::workload::{Base, prelude};
use crate::generate::{Generator, Profile};
use crate::history::History;
use crate::model::{self, Model};
use crate::ops::{Op, perform, to_rust};
use crate::oracle::Oracle;
use crate::run::{Did, Runner, Setup, guarded, set_clock};
use crate::states::{Budget, Log};
use crate::walk::ROOT_KEY;
use braidfs::Volume;
use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How much to do.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// How thoroughly crashes of sequences are looked at.
    pub depth: Depth,
    /// Those of three operations, of which there are millions.
    pub three: Depth,
    /// And those of random runs, which are hundreds of times as long.
    pub random: Depth,
    /// Operations of a random run.
    pub random_ops: usize,
    /// Points of a random run.
    pub random_points: usize,
    /// Stop at this moment.
    pub until: Option<Instant>,
    /// Stop after this many crash states.
    pub states: u64,
    /// Stop after this many failing workloads.
    pub failures: usize,
    /// How many threads explore.
    pub threads: usize,
}

impl Limits {
    /// What there is time for before every change.
    pub fn brief() -> Self {
        let depth = Depth {
            budget: Budget { subsets: 12, samples: 32 },
            second: Budget { subsets: 4, samples: 4 },
            deep_every: 8,
            second_every: 16,
            threads_every: 48,
            recheck_every: 256,
            count_failures: false,
        };
        let budget = Budget { subsets: 6, samples: 12 };
        Self {
            depth,
            three: depth,
            random: Depth { budget, deep_every: 4, second_every: 64, ..depth },
            random_ops: 300,
            random_points: 24,
            until: None,
            states: u64::MAX,
            failures: 5,
            threads: std::thread::available_parallelism().map_or(2, usize::from),
        }
    }

    /// For runs of hours.
    pub fn full() -> Self {
        let brief = Self::brief();
        let depth = Depth {
            budget: Budget { subsets: 12, samples: 64 },
            second: Budget { subsets: 8, samples: 8 },
            deep_every: 4,
            second_every: 8,
            threads_every: 32,
            ..brief.depth
        };
        let three =
            Depth { budget: Budget { subsets: 12, samples: 12 }, deep_every: 16, second_every: 64, ..brief.depth };
        Self {
            depth,
            three,
            random: Depth { second: depth.second, deep_every: 2, second_every: 16, ..brief.random },
            ..brief
        }
    }
}

/// A workload that failed.
#[derive(Clone, Debug)]
pub struct Failed {
    /// Which part of the plan, and which of its workloads.
    pub part: Part,
    /// Number of the workload in its part.
    pub number: u64,
    /// What it did.
    pub workload: Workload,
    /// What is wrong.
    pub failure: Failure,
}

/// What was done.
#[derive(Clone, Debug)]
pub struct Report {
    /// How many workloads ran.
    pub workloads: u64,
    /// Not run to the end, as an operation of theirs cannot be done there: they are shorter sequences.
    pub void: u64,
    /// Crash states, recoveries.
    pub counts: Counts,
    /// Pairs of operations.
    pub pairs: Pairs,
    /// Workloads that failed, with what is wrong.
    pub failures: Vec<Failed>,
}

impl Report {
    /// With nothing run yet.
    pub fn new(plan: &Plan) -> Self {
        let pairs = Pairs::new(plan.names.len());
        Self { workloads: 0, void: 0, counts: Counts::default(), pairs, failures: Vec::new() }
    }

    /// The report in words, for the terminal.
    pub fn summary(&self, time: Duration) -> String {
        let c = &self.counts;
        let (seconds, (pairs, of)) = (time.as_secs_f64().max(0.001), self.pairs.count());
        let run = c.recoveries + c.second_recoveries;
        format!(
            "{} workloads ({} more cannot be done), {pairs} of {of} pairs of operations\n\
         {} crash states in {seconds:.1} s, {:.0} a second: {} images that a crash of a workload left, {} that a crash of \
         one of {} recoveries left\n\
         {} recoveries run again by several threads, with the same result; crashes of these left {} of the images\n\
         crashes of an fsck before the mount left {} of the images\n\
         {run} recoveries run and judged ({:.0} a second), the other images hold the same bytes wherever one of these \
         looked; {} of them run all the same; {} deviations\n\
         {} recoveries followed by use, unmount, fsck and a second mount, and run once more behind an fsck; \
         {} crashes left an image that there was before\n\
         {} states of workloads that changed {} names with the directory locked for reading\n\
         {} states of workloads that moved {} blocks to make files whole\n\
         {} times an inode that had changed was judged with the others of its domain\n\
         {}\n\
         {} failing states",
            self.workloads,
            self.void,
            c.states(),
            c.states() as f64 / seconds,
            c.images,
            c.second_images,
            c.crashed,
            c.threaded,
            c.threaded_images,
            c.checked_images,
            run as f64 / seconds,
            c.rechecked,
            c.strays,
            c.deep,
            c.duplicates,
            c.states_beside,
            c.changed_beside,
            c.states_moved,
            c.moved,
            c.together,
            c.did.named().map(|(what, n)| format!("{n} {what}")).join(", "),
            c.failing
        )
    }
}

/// Runs one sequence and judges its crashes from operation `before` on. `None`: the last basic operation cannot be done.
///
/// # Errors
/// The first crash that is not as it must be, or a difference between volume and model.
pub fn sequence(
    checker: &mut Checker<'_>,
    base: &Base,
    ops: &[Op],
    before: usize,
    end: End,
) -> Result<Option<()>, Failure> {
    let run = recorded(base, ops, end, true).map_err(|why| Failure { crash: None, why })?;
    let Some(Recorded { log, history, marks, beside, moved, did }) = run else { return Ok(None) };
    let from = if before == 0 { 0 } else { marks[before - 1] };
    let result = judge_log(checker, &log, &history, from, usize::MAX, &mut fastrand::Rng::with_seed(0));
    checker.counts.of_workload(beside, moved, did);
    result.map(Some)
}

/// A sequence that was run.
#[derive(Debug)]
pub struct Recorded {
    /// What it wrote.
    pub log: Log,
    /// What it did.
    pub history: History,
    /// The length of the log after each operation.
    pub marks: Vec<usize>,
    /// Names changed with the directory locked for reading.
    pub beside: u64,
    /// Blocks moved to make files whole.
    pub moved: u64,
    /// What else it did.
    pub did: Did,
}

/// Blocks that a volume has moved to make files whole.
pub(super) fn moved(v: &Volume) -> u64 {
    v.domains().iter().map(|d| d.defragmented_blocks).sum()
}

/// Runs a sequence. With `strict`, `None` where an operation cannot be done.
///
/// # Errors
/// A difference between volume and model.
pub fn recorded(base: &Base, ops: &[Op], end: End, strict: bool) -> Result<Option<Recorded>, String> {
    set_clock(times::WORKLOAD);
    let mut r = Runner::new(&base.setup, base.image.clone(), base.model.clone(), base.keys.clone())?;
    let mut marks = Vec::new();
    if base.kind.shared {
        prelude().iter().try_for_each(|op| r.apply(op))?;
    }
    let before = r.volume()?.changed_beside();
    for op in ops {
        r.apply(op)?;
        marks.push(r.device().log_len());
        if r.stats.full.total() > 0 {
            // the volumes have room for all that is done
            return Err(format!("no space for {}", to_rust(op)));
        }
        if strict && r.stats.errors > 0 {
            r.abandon();
            return Ok(None);
        }
    }
    let (beside, moved, did) = (r.volume()?.changed_beside() - before, moved(r.volume()?), r.stats.did);
    let device = r.device().clone();
    let mut history = r.history.clone();
    match end {
        End::Crash => r.abandon(),
        End::Unmount => {
            r.unmount()?;
            history.push_unmount(device.log_len());
        }
    }
    let log = Log::of(&device);
    Ok(Some(Recorded { log, history, marks, beside, moved, did }))
}

/// The operations of a random run.
///
/// # Errors
/// None, unless the generator is wrong.
pub fn random_ops(base: &Base, seed: u64, count: usize) -> Result<Vec<Op>, String> {
    let profile = Profile {
        objects: 40,
        file_bytes: 60_000,
        syncs: 60,
        commits: 20,
        rewrites: true,
        flags: true,
        whiteouts: true,
        write_back: true,
        ..Profile::default()
    };
    let mut generator = Generator::new(seed, profile);
    let (mut model, mut slots) = (base.model.clone(), Default::default());
    let mut ops = Vec::new();
    for _ in 0..count {
        let op = generator.next(&model);
        // what it answers is compared when it is done on the volume
        let _ = perform(&mut model, &mut slots, &op);
        ops.push(op);
    }
    Ok(ops)
}

/// Runs random operations and judges crashes at some points.
fn random_run(checker: &mut Checker<'_>, base: &Base, seed: u64, limits: &Limits) -> Result<(), Failure> {
    let fail = |why| Failure { crash: None, why };
    let ops = random_ops(base, seed, limits.random_ops).map_err(fail)?;
    let run = recorded(base, &ops, End::Crash, false).map_err(fail)?;
    let Some(Recorded { log, history, beside, moved, did, .. }) = run else { return Ok(()) };
    let result = judge_log(checker, &log, &history, 0, limits.random_points, &mut fastrand::Rng::with_seed(!seed));
    checker.counts.of_workload(beside, moved, did);
    result
}

/// Judges crashes of a workload from `from` on, at up to `most` points.
///
/// # Errors
/// The first that is not as it must be.
pub fn judge_log(
    checker: &mut Checker<'_>,
    log: &Log,
    history: &History,
    from: usize,
    most: usize,
    rng: &mut fastrand::Rng,
) -> Result<(), Failure> {
    let points = at_most(log.points(from, history.steps().iter().map(|s| s.log)), most, rng);
    let oracles: Vec<OnceCell<Oracle<'_>>> = (0..=history.steps().len()).map(|_| OnceCell::new()).collect();
    let judge = |upto: usize| {
        let completed = history.completed(upto);
        oracles[completed].get_or_init(|| Oracle::new(history, completed))
    };
    let result = checker.check(log, &points, &Level { judge: &judge, expect: None });
    checker.counts.together += oracles.iter().filter_map(OnceCell::get).map(Oracle::together).sum::<u64>();
    result
}

/// At most `most` of the points, at random.
pub(super) fn at_most(mut points: Vec<usize>, most: usize, rng: &mut fastrand::Rng) -> Vec<usize> {
    if points.len() > most {
        rng.shuffle(&mut points);
        points.truncate(most);
        points.sort_unstable();
    }
    points
}

/// The volume of a random run: as [`Runner::empty`] makes it, its options from the seed.
///
/// # Errors
/// Of mkfs.
pub fn random_base(seed: u64) -> Result<Base, String> {
    set_clock(0);
    let setup = Setup::vary(seed);
    let kind = super::workload::Kind::ALL[0];
    if setup.second > 0 {
        let r = Runner::empty(&setup)?;
        let base = Base::of(&r, kind);
        r.abandon();
        return Ok(base);
    }
    let keys = BTreeMap::from([(model::ROOT, ROOT_KEY)]);
    Ok(Base { image: setup.format()?, model: Model::default(), keys, setup, kind })
}

/// Runs one workload. `None`: an operation of it cannot be done there.
fn run_one(
    plan_bases: &[Base],
    w: &Workload,
    limits: &Limits,
    seed: u64,
    stop: &dyn Fn() -> bool,
) -> (Counts, Result<Option<()>, Failure>) {
    let mut counts = Counts::default();
    let result = guarded(|| match w {
        Workload::Sequence { base, ops, before, end, basics } => {
            let base = &plan_bases[*base];
            let depth = if basics.len() > 2 { limits.three } else { limits.depth };
            let mut checker = Checker::new(&base.setup, depth, seed, stop);
            let r = sequence(&mut checker, base, ops, *before, *end);
            counts = checker.counts;
            r
        }
        Workload::Random { seed } => {
            let base = random_base(*seed).map_err(|why| Failure { crash: None, why })?;
            let mut checker = Checker::new(&base.setup, limits.random, *seed, stop);
            let r = random_run(&mut checker, &base, *seed, limits);
            counts = checker.counts;
            r.map(Some)
        }
        #[cfg(feature = "schedule")]
        Workload::Threads { seed } => super::threads::run(*seed, limits, stop, &mut counts).map(Some),
    });
    (counts, result.unwrap_or_else(|why| Err(Failure { crash: None, why })))
}

/// Runs workloads `range` of part `part` of the plan and adds to `report`; how many were run to their end (all, unless a
/// limit is reached). `progress` is called by whoever has just finished one.
pub fn explore(
    plan: &Plan,
    bases: &[Base],
    part: Part,
    range: std::ops::Range<u64>,
    limits: &Limits,
    report: &mut Report,
    progress: &(dyn Fn(u64, &Counts) + Sync),
) -> u64 {
    let start_states = report.counts.states();
    let next = AtomicU64::new(range.start);
    let (cut, states) = (AtomicBool::new(false), AtomicU64::new(start_states));
    let done = AtomicU64::new(0);
    let shared = Mutex::new(report);
    let late = || limits.until.is_some_and(|t| Instant::now() >= t);
    let work = || {
        loop {
            // whoever has begun one finishes it, unless time is up: what is done has no gaps
            if cut.load(Ordering::Relaxed) || late() {
                break;
            }
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= range.end {
                break;
            }
            let w = plan.workload(part, i);
            if plan.leaves_out(&w) {
                done.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            let (counts, result) = run_one(bases, &w, limits, i ^ (part.number() as u64) << 56, &late);
            let all = states.fetch_add(counts.states(), Ordering::Relaxed) + counts.states();
            let Ok(mut r) = shared.lock() else { break };
            r.counts.add(&counts);
            match result {
                Ok(Some(())) => {
                    r.workloads += 1;
                    if let Workload::Sequence { basics, .. } = &w {
                        r.pairs.add(basics);
                    }
                }
                Ok(None) => r.void += 1,
                Err(failure) => {
                    r.workloads += 1;
                    r.failures.push(Failed { part, number: i, workload: w, failure });
                }
            }
            if all >= limits.states || r.failures.len() >= limits.failures {
                cut.store(true, Ordering::Relaxed);
            }
            let n = done.fetch_add(1, Ordering::Relaxed) + 1;
            progress(n, &r.counts);
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..limits.threads.max(1) {
            scope.spawn(work);
        }
    });
    done.into_inner()
}

/// A moment so far from now.
pub fn in_seconds(n: u64) -> Option<Instant> {
    Instant::now().checked_add(Duration::from_secs(n))
}
