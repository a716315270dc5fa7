//! Who asks most: a table of fixed size for each serving thread, filled only while somebody watches.
//!
//! FUSE tells the number of the asking thread (0: the kernel itself, which writes back and reads ahead, or a thread of another
//! namespace). A thread that finds no place takes that of the one that asked least among a few; what that had is lost. Each
//! watch (its number: a generation) begins with an empty table.
//!
//! A table takes some 64 KiB, however many ask.

use super::histogram::{BUCKETS, Coarse};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, Ordering::Relaxed, fence};

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
    timed: AtomicU64,
    nanos: AtomicU64,
    /// Until the answer.
    latency: Coarse,
}

/// See the module. One thread writes it.
#[derive(Debug)]
pub(crate) struct Processes {
    places: [Place; PLACES],
    /// Of which watch the counts are.
    generation: AtomicU64,
}

/// What a thread asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Asked {
    pub requests: u64,
    /// Those that were timed, and how long their handlers took.
    pub timed: u64,
    pub nanos: u64,
    /// How long they waited for the answer, in the buckets of a histogram.
    pub latency: [u64; BUCKETS],
}

impl Default for Asked {
    fn default() -> Self {
        Self { requests: 0, timed: 0, nanos: 0, latency: [0; BUCKETS] }
    }
}

impl Asked {
    /// What another thread served of the same one's.
    pub fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.timed += other.timed;
        self.nanos += other.nanos;
        self.add_latency(other);
    }

    /// Times of answers alone.
    pub fn add_latency(&mut self, other: &Self) {
        self.latency.iter_mut().zip(&other.latency).for_each(|(sum, n)| *sum += n);
    }
}

/// The times of a request, where it is timed.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Took {
    /// Its handler, nanoseconds.
    pub handler: Option<u64>,
    /// Until its answer, nanoseconds; of one that is answered later, by another thread, that counts it for itself.
    pub answer: Option<u64>,
}

impl Default for Processes {
    fn default() -> Self {
        let place = |_| Place {
            thread: AtomicU32::new(NOBODY),
            requests: AtomicU64::new(0),
            timed: AtomicU64::new(0),
            nanos: AtomicU64::new(0),
            latency: Coarse::default(),
        };
        Self { places: std::array::from_fn(place), generation: AtomicU64::new(0) }
    }
}

impl Place {
    /// It belongs to that thread from now on. Who reads meanwhile takes no other's counts for this thread's.
    fn give_to(&self, thread: u32) {
        self.thread.store(NOBODY, Relaxed);
        // Who sees one of these stores sees the one above, too.
        fence(Ordering::Release);
        self.requests.store(0, Relaxed);
        self.timed.store(0, Relaxed);
        self.nanos.store(0, Relaxed);
        self.latency.clear();
        self.thread.store(thread, Ordering::Release);
    }

    fn read(&self) -> Option<(u32, Asked)> {
        self.read_while(|| ())
    }

    /// [`Self::read`]; `meanwhile` is for tests: what the writer does.
    fn read_while(&self, meanwhile: impl FnOnce()) -> Option<(u32, Asked)> {
        let thread = self.thread.load(Ordering::Acquire);
        meanwhile();
        let mut asked = Asked {
            requests: self.requests.load(Relaxed),
            timed: self.timed.load(Relaxed),
            nanos: self.nanos.load(Relaxed),
            ..Asked::default()
        };
        self.latency.add_to(&mut asked.latency);
        fence(Ordering::Acquire);
        (thread != NOBODY && thread == self.thread.load(Relaxed)).then_some((thread, asked))
    }
}

impl Processes {
    /// A request of a thread was handled, or answered.
    pub fn count(&self, generation: u64, thread: u32, took: Took) {
        if self.generation.load(Relaxed) != generation {
            self.places.iter().for_each(|p| p.give_to(NOBODY));
            self.generation.store(generation, Ordering::Release);
        }
        let place = self.place(thread);
        let rise = |n: &AtomicU64, by: u64| n.store(n.load(Relaxed).wrapping_add(by), Relaxed);
        rise(&place.requests, 1);
        if let Some(nanos) = took.handler {
            rise(&place.timed, 1);
            rise(&place.nanos, nanos);
        }
        if let Some(nanos) = took.answer {
            place.latency.record(nanos);
        }
    }

    fn place(&self, thread: u32) -> &Place {
        let first = (thread.wrapping_mul(0x9e37_79b9) >> (32 - PLACES.trailing_zeros())) as usize;
        let mut least = &self.places[first];
        for i in 0..PROBES {
            let place = &self.places[(first + i) % PLACES];
            if place.thread.load(Relaxed) == thread {
                return place;
            }
            if place.requests.load(Relaxed) < least.requests.load(Relaxed) {
                least = place;
            }
        }
        least.give_to(thread);
        least
    }

    /// All threads that it knows of that watch.
    pub fn of(&self, generation: u64) -> impl Iterator<Item = (u32, Asked)> {
        let is_of = self.generation.load(Ordering::Acquire) == generation;
        self.places.iter().filter(move |_| is_of).filter_map(Place::read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::watch::sample::Latency;

    fn took(nanos: u64) -> Took {
        Took { handler: Some(nanos), answer: Some(nanos * 2) }
    }

    #[test]
    fn who_asks_most_stays_among_many_who_ask_once() {
        let p = Processes::default();
        for n in 0..50_000u32 {
            p.count(1, 7, took(1000));
            p.count(1, 0, if n % 16 == 0 { took(3) } else { Took::default() });
            // threads that come and go
            p.count(1, 1000 + n, took(1 << 40));
        }
        let of = |thread| p.of(1).find(|x| x.0 == thread).unwrap().1;
        let told = |thread| {
            let asked = of(thread);
            let latency = Latency::new(&asked.latency);
            (asked.requests, asked.timed, asked.nanos, latency.count(), latency.quantile(1.0))
        };
        assert_eq!(told(7), (50_000, 50_000, 50_000_000, 50_000, Some(2048)), "and no times of those that went");
        assert_eq!(told(0), (50_000, 3125, 9375, 3125, Some(256)));
        let others = p.of(1).filter(|(thread, _)| *thread >= 1000);
        let times: Vec<u64> = others.map(|(_, asked)| asked.latency.iter().sum()).collect();
        assert!(times.len() > 100 && times.iter().all(|n| *n == 1), "whose place it was is forgotten: {times:?}");
        assert!(p.of(1).count() <= PLACES && p.of(2).count() == 0);
    }

    #[test]
    fn who_reads_takes_no_others_counts_for_a_threads() {
        let p = Processes::default();
        p.count(1, 7, took(10));
        let place = p.place(7);
        assert_eq!(place.read().map(|x| x.0), Some(7));
        let given_away = || {
            place.give_to(8);
            place.requests.store(5, Relaxed);
        };
        assert_eq!(place.read_while(given_away), None);
        assert_eq!(place.read(), Some((8, Asked { requests: 5, ..Asked::default() })));
    }
}
