//! Slots: a cache line for each thread, of what all threads would else write together.
//!
//! A thread has a small number for as long as it lives, the lowest that is free ([`mine`]). Something that is kept
//! [`PerSlot`] has a part for each of [`count`] numbers; where threads are more, several share a part. So parts are for
//! what may be shared (atomics, locks), and are shared only where threads outnumber them.

use crate::ablation::{self, Switch};
use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering::Relaxed};

/// Parts at least and at most.
const SLOTS: std::ops::RangeInclusive<usize> = 8..=128;
/// The number of a thread that has none yet.
const NONE: usize = usize::MAX;

/// Numbers that were given back, and the lowest that was never given out.
struct Numbers {
    free: BTreeSet<usize>,
    next: usize,
}

// on lines of their own: a thread that begins would take what lies beside them from all others
static NUMBERS: Line<parking_lot::Mutex<Numbers>> =
    Line(parking_lot::Mutex::new(Numbers { free: BTreeSet::new(), next: 0 }));

/// [`Numbers::next`], for who looks at what threads have done.
static GIVEN: Line<AtomicUsize> = Line(AtomicUsize::new(0));

/// Gives a thread's number back when the thread ends.
struct Leave(Cell<usize>);

impl Drop for Leave {
    fn drop(&mut self) {
        if self.0.get() != NONE {
            // what still runs in this thread shares a part with the next one
            NUMBERS.lock().free.insert(self.0.get());
        }
    }
}

thread_local! {
    static MINE: Cell<usize> = const { Cell::new(NONE) };
    static LEAVE: Leave = const { Leave(Cell::new(NONE)) };
}

/// The number of this thread: small, and of no other thread that lives. Of a thread under the scheduler of tests the number
/// that it has there, so that runs with the same seed are the same. All have number 0 with [`Switch::Slots`].
#[inline]
pub fn mine() -> usize {
    #[cfg(feature = "schedule")]
    if let Some(n) = crate::schedule::number() {
        return if ablation::is_on(Switch::Slots) { 0 } else { n };
    }
    let n = MINE.get();
    if n == NONE { first() } else { n }
}

#[cold]
fn first() -> usize {
    if ablation::is_on(Switch::Slots) {
        MINE.set(0);
        return 0;
    }
    let mut numbers = NUMBERS.lock();
    let n = numbers.free.pop_first().unwrap_or_else(|| {
        numbers.next += 1;
        GIVEN.store(numbers.next, Relaxed);
        numbers.next - 1
    });
    drop(numbers);
    MINE.set(n);
    if LEAVE.try_with(|l| l.0.set(n)).is_err() {
        // the thread ends right now
        NUMBERS.lock().free.insert(n);
    }
    n
}

/// How many numbers threads have had so far, of those that come before this look.
fn given() -> usize {
    // a scheduler gives its own numbers, and switches all to number 0
    if cfg!(feature = "schedule") || ablation::is_on(Switch::Slots) {
        return usize::MAX;
    }
    GIVEN.load(Relaxed)
}

/// Parts of what is kept per slot: a power of two, twice the CPUs that the process may use, in bounds.
pub fn count() -> usize {
    static COUNT: OnceLock<usize> = OnceLock::new();
    *COUNT.get_or_init(|| {
        if ablation::is_on(Switch::Slots) {
            return 1;
        }
        let cpus = rustix::thread::sched_getaffinity(None).map_or(1, |set| set.count() as usize);
        (2 * cpus).next_power_of_two().clamp(*SLOTS.start(), *SLOTS.end())
    })
}

/// On cache lines of its own: processors fetch them in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Line<T>(pub T);

impl<T> std::ops::Deref for Line<T> {
    type Target = T;
    #[inline(always)]
    fn deref(&self) -> &T {
        &self.0
    }
}

/// A part for each slot.
#[derive(Debug)]
pub struct PerSlot<T> {
    /// As many as a power of two.
    parts: Box<[Line<T>]>,
}

