//! Limits of users, groups and directories: setting them, keeping them, and counting what there is (docs/quotas.md).
//!
//! The limits stand in internal attributes of the root directory, which one transaction changes. What is used is counted at
//! a mount, and when a volume gets its first limit ([`crate::quota`]).

mod look;
#[cfg(test)]
mod tests;

use super::tenants::GRACE;
use super::{MountedVolume, Volume};
use crate::braid::frontier::Frontier;
use crate::cell::Cell;
use crate::cell::record::XATTR_BYTES_MAX;
use crate::domain::Domain;
use crate::error::{Error, Result};
use crate::quota::{Limits, Used};
use crate::types::*;
use crate::volume::operation::Op;
use braidfs_format::BLOCK_BYTES;
use braidfs_format::inode::{PROJECT_MASK, PROJECT_MAX, PROJECT_SHIFT};
use braidfs_format::node::OVERFLOW;
use braidfs_format::quota::{self, QuotaEntry};
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Bytes of the attributes at most: some are left for what users set.
const RECORD_MAX: usize = XATTR_BYTES_MAX - 4096;
/// The highest limit of inodes: more than a volume can have.
const LIMIT_MAX: u64 = 1 << 56;
/// So often all below a directory is looked at, at most, when its limits are taken away.
const WALKS: u32 = 3;
/// Between looks at the cache's memory so many inodes are counted.
const LOOK: u64 = 256;

/// What an owner may use at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuotaLimits {
    /// Bytes of content, whole blocks of 4096.
    pub space: Option<u64>,
    /// Bytes that may be exceeded for the grace.
    pub soft_space: Option<u64>,
    /// Inodes.
    pub inodes: Option<u64>,
    /// Inodes that may be exceeded for the grace.
    pub soft_inodes: Option<u64>,
    /// So long a soft limit may be exceeded, whole seconds; then it is a hard one until less is in use.
    pub grace: Duration,
}

impl Default for QuotaLimits {
    fn default() -> Self {
        Self { space: None, soft_space: None, inodes: None, soft_inodes: None, grace: GRACE }
    }
}

/// Limits of an owner, and what it uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Quota {
    /// A user, a group or a project.
    pub owner: QuotaOwner,
    /// Of a project that has limits: its directory.
    pub directory: Option<InodeNo>,
    /// All `None` where it has no limits.
    pub limits: QuotaLimits,
    /// Bytes of content.
    pub used: u64,
    /// Inodes.
    pub inodes: u64,
    /// Since when it uses more than its soft limit of space, seconds since 1970.
    pub space_exceeded_since: Option<u64>,
    /// Since when it has more inodes than its soft limit.
    pub inodes_exceeded_since: Option<u64>,
    /// A soft limit was exceeded for longer than the grace: it is a hard one now.
    pub grace_is_over: bool,
}

fn owner_of(e: &QuotaEntry) -> QuotaOwner {
    match e.kind {
        quota::USER => QuotaOwner::User(e.id.get()),
        quota::GROUP => QuotaOwner::Group(e.id.get()),
        _ => QuotaOwner::Project(e.id.get()),
    }
}

fn blocks(bytes: Option<u64>) -> u64 {
    bytes.map_or(0, |n| n / BLOCK_BYTES as u64)
}

fn set(e: &mut QuotaEntry, to: &QuotaLimits) {
    (e.blocks, e.soft_blocks) = (blocks(to.space).into(), blocks(to.soft_space).into());
    (e.inodes, e.soft_inodes) = (to.inodes.unwrap_or(0).into(), to.soft_inodes.unwrap_or(0).into());
    e.grace = u32::try_from(to.grace.as_secs()).unwrap_or(u32::MAX).into();
}

fn some(n: u64) -> Option<u64> {
    Some(n).filter(|n| *n > 0)
}

/// Also of an entry that nobody has checked.
fn bytes(blocks: u64) -> u64 {
    blocks.saturating_mul(BLOCK_BYTES as u64)
}

