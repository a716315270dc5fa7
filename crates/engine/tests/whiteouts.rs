//! Renames that leave a whiteout (RENAME_WHITEOUT): what it is, whose it is, and that nothing has changed where it cannot be made.

use braidfs::{
    Attr, Cred, DirEntry, DomainId, Error, FileKind, InodeNo, MkfsOptions, MountOptions, NewNode, Placement,
    QuotaLimits, QuotaOwner, RenameMode, SetAttr, Volume, XattrMode, mkfs,
};
use braidfs_check::{FsckOptions, check};
use braidfs_device::{Device, MemDevice};
use std::sync::Arc;
use std::time::Duration;

use RenameMode::{Exchange, NoReplace, NoReplaceWhiteout, Replace, Whiteout};

const ROOT: InodeNo = InodeNo::ROOT;

fn volume(blocks: u64, domains: u16) -> (Arc<dyn Device>, Volume) {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(blocks));
    let how = MkfsOptions { domains: Some(domains), placement: Placement::Dirs, ..MkfsOptions::default() };
    mkfs::format(std::slice::from_ref(&device), &how).unwrap();
    (device.clone(), mount(device))
}

fn mount(device: Arc<dyn Device>) -> Volume {
    let commit_interval = Duration::from_secs(3600);
    Volume::mount(vec![device], MountOptions { background: false, commit_interval, ..MountOptions::default() }).unwrap()
}

fn unmount(device: &Arc<dyn Device>, v: Volume) {
    v.unmount().unwrap();
    let options = FsckOptions { repair: false, force: true };
    let report = check(std::slice::from_ref(device), &options, &braidfs::JournalReplay, &|_, _, _| {}).unwrap();
    assert_eq!(report.findings.iter().map(|f| &f.message).collect::<Vec<_>>(), Vec::<&String>::new());
}

fn make(v: &Volume, dir: InodeNo, name: &[u8], kind: FileKind, cred: &Cred) -> braidfs::Result<Attr> {
    v.create(dir, name, &NewNode { kind, mode: 0o755, umask: 0, rdev: 0, target: b"" }, cred)
}

fn made(v: &Volume, dir: InodeNo, name: &[u8], kind: FileKind) -> InodeNo {
    make(v, dir, name, kind, &Cred::root()).unwrap().ino
}

/// Names of a directory with their kinds.
fn list(v: &Volume, dir: InodeNo) -> Vec<(String, FileKind)> {
    let mut all = Vec::new();
    let mut note = |e: DirEntry<'_>| {
        if e.name != b"." && e.name != b".." {
            all.push((String::from_utf8_lossy(e.name).into_owned(), e.kind));
        }
        true
    };
    v.readdir(dir, 0, &mut note).unwrap();
    all.sort_by(|x, y| x.0.cmp(&y.0));
    all
}

fn is_whiteout(a: &Attr, domain: Option<DomainId>, v: &Volume) -> bool {
    let apart = domain.is_none_or(|d| v.domain_of(a.ino).unwrap() == d);
    (a.kind(), a.mode & 0o7777, a.rdev, a.nlink) == (FileKind::Char, 0, 0, 1) && apart
}

/// Two directories of two domains, of which each has a file.
fn two(v: &Volume) -> [InodeNo; 2] {
    let a = made(v, ROOT, b"a", FileKind::Dir);
    let b = (0..).map(|n| made(v, ROOT, format!("b{n}").as_bytes(), FileKind::Dir));
    let b = { b }.find(|b| v.domain_of(*b).unwrap() != v.domain_of(a).unwrap()).unwrap();
    [a, b]
}

