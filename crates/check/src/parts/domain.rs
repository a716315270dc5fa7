//! A domain and its groups, as their tables should be.

use crate::pair::PairState;
use crate::report::Log;
use braidfs_format::domain::DomainHeader;
use braidfs_format::geometry::NODES_PER_BLOCK;
use braidfs_format::group::{Owner, SegmentEntry, Written};
use braidfs_format::node::NodeEntry;
use braidfs_format::{BlockAddr, Geometry, NodeId};
use braidfs_store::Store;
use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};

/// A block to write over the damaged copy of a pair.
#[derive(Debug)]
pub struct Mend {
    /// The place of the copy.
    pub addr: BlockAddr,
    /// The whole block as it should be there.
    pub block: Vec<u8>,
}

/// The node table of a group. A block of it takes memory only where it says something.
#[derive(Debug, Default)]
pub struct Table {
    blocks: Vec<Option<Box<[NodeEntry]>>>,
    /// No slot below this is free, but those that were never asked for.
    full: u32,
}

impl Table {
    /// Appends a block of [`NODES_PER_BLOCK`] entries.
    pub fn push(&mut self, block: Vec<NodeEntry>) {
        let blank = block.iter().all(|e| *e == NodeEntry::default());
        self.blocks.push((!blank).then(|| block.into_boxed_slice()));
    }

    /// The entry of `slot`.
    pub fn get(&self, slot: u32) -> Option<NodeEntry> {
        match self.blocks.get((slot / NODES_PER_BLOCK) as usize)? {
            Some(block) => block.get((slot % NODES_PER_BLOCK) as usize).copied(),
            None => Some(NodeEntry::default()),
        }
    }

    /// The entry of `slot`, to set it.
    pub fn get_mut(&mut self, slot: u32) -> Option<&mut NodeEntry> {
        self.full = self.full.min(slot);
        let block = self.blocks.get_mut((slot / NODES_PER_BLOCK) as usize)?;
        let blank = || vec![NodeEntry::default(); NODES_PER_BLOCK as usize].into();
        block.get_or_insert_with(blank).get_mut((slot % NODES_PER_BLOCK) as usize)
    }

    /// The slots in use.
    pub fn used(&self) -> impl Iterator<Item = (u32, &NodeEntry)> {
        let blocks = (0u32..).zip(&self.blocks).filter_map(|(at, b)| Some((at * NODES_PER_BLOCK, b.as_deref()?)));
        blocks.flat_map(|(first, block)| (first..).zip(block)).filter(|(_, e)| e.used())
    }

    /// The first slot from `from` on that is not in use, nor `kept`. Who asks again and again, always with the same `from`, does not
    /// go through all that are in use each time.
    pub fn free(&mut self, from: u32, kept: impl Fn(u32) -> bool) -> Option<u32> {
        let end = self.blocks.len() as u32 * NODES_PER_BLOCK;
        self.full = (self.full.max(from)..end).find(|slot| self.is_unused(*slot)).unwrap_or(end);
        (self.full..end).find(|slot| self.is_unused(*slot) && !kept(*slot))
    }

    fn is_unused(&self, slot: u32) -> bool {
        self.get(slot).is_some_and(|e| !e.used())
    }

    /// The entries of block `index`.
    pub fn block(&self, index: u32) -> Cow<'_, [NodeEntry]> {
        match self.blocks.get(index as usize) {
            Some(Some(block)) => Cow::Borrowed(block),
            _ => Cow::Owned(vec![NodeEntry::default(); NODES_PER_BLOCK as usize]),
        }
    }
}

/// Tables of one group.
#[derive(Debug)]
pub struct Group {
    /// Number of the group in the volume.
    pub number: u32,
    /// Epoch of the claim, from the BAT.
    pub epoch: u32,
    /// How many blocks it has.
    pub blocks: u32,
    /// The header must be written again.
    pub header_bad: bool,
    /// The segment table as it is on the device; `None` where it is lost.
    pub segments: Option<Vec<SegmentEntry>>,
    /// The node table as it should be.
    pub entries: Table,
    /// Node table blocks that differ from the device.
    pub entries_dirty: Vec<bool>,
    /// Node table blocks that were lost.
    pub lost: Vec<u32>,
    /// Node table blocks that may be older than the volume: the other copy is lost.
    pub doubtful: Vec<u32>,
    /// The segment table may be older than the volume.
    pub segments_doubtful: bool,
    /// The segment table is that of the last checkpoint for certain, also where its other copy does not hold.
    pub segments_proven: bool,
    /// The segment table is to be written as it is here.
    pub segments_dirty: bool,
    /// Halves of owner tables that are lost, or may be old, and what they say until all is counted: of no node block
    /// how many records are live in it.
    pub owners_lost: Vec<(u32, Vec<Owner>)>,
    /// Copies that do not hold, beside one that does.
    pub mend: Vec<Mend>,
    /// `seq` of the segment table; 0 where it is lost.
    pub table_seq: u64,
    /// How often the other tables must have been written; nothing where the segment table is lost.
    pub written: Written,
    /// The segment table must be written anew, since it does not count right.
    pub counts_wrong: bool,
}

impl Group {
    /// The lowest `seq` that table `index` ([`Written`]) may have.
    pub fn floor(&self, index: usize) -> u64 {
        let base = self.table_seq & !u64::from(u32::MAX);
        self.written.counts.get(index).map_or(0, |c| base + u64::from(*c))
    }

    /// The segment table is that of the last checkpoint: of the other tables those are new enough that were written as often as it
    /// says.
    pub fn believe_segments(&mut self) {
        (self.segments_doubtful, self.segments_proven) = (false, true);
        self.doubtful.retain(|index| self.entries_dirty[*index as usize]);
    }