fn limits_of(e: &QuotaEntry) -> QuotaLimits {
    QuotaLimits {
        space: some(e.blocks.get()).map(bytes),
        soft_space: some(e.soft_blocks.get()).map(bytes),
        inodes: some(e.inodes.get()),
        soft_inodes: some(e.soft_inodes.get()),
        grace: Duration::from_secs(e.grace.get().into()),
    }
}

/// Whether a soft limit that is exceeded `since` then is a hard one by now.
fn is_over(since: u64, grace: u32, now: u64) -> bool {
    since > 0 && now >= since.saturating_add(grace.into())
}

fn least(hard: u64, soft: u64, over: bool) -> Option<u64> {
    [some(hard), some(soft).filter(|_| over)].into_iter().flatten().min()
}

/// Notes whether so much is more than the soft limits; whether that is news.
fn look(e: &mut QuotaEntry, used: Used, now: u64) -> bool {
    let since = |soft: u64, used: u64, before: u64| match soft > 0 && used > soft {
        true if before > 0 => before,
        true => now.max(1),
        false => 0,
    };
    let before = (e.blocks_since, e.inodes_since);
    e.blocks_since = since(e.soft_blocks.get(), used.blocks, before.0.get()).into();
    e.inodes_since = since(e.soft_inodes.get(), used.inodes, before.1.get()).into();
    before != (e.blocks_since, e.inodes_since)
}

/// # Errors
/// Where limits are not as they must be.
fn checked(l: &QuotaLimits) -> Result<()> {
    let space = [l.space, l.soft_space];
    if space.iter().flatten().any(|n| *n < BLOCK_BYTES as u64) {
        return Err(Error::Invalid("a limit of space is 4096 bytes at least"));
    }
    if [l.inodes, l.soft_inodes].iter().flatten().any(|n| *n == 0 || *n > LIMIT_MAX) {
        return Err(Error::Invalid("a limit of inodes is 1 at least, and 2^56 at most"));
    }
    let above = |soft: Option<u64>, hard: Option<u64>| soft.zip(hard).is_some_and(|(s, h)| s > h);
    if above(l.soft_space, l.space) || above(l.soft_inodes, l.inodes) {
        return Err(Error::Invalid("a soft limit is not above the hard one"));
    }
    if l.grace.as_secs() > u32::MAX.into() {
        return Err(Error::Invalid("a grace period has 136 years at most"));
    }
    Ok(())
}

impl Volume {
    /// Has a user, a group, or a directory that has limits, keep to what `change` makes of its limits; durable when this returns. Who
    /// uses more already gets nothing more until it uses less. The volume's first limit counts all inodes that there are,
    /// which takes a moment.
    ///
    /// # Errors
    /// [`Error::NotFound`] for a project that is no directory's; [`Error::Invalid`], also for root, to whom limits of users do
    /// not apply; [`Error::ReadOnly`]; [`Error::NoSpace`] where there is no room for so many limits; of the device.
    pub fn quota_change(&self, owner: QuotaOwner, change: impl FnOnce(&mut QuotaLimits)) -> Result<Quota> {
        let i = self.mounted();
        let _one = i.tenants.lock();
        let mut all = i.quotas_of_those_there();
        let mut entry = match (all.get(&owner), owner) {
            (Some(e), _) => *e,
            (None, QuotaOwner::User(0)) => return Err(Error::Invalid("limits of users do not apply to root")),
            (None, QuotaOwner::Group(0)) => return Err(Error::Invalid("limits of groups do not apply to root's")),
            (None, QuotaOwner::Group(n)) => QuotaEntry { kind: quota::GROUP, id: n.into(), ..Default::default() },
            (None, QuotaOwner::User(n)) => QuotaEntry { kind: quota::USER, id: n.into(), ..Default::default() },
            (None, QuotaOwner::Project(_)) => return Err(Error::NotFound),
        };
        let mut limits = if all.contains_key(&owner) { limits_of(&entry) } else { QuotaLimits::default() };
        change(&mut limits);
        checked(&limits)?;
        set(&mut entry, &limits);
        i.count_for_quotas()?;
        look(&mut entry, i.shared.quotas.used(owner), i.quota_clock());
        all.insert(owner, entry);
        i.keep_quotas(all)?;
        self.quota(owner)
    }

