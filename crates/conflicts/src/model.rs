//! The projection: an upper bound of a test's throughput with more cores than there are, from what can be counted.
//!
//! With `n` threads, each on a core of its own, and `c` nanoseconds for a transfer of a cache line between two cores:
//!
//! - an operation takes the time of one thread, and `c` for each transfer that it waits for: `t1 + T(n) c`; `n` threads do
//!   `n` of them in that time,
//! - the transfers of one line come one after the other: no more than one operation in `h(n) c`, of the line with the most,
//! - who has a lock for itself keeps all others out: no more than one operation in the time that operations have the lock
//!   that is held longest: their instructions meanwhile, as a part of the one-thread time, and `c` for each transfer
//!   meanwhile, and for each time that the lock goes to another core.
//!
//! The bound is the least of the three. `T`, `h` and the locks are those of the checker's foreground window; between the
//! numbers of workers that it ran they change with the logarithm of `n`, above the largest they stay as they are there,
//! and one worker has no transfers. It is a bound from above: threads that wait in turn at several places, caches with
//! limits, and the kernel make it less.

use crate::clock::Timed;
use crate::matrix::{Cell, Domains, Matrix};
use crate::{Error, Result};
use serde::{Deserialize, Serialize};

/// What a transfer between two cores costs, nanoseconds: from one die of a few cores to several sockets.
pub const TRANSFER_NS: [f64; 2] = [50.0, 300.0];
/// Cores that are drawn.
pub const CORES: [usize; 8] = [1, 2, 4, 8, 16, 32, 64, 128];
/// Cores at which a test is judged, and the part of linear that it must reach there, at both ends of [`TRANSFER_NS`].
pub const JUDGED: (usize, f64) = (32, 0.8);
/// Tests whose operations have nothing that must be shared, which must reach it.
pub const MUST_SCALE: [&str; 14] =
    ["DRBL", "DRBM", "DRBH", "DWOL", "DWAL", "DWTL", "MRPL", "MRPM", "MRPH", "MRDL", "MRDM", "MWCL", "MWUL", "MWRL"];

/// What one measured number of workers says, per operation.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// Number of threads that worked at once.
    pub workers: usize,
    /// Transfers of all lines.
    pub transfers: f64,
    /// Transfers of the hottest line.
    pub hottest: f64,
    /// The lock that costs most where a transfer is cheap, and where it is dear.
    pub locks: [LockCost; 2],
    /// System calls, which the projection does not know.
    pub calls: f64,
}

/// How operations have one lock for themselves, per operation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct LockCost {
    /// Part of the instructions of operations.
    pub share: f64,
    /// Transfers meanwhile, and when the lock goes to another core.
    pub transfers: f64,
}

impl LockCost {
    fn ns(self, t1: f64, c: f64) -> f64 {
        self.share * t1 + self.transfers * c
    }
}

/// A test of one variant.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Curve {
    /// Test of the suite.
    pub test: String,
    /// Which variant of the engine.
    pub variant: Variant,
    /// One thread's time for an operation, nanoseconds.
    pub t1_ns: f64,
    /// By rising workers.
    pub points: Vec<Point>,
    /// Operations per second on [`CORES`], at both ends of [`TRANSFER_NS`].
    pub per_second: Vec<[f64; 2]>,
    /// What bounds it on [`JUDGED`] cores, at both ends.
    pub limits: [Limit; 2],
}

/// What is projected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Variant {
    /// As it is shipped, with one domain.
    One,
    /// As it is shipped, a domain for each worker.
    Each,
    /// All switches for experiments on, one domain.
    Coarse,
}

impl Variant {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::One, Self::Each, Self::Coarse];
}

/// What bounds a throughput.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// Nothing but the cores.
    Cores,
    /// Transfers that each operation waits for.
    Transfers,
    /// Transfers of one line.
    Line,
    /// One lock, which operations hold in turn.
    Lock,
}

impl Limit {
    /// As it stands in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cores => "cores",
            Self::Transfers => "transfers",
            Self::Line => "one line",
            Self::Lock => "one lock",
        }
    }
}

