//! Free slots: which table block an operation looks in, and how many there are.
//!
//! Each slot of threads has a cursor; a cursor stays in one table block until it is full, so that nodes made one after
//! the other share table blocks, and nodes made by different threads do not share locks.

use super::NodeTable;
use super::slots::{BlockState, Cursor, NodeGroup, TableBlock, Tables, UNKNOWN, taken_slots};
use crate::error::Result;
use crate::space::paired::TableEntry;
use braidfs_format::geometry::{Geometry, NODES_PER_BLOCK};
use braidfs_format::node::{NodeEntry, OVERFLOW};
use braidfs_format::{BLOCK_BYTES, NodeId};
use std::sync::atomic::Ordering::Relaxed;

/// For what a slot is, and so where it may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum For {
    /// An inode, or any other node as long as there is such a slot.
    Inode,
    /// An overflow node: also one of the reserve.
    Overflow,
    /// An overflow node for which there is none elsewhere: also one of a group of which none is given out for the time being.
    LastOverflow,
}

impl For {
    fn may_have(self, group: &NodeGroup) -> bool {
        self == Self::LastOverflow || !group.kept.load(Relaxed)
    }
}

/// Nodes that an inode needs at most beside its record for its attributes (64 KiB); its extents and names seldom need more.
const NODES_OF_INODE: u64 = 20;

