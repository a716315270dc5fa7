//! Tenants: directory trees with a domain of their own, and what they may use of the volume (docs/tenants.md).

use super::eviction::kept_most;
use super::moves::Elsewhere;
use super::{MountedVolume, Volume};
use crate::budget::ServingUse;
use crate::budget::{Credit, Paid, RateUse, Turn};
use crate::cell::Cell;
use crate::device_set::DeviceSet;
use crate::domain::Domain;
use crate::domain::tenant::{Binding, Soft};
use crate::error::{Error, Result};
use crate::nodes::NodeTable;
use crate::spending::Spending;
use crate::types::*;
use braidfs_format::BLOCK_BYTES;
use braidfs_format::domain::{JournalMode, KEPT_FOR_TENANTS, TENANT_RATE_MAX};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Longest name of a tenant, bytes.
pub const TENANT_NAME_MAX: usize = 63;
/// The least hard limit: what an empty directory and its first transactions take.
pub const TENANT_SPACE_MIN: u64 = 1 << 20;
/// The highest limit of inodes: more than a volume can have.
pub const TENANT_INODES_MAX: u64 = 1 << 56;

/// The lowest rates: with less a single request would keep its caller waiting for minutes.
pub const TENANT_BPS_MIN: u64 = 64 << 10;
/// The lowest ceiling of memory: what a few transactions and open files take.
pub const TENANT_MEMORY_MIN: u64 = 4 << 20;
/// The lowest limit of requests a second, for the reason of [`TENANT_BPS_MIN`].
pub const TENANT_IOPS_MIN: u64 = 10;

/// The least processor time, nanoseconds in a second: 1 %.
pub const TENANT_SERVING_MIN: u64 = 10_000_000;

/// How long a soft limit may be exceeded where nobody says: as with `setquota` and `xfs_quota`.
pub const GRACE: Duration = Duration::from_secs(7 * 24 * 3600);

/// A limit of space that may be exceeded for a while.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SoftLimit {
    /// Bytes from which on it counts as exceeded.
    pub space: u64,
    /// So long; whole seconds. Then it is a hard limit until less is in use.
    pub grace: Duration,
}

/// What a tenant may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TenantBudget {
    /// Most bytes of data and metadata; `None`: as many as the volume has.
    pub space: Option<u64>,
    /// Most inodes, its root directory among them; `None`: as many as the volume has.
    pub inodes: Option<u64>,
    /// A limit that may be exceeded for a while, not above the hard one.
    pub soft_space: Option<SoftLimit>,
    /// What it may ask of the device in a second.
    pub rates: Rates,
    /// What it may hold of the cache.
    pub memory: MemoryBudget,
    /// How its domain uses its journal; `None`: as the mount says. Without one ([`JournalMode::Scratch`]) nothing of it is
    /// promised to survive a crash (docs/journal-modes.md).
    pub journal: Option<JournalMode>,
    /// Processor time that a front end may spend on it, nanoseconds in a second: of all its threads together, so that two
    /// processors are 2,000,000,000. Who calls the library by himself spends his own.
    pub serving: Option<Rate>,
    /// Devices on which its domain claims block groups; what it has on others moves ([`Volume::tenant_move`]).
    pub devices: DeviceSet,
}

/// A tenant, and what it uses.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tenant {
    /// Name of the tenant, 1 to 63 bytes.
    pub name: String,
    /// Its root directory.
    pub root: InodeNo,
    /// Number of the domain that it is bound to.
    pub domain: DomainId,
    /// Number of the NUMA node that this is placed on, where there are several.
    pub numa_node: Option<u32>,
    /// What it may use.
    pub budget: TenantBudget,
    /// Bytes of data and metadata that it uses, or has reserved.
    pub used: u64,
    /// Inodes that it has, its root directory among them: with a name, or open without one.
    pub inodes: u64,
    /// Since when it uses more than its soft limit, seconds since 1970.
    pub soft_exceeded_since: Option<u64>,
    /// The soft limit has been exceeded for longer than its grace: nothing more is to be had.
    pub grace_is_over: bool,
    /// What it read and wrote while it had a rate.
    pub read: RateUse,
    /// The same of writes.
    pub written: RateUse,
    /// Bytes of the cache that it holds.
    pub cached: u64,
    /// Processor time that was spent on it while that had a limit.
    pub served: ServingUse,
    /// What of it lies on devices that it may not use.
    pub elsewhere: Elsewhere,
    /// Why its domain is read-only, if it is.
    pub failed: Option<String>,
}

