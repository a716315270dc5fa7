//! Blocks of files as `stat` tells them, and as `fallocate` asks for them.

use crate::types::*;
use crate::volume::{OpenFile, Volume};
use crate::{Error, mkfs};
use braidfs_device::{Device, MemDevice};
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

const PAGE: u64 = 4096;
/// Pages of the files below.
const PAGES: u64 = 300;

fn volume(journal_bytes: Option<u64>) -> (Volume, OpenFile) {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(16384));
    let o = MkfsOptions { domains: Some(1), journal_bytes, ..MkfsOptions::default() };
    mkfs::format(std::slice::from_ref(&device), &o).unwrap();
    let v = Volume::mount(vec![device], MountOptions { background: false, ..MountOptions::default() }).unwrap();
    let new = NewNode { kind: FileKind::File, mode: 0o644, umask: 0, rdev: 0, target: b"" };
    let f = v.open(v.create(InodeNo::ROOT, b"f", &new, &Cred::root()).unwrap().ino).unwrap();
    // no content of a record
    v.setattr(f.ino(), &SetAttr { size: Some(PAGES * PAGE), ..SetAttr::default() }).unwrap();
    (v, f)
}

fn blocks(v: &Volume, f: &OpenFile) -> u64 {
    v.getattr(f.ino()).unwrap().sectors / 8
}

#[derive(Debug, Clone)]
enum Step {
    Write(u64, usize),
    Allocate(u64, u64),
    Zero(u64, u64),
    Punch(u64, u64),
    Sync,
}

fn step() -> impl Strategy<Value = Step> {
    let at = || prop_oneof![0..(PAGES - 40) * PAGE, (0..PAGES - 40).prop_map(|p| p * PAGE)];
    let len = || prop_oneof![1..40 * PAGE, (1..40u64).prop_map(|p| p * PAGE)];
    prop_oneof![
        4 => (at(), len()).prop_map(|(a, l)| Step::Write(a, l as usize)),
        1 => (at(), len()).prop_map(|(a, l)| Step::Allocate(a, l)),
        2 => (at(), len()).prop_map(|(a, l)| Step::Zero(a, l)),
        2 => (at(), len()).prop_map(|(a, l)| Step::Punch(a, l)),
        1 => Just(Step::Sync),
    ]
}

/// Pages that the range touches.
fn touched(at: u64, len: u64) -> Range<u64> {
    at / PAGE..(at + len).div_ceil(PAGE)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// A block counts once from the moment in which something is written there, whatever was there.
    #[test]
    fn each_block_counts_once(steps in prop::collection::vec(step(), 1..40)) {
        let (v, f) = volume(None);
        let mut there = BTreeSet::new();
        for s in steps {
            match s {
                Step::Write(at, len) => {
                    prop_assert_eq!(v.write(&f, at, &vec![7; len]).unwrap(), len);
                    there.extend(touched(at, len as u64));
                }
                Step::Allocate(at, len) => {
                    v.fallocate(&f, FallocMode::Allocate { keep_size: true }, at, len).unwrap();
                    there.extend(touched(at, len));
                }
                Step::Zero(at, len) => {
                    v.fallocate(&f, FallocMode::ZeroRange { keep_size: true }, at, len).unwrap();
                    there.extend(touched(at, len));
                }
                Step::Punch(at, len) => {
                    v.fallocate(&f, FallocMode::PunchHole, at, len).unwrap();
                    let whole = at.div_ceil(PAGE)..(at + len) / PAGE;
                    there.retain(|p| !whole.contains(p));
                }
                Step::Sync => v.sync().unwrap(),
            }
            prop_assert_eq!(blocks(&v, &f), there.len() as u64);
        }
        v.sync().unwrap();
        prop_assert_eq!(blocks(&v, &f), there.len() as u64);
    }
}

/// Blocks elsewhere in the file are no room for the range: it is refused before anything is changed.
#[test]
fn zeroing_a_hole_that_has_no_room_changes_nothing() {
    let (v, f) = volume(Some(128 << 10));
    let d = &v.mounted().domains[0];
    let piece = d.pieces_max() as u64 / 2;
    v.write(&f, 0, &vec![7; (8 * piece * PAGE) as usize]).unwrap();
    v.sync().unwrap();
    let new = NewNode { kind: FileKind::File, mode: 0o644, umask: 0, rdev: 0, target: b"" };
    let large = v.open(v.create(InodeNo::ROOT, b"large", &new, &Cred::root()).unwrap().ino).unwrap();
    while v.write_room(large.ino()) > 4 * piece {
        v.append(&large, &vec![7; piece as usize * PAGE as usize]).unwrap();
    }
    v.sync().unwrap();
    let before = blocks(&v, &f);
    let zero = v.fallocate(&f, FallocMode::ZeroRange { keep_size: true }, 100_000 * PAGE, 8 * piece * PAGE);
    assert!(matches!(zero, Err(Error::NoSpace)), "{zero:?}");
    assert_eq!(blocks(&v, &f), before);
    // what is there already needs none
    v.fallocate(&f, FallocMode::ZeroRange { keep_size: true }, 0, 8 * piece * PAGE).unwrap();
    v.sync().unwrap();
    assert_eq!(blocks(&v, &f), before);
    drop((f, large));
    v.unmount().unwrap();
}
