//! Data that was given its place before its commit: under pressure of dirty pages, and journals that fill up.

use braidfs::OpenHow;
use braidfs::{Cred, MkfsOptions, MountOptions, OpenFile, Timestamp, Volume, mkfs};
use braidfs_device::{Device, Effect, FaultDevice, Keep, MemDevice, Op, RecordDevice, Rule};
use std::sync::Arc;

const MIB: usize = 1 << 20;

fn options() -> MountOptions {
    MountOptions {
        background: false,
        serial: true,
        commit_interval: std::time::Duration::from_secs(3600),
        cache_bytes: 512 << 20,
        clock: Some(|| Timestamp { sec: 1_700_000_000, nsec: 0 }),
        ..MountOptions::default()
    }
}

fn create(v: &Volume, name: &str) -> OpenFile {
    let how = OpenHow { read: true, write: true, create: true, mode: 0o600, ..OpenHow::default() };
    v.open_path(name.as_bytes(), how, &Cred::root()).unwrap()
}

fn write(v: &Volume, f: &OpenFile, at: usize, byte: u8, len: usize) {
    assert_eq!(v.write(f, at as u64, &vec![byte; len]).unwrap(), len);
}

/// Leaves the bytes of a deleted file in most free blocks.
fn soil(v: &Volume) {
    let f = create(v, "secret");
    write(v, &f, 0, 0xee, 40 * MIB);
    v.sync().unwrap();
    drop(f);
    v.unlink(braidfs::InodeNo::ROOT, b"secret").unwrap();
    v.sync().unwrap();
}

/// A new volume of one domain, of which most free blocks are soiled.
fn soiled(devices: &[Arc<dyn Device>]) -> Volume {
    mkfs::format(devices, &MkfsOptions { domains: Some(1), ..MkfsOptions::default() }).unwrap();
    let v = Volume::mount(devices.to_vec(), options()).unwrap();
    soil(&v);
    v
}

/// Number of bytes of `name` that are neither one of `ok` nor zero; `None`: it is not there.
fn wrong(v: &Volume, name: &str, ok: &[u8]) -> Option<(u64, usize, usize)> {
    let how = OpenHow { read: true, ..OpenHow::default() };
    let f = v.open_path(name.as_bytes(), how, &Cred::root()).ok()?;
    let size = v.getattr(f.ino()).unwrap().size;
    let mut data = vec![0; size as usize];
    let n = v.read(&f, 0, &mut data).unwrap();
    assert_eq!(n as u64, size);
    let zeros = data.iter().filter(|b| **b == 0).count();
    Some((size, data.iter().filter(|b| **b != 0 && !ok.contains(b)).count(), zeros))
}

fn remount(image: MemDevice) -> Volume {
    Volume::mount(vec![Arc::new(image) as Arc<dyn Device>], options()).unwrap()
}

/// A file writes its first 16 MiB itself; then an fsync is cut off before its flush.
#[test]
fn a_torn_fsync_after_pages_went_out_by_themselves() {
    let device = Arc::new(RecordDevice::soiled(24576));
    let devices = [device.clone() as Arc<dyn Device>];
    let v = soiled(&devices);
    let f = create(&v, "f");
    write(&v, &f, 0, 0x11, 16 * MIB);
    let before = device.log_len();
    write(&v, &f, 16 * MIB, 0x22, 4096);
    v.fsync(f.ino(), false).unwrap();
    // the flush of that fsync is the next one
    let flush = device.flushes().into_iter().find(|i| *i >= before).unwrap();
    let late = device.unflushed(flush);
    eprintln!("{} late writes, {} of the fsync", late.len(), late.iter().filter(|i| **i >= before).count());
    let image = device.crash_image(flush, &mut |i| if late[i] >= before { Keep::Whole } else { Keep::None });
    let v = remount(image);
    let found = wrong(&v, "f", &[0x11, 0x22]);
    eprintln!("{found:?}");
    assert!(found.is_none_or(|f| f.1 == 0), "foreign bytes: {found:?}");
}

