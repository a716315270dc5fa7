//! The HTML page: one file, nothing to load.

use super::svg::escape;
use super::{date, figure, figures, skipped, table, time};
use crate::results::Results;
use crate::suite::TestId;
use std::fmt::Write;

const STYLE: &str = include_str!("page.css");

/// The whole page.
pub fn page(r: &Results) -> String {
    let mut out = String::new();
    // writing to a string does not fail
    let _ = body(r, &mut out);
    out
}

fn body(r: &Results, out: &mut String) -> std::fmt::Result {
    let day = date(r.head.started);
    write!(
        out,
        r#"<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark"><title>FxMark, {day}</title><style>{STYLE}</style></head><body><main>"#
    )?;
    write!(out, "<h1>FxMark</h1><p class=\"lead\">{}</p>", escape(&r.head.machine.summary()))?;
    write!(
        out,
        "<p>{}. Measured {day} by {} in {:.0} s.</p>",
        escape(&table::plan(r)),
        escape(&r.head.tool),
        r.head.took
    )?;
    for n in &r.notes {
        write!(out, "<p class=\"note\">{}</p>", escape(n))?;
    }
    legend(r, out)?;
    cards(
        r,
        out,
        "Throughput against cores",
        "Operations per second; medians, with the range of the repetitions.",
        |t| Some(figures::throughput(r, t)),
    )?;
    if let Some(map) = figures::heat_map(r) {
        write!(
            out,
            "<section><h2>Scalability</h2><p>As the paper's Figure 13: the number is the count of cores with the best \
             throughput, the colour its speed over one core (where one core is best, the speed of all cores).</p>\
             <div class=\"wide\">{map}</div></section>"
        )?;
    }
    let base = r.target_names().first().copied().unwrap_or_default();
    let text = format!("Throughput over that of {base}, at the largest number of cores, on a logarithmic scale.");
    cards(r, out, "Relative", &text, |t| figures::relative(r, t))?;
    let text =
        "Time of one operation against the share of operations that were faster, at the largest number of cores.";
    cards(r, out, "Latency", text, |t| figures::latency(r, t))?;
    isolation(r, out)?;
    data(r, out)?;
    setup(r, out)?;
    write!(out, "</main></body></html>")
}

fn legend(r: &Results, out: &mut String) -> std::fmt::Result {
    write!(out, "<p class=\"legend\">")?;
    for t in r.target_names() {
        write!(out, "<span><i style=\"background:{}\"></i>{}</span>", figures::colour(r, t), escape(t))?;
    }
    write!(out, "</p>")
}

fn cards(
    r: &Results,
    out: &mut String,
    title: &str,
    text: &str,
    draw: impl Fn(&str) -> Option<String>,
) -> std::fmt::Result {
    let drawn: Vec<(&str, String)> = r.tests().into_iter().filter_map(|t| Some((t, draw(t)?))).collect();
    if drawn.is_empty() {
        return Ok(());
    }
    write!(out, "<section><h2>{title}</h2><p>{}</p><div class=\"cards\">", escape(text))?;
    for (test, svg) in drawn {
        let what = test.parse::<TestId>().map_or(String::new(), |t| {
            let more = match (t.background, t.direct) {
                (true, _) if t.test.name == "tenant" => " + a neighbour that runs fileserver with fsync",
                (true, _) => " + background writer",
                (_, true) => ", O_DIRECT",
                _ => "",
            };
            format!("{}{more}", t.test.what)
        });
        write!(
            out,
            "<figure><figcaption><b>{}</b> <span>{}</span></figcaption>{svg}</figure>",
            escape(test),
            escape(&what)
        )?;
    }
    write!(out, "</div></section>")
}

