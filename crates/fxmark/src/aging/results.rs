//! What a run found, as it is written to a file.

use super::load::Kind;
use super::profile::Profile;
use super::venue::Layout;
use crate::results::Head;
use crate::stats::median;
use serde::{Deserialize, Serialize};

/// What the first field of a file says.
pub const SCHEMA: &str = "fxmark-aging";
/// Version of the schema: a reader refuses newer ones.
pub const VERSION: u32 = 1;

/// A results file.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Results {
    /// What each such file begins with.
    #[serde(flatten)]
    pub head: Head<Plan>,
    /// Every volume that was aged.
    pub volumes: Vec<Volume>,
}

/// How volumes were filled and aged.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Plan {
    /// Bytes of a volume.
    pub size: u64,
    /// What the file systems lay on.
    pub media: String,
    /// How full volumes are, percent of what df offers when they are empty.
    pub fill: Vec<u64>,
    /// What ages them.
    pub loads: Vec<Kind>,
    /// How often the free space is written.
    pub times: f64,
    /// Parts of a run.
    pub slices: u64,
    /// Overwrites per fsync.
    pub fsync_every: u64,
    /// Sizes of files that come and go.
    pub profile: Profile,
    /// Of these the largest, bytes.
    pub largest: u64,
    /// Bytes read for the rate of sequential reads, at most.
    pub read: u64,
    /// Seconds that a volume may be aged.
    pub limit: f64,
    /// How often all of it is done, targets in turn.
    pub rounds: u64,
    /// Of random numbers.
    pub seed: u64,
}

/// A volume that was filled and aged.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Volume {
    /// Name of the file system.
    pub target: String,
    /// What it was aged by.
    pub load: Kind,
    /// How full it was to be, percent.
    pub fill: u64,
    /// Counted from 0.
    pub round: u64,
    /// Bytes that df offered when it was empty.
    pub capacity: u64,
    /// Bytes of the files that filled it, in blocks.
    pub filled: u64,
    /// Bytes that df offered then.
    pub available: u64,
    /// Parts of the run, in the order of time.
    pub slices: Vec<Slice>,
    /// Bytes written to the device afterwards, until all was durable; none without a device of its own, or where syncfs(2)
    /// does not reach the file system.
    pub settled: Option<u64>,
    /// Pieces of files after filling.
    pub fresh: Option<Layout>,
    /// And after ageing.
    pub aged: Option<Layout>,
    /// Bytes a second of sequential reads after filling, nothing cached.
    pub read_fresh: f64,
    /// And after ageing.
    pub read_aged: f64,
    /// What shortened or bent it.
    pub notes: Vec<String>,
}

/// A part of a run.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Slice {
    /// Operations done in it.
    pub ops: u64,
    /// Operations that found no space.
    pub no_space: u64,
    /// Bytes that they wrote for their user.
    pub user: u64,
    /// Bytes written to the device meanwhile; none without a device of its own.
    pub device: Option<u64>,
    /// Length of the part, seconds.
    pub seconds: f64,
    /// Times of operations, an fsync that ended one included, nanoseconds: median.
    pub p50: u64,
    /// Their 99.9th percentile, nanoseconds.
    pub p999: u64,
    /// The longest, nanoseconds.
    pub max: u64,
}

impl Slice {
    /// What the load is judged by: overwrites a second; of churn bytes created a second, as its files differ in size.
    pub fn rate(&self, load: Kind) -> f64 {
        let n = if load == Kind::Overwrite { self.ops } else { self.user };
        n as f64 / self.seconds.max(1e-9)
    }
    /// Bytes to the device per byte of the user.
    pub fn amplification(&self) -> Option<f64> {
        Some(self.device? as f64 / self.user.max(1) as f64)
    }
}

/// Parts of a run as one.
pub fn sum(slices: &[Slice]) -> Slice {
    let of = |f: fn(&Slice) -> u64| slices.iter().map(f).sum::<u64>();
    let times = |f: fn(&Slice) -> u64| median(&slices.iter().map(|s| f(s) as f64).collect::<Vec<_>>()) as u64;
    Slice {
        ops: of(|s| s.ops),
        no_space: of(|s| s.no_space),
        user: of(|s| s.user),
        device: slices.iter().map(|s| s.device).sum(),
        seconds: slices.iter().map(|s| s.seconds).sum(),
        // of percentiles there is no sum: the median of the parts
        p50: times(|s| s.p50),
        p999: times(|s| s.p999),
        max: slices.iter().map(|s| s.max).max().unwrap_or(0),
    }
}

impl Volume {
    /// The first quarter of the run.
    pub fn first(&self) -> Slice {
        sum(&self.slices[..self.quarter()])
    }
    /// The last one.
    pub fn last(&self) -> Slice {
        sum(&self.slices[self.slices.len() - self.quarter()..])
    }
    fn quarter(&self) -> usize {
        self.slices.len().div_ceil(4)
    }
    /// Bytes to the device per byte of the user, all of it, until it was durable.
    pub fn amplification(&self) -> Option<f64> {
        let all = sum(&self.slices);
        Some((all.device? + self.settled?) as f64 / all.user.max(1) as f64)
    }
}

impl Results {
    /// The volumes of a cell, one per round.
    pub fn cell(&self, load: Kind, fill: u64, target: &str) -> Vec<&Volume> {
        self.volumes.iter().filter(|v| v.load == load && v.fill == fill && v.target == target).collect()
    }
    /// Names of targets, in their order.
    pub fn names(&self) -> Vec<&str> {
        self.head.targets.iter().map(|t| t.name.as_str()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quarters_and_sums() {
        let slice = |n: u64| Slice {
            ops: n,
            user: 4096 * n,
            device: Some(8192 * n),
            seconds: 0.5,
            p50: n,
            p999: 2 * n,
            ..Slice::default()
        };
        let s = sum(&[slice(1), slice(3)]);
        assert_eq!((s.ops, s.device, s.p50, s.p999, s.seconds), (4, Some(32_768), 2, 4, 1.0));
        assert_eq!((s.rate(Kind::Overwrite), s.rate(Kind::Churn), s.amplification()), (4.0, 16_384.0, Some(2.0)));
        assert_eq!(sum(&[slice(1), Slice::default()]).device, None);
        assert_eq!(sum(&[]).ops, 0);
    }
}
