//! Makes the device equal to a model.
//!
//! Order: new records and buckets to free blocks; flush; those for which there were only blocks that are in use as yet;
//! the tables of the groups; flush; the volume's tables and the domain headers. While the tables of a domain are
//! written it is marked as failed, so that an interrupted repair is neither mounted for writing nor skipped by the next
//! check; and the mark says whether any of them was in doubt, so that the next check does not take the segment tables,
//! whose sum comes last, for writes that the device lost.
//!
//! An inode's entry and those of its overflow nodes may lie in different blocks of node tables. So new overflow nodes come
//! into the tables first, the inodes that name them next, and those that the inodes named before are freed last, with flushes
//! between: whenever a repair is cut off, every inode has the nodes that its record names.

mod layout;
mod pairs;
pub mod prepare;
mod watched;

use crate::error::Result;
use crate::model::Model;
use crate::pair::{CopyState, PairState};
use crate::parts::domain::{Domain, Group};
use crate::report::Log;
use crate::rules::volume::{bat_place, header_place};
use crate::scan::space::{Claim, Used, expected, segment_entry};
use crate::scan::volume;
use braidfs_device::{BLOCK_BYTES, Device};
use braidfs_format::bat;
use braidfs_format::domain::{CLEAN, DomainHeader, FAILED, TABLES_SOUND};
use braidfs_format::geometry::{NODES_PER_BLOCK, SEGMENT_BLOCKS};
use braidfs_format::group::table_sum;
use braidfs_format::group::{
    GroupHeader, OWNERS_PER_BLOCK, Owner, SegmentEntry, SegmentTable, Written, claim_seq, decode_owners, encode_owners,
};
use braidfs_format::journal::peek_chunk;
use braidfs_format::node::{NodeEntry, NodeTableBlock};
use braidfs_format::super_block::SuperBlock;
use braidfs_format::{BlockAddr, BlockKind, DomainId, NodeId};
use braidfs_store::Store;
use pairs::{Pairs, Place};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Mounts that a header made again counts: above what the lost one is likely to have counted.
const REBUILT_MOUNTS: u32 = 1 << 20;
/// Positions from here on are taken as damage.
const POSITION_MAX: u64 = 1 << 60;

/// Writes everything in which the device differs from `m`. Of a domain in which nothing does, nothing is written: a loss of power
/// tears what is being written.
///
/// # Errors
/// Of the device, or [`crate::Error::NoSpace`] where a domain has no block left for a record.
pub fn write(m: &mut Model) -> Result<()> {
    // Where there is no room for it, nothing has changed.
    let held = layout::write_inodes(m)?;
    m.store.flush()?;
    let changed: Vec<usize> = (0..m.domains.len()).filter(|i| differs(m, &m.domains[*i])).collect();
    for &i in &changed {
        let domain = &mut m.domains[i];
        if let Some(h) = &mut domain.header {
            // of a header that was made again: no table may look unfinished
            let last = domain.groups.values().map(|g| g.written.checkpoint).max().unwrap_or(0);
            h.checkpoint = h.checkpoint.get().max(last).into();
        }
    }
    write_headers(m, &changed, |d| CLEAN | in_repair(d))?;
    held.iter().try_for_each(|(addr, block)| m.store.write(*addr, block))?;
    for mend in changed.iter().flat_map(|i| m.domains[*i].groups.values()).flat_map(|g| &g.mend) {
        m.store.write(mend.addr, &mend.block)?;
    }
    m.store.flush()?;
    for &i in &changed {
        let domain = &mut m.domains[i];
        write_overflow(&m.store, domain)?;
        let domain = &*domain;
        let used = Used::of(domain, &m.inodes);
        for group in domain.groups.values() {
            write_group(&m.store, domain, group, &used.group(&m.store, group.number))?;
        }
    }
    write_volume(m)?;
    for &i in &changed {
        let d = &mut m.domains[i];
        set_sum(&m.store, d);
        if d.reset_journal {
            let age = newest_age(d);
            if let Some(h) = d.header.as_mut() {
                reset_journal(&m.store, d.number, h, age);
            }
        }
    }
    write_headers(m, &changed, |_| CLEAN)
}

/// The flags of a domain whose tables are about to be written.
fn in_repair(d: &Domain) -> u32 {
    FAILED | if d.tables_doubted { 0 } else { TABLES_SOUND }
}

