//! Limits of directories whose numbers were used before, and who is charged.

use crate::cell::record::inline_room;
use crate::quota::{Force, forced};
use crate::{
    Cred, Error, FallocMode, FileKind, InodeNo, MkfsOptions, MountOptions, NewNode, QuotaLimits, QuotaOwner,
    RenameMode, SetAttr, Volume, XattrMode, mkfs,
};
use braidfs_device::{Device, MemDevice};
use std::sync::{Arc, Barrier};
use std::thread;

const ROOT: InodeNo = InodeNo::ROOT;

fn volume(domains: u16) -> Volume {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 8));
    let how = MkfsOptions { domains: Some(domains), ..MkfsOptions::default() };
    mkfs::format(std::slice::from_ref(&device), &how).unwrap();
    Volume::mount(vec![device], MountOptions { background: false, ..MountOptions::default() }).unwrap()
}

fn create(v: &Volume, dir: InodeNo, name: &str, kind: FileKind) -> InodeNo {
    let new = NewNode { kind, mode: 0o755, umask: 0, rdev: 0, target: b"" };
    v.create(dir, name.as_bytes(), &new, &Cred::root()).unwrap().ino
}

fn much(l: &mut QuotaLimits) {
    l.inodes = Some(1 << 20);
}

/// A limited directory goes, and something that still counts for it keeps its entry: who gets its number is no directory with
/// limits.
#[test]
fn a_directory_with_the_number_of_a_limited_one_counts() {
    let v = volume(1);
    let (a, b) = (create(&v, ROOT, "a", FileKind::Dir), create(&v, ROOT, "b", FileKind::Dir));
    create(&v, a, "f", FileKind::File);
    let of_a = v.quota_directory(a, much).unwrap().owner;
    v.rename(a, b"f", ROOT, b"f", RenameMode::Replace).unwrap();
    v.rmdir(ROOT, b"a").unwrap();
    v.sync().unwrap();
    // the number of a directory is free at a checkpoint
    v.mounted().checkpoint_all().unwrap();
    let named = (0..100_000).map(|n| create(&v, b, &format!("c{n}"), FileKind::Dir)).position(|c| c == a);
    let c = named.expect("the number was not given out again") as u64;
    create(&v, a, "below", FileKind::File);
    assert_eq!(v.quota(of_a).unwrap().inodes, 1, "its entry is gone, and this test sees nothing");
    let of_b = v.quota_directory(b, much).unwrap().owner;
    assert_eq!(v.quota(of_b).unwrap().inodes, 1 + c + 1 + 1, "itself, the directories in it, and the file below one");
    assert_eq!(v.quota_drift().unwrap(), []);
    v.unmount().unwrap();
}

/// A directory goes while all below a directory above it is looked at, and a file gets its number: that is no error there.
#[test]
fn a_file_with_the_number_of_a_directory_is_not_listed() {
    let v = volume(1);
    let (a, b) = (create(&v, ROOT, "a", FileKind::Dir), create(&v, ROOT, "b", FileKind::Dir));
    let was = v.mounted().cell(a).unwrap().inode();
    assert_eq!(v.mounted().children_at_once(was).unwrap(), []);
    v.rmdir(ROOT, b"a").unwrap();
    assert!(matches!(v.mounted().children_at_once(was), Err(Error::NotFound)), "it was removed");
    v.sync().unwrap();
    v.mounted().checkpoint_all().unwrap();
    assert!((0..100_000).any(|n| create(&v, b, &format!("f{n}"), FileKind::File) == a), "its number is not used again");
    assert!(matches!(v.mounted().children_at_once(was), Err(Error::NotFound)), "a file has its number");
    let file = v.mounted().cell(a).unwrap().inode();
    assert!(matches!(v.mounted().children_at_once(file), Err(Error::NotDir)));
    v.unmount().unwrap();
}

/// A file goes to and fro between two users: its group, and its directory with limits, have it all the time, and not twice for a
/// moment, in which others would be refused what they may have.
#[test]
fn owners_that_stay_are_not_charged_for_a_moment() {
    let v = volume(1);
    let dir = create(&v, ROOT, "dir", FileKind::Dir);
    let f = v.open(create(&v, dir, "f", FileKind::File)).unwrap();
    v.write(&f, 0, &[7; 1 << 20]).unwrap();
    v.setattr(f.ino(), &SetAttr { gid: Some(100), ..SetAttr::default() }).unwrap();
    let (group, room) = (QuotaOwner::Group(100), Some((1 << 20) + 4096));
    v.quota_change(group, |l| l.space = room).unwrap();
    let project = v.quota_directory(dir, |l| l.space = room).unwrap().owner;
    let quotas = &v.mounted().shared.quotas;
    let refused = std::thread::scope(|s| {
        let changes = s.spawn(|| {
            for n in 0..20_000 {
                v.setattr(f.ino(), &SetAttr { uid: Some(1000 + n % 2), ..SetAttr::default() }).unwrap();
            }
        });
        let mut refused = 0;
        while !changes.is_finished() {
            for owner in [group, project] {
                match quotas.take_of(owner, 1, 0, Force::None) {
                    Ok(()) => quotas.give_of(owner, 1, 0),
                    Err(_) => refused += 1,
                }
            }
        }
        refused
    });
    assert_eq!(refused, 0, "times a block was refused that was free");
    assert_eq!(v.quota_drift().unwrap(), []);
    drop(f);
    v.unmount().unwrap();
}

