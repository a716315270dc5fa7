//! Files that have as many extents as they can: what would make more is refused, and no commit fails.

use crate::cell::Body;
use crate::volume::crowd::at_once;
use crate::{
    Cred, Error, FallocMode, FileKind, InodeNo, MkfsOptions, MountOptions, NewNode, OpenFile, SetAttr, Volume, mkfs,
};
use braidfs_device::{Device, MemDevice};
use std::sync::Arc;

const BLOCK: u64 = 4096;
const ALLOCATE: FallocMode = FallocMode::Allocate { keep_size: false };
/// Extents that the small trees below hold at most, and more.
const MANY: u64 = 2000;

fn volume() -> Volume {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(16384));
    mkfs::format(std::slice::from_ref(&device), &MkfsOptions { domains: Some(1), ..MkfsOptions::default() }).unwrap();
    Volume::mount(vec![device], MountOptions { background: false, ..MountOptions::default() }).unwrap()
}

fn file(v: &Volume) -> OpenFile {
    named(v, b"f")
}

fn named(v: &Volume, name: &[u8]) -> OpenFile {
    let new = NewNode { kind: FileKind::File, mode: 0o644, umask: 0, rdev: 0, target: b"" };
    v.open(v.create(InodeNo::ROOT, name, &new, &Cred::root()).unwrap().ino).unwrap()
}

/// From now on a tree of the file's extents holds a few hundred leaves of a few extents.
fn shrink(f: &OpenFile) {
    if let Body::File(b) = &mut f.cell.state.write().body {
        b.map.have_small_nodes();
    }
}

/// How often it could be done before it was refused.
fn until_refused(mut once: impl FnMut(u64) -> Result<(), Error>) -> u64 {
    for n in 0..MANY {
        match once(n) {
            Ok(()) => {}
            Err(Error::TooManyExtents) => return n,
            Err(e) => panic!("{n}: {e}"),
        }
    }
    panic!("it was never refused");
}

/// Everything is durable, and the file goes.
fn ends(v: Volume, f: OpenFile) {
    v.sync().unwrap();
    assert!(v.domains()[0].failed.is_none());
    v.setattr(f.ino(), &SetAttr { size: Some(0), ..SetAttr::default() }).unwrap();
    v.unlink(InodeNo::ROOT, b"f").unwrap();
    drop(f);
    v.unmount().unwrap();
}

#[test]
fn blocks_between_holes() {
    let v = volume();
    let f = file(&v);
    shrink(&f);
    let one = |n: u64| v.fallocate(&f, ALLOCATE, 2 * n * BLOCK, BLOCK);
    let n = until_refused(one);
    assert!(n > 400, "{n}");
    v.sync().unwrap();
    assert!(matches!(v.write(&f, 2 * n * BLOCK, &[1]), Err(Error::TooManyExtents)));
    // many at once: the file stays as it can be
    assert!(matches!(v.fallocate(&f, ALLOCATE, 0, 4 * n * BLOCK), Err(Error::TooManyExtents)));
    v.sync().unwrap();
    // what takes whole extents away is no more
    v.fallocate(&f, FallocMode::PunchHole, 0, n * BLOCK).unwrap();
    v.sync().unwrap();
    one(0).unwrap();
    v.write(&f, 2 * n * BLOCK, &[1]).unwrap();
    ends(v, f);
}

#[test]
fn holes_in_one_extent() {
    let v = volume();
    let f = file(&v);
    v.fallocate(&f, ALLOCATE, 0, 2 * MANY * BLOCK).unwrap();
    shrink(&f);
    let n = until_refused(|n| v.fallocate(&f, FallocMode::PunchHole, (2 * n + 1) * BLOCK, BLOCK));
    assert!(n > 200, "{n}");
    let zero = FallocMode::ZeroRange { keep_size: true };
    assert!(matches!(v.fallocate(&f, zero, (2 * n + 1) * BLOCK, BLOCK), Err(Error::TooManyExtents)));
    v.sync().unwrap();
    v.fallocate(&f, FallocMode::PunchHole, 0, n * BLOCK).unwrap();
    ends(v, f);
}

/// Pages in memory get places of their own when they are written: they count before.
#[test]
fn pages_that_are_not_written_yet() {
    let v = volume();
    let f = file(&v);
    let all = vec![1; (2 * MANY * BLOCK) as usize];
    assert_eq!(v.write(&f, 0, &all).unwrap(), all.len());
    v.fsync(f.ino(), false).unwrap();
    shrink(&f);
    let n = until_refused(|n| v.write(&f, (2 * n + 1) * BLOCK, &[2; BLOCK as usize]).map(drop));
    assert!(n > 100, "{n}");
    until_refused(|m| v.fallocate(&f, FallocMode::PunchHole, (2 * (n + m) + 3) * BLOCK, BLOCK));
    v.fsync(f.ino(), false).unwrap();
    v.sync().unwrap();
    let mut page = [0; BLOCK as usize];
    for n in 0..n {
        v.read(&f, (2 * n + 1) * BLOCK, &mut page).unwrap();
        assert_eq!(page, [2; BLOCK as usize], "{n}");
    }
    ends(v, f);
}

/// Many that allocate as much as one operation may, each block by itself, at the same time, admitted when the journal was as full as it
/// may be then.
#[test]
fn the_journal_has_room_for_what_is_allocated_in_pieces() {
    const FILES: usize = 40;
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(32768));
    let o = MkfsOptions { domains: Some(1), journal_bytes: Some(128 << 10), ..MkfsOptions::default() };
    mkfs::format(std::slice::from_ref(&device), &o).unwrap();
    let v =
        Arc::new(Volume::mount(vec![device], MountOptions { background: false, ..MountOptions::default() }).unwrap());
    let d = v.mounted().domains[0].clone();
    let blocks = d.pieces_max() as u64 / 2;
    let files: Vec<_> = (0..FILES).map(|n| named(&v, format!("f{n}").as_bytes())).collect();
    for f in &files {
        (0..blocks / 2).for_each(|n| assert_eq!(v.write(f, 2 * n * BLOCK, &[1; 4096]).unwrap(), 4096));
        v.mounted().dom(f.cell.domain).flush_cell(&f.cell).unwrap();
    }
    v.sync().unwrap();
    let extents = |f: &OpenFile| match &f.cell.state.read().body {
        Body::File(b) => b.map.extent_count() as u64,
        _ => 0,
    };
    at_once(&v, &files, move |v, ino| v.fallocate(&v.open(ino)?, ALLOCATE, 0, blocks * BLOCK));
    assert!(files.iter().all(|f| extents(f) >= blocks), "{} of {blocks}", extents(&files[0]));
}
