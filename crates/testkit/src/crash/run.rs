//! The two ways to run the plan: briefly, before every change, and in full, with a checkpoint file.

use super::check::Counts;
use super::explore::{Failed, Limits, Report, explore};
use super::plan::{Pairs, Part, Plan};
use super::workload::Base;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Called after every workload: part of the plan, workloads of it run, how many it has, counts of everything.
pub type Progress<'p> = &'p (dyn Fn(Part, u64, u64, &Counts) + Sync);

/// Workloads of a turn of a brief run, by part: so few that one of 100,000 states has several turns.
pub const TURNS: &[(Part, u64)] = &[
    (Part::Hard, 1),
    (Part::NamesMet, 2),
    (Part::One, 6),
    (Part::OneBeside, 3),
    (Part::Two, 12),
    (Part::Groups, 1),
    (Part::Pieces, 2),
    (Part::Three, 4),
    (Part::Pressed, 3),
    (Part::Alone, 2),
    (Part::TwoBeside, 6),
    (Part::AloneBeside, 2),
    (Part::Random, 1),
    (Part::HardApart, 1),
    (Part::OneApart, 3),
    (Part::TwoApart, 6),
    (Part::AloneApart, 2),
    (Part::GroupsApart, 1),
    (Part::PiecesApart, 1),
    (Part::RandomApart, 1),
    #[cfg(feature = "schedule")]
    (Part::Threads, 1),
    #[cfg(feature = "schedule")]
    (Part::ThreadsBeside, 1),
    #[cfg(feature = "schedule")]
    (Part::ThreadsApart, 1),
    #[cfg(feature = "schedule")]
    (Part::ThreadsPressed, 1),
];

/// All parts in turns, each from its beginning, until a limit is reached: a few hard workloads would else take all the time of a
/// short run.
pub fn brief(plan: &Plan, bases: &[Base], limits: &Limits, turns: &[(Part, u64)], progress: Progress<'_>) -> Report {
    let mut report = Report::new(plan);
    let mut done = [0; Part::ALL.len()];
    let mut run = |part: Part, count: u64, report: &mut Report| -> bool {
        let len = plan.part(part).len;
        let range = done[part.number()]..(done[part.number()] + count).min(len);
        let wanted = range.end - range.start;
        let from = range.start;
        let tell = |n: u64, c: &Counts| progress(part, from + n, len, c);
        let ran = explore(plan, bases, part, range, limits, report, &tell);
        done[part.number()] += ran;
        let over = limits.until.is_some_and(|t| Instant::now() >= t);
        ran == wanted && !over && report.counts.states() < limits.states && report.failures.len() < limits.failures
    };
    while turns.iter().all(|(part, count)| run(*part, *count, &mut report)) {}
    report
}

/// Where a full run stands.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub struct Standing {
    /// Names and lengths of the parts: a file of another plan is refused.
    parts: Vec<(String, u64)>,
    /// Workloads done, by part.
    done: Vec<u64>,
    workloads: u64,
    void: u64,
    counts: Counts,
    pairs: String,
    /// Failures, in words.
    failures: Vec<String>,
    /// Seconds that it has taken.
    seconds: f64,
    /// Where it is kept.
    #[serde(skip)]
    file: PathBuf,
}

impl Standing {
    fn new(plan: &Plan, file: &Path) -> Self {
        Self {
            parts: Part::ALL.iter().map(|p| (plan.part(*p).name.to_owned(), plan.part(*p).len)).collect(),
            done: vec![0; Part::ALL.len()],
            workloads: 0,
            void: 0,
            counts: Counts::default(),
            pairs: Pairs::new(plan.names.len()).to_bits(),
            failures: Vec::new(),
            seconds: 0.0,
            file: file.into(),
        }
    }

    /// From a file; a new one where there is no such file.
    ///
    /// # Errors
    /// Of reading, or where it is of another plan.
    pub fn load(plan: &Plan, file: &Path) -> Result<Self, String> {
        let new = Self::new(plan, file);
        let text = match std::fs::read(file) {
            Ok(t) => t,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(new),
            Err(e) => return Err(format!("{}: {e}", file.display())),
        };
        let mut old: Self = serde_json::from_slice(&text).map_err(|e| format!("{}: {e}", file.display()))?;
        // a plan grows at its end
        if new.parts.starts_with(&old.parts) && old.done.len() == old.parts.len() {
            old.done.resize(new.parts.len(), 0);
            old.parts.clone_from(&new.parts);
        }
        if old.parts != new.parts || Pairs::from_bits(&old.pairs, plan.names.len()).is_none() {
            return Err(format!("{} is of a run of other workloads: remove it or name another file", file.display()));
        }
        old.file = file.into();
        Ok(old)
    }

