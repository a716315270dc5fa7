//! Where things lie: pure arithmetic on block, segment, group and node numbers.
//!
//! A group of `s` segments (512 blocks each) opens with its metadata, in blocks from the group's start:
//!
//! | blocks | holds |
//! |---|---|
//! | 0, 1 | group header, shadow pair |
//! | 2, 3 | segment table, shadow pair |
//! | 4 + 4 i + 2 h, +1 | owner table of segment `i`, half `h` (256 blocks each), shadow pair |
//! | 4 + 4 s + 2 j, +1 | node table block `j` of `4 s`, shadow pair |
//! | 4 + 12 s … | data |
//!
//! A *shadow pair* is two neighbouring blocks written in turn; the valid one with the newer `seq` counts.

use crate::{BlockAddr, Corrupt, NodeId};

/// Blocks of a segment (2 MiB).
pub const SEGMENT_BLOCKS: u32 = 512;
/// Node table entries in a block.
pub const NODES_PER_BLOCK: u32 = 254;
/// Node table blocks per segment of a group.
pub const NODE_BLOCKS_PER_SEGMENT: u32 = 4;
/// Smallest and largest group, in segments.
pub const GROUP_SEGMENTS: std::ops::RangeInclusive<u32> = 2..=32;

/// Sizes that follow from the group size; copied everywhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Segments per group, 2 to 32.
    pub segments: u32,
    /// Number of groups of the volume (the last of each device may be short).
    pub groups: u32,
}

