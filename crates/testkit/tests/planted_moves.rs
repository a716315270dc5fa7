//! Bugs on purpose in moves of a tenant's block groups to other devices, which the explorer's volumes do not have.
#![cfg(feature = "planted-bugs")]

use braidfs::planted::{Bug, plant};
use braidfs_testkit::tenant_devices::every_crash_of_a_move;

// one test: a planted bug is one of the whole process
#[test]
fn bugs_of_moves_are_seen() {
    every_crash_of_a_move().unwrap();
    for bug in [Bug::CopyUnflushed, Bug::GivenEarly, Bug::EmptiedGivenEarly] {
        plant(Some(bug));
        let seen = every_crash_of_a_move();
        plant(None);
        match seen {
            Ok(states) => panic!("{bug:?} was not seen in {states:?}"),
            Err(why) => {
                assert!(why.contains("crash after event"), "{bug:?}, before any crash: {why}");
                println!("{bug:?}: {why}");
            }
        }
    }
}
