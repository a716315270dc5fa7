//! Makes a failing run of several threads short: the fewest operations, then the fewest lost writes; and prints it as a
//! test.
//!
//! A shorter run takes its turns elsewhere, so that what went wrong between two threads has to be looked for again:
//! each candidate is run with many schedules, more of them the shorter it is, and stands when one of them fails.

use super::check::{Checker, Depth, Failure};
use super::explore::at_most;
use super::minimise::{fewest_lost, hash, quick, reads, thorough};
use super::threads::{Run, Threads, base, defined, recorded};
use super::workload::Base;
use crate::ops::{Op, to_rust};
use crate::run::guarded;
use crate::shrink::shrink_further;
use std::time::{Duration, Instant};

/// Schedules that a candidate is run with: this many where it is long, this many where it is short.
const SCHEDULES: (u64, u64) = (16, 64);
/// Points of each run at which it is crashed, where there are more.
const POINTS: usize = 24;
/// Schedules beside its own that a kept run is tried with ([`every_crash_of`]).
pub const OTHER_SCHEDULES: u64 = 15;

/// A run made short.
#[derive(Clone, Debug)]
pub struct ShortThreads {
    /// What is done.
    pub workload: Threads,
    /// What is wrong.
    pub failure: Failure,
}

/// Runs it, and judges crashes at `most` points and at `also`.
fn try_one(
    base: &Base,
    w: &Threads,
    depth: Depth,
    (most, also): (usize, Option<usize>),
    stop: &dyn Fn() -> bool,
) -> Result<Run, Failure> {
    let tried = || {
        let run = recorded(base, w).map_err(|why| Failure { crash: None, why })?;
        let mut points = at_most(run.points(), most, &mut fastrand::Rng::with_seed(w.schedule));
        points.extend(also.filter(|p| *p <= run.log.events.len() && !points.contains(p)));
        points.sort_unstable();
        let mut checker = Checker::new(&base.setup, depth, 1, stop);
        run.check(base, &mut checker, &points)?;
        Ok(run)
    };
    guarded(tried).unwrap_or_else(|why| Err(Failure { crash: None, why }))
}

/// Judges all crashes of a run: at every point, every subset of few writes, deeply, with crashes of the recovery. Another
/// version of the engine takes its turns elsewhere: so it is run with other schedules, too, less thoroughly.
///
/// # Errors
/// The first that is not as it must be.
pub fn every_crash_of(w: &Threads) -> Result<(), String> {
    let base = base(w.volume)?;
    let all = |w: &Threads, depth| try_one(&base, w, depth, (usize::MAX, None), &|| false).map(|_| ());
    all(w, thorough(true)).map_err(|f| f.to_string())?;
    // one thread takes its turns in one way
    let others = if w.lists.len() > 1 { OTHER_SCHEDULES } else { 0 };
    for n in 1..=others {
        let other = Threads { schedule: w.schedule.wrapping_add(n), ..w.clone() };
        all(&other, quick(false)).map_err(|f| format!("with schedule {}: {f}", other.schedule))?;
    }
    Ok(())
}

/// An operation, and the thread that does it.
type OfThread = (usize, Op);

/// The operations in the order in which they began, but those that a crash after `upto` events never met. Of each thread
/// one more is left: without it, it would be done earlier, and others would take its turns.
fn in_order(w: &Threads, begun: &[Vec<usize>], upto: usize) -> Vec<OfThread> {
    let mut all = Vec::new();
    for (thread, (ops, begun)) in w.lists.iter().zip(begun).enumerate() {
        let met = begun.partition_point(|b| *b <= upto) + 1;
        all.extend(ops.iter().zip(begun).take(met).map(|(op, b)| (*b, thread, op.clone())));
    }
    all.sort_by_key(|(begun, ..)| *begun);
    all.into_iter().map(|(_, thread, op)| (thread, op)).collect()
}

/// The operations with those of two threads done by one of them, for the pair of this number; `None` after the last.
fn with_merged(ops: &[OfThread], pair: usize) -> Option<Vec<OfThread>> {
    let threads = ops.iter().map(|o| o.0 + 1).max()?;
    let (one, other) = (0..threads).flat_map(|a| (a + 1..threads).map(move |b| (a, b))).nth(pair)?;
    Some(ops.iter().map(|(t, op)| (if *t == other { one } else { *t }, op.clone())).collect())
}

/// Looks for failures of candidates, and keeps the last that was found.
struct Search<'a> {
    base: &'a Base,
    depth: Depth,
    until: Instant,
    found: ShortThreads,
}

