//! Tenants of a mounted volume: the ioctl, and the client.

use super::{ask, put};
use crate::tenant_mount::TenantMount;
use braidfs::{DeviceSet, Elsewhere, JournalMode, MemoryBudget, Rate, RateUse, Rates, SoftLimit, Tenant, TenantBudget};
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

/// `_IOWR(0xbf, 8, TenantArg)`: a tenant is made, changed, looked at or removed; on any directory, [`TenantCall::Create`] on the
/// one that the root is to lie in. EPERM but for root and the server's user. What the volume says to it stands in the answer.
pub(crate) const TENANT: u32 = 0xc400_bf08;

/// Bytes of a file name, or of the reason why not.
pub(crate) const TENANT_TEXT: usize = 632;

#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct TenantArg {
    /// Number of a [`TenantCall`].
    pub call: u32,
    /// Of the answer: 0, or why not.
    pub errno: u32,
    /// Of [`TenantCall::Next`]: how many there are before it. Of [`TenantCall::Set`]: [`LEAVE_SPACE`], [`SET_INODES`],
    /// [`SET_SOFT`], [`SET_RATES`].
    pub index: u32,
    pub domain: u32,
    /// Most bytes of space, 0: no limit.
    pub space: u64,
    pub used: u64,
    pub inodes: u64,
    pub root: u64,
    /// 1: its domain is read-only.
    pub failed: u32,
    /// Of the answer: [`KNOWS_INODES`], [`KNOWS_RATES`].
    pub mode: u32,
    /// Most inodes, 0: no limit.
    pub inodes_max: u64,
    /// UTF-8, zeros behind it.
    pub name: [u8; 64],
    // what follows was behind all names before there were limits of processor time: zeros of who does not know it
    /// Processor time, nanoseconds in a second, and its burst, as `rates`.
    pub serving: [u64; 2],
    /// Name of the directory; of the answer why not.
    pub text: [u8; TENANT_TEXT],
    // what follows was text before domains were placed: zeros of who does not know it
    /// Of the answer: number of the NUMA node that its domain is placed on, plus 1; 0: there is one.
    pub numa_node: u64,
    // what follows was text before there were rates: zeros of who does not know it
    /// In the order of [`braidfs::format::domain::TENANT_RATES`], each with its burst; 0: no limit, a tenth of a second's.
    pub rates: [[u64; 2]; 4],
    /// Bytes, 0: no limit.
    pub soft_space: u64,
    /// How long the soft limit may be exceeded, seconds.
    pub grace: u32,
    /// Of the answer, 1: it is over.
    pub grace_is_over: u32,
    /// Of the answer: since when the soft limit is exceeded, seconds since 1970, 0: it is not.
    pub soft_since: u64,
    /// Of the answer, of reads and of writes: bytes and requests, those of them that are not paid yet, calls that waited and
    /// for how many ns.
    pub used_of_rates: [[u64; 6]; 2],
    /// Bytes of the cache that are kept for it, and that it may hold at most, 0: no limit.
    pub memory: [u64; 2],
    /// Of the answer: bytes of the cache that it holds.
    pub cached: u64,
    /// As [`braidfs::DeviceSet`] has them; 0: all.
    pub devices: u16,
    /// Of the answer: [`ELSEWHERE_JOURNAL`], [`ELSEWHERE_CROWDED`].
    pub elsewhere_flags: u8,
    /// How its domain uses the journal, as a number ([`braidfs::JournalMode`]); 0: as the mount says.
    pub journal: u8,
    /// Of the answer: block groups on other devices, and bytes in them.
    pub elsewhere_groups: u32,
    pub elsewhere: u64,
    /// Of the answer: processor time that was spent on it, ns.
    pub served: u64,
    /// Of the answer: requests that waited for that, and how long, ms.
    pub served_waits: u32,
    pub served_waited: u32,
}
const _: () = assert!(size_of::<TenantArg>() == 1024);

