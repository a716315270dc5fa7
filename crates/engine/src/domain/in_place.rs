//! Where an overwrite goes: where its blocks lie, or elsewhere.
//!
//! Where nothing of a file changed since the last transaction that is durable but times and the content of blocks, every
//! state that a crash can bring back has the same size and the same blocks. So these blocks may be written at once, where
//! they lie, without a record that says so, and in any order with one that brings the new times. A crash may leave them in
//! part; it cannot show them as another file's, nor behind the file's end, where they hold zeros before and after.
//!
//! Files that are always overwritten in place ([`Domain::in_place`]) have that from the beginning. Of the others an fsync
//! does it where that costs less ([`Domain::overwriting_costs_less`]; F2FS' in-place policies `F2FS_IPU_FSYNC` and
//! `F2FS_IPU_UTIL`), and from then on a commit, too, as long as fsyncs do. Before the first such fsync a commit writes
//! elsewhere: the overwrites of a file that nobody syncs change with their transaction, whole.

use super::Domain;
use super::out::Out;
use super::serialise::RUN_MAX;
use crate::cell::pages::Page;
use crate::cell::{Body, Cell, Dirty, FileBody, State};
use crate::error::Result;
use crate::planted::{Bug, planted};
use crate::store::Store;
use crate::types::*;
use braidfs_format::inode::NOCOW;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// So many fsyncs wrote elsewhere for want of a commit: one is worth it.
const MISSED_MAX: u32 = 64;
/// With fewer dirty blocks, on average, to a run, what lies elsewhere afterwards leaves holes that the cleaner must fill.
const LONG_RUN: u64 = 64;
/// With so many percent in use of what a domain has or could take room is scarce (F2FS' `min_ipu_util`).
const FULL_PERCENT: u64 = 70;

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
    /// They cannot be written in place.
    No,
}

impl Domain {
    /// Whether ordinary files are overwritten at all on this volume.
    fn overwrites(&self) -> bool {
        let o = &self.shared.options;
        o.overwrite == Overwrite::Auto && self.data_mode() != DataMode::Journal && !self.shared.data_sums
    }

    /// Whether size and blocks of the file are durable as they are, and no record holds checksums of these blocks.
    fn place_durable(&self, st: &State) -> bool {
        let known = st.durability.layout_durable(self.committed_tx()) || planted(Bug::PlaceForgotten);
        known && !self.sums_count(st)
    }

    /// Whether a commit, or who writes before it, overwrites the file's dirty blocks that have a place: as its last fsync
    /// did.
    pub(super) fn commit_overwrites(&self, st: &State) -> bool {
        let Body::File(f) = &st.body else { return false };
        // what the cleaner moves goes elsewhere
        f.dirty == Dirty::Overwritten
            && !f.cold
            && self.overwrites()
            && self.place_durable(st)
            && self.overwriting_costs_less(f)
    }

    /// Whether to write the dirty blocks where they lie costs less than to write them elsewhere: they are few, in short runs,
    /// or parts of extents, which would be cut to pieces; or room is scarce, and the cleaner would have to make it. Else whole
    /// extents are replaced, which leaves whole runs free and the file in no more pieces.
    ///
    /// A domain takes groups as it needs them, so what nobody owns yet counts as its room.
    fn overwriting_costs_less(&self, f: &FileBody) -> bool {
        let dirty = f.pages.dirty_count();
        if dirty <= OVERWRITE_BLOCKS {
            return true;
        }
        let (runs, added) = added_extents(f);
        if added > 0 || (dirty as u64) < runs * LONG_RUN {
            return true;
        }
        let blocks = self.space.blocks_in_all();
        let room = blocks + self.shared.unclaimed_on(self.devices());
        blocks.saturating_sub(self.space.unused()) * 100 >= room * FULL_PERCENT
    }

