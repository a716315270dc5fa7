//! Writing out one cell for a transaction: dirty data gets its place (delayed allocation), directory buckets theirs,
//! and the inode becomes node records.

use super::Domain;
use super::out::{Out, Payload};
use super::tx::Tx;
use crate::braid::durability::Durability;
use crate::budget::requests_of;
use crate::cell::extents::{Piece, Runs};
use crate::cell::pages::Page;
use crate::cell::{Body, Cell, Dirty, FileBody, State, dir};
use crate::error::{Error, Result};
use crate::planted::{Bug, planted};
use crate::space::Class;
use crate::store::Store;
use crate::types::*;
use braidfs_format::dentry::{bucket_lblk, encode_bucket};
use braidfs_format::group::{SegmentKind, Temperature};
use braidfs_format::inode::{Extent, NOCOW};
use braidfs_format::journal::Record;
use braidfs_format::node::OVERFLOW;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Longest run given to one allocation, blocks: extents of a growing file come in runs up to this.
pub(super) const RUN_MAX: usize = 1024;
/// Files at least this long go to the cold log when written at once.
const COLD_BLOCKS: usize = 4096;

/// [`Store::write_batch`], or [`Store::write_batch_through`] of who flushes right afterwards.
pub(super) type WriteBatch = fn(&Store, &[(BlockAddr, Vec<&[u8]>)]) -> braidfs_store::Result<()>;

/// The dirty pages of a file on their way to their places ([`Domain::flush_file`]).
struct Flush<'a> {
    tx: &'a Tx,
    cell: &'a Arc<Cell>,
    mlog: usize,
    class: Class,
    /// The file is always overwritten in place.
    nocow: bool,
    /// It is now.
    in_place: bool,
    out: &'a mut Out,
    /// What must be written before the cell is let go.
    now: Vec<(BlockAddr, Vec<Page>)>,
    /// Logical blocks that were never written before.
    filled: Vec<Range<u64>>,
}

/// Where the log of so many dirty pages of a file is.
fn class_of(f: &FileBody, dirty: usize) -> Class {
    let temperature = match (f.cold || dirty >= COLD_BLOCKS, dirty) {
        (true, _) => Temperature::Cold,
        (false, 0..=4) => Temperature::Hot,
        _ => Temperature::Warm,
    };
    Class { kind: SegmentKind::Data, temperature }
}

/// Whether a dirty page that is mapped to `p` is written where it lies, in a file that is (`in_place`) or is not
/// overwritten in place. A block with a checksum never is: block and checksum would not change together.
pub fn writes_in_place(p: &Piece, in_place: bool) -> bool {
    p.unwritten || (in_place && p.sum.is_none())
}

/// The first of these logical blocks, all of them dirty, that must be written where it lies. Looks at no extent behind
/// them.
fn next_in_place(f: &FileBody, blocks: Range<u64>, in_place: bool) -> Option<u64> {
    let mut at = blocks.start;
    while at < blocks.end {
        let p = f.map.next_from(at).filter(|p| p.lblk < blocks.end)?;
        if writes_in_place(&p, in_place) {
            return Some(p.lblk);
        }
        at = p.lblk + u64::from(p.len);
    }
    None
}

impl Domain {
    /// Takes a reserved block for metadata and allocates it.
    ///
    /// # Errors
    /// [`Error::NoSpace`] where even the hidden reserve is gone.
    pub fn alloc_meta(&self, tx: &Tx, mlog: usize) -> Result<BlockAddr> {
        self.take_for_commit(tx)?;
        let class = Class { kind: SegmentKind::Node, temperature: Temperature::Hot };
        match self.space.alloc(mlog, class, 1, None) {
            Ok(r) => Ok(r.addr),
            Err(e) => {
                self.space.unreserve(1);
                Err(e)
            }
        }
    }

