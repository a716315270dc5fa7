//! What people read: a table for the terminal, tables and a picture for the documentation.

use crate::matrix::{Cell, CellId, Domains, Matrix, WORKERS, WindowKind};
use crate::report::{Frame, Line, Sharing, Site, Window};
use crate::{Error, Result};
use fxmark::report::svg::{Anchor, Svg};
use std::fmt::Write;
use std::path::Path;

/// A figure short enough for a table.
pub(crate) fn short(n: f64) -> String {
    match n {
        0.0 => "0".into(),
        n if n < 0.01 => "<0.01".into(),
        n if n < 10.0 => format!("{n:.2}"),
        n => format!("{n:.1}"),
    }
}

pub(crate) fn frame(f: &Frame) -> String {
    // generics say little, and hide the line
    let mut depth = 0;
    let plain: String = f
        .function
        .chars()
        .filter(|c| {
            depth += i32::from(*c == '<') - i32::from(*c == '>');
            depth == 0 && *c != '>'
        })
        .collect();
    let name = plain.rsplit("::").next().unwrap_or_default();
    if name.is_empty() { f.at.clone() } else { format!("{name} ({})", f.at) }
}

fn site(s: &Site) -> String {
    let act = match (s.kernel, s.locked, s.writes) {
        (true, ..) => "the kernel",
        (_, true, _) => "locked",
        (_, _, true) => "write",
        _ => "read",
    };
    format!("{act} {}", s.frame().map_or_else(|| "nowhere known".into(), frame))
}

fn sharing(l: &Line) -> &'static str {
    match l.sharing {
        Sharing::True => "",
        Sharing::False => " (neighbours)",
        Sharing::Before => " (another's before)",
    }
}

fn place(l: &Line) -> String {
    match l.allocator() {
        Some(f) => format!("{}, allocated by {}", l.place, frame(f)),
        None => l.place.clone(),
    }
}

/// Both sides of a line: who moves it most, and the next one that is not the same source line.
fn sides(l: &Line) -> Vec<String> {
    let mut out: Vec<String> = Vec::new();
    for s in l.sites.iter().map(site) {
        if !out.contains(&s) && out.len() < 2 {
            out.push(s);
        }
    }
    out
}

/// One cell, for the terminal: a line, and `lines` of its cache lines.
pub fn cell(c: &Cell, lines: usize) -> String {
    let mut out = String::new();
    let (f, w) = (&c.foreground, &c.commit);
    // writing to a string does not fail
    let _ = write!(
        out,
        "{:<5}{:>3} {:<5}{} {:>4} lines {:>7} transfers {:>6} hottest {:>6} calls; with commits {:>7} transfers {:>6} hottest {:>6} calls",
        c.id.test,
        c.id.workers,
        c.id.domains.name(),
        c.id.window.map_or_else(String::new, |w| format!(" x{w}")),
        f.shared_lines,
        short(f.transfers),
        short(f.hottest),
        short(f.calls),
        short(w.transfers),
        short(w.hottest),
        short(w.calls),
    );
    for l in f.lines.iter().filter(|l| l.transfers > 0.0).take(lines) {
        let _ = write!(out, "\n    {}{}: {}", short(l.transfers), sharing(l), place(l));
        for s in sides(l) {
            let _ = write!(out, "\n        {s}");
        }
    }
    out
}

fn header(out: &mut String) {
    let numbers: Vec<String> = WORKERS.iter().map(usize::to_string).collect();
    let _ = writeln!(out, "| test | {0} | {0} |\n|---|{1}{1}", numbers.join(" | "), "---|".repeat(WORKERS.len()));
}

fn table(m: &Matrix, out: &mut String, figure: impl Fn(&Cell) -> String) {
    header(out);
    for test in m.tests() {
        let cells = Domains::ALL.into_iter().flat_map(|d| WORKERS.map(|n| m.cell(test, n, d)));
        let row: Vec<String> = cells.map(|c| c.map_or_else(String::new, &figure)).collect();
        let _ = writeln!(out, "| {test} | {} |", row.join(" | "));
    }
}

