//! What each switch for experiments (`braidfs_sync::ablation`) costs: transfers of all tests, and time on two cores.

use crate::clock::Timed;
use crate::matrix::{Cell, Matrix};
use crate::page::{fill, short};
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::fmt::Write;
use std::path::Path;

/// Sets of switches: none, each by itself, all.
pub const SETS: [&str; 6] = ["", "gate", "slots", "cells", "arcs", "all"];
/// Workers of the cells.
pub const WORKERS: usize = 8;
/// Transfers per operation by which a set of switches concerns a test.
const CONCERNS: f64 = 0.05;

/// What was found.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Ablations {
    /// Version of this structure.
    pub version: u32,
    /// A matrix for each of [`SETS`], in their order: [`WORKERS`] workers, one domain.
    pub transfers: Vec<Matrix>,
    /// Times with one and two threads.
    pub times: Vec<Timed>,
}

fn cell<'a>(all: &'a [Matrix], set: usize, test: &str) -> Option<&'a Cell> {
    all.get(set)?.cells.iter().find(|c| c.id.test == test)
}

/// Does this set of switches change what the test shares?
fn concerns(all: &[Matrix], set: usize, test: &str) -> bool {
    let of = |set| cell(all, set, test).map(|c: &Cell| c.foreground.transfers);
    matches!((of(0), of(set)), (Some(without), Some(with)) if (with - without).abs() >= CONCERNS)
}

/// What is worth timing: each test that a set concerns, with one thread and two, with the set and without.
pub fn worth_timing(all: &[Matrix]) -> Vec<(String, usize, String)> {
    let mut jobs = Vec::new();
    for test in all.first().map(Matrix::tests).unwrap_or_default() {
        let sets: Vec<usize> = (1..SETS.len()).filter(|&set| concerns(all, set, test)).collect();
        if sets.is_empty() {
            continue;
        }
        for workers in [1, 2] {
            jobs.extend([0].iter().chain(&sets).map(|&set| (test.to_owned(), workers, SETS[set].to_owned())));
        }
    }
    jobs
}

impl Ablations {
    fn table(&self, out: &mut String, figure: impl Fn(usize, &str) -> Option<String>) {
        // writing to a string does not fail
        let names = SETS.map(|s| if s.is_empty() { "none" } else { s });
        let _ = writeln!(out, "| test | {} |\n|---|{}", names.join(" | "), "---|".repeat(names.len()));
        for test in self.transfers.first().map(Matrix::tests).unwrap_or_default() {
            if !(1..SETS.len()).any(|set| concerns(&self.transfers, set, test)) {
                continue;
            }
            let row: Vec<String> = (0..SETS.len())
                .map(|set| {
                    let shown = set == 0 || concerns(&self.transfers, set, test);
                    figure(set, test).filter(|_| shown).unwrap_or_default()
                })
                .collect();
            let _ = writeln!(out, "| {test} | {} |", row.join(" | "));
        }
    }
    fn median(&self, test: &str, workers: usize, set: usize) -> Option<f64> {
        let mine = |t: &&Timed| t.test == test && t.workers == workers && t.switches == SETS[set];
        self.times.iter().find(mine).map(Timed::median)
    }
    /// The tables of the page, as Markdown.
    pub fn markdown(&self) -> String {
        let mut out = String::new();
        let of = |set: usize, test: &str| cell(&self.transfers, set, test);
        let _ = writeln!(
            out,
            "Transfers per operation, {WORKERS} workers, one domain; a cell is empty where a switch changes less than {CONCERNS}, \
             and so are rows that no switch changes:\n"
        );
        self.table(&mut out, |set, test| of(set, test).map(|c| short(c.foreground.transfers)));
        let _ = writeln!(out, "\nTransfers of the hottest line per operation:\n");
        self.table(&mut out, |set, test| of(set, test).map(|c| short(c.foreground.hottest)));
        let _ = writeln!(out, "\nTransfers that a commit waits for:\n");
        self.table(&mut out, |set, test| of(set, test).map(|c| format!("{:.0}", c.commit.commit_transfers)));
        if self.times.is_empty() {
            return out;
        }
        let _ = writeln!(out, "\nNanoseconds per operation with one thread, by the clock (medians):\n");
        self.table(&mut out, |set, test| self.median(test, 1, set).map(|ns| format!("{ns:.0}")));
        let _ = writeln!(
            out,
            "\nTwo threads on two cores: how many times the operations per second of one thread without switches:\n"
        );
        self.table(&mut out, |set, test| Some(format!("{:.2}", self.median(test, 1, 0)? / self.median(test, 2, set)?)));
        out
    }
    /// Replaces the tables in `projection.md` of a directory.
    ///
    /// # Errors
    /// The file cannot be read or written, or there are no marks.
    pub fn put(&self, dir: &Path) -> Result<()> {
        fill(&dir.join("projection.md"), "ablations", &self.markdown())
    }
    /// Reads what a run wrote.
    ///
    /// # Errors
    /// It cannot be read, or another version wrote it.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read(path).map_err(|e| Error::io(path, e))?;
        let found: Self = serde_json::from_slice(&text)?;
        let whole = found.version == Self::VERSION && found.transfers.len() == SETS.len();
        if whole { Ok(found) } else { Err(Error::Cell(format!("{}: another version", path.display()))) }
    }
    /// The [`Ablations::version`] that this program writes and reads.
    pub const VERSION: u32 = 1;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::matrix::{CellId, Domains};
    use crate::report::Window;

    #[test]
    fn a_switch_is_shown_where_it_changes_something() {
        let matrix = |transfers: [f64; 2]| Matrix {
            version: Matrix::VERSION,
            cells: ["MWCL", "DRBL"]
                .into_iter()
                .zip(transfers)
                .map(|(test, transfers)| Cell {
                    id: CellId::usual(test, WORKERS, Domains::One),
                    foreground: Window { transfers, ..Window::default() },
                    commit: Window::default(),
                })
                .collect(),
        };
        let mut transfers = vec![matrix([0.5, 0.0]); SETS.len()];
        transfers[1] = matrix([1.5, 0.0]);
        let jobs = worth_timing(&transfers);
        let job = |workers, set: &str| ("MWCL".to_owned(), workers, set.to_owned());
        assert_eq!(jobs, [job(1, ""), job(1, "gate"), job(2, ""), job(2, "gate")]);
        let timed = |(test, workers, switches): (String, usize, String)| Timed {
            ns: vec![1000.0 / workers as f64 * if switches.is_empty() { 1.0 } else { 2.0 }],
            test,
            workers,
            switches,
        };
        let a = Ablations { version: Ablations::VERSION, transfers, times: jobs.into_iter().map(timed).collect() };
        let text = a.markdown();
        assert!(text.contains("| MWCL | 0.50 | 1.50 |  |  |  |  |") && !text.contains("DRBL"), "{text}");
        assert!(text.contains("| MWCL | 1000 | 2000 |  |") && text.contains("| MWCL | 2.00 | 1.00 |  |"), "{text}");
    }
}
