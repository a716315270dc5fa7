//! Atomics of loom whose sequentially consistent accesses are that. loom takes them for such that only acquire and release, and knows
//! an order of fences only: here what reads with [`Ordering::SeqCst`] comes after a fence where its thread has written with `SeqCst` since
//! the last one. Where the code asks for less, on either side, there is none: the models see that.

use loom::sync::atomic::{self, Ordering, Ordering::SeqCst};
use std::cell::Cell;

loom::thread_local! {
    /// The thread has written with `SeqCst` since its last fence.
    static WROTE: Cell<bool> = Cell::new(false);
}

/// A fence, as the code makes it by itself.
pub(crate) fn fence(order: Ordering) {
    atomic::fence(order);
    if order == SeqCst {
        WROTE.with(|w| w.set(false));
    }
}

fn wrote(order: Ordering) {
    if order == SeqCst {
        WROTE.with(|w| w.set(true));
    }
}

fn before_read(order: Ordering) {
    if order == SeqCst && WROTE.with(Cell::get) {
        fence(SeqCst);
    }
}

macro_rules! atomics {
    ($($name:ident: $value:ty),*) => { $(
        #[derive(Debug)]
        pub(crate) struct $name(atomic::$name);

        #[allow(dead_code, reason = "each has what one of the others has")]
        impl $name {
            pub(crate) fn new(value: $value) -> Self {
                Self(atomic::$name::new(value))
            }
            pub(crate) fn load(&self, order: Ordering) -> $value {
                before_read(order);
                self.0.load(order)
            }
            pub(crate) fn store(&self, value: $value, order: Ordering) {
                self.0.store(value, order);
                wrote(order);
            }
            pub(crate) fn swap(&self, value: $value, order: Ordering) -> $value {
                before_read(order);
                let old = self.0.swap(value, order);
                wrote(order);
                old
            }
            pub(crate) fn compare_exchange(
                &self,
                old: $value,
                new: $value,
                order: Ordering,
                failed: Ordering,
            ) -> Result<$value, $value> {
                before_read(order);
                let done = self.0.compare_exchange(old, new, order, failed);
                if done.is_ok() {
                    wrote(order);
                }
                done
            }
            pub(crate) fn fetch_update(
                &self,
                order: Ordering,
                failed: Ordering,
                f: impl FnMut($value) -> Option<$value>,
            ) -> Result<$value, $value> {
                before_read(order);
                let done = self.0.fetch_update(order, failed, f);
                if done.is_ok() {
                    wrote(order);
                }
                done
            }
        }
    )* };
}

macro_rules! counts {
    ($($name:ident: $value:ty),*) => { $(
        #[allow(dead_code, reason = "each has what one of the others has")]
        impl $name {
            pub(crate) fn fetch_add(&self, n: $value, order: Ordering) -> $value {
                before_read(order);
                let old = self.0.fetch_add(n, order);
                wrote(order);
                old
            }
            pub(crate) fn fetch_sub(&self, n: $value, order: Ordering) -> $value {
                before_read(order);
                let old = self.0.fetch_sub(n, order);
                wrote(order);
                old
            }
        }
    )* };
}

atomics!(AtomicBool: bool, AtomicU32: u32, AtomicU64: u64, AtomicUsize: usize);
counts!(AtomicU32: u32, AtomicU64: u64, AtomicUsize: usize);
