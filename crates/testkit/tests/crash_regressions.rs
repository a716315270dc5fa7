//! Sequences of which a crash once left what it must not, and some that are known to be hard: all their crashes, and all
//! crashes of the recoveries. The program `crash` prints new ones. With `BRAIDFS_HARD_STEP=1` all of them (default 4: one in
//! four of those known to be hard, and the longest of the others on one kind of volume in four).

use braidfs::{FileKind, RenameMode};
use braidfs_testkit::crash::check::times;
use braidfs_testkit::crash::minimise::{On, every_crash, every_crash_on};
use braidfs_testkit::crash::plan::End;
use braidfs_testkit::crash::workload::{Kind, base, hard};
use braidfs_testkit::env_number;
use braidfs_testkit::ops::{At, Op, P};
use braidfs_testkit::run::{Runner, set_clock};
use braidfs_testkit::states::final_image;

fn check(on: On, end: End, ops: &[Op]) {
    if let Err(e) = every_crash(on, ops, end) {
        panic!("{e}");
    }
}

fn step() -> usize {
    env_number("BRAIDFS_HARD_STEP", 4).max(1) as usize
}

/// One kind of volume in `BRAIDFS_HARD_STEP`, for sequences of which all crashes on all kinds take half a minute and more.
fn some_kinds(first: usize) -> impl Iterator<Item = Kind> {
    Kind::ALL.into_iter().skip(first % step()).step_by(step())
}

/// One in `BRAIDFS_HARD_STEP` of them, with every crash. All of them on all volumes, with a sample of the crashes,
/// are in `crash_seq`.
fn hard_sequences(kind: Kind, first: usize) {
    let step = step();
    for (name, ops) in hard().into_iter().skip(first % step).step_by(step) {
        if let Err(e) = every_crash(On::Kind(kind), &ops, End::Crash) {
            panic!("{name}, on {kind:?}: {e}");
        }
    }
}

#[test]
fn hard_sequences_of_inodes_beside_their_directory() {
    hard_sequences(Kind::ALL[0], 0);
}

#[test]
fn hard_sequences_of_inodes_spread_over_domains() {
    hard_sequences(Kind::ALL[3], 2);
}

