//! A mounted volume changes between read-only and writable.

use braidfs::OpenHow;
use braidfs::device::{Device, Keep, MemDevice, RecordDevice};
use braidfs::{Cred, DataMode, Error, InodeNo, MkfsOptions, MountOptions, Remount, Volume, mkfs};
use braidfs_check::{FsckOptions, check};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const RO: Remount = Remount {
    read_only: Some(true),
    data: None,
    commit_interval: None,
    atime: None,
    nodiratime: None,
    lazytime: None,
    later: (),
};
const RW: Remount = Remount { read_only: Some(false), ..RO };

fn options() -> MountOptions {
    MountOptions { background: false, commit_interval: Duration::from_secs(3600), ..MountOptions::default() }
}

fn made() -> Arc<RecordDevice> {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(16384));
    let o = MkfsOptions { domains: Some(3), group_bytes: Some(4 << 20), ..MkfsOptions::default() };
    mkfs::format(std::slice::from_ref(&device), &o).unwrap();
    copy_of(&device)
}

/// A recording copy of a device.
fn copy_of(device: &Arc<dyn Device>) -> Arc<RecordDevice> {
    let mem = MemDevice::new(device.blocks());
    let mut block = vec![0; 4096];
    for at in 0..device.blocks() {
        device.read(at, &mut block).unwrap();
        mem.write(at, &block).unwrap();
    }
    Arc::new(RecordDevice::new(mem.snapshot()))
}

fn put(v: &Volume, path: &str, data: &[u8]) -> braidfs::Result<InodeNo> {
    let how = OpenHow { read: true, write: true, create: true, mode: 0o644, ..OpenHow::default() };
    let f = v.open_path(path.as_bytes(), how, &Cred::root())?;
    assert_eq!(v.write(&f, 0, data)?, data.len());
    Ok(f.ino())
}

fn get(v: &Volume, path: &str) -> Vec<u8> {
    let f = v.open_path(path.as_bytes(), OpenHow { read: true, ..OpenHow::default() }, &Cred::root()).unwrap();
    let mut b = vec![0; v.getattr(f.ino()).unwrap().size as usize];
    let n = v.read(&f, 0, &mut b).unwrap();
    b.truncate(n);
    b
}

/// Whether the devices say that the volume was unmounted (after a crash they do not before the GC was there); nothing may
/// be wrong with it in any case.
fn is_clean(device: &Arc<dyn Device>) -> bool {
    let look = |force| {
        check(
            std::slice::from_ref(device),
            &FsckOptions { repair: false, force },
            &braidfs::JournalReplay,
            &|_, _, _| {},
        )
        .unwrap()
    };
    let r = look(true);
    assert!(r.findings.is_empty(), "{:#?}", r.findings);
    look(false).clean_skip
}

/// All that was written.
fn now(rec: &Arc<RecordDevice>) -> Arc<dyn Device> {
    Arc::new(MemDevice::from_image(rec.snapshot()))
}

/// What no crash can take any more.
fn durable(rec: &Arc<RecordDevice>) -> Arc<dyn Device> {
    Arc::new(rec.crash_image(usize::MAX, &mut |_| Keep::None))
}

#[test]
fn read_only_and_back() {
    let rec = made();
    let v = Volume::mount(vec![rec.clone()], options()).unwrap();
    put(&v, "a", b"before").unwrap();
    assert!(!is_clean(&now(&rec)));
    v.remount(&RO).unwrap();
    assert!(is_clean(&durable(&rec)), "nothing is left to replay");
    let quiet = rec.log_len();
    assert!(matches!(put(&v, "a", b"no"), Err(Error::ReadOnly)));
    assert!(matches!(put(&v, "b", b"no"), Err(Error::ReadOnly)));
    assert_eq!(get(&v, "a"), b"before");
    v.sync().unwrap();
    v.fsync(v.resolve(b"a", true, &Cred::root()).unwrap().ino, false).unwrap();
    v.remount(&RO).unwrap();
    assert_eq!(rec.log_len(), quiet, "a read-only volume writes nothing");
    let elsewhere = Volume::mount(vec![durable(&rec)], options()).unwrap();
    assert_eq!(get(&elsewhere, "a"), b"before");
    elsewhere.unmount().unwrap();

    v.remount(&RW).unwrap();
    assert!(!is_clean(&now(&rec)), "in use again");
    put(&v, "a", b"after it").unwrap();
    let synced = put(&v, "c", b"synced").unwrap();
    v.fsync(synced, false).unwrap();
    v.crash();
    let rec = copy_of(&durable(&rec));
    let v = Volume::mount(vec![rec.clone()], options()).unwrap();
    assert_eq!(get(&v, "c"), b"synced");
    v.collect_stale().unwrap();
    v.remount(&RO).unwrap();
    assert!(is_clean(&durable(&rec)));
    v.unmount().unwrap();
    assert!(is_clean(&durable(&rec)));
}

#[test]
fn only_some_options_change() {
    let rec = made();
    let v = Volume::mount(vec![rec.clone()], options()).unwrap();
    let other = Remount { data: Some(DataMode::Journal), ..RO };
    assert!(matches!(v.remount(&other), Err(Error::Invalid(_))));
    assert!(!v.read_only(), "refused before anything changed");
    v.remount(&Remount { data: Some(DataMode::Ordered), ..RO }).unwrap();
    v.remount(&Remount { read_only: None, ..RO }).unwrap();
    assert!(v.read_only(), "what is not said stays");
    v.unmount().unwrap();
}

