//! How an open file keeps its cell.
//!
//! This is a low-level module with unsafe code. A handle counts in the cell, twice: as open, and as a reference, as long as
//! all threads open files of their own. From then on one that is opened by its name or number is a pin in its thread's
//! table (`braidfs_sync::pins`), and writes nothing to the cell: it stands for both counts. The table of cells keeps a cell
//! that is pinned.
//!
//! Exact where the last name goes: who takes it sets [`Cell::nameless`], then marks the pins and looks at the count
//! ([`Cell::ask_to_tell`]); who opens counts first, then looks at `nameless`. An inode that has been nameless once is
//! counted in the cell from then on, so that a marked pin that goes is not made again.

use super::Cell;
use super::cache::HazardRef;
use braidfs_sync::pins::{self, Pin};
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

/// A cell that is open: it is counted, and stays in memory, until [`OpenCell::close`].
#[derive(Debug)]
pub struct OpenCell {
    /// Not a reference of its own where there is a pin. `None` when it is closed.
    cell: Option<ManuallyDrop<Arc<Cell>>>,
    pin: Option<Pin>,
}

impl OpenCell {
    /// Counts in the cell.
    pub fn counted(cell: Arc<Cell>) -> Self {
        let me = pins::thread();
        let strange = cell.opener.load(Relaxed) != me;
        if strange {
            cell.opener.store(me, Relaxed);
        }
        cell.opens.fetch_add(1, SeqCst);
        pins::note_use(strange);
        Self { cell: Some(ManuallyDrop::new(cell)), pin: None }
    }

    /// Counts where this thread counts.
    pub fn of_ref(cell: &HazardRef<'_>) -> Self {
        let Some(pin) = pins::pin(cell.address()) else { return Self::counted(cell.arc()) };
        if cell.nameless.load(SeqCst) {
            let counted = Self::counted(cell.arc());
            // whoever has marked it meanwhile is told by the other count
            if !pin.leave() {
                pin.leave_marked();
            }
            return counted;
        }
        // SAFETY: the pointer is that of an `Arc` (`HazardRef::as_ptr`), whose reference the table of cells keeps while the cell
        // is pinned. It is not counted here, and not given back in `close`.
        let cell = ManuallyDrop::new(unsafe { Arc::from_raw(cell.as_ptr()) });
        Self { cell: Some(cell), pin: Some(pin) }
    }

    /// Ends it. The cell, where its last name has gone or may have: the caller looks whether that was the last handle.
    pub fn close(&mut self) -> Option<Arc<Cell>> {
        let mut cell = self.cell.take()?;
        let Some(pin) = &self.pin else {
            // SAFETY: a reference of its own, and nobody uses this one again.
            let cell = unsafe { ManuallyDrop::take(&mut cell) };
            // in this order: whoever takes the last name says so, then looks at the count
            let last = cell.opens.fetch_sub(1, SeqCst) == 1;
            return (last && cell.nameless.load(SeqCst)).then_some(cell);
        };
        if pin.leave() {
            // the cell may be gone now
            return None;
        }
        let cell = Arc::clone(&cell);
        pin.leave_marked();
        Some(cell)
    }
}

impl Deref for OpenCell {
    type Target = Arc<Cell>;
    #[inline(always)]
    fn deref(&self) -> &Arc<Cell> {
        match &self.cell {
            Some(cell) => cell,
            None => unreachable!("a file is used after its end"),
        }
    }
}

impl Cell {
    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }
    /// Whether somebody has it open.
    pub fn is_open(&self) -> bool {
        // a pin may become a count, a count no pin
        pins::is_pinned(self.address()) || self.opens.load(SeqCst) > 0
    }
    /// [`Self::is_open`], and whoever has tells when it is closed. The caller has set [`Self::nameless`].
    pub fn ask_to_tell(&self) -> bool {
        pins::mark(self.address()) || self.opens.load(SeqCst) > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cell::State;
    use crate::cell::cache::{CellCache, Memory};
    use crate::types::*;
    use braidfs_sync::ablation::{self, Switch};

    fn table() -> (CellCache, InodeNo) {
        let cache = CellCache::default();
        let ino = InodeNo(77);
        let now = Timestamp::default();
        let mut st = State::fresh(FileKind::File, 0o644, 0, 0, now);
        st.nlink = 1;
        let inode = InodeRef { ino, generation: 1 };
        cache.insert_new(Arc::new(Cell::new(inode, DomainId(0), FileKind::File, st)));
        (cache, ino)
    }

    /// A switch for experiments turns off what is tested here.
    fn nobody_looks() -> bool {
        ablation::is_on(Switch::Arcs)
    }

    /// Cells that go at the second round.
    fn evicted(cache: &CellCache) -> usize {
        (0..3).map(|_| cache.evict(Memory { cells: 10, ..Memory::default() }, &|_, _| false, &|_| ()).cells).sum()
    }

    #[test]
    fn a_pinned_cell_stays_and_has_no_count() {
        if nobody_looks() {
            return;
        }
        std::thread::scope(|s| {
            s.spawn(|| {
                pins::pin_from_now();
                let (cache, ino) = table();
                let mut open = OpenCell::of_ref(&cache.look(ino).unwrap());
                assert!(open.pin.is_some() && open.is_open());
                assert_eq!((open.opens.load(SeqCst), Arc::strong_count(&open)), (0, 1));
                assert_eq!(evicted(&cache), 0);
                assert!(open.close().is_none());
                assert_eq!(evicted(&cache), 1);
                assert!(cache.look(ino).is_none() && cache.is_empty());
            });
        });
    }

    #[test]
    fn a_cell_that_somebody_looks_at_stays() {
        if nobody_looks() {
            return;
        }
        let (cache, ino) = table();
        let looked = cache.look(ino).unwrap();
        assert_eq!(evicted(&cache), 0);
        // forgotten, not freed
        cache.remove(&cache.get(ino).unwrap());
        assert!(cache.get(ino).is_none());
        assert_eq!((looked.ino, Arc::strong_count(&looked.arc())), (ino, 2));
        drop(looked);
        let (other, _) = table();
        drop(other);
    }

    #[test]
    fn the_last_pin_tells_who_took_the_name() {
        if nobody_looks() {
            return;
        }
        std::thread::scope(|s| {
            s.spawn(|| {
                pins::pin_from_now();
                let (cache, ino) = table();
                let open = || OpenCell::of_ref(&cache.look(ino).unwrap());
                let (mut a, mut b) = (open(), open());
                assert!(a.close().is_none());
                let cell = cache.get(ino).unwrap();
                cell.nameless.store(true, SeqCst);
                assert!(cell.ask_to_tell());
                // counted from now on
                let mut c = open();
                assert!(c.pin.is_none() && cell.is_open());
                assert!(b.close().is_some_and(|c| c.is_open()));
                assert!(c.close().is_some_and(|c| !c.is_open()));
                assert!(!cell.is_open());
            });
        });
    }
}
