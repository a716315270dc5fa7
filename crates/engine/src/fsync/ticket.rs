//! Operations that wait for the device, submitted now and completed later: a front end with one thread per CPU must not
//! stall behind an fsync.

use crate::error::Result;
use crate::panics::{caught, error_of};
use braidfs_sync::{Condvar, Mutex, phases, rank, workers};
use crossbeam::channel::{Receiver, Sender, unbounded};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::thread::{Builder, JoinHandle};

/// What a panic is said to have been in.
const SYNC: &str = "a sync";

type Callback = Box<dyn FnOnce(Result<()>) + Send>;

/// Who is told at the end, beside those who wait.
enum Then {
    Nobody,
    Call(Callback),
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
    /// and nobody else.
    pub fn on_done(self, f: Callback) {
        let mut s = self.shared.state.lock();
        match &mut *s {
            State::Pending(then) => *then = Then::Call(f),
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
    Wake(Waker),
}

impl Drop for Settled {
    fn drop(&mut self) {
        let _ = match self.0.take() {
            Some(Told::Call(f, r)) => caught("who is told that a sync is done", || f(r)),
            Some(Told::Wake(waker)) => caught("who is woken as a sync is done", || waker.wake()),
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
type Spawn = fn(Builder, Job) -> io::Result<JoinHandle<()>>;

/// A few threads that wait for devices, started as they are needed: most mounts of tools and tests need none.
#[derive(Debug)]
pub(crate) struct Pool {
    name: &'static str,
    jobs: Option<Sender<Job>>,
    queue: Receiver<Job>,
    most: usize,
    /// What is done is one domain's at a time: a thread may run where that belongs ([`crate::domain::Domain::run_near`]).
    pub(super) own: bool,
    /// Jobs that wait or run.
    pending: Arc<AtomicUsize>,
    threads: Mutex<Vec<JoinHandle<()>>, rank::SyncThreads>,
    /// Tests have one that fails.
    pub(super) spawn: Spawn,
}

impl Pool {
    /// Up to `most` threads; each waits for one sync, or one group of fsyncs, at a time.
    pub fn new(name: &'static str, most: usize) -> Self {
        let (jobs, queue) = unbounded::<Job>();
        let spawn: Spawn = |b, f| b.spawn(f);
        Self {
            name,
            jobs: Some(jobs),
            queue,
            most,
            own: false,
            pending: Arc::default(),
            threads: Mutex::default(),
            spawn,
        }
    }

    /// Runs `f` on one of the threads.
    pub fn start(&self, f: impl FnOnce() -> Result<()> + Send + 'static) -> Ticket {
        let (t, pending) = Ticket::pending();
        self.run(move || pending.finish(caught(SYNC, f).unwrap_or_else(|| Err(error_of(SYNC)))));
        t
    }

    /// As [`Self::start`], for work that tells its result by itself. Where no thread can be started and there is none, it is
    /// done here, with all that wait.
    pub fn run(&self, f: impl FnOnce() + Send + 'static) {
        let waiting = self.pending.fetch_add(1, Ordering::Relaxed) + 1;
        // who asks wants to know where the time goes, also of what is done for it here
        let watched = phases::is_watched();
        let f = move || {
            let _watched = watched.then(Watched::new);
            f();
        };
        self.send(Box::new(f));
        if let Err(e) = self.grow(waiting) {
            tracing::warn!("no thread for a sync: {e}");
            while let Ok(job) = self.queue.try_recv() {
                work(job, &self.pending);
            }
        }
    }

    /// Runs `f` on one of the threads where there are any, and else not at all: who offers it may hold what other jobs wait
    /// for, so none is done here.
    pub fn offer(&self, f: impl FnOnce() + Send + 'static) {
        let waiting = self.pending.fetch_add(1, Ordering::Relaxed) + 1;
        match self.grow(waiting) {
            Ok(()) => self.send(Box::new(f)),
            Err(e) => {
                tracing::debug!(error = %e, "no thread to do it beside this one");
                self.pending.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    fn send(&self, job: Job) {
        if let Some(jobs) = &self.jobs
            && let Err(e) = jobs.send(job)
        {
            work(e.0, &self.pending);
        }
    }

    /// Starts another thread where all are busy. An error where none can be started and there is none.
    fn grow(&self, waiting: usize) -> io::Result<()> {
        let mut threads = self.threads.lock();
        if threads.len() >= self.most.min(waiting) {
            return Ok(());
        }
        let (queue, pending, own) = (self.queue.clone(), self.pending.clone(), self.own);
        let name = format!("{}-{}", self.name, threads.len());
        let serve = move || {
            if own {
                workers::become_own();
            }
            run_anywhere();
            for job in queue {
                work(job, &pending);
            }
        };
        match (self.spawn)(Builder::new().name(name), Box::new(serve)) {
            Ok(t) => threads.push(t),
            Err(e) if threads.is_empty() => return Err(e),
            Err(_) => {}
        }
        Ok(())
    }
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
        for t in self.threads.get_mut().drain(..) {
            // a pool dropped by one of its own jobs does not wait for itself
            if t.thread().id() != std::thread::current().id() {
                let _ = t.join();
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
        for _ in 0..3 {
            assert!(matches!(pool.start(|| panic!("on purpose")).wait(), Err(Error::Io(_))));
            pool.run(|| panic!("on purpose"));
            assert!(pool.start(|| Ok(())).wait().is_ok(), "the only thread goes on");
        }
        let (ticket, pending) = Ticket::pending();
        drop(pending);
        assert!(matches!(ticket.wait(), Err(Error::Io(_))));
    }
}
