//! Committed transactions of a journal become the committed view again, by several threads.
//!
//! What a record sets belongs to one group: validity and owners to the group of its block, the entry of a node to the group of
//! the node's number. So each thread takes the groups that fall to it, and goes through all transactions in the order of
//! their numbers: the tables of a group see the records that they would see from one thread, in the same order. What is not of
//! a group is gathered in that order beside them.

use super::recovered::{Hint, Recovered};
use crate::error::{Error, Result};
use crate::nodes::NodeTable;
use crate::planted::{Bug, planted};
use crate::space::Space;
use crate::types::*;
use braidfs_format::domain::DomainHeader;
use braidfs_format::journal::{Chunk, ChunkKind, RecordRef, Records, TableRecord};
use braidfs_format::node::{OVERFLOW, REMOTE};
use braidfs_format::{Corrupt, Geometry};
use braidfs_sync::workers::Workers;
use std::collections::HashMap;

/// Records that one thread has replayed before another has started.
const FEW_RECORDS: usize = 2048;

/// What records change.
pub(crate) struct Tables<'t> {
    pub geometry: Geometry,
    pub space: &'t Space,
    pub nodes: &'t NodeTable,
}

/// A committed transaction.
struct Committed<'c> {
    tx: TxId,
    /// Records of its chunks, in the order in which its commit record names these.
    parts: Vec<&'c Records>,
}

/// Applies the committed transactions of the journal of which `header` tells; the newest one's number.
///
/// # Errors
/// `Corrupt` where one is missing or does not hold; of the device.
pub(crate) fn replay(
    id: DomainId,
    chunks: &[Chunk],
    tables: &Tables<'_>,
    header: &DomainHeader,
    workers: &Workers,
    rec: &mut Recovered,
) -> Result<u64> {
    let last = header.last_tx.get();
    let committed = committed(id, chunks, last)?;
    let groups = tables.space.groups();
    let records = committed.iter().flat_map(|c| &c.parts).map(|p| p.len()).sum();
    let threads = workers.threads_for(records, FEW_RECORDS);
    let grain = if threads == 1 { 2 } else { 1 };
    let gathered = workers.each(1 + threads, grain, |i| match i {
        0 => Ok::<_, Error>((None, Some(gather(&committed)))),
        i => Ok((tables.apply(&committed, &Share { index: i - 1, of: threads, groups: &groups }), None)),
    })?;
    let (failed, mut found): (Vec<_>, Vec<_>) = gathered.into_iter().unzip();
    // what one thread would have met first
    if let Some((_, why)) = failed.into_iter().flatten().min_by_key(|(at, _)| *at) {
        return Err(why);
    }
    if let Some(found) = found.swap_remove(0) {
        rec.transactions += committed.len();
        rec.hints = found.hints;
        rec.remote = found.remote;
        rec.orphans = found.orphans;
    }
    Ok(committed.last().map_or(last, |c| c.tx.0.max(last)))
}

/// The committed transactions, in the order of their numbers.
fn committed(id: DomainId, chunks: &[Chunk], last: u64) -> Result<Vec<Committed<'_>>> {
    let by_pos: HashMap<u64, &Chunk> = chunks.iter().map(|c| (c.pos, c)).collect();
    let mut commits: Vec<&Chunk> = chunks.iter().filter(|c| c.kind == ChunkKind::Commit).collect();
    commits.sort_by_key(|c| c.tx);
    let mut newest = last;
    let mut all = Vec::with_capacity(commits.len());
    for c in commits {
        let mut parts = Vec::new();
        for part in &c.records {
            if let RecordRef::After(tx) = part {
                if tx.0 > newest {
                    let why = format!("{id}: {} follows {tx}, which is missing", c.tx);
                    return Err(Corrupt::new("journal", why).into());
                }
                continue;
            }
            let RecordRef::Part { pos, crc } = part else {
                return Err(Corrupt::new("commit record", format!("{id} {}: holds {part:?}", c.tx)).into());
            };
            match by_pos.get(&pos) {
                Some(p) if p.crc == crc && p.tx == c.tx && p.kind == ChunkKind::Stream => {
                    parts.push(&p.records);
                }
                // checkpointed long ago, its chunks partly overwritten
                _ if c.tx.0 <= last => {
                    parts.clear();
                    break;
                }
                _ => {
                    let why = format!("{id} {}: the chunk at {pos} that its commit record names does not hold", c.tx);
                    return Err(Corrupt::new("journal", why).into());
                }
            }
        }
        newest = newest.max(c.tx.0);
        all.push(Committed { tx: c.tx, parts });
    }
    Ok(all)
}

