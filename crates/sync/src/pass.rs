//! A lock that many read all the time and somebody writes now and then: the reader pass-through semaphore of Max (ATC '21,
//! section 4.1).
//!
//! Who reads it writes one line, that of its slot, and no other reader's. Who writes it keeps new readers out, looks at all
//! slots, and sleeps until those who are inside have left. Readers that come meanwhile wait for the writer's mutex.
//!
//! With [`Switch::Gate`], for experiments, an ordinary lock for readers and writers stands in the place of the slots.
//!
//! This is a low-level module: unsafe is the access to the value, by the guards.

use crate::ablation::{self, Switch};
use crate::doors::{Doors, Waiting};
use crate::order::{HeldLock, Who};
use crate::rank::Rank;
use crate::sections::Section;
use crate::slots;
use crate::waits::timed;
use parking_lot::RawRwLock;
use parking_lot::lock_api::RawRwLock as _;
use std::cell::UnsafeCell;
use std::fmt;
use std::ops::{Deref, DerefMut};

/// Looks of a writer at a slot in use before it sleeps.
const SPINS: u32 = 100;

/// See the module. Of rank `R`.
pub struct PassLock<T, R: Rank> {
    who: Who<R>,
    doors: Doors,
    /// In the place of the doors, which are then closed and opened, and not looked at by readers.
    word: Option<Box<slots::Line<RawRwLock>>>,
    /// Held by the one who writes; who finds the doors closed waits for it.
    writer: parking_lot::Mutex<()>,
    /// Where the writer sleeps.
    waiting: Waiting,
    value: UnsafeCell<T>,
}

// SAFETY: as of any lock for readers and writers: `&T` goes to several threads at a time, `&mut T` to one, which may take
// the value away.
unsafe impl<T: Send + Sync, R: Rank> Sync for PassLock<T, R> {}

/// The right to read what a [`PassLock`] guards.
pub struct PassReadGuard<'a, T, R: Rank> {
    lock: &'a PassLock<T, R>,
    /// Of no meaning with `PassLock::word`.
    slot: usize,
    _held: HeldLock,
}

/// The right to read a part of what a [`PassLock`] guards.
pub struct PassPart<'a, U, T, R: Rank> {
    part: std::ptr::NonNull<U>,
    _guard: PassReadGuard<'a, T, R>,
}

/// The right to change what a [`PassLock`] guards.
pub struct PassWriteGuard<'a, T, R: Rank> {
    lock: &'a PassLock<T, R>,
    /// Has the lock's word.
    word: bool,
    _writer: parking_lot::MutexGuard<'a, ()>,
    _held: HeldLock,
    /// After the doors are open again.
    _section: Option<Section>,
}

impl<T, R: Rank<Key = ()>> PassLock<T, R> {
    /// A lock around `value`.
    pub fn new(value: T) -> Self {
        Self::keyed(value, ())
    }
    /// [`Self::new`] of a device: a scheduler of tests stops threads at calls of the device as a whole, and in none.
    pub fn of_device(value: T) -> Self {
        let lock = Self::new(value);
        Self { doors: lock.doors.unscheduled(), ..lock }
    }
}

impl<T, R: Rank> PassLock<T, R> {
    /// A lock around `value`, which is `key` among those of its rank.
    pub fn keyed(value: T, key: R::Key) -> Self {
        Self::made(value, key, ablation::is_on(Switch::Gate))
    }

    fn made(value: T, key: R::Key, word: bool) -> Self {
        Self {
            who: Who::new(key),
            doors: Doors::new(slots::count()),
            word: word.then(|| Box::new(slots::Line(RawRwLock::INIT))),
            writer: parking_lot::Mutex::new(()),
            waiting: Waiting::new(),
            value: UnsafeCell::new(value),
        }
    }

