//! Commit: running → committing → committed.
//!
//! 1. The flip, under the gate's writer side: a new transaction runs from here on.
//! 2. Fetch and serialise: the committer and threads that wait for this commit, or came while it goes on, take cells from the
//!    list and write their share of data, buckets and node blocks themselves (journaling-fast18 section 4.3: application
//!    threads join; `help`). Who waits sleeps else, and is woken for work, to lead, or at the end ([`braidfs_sync::rounds`]).
//! 3. The records go to the journal in chunks, then a flush, then the commit record that names the chunks, then a flush.
//! 4. `space` and `nodes` take over the new state; freed blocks and nodes can be used again.
//!
//! A failure on the way fails the domain: nothing of the transaction was acknowledged.

use super::Domain;
use super::serialise::WriteBatch;
use super::tx::Tx;
use super::work::{Share, Work};
use crate::cell::{Body, Cell};
use crate::error::{Error, Result};
use crate::planted::sharing::{Place, share};
use crate::planted::{self, Bug, planted};
use crate::store::Store;
use crate::types::*;
use braidfs_format::BLOCK_BYTES;
use braidfs_format::journal::{
    CHUNK_HEADER_BYTES, CHUNK_MAX_BLOCKS, ChunkId, ChunkKind, Record, chunk_blocks, encode_chunk,
};
use braidfs_format::node::NodeEntry;
use braidfs_sync::phases::{self, Phase};
use braidfs_sync::rounds::{Lead, Seen, Turn};
use braidfs_sync::workers::Workers;
use braidfs_sync::{PassWriteGuard, rank};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Chunks of a journal, by where they go.
type Sealed = Vec<(BlockAddr, Vec<u8>)>;

/// A chunk of a journal: address, bytes, position, checksum.
pub(super) type Chunk = (BlockAddr, Vec<u8>, u64, u32);

/// Cells that one thread has written out before another has started.
const FEW_CELLS: usize = 64;

impl Domain {
    /// Makes everything durable that changed before the call, but for data that `data=writeback` leaves alone
    /// ([`Self::flush_all`]).
    ///
    /// # Errors
    /// Of the device: the domain is then read-only.
    pub fn commit(&self) -> Result<()> {
        let running = self.running();
        self.commit_upto(running)
    }

    /// Returns when transaction `id` is durable: helps its commit, or the one before, whenever there is something to do, does
    /// it where nobody does, and sleeps else. The caller is inside no gate and holds no cell lock.
    ///
    /// # Errors
    /// Of the device: the domain is then read-only.
    pub fn commit_upto(&self, id: TxId) -> Result<()> {
        if self.committed_tx() >= id {
            return Ok(());
        }
        let _phase = phases::enter(Phase::Commit);
        let _spending = self.shared.spend(&self.budget);
        // it waits for who has it
        self.commit_lock.may_wait();
        // of one that does not run yet nothing has changed
        let id = id.min(self.running());
        let over = || self.committed_tx() >= id || self.failed().is_some();
        let mut seen = Seen::default();
        loop {
            match self.rounds.turn(id.0, &mut seen, over) {
                Turn::Over if self.committed_tx() >= id => return Ok(()),
                Turn::Over => return self.check_failed(),
                Turn::Help(work) => {
                    if self.help(&work) > 0 {
                        self.counters.joiners.fetch_add(1, Ordering::Relaxed);
                    }
                }
                Turn::Lead(lead) => {
                    // Its transaction runs no more and would never become durable. Gone before `lead`: who leads next must
                    // see that this one failed.
                    let panics = self.fail_on_panic("a commit");
                    let one = self.commit_lock.lock();
                    let done = self.commit_running(&lead).inspect_err(|e| self.fail(e));
                    drop(one);
                    panics.disarm();
                    match done? {
                        Some(committed) => lead.finish(committed.0),
                        None => {
                            lead.nothing_to_do();
                            return Ok(());
                        }
                    }
                }
            }
        }
    }

