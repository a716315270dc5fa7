//! A bucket that a commit leaves out, on purpose, is seen by threads that change names of one directory.
#![cfg(feature = "planted-bugs")]

use braidfs::Placement;
use braidfs::planted::{Bug, plant};
use braidfs_testkit::shared_dir::{NAMES, run};

// one test: a planted bug is one of the whole process
#[test]
fn a_bucket_that_a_commit_leaves_out_is_seen() {
    plant(Some(Bug::BucketLeftOut));
    let wrong = run(Placement::Inherit, NAMES[0], true);
    plant(None);
    assert!(!wrong.is_empty());
}
