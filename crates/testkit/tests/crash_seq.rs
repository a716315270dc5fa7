//! Crashes in sequences that are known to be hard, in those of one operation and of several, and in random runs, some of each in
//! turns, as far as the limits reach, in an order that is always the same.
//!
//! `BRAIDFS_CRASH_SECONDS` (default 900) and `BRAIDFS_CRASH_STATES` (default 100000; of fewer a smaller part are crashes of a
//! recovery) bound it. All of them, by hours: `make crash`. A failure is made short for `BRAIDFS_SHRINK_SECONDS` (60) and printed as a test to be kept.

use braidfs_testkit::crash::explore::{Limits, in_seconds};
use braidfs_testkit::crash::minimise::minimise;
use braidfs_testkit::crash::plan::Plan;
use braidfs_testkit::crash::run::{TURNS, brief};
use braidfs_testkit::crash::workload::{Kind, bases};
use braidfs_testkit::env_number;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Fewer states say nothing: recovery was too slow, or hardly anything was written.
const LEAST_STATES: u64 = 10_000;
/// So many come to all parts.
const STATES: u64 = 100_000;

#[test]
fn crashes_in_short_sequences() {
    let bases = bases().unwrap();
    let plan = Plan::new(Kind::ORDINARY, 1);
    let mut limits = Limits::brief();
    limits.until = in_seconds(env_number("BRAIDFS_CRASH_SECONDS", 900));
    limits.states = env_number("BRAIDFS_CRASH_STATES", STATES);
    limits.failures = 3;
    if limits.states < STATES {
        // most states are crashes of a recovery: else fewer would come to the first parts only
        for depth in [&mut limits.depth, &mut limits.three, &mut limits.random] {
            depth.second_every *= 3;
            depth.threads_every *= 3;
        }
    }
    let start = Instant::now();
    let done = Mutex::new(BTreeMap::new());
    let report = brief(&plan, &bases, &limits, TURNS, &|part, n, _, _| {
        done.lock().unwrap().insert(plan.part(part).name, n);
    });
    let done = done.into_inner().unwrap();
    println!("{}\n{done:?}", report.summary(start.elapsed()));
    let failures: Vec<String> = report
        .failures
        .iter()
        .map(|f| {
            let limit = Duration::from_secs(env_number("BRAIDFS_SHRINK_SECONDS", 60));
            let short = minimise(&bases, &f.workload, &f.failure, limits.random_ops, limit);
            let test = short.ok().flatten().map_or_else(String::new, |s| s.to_test());
            format!("{}: workload {}:{}: {}\n{test}", plan.part(f.part).name, f.part, f.number, f.failure)
        })
        .collect();
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
    assert_eq!(done.len(), TURNS.len(), "not all parts were begun: BRAIDFS_CRASH_SECONDS or _STATES is too low");
    let (states, least) = (report.counts.states(), limits.states.min(LEAST_STATES));
    assert!(states >= least, "{states} crash states judged, {least} are the least: BRAIDFS_CRASH_SECONDS is too low");
    assert_eq!(report.counts.strays, 0, "recovery depends on more than what it reads");
    let c = &report.counts;
    let happened = [
        ("names changed beside each other", c.changed_beside.min(c.states_beside)),
        ("blocks moved", c.moved.min(c.states_moved)),
        ("inodes judged with others of their domain", c.together),
        ("volumes used after recovery", c.deep),
        ("crashes inside recovery", c.crashed.min(c.second_images)),
        ("crashes inside fsck", c.checked_images),
        ("recoveries by several threads", c.threaded.min(c.threaded_images)),
    ];
    for (what, n) in happened.into_iter().chain(c.did.named()) {
        assert!(n > 0, "no {what} in {states} states: the run judged less than it is for");
    }
}