    /// Takes it for reading.
    ///
    /// # Panics
    /// Against the order of ranks, where that is checked.
    #[inline(always)]
    #[track_caller]
    pub fn read(&self) -> PassReadGuard<'_, T, R> {
        let held = self.who.wait();
        self.doors.point();
        if let Some(word) = &self.word {
            crate::locks::take::<R, _>(true, || word.try_lock_shared().then_some(()), || word.lock_shared());
            return PassReadGuard { lock: self, slot: 0, _held: held };
        }
        let slot = self.doors.slot();
        while !self.doors.enter(slot) {
            self.leave(slot);
            self.wait_for_writer();
        }
        PassReadGuard { lock: self, slot, _held: held }
    }

    /// Takes it for writing.
    ///
    /// # Panics
    /// Against the order of ranks, where that is checked.
    #[track_caller]
    pub fn write(&self) -> PassWriteGuard<'_, T, R> {
        self.write_from(0)
    }

    /// [`Self::write`] that does not look at the slots below `first`: a bug on purpose, for the crash tests to find. For a
    /// value that outlives all who read it, by threads of which one runs at a time; else the behaviour is undefined.
    #[cfg(feature = "planted-bugs")]
    pub fn write_missing(&self, first: usize) -> PassWriteGuard<'_, T, R> {
        self.write_from(first)
    }

    #[track_caller]
    fn write_from(&self, first: usize) -> PassWriteGuard<'_, T, R> {
        let held = self.who.wait();
        let writer = crate::locks::take::<R, _>(true, || self.writer.try_lock(), || self.writer.lock());
        // opens them also where it does not come to its end
        let mut guard = PassWriteGuard { lock: self, word: false, _writer: writer, _held: held, _section: None };
        self.doors.close();
        if let Some(word) = &self.word {
            crate::locks::take::<R, _>(true, || word.try_lock_exclusive().then_some(()), || word.lock_exclusive());
            guard.word = true;
        }
        if let Some(taken) = self.doors.first_inside(first) {
            timed::<R, _>(|| self.wait_for_readers(taken));
        }
        guard._section = Some(Section::of(self));
        guard
    }

    /// Until nobody is inside, from a slot on; by who has closed the doors.
    fn wait_for_readers(&self, first: usize) {
        let mut slot = first;
        let mut spins = 0;
        while let Some(taken) = self.doors.first_inside(slot) {
            // those before have left, and nobody comes in
            slot = taken;
            spins += 1;
            if crate::locks::waits_by_turns() {
                #[cfg(feature = "schedule")]
                crate::schedule::blocked();
            } else if spins < SPINS {
                std::hint::spin_loop();
            } else {
                self.waiting.sleep_if(|| self.doors.first_inside(slot).is_some());
            }
        }
    }

    #[inline(always)]
    fn leave(&self, slot: usize) {
        if self.doors.leave(slot) {
            self.wake();
        }
    }

    #[cold]
    fn wake(&self) {
        self.waiting.wake();
    }

    #[cold]
    fn wait_for_writer(&self) {
        #[cfg(feature = "schedule")]
        if crate::schedule::scheduled() {
            while self.doors.is_closed() {
                crate::schedule::blocked();
            }
            return;
        }
        timed::<R, _>(|| drop(self.writer.lock()));
    }
}

impl<T: Default, R: Rank<Key = ()>> Default for PassLock<T, R> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T, R: Rank> fmt::Debug for PassLock<T, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PassLock").field("closed", &self.doors.is_closed()).finish_non_exhaustive()
    }
}

impl<T, R: Rank> Deref for PassReadGuard<'_, T, R> {
    type Target = T;
    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: counted in while the doors were open, or in the word, so that whoever writes waits until this guard is
        // dropped.
        unsafe { &*self.lock.value.get() }
    }
}

impl<'a, T, R: Rank> PassReadGuard<'a, T, R> {
    /// The right to read the part that `find` finds.
    pub fn find<U>(self, find: impl FnOnce(&T) -> Option<&U>) -> Option<PassPart<'a, U, T, R>> {
        let part = std::ptr::NonNull::from(find(&self)?);
        Some(PassPart { part, _guard: self })
    }
}

