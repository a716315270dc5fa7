//! `braidfs stats`: what the server of a mount was asked, by operation.

use crate::cmd::resize::mount_point;
use crate::failure::{Failure, Outcome, server_error};
use crate::{mounted, open, text};
use braidfs_fuse::control::{OpStats, SampleError, Stats, sample, stats};
use braidfs_fuse::watch::sample::{Cache, Device, Domain, Latency, Process, Quota, Sample, Tenant};
use serde::Serialize;
use std::collections::HashMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Show what a mounted volume was asked: requests by operation, and the time they took
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  braidfs stats /mnt                  since it was mounted\n  \
    braidfs stats --interval 5 /mnt     in the next 5 seconds\n  \
    braidfs stats --json /mnt           for programs: differences of two calls tell what came between\n\n\
    Operations are those of linux/fuse.h. Requests are counted one by one; of one in 16 the time in the handler is \
    taken, of which the mean is shown: without the way to the server and back, which often takes longer. `later` are \
    those that another thread answered, as fsync does when the disk has it. What the kernel answers from its cache \
    is not asked, and not counted. This command asks, too: OPENDIR, IOCTL and RELEASEDIR.")]
pub struct Args {
    /// Print it as JSON
    #[arg(long)]
    json: bool,
    /// What came in so many seconds from now on, instead of all since the mount
    #[arg(short, long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    interval: Option<u64>,
    /// The mount point of a mounted volume, or its devices, joined by commas
    #[arg(required = true, value_name = "MOUNTPOINT|DEVICE")]
    mountpoint: PathBuf,
}

#[derive(Debug, Serialize)]
struct Report {
    mountpoint: String,
    /// How long was counted; none: since the mount.
    seconds: Option<u64>,
    /// Threads that serve requests.
    threads: u32,
    /// One request of so many is timed.
    sampled: u32,
    /// Flags of INIT that the kernel agreed to, bits of `linux/fuse.h`.
    init_flags: u64,
    /// Mounted with `private`.
    private: bool,
    requests: u64,
    operations: Vec<Operation>,
    /// What an older server does not tell.
    #[serde(flatten)]
    more: Option<More>,
}

/// Numbers rise from the mount on, also where `seconds` says how long was counted; but for latencies.
#[derive(Debug, Serialize)]
struct More {
    layout: u32,
    version: String,
    uptime_ns: u64,
    uuid: String,
    label: String,
    domains: Vec<With<Domain>>,
    cache: Cache,
    /// Threads that asked while somebody watched: from when that began.
    processes: Vec<With<Process>>,
    /// In which they have these numbers.
    pid_namespace: u64,
    /// Who asks may not know of the processes of others, nor why a domain failed.
    restricted: bool,
    /// Requests that wait for their tenant's turn.
    parked: u64,
    tenants: Vec<With<Tenant>>,
    /// Users, groups and directories that have limits.
    quotas: Vec<Quota>,
    devices: Vec<Device>,
}

/// What a server tells of something, with the percentiles of its latency in the place of the buckets. Of `latency` only what
/// came in the interval counts, where there is one.
#[derive(Debug, Serialize)]
struct With<T> {
    #[serde(flatten)]
    of: T,
    latency: Option<Quantiles>,
}

#[derive(Debug, Serialize)]
struct Operation {
    name: String,
    opcode: u32,
    requests: u64,
    /// Those that another thread answered.
    deferred: u64,
    /// Those that were timed, and how long their handlers took together.
    timed: u64,
    timed_ns: u64,
    /// Those answered with an error, and bytes of data; of a server that tells them, as the latencies: until the answer,
    /// as the ends of buckets that are up to an eighth too long.
    errors: u64,
    bytes: u64,
    latency: Option<Quantiles>,
}

/// Latencies at some quantiles, in nanoseconds.
#[derive(Debug, Clone, Copy, Serialize)]
struct Quantiles {
    count: u64,
    p50_ns: u64,
    p90_ns: u64,
    p99_ns: u64,
    p999_ns: u64,
}

impl Quantiles {
    /// `None`: nothing was timed.
    fn of(times: &Latency) -> Option<Self> {
        let p50_ns = times.quantile(0.5)?;
        let at = |q| times.quantile(q).unwrap_or(p50_ns);
        Some(Self { count: times.count(), p50_ns, p90_ns: at(0.9), p99_ns: at(0.99), p999_ns: at(0.999) })
    }
}

impl Operation {
    /// Microseconds in the handler.
    fn mean(&self) -> Option<f64> {
        (self.timed > 0).then(|| self.timed_ns as f64 / self.timed as f64 / 1000.0)
    }
}

