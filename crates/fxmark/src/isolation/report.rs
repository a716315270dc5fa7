//! What a run found, as tables.

use super::{Cell, Flood, Results};
use crate::stats::median;
use std::fmt::Write;

/// A tenant keeps so much of its throughput, and its p99 becomes at most so many times as long.
const GOAL_RATE: f64 = 0.9;
const GOAL_P99: f64 = 1.5;

fn name(neighbour: Option<Flood>) -> &'static str {
    neighbour.map_or("alone", Flood::name)
}

/// One combination in a line, while it runs.
pub fn line(c: &Cell) -> String {
    let flooded = c.flooded.map_or_else(String::new, |f| {
        let rate = f.ops as f64 / f.seconds.max(1e-9);
        format!("; the neighbour {rate:.0}/s, {:.0} MiB/s", f.bytes as f64 / f.seconds.max(1e-9) / f64::from(1 << 20))
    });
    let paused = match c.paused {
        Some(s) if s > 0.0 => format!("; the machine stood still for {:.0} ms", 1000.0 * s),
        _ => String::new(),
    };
    format!(
        "{}, {} ({}): {:.0} of {:.0} transactions/s, p50 {:.0} µs, p99 {:.0} µs{flooded}{paused}",
        c.target,
        name(c.neighbour),
        c.rep + 1,
        c.rate,
        c.paced,
        c.p50,
        c.p99
    )
}

/// Of one combination, all repetitions.
struct Row<'r> {
    target: &'r str,
    neighbour: Option<Flood>,
    /// Of what it was to do, each repetition.
    kept: Vec<f64>,
    p50: Vec<f64>,
    p99: Vec<f64>,
    /// Over that alone in the same repetition.
    longer: Vec<f64>,
    /// What the neighbour did a second.
    ops: Vec<f64>,
    mib: Vec<f64>,
}

fn rows(r: &Results) -> Vec<Row<'_>> {
    let mut rows: Vec<Row<'_>> = Vec::new();
    for c in &r.cells {
        let alone = r.cells.iter().find(|a| a.target == c.target && a.rep == c.rep && a.neighbour.is_none());
        let at = rows.iter().position(|row| row.target == c.target && row.neighbour == c.neighbour);
        let at = at.unwrap_or_else(|| {
            let none = Vec::new;
            rows.push(Row {
                target: &c.target,
                neighbour: c.neighbour,
                kept: none(),
                p50: none(),
                p99: none(),
                longer: none(),
                ops: none(),
                mib: none(),
            });
            rows.len() - 1
        });
        let row = &mut rows[at];
        row.kept.push(c.rate / c.paced.max(1e-9));
        row.p50.push(c.p50);
        row.p99.push(c.p99);
        row.longer.push(alone.map_or(1.0, |a| c.p99 / a.p99.max(1e-9)));
        if let Some(f) = c.flooded {
            row.ops.push(f.ops as f64 / f.seconds.max(1e-9));
            row.mib.push(f.bytes as f64 / f.seconds.max(1e-9) / f64::from(1 << 20));
        }
    }
    rows.sort_by_key(|row| r.head.targets.iter().position(|t| t.name == row.target));
    rows
}

/// Median, with the range where there are several.
fn spread(v: &[f64], digits: usize) -> String {
    let (min, max) = v.iter().fold((f64::MAX, f64::MIN), |(min, max), n| (min.min(*n), max.max(*n)));
    match v.len() {
        0 => "-".into(),
        1 => format!("{:.digits$}", v[0]),
        _ => format!("{:.digits$} ({min:.digits$}–{max:.digits$})", median(v)),
    }
}

const HEAD: [&str; 8] = [
    "file system",
    "neighbour",
    "throughput, % of what was asked",
    "p50, µs",
    "p99, µs",
    "p99 over alone",
    "within 10 % and 1.5×",
    "the neighbour's work a second",
];

fn cells(row: &Row<'_>) -> [String; 8] {
    let percent: Vec<f64> = row.kept.iter().map(|n| 100.0 * n).collect();
    let met = median(&row.kept) >= GOAL_RATE && median(&row.longer) <= GOAL_P99;
    let work = match row.neighbour {
        None => "-".into(),
        Some(Flood::Create) => format!("{} files", spread(&row.ops, 0)),
        Some(Flood::Fsync) => format!("{} fsyncs", spread(&row.ops, 0)),
        Some(Flood::Stream | Flood::Fill | Flood::Read) => format!("{} MiB", spread(&row.mib, 0)),
    };
    [
        row.target.into(),
        name(row.neighbour).into(),
        spread(&percent, 0),
        spread(&row.p50, 0),
        spread(&row.p99, 0),
        if row.neighbour.is_some() { spread(&row.longer, 1) } else { "-".into() },
        if row.neighbour.is_none() {
            "-"
        } else if met {
            "yes"
        } else {
            "no"
        }
        .into(),
        work,
    ]
}

