//! Locks of `parking_lot` with a rank; for tests also under a scheduler.
//!
//! In a release build they are those of `parking_lot`, of the same size and with the same code. With the checker (`order`)
//! each tells it before this thread waits for it. With the feature `schedule` they let another thread run where they are
//! taken, and in the place of waiting: a thread under the scheduler tries, and lets the others run until it gets the lock,
//! so that the scheduler always knows which thread runs.

use crate::order::{HeldLock, Who};
use crate::rank::Rank;
#[cfg(feature = "schedule")]
use crate::schedule::{blocked, point, scheduled};
use crate::sections::Section;
use crate::waits::timed;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::time::Duration;

/// Takes a lock of rank `R`; a thread under the scheduler tries until it has it.
#[inline(always)]
pub(crate) fn take<R: Rank, G>(seen: bool, attempt: impl FnMut() -> Option<G>, wait: impl FnOnce() -> G) -> G {
    #[cfg(feature = "schedule")]
    if seen && scheduled() {
        let mut attempt = attempt;
        point();
        loop {
            if let Some(guard) = attempt() {
                return guard;
            }
            blocked();
        }
    }
    #[cfg(feature = "lock-waits")]
    {
        let mut attempt = attempt;
        if let Some(guard) = attempt() {
            return guard;
        }
    }
    #[cfg(not(feature = "lock-waits"))]
    drop(attempt);
    let _ = seen;
    timed::<R, G>(wait)
}

/// Lets the others run once, in the place of waiting; whether this thread is under the scheduler.
#[inline(always)]
pub(crate) fn waits_by_turns() -> bool {
    #[cfg(feature = "schedule")]
    return scheduled();
    #[cfg(not(feature = "schedule"))]
    false
}

/// As `parking_lot::Mutex`, of rank `R`. `SCHEDULED`: whether the scheduler of tests knows it.
pub struct Mutex<T: ?Sized, R: Rank, const SCHEDULED: bool = true> {
    who: Who<R>,
    lock: parking_lot::Mutex<T>,
}

/// For what all volumes of the process share, and under which no other lock is taken: a scheduler knows only its own
/// threads.
pub type ProcessMutex<T, R> = Mutex<T, R, false>;

/// Locks of devices: a scheduler stops threads at calls of the device as a whole, and in none.
pub mod device {
    /// A [`super::Mutex`] of a device.
    pub type Mutex<T, R> = super::Mutex<T, R, false>;
    /// A [`super::RwLock`] of a device.
    pub type RwLock<T, R> = super::RwLock<T, R, false>;
}

/// The right to use what a [`Mutex`] guards.
#[derive(Debug)]
pub struct MutexGuard<'a, T: ?Sized> {
    guard: parking_lot::MutexGuard<'a, T>,
    held: HeldLock,
    /// Its end comes after the lock is let go.
    section: Section,
}

impl<T, R: Rank<Key = ()>, const S: bool> Mutex<T, R, S> {
    /// A mutex around `value`.
    pub const fn new(value: T) -> Self {
        Self { who: Who::new(()), lock: parking_lot::Mutex::new(value) }
    }
}

impl<T, R: Rank, const S: bool> Mutex<T, R, S> {
    /// Gives the value back, without a lock.
    pub fn into_inner(self) -> T {
        self.lock.into_inner()
    }
}

impl<T: Default, R: Rank<Key = ()>, const S: bool> Default for Mutex<T, R, S> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T: ?Sized + fmt::Debug, R: Rank, const S: bool> fmt::Debug for Mutex<T, R, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lock.fmt(f)
    }
}

