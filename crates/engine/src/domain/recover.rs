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
use crate::cell::record::decode_cell;
use crate::cell::{Body, Cell, FileBody};
use crate::error::{Error, Result};
use crate::journal::Journal;
use crate::nodes::NodeTable;
use crate::space::{Checkpointed, Run, Space};
use crate::store::Store;
use crate::types::*;
use braidfs_format::Corrupt;
use braidfs_format::domain::{CLEAN, DomainHeader};
use braidfs_format::group::{SegmentKind, Temperature};
use braidfs_format::inode::Link;
use braidfs_format::journal::Record;
use braidfs_format::node::{DIR, NodeRecord};
use braidfs_store::ring::Ahead;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

/// What opening a domain does with what its journal holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Plan {
    /// It was unmounted, or is looked at as of its last checkpoint.
    Nothing,
    /// After a crash.
    Replay,
    /// After a crash of a domain whose content did not survive it: the domain is emptied.
    Discard,
}

impl Plan {
    /// `checkpoint_only`: the domain may be in use at this moment.
    fn of(id: DomainId, journal: &Journal, header: &mut HeaderPair, checkpoint_only: bool) -> Result<Self> {
        if header.header.is_discarded() {
            return Ok(Self::Discard);
        }
        if checkpoint_only {
            return Ok(Self::Nothing);
        }
        if header.header.flags.get() & CLEAN != 0 {
            if !journal.goes_on()? {
                return Ok(Self::Nothing);
            }
            // the header is older than the journal: the one that was written last is lost
            tracing::warn!("{id}: its header says unmounted, its journal goes on: replayed");
            header.header.flags = (header.header.flags.get() & !CLEAN).into();
        }
        Ok(Self::Replay)
    }
}

/// How far the transactions of a domain had come.
struct Reached {
    /// The newest one that is durable.
    durable: u64,
    /// The highest number that was seen.
    newest: u64,
    /// The journal is kept from here on until the recovery transaction is durable.
    keep: Option<u64>,
    /// Why nothing may be done with the domain; its mount goes on.
    unread: Option<Error>,
}

impl Reached {
    fn checkpoint(h: &DomainHeader) -> Self {
        let last = h.last_tx.get();
        Self { durable: last, newest: last, keep: None, unread: None }
    }
}

/// A domain whose tables are open as of its last checkpoint.
struct Opening<'o> {
    id: DomainId,
    store: &'o Arc<Store>,
    shared: &'o Shared,
    journal: &'o Journal,
    space: &'o Space,
    nodes: &'o NodeTable,
}

