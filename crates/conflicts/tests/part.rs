//! A part of the conflict checker (`docs/conflicts.md`) that `make test` runs, with the engine that the other optimised tests have:
//! tests whose operations share nothing in the foreground, or as good as nothing, so that any line more shows.

use std::io::{Write as _, stderr};
use std::process::Command;

/// Without DWSL: which of its lines may be shared is told by their places in the source, and a build for CI may have none.
const TESTS: [&str; 12] =
    ["DRBL", "DRBM", "DRBH", "DWOL", "DWOM", "DWAL", "DWTL", "MRPL", "MRPM", "MRPH", "MRDL", "MRDM"];

#[test]
fn the_hot_paths_share_no_more_than_the_baseline_allows() {
    let mut err = stderr();
    if cfg!(debug_assertions) {
        // `make unit` builds it so
        writeln!(err, "SKIPPED: what is counted is the optimised engine").unwrap();
        return;
    }
    let tests = TESTS.join(",");
    let args = ["run", "--skip", "--slack", "20", "--domains", "one", "--workers", "2,8", "--tests", &tests];
    let done = Command::new(env!("CARGO_BIN_EXE_braidfs-conflicts")).args(args).output().unwrap();
    let said = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success(), "{said}{}", String::from_utf8_lossy(&done.stderr));
    match said.lines().last() {
        Some(last) if last.contains("SKIPPED") => writeln!(err, "{last}").unwrap(),
        last => {
            assert_eq!(last, Some(&*format!("conflicts: {} cells, 0 figures worse than the baseline", TESTS.len() * 2)))
        }
    }
}
