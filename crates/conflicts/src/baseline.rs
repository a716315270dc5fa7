//! What may be shared: one cap for each figure of each cell, and a short list of lines that may stay.
//!
//! `baseline.txt` has the figures of the version that was blessed last. A cell is worse where it is above them by more than
//! [`SLACK_PART`] (or what `--slack` says) and [`SLACK`]: the order of fields and blocks changes from build to build, and
//! two neighbours may come to lie on one line. Where the cap is 0, any transfer is worse.
//!
//! `allowed.json` names lines that are meant to be shared, each with a reason and a cap of its own. Their transfers up to
//! that cap do not count against the baseline.

use crate::matrix::{Cell, CellId, WindowKind};
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fmt::Write;
use std::path::Path;

/// Most entries of the list.
pub const ALLOWED_MAX: usize = 10;
/// Transfers, or system calls, per operation.
const SLACK: f64 = 0.1;
/// Part of a cap.
const SLACK_PART: f64 = 0.05;
/// Transfers per operation with commits, and those of the hottest line, that a cell with long windows never has more of, whatever
/// the baseline says.
const LONG_MOST: f64 = 0.05;
const LONG_HOTTEST: f64 = 0.02;

/// A line that may be shared.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Allowed {
    /// Text in a function, a file or the place of the line, such as a path of the project.
    pub line: String,
    /// The tests in which it may be.
    pub tests: Vec<String>,
    /// Transfers per operation.
    pub cap: f64,
    /// Why it may stay.
    pub reason: String,
}

/// Reads the list.
///
/// # Errors
/// It cannot be read, is longer than [`ALLOWED_MAX`], or has an entry without a reason or a cap.
pub fn read_allowed(path: &Path) -> Result<Vec<Allowed>> {
    let text = std::fs::read(path).map_err(|e| Error::io(path, e))?;
    let list: Vec<Allowed> = serde_json::from_slice(&text)?;
    check_allowed(&list)?;
    Ok(list)
}

fn check_allowed(list: &[Allowed]) -> Result<()> {
    if list.len() > ALLOWED_MAX {
        return Err(Error::Cell(format!("{} lines are allowed, of at most {ALLOWED_MAX}", list.len())));
    }
    let vague =
        |a: &&Allowed| a.line.is_empty() || a.reason.is_empty() || a.tests.is_empty() || a.cap.is_nan() || a.cap <= 0.0;
    match list.iter().find(vague) {
        Some(a) => Err(Error::Cell(format!("the allowed line `{}` needs a text, tests, a cap and a reason", a.line))),
        None => Ok(()),
    }
}

/// What is held against the caps of one window, per operation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Figures {
    /// Transfers, without those that are allowed.
    pub transfers: f64,
    /// System calls per operation.
    pub calls: f64,
}

impl Figures {
    /// Of a window of a cell.
    pub fn of(cell: &Cell, kind: WindowKind, allowed: &[Allowed]) -> Self {
        let w = cell.window(kind);
        let mut free: f64 = 0.0;
        let mut taken = vec![false; w.lines.len()];
        for a in allowed.iter().filter(|a| a.tests.contains(&cell.id.test)) {
            let mut sum = 0.0;
            for (l, taken) in w.lines.iter().zip(&mut taken) {
                // a line counts for one entry
                if !*taken && l.mentions(&a.line) {
                    *taken = true;
                    sum += l.transfers;
                }
            }
            free += f64::min(sum, a.cap);
        }
        Self { transfers: (w.transfers - free).max(0.0), calls: w.calls }
    }
}

/// The caps of all cells.
#[derive(Debug, Clone)]
pub struct Baseline {
    caps: HashMap<CellId, [Figures; 2]>,
    /// Part of a cap by which a cell may be above it.
    slack: f64,
}

const HEAD: &str = "\
# What each cell may share at most: see docs/conflicts.md. `make conflicts BLESS=1` writes it.
# Per operation: transfers and system calls in the foreground window, and in the commit window.
";

/// So many digits are kept, rounded up.
fn up(n: f64) -> f64 {
    (n * 1000.0 - 1e-6).ceil().max(0.0) / 1000.0
}

impl Default for Baseline {
    fn default() -> Self {
        Self { caps: HashMap::new(), slack: SLACK_PART }
    }
}

impl Baseline {
    /// Lets cells be above their caps by so many percent: for a build that may lay out memory otherwise than the blessed
    /// one, by another compiler or in another place.
    pub fn allow_percent(&mut self, percent: u32) {
        self.slack = f64::from(percent) / 100.0;
    }

    fn limit(&self, cap: f64) -> f64 {
        if cap == 0.0 { 0.0 } else { cap * (1.0 + self.slack) + SLACK }
    }