    /// What an fsync of the cell may write in place; see the module. The caller holds the cell's `sync`, and nothing of the
    /// file is being written ([`Cell::inflight`]).
    pub fn in_place_writes(&self, st: &mut State) -> InPlace {
        let nocow = st.flags & NOCOW != 0;
        let place_durable = self.place_durable(st);
        let Body::File(f) = &mut st.body else { return InPlace::No };
        let may = if nocow { self.data_mode() != DataMode::Journal } else { self.overwrites() };
        if f.inline.is_some() || !may {
            return InPlace::No;
        }
        let dirty = f.pages.dirty_count() > 0;
        // what the cleaner moves goes elsewhere
        let moved = f.cold && !planted(Bug::MoveForgotten);
        if !have_places(f) || !nocow && (moved || !self.overwriting_costs_less(f)) {
            if f.dirty == Dirty::Overwritten && !planted(Bug::LivesOn) {
                f.dirty = Dirty::Ordinary;
            }
            return InPlace::No;
        }
        match place_durable {
            true => match placed_runs(f) {
                Some(runs) => {
                    if dirty {
                        f.dirty = Dirty::Overwritten;
                    }
                    InPlace::Yes(InPlaceWrites(runs))
                }
                None => InPlace::No,
            },
            false if dirty => InPlace::NotYet,
            false => InPlace::No,
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
            all.0.iter().for_each(|(_, _, pages)| self.charge_pages(pages.len()));
            self.write_now(&ops, Store::write_batch_through)?;
        } else {
            for (at, lblk, pages) in all.0 {
                out.write_pages(at, lblk, pages, cell);
            }
        }
        let Body::File(f) = &mut st.body else { return Ok(()) };
        let dirty = f.pages.dirty_count();
        f.pages.mark_clean(0, u64::MAX);
        f.cold = false;
        self.memory.remove(0, dirty);
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

/// Whether all dirty pages of a file have places, and may be overwritten there.
fn have_places(f: &FileBody) -> bool {
    // as far as one extent reaches
    let mut end = 0;
    f.pages.dirty_blocks().all(|lblk| {
        lblk < end
            || f.map.get(lblk).filter(|p| !p.unwritten && p.sum.is_none()).is_some_and(|p| {
                end = lblk + u64::from(p.len);
                true
            })
    })
}

/// All dirty pages of a file with their places; `None` where one has none.
fn placed_runs(f: &mut FileBody) -> Option<Vec<(BlockAddr, u64, Vec<Page>)>> {
    let mut runs = Vec::new();
    for (first, pages) in f.pages.dirty_runs(RUN_MAX) {
        let mut rest = &pages[..];
        while !rest.is_empty() {
            let lblk = first + (pages.len() - rest.len()) as u64;
            let p = f.map.get(lblk)?;
            let (now, after) = rest.split_at(rest.len().min(p.len as usize));
            runs.push((p.addr, lblk, now.to_vec()));
            rest = after;
        }
    }
    Some(runs)
}

/// Runs of dirty blocks, and how many extents more the file has once each of them lies elsewhere in one piece: every run
/// adds one, and what is left of an extent in front of it or behind it; the extents that it meets are gone.
fn added_extents(f: &FileBody) -> (u64, i64) {
    let (mut runs, mut added) = (0, 0);
    // one past the last dirty block, and one past the end of the extent that it lies in
    let (mut next, mut end) = (None, 0);
    for lblk in f.pages.dirty_blocks() {
        let begins = next != Some(lblk);
        if begins {
            runs += 1;
            added += 1 + i64::from(next.is_some_and(|next| end > next));
        }
        if begins || lblk == end {
            let here = f.map.get(lblk);
            let before = lblk.checked_sub(1).filter(|_| begins).and_then(|b| f.map.get(b));
            added += i64::from(matches!((&before, &here), (Some(b), Some(h)) if b.addr.0 + 1 == h.addr.0));
            added -= i64::from(here.is_some());
            end = lblk + here.map_or(1, |p| u64::from(p.len));
        }
        next = Some(lblk + 1);
    }
    (runs, added + i64::from(next.is_some_and(|next| end > next)))
}
