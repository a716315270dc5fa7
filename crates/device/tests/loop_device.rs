//! A real block device, by a loop device: needs root and `losetup`, and says so where it has not.

use braidfs_device::{BLOCK_BYTES, Device, FileDevice, OpenError, OpenHow, open_volume_devices, open_volume_files};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Detaches when dropped, a failed test included.
struct Loop(PathBuf);

impl Loop {
    fn attach(image: &Path) -> Result<Loop, String> {
        let out = Command::new("losetup").args(["--find", "--show"]).arg(image).output().map_err(|e| e.to_string())?;
        if !out.status.success() {
            return Err(String::from_utf8_lossy(&out.stderr).into_owned());
        }
        let device = Loop(PathBuf::from(String::from_utf8_lossy(&out.stdout).trim()));
        // In a container the kernel may make the device without anybody making its node.
        if device.0.exists() { Ok(device) } else { Err(format!("{} has no node", device.0.display())) }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        match Command::new("losetup").arg("--detach").arg(&self.0).status() {
            Ok(status) if status.success() => {}
            other => eprintln!("COULD NOT DETACH {}: {other:?}", self.0.display()),
        }
    }
}

#[test]
fn block_device() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    // Half a block over: the device has 2048 whole ones.
    fs::File::create(&image).unwrap().set_len(2048 * BLOCK_BYTES as u64 + 2048).unwrap();
    let dev = match Loop::attach(&image) {
        Ok(dev) => dev,
        Err(why) => {
            eprintln!("SKIPPED block_device: no loop device here: {why}");
            return;
        }
    };
    let path = dev.0.clone();
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
