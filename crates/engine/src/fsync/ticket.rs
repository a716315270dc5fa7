//! Operations that wait for the device, submitted now and completed later: a front end with one thread per CPU must not
//! stall behind an fsync.

use crate::error::Result;
use crate::panics::{caught, error_of};
use braidfs_sync::{Condvar, Mutex, phases, rank, workers};
use crossbeam::channel::{Receiver, Sender, unbounded};
use std::cell::RefCell;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::task::{Context, Poll, Waker};
use std::thread::{Builder, JoinHandle};

/// What a panic is said to have been in.
const SYNC: &str = "a sync";
/// Threads of a pool at most beside its own number, in place of those that run code of users'.
const AWAY_MAX: usize = 256;

type Callback = Box<dyn FnOnce(Result<()>) + Send>;

/// Who is told at the end, beside those who wait.
enum Then {
    Nobody,
    Call(Callback),
    /// The same, of one that waits for nobody.
    CallQuick(Callback),
    Wake(Waker),
}

enum State {
    Pending(Then),
    Done(Option<Result<()>>),
}

struct Shared {
    state: Mutex<State, rank::Ticket>,
    done: Condvar,
}

/// A durable write that is under way, whatever becomes of the ticket: wait for it, have a function called, or await it as a
/// [`Future`] of whatever executor.
#[must_use = "without the ticket nobody learns whether it succeeded"]
pub struct Ticket {
    shared: Arc<Shared>,
}

impl Ticket {
    /// A ticket, and the duty to say how it went.
    pub(crate) fn pending() -> (Self, Pending) {
        let shared = Arc::new(Shared { state: Mutex::new(State::Pending(Then::Nobody)), done: Condvar::new() });
        (Self { shared: shared.clone() }, Pending { shared, told: false })
    }

    /// A ticket for `f`, and the work that does it.
    pub(crate) fn of(f: impl FnOnce() -> Result<()> + Send + 'static) -> (Self, impl FnOnce() + Send + 'static) {
        let (t, pending) = Self::pending();
        (t, move || pending.finish(caught(SYNC, f).unwrap_or_else(|| Err(error_of(SYNC)))))
    }

    /// A ticket that is done already.
    pub(crate) fn ready(r: Result<()>) -> Self {
        Self { shared: Arc::new(Shared { state: Mutex::new(State::Done(Some(r))), done: Condvar::new() }) }
    }

    /// Waits until it is durable.
    ///
    /// # Errors
    /// Of the device; what was synced is then in doubt and the domain refuses writes.
    pub fn wait(self) -> Result<()> {
        let mut s = self.shared.state.lock();
        loop {
            if let State::Done(r) = &mut *s {
                return r.take().unwrap_or(Ok(()));
            }
            self.shared.done.wait(&mut s);
        }
    }

    /// Calls `f` with the result from another thread (or at once where it is done). Where `f` panics on that thread the log is told,
    /// and nobody else. `f` may wait, also for another sync: that takes a thread of the volume, which starts others meanwhile, 256
    /// at most.
    pub fn on_done(self, f: Callback) {
        self.then(f, Then::Call);
    }

    /// [`Self::on_done`] of a function that is short and waits for nobody: neither for another sync, nor for a lock with which
    /// somebody waits for one. The thread that did the sync runs it before it goes on with the next one.
    pub fn on_done_quick(self, f: Callback) {
        self.then(f, Then::CallQuick);
    }

    fn then(self, f: Callback, how: fn(Callback) -> Then) {
        let mut s = self.shared.state.lock();
        match &mut *s {
            State::Pending(then) => *then = how(f),
            State::Done(r) => {
                let r = r.take().unwrap_or(Ok(()));
                drop(s);
                f(r);
            }
        }
    }
}

impl std::fmt::Debug for Ticket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let done = matches!(*self.shared.state.lock(), State::Done(_));
        f.debug_struct("Ticket").field("done", &done).finish_non_exhaustive()
    }
}