    /// Takes a block that was reserved for `tx`, else one of those kept for what nobody reserved.
    fn take_for_commit(&self, tx: &Tx) -> Result<()> {
        if tx.take_credit() { Ok(()) } else { self.space.reserve_for_commit(1) }
    }

    /// A new overflow node.
    pub fn alloc_overflow(&self, near: InodeNo) -> Result<NodeId> {
        let (node, generation) = self.nodes.alloc_overflow(near.node())?.ok_or(Error::NoSpace)?;
        self.new_generations.lock().insert(node, generation);
        Ok(node)
    }

    /// Generation of an overflow node's slot.
    pub(super) fn overflow_generation(&self, node: NodeId) -> Result<u32> {
        if let Some(g) = self.new_generations.lock().get(&node) {
            return Ok(*g);
        }
        Ok(self.nodes.get(node)?.generation)
    }

    /// Blocks are no longer used from `tx` on.
    pub fn free_runs(&self, tx: &Tx, runs: &mut Runs) {
        // what was written here and there in a file often lies together on the device
        runs.sort_unstable();
        runs.dedup_by(|next, last| {
            let joins = last.0.0 + u64::from(last.1) == next.0.0;
            last.1 += if joins { next.1 } else { 0 };
            joins
        });
        let blocks: u64 = runs.iter().map(|r| u64::from(r.1)).sum();
        if blocks > 0 {
            self.space.pending_free(blocks);
            #[cfg(feature = "planted-bugs")]
            self.free_too_early(runs);
            tx.record_all(runs.iter().map(|&(addr, len)| Record::Free { addr, len }));
        }
    }

    /// Whether the file's data is overwritten where it lies.
    pub fn in_place(&self, st: &State) -> bool {
        st.flags & NOCOW != 0 && self.data_mode() != DataMode::Journal && !self.sums_count(st)
    }

    /// Whether blocks must stay as they are: a roll-forward record that counts carries their checksums.
    pub(super) fn sums_count(&self, st: &State) -> bool {
        st.durability.sums_count(self.committed_tx()) && !planted(Bug::SumsForgotten)
    }

    /// Writes the cell out for `tx`, if it is on its list and not yet written: data and buckets get places, the inode
    /// becomes records in `out`. The caller holds the cell's lock.
    ///
    /// # Errors
    /// Of the device (in-place data, buckets that must be read) or space that was not reserved.
    pub fn serialise(&self, tx: &Tx, cell: &Arc<Cell>, st: &mut State, out: &mut Out, mlog: usize) -> Result<()> {
        if st.durability.dirty_tx() != Some(tx.id) {
            return Ok(());
        }
        st.durability.transaction_writes_inode(tx.id, self.committed_tx());
        if st.deleted {
            debug_assert!(st.nlink == 0 && st.links.is_empty(), "{}: deleted with a name", cell.ino);
            for n in cell.nodes(st) {
                let g = if n == cell.ino.node() { cell.generation } else { self.overflow_generation(n)? };
                out.free.push((n, g));
            }
            out.dead.push(cell.clone());
            return Ok(());
        }
        self.forget_durable(st);
        // a link's target is no data: it is durable with the link
        let lazy = self.lazy_data()
            && cell.kind == FileKind::File
            && matches!(&st.body, Body::File(f) if f.inline.is_none() && !f.goes_with_record() && f.pages.dirty_count() > 0);
        if lazy {
            self.lazy.lock().push(cell.clone());
        } else {
            self.flush_file(tx, cell, st, out, mlog)?;
        }
        self.uninline_if_tight(tx, cell, st, out, mlog)?;
        self.flush_dir(tx, cell, st, out, mlog)?;
        if let Body::File(f) = &mut st.body
            && let Some(map) = f.map.there()
        {
            map.write_rolled();
        }
        let records = self.encode(cell, st)?;
        self.count_attached(cell, st);
        self.take_records(records, out)
    }

