//! Fsyncs of a front end that wait, and how long they took lately.

use super::ticket::{Pending, Settled};
use crate::error::Result;
use crate::types::*;
use braidfs_sync::{Mutex, rank};
use crossbeam::utils::CachePadded;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

/// An fsync that takes longer is handed over: the hand-over is little beside it, and others would wait long for its thread.
const QUICK_NS: u64 = 500_000;
/// After so many waited at once that groups are formed, they are formed for so long.
const CROWDED_NS: u64 = 10_000_000;
/// Dirty pages of a file that a serving thread writes itself at most: more than that takes long on any device.
pub(super) const SMALL_PAGES: usize = 256;
/// Files that are written together at most.
const GROUP_MAX: usize = 64;

/// See the module.
#[derive(Debug)]
pub(crate) struct Syncing {
    /// Of front ends, not done yet.
    pub(super) under_way: Arc<CachePadded<AtomicUsize>>,
    pub(super) pace: Pace,
    /// One per domain; where all lie on one device the first serves all.
    pub(super) queues: Box<[Mutex<Queue, rank::SyncQueue>]>,
}

#[derive(Debug, Default)]
pub(super) struct Queue {
    pub(super) waiting: Vec<Waiting>,
    /// A thread takes from it.
    pub(super) served: bool,
}

/// Dropped without a result it tells of an error.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) ino: InodeNo,
    pub(super) data_only: bool,
    /// Before the ticket: who is told finds one less under way.
    pub(super) under_way: UnderWay<Arc<CachePadded<AtomicUsize>>>,
    pub(super) ticket: Pending,
}

impl Waiting {
    /// It is over: [`Pending::settle`].
    #[must_use]
    pub(super) fn settle(self, r: Result<()>) -> Settled {
        drop(self.under_way);
        self.ticket.settle(r)
    }
}

/// A sync is counted as long as this is there.
#[derive(Debug)]
pub(super) struct UnderWay<C: Deref<Target = CachePadded<AtomicUsize>>>(C);

impl<C: Deref<Target = CachePadded<AtomicUsize>>> UnderWay<C> {
    /// Counts one; how many there were before.
    pub(super) fn begin(count: C) -> (Self, usize) {
        let others = count.fetch_add(1, Relaxed);
        (Self(count), others)
    }
}

impl<C: Deref<Target = CachePadded<AtomicUsize>>> Drop for UnderWay<C> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

/// How long fsyncs took lately, and whether many came at once.
#[derive(Debug)]
pub(super) struct Pace {
    began: Instant,
    /// Average of the last ones, ns.
    lately: AtomicU64,
    /// Until when it is crowded, ns since `began`.
    crowded: AtomicU64,
}

impl Pace {
    /// Whether a thread may wait for the device itself, when `others` fsyncs are under way and `threads` may do so at once.
    pub(super) fn admits(&self, others: usize, threads: usize, now: u64) -> bool {
        if others > threads {
            self.crowded.store(now + CROWDED_NS, Relaxed);
        }
        others < threads && self.lately.load(Relaxed) <= QUICK_NS && now >= self.crowded.load(Relaxed)
    }

    /// One took so long. Where a busy machine, or a commit, holds up one of many, that says little of the device.
    pub(super) fn took(&self, ns: u64) {
        // a lost update does not matter
        let old = self.lately.load(Relaxed);
        self.lately.store(old - old / 8 + ns.min(2 * QUICK_NS) / 8, Relaxed);
    }

    pub(super) fn now(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64
    }
}

impl Syncing {
    /// For a volume of so many domains at most.
    pub fn new(domains: usize) -> Self {
        Self {
            under_way: Arc::default(),
            pace: Pace { began: Instant::now(), lately: AtomicU64::new(0), crowded: AtomicU64::new(0) },
            queues: (0..domains).map(|_| Mutex::default()).collect(),
        }
    }
}

/// A thread that serves a queue. Where it panics, who waits there is told by the end of their tickets.
pub(super) struct Serving<'a>(pub(super) &'a Mutex<Queue, rank::SyncQueue>);

impl Serving<'_> {
    /// Gives the queue up where nobody waits; whether it has.
    pub(super) fn end_if_empty(&self) -> bool {
        let mut q = self.0.lock();
        q.served = !q.waiting.is_empty();
        !q.served
    }

    /// The next group; `None` where nobody waits: the queue is not served any more.
    pub(super) fn next(&self) -> Option<Vec<Waiting>> {
        let mut q = self.0.lock();
        let n = q.waiting.len().min(GROUP_MAX);
        q.served = n > 0;
        q.served.then(|| q.waiting.drain(..n).collect())
    }
}

impl Drop for Serving<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let left = {
                let mut q = self.0.lock();
                q.served = false;
                std::mem::take(&mut q.waiting)
            };
            drop(left);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pace() -> Pace {
        Pace { began: Instant::now(), lately: AtomicU64::new(0), crowded: AtomicU64::new(0) }
    }

    #[test]
    fn one_alone_is_served_where_it_arrives() {
        let p = pace();
        assert!(p.admits(0, 1, 0) && p.admits(2, 3, 0));
        assert!(!p.admits(1, 1, 0) && !p.admits(0, 0, 0));
        assert!(p.admits(0, 1, 0), "two at once are no crowd");
    }

    #[test]
    fn a_crowd_forms_groups_for_a_while() {
        let p = pace();
        assert!(!p.admits(2, 1, 1000));
        assert!(!p.admits(0, 1, 1000 + CROWDED_NS - 1), "one of the many that come again and again");
        assert!(p.admits(0, 1, 1000 + CROWDED_NS));
    }

    #[test]
    fn nobody_waits_for_a_slow_device_itself() {
        let p = pace();
        (0..100).for_each(|_| p.took(100_000));
        p.took(50_000_000);
        assert!(p.admits(0, 1, 0), "one of many");
        (0..40).for_each(|_| p.took(5_000_000));
        assert!(!p.admits(0, 1, 0));
        (0..40).for_each(|_| p.took(100_000));
        assert!(p.admits(0, 1, 0), "it has become quick");
    }
}
