//! Opening a domain: replay of its journal, in a time bounded by its size.
//!
//! Committed transactions are applied to `space` and `nodes` in order: their records are states, so it does not matter
//! how far a checkpoint had come. Then the roll-forward records of all transactions after the newest committed one are
//! merged (newest version of each node) and, when all domains are open, become cells of a *recovery transaction*, which
//! `braid/reconcile.rs` completes (links across domains) and `volume/mount.rs` commits. Until that commit the journal's
//! tail stays: a crash during recovery starts it again from the same state.

use super::peers::Peers;
use super::{Domain, Enter, HeaderPair, Layers, Shared};
use crate::cell::record::decode_cell;
use crate::cell::{Body, Cell};
use crate::error::Result;
use crate::journal::Journal;
use crate::nodes::NodeTable;
use crate::planted::{Bug, planted};
use crate::space::{Checkpointed, Run, Space};
use crate::store::Store;
use crate::types::*;
use braidfs_format::domain::CLEAN;
use braidfs_format::group::{SegmentKind, Temperature};
use braidfs_format::inode::Link;
use braidfs_format::journal::{Chunk, ChunkKind, Record};
use braidfs_format::node::{DIR, NodeKind, NodeRecord, OVERFLOW, REMOTE};
use braidfs_format::{BLOCK_BYTES, Corrupt};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

/// A cross-domain directory entry that a replayed transaction changed.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Hint {
    /// The directory.
    pub dir: InodeNo,
    /// The name.
    pub name: Box<[u8]>,
    /// The inode that it names or named.
    pub child: InodeRef,
}

/// A name that an inode had by a roll-forward record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// The inode.
    pub ino: InodeNo,
    /// The name.
    pub link: Link,
    /// When it got its names, in logical time.
    pub seq: u64,
}

/// An inode that was rolled forward: its links before and after are to be compared.
#[derive(Debug)]
pub struct Forwarded {
    /// The cell, already in the recovery transaction.
    pub cell: Arc<Cell>,
    /// Its committed links.
    pub old_links: Vec<Link>,
}

/// What replay leaves for the volume to do.
#[derive(Debug, Default)]
pub struct Recovered {
    /// The domain was not unmounted properly.
    pub dirty: bool,
    /// Transactions replayed.
    pub transactions: usize,
    /// Traces of the crash in the journal that might be damage.
    pub traces: Vec<String>,
    /// Entries and inodes of other domains to compare.
    pub hints: Vec<Hint>,
    /// Inodes replayed with a parent in another domain.
    pub remote: Vec<InodeNo>,
    /// Unlinked but open when it stopped.
    pub orphans: Vec<InodeNo>,
    /// Names that rolled-forward inodes once had durably, also where a later record moved them on: whoever claims such a
    /// name by an older record lost it.
    pub claims: Vec<Claim>,
    /// Roll-forward records, by inode: the inode's own and its overflow nodes'.
    forward: Vec<(NodeRecord, Vec<NodeRecord>)>,
}

