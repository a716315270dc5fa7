//! Bounded work side by side: the items of a piece of work are shared out among the caller and some threads that live as
//! long as it.
//!
//! All the work of one [`Workers`] takes no more threads than it was made with, also where an item shares out work of its own:
//! a thread that finds no item left gives its place back, and whoever shares out work next may take it. Which thread does an
//! item decides nothing: results come in the order of items, and of several errors the first one counts, as if the items had
//! been done one after the other.

use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::Builder;

/// CPUs that the program might use when it asked first: the system reads some files for the answer, which a mount in memory
/// would notice.
pub fn cpus() -> usize {
    static CPUS: OnceLock<usize> = OnceLock::new();
    *CPUS.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// Threads beyond the number of CPUs: more reads under way would not make a device faster, and each thread has a journal in
/// memory.
const WAITING: usize = 8;

thread_local! {
    static OWN: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread was started for a volume's work ([`become_own`]): it may be told where to run.
pub fn is_own() -> bool {
    OWN.get()
}

/// The calling thread was started for a volume's work, and will do no other.
pub fn become_own() {
    OWN.set(true);
}

/// So many threads, the caller's included.
#[derive(Debug)]
pub struct Workers {
    /// Threads that may still be started.
    spare: AtomicUsize,
    /// Also for work that one thread does sooner.
    always: bool,
}

impl Workers {
    /// The caller alone.
    pub fn alone() -> Self {
        Self::with(0, false)
    }

    /// One for each CPU that the program may use, and as many again, at most [`WAITING`], which work while others wait for what
    /// they read; what is little work the caller does alone.
    pub fn available() -> Self {
        Self::with(cpus() + cpus().min(WAITING) - 1, false)
    }

    /// So many, however little the work is; for tests and experiments.
    pub fn always(threads: usize) -> Self {
        Self::with(threads.max(1) - 1, true)
    }

    fn with(others: usize, always: bool) -> Self {
        Self { spare: AtomicUsize::new(others), always }
    }

    /// Threads that `items` items would have now, of which fewer than `grain` are not worth a thread.
    pub fn threads_for(&self, items: usize, grain: usize) -> usize {
        let grain = if self.always { 1 } else { grain.max(1) };
        (self.spare.load(Ordering::Relaxed) + 1).min(items / grain).max(1)
    }

    /// [`Self::each_with`] without a state.
    ///
    /// # Errors
    /// As there.
    pub fn each<T: Send, E: Send>(
        &self,
        items: usize,
        grain: usize,
        f: impl Fn(usize) -> Result<T, E> + Sync,
    ) -> Result<Vec<T>, E> {
        self.each_with(items, grain, || (), |(), i| f(i))
    }

    /// What `f` makes of `0 .. items`, in this order, by as many threads as there are for it; each has a state of its own that
    /// `init` makes. One thread for `grain` items or fewer. After an error no later item is begun.
    ///
    /// # Errors
    /// Of `f`: that of the lowest item.
    pub fn each_with<S, T: Send, E: Send>(
        &self,
        items: usize,
        grain: usize,
        init: impl Fn() -> S + Sync,
        f: impl Fn(&mut S, usize) -> Result<T, E> + Sync,
    ) -> Result<Vec<T>, E> {
        self.each_on(Builder::new, items, grain, init, f)
    }

    /// [`Self::each_with`] on threads that `thread` describes. Where the system starts no more of them, those that there are do
    /// it all.
    fn each_on<S, T: Send, E: Send>(
        &self,
        thread: impl Fn() -> Builder,
        items: usize,
        grain: usize,
        init: impl Fn() -> S + Sync,
        f: impl Fn(&mut S, usize) -> Result<T, E> + Sync,
    ) -> Result<Vec<T>, E> {
        let places = self.take(self.threads_for(items, grain) - 1);
        if places.is_empty() {
            let mut state = init();
            return (0..items).map(|i| f(&mut state, i)).collect();
        }
        let (next, failed) = (AtomicUsize::new(0), AtomicUsize::new(usize::MAX));
        let work = || {
            let (mut state, mut done, mut error) = (init(), Vec::new(), None);
            loop {
                let i = next.fetch_add(1, Ordering::Relaxed);
                // those below a failed one have been taken before it, and are done
                if i >= items || i > failed.load(Ordering::Relaxed) {
                    return (done, error);
                }
                match f(&mut state, i) {
                    Ok(t) => done.push((i, t)),
                    Err(e) => {
                        failed.fetch_min(i, Ordering::Relaxed);
                        error = Some((i, e));
                        return (done, error);
                    }
                }
            }
        };
        let (mut done, errors) = std::thread::scope(|s| {
            let work = &work;
            let others: Vec<_> = places
                .into_iter()
                .map_while(|place| {
                    let run = move || {
                        become_own();
                        let _place = place;
                        work()
                    };
                    thread().spawn_scoped(s, run).ok()
                })
                .collect();
            let (mut done, error) = work();
            let mut errors: Vec<_> = error.into_iter().collect();
            for t in others {
                let (more, error) = t.join().unwrap_or_else(|p| std::panic::resume_unwind(p));
                done.extend(more);
                errors.extend(error);
            }
            (done, errors)
        });
        if let Some((_, e)) = errors.into_iter().min_by_key(|(i, _)| *i) {
            return Err(e);
        }
        done.sort_unstable_by_key(|(i, _)| *i);
        Ok(done.into_iter().map(|(_, t)| t).collect())
    }

    /// At most so many places of threads.
    fn take(&self, most: usize) -> Vec<Place<'_>> {
        let mut got = 0;
        // only the number counts: what a thread does is handed over with it
        let _ = self.spare.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |spare| {
            got = spare.min(most);
            Some(spare - got)
        });
        (0..got).map(|_| Place(self)).collect()
    }
}