#[test]
fn a_whiteout_lies_in_the_domain_of_what_has_moved() {
    let (device, v) = volume(16384, 2);
    let [a, b] = two(&v);
    let f = made(&v, a, b"f", FileKind::File);
    let (here, there) = (v.domain_of(a).unwrap(), v.domain_of(b).unwrap());
    assert_eq!(v.domain_of(f).unwrap(), here);
    v.rename(a, b"f", b, b"f", Whiteout).unwrap();
    assert_eq!(v.lookup(b, b"f").unwrap().ino, f);
    assert!(is_whiteout(&v.lookup(a, b"f").unwrap(), Some(here), &v));
    // from a directory of another domain, over a file, over a whiteout
    v.rename(b, b"f", b, b"g", NoReplaceWhiteout).unwrap();
    assert!(is_whiteout(&v.lookup(b, b"f").unwrap(), Some(here), &v));
    made(&v, b, b"over", FileKind::File);
    v.rename(b, b"g", b, b"over", Whiteout).unwrap();
    v.rename(b, b"over", a, b"f", Whiteout).unwrap();
    let chars = |names: &[&str]| names.iter().map(|n| ((*n).to_owned(), FileKind::Char)).collect::<Vec<_>>();
    assert_eq!(list(&v, b), chars(&["f", "g", "over"]));
    assert_eq!(list(&v, a), [("f".to_owned(), FileKind::File)]);
    // directories: what counts subdirectories follows
    let d = made(&v, a, b"d", FileKind::Dir);
    made(&v, d, b"below", FileKind::File);
    let links = |dir| v.getattr(dir).unwrap().nlink;
    v.rename(a, b"d", b, b"d", Whiteout).unwrap();
    assert_eq!((links(a), links(b), list(&v, d).len()), (2, 3, 1));
    assert!(is_whiteout(&v.lookup(a, b"d").unwrap(), Some(v.domain_of(d).unwrap()), &v));
    assert_ne!(here, there);
    let trees = [list(&v, a), list(&v, b)];
    unmount(&device, v);
    let v = mount(device.clone());
    assert_eq!([list(&v, a), list(&v, b)], trees);
    // a whiteout is an inode as others: it is moved, linked, exchanged, replaced, removed
    v.rename(b, b"f", a, b"moved", Whiteout).unwrap();
    v.link(v.lookup(a, b"moved").unwrap().ino, b, b"linked").unwrap();
    v.rename(a, b"moved", b, b"g", Exchange).unwrap();
    v.rename(a, b"f", a, b"d", Replace).unwrap();
    assert_eq!(v.lookup(a, b"d").unwrap().ino, f);
    for name in ["f", "g", "over", "linked"] {
        v.unlink(b, name.as_bytes()).unwrap();
    }
    assert_eq!(list(&v, b), [("d".to_owned(), FileKind::Dir)]);
    unmount(&device, v);
}

#[test]
fn what_is_refused_leaves_nothing() {
    let (device, v) = volume(16384, 2);
    let [a, b] = two(&v);
    let (f, d) = (made(&v, a, b"f", FileKind::File), made(&v, a, b"d", FileKind::Dir));
    made(&v, b, b"over", FileKind::File);
    let full = made(&v, b, b"full", FileKind::Dir);
    made(&v, full, b"in", FileKind::File);
    v.link(f, b, b"second").unwrap();
    let free = |v: &Volume| {
        v.sync().unwrap();
        v.statfs().inodes_free
    };
    let before = (free(&v), list(&v, a), list(&v, b));
    let refused = |from: &[u8], to_dir, to: &[u8], mode, errno: i32| {
        let e = v.rename(a, from, to_dir, to, mode).unwrap_err();
        assert_eq!(e.errno(), errno, "{}: {e}", String::from_utf8_lossy(to));
    };
    refused(b"f", b, b"over", NoReplaceWhiteout, libc::EEXIST);
    refused(b"f", b, b"full", Whiteout, libc::EISDIR);
    refused(b"d", b, b"over", Whiteout, libc::ENOTDIR);
    refused(b"d", b, b"full", Whiteout, libc::ENOTEMPTY);
    refused(b"d", d, b"x", Whiteout, libc::EINVAL);
    refused(b"none", b, b"x", Whiteout, libc::ENOENT);
    refused(b"f", b, &[b'n'; 256], Whiteout, libc::ENAMETOOLONG);
    // both are names of one file: nothing to do
    v.rename(a, b"f", b, b"second", Whiteout).unwrap();
    v.rename(a, b"f", a, b"f", Whiteout).unwrap();
    assert_eq!((free(&v), list(&v, a), list(&v, b)), before);
    unmount(&device, v);
}

