//! The whole library once through: make, fill, remount, crash, check.

use braidfs::OpenHow;
use braidfs::device::{Device, MemDevice, RecordDevice};
use braidfs::{Cred, InodeNo, MkfsOptions, MountOptions, RenameMode, Volume, mkfs};
use braidfs_check::{FsckOptions, check};
use std::sync::Arc;

fn options() -> MountOptions {
    MountOptions { background: false, commit_interval: std::time::Duration::from_secs(3600), ..MountOptions::default() }
}

fn make(device: &Arc<dyn Device>) {
    let o = MkfsOptions { domains: Some(3), group_bytes: Some(4 << 20), ..MkfsOptions::default() };
    mkfs::format(std::slice::from_ref(device), &o).unwrap();
}

fn clean(device: &Arc<dyn Device>) {
    let r = check(
        std::slice::from_ref(device),
        &FsckOptions { repair: false, force: true },
        &braidfs::JournalReplay,
        &|_, _, _| {},
    )
    .unwrap();
    assert!(r.findings.is_empty(), "{:#?}", r.findings);
}

fn put(v: &Volume, path: &str, data: &[u8]) -> InodeNo {
    let how = OpenHow { read: true, write: true, create: true, mode: 0o644, ..OpenHow::default() };
    let f = v.open_path(path.as_bytes(), how, &Cred::root()).unwrap();
    assert_eq!(v.write(&f, 0, data).unwrap(), data.len());
    f.ino()
}

fn get(v: &Volume, path: &str) -> Vec<u8> {
    let f = v.open_path(path.as_bytes(), OpenHow { read: true, ..OpenHow::default() }, &Cred::root()).unwrap();
    let n = v.getattr(f.ino()).unwrap().size as usize;
    let mut b = vec![0; n];
    assert_eq!(v.read(&f, 0, &mut b).unwrap(), n);
    b
}

#[test]
fn fill_remount_check() {
    let dev: Arc<dyn Device> = Arc::new(MemDevice::new(16384));
    make(&dev);
    clean(&dev);
    let me = Cred::root();
    let v = Volume::mount(vec![dev.clone()], options()).unwrap();
    for d in 0..6 {
        v.mkdir_path(format!("d{d}").as_bytes(), 0o755, &me).unwrap();
        for f in 0..400 {
            put(&v, &format!("d{d}/file{f}"), format!("content {d} {f}").as_bytes());
        }
    }
    put(&v, "big", &vec![7u8; 5_000_000]);
    assert_eq!(get(&v, "d3/file77"), b"content 3 77");
    v.unmount().unwrap();
    clean(&dev);
    let v = Volume::mount(vec![dev.clone()], options()).unwrap();
    assert_eq!(get(&v, "d3/file77"), b"content 3 77");
    assert_eq!(get(&v, "big"), vec![7u8; 5_000_000]);
    for d in 0..6 {
        for f in 0..400 {
            let p = format!("d{d}/file{f}");
            if f % 3 == 0 {
                v.unlink_path(p.as_bytes(), &me).unwrap();
            } else if f % 3 == 1 {
                let to = format!("d{}/moved-{d}-{f}", (d + 1) % 6);
                v.rename_path(p.as_bytes(), to.as_bytes(), RenameMode::Replace, &me).unwrap();
            }
        }
    }
    v.unlink_path(b"big", &me).unwrap();
    v.rename_path(b"d5", b"d0/d5", RenameMode::Replace, &me).unwrap();
    v.unmount().unwrap();
    clean(&dev);
    let v = Volume::mount(vec![dev.clone()], options()).unwrap();
    assert_eq!(get(&v, "d2/moved-1-1"), b"content 1 1");
    v.unmount().unwrap();
}

#[test]
fn synced_survives_a_crash() {
    let mem = Arc::new(MemDevice::new(16384));
    let dev: Arc<dyn Device> = mem.clone();
    make(&dev);
    let rec = Arc::new(RecordDevice::new(mem.snapshot()));
    let d: Arc<dyn Device> = rec.clone();
    let me = Cred::root();
    let v = Volume::mount(vec![d], options()).unwrap();
    for k in 0..4 {
        v.mkdir_path(format!("d{k}").as_bytes(), 0o755, &me).unwrap();
        let a = put(&v, &format!("d{k}/small"), b"small and synced");
        let b = put(&v, &format!("d{k}/large"), &vec![k as u8; 300_000]);
        v.fsync(a, false).unwrap();
        v.fsync(b, false).unwrap();
        put(&v, &format!("d{k}/lost"), b"never synced");
        v.rename_path(
            format!("d{k}/small").as_bytes(),
            format!("d{}/s2-{k}", (k + 3) % 4).as_bytes(),
            RenameMode::Replace,
            &me,
        )
        .ok();
    }
    let upto = rec.log_len();
    v.crash();
    for keep in [true, false] {
        let image: Arc<dyn Device> = Arc::new(rec.crash_image(upto, &mut |_| {
            if keep { braidfs::device::Keep::Whole } else { braidfs::device::Keep::None }
        }));
        let v = Volume::mount(vec![image.clone()], options()).unwrap();
        for k in 0..4 {
            assert_eq!(get(&v, &format!("d{k}/large")), vec![k as u8; 300_000]);
            let small = v.resolve(format!("d{k}/small").as_bytes(), true, &me).is_ok();
            let moved = v.resolve(format!("d{}/s2-{k}", (k + 3) % 4).as_bytes(), true, &me).is_ok();
            assert!(small || moved, "k {k}");
        }
        v.unmount().unwrap();
        clean(&image);
    }
}
