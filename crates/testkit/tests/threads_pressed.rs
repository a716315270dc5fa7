//! Many short runs of several threads, most of them with no room in the cache: each answer, and the tree at the end, and what a
//! crash at a few places leaves. What a commit, the cleaner or an fsync needs in memory longer than it stays there is seen so.
//!
//! `BRAIDFS_SEED`, `BRAIDFS_THREAD_RUNS` (default 150). The seed gives the run, schedule included. With `--features planted-bugs`
//! the runs, twice as many where need be, must find a commit that lets go of its cells.
#![cfg(feature = "schedule")]

use braidfs_testkit::crash::check::Counts;
use braidfs_testkit::crash::explore::Limits;
use braidfs_testkit::crash::threads::run;
use braidfs_testkit::env_number;
use braidfs_testkit::run::{APART, BESIDE, PRESSED};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Kinds of volumes, in turns.
const KINDS: [u64; 6] = [PRESSED, PRESSED | BESIDE, 0, BESIDE, PRESSED | APART, APART];

/// Runs seeds `0..count` of each turn by as many threads as there are CPUs, until one fails: it, and why; and what all did.
fn first_failure(count: u64) -> (Option<(u64, String)>, Counts) {
    let limits = Limits { random_points: 2, ..Limits::brief() };
    let (next, failed, all) = (AtomicU64::new(0), Mutex::new(None), Mutex::new(Counts::default()));
    let from = braidfs_testkit::seed().wrapping_mul(1 << 32) & !(PRESSED | BESIDE | APART);
    std::thread::scope(|s| {
        for _ in 0..limits.threads {
            s.spawn(|| {
                loop {
                    let n = next.fetch_add(1, Relaxed);
                    if n >= count || failed.lock().unwrap().is_some() {
                        break;
                    }
                    let seed = (from + n) | KINDS[n as usize % KINDS.len()];
                    let mut counts = Counts::default();
                    if let Err(e) = run(seed, &limits, &|| false, &mut counts) {
                        failed.lock().unwrap().get_or_insert((seed, e.to_string()));
                    }
                    all.lock().unwrap().add(&counts);
                }
            });
        }
    });
    (failed.into_inner().unwrap(), all.into_inner().unwrap())
}

// one test: a planted bug is one of the whole process
#[test]
fn runs_of_threads_without_room_in_the_cache() {
    let count = env_number("BRAIDFS_THREAD_RUNS", 150);
    #[cfg(feature = "planted-bugs")]
    {
        use braidfs::planted::{Bug, plant};
        plant(Some(Bug::CellsLetGo));
        let (found, _) = first_failure(2 * count);
        plant(None);
        let (seed, why) = found.expect("no run sees a commit that lets go of its cells");
        println!("with the bug: seed {seed}: {}", why.lines().next().unwrap_or_default());
    }
    let (failed, c) = first_failure(count);
    if let Some((seed, why)) = failed {
        panic!("braidfs_testkit::crash::threads::run({seed:#x}, …): {why}");
    }
    println!("{} names changed beside each other, {} blocks moved, {:?}", c.changed_beside, c.moved, c.did);
    let happened = [("names changed beside each other", c.changed_beside), ("blocks moved", c.moved)];
    for (what, n) in happened.into_iter().chain(c.did.named()) {
        // so few runs may have none of them
        assert!(n > 0 || count < 150, "no {what} in {count} runs: they judge less than they are for");
    }
}
