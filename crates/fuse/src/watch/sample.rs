//! What a mount tells of itself at one moment, as JSON of a layout with a number.
//!
//! All counters rise from the mount on, so that two samples tell what came between ([`Latency::since`]); those of processes
//! from when somebody began to watch. Fields may be
//! added without a new [`LAYOUT`]: who does not know them skips them, and who misses them takes 0. What is there keeps its
//! meaning, or the number rises.

use super::histogram::{BUCKETS, lower};
use serde::{Deserialize, Deserializer, Serialize};

/// The layout that this program tells and understands.
pub const LAYOUT: u32 = 1;

/// See the module.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sample {
    /// [`LAYOUT`] of who told it.
    pub layout: u32,
    /// Version of the server.
    pub version: String,
    /// Since the mount.
    pub uptime_ns: u64,
    /// UUID of the volume, hexadecimal.
    pub uuid: String,
    /// Label of the volume, empty where it has none.
    pub label: String,
    /// Threads that serve.
    pub threads: u32,
    /// One request of so many is timed; 1 while somebody watches.
    pub sampled: u32,
    /// Requests that wait for another thread to answer them.
    pub waiting: u64,
    /// Requests that wait for their tenant's turn.
    pub parked: u64,
    /// Operations that were asked at least once, in the order of their codes.
    pub operations: Vec<Operation>,
    /// In the order of their numbers.
    pub domains: Vec<Domain>,
    /// The server's own; what the kernel keeps, it does not know.
    pub cache: Cache,
    /// Threads that asked while somebody watched, those of most requests first.
    pub processes: Vec<Process>,
    /// The number (inode) of the pid namespace in which threads have these numbers; 0: not known.
    pub pid_namespace: u64,
    /// Told to who is neither root nor the user of the server: without processes, and without why a domain failed; a moment
    /// old, and who asked for it does not watch by that.
    pub restricted: bool,
    /// Shares of the volume, by their domains; none where `restricted`.
    pub tenants: Vec<Tenant>,
    /// Users, groups and directories that have limits, in the order of a report; none where `restricted`.
    pub quotas: Vec<Quota>,
    /// In the order of their numbers.
    pub devices: Vec<Device>,
}

/// Of one device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Device {
    /// Number of the device.
    pub device: u16,
    /// Its path or URI; empty where the sample is [restricted](Sample::restricted).
    pub name: String,
    /// `ok`, or `drained`: nothing new comes to lie on it.
    pub state: String,
    /// Bytes of data and metadata that can lie on it.
    pub bytes: u64,
    /// Of these, unused ones.
    pub free: u64,
    /// Block groups.
    pub groups: u32,
    /// Of these, those that no domain has.
    pub free_groups: u32,
    /// Requests that it answered with an error since the mount.
    pub errors: u64,
    /// What of tenants lies on it; none where `restricted`.
    pub tenants: Vec<Share>,
}

/// What of a tenant lies on a device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Share {
    /// Name of the tenant.
    pub name: String,
    /// Bytes of data and metadata.
    pub bytes: u64,
}

/// Of one operation of FUSE.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Operation {
    /// Its code; 0: all that have none below 64.
    pub opcode: u32,
    /// As `linux/fuse.h` has it.
    pub name: String,
    /// How many there were.
    pub requests: u64,
    /// Those that another thread answered.
    pub deferred: u64,
    /// Those that were answered with an error, also ones that are none for the user; a LOOKUP of a name that is not there is none.
    pub errors: u64,
    /// Of data: read, or taken to be written.
    pub bytes: u64,
    /// Those whose handler was timed, and how long these took in it.
    pub timed: u64,
    /// Time of the requests that were timed, in nanoseconds.
    pub timed_ns: u64,
    /// From the moment a request was received until it was answered, of those that were timed.
    pub latency: Latency,
}

/// A histogram of times.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Latency {
    /// (bucket, count), those that are not empty, in rising order.
    #[serde(deserialize_with = "known_buckets")]
    buckets: Vec<(u16, u64)>,
}

