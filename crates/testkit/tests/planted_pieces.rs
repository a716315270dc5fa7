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
    let failing = || -> Vec<&str> {
        let run = |ops: &[_]| {
            let mut checker = Checker::new(&base.setup, depth, 1, &|| false);
            // what a bug makes panic is found, too
            let run = || sequence(&mut checker, &base, ops, PRELUDE, End::Crash);
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).is_ok_and(|done| done.is_ok())
        };
        all.iter().filter(|(_, ops)| !run(ops)).map(|(name, _)| *name).collect()
    };
    assert!(failing().is_empty(), "without a bug: {:?}", failing());
    for bug in [Bug::MovedFreedEarly, Bug::MovedCopyStale] {
        plant(Some(bug));
        let seen = failing();
        plant(None);
        println!("{bug:?}: {seen:?}");
        assert!(!seen.is_empty(), "{bug:?} was not seen");
    }
}