/// The right to run a thread, until it is dropped.
struct Place<'w>(&'w Workers);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.spare.fetch_add(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn results_come_in_order_whoever_makes_them() {
        for threads in [1, 2, 7] {
            let made: Vec<usize> = Workers::always(threads).each(100, 1, |i| Ok::<_, ()>(i * i)).unwrap();
            assert_eq!(made, (0..100).map(|i| i * i).collect::<Vec<_>>());
        }
        assert_eq!(Workers::always(3).each(0, 1, |_| Ok::<(), ()>(())), Ok(Vec::new()));
    }

    #[test]
    fn the_lowest_error_counts_and_nothing_begins_after_it() {
        for _ in 0..100 {
            let begun: Vec<AtomicBool> = (0..1000).map(|_| AtomicBool::new(false)).collect();
            let r = Workers::always(4).each(1000, 1, |i| {
                begun[i].store(true, Ordering::Relaxed);
                if i >= 20 && i % 3 == 0 { Err(i) } else { Ok(()) }
            });
            assert_eq!(r, Err(21));
            assert!(begun[..=21].iter().all(|b| b.load(Ordering::Relaxed)));
            assert!(!begun[999].load(Ordering::Relaxed), "went on behind the error");
        }
    }

    /// Two items that wait for each other need two threads; a third one there is not, whoever asks.
    #[test]
    fn there_are_so_many_threads_and_no_more() {
        let w = Workers::always(2);
        let both = Barrier::new(2);
        let at_once = AtomicUsize::new(0);
        let inner: Result<_, usize> = w.each(2, 1, |_| {
            both.wait();
            // the other one's place is taken
            let n = w.threads_for(8, 1);
            both.wait();
            w.each(8, 1, |_| {
                let now = at_once.fetch_add(1, Ordering::SeqCst) + 1;
                std::thread::yield_now();
                at_once.fetch_sub(1, Ordering::SeqCst);
                if now <= 2 { Ok(()) } else { Err(now) }
            })?;
            Ok(n)
        });
        assert_eq!(inner, Ok(vec![1, 1]));
        // both places are back
        assert_eq!(w.threads_for(8, 1), 2);
    }

    #[test]
    fn little_work_is_done_by_the_caller() {
        let w = Workers::with(3, false);
        assert_eq!([0, 7, 8, 15, 16, 1000].map(|items| w.threads_for(items, 8)), [1, 1, 1, 1, 2, 4]);
        assert_eq!(Workers::always(3).threads_for(2, 8), 2);
    }

    /// No system has room for such a stack.
    #[test]
    fn without_a_thread_the_caller_does_it() {
        let w = Workers::always(4);
        let none = || Builder::new().stack_size(1 << 56);
        assert!(none().spawn(|| ()).is_err());
        let made = w.each_on(none, 20, 1, || (), |(), i| Ok::<_, ()>(i));
        assert_eq!(made, Ok((0..20).collect()));
        assert_eq!(w.threads_for(8, 1), 4, "the places are back");
    }

    /// A panic of an item is the caller's, and takes no place along.
    #[test]
    fn a_panic_goes_to_the_caller() {
        let w = Workers::always(2);
        let r = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            w.each(8, 1, |i| if i == 3 { panic!("on purpose") } else { Ok::<(), ()>(()) })
        }));
        assert!(r.is_err());
        assert_eq!(w.threads_for(8, 1), 2);
    }
}
