//! What file systems lie on: a loop device over a file, the same in memory, zram, or a device that the user gives.

use super::command::run;
use crate::{Error, Result};
use braidfs_device::LoopDevice;
use rustix::fs::FallocateFlags;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// What the file system lies on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MediaKind {
    /// A loop device over an image file in this directory, past its page cache.
    Loop(PathBuf),
    /// A loop device over an image in a tmpfs: the paper's RAM disk.
    Ram,
    /// A compressed RAM disk of its own.
    Zram,
    /// An image file in this directory, as it is: for the library without root.
    File(PathBuf),
    /// A block device, whose content goes.
    Device(PathBuf),
}

/// A block device, for the time of a run.
#[derive(Debug)]
pub struct Media {
    device: PathBuf,
    what: String,
    // in the order in which they have to go
    _loop: Option<LoopDevice>,
    zram: Option<PathBuf>,
    ram: Option<PathBuf>,
    _dir: Option<TempDir>,
}

/// Zeros for writing an image through.
const CHUNK: usize = 4 << 20;

impl Media {
    /// Makes it with `size` bytes (a given device has its own). `dir` is a directory for mount points.
    ///
    /// # Errors
    /// Not root, no room, no such device; a device that is in use.
    pub fn make(kind: &MediaKind, size: u64, fill: bool, dir: &Path) -> Result<Self> {
        match kind {
            MediaKind::Loop(dir) => Self::on_file(dir, size, fill),
            MediaKind::File(dir) => Self::plain_file(dir, size),
            MediaKind::Ram => Self::in_memory(size, dir),
            MediaKind::Zram => Self::zram(size),
            MediaKind::Device(path) => Self::given(path),
        }
    }

    fn on_file(dir: &Path, size: u64, fill: bool) -> Result<Self> {
        let place = |what: &str| format!("{what} an image of {size} bytes in {}", dir.display());
        let made =
            tempfile::Builder::new().prefix("fxmark-").tempdir_in(dir).map_err(|e| Error::io(place("making"), e))?;
        let path = made.path().join("image");
        image(&path, size, fill).map_err(|e| Error::io(place("making"), e))?;
        let device = LoopDevice::attach(&path, false).map_err(|e| Error::io(place("attaching a loop device to"), e))?;
        // the device holds it: gone with its last user, whatever happens to us
        fs::remove_file(&path).map_err(|e| Error::io(place("unlinking"), e))?;
        let how = if device.is_direct() { "direct I/O" } else { "through the page cache" };
        let what = format!("loop device over a file of {} MiB in {}, {how}", size >> 20, dir.display());
        Ok(Self { device: device.path().into(), what, _loop: Some(device), zram: None, ram: None, _dir: Some(made) })
    }

    fn plain_file(dir: &Path, size: u64) -> Result<Self> {
        let failed = |e| Error::io(format!("making an image of {size} bytes in {}", dir.display()), e);
        let made = tempfile::Builder::new().prefix("fxmark-").tempdir_in(dir).map_err(failed)?;
        let device = made.path().join("image");
        image(&device, size, false).map_err(failed)?;
        let what = format!("a file of {} MiB in {}", size >> 20, dir.display());
        Ok(Self { device, what, _loop: None, zram: None, ram: None, _dir: Some(made) })
    }

    fn in_memory(size: u64, dir: &Path) -> Result<Self> {
        let at = dir.join("ram");
        fs::create_dir_all(&at).map_err(|e| Error::io(format!("making {}", at.display()), e))?;
        let text = at.display().to_string();
        // one MiB more for the file's own blocks
        run("mount", &["-t", "tmpfs", "-o", &format!("size={}", size + (1 << 20)), "tmpfs", &text])?;
        let mut media = Self {
            device: PathBuf::new(),
            what: format!("loop device over a file of {} MiB in a tmpfs", size >> 20),
            _loop: None,
            zram: None,
            ram: Some(at.clone()),
            _dir: None,
        };
        let path = at.join("image");
        image(&path, size, true).map_err(|e| Error::io(format!("making an image of {size} bytes in memory"), e))?;
        let device = LoopDevice::attach(&path, false).map_err(|e| Error::io("attaching a loop device", e))?;
        media.device = device.path().into();
        media._loop = Some(device);
        Ok(media)
    }

    fn zram(size: u64) -> Result<Self> {
        if !Path::new("/sys/class/zram-control").exists() {
            // without the module, adding a device below says what is wrong
            let _ = run("modprobe", &["zram", "num_devices=0"]);
        }
        let failed = |e| Error::io("making a zram device (needs root and the module zram)", e);
        let number = fs::read_to_string("/sys/class/zram-control/hot_add").map_err(failed)?;
        let device = PathBuf::from(format!("/dev/zram{}", number.trim()));
        let media = Self {
            what: format!("zram of {} MiB", size >> 20),
            zram: Some(device.clone()),
            device,
            _loop: None,
            ram: None,
            _dir: None,
        };
        fs::write(format!("/sys/block/zram{}/disksize", number.trim()), size.to_string()).map_err(failed)?;
        Ok(media)
    }

    fn given(path: &Path) -> Result<Self> {
        let failed = |e| Error::io(format!("opening {}", path.display()), e);
        let device = fs::canonicalize(path).map_err(failed)?;
        if !fs::metadata(&device).map_err(failed)?.file_type().is_block_device() {
            return Err(Error::Usage(format!("{}: not a block device: use --media loop for a file", path.display())));
        }
        // fails where it is mounted or part of an array
        let how = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::EXCL | rustix::fs::OFlags::CLOEXEC;
        drop(
            rustix::fs::open(&device, how, rustix::fs::Mode::empty())
                .map_err(|e| Error::io(format!("using {} (is it mounted?)", path.display()), e))?,
        );
        let what = format!("block device {}", device.display());
        Ok(Self { device, what, _loop: None, zram: None, ram: None, _dir: None })
    }

    /// Its device file.
    pub fn device(&self) -> &Path {
        &self.device
    }
    /// The medium in words, for reports.
    pub fn what(&self) -> &str {
        &self.what
    }
}

/// An image file whose blocks are allocated, and written where `fill`: a hole or an unwritten extent would cost whoever
/// touches it first.
fn image(path: &Path, size: u64, fill: bool) -> std::io::Result<()> {
    let mut file = File::create_new(path)?;
    file.set_len(size)?;
    if fill {
        let zeros = vec![0u8; CHUNK];
        let mut left = size;
        while left > 0 {
            let n = left.min(CHUNK as u64) as usize;
            file.write_all(&zeros[..n])?;
            left -= n as u64;
        }
        return file.sync_all();
    }
    match rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, size) {
        // the file system cannot: it stays sparse
        Ok(()) | Err(rustix::io::Errno::OPNOTSUPP) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

impl Drop for Media {
    fn drop(&mut self) {
        self._loop.take();
        if let Some(zram) = self.zram.take() {
            let number = zram.display().to_string().replace("/dev/zram", "");
            let gone = fs::write(format!("/sys/block/zram{number}/reset"), "1")
                .and_then(|()| fs::write("/sys/class/zram-control/hot_remove", &number));
            if let Err(e) = gone {
                eprintln!("fxmark: removing {}: {e}", zram.display());
            }
        }
        if let Some(at) = self.ram.take() {
            let text = at.display().to_string();
            if let Err(e) = run("umount", &[&text]).or_else(|_| run("umount", &["--lazy", &text])) {
                eprintln!("fxmark: {e}");
            }
        }
    }
}
