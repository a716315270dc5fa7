//! Who asks most: a table of fixed size for each serving thread, filled only while somebody watches.
//!
//! FUSE tells the number of the asking thread (0: the kernel itself, which writes back and reads ahead, or a thread of another
//! namespace). A thread that finds no place takes that of the one that asked least among a few; what that had is lost.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

/// Threads that one table knows.
const PLACES: usize = 128;
/// Places that a thread may have.
const PROBES: usize = 4;

/// Not the number of any thread.
const NOBODY: u32 = u32::MAX;

#[derive(Debug)]
struct Place {
    thread: AtomicU32,
    requests: AtomicU64,
    nanos: AtomicU64,
}

/// See the module. One thread writes it.
#[derive(Debug)]
pub(crate) struct Processes([Place; PLACES]);

impl Default for Processes {
    fn default() -> Self {
        Self(std::array::from_fn(|_| Place {
            thread: AtomicU32::new(NOBODY),
            requests: AtomicU64::new(0),
            nanos: AtomicU64::new(0),
        }))
    }
}

impl Processes {
    /// A request of a thread was handled, in so much time.
    pub fn count(&self, thread: u32, nanos: u64) {
        let place = self.place(thread);
        let rise = |n: &AtomicU64, by: u64| n.store(n.load(Relaxed).wrapping_add(by), Relaxed);
        rise(&place.requests, 1);
        rise(&place.nanos, nanos);
    }

    fn place(&self, thread: u32) -> &Place {
        let first = (thread.wrapping_mul(0x9e37_79b9) >> (32 - PLACES.trailing_zeros())) as usize;
        let mut least = &self.0[first];
        for i in 0..PROBES {
            let place = &self.0[(first + i) % PLACES];
            if place.thread.load(Relaxed) == thread {
                return place;
            }
            if place.requests.load(Relaxed) < least.requests.load(Relaxed) {
                least = place;
            }
        }
        // Who reads meanwhile takes no other's counts for this thread's.
        least.thread.store(NOBODY, Relaxed);
        least.requests.store(0, Relaxed);
        least.nanos.store(0, Relaxed);
        least.thread.store(thread, Relaxed);
        least
    }

    /// (thread, requests, nanoseconds) of all that it knows.
    pub fn iter(&self) -> impl Iterator<Item = (u32, u64, u64)> {
        let known = |p: &Place| {
            let thread = p.thread.load(Relaxed);
            (thread != NOBODY).then(|| (thread, p.requests.load(Relaxed), p.nanos.load(Relaxed)))
        };
        self.0.iter().filter_map(known)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asks_most_stays_among_many_who_ask_once() {
        let p = Processes::default();
        for n in 0..50_000u32 {
            p.count(7, 10);
            p.count(0, 3);
            // threads that come and go
            p.count(1000 + n, 1);
        }
        let of = |thread| p.iter().find(|x| x.0 == thread);
        assert_eq!((of(7), of(0)), (Some((7, 50_000, 500_000)), Some((0, 50_000, 150_000))));
        assert!(p.iter().count() <= PLACES);
    }
}