/// One thread writes the dirty pages of a file, and the device takes its time; another one calls fsync.
#[test]
fn an_fsync_while_another_thread_writes_the_pages_out() {
    let device = Arc::new(RecordDevice::soiled(24576));
    let faulty = Arc::new(FaultDevice::new(device.clone(), 1));
    let devices = [faulty.clone() as Arc<dyn Device>];
    let v = soiled(&devices);
    let f = create(&v, "f");
    write(&v, &f, 0, 0x11, 15 * MIB);
    std::thread::scope(|s| {
        faulty.add(Rule::new(Op::Write, Effect::Stall).times(1));
        let other = s.spawn(|| write(&v, &f, 15 * MIB, 0x22, MIB));
        while faulty.stalled() == 0 {
            std::thread::yield_now();
        }
        // what was written by the call that returned must be there
        let sync = s.spawn(|| v.fsync(f.ino(), false));
        for _ in 0..200 {
            if sync.is_finished() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        let finished = sync.is_finished();
        let end = device.log_len();
        let image = finished.then(|| device.crash_image(end, &mut |_| Keep::None));
        faulty.clear();
        sync.join().unwrap().unwrap();
        other.join().unwrap();
        let image = image.unwrap_or_else(|| device.crash_image(device.log_len(), &mut |_| Keep::None));
        let v = remount(image);
        let found = wrong(&v, "f", &[0x11, 0x22]);
        eprintln!("finished while held: {finished}; {found:?}");
        let (size, foreign, zeros) = found.unwrap();
        assert!(size >= 15 * MIB as u64 && foreign == 0 && zeros == 0, "lost though synced: {found:?}");
    });
}

/// A write fails; what the file then reads as.
#[test]
fn after_a_failed_write_nothing_foreign_is_read() {
    let device = Arc::new(MemDevice::soiled(24576));
    let faulty = Arc::new(FaultDevice::new(device, 1));
    let devices = [faulty.clone() as Arc<dyn Device>];
    mkfs::format(&devices, &MkfsOptions { domains: Some(1), ..MkfsOptions::default() }).unwrap();
    let v = Volume::mount(devices.to_vec(), MountOptions { cache_bytes: 4 << 20, ..options() }).unwrap();
    let big = create(&v, "big");
    write(&v, &big, 0, 0x33, 16 * MIB);
    v.sync().unwrap();
    soil(&v);
    let f = create(&v, "f");
    write(&v, &f, 0, 0x11, MIB / 2);
    faulty.add(Rule::new(Op::Write, Effect::Fail(5)).times(1));
    v.sync().unwrap_err();
    faulty.clear();
    let mut buf = vec![0; MIB];
    for round in 0..3 {
        for i in 0..16 {
            v.read(&big, (i * MIB) as u64, &mut buf).unwrap();
        }
        let mut data = vec![0; MIB / 2];
        let n = v.read(&f, 0, &mut data).unwrap();
        let foreign = data[..n].iter().filter(|b| **b != 0 && **b != 0x11).count();
        assert_eq!(foreign, 0, "round {round}: {n} bytes");
    }
}

/// Files written here and there: as many records as places.
#[test]
fn scattered_pages_of_several_files_fit_the_journal() {
    let device = Arc::new(MemDevice::soiled(65536));
    let devices = [device as Arc<dyn Device>];
    mkfs::format(&devices, &MkfsOptions { domains: Some(8), ..MkfsOptions::default() }).unwrap();
    let v = Volume::mount(devices.to_vec(), options()).unwrap();
    for n in 0..8 {
        let f = create(&v, &format!("f{n}"));
        for i in 0..4000 {
            v.write(&f, i * 8192, b"x").unwrap();
        }
    }
    let r = v.sync();
    assert!(r.is_ok(), "{r:?}, {:?}", v.domains()[0]);
}

/// Extents of the file of [`in_pieces`].
const PIECES: u64 = 55_000;

/// A new volume with small journals, and a file `f` that was written here and there, in an order in which neighbours in
/// the file are none on the device, and the other way round.
fn in_pieces(device: &Arc<dyn Device>) -> (Volume, OpenFile) {
    let o = MkfsOptions { domains: Some(16), group_bytes: Some(4 << 20), ..MkfsOptions::default() };
    mkfs::format(std::slice::from_ref(device), &o).unwrap();
    let v = Volume::mount(vec![device.clone()], options()).unwrap();
    let f = create(&v, "f");
    for i in 0..PIECES {
        write(&v, &f, (i * 48_271 % PIECES * 8192) as usize, 0x78, 1);
    }
    v.sync().unwrap();
    (v, f)
}

fn unmounts_clean(v: Volume, device: &Arc<dyn Device>) {
    v.unmount().unwrap();
    braidfs_testkit::walk::fsck(std::slice::from_ref(device)).unwrap();
}

/// A file that was written here and there is deleted.
#[test]
fn a_file_in_many_pieces_can_be_deleted() {
    let device: Arc<dyn Device> = Arc::new(MemDevice::soiled(131_072));
    let (v, f) = in_pieces(&device);
    drop(f);
    v.unlink(braidfs::InodeNo::ROOT, b"f").unwrap();
    v.sync().unwrap();
    unmounts_clean(v, &device);
}

/// As its orphan after a crash: the mount must not fail.
#[test]
fn an_orphan_in_many_pieces_can_be_mounted() {
    let recorded = Arc::new(RecordDevice::soiled(131_072));
    let (v, _f) = in_pieces(&(recorded.clone() as Arc<dyn Device>));
    let free = v.statfs().free;
    v.unlink(braidfs::InodeNo::ROOT, b"f").unwrap();
    v.sync().unwrap();
    let image = recorded.snapshot();
    v.crash();
    let device: Arc<dyn Device> = Arc::new(MemDevice::from_image(image));
    unmounts_clean(Volume::mount(vec![device.clone()], options()).unwrap(), &device);
    let v = Volume::mount(vec![device], options()).unwrap();
    assert!(v.statfs().free > free + PIECES, "{} {free}", v.statfs().free);
}

/// A large file is emptied, written anew and synced; then the power fails.
#[test]
fn a_large_file_replaced_and_synced_can_be_mounted() {
    let device = Arc::new(RecordDevice::soiled(65536));
    let devices = [device.clone() as Arc<dyn Device>];
    mkfs::format(&devices, &MkfsOptions { domains: Some(8), group_bytes: Some(4 << 20), ..MkfsOptions::default() })
        .unwrap();
    let v = Volume::mount(devices.to_vec(), options()).unwrap();
    let f = create(&v, "f");
    for i in 0..200 {
        write(&v, &f, i * MIB, 0x11, MIB);
    }
    v.sync().unwrap();
    v.setattr(f.ino(), &braidfs::SetAttr { size: Some(0), ..Default::default() }).unwrap();
    write(&v, &f, 0, 0x22, 8192);
    v.fsync(f.ino(), false).unwrap();
    let image = device.snapshot();
    v.crash();
    let device: Arc<dyn Device> = Arc::new(MemDevice::from_image(image));
    let v = Volume::mount(vec![device.clone()], options()).unwrap();
    assert_eq!(wrong(&v, "f", &[0x22]), Some((8192, 0, 0)));
    unmounts_clean(v, &device);
}

/// A file that was written here and there is truncated, or punched.
#[test]
fn a_file_in_many_pieces_is_cut() {
    for punch in [false, true] {
        let device: Arc<dyn Device> = Arc::new(MemDevice::soiled(131_072));
        let (v, f) = in_pieces(&device);
        let free = v.statfs().free;
        if punch {
            v.fallocate(&f, braidfs::FallocMode::PunchHole, 100, PIECES * 8192).unwrap();
        } else {
            v.setattr(f.ino(), &braidfs::SetAttr { size: Some(100), ..Default::default() }).unwrap();
        }
        v.sync().unwrap();
        assert!(v.statfs().free > free + PIECES - 10);
        let attr = v.getattr(f.ino()).unwrap();
        assert_eq!((attr.size, attr.sectors), (if punch { (PIECES - 1) * 8192 + 1 } else { 100 }, 8));
        drop(f);
        unmounts_clean(v, &device);
    }
}

/// The daemon is killed before the last flush of a commit, and the machine while the next mount recovers: of what that
/// one found, and never flushed, some is lost, and of what it wrote, nothing.
#[test]
fn what_a_mount_found_is_flushed_first() {
    let devices = [0, 1].map(|_| Arc::new(RecordDevice::soiled(8192)));
    let faulty = Arc::new(FaultDevice::new(devices[1].clone(), 1));
    let plain = [devices[0].clone() as Arc<dyn Device>, devices[1].clone()];
    let o = MkfsOptions { domains: Some(2), placement: braidfs::Placement::Spread, ..MkfsOptions::default() };
    mkfs::format(&plain, &o).unwrap();
    let v = Volume::mount(vec![devices[0].clone(), faulty.clone()], options()).unwrap();
    let (name, f) = (0..64)
        .map(|i| (format!("f{i}"), create(&v, &format!("f{i}"))))
        .find(|(_, f)| v.domain_of(f.ino()).unwrap() == braidfs::DomainId(1))
        .unwrap();
    write(&v, &f, 0, 0x11, 20_000);
    let ino = f.ino();
    drop(f);
    // a checkpoint, so that the journal no longer tells of that
    v.unmount().unwrap();
    let v = Volume::mount(vec![devices[0].clone(), faulty.clone()], options()).unwrap();
    let f = v.open(ino).unwrap();
    write(&v, &f, 0, 0x22, 20_000);
    faulty.add(Rule::new(Op::Flush, Effect::Stop).skip(1));
    v.sync().unwrap_err();
    drop(f);
    v.crash();
    let lost = devices[1].unflushed(devices[1].log_len());
    assert_eq!(lost.len(), 1, "the commit record");
    // the machine lives on: what was written can be read
    let v = Volume::mount(plain.to_vec(), options()).unwrap();
    assert_eq!(wrong(&v, &name, &[0x22]), Some((20_000, 0, 0)));
    v.crash();
    // the second device's first flush of that mount does not come to an end; the first device's last write came after it
    let flush = *devices[1].flushes().iter().find(|f| **f > lost[0]).unwrap();
    let late = devices[1].unflushed(flush);
    let images = [
        devices[0].crash_image(devices[0].log_len() - 2, &mut |_| Keep::Whole),
        devices[1].crash_image(flush, &mut |i| if lost.contains(&late[i]) { Keep::None } else { Keep::Whole }),
    ];
    eprintln!("{} late writes, lost {lost:?}", late.len());
    let devices: Vec<_> = images.into_iter().map(|d| Arc::new(d) as Arc<dyn Device>).collect();
    let v = Volume::mount(devices.clone(), options()).unwrap();
    // not synced: either version
    let how = OpenHow { read: true, ..OpenHow::default() };
    let f = v.open_path(name.as_bytes(), how, &Cred::root()).unwrap();
    let mut data = vec![0; 20_000];
    assert_eq!(v.read(&f, 0, &mut data).unwrap(), 20_000);
    assert!(data.iter().all(|b| *b == 0x11) || data.iter().all(|b| *b == 0x22), "{:?}", &data[..8]);
    drop(f);
    v.unmount().unwrap();
    braidfs_testkit::walk::fsck(&devices).unwrap();
}
