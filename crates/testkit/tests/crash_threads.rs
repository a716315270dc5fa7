//! Runs of several threads of which a crash once left what it must not, in the form in which the program `crash` prints
//! new ones: all their crashes, with the schedule that failed, and with others, as the engine of today takes its turns
//! elsewhere.
#![cfg(feature = "schedule")]

use braidfs::{FallocMode, FileKind, Placement, RenameMode, XattrMode};
use braidfs_testkit::crash::minimise_threads::every_crash_of;
use braidfs_testkit::crash::threads::Threads;
use braidfs_testkit::ops::{At, Op, P};
use braidfs_testkit::run::{BESIDE, Setup};

/// Seeds of volumes on which inodes that are made one after the other come into different domains: one whose directories
/// are changed as by several threads, and one where they are not.
fn spread() -> [u64; 2] {
    [0, BESIDE].map(|kind| {
        let spreads = |seed: &u64| {
            let o = Setup::vary(*seed).mkfs;
            o.placement == Placement::Spread && o.domains > Some(1)
        };
        (0..100).map(|seed| seed | kind).find(spreads).unwrap()
    })
}

fn check(workload: &Threads) {
    if let Err(e) = every_crash_of(workload) {
        panic!("{e}");
    }
}

// crash after event 9, nothing unflushed
// not allowed by the contract: the name 1-2 in /shared is gone, durable since version 1
// version 1 log    9 thread 0, since version 0: Op::Create { path: P("shared/1-2"), kind: FileKind::File, mode: 420 } -> (None, Some(7))
#[test]
fn threads_9f2a182a() {
    check(&Threads {
        volume: 17,
        schedule: 32,
        lists: vec![
            vec![
                Op::Create { path: P("shared/1-2"), kind: FileKind::File, mode: 420 },
                Op::Fsync { at: At::Path(P("shared")), data_only: false },
            ],
            vec![Op::Sync],
        ],
    });
}

// crash after event 9, nothing unflushed
// not allowed by the contract: the name a in /t1 is gone, durable since version 1
// version 1 log    9 thread 1, since version 0: Op::Create { path: P("t1/a"), kind: FileKind::File, mode: 1023 } -> (None, Some(7))
#[test]
fn threads_17e4017c() {
    check(&Threads {
        volume: 8,
        schedule: 8,
        lists: vec![
            vec![Op::Fsync { at: At::Path(P("t0")), data_only: false }],
            vec![
                Op::Create { path: P("t1/a"), kind: FileKind::File, mode: 1023 },
                Op::Fsync { at: At::Path(P("t1")), data_only: false },
            ],
        ],
    });
}

// the commit had the new directory under its old name, the fsync of a file in it wrote that it exists under the new one,
// and recovery takes the committed state of a directory (found by workload 5:244)
#[test]
fn a_new_directory_is_renamed_beside_a_commit_and_synced() {
    check(&Threads {
        volume: 245,
        schedule: 21,
        lists: vec![
            vec![
                Op::Fsync { at: At::Path(P("t0/d2")), data_only: true },
                Op::Fallocate {
                    at: At::Path(P("t0/d0")),
                    mode: FallocMode::ZeroRange { keep_size: false },
                    off: 8192,
                    len: 1122,
                },
                Op::SetXattr { path: P("t0/b"), name: P("user.a"), len: 63, seed: 3668967428, mode: XattrMode::Set },
                Op::Create { path: P("t0/d0"), kind: FileKind::Dir, mode: 384 },
                Op::Rename { from: P("t0/d0/c"), to: P("t0/d1"), mode: RenameMode::NoReplace },
                Op::Fallocate {
                    at: At::Path(P("t0/a/d0")),
                    mode: FallocMode::Allocate { keep_size: true },
                    off: 45056,
                    len: 231,
                },
            ],
            vec![
                Op::Create { path: P("shared/1-1"), kind: FileKind::File, mode: 420 },
                Op::Create { path: P("shared/1-1"), kind: FileKind::File, mode: 420 },
                Op::Append { at: At::Path(P("t1/i")), len: 5472, seed: 3670016018 },
                Op::Fsync { at: At::Path(P("shared")), data_only: false },
            ],
            vec![
                Op::Append { at: At::Path(P("t2/a")), len: 148, seed: 3671064579 },
                Op::Truncate { at: At::Path(P("t2/m1")), size: 3463 },
                Op::Create { path: P("shared/2-0"), kind: FileKind::File, mode: 420 },
                Op::Create { path: P("t2/c"), kind: FileKind::Dir, mode: 1023 },
                Op::Create { path: P("shared/2-0"), kind: FileKind::File, mode: 420 },
                Op::Create { path: P("t2/c/i"), kind: FileKind::Block, mode: 416 },
                Op::Rename { from: P("t2/c"), to: P("t2/c/d0"), mode: RenameMode::Replace },
                Op::Write { at: At::Path(P("t2/c/d0")), off: 49974, len: 119, seed: 3671064587 },
                Op::Rename { from: P("t2/c"), to: P("t2/d2"), mode: RenameMode::Replace },
                Op::Fsync { at: At::Path(P("t2/d2/i")), data_only: false },
            ],
        ],
    });
}

// overwritten in place by an fsync that was under way, which the judge did not know of (found by workload 5:472)
#[test]
fn overwritten_by_an_fsync_under_way() {
    check(&Threads {
        volume: 587,
        schedule: 1,
        lists: vec![vec![
            Op::Create { path: P("shared/a"), kind: FileKind::File, mode: 0o644 },
            Op::Append { at: At::Path(P("shared/a")), len: 6000, seed: 1 },
            Op::Sync,
            Op::Write { at: At::Path(P("shared/a")), off: 1111, len: 3000, seed: 2 },
            Op::Fsync { at: At::Path(P("shared/a")), data_only: false },
        ]],
    });
}

// The file was new when the directories above its new place were asked for, and durable in its old place before it moved:
// its domain committed the move, and the other domain never made the new place.
#[test]
fn a_new_file_becomes_durable_before_it_moves_below_a_new_directory() {
    let file = |path| Op::Create { path: P(path), kind: FileKind::File, mode: 0o644 };
    let mkdir = |path| Op::Create { path: P(path), kind: FileKind::Dir, mode: 0o755 };
    let commit = |path| Op::Commit { path: P(path), checkpoint: false };
    for (volume, path) in spread().into_iter().zip(["t0", "t1"]) {
        let lists = vec![
            vec![
                file("t0/f"),
                mkdir("t0/N"),
                Op::Rename { from: P("t0/f"), to: P("t0/N/g"), mode: RenameMode::Replace },
                commit(path),
            ],
            vec![commit(path)],
        ];
        check(&Threads { volume, schedule: 0, lists });
    }
}
