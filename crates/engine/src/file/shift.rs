//! `fallocate`: collapse and insert a range, which move the blocks behind it within the file.
//!
//! One operation, so that a crash keeps all of it or nothing. Extents and pages move; no data is copied. The journal is
//! told the new place of every block that moved (`Alloc` again: the owner tables name logical blocks), so a file of very
//! many extents is refused rather than moved in pieces that other processes, or a crash, would show.

use super::{PAGE, SIZE_MAX};
use crate::cell::extents::Runs;
use crate::cell::{Body, Cell, FileBody, State};
use crate::domain::serialise::writes_in_place;
use crate::error::{Error, Result};
use crate::types::*;
use crate::volume::MountedVolume;
use crate::volume::operation::{METADATA_OF_WRITE, Op};
use braidfs_format::group::{SegmentKind, Temperature};
use braidfs_format::inode::{APPEND, Extent, IMMUTABLE, LBLK_MAX, NOCOW};
use braidfs_format::journal::Record;
use braidfs_format::node::PAYLOAD_MAX;
use std::ops::Range;
use std::sync::Arc;

/// Which way the blocks behind a range of logical blocks go.
#[derive(Debug, Clone)]
pub(super) enum Shift {
    /// The range is taken out.
    Collapse(Range<u64>),
    /// The range is made, as a hole.
    Insert(Range<u64>),
}

/// What moving blocks takes.
#[derive(Debug, Clone, Copy, Default)]
struct Cost {
    /// Extents that move or are freed.
    extents: usize,
    /// Overflow nodes that are written anew, at most.
    nodes: usize,
}

impl Shift {
    /// Checks what does not depend on the file.
    ///
    /// # Errors
    /// [`Error::Invalid`] where the range is not of whole blocks.
    pub fn new(collapse: bool, offset: u64, end: u64) -> Result<Self> {
        if !offset.is_multiple_of(PAGE) || !end.is_multiple_of(PAGE) {
            return Err(Error::Invalid("offset and length must be multiples of 4096"));
        }
        let range = offset / PAGE..end / PAGE;
        Ok(if collapse { Self::Collapse(range) } else { Self::Insert(range) })
    }

    /// The first logical block that moves.
    fn from(&self) -> u64 {
        match self {
            Self::Collapse(r) => r.end,
            Self::Insert(r) => r.start,
        }
    }

    /// Where a block that moves goes.
    fn to(&self, lblk: u64) -> u64 {
        match self {
            Self::Collapse(r) => lblk - (r.end - r.start),
            Self::Insert(r) => lblk + (r.end - r.start),
        }
    }

    /// The file's size afterwards.
    ///
    /// # Errors
    /// As ext4: [`Error::Invalid`] where a range to collapse reaches the end of the file, or one to insert begins at or
    /// behind it; [`Error::TooBig`], [`Error::TooManyExtents`].
    fn size(&self, st: &State) -> Result<u64> {
        let Body::File(f) = &st.body else { return Err(Error::Invalid("not a regular file")) };
        match self {
            Self::Collapse(r) if r.end * PAGE >= st.size => {
                Err(Error::Invalid("the range reaches the end of the file"))
            }
            Self::Collapse(r) => Ok(st.size - (r.end - r.start) * PAGE),
            Self::Insert(r) if r.start * PAGE >= st.size => Err(Error::Invalid("the range begins behind the file")),
            Self::Insert(r) => {
                let n = r.end - r.start;
                // also of what lies behind the end of the file
                if st.size + n * PAGE > SIZE_MAX || f.map.last_end() + n > LBLK_MAX + 1 {
                    return Err(Error::TooBig);
                }
                if f.lacks_extents(0, 1) {
                    return Err(Error::TooManyExtents);
                }
                Ok(st.size + n * PAGE)
            }
        }
    }

    fn cost(&self, f: &FileBody) -> Cost {
        let first = match self {
            Self::Collapse(r) | Self::Insert(r) => r.start,
        };
        let mut cost = Cost::default();
        let mut bytes = 0;
        for e in f.map.iter().filter(|e| e.end() > first) {
            cost.extents += 1;
            bytes += e.encoded_bytes();
        }
        // leaves are at least half full, but for a few; an index node names many
        cost.nodes = bytes / (PAYLOAD_MAX / 2) * 9 / 8 + 4;
        cost
    }
}

/// The part of `e` from `lblk` on.
fn rest(e: &Extent, lblk: u64) -> Extent {
    let skip = lblk.saturating_sub(e.lblk);
    Extent {
        lblk: e.lblk + skip,
        addr: BlockAddr(e.addr.0 + skip),
        len: e.len - skip as u32,
        unwritten: e.unwritten,
        sums: e.sums.as_ref().map(|s| s[skip as usize..].into()),
    }
}