    /// Gives a directory limits of its own: all that lies below it counts for them, and all that is made there. Durable when
    /// this returns. Where it was cut off before, or the directory has limits, it goes on, or changes them.
    ///
    /// Directories below that have limits of their own keep them, and do not count here. A file with another name outside
    /// counts here.
    ///
    /// # Errors
    /// [`Error::NotDir`]; [`Error::Invalid`] for the root of the volume; else as [`Self::quota_change`].
    pub fn quota_directory(&self, dir: InodeNo, change: impl FnOnce(&mut QuotaLimits)) -> Result<Quota> {
        let i = self.mounted();
        let c = i.dir_cell(dir)?;
        if dir == InodeNo::ROOT {
            return Err(Error::Invalid("the root of a volume has no limits of its own: make the volume smaller"));
        }
        // one at a time: who takes limits away, or gives them to a directory below, leaves no number that means nothing
        let _trees = i.quota_trees.lock();
        let owner = match self.quota_of_directory(dir) {
            Some(owner) => self.quota_change(owner, change)?.owner,
            None => self.new_project(&c, change)?,
        };
        let QuotaOwner::Project(n) = owner else { return Err(Error::NotFound) };
        self.assign(&c, n, None)?;
        self.quota(owner)
    }

    /// Limits for a directory that has none.
    fn new_project(&self, c: &Cell, change: impl FnOnce(&mut QuotaLimits)) -> Result<QuotaOwner> {
        let i = self.mounted();
        let _one = i.tenants.lock();
        if self.read_only() {
            return Err(Error::ReadOnly);
        }
        // numbers of inodes that lost their directory are not used again while there are such inodes
        i.count_for_quotas()?;
        let mut all = i.quotas_of_those_there();
        let used = |n: &u32| {
            let owner = QuotaOwner::Project(*n);
            all.contains_key(&owner) || i.shared.quotas.used(owner).inodes > 0
        };
        let n = (1..=PROJECT_MAX).find(|n| !used(n)).ok_or(Error::NoSpace)?;
        let mut limits = QuotaLimits::default();
        change(&mut limits);
        checked(&limits)?;
        let mut entry = QuotaEntry {
            kind: quota::PROJECT,
            id: n.into(),
            root: c.ino.0.into(),
            root_generation: c.generation.into(),
            ..Default::default()
        };
        set(&mut entry, &limits);
        all.insert(QuotaOwner::Project(n), entry);
        // A crash brings back no inode of who had the number before. Nobody knows which ones a failed domain would bring back:
        // while there is one, no directory gets a number.
        i.commit_all()?;
        i.keep_quotas(all)?;
        Ok(QuotaOwner::Project(n))
    }

    /// The project of a directory with limits of its own.
    pub fn quota_of_directory(&self, dir: InodeNo) -> Option<QuotaOwner> {
        let i = self.mounted();
        let generation = i.cell(dir).ok()?.generation;
        let is = |e: &&QuotaEntry| e.root.get() == dir.0 && e.root_generation.get() == generation;
        i.quotas.lock().values().find(is).map(owner_of)
    }

