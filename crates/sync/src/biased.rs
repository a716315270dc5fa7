//! A lock for reading and writing whose readers write to no common line once several threads read, and of which one that reads
//! all the time alone needs no locked instruction ([`crate::bias`]).
//!
//! This is a low-level module with unsafe code: a published reader looks at the value past the lock below.

#[cfg(test)]
mod tests;

use crate::bias::{Bias, Readers};
use crate::locks::take;
use crate::order::{HeldLock, Who};
use crate::published::{self, Place};
use crate::rank::Rank;
use crate::sections::Section;
use crate::waits::timed;
use std::fmt;
use std::ops::{Deref, DerefMut};

/// What a [`BiasedRwLock`] guards. Readers may change what in it has an order of its own (atomics, locks).
pub trait Guarded {
    /// Puts together what readers changed side by side. Called for each writer, before it sees the value.
    #[inline(always)]
    fn merge_slots(&mut self) {}
    /// Whether so many threads read that they are to publish themselves from the end of a write on, and not only after some
    /// turns.
    #[inline(always)]
    fn is_shared(&self) -> bool {
        false
    }
}

/// As [`crate::RwLock`]; `T` is `Sync`, as readers of several threads always are. The mark lies beside the lock below: who writes
/// touches both.
#[repr(C)]
pub struct BiasedRwLock<T, R: Rank> {
    who: Who<R>,
    bias: Bias,
    lock: parking_lot::RwLock<T>,
}

/// How a reader keeps writers out.
enum Reader<'a, T> {
    /// Counted in the lock below.
    Counted(#[expect(dead_code, reason = "held")] parking_lot::RwLockReadGuard<'a, T>),
    /// On the thread's own line.
    Published(&'static Place),
}

impl<T> Drop for Reader<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        if let Self::Published(place) = self {
            place.clear();
        }
    }
}

/// The right to read what a [`BiasedRwLock`] guards.
pub struct BiasedReadGuard<'a, T> {
    value: *const T,
    #[cfg_attr(not(test), expect(dead_code, reason = "held"))]
    reader: Reader<'a, T>,
    _held: HeldLock,
}

/// The right to change what a [`BiasedRwLock`] guards.
#[derive(Debug)]
pub struct BiasedWriteGuard<'a, T: Guarded> {
    guard: parking_lot::RwLockWriteGuard<'a, T>,
    bias: &'a Bias,
    held: HeldLock,
    _section: Section,
}

impl<T: Guarded> Drop for BiasedWriteGuard<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        if self.guard.is_shared() {
            // the last that the writer does: from here on readers look at the value past the lock below
            self.bias.set();
        }
    }
}

impl<T: Guarded, R: Rank<Key = ()>> BiasedRwLock<T, R> {
    /// A lock around `value`.
    pub fn new(value: T) -> Self {
        Self::keyed(value, ())
    }
}

