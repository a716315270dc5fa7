//! Opening a domain: replay of its journal, in a time bounded by its size.
//!
//! Committed transactions are applied to `space` and `nodes` in order: their records are states, so it does not matter
//! how far a checkpoint had come. Then the roll-forward records of all transactions after the newest committed one are
//! merged (newest version of each node) and, when all domains are open, become cells of a *recovery transaction*
//! (`roll_forward`), which `braid/reconcile.rs` completes (links across domains) and `volume/mount.rs` commits. Until that
//! commit the journal's tail stays: a crash during recovery starts it again from the same state.

use super::peers::Peers;
use super::recovered::Recovered;
use super::replay::{Tables, replay};
use super::roll_forward::newest::newest_records;
use super::{Domain, HeaderPair, Layers, Shared};
use crate::error::{Error, Result};
use crate::journal::Journal;
use crate::nodes::NodeTable;
use crate::space::{Checkpointed, Run, Space};
use crate::store::Store;
use crate::types::*;
use braidfs_format::Corrupt;
use braidfs_format::domain::{CLEAN, DomainHeader};
use braidfs_format::journal::{Chunk, ChunkKind};
use std::ops::Range;
use std::sync::Arc;

/// What opening a domain does with what its journal holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OnOpen {
    /// It was unmounted, or is looked at as of its last checkpoint.
    Nothing,
    /// After a crash.
    Replay,
    /// After a crash of a domain whose content did not survive it: the domain is emptied.
    Discard,
}

impl OnOpen {
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
    /// The journal is kept from here on until the recovery transaction is durable; and which end of it nothing counts on.
    keep: Option<(u64, Range<u64>)>,
    /// Why nothing may be done with the domain; its mount goes on.
    unread: Option<Error>,
}

impl Reached {
    fn checkpoint(h: &DomainHeader) -> Self {
        let last = h.last_tx.get();
        Self { durable: last, newest: last, keep: None, unread: None }
    }
}

/// Whether a later recovery needs the chunk as long as `last` is the newest transaction that is durable.
fn counts(c: &Chunk, last: u64) -> bool {
    c.kind != ChunkKind::Stream || c.tx.0 <= last
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
    fn replay(&self, header: &DomainHeader, rec: &mut Recovered) -> Result<Reached> {
        let _span = tracing::debug_span!("replay", domain = %self.id).entered();
        rec.dirty = true;
        let workers = &self.shared.workers;
        let (chunks, end) = self.journal.scan(workers)?;
        rec.traces = self.journal.traces(&chunks, end, header.last_tx.get())?;
        let tables = Tables { geometry: self.store.geometry(), space: self.space, nodes: self.nodes };
        let last = replay(self.id, &chunks, &tables, header, workers, rec)?;
        rec.forward = newest_records(self.store, &chunks, last, workers, rec)?;
        let newest = chunks.iter().map(|c| c.tx.0).max().unwrap_or(0).max(last);
        let needed = chunks.iter().filter(|c| counts(c, last)).map(|c| c.pos + u64::from(c.blocks)).max();
        let cut_off = needed.unwrap_or(0).max(self.journal.head())..end;
        let keep = (!chunks.is_empty()).then(|| (self.journal.tail(), cut_off));
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
        let on_open = OnOpen::of(id, &journal, &mut header, shared.options.checkpoint_only)?;
        let log = Run { addr: journal.addr(0), len: header.header.journal_blocks.get() };
        let last = Checkpointed::of(&header.header);
        let space = Space::open(store.clone(), id, mlogs, groups, Some(log), Some(last))?;
        let doubt = space.doubt(last.sum);
        let mut nodes = NodeTable::open(store.clone(), id, &space.groups(), &space)?;
        nodes.set_mounts(header.header.mounts.get());
        let mut rec = Recovered::default();
        let opening = Opening { id, store: &store, shared: &shared, journal: &journal, space: &space, nodes: &nodes };
        let reached = match on_open {
            OnOpen::Nothing => Reached::checkpoint(&header.header),
            OnOpen::Discard => opening.discard(&mut header, doubt.as_ref())?,
            OnOpen::Replay => opening.replay(&header.header, &mut rec)?,
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
        if let Some((tail, cut_off)) = reached.keep {
            // nothing is given up before the recovery transaction is durable
            d.first_pos.lock().keep_for_recovery(first_tx.0, tail, cut_off);
        }
        if let Some(why) = doubt.map(Into::into).or(reached.unread) {
            d.fail(&why);
        }
        Ok((d, rec))
    }
}
