//! The fsync fast path: one file's data, its inode record and those of its ancestors that are not durable yet go out
//! as one parallel batch flagged for roll-forward, without committing the transaction that everybody shares. (The
//! idea of roll-forward is F2FS's and Max's.)

use super::in_place::{InPlace, InPlaceWrites};
use super::out::{Out, Payload, Writes};
use super::tx::PendingIo;
use super::{Domain, Enter};
use crate::braid::durability::Reach;
use crate::cell::{Body, Cell, State};
use crate::error::{Error, Result};
use crate::planted::{Bug, planted};
use crate::types::*;
use braidfs_format::inode::{Content, Inode};
use braidfs_format::journal::{ChunkKind, Record, chunk_blocks};
use braidfs_format::node::{DIR, NodeKind, NodeRecord, OVERFLOW, USED};
use smallvec::SmallVec;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A batch that is ready to be written; the gate has been left.
#[derive(Debug)]
pub struct Batch {
    out: Out,
    records: Vec<Record>,
    /// Data must be durable before the records.
    data_first: bool,
    tx: TxId,
    /// Held until it is written: the commit of `tx` waits for that.
    _io: PendingIo,
}

impl Batch {
    /// The transaction that carries what is in it where the journal has no room for the records.
    pub fn tx(&self) -> TxId {
        self.tx
    }
}

/// A new directory above a file, as of one moment.
#[derive(Debug)]
pub struct Ancestor {
    /// The new directory.
    pub dir: Arc<Cell>,
    /// Its version then.
    pub version: u64,
    /// For the batch of the file.
    pub record: Record,
}

/// What the fast path made of a file.
#[derive(Debug)]
pub enum Prepared {
    /// Everything is durable already.
    Clean,
    /// It cannot take the fast path: commit.
    Commit,
    /// A commit that carries an older state is under way: wait for it and ask again.
    Wait(TxId),
    /// Its names are others than the caller looked at: look again.
    Changed,
    /// To be written; on success so much is durable.
    Batch(Box<Batch>, Reach),
}

/// How an fsync writes a file.
enum How {
    /// Dirty data elsewhere, with a record.
    Elsewhere,
    /// In place, with a record of the times or without.
    InPlace(InPlaceWrites, bool),
}

/// Bytes of extended attributes that surely fit an inode record with one name.
const SKELETON_XATTRS: usize = 2048;

/// Most data blocks whose checksums go into the roll-forward chunk.
const SUMS_MAX: usize = 1024;

impl Batch {
    /// Adds that these directories of its domain exist.
    pub fn add_ancestors(&mut self, records: Vec<Record>) {
        self.records.extend(records);
    }
}

impl Domain {
    /// Whether all of the cell's state is durable.
    pub fn is_durable(&self, st: &State) -> bool {
        st.durability.is_durable(self.committed_tx()) && !matches!(&st.body, Body::File(f) if f.pages.dirty_count() > 0)
    }

    /// Whether the cell's existence and names are durable: what changed in a directory since is in its children's records.
    pub fn links_durable(&self, st: &State) -> bool {
        st.durability.names_durable(self.committed_tx())
    }

