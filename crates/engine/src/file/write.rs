//! Writing file data: write, append.
//!
//! A write changes pages in memory and reserves the blocks that they will need, so that ENOSPC is told here; places are
//! given when the file is synced, when the transaction commits, or under memory pressure (delayed allocation).

use super::reserve::Reserve;
use super::{PAGE, SIZE_MAX};
use crate::cell::frames::pool::Home;
use crate::cell::pages::Page;
use crate::cell::{Body, Cell, FileBody, State};
use crate::domain::Domain;
use crate::error::{Error, Result};
use crate::planted::sharing::{Place, share};
use crate::quota::{self, Charge, Force};
use crate::space::Space;
use crate::types::*;
use crate::volume::need::Need;
use crate::volume::operation::{Asked, EXTENTS_OF_RECORD, Leaves, METADATA_OF_WRITE, Op};
use crate::volume::{MountedVolume, OpenFile, Volume};
use braidfs_format::inode::IMMUTABLE;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Written at once by one operation at most: keeps gates and locks short.
pub(super) const PIECE: usize = 1 << 20;
/// A file with fewer dirty pages leaves them to the commit.
const FLUSH_PAGES: usize = 4096;
/// One with this part of the cache's memory, or with [`FLUSH_PAGES`] where all files together have four times as much of
/// it, writes them itself.
const FLUSH_PART: u64 = 32;

/// What a write does to the file's times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Times {
    /// It was modified now.
    Now,
    /// They stay.
    Kept,
}

/// Where a write goes.
#[derive(Debug, Clone, Copy)]
enum At {
    Offset(u64),
    /// Of a write that somebody was told to be done already: an immutable file takes it, too.
    Accepted(u64, Times),
    End,
}

impl At {
    fn times(self) -> Times {
        match self {
            At::Accepted(_, times) => times,
            At::Offset(_) | At::End => Times::Now,
        }
    }

    /// Where it begins in a file, where that may be written.
    fn checked_offset(self, st: &State) -> Result<u64> {
        if st.deleted {
            return Err(Error::NotFound);
        }
        // not APPEND: a kernel's writeback cache writes the last page again at its place; opening checks it
        if st.flags & IMMUTABLE != 0 && !matches!(self, At::Accepted(..)) {
            return Err(Error::Perm);
        }
        let offset = match self {
            At::Offset(o) | At::Accepted(o, _) => o,
            At::End => st.size,
        };
        if offset >= SIZE_MAX { Err(Error::TooBig) } else { Ok(offset) }
    }
}

/// What a piece of a write did.
struct Wrote {
    offset: u64,
    bytes: usize,
    /// Dirty pages of the file afterwards; `None` where they are those of before.
    dirty: Option<usize>,
}

/// What became of an overwrite with the cell locked for reading.
enum SharedOverwrite {
    Done(Wrote),
    /// It changes more of the inode than bytes, or meets an I/O: for who has the cell alone.
    Alone,
    /// It is more than an overwrite of dirty pages.
    More,
}

/// Where a write ends that changes only what the running transaction has anyway; `None` where it is more than that, but for
/// pages that are not dirty.
fn end_of_overwrite(d: &Domain, st: &State, offset: u64, len: usize) -> Option<u64> {
    let Body::File(f) = &st.body else { return None };
    let end = offset.checked_add(len as u64).filter(|end| *end <= st.size)?;
    let ours = st.durability.dirty_tx() == Some(d.running()) && !st.deleted && st.flags & IMMUTABLE == 0;
    (ours && f.inline.is_none()).then_some(end)
}

/// Puts bytes into the pages of a file, new ones with memory from `home`; how many pages are new, and how many were not dirty before.
fn write_pages(f: &mut FileBody, home: Home, offset: u64, data: &[u8]) -> (usize, usize) {
    let (mut done, mut new_pages, mut new_dirty) = (0, 0, 0);
    while done < data.len() {
        let at = offset + done as u64;
        let (lblk, from) = (at / PAGE, (at % PAGE) as usize);
        let k = (PAGE as usize - from).min(data.len() - done);
        let bytes = &data[done..done + k];
        match f.pages.write(lblk, from, bytes) {
            Some(fresh) => new_dirty += usize::from(fresh),
            None => {
                let mut p = if k == PAGE as usize { Page::from_slice(bytes, home) } else { Page::zeroed(home) };
                if k < PAGE as usize {
                    p.write(from, bytes);
                }
                f.pages.put_dirty(lblk, p);
                new_pages += 1;
                new_dirty += 1;
            }
        }
        done += k;
    }
    (new_pages, new_dirty)
}

