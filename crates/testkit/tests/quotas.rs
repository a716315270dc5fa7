//! Limits of users, groups and directories.

use braidfs::{
    Cred, Error, FallocMode, FileKind, Force, InodeNo, JournalReplay, MkfsOptions, MountOptions, OpenFile, QuotaLimits,
    QuotaOwner, Remount, RenameMode, SetAttr, Timestamp, Volume, XattrMode, forced, mkfs,
};
use braidfs_check::usage::Owner;
use braidfs_check::{FsckOptions, check};
use braidfs_device::{Device, Effect, FaultDevice, MemDevice, Op, Rule};
use braidfs_testkit::quota::every_crash_of_a_quota;
use braidfs_testkit::small::{self, BLOCK, MIB, ROOT, copies_of, create, memory, new_node};
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Barrier};
use std::time::Duration;

const ALICE: QuotaOwner = QuotaOwner::User(1000);

fn alice() -> Cred {
    Cred::user(1000, 1000)
}

fn format(device: &Arc<dyn Device>) {
    let how = MkfsOptions { domains: Some(2), group_bytes: Some(4 * MIB), ..MkfsOptions::default() };
    mkfs::format(std::slice::from_ref(device), &how).unwrap();
}

fn mount(device: &Arc<dyn Device>) -> Volume {
    let options = MountOptions { cache_bytes: 64 * MIB, ..MountOptions::default() };
    Volume::mount(vec![Arc::clone(device)], options).unwrap()
}

fn begin(mib: u64) -> (Arc<dyn Device>, Volume) {
    let device = memory(mib);
    format(&device);
    let v = mount(&device);
    (device, v)
}

/// Unmounts, after a look whether anything was counted wrong. fsck, which looks at the disk only, counts the same.
fn close(v: Volume, device: &Arc<dyn Device>) {
    holds(&v);
    let told = v.any_quotas().then(|| v.quotas().into_iter().map(|q| (q.owner, q.used, q.inodes)).collect::<Vec<_>>());
    small::close(v, std::slice::from_ref(device));
    let Some(mut told) = told else { return };
    told.retain(|(_, used, inodes)| *used > 0 || *inodes > 0);
    let options = FsckOptions { repair: false, force: true };
    let report = check(std::slice::from_ref(device), &options, &JournalReplay, &|_, _, _| ()).unwrap();
    let found = report.usage.owners().unwrap().into_iter().map(|u| match u.owner {
        Owner::User(n) => (QuotaOwner::User(n), u.bytes, u.inodes),
        Owner::Group(n) => (QuotaOwner::Group(n), u.bytes, u.inodes),
        Owner::Project(n) => (QuotaOwner::Project(n), u.bytes, u.inodes),
    });
    assert_eq!(found.collect::<Vec<_>>(), told);
}

/// What is counted is what there is, now and when all is written.
fn holds(v: &Volume) {
    assert_eq!(v.quota_drift().unwrap(), []);
    v.sync().unwrap();
    assert_eq!(v.quota_drift().unwrap(), []);
}

fn space(blocks: u64) -> impl FnOnce(&mut QuotaLimits) {
    move |l| l.space = Some(blocks * BLOCK)
}

/// A file of a user in a directory that anybody may write.
fn file_of(v: &Volume, dir: InodeNo, name: &str, cred: &Cred) -> OpenFile {
    v.open(v.create(dir, name.as_bytes(), &new_node(FileKind::File), cred).unwrap().ino).unwrap()
}

/// Blocks and inodes.
fn used(v: &Volume, owner: QuotaOwner) -> (u64, u64) {
    v.quota(owner).map_or((0, 0), |q| (q.used / BLOCK, q.inodes))
}

fn is_quota(e: &Error, errno: i32) -> bool {
    matches!(e, Error::Quota(_)) && e.errno() == errno
}

const EDQUOT: i32 = 122;
const ENOSPC: i32 = 28;
const EXDEV: i32 = 18;

/// A user gets all blocks of the limit and not one more, in pieces of any size, by one thread and by 64.
#[test]
fn a_user_has_the_limit_to_the_block() {
    let (device, v) = begin(256);
    v.quota_change(ALICE, space(5000)).unwrap();
    for threads in [1u64, 64] {
        let files: Vec<_> = (0..threads).map(|n| file_of(&v, ROOT, &format!("{threads}.{n}"), &alice())).collect();
        std::thread::scope(|s| {
            for (n, f) in files.iter().enumerate() {
                let v = &v;
                s.spawn(move || {
                    let (mut at, bytes) = (0, vec![7; (1 + n % 40) * BLOCK as usize + 17]);
                    loop {
                        match v.write(f, at, &bytes) {
                            Ok(n) => at += n as u64,
                            Err(e) => {
                                assert!(is_quota(&e, EDQUOT), "{e:?}");
                                return;
                            }
                        }
                    }
                });
            }
        });
        assert_eq!(used(&v, ALICE), (5000, threads), "{threads} threads");
        let sizes: u64 = files.iter().map(|f| v.getattr(f.ino()).unwrap().size.div_ceil(BLOCK)).sum();
        assert_eq!(sizes, 5000);
        holds(&v);
        // what is there can be overwritten, and others have room
        let n = v.getattr(files[0].ino()).unwrap().size / BLOCK;
        assert_eq!(v.write(&files[0], 0, &vec![1; (n * BLOCK) as usize]).unwrap() as u64, n * BLOCK);
        let f = file_of(&v, ROOT, &format!("root{threads}"), &Cred::root());
        assert_eq!(v.write(&f, 0, &[1; 8192]).unwrap(), 8192);
        drop(files);
        for n in 0..threads {
            v.unlink(ROOT, format!("{threads}.{n}").as_bytes()).unwrap();
        }
        assert_eq!(used(&v, ALICE), (0, 0));
    }
    close(v, &device);
}

