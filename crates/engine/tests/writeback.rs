//! `data=writeback`: commits leave dirty data alone, but syncs and the unmount do not.

use braidfs::OpenHow;
use braidfs::device::{Device, MemDevice};
use braidfs::{Cred, DataMode, InodeNo, MkfsOptions, MountOptions, Volume, mkfs};
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
