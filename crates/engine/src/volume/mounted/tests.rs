//! Beside a domain that has failed: what the others ask of each other goes on, and what is promised of all is refused.

use crate::cell::Body;
use crate::cell::extents::Runs;
use crate::{
    Cred, Error, FallocMode, FileKind, InodeNo, MkfsOptions, MountOptions, NewNode, QuotaOwner, SetAttr, TenantBudget,
    Volume, mkfs,
};
use braidfs_device::{Device, Effect, FaultDevice, MemDevice, Op, Rule};
use braidfs_format::domain::JournalMode;
use braidfs_format::inode::Extent;
use std::sync::Arc;

const ROOT: InodeNo = InodeNo::ROOT;

fn create(v: &Volume, dir: InodeNo, name: &str, kind: FileKind) -> InodeNo {
    let new = NewNode { kind, mode: 0o755, umask: 0, rdev: 0, target: b"" };
    v.create(dir, name.as_bytes(), &new, &Cred::root()).unwrap().ino
}

/// Two domains, and a directory of the one in which the root is not.
fn volume() -> (Arc<FaultDevice>, Volume, InodeNo) {
    let faults = Arc::new(FaultDevice::new(Arc::new(MemDevice::new(64 << 8)), 1));
    let device: Arc<dyn Device> = faults.clone();
    let how = MkfsOptions { domains: Some(2), group_bytes: Some(4 << 20), ..MkfsOptions::default() };
    mkfs::format(std::slice::from_ref(&device), &how).unwrap();
    let v = Volume::mount(vec![device], MountOptions { background: false, ..MountOptions::default() }).unwrap();
    let dirs: Vec<_> = (0..8).map(|n| create(&v, ROOT, &format!("d{n}"), FileKind::Dir)).collect();
    let other = *dirs.iter().find(|d| v.domain_of(**d).unwrap() != v.domain_of(ROOT).unwrap()).unwrap();
    v.sync().unwrap();
    (faults, v, other)
}

/// [`volume`], with the other domain failed and something in it that never becomes durable.
fn beside_a_failed_one() -> (Volume, InodeNo) {
    let (_faults, v, other) = volume();
    create(&v, other, "lost", FileKind::File);
    v.mounted().domain(other).unwrap().fail(&Error::Io(std::io::Error::other("for the test")));
    (v, other)
}

fn write_all(v: &Volume, name: &str) -> Error {
    let f = v.open(create(v, ROOT, name, FileKind::File)).unwrap();
    let mut at = 0;
    loop {
        match v.write(&f, at, &[1; 1 << 20]) {
            Ok(n) => at += n as u64,
            Err(e) => return e,
        }
    }
}

#[test]
fn who_lacks_room_is_told_so_and_not_what_another_has() {
    let (v, _) = beside_a_failed_one();
    let f = v.open(create(&v, ROOT, "allocated", FileKind::File)).unwrap();
    let e = v.fallocate(&f, FallocMode::Allocate { keep_size: false }, 0, 1 << 40).unwrap_err();
    assert!(matches!(e, Error::NoSpace), "{e}");
    assert!(v.find_room(f.ino(), 1 << 30).unwrap() > 0);
    let e = write_all(&v, "all");
    assert!(matches!(e, Error::NoSpace), "{e}");
    v.unlink(ROOT, b"all").unwrap();
    // what was freed is to be had again
    let g = v.open(create(&v, ROOT, "more", FileKind::File)).unwrap();
    assert_eq!(v.write(&g, 0, &[1; 1 << 20]).unwrap(), 1 << 20);
}

/// It fails while it is asked for what it has freed.
#[test]
fn who_lacks_room_is_not_told_of_one_that_fails_meanwhile() {
    let (faults, v, other) = volume();
    let i = v.mounted();
    create(&v, other, "lost", FileKind::File);
    let failing = i.domain(other).unwrap();
    let (start, blocks) = failing.journal_place();
    faults.add(Rule::new(Op::Write, Effect::Fail(5)).blocks(start..start + blocks));
    let e = write_all(&v, "all");
    assert!(matches!(e, Error::NoSpace), "{e}");
    assert!(failing.failed().is_some(), "nobody asked it: this test sees nothing");
}

#[test]
fn what_was_removed_is_forgotten() {
    let (v, _) = beside_a_failed_one();
    let i = v.mounted();
    let d = i.domain(ROOT).unwrap();
    v.rmdir(ROOT, b"d0").or_else(|_| v.rmdir(ROOT, b"d1")).unwrap();
    i.forget_removed().unwrap();
    assert_eq!((d.quarantined_numbers(), d.space.stats().pending), (0, 0));
}

/// Promises of all domains are not kept by those that work alone.
#[test]
fn who_needs_all_domains_is_refused() {
    let (v, _) = beside_a_failed_one();
    let is_failed = |e: Error| assert!(matches!(e, Error::DomainFailed { .. }), "{e}");
    is_failed(v.sync().unwrap_err());
    is_failed(v.mounted().commit_all().unwrap_err());
}

/// The journal of a failed domain may speak of the tenant.
#[test]
fn no_tenant_comes_to_have_no_journal_beside_a_failed_domain() {
    let (_faults, v, other) = volume();
    let budget = TenantBudget::default();
    v.tenant_create(ROOT, b"t", 0o755, "t", budget, &Cred::root()).unwrap();
    v.mounted().domain(other).unwrap().fail(&Error::Io(std::io::Error::other("for the test")));
    let e = v.tenant_change("t", |b| b.journal = Some(JournalMode::Scratch)).unwrap_err();
    assert!(matches!(e, Error::DomainFailed { .. }), "{e}");
}