impl Domain {
    /// Opens a domain and replays its journal.
    ///
    /// # Errors
    /// Of the device; [`crate::Error::Corrupt`] where tables or committed records do not hold.
    pub fn open(
        id: DomainId,
        store: Arc<Store>,
        shared: Arc<Shared>,
        peers: Arc<dyn Peers>,
        mut header: HeaderPair,
        groups: &[u32],
        mlogs: u16,
    ) -> Result<(Self, Recovered)> {
        let journal = Journal::open(store.clone(), id, &header.header);
        let replay_it = !shared.options.checkpoint_only;
        if header.header.flags.get() & CLEAN != 0 && replay_it && journal.goes_on()? {
            // the header is older than the journal: the one that was written last is lost
            tracing::warn!("{id}: its header says unmounted, its journal goes on: replayed");
            header.header.flags = (header.header.flags.get() & !CLEAN).into();
        }
        let log = Run { addr: journal.addr(0), len: header.header.journal_blocks.get() };
        let last = Checkpointed::of(&header.header);
        let space = Space::open(store.clone(), id, mlogs, groups, Some(log), Some(last))?;
        let doubt = space.doubt(last.sum);
        let nodes = NodeTable::open(store.clone(), id, &space.groups(), &space)?;
        let mut rec = Recovered::default();
        let mut keep = None;
        let mut durable = header.header.last_tx.get();
        if header.header.flags.get() & CLEAN == 0 && replay_it {
            rec.dirty = true;
            let (chunks, end) = journal.scan()?;
            rec.traces = journal.traces(&chunks, end, header.header.last_tx.get())?;
            let last = replay(id, &chunks, &space, &nodes, header.header.last_tx.get(), &mut rec)?;
            rec.forward = merge_roll_forward(&store, &chunks, last, &mut rec.claims)?;
            durable = last;
            // the recovery transaction is newer than everything seen
            let newest = chunks.iter().map(|c| c.tx.0).max().unwrap_or(0).max(last);
            header.header.last_tx = newest.into();
            keep = (!chunks.is_empty()).then(|| (newest, journal.tail()));
            journal.set_head(end.max(journal.head()));
        }
        if rec.dirty
            && let Some(why) = doubt
        {
            return Err(why.into());
        }
        let d = Self::new(id, store, shared, peers, Layers { space, nodes, journal }, header, mlogs);
        d.durable.store(durable, std::sync::atomic::Ordering::Relaxed);
        if let Some((newest, tail)) = keep {
            // nothing is given up before the recovery transaction is durable
            d.first_pos.lock().insert(newest + 1, tail);
        }
        if let Some(why) = doubt {
            d.fail(&why.into());
        }
        Ok((d, rec))
    }

    /// Turns roll-forward records into cells of the running (recovery) transaction: takes their blocks and nodes.
    /// Nothing else may have been allocated before.
    ///
    /// # Errors
    /// [`crate::Error::Corrupt`] where a record cannot be.
    pub fn roll_forward(&self, e: &Enter<'_>, rec: &mut Recovered) -> Result<Vec<Forwarded>> {
        let mut out = Vec::new();
        for (inode, overflow) in std::mem::take(&mut rec.forward) {
            if let Some(f) = self.roll_forward_one(e, &inode, overflow)? {
                out.push(f);
            }
        }
        Ok(out)
    }