    /// Whether the device lost the newest copy of table `index`, of which `state` was found: then notes it.
    pub fn lost_write(
        &self,
        log: &mut Log,
        state: &PairState,
        index: usize,
        code: u32,
        what: std::fmt::Arguments<'_>,
    ) -> bool {
        let (Some((_, seq)), floor) = (state.current(), self.floor(index)) else { return false };
        if seq < floor {
            log.add(code, None, format!("{what}: is number {seq:#x}, should be {floor:#x}"));
        }
        seq < floor
    }
}

/// Whether `len` blocks from `addr`, in a group of `blocks` blocks, are data blocks of it: not its metadata, nor of
/// `journal` (first block, blocks).
pub fn is_data(g: Geometry, addr: BlockAddr, len: u64, blocks: u32, journal: Option<(u64, u64)>) -> bool {
    let at = addr.0 - g.group_start(g.group_of(addr)).0;
    at >= u64::from(g.meta_blocks())
        && at + len <= u64::from(blocks)
        && journal.is_none_or(|(start, n)| addr.0 >= start.saturating_add(n) || addr.0 + len <= start)
}

/// The tables of one domain, as they are and as they should be.
#[derive(Debug)]
pub struct Domain {
    /// Number of the domain in the volume.
    pub number: u16,
    /// Its header; `None` where it is lost.
    pub header: Option<DomainHeader>,
    /// The header must be written again.
    pub header_dirty: bool,
    /// One copy of it does not hold: that may have been the newer one.
    pub header_damaged: bool,
    /// One of its tables may be older than the volume, and nothing on the device but the header's sum or a copy that does not hold
    /// tells so.
    pub tables_doubted: bool,
    /// The journal cannot be replayed and is to be emptied.
    pub reset_journal: bool,
    /// What its journal held is given up, or may be: the tables may say of a block what was so before it was used anew.
    pub journal_lost: bool,
    /// Its groups by number.
    pub groups: BTreeMap<u32, Group>,
    /// Nodes whose table entries were found again by a scan.
    pub recovered: HashSet<NodeId>,
    /// Those of them that are in use for certain, and whose newest record is lost: an older one stands in for it.
    pub outdated: HashSet<NodeId>,
    /// Its nodes that were to take a name of another inode, and did not come to be: a repair that is cut off must not
    /// let them look as if they had. So none of these numbers is given out, and their records keep their versions.
    pub undecided: HashSet<NodeId>,
    /// Groups all of whose blocks were taken for valid, so that the replay of the journal gave none of them out.
    pub doubted: HashSet<u32>,
    /// Overflow nodes that a repair has laid out, and those that its inodes name on the device and will not name any more: not
    /// free before the inodes' new records are in the tables.
    pub fresh: Vec<NodeId>,
    /// See `fresh`.
    pub replaced: Vec<NodeId>,
}

impl Domain {
    /// The journal: first block and blocks.
    pub fn journal(&self) -> Option<(u64, u64)> {
        self.header.map(|h| (h.journal_start.get(), u64::from(h.journal_blocks.get())))
    }

    /// Whether `len` blocks from `addr` are data blocks of one group of this domain (no metadata, no journal).
    pub fn holds(&self, store: &Store, addr: BlockAddr, len: u64) -> bool {
        let g = store.geometry();
        let Some(group) = self.groups.get(&g.group_of(addr)) else { return false };
        is_data(g, addr, len, group.blocks, self.journal())
    }

    /// The table entry of a node of this domain.
    pub fn entry(&self, store: &Store, node: NodeId) -> Option<NodeEntry> {
        let (group, slot) = store.geometry().node_place(node)?;
        self.groups.get(&group)?.entries.get(slot)
    }

    /// Sets the table entry of a node of this domain.
    pub fn set_entry(&mut self, store: &Store, node: NodeId, entry: NodeEntry) {
        let Some((group, slot)) = store.geometry().node_place(node) else { return };
        let Some(g) = self.groups.get_mut(&group) else { return };
        if let Some(e) = g.entries.get_mut(slot) {
            *e = entry;
            g.entries_dirty[(slot / NODES_PER_BLOCK) as usize] = true;
        }
    }

    /// Frees the slot of a node; its generation stays.
    pub fn free_node(&mut self, store: &Store, node: NodeId) {
        if let Some(e) = self.entry(store, node) {
            self.set_entry(store, node, NodeEntry { generation: e.generation, ..NodeEntry::default() });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use braidfs_format::node::USED;

    #[test]
    fn what_is_in_use_is_not_gone_through_again() {
        let used = NodeEntry { flags: USED, ..NodeEntry::default() };
        let mut table = Table::default();
        (0..3).for_each(|_| table.push(vec![used; NODES_PER_BLOCK as usize]));
        table.push(vec![NodeEntry::default(); NODES_PER_BLOCK as usize]);
        let first = 3 * NODES_PER_BLOCK;
        for slot in first..first + 5 {
            assert_eq!((table.free(2, |_| false), table.full), (Some(slot), slot));
            *table.get_mut(slot).unwrap() = used;
        }
        assert_eq!((table.free(2, |s| s < first + 7), table.full), (Some(first + 7), first + 5));
        // one that is freed is found, but not below what is asked for
        for slot in [0, 9] {
            *table.get_mut(slot).unwrap() = NodeEntry::default();
        }
        assert_eq!((table.free(2, |_| false), table.full), (Some(9), 9));
        let mut full = Table::default();
        full.push(vec![used; NODES_PER_BLOCK as usize]);
        assert_eq!((full.free(0, |_| false), full.full), (None, NODES_PER_BLOCK));
    }
}
