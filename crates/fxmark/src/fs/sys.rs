//! The kernel's file systems, by system calls. Relative paths start at the working directory of the process.

use super::{Fs, How};
use crate::sys::DirStream;
use rustix::fd::OwnedFd;
use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use std::ffi::CStr;
use std::io;

/// The working directory.
#[derive(Debug)]
pub struct SysFs {
    root: OwnedFd,
}

impl SysFs {
    /// For the working directory.
    ///
    /// # Errors
    /// Where it cannot be opened.
    pub fn here() -> io::Result<Self> {
        let root = rustix::fs::openat(CWD, c".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Self { root })
    }
}

fn whole(done: usize, wanted: usize) -> io::Result<()> {
    if done == wanted {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::UnexpectedEof, format!("{done} bytes instead of {wanted}")))
}

/// A signal may cut a call short before it did anything.
fn again<T>(mut call: impl FnMut() -> rustix::io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(rustix::io::Errno::INTR) => {}
            done => return Ok(done?),
        }
    }
}

impl Fs for SysFs {
    type File = OwnedFd;
    type Dir = DirStream;

    fn open(&self, path: &CStr, how: How) -> io::Result<OwnedFd> {
        let mut flags = if how.write { OFlags::RDWR } else { OFlags::RDONLY };
        flags.set(OFlags::CREATE, how.create);
        flags.set(OFlags::EXCL, how.exclusive);
        flags.set(OFlags::APPEND, how.append);
        flags.set(OFlags::DIRECT, how.direct);
        again(|| rustix::fs::openat(CWD, path, flags, Mode::from_raw_mode(0o700)))
    }
    fn stat(&self, path: &CStr) -> io::Result<u64> {
        Ok(rustix::fs::statat(CWD, path, AtFlags::empty())?.st_size as u64)
    }
    fn mkdir(&self, path: &CStr) -> io::Result<()> {
        Ok(rustix::fs::mkdirat(CWD, path, Mode::from_raw_mode(0o755))?)
    }
    fn rmdir(&self, path: &CStr) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(CWD, path, AtFlags::REMOVEDIR)?)
    }
    fn unlink(&self, path: &CStr) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(CWD, path, AtFlags::empty())?)
    }
    fn rename(&self, from: &CStr, to: &CStr) -> io::Result<()> {
        Ok(rustix::fs::renameat(CWD, from, CWD, to)?)
    }
    fn read_at(&self, file: &OwnedFd, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        whole(again(|| rustix::io::pread(file, &mut *buf, offset))?, buf.len())
    }
    fn read_some(&self, file: &OwnedFd, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        again(|| rustix::io::pread(file, &mut *buf, offset))
    }
    fn write_at(&self, file: &OwnedFd, offset: u64, data: &[u8]) -> io::Result<()> {
        whole(again(|| rustix::io::pwrite(file, data, offset))?, data.len())
    }
    fn append(&self, file: &OwnedFd, data: &[u8]) -> io::Result<()> {
        whole(again(|| rustix::io::write(file, data))?, data.len())
    }
    fn truncate(&self, file: &OwnedFd, len: u64) -> io::Result<()> {
        again(|| rustix::fs::ftruncate(file, len))
    }
    fn fsync(&self, file: &OwnedFd, data_only: bool) -> io::Result<()> {
        again(|| if data_only { rustix::fs::fdatasync(file) } else { rustix::fs::fsync(file) })
    }
    fn sync(&self) -> io::Result<()> {
        Ok(rustix::fs::syncfs(&self.root)?)
    }
    fn open_dir(&self, path: &CStr) -> io::Result<DirStream> {
        let how = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        DirStream::new(rustix::fs::openat(CWD, path, how, Mode::empty())?)
    }
    fn next_entry(&self, dir: &mut DirStream) -> io::Result<bool> {
        dir.next_entry()
    }
    fn set_nocow(&self, file: &OwnedFd) -> io::Result<()> {
        use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};
        use rustix::io::Errno;
        let set = ioctl_getflags(file).and_then(|flags| ioctl_setflags(file, flags | IFlags::NOCOW));
        match set {
            Err(Errno::OPNOTSUPP | Errno::NOTTY | Errno::INVAL) => Ok(()),
            done => Ok(done?),
        }
    }
}
