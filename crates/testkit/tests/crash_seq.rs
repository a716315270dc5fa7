//! Crashes in all sequences of one operation, and in as many of two as there is time for, in an order by the seed.
//!
//! `BRAIDFS_CRASH_SECONDS` (default 60), `BRAIDFS_CRASH_STATES` (default: no limit), `BRAIDFS_SEED`. All of them: the
//! program `crash` of this crate.

use braidfs::Placement;
use braidfs_testkit::crash::explore::{Limits, explore};
use braidfs_testkit::crash::workload::{base, sequences};
use braidfs_testkit::env_number;
use std::time::Duration;

#[test]
fn crashes_in_short_sequences() {
    let seconds = env_number("BRAIDFS_CRASH_SECONDS", 60);
    let states = env_number("BRAIDFS_CRASH_STATES", u64::MAX);
    let seed = braidfs_testkit::seed();
    println!("BRAIDFS_SEED={seed}");
    let mut bases = Vec::new();
    for placement in [Placement::Dirs, Placement::Spread] {
        for dirty in [false, true] {
            bases.push(base(placement, dirty).unwrap());
        }
    }
    let (mut states_left, mut failures) = (states, Vec::new());
    for (length, per_point, share) in [(1, 24, 2), (2, 40, 1)] {
        let limits = Limits {
            per_point,
            time: Duration::from_secs(seconds.div_ceil(2)),
            states: states_left / share,
            failures: 3,
            seed,
            ..Limits::default()
        };
        let report = explore(&bases, &sequences(length), &limits, &|_, _, _| {});
        println!(
            "sequences of {length}: {} run, {} crashes, {:.0} a second",
            report.sequences,
            report.states,
            report.states as f64 / report.time.as_secs_f64()
        );
        states_left = states_left.saturating_sub(report.states);
        failures.extend(report.failures);
    }
    assert!(failures.is_empty(), "seed {seed}:\n{}", failures.join("\n\n"));
}