    /// [`Cell::encode`] with this domain's nodes.
    pub(super) fn encode(&self, cell: &Cell, st: &mut State) -> Result<crate::cell::record::Records> {
        let remote = st.links.iter().any(|l| self.domain_of(l.parent) != Some(self.id));
        cell.encode(st, remote, &mut || self.alloc_overflow(cell.ino))
    }

    /// Moves encoded records to `out`, overflow nodes with the generation of their own slots.
    fn take_records(&self, records: crate::cell::record::Records, out: &mut Out) -> Result<()> {
        for mut r in records.write {
            if r.flags & OVERFLOW != 0 {
                r.generation = self.overflow_generation(r.node)?;
            }
            out.nodes.push(r);
        }
        for n in records.free {
            out.free.push((n, self.overflow_generation(n)?));
        }
        Ok(())
    }

    /// Forgets tombstones and exchanges whose other side is durable: also those that a record brought along from an
    /// earlier mount, which would make recovery misjudge later ones.
    pub fn forget_durable(&self, st: &mut State) {
        let recovering = self.shared.recovering.load(Ordering::Relaxed);
        st.durability.forget_durable(|d, t| self.committed_tx_of(d) < t, recovering);
    }

    /// Inline data that no longer fits beside links and attributes becomes a page.
    pub(super) fn uninline_if_tight(
        &self,
        tx: &Tx,
        cell: &Arc<Cell>,
        st: &mut State,
        out: &mut Out,
        mlog: usize,
    ) -> Result<()> {
        let room = crate::cell::record::inline_room(st);
        if !matches!(&st.body, Body::File(f) if f.inline.as_ref().is_some_and(|b| b.len() > room)) {
            return Ok(());
        }
        let charge = self.shared.quotas.charge(cell, st);
        let Body::File(f) = &mut st.body else { return Ok(()) };
        self.take_for_commit(tx)?;
        f.reserved += 1;
        self.uninline(f);
        // no operation could charge it
        charge.settle(0, 1);
        self.flush_file(tx, cell, st, out, mlog)
    }

    /// Turns inline content into dirty pages; the caller has reserved their blocks. The next transaction that writes the
    /// file's record writes them, also with `data=writeback`: they may have been durable.
    pub fn uninline(&self, f: &mut FileBody) {
        if let Some(b) = f.inline.take()
            && !b.is_empty()
        {
            let mut p = Page::zeroed(self.place.home());
            p.write(0, &b);
            f.pages.put_dirty(0, p);
            f.dirty = Dirty::WasInline;
            self.memory.add(1, 1);
        }
    }

    /// Gives every dirty page of the file its place. Blocks that were never written, and those of a file that is always
    /// overwritten in place, are written before this returns, in one batch (two transactions must not race for one block).
    /// All others go to `out`, also what is overwritten: as long as that is under way ([`Cell::inflight`]), what follows goes
    /// elsewhere.
    ///
    /// # Errors
    /// As [`Self::serialise`].
    pub fn flush_file(&self, tx: &Tx, cell: &Arc<Cell>, st: &mut State, out: &mut Out, mlog: usize) -> Result<()> {
        let nocow = self.in_place(st);
        // older content of these blocks must not reach the device after what is written here
        let quiet = cell.inflight.load(Ordering::Acquire) == 0 || planted(Bug::InFlightForgotten);
        let in_place = quiet && (nocow || self.commit_overwrites(st));
        let State { body: Body::File(f), durability, .. } = st else { return Ok(()) };
        let dirty = f.pages.dirty_count();
        if dirty == 0 {
            // what the cleaner wanted to move was cut away, or what had been inline
            f.cold = false;
            f.has_left_record();
            return Ok(());
        }
        let class = class_of(f, dirty);
        let mut flush = Flush { tx, cell, mlog, class, nocow, in_place, out, now: Vec::new(), filled: Vec::new() };
        let mut clean = Vec::new();
        for (first, pages) in f.pages.dirty_runs(RUN_MAX) {
            let mut i = 0;
            while i < pages.len() {
                let (lblk, rest) = (first + i as u64, &pages[i..]);
                i += match self.overwrite_piece(&mut flush, f, durability, lblk, rest) {
                    Some(n) => n,
                    None => self.place_piece(&mut flush, f, durability, lblk, rest)?,
                };
            }
            clean.push(first..first + pages.len() as u64);
        }
        let filled = self.write_placed(flush)?;
        // Only now: of a write that fails the pages stay, or what lay there before would be read.
        filled.into_iter().for_each(|r| f.map.mark_written(r.start, r.end));
        clean.into_iter().for_each(|r| f.pages.mark_clean(r.start, r.end));
        f.cold = false;
        f.has_left_record();
        self.memory.remove(0, dirty);
        self.count_index(f);
        if !nocow {
            self.note_pieces(cell.ino, f);
        }
        if f.reserved > 0 && f.pages.dirty_count() == 0 {
            self.space.unreserve(f.reserved);
            f.reserved = 0;
        }
        Ok(())
    }

