//! `braidfs tenant`: directory trees of a mounted volume with a domain and limits of their own.

use crate::cmd::device;
use crate::cmd::limits::{self, open, say_json};
use crate::cmd::mount_options::MountSpec;
use crate::failure::{Failure, Outcome};
use crate::{mountinfo, text};
use braidfs::{
    DeviceSet, JournalMode, MemoryBudget, Rate, RateUse, SoftLimit, TENANT_SERVING_MIN, TenantBudget, Timestamp,
};
use braidfs_fuse::control::{self, TenantChange, TenantInfo, TenantMount};
use rustix::io::Errno;
use serde::Serialize;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Give a directory tree of a mounted volume a domain and limits of its own
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Exit codes: 0 done, 1 it failed, or wrong usage, 4 (of set --devices) some of it stays on other devices, or moves later.\n\n\
    Examples:\n  braidfs tenant create --space 20G /mnt/web      a new directory, of at most 20 GiB\n  \
    braidfs tenant set --space 30G /mnt web         more, while it is in use\n  \
    braidfs tenant set --space none /mnt web        as much as the volume has\n  \
    braidfs tenant set --inodes 100000 /mnt web     files, directories, links, and its own directory\n  \
    braidfs tenant set --soft-space 15G --grace 3d /mnt web   more than 15 GiB for three days only\n  \
    braidfs tenant set --write-bps 100M/200M /mnt web         100 MiB/s, 200 MiB at once\n  \
    braidfs tenant set --read-iops 500 --write-iops none /mnt web\n  \
    braidfs tenant set --memory-min 64M --memory-max 256M /mnt web   of the server's cache\n  \
    braidfs tenant create --journal scratch /mnt/tmp          no journal: empty after a crash\n  \
    braidfs tenant set --journal data /mnt web                no file is overwritten in place\n  \
    braidfs tenant set --serving-time 50%/200% /mnt web       half a processor, 2 s of one at once\n  \
    braidfs tenant set --devices 0,2 /mnt web       its data moves there; --devices all: anywhere\n  \
    braidfs tenant mount /mnt web /srv/web          by itself, see below; umount ends that\n  \
    braidfs tenant list /mnt\n  \
    braidfs tenant remove /mnt web                  an ordinary directory, with all that is in it\n\n\
    What is made below the directory of a tenant lies in a domain of its own: a journal, an allocator and transactions that \
    no other tenant shares. What is moved there from elsewhere counts where it lies. `df` in the directory shows the \
    tenant's numbers, as `df -i` does, and ENOSPC comes at its limits. Root may change tenants, and who mounted the volume.\n\n\
    --devices has numbers as `braidfs info` shows them, or paths. What lies elsewhere moves: the command waits for that and \
    shows how far it is; killed, and after the next mount, the server goes on by itself. What cannot move stays: the journal, \
    and block groups in which a file has its inode number.\n\n\
    A tenant that is mounted by itself has a connection to the server, and a part of the kernel's page cache, of its own.\n\n\
    Rates count what the device is asked; what memory serves is free. A tenant that wants more waits, and nobody else does. \
    With RATE/BURST so much may come at once after a pause. A soft limit may be exceeded for its grace; then it is a hard \
    one until less is in use."
)]
pub struct Args {
    #[command(subcommand)]
    call: Call,
}

