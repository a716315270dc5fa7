//! Which thread does an fsync of a front end: the one that asks, or one that does several together.
//!
//! Handing an fsync to another thread and back costs two wake-ups, on a fast device more than the device itself. A thread
//! that waits for the device serves nobody meanwhile. So: on the thread that asks, where few are under way and the device is
//! quick; else it joins a queue, and one thread takes all that wait there, writes them in one submission and flushes once.
//! What comes meanwhile is the next group.
//!
//! Of a volume on several devices each domain has a queue of its own, so that a device that does not answer holds up nobody
//! else's.

use super::queue::{SMALL_PAGES, Serving, UnderWay, Waiting};
use super::ticket::{Settled, Ticket};
use crate::cell::Body;
use crate::error::Result;
use crate::panics::{caught, error_of};
use crate::types::*;
use crate::volume::MountedVolume;
use crossbeam::channel::{Receiver, unbounded};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Who is told of fsyncs, by several threads.
struct ToTell {
    all: Receiver<Settled>,
    /// A thread was asked to go on with them, and has not come yet: where all are short it finds nothing left.
    coming: AtomicBool,
}

/// What a panic is said to have been in.
const FSYNC: &str = "an fsync";

impl MountedVolume {
    /// Syncs on the thread that asks, where that takes nothing from others: [`crate::Volume::fsync_here`].
    pub(crate) fn fsync_here(&self, ino: InodeNo, data_only: bool, threads: usize) -> Option<Result<()>> {
        let s = &self.syncing;
        let (under_way, others) = UnderWay::begin(&*s.under_way);
        let began = s.pace.now();
        let done = if s.pace.admits(others, threads, began) && self.is_small(ino) {
            self.fsync_together(&[(ino, data_only)]).pop().flatten()
        } else {
            None
        };
        drop(under_way);
        if done.is_some() {
            s.pace.took(s.pace.now() - began);
        }
        done
    }

    /// Whether an fsync of the inode has little data to write. True where there is none: the fsync says so.
    fn is_small(&self, ino: InodeNo) -> bool {
        let Ok(Some(c)) = self.find(ino) else { return true };
        // who has it locked may be about to write it
        let Some(st) = c.state.try_read() else { return false };
        !matches!(&st.body, Body::File(f) if f.pages.dirty_count() > SMALL_PAGES)
    }

    /// Puts a sync in the queue: [`crate::Volume::fsync_start`].
    pub(crate) fn fsync_start(self: &Arc<Self>, ino: InodeNo, data_only: bool) -> Ticket {
        if self.pool.read().is_none() {
            return Ticket::ready(self.fsync(ino, data_only));
        }
        let (ticket, pending) = Ticket::pending();
        let (under_way, _) = UnderWay::begin(self.syncing.under_way.clone());
        let waiting = Waiting { ino, data_only, under_way, ticket: pending };
        let which = self.queue_of(ino);
        let serve = {
            let mut q = self.syncing.queues[which].lock();
            q.waiting.push(waiting);
            !std::mem::replace(&mut q.served, true)
        };
        if serve {
            let i = self.clone();
            self.run_beside(move || i.serve_syncs(which));
        }
        ticket
    }

    /// Has a thread do it; where there is none it is done here, with no lock: code of users' may run.
    pub(super) fn run_beside(&self, work: impl FnOnce() + Send + 'static) {
        let pool = self.pool.read();
        let Some(threads) = &*pool else {
            drop(pool);
            return work();
        };
        let undone = threads.run(work);
        drop(pool);
        undone.work();
    }

    /// Has a thread do it; where there is none it comes back.
    fn offer<F: FnOnce() + Send + 'static>(&self, work: F) -> std::result::Result<(), F> {
        match &*self.pool.read() {
            Some(threads) => threads.offer(work),
            None => Err(work),
        }
    }

    fn queue_of(&self, ino: InodeNo) -> usize {
        // a device may be added, or removed, meanwhile: each queue is served by itself
        match self.store.devices() {
            1 => 0,
            // one that no domain has is told so by any
            _ => self.domain_of(ino).map_or(0, |d| usize::from(d.id.0)),
        }
    }

    /// Does the fsyncs of a queue, group by group, until nobody waits there, or until it has code of users' to run. These may take
    /// long, wait for another sync, or for a lock with which somebody waits for one: another thread goes on with the queue
    /// first.
    pub(super) fn serve_syncs(self: &Arc<Self>, which: usize) {
        let s = &self.syncing;
        let serving = Serving(&s.queues[which]);
        // what is done when the queue is given up: fsyncs that no thread does, and code of users'
        let (mut here, mut told) = (Vec::new(), Vec::new());
        while let Some(group) = serving.next() {
            braidfs_sync::phases::next();
            let began = s.pace.now();
            let files: Vec<(InodeNo, bool)> = group.iter().map(|w| (w.ino, w.data_only)).collect();
            // who asked is told out here: what a user does then is not part of the panic
            let results = caught(FSYNC, || self.fsync_together(&files));
            if results.is_some() {
                s.pace.took(s.pace.now() - began);
            }
            let results = results.unwrap_or_else(|| files.iter().map(|_| Some(Err(error_of(FSYNC)))).collect());
            let mut alone = Vec::new();
            for (w, result) in group.into_iter().zip(results) {
                match result {
                    Some(r) => told.push(w.settle(r)),
                    None => alone.push(w),
                }
            }
            here.extend(alone.into_iter().filter_map(|w| self.offer(self.alone(w)).err()));
            if here.is_empty() && !told.iter().any(Settled::may_wait) {
                told.clear();
                continue;
            }
            let i = self.clone();
            if serving.end_if_empty() || self.offer(move || i.serve_syncs(which)).is_ok() {
                break;
            }
            // there is nobody else: those who wait come first
        }
        here.into_iter().for_each(|work| work());
        // last: it may wait for long
        self.tell_all(told);
    }

    /// Runs code of users' that is told of fsyncs. Of one group each may wait for another one, so no thread has two of them before it,
    /// as long as there are threads.
    fn tell_all(self: &Arc<Self>, told: Vec<Settled>) {
        let (may_wait, quick): (Vec<_>, Vec<_>) = told.into_iter().partition(Settled::may_wait);
        drop(quick);
        if may_wait.len() < 2 {
            return; // nobody is behind another one
        }
        let (send, all) = unbounded();
        may_wait.into_iter().for_each(|one| drop(send.send(one)));
        self.tell(&Arc::new(ToTell { all, coming: AtomicBool::new(false) }));
    }

    fn tell(self: &Arc<Self>, told: &Arc<ToTell>) {
        while let Ok(one) = told.all.try_recv() {
            if !told.all.is_empty() && !told.coming.swap(true, Ordering::AcqRel) {
                let (i, others) = (self.clone(), told.clone());
                let go_on = move || {
                    others.coming.store(false, Ordering::Release);
                    i.tell(&others);
                };
                if self.offer(go_on).is_err() {
                    // one after the other
                    told.coming.store(false, Ordering::Release);
                }
            }
            drop(one);
        }
    }

    /// An fsync that commits, or waits for something else: not before others.
    fn alone(self: &Arc<Self>, w: Waiting) -> impl FnOnce() + Send + 'static {
        let i = self.clone();
        move || {
            let r = caught(FSYNC, || i.fsync(w.ino, w.data_only)).unwrap_or_else(|| Err(error_of(FSYNC)));
            drop(w.settle(r));
        }
    }
}
