use super::*;
use crate::rank::{Cell, Unranked};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::time::Duration;

type Lock<T> = BiasedRwLock<T, Unranked>;

impl Guarded for i32 {}
impl Guarded for u8 {}
impl Guarded for usize {}
impl Guarded for [u64; 2] {}

/// The mark and the word of the lock below are neighbours: a value that begins a cache line has both there.
#[test]
fn the_mark_lies_beside_the_lock() {
    use std::mem::offset_of;
    type Long = BiasedRwLock<[u64; 2], Unranked>;
    assert_eq!(offset_of!(Long, lock) - offset_of!(Long, bias), 8);
}

/// Reads by threads in turn until the lock is biased; how many reads that took.
fn share<T: Guarded + Send + Sync>(lock: &Lock<T>) -> u32 {
    let mut reads = 0;
    // two threads that live at once, or one would get the other's number
    let (here, there) = (Barrier::new(2), Barrier::new(2));
    let done = AtomicBool::new(false);
    std::thread::scope(|s| {
        s.spawn(|| {
            loop {
                here.wait();
                if done.load(SeqCst) {
                    return;
                }
                drop(lock.read());
                there.wait();
            }
        });
        while !lock.is_biased() && reads < 64 {
            drop(lock.read());
            here.wait();
            there.wait();
            reads += 2;
        }
        done.store(true, SeqCst);
        here.wait();
    });
    reads
}

#[test]
fn only_readers_in_turn_bias_it_and_a_writer_ends_that() {
    let lock = Lock::new(7);
    for _ in 0..1000 {
        drop(lock.read());
    }
    assert!(!lock.is_biased(), "one thread alone");
    for _ in 0..3 {
        assert!(share(&lock) < 64);
        assert!(lock.is_biased());
        assert_eq!(*lock.read(), 7);
        assert!(lock.is_biased());
        *lock.write() = 7;
        assert!(!lock.is_biased());
        assert_eq!(*lock.read(), 7);
    }
}

/// Whether there can be owners; says so where there cannot.
fn can_own() -> bool {
    crate::membarrier::prepare();
    let can = crate::membarrier::is_ready();
    if !can {
        eprintln!("SKIPPED: membarrier(2) is denied here, and no lock gets an owner");
    }
    can
}

/// Reads by this thread alone until it owns the lock; how many that took.
fn own<T: Guarded + Send + Sync>(lock: &Lock<T>) -> u32 {
    (0..100_000)
        .find(|_| {
            drop(lock.read());
            lock.is_owned()
        })
        .expect("its only reader owns it")
}

#[test]
fn who_reads_alone_owns_it_until_another_writes() {
    if !can_own() {
        return;
    }
    let lock = Lock::new(7);
    let mut reads = own(&lock);
    assert!((60..80).contains(&reads), "{reads}");
    for _ in 0..6 {
        std::thread::scope(|s| s.spawn(|| *lock.write() += 1).join().unwrap());
        assert!(!lock.is_owned());
        // each time twice as often
        let again = own(&lock);
        assert!((reads * 2 - 8..reads * 2 + 8).contains(&again), "{reads} {again}");
        reads = again;
    }
    assert_eq!(*lock.read(), 13);
    // by its own writes it loses it for a few reads
    for _ in 0..20 {
        *lock.write() = 1;
        assert!(!lock.is_owned());
        assert!(own(&lock) < 32);
    }
}

/// A writer takes the mark away, and waits for a reader that has published itself.
fn a_writer_waits(lock: &Lock<i32>, is_marked: impl Fn() -> bool) {
    let reader = lock.read();
    assert!(matches!(reader.reader, Reader::Published(_)));
    let written = AtomicBool::new(false);
    std::thread::scope(|s| {
        s.spawn(|| {
            *lock.write() = 1;
            written.store(true, SeqCst);
        });
        while is_marked() {
            std::thread::yield_now();
        }
        std::thread::sleep(Duration::from_millis(10));
        assert!(!written.load(SeqCst));
        assert_eq!(*reader, 0);
        drop(reader);
    });
    assert_eq!(*lock.read(), 1);
}

#[test]
fn writers_wait_for_the_owner() {
    if !can_own() {
        return;
    }
    let lock = Lock::new(0);
    own(&lock);
    a_writer_waits(&lock, || lock.is_owned());
}

#[test]
fn the_owner_keeps_itself_and_others_from_writing_while_it_reads() {
    if !can_own() {
        return;
    }
    for other in [false, true] {
        let lock = Lock::new(0);
        own(&lock);
        let reader = lock.read();
        let fails = || lock.try_write().is_none();
        assert!(if other { std::thread::scope(|s| s.spawn(fails).join().unwrap()) } else { fails() });
        assert!(lock.is_owned(), "who does not wait leaves it as it was");
        drop(reader);
        assert!(!fails());
    }
}

