//! Sharing out work among threads.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};

/// CPUs that the program may use.
pub fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Calls `f` for `0 .. items` on `threads` threads, each with a state of its own that `init` makes; the states. The
/// first error stops all. `progress` is told how many are done, now and then, on the calling thread.
///
/// # Errors
/// The first of `f`.
pub fn each<W: Send, E: Send>(
    threads: usize,
    items: usize,
    progress: impl Fn(u64),
    init: impl Fn() -> W + Sync,
    f: impl Fn(&mut W, usize) -> Result<(), E> + Sync,
) -> Result<Vec<W>, E> {
    progress(0);
    if threads == 1 || items < 2 {
        let mut w = init();
        for i in 0..items {
            f(&mut w, i)?;
            progress(i as u64 + 1);
        }
        return Ok(vec![w]);
    }
    let (next, done, stop) = (AtomicUsize::new(0), AtomicU64::new(0), AtomicBool::new(false));
    let caller = std::thread::current();
    let work = || {
        let mut w = init();
        while !stop.load(Relaxed) {
            let i = next.fetch_add(1, Relaxed);
            if i >= items {
                break;
            }
            if let Err(e) = f(&mut w, i) {
                stop.store(true, Relaxed);
                caller.unpark();
                return Err(e);
            }
            done.fetch_add(1, Relaxed);
        }
        caller.unpark();
        Ok(w)
    };
    std::thread::scope(|s| {
        let workers: Vec<_> = (0..threads.min(items)).map(|_| s.spawn(work)).collect();
        while workers.iter().any(|w| !w.is_finished()) {
            progress(done.load(Relaxed));
            std::thread::park_timeout(std::time::Duration::from_millis(20));
        }
        progress(items as u64);
        workers.into_iter().map(|w| w.join().unwrap_or_else(|p| std::panic::resume_unwind(p))).collect()
    })
}
