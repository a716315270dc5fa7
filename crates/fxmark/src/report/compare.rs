//! Two results files side by side: ratios, and whether they are more than chance.

use super::{figure, time};
use crate::results::Results;
use crate::{Error, Result, stats};
use comfy_table::{Cell, CellAlignment, Table};
use serde::Serialize;
use std::path::PathBuf;

/// Arguments of `compare`.
#[derive(Debug, clap::Args)]
pub struct CompareArgs {
    /// Results file from before
    before: PathBuf,
    /// Results file from after
    after: PathBuf,
    /// Only this target of the first file (with --against: compared with another target of the second)
    #[arg(long, value_name = "TARGET")]
    target: Option<String>,
    /// Compare --target of the first file with this target of the second
    #[arg(long, value_name = "TARGET", requires = "target")]
    against: Option<String>,
    /// Differences count below this p
    #[arg(long, value_name = "P", default_value_t = 0.05)]
    alpha: f64,
    /// Exit with 3 when a throughput differs significantly by more than this, percent
    #[arg(long, value_name = "PERCENT")]
    fail_over: Option<f64>,
    /// Print it as JSON
    #[arg(long)]
    json: bool,
}

/// One cell of both files.
#[derive(Debug, Clone, Serialize)]
pub struct Difference {
    /// Name of the test, with its variant.
    pub test: String,
    /// Target, of the first file.
    pub target: String,
    /// Number of cores.
    pub cores: usize,
    /// Median throughput before.
    pub before: f64,
    /// Median throughput after.
    pub after: f64,
    /// After over before.
    pub ratio: f64,
    /// 95 % interval of the ratio, by bootstrap.
    pub interval: (f64, f64),
    /// Two-sided p of the Mann-Whitney test.
    pub p: f64,
    /// Is p below the bound?
    pub significant: bool,
    /// p99 before and after, nanoseconds.
    pub p99: Option<(u64, u64)>,
}

/// All cells that both files have.
pub fn differences(
    a: &Results,
    b: &Results,
    target: Option<&str>,
    against: Option<&str>,
    alpha: f64,
) -> Vec<Difference> {
    let fits = |t: &str| target.is_none_or(|wanted| wanted == t);
    let mut out = Vec::new();
    for x in a.cells().into_iter().filter(|c| fits(c.target)) {
        let Some(y) = b.cell(x.test, against.unwrap_or(x.target), x.cores) else { continue };
        let (before, after) = (x.throughputs(), y.throughputs());
        let p = stats::mann_whitney(&before, &after);
        out.push(Difference {
            test: x.test.into(),
            target: x.target.into(),
            cores: x.cores,
            before: x.median(),
            after: y.median(),
            ratio: y.median() / x.median().max(1e-12),
            interval: stats::ratio_interval(&before, &after),
            p,
            significant: p < alpha,
            p99: x.latency().zip(y.latency()).map(|(a, b)| (a.p99, b.p99)),
        });
    }
    out
}

/// Prints the comparison; the exit code.
///
/// # Errors
/// A file cannot be read, or they have nothing in common.
pub fn compare(args: &CompareArgs) -> Result<u8> {
    let (a, b) = (Results::read(&args.before)?, Results::read(&args.after)?);
    let all = differences(&a, &b, args.target.as_deref(), args.against.as_deref(), args.alpha);
    if all.is_empty() {
        return Err(Error::Usage(
            "the files have no test, target and number of cores in common: nothing to compare".into(),
        ));
    }
    let limit = args.fail_over.map(|p| p / 100.0);
    let over = |d: &&Difference| limit.is_some_and(|l| d.significant && (d.ratio - 1.0).abs() > l);
    let failed = all.iter().filter(over).count();
    if args.json {
        crate::cli::say_json(&all)?;
    } else {
        crate::cli::say(&text(&a, &b, &all, args.alpha))?;
    }
    Ok(if failed > 0 { 3 } else { 0 })
}

fn text(a: &Results, b: &Results, all: &[Difference], alpha: f64) -> String {
    let mut out = String::new();
    if a.head.machine.summary() != b.head.machine.summary() {
        out += &format!("Different machines:\n  {}\n  {}\n", a.head.machine.summary(), b.head.machine.summary());
    }
    if (a.head.plan.mode, a.head.plan.scale, &a.head.plan.media)
        != (b.head.plan.mode, b.head.plan.scale, &b.head.plan.media)
    {
        out += &format!("Different plans:\n  {}\n  {}\n", super::table::plan(a), super::table::plan(b));
    }
    let mut t = Table::new();
    super::lines(&mut t);
    t.set_header(["test", "target", "cores", "before", "after", "ratio", "95 %", "p", "", "p99 before", "p99 after"]);
    for d in all {
        let mark = match (d.significant, d.ratio >= 1.0) {
            (true, true) => "faster",
            (true, false) => "slower",
            _ => "",
        };
        let (p99a, p99b) = d.p99.map_or(("-".into(), "-".into()), |(x, y)| (time(x as f64), time(y as f64)));
        let texts = [
            figure(d.before),
            figure(d.after),
            format!("{:.2}", d.ratio),
            format!("{:.2}-{:.2}", d.interval.0, d.interval.1),
            format!("{:.3}", d.p),
            mark.into(),
            p99a,
            p99b,
        ];
        let mut row = vec![Cell::new(&d.test), Cell::new(&d.target), Cell::new(d.cores)];
        row.extend(texts.into_iter().map(|t| Cell::new(t).set_alignment(CellAlignment::Right)));
        t.add_row(row);
    }
    let logs: Vec<f64> = all.iter().filter(|d| d.ratio > 0.0).map(|d| d.ratio.ln()).collect();
    out += &format!("{t}\nGeometric mean of the ratios: {:.3} over {} cells.", stats::mean(&logs).exp(), all.len());
    let least = a.head.plan.reps.min(b.head.plan.reps);
    if stats::mann_whitney(&vec![0.0; least], &vec![1.0; least]) >= alpha {
        out += &format!(
            "\nWith {least} repetition(s) no difference can be significant at p < {alpha}: run with --reps 4 or more."
        );
    }
    out
}