/// Other readers go in beside the owner, and by and by all go past the lock; a writer then waits for each of them.
#[test]
fn other_readers_end_an_ownership() {
    if !can_own() {
        return;
    }
    let lock = Lock::new(0);
    own(&lock);
    let reader = lock.read();
    assert!(share(&lock) < 64);
    assert!(lock.is_biased() && !lock.is_owned());
    assert!(lock.try_write().is_none());
    drop(reader);
    assert!(lock.try_write().is_some());
}

#[test]
fn nobody_owns_it_where_the_kernel_makes_no_fences() {
    crate::membarrier::DENIED_HERE.set(true);
    let lock = Lock::new(7);
    for _ in 0..100_000 {
        drop(lock.read());
    }
    crate::membarrier::DENIED_HERE.set(false);
    assert!(!lock.is_owned());
    assert!(share(&lock) < 64);
    assert!(lock.is_biased());
}

/// An owner that reads all the time, and others that write: it never sees half of a write.
#[test]
fn an_owner_and_writers_exclude_each_other() {
    let lock = Lock::new([0u64; 2]);
    let done = AtomicBool::new(false);
    let (can_own, mut owned, mut reads) = (can_own(), 0u32, 0u32);
    std::thread::scope(|s| {
        s.spawn(|| {
            for i in 0..3000 {
                let mut g = lock.write();
                g[0] += 1;
                std::hint::spin_loop();
                g[1] += 1;
                drop(g);
                // for longer and longer, as the owner has to read twice as often each time, up to a limit
                let until = std::time::Instant::now() + Duration::from_micros(i % 200 * 10);
                while std::time::Instant::now() < until {
                    std::hint::spin_loop();
                }
            }
            done.store(true, SeqCst);
        });
        while !done.load(SeqCst) {
            let g = lock.read();
            assert_eq!(g[0], g[1]);
            reads += 1;
            owned += u32::from(matches!(g.reader, Reader::Published(_)));
        }
    });
    assert_eq!(*lock.read(), [3000; 2]);
    assert!(owned > 0 || !can_own, "none of {reads} reads");
}

#[test]
fn writers_wait_for_published_readers() {
    let lock = Lock::new(0);
    share(&lock);
    let reader = lock.read();
    assert!(lock.is_biased());
    assert!(lock.try_write().is_none());
    assert!(lock.is_biased(), "who does not wait leaves it as it was");
    assert!(lock.try_read().is_some());
    drop(reader);
    a_writer_waits(&lock, || lock.is_biased());
    drop(lock.try_write().unwrap());
}

#[test]
fn more_locks_than_a_line_has_places() {
    let locks: Vec<Lock<usize>> = (0..20).map(Lock::new).collect();
    locks.iter().for_each(|l| assert!(share(l) < 64));
    let all: Vec<_> = locks.iter().map(|l| l.read()).collect();
    assert!(all.iter().enumerate().all(|(i, g)| **g == i));
    assert!(locks.iter().all(|l| l.try_write().is_none()));
    drop(all);
    assert!(locks.iter().all(|l| l.try_write().is_some()));
}

/// Readers never see half of a write, and no write is lost, while the mark comes and goes.
#[test]
fn readers_and_writers_exclude_each_other() {
    let lock = Lock::new([0u64; 2]);
    let biased = AtomicU32::new(0);
    std::thread::scope(|s| {
        for t in 0..4 {
            let (lock, biased) = (&lock, &biased);
            s.spawn(move || {
                for i in 0..20_000 {
                    if i % 50 == t {
                        let mut g = lock.write();
                        g[0] += 1;
                        std::hint::spin_loop();
                        g[1] += 1;
                    } else if i % 77 == t {
                        if let Some(mut g) = lock.try_write() {
                            g[0] += 0;
                        }
                    } else {
                        let g = lock.read();
                        assert_eq!(g[0], g[1]);
                        biased.fetch_add(u32::from(matches!(g.reader, Reader::Published(_))), SeqCst);
                    }
                }
            });
        }
    });
    assert_eq!(*lock.read(), [1600; 2]);
}

#[test]
fn the_order_of_locks_is_checked_where_readers_are_published() {
    let cell = |n| BiasedRwLock::<u8, Cell>::keyed(0, n);
    let (a, b) = (cell(1), cell(2));
    let twice = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let first = b.write();
        drop(a.write_above(&first));
    }));
    assert_eq!(twice.is_err(), crate::CHECKED);
}