#[derive(Debug, clap::Subcommand)]
enum Call {
    /// Make a directory, the root of a tenant
    Create {
        /// Its name [default: that of the directory]
        #[arg(long)]
        name: Option<String>,
        /// Most that it may use: 64M, 10G, or none
        #[arg(long, value_parser = parse, value_name = "SIZE", default_value = "none")]
        space: Limit,
        /// Most inodes that it may have, its directory among them: 1000, or none
        #[arg(long, value_parser = parse_number, value_name = "N", default_value = "none")]
        inodes: Limit,
        #[command(flatten)]
        more: More,
        /// The result as JSON
        #[arg(long)]
        json: bool,
        /// The directory; it must not be there yet
        directory: PathBuf,
    },
    /// Change limits of a tenant, while it is in use
    #[command(group = clap::ArgGroup::new("limits")
        .args(["space", "inodes", "soft_space", "grace", "read_bps", "write_bps", "read_iops", "write_iops", "memory_min", "memory_max", "serving_time", "devices", "journal"])
        .required(true)
        .multiple(true))]
    Set {
        /// Most that it may use: 64M, 10G, or none
        #[arg(long, value_parser = parse, value_name = "SIZE")]
        space: Option<Limit>,
        /// Most inodes that it may have, its directory among them: 1000, or none
        #[arg(long, value_parser = parse_number, value_name = "N")]
        inodes: Option<Limit>,
        #[command(flatten)]
        more: More,
        /// The result as JSON
        #[arg(long)]
        json: bool,
        /// The mount point, or any directory of the volume
        mountpoint: PathBuf,
        /// Name of the tenant
        name: String,
    },
    /// Show a tenant
    Show {
        /// Print it as JSON
        #[arg(long)]
        json: bool,
        /// The mount point, or any directory of the volume
        mountpoint: PathBuf,
        /// Name of the tenant
        name: String,
    },
    /// List all tenants
    List {
        /// Print them as JSON
        #[arg(long)]
        json: bool,
        /// The mount point, or any directory of the volume
        mountpoint: PathBuf,
    },
    /// Mount a tenant by itself: a connection of its own to the server, with its own part of the kernel's cache
    Mount {
        /// ro, nosuid, nodev, noexec, separated by commas; else it is as the volume is mounted
        #[arg(short, long, value_name = "OPTIONS")]
        options: Vec<String>,
        /// The mount point of the volume, or any directory of it
        mountpoint: PathBuf,
        /// The tenant
        name: String,
        /// Where to [default: its own directory]
        directory: Option<PathBuf>,
    },
    /// Make the root of a tenant an ordinary directory, with all that is in it
    Remove {
        /// What it was, as JSON
        #[arg(long)]
        json: bool,
        /// The mount point, or any directory of the volume
        mountpoint: PathBuf,
        /// Name of the tenant
        name: String,
    },
}

/// Limits that both take.
#[derive(Debug, clap::Args)]
struct More {
    /// More than this it may use for a while only: 64M, 10G, or none
    #[arg(long, value_parser = parse, value_name = "SIZE")]
    soft_space: Option<Limit>,
    /// For how long: 30s, 12h, 7d [default: as before, at first 7d]
    #[arg(long, value_parser = parse_time, value_name = "TIME")]
    grace: Option<Duration>,
    /// Most bytes a second that it may read, and how many at once after a pause: 100M, 100M/200M, or none
    #[arg(long, value_parser = parse_bps, value_name = "RATE[/BURST]")]
    read_bps: Option<RateLimit>,
    /// Most bytes a second that it may write
    #[arg(long, value_parser = parse_bps, value_name = "RATE[/BURST]")]
    write_bps: Option<RateLimit>,
    /// Most requests a second that it may read by: 500, 500/1000, or none
    #[arg(long, value_parser = parse_iops, value_name = "RATE[/BURST]")]
    read_iops: Option<RateLimit>,
    /// Most requests a second that it may write by
    #[arg(long, value_parser = parse_iops, value_name = "RATE[/BURST]")]
    write_iops: Option<RateLimit>,
    /// What others leave it of the server's cache: 64M, or none
    #[arg(long, value_parser = parse, value_name = "SIZE")]
    memory_min: Option<Limit>,
    /// Most that it may hold of the server's cache: 256M, or none
    #[arg(long, value_parser = parse, value_name = "SIZE")]
    memory_max: Option<Limit>,
    /// How its journal is used: ordered, data (no file is overwritten in place), mount (as the mount says), or scratch: there
    /// is none, nothing is promised, and a crash leaves it empty. Into scratch only when it is made, or while nothing is in it
    #[arg(long, value_parser = parse_journal, value_name = "MODE")]
    journal: Option<Journal>,
    /// Most processor time that the server may spend on it, of one processor, and how much at once after a pause: 50%, 150%/300%, or none
    #[arg(long, value_parser = parse_serving, value_name = "PERCENT[/BURST]")]
    serving_time: Option<RateLimit>,
    /// Devices that it may use, numbers or paths: 0,2, /dev/sdb, or all
    #[arg(long, value_name = "DEVICES")]
    devices: Option<String>,
}

