//! The checker: what each thread holds, and whether it may wait for one more.

use crate::rank::{Class, Key, Many, Rank};
use std::cell::RefCell;
use std::fmt;
use std::marker::PhantomData;
use std::panic::Location;

/// One lock that this thread holds or is about to take.
#[derive(Debug, Clone, Copy)]
struct Entry {
    class: &'static Class,
    key: u64,
    /// Of the lock: which one of its class it is.
    address: usize,
    at: &'static Location<'static>,
    /// Whether the thread would have waited for it, where it was taken.
    waited: bool,
    /// Of the guard.
    id: u64,
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { class, key, at, .. } = self;
        write!(f, "`{}` (rank {}", class.name, class.rank)?;
        if class.many != Many::One {
            write!(f, ", number {key}")?;
        }
        write!(f, ") at {at}")
    }
}

#[derive(Debug, Default)]
struct Thread {
    held: Vec<Entry>,
    last_id: u64,
}

thread_local!(static THREAD: RefCell<Thread> = const { RefCell::new(Thread { held: Vec::new(), last_id: 0 }) });

/// Why `next` may not be waited for with `held`.
fn fault(held: &Entry, next: &Entry) -> Option<&'static str> {
    let (h, n) = (held.class, next.class);
    if held.address == next.address && h == n {
        return Some("a second entry of one lock");
    }
    if n.rank != h.rank {
        return (n.rank < h.rank).then_some("against the order of ranks");
    }
    if n.chain != h.chain {
        return Some("two of one rank that are taken each by itself");
    }
    if n.step != h.step {
        return (n.step < h.step).then_some("against the order within the rank");
    }
    match n.many {
        Many::One => Some("two locks of which one is taken at a time"),
        Many::Rising if next.key <= held.key => Some("against the order of their numbers"),
        Many::Rising | Many::Several => None,
    }
}

/// # Panics
/// Where the order forbids it; not while the thread panics already.
fn check(thread: &Thread, next: &Entry) {
    let wrong = thread.held.iter().rev().find_map(|held| fault(held, next).map(|why| (held, why)));
    if let Some((held, why)) = wrong
        && !std::thread::panicking()
    {
        panic!("lock order, {why}: takes {next}, holds {held}; docs/locking.md");
    }
}

/// What a lock says of itself.
pub struct Who<R: Rank> {
    key: R::Key,
}

impl<R: Rank> Who<R> {
    pub const fn new(key: R::Key) -> Self {
        Self { key }
    }
    /// `waited`: whether the thread would wait for it.
    #[track_caller]
    #[inline]
    fn held(&self, class: &'static Class, waited: bool) -> HeldLock {
        let (key, address, at) = (self.key.number(), std::ptr::from_ref(self).addr(), Location::caller());
        HeldLock::add(|id| Entry { class, key, address, at, waited, id })
    }
    /// Before this thread waits for the lock.
    ///
    /// # Panics
    /// Where the order forbids it.
    #[track_caller]
    pub fn wait(&self) -> HeldLock {
        let Some(class) = R::CLASS else { return HeldLock::none() };
        self.held(class, true)
    }
    /// After this thread has got the lock without waiting for it.
    #[track_caller]
    pub fn tried(&self) -> HeldLock {
        let Some(class) = R::CLASS else { return HeldLock::none() };
        self.held(class, false)
    }
    /// Before this thread waits for the lock as the second of two that are taken by rising keys.
    ///
    /// # Panics
    /// Where `first` is not held with a lower key, or the order forbids it.
    #[track_caller]
    pub fn wait_above(&self, first: &HeldLock) -> HeldLock {
        let held = self.wait();
        let key = self.key.number();
        THREAD.with_borrow(|t| {
            let first = t.held.iter().find(|e| e.id == first.id);
            if let Some(e) = first.filter(|e| e.key >= key) {
                panic!(
                    "lock order, against the order of their numbers: takes number {key} at {}, holds {e}",
                    Location::caller()
                );
            }
        });
        held
    }
}

/// Whether this thread has not waited for the lock `above` of rank `R` while it had `below`, of the two that it holds now. True
/// where it does not hold both.
pub fn taken_downwards<R: Rank>(above: R::Key, below: R::Key) -> bool {
    let (above, below) = (above.number(), below.number());
    THREAD.with_borrow(|t| {
        let of = |key| t.held.iter().position(|e| Some(e.class) == R::CLASS && e.key == key);
        let (Some(a), Some(b)) = (of(above), of(below)) else { return true };
        a <= b || !t.held[a].waited
    })
}

/// A lock is held, or waited for, by this thread for as long as this lives.
#[derive(Debug)]
pub struct HeldLock {
    /// 0: of no rank.
    id: u64,
    /// The list is this thread's.
    _here: PhantomData<std::sync::MutexGuard<'static, ()>>,
}

impl HeldLock {
    fn none() -> Self {
        Self { id: 0, _here: PhantomData }
    }
    /// `entry`: what is held, given its number. It is made at once, and taken away without a copy: what is written in some parts
    /// and read in others waits for the processor's stores, and locks are taken everywhere.
    #[inline]
    fn add(entry: impl FnOnce(u64) -> Entry) -> Self {
        // no list any more while the thread ends
        let id = THREAD.try_with(|t| {
            let mut t = t.borrow_mut();
            t.last_id += 1;
            let entry = entry(t.last_id);
            if entry.waited {
                check(&t, &entry);
            }
            let id = entry.id;
            t.held.push(entry);
            id
        });
        Self { id: id.unwrap_or(0), _here: PhantomData }
    }
    fn take(&self) -> Option<Entry> {
        let taken = THREAD.try_with(|t| {
            let mut t = t.borrow_mut();
            let at = t.held.iter().rposition(|e| e.id == self.id)?;
            Some(t.held.remove(at))
        });
        taken.ok().flatten()
    }
    /// Runs `f`, in which the lock is let go and taken again.
    ///
    /// # Panics
    /// Where the order forbids to take it again.
    pub fn without<T>(&self, f: impl FnOnce() -> T) -> T {
        let entry = self.take();
        let result = f();
        if let Some(entry) = entry {
            THREAD.with_borrow_mut(|t| {
                check(t, &entry);
                t.held.push(entry);
            });
        }
        result
    }
}

impl Drop for HeldLock {
    fn drop(&mut self) {
        if self.id == 0 {
            return;
        }
        let _ = THREAD.try_with(|t| {
            let mut t = t.borrow_mut();
            // mostly the last one
            let below = t.held.len().saturating_sub(1);
            if t.held.last().is_some_and(|e| e.id == self.id) {
                t.held.truncate(below);
            } else {
                t.held.retain(|e| e.id != self.id);
            }
        });
    }
}
