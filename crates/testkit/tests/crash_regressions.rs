//! Sequences of which a crash once left what it must not, and some that are known to be hard: all their crashes, and all
//! crashes of the recoveries. The program `crash` prints new ones.

use braidfs::{FileKind, RenameMode};
use braidfs_testkit::crash::minimise::{On, every_crash};
use braidfs_testkit::crash::plan::End;
use braidfs_testkit::crash::workload::{Kind, hard};
use braidfs_testkit::ops::{At, Op, P};

fn check(on: On, end: End, ops: &[Op]) {
    if let Err(e) = every_crash(on, ops, end) {
        panic!("{e}");
    }
}

#[test]
fn hard_sequences() {
    for (name, ops) in hard() {
        for on in [On::Kind(Kind::ALL[0]), On::Kind(Kind::ALL[3])] {
            if let Err(e) = every_crash(on, &ops, End::Crash) {
                panic!("{name}, on {on:?}: {e}");
            }
        }
    }
}

#[test]
fn replaced_in_the_other_domain_and_back() {
    let replace = |from, to| Op::Rename { from: P(from), to: P(to), mode: RenameMode::Replace };
    for kind in Kind::ALL {
        check(
            On::Kind(kind),
            End::Unmount,
            &[
                replace("B/h", "A/f"),
                Op::Fsync { at: At::Path(P("A/f")), data_only: false },
                replace("A/f", "B/h"),
                Op::Fsync { at: At::Path(P("B")), data_only: false },
            ],
        );
    }
}

// found by the full run: the directory's domain had committed that the name is gone, the other one nothing since it had
// taken the name over in an exchange
#[test]
fn taken_from_a_partner_of_an_exchange_synced_and_left() {
    let rename = |from, to, mode| Op::Rename { from: P(from), to: P(to), mode };
    for kind in Kind::ALL {
        check(
            On::Kind(kind),
            End::Unmount,
            &[
                rename("A/f", "A/g", RenameMode::Exchange),
                Op::Fsync { at: At::Path(P("A/g")), data_only: true },
                rename("B/h", "A/f", RenameMode::Replace),
                Op::Fsync { at: At::Path(P("A/f")), data_only: false },
                rename("A/f", "B/n", RenameMode::Replace),
                Op::Fsync { at: At::Path(P("B/n")), data_only: true },
            ],
        );
    }
}

#[test]
fn pages_that_left_the_cache_before_an_fsync_that_is_cut_off() {
    let write = |off, len, seed| Op::Write { at: At::Path(P("A/f")), off, len, seed };
    let fsync = |data_only| Op::Fsync { at: At::Path(P("A/f")), data_only };
    for kind in Kind::ALL.into_iter().filter(|k| k.pressed) {
        check(On::Kind(kind), End::Crash, &[Op::Append { at: At::Path(P("A/f")), len: 5000, seed: 14 }, fsync(false)]);
        check(On::Kind(kind), End::Crash, &[write(0, 4096, 11), fsync(true)]);
        // only names are left to be written
        let link = Op::Link { from: P("A/f"), to: P("A/l") };
        check(On::Kind(kind), End::Crash, &[write(0, 9000, 12), link, fsync(false), write(100, 50, 13), fsync(true)]);
    }
}

#[test]
fn a_directory_on_the_path_of_a_synced_file_has_the_name_of_a_removed_file() {
    check(
        On::Vary(432),
        End::Crash,
        &[
            Op::Symlink { path: P("d2"), target: P("b") },
            Op::Symlink { path: P("d3"), target: P("a") },
            Op::Create { path: P("e"), kind: FileKind::Dir, mode: 0o600 },
            Op::Create { path: P("e/j"), kind: FileKind::File, mode: 0o600 },
            Op::Create { path: P("d1"), kind: FileKind::File, mode: 0o777 },
            Op::Create { path: P("d0"), kind: FileKind::File, mode: 0o644 },
            Op::Rename { from: P("d1"), to: P("e/d1"), mode: RenameMode::NoReplace },
            Op::Create { path: P("i"), kind: FileKind::Dir, mode: 0o755 },
            Op::Rename { from: P("i"), to: P("e/g"), mode: RenameMode::Replace },
            Op::Unlink { path: P("e/d1") },
            Op::Rename { from: P("e/g"), to: P("e/d1"), mode: RenameMode::Replace },
            Op::Create { path: P("e/d1/h"), kind: FileKind::File, mode: 0o777 },
            Op::Fsync { at: At::Path(P("e/d1/h")), data_only: false },
            Op::Rename { from: P("e/d1"), to: P("e/d"), mode: RenameMode::Replace },
            Op::Create { path: P("h"), kind: FileKind::Dir, mode: 0o700 },
            Op::Fsync { at: At::Path(P("h")), data_only: false },
        ],
    );
}

// found by a random run (seed 9049): the victim of a newcomer that did not survive got its name back with the time of a later
// change of its other names, and took it from the inode that had replaced the newcomer: that one was lost
#[test]
fn replaced_twice_then_the_first_victim_changes_another_name() {
    let rename = |from, to| Op::Rename { from: P(from), to: P(to), mode: RenameMode::Replace };
    let others = [
        Op::Rename { from: P("A/l"), to: P("A/q"), mode: RenameMode::Replace },
        Op::Link { from: P("A/l"), to: P("A/q") },
        Op::Unlink { path: P("A/m") },
    ];
    for other in others {
        for kind in Kind::ALL {
            for end in [Op::Sync, Op::Fsync { at: At::Path(P("A")), data_only: false }] {
                check(
                    On::Kind(kind),
                    End::Crash,
                    &[
                        Op::Link { from: P("A/f"), to: P("A/l") },
                        Op::Link { from: P("A/f"), to: P("A/m") },
                        Op::Sync,
                        rename("B/h", "A/f"),
                        rename("A/g", "A/f"),
                        other.clone(),
                        end,
                    ],
                );
            }
        }
    }
}