    /// Takes the limits from an owner. What lies below a directory counts for it no longer, but for the next directory above that
    /// has limits, if there is one; what was moved away before still does. Durable when this returns.
    ///
    /// # Errors
    /// [`Error::NotFound`] where it has none; [`Error::ReadOnly`]; of the device.
    pub fn quota_remove(&self, owner: QuotaOwner) -> Result<()> {
        let i = self.mounted();
        // nobody gives what lies below the number again meanwhile
        let _trees = matches!(owner, QuotaOwner::Project(_)).then(|| i.quota_trees.lock());
        let entry = *i.quotas.lock().get(&owner).ok_or(Error::NotFound)?;
        if self.read_only() {
            return Err(Error::ReadOnly);
        }
        if let QuotaOwner::Project(n) = owner
            && let Ok(c) = i.dir_cell(InodeNo(entry.root.get()))
            && c.generation == entry.root_generation.get()
        {
            // what lies below another directory with limits counts for that from now on
            // (a number that has lost its limits is not handed down: what was moved out before still has it)
            let above = c.state.read().parent;
            let outer = i.find(above)?.map_or(0, |d| d.state.read().project());
            let outer = if i.quotas.lock().contains_key(&QuotaOwner::Project(outer)) { outer } else { 0 };
            // what came out of a directory that was not looked at yet into one that was is found by another walk
            for _ in 0..WALKS {
                let any = self.assign(&c, outer, Some(n))?;
                if !any || i.shared.quotas.used(owner).inodes == 0 {
                    break;
                }
            }
        }
        let _one = i.tenants.lock();
        let mut all = i.quotas.lock().clone();
        all.remove(&owner).ok_or(Error::NotFound)?;
        i.keep_quotas(all)
    }

    /// Looks whether owners use more than their soft limits, as the background does every second.
    #[doc(hidden)]
    pub fn look_at_quotas(&self) {
        self.mounted().look_at_quotas();
    }

    /// Counts anew what each owner uses, and how much each count is wrong: blocks, inodes. Nobody may change the volume
    /// meanwhile. For tests.
    #[doc(hidden)]
    pub fn quota_drift(&self) -> Result<Vec<(QuotaOwner, i64, i64)>> {
        let i = self.mounted();
        let mut found: BTreeMap<QuotaOwner, (u64, u64)> = BTreeMap::new();
        let mut seen = HashSet::new();
        let mut look = |c: &Cell| {
            let st = c.state.read();
            if !st.deleted && seen.insert(c.ino) {
                for owner in st.owners().each() {
                    let (blocks, inodes) = found.entry(owner).or_default();
                    (*blocks, *inodes) = (*blocks + st.content_blocks(), *inodes + 1);
                }
            }
        };
        // also what no commit has told the node tables of
        i.domains.iter().flat_map(|d| d.cells.all()).for_each(|c| look(&c));
        i.visit_inodes(&mut look)?;
        let mut all = i.shared.quotas.owners();
        all.extend(found.keys());
        all.sort_unstable();
        all.dedup();
        let wrong = |owner: QuotaOwner| {
            let (used, (blocks, inodes)) =
                (i.shared.quotas.used(owner), found.get(&owner).copied().unwrap_or_default());
            (owner, used.blocks as i64 - blocks as i64, used.inodes as i64 - inodes as i64)
        };
        Ok(all.into_iter().map(wrong).filter(|w| w.1 != 0 || w.2 != 0).collect())
    }

    /// Has all below a directory, and itself, count for a project, 0: for none; whether anything did not before. `only`: of that
    /// project. Subtrees that have limits of their own stay as they are.
    fn assign(&self, root: &Arc<Cell>, project: u32, only: Option<u32>) -> Result<bool> {
        let i = self.mounted();
        // with generations: a limited directory that was removed has its entry as long as something counts for it, and its
        // number may be that of a directory without limits by now
        let others: HashSet<(u64, u32)> = (i.quotas.lock().values())
            .map(|e| (e.root.get(), e.root_generation.get()))
            .filter(|(n, _)| *n > 0 && *n != root.ino.0)
            .collect();
        let mut any = i.set_project(root, project, only)?;
        let (mut dirs, mut looked_at) = (vec![root.inode()], Frontier::EMPTY);
        let mut note = |d: DomainId| looked_at.raise(d, i.dom(d).running());
        note(root.domain);
        while let Some(dir) = dirs.pop() {
            // What is made there from now on counts already, and nothing else comes. All at one moment: a listing in parts could
            // miss what gets another name meanwhile.
            let found = match i.children_at_once(dir) {
                // removed meanwhile
                Err(Error::NotFound) => continue,
                found => found?,
            };
            for inode in found {
                let Some(c) = i.find(inode.ino)?.filter(|c| c.is(inode)) else { continue };
                if others.contains(&(c.ino.0, c.generation)) || !i.hangs_in(&c, dir.ino) {
                    continue;
                }
                any |= i.set_project(&c, project, only)?;
                note(c.domain);
                if c.kind == FileKind::Dir {
                    dirs.push(inode);
                }
            }
            i.maybe_evict(i.dom(root.domain));
        }
        // what was made or removed there meanwhile
        i.settle_all();
        // of a domain in which nothing lies there it does not matter whether it has failed
        i.commit_some(&looked_at)?;
        Ok(any)
    }
}

