//! Results: what a run writes and the reports read. The schema has a version; see `docs/benchmarks.md`.

use crate::sys::{DiskCounters, Machine};
use crate::target::Target;
use crate::worker::{Mode, Scale};
use crate::{Error, Result, stats};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// What the first field of a results file says.
pub const SCHEMA: &str = "fxmark-results";
/// Version of the schema: a reader knows this and older ones.
pub const VERSION: u32 = 1;

/// What each kind of results file begins with; `P` is how that kind is measured.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Head<P> {
    /// Which kind of file it is, such as [`SCHEMA`].
    pub schema: String,
    /// Version of its structure, such as [`VERSION`].
    pub version: u32,
    /// Program and version that wrote it.
    pub tool: String,
    /// Start, seconds since 1970.
    pub started: u64,
    /// Length of the whole, seconds.
    pub took: f64,
    /// What it was measured on.
    pub machine: Machine,
    /// How it was measured.
    pub plan: P,
    /// The file systems that were measured.
    pub targets: Vec<TargetInfo>,
}

impl<P> Head<P> {
    /// Of a measurement that begins now.
    pub(crate) fn now(schema: &str, version: u32, plan: P, targets: &[Target]) -> Self {
        Self {
            schema: schema.into(),
            version,
            tool: concat!("fxmark ", env!("CARGO_PKG_VERSION")).into(),
            started: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
            took: 0.0,
            machine: Machine::here(),
            plan,
            targets: targets.iter().map(|t| TargetInfo { name: t.to_string(), setup: Vec::new() }).collect(),
        }
    }
}

/// A results file.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Results {
    /// What each such file begins with.
    #[serde(flatten)]
    pub head: Head<Plan>,
    /// Every repetition of every cell.
    pub runs: Vec<Run>,
    /// Cells left out, with the reason.
    pub skipped: Vec<Skipped>,
    /// What shortened or bent the measurement.
    pub notes: Vec<String>,
}

/// How all cells were measured.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Plan {
    /// `quick`, `standard` or `long`.
    pub profile: String,
    /// How the tests were set up.
    pub mode: Mode,
    /// Measured seconds of one repetition.
    pub seconds: f64,
    /// Warm-up before each, seconds.
    pub warm_up: f64,
    /// Repetitions, interleaved between targets.
    pub reps: usize,
    /// Numbers of cores.
    pub cores: Vec<usize>,
    /// CPUs, in the order in which they were used.
    pub cpus: Vec<usize>,
    /// What the file systems lay on.
    pub media: String,
    /// Was the file system made again for each repetition, or once per target?
    pub remade: bool,
    /// Were the kernel's caches dropped before each repetition?
    pub caches_dropped: bool,
    /// How large the files and trees of the tests were.
    pub scale: Scale,
    /// Of random numbers.
    pub seed: u64,
}

/// A file system under test.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TargetInfo {
    /// As it was named.
    pub name: String,
    /// Commands that made and mounted it.
    pub setup: Vec<String>,
}

/// Shares of CPU time of the CPUs that workers are pinned to, 0 to 1.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct CpuSplit {
    /// In programs; of the daemon of a mount, what runs on these CPUs ([`Run::daemon`] has all of it).
    pub user: f64,
    /// In the kernel.
    pub system: f64,
    /// Idle, with no process that waits for a device.
    pub idle: f64,
    /// Idle, waiting for a device.
    pub iowait: f64,
    /// Taken by the hypervisor.
    pub steal: f64,
}

/// Latency of single operations, nanoseconds.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Latency {
    /// How many operations were timed.
    pub count: u64,
    /// One in so many was timed.
    pub sampled: u64,
    /// Mean of those timed.
    pub mean: f64,
    /// Half of them took at most so long.
    pub p50: u64,
    /// 90 % took at most so long.
    pub p90: u64,
    /// 99 % took at most so long.
    pub p99: u64,
    /// 99.9 % took at most so long.
    pub p999: u64,
    /// 99.99 % took at most so long.
    pub p9999: u64,
    /// The longest of those timed.
    pub max: u64,
    /// The histogram: nanoseconds, operations.
    pub histogram: Vec<(u64, u64)>,
}

/// One repetition of one cell.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Run {
    /// Name of the test.
    pub test: String,
    /// Name of the target.
    pub target: String,
    /// Foreground workers, each on a CPU of its own.
    pub cores: usize,
    /// Which repetition, from 0.
    pub rep: usize,
    /// Operations of all foreground workers.
    pub ops: u64,
    /// Measured seconds, mean of the workers.
    pub secs: f64,
    /// Operations per second.
    pub throughput: f64,
    /// Operations of the slowest and the fastest worker, per second.
    pub fairness: (f64, f64),
    /// Operations per second of the background worker.
    pub background: Option<f64>,
    /// Latencies; none in mode `original`.
    pub latency: Option<Latency>,
    /// Shares of the CPUs' time while it was measured.
    pub cpu: CpuSplit,
    /// Times that foreground workers slept.
    pub voluntary: u64,
    /// Times that they were preempted.
    pub involuntary: u64,
    /// Context switches of the whole machine.
    pub switches: u64,
    /// The device during the measurement; none where there is no block device.
    pub disk: Option<DiskCounters>,
    /// The device afterwards, until everything was durable; none also where syncfs(2) does not reach the file system.
    pub settle: Option<DiskCounters>,
    /// Timed phases: more than one where the test used up its files.
    pub phases: u32,
    /// CPU time of the processes that are the file system (the daemon of braidfs; for the library, the workers), seconds;
    /// none where it is in the kernel.
    #[serde(default)]
    pub daemon: Option<f64>,
    /// Memory of the file system.
    #[serde(default)]
    pub memory: Option<Memory>,
    /// What threads of the library waited for locks, in a build that counts it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lock_waits: Vec<LockWait>,
    /// Parts of the measurement, where they were asked for.
    #[serde(default)]
    pub windows: Vec<Window>,
}

