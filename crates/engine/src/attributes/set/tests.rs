//! Mode and times of an inode that the running transaction writes anyway: what goes into memory alone, and what a crash leaves.

use super::*;
use crate::{Cred, MkfsOptions, MountOptions, OpenFile, OpenHow};
use braidfs_device::{Device, MemDevice};
use std::time::Duration;

fn mount(device: &Arc<dyn Device>) -> Volume {
    let options =
        MountOptions { background: false, commit_interval: Duration::from_secs(3600), ..MountOptions::default() };
    Volume::mount(vec![device.clone()], options).unwrap()
}

fn formatted() -> Arc<dyn Device> {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(16384));
    crate::mkfs::format(std::slice::from_ref(&device), &MkfsOptions::default()).unwrap();
    device
}

fn open(v: &Volume, path: &str) -> OpenFile {
    let how = OpenHow { read: true, write: true, create: true, mode: 0o644, ..OpenHow::default() };
    v.open_path(path.as_bytes(), how, &Cred::root()).unwrap()
}

fn at(sec: i64) -> SetTime {
    SetTime::At(Timestamp { sec, nsec: 7 })
}

/// As the kernel sends it after a rename.
fn kept_times(sec: i64) -> SetAttr {
    SetAttr { mtime: Some(at(sec)), ctime: Some(at(sec + 1)), ..SetAttr::default() }
}

fn seconds(a: &Attr) -> (i64, i64) {
    (a.mtime.sec, a.ctime.sec)
}

#[test]
fn a_changed_inode_takes_mode_and_times_in_memory() {
    let device = formatted();
    let v = mount(&device);
    let f = open(&v, "/f");
    let is = |g: u32| g == f.generation();
    let told = v.setattr_beside(f.ino(), is, &kept_times(100)).unwrap().expect("it was just made");
    assert_eq!((seconds(&told), told.mode & 0o7777), ((100, 101), 0o644));
    let mode = SetAttr { mode: Some(0o600), ctime: Some(at(102)), ..SetAttr::default() };
    assert_eq!(v.setattr_beside(f.ino(), is, &mode).unwrap(), Some(v.getattr(f.ino()).unwrap()));
    v.sync().unwrap();
    v.crash();
    let v = mount(&device);
    let now = v.getattr(f.ino()).unwrap();
    assert_eq!((seconds(&now), now.mode & 0o7777), ((100, 102), 0o600));
    v.unmount().unwrap();
}

/// Its record would not be read again.
#[test]
fn a_time_of_too_many_nanoseconds_is_refused() {
    let device = formatted();
    let v = mount(&device);
    let f = open(&v, "/f");
    let before = v.getattr(f.ino()).unwrap();
    let time = Some(SetTime::At(Timestamp { sec: 1, nsec: 1_000_000_000 }));
    for set in [
        SetAttr { atime: time, ..SetAttr::default() },
        SetAttr { mtime: time, ..SetAttr::default() },
        SetAttr { ctime: time, mode: Some(0o600), ..SetAttr::default() },
        SetAttr { mtime: time, size: Some(5), ..SetAttr::default() },
    ] {
        assert!(matches!(v.setattr_beside(f.ino(), |_| true, &set), Err(Error::Invalid(_))), "{set:?}");
        assert!(matches!(v.setattr(f.ino(), &set), Err(Error::Invalid(_))), "{set:?}");
    }
    assert_eq!(v.getattr(f.ino()).unwrap(), before);
    v.unmount().unwrap();
    mount(&device).getattr(f.ino()).unwrap();
}

