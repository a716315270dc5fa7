//! `data=writeback`: commits leave dirty data alone, but syncs and the unmount do not.

use braidfs::device::{Device, MemDevice};
use braidfs::format::inode::NOCOW;
use braidfs::{Cred, DataMode, FallocMode, InodeNo, MkfsOptions, MountOptions, SetAttr, Volume, mkfs};
use braidfs::{OpenFile, OpenHow};
use std::sync::Arc;

fn mount(device: &Arc<MemDevice>) -> Volume {
    let o = MountOptions { background: false, data: DataMode::Writeback, ..MountOptions::default() };
    Volume::mount(vec![device.clone() as Arc<dyn Device>], o).unwrap()
}

fn put(v: &Volume, path: &[u8], data: &[u8]) -> InodeNo {
    let how = OpenHow { read: true, write: true, create: true, mode: 0o600, ..OpenHow::default() };
    let f = v.open_path(path, how, &Cred::root()).unwrap();
    assert_eq!(v.write(&f, 0, data).unwrap(), data.len());
    f.ino()
}

fn assert_holds(v: &Volume, path: &[u8], data: &[u8]) {
    let f = v.open_path(path, OpenHow { read: true, ..OpenHow::default() }, &Cred::root()).unwrap();
    let mut b = vec![0; data.len()];
    assert_eq!(v.read(&f, 0, &mut b).unwrap(), data.len());
    assert!(b == data, "{} lost its content", String::from_utf8_lossy(path));
}

#[test]
fn data_survives_sync_fsync_and_unmount() {
    let device = Arc::new(MemDevice::new(16384));
    mkfs::format(&[device.clone() as Arc<dyn Device>], &MkfsOptions::default()).unwrap();
    let v = mount(&device);
    put(&v, b"unmounted", &[1; 100_000]);
    v.unmount().unwrap();

    let v = mount(&device);
    assert_holds(&v, b"unmounted", &[1; 100_000]);
    put(&v, b"synced", &[2; 100_000]);
    v.sync().unwrap();
    // these rest on a commit: one replaced a name, one lies below a directory that moved
    v.mkdir_path(b"from", 0o700, &Cred::root()).unwrap();
    v.mkdir_path(b"from/d", 0o700, &Cred::root()).unwrap();
    v.mkdir_path(b"to", 0o700, &Cred::root()).unwrap();
    v.sync().unwrap();
    v.rename_path(b"from/d", b"to/d", braidfs::RenameMode::Replace, &Cred::root()).unwrap();
    let ino = put(&v, b"to/d/file", &[3; 100_000]);
    v.fsync(ino, false).unwrap();
    v.crash();

    let v = mount(&device);
    assert_holds(&v, b"synced", &[2; 100_000]);
    assert_holds(&v, b"to/d/file", &[3; 100_000]);
    v.unmount().unwrap();
}

/// What an fsync made durable in the inode's record stays so when the file outgrows the record: the record of the next
/// commit, which leaves data alone, does not hold it any more.
#[test]
fn synced_content_survives_that_its_file_outgrows_the_record() {
    type Grow = fn(&Volume, &braidfs::OpenFile);
    let ways: [(&str, Grow); 4] = [
        ("write", |v, f| assert_eq!(v.write(f, 100, &[2; 8192]).unwrap(), 8192)),
        ("truncate", |v, f| {
            v.setattr(f.ino(), &SetAttr { size: Some(8192), ..SetAttr::default() }).unwrap();
        }),
        ("fallocate", |v, f| v.fallocate(f, FallocMode::Allocate { keep_size: false }, 0, 8192).unwrap()),
        ("write far behind", |v, f| assert_eq!(v.write(f, 1 << 20, &[2; 100]).unwrap(), 100)),
    ];
    for (how, grow) in ways {
        let device = Arc::new(MemDevice::new(16384));
        let o = MkfsOptions { domains: Some(1), ..MkfsOptions::default() };
        mkfs::format(&[device.clone() as Arc<dyn Device>], &o).unwrap();
        let v = mount(&device);
        v.fsync(put(&v, b"small", &[1; 100]), false).unwrap();
        let f = v.open_path(b"small", OpenHow { write: true, ..OpenHow::default() }, &Cred::root()).unwrap();
        grow(&v, &f);
        // commits the domain, of the other file the name alone
        put(&v, b"other", &[3; 100_000]);
        v.fsync(InodeNo::ROOT, false).unwrap();
        v.crash();
        let v = mount(&device);
        let f = v.open_path(b"small", OpenHow { read: true, ..OpenHow::default() }, &Cred::root()).unwrap();
        let mut b = [0; 100];
        assert_eq!(v.read(&f, 0, &mut b).unwrap(), 100, "{how}");
        assert_eq!(b, [1; 100], "{how}");
        drop(f);
        v.unmount().unwrap();
    }
}

