//! Sequences that once failed, or that are known to be hard. `tests/model.rs` prints new ones.

use braidfs::{FallocMode, FileKind, RenameMode};
use braidfs_testkit::ops::{At, Op, P};
use braidfs_testkit::run::{Act, Setup, replay};

/// `setup`: the seed of the run in which it failed (see `Setup::vary`).
fn check(setup: u64, acts: &[Act]) {
    if let Err(e) = replay(&Setup::vary(setup), acts) {
        panic!("{e}");
    }
}

fn file(path: P) -> Act {
    Act::Do(Op::Create { path, kind: FileKind::File, mode: 0o644 })
}

fn dir(path: P) -> Act {
    Act::Do(Op::Create { path, kind: FileKind::Dir, mode: 0o755 })
}

/// On several volumes, with several crashes at the end.
fn check_crashes(acts: &[Act]) {
    for seed in 0..24 {
        let mut all = acts.to_vec();
        all.push(Act::Crash { seed });
        check(seed, &all);
    }
}

#[test]
fn an_old_name_given_to_another_file() {
    check_crashes(&[
        dir(P("a")),
        dir(P("b")),
        file(P("a/x")),
        Act::Do(Op::Sync),
        Act::Do(Op::Rename { from: P("a/x"), to: P("b/y"), mode: RenameMode::Replace }),
        file(P("a/x")),
        Act::Do(Op::Write { at: At::Path(P("a/x")), off: 0, len: 5000, seed: 1 }),
        Act::Do(Op::Fsync { at: At::Path(P("a/x")), data_only: false }),
    ]);
}

#[test]
fn directories_moved_into_each_other_in_turn() {
    check_crashes(&[
        dir(P("a")),
        dir(P("b")),
        dir(P("c")),
        Act::Do(Op::Sync),
        Act::Do(Op::Rename { from: P("a"), to: P("b/a"), mode: RenameMode::Replace }),
        Act::Do(Op::Rename { from: P("b/a"), to: P("a"), mode: RenameMode::Replace }),
        Act::Do(Op::Rename { from: P("b"), to: P("a/b"), mode: RenameMode::Replace }),
        file(P("a/b/f")),
        Act::Do(Op::Fsync { at: At::Path(P("a/b/f")), data_only: false }),
    ]);
}

#[test]
fn exchanged_over_domains_then_one_synced() {
    check_crashes(&[
        dir(P("a")),
        dir(P("b")),
        file(P("a/x")),
        dir(P("b/d")),
        file(P("b/d/f")),
        Act::Do(Op::Sync),
        Act::Do(Op::Rename { from: P("a/x"), to: P("b/d"), mode: RenameMode::Exchange }),
        Act::Do(Op::Fsync { at: At::Path(P("b/d")), data_only: false }),
    ]);
}

#[test]
fn reserved_blocks_never_show_what_was_there() {
    check_crashes(&[
        file(P("f")),
        Act::Do(Op::Write { at: At::Path(P("f")), off: 0, len: 100_000, seed: 1 }),
        Act::Do(Op::Sync),
        Act::Do(Op::Unlink { path: P("f") }),
        Act::Do(Op::Sync),
        file(P("g")),
        Act::Do(Op::Fallocate {
            at: At::Path(P("g")),
            mode: FallocMode::Allocate { keep_size: false },
            off: 0,
            len: 100_000,
        }),
        Act::Do(Op::Write { at: At::Path(P("g")), off: 5000, len: 100, seed: 2 }),
        Act::Do(Op::Fsync { at: At::Path(P("g")), data_only: false }),
        Act::Do(Op::Write { at: At::Path(P("g")), off: 50_000, len: 10_000, seed: 3 }),
    ]);
}

#[test]
fn truncated_and_extended_shows_zeros() {
    check_crashes(&[
        file(P("f")),
        Act::Do(Op::Write { at: At::Path(P("f")), off: 0, len: 10_000, seed: 1 }),
        Act::Do(Op::Truncate { at: At::Path(P("f")), size: 4100 }),
        Act::Do(Op::Truncate { at: At::Path(P("f")), size: 9000 }),
        Act::Compare,
        Act::Do(Op::Fsync { at: At::Path(P("f")), data_only: true }),
        Act::Do(Op::Truncate { at: At::Path(P("f")), size: 3 }),
        Act::Do(Op::Append { at: At::Path(P("f")), len: 8000, seed: 2 }),
        Act::Compare,
        Act::Remount,
    ]);
}
