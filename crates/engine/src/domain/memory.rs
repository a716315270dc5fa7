//! Memory that the cache of a domain takes, counted so that threads share no line, and what it may take.
//!
//! Each domain has an account of its own (bladefs: memory per partition); what the volume takes is their sum. Who adds
//! pages counts them in a part of the account that is its slot's, and looks at the sums only once in a while
//! ([`Looks`], [`MemoryUse::exceeds_ceiling`]).

use super::own_work;
use super::tx::CELL_COST;
use crate::cell::cache::{CELL_BYTES, Memory};
use crate::types::MemoryBudget;
use braidfs_format::domain::DomainHeader;
use braidfs_sync::slots::{Line, PerSlot};
use braidfs_sync::{Mutex, MutexGuard, rank};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed};

/// Pages that a thread adds, where there is memory enough, until it looks at the sum.
const LOOK_PAGES: i64 = 256;
/// All threads together go over the budget by this part of it at most before one of them looks.
const LOOK_PART: i64 = 32;
/// Stands for no ceiling.
const NONE: u64 = u64::MAX;
/// Readers may pin this part of the cache, and of what a domain may take of it.
const PINS_PART: u64 = 4;

/// When the threads of a volume look at what all its domains take.
#[derive(Debug)]
pub struct Looks {
    /// Pages added that the threads of a slot have not told of.
    since: PerSlot<AtomicI64>,
    told: Line<Told>,
    /// Dirty pages, as somebody saw them lately.
    dirty: Line<AtomicI64>,
    /// Pages that the threads of a slot add until one of them tells of them.
    after: i64,
    /// Pages that readers have pinned in all domains, and how many they may.
    pinned: PerSlot<SlotPins>,
    pins_most: u64,
    /// Bytes that all domains may take.
    budget: u64,
}

/// What slots have told. A look at the sums reads the lines of all slots: the more memory there is left, the more pages come
/// before the next one.
#[derive(Debug, Default)]
struct Told {
    /// Pages that were ever added.
    added: AtomicI64,
    /// How many will have been at the next look.
    next: AtomicI64,
}

/// Pages that the threads of one slot have pinned, less those that they have let go of.
#[derive(Debug, Default)]
struct SlotPins {
    pages: AtomicI64,
    /// Pinned since one of them looked at the sum.
    since: AtomicI64,
}

impl SlotPins {
    /// Counts so many pages more; false, and nothing counted, where the `sum` over all slots is then above `most`. The sum is
    /// looked at only once in a while: all slots together may go over `most` by a part of it.
    fn pin(&self, pages: i64, most: u64, parts: usize, sum: impl FnOnce() -> u64) -> bool {
        self.pages.fetch_add(pages, Relaxed);
        if self.since.fetch_add(pages, Relaxed) + pages < look_after(most.saturating_mul(4096), parts) {
            return true;
        }
        if sum() > most {
            self.pages.fetch_sub(pages, Relaxed);
            return false;
        }
        self.since.store(0, Relaxed);
        true
    }
}

/// Pages that the threads of a slot add, of `parts`, until one of them looks: all go over `bytes` by a part only.
fn look_after(bytes: u64, parts: usize) -> i64 {
    let part = (bytes / 4096).min(1 << 40) as i64 / LOOK_PART / parts as i64;
    part.clamp(1, LOOK_PAGES)
}

impl Looks {
    /// Of a cache of `budget` bytes.
    pub fn new(budget: u64) -> Self {
        let since = PerSlot::<AtomicI64>::default();
        let pins_most = budget / PINS_PART / 4096;
        let after = look_after(budget, since.parts());
        let (told, dirty) = (Line::default(), Line::default());
        Self { after, since, told, dirty, pinned: PerSlot::default(), pins_most, budget }
    }
    fn pinned(&self) -> u64 {
        self.pinned.iter().map(|p| p.pages.load(Relaxed)).sum::<i64>().max(0) as u64
    }
    /// Whether so many pages have been added that somebody must look at the sums: the caller does, and says what it
    /// [saw](Self::saw).
    pub fn is_due(&self) -> bool {
        let since = self.since.mine();
        if since.load(Relaxed) < self.after {
            return false;
        }
        let pages = since.swap(0, Relaxed);
        self.told.added.fetch_add(pages, Relaxed) + pages >= self.told.next.load(Relaxed)
    }
    /// So many pages are dirty, and so many bytes taken. The next look is due when a quarter of the pages have come that there is
    /// room for, or half of what may come unseen.
    pub fn saw(&self, dirty: u64, bytes: u64) {
        self.dirty.store(dirty as i64, Relaxed);
        let pages = |bytes: u64| (bytes / 4096).min(1 << 40) as i64;
        let some = (pages(self.budget.saturating_sub(bytes)) / 4).min(pages(self.budget) / (2 * LOOK_PART));
        self.told.next.store(self.told.added.load(Relaxed) + some, Relaxed);
    }
    /// Dirty pages as of the last look: touches no line that others write often.
    pub fn dirty_lately(&self) -> u64 {
        self.dirty.load(Relaxed).max(0) as u64
    }
}

