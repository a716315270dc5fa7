//! Names that cross domains, one of which fails: what it did not make durable the next mount takes back, so nobody builds on it.

use super::*;
use braidfs::{FallocMode, RenameMode};
use braidfs_testkit::walk::repair;

/// A new file of `domain` in `dir`, with content, and its name.
pub(super) fn named(v: &Volume, dir: InodeNo, domain: u16, name: &str) -> (InodeNo, Vec<u8>) {
    let f = new_in(v, dir, domain, name);
    let mut names = (0..64).map(|i| format!("{name} {i}").into_bytes());
    let name = names.find(|n| v.lookup(dir, n).is_ok_and(|a| a.ino == f.ino())).unwrap();
    (f.ino(), name)
}

fn is_refused<T>(r: braidfs::Result<T>) -> bool {
    matches!(r, Err(Error::DomainFailed { .. }))
}

/// Domain 1 fails; its device is well again afterwards.
pub(super) fn fail(two: &Two, v: &Volume) {
    two.faulty[1].add(Rule::new(Op::Write, Effect::Fail(EIO)));
    assert!(v.sync().is_err());
    two.faulty[1].clear();
    let failed: Vec<bool> = v.domains().iter().map(|d| d.failed.is_some()).collect();
    assert_eq!(failed, [false, true]);
}

/// A log is rotated, which is not durable: the file comes back under its name, which nobody has taken meanwhile.
#[test]
fn a_name_that_a_failed_domain_left_is_not_taken() {
    for how in ["create", "rename", "link"] {
        let two = Two::new();
        let v = two.mount();
        let home = homes(&v)[&0].0;
        let (log, name) = named(&v, home, 1, "log");
        let (other, other_name) = named(&v, home, 0, "other");
        v.sync().unwrap();
        v.rename(home, &name, home, b"log.1", RenameMode::Replace).unwrap();
        fail(&two, &v);
        let taken = match how {
            "create" => make(&v, home, std::str::from_utf8(&name).unwrap(), FileKind::File).map(drop),
            "rename" => v.rename(home, &other_name, home, &name, RenameMode::Replace),
            _ => v.link(other, home, &name).map(drop),
        };
        let _ = v.sync();
        v.crash();
        let healthy = two.healthy();
        let v = Volume::mount(healthy.clone(), options()).unwrap();
        assert_eq!(content(&v, log).unwrap(), fill(1, 0, 9000), "{how}");
        assert_eq!(v.lookup(home, &name).unwrap().ino, log, "{how}");
        assert!(is_refused(taken), "{how}");
        goes_on(v, other, &healthy, how);
    }
}

/// A directory from which an inode of the failed domain has gone does not end.
#[test]
fn a_directory_that_a_failed_domain_left_stays() {
    let two = Two::new();
    let v = two.mount();
    let home = homes(&v)[&0].0;
    let dir = (0..64).map(|i| make(&v, home, &format!("dir {i}"), FileKind::Dir).unwrap());
    let (i, dir) = (0..).zip(dir).find(|(_, d)| v.domain_of(*d).unwrap() == DomainId(0)).unwrap();
    let (f, name) = named(&v, dir, 1, "f");
    v.sync().unwrap();
    v.rename(dir, &name, home, b"f", RenameMode::Replace).unwrap();
    (0..64).for_each(|i| drop(v.unlink(dir, format!("f {i}").as_bytes())));
    fail(&two, &v);
    let ended = v.rmdir(home, format!("dir {i}").as_bytes());
    let _ = v.sync();
    v.crash();
    let v = Volume::mount(two.healthy(), options()).unwrap();
    assert_eq!(v.lookup(dir, &name).unwrap().ino, f);
    assert!(is_refused(ended));
}

