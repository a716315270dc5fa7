//! A bug on purpose that only several threads see, found in a random run of theirs and made short.
#![cfg(feature = "planted-bugs")]

use braidfs::planted::{Bug, plant};
use braidfs_testkit::crash::explore::Limits;
use braidfs_testkit::crash::minimise_threads::{every_crash_of, minimise_threads};
use braidfs_testkit::crash::threads::{Threads, base, run};
use braidfs_testkit::env_number;
use braidfs_testkit::ops::to_rust;
use std::time::Duration;

/// Operations that the shortest failing run may have: one that changes something, and two syncs; and one to spare.
const FEW: usize = 4;

// one test: a planted bug is one of the whole process
#[test]
fn a_run_of_threads_is_made_short() {
    let limits = Limits::brief();
    let find = |seed| run(seed, &limits, &|| false, &mut Default::default());
    // which seeds see it changes with the locks that are taken
    plant(Some(Bug::CommitUnderWayForgotten));
    let (seed, failure) = (80..400).find_map(|seed| Some((seed, find(seed).err()?))).expect("no seed sees it");
    let all = Threads::random(&base(seed).unwrap(), seed, limits.random_ops);
    println!("seed {seed}");
    plant(None);
    find(seed).unwrap();
    plant(Some(Bug::CommitUnderWayForgotten));
    let limit = Duration::from_secs(env_number("BRAIDFS_SHRINK_SECONDS", 900));
    let short = minimise_threads(&all, &failure, limit).unwrap().expect("it fails each time");
    println!("{} operations, made short:\n{}", all.count(), short.to_test());
    assert!(all.count() > 50 * FEW);
    let w = &short.workload;
    assert!(w.count() <= FEW && w.lists.len() == 2, "{w:#?}");
    assert!(short.failure.crash.is_some(), "{}", short.failure);
    let text = short.to_test();
    assert!(w.lists.iter().flatten().all(|op| text.contains(&to_rust(op))), "{text}");
    // the printed test fails with the bug, and not without; another schedule finds it, too
    every_crash_of(w).unwrap_err();
    plant(None);
    every_crash_of(w).unwrap();
    if env_number("BRAIDFS_CRASH_DEEP", 0) == 0 {
        // of 64 schedules many see nothing, each after all crashes of its run: minutes
        return;
    }
    plant(Some(Bug::CommitUnderWayForgotten));
    let mut others = (0..64).map(|n| Threads { schedule: !w.schedule - n, ..w.clone() });
    let other = others.find(|o| every_crash_of(o).is_err()).expect("another schedule finds it, too");
    plant(None);
    every_crash_of(&other).unwrap();
}