/// Whether the device differs from `d`.
fn differs(m: &Model, d: &Domain) -> bool {
    let opened = d.header.is_some_and(|h| h.flags.get() != CLEAN);
    if d.header_dirty || d.reset_journal || opened || !d.fresh.is_empty() || !d.replaced.is_empty() {
        return true;
    }
    let (volume, pair) = (m.sb.volume_id(), header_place(&m.sb, d.number));
    let on_device = DomainHeader::from_pair(&Log::default().read_pair(&m.store, pair), volume, pair, d.number);
    let bytes = |h: DomainHeader| h.to_block(volume, pair, 0, 0);
    if on_device.map(|(_, _, h)| bytes(h)).ok() != d.header.map(bytes) {
        return true;
    }
    if d.groups.values().any(group_differs) {
        return true;
    }
    let used = Used::of(d, &m.inodes);
    d.groups.values().any(|g| Tables::of(&m.store, d, g, &used.group(&m.store, g.number)).changed)
}

/// Whether the tables of `group` are to be written, by what was noted of them.
fn group_differs(group: &Group) -> bool {
    let lost = !group.mend.is_empty() || !group.owners_lost.is_empty();
    let wrong = group.header_bad || group.segments_dirty || group.counts_wrong;
    lost || wrong || group.entries_dirty.contains(&true)
}

/// Brings overflow nodes that were laid out anew, and the inodes that name them, into the node tables of `domain`, and frees
/// in the model those that were replaced.
fn write_overflow(store: &Store, domain: &mut Domain) -> Result<()> {
    let g = store.geometry();
    let replaced = std::mem::take(&mut domain.replaced);
    let fresh: BTreeSet<NodeId> = std::mem::take(&mut domain.fresh).into_iter().collect();
    if replaced.is_empty() && fresh.is_empty() {
        return Ok(());
    }
    let mut pairs = Pairs::new(store);
    let places = fresh.iter().filter_map(|n| g.node_place(*n)).map(|(group, slot)| (group, slot / NODES_PER_BLOCK));
    for (group, index) in places.collect::<BTreeSet<_>>() {
        let (Some(group), addr) = (domain.groups.get(&group), g.node_table_addr(group, index)) else { continue };
        let pair = Log::default().read(store, addr, 2);
        // of one that is lost nothing is kept
        let Ok((_, _, mut entries)) = NodeTableBlock::decode(&pair, store.volume, addr) else { continue };
        for (slot, entry) in (index * NODES_PER_BLOCK..).zip(&mut entries) {
            if fresh.contains(&g.node(group.number, slot)) {
                *entry = group.entries.get(slot).unwrap_or_default();
            }
        }
        write_entries(&mut pairs, domain.number, group, index, &entries)?;
    }
    pairs.settle()?;
    for group in domain.groups.values() {
        write_changed_entries(&mut pairs, domain.number, group)?;
        pairs.settle()?;
    }
    replaced.into_iter().for_each(|n| domain.free_node(store, n));
    Ok(())
}

