//! Makes a failure short: the fewest operations, then the fewest lost writes; and prints it as a test.

use super::check::{Checker, Crash, Depth, Failure};
use super::explore::{Recorded, judge_log, random_base, random_ops, recorded};
use super::plan::{End, Workload};
use super::workload::{Base, Kind, base};
use crate::env_number;
use crate::ops::{Op, to_rust};
use crate::oracle::Oracle;
use crate::run::{Setup, guarded};
use crate::shrink::shrink;
use crate::states::{Budget, CrashState, Log};
use braidfs_device::Keep;
use std::time::Duration;

/// Where a sequence is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum On {
    /// A small volume with the files of the workloads.
    Kind(Kind),
    /// An empty volume whose options come from this seed.
    Vary(u64),
}

impl On {
    /// The volume.
    ///
    /// # Errors
    /// Of making it.
    pub fn base(self) -> Result<Base, String> {
        match self {
            On::Kind(kind) => base(kind),
            On::Vary(seed) => random_base(seed),
        }
    }
}

/// Every crash of a sequence, and of each kind of recovery; each `BRAIDFS_CRASH_DEEP`th is used, checked and mounted again
/// afterwards (default 8), each `BRAIDFS_CRASH_SECOND`th crashed itself (default 16; 1: every one).
pub(super) fn thorough(second: bool) -> Depth {
    Depth {
        budget: Budget { subsets: 10, samples: 24 },
        second: Budget { subsets: 6, samples: 4 },
        deep_every: env_number("BRAIDFS_CRASH_DEEP", 8),
        second_every: env_number("BRAIDFS_CRASH_SECOND", 16) * u64::from(second),
        threads_every: 64 * u64::from(second),
        recheck_every: 1,
        count_failures: false,
    }
}

/// What candidates are looked at with.
pub(super) fn quick(second: bool) -> Depth {
    Depth { budget: Budget { subsets: 4, samples: 6 }, recheck_every: 0, ..thorough(second) }
}

/// Judges all crashes of a sequence: at every point, every subset of few writes, deeply, with crashes of the recovery.
///
/// # Errors
/// The first that is not as it must be.
pub fn every_crash(on: On, ops: &[Op], end: End) -> Result<(), String> {
    every_crash_on(&on.base()?, ops, end)
}

/// [`every_crash`] on a volume that is there.
///
/// # Errors
/// The first that is not as it must be.
pub fn every_crash_on(base: &Base, ops: &[Op], end: End) -> Result<(), String> {
    try_all(base, ops, 0, end, thorough(true)).map_or(Ok(()), |f| Err(f.to_string()))
}

/// Crashes from operation `before` on.
fn try_all(base: &Base, ops: &[Op], before: usize, end: End, depth: Depth) -> Option<Failure> {
    let run = || {
        let Recorded { log, history, marks, .. } = match recorded(base, ops, end, false) {
            Ok(Some(done)) => done,
            Ok(None) => return None,
            Err(why) => return Some(Failure { crash: None, why }),
        };
        let from = if before == 0 { 0 } else { marks[before - 1] };
        let mut checker = Checker::new(&base.setup, depth, 1, &|| false);
        judge_log(&mut checker, &log, &history, from, usize::MAX, &mut fastrand::Rng::with_seed(0)).err()
    };
    guarded(run).unwrap_or_else(|why| Some(Failure { crash: None, why }))
}

/// A failure made short.
#[derive(Clone, Debug)]
pub enum Short {
    /// Of one operation after the other.
    Sequence(ShortSequence),
    /// Of several threads.
    #[cfg(feature = "schedule")]
    Threads(super::minimise_threads::ShortThreads),
}

impl Short {
    /// What is wrong.
    pub fn failure(&self) -> &Failure {
        match self {
            Self::Sequence(s) => &s.failure,
            #[cfg(feature = "schedule")]
            Self::Threads(s) => &s.failure,
        }
    }

    /// A test to be pasted into one of `tests/`.
    pub fn to_test(&self) -> String {
        match self {
            Self::Sequence(s) => s.to_test(),
            #[cfg(feature = "schedule")]
            Self::Threads(s) => s.to_test(),
        }
    }
}

/// A sequence made short.
#[derive(Clone, Debug)]
pub struct ShortSequence {
    /// The volume that it runs on.
    pub on: On,
    /// What is done.
    pub ops: Vec<Op>,
    /// How it ends.
    pub end: End,
    /// What is wrong.
    pub failure: Failure,
}

