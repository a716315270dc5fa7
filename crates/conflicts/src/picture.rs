//! The projection for people: tables, and a picture of all tests, 1 to 128 cores.

use crate::model::{CORES, Curve, JUDGED, MUST_SCALE, Projection, TRANSFER_NS, Variant};
use crate::page::{fill, short};
use crate::{Error, Result};
use fxmark::report::svg::{Anchor, Svg, tick};
use std::fmt::Write;
use std::path::Path;

/// Two figures, for a cheap and a dear transfer; one where they are the same.
fn ends(of: [f64; 2]) -> String {
    let text = of.map(|s| match s {
        s if s < 1.0 => format!("{s:.2}"),
        s if s < 10.0 => format!("{s:.1}"),
        s => format!("{s:.0}"),
    });
    if text[0] == text[1] { text[0].clone() } else { format!("{} to {}", text[1], text[0]) }
}

fn limits(c: &Curve) -> String {
    let [near, far] = c.limits.map(crate::model::Limit::name);
    if near == far { near.into() } else { format!("{near}; {far}") }
}

fn row(p: &Projection, test: &str) -> Option<String> {
    let one = p.curve(test, Variant::One)?;
    let (most, last) = (one.most(), CORES[CORES.len() - 1]);
    let of = |v: Variant, cores: usize| {
        // of one core of what is shipped
        p.curve(test, v).map_or_else(String::new, |c| ends(c.speed_up(cores).map(|s| s * one.t1_ns / c.t1_ns)))
    };
    let held = most.locks[0];
    let verdict = match (MUST_SCALE.contains(&test), one.scales()) {
        (true, true) => "yes",
        (true, false) => "**no**",
        (false, _) => "",
    };
    Some(format!(
        "| {test} | {:.0} | {} | {} | {:.0} + {} | {} | {} | {} | {} | {} | {} | {verdict} |",
        one.t1_ns,
        short(most.transfers),
        short(most.hottest),
        held.share * one.t1_ns,
        short(held.transfers),
        of(Variant::One, JUDGED.0),
        limits(one),
        of(Variant::Each, JUDGED.0),
        of(Variant::Coarse, JUDGED.0),
        of(Variant::One, last),
        of(Variant::Coarse, last),
    ))
}

/// Which tests that must scale do not, in words.
pub fn missed(p: &Projection) -> Vec<String> {
    let (cores, part) = JUDGED;
    let said = |c: &Curve| {
        let name = match c.variant {
            Variant::Each => " with a domain each",
            _ => "",
        };
        format!("{}{name}: {} (by {})", c.test, ends(c.speed_up(cores)), limits(c))
    };
    let must = p.curves.iter().filter(|c| c.variant != Variant::Coarse && MUST_SCALE.contains(&c.test.as_str()));
    must.filter(|c| !c.scales() && part > 0.0).map(said).collect()
}

/// The tables of the page, as Markdown.
pub fn markdown(p: &Projection) -> String {
    let (cores, part) = JUDGED;
    let workers = p.curves.first().map_or(0, |c| c.most().workers);
    let mut out = String::new();
    // writing to a string does not fail
    let _ = writeln!(
        out,
        "Per operation: time of one thread, nanoseconds; transfers, and those of the hottest line, with {workers} workers and one \
         domain; the lock that is held longest, as nanoseconds and transfers. Then how many times the throughput of one core, with \
         a transfer of {:.0} to one of {:.0} ns:\n",
        TRANSFER_NS[1], TRANSFER_NS[0],
    );
    let _ = writeln!(
        out,
        "| test | t1 | transfers | hottest | lock | {cores} cores | bounded by | {cores}, a domain each | {cores}, coarse | {0} cores | {0}, \
         coarse | at least {part} x {cores} |\n|---|---|---|---|---|---|---|---|---|---|---|---|",
        CORES[CORES.len() - 1]
    );
    for test in p.tests() {
        if let Some(row) = row(p, test) {
            let _ = writeln!(out, "{row}");
        }
    }
    let missed = missed(p);
    let goal = part * cores as f64;
    if missed.is_empty() {
        let _ = writeln!(out, "\nAll tests that must scale reach {goal:.1} at both ends.");
    } else {
        let _ = writeln!(out, "\nOf the tests that must reach {goal:.1} at both ends, these do not:\n");
        for m in missed {
            let _ = writeln!(out, "- {m}");
        }
    }
    out
}

