//! Reads the tables of a domain's groups: header, segment table, node table. (Owner tables: [`super::space`].)

use crate::codes;
use crate::parts::domain::{Domain, Group};
use crate::report::Log;
use crate::rules::group::{LOST_GENERATION, parse_group};
use braidfs_device::{AlignedBuf, BLOCK_BYTES};
use braidfs_format::bat::BatEntry;
use braidfs_format::geometry::{NODES_PER_BLOCK, SEGMENT_BLOCKS};
use braidfs_format::group::{lost_table, table_sum};
use braidfs_format::node::{NodeBlock, NodeEntry, NodeKind, OVERFLOW, USED};
use braidfs_format::{BlockAddr, NodeId};
use braidfs_store::Store;
use std::collections::{HashMap, HashSet};

/// Blocks read at once in the search for records.
const RUN_BLOCKS: u32 = 64;

/// Reads the tables of all groups that the BAT gives to `domain`, and looks for segment tables that are not those of
/// the last checkpoint.
pub fn read_groups(store: &Store, log: &mut Log, domain: &mut Domain, bat: &[BatEntry]) {
    let upto = domain.header.map_or(u64::MAX, |h| h.checkpoint.get());
    let own = |e: &BatEntry| e.domain.is_some_and(|d| d.0 == domain.number);
    let owned: Vec<(u32, u32)> = (0u32..).zip(bat).filter(|(_, e)| own(e)).map(|(g, e)| (g, e.epoch)).collect();
    for (number, epoch) in owned {
        let group = read_group(store, log, domain.number, (number, epoch), upto);
        domain.groups.insert(number, group);
    }
    let Some(sum) = domain.header.map(|h| h.tables.get()) else { return };
    let tables: Vec<(u32, u64)> = domain.groups.values().map(|g| (g.number, g.table_seq)).collect();
    if table_sum(&tables) == sum {
        return;
    }
    let damaged = |g: &Group| g.segments.is_none() || g.segments_doubtful;
    if domain.groups.values().any(damaged) {
        // the copy that does not hold was the newest; it has been named
        domain.groups.values_mut().filter(|g| damaged(g)).for_each(|g| g.counts_wrong = true);
        return;
    }
    let which = lost_table(&tables, sum);
    match which {
        Some(g) => log.add(codes::SEGMENTS_OLD, None, format!("segment table of group {g}")),
        None => log.add(codes::SEGMENTS_OLD, None, "segment tables: it cannot be told of which groups"),
    }
    for group in domain.groups.values_mut().filter(|g| which.is_none_or(|w| w == g.number)) {
        // what was lost with it is not counted either
        group.doubtful = (0..store.geometry().node_blocks()).collect();
        (group.segments_doubtful, group.counts_wrong) = (true, true);
    }
}

/// Reads the tables of group `number` (with the epoch of its claim), which the BAT gives to `domain`.
fn read_group(store: &Store, log: &mut Log, domain: u16, (number, epoch): (u32, u32), upto: u64) -> Group {
    let g = store.geometry();
    let blocks = g.meta_blocks().min(store.group_blocks(number));
    let image = log.read(store, g.group_start(number), blocks as usize);
    parse_group(store, log, domain, (number, epoch), upto, &image)
}

