//! Locks that let another thread run where they are taken, and in the place of waiting.
//!
//! The locks inside are ordinary ones, and so are the guards. A thread under the scheduler never waits for one: it tries,
//! and lets the others run until it gets it. So the scheduler always knows which thread runs.

use crate::schedule::{blocked, point, scheduled};
use parking_lot::{MutexGuard, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

/// Tries until it has it.
fn take<G>(mut attempt: impl FnMut() -> Option<G>, wait: impl FnOnce() -> G) -> G {
    if !scheduled() {
        return wait();
    }
    point();
    loop {
        if let Some(guard) = attempt() {
            return guard;
        }
        blocked();
    }
}

/// As `parking_lot::Mutex`.
#[derive(Debug, Default)]
pub struct Mutex<T: ?Sized>(parking_lot::Mutex<T>);

impl<T> Mutex<T> {
    /// A mutex around `value`.
    pub const fn new(value: T) -> Self {
        Self(parking_lot::Mutex::new(value))
    }
    /// The value.
    pub fn into_inner(self) -> T {
        self.0.into_inner()
    }
}

impl<T> From<T> for Mutex<T> {
    fn from(value: T) -> Self {
        Self::new(value)
    }
}

impl<T: ?Sized> Mutex<T> {
    /// Takes the lock.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        take(|| self.0.try_lock(), || self.0.lock())
    }
    /// Takes the lock where it is free.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        self.0.try_lock()
    }
    /// The value of a mutex that nobody else can see.
    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut()
    }
}

/// As `parking_lot::RwLock`.
#[derive(Debug, Default)]
pub struct RwLock<T: ?Sized>(parking_lot::RwLock<T>);

impl<T> RwLock<T> {
    /// A lock around `value`.
    pub const fn new(value: T) -> Self {
        Self(parking_lot::RwLock::new(value))
    }
    /// The value.
    pub fn into_inner(self) -> T {
        self.0.into_inner()
    }
}

impl<T: ?Sized> RwLock<T> {
    /// Takes it for reading.
    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        take(|| self.0.try_read(), || self.0.read())
    }
    /// Takes it for writing.
    pub fn write(&self) -> RwLockWriteGuard<'_, T> {
        take(|| self.0.try_write(), || self.0.write())
    }
    /// Takes it for reading where nobody writes.
    pub fn try_read(&self) -> Option<RwLockReadGuard<'_, T>> {
        self.0.try_read()
    }
    /// Takes it for writing where nobody has it.
    pub fn try_write(&self) -> Option<RwLockWriteGuard<'_, T>> {
        self.0.try_write()
    }
    /// The value of a lock that nobody else can see.
    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut()
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
    pub fn wait<T: ?Sized>(&self, guard: &mut MutexGuard<'_, T>) {
        if !scheduled() {
            return self.0.wait(guard);
        }
        let mutex = MutexGuard::mutex(guard);
        MutexGuard::unlocked(guard, || {
            // nobody else runs when this returns, so that a free lock stays free
            blocked();
            while mutex.is_locked() {
                blocked();
            }
        });
    }
    /// Waits so long at most; whether the time was over.
    pub fn wait_for<T: ?Sized>(&self, guard: &mut MutexGuard<'_, T>, time: Duration) -> parking_lot::WaitTimeoutResult {
        self.0.wait_for(guard, if scheduled() { Duration::ZERO } else { time })
    }
    /// Wakes one.
    pub fn notify_one(&self) -> bool {
        self.0.notify_one()
    }
    /// Wakes all.
    pub fn notify_all(&self) -> usize {
        self.0.notify_all()
    }
}