#[test]
fn replaced_in_the_other_domain_and_back() {
    let replace = |from, to| Op::Rename { from: P(from), to: P(to), mode: RenameMode::Replace };
    for kind in some_kinds(0) {
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
    for kind in some_kinds(1) {
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

fn mv(from: &'static str, to: &'static str) -> Op {
    Op::Rename { from: P(from), to: P(to), mode: RenameMode::Replace }
}

fn ln(from: &'static str, to: &'static str) -> Op {
    Op::Link { from: P(from), to: P(to) }
}

fn file(path: &'static str) -> Op {
    Op::Create { path: P(path), kind: FileKind::File, mode: 0o644 }
}

fn dir(path: &'static str) -> Op {
    Op::Create { path: P(path), kind: FileKind::Dir, mode: 0o755 }
}

fn rm(path: &'static str) -> Op {
    Op::Unlink { path: P(path) }
}

fn fsync(path: &'static str) -> Op {
    Op::Fsync { at: At::Path(P(path)), data_only: false }
}

/// Commits B's domain alone: an inode of A's takes a name that one of B's left. Once, with a synced `B/o`.
fn commit_b() -> [Op; 2] {
    [mv("B/o", "B/o2"), mv("A/g", "B/o")]
}

// the moved file was of the domain of the newcomer, which was rolled forward without it: recovery deleted what was in the
// replaced directory
#[test]
fn a_file_leaves_a_directory_that_a_new_one_replaces() {
    for kind in some_kinds(2) {
        for new in ["A/m", "A/n"] {
            check(
                On::Kind(kind),
                End::Crash,
                &[mv("A/s/x", "A/x"), dir("A/m"), dir("A/n"), mv(new, "A/s"), file("A/s/y"), fsync("A/s/y")],
            );
            let again = [mv("A/s/x", "A/x"), dir("A/m"), dir("A/n"), mv(new, "A/s"), Op::Rmdir { path: P("A/s") }];
            let last = [dir("A/o"), dir("A/s"), file("A/s/y"), fsync("A/s/y")];
            check(On::Kind(kind), End::Crash, &[&again[..], &last[1..]].concat());
            check(On::Kind(kind), End::Crash, &[&again[..], &last].concat());
        }
    }
}

// a file lives on by a name that is not durable, who took its durable one is gone again: whoever takes it next waits, too
#[test]
fn a_name_that_went_on_from_its_taker() {
    for kind in some_kinds(3) {
        let ops = [ln("A/g", "A/l"), file("A/z"), mv("A/z", "A/g"), rm("A/g")];
        check(On::Kind(kind), End::Crash, &[&ops[..], &[file("A/g"), fsync("A/g")]].concat());
        let below =
            [ln("A/s/x", "A/l"), file("A/s/z"), mv("A/s/z", "A/s/x"), rm("A/s/x"), Op::Rmdir { path: P("A/s") }];
        check(On::Kind(kind), End::Crash, &[&below[..], &[dir("A/s"), file("A/s/y"), fsync("A/s/y")]].concat());
        check(
            On::Kind(kind),
            End::Crash,
            &[&below[..], &[dir("A/m"), dir("A/s"), file("A/s/y"), fsync("A/s/y")]].concat(),
        );
    }
}

// a name comes back, but another inode has it since
#[test]
fn names_change_of_an_inode_that_lost_one() {
    for kind in Kind::ALL {
        check(
            On::Kind(kind),
            End::Crash,
            &[ln("A/g", "A/l"), Op::Sync, mv("B/h", "A/g"), rm("A/g"), mv("A/f", "A/g"), ln("A/l", "A/l2"), Op::Sync],
        );
    }
}

// a recovery changed entries of the directory, so that the next one took it for the one that had replaced another
#[test]
fn a_directory_of_which_entries_changed_replaces_one_of_the_other_domain() {
    for (from, old, new) in [("A/e", "A/e/x", "A/e/y"), ("B/k", "B/k/x", "B/k/y")] {
        let ops = [file("B/o"), rm("A/s/x"), mv("B/h", old), Op::Sync, mv(old, new), mv(from, "A/s")];
        for kind in [Kind::ALL[0], Kind::ALL[1]] {
            check(On::Kind(kind), End::Crash, &[&ops[..], &commit_b()].concat());
        }
    }
}

// the recovery deleted the newcomer, an orphan, and the next one took it for one that had been durable
#[test]
fn an_orphan_is_linked_and_replaces_a_file_of_the_other_domain() {
    let ops = [file("B/v"), file("B/o"), Op::Tmpfile { dir: P("A"), slot: 0 }, Op::Sync];
    let then = [Op::LinkSlot { slot: 0, to: P("A/t") }, mv("A/t", "B/v")];
    for kind in Kind::ALL {
        check(On::Kind(kind), End::Crash, &[&ops[..], &then, &commit_b()].concat());
    }
}

// a new directory got the number of one that no commit ever had, and what had been synced in that one came up in it
#[test]
fn the_number_of_a_directory_that_was_never_committed() {
    for (of_a, below) in [("A/d", "A/d/k"), ("A/c", "A/c/k")] {
        check(
            On::Kind(Kind::ALL[0]),
            End::Crash,
            &[
                file("B/o"),
                file("B/p"),
                Op::Sync,
                dir("A/c"),
                dir("A/d"),
                file("B/n"),
                mv("B/n", below),
                fsync(below),
                rm(below),
                Op::Rmdir { path: P(of_a) },
                // commits A's domain alone, as an inode of B's takes the name
                mv("A/g", "A/g2"),
                mv("B/o", "A/g"),
                dir("A/c2"),
                dir("A/d2"),
                mv("A/f", "A/f2"),
                mv("B/p", "A/f"),
            ],
        );
    }
}

// the clock was set back between two mounts: what was synced was lost to the former owner of its name
#[test]
fn the_clock_goes_back() {
    for kind in Kind::ALL {
        let mut base = base(kind).unwrap();
        let mut r = Runner::new(&base.setup, base.image, base.model, base.keys).unwrap();
        set_clock(2 * times::WORKLOAD);
        for p in ["A/f", "A/g", "B/h"] {
            r.apply(&mv(p, "t")).unwrap();
            r.apply(&mv("t", p)).unwrap();
        }
        r.remount().unwrap();
        base.image = final_image(r.device()).compact();
        (base.model, base.keys) = (r.model.clone(), r.keys().clone());
        for ops in [
            vec![rm("A/g"), file("A/g"), fsync("A/g")],
            vec![mv("B/h", "A/f"), Op::Sync],
            vec![mv("A/f", "B/h"), Op::Sync],
        ] {
            if let Err(e) = every_crash_on(&base, &ops, End::Crash) {
                panic!("{e}");
            }
        }
    }
}

// found by a random run (seed 9049): the victim of a newcomer that did not survive got its name back with the time of a later
// change of its other names, and took it from the inode that had replaced the newcomer: that one was lost
#[test]
fn replaced_twice_then_the_first_victim_changes_another_name() {
    for other in [mv("A/l", "A/q"), ln("A/l", "A/q"), rm("A/m")] {
        let ops = [ln("A/f", "A/l"), ln("A/f", "A/m"), Op::Sync, mv("B/h", "A/f"), mv("A/g", "A/f"), other];
        for kind in some_kinds(1) {
            for end in [Op::Sync, Op::Fsync { at: At::Path(P("A")), data_only: false }] {
                check(On::Kind(kind), End::Crash, &[&ops[..], &[end]].concat());
            }
        }
    }
}

// found by a random run (38658): the first victim lives on by a name that is not durable, and the fsync is of who replaced
// the newcomer
#[test]
fn replaced_twice_in_one_domain_and_synced() {
    for kind in Kind::ALL {
        let ops = [ln("A/f", "A/l"), file("A/n"), mv("A/n", "A/f"), mv("A/g", "A/f"), fsync("A/f")];
        check(On::Kind(kind), End::Crash, &ops);
    }
}

// the judge: a name that a synced inode took and left does not go back, and the other name of who had it is as it was synced
#[test]
fn one_of_two_names_taken_by_a_synced_file_that_moves_on() {
    check(
        On::Vary(13100),
        End::Crash,
        &[
            Op::Create { path: P("d3"), kind: FileKind::Char, mode: 416 },
            Op::Link { from: P("d3"), to: P("e") },
            Op::Fsync { at: At::Path(P("d3")), data_only: false },
            Op::Unlink { path: P("e") },
            Op::Create { path: P("f"), kind: FileKind::File, mode: 1023 },
            Op::Rename { from: P("f"), to: P("d3"), mode: RenameMode::Replace },
            Op::Fsync { at: At::Path(P("d3")), data_only: false },
            Op::Rename { from: P("d3"), to: P("g"), mode: RenameMode::Replace },
            Op::Fsync { at: At::Path(P("g")), data_only: false },
        ],
    );
}

// found by the full run: a recovery deleted an orphan that had been exchanged, and the next one took it for durable
#[test]
fn a_linked_orphan_is_exchanged_and_the_recovery_crashes() {
    let exchange = |from, to| Op::Rename { from: P(from), to: P(to), mode: RenameMode::Exchange };
    let before = [file("d3"), dir("c"), Op::Tmpfile { dir: P(""), slot: 2 }, dir("d1"), file("a")];
    let before = [&before[..], &[Op::Symlink { path: P("d1/b"), target: P("d1/a") }, Op::Sync, mv("d3", "h")]].concat();
    let then = [
        file("d1/d3"),
        Op::Symlink { path: P("d1/j"), target: P("c") },
        Op::LinkSlot { slot: 2, to: P("d0") },
        exchange("h", "d0"),
        mv("a", "j"),
        mv("h", "d1/d3"),
        exchange("j", "d1/j"),
    ];
    check(On::Vary(2178), End::Crash, &[&before[..], &then].concat());
}

// found by the explorer once it had fsck look at crash states before they are mounted: a table that the crash tore was taken for
// damage, all blocks of its group for such that are in use, and the replay found no room: what was synced was given up
#[test]
fn a_torn_table_takes_no_room_of_the_replay_in_fsck() {
    let g = || At::Path(P("A/g"));
    let mut ops = vec![Op::Rename { from: P("B/h"), to: P("A/f"), mode: RenameMode::Replace }];
    for seed in 50..=60 {
        ops.push(Op::Append { at: g(), len: 40, seed });
        ops.push(Op::Fsync { at: g(), data_only: false });
    }
    ops.push(Op::Append { at: g(), len: 40, seed: 63 });
    check(On::Kind(Kind::ALL[0]), End::Unmount, &ops);
    check(On::Kind(Kind::ALL[1]), End::Crash, &ops);
}

// the commit overwrites a block of a file that lives by overwrites, and gives a hole of it a place (found by a run of threads): the
// first is there before the transaction, as the contract has it, and the judge wanted both or none
#[test]
fn overwritten_by_a_commit_that_fills_a_hole_of_the_file() {
    let write = |off, len, seed| Op::Write { at: At::Path(P("A/n")), off, len, seed };
    let commit = || Op::Commit { path: P("A/n"), checkpoint: false };
    let fsync = || Op::Fsync { at: At::Path(P("A/n")), data_only: false };
    for kind in [Kind::ALL[0], Kind::ALL[2]] {
        check(
            On::Kind(kind),
            End::Crash,
            &[
                Op::Create { path: P("A/n"), kind: FileKind::File, mode: 0o644 },
                write(12_288, 125, 1),
                write(0, 4096, 2),
                Op::Sync,
                write(0, 4096, 3),
                fsync(),
                write(445, 6643, 4),
                commit(),
            ],
        );
    }
}

/// A file takes the name of a durable one, and moves on to a new directory of another domain: a crash keeps one of the two. Once more where
/// who replaced a durable one is replaced itself. (On all volumes, with samples of the crashes: among the sequences known to be hard.)
#[test]
fn what_took_a_name_moves_below_a_new_directory() {
    for kind in [Kind::ALL[0], Kind::ALL[3]] {
        for (times, new, to) in [(1, "A/n", "A/n/moved"), (2, "B/n", "B/n/moved")] {
            let mut ops = Vec::new();
            for _ in 0..times {
                ops.extend([file("A/tmp"), mv("A/tmp", "A/f")]);
            }
            ops.extend([dir(new), mv("A/f", to), fsync("A")]);
            check(On::Kind(kind), End::Crash, &ops);
        }
    }
}