impl<T> PerSlot<T> {
    /// Parts that `part` makes, each given its slot.
    pub fn new(part: impl FnMut(usize) -> T) -> Self {
        Self::with(count(), part)
    }
    /// [`Self::new`] for at least so many threads.
    pub fn with(threads: usize, part: impl FnMut(usize) -> T) -> Self {
        Self { parts: (0..threads.next_power_of_two()).map(part).map(Line).collect() }
    }
    /// This thread's part.
    #[inline]
    pub fn mine(&self) -> &T {
        &self.parts[self.slot()]
    }
    /// The slot of this thread's part.
    #[inline]
    pub fn slot(&self) -> usize {
        mine() & (self.parts.len() - 1)
    }
    /// The part of a slot.
    #[inline]
    pub fn part(&self, slot: usize) -> &T {
        &self.parts[slot]
    }
    /// All parts, in the order of slots.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.parts.iter().map(|p| &p.0)
    }
    /// Those of which a thread may have done something that comes before this look: the parts of numbers that were ever given
    /// to threads. Of the others the lines are not touched.
    pub fn used(&self) -> impl Iterator<Item = &T> {
        self.parts[..self.parts.len().min(given())].iter().map(|p| &p.0)
    }
    /// How many there are.
    pub fn parts(&self) -> usize {
        self.parts.len()
    }
}

impl<T: Default> Default for PerSlot<T> {
    fn default() -> Self {
        Self::new(|_| T::default())
    }
}

/// A counter that many add to and few read: a part of it per slot, which alone may be below 0.
#[derive(Debug, Default)]
pub struct Counter(PerSlot<AtomicI64>);

impl Counter {
    /// Adds `n`; of 0 it touches nothing.
    #[inline]
    pub fn add(&self, n: i64) {
        if n != 0 {
            self.0.mine().fetch_add(n, Relaxed);
        }
    }
    /// The sum: exact while nobody adds.
    pub fn sum(&self) -> i64 {
        self.0.iter().map(|p| p.load(Relaxed)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;

    #[test]
    fn threads_that_live_have_numbers_of_their_own_which_come_back() {
        let both = Barrier::new(9);
        let numbers: Vec<usize> = std::thread::scope(|s| {
            let threads: Vec<_> = (0..8)
                .map(|_| {
                    s.spawn(|| {
                        let n = mine();
                        both.wait();
                        assert_eq!(n, mine());
                        n
                    })
                })
                .collect();
            both.wait();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        let mut once = numbers.clone();
        once.sort_unstable();
        once.dedup();
        assert_eq!(once.len(), 8, "{numbers:?}");
        // others of this process take numbers meanwhile; without any coming back they would be in the thousands
        let highest = (0..1000).map(|_| std::thread::spawn(mine).join().unwrap()).max().unwrap();
        assert!(highest < 500, "{highest}");
    }

    #[test]
    fn parts_that_no_thread_had_are_not_looked_at() {
        let per_slot = PerSlot::with(1 << 16, |_| AtomicI64::new(0));
        // more of them at once than any test before
        let both = Barrier::new(40);
        std::thread::scope(|s| {
            for _ in 0..40 {
                s.spawn(|| {
                    per_slot.mine().fetch_add(1, Relaxed);
                    both.wait();
                });
            }
        });
        let sum = |all: &mut dyn Iterator<Item = &AtomicI64>| all.map(|p| p.load(Relaxed)).sum::<i64>();
        assert_eq!((sum(&mut per_slot.used()), sum(&mut per_slot.iter())), (40, 40));
        assert!(cfg!(feature = "schedule") || per_slot.used().count() < 2000);
    }

    #[test]
    fn a_counter_has_the_sum_of_all_threads() {
        let c = Counter(PerSlot::with(4, |_| Default::default()));
        std::thread::scope(|s| {
            for i in 0..9 {
                let c = &c;
                s.spawn(move || (0..1000).for_each(|_| c.add(if i < 5 { 3 } else { -2 })));
            }
        });
        assert_eq!(c.sum(), 1000 * (5 * 3 - 4 * 2));
        assert_eq!(std::mem::align_of_val(&c.0.parts[0]), 128);
    }
}