impl More {
    fn memory(&self) -> [Option<Option<u64>>; 2] {
        [self.memory_min, self.memory_max].map(|l| l.map(|l| l.0))
    }

    fn serving(&self) -> Option<Option<Rate>> {
        self.serving_time.map(|r| r.0)
    }

    /// The devices, of the volume that `place` lies in.
    fn devices(&self, place: &Path) -> Result<Option<DeviceSet>, Failure> {
        let Some(text) = &self.devices else { return Ok(None) };
        if text == "all" {
            return Ok(Some(DeviceSet::ALL));
        }
        let mut numbers = Vec::new();
        for one in text.split(',').filter(|one| !one.is_empty()) {
            match one.parse::<usize>() {
                Ok(n) => numbers.push(n),
                Err(_) => numbers.push(device::number_of(&root_of(place), Path::new(one))?),
            }
        }
        let none =
            || Failure::at("tenant: no devices", text, "a volume has the numbers 0 to 15, or paths of its devices");
        DeviceSet::of(numbers).map(Some).ok_or_else(none)
    }

    /// The soft limit of a tenant that has this one `now`, if it changes: what is not named of it stays.
    fn soft(
        &self,
        now: impl FnOnce() -> Result<Option<SoftLimit>, Failure>,
    ) -> Result<Option<Option<SoftLimit>>, Failure> {
        let space = self.soft_space.map(|l| l.0);
        if self.grace.is_none() && space.is_none_or(|space| space.is_none()) {
            return Ok(space.map(|_| None));
        }
        let now = if space.is_none() || self.grace.is_none() { now()? } else { None };
        let Some(space) = space.unwrap_or(now.map(|s| s.space)) else {
            return Err(Failure::new("tenant: --grace is that of a soft limit: name --soft-space, too"));
        };
        let grace = self.grace.or(now.map(|s| s.grace)).unwrap_or(GRACE);
        Ok(Some(Some(SoftLimit { space, grace })))
    }

    fn rates(&self) -> [Option<Option<Rate>>; 4] {
        [self.read_bps, self.write_bps, self.read_iops, self.write_iops].map(|r| r.map(|r| r.0))
    }
}

/// For how long a soft limit may be exceeded where nobody says it.
const GRACE: Duration = Duration::from_secs(7 * 86400);

/// A rate, if there is a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RateLimit(Option<Rate>);

/// How a journal is used; `None`: as the mount says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Journal(Option<JournalMode>);

fn parse_journal(text: &str) -> Result<Journal, String> {
    match text {
        "mount" => return Ok(Journal(None)),
        "ordered" => Some(JournalMode::Ordered),
        "data" => Some(JournalMode::Data),
        "scratch" => Some(JournalMode::Scratch),
        _ => None,
    }
    .map(|mode| Journal(Some(mode)))
    .ok_or_else(|| "a mode of the journal is ordered, data, scratch or mount".into())
}

fn parse_bps(text: &str) -> Result<RateLimit, String> {
    parse_rate(text, text::parse_size)
}

fn parse_iops(text: &str) -> Result<RateLimit, String> {
    parse_rate(text, |n| n.parse().map_err(|_| "a number of requests, or none".into()))
}

/// In nanoseconds a second.
fn parse_serving(text: &str) -> Result<RateLimit, String> {
    let limit = parse_rate(text, |n| {
        let percent = || n.strip_suffix('%')?.parse::<f64>().ok().filter(|p| p.is_finite() && *p >= 0.0 && *p <= 1e7);
        let ns = percent().map(|p| (p * 1e7).round() as u64);
        ns.ok_or_else(|| "a percentage of one processor, 50% or 150%, or none".to_owned())
    })?;
    match limit.0 {
        Some(r) if r.per_second < TENANT_SERVING_MIN => Err("the least is 1%".into()),
        _ => Ok(limit),
    }
}

fn parse_rate(text: &str, number: impl Fn(&str) -> Result<u64, String>) -> Result<RateLimit, String> {
    if text == "none" {
        return Ok(RateLimit(None));
    }
    let (rate, burst) = text.split_once('/').map_or((text, None), |(rate, burst)| (rate, Some(burst)));
    let positive = |text| match number(text)? {
        0 => Err("0 is no limit: write none, or what may be had in a second".to_owned()),
        n => Ok(n),
    };
    Ok(RateLimit(Some(Rate { per_second: positive(rate)?, burst: burst.map(positive).transpose()? })))
}

