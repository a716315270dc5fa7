//! The counts of all owners.

use super::count::Count;
use crate::error::{Error, Result};
use crate::types::*;
use braidfs_sync::slots::PerSlot;
use braidfs_sync::{Mutex, rank};
use crossbeam::utils::CachePadded;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Bound;
use std::sync::Arc;
use std::sync::atomic::{
    AtomicBool, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};

/// So many owners have counts of their own before those without limits are laid to rest.
const ACTIVE_MAX: usize = 1024;

/// Which limits do not hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Force {
    /// All hold.
    #[default]
    None,
    /// Those of users and groups do not: somebody with CAP_SYS_RESOURCE asks (ext4's `ignore_hardlimit`).
    User,
    /// None does: it was accepted before.
    All,
}

/// For whom an inode counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owners {
    /// Its user.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// Its project; 0: none.
    pub project: u32,
}

impl Owners {
    /// The owners: the user, the group, the project.
    pub(crate) fn each(self) -> impl Iterator<Item = QuotaOwner> {
        let project = (self.project > 0).then_some(QuotaOwner::Project(self.project));
        [QuotaOwner::User(self.uid), QuotaOwner::Group(self.gid)].into_iter().chain(project)
    }
}

/// What an owner uses, counted down from its limits.
#[derive(Debug)]
struct Usage {
    blocks: Count,
    inodes: Count,
}

impl Usage {
    fn new() -> Self {
        Self { blocks: Count::new(), inodes: Count::new() }
    }

    /// Takes both or nothing.
    fn take(&self, blocks: u64, inodes: u64, forced: bool) -> bool {
        if !self.blocks.take(blocks, forced) {
            return false;
        }
        let both = self.inodes.take(inodes, forced);
        if !both {
            self.blocks.give(blocks);
        }
        both
    }

    fn give(&self, blocks: u64, inodes: u64) {
        self.blocks.give(blocks);
        self.inodes.give(inodes);
    }

    fn used(&self) -> Used {
        let (blocks, most_blocks) = self.blocks.used_and_limit();
        let (inodes, most_inodes) = self.inodes.used_and_limit();
        Used { blocks, inodes, most_blocks, most_inodes }
    }
}

/// Blocks and inodes that an owner uses, and may have at most by now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Used {
    pub blocks: u64,
    pub inodes: u64,
    /// `None`: no limit.
    pub most_blocks: Option<u64>,
    pub most_inodes: Option<u64>,
}

/// The counts of a slot of threads, by owner. Nobody else changes them.
type Known = HashMap<QuotaOwner, Arc<Usage>>;

/// See the module.
#[derive(Debug, Default)]
pub struct Quotas {
    on: AtomicBool,
    counting: AtomicBool,
    /// How often the limit of an owner was changed. Who writes looks at it.
    changes: CachePadded<AtomicU64>,
    /// Inodes that are counted, while counting goes on. By parts of their numbers.
    counted: [Mutex<HashSet<InodeNo>, rank::QuotaCounted>; 16],
    /// What each slot has met: it takes no lock of others, and no reference count.
    known: PerSlot<Mutex<Known, rank::QuotaKnown>>,
    all: Mutex<All, rank::QuotaOwners>,
    /// How many owners lists were made of.
    #[cfg(test)]
    pub(super) listed: AtomicU64,
}

/// All owners. A [`Usage`] takes some lines for each slot, which many owners of a volume never need.
#[derive(Debug, Default)]
struct All {
    /// Have limits, or were charged by operations lately.
    active: BTreeMap<QuotaOwner, Arc<Usage>>,
    /// Blocks and inodes of the others that use anything. No owner is in both.
    at_rest: BTreeMap<QuotaOwner, (u64, u64)>,
    /// How many were active when others were last laid to rest, and stayed so.
    stayed: usize,
}

impl All {
    /// Whether so many are active that those without limits are to be laid to rest: who may give files to many owners
    /// would else take memory for each.
    fn are_many(&self) -> bool {
        self.active.len() >= ACTIVE_MAX.max(2 * self.stayed)
    }

    /// Those without limits that no slot knows take the memory of two numbers, or none where they use nothing.
    fn lay_to_rest(&mut self) {
        let Self { active, at_rest, stayed } = self;
        active.retain(|owner, usage| {
            // whoever gets to know one does it under the lock of all
            let Some(usage) = Arc::get_mut(usage).filter(|u| !u.blocks.is_limited() && !u.inodes.is_limited()) else {
                return true;
            };
            let Used { blocks, inodes, .. } = usage.used();
            if blocks > 0 || inodes > 0 {
                at_rest.insert(*owner, (blocks, inodes));
            }
            false
        });
        *stayed = active.len();
    }