/// Makes entries of lost node table blocks again, and brings those of doubtful ones up to date (of all blocks with
/// `doubt_all`): of all records of a node in valid node blocks of the domain, the newest counts. What was deleted may
/// come back this way; the check of the namespace drops what nothing names.
pub fn recover_entries(store: &Store, log: &mut Log, domain: &mut Domain, doubt_all: bool) {
    let g = store.geometry();
    if !doubt_all && domain.groups.values().all(|g| g.lost.is_empty() && g.doubtful.is_empty()) {
        return;
    }
    let asked = |domain: &Domain, node: NodeId| {
        g.node_place(node).is_some_and(|(group, slot)| {
            let index = slot / NODES_PER_BLOCK;
            let has = |x: &Group| doubt_all || x.lost.contains(&index) || x.doubtful.contains(&index);
            domain.groups.get(&group).is_some_and(has)
        })
    };
    // Per node: version of its newest record, and the entry for it.
    let mut best: HashMap<NodeId, (u64, NodeEntry)> = HashMap::new();
    let pointed: HashSet<BlockAddr> =
        domain.groups.values().flat_map(|g| g.entries.used()).map(|(_, e)| e.addr).collect();
    let mut buf = AlignedBuf::zeroed(RUN_BLOCKS as usize * BLOCK_BYTES);
    for group in domain.groups.values() {
        let start = g.group_start(group.number).0;
        let is_valid = |at: u32| {
            let segment = group.segments.as_ref().and_then(|s| s.get((at / SEGMENT_BLOCKS) as usize));
            group.segments_doubtful || segment.is_none_or(|s| s.is_valid(at % SEGMENT_BLOCKS))
        };
        let wanted = |at: &u32| is_valid(*at) || pointed.contains(&BlockAddr(start + u64::from(*at)));
        for first in (g.meta_blocks()..group.blocks).step_by(RUN_BLOCKS as usize) {
            let mut run = first..group.blocks.min(first + RUN_BLOCKS);
            let Some(from) = run.clone().find(wanted) else { continue };
            run = from..run.rfind(wanted).unwrap_or(from) + 1;
            let buf = &mut buf[..run.len() * BLOCK_BYTES];
            // one bad sector fails them all: block by block then
            let whole = store.read(BlockAddr(start + u64::from(from)), buf).is_ok();
            for (at, block) in run.zip(buf.chunks_mut(BLOCK_BYTES)).filter(|(at, _)| wanted(at)) {
                let addr = BlockAddr(start + u64::from(at));
                if !whole && store.read(addr, block).is_err() {
                    continue;
                }
                let Ok(n) = NodeBlock::check(block, store.volume, addr) else { continue };
                for index in 0..n {
                    let Ok(r) = NodeBlock::record(block, index) else { continue };
                    if !asked(domain, r.node) {
                        continue;
                    }
                    let own = domain.entry(store, r.node).unwrap_or_default();
                    let is_own =
                        own.used() && (own.addr, usize::from(own.index), own.generation) == (addr, index, r.generation);
                    let deleted = !own.used() && own.generation != LOST_GENERATION && r.generation <= own.generation;
                    if !is_own && (!is_valid(at) || deleted) {
                        continue; // freed, or deleted as the table knows
                    }
                    if best.get(&r.node).is_none_or(|b| (r.generation, r.version) > (b.1.generation, b.0)) {
                        let overflow = if r.kind == NodeKind::Inode { 0 } else { OVERFLOW };
                        let flags = (r.flags & !OVERFLOW) | overflow | USED;
                        let entry = NodeEntry { addr, index: index as u8, flags, generation: r.generation };
                        best.insert(r.node, (r.version, entry));
                    }
                }
            }
        }
    }
    // Those whose own entry names their newest record are right.
    let place = |e: &NodeEntry| (e.addr, e.index, e.generation);
    best.retain(|node, (_, entry)| {
        domain.entry(store, *node).is_none_or(|own| !own.used() || place(&own) != place(entry))
    });
    let mut best: Vec<(NodeId, NodeEntry)> = best.into_iter().map(|(node, (_, entry))| (node, entry)).collect();
    best.sort_unstable_by_key(|b| b.0);
    for (node, entry) in best {
        let own = domain.entry(store, node).unwrap_or_default();
        if own.generation == LOST_GENERATION && !own.used() {
            log.add(codes::NODES_LOST, Some(node), "found again in a node block");
        } else {
            let why = format!("a newer record lies in {}, the node table names {}", entry.addr, own.addr);
            log.add(codes::ENTRY_OLD, Some(node), why);
        }
        domain.set_entry(store, node, entry);
        domain.recovered.insert(node);
    }
}