    /// Has the first of these pages, all dirty, from logical block `lblk` on written where they lie, where that is to be: how
    /// many.
    fn overwrite_piece(
        &self,
        flush: &mut Flush<'_>,
        f: &FileBody,
        durability: &mut Durability,
        lblk: u64,
        pages: &[Page],
    ) -> Option<usize> {
        let p = f.map.get(lblk).filter(|p| writes_in_place(p, flush.in_place))?;
        let n = pages.len().min(p.len as usize);
        if flush.nocow || p.unwritten {
            flush.now.push((p.addr, pages[..n].to_vec()));
        } else {
            flush.out.write_pages(p.addr, lblk, pages[..n].to_vec(), flush.cell);
            flush.out.in_place = true;
        }
        if p.unwritten {
            flush.filled.push(lblk..lblk + n as u64);
            durability.operation_changes_inode(flush.tx.id);
        }
        Some(n)
    }

    /// Gives the first of these pages, all dirty, from logical block `lblk` on a new place, up to where in-place pages begin:
    /// how many.
    ///
    /// # Errors
    /// Of space that was not reserved.
    fn place_piece(
        &self,
        flush: &mut Flush<'_>,
        f: &mut FileBody,
        durability: &mut Durability,
        lblk: u64,
        pages: &[Page],
    ) -> Result<usize> {
        let Flush { tx, cell, class, .. } = *flush;
        let end = lblk + pages.len() as u64;
        let n = (next_in_place(f, lblk..end, flush.in_place).unwrap_or(end) - lblk) as usize;
        let near = lblk.checked_sub(1).and_then(|b| f.map.get(b)).map(|p| BlockAddr(p.addr.0 + 1));
        if f.reserved == 0 {
            self.take_for_commit(tx)?;
            f.reserved = 1;
        }
        // an extent with checksums must fit a leaf
        let most = if self.shared.data_sums { 256 } else { RUN_MAX };
        let want = n.min(f.reserved as usize).min(most) as u32;
        let run = self.space.alloc(flush.mlog, class, want, near)?;
        f.reserved -= u64::from(run.len);
        let placed = &pages[..run.len as usize];
        let sums =
            (self.shared.data_sums && !flush.nocow).then(|| placed.iter().map(|p| crc32c::crc32c(p.bytes())).collect());
        let Class { kind, temperature } = class;
        tx.record(Record::Alloc { addr: run.addr, len: run.len, kind, temperature, owner: cell.ino, lblk });
        let mut freed = Runs::new();
        f.map.insert(Extent { lblk, addr: run.addr, len: run.len, unwritten: false, sums }, &mut freed);
        if !(f.cold && planted(Bug::MoveForgotten)) {
            durability.operation_changes_inode(tx.id);
        }
        self.free_runs(tx, &mut freed);
        if flush.nocow {
            // the next write of these pages goes to the same place, perhaps by another thread
            flush.now.push((run.addr, placed.to_vec()));
        } else {
            flush.out.write_pages(run.addr, lblk, placed.to_vec(), cell);
        }
        Ok(placed.len())
    }

