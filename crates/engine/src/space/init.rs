//! Blank metadata of a group that a domain claims.
//!
//! Everything is written as one copy of its shadow pair, and the other is zeroed, so that nothing an earlier owner of the
//! group left there can be the newer one. Until the block group allocation table names the new owner, nobody reads it but
//! whoever claims the group: where it was somebody's before, generations go on from the highest that a node of it had, so
//! that no reference from then on matches. Therefore such a node table is never without a copy that says it.

use super::Space;
use super::bitmap;
use super::paired::TableEntry;
use crate::error::{Error, Result};
use crate::store::Store;
use braidfs_format::geometry::{NODES_PER_BLOCK, SEGMENT_BLOCKS};
use braidfs_format::group::{
    GroupHeader, OWNERS_PER_BLOCK, Owner, SegmentEntry, SegmentKind, SegmentTable, Temperature, Written, claim_seq,
    encode_owners,
};
use braidfs_format::node::{NodeEntry, NodeTableBlock};
use braidfs_format::{BLOCK_BYTES, BlockAddr, DomainId};

impl Space {
    /// Writes blank metadata for `group`, claimed by `domain` with the claim's `epoch`: header, segment table, owner
    /// tables and a node table without nodes. `journal` (first block in the group, blocks) is marked as in use, and
    /// the segments that it touches are of kind [`SegmentKind::Journal`]. Flushes none of that; where the group was
    /// somebody's before, its device is flushed in between.
    ///
    /// # Errors
    /// [`Error::Invalid`] where the group is too short for its metadata or the journal does not fit; of the device.
    pub fn init_group(
        store: &Store,
        domain: DomainId,
        group: u32,
        epoch: u32,
        journal: Option<(u32, u32)>,
    ) -> Result<()> {
        let geometry = store.geometry();
        let meta = geometry.meta_blocks();
        let blocks = store.group_blocks(group);
        if group >= geometry.groups || blocks <= meta {
            return Err(Error::Invalid("the group is too short for its metadata"));
        }
        let (journal_first, journal_len) = journal.unwrap_or((meta, 0));
        let journal_end = journal_first.checked_add(journal_len);
        let Some(journal_end) = journal_end.filter(|&e| journal_first >= meta && e <= blocks) else {
            return Err(Error::Invalid("the journal does not fit the group"));
        };
        let (volume, seq) = (store.volume, claim_seq(epoch));
        let start = geometry.group_start(group);
        let mut image = vec![0u8; meta as usize * BLOCK_BYTES];
        let mut put = |pair: BlockAddr, block: Vec<u8>| {
            image[(pair.0 - start.0) as usize * BLOCK_BYTES..][..BLOCK_BYTES].copy_from_slice(&block);
        };

        let pair = geometry.header_addr(group);
        put(pair, GroupHeader::new(group, blocks, epoch, domain.0).to_block(volume, pair, 0, seq));

        let segments: Vec<_> = (0..geometry.segments)
            .map(|s| blank_segment(s * SEGMENT_BLOCKS, meta, blocks, journal_first..journal_end))
            .collect();
        let pair = geometry.segment_table_addr(group);
        let written = Written::blank(geometry.segments);
        put(pair, SegmentTable::encode(&segments, &written, domain.0, volume, pair, 0, seq));

        let owners = vec![Owner::default(); OWNERS_PER_BLOCK as usize];
        for segment in 0..geometry.segments {
            for half in 0..2 {
                let pair = geometry.owners_addr(group, segment, half);
                put(pair, encode_owners(&owners, domain.0, volume, pair, 0, seq));
            }
        }
        let (generation, current) = if epoch > 1 { generations(store, group, epoch)? } else { (0, Vec::new()) };
        let nodes = vec![NodeEntry { generation, ..NodeEntry::default() }; NODES_PER_BLOCK as usize];
        let table = |index: u32, copy: usize| {
            let pair = geometry.node_table_addr(group, index);
            let block = NodeTableBlock::encode(&nodes, domain.0, volume, pair, copy, seq);
            (BlockAddr(pair.0 + copy as u64), block)
        };
        // those that say the generations last: over a copy 0 only when copy 1 says them, too
        for round in 0..2 {
            let of = |index: usize, said: usize| match (round, said) {
                (0, said) => Some(table(index as u32, 1 - said)),
                (_, 0) => Some(table(index as u32, 0)),
                _ => None,
            };
            let blocks: Vec<_> = current.iter().enumerate().filter_map(|(i, said)| of(i, *said)).collect();
            if !blocks.is_empty() {
                let ops: Vec<_> = blocks.iter().map(|(addr, b)| (*addr, vec![b.as_slice()])).collect();
                store.write_batch(&ops)?;
                store.flush_groups([group])?;
            }
        }
        for index in 0..geometry.node_blocks() {
            let (addr, block) = table(index, 0);
            put(addr, block);
        }
        Ok(store.write(start, &image)?)
    }
}

/// The highest generation in the node table of a group that was somebody's, and which copy of each of its pairs says so.
/// Where one does not hold, there may have been a higher one: then by the number of claims.
fn generations(store: &Store, group: u32, epoch: u32) -> Result<(u32, Vec<usize>)> {
    let geometry = store.geometry();
    let mut buf = vec![0u8; 2 * BLOCK_BYTES * geometry.node_blocks() as usize];
    store.read(geometry.node_table_addr(group, 0), &mut buf)?;
    let (mut highest, mut current) = (0, Vec::new());
    for (index, pair) in (0u32..).zip(buf.chunks(2 * BLOCK_BYTES)) {
        match NodeEntry::decode(pair, store.volume, geometry.node_table_addr(group, index)) {
            Ok((copy, seq, entries)) => {
                highest = entries.iter().map(|e| e.generation).fold(highest, u32::max);
                // of the owner before, or of an attempt to claim it. Else the group lay on another device meanwhile.
                if ![claim_seq(epoch), claim_seq(epoch.wrapping_sub(2))].contains(&(seq >> 32 << 32)) {
                    tracing::warn!("generations of group {group}: the table is not that of its last owner");
                    highest = highest.max(epoch.wrapping_shl(16));
                }
                current.push(copy);
            }
            Err(why) => {
                tracing::warn!("generations of group {group}: {why}");
                highest = highest.max(epoch.wrapping_shl(16));
                current.push(1);
            }
        }
    }
    Ok((highest, current))
}

/// Entry of the segment that starts `first` blocks into its group.
fn blank_segment(first: u32, meta: u32, blocks: u32, journal: std::ops::Range<u32>) -> SegmentEntry {
    let mut entry =
        SegmentEntry { valid: bitmap::fixed_mask(first, meta, blocks, &journal), ..SegmentEntry::default() };
    entry.kind = if first >= blocks {
        SegmentKind::Absent
    } else if journal.start < first + SEGMENT_BLOCKS && journal.end > first && !journal.is_empty() {
        SegmentKind::Journal
    } else if entry.valid == [0; 8] {
        SegmentKind::Free
    } else {
        entry.temperature = Temperature::Hot;
        SegmentKind::Node
    };
    entry
}
