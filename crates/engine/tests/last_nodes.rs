//! Inodes are used up, and commits need more nodes: for extents, for names, for attributes. No domain fails for that.

use braidfs::{
    Cred, DeviceSet, Error, FallocMode, FileKind, InodeNo, MkfsOptions, MountOptions, NewNode, SetAttr, TenantBudget,
    Volume, XattrMode, mkfs,
};
use braidfs_device::{Device, MemDevice};
use std::sync::Arc;

fn volume(domains: u16, mib: u64) -> (Arc<dyn Device>, Volume) {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(mib * 256));
    let o = MkfsOptions { domains: Some(domains), group_bytes: Some(4 << 20), ..MkfsOptions::default() };
    mkfs::format(std::slice::from_ref(&device), &o).unwrap();
    (device.clone(), mount(&device))
}

fn mount(device: &Arc<dyn Device>) -> Volume {
    let options = MountOptions { background: false, ..MountOptions::default() };
    Volume::mount(vec![device.clone()], options).unwrap()
}

fn node(kind: FileKind) -> NewNode<'static> {
    NewNode { kind, mode: 0o755, umask: 0, rdev: 0, target: b"" }
}

fn create(v: &Volume, dir: InodeNo, name: &str) -> Result<InodeNo, Error> {
    v.create(dir, name.as_bytes(), &node(FileKind::File), &Cred::root()).map(|a| a.ino)
}

/// Files in the root until there is no number left; how many.
fn fill_up(v: &Volume) -> usize {
    for n in 0.. {
        match create(v, InodeNo::ROOT, &format!("{n}")) {
            Ok(_) => {}
            Err(Error::NoSpace) => {
                v.sync().unwrap();
                return n;
            }
            Err(e) => panic!("{n}: {e}"),
        }
    }
    unreachable!()
}

/// It is done, or there is no room: never anything else.
fn done<T>(r: Result<T, Error>) -> bool {
    match r {
        Ok(_) => true,
        Err(Error::NoSpace) => false,
        Err(e) => panic!("{e}"),
    }
}

fn is_whole(device: Arc<dyn Device>, v: Volume) {
    assert!(v.domains().iter().all(|d| d.failed.is_none()));
    v.unmount().unwrap();
    let how = braidfs_check::FsckOptions { repair: false, force: true };
    let replay = braidfs::JournalReplay;
    let found = braidfs_check::check(&[device], &how, &replay, &|_, _, _| {}).unwrap().findings;
    assert_eq!(found, vec![]);
}

/// Files that need leaves for their extents, one after the other, and all of them again.
#[test]
fn files_in_pieces_on_a_volume_without_inodes() {
    let (device, v) = volume(1, 64);
    let files: Vec<_> = (0..40).map(|n| create(&v, InodeNo::ROOT, &format!("f{n}")).unwrap()).collect();
    let made = fill_up(&v);
    assert!(made > 1000 && v.statfs().inodes_free == 0, "{made}, {:?}", v.statfs());
    let (mut written, mut refused) = (0, 0);
    for round in 0..3u64 {
        for ino in &files {
            let f = v.open(*ino).unwrap();
            for at in 0..250 {
                let ok = done(v.write(&f, (at * 2 + round % 2) * 4096 * 3, &[7; 4096]));
                written += u64::from(ok);
                refused += u64::from(!ok);
            }
            v.sync().unwrap();
        }
    }
    assert!(written > 2000, "{written} written, {refused} refused");
    is_whole(device, v);
}