    fn activate(&mut self, owner: QuotaOwner) -> Arc<Usage> {
        let Self { active, at_rest, .. } = self;
        let new = || {
            let usage = Usage::new();
            let (blocks, inodes) = at_rest.remove(&owner).unwrap_or_default();
            usage.take(blocks, inodes, true);
            Arc::new(usage)
        };
        active.entry(owner).or_insert_with(new).clone()
    }
}

impl Quotas {
    /// Whether anything is counted.
    #[inline]
    pub fn is_on(&self) -> bool {
        // who sees that sees that the counting has begun
        self.on.load(Acquire)
    }

    /// Counts from now on. Operations that are under way may not have seen that: they must have ended before the inodes that
    /// there are are visited.
    pub fn begin(&self) {
        self.counting.store(true, Relaxed);
        self.on.store(true, Release);
    }

    /// All inodes were visited.
    pub fn end_counting(&self) {
        self.counting.store(false, Release);
        for part in &self.counted {
            *part.lock() = HashSet::new();
        }
    }

    /// Whether not all inodes have been visited: it goes on, or it failed.
    pub fn is_counting(&self) -> bool {
        self.counting.load(Acquire)
    }

    fn counted(&self, ino: InodeNo) -> &Mutex<HashSet<InodeNo>, rank::QuotaCounted> {
        &self.counted[(ino.0 % self.counted.len() as u64) as usize]
    }

    /// An inode whose cell the caller has locked, and that nobody else sees before it is let go: counted with these blocks,
    /// unless it was counted before.
    pub fn count(&self, ino: InodeNo, of: Owners, blocks: impl FnOnce() -> u64) {
        if !self.is_counting() {
            return;
        }
        let mut counted = self.counted(ino).lock();
        // the counting may have ended meanwhile, and forgotten whom it counted
        let first = self.is_counting() && counted.insert(ino);
        drop(counted);
        if first {
            let blocks = blocks();
            of.each().for_each(|owner| self.found(owner, blocks));
        }
    }

    /// An owner has one more inode that was there before.
    fn found(&self, owner: QuotaOwner, blocks: u64) {
        let mut all = self.all.lock();
        if let Some(usage) = all.active.get(&owner).cloned() {
            drop(all);
            usage.take(blocks, 1, true);
        } else {
            let (has, inodes) = all.at_rest.entry(owner).or_default();
            (*has, *inodes) = (has.saturating_add(blocks), *inodes + 1);
        }
    }

    /// A new inode was charged for.
    pub fn note_counted(&self, ino: InodeNo) {
        if self.is_counting() {
            self.counted(ino).lock().insert(ino);
        }
    }

    /// Runs `f` with the counts of an owner.
    fn with<R>(&self, owner: QuotaOwner, f: impl FnOnce(&Usage) -> R) -> R {
        let mut known = self.known.mine().lock();
        if let Some(usage) = known.get(&owner) {
            return f(usage);
        }
        let mut all = self.all.lock();
        let usage = all.activate(owner);
        let many = all.are_many();
        drop(all);
        let r = f(known.entry(owner).or_insert(usage));
        drop(known);
        if many {
            self.lay_to_rest();
        }
        r
    }

    /// Forgets the counts of owners that have no limits. Who charges one of them next has counts made for it again.
    #[cold]
    fn lay_to_rest(&self) {
        for known in self.known.iter() {
            known.lock().clear();
        }
        self.all.lock().lay_to_rest();
    }

    /// Charges all owners, or none.
    ///
    /// # Errors
    /// [`Error::Quota`] of the owner that may not have so much.
    pub(super) fn take(&self, of: Owners, blocks: u64, inodes: u64, force: Force) -> Result<()> {
        for (before, owner) in of.each().enumerate() {
            if let Err(e) = self.take_of(owner, blocks, inodes, force) {
                of.each().take(before).for_each(|owner| self.give_of(owner, blocks, inodes));
                return Err(e);
            }
        }
        Ok(())
    }