    /// Writes what must be on its way before the cell is let go. Gives the logical blocks that were never written before.
    ///
    /// # Errors
    /// Of the device.
    fn write_placed(&self, flush: Flush<'_>) -> Result<Vec<Range<u64>>> {
        let Flush { now, filled, out, .. } = flush;
        if !now.is_empty() {
            let through = out.flushed && out.writes.is_empty();
            let write = if through { Store::write_batch_through } else { Store::write_batch };
            now.iter().for_each(|(_, pages)| self.charge_pages(pages.len()));
            let ops: Vec<_> = now.iter().map(|(at, pages)| (*at, pages.iter().map(Page::bytes).collect())).collect();
            self.write_now(&ops, write)?;
            out.in_place = true;
        }
        Ok(filled)
    }

    /// A file of which the extents changed may be in pieces: it is made whole when there is time.
    fn note_pieces(&self, ino: InodeNo, f: &FileBody) {
        if f.is_in_pieces() {
            self.in_pieces.lock().note(ino, f.map.extent_count());
        }
    }

    /// What is refused because the file may have no more extents. The log says it once of each file that it meets, as
    /// a program is only told EFBIG, and perhaps by `close`.
    pub fn extents_full(&self, ino: InodeNo) -> Error {
        if self.told_full.swap(ino.0, Ordering::Relaxed) != ino.0 {
            tracing::warn!(%ino, "{}: writes to it are refused", Error::TooManyExtents);
        }
        Error::TooManyExtents
    }

    pub(super) fn write_now(&self, ops: &[(BlockAddr, Vec<&[u8]>)], write: WriteBatch) -> Result<()> {
        self.shared.check_alive()?;
        Ok(write(&self.store, ops)?)
    }

    /// Gives the dirty buckets of a directory new places.
    fn flush_dir(&self, tx: &Tx, cell: &Arc<Cell>, st: &mut State, out: &mut Out, mlog: usize) -> Result<()> {
        if cell.kind != FileKind::Dir {
            return Ok(());
        }
        // no operation knows how many there will be
        let (charge, had) = (self.shared.quotas.charge(cell, st), self.shared.quotas.blocks_of(st));
        let Body::Dir(d) = &mut st.body else { return Ok(()) };
        d.commit_takes(self.shared.options.share_dirs);
        d.forget_durable(|d, t| self.committed_tx_of(d) < t);
        if !d.is_shared() && cell.wide.load(Ordering::Relaxed) {
            cell.wide.store(false, Ordering::Relaxed);
        }
        let crate::cell::DirBody { index, map, .. } = &mut **d;
        let (write, dropped) = match index.take_dirty() {
            dir::DirWrite::Inline(_, dropped) => (Vec::new(), dropped),
            dir::DirWrite::Buckets { write, dropped } => (write, dropped),
        };
        let mut freed = Runs::new();
        for lblk in dropped {
            map.remove(lblk, lblk + 1, &mut freed);
        }
        for (first, entries) in write {
            let addr = self.alloc_meta(tx, mlog)?;
            let lblk = bucket_lblk(first);
            entries.fetch();
            let block = encode_bucket(entries.iter(), cell.ino, first, self.id.0, self.store.volume, addr, tx.id.0);
            tx.record(Record::Alloc {
                addr,
                len: 1,
                kind: SegmentKind::Node,
                temperature: Temperature::Hot,
                owner: cell.ino,
                lblk,
            });
            map.insert(Extent { lblk, addr, len: 1, unwritten: false, sums: None }, &mut freed);
            out.bytes += block.len();
            out.writes.push((addr, Payload::Bucket(block)));
        }
        self.free_runs(tx, &mut freed);
        // none where it is small, or empty again
        if let Body::Dir(d) = &st.body {
            st.size = d.map.blocks() * 4096;
        }
        charge.settle(had, self.shared.quotas.blocks_of(st));
        Ok(())
    }

