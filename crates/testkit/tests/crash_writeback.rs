//! `data=writeback`, where commits leave data alone: crashes in single operations behind writes that a commit left so, one in
//! `BRAIDFS_WRITEBACK_STEP` of them (default 3). Content may be as late as the contract says; all else is as in the other modes, and no
//! block shows what was never written to its file.

use braidfs::{DataMode, FallocMode};
use braidfs_testkit::crash::check::{Checker, Depth};
use braidfs_testkit::crash::explore::{Limits, sequence};
use braidfs_testkit::crash::plan::End;
use braidfs_testkit::crash::workload::{Base, Kind, base, singles};
use braidfs_testkit::env_number;
use braidfs_testkit::ops::{At, Op, P};

fn check(base: &Base, before: &[Op], first: usize) {
    // also what each state does later: bytes behind the end of a file that a commit cut, and left its data alone
    let depth = Depth { deep_every: 1, second_every: 64, threads_every: 64, ..Limits::brief().depth };
    let step = env_number("BRAIDFS_WRITEBACK_STEP", 3).max(1) as usize;
    let mut checker = Checker::new(&base.setup, depth, first as u64, &|| false);
    for single in singles().iter().skip(first % step).step_by(step) {
        let ops = [before, &single.ops, &[commit()]].concat();
        if let Err(e) = sequence(&mut checker, base, &ops, before.len(), End::Crash) {
            panic!("{ops:?}: {e}");
        }
    }
    println!("{:?}", checker.counts);
    assert!(checker.counts.images > 100 && checker.counts.strays == 0, "{:?}", checker.counts);
}

fn late(kind: Kind) -> Base {
    let mut base = base(kind).unwrap();
    base.setup.data = DataMode::Writeback;
    base
}

fn write(off: u64, len: u32, seed: u32) -> Op {
    Op::Write { at: At::Path(P("A/f")), off, len, seed }
}

fn commit() -> Op {
    Op::Commit { path: P("A"), checkpoint: false }
}

#[test]
fn blocks_that_are_new_and_that_were_there() {
    check(&late(Kind::ALL[0]), &[write(3000, 20_000, 91), commit()], 0);
}

#[test]
fn blocks_that_are_reserved() {
    let at = At::Path(P("A/f"));
    let mode = FallocMode::Allocate { keep_size: false };
    let reserve = Op::Fallocate { at, mode, off: 8192, len: 20_000 };
    check(&late(Kind::ALL[1]), &[reserve, commit(), write(10_000, 9000, 92), commit()], 1);
}

#[test]
fn data_that_goes_out_for_want_of_memory() {
    let pressed = Kind::ALL.into_iter().find(|k| k.pressed).unwrap();
    check(&late(pressed), &[write(0, 20_000, 93), commit()], 2);
}

#[test]
fn what_was_cut_off_does_not_come_back() {
    let base = late(Kind::ALL[0]);
    let depth = Depth { deep_every: 1, second_every: 0, threads_every: 0, ..Limits::brief().depth };
    let mut checker = Checker::new(&base.setup, depth, 1, &|| false);
    let cut = Op::Truncate { at: At::Path(P("A/f")), size: 5000 };
    sequence(&mut checker, &base, &[cut, commit()], 0, End::Crash).unwrap();
}