/// A directory that grows by links, and inodes with many names and long attributes: each needs nodes of its own.
#[test]
fn links_and_attributes_on_a_volume_without_inodes() {
    let (device, v) = volume(1, 32);
    let me = Cred::root();
    let dir = v.create(InodeNo::ROOT, b"dir", &node(FileKind::Dir), &me).unwrap().ino;
    let files: Vec<_> = (0..30).map(|n| create(&v, InodeNo::ROOT, &format!("f{n}")).unwrap()).collect();
    fill_up(&v);
    let long = "x".repeat(200);
    let mut counts = [0; 4];
    for round in 0..40 {
        for (i, ino) in files.iter().enumerate() {
            let linked = done(v.link(*ino, dir, format!("{i}-{round}-{long}").as_bytes()));
            let name = format!("user.{round}-{long}");
            let set = done(v.setxattr(*ino, name.as_bytes(), &[1; 3000], XattrMode::Set));
            counts[usize::from(linked)] += 1;
            counts[2 + usize::from(set)] += 1;
        }
        if round % 4 == 0 {
            v.sync().unwrap();
        }
    }
    assert!(counts.iter().all(|n| *n > 0), "{counts:?}");
    // what goes makes room
    for n in 0..200 {
        v.unlink(InodeNo::ROOT, format!("{n}").as_bytes()).unwrap();
    }
    v.sync().unwrap();
    assert!(create(&v, InodeNo::ROOT, "again").is_ok());
    is_whole(device, v);
}

/// After a mount, too: the first commit finds as little of the reserve as the last one left.
#[test]
fn a_volume_without_inodes_is_mounted_again() {
    let (device, mut v) = volume(1, 32);
    let files: Vec<_> = (0..300).map(|n| create(&v, InodeNo::ROOT, &format!("f{n}")).unwrap()).collect();
    fill_up(&v);
    let (mut set, mut refused) = (0, 0);
    for round in 0..6 {
        for ino in &files {
            let ok = done(v.setxattr(*ino, format!("user.{round}").as_bytes(), &[1; 3000], XattrMode::Set));
            set += u32::from(ok);
            refused += u32::from(!ok);
        }
        v.sync().unwrap();
        v.unmount().unwrap();
        v = mount(&device);
        // as the background does
        v.statfs();
    }
    assert!(set > 50 && refused > 0, "{set} set, {refused} refused");
    is_whole(device, v);
}

/// Files are made while the domain gets one group after the other, with a commit at each of the last numbers.
#[test]
fn commits_at_the_last_numbers_of_a_domain() {
    let (device, v) = volume(2, 64);
    let dir = v.create(InodeNo::ROOT, b"dir", &node(FileKind::Dir), &Cred::root()).unwrap().ino;
    let long = "x".repeat(220);
    let mut made = 0;
    for n in 0..12_000 {
        if !done(create(&v, dir, &format!("{n}-{long}"))) {
            break;
        }
        made = n;
        if v.domains().iter().any(|d| d.inodes_free < 50) {
            v.sync().unwrap();
        }
    }
    assert!(made > 5000, "{made}");
    drop(v.sync());
    is_whole(device, v);
}

/// A file of many pieces is emptied and stays small: the nodes of its tree are free again.
#[test]
fn a_file_in_pieces_that_is_emptied_keeps_no_node() {
    for again in [0, 100] {
        let (device, v) = volume(1, 64);
        let f = v.open(create(&v, InodeNo::ROOT, "log").unwrap()).unwrap();
        v.sync().unwrap();
        let before = v.statfs().inodes_free;
        for at in 0..2000 {
            v.write(&f, at * 2 * 4096, &[7; 4096]).unwrap();
        }
        v.sync().unwrap();
        assert!(v.statfs().inodes_free < before - 20, "no tree: this test sees nothing");
        v.setattr(f.ino(), &SetAttr { size: Some(0), ..SetAttr::default() }).unwrap();
        v.write(&f, 0, &vec![1; again]).unwrap();
        v.fsync(f.ino(), false).unwrap();
        v.sync().unwrap();
        assert_eq!(v.statfs().inodes_free, before);
        drop(f);
        is_whole(device, v);
    }
}

/// With groups as large as they are by default, all of whose space is files in pieces of one block.
#[test]
fn a_group_without_inodes_is_full_of_pieces() {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(100 * 256));
    let o = MkfsOptions { domains: Some(1), group_bytes: Some(64 << 20), ..MkfsOptions::default() };
    mkfs::format(std::slice::from_ref(&device), &o).unwrap();
    let v = mount(&device);
    let ino = create(&v, InodeNo::ROOT, "pieces").unwrap();
    let made = fill_up(&v);
    assert!(made > 20_000 && v.statfs().inodes_free == 0, "{made}, {:?}", v.statfs());
    let f = v.open(ino).unwrap();
    // downwards, each leaf that splits is left half full
    let mut written = 0;
    for at in (0..20_000u64).rev() {
        written += u32::from(done(v.write(&f, at * 2 * 4096, &[7; 4096])));
        if at % 250 == 0 {
            v.sync().unwrap();
        }
    }
    assert!(written > 17_000, "{written} written");
    drop(f);
    is_whole(device, v);
}

