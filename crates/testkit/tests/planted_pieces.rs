//! Bugs on purpose in how a file is made whole, which the explorer's sequences of files in pieces find.
#![cfg(feature = "planted-bugs")]

use braidfs::planted::{Bug, plant};
use braidfs_testkit::crash::check::{Checker, Depth};
use braidfs_testkit::crash::explore::{Limits, sequence};
use braidfs_testkit::crash::pieces::{PRELUDE, pieces};
use braidfs_testkit::crash::plan::End;
use braidfs_testkit::crash::workload::{Kind, base};

// one test: a planted bug is one of the whole process
#[test]
fn a_crash_shows_what_was_moved_badly() {
    let base = base(Kind::ALL[0]).unwrap();
    let depth = Depth { second_every: 0, threads_every: 0, ..Limits::brief().depth };
    let all = pieces();
    // names, with who saw the first crash state that fails; none that fails before any crash counts
    let failing = || -> Vec<(&str, &str)> {
        let run = |ops: &[_]| {
            let mut checker = Checker::new(&base.setup, depth, 1, &|| false);
            match sequence(&mut checker, &base, ops, PRELUDE, End::Crash) {
                Ok(None) => panic!("an operation of {ops:?} cannot be done"),
                Ok(Some(())) => None,
                Err(failure) => failure.crash.is_some().then(|| failure.class().name()),
            }
        };
        all.iter().filter_map(|(name, ops)| Some((*name, run(ops)?))).collect()
    };
    assert!(failing().is_empty(), "without a bug: {:?}", failing());
    for bug in [Bug::MovedFreedEarly, Bug::MovedCopyStale] {
        plant(Some(bug));
        let seen = failing();
        plant(None);
        println!("{bug:?}: {seen:?}");
        assert!(!seen.is_empty(), "no crash state shows {bug:?}");
    }
}
