//! Rules of the tables of a group: both copies of each, and what they say by themselves.

use crate::codes;
use crate::pair::{PairState, mended};
use crate::parts::domain::{Group, Mend, Table};
use crate::report::Log;
use braidfs_device::BLOCK_BYTES;
use braidfs_format::geometry::NODES_PER_BLOCK;
use braidfs_format::group::{GroupHeader, OWNERS_PER_BLOCK, Owner, SegmentTable, Written, decode_owners};
use braidfs_format::node::{NodeEntry, NodeTableBlock};
use braidfs_format::{BlockAddr, BlockKind};
use braidfs_store::Store;

/// Generation given to the free slots of a lost node table block: above what any node is likely to have had.
pub const LOST_GENERATION: u32 = 1 << 30;

/// The finding of a damaged copy of a group's table.
fn copy_code(kind: BlockKind) -> u32 {
    match kind {
        BlockKind::Group => codes::GROUP_COPY,
        BlockKind::SegmentTable => codes::SEGMENTS_COPY,
        BlockKind::Owners => codes::OWNERS_COPY,
        _ => codes::NODES_COPY,
    }
}

/// Looks at a pair and notes a damaged copy.
pub fn check_pair(
    log: &mut Log,
    mend: &mut Vec<Mend>,
    pair: &[u8],
    kind: BlockKind,
    volume: u32,
    addr: BlockAddr,
    what: std::fmt::Arguments<'_>,
) -> PairState {
    let state = PairState::of(pair, kind, volume, addr.0);
    if let Some((copy, why)) = state.damaged() {
        log.add(copy_code(kind), None, format!("{what}, copy {copy}: {why}"));
        let block = mended(pair, kind, volume, addr.0, copy);
        mend.extend(block.map(|block| Mend { addr: BlockAddr(addr.0 + copy as u64), block }));
    }
    state
}

/// The tables of a group whose metadata blocks are `image`. Its newest segment table that is not of a checkpoint after
/// `upto` counts.
pub fn parse_group(
    store: &Store,
    log: &mut Log,
    domain: u16,
    (number, epoch): (u32, u32),
    upto: u64,
    image: &[u8],
) -> Group {
    let g = store.geometry();
    let mut group = Group {
        number,
        epoch,
        blocks: store.group_blocks(number),
        header_bad: false,
        segments: None,
        entries: Table::default(),
        entries_dirty: vec![false; g.node_blocks() as usize],
        lost: Vec::new(),
        doubtful: Vec::new(),
        segments_dirty: false,
        segments_doubtful: false,
        segments_proven: false,
        owners_lost: Vec::new(),
        mend: Vec::new(),
        table_seq: 0,
        written: Written::default(),
        counts_wrong: false,
    };
    let image = Image { store, blocks: image, start: g.group_start(number) };
    parse_header(&image, log, domain, &mut group);
    parse_segments(&image, log, upto, &mut group);
    (0..g.node_blocks()).for_each(|index| parse_nodes(&image, log, index, &mut group));
    group
}

/// The metadata blocks of a group.
struct Image<'a> {
    store: &'a Store,
    blocks: &'a [u8],
    /// Where the first of them lies.
    start: BlockAddr,
}

impl Image<'_> {
    /// The pair at `addr`.
    fn pair(&self, addr: BlockAddr) -> &[u8] {
        &self.blocks[(addr.0 - self.start.0) as usize * BLOCK_BYTES..][..2 * BLOCK_BYTES]
    }
}

/// The header of `group`, which says how long it is, and of which claim.
fn parse_header(image: &Image<'_>, log: &mut Log, domain: u16, group: &mut Group) {
    let (g, volume, number, epoch) = (image.store.geometry(), image.store.volume, group.number, group.epoch);
    let what = format_args!("header of group {number}");
    let pair = image.pair(g.header_addr(number));
    check_pair(log, &mut group.mend, pair, BlockKind::Group, volume, g.header_addr(number), what);
    match GroupHeader::from_pair(pair, volume, g.header_addr(number)) {
        Ok((_, _, h)) => {
            // the last group of a device is as long as it was when it was claimed, also where the volume has grown since
            if h.blocks.get() > g.meta_blocks() && h.blocks.get() < group.blocks {
                group.blocks = h.blocks.get();
            }
            let blocks = group.blocks;
            let is = (h.group.get(), h.blocks.get(), h.epoch.get(), h.domain.get());
            if is != (number, blocks, epoch, domain) {
                let why = format!(
                    "{what}: says group {}, {} blocks, claim {} of domain {}; the BAT: {blocks} blocks, claim {epoch}",
                    is.0, is.1, is.2, is.3
                );
                log.add(codes::GROUP_CLAIM, None, why);
                group.header_bad = true;
            }
        }
        Err(e) => {
            log.add(codes::GROUP_LOST, None, format!("{what}: {e}"));
            group.header_bad = true;
        }
    }
}

