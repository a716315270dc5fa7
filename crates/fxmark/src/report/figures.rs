//! The figures: throughput against cores, relative bars, the heat map of the paper's Figure 13, latency curves.

use super::svg::{Anchor, Svg, steps, tick};
use super::{figure, time};
use crate::results::{Cell, Results};
use crate::suite::TestId;

/// Colours of known targets, and for others.
const KNOWN: [&str; 8] = ["ext4", "ext4-nj", "xfs", "btrfs", "f2fs", "tmpfs", "braidfs", "library"];

/// The CSS variable of a target's colour.
pub fn colour(r: &Results, target: &str) -> String {
    let at = KNOWN.iter().position(|k| *k == target);
    let other = || KNOWN.len() + r.target_names().iter().position(|t| *t == target).unwrap_or(0) % 4;
    format!("var(--c{})", at.unwrap_or_else(other))
}

/// The shape of its markers: with the colour it tells targets apart also where colours are not seen.
fn shape(r: &Results, target: &str) -> usize {
    r.target_names().iter().position(|t| *t == target).unwrap_or(0)
}

/// What a test counts.
fn unit(test: &str) -> &'static str {
    test.parse::<TestId>().map_or("operations", |t| t.test.unit)
}

const WIDTH: f64 = 268.0;
const HEIGHT: f64 = 178.0;
const LEFT: f64 = 42.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = 30.0;

fn title(c: &Cell<'_>) -> String {
    let (low, high) = c.range();
    let range = if c.runs.len() > 1 { format!(" ({} to {})", figure(low), figure(high)) } else { String::new() };
    format!("{} on {}, {} core(s): {} {}/s{range}", c.test, c.target, c.cores, figure(c.median()), unit(c.test))
}

/// The vertical axis: from 0, or logarithmic where the targets lie so far apart that the slow ones could not be told
/// from nothing.
struct Scale {
    ticks: Vec<f64>,
    log: bool,
}

/// Fastest over slowest median from which the axis is logarithmic.
const FAR_APART: f64 = 40.0;