impl Volume {
    /// Makes directory `entry` in `dir`, the root of a tenant: with a domain of its own, in which all is made that is made
    /// below it. Durable when this returns.
    ///
    /// # Errors
    /// [`Error::Exists`] where the directory is there already: what lies in a domain stays there. [`Error::Busy`] where
    /// another tenant has the name, the volume's tables have room for no more domains, or block groups are being emptied for
    /// something else; [`Error::NoSpace`] where no domain can spare or empty a group; [`Error::Invalid`], [`Error::ReadOnly`];
    /// of a device: there may be an ordinary directory then.
    pub fn tenant_create(
        &self,
        dir: InodeNo,
        entry: &[u8],
        mode: u32,
        name: &str,
        budget: TenantBudget,
        cred: &Cred,
    ) -> Result<Tenant> {
        let i = self.mounted();
        checked(name, budget)?;
        let _one = i.tenants.lock();
        if self.read_only() {
            return Err(Error::ReadOnly);
        }
        if i.tenant(name).is_some() {
            return Err(Error::Busy(format!("there is a tenant {name} already")));
        }
        let parent = i.dir_cell(dir)?;
        if i.dom(parent.domain).is_closed() {
            return Err(Error::CrossScratch);
        }
        if i.lookup_in(&parent, entry).is_ok() {
            return Err(Error::Exists);
        }
        i.check_devices(&i.bat.lock(), budget.devices)?;
        let scratch = budget.journal == Some(JournalMode::Scratch);
        if scratch {
            i.tell_scratch()?;
        }
        let d = i.domain_for_tenant(budget.devices)?;
        i.set_devices(&i.bat.lock(), &d, budget.devices);
        // before anybody can see the directory, and move something into it
        d.close_border(scratch);
        let undo = || {
            d.close_border(false);
            i.set_devices(&i.bat.lock(), &d, DeviceSet::ALL);
        };
        let made = i.make_tenant_root(&parent, entry, mode, cred, d.id);
        let (root, _) = made.inspect_err(|_| undo())?;
        // without a journal nothing but the entry says that there is such a directory
        let synced = self.fsync(root.ino, false).and_then(|()| if scratch { self.fsync(dir, false) } else { Ok(()) });
        let bound = synced.and_then(|()| {
            let inode = InodeRef { ino: root.ino, generation: root.generation };
            let mut to = Binding::new(inode, name);
            to.set_budget(budget);
            if scratch {
                to.root_record = d.root_record(&root, &root.state.read())?;
            }
            let bat = i.bat.lock();
            // one may have left, or be leaving, by now
            i.check_devices(&bat, budget.devices)?;
            d.bind(Some(&to)).map(|()| to)
        });
        let to = bound.inspect_err(|_| {
            d.set_tenant_root(None);
            undo();
            // it is an ordinary directory, which nobody has asked for
            let _ = i.remove_in(&parent, entry, true);
        })?;
        i.limit(&d, Some(&to), 0);
        i.tell_floors(budget.memory.least);
        d.begin_scratch();
        tracing::info!("tenant {name} has {}", d.id);
        self.tenant(name)
    }

