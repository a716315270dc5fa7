//! The goals that can be counted, as tests: they hold on any machine.

use braidfs_bench::traffic::{GOAL_CREATE_BYTES, creates, small_fsyncs};

#[test]
fn an_empty_file_costs_at_most_512_bytes_on_the_device() {
    let c = creates(20_000, 2).unwrap();
    assert!(c.met, "{:.0} bytes per file, at most {GOAL_CREATE_BYTES}", c.bytes_per_file);
}

#[test]
fn a_small_fsync_takes_three_writes_and_one_flush() {
    for case in small_fsyncs(50).unwrap() {
        assert!(case.met, "{case:?}");
    }
}