/// [`TenantArg::index`] of a change: the limit of space stays.
pub(crate) const LEAVE_SPACE: u32 = 1;
/// [`TenantArg::index`] of a change: the limit of inodes is another one. (Programs of before there was one leave it.)
pub(crate) const SET_INODES: u32 = 2;
/// [`TenantArg::index`] of a change: the soft limit is another one.
pub(crate) const SET_SOFT: u32 = 4;
/// [`TenantArg::index`] of a change: this rate is another one.
pub(crate) const SET_RATES: [u32; 4] = [8, 16, 32, 64];
/// [`TenantArg::index`] of a change: this one of [`TenantArg::memory`] is another one.
pub(crate) const SET_MEMORY: [u32; 2] = [128, 256];
/// [`TenantArg::index`] of a change: the journal is used otherwise.
pub(crate) const SET_JOURNAL: u32 = 2048;
/// [`TenantArg::mode`] of the answer of a server that knows how journals are used.
pub(crate) const KNOWS_JOURNAL: u32 = 1 << 27;
/// [`TenantArg::index`] of a change: the limit of processor time is another one.
pub(crate) const SET_SERVING: u32 = 512;
/// [`TenantArg::index`] of a change: the devices are others.
pub(crate) const SET_DEVICES: u32 = 1024;
/// [`TenantArg::elsewhere_flags`].
const ELSEWHERE_JOURNAL: u8 = 1;
const ELSEWHERE_CROWDED: u8 = 2;
/// [`TenantArg::mode`] of the answer of a server that knows limits of processor time, and devices.
pub(crate) const KNOWS_SERVING: u32 = 1 << 28;
/// [`TenantArg::mode`] of the answer of a server that knows limits of memory.
pub(crate) const KNOWS_MEMORY: u32 = 1 << 29;
/// [`TenantArg::mode`] of the answer of a server that knows rates and soft limits.
pub(crate) const KNOWS_RATES: u32 = 1 << 30;
/// [`TenantArg::mode`] of the answer of a server that knows limits of inodes.
pub(crate) const KNOWS_INODES: u32 = 1 << 31;

/// What [`TenantArg::call`] asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum TenantCall {
    Create = 1,
    Set,
    Show,
    Next,
    Remove,
    /// On the directory [`TenantArg::text`], an absolute path where the server runs; [`TenantArg::index`]: [`MOUNT_FLAGS`].
    Mount,
}

/// [`TenantArg::index`] of [`TenantCall::Mount`], in the order of [`TenantMount`]'s fields.
pub(crate) const MOUNT_FLAGS: [u32; 4] = [1, 2, 4, 8];

/// A tenant of a mounted volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TenantInfo {
    /// Name of the tenant.
    pub name: String,
    /// Number of its root directory.
    pub root: u64,
    /// Number of its domain.
    pub domain: u32,
    /// Number of the NUMA node that this is placed on, where there are several.
    pub numa_node: Option<u32>,
    /// Most bytes that it may use, if there is a limit.
    pub space: Option<u64>,
    /// Bytes that it uses.
    pub used: u64,
    /// Inodes that it has, its root directory among them.
    pub inodes: u64,
    /// Most inodes that it may have, if there is a limit.
    pub inodes_max: Option<u64>,
    /// Its soft limit.
    pub soft_space: Option<SoftLimit>,
    /// Since when it uses more than that, seconds since 1970.
    pub soft_exceeded_since: Option<u64>,
    /// It has done so for longer than it may.
    pub grace_is_over: bool,
    /// What it may hold of the cache.
    pub memory: MemoryBudget,
    /// How its domain uses the journal; `None`: as the mount says.
    pub journal: Option<JournalMode>,
    /// Bytes of the cache that it holds.
    pub cached: u64,
    /// What it may ask of the device in a second.
    pub rates: Rates,
    /// What it read while it had rates.
    pub read: RateUse,
    /// What it wrote.
    pub written: RateUse,
    /// Processor time that may be spent on it, ns in a second.
    pub serving: Option<Rate>,
    /// What was spent while it had such a limit.
    pub served: Duration,
    /// Requests that waited for that, and how long all of them did.
    pub served_waits: u32,
    /// See `served_waits`.
    pub served_waited: Duration,
    /// Devices that it may use.
    pub devices: DeviceSet,
    /// What it has on others.
    pub elsewhere: ElsewhereInfo,
    /// Its domain is read-only.
    pub failed: bool,
}

/// What a tenant has on devices that it may not use, as [`braidfs::Elsewhere`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ElsewhereInfo {
    /// Block groups.
    pub groups: u32,
    /// Bytes in them.
    pub bytes: u64,
    /// One of them has the journal.
    pub journal: bool,
    /// There is no room for them where it may be.
    pub crowded: bool,
}

