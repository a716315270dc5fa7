//! Threads that do the same for several domains side by side: commits, writes, flushes of their devices (SpanFS's parallel
//! two-phase synchronisation). They are started when they are first needed, and stay until the volume is closed.

use super::ticket::{Pool, SPAWN};
use braidfs_sync::{Condvar, Mutex, rank};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::thread;

/// Threads at most: each waits for a device.
const THREADS_MAX: usize = 64;

type Part<T> = Box<dyn FnOnce() -> T + Send>;

/// See the module.
#[derive(Debug)]
pub(crate) struct Committers(Pool);

/// What is done side by side. Whoever takes a part does it.
struct Parts<T> {
    state: Mutex<State<T>, rank::SideBySide>,
    all_done: Condvar,
}

struct State<T> {
    waiting: Vec<Option<Part<T>>>,
    done: Vec<Option<thread::Result<T>>>,
    left: usize,
}

impl<T> Parts<T> {
    /// Does this part, unless another thread has taken it.
    fn work_on(&self, i: usize) {
        let Some(part) = self.state.lock().waiting[i].take() else { return };
        let result = catch_unwind(AssertUnwindSafe(part));
        let mut s = self.state.lock();
        s.done[i] = Some(result);
        s.left -= 1;
        if s.left == 0 {
            self.all_done.notify_all();
        }
    }
}

impl Committers {
    /// For a volume of so many domains.
    pub fn new(domains: usize) -> Self {
        Self(Pool::of("braidfs-commit", domains.saturating_sub(1).min(THREADS_MAX), true, SPAWN))
    }

    /// Does all `parts`, and returns what they return, in their order. The first one is done here, and so are those that no
    /// thread has begun by then: who waits here waits for parts that go on, and not for a thread to be free.
    ///
    /// # Panics
    /// As the first part that does; the others are done all the same.
    pub fn side_by_side<T: Send + 'static>(&self, parts: Vec<Part<T>>) -> Vec<T> {
        let n = parts.len();
        if n < 2 {
            return parts.into_iter().map(|part| part()).collect();
        }
        let state =
            State { waiting: parts.into_iter().map(Some).collect(), done: (0..n).map(|_| None).collect(), left: n };
        let parts = Arc::new(Parts { state: Mutex::new(state), all_done: Condvar::new() });
        for i in 1..n {
            let parts = parts.clone();
            // where there is no thread it is done here, as what no thread has begun
            let _ = self.0.offer(move || parts.work_on(i));
        }
        parts.work_on(0);
        // from the end: the threads begin at the front
        (1..n).rev().for_each(|i| parts.work_on(i));
        let done = {
            let mut s = parts.state.lock();
            while s.left > 0 {
                parts.all_done.wait(&mut s);
            }
            std::mem::take(&mut s.done)
        };
        done.into_iter().flatten().map(|r| r.unwrap_or_else(|panic| resume_unwind(panic))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    fn part<T>(f: impl FnOnce() -> T + Send + 'static) -> Part<T> {
        Box::new(f)
    }

    #[test]
    fn parts_go_on_at_the_same_time_on_threads_that_stay() {
        let c = Committers::new(4);
        let mut threads = std::collections::HashSet::new();
        for _ in 0..20 {
            // each waits for all the others
            let meet = Arc::new(Barrier::new(4));
            let parts = (0..4).map(|i| {
                let meet = meet.clone();
                part(move || {
                    meet.wait();
                    (i, thread::current().id())
                })
            });
            let done = c.side_by_side(parts.collect());
            assert!(done.iter().map(|d| d.0).eq(0..4));
            threads.extend(done.into_iter().map(|d| d.1));
        }
        assert_eq!(threads.len(), 4, "this one and three");
    }

    /// More wait at once than there are threads, and parts have parts of their own.
    #[test]
    fn who_waits_does_what_no_thread_has_begun() {
        let c = Arc::new(Committers::new(2));
        let ran = Arc::new(AtomicUsize::new(0));
        thread::scope(|s| {
            for _ in 0..6 {
                s.spawn(|| {
                    let outer = (0..3).map(|_| {
                        let (c, ran) = (c.clone(), ran.clone());
                        part(move || {
                            let inner = (0..3).map(|_| {
                                let ran = ran.clone();
                                part(move || ran.fetch_add(1, SeqCst))
                            });
                            c.side_by_side(inner.collect()).len()
                        })
                    });
                    assert_eq!(c.side_by_side(outer.collect()), [3, 3, 3]);
                });
            }
        });
        assert_eq!(ran.load(SeqCst), 6 * 9);
    }

    /// A part of another call may wait for what the caller of this one holds.
    #[test]
    fn where_no_thread_can_be_started_each_does_its_own_parts() {
        let pool = Pool::of("none", 3, false, |_, _| Err(std::io::Error::other("no more threads")));
        let ran = Arc::new(AtomicUsize::new(0));
        let other = ran.clone();
        assert!(pool.offer(move || _ = other.fetch_add(1, SeqCst)).is_err());
        assert_eq!(ran.load(SeqCst), 0, "not by who offers it");
        let c = Committers(pool);
        let here = thread::current().id();
        let parts = (0..5).map(|i| part(move || (i, thread::current().id())));
        assert!(c.side_by_side(parts.collect()).into_iter().eq((0..5).map(|i| (i, here))));
        assert_eq!(ran.load(SeqCst), 0, "nor by who comes later");
    }

    #[test]
    fn a_panic_is_told_and_the_threads_go_on() {
        let c = Committers::new(3);
        let ran = Arc::new(AtomicUsize::new(0));
        let parts = |bad: usize| {
            let one = |i| {
                let ran = ran.clone();
                part(move || {
                    assert_ne!(i, bad, "on purpose");
                    ran.fetch_add(1, SeqCst)
                })
            };
            (0..3).map(one).collect()
        };
        for bad in 0..3 {
            catch_unwind(AssertUnwindSafe(|| c.side_by_side(parts(bad)))).unwrap_err();
        }
        assert_eq!(ran.load(SeqCst), 6);
        assert_eq!(c.side_by_side(parts(9)).len(), 3);
    }
}