impl Search<'_> {
    fn late(&self) -> bool {
        Instant::now() >= self.until
    }

    /// Whether these operations fail: those that the failing crash met, or has to do without.
    fn failing(&mut self, ops: &[OfThread]) -> Option<Vec<OfThread>> {
        let lists = (0..=ops.iter().map(|o| o.0).max()?)
            .map(|t| defined(self.base, &ops.iter().filter(|o| o.0 == t).map(|o| o.1.clone()).collect::<Vec<_>>()))
            .filter(|l| !l.is_empty())
            .collect();
        let last = &self.found.workload;
        let mut w = Threads { volume: last.volume, schedule: 0, lists };
        let (least, most) = SCHEDULES;
        let schedules = (least * most / w.count().max(1) as u64).clamp(least, most);
        let crash = self.found.failure.crash.as_ref().map(|c| c.first.upto);
        // the one of the last failure first
        for schedule in std::iter::once(last.schedule).chain(0..schedules) {
            if self.late() {
                return None;
            }
            w.schedule = schedule;
            let Err(failure) = try_one(self.base, &w, self.depth, (POINTS, crash), &|| self.late()) else { continue };
            if failure.crash.is_some() == crash.is_some() {
                self.found = ShortThreads { workload: w, failure };
                return Some(self.met());
            }
        }
        None
    }

    /// What the crash that was found last met. Later operations are not left in the workload, as it fails without them.
    fn met(&mut self) -> Vec<OfThread> {
        let w = &self.found.workload;
        let upto = self.found.failure.crash.as_ref().map_or(usize::MAX, |c| c.first.upto);
        let all: Vec<OfThread> = match guarded(|| recorded(self.base, w)).and_then(|r| r) {
            Ok(run) => in_order(w, &run.begun, upto),
            // it never comes to a crash
            Err(_) => w.lists.iter().zip(0..).flat_map(|(ops, t)| ops.iter().map(move |op| (t, op.clone()))).collect(),
        };
        let lists = &mut self.found.workload.lists;
        lists.iter_mut().zip(0..).for_each(|(l, t)| l.truncate(all.iter().filter(|o| o.0 == t).count()));
        all
    }
}

/// Makes a failing run short, in about `limit`. `None` where it passes when it is tried again.
///
/// # Errors
/// Of making the volume.
pub fn minimise_threads(w: &Threads, failure: &Failure, limit: Duration) -> Result<Option<ShortThreads>, String> {
    let base = base(w.volume)?;
    let second = failure.crash.as_ref().is_some_and(|c| c.second.is_some());
    let lists = w.lists.iter().map(|ops| defined(&base, ops)).collect();
    let mut search = Search {
        base: &base,
        depth: Depth { deep_every: 0, ..quick(second) },
        until: Instant::now().checked_add(limit).ok_or("the time is too long")?,
        found: ShortThreads { workload: Threads { lists, ..w.clone() }, failure: failure.clone() },
    };
    let mut ops = search.met();
    match search.failing(&ops) {
        Some(less) => ops = less,
        // it may be seen when the recovered volume is used
        None => search.depth = quick(second),
    }
    let mut thread = 0;
    while let Some(last) = ops.iter().map(|o| o.0).max().filter(|last| thread <= *last && *last > 0) {
        let without: Vec<OfThread> = ops.iter().filter(|o| o.0 != last - thread).cloned().collect();
        match search.failing(&without) {
            Some(less) => (ops, thread) = (less, 0),
            None => thread += 1,
        }
    }
    // what several threads have to do may as well be done by one after the other
    let mut pair = 0;
    while let Some(merged) = with_merged(&ops, pair) {
        match search.failing(&merged) {
            Some(less) => (ops, pair) = (less, 0),
            None => pair += 1,
        }
    }
    let changing: Vec<OfThread> = ops.iter().filter(|o| !reads(&o.1)).cloned().collect();
    if changing.len() < ops.len()
        && let Some(less) = search.failing(&changing)
    {
        ops = less;
    }
    let left = search.until.saturating_duration_since(Instant::now());
    shrink_further(&ops, left, |ops| search.failing(ops));
    let found = search.found;
    let Err(failure) = confirm(&base, &found, second) else { return Ok(None) };
    Ok(Some(ShortThreads { workload: found.workload, failure }))
}

/// All its crashes; of the first that fails, the fewest lost writes.
fn confirm(base: &Base, found: &ShortThreads, second: bool) -> Result<(), Failure> {
    let w = &found.workload;
    let failure = match try_one(base, w, thorough(second), (usize::MAX, None), &|| false) {
        Err(f) => f,
        // its samples were others
        Ok(run) => match &found.failure.crash {
            Some(crash) => {
                let mut checker = Checker::new(&base.setup, thorough(true), 1, &|| false);
                let one = run.judged(base, crash.first.upto, |oracle| checker.one(&run.log, crash, oracle));
                let Err(why) = one else { return Ok(()) };
                Failure { crash: Some(crash.clone()), why }
            }
            None => return Ok(()),
        },
    };
    let (Some(crash), Ok(run)) = (&failure.crash, guarded(|| recorded(base, w)).and_then(|r| r)) else {
        return Err(failure);
    };
    let upto = crash.first.upto;
    Err(run.judged(base, upto, |oracle| fewest_lost(&base.setup, &run.log, oracle, failure.clone())))
}

impl ShortThreads {
    /// A test to be pasted into `tests/crash_threads.rs`.
    pub fn to_test(&self) -> String {
        let w = &self.workload;
        let one = |op: &Op| format!("                {},\n", to_rust(op));
        let thread = |ops: &Vec<Op>| {
            let ops: String = ops.iter().map(one).collect();
            format!("            vec![\n{ops}            ],\n")
        };
        let lists: String = w.lists.iter().map(thread).collect();
        let said = self.failure.to_string();
        let comment: String = said.lines().take(3).map(|l| format!("// {}\n", l.trim())).collect();
        format!(
            "{comment}#[test]\nfn threads_{:08x}() {{\n    check(&Threads {{\n        volume: {},\n        \
             schedule: {},\n        lists: vec![\n{lists}        ],\n    }});\n}}\n",
            hash(&lists),
            w.volume,
            w.schedule,
        )
    }
}
