//! Counting, and that an inode which is held outlives its last name and no more.

use super::table::{LookupCounts, ORPHAN, TIMES_MAX};
use super::*;
use crate::{Cred, FileKind, MkfsOptions, MountOptions, NewNode, RenameMode, SetAttr};
use braidfs_device::{Device, MemDevice};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Instant;

fn volume() -> Volume {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(16384));
    crate::mkfs::format(std::slice::from_ref(&device), &MkfsOptions::default()).unwrap();
    Volume::mount(vec![device], MountOptions::default()).unwrap()
}

fn make(v: &Volume, dir: InodeNo, name: &str, kind: FileKind) -> Attr {
    let new = NewNode { kind, mode: 0o755, umask: 0, rdev: 0, target: &[] };
    v.create(dir, name.as_bytes(), &new, &Cred::root()).unwrap()
}

fn held(v: &Volume) -> (usize, usize) {
    let s = v.held();
    (s.inodes, s.orphans)
}

fn gone(v: &Volume, a: &Attr) -> bool {
    match v.getattr(a.ino) {
        Err(Error::NotFound) => true,
        Ok(now) => now.generation != a.generation,
        Err(e) => panic!("{e}"),
    }
}

const ROOT: InodeNo = InodeNo::ROOT;
const K: FileKind = FileKind::File;

#[test]
fn a_table_in_which_nothing_was_held_has_no_shards() {
    let (t, n) = (LookupCounts::default(), InodeNo(7));
    assert!(t.known_shard(n).is_none() && t.shards().is_empty() && t.is_empty());
    assert!(!t.due(Duration::ZERO) && !t.removed_lately(Duration::ZERO));
    assert_eq!(t.give_back(n, |_| true, 1), GivenBack::TooMuch { orphan: false });
    assert!(t.add(n, 3, FileKind::File) && !t.is_empty());
    assert_eq!(t.give_back(n, |g| g == 3, 1), GivenBack::Last { orphan: false });
    assert!(t.is_empty());
}

#[test]
fn counts_add_up_and_are_clamped() {
    let t = LookupCounts::default();
    let (n, is) = (InodeNo(77), |g: u32| g == 3);
    assert_eq!(t.give_back(n, is, 1), GivenBack::TooMuch { orphan: false });
    for _ in 0..5 {
        assert!(t.add(n, 3, K));
    }
    assert_eq!(t.give_back(n, is, 3), GivenBack::StillHeld);
    assert_eq!(t.give_back(n, |g| g == 2, 2), GivenBack::StillHeld, "meant for an earlier inode of the number");
    assert_eq!(t.give_back(n, is, 2), GivenBack::Last { orphan: false });
    assert!(t.add(n, 3, K));
    assert_eq!(t.give_back(n, is, u64::MAX), GivenBack::TooMuch { orphan: false });
    assert!(t.add(n, 4, K) && !t.add(n, 3, K) && t.add(n, 5, K), "a later inode of the number takes over");
    assert_eq!(t.give_back(n, |g| g == 5, 1), GivenBack::Last { orphan: false });
    // one that was told too often to count is held for good
    t.shard(n).lock().counts.insert(n.0, Count { generation: 3, times: TIMES_MAX - 1 });
    assert!(t.add(n, 3, K) && t.add(n, 3, K));
    assert_eq!(t.give_back(n, is, u64::MAX), GivenBack::StillHeld);
}

#[test]
fn an_end_under_way_is_due_however_long_ago_the_removal_was() {
    let t = LookupCounts::default();
    let n = InodeNo(77);
    assert!(t.add(n, 3, K));
    {
        let mut s = t.shard(n).lock();
        s.counts.get_mut(&n.0).unwrap().times |= ORPHAN;
        (s.orphans, s.left) = (1, Instant::now().checked_sub(Duration::from_secs(9)));
    }
    assert!(!t.due(Duration::from_secs(1)) && t.due(Duration::from_secs(99)), "somebody holds it");
    assert_eq!(t.give_back(n, |g| g == 3, 1), GivenBack::Last { orphan: true });
    assert!(t.due(Duration::ZERO), "its space is about to come back");
    t.reaped(n);
    assert!(!t.due(Duration::from_secs(99)));
    // who found no room before that has to look again
    assert!(t.removed_lately(Duration::from_secs(99)) && !t.removed_lately(Duration::from_secs(1)));
}

