//! Blocks reserved for pages that will be written: here it is that ENOSPC is told.

use super::PAGE;
use crate::cell::{Body, Cell, Dirty, FileBody, State};
use crate::domain::Domain;
use crate::domain::serialise::writes_in_place;
use crate::error::Result;
use crate::quota::Charge;
use crate::space::Space;
use crate::volume::MountedVolume;
use braidfs_format::inode::NOCOW;

/// How blocks are reserved that nothing is freed for. Says how many of them come out of what was promised before a limit went
/// down.
pub(super) type Reserve = fn(&Space, u64) -> Result<u64>;

/// Whether a dirty page at `lblk` will need a new block.
fn needs_block(f: &FileBody, lblk: u64, in_place: bool) -> bool {
    match f.map.get(lblk) {
        Some(p) => !writes_in_place(&p, in_place),
        None => true,
    }
}

/// The logical block that the end of a file lies in the middle of, where the device has it.
fn written_tail(st: &State) -> Option<u64> {
    let lblk = st.size / PAGE;
    let Body::File(f) = &st.body else { return None };
    (!st.size.is_multiple_of(PAGE) && f.map.get(lblk).is_some_and(|p| !p.unwritten)).then_some(lblk)
}

impl MountedVolume {
    /// Blocks that the pages of a range may need when they are written, now or once what is dirty of them is on the device.
    pub(crate) fn blocks_to_reserve(&self, c: &Cell, st: &State, (offset, len): (u64, u64)) -> u64 {
        let d = self.dom(c.domain);
        let in_place = d.in_place(st) && !d.reserves_all();
        let Body::File(f) = &st.body else { return 0 };
        let (first, end) = (offset / PAGE, offset.saturating_add(len).div_ceil(PAGE));
        let (mut at, mut there) = (first, 0);
        while let Some(p) = f.map.next_from(at).filter(|p| p.lblk < end) {
            let (from, to) = (p.lblk.max(at), (p.lblk + u64::from(p.len)).min(end));
            if in_place && p.sum.is_none() {
                there += to - from;
            } else if writes_in_place(&p, in_place) {
                // allocated and never written: its first write goes there, and none after it
                there += to - from - f.pages.dirty_in(from, to).count() as u64;
            }
            at = to;
        }
        (end - first).saturating_sub(there)
    }

    /// Before a file that is overwritten in place grows to `end`: its last page is brought into memory, with zeros behind
    /// the end of the file, to be written again ([`Self::dirty_last_page`]). On the device there may be bytes of a write
    /// that a crash undid. False where room must be made first.
    pub(crate) fn load_last_page(&self, c: &Cell, st: &mut State, end: u64, charge: &mut Charge<'_>) -> Result<bool> {
        if st.flags & NOCOW == 0 || end <= st.size { Ok(true) } else { self.load_tail(c, st, charge) }
    }

    fn load_tail(&self, c: &Cell, st: &mut State, charge: &mut Charge<'_>) -> Result<bool> {
        let Some(lblk) = written_tail(st) else { return Ok(true) };
        self.dom(c.domain).load_pages(c, st, lblk, 1)?;
        self.reserve_pages(c, st, (lblk, lblk), charge)
    }

    /// [`Self::load_last_page`] before a file is no longer overwritten in place: afterwards nobody looks for such bytes. The
    /// page is then written elsewhere, and has a block reserved for that.
    pub(crate) fn load_page_to_move(&self, c: &Cell, st: &mut State, charge: &mut Charge<'_>) -> Result<bool> {
        st.flags &= !NOCOW;
        let loaded = self.load_tail(c, st, charge);
        st.flags |= NOCOW;
        loaded
    }

    /// Marks the page that [`Self::load_last_page`] brought dirty: before the file grows.
    pub(crate) fn dirty_last_page(&self, d: &Domain, st: &mut State) {
        let Some(lblk) = written_tail(st).filter(|_| st.flags & NOCOW != 0) else { return };
        let Body::File(f) = &mut st.body else { return };
        if !f.pages.is_dirty(lblk) && f.pages.dirty(lblk) {
            d.memory.add(0, 1);
        }
        // also where it was dirty: a commit that leaves it alone makes the new size durable without the zeros
        if d.lazy_data() && f.dirty != Dirty::WasInline {
            f.dirty = Dirty::Cut;
        }
    }

    /// Reserves blocks for the pages from the first to the last one that are not dirty yet, in the file's account. False where the
    /// domain has too little right now. The caller has called
    /// [`Op::write_out_older`](crate::volume::operation::Op::write_out_older).
    ///
    /// # Errors
    /// [`Error::Quota`](crate::Error::Quota): nothing was reserved then.
    pub(crate) fn reserve_pages(
        &self,
        c: &Cell,
        st: &mut State,
        pages: (u64, u64),
        charge: &mut Charge<'_>,
    ) -> Result<bool> {
        self.reserve_pages_as(c, st, pages, Space::reserve_ordinary, charge)
    }

    /// [`Self::reserve_pages`], new ones by this function.
    pub(super) fn reserve_pages_as(
        &self,
        c: &Cell,
        st: &mut State,
        (first, last): (u64, u64),
        reserve: Reserve,
        charge: &mut Charge<'_>,
    ) -> Result<bool> {
        let d = self.dom(c.domain);
        let in_place = d.in_place(st) && !d.reserves_all();
        let Body::File(f) = &mut st.body else { return Ok(true) };
        let (mut new, mut again) = (0, 0);
        for l in (first..=last).filter(|&l| !f.pages.is_dirty(l) && needs_block(f, l, in_place)) {
            // one that is written anew gives its old block back
            if f.map.get(l).is_some() { again += 1 } else { new += 1 }
        }
        let promised = match reserve(&d.space, new) {
            Ok(n) => n,
            Err(_) => return Ok(false),
        };
        if again > 0 && d.space.reserve_again(again).is_err() {
            d.space.unreserve_accepted(new, promised);
            return Ok(false);
        }
        if let Err(e) = charge.blocks(new) {
            d.space.unreserve_accepted(new, promised);
            d.space.unreserve(again);
            return Err(e);
        }
        f.reserved += new + again;
        Ok(true)
    }
}