impl Point {
    fn of(cell: &Cell, t1: f64) -> Self {
        let w = &cell.foreground;
        let held = |l: &crate::report::Lock| LockCost {
            share: if w.instructions > 0.0 { l.instructions / w.instructions } else { 0.0 },
            transfers: l.transfers + l.handoffs,
        };
        let locks = TRANSFER_NS.map(|c| {
            let all = w.locks.iter().map(held);
            all.max_by(|a, b| a.ns(t1, c).total_cmp(&b.ns(t1, c))).unwrap_or_default()
        });
        Self { workers: cell.id.workers, transfers: w.transfers, hottest: w.hottest, locks, calls: w.calls }
    }
    /// Of one worker.
    const ALONE: Self = Self {
        workers: 1,
        transfers: 0.0,
        hottest: 0.0,
        locks: [LockCost { share: 0.0, transfers: 0.0 }; 2],
        calls: 0.0,
    };
    /// Nanoseconds of an operation for its own thread, for the hottest line, and for the lock.
    fn ns(&self, t1: f64, end: usize) -> [f64; 3] {
        let c = TRANSFER_NS[end];
        [t1 + self.transfers * c, self.hottest * c, self.locks[end].ns(t1, c)]
    }
}

/// [`Point::ns`] between the points.
fn between(points: &[Point], cores: usize, t1: f64, end: usize) -> [f64; 3] {
    let mut below = Point::ALONE;
    for p in points {
        if p.workers >= cores {
            let part = (cores as f64 / below.workers as f64).ln() / (p.workers as f64 / below.workers as f64).ln();
            let (a, b) = (below.ns(t1, end), p.ns(t1, end));
            return std::array::from_fn(|i| if cores == below.workers { a[i] } else { a[i] + (b[i] - a[i]) * part });
        }
        below = *p;
    }
    below.ns(t1, end)
}

/// Operations per second on so many cores at one end of the range, and what bounds them.
fn bound(points: &[Point], cores: usize, t1: f64, end: usize) -> (f64, Limit) {
    let [own, line, lock] = between(points, cores, t1, end);
    let linear = cores as f64 / t1;
    let mut least = (cores as f64 / own, Limit::Transfers);
    for (ns, limit) in [(line, Limit::Line), (lock, Limit::Lock)] {
        if ns > 0.0 && 1.0 / ns < least.0 {
            least = (1.0 / ns, limit);
        }
    }
    if least.0 > 0.99 * linear {
        least.1 = Limit::Cores;
    }
    (least.0 * 1e9, least.1)
}

impl Curve {
    fn new(test: &str, variant: Variant, t1_ns: f64, points: Vec<Point>) -> Self {
        let per_second = CORES.iter().map(|&n| [0, 1].map(|end| bound(&points, n, t1_ns, end).0)).collect();
        let limits = [0, 1].map(|end| bound(&points, JUDGED.0, t1_ns, end).1);
        Self { test: test.to_owned(), variant, t1_ns, points, per_second, limits }
    }
    /// How many times the throughput of one core, at both ends.
    pub fn speed_up(&self, cores: usize) -> [f64; 2] {
        let at = CORES.iter().position(|&n| n == cores).unwrap_or(0);
        self.per_second[at].map(|x| x * self.t1_ns / 1e9)
    }
    /// Does it reach [`JUDGED`] at both ends?
    pub fn scales(&self) -> bool {
        let (cores, part) = JUDGED;
        self.speed_up(cores).iter().all(|s| *s >= part * cores as f64)
    }
    /// The point of the most workers.
    pub fn most(&self) -> Point {
        self.points.last().copied().unwrap_or(Point::ALONE)
    }
}

/// A projection, as it is written to a file.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Projection {
    /// Version of this structure.
    pub version: u32,
    /// Cheap and dear transfer, nanoseconds: [`TRANSFER_NS`].
    pub transfer_ns: [f64; 2],
    /// Numbers of cores that are projected: [`CORES`].
    pub cores: Vec<usize>,
    /// All tests, each in all variants.
    pub curves: Vec<Curve>,
}

