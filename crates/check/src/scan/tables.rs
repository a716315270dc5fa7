//! Reads the tables of a domain's groups: header, segment table, node table. (Owner tables: [`super::space`].)

use crate::codes;
use crate::parts::domain::{Domain, Group};
use crate::report::Log;
use crate::rules::group::{LOST_GENERATION, has_owners, owners, parse_group};
use braidfs_device::{AlignedBuf, BLOCK_BYTES};
use braidfs_format::bat::BatEntry;
use braidfs_format::domain::{FAILED, TABLES_SOUND};
use braidfs_format::geometry::{NODES_PER_BLOCK, SEGMENT_BLOCKS};
use braidfs_format::group::{OWNERS_PER_BLOCK, lost_table, table_sum};
use braidfs_format::node::{FOUND, NodeBlock, NodeEntry, NodeKind, OVERFLOW, USED};
use braidfs_format::{BlockAddr, InodeNo, NodeId};
use braidfs_store::Store;
use std::cmp::Ordering;
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
    if let Some(h) = domain.header {
        compare_sum(store, log, domain, h.tables.get(), h.flags.get());
    }
    let doubted = |g: &Group| g.segments_doubtful || g.doubtful.iter().any(|i| !g.entries_dirty[*i as usize]);
    domain.tables_doubted = domain.groups.values().any(doubted);
}

/// What the sum of the segment tables, as the header has it beside `flags`, says of the tables of `domain`.
fn compare_sum(store: &Store, log: &mut Log, domain: &mut Domain, sum: u64, flags: u32) {
    let tables: Vec<(u32, u64)> = domain.groups.values().map(|g| (g.number, g.table_seq)).collect();
    let believe = |domain: &mut Domain| {
        domain.groups.values_mut().filter(|g| g.segments.is_some()).for_each(Group::believe_segments);
    };
    let (in_repair, sound) = (flags & FAILED != 0, flags & TABLES_SOUND != 0);
    if table_sum(&tables) == sum {
        // They are those of the last checkpoint, and say how often it had written each other table. A copy that does not hold is
        // the other one then: an older one, or of a checkpoint that did not end. But where a repair began in doubt, it may have
        // mended the copies that told so, and nothing else yet.
        if !domain.header_damaged && (!in_repair || sound) {
            believe(domain);
        }
        return;
    }
    if in_repair && sound {
        // A repair was cut off, which tells of the segment tables at its end. What it has not written is as it was then, without a
        // doubt, and a copy that does not hold is the one that it was writing.
        believe(domain);
        domain.groups.values_mut().for_each(|g| g.counts_wrong = true);
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
/// `doubt_all`): of all records of a node in valid node blocks of the domain, the newest counts. Blocks that an owner table gives to
/// an inode are none, whatever their content looks like: it is the user's, and much. What was deleted may
/// come back this way; the check of the namespace drops what nothing names. An entry of a table that is as new as it must be is
/// believed where its block is the one that it tells of: what is newer was never committed. Where that block is an older
/// one (found with `doubt_all`), the newest record that is left stands in for the one that was lost.
pub fn recover_entries(store: &Store, log: &mut Log, domain: &mut Domain, doubt_all: bool) {
    domain.outdated.clear();
    if !doubt_all && domain.groups.values().all(|g| g.lost.is_empty() && g.doubtful.is_empty()) {
        return;
    }
    let mut search = Search { store, domain, doubt_all, best: HashMap::new() };
    let pointed: HashSet<BlockAddr> =
        domain.groups.values().flat_map(|g| g.entries.used()).map(|(_, e)| e.addr).collect();
    domain.groups.values().for_each(|group| search.group(group, &pointed));
    let Search { best, .. } = search;
    let mut best: Vec<(NodeId, Found)> = best.into_iter().filter(|(_, f)| f.standing != Standing::Believed).collect();
    best.sort_unstable_by_key(|b| b.0);
    for (node, found) in best {
        put(store, log, domain, doubt_all, node, &found);
    }
}

/// Marks the nodes that were [found again](recover_entries) on the device, for a check that must look at them though this one does
/// not end: what the tables had of them is lost.
pub fn mark_found(store: &Store, domain: &mut Domain) {
    for node in domain.recovered.iter().copied().collect::<Vec<_>>() {
        if let Some(entry) = domain.entry(store, node).filter(NodeEntry::used) {
            domain.set_entry(store, node, NodeEntry { flags: entry.flags | FOUND, ..entry });
        }
    }
}

/// Takes the marks away that [`mark_found`] made, before a replay or in a check that did not end: those nodes count as found now.
pub fn take_found(store: &Store, domain: &mut Domain) {
    for group in domain.groups.values_mut() {
        let found: Vec<u32> =
            group.entries.used().filter(|(_, e)| e.flags & FOUND != 0).map(|(slot, _)| slot).collect();
        for slot in found {
            if let Some(entry) = group.entries.get_mut(slot) {
                entry.flags &= !FOUND;
            }
            group.entries_dirty[(slot / NODES_PER_BLOCK) as usize] = true;
            domain.recovered.insert(store.geometry().node(group.number, slot));
        }
    }
}

/// What is known of a record's place in time. The later ones here go before the others, whatever version the records have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Standing {
    /// It was found, and nothing more is known of it.
    Found,
    /// It lies in the block that the entry of its node tells of, and the entry is as new as it must be.
    Believed,
}

/// The best record of a node so far.
struct Found {
    standing: Standing,
    version: u64,
    /// The transaction that wrote its block.
    tx: u64,
    /// The entry for it.
    entry: NodeEntry,
    /// The block that the node's own entry names was found to be an older one.
    own_is_old: bool,
}

impl Found {
    /// Of two records of one version, which the cleaner has moved, that is the newer one which was written later.
    fn rank(&self) -> (Standing, u32, u64, u64) {
        (self.standing, self.entry.generation, self.version, self.tx)
    }
}

/// The search for records of the nodes whose table entries are in doubt.
struct Search<'a> {
    store: &'a Store,
    domain: &'a Domain,
    doubt_all: bool,
    best: HashMap<NodeId, Found>,
}