    /// Writes everything in `writes` and lets the pages go, where that succeeds.
    ///
    /// # Errors
    /// Of the device: the caller fails the domain.
    pub fn submit(&self, writes: Vec<(BlockAddr, Payload)>) -> Result<()> {
        self.submit_by(writes, Store::write_batch)
    }

    /// As [`Self::submit`], of who flushes the devices right afterwards.
    ///
    /// # Errors
    /// As [`Self::submit`].
    pub fn submit_through(&self, writes: Vec<(BlockAddr, Payload)>) -> Result<()> {
        self.submit_by(writes, Store::write_batch_through)
    }

    /// As [`Self::submit_through`], of writes of several domains, which each has been charged for.
    ///
    /// # Errors
    /// As [`Self::submit`].
    pub fn submit_of_several(&self, writes: Vec<(BlockAddr, Payload)>) -> Result<()> {
        self.submit_charged(writes, Store::write_batch_through)
    }

    /// Charges the tenant for what is about to be written. Bytes of pages are charged when they become dirty.
    pub fn charge_writes(&self, writes: &[(BlockAddr, Payload)]) {
        if self.budget.may_charge() {
            for (_, p) in writes {
                match p {
                    Payload::Pages(pages, ..) => self.charge_pages(pages.len()),
                    Payload::Raw(b) | Payload::Bucket(b) => self.budget.charge_run(Way::Write, b.len()),
                }
            }
        }
    }

    pub(super) fn charge_pages(&self, pages: usize) {
        self.budget.charge(Way::Write, 0, requests_of(pages * 4096));
    }

    fn submit_by(&self, writes: Vec<(BlockAddr, Payload)>, write: WriteBatch) -> Result<()> {
        self.charge_writes(&writes);
        self.submit_charged(writes, write)
    }

    fn submit_charged(&self, writes: Vec<(BlockAddr, Payload)>, write: WriteBatch) -> Result<()> {
        if writes.is_empty() {
            return Ok(());
        }
        let ops: Vec<(BlockAddr, Vec<&[u8]>)> = writes
            .iter()
            .map(|(a, p)| match p {
                Payload::Pages(v, ..) => (*a, v.iter().map(Page::bytes).collect()),
                Payload::Raw(b) | Payload::Bucket(b) => (*a, vec![b.as_slice()]),
            })
            .collect();
        self.write_now(&ops, write)?;
        drop(ops);
        // of a write that failed the pages stay: on the device there may be anything
        for (addr, p) in &writes {
            match p {
                Payload::Pages(_, c, _) => {
                    c.inflight.fetch_sub(1, Ordering::AcqRel);
                }
                // its directory is on the transaction's list still: nobody reads the bucket from the device before this
                Payload::Bucket(_) => self.nodes.invalidate(*addr),
                Payload::Raw(_) => {}
            }
        }
        if self.shared.options.cached_above {
            self.give_up_written(&writes);
        }
        Ok(())
    }

    /// Forgets pages that the device has now. Those of a file that somebody looks at, or of which more is under way, are
    /// left to the evictor. A last page that the file ends in stays: whoever appends wants it.
    fn give_up_written(&self, writes: &[(BlockAddr, Payload)]) {
        let mut gone = 0;
        for (_, p) in writes {
            let Payload::Pages(pages, cell, lblk) = p else { continue };
            if let Some(mut st) = cell.state.try_write()
                // under the lock: a flush raises it there
                && cell.inflight.load(Ordering::Acquire) == 0
            {
                let whole = st.size / 4096;
                if let Body::File(f) = &mut st.body {
                    let written = pages.iter().zip(*lblk..whole);
                    gone += written.filter(|(page, lblk)| f.pages.forget(*lblk, page)).count();
                }
            }
        }
        self.memory.remove(gone, 0);
    }
}