    fn save(&self) -> Result<(), String> {
        let file = &self.file;
        let fail = |e: &dyn std::fmt::Display| format!("{}: {e}", file.display());
        let new = file.with_extension("new");
        let text = serde_json::to_vec_pretty(self).map_err(|e| fail(&e))?;
        std::fs::write(&new, text).and_then(|()| std::fs::rename(&new, file)).map_err(|e| fail(&e))
    }

    /// What was done so far, also by earlier runs.
    pub fn report(&self, plan: &Plan) -> Report {
        let pairs = Pairs::from_bits(&self.pairs, plan.names.len()).unwrap_or_else(|| Pairs::new(plan.names.len()));
        Report { workloads: self.workloads, void: self.void, counts: self.counts, pairs, failures: Vec::new() }
    }

    /// Seconds that all runs took.
    pub fn time(&self) -> Duration {
        Duration::from_secs_f64(self.seconds)
    }

    /// Workloads done, of how many, by part.
    pub fn parts(&self) -> impl Iterator<Item = (&str, u64, u64)> {
        self.parts.iter().zip(&self.done).map(|((name, len), done)| (name.as_str(), *done, *len))
    }

    /// Failures of this and earlier runs.
    pub fn failures(&self) -> &[String] {
        &self.failures
    }
}

/// All workloads of `parts`, from where `standing` is on; it is saved every few seconds. `failed` tells of
/// each failure and makes it text.
///
/// # Errors
/// Of writing the file.
pub fn full(
    plan: &Plan,
    bases: &[Base],
    parts: &[Part],
    limits: &Limits,
    standing: &mut Standing,
    progress: Progress<'_>,
    failed: &dyn Fn(&Failed) -> String,
) -> Result<(), String> {
    for &part in parts {
        let len = plan.part(part).len;
        let mut round = 16;
        while standing.done[part.number()] < len {
            let start = Instant::now();
            let from = standing.done[part.number()];
            let mut report = standing.report(plan);
            let tell = |n: u64, c: &Counts| progress(part, from + n, len, c);
            let range = from..(from + round).min(len);
            let wanted = range.end - range.start;
            let ran = explore(plan, bases, part, range, limits, &mut report, &tell);
            let took = start.elapsed();
            if ran < wanted && limits.until.is_some_and(|t| Instant::now() >= t) {
                // cut: what was done of this round is done again, but not in vain
                standing.failures.extend(report.failures.iter().map(failed));
                return standing.save();
            }
            standing.done[part.number()] += ran;
            standing.seconds += took.as_secs_f64();
            standing.workloads = report.workloads;
            standing.void = report.void;
            standing.counts = report.counts;
            standing.pairs = report.pairs.to_bits();
            standing.failures.extend(report.failures.iter().map(failed));
            standing.save()?;
            if standing.failures.len() >= limits.failures || standing.counts.states() >= limits.states {
                return Ok(());
            }
            // about ten seconds
            if took < Duration::from_secs(5) {
                round *= 2;
            } else if took > Duration::from_secs(20) {
                round = (round / 2).max(16);
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crash::workload::{Kind, bases};

    #[test]
    fn a_run_goes_on_where_it_was_stopped() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("run.json");
        let bases = bases().unwrap();
        let plan = Plan::new(Kind::ORDINARY, 1);
        let mut limits = Limits { states: 1, ..Limits::brief() };
        limits.depth.second_every = 0;
        let go = |limits: &Limits| {
            let mut standing = Standing::load(&plan, &file).unwrap();
            full(&plan, &bases, &[Part::One], limits, &mut standing, &|_, _, _, _| {}, &|f| f.failure.to_string())
                .unwrap();
            assert!(standing.failures().is_empty(), "{:?}", standing.failures());
            let done = standing.parts().nth(Part::One.number()).map_or(0, |p| p.1);
            (done, standing.report(&plan).counts.images)
        };
        let (first, images) = go(&limits);
        assert!(first > 0 && images > 0);
        limits.states = images + 1;
        let (second, more) = go(&limits);
        assert!(second > first && more > images);
        // one workload after the other, all of them at once
        let mut at_once = Report::new(&plan);
        limits.states = u64::MAX;
        explore(&plan, &bases, Part::One, 0..second, &limits, &mut at_once, &|_, _| {});
        assert_eq!(at_once.counts.images, more);
        let other = Plan::new(1, 1);
        assert!(Standing::load(&other, &file).is_err(), "of other workloads");
    }
}