impl MountedVolume {
    /// Collapses or inserts a range.
    ///
    /// # Errors
    /// See [`crate::Volume::fallocate`].
    pub(super) fn shift(&self, c: &Arc<Cell>, shift: &Shift) -> Result<()> {
        let (mut attempt, mut replaced) = (0, self.replaced());
        loop {
            match self.shift_once(c, shift) {
                Ok(true) => return Ok(()),
                Ok(false) => self.make_room(self.dom(c.domain), &mut attempt)?,
                Err(Error::Quota(owner)) if self.end_replaced_of(owner, &mut replaced) => {}
                Err(e) => return Err(e),
            }
        }
    }

    /// False where room must be made first.
    fn shift_once(&self, c: &Arc<Cell>, shift: &Shift) -> Result<bool> {
        let d = self.dom(c.domain);
        let cost = |st: &State| match &st.body {
            Body::File(f) => shift.cost(f),
            _ => Cost::default(),
        };
        let expected = cost(&c.state.read());
        // what frees blocks works on a full volume
        let essential = matches!(shift, Shift::Collapse(_)) && expected.nodes <= 8;
        let nodes = expected.nodes as u64;
        let (mut op, mut st) = Op::on_whole(self, c, (METADATA_OF_WRITE + nodes, nodes), essential)?;
        if st.deleted {
            return Err(Error::NotFound);
        }
        if st.flags & (IMMUTABLE | APPEND) != 0 {
            return Err(Error::Perm);
        }
        op.write_out_older(c, &mut st)?;
        let size = shift.size(&st)?;
        let cost = cost(&st);
        let quotas = &self.shared.quotas;
        let (mut charge, before) = (quotas.charge(c, &st), quotas.blocks_of(&st));
        if cost.extents + 3 * cost.nodes > d.pieces_max() || (cost.nodes > 64 && cost.nodes as u64 > d.nodes.free()) {
            return Err(Error::Unsupported("the file has too many extents to move them in one operation"));
        }
        if !op.enter(c.domain).expect_pieces(cost.extents + 3 * cost.nodes) {
            drop((charge, st, op));
            d.make_journal_room()?;
            return self.shift_once(c, shift);
        }
        // it grew meanwhile, or has pages that will have to go elsewhere
        if cost.nodes > expected.nodes || !self.reserve_moved(c, &mut st) {
            return Ok(false);
        }
        // content that leaves the record needs a page
        let inline = matches!(&st.body, Body::File(f) if f.inline.is_some());
        if inline && !self.reserve_pages(c, &mut st, (0, 0), &mut charge)? {
            return Ok(false);
        }
        op.touch(c, &mut st)?;
        op.credit(c.domain, cost.nodes as u64);
        let tx = op.tx(c.domain);
        // a record of each node, of the block that it lies in, and of the block where it lay
        tx.expect_pages(3 * cost.nodes);
        let id = tx.id;
        let Body::File(f) = &mut st.body else { return Err(Error::Invalid("not a regular file")) };
        d.uninline(f);
        f.inline = None;
        if let Shift::Collapse(range) = shift {
            self.drop_blocks(&op, c, f, range.clone());
            self.release_surplus(d, f);
        }
        let from = shift.from();
        f.pages.shift(from, shift.to(from));
        self.move_extents(&op, c, f, shift);
        charge.settle(before, quotas.blocks_of(&st));
        st.size = size;
        st.durability.operation_moves_blocks(id);
        let now = self.shared.now();
        st.mtime = now;
        st.ctime = now;
        st.durability.operation_changes_data();
        Ok(true)
    }

    /// Reserves blocks for dirty pages of a file that is overwritten in place, since they will be written elsewhere until
    /// the operation is durable. False where the domain has too little right now.
    fn reserve_moved(&self, c: &Cell, st: &mut State) -> bool {
        let d = self.dom(c.domain);
        if st.flags & NOCOW == 0 || !d.in_place(st) {
            return true;
        }
        let Body::File(f) = &mut st.body else { return true };
        let in_place =
            |l: &u64| f.map.get(*l).is_some_and(|p| writes_in_place(&p, true) && !writes_in_place(&p, false));
        let n = f.pages.dirty_blocks().filter(in_place).count() as u64;
        if n > 0 && d.space.reserve_again(n).is_err() {
            return false;
        }
        f.reserved += n;
        true
    }

    /// Moves the extents, and notes whose block is what from now on.
    fn move_extents(&self, op: &Op<'_>, c: &Cell, f: &mut FileBody, shift: &Shift) {
        let from = shift.from();
        let moved: Vec<Extent> = f.map.iter().filter(|e| e.end() > from).map(|e| rest(e, from)).collect();
        // they only change their places: nothing is freed
        let mut same = Runs::new();
        f.map.remove(from, LBLK_MAX + 1, &mut same);
        op.tx(c.domain).record_again(moved.iter().map(|e| Record::Alloc {
            addr: e.addr,
            len: e.len,
            kind: SegmentKind::Data,
            temperature: Temperature::Warm,
            owner: c.ino,
            lblk: shift.to(e.lblk),
        }));
        for e in moved {
            let lblk = shift.to(e.lblk);
            f.map.insert(Extent { lblk, ..e }, &mut same);
        }
    }
}