    /// Reads `baseline.txt`.
    ///
    /// # Errors
    /// It cannot be read, or is none.
    pub fn read(path: &Path) -> Result<Self> {
        Self::parse(&std::fs::read_to_string(path).map_err(|e| Error::io(path, e))?)
    }

    fn parse(text: &str) -> Result<Self> {
        let mut all = HashMap::new();
        for line in text.lines().filter(|l| !l.starts_with('#') && !l.trim().is_empty()) {
            // a window, which begins with `x`, is no number
            let numbers: Vec<f64> = line.split_whitespace().skip(3).filter_map(|n| n.parse().ok()).collect();
            let [a, b, c, d] = numbers[..] else {
                return Err(Error::Cell(format!("the baseline has a line that is none: {line}")));
            };
            all.insert(line.parse()?, [Figures { transfers: a, calls: b }, Figures { transfers: c, calls: d }]);
        }
        Ok(Self { caps: all, ..Self::default() })
    }

    /// Makes the figures of these cells the caps. Those of other cells stay.
    pub fn bless(&mut self, cells: &[Cell], allowed: &[Allowed]) {
        for c in cells {
            self.caps.insert(c.id.clone(), WindowKind::ALL.map(|k| Figures::of(c, k, allowed)));
        }
    }

    /// As a file.
    pub fn text(&self) -> String {
        let mut all: Vec<_> = self.caps.iter().collect();
        all.sort_by_key(|(id, _)| (id.window, id.domains, id.test.clone(), id.workers));
        let mut out = HEAD.to_owned();
        for (id, [f, c]) in all {
            // writing to a string does not fail
            let _ = writeln!(
                out,
                "{:<5}{:>3} {:<5}{}{:>9.3} {:>7.3} {:>9.3} {:>7.3}",
                id.test,
                id.workers,
                id.domains.name(),
                id.window.map_or_else(String::new, |w| format!("x{w:<5}")),
                up(f.transfers),
                up(f.calls),
                up(c.transfers),
                up(c.calls)
            );
        }
        out
    }

    /// What is worse in this cell than its caps, in words.
    pub fn worse(&self, cell: &Cell, allowed: &[Allowed]) -> Vec<String> {
        let Some(caps) = self.caps.get(&cell.id) else {
            return vec![format!("{}: no cap in the baseline: bless it", cell.id)];
        };
        let mut out = Vec::new();
        if cell.id.window.is_some() {
            let (all, hottest) = (Figures::of(cell, WindowKind::Commit, allowed).transfers, cell.commit.hottest);
            if all > LONG_MOST || hottest > LONG_HOTTEST {
                let most = format!("at most {LONG_MOST} and {LONG_HOTTEST}");
                out.push(format!("{}: {all:.3} transfers with commits, hottest line {hottest:.3}: {most}", cell.id));
            }
        }
        for (kind, cap) in WindowKind::ALL.into_iter().zip(caps) {
            let is = Figures::of(cell, kind, allowed);
            for (what, is, cap) in [("transfers", is.transfers, cap.transfers), ("system calls", is.calls, cap.calls)] {
                if is > self.limit(cap) {
                    let text =
                        format!("{}, {} window: {is:.3} {what} per operation, cap {cap:.3}", cell.id, kind.name());
                    out.push(text);
                }
            }
        }
        out
    }

