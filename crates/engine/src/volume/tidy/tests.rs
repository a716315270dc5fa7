//! When files in pieces are made whole without being asked, and when not.

use super::{QUIET_LOOKS, Quiet, SETTLED_SECONDS};
use crate::domain::own_work::as_own;
use crate::types::*;
use crate::{Cred, InodeNo, MkfsOptions, MountOptions, OpenHow, Overwrite, Volume};
use braidfs_device::{Device, MemDevice};
use std::cell::Cell;
use std::sync::Arc;

thread_local!(static NOW: Cell<i64> = const { Cell::new(1_000_000) });

fn clock() -> Timestamp {
    Timestamp { sec: NOW.get(), nsec: 0 }
}

fn pass(seconds: i64) {
    NOW.set(NOW.get() + seconds);
}

const BLOCKS: u64 = 3000;

/// A volume with a file in pieces, just written.
fn made(mib: u64) -> (Arc<dyn Device>, Volume, InodeNo) {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(mib << 8));
    let o = MkfsOptions { domains: Some(2), ..MkfsOptions::default() };
    crate::mkfs::format(std::slice::from_ref(&device), &o).unwrap();
    let v = mount(&device);
    let how = OpenHow { read: true, write: true, create: true, mode: 0o644, ..OpenHow::default() };
    let f = v.open_path(b"f", how, &Cred::root()).unwrap();
    for b in 0..BLOCKS {
        v.write(&f, b << 12, &[1; 4096]).unwrap();
    }
    v.sync().unwrap();
    for i in 0..BLOCKS {
        let b = i * 7919 % BLOCKS;
        v.write(&f, b << 12, &[b as u8; 4096]).unwrap();
        if i % 20 == 19 {
            v.fsync(f.ino(), false).unwrap();
        }
    }
    v.sync().unwrap();
    let ino = f.ino();
    (device, v, ino)
}

fn mount(device: &Arc<dyn Device>) -> Volume {
    let o = MountOptions {
        background: false,
        serial: true,
        overwrite: Overwrite::Log,
        cache_bytes: 32 << 20,
        clock: Some(clock),
        ..MountOptions::default()
    };
    Volume::mount(vec![device.clone()], o).unwrap()
}

/// What the background does, so many times; how often it moved something.
fn looks(v: &Volume, quiet: &mut Quiet, times: u32) -> u32 {
    let m = v.mounted();
    (0..times).filter(|_| quiet.look(m) && m.domains.iter().any(|d| m.tidy(d))).count() as u32
}

#[test]
fn it_waits_until_nothing_goes_on_and_stops_when_something_does() {
    let (_device, v, ino) = made(128);
    let mut quiet = Quiet::default();
    assert_eq!(looks(&v, &mut quiet, 2 * QUIET_LOOKS), 0, "it has just been changed");
    pass(SETTLED_SECONDS);
    let before = v.pieces(ino).unwrap();
    assert_eq!(looks(&v, &mut quiet, 2), 2);
    let some = v.pieces(ino).unwrap();
    assert!(some.pieces < before.pieces - 500 && some.are_short(), "{before:?}, {some:?}");
    // somebody changes something else
    let dir = crate::NewNode { kind: FileKind::Dir, mode: 0o755, umask: 0, rdev: 0, target: b"" };
    v.create(InodeNo::ROOT, b"d", &dir, &Cred::root()).unwrap();
    assert_eq!(looks(&v, &mut quiet, 3 * QUIET_LOOKS), 0, "the change is not durable yet");
    v.sync().unwrap();
    assert_eq!(looks(&v, &mut quiet, QUIET_LOOKS), 0);
    assert_eq!(looks(&v, &mut quiet, 1), 1);
    // somebody reads from the device
    v.mounted().domain_of(ino).unwrap().memory.miss();
    assert_eq!(looks(&v, &mut quiet, QUIET_LOOKS), 0);
    assert!(looks(&v, &mut quiet, 20) > 1);
    let after = v.pieces(ino).unwrap();
    assert!(after.pieces <= BLOCKS / 128 && !after.are_short(), "{after:?}");
    assert_eq!(looks(&v, &mut quiet, 50), 0, "it is whole");
    let f = v.open(ino).unwrap();
    for b in 0..BLOCKS {
        let mut got = [0; 4096];
        v.read(&f, b << 12, &mut got).unwrap();
        assert_eq!(got, [b as u8; 4096], "block {b}");
    }
}