impl Scale {
    fn of(cells: &[Cell<'_>]) -> Self {
        let max = cells.iter().map(|c| c.range().1).fold(0.0, f64::max);
        let min = cells.iter().map(|c| c.range().0).filter(|v| *v > 0.0).fold(f64::INFINITY, f64::min);
        if max / min <= FAR_APART || !min.is_finite() {
            return Self { ticks: steps(max), log: false };
        }
        let (low, high) = (min.log10().floor() as i32, max.log10().ceil() as i32);
        Self { ticks: (low..=high).map(|e| 10f64.powi(e)).collect(), log: true }
    }
    /// How far up a value lies, 0 to 1.
    fn share(&self, v: f64) -> f64 {
        let (low, high) = (self.ticks.first().copied().unwrap_or(0.0), self.ticks.last().copied().unwrap_or(1.0));
        if self.log { (v.max(low) / low).ln() / (high / low).ln() } else { v / high }
    }
}

/// Throughput of a test against the number of cores, with the range of the repetitions.
pub fn throughput(r: &Results, test: &str) -> String {
    let cores = r.cores_of(test);
    let targets = r.target_names();
    let cells: Vec<Cell<'_>> =
        targets.iter().flat_map(|t| cores.iter().filter_map(move |&n| r.cell(test, t, n))).collect();
    let mut s = Svg::new(WIDTH, HEIGHT, &format!("Throughput of {test} against cores"));
    let (w, h) = (WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM);
    let scale = Scale::of(&cells);
    let y = |v: f64| TOP + h * (1.0 - scale.share(v));
    let (first, last) = (cores.first().copied().unwrap_or(1), cores.last().copied().unwrap_or(1));
    let x = |n: usize| {
        if first == last {
            return LEFT + w / 2.0;
        }
        // half a marker's room at both sides
        LEFT + 14.0 + (w - 28.0) * (n - first) as f64 / (last - first) as f64
    };
    for &t in &scale.ticks {
        s.line((LEFT, y(t)), (LEFT + w, y(t)), "grid");
        s.text((LEFT - 5.0, y(t) + 3.5), Anchor::End, "tick", &tick(t));
    }
    let mut last_label = f64::NEG_INFINITY;
    for &n in &cores {
        if x(n) - last_label >= 16.0 {
            s.text((x(n), TOP + h + 13.0), Anchor::Middle, "tick", &n.to_string());
            last_label = x(n);
        }
    }
    let axis = if last == 1 { "core" } else { "cores" };
    let axis = if scale.log { format!("{axis} (logarithmic scale)") } else { axis.to_owned() };
    s.text((LEFT + w / 2.0, HEIGHT - 4.0), Anchor::Middle, "axis", &axis);
    for (i, target) in targets.iter().enumerate() {
        let c = colour(r, target);
        // side by side where they would hide each other
        let aside = (i as f64 - (targets.len() as f64 - 1.0) / 2.0) * if first == last { 22.0 } else { 3.0 };
        let mine: Vec<&Cell<'_>> = cells.iter().filter(|c| c.target == *target).collect();
        let points: Vec<(f64, f64)> = mine.iter().map(|c| (x(c.cores) + aside, y(c.median()))).collect();
        s.polyline(&points, &c);
        for (cell, at) in mine.iter().zip(&points) {
            let (low, high) = cell.range();
            if first == last {
                s.rect((at.0 - 8.0, at.1), (16.0, (TOP + h - at.1).max(1.0)), &c, &title(cell));
            }
            s.line((at.0, y(low)), (at.0, y(high)), "range");
            if first != last {
                s.marker(*at, shape(r, target), &c, &title(cell));
            }
        }
    }
    s.end()
}

/// Every target relative to the first, at the largest number of cores: bars on a logarithmic scale.
pub fn relative(r: &Results, test: &str) -> Option<String> {
    const ROW: f64 = 15.0;
    const NAME: f64 = 58.0;
    const VALUE: f64 = 44.0;
    let targets = r.target_names();
    let (&base, others) = targets.split_first()?;
    let cores = *r.cores_of(test).last()?;
    let one = r.cell(test, base, cores)?.median();
    let rows: Vec<(&str, f64)> = others
        .iter()
        .filter_map(|t| Some((*t, r.cell(test, t, cores)?.median() / one)))
        .filter(|(_, ratio)| ratio.is_finite() && *ratio > 0.0)
        .collect();
    if rows.is_empty() {
        return None;
    }
    let reach = rows.iter().map(|(_, v)| v.log10().abs()).fold(0.5, f64::max);
    let height = TOP + ROW * rows.len() as f64 + 18.0;
    let mut s = Svg::new(WIDTH, height, &format!("{test} relative to {base}"));
    let w = WIDTH - NAME - VALUE;
    let x = |v: f64| NAME + w / 2.0 * (1.0 + v.log10().clamp(-reach, reach) / reach);
    let bottom = TOP + ROW * rows.len() as f64;
    let decades = reach.floor() as i32;
    for d in -decades..=decades {
        s.line((x(10f64.powi(d)), TOP - 4.0), (x(10f64.powi(d)), bottom), "grid");
    }
    s.line((x(1.0), TOP - 4.0), (x(1.0), bottom + 3.0), "one");
    s.text((x(1.0), bottom + 13.0), Anchor::Middle, "tick", &format!("1 = {base}"));
    for (i, (target, v)) in rows.iter().enumerate() {
        let top = TOP + ROW * i as f64;
        let (a, b) = (x(1.0).min(x(*v)), x(1.0).max(x(*v)));
        s.text((NAME - 6.0, top + 10.0), Anchor::End, "tick", &short(target));
        let tip = format!("{test}, {cores} core(s): {target} is {v:.2} times {base}");
        s.rect((a, top + 2.0), ((b - a).max(1.0), ROW - 4.0), &colour(r, target), &tip);
        s.text((WIDTH - 2.0, top + 10.5), Anchor::End, "value", &times(*v));
    }
    Some(s.end())
}

/// A ratio in at most four characters and a sign.
fn times(v: f64) -> String {
    match v {
        v if v >= 1000.0 => format!("{}×", tick((v / 100.0).round() * 100.0)),
        v if v >= 100.0 => format!("{v:.0}×"),
        v if v >= 10.0 => format!("{v:.1}×"),
        _ => format!("{v:.2}×"),
    }
}

/// A directory's last name.
fn short(target: &str) -> String {
    let name = target.trim_end_matches('/').rsplit('/').next().unwrap_or(target);
    if name.chars().count() > 10 { name.chars().take(9).chain(['…']).collect() } else { name.into() }
}

/// Latency against the share of operations that were faster, both logarithmic, at the largest number of cores.
pub fn latency(r: &Results, test: &str) -> Option<String> {
    let cores = *r.cores_of(test).last()?;
    let targets = r.target_names();
    let all: Vec<_> = targets.iter().filter_map(|t| Some((*t, r.cell(test, t, cores)?.latency()?))).collect();
    if all.is_empty() {
        return None;
    }
    const NINES: [(f64, &str); 5] = [(0.5, "p50"), (0.9, "p90"), (0.99, "p99"), (0.999, "p99.9"), (0.9999, "p99.99")];
    let mut s = Svg::new(WIDTH, HEIGHT, &format!("Latency of {test}"));
    let (w, h) = (WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM + 8.0);
    let least = all.iter().map(|(_, l)| l.p50.max(1)).min().unwrap_or(1) as f64;
    let most = all.iter().map(|(_, l)| l.p9999.max(10)).max().unwrap_or(10) as f64;
    let (low, high) = (least.log10().floor(), most.log10().ceil().max(least.log10().floor() + 1.0));
    let y = |ns: f64| TOP + h * (1.0 - (ns.max(1.0).log10() - low) / (high - low));
    let nines = |q: f64| -(1.0 - q).log10();
    let (from, to) = (nines(0.5), nines(0.9999));
    let x = |q: f64| LEFT + 6.0 + (w - 18.0) * (nines(q) - from) / (to - from);
    for e in low as i32..=high as i32 {
        let ns = 10f64.powi(e);
        s.line((LEFT, y(ns)), (LEFT + w, y(ns)), "grid");
        let label = time(ns).replace(".00", "").replace(".0", "");
        s.text((LEFT - 5.0, y(ns) + 3.5), Anchor::End, "tick", &label);
    }
    for (q, name) in NINES {
        s.line((x(q), TOP), (x(q), TOP + h), "grid");
        s.text((x(q), TOP + h + 13.0), Anchor::Middle, "tick", name);
    }
    for (target, l) in &all {
        let c = colour(r, target);
        // the whole curve from the histogram, within what is drawn
        let mut points = vec![(x(0.5), y(l.p50 as f64))];
        let mut seen = 0u64;
        for (ns, count) in &l.histogram {
            seen += count;
            let q = seen as f64 / l.count as f64;
            if q > 0.5 && q <= 0.9999 {
                let at = (x(q), y(*ns as f64));
                if points.last().is_none_or(|p| at.0 - p.0 > 1.0 || (p.1 - at.1).abs() > 1.0) {
                    points.push(at);
                }
            }
        }
        s.polyline(&points, &c);
        for (q, v) in [(0.5, l.p50), (0.9, l.p90), (0.99, l.p99), (0.999, l.p999), (0.9999, l.p9999)] {
            // a quantile that rests on less than one operation is none
            if l.count as f64 * (1.0 - q) >= 1.0 {
                let tip = format!("{test} on {target}, {cores} core(s): p{} {}", q * 100.0, time(v as f64));
                s.marker((x(q), y(v as f64)), shape(r, target), &c, &tip);
            }
        }
    }
    Some(s.end())
}

/// Figure 13: colour is the speed at the best number of cores over that with one, the number is the best.
pub fn heat_map(r: &Results) -> Option<String> {
    const CELL_W: f64 = 64.0;
    const CELL_H: f64 = 22.0;
    const NAMES: f64 = 108.0;
    let targets = r.target_names();
    let swept: Vec<&str> = r.tests().into_iter().filter(|t| r.cores_of(t).len() > 1).collect();
    if swept.is_empty() {
        return None;
    }
    let most = r.head.plan.cores.iter().copied().max().unwrap_or(1) as f64;
    // in as many columns of tests as fit side by side
    let columns = if swept.len() > 12 { 2 } else { 1 };
    let rows = swept.len().div_ceil(columns);
    let panel = NAMES + CELL_W * targets.len() as f64 + 24.0;
    let (width, height) = (panel * columns as f64, 26.0 + CELL_H * rows as f64 + 40.0);
    let mut s = Svg::new(width, height, "Speed at the best number of cores over one core");
    for (i, test) in swept.iter().enumerate() {
        let (column, row) = (i / rows, i % rows);
        let left = panel * column as f64;
        let y = 26.0 + CELL_H * row as f64;
        if row == 0 {
            for (j, t) in targets.iter().enumerate() {
                let x = left + NAMES + CELL_W * (j as f64 + 0.5);
                s.text((x, 17.0), Anchor::Middle, "head", &short(t));
            }
        }
        s.text((left + NAMES - 8.0, y + 15.0), Anchor::End, "name", test);
        for (j, target) in targets.iter().enumerate() {
            let x = left + NAMES + CELL_W * j as f64;
            let cells: Vec<Cell<'_>> = r.cores_of(test).iter().filter_map(|&n| r.cell(test, target, n)).collect();
            let Some(one) = cells.first() else {
                s.rect((x + 1.0, y + 1.0), (CELL_W - 2.0, CELL_H - 2.0), "var(--empty)", "did not run");
                continue;
            };
            let Some(best) = cells.iter().max_by(|a, b| a.median().total_cmp(&b.median())) else { continue };
            let last = cells.last().unwrap_or(best);
            let speed = best.median() / one.median();
            let at_last = last.median() / one.median();
            let tip = format!(
                "{test} on {target}: best with {} core(s), {speed:.2} times one core; {at_last:.2} times with {}",
                best.cores, last.cores
            );
            // what all cores give says more than the best where the best is one
            let shown = if best.cores == one.cores { at_last } else { speed };
            s.rect((x + 1.0, y + 1.0), (CELL_W - 2.0, CELL_H - 2.0), &heat(shown, most), &tip);
            let text = format!("{}", best.cores);
            s.text((x + CELL_W / 2.0 - 14.0, y + 15.0), Anchor::End, "cell", &text);
            s.text((x + CELL_W / 2.0 - 9.0, y + 15.0), Anchor::Start, "cellsmall", &times(shown));
        }
    }
    let y = height - 22.0;
    s.text((NAMES - 8.0, y + 11.0), Anchor::End, "tick", "times one core");
    for i in 0..=20 {
        let v = 0.5 * (most / 0.5).powf(f64::from(i) / 20.0);
        s.rect((NAMES + 9.0 * f64::from(i), y), (9.0, 14.0), &heat(v, most), &format!("{v:.2}"));
    }
    for (v, name) in [(0.5, "½".to_owned()), (1.0, "1".into()), (most, format!("{most:.0}"))] {
        let x = NAMES + 9.0 * 20.0 * (v / 0.5).ln() / (most / 0.5).ln() + 4.5;
        s.text((x, y - 3.0), Anchor::Middle, "tick", &name);
    }
    Some(s.end())
}

/// Red below one core's speed, yellow at it, green at all cores' speed; with dark text on all of them.
fn heat(speed: f64, most: f64) -> String {
    let up = if most > 1.0 { (speed.max(1.0).ln() / most.ln()).clamp(0.0, 1.0) } else { 0.0 };
    let down = (-(speed.clamp(0.5, 1.0)).ln() / 2f64.ln()).clamp(0.0, 1.0);
    let hue = 50.0 + 95.0 * up - 46.0 * down;
    let light = 84.0 - 18.0 * up - 14.0 * down;
    format!("hsl({hue:.0} {:.0}% {light:.0}%)", 78.0 - 22.0 * up)
}