/// Some of a domain's groups.
struct Share<'g> {
    index: usize,
    /// So many shares.
    of: usize,
    /// All groups of the domain, by rising numbers.
    groups: &'g [u32],
}

impl Share<'_> {
    /// Groups are dealt out by their place among those of the domain: their numbers often have a step in common, the number
    /// of domains. Of a group that is not the domain's the first share tells.
    fn has(&self, group: u32) -> bool {
        self.groups.binary_search(&group).unwrap_or(0) % self.of == self.index
    }
}

impl Tables<'_> {
    /// Applies what is of the groups of a share. The first error, and the transaction in which it was: in it blocks come
    /// before nodes.
    fn apply(&self, committed: &[Committed<'_>], share: &Share<'_>) -> Option<((usize, bool), Error)> {
        let (mut space, mut nodes) = (self.space.replaying(), self.nodes.newest());
        let mut one = |at: usize| {
            let c = &committed[at];
            let mut failed = None;
            let ours = |group: &dyn Fn() -> u32| share.of == 1 || share.has(group());
            for p in &c.parts {
                let set = |node, entry| {
                    if failed.is_none() && ours(&|| group_of_node(self.geometry, node)) {
                        failed = nodes.set(node, entry).err().map(|why| ((at, true), why));
                    }
                    Ok(())
                };
                let apply = |r| match r {
                    _ if planted(Bug::BitmapNotReplayed) => Ok(()),
                    r if ours(&|| group_of(self.geometry, r)) => space.apply(r, c.tx),
                    _ => Ok(()),
                };
                if let Err(why) = p.tables(set, apply) {
                    return Some(((at, false), why));
                }
            }
            failed
        };
        let failed = if planted(Bug::ReplayUnordered) {
            (0..committed.len()).rev().find_map(&mut one)
        } else {
            (0..committed.len()).find_map(&mut one)
        };
        failed.or_else(|| nodes.bring_home().err().map(|why| ((committed.len(), true), why)))
    }
}

/// The group whose tables a record changes. What is of no group is refused by whoever gets it.
fn group_of(geometry: Geometry, r: TableRecord) -> u32 {
    match r {
        TableRecord::Alloc { addr, .. } | TableRecord::Free { addr, .. } | TableRecord::Live { addr, .. } => {
            geometry.group_of(addr)
        }
        TableRecord::Node { node, .. } => group_of_node(geometry, node),
    }
}

fn group_of_node(geometry: Geometry, node: NodeId) -> u32 {
    geometry.node_place(node).map_or(0, |(group, _)| group)
}

/// What the transactions say beside their tables.
#[derive(Default)]
struct Found {
    hints: Vec<Hint>,
    remote: Vec<InodeNo>,
    /// Of the newest one.
    orphans: Vec<InodeNo>,
}