impl Geometry {
    /// # Errors
    /// Where `group_blocks` is not 2, 4, … 32 whole segments.
    pub fn new(group_blocks: u32, groups: u32) -> Result<Self, Corrupt> {
        let segments = group_blocks / SEGMENT_BLOCKS;
        if !group_blocks.is_multiple_of(SEGMENT_BLOCKS)
            || !GROUP_SEGMENTS.contains(&segments)
            || !segments.is_power_of_two()
        {
            return Err(Corrupt::new("geometry", format!("group of {group_blocks} blocks")));
        }
        Ok(Self { segments, groups })
    }
    /// Blocks of a whole group.
    pub fn group_blocks(&self) -> u32 {
        self.segments * SEGMENT_BLOCKS
    }
    /// Metadata blocks at the start of a group.
    pub fn meta_blocks(&self) -> u32 {
        4 + 12 * self.segments
    }
    /// Node table blocks (pairs) of a group.
    pub fn node_blocks(&self) -> u32 {
        NODE_BLOCKS_PER_SEGMENT * self.segments
    }
    /// Nodes of a group.
    pub fn nodes(&self) -> u32 {
        self.node_blocks() * NODES_PER_BLOCK
    }
    /// Longest journal in a domain's first group, of `blocks` blocks: half of it, and where possible one whole segment stays
    /// free of it.
    pub fn journal_max(&self, blocks: u32) -> u32 {
        let whole = blocks / SEGMENT_BLOCKS;
        if whole >= 2 {
            (blocks / 2).min((whole - 1) * SEGMENT_BLOCKS - self.meta_blocks())
        } else {
            (blocks / 2).min(blocks - self.meta_blocks() - 64)
        }
    }
    /// How many groups lie on `blocks` blocks, and how many blocks the last of them has. A rest that is too short for a
    /// group's metadata and some data is no group.
    pub fn groups_on(&self, blocks: u64) -> (u64, u32) {
        let size = u64::from(self.group_blocks());
        let (whole, rest) = (blocks / size, (blocks % size) as u32);
        if rest >= self.least_group() { (whole + 1, rest) } else { (whole, self.group_blocks()) }
    }
    /// Blocks of the shortest group that is one.
    pub fn least_group(&self) -> u32 {
        SEGMENT_BLOCKS.max(self.meta_blocks() + 65)
    }
    /// First block of `group`.
    pub fn group_start(&self, group: u32) -> BlockAddr {
        BlockAddr(u64::from(group) * u64::from(self.group_blocks()))
    }
    /// Group of `addr`.
    pub fn group_of(&self, addr: BlockAddr) -> u32 {
        (addr.0 / u64::from(self.group_blocks())) as u32
    }
    /// Whether `addr .. addr + len` lies in the volume.
    pub fn contains(&self, addr: BlockAddr, len: u64) -> bool {
        let end = u64::from(self.groups) * u64::from(self.group_blocks());
        addr.0.checked_add(len).is_some_and(|e| e <= end)
    }
    /// Whether `addr .. addr + len` can hold a file's content: it lies in one group of the volume, behind its tables.
    pub fn holds_data(&self, addr: BlockAddr, len: u64) -> bool {
        let at = addr.0 % u64::from(self.group_blocks());
        self.contains(addr, len) && at >= u64::from(self.meta_blocks()) && at + len <= u64::from(self.group_blocks())
    }
    /// Group, segment in the group and block in the segment of `addr`.
    pub fn split(&self, addr: BlockAddr) -> (u32, u32, u32) {
        let in_group = (addr.0 % u64::from(self.group_blocks())) as u32;
        (self.group_of(addr), in_group / SEGMENT_BLOCKS, in_group % SEGMENT_BLOCKS)
    }
    /// First block of segment `segment` of `group`.
    pub fn segment_start(&self, group: u32, segment: u32) -> BlockAddr {
        BlockAddr(self.group_start(group).0 + u64::from(segment * SEGMENT_BLOCKS))
    }
    /// The group header's pair.
    pub fn header_addr(&self, group: u32) -> BlockAddr {
        self.group_start(group)
    }
    /// The segment table's pair.
    pub fn segment_table_addr(&self, group: u32) -> BlockAddr {
        BlockAddr(self.group_start(group).0 + 2)
    }
    /// The pair of half `half` of the owner table of `segment`.
    pub fn owners_addr(&self, group: u32, segment: u32, half: u32) -> BlockAddr {
        BlockAddr(self.group_start(group).0 + u64::from(4 + 4 * segment + 2 * half))
    }
    /// The pair of node table block `index`.
    pub fn node_table_addr(&self, group: u32, index: u32) -> BlockAddr {
        BlockAddr(self.group_start(group).0 + u64::from(4 + 4 * self.segments + 2 * index))
    }
    /// Which of the counted tables of a group ([`crate::group::Written`]) half `half` of the owner table of `segment` is.
    pub fn owners_index(&self, segment: u32, half: u32) -> usize {
        (2 * segment + half) as usize
    }
    /// Which of them node table block `index` is.
    pub fn node_table_index(&self, index: u32) -> usize {
        (2 * self.segments + index) as usize
    }
    /// The node with number `slot` in `group`.
    pub fn node(&self, group: u32, slot: u32) -> NodeId {
        NodeId(u64::from(group) * u64::from(self.nodes()) + u64::from(slot))
    }
    /// Group and slot of a node, `None` past the last group.
    pub fn node_place(&self, node: impl Into<NodeId>) -> Option<(u32, u32)> {
        let node = node.into();
        let n = u64::from(self.nodes());
        let group = node.0 / n;
        (group < u64::from(self.groups) && node.0 != 0).then_some((group as u32, (node.0 % n) as u32))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_do_not_overlap_and_round_trip() {
        for segments in [2, 4, 8, 16, 32] {
            let g = Geometry::new(segments * SEGMENT_BLOCKS, 7).unwrap();
            let last_owner = g.owners_addr(3, segments - 1, 1).0 + 2;
            assert_eq!(last_owner, g.node_table_addr(3, 0).0);
            let end = g.node_table_addr(3, g.node_blocks() - 1).0 + 2;
            assert_eq!(end - g.group_start(3).0, u64::from(g.meta_blocks()));
            assert!(g.meta_blocks() < SEGMENT_BLOCKS);
            for slot in [0, 1, g.nodes() - 1] {
                assert_eq!(g.node_place(g.node(5, slot)), Some((5, slot)));
            }
            let (first, next) = (BlockAddr(end), g.group_start(4));
            let data = next.0 - end;
            assert!(g.holds_data(first, data) && !g.holds_data(first, data + 1));
            assert!(!g.holds_data(BlockAddr(end - 1), 1) && !g.holds_data(next, 1) && !g.holds_data(first, u64::MAX));
            assert_eq!(g.node_place(NodeId(0)), None);
            assert_eq!(g.node_place(g.node(7, 0)), None);
        }
        assert!(Geometry::new(512, 1).is_err());
        assert!(Geometry::new(3 * 512, 1).is_err());
    }
}