/// Makes directory `entry` in the open directory `parent` of a mounted volume the root of a tenant.
///
/// # Errors
/// EPERM: only root may, and the user of the server. ENOTTY: the server is too old. EROFS, EEXIST. Where the volume refuses,
/// what it says to it, as the error's text.
pub fn tenant_create(parent: &File, entry: &[u8], name: &str, budget: &TenantBudget) -> io::Result<TenantInfo> {
    let mut arg = tenant_arg(TenantCall::Create, name)?;
    arg.mode = 0o755;
    (arg.space, arg.inodes_max) = (budget.space.unwrap_or(0), budget.inodes.unwrap_or(0));
    put_soft(&mut arg, budget.soft_space);
    let r = budget.rates;
    arg.rates = [r.read_bps, r.write_bps, r.read_iops, r.write_iops].map(rate_number);
    arg.memory = [budget.memory.least, budget.memory.most.unwrap_or(0)];
    arg.journal = JournalMode::number(budget.journal);
    arg.serving = rate_number(budget.serving);
    arg.devices = devices_number(budget.devices);
    put(&mut arg.text, entry)?;
    tenant(parent, arg)
}

/// A change of a limit: `None` leaves it as it is, `Some(None)` takes it away.
pub type NewLimit<T = u64> = Option<Option<T>>;

/// Which limits of a tenant change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TenantChange {
    /// Hard limit of space, bytes.
    pub space: NewLimit,
    /// Limit of inodes, a number.
    pub inodes: NewLimit,
    /// The soft limit of space.
    pub soft_space: NewLimit<SoftLimit>,
    /// In the order of [`braidfs::format::domain::TENANT_RATES`].
    pub rates: [NewLimit<Rate>; 4],
    /// Bytes of the cache: kept for it, and at most.
    pub memory: [NewLimit; 2],
    /// How its domain uses the journal.
    pub journal: NewLimit<JournalMode>,
    /// Processor time, ns in a second.
    pub serving: NewLimit<Rate>,
    /// Devices.
    pub devices: Option<DeviceSet>,
}

/// Changes the limits of a tenant of the volume that `dir` lies in.
///
/// # Errors
/// As [`tenant_create`]; ENOENT.
pub fn tenant_set(dir: &File, name: &str, change: &TenantChange) -> io::Result<TenantInfo> {
    let mut arg = tenant_arg(TenantCall::Set, name)?;
    arg.index = change.space.map_or(LEAVE_SPACE, |_| 0) | change.inodes.map_or(0, |_| SET_INODES);
    let number = |n: NewLimit| n.flatten().unwrap_or(0);
    (arg.space, arg.inodes_max) = (number(change.space), number(change.inodes));
    if let Some(soft) = change.soft_space {
        arg.index |= SET_SOFT;
        put_soft(&mut arg, soft);
    }
    for ((rate, to), flag) in arg.rates.iter_mut().zip(change.rates).zip(SET_RATES) {
        if let Some(to) = to {
            arg.index |= flag;
            *rate = rate_number(to);
        }
    }
    for ((bytes, to), flag) in arg.memory.iter_mut().zip(change.memory).zip(SET_MEMORY) {
        if let Some(to) = to {
            arg.index |= flag;
            *bytes = to.unwrap_or(0);
        }
    }
    if let Some(journal) = change.journal {
        arg.index |= SET_JOURNAL;
        arg.journal = JournalMode::number(journal);
    }
    if let Some(serving) = change.serving {
        arg.index |= SET_SERVING;
        arg.serving = rate_number(serving);
    }
    if let Some(devices) = change.devices {
        arg.index |= SET_DEVICES;
        arg.devices = devices_number(devices);
    }
    tenant(dir, arg)
}

fn put_soft(arg: &mut TenantArg, soft: Option<SoftLimit>) {
    arg.soft_space = soft.map_or(0, |s| s.space);
    arg.grace = soft.map_or(0, |s| u32::try_from(s.grace.as_secs()).unwrap_or(u32::MAX));
}

fn devices_number(devices: DeviceSet) -> u16 {
    // a volume has 16 at most
    devices.bits() as u16
}

fn rate_of([n, burst]: [u64; 2]) -> Option<Rate> {
    (n > 0).then_some(Rate { per_second: n, burst: Some(burst).filter(|n| *n > 0) })
}

fn rate_number(rate: Option<Rate>) -> [u64; 2] {
    rate.map_or([0, 0], |r| [r.per_second, r.burst.unwrap_or(0)])
}

impl TenantArg {
    /// The soft limit in it.
    pub fn soft(&self) -> Option<SoftLimit> {
        let grace = Duration::from_secs(self.grace.into());
        (self.soft_space > 0).then_some(SoftLimit { space: self.soft_space, grace })
    }

    /// The rates in it, as [`TenantChange::rates`] has them.
    pub fn rates(&self) -> [Option<Rate>; 4] {
        self.rates.map(rate_of)
    }

    /// The limit of processor time in it.
    pub fn serving(&self) -> Option<Rate> {
        rate_of(self.serving)
    }