impl Opening<'_> {
    /// Empties the domain. `doubt`: why its tables do not say what was in use.
    fn discard(&self, header: &mut HeaderPair, doubt: Option<&Corrupt>) -> Result<Reached> {
        let may_be_in_use = self.shared.options.checkpoint_only;
        let h = &mut header.header;
        let (chunks, end) = if may_be_in_use {
            (Vec::new(), self.journal.head())
        } else {
            tracing::warn!(
                "tenant {} has no journal and was in use when the volume stopped: its content is discarded",
                h.tenant_name_str()
            );
            self.journal.scan(&self.shared.workers)?
        };
        // chunks of a rest that the crash cut off must not lie where the journal goes on
        let newest = chunks.iter().map(|c| c.tx.0).max().unwrap_or(0).max(h.last_tx.get());
        let head = end.max(self.journal.head());
        h.last_tx = newest.into();
        (h.head_pos, h.tail_pos) = (head.into(), head.into());
        self.journal.set_head(head);
        self.journal.release(head);
        let emptied = match doubt {
            Some(why) => Err(why.clone().into()),
            None => super::scratch::discard(self.store, self.id, self.space, self.nodes, header),
        };
        let unread = match emptied {
            // tables may be written at this moment
            Err(e) if may_be_in_use => Some(e),
            emptied => emptied.map(|()| None)?,
        };
        Ok(Reached { unread, ..Reached::checkpoint(&header.header) })
    }

    /// Replays the journal, and gathers what was synced beside its transactions; what is left to do goes to `rec`.
    fn replay(&self, header: &DomainHeader, ahead: Option<Ahead>, rec: &mut Recovered) -> Result<Reached> {
        let _span = tracing::debug_span!("replay", domain = %self.id).entered();
        rec.dirty = true;
        let workers = &self.shared.workers;
        let (chunks, end) = self.journal.scan_read(ahead, workers)?;
        rec.traces = self.journal.traces(&chunks, end, header.last_tx.get())?;
        let tables = Tables { geometry: self.store.geometry(), space: self.space, nodes: self.nodes };
        let last = replay(self.id, &chunks, &tables, header, workers, rec)?;
        rec.forward = merge(self.store, &chunks, last, workers, &mut rec.claims)?;
        let newest = chunks.iter().map(|c| c.tx.0).max().unwrap_or(0).max(last);
        let keep = (!chunks.is_empty()).then(|| self.journal.tail());
        self.journal.set_head(end.max(self.journal.head()));
        Ok(Reached { durable: last, newest, keep, unread: None })
    }
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
        let _span = tracing::debug_span!("open", domain = %id).entered();
        let journal = Journal::open(store.clone(), id, &header.header);
        let plan = Plan::of(id, &journal, &mut header, shared.options.checkpoint_only)?;
        // while the tables are opened
        let ahead = if plan == Plan::Replay { journal.read_ahead(&shared.workers) } else { None };
        let log = Run { addr: journal.addr(0), len: header.header.journal_blocks.get() };
        let last = Checkpointed::of(&header.header);
        let space = Space::open(store.clone(), id, mlogs, groups, Some(log), Some(last))?;
        let doubt = space.doubt(last.sum);
        let nodes = NodeTable::open(store.clone(), id, &space.groups(), &space)?;
        let mut rec = Recovered::default();
        let opening = Opening { id, store: &store, shared: &shared, journal: &journal, space: &space, nodes: &nodes };
        let reached = match plan {
            Plan::Nothing => Reached::checkpoint(&header.header),
            Plan::Discard => opening.discard(&mut header, doubt.as_ref())?,
            Plan::Replay => opening.replay(&header.header, ahead, &mut rec)?,
        };
        if rec.dirty
            && let Some(why) = doubt
        {
            return Err(why.into());
        }
        // the recovery transaction, or the first one, is newer than everything seen, and than what left no trace
        let first_tx = TxId(header.header.first_tx(reached.newest));
        let d = Self::new(id, store, shared, peers, Layers { space, nodes, journal, first_tx }, header);
        d.durable.store(reached.durable, std::sync::atomic::Ordering::Relaxed);
        if let Some(tail) = reached.keep {
            // nothing is given up before the recovery transaction is durable
            d.first_pos.lock().keep_for_recovery(first_tx.0, tail);
        }
        if let Some(why) = doubt.map(Into::into).or(reached.unread) {
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
        for (inode, overflow) in records {
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
        let old = self.older_than_record(inode)?;
        if old.is_some() && inode.flags & DIR != 0 {
            return Ok(None); // it exists: the skeleton says nothing new
        }
        if let Some(o) = &old
            && o.state.read().durability.version() >= inode.version
        {
            return Ok(None);
        }
        let cell = self.decode_forwarded(inode, overflow)?;
        let new_nodes: HashSet<NodeId> = cell.nodes(&cell.state.read()).into_iter().collect();
        let mut replaced = old.map(|o| self.take_out_replaced(&o, &new_nodes)).unwrap_or_default();
        for n in &new_nodes {
            if !self.nodes.get(*n)?.used() {
                self.nodes.take(*n)?;
            }
        }
        let cell = Arc::new(cell);
        let mut st = cell.state.write();
        st.dropped = replaced.nodes.into();
        if let Body::File(f) = &mut st.body {
            self.take_new_blocks(e, cell.ino, f, &mut replaced.blocks)?;
            f.map.all_dirty();
        }
        let runs: Vec<(BlockAddr, u32)> = replaced.blocks.iter().map(|b| (BlockAddr(*b), 1)).collect();
        self.free_runs(e.tx(), runs);
        self.touch(e.tx(), &cell, &mut st)?;
        // the state is the record's: whoever waits for a later version of this inode must not take it for that
        st.durability.recovery_keeps_version(inode.version);
        let (parent, named) = (st.links.first().map_or(InodeNo(0), |l| l.parent), st.link_seq);
        drop(st);
        self.cells.insert_new(cell.clone());
        Ok(Some(Forwarded { is_dir: cell.kind == FileKind::Dir, cell, old_links: replaced.links, parent, named }))
    }

    /// The inode of a roll-forward record as the committed transactions have it; `None` where it is new.
    fn older_than_record(&self, inode: &NodeRecord) -> Result<Option<Arc<Cell>>> {
        match self.find(inode.node.inode()) {
            Ok(old) => Ok(old.filter(|c| c.generation == inode.generation)),
            // the record that was synced says all; blocks that only the lost one names are found by a check
            Err(Error::Corrupt(why)) if inode.flags & DIR == 0 => {
                tracing::error!("{}: {why}; restored as it was synced", inode.node);
                Ok(None)
            }
            Err(e) => Err(e),
        }
    }

    /// A cell of a roll-forward record, whose overflow nodes are in the same chunk or, unchanged, where the table says.
    fn decode_forwarded(&self, inode: &NodeRecord, overflow: Vec<NodeRecord>) -> Result<Cell> {
        let mut by_node: HashMap<NodeId, NodeRecord> = overflow.into_iter().map(|r| (r.node, r)).collect();
        for r in by_node.values() {
            self.new_generations.lock().insert(r.node, r.generation);
        }
        decode_cell(inode, self.id, &mut |n| match by_node.remove(&n) {
            Some(r) => Ok(r),
            None => self.nodes.load(n, &self.nodes.get(n)?),
        })
    }

    /// Takes the committed cell of an inode out of the cache: what it had, of its nodes those that `new_nodes` has no more.
    fn take_out_replaced(&self, old: &Arc<Cell>, new_nodes: &HashSet<NodeId>) -> Replaced {
        let st = old.state.read();
        let mut blocks = BTreeSet::new();
        if let Body::File(f) = &st.body {
            for x in f.map.iter() {
                blocks.extend(x.addr.0..x.addr.0 + u64::from(x.len));
            }
        }
        let nodes = old.nodes(&st).into_iter().filter(|n| !new_nodes.contains(n)).collect();
        let replaced = Replaced { links: st.links.to_vec(), blocks, nodes };
        drop(st);
        self.cells.remove(old);
        replaced
    }

    /// Takes the blocks of a file that it does not have already, and tells the journal of them; those that it keeps are taken
    /// out of `old_blocks`.
    fn take_new_blocks(
        &self,
        e: &Enter<'_>,
        owner: InodeNo,
        f: &FileBody,
        old_blocks: &mut BTreeSet<u64>,
    ) -> Result<()> {
        let mut taken = Vec::new();
        for x in f.map.iter() {
            // block by block: parts of an extent may be old
            let mut at = 0;
            while at < x.len {
                let addr = x.addr.0 + u64::from(at);
                if old_blocks.remove(&addr) {
                    at += 1;
                    continue;
                }
                let mut n = 1;
                while at + n < x.len && !old_blocks.contains(&(addr + u64::from(n))) {
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
                owner,
                lblk,
            });
        }
        Ok(())
    }
}

/// What the committed state of an inode had that a roll-forward record replaces.
#[derive(Default)]
struct Replaced {
    links: Vec<Link>,
    /// Addresses of its blocks.
    blocks: BTreeSet<u64>,
    /// Overflow nodes that it has no more.
    nodes: Vec<NodeId>,
}