impl Future for Ticket {
    /// As of [`Ticket::wait`].
    type Output = Result<()>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        // code of the executor's runs when it is cloned, and when the one before is dropped: not with the lock
        let next = Then::Wake(cx.waker().clone());
        let mut s = self.shared.state.lock();
        let before = match &mut *s {
            State::Pending(then) => std::mem::replace(then, next),
            State::Done(r) => return Poll::Ready(r.take().unwrap_or(Ok(()))),
        };
        drop(s);
        drop(before);
        Poll::Pending
    }
}

/// The other end of a [`Ticket`]. Dropped without a result, by a panic, it tells of an error: nobody waits for ever.
pub(crate) struct Pending {
    shared: Arc<Shared>,
    told: bool,
}

impl std::fmt::Debug for Pending {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Pending")
    }
}

impl Pending {
    /// Tells the ticket, and whom that tells.
    pub fn finish(self, r: Result<()>) {
        drop(self.settle(r));
    }

    /// Tells the ticket, and who waits for it. The caller drops what it gets where code of a user may run.
    #[must_use]
    pub fn settle(mut self, r: Result<()>) -> Settled {
        self.tell(r)
    }

    fn tell(&mut self, r: Result<()>) -> Settled {
        self.told = true;
        let mut s = self.shared.state.lock();
        match std::mem::replace(&mut *s, State::Done(None)) {
            State::Pending(Then::Call(f)) => Settled(Some(Told::Call(f, r))),
            State::Pending(Then::CallQuick(f)) => Settled(Some(Told::CallQuick(f, r))),
            before => {
                *s = State::Done(Some(r));
                self.shared.done.notify_all();
                drop(s);
                match before {
                    State::Pending(Then::Wake(waker)) => Settled(Some(Told::Wake(waker))),
                    _ => Settled(None),
                }
            }
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if !self.told {
            drop(self.tell(Err(error_of(SYNC))));
        }
    }
}

/// The ticket is done; code of a user's, if any, that the drop of this runs. Where it panics, that is the end of it.
pub(crate) struct Settled(Option<Told>);

enum Told {
    Call(Callback, Result<()>),
    CallQuick(Callback, Result<()>),
    Wake(Waker),
}

impl Settled {
    /// Whether code of a user's runs that may wait for another sync, or for who waits for one.
    pub fn may_wait(&self) -> bool {
        matches!(self.0, Some(Told::Call(..) | Told::Wake(_)))
    }
}

impl Drop for Settled {
    fn drop(&mut self) {
        const CALLED: &str = "who is told that a sync is done";
        let _ = match self.0.take() {
            Some(Told::Call(f, r)) => away(|| caught(CALLED, || f(r))),
            Some(Told::CallQuick(f, r)) => caught(CALLED, || f(r)),
            Some(Told::Wake(waker)) => away(|| caught("who is woken as a sync is done", || waker.wake())),
            None => None,
        };
    }
}

type Job = Box<dyn FnOnce() + Send>;

/// A job that waits or runs is counted.
struct Counted<'a>(&'a AtomicUsize);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Does a job that was counted. Its panic does not end the thread, which has others to do: who waits for it is told by what it
/// drops.
fn work(job: Job, pending: &AtomicUsize) {
    let _counted = Counted(pending);
    let _ = caught("a job of the pool", job);
}

/// Starts a thread.
pub(super) type Spawn = fn(Builder, Job) -> io::Result<JoinHandle<()>>;

/// [`Spawn`] of the system.
pub(super) const SPAWN: Spawn = |b, f| b.spawn(f);

/// A few threads that wait for devices, started as they are needed: most mounts of tools and tests need none. Dropped, it waits for
/// them; not with a lock that code of users' may want, which they run.
pub(crate) struct Pool {
    jobs: Option<Sender<Job>>,
    crew: Arc<Crew>,
}

/// What the threads share with who gives them jobs.
struct Crew {
    name: &'static str,
    queue: Receiver<Job>,
    most: usize,
    /// What is done is one domain's at a time: a thread may run where that belongs ([`crate::domain::Domain::run_near`]).
    own: bool,
    /// Jobs that wait or run.
    pending: AtomicUsize,
    /// Threads that run code of users', which may wait for jobs that wait.
    away: AtomicUsize,
    threads: Mutex<Vec<JoinHandle<()>>, rank::SyncThreads>,
    /// Tests have one that fails.
    spawn: Spawn,
}

