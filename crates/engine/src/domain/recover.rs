//! Opening a domain: replay of its journal, in a time bounded by its size.
//!
//! Committed transactions are applied to `space` and `nodes` in order: their records are states, so it does not matter
//! how far a checkpoint had come. Then the roll-forward records of all transactions after the newest committed one are
//! merged (newest version of each node) and, when all domains are open, become cells of a *recovery transaction*, which
//! `braid/reconcile.rs` completes (links across domains) and `volume/mount.rs` commits. Until that commit the journal's
//! tail stays: a crash during recovery starts it again from the same state.

use super::merge::merge;
use super::peers::Peers;
pub use super::recovered::{Claim, Forward, Forwarded, Hint, Recovered};
use super::replay::{Tables, replay};
use super::{Domain, Enter, HeaderPair, Layers, Shared};
use crate::cell::Body;
use crate::cell::record::cell_of;
use crate::error::Result;
use crate::journal::Journal;
use crate::nodes::NodeTable;
use crate::space::{Checkpointed, Run, Space};
use crate::store::Store;
use crate::types::*;
use braidfs_format::domain::CLEAN;
use braidfs_format::group::{SegmentKind, Temperature};
use braidfs_format::journal::Record;
use braidfs_format::node::{DIR, NodeRecord};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

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
        let _span = tracing::debug_span!("open", domain = %id).entered();
        let journal = Journal::open(store.clone(), id, &header.header);
        let replay_it = !shared.options.checkpoint_only;
        let discards = header.header.is_discarded();
        if header.header.flags.get() & CLEAN != 0 && replay_it && !discards && journal.goes_on()? {
            // the header is older than the journal: the one that was written last is lost
            tracing::warn!("{id}: its header says unmounted, its journal goes on: replayed");
            header.header.flags = (header.header.flags.get() & !CLEAN).into();
        }
        let replays = header.header.flags.get() & CLEAN == 0 && replay_it && !discards;
        // while the tables are opened
        let ahead = if replays { journal.read_ahead(&shared.workers) } else { None };
        let log = Run { addr: journal.addr(0), len: header.header.journal_blocks.get() };
        let last = Checkpointed::of(&header.header);
        let space = Space::open(store.clone(), id, mlogs, groups, Some(log), Some(last))?;
        let doubt = space.doubt(last.sum);
        let nodes = NodeTable::open(store.clone(), id, &space.groups(), &space)?;
        let mut rec = Recovered::default();
        let mut keep = None;
        let mut durable = header.header.last_tx.get();
        let mut newest = durable;
        let mut unread = None;
        if discards {
            // else it may be in use at this moment
            if replay_it {
                tracing::warn!(
                    "tenant {} has no journal and was in use when the volume stopped: its content is discarded",
                    header.header.tenant_name_str()
                );
            }
            // chunks of a rest that the crash cut off must not lie where the journal goes on
            let (chunks, end) = if replay_it { journal.scan(&shared.workers)? } else { (Vec::new(), journal.head()) };
            newest = chunks.iter().map(|c| c.tx.0).max().unwrap_or(0).max(newest);
            let head = end.max(journal.head());
            header.header.last_tx = newest.into();
            (header.header.head_pos, header.header.tail_pos) = (head.into(), head.into());
            journal.set_head(head);
            journal.release(head);
            let emptied = match doubt.clone() {
                Some(why) => Err(why.into()),
                None => super::scratch::discard(&store, id, &space, &nodes, &mut header),
            };
            match emptied {
                // a look at a volume in use, whose tables may be written at this moment
                Err(e) if shared.options.checkpoint_only => unread = Some(e),
                emptied => emptied?,
            }
            durable = header.header.last_tx.get();
            newest = durable;
        } else if replays {
            let _span = tracing::debug_span!("replay", domain = %id).entered();
            rec.dirty = true;
            let workers = &shared.workers;
            let (chunks, end) = journal.scan_read(ahead, workers)?;
            rec.traces = journal.traces(&chunks, end, header.header.last_tx.get())?;
            let tables = Tables { geometry: store.geometry(), space: &space, nodes: &nodes };
            let last = replay(id, &chunks, &tables, &header.header, workers, &mut rec)?;
            rec.forward = merge(&store, &chunks, last, workers, &mut rec.claims)?;
            durable = last;
            newest = chunks.iter().map(|c| c.tx.0).max().unwrap_or(0).max(last);
            keep = (!chunks.is_empty()).then(|| journal.tail());
            journal.set_head(end.max(journal.head()));
        }
        if rec.dirty
            && let Some(why) = doubt
        {
            return Err(why.into());
        }
        // the recovery transaction, or the first one, is newer than everything seen, and than what left no trace
        let first_tx = TxId(header.header.first_tx(newest));
        let d = Self::new(id, store, shared, peers, Layers { space, nodes, journal, first_tx }, header);
        d.durable.store(durable, std::sync::atomic::Ordering::Relaxed);
        if let Some(tail) = keep {
            // nothing is given up before the recovery transaction is durable
            d.first_pos.lock().keep_for_recovery(first_tx.0, tail);
        }
        if let Some(why) = doubt.map(Into::into).or(unread) {
            d.fail(&why);
        }
        Ok((d, rec))
    }

    /// Turns roll-forward records into cells of the running (recovery) transaction: takes their blocks and nodes.
    /// Nothing else may have been allocated before.
    ///
    /// # Errors
    /// [`crate::Error::Corrupt`] where a record cannot be.
    pub fn roll_forward(&self, e: &Enter<'_>, records: Vec<Forward>) -> Result<Vec<Forwarded>> {
        let mut out = Vec::new();
        for record in records {
            if let Some(f) = self.roll_forward_one(e, record)? {
                out.push(f);
            }
        }
        Ok(out)
    }

    fn roll_forward_one(&self, e: &Enter<'_>, forward: Forward) -> Result<Option<Forwarded>> {
        let Forward { record: inode, inode: content, overflow } = forward;
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
        let cell = cell_of(&inode, content, self.id, &mut |n| match by_node.remove(&n) {
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
        let (parent, named) = (st.links.first().map_or(InodeNo(0), |l| l.parent), st.link_seq);
        drop(st);
        self.cells.insert_new(cell.clone());
        Ok(Some(Forwarded { is_dir: cell.kind == FileKind::Dir, cell, old_links, parent, named }))
    }
}
