//! Helper threads at work on a volume in memory.

use super::*;
use crate::ops::tests::{Served, WITHOUT_OPEN};
use braidfs::MkfsOptions;
use crossbeam::utils::CachePadded;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;

/// Something that is to happen is waited for so long.
const SOON: Duration = Duration::from_secs(20);
/// So long it is looked whether something happens that must not.
const WHILE: Duration = Duration::from_millis(50);

/// Has threads at work while `f` hands them jobs; all have ended when it returns.
fn at_work(f: impl FnOnce(&Jobs)) {
    let Served { fs, .. } = Served::of(WITHOUT_OPEN, 16384, &MkfsOptions::default());
    let fs = Arc::new(fs);
    let slots: Vec<Slot> = (0..MOST).map(|_| CachePadded::new(Mutex::new(Some(fs.clone())))).collect();
    let (jobs, work) = queue();
    thread::scope(|scope| {
        work.start(scope, &slots, false).unwrap();
        f(&jobs);
        drop(jobs);
    });
    let s = work.0.state.lock();
    assert!(s.is_empty() && s.running.is_empty() && s.places == [false; MOST]);
}

/// Jobs that tell when they begin, and then wait until they are let go on.
struct Held {
    begun: Receiver<usize>,
    tell: Sender<usize>,
    go: Vec<Sender<()>>,
}

impl Held {
    fn new() -> Self {
        let (tell, begun) = mpsc::channel();
        Self { begun, tell, go: Vec::new() }
    }

    /// The next one; they are counted from 0.
    fn job(&mut self) -> impl FnOnce(&BraidFs) + Send + 'static {
        let (go, wait) = mpsc::channel();
        let (tell, number) = (self.tell.clone(), self.go.len());
        self.go.push(go);
        move |_: &BraidFs| {
            let _ = tell.send(number);
            // ends when the other end is gone
            let _ = wait.recv();
        }
    }

    /// Lets one go on.
    fn end(&mut self, number: usize) {
        self.go[number] = mpsc::channel().0;
    }

    /// The numbers of those that have begun since this was asked last: so many, and no more.
    fn begun(&self, count: usize) -> Vec<usize> {
        let mut all: Vec<_> = (0..count).map(|_| self.begun.recv_timeout(SOON).expect("it begins")).collect();
        all.sort_unstable();
        assert_eq!(self.begun.recv_timeout(WHILE).ok(), None, "and {all:?}");
        all
    }
}

/// Pages that nobody writes back keep nobody from what has nothing to do with them.
#[test]
fn who_waits_takes_no_thread_of_another_kind() {
    at_work(|jobs| {
        let mut held = Held::new();
        for user in 0..20 {
            jobs.send(Kind::Pages, Whose::User(user), held.job());
        }
        assert_eq!(held.begun(Kind::Pages.most()), [0, 1, 2, 3, 4]);
        for kind in Kind::ALL.into_iter().filter(|k| *k != Kind::Pages) {
            let (done, told) = mpsc::channel();
            jobs.send(kind, Whose::User(3), move |_| done.send(()).unwrap());
            assert_eq!(told.recv_timeout(SOON), Ok(()), "{kind:?}");
        }
        held.end(2);
        assert_eq!(held.begun(1), [5]);
    });
}

#[test]
fn a_user_has_a_half_of_the_threads() {
    at_work(|jobs| {
        let mut held = Held::new();
        for _ in 0..10 {
            jobs.send(Kind::Pages, Whose::User(1), held.job());
        }
        assert_eq!(held.begun(3), [0, 1, 2]);
        for n in [10, 11] {
            jobs.send(Kind::Pages, Whose::User(2), held.job());
            assert_eq!(held.begun(1), [n]);
        }
        jobs.send(Kind::Pages, Whose::Tenant(2), held.job());
        assert!(held.begun(0).is_empty());
        // who has none is before who has two, and came before
        held.end(0);
        assert_eq!(held.begun(1), [12]);
        held.end(10);
        assert_eq!(held.begun(1), [3]);
    });
}

#[test]
fn what_must_not_be_done_at_once_has_its_order() {
    let (one, two, both) = (QuotaOwner::User(1), QuotaOwner::Group(1), [QuotaOwner::Group(1), QuotaOwner::User(1)]);
    at_work(|jobs| {
        for kind in [Kind::Room, Kind::Borders, Kind::Drops] {
            let mut held = Held::new();
            (0..3).for_each(|user| jobs.send(kind, Whose::User(user), held.job()));
            for n in 0..3 {
                assert_eq!(held.begun(1), [n]);
                held.end(n);
            }
        }
        let mut held = Held::new();
        for owners in [&[one][..], &both, &[two], &[QuotaOwner::User(2)]] {
            jobs.send_for(owners, Whose::Mount, held.job());
        }
        assert_eq!(held.begun(2), [0, 3], "the third waits for the second, which waits for the first");
        held.end(0);
        assert_eq!(held.begun(1), [1]);
        held.end(1);
        assert_eq!(held.begun(1), [2]);
    });
}

/// Threads come as they are needed, and go; a job that panics leaves its place.
#[test]
fn threads_are_as_many_as_are_needed() {
    at_work(|jobs| {
        let queue = jobs.0.0.clone();
        let threads = || queue.state.lock().places.iter().filter(|taken| **taken).count();
        let becomes = |many: usize| {
            let end = std::time::Instant::now() + SOON;
            while threads() != many {
                assert!(std::time::Instant::now() < end, "{} threads instead of {many}", threads());
                thread::sleep(Duration::from_millis(1));
            }
        };
        assert_eq!(threads(), 1);
        let mut held = Held::new();
        for kind in Kind::ALL {
            (0..2 * kind.most()).for_each(|_| jobs.send(kind, Whose::Mount, held.job()));
        }
        held.begun(MOST);
        assert!(threads() == MOST && !jobs.is_quiet());
        drop(held);
        becomes(1);
        assert!(jobs.is_quiet());
        jobs.send(Kind::Room, Whose::Mount, |_| panic!("of a test"));
        let (done, told) = mpsc::channel();
        jobs.send(Kind::Room, Whose::Mount, move |_| done.send(()).unwrap());
        assert_eq!(told.recv_timeout(SOON), Ok(()));
    });
}

/// What is handed over is done, also at the end; or dropped at once where nobody does it.
#[test]
fn no_job_is_left_waiting() {
    let (done, told) = mpsc::channel();
    at_work(|jobs| {
        for n in 0..1000 {
            let done = done.clone();
            jobs.send(Kind::ALL[n % Kind::ALL.len()], Whose::User(1), move |_| done.send(n).unwrap());
        }
    });
    let mut all: Vec<_> = told.try_iter().collect();
    all.sort_unstable();
    assert!(all.into_iter().eq(0..1000));
    let left = Arc::new(());
    let job = |left: &Arc<()>| {
        let left = left.clone();
        move |_: &BraidFs| drop(left)
    };
    let (jobs, work) = queue();
    jobs.send(Kind::Room, Whose::Mount, job(&left));
    assert_eq!(Arc::strong_count(&left), 2);
    drop(work);
    assert_eq!(Arc::strong_count(&left), 1);
    jobs.send(Kind::Room, Whose::Mount, job(&left));
    Jobs::to_nobody().send(Kind::Room, Whose::Mount, job(&left));
    assert_eq!(Arc::strong_count(&left), 1);
}