/// Owner and group as of any new inode: also what a directory hands down.
#[test]
fn a_whiteout_is_of_who_renames() {
    let (device, v) = volume(16384, 2);
    let d = v
        .create(
            ROOT,
            b"d",
            &NewNode { kind: FileKind::Dir, mode: 0o2777, umask: 0, rdev: 0, target: b"" },
            &Cred::user(1, 77),
        )
        .unwrap()
        .ino;
    // entries of the owner, a user, the group, the mask, and others
    let entry =
        |tag: u16, perm: u16, id: u32| [&tag.to_le_bytes()[..], &perm.to_le_bytes(), &id.to_le_bytes()].concat();
    let none = u32::MAX;
    let acl = [
        2u32.to_le_bytes().to_vec(),
        entry(1, 7, none),
        entry(2, 7, 1000),
        entry(4, 5, none),
        entry(16, 7, none),
        entry(32, 5, none),
    ]
    .concat();
    v.setxattr(d, b"system.posix_acl_default", &acl, XattrMode::Set).unwrap();
    make(&v, d, b"f", FileKind::File, &Cred::root()).unwrap();
    v.rename_by(d, b"f", ROOT, b"f", Whiteout, &Cred::user(1000, 1000)).unwrap();
    let left = v.lookup(d, b"f").unwrap();
    assert!(is_whiteout(&left, None, &v));
    assert_eq!((left.uid, left.gid), (1000, 77));
    v.rename_by(ROOT, b"f", ROOT, b"g", NoReplaceWhiteout, &Cred::user(1000, 1001)).unwrap();
    let left = v.lookup(ROOT, b"f").unwrap();
    assert_eq!((left.uid, left.gid), (1000, 1001));
    // by path it takes what any rename takes
    let user = Cred::user(2, 2);
    assert!(matches!(v.rename_path(b"d/f", b"d/x", Whiteout, &user), Ok(())));
    assert!(matches!(v.rename_path(b"g", b"d/x2", Whiteout, &user), Err(Error::Access)));
    assert_eq!(v.lookup(d, b"f").unwrap().uid, 2);
    unmount(&device, v);
}

#[test]
fn an_owner_at_the_limit_leaves_no_whiteout() {
    let (device, v) = volume(16384, 2);
    let [a, b] = two(&v);
    let cred = Cred::user(1000, 1000);
    let alice = QuotaOwner::User(1000);
    let limit = |n: u64| v.quota_change(alice, |l: &mut QuotaLimits| l.inodes = Some(n)).unwrap();
    make(&v, a, b"f", FileKind::File, &cred).unwrap();
    make(&v, b, b"over", FileKind::File, &cred).unwrap();
    limit(2);
    let used = || v.quota(alice).unwrap().inodes;
    for (name, mode) in [(b"free", NoReplaceWhiteout), (b"over", Whiteout)] {
        let e = v.rename_by(a, b"f", b, name, mode, &cred).unwrap_err();
        assert!(matches!(e, Error::Quota(_)), "{e}");
        assert_eq!((list(&v, a).len(), list(&v, b).len(), used()), (1, 1, 2));
        assert_eq!(v.lookup(a, b"f").unwrap().kind(), FileKind::File);
    }
    // whoever pays for it may be another user
    v.rename_by(a, b"f", b, b"free", Whiteout, &Cred::user(1001, 1001)).unwrap();
    assert_eq!((used(), v.quota(QuotaOwner::User(1001)).unwrap().inodes), (2, 1));
    limit(4);
    make(&v, a, b"near", FileKind::File, &cred).unwrap();
    v.rename_by(b, b"free", a, b"near", Whiteout, &cred).unwrap();
    v.sync().unwrap();
    assert_eq!(used(), 3, "one of the same domain was replaced, and a whiteout made");
    assert_eq!(v.quota_drift().unwrap(), []);
    unmount(&device, v);
}

/// With only the moved inode's domain committed before the crash there are both or none, also where a directory is new.
#[test]
fn new_directories_lose_neither_half() {
    for (from_new, to_new) in [(true, false), (false, true), (true, true)] {
        let (device, v) = volume(16384, 2);
        let [a, b] = two(&v);
        v.sync().unwrap();
        let (here, there) = (v.domain_of(a).unwrap(), v.domain_of(b).unwrap());
        let mut new = (0..8).map(|n| made(&v, b, format!("new{n}").as_bytes(), FileKind::Dir));
        let mut new = || new.find(|d| v.domain_of(*d).unwrap() == there).unwrap();
        let from = if from_new { new() } else { a };
        let to = if to_new { new() } else { a };
        let f = made(&v, a, b"f", FileKind::File);
        if from_new {
            v.rename(a, b"f", from, b"f", NoReplace).unwrap();
        }
        v.rename(from, b"f", to, b"g", Whiteout).unwrap();
        v.commit_domain(here, false).unwrap();
        v.crash();
        let v = mount(device.clone());
        let found = |dir, name: &[u8]| v.lookup(dir, name).map(|a| (a.kind(), a.ino)).ok();
        let hidden = found(from, b"f").is_some_and(|(kind, _)| kind == FileKind::Char);
        assert_eq!(hidden, found(to, b"g") == Some((FileKind::File, f)), "{from_new} {to_new}");
        unmount(&device, v);
    }
}