#[test]
fn the_table_shrinks() {
    let t = LookupCounts::default();
    let room = || t.shards().iter().map(|s| s.lock().counts.capacity()).sum::<usize>();
    (2..200_000).for_each(|n| assert!(t.add(InodeNo(n), 1, K)));
    assert!((200_000..500_000).contains(&room()), "room for {} of 200,000", room());
    for n in 2..199_000 {
        assert_eq!(t.give_back(InodeNo(n), |g| g == 1, 1), GivenBack::Last { orphan: false });
    }
    assert!(room() < 200_000, "room for {} of 1,000", room());
}

#[test]
fn a_held_file_outlives_its_name() {
    let v = volume();
    let f = make(&v, ROOT, "f", FileKind::File);
    {
        let h = v.open(f.ino).unwrap();
        v.write(&h, 0, b"kept").unwrap();
    }
    assert_eq!(v.lookup_held(ROOT, b"f").unwrap().generation, f.generation);
    v.hold(f.ino, |g| g == f.generation).unwrap();
    assert!(v.hold(f.ino, |g| g != f.generation).is_err());
    v.unlink(ROOT, b"f").unwrap();
    assert_eq!(held(&v), (1, 1));
    v.sync().unwrap();
    let now = v.getattr(f.ino).unwrap();
    assert_eq!((now.nlink, now.size, now.generation), (0, 4, f.generation));
    {
        let h = v.open(f.ino).unwrap();
        let mut buf = [0; 4];
        v.read(&h, 0, &mut buf).unwrap();
        assert_eq!(&buf, b"kept");
        v.forget(f.ino, |g| g == f.generation, 1);
        assert_eq!(held(&v), (1, 1));
        v.setattr(f.ino, &SetAttr { mode: Some(0o600), ..SetAttr::default() }).unwrap();
    }
    assert_eq!(v.getattr(f.ino).unwrap().mode & 0o777, 0o600, "closed, but held");
    v.forget(f.ino, |g| g == f.generation, 1);
    assert!(gone(&v, &f));
    assert_eq!((held(&v), v.held().excess), ((0, 0), 0));
    v.forget(f.ino, |g| g == f.generation, 1);
    assert_eq!(v.held().excess, 1);
}

#[test]
fn an_open_file_outlives_the_last_count() {
    let v = volume();
    let f = make(&v, ROOT, "f", FileKind::File);
    v.hold(f.ino, |_| true).unwrap();
    let h = v.open(f.ino).unwrap();
    v.unlink(ROOT, b"f").unwrap();
    v.forget(f.ino, |_| true, 1);
    assert_eq!(v.getattr(f.ino).unwrap().nlink, 0);
    drop(h);
    assert!(gone(&v, &f));
}

#[test]
fn a_held_directory_is_empty_and_takes_nothing() {
    let v = volume();
    let d = make(&v, ROOT, "d", FileKind::Dir);
    let over = make(&v, ROOT, "over", FileKind::Dir);
    v.lookup_held(ROOT, b"d").unwrap();
    v.lookup_held(ROOT, b"over").unwrap();
    v.rmdir(ROOT, b"d").unwrap();
    make(&v, ROOT, "new", FileKind::Dir);
    v.rename(ROOT, b"new", ROOT, b"over", RenameMode::Replace).unwrap();
    for d in [&d, &over] {
        v.sync().unwrap();
        assert_eq!(v.getattr(d.ino).unwrap().nlink, 0);
        let mut names = 0;
        let mut count = |_: DirEntry<'_>| {
            names += 1;
            true
        };
        v.readdir(d.ino, 0, &mut count).unwrap();
        assert_eq!(names, 0);
        let new = NewNode { kind: FileKind::File, mode: 0o644, umask: 0, rdev: 0, target: &[] };
        assert!(matches!(v.create(d.ino, b"x", &new, &Cred::root()), Err(Error::NotFound)));
        assert!(matches!(v.lookup(d.ino, b"x"), Err(Error::NotFound)));
        assert!(matches!(v.rename(ROOT, b"over", d.ino, b"x", RenameMode::Replace), Err(Error::NotFound)));
        v.forget(d.ino, |_| true, 1);
        assert!(gone(&v, d));
    }
}