    fn roll_forward_one(
        &self,
        e: &Enter<'_>,
        inode: &NodeRecord,
        overflow: Vec<NodeRecord>,
    ) -> Result<Option<Forwarded>> {
        let old = match self.find(inode.node.inode()) {
            Ok(old) => old.filter(|c| c.generation == inode.generation),
            // the record that was synced says all; blocks that only the lost one names are found by a check
            Err(crate::Error::Corrupt(why)) if inode.flags & DIR == 0 => {
                tracing::error!("{}: {why}; restored as it was synced", inode.node);
                None
            }
            Err(e) => return Err(e),
        };
        if old.is_some() && inode.flags & DIR != 0 {
            return Ok(None); // it exists: the skeleton says nothing new
        }
        if let Some(o) = &old
            && o.state.read().durability.version() >= inode.version
        {
            return Ok(None);
        }
        let mut by_node: HashMap<NodeId, NodeRecord> = overflow.into_iter().map(|r| (r.node, r)).collect();
        for r in by_node.values() {
            self.new_generations.lock().insert(r.node, r.generation);
        }
        let cell = decode_cell(inode, self.id, &mut |n| match by_node.remove(&n) {
            Some(r) => Ok(r),
            None => self.nodes.load(n, &self.nodes.get(n)?),
        })?;
        let new_nodes: HashSet<NodeId> = cell.nodes(&cell.state.read()).into_iter().collect();
        let mut old_links = Vec::new();
        let mut old_blocks: BTreeMap<u64, ()> = BTreeMap::new();
        let mut dropped = Vec::new();
        if let Some(o) = &old {
            let st = o.state.read();
            old_links = st.links.to_vec();
            if let Body::File(f) = &st.body {
                for x in f.map.iter() {
                    old_blocks.extend((x.addr.0..x.addr.0 + u64::from(x.len)).map(|b| (b, ())));
                }
            }
            dropped = o.nodes(&st).into_iter().filter(|n| !new_nodes.contains(n)).collect();
            drop(st);
            self.cells.remove(o);
        }
        for n in &new_nodes {
            if !self.nodes.get(*n)?.used() {
                self.nodes.take(*n)?;
            }
        }
        let cell = Arc::new(cell);
        let mut st = cell.state.write();
        st.dropped = dropped.into();
        if let Body::File(f) = &mut st.body {
            let mut taken = Vec::new();
            for x in f.map.iter() {
                // block by block: parts of an extent may be old
                let mut at = 0;
                while at < x.len {
                    let addr = x.addr.0 + u64::from(at);
                    if old_blocks.remove(&addr).is_some() {
                        at += 1;
                        continue;
                    }
                    let mut n = 1;
                    while at + n < x.len && !old_blocks.contains_key(&(addr + u64::from(n))) {
                        n += 1;
                    }
                    taken.push((Run { addr: BlockAddr(addr), len: n }, x.lblk + u64::from(at)));
                    at += n;
                }
            }
            for (run, lblk) in taken {
                self.space.take(run)?;
                e.tx().record(Record::Alloc {
                    addr: run.addr,
                    len: run.len,
                    kind: SegmentKind::Data,
                    temperature: Temperature::Warm,
                    owner: cell.ino,
                    lblk,
                });
            }
            f.map.all_dirty();
        }
        let runs: Vec<(BlockAddr, u32)> = old_blocks.keys().map(|b| (BlockAddr(*b), 1)).collect();
        self.free_runs(e.tx(), runs);
        self.touch(e.tx(), &cell, &mut st)?;
        // the state is the record's: whoever waits for a later version of this inode must not take it for that
        st.durability.recovery_keeps_version(inode.version);
        drop(st);
        self.cells.insert_new(cell.clone());
        Ok(Some(Forwarded { cell, old_links }))
    }
}

/// Applies the committed transactions; the newest one's number.
///
/// # Errors
/// `Corrupt` where one is missing or does not hold; of the device.
pub(crate) fn replay(
    id: DomainId,
    chunks: &[Chunk],
    space: &Space,
    nodes: &NodeTable,
    last: u64,
    rec: &mut Recovered,
) -> Result<u64> {
    let by_pos: HashMap<u64, &Chunk> = chunks.iter().map(|c| (c.pos, c)).collect();
    let mut commits: Vec<&Chunk> = chunks.iter().filter(|c| c.kind == ChunkKind::Commit).collect();
    commits.sort_by_key(|c| c.tx);
    let mut newest = last;
    for c in commits {
        let mut records = Vec::new();
        for part in &c.records {
            if let Record::After(tx) = part {
                if tx.0 > newest {
                    let why = format!("{id}: {} follows {tx}, which is missing", c.tx);
                    return Err(Corrupt::new("journal", why).into());
                }
                continue;
            }
            let Record::Part { pos, crc } = part else {
                return Err(Corrupt::new("commit record", format!("{id} {}: holds {part:?}", c.tx)).into());
            };
            match by_pos.get(pos) {
                Some(p) if p.crc == *crc && p.tx == c.tx && p.kind == ChunkKind::Stream => {
                    records.extend(p.records.iter().cloned())
                }
                // checkpointed long ago, its chunks partly overwritten
                _ if c.tx.0 <= last => {
                    records.clear();
                    break;
                }
                _ => {
                    let why = format!("{id} {}: the chunk at {pos} that its commit record names does not hold", c.tx);
                    return Err(Corrupt::new("journal", why).into());
                }
            }
        }
        if !planted(Bug::BitmapNotReplayed) {
            space.replay(&records, c.tx)?;
        }
        nodes.replay(&records)?;
        newest = newest.max(c.tx.0);
        rec.transactions += 1;
        rec.orphans.clear();
        for r in records {
            match r {
                Record::Remote { dir, child, generation, name } => {
                    rec.hints.push(Hint { dir, name, child: InodeRef { ino: child, generation } })
                }
                Record::Node { node, entry } if entry.used() && entry.flags & (REMOTE | OVERFLOW) == REMOTE => {
                    rec.remote.push(node.inode());
                }
                Record::Orphans(o) => rec.orphans.extend(o),
                _ => {}
            }
        }
    }
    rec.hints.sort();
    rec.hints.dedup();
    rec.remote.sort();
    rec.remote.dedup();
    Ok(newest)
}

