//! Runs of several threads of which a crash once left what it must not, in the form in which the program `crash` prints
//! new ones: all their crashes, with the schedule that failed, and with others, as the engine of today takes its turns
//! elsewhere.
#![cfg(feature = "schedule")]

use braidfs::FileKind;
use braidfs_testkit::crash::minimise_threads::every_crash_of;
use braidfs_testkit::crash::threads::Threads;
use braidfs_testkit::ops::{At, Op, P};

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