pub fn run(args: &Args) -> Outcome {
    let place = place("cannot show", &args.mountpoint)?;
    let (before, sample_before) = match args.interval {
        Some(seconds) => {
            // who asks meanwhile is told, too
            let sampled = ask_sample(&place, watch_seconds(seconds))?;
            let before = ask(&place)?;
            sleep_watching(seconds, Duration::from_secs, |left| ask_sample(&place, watch_seconds(left)).map(drop))?;
            (before.ops, sampled)
        }
        None => (Vec::new(), None),
    };
    let now = ask(&place)?;
    let sample_now = ask_sample(&place, 0)?;
    let (mut before, mut sample_before, mut seconds) = (before, sample_before.unwrap_or_default(), args.interval);
    if let Some(now) = sample_now.as_ref().filter(|now| now.uptime_ns < sample_before.uptime_ns) {
        // another one, which counts from 0
        seconds = Some(now.uptime_ns / 1_000_000_000);
        (before, sample_before) = (Vec::new(), Sample::default());
        eprintln!("braidfs: the server of {} was replaced meanwhile: what came since then is shown", place.display());
    }
    let mut report = report(place.display().to_string(), seconds, &before, &now);
    if let Some(now) = sample_now {
        report.add(sample_before, now);
    }
    if args.json {
        let json = serde_json::to_string_pretty(&report).map_err(|e| Failure::new(format!("stats: {e}")))?;
        crate::say(format_args!("{json}"))?;
    } else {
        crate::say(format_args!("{}", lines(&report).trim_end()))?;
    }
    Ok(0)
}

/// Where the volume is mounted that is meant; root may ask there, too, where the mount is a user's own.
///
/// # Errors
/// Nowhere, or it lets nobody in; `what` could not be done.
pub fn place(what: &str, named: &Path) -> Result<PathBuf, Failure> {
    let mount = mount_point(named).or_else(|| mounted::at(&open::expand(&[named.into()])).map(|m| m.target));
    let fail = |why: &str| Failure::at(what, named.display(), why);
    let point = mount.ok_or_else(|| fail("no braidfs is mounted there: give a mount point"))?;
    mounted::enter(&point).map_err(|e| fail(&mounted::server_error(&point, &e)))?;
    Ok(point)
}

/// A server that is asked to watch does so for an hour at most: it is asked again in time.
const RENEWED_AFTER: u64 = 1800;

/// For so many seconds that are left, until it is asked again.
fn watch_seconds(left: u64) -> u32 {
    // A look that comes late must not be taken for the end.
    left.min(RENEWED_AFTER) as u32 + 60.min(left as u32 + 5)
}

/// Sleeps, and has the server watch meanwhile. `seconds` makes the time for a sleep.
fn sleep_watching(
    mut left: u64,
    seconds: impl Fn(u64) -> Duration,
    mut renew: impl FnMut(u64) -> Result<(), Failure>,
) -> Result<(), Failure> {
    loop {
        let now = left.min(RENEWED_AFTER);
        std::thread::sleep(seconds(now));
        left -= now;
        if left == 0 {
            return Ok(());
        }
        renew(left)?;
    }
}

/// `None`: the server is too old to tell.
fn ask_sample(place: &Path, watch_seconds: u32) -> Result<Option<Sample>, Failure> {
    match sample(place, watch_seconds) {
        Ok(sample) => Ok(Some(sample)),
        Err(SampleError::OldServer) => Ok(None),
        Err(e) => Err(Failure::at("cannot show", place.display(), sample_error(&e))),
    }
}

/// Why a server did not tell what it does.
pub fn sample_error(e: &SampleError) -> String {
    match e {
        SampleError::Io(e) => server_error(e),
        e => e.to_string(),
    }
}

impl Report {
    fn add(&mut self, before: Sample, now: Sample) {
        let domains_before: HashMap<u16, _> = before.domains.into_iter().map(|d| (d.domain, d.latency)).collect();
        let processes_before: HashMap<u32, _> = before.processes.into_iter().map(|p| (p.thread, p.latency)).collect();
        let before: HashMap<u32, _> = before.operations.into_iter().map(|o| (o.opcode, o)).collect();
        let now_by_code: HashMap<u32, _> = now.operations.iter().map(|o| (o.opcode, o)).collect();
        for o in &mut self.operations {
            let Some(now) = now_by_code.get(&o.opcode) else { continue };
            let was = before.get(&o.opcode).cloned().unwrap_or_default();
            (o.errors, o.bytes) = (now.errors.saturating_sub(was.errors), now.bytes.saturating_sub(was.bytes));
            let times = now.latency.since(&was.latency);
            o.latency = Quantiles::of(&times);
        }
        let Sample {
            layout, version, uptime_ns, uuid, label, domains, cache, tenants, quotas, devices, parked, ..
        } = now;
        let Sample { processes, pid_namespace, restricted, .. } = now;
        let since = |now: &Latency, before: Option<&Latency>| {
            Quantiles::of(&before.map_or_else(|| now.clone(), |b| now.since(b)))
        };
        let domains: Vec<With<Domain>> = domains
            .into_iter()
            .map(|mut of| {
                let latency = since(&std::mem::take(&mut of.latency), domains_before.get(&of.domain));
                With { of, latency }
            })
            .collect();
        let latency_of = |d: u16| domains.iter().find(|with| with.of.domain == d)?.latency;
        let tenants = tenants.into_iter().map(|of| With { latency: latency_of(of.domain), of }).collect();
        let processes = processes.into_iter().map(|mut of| {
            let latency = since(&std::mem::take(&mut of.latency), processes_before.get(&of.thread));
            With { of, latency }
        });
        let processes = processes.collect();
        self.more = Some(More {
            layout,
            version,
            uptime_ns,
            uuid,
            label,
            domains,
            cache,
            processes,
            pid_namespace,
            restricted,
            parked,
            tenants,
            quotas,
            devices,
        });
    }
}