    /// Changes what a tenant may use, while it is in use; durable when this returns. A limit below what is in use keeps the
    /// tenant from using more. What a front end accepted before it is had up to the limit that there was
    /// ([`Self::write_accepted`]), until the front end says that there is no more of it ([`Self::promises_are_kept`]).
    ///
    /// # Errors
    /// [`Error::NotFound`] where there is no such tenant; [`Error::Invalid`], also where one that is not empty shall have no
    /// journal; [`Error::ReadOnly`]; of the device: after a crash the budget may be the old or the new one, or the old one with the
    /// new journal mode, which may hold by now, too.
    pub fn tenant_set(&self, name: &str, budget: TenantBudget) -> Result<Tenant> {
        self.tenant_change(name, |b| *b = budget)
    }

    /// [`Self::tenant_set`] of what `change` makes of the budget that there is.
    ///
    /// # Errors
    /// As [`Self::tenant_set`].
    pub fn tenant_change(&self, name: &str, change: impl FnOnce(&mut TenantBudget)) -> Result<Tenant> {
        let i = self.mounted();
        let _one = i.tenants.lock();
        if self.read_only() {
            return Err(Error::ReadOnly);
        }
        let (d, before_it) = i.tenant(name).ok_or(Error::NotFound)?;
        let (mut binding, mut budget) = (before_it.clone(), before_it.budget());
        change(&mut budget);
        checked(name, budget)?;
        let moves = before_it.devices != budget.devices;
        binding.set_budget(budget);
        binding.look_at_soft(d.space.used(), i.seconds());
        let before = i.room_and_promised(&d);
        if moves {
            // nothing is changed where the devices cannot be; once more when they are
            i.check_devices(&i.bat.lock(), budget.devices)?;
        }
        if binding.journal != before_it.journal {
            // By itself: it writes, for which it may claim groups on the devices until now, and fails perhaps when the header says
            // so already. Whatever else that would say then would be told, and not hold.
            let (journal, was) = (binding.journal, before_it.journal);
            let mut to = Binding { journal, ..before_it };
            i.change_journal(&d, was, &mut to)?;
            binding.root_record = to.root_record;
        }
        if moves {
            let bat = i.bat.lock();
            i.check_devices(&bat, budget.devices)?;
            d.bind(Some(&binding))?;
            i.set_devices(&bat, &d, budget.devices);
        } else {
            d.bind(Some(&binding))?;
        }
        let most = binding.most(i.seconds());
        let promised = if moves { before.saturating_sub(i.room_within(&d, most)) } else { i.promised_below(&d, most) };
        i.limit(&d, Some(&binding), promised);
        i.tell_floors(budget.memory.least);
        if moves {
            i.devices_changed(&d);
        }
        self.tenant(name)
    }

    /// A tenant by its name.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub fn tenant(&self, name: &str) -> Result<Tenant> {
        self.mounted().tenant(name).map(|(d, b)| self.mounted().look_at_tenant(&d, b)).ok_or(Error::NotFound)
    }

    /// All tenants, by their domains.
    pub fn tenants(&self) -> Vec<Tenant> {
        let domains = self.mounted().domains.iter();
        domains.filter_map(|d| d.binding().map(|b| self.mounted().look_at_tenant(d, b))).collect()
    }

    /// Takes the limits from a tenant and makes its root an ordinary directory, with all that lies below it. Its domain is
    /// the next tenant's once nothing lies in it. Durable when this returns.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::ReadOnly`]; of the device: after a crash there is the tenant, perhaps with the journal mode of
    /// the mount, or not.
    pub fn tenant_remove(&self, name: &str) -> Result<()> {
        let i = self.mounted();
        let _one = i.tenants.lock();
        if self.read_only() {
            return Err(Error::ReadOnly);
        }
        let (d, mut binding) = i.tenant(name).ok_or(Error::NotFound)?;
        if let Some(was) = binding.journal.take() {
            // what stays is kept like anything else from now on
            i.change_journal(&d, Some(was), &mut binding)?;
        }
        d.bind(None)?;
        d.set_tenant_root(None);
        i.limit(&d, None, 0);
        i.set_devices(&i.bat.lock(), &d, DeviceSet::ALL);
        i.devices_changed(&d);
        tracing::info!("tenant {name} was removed; {} has what it left", d.id);
        Ok(())
    }
}