impl<U, T, R: Rank> Deref for PassPart<'_, U, T, R> {
    type Target = U;
    #[inline(always)]
    fn deref(&self) -> &U {
        // SAFETY: a part of the value, which nobody changes or moves while the guard lives.
        unsafe { self.part.as_ref() }
    }
}

impl<T, R: Rank> Drop for PassReadGuard<'_, T, R> {
    #[inline(always)]
    fn drop(&mut self) {
        match &self.lock.word {
            // SAFETY: `read` counted this guard in the word, and nobody else takes that count away.
            Some(word) => unsafe { word.unlock_shared() },
            None => self.lock.leave(self.slot),
        }
    }
}

impl<T, R: Rank> Deref for PassWriteGuard<'_, T, R> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: nobody is inside, nobody comes in, and one writes at a time.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T, R: Rank> DerefMut for PassWriteGuard<'_, T, R> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: nobody is inside, nobody comes in, one writes at a time, and `self` is borrowed for as long.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T, R: Rank> Drop for PassWriteGuard<'_, T, R> {
    fn drop(&mut self) {
        self.lock.doors.open();
        if let Some(word) = self.lock.word.as_ref().filter(|_| self.word) {
            // SAFETY: `write_from` took it for this guard.
            unsafe { word.unlock_exclusive() };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rank::Unranked;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
    use std::time::Duration;

    #[test]
    fn readers_see_what_one_writer_left() {
        read_and_write(&PassLock::made((0, 0), (), false));
    }

    #[test]
    fn readers_of_a_word_see_what_one_writer_left() {
        read_and_write(&PassLock::made((0, 0), (), true));
    }

    /// More threads than slots; the two halves differ while somebody writes.
    fn read_and_write(lock: &PassLock<(u64, u64), Unranked>) {
        let (over, reads) = (AtomicBool::new(false), AtomicUsize::new(0));
        std::thread::scope(|s| {
            for _ in 0..slots::count() + 3 {
                s.spawn(|| {
                    while !over.load(Relaxed) {
                        let v = lock.read();
                        assert_eq!(v.0, v.1);
                        reads.fetch_add(1, Relaxed);
                    }
                });
            }
            let writers: Vec<_> = (0..2)
                .map(|_| {
                    s.spawn(|| {
                        for _ in 0..500 {
                            let mut v = lock.write();
                            v.0 += 1;
                            std::hint::spin_loop();
                            v.1 += 1;
                        }
                    })
                })
                .collect();
            writers.into_iter().for_each(|w| w.join().unwrap());
            over.store(true, Relaxed);
        });
        assert_eq!(*lock.read(), (1000, 1000));
        assert!(reads.into_inner() > 0);
    }

    #[test]
    fn a_part_is_read_as_long_as_it_is_used() {
        let lock = PassLock::<Vec<String>, Unranked>::new(vec!["a".into(), "b".into()]);
        assert!(lock.read().find(|v| v.get(2)).is_none());
        let part = lock.read().find(|v| v.get(1)).unwrap();
        std::thread::scope(|s| {
            let writer = s.spawn(|| lock.write().clear());
            while !lock.doors.is_closed() {
                std::thread::yield_now();
            }
            assert_eq!(*part, "b");
            drop(part);
            writer.join().unwrap();
        });
        assert!(lock.read().is_empty());
    }

    /// A writer sleeps while one is inside for long; others wait for it, and go on.
    #[test]
    fn a_writer_waits_for_who_is_inside_and_others_for_it() {
        let lock = PassLock::<u32, Unranked>::new(1);
        std::thread::scope(|s| {
            let inside = lock.read();
            let writer = s.spawn(|| *lock.write() += 1);
            while !lock.doors.is_closed() {
                std::thread::yield_now();
            }
            let late = s.spawn(|| *lock.read());
            std::thread::sleep(Duration::from_millis(20));
            assert!(!writer.is_finished() && !late.is_finished());
            assert_eq!(*inside, 1);
            drop(inside);
            writer.join().unwrap();
            assert_eq!(late.join().unwrap(), 2);
        });
    }
}