/// Replaces the projection in `projection.md` of a directory, and writes `projection.svg` beside it.
///
/// # Errors
/// A file cannot be read or written, or there are no marks.
pub fn put(dir: &Path, p: &Projection) -> Result<()> {
    fill(&dir.join("projection.md"), "projection", &markdown(p))?;
    let path = dir.join("projection.svg");
    std::fs::write(&path, draw(p)).map_err(|e| Error::io(&path, e))
}

const COLUMNS: usize = 5;
const PANEL_W: f64 = 196.0;
const PANEL_H: f64 = 164.0;
const LEFT: f64 = 34.0;
const TOP: f64 = 26.0;
const PLOT_W: f64 = 150.0;
const PLOT_H: f64 = 116.0;
const FOOT: f64 = 44.0;
/// Speed-ups that are drawn, at least and at most: powers of two.
const LEAST: f64 = 0.0625;
const MOST: f64 = 128.0;
const STYLE: &str = "text{font:10px sans-serif;fill:#555}.head{font-weight:bold;font-size:12px;fill:#222}.miss{font-weight:bold;fill:#b3261e}\
    .grid{stroke:#e4e6e9}.linear{stroke:#9aa1ab;stroke-dasharray:3 3}.goal{stroke:#222;stroke-width:1.5}\
    .curve{fill:none;stroke-width:1.3}.one{fill:#2f7d46;fill-opacity:.35}.coarse{fill:#c8511b;fill-opacity:.3}\
    @media(prefers-color-scheme:dark){text{fill:#aaa}.head{fill:#ddd}.miss{fill:#ff8a80}.grid{stroke:#333a42}.goal{stroke:#ddd}}";
const ONE: &str = "#2f7d46";
const EACH: &str = "#3b6fb6";
const COARSE: &str = "#c8511b";

fn x(left: f64, cores: usize) -> f64 {
    let last = CORES[CORES.len() - 1];
    left + PLOT_W * (cores as f64).ln() / (last as f64).ln()
}

fn y(top: f64, speed: f64) -> f64 {
    top + PLOT_H * (1.0 - (speed.clamp(LEAST, MOST) / LEAST).ln() / (MOST / LEAST).ln())
}

/// Both ends of a curve, in times of `t1` operations a second.
fn line(c: &Curve, t1: f64, end: usize, (left, top): (f64, f64)) -> Vec<(f64, f64)> {
    let speed = |i: usize| c.per_second[i][end] * t1 / 1e9;
    CORES.iter().enumerate().map(|(i, &n)| (x(left, n), y(top, speed(i)))).collect()
}

fn panel(s: &mut Svg, p: &Projection, test: &str, (left, top): (f64, f64)) {
    let Some(one) = p.curve(test, Variant::One) else { return };
    let at = (left, top);
    let bottom = top + PLOT_H;
    for speed in [0.25, 1.0, 4.0, 16.0, 64.0] {
        s.line((left, y(top, speed)), (left + PLOT_W, y(top, speed)), "grid");
        s.text((left - 4.0, y(top, speed) + 3.5), Anchor::End, "tick", &tick(speed));
    }
    for n in [1, 4, 16, 32, 128] {
        s.line((x(left, n), top), (x(left, n), bottom), "grid");
        s.text((x(left, n), bottom + 12.0), Anchor::Middle, "tick", &n.to_string());
    }
    s.line((x(left, 1), y(top, 1.0)), (x(left, 128), y(top, 128.0)), "linear");
    if let Some(each) = p.curve(test, Variant::Each) {
        s.polyline(&line(each, one.t1_ns, 1, at), EACH);
    }
    for (variant, class, colour) in [(Variant::Coarse, "coarse", COARSE), (Variant::One, "one", ONE)] {
        let Some(c) = p.curve(test, variant) else { continue };
        let (near, far) = (line(c, one.t1_ns, 0, at), line(c, one.t1_ns, 1, at));
        let around: Vec<(f64, f64)> = near.iter().copied().chain(far.iter().rev().copied()).collect();
        let speed = ends(c.speed_up(JUDGED.0).map(|s| s * one.t1_ns / c.t1_ns));
        s.area(&around, class, &format!("{test}, {class}: {speed} times one core on {}, by {}", JUDGED.0, limits(c)));
        s.polyline(&near, colour);
        s.polyline(&far, colour);
    }
    let (cores, part) = JUDGED;
    let goal = (x(left, cores), y(top, part * cores as f64));
    let must = MUST_SCALE.contains(&test);
    if must {
        s.line((goal.0 - 5.0, goal.1), (goal.0 + 5.0, goal.1), "goal");
    }
    s.text((left, top - 8.0), Anchor::Start, "head", test);
    let speed = format!("{} on {cores}", ends(one.speed_up(cores)));
    let class = if must && !one.scales() { "miss" } else { "tick" };
    s.text((left + PLOT_W, top - 8.0), Anchor::End, class, &speed);
}