thread_local! {
    /// Of which the calling thread is.
    static CREW: RefCell<Option<Arc<Crew>>> = const { RefCell::new(None) };
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("name", &self.crew.name).finish_non_exhaustive()
    }
}

/// Jobs that are to be done by who holds this, since there is no thread: with no lock held that they, or code of users', may
/// want.
#[must_use = "nobody else does the jobs"]
pub(crate) struct Undone(Option<Arc<Crew>>);

impl Undone {
    /// Does all that wait.
    pub fn work(self) {
        let Some(crew) = self.0 else { return };
        while let Ok(job) = crew.queue.try_recv() {
            work(job, &crew.pending);
        }
    }
}

impl Pool {
    /// Up to `most` threads; each waits for one sync, or one group of fsyncs, at a time. Those that run code of users' do not
    /// count.
    pub fn new(name: &'static str, most: usize) -> Self {
        Self::of(name, most, false, SPAWN)
    }

    /// [`Self::new`], for jobs of domains where `own`.
    pub(super) fn of(name: &'static str, most: usize, own: bool, spawn: Spawn) -> Self {
        let (jobs, queue) = unbounded::<Job>();
        let (pending, away, threads) = Default::default();
        let crew = Crew { name, queue, most, own, pending, away, threads, spawn };
        Self { jobs: Some(jobs), crew: Arc::new(crew) }
    }

    /// Runs `f`, which tells its result by itself, on one of the threads. Where no thread can be started and there is none, it
    /// is left to the caller, with all that wait.
    pub fn run(&self, f: impl FnOnce() + Send + 'static) -> Undone {
        let waiting = self.crew.pending.fetch_add(1, Ordering::Relaxed) + 1;
        // who asks wants to know where the time goes, also of what is done for it here
        let watched = phases::is_watched();
        let f = move || {
            let _watched = watched.then(Watched::new);
            f();
        };
        self.send(Box::new(f));
        match self.crew.grow(waiting) {
            Ok(()) => Undone(None),
            Err(e) => {
                tracing::warn!("no thread for a sync: {e}");
                Undone(Some(self.crew.clone()))
            }
        }
    }

    /// Runs `f` on one of the threads where there are any, and else not at all: who offers it may hold what other jobs wait
    /// for, so none is done here.
    ///
    /// # Errors
    /// There is no thread: it comes back.
    pub fn offer<F: FnOnce() + Send + 'static>(&self, f: F) -> std::result::Result<(), F> {
        let waiting = self.crew.pending.fetch_add(1, Ordering::Relaxed) + 1;
        if let Err(e) = self.crew.grow(waiting) {
            tracing::debug!(error = %e, "no thread to do it beside this one");
            self.crew.pending.fetch_sub(1, Ordering::Relaxed);
            return Err(f);
        }
        self.send(Box::new(f));
        // a thread that went away meanwhile has not seen it
        fence(Ordering::SeqCst);
        if self.crew.away.load(Ordering::Relaxed) > 0 {
            let _ = self.crew.grow(waiting);
        }
        Ok(())
    }

    fn send(&self, job: Job) {
        if let Some(jobs) = &self.jobs
            && let Err(e) = jobs.send(job)
        {
            work(e.0, &self.crew.pending);
        }
        // before it is asked who is away: who goes then sees the job
        fence(Ordering::SeqCst);
    }
}

impl Crew {
    /// Starts another thread where all are busy. An error where none can be started and there is none.
    fn grow(self: &Arc<Self>, waiting: usize) -> io::Result<()> {
        let mut threads = self.threads.lock();
        let most = self.most + self.away.load(Ordering::Relaxed).min(AWAY_MAX);
        if threads.len() >= most.min(waiting) {
            return Ok(());
        }
        let crew = self.clone();
        let name = format!("{}-{}", self.name, threads.len());
        let serve = move || {
            if crew.own {
                workers::become_own();
            }
            run_anywhere();
            CREW.set(Some(crew.clone()));
            for job in &crew.queue {
                work(job, &crew.pending);
            }
            CREW.set(None);
        };
        match (self.spawn)(Builder::new().name(name), Box::new(serve)) {
            Ok(t) => threads.push(t),
            Err(e) if threads.is_empty() => return Err(e),
            Err(_) => {}
        }
        Ok(())
    }
}