/// What was to be replaced is there: also when the hint of that is behind a checkpoint.
#[test]
fn what_a_failed_domain_was_to_replace_stays() {
    let two = Two::new();
    let v = two.mount();
    let homes = homes(&v);
    let (here, there) = (homes[&0].0, homes[&1].0);
    let (old, old_name) = named(&v, here, 0, "old");
    let (new, new_name) = named(&v, there, 1, "new");
    v.sync().unwrap();
    v.rename(there, &new_name, here, &old_name, RenameMode::Replace).unwrap();
    fail(&two, &v);
    v.write(&homes[&0].1, 0, b"one transaction more").unwrap();
    let _ = v.sync();
    drop(homes);
    assert!(v.unmount().is_err(), "the unmount hides it");
    let healthy = two.healthy();
    let v = Volume::mount(healthy.clone(), options()).unwrap();
    assert_eq!(v.lookup(here, &old_name).unwrap().ino, old);
    assert_eq!(v.lookup(there, &new_name).unwrap().ino, new);
    assert_eq!(content(&v, old).unwrap(), fill(1, 0, 9000));
    goes_on(v, old, &healthy, "replaced");
}

/// The domain that fails has moved a directory last: directories of others go on to move, but not to below that one, which is
/// elsewhere after the next mount.
#[test]
fn directories_move_beside_a_failed_domain() {
    let two = Two::new();
    let v = two.mount();
    let root = InodeNo::ROOT;
    let [a, b, c] = ["a", "b", "c"].map(|name| dir_of(&v, root, 0, name));
    let moved = dir_of(&v, a.0, 1, "moved");
    let below = dir_of(&v, moved.0, 0, "below");
    let file = named(&v, b.0, 0, "file").0;
    v.sync().unwrap();
    v.rename(a.0, &moved.1, b.0, b"moved", RenameMode::Replace).unwrap();
    fail(&two, &v);
    let to = |of: &(InodeNo, Vec<u8>), dir| v.rename(root, &of.1, dir, b"here", RenameMode::Replace);
    // the moved one comes back into `a`, which would be below it
    let refused = [is_refused(to(&a, moved.0)), is_refused(to(&a, below.0))];
    // and so after each move of another domain
    to(&a, c.0).unwrap();
    to(&c, b.0).unwrap();
    let later = is_refused(v.rename(c.0, b"here", below.0, b"here", RenameMode::Replace));
    let _ = v.sync();
    v.crash();
    let healthy = two.healthy();
    let v = Volume::mount(healthy.clone(), options()).unwrap();
    let path: [&[u8]; 4] = [&b.1, b"here", b"here", &moved.1];
    assert_eq!(path.iter().fold(root, |at, name| v.lookup(at, name).unwrap().ino), moved.0);
    assert_eq!((refused, later), ([true; 2], true));
    goes_on(v, file, &healthy, "moved");
}

/// A new directory of `domain`, and its name.
pub(super) fn dir_of(v: &Volume, parent: InodeNo, domain: u16, name: &str) -> (InodeNo, Vec<u8>) {
    let mut all =
        (0..64).map(|i| format!("{name} {i}")).map(|n| (make(v, parent, &n, FileKind::Dir).unwrap(), n.into_bytes()));
    all.find(|d| v.domain_of(d.0).unwrap() == DomainId(domain)).unwrap()
}

/// A durable file does not go below a directory that the failed domain has made, and takes back: by a rename, a link, an exchange;
/// with a directory of the sound domain between, too.
#[test]
fn a_file_stays_away_from_a_directory_that_is_taken_back() {
    for how in ["rename", "link", "exchange"] {
        let two = Two::new();
        let v = two.mount();
        let home = homes(&v)[&0].0;
        let (old, name) = named(&v, home, 0, "old");
        v.sync().unwrap();
        let new = dir_of(&v, InodeNo::ROOT, 1, "new");
        let between = dir_of(&v, new.0, 0, "between");
        let other = named(&v, between.0, 0, "other").1;
        fail(&two, &v);
        let moved = match how {
            "rename" => v.rename(home, &name, between.0, b"here", RenameMode::Replace),
            "link" => v.link(old, between.0, b"here").map(drop).and_then(|()| v.unlink(home, &name)),
            _ => v.rename(home, &name, between.0, &other, RenameMode::Exchange),
        };
        let _ = v.sync();
        v.crash();
        let healthy = two.healthy();
        let v = Volume::mount(healthy.clone(), options()).unwrap();
        assert_eq!(content(&v, old).unwrap(), fill(1, 0, 9000), "{how}");
        assert_eq!(v.lookup(home, &name).unwrap().ino, old, "{how}");
        assert!(is_refused(moved), "{how}");
        goes_on(v, old, &healthy, how);
    }
}