/// Those that there are: a server can tell anything.
fn known_buckets<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<(u16, u64)>, D::Error> {
    let mut buckets = Vec::<(u16, u64)>::deserialize(from)?;
    buckets.retain(|(b, _)| usize::from(*b) < BUCKETS);
    Ok(buckets)
}

/// Of one domain.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Domain {
    /// Number of the domain.
    pub domain: u16,
    /// Data blocks, of 4 KiB.
    pub blocks: u64,
    /// Data blocks that nothing uses.
    pub free_blocks: u64,
    /// Inodes that there is room for.
    pub inodes: u64,
    /// Of these, free ones.
    pub free_inodes: u64,
    /// Blocks of the journal.
    pub journal_blocks: u64,
    /// Journal blocks in use.
    pub journal_used: u64,
    /// Commits since the mount.
    pub commits: u64,
    /// Threads that helped commits of others.
    pub joiners: u64,
    /// Checkpoints since the mount.
    pub checkpoints: u64,
    /// fsyncs that needed no commit.
    pub fast_syncs: u64,
    /// Blocks that the cleaner moved.
    pub cleaned_blocks: u64,
    /// Blocks in groups that it emptied for other domains.
    pub relocated_blocks: u64,
    /// Number of the NUMA node that it is placed on, where there are several.
    pub numa_node: Option<u32>,
    /// Why it is read-only, if it is; empty where the sample is [restricted](Sample::restricted).
    pub failed: Option<String>,
    /// Of requests that were timed for an inode of the domain, or for a name in one of its directories, as
    /// [`Operation::latency`].
    #[serde(skip_serializing_if = "Latency::is_empty")]
    pub latency: Latency,
}

/// The cache of the server.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Cache {
    /// Bytes that it may take.
    pub budget: u64,
    /// Bytes of data in it.
    pub data: u64,
    /// Of these, not yet written.
    pub dirty: u64,
    /// Bytes of names and extents.
    pub index: u64,
    /// Reads that it answered alone; about, where threads are many.
    pub hits: u64,
    /// Reads that waited for the device.
    pub misses: u64,
}

/// Of one thread of a process.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Process {
    /// Its number as the server's namespace has it; 0: the kernel.
    pub thread: u32,
    /// How many requests.
    pub requests: u64,
    /// Those that were timed, and how long their handlers took.
    pub timed: u64,
    /// Time of the requests that were timed, in nanoseconds.
    pub timed_ns: u64,
    /// Until the answer, of those that were timed; each in the later half of a bucket that is twice as wide as those of
    /// [`Operation::latency`].
    #[serde(skip_serializing_if = "Latency::is_empty")]
    pub latency: Latency,
}

/// A share of the volume.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Tenant {
    /// Name of the tenant.
    pub name: String,
    /// Number of its domain, of which the rest is told in `domains`.
    pub domain: u16,
    /// Number of its root directory.
    pub root: u64,
    /// Bytes of data and metadata that it uses, or has reserved.
    pub used: u64,
    /// Most bytes that it may use, if there is a limit.
    pub space: Option<u64>,
    /// Inodes that it has, its root directory among them.
    pub inodes: u64,
    /// Most inodes that it may have, if there is a limit.
    pub inodes_max: Option<u64>,
    /// Bytes of the server's cache that it holds.
    pub cached: u64,
    /// Bytes of it that are kept for the tenant.
    pub memory_min: u64,
    /// Bytes of it that the tenant may hold, if there is a limit.
    pub memory_max: Option<u64>,
    /// A limit that may be exceeded for a while, bytes.
    pub soft_space: Option<u64>,
    /// Since when it is, seconds since 1970.
    pub soft_exceeded_since: Option<u64>,
    /// For longer than it may: it is a hard limit now.
    pub grace_is_over: bool,
    /// What it reads, while that is limited.
    pub read: Rate,
    /// What it writes.
    pub written: Rate,
    /// Processor time that is spent on it, while that is limited.
    pub serving: Serving,
    /// `ordered`, `data` or `scratch`; none: as the mount says.
    pub journal: Option<String>,
    /// Numbers of the devices that it may use; none: all.
    pub devices: Vec<u16>,
    /// Block groups that it has on others, and bytes in them.
    pub elsewhere_groups: u32,
    /// See `elsewhere_groups`.
    pub elsewhere: u64,
}