    /// Is some figure so far below its cap that the cap should be lowered?
    pub fn better(&self, cell: &Cell, allowed: &[Allowed]) -> bool {
        self.caps.get(&cell.id).is_some_and(|caps| {
            WindowKind::ALL.into_iter().zip(caps).any(|(kind, cap)| {
                let is = Figures::of(cell, kind, allowed);
                self.limit(is.transfers) < cap.transfers || self.limit(is.calls) < cap.calls
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::matrix::Domains;
    use crate::report::{Frame, Line, Sharing, Site, Window};

    fn line(transfers: f64, at: &str) -> Line {
        let stack = vec![Frame { function: "f".into(), at: at.into() }];
        let site = Site { writes: true, locked: false, kernel: false, transfers: 1, bytes: (0, 8), stack };
        Line {
            sharing: Sharing::True,
            transfers,
            commit_transfers: 0,
            cpus: 2,
            writers: 2,
            place: "byte 0 of static X".into(),
            origin: Vec::new(),
            sites: vec![site],
        }
    }

    fn cell(lines: Vec<Line>, calls: f64) -> Cell {
        let transfers = lines.iter().map(|l| l.transfers).sum();
        let foreground = Window { ops: 100, transfers, calls, lines, ..Window::default() };
        let id = CellId::usual("DWSL", 2, Domains::One);
        Cell { id, foreground, commit: Window::default() }
    }

    fn allow(line: &str, cap: f64) -> Allowed {
        Allowed { line: line.into(), tests: vec!["DWSL".into()], cap, reason: "the device".into() }
    }

    #[test]
    fn what_is_above_its_cap_is_worse() {
        let before = cell(vec![line(2.0, "crates/a.rs:1")], 1.0);
        let mut b = Baseline::default();
        assert!(b.worse(&before, &[])[0].contains("no cap"));
        b.bless(std::slice::from_ref(&before), &[]);
        let b = Baseline::parse(&b.text()).expect("its own text");
        assert!(b.worse(&before, &[]).is_empty() && !b.better(&before, &[]));
        assert!(b.worse(&cell(vec![line(2.15, "crates/a.rs:1")], 1.0), &[]).is_empty());
        assert_eq!(b.worse(&cell(vec![line(2.3, "crates/a.rs:1")], 1.0), &[]).len(), 1);
        assert_eq!(b.worse(&cell(vec![line(2.0, "crates/a.rs:1")], 1.2), &[]).len(), 1);
        assert!(b.better(&cell(vec![line(1.0, "crates/a.rs:1")], 1.0), &[]));
        let mut other_build = b;
        other_build.allow_percent(20);
        assert!(other_build.worse(&cell(vec![line(2.3, "crates/a.rs:1")], 1.0), &[]).is_empty());
        assert_eq!(other_build.worse(&cell(vec![line(2.6, "crates/a.rs:1")], 1.0), &[]).len(), 1);
    }

    #[test]
    fn long_windows_have_caps_of_their_own() {
        let with = |transfers: f64, hottest: f64| {
            let mut c = cell(Vec::new(), 0.0);
            c.id.window = Some(4096);
            c.commit = Window { ops: 100, transfers, hottest, ..Window::default() };
            c
        };
        let mut b = Baseline::default();
        b.bless(&[with(0.04, 0.01)], &[]);
        let b = Baseline::parse(&b.text()).expect("its own text");
        assert!(b.worse(&cell(vec![], 0.0), &[])[0].contains("no cap"), "one with the usual windows is another cell");
        assert!(b.worse(&with(0.05, 0.02), &[]).is_empty());
        assert_eq!(b.worse(&with(0.051, 0.02), &[]).len(), 1);
        assert_eq!(b.worse(&with(0.04, 0.021), &[]).len(), 1);
    }

    #[test]
    fn nothing_is_nothing() {
        let mut b = Baseline::default();
        b.bless(&[cell(vec![], 0.0)], &[]);
        assert!(b.worse(&cell(vec![], 0.0), &[]).is_empty());
        assert_eq!(b.worse(&cell(vec![line(0.001, "crates/a.rs:1")], 0.0), &[]).len(), 1);
        assert_eq!(b.worse(&cell(vec![], 0.001), &[]).len(), 1);
    }

    #[test]
    fn an_allowed_line_counts_from_its_cap_on() {
        let mut b = Baseline::default();
        b.bless(&[cell(vec![], 0.0)], &[]);
        let allowed = [allow("crates/device/", 1.0)];
        let within = cell(vec![line(0.9, "crates/device/src/flush.rs:7")], 0.0);
        assert_eq!(b.worse(&within, &[]).len(), 1, "not allowed");
        assert!(b.worse(&within, &allowed).is_empty());
        assert_eq!(b.worse(&cell(vec![line(1.1, "crates/device/src/flush.rs:7")], 0.0), &allowed).len(), 1);
        assert_eq!(b.worse(&cell(vec![line(0.9, "crates/engine/src/x.rs:7")], 0.0), &allowed).len(), 1);
        // two entries do not free one line twice, and another test is not meant
        let twice = [allow("flush.rs", 0.5), allow("crates/device/", 0.5)];
        assert_eq!(b.worse(&within, &twice).len(), 1);
        let mut other = allow("crates/device/", 1.0);
        other.tests = vec!["DWAL".into()];
        assert_eq!(b.worse(&within, &[other]).len(), 1);
    }

    #[test]
    fn the_list_is_short_and_has_reasons() {
        check_allowed(&vec![allow("x", 1.0); ALLOWED_MAX]).expect("short enough");
        assert!(check_allowed(&vec![allow("x", 1.0); ALLOWED_MAX + 1]).is_err());
        assert!(check_allowed(&[allow("", 1.0)]).is_err() && check_allowed(&[allow("x", 0.0)]).is_err());
        let reasonless = Allowed { reason: String::new(), ..allow("x", 1.0) };
        assert!(check_allowed(&[reasonless]).is_err());
        let kept = Path::new(env!("CARGO_MANIFEST_DIR"));
        read_allowed(&kept.join("allowed.json")).expect("the project's list");
        assert!(!Baseline::read(&kept.join("baseline.txt")).expect("the project's baseline").caps.is_empty());
    }
}
