//! A lock on the bytes that a device holds, by whatever name it was opened. Low-level module.
//!
//! An image can be reached by its path, and by any number of loop devices and their partitions, which are devices of their
//! own with locks of their own. So besides the lock of the device itself, a lock is held on the bytes of the image file: an
//! open file description lock (fcntl(2), F_OFD_SETLK), which has a range, as two partitions of one image do not exclude
//! each other. One level of loop devices is seen through. Over a network (NFS, SMB) the lock of the whole file (flock(2)) is a lock
//! of all of its bytes: who had that would be refused this one, so an image there that is used as it is has the former only.
//!
//! Does not promise: anything where the file cannot be found or locked (a file removed, of another mount namespace, on a
//! file system without locks, not writable): the other locks are all there is then.

use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::fs::File;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

const SECTOR: u64 = 512;

/// Held until it is dropped.
#[derive(Debug)]
pub(crate) struct RangeLock {
    /// A description of its own.
    file: OwnedFd,
}

impl RangeLock {
    /// For `device`, open for writing or only for reading; `None` where there is nothing to lock.
    ///
    /// # Errors
    /// EAGAIN, EACCES: somebody else has it.
    pub(crate) fn take(device: &File, write: bool) -> Result<Option<Self>, Errno> {
        let Some((path, start, bytes)) = bytes_of(device) else { return Ok(None) };
        let access = if write { OFlags::RDWR } else { OFlags::RDONLY };
        let file = match rustix::fs::open(&path, access | OFlags::CLOEXEC, Mode::empty()) {
            Ok(file) => file,
            Err(e) => {
                tracing::debug!(path = %path.display(), error = %e, "no lock on the bytes");
                return Ok(None);
            }
        };
        match set(&file, write, start, bytes) {
            Ok(()) => Ok(Some(Self { file })),
            Err(e @ (Errno::WOULDBLOCK | Errno::ACCESS)) => Err(e),
            Err(e) => {
                tracing::debug!(path = %path.display(), error = %e, "no lock on the bytes");
                Ok(None)
            }
        }
    }
}

impl RangeLock {
    /// Of a writer of `device`: others may read the bytes, too, from now on.
    ///
    /// # Errors
    /// Of the system; it is a writer's still.
    pub(crate) fn let_readers_in(&self, device: &File) -> Result<(), Errno> {
        let (_, start, bytes) = bytes_of(device).ok_or(Errno::NOENT)?;
        set(&self.file, false, start, bytes)
    }

    /// A descriptor that shares it, for another process.
    pub(crate) fn try_clone(&self) -> std::io::Result<OwnedFd> {
        self.file.try_clone()
    }

    /// That of another process.
    pub(crate) fn of(file: OwnedFd) -> Self {
        Self { file }
    }
}

/// The file, first byte and number of bytes (0: to its end, wherever that is) that `device` stands for.
fn bytes_of(device: &File) -> Option<(PathBuf, u64, u64)> {
    let meta = device.metadata().ok()?;
    if !meta.file_type().is_block_device() {
        if rustix::fs::fstatfs(device).is_ok_and(|fs| flock_is_of_bytes(fs.f_type)) {
            return None;
        }
        // the same file, whatever its path names now
        return Some((format!("/proc/self/fd/{}", device.as_raw_fd()).into(), 0, 0));
    }
    let sys =
        PathBuf::from(format!("/sys/dev/block/{}:{}", rustix::fs::major(meta.rdev()), rustix::fs::minor(meta.rdev())));
    let number = |path: &Path| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let whole = !sys.join("partition").exists();
    let device = if whole { sys.join("loop") } else { sys.join("../loop") };
    let file = std::fs::read_to_string(device.join("backing_file")).ok()?;
    let offset = number(&device.join("offset"))?;
    let limit = number(&device.join("sizelimit"))?;
    let file = PathBuf::from(file.trim_end_matches('\n'));
    if whole {
        return Some((file, offset, limit));
    }
    let start = number(&sys.join("start"))?.checked_mul(SECTOR)?;
    Some((file, offset.checked_add(start)?, number(&sys.join("size"))?.checked_mul(SECTOR)?))
}

/// Whether a file system of this type (statfs(2)) makes a lock of all bytes of flock(2): of NFS and SMB.
fn flock_is_of_bytes(magic: rustix::fs::FsWord) -> bool {
    // CIFS and SMB2 are no constants of all versions of the C library
    [0x6969, 0x517b, 0xff53_4d42, 0xfe53_4d42].contains(&(magic as u32))
}

fn set(file: impl AsFd, write: bool, start: u64, bytes: u64) -> Result<(), Errno> {
    let lock = libc::flock {
        l_type: if write { libc::F_WRLCK } else { libc::F_RDLCK } as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: i64::try_from(start).map_err(|_| Errno::OVERFLOW)?,
        l_len: i64::try_from(bytes).map_err(|_| Errno::OVERFLOW)?,
        l_pid: 0,
    };
    // SAFETY: F_OFD_SETLK reads one `struct flock`, which lives until the call returns.
    match unsafe { libc::fcntl(file.as_fd().as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) } {
        -1 => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
        _ => Ok(()),
    }
}