/// A volume that stopped without an unmount, with something to replay.
fn crashed() -> Arc<RecordDevice> {
    let rec = made();
    let v = Volume::mount(vec![rec.clone()], options()).unwrap();
    for k in 0..3 {
        v.mkdir_path(format!("d{k}").as_bytes(), 0o755, &Cred::root()).unwrap();
        put(&v, &format!("d{k}/committed"), b"committed").unwrap();
    }
    v.sync().unwrap();
    for k in 0..3 {
        let f = put(&v, &format!("d{k}/forward"), &vec![k as u8; 100_000]).unwrap();
        v.fsync(f, false).unwrap();
    }
    v.crash();
    copy_of(&durable(&rec))
}

fn all_there(v: &Volume) {
    for k in 0..3 {
        assert_eq!(get(v, &format!("d{k}/committed")), b"committed");
        assert_eq!(get(v, &format!("d{k}/forward")), vec![k as u8; 100_000]);
    }
}

#[test]
fn a_read_only_mount_becomes_writable() {
    let rec = crashed();
    let v = Volume::mount(vec![rec.clone()], MountOptions { read_only: true, ..options() }).unwrap();
    all_there(&v);
    assert!(matches!(put(&v, "new", b"no"), Err(Error::ReadOnly)));
    assert_eq!(rec.log_len(), 0, "a read-only mount writes nothing");
    v.remount(&RW).unwrap();
    all_there(&v);
    put(&v, "new", b"yes").unwrap();
    v.collect_stale().unwrap();
    v.remount(&RO).unwrap();
    assert!(is_clean(&durable(&rec)));
    v.remount(&RW).unwrap();
    put(&v, "newer", b"yes").unwrap();
    v.unmount().unwrap();
    let v = Volume::mount(vec![durable(&rec)], options()).unwrap();
    all_there(&v);
    assert_eq!((get(&v, "new"), get(&v, "newer")), (b"yes".to_vec(), b"yes".to_vec()));
    v.unmount().unwrap();
}

/// What a read-only mount kept in memory is recovery: a crash while it is written loses nothing, at any point, whichever of
/// the unflushed writes arrive.
#[test]
fn a_crash_while_it_becomes_writable() {
    let rec = crashed();
    let v = Volume::mount(vec![rec.clone()], MountOptions { read_only: true, ..options() }).unwrap();
    v.remount(&RW).unwrap();
    let events = rec.log_len();
    v.crash();
    assert!(events > 10, "{events} events: nothing to recover");
    for upto in 0..=events {
        for keep in [Keep::None, Keep::Whole] {
            let image: Arc<dyn Device> = Arc::new(rec.crash_image(upto, &mut |_| keep));
            let v = Volume::mount(vec![image.clone()], options()).unwrap_or_else(|e| panic!("{upto}: {e}"));
            all_there(&v);
            v.collect_stale().unwrap();
            v.unmount().unwrap();
            assert!(is_clean(&image), "{upto}");
        }
    }
}

/// Has writers end where the test fails beside them: they would write on for ever.
struct Ended<'a>(&'a AtomicBool);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Operations under way when the volume becomes read-only: what was acknowledged is on the device, clean.
#[test]
fn writers_are_cut_off_between_operations() {
    for data in [DataMode::Ordered, DataMode::Writeback] {
        let rec = made();
        let background = MountOptions { data, commit_interval: Duration::from_millis(2), ..MountOptions::default() };
        let v = Volume::mount(vec![rec.clone()], background).unwrap();
        for round in 0..6 {
            let (writable, ended) = (AtomicBool::new(true), AtomicBool::new(false));
            let done: Vec<Vec<String>> = std::thread::scope(|s| {
                let (v, writable, over) = (&v, &writable, &ended);
                let _ended = Ended(over);
                let writers: Vec<_> = (0..4)
                    .map(|t| {
                        s.spawn(move || {
                            let mut done = Vec::new();
                            for n in 0.. {
                                if over.load(Ordering::SeqCst) {
                                    break;
                                }
                                let path = format!("r{round}-t{t}-{n}");
                                // looked at before the write: one that begins while it is writable may end later
                                let may_write = writable.load(Ordering::SeqCst);
                                match put(v, &path, path.as_bytes()) {
                                    Ok(_) => done.push(path),
                                    Err(Error::ReadOnly) => break,
                                    Err(e) => panic!("{e}"),
                                }
                                assert!(may_write, "a write to a read-only volume");
                                if n > 20 {
                                    v.unlink_path(done.remove(0).as_bytes(), &Cred::root()).ok();
                                }
                            }
                            done
                        })
                    })
                    .collect();
                std::thread::sleep(Duration::from_millis(8 + round));
                v.remount(&RO).unwrap();
                writable.store(false, Ordering::SeqCst);
                writers.into_iter().map(|w| w.join().unwrap()).collect()
            });
            let image = durable(&rec);
            assert!(is_clean(&image));
            let copy = Volume::mount(vec![image], options()).unwrap();
            for path in done.iter().flatten() {
                assert_eq!(get(&copy, path), path.as_bytes(), "{path}");
            }
            copy.unmount().unwrap();
            v.remount(&RW).unwrap();
        }
        v.unmount().unwrap();
    }
}
