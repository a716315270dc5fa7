//! The tenant that a domain is bound to: kept in the domain's header, which one write of a shadow pair changes.

use super::Domain;
use super::memory::budget_of;
use crate::budget::{rates, serving};
use crate::device_set::DeviceSet;
use crate::error::Result;
use crate::types::*;
use braidfs_format::domain::{DomainHeader, JournalMode, KEPT_FOR_TENANTS, TenantRate};
use std::sync::atomic::Ordering;

/// What a domain's header says of its tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Binding {
    /// The tenant's root directory.
    pub root: InodeRef,
    /// Name of the tenant.
    pub name: String,
    /// Most blocks that it may use.
    pub blocks: Option<u64>,
    /// Most inodes that it may have.
    pub inodes: Option<u64>,
    /// What it may ask of the device.
    pub rates: Rates,
    /// Blocks beyond which it may use for a while only.
    pub soft: Option<Soft>,
    /// What it may hold of the cache.
    pub memory: MemoryBudget,
    /// How its domain uses the journal.
    pub journal: Option<JournalMode>,
    /// Of one without a journal: the record of its root directory.
    pub root_record: Vec<u8>,
    /// Processor time that the server may spend on it.
    pub serving: Option<Rate>,
    /// Where its domain may claim groups.
    pub devices: DeviceSet,
}

/// A soft limit of space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Soft {
    pub blocks: u64,
    /// How long it may be exceeded, seconds.
    pub grace: u32,
    /// Since when it is exceeded, seconds since 1970.
    pub since: Option<u64>,
}

fn soft(h: &DomainHeader) -> Option<Soft> {
    let (blocks, since) = (h.tenant_soft_blocks.get(), h.tenant_soft_since.get());
    (blocks > 0).then(|| Soft { blocks, grace: h.tenant_grace.get(), since: Some(since).filter(|n| *n > 0) })
}

impl Domain {
    /// Root directory of the tenant that the domain is bound to.
    pub fn tenant_root(&self) -> Option<InodeNo> {
        match self.tenant_root.load(Ordering::Acquire) {
            0 => None,
            n => Some(InodeNo(n)),
        }
    }

    /// Whether this is the root directory of a tenant.
    pub fn is_tenant_root(&self, ino: InodeNo) -> bool {
        self.tenant_root.load(Ordering::Acquire) == ino.0
    }

    /// Has [`Self::tenant_root`] say so from now on.
    pub(crate) fn set_tenant_root(&self, root: Option<InodeNo>) {
        self.tenant_root.store(root.map_or(0, |r| r.0), Ordering::Release);
    }

    /// Whether nothing is placed here that is of no tenant.
    pub fn is_kept(&self) -> bool {
        self.kept.load(Ordering::Relaxed)
    }

    /// Devices on which the domain may claim groups.
    pub fn devices(&self) -> DeviceSet {
        DeviceSet::from_bits(self.devices.load(Ordering::Relaxed))
    }

    /// Has [`Self::devices`] say so from now on. Under the lock of the group table.
    pub(crate) fn set_devices(&self, devices: DeviceSet) {
        self.devices.store(devices.bits(), Ordering::Relaxed);
    }

    /// What the header says of a tenant.
    pub(crate) fn binding(&self) -> Option<Binding> {
        let h = self.header.lock().header;
        let root = InodeRef { ino: InodeNo(h.tenant_root.get()), generation: h.tenant_generation.get() };
        let limit = |n: u64| Some(n).filter(|n| *n > 0);
        let (blocks, inodes) = (limit(h.tenant_blocks.get()), limit(h.tenant_inodes.get()));
        (root.ino.0 > 0).then(|| Binding {
            root,
            name: h.tenant_name_str(),
            blocks,
            inodes,
            rates: rates(&h),
            soft: soft(&h),
            memory: budget_of(&h),
            journal: h.journal_mode(),
            root_record: h.scratch_root_record().to_vec(),
            serving: serving(&h),
            devices: DeviceSet::from_bits(h.tenant_devices.get()),
        })
    }

    /// Has the header say so, durably. It is written twice: the loss of a copy must not bring an older limit back.
    ///
    /// # Errors
    /// Of the device: it is bound as before, but for a crash before the header can be written again.
    pub(crate) fn bind(&self, to: Option<&Binding>) -> Result<()> {
        let old = self.binding();
        let change = |to| move |h: &mut DomainHeader| tell(h, to);
        let bound = self.write_header(change(to)).and_then(|()| self.write_header(change(to)));
        if bound.is_err() {
            // where the device refuses this, too, the next header that it takes says so
            let _ = self.write_header(change(old.as_ref()));
            tell(&mut self.header.lock().header, old.as_ref());
        } else {
            self.set_journal_mode(to.and_then(|b| b.journal));
        }
        bound
    }

    /// The header of a domain that has just been added: in use, and kept for tenants or not.
    ///
    /// # Errors
    /// Of the device.
    pub(crate) fn mark_added(&self, tenant_flags: u32) -> Result<()> {
        self.write_header(|h| {
            self.mark_in_use(h, false);
            h.tenant_flags = tenant_flags.into();
        })?;
        self.kept.store(tenant_flags & KEPT_FOR_TENANTS != 0, Ordering::Relaxed);
        if self.is_kept() {
            self.inodes.begin();
        }
        Ok(())
    }
}

fn tell(h: &mut DomainHeader, to: Option<&Binding>) {
    h.tenant_root = to.map_or(0, |b| b.root.ino.0).into();
    h.tenant_generation = to.map_or(0, |b| b.root.generation).into();
    h.tenant_blocks = to.and_then(|b| b.blocks).unwrap_or(0).into();
    h.tenant_inodes = to.and_then(|b| b.inodes).unwrap_or(0).into();
    let rate = |r: Option<Rate>| TenantRate {
        per_second: r.map_or(0, |r| r.per_second).into(),
        burst: r.and_then(|r| r.burst).unwrap_or(0).into(),
    };
    let r = to.map(|b| b.rates).unwrap_or_default();
    h.tenant_rates = [r.read_bps, r.write_bps, r.read_iops, r.write_iops].map(rate);
    h.tenant_serving = rate(to.and_then(|b| b.serving));
    h.tenant_devices = to.map_or(0, |b| b.devices.bits()).into();
    let soft = to.and_then(|b| b.soft);
    h.tenant_soft_blocks = soft.map_or(0, |s| s.blocks).into();
    h.tenant_soft_since = soft.and_then(|s| s.since).unwrap_or(0).into();
    h.tenant_grace = soft.map_or(0, |s| s.grace).into();
    let memory = to.map(|b| b.memory).unwrap_or_default();
    let journal = to.and_then(|b| b.journal);
    if h.journal_mode() != journal {
        // no state of before is one of a rest
        h.scratch_at_rest = 0;
        // else what is kept of it may be newer
        h.keep_scratch_root(to.filter(|_| journal == Some(JournalMode::Scratch)).map_or(&[], |b| &b.root_record));
    }
    h.tenant_journal = JournalMode::number(journal);
    (h.tenant_memory_min, h.tenant_memory_max) = (memory.least.into(), memory.most.unwrap_or(0).into());
    h.tenant_name = [0; 64];
    if let Some(b) = to {
        let n = b.name.len().min(h.tenant_name.len());
        h.tenant_name[..n].copy_from_slice(&b.name.as_bytes()[..n]);
    }
}
