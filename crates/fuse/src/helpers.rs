//! The helper threads: they do what serving threads must not wait for, since it may wait for what these answer. So the kernel
//! writes back pages before a request goes on, and requests wait for FORGETs.
//!
//! Whoever serves hands a job over ([`Jobs::send`]), threads of the session do it ([`Work::start`]). One is always there; one that
//! takes a job while nobody else is idle starts another one first, and who had nothing to do for [`IDLE`], while others had nothing
//! either, ends. There are [`MOST`] of them at most.
//!
//! **Who waits for whom.** A job may take long: a page to be written back may be locked by a READ that waits for a slow device. So
//! jobs are of [kinds](Kind), each of which has threads that no other kind takes: who waits for pages keeps nobody from `df`, nor
//! from room. Of a kind's threads the requests of one user, or of one tenant's mount, have a half ([`Whose`]), and what is next is
//! of who has fewest of them.
//!
//! **Order.** Jobs of one kind are begun in the order in which they came, but for that; and several are done at once. These are not:
//! - all that has to do with the room of domains ([`Kind::Room`]): it has the kernel write back what was granted, and what is granted
//!   is one ledger for the whole mount, of which one thread at a time may do so ([`crate::dirty_grants`]);
//! - questions of owners with limits that have an owner in common ([`Jobs::send_for`]): each owner has such a ledger. Of one owner
//!   they are begun in their order, too;
//! - requests that wait for another connection ([`Kind::Borders`]): two that want the same inode would keep it from each other;
//! - what the kernel is to drop ([`Kind::Drops`]), since nobody waits for it.
//!
//! No job waits for another one.

use crate::channel::Channel;
use crate::fs::BraidFs;
use crate::request::Request;
use crate::requester;
use crate::session::{Slot, spawn_thread};
use braidfs::QuotaOwner;
use braidfs_sync::{Condvar, Mutex, phases, rank};
use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::Scope;
use std::time::Duration;

/// Work for a helper thread, which may wait for the serving threads (they must never wait for each other). Dropped, it is not done:
/// a request that it was to answer gets EIO.
pub(crate) type Job = Box<dyn FnOnce(&BraidFs) + Send>;

/// A thread but the first that had nothing to do for so long ends.
const IDLE: Duration = Duration::from_millis(if cfg!(test) { 50 } else { 5000 });
/// Threads there are at most: as many as all kinds may have.
pub(crate) const MOST: usize = {
    let (mut all, mut n) = (0, 0);
    while n < Kind::ALL.len() {
        all += Kind::ALL[n].most();
        n += 1;
    }
    all
};

/// What a job is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Has the kernel write back and drop pages of a file, for a request that waits for that.
    Pages,
    /// Has a request handled when removals have ended that are under way.
    Removals,
    /// Has a request handled for which there is room by now.
    Requests,
    /// Has the kernel write back what was granted to owners with limits.
    Quota,
    /// The same of domains with little room, and all that changes what the kernel may hold.
    Room,
    /// Has a request handled that waits for another connection.
    Borders,
    /// Has the kernel drop inodes, which nobody waits for.
    Drops,
}

impl Kind {
    const ALL: [Self; 7] =
        [Self::Pages, Self::Removals, Self::Requests, Self::Quota, Self::Room, Self::Borders, Self::Drops];

    /// Jobs of it that are done at once.
    const fn most(self) -> usize {
        match self {
            Self::Pages => 5,
            Self::Removals | Self::Requests | Self::Quota => 3,
            // one after the other
            Self::Room | Self::Borders | Self::Drops => 1,
        }
    }

    /// Of these for one user, or tenant.
    const fn most_of_one(self) -> usize {
        self.most().div_ceil(2)
    }
}

/// Whose request a job is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Whose {
    /// No request's.
    Mount,
    /// A user's, by number; all those that cannot be told are one.
    User(u32),
    /// That of any user of a tenant's own mount; its domain.
    Tenant(u16),
}

impl Whose {
    pub fn of(req: &Request<'_>, channel: &Channel) -> Self {
        match channel.own() {
            Some(own) => Self::Tenant(own.domain.0),
            None => Self::User(requester::uid(req).unwrap_or(u32::MAX)),
        }
    }
}

/// What is told of a job when it is handed over.
struct Told {
    kind: Kind,
    whose: Whose,
    /// Of what it writes back.
    owners: Vec<QuotaOwner>,
    /// Rises with each job.
    number: u64,
}

