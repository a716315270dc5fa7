//! A scheduler for tests: threads that run one at a time, in an order from a seed.
//!
//! A thread goes on until it comes to a [`point`] (it takes a lock, or its device is asked for something) or cannot go on
//! ([`blocked`]: a lock is taken, a condition does not hold). There the seed says who runs next. As nothing else decides,
//! the same seed gives the same run. Where all that is left are threads that cannot go on, each is told so by a panic; so is one
//! that comes to points for ever.
//!
//! What the threads do between two points is one step for all others: unordered accesses to memory are not explored.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// At this many points in a hundred another thread may go on.
const SWITCH_PERCENT: u64 = 12;
/// Turns of threads that cannot go on, one after the other, until it is a deadlock.
const STUCK: u32 = 20_000;
/// Points of all threads until it is a livelock: some seconds. Runs that end come to less than a hundredth of it.
const ENDLESS: u64 = 20_000_000;

struct State {
    random: u64,
    running: usize,
    done: Vec<bool>,
    /// Turns since somebody went on.
    stuck: u32,
    /// A thread has panicked: all others do as they come by.
    over: bool,
    points: u64,
    /// [`ENDLESS`].
    points_max: u64,
}

struct Shared {
    state: Mutex<State>,
    turn: Vec<Condvar>,
}

