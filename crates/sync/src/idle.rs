//! Where threads wait that have nothing to do.
//!
//! A thread that waits by `parking_lot` stands in a list that the process has for all of them. A child that is made by fork(2) inherits
//! the list, but not the threads; their stacks, with their places in the list, go to the threads that it starts, and these then are in
//! two queues at once, of which one is of nobody: who should be woken sleeps for ever. What `std` has keeps all of it in the condition
//! variable, which the child does not use. So whoever waits for longer than an operation takes does it here, and a child of a process
//! that is at no operation can open volumes of its own.

use crate::MutexGuard;
use std::sync::{Condvar, Mutex, MutexGuard as Turns, PoisonError};
use std::time::Duration;

/// As [`crate::Condvar`], for threads that may wait while the process forks.
#[derive(Debug, Default)]
pub struct IdleCondvar {
    /// Notifications so far. Taken with or without the lock that it is about, and nothing is waited for under it.
    turns: Mutex<u64>,
    changed: Condvar,
}

impl IdleCondvar {
    fn turns(&self) -> Turns<'_, u64> {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// Waits with the lock let go.
    ///
    /// # Panics
    /// As [`crate::Condvar::wait`].
    pub fn wait<T: ?Sized>(&self, guard: &mut MutexGuard<'_, T>) {
        let turns = self.turns();
        let seen = *turns;
        guard.without(|| drop(self.changed.wait_while(turns, |turns| *turns == seen)));
    }
    /// Waits so long at most.
    ///
    /// # Panics
    /// As [`crate::Condvar::wait`].
    pub fn wait_for<T: ?Sized>(&self, guard: &mut MutexGuard<'_, T>, time: Duration) {
        let turns = self.turns();
        let seen = *turns;
        guard.without(|| drop(self.changed.wait_timeout_while(turns, time, |turns| *turns == seen)));
    }
    /// Wakes all threads that wait.
    pub fn notify_all(&self) {
        *self.turns() += 1;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Mutex, rank};
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use std::time::Instant;

    #[test]
    fn who_waits_is_woken_by_the_next_change_and_sees_it() {
        let (flag, wake) = (Mutex::<u64, rank::StopFlag>::new(0), IdleCondvar::default());
        let seen = AtomicUsize::new(0);
        std::thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| {
                    for want in 1..=200 {
                        let mut value = flag.lock();
                        while *value < want {
                            wake.wait(&mut value);
                        }
                    }
                    seen.fetch_add(1, SeqCst);
                });
            }
            for n in 1..=200 {
                *flag.lock() = n;
                wake.notify_all();
            }
        });
        assert_eq!(seen.load(SeqCst), 4);
    }

    #[test]
    fn a_wait_ends_with_its_time() {
        let (flag, wake) = (Mutex::<(), rank::StopFlag>::new(()), IdleCondvar::default());
        let begun = Instant::now();
        wake.wait_for(&mut flag.lock(), Duration::from_millis(5));
        assert!(begun.elapsed() >= Duration::from_millis(5));
        assert!(flag.try_lock().is_some(), "the lock is let go with its guard");
    }
}