fn is_due(since: &AtomicI64, after: i64) -> bool {
    if since.load(Relaxed) < after {
        return false;
    }
    since.store(0, Relaxed);
    true
}

/// What the threads of one slot have added and taken away.
#[derive(Debug, Default)]
struct SlotCounts {
    pages: AtomicI64,
    dirty: AtomicI64,
    index_bytes: AtomicI64,
    attached: AtomicI64,
    /// Pages added since a thread of the slot compared with the ceiling.
    since: AtomicI64,
    /// Reads that memory answered alone, and those that waited for the device.
    hits: AtomicU64,
    misses: AtomicU64,
    /// Those of the latter that the background did of itself.
    own_misses: AtomicU64,
    pins: SlotPins,
}

/// Pages, names of directories, and indexes of extents and pages of one domain in memory. Sums are exact while nobody adds.
#[derive(Debug)]
pub struct MemoryUse {
    parts: PerSlot<SlotCounts>,
    looks: Arc<Looks>,
    limits: Line<Limits>,
}

/// What a domain may take of the cache, bytes. Read by all, changed seldom.
#[derive(Debug)]
struct Limits {
    /// Others take nothing of it as long as it holds no more.
    floor: AtomicU64,
    /// It holds no more. [`NONE`]: as much as there is.
    ceiling: AtomicU64,
    /// Pages that a slot adds until its ceiling is looked at.
    after: AtomicI64,
    /// Held by who has the domain give back what is beyond.
    giving_back: Mutex<(), rank::Ceiling>,
    /// Somebody waits for that, so that others need not.
    waiting: AtomicBool,
}