/// # Errors
/// Where a budget or a name are not as they must be.
fn checked(name: &str, budget: TenantBudget) -> Result<()> {
    if name.is_empty() || name.len() > TENANT_NAME_MAX || name.chars().any(|c| c.is_control() || c == '/') {
        return Err(Error::Invalid("the name of a tenant has 1 to 63 bytes, no slash and no control characters"));
    }
    if budget.space.is_some_and(|n| n < TENANT_SPACE_MIN) {
        return Err(Error::Invalid("a tenant needs room for 1 MiB at least"));
    }
    if budget.inodes.is_some_and(|n| n == 0 || n > TENANT_INODES_MAX) {
        return Err(Error::Invalid("a tenant has one inode at least, its root directory, and 2^56 at most"));
    }
    if let Some(soft) = budget.soft_space {
        if soft.space < TENANT_SPACE_MIN || budget.space.is_some_and(|hard| soft.space > hard) {
            return Err(Error::Invalid("a soft limit is 1 MiB at least, and not above the limit of space"));
        }
        if soft.grace.as_secs() > u32::MAX.into() {
            return Err(Error::Invalid("a grace period has 136 years at most"));
        }
    }
    if budget.memory.most.is_some_and(|n| n < TENANT_MEMORY_MIN.max(budget.memory.least)) {
        return Err(Error::Invalid("a tenant may hold 4 MiB of memory at least, and not less than is kept for it"));
    }
    let holds = |rate: Option<Rate>, least| {
        let within = |r: Rate| {
            (least..=TENANT_RATE_MAX).contains(&r.per_second)
                && r.burst.is_none_or(|n| (1..=TENANT_RATE_MAX).contains(&n))
        };
        rate.is_none_or(within)
    };
    if !holds(budget.serving, TENANT_SERVING_MIN) {
        return Err(Error::Invalid("a tenant has 1 % of a processor at least"));
    }
    let r = budget.rates;
    if !holds(r.read_bps, TENANT_BPS_MIN) || !holds(r.write_bps, TENANT_BPS_MIN) {
        return Err(Error::Invalid(
            "a tenant's bandwidth is 64 KiB per second at least, and 1 PiB at most, as is a burst",
        ));
    }
    if !holds(r.read_iops, TENANT_IOPS_MIN) || !holds(r.write_iops, TENANT_IOPS_MIN) {
        return Err(Error::Invalid("a tenant has 10 requests per second at least, and 2^50 at most, as has a burst"));
    }
    Ok(())
}

impl Binding {
    fn new(root: InodeRef, name: &str) -> Self {
        Self {
            root,
            name: name.into(),
            blocks: None,
            inodes: None,
            rates: Rates::default(),
            soft: None,
            memory: MemoryBudget::default(),
            journal: None,
            root_record: Vec::new(),
            serving: None,
            devices: DeviceSet::ALL,
        }
    }

    fn budget(&self) -> TenantBudget {
        let soft = |s: Soft| SoftLimit { space: bytes(s.blocks), grace: Duration::from_secs(s.grace.into()) };
        let (space, soft_space) = (self.blocks.map(bytes), self.soft.map(soft));
        let Self { inodes, rates, memory, journal, serving, devices, .. } = *self;
        TenantBudget { space, inodes, soft_space, rates, memory, journal, serving, devices }
    }

    /// A soft limit that was exceeded before still is so since then.
    fn set_budget(&mut self, to: TenantBudget) {
        let blocks = |bytes| bytes / BLOCK_BYTES as u64;
        let since = self.soft.and_then(|s| s.since);
        let grace = |s: SoftLimit| u32::try_from(s.grace.as_secs()).unwrap_or(u32::MAX);
        let soft = |s: SoftLimit| Soft { blocks: blocks(s.space), grace: grace(s), since };
        (self.blocks, self.inodes, self.rates) = (to.space.map(blocks), to.inodes, to.rates);
        (self.memory, self.journal) = (to.memory, to.journal);
        (self.serving, self.devices) = (to.serving, to.devices);
        self.soft = to.soft_space.map(soft);
    }

