//! Bugs on purpose in which devices are flushed, and in what order, which only volumes of several devices show.
#![cfg(feature = "planted-bugs")]

use braidfs::FallocMode;
use braidfs::planted::{Bug, plant};
use braidfs_testkit::crash::check::{Checker, Depth};
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

fn fails(base: &Base, ops: &[Op]) -> Option<String> {
    let depth = Depth { second_every: 0, threads_every: 0, ..Limits::brief().depth };
    let run = || {
        let mut checker = Checker::new(&base.setup, depth, 1, &|| false);
        let done = sequence(&mut checker, base, ops, 0, End::Crash);
        assert!(!matches!(done, Ok(None)), "an operation of it cannot be done");
        done.err().map(|failure| failure.to_string())
    };
    // what a bug makes panic is found, too
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).unwrap_or_else(|_| Some("it panics".into()))
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
        println!("{bug:?}, {what}: {}", seen.as_deref().unwrap_or("not seen"));
        assert_eq!(sound, None, "{what}, without a bug");
        assert!(seen.is_some(), "{bug:?} was not seen: {what}");
        assert_eq!(alone, None, "{bug:?} on one device: {what}");
    }
}