/// Runs code of a user's, which may wait for a sync that needs a thread: a pool of which this one is may have another one in its
/// place meanwhile.
fn away<R>(f: impl FnOnce() -> R) -> R {
    let Some(crew) = CREW.with_borrow(Clone::clone) else { return f() };
    crew.away.fetch_add(1, Ordering::Relaxed);
    let _back = Counted(&crew.away);
    // before it is asked what waits: who comes then sees that this thread is away
    fence(Ordering::SeqCst);
    if !crew.queue.is_empty() {
        let _ = crew.grow(crew.pending.load(Ordering::Relaxed));
    }
    f()
}

/// Where the time of the calling thread goes is watched, of the one job.
struct Watched;

impl Watched {
    fn new() -> Self {
        phases::watch();
        Self
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        phases::end();
    }
}

/// Lets the calling thread run where the process may: it was started by one that may be bound to a CPU, and serves others.
fn run_anywhere() {
    use rustix::thread::{sched_getaffinity, sched_setaffinity};
    let all = sched_getaffinity(Some(rustix::process::getpid()));
    if let Err(e) = all.and_then(|all| sched_setaffinity(None, &all)) {
        tracing::debug!(error = %e, "a thread for syncs stays on the CPU of who started it");
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.jobs.take();
        // code of users' that still runs may have others started
        loop {
            let threads = std::mem::take(&mut *self.crew.threads.lock());
            if threads.is_empty() {
                return;
            }
            for t in threads {
                // a pool dropped by one of its own jobs does not wait for itself
                if t.thread().id() != std::thread::current().id() {
                    let _ = t.join();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use std::task::Wake;

    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_ticket_wakes_whom_polled_last_and_answers_once_done() {
        let (mut ticket, pending) = Ticket::pending();
        let tasks = [Arc::new(Woken::default()), Arc::new(Woken::default())];
        for task in &tasks {
            let waker = Waker::from(task.clone());
            assert!(Pin::new(&mut ticket).poll(&mut Context::from_waker(&waker)).is_pending());
        }
        pending.finish(Err(Error::NoSpace));
        assert_eq!(tasks.each_ref().map(|t| t.0.load(Ordering::Relaxed)), [0, 1]);
        let waker = Waker::from(tasks[0].clone());
        let done = Pin::new(&mut ticket).poll(&mut Context::from_waker(&waker));
        assert!(matches!(done, Poll::Ready(Err(Error::NoSpace))));
        // one that was done before anybody asked
        let mut ready = Ticket::ready(Ok(()));
        assert!(matches!(Pin::new(&mut ready).poll(&mut Context::from_waker(&waker)), Poll::Ready(Ok(()))));
        // polled, and then waited for by a thread
        let (mut ticket, pending) = Ticket::pending();
        assert!(Pin::new(&mut ticket).poll(&mut Context::from_waker(&waker)).is_pending());
        pending.finish(Ok(()));
        assert!(ticket.wait().is_ok());
    }

    #[test]
    fn a_ticket_whose_work_has_panicked_answers_with_an_error() {
        let pool = Pool::new("panics", 1);
        let start = |f: fn() -> Result<()>| {
            let (ticket, work) = Ticket::of(f);
            pool.run(work).work();
            ticket
        };
        for _ in 0..3 {
            assert!(matches!(start(|| panic!("on purpose")).wait(), Err(Error::Io(_))));
            pool.run(|| panic!("on purpose")).work();
            assert!(start(|| Ok(())).wait().is_ok(), "the only thread goes on");
        }
        let (ticket, pending) = Ticket::pending();
        drop(pending);
        assert!(matches!(ticket.wait(), Err(Error::Io(_))));
    }
}