/// Of a write that does not fit as much is written as there is room for, to the block.
#[test]
fn the_last_write_is_short() {
    let (device, v) = begin(64);
    v.quota_change(ALICE, space(100)).unwrap();
    let f = file_of(&v, ROOT, "f", &alice());
    assert_eq!(v.write(&f, 0, &vec![1; 133 * 4096]).unwrap(), 100 * 4096);
    assert!(is_quota(&v.write(&f, 100 * BLOCK, &[1]).unwrap_err(), EDQUOT));
    let g = file_of(&v, ROOT, "g", &alice());
    // small content lies in the inode
    assert_eq!(v.write(&g, 0, &[1; 100]).unwrap(), 100);
    assert!(is_quota(&v.write(&g, 8192, &[1; 100]).unwrap_err(), EDQUOT));
    v.setattr(f.ino(), &SetAttr { size: Some(98 * BLOCK), ..SetAttr::default() }).unwrap();
    assert_eq!(v.write(&g, 8192, &[1; 100]).unwrap(), 100);
    assert_eq!(used(&v, ALICE), (100, 2), "the content that was in the inode takes a block");
    assert!(is_quota(&v.append(&f, &[1; 4096]).unwrap_err(), EDQUOT));
    // who was told that it is written
    assert_eq!(v.write_accepted(&f, 98 * BLOCK, &[1; 4096]).unwrap(), 4096);
    assert_eq!(used(&v, ALICE), (101, 2));
    {
        let _privileged = forced(Force::User);
        assert_eq!(v.append(&f, &[1; 4096]).unwrap(), 99 * BLOCK);
    }
    assert_eq!(used(&v, ALICE), (102, 2));
    close(v, &device);
}

/// A `fallocate` that meets a limit half-way keeps the blocks that it got, and the size stays.
#[test]
fn what_does_not_fit_changes_no_size() {
    let (device, v) = begin(64);
    v.quota_change(ALICE, space(5000)).unwrap();
    let modes = [FallocMode::Allocate { keep_size: false }, FallocMode::ZeroRange { keep_size: false }];
    for (n, mode) in modes.into_iter().enumerate() {
        let f = file_of(&v, ROOT, &format!("{n}"), &alice());
        v.write(&f, 0, &[7; 5000]).unwrap();
        let whole = v.fallocate(&f, mode, 0, 10_000 * BLOCK);
        assert!(is_quota(&whole.unwrap_err(), EDQUOT), "{mode:?}");
        let a = v.getattr(f.ino()).unwrap();
        assert!(a.size == 5000 && a.sectors > 100, "it was refused as a whole: this test sees nothing: {a:?}");
        v.setattr(f.ino(), &SetAttr { size: Some(0), ..SetAttr::default() }).unwrap();
        assert_eq!(used(&v, ALICE).0, 0);
        // a part of what did not fit, again
        v.fallocate(&f, mode, 100, 3000 * BLOCK).unwrap();
        assert_eq!(v.getattr(f.ino()).unwrap().size, 100 + 3000 * BLOCK);
        drop(f);
        v.unlink(ROOT, format!("{n}").as_bytes()).unwrap();
    }
    close(v, &device);
}

#[test]
fn inodes_are_limited_to_the_last_one() {
    let (device, v) = begin(64);
    v.quota_change(ALICE, |l| l.inodes = Some(3000)).unwrap();
    for threads in [1usize, 64] {
        let dir = create(&v, ROOT, &format!("d{threads}"), FileKind::Dir);
        std::thread::scope(|s| {
            for t in 0..threads {
                let v = &v;
                s.spawn(move || {
                    for n in 0.. {
                        let kind = [FileKind::File, FileKind::Dir, FileKind::Fifo][n % 3];
                        match v.create(dir, format!("{t}.{n}").as_bytes(), &new_node(kind), &alice()) {
                            Ok(_) => {}
                            Err(e) => {
                                assert!(is_quota(&e, EDQUOT), "{e:?}");
                                return;
                            }
                        }
                    }
                });
            }
        });
        assert_eq!(used(&v, ALICE).1, 3000, "{threads} threads");
        assert!(is_quota(&v.tmpfile(dir, &new_node(FileKind::File), &alice()).unwrap_err(), EDQUOT));
        v.create(dir, b"root's", &new_node(FileKind::File), &Cred::root()).unwrap();
        let privileged = Cred { privileged: true, ..alice() };
        v.create(dir, b"more", &new_node(FileKind::File), &privileged).unwrap();
        v.unlink(dir, b"more").unwrap();
        holds(&v);
        let mut names = Vec::new();
        v.readdir(dir, 0, &mut |e| {
            if e.name != b"." && e.name != b".." {
                names.push((e.name.to_vec(), e.kind));
            }
            true
        })
        .unwrap();
        for (name, kind) in names {
            if kind == FileKind::Dir {
                v.rmdir(dir, &name).unwrap()
            } else {
                v.unlink(dir, &name).unwrap()
            };
        }
        assert_eq!(used(&v, ALICE), (0, 0));
    }
    close(v, &device);
}