impl MountedVolume {
    fn quota_clock(&self) -> u64 {
        u64::try_from(self.shared.second()).unwrap_or(0)
    }

    /// The limits, but for those of directories that were removed and for which nothing counts any more: their room and their
    /// numbers are others'. Under the lock of tenants.
    fn quotas_of_those_there(&self) -> Limits {
        let mut all = self.quotas.lock().clone();
        let quotas = &self.shared.quotas;
        if !quotas.is_on() || quotas.is_counting() {
            return all;
        }
        let is_gone = |owner: &QuotaOwner, e: &QuotaEntry| {
            e.kind == quota::PROJECT
                && quotas.used(*owner).inodes == 0
                && match self.find(InodeNo(e.root.get())) {
                    Ok(found) => {
                        found.is_none_or(|c| c.generation != e.root_generation.get() || c.state.read().deleted)
                    }
                    Err(_) => false,
                }
        };
        let gone: HashSet<QuotaOwner> = all.iter().filter(|(o, e)| is_gone(o, e)).map(|(o, _)| *o).collect();
        if !gone.is_empty() {
            // A crash does not bring the directories back without their limits: nor does one of a domain that has failed, as
            // those keep them. (Of files that it brings back in other directories the number means nothing, as it is nobody's
            // until no domain has failed any more: `new_project`.)
            self.settle_all();
            let may_return =
                |e: &QuotaEntry| self.domain_of(InodeNo(e.root.get())).is_some_and(|d| d.failed().is_some());
            all.retain(|owner, e| !gone.contains(owner) || may_return(e));
        }
        all
    }

    /// Has an inode count for a project; whether it did not before.
    fn set_project(&self, c: &Arc<Cell>, project: u32, only: Option<u32>) -> Result<bool> {
        let (mut op, mut st) = Op::on_whole(self, c, (2, 0), true)?;
        if st.deleted || st.project() == project || only.is_some_and(|n| st.project() != n) {
            return Ok(false);
        }
        op.touch(c, &mut st)?;
        let flags = (st.flags & !PROJECT_MASK) | project << PROJECT_SHIFT;
        self.shared.quotas.transfer(c, &mut st, |st| st.flags = flags);
        st.ctime = self.shared.now();
        st.durability.operation_changes_data();
        self.dom(c.domain).keep_root(c, &st)?;
        Ok(true)
    }

    /// Writes the limits down, durably, and has them hold. Under the lock of tenants.
    fn keep_quotas(&self, all: Limits) -> Result<()> {
        self.write_quotas(&all)?;
        self.hold_all_to(all);
        Ok(())
    }

    /// Writes the limits down, durably.
    fn write_quotas(&self, all: &Limits) -> Result<()> {
        if self.shared.read_only.load(Ordering::Relaxed) {
            return Err(Error::ReadOnly);
        }
        let entries: Vec<QuotaEntry> = all.values().copied().collect();
        let values = quota::RECORDS.map(|name| (name, quota::encode(name, &entries)));
        let bytes: usize = values.iter().filter(|(_, v)| !v.is_empty()).map(|(n, v)| n.len() + v.len() + 5).sum();
        if bytes > RECORD_MAX {
            return Err(Error::NoSpace);
        }
        let root = self.cell(InodeNo::ROOT)?;
        {
            let mut op = Op::new(self);
            op.begin(&[root.domain], 2 + (bytes / 4096) as u64 + 16, true)?;
            let mut st = root.state.write();
            let is = |name: &[u8]| quota::RECORDS.contains(&name);
            let others: usize = st.xattrs.iter().filter(|(n, _)| !is(n)).map(|(n, v)| n.len() + v.len() + 5).sum();
            if others + bytes > XATTR_BYTES_MAX {
                return Err(Error::NoSpace);
            }
            op.touch(&root, &mut st)?;
            op.credit(root.domain, ((others + bytes) / 3900 + 1) as u64);
            st.xattrs.retain(|(n, _)| !is(n));
            for (name, value) in values.into_iter().filter(|(_, v)| !v.is_empty()) {
                st.xattrs.push((name.into(), value.into()));
            }
            st.durability.operation_changes_data();
        }
        self.dom(root.domain).commit()?;
        self.quotas_unwritten.store(false, Ordering::Relaxed);
        Ok(())
    }