/// Replaces the copies of the pair at `addr` in the group space.
fn write_pair(
    pairs: &mut Pairs<'_>,
    addr: BlockAddr,
    kind: BlockKind,
    floor: u64,
    encode: &dyn Fn(usize, u64) -> Vec<u8>,
) -> Result<()> {
    let store = pairs.store();
    let pair = Log::default().read(store, addr, 2);
    pairs.write(Place::Group(addr), &PairState::of(&pair, kind, store.volume, addr.0), floor, encode)
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
fn write_segments(
    pairs: &mut Pairs<'_>,
    domain: u16,
    group: &Group,
    segments: &[SegmentEntry],
    checkpoint: u64,
) -> Result<()> {
    pairs.settle()?;
    let store = pairs.store();
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
    pairs.write(Place::Group(addr), &state, claim_seq(group.epoch), &|copy, seq| {
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

/// Marks a domain of which a segment table is about to be written for a replay, as a repair that has not ended: the sum
/// in the header comes last; or an owner table, of which what is written is not known to be right. Where only other
/// tables are mended, or copies that do not hold, the domain can be mounted at any moment.
///
/// # Errors
/// Of the device.
pub fn begin_mending(store: &Store, sb: &SuperBlock, d: &mut Domain) -> Result<()> {
    let Some(h) =
        d.header.as_mut().filter(|_| d.groups.values().any(|g| writes_segments(g) || !g.owners_lost.is_empty()))
    else {
        return Ok(());
    };
    h.flags = (h.flags.get() & !TABLES_SOUND | if d.tables_doubted { FAILED } else { FAILED | TABLES_SOUND }).into();
    let flags = h.flags.get();
    let mut pairs = Pairs::new(store);
    write_header(&mut pairs, sb, d, flags)?;
    pairs.settle()
}

/// Makes the header of a domain tell of its segment tables as they are on the device, and that its repair has ended; or that
/// it `goes_on`, for a domain of which a replay is to change nothing, or in which something was found.
///
/// # Errors
/// Of the device.
pub fn end_mending(m: &mut Model, number: usize, goes_on: bool) -> Result<()> {
    let other = set_sum(&m.store, &mut m.domains[number]);
    let d = &mut m.domains[number];
    let Some(h) = &mut d.header else { return Ok(()) };
    let was = h.flags.get();
    let is = if goes_on { was | FAILED | TABLES_SOUND } else { was & !(FAILED | TABLES_SOUND) };
    h.flags = is.into();
    if other || d.header_dirty || is != was {
        let flags = h.flags.get();
        let mut pairs = Pairs::new(&m.store);
        write_header(&mut pairs, &m.sb, d, flags)?;
        pairs.settle()?;
    }
    Ok(())
}

/// Has the header of a domain say that it is being repaired, before something goes that the next check would look for.
///
/// # Errors
/// Of the device.
pub fn mark_repair(store: &Store, sb: &SuperBlock, d: &mut Domain) -> Result<()> {
    let marks = in_repair(d);
    let Some(h) = d.header.as_mut().filter(|h| h.flags.get() & FAILED == 0) else { return Ok(()) };
    h.flags = (h.flags.get() | marks).into();
    let flags = h.flags.get();
    let mut pairs = Pairs::new(store);
    write_header(&mut pairs, sb, d, flags)?;
    pairs.settle()
}

/// Whether the segment table of a group is written for a replay.
fn writes_segments(group: &Group) -> bool {
    group.segments_dirty || group.counts_wrong
}

/// Writes the tables of a group that were mended for a replay: both copies of each. `checkpoint` is the last one.
///
/// # Errors
/// Of the device.
pub fn write_tables(store: &Store, domain: u16, group: &Group, checkpoint: u64) -> Result<()> {
    for mend in &group.mend {
        store.write(mend.addr, &mend.block)?;
    }
    if !group.mend.is_empty() {
        store.flush()?;
    }
    let mut pairs = Pairs::new(store);
    write_group_header(&mut pairs, domain, group)?;
    for (half, owners) in &group.owners_lost {
        write_owners(&mut pairs, domain, group, *half, owners)?;
    }
    write_changed_entries(&mut pairs, domain, group)?;
    if let Some(s) = group.segments.as_ref().filter(|_| writes_segments(group)) {
        write_segments(&mut pairs, domain, group, s, checkpoint)?;
    }
    pairs.settle()
}

/// Writes the header of a group where it must be.
fn write_group_header(pairs: &mut Pairs<'_>, domain: u16, group: &Group) -> Result<()> {
    if !group.header_bad {
        return Ok(());
    }
    let store = pairs.store();
    let addr = store.geometry().header_addr(group.number);
    let h = GroupHeader::new(group.number, group.blocks, group.epoch, domain);
    let block = |copy, seq| h.to_block(store.volume, addr, copy, seq);
    write_pair(pairs, addr, BlockKind::Group, claim_seq(group.epoch), &block)
}

/// Writes half a segment's owner table; not below what the segment table says of it.
fn write_owners(pairs: &mut Pairs<'_>, domain: u16, group: &Group, half: u32, owners: &[Owner]) -> Result<()> {
    let store = pairs.store();
    let addr = store.geometry().owners_addr(group.number, half / 2, half % 2);
    let floor = claim_seq(group.epoch).max(group.floor(half as usize));
    let block = |copy, seq| encode_owners(owners, domain, store.volume, addr, copy, seq);
    write_pair(pairs, addr, BlockKind::Owners, floor, &block)
}

/// Writes the node table blocks that changed.
///
/// # Errors
/// Of the device.
fn write_changed_entries(pairs: &mut Pairs<'_>, domain: u16, group: &Group) -> Result<()> {
    (0..pairs.store().geometry().node_blocks())
        .filter(|&i| group.entries_dirty[i as usize])
        .try_for_each(|index| write_entries(pairs, domain, group, index, &group.entries.block(index)))
}

/// Writes block `index` of a node table.
fn write_entries(pairs: &mut Pairs<'_>, domain: u16, group: &Group, index: u32, entries: &[NodeEntry]) -> Result<()> {
    let store = pairs.store();
    let (g, volume) = (store.geometry(), store.volume);
    let addr = g.node_table_addr(group.number, index);
    // not below what the segment table says of it, also where the claim's epoch is wrong
    let floor = claim_seq(group.epoch).max(group.floor(g.node_table_index(index)));
    write_pair(pairs, addr, BlockKind::NodeTable, floor, &|copy, seq| {
        NodeTableBlock::encode(entries, domain, volume, addr, copy, seq)
    })
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
        tables_doubted: false,
        reset_journal: false,
        journal_lost: false,
        groups: Default::default(),
        recovered: Default::default(),
        outdated: Default::default(),
        undecided: Default::default(),
        doubted: Default::default(),
        fresh: Vec::new(),
        replaced: Vec::new(),
    };
    let mut pairs = Pairs::new(&m.store);
    write_header(&mut pairs, &m.sb, &closed, h.flags.get() | CLEAN)?;
    pairs.settle()
}

/// Segment table and owner tables of a group, as what refers to its blocks says.
struct Tables {
    segments: Vec<SegmentEntry>,
    /// Halves of owner tables in which the device differs, with what they are to say.
    owners: Vec<(u32, Vec<Owner>)>,
    /// The segment table is to be written: it differs, or a table that it counts does.
    changed: bool,
}

impl Tables {
    /// Those of `group`, in which `claims` lie.
    fn of(store: &Store, domain: &Domain, group: &Group, claims: &[Claim]) -> Self {
        let (g, volume, number) = (store.geometry(), store.volume, group.number);
        let e = expected(store, domain, group, claims);
        let old = group.segments.as_deref();
        let segments: Vec<SegmentEntry> =
            (0..g.segments).map(|i| segment_entry(&e, i, group, old.and_then(|s| s.get(i as usize)))).collect();
        let mut owners = Vec::new();
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
                owners.push((half, wanted));
            }
        }
        let counted = group.counts_wrong || group.entries_dirty.contains(&true) || !owners.is_empty();
        let changed = counted || old != Some(segments.as_slice());
        Self { segments, owners, changed }
    }
}

fn write_group(store: &Store, domain: &Domain, group: &Group, claims: &[Claim]) -> Result<()> {
    let mut pairs = Pairs::new(store);
    write_group_header(&mut pairs, domain.number, group)?;
    let tables = Tables::of(store, domain, group, claims);
    for (half, owners) in &tables.owners {
        write_owners(&mut pairs, domain.number, group, *half, owners)?;
    }
    write_changed_entries(&mut pairs, domain.number, group)?;
    if tables.changed {
        let checkpoint = domain.header.map_or(0, |h| h.checkpoint.get());
        write_segments(&mut pairs, domain.number, group, &tables.segments, checkpoint)?;
    }
    pairs.settle()
}

/// Superblocks, damaged copies of the volume's pairs, and what of the BAT was lost.
fn write_volume(m: &Model) -> Result<()> {
    for (device, block, content) in &m.volume_writes {
        m.store.device(*device).write(*block, content)?;
    }
    m.store.flush()?;
    let volume = m.sb.volume_id();
    let mut pairs = Pairs::new(&m.store);
    for &index in &m.bat_dirty {
        let (pair, first, count) = bat_place(&m.sb, index);
        let entries = &m.bat[first..m.bat.len().min(first + count)];
        let state = PairState::of(&Log::default().read_pair(&m.store, pair), BlockKind::Bat, volume, pair);
        let block = |copy, seq| bat::encode(entries, volume, pair, copy, seq);
        pairs.write(Place::Volume(pair), &state, 0, &block)?;
    }
    pairs.settle()
}

/// Writes the headers of these domains, with `flags`; they are on the device afterwards.
fn write_headers(m: &Model, those: &[usize], flags: impl Fn(&Domain) -> u32) -> Result<()> {
    let mut pairs = Pairs::new(&m.store);
    those.iter().map(|i| &m.domains[*i]).try_for_each(|d| write_header(&mut pairs, &m.sb, d, flags(d)))?;
    pairs.settle()
}

fn write_header(pairs: &mut Pairs<'_>, sb: &SuperBlock, d: &Domain, flags: u32) -> Result<()> {
    let Some(mut h) = d.header else { return Ok(()) };
    let volume = sb.volume_id();
    h.flags = flags.into();
    let pair = header_place(sb, d.number);
    let state = PairState::of(&Log::default().read_pair(pairs.store(), pair), BlockKind::Domain, volume, pair);
    pairs.write(Place::Volume(pair), &state, 0, &|copy, seq| h.to_block(volume, pair, copy, seq))
}

/// Mends the volume's tables, so that the volume can be mounted and its journals replayed.
///
/// # Errors
/// Of a device, or no volume.
pub fn prepare_replay(devices: &[Arc<dyn Device>]) -> Result<()> {
    write_volume(&volume::read(devices)?)
}

fn newest_age(domain: &Domain) -> u64 {
    domain.groups.values().flat_map(|g| g.segments.iter().flatten()).map(|s| s.age).max().unwrap_or(0)
}

/// Empties the journal of `h`: it goes on behind every chunk that lies in it, so that none of them is taken for new.
fn reset_journal(store: &Store, domain: u16, h: &mut DomainHeader, age: u64) {
    let blocks = u64::from(h.journal_blocks.get()).max(1);
    let (mut end, mut tx) = (h.head_pos.get(), h.last_tx.get().max(h.checkpointed_tx.get()).max(age.min(POSITION_MAX)));
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