    /// Commits the running transaction, which is returned; `None` where it is empty. Under `commit_lock`.
    fn commit_running(&self, lead: &Lead<'_, Arc<Work>, rank::Work>) -> Result<Option<TxId>> {
        let help = |work: &Work| {
            self.help(work);
            Ok(())
        };
        let Some((tx, made)) = self.write_running(lead, help)? else { return Ok(None) };
        if self.keeps_journal() {
            match self.chunks_if_room(&tx, &made)? {
                Some(chunks) => self.write_transaction(&tx, chunks)?,
                None => self.flush_devices()?,
            }
            self.orphans_listed.store(made.listed, Ordering::Release);
        }
        self.apply_durable(&tx, made)?;
        self.note_committed(&tx);
        Ok(Some(tx.id))
    }

    /// Steps 1 and 2 of the module's list: what was running, and what it makes of the committed view. `help` writes the cells
    /// out. Under `commit_lock`.
    fn write_running(
        &self,
        lead: &Lead<'_, Arc<Work>, rank::Work>,
        help: impl FnOnce(&Work) -> Result<()>,
    ) -> Result<Option<(Arc<Tx>, Made)>> {
        let span = tracing::debug_span!("commit", domain = %self.id, tx = tracing::field::Empty).entered();
        let (tx, mut orphans) = {
            let mut gate = self.close_gate();
            if gate.is_empty() {
                return Ok(None);
            }
            share(Place::Commit);
            let next = self.next_tx(&gate);
            let old = std::mem::replace(&mut *gate, next);
            *self.committing.lock() = Some(old.clone());
            old.end_of_operations();
            self.pending.store(old.cost(), Ordering::Release);
            // last: whoever sees the new number sees that the old one commits
            self.running.store(gate.id.0, Ordering::Release);
            // as of this transaction: what the next one links again, or frees, is an orphan where only this one survives
            (old, self.orphans.list())
        };
        span.record("tx", tx.id.0);
        orphans.sort(); // the same operations write the same
        let work = Arc::new(Work::new(tx.clone()));
        let helpers = self.helpers_max.min(work.cells.len().saturating_sub(1));
        if helpers > 0 {
            lead.share(tx.id.0, work.clone(), helpers);
        }
        let helped = help(&work);
        lead.take_back();
        let share = work.end()?;
        helped?;
        let left_out = |c: &Arc<Cell>| c.state.read().durability.dirty_tx() == Some(tx.id);
        debug_assert!(
            planted(Bug::HelperForgotten) || !work.cells.iter().any(left_out),
            "{}: a cell on its list was not written",
            tx.id
        );
        tx.wait_io();
        self.check_writable()?;
        assert!(self.committed_tx() < tx.id, "{} commits after {}", tx.id, self.committed_tx());
        let made = self.gather(&tx, share, orphans, work)?;
        Ok(Some((tx, made)))
    }

    /// The transaction is durable, and the committed view says so.
    fn note_committed(&self, tx: &Tx) {
        *self.committing.lock() = None;
        self.pending.store(0, Ordering::Release);
        self.durable.store(tx.id.0, Ordering::Relaxed);
        self.committed.store(tx.id.0, Ordering::Release);
        self.counters.commits.fetch_add(1, Ordering::Relaxed);
        self.vacated.prune(|d, t| self.committed_tx_of(d) >= t);
    }

