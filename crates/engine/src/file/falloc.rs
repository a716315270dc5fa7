//! `fallocate`: allocate, punch, zero. Collapse and insert: [`super::shift`].
//!
//! Allocated blocks are *unwritten*: they read as zeros and are written in place, and the file is overwritten in place
//! from then on (databases, VM images; docs/crash-contract.md, Data modes).

use super::shift::Shift;
use super::{PAGE, SIZE_MAX};
use crate::cell::extents::Runs;
use crate::cell::{Body, Cell, FileBody, State};
use crate::error::{Error, Result};
use crate::quota::Charge;
use crate::space::Class;
use crate::types::*;
use crate::volume::operation::{Asked, EXTENTS_OF_RECORD, Leaves, Op};
use crate::volume::{MountedVolume, OpenFile, Volume};
use braidfs_format::group::{SegmentKind, Temperature};
use braidfs_format::inode::{APPEND, Extent, IMMUTABLE, NOCOW};
use braidfs_format::journal::Record;
use std::sync::Arc;
/// Blocks allocated by one operation at most.
const PIECE_BLOCKS: u64 = 16 * 1024;

/// The parts of `first .. end` that are not mapped.
fn holes(f: &FileBody, first: u64, end: u64) -> Vec<(u64, u64)> {
    let mut holes = Vec::new();
    let mut at = first;
    while at < end {
        match f.map.next_from(at) {
            Some(p) if p.lblk <= at => at = p.lblk + u64::from(p.len),
            p => {
                let to = p.map_or(end, |p| p.lblk.min(end));
                holes.push((at, to));
                at = to;
            }
        }
    }
    holes
}

/// Whether nothing of the range is a hole.
fn is_allocated(st: &State, (offset, end): (u64, u64)) -> bool {
    matches!(&st.body, Body::File(f) if holes(f, offset / PAGE, end.div_ceil(PAGE)).is_empty())
}

/// The same, but that the size stays.
fn keeping_size(mode: FallocMode) -> FallocMode {
    match mode {
        FallocMode::Allocate { .. } => FallocMode::Allocate { keep_size: true },
        FallocMode::ZeroRange { .. } => FallocMode::ZeroRange { keep_size: true },
        other => other,
    }
}

/// Whether a file could come to have more extents than it may by this: a hole in the middle of one, pages that are cut and get
/// places of their own, holes that are filled. What takes whole extents away may always be done.
fn lacks_extents(f: &FileBody, mode: FallocMode, (offset, end): (u64, u64)) -> bool {
    let (first, last) = (offset.div_ceil(PAGE), end / PAGE);
    let zeroing = !matches!(mode, FallocMode::Allocate { .. });
    let cut = [offset, end].into_iter().filter(|e| zeroing && e % PAGE != 0).count();
    let split = zeroing && first < last && f.map.splits(first, last);
    let filled = match mode {
        FallocMode::Allocate { .. } => holes(f, offset / PAGE, end.div_ceil(PAGE)).len(),
        FallocMode::ZeroRange { .. } => 1,
        _ => 0,
    };
    cut + usize::from(split) + filled > 0 && f.lacks_extents(cut, usize::from(split) + filled)
}

/// Extents that one operation on the range may free, and make, `most` at most: where what is free is in pieces, each of its holes may
/// come to be as many extents as it has blocks. [`Volume::falloc_all`] leaves the half of `most` for these.
fn pieces_at_most(st: &State, mode: FallocMode, (offset, end): (u64, u64), most: usize) -> usize {
    let Body::File(f) = &st.body else { return 0 };
    let (first, end) = (offset / PAGE, end.div_ceil(PAGE));
    let freed = f.map.extent_count();
    let pieces = match mode {
        FallocMode::Allocate { .. } => holes(f, first, end).iter().map(|(a, b)| (b - a) as usize).sum(),
        FallocMode::ZeroRange { .. } => freed.min((end - first) as usize) + (end - first) as usize,
        FallocMode::PunchHole | FallocMode::CollapseRange | FallocMode::InsertRange => freed,
    };
    pieces.min(most)
}

