//! A bug on purpose in the growth of a volume, which the explorer's operations do not have.
#![cfg(feature = "planted-bugs")]

use braidfs::planted::{Bug, plant};
use braidfs_testkit::resize::every_crash_of_a_growth;

// one test: a planted bug is one of the whole process
#[test]
fn a_size_told_before_the_group_table_is_durable_is_seen() {
    assert!(every_crash_of_a_growth(1).is_ok());
    plant(Some(Bug::SizeEarly));
    let seen = every_crash_of_a_growth(1);
    plant(None);
    let why = seen.expect_err("the bug was not seen");
    println!("{why}");
}