fn gather(committed: &[Committed<'_>]) -> Found {
    let mut found = Found::default();
    for c in committed {
        found.orphans.clear();
        for r in c.parts.iter().filter(|p| !p.is_tables_only()).flat_map(|p| p.iter()) {
            match r {
                RecordRef::Remote { dir, child, generation, name } => {
                    found.hints.push(Hint { dir, name: name.into(), child: InodeRef { ino: child, generation } })
                }
                RecordRef::Table(TableRecord::Node { node, entry })
                    if entry.used() && entry.flags & (REMOTE | OVERFLOW) == REMOTE =>
                {
                    found.remote.push(node.inode());
                }
                RecordRef::Orphans(o) => found.orphans.extend(o.iter()),
                _ => {}
            }
        }
    }
    found.hints.sort();
    found.hints.dedup();
    found.remote.sort();
    found.remote.dedup();
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::space::testdev::store;
    use braidfs_format::group::{Owner, SegmentKind, Temperature};
    use braidfs_format::journal::Record;
    use braidfs_format::node::{NodeEntry, USED};

    const D: DomainId = DomainId(0);
    /// As the first of three domains has them.
    const GROUPS: [u32; 3] = [0, 3, 6];

    /// Blocks and nodes of all groups that are taken and freed again, in many transactions.
    fn history(geometry: Geometry, rng: &mut fastrand::Rng) -> Vec<Vec<Record>> {
        let one = |tx: u32, rng: &mut fastrand::Rng| {
            let group = rng.choice(GROUPS).unwrap_or(0);
            let k = rng.u64(..20);
            let addr = BlockAddr(geometry.group_start(group).0 + u64::from(geometry.meta_blocks()) + 2 * k);
            let node = NodeId(u64::from(group) * u64::from(geometry.nodes()) + 5 + k);
            if rng.bool() {
                let entry = NodeEntry { generation: tx, ..NodeEntry::default() };
                return [Record::Free { addr, len: 2 }, Record::Node { node, entry }];
            }
            let (kind, temperature) = (SegmentKind::Data, Temperature::Warm);
            let alloc = Record::Alloc { addr, len: 2, kind, temperature, owner: node.inode(), lblk: u64::from(tx) };
            [
                alloc,
                Record::Node { node, entry: NodeEntry { addr, index: 1, flags: USED, generation: tx, written: tx } },
            ]
        };
        (1..300).map(|tx| (0..4).flat_map(|_| one(tx, rng)).collect()).collect()
    }

    #[test]
    fn shares_of_one_domain_make_what_one_thread_makes() {
        let (_, store) = store(2, 7, 1024);
        GROUPS.iter().for_each(|g| Space::init_group(&store, D, *g, 1, None).unwrap());
        let geometry = store.geometry();
        let history = history(geometry, &mut fastrand::Rng::with_seed(3));
        let encoded = |(tx, records): (u64, &Vec<Record>)| {
            let mut bytes = Vec::new();
            records.iter().for_each(|r| r.encode(&mut bytes));
            Records::new(&bytes, TxId(tx)).unwrap()
        };
        let parts: Vec<Records> = (1..).zip(&history).map(encoded).collect();
        let committed: Vec<Committed<'_>> =
            (1..).zip(&parts).map(|(tx, r)| Committed { tx: TxId(tx), parts: vec![r] }).collect();
        let replayed = |of: usize| -> (Vec<Owner>, Vec<NodeEntry>, u64) {
            let space = Space::open(store.clone(), D, 1, &GROUPS, None, None).unwrap();
            let nodes = NodeTable::open(store.clone(), D, &GROUPS, &space).unwrap();
            let tables = Tables { geometry, space: &space, nodes: &nodes };
            let shares: Vec<Share<'_>> = (0..of).map(|index| Share { index, of, groups: &GROUPS }).collect();
            let records = || history.iter().flatten().filter_map(Record::table);
            for r in records() {
                assert_eq!(shares.iter().filter(|s| s.has(group_of(geometry, r))).count(), 1, "{r:?}");
            }
            let busy = |s: &&Share<'_>| records().any(|r| s.has(group_of(geometry, r)));
            assert_eq!(shares.iter().filter(busy).count(), of, "a thread of {of} has nothing to do");
            // the last one first: no order of the threads counts
            assert!(shares.iter().rev().all(|s| tables.apply(&committed, s).is_none()));
            let blocks = |g: &u32| geometry.group_start(*g).0 + u64::from(geometry.meta_blocks())..;
            let owners = GROUPS.iter().flat_map(|g| blocks(g).take(40)).map(|b| space.owner(BlockAddr(b)).unwrap());
            let numbers = |g: &u32| u64::from(*g) * u64::from(geometry.nodes()) + 5..;
            let entries = GROUPS.iter().flat_map(|g| numbers(g).take(20)).map(|n| nodes.get(NodeId(n)).unwrap());
            (owners.collect(), entries.collect(), space.stats().free)
        };
        let one = replayed(1);
        assert!(one.1.iter().any(|e| e.used()) && one.1.iter().any(|e| !e.used()));
        for of in [2, 3] {
            assert_eq!(replayed(of), one, "{of} shares");
        }
    }
}