pub(super) fn parse_time(text: &str) -> Result<Duration, String> {
    let why = || "a time is a number and s, m, h or d: 30s, 12h, 7d".to_owned();
    let (number, unit) = text.split_at_checked(text.len().saturating_sub(1)).ok_or_else(why)?;
    let seconds = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 86400,
        _ => return Err(why()),
    };
    number.parse::<u64>().ok().and_then(|n| n.checked_mul(seconds)).map(Duration::from_secs).ok_or_else(why)
}

/// Bytes or inodes, if there is a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Limit(pub(super) Option<u64>);

pub(super) fn parse(size: &str) -> Result<Limit, String> {
    match size {
        "none" => Ok(Limit(None)),
        size => match text::parse_size(size)? {
            0 => Err("0 is no limit: write none, or at least 1M".into()),
            n => Ok(Limit(Some(n))),
        },
    }
}

pub(super) fn parse_number(number: &str) -> Result<Limit, String> {
    match number {
        "none" => Ok(Limit(None)),
        number => match number.parse() {
            Ok(0) => Err("0 is no limit: write none, or at least 1".into()),
            Ok(n) => Ok(Limit(Some(n))),
            Err(_) => Err("a number of inodes, or none".into()),
        },
    }
}

#[derive(Serialize)]
struct Report {
    name: String,
    domain: u32,
    /// Number of the NUMA node that this is placed on; none: there is one.
    numa_node: Option<u32>,
    /// Number of the root directory.
    root: u64,
    /// Most bytes that it may use, if there is a limit.
    space: Option<u64>,
    used: u64,
    inodes: u64,
    /// Most inodes that it may have, if there is a limit.
    inodes_max: Option<u64>,
    /// A limit that may be exceeded for a while, bytes.
    soft_space: Option<u64>,
    /// For how long.
    grace_seconds: Option<u64>,
    /// Since when it is, seconds since 1970.
    soft_exceeded_since: Option<u64>,
    /// For longer than that: it is a hard limit now.
    grace_is_over: bool,
    /// Bytes of the server's cache: kept for it, at most, and held now.
    memory_min: u64,
    memory_max: Option<u64>,
    cached: u64,
    /// ordered, data or scratch; none: as the mount says.
    journal: Option<&'static str>,
    rates: Rates,
    /// Processor time of the server.
    serving: Serving,
    /// Numbers of the devices that it may use; none: all.
    devices: Option<Vec<usize>>,
    /// What it has on others.
    elsewhere: Elsewhere,
    /// Its domain is read-only.
    failed: bool,
}

/// 1.0 is one processor.
#[derive(Serialize)]
struct Serving {
    processors: Option<f64>,
    /// Seconds of one at once after a pause.
    burst_seconds: Option<f64>,
    /// Since the mount, while there was a limit.
    used_seconds: f64,
    /// Requests that waited, and how long all of them did.
    waits: u32,
    waited_seconds: f64,
}

#[derive(Serialize)]
struct Elsewhere {
    groups: u32,
    bytes: u64,
    /// One of the groups has the journal: it stays.
    journal: bool,
    /// There is no room for it where the tenant may be.
    crowded: bool,
}

/// In the order of the options.
#[derive(Serialize)]
struct Rates {
    read_bps: Option<Limited>,
    write_bps: Option<Limited>,
    read_iops: Option<Limited>,
    write_iops: Option<Limited>,
    read: Used,
    written: Used,
}

#[derive(Serialize)]
struct Limited {
    per_second: u64,
    /// At once after a pause.
    burst: u64,
}

/// Since the mount, while there was a rate.
#[derive(Serialize)]
struct Used {
    bytes: u64,
    requests: u64,
    /// Asked of the device in the background; the next ones wait for that.
    debt_bytes: u64,
    debt_requests: u64,
    /// Calls that waited, and how long all of them did.
    waits: u64,
    waited_seconds: f64,
}