    /// Has these limits hold, and no others. Under the lock of tenants.
    fn hold_all_to(&self, all: Limits) {
        let before = std::mem::replace(&mut *self.quotas.lock(), all.clone());
        for owner in before.keys().filter(|owner| !all.contains_key(owner)) {
            self.shared.quotas.set_limits(*owner, None, None);
        }
        all.values().for_each(|e| self.hold_to(e));
    }

    /// Whether the limits can be written now, as far as can be told before.
    fn quotas_can_be_written(&self) -> bool {
        let works = |d: &Arc<Domain>| d.failed().is_none();
        !self.shared.read_only.load(Ordering::Relaxed) && self.domain_of(InodeNo::ROOT).is_some_and(works)
    }

    /// Has an owner keep to its limits.
    fn hold_to(&self, e: &QuotaEntry) {
        let (now, grace) = (self.quota_clock(), e.grace.get());
        let blocks = least(e.blocks.get(), e.soft_blocks.get(), is_over(e.blocks_since.get(), grace, now));
        let inodes = least(e.inodes.get(), e.soft_inodes.get(), is_over(e.inodes_since.get(), grace, now));
        let used = self.shared.quotas.used(owner_of(e));
        if (used.most_blocks, used.most_inodes) != (blocks, inodes) {
            self.shared.quotas.set_limits(owner_of(e), blocks, inodes);
        }
    }

    /// Notes who uses more than soft limits, and holds those to them whose grace is over. Where that cannot be written down it
    /// holds until the unmount, and is written when it can be.
    pub(super) fn look_at_quotas(&self) {
        let soft = |e: &QuotaEntry| e.soft_blocks.get() > 0 || e.soft_inodes.get() > 0;
        if !self.shared.quotas.is_on() || !self.quotas.lock().values().any(soft) {
            return;
        }
        let Some(_one) = self.tenants.try_lock() else { return };
        let mut all = self.quotas.lock().clone();
        let mut news = false;
        for e in all.values_mut().filter(|e| soft(e)) {
            let owner = owner_of(e);
            if look(e, self.shared.quotas.used(owner), self.quota_clock()) {
                news = true;
                tracing::info!(?owner, blocks = e.blocks_since.get(), inodes = e.inodes_since.get(), "soft limits");
            }
        }
        if news || self.quotas_unwritten.load(Ordering::Relaxed) {
            match self.quotas_can_be_written().then(|| self.write_quotas(&all)) {
                Some(Ok(())) => {}
                Some(Err(e)) if !self.quotas_unwritten.swap(true, Ordering::Relaxed) => {
                    tracing::warn!(
                        "since when soft limits of users, groups and directories are exceeded is not written down: {e}"
                    );
                }
                _ => self.quotas_unwritten.store(true, Ordering::Relaxed),
            }
        }
        self.hold_all_to(all);
    }

    /// Counts what every user and project uses, unless it is counted. Under the lock of tenants.
    fn count_for_quotas(&self) -> Result<()> {
        let quotas = &self.shared.quotas;
        // one that failed is begun again: who was counted is known
        if quotas.is_on() && !quotas.is_counting() {
            return Ok(());
        }
        if self.shared.read_only.load(Ordering::Relaxed) {
            return Err(Error::ReadOnly);
        }
        quotas.begin();
        // who did not see that has ended; what they made is known to the node tables
        self.domains.iter().for_each(|d| d.wait_for_operations());
        // (what one that has failed never committed is not counted, and does not change any more)
        self.settle_all();
        self.count_inodes_for_quotas()
    }