    /// Lets no operation into the gate, and waits for those that are inside.
    fn close_gate(&self) -> PassWriteGuard<'_, Arc<Tx>, rank::Gate> {
        #[cfg(feature = "planted-bugs")]
        if planted(Bug::SlotMissed) {
            return self.close_gate_missing_a_slot();
        }
        self.gate.write()
    }

    /// The last node blocks, and all records.
    fn gather(&self, tx: &Tx, mut share: Share, orphans: Vec<InodeNo>, work: Arc<Work>) -> Result<Made> {
        // cells that operations of the next transaction serialised before they changed them
        let mut stray = tx.take_out();
        let mut node_facts = std::mem::take(&mut share.records);
        let nodes = std::mem::take(&mut stray.nodes);
        self.pack(tx, nodes, true, &mut stray, &mut node_facts, self.pick_mlog())?;
        self.submit(std::mem::take(&mut stray.writes))?;
        share.free.append(&mut stray.free);
        share.dead.append(&mut stray.dead);

        let mut records = tx.take_records();
        records.append(&mut node_facts);
        for (node, generation) in &share.free {
            records.push(Record::Node {
                node: *node,
                entry: NodeEntry { generation: *generation, ..NodeEntry::default() },
            });
        }
        self.supersede(&mut records)?;
        self.space.check_places(&records)?;
        let listed = !orphans.is_empty();
        if listed && !planted(Bug::OrphansLost) {
            records.push(Record::Orphans(orphans));
        }
        let work = (!planted(Bug::CellsLetGo)).then_some(work);
        Ok(Made { records, dead: share.dead, listed, work })
    }

    /// Step 4 of the module's list.
    fn apply_durable(&self, tx: &Tx, made: Made) -> Result<()> {
        // the cells of `work` go last
        let Made { records, dead, work, .. } = made;
        let peers = tx.peers_so_far();
        self.peer_txs.lock().merge(&peers);
        let mut written = BlockAddr(0);
        for r in &records {
            if let Record::Node { node, entry } = r {
                let mut fresh = self.new_generations.lock();
                if !fresh.is_empty() {
                    fresh.remove(node);
                }
                drop(fresh);
                if entry.used() && { entry.addr } != written {
                    // a reader that came late may have put back what lay there before
                    self.nodes.invalidate(entry.addr);
                    written = entry.addr;
                }
            }
        }
        // also those that no commit ever had: what was in them may be durable in other domains. After `peer_txs`: a
        // checkpoint that lets them go has seen to their peers
        // (nothing elsewhere names one of a domain without a journal)
        let quarantines = self.keeps_journal();
        for c in dead.iter().filter(|c| quarantines && c.kind == FileKind::Dir) {
            self.nodes.quarantine(c.ino.node());
            self.quarantine.lock().add(c.ino);
        }
        self.space.apply(&records, tx.id)?;
        self.nodes.apply(&records)?;
        // only now: whoever misses the cell must find the node table without the inode
        for c in &dead {
            if let Body::Dir(b) = &c.state.read().body {
                self.shared.forget_name_time(b.last_name_time());
            }
            self.forget_cell(c);
        }
        self.space.unreserve(tx.take_credits());
        drop(work);
        Ok(())
    }

    /// Adds what the new node table entries make of the blocks that held the old records: fewer live records, or free.
    fn supersede(&self, records: &mut Vec<Record>) -> Result<()> {
        let mut less: BTreeMap<BlockAddr, u8> = BTreeMap::new();
        for r in records.iter() {
            if let Record::Node { node, .. } = r {
                let old = self.nodes.get(*node)?;
                if old.used() {
                    *less.entry(old.addr).or_insert(0) += 1;
                }
            }
        }
        for (addr, n) in less {
            let counted = self.space.live(addr)?;
            if counted == 0 {
                // Where a check that replays had to make the tables of owners again, the count is lost: there may be
                // other records in the block, so it stays in use until all is counted.
                continue;
            }
            let live = counted.saturating_sub(n);
            if live == 0 {
                self.nodes.invalidate(addr);
                self.space.pending_free(1);
                records.push(Record::Free { addr, len: 1 });
            } else {
                records.push(Record::Live { addr, live });
            }
        }
        Ok(())
    }

    /// Writes the chunks, flushes, writes the commit record, flushes.
    fn write_transaction(&self, tx: &Tx, (parts, blocks): (Vec<Record>, Sealed)) -> Result<()> {
        let write_chunks = || {
            self.write_blocks(&blocks)?;
            if planted(Bug::CopyUnflushed) && self.space.has_shut() {
                return Ok(());
            }
            planted::step(Bug::NoFlushBeforeCommit, || self.flush_devices_but(Bug::CommitOneDevice))
        };
        let write_commit_record = || self.write_commit_record(tx, &parts, Store::write_batch_through);
        planted::in_order(Bug::CommitBeforeChunks, write_chunks, write_commit_record)?;
        planted::step(Bug::NoFlushAfterCommit, || self.flush_devices())
    }

    /// [`Self::chunks`] of a transaction, with room for the commit record; `None` where recovery found a ring that has none:
    /// the checkpoint that ends recovery carries the transaction, and those that follow it in recovery.
    ///
    /// What the crash cut off at the end of the ring is no loss, as long as nothing that counts lies behind it. It is blank on
    /// the device before it is overwritten: the ring must not seem to go on behind what recovery writes there.
    fn chunks_if_room(&self, tx: &Tx, made: &Made) -> Result<Option<(Vec<Record>, Sealed)>> {
        let full = |r: &Result<_>| matches!(r, Err(Error::JournalFull));
        if !self.shared.recovering.load(Ordering::Relaxed) {
            return self.chunks_and_room(tx, &made.records).map(Some);
        }
        if !self.first_pos.lock().leaves_journal() {
            let first = self.chunks_and_room(tx, &made.records);
            if !full(&first) {
                self.first_pos.lock().go_on_behind_cut_off();
                return first.map(Some);
            }
            let cut_off = self.first_pos.lock().take_cut_off();
            if !cut_off.is_empty() {
                let blank =
                    cut_off.clone().map(|pos| (self.journal.addr(pos), vec![0; BLOCK_BYTES])).collect::<Vec<_>>();
                self.write_blocks(&blank)?;
                self.store.flush_groups([self.journals_group()])?;
                self.journal.set_head(cut_off.start);
                let again = self.chunks_and_room(tx, &made.records);
                if !full(&again) {
                    return again.map(Some);
                }
            }
        }
        if made.listed {
            // the list must be found in the journal
            return Err(Error::JournalFull);
        }
        self.first_pos.lock().leave_journal(tx.id.0);
        tracing::warn!(
            "{}: its journal is full: recovery writes the tables at once. If the machine stops before the volume is \
             mounted, run fsck.braidfs.",
            self.id
        );
        Ok(None)
    }

    /// Whether recovery has left a transaction to the tables, or there may be too little room in the journal for another one, of so
    /// many inodes.
    pub(crate) fn lacks_journal_for(&self, inodes: usize) -> bool {
        self.first_pos.lock().leaves_journal()
            || !self.journal.has_room(u32::try_from(8 + inodes / 32).unwrap_or(u32::MAX))
    }

    /// [`Self::chunks`], where the commit record has room behind them.
    fn chunks_and_room(&self, tx: &Tx, records: &[Record]) -> Result<(Vec<Record>, Sealed)> {
        let chunks = self.chunks(tx, records)?;
        let record = chunk_blocks(self.commit_record(&chunks.0).len());
        if self.journal.has_room(record) { Ok(chunks) } else { Err(Error::JournalFull) }
    }

    /// What the commit record says of the chunks that hold `records`, and these.
    fn chunks(&self, tx: &Tx, records: &[Record]) -> Result<(Vec<Record>, Sealed)> {
        let room = self.chunk_blocks_max() as usize * 4096 - CHUNK_HEADER_BYTES;
        let mut bodies: Vec<Vec<u8>> = vec![Vec::new()];
        for r in records {
            if let Record::Orphans(o) = r
                && o.len() * 8 + 5 > room
            {
                // more open unlinked files than a chunk names: several records
                for part in o.chunks(room / 8 - 1) {
                    let mut b = Vec::new();
                    Record::Orphans(part.to_vec()).encode(&mut b);
                    bodies.push(b);
                }
                continue;
            }
            let Some(body) = bodies.last_mut() else { continue };
            let begin = body.len();
            r.encode(body);
            if body.len() > room {
                let one = body.split_off(begin);
                bodies.push(one);
            }
        }
        let mut parts = Vec::new();
        let mut blocks = Vec::new();
        for (i, body) in bodies.iter().enumerate() {
            let (addr, bytes, pos, crc) = self.chunk(ChunkKind::Stream, tx.id, i as u16, body)?;
            parts.push(Record::Part { pos, crc });
            blocks.push((addr, bytes));
        }
        Ok((parts, blocks))
    }

    fn write_commit_record(&self, tx: &Tx, parts: &[Record], write: WriteBatch) -> Result<()> {
        // what has failed it since may be that data of the transaction was not written
        self.check_failed()?;
        let (addr, bytes, ..) = self.chunk(ChunkKind::Commit, tx.id, 0, &self.commit_record(parts))?;
        self.write_blocks_by(&[(addr, bytes)], write)
    }

    fn commit_record(&self, parts: &[Record]) -> Vec<u8> {
        let mut body = Vec::new();
        Record::After(TxId(self.durable.load(Ordering::Relaxed))).encode(&mut body);
        parts.iter().for_each(|p| p.encode(&mut body));
        body
    }

    /// Longest chunk: short journals are written in smaller pieces.
    pub(super) fn chunk_blocks_max(&self) -> u32 {
        CHUNK_MAX_BLOCKS.min((self.journal.blocks() / 16).max(4) as u32)
    }

    /// Takes journal space for a chunk and seals it: address, bytes, position, checksum.
    ///
    /// # Errors
    /// [`Error::JournalFull`].
    pub(super) fn chunk(&self, kind: ChunkKind, tx: TxId, stream: u16, body: &[u8]) -> Result<Chunk> {
        self.chunk_below(self.journal.blocks(), (kind, tx, stream), body)
    }

    /// [`Self::chunk`] where no more than `most` blocks of the journal are in use then.
    ///
    /// # Errors
    /// As [`Self::chunk`].
    pub(super) fn chunk_below(
        &self,
        most: u64,
        (kind, tx, stream): (ChunkKind, TxId, u16),
        body: &[u8],
    ) -> Result<Chunk> {
        let pos = {
            // in one step with the checkpoint's choice of the tail
            let mut first = self.first_pos.lock();
            let pos = self.journal.take_below(chunk_blocks(body.len()), most).ok_or(Error::JournalFull)?;
            first.take(tx.0, pos);
            pos
        };
        let id = ChunkId { kind, domain: self.id, volume: self.store.volume, pos, tx, stream };
        let (bytes, crc) = encode_chunk(id, body);
        Ok((self.journal.addr(pos), bytes, pos, crc))
    }

    /// Writes sealed blocks, unless the volume was killed.
    pub(super) fn write_blocks(&self, blocks: &[(BlockAddr, Vec<u8>)]) -> Result<()> {
        self.write_blocks_by(blocks, Store::write_batch)
    }

    fn write_blocks_by(
        &self,
        blocks: &[(BlockAddr, Vec<u8>)],
        write: impl FnOnce(&Store, &[(BlockAddr, Vec<&[u8]>)]) -> braidfs_store::Result<()>,
    ) -> Result<()> {
        self.shared.check_alive()?;
        blocks.iter().for_each(|(_, b)| self.budget.charge_run(Way::Write, b.len()));
        let ops: Vec<_> = blocks.iter().map(|(a, b)| (*a, vec![b.as_slice()])).collect();
        Ok(write(&self.store, &ops)?)
    }
}