impl From<RateUse> for Used {
    fn from(u: RateUse) -> Self {
        let RateUse { bytes, requests, debt: [debt_bytes, debt_requests], waits, waited } = u;
        Self { bytes, requests, debt_bytes, debt_requests, waits, waited_seconds: waited.as_secs_f64() }
    }
}

impl From<TenantInfo> for Report {
    fn from(t: TenantInfo) -> Self {
        let limited = |r: Option<Rate>| r.map(|r| Limited { per_second: r.per_second, burst: r.burst() });
        let r = t.rates;
        Self {
            name: t.name,
            domain: t.domain,
            numa_node: t.numa_node,
            root: t.root,
            space: t.space,
            used: t.used,
            inodes: t.inodes,
            inodes_max: t.inodes_max,
            soft_space: t.soft_space.map(|s| s.space),
            grace_seconds: t.soft_space.map(|s| s.grace.as_secs()),
            soft_exceeded_since: t.soft_exceeded_since,
            grace_is_over: t.grace_is_over,
            memory_min: t.memory.least,
            memory_max: t.memory.most,
            cached: t.cached,
            journal: t.journal.map(JournalMode::name),
            rates: Rates {
                read_bps: limited(r.read_bps),
                write_bps: limited(r.write_bps),
                read_iops: limited(r.read_iops),
                write_iops: limited(r.write_iops),
                read: t.read.into(),
                written: t.written.into(),
            },
            serving: Serving {
                processors: t.serving.map(|r| r.per_second as f64 / 1e9),
                burst_seconds: t.serving.map(|r| r.burst() as f64 / 1e9),
                used_seconds: t.served.as_secs_f64(),
                waits: t.served_waits,
                waited_seconds: t.served_waited.as_secs_f64(),
            },
            devices: (!t.devices.is_all()).then(|| t.devices.numbers().collect()),
            elsewhere: Elsewhere {
                groups: t.elsewhere.groups,
                bytes: t.elsewhere.bytes,
                journal: t.elsewhere.journal,
                crowded: t.elsewhere.crowded,
            },
            failed: t.failed,
        }
    }
}

pub fn run(args: &Args) -> Outcome {
    match &args.call {
        Call::Create { name, space, inodes, more, json, directory } => {
            let [read_bps, write_bps, read_iops, write_iops] = more.rates().map(Option::flatten);
            let rates = braidfs::Rates { read_bps, write_bps, read_iops, write_iops };
            let [least, most] = more.memory().map(Option::flatten);
            let memory = MemoryBudget { least: least.unwrap_or(0), most };
            let place = mountinfo::absolute(directory);
            let budget = TenantBudget {
                space: space.0,
                inodes: inodes.0,
                soft_space: more.soft(|| Ok(None))?.flatten(),
                rates,
                memory,
                journal: more.journal.and_then(|j| j.0),
                serving: more.serving().flatten(),
                devices: more.devices(place.parent().unwrap_or(&place))?.unwrap_or_default(),
            };
            create(directory, name.as_deref(), &budget, *json)
        }
        Call::Set { space, inodes, more, json, mountpoint, name } => {
            let (space, inodes) = (space.map(|l| l.0), inodes.map(|l| l.0));
            let now = || control::tenant_show(&open(mountpoint)?, name).map_err(|e| refused(mountpoint, name, &e));
            let soft_space = more.soft(|| Ok(now()?.soft_space))?;
            let (rates, memory) = (more.rates(), more.memory());
            let (serving, devices) = (more.serving(), more.devices(mountpoint)?);
            let journal = more.journal.map(|j| j.0);
            let change = TenantChange { space, inodes, soft_space, rates, memory, journal, serving, devices };
            let set = control::tenant_set(&open(mountpoint)?, name, &change);
            let set = set.map_err(|e| refused(mountpoint, name, &e))?;
            if devices.is_none() || set.elsewhere.groups == 0 {
                return tell(&set.into(), *json);
            }
            let waited = device::move_tenant(&root_of(mountpoint), name, *json)?;
            let now: Report = now()?.into();
            let code = tell(&now, *json)?;
            let Some(left) = stays(&now.elsewhere, waited) else { return Ok(code) };
            eprintln!("braidfs: tenant {}: {left}", text::name(name.as_bytes()));
            Ok(device::KEPT)
        }
        Call::Show { json, mountpoint, name } => {
            let shown = control::tenant_show(&open(mountpoint)?, name);
            tell(&shown.map_err(|e| refused(mountpoint, name, &e))?.into(), *json)
        }
        Call::List { json, mountpoint } => {
            let all = control::tenants(&open(mountpoint)?).map_err(|e| refused(mountpoint, "", &e))?;
            let all: Vec<Report> = all.into_iter().map(Report::from).collect();
            if *json {
                return say_json("tenant", &all);
            }
            all.iter().try_for_each(|t| tell(t, false).map(drop))?;
            Ok(0)
        }
        Call::Mount { options, mountpoint, name, directory } => {
            let options = MountSpec::parse(options.iter().map(String::as_str), false).map_err(Failure::new)?;
            mount(mountpoint, name, directory.as_deref(), options.of_tenant())
        }
        Call::Remove { json, mountpoint, name } => {
            let dir = open(mountpoint)?;
            let was = if *json { control::tenant_show(&dir, name).ok() } else { None };
            control::tenant_remove(&dir, name).map_err(|e| refused(mountpoint, name, &e))?;
            was.map_or(Ok(0), |was| tell(&was.into(), true))
        }
    }
}