    /// Notes whether so many blocks in use exceed the soft limit; whether that is news. `now`: seconds since 1970.
    fn look_at_soft(&mut self, used: u64, now: u64) -> bool {
        let Some(soft) = &mut self.soft else { return false };
        let (before, exceeded) = (soft.since, used > soft.blocks);
        soft.since = exceeded.then(|| before.unwrap_or(now.max(1)));
        before != soft.since
    }

    fn grace_is_over(&self, now: u64) -> bool {
        self.soft.is_some_and(|s| s.since.is_some_and(|since| now >= since.saturating_add(s.grace.into())))
    }

    /// Most blocks that it may have now.
    fn most(&self, now: u64) -> Option<u64> {
        let soft = self.soft.filter(|_| self.grace_is_over(now)).map(|s| s.blocks);
        [self.blocks, soft].into_iter().flatten().min()
    }
}

/// Also of a limit in a header that nobody has checked.
fn bytes(blocks: u64) -> u64 {
    blocks.saturating_mul(BLOCK_BYTES as u64)
}

impl Volume {
    /// Whether the tenant that a domain belongs to may do what is demanded, if its rates are limited: `None` where it may do
    /// anything. Else its turn: what is taken with it, and when. For a front end that lets nobody wait in here
    /// ([`crate::MountOptions::paced_above`]).
    #[inline]
    pub fn come(&self, domain: DomainId, demand: Demand) -> Option<Turn> {
        self.mounted().domains.get(usize::from(domain.0))?.budget.come_served(demand)
    }

    /// [`Self::come`] of who only looks at something, and asks the device for nothing that was counted: for processor time.
    #[inline]
    pub fn come_to_look(&self, domain: DomainId) -> Option<Turn> {
        self.mounted().domains.get(usize::from(domain.0))?.budget.come_to_look()
    }

    /// Charges the processor time of this thread to the tenant of a domain, where that has a limit, until the value is dropped.
    /// For a front end, around a request. `None` where no tenant's time is limited.
    #[inline]
    pub fn spend(&self, domain: DomainId) -> Option<Spending> {
        if !self.any_serving() {
            return None;
        }
        self.mounted().domains.get(usize::from(domain.0)).map(|d| Spending::begin(&d.budget, true))
    }

    /// Whether the processor time of any tenant is limited, or was since the mount.
    #[inline]
    pub fn any_serving(&self) -> bool {
        self.mounted().shared.serving.load(Ordering::Relaxed)
    }

    /// Whether that of a domain's tenant is.
    pub fn serving_limited(&self, domain: DomainId) -> bool {
        self.any_serving() && self.mounted().domains.get(usize::from(domain.0)).is_some_and(|d| d.budget.is_timed())
    }

    /// What this thread has paid for of the inode's domain ([`Turn::go`]), for who goes on with what it does: until the value
    /// is dropped it is not given back.
    pub fn take_credit(&self, ino: InodeNo) -> Option<Credit> {
        let i = self.mounted();
        if !i.shared.rates.load(Ordering::Relaxed) {
            return None;
        }
        i.domain_of(ino)?.budget.take_credit()
    }

    /// Whether the rates of any tenant are limited, or its serving time, or were since the mount.
    #[inline]
    pub fn any_rates(&self) -> bool {
        self.mounted().shared.rates.load(Ordering::Relaxed)
    }

    /// Whether what a domain's tenant may ask of the device in a second is limited.
    pub fn rates_limited(&self, domain: DomainId, way: Way) -> bool {
        self.any_rates() && self.mounted().domains.get(usize::from(domain.0)).is_some_and(|d| d.budget.limits(way))
    }

    /// Looks whether tenants use more than their soft limits, as the background does every second.
    #[doc(hidden)]
    pub fn look_at_soft_limits(&self) {
        self.mounted().look_at_soft_limits();
    }
}