/// chown, sparse files, fallocate, punched and collapsed ranges, names, open files without one: what is counted is what there is.
#[test]
fn every_operation_moves_the_count() {
    let (device, v) = begin(128);
    v.quota_change(ALICE, space(2000)).unwrap();
    let f = file_of(&v, ROOT, "f", &alice());
    let is = |blocks, inodes| {
        assert_eq!(used(&v, ALICE), (blocks, inodes));
        holds(&v);
        assert_eq!(used(&v, ALICE), (blocks, inodes));
    };
    is(0, 1);
    // sparse
    v.write(&f, 1 << 30, &[1; 4096]).unwrap();
    v.setattr(f.ino(), &SetAttr { size: Some(1 << 31), ..SetAttr::default() }).unwrap();
    is(1, 1);
    v.write(&f, 100 * BLOCK, &vec![1; 50 * 4096]).unwrap();
    // dirty pages that get blocks by fallocate, count once
    v.fallocate(&f, FallocMode::Allocate { keep_size: true }, 90 * BLOCK, 100 * BLOCK).unwrap();
    is(101, 1);
    v.fallocate(&f, FallocMode::PunchHole, 95 * BLOCK + 5, 10 * BLOCK).unwrap();
    is(92, 1);
    v.fallocate(&f, FallocMode::ZeroRange { keep_size: true }, 90 * BLOCK, 100 * BLOCK).unwrap();
    is(101, 1);
    v.setattr(f.ino(), &SetAttr { size: Some(300 * BLOCK), ..SetAttr::default() }).unwrap();
    is(100, 1);
    v.fallocate(&f, FallocMode::CollapseRange, 90 * BLOCK, 30 * BLOCK).unwrap();
    is(70, 1);
    v.fallocate(&f, FallocMode::InsertRange, 100 * BLOCK, 7 * BLOCK).unwrap();
    is(70, 1);
    let refused = v.fallocate(&f, FallocMode::Allocate { keep_size: false }, 0, 3000 * BLOCK).unwrap_err();
    assert!(is_quota(&refused, EDQUOT));
    holds(&v);
    v.setattr(f.ino(), &SetAttr { size: Some(0), ..SetAttr::default() }).unwrap();
    is(0, 1);
    v.write(&f, 0, &vec![1; 10 * 4096]).unwrap();
    // another name counts nothing, and the inode counts until it is closed
    v.link(f.ino(), ROOT, b"g").unwrap();
    v.unlink(ROOT, b"f").unwrap();
    is(10, 1);
    v.unlink(ROOT, b"g").unwrap();
    is(10, 1);
    v.write(&f, 10 * BLOCK, &[1; 4096]).unwrap();
    is(11, 1);
    drop(f);
    is(0, 0);
    // without a name, and then with one
    let (attr, t) = v.tmpfile(ROOT, &new_node(FileKind::File), &alice()).unwrap();
    v.write(&t, 0, &[1; 8192]).unwrap();
    is(2, 1);
    v.link(attr.ino, ROOT, b"t").unwrap();
    drop(t);
    is(2, 1);
    // given away, and back, also beyond the limit
    let bob = QuotaOwner::User(1001);
    v.quota_change(bob, space(1)).unwrap();
    v.setattr(attr.ino, &SetAttr { uid: Some(1001), ..SetAttr::default() }).unwrap();
    is(0, 0);
    assert_eq!(used(&v, bob), (2, 1));
    // replaced by a rename
    let f = file_of(&v, ROOT, "f", &alice());
    v.rename(ROOT, b"f", ROOT, b"t", RenameMode::Replace).unwrap();
    is(0, 1);
    assert_eq!(used(&v, bob), (0, 0));
    drop(f);
    v.unlink(ROOT, b"t").unwrap();
    // a directory has blocks of its own when it is written
    let d = v.create(ROOT, b"d", &new_node(FileKind::Dir), &alice()).unwrap().ino;
    for n in 0..2000 {
        v.create(d, format!("a name of some length {n}").as_bytes(), &new_node(FileKind::File), &Cred::root()).unwrap();
    }
    holds(&v);
    assert!(used(&v, ALICE).0 > 10, "{:?}", used(&v, ALICE));
    // a link's target that is longer than what a record has room for
    let long = vec![b'x'; 4000];
    let new = braidfs::NewNode { kind: FileKind::Symlink, target: &long, ..new_node(FileKind::Symlink) };
    v.create(d, b"link", &new, &alice()).unwrap();
    close(v, &device);
}

/// All files of a group count for it, whoever owns them: inherited from a directory with set-group-ID, or given to it. Who gives
/// it more than it may have is refused, with nothing changed.
#[test]
fn a_group_has_limits() {
    let (device, v) = begin(128);
    let (staff, other) = (QuotaOwner::Group(50), QuotaOwner::Group(51));
    let dir = create(&v, ROOT, "d", FileKind::Dir);
    let set = |ino, set: SetAttr| v.setattr(ino, &set).map(drop);
    set(dir, SetAttr { gid: Some(50), mode: Some(0o2777), ..SetAttr::default() }).unwrap();
    let q = v.quota_change(staff, |l| (l.space, l.inodes) = (Some(100 * BLOCK), Some(6))).unwrap();
    assert_eq!((q.owner, q.inodes), (staff, 1), "the directory");
    // of two users, and below a directory that inherits the group in turn
    let (bob, below) =
        (Cred::user(1001, 1001), v.create(dir, b"below", &new_node(FileKind::Dir), &alice()).unwrap().ino);
    let (f, g) = (file_of(&v, dir, "f", &alice()), file_of(&v, below, "g", &bob));
    assert_eq!(v.getattr(g.ino()).unwrap().gid, 50);
    v.write(&f, 0, &vec![1; 60 * 4096]).unwrap();
    assert_eq!(v.write(&g, 0, &vec![1; 60 * 4096]).unwrap(), 40 * 4096);
    let refused = v.append(&g, &[1; 4096]).unwrap_err();
    assert!(is_quota(&refused, EDQUOT) && matches!(refused, Error::Quota(QuotaOwner::Group(50))), "{refused:?}");
    assert_eq!((used(&v, staff), used(&v, ALICE), used(&v, QuotaOwner::User(1001))), ((100, 4), (60, 2), (40, 1)));
    holds(&v);
    // given away, and not back while there is no room
    set(f.ino(), SetAttr { gid: Some(51), ..SetAttr::default() }).unwrap();
    assert_eq!((used(&v, staff), used(&v, other), used(&v, ALICE)), ((40, 3), (60, 1), (60, 2)));
    v.append(&g, &[1; 4096]).unwrap();
    let back = SetAttr { gid: Some(50), mode: Some(0o600), ..SetAttr::default() };
    let before = v.getattr(f.ino()).unwrap();
    let refused = set(f.ino(), back).unwrap_err();
    assert!(is_quota(&refused, EDQUOT));
    assert_eq!(v.getattr(f.ino()).unwrap(), before);
    assert_eq!((used(&v, staff), used(&v, other)), ((41, 3), (60, 1)));
    {
        let _privileged = forced(Force::User);
        set(f.ino(), back).unwrap();
    }
    assert_eq!((used(&v, staff), used(&v, other)), ((101, 4), (0, 0)));
    set(f.ino(), SetAttr { uid: Some(1001), gid: Some(51), ..SetAttr::default() }).unwrap();
    assert_eq!((used(&v, other), used(&v, QuotaOwner::User(1001))), ((60, 1), (101, 2)));
    // inodes
    for n in 0..3 {
        v.create(below, format!("{n}").as_bytes(), &new_node(FileKind::Fifo), &bob).unwrap();
    }
    let full = v.create(below, b"3", &new_node(FileKind::File), &bob).unwrap_err();
    assert!(
        is_quota(&full, EDQUOT) && is_quota(&v.tmpfile(below, &new_node(FileKind::File), &bob).unwrap_err(), EDQUOT)
    );
    v.create(ROOT, b"elsewhere", &new_node(FileKind::File), &bob).unwrap();
    // root's group, as root's files
    assert!(matches!(v.quota_change(QuotaOwner::Group(0), space(1)), Err(Error::Invalid(_))));
    // beside limits of the user and of the directory
    v.quota_change(ALICE, space(9)).unwrap();
    let project = v.quota_directory(below, space(500)).unwrap().owner;
    let owners: Vec<_> =
        v.quotas().into_iter().filter(|q| q.limits != QuotaLimits::default()).map(|q| q.owner).collect();
    assert_eq!(owners, [ALICE, staff, project]);
    let list = v.quotas();
    drop((f, g));
    v.sync().unwrap();
    v.crash();
    let v = mount(&device);
    assert_eq!(v.quotas(), list);
    assert!(v.listxattr(ROOT).unwrap().is_empty(), "users see none of that");
    v.quota_remove(ALICE).unwrap();
    v.quota_remove(project).unwrap();
    close(v, &device);
    let v = mount(&device);
    let owners: Vec<_> =
        v.quotas().into_iter().filter(|q| q.limits != QuotaLimits::default()).map(|q| q.owner).collect();
    assert_eq!(owners, [staff], "the record of groups is there by itself");
    v.quota_remove(staff).unwrap();
    close(v, &device);
    assert!(!mount(&device).any_quotas());
}