/// A commit whose chunks are written, and not yet durable ([`Domain::begin_commit`]).
pub(crate) struct Chunked<'d> {
    lead: Lead<'d, Arc<Work>, rank::Work>,
    tx: Arc<Tx>,
    made: Made,
    /// The chunks that the commit record names; `None` where the journal has no room for them ([`Domain::chunks_if_room`]).
    parts: Option<Vec<Record>>,
}

/// What a transaction makes of the committed view once it is durable.
struct Made {
    records: Vec<Record>,
    /// Cells of inodes that are gone.
    dead: Vec<Arc<Cell>>,
    /// It lists orphans.
    listed: bool,
    /// Keeps what it has written in memory until the node table says where that lies: who loaded it before would find what was
    /// there before the transaction. Always there, but for a bug on purpose.
    work: Option<Arc<Work>>,
}

/// The commits of several domains in steps, each for all of them before the next ([`crate::volume`]). Nobody else may commit
/// meanwhile: recovery runs alone.
impl Domain {
    /// The first step: cells are written out, with the help of `workers` that have nothing else to do, and the chunks of the
    /// journal. `None` where nothing changed, or where somebody else has committed it. A flush of the domain's devices must follow.
    ///
    /// # Errors
    /// Of the device: the domain is then read-only.
    pub(crate) fn begin_commit(&self, workers: &Workers) -> Result<Option<Chunked<'_>>> {
        let running = self.running();
        let over = || self.committed_tx() >= running || self.failed().is_some();
        let Turn::Lead(lead) = self.rounds.turn(running.0, &mut Seen::default(), over) else {
            return self.commit_upto(running).map(|()| None);
        };
        let panics = self.fail_on_panic("a commit");
        let one = self.commit_lock.lock();
        let chunked = self.write_running(&lead, |work| {
            let threads = workers.threads_for(work.cells.len(), FEW_CELLS);
            let help = |_: usize| {
                self.help(work);
                Ok::<_, Error>(())
            };
            workers.each(threads, 1, help).map(|_| ())
        });
        let write_chunks = |(tx, made): (Arc<Tx>, Made)| {
            let parts = match self.chunks_if_room(&tx, &made)? {
                Some((parts, blocks)) => self.write_blocks(&blocks).map(|()| Some(parts))?,
                None => None,
            };
            Ok((parts, tx, made))
        };
        let chunked = chunked.and_then(|made| made.map(write_chunks).transpose());
        drop(one);
        panics.disarm();
        match chunked.inspect_err(|e| self.fail(e))? {
            Some((parts, tx, made)) => Ok(Some(Chunked { lead, tx, made, parts })),
            None => {
                lead.nothing_to_do();
                Ok(None)
            }
        }
    }

    /// The second step: the chunks are durable, the commit record is written. A flush must follow.
    ///
    /// # Errors
    /// As [`Self::begin_commit`].
    pub(crate) fn record_commit(&self, c: &Chunked<'_>) -> Result<()> {
        let Some(parts) = &c.parts else { return Ok(()) };
        self.write_commit_record(&c.tx, parts, Store::write_batch).inspect_err(|e| self.fail(e))
    }

    /// The last step: the transaction is durable.
    ///
    /// # Errors
    /// As [`Self::begin_commit`].
    pub(crate) fn end_commit(&self, c: Chunked<'_>) -> Result<()> {
        let panics = self.fail_on_panic("a commit");
        let one = self.commit_lock.lock();
        self.orphans_listed.store(c.made.listed, Ordering::Release);
        let ended = self.apply_durable(&c.tx, c.made).map(|()| self.note_committed(&c.tx));
        drop(one);
        panics.disarm();
        ended.inspect_err(|e| self.fail(e))?;
        c.lead.finish(c.tx.id.0);
        Ok(())
    }
}

impl Domain {
    /// Whether transaction `id` still has to be made durable. An error of the domain is told by [`Self::commit_upto`].
    pub fn needs_commit(&self, id: TxId) -> bool {
        // what makes nothing durable is waited for by nobody
        if self.committed_tx() >= id || !self.keeps_journal() {
            return false;
        }
        let running = self.gate.read();
        // an empty transaction needs nothing but that the commit before it, which may be under way, has ended
        let before = self.committed_tx().0 + 1 < id.0 && !planted(Bug::CommitUnderWayForgotten);
        running.id != id || !running.is_empty() || before || self.failed().is_some()
    }
}