/// All tests as small panels, both axes logarithmic.
fn draw(p: &Projection) -> String {
    let tests = p.tests();
    let rows = tests.len().div_ceil(COLUMNS);
    let (width, height) = (PANEL_W * COLUMNS as f64, PANEL_H * rows as f64 + FOOT);
    let label = "Upper bound of the throughput of each test on 1 to 128 cores, in times that of one core";
    let mut s = Svg::new(width, height, label);
    for (i, test) in tests.iter().enumerate() {
        let at = (PANEL_W * (i % COLUMNS) as f64 + LEFT, PANEL_H * (i / COLUMNS) as f64 + TOP);
        panel(&mut s, p, test, at);
    }
    let mut left = LEFT;
    let foot = height - FOOT + 16.0;
    let band = format!("{:.0} (upper edge) to {:.0} ns a transfer", TRANSFER_NS[0], TRANSFER_NS[1]);
    for (colour, text) in [
        (ONE, format!("as shipped, one domain: {band}")),
        (EACH, format!("a domain for each worker, {:.0} ns", TRANSFER_NS[1])),
        (COARSE, "coarse locks: all switches on".to_owned()),
    ] {
        s.rect((left, foot - 8.0), (12.0, 9.0), colour, &text);
        s.text((left + 17.0, foot), Anchor::Start, "tick", &text);
        left += 17.0 + 5.4 * text.len() as f64 + 22.0;
    }
    let goal = format!(
        "times the throughput of one core, against cores; dashed: linear; black: {} x {}, where it is asked for",
        JUDGED.1, JUDGED.0
    );
    s.text((LEFT, foot + 18.0), Anchor::Start, "tick", &goal);
    s.end_file(STYLE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Timed;
    use crate::matrix::{Cell, CellId, Domains, Matrix};
    use crate::report::{Lock, Window};

    fn matrix(transfers: f64, hottest: f64, locks: Vec<Lock>) -> Matrix {
        let cell = |(test, workers, domains): (&str, usize, Domains)| Cell {
            id: CellId::usual(test, workers, domains),
            foreground: Window { transfers, hottest, instructions: 1000.0, locks: locks.clone(), ..Window::default() },
            commit: Window::default(),
        };
        let ids = ["MWCL", "MWCM"].into_iter().flat_map(|t| [2, 32].map(|n| (t, n)));
        let cells = ids.flat_map(|(t, n)| Domains::ALL.map(|d| cell((t, n, d)))).collect();
        Matrix { version: Matrix::VERSION, cells }
    }

    fn time(test: &str, switches: &str, ns: f64) -> Timed {
        Timed { test: test.into(), workers: 1, switches: switches.into(), ns: vec![ns] }
    }

    #[test]
    fn what_misses_is_named() {
        let held = Lock { cpus: 2, holds: 1.0, handoffs: 1.0, instructions: 500.0, transfers: 4.0, stack: Vec::new() };
        let times: Vec<Timed> =
            ["MWCL", "MWCM"].into_iter().flat_map(|t| [time(t, "", 1000.0), time(t, "all", 2000.0)]).collect();
        let p = Projection::of(&matrix(1.0, 0.0, vec![]), &matrix(9.0, 2.0, vec![held]), &times).expect("all is there");
        // 1,050 and 1,300 ns of 1,000: 30.5 and 24.6 times one core; MWCM need not
        let missed = missed(&p);
        assert_eq!(missed.len(), 2, "{missed:?}");
        assert!(missed[0].starts_with("MWCL: 25 to 30 (by transfers)"), "{missed:?}");
        let text = markdown(&p);
        // of one core without switches: 1,000 ns over 500 of 1,000 instructions of 2,000 ns and 5 transfers of 50 or 300 ns
        assert!(
            text.contains("| MWCL | 1000 | 1.00 | 0 | 0 + 0 | 25 to 30 | transfers | 25 to 30 | 0.40 to 0.80 |"),
            "{text}"
        );
        let svg = draw(&p);
        assert!(svg.contains("25 to 30 on 32") && svg.matches("<polygon").count() == 4);
        assert!(Projection::of(&matrix(1.0, 0.0, vec![]), &matrix(9.0, 2.0, vec![]), &times).is_err(), "no locks");
        assert!(Projection::of(&matrix(1.0, 0.0, vec![]), &matrix(9.0, 2.0, vec![]), &times[..1]).is_err(), "no times");
    }
}
