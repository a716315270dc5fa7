//! What the segment tables of a group must say of blocks.

use braidfs_format::Geometry;
use braidfs_format::geometry::SEGMENT_BLOCKS;
use braidfs_format::group::SegmentKind;
use std::ops::Range;

/// Blocks of `group`, counted from its start, that belong to nobody and can never be used: metadata, the part of
/// `journal` (first block, blocks) that lies in it, and what lies past its `blocks`.
pub fn fixed(g: Geometry, group: u32, blocks: u32, journal: Option<(u64, u64)>) -> [Range<u32>; 3] {
    let (start, total) = (g.group_start(group).0, g.group_blocks());
    let in_group = |a: u64| (a.clamp(start, start + u64::from(total)) - start) as u32;
    let (first, n) = journal.unwrap_or_default();
    [0..g.meta_blocks().min(total), in_group(first)..in_group(first.saturating_add(n)), blocks.min(total)..total]
}

/// Whether `segment` of a group of `blocks` blocks may be of `kind`; `used`: something lies in it.
pub fn kind_fits(segment: u32, blocks: u32, used: bool, kind: SegmentKind) -> bool {
    let absent = segment * SEGMENT_BLOCKS >= blocks;
    match kind {
        SegmentKind::Absent => absent,
        SegmentKind::Free => !absent && !used,
        _ => !absent,
    }
}

/// Whether `journal` (first block, blocks) reaches into the segment that begins at block `from`.
pub fn in_journal(journal: Option<(u64, u64)>, from: u64) -> bool {
    journal.is_some_and(|(first, n)| first < from + u64::from(SEGMENT_BLOCKS) && first.saturating_add(n) > from)
}