/// What the server spends on a tenant.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Serving {
    /// Most nanoseconds of processor time in a second, if there is a limit.
    pub ns_per_second: Option<u64>,
    /// Spent since the mount.
    pub ns: u64,
    /// Spent, and what who comes next waits for.
    pub debt_ns: u64,
    /// Requests that waited.
    pub waits: u64,
    /// How long all of them did.
    pub waited_ns: u64,
}

/// What a user, a group or a directory uses of its limits.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Quota {
    /// Of a user: its number.
    pub user: Option<u32>,
    /// Of a group: its number.
    pub group: Option<u32>,
    /// Of a directory: the number that its inodes carry.
    pub project: Option<u32>,
    /// Number of the directory.
    pub directory: Option<u64>,
    /// Bytes of content.
    pub used: u64,
    /// Most bytes, if there is a limit.
    pub space: Option<u64>,
    /// Bytes that may be exceeded for a while.
    pub soft_space: Option<u64>,
    /// Inodes.
    pub inodes: u64,
    /// Most inodes, if there is a limit.
    pub inodes_max: Option<u64>,
    /// Inodes that may be exceeded for a while.
    pub soft_inodes: Option<u64>,
    /// Since when the soft limit of space is exceeded, seconds since 1970.
    pub space_exceeded_since: Option<u64>,
    /// Since when the soft limit of inodes is.
    pub inodes_exceeded_since: Option<u64>,
    /// For longer than it may: it is a hard limit now.
    pub grace_is_over: bool,
}

impl Quota {
    /// Of what it is: `user`, `group` or `directory`, and its number (of a directory that of its project).
    pub fn whose(&self) -> (&'static str, u32) {
        match (self.user, self.group, self.project) {
            (Some(n), ..) => ("user", n),
            (_, Some(n), _) => ("group", n),
            (.., n) => ("directory", n.unwrap_or(0)),
        }
    }

    /// How much of the nearest limit is used, of 1: the hard ones and the soft ones.
    pub fn nearest(&self) -> f64 {
        let part = |n: u64, of: Option<u64>| of.map_or(0.0, |of| n as f64 / of.max(1) as f64);
        let space = part(self.used, self.space).max(part(self.used, self.soft_space));
        space.max(part(self.inodes, self.inodes_max)).max(part(self.inodes, self.soft_inodes))
    }
}

/// What a tenant asks of the device while that is limited, and the limits.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Rate {
    /// Most bytes a second, if there is a limit.
    pub bytes_per_second: Option<u64>,
    /// Most requests a second, if there is a limit.
    pub requests_per_second: Option<u64>,
    /// Bytes since the mount.
    pub bytes: u64,
    /// Requests since the mount.
    pub requests: u64,
    /// Bytes that were asked and that who comes next waits for.
    pub debt_bytes: u64,
    /// Requests that were asked and that who comes next waits for.
    pub debt_requests: u64,
    /// Calls that waited.
    pub waits: u64,
    /// How long all of them did.
    pub waited_ns: u64,
}

impl Latency {
    pub(crate) fn new(counts: &[u64; BUCKETS]) -> Self {
        let some = (0u16..).zip(counts).filter(|(_, n)| **n > 0);
        Self { buckets: some.map(|(b, n)| (b, *n)).collect() }
    }

    fn is_empty(&self) -> bool {
        self.buckets.is_empty()
    }

    /// How many times there are.
    pub fn count(&self) -> u64 {
        self.buckets.iter().fold(0, |sum, (_, n)| sum.saturating_add(*n))
    }

