//! Objects that a thread has in use for long, counted in a table of its own: open files.
//!
//! A count in the object moves its line with each thread that opens it. Once a thread has kept meeting objects that others
//! used last ([`note_use`]), all threads count in tables of their own instead, until the process ends; before that they count in the
//! objects, and who looks for users has no tables to search. An entry is address and count in one word: only the table's thread takes
//! entries and counts up, any thread counts down.
//!
//! Who looks for pins says so on the object first ([`mark`], [`is_pinned`]); who pins looks at the object after that. Both
//! use locked instructions, so one of the two sees the other. A marked pin tells the one that takes it away.

use crate::ablation::{self, Switch};
#[cfg(loom)]
use crate::one_order::AtomicU64;
use crate::published;
#[cfg(not(loom))]
use std::sync::atomic::AtomicU64;
use std::sync::atomic::{
    AtomicBool, AtomicU32,
    Ordering::{Acquire, Relaxed, SeqCst},
};

/// Entries of a table: 16 KiB.
const ENTRIES: usize = if cfg!(loom) { WAYS } else { 2048 };
/// Entries that an address may be in: a cache line.
const WAYS: usize = if cfg!(loom) { 1 } else { 8 };
/// Above it the count, below it address and mark: addresses of user space have 47 bits, and 48 where that is not asked for.
const ONE: u64 = 1 << 48;
/// Somebody waits for this pin to go. Objects are aligned, so that the lowest bit is free.
const MARK: u64 = 1;
/// Uses of objects that others used last, less uses of own ones, before threads count in their own tables.
const STRANGE_MAX: u32 = 64;
const STRANGE: u32 = 4;

/// Threads pin: each has a table, or gets it with its first pin.
static ANY: AtomicBool = AtomicBool::new(false);

#[cfg(all(test, loom))]
pub(crate) use crate::one_order::AtomicU64 as Entry;

/// A thread's entries.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Table([AtomicU64; ENTRIES]);

impl Table {
    pub(crate) fn new() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(0)))
    }
    fn bucket(&self, address: u64) -> &[AtomicU64] {
        let hash = (address >> 4).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let at = hash as usize % (ENTRIES / WAYS) * WAYS;
        &self.0[at..at + WAYS]
    }
    pub(crate) fn find(&self, address: u64) -> Option<&AtomicU64> {
        self.bucket(address).iter().find(|e| names(e.load(SeqCst), address))
    }
    /// Only by the table's thread. What it loads after this with [`SeqCst`] it loads after all others can see the pin.
    pub(crate) fn pin(&self, address: u64) -> Option<&AtomicU64> {
        let mut free = None;
        for e in self.bucket(address) {
            let word = e.load(Relaxed);
            if names(word, address) {
                if word >= u64::MAX - ONE {
                    return None;
                }
                // still there, or gone meanwhile: then it is free
                if e.fetch_update(SeqCst, Relaxed, |w| names(w, address).then(|| w + ONE)).is_ok() {
                    return Some(e);
                }
                free = Some(e);
            } else if word == 0 && free.is_none() {
                free = Some(e);
            }
        }
        let e = free?;
        e.swap(ONE | address, SeqCst);
        Some(e)
    }
}

fn names(word: u64, address: u64) -> bool {
    word & (ONE - 1) & !MARK == address && word != 0
}

/// What a thread knows of its uses; only this thread writes it.
#[derive(Debug, Default)]
pub(crate) struct Uses {
    strange: AtomicU32,
}

