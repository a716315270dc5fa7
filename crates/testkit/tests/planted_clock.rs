//! A bug on purpose in the times of names, which the explorer's volumes cannot show: their clock is never set back.
#![cfg(feature = "planted-bugs")]

use braidfs::planted::{Bug, plant};
use braidfs::{FileKind, RenameMode};
use braidfs_testkit::crash::check::times;
use braidfs_testkit::crash::minimise::every_crash_on;
use braidfs_testkit::crash::plan::End;
use braidfs_testkit::crash::workload::{Kind, base};
use braidfs_testkit::ops::{At, Op, P};
use braidfs_testkit::run::{Runner, set_clock};
use braidfs_testkit::states::final_image;

/// A file whose names changed before the clock was set back is removed, and another one takes its name and is synced: in
/// another domain than the removal's. Kinds of volume on which a crash loses it.
fn failing() -> usize {
    let fails = |kind: &Kind| {
        let mut base = base(*kind).unwrap();
        let mut r = Runner::new(&base.setup, base.image, base.model, base.keys).unwrap();
        set_clock(2 * times::WORKLOAD);
        let mv = |from, to| Op::Rename { from: P(from), to: P(to), mode: RenameMode::Replace };
        r.apply(&mv("A/g", "t")).unwrap();
        r.apply(&mv("t", "A/g")).unwrap();
        r.remount().unwrap();
        base.image = final_image(r.device()).compact();
        (base.model, base.keys) = (r.model.clone(), r.keys().clone());
        let ops = [
            Op::Unlink { path: P("A/g") },
            Op::Create { path: P("A/g"), kind: FileKind::File, mode: 0o644 },
            Op::Fsync { at: At::Path(P("A/g")), data_only: false },
        ];
        every_crash_on(&base, &ops, End::Crash).is_err()
    };
    Kind::ALL.iter().filter(|kind| fails(kind)).count()
}

// one test: a planted bug is one of the whole process
#[test]
fn a_name_taken_at_a_time_before_it_was_left_is_lost() {
    assert_eq!(failing(), 0);
    plant(Some(Bug::ClockNotRaised));
    let failing = failing();
    plant(None);
    assert!(failing > 0);
}