    /// What came since `before`.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let was = |bucket| before.buckets.iter().find(|(b, _)| *b == bucket).map_or(0, |(_, n)| *n);
        let more = |&(b, n): &(u16, u64)| Some((b, n.saturating_sub(was(b)))).filter(|(_, n)| *n > 0);
        Self { buckets: self.buckets.iter().filter_map(more).collect() }
    }

    /// These and those of another one.
    #[must_use]
    pub fn with(&self, other: &Self) -> Self {
        let mut counts = [0u64; BUCKETS];
        for (b, n) in self.buckets.iter().chain(&other.buckets) {
            let sum = &mut counts[usize::from(*b)];
            *sum = sum.saturating_add(*n);
        }
        Self::new(&counts)
    }

    /// Nanoseconds that a part `q` of all did not take longer than (the end of a bucket: at most an eighth too much);
    /// `None` where there are none.
    pub fn quantile(&self, q: f64) -> Option<u64> {
        let rank = ((self.count() as f64 * q).ceil() as u64).max(1);
        let mut below = 0;
        let of_rank = self.buckets.iter().find(|(_, n)| {
            below = u64::saturating_add(below, *n);
            below >= rank
        });
        of_rank.map(|(b, _)| lower(usize::from(*b) + 1))
    }

    /// Nanoseconds of all together, as far as buckets tell.
    pub fn about_sum(&self) -> u64 {
        let middle = |b: u16| u64::midpoint(lower(usize::from(b)), lower(usize::from(b) + 1));
        self.buckets.iter().fold(0, |sum, (b, n)| sum.saturating_add(middle(*b).saturating_mul(*n)))
    }

    /// How many took no longer than so many nanoseconds, where that is the end of a bucket; else those of whole buckets.
    pub fn up_to(&self, nanos: u64) -> u64 {
        let whole = self.buckets.iter().filter(|(b, _)| lower(usize::from(*b) + 1) <= nanos);
        whole.fold(0, |sum, (_, n)| sum.saturating_add(*n))
    }
}

#[cfg(test)]
mod tests {
    use super::super::histogram::{Histogram, bucket};
    use super::*;

    fn latency(times: impl IntoIterator<Item = u64>) -> Latency {
        let h = Histogram::default();
        times.into_iter().for_each(|n| h.record(n));
        let mut counts = [0; BUCKETS];
        h.add_to(&mut counts);
        Latency::new(&counts)
    }

    #[test]
    fn quantiles_are_an_eighth_too_much_at_most() {
        let l = latency((1..=10_000).map(|n| n * 1000));
        for (q, exact) in [(0.5, 5_000_000), (0.9, 9_000_000), (0.99, 9_900_000), (0.999, 9_990_000), (1.0, 10_000_000)]
        {
            let got = l.quantile(q).unwrap();
            assert!((exact..=exact + exact / 8 + 128).contains(&got), "{q}: {got}");
        }
        assert_eq!(Latency::default().quantile(0.5), None);
        assert_eq!(latency([3]).quantile(0.0), Some(128));
    }

    #[test]
    fn two_samples_tell_what_came_between() {
        let before = latency([500, 70_000]);
        let now = latency([500, 70_000, 70_001, 2_000_000]);
        let between = now.since(&before);
        assert_eq!((between.count(), between.up_to(1 << 17)), (2, 1));
        assert_eq!(now.up_to(lower(bucket(70_000) + 1)), 3);
        assert_eq!(before.since(&now), Latency::default());
        assert_eq!(before.with(&between), now);
    }

    #[test]
    fn buckets_that_there_are_not_are_skipped() {
        let all = format!("[[3, {max}], [239, {max}], [240, 1], [65535, 7]]", max = u64::MAX);
        let l: Latency = serde_json::from_str(&all).unwrap();
        assert_eq!(l.buckets, [(3, u64::MAX), (239, u64::MAX)]);
        assert_eq!((l.count(), l.quantile(1.0), l.up_to(u64::MAX)), (u64::MAX, Some(512), u64::MAX));
        assert_eq!(l.about_sum(), u64::MAX);
    }

    #[test]
    fn what_is_not_known_is_skipped_and_what_misses_is_nothing() {
        let s: Sample = serde_json::from_str(r#"{"layout": 1, "new": [1], "cache": {"budget": 7}}"#).unwrap();
        assert_eq!((s.layout, s.cache.budget, s.cache.dirty, s.operations.len()), (1, 7, 0, 0));
        let all = Sample { operations: vec![Operation { latency: latency([9, 1 << 40]), ..Default::default() }], ..s };
        assert_eq!(serde_json::from_str::<Sample>(&serde_json::to_string(&all).unwrap()).unwrap(), all);
    }
}