/// What the failed domain takes back is not in any journal any more when the others are checkpointed: the next mount compares all
/// links across domains, and a check before it does, too.
#[test]
fn links_are_compared_behind_a_checkpoint_that_passed_a_failure() {
    for (ends, first) in [("crash", "mount"), ("unmount", "mount"), ("unmount", "check")] {
        let two = Two::new();
        let v = two.mount();
        let homes = homes(&v);
        let (here, there) = (homes[&0].0, homes[&1].0);
        let left = named(&v, here, 1, "left");
        v.sync().unwrap();
        // an entry in a directory of the domain that will fail, whose directory is durable: this is synced
        let inside = dir_of(&v, there, 0, "inside");
        let synced = named(&v, inside.0, 0, "synced");
        v.fsync(synced.0, false).unwrap();
        // a tree of which every other directory is taken back; a file of that domain that leaves a directory
        let new = dir_of(&v, InodeNo::ROOT, 1, "new");
        let below = dir_of(&v, new.0, 0, "below");
        let lost = named(&v, below.0, 0, "lost").0;
        v.rename(here, &left.1, here, b"moved", RenameMode::Replace).unwrap();
        fail(&two, &v);
        // the other one's journal tells of none of that any more
        v.commit_domain(DomainId(0), true).unwrap();
        v.write(&homes[&0].1, 0, b"one transaction more").unwrap();
        drop(homes);
        match ends {
            "crash" => v.crash(),
            _ => drop(v.unmount()),
        }
        let healthy = two.healthy();
        if first == "check" {
            repair(&healthy).unwrap();
        }
        let v = Volume::mount(healthy.clone(), options()).unwrap();
        let named = |dir, name: &[u8]| v.lookup(dir, name).map(|a| a.ino).ok();
        let what = format!("{ends}, then {first}");
        assert_eq!(named(there, &inside.1), Some(inside.0), "{what}");
        assert_eq!(named(inside.0, &synced.1), Some(synced.0), "{what}");
        assert_eq!(named(here, &left.1), Some(left.0), "{what}");
        assert_eq!(named(here, b"moved"), None, "{what}");
        assert!(v.getattr(below.0).is_err() && v.getattr(lost).is_err(), "{what}");
        goes_on(v, synced.0, &healthy, &what);
    }
}

/// What decides about names of the sound domain's inodes is taken back, behind a checkpoint: an exchange is completed, and a name beside
/// another one comes back.
#[test]
fn what_is_judged_behind_a_checkpoint_that_passed_a_failure() {
    let two = Two::new();
    let v = two.mount();
    let here = homes(&v)[&0].0;
    let (x, y) = (named(&v, here, 0, "x"), named(&v, here, 1, "y"));
    let (many, taker) = (named(&v, here, 0, "many"), named(&v, here, 1, "taker"));
    v.link(many.0, here, b"other").unwrap();
    v.sync().unwrap();
    v.rename(here, &x.1, here, &y.1, RenameMode::Exchange).unwrap();
    v.rename(here, &taker.1, here, b"other", RenameMode::Replace).unwrap();
    fail(&two, &v);
    v.commit_domain(DomainId(0), true).unwrap();
    v.crash();
    let healthy = two.healthy();
    let v = Volume::mount(healthy.clone(), options()).unwrap();
    let named = |name: &[u8]| v.lookup(here, name).map(|a| a.ino).ok();
    let exchanged = [named(&x.1), named(&y.1)];
    assert!([[x.0, y.0], [y.0, x.0]].map(|all| all.map(Some)).contains(&exchanged), "{exchanged:?}");
    assert_eq!([named(&many.1), named(b"other"), named(&taker.1)], [many.0, many.0, taker.0].map(Some));
    goes_on(v, x.0, &healthy, "judged");
}