/// Makes a failing workload short, in about `limit`. `None` where it passes when it is tried again.
///
/// # Errors
/// Of making the volume.
pub fn minimise(
    bases: &[Base],
    workload: &Workload,
    failure: &Failure,
    random: usize,
    limit: Duration,
) -> Result<Option<Short>, String> {
    let second = failure.crash.as_ref().is_some_and(|c| c.second.is_some());
    let (on, ops, end) = match workload {
        Workload::Sequence { base, ops, end, .. } => (On::Kind(bases[*base].kind), ops.clone(), *end),
        Workload::Random { seed } => {
            let base = random_base(*seed)?;
            (On::Vary(*seed), random_ops(&base, *seed, random)?, End::Crash)
        }
        #[cfg(feature = "schedule")]
        Workload::Threads { seed } => {
            use super::{minimise_threads::minimise_threads, threads};
            let all = threads::Threads::random(&threads::base(*seed)?, *seed, random);
            return Ok(minimise_threads(&all, failure, limit)?.map(Short::Threads));
        }
    };
    let base = on.base()?;
    let depth = thorough(second);
    let quick = quick(second);
    // what was not begun by then does not matter; power fails in the last operation
    let mut ops = ops;
    if let Some(crash) = &failure.crash
        && let Some(r) = recorded(&base, &ops, end, false)?
    {
        ops.truncate(r.marks.partition_point(|m| *m <= crash.first.upto) + 1);
    }
    let Some(last) = ops.pop() else { return Ok(None) };
    let with_last = |ops: &[Op]| ops.iter().chain([&last]).cloned().collect::<Vec<_>>();
    let fails = |ops: &[Op]| try_all(&base, &with_last(ops), ops.len(), end, quick).is_some();
    if fails(&ops) {
        // most likely without those that change nothing
        let changing: Vec<Op> = ops.iter().filter(|o| !reads(o)).cloned().collect();
        let first = if fails(&changing) { changing } else { ops };
        ops = shrink(&first, limit, fails);
    }
    let ops = with_last(&ops);
    let Some(found) = try_all(&base, &ops, 0, end, depth) else { return Ok(None) };
    let failure = match (&found.crash, recorded(&base, &ops, end, false)?) {
        (Some(crash), Some(Recorded { log, history, .. })) => {
            let oracle = Oracle::new(&history, history.completed(crash.first.upto));
            fewest_lost(&base.setup, &log, &oracle, found)
        }
        _ => found,
    };
    Ok(Some(Short::Sequence(ShortSequence { on, ops, end, failure })))
}

/// Whether it changes nothing.
pub(super) fn reads(op: &Op) -> bool {
    matches!(
        op,
        Op::Read { .. }
            | Op::Stat { .. }
            | Op::Readdir { .. }
            | Op::Readlink { .. }
            | Op::GetXattr { .. }
            | Op::ListXattr { .. }
            | Op::Seek { .. }
    )
}

/// Gives lost and torn writes back as long as it still fails.
pub(super) fn fewest_lost(setup: &Setup, log: &Log, oracle: &Oracle<'_>, mut found: Failure) -> Failure {
    let Some(mut crash) = found.crash.clone() else { return found };
    let mut checker = Checker::new(setup, thorough(true), 1, &|| false);
    let mut try_one = |c: &Crash| checker.one(log, c, oracle).err();
    let sides = 1 + usize::from(crash.second.is_some());
    for side in 0..sides {
        let writes = of(&mut crash, side).map_or(0, |s| s.keep.len());
        for w in 0..writes {
            let mut other = crash.clone();
            let Some(state) = of(&mut other, side) else { continue };
            if state.keep[w] == Keep::Whole {
                continue;
            }
            state.keep[w] = Keep::Whole;
            if let Some(why) = try_one(&other) {
                crash = other;
                found.why = why;
            }
        }
    }
    found.crash = Some(crash);
    found
}

fn of(crash: &mut Crash, side: usize) -> Option<&mut CrashState> {
    if side == 0 { Some(&mut crash.first) } else { crash.second.as_mut() }
}

/// For the name of a test.
pub(super) fn hash(text: &str) -> u32 {
    text.bytes().fold(0, |h: u32, b| h.wrapping_mul(31).wrapping_add(u32::from(b)))
}

impl ShortSequence {
    /// A test to be pasted into `tests/crash_regressions.rs`.
    pub fn to_test(&self) -> String {
        let list: String = self.ops.iter().map(|o| format!("        {},\n", to_rust(o))).collect();
        let on = match self.on {
            On::Kind(k) => {
                let n = Kind::ALL.iter().position(|a| *a == k).unwrap_or(0);
                format!("On::Kind(Kind::ALL[{n}])")
            }
            On::Vary(seed) => format!("On::Vary({seed})"),
        };
        let said = self.failure.to_string();
        let comment: String = said.lines().take(3).map(|l| format!("// {}\n", l.trim())).collect();
        format!(
            "{comment}#[test]\nfn crash_{:08x}() {{\n    check({on}, End::{:?}, &[\n{list}    ]);\n}}\n",
            hash(&list),
            self.end
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::P;

    #[test]
    fn a_sound_sequence_passes() {
        let ops = [Op::Unlink { path: P("A/f") }, Op::Sync];
        for kind in Kind::ALL {
            every_crash(On::Kind(kind), &ops, End::Crash).unwrap();
        }
    }
}