fn create(directory: &Path, name: Option<&str>, budget: &TenantBudget, json: bool) -> Outcome {
    let path = mountinfo::absolute(directory);
    let (Some(parent), Some(entry)) = (path.parent(), path.file_name()) else {
        return Err(Failure::at("cannot make a tenant of", directory.display(), "it has no name"));
    };
    let name = match name.or_else(|| entry.to_str()) {
        Some(name) => name,
        None => {
            return Err(Failure::at(
                "cannot make a tenant of",
                directory.display(),
                "its name is not UTF-8: use --name",
            ));
        }
    };
    let made = control::tenant_create(&open(parent)?, OsStr::as_bytes(entry), name, budget);
    let made = made.map_err(|e| match Errno::from_io_error(&e) {
        Some(Errno::EXIST) => {
            let why =
                "it is there already: what lies in a directory stays in its domain, so a tenant begins with a new one";
            Failure::at("cannot make a tenant of", directory.display(), why)
        }
        _ => refused(directory, name, &e),
    })?;
    tell(&made.into(), json)
}

/// Has the server of the volume that `place` lies in mount a tenant by itself, on its own directory unless another one is
/// given.
///
/// # Errors
/// What the server says.
pub fn mount(place: &Path, name: &str, directory: Option<&Path>, how: TenantMount) -> Outcome {
    let point = directory.map(mountinfo::absolute).unwrap_or_default();
    control::tenant_mount(&open(place)?, name, &point, how).map_err(|e| match Errno::from_io_error(&e) {
        Some(Errno::INVAL) => {
            Failure::at("cannot mount tenant", name, "the server is of an older version, or the path is too long")
        }
        _ => refused(place, name, &e),
    })?;
    Ok(0)
}

fn refused(place: &Path, name: &str, e: &std::io::Error) -> Failure {
    limits::refused("tenant", place, &format!("there is no tenant {name}"), e)
}

fn tell(t: &Report, json: bool) -> Outcome {
    if json {
        return say_json("tenant", t);
    }
    let most = t.space.map_or_else(|| "no limit".into(), |n| format!("{} at most", text::size(n)));
    let inodes = match t.inodes_max {
        None => text::count(t.inodes, "inode", "inodes"),
        Some(most) => format!("{} of {}", t.inodes, text::count(most, "inode", "inodes")),
    };
    let failed = if t.failed { ", read-only after an error" } else { "" };
    let node = t.numa_node.map_or_else(String::new, |n| format!(" at NUMA node {n}"));
    crate::say(format_args!(
        "{}: domain {}{node}, {} used, {most}, {inodes}{failed}",
        text::name(t.name.as_bytes()),
        t.domain,
        text::size(t.used)
    ))?;
    tell_soft(t)?;
    match t.journal {
        Some("scratch") => crate::say(format_args!("  no journal: what is in it is gone after a crash"))?,
        Some(mode) => crate::say(format_args!("  journal mode {mode}"))?,
        None => crate::say(format_args!("  journal mode as the mount says"))?,
    }
    tell_memory(t)?;
    tell_serving(t)?;
    tell_devices(t)?;
    tell_rates("read", (&t.rates.read_bps, &t.rates.read_iops), &t.rates.read)?;
    tell_rates("written", (&t.rates.write_bps, &t.rates.write_iops), &t.rates.written)?;
    Ok(0)
}