    /// The devices in it.
    pub fn devices(&self) -> DeviceSet {
        DeviceSet::from_bits(self.devices.into())
    }

    /// Tells of processor time and devices, and of the NUMA node.
    pub fn tell_serving(&mut self, t: &Tenant) {
        self.numa_node = t.numa_node.map_or(0, |n| u64::from(n) + 1);
        self.serving = rate_number(t.budget.serving);
        self.devices = devices_number(t.budget.devices);
        let Elsewhere { groups, bytes, journal, crowded, .. } = t.elsewhere;
        (self.elsewhere_groups, self.elsewhere) = (groups, bytes);
        self.elsewhere_flags =
            if journal { ELSEWHERE_JOURNAL } else { 0 } | if crowded { ELSEWHERE_CROWDED } else { 0 };
        self.served = u64::try_from(t.served.used.as_nanos()).unwrap_or(u64::MAX);
        self.served_waits = u32::try_from(t.served.waits).unwrap_or(u32::MAX);
        self.served_waited = u32::try_from(t.served.waited.as_millis()).unwrap_or(u32::MAX);
        self.mode |= KNOWS_SERVING;
    }

    /// The number of the NUMA node in it.
    pub fn numa_node(&self) -> Option<u32> {
        self.numa_node.checked_sub(1)?.try_into().ok()
    }

    /// The limits of memory in it.
    pub fn memory(&self) -> MemoryBudget {
        MemoryBudget { least: self.memory[0], most: Some(self.memory[1]).filter(|n| *n > 0) }
    }

    /// How the journal is to be used.
    ///
    /// # Errors
    /// Where the number says nothing.
    pub fn journal(&self) -> braidfs::Result<Option<JournalMode>> {
        JournalMode::from_number(self.journal).map_err(|_| braidfs::Error::Invalid("an unknown mode of the journal"))
    }

    /// Tells of the journal.
    pub fn tell_journal(&mut self, t: &Tenant) {
        self.journal = JournalMode::number(t.budget.journal);
        self.mode |= KNOWS_JOURNAL;
    }

    /// Tells of memory.
    pub fn tell_memory(&mut self, t: &Tenant) {
        self.memory = [t.budget.memory.least, t.budget.memory.most.unwrap_or(0)];
        self.cached = t.cached;
        self.mode |= KNOWS_MEMORY;
    }

    /// Tells of rates and of the soft limit.
    pub fn tell_rates(&mut self, t: &Tenant) {
        let r = t.budget.rates;
        self.rates = [r.read_bps, r.write_bps, r.read_iops, r.write_iops].map(rate_number);
        put_soft(self, t.budget.soft_space);
        (self.soft_since, self.grace_is_over) = (t.soft_exceeded_since.unwrap_or(0), t.grace_is_over.into());
        let used = |u: RateUse| {
            let waited = u64::try_from(u.waited.as_nanos()).unwrap_or(u64::MAX);
            [u.bytes, u.requests, u.debt[0], u.debt[1], u.waits, waited]
        };
        self.used_of_rates = [used(t.read), used(t.written)];
        self.mode |= KNOWS_RATES;
    }
}

/// One tenant of it.
///
/// # Errors
/// As [`tenant_set`].
pub fn tenant_show(dir: &File, name: &str) -> io::Result<TenantInfo> {
    tenant(dir, tenant_arg(TenantCall::Show, name)?)
}

/// All of them.
///
/// # Errors
/// As [`tenant_create`].
pub fn tenants(dir: &File) -> io::Result<Vec<TenantInfo>> {
    let mut all = Vec::new();
    loop {
        let arg = TenantArg { index: all.len() as u32, ..tenant_arg(TenantCall::Next, "")? };
        match tenant(dir, arg) {
            Ok(one) => all.push(one),
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => return Ok(all),
            Err(e) => return Err(e),
        }
    }
}

/// Makes a tenant's root an ordinary directory.
///
/// # Errors
/// As [`tenant_set`].
pub fn tenant_remove(dir: &File, name: &str) -> io::Result<()> {
    tenant(dir, tenant_arg(TenantCall::Remove, name)?).map(drop)
}

/// Mounts a tenant by itself, on the directory `point`: an absolute path, where the server runs; an empty one: on its own.
///
/// # Errors
/// As [`tenant_set`]; EINVAL: the path has more than 639 bytes.
pub fn tenant_mount(dir: &File, name: &str, point: &Path, how: TenantMount) -> io::Result<()> {
    let mut arg = tenant_arg(TenantCall::Mount, name)?;
    let flags = [how.read_only, how.nosuid, how.nodev, how.noexec];
    arg.index = flags.iter().zip(MOUNT_FLAGS).filter(|(on, _)| **on).map(|(_, flag)| flag).sum();
    put(&mut arg.text, point.as_os_str().as_bytes())?;
    tenant(dir, arg).map(drop)
}