#[derive(Default)]
struct State {
    /// By kind, the oldest first.
    waiting: [VecDeque<(Told, Job)>; Kind::ALL.len()],
    /// Being done.
    running: Vec<Told>,
    /// Jobs so far.
    number: u64,
    /// Threads that have nothing to do.
    idle: usize,
    /// Which [places](Work::start) are taken.
    places: [bool; MOST],
    /// No further job will come.
    closed: bool,
    /// Nobody does what comes.
    gone: bool,
}

impl State {
    fn is_empty(&self) -> bool {
        self.waiting.iter().all(VecDeque::is_empty)
    }

    /// Of a kind the job that is to be begun now, by its place.
    fn ready_of(&self, kind: Kind) -> Option<usize> {
        let queue = &self.waiting[kind as usize];
        let running = || self.running.iter().filter(|r| r.kind == kind);
        if queue.is_empty() || running().count() >= kind.most() {
            return None;
        }
        let mut busy: Vec<QuotaOwner> = running().flat_map(|r| &r.owners).copied().collect();
        let mut best = None;
        for (at, (told, _)) in queue.iter().enumerate() {
            let waits = told.owners.iter().any(|owner| busy.contains(owner));
            // who comes after it waits for it, too
            told.owners.iter().for_each(|owner| {
                if !busy.contains(owner) {
                    busy.push(*owner);
                }
            });
            let its = if told.whose == Whose::Mount { 0 } else { running().filter(|r| r.whose == told.whose).count() };
            if waits || its >= kind.most_of_one() || best.is_some_and(|(fewest, _)| fewest <= its) {
                continue;
            }
            best = Some((its, at));
            if its == 0 {
                break;
            }
        }
        best.map(|(_, at)| at)
    }

    /// The oldest of those that are to be begun now.
    fn ready(&self) -> Option<(Kind, usize)> {
        let ready = Kind::ALL.into_iter().filter_map(|kind| Some((kind, self.ready_of(kind)?)));
        ready.min_by_key(|(kind, at)| self.waiting[*kind as usize][*at].0.number)
    }

    fn take(&mut self, (kind, at): (Kind, usize)) -> Option<(u64, Job)> {
        let (told, job) = self.waiting[kind as usize].remove(at)?;
        let number = told.number;
        self.running.push(told);
        Some((number, job))
    }
}

#[derive(Default)]
struct Queue {
    state: Mutex<State, rank::Helpers>,
    /// There may be something to do, or nothing ever again.
    changed: Condvar,
}

/// Where jobs are handed over. When all of these are gone the threads end, when they have done what there is.
#[derive(Clone)]
pub(crate) struct Jobs(Arc<Handle>);

struct Handle(Arc<Queue>);

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.state.lock().closed = true;
        self.0.changed.notify_all();
    }
}

impl Jobs {
    /// Where nobody does them.
    pub fn to_nobody() -> Self {
        queue().0
    }

    /// Hands a job over; drops it where nobody does any.
    pub fn send(&self, kind: Kind, whose: Whose, job: impl FnOnce(&BraidFs) + Send + 'static) {
        self.put(kind, whose, Vec::new(), Box::new(job));
    }

    /// [`Self::send`] of a job that has the kernel write back what was granted to these owners.
    pub fn send_for(&self, owners: &[QuotaOwner], whose: Whose, job: impl FnOnce(&BraidFs) + Send + 'static) {
        self.put(Kind::Quota, whose, owners.to_vec(), Box::new(job));
    }

    fn put(&self, kind: Kind, whose: Whose, owners: Vec<QuotaOwner>, job: Job) {
        let queue = &self.0.0;
        let mut s = queue.state.lock();
        if s.gone {
            drop(s);
            return drop(job);
        }
        s.number += 1;
        let told = Told { kind, whose, owners, number: s.number };
        s.waiting[kind as usize].push_back((told, job));
        let idle = s.idle > 0;
        drop(s);
        if idle {
            queue.changed.notify_one();
        }
    }

    /// Whether nothing is being done, or is to be.
    pub fn is_quiet(&self) -> bool {
        let s = self.0.0.state.lock();
        s.running.is_empty() && s.is_empty()
    }
}

/// What there is to do.
pub(crate) struct Work(Arc<Queue>);

/// Both ends.
pub(crate) fn queue() -> (Jobs, Work) {
    let queue = Arc::<Queue>::default();
    (Jobs(Arc::new(Handle(queue.clone()))), Work(queue))
}

