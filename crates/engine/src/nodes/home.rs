//! Checkpoint of the node table, and forgetting entries that are not in use.

use super::NodeTable;
use crate::error::Result;
use crate::space::HomeBatch;
use crate::space::paired::PairCopy;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

impl NodeTable {
    /// Writes what changed in the committed view since the last call, and says how many blocks. `Space::write_home` must
    /// follow, which writes how often that was. Does not flush: the caller does, before the next call (which overwrites
    /// the other copies) and before the journal's tail moves.
    ///
    /// # Errors
    /// Of the device; what was not written stays marked as changed.
    pub fn write_home(&self) -> Result<u64> {
        let _one = self.home.lock();
        let groups: Vec<_> = self.groups.read().values().cloned().collect();
        let store = &*self.store;
        let mut batch = HomeBatch::new();
        let mut end_write = |(group, index): (Arc<super::slots::NodeGroup>, u32), written: Option<PairCopy>| {
            group.blocks[index as usize].state.lock().table.end_write(written);
            match written {
                Some(copy) => group.counts.wrote(store.geometry().node_table_index(index), copy.seq),
                None => group.dirty.store(true, Relaxed),
            }
        };
        for group in &groups {
            // The flag is cleared before the state is read: a change in between is written twice rather than never.
            if !group.dirty.swap(false, Relaxed) {
                continue;
            }
            for (index, block) in (0u32..).zip(&group.blocks) {
                let pair = store.geometry().node_table_addr(group.number, index);
                let next = block.state.lock().table.begin_write(self.domain, store.volume, pair);
                if let Some((next, bytes)) = next {
                    batch.push(pair, next, bytes, (group.clone(), index));
                }
            }
            if batch.full() {
                batch.write(store, &mut end_write)?;
            }
        }
        batch.write(store, &mut end_write)?;
        self.evict_entries();
        Ok(batch.written())
    }

    /// Forgets the entries of table blocks not used lately, when there are many in memory.
    pub(super) fn evict_entries(&self) {
        if self.resident.sweep_due() {
            self.sweep_entries();
        }
    }

    /// [`Self::evict_entries`] of all that can be forgotten, as long as there are many.
    pub(crate) fn sweep_entries(&self) {
        let groups: Vec<_> = self.groups.read().values().cloned().collect();
        // Twice: the first time takes away the mark of use.
        for group in groups.iter().chain(&groups) {
            for block in &group.blocks {
                if let Some(mut state) = block.state.try_lock() {
                    state.table.evict(&self.resident);
                }
            }
            if !self.resident.excessive() {
                break;
            }
        }
        self.resident.swept();
    }
}
