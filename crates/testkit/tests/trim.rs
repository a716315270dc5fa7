//! Discarding free space: what `Volume::trim` takes and what it leaves, beside threads that write, and by itself with the
//! mount option.

use braidfs::OpenHow;
use braidfs::{Cred, Error, MkfsOptions, MountOptions, OpenFile, Remount, Volume, mkfs};
use braidfs_device::{CountDevice, Device, Effect, FaultDevice, FileDevice, MemDevice, Op, OpenHow as DeviceHow, Rule};
use braidfs_testkit::discards::{Seen, crashes_of_a_run};
use braidfs_testkit::ops::fill;
use braidfs_testkit::walk::fsck;
use braidfs_testkit::{env_number, seed};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

fn options() -> MountOptions {
    MountOptions { background: false, ..MountOptions::default() }
}

fn create(v: &Volume, name: &str) -> OpenFile {
    let how = OpenHow { read: true, write: true, create: true, mode: 0o644, ..OpenHow::default() };
    v.open_path(name.as_bytes(), how, &Cred::root()).unwrap()
}

fn remove(v: &Volume, name: &str) {
    v.unlink(braidfs::InodeNo::ROOT, name.as_bytes()).unwrap();
}

fn holds(v: &Volume, name: &str, seed: u32, len: usize) -> bool {
    let mut all = vec![0; len + 1];
    let how = OpenHow { read: true, ..OpenHow::default() };
    let Ok(f) = v.open_path(name.as_bytes(), how, &Cred::root()) else { return false };
    v.read(&f, 0, &mut all).unwrap() == len && all[..len] == fill(seed, 0, len)
}

/// Memory on which this becomes of every discard.
fn discards(blocks: u64, effect: Effect) -> Arc<dyn Device> {
    let device = FaultDevice::new(Arc::new(MemDevice::soiled(blocks)), 1);
    device.add(Rule::new(Op::Discard, effect));
    Arc::new(device)
}

/// A remount to read-only comes while it is under way.
#[test]
fn nothing_is_discarded_once_it_is_read_only() {
    let fault = Arc::new(FaultDevice::new(Arc::new(MemDevice::soiled(65_536)), 1));
    let device = Arc::new(CountDevice::new(fault.clone()));
    mkfs::format(&[device.clone() as Arc<dyn Device>], &MkfsOptions::default()).unwrap();
    let v = Volume::mount(vec![device.clone()], options()).unwrap();
    fault.add(Rule::new(Op::Discard, Effect::Stall));
    std::thread::scope(|s| {
        let trim = s.spawn(|| v.trim(0..u64::MAX, 0));
        while fault.stalled() == 0 {
            std::thread::yield_now();
        }
        let remount = s.spawn(|| v.remount(&Remount { read_only: Some(true), ..Remount::default() }));
        std::thread::sleep(Duration::from_millis(20));
        fault.clear();
        remount.join().unwrap().unwrap();
        let done = device.counters();
        // all of it, where it was faster
        let trimmed = trim.join().unwrap();
        assert!(matches!(trimmed, Ok(_) | Err(Error::ReadOnly)), "{trimmed:?}");
        assert_eq!((device.counters() - done).discard_blocks, 0);
    });
    v.unmount().unwrap();
}

