//! Groups that leave a domain which needs the numbers in them.

use crate::{
    Cred, Error, FallocMode, FileKind, InodeNo, MkfsOptions, MountOptions, NewNode, NewSize, OpenHow, Volume,
    XattrMode, mkfs,
};
use braidfs_device::{BLOCK_BYTES, Device, MemDevice};
use std::sync::Arc;

/// A domain whose first group has no number left but those of the reserve, while its second one holds nothing; and files in the
/// first one.
fn a_group_full_of_numbers() -> (Volume, Vec<InodeNo>) {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 8));
    let how = MkfsOptions { domains: Some(1), group_bytes: Some(4 << 20), ..MkfsOptions::default() };
    mkfs::format(std::slice::from_ref(&device), &how).unwrap();
    let v = Volume::mount(vec![device], MountOptions { background: false, ..MountOptions::default() }).unwrap();
    let new = NewNode { kind: FileKind::File, mode: 0o644, umask: 0, rdev: 0, target: b"" };
    let mut files = Vec::new();
    let last = loop {
        let name = format!("{}", files.len());
        let ino = v.create(InodeNo::ROOT, name.as_bytes(), &new, &Cred::root()).unwrap().ino;
        if v.domains()[0].groups > 1 {
            break name;
        }
        files.push(ino);
    };
    v.sync().unwrap();
    v.unlink(InodeNo::ROOT, last.as_bytes()).unwrap();
    v.sync().unwrap();
    (v, files)
}

/// Long attributes for many files, as far as there is room for them.
fn set_attributes(v: &Volume, files: &[InodeNo]) -> usize {
    let set = |ino: &&InodeNo| match v.setxattr(**ino, b"user.long", &[7; 8 << 10], XattrMode::Set) {
        Ok(()) => true,
        Err(Error::NoSpace) => false,
        Err(e) => panic!("{e}"),
    };
    files.iter().take(200).filter(set).count()
}

/// While a volume becomes smaller, no number behind its end is given out: who would need one in a commit is refused before.
#[test]
fn numbers_behind_the_end_are_promised_to_nobody() {
    let (v, files) = a_group_full_of_numbers();
    let sb = v.super_block();
    let bytes = (sb.device_table()[0].data_start.get() + 1024 + 1) * BLOCK_BYTES as u64;
    let set = std::cell::Cell::new(None);
    let told = |_, all| {
        assert_eq!(all, 1, "there is one group behind the end");
        if set.get().is_none() {
            set.set(Some(set_attributes(&v, &files)));
            v.sync().unwrap();
        }
    };
    v.shrink(bytes, &told).unwrap();
    assert_eq!(v.domains()[0].failed, None);
    assert!(set.get().is_some_and(|n| n < 200), "{set:?}");
    v.sync().unwrap();
    v.unmount().unwrap();
}

/// Numbers of a group that holds nothing may have been promised to operations whose commit is to come: then the group stays.
#[test]
fn a_group_with_promised_numbers_is_not_given_back() {
    let (v, files) = a_group_full_of_numbers();
    let (i, d) = (v.mounted(), v.mounted().dom(crate::DomainId(0)));
    assert!(d.space.empty_groups().iter().any(|(g, _)| *g == 1), "{:?}", d.space.empty_groups());
    assert_eq!(set_attributes(&v, &files), 200);
    let mut gave = false;
    d.give_up_groups(&[1], |groups| {
        gave = true;
        groups.iter().try_for_each(|g| i.bat.lock().set_free(&**i.store.device(0), *g))
    })
    .unwrap();
    assert!(!gave && d.failed().is_none());
    v.sync().unwrap();
    // they are in use now
    assert!(!d.nodes.is_empty(1));
    v.unmount().unwrap();
}

