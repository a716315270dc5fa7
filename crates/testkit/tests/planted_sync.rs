//! Bugs on purpose in what an fsync makes durable and what commits do afterwards, each with a few operations that show it.
#![cfg(feature = "planted-bugs")]

use braidfs::RenameMode;
use braidfs::planted::{Bug, plant};
use braidfs_testkit::crash::check::{Checker, Class, Depth, Failure};
use braidfs_testkit::crash::explore::{Limits, sequence};
use braidfs_testkit::crash::plan::End;
use braidfs_testkit::crash::workload::{Kind, base};
use braidfs_testkit::ops::{At, Op, P};

/// Each with operations that show it.
fn seen_by() -> Vec<(Bug, &'static str, Vec<Op>)> {
    let f = At::Path(P("A/f"));
    let fsync = |path, data_only| Op::Fsync { at: At::Path(P(path)), data_only };
    let overwrite = |seed| Op::Write { at: f, off: 0, len: 8000, seed };
    let commit = || Op::Commit { path: P("A"), checkpoint: false };
    let renamed = |to| vec![Op::Rename { from: P("A/f"), to: P(to), mode: RenameMode::Replace }, fsync(to, true)];
    let linked = vec![Op::Link { from: P("A/f"), to: P("B/l") }, fsync("B/l", true)];
    let lives = vec![
        Op::Append { at: f, len: 9000, seed: 1 },
        Op::Sync,
        overwrite(2),
        fsync("A/f", false),
        // blocks that are new
        Op::Append { at: f, len: 9000, seed: 3 },
        fsync("A/f", false),
        commit(),
        overwrite(4),
        commit(),
    ];
    vec![
        (Bug::NamesForgotten, "a rename", renamed("A/r")),
        (Bug::NamesForgotten, "a rename to another directory", renamed("B/n")),
        (Bug::NamesForgotten, "a link", linked),
        (Bug::LivesOn, "overwritten, then synced with blocks that are new", lives),
    ]
}

/// What is wrong with the first crash state that fails.
fn fails(ops: &[Op]) -> Option<Failure> {
    let base = base(Kind::ALL[0]).unwrap();
    let depth = Depth { second_every: 0, threads_every: 0, ..Limits::brief().depth };
    let mut checker = Checker::new(&base.setup, depth, 1, &|| false);
    let done = sequence(&mut checker, &base, ops, 0, End::Crash);
    assert!(!matches!(done, Ok(None)), "an operation of it cannot be done");
    done.err()
}

// one test: a planted bug is one of the whole process
#[test]
fn the_judge_sees_what_an_fsync_leaves_out() {
    for (bug, what, ops) in seen_by() {
        let sound = fails(&ops);
        plant(Some(bug));
        let seen = fails(&ops);
        plant(None);
        assert!(sound.is_none(), "{what}, without a bug: {sound:?}");
        let Some(seen) = seen else { panic!("{bug:?} was not seen: {what}") };
        println!("{bug:?}, {what}: {seen}");
        assert_eq!(seen.class(), Class::Contract, "{bug:?}, {what}: {seen}");
    }
}