/// Merges the roll-forward chunks of transactions after `last`: per inode, its newest records.
fn merge_roll_forward(
    store: &Store,
    chunks: &[Chunk],
    last: u64,
    claims: &mut Vec<Claim>,
) -> Result<Vec<(NodeRecord, Vec<NodeRecord>)>> {
    let mut forward: Vec<&Chunk> =
        chunks.iter().filter(|c| c.kind == ChunkKind::RollForward && c.tx.0 > last).collect();
    forward.sort_by_key(|c| c.pos);
    // a file syncs one at a time, so only its last chunk can be torn; its data is then compared with the checksums
    let about = |c: &Chunk| match c.records.first() {
        Some(Record::Full(r)) if r.flags & DIR == 0 => Some(r.node),
        _ => None,
    };
    let mut latest: HashMap<NodeId, u64> = HashMap::new();
    for c in &forward {
        if let Some(n) = about(c) {
            latest.insert(n, c.pos);
        }
    }
    let mut merged: BTreeMap<NodeId, NodeRecord> = BTreeMap::new();
    for c in forward {
        if about(c).is_some_and(|n| latest[&n] == c.pos) && !data_holds(store, c)? {
            continue;
        }
        for r in &c.records {
            if let Record::Full(r) = r {
                if r.kind == NodeKind::Inode {
                    let i = braidfs_format::inode::Inode::decode(&r.payload)?;
                    claims.extend(i.links.into_iter().map(|link| Claim { ino: r.node.inode(), link, seq: i.link_seq }));
                }
                let newer = merged.get(&r.node).is_none_or(|o| {
                    r.generation != o.generation || (r.version >= o.version) != planted(Bug::VersionInverted)
                });
                if newer {
                    merged.insert(r.node, r.clone());
                }
            }
        }
    }
    let (inodes, overflow): (Vec<_>, Vec<_>) = merged.into_values().partition(|r| r.kind == NodeKind::Inode);
    let mut by_owner: HashMap<InodeNo, Vec<NodeRecord>> = HashMap::new();
    for r in overflow {
        by_owner.entry(r.owner).or_default().push(r);
    }
    Ok(inodes
        .into_iter()
        .map(|i| {
            let o = by_owner.remove(&i.node.inode()).unwrap_or_default();
            (i, o)
        })
        .collect())
}

/// Whether the data blocks that came with a roll-forward chunk reached the device.
fn data_holds(store: &Store, c: &Chunk) -> Result<bool> {
    if planted(Bug::DataUnchecked) {
        return Ok(true);
    }
    for r in &c.records {
        if let Record::Sums { addr, sums } = r {
            if !store.geometry().contains(*addr, sums.len() as u64) {
                return Ok(false);
            }
            let mut b = vec![0u8; sums.len() * BLOCK_BYTES];
            store.read(*addr, &mut b)?;
            if b.chunks(BLOCK_BYTES).zip(sums).any(|(b, s)| crc32c::crc32c(b) != *s) {
                return Ok(false);
            }
        }
    }
    Ok(true)
}
