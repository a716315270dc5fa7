//! The account of a domain's blocks that are neither used nor promised.
//!
//! Where there are plenty, each slot of threads has some of them for itself, and who promises blocks takes them from
//! there: threads write no common line but once in a batch. Where they become few, all are added up in one sum, and
//! promises are made as if there were nothing else: the last block is had by whoever asks first, with one thread or many.

use braidfs_sync::slots::{Line, PerSlot};
use braidfs_sync::{Mutex, rank};
use std::sync::atomic::{
    AtomicBool, AtomicI64,
    Ordering::{Relaxed, SeqCst},
};

/// A slot takes so many blocks at a time beyond what is asked for, at most, by the size of the domain.
const BATCH: std::ops::RangeInclusive<i64> = 64..=512;
/// And at least: an operation on names keeps one or two of those that it asks for.
const LEAST: i64 = 16;
/// All slots together take this part of a domain's blocks at most at once.
const BATCH_PART: i64 = 64;
/// Beside what is kept back, blocks below which they are few: more than anybody asks for at a time who looks whether there
/// are enough first.
const FEW: i64 = 1024;

#[derive(Debug, Default)]
pub(crate) struct Account {
    /// Blocks that no slot has. Below 0 where a planted bug, or recovery, took what was promised.
    common: Line<AtomicI64>,
    /// Never below 0.
    slots: PerSlot<AtomicI64>,
    limits: Line<Limits>,
    /// Held by who adds up what slots have: whoever finds too little meanwhile waits for it.
    merging: Mutex<(), rank::Account>,
}

/// Read by all, seldom written.
#[derive(Debug)]
struct Limits {
    /// Blocks are few: slots have none, and get none.
    few: AtomicBool,
    /// So many in `common` are few.
    low: AtomicI64,
    batch: AtomicI64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { few: AtomicBool::new(true), low: AtomicI64::new(i64::MAX / 2), batch: AtomicI64::new(*BATCH.start()) }
    }
}

impl Account {
    /// The domain has `total` blocks, of which `hidden` are kept back from ordinary promises.
    pub fn resize(&self, total: u64, hidden: u64) {
        let batch = total as i64 / BATCH_PART / self.slots.parts() as i64;
        self.limits.batch.store(batch.clamp(*BATCH.start(), *BATCH.end()), Relaxed);
        self.limits.low.store(2 * hidden as i64 + FEW, Relaxed);
    }

    /// Whether there are so many that nobody has to count them: ordinary promises leave [`FEW`] at least.
    pub fn has_plenty(&self) -> bool {
        !self.limits.few.load(Relaxed)
    }

    /// Takes `blocks`, where at least `floor` are left, which is never more than what is kept back.
    pub fn take(&self, blocks: i64, floor: i64) -> bool {
        if self.has_plenty() {
            let enough = |n: i64| (n >= blocks).then(|| n - blocks);
            if self.slots.mine().fetch_update(Relaxed, Relaxed, enough).is_ok() || self.take_batch(blocks) {
                return true;
            }
        }
        let fits = |now: i64| now.checked_sub(blocks).filter(|&left| left >= floor);
        self.claim();
        self.common.fetch_update(Relaxed, Relaxed, fits).is_ok() || {
            let _one = self.merge_slots();
            self.common.fetch_update(Relaxed, Relaxed, fits).is_ok()
        }
    }

    /// Has the line of `common` brought to be written: else it would come for the look before the change, and be taken from all
    /// others again for the change.
    fn claim(&self) {
        // never the case: it is as it was
        let _ = self.common.compare_exchange(i64::MIN, i64::MIN, Relaxed, Relaxed);
    }

    /// Takes `blocks` and a batch for this thread's slot; false where there are few by now.
    #[cold]
    fn take_batch(&self, blocks: i64) -> bool {
        let (low, most) = (self.limits.low.load(Relaxed), self.limits.batch.load(Relaxed));
        let slots = self.slots.used().count() as i64;
        // all slots together half of what there is
        let batch = |now: i64| (now.saturating_sub(low) / (2 * slots).max(1)).clamp(LEAST, most);
        let fits =
            |now: i64| now.checked_sub(blocks).and_then(|n| n.checked_sub(batch(now))).filter(|&left| left >= low);
        self.claim();
        let Ok(before) = self.common.fetch_update(Relaxed, Relaxed, fits) else {
            self.limits.few.store(true, Relaxed);
            drop(self.merge_slots());
            return false;
        };
        self.slots.mine().fetch_add(batch(before), Relaxed);
        true
    }

    /// Takes `blocks` whether they are there or not, from slots, too: nobody may have them from now on.
    pub fn withhold(&self, blocks: i64) {
        // in this order: who sees that there are many blocks again, and says so, looks once more behind that
        self.common.fetch_sub(blocks, SeqCst);
        self.limits.few.store(true, SeqCst);
        drop(self.merge_slots());
    }

    /// Takes `blocks` whether they are there or not: they are in use.
    pub fn force(&self, blocks: u32) {
        if blocks > 0 {
            self.common.fetch_sub(i64::from(blocks), Relaxed);
        }
    }

    /// Gives back blocks that were promised, and not taken.
    pub fn give(&self, blocks: i64) {
        if blocks == 0 {
            return;
        }
        if !self.has_plenty() {
            return self.add(blocks);
        }
        let (slot, batch) = (self.slots.mine(), self.limits.batch.load(Relaxed));
        let has = slot.fetch_add(blocks, Relaxed) + blocks;
        // as much as it may need soon
        if has > 2 * batch {
            let much = |n: i64| (n > 2 * batch).then_some(batch);
            if let Ok(n) = slot.fetch_update(Relaxed, Relaxed, much) {
                self.common.fetch_add(n - batch, Relaxed);
            }
        }
    }