#[test]
fn a_listing_counts_what_it_hands_over() {
    let v = volume();
    let files: Vec<Attr> = (0..300).map(|n| make(&v, ROOT, &format!("f{n}"), FileKind::File)).collect();
    let mut left = 200;
    let mut take = |_: DirEntry<'_>, attr: Option<&Attr>| {
        left -= usize::from(attr.is_some() && left > 0);
        left > 0
    };
    v.readdir_held(ROOT, 0, &mut take).unwrap();
    assert_eq!(held(&v), (199, 0), "the entry refused is not counted");
    v.readdir_held(ROOT, 0, &mut |_, _| true).unwrap();
    assert_eq!(held(&v), (300, 0));
    for (n, f) in files.iter().enumerate() {
        v.unlink(ROOT, format!("f{n}").as_bytes()).unwrap();
        assert!(!gone(&v, f));
    }
    assert_eq!(held(&v), (300, 300));
    v.forget_all();
    assert_eq!(held(&v), (0, 0));
    assert!(files.iter().all(|f| gone(&v, f)));
    v.unmount().unwrap();
}

#[test]
fn held_orphans_go_with_the_mount_and_numbers_are_not_given_twice() {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(16384));
    crate::mkfs::format(std::slice::from_ref(&device), &MkfsOptions::default()).unwrap();
    let v = Volume::mount(vec![device.clone()], MountOptions::default()).unwrap();
    let free = v.statfs().inodes_free;
    let f = make(&v, ROOT, "f", FileKind::File);
    let d = make(&v, ROOT, "d", FileKind::Dir);
    v.lookup_held(ROOT, b"f").unwrap();
    v.lookup_held(ROOT, b"d").unwrap();
    v.unlink(ROOT, b"f").unwrap();
    v.rmdir(ROOT, b"d").unwrap();
    v.commit_domain(v.domain_of(f.ino).unwrap(), true).unwrap();
    for n in 0..2000 {
        let made = make(&v, ROOT, &format!("n{n}"), FileKind::File);
        assert!(made.ino != f.ino && made.ino != d.ino, "a number that is held was given again");
        v.unlink(ROOT, format!("n{n}").as_bytes()).unwrap();
        if n % 50 == 0 {
            v.sync().unwrap();
        }
    }
    // nobody gave them back: a crash
    v.sync().unwrap();
    v.crash();
    let v = Volume::mount(vec![device.clone()], MountOptions::default()).unwrap();
    assert!(gone(&v, &f) && gone(&v, &d));
    v.unmount().unwrap();
    let v = Volume::mount(vec![device], MountOptions::default()).unwrap();
    assert_eq!(v.statfs().inodes_free, free);
}

#[test]
fn a_temporary_file_may_get_a_name_while_it_is_held() {
    let v = volume();
    let new = NewNode { kind: FileKind::File, mode: 0o644, umask: 0, rdev: 0, target: &[] };
    let (a, file) = v.tmpfile(ROOT, &new, &Cred::root()).unwrap();
    v.hold(a.ino, |g| g == a.generation).unwrap();
    assert_eq!(held(&v), (1, 1));
    drop(file);
    assert_eq!(v.link(a.ino, ROOT, b"named").unwrap().nlink, 1);
    assert_eq!(held(&v), (1, 0));
    v.forget(a.ino, |_| true, 1);
    assert_eq!(v.lookup(ROOT, b"named").unwrap().ino, a.ino);
    let (b, file) = v.tmpfile(ROOT, &new, &Cred::root()).unwrap();
    drop(file);
    assert!(matches!(v.link(b.ino, ROOT, b"late"), Err(Error::NotFound)));
}