/// A tenant alone and beside a neighbour.
fn isolation(r: &Results, out: &mut String) -> std::fmt::Result {
    let all = r.isolation();
    if all.is_empty() {
        return Ok(());
    }
    write!(
        out,
        "<section><h2>Isolation</h2><p>Tenant A creates, writes and fsyncs small files on one core, alone and while \
         tenant B runs fileserver with fsync on another, in a directory of its own.</p><div class=\"wide\"><table><tr>\
         <th>target</th><th></th><th>alone /s</th><th>beside B /s</th><th>kept</th><th>p99 alone</th><th>p99 beside B</th></tr>"
    )?;
    for i in all {
        let p99 = |p: Option<u64>| p.map_or("-".into(), |p| time(p as f64));
        write!(
            out,
            "<tr><td><i class=\"key\" style=\"background:{}\"></i>{}</td><td></td><td>{}</td><td>{}</td><td>{:.0}%</td><td>{}</td><td>{}</td></tr>",
            figures::colour(r, i.target),
            escape(i.target),
            figure(i.alone),
            figure(i.beside),
            100.0 * i.beside / i.alone,
            p99(i.p99.0),
            p99(i.p99.1)
        )?;
    }
    write!(out, "</table></div></section>")
}

/// All figures as a table, folded.
fn data(r: &Results, out: &mut String) -> std::fmt::Result {
    write!(
        out,
        "<section><h2>All figures</h2><details><summary>{} cells</summary><div class=\"wide\"><table><tr>",
        r.cells().len()
    )?;
    for head in [
        "test",
        "target",
        "cores",
        "per second",
        "±",
        "p50",
        "p99",
        "p99.99",
        "user",
        "system",
        "idle",
        "iowait",
        "switches/op",
        "writes/op",
        "bytes/op",
        "later",
    ] {
        write!(out, "<th>{head}</th>")?;
    }
    write!(out, "</tr>")?;
    for c in r.cells() {
        let l = c.latency();
        let t = |f: fn(&crate::results::Latency) -> u64| l.as_ref().map_or("-".into(), |l| time(f(l) as f64));
        let share = |f: fn(&crate::results::CpuSplit) -> f64| format!("{:.0}%", c.mean(|r| f(&r.cpu)) * 100.0);
        let disk = c.runs.iter().any(|r| r.disk.is_some() && r.ops > 0);
        let per = |f: &dyn Fn(&crate::results::Run) -> f64| {
            if disk { figure(c.mean(|r| f(r) / r.ops.max(1) as f64)) } else { "-".into() }
        };
        write!(out, "<tr><td>{}</td><td>{}</td><td>{}</td>", escape(c.test), escape(c.target), c.cores)?;
        for text in [
            figure(c.median()),
            format!("{:.0}%", c.spread() * 100.0),
            t(|l| l.p50),
            t(|l| l.p99),
            t(|l| l.p9999),
            share(|c| c.user),
            share(|c| c.system),
            share(|c| c.idle),
            share(|c| c.iowait),
            figure(c.mean(|r| r.switches as f64 / r.ops.max(1) as f64)),
            per(&|r| r.disk.map_or(0, |d| d.writes) as f64),
            per(&|r| r.disk.map_or(0, |d| d.written_bytes) as f64),
            if c.runs.iter().any(|r| r.settle.is_some()) {
                per(&|r| r.settle.map_or(0, |d| d.written_bytes) as f64)
            } else {
                "-".into()
            },
        ] {
            write!(out, "<td>{text}</td>")?;
        }
        write!(out, "</tr>")?;
    }
    write!(
        out,
        "</table></div><p>Switches: context switches of the machine. Writes and bytes: to the device while it was \
         measured; later: bytes until all was durable.</p></details></section>"
    )
}

fn setup(r: &Results, out: &mut String) -> std::fmt::Result {
    write!(out, "<section><h2>Set-up</h2><dl>")?;
    for t in &r.head.targets {
        write!(out, "<dt>{}</dt>", escape(&t.name))?;
        for line in &t.setup {
            write!(out, "<dd><code>{}</code></dd>", escape(line))?;
        }
    }
    write!(out, "</dl>")?;
    for (why, cells) in skipped(r) {
        write!(out, "<p>Left out, {}: {}.</p>", escape(&why), escape(&cells))?;
    }
    let p = &r.head.plan;
    write!(
        out,
        "<p>CPUs {:?}, {} files, {} entries, {} blocks, {} branches, seed {}. Caches {}dropped. Mitigations: {}.</p></section>",
        p.cpus,
        p.scale.files,
        p.scale.entries,
        p.scale.blocks,
        p.scale.branch,
        p.seed,
        if p.caches_dropped { "" } else { "not " },
        escape(&r.head.machine.mitigations.join(", "))
    )
}
