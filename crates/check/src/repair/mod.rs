//! Makes the device equal to a model.
//!
//! Order: new records and buckets to free blocks; flush; the tables of the groups; flush; the volume's tables and the
//! domain headers. While the tables are written the domains are marked as failed, so that an interrupted repair is
//! neither mounted for writing nor skipped by the next check.

mod layout;
pub mod prepare;

use crate::error::Result;
use crate::model::Model;
use crate::pair::{CopyState, PairState, write_both};
use crate::parts::domain::{Domain, Group};
use crate::report::Log;
use crate::rules::volume::{bat_place, header_place};
use crate::scan::space::{Claim, Used, expected, segment_entry};
use crate::scan::volume;
use braidfs_device::{BLOCK_BYTES, Device};
use braidfs_format::bat;
use braidfs_format::domain::{CLEAN, DomainHeader, FAILED};
use braidfs_format::geometry::SEGMENT_BLOCKS;
use braidfs_format::group::table_sum;
use braidfs_format::group::{
    GroupHeader, OWNERS_PER_BLOCK, Owner, SegmentEntry, SegmentTable, Written, claim_seq, decode_owners, encode_owners,
};
use braidfs_format::journal::peek_chunk;
use braidfs_format::node::NodeTableBlock;
use braidfs_format::{BlockAddr, BlockKind, DomainId};
use braidfs_store::Store;
use std::sync::Arc;

/// Mounts that a header made again counts: above what the lost one is likely to have counted.
const REBUILT_MOUNTS: u32 = 1 << 20;
/// Positions from here on are taken as damage.
const POSITION_MAX: u64 = 1 << 60;

/// Writes everything in which the device differs from `m`.
///
/// # Errors
/// Of the device, or [`crate::Error::NoSpace`] where a domain has no block left for a record.
pub fn write(m: &mut Model) -> Result<()> {
    write_headers(m, FAILED | CLEAN)?;
    m.store.flush()?;
    layout::write_inodes(m)?;
    m.store.flush()?;
    for mend in m.domains.iter().flat_map(|d| d.groups.values()).flat_map(|g| &g.mend) {
        m.store.write(mend.addr, &mend.block)?;
    }
    m.store.flush()?;
    for domain in &mut m.domains {
        if let Some(h) = &mut domain.header {
            // of a header that was made again: no table may look unfinished
            let last = domain.groups.values().map(|g| g.written.checkpoint).max().unwrap_or(0);
            h.checkpoint = h.checkpoint.get().max(last).into();
        }
        let domain = &*domain;
        let used = Used::of(domain, &m.inodes);
        for group in domain.groups.values() {
            write_group(&m.store, domain, group, &used.group(&m.store, group.number))?;
        }
    }
    write_volume(m)?;
    m.store.flush()?;
    for d in &mut m.domains {
        set_sum(&m.store, d);
        if d.reset_journal {
            let age = newest_age(d);
            if let Some(h) = d.header.as_mut() {
                reset_journal(&m.store, d.number, h, age);
            }
        }
    }
    write_headers(m, CLEAN)?;
    Ok(m.store.flush()?)
}

/// Replaces both copies of the pair at `addr` in the group space.
fn write_pair(
    store: &Store,
    addr: BlockAddr,
    kind: BlockKind,
    floor: u64,
    encode: &dyn Fn(usize, u64) -> Vec<u8>,
) -> Result<()> {
    let pair = Log::default().read(store, addr, 2);
    write_copies(store, addr, &PairState::of(&pair, kind, store.volume, addr.0), floor, encode)
}

/// [`write_pair`], of a pair that was looked at.
fn write_copies(
    store: &Store,
    addr: BlockAddr,
    state: &PairState,
    floor: u64,
    encode: &dyn Fn(usize, u64) -> Vec<u8>,
) -> Result<()> {
    write_both(state, floor, encode, &|copy, block| Ok(store.write(BlockAddr(addr.0 + copy as u64), block)?))
}

/// The `seq` of the pair at `addr`, as it is on the device; 0 where it does not hold.
fn seq_of(pair: &[u8], kind: BlockKind, volume: u32, addr: BlockAddr) -> u64 {
    PairState::of(pair, kind, volume, addr.0).current().map_or(0, |(_, seq)| seq)
}

