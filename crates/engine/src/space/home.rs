//! Checkpoint: the committed view goes home, each table block to the copy of its pair that is not current.

use super::Space;
use super::group::Group;
use super::home_batch::HomeBatch;
use super::paired::PairCopy;
use crate::error::Result;
use braidfs_format::group::{SegmentTable, claim_seq, table_mark};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

enum Key {
    SegmentTable(Arc<Group>),
    Owners(Arc<Group>, u32, u32),
}

impl Space {
    /// Writes what changed in the committed view since the last call, and says how many blocks: for `checkpoint`, after the
    /// node table, whose writes the segment tables count. Does not flush: the caller does, before the next call (which
    /// overwrites the other copies), before the domain header tells of `checkpoint` and [`Space::table_sum`], and before
    /// the journal's tail moves.
    ///
    /// # Errors
    /// Of the device; what was not written stays marked as changed.
    pub fn write_home(&self, checkpoint: u64) -> Result<u64> {
        self.write_home_without(checkpoint, &[])
    }

    /// [`Self::write_home`], with the segment tables of the groups `leaving`, which are closed, as the next claim would
    /// write them: their marks are then 0.
    ///
    /// # Errors
    /// As [`Self::write_home`].
    pub fn write_home_without(&self, checkpoint: u64, leaving: &[u32]) -> Result<u64> {
        let _one = self.home.lock();
        let groups: Vec<_> = self.groups.read().values().cloned().collect();
        let (store, geometry) = (&*self.store, self.store.geometry());
        let mut batch = HomeBatch::new();
        let mut end_write = |key, written| self.end_write(key, written);
        for group in &groups {
            // Flags are cleared before the state is read: a change in between is written twice rather than never.
            if group.owners_dirty.swap(false, Relaxed) {
                for (segment, half, table) in group.owner_tables() {
                    let pair = geometry.owners_addr(group.number, segment, half);
                    if let Some((next, block)) = table.lock().begin_write(self.domain, store.volume, pair) {
                        batch.push(pair, next, block, Key::Owners(group.clone(), segment, half));
                    }
                }
            }
            if batch.full() {
                batch.write(store, &mut end_write)?;
            }
        }
        batch.write(store, &mut end_write)?;
        for group in &groups {
            let leaves = leaving.contains(&group.number);
            if group.table_dirty.swap(false, Relaxed) | group.counts.take_changed() | leaves {
                let entries: Vec<_> = group.segments.iter().map(|s| s.state.lock().entry).collect();
                let pair = geometry.segment_table_addr(group.number);
                let mut next = group.table.lock().other();
                let mut written = group.counts.written(checkpoint);
                if leaves {
                    next.seq = claim_seq(group.epoch.wrapping_add(1));
                    written.counts.fill(0);
                }
                let block =
                    SegmentTable::encode(&entries, &written, self.domain.0, store.volume, pair, next.index, next.seq);
                batch.push(pair, next, block, Key::SegmentTable(group.clone()));
            }
            if batch.full() {
                batch.write(store, &mut end_write)?;
            }
        }
        batch.write(store, &mut end_write)?;
        self.evict_owners();
        Ok(batch.written())
    }

    /// Forgets owner tables not used lately, when there are many in memory.
    pub(super) fn evict_owners(&self) {
        if self.owners.sweep_due() {
            self.sweep_owners();
        }
    }

    /// [`Self::evict_owners`] of all that can be forgotten, as long as there are many.
    pub(crate) fn sweep_owners(&self) {
        let groups: Vec<_> = self.groups.read().values().cloned().collect();
        // Twice: the first time takes away the mark of use.
        for group in groups.iter().chain(&groups) {
            for (_, _, table) in group.owner_tables() {
                if let Some(mut table) = table.try_lock() {
                    table.evict(&self.owners);
                }
            }
            if !self.owners.excessive() {
                break;
            }
        }
        self.owners.swept();
    }

    fn end_write(&self, key: Key, written: Option<PairCopy>) {
        match key {
            Key::SegmentTable(group) => match written {
                Some(copy) => {
                    let old = std::mem::replace(&mut *group.table.lock(), copy);
                    let less = table_mark(group.number, old.seq);
                    let more = table_mark(group.number, copy.seq);
                    self.table_sum.fetch_add(more.wrapping_sub(less), Relaxed);
                }
                None => group.table_dirty.store(true, Relaxed),
            },
            Key::Owners(group, segment, half) => {
                group.end_owner_write(segment, half, written);
                match written {
                    Some(copy) => {
                        group.counts.wrote(self.store.geometry().owners_index(segment, half), copy.seq);
                    }
                    None => group.owners_dirty.store(true, Relaxed),
                }
            }
        }
    }
}