    /// Where some inodes cannot be read they are counted by who first changes them, or by the next call.
    ///
    /// # Errors
    /// Of the device, when all others are counted.
    fn count_inodes_for_quotas(&self) -> Result<()> {
        let quotas = &self.shared.quotas;
        self.visit_inodes(&mut |c| {
            let st = c.state.write();
            if !st.deleted {
                quotas.count(c.ino, st.owners(), || st.content_blocks());
            }
        })?;
        quotas.end_counting();
        Ok(())
    }

    /// Calls `f` with all inodes that are in the node tables, of domains that work.
    ///
    /// # Errors
    /// The first one of the device. What could be read was visited.
    fn visit_inodes(&self, f: &mut dyn FnMut(&Cell)) -> Result<()> {
        let (mut n, mut unread) = (0, None);
        for d in self.domains.iter() {
            let visited = d.nodes.for_each_used(&mut |node, entry| {
                if entry.flags & OVERFLOW != 0 {
                    return Ok(());
                }
                let found = match self.find(node.inode()) {
                    // the others can be there
                    Err(e) if d.failed().is_none() => {
                        tracing::warn!(
                            "{}: not counted for limits of users, groups and directories: {e}",
                            node.inode()
                        );
                        unread.get_or_insert(e);
                        return Ok(());
                    }
                    found => found?,
                };
                if let Some(c) = found {
                    f(&c);
                    drop(c);
                    n += 1;
                    if n % LOOK == 0 {
                        self.maybe_evict(d);
                    }
                }
                Ok(())
            });
            if let Err(e) = visited {
                tracing::warn!("{}: what it has is not counted for limits of users, groups and directories: {e}", d.id);
                if d.failed().is_none() && !matches!(e, Error::Corrupt(_)) {
                    unread.get_or_insert(e);
                }
            }
        }
        unread.map_or(Ok(()), Err)
    }

    /// Reads the limits of the volume, and counts what is used: before anybody uses it. Limits that cannot be read do not
    /// hold.
    pub(super) fn load_quotas(&self) -> Result<()> {
        let Some(root) = self.find(InodeNo::ROOT)? else { return Ok(()) };
        let mut entries = Vec::new();
        for (name, value) in root.state.read().xattrs.iter().filter(|(n, _)| quota::RECORDS.contains(&&**n)) {
            match quota::decode(name, value) {
                Ok(of_record) => entries.extend(of_record),
                // the limits of another record hold
                Err(e) => {
                    let name = String::from_utf8_lossy(name);
                    tracing::error!("limits in {name} do not hold: {e}; run fsck.braidfs");
                }
            }
        }
        if entries.is_empty() {
            return Ok(());
        }
        self.shared.quotas.begin();
        if let Err(e) = self.count_inodes_for_quotas() {
            tracing::error!("what users, groups and directories use is not all counted: {e}");
        }
        entries.iter().for_each(|e| self.hold_to(e));
        *self.quotas.lock() = entries.into_iter().map(|e| (owner_of(&e), e)).collect();
        Ok(())
    }

    /// What is told of the room below a directory whose project has limits.
    pub(super) fn limit_statfs(&self, ino: InodeNo, s: &mut StatFs) {
        if !self.shared.quotas.is_on() {
            return;
        }
        let Ok(Some(c)) = self.find(ino) else { return };
        let project = c.state.read().project();
        if project == 0 {
            return;
        }
        let used = self.shared.quotas.used(QuotaOwner::Project(project));
        if let Some(most) = used.most_blocks {
            s.blocks = most.max(used.blocks).min(s.blocks.max(used.blocks));
            s.free = s.free.min(s.blocks - used.blocks);
            s.available = s.available.min(s.free);
        }
        if let Some(most) = used.most_inodes {
            s.inodes = most.max(used.inodes).min(s.inodes.max(used.inodes));
            s.inodes_free = s.inodes_free.min(s.inodes - used.inodes);
        }
    }
}