impl MountedVolume {
    /// The content changed, by an operation that has made this version.
    fn written(&self, st: &mut State, times: Times) {
        if times == Times::Now {
            st.modified(self.shared.now());
        }
    }

    /// Overwrites pages that the running transaction will write anyway: nothing is reserved, and nothing joins the
    /// transaction. `None` where the write is more than that.
    ///
    /// Not inside the gate: where the transaction is flipped meanwhile, its commit waits for the cell's lock and takes
    /// these bytes with it, as if they had come before the flip. A thread that has changed something in the next
    /// transaction sees its number, and does not come here.
    fn write_to_dirty_pages(&self, c: &Cell, offset: u64, data: &[u8], times: Times) -> Result<Option<Wrote>> {
        let d = self.dom(c.domain);
        d.check_writable()?;
        let mut guard = c.state.write();
        let st = &mut *guard;
        let Some(end) = end_of_overwrite(d, st, offset, data.len()) else { return Ok(None) };
        let Body::File(f) = &mut st.body else { return Ok(None) };
        let (first, last) = (offset / PAGE, (end - 1) / PAGE);
        if first != last && !f.pages.all_dirty(first, last) {
            return Ok(None);
        }
        let mut rest = data;
        while !rest.is_empty() {
            let at = end - rest.len() as u64;
            let (lblk, from) = (at / PAGE, (at % PAGE) as usize);
            let (part, after) = rest.split_at((PAGE as usize - from).min(rest.len()));
            if !f.pages.write_dirty(lblk, from, part) {
                return Ok(None); // the only page: of several, all are dirty
            }
            rest = after;
        }
        if f.writers.note(braidfs_sync::pins::thread()) {
            f.pages.share(first, last);
            // it lies in a line that look-ups read
            if !c.wide.load(Ordering::Relaxed) {
                c.wide.store(true, Ordering::Relaxed);
            }
        }
        st.durability.operation_makes_version();
        st.durability.operation_changes_data();
        self.written(st, times);
        Ok(Some(Wrote { offset, bytes: data.len(), dirty: None }))
    }

    /// [`Self::write_to_dirty_pages`] of a file that several threads overwrite, with the cell locked for reading: where
    /// nothing of the inode changes by it but bytes. So it is where the running transaction has the inode on its list, its
    /// newest version is one of data, and its times are those of the clock, which ticks every few milliseconds.
    fn overwrite_shared(&self, c: &Cell, offset: u64, data: &[u8], times: Times) -> Result<SharedOverwrite> {
        let d = self.dom(c.domain);
        d.check_writable()?;
        let st = c.state.read();
        let Some(end) = end_of_overwrite(d, &st, offset, data.len()) else { return Ok(SharedOverwrite::More) };
        let Body::File(f) = &st.body else { return Ok(SharedOverwrite::More) };
        if !f.pages.all_dirty(offset / PAGE, (end - 1) / PAGE) {
            return Ok(SharedOverwrite::More);
        }
        let same = times == Times::Kept || {
            let now = self.shared.now();
            (st.mtime, st.ctime) == (now, now)
        };
        let same = same && st.durability.version_is_of_data();
        if !same || !f.pages.overwrite(offset, data) {
            return Ok(SharedOverwrite::Alone);
        }
        Ok(SharedOverwrite::Done(Wrote { offset, bytes: data.len(), dirty: None }))
    }

