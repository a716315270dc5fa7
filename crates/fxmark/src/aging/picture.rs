//! `aging.svg`: rate, p99.9 and write amplification while the free space is written again and again.

use super::load::Kind;
use super::results::{Results, Slice};
use crate::report::svg::{Anchor, Svg, steps, tick};
use crate::stats::median;

const STYLE: &str = "text{font:10px sans-serif;fill:#555}.head{font-weight:bold;font-size:12px;fill:#222}\
    .grid{stroke:#e4e6e9}.curve{fill:none;stroke-width:1.5}.marker{stroke:none}\
    @media(prefers-color-scheme:dark){text{fill:#aaa}.head{fill:#ddd}.grid{stroke:#333a42}}";

/// A colour for each file system that is known, and for others.
fn colour(target: &str) -> &'static str {
    match target {
        "ext4" => "#2f6fb7",
        "xfs" => "#2f7d46",
        "btrfs" => "#a86a00",
        "f2fs" => "#7a5195",
        "braidfs" => "#c8252d",
        "library" => "#e07b91",
        _ => "#777777",
    }
}

const WIDTH: f64 = 200.0;
const HEIGHT: f64 = 110.0;
const LEFT: f64 = 46.0;
const GAP: f64 = 56.0;
const TOP: f64 = 64.0;
const DOWN: f64 = 44.0;

/// Where the axis of write amplification ends: above, what others do could not be told apart.
const MOST: f64 = 4.0;

/// A time of 10^n nanoseconds.
fn power_of_ten(n: f64) -> String {
    let (unit, below) = match n {
        n if n >= 9.0 => ("s", 9.0),
        n if n >= 6.0 => ("ms", 6.0),
        n if n >= 3.0 => ("µs", 3.0),
        _ => ("ns", 0.0),
    };
    format!("{:.0} {unit}", 10f64.powf(n - below))
}

/// The width that titles need.
const TITLES: f64 = 440.0;

/// What a row of panels shows.
#[derive(Clone, Copy)]
enum Metric {
    Rate,
    Tail,
    Amplification,
}

impl Metric {
    const ALL: [Self; 3] = [Self::Rate, Self::Tail, Self::Amplification];

    fn title(self, load: Kind) -> String {
        let what = match (self, load) {
            (Self::Rate, Kind::Overwrite) => "overwrites of 4 KiB a second",
            (Self::Rate, Kind::Churn) => "MiB of new files a second",
            (Self::Tail, _) => "p99.9 of an operation (logarithmic)",
            (Self::Amplification, _) => "bytes to the device per byte of the user, up to 4",
        };
        format!("{}: {what}", load.name())
    }
    fn of(self, load: Kind, s: &Slice) -> Option<f64> {
        match (self, load) {
            (Self::Rate, Kind::Overwrite) => Some(s.rate(load)),
            (Self::Rate, Kind::Churn) => Some(s.rate(load) / f64::from(1 << 20)),
            (Self::Tail, _) => Some((s.p999.max(1) as f64).log10()),
            (Self::Amplification, _) => s.amplification().map(|a| a.min(MOST)),
        }
    }
    fn tick(self, n: f64) -> String {
        match self {
            Self::Tail => power_of_ten(n),
            _ => tick(n),
        }
    }
}

/// Of each slice the median of the rounds.
fn curve(r: &Results, load: Kind, fill: u64, target: &str, metric: Metric) -> Vec<f64> {
    let volumes = r.cell(load, fill, target);
    let slices = volumes.iter().map(|v| v.slices.len()).max().unwrap_or(0);
    let at = |i: usize| {
        let found: Vec<f64> = volumes.iter().filter_map(|v| metric.of(load, v.slices.get(i)?)).collect();
        (!found.is_empty()).then(|| median(&found))
    };
    (0..slices).map_while(at).collect()
}

/// The picture of all volumes, as SVG.
pub fn draw(r: &Results) -> String {
    let (columns, rows) = (r.head.plan.fill.len() as f64, (r.head.plan.loads.len() * Metric::ALL.len()) as f64);
    let (width, height) = ((columns * (WIDTH + GAP) + LEFT).max(TITLES), TOP + rows * (HEIGHT + DOWN));
    let label = "File systems that age: rate, p99.9 and write amplification by how often the free space was written";
    let mut svg = Svg::new(width, height, label);
    let mut x = LEFT;
    for name in r.names() {
        svg.rect((x, 10.0), (14.0, 4.0), colour(name), name);
        svg.text((x + 18.0, 15.5), Anchor::Start, "name", name);
        x += 28.0 + 7.0 * name.len() as f64;
    }
    for (i, fill) in r.head.plan.fill.iter().enumerate() {
        let x = LEFT + i as f64 * (WIDTH + GAP) + WIDTH / 2.0;
        svg.text((x, 36.0), Anchor::Middle, "head", &format!("{fill} % full"));
    }
    let mut y = TOP;
    for &load in &r.head.plan.loads {
        for metric in Metric::ALL {
            svg.text((LEFT, y - 8.0), Anchor::Start, "head", &metric.title(load));
            for (i, &fill) in r.head.plan.fill.iter().enumerate() {
                panel(&mut svg, r, (load, fill, metric), (LEFT + i as f64 * (WIDTH + GAP), y));
            }
            y += HEIGHT + DOWN;
        }
    }
    svg.end_file(STYLE)
}

fn panel(svg: &mut Svg, r: &Results, (load, fill, metric): (Kind, u64, Metric), (x, y): (f64, f64)) {
    let curves: Vec<(&str, Vec<f64>)> =
        r.names().into_iter().map(|t| (t, curve(r, load, fill, t, metric))).filter(|c| !c.1.is_empty()).collect();
    let all = || curves.iter().flat_map(|c| c.1.iter().copied());
    let (low, ticks) = match metric {
        Metric::Tail => {
            let low = all().fold(f64::INFINITY, f64::min).min(9.0).floor();
            let high = all().fold(low + 1.0, f64::max).ceil();
            (low, (0..=(high - low) as u32).map(|i| low + f64::from(i)).collect())
        }
        _ => (0.0, steps(all().fold(0.0, f64::max))),
    };
    let high = ticks.last().copied().unwrap_or(1.0);
    let place = |v: f64| y + HEIGHT - (v - low) / (high - low).max(1e-9) * HEIGHT;
    for t in &ticks {
        svg.line((x, place(*t)), (x + WIDTH, place(*t)), "grid");
        svg.text((x - 4.0, place(*t) + 3.5), Anchor::End, "tick", &metric.tick(*t));
    }
    let slices = r.head.plan.slices as f64;
    for i in 0..=4 {
        let part = f64::from(i) / 4.0;
        svg.text((x + part * WIDTH, y + HEIGHT + 13.0), Anchor::Middle, "tick", &tick(part * r.head.plan.times));
    }
    for (target, values) in curves {
        let at = |(i, v): (usize, &f64)| (x + (i as f64 + 0.5) / slices * WIDTH, place(*v));
        let points: Vec<(f64, f64)> = values.iter().enumerate().map(at).collect();
        svg.polyline(&points, colour(target));
        if let ([only], [v]) = (&points[..], &values[..]) {
            svg.marker(*only, 0, colour(target), &format!("{target}: {}", metric.tick(*v)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_round() {
        let said: Vec<String> = [2, 3, 5, 6, 8, 9, 10].map(|n| power_of_ten(f64::from(n))).into();
        assert_eq!(said, ["100 ns", "1 µs", "100 µs", "1 ms", "100 ms", "1 s", "10 s"]);
    }
}