impl MemoryUse {
    /// Of a domain of a volume.
    pub fn new(looks: Arc<Looks>) -> Self {
        let limits = Limits {
            floor: AtomicU64::new(0),
            ceiling: AtomicU64::new(NONE),
            after: AtomicI64::new(LOOK_PAGES),
            giving_back: Mutex::new(()),
            waiting: AtomicBool::new(false),
        };
        Self { parts: PerSlot::default(), looks, limits: Line(limits) }
    }
    /// So many pages came into memory, of which so many dirty ones; pages that were there became dirty.
    pub fn add(&self, pages: usize, dirty: usize) {
        let part = self.parts.mine();
        if pages > 0 {
            part.pages.fetch_add(pages as i64, Relaxed);
            self.looks.since.mine().fetch_add(pages as i64, Relaxed);
            if self.ceiling().is_some() {
                part.since.fetch_add(pages as i64, Relaxed);
            }
        }
        if dirty > 0 {
            part.dirty.fetch_add(dirty as i64, Relaxed);
        }
    }
    /// So many pages left memory; so many are dirty no more.
    pub fn remove(&self, pages: usize, dirty: usize) {
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
    /// What hangs on cells takes so many bytes more.
    pub fn add_attached(&self, bytes: i64) {
        if bytes != 0 {
            self.parts.mine().attached.fetch_add(bytes, Relaxed);
        }
    }
    /// Cells with this came into memory.
    pub fn cells_came(&self, own: &Memory) {
        self.add_index_bytes(own.index_bytes as i64);
        self.add_attached(own.attached as i64);
    }
    /// Cells with this left it.
    pub fn cells_left(&self, own: &Memory) {
        self.add_index_bytes(-(own.index_bytes as i64));
        self.add_attached(-(own.attached as i64));
    }
    /// Memory answered a read alone. Without a locked instruction: of threads that share a slot, where they are more than
    /// slots, one may be lost.
    pub fn hit(&self) {
        let hits = &self.parts.mine().hits;
        hits.store(hits.load(Relaxed).wrapping_add(1), Relaxed);
    }
    /// A read waited for the device.
    pub fn miss(&self) {
        let mine = self.parts.mine();
        let misses = if own_work::is_own() { &mine.own_misses } else { &mine.misses };
        misses.fetch_add(1, Relaxed);
    }
    /// [`Self::hit`] and [`Self::miss`] so far.
    pub fn hits_and_misses(&self) -> (u64, u64) {
        let own: u64 = self.sum_of(|p| &p.own_misses);
        (self.sum_of(|p| &p.hits), self.misses_of_others() + own)
    }
    /// [`Self::miss`] so far, but for what the background does of itself.
    pub fn misses_of_others(&self) -> u64 {
        self.sum_of(|p| &p.misses)
    }
    fn sum_of(&self, of: fn(&SlotCounts) -> &AtomicU64) -> u64 {
        self.parts.iter().map(|p| of(p).load(Relaxed)).sum()
    }
    /// Pages in memory.
    pub fn pages(&self) -> u64 {
        self.sum(|p| &p.pages)
    }
    /// Pages that are not written yet.
    pub fn dirty(&self) -> u64 {
        self.sum(|p| &p.dirty)
    }
    /// Bytes of directories' names and of indexes of extents and pages.
    pub fn index_bytes(&self) -> u64 {
        self.sum(|p| &p.index_bytes)
    }
    /// Bytes that hang on cells ([`State::attached_steps`](crate::cell::State::attached_steps)).
    pub fn attached(&self) -> u64 {
        self.sum(|p| &p.attached)
    }
    /// Pages that readers have pinned. Each counts once more than as a page of the cache: who overwrites it copies it, and who
    /// truncates its file leaves it to its readers.
    pub fn pinned(&self) -> u64 {
        self.sum(|p| &p.pins.pages)
    }
    /// Counts so many pages as pinned, until [`Self::unpin`].
    ///
    /// # Errors
    /// How many bytes may be pinned at most, where these would be too many: of the volume, or of the domain.
    pub fn pin(&self, pages: u64) -> Result<(), u64> {
        let pages = i64::try_from(pages).ok().filter(|p| *p < 1 << 50).ok_or(self.looks.pins_most * 4096)?;
        let parts = self.parts.parts();
        let own = self.ceiling().map_or(self.looks.pins_most, |c| c / PINS_PART / 4096);
        if !self.parts.mine().pins.pin(pages, own, parts, || self.pinned()) {
            return Err(own * 4096);
        }
        if !self.looks.pinned.mine().pin(pages, self.looks.pins_most, parts, || self.looks.pinned()) {
            self.parts.mine().pins.pages.fetch_sub(pages, Relaxed);
            return Err(self.looks.pins_most * 4096);
        }
        // they are memory as pages that come are
        self.looks.since.mine().fetch_add(pages, Relaxed);
        self.parts.mine().since.fetch_add(pages, Relaxed);
        Ok(())
    }
    /// So many pages are pinned no more.
    pub fn unpin(&self, pages: u64) {
        self.parts.mine().pins.pages.fetch_sub(pages as i64, Relaxed);
        self.looks.pinned.mine().pages.fetch_sub(pages as i64, Relaxed);
    }
    fn sum(&self, of: impl Fn(&SlotCounts) -> &AtomicI64) -> u64 {
        self.parts.iter().map(|p| of(p).load(Relaxed)).sum::<i64>().max(0) as u64
    }

    /// Bytes that others leave the domain.
    pub fn floor(&self) -> u64 {
        self.limits.floor.load(Relaxed)
    }
    /// Bytes that it may hold at most.
    pub fn ceiling(&self) -> Option<u64> {
        Some(self.limits.ceiling.load(Relaxed)).filter(|c| *c != NONE)
    }
    /// Bytes that it may hold where no other domain holds anything.
    pub fn may_hold(&self) -> u64 {
        self.ceiling().map_or(self.looks.budget, |c| c.min(self.looks.budget))
    }
    /// Sets floor and ceiling, bytes; they hold from the next look on.
    pub fn set_limits(&self, floor: u64, ceiling: Option<u64>) {
        self.limits.floor.store(floor, Relaxed);
        self.limits.after.store(ceiling.map_or(LOOK_PAGES, |c| look_after(c, self.parts.parts())), Relaxed);
        self.limits.ceiling.store(ceiling.unwrap_or(NONE), Relaxed);
        // whoever comes next looks
        self.parts.iter().for_each(|p| p.since.store(LOOK_PAGES, Relaxed));
    }
    /// The right to make the domain smaller, which one thread has at a time; `waits` for it, or gets none where it is another's.
    pub fn begin_to_give_back(&self, waits: bool) -> Option<MutexGuard<'_, ()>> {
        if waits { Some(self.limits.giving_back.lock()) } else { self.limits.giving_back.try_lock() }
    }
    /// [`Self::begin_to_give_back`], where of all that would wait one does: threads that wait serve nobody, of other domains
    /// neither.
    pub fn begin_to_write_back(&self, waits: bool) -> Option<MutexGuard<'_, ()>> {
        let one = self.limits.giving_back.try_lock();
        if one.is_some() || !waits || self.limits.waiting.swap(true, Relaxed) {
            return one;
        }
        let one = self.limits.giving_back.lock();
        self.limits.waiting.store(false, Relaxed);
        Some(one)
    }
    /// Whether the domain holds more than its ceiling, with so many bytes of cells; looked at only where this thread's slot has
    /// added some pages since the last look.
    pub fn exceeds_ceiling(&self, cells: impl FnOnce() -> u64) -> bool {
        let Some(ceiling) = self.ceiling() else { return false };
        is_due(&self.parts.mine().since, self.limits.after.load(Relaxed))
            && (self.pages() + self.pinned()) * 4096 + self.index_bytes() + cells() > ceiling
    }
}