/// A directory was moved out of one with limits, which have gone since: its number, which it has still, means nothing to what
/// comes into it, nor to a directory below that loses its own limits.
#[test]
fn a_number_without_limits_means_nothing() {
    let v = volume(1);
    let a = create(&v, ROOT, "a", FileKind::Dir);
    create(&v, a, "moved", FileKind::Dir);
    let of_a = v.quota_directory(a, much).unwrap().owner;
    v.rename(a, b"moved", ROOT, b"moved", RenameMode::Replace).unwrap();
    let moved = v.lookup(ROOT, b"moved").unwrap().ino;
    let refused = |name: &str| {
        create(&v, ROOT, name, FileKind::File);
        v.rename(ROOT, name.as_bytes(), moved, name.as_bytes(), RenameMode::Replace)
    };
    assert!(matches!(refused("early"), Err(Error::CrossProject)), "it counts for limits");
    v.quota_remove(of_a).unwrap();
    assert_eq!(v.quota(of_a).unwrap().inodes, 1, "it has its number still");
    refused("late").unwrap();
    let late = v.lookup(moved, b"late").unwrap().ino;
    v.link(v.lookup(ROOT, b"early").unwrap().ino, moved, b"linked").unwrap();
    let inner = create(&v, moved, "inner", FileKind::Dir);
    create(&v, inner, "f", FileKind::File);
    let of_inner = v.quota_directory(inner, much).unwrap().owner;
    assert_eq!((v.quota(of_a).unwrap().inodes, v.quota(of_inner).unwrap().inodes), (1, 2));
    v.quota_remove(of_inner).unwrap();
    assert_eq!(v.quota(of_a).unwrap().inodes, 1, "what is below was given a number without limits");
    assert!(matches!(v.quota(of_inner), Err(Error::NotFound)));
    assert_eq!(v.mounted().cell(late).unwrap().state.read().project(), 0);
    assert_eq!(v.quota_drift().unwrap(), []);
    v.unmount().unwrap();
}

/// Limits of groups do not hold for the privileged, nor where a link is so long that it takes a block.
#[test]
fn the_privileged_make_long_links() {
    let v = volume(1);
    let dir = create(&v, ROOT, "dir", FileKind::Dir);
    v.setattr(dir, &SetAttr { gid: Some(100), mode: Some(0o2775), ..SetAttr::default() }).unwrap();
    v.quota_change(QuotaOwner::Group(100), |l| l.space = Some(4096)).unwrap();
    let target = [b'x'; 4000];
    let new = NewNode { kind: FileKind::Symlink, mode: 0o777, umask: 0, rdev: 0, target: &target };
    v.create(dir, b"1", &new, &Cred::user(1000, 100)).unwrap();
    assert!(matches!(v.create(dir, b"2", &new, &Cred::user(1000, 100)), Err(Error::Quota(_))));
    v.create(dir, b"3", &new, &Cred::root()).unwrap();
    {
        let _all = forced(Force::User);
        v.create(dir, b"4", &new, &Cred::user(1000, 100)).unwrap();
    }
    assert_eq!(v.quota_drift().unwrap(), []);
    v.unmount().unwrap();
}

/// Content leaves its record, for which a commit under way charges its owner, when `fallocate` comes to the file: it is charged once.
#[test]
fn content_that_a_commit_takes_out_of_its_record_is_charged_once() {
    let v = volume(2);
    let [dir, other] = ["a", "b"].map(|name| create(&v, ROOT, name, FileKind::Dir));
    let owner = QuotaOwner::User(1000);
    v.quota_change(owner, much).unwrap();
    let [first, file] = ["first", "file"].map(|name| v.open(create(&v, dir, name, FileKind::File)).unwrap());
    for f in [&first, &file] {
        v.setattr(f.ino(), &SetAttr { uid: Some(1000), ..SetAttr::default() }).unwrap();
    }
    v.write(&file, 0, &[7; 3400]).unwrap();
    v.setxattr(file.ino(), b"user.long", &[7; 60_000], XattrMode::Set).unwrap();
    (0..235).for_each(|n| _ = v.link(file.ino(), dir, format!("{n:0250}").as_bytes()).unwrap());
    let name = format!("{:0250}", 0);
    create(&v, other, &name, FileKind::File);
    v.sync().unwrap();
    // the first that the commit comes to
    v.write(&first, 0, &[7; 3000]).unwrap();
    // what is to be known of who took its name leaves the content no room
    v.rename(other, name.as_bytes(), dir, name.as_bytes(), RenameMode::Replace).unwrap();
    assert!(inline_room(&file.cell.state.read()) < 3400);
    let d = v.mounted().dom(file.cell.domain).clone();
    assert_ne!(v.domain_of(other).unwrap(), d.id);
    let (running, (held, end)) = (d.running(), (Barrier::new(2), Barrier::new(2)));
    thread::scope(|s| {
        s.spawn(|| {
            let _st = first.cell.state.read();
            held.wait();
            end.wait();
        });
        held.wait();
        s.spawn(|| d.commit().unwrap());
        while d.running() == running {
            thread::yield_now();
        }
        let allocated = v.fallocate(&file, FallocMode::Allocate { keep_size: false }, 0, 8192);
        end.wait();
        allocated.unwrap();
    });
    v.sync().unwrap();
    assert_eq!(v.quota(owner).unwrap().used, 8192);
    assert_eq!(v.quota_drift().unwrap(), []);
    v.unmount().unwrap();
}