    /// Charges one owner.
    ///
    /// # Errors
    /// [`Error::Quota`].
    pub(crate) fn take_of(&self, owner: QuotaOwner, blocks: u64, inodes: u64, force: Force) -> Result<()> {
        let forced = match owner {
            QuotaOwner::User(n) | QuotaOwner::Group(n) => force != Force::None || n == 0,
            QuotaOwner::Project(_) => force == Force::All,
        };
        let taken = self.with(owner, |u| u.take(blocks, inodes, forced));
        if taken { Ok(()) } else { Err(Error::Quota(owner)) }
    }

    /// One owner uses so much less.
    pub(crate) fn give_of(&self, owner: QuotaOwner, blocks: u64, inodes: u64) {
        self.with(owner, |u| u.give(blocks, inodes));
    }

    /// Charges whatever the limits are.
    pub fn force(&self, of: Owners, blocks: u64, inodes: u64) {
        if blocks > 0 || inodes > 0 {
            of.each().for_each(|owner| self.force_of(owner, blocks, inodes));
        }
    }

    /// Charges one owner, whatever its limits are.
    pub(crate) fn force_of(&self, owner: QuotaOwner, blocks: u64, inodes: u64) {
        self.with(owner, |u| u.take(blocks, inodes, true));
    }

    /// So much is in use no longer.
    pub fn give(&self, of: Owners, blocks: u64, inodes: u64) {
        if blocks > 0 || inodes > 0 {
            of.each().for_each(|owner| self.give_of(owner, blocks, inodes));
        }
    }

    /// Has an owner keep to these numbers of blocks and inodes.
    pub(crate) fn set_limits(&self, owner: QuotaOwner, blocks: Option<u64>, inodes: Option<u64>) {
        let usage = self.all.lock().activate(owner);
        usage.blocks.set_limit(blocks);
        usage.inodes.set_limit(inodes);
        // who sees that sees the limit
        self.changes.fetch_add(1, Release);
    }

    /// How often limits were set.
    #[inline]
    pub(crate) fn limit_changes(&self) -> u64 {
        self.changes.load(Acquire)
    }

    /// What an owner uses. Exact while nobody charges. Nothing that threads of other owners write is looked at where this
    /// slot has met the owner.
    pub(crate) fn used(&self, owner: QuotaOwner) -> Used {
        if let Some(usage) = self.known.mine().lock().get(&owner) {
            return usage.used();
        }
        let all = self.all.lock();
        let Some(usage) = all.active.get(&owner).cloned() else {
            let (blocks, inodes) = all.at_rest.get(&owner).copied().unwrap_or_default();
            return Used { blocks, inodes, ..Used::default() };
        };
        drop(all);
        usage.used()
    }

    /// Whether an owner has a limit of space; never root as a user or group.
    pub(crate) fn limits_space(&self, owner: QuotaOwner) -> bool {
        if matches!(owner, QuotaOwner::User(0) | QuotaOwner::Group(0)) {
            return false;
        }
        let mut known = self.known.mine().lock();
        if let Some(usage) = known.get(&owner) {
            return usage.blocks.is_limited();
        }
        // whose files are looked at only needs no counts of its own
        let Some(usage) = self.all.lock().active.get(&owner).cloned() else { return false };
        known.entry(owner).or_insert(usage).blocks.is_limited()
    }

    /// All owners that use anything, or have limits, or were charged lately.
    pub(crate) fn owners(&self) -> Vec<QuotaOwner> {
        let all = self.all.lock();
        let owners: Vec<_> = all.active.keys().chain(all.at_rest.keys()).copied().collect();
        #[cfg(test)]
        self.listed.fetch_add(owners.len() as u64, Relaxed);
        owners
    }

    /// The first of [`Self::owners`] behind one, in their order; `None`: the first of all.
    pub(crate) fn owner_after(&self, after: Option<QuotaOwner>) -> Option<QuotaOwner> {
        let all = self.all.lock();
        let behind = (after.map_or(Bound::Unbounded, Bound::Excluded), Bound::Unbounded);
        let next = [all.active.range(behind).next().map(|e| e.0), all.at_rest.range(behind).next().map(|e| e.0)];
        #[cfg(test)]
        self.listed.fetch_add(next.iter().flatten().count() as u64, Relaxed);
        next.into_iter().flatten().min().copied()
    }

    /// Runs `f` while nobody else can look at what all slots have in common.
    #[cfg(test)]
    pub(super) fn with_all_locked<R>(&self, f: impl FnOnce() -> R) -> R {
        let _all = self.all.lock();
        f()
    }

    #[cfg(test)]
    pub(super) fn active(&self) -> usize {
        self.all.lock().active.len()
    }
}