/// Memory of a file system while a test runs, its preparation included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// The most of the processes that are the file system (the daemon of braidfs; for the library, the workers), bytes; none
    /// where it is in the kernel.
    pub process: Option<u64>,
    /// By how much page cache, buffers and slabs of the kernel have grown, bytes.
    pub kernel: u64,
}

/// What all threads of a process waited for locks of a class.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LockWait {
    /// Name of the class.
    pub lock: String,
    /// How often a thread waited.
    pub waits: u64,
    /// How long all waits were together, seconds.
    pub secs: f64,
}

impl LockWait {
    /// Adds those of `more` to those of the same classes.
    pub(crate) fn add(sum: &mut Vec<Self>, more: &[Self]) {
        for m in more {
            match sum.iter_mut().find(|s| s.lock == m.lock) {
                Some(s) => (s.waits, s.secs) = (s.waits + m.waits, s.secs + m.secs),
                None => sum.push(m.clone()),
            }
        }
    }
}

/// A part of a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Window {
    /// Its length, seconds.
    pub secs: f64,
    /// Operations of all workers in it.
    pub ops: u64,
    /// CPU time of the file system's processes, as [`Run::daemon`].
    pub daemon: Option<f64>,
}

/// A cell that was left out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Skipped {
    /// Name of the test.
    pub test: String,
    /// Name of the target.
    pub target: String,
    /// Number of cores.
    pub cores: usize,
    /// Why it was left out.
    pub why: String,
}

/// All repetitions of a cell.
#[derive(Debug, Clone)]
pub struct Cell<'a> {
    /// Name of the test.
    pub test: &'a str,
    /// Name of the target.
    pub target: &'a str,
    /// Number of cores.
    pub cores: usize,
    /// In the order in which they ran.
    pub runs: Vec<&'a Run>,
}

impl Cell<'_> {
    /// Operations per second of each repetition.
    pub fn throughputs(&self) -> Vec<f64> {
        self.runs.iter().map(|r| r.throughput).collect()
    }
    /// Median of the throughputs, operations per second.
    pub fn median(&self) -> f64 {
        stats::median(&self.throughputs())
    }
    /// Slowest and fastest.
    pub fn range(&self) -> (f64, f64) {
        let all = self.throughputs();
        (all.iter().copied().fold(f64::INFINITY, f64::min), all.iter().copied().fold(0.0, f64::max))
    }
    /// Half the distance of the quartiles (of the extremes for fewer than four), over the median.
    pub fn spread(&self) -> f64 {
        stats::spread(&self.throughputs())
    }
    /// All latencies together.
    pub fn latency(&self) -> Option<Latency> {
        let parts: Vec<&Latency> = self.runs.iter().filter_map(|r| r.latency.as_ref()).collect();
        let all = parts.iter().flat_map(|l| l.histogram.iter().copied()).collect();
        let sampled = parts.iter().map(|l| l.sampled).max()?;
        Latency::of(all, sampled)
    }
    /// Mean of a figure of the runs.
    pub fn mean(&self, figure: impl Fn(&Run) -> f64) -> f64 {
        stats::mean(&self.runs.iter().map(|r| figure(r)).collect::<Vec<_>>())
    }
}

/// What a tenant keeps of its speed beside a neighbour.
#[derive(Debug, Clone, Copy)]
pub struct Isolation<'a> {
    /// Name of the target.
    pub target: &'a str,
    /// Operations per second without the neighbour.
    pub alone: f64,
    /// Operations per second with it.
    pub beside: f64,
    /// p99, without and with, nanoseconds.
    pub p99: (Option<u64>, Option<u64>),
}

impl Latency {
    /// Of a histogram in any order; none where nothing was timed.
    pub fn of(mut histogram: Vec<(u64, u64)>, sampled: u64) -> Option<Self> {
        histogram.sort_unstable();
        histogram.dedup_by(|b, a| {
            a.0 == b.0 && {
                a.1 += b.1;
                true
            }
        });
        let count: u64 = histogram.iter().map(|h| h.1).sum();
        if count == 0 {
            return None;
        }
        let at = |quantile: f64| {
            let rank = ((count as f64 * quantile).ceil() as u64).max(1);
            let mut seen = 0;
            let found = histogram.iter().find(|h| {
                seen += h.1;
                seen >= rank
            });
            found.map_or(0, |h| h.0)
        };
        let sum: f64 = histogram.iter().map(|h| h.0 as f64 * h.1 as f64).sum();
        Some(Self {
            count,
            sampled,
            mean: sum / count as f64,
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p999: at(0.999),
            p9999: at(0.9999),
            max: histogram.last().map_or(0, |h| h.0),
            histogram,
        })
    }
}