/// Until nothing is free: each rename is done whole or not at all, and no domain fails.
#[test]
fn a_full_volume_leaves_no_half() {
    let (device, v) = volume(16384, 2);
    let [a, b] = two(&v);
    let large = v.open(made(&v, a, b"large", FileKind::File)).unwrap();
    let other = v.open(made(&v, b, b"large", FileKind::File)).unwrap();
    const FILES: usize = 300;
    for n in 0..FILES {
        made(&v, a, format!("f{n:03}-{}", "x".repeat(200)).as_bytes(), FileKind::File);
    }
    v.sync().unwrap();
    for f in [&large, &other] {
        while v.append(f, &[7; 1 << 20]).is_ok() {}
        while v.append(f, &[7; 4096]).is_ok() {}
    }
    let (mut done, mut refused) = (0, 0);
    // what is left goes, too
    for n in 0..100_000 {
        if make(&v, b, format!("e{n}").as_bytes(), FileKind::File, &Cred::root()).is_err() {
            break;
        }
    }
    for n in 0..FILES {
        let name = format!("f{n:03}-{}", "x".repeat(200));
        let before = v.lookup(a, name.as_bytes()).unwrap();
        let moved = v.rename(a, name.as_bytes(), b, name.as_bytes(), NoReplaceWhiteout);
        let (old, new) = (v.lookup(a, name.as_bytes()).unwrap(), v.lookup(b, name.as_bytes()));
        match moved {
            Ok(()) => {
                assert!(is_whiteout(&old, None, &v) && new.unwrap().ino == before.ino);
                done += 1;
            }
            Err(e) => {
                assert!(matches!(e, Error::NoSpace), "{e}");
                assert!(old.ino == before.ino && matches!(new, Err(Error::NotFound)));
                refused += 1;
                // block by block, so that each step of a rename is once the first that finds none
                for f in [&large, &other] {
                    let shorter = v.getattr(f.ino()).unwrap().size - 4096;
                    v.setattr(f.ino(), &SetAttr { size: Some(shorter), ..SetAttr::default() }).unwrap();
                }
                v.sync().unwrap();
            }
        }
    }
    println!("{done} done, {refused} refused");
    assert!(refused > 10 && done > 10, "{done} done, {refused} refused: this test does not see the border");
    v.sync().unwrap();
    assert!(v.domains().iter().all(|d| d.failed.is_none()));
    // what is removed makes room
    drop((large, other));
    v.unlink(a, b"large").unwrap();
    v.unlink(b, b"large").unwrap();
    v.sync().unwrap();
    for (name, kind) in list(&v, a) {
        if kind == FileKind::File {
            v.rename(a, name.as_bytes(), b, name.as_bytes(), Whiteout).unwrap();
        }
    }
    assert!(list(&v, a).iter().all(|(_, kind)| *kind == FileKind::Char));
    unmount(&device, v);
}

#[test]
fn a_directory_that_several_threads_change_takes_whiteouts() {
    let (device, v) = volume(32768, 2);
    let v = Arc::new(v);
    let [a, b] = two(&v);
    let threads: Vec<_> = (0..4)
        .map(|t| {
            let v = v.clone();
            std::thread::spawn(move || {
                for n in 0..400 {
                    let (old, new) = (format!("{t}-{n}"), format!("{t}-{n}-moved"));
                    let f = make(&v, a, old.as_bytes(), FileKind::File, &Cred::root()).unwrap();
                    let mode = if n % 2 == 0 { Whiteout } else { NoReplace };
                    v.rename(a, old.as_bytes(), if n % 3 == 0 { a } else { b }, new.as_bytes(), mode).unwrap();
                    let left = v.lookup(a, old.as_bytes());
                    assert_eq!(left.is_ok_and(|l| is_whiteout(&l, None, &v)), n % 2 == 0);
                    let at = if n % 3 == 0 { a } else { b };
                    assert_eq!(v.lookup(at, new.as_bytes()).unwrap().ino, f.ino);
                    if n % 4 == 0 {
                        v.unlink(a, old.as_bytes()).unwrap();
                    }
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|t| t.join().unwrap());
    let count = |dir, kind| list(&v, dir).iter().filter(|(_, k)| *k == kind).count();
    assert_eq!(count(a, FileKind::Char), 4 * 100);
    assert_eq!(count(a, FileKind::File) + count(b, FileKind::File), 4 * 400);
    unmount(&device, Arc::into_inner(v).unwrap());
}
