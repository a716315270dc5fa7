//! Tables of a figure: a row for each test and number of cores, a column for each file system.

use super::list::{Figure, Shows};
use super::{Line, Results};
use crate::report::{date, figure, time};
use crate::results::{LockWait, Run};
use crate::stats::{median, spread};

/// A test on one file system, in a line, while it runs.
pub fn line(name: &str, series: &str, run: &Run) -> String {
    let p999 = run.latency.as_ref().map_or_else(String::new, |l| format!(", p99.9 {}", time(l.p999 as f64)));
    format!("{name}: {} on {series}, {} core(s): {}/s{p999}", run.test, run.cores, figure(run.throughput))
}

/// A table: what it tells, its head, its rows.
struct Table {
    tells: String,
    head: Vec<String>,
    rows: Vec<Vec<String>>,
}

/// The runs of a cell.
fn runs<'r>(r: &'r Results, f: &Figure, (test, cores): (&str, usize), series: &str) -> Vec<&'r Run> {
    let fits = |l: &&Line| l.figure == f.name && l.series == series && l.run.test == test && l.run.cores == cores;
    r.lines.iter().filter(fits).map(|l| &l.run).collect()
}

/// A figure of all runs: the median, and half the range where there are several.
fn of(runs: &[&Run], text: fn(f64) -> String, value: impl Fn(&Run) -> Option<f64>) -> String {
    let all: Vec<f64> = runs.iter().filter_map(|r| value(r)).collect();
    match all.len() {
        0 => "-".into(),
        1 => text(all[0]),
        _ => format!("{} ±{:.0}%", text(median(&all)), 100.0 * spread(&all)),
    }
}

fn bytes(n: f64) -> String {
    format!("{} MiB", figure(n / f64::from(1 << 20)))
}

fn ratio(n: f64) -> String {
    format!("{n:.2}")
}

/// Tests and numbers of cores, in their order.
fn cells(r: &Results, f: &Figure) -> Vec<(String, usize)> {
    let mut out: Vec<(String, usize)> = Vec::new();
    for l in r.lines.iter().filter(|l| l.figure == f.name) {
        let cell = (l.run.test.clone(), l.run.cores);
        if !out.contains(&cell) {
            out.push(cell);
        }
    }
    out
}

fn table(
    r: &Results,
    f: &Figure,
    tells: &str,
    text: fn(f64) -> String,
    value: impl Fn(&Run) -> Option<f64> + Copy,
) -> Table {
    let mut head = vec!["test".to_owned(), "cores".to_owned()];
    head.extend(f.series.iter().map(|s| s.label.clone()));
    let row = |(test, cores): &(String, usize)| {
        let mut row = vec![test.clone(), cores.to_string()];
        row.extend(f.series.iter().map(|s| of(&runs(r, f, (test, *cores), &s.label), text, value)));
        row
    };
    Table { tells: tells.into(), head, rows: cells(r, f).iter().map(row).collect() }
}

fn p999(run: &Run) -> Option<f64> {
    run.latency.as_ref().map(|l| l.p999 as f64)
}

/// p99.9 of each test alone, beside commits, and the one over the other, by repetition.
fn tails(r: &Results, f: &Figure) -> Table {
    let mut head = vec!["test".to_owned(), "file system".to_owned()];
    head.extend(["p50", "p99.9 alone", "p99.9 beside commits", "times", "commits a second"].map(str::to_owned));
    let mut rows = Vec::new();
    for (test, cores) in cells(r, f) {
        let beside = format!("{test}_commit");
        if !f.tests.contains(&beside.as_str()) {
            continue;
        }
        for s in &f.series {
            let alone = runs(r, f, (&test, cores), &s.label);
            let commits = runs(r, f, (&beside, cores), &s.label);
            let longer = |run: &Run| {
                let same = alone.iter().find(|a| a.rep == run.rep)?;
                Some(p999(run)? / p999(same)?.max(1.0))
            };
            rows.push(vec![
                test.clone(),
                s.label.clone(),
                of(&alone, time, |run| run.latency.as_ref().map(|l| l.p50 as f64)),
                of(&alone, time, p999),
                of(&commits, time, p999),
                of(&commits, ratio, longer),
                of(&commits, figure, |run| run.background),
            ]);
        }
    }
    Table { tells: "Latency of one operation, alone and beside the commits.".into(), head, rows }
}

/// So many locks are told of.
const HOTTEST: usize = 5;