    /// Gathers what must be written to make `cell` durable. The caller is in this domain (`e`), holds the cell's `sync`,
    /// has seen to the directories above the names that the cell had at version `linked_at`, and writes the batch after
    /// leaving.
    ///
    /// # Errors
    /// As [`Domain::serialise`]; the domain fails then.
    pub fn prepare_sync(&self, e: &Enter<'_>, cell: &Arc<Cell>, data_only: bool, linked_at: u64) -> Result<Prepared> {
        let mut st = cell.state.write();
        if st.deleted {
            return Ok(Prepared::Clean);
        }
        if st.durability.names_changed_at() != linked_at {
            return Ok(Prepared::Changed);
        }
        if st.durability.waits(|d, t| self.committed_tx_of(d) < t) {
            // durable or not: a crash could give it back a name that it has lost, or give its name back to another
            return Ok(Prepared::Commit);
        }
        if self.is_durable(&st) {
            return Ok(Prepared::Clean);
        }
        let dirty_pages = matches!(&st.body, Body::File(f) if f.pages.dirty_count() > 0);
        let names = self.links_durable(&st) || (data_only && planted(Bug::NamesForgotten));
        if !dirty_pages && st.durability.synced(data_only) && names {
            return Ok(Prepared::Clean);
        }
        // a tombstone or an exchange decides about its names, or another thread writes pages of it: its transaction waits for
        // that, a flush here would not
        let commits = st.durability.precedes(self.committed_tx())
            || st.durability.is_judged()
            || st.nlink == 0
            || cell.kind == FileKind::Dir
            || cell.inflight.load(Ordering::Acquire) > 0;
        let place = if commits { InPlace::No } else { self.in_place_writes(&mut st) };
        let times = !data_only && self.times_pending(&st);
        let tx = e.tx();
        let dirty_tx = st.durability.dirty_tx();
        let older = dirty_tx.filter(|t| *t != tx.id);
        let how = match place {
            // A commit that has taken the file carries the same blocks: nothing to wait for. One that has not counts on the
            // pages, and would not wait for them.
            InPlace::Yes(all) if !times && older.is_none() => {
                return self.make_batch_or_fail(e, cell, &mut st, How::InPlace(all, false), data_only);
            }
            InPlace::Yes(all) => How::InPlace(all, true),
            InPlace::NotYet => {
                self.missed_place();
                How::Elsewhere
            }
            InPlace::No => How::Elsewhere,
        };
        if let Some(tx) = older.or_else(|| st.durability.sent_tx(self.committed_tx())) {
            return Ok(Prepared::Wait(tx));
        }
        if commits {
            return Ok(Prepared::Commit);
        }
        self.make_batch_or_fail(e, cell, &mut st, how, data_only)
    }

    /// [`Self::make_batch`]. Pages that are in a batch are not marked any more: the domain fails where it is not finished.
    fn make_batch_or_fail(
        &self,
        e: &Enter<'_>,
        cell: &Arc<Cell>,
        st: &mut State,
        how: How,
        data_only: bool,
    ) -> Result<Prepared> {
        let make = || self.make_batch(e, cell, st, how, data_only);
        self.failing_on_panic("an fsync", make).inspect_err(|err| self.fail(err))
    }

    fn make_batch(
        &self,
        e: &Enter<'_>,
        cell: &Arc<Cell>,
        st: &mut State,
        how: How,
        data_only: bool,
    ) -> Result<Prepared> {
        let tx = e.tx();
        let mut out = Out { flushed: true, ..Out::default() };
        let in_place = matches!(how, How::InPlace(..));
        match how {
            How::Elsewhere => {
                // a commit finds room, or says that there is none
                let Some(promised) = self.promise_records(tx, st) else { return Ok(Prepared::Commit) };
                self.touch(tx, cell, st)?;
                let mlog = self.pick_mlog();
                self.flush_file(tx, cell, st, &mut out, mlog)?;
                self.uninline_if_tight(tx, cell, st, &mut out, mlog)?;
                self.keep_promise(tx, promised, st);
            }
            How::InPlace(all, times) => {
                // on the transaction's list in any case: a sync that comes meanwhile commits it, and so waits for these blocks
                if times || (st.durability.dirty_tx() != Some(tx.id) && !all.is_empty()) {
                    let Some(promised) = self.promise_records(tx, st) else { return Ok(Prepared::Commit) };
                    self.touch_content(tx, cell, st)?;
                    self.keep_promise(tx, promised, st);
                }
                self.write_in_place(cell, st, all, &mut out)?;
                if !times {
                    // what stays behind are times, of an fdatasync
                    let version = if data_only && self.times_pending(st) { 0 } else { st.durability.version() };
                    let b = Batch { out, records: Vec::new(), data_first: false, tx: tx.id, _io: e.begin_io() };
                    return Ok(Prepared::Batch(Box::new(b), Reach { version, data: st.durability.version() }));
                }
            }
        }
        let (mut records, mut bytes) = self.full_records(cell, st)?;
        let blocks: usize = out.bytes / 4096;
        let early = st.durability.early_data(self.committed_tx()) && !planted(Bug::EarlyDataForgotten);
        // what is overwritten has its place, whether the record is there or not
        let data_first = !in_place && (early || out.in_place || self.in_place(st) || blocks > SUMS_MAX);
        if !data_first && !in_place {
            let sums = add_sums(&out, &mut records);
            if sums > 0 {
                st.durability.record_sums_blocks(tx.id);
            }
            bytes += sums;
        }
        let fits = self.fits_beside_commits(chunk_blocks(bytes));
        let io = e.begin_io();
        if !fits {
            // the data has its place: write it, then let a commit carry the records
            st.durability.fsync_leaves_to_commit(tx.id);
            let writes = std::mem::take(&mut out.writes);
            self.submit(writes)?;
            return Ok(Prepared::Commit);
        }
        Ok(Prepared::Batch(
            Box::new(Batch { out, records, data_first, tx: tx.id, _io: io }),
            Reach { version: st.durability.version(), data: st.durability.version() },
        ))
    }