/// A removed directory's number is nobody else's as long as a file may come back in it that the failed domain had removed.
#[test]
fn the_number_of_a_directory_that_a_failed_domain_had_a_file_in_is_kept() {
    let two = Two::new();
    let v = two.mount();
    let homes = homes(&v);
    let (home, other) = (homes[&0].0, homes[&0].1.ino());
    drop(homes);
    let gone = dir_of(&v, home, 0, "gone");
    let file = named(&v, gone.0, 1, "file");
    v.sync().unwrap();
    for i in 0..64 {
        drop(v.unlink(gone.0, format!("file {i}").as_bytes()));
    }
    v.rmdir(home, &gone.1).unwrap();
    fail(&two, &v);
    for n in 0..3 {
        v.commit_domain(DomainId(0), true).unwrap();
        let new = dir_of(&v, home, 0, &format!("new {n}"));
        assert_ne!(new.0, gone.0, "given out after {n} checkpoints");
    }
    // of directories that the failed domain never knew the numbers come back
    let free = || v.domains()[0].inodes_free;
    let before = free();
    for n in 0..40 {
        let name = format!("short {n}");
        match make(&v, home, &name, FileKind::Dir) {
            Ok(_) => v.rmdir(home, name.as_bytes()).unwrap(),
            Err(e) => assert!(is_refused::<()>(Err(e))),
        }
        v.commit_domain(DomainId(0), true).unwrap();
    }
    assert!(before < free() + 4, "{before} free inodes, now {}", free());
    v.crash();
    let healthy = two.healthy();
    let v = Volume::mount(healthy.clone(), options()).unwrap();
    assert!(v.getattr(file.0).is_err(), "its directory is gone");
    goes_on(v, other, &healthy, "kept");
}

/// What an fsync of a file needs of the failed domain is nothing, though they had operations in common.
#[test]
fn a_sound_file_is_synced_by_a_commit() {
    let two = Two::new();
    let v = two.mount();
    let homes = homes(&v);
    let sound = v.open(named(&v, homes[&0].0, 0, "sound").0).unwrap();
    v.sync().unwrap();
    drop(named(&v, homes[&1].0, 0, "between"));
    fail(&two, &v);
    v.fallocate(&sound, FallocMode::CollapseRange, 0, 4096).unwrap();
    v.fsync(sound.ino(), false).unwrap();
}

/// An inode with many names lost one to a file of a domain that has failed since. What it loses to others is refused, as long as
/// nobody knows who has the first: each such name would stay in its record, until that could not be written.
#[test]
fn names_lost_to_a_failed_domain_do_not_fail_another() {
    let inner = [0, 1, 2].map(|_| Arc::new(MemDevice::soiled(8192)));
    let faulty = [0, 1, 2].map(|i: usize| Arc::new(FaultDevice::new(inner[i].clone(), 7)));
    let devices = devices_of(&faulty);
    let o = MkfsOptions { domains: Some(3), placement: Placement::Spread, ..MkfsOptions::default() };
    mkfs::format(&devices, &o).unwrap();
    let v = Volume::mount(devices, options()).unwrap();
    let root = InodeNo::ROOT;
    let file = |domain, name: &str| named(&v, root, domain, name).1;
    let ino = named(&v, root, 0, "many").0;
    let long = |i: u32| format!("{i:0255}").into_bytes();
    for i in 0..20 {
        v.link(ino, root, &long(i)).unwrap();
    }
    let taker = file(2, "taker");
    let others: Vec<_> = (0..15).map(|i| file(1, &format!("other {i}"))).collect();
    v.sync().unwrap();
    v.rename(root, &taker, root, &long(0), RenameMode::Replace).unwrap();
    faulty[2].add(Rule::new(Op::Write, Effect::Fail(EIO)));
    assert!(v.sync().is_err());
    for (i, name) in (1..).zip(&others) {
        match v.rename(root, name, root, &long(i), RenameMode::Replace) {
            Ok(()) | Err(Error::DomainFailed { domain: DomainId(2), .. }) => {}
            Err(e) => panic!("rename {i}: {e}"),
        }
    }
    for d in [0, 1] {
        v.commit_domain(DomainId(d), false).unwrap();
    }
    let failed: Vec<bool> = v.domains().iter().map(|d| d.failed.is_some()).collect();
    assert_eq!(failed, [false, false, true]);
    // recovery gives it its name back by its record of now
    assert!(is_refused(v.unlink(root, &long(19))));
    v.crash();
    let healthy = copies_of(&inner);
    repair(&healthy).unwrap();
    let v = Volume::mount(healthy.clone(), options()).unwrap();
    assert_eq!(v.lookup(root, &long(0)).unwrap().ino, ino, "who took it had it in no durable transaction");
    v.rename(root, &others[0], root, &long(1), RenameMode::Replace).unwrap();
    v.unmount().unwrap();
    fsck(&healthy).unwrap();
}
