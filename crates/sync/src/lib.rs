//! The locks of braidfs: those of `parking_lot`, each with its rank in its type.
//!
//! In debug builds, and with the feature `lock-ranks`, which tests turn on, a thread that takes locks in another order than
//! docs/locking.md allows panics there and then, also where nobody waits for it. In a release build ranks are nothing.
//!
//! With the feature `schedule`, which only tests turn on, the locks know the scheduler of the module `schedule`: threads under it run
//! one at a time, in an order that a seed gives. Other threads see no difference.

pub mod ablation;
mod bias;
mod biased;
mod doors;
pub mod fetch;
mod idle;
pub mod lately;
mod locks;
pub mod membarrier;
#[cfg(all(test, loom))]
mod models;
#[cfg(loom)]
mod one_order;
#[cfg(any(debug_assertions, feature = "lock-ranks"))]
#[path = "order/checked.rs"]
mod order;
#[cfg(not(any(debug_assertions, feature = "lock-ranks")))]
#[path = "order/unchecked.rs"]
mod order;
mod pass;
pub mod phases;
pub mod pins;
pub mod published;
pub mod rank;
pub mod rounds;
#[cfg(feature = "schedule")]
pub mod schedule;
pub mod sections;
pub mod slots;
#[cfg(test)]
mod tests;
pub mod waits;
pub mod workers;

pub use biased::{BiasedReadGuard, BiasedRwLock, BiasedWriteGuard, Guarded};
pub use idle::IdleCondvar;
pub use locks::{Condvar, Mutex, MutexGuard, ProcessMutex, RwLock, RwLockReadGuard, RwLockWriteGuard, device};
pub use order::taken_downwards;
pub use pass::{PassLock, PassPart, PassReadGuard, PassWriteGuard};

use std::time::Duration;

/// Whether this build checks the order of locks.
pub const CHECKED: bool = cfg!(any(debug_assertions, feature = "lock-ranks"));

/// Locks that take no part in the order.
pub mod plain {
    /// A [`crate::Mutex`] without a rank.
    pub type Mutex<T> = crate::Mutex<T, crate::rank::Unranked>;
    /// A [`crate::RwLock`] without a rank.
    pub type RwLock<T> = crate::RwLock<T, crate::rank::Unranked>;
}

/// For a thread that waits for something that no lock guards, each time it looks; `turns` counts them.
pub fn give_way(turns: u32) {
    #[cfg(feature = "schedule")]
    if schedule::scheduled() {
        return schedule::blocked();
    }
    if turns < 64 { std::thread::yield_now() } else { std::thread::sleep(Duration::from_micros(50)) }
}