    /// The records of an inode as it is, for a roll-forward chunk, its own first; and about how many bytes they take.
    fn full_records(&self, cell: &Cell, st: &mut State) -> Result<(Vec<Record>, usize)> {
        let enc = self.encode(cell, st)?;
        // the transaction still has to write what this record carries alone
        if let Body::File(f) = &mut st.body {
            f.map.rolled_forward();
        }
        // the transaction still has to do what encoding has just ticked off
        st.dropped.extend(enc.free.iter().copied());
        let mut records = Vec::new();
        let mut bytes = 0;
        for mut r in enc.write {
            if r.flags & OVERFLOW != 0 {
                r.generation = self.overflow_generation(r.node)?;
            }
            bytes += r.payload.len() + 40;
            records.push(Record::Full(r));
        }
        // the inode first: recovery takes the first record for the file that the chunk is about
        records.rotate_right(1);
        Ok((records, bytes))
    }

    /// Whether the journal has room for a roll-forward chunk of so many blocks, and commits after it still have theirs: a hint,
    /// others may take it before ([`Self::roll_forward_chunk`]).
    fn fits_beside_commits(&self, blocks: u32) -> bool {
        blocks < self.chunk_blocks_max() && self.journal.used() + u64::from(blocks) <= self.roll_forward_most(0)
    }

    /// Whether no commit that is under way, or about to begin, carries an older state of the cell. Of a directory it would
    /// be that one's name that counts after a crash: recovery does not roll forward a directory that was committed.
    pub fn is_newest(&self, st: &State) -> bool {
        st.durability.is_newest(self.committed_tx(), self.running())
    }

    /// That a directory exists, whose creation is not durable; `None` where it has other names than at `linked_at`, or a
    /// commit has begun since. The caller is in this domain.
    pub fn ancestor(&self, dir: &Arc<Cell>, linked_at: u64) -> Option<Ancestor> {
        let st = dir.state.read();
        let same = st.durability.names_changed_at() == linked_at && !st.deleted && self.is_newest(&st);
        let version = st.durability.version();
        same.then(|| Ancestor { dir: dir.clone(), version, record: Record::Full(skeleton(self, dir, &st)) })
    }

    /// A batch with nothing but new directories of this domain, for a file of another domain below them.
    pub fn ancestors_batch(&self, e: &Enter<'_>, records: Vec<Record>) -> Batch {
        Batch { out: Out::default(), records, data_first: false, tx: e.tx().id, _io: e.begin_io() }
    }

    /// Writes batches of files, all in one submission; the caller flushes the devices afterwards. False where the journal
    /// has no room for one: commit instead.
    ///
    /// # Errors
    /// Of the device; the domain fails then.
    pub fn write_batches(&self, mut batches: SmallVec<[Batch; 1]>) -> Result<SmallVec<[bool; 1]>> {
        let write = || {
            let (writes, fit) = self.begin_batches(&mut batches)?;
            self.submit_through(writes)?;
            Ok(fit)
        };
        let fit = self.failing_on_panic("an fsync", write).inspect_err(|e| self.fail(e))?;
        self.end_batches(batches, &fit);
        Ok(fit)
    }