impl<T: Guarded, R: Rank> BiasedRwLock<T, R> {
    /// A lock around `value`, which is `key` among those of its rank.
    #[inline]
    pub fn keyed(value: T, key: R::Key) -> Self {
        Self { who: Who::new(key), bias: Bias::new(), lock: parking_lot::RwLock::new(value) }
    }
    /// Gives the value back, without a lock.
    pub fn into_inner(self) -> T {
        self.lock.into_inner()
    }
    fn address(&self) -> usize {
        std::ptr::from_ref(&self.bias).addr()
    }
    /// As a published reader, where the lock has a mark.
    #[inline(always)]
    fn enter(&self) -> Option<Reader<'_, T>> {
        let at = self.address();
        let number = published::reader_number();
        let place = self.bias.enter(number, || published::publish(at), || published::publish_without_fence(at))?;
        Some(Reader::Published(place))
    }
    #[inline(always)]
    fn counted<'a>(&self, guard: parking_lot::RwLockReadGuard<'a, T>) -> Reader<'a, T> {
        self.bias.note_reader(published::reader_number());
        Reader::Counted(guard)
    }
    #[inline(always)]
    fn attempt_read(&self) -> Option<Reader<'_, T>> {
        if self.bias.has_mark()
            && let Some(reader) = self.enter()
        {
            return Some(reader);
        }
        self.lock.try_read().map(|g| self.counted(g))
    }
    #[inline(always)]
    fn wait_to_read(&self) -> Reader<'_, T> {
        if self.bias.has_mark()
            && let Some(reader) = self.enter()
        {
            return reader;
        }
        self.counted(self.lock.read())
    }
    /// Takes it for reading.
    ///
    /// # Panics
    /// Against the order of ranks, where that is checked.
    #[inline(always)]
    #[track_caller]
    pub fn read(&self) -> BiasedReadGuard<'_, T> {
        let held = self.who.wait();
        // not by way of a closure in a build that is shipped: it would not be inlined
        #[cfg(any(feature = "schedule", feature = "lock-waits"))]
        let reader = take::<R, _>(true, || self.attempt_read(), || self.wait_to_read());
        #[cfg(not(any(feature = "schedule", feature = "lock-waits")))]
        let reader = self.wait_to_read();
        BiasedReadGuard { reader, value: self.lock.data_ptr(), _held: held }
    }
    /// Takes it for reading where nobody writes.
    #[inline(always)]
    #[track_caller]
    pub fn try_read(&self) -> Option<BiasedReadGuard<'_, T>> {
        let reader = self.attempt_read()?;
        Some(BiasedReadGuard { reader, value: self.lock.data_ptr(), _held: self.who.tried() })
    }
    #[inline(always)]
    fn wait_for_write(&self) -> parking_lot::RwLockWriteGuard<'_, T> {
        let mut guard = take::<R, _>(true, || self.lock.try_write(), || self.lock.write());
        if let Some(readers) = self.bias.clear(published::reader_number) {
            timed::<R, _>(|| self.drain(readers));
            self.bias.put_off_owner(readers);
        }
        guard.merge_slots();
        guard
    }
    #[cold]
    #[inline(never)]
    fn drain(&self, readers: Readers) {
        published::wait_until_unread(readers, self.address());
    }
    /// Takes it for writing.
    ///
    /// # Panics
    /// Against the order of ranks, where that is checked.
    #[inline(always)]
    #[track_caller]
    pub fn write(&self) -> BiasedWriteGuard<'_, T> {
        let held = self.who.wait();
        BiasedWriteGuard { guard: self.wait_for_write(), bias: &self.bias, held, _section: Section::of(&self.lock) }
    }
    /// [`Self::write`], as the second of two locks of one rank that are taken by rising keys.
    ///
    /// # Panics
    /// Where the key of `first` is not below, or against the order of ranks, where that is checked.
    #[inline(always)]
    #[track_caller]
    pub fn write_above<U: Guarded>(&self, first: &BiasedWriteGuard<'_, U>) -> BiasedWriteGuard<'_, T> {
        let held = self.who.wait_above(&first.held);
        BiasedWriteGuard { guard: self.wait_for_write(), bias: &self.bias, held, _section: Section::of(&self.lock) }
    }
    /// Takes it for writing where nobody has it.
    #[inline(always)]
    #[track_caller]
    pub fn try_write(&self) -> Option<BiasedWriteGuard<'_, T>> {
        let mut guard = self.lock.try_write()?;
        if let Some(readers) = self.bias.clear(published::reader_number) {
            if published::is_published_by(readers, self.address()) {
                self.bias.restore(readers);
                return None;
            }
            self.bias.put_off_owner(readers);
        }
        guard.merge_slots();
        Some(BiasedWriteGuard { guard, bias: &self.bias, held: self.who.tried(), _section: Section::of(&self.lock) })
    }
    /// The value of a lock that nobody else can see. What readers changed is not put together.
    pub fn get_mut(&mut self) -> &mut T {
        self.lock.get_mut()
    }
    /// The value, without the lock.
    ///
    /// # Safety
    /// Nobody has the lock for writing, nor takes it so, as long as the reference lives.
    #[inline(always)]
    pub unsafe fn unlocked(&self) -> &T {
        // SAFETY: the caller says that there is no writer
        unsafe { &*self.lock.data_ptr() }
    }
    /// Whether all readers publish themselves now.
    #[cfg(test)]
    pub(crate) fn is_biased(&self) -> bool {
        self.bias.is_set()
    }
    /// Whether this thread reads without a fence now.
    #[cfg(test)]
    pub(crate) fn is_owned(&self) -> bool {
        self.bias.owner() == Some(published::reader_number())
    }
}

impl<T: fmt::Debug, R: Rank> fmt::Debug for BiasedRwLock<T, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lock.fmt(f)
    }
}

impl<T: fmt::Debug> fmt::Debug for BiasedReadGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

// SAFETY: what a lock of parking_lot asks, and that readers of several threads may look at the value at once, which
// parking_lot's asks too. (The compiler does not see it: the guard's pointer is the only reason for these lines.)
unsafe impl<T: Sync> Sync for BiasedReadGuard<'_, T> {}

impl<T> Deref for BiasedReadGuard<'_, T> {
    type Target = T;
    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: the value lives as long as the lock, which the guard borrows. Nobody writes to it: this reader is counted in
        // the lock below, or a writer clears the mark, and then waits until the place is clear, which it is when
        // this guard is dropped (`Bias::enter`).
        unsafe { &*self.value }
    }
}

impl<T: Guarded> Deref for BiasedWriteGuard<'_, T> {
    type Target = T;
    #[inline(always)]
    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T: Guarded> DerefMut for BiasedWriteGuard<'_, T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}
