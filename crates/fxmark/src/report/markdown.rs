//! Markdown tables, for `docs/benchmarks.md`.

use super::{date, figure, time};
use crate::results::Results;
use std::fmt::Write;

/// Machine, method, throughput, latency and device traffic.
pub fn markdown(r: &Results) -> String {
    let mut out = String::new();
    // writing to a string does not fail
    let _ = body(r, &mut out);
    out
}

fn body(r: &Results, out: &mut String) -> std::fmt::Result {
    let targets = r.target_names();
    writeln!(out, "Measured {} by {}: {}.", date(r.head.started), r.head.tool, r.head.machine.summary())?;
    writeln!(out, "{}. The run took {:.0} s.\n", super::table::plan(r), r.head.took)?;
    for n in &r.notes {
        writeln!(out, "Note: {n}.\n")?;
    }
    for t in &r.head.targets {
        writeln!(out, "- {}: `{}`", t.name, t.setup.join("`, `"))?;
    }
    writeln!(out, "\nOperations per second, median ± half the range of {} repetition(s).\n", r.head.plan.reps)?;
    writeln!(out, "| test | cores | {} |", targets.join(" | "))?;
    writeln!(out, "|---|---:|{}", "---:|".repeat(targets.len()))?;
    for test in r.tests() {
        for cores in r.cores_of(test) {
            let cells = targets.iter().map(|t| {
                r.cell(test, t, cores)
                    .map_or_else(|| "-".into(), |c| format!("{} ±{:.0}%", figure(c.median()), c.spread() * 100.0))
            });
            writeln!(out, "| {test} | {cores} | {} |", cells.collect::<Vec<_>>().join(" | "))?;
        }
    }
    writeln!(out, "\nLatency of one operation at the largest number of cores, p50 / p99 / p99.99.\n")?;
    writeln!(out, "| test | cores | {} |", targets.join(" | "))?;
    writeln!(out, "|---|---:|{}", "---:|".repeat(targets.len()))?;
    for test in r.tests() {
        let Some(&cores) = r.cores_of(test).last() else { continue };
        let cells = targets.iter().map(|t| {
            let latency = r.cell(test, t, cores).and_then(|c| c.latency());
            latency.map_or_else(
                || "-".into(),
                |l| format!("{} / {} / {}", time(l.p50 as f64), time(l.p99 as f64), time(l.p9999 as f64)),
            )
        });
        writeln!(out, "| {test} | {cores} | {} |", cells.collect::<Vec<_>>().join(" | "))?;
    }
    writeln!(out, "\nBytes written to the device per operation, until all was durable, at one core.\n")?;
    writeln!(out, "| test | {} |", targets.join(" | "))?;
    writeln!(out, "|---|{}", "---:|".repeat(targets.len()))?;
    for test in r.tests() {
        let Some(&cores) = r.cores_of(test).first() else { continue };
        let cells = targets.iter().map(|t| {
            let durable = |r: &crate::results::Run| r.disk.is_some() && r.settle.is_some() && r.ops > 0;
            let cell = r.cell(test, t, cores).filter(|c| c.runs.iter().any(|r| durable(r)));
            cell.map_or_else(
                || "-".into(),
                |c| {
                    figure(c.mean(|r| {
                        let bytes = r.disk.map_or(0, |d| d.written_bytes) + r.settle.map_or(0, |d| d.written_bytes);
                        bytes as f64 / r.ops.max(1) as f64
                    }))
                },
            )
        });
        writeln!(out, "| {test} | {} |", cells.collect::<Vec<_>>().join(" | "))?;
    }
    let isolation = r.isolation();
    if !isolation.is_empty() {
        writeln!(
            out,
            "\nA tenant (small files with fsync, one core) alone and beside a neighbour (fileserver with fsync).\n"
        )?;
        writeln!(
            out,
            "| target | alone /s | beside /s | kept | p99 alone | p99 beside |\n|---|---:|---:|---:|---:|---:|"
        )?;
    }
    for i in isolation {
        let p99 = |p: Option<u64>| p.map_or("-".into(), |p| time(p as f64));
        let (alone, beside, kept) = (figure(i.alone), figure(i.beside), 100.0 * i.beside / i.alone);
        let (a, b) = (p99(i.p99.0), p99(i.p99.1));
        writeln!(out, "| {} | {alone} | {beside} | {kept:.0}% | {a} | {b} |", i.target)?;
    }
    if !r.skipped.is_empty() {
        writeln!(out, "\nLeft out:\n")?;
    }
    for (why, cells) in super::skipped(r) {
        writeln!(out, "- {why}: {cells}")?;
    }
    Ok(())
}