impl MountedVolume {
    /// Promises the blocks that allocating `first .. end` takes, after making room for them: all or nothing, so that no
    /// file is left half grown. How many.
    fn promise(&self, c: &Arc<Cell>, first: u64, end: u64) -> Result<u64> {
        let needed = || match &c.state.read().body {
            Body::File(f) => holes(f, first, end).iter().map(|(a, b)| b - a).sum(),
            _ => 0,
        };
        let (d, mut need) = (self.dom(c.domain), needed());
        if need > self.room(d, need) {
            // dirty pages there have blocks reserved, and are no holes once they have their places
            d.flush_cell(c)?;
            // what others have freed counts when that is durable
            self.end_replaced_in(c.domain);
            self.settle_all();
            need = needed();
            let want = need.saturating_sub(d.space.margin());
            if want > self.room_by_relocation(d, want)? {
                return Err(Error::NoSpace);
            }
        }
        let mut attempt = 0;
        while d.space.reserve(need, false).is_err() {
            self.make_room(d, &mut attempt)?;
            need = needed();
        }
        Ok(need)
    }

    /// Allocates what is not mapped in `first .. end`, out of the blocks that are `promised` to it first; false where room
    /// must be made first.
    fn allocate(
        &self,
        op: &Op<'_>,
        c: &Arc<Cell>,
        st: &mut State,
        (first, end): (u64, u64),
        promised: &mut u64,
        charge: &mut Charge<'_>,
    ) -> Result<bool> {
        let d = self.dom(c.domain);
        let tx = op.tx(c.domain);
        let mlog = d.pick_mlog();
        let class = Class { kind: SegmentKind::Data, temperature: Temperature::Warm };
        let Body::File(f) = &mut st.body else { return Err(Error::Invalid("not a regular file")) };
        let holes = holes(f, first, end);
        let n: u64 = holes.iter().map(|(a, b)| b - a).sum();
        if charge.is_on() {
            // dirty pages there count already
            let counted = |l: &u64| f.map.get(*l).is_none();
            charge.blocks(n - f.pages.dirty_in(first, end).filter(counted).count() as u64)?;
        }
        let given = n.min(*promised);
        if n > given && d.space.reserve(n - given, false).is_err() {
            return Ok(false);
        }
        *promised -= given;
        let mut left = n;
        for (mut at, to) in holes {
            while at < to {
                // the holes are in more pieces than there are holes
                if f.lacks_extents(0, 1) {
                    d.space.unreserve(left);
                    return Err(Error::TooManyExtents);
                }
                let near = at.checked_sub(1).and_then(|b| f.map.get(b)).map(|p| BlockAddr(p.addr.0 + 1));
                let want = (to - at).min(u64::from(u32::MAX)) as u32;
                let run = match d.space.alloc(mlog, class, want, near) {
                    Ok(r) => r,
                    Err(e) => {
                        d.space.unreserve(left);
                        return Err(e);
                    }
                };
                left -= u64::from(run.len);
                tx.record(Record::Alloc {
                    addr: run.addr,
                    len: run.len,
                    kind: class.kind,
                    temperature: class.temperature,
                    owner: c.ino,
                    lblk: at,
                });
                f.map.insert(
                    Extent { lblk: at, addr: run.addr, len: run.len, unwritten: true, sums: None },
                    &mut Runs::new(),
                );
                at += u64::from(run.len);
            }
        }
        // pages that are dirty there need no block of their own any more
        let dirty_outside =
            f.pages.dirty_blocks().filter(|l| f.map.get(*l).is_none_or(|p| !p.unwritten)).count() as u64;
        if f.reserved > dirty_outside {
            d.space.unreserve(f.reserved - dirty_outside);
            f.reserved = dirty_outside;
        }
        d.count_index(f);
        Ok(true)
    }