    /// A write of what the running transaction writes anyway, by whichever way the file asks for; `None` where it is more than
    /// that.
    #[inline]
    fn overwrite_dirty(&self, c: &Cell, at: At, data: &[u8]) -> Result<Option<Wrote>> {
        let (At::Offset(offset) | At::Accepted(offset, _)) = at else { return Ok(None) };
        let shared = if c.wide.load(Ordering::Relaxed) {
            self.overwrite_shared(c, offset, data, at.times())?
        } else {
            SharedOverwrite::Alone
        };
        match shared {
            SharedOverwrite::Done(wrote) => Ok(Some(wrote)),
            SharedOverwrite::Alone => self.write_to_dirty_pages(c, offset, data, at.times()),
            SharedOverwrite::More => Ok(None),
        }
    }

    /// Writes one piece: reserves all that it needs, then changes the file. `None` where room must be made first.
    fn write_piece(&self, c: &Arc<Cell>, at: At, data: &[u8]) -> Result<Option<Wrote>> {
        match self.overwrite_dirty(c, at, data)? {
            Some(wrote) => Ok(Some(wrote)),
            None => self.write_in_operation(c, at, data, METADATA_OF_WRITE, Asked::Nothing),
        }
    }

    /// [`Self::write_piece`] that is more than an overwrite of dirty pages. Apart from that, which then keeps fewer values in
    /// memory for its sake.
    ///
    /// Begins with so many blocks for metadata; `asked`: what was done for nodes, of which there may be few.
    #[inline(never)]
    fn write_in_operation(
        &self,
        c: &Arc<Cell>,
        at: At,
        data: &[u8],
        blocks: u64,
        mut asked: Asked,
    ) -> Result<Option<Wrote>> {
        let d = self.dom(c.domain);
        // overwriting works on a full volume; what needs new room asks for it below
        let mut op = Op::new(self);
        op.begin(&[c.domain], blocks, true)?;
        let mut st = c.state.write();
        let offset = at.checked_offset(&st)?;
        if let Some(more) = op.lacks(c, &mut st) {
            drop((st, op));
            return self.write_in_operation(c, at, data, more, asked);
        }
        let pages = (offset / PAGE, offset.saturating_add(data.len() as u64 - 1) / PAGE);
        let leaves = if asked == Asked::Nodes { Leaves::Enough } else { op.leaves_for(c, &st, Some(pages)) };
        if leaves == Leaves::Unknown && asked.writes_out() {
            drop((st, op));
            self.flush_cell(c)?;
            return self.write_in_operation(c, at, data, blocks, asked);
        }
        if leaves != Leaves::Enough {
            drop((st, op));
            match self.make_nodes(d) {
                // what was accepted is written as long as there are any at all
                Err(Error::NoSpace) if matches!(at, At::Accepted(..)) => {}
                made => made?,
            }
            return self.write_in_operation(c, at, data, blocks, Asked::Nodes);
        }
        op.write_out_older(c, &mut st)?;
        // what was accepted must not be lost where a limit has gone down since
        let reserve: Reserve =
            if matches!(at, At::Accepted(..)) { Space::reserve_accepted } else { Space::reserve_ordinary };
        let n = data.len().min((SIZE_MAX - offset) as usize);
        let end = offset + n as u64;
        let mut charge = self.shared.quotas.charge(c, &st);
        if !self.load_last_page(c, &mut st, end, &mut charge)? {
            return Ok(None);
        }
        let inline_max = self.shared.inline_max;
        let Body::File(f) = &mut st.body else { return Err(Error::Invalid("not a regular file")) };
        if f.lacks_extents(((end - 1) / PAGE - offset / PAGE + 1) as usize, 0) {
            if f.pages.dirty_count() == 0 {
                return Err(d.extents_full(c.ino));
            }
            // written, they count as what they are
            drop((charge, st, op));
            self.flush_cell(c)?;
            return self.write_in_operation(c, at, data, blocks, asked);
        }
        let stays_inline =
            f.inline.is_some() && end <= inline_max as u64 && f.inline.as_ref().is_some_and(|b| b.len() <= inline_max);
        // a tree's leaves are records of their own: as many more may become dirty
        let leaves = if f.map.extent_count() > EXTENTS_OF_RECORD { 2 } else { 0 };
        let reserved = if stays_inline {
            self.reserve_inline(&mut op, c, &mut st, end, reserve)
        } else {
            self.prepare_pages(c, &mut st, offset..end, reserve, &mut charge)?
        };
        if !reserved {
            return Ok(None);
        }
        // only now: what a transaction without changes has been given stays reserved until there are some
        op.credit(c.domain, leaves);
        // else an inline file's bytes change, which are its record's
        let blocks = matches!(&st.body, Body::File(f) if f.inline.is_none());
        if blocks && end <= st.size {
            op.touch_content(c, &mut st)?
        } else {
            op.touch(c, &mut st)?
        }
        charge.keep();
        self.written(&mut st, at.times());
        st.durability.operation_changes_data();
        let old_size = st.size;
        if end > old_size {
            self.dirty_last_page(self.dom(c.domain), &mut st);
        }
        st.size = st.size.max(end);
        let size = st.size;
        let Body::File(f) = &mut st.body else { return Err(Error::Invalid("not a regular file")) };
        if stays_inline {
            if let Some(b) = &mut f.inline {
                b.resize(size as usize, 0);
                b[offset as usize..end as usize].copy_from_slice(&data[..n]);
            }
            return Ok(Some(Wrote { offset, bytes: n, dirty: Some(0) }));
        }
        d.uninline(f);
        let (new_pages, new_dirty) = write_pages(f, d.place.home(), offset, &data[..n]);
        if f.writers.are_several() {
            f.pages.share(offset / PAGE, (end - 1) / PAGE);
        }
        // an overwrite of dirty pages touches no line that all files share
        if new_dirty > 0 {
            self.dom(c.domain).memory.add(new_pages, new_dirty);
            op.tx(c.domain).expect_pages(new_dirty);
            d.budget.charge(Way::Write, new_dirty as u64 * PAGE, 0);
        }
        Ok(Some(Wrote { offset, bytes: n, dirty: Some(f.pages.dirty_count()) }))
    }