/// A commit that leaves data alone has the smaller size of a file that was cut, and the zeros behind its end: what was cut off, and
/// synced before, does not come back when the file grows after a crash.
#[test]
fn what_was_cut_off_does_not_come_back() {
    let device = Arc::new(MemDevice::new(16384));
    mkfs::format(&[device.clone() as Arc<dyn Device>], &MkfsOptions::default()).unwrap();
    let v = mount(&device);
    let ino = put(&v, b"f", &[7; 5000]);
    v.fsync(ino, false).unwrap();
    v.setattr(ino, &SetAttr { size: Some(3000), ..SetAttr::default() }).unwrap();
    let domain = v.domain_of(ino).unwrap();
    v.commit_domain(domain, false).unwrap();
    v.crash();

    let v = mount(&device);
    let f = v.open_path(b"f", OpenHow { read: true, write: true, ..OpenHow::default() }, &Cred::root()).unwrap();
    assert_eq!(v.getattr(ino).unwrap().size, 3000);
    v.write(&f, 20_000, &[9; 100]).unwrap();
    let mut b = vec![1; 5000];
    v.read(&f, 0, &mut b).unwrap();
    assert!(b[..3000] == [7; 3000] && b[3000..] == [0; 2000], "old bytes behind the old end");
    v.unmount().unwrap();
}

/// On the device, behind the end of a file that is overwritten where it lies, there may be bytes of a write that a crash undid. The
/// commit with a larger size, which leaves data alone, has the zeros there all the same; so has one after which the file is
/// overwritten no more, and nobody looks for such bytes.
#[test]
fn bytes_of_a_write_that_a_crash_undid_do_not_come_back() {
    type Change = fn(&Volume, &OpenFile);
    let ways: [(&str, Change); 5] = [
        ("truncate", |v, f| {
            v.setattr(f.ino(), &SetAttr { size: Some(10_000), ..SetAttr::default() }).unwrap();
        }),
        ("write behind", |v, f| assert_eq!(v.write(f, 8000, &[3; 100]).unwrap(), 100)),
        ("fallocate", |v, f| v.fallocate(f, FallocMode::Allocate { keep_size: false }, 0, 8192).unwrap()),
        ("the page was dirty", |v, f| {
            assert_eq!(v.write(f, 0, &[7; 100]).unwrap(), 100);
            v.setattr(f.ino(), &SetAttr { size: Some(10_000), ..SetAttr::default() }).unwrap();
        }),
        ("not in place", |v, f| {
            v.setattr(f.ino(), &SetAttr { flags: Some(0), ..SetAttr::default() }).unwrap();
        }),
    ];
    for (how, change) in ways {
        let device = Arc::new(MemDevice::new(16384));
        mkfs::format(&[device.clone() as Arc<dyn Device>], &MkfsOptions::default()).unwrap();
        let v = mount(&device);
        let open = OpenHow { read: true, write: true, create: true, mode: 0o600, ..OpenHow::default() };
        let f = v.open_path(b"f", open, &Cred::root()).unwrap();
        v.setattr(f.ino(), &SetAttr { flags: Some(NOCOW), ..SetAttr::default() }).unwrap();
        v.fallocate(&f, FallocMode::Allocate { keep_size: true }, 0, 4096).unwrap();
        v.write(&f, 0, &[7; 100]).unwrap();
        v.sync().unwrap();
        let ino = f.ino();
        let (_, at) = v.extents(ino).unwrap()[0].place.unwrap();
        drop(f);
        v.crash();
        // as a write does that goes out before the commit with its size, which a crash then undoes
        let mut page = [9; 4096];
        page[3000..].fill(0);
        page[..100].fill(7);
        device.write(at / 4096, &page).unwrap();

        let v = mount(&device);
        let f = v.open_path(b"f", open, &Cred::root()).unwrap();
        assert_eq!(v.getattr(ino).unwrap().size, 100);
        change(&v, &f);
        v.commit_domain(v.domain_of(ino).unwrap(), false).unwrap();
        drop(f);
        v.crash();

        let v = mount(&device);
        let f = v.open_path(b"f", open, &Cred::root()).unwrap();
        v.write(&f, 20_000, &[3; 100]).unwrap();
        let mut b = vec![1; 8000];
        v.read(&f, 0, &mut b).unwrap();
        assert!(b[..100] == [7; 100] && b[100..].iter().all(|b| *b == 0), "{how}: bytes that were never in the file");
        drop(f);
        v.unmount().unwrap();
    }
}