/// The locks that threads waited for longest in each test on each file system, of all repetitions together.
fn locks(r: &Results, f: &Figure) -> Table {
    let mut head: Vec<String> = ["test", "workers", "file system", "lock"].map(str::to_owned).into();
    head.extend(["waits per 1000 operations", "mean wait", "share of the workers' time"].map(str::to_owned));
    let mut rows = Vec::new();
    for (test, cores) in cells(r, f) {
        for s in &f.series {
            let runs = runs(r, f, (&test, cores), &s.label);
            let mut waits = Vec::new();
            runs.iter().for_each(|run| LockWait::add(&mut waits, &run.lock_waits));
            waits.sort_by(|a, b| b.secs.total_cmp(&a.secs));
            let operations: u64 = runs.iter().map(|run| run.ops).sum();
            let seconds: f64 = runs.iter().map(|run| run.secs * cores as f64).sum();
            let row = |w: &LockWait| {
                let often = figure(1000.0 * w.waits as f64 / operations.max(1) as f64);
                let share = format!("{:.2} %", 100.0 * w.secs / seconds.max(1e-9));
                [w.lock.clone(), often, time(1e9 * w.secs / w.waits.max(1) as f64), share]
            };
            let mut told: Vec<_> = waits.iter().take(HOTTEST).map(row).collect();
            if told.is_empty() && !runs.is_empty() {
                told.push(["none".into(), figure(0.0), "-".into(), "0.00 %".into()]);
            }
            let of = [test.clone(), cores.to_string(), s.label.clone()];
            rows.extend(told.into_iter().map(|lock| of.iter().cloned().chain(lock).collect::<Vec<_>>()));
        }
    }
    let tells = "The locks that threads waited for longest, those of the background counted in; what they wait for at a condition, as \
                 a commit that another thread does, is no lock.";
    Table { tells: tells.into(), head, rows }
}

fn tables(r: &Results, f: &Figure) -> Vec<Table> {
    let rate = || table(r, f, "Operations per second.", figure, |run| Some(run.throughput));
    match f.shows {
        Shows::Rate => vec![rate()],
        Shows::RateAndDevice => {
            let mib = |run: &Run| Some(run.disk?.written_bytes as f64 / run.secs.max(1e-9));
            let used = |run: &Run| Some(run.disk?.flushes as f64 / run.secs.max(1e-9));
            let wrote = "Written to the device each second of the measurement.";
            vec![rate(), table(r, f, wrote, bytes, mib), table(r, f, "Flushes of the device a second.", figure, used)]
        }
        Shows::Tails => vec![tails(r, f)],
        Shows::Locks => vec![rate(), locks(r, f)],
        Shows::Memory => {
            let process = |run: &Run| run.memory?.process.map(|b| b as f64);
            let kernel = |run: &Run| Some(run.memory?.kernel as f64);
            let most = "Most memory of the processes that are the file system (the library's has the load in it).";
            let grown = "Growth of the kernel's page cache, buffers and slabs.";
            vec![table(r, f, most, bytes, process), table(r, f, grown, bytes, kernel)]
        }
    }
}

/// For a page of the documentation.
pub fn markdown(r: &Results, f: &Figure) -> String {
    let p = &r.head.plan;
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let mut out = format!(
        "Measured {}: {}. {} s each after {} s of warm-up, median of {} repetition(s) ± half their range, a file system made \
         anew for each; {} MiB on {}.\n",
        date(r.head.started),
        r.head.machine.summary(),
        p.seconds,
        p.warm_up,
        reps(r, f),
        p.size >> 20,
        p.media
    );
    for t in tables(r, f) {
        out += &format!("\n{}\n\n{}", t.tells, line(&t.head));
        out += &line(&vec!["---".to_owned(); t.head.len()]);
        t.rows.iter().for_each(|row| out += &line(row));
    }
    out.push('\n');
    for m in r.made.iter().filter(|m| m.figure == f.name) {
        let switches = if m.switches.is_empty() { String::new() } else { format!(", switches `{}`", m.switches) };
        out += &format!("- {}: `{}`{switches}\n", m.series, m.setup.join("`, `"));
    }
    for note in notes(r, f) {
        out += &format!("\nNote: {note}.\n");
    }
    out
}

/// Those of the run and of this figure: what is said of another one begins with its name.
fn notes<'r>(r: &'r Results, f: &Figure) -> impl Iterator<Item = &'r String> {
    let all = super::list::all();
    let others: Vec<String> = all.iter().filter(|o| o.name != f.name).map(|o| format!("{}: ", o.name)).collect();
    r.notes.iter().filter(move |note| !others.iter().any(|o| note.starts_with(o)))
}

/// Repetitions that every cell has.
fn reps(r: &Results, f: &Figure) -> usize {
    let of = |cell: &(String, usize)| {
        let had = |s: &super::list::Series| runs(r, f, (&cell.0, cell.1), &s.label).len();
        f.series.iter().map(had).filter(|n| *n > 0).min().unwrap_or(0)
    };
    cells(r, f).iter().map(of).min().unwrap_or(0)
}