    /// Reserves for an inode record that grows with its content, to `end`; false where room must be made first.
    pub(super) fn reserve_inline(&self, op: &mut Op<'_>, c: &Cell, st: &mut State, end: u64, reserve: Reserve) -> bool {
        if end > st.size {
            let space = &self.dom(c.domain).space;
            // part of a node block, which is counted whole where it begins
            let Ok(promised) = reserve(space, 1) else { return false };
            space.unreserve_accepted(1, promised);
            let now = st.record_bytes();
            op.grows(c.domain, now, now + (end - st.size) as usize);
        }
        true
    }

    /// Reserves blocks for the bytes that a write replaces or adds, and reads the pages of which it keeps a part; false where
    /// room must be made first.
    fn prepare_pages(
        &self,
        c: &Cell,
        st: &mut State,
        bytes: Range<u64>,
        reserve: Reserve,
        charge: &mut Charge<'_>,
    ) -> Result<bool> {
        let d = self.dom(c.domain);
        let Body::File(f) = &st.body else { return Err(Error::Invalid("not a regular file")) };
        let (first, last) = (bytes.start / PAGE, (bytes.end - 1) / PAGE);
        // inline content becomes page 0, which the write itself may not reach
        let extra = u64::from(first > 0 && f.inline.as_ref().is_some_and(|b| !b.is_empty()));
        let Ok(promised) = reserve(&d.space, extra) else { return Ok(false) };
        let reserved = match self.reserve_pages_as(c, st, (first, last), reserve, charge) {
            Ok(true) => charge.blocks(extra).map(|()| true),
            other => other,
        };
        if !matches!(reserved, Ok(true)) {
            d.space.unreserve_accepted(extra, promised);
            return reserved;
        }
        if let Body::File(f) = &mut st.body {
            f.reserved += extra;
        }
        // a page that is written in part needs what it held
        let inside = bytes.end < st.size;
        let parts = [
            (first, !bytes.start.is_multiple_of(PAGE) || (bytes.end < (first + 1) * PAGE && inside)),
            (last, !bytes.end.is_multiple_of(PAGE) && inside),
        ];
        for (lblk, _) in parts.into_iter().filter(|p| p.1) {
            d.load_pages(c, st, lblk, 1)?;
        }
        Ok(true)
    }