    /// Unmaps whole pages of the range and zeros the parts at its ends; the caller loaded and reserved those.
    fn punch(&self, op: &Op<'_>, c: &Arc<Cell>, st: &mut State, offset: u64, end: u64) {
        let d = self.dom(c.domain);
        let size = st.size;
        let Body::File(f) = &mut st.body else { return };
        if let Some(b) = &mut f.inline {
            let (a, z) = ((offset as usize).min(b.len()), (end.min(b.len() as u64)) as usize);
            b[a..z.max(a)].fill(0);
            return;
        }
        let (first, last) = (offset.div_ceil(PAGE), end / PAGE);
        // a range that ends at or behind the end of the file takes its last page too
        let last = if end >= size { last.max(size.div_ceil(PAGE)) } else { last };
        let zero = |f: &mut crate::cell::FileBody, lblk: u64, a: usize, z: usize| {
            if a < z && f.pages.write(lblk, a, &[0u8; 4096][a..z]) == Some(true) {
                d.memory.add(0, 1);
            }
        };
        if offset / PAGE == end / PAGE && first > last {
            zero(f, offset / PAGE, (offset % PAGE) as usize, (end % PAGE) as usize);
        } else {
            if !offset.is_multiple_of(PAGE) {
                zero(f, offset / PAGE, (offset % PAGE) as usize, PAGE as usize);
            }
            if !end.is_multiple_of(PAGE) && end / PAGE >= last {
                zero(f, end / PAGE, 0, (end % PAGE) as usize);
            }
        }
        if first < last {
            self.drop_blocks(op, c, f, first..last);
            self.release_surplus(d, f);
        }
    }

    /// How far one operation may punch: so many extents at most.
    fn punch_to(&self, c: &Cell, from: u64, end: u64) -> u64 {
        let st = c.state.read();
        let max = self.dom(c.domain).pieces_max();
        let Body::File(f) = &st.body else { return end };
        if f.map.extent_count() <= max {
            return end;
        }
        let mut at = from / PAGE;
        for _ in 0..max {
            match f.map.next_from(at) {
                Some(p) if p.lblk < end / PAGE => at = p.lblk + u64::from(p.len),
                _ => return end,
            }
        }
        end.min((at * PAGE).max(from + 1).next_multiple_of(PAGE))
    }

    fn falloc_piece(
        &self,
        c: &Arc<Cell>,
        mode: FallocMode,
        (offset, end): (u64, u64),
        promised: &mut u64,
    ) -> Result<bool> {
        let d = self.dom(c.domain);
        let zeroing = !matches!(mode, FallocMode::Allocate { .. });
        let (mut blocks, mut asked) = (4, Asked::Nothing);
        let (mut op, mut st) = loop {
            // what needs new room asks for it below
            let mut op = Op::new(self);
            op.begin(&[c.domain], blocks, true)?;
            let mut st = c.state.write();
            if let Some(more) = op.lacks(c, &mut st) {
                blocks = more;
                continue;
            }
            if mode != FallocMode::PunchHole && asked != Asked::Nodes {
                let leaves = match op.leaves_for(c, &st, None) {
                    Leaves::Unknown | Leaves::Few if !zeroing && is_allocated(&st, (offset, end)) => Leaves::Enough,
                    leaves => leaves,
                };
                if leaves == Leaves::Unknown && asked.writes_out() {
                    drop((st, op));
                    self.flush_cell(c)?;
                    continue;
                }
                asked = Asked::Nodes;
                if leaves != Leaves::Enough {
                    drop((st, op));
                    self.make_nodes(d)?;
                    continue;
                }
            }
            let pieces = pieces_at_most(&st, mode, (offset, end), d.pieces_max());
            if op.enter(c.domain).expect_pieces(pieces) {
                break (op, st);
            }
            drop((st, op));
            d.make_journal_room()?;
        };
        if st.deleted {
            return Err(Error::NotFound);
        }
        if st.flags & IMMUTABLE != 0 || (st.flags & APPEND != 0 && zeroing) {
            return Err(Error::Perm);
        }
        // first: the transaction that it is written for may charge for what leaves its record
        op.write_out_older(c, &mut st)?;
        let quotas = &self.shared.quotas;
        let (mut charge, before) = (quotas.charge(c, &st), quotas.blocks_of(&st));
        let done = self.falloc_locked(&mut op, c, (&mut st, &mut charge), mode, (offset, end), promised);
        // also of what ended in the middle
        charge.settle(before, quotas.blocks_of(&st));
        done
    }

