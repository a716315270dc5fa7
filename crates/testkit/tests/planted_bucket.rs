//! A bucket that a commit leaves out, on purpose, is seen by threads that change names of one directory.
#![cfg(feature = "planted-bugs")]

use braidfs::Placement;
use braidfs::planted::{Bug, plant};
use braidfs_testkit::env_number;
use braidfs_testkit::shared_dir::{NAMES, run};

// one test: a planted bug is one of the whole process
#[test]
fn a_bucket_that_a_commit_leaves_out_is_seen() {
    // whether one run meets it is up to how the machine schedules its threads: one of 160 did not
    let most = env_number("BRAIDFS_BUCKET_RUNS", 20);
    plant(Some(Bug::BucketLeftOut));
    let found = (1..=most).find(|_| !run(Placement::Inherit, NAMES[0], true).is_empty());
    plant(None);
    assert!(found.is_some(), "no run of {most} shows it");
    assert_eq!(run(Placement::Inherit, NAMES[0], true), Vec::<String>::new(), "the same without the bug");
}