/// Where few nodes are left, what needs none is not refused: overwriting blocks where they lie, and writing at the end of a file of
/// few extents.
#[test]
fn what_needs_no_nodes_is_written() {
    let (device, v) = volume(1, 64);
    let open = |name: &str| v.open(create(&v, InodeNo::ROOT, name).unwrap()).unwrap();
    let (base, log) = (open("base"), open("log"));
    let others: Vec<_> = (0..300).map(|n| create(&v, InodeNo::ROOT, &format!("f{n}")).unwrap()).collect();
    for at in 0..100 {
        v.fallocate(&base, FallocMode::Allocate { keep_size: false }, at * 8192, 4096).unwrap();
        v.write(&base, at * 8192, &[1; 4096]).unwrap();
    }
    v.write(&log, 0, &[1; 8192]).unwrap();
    fill_up(&v);
    let mut refused = 0;
    for round in 0..20 {
        let name = format!("user.{round}");
        let set = |ino: &&InodeNo| !done(v.setxattr(**ino, name.as_bytes(), &[1; 3000], XattrMode::Set));
        refused += others.iter().filter(set).count();
        v.sync().unwrap();
    }
    assert!(refused > 300 && v.statfs().available > 2048, "{refused} refused, {:?}", v.statfs());
    for at in 0..100 {
        assert_eq!(v.write(&base, at * 8192, &[2; 4096]).unwrap(), 4096, "{at}");
    }
    for n in 0..32 {
        assert_eq!(v.append(&log, &[2; 128 << 10]).unwrap(), 8192 + ((n * 128) << 10), "{n}");
    }
    // what is there needs no nodes either, nor what lies behind pages that are dirty
    let allocate = FallocMode::Allocate { keep_size: false };
    for at in 0..100 {
        v.fallocate(&base, allocate, at * 8192, 4096).unwrap();
    }
    let size = v.append(&log, &[2; 512 << 10]).unwrap() + (512 << 10);
    v.fallocate(&log, allocate, size, 64 << 10).unwrap();
    // two writers: one fills the pages again that the other has just written out
    std::thread::scope(|s| {
        for _ in 0..2 {
            s.spawn(|| (0..16).for_each(|n| assert!(v.append(&log, &[2; 1 << 20]).is_ok(), "{n}")));
        }
    });
    drop((base, log));
    is_whole(device, v);
}

/// Files in pieces whose blocks all move, where commits have little of their reserve left: what takes blocks away is never refused.
/// The tree of such a file is written anew, and has the nodes of the old one.
#[test]
fn ranges_are_taken_out_on_a_volume_without_inodes() {
    const PAGE: u64 = 4096;
    let (device, v) = volume(1, 64);
    let open = |n: u64| v.open(create(&v, InodeNo::ROOT, &format!("f{n}")).unwrap()).unwrap();
    let files: Vec<_> = (0..20).map(open).collect();
    let others: Vec<_> = (0..300).map(|n| create(&v, InodeNo::ROOT, &format!("o{n}")).unwrap()).collect();
    for f in &files {
        v.append(f, &vec![7; 600 * 4096]).unwrap();
        v.sync().unwrap();
    }
    fill_up(&v);
    let mut refused = 0;
    for round in 0..3 {
        let name = format!("user.{round}");
        let set = |ino: &&InodeNo| !done(v.setxattr(**ino, name.as_bytes(), &[1; 3000], XattrMode::Set));
        refused += others.iter().filter(set).count();
        v.sync().unwrap();
    }
    // downwards, so that leaves which split are left half full
    for (f, at) in files.iter().flat_map(|f| (0..300u64).rev().map(move |at| (f, at))) {
        v.fallocate(f, FallocMode::PunchHole, (at * 2 + 1) * PAGE, PAGE).unwrap();
    }
    v.sync().unwrap();
    for round in 0..3 {
        files.iter().for_each(|f| v.fallocate(f, FallocMode::CollapseRange, 0, PAGE).unwrap());
        v.sync().unwrap_or_else(|e| panic!("{round}: {e}"));
    }
    assert!(refused > 300, "{refused} refused");
    for f in &files {
        assert_eq!(v.getattr(f.ino()).unwrap().size, 597 * PAGE);
        let (mut first, mut second) = ([0; 4096], [1; 4096]);
        v.read(f, 0, &mut second).unwrap();
        v.read(f, PAGE, &mut first).unwrap();
        assert!(first == [7; 4096] && second == [0; 4096]);
    }
    drop(files);
    is_whole(device, v);
}