#[test]
fn what_is_more_than_that_changes_nothing() {
    let device = formatted();
    let v = mount(&device);
    let f = open(&v, "/f");
    let is = |g: u32| g == f.generation();
    let no = |v: &Volume, is: &dyn Fn(u32) -> bool, set: &SetAttr| {
        let before = v.getattr(f.ino()).unwrap();
        assert_eq!(v.setattr_beside(f.ino(), is, set).unwrap(), None, "{set:?}");
        assert_eq!(v.getattr(f.ino()).unwrap(), before, "{set:?}");
    };
    let all = SetAttr { mode: Some(0o600), ..kept_times(100) };
    no(&v, &|g| g == f.generation() + 1, &all);
    for more in [
        SetAttr { uid: Some(1), ..all },
        SetAttr { gid: Some(1), ..all },
        SetAttr { size: Some(1), ..all },
        SetAttr { flags: Some(NOATIME), ..all },
        SetAttr { kill_suid: true, ..all },
    ] {
        no(&v, &is, &more);
    }
    // of a flag that guards it the front end may know better
    v.setattr(f.ino(), &SetAttr { flags: Some(APPEND), ..SetAttr::default() }).unwrap();
    no(&v, &is, &SetAttr { accepted: true, ..kept_times(100) });
    v.setattr(f.ino(), &SetAttr { flags: Some(0), ..SetAttr::default() }).unwrap();
    assert!(v.setattr_beside(f.ino(), is, &all).unwrap().is_some());
    // no transaction would write it
    v.sync().unwrap();
    no(&v, &is, &all);
    v.setattr(f.ino(), &kept_times(200)).unwrap();
    assert!(v.setattr_beside(f.ino(), is, &all).unwrap().is_some());
    v.unlink(InodeNo::ROOT, b"f").unwrap();
    let ino = f.ino();
    drop(f);
    assert_eq!(v.setattr_beside(ino, |_| true, &all).unwrap(), None);
    v.unmount().unwrap();
    let options = MountOptions { read_only: true, ..MountOptions::default() };
    let v = Volume::mount(vec![device], options).unwrap();
    assert!(matches!(v.setattr(InodeNo::ROOT, &all), Err(Error::ReadOnly)));
}

/// An fsync takes along what came so: of a file that has a roll-forward record, and of one that is overwritten in place.
#[test]
fn an_fsync_after_it_makes_it_durable() {
    let device = formatted();
    let v = mount(&device);
    let (new, old) = (open(&v, "/new"), open(&v, "/old"));
    v.write(&old, 0, &[1; 32 * 4096]).unwrap();
    v.fsync(old.ino(), false).unwrap();
    v.commit_domain(v.domain_of(old.ino()).unwrap(), false).unwrap();
    v.fsync(new.ino(), false).unwrap();
    for round in 1..4 {
        v.write(&old, 4096, &[round; 4096]).unwrap();
        v.write(&new, 0, &[round; 4096]).unwrap();
        for f in [&new, &old] {
            v.fsync(f.ino(), false).unwrap();
            let set = SetAttr { mode: Some(0o600 + u32::from(round)), ..kept_times(100 * i64::from(round)) };
            // what the fsync has written the transaction writes no more
            v.write(f, 8192, &[round; 4096]).unwrap();
            // the times are by then what they were
            let mode = SetAttr { mode: Some(0o610 + u32::from(round)), ..set };
            let times = SetAttr { mode: None, ..kept_times(100 * i64::from(round) + 1) };
            for set in [set, mode, times] {
                assert!(v.setattr_beside(f.ino(), |_| true, &set).unwrap().is_some());
                v.fsync(f.ino(), false).unwrap();
            }
        }
    }
    v.crash();
    let v = mount(&device);
    for path in ["/new", "/old"] {
        let now = v.getattr(open(&v, path).ino()).unwrap();
        assert_eq!((seconds(&now), now.mode & 0o7777), ((301, 302), 0o613), "{path}");
    }
    v.unmount().unwrap();
}

/// A clock that stands still: a write changes no times.
fn still() -> Timestamp {
    Timestamp { sec: 1_700_000_000, nsec: 0 }
}