fn tell_serving(t: &Report) -> Result<(), Failure> {
    let s = &t.serving;
    let (Some(processors), Some(burst)) = (s.processors, s.burst_seconds) else { return Ok(()) };
    crate::say(format_args!(
        "  serving time {:.0} % of a processor, {burst:.3} s at once; so far {:.1} s, {} waited, together {:.1} s",
        processors * 100.0,
        s.used_seconds,
        text::count(s.waits.into(), "request", "requests"),
        s.waited_seconds
    ))
}

/// What a tenant has yet on devices that it may not use, and why; `waited`: all has moved that could.
fn stays(e: &Elsewhere, waited: bool) -> Option<String> {
    if e.groups == 0 {
        return None;
    }
    let groups = text::count(e.groups.into(), "block group", "block groups");
    let journal = if e.journal { ", one of them with its journal" } else { "" };
    let why = match (waited, e.crowded) {
        (false, _) => "another change of devices is running, so it moves in the background: look with `tenant show`",
        (true, true) => "these devices have no room for it: it gets nothing more until there is some",
        (true, false) => {
            "it stays there: the journal, block groups with numbers of inodes, what has a fixed place (tenants.md)"
        }
    };
    Some(format!("{groups} with {}{journal} elsewhere: {why}", text::size(e.bytes)))
}

fn tell_devices(t: &Report) -> Result<(), Failure> {
    let Some(devices) = &t.devices else { return Ok(()) };
    let numbers: Vec<String> = devices.iter().map(ToString::to_string).collect();
    let e = &t.elsewhere;
    let mut line = format!("  devices {}", numbers.join(", "));
    if e.groups > 0 {
        let groups = text::count(e.groups.into(), "block group", "block groups");
        line += &format!("; {groups} elsewhere, with {}", text::size(e.bytes));
    }
    if e.journal {
        line += ", one of them with its journal";
    }
    if e.crowded {
        line += "; these devices have no room for that: it gets nothing more";
    }
    crate::say(format_args!("{line}"))
}

/// The root of the mount that a directory lies in.
fn root_of(place: &Path) -> PathBuf {
    let device = |p: &Path| std::fs::metadata(p).ok().map(|m| m.dev());
    let path = std::fs::canonicalize(place).unwrap_or_else(|_| mountinfo::absolute(place));
    let (own, mut root) = (device(&path), path.as_path());
    while let Some(above) = root.parent().filter(|p| own.is_some() && device(p) == own) {
        root = above;
    }
    root.to_path_buf()
}

fn tell_memory(t: &Report) -> Result<(), Failure> {
    if t.memory_min == 0 && t.memory_max.is_none() {
        return Ok(());
    }
    let most = t.memory_max.map_or_else(|| "no limit".into(), |n| format!("{} at most", text::size(n)));
    let (held, kept) = (text::size(t.cached), text::size(t.memory_min));
    crate::say(format_args!("  memory {held} in use, {kept} kept for it, {most}"))
}

fn tell_soft(t: &Report) -> Result<(), Failure> {
    let (Some(soft), Some(grace)) = (t.soft_space, t.grace_seconds) else { return Ok(()) };
    let since = |since: u64| text::time(Timestamp { sec: i64::try_from(since).unwrap_or(0), nsec: 0 });
    let state = match (t.soft_exceeded_since, t.grace_is_over) {
        (None, _) => format!("for {}", text::span(grace)),
        (Some(at), false) => {
            format!("exceeded since {}, a hard limit from {} on (UTC)", since(at), since(at.saturating_add(grace)))
        }
        (Some(at), true) => format!("exceeded since {} (UTC): held to it until less is in use", since(at)),
    };
    crate::say(format_args!("  soft limit {}, {state}", text::size(soft)))
}