/// Look-ups and their giving back against unlink, rmdir and rename over: a holder never loses its inode, and nothing is
/// left when all is given back.
#[test]
fn look_ups_race_with_removals() {
    let v = volume();
    let dirs: Vec<InodeNo> = (0..3).map(|n| make(&v, ROOT, &format!("dir{n}"), FileKind::Dir).ino).collect();
    let (held_and_removed, turns) = (AtomicUsize::new(0), 4000);
    std::thread::scope(|s| {
        for t in 0..2 {
            let (v, dirs) = (&v, &dirs);
            s.spawn(move || {
                let new = |kind| NewNode { kind, mode: 0o755, umask: 0, rdev: 0, target: &[] };
                for n in 0..turns {
                    let dir = dirs[(n + t) % 3];
                    let kind = if n % 2 == 0 { FileKind::File } else { FileKind::Dir };
                    // the other thread may have been first at each of these
                    let _ = v.create(dir, b"x", &new(kind), &Cred::root());
                    let _ = match n % 5 {
                        0 => v.create(dir, b"y", &new(kind), &Cred::root()).map(drop),
                        1 => v.rename(dir, b"x", dirs[n % 3], b"y", RenameMode::Replace),
                        2 => v.unlink(dir, b"y").or_else(|_| v.rmdir(dir, b"y")),
                        _ => v.unlink(dir, b"x").or_else(|_| v.rmdir(dir, b"x")),
                    };
                }
            });
        }
        for t in 0..2 {
            let (v, dirs, seen) = (&v, &dirs, &held_and_removed);
            s.spawn(move || {
                for n in 0..turns * 2 {
                    let name: &[u8] = if n % 3 == 0 { b"y" } else { b"x" };
                    let Ok(a) = v.lookup_held(dirs[(n + t) % 3], name) else { continue };
                    std::thread::yield_now();
                    let now = v.getattr(a.ino).unwrap_or_else(|e| panic!("held {} is lost: {e}", a.ino));
                    assert_eq!(now.generation, a.generation, "the number of a held inode was given again");
                    seen.fetch_add(usize::from(now.nlink == 0), Ordering::Relaxed);
                    v.forget(a.ino, |g| g == a.generation, 1);
                }
            });
        }
    });
    assert_eq!((held(&v), v.held().excess), ((0, 0), 0));
    for d in dirs {
        let mut names = Vec::new();
        v.readdir(d, 2, &mut |e| {
            names.push(e.name.to_vec());
            true
        })
        .unwrap();
        for name in names {
            v.unlink(d, &name).or_else(|_| v.rmdir(d, &name)).unwrap();
        }
    }
    // one that an inode of the other domain replaced stays until that has committed
    v.sync().unwrap();
    let i = v.mounted();
    i.reap_zombies().unwrap();
    assert!(i.domains.iter().all(|d| d.orphans.is_empty()), "orphans that nobody holds");
    v.unmount().unwrap();
}

/// Each deletion that finds no room looks for some, and so comes by the others: once.
#[test]
fn many_that_cannot_be_deleted_are_tried_once_each() {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(16384));
    crate::mkfs::format(std::slice::from_ref(&device), &MkfsOptions::default()).unwrap();
    let v = Volume::mount(vec![device], MountOptions { background: false, ..MountOptions::default() }).unwrap();
    let i = v.mounted();
    let removed: Vec<Attr> = (0..40)
        .map(|n| {
            let name = format!("f{n}");
            make(&v, ROOT, &name, K);
            let a = v.lookup_held(ROOT, name.as_bytes()).unwrap();
            v.unlink(ROOT, name.as_bytes()).unwrap();
            a
        })
        .collect();
    v.sync().unwrap();
    i.zombies.lock().extend(removed.iter().map(|a| i.cell(a.ino).unwrap()));
    let (d, mut taken) = (&i.domains[0], 0);
    let space = &d.space;
    while space.reserve(1, true).is_ok() || i.claim_group(d).unwrap() && space.reserve(1, true).is_ok() {
        taken += 1;
    }
    assert!(matches!(i.reap_zombies(), Err(Error::NoSpace)));
    assert_eq!(i.zombies.lock().len(), removed.len());
    space.unreserve(taken);
    for a in &removed {
        v.forget(a.ino, |g| g == a.generation, 1);
    }
    i.reap_zombies().unwrap();
    assert!(d.orphans.is_empty() && i.zombies.lock().is_empty());
    v.unmount().unwrap();
}

/// Of one the last handle is closed, of the other the last hold is given back, while there is no room for it.
#[test]
fn what_could_not_be_deleted_at_its_end_is_deleted_later() {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(16384));
    crate::mkfs::format(std::slice::from_ref(&device), &MkfsOptions::default()).unwrap();
    let v = Volume::mount(vec![device], MountOptions { background: false, ..MountOptions::default() }).unwrap();
    let open = v.open(make(&v, ROOT, "open", K).ino).unwrap();
    make(&v, ROOT, "held", K);
    let held = v.lookup_held(ROOT, b"held").unwrap();
    for name in ["open", "held"] {
        v.unlink(ROOT, name.as_bytes()).unwrap();
    }
    v.sync().unwrap();
    let (i, mut taken) = (v.mounted(), 0);
    let (d, space) = (&i.domains[0], &i.domains[0].space);
    while space.reserve(1, true).is_ok() || i.claim_group(d).unwrap() && space.reserve(1, true).is_ok() {
        taken += 1;
    }
    drop(open);
    assert!(v.forget(held.ino, |g| g == held.generation, 1));
    assert_eq!(d.orphans.len(), 2, "there is room, and this test sees nothing");
    i.reap_zombies().unwrap();
    assert_eq!(d.orphans.len(), 2);
    space.unreserve(taken);
    i.reap_zombies().unwrap();
    assert!(d.orphans.is_empty());
    v.sync().unwrap();
    assert!(gone(&v, &held));
    v.unmount().unwrap();
}