impl<T: ?Sized, R: Rank, const S: bool> Mutex<T, R, S> {
    /// Takes the lock.
    ///
    /// # Panics
    /// Against the order of ranks, where that is checked.
    #[inline(always)]
    #[track_caller]
    pub fn lock(&self) -> MutexGuard<'_, T> {
        let held = self.who.wait();
        let guard = take::<R, _>(S, || self.lock.try_lock(), || self.lock.lock());
        MutexGuard { guard, held, section: Section::of(&self.lock) }
    }
    /// Checks that this thread may wait for the lock: for who waits for another one that takes it.
    ///
    /// # Panics
    /// Against the order of ranks, where that is checked.
    #[inline(always)]
    #[track_caller]
    pub fn may_wait(&self) {
        drop(self.who.wait());
    }
    /// Takes the lock where it becomes free in `time`; a thread under the scheduler, whenever it does.
    ///
    /// # Panics
    /// Against the order of ranks, where that is checked.
    #[track_caller]
    pub fn lock_within(&self, time: Duration) -> Option<MutexGuard<'_, T>> {
        let held = self.who.wait();
        let guard = take::<R, _>(S, || self.lock.try_lock().map(Some), || self.lock.try_lock_for(time))?;
        Some(MutexGuard { guard, held, section: Section::of(&self.lock) })
    }
    /// Takes the lock where it is free.
    #[inline(always)]
    #[track_caller]
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        let guard = self.lock.try_lock()?;
        Some(MutexGuard { guard, held: self.who.tried(), section: Section::of(&self.lock) })
    }
    /// The value of a mutex that nobody else can see.
    pub fn get_mut(&mut self) -> &mut T {
        self.lock.get_mut()
    }
}

impl<T: ?Sized> MutexGuard<'_, T> {
    /// Calls `wait` with the lock let go; a thread under the scheduler lets the others run once instead.
    pub(crate) fn without(&mut self, wait: impl FnOnce()) {
        let Self { guard, held, section } = self;
        let wait = || {
            #[cfg(feature = "schedule")]
            if scheduled() {
                // with what it holds: the scheduler does not see who waits for that
                drop(wait);
                return let_others_run(guard);
            }
            parking_lot::MutexGuard::unlocked(guard, wait);
        };
        section.without(|| held.without(wait));
    }
}

/// The place of a wait of a thread under the scheduler.
#[cfg(feature = "schedule")]
fn let_others_run<T: ?Sized>(guard: &mut parking_lot::MutexGuard<'_, T>) {
    let mutex = parking_lot::MutexGuard::mutex(guard);
    parking_lot::MutexGuard::unlocked(guard, || {
        // nobody else runs when this returns, so that a free lock stays free
        blocked();
        while mutex.is_locked() {
            blocked();
        }
    });
}

impl<T: ?Sized> Deref for MutexGuard<'_, T> {
    type Target = T;
    #[inline(always)]
    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T: ?Sized> DerefMut for MutexGuard<'_, T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

/// As `parking_lot::RwLock`, of rank `R`. `SCHEDULED`: as of a [`Mutex`].
pub struct RwLock<T: ?Sized, R: Rank, const SCHEDULED: bool = true> {
    who: Who<R>,
    lock: parking_lot::RwLock<T>,
}

/// The right to read what a [`RwLock`] guards.
#[derive(Debug)]
pub struct RwLockReadGuard<'a, T: ?Sized> {
    guard: parking_lot::RwLockReadGuard<'a, T>,
    /// A thread that reads twice would wait for a writer that waits for it.
    _held: HeldLock,
}

/// The right to change what a [`RwLock`] guards.
#[derive(Debug)]
pub struct RwLockWriteGuard<'a, T: ?Sized> {
    guard: parking_lot::RwLockWriteGuard<'a, T>,
    held: HeldLock,
    _section: Section,
}

impl<T, R: Rank<Key = ()>, const S: bool> RwLock<T, R, S> {
    /// A lock around `value`.
    pub const fn new(value: T) -> Self {
        Self::keyed(value, ())
    }
}

impl<T, R: Rank, const S: bool> RwLock<T, R, S> {
    /// A lock around `value`, which is `key` among those of its rank.
    pub const fn keyed(value: T, key: R::Key) -> Self {
        Self { who: Who::new(key), lock: parking_lot::RwLock::new(value) }
    }
    /// Gives the value back, without a lock.
    pub fn into_inner(self) -> T {
        self.lock.into_inner()
    }
}

impl<T: Default, R: Rank<Key = ()>, const S: bool> Default for RwLock<T, R, S> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T: ?Sized + fmt::Debug, R: Rank, const S: bool> fmt::Debug for RwLock<T, R, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lock.fmt(f)
    }
}