impl Drop for Work {
    fn drop(&mut self) {
        let mut s = self.0.state.lock();
        s.gone = true;
        let left = std::mem::take(&mut s.waiting);
        drop(s);
        // answers what waited
        drop(left);
    }
}

/// A job that is being done, until this is dropped.
struct Doing<'q> {
    queue: &'q Queue,
    number: u64,
}

impl Drop for Doing<'_> {
    fn drop(&mut self) {
        let mut s = self.queue.state.lock();
        s.running.retain(|r| r.number != self.number);
        // who did this looks for more; at the end all others may wait for what it has let go
        if s.closed {
            self.queue.changed.notify_all();
        }
    }
}

/// See [`Work::next`].
struct Next<'q> {
    doing: Doing<'q>,
    job: Job,
    /// Nobody else is idle, and there is a place for one more.
    alone: bool,
}

impl Work {
    /// Starts a thread that does work, and others where it is not enough. `slots`: of the file system, [`MOST`] of them, one for
    /// each. `slow`: the log is told where the time of a job goes.
    ///
    /// # Errors
    /// Of starting it.
    pub fn start<'s>(&'s self, scope: &'s Scope<'s, '_>, slots: &'s [Slot], slow: bool) -> io::Result<()> {
        let mut s = self.0.state.lock();
        let Some(place) = s.places.iter().position(|taken| !taken) else { return Ok(()) };
        s.places[place] = true;
        drop(s);
        let name = if place == 0 { "fuse-helper".into() } else { format!("fuse-helper-{place}") };
        let started = spawn_thread(scope, name, move || self.help(scope, slots, place, slow));
        if started.is_err() {
            self.0.state.lock().places[place] = false;
        }
        started.map(drop)
    }

    fn help<'s>(&'s self, scope: &'s Scope<'s, '_>, slots: &'s [Slot], place: usize, slow: bool) {
        while let Some(Next { doing, job, alone }) = self.next(place) {
            if alone && let Err(e) = self.start(scope, slots, slow) {
                tracing::warn!(error = %e, "no further helper thread: requests wait for each other");
            }
            if slow {
                phases::watch();
            }
            if let Some(fs) = &*slots[place].lock() {
                // A job that panics drops its duty to reply, which answers EIO.
                let _ = catch_unwind(AssertUnwindSafe(|| job(fs)));
            }
            drop(doing);
        }
    }

    /// Waits for a job; `None`: the thread of this place ends, and has given that back.
    fn next(&self, place: usize) -> Option<Next<'_>> {
        let queue = &*self.0;
        let mut s = queue.state.lock();
        loop {
            if let Some(ready) = s.ready()
                && let Some((number, job)) = s.take(ready)
            {
                let alone = s.idle == 0 && !s.closed && s.places.contains(&false);
                if s.idle > 0 && s.ready().is_some() {
                    queue.changed.notify_one();
                }
                return Some(Next { doing: Doing { queue, number }, job, alone });
            }
            let ends = s.closed && s.is_empty();
            let mut late = false;
            if !ends {
                s.idle += 1;
                if place == 0 || s.closed {
                    queue.changed.wait(&mut s);
                } else {
                    late = queue.changed.wait_for(&mut s, IDLE).timed_out();
                }
                s.idle -= 1;
                // the last one stays for what comes while all others wait
                late &= s.idle > 0 && s.ready().is_none();
            }
            if ends || late {
                s.places[place] = false;
                return None;
            }
        }
    }
}

#[cfg(test)]
impl Work {
    /// The oldest job, of whichever kind, for a test to do.
    pub fn try_recv(&self) -> Result<Job, std::sync::mpsc::TryRecvError> {
        let mut s = self.0.state.lock();
        let first = |queue: &&mut VecDeque<(Told, Job)>| queue.front().map_or(u64::MAX, |(told, _)| told.number);
        let queue = s.waiting.iter_mut().min_by_key(first);
        let job = queue.and_then(VecDeque::pop_front).map(|(_, job)| job);
        job.ok_or(std::sync::mpsc::TryRecvError::Empty)
    }

    /// All jobs, also those that come meanwhile.
    pub fn try_iter(&self) -> impl Iterator<Item = Job> {
        std::iter::from_fn(|| self.try_recv().ok())
    }
}

#[cfg(test)]
mod tests;