thread_local!(static ME: RefCell<Option<(Arc<Shared>, usize)>> = const { RefCell::new(None) });

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// Gives the turn to `to` and waits for the own one.
    fn hand_over(&self, mut s: MutexGuard<'_, State>, me: usize, to: usize) {
        s.running = to;
        self.turn[to].notify_one();
        while s.running != me && !s.over {
            s = self.turn[me].wait(s).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl State {
    /// The next number of an xorshift64* generator.
    fn next(&mut self) -> u64 {
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        self.random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32
    }
    /// A thread that is not done, other than `me`.
    fn other(&mut self, me: usize) -> Option<usize> {
        let ready: Vec<usize> = (0..self.done.len()).filter(|&i| i != me && !self.done[i]).collect();
        let n = ready.len() as u64;
        (n > 0).then(|| ready[(self.next() % n) as usize])
    }
}

fn me() -> Option<(Arc<Shared>, usize)> {
    // not there any more while the thread ends
    ME.try_with(|m| m.try_borrow().ok().and_then(|m| m.clone())).ok().flatten()
}

/// Whether this thread is under the scheduler.
pub fn scheduled() -> bool {
    me().is_some_and(|(s, _)| !(std::thread::panicking() && s.lock().over))
}

/// The number of this thread under the scheduler.
pub fn number() -> Option<usize> {
    me().map(|(_, n)| n)
}

fn stop(s: MutexGuard<'_, State>) {
    drop(s);
    if !std::thread::panicking() {
        panic!("another thread of the schedule has panicked");
    }
}

/// Another thread may go on here. Does nothing for a thread that is not under the scheduler.
///
/// # Panics
/// Where the threads come to points for ever.
pub fn point() {
    let Some((shared, me)) = me() else { return };
    let mut s = shared.lock();
    if s.over {
        return stop(s);
    }
    s.stuck = 0;
    s.points += 1;
    if s.points > s.points_max && !std::thread::panicking() {
        drop(s);
        panic!("the threads of the schedule do not end: a livelock");
    }
    if s.next() % 100 < SWITCH_PERCENT
        && let Some(to) = s.other(me)
    {
        shared.hand_over(s, me, to);
    }
}

/// This thread cannot go on: others do, then it may look again.
///
/// # Panics
/// Where no thread can go on.
pub fn blocked() {
    let Some((shared, me)) = me() else { return };
    let mut s = shared.lock();
    if s.over {
        return stop(s);
    }
    s.stuck += 1;
    let other = s.other(me);
    match other {
        Some(to) if s.stuck < STUCK => shared.hand_over(s, me, to),
        _ => {
            drop(s);
            assert!(std::thread::panicking(), "no thread of the schedule can go on: a deadlock");
        }
    }
}

/// What a thread does.
pub type Body<'a, T> = Box<dyn FnOnce() -> T + Send + 'a>;

/// Runs `bodies` as threads under a scheduler; how many points they came to, and what each returned.
///
/// # Panics
/// As the first of them that does.
pub fn run<T: Send>(seed: u64, bodies: Vec<Body<'_, T>>) -> (u64, Vec<T>) {
    run_up_to(seed, bodies, ENDLESS)
}

fn run_up_to<T: Send>(seed: u64, bodies: Vec<Body<'_, T>>, points_max: u64) -> (u64, Vec<T>) {
    let n = bodies.len();
    let shared = Arc::new(Shared {
        state: Mutex::new(State {
            random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            running: 0,
            done: vec![false; n],
            stuck: 0,
            over: false,
            points: 0,
            points_max,
        }),
        turn: (0..n).map(|_| Condvar::new()).collect(),
    });
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = bodies
            .into_iter()
            .enumerate()
            .map(|(i, body)| {
                let shared = shared.clone();
                scope.spawn(move || {
                    {
                        let mut s = shared.lock();
                        while s.running != i && !s.over {
                            s = shared.turn[i].wait(s).unwrap_or_else(PoisonError::into_inner);
                        }
                    }
                    ME.set(Some((shared.clone(), i)));
                    let outcome = catch_unwind(AssertUnwindSafe(body));
                    ME.set(None);
                    let mut s = shared.lock();
                    s.done[i] = true;
                    s.stuck = 0;
                    if outcome.is_err() {
                        s.over = true;
                        shared.turn.iter().for_each(Condvar::notify_one);
                    } else if let Some(to) = s.other(i) {
                        s.running = to;
                        shared.turn[to].notify_one();
                    }
                    outcome
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap_or_else(Err)).collect()
    });
    let points = shared.lock().points;
    let mut out = Vec::new();
    let mut panics = Vec::new();
    for o in outcomes {
        match o {
            Ok(v) => out.push(v),
            Err(p) => panics.push(p),
        }
    }
    // not one of those that only heard of it
    let echo = |p: &Box<dyn std::any::Any + Send>| {
        p.downcast_ref::<&str>().is_some_and(|t| t.starts_with("another thread of the schedule"))
    };
    panics.sort_by_key(echo);
    if let Some(p) = panics.into_iter().next() {
        resume_unwind(p);
    }
    (points, out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plain::{Mutex as Lock, RwLock};
    use crate::{Condvar as Signal, IdleCondvar, MutexGuard, give_way};
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
    use std::time::Duration;

    /// Four threads that add their number to a list, under locks.
    fn order(seed: u64) -> Vec<usize> {
        let (list, table) = (Lock::new(Vec::new()), RwLock::new(0));
        let body = |i: usize| {
            let (list, table) = (&list, &table);
            Box::new(move || {
                for _ in 0..20 {
                    let t = table.read();
                    list.lock().push(i);
                    drop(t);
                    *table.write() += 1;
                }
            }) as Body<'_, ()>
        };
        run(seed, (0..4).map(body).collect());
        assert_eq!(*table.read(), 80);
        list.into_inner()
    }

    #[test]
    fn the_seed_gives_the_order() {
        assert_eq!(order(1), order(1));
        assert_ne!(order(1), order(2));
        let switches = order(3).windows(2).filter(|w| w[0] != w[1]).count();
        assert!(switches > 10, "{switches}");
    }

    /// Two wait for a third one, in the way of some condition variable.
    fn lets_the_others_run(wait: impl Fn(&mut MutexGuard<'_, bool>) + Sync, notify: impl Fn() + Send + Sync) {
        let (full, seen) = (Lock::new(false), AtomicUsize::new(0));
        let wait = || {
            let mut f = full.lock();
            while !*f {
                wait(&mut f);
            }
            drop(f);
            seen.fetch_add(1, Relaxed);
        };
        let fill = || {
            let mut turns = 0;
            while turns < 9 {
                turns += 1;
                give_way(turns);
            }
            *full.lock() = true;
            notify();
        };
        run(5, vec![Box::new(wait), Box::new(wait), Box::new(fill)]);
        assert_eq!(seen.into_inner(), 2);
    }

    #[test]
    fn who_waits_lets_the_others_run() {
        let signal = Signal::new();
        lets_the_others_run(|guard| signal.wait(guard), || _ = signal.notify_all());
        let idle = IdleCondvar::default();
        lets_the_others_run(|guard| idle.wait(guard), || idle.notify_all());
        lets_the_others_run(|guard| idle.wait_for(guard, Duration::from_secs(60)), || idle.notify_all());
    }

    #[test]
    fn a_deadlock_is_told() {
        let deadlocks = (0..40).filter(|seed| {
            let (a, b) = (Lock::new(()), Lock::new(()));
            let one = || {
                let _a = a.lock();
                let _b = b.lock();
            };
            let other = || {
                let _b = b.lock();
                let _a = a.lock();
            };
            let done = catch_unwind(AssertUnwindSafe(|| run(*seed, vec![Box::new(one), Box::new(other)])));
            done.is_err_and(|p| p.downcast_ref::<&str>().is_some_and(|t| t.contains("a deadlock")))
        });
        assert!(deadlocks.count() > 0);
    }

    #[test]
    fn a_livelock_is_told() {
        let (table, ended) = (RwLock::new(false), AtomicUsize::new(0));
        let endless = || while !*table.read() {};
        let waits = || {
            table.read();
            ended.fetch_add(1, Relaxed);
        };
        let bodies: Vec<Body<'_, ()>> = vec![Box::new(endless), Box::new(waits)];
        let run = catch_unwind(AssertUnwindSafe(|| run_up_to(3, bodies, 1000)));
        assert!(run.is_err_and(|p| p.downcast_ref::<&str>().is_some_and(|t| t.contains("a livelock"))));
        assert_eq!(ended.into_inner(), 1);
    }
}
