//! Shows that the explorer sees: every planted bug, and in how many crash states.

use super::check::{Class, Counts};
use super::explore::{Failed, Limits, Report, explore};
use super::plan::{Part, Plan};
use super::workload::Base;
use crate::states::Budget;
use braidfs::planted::{Bug, plant};
use std::time::{Duration, Instant};

/// What became of a planted bug.
#[derive(Clone, Debug)]
pub struct Found {
    /// Name of the planted bug.
    pub name: &'static str,
    /// What is wrong.
    pub what: &'static str,
    /// Workloads run, and how many of them failed.
    pub workloads: (u64, usize),
    /// Crash states that were looked at.
    pub counts: Counts,
    /// The first failure that counts, and who saw it.
    pub first: Option<(Class, String)>,
    /// Workloads that failed before any crash.
    pub live: usize,
    /// How long it took.
    pub time: Duration,
}

/// How many workloads of which part: a beginning of what the brief run does, the same each time.
const WORKLOADS: [(Part, u64); 13] = [
    (Part::Hard, u64::MAX / 2),
    (Part::Groups, 24),
    (Part::One, 360),
    (Part::Two, 240),
    (Part::Three, 120),
    (Part::Pressed, 60),
    (Part::Random, 4),
    // what only threads see is rare
    (Part::Threads, 24),
    (Part::NamesMet, 360),
    (Part::OneBeside, 360),
    (Part::Pieces, 48),
    (Part::OneApart, 120),
    (Part::GroupsApart, 24),
];

/// Where bugs are seen that most workloads do not see: these are run first. Where they moved, the others come after them.
const SEEN_BY: [(Bug, Part, std::ops::Range<u64>); 24] = [
    (Bug::LeaverForgotten, Part::One, 0..60),
    (Bug::FlushUnderWayTaken, Part::Threads, 0..1000),
    (Bug::HelperForgotten, Part::Threads, 0..1000),
    (Bug::CellsLetGo, Part::ThreadsPressed, 0..2000),
    (Bug::CommitUnderWayForgotten, Part::Threads, 0..1000),
    (Bug::SlotMissed, Part::Threads, 0..1000),
    (Bug::OwnedTwice, Part::Groups, 0..24),
    (Bug::GivenEarly, Part::Groups, 0..24),
    (Bug::EarlyDataForgotten, Part::Pressed, 0..60),
    (Bug::TruncateForgotten, Part::Hard, 200..300),
    (Bug::TimesForgotten, Part::Hard, 200..300),
    (Bug::SumsForgotten, Part::Hard, 200..300),
    (Bug::WhiteoutAlone, Part::Hard, 336..408),
    (Bug::BucketLeftOut, Part::ThreadsBeside, 0..24),
    (Bug::InodeLeftOut, Part::OneBeside, 0..360),
    (Bug::VacatedUntold, Part::NamesMet, 0..720),
    (Bug::MovedFreedEarly, Part::Pieces, 112..154),
    (Bug::MovedCopyStale, Part::Pieces, 70..84),
    (Bug::CommitOneDevice, Part::OneApart, 0..360),
    (Bug::SyncOneDevice, Part::OneApart, 0..360),
    (Bug::HomesOneDevice, Part::OneApart, 0..360),
    (Bug::ClaimOneDevice, Part::GroupsApart, 0..54),
    (Bug::NamesForgotten, Part::One, 0..360),
    (Bug::LivesOn, Part::Hard, 432..444),
];

/// Bugs that the engine itself, or the comparison with the model, notices while a workload runs, and that no crash state of
/// what is run shows. All others are seen only where a crash state fails.
const SEEN_LIVE: [Bug; 1] = [Bug::CellsLetGo];

/// Removes the bug also after a panic.
struct Planted;

impl Drop for Planted {
    fn drop(&mut self) {
        plant(None);
    }
}

/// Runs with one bug planted. With `count` all of the workloads, and all crash states of each; else until it is found.
pub fn hunt(plan: &Plan, bases: &[Base], bug: &(Bug, &'static str, &'static str), count: bool) -> Found {
    let start = Instant::now();
    let mut limits = Limits::brief();
    limits.failures = if count { usize::MAX } else { 1 };
    for d in [&mut limits.depth, &mut limits.three, &mut limits.random] {
        d.count_failures = count;
        if count {
            // a bug that leaves out flushes makes subsets by the thousand
            d.budget = Budget { subsets: 5, samples: 12 };
            d.second_every = 32;
        }
    }
    let counts = |f: &Failed| f.failure.crash.is_some() || SEEN_LIVE.contains(&bug.0);
    let mut report = Report::new(plan);
    plant(Some(bug.0));
    let planted = Planted;
    let seen = SEEN_BY.iter().filter(|(b, ..)| *b == bug.0 && !count).map(|(_, part, range)| (*part, range.clone()));
    'hunt: for (part, range) in seen.chain(WORKLOADS.map(|(part, n)| (part, 0..n))) {
        let len = plan.part(part).len;
        let mut range = range.start.min(len)..range.end.min(len);
        while !range.is_empty() {
            if !count {
                limits.failures = report.failures.len() + 1;
            }
            let ran = explore(plan, bases, part, range.clone(), &limits, &mut report, &|_, _| {});
            range.start += ran;
            if ran == 0 || !count && report.failures.iter().any(counts) {
                break 'hunt;
            }
        }
    }
    drop(planted);
    // several threads finish in any order
    report.failures.sort_by_key(|f| (f.part, f.number));
    let live = report.failures.iter().filter(|f| f.failure.crash.is_none()).count();
    let first = report.failures.iter().find(|f| counts(f)).map(|f| {
        let why = f.failure.why.lines().next().unwrap_or_default();
        (f.failure.class(), format!("{}: {why}", plan.part(f.part).name))
    });
    Found {
        name: bug.1,
        what: bug.2,
        workloads: (report.workloads, report.failures.len()),
        counts: report.counts,
        first,
        live,
        time: start.elapsed(),
    }
}

/// The results as a table for docs/testing.md.
pub fn table(all: &[Found]) -> String {
    let mut out = String::from(
        "| planted bug | first seen by | failing crash states | of | failing workloads | of |\n|---|---|---|---|---|---|\n",
    );
    for f in all {
        let (n, of) = (f.counts.failing, f.counts.states());
        let by = f.first.as_ref().map_or("nobody", |(class, _)| class.name());
        out += &format!("| {} | {by} | {n} | {of} | {} | {} |\n", f.what, f.workloads.1, f.workloads.0);
    }
    out
}