impl TenantArg {
    /// The flags of a mount in it.
    pub fn mount(&self) -> TenantMount {
        let [read_only, nosuid, nodev, noexec] = MOUNT_FLAGS.map(|flag| self.index & flag != 0);
        TenantMount { read_only, nosuid, nodev, noexec }
    }
}

fn tenant_arg(call: TenantCall, name: &str) -> io::Result<TenantArg> {
    let mut arg = TenantArg { call: call as u32, ..TenantArg::new_zeroed() };
    if name.len() >= arg.name.len() {
        return Err(io::Error::other("the name of a tenant has 63 bytes at most"));
    }
    put(&mut arg.name, name.as_bytes())?;
    Ok(arg)
}

fn tenant(dir: &File, mut arg: TenantArg) -> io::Result<TenantInfo> {
    let limits_inodes = arg.inodes_max > 0;
    let limits_memory = arg.memory != [0; 2];
    let changes_journal = arg.journal > 0 || arg.call == TenantCall::Set as u32 && arg.index & SET_JOURNAL != 0;
    let limits_serving = arg.serving != [0; 2] || arg.devices != 0;
    let limits_rates = arg.rates != [[0; 2]; 4] || arg.soft_space > 0;
    ask(dir, TENANT, &mut arg)?;
    let knows = arg.mode & KNOWS_INODES != 0;
    let text = |bytes: &[u8]| {
        let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
        String::from_utf8_lossy(&bytes[..end]).into_owned()
    };
    let used = |[bytes, requests, a, b, waits, ns]: [u64; 6]| RateUse {
        bytes,
        requests,
        debt: [a, b],
        waits,
        waited: Duration::from_nanos(ns),
    };
    match arg.errno as i32 {
        0 if limits_inodes && !knows => Err(io::Error::other(
            "the server is of an older version, which knows no limit of inodes: the others are set",
        )),
        0 if limits_rates && arg.mode & KNOWS_RATES == 0 => Err(io::Error::other(
            "the server is of an older version, which knows no rates and no soft limits: the others are set",
        )),
        0 if limits_memory && arg.mode & KNOWS_MEMORY == 0 => Err(io::Error::other(
            "the server is of an older version, which knows no limits of memory: the others are set",
        )),
        0 if changes_journal && arg.mode & KNOWS_JOURNAL == 0 => Err(io::Error::other(
            "the server is of an older version, which knows no modes of the journal: it is used as the mount says",
        )),
        0 if limits_serving && arg.mode & KNOWS_SERVING == 0 => Err(io::Error::other(
            "the server is of an older version, which knows no limits of serving time and no devices of tenants: the others are set",
        )),
        0 => Ok(TenantInfo {
            name: text(&arg.name),
            root: arg.root,
            domain: arg.domain,
            numa_node: arg.numa_node(),
            space: Some(arg.space).filter(|n| *n > 0),
            used: arg.used,
            inodes: arg.inodes,
            inodes_max: Some(arg.inodes_max).filter(|n| *n > 0 && knows),
            soft_space: arg.soft(),
            soft_exceeded_since: Some(arg.soft_since).filter(|n| *n > 0),
            grace_is_over: arg.grace_is_over == 1,
            memory: arg.memory(),
            // of a newer server: one that this program does not know
            journal: arg.journal().unwrap_or_default(),
            cached: arg.cached,
            rates: {
                let [read_bps, write_bps, read_iops, write_iops] = arg.rates();
                Rates { read_bps, write_bps, read_iops, write_iops }
            },
            read: used(arg.used_of_rates[0]),
            written: used(arg.used_of_rates[1]),
            serving: arg.serving(),
            served: Duration::from_nanos(arg.served),
            served_waits: arg.served_waits,
            served_waited: Duration::from_millis(arg.served_waited.into()),
            devices: arg.devices(),
            elsewhere: ElsewhereInfo {
                groups: arg.elsewhere_groups,
                bytes: arg.elsewhere,
                journal: arg.elsewhere_flags & ELSEWHERE_JOURNAL != 0,
                crowded: arg.elsewhere_flags & ELSEWHERE_CROWDED != 0,
            },
            failed: arg.failed == 1,
        }),
        n @ (libc::EROFS | libc::EEXIST | libc::ENOENT) => Err(io::Error::from_raw_os_error(n)),
        _ => Err(io::Error::other(text(&arg.text))),
    }
}
