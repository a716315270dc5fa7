//! Overwriting blocks where they lie, by an fsync.
//!
//! Where nothing of a file changed since the last transaction that is durable but times and the content of blocks, every
//! state that a crash can bring back has the same size and the same blocks. So these blocks may be written at once, where
//! they lie, without a record that says so, and in any order with one that brings the new times. A crash may leave them in
//! part; it cannot show them as another file's, nor behind the file's end, where they hold zeros before and after.
//!
//! Files that are always overwritten in place ([`Domain::in_place`]) have that from the beginning. Of the others an fsync
//! does it for few blocks only (F2FS' in-place policy `F2FS_IPU_FSYNC`): a commit writes elsewhere, so that what nobody
//! synced still changes with its transaction, whole.

use super::Domain;
use super::out::Out;
use super::serialise::RUN_MAX;
use crate::cell::pages::Page;
use crate::cell::{Body, Cell, State};
use crate::error::Result;
use crate::planted::{Bug, planted};
use crate::store::Store;
use crate::types::*;
use braidfs_format::inode::NOCOW;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// So many fsyncs wrote elsewhere for want of a commit: one is worth it.
const MISSED_MAX: u32 = 64;

/// The dirty pages of a file, all of which are written where they lie: runs of them, with place and first logical block.
#[derive(Debug)]
pub struct InPlaceWrites(Vec<(BlockAddr, u64, Vec<Page>)>);

impl InPlaceWrites {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Whether an fsync may write in place.
#[derive(Debug)]
pub enum InPlace {
    /// These pages, perhaps none.
    Yes(InPlaceWrites),
    /// It could where the transaction that changed the file is durable.
    NotYet,
    /// No.
    No,
}

impl Domain {
    /// What an fsync of the cell may write in place; see the module. The caller holds the cell's `sync`, and nothing of the
    /// file is being written ([`Cell::inflight`]).
    pub fn in_place_writes(&self, st: &mut State) -> InPlace {
        let o = &self.shared.options;
        let nocow = st.flags & NOCOW != 0;
        let Body::File(f) = &mut st.body else { return InPlace::No };
        let few = o.overwrite == Overwrite::Auto && !self.shared.data_sums && f.pages.dirty_count() <= OVERWRITE_BLOCKS;
        if o.data == DataMode::Journal || f.inline.is_some() || !(nocow || few) {
            return InPlace::No;
        }
        let mut runs = Vec::new();
        for (first, pages) in f.pages.dirty_runs(RUN_MAX) {
            let mut rest = &pages[..];
            while !rest.is_empty() {
                let lblk = first + (pages.len() - rest.len()) as u64;
                let Some(p) = f.map.get(lblk).filter(|p| !p.unwritten && p.sum.is_none()) else { return InPlace::No };
                let (now, after) = rest.split_at(rest.len().min(p.len as usize));
                runs.push((p.addr, lblk, now.to_vec()));
                rest = after;
            }
        }
        let known = st.durability.layout_durable(self.committed_tx()) || planted(Bug::PlaceForgotten);
        match known && !self.sums_count(st) {
            true => InPlace::Yes(InPlaceWrites(runs)),
            false if runs.is_empty() => InPlace::No,
            false => InPlace::NotYet,
        }
    }

    /// Whether times that an fsync makes durable are not durable, of a file that [`Self::in_place_writes`].
    pub fn times_pending(&self, st: &State) -> bool {
        st.durability.times_pending(self.committed_tx()) && !planted(Bug::TimesForgotten)
    }

    /// Has the pages written in place: by who writes `out`, or at once where the file always is (two transactions must not
    /// race for one block).
    ///
    /// # Errors
    /// Of the device.
    pub(super) fn write_in_place(
        &self,
        cell: &Arc<Cell>,
        st: &mut State,
        all: InPlaceWrites,
        out: &mut Out,
    ) -> Result<()> {
        if st.flags & NOCOW != 0 {
            let ops: Vec<(BlockAddr, Vec<&[u8]>)> =
                all.0.iter().map(|(at, _, pages)| (*at, pages.iter().map(Page::bytes).collect())).collect();
            self.write_now(&ops, Store::write_batch_through)?;
        } else {
            for (at, lblk, pages) in all.0 {
                out.write_pages(at, lblk, pages, cell);
            }
        }
        let Body::File(f) = &mut st.body else { return Ok(()) };
        let dirty = f.pages.dirty_count();
        f.pages.mark_clean(0, u64::MAX);
        self.shared.memory.left(0, dirty);
        self.space.unreserve(std::mem::take(&mut f.reserved));
        Ok(())
    }

    /// An fsync wrote elsewhere that could have written in place after a commit. Where many do, the background commits
    /// before its time.
    pub(super) fn missed_place(&self) {
        self.missed.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether so many fsyncs since the last such answer would gain by a commit that one is due.
    pub fn commit_gains(&self) -> bool {
        self.missed.load(Ordering::Relaxed) >= MISSED_MAX && self.missed.swap(0, Ordering::Relaxed) > 0
    }
}