/// What lies below a directory counts for it: what was there, what is made there, and nothing that is moved in.
#[test]
fn a_directory_has_limits() {
    let (device, v) = begin(128);
    let d = create(&v, ROOT, "d", FileKind::Dir);
    let sub = create(&v, d, "sub", FileKind::Dir);
    let f = small::file(&v, sub, "f");
    v.write(&f, 0, &vec![1; 20 * 4096]).unwrap();
    let q = v.quota_directory(d, space(50)).unwrap();
    let (owner, QuotaOwner::Project(n)) = (q.owner, q.owner) else { panic!("{q:?}") };
    assert_eq!((q.used / BLOCK, q.inodes, q.directory), (20, 3, Some(d)));
    assert_eq!(v.getattr(f.ino()).unwrap().project, n);
    assert_eq!(v.quota_of_directory(d), Some(owner));
    let g = small::file(&v, sub, "g");
    let made = create(&v, sub, "sub2", FileKind::Dir);
    assert_eq!((v.getattr(made).unwrap().project, v.getattr(g.ino()).unwrap().project), (n, n));
    // root, too
    let _privileged = forced(Force::User);
    assert_eq!(v.write(&g, 0, &vec![1; 40 * 4096]).unwrap(), 30 * 4096);
    assert!(is_quota(&v.write(&g, 30 * BLOCK, &[1]).unwrap_err(), ENOSPC));
    let s = v.statfs_of(sub).unwrap();
    assert_eq!((s.blocks, s.free, s.available), (50, 0, 0));
    assert!(v.statfs_of(ROOT).unwrap().available > 1000);
    // the border
    let outside = create(&v, ROOT, "outside", FileKind::File);
    let other = create(&v, ROOT, "other", FileKind::Dir);
    for refused in [
        v.rename(ROOT, b"outside", d, b"x", RenameMode::Replace),
        v.rename(ROOT, b"other", sub, b"x", RenameMode::Replace),
        v.rename(ROOT, b"outside", sub, b"f", RenameMode::Exchange),
        v.rename(sub, b"f", ROOT, b"outside", RenameMode::Exchange),
        v.link(outside, sub, b"x").map(drop),
    ] {
        assert!(matches!(refused, Err(Error::CrossProject)), "{refused:?}");
        assert_eq!(refused.unwrap_err().errno(), EXDEV);
    }
    v.rename(sub, b"f", made, b"f", RenameMode::Replace).unwrap();
    // out of it: it goes on to count
    v.link(f.ino(), other, b"f").unwrap();
    v.rename(sub, b"g", other, b"g", RenameMode::Replace).unwrap();
    assert_eq!(used(&v, owner).0, 50);
    v.rename(other, b"g", d, b"g", RenameMode::Replace).unwrap();
    v.unlink(other, b"f").unwrap();
    // one below has its own
    let q = v.quota_directory(made, space(60)).unwrap();
    assert_eq!((q.used / BLOCK, used(&v, owner).0), (20, 30));
    v.quota_directory(d, space(30)).unwrap();
    assert_eq!(used(&v, q.owner).0, 20, "and keeps it");
    assert!(is_quota(&v.write(&g, 30 * BLOCK, &[1]).unwrap_err(), ENOSPC));
    // without its own it counts for the one above
    v.quota_remove(q.owner).unwrap();
    assert_eq!((used(&v, q.owner), v.getattr(f.ino()).unwrap().project), ((0, 0), n));
    assert_eq!((v.getattr(made).unwrap().project, used(&v, owner).0), (n, 50));
    assert!(is_quota(&v.write(&f, 20 * BLOCK, &[1]).unwrap_err(), ENOSPC));
    v.quota_remove(owner).unwrap();
    assert_eq!(v.getattr(f.ino()).unwrap().project, 0);
    drop((f, g));
    assert!(v.quota_of_directory(d).is_none() && matches!(v.quota_remove(owner), Err(Error::NotFound)));
    v.rename(ROOT, b"outside", d, b"x", RenameMode::Replace).unwrap();
    close(v, &device);
}

/// Directories that several threads change, and renames beside them.
#[test]
fn a_shared_directory_keeps_to_its_limit() {
    let device = memory(64);
    format(&device);
    let options = MountOptions { share_dirs: true, ..MountOptions::default() };
    let v = Volume::mount(vec![device.clone()], options).unwrap();
    let d = create(&v, ROOT, "d", FileKind::Dir);
    for n in 0..300 {
        create(&v, d, &format!("old{n}"), FileKind::File);
    }
    let q = v.quota_directory(d, |l| l.inodes = Some(1000)).unwrap();
    v.sync().unwrap();
    for n in 0..300 {
        create(&v, ROOT, &format!("out{n}"), FileKind::File);
    }
    std::thread::scope(|s| {
        for t in 0..8 {
            let v = &v;
            s.spawn(move || {
                for n in 0.. {
                    let name = format!("{t}.{n}");
                    match v.create(d, name.as_bytes(), &new_node(FileKind::File), &Cred::root()) {
                        Ok(_) if n % 5 == 0 => v.unlink(d, name.as_bytes()).unwrap(),
                        Ok(_) => {}
                        Err(e) => {
                            assert!(is_quota(&e, ENOSPC), "{e:?}");
                            break;
                        }
                    }
                    let out = format!("out{}", (t * 37 + n) % 300);
                    let moved = v.rename(ROOT, out.as_bytes(), d, name.as_bytes(), RenameMode::NoReplace);
                    assert!(matches!(moved, Err(Error::CrossProject | Error::Exists)), "{moved:?}");
                }
            });
        }
    });
    assert_eq!(v.quota(q.owner).unwrap().inodes, 1000);
    close(v, &device);
}

