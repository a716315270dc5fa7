//! Truncating, extending, and what both share with punching: pages and blocks of a range go.

use super::{PAGE, SIZE_MAX};
use crate::cell::extents::Runs;
use crate::cell::{Body, Cell, Dirty, FileBody, State};
use crate::error::{Error, Result};
use crate::quota::Charge;
use crate::space::Space;
use crate::volume::MountedVolume;
use crate::volume::operation::Op;
use braidfs_format::inode::LBLK_MAX;
use std::ops::Range;
use std::sync::Arc;

/// Whether a file whose size becomes `size` loses blocks, or may: also those that were allocated behind an end that stays.
pub(crate) fn cuts(st: &State, size: u64) -> bool {
    let behind = || matches!(&st.body, Body::File(f) if f.map.next_from(size.div_ceil(PAGE)).is_some());
    size < st.size || size == st.size && behind()
}

impl MountedVolume {
    /// Loads and reserves what [`Self::truncate`] to `size` will change; false where room must be made first.
    pub(crate) fn prepare_truncate(
        &self,
        op: &mut Op<'_>,
        c: &Arc<Cell>,
        st: &mut State,
        size: u64,
        charge: &mut Charge<'_>,
    ) -> Result<bool> {
        let inline = match &st.body {
            Body::File(f) => f.inline.as_ref().map(|b| !b.is_empty()),
            _ => return Err(Error::Invalid("not a regular file")),
        };
        if size > SIZE_MAX {
            return Err(Error::TooBig);
        }
        if let Some(some) = inline {
            return if size <= self.shared.inline_max as u64 {
                Ok(self.reserve_inline(op, c, st, size, Space::reserve_ordinary))
            } else if some {
                // content that leaves the record needs a page
                self.reserve_pages(c, st, (0, 0), charge)
            } else {
                Ok(true)
            };
        }
        if !self.load_last_page(c, st, size, charge)? {
            return Ok(false);
        }
        if size < st.size && !size.is_multiple_of(PAGE) {
            let lblk = size / PAGE;
            self.dom(c.domain).load_pages(c, st, lblk, 1)?;
            let cached = matches!(&st.body, Body::File(f) if f.pages.has(lblk));
            return if cached { self.reserve_pages(c, st, (lblk, lblk), charge) } else { Ok(true) };
        }
        Ok(true)
    }

    /// Truncates or extends. The caller has touched the cell and holds its lock; `op` has the domain. A page cut in the
    /// middle was loaded and its block reserved by [`Self::prepare_truncate`].
    pub(crate) fn truncate(&self, op: &Op<'_>, c: &Arc<Cell>, st: &mut State, size: u64) {
        let d = self.dom(c.domain);
        let old = st.size;
        if size > old {
            self.dirty_last_page(d, st);
        }
        st.size = size;
        let Body::File(f) = &mut st.body else { return };
        if let Some(b) = &mut f.inline {
            if size <= self.shared.inline_max as u64 {
                b.resize(size as usize, 0);
                return;
            }
            d.uninline(f);
        }
        if size > old {
            return;
        }
        // also where the size stays: what was allocated behind it goes
        self.drop_blocks(op, c, f, size.div_ceil(PAGE)..LBLK_MAX + 1);
        // behind an end that stays there are zeros already, and nothing was reserved to write them
        let cut = size < old && !size.is_multiple_of(PAGE);
        if cut && let Some(was_clean) = f.pages.zero_tail(size / PAGE, (size % PAGE) as usize) {
            d.memory.add(0, usize::from(was_clean));
            if d.lazy_data() && f.dirty != Dirty::WasInline {
                f.dirty = Dirty::Cut;
            }
        }
        if size == 0 && f.pages.is_empty() && f.map.extent_count() == 0 {
            f.inline = Some(Vec::new());
        }
        self.release_surplus(d, f);
    }

    /// Before a file is truncated to `size`, or deleted: where it has more extents behind than one operation may free, the
    /// last ones go; whether there were some. The caller has called [`Op::write_out_older`], and calls again in another
    /// operation.
    pub(crate) fn truncate_piece(&self, op: &mut Op<'_>, c: &Arc<Cell>, st: &mut State, size: u64) -> Result<bool> {
        let Body::File(f) = &st.body else { return Ok(false) };
        let Some(tail) = f.map.tail(self.dom(c.domain).pieces_max()).filter(|t| *t >= size.div_ceil(PAGE)) else {
            return Ok(false);
        };
        op.touch(c, st)?;
        let charge = self.shared.quotas.charge(c, st);
        let before = self.shared.quotas.blocks_of(st);
        st.size = st.size.min(tail * PAGE);
        st.durability.operation_changes_data();
        let Body::File(f) = &mut st.body else { return Ok(false) };
        self.drop_blocks(op, c, f, tail..LBLK_MAX + 1);
        self.release_surplus(self.dom(c.domain), f);
        charge.settle(before, self.shared.quotas.blocks_of(st));
        Ok(true)
    }

    /// Takes away the pages and blocks of a range of logical blocks; the size stays.
    pub(crate) fn drop_blocks(&self, op: &Op<'_>, c: &Arc<Cell>, f: &mut FileBody, blocks: Range<u64>) {
        let before = f.pages.len();
        let dirty = f.pages.remove_range(blocks.start, blocks.end);
        self.dom(c.domain).memory.remove(before - f.pages.len(), dirty);
        let mut freed = Runs::new();
        if let Some(map) = f.map.there() {
            map.remove(blocks.start, blocks.end, &mut freed);
        }
        self.dom(c.domain).free_runs(op.tx(c.domain), &mut freed);
    }

    /// Gives back what an operation had reserved that did not come to use it.
    pub(crate) fn give_back_surplus(&self, c: &Cell) {
        if let Body::File(f) = &mut c.state.write().body {
            self.release_surplus(self.dom(c.domain), f);
        }
    }

    /// Gives back reservations of dirty pages that are gone.
    pub(crate) fn release_surplus(&self, d: &crate::domain::Domain, f: &mut FileBody) {
        let dirty = f.pages.dirty_count() as u64;
        if f.reserved > dirty {
            d.space.unreserve(f.reserved - dirty);
            f.reserved = dirty;
        }
    }
}
