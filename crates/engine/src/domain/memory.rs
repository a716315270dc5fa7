//! Memory that the caches of all domains take, counted so that threads share no line.

use braidfs_sync::slots::{Line, PerSlot};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};

/// Pages that a thread adds, where there is memory enough, until it looks at the sum.
const LOOK_PAGES: i64 = 256;
/// All threads together go over the budget by this part of it at most before one of them looks.
const LOOK_PART: i64 = 32;

/// What the threads of one slot have added and taken away.
#[derive(Debug, Default)]
struct Part {
    pages: AtomicI64,
    dirty: AtomicI64,
    index_bytes: AtomicI64,
    /// Pages added since a thread of the slot looked at the sums.
    since: AtomicI64,
    /// Reads that memory answered alone, and those that waited for the device.
    hits: AtomicU64,
    misses: AtomicU64,
}

/// Pages, names of directories, and indexes of extents and pages in memory. Sums are exact while nobody adds.
#[derive(Debug)]
pub struct MemoryUse {
    parts: PerSlot<Part>,
    /// Dirty pages, as somebody saw them lately.
    lately: Line<AtomicI64>,
    /// Pages that the threads of a slot add until one of them looks.
    look: i64,
}

impl MemoryUse {
    /// Of a cache of `budget` bytes.
    pub fn new(budget: u64) -> Self {
        let parts = PerSlot::<Part>::default();
        let part = (budget / 4096).min(1 << 40) as i64 / LOOK_PART / parts.parts() as i64;
        Self { parts, lately: Line::default(), look: part.clamp(1, LOOK_PAGES) }
    }
    /// So many pages came into memory, of which so many dirty ones; pages that were there became dirty.
    pub fn add(&self, pages: usize, dirty: usize) {
        let part = self.parts.mine();
        if pages > 0 {
            part.pages.fetch_add(pages as i64, Relaxed);
            part.since.fetch_add(pages as i64, Relaxed);
        }
        if dirty > 0 {
            part.dirty.fetch_add(dirty as i64, Relaxed);
        }
    }
    /// So many pages left memory; so many are dirty no more.
    pub fn left(&self, pages: usize, dirty: usize) {
        let part = self.parts.mine();
        for (count, gone) in [(&part.pages, pages), (&part.dirty, dirty)] {
            if gone > 0 {
                count.fetch_sub(gone as i64, Relaxed);
            }
        }
    }
    /// Names of directories, or indexes of extents and pages, take so many bytes more.
    pub fn add_index_bytes(&self, bytes: i64) {
        if bytes != 0 {
            self.parts.mine().index_bytes.fetch_add(bytes, Relaxed);
        }
    }
    /// Whether this thread's slot has added so many pages that somebody must look at the sums: the caller does.
    pub fn is_to_look(&self) -> bool {
        let since = &self.parts.mine().since;
        if since.load(Relaxed) < self.look {
            return false;
        }
        since.store(0, Relaxed);
        self.lately.store(self.dirty() as i64, Relaxed);
        true
    }
    /// Memory answered a read alone. Without a locked instruction: of threads that share a slot, where they are more than
    /// slots, one may be lost.
    pub fn hit(&self) {
        let hits = &self.parts.mine().hits;
        hits.store(hits.load(Relaxed).wrapping_add(1), Relaxed);
    }
    /// A read waited for the device.
    pub fn miss(&self) {
        self.parts.mine().misses.fetch_add(1, Relaxed);
    }
    /// [`Self::hit`] and [`Self::miss`] so far.
    pub fn hits_and_misses(&self) -> (u64, u64) {
        let sum = |of: fn(&Part) -> &AtomicU64| self.parts.iter().map(|p| of(p).load(Relaxed)).sum();
        (sum(|p| &p.hits), sum(|p| &p.misses))
    }
    /// Pages in memory.
    pub fn pages(&self) -> u64 {
        self.sum(|p| &p.pages)
    }
    /// Pages that are not written yet.
    pub fn dirty(&self) -> u64 {
        self.sum(|p| &p.dirty)
    }
    /// Dirty ones as of the last look: touches no line that others write often.
    pub fn dirty_lately(&self) -> u64 {
        self.lately.load(Relaxed).max(0) as u64
    }
    /// Bytes of directories' names and of indexes of extents and pages.
    pub fn index_bytes(&self) -> u64 {
        self.sum(|p| &p.index_bytes)
    }
    fn sum(&self, of: impl Fn(&Part) -> &AtomicI64) -> u64 {
        self.parts.iter().map(|p| of(p).load(Relaxed)).sum::<i64>().max(0) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_exact_and_somebody_looks_before_the_budget_is_left_far_behind() {
        let budget = 64 << 20;
        let memory = MemoryUse::new(budget);
        let looked = AtomicI64::new(0);
        std::thread::scope(|s| {
            for _ in 0..20 {
                s.spawn(|| {
                    for _ in 0..1000 {
                        memory.add(2, 1);
                        memory.left(1, 1);
                        memory.add_index_bytes(10);
                        if memory.is_to_look() {
                            looked.fetch_add(1, Relaxed);
                        }
                    }
                });
            }
        });
        assert_eq!((memory.pages(), memory.dirty(), memory.index_bytes()), (20_000, 0, 200_000));
        // 40,000 pages came
        let part = 40_000 / LOOK_PAGES;
        assert!(looked.into_inner() >= part.min(40_000 / memory.look) / 2);
        let overshoot = memory.look * memory.parts.parts() as i64 * 4096;
        assert!(overshoot <= budget as i64 / LOOK_PART + memory.parts.parts() as i64 * 4096, "{overshoot}");
    }
}