/// An fsync that writes blocks where they lie writes the inode, too, where mode or times were changed beside an overwrite.
#[test]
fn an_fsync_in_place_takes_mode_and_times_along() {
    let times = kept_times(100);
    let mode = SetAttr { mode: Some(0o600), ctime: Some(SetTime::At(still())), ..SetAttr::default() };
    for set in [times, mode] {
        let device = formatted();
        let options = MountOptions {
            background: false,
            commit_interval: Duration::from_secs(3600),
            clock: Some(still),
            ..MountOptions::default()
        };
        let v = Volume::mount(vec![device.clone()], options).unwrap();
        let f = open(&v, "/f");
        v.write(&f, 0, &[1; 32 * 4096]).unwrap();
        v.sync().unwrap();
        for round in 2..4 {
            v.write(&f, 4096, &[round; 4096]).unwrap();
            if round == 3 {
                assert!(v.setattr_beside(f.ino(), |_| true, &set).unwrap().is_some());
            }
            v.fsync(f.ino(), false).unwrap();
        }
        let told = v.getattr(f.ino()).unwrap();
        v.crash();
        let v = mount(&device);
        let now = v.getattr(open(&v, "/f").ino()).unwrap();
        assert_eq!((seconds(&now), now.mode), (seconds(&told), told.mode), "{set:?}");
        v.unmount().unwrap();
    }
}

/// Of so many extents that a truncation takes some at a time: what was allocated behind the end of the file stays there when it
/// grows.
#[test]
fn a_file_that_grows_loses_nothing_behind_its_end() {
    let v = mount(&formatted());
    let f = open(&v, "/f");
    let many = v.mounted().domains[0].pieces_max() as u64 + 10;
    {
        let mut st = f.cell.state.write();
        let Body::File(b) = &mut st.body else { panic!("a file") };
        b.inline = None;
        for n in 0..many {
            let (lblk, addr) = (10 + 2 * n, crate::BlockAddr((1 << 30) + 2 * n));
            let e = braidfs_format::inode::Extent { lblk, addr, len: 1, unwritten: true, sums: None };
            b.map.insert(e, &mut crate::cell::extents::Runs::new());
        }
    }
    v.setattr(f.ino(), &SetAttr { size: Some(8192), ..SetAttr::default() }).unwrap();
    assert!(matches!(&f.cell.state.read().body, Body::File(b) if b.map.extent_count() as u64 == many));
    drop(f);
    // these blocks are not the file's
    v.crash();
}

/// Who takes setgid away names no mode: what another sets meanwhile is not undone, nor refused for an append-only file.
#[test]
fn setgid_goes_by_itself() {
    let v = mount(&formatted());
    let f = open(&v, "/f");
    let mode = |mode| v.setattr(f.ino(), &SetAttr { mode: Some(mode), ..SetAttr::default() }).unwrap();
    let without = SetAttr { kill_sgid: true, ..SetAttr::default() };
    mode(0o6666);
    mode(0o2600);
    assert_eq!(v.setattr(f.ino(), &without).unwrap().mode & 0o7777, 0o600, "as it is now, not as it was");
    mode(0o2600);
    assert_eq!(v.setattr_beside(f.ino(), |_| true, &without).unwrap(), None, "that is more than mode and times");
    v.setattr(f.ino(), &SetAttr { flags: Some(APPEND), ..SetAttr::default() }).unwrap();
    assert_eq!(v.setattr(f.ino(), &without).unwrap().mode & 0o7777, 0o600);
}

/// With an ACL it goes where the ACL is set, and only there.
#[test]
fn setgid_goes_with_an_access_list() {
    let v = mount(&formatted());
    let f = open(&v, "/f");
    let name = b"system.posix_acl_access";
    // of owner, group and others alone
    let entries: [(u16, u16); 3] = [(1, 6), (4, 4), (0x20, 0)];
    let mut list = 2u32.to_le_bytes().to_vec();
    for (tag, bits) in entries {
        list.extend_from_slice(&[&tag.to_le_bytes()[..], &bits.to_le_bytes(), &u32::MAX.to_le_bytes()].concat());
    }
    let mode = || v.getattr(f.ino()).unwrap().mode & 0o7777;
    let set = |value: &[u8], how| v.setxattr_kill_sgid(f.ino(), name, value, how);
    v.setattr(f.ino(), &SetAttr { mode: Some(0o2600), ..SetAttr::default() }).unwrap();
    assert!(set(b"none", XattrMode::Set).is_err() && set(&list, XattrMode::Replace).is_err());
    assert_eq!(mode(), 0o2600, "nothing is set");
    v.setxattr(f.ino(), name, &list, XattrMode::Set).unwrap();
    assert_eq!(mode(), 0o2640);
    set(&list, XattrMode::Set).unwrap();
    assert_eq!(mode(), 0o640);
}
