//! Free slots: which table block an operation looks in, and the bitmap of taken slots.
//!
//! Each slot of threads has a cursor; a cursor stays in one table block until it is full, so that nodes made one after
//! the other share table blocks, and nodes made by different threads do not share locks.

use super::{NODES_PER_BLOCK, NodeTable};
use crate::error::Result;
use crate::space::PairsAhead;
use crate::space::paired::{Counts, Paired, Place, TableEntry};
use braidfs_format::node::{NodeEntry, OVERFLOW};
use braidfs_format::{BLOCK_BYTES, BlockAddr, NodeId};
use braidfs_sync::slots::Line;
use braidfs_sync::{Mutex, rank};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering::Relaxed};

/// A table block that was not read yet may have any number of free slots.
const UNKNOWN: u16 = u16::MAX;

/// The node table of a group.
#[derive(Debug)]
pub(super) struct NodeGroup {
    pub number: u32,
    pub blocks: Box<[Line<TableBlock>]>,
    /// Of each, whether a cursor is in it. Apart from the blocks: others look here before they touch one.
    claimed: Box<[AtomicBool]>,
    /// Some block changed since it was written.
    pub dirty: AtomicBool,
    /// No slot is given out any more; read under a block's lock.
    pub closed: AtomicBool,
    /// No slot is given out for the time being; those that are taken stay. Read under a block's lock, too.
    pub kept: AtomicBool,
    /// How often each was written.
    pub counts: Arc<Counts>,
}

/// A block of it.
#[derive(Debug)]
pub(super) struct TableBlock {
    /// Free slots, a hint; exact under the lock once the block was read.
    free: AtomicU16,
    pub state: Mutex<BlockState, rank::TableBlock>,
}

/// What its lock protects.
#[derive(Debug, Default)]
pub(super) struct BlockState {
    pub table: Paired<NodeEntry>,
    /// The running view, once the block was read.
    taken: Option<[u64; 4]>,
    /// Where to look for the next free slot.
    next: u32,
}

impl NodeGroup {
    pub fn new(number: u32, blocks: u32, counts: Arc<Counts>) -> Self {
        let block = |_| Line(TableBlock { free: AtomicU16::new(UNKNOWN), state: Mutex::default() });
        Self {
            number,
            blocks: (0..blocks).map(block).collect(),
            claimed: (0..blocks).map(|_| AtomicBool::new(false)).collect(),
            dirty: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            kept: AtomicBool::new(false),
            counts,
        }
    }
    pub fn len(&self) -> u32 {
        self.blocks.len() as u32
    }
    /// Where block `index` lies.
    fn place(&self, table: &NodeTable, index: u32) -> Place<'_> {
        let g = table.store.geometry();
        Place { pair: g.node_table_addr(self.number, index), counts: &self.counts, index: g.node_table_index(index) }
    }
}

/// Where a thread looks for slots.
#[derive(Debug, Default)]
pub(super) struct Cursor {
    at: Option<(Arc<NodeGroup>, u32)>,
}

impl Cursor {
    fn leave(&mut self) {
        if let Some((group, index)) = self.at.take() {
            group.claimed[index as usize].store(false, Relaxed);
        }
    }
}

impl BlockState {
    /// The committed entries; the first time, the taken slots become known as well.
    pub fn entries(&mut self, table: &NodeTable, group: &NodeGroup, index: u32) -> Result<&[NodeEntry]> {
        let entries = self.table.load(&table.store, group.place(table, index), &table.resident)?;
        self.taken.get_or_insert_with(|| taken_slots(entries, group.number, index));
        Ok(entries)
    }
    /// Takes the entries from what `ahead` has read, or reads, where it can.
    pub fn fill_ahead(&mut self, table: &NodeTable, group: &NodeGroup, index: u32, ahead: &mut PairsAhead) {
        if self.table.is_loaded() {
            return;
        }
        let (store, place) = (&table.store, group.place(table, index));
        let end = BlockAddr(place.pair.0 + 2 * u64::from(group.len() - index));
        if let Some(pair) = ahead.pair(store, place.pair, end) {
            // what does not hold is read again, and told of then
            let _ = self.table.fill(pair, store.volume, place, &table.resident);
        }
    }
    /// The committed entries, to be changed.
    pub fn edit(&mut self, table: &NodeTable, group: &NodeGroup, index: u32) -> Result<&mut [NodeEntry]> {
        self.entries(table, group, index)?;
        self.table.edit(&table.store, group.place(table, index), &table.resident)
    }
    /// Marks a slot of a block that was read.
    pub fn set_taken(&mut self, slot: u32, on: bool) {
        let Some(taken) = &mut self.taken else { return };
        let (word, bit) = ((slot / 64) as usize, 1u64 << (slot % 64));
        if on {
            taken[word] |= bit;
        } else {
            taken[word] &= !bit;
        }
    }
    /// Free slots; more than a block has where it was not read.
    pub fn free(&self) -> u16 {
        self.taken.map_or(UNKNOWN, |t| (NODES_PER_BLOCK - t.iter().map(|w| w.count_ones()).sum::<u32>()) as u16)
    }
    fn find(&self, from: u32) -> Option<u32> {
        let taken = self.taken?;
        let free = |from: u32, to: u32| {
            let mut slot = from;
            while slot < to {
                let word = taken[(slot / 64) as usize] >> (slot % 64);
                // zeros come in from above: the count is exact where it ends within the word
                let ones = word.trailing_ones();
                if ones < 64 - slot % 64 {
                    return Some(slot + ones).filter(|&s| s < to);
                }
                slot += 64 - slot % 64;
            }
            None
        };
        free(from, NODES_PER_BLOCK).or_else(|| free(0, from.min(NODES_PER_BLOCK)))
    }
}