/// How often the tables of `group` were written, as it is on the device, for a segment table of `checkpoint`.
fn count_tables(store: &Store, group: u32, checkpoint: u64) -> Written {
    let g = store.geometry();
    let first = g.owners_addr(group, 0, 0);
    let mut written = Written { checkpoint, ..Written::blank(g.segments) };
    let image = Log::default().read(store, first, 2 * written.counts.len());
    for (i, (count, pair)) in written.counts.iter_mut().zip(image.chunks(2 * BLOCK_BYTES)).enumerate() {
        let kind = if i < g.node_table_index(0) { BlockKind::Owners } else { BlockKind::NodeTable };
        *count = seq_of(pair, kind, store.volume, BlockAddr(first.0 + 2 * i as u64)) as u32;
    }
    written
}

/// Writes the segment table of `group`, after all its other tables.
fn write_segments(store: &Store, domain: u16, group: &Group, segments: &[SegmentEntry], checkpoint: u64) -> Result<()> {
    let (g, volume) = (store.geometry(), store.volume);
    let addr = g.segment_table_addr(group.number);
    let written = count_tables(store, group.number, checkpoint);
    let pair = Log::default().read(store, addr, 2);
    let mut state = PairState::of(&pair, BlockKind::SegmentTable, volume, addr.0);
    // A copy of a checkpoint that did not end does not count, and may be of the next claim: the group was being given up. Where
    // only one of the two blocks below comes to the device, the number of the checkpoint tells which counts, not `seq`.
    if let Ok(t) = SegmentTable::decode_upto(&pair, g.segments, volume, addr, checkpoint)
        && t.unfinished
    {
        state.0[1 - t.copy] = CopyState::Blank;
    }
    write_copies(store, addr, &state, claim_seq(group.epoch), &|copy, seq| {
        SegmentTable::encode(segments, &written, domain, volume, addr, copy, seq)
    })
}

/// Sets the sum of the segment tables in the header of `d` to what is on the device; whether it was another.
fn set_sum(store: &Store, d: &mut Domain) -> bool {
    let sums = |d: &Domain, upto: u64| {
        let tables = d.groups.keys().map(|&group| {
            let addr = store.geometry().segment_table_addr(group);
            let pair = Log::default().read(store, addr, 2);
            let table = SegmentTable::decode_upto(&pair, store.geometry().segments, store.volume, addr, upto);
            (group, table.map_or(0, |t| t.seq))
        });
        table_sum(&tables.collect::<Vec<_>>())
    };
    let Some(h) = &d.header else { return false };
    let sum = sums(d, h.checkpoint.get());
    let Some(h) = &mut d.header else { return false };
    let old = std::mem::replace(&mut h.tables, sum.into());
    old.get() != sum
}

/// Makes the header of a domain that is to be replayed tell of its segment tables as they are on the device.
///
/// # Errors
/// Of the device.
pub fn write_sum(m: &mut Model, number: usize) -> Result<()> {
    if set_sum(&m.store, &mut m.domains[number]) {
        let d = &m.domains[number];
        write_header(m, d, d.header.map_or(0, |h| h.flags.get()))?;
    }
    Ok(())
}

/// Writes the tables of a group that were mended for a replay: both copies of each. `checkpoint` is the last one.
///
/// # Errors
/// Of the device.
pub fn write_tables(store: &Store, domain: u16, group: &Group, checkpoint: u64) -> Result<()> {
    for mend in &group.mend {
        store.write(mend.addr, &mend.block)?;
    }
    write_group_header(store, domain, group)?;
    let no_owners = vec![Owner::default(); OWNERS_PER_BLOCK as usize];
    for half in &group.owners_lost {
        write_owners(store, domain, group, *half, &no_owners)?;
    }
    write_entries(store, domain, group)?;
    match &group.segments {
        Some(s) if group.segments_dirty || group.counts_wrong => write_segments(store, domain, group, s, checkpoint),
        _ => Ok(()),
    }
}

/// Writes the header of a group where it must be.
fn write_group_header(store: &Store, domain: u16, group: &Group) -> Result<()> {
    if !group.header_bad {
        return Ok(());
    }
    let addr = store.geometry().header_addr(group.number);
    let h = GroupHeader::new(group.number, group.blocks, group.epoch, domain);
    let block = |copy, seq| h.to_block(store.volume, addr, copy, seq);
    write_pair(store, addr, BlockKind::Group, claim_seq(group.epoch), &block)
}

/// Writes half a segment's owner table; not below what the segment table says of it.
fn write_owners(store: &Store, domain: u16, group: &Group, half: u32, owners: &[Owner]) -> Result<()> {
    let addr = store.geometry().owners_addr(group.number, half / 2, half % 2);
    let floor = claim_seq(group.epoch).max(group.floor(half as usize));
    let block = |copy, seq| encode_owners(owners, domain, store.volume, addr, copy, seq);
    write_pair(store, addr, BlockKind::Owners, floor, &block)
}