    /// Writes `data`, which is not empty: where it started, and how many bytes; fewer than given only where it could not go on.
    fn write_at(&self, c: &Arc<Cell>, at: At, data: &[u8]) -> Result<(u64, usize)> {
        debug_assert!(!data.is_empty());
        // what there is most of, before all that has to be at hand for the rest
        let is_one = data.len() <= PIECE;
        if is_one && let Some(wrote) = self.overwrite_dirty(c, at, data)? {
            return Ok((wrote.offset, wrote.bytes));
        }
        self.write_pieces(c, at, data, is_one)
    }

    /// [`Self::write_at`] in pieces; with `is_more`, the first is known to be more than an overwrite of dirty pages.
    #[inline(never)]
    fn write_pieces(&self, c: &Arc<Cell>, at: At, data: &[u8], is_more: bool) -> Result<(u64, usize)> {
        let done = self.try_write_pieces(c, at, data, is_more);
        if !matches!(done, Ok((_, n)) if n == data.len()) {
            self.give_back_surplus(c);
        }
        done
    }

    #[inline(always)]
    fn try_write_pieces(&self, c: &Arc<Cell>, mut at: At, data: &[u8], mut is_more: bool) -> Result<(u64, usize)> {
        match c.kind {
            FileKind::File => {}
            FileKind::Dir => return Err(Error::IsDir),
            _ => return Err(Error::Invalid("not a regular file")),
        }
        let mut start = 0;
        let mut done = 0;
        let mut dirty = None;
        while done < data.len() {
            let mut piece = &data[done..data.len().min(done + PIECE)];
            let mut attempt = 0;
            let mut replaced = self.replaced();
            let (offset, n) = loop {
                let wrote = match std::mem::take(&mut is_more) {
                    true => self.write_in_operation(c, at, piece, METADATA_OF_WRITE, Asked::Nothing),
                    false => self.write_piece(c, at, piece),
                };
                match wrote {
                    Ok(Some(w)) => {
                        dirty = w.dirty.or(dirty);
                        break (w.offset, w.bytes);
                    }
                    Ok(None) => {
                        let (d, accepted) = (self.dom(c.domain), matches!(at, At::Accepted(..)));
                        if accepted && d.space.lacks_promised() && self.claim_beyond_limit(d, Need::Blocks)? {
                            continue;
                        }
                        let Err(e) = self.make_room(d, &mut attempt) else { continue };
                        // the last blocks: as much of the piece as there is room for
                        let promised = if accepted { d.space.promised() } else { 0 };
                        let rest = d.space.available().max(promised).min(piece.len() as u64 / PAGE / 2);
                        if rest == 0 {
                            return if done > 0 { Ok((start, done)) } else { Err(e) };
                        }
                        piece = &piece[..(rest * PAGE) as usize];
                    }
                    Err(Error::Quota(owner)) if self.end_replaced_of(owner, &mut replaced) => {}
                    // to the last block that the owner may have
                    Err(Error::Quota(_)) if let Some(n) = self.half_of(c, at, piece) => piece = &piece[..n],
                    Err(_) if done > 0 => return Ok((start, done)),
                    Err(e) => return Err(e),
                }
            };
            if done == 0 {
                start = offset;
            }
            done += n;
            let next = offset + n as u64;
            at = match at {
                At::Offset(_) => At::Offset(next),
                At::Accepted(_, times) => At::Accepted(next, times),
                At::End => At::End,
            };
            // where somebody else may have appended since it would not be one piece
            if n < piece.len() || matches!(at, At::End) {
                break;
            }
        }
        // who overwrites what will be written anyway takes no more memory
        if let Some(dirty) = dirty {
            self.throttle(c, dirty)?;
        }
        Ok((start, done))
    }

    /// How many bytes of a piece lie in the first half of its blocks; `None` where it has but one.
    fn half_of(&self, c: &Cell, at: At, piece: &[u8]) -> Option<usize> {
        let offset = match at {
            At::Offset(o) | At::Accepted(o, _) => o,
            At::End => c.state.read().size,
        };
        let (first, last) = (offset / PAGE, (offset + piece.len() as u64 - 1) / PAGE);
        let end = (first + (last - first).div_ceil(2)) * PAGE;
        (last > first).then(|| (end - offset) as usize)
    }