/// Keeps the first of equal values, in order.
fn distinct<T: PartialEq>(all: impl Iterator<Item = T>) -> Vec<T> {
    let mut out = Vec::new();
    for one in all {
        if !out.contains(&one) {
            out.push(one);
        }
    }
    out
}

/// Reads a file of results of this schema, up to this version.
pub(crate) fn read<T: DeserializeOwned>(path: &Path, schema: &str, version: u32) -> Result<T> {
    let text = std::fs::read(path).map_err(|e| Error::results(path, e))?;
    #[derive(Deserialize)]
    struct Kind {
        schema: String,
        version: u32,
    }
    let head: Kind = serde_json::from_slice(&text)
        .map_err(|e| Error::results(path, format!("no results of fxmark ({e}): give a file that it wrote")))?;
    if head.schema != schema || head.version > version {
        let why = format!("schema {} {}: this program reads {schema} up to {version}", head.schema, head.version);
        return Err(Error::results(path, why));
    }
    serde_json::from_slice(&text).map_err(|e| Error::results(path, e))
}

/// Writes a file of results, whole or not at all.
pub(crate) fn write<T: Serialize>(path: &Path, results: &T) -> Result<()> {
    let failed = |e| Error::io(format!("writing {}", path.display()), e);
    let text = serde_json::to_vec(results).map_err(|e| failed(e.into()))?;
    let dir = path.parent().filter(|d| !d.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut file = tempfile::Builder::new()
        .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o644))
        .tempfile_in(dir)
        .map_err(failed)?;
    std::io::Write::write_all(&mut file, &text).map_err(failed)?;
    file.persist(path).map_err(|e| failed(e.error))?;
    Ok(())
}

impl Results {
    /// Reads a file.
    ///
    /// # Errors
    /// It is none of ours, or newer than this program.
    pub fn read(path: &Path) -> Result<Self> {
        read(path, SCHEMA, VERSION)
    }

    /// Writes a file, whole or not at all.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        write(path, self)
    }

    /// Tests, in the order in which they ran.
    pub fn tests(&self) -> Vec<&str> {
        let names = distinct(self.runs.iter().map(|r| r.test.as_str()));
        let known = crate::suite::TestId::all().into_iter().map(|t| t.to_string());
        let mut out: Vec<&str> = known.filter_map(|k| names.iter().copied().find(|n| *n == k)).collect();
        out.extend(names.iter().copied().filter(|n| n.parse::<crate::suite::TestId>().is_err()));
        out
    }
    /// Targets, in their order.
    pub fn target_names(&self) -> Vec<&str> {
        distinct(self.head.targets.iter().map(|t| t.name.as_str()).chain(self.runs.iter().map(|r| r.target.as_str())))
    }
    /// Numbers of cores at which a test ran.
    pub fn cores_of(&self, test: &str) -> Vec<usize> {
        let mut cores = distinct(self.runs.iter().filter(|r| r.test == test).map(|r| r.cores));
        cores.sort_unstable();
        cores
    }
    /// A cell; none where it did not run.
    pub fn cell<'a>(&'a self, test: &'a str, target: &'a str, cores: usize) -> Option<Cell<'a>> {
        let fits = |r: &&Run| r.test == test && r.target == target && r.cores == cores;
        let runs: Vec<&Run> = self.runs.iter().filter(fits).collect();
        (!runs.is_empty()).then_some(Cell { test, target, cores, runs })
    }
    /// The pair of tests `tenant` and `tenant_bg`, at one core.
    pub fn isolation(&self) -> Vec<Isolation<'_>> {
        let pair = |target| {
            let (a, b) = (self.cell("tenant", target, 1)?, self.cell("tenant_bg", target, 1)?);
            let p99 = (a.latency().map(|l| l.p99), b.latency().map(|l| l.p99));
            (a.median() > 0.0).then(|| Isolation { target, alone: a.median(), beside: b.median(), p99 })
        };
        self.target_names().into_iter().filter_map(pair).collect()
    }
    /// All cells, in the order in which they were measured.
    pub fn cells(&self) -> Vec<Cell<'_>> {
        let mut out = Vec::new();
        for test in self.tests() {
            for cores in self.cores_of(test) {
                out.extend(self.target_names().into_iter().filter_map(|t| self.cell(test, t, cores)));
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_of_a_histogram() {
        let l = Latency::of(vec![(100, 50), (10, 49), (100, 0), (1000, 1)], 1).expect("values");
        assert_eq!((l.count, l.p50, l.p99, l.p9999, l.max), (100, 100, 100, 1000, 1000));
        assert!((l.mean - 64.9).abs() < 1e-9);
        assert_eq!(l.histogram.len(), 3);
        assert!(Latency::of(vec![], 1).is_none());
    }
}
