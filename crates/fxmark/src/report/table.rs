//! The table on the terminal: one row per test and number of cores, one column per target.

use super::{figure, time};
use crate::results::Results;
use comfy_table::{Cell, CellAlignment, Table};

/// All cells: median throughput, spread, and the ratio to one core.
pub fn table(r: &Results) -> String {
    let mut out = format!("{}\n{}\n", r.head.machine.summary(), plan(r));
    let targets = r.target_names();
    let mut t = Table::new();
    super::lines(&mut t);
    let mut head = vec![Cell::new("test"), Cell::new("cores")];
    head.extend(targets.iter().map(|n| Cell::new(n).set_alignment(CellAlignment::Right)));
    t.set_header(head);
    for test in r.tests() {
        for cores in r.cores_of(test) {
            let mut row = vec![Cell::new(test), Cell::new(cores)];
            for target in &targets {
                let text = r.cell(test, target, cores).map_or_else(
                    || "-".to_owned(),
                    |c| {
                        let spread =
                            if c.runs.len() > 1 { format!(" ±{:.0}%", c.spread() * 100.0) } else { String::new() };
                        format!("{}{spread}", figure(c.median()))
                    },
                );
                row.push(Cell::new(text).set_alignment(CellAlignment::Right));
            }
            t.add_row(row);
        }
    }
    out += &format!(
        "{t}\nOperations per second, median of {} ± half the range (quartiles from 4 on).\n",
        r.head.plan.reps
    );
    out += &slowest(r);
    out += &windows(r);
    for i in r.isolation() {
        let kept = 100.0 * i.beside / i.alone;
        out += &format!("isolation: on {} a tenant keeps {kept:.0}% of its speed beside a busy neighbour\n", i.target);
    }
    for (why, cells) in super::skipped(r) {
        out += &format!("left out, {why}: {cells}\n");
    }
    for n in &r.notes {
        out += &format!("note: {n}\n");
    }
    out.trim_end().to_owned()
}

/// How it was measured, in one line.
pub fn plan(r: &Results) -> String {
    let p = &r.head.plan;
    let again = if p.remade { "made again for each" } else { "made once" };
    format!(
        "{} profile, {:?} mode: {} s, {} repetition(s), file system {again}; {}",
        p.profile, p.mode, p.seconds, p.reps, p.media
    )
}

/// How throughput, and the CPU time that the file system's processes took per operation, went over time.
fn windows(r: &Results) -> String {
    let mut out = String::new();
    for run in r.runs.iter().filter(|run| !run.windows.is_empty()) {
        out +=
            &format!("over time: {} on {}, {} core(s), repetition {}\n", run.test, run.target, run.cores, run.rep + 1);
        let mut at = 0.0;
        for w in &run.windows {
            out += &format!("  {at:6.1} s  {:>8}/s", figure(w.ops as f64 / w.secs.max(1e-9)));
            if let Some(cpu) = w.daemon {
                out +=
                    &format!("  {:>8} of the daemon's CPU time per operation", time(cpu * 1e9 / w.ops.max(1) as f64));
            }
            out.push('\n');
            at += w.secs;
        }
    }
    out
}

/// The cells with the longest tails.
fn slowest(r: &Results) -> String {
    let cells = r.cells();
    let mut tails: Vec<_> = cells.iter().filter_map(|c| Some((c.latency()?, c))).collect();
    tails.sort_by_key(|(l, _)| std::cmp::Reverse(l.p9999));
    let mut out = String::new();
    for (l, c) in tails.iter().take(3) {
        out += &format!(
            "longest tail: {} on {}, {} core(s): p50 {}, p99 {}, p99.99 {}\n",
            c.test,
            c.target,
            c.cores,
            time(l.p50 as f64),
            time(l.p99 as f64),
            time(l.p9999 as f64)
        );
    }
    out
}
