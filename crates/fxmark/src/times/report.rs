//! Tables of what was timed: a row for each step, a column for each file system.

use super::{Results, Sample, Unit, What};
use crate::report::{date, figure, time};
use crate::stats::median;

fn value(unit: Unit, n: f64) -> String {
    match unit {
        Unit::Seconds => time(n * 1e9),
        Unit::Rate => format!("{}/s", figure(n)),
        Unit::Ratio => format!("{n:.2}"),
        Unit::Bytes => format!("{} MiB", figure(n / f64::from(1 << 20))),
    }
}

/// A value in a line, while it runs.
pub fn line(s: &Sample) -> String {
    format!("{} ({}), {}: {}: {}", s.what.name(), s.rep + 1, s.target, s.step, value(s.unit, s.value))
}

/// Keeps the first of equal values, in order.
fn distinct<T: PartialEq>(all: impl Iterator<Item = T>) -> Vec<T> {
    let mut out = Vec::new();
    all.for_each(|one| {
        if !out.contains(&one) {
            out.push(one);
        }
    });
    out
}

/// What was timed.
pub fn shown(r: &Results) -> Vec<What> {
    distinct(r.samples.iter().map(|s| s.what))
}

/// Head and rows.
fn table(r: &Results, what: What) -> Vec<Vec<String>> {
    let samples = || r.samples.iter().filter(move |s| s.what == what);
    let targets = distinct(samples().map(|s| s.target.as_str()));
    let mut head = vec![String::new()];
    head.extend(targets.iter().map(|t| (*t).to_owned()));
    let mut rows = vec![head];
    for step in distinct(samples().map(|s| s.step.as_str())) {
        let mut row = vec![step.to_owned()];
        for target in &targets {
            let cell: Vec<&Sample> = samples().filter(|s| s.step == step && s.target == *target).collect();
            row.push(spread(&cell));
        }
        rows.push(row);
    }
    rows
}

/// Median, with the range where there are several.
fn spread(cell: &[&Sample]) -> String {
    let all: Vec<f64> = cell.iter().map(|s| s.value).collect();
    let (min, max) = all.iter().fold((f64::MAX, f64::MIN), |(min, max), n| (min.min(*n), max.max(*n)));
    match cell.first() {
        None => "-".into(),
        Some(s) if all.len() == 1 => value(s.unit, s.value),
        Some(s) => format!("{} ({} – {})", value(s.unit, median(&all)), value(s.unit, min), value(s.unit, max)),
    }
}

/// For a page of the documentation.
pub fn markdown(r: &Results, what: What) -> String {
    let p = &r.head.plan;
    let mut out = format!(
        "Measured {}: {}. Medians of {} repetition(s), with the range.\n",
        date(r.head.started),
        r.head.machine.summary(),
        p.reps
    );
    for (_, note) in p.notes.iter().filter(|n| n.0 == what) {
        out += &format!("{note}\n");
    }
    out.push('\n');
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    for (i, row) in table(r, what).iter().enumerate() {
        out += &line(row);
        if i == 0 {
            out += &line(&vec!["---".to_owned(); row.len()]);
        }
    }
    out
}

/// For a terminal.
pub fn terminal(r: &Results) -> String {
    let one = |what: What| {
        let mut t = comfy_table::Table::new();
        crate::report::lines(&mut t);
        let mut rows = table(r, what).into_iter();
        t.set_header(rows.next().unwrap_or_default());
        rows.for_each(|row| {
            t.add_row(row);
        });
        let notes = r.head.plan.notes.iter().filter(|n| n.0 == what).map(|n| format!("{}\n", n.1));
        format!("{}\n{}{t}", what.name(), notes.collect::<String>())
    };
    shown(r).into_iter().map(one).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::Head;
    use crate::target::Target;
    use crate::times::{Plan, SCHEMA, VERSION};

    #[test]
    fn steps_are_rows_and_file_systems_columns() {
        let sample = |target: &str, step: &str, unit, value, rep| Sample {
            what: What::Gc,
            target: target.into(),
            step: step.into(),
            unit,
            value,
            rep,
        };
        let plan = Plan { reps: 2, media: "a file".into(), notes: vec![(What::Gc, "Of a volume.".into())] };
        let r = Results {
            head: Head::now(SCHEMA, VERSION, plan, &[Target::Library]),
            samples: vec![
                sample("library", "GC", Unit::Seconds, 0.5, 0),
                sample("library", "kept", Unit::Ratio, 0.913, 0),
                sample("library", "GC", Unit::Seconds, 0.25, 1),
                sample("ext4", "kept", Unit::Ratio, 1.0, 1),
            ],
        };
        let text = markdown(&r, What::Gc);
        for row in [
            "Of a volume.",
            "|  | library | ext4 |",
            "| --- | --- | --- |",
            "| GC | 375 ms (250 ms – 500 ms) | - |",
            "| kept | 0.91 | 1.00 |",
        ] {
            assert!(text.lines().any(|l| l == row), "{row}\n{text}");
        }
        assert_eq!(shown(&r), [What::Gc]);
        assert!(terminal(&r).contains("375 ms"));
    }
}