/// Whether the table block with the entry of `node` may be older than the volume, or is lost.
fn is_table_doubted(store: &Store, domain: &Domain, node: NodeId) -> bool {
    store.geometry().node_place(node).is_none_or(|(group, slot)| {
        let index = slot / NODES_PER_BLOCK;
        domain.groups.get(&group).is_none_or(|g| g.lost.contains(&index) || g.doubtful.contains(&index))
    })
}

impl Search<'_> {
    /// Looks at the blocks of `group` that are valid, and those that entries name (`pointed`).
    fn group(&mut self, group: &Group, pointed: &HashSet<BlockAddr>) {
        let g = self.store.geometry();
        let start = g.group_start(group.number).0;
        let of_inodes = self.of_inodes(group);
        let is_valid = |at: u32| {
            let segment = group.segments.as_ref().and_then(|s| s.get((at / SEGMENT_BLOCKS) as usize));
            let valid = group.segments_doubtful || segment.is_none_or(|s| s.is_valid(at % SEGMENT_BLOCKS));
            valid && !of_inodes.get(at as usize).is_some_and(|is| *is)
        };
        let wanted = |at: &u32| is_valid(*at) || pointed.contains(&BlockAddr(start + u64::from(*at)));
        let mut buf = AlignedBuf::zeroed(RUN_BLOCKS as usize * BLOCK_BYTES);
        for first in (g.meta_blocks()..group.blocks).step_by(RUN_BLOCKS as usize) {
            let mut run = first..group.blocks.min(first + RUN_BLOCKS);
            let Some(from) = run.clone().find(wanted) else { continue };
            run = from..run.rfind(wanted).unwrap_or(from) + 1;
            let buf = &mut buf[..run.len() * BLOCK_BYTES];
            // one bad sector fails them all: block by block then
            let whole = self.store.read(BlockAddr(start + u64::from(from)), buf).is_ok();
            for (at, block) in run.zip(buf.chunks_mut(BLOCK_BYTES)).filter(|(at, _)| wanted(at)) {
                let addr = BlockAddr(start + u64::from(at));
                if whole || self.store.read(addr, block).is_ok() {
                    self.block(addr, block, is_valid(at));
                }
            }
        }
    }

    /// Of each block of `group` whether its owner table says that it is an inode's, where that is as new as it must be. Where a
    /// journal is given up, blocks may have been used anew since.
    fn of_inodes(&self, group: &Group) -> Vec<bool> {
        let mut all = vec![false; group.blocks as usize];
        if self.domain.journal_lost {
            return all;
        }
        let g = self.store.geometry();
        for (half, all) in
            (0u32..).zip(all.chunks_mut(OWNERS_PER_BLOCK as usize)).filter(|(h, _)| has_owners(group, *h))
        {
            let pair = Log::default().read(self.store, g.owners_addr(group.number, half / 2, half % 2), 2);
            let table = owners(self.store, &mut Log::default(), &mut Vec::new(), group, half, &pair);
            let sound = !table.old && (!table.damaged || group.segments_proven);
            for (is, owner) in all.iter_mut().zip(table.owners.filter(|_| sound).iter().flatten()) {
                *is = owner.node.0 != 0;
            }
        }
        all
    }

    /// Looks at a block; `valid`: there may be records in it that no entry names yet.
    fn block(&mut self, addr: BlockAddr, block: &[u8], valid: bool) {
        let Ok(n) = NodeBlock::check(block, self.store.volume, addr) else { return };
        for (index, r) in (0..n).filter_map(|i| Some((i as u8, NodeBlock::record(block, i).ok()?))) {
            let Some((group, _)) = self.store.geometry().node_place(r.node) else { continue };
            let doubted = is_table_doubted(self.store, self.domain, r.node);
            if !self.domain.groups.contains_key(&group) || !(doubted || self.doubt_all) {
                continue;
            }
            let own = self.domain.entry(self.store, r.node).unwrap_or_default();
            let is_own = own.used() && (own.addr, own.index, own.generation) == (addr, index, r.generation);
            let deleted = !own.used() && own.generation != LOST_GENERATION && r.generation <= own.generation;
            if !is_own && (!valid || deleted) {
                continue; // freed, or deleted as the table knows
            }
            let knows = own.used() && own.written != 0 && !doubted;
            let age = own.compare_block(block);
            if knows && !is_own && age == Ordering::Greater {
                continue; // the table is not older: no transaction that wrote this was committed
            }
            let standing = if knows && is_own && age == Ordering::Equal { Standing::Believed } else { Standing::Found };
            let overflow = if r.kind == NodeKind::Inode { 0 } else { OVERFLOW };
            let flags = (r.flags & !OVERFLOW) | overflow | USED;
            let written = NodeBlock::written(block);
            let entry = NodeEntry { addr, index, flags, generation: r.generation, written };
            let mut own_is_old = is_own && age == Ordering::Less;
            let best = self.best.get_mut(&r.node);
            own_is_old |= best.as_ref().is_some_and(|b| b.own_is_old);
            let found = Found { standing, version: r.version, tx: NodeBlock::transaction(block), entry, own_is_old };
            match best {
                Some(b) if found.rank() <= b.rank() => b.own_is_old = own_is_old,
                _ => drop(self.best.insert(r.node, found)),
            }
        }
    }
}