/// For a terminal.
pub fn terminal(r: &Results, f: &Figure) -> String {
    let mut out = format!("{}\n", f.title);
    for t in tables(r, f) {
        let mut shown = comfy_table::Table::new();
        crate::report::lines(&mut shown);
        shown.set_header(&t.head);
        t.rows.iter().for_each(|row| {
            shown.add_row(row);
        });
        out += &format!("{}\n{shown}\n", t.tells);
    }
    for note in notes(r, f) {
        out += &format!("note: {note}\n");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figures::{Made, Plan, SCHEMA, VERSION, list};
    use crate::results::{CpuSplit, Head, Latency};
    use crate::run::STANDARD;

    fn run(test: &str, rep: usize, throughput: f64, p999: u64) -> Run {
        Run {
            test: test.into(),
            target: "ext4".into(),
            cores: 1,
            rep,
            ops: 10,
            secs: 0.5,
            throughput,
            fairness: (0.0, 0.0),
            background: test.ends_with("_commit").then_some(95.0),
            latency: Latency::of(vec![(100, 990), (p999, 10)], 1),
            cpu: CpuSplit::default(),
            voluntary: 0,
            involuntary: 0,
            switches: 0,
            disk: Some(crate::sys::DiskCounters { written_bytes: 3 << 20, flushes: 7, ..Default::default() }),
            settle: None,
            phases: 1,
            daemon: None,
            memory: None,
            windows: Vec::new(),
            lock_waits: Vec::new(),
        }
    }

    #[test]
    fn the_locks_that_were_waited_for_longest() {
        let wait = |lock: &str, waits, secs| LockWait { lock: lock.into(), waits, secs };
        let line = |rep, series: &str, lock_waits| Line {
            figure: "spanfs-1-locks".into(),
            series: series.into(),
            run: Run { lock_waits, ..run("syncwrite_seq", rep, 5.0, 1000) },
        };
        let many: Vec<_> = (0..6).map(|n| wait(&format!("lock {n}"), 1, 0.001 * f64::from(n))).collect();
        let r = results(vec![
            line(0, "library, 1 domain", [many, vec![wait("gate", 4, 0.03)]].concat()),
            line(1, "library, 1 domain", vec![wait("gate", 6, 0.07)]),
            line(0, "library, 16 domains", Vec::new()),
        ]);
        let all = list::all();
        let figure = all.iter().find(|f| f.name == "spanfs-1-locks").expect("a figure");
        let text = markdown(&r, figure);
        let rows: Vec<&str> = text.lines().filter(|l| l.starts_with("| syncwrite_seq | 1 | library")).collect();
        // twenty operations and one second of the worker
        assert_eq!(rows[0], "| syncwrite_seq | 1 | library, 1 domain | gate | 500 | 10.0 ms | 10.00 % |", "{text}");
        assert_eq!(rows[1], "| syncwrite_seq | 1 | library, 1 domain | lock 5 | 50.0 | 5.00 ms | 0.50 % |", "{text}");
        assert_eq!(rows[5], "| syncwrite_seq | 1 | library, 16 domains | none | 0.00 | - | 0.00 % |", "{text}");
        assert_eq!(rows.len(), 6, "{text}");
    }

    fn results(lines: Vec<Line>) -> Results {
        let plan = Plan {
            figures: Vec::new(),
            seconds: 0.25,
            warm_up: 0.0,
            reps: 2,
            size: 1 << 30,
            media: "a disk".into(),
            cores: 2,
            scale: STANDARD.scale,
        };
        Results { head: Head::now(SCHEMA, VERSION, plan, &[]), lines, made: Vec::new(), notes: Vec::new() }
    }

    #[test]
    fn tails_are_of_the_same_repetition() {
        let line = |figure: &str, run| Line { figure: figure.into(), series: "ext4".into(), run };
        let mut r = Results {
            notes: vec!["time was up".into(), "max-8b: without MRPL on library: why".into()],
            ..results(vec![
                line("max-8b", run("DRBL", 0, 5.0, 1000)),
                line("max-8b", run("DRBL_commit", 0, 4.0, 2000)),
                line("max-8b", run("DRBL", 1, 5.0, 4000)),
                line("max-8b", run("DRBL_commit", 1, 4.0, 4000)),
                line("fast18-6", run("varmail", 0, 100.0, 1000)),
                line("fast18-6", run("varmail", 1, 300.0, 1000)),
            ])
        };
        r.made.push(Made {
            figure: "fast18-6".into(),
            series: "ext4".into(),
            setup: vec!["mkfs.ext4 DEVICE".into()],
            switches: "slots".into(),
        });
        let all = list::all();
        let figure = |name: &str| all.iter().find(|f| f.name == name).expect("a figure");
        let tails = markdown(&r, figure("max-8b"));
        let row = "| DRBL | ext4 | 100 ns ±0% | 2.50 µs ±60% | 3.00 µs ±33% | 1.50 ±33% | 95.0 ±0% |";
        assert!(tails.lines().any(|l| l == row), "{tails}");
        assert!(tails.contains("median of 2 repetition(s)"), "{tails}");
        let rates = markdown(&r, figure("fast18-6"));
        let rest = " | -".repeat(6);
        for row in [
            &format!("| varmail | 1 | 200 ±50%{rest} |"),
            &format!("| varmail | 1 | 6.00 MiB ±0%{rest} |"),
            &format!("| varmail | 1 | 14.0 ±0%{rest} |"),
            "- ext4: `mkfs.ext4 DEVICE`, switches `slots`",
            "Note: time was up.",
        ] {
            assert!(rates.lines().any(|l| l == row), "{row}\n{rates}");
        }
        assert!(tails.contains("without MRPL") && !rates.contains("without MRPL"), "a note of another figure");
        r.lines.truncate(1);
        assert!(terminal(&r, figure("max-8b")).contains("DRBL"));
    }
}