/// Writes the node table blocks that changed.
///
/// # Errors
/// Of the device.
fn write_entries(store: &Store, domain: u16, group: &Group) -> Result<()> {
    let (g, volume, number) = (store.geometry(), store.volume, group.number);
    let floor = claim_seq(group.epoch);
    for index in (0..g.node_blocks()).filter(|&i| group.entries_dirty[i as usize]) {
        let addr = g.node_table_addr(number, index);
        let entries = group.entries.block(index);
        // not below what the segment table says of it, also where the claim's epoch is wrong
        let floor = floor.max(group.floor(g.node_table_index(index)));
        write_pair(store, addr, BlockKind::NodeTable, floor, &|copy, seq| {
            NodeTableBlock::encode(&entries, domain, volume, addr, copy, seq)
        })?;
    }
    Ok(())
}

/// Empties the journal of a domain whose chunks nobody can replay.
///
/// # Errors
/// Of the device.
pub fn give_up_journal(m: &Model, d: &Domain) -> Result<()> {
    let Some(mut h) = d.header else { return Ok(()) };
    reset_journal(&m.store, d.number, &mut h, 0);
    close_journal(m, d, h)
}

/// Writes `h` as the header of a domain whose journal has nothing to replay any more.
///
/// # Errors
/// Of the device.
pub fn close_journal(m: &Model, d: &Domain, h: DomainHeader) -> Result<()> {
    let closed = Domain {
        number: d.number,
        header: Some(h),
        header_dirty: true,
        header_damaged: false,
        reset_journal: false,
        groups: Default::default(),
        recovered: Default::default(),
        outdated: Default::default(),
        doubted: Default::default(),
    };
    write_header(m, &closed, h.flags.get() | CLEAN)?;
    Ok(m.store.flush()?)
}

fn write_group(store: &Store, domain: &Domain, group: &Group, claims: &[Claim]) -> Result<()> {
    let (g, volume, number) = (store.geometry(), store.volume, group.number);
    write_group_header(store, domain.number, group)?;
    let e = expected(store, domain, group, claims);
    let old = group.segments.as_deref();
    let segments: Vec<SegmentEntry> =
        (0..g.segments).map(|i| segment_entry(&e, i, group, old.and_then(|s| s.get(i as usize)))).collect();
    let mut changed = old != Some(segments.as_slice()) || group.counts_wrong || group.entries_dirty.contains(&true);
    for half in 0..2 * g.segments {
        let first = (half * OWNERS_PER_BLOCK) as usize;
        let wanted: Vec<Owner> =
            (0..OWNERS_PER_BLOCK as usize).map(|i| e.owners[first + i].unwrap_or_default()).collect();
        let addr = g.owners_addr(number, half / 2, half % 2);
        let pair = Log::default().read(store, addr, 2);
        let right = decode_owners(&pair, volume, addr).is_ok_and(|(_, seq, is)| {
            // Owners of free blocks do not matter.
            seq >= group.floor(half as usize)
                && is.iter().zip(&wanted).enumerate().all(|(i, (a, b))| e.owners[first + i].is_none() || a == b)
        });
        if !right {
            changed = true;
            write_owners(store, domain.number, group, half, &wanted)?;
        }
    }
    write_entries(store, domain.number, group)?;
    if changed {
        let checkpoint = domain.header.map_or(0, |h| h.checkpoint.get());
        write_segments(store, domain.number, group, &segments, checkpoint)?;
    }
    Ok(())
}

/// Superblocks, damaged copies of the volume's pairs, and what of the BAT was lost.
fn write_volume(m: &Model) -> Result<()> {
    for (device, block, content) in &m.volume_writes {
        m.store.device(*device).write(*block, content)?;
    }
    let volume = m.sb.volume_id();
    for &index in &m.bat_dirty {
        let (pair, first, count) = bat_place(&m.sb, index);
        let entries = &m.bat[first..m.bat.len().min(first + count)];
        let state = PairState::of(&Log::default().read_pair(&m.store, pair), BlockKind::Bat, volume, pair);
        write_both(&state, 0, &|copy, seq| bat::encode(entries, volume, pair, copy, seq), &|copy, block| {
            Ok(m.store.device(0).write(pair + copy as u64, block)?)
        })?;
    }
    Ok(())
}

fn write_headers(m: &Model, flags: u32) -> Result<()> {
    m.domains.iter().try_for_each(|d| write_header(m, d, flags))
}