#[test]
fn what_is_free_and_durably_so() {
    let device = Arc::new(CountDevice::new(Arc::new(MemDevice::soiled(32_768))));
    let o = MkfsOptions { domains: Some(2), ..MkfsOptions::default() };
    mkfs::format(&[device.clone() as Arc<dyn Device>], &o).unwrap();
    let v = Volume::mount(vec![device.clone()], options()).unwrap();
    let len = 20 * MIB as usize;
    for (name, seed) in [("keep", 1), ("gone", 2)] {
        v.write(&create(&v, name), 0, &fill(seed, 0, len)).unwrap();
    }
    v.sync().unwrap();
    let trim = || v.trim(0..u64::MAX, 0).unwrap();
    let first = trim();
    // all that is free but for what stands in the way as metadata of groups that nobody owns
    let free = v.statfs().free * 4096;
    assert!(first <= free && first + MIB > free, "{first} of {free}");
    let before = device.counters();
    assert_eq!(trim(), first);
    assert_eq!((device.counters() - before).discard_blocks * 4096, first);
    remove(&v, "gone");
    assert!(trim() <= first, "a crash could still bring it back");
    v.sync().unwrap();
    let second = trim();
    assert!(second > first + 19 * MIB, "{second} after {first}");
    assert!(holds(&v, "keep", 1, len));

    // parts of the volume, and long runs only
    let halves = v.trim(0..64 * MIB, 0).unwrap() + v.trim(64 * MIB..u64::MAX, 0).unwrap();
    assert_eq!(halves, second);
    assert_eq!(v.trim(4096..4096, 0).unwrap(), 0);
    let long = v.trim(0..u64::MAX, 2 * MIB).unwrap();
    assert!(long > 0 && long < second && long.is_multiple_of(2 * MIB), "{long} of {second}");
    for (range, min) in [(0..u64::MAX, 3 * MIB), (1 << 40..u64::MAX, 0)] {
        assert!(matches!(v.trim(range, min), Err(Error::Invalid(_))));
    }
    v.unmount().unwrap();
    fsck(&[device.clone() as Arc<dyn Device>]).unwrap();
    let read_only = Volume::mount(vec![device], MountOptions { read_only: true, ..options() }).unwrap();
    assert!(matches!(read_only.trim(0..u64::MAX, 0), Err(Error::ReadOnly)));
    assert!(holds(&read_only, "keep", 1, len));
}

#[test]
fn a_device_that_cannot() {
    let device = discards(16_384, Effect::Fail(95 /* EOPNOTSUPP */));
    mkfs::format(std::slice::from_ref(&device), &MkfsOptions { discard: true, ..MkfsOptions::default() }).unwrap();
    let v = Volume::mount(vec![device], options()).unwrap();
    let e = v.trim(0..u64::MAX, 0).unwrap_err();
    assert_eq!(e.errno(), 95, "EOPNOTSUPP: {e}");
}

/// Threads write files, check them after a while and remove them, on a volume that is nearly full, while another one trims
/// without end.
fn beside_writers(device: Arc<dyn Device>, files: u32, background: bool) {
    let o = MkfsOptions { domains: Some(2), group_bytes: Some(4 << 20), ..MkfsOptions::default() };
    mkfs::format(std::slice::from_ref(&device), &o).unwrap();
    let options = MountOptions {
        commit_interval: Duration::from_millis(20),
        background: true,
        discard: background,
        cache_bytes: 4 << 20, // so that most is read from the device
        ..MountOptions::default()
    };
    let v = Volume::mount(vec![device.clone()], options).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|s| {
        s.spawn(|| {
            while !done.load(SeqCst) {
                if background {
                    std::thread::sleep(Duration::from_millis(5));
                } else {
                    v.trim(0..u64::MAX, 0).unwrap();
                }
            }
        });
        let writers: Vec<_> = (0..3u32)
            .map(|t| {
                let v = &v;
                s.spawn(move || {
                    let mut rng = fastrand::Rng::with_seed(u64::from(t));
                    let mut have: Vec<(String, u32, usize)> = Vec::new();
                    let mut full = 0;
                    for n in 0..files {
                        let (name, seed) = (format!("{t}-{n}"), t << 20 | n);
                        let len = rng.usize(1..1 << 21);
                        let how = OpenHow { read: true, write: true, create: true, mode: 0o644, ..OpenHow::default() };
                        let file = v.open_path(name.as_bytes(), how, &Cred::root());
                        let written = file.and_then(|f| v.write(&f, 0, &fill(seed, 0, len)));
                        full += u32::from(!written.as_ref().is_ok_and(|n| *n == len));
                        match written {
                            Ok(len) => have.push((name, seed, len)),
                            Err(Error::NoSpace) => {}
                            Err(e) => panic!("{name}: {e}"),
                        }
                        if rng.u8(..4) == 0 {
                            v.sync().unwrap();
                        }
                        if have.len() > 10 || full % 4 == 3 && have.len() > 4 {
                            let (name, seed, len) = have.swap_remove(rng.usize(..have.len()));
                            assert!(holds(v, &name, seed, len), "{name}");
                            remove(v, &name);
                        }
                    }
                    for (name, seed, len) in have {
                        assert!(holds(v, &name, seed, len), "{name}");
                    }
                    full
                })
            })
            .collect();
        let ended: Vec<_> = writers.into_iter().map(|w| w.join()).collect();
        done.store(true, SeqCst);
        let full: u32 = ended.into_iter().map(|w| w.unwrap()).sum();
        println!("{full} writes found the volume full");
    });
    v.unmount().unwrap();
    fsck(&[device]).unwrap();
}