/// Workers of the cells whose lines are shown.
const SHOWN: usize = 8;

fn hottest(m: &Matrix, domains: Domains, out: &mut String) {
    let _ = writeln!(out, "| test | lines | hottest | what it is | both sides |\n|---|---|---|---|---|");
    for test in m.tests() {
        let Some(c) = m.cell(test, SHOWN, domains) else { continue };
        let w: &Window = &c.foreground;
        match w.lines.first().filter(|l| l.transfers > 0.0) {
            Some(l) => {
                let text = format!("{}{}", place(l), sharing(l)).replace('|', "\\|");
                let sides = sides(l).join("; ").replace('|', "\\|");
                let _ = writeln!(out, "| {test} | {} | {} | {text} | {sides} |", w.shared_lines, short(w.hottest));
            }
            None => {
                let _ = writeln!(out, "| {test} | 0 | 0 | | |");
            }
        }
    }
}

/// Cells with long windows.
fn long(m: &Matrix, out: &mut String) {
    let cells: Vec<&Cell> = m.cells.iter().filter(|c| c.id.window.is_some()).collect();
    if cells.is_empty() {
        return;
    }
    let _ = writeln!(out, "\nLong windows, one domain:\n");
    let _ =
        writeln!(out, "| test | workers | rounds | foreground | with commits | hottest then | per commit and worker |");
    let _ = writeln!(out, "|---|---|---|---|---|---|---|");
    for c in cells {
        let (f, w) = (&c.foreground, &c.commit);
        let figures = [f.transfers, w.transfers, w.hottest].map(short).join(" | ");
        let CellId { test, workers, window, .. } = &c.id;
        let (rounds, commit) = (window.unwrap_or_default(), c.per_commit().max(0.0));
        let _ = writeln!(out, "| {test} | {workers} | {rounds} | {figures} | {commit:.0} |");
    }
}

/// The tables of the page, as Markdown.
pub fn markdown(m: &Matrix) -> String {
    let mut out = String::new();
    let _ = writeln!(
        out,
        "Transfers per operation, {} workers, first with one domain, then with one each:\n",
        WORKERS.map(|n| n.to_string()).join(", ")
    );
    table(m, &mut out, |c| short(c.foreground.transfers));
    let _ = writeln!(out, "\nThe same in the window with commits:\n");
    table(m, &mut out, |c| short(c.commit.transfers));
    let _ = writeln!(
        out,
        "\nTransfers that one commit of all domains costs each worker beyond those, whatever time lies between commits:\n"
    );
    table(m, &mut out, |c| format!("{:.0}", c.per_commit().max(0.0)));
    let _ = writeln!(out, "\nTransfers of the hottest line per operation, in the foreground window:\n");
    table(m, &mut out, |c| short(c.foreground.hottest));
    let _ = writeln!(out, "\nSystem calls per operation, in the foreground window:\n");
    table(m, &mut out, |c| short(c.foreground.calls));
    let _ = writeln!(out, "\nTransfers that a commit waits for (all domains, mean of a commit and a checkpoint):\n");
    table(m, &mut out, |c| format!("{:.0}", c.commit.commit_transfers));
    long(m, &mut out);
    for (domains, text) in [(Domains::One, "one domain"), (Domains::Each, "a domain each")] {
        let _ = writeln!(out, "\nShared lines and the hottest of them, {SHOWN} workers, {text}:\n");
        hottest(m, domains, &mut out);
    }
    out
}

/// Replaces what is between the marks `<!-- NAME:begin -->` and `<!-- NAME:end -->` of a page.
///
/// # Errors
/// It cannot be read or written, or there are no marks.
pub(crate) fn fill(path: &Path, name: &str, content: &str) -> Result<()> {
    let (begin, end) = (format!("<!-- {name}:begin -->"), format!("<!-- {name}:end -->"));
    let text = std::fs::read_to_string(path).map_err(|e| Error::io(path, e))?;
    let marked = text.split_once(&begin).and_then(|(before, rest)| Some((before, rest.split_once(&end)?.1)));
    let Some((before, after)) = marked else {
        return Err(Error::Cell(format!("{}: no `{begin}` with `{end}` after it", path.display())));
    };
    let text = format!("{before}{begin}\n{}\n{end}{after}", content.trim_end());
    std::fs::write(path, text).map_err(|e| Error::io(path, e))
}