/// The first limit counts what there is while others make, change and remove files.
#[test]
fn counting_goes_on_beside_changes() {
    for round in 0..6 {
        let (device, v) = begin(128);
        let dirs: Vec<_> = (0..8).map(|n| create(&v, ROOT, &format!("d{n}"), FileKind::Dir)).collect();
        for n in 0..400 {
            let f = file_of(&v, dirs[n % 8], &format!("old{n}"), &alice());
            v.write(&f, 0, &vec![1; (n % 5) * 4096]).unwrap();
        }
        let (stop, limit) = (AtomicBool::new(false), AtomicU64::new(0));
        std::thread::scope(|s| {
            for (t, &dir) in dirs.iter().enumerate() {
                let (v, stop) = (&v, &stop);
                s.spawn(move || {
                    for n in 0.. {
                        if stop.load(Relaxed) {
                            return;
                        }
                        let f = file_of(v, dir, &format!("new{n}"), &alice());
                        v.write(&f, 0, &vec![1; (n % 4) * 4096]).unwrap();
                        let old = format!("old{}", (n * 8 + t) % 400);
                        if n < 40 {
                            let ino = v.lookup(dir, old.as_bytes()).unwrap().ino;
                            let size = Some((n as u64 % 9) * BLOCK);
                            v.setattr(ino, &SetAttr { size, ..SetAttr::default() }).unwrap();
                            v.write(&v.open(ino).unwrap(), 5 * BLOCK, &[1; 4096]).unwrap();
                            v.setattr(ino, &SetAttr { uid: Some(1000 + n as u32 % 3), ..SetAttr::default() }).unwrap();
                        }
                        if n > 10 {
                            v.unlink(dir, format!("new{}", n - 10).as_bytes()).unwrap();
                        }
                        drop(f);
                    }
                });
            }
            std::thread::sleep(Duration::from_millis(5 + 7 * round));
            v.quota_change(ALICE, space(1 << 20)).unwrap();
            limit.store(1, Relaxed);
            std::thread::sleep(Duration::from_millis(30));
            stop.store(true, Relaxed);
        });
        assert!(used(&v, ALICE).1 > 100);
        close(v, &device);
    }
}

/// Limits come back at a mount, after a crash, too; what is used is counted anew.
#[test]
fn limits_survive() {
    let (device, v) = begin(128);
    let d = create(&v, ROOT, "d", FileKind::Dir);
    let f = file_of(&v, d, "f", &alice());
    v.write(&f, 0, &vec![1; 30 * 4096]).unwrap();
    let limits = QuotaLimits {
        space: Some(40 * BLOCK),
        soft_space: Some(35 * BLOCK),
        inodes: Some(7),
        soft_inodes: Some(6),
        grace: Duration::from_secs(60),
    };
    v.quota_change(ALICE, |l| *l = limits).unwrap();
    let q = v.quota_directory(d, space(100)).unwrap();
    let (user, list) = (v.quota(ALICE).unwrap(), v.quotas());
    drop(f);
    close(v, &device);
    let v = mount(&device);
    assert_eq!((v.quota(ALICE).unwrap(), v.quotas()), (user.clone(), list));
    assert_eq!(user.limits, limits);
    let f = v.open(v.lookup(d, b"f").unwrap().ino).unwrap();
    v.write(&f, 30 * BLOCK, &vec![1; 20 * 4096]).unwrap();
    let g = file_of(&v, ROOT, "not synced", &alice());
    assert_eq!(used(&v, ALICE), (40, 2));
    v.fsync(f.ino(), false).unwrap();
    drop((f, g));
    v.crash();
    let v = mount(&device);
    assert_eq!((used(&v, ALICE).0, v.quota(ALICE).unwrap().limits, used(&v, q.owner)), (40, limits, (40, 2)));
    let f = v.open(v.lookup(d, b"f").unwrap().ino).unwrap();
    assert!(is_quota(&v.append(&f, &[1; 4096]).unwrap_err(), EDQUOT));
    drop(f);
    // no attribute that users see, change or take away
    assert!(v.listxattr(ROOT).unwrap().is_empty());
    assert!(v.getxattr(ROOT, b"braidfs.quota").is_err() && v.removexattr(ROOT, b"braidfs.quota").is_err());
    assert!(v.setxattr(ROOT, b"braidfs.quota", b"x", XattrMode::Set).is_err());
    // flags do not say which project it is of, and do not change it
    let ino = v.lookup(d, b"f").unwrap().ino;
    let a = v.setattr(ino, &SetAttr { flags: Some(8), ..SetAttr::default() }).unwrap();
    assert_eq!((a.flags, a.project > 0), (8, true));
    v.quota_remove(ALICE).unwrap();
    v.quota_remove(q.owner).unwrap();
    close(v, &device);
    let v = mount(&device);
    assert!(v.quotas().is_empty() && !v.any_quotas());
    small::close(v, std::slice::from_ref(&device));
}

/// A crash at every write and every flush of limits that are set, changed and removed.
#[test]
fn a_crash_leaves_the_old_limits_or_the_new_ones() {
    let (states, with, halves) = every_crash_of_a_quota().unwrap();
    let seen = format!("{states} states, {with} with limits, {halves} with a number given by halves");
    assert!(with > 10 && states > with + 10 && halves > 0, "{seen}");
    println!("{seen}");
}