/// The inode that the record where `entry` says belongs to, and what the record is.
fn owner_of(store: &Store, entry: &NodeEntry) -> Option<(InodeNo, NodeKind)> {
    let mut block = AlignedBuf::zeroed(BLOCK_BYTES);
    store.read(entry.addr, &mut block).ok()?;
    NodeBlock::record(&block, usize::from(entry.index)).ok().map(|r| (r.owner, r.kind))
}

/// Makes the best record that was found the one that the entry of `node` names, and says so, where it is not.
fn put(store: &Store, log: &mut Log, domain: &mut Domain, doubt_all: bool, node: NodeId, found: &Found) {
    let own = domain.entry(store, node).unwrap_or_default();
    let entry = found.entry;
    let place = |e: &NodeEntry| (e.addr, e.index, e.generation);
    let same = own.used() && place(&own) == place(&entry);
    let age = own.compare_written(entry.written);
    // before a replay the journal may tell of a newer block in this place
    if same && (age == Ordering::Equal || !doubt_all) {
        return;
    }
    let knows = own.used() && own.written != 0 && !is_table_doubted(store, domain, node);
    let outdated = knows && !(same && age == Ordering::Greater);
    // what an overflow node holds is part of its inode
    let (owner, kind) = owner_of(store, &entry).unwrap_or((node.inode(), NodeKind::Inode));
    let about = Some(owner.node());
    let (addr, before, is, says) = (entry.addr, own.addr, entry.written, own.written);
    if same {
        let code = if age == Ordering::Less { codes::NODE_BLOCK_OLD } else { codes::ENTRY_OLD };
        let why = format!("{node}: {addr} is of transaction {is:#x}, the node table says {says:#x} (low halves)");
        log.add(code, about, why);
    } else if outdated {
        let code = if found.own_is_old { codes::NODE_BLOCK_OLD } else { codes::NODE_BLOCK };
        let why = format!("{node}: its newest record, in {before}, is lost; the newest that is left lies in {addr}");
        log.add(code, about, why);
    } else if own.generation == LOST_GENERATION && !own.used() {
        log.add(codes::NODES_LOST, Some(node), "found again in a node block");
    } else {
        let why = format!("a newer record lies in {addr}, the node table names {before}");
        log.add(codes::ENTRY_OLD, Some(node), why);
    }
    domain.set_entry(store, node, entry);
    domain.recovered.insert(node);
    if outdated {
        // blocks that it names may be others' by now
        domain.recovered.insert(owner.node());
        if matches!(kind, NodeKind::Inode | NodeKind::Links) {
            domain.outdated.insert(owner.node());
        }
    }
}