impl MountedVolume {
    fn look_at_tenant(&self, d: &Domain, b: Binding) -> Tenant {
        Tenant {
            budget: b.budget(),
            soft_exceeded_since: b.soft.and_then(|s| s.since),
            grace_is_over: b.grace_is_over(self.seconds()),
            read: d.budget.used(Way::Read),
            written: d.budget.used(Way::Write),
            name: b.name,
            root: b.root.ino,
            domain: d.id,
            numa_node: d.place.node(),
            used: bytes(d.space.used()),
            inodes: d.inodes.used_and_limit().0,
            cached: d.cached_bytes(),
            served: d.budget.served(),
            elsewhere: self.elsewhere(d),
            failed: d.failed().map(str::to_owned),
        }
    }

    /// Seconds since 1970.
    fn seconds(&self) -> u64 {
        u64::try_from(self.shared.second()).unwrap_or(0)
    }

    /// Whether any tenant has rates that are kept here.
    #[inline]
    pub(crate) fn is_paced(&self) -> bool {
        !self.shared.options.paced_above && self.shared.rates.load(Ordering::Relaxed)
    }

    /// Waits until the tenant of the domain may do what is demanded. The caller holds no lock and is in no gate.
    #[inline]
    pub(crate) fn pace(&self, domain: DomainId, demand: Demand) -> Option<Paid> {
        if !self.is_paced() {
            return None;
        }
        self.dom(domain).budget.pace(demand)
    }

    /// [`Self::pace`] of the inode's domain.
    #[inline]
    pub(crate) fn pace_inode(&self, ino: InodeNo, demand: Demand) -> Option<Paid> {
        if !self.is_paced() {
            return None;
        }
        self.domain_of(ino)?.budget.pace(demand)
    }

    /// [`Self::pace_inode`] of who changes something there: what that costs is charged when it is written.
    #[inline]
    pub(crate) fn pace_change(&self, ino: InodeNo) {
        drop(self.pace_inode(ino, Demand::change()));
    }

    /// Notes which tenants use more than their soft limits, and holds those to them whose grace is over.
    pub(super) fn look_at_soft_limits(&self) {
        if self.shared.read_only.load(Ordering::Relaxed) {
            return;
        }
        for d in self.domains.iter().filter(|d| d.tenant_root().is_some() && d.failed().is_none()) {
            if d.binding().is_some_and(|b| b.soft.is_some())
                && let Some(_one) = self.tenants.try_lock()
                && let Some(b) = d.binding()
            {
                self.look_at_soft_limit(d, b);
            }
        }
    }

    /// Of one tenant, with the lock of tenants held.
    fn look_at_soft_limit(&self, d: &Domain, mut b: Binding) {
        let now = self.seconds();
        if b.look_at_soft(d.space.used(), now) {
            // errors fail nothing: the next look tries again
            if let Err(e) = d.bind(Some(&b)) {
                tracing::warn!("the soft limit of tenant {}: {e}", b.name);
                return;
            }
            match b.soft {
                Some(Soft { since: Some(_), grace, .. }) => {
                    tracing::warn!(
                        "tenant {} uses more than its soft limit; in {grace} s it will be held to it",
                        b.name
                    );
                }
                _ => tracing::info!("tenant {} is within its soft limit again", b.name),
            }
        }
        let most = b.most(now);
        if d.space.hard_limit() != most {
            if b.grace_is_over(now) {
                tracing::warn!(
                    "tenant {} has used more than its soft limit for too long: it is held to it now",
                    b.name
                );
            }
            self.limit(d, Some(&b), self.promised_below(d, most));
        }
    }