/// A soft limit is a hard one after its grace, of space and of inodes, over a mount, and until less is in use.
#[test]
fn a_soft_limit_is_a_hard_one_after_its_grace() {
    static SECONDS: AtomicI64 = AtomicI64::new(1_000_000);
    let clock = Some((|| Timestamp { sec: SECONDS.load(Relaxed), nsec: 0 }) as fn() -> Timestamp);
    let device = memory(64);
    format(&device);
    let how = || MountOptions { clock, background: false, ..MountOptions::default() };
    let v = Volume::mount(vec![device.clone()], how()).unwrap();
    let limits = |l: &mut QuotaLimits| {
        (l.soft_space, l.space, l.soft_inodes) = (Some(10 * BLOCK), Some(20 * BLOCK), Some(2));
        l.grace = Duration::from_secs(100);
    };
    v.quota_change(ALICE, limits).unwrap();
    let look = |v: &Volume| {
        v.look_at_quotas();
        let q = v.quota(ALICE).unwrap();
        (q.space_exceeded_since, q.inodes_exceeded_since, q.grace_is_over)
    };
    let f = file_of(&v, ROOT, "f", &alice());
    v.write(&f, 0, &vec![1; 10 * 4096]).unwrap();
    assert_eq!(look(&v), (None, None, false));
    v.append(&f, &[1]).unwrap();
    assert_eq!(look(&v), (Some(1_000_000), None, false));
    SECONDS.fetch_add(50, Relaxed);
    drop((file_of(&v, ROOT, "g", &alice()), file_of(&v, ROOT, "h", &alice())));
    assert_eq!(look(&v), (Some(1_000_000), Some(1_000_050), false));
    SECONDS.fetch_add(50, Relaxed);
    v.append(&f, &[1; 4096]).unwrap();
    assert_eq!(look(&v), (Some(1_000_000), Some(1_000_050), true));
    assert!(is_quota(&v.append(&f, &[1; 4096]).unwrap_err(), EDQUOT));
    drop(f);
    small::close(v, std::slice::from_ref(&device));
    let v = Volume::mount(vec![device.clone()], how()).unwrap();
    let f = v.open(v.lookup(ROOT, b"f").unwrap().ino).unwrap();
    assert!(is_quota(&v.append(&f, &[1; 4096]).unwrap_err(), EDQUOT), "from the mount on");
    assert!(v.create(ROOT, b"i", &new_node(FileKind::File), &alice()).is_ok());
    SECONDS.fetch_add(50, Relaxed);
    look(&v);
    let refused = v.create(ROOT, b"k", &new_node(FileKind::File), &alice()).unwrap_err();
    assert!(is_quota(&refused, EDQUOT));
    v.setattr(f.ino(), &SetAttr { size: Some(5 * BLOCK), ..SetAttr::default() }).unwrap();
    ["g", "h", "i"].iter().for_each(|n| v.unlink(ROOT, n.as_bytes()).unwrap());
    assert_eq!(look(&v), (None, None, false));
    assert_eq!(v.append(&f, &vec![1; 12 * 4096]).unwrap(), 5 * BLOCK, "and a grace anew");
    drop(f);
    close(v, &device);
}

/// Where the root directory cannot be told since when a soft limit is exceeded it becomes a hard one all the same: its domain
/// failed, or the volume is read-only. What it could not be told it is when it can be.
#[test]
fn a_grace_ends_where_nothing_can_be_written() {
    static SECONDS: AtomicI64 = AtomicI64::new(1_000_000);
    let clock = Some((|| Timestamp { sec: SECONDS.load(Relaxed), nsec: 0 }) as fn() -> Timestamp);
    for fails in [false, true] {
        let start = SECONDS.load(Relaxed) as u64;
        let faulty = Arc::new(FaultDevice::new(memory(64), 1));
        let device: Arc<dyn Device> = faulty.clone();
        format(&device);
        let v =
            Volume::mount(vec![device.clone()], MountOptions { clock, background: false, ..MountOptions::default() });
        let v = v.unwrap();
        v.quota_change(ALICE, |l| (l.soft_space, l.grace) = (Some(10 * BLOCK), Duration::from_secs(100))).unwrap();
        let f = file_of(&v, ROOT, "f", &alice());
        v.write(&f, 0, &vec![1; 12 * 4096]).unwrap();
        v.fsync(f.ino(), false).unwrap();
        drop(f);
        if fails {
            create(&v, ROOT, "more", FileKind::File);
            faulty.add(Rule::new(Op::Write, Effect::Fail(5)));
            v.sync().unwrap_err();
            assert!(v.create(ROOT, b"x", &new_node(FileKind::File), &Cred::root()).is_err(), "the domain has failed");
        } else {
            v.remount(&Remount { read_only: Some(true), ..Remount::default() }).unwrap();
        }
        let look = || {
            v.look_at_quotas();
            let q = v.quota(ALICE).unwrap();
            (q.space_exceeded_since, q.grace_is_over, v.quota_left(ALICE))
        };
        assert_eq!(look(), (Some(start), false, None), "fails: {fails}");
        SECONDS.fetch_add(101, Relaxed);
        assert_eq!(look(), (Some(start), true, Some(0)), "fails: {fails}");
        if fails {
            drop(v.unmount());
            continue;
        }
        v.remount(&Remount { read_only: Some(false), ..Remount::default() }).unwrap();
        SECONDS.fetch_add(1, Relaxed);
        assert_eq!(look(), (Some(start), true, Some(0)));
        v.crash();
        let v =
            Volume::mount(vec![device.clone()], MountOptions { clock, background: false, ..MountOptions::default() });
        let v = v.unwrap();
        assert_eq!(v.quota(ALICE).unwrap().space_exceeded_since, Some(start), "it was written");
        close(v, &device);
    }
}

