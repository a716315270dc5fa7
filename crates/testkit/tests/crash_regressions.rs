//! Sequences of which a crash once left what it must not, and some that are known to be hard: all their crashes, and all
//! crashes of the recoveries. The program `crash` prints new ones.

use braidfs::RenameMode;
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