/// Most that a transaction may cost, whose cells cannot leave memory before it is durable: that of an eighth of `cache` bytes
/// in cells, or of a quarter of the domain's ceiling where that is less.
pub(super) fn pinned_max(cache: u64, ceiling: Option<u64>) -> usize {
    let all = (cache / 8 / CELL_BYTES).clamp(2048, 1 << 40);
    let own = ceiling.map_or(all, |c| (c / 4 / CELL_BYTES).max(256));
    all.min(own) as usize * CELL_COST
}

/// What a domain's header says of memory.
pub(super) fn budget_of(h: &DomainHeader) -> MemoryBudget {
    MemoryBudget { least: h.tenant_memory_min.get(), most: Some(h.tenant_memory_max.get()).filter(|n| *n > 0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(budget: u64) -> MemoryUse {
        MemoryUse::new(Arc::new(Looks::new(budget)))
    }

    #[test]
    fn sums_are_exact_and_somebody_looks_before_the_budget_is_left_far_behind() {
        let budget = 64 << 20;
        let memory = memory(budget);
        let looked = AtomicI64::new(0);
        std::thread::scope(|s| {
            for _ in 0..20 {
                s.spawn(|| {
                    for _ in 0..1000 {
                        memory.add(2, 1);
                        memory.remove(1, 1);
                        memory.add_index_bytes(10);
                        if memory.looks.is_due() {
                            looked.fetch_add(1, Relaxed);
                        }
                    }
                });
            }
        });
        assert_eq!((memory.pages(), memory.dirty(), memory.index_bytes()), (20_000, 0, 200_000));
        // 40,000 pages came
        let part = 40_000 / LOOK_PAGES;
        assert!(looked.into_inner() >= part.min(40_000 / memory.looks.after) / 2);
        let parts = memory.parts.parts() as i64;
        let overshoot = memory.looks.after * parts * 4096;
        assert!(overshoot <= budget as i64 / LOOK_PART + parts * 4096, "{overshoot}");
    }

    /// With much room the sums are looked at seldom, and the less there is the more often; beyond the budget each time.
    #[test]
    fn the_next_look_comes_before_the_room_is_used_up() {
        let budget = 256 << 20;
        let memory = memory(budget);
        let (mut looks, mut bytes) = (Vec::new(), 0);
        while bytes < budget + (8 << 20) {
            memory.add(1, 1);
            bytes += 4096;
            if memory.looks.is_due() {
                memory.looks.saw(memory.dirty(), bytes);
                looks.push(bytes);
            }
        }
        let first = looks.iter().find(|b| **b > budget).expect("a look beyond the budget");
        assert!(*first <= budget + 4096 * memory.looks.after as u64, "{first}");
        let between = |w: &[u64]| w[1] - w[0];
        let most = looks.windows(2).map(between).max().unwrap();
        assert!((1 << 20..=budget / 32).contains(&most), "{most}");
        assert!(looks.len() < 80 && memory.looks.dirty_lately() * 4096 > budget, "{}", looks.len());
    }

    #[test]
    fn a_ceiling_is_looked_at_now_and_then_and_at_once_when_it_is_set() {
        let memory = memory(1 << 30);
        memory.add(10_000, 0);
        assert!(!memory.exceeds_ceiling(|| panic!("there is none")));
        memory.set_limits(0, Some(32 << 20));
        assert!(memory.exceeds_ceiling(|| 0), "40 MB are there");
        assert!(!memory.exceeds_ceiling(|| panic!("looked at right now")));
        memory.remove(9_000, 0);
        memory.add(LOOK_PAGES as usize, 0);
        assert!(!memory.exceeds_ceiling(|| 0), "5 MB are there");
        memory.add(LOOK_PAGES as usize, 0);
        assert!(memory.exceeds_ceiling(|| 30 << 20), "with cells");
        memory.set_limits(0, None);
        memory.add(20_000, 0);
        assert!(!memory.exceeds_ceiling(|| 0));
    }
}