/// A use of an object that is counted in the table of the thread that pinned it. To be given back by [`Pin::leave`].
#[derive(Debug)]
pub struct Pin(&'static AtomicU64);

impl Pin {
    /// Gives the pin back; not where somebody has marked it, who then waits for [`Pin::leave_marked`]. The object may go with
    /// it.
    #[inline]
    pub fn leave(&self) -> bool {
        leave(self.0)
    }
    /// Gives a marked pin back. The caller keeps the object by other means.
    pub fn leave_marked(&self) {
        leave_marked(self.0);
    }
}

pub(crate) fn leave(entry: &AtomicU64) -> bool {
    entry.fetch_update(SeqCst, SeqCst, |w| (w & MARK == 0).then(|| fewer(w))).is_ok()
}

pub(crate) fn leave_marked(entry: &AtomicU64) {
    let _ = entry.fetch_update(SeqCst, SeqCst, |w| Some(fewer(w)));
}

/// Whether the entry pins what is at this address, and is marked now.
pub(crate) fn set_mark(entry: &AtomicU64, address: u64) -> bool {
    entry.fetch_update(SeqCst, SeqCst, |w| names(w, address).then_some(w | MARK)).is_ok()
}

fn fewer(word: u64) -> u64 {
    if word >= 2 * ONE { word - ONE } else { 0 }
}

/// Pins the object in this thread's table. `None` where threads count in the objects, or this one has no room.
#[inline]
pub fn pin(address: usize) -> Option<Pin> {
    if !ANY.load(Acquire) {
        return None;
    }
    published::own_table(Table::new)?.pin(key(address)?).map(Pin)
}

fn key(address: usize) -> Option<u64> {
    let a = address as u64;
    (a < ONE && a & MARK == 0).then_some(a)
}

/// Whether some thread has pinned the object.
pub fn is_pinned(address: usize) -> bool {
    search(address, |_| true)
}

/// Marks all pins of the object; whether there are any. They become no more only where who pins sees, after that, that the object
/// takes no pins any more.
pub fn mark(address: usize) -> bool {
    search(address, |e| set_mark(e, address as u64))
}

fn search(address: usize, mut found: impl FnMut(&'static AtomicU64) -> bool) -> bool {
    published::before_looking();
    if !ANY.load(SeqCst) {
        return false;
    }
    let Some(key) = key(address) else { return false };
    // all of them: each may have to be marked
    published::tables().filter_map(|t| t.find(key)).fold(false, |any, e| found(e) | any)
}

/// This thread uses an object that counts; whether another one used it last. Says when uses become pins.
#[inline]
pub fn note_use(strange: bool) {
    if ANY.load(Relaxed) {
        return;
    }
    published::with_uses(|uses| {
        let n = uses.strange.load(Relaxed);
        if !strange {
            if n > 0 {
                uses.strange.store(n - 1, Relaxed);
            }
        } else if n < STRANGE_MAX {
            uses.strange.store(n + STRANGE, Relaxed);
        } else if !ablation::is_on(Switch::Arcs) {
            ANY.store(true, SeqCst);
        }
    });
}

/// A number that tells this thread from most others that run now; never 0. Nothing is read of memory for it: it is made of the
/// address of what the thread has for itself, mostly at the end of its stack.
#[inline]
pub fn thread() -> u16 {
    thread_local!(static HERE: u8 = const { 0 });
    let at = HERE.with(|here| std::ptr::from_ref(here).addr()) as u64;
    // stacks, and the allocator's arenas, lie at multiples of large powers of two from each other
    (((at >> 6).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 48) as u16).max(1)
}

/// As if this thread had met many objects of others. For tests.
pub fn pin_from_now() {
    for _ in 0..=STRANGE_MAX / STRANGE {
        note_use(true);
    }
}

const _: () = assert!(STRANGE_MAX / STRANGE < 64, "within 64 uses");

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(align(16))]
    struct Object(#[expect(dead_code)] [u8; 16]);

    fn on_a_pinning_thread(f: impl FnOnce() + Send) {
        std::thread::scope(|s| {
            s.spawn(|| {
                pin_from_now();
                f();
            });
        });
    }

    #[test]
    fn counted_until_the_last_leaves() {
        let o = Object([0; 16]);
        let at = std::ptr::from_ref(&o).addr();
        on_a_pinning_thread(|| {
            assert!(!is_pinned(at) && !mark(at));
            let (a, b) = (pin(at).unwrap(), pin(at).unwrap());
            assert!(is_pinned(at));
            assert!(a.leave());
            assert!(is_pinned(at));
            // from another thread
            std::thread::scope(|s| s.spawn(|| assert!(b.leave())).join().unwrap());
            assert!(!is_pinned(at));
        });
    }

    #[test]
    fn a_marked_pin_says_so() {
        let o = Object([0; 16]);
        let at = std::ptr::from_ref(&o).addr();
        on_a_pinning_thread(|| {
            let (a, b) = (pin(at).unwrap(), pin(at).unwrap());
            assert!(mark(at));
            assert!(!a.leave() && !b.leave() && is_pinned(at));
            a.leave_marked();
            assert!(is_pinned(at) && !b.leave());
            b.leave_marked();
            assert!(!is_pinned(at) && !mark(at));
            // the mark goes with the last
            assert!(pin(at).unwrap().leave());
        });
    }

    #[test]
    fn a_full_table_takes_no_more_and_keeps_what_it_has() {
        let objects: Vec<Object> = (0..2 * ENTRIES).map(|_| Object([0; 16])).collect();
        on_a_pinning_thread(|| {
            let pins: Vec<_> = objects.iter().map(|o| pin(std::ptr::from_ref(o).addr())).collect();
            let taken = pins.iter().flatten().count();
            assert!(taken > ENTRIES / 2 && taken <= ENTRIES, "{taken}");
            for (o, p) in objects.iter().zip(&pins) {
                assert_eq!(is_pinned(std::ptr::from_ref(o).addr()), p.is_some());
            }
            pins.iter().flatten().for_each(|p| assert!(p.leave()));
            assert!(objects.iter().all(|o| !is_pinned(std::ptr::from_ref(o).addr())));
        });
    }
}