impl NodeTable {
    pub(super) fn tables(&self) -> Tables<'_> {
        Tables { store: &self.store, resident: &self.resident }
    }

    /// Runs `f` with a table block, then brings the counts up to date.
    pub(super) fn with_block<R>(
        &self,
        group: &NodeGroup,
        index: u32,
        f: impl FnOnce(&mut BlockState) -> Result<R>,
    ) -> Result<R> {
        let block = &group.blocks[index as usize];
        let mut state = block.state.lock();
        let before = state.taken.map(|_| state.free());
        let result = f(&mut state);
        self.count(block, &state, before);
        result
    }

    /// Brings the counts of free slots up to date; `before` is the block's, if it was read before.
    fn count(&self, block: &TableBlock, state: &BlockState, before: Option<u16>) {
        let now = state.free();
        if state.taken.is_none() || before == Some(now) {
            return;
        }
        block.free.store(now, Relaxed);
        self.free.add(i64::from(now) - i64::from(before.unwrap_or(0)));
        // the last one: now it is known, as it was before the mount
        if before.is_none() && self.uncounted.fetch_sub(1, Relaxed) == 1 && self.free.sum() <= self.reserve() as i64 {
            self.few.store(true, Relaxed);
        }
    }

    /// Reads the blocks of a group's node table that were not read yet, all at once, and keeps only their bitmaps.
    pub(super) fn count_group(&self, group: &NodeGroup) {
        if group.blocks.iter().all(|b| b.free.load(Relaxed) != UNKNOWN) {
            return;
        }
        let (store, first) = (&self.store, self.store.geometry().node_table_addr(group.number, 0));
        let mut buf = vec![0u8; 2 * BLOCK_BYTES * group.blocks.len()];
        if let Err(error) = store.read(first, &mut buf) {
            tracing::warn!(group = group.number, %error, "node table not counted");
            return;
        }
        for ((index, block), pair) in (0u32..).zip(&group.blocks).zip(buf.chunks(2 * BLOCK_BYTES)) {
            let mut state = block.state.lock();
            // Read by others meanwhile, and perhaps changed: theirs is newer.
            if state.taken.is_some() {
                continue;
            }
            let place = group.place(&self.store, index);
            let read = NodeEntry::decode(pair, store.volume, place.pair).and_then(|(copy, seq, entries)| {
                place.check::<NodeEntry>(pair, store.volume, (copy, seq))?;
                Ok(entries)
            });
            match read {
                Ok(entries) => {
                    state.taken = Some(taken_slots(&entries, group.number, index));
                    self.count(block, &state, None);
                }
                Err(error) => tracing::warn!(group = group.number, index, %error, "node table block not counted"),
            }
        }
    }

    /// Takes a free slot for an inode, in the table block of `near` if it has one and no other thread is in it, and the
    /// generation that its node gets. The slots 0 and 1 of group 0 are never given out, and those of the reserve
    /// ([`NodeGroup::reserved`]) not for inodes. `None` where there is none in the domain's groups.
    ///
    /// # Errors
    /// Of the device, or `Corrupt`.
    pub fn alloc(&self, near: Option<NodeId>) -> Result<Option<(NodeId, u32)>> {
        let taken = self.alloc_slot(near, For::Inode);
        if matches!(taken, Ok(None)) {
            self.few.store(true, Relaxed);
        }
        self.evict_entries();
        taken
    }

    /// [`Self::alloc`] for a node that holds what the record of an inode has no room for; where there is no other slot one of
    /// the reserve, and at last one of a group that is kept ([`Self::keep_group`]): a commit that finds none fails its domain,
    /// and what has been promised to it counts these slots.
    ///
    /// # Errors
    /// As [`Self::alloc`].
    pub fn alloc_overflow(&self, near: NodeId) -> Result<Option<(NodeId, u32)>> {
        let mut taken = self.alloc_slot(Some(near), For::Inode);
        if matches!(taken, Ok(None)) {
            self.few.store(true, Relaxed);
            taken = self.alloc_slot(Some(near), For::Overflow);
        }
        if matches!(taken, Ok(None)) {
            taken = self.alloc_slot(Some(near), For::LastOverflow);
        }
        self.evict_entries();
        taken
    }

    /// Inodes that a whole group that nobody owns has room for.
    pub(crate) fn inodes_of_group(geometry: Geometry) -> u64 {
        u64::from(geometry.nodes() - NodeGroup::reserved(geometry.node_blocks()))
    }

    /// Slots of the reserve, free or not.
    pub(crate) fn reserve(&self) -> u64 {
        self.reserve_of(self.total())
    }

    /// [`Self::reserve`] of a domain with room for so many nodes.
    pub(super) fn reserve_of(&self, total: u64) -> u64 {
        let g = self.store.geometry();
        let groups = total.div_ceil(u64::from(g.nodes()));
        groups * u64::from(NodeGroup::reserved(g.node_blocks()))
    }

    /// Whether so little of the reserve is left beside inodes that have changed, about, and are not written yet, that an
    /// operation after which a commit may need more of it must see to that first. Cheap where there are other slots.
    #[inline]
    pub(crate) fn is_short(&self, changed: impl FnOnce() -> u64) -> bool {
        self.few.load(Relaxed) && {
            let free = self.free();
            free < self.reserve() / 4 * 3 || changed() * NODES_OF_INODE > free
        }
    }

    /// [`Self::is_short`] of who may take the reserve down to its half: he adds nothing, and seldom needs any.
    pub(crate) fn is_short_to_move(&self, changed: impl FnOnce() -> u64) -> bool {
        self.few.load(Relaxed) && (!self.has_half_the_reserve() || changed() * NODES_OF_INODE > self.free())
    }

    /// Whether half of the reserve is there, at least.
    pub(crate) fn has_half_the_reserve(&self) -> bool {
        self.free() >= self.reserve() / 2
    }

    /// Free slots for inodes.
    pub(crate) fn free_for_inodes(&self) -> u64 {
        self.free().saturating_sub(self.kept_free()).saturating_sub(self.reserve())
    }

    fn alloc_slot(&self, near: Option<NodeId>, what: For) -> Result<Option<(NodeId, u32)>> {
        let inode = what == For::Inode;
        let mut cursor = self.cursors.mine().lock();
        let behind = near.and_then(|near| self.go_near(&mut cursor, near));
        if let Some((group, index)) = &cursor.at
            && let Some(taken) = self.take_in(group, *index, behind, what)?
        {
            return Ok(Some(taken));
        }
        let from = cursor.at.as_ref().map_or((0, 0), |(g, index)| (g.number, *index));
        cursor.leave();
        let groups: Vec<_> = self.groups.read().values().cloned().collect();
        let start = groups.partition_point(|g| g.number < from.0);
        let order = || groups[start..].iter().chain(&groups[..start]);
        // First a table block that no other cursor is in, then any.
        for share in [false, true] {
            for group in order().filter(|g| what.may_have(g)) {
                let first = if group.number == from.0 { from.1 } else { 0 };
                for index in (first..group.len()).chain(0..first) {
                    let claimed = &group.claimed[index as usize];
                    if !share && claimed.load(Relaxed)
                        || group.blocks[index as usize].free.load(Relaxed) == 0
                        || inode && group.inodes_end(index) == 0
                    {
                        continue;
                    }
                    if !share && claimed.swap(true, Relaxed) {
                        continue;
                    }
                    match self.take_in(group, index, None, what) {
                        Ok(Some(taken)) => {
                            if !share {
                                cursor.at = Some((group.clone(), index));
                            }
                            if inode && self.few.load(Relaxed) && self.free.sum() > 2 * self.reserve() as i64 {
                                self.few.store(false, Relaxed);
                            }
                            return Ok(Some(taken));
                        }
                        other => {
                            if !share {
                                claimed.store(false, Relaxed);
                            }
                            other?;
                        }
                    }
                }
            }
        }
        Ok(None)
    }

    /// Has the cursor go to the table block of `near`, unless that is full or another cursor is in it: so what hangs in one
    /// directory shares table blocks, but not with other threads. Where it is in that block, the slot behind `near`.
    fn go_near(&self, cursor: &mut Cursor, near: NodeId) -> Option<u32> {
        let (number, slot) = self.store.geometry().node_place(near)?;
        let (index, slot) = (slot / NODES_PER_BLOCK, slot % NODES_PER_BLOCK);
        if cursor.at.as_ref().is_some_and(|(group, at)| (group.number, *at) == (number, index)) {
            return Some(slot + 1);
        }
        let groups = self.groups.read();
        let group = groups.get(&number)?;
        let claimed = &group.claimed[index as usize];
        let free = |g: &NodeGroup| g.blocks[index as usize].free.load(Relaxed) > 0 && !g.kept.load(Relaxed);
        if claimed.load(Relaxed) || !free(group) || claimed.swap(true, Relaxed) {
            return None;
        }
        cursor.leave();
        cursor.at = Some((group.clone(), index));
        Some(slot + 1)
    }

    fn take_in(&self, group: &NodeGroup, index: u32, from: Option<u32>, what: For) -> Result<Option<(NodeId, u32)>> {
        if group.blocks[index as usize].free.load(Relaxed) == 0 {
            return Ok(None);
        }
        self.with_block(group, index, |block| {
            // asked under the block's lock, before it is read: it may be another domain's by now
            if group.closed.load(Relaxed) || !what.may_have(group) {
                return Ok(None);
            }
            block.entries(self.tables(), group, index)?;
            let end = if what == For::Inode { group.inodes_end(index) } else { NODES_PER_BLOCK };
            let Some(slot) = block.find(from.unwrap_or(block.next), end) else { return Ok(None) };
            let old = block.entries(self.tables(), group, index)?[slot as usize].generation;
            block.set_taken(slot, true);
            block.next = slot + 1;
            let node = self.store.geometry().node(group.number, index * NODES_PER_BLOCK + slot);
            Ok(Some((node, old.wrapping_add(1 + self.mount).max(1))))
        })
    }

    /// Undoes [`NodeTable::alloc`] for a node that no record names: the slot is free at once.
    pub fn release(&self, node: NodeId) {
        let Ok((group, index, slot)) = self.locate(node) else {
            debug_assert!(false, "{node} is not of {}", self.domain);
            return;
        };
        self.quarantined.lock().remove(&node);
        let done = self.with_block(&group, index, |block| {
            if !block.entries(self.tables(), &group, index)?[slot as usize].used() {
                block.set_taken(slot, false);
            }
            Ok(())
        });
        if let Err(error) = done {
            // The slot stays taken until the next mount.
            tracing::warn!(%node, %error, "node slot not released");
        }
    }

    /// Marks the slot of `node` taken though the committed view has no entry for it: recovery found the node in a
    /// roll-forward record.
    ///
    /// # Errors
    /// `Corrupt` where the node is not of this domain; of the device.
    pub fn take(&self, node: NodeId) -> Result<()> {
        let (group, index, slot) = self.locate(node)?;
        self.with_block(&group, index, |block| {
            block.entries(self.tables(), &group, index)?;
            block.set_taken(slot, true);
            Ok(())
        })
    }

    /// Inodes of the committed view, without the nodes that hold what their records have no room for. Reads the table blocks
    /// that were ever written; one that does not hold counts as full.
    pub fn count_inodes(&self) -> u64 {
        let groups: Vec<_> = self.groups.read().values().cloned().collect();
        let mut all = 0;
        for group in groups {
            for index in 0..group.len() {
                // what replay changed is in memory, and may not be written
                let block = &group.blocks[index as usize];
                if group.place(&self.store, index).is_blank() && block.state.lock().taken.is_none() {
                    continue;
                }
                let inodes = self.with_block(&group, index, |block| {
                    let entries = block.entries(self.tables(), &group, index)?.iter();
                    Ok(entries.filter(|e| e.used() && e.flags & OVERFLOW == 0).count() as u64)
                });
                all += inodes.unwrap_or_else(|error| {
                    tracing::warn!(group = group.number, index, %error, "inodes of a node table block not counted");
                    u64::from(NODES_PER_BLOCK)
                });
            }
            self.evict_entries();
        }
        all
    }

    /// Nodes that the domain's groups have room for, but for those that are about to leave it.
    pub fn total(&self) -> u64 {
        self.total.load(Relaxed)
    }

    /// Free slots. Reads the table blocks that were not read yet; one that does not hold counts as full.
    pub fn free(&self) -> u64 {
        if self.uncounted.load(Relaxed) > 0 {
            let groups: Vec<_> = self.groups.read().values().cloned().collect();
            groups.iter().for_each(|group| self.count_group(group));
        }
        self.free.sum().max(0) as u64
    }
}