/// For a terminal.
pub fn terminal(r: &Results) -> String {
    let mut table = comfy_table::Table::new();
    crate::report::lines(&mut table);
    table.set_header(HEAD);
    rows(r).iter().for_each(|row| {
        table.add_row(cells(row));
    });
    table.to_string()
}

/// What is known of the machine's own pauses.
fn pauses(r: &Results) -> String {
    let paused: Vec<f64> = r.cells.iter().filter_map(|c| c.paused).filter(|s| *s > 0.0).collect();
    if r.cells.iter().any(|c| c.paused.is_none()) {
        return " Nobody looked whether the machine itself stood still meanwhile.".into();
    }
    match paused.iter().copied().reduce(f64::max) {
        None => " The machine itself never stood still meanwhile.".into(),
        Some(most) => format!(
            " In {} of {} measurements the machine itself stood still, however often they were repeated, for {:.0} ms at most.",
            paused.len(),
            r.cells.len(),
            1000.0 * most
        ),
    }
}

/// For a page of the documentation.
pub fn markdown(r: &Results) -> String {
    let p = &r.head.plan;
    let mut out = format!(
        "Medians of {} repetitions, with the range; {} s each, on {}; {} bytes. {}{}{}\n\n",
        p.reps,
        p.seconds,
        p.media,
        p.size,
        p.neighbour_bps.map_or_else(
            || "The neighbour was limited in space only.".into(),
            |n| format!("The neighbour might read and write {n} bytes a second each.")
        ),
        if p.mount_tenants { " Each tenant of braidfs was mounted by itself." } else { "" },
        pauses(r)
    );
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    out += &line(&HEAD.map(str::to_owned));
    out += &line(&HEAD.map(|_| "---".to_owned()));
    rows(r).iter().for_each(|row| out += &line(&cells(row)));
    out.push('\n');
    for t in &r.head.targets {
        // writing to a String cannot fail
        let _ = writeln!(out, "- {}: `{}`", t.name, t.setup.join("`, `"));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isolation::{Flooded, Plan, SCHEMA, VERSION};
    use crate::results::Head;
    use crate::target::Target;

    #[test]
    fn a_goal_is_met_or_not() {
        let cell = |rep, neighbour: Option<Flood>, rate, p99| Cell {
            rep,
            target: "ext4".into(),
            neighbour,
            paced: 100.0,
            rate,
            p50: 10.0,
            p99,
            max: 2.0 * p99,
            paused: Some(if rep == 1 && neighbour.is_none() { 0.025 } else { 0.0 }),
            flooded: neighbour.map(|_| Flooded { ops: 10, bytes: 20 << 20, seconds: 2.0, full: 0 }),
        };
        let plan = Plan {
            size: 1 << 30,
            media: "a disk".into(),
            file: 1 << 20,
            seconds: 1.0,
            warm_up: 0.0,
            reps: 2,
            neighbour_bps: None,
            mount_tenants: false,
            cpus: [0, 1],
            cold: false,
        };
        let mut r = Results {
            head: Head::now(SCHEMA, VERSION, plan, &[Target::Ext4]),
            cells: vec![
                cell(0, None, 100.0, 200.0),
                cell(0, Some(Flood::Stream), 95.0, 290.0),
                cell(0, Some(Flood::Fsync), 80.0, 200.0),
                cell(0, Some(Flood::Read), 100.0, 400.0),
                cell(1, None, 100.0, 100.0),
                cell(1, Some(Flood::Stream), 95.0, 140.0),
                cell(1, Some(Flood::Fsync), 85.0, 100.0),
                cell(1, Some(Flood::Read), 100.0, 200.0),
            ],
        };
        r.head.targets[0].setup.push("mkfs.ext4 DEVICE".into());
        let text = markdown(&r);
        assert!(text.contains("In 1 of 8 measurements") && text.contains("for 25 ms at most"), "{text}");
        for row in [
            "| ext4 | alone | 100 (100–100) | 10 (10–10) | 150 (100–200) | - | - | - |",
            "| ext4 | stream | 95 (95–95) | 10 (10–10) | 215 (140–290) | 1.4 (1.4–1.4) | yes | 10 (10–10) MiB |",
            "| ext4 | fsync | 82 (80–85) | 10 (10–10) | 150 (100–200) | 1.0 (1.0–1.0) | no | 5 (5–5) fsyncs |",
            "| ext4 | read | 100 (100–100) | 10 (10–10) | 300 (200–400) | 2.0 (2.0–2.0) | no | 10 (10–10) MiB |",
            "- ext4: `mkfs.ext4 DEVICE`",
        ] {
            assert!(text.lines().any(|l| l == row), "{row}\n{text}");
        }
        r.cells.truncate(1);
        assert!(markdown(&r).contains("never stood still"));
        r.cells[0].paused = None;
        assert!(markdown(&r).contains("Nobody looked"));
        assert!(terminal(&r).contains("alone"));
    }
}
