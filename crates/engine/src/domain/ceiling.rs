//! A domain that holds more of the cache than its ceiling gives back.

use super::Domain;
use super::memory::pinned_max;
use crate::cell::cache::{CELL_BYTES, Memory};
use crate::cell::{Body, Cell};
use std::sync::atomic::Ordering::Relaxed;

/// Rounds in which a domain that is over its ceiling gives back: what was used lately stays in the first one.
const ROUNDS: u32 = 3;
/// And so many more, in which others may go on with the files that they have locked, where the caller waits.
const MORE_ROUNDS: u32 = 16;
/// Who finds another thread at it goes on where less than this part of the ceiling is beyond it.
const PATIENCE_PART: u64 = 8;
/// A domain gives this part of its ceiling back beyond what is too much, so that it is not at it again with the next page.
const SLACK_PART: u64 = 32;

/// What a domain holds of the cache.
pub(crate) struct Taken {
    pub pages: u64,
    cells: u64,
    /// Of the cells and of what hangs on them.
    pub cell_bytes: u64,
    pub index_bytes: u64,
    /// Pages that readers have pinned: beside `pages`, and nothing that can be given back.
    pub pinned: u64,
}

impl Taken {
    /// As of now.
    pub fn of(d: &Domain) -> Self {
        let (pages, pinned) = (d.memory.pages(), d.memory.pinned());
        let cells = d.cells.len() as u64;
        Self { pages, cells, cell_bytes: d.cell_bytes(), index_bytes: d.memory.index_bytes(), pinned }
    }
    /// All of it, in bytes.
    pub fn bytes(&self) -> u64 {
        (self.pages + self.pinned) * 4096 + self.cell_bytes + self.index_bytes
    }
    /// What is to go so that about `bytes` less are taken; of cells only where there are `many_cells`.
    pub fn part(&self, bytes: u64, many_cells: bool) -> Memory {
        let cell = self.cell_bytes.checked_div(self.cells).unwrap_or(CELL_BYTES).max(CELL_BYTES);
        Memory {
            pages: (bytes / 4096).min(self.pages) as usize + 1,
            cells: if many_cells { (bytes / cell) as usize + 1 } else { 0 },
            index_bytes: bytes.min(self.index_bytes) as usize,
            attached: 0,
        }
    }
}

/// Dirty pages of a file that nobody has locked.
pub(crate) fn dirty_pages_of(c: &Cell) -> Option<usize> {
    match &c.state.try_read()?.body {
        Body::File(f) => Some(f.pages.dirty_count()),
        _ => None,
    }
}

impl Domain {
    /// Others leave the domain `floor` bytes of the cache; it takes no more than `ceiling`, but for what its running
    /// transactions hold.
    pub(crate) fn set_memory(&self, floor: u64, ceiling: Option<u64>) {
        self.pinned_max.store(pinned_max(self.shared.options.cache_bytes, ceiling), Relaxed);
        self.memory.set_limits(floor, ceiling);
    }

    /// Bytes of its cells and of what hangs on them.
    pub(crate) fn cell_bytes(&self) -> u64 {
        self.cells.len() as u64 * CELL_BYTES + self.memory.attached()
    }

    /// Bytes that its pages, cells and names take of the cache.
    pub(crate) fn cached_bytes(&self) -> u64 {
        Taken::of(self).bytes()
    }

    /// Has the domain give back what it holds beyond its ceiling, after another thread that does so already where the caller
    /// `waits`, and much is beyond: a thread that waits serves nobody else meanwhile. The caller has no lock of the domain then.
    pub(crate) fn keep_to_ceiling(&self, waits: bool) {
        let Some(ceiling) = self.memory.ceiling() else { return };
        let mut before = self.cached_bytes();
        if before <= ceiling {
            return;
        }
        let waits = waits && before > ceiling + ceiling / PATIENCE_PART;
        let Some(_one) = self.memory.begin_to_give_back(waits) else { return };
        for round in 0..if waits { ROUNDS + MORE_ROUNDS } else { ROUNDS } {
            let taken = Taken::of(self);
            if taken.bytes() <= ceiling || round > ROUNDS && taken.bytes() >= before {
                break;
            }
            if round >= ROUNDS {
                std::thread::yield_now();
            }
            before = taken.bytes();
            if self.memory.dirty() * 4096 > ceiling / 2 {
                self.write_dirty();
            }
            self.drop_beyond(&taken, ceiling);
        }
    }

    /// [`Self::keep_to_ceiling`] by what needs not be written first, and beside others that do it.
    pub(crate) fn drop_beyond_ceiling(&self) {
        let Some(ceiling) = self.memory.ceiling() else { return };
        let taken = Taken::of(self);
        if taken.bytes() > ceiling {
            self.drop_beyond(&taken, ceiling);
        }
    }

    fn drop_beyond(&self, taken: &Taken, ceiling: u64) {
        let over = taken.bytes() - (ceiling - ceiling / SLACK_PART);
        self.evict(taken.part(over, taken.cell_bytes > ceiling / 2));
    }

    /// Writes the dirty pages of the domain's files, until one cannot be written: it fails then, or its commit tells, or it is full.
    pub(crate) fn write_dirty(&self) {
        for c in self.cells.all() {
            if dirty_pages_of(&c).is_some_and(|n| n > 0) && self.flush_cell(&c).is_err() {
                break;
            }
        }
    }
}
