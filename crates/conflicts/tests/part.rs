//! A part of the conflict checker (`docs/conflicts.md`) that `make test` runs, with the engine that the other optimised tests have:
//! tests whose operations share nothing in the foreground, or as good as nothing, so that any line more shows.

use std::io::{Write as _, stderr};
use std::process::Command;

/// Without DWSL: which of its lines may be shared is told by their places in the source, and a build for CI may have none.
const TESTS: &str = "DRBL,DRBM,DRBH,DWOL,DWOM,DWAL,DWTL,MRPL,MRPM,MRPH,MRDL,MRDM";

/// Those that change names in a directory for each worker. With two workers a build shares none of their lines or a few, as hashes
/// lay them; with more all do.
const NAMES: &str = "MWCL,MWUL,MWRL";

/// Those that change names in one directory. The checks of the order of locks move lines of their own there, which the engine that is
/// shipped does not have: twice as many as its baseline says, in all.
const SHARED_NAMES: &str = "MWCM,MWUM,MWRM";

/// Percent above the baseline.
const SLACK: &str = "20";
const SHARED_SLACK: &str = "150";

/// Runs these tests; fails where one of their cells is worse than the baseline by more than so many percent.
fn check(tests: &str, workers: &str, domains: &str, slack: &str) {
    let mut err = stderr();
    if cfg!(debug_assertions) {
        // `make unit` builds it so
        writeln!(err, "left to `make heavy`: what is counted is the optimised engine").unwrap();
        return;
    }
    let cells = tests.split(',').count() * workers.split(',').count();
    let args = ["run", "--skip", "--slack", slack, "--domains", domains, "--workers", workers, "--tests", tests];
    let done = Command::new(env!("CARGO_BIN_EXE_braidfs-conflicts")).args(args).output().unwrap();
    let said = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success(), "{said}{}", String::from_utf8_lossy(&done.stderr));
    match said.lines().last() {
        Some(last) if last.contains("SKIPPED") => writeln!(err, "{last}").unwrap(),
        last => assert_eq!(last, Some(&*format!("conflicts: {cells} cells, 0 figures worse than the baseline"))),
    }
}

#[test]
fn the_hot_paths_share_no_more_than_the_baseline_allows() {
    check(TESTS, "2,8", "one", SLACK);
}

#[test]
fn names_in_directories_of_their_own_share_no_more_than_the_baseline_allows() {
    check(NAMES, "8", "one", SLACK);
    check(NAMES, "8", "each", SLACK);
}

#[test]
fn names_in_one_directory_share_their_buckets_and_little_else() {
    check(SHARED_NAMES, "8", "one", SHARED_SLACK);
    check(SHARED_NAMES, "8", "each", SHARED_SLACK);
}