    /// Has the header say what `to` says, durably, of a tenant whose domain used its journal as `before` says; nothing else differs.
    fn change_journal(&self, d: &Arc<Domain>, before: Option<JournalMode>, to: &mut Binding) -> Result<()> {
        if to.journal == before {
            return d.bind(Some(to));
        }
        if to.journal == Some(JournalMode::Scratch) {
            return self.become_scratch(d, to);
        }
        if before == Some(JournalMode::Scratch) {
            // all that is there is durable before the header says that it will be there
            to.root_record.clear();
            let kept = d.end_scratch().and_then(|()| d.checkpoint()).and_then(|()| d.bind(Some(to)));
            return match kept {
                Ok(()) => {
                    d.close_border(false);
                    Ok(())
                }
                Err(e) => {
                    d.begin_scratch();
                    Err(e)
                }
            };
        }
        // data that commits left alone until now, and what has no other place to go to
        d.flush_all()?;
        let data = |mode| d.data_mode_of(mode) == DataMode::Journal;
        let bound = if data(to.journal) { d.reserve_all(true) } else { Ok(()) }.and_then(|()| d.bind(Some(to)));
        d.reserve_all(data(if bound.is_ok() { to.journal } else { before }))?;
        bound.and_then(|()| d.flush_lazy())
    }

    fn tenant(&self, name: &str) -> Option<(Arc<Domain>, Binding)> {
        let mut all = self.domains.iter().filter_map(|d| d.binding().map(|b| (d.clone(), b)));
        all.find(|(_, b)| b.name == name)
    }

    /// A domain in which nothing lies and that is kept for tenants, or one more; its journal lies on one of the devices.
    fn domain_for_tenant(&self, devices: DeviceSet) -> Result<Arc<Domain>> {
        let not = self.forbidden(devices);
        let unbound = |d: &&Arc<Domain>| {
            let there = !not.iter().any(|n| n.contains(&d.journal_group()));
            there && d.is_kept() && d.tenant_root().is_none() && d.failed().is_none()
        };
        for d in self.domains.iter().filter(unbound) {
            let unused = || d.nodes.free() == d.nodes.total();
            if !unused() {
                // numbers become free when the deletion is durable, those of directories at a checkpoint
                d.commit()?;
                if d.quarantined_numbers() > 0 {
                    d.checkpoint()?;
                }
            }
            if unused() {
                return Ok(d.clone());
            }
        }
        let id = self.add_domain(KEPT_FOR_TENANTS, devices)?;
        Ok(self.dom(id).clone())
    }

    /// # Errors
    /// [`Error::Busy`] for the root of a tenant, which stays as long as the tenant does. Its state is locked.
    pub(crate) fn check_no_tenant(&self, c: &Cell) -> Result<()> {
        if c.kind == FileKind::Dir && self.dom(c.domain).is_tenant_root(c.ino) {
            return Err(Error::Busy("it is the root of a tenant".into()));
        }
        Ok(())
    }

    /// Has a domain keep to the limits of its tenant, or to none.
    fn limit(&self, d: &Domain, tenant: Option<&Binding>, promised: u64) {
        d.inodes.set_limit(tenant.and_then(|b| b.inodes));
        let held = tenant.map(|b| b.memory).unwrap_or_default();
        d.set_memory(held.least, held.most);
        d.budget.set(&tenant.map(|b| b.rates).unwrap_or_default(), tenant.and_then(|b| b.serving));
        self.shared.note_limits(&d.budget);
        // no group is claimed or given back meanwhile
        let _bat = self.bat.lock();
        d.space.set_hard_limit(tenant.and_then(|b| b.most(self.seconds())), promised);
    }

    /// Says so where a tenant shall have `least` bytes of the cache, and all together more than is kept for tenants.
    fn tell_floors(&self, least: u64) {
        let most = kept_most(self.cache_budget(), 0);
        let all = self.domains.iter().fold(0u64, |all, d| all.saturating_add(d.memory.floor()));
        if least > 0 && all > most {
            tracing::warn!(
                "{all} bytes of the cache are to be kept for tenants, and no more than {most} are: each has its part of that"
            );
        }
    }

    /// Blocks that a domain could have until now; what was promised before may not have come yet.
    fn room_and_promised(&self, d: &Domain) -> u64 {
        self.room(d, u64::MAX).saturating_add(d.space.promised())
    }