fn tell_rates(what: &str, (bps, iops): (&Option<Limited>, &Option<Limited>), used: &Used) -> Result<(), Failure> {
    if bps.is_none() && iops.is_none() {
        return Ok(());
    }
    let bytes = bps.as_ref().map(|l| format!("{} a second, {} at once", text::size(l.per_second), text::size(l.burst)));
    let requests = iops.as_ref().map(|l| format!("{} requests a second, {} at once", l.per_second, l.burst));
    let limits: Vec<String> = bytes.into_iter().chain(requests).collect();
    crate::say(format_args!(
        "  {what}: at most {}; so far {} in {}, {} waited, together {:.1} s",
        limits.join(", "),
        text::size(used.bytes),
        text::count(used.requests, "request", "requests"),
        text::count(used.waits, "call", "calls"),
        used.waited_seconds
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_of_inodes_is_a_number_or_none() {
        assert_eq!(parse_number("none"), Ok(Limit(None)));
        assert_eq!(parse_number("64"), Ok(Limit(Some(64))));
        assert!(parse_number("0").is_err() && parse_number("many").is_err() && parse_number("-1").is_err());
    }

    #[test]
    fn a_rate_has_a_burst_or_none() {
        let rate = |per_second, burst| Ok(RateLimit(Some(Rate { per_second, burst })));
        assert_eq!(parse_bps("none"), Ok(RateLimit(None)));
        assert_eq!(parse_bps("100M"), rate(100 << 20, None));
        assert_eq!(parse_bps("100M/1G"), rate(100 << 20, Some(1 << 30)));
        assert_eq!(parse_iops("500/7"), rate(500, Some(7)));
        for wrong in ["0", "/", "1M/", "1M/0", "1M/2M/3M", "much", "-1", ""] {
            assert!(parse_bps(wrong).is_err() && parse_iops(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn serving_time_is_a_percentage() {
        let rate = |per_second, burst| Ok(RateLimit(Some(Rate { per_second, burst })));
        assert_eq!(parse_serving("none"), Ok(RateLimit(None)));
        assert_eq!(parse_serving("50%"), rate(500_000_000, None));
        assert_eq!(parse_serving("1.5%/150%"), rate(15_000_000, Some(1_500_000_000)));
        for wrong in ["50", "%", "0%", "0.5%", "-1%", "NaN%", "1e300%", "50%/", "50%/0%", "50%/1%/1%", "much"] {
            assert!(parse_serving(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_is_not_named_of_a_soft_limit_stays() {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            more: More,
        }
        let soft = |space, days: u64| SoftLimit { space, grace: Duration::from_secs(days * 86400) };
        let (old, m) = (Some(soft(1 << 20, 3)), 1 << 20);
        for (words, now, wanted) in [
            (&[][..], old, Some(None)),
            (&["--soft-space", "2M"], old, Some(Some(Some(soft(2 * m, 3))))),
            (&["--soft-space", "2M"], None, Some(Some(Some(soft(2 * m, 7))))),
            (&["--soft-space", "2M", "--grace", "1d"], old, Some(Some(Some(soft(2 * m, 1))))),
            (&["--grace", "5d"], old, Some(Some(Some(soft(m, 5))))),
            (&["--grace", "5d"], None, None),
            (&["--soft-space", "none"], old, Some(Some(None))),
            (&["--soft-space", "none", "--grace", "5d"], old, None),
        ] {
            let line = <Line as clap::Parser>::try_parse_from([&["tenant"], words].concat()).unwrap();
            assert_eq!(line.more.soft(|| Ok(now)).ok(), wanted, "{words:?}");
        }
    }

    #[test]
    fn a_time_has_a_unit() {
        assert_eq!(["30s", "2m", "12h", "7d"].map(|t| parse_time(t).unwrap().as_secs()), [30, 120, 43_200, 604_800]);
        for wrong in ["", "7", "d", "-1d", "1.5h", "7w", "999999999999999999d", "7\u{e4}"] {
            assert!(parse_time(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_limit_is_a_size_or_none() {
        assert_eq!(parse("none"), Ok(Limit(None)));
        assert_eq!(parse("64M"), Ok(Limit(Some(64 << 20))));
        assert!(parse("0").is_err() && parse("much").is_err() && parse("-1").is_err());
    }
}
