//! How often and how long threads wait for locks, by class of the locks: what lock_stat of Linux tells of the kernel's. Counted in
//! a build with the feature `lock-waits`; in every other build this is nothing.
//!
//! A wait is counted where a lock is not had at the first attempt, and lasts until it is had, spinning included. What a thread
//! waits for at a [`crate::Condvar`], and until it has the lock again after that, is not counted: there it waits for an event.

use crate::rank::Rank;

/// What threads waited for locks of a class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Waits {
    /// Name of the class.
    pub lock: &'static str,
    /// How often a thread waited.
    pub waits: u64,
    /// How long all waits were together, nanoseconds.
    pub nanos: u64,
}

/// Waits; its time is counted for the class of `R`.
#[inline(always)]
pub(crate) fn timed<R: Rank, T>(wait: impl FnOnce() -> T) -> T {
    let class = R::CLASS;
    #[cfg(feature = "lock-waits")]
    let begun = std::time::Instant::now();
    let done = wait();
    #[cfg(feature = "lock-waits")]
    counts::add(class, begun.elapsed());
    let _ = class;
    done
}

/// Of all classes that a thread of this process has waited for.
pub fn so_far() -> Vec<Waits> {
    #[cfg(feature = "lock-waits")]
    return counts::all();
    #[cfg(not(feature = "lock-waits"))]
    Vec::new()
}

#[cfg(feature = "lock-waits")]
mod counts {
    use super::Waits;
    use crate::rank::{ALL, Class};
    use crate::slots::Line;
    use std::sync::atomic::AtomicU64;
    use std::sync::atomic::Ordering::Relaxed;
    use std::time::Duration;

    /// Waits and nanoseconds of each of [`ALL`], and of locks without a rank. One line for each class: only who has waited
    /// for a lock that is contended writes it.
    static COUNTS: [Line<[AtomicU64; 2]>; ALL.len() + 1] =
        [const { Line([const { AtomicU64::new(0) }; 2]) }; ALL.len() + 1];

    #[cold]
    #[inline(never)]
    pub fn add(class: Option<&'static Class>, time: Duration) {
        let number = class.and_then(|c| ALL.iter().position(|a| a.name == c.name)).unwrap_or(ALL.len());
        let [waits, nanos] = &COUNTS[number].0;
        waits.fetch_add(1, Relaxed);
        nanos.fetch_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Relaxed);
    }

    pub fn all() -> Vec<Waits> {
        let names = ALL.iter().map(|c| c.name).chain(["without a rank"]);
        let waits = |(lock, line): (_, &Line<[AtomicU64; 2]>)| {
            let [waits, nanos] = line.0.each_ref().map(|n| n.load(Relaxed));
            Waits { lock, waits, nanos }
        };
        names.zip(&COUNTS).map(waits).filter(|w| w.waits > 0).collect()
    }
}

#[cfg(all(test, feature = "lock-waits"))]
mod tests {
    use super::*;
    use crate::rank::{Cell, Gate, Label, Segment, Trimming, Work};
    use crate::{BiasedRwLock, Guarded, Mutex, PassLock, RwLock};
    use std::time::Duration;

    /// So long at least is a lock held that another thread waits for.
    const HELD: Duration = Duration::from_millis(20);

    fn of<R: Rank>() -> (u64, u64) {
        let name = R::CLASS.map(|c| c.name);
        so_far().iter().find(|w| Some(w.lock) == name).map_or((0, 0), |w| (w.waits, w.nanos))
    }

    /// Another thread takes the lock of class `R` while this one has it. No other test waits for such a lock.
    fn waits<R: Rank, G>(hold: impl Fn() -> G, take: impl Fn() + Sync) {
        take();
        assert_eq!(of::<R>(), (0, 0), "nobody else has it");
        // on a busy machine the other may come when it is free again
        for _ in 0..200 {
            std::thread::scope(|s| {
                let guard = hold();
                s.spawn(&take);
                std::thread::sleep(HELD);
                drop(guard);
            });
            if of::<R>().0 > 0 {
                break;
            }
        }
        let (waits, nanos) = of::<R>();
        assert_eq!(waits, 1);
        assert!(nanos > 0 && nanos < 60_000_000_000, "{nanos} ns");
        take();
        assert_eq!(of::<R>().0, 1, "free again");
    }

    #[test]
    fn a_mutex_that_somebody_has() {
        let lock = Mutex::<u32, Trimming>::new(0);
        waits::<Trimming, _>(|| lock.lock(), || *lock.lock() += 1);
    }

    #[test]
    fn a_lock_that_somebody_writes_or_reads() {
        let lock = RwLock::<u32, Label>::new(0);
        waits::<Label, _>(|| lock.write(), || drop(lock.read()));
        let lock = RwLock::<u32, Segment>::new(0);
        waits::<Segment, _>(|| lock.read(), || *lock.write() += 1);
    }

    #[test]
    fn a_gate_that_is_shut() {
        let lock = PassLock::<u32, Gate>::keyed(0, 1);
        waits::<Gate, _>(|| lock.write(), || drop(lock.read()));
    }

    #[test]
    fn a_gate_with_somebody_inside() {
        let lock = PassLock::<u32, Work>::new(0);
        waits::<Work, _>(|| lock.read(), || *lock.write() += 1);
    }

    struct Value;
    impl Guarded for Value {}

    #[test]
    fn a_lock_whose_readers_publish_themselves() {
        let lock = BiasedRwLock::<Value, Cell>::keyed(Value, 1);
        waits::<Cell, _>(|| lock.write(), || drop(lock.read()));
    }
}
