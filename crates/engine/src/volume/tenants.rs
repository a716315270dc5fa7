//! Tenants: directory trees with a domain of their own, and what they may use of the volume (docs/tenants.md).

use super::{MountedVolume, Volume};
use crate::cell::Cell;
use crate::domain::Domain;
use crate::domain::tenant::Binding;
use crate::error::{Error, Result};
use crate::types::*;
use braidfs_format::BLOCK_BYTES;
use braidfs_format::domain::KEPT_FOR_TENANTS;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Longest name of a tenant, bytes.
pub const TENANT_NAME_MAX: usize = 63;
/// The least hard limit: what an empty directory and its first transactions take.
pub const TENANT_SPACE_MIN: u64 = 1 << 20;
/// The highest limit of inodes: more than a volume can have.
pub const TENANT_INODES_MAX: u64 = 1 << 56;

/// What a tenant may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TenantBudget {
    /// Most bytes of data and metadata; `None`: as many as the volume has.
    pub space: Option<u64>,
    /// Most inodes, its root directory among them; `None`: as many as the volume has.
    pub inodes: Option<u64>,
}

/// A tenant, and what it uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tenant {
    /// Name of the tenant, 1 to 63 bytes.
    pub name: String,
    /// Its root directory.
    pub root: InodeNo,
    /// Number of the domain that it is bound to.
    pub domain: DomainId,
    /// What it may use.
    pub budget: TenantBudget,
    /// Bytes of data and metadata that it uses, or has reserved.
    pub used: u64,
    /// Inodes that it has, its root directory among them: with a name, or open without one.
    pub inodes: u64,
    /// Why its domain is read-only, if it is.
    pub failed: Option<String>,
}

impl Volume {
    /// Makes directory `entry` in `dir`, the root of a tenant: with a domain of its own, in which all is made that is made
    /// below it. Durable when this returns.
    ///
    /// # Errors
    /// [`Error::Exists`] where the directory is there already: what lies in a domain stays there. [`Error::Busy`] where
    /// another tenant has the name, or the volume's tables have room for no more domains; [`Error::NoSpace`] where no domain
    /// can spare a group; [`Error::Invalid`], [`Error::ReadOnly`]; of a device: there may be an ordinary directory then.
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
        let blocks = checked(name, budget)?;
        let _one = i.tenants.lock();
        if self.read_only() {
            return Err(Error::ReadOnly);
        }
        if i.tenant(name).is_some() {
            return Err(Error::Busy(format!("there is a tenant {name} already")));
        }
        let parent = i.dir_cell(dir)?;
        if i.lookup_in(&parent, entry).is_ok() {
            return Err(Error::Exists);
        }
        let d = i.domain_for_tenant()?;
        let (root, _) = i.make_tenant_root(&parent, entry, mode, cred, d.id)?;
        let bound = self.fsync(root.ino, false).and_then(|()| {
            let inode = InodeRef { ino: root.ino, generation: root.generation };
            let to = Binding { root: inode, name: name.into(), blocks, inodes: budget.inodes };
            d.bind(Some(&to)).map(|()| to)
        });
        let to = bound.inspect_err(|_| {
            d.set_tenant_root(None);
            // it is an ordinary directory, which nobody has asked for
            let _ = i.remove_in(&parent, entry, true);
        })?;
        i.limit(&d, Some(&to), 0);
        tracing::info!("tenant {name} has {}", d.id);
        self.tenant(name)
    }

    /// Changes what a tenant may use, while it is in use; durable when this returns. A limit below what is in use keeps the
    /// tenant from using more. What a front end accepted before it is had up to the limit that there was
    /// ([`Self::write_accepted`]), until the front end says that there is no more of it ([`Self::promises_are_kept`]).
    ///
    /// # Errors
    /// [`Error::NotFound`] where there is no such tenant; [`Error::Invalid`], [`Error::ReadOnly`]; of the device: after a
    /// crash the budget may be the old or the new one.
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
        let (d, mut binding) = i.tenant(name).ok_or(Error::NotFound)?;
        let mut budget = binding.budget();
        change(&mut budget);
        let blocks = checked(name, budget)?;
        (binding.blocks, binding.inodes) = (blocks, budget.inodes);
        d.bind(Some(&binding))?;
        i.limit(&d, Some(&binding), i.promised_below(&d, blocks));
        self.tenant(name)
    }

    /// A tenant by its name.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub fn tenant(&self, name: &str) -> Result<Tenant> {
        self.mounted().tenant(name).map(|(d, b)| look(&d, b)).ok_or(Error::NotFound)
    }

    /// All tenants, by their domains.
    pub fn tenants(&self) -> Vec<Tenant> {
        let domains = self.mounted().domains.iter();
        domains.filter_map(|d| d.binding().map(|b| look(d, b))).collect()
    }

    /// Takes the limits from a tenant and makes its root an ordinary directory, with all that lies below it. Its domain is
    /// the next tenant's once nothing lies in it. Durable when this returns.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::ReadOnly`]; of the device: after a crash there is the tenant, or not.
    pub fn tenant_remove(&self, name: &str) -> Result<()> {
        let i = self.mounted();
        let _one = i.tenants.lock();
        if self.read_only() {
            return Err(Error::ReadOnly);
        }
        let (d, _) = i.tenant(name).ok_or(Error::NotFound)?;
        d.bind(None)?;
        d.set_tenant_root(None);
        i.limit(&d, None, 0);
        tracing::info!("tenant {name} was removed; {} has what it left", d.id);
        Ok(())
    }
}