/// Commits of the cleaner's, by whichever thread, are no use of the volume.
#[test]
fn it_goes_on_while_the_background_works() {
    let (_device, v, ino) = made(128);
    let (m, d) = (v.mounted(), v.mounted().domain_of(ino).unwrap());
    let memory = &d.memory;
    let (mut quiet, mut another) = (Quiet::default(), Quiet::default());
    let both = |quiet: &mut Quiet, another: &mut Quiet, times| {
        (0..times).filter(|_| quiet.look(m) & another.look(m)).count() as u32
    };
    assert_eq!(both(&mut quiet, &mut another, QUIET_LOOKS), 0);
    let touch = || {
        v.create(
            InodeNo::ROOT,
            b"d",
            &crate::NewNode { kind: FileKind::Dir, mode: 0o755, umask: 0, rdev: 0, target: b"" },
            &Cred::root(),
        )
        .unwrap();
        v.rmdir(InodeNo::ROOT, b"d").unwrap();
        v.sync().unwrap();
    };
    assert_eq!(both(&mut quiet, &mut another, 1), 1);
    as_own(|| {
        assert!(quiet.look(m), "nobody does anything else");
        memory.miss();
        touch();
    });
    assert_eq!(both(&mut quiet, &mut another, 5), 5, "the background's own");
    touch();
    assert_eq!(both(&mut quiet, &mut another, QUIET_LOOKS), 0, "somebody's");
}

/// What somebody does is seen also while another thread of the background is at work, and at each look is.
#[test]
fn it_stops_for_others_beside_the_work_of_the_background() {
    let (_device, v, ino) = made(128);
    let (m, d) = (v.mounted(), v.mounted().domain_of(ino).unwrap());
    let dir = crate::NewNode { kind: FileKind::Dir, mode: 0o755, umask: 0, rdev: 0, target: b"" };
    let reads = || d.memory.miss();
    let makes = || {
        v.create(InodeNo::ROOT, b"d", &dir, &Cred::root()).unwrap();
        v.sync().unwrap();
    };
    for what in [&reads as &(dyn Fn() + Sync), &makes] {
        let mut quiet = Quiet::default();
        (0..=QUIET_LOOKS).for_each(|_| _ = quiet.look(m));
        assert!(quiet.look(m));
        as_own(|| {
            std::thread::scope(|s| s.spawn(what).join().unwrap());
            assert!(!quiet.look(m), "somebody has used the volume");
        });
        (1..QUIET_LOOKS).for_each(|_| assert!(!quiet.look(m)));
        assert!(quiet.look(m));
    }
}

#[test]
fn one_that_is_read_after_a_mount_is_noted() {
    let (device, v, ino) = made(128);
    v.unmount().unwrap();
    let v = mount(&device);
    let mut quiet = Quiet::default();
    pass(SETTLED_SECONDS);
    assert_eq!(looks(&v, &mut quiet, 2 * QUIET_LOOKS), 0, "nobody has asked for it");
    v.getattr(ino).unwrap();
    assert!(looks(&v, &mut quiet, 2 * QUIET_LOOKS) > 1);
    assert!(!v.pieces(ino).unwrap().are_short());
}

#[test]
fn not_where_room_is_short() {
    let (_device, v, ino) = made(48);
    let how = OpenHow { read: true, write: true, create: true, mode: 0o644, ..OpenHow::default() };
    let big = v.open_path(b"big", how, &Cred::root()).unwrap();
    let mut at = 0;
    while v.write(&big, at, &[7; 1 << 16]).is_ok_and(|n| n > 0) {
        at += 1 << 16;
    }
    v.sync().unwrap();
    // some 5 MiB: enough for a part of the file, and less than others may want
    v.setattr(big.ino(), &SetAttr { size: Some(at - (5 << 20)), ..SetAttr::default() }).unwrap();
    v.sync().unwrap();
    pass(SETTLED_SECONDS);
    let before = v.pieces(ino).unwrap();
    assert_eq!(looks(&v, &mut Quiet::default(), 3 * QUIET_LOOKS), 0);
    assert_eq!(v.pieces(ino).unwrap(), before);
}
