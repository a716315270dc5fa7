//! Node tables of groups that leave the domain: see `crate::space::giving`.

use super::NodeTable;
use super::slots::NodeGroup;
use braidfs_format::geometry::NODES_PER_BLOCK;
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
