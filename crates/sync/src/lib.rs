//! The locks of the engine: those of `parking_lot`, and nothing else.
//!
//! With the feature `schedule`, which only tests turn on, the same names stand for locks that know the scheduler of
//! [`schedule`]: threads under it run one at a time, in an order that a seed gives. Other threads see no difference.

#[cfg(feature = "schedule")]
mod locks;
#[cfg(feature = "schedule")]
pub mod schedule;

#[cfg(feature = "schedule")]
pub use locks::{Condvar, Mutex, RwLock};
/// For what all volumes of the process share, and under which no other lock is taken: a scheduler knows only its own
/// threads.
pub use parking_lot::Mutex as ProcessMutex;
#[cfg(not(feature = "schedule"))]
pub use parking_lot::{Condvar, Mutex, RwLock};
pub use parking_lot::{MutexGuard, RwLockReadGuard, RwLockWriteGuard};

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

/// For a thread that waits for something that no lock guards, each time it looks; `turns` counts them.
pub fn give_way(turns: u32) {
    #[cfg(feature = "schedule")]
    if schedule::scheduled() {
        return schedule::blocked();
    }
    if turns < 64 { std::thread::yield_now() } else { std::thread::sleep(Duration::from_micros(50)) }
}

/// A small number for this thread, from `next`: of a thread under the scheduler the number that it has there, so that runs
/// with the same seed are the same.
pub fn thread_number(next: &AtomicUsize) -> usize {
    #[cfg(feature = "schedule")]
    if let Some(n) = schedule::number() {
        return n;
    }
    next.fetch_add(1, Relaxed)
}