#[test]
fn wrong_limits_are_refused() {
    let (device, v) = begin(64);
    let wrong: [fn(&mut QuotaLimits); 5] = [
        |l| l.space = Some(4095),
        |l| l.inodes = Some(0),
        |l| (l.space, l.soft_space) = (Some(8192), Some(12288)),
        |l| (l.inodes, l.soft_inodes) = (Some(1), Some(2)),
        |l| l.grace = Duration::from_secs(1 << 32),
    ];
    for w in wrong {
        assert!(matches!(v.quota_change(ALICE, w), Err(Error::Invalid(_))));
    }
    let refused = |r: Result<_, Error>| drop(r.map(|q: braidfs::Quota| panic!("{q:?}")));
    refused(v.quota_change(QuotaOwner::User(0), space(1)));
    refused(v.quota_change(QuotaOwner::Project(1), space(1)));
    refused(v.quota_directory(ROOT, space(1)));
    refused(v.quota_directory(create(&v, ROOT, "f", FileKind::File), space(1)));
    assert!(!v.any_quotas() && v.quotas().is_empty());
    // as many as the record has room for, and not one more
    let many = (1..).take_while(|n| v.quota_change(QuotaOwner::User(*n), space(1)).is_ok()).count();
    assert!((800..900).contains(&many), "{many}");
    let listed = v.quotas().iter().filter(|q| q.limits.space.is_some()).count();
    assert_eq!(listed, many);
    close(v, &device);
    let v = mount(&device);
    assert_eq!(v.quotas().iter().filter(|q| q.limits.space.is_some()).count(), many);
    close(v, &device);
}

/// A directory that was removed takes its limits with it: their number and their room are another's, after a crash, too.
#[test]
fn limits_go_with_their_directory() {
    let (device, v) = begin(128);
    let kept = create(&v, ROOT, "kept", FileKind::Dir);
    v.quota_directory(kept, space(9)).unwrap();
    for n in 0..20 {
        let d = create(&v, ROOT, "d", FileKind::Dir);
        let q = v.quota_directory(d, space(10 + n)).unwrap();
        assert_eq!(q.owner, QuotaOwner::Project(2), "a number that is free again");
        drop(small::file(&v, d, "f"));
        v.unlink(d, b"f").unwrap();
        if n == 10 {
            // who holds it open counts
            let _open = small::file(&v, d, "open");
            v.unlink(d, b"open").unwrap();
            v.rmdir(ROOT, b"d").unwrap();
            v.quota_change(ALICE, space(100)).unwrap();
            assert_eq!(used(&v, q.owner), (0, 1));
            continue;
        }
        v.rmdir(ROOT, b"d").unwrap();
    }
    v.quota_change(ALICE, space(100)).unwrap();
    let owners = |v: &Volume| v.quotas().iter().filter(|q| q.directory.is_some()).map(|q| q.owner).collect::<Vec<_>>();
    assert_eq!(owners(&v), [QuotaOwner::Project(1)]);
    // what a crash brings back counts for nobody else
    let d = create(&v, ROOT, "d", FileKind::Dir);
    let gone = v.quota_directory(d, space(10)).unwrap().owner;
    v.sync().unwrap();
    v.rmdir(ROOT, b"d").unwrap();
    let e = create(&v, ROOT, "e", FileKind::Dir);
    v.fsync(e, false).unwrap();
    assert_eq!(v.quota_directory(e, space(20)).unwrap().owner, gone);
    v.crash();
    let v = mount(&device);
    assert!(matches!(v.lookup(ROOT, b"d"), Err(Error::NotFound)));
    assert_eq!((used(&v, gone), owners(&v)), ((0, 1), vec![QuotaOwner::Project(1), gone]));
    close(v, &device);
}

/// Two that give one directory limits at the same time give it one number.
#[test]
fn a_directory_has_one_number() {
    let (device, v) = begin(128);
    for n in 0..30 {
        let d = create(&v, ROOT, &format!("d{n}"), FileKind::Dir);
        std::thread::scope(|s| {
            for t in 0..4 {
                let v = &v;
                s.spawn(move || v.quota_directory(d, space(10 + t)).unwrap());
            }
        });
        assert_eq!(v.quotas().iter().filter(|q| q.directory == Some(d)).count(), 1);
    }
    close(v, &device);
}

/// A range that was zeroed when its blocks met the limit: what was read then an fdatasync keeps, as where all of it is done.
#[test]
fn zeroing_that_meets_the_limit_is_kept_by_fdatasync() {
    let (device, v) = begin(64);
    let f = file_of(&v, ROOT, "f", &alice());
    v.write(&f, 0, &vec![7; 20 * 4096]).unwrap();
    v.quota_change(ALICE, space(25)).unwrap();
    // an fsync of a file that is new may commit, and leaves the next one something to do
    v.fsync(f.ino(), true).unwrap();
    v.write(&f, 0, &[7; 4096]).unwrap();
    v.fsync(f.ino(), true).unwrap();
    let keep_size = true;
    let zero = v.fallocate(&f, FallocMode::ZeroRange { keep_size }, 5 * BLOCK, 300 * BLOCK);
    assert!(is_quota(&zero.unwrap_err(), EDQUOT));
    let read = |v: &Volume, f: &OpenFile| {
        let mut content = vec![1; 20 * 4096];
        assert_eq!(v.read(f, 0, &mut content).unwrap(), content.len());
        content
    };
    let before = read(&v, &f);
    assert_eq!((before[0], before[5 * 4096], before[20 * 4096 - 1]), (7, 0, 0), "it was zeroed");
    v.fsync(f.ino(), true).unwrap();
    drop(f);
    v.crash();
    let v = mount(&device);
    let f = v.open(v.lookup(ROOT, b"f").unwrap().ino).unwrap();
    assert!(read(&v, &f) == before, "fdatasync promised it");
    drop(f);
    close(v, &device);
}

/// Who gives a directory limits beside who takes them away, and beside who gives a directory below it limits: all below has
/// one number, of a directory above that has limits, or none.
#[test]
fn limits_are_given_and_taken_at_the_same_time() {
    let (device, v) = begin(128);
    let a = create(&v, ROOT, "a", FileKind::Dir);
    let dirs: Vec<_> = (0..6).map(|n| create(&v, a, &format!("d{n}"), FileKind::Dir)).collect();
    for (n, d) in dirs.iter().enumerate() {
        for f in 0..30 {
            create(&v, *d, &format!("{n}.{f}"), FileKind::File);
        }
    }
    let remove = |d: InodeNo| match v.quota_of_directory(d).map(|owner| v.quota_remove(owner)) {
        None | Some(Ok(()) | Err(Error::NotFound)) => {}
        Some(Err(e)) => panic!("{e}"),
    };
    for round in 0..60 {
        if round % 2 == 0 {
            v.quota_directory(a, space(1000)).unwrap();
        }
        let begin = Barrier::new(4);
        // who comes later comes at another moment each time
        let after = |turn: u64| {
            begin.wait();
            std::thread::sleep(Duration::from_micros(turn * (round % 15) * 100));
        };
        std::thread::scope(|s| {
            s.spawn(|| (after(0), v.quota_directory(a, space(1000)).unwrap()));
            s.spawn(|| (after(2), v.quota_directory(dirs[5], space(1000)).unwrap()));
            s.spawn(|| (after(1), remove(a)));
            s.spawn(|| (after(3), remove(dirs[5])));
        });
        let number = |d: InodeNo| match v.quota_of_directory(d) {
            Some(QuotaOwner::Project(n)) => Some(n),
            _ => None,
        };
        let above = number(a).unwrap_or(0);
        for &d in &dirs {
            let numbers: Vec<u32> =
                std::iter::once(d).chain(entries_of(&v, d)).map(|i| v.getattr(i).unwrap().project).collect();
            let is = number(d).unwrap_or(above);
            assert_eq!(numbers[0], is, "{d}: {:?}", v.quotas());
            assert!(numbers.iter().all(|n| *n == numbers[0]), "below {d}: {numbers:?}: {:?}", v.quotas());
        }
    }
    close(v, &device);
}