    /// A file with much dirty data, `dirty` pages, writes it, in the thread that made it; so does a volume that is over
    /// its budget.
    fn throttle(&self, c: &Arc<Cell>, dirty: usize) -> Result<()> {
        let d = self.dom(c.domain);
        if dirty >= FLUSH_PAGES {
            let (budget, all) = match d.memory.ceiling() {
                Some(ceiling) => (ceiling.min(self.cache_budget()), d.memory.dirty()),
                None => (self.cache_budget(), self.shared.looks.dirty_lately()),
            };
            let part = budget / FLUSH_PART / PAGE;
            if dirty as u64 >= part || all >= part * 4 {
                match d.flush_cell(c) {
                    // the write is done: its pages stay in memory
                    Ok(()) | Err(Error::NoSpace) => {}
                    failed => failed?,
                }
            }
        }
        self.maybe_evict(d);
        Ok(())
    }
}

impl Volume {
    /// Writes `data` at `offset`; fewer bytes than given only where space ran out in the middle. ENOSPC is told here, not
    /// later.
    ///
    /// # Errors
    /// [`Error::NoSpace`], [`Error::Quota`], [`Error::TooBig`], [`Error::TooManyExtents`], [`Error::IsDir`],
    /// [`Error::Perm`] for immutable files. That append-only ones are written at their end is for the caller to see
    /// to, who knows how the file was opened.
    pub fn write(&self, file: &OpenFile, offset: u64, data: &[u8]) -> Result<usize> {
        share(Place::Write);
        if data.is_empty() {
            return Ok(0);
        }
        let _paid = self.mounted().pace(file.cell.domain, Demand::write(data.len()));
        Ok(self.mounted().write_at(&file.cell, At::Offset(offset), data)?.1)
    }

    /// As [`Self::write`], for data that a front end has accepted from its user before: a file that was made immutable
    /// since takes it.
    ///
    /// # Errors
    /// As [`Self::write`], but for [`Error::Perm`].
    pub fn write_accepted(&self, file: &OpenFile, offset: u64, data: &[u8]) -> Result<usize> {
        self.write_accepted_as(file, At::Accepted(offset, Times::Now), data)
    }

    /// As [`Self::write_accepted`], for a front end that keeps the times of the files that it writes, and tells them
    /// ([`Self::setattr`]), perhaps before the data comes: they stay as they are.
    ///
    /// # Errors
    /// As of [`Self::write_accepted`].
    pub fn write_accepted_keeping_times(&self, file: &OpenFile, offset: u64, data: &[u8]) -> Result<usize> {
        self.write_accepted_as(file, At::Accepted(offset, Times::Kept), data)
    }

    fn write_accepted_as(&self, file: &OpenFile, at: At, data: &[u8]) -> Result<usize> {
        if data.is_empty() {
            return Ok(0);
        }
        let _accepted = quota::forced(Force::All);
        Ok(self.mounted().write_at(&file.cell, at, data)?.1)
    }

    /// Writes all of `data` at the end of the file; the offset where it starts. What is longer than 1 MiB goes there in
    /// pieces, between which those of others may come; none overwrites another.
    ///
    /// # Errors
    /// As [`Self::write`]; a part may have been written then.
    pub fn append(&self, file: &OpenFile, data: &[u8]) -> Result<u64> {
        let (start, mut done) = self.append_some(file, data)?;
        while done < data.len() {
            done += self.append_some(file, &data[done..])?.1;
        }
        Ok(start)
    }

    /// Writes at the end of the file: the offset where it went, and how many bytes, in one piece. Fewer than given where
    /// there are more than 1 MiB, or where space ran out in the middle.
    ///
    /// # Errors
    /// As [`Self::write`].
    pub fn append_some(&self, file: &OpenFile, data: &[u8]) -> Result<(u64, usize)> {
        share(Place::Append);
        if data.is_empty() {
            return Ok((file.cell.state.read().size, 0));
        }
        let data = &data[..data.len().min(PIECE)];
        let _paid = self.mounted().pace(file.cell.domain, Demand::write(data.len()));
        self.mounted().write_at(&file.cell, At::End, data)
    }
}
