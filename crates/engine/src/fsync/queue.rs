//! Which thread does an fsync of a front end: the one that asks, or one that does several together.
//!
//! Handing an fsync to another thread and back costs two wake-ups, on a fast device more than the device itself. A thread
//! that waits for the device serves nobody meanwhile. So: on the thread that asks, where few are under way and the device is
//! quick; else it joins a queue, and one thread takes all that wait there, writes them in one submission and flushes once.
//! What comes meanwhile is the next group.
//!
//! Of a volume on several devices each domain has a queue of its own, so that a device that does not answer holds up nobody
//! else's.

use super::ticket::{Pending, Ticket};
use crate::cell::Body;
use crate::error::Result;
use crate::types::*;
use crate::volume::MountedVolume;
use braidfs_sync::{Mutex, rank};
use crossbeam::utils::CachePadded;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

/// An fsync that takes longer is handed over: the hand-over is little beside it, and others would wait long for its thread.
const QUICK_NS: u64 = 500_000;
/// After so many waited at once that groups are formed, they are formed for so long.
const CROWDED_NS: u64 = 10_000_000;
/// Dirty pages of a file that a serving thread writes itself at most: more than that takes long on any device.
const SMALL_PAGES: usize = 256;
/// Files that are written together at most.
const GROUP_MAX: usize = 64;

/// See the module.
#[derive(Debug)]
pub(crate) struct Syncing {
    /// Of front ends, not done yet.
    under_way: CachePadded<AtomicUsize>,
    pace: Pace,
    queues: Box<[Mutex<Queue, rank::SyncQueue>]>,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: Vec<Waiting>,
    /// A thread takes from it.
    served: bool,
}

#[derive(Debug)]
struct Waiting {
    ino: NodeId,
    data_only: bool,
    ticket: Pending,
}

/// How long fsyncs took lately, and whether many came at once.
#[derive(Debug)]
struct Pace {
    began: Instant,
    /// Average of the last ones, ns.
    lately: AtomicU64,
    /// Until when it is crowded, ns since `began`.
    crowded: AtomicU64,
}

impl Pace {
    /// Whether a thread may wait for the device itself, when `others` fsyncs are under way and `threads` may do so at once.
    fn admits(&self, others: usize, threads: usize, now: u64) -> bool {
        if others > threads {
            self.crowded.store(now + CROWDED_NS, Relaxed);
        }
        others < threads && self.lately.load(Relaxed) <= QUICK_NS && now >= self.crowded.load(Relaxed)
    }

    /// One took so long. Where a busy machine, or a commit, holds up one of many, that says little of the device.
    fn took(&self, ns: u64) {
        // a lost update does not matter
        let old = self.lately.load(Relaxed);
        self.lately.store(old - old / 8 + ns.min(2 * QUICK_NS) / 8, Relaxed);
    }

    fn now(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64
    }
}

impl Syncing {
    /// For a volume of so many domains and devices.
    pub fn new(domains: usize, devices: usize) -> Self {
        let queues = if devices == 1 { 1 } else { domains };
        Self {
            under_way: CachePadded::default(),
            pace: Pace { began: Instant::now(), lately: AtomicU64::new(0), crowded: AtomicU64::new(0) },
            queues: (0..queues).map(|_| Mutex::default()).collect(),
        }
    }
}

/// A thread that serves a queue. Where it panics, who waits there is told by the end of their tickets.
struct Serving<'a>(&'a Mutex<Queue, rank::SyncQueue>);

impl Serving<'_> {
    /// The next group; `None` where nobody waits: the queue is not served any more.
    fn next(&self) -> Option<Vec<Waiting>> {
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

impl MountedVolume {
    /// See [`crate::Volume::fsync_here`].
    pub(crate) fn fsync_here(&self, ino: NodeId, data_only: bool, threads: usize) -> Option<Result<()>> {
        let s = &self.syncing;
        let others = s.under_way.fetch_add(1, Relaxed);
        let began = s.pace.now();
        let done = if s.pace.admits(others, threads, began) && self.is_small(ino) {
            self.fsync_together(&[(ino, data_only)]).pop().flatten()
        } else {
            None
        };
        s.under_way.fetch_sub(1, Relaxed);
        if done.is_some() {
            s.pace.took(s.pace.now() - began);
        }
        done
    }

    /// Whether an fsync of the inode has little data to write. True where there is none: the fsync says so.
    fn is_small(&self, ino: NodeId) -> bool {
        let Ok(c) = self.cell(ino) else { return true };
        // who has it locked may be about to write it
        let Some(st) = c.state.try_read() else { return false };
        !matches!(&st.body, Body::File(f) if f.pages.dirty_count() > SMALL_PAGES)
    }

    /// See [`crate::Volume::fsync_start`].
    pub(crate) fn fsync_start(self: &Arc<Self>, ino: NodeId, data_only: bool) -> Ticket {
        let pool = self.pool.read();
        let Some(pool) = &*pool else { return Ticket::ready(self.fsync(ino, data_only)) };
        let (ticket, pending) = Ticket::pending();
        self.syncing.under_way.fetch_add(1, Relaxed);
        let waiting = Waiting { ino, data_only, ticket: pending };
        let which = self.queue_of(ino);
        let serve = {
            let mut q = self.syncing.queues[which].lock();
            q.waiting.push(waiting);
            !std::mem::replace(&mut q.served, true)
        };
        if serve {
            let i = self.clone();
            pool.run(move || i.serve_syncs(which));
        }
        ticket
    }

    fn queue_of(&self, ino: NodeId) -> usize {
        match self.syncing.queues.len() {
            1 => 0,
            // one that no domain has is told so by any
            _ => self.domain(ino).map_or(0, |d| usize::from(d.id.0)),
        }
    }

    /// Does the fsyncs of a queue, group by group, until nobody waits there.
    fn serve_syncs(self: &Arc<Self>, which: usize) {
        let s = &self.syncing;
        let serving = Serving(&s.queues[which]);
        while let Some(group) = serving.next() {
            let began = s.pace.now();
            let files: Vec<(NodeId, bool)> = group.iter().map(|w| (w.ino, w.data_only)).collect();
            let results = self.fsync_together(&files);
            s.pace.took(s.pace.now() - began);
            for (w, result) in group.into_iter().zip(results) {
                match result {
                    Some(r) => self.synced(w, r),
                    None => self.sync_alone(w),
                }
            }
        }
    }

    /// An fsync that commits, or waits for something else: not before others.
    fn sync_alone(self: &Arc<Self>, w: Waiting) {
        let i = self.clone();
        let work = move || {
            let r = i.fsync(w.ino, w.data_only);
            i.synced(w, r);
        };
        // only tried: an unmount holds it while it waits for this thread
        match self.pool.try_read().as_deref() {
            Some(Some(pool)) => pool.run(work),
            _ => work(),
        }
    }

    fn synced(&self, w: Waiting, r: Result<()>) {
        self.syncing.under_way.fetch_sub(1, Relaxed);
        w.ticket.finish(r);
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