/// Files get other names in their directory while it gets limits, or loses them: none is missed.
#[test]
fn files_that_are_renamed_meanwhile_are_not_missed() {
    let (device, v) = begin(128);
    let d = create(&v, ROOT, "d", FileKind::Dir);
    for n in 0..1000 {
        create(&v, d, &format!("f{n}.0"), FileKind::File);
    }
    let numbers =
        |v: &Volume| -> HashSet<u32> { entries_of(v, d).into_iter().map(|i| v.getattr(i).unwrap().project).collect() };
    let done = AtomicBool::new(false);
    std::thread::scope(|s| {
        s.spawn(|| {
            let _ended = small::Ended(&done);
            for round in 0..6 {
                let QuotaOwner::Project(n) = v.quota_directory(d, space(5000)).unwrap().owner else { unreachable!() };
                assert_eq!(numbers(&v), HashSet::from([n]), "round {round}");
                v.quota_remove(QuotaOwner::Project(n)).unwrap();
                assert_eq!(numbers(&v), HashSet::from([0]), "round {round}");
            }
        });
        s.spawn(|| {
            for round in 0.. {
                for n in 0..1000 {
                    if done.load(Relaxed) {
                        return;
                    }
                    let (old, new) = (format!("f{n}.{round}"), format!("f{n}.{}", round + 1));
                    v.rename(d, old.as_bytes(), d, new.as_bytes(), RenameMode::NoReplace).unwrap();
                }
            }
        });
    });
    close(v, &device);
}

/// What a directory has, by name.
fn entries_of(v: &Volume, dir: InodeNo) -> Vec<InodeNo> {
    let mut all = Vec::new();
    v.readdir(dir, 0, &mut |e| {
        if e.name != b"." && e.name != b".." {
            all.push((e.name.to_vec(), e.ino));
        }
        true
    })
    .unwrap();
    all.sort();
    all.into_iter().map(|e| e.1).collect()
}

/// A read that fails while inodes are counted keeps no volume from being mounted, and the others count. When it can be read
/// again the inode counts, too, at the next change of limits.
#[test]
fn what_cannot_be_read_is_counted_later() {
    let memory = [Arc::new(MemDevice::soiled(64 * MIB / BLOCK))];
    let device: Arc<dyn Device> = memory[0].clone();
    format(&device);
    let v = mount(&device);
    for n in 0..300 {
        let f = file_of(&v, ROOT, &format!("f{n}"), &Cred::user(1000 + n % 3, 1));
        v.write(&f, 0, &[7; 5000]).unwrap();
        // records of blocks of their own
        if n % 10 == 0 {
            v.sync().unwrap();
        }
    }
    small::close(v, std::slice::from_ref(&device));
    let without = [Arc::new(MemDevice::from_image(memory[0].snapshot()))];
    let v = mount(&device);
    v.quota_change(ALICE, space(10_000)).unwrap();
    let all = v.quotas();
    close(v, &device);
    // each read of a mount fails once: how many mounts are refused, and after how many something was not counted
    let each = |image: &[Arc<MemDevice>]| {
        let (mut refused, mut late) = (0, 0);
        for k in 0..1000 {
            let faulty = Arc::new(FaultDevice::new(copies_of(image).remove(0), 1));
            faulty.add(Rule::new(Op::Read, Effect::Fail(5)).skip(k).times(1));
            let front: Arc<dyn Device> = faulty.clone();
            let mounted = Volume::mount(vec![front], MountOptions { cache_bytes: 64 * MIB, ..MountOptions::default() });
            if faulty.fired() == 0 {
                return (refused, late, k);
            }
            faulty.clear();
            let Ok(v) = mounted else {
                refused += 1;
                continue;
            };
            late += u64::from(v.any_quotas() && v.quotas() != all);
            match v.quota_change(ALICE, space(10_000)) {
                // recovery goes on without it
                Err(Error::DomainFailed { .. }) => drop(v.unmount()),
                changed => {
                    changed.unwrap();
                    assert_eq!((v.quotas(), v.quota_drift().unwrap()), (all.clone(), vec![]), "read {k}");
                    v.unmount().unwrap();
                }
            }
        }
        panic!("more reads than there can be");
    };
    let ordinary = each(&without);
    let with = each(&memory);
    println!("refused, counted late, reads: {with:?}; without limits {ordinary:?}");
    // some reads are ahead of what is asked for, and made again
    assert!(with.0 <= ordinary.0 && with.1 > 0, "{with:?}, {ordinary:?}");
    // the first limit
    let mut late = 0;
    for k in 0..with.2 - ordinary.2 {
        let faulty = Arc::new(FaultDevice::new(copies_of(&without).remove(0), 1));
        let front: Arc<dyn Device> = faulty.clone();
        let v = mount(&front);
        faulty.add(Rule::new(Op::Read, Effect::Fail(5)).skip(k).times(1));
        late += u64::from(v.quota_change(ALICE, space(10_000)).is_err());
        faulty.clear();
        v.quota_change(ALICE, space(10_000)).unwrap();
        assert_eq!((v.quotas(), v.quota_drift().unwrap()), (all.clone(), vec![]), "read {k}");
        close(v, &front);
    }
    assert!(late > 0);
}
