//! What people read: a table for the terminal, Markdown, a comparison of two files, one HTML page with figures.

mod compare;
mod figures;
mod markdown;
mod page;
pub mod svg;
mod table;

pub use compare::{CompareArgs, compare};
pub use table::table;

use crate::results::Results;
use crate::{Error, Result};
use std::path::{Path, PathBuf};

/// Arguments of `report`.
#[derive(Debug, clap::Args)]
pub struct ReportArgs {
    /// What a run wrote
    file: PathBuf,
    /// Where the page goes [default: FILE with .html]
    #[arg(short, long, value_name = "FILE", conflicts_with = "markdown")]
    output: Option<PathBuf>,
    /// Print tables as Markdown instead
    #[arg(long)]
    markdown: bool,
    /// Put the Markdown into this file, between `<!-- fxmark:begin -->` and `<!-- fxmark:end -->`
    #[arg(long, value_name = "FILE", conflicts_with_all = ["markdown", "output"])]
    into: Option<PathBuf>,
}

/// Writes the page, or prints Markdown.
///
/// # Errors
/// The file cannot be read, or the page not be written.
pub fn report(args: &ReportArgs) -> Result<()> {
    let results = Results::read(&args.file)?;
    if args.markdown {
        return crate::cli::say(markdown::markdown(&results).trim_end());
    }
    if let Some(path) = &args.into {
        return put(path, "fxmark", &markdown::markdown(&results));
    }
    let path = args.output.clone().unwrap_or_else(|| args.file.with_extension("html"));
    std::fs::write(&path, page::page(&results)).map_err(|e| Error::io(format!("writing {}", path.display()), e))?;
    crate::cli::say(&format!("{}", path.display()))
}

/// Replaces what is between `<!-- MARK:begin -->` and `<!-- MARK:end -->` of a Markdown file.
pub(crate) fn put(path: &Path, mark: &str, tables: &str) -> Result<()> {
    let (begin, end) = (format!("<!-- {mark}:begin -->"), format!("<!-- {mark}:end -->"));
    let text = std::fs::read_to_string(path).map_err(|e| Error::io(format!("reading {}", path.display()), e))?;
    let marked = text.split_once(&begin).and_then(|(before, rest)| Some((before, rest.split_once(&end)?.1)));
    let Some((before, after)) = marked else {
        return Err(Error::Usage(format!("{}: no `{begin}` with `{end}` after it: add them", path.display())));
    };
    let text = format!("{before}{begin}\n{}\n{end}{after}", tables.trim_end());
    std::fs::write(path, text).map_err(|e| Error::io(format!("writing {}", path.display()), e))
}

/// A table with lines round it and below its head.
pub(crate) fn lines(t: &mut comfy_table::Table) {
    t.load_preset(comfy_table::presets::UTF8_BORDERS_ONLY);
}

/// Cells left out, by reason: the reason, and its cells in words.
pub fn skipped(r: &Results) -> Vec<(String, String)> {
    type Cells = Vec<(String, Vec<String>)>;
    let mut out: Vec<(String, Cells)> = Vec::new();
    for s in &r.skipped {
        let at = out.iter().position(|(why, _)| *why == s.why).unwrap_or_else(|| {
            out.push((s.why.clone(), Vec::new()));
            out.len() - 1
        });
        let test = format!("{} ({})", s.test, s.cores);
        match out[at].1.iter_mut().find(|(t, _)| *t == test) {
            Some((_, targets)) => targets.push(s.target.clone()),
            None => out[at].1.push((test, vec![s.target.clone()])),
        }
    }
    let words = |cells: Cells| {
        let same = cells.iter().all(|c| c.1 == cells[0].1);
        let targets = |t: &[String]| {
            if t.len() == r.target_names().len() { String::new() } else { format!(" on {}", t.join(", ")) }
        };
        if same {
            let names = cells.iter().map(|c| c.0.as_str()).collect::<Vec<_>>().join(", ");
            return names + &targets(&cells[0].1);
        }
        cells.iter().map(|(test, t)| format!("{test}{}", targets(t))).collect::<Vec<_>>().join("; ")
    };
    out.into_iter().map(|(why, cells)| (why, words(cells))).collect()
}

/// A figure with three digits: `1.23 M`, `45.6 k`, `789`, `0.12`.
pub fn figure(n: f64) -> String {
    let (n, unit) = match n.abs() {
        a if a >= 1e9 => (n / 1e9, " G"),
        a if a >= 1e6 => (n / 1e6, " M"),
        a if a >= 1e4 => (n / 1e3, " k"),
        _ => (n, ""),
    };
    match n.abs() {
        a if a >= 100.0 => format!("{n:.0}{unit}"),
        a if a >= 10.0 => format!("{n:.1}{unit}"),
        _ => format!("{n:.2}{unit}"),
    }
}

/// A time with three digits: `850 ns`, `1.25 µs`, `12.5 ms`.
pub fn time(ns: f64) -> String {
    let (n, unit) = match ns {
        a if a >= 1e9 => (ns / 1e9, "s"),
        a if a >= 1e6 => (ns / 1e6, "ms"),
        a if a >= 1e3 => (ns / 1e3, "µs"),
        _ => (ns, "ns"),
    };
    match n {
        a if a >= 100.0 => format!("{n:.0} {unit}"),
        a if a >= 10.0 => format!("{n:.1} {unit}"),
        _ => format!("{n:.2} {unit}"),
    }
}

/// Seconds since 1970 as a date and time in UTC.
pub fn date(seconds: u64) -> String {
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // civil date of a day number, with years that begin in March
    let z = days + 719_468;
    let (era, doe) = (z / 146_097, z % 146_097);
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let (day, month) = (doy - (153 * mp + 2) / 5 + 1, if mp < 10 { mp + 3 } else { mp - 9 });
    let year = yoe + era * 400 + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02} {:02}:{:02} UTC", second / 3600, second / 60 % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_three_digits() {
        for (n, text) in
            [(0.5, "0.50"), (12.34, "12.3"), (9999.0, "9999"), (45_600.0, "45.6 k"), (1_234_567.0, "1.23 M")]
        {
            assert_eq!(figure(n), text);
        }
        for (ns, text) in [(850.0, "850 ns"), (1250.0, "1.25 µs"), (12.5e6, "12.5 ms"), (2e9, "2.00 s")] {
            assert_eq!(time(ns), text);
        }
        assert_eq!(date(951_827_696), "2000-02-29 12:34 UTC");
    }
}