#[test]
fn beside_writers_in_memory() {
    // 40 MiB, of which they want as much
    beside_writers(discards(10_240, Effect::Delay(Duration::from_micros(300))), 150, false);
}

#[test]
fn beside_writers_in_an_image() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    let device = FileDevice::create(&path, 64 * MIB).unwrap();
    beside_writers(Arc::new(device), 100, false);
}

#[test]
fn beside_writers_by_itself() {
    beside_writers(discards(10_240, Effect::Delay(Duration::from_millis(2))), 100, true);
}

/// Crashes of volumes that discard by themselves, and become read-only and writable again.
#[test]
fn a_crash_finds_what_was_synced_beside_discards_and_remounts() {
    let (first, runs) = (seed(), env_number("BRAIDFS_DISCARD_RUNS", 2));
    let mut all = Seen::default();
    for n in 0..runs {
        let seen = crashes_of_a_run(first + n, n % 2 == 1).unwrap();
        println!("seed {}: {seen:?}", first + n);
        all = Seen {
            states: all.states + seen.states,
            retired: all.retired + seen.retired,
            discards: all.discards + seen.discards,
        };
    }
    assert!(all.states > 100 && all.retired > 0 && all.discards > 0, "{all:?}");
}

#[test]
fn mkfs_and_the_mount_option_give_an_image_its_space_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    std::fs::write(&path, vec![0xa5; 64 << 20]).unwrap();
    let used = || std::fs::metadata(&path).unwrap().blocks() * 512;
    let full = used();
    let open =
        || -> Arc<dyn Device> { Arc::new(FileDevice::open(&path, DeviceHow { write: true, direct: false }).unwrap()) };
    let device = open();
    mkfs::format(std::slice::from_ref(&device), &MkfsOptions::default()).unwrap();
    assert!(used() + MIB > full, "not unasked");
    mkfs::format(std::slice::from_ref(&device), &MkfsOptions { discard: true, ..MkfsOptions::default() }).unwrap();
    assert!(used() < 4 * MIB, "{} bytes of {full} after mkfs", used());
    let options = MountOptions { discard: true, commit_interval: Duration::from_millis(20), ..MountOptions::default() };
    let v = Volume::mount(vec![device], options).unwrap();
    let data = fill(1, 0, 24 << 20);
    v.write(&create(&v, "f"), 0, &data).unwrap();
    v.sync().unwrap();
    assert!(used() > 24 * MIB);
    remove(&v, "f");
    v.sync().unwrap();
    let until = Instant::now() + Duration::from_secs(30);
    // whole segments only
    while used() > 10 * MIB && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(used() <= 10 * MIB, "{} bytes after the file was removed", used());
    v.unmount().unwrap();
    fsck(&[open()]).unwrap();
}