/// A volume on two devices of so many MiB.
fn on_two_devices(mib: [u64; 2]) -> (Vec<Arc<dyn Device>>, Volume) {
    let devices: Vec<Arc<dyn Device>> = mib.iter().map(|n| Arc::new(MemDevice::new(n * 256)) as _).collect();
    let o = MkfsOptions { domains: Some(1), group_bytes: Some(4 << 20), ..MkfsOptions::default() };
    mkfs::format(&devices, &o).unwrap();
    let options = MountOptions { background: false, ..MountOptions::default() };
    let v = Volume::mount(devices.clone(), options).unwrap();
    (devices, v)
}

fn all_are_whole(devices: &[Arc<dyn Device>], v: Volume) {
    assert!(v.domains().iter().all(|d| d.failed.is_none()), "{:?}", v.domains());
    v.unmount().unwrap();
    let how = braidfs_check::FsckOptions { repair: false, force: true };
    let found = braidfs_check::check(devices, &how, &braidfs::JournalReplay, &|_, _, _| {}).unwrap().findings;
    assert_eq!(found, vec![]);
}

/// All groups of the domain are on a device that is drained, and the commit that settles what was done before needs nodes: no
/// number is given out there any more, and none can be had elsewhere within a commit.
#[test]
fn a_drain_of_all_that_a_domain_has() {
    let (devices, v) = on_two_devices([64; 2]);
    let f = create(&v, InodeNo::ROOT, "f").unwrap();
    v.sync().unwrap();
    v.setxattr(f, b"user.long", &[7; 8 << 10], XattrMode::Set).unwrap();
    v.drain_device(0, &|_, _| true).unwrap();
    v.sync().unwrap();
    assert_eq!(v.getxattr(f, b"user.long").unwrap(), [7; 8 << 10]);
    // what comes now has its numbers on the other device
    let late = create(&v, InodeNo::ROOT, "late").unwrap();
    v.setxattr(late, b"user.long", &[8; 8 << 10], XattrMode::Set).unwrap();
    v.sync().unwrap();
    all_are_whole(&devices, v);
}

/// The same of a tenant that may use but the other device from now on, on which another one has all that there is.
#[test]
fn a_tenant_is_kept_off_all_that_its_domain_has() {
    let (devices, v) = on_two_devices([64, 16]);
    let on = |n| TenantBudget { devices: DeviceSet::of([n]).unwrap(), ..TenantBudget::default() };
    let tenant = |name: &str, budget| {
        v.tenant_create(InodeNo::ROOT, name.as_bytes(), 0o755, name, budget, &Cred::root()).unwrap().root
    };
    let (t, other) = (tenant("t", on(0)), tenant("other", on(1)));
    let f = create(&v, t, "f").unwrap();
    let large = v.open(create(&v, other, "large").unwrap()).unwrap();
    let mut end = 0;
    while let Ok(n) = v.write(&large, end, &[1; 1 << 16]) {
        end += n as u64;
    }
    v.sync().unwrap();
    v.setxattr(f, b"user.long", &[7; 8 << 10], XattrMode::Set).unwrap();
    v.tenant_change("t", |b| *b = on(1)).unwrap();
    v.sync().unwrap();
    // what the other one gives up is claimed, and it moves
    drop(large);
    v.unlink(other, b"large").unwrap();
    v.sync().unwrap();
    v.tenant_move("t", &|_, _| true).unwrap();
    assert_eq!(v.getxattr(f, b"user.long").unwrap(), [7; 8 << 10]);
    all_are_whole(&devices, v);
}
