//! Threads that wait for numbered rounds of something that one of them leads at a time, as the commits of a domain.
//!
//! Who waits for a round leads it where nobody leads, helps where its leader has shared out work, and else sleeps. It is woken
//! for one of three things: there is work; its round is over; or nobody leads any more and it is the one that shall. Rounds
//! follow each other by one, so at most two have waiters: the one that is led and the next. Each has a condition of its own,
//! so that the end of a round wakes all who waited for it, and one of those who wait for the next.
//!
//! No wake-up is lost: who sleeps has looked, under the lock, at whether its round is over, somebody leads and there is work
//! that it has not seen; and each of these changes under the lock, with a wake-up behind it. So as long as somebody sleeps,
//! somebody leads, or one who was woken is about to look. That rounds fail may come true without the lock and unannounced:
//! the leader's end wakes one, who tells the others. The module `models` goes through all orders of it.

use crate::rank::Rank;
#[cfg(loom)]
use loomed::{Condvar, Mutex};
#[cfg(not(loom))]
use {
    crate::{Condvar, Mutex},
    std::fmt,
};

/// See the module. `W` is what helpers are given, `R` the rank of the lock, below which `over` of [`Self::turn`] is asked.
pub struct Rounds<W, R: Rank<Key = ()>> {
    state: Mutex<State<W>, R>,
    /// Of round `n`, at `n % 2`.
    waiting: [Condvar; 2],
}

struct State<W> {
    led: bool,
    /// Number and work of the round that is led, as far as others may help.
    work: Option<(u64, W)>,
    /// Which work this is.
    number: u64,
}

/// What a thread is to do that waits for a round.
pub enum Turn<'a, W, R: Rank<Key = ()>> {
    /// There is nothing more to do.
    Over,
    /// Do the next round: nobody else does until this is dropped.
    Lead(Lead<'a, W, R>),
    /// Help with this, and ask again.
    Help(W),
}

/// Which work a waiting thread has seen.
#[derive(Debug, Default)]
pub struct Seen(u64);

/// The right to lead a round. Where it is dropped without [`Lead::finish`] all who wait look for themselves.
pub struct Lead<'a, W, R: Rank<Key = ()>> {
    rounds: &'a Rounds<W, R>,
    end: End,
}

#[derive(Clone, Copy)]
enum End {
    /// This round is over.
    Of(u64),
    /// There was nothing to do.
    Nothing,
    /// It failed, or its thread panicked.
    Failed,
}

impl<W, R: Rank<Key = ()>> Default for Rounds<W, R> {
    fn default() -> Self {
        Self { state: Mutex::new(State { led: false, work: None, number: 0 }), waiting: Default::default() }
    }
}

#[cfg(not(loom))]
impl<W, R: Rank<Key = ()>> fmt::Debug for Rounds<W, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Rounds")
    }
}

impl<W: Clone, R: Rank<Key = ()>> Rounds<W, R> {
    /// Waits until there is something to do for who waits for `round`, or `over` says that there is nothing more. The leader
    /// makes that true before it lets go of [`Lead`].
    pub fn turn(&self, round: u64, seen: &mut Seen, over: impl Fn() -> bool) -> Turn<'_, W, R> {
        let mut s = self.state.lock();
        loop {
            if over() {
                // perhaps it was the only one that was woken, to lead: those who sleep for the same must hear of it
                let led = s.led;
                drop(s);
                if !led {
                    self.waiting(round).notify_all();
                }
                return Turn::Over;
            }
            if !s.led {
                s.led = true;
                return Turn::Lead(Lead { rounds: self, end: End::Failed });
            }
            if let Some((of, work)) = &s.work
                && *of <= round
                && seen.0 != s.number
            {
                seen.0 = s.number;
                return Turn::Help(work.clone());
            }
            self.waiting(round).wait(&mut s);
        }
    }
}

impl<W, R: Rank<Key = ()>> Rounds<W, R> {
    fn waiting(&self, round: u64) -> &Condvar {
        &self.waiting[(round % 2) as usize]
    }
}

impl<W, R: Rank<Key = ()>> Lead<'_, W, R> {
    /// Others may help with this round, and so many of those who sleep are woken for it.
    pub fn share(&self, round: u64, work: W, helpers: usize) {
        let mut s = self.rounds.state.lock();
        s.number += 1;
        s.work = Some((round, work));
        drop(s);
        for _ in 0..helpers {
            // those who wait for the next one help this one along as well
            if !self.rounds.waiting(round).notify_one() && !self.rounds.waiting(round + 1).notify_one() {
                break;
            }
        }
    }
    /// Nobody begins to help any more.
    pub fn take_back(&self) {
        self.rounds.state.lock().work = None;
    }
    /// The round is over: `over` of all who wait for it is true.
    pub fn finish(mut self, round: u64) {
        self.end = End::Of(round);
    }
    /// There was nothing to do: no round began, and each who waits has to find that out for itself.
    pub fn nothing_to_do(mut self) {
        self.end = End::Nothing;
    }
}

impl<W, R: Rank<Key = ()>> Drop for Lead<'_, W, R> {
    fn drop(&mut self) {
        {
            let mut s = self.rounds.state.lock();
            s.led = false;
            s.work = None;
        }
        let rounds = self.rounds;
        match self.end {
            End::Of(round) => {
                rounds.waiting(round).notify_all();
                // it leads; whoever came meanwhile and leads already lets it wait for the end of that
                rounds.waiting(round + 1).notify_one();
            }
            End::Nothing => rounds.waiting.iter().for_each(|w| _ = w.notify_one()),
            End::Failed => rounds.waiting.iter().for_each(|w| _ = w.notify_all()),
        }
    }
}

/// Locks of loom with the interface of ours.
#[cfg(loom)]
pub(crate) mod loomed {
    use crate::rank::Rank;
    use std::marker::PhantomData;
    use std::ops::{Deref, DerefMut};

    pub(crate) struct Mutex<T, R: Rank>(loom::sync::Mutex<T>, PhantomData<fn() -> R>);
    pub(crate) struct Guard<'a, T>(Option<loom::sync::MutexGuard<'a, T>>);
    pub(crate) struct Condvar(loom::sync::Condvar);

    impl<T, R: Rank> Mutex<T, R> {
        pub fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value), PhantomData)
        }
        pub fn lock(&self) -> Guard<'_, T> {
            Guard(Some(self.0.lock().unwrap()))
        }
    }
    impl Default for Condvar {
        fn default() -> Self {
            Self(loom::sync::Condvar::new())
        }
    }
    impl Condvar {
        pub fn wait<T>(&self, guard: &mut Guard<'_, T>) {
            guard.0 = guard.0.take().map(|g| self.0.wait(g).unwrap());
        }
        /// Whether one was woken nobody knows.
        pub fn notify_one(&self) -> bool {
            self.0.notify_one();
            false
        }
        pub fn notify_all(&self) -> usize {
            self.0.notify_all();
            0
        }
    }
    impl<T> Deref for Guard<'_, T> {
        type Target = T;
        fn deref(&self) -> &T {
            self.0.as_ref().unwrap()
        }
    }
    impl<T> DerefMut for Guard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            self.0.as_mut().unwrap()
        }
    }
}