    /// Reads the pages that the ends of a range cut, which keep a part of what they hold, and reserves for those that hold
    /// something. False where room must be made first.
    fn reserve_cut_pages(
        &self,
        c: &Cell,
        st: &mut State,
        (offset, end): (u64, u64),
        charge: &mut Charge<'_>,
    ) -> Result<bool> {
        for l in [offset, end].into_iter().filter(|e| e % PAGE != 0).map(|e| e / PAGE) {
            if matches!(&st.body, Body::File(f) if f.inline.is_none()) {
                self.dom(c.domain).load_pages(c, st, l, 1)?;
                let cached = matches!(&st.body, Body::File(f) if f.pages.has(l));
                if cached && !self.reserve_pages(c, st, (l, l), charge)? {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// One attempt, with the inode locked, and nothing of it left to write for an older transaction. False where room must be made
    /// first; a part of the range may have its blocks then.
    fn falloc_locked(
        &self,
        op: &mut Op<'_>,
        c: &Arc<Cell>,
        (st, charge): (&mut State, &mut Charge<'_>),
        mode: FallocMode,
        (offset, end): (u64, u64),
        promised: &mut u64,
    ) -> Result<bool> {
        let d = self.dom(c.domain);
        let zeroing = !matches!(mode, FallocMode::Allocate { .. });
        let allocating = mode != FallocMode::PunchHole;
        if let Body::File(f) = &st.body
            && lacks_extents(f, mode, (offset, end))
        {
            return Err(Error::TooManyExtents);
        }
        if zeroing && !self.reserve_cut_pages(c, st, (offset, end), charge)? {
            return Ok(false);
        }
        if allocating {
            let Body::File(f) = &mut st.body else { return Err(Error::Invalid("not a regular file")) };
            let inline = f.inline.as_ref().is_some_and(|b| !b.is_empty());
            if inline && !self.reserve_pages(c, st, (0, 0), charge)? {
                return Ok(false);
            }
        }
        let keep = matches!(mode, FallocMode::Allocate { keep_size: true } | FallocMode::ZeroRange { keep_size: true });
        let grows = allocating && !keep && end > st.size;
        if grows && !self.load_last_page(c, st, end, charge)? {
            return Ok(false);
        }
        // the leaves of a tree in which the range ends are records of their own
        let leaves = if matches!(&st.body, Body::File(f) if f.map.extent_count() > EXTENTS_OF_RECORD) { 2 } else { 0 };
        op.credit(c.domain, leaves);
        op.touch(c, st)?;
        // also where what follows ends in the middle
        st.durability.operation_changes_data();
        if grows {
            self.dirty_last_page(d, st);
        }
        if zeroing {
            let had = self.shared.quotas.blocks_of(st);
            self.punch(op, c, st, offset, end);
            // what it allocates next is charged
            charge.gave(had.saturating_sub(self.shared.quotas.blocks_of(st)));
        }
        if allocating {
            if let Body::File(f) = &mut st.body {
                d.uninline(f);
                f.inline = None;
            }
            if !self.allocate(op, c, st, (offset / PAGE, end.div_ceil(PAGE)), promised, charge)? {
                return Ok(false);
            }
            if st.flags & NOCOW == 0 {
                st.flags |= NOCOW;
                // blocks of an ordinary file stay as they are while a crash could make it one again
                st.durability.file_becomes_in_place(op.tx(c.domain).id);
            }
            if !keep {
                st.size = st.size.max(end);
            }
        }
        let now = self.shared.now();
        st.mtime = now;
        st.ctime = now;
        Ok(true)
    }
}

impl Volume {
    /// `fallocate`. Allocation and zeroing make the file one that is overwritten in place. Collapsing and inserting a range
    /// are atomic.
    ///
    /// # Errors
    /// [`Error::NoSpace`], [`Error::TooBig`], [`Error::TooManyExtents`], [`Error::Perm`] for immutable and
    /// append-only files, [`Error::Invalid`] for an empty range or a special file. To collapse or insert a range:
    /// [`Error::Invalid`] where offset or length is no multiple of 4096, the range to collapse reaches the end of the
    /// file, or the one to insert begins at or behind it; [`Error::Unsupported`] where more extents would move than
    /// the journal takes of one operation (docs/crash-contract.md).
    pub fn fallocate(&self, file: &OpenFile, mode: FallocMode, offset: u64, len: u64) -> Result<()> {
        let c = &file.cell;
        match c.kind {
            FileKind::File => {}
            FileKind::Dir => return Err(Error::IsDir),
            _ => return Err(Error::Invalid("not a regular file")),
        }
        if len == 0 {
            return Err(Error::Invalid("an empty range"));
        }
        let end = offset.checked_add(len).filter(|e| *e <= SIZE_MAX).ok_or(Error::TooBig)?;
        let i = self.mounted();
        let _paid = i.pace(c.domain, Demand::change());
        if matches!(mode, FallocMode::CollapseRange | FallocMode::InsertRange) {
            let shifted = i.shift(c, &Shift::new(mode == FallocMode::CollapseRange, offset, end)?);
            return shifted.inspect_err(|_| i.give_back_surplus(c));
        }
        let mut promised = match mode {
            FallocMode::Allocate { .. } => i.promise(c, offset / PAGE, end.div_ceil(PAGE))?,
            FallocMode::ZeroRange { .. } => {
                // of what it has there the same is given back
                let more = c.state.read().new_blocks(offset, len);
                if more > i.room_by_relocation(i.dom(c.domain), more)? {
                    return Err(Error::NoSpace);
                }
                0
            }
            FallocMode::PunchHole | FallocMode::CollapseRange | FallocMode::InsertRange => 0,
        };
        let r = self.falloc_all(c, mode, (offset, end), &mut promised);
        i.dom(c.domain).space.unreserve(promised);
        r.inspect_err(|_| i.give_back_surplus(c))
    }

    /// The size changes with the last piece: where one does not fit it stays as it was, as a kernel has it that was told of an
    /// error.
    fn falloc_all(&self, c: &Arc<Cell>, mode: FallocMode, (offset, end): (u64, u64), promised: &mut u64) -> Result<()> {
        let i = self.mounted();
        let blocks = PIECE_BLOCKS.min(i.dom(c.domain).pieces_max() as u64 / 2).max(1);
        let mut at = offset;
        while at < end {
            // pieces end at block boundaries
            let to = if mode == FallocMode::PunchHole {
                i.punch_to(c, at, end)
            } else {
                end.min((at / PAGE + blocks) * PAGE)
            };
            let mode = if to < end { keeping_size(mode) } else { mode };
            let (mut attempt, mut written) = (0, false);
            let mut replaced = i.replaced();
            loop {
                match i.falloc_piece(c, mode, (at, to), promised) {
                    Ok(true) => break,
                    Ok(false) => i.make_room(i.dom(c.domain), &mut attempt)?,
                    // dirty pages count for more than what they are once they are written
                    Err(Error::TooManyExtents) if !written => {
                        written = true;
                        i.flush_cell(c)?;
                    }
                    Err(Error::Quota(owner)) if i.end_replaced_of(owner, &mut replaced) => {}
                    Err(Error::TooManyExtents) => return Err(i.dom(c.domain).extents_full(c.ino)),
                    Err(e) => return Err(e),
                }
            }
            at = to;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
