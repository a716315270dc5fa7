//! A real block device, by a loop device: needs root, and says so where it has not.

use braidfs_device::{
    BLOCK_BYTES, Device, FileDevice, LoopDevice, OpenError, OpenHow, WriteOp, open_volume_devices, open_volume_files,
};
use std::fs;
use std::io::{Write as _, stderr};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// Writable; `None` where there are none here.
fn attach(image: &Path) -> Option<LoopDevice> {
    LoopDevice::attach(image, false)
        .inspect_err(|why| drop(writeln!(stderr(), "SKIPPED: no loop device here: {why}")))
        .ok()
}

#[test]
fn block_device() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    // Half a block over: the device has 2048 whole ones.
    fs::File::create(&image).unwrap().set_len(2048 * BLOCK_BYTES as u64 + 2048).unwrap();
    let Some(dev) = attach(&image) else { return };
    let path = dev.path().to_owned();
    for direct in [false, true] {
        let dev = FileDevice::open(&path, OpenHow { write: true, direct }).unwrap();
        println!("{dev:?}");
        assert!(dev.is_block_device());
        assert_eq!(dev.blocks(), 2048);
        for how in [OpenHow { write: true, direct }, OpenHow { write: false, direct }] {
            let e = FileDevice::open(&path, how).unwrap_err();
            assert!(matches!(e, OpenError::InUse { .. }), "{e}");
        }
        let data: Vec<u8> = (0..64 * BLOCK_BYTES).map(|i| (i / 13) as u8 ^ u8::from(direct)).collect();
        dev.write(1984, &data).unwrap();
        dev.flush().unwrap();
        let mut out = vec![0; data.len()];
        dev.read(1984, &mut out).unwrap();
        assert!(out == data);
        let file = fs::read(&image).unwrap();
        assert!(file[1984 * BLOCK_BYTES..2048 * BLOCK_BYTES] == data, "the flush did not reach the file");
        let before = fs::metadata(&image).unwrap().blocks();
        dev.discard(1984, 64).unwrap();
        dev.flush().unwrap();
        if fs::metadata(&image).unwrap().blocks() < before {
            dev.read(1984, &mut out).unwrap();
            assert!(out.iter().all(|&b| b == 0));
        } else {
            eprintln!("this loop device does not discard");
        }
    }
    // Two readers may share it; the kernel's claim keeps a writer off while it is held.
    let readers = [&path, &path].map(|p| open_volume_devices(std::slice::from_ref(p), false).unwrap());
    drop(readers);
    let holder = {
        use std::os::unix::fs::OpenOptionsExt;
        fs::OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(&path).unwrap()
    };
    let e = open_volume_files(std::slice::from_ref(&path), true).unwrap_err();
    assert!(matches!(e, OpenError::Busy { .. }), "{e}");
    open_volume_devices(std::slice::from_ref(&path), false).unwrap();
    drop(holder);
    let files = open_volume_files(std::slice::from_ref(&path), true).unwrap();
    let claim = || {
        use std::os::unix::fs::OpenOptionsExt;
        fs::OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(&path)
    };
    assert_eq!(claim().unwrap_err().raw_os_error(), Some(libc::EBUSY));
    files[0].release_claim();
    claim().unwrap();
}

/// Requests that a block device has done: writes, flushes.
fn requests(device: &Path) -> (u64, u64) {
    let stat = Path::new("/sys/block").join(device.file_name().unwrap()).join("stat");
    let fields: Vec<u64> = fs::read_to_string(stat).unwrap().split_whitespace().map(|f| f.parse().unwrap()).collect();
    (fields[4], fields[15])
}

/// [`requests`], with so many writes and a flush more than `before`: the kernel counts a request after it has told of its end.
fn more_requests(device: &Path, before: (u64, u64), writes: u64) -> (u64, u64) {
    let end = Instant::now() + Duration::from_secs(10);
    loop {
        let now = requests(device);
        if (now.0 >= before.0 + writes && now.1 > before.1) || Instant::now() > end {
            return now;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Small writes of who flushes afterwards go past the cache: one request each, which is durable, and no flush behind them.
/// Not where something else was written that is not durable: then one flush covers all.
#[test]
fn writes_past_the_cache() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    fs::File::create(&image).unwrap().set_len(2048 * BLOCK_BYTES as u64).unwrap();
    let Some(held) = attach(&image) else { return };
    let dev = FileDevice::open(held.path(), OpenHow { write: true, direct: true }).unwrap();
    if !dev.is_direct() || dev.engine() != "io_uring" {
        _ = writeln!(stderr(), "SKIPPED writes_past_the_cache: {dev:?}");
        return;
    }
    dev.flush().unwrap();
    // more than a thread writes before it has a ring of its own; two writes each
    for round in 0..20u64 {
        let (data, before) = ([round as u8 + 1; BLOCK_BYTES], requests(held.path()));
        let ops = [10, 20].map(|at| WriteOp { block: at + round, bufs: vec![&data[..]] });
        dev.write_batch_through(&ops).unwrap();
        let (writes, flushes) = more_requests(held.path(), before, 2);
        assert!(flushes > before.1, "round {round}: not durable on a device with a volatile cache");
        assert_eq!(writes - before.0, 2);
        dev.flush().unwrap();
        assert_eq!(requests(held.path()), (writes, flushes), "round {round}: flushed again");
        let mut out = [0; BLOCK_BYTES];
        dev.read(20 + round, &mut out).unwrap();
        assert_eq!(out, data);
    }
    // beside a write that is not durable
    dev.write(100, &[1; BLOCK_BYTES]).unwrap();
    let before = requests(held.path());
    dev.write_batch_through(&[WriteOp { block: 101, bufs: vec![&[2; BLOCK_BYTES]] }]).unwrap();
    assert_eq!(requests(held.path()).1, before.1, "one flush for both");
    dev.flush().unwrap();
    assert_eq!(more_requests(held.path(), before, 0).1, before.1 + 1);
    // large: one flush behind them costs less
    let large = vec![3; 256 << 10];
    let before = requests(held.path());
    dev.write_batch_through(&[WriteOp { block: 200, bufs: vec![&large] }]).unwrap();
    assert_eq!(requests(held.path()).1, before.1);
    dev.flush().unwrap();
    assert_eq!(more_requests(held.path(), before, 0).1, before.1 + 1);
    let file = fs::read(&image).unwrap();
    assert!(
        file[200 * BLOCK_BYTES..].starts_with(&large) && file[101 * BLOCK_BYTES] == 2 && file[29 * BLOCK_BYTES] == 20
    );
}