fn ask(place: &Path) -> Result<Stats, Failure> {
    stats(place).map_err(|e| Failure::at("cannot show", place.display(), server_error(&e)))
}

fn report(mountpoint: String, seconds: Option<u64>, before: &[OpStats], now: &Stats) -> Report {
    let before: HashMap<u32, &OpStats> = before.iter().map(|o| (o.opcode, o)).collect();
    let since = |now: &OpStats| {
        let then = before.get(&now.opcode);
        let less = |now: u64, then: Option<u64>| now.saturating_sub(then.unwrap_or(0));
        Operation {
            name: match (now.name, now.opcode) {
                ("", 0) => "other".into(),
                ("", code) => format!("#{code}"),
                (name, _) => name.into(),
            },
            opcode: now.opcode,
            requests: less(now.requests, then.map(|t| t.requests)),
            deferred: less(now.deferred, then.map(|t| t.deferred)),
            timed: less(now.timed, then.map(|t| t.timed)),
            timed_ns: less(now.nanos, then.map(|t| t.nanos)),
            errors: 0,
            bytes: 0,
            latency: None,
        }
    };
    let operations: Vec<Operation> = now.ops.iter().map(since).filter(|o| o.requests > 0).collect();
    Report {
        mountpoint,
        seconds,
        threads: now.threads,
        sampled: now.sampled,
        init_flags: now.init_flags,
        private: now.private,
        requests: operations.iter().map(|o| o.requests).sum(),
        operations,
        more: None,
    }
}

fn lines(report: &Report) -> String {
    let since = report
        .seconds
        .map_or_else(|| "since the mount".into(), |s| format!("in {}", text::count(s, "second", "seconds")));
    let all = text::count(report.requests, "request", "requests");
    let mut out = format!(
        "{all} {since}, {} threads\n\noperation        requests     later  µs in handler   part of time\n",
        report.threads
    );
    let time = |o: &Operation| o.mean().map_or(0.0, |mean| mean * o.requests as f64);
    let total: f64 = report.operations.iter().map(time).sum();
    let mut sorted: Vec<&Operation> = report.operations.iter().collect();
    sorted.sort_by_key(|o| std::cmp::Reverse(o.requests));
    for o in sorted {
        let mean = o.mean().map_or_else(|| "-".into(), |mean| format!("{mean:.1}"));
        let part = if total > 0.0 { format!("{:.0} %", 100.0 * time(o) / total) } else { "-".into() };
        // Writing to a String cannot fail.
        let _ = writeln!(out, "{:<15}{:>10}{:>10}{mean:>15}{part:>15}", o.name, o.requests, o.deferred);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn op(opcode: u32, name: &'static str, requests: u64, nanos: u64) -> OpStats {
        OpStats { opcode, name, requests, deferred: 0, timed: requests / 10, nanos }
    }

    fn stats_of(ops: Vec<OpStats>) -> Stats {
        Stats { threads: 2, sampled: 16, init_flags: 1 << 16, private: false, ops }
    }

    #[test]
    fn a_long_interval_is_watched_to_its_end() {
        let none = |_| Duration::ZERO;
        // second at which the server would cease, of when it is asked
        let (mut now, mut until) = (0, u64::from(watch_seconds(86_400)).min(3600));
        let renew = |left: u64| {
            now = 86_400 - left;
            assert!(now < until, "it ceased at {until}");
            assert!(watch_seconds(left) <= 3600);
            until = now + u64::from(watch_seconds(left));
            Ok(())
        };
        sleep_watching(86_400, none, renew).unwrap();
        assert!(until > 86_400);
        sleep_watching(5, none, |_| panic!("it was asked for long enough")).unwrap();
    }

    #[test]
    fn only_what_came_between_is_shown() {
        let before = [op(3, "GETATTR", 100, 50_000), op(16, "WRITE", 7, 9)];
        let now = stats_of(vec![op(3, "GETATTR", 300, 90_000), op(16, "WRITE", 7, 9), op(25, "", 1, 0)]);
        let report = report("/mnt".into(), Some(5), &before, &now);
        let shown: Vec<_> = report.operations.iter().map(|o| (o.name.as_str(), o.requests)).collect();
        assert_eq!((shown, report.requests), (vec![("GETATTR", 200), ("#25", 1)], 201));
        assert_eq!(report.operations[0].mean(), Some(2.0));
        let text = lines(&report);
        assert!(text.starts_with("201 requests in 5 seconds, 2 threads\n"), "{text}");
        assert!(text.contains("GETATTR               200         0            2.0          100 %\n"), "{text}");
        assert!(text.contains("#25                     1         0              -            0 %\n"), "{text}");
    }
}