impl<T: ?Sized, R: Rank, const S: bool> RwLock<T, R, S> {
    /// Takes it for reading.
    ///
    /// # Panics
    /// Against the order of ranks, where that is checked.
    #[inline(always)]
    #[track_caller]
    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        let held = self.who.wait();
        RwLockReadGuard { guard: take::<R, _>(S, || self.lock.try_read(), || self.lock.read()), _held: held }
    }
    /// Takes it for writing.
    ///
    /// # Panics
    /// Against the order of ranks, where that is checked.
    #[inline(always)]
    #[track_caller]
    pub fn write(&self) -> RwLockWriteGuard<'_, T> {
        let held = self.who.wait();
        let guard = take::<R, _>(S, || self.lock.try_write(), || self.lock.write());
        RwLockWriteGuard { guard, held, _section: Section::of(&self.lock) }
    }
    /// [`Self::write`], as the second of two locks of one rank that are taken by rising keys.
    ///
    /// # Panics
    /// Where the key of `first` is not below, or against the order of ranks, where that is checked.
    #[inline(always)]
    #[track_caller]
    pub fn write_above<U: ?Sized>(&self, first: &RwLockWriteGuard<'_, U>) -> RwLockWriteGuard<'_, T> {
        let held = self.who.wait_above(&first.held);
        let guard = take::<R, _>(S, || self.lock.try_write(), || self.lock.write());
        RwLockWriteGuard { guard, held, _section: Section::of(&self.lock) }
    }
    /// Takes it for reading where nobody writes.
    #[inline(always)]
    #[track_caller]
    pub fn try_read(&self) -> Option<RwLockReadGuard<'_, T>> {
        let guard = self.lock.try_read()?;
        Some(RwLockReadGuard { guard, _held: self.who.tried() })
    }
    /// Takes it for writing where nobody has it.
    #[inline(always)]
    #[track_caller]
    pub fn try_write(&self) -> Option<RwLockWriteGuard<'_, T>> {
        let guard = self.lock.try_write()?;
        Some(RwLockWriteGuard { guard, held: self.who.tried(), _section: Section::of(&self.lock) })
    }
    /// The value of a lock that nobody else can see.
    pub fn get_mut(&mut self) -> &mut T {
        self.lock.get_mut()
    }
}

impl<T: ?Sized> Deref for RwLockReadGuard<'_, T> {
    type Target = T;
    #[inline(always)]
    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T: ?Sized> Deref for RwLockWriteGuard<'_, T> {
    type Target = T;
    #[inline(always)]
    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T: ?Sized> DerefMut for RwLockWriteGuard<'_, T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

/// As `parking_lot::Condvar`. Under the scheduler a wait ends after any turn of the others, as a wait may.
#[derive(Debug, Default)]
pub struct Condvar(parking_lot::Condvar);

impl Condvar {
    /// A condition that nobody waits for.
    pub const fn new() -> Self {
        Self(parking_lot::Condvar::new())
    }
    /// Waits with the lock let go.
    ///
    /// # Panics
    /// Where the order of ranks forbids to take the lock again, where that is checked.
    pub fn wait<T: ?Sized>(&self, guard: &mut MutexGuard<'_, T>) {
        let MutexGuard { guard, held, section } = guard;
        let wait = || {
            #[cfg(feature = "schedule")]
            if scheduled() {
                return let_others_run(guard);
            }
            self.0.wait(guard);
        };
        section.without(|| held.without(wait));
    }
    /// Waits so long at most; whether the time was over.
    ///
    /// # Panics
    /// As [`Self::wait`].
    pub fn wait_for<T: ?Sized>(&self, guard: &mut MutexGuard<'_, T>, time: Duration) -> parking_lot::WaitTimeoutResult {
        let time = if waits_by_turns() { Duration::ZERO } else { time };
        let MutexGuard { guard, held, section } = guard;
        section.without(|| held.without(|| self.0.wait_for(guard, time)))
    }
    /// Wakes one thread that waits; whether there was one.
    pub fn notify_one(&self) -> bool {
        self.0.notify_one()
    }
    /// Wakes all threads that wait; how many there were.
    pub fn notify_all(&self) -> usize {
        self.0.notify_all()
    }
}