    /// What of the batches is to be written at once, and of each whether it is among that: else the journal has no room. Data
    /// that must be durable before the records has been written.
    ///
    /// # Errors
    /// Of the device.
    pub(crate) fn begin_batches(&self, batches: &mut [Batch]) -> Result<(Writes, SmallVec<[bool; 1]>)> {
        let mut writes = Vec::new();
        for b in batches.iter_mut().filter(|b| b.data_first) {
            writes.append(&mut b.out.writes);
        }
        if batches.iter().any(|b| b.data_first) {
            self.submit(std::mem::take(&mut writes))?;
            self.flush_devices()?;
        }
        let mut fit: SmallVec<[bool; 1]> = SmallVec::new();
        for b in batches.iter_mut() {
            writes.append(&mut b.out.writes);
            if b.records.is_empty() {
                fit.push(true);
                continue;
            }
            let mut body = Vec::new();
            b.records.iter().for_each(|r| r.encode(&mut body));
            let small = chunk_blocks(body.len()) <= self.chunk_blocks_max();
            let chunk = if small { self.roll_forward_chunk(b.tx, &body) } else { Err(Error::JournalFull) };
            match chunk {
                Ok(c) => {
                    writes.push((c.0, Payload::Raw(c.1)));
                    fit.push(true);
                }
                Err(Error::JournalFull) => fit.push(false),
                Err(e) => return Err(e),
            }
        }
        Ok((writes, fit))
    }

    /// A roll-forward chunk, where the journal keeps room for the commits. Files that are synced together were all gathered
    /// before the first of them takes its room: what each of them found then is not what is there now.
    ///
    /// # Errors
    /// [`Error::JournalFull`].
    fn roll_forward_chunk(&self, tx: TxId, body: &[u8]) -> Result<super::commit::Chunk> {
        let running = self.gate.read();
        let take = |cost| self.chunk_below(self.roll_forward_most(cost), (ChunkKind::RollForward, tx, 0), body);
        match take(running.cost_at_most()) {
            Err(Error::JournalFull) => take(running.cost()),
            taken => taken,
        }
    }

    /// Writes the records of a file without pages, as an fsync does, with no limit but the ring's end; false where there is no room
    /// up to there.
    #[cfg(test)]
    pub(crate) fn sync_beyond_limit(&self, e: &Enter<'_>, cell: &Cell) -> bool {
        let (records, _) = self.full_records(cell, &mut cell.state.write()).unwrap();
        let mut body = Vec::new();
        records.iter().for_each(|r| r.encode(&mut body));
        let Ok(c) = self.chunk(ChunkKind::RollForward, e.tx().id, 0, &body) else { return false };
        self.submit(vec![(c.0, Payload::Raw(c.1))]).unwrap();
        true
    }

    /// Whether the commit of the running transaction would wait for writes of its data.
    #[cfg(test)]
    pub(crate) fn has_io(&self) -> bool {
        self.gate.read().has_io()
    }

    /// They are written: their transactions may be committed from here on.
    pub(crate) fn end_batches(&self, batches: SmallVec<[Batch; 1]>, fit: &[bool]) {
        drop(batches);
        self.counters.fast_syncs.add(fit.iter().filter(|f| **f).count() as i64);
    }
}

/// Adds the checksums of the pages that are about to be written; bytes of these records, 0 without any.
fn add_sums(out: &Out, records: &mut Vec<Record>) -> usize {
    let mut bytes = 0;
    for (addr, p) in &out.writes {
        if let Payload::Pages(pages, ..) = p {
            let sums: Vec<u32> = pages.iter().map(|p| crc32c::crc32c(p.bytes())).collect();
            bytes += 12 + 4 * sums.len();
            records.push(Record::Sums { addr: *addr, sums });
        }
    }
    bytes
}

/// Whether the extended attributes of a new directory fit a record beside its name; else it is committed.
pub fn skeleton_fits(st: &State) -> bool {
    st.xattrs.iter().map(|(n, v)| n.len() + v.len() + 8).sum::<usize>() <= SKELETON_XATTRS
}

/// The record that a directory exists under its name, without its entries: those of synced children come back from
/// the children's own records. Its attributes fit it ([`skeleton_fits`]).
pub(super) fn skeleton(d: &Domain, c: &Cell, st: &State) -> NodeRecord {
    let content = Content::InlineDir(Vec::new());
    let inode = Inode { nlink: 2, size: 0, rdev: 0, content, ..st.to_inode() };
    let remote = st.links.iter().any(|l| d.domain_of(l.parent) != Some(d.id));
    NodeRecord {
        node: c.ino.node(),
        generation: c.generation,
        kind: NodeKind::Inode,
        flags: USED | DIR | if remote { braidfs_format::node::REMOTE } else { 0 },
        owner: c.ino,
        version: st.durability.version(),
        payload: inode.encode(),
    }
}
