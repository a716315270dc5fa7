//! A large sparse file that is in memory, and of which few pages are dirty: who asks for these looks at nothing else.

use crate::cell::pages::tests::looks;
use crate::{Cred, Error, FileKind, InodeNo, MkfsOptions, MountOptions, NewNode, OpenFile, Overwrite, Volume};
use braidfs_device::{Device, MemDevice};
use std::sync::Arc;

const BLOCK: u64 = 4096;
/// Groups of pages, one page in each.
const GROUPS: u64 = 1500;
/// Bytes from one of these pages to the next.
const STEP: u64 = 64 * BLOCK;

fn volume(overwrite: Overwrite) -> (Volume, OpenFile) {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(16384));
    crate::mkfs::format(std::slice::from_ref(&device), &MkfsOptions { domains: Some(1), ..MkfsOptions::default() })
        .unwrap();
    let options = MountOptions { background: false, overwrite, ..MountOptions::default() };
    let v = Volume::mount(vec![device], options).unwrap();
    let new = NewNode { kind: FileKind::File, mode: 0o644, umask: 0, rdev: 0, target: b"" };
    let f = v.open(v.create(InodeNo::ROOT, b"f", &new, &Cred::root()).unwrap().ino).unwrap();
    (0..GROUPS).for_each(|g| write(&v, &f, g));
    (v, f)
}

fn write(v: &Volume, f: &OpenFile, group: u64) {
    assert_eq!(v.write(f, group * STEP, &[group as u8; BLOCK as usize]).unwrap() as u64, BLOCK);
}

#[test]
fn an_fsync_looks_at_dirty_pages_alone() {
    for overwrite in [Overwrite::Auto, Overwrite::Log] {
        let (v, f) = volume(overwrite);
        v.sync().unwrap();
        for dirty in [1, 20] {
            (0..dirty).for_each(|i| write(&v, &f, 700 + i));
            let (looked, done) = looks(|| v.fsync(f.ino(), false));
            done.unwrap();
            assert!((dirty..=20 * dirty).contains(&(looked as u64)), "{overwrite:?}, {dirty} pages: {looked} groups");
        }
        v.unmount().unwrap();
    }
}

/// Where data and holes begin, all of them.
fn walk(v: &Volume, f: &OpenFile) -> Vec<u64> {
    let mut all = vec![];
    let mut hole = false;
    loop {
        match v.seek(f, all.last().copied().unwrap_or(0), hole) {
            Ok(at) => all.push(at),
            Err(Error::NoData) => return all,
            Err(e) => panic!("{e}"),
        }
        hole = !hole;
    }
}

#[test]
fn a_walk_by_data_and_holes_looks_at_each_group_a_few_times() {
    let (v, f) = volume(Overwrite::Auto);
    let wanted: Vec<u64> = (0..GROUPS).flat_map(|g| [g * STEP, g * STEP + BLOCK]).collect();
    // dirty, then clean and in memory, then with one dirty page
    for dirty in [GROUPS, 0, 1] {
        let (looked, found) = looks(|| walk(&v, &f));
        assert_eq!(found, wanted);
        assert!(looked as u64 <= 6 * GROUPS, "{dirty} dirty: {looked} groups");
        v.sync().unwrap();
        if dirty == 0 {
            write(&v, &f, GROUPS - 1);
        }
    }
    v.unmount().unwrap();
}