    /// Adds blocks that are unused from now on.
    pub fn add(&self, blocks: i64) {
        let now = self.common.fetch_add(blocks, Relaxed) + blocks;
        if !self.has_plenty() {
            // some more, and what slots take then, so that it does not go to and fro with each operation
            let low = self.limits.low.load(Relaxed);
            let enough = low / 2 + 2 * LEAST * self.slots.used().count() as i64;
            if now - low >= enough {
                self.limits.few.store(false, SeqCst);
                // somebody withheld them meanwhile: what slots got from then on is merged when it is asked for
                if self.common.load(SeqCst) - low < enough {
                    self.limits.few.store(true, SeqCst);
                }
            }
        }
    }

    /// All of them, in `common` but for what is given back right now.
    fn merge_slots(&self) -> braidfs_sync::MutexGuard<'_, ()> {
        let one = self.merging.lock();
        let has = |slot: &&AtomicI64| slot.load(Relaxed) != 0;
        let n: i64 = self.slots.iter().filter(has).map(|slot| slot.swap(0, Relaxed)).sum();
        if n != 0 {
            self.common.fetch_add(n, Relaxed);
        }
        one
    }

    /// How many there are: exact while nobody takes or gives.
    pub fn sum(&self) -> i64 {
        self.common.load(Relaxed) + self.slots.iter().map(|s| s.load(Relaxed)).sum::<i64>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HIDDEN: i64 = 32;

    fn account(blocks: i64) -> Account {
        let a = Account::default();
        a.resize(blocks as u64, HIDDEN as u64);
        a.add(blocks);
        a
    }

    /// All blocks but those kept back are had, by 64 threads as by one, to the last one, whatever slots had before.
    #[test]
    fn the_last_block_is_had_with_many_threads_as_with_one() {
        const ALL: i64 = 200_000;
        for threads in [1, 64] {
            let a = account(ALL);
            assert!(a.has_plenty());
            let took: i64 = std::thread::scope(|s| {
                let each: Vec<_> = (0..threads)
                    .map(|t| {
                        let a = &a;
                        s.spawn(move || {
                            let mut took = 0;
                            for i in 0.. {
                                let n = 1 + (i + t) % 5;
                                if !a.take(n, HIDDEN) {
                                    break;
                                }
                                // now and then an operation needs less than it may
                                let back = if i % 3 == 0 { n - 1 } else { 0 };
                                a.give(back);
                                took += n - back;
                            }
                            while a.take(1, HIDDEN) {
                                took += 1;
                            }
                            took
                        })
                    })
                    .collect();
                each.into_iter().map(|t| t.join().unwrap()).sum()
            });
            // what was given back after others had given up
            let mut rest = 0;
            while a.take(1, HIDDEN) {
                rest += 1;
            }
            assert_eq!(took + rest, ALL - HIDDEN, "{threads} threads");
            assert!(!a.has_plenty());
            assert_eq!(a.sum(), HIDDEN);
            assert!(a.take(HIDDEN, 0) && !a.take(1, 0));
            a.give(ALL);
            assert_eq!(a.sum(), ALL);
            assert!(a.has_plenty());
        }
    }

    /// A slot that has many blocks does not keep them from another thread that needs all.
    #[test]
    fn what_slots_have_is_had_by_others() {
        let a = account(100_000);
        let keep = std::sync::Barrier::new(9);
        std::thread::scope(|s| {
            for _ in 0..8 {
                let (a, keep) = (&a, &keep);
                s.spawn(move || {
                    assert!(a.take(1, HIDDEN));
                    a.give(1);
                    keep.wait();
                    keep.wait();
                });
            }
            keep.wait();
            assert!(a.slots.iter().any(|s| s.load(Relaxed) > 0));
            assert!(a.take(100_000 - HIDDEN, HIDDEN));
            assert!(!a.take(1, HIDDEN));
            assert_eq!(a.sum(), HIDDEN);
            keep.wait();
        });
    }

    /// Threads that take turns on a domain with hardly more blocks than are few: they share the sum, or have some each, and do not
    /// add up what they have again and again.
    #[test]
    fn a_domain_near_the_limit_does_not_go_to_and_fro() {
        const THREADS: usize = 32;
        for more in (0..3000).step_by(100) {
            let a = Account { slots: PerSlot::with(THREADS, |_| AtomicI64::new(0)), ..Account::default() };
            let blocks = 2 * HIDDEN + FEW + more;
            a.resize(blocks as u64, HIDDEN as u64);
            a.add(blocks);
            let (turn, changes) = (std::sync::Mutex::new((0, a.has_plenty(), 0)), std::sync::Condvar::new());
            std::thread::scope(|s| {
                for me in 0..THREADS {
                    let (a, turn, changes) = (&a, &turn, &changes);
                    s.spawn(move || {
                        for round in 0..20 {
                            let mut now = turn.lock().unwrap();
                            while now.0 != round * THREADS + me {
                                now = changes.wait(now).unwrap();
                            }
                            assert!(a.take(8, HIDDEN));
                            now.2 += usize::from(a.has_plenty() != now.1);
                            now.1 = a.has_plenty();
                            a.give(8);
                            now.2 += usize::from(a.has_plenty() != now.1);
                            (now.0, now.1) = (now.0 + 1, a.has_plenty());
                            changes.notify_all();
                        }
                    });
                }
            });
            let changed = turn.into_inner().unwrap().2;
            assert!(changed <= 2, "{more} more: it was plenty, then few, and back: {changed} times");
        }
    }

    #[test]
    fn a_small_domain_has_never_plenty() {
        let a = account(FEW);
        assert!(!a.has_plenty());
        assert!(a.take(FEW - HIDDEN, HIDDEN) && !a.take(1, HIDDEN));
    }
}
