//! The blocks of a group's node table, with the bitmap of taken slots, and the cursor of a thread that looks for free ones.

use crate::error::Result;
use crate::space::PairsAhead;
use crate::space::paired::{Counts, Paired, Place, Residency};
use crate::store::Store;
use braidfs_format::BlockAddr;
use braidfs_format::geometry::NODES_PER_BLOCK;
use braidfs_format::node::NodeEntry;
use braidfs_sync::slots::Line;
use braidfs_sync::{Mutex, rank};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering::Relaxed};

/// A table block that was not read yet may have any number of free slots.
pub(super) const UNKNOWN: u16 = u16::MAX;

/// Where table blocks are read, and what counts those that are kept.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tables<'a> {
    pub store: &'a Store,
    pub resident: &'a Residency,
}

/// The node table of a group. Each allocation of a slot reads it: so it lies apart from the count of its references.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct NodeGroup {
    pub number: u32,
    pub blocks: Box<[Line<TableBlock>]>,
    /// Of each, whether a cursor is in it. Apart from the blocks: others look here before they touch one.
    pub claimed: Box<[AtomicBool]>,
    /// Some block changed since it was written.
    pub dirty: AtomicBool,
    /// No slot is given out any more; read under a block's lock.
    pub closed: AtomicBool,
    /// No slot is given out for the time being but to a commit that finds no other; those that are taken stay. Read under a
    /// block's lock, too.
    pub kept: AtomicBool,
    /// How often each was written.
    pub counts: Arc<Counts>,
}

/// A block of it.
#[derive(Debug)]
pub(super) struct TableBlock {
    /// Free slots, a hint; exact under the lock once the block was read.
    pub free: AtomicU16,
    pub state: Mutex<BlockState, rank::TableBlock>,
}

/// What its lock protects.
#[derive(Debug, Default)]
pub(super) struct BlockState {
    pub table: Paired<NodeEntry>,
    /// The running view, once the block was read.
    pub taken: Option<[u64; 4]>,
    /// Where to look for the next free slot.
    pub next: u32,
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
    /// Slots of a group of `blocks` table blocks that no inode gets: the last ones.
    ///
    /// Nodes that hold what an inode's record has no room for are made by commits, and where one has none its domain fails. A
    /// leaf of extents is half full at least, which are 32 extents, so that a domain full of files in pieces of one block has a
    /// leaf for 32 blocks, and a group has two slots for each block; names and attributes may take half of them. Which slots
    /// they are is fixed: who makes inodes counts nothing.
    pub fn reserved(blocks: u32) -> u32 {
        (blocks * NODES_PER_BLOCK / 64).max(16)
    }
    /// Behind the last slot of a block that an inode can get.
    pub fn inodes_end(&self, index: u32) -> u32 {
        let behind = (self.len() - 1 - index) * NODES_PER_BLOCK;
        NODES_PER_BLOCK - Self::reserved(self.len()).saturating_sub(behind).min(NODES_PER_BLOCK)
    }
    /// Where block `index` lies.
    pub fn place(&self, store: &Store, index: u32) -> Place<'_> {
        let g = store.geometry();
        Place { pair: g.node_table_addr(self.number, index), counts: &self.counts, index: g.node_table_index(index) }
    }
}

/// Where a thread looks for slots.
#[derive(Debug, Default)]
pub(super) struct Cursor {
    pub at: Option<(Arc<NodeGroup>, u32)>,
}

impl Cursor {
    pub fn leave(&mut self) {
        if let Some((group, index)) = self.at.take() {
            group.claimed[index as usize].store(false, Relaxed);
        }
    }
}

impl BlockState {
    /// The committed entries; the first time, the taken slots become known as well.
    pub fn entries(&mut self, tables: Tables<'_>, group: &NodeGroup, index: u32) -> Result<&[NodeEntry]> {
        let entries = self.table.load(tables.store, group.place(tables.store, index), tables.resident)?;
        self.taken.get_or_insert_with(|| taken_slots(entries, group.number, index));
        Ok(entries)
    }
    /// Takes the entries from what `ahead` has read, or reads, where it can.
    pub fn fill_ahead(&mut self, tables: Tables<'_>, group: &NodeGroup, index: u32, ahead: &mut PairsAhead) {
        if self.table.is_loaded() {
            return;
        }
        let (store, place) = (tables.store, group.place(tables.store, index));
        let end = BlockAddr(place.pair.0 + 2 * u64::from(group.len() - index));
        if let Some(pair) = ahead.pair(store, place.pair, end) {
            // what does not hold is read again, and told of then
            let _ = self.table.fill(pair, store.volume, place, tables.resident);
        }
    }
    /// The committed entries, to be changed.
    pub fn edit(&mut self, tables: Tables<'_>, group: &NodeGroup, index: u32) -> Result<&mut [NodeEntry]> {
        self.entries(tables, group, index)?;
        self.table.edit(tables.store, group.place(tables.store, index), tables.resident)
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
    /// A free slot before `end`, from `from` on if there is one.
    pub fn find(&self, from: u32, end: u32) -> Option<u32> {
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
        free(from, end).or_else(|| free(0, from.min(end)))
    }
}

/// Slots that the committed view says are in use, and those of group 0 that are never given out: 0 is no node, 1 is the
/// root.
pub(super) fn taken_slots(entries: &[NodeEntry], group: u32, index: u32) -> [u64; 4] {
    let mut taken = [0u64; 4];
    if (group, index) == (0, 0) {
        taken[0] = 0b11;
    }
    for (slot, _) in entries.iter().enumerate().filter(|(_, e)| e.used()) {
        taken[slot / 64] |= 1 << (slot % 64);
    }
    taken
}