/// The segment table of `group`: the newest one that is not of a checkpoint after `upto`.
fn parse_segments(image: &Image<'_>, log: &mut Log, upto: u64, group: &mut Group) {
    let (g, volume, number) = (image.store.geometry(), image.store.volume, group.number);
    let what = format_args!("segment table of group {number}");
    let addr = g.segment_table_addr(number);
    let pair = image.pair(addr);
    let state = check_pair(log, &mut group.mend, pair, BlockKind::SegmentTable, volume, addr, what);
    group.segments_doubtful = state.damaged().is_some();
    match SegmentTable::decode_upto(pair, g.segments, volume, addr, upto) {
        Ok(t) => {
            group.segments = Some(t.entries);
            (group.table_seq, group.written) = (t.seq, t.written);
        }
        Err(e) => log.add(codes::SEGMENTS_LOST, None, format!("{what}: {e}")),
    }
}

/// Node table block `index` of `group`, the one behind those that it has.
fn parse_nodes(image: &Image<'_>, log: &mut Log, index: u32, group: &mut Group) {
    let (g, volume, number) = (image.store.geometry(), image.store.volume, group.number);
    let addr = g.node_table_addr(number, index);
    let pair = image.pair(addr);
    let shown = format_args!("node table block {index} of group {number}");
    let state = check_pair(log, &mut group.mend, pair, BlockKind::NodeTable, volume, addr, shown);
    let old = group.lost_write(log, &state, g.node_table_index(index), codes::NODES_OLD, shown);
    if old || state.damaged().is_some() {
        group.doubtful.push(index);
    }
    group.entries_dirty[index as usize] |= old;
    group.counts_wrong |= old;
    match NodeTableBlock::decode(pair, volume, addr) {
        Ok((_, _, entries)) => group.entries.push(entries),
        Err(e) => {
            log.add(codes::NODES_LOST, None, format!("{shown}: {e}; nodes are looked for in the node blocks"));
            let blank = NodeEntry { generation: LOST_GENERATION, ..NodeEntry::default() };
            group.entries.push(vec![blank; NODES_PER_BLOCK as usize]);
            group.entries_dirty[index as usize] = true;
            group.lost.push(index);
        }
    }
}

/// What of an owner table holds.
#[derive(Debug)]
pub struct OwnerTable {
    /// The owners of its blocks; `None` where neither copy holds.
    pub owners: Option<Vec<Owner>>,
    /// One copy does not hold.
    pub damaged: bool,
    /// It is older than the segment table says.
    pub old: bool,
}

/// Whether `half` of the owner tables of `group` is about blocks that are there.
pub fn has_owners(group: &Group, half: u32) -> bool {
    half * OWNERS_PER_BLOCK < group.blocks
}

/// Half a segment's owner table of `group`, whose two copies are `pair`; `half` counts the halves of all segments.
pub fn owners(store: &Store, log: &mut Log, mend: &mut Vec<Mend>, group: &Group, half: u32, pair: &[u8]) -> OwnerTable {
    let addr = store.geometry().owners_addr(group.number, half / 2, half % 2);
    let what = format!("owner table of segment {} (half {}) of group {}", half / 2, half % 2, group.number);
    let shown = format_args!("{what}");
    let state = check_pair(log, mend, pair, BlockKind::Owners, store.volume, addr, shown);
    let old = group.lost_write(log, &state, half as usize, codes::OWNERS_OLD, shown);
    let owners = match decode_owners(pair, store.volume, addr) {
        Ok((_, _, owners)) => Some(owners),
        Err(e) => {
            log.add(codes::OWNERS_LOST, None, format!("{what}: {e}"));
            None
        }
    };
    OwnerTable { owners, damaged: state.damaged().is_some(), old }
}
