//! Node tables of groups that leave the domain: see `crate::space::giving`.

use super::NodeTable;
use super::slots::NodeGroup;
use crate::error::Result;
use braidfs_format::NodeId;
use braidfs_format::geometry::NODES_PER_BLOCK;
use braidfs_format::node::NodeEntry;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// What has become of a group of which no node is to be given out any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Closing {
    Done,
    /// Some of its nodes are in use.
    InUse,
    /// The domain has too few others.
    Needed,
}

impl NodeTable {
    /// Whether no node of group `number` is in use or taken. Reads the table blocks that were not read yet; one that does
    /// not hold counts as in use.
    pub(crate) fn is_empty(&self, number: u32) -> bool {
        let Some(group) = self.group(number) else { return false };
        self.count_group(&group);
        self.unused(&group)
    }

    /// No node of group `number` is given out from now on, and its slots count as none, where none is in use and the domain can do
    /// without them: beside as many inodes as have `changed` and are not written yet, about, for which a commit may need some.
    pub(crate) fn close_group(&self, number: u32, changed: impl FnOnce() -> u64) -> Closing {
        let Some(group) = self.group(number) else { return Closing::InUse };
        self.count_group(&group);
        let closed = group.closed.swap(true, Relaxed);
        if !self.unused(&group) {
            group.closed.store(closed, Relaxed);
            return Closing::InUse;
        }
        if closed {
            return Closing::Done;
        }
        let slots = self.slots();
        self.free.add(-(slots as i64));
        self.total.fetch_sub(slots, Relaxed);
        // who is promised some from here on is told of these no more
        if self.is_few_without(0) {
            self.few.store(true, Relaxed);
        }
        if self.is_short(changed) {
            self.reopen_group(number);
            return Closing::Needed;
        }
        Closing::Done
    }

    /// Whether the domain can do without the slots of so many groups, in which none is in use; a hint.
    pub(crate) fn can_spare(&self, groups: u64) -> bool {
        let leave = groups * self.slots();
        let reserve = self.reserve_of(self.total().saturating_sub(leave));
        self.has_free(leave + reserve / 4 * 3)
    }

    /// Whether without the slots of so many groups there would be so few that operations have to ask for them
    /// ([`Self::is_short`]).
    pub(crate) fn is_few_without(&self, groups: u64) -> bool {
        let leave = groups * self.slots();
        !self.has_free(leave + 2 * self.reserve_of(self.total().saturating_sub(leave)))
    }

    /// Gives numbers of the group again, after [`Self::close_group`] whose group could not be given up.
    pub(crate) fn reopen_group(&self, number: u32) {
        let Some(group) = self.group(number).filter(|g| g.closed.load(Relaxed)) else { return };
        self.free.add(self.slots() as i64);
        self.total.fetch_add(self.slots(), Relaxed);
        group.closed.store(false, Relaxed);
    }

    /// Slots of a group in which none is taken.
    fn slots(&self) -> u64 {
        u64::from(self.store.geometry().nodes())
    }

    /// Whether so many slots are free. Reads no more of the table blocks that were not read yet than are needed for that.
    fn has_free(&self, least: u64) -> bool {
        let enough = || self.free.sum() >= least as i64;
        let groups = || self.groups.read().values().cloned().collect::<Vec<_>>();
        enough()
            || self.uncounted.load(Relaxed) > 0
                && groups().iter().any(|g| {
                    self.count_group(g);
                    enough()
                })
    }

    /// Has no slot of group `number` given out for the time being (`true`), but to a commit that finds none elsewhere
    /// ([`Self::alloc_overflow`]); or again.
    pub(crate) fn keep_group(&self, number: u32, kept: bool) {
        let Some(group) = self.group(number) else { return };
        group.kept.store(kept, Relaxed);
        // who is about to take a slot has done so when its block's lock is free
        group.blocks.iter().for_each(|b| drop(b.state.lock()));
    }

    /// Free slots of groups of which none is given out to an inode, but of closed ones, whose slots count as none anyway.
    pub(crate) fn kept_free(&self) -> u64 {
        let kept = |g: &&Arc<NodeGroup>| g.kept.load(Relaxed) && !g.closed.load(Relaxed);
        let groups: Vec<_> = self.groups.read().values().filter(kept).cloned().collect();
        let free = |g: &Arc<NodeGroup>| -> u64 {
            self.count_group(g);
            g.blocks.iter().map(|b| u64::from(b.state.lock().free())).filter(|n| *n <= u64::from(NODES_PER_BLOCK)).sum()
        };
        groups.iter().map(free).sum()
    }

    /// Calls `f` with every node of group `number` in the committed view, in order, no lock held.
    ///
    /// # Errors
    /// The first of `f`, of the device, or `Corrupt`.
    pub(crate) fn for_each_used_of(
        &self,
        number: u32,
        f: &mut dyn FnMut(NodeId, NodeEntry) -> Result<()>,
    ) -> Result<()> {
        self.group(number).map_or(Ok(()), |group| self.for_each_in(&group, f, &mut Err))
    }

    /// Forgets a closed group that is the domain's no longer.
    pub(crate) fn drop_group(&self, number: u32) {
        let Some(group) = self.groups.write().remove(&number) else { return };
        // its slots have not counted since it was closed
        for block in &group.blocks {
            block.state.lock().table.forget(&self.resident);
        }
    }

    fn group(&self, number: u32) -> Option<Arc<NodeGroup>> {
        self.groups.read().get(&number).cloned()
    }

    /// Whether all slots are known to be free. (Group 0 always has some taken.)
    fn unused(&self, group: &NodeGroup) -> bool {
        // under each lock: who takes a slot looks there whether the group is closed
        group.blocks.iter().all(|b| u32::from(b.state.lock().free()) == NODES_PER_BLOCK)
    }
}