fn write_header(m: &Model, d: &Domain, flags: u32) -> Result<()> {
    let Some(mut h) = d.header else { return Ok(()) };
    let volume = m.sb.volume_id();
    h.flags = flags.into();
    let pair = header_place(&m.sb, d.number);
    let state = PairState::of(&Log::default().read_pair(&m.store, pair), BlockKind::Domain, volume, pair);
    write_both(&state, 0, &|copy, seq| h.to_block(volume, pair, copy, seq), &|copy, block| {
        Ok(m.store.device(0).write(pair + copy as u64, block)?)
    })
}

/// Mends the volume's tables and takes the mark "failed" from the domain headers, so that the volume can be mounted and
/// its journals replayed.
///
/// # Errors
/// Of a device, or no volume.
pub fn prepare_replay(devices: &[Arc<dyn Device>]) -> Result<()> {
    let m = volume::read(devices)?;
    write_volume(&m)?;
    for d in &m.domains {
        if let Some(flags) = d.header.map(|h| h.flags.get()).filter(|f| f & FAILED != 0) {
            write_header(&m, d, flags & !FAILED)?;
        }
    }
    Ok(m.store.flush()?)
}

fn newest_age(domain: &Domain) -> u64 {
    domain.groups.values().flat_map(|g| g.segments.iter().flatten()).map(|s| s.age).max().unwrap_or(0)
}

/// Empties the journal of `h`: it goes on behind every chunk that lies in it, so that none of them is taken for new.
fn reset_journal(store: &Store, domain: u16, h: &mut DomainHeader, age: u64) {
    let blocks = u64::from(h.journal_blocks.get()).max(1);
    let (mut end, mut tx) = (h.head_pos.get(), h.last_tx.get().max(h.checkpointed_tx.get()).max(age));
    let mut block = vec![0u8; BLOCK_BYTES];
    for i in 0..blocks {
        if store.read(BlockAddr(h.journal_start.get() + i), &mut block).is_err() {
            continue;
        }
        let word = |at: usize| u64::from_le_bytes(block[at..at + 8].try_into().unwrap_or_default());
        let (pos, in_tx) = (word(16), word(24));
        if pos < POSITION_MAX && peek_chunk(&block, store.volume, DomainId(domain), pos).is_some() {
            end = end.max(pos + u64::from(braidfs_format::journal::CHUNK_MAX_BLOCKS));
            tx = tx.max(in_tx.min(POSITION_MAX));
        }
    }
    let pos = end.next_multiple_of(blocks);
    h.head_pos = pos.into();
    h.tail_pos = pos.into();
    // Transactions that were running or committing when it stopped, and recoveries, may have used the next numbers.
    h.last_tx = (h.first_tx(tx) + 2).into();
    h.checkpointed_tx = h.last_tx;
}

/// Makes a lost domain header again: the journal is the run of valid blocks without owner behind the metadata of one of
/// the domain's groups.
pub fn rebuild_header(store: &Store, domain: &mut Domain) {
    let g = store.geometry();
    let mut best: Option<(u64, u32)> = None;
    for group in domain.groups.values() {
        let Some(segments) = &group.segments else { continue };
        let (first, mut at) = (g.meta_blocks(), g.meta_blocks());
        let mut owners: (u32, Vec<Owner>) = (u32::MAX, Vec::new());
        while at < group.blocks && segments[(at / SEGMENT_BLOCKS) as usize].is_valid(at % SEGMENT_BLOCKS) {
            let half = at / OWNERS_PER_BLOCK;
            if owners.0 != half {
                let addr = g.owners_addr(group.number, half / 2, half % 2);
                let pair = Log::default().read(store, addr, 2);
                owners = (half, decode_owners(&pair, store.volume, addr).map(|o| o.2).unwrap_or_default());
            }
            let owner = owners.1.get((at % OWNERS_PER_BLOCK) as usize);
            if owner.is_some_and(|o| o.node.0 != 0 || o.live != 0) {
                break;
            }
            at += 1;
        }
        if at - first >= 16 && best.is_none_or(|b| at - first > b.1) {
            best = Some((g.group_start(group.number).0 + u64::from(first), at - first));
        }
    }
    let Some((start, blocks)) = best else { return };
    let mut h = DomainHeader::empty();
    h.domain = domain.number.into();
    h.flags = CLEAN.into();
    h.journal_start = start.into();
    h.journal_blocks = blocks.into();
    h.mounts = REBUILT_MOUNTS.into();
    reset_journal(store, domain.number, &mut h, newest_age(domain));
    domain.header = Some(h);
}