/// Replaces what is between the marks of `conflicts.md` in a directory, and writes `conflicts.svg` beside it.
///
/// # Errors
/// A file cannot be read or written, or there are no marks.
pub fn put(dir: &Path, m: &Matrix) -> Result<()> {
    fill(&dir.join("conflicts.md"), "conflicts", &markdown(m))?;
    let path = dir.join("conflicts.svg");
    std::fs::write(&path, picture(m)).map_err(|e| Error::io(&path, e))
}

const NAMES: f64 = 56.0;
const CELL_W: f64 = 46.0;
const CELL_H: f64 = 20.0;
const TOP: f64 = 46.0;
const GAP: f64 = 14.0;
const STYLE: &str = "text{font:11px sans-serif;fill:#444}.cell{fill:#222}.head{font-weight:bold}\
    @media(prefers-color-scheme:dark){text{fill:#bbb}.cell{fill:#222}}";

/// A map of all cells: four panels, both windows with one domain and with one each.
fn picture(m: &Matrix) -> String {
    let tests = m.tests();
    let panel = CELL_W * WORKERS.len() as f64 + GAP;
    let (width, height) = (NAMES + 4.0 * panel, TOP + CELL_H * tests.len() as f64 + 24.0);
    let mut s = Svg::new(width, height, "Coherence transfers per operation, by test, workers and domains");
    let panels = Domains::ALL.into_iter().flat_map(|d| WindowKind::ALL.map(|k| (d, k)));
    for (p, (domains, kind)) in panels.enumerate() {
        let left = NAMES + panel * p as f64;
        let middle = left + (panel - GAP) / 2.0;
        let title = match (domains, kind) {
            (Domains::One, WindowKind::Foreground) => "one domain",
            (Domains::One, WindowKind::Commit) => "one domain, with commits",
            (Domains::Each, WindowKind::Foreground) => "a domain each",
            (Domains::Each, WindowKind::Commit) => "a domain each, with commits",
        };
        s.text((middle, 18.0), Anchor::Middle, "head", title);
        for (i, n) in WORKERS.into_iter().enumerate() {
            let x = left + CELL_W * i as f64;
            s.text((x + CELL_W / 2.0, TOP - 8.0), Anchor::Middle, "tick", &n.to_string());
            for (j, test) in tests.iter().enumerate() {
                let Some(c) = m.cell(test, n, domains) else { continue };
                let (w, y) = (c.window(kind), TOP + CELL_H * j as f64);
                let hottest = w.lines.first().filter(|l| l.transfers > 0.0).map(place).unwrap_or_default();
                let tip = format!("{}: {} lines, hottest {}: {hottest}", c.id, w.shared_lines, short(w.hottest));
                s.rect((x + 1.0, y + 1.0), (CELL_W - 2.0, CELL_H - 2.0), &heat(w.transfers), &tip);
                s.text((x + CELL_W / 2.0, y + 14.0), Anchor::Middle, "cell", &short(w.transfers));
            }
        }
    }
    for (j, test) in tests.iter().enumerate() {
        s.text((NAMES - 8.0, TOP + CELL_H * j as f64 + 14.0), Anchor::End, "tick", test);
    }
    let text = "coherence transfers per operation; green: none, the operation scales with cores";
    s.text((NAMES, height - 8.0), Anchor::Start, "tick", text);
    s.end_file(STYLE)
}

/// Green at none, from yellow to red at thirty transfers; dark text can be read on all.
fn heat(transfers: f64) -> String {
    if transfers == 0.0 {
        return "hsl(140 50% 70%)".into();
    }
    let part = ((transfers / 0.01).ln() / (30.0f64 / 0.01).ln()).clamp(0.0, 1.0);
    format!("hsl({:.0} 85% {:.0}%)", 70.0 - 65.0 * part, 80.0 - 12.0 * part)
}
