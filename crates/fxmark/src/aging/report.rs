//! Tables of what ageing did: for a terminal, and as Markdown for `docs/aging.md`.

use super::load::Kind;
use super::results::{Results, Slice, Volume, sum};
use super::venue::Layout;
use crate::report::{date, figure, time};
use crate::stats::median;
use std::fmt::Write;

const MIB: f64 = (1 << 20) as f64;

/// A rate of a load, with its unit.
fn rate(load: Kind, rate: f64) -> String {
    match load {
        Kind::Overwrite => format!("{}/s", figure(rate)),
        Kind::Churn => format!("{} MiB/s", figure(rate / MIB)),
    }
}

/// The medians of the volumes of a cell, which differ in their round only.
struct Row<'a> {
    target: &'a str,
    load: Kind,
    volumes: Vec<&'a Volume>,
}

impl Row<'_> {
    fn median(&self, f: impl Fn(&Volume) -> f64) -> f64 {
        median(&self.volumes.iter().map(|v| f(v)).collect::<Vec<_>>())
    }
    /// Of those that have it.
    fn some(&self, f: impl Fn(&Volume) -> Option<f64>) -> Option<f64> {
        let found: Vec<f64> = self.volumes.iter().filter_map(|v| f(v)).collect();
        (!found.is_empty()).then(|| median(&found))
    }
    fn rates(&self) -> (f64, f64) {
        let load = self.load;
        (self.median(|v| v.first().rate(load)), self.median(|v| v.last().rate(load)))
    }

    /// What stands in the columns of [`HEAD`].
    fn cells(&self) -> Vec<String> {
        let (first, last) = self.rates();
        let times =
            |f: fn(&Volume) -> Slice| (time(self.median(|v| f(v).p50 as f64)), time(self.median(|v| f(v).p999 as f64)));
        let ((_, tail), (p50, p999)) = (times(Volume::first), times(Volume::last));
        let number = |n: Option<f64>| n.map_or_else(|| "-".into(), |n| format!("{n:.2}"));
        let layout = |f: fn(&Volume) -> Option<Layout>| {
            self.some(|v| f(v).map(|l| l.per_file())).map_or_else(|| "-".into(), figure)
        };
        let (fresh, aged) = (self.median(|v| v.read_fresh / MIB), self.median(|v| v.read_aged / MIB));
        vec![
            self.target.to_owned(),
            rate(self.load, first),
            rate(self.load, last),
            format!("{:.2}", last / first.max(1e-9)),
            p50,
            tail,
            p999,
            number(self.some(Volume::amplification)),
            number(self.some(|v| v.last().amplification())),
            layout(|v| v.fresh),
            layout(|v| v.aged),
            figure(fresh),
            figure(aged),
            format!("{:.2}", aged / fresh.max(1e-9)),
            figure(self.median(|v| sum(&v.slices).no_space as f64)).trim_end_matches(".00").to_owned(),
        ]
    }
}

/// Titles of the columns.
const HEAD: [&str; 15] = [
    "target",
    "first quarter",
    "last quarter",
    "last / first",
    "p50",
    "p99.9 first",
    "p99.9 last",
    "device / user",
    "of the last quarter",
    "pieces before",
    "pieces after",
    "read before",
    "read after",
    "after / before",
    "no space",
];

/// The rows of a load and a fill level.
fn rows(r: &Results, load: Kind, fill: u64) -> Vec<Row<'_>> {
    let row = |target| Row { target, load, volumes: r.cell(load, fill, target) };
    r.names().into_iter().map(row).filter(|row| !row.volumes.is_empty()).collect()
}

fn tables(r: &Results) -> impl Iterator<Item = (Kind, u64)> {
    r.head.plan.loads.iter().flat_map(|&l| r.head.plan.fill.iter().map(move |&f| (l, f)))
}

/// How it was done, in one sentence.
fn plan(r: &Results) -> String {
    let p = &r.head.plan;
    format!(
        "{}; {} MiB, filled, then {} times the free space written in {} slices; an fsync every {} overwrites; files of \
         profile {:?} up to {} KiB; {} round(s)",
        p.media,
        p.size >> 20,
        p.times,
        p.slices,
        p.fsync_every,
        p.profile,
        p.largest >> 10,
        p.rounds
    )
}

/// A volume in one line, while the others are still to come.
pub fn line(v: &Volume) -> String {
    let all = sum(&v.slices);
    format!(
        "{} {} {} %, round {}: {} -> {}, device / user {}, {} s",
        v.target,
        v.load.name(),
        v.fill,
        v.round + 1,
        rate(v.load, v.first().rate(v.load)),
        rate(v.load, v.last().rate(v.load)),
        v.amplification().map_or_else(|| "-".into(), |a| format!("{a:.2}")),
        figure(all.seconds)
    )
}

/// Tables for a terminal.
pub fn terminal(r: &Results) -> String {
    let mut out = format!("{}\n", plan(r));
    for (load, fill) in tables(r) {
        let mut table = comfy_table::Table::new();
        crate::report::lines(&mut table);
        table.set_header(HEAD);
        table.column_iter_mut().skip(1).for_each(|c| c.set_cell_alignment(comfy_table::CellAlignment::Right));
        for row in rows(r, load, fill) {
            table.add_row(row.cells());
        }
        // writing to a string does not fail
        let _ = write!(out, "\n{}, {fill} % full\n{table}\n", load.name());
    }
    for note in notes(r) {
        let _ = write!(out, "\n{note}");
    }
    out
}

fn notes(r: &Results) -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    for v in &r.volumes {
        for n in &v.notes {
            let note = format!("{}, {}, {} % full, round {}: {n}", v.target, v.load.name(), v.fill, v.round + 1);
            if !all.contains(&note) {
                all.push(note);
            }
        }
    }
    all
}

/// Machine, method, a table for each load and fill level.
pub fn markdown(r: &Results) -> String {
    let mut out = String::new();
    // writing to a string does not fail
    let _ = body(r, &mut out);
    out
}

fn body(r: &Results, out: &mut String) -> std::fmt::Result {
    writeln!(out, "Measured {} by {}: {}.", date(r.head.started), r.head.tool, r.head.machine.summary())?;
    writeln!(
        out,
        "{}. The run took {:.0} s; load average at its start {}.\n",
        plan(r),
        r.head.took,
        r.head.machine.load
    )?;
    for t in &r.head.targets {
        writeln!(out, "- {}: `{}`", t.name, t.setup.join("`, `"))?;
    }
    for (load, fill) in tables(r) {
        writeln!(out, "\n**{}, {fill} % full**\n", load.name())?;
        writeln!(out, "| {} |", HEAD.join(" | "))?;
        writeln!(out, "|---|{}", "---:|".repeat(HEAD.len() - 1))?;
        for row in rows(r, load, fill) {
            writeln!(out, "| {} |", row.cells().join(" | "))?;
        }
    }
    let notes = notes(r);
    if !notes.is_empty() {
        writeln!(out)?;
    }
    notes.iter().try_for_each(|n| writeln!(out, "- {n}"))
}