    /// Blocks that it can have with such a limit.
    fn room_within(&self, d: &Domain, limit: Option<u64>) -> u64 {
        self.room(d, u64::MAX).min(limit.map_or(u64::MAX, |n| n.saturating_sub(d.space.used())))
    }

    /// Blocks beyond a limit to be that the domain could have had until now.
    fn promised_below(&self, d: &Domain, blocks: Option<u64>) -> u64 {
        let room = self.room_and_promised(d);
        let Some(new) = blocks else { return 0 };
        room.saturating_sub(new.saturating_sub(d.space.used()))
    }

    /// Space and inodes as a tenant with a limit has them.
    pub(super) fn statfs_of_tenant(&self, d: &Domain) -> StatFs {
        let room = self.room_of_one(d);
        let used = d.space.used();
        // also where more is in use than the limit allows by now
        let blocks = d.space.hard_limit().unwrap_or(u64::MAX).min(used.saturating_add(self.most(d))).max(used);
        StatFs {
            blocks,
            free: blocks - used,
            available: room.min(blocks - used),
            inodes: d.nodes.total().saturating_sub(d.nodes.reserve()),
            inodes_free: d.nodes.free_for_inodes(),
        }
    }

    /// The numbers of inodes in `s` as a tenant has them whose inodes are limited. (One with only a limit of space has
    /// those of its groups, and gets more.)
    pub(super) fn inodes_of_tenant(&self, d: &Domain, s: &mut StatFs) {
        let (used, Some(limit)) = d.inodes.used_and_limit() else { return };
        let groups = self.bat.lock().free_groups_but(&self.unclaimable(d.devices()));
        let most = d.nodes.free_for_inodes() + u64::from(groups) * NodeTable::inodes_of_group(self.store.geometry());
        s.inodes = limit.min(used.saturating_add(most)).max(used);
        s.inodes_free = s.inodes - used;
    }

    /// Counts the inodes of domains that are kept for tenants, before anybody makes or deletes one. What recovery found
    /// stands in their tables by now.
    pub(super) fn count_tenants_inodes(&self) {
        for d in self.domains.iter().filter(|d| d.inodes.is_counted()) {
            d.inodes.recount(d.nodes.count_inodes());
        }
    }

    /// Blocks that a domain could have at most beside those in use.
    fn most(&self, d: &Domain) -> u64 {
        let (s, (_, avoided)) = (d.space.stats(), self.avoided_on(&self.bat.lock(), d.devices()));
        (s.free + s.pending).saturating_sub(s.reserved) + self.shared.unclaimed_on(d.devices()) + avoided
    }

    /// Tenants whose root is not there are none: only damage that fsck mended leaves one. As of the last checkpoint nothing is
    /// said of that: the binding stands in the domain's header at once, and the directory of a new tenant in the journal alone.
    pub(super) fn check_tenants(&self) -> Result<()> {
        let devices = self.store.devices();
        for d in &self.domains {
            // what a check would mend, or a crash came before a removed device was forgotten
            let within = d.devices().within(devices).unwrap_or(DeviceSet::ALL);
            let bat = self.bat.lock();
            self.set_devices(&bat, d, within);
        }
        if !self.shared.options.read_only {
            self.forget_devices(devices)?;
        }
        for d in &self.domains {
            let Some(b) = d.binding() else { continue };
            let is_root = |c: &Cell| {
                let st = c.state.read();
                c.kind == FileKind::Dir && c.domain == d.id && c.is(b.root) && !st.deleted && st.nlink > 0
            };
            let checked = !self.shared.options.checkpoint_only && d.failed().is_none();
            if checked && matches!(self.find(b.root.ino), Ok(c) if !c.as_ref().is_some_and(|c| is_root(c))) {
                tracing::warn!("tenant {} has lost its directory: {} is nobody's", b.name, d.id);
                d.set_tenant_root(None);
                self.limit(d, None, 0);
                if !self.shared.options.read_only {
                    d.bind(None)?;
                }
            } else if b.grace_is_over(self.seconds()) {
                self.limit(d, Some(&b), 0);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
