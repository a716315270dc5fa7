//! Bugs on purpose in which devices are flushed, and in what order, which only volumes of several devices show.
#![cfg(feature = "planted-bugs")]

use braidfs::FallocMode;
use braidfs::planted::{Bug, plant};
use braidfs_testkit::crash::check::{Checker, Depth, Failure};
use braidfs_testkit::crash::explore::{Limits, sequence};
use braidfs_testkit::crash::plan::End;
use braidfs_testkit::crash::workload::{Base, Kind, base};
use braidfs_testkit::ops::{At, Op, P};

/// Each with operations that show it.
fn seen_by() -> Vec<(Bug, &'static str, Vec<Op>)> {
    let f = At::Path(P("A/f"));
    let fsync = |data_only| Op::Fsync { at: f, data_only };
    let append = Op::Append { at: f, len: 5000, seed: 1 };
    let overwrite = Op::Write { at: f, off: 0, len: 4096, seed: 2 };
    let grow = Op::Fallocate { at: f, mode: FallocMode::Allocate { keep_size: true }, off: 64 << 10, len: 12 << 20 };
    let commit = |checkpoint| Op::Commit { path: P("A/f"), checkpoint };
    vec![
        (Bug::CommitOneDevice, "a commit", vec![append.clone(), commit(false)]),
        (Bug::SyncOneDevice, "what is written elsewhere", vec![append.clone(), fsync(false)]),
        (Bug::SyncOneDevice, "what is overwritten in place", vec![overwrite.clone(), fsync(false)]),
        (Bug::SyncOneDevice, "what is overwritten in place, data alone", vec![overwrite, fsync(true)]),
        (Bug::HomesOneDevice, "a checkpoint", vec![append, commit(true)]),
        (Bug::ClaimOneDevice, "a claim", vec![grow, commit(false)]),
    ]
}

/// What is wrong with the first crash state that fails. The operations themselves succeed.
fn fails(base: &Base, ops: &[Op]) -> Option<Failure> {
    let depth = Depth { second_every: 0, threads_every: 0, ..Limits::brief().depth };
    let mut checker = Checker::new(&base.setup, depth, 1, &|| false);
    let done = sequence(&mut checker, base, ops, 0, End::Crash);
    assert!(!matches!(done, Ok(None)), "an operation of it cannot be done");
    let failure = done.err()?;
    assert!(failure.crash.is_some(), "before any crash: {failure}");
    Some(failure)
}

// one test: a planted bug is one of the whole process
#[test]
fn two_devices_show_which_are_flushed() {
    let apart = Kind::ALL.into_iter().find(|k| k.apart).unwrap();
    let (apart, one) = (base(apart).unwrap(), base(Kind::ALL[0]).unwrap());
    for (bug, what, ops) in seen_by() {
        let sound = fails(&apart, &ops);
        plant(Some(bug));
        let (seen, alone) = (fails(&apart, &ops), fails(&one, &ops));
        plant(None);
        assert!(sound.is_none(), "{what}, without a bug: {sound:?}");
        let Some(seen) = seen else { panic!("{bug:?} was not seen: {what}") };
        println!("{bug:?}, {what}, seen by {}: {seen}", seen.class().name());
        assert!(alone.is_none(), "{bug:?} on one device: {what}: {alone:?}");
    }
}