impl Projection {
    /// From the cells of a build with the feature `lock-sections`, those of the coarse variant, and times of one thread.
    ///
    /// # Errors
    /// Cells or times of a test are missing, or no locks were told of.
    pub fn of(shipped: &Matrix, coarse: &Matrix, times: &[Timed]) -> Result<Self> {
        let mut curves = Vec::new();
        for test in shipped.tests() {
            for variant in Variant::ALL {
                let (matrix, domains, switches) = match variant {
                    Variant::One => (shipped, Domains::One, ""),
                    Variant::Each => (shipped, Domains::Each, ""),
                    Variant::Coarse => (coarse, Domains::One, "all"),
                };
                let time = times.iter().find(|t| t.test == test && t.workers == 1 && t.switches == switches);
                let missing = || Error::Cell(format!("{test}: no time of one thread with switches `{switches}`"));
                let t1 = time.ok_or_else(missing)?.median();
                let mut points: Vec<Point> = matrix
                    .cells
                    .iter()
                    .filter(|c| c.id.test == test && c.id.domains == domains)
                    .map(|c| Point::of(c, t1))
                    .collect();
                if points.is_empty() {
                    continue;
                }
                points.sort_by_key(|p| p.workers);
                curves.push(Curve::new(test, variant, t1, points));
            }
        }
        if !coarse.cells.iter().any(|c| !c.foreground.locks.is_empty()) {
            return Err(Error::Cell(
                "no locks: build it with --features lock-sections, as `make projection` does".into(),
            ));
        }
        Ok(Self { version: 1, transfer_ns: TRANSFER_NS, cores: CORES.to_vec(), curves })
    }
    /// Tests, in their order.
    pub fn tests(&self) -> Vec<&str> {
        let mut tests: Vec<&str> = self.curves.iter().map(|c| c.test.as_str()).collect();
        tests.dedup();
        tests
    }
    /// A curve, if it was projected.
    pub fn curve(&self, test: &str, variant: Variant) -> Option<&Curve> {
        self.curves.iter().find(|c| c.test == test && c.variant == variant)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(points: &[(usize, f64, f64, LockCost)]) -> Curve {
        let point =
            |&(workers, transfers, hottest, lock)| Point { workers, transfers, hottest, locks: [lock; 2], calls: 0.0 };
        Curve::new("MWCL", Variant::One, 1000.0, points.iter().map(point).collect())
    }

    const FREE: LockCost = LockCost { share: 0.0, transfers: 0.0 };

    #[test]
    fn what_shares_nothing_is_linear() {
        let c = curve(&[(2, 0.0, 0.0, FREE), (32, 0.0, 0.0, FREE)]);
        assert_eq!((c.speed_up(1), c.speed_up(128)), ([1.0; 2], [128.0; 2]));
        assert!(c.scales() && c.limits == [Limit::Cores; 2]);
    }

    #[test]
    fn transfers_of_many_lines_make_operations_longer() {
        // 2 transfers are 100 and 600 of 1,000 ns
        let c = curve(&[(2, 2.0, 0.1, FREE), (32, 2.0, 0.001, FREE)]);
        let [near, far] = c.speed_up(32);
        assert!((near - 32.0 / 1.1).abs() < 0.01 && (far - 32.0 / 1.6).abs() < 0.01, "{near} {far}");
        assert!(!c.scales() && c.limits == [Limit::Transfers; 2]);
        // as with 32
        assert!((c.speed_up(64)[0] - 64.0 / 1.1).abs() < 0.01);
    }

    #[test]
    fn one_line_and_one_lock_serialise() {
        let line = curve(&[(2, 1.0, 1.0, FREE), (32, 1.0, 1.0, FREE)]);
        // one operation in 50 and in 300 ns
        assert!((line.speed_up(128)[0] - 20.0).abs() < 0.01 && (line.speed_up(32)[1] - 1000.0 / 300.0).abs() < 0.01);
        assert_eq!(line.limits[1], Limit::Line);
        // half of 1,000 ns, and a transfer
        let lock = curve(&[(2, 0.0, 0.0, FREE), (32, 1.0, 0.0, LockCost { share: 0.5, transfers: 1.0 })]);
        let [near, far] = lock.speed_up(32);
        assert!((near - 1000.0 / 550.0).abs() < 0.01 && (far - 1000.0 / 800.0).abs() < 0.01, "{near} {far}");
        assert_eq!(lock.limits, [Limit::Lock; 2]);
    }

    #[test]
    fn between_points_it_goes_by_the_logarithm() {
        let points = [(2, 1.0), (8, 3.0)].map(|(workers, transfers)| Point { workers, transfers, ..Point::ALONE });
        // 4 is half-way from 2 to 8
        assert!((between(&points, 4, 1000.0, 0)[0] - 1100.0).abs() < 0.01);
        assert!((between(&points, 2, 1000.0, 0)[0] - 1050.0).abs() < 0.01);
        assert!((between(&points, 1, 1000.0, 0)[0] - 1000.0).abs() < 0.01);
        assert!((between(&points, 64, 1000.0, 0)[0] - 1150.0).abs() < 0.01);
    }
}