/// Slots that the committed view says are in use, and those of group 0 that are never given out: 0 is no node, 1 is the
/// root.
fn taken_slots(entries: &[NodeEntry], group: u32, index: u32) -> [u64; 4] {
    let mut taken = [0u64; 4];
    if (group, index) == (0, 0) {
        taken[0] = 0b11;
    }
    for (slot, _) in entries.iter().enumerate().filter(|(_, e)| e.used()) {
        taken[slot / 64] |= 1 << (slot % 64);
    }
    taken
}

impl NodeTable {
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
        if before.is_none() {
            self.uncounted.fetch_sub(1, Relaxed);
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
            let place = group.place(self, index);
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

    /// Takes a free slot, in the table block of `near` if it has one and no other thread is in it, and the generation that
    /// its node gets. The slots 0 and 1 of group 0 are never given out. `None` where there is none in the domain's groups.
    ///
    /// # Errors
    /// Of the device, or `Corrupt`.
    pub fn alloc(&self, near: Option<NodeId>) -> Result<Option<(NodeId, u32)>> {
        let taken = self.alloc_slot(near);
        self.evict_entries();
        taken
    }

    fn alloc_slot(&self, near: Option<NodeId>) -> Result<Option<(NodeId, u32)>> {
        let mut cursor = self.cursors.mine().lock();
        let behind = near.and_then(|near| self.go_near(&mut cursor, near));
        if let Some((group, index)) = &cursor.at
            && let Some(taken) = self.take_in(group, *index, behind)?
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
            for group in order().filter(|g| !g.kept.load(Relaxed)) {
                let first = if group.number == from.0 { from.1 } else { 0 };
                for index in (first..group.len()).chain(0..first) {
                    let claimed = &group.claimed[index as usize];
                    if !share && claimed.load(Relaxed) || group.blocks[index as usize].free.load(Relaxed) == 0 {
                        continue;
                    }
                    if !share && claimed.swap(true, Relaxed) {
                        continue;
                    }
                    match self.take_in(group, index, None) {
                        Ok(Some(taken)) => {
                            if !share {
                                cursor.at = Some((group.clone(), index));
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

    fn take_in(&self, group: &NodeGroup, index: u32, from: Option<u32>) -> Result<Option<(NodeId, u32)>> {
        if group.blocks[index as usize].free.load(Relaxed) == 0 {
            return Ok(None);
        }
        self.with_block(group, index, |block| {
            // asked under the block's lock, before it is read: it may be another domain's by now
            if group.closed.load(Relaxed) || group.kept.load(Relaxed) {
                return Ok(None);
            }
            block.entries(self, group, index)?;
            let Some(slot) = block.find(from.unwrap_or(block.next)) else { return Ok(None) };
            let old = block.entries(self, group, index)?[slot as usize].generation;
            block.set_taken(slot, true);
            block.next = slot + 1;
            let node = self.store.geometry().node(group.number, index * NODES_PER_BLOCK + slot);
            Ok(Some((node, old.wrapping_add(1).max(1))))
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
            if !block.entries(self, &group, index)?[slot as usize].used() {
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
            block.entries(self, &group, index)?;
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
                if group.place(self, index).is_blank() && block.state.lock().taken.is_none() {
                    continue;
                }
                let inodes = self.with_block(&group, index, |block| {
                    let entries = block.entries(self, &group, index)?.iter();
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

    /// Nodes that the domain's groups have room for.
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