/// What moves out of the end of a volume that becomes smaller does not come to lie in a group that goes as well.
#[test]
fn what_moves_does_not_move_again() {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 8));
    let how = MkfsOptions { domains: Some(1), group_bytes: Some(4 << 20), ..MkfsOptions::default() };
    mkfs::format(std::slice::from_ref(&device), &how).unwrap();
    let v = Volume::mount(vec![device], MountOptions { background: false, ..MountOptions::default() }).unwrap();
    let (i, d) = (v.mounted(), v.mounted().dom(crate::DomainId(0)));
    let open = OpenHow { read: true, write: true, create: true, mode: 0o600, ..OpenHow::default() };
    let files: Vec<_> = (0..10)
        .map(|n| {
            let f = v.open_path(format!("{n}").as_bytes(), open, &Cred::root()).unwrap();
            assert_eq!(v.write(&f, 0, &vec![n; 2 << 20]).unwrap(), 2 << 20);
            v.sync().unwrap();
            f
        })
        .collect();
    while i.claim_group(d).unwrap() {}
    // room in all of them, in pieces
    files[..5].iter().for_each(|f| v.fallocate(f, FallocMode::PunchHole, 64 << 10, (2 << 20) - (64 << 10)).unwrap());
    v.sync().unwrap();
    let sb = v.super_block();
    let first = 4;
    let bytes = (sb.device_table()[0].data_start.get() + first * 1024 + 1) * BLOCK_BYTES as u64;
    // data in the groups from `first` on
    let behind = || {
        let group = |at: u64| u64::from(i.store.geometry().group_of(crate::BlockAddr(at / BLOCK_BYTES as u64)));
        let all = files.iter().flat_map(|f| v.extents(f.ino()).unwrap());
        let all = all.filter_map(|e| e.place.map(|(_, at)| (group(at), e.len)));
        all.filter(|(g, _)| *g >= first).collect::<Vec<_>>()
    };
    let was = behind();
    let groups: Vec<u64> = d.space.groups().into_iter().map(u64::from).filter(|g| *g >= first).collect();
    assert!(was.iter().any(|(g, _)| *g > first), "{was:?}");
    let sum = |all: &[(u64, u64)], groups: &[u64]| {
        all.iter().filter(|(g, _)| groups.contains(g)).map(|(_, len)| len).sum::<u64>()
    };
    let told = |done: u64, all: u64| {
        let left = &groups[..(all - done) as usize];
        assert_eq!(sum(&behind(), &groups), sum(&was, left), "{done} of {all} are gone");
    };
    v.shrink(bytes, &told).unwrap();
    drop(files);
    v.unmount().unwrap();
}

/// What cannot have room is refused before anything moves, and the size that is named can be had.
#[test]
fn too_small_a_size_is_refused_at_once() {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 8));
    let how = MkfsOptions { domains: Some(2), group_bytes: Some(4 << 20), ..MkfsOptions::default() };
    mkfs::format(std::slice::from_ref(&device), &how).unwrap();
    let v = Volume::mount(vec![device], MountOptions { background: false, ..MountOptions::default() }).unwrap();
    let open = OpenHow { read: true, write: true, create: true, mode: 0o600, ..OpenHow::default() };
    // the second one lies behind the first one
    let [first, f] = ["first", "f"].map(|name| v.open_path(name.as_bytes(), open, &Cred::root()).unwrap());
    for file in [&first, &f] {
        for n in 0..20 {
            assert_eq!(v.write(file, n << 20, &vec![n as u8; 1 << 20]).unwrap(), 1 << 20);
        }
        v.sync().unwrap();
    }
    drop(first);
    v.unlink(InodeNo::ROOT, b"first").unwrap();
    v.sync().unwrap();
    let refused = |size: u64| match v.shrink(size, &|done, all| panic!("{done} of {all} have moved")) {
        Err(Error::Size(why)) => why,
        other => panic!("{other:?}"),
    };
    let why = refused(16 << 20);
    assert!(why.contains("no room before it; the least size is"), "{why}");
    let least: u64 = why.split(' ').filter_map(|w| w.parse().ok()).max().unwrap();
    assert!((20 << 20..40 << 20).contains(&least), "{why}");
    // who asks may have it stopped before each group
    let groups = v.super_block().groups.get();
    assert!(matches!(v.resize_while(NewSize::Bytes(least + (4 << 20)), &|_, _| false), Err(Error::Stopped)));
    assert_eq!(v.super_block().groups.get(), groups);
    // what is needed to move it besides may ask for a group more
    let had = [least, least + (4 << 20)].into_iter().find(|size| v.shrink(*size, &|_, _| {}).is_ok());
    assert!(had.is_some(), "{why}");
    let mut data = vec![0; 1 << 20];
    for n in 0..20 {
        assert_eq!(v.read(&f, n << 20, &mut data).unwrap(), 1 << 20);
        assert!(data.iter().all(|b| *b == n as u8));
    }
    drop(f);
    v.unmount().unwrap();
}