/// The blocks of a budget, where that and the name are as they must be.
fn checked(name: &str, budget: TenantBudget) -> Result<Option<u64>> {
    if name.is_empty() || name.len() > TENANT_NAME_MAX || name.chars().any(|c| c.is_control() || c == '/') {
        return Err(Error::Invalid("the name of a tenant has 1 to 63 bytes, no slash and no control characters"));
    }
    if budget.space.is_some_and(|n| n < TENANT_SPACE_MIN) {
        return Err(Error::Invalid("a tenant needs room for 1 MiB at least"));
    }
    if budget.inodes.is_some_and(|n| n == 0 || n > TENANT_INODES_MAX) {
        return Err(Error::Invalid("a tenant has one inode at least, its root directory, and 2^56 at most"));
    }
    Ok(budget.space.map(|n| n / BLOCK_BYTES as u64))
}

impl Binding {
    fn budget(&self) -> TenantBudget {
        TenantBudget { space: self.blocks.map(bytes), inodes: self.inodes }
    }
}

/// Also of a limit in a header that nobody has checked.
fn bytes(blocks: u64) -> u64 {
    blocks.saturating_mul(BLOCK_BYTES as u64)
}

/// Blocks that a domain uses, or has promised.
fn used(d: &Domain) -> u64 {
    let s = d.space.stats();
    s.blocks.saturating_sub((s.free + s.pending).saturating_sub(s.reserved))
}

fn look(d: &Domain, b: Binding) -> Tenant {
    Tenant {
        budget: b.budget(),
        name: b.name,
        root: b.root.ino,
        domain: d.id,
        used: bytes(used(d)),
        inodes: d.inodes.used_and_limit().0,
        failed: d.failed().map(str::to_owned),
    }
}

impl MountedVolume {
    fn tenant(&self, name: &str) -> Option<(Arc<Domain>, Binding)> {
        let mut all = self.domains.iter().filter_map(|d| d.binding().map(|b| (d.clone(), b)));
        all.find(|(_, b)| b.name == name)
    }

    /// A domain in which nothing lies and that is kept for tenants, or one more.
    fn domain_for_tenant(&self) -> Result<Arc<Domain>> {
        let unbound = |d: &&Arc<Domain>| d.is_kept() && d.tenant_root().is_none() && d.failed().is_none();
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
        let id = self.add_domain(KEPT_FOR_TENANTS)?;
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
        // no group is claimed or given back meanwhile
        let _bat = self.bat.lock();
        d.space.set_hard_limit(tenant.and_then(|b| b.blocks), promised);
    }

    /// Blocks beyond a limit to be that the domain could have had until now.
    fn promised_below(&self, d: &Domain, blocks: Option<u64>) -> u64 {
        // what was promised before may not have come yet
        let room = self.room(d, u64::MAX).saturating_add(d.space.promised());
        let Some(new) = blocks else { return 0 };
        room.saturating_sub(new.saturating_sub(used(d)))
    }

    /// Space and inodes as a tenant with a limit has them.
    pub(super) fn statfs_of_tenant(&self, d: &Domain) -> StatFs {
        let room = self.room(d, u64::MAX);
        let used = used(d);
        // also where more is in use than the limit allows by now
        let blocks = d.space.hard_limit().unwrap_or(u64::MAX).min(used.saturating_add(self.most(d))).max(used);
        StatFs {
            blocks,
            free: blocks - used,
            available: room.min(blocks - used),
            inodes: d.nodes.total(),
            inodes_free: d.nodes.free(),
        }
    }

    /// The numbers of inodes in `s` as a tenant has them whose inodes are limited. (One with only a limit of space has
    /// those of its groups, and gets more.)
    pub(super) fn inodes_of_tenant(&self, d: &Domain, s: &mut StatFs) {
        let (used, Some(limit)) = d.inodes.used_and_limit() else { return };
        let groups = self.bat.lock().free_groups();
        let most = d.nodes.free() + u64::from(groups) * u64::from(self.store.geometry().nodes());
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
        let s = d.space.stats();
        (s.free + s.pending).saturating_sub(s.reserved) + self.shared.unclaimed.load(Ordering::Relaxed)
    }

    /// Tenants whose root is not there are none: only damage that fsck mended leaves one.
    pub(super) fn check_tenants(&self) -> Result<()> {
        for d in &self.domains {
            let Some(b) = d.binding() else { continue };
            let is_root = |c: &Cell| {
                let st = c.state.read();
                c.kind == FileKind::Dir && c.domain == d.id && c.is(b.root) && !st.deleted && st.nlink > 0
            };
            if d.failed().is_none() && matches!(self.find(b.root.ino), Ok(c) if !c.as_ref().is_some_and(|c| is_root(c)))
            {
                tracing::warn!("tenant {} has lost its directory: {} is nobody's", b.name, d.id);
                d.set_tenant_root(None);
                self.limit(d, None, 0);
                if !self.shared.options.read_only {
                    d.bind(None)?;
                }
            }
        }
        Ok(())
    }
}