#[test]
fn limits_of_users_need_no_failed_domain() {
    let (v, _) = beside_a_failed_one();
    let alice = QuotaOwner::User(1000);
    v.quota_change(alice, |l| l.inodes = Some(3)).unwrap();
    let new = NewNode { kind: FileKind::File, mode: 0o644, umask: 0, rdev: 0, target: b"" };
    for n in 0..3 {
        v.create(ROOT, format!("{n}").as_bytes(), &new, &Cred::user(0, 0)).unwrap();
    }
    assert_eq!(v.quota(alice).unwrap().limits.inodes, Some(3));
}

/// A directory gets no number while there is a domain that may bring back who had it before; one that has a number can
/// have other limits, and lose them.
#[test]
fn limits_of_directories_beside_a_failed_domain() {
    let (_faults, v, other) = volume();
    let i = v.mounted();
    let here = |n: &str| {
        let mut all = (0..).map(|k| create(&v, ROOT, &format!("{n}{k}"), FileKind::Dir));
        all.find(|d| v.domain_of(*d).unwrap() == v.domain_of(ROOT).unwrap()).unwrap()
    };
    let (limited, gone, there) = (here("limited"), here("gone"), create(&v, other, "gone", FileKind::Dir));
    create(&v, limited, "f", FileKind::File);
    let most = |l: &mut crate::QuotaLimits| l.inodes = Some(100);
    let [of_limited, of_gone, of_there] = [limited, gone, there].map(|d| v.quota_directory(d, most).unwrap().owner);
    let name = (0..).map(|k| format!("gone{k}")).find(|n| v.lookup(ROOT, n.as_bytes()).is_ok_and(|a| a.ino == gone));
    v.rmdir(ROOT, name.unwrap().as_bytes()).unwrap();
    v.rmdir(other, b"gone").unwrap();
    i.domain(other).unwrap().fail(&Error::Io(std::io::Error::other("for the test")));

    let e = v.quota_directory(here("new"), most).unwrap_err();
    assert!(matches!(e, Error::DomainFailed { .. }), "{e}");
    v.quota_directory(limited, |l| l.inodes = Some(50)).unwrap();
    assert_eq!(v.quota(of_limited).unwrap().limits.inodes, Some(50));
    let has = |owner| v.limited_quotas().iter().any(|q| q.owner == owner);
    assert!(!has(of_gone), "its directory is gone for good");
    assert!(has(of_there), "a crash brings its directory back");
    v.quota_remove(of_limited).unwrap();
    assert!(!has(of_limited));
    assert_eq!(v.getattr(limited).unwrap().ino, limited);
}

/// A file of the root's domain whose record names, as a forged one may, the block of a file of the domain of `other`.
fn forged(v: &Volume, other: InodeNo) -> (InodeNo, InodeNo) {
    let [forged, theirs] = [(ROOT, "forged"), (other, "theirs")].map(|(dir, name)| {
        let ino = create(v, dir, name, FileKind::File);
        v.write(&v.open(ino).unwrap(), 0, &[7; 4096]).unwrap();
        ino
    });
    v.sync().unwrap();
    let cell = |ino| v.mounted().find(ino).unwrap().unwrap();
    let theirs_lies = match &cell(theirs).state.read().body {
        Body::File(f) => f.map.get(0).unwrap().addr,
        _ => panic!("no file"),
    };
    match &mut cell(forged).state.write().body {
        Body::File(f) => {
            let extent = Extent { lblk: 0, addr: theirs_lies, len: 1, unwritten: false, sums: None };
            // what it had is nobody's from now on
            f.map.insert(extent, &mut Runs::new());
        }
        _ => panic!("no file"),
    }
    assert_ne!(v.domain_of(forged).unwrap(), v.domain_of(theirs).unwrap());
    (forged, theirs)
}

fn has_its_data(v: &Volume, ino: InodeNo) {
    let mut is = [0; 4096];
    assert_eq!(v.read(&v.open(ino).unwrap(), 0, &mut is).unwrap(), 4096);
    assert_eq!(is, [7; 4096]);
}

#[test]
fn a_file_that_names_blocks_of_another_domain_is_not_opened() {
    let (device, v, other) = volume();
    let (forged, theirs) = forged(&v, other);
    v.setattr(forged, &SetAttr { mode: Some(0o600), ..SetAttr::default() }).unwrap();
    v.unmount().unwrap();
    let v = Volume::mount(vec![device], MountOptions { background: false, ..MountOptions::default() }).unwrap();
    let refused = v.open(forged).map(|_| ());
    assert!(matches!(refused, Err(Error::Corrupt(_))), "{refused:?}");
    has_its_data(&v, theirs);
    assert!(v.mounted().domain(theirs).unwrap().failed().is_none(), "it failed with the other one");
}

/// What no mount could replay does not become durable.
#[test]
fn blocks_of_another_domain_are_not_freed() {
    let (device, v, other) = volume();
    let (forged, theirs) = forged(&v, other);
    v.unlink(ROOT, b"forged").unwrap();
    let refused = v.sync();
    assert!(refused.is_err(), "blocks of another domain were freed");
    has_its_data(&v, theirs);
    v.crash();
    let v = Volume::mount(vec![device], MountOptions { background: false, ..MountOptions::default() }).unwrap();
    assert!(v.mounted().domain(forged).unwrap().failed().is_none());
    has_its_data(&v, theirs);
}
