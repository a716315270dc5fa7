//! Node tables of groups that leave the domain: see `crate::space::giving`.

use super::NodeTable;
use super::slots::NodeGroup;
use crate::error::Result;
use braidfs_format::NodeId;
use braidfs_format::geometry::NODES_PER_BLOCK;
use braidfs_format::node::NodeEntry;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

impl NodeTable {
    /// Whether no node of group `number` is in use or taken. Reads the table blocks that were not read yet; one that does
    /// not hold counts as in use.
    pub(crate) fn is_empty(&self, number: u32) -> bool {
        let Some(group) = self.group(number) else { return false };
        self.count_group(&group);
        self.unused(&group)
    }

    /// No node of group `number` is given out from now on, where none is; whether that is so.
    pub(crate) fn close_group(&self, number: u32) -> bool {
        let Some(group) = self.group(number) else { return false };
        self.count_group(&group);
        group.closed.store(true, Relaxed);
        if self.unused(&group) {
            return true;
        }
        group.closed.store(false, Relaxed);
        false
    }

    /// Gives numbers of the group again, after [`Self::close_group`] whose group could not be given up.
    pub(crate) fn reopen_group(&self, number: u32) {
        if let Some(group) = self.group(number) {
            group.closed.store(false, Relaxed);
        }
    }

    /// Has no slot of group `number` given out for the time being (`true`), but to a commit that finds none elsewhere
    /// ([`Self::alloc_overflow`]); or again.
    pub(crate) fn keep_group(&self, number: u32, kept: bool) {
        let Some(group) = self.group(number) else { return };
        group.kept.store(kept, Relaxed);
        // who is about to take a slot has done so when its block's lock is free
        group.blocks.iter().for_each(|b| drop(b.state.lock()));
    }

    /// Free slots of groups of which none is given out to an inode.
    pub(crate) fn kept_free(&self) -> u64 {
        let groups: Vec<_> = self.groups.read().values().filter(|g| g.kept.load(Relaxed)).cloned().collect();
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
        self.group(number).map_or(Ok(()), |group| self.for_each_in(&group, f))
    }

    /// Forgets a closed group that is the domain's no longer.
    pub(crate) fn drop_group(&self, number: u32) {
        let Some(group) = self.groups.write().remove(&number) else { return };
        let mut free = 0;
        for block in &group.blocks {
            let mut state = block.state.lock();
            free += i64::from(state.free());
            state.table.forget(&self.resident);
        }
        self.free.add(-free);
        self.total.fetch_sub(u64::from(self.store.geometry().nodes()), Relaxed);
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
