//! The braidfs library in process: the same operations without the kernel's file layer.
//!
//! There is no O_DIRECT form: the library has no page cache of the kernel to go around.

use super::{Fs, How};
use braidfs::namespace::paths::OpenHow;
use braidfs::{Cred, Error, MkfsOptions, MountOptions, NodeId, OpenFile, RenameMode, Volume, mkfs};
use braidfs_device::{Device, FileDevice};
use std::ffi::CStr;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// A mounted volume.
#[derive(Debug)]
pub struct BraidFs {
    volume: Volume,
    cred: Cred,
}

/// A directory stream: names are fetched in batches, as getdents(2) does.
#[derive(Debug)]
pub struct BraidDir {
    dir: NodeId,
    cookie: u64,
    /// Entries fetched and not yet given.
    left: usize,
}

/// Entries per fetch: as many of our names as 32 KiB of getdents(2) hold.
const BATCH: usize = 1024;

fn host(e: Error) -> io::Error {
    match e {
        Error::Io(e) => e,
        Error::Corrupt(_) | Error::DomainFailed { .. } => io::Error::other(e.to_string()),
        e => io::Error::from_raw_os_error(e.errno()),
    }
}

fn whole(done: usize, wanted: usize) -> io::Result<()> {
    if done == wanted {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::UnexpectedEof, format!("{done} bytes instead of {wanted}")))
}

impl BraidFs {
    /// Makes a volume on `device` with the defaults.
    ///
    /// # Errors
    /// Where the device cannot be used.
    pub fn format(device: &Path) -> io::Result<()> {
        mkfs::format(&[open(device)?], &MkfsOptions::default()).map_err(host)?;
        Ok(())
    }

    /// Mounts the volume on `device` with the defaults.
    ///
    /// # Errors
    /// Where it cannot be mounted.
    pub fn mount(device: &Path) -> io::Result<Self> {
        let volume = Volume::mount(vec![open(device)?], MountOptions::default()).map_err(host)?;
        Ok(Self { volume, cred: Cred::root() })
    }

    /// Unmounts it.
    ///
    /// # Errors
    /// What was not written.
    pub fn unmount(self) -> io::Result<()> {
        self.volume.unmount().map_err(host)
    }
}

fn open(device: &Path) -> io::Result<Arc<dyn Device>> {
    let how = braidfs_device::OpenHow { write: true, direct: true };
    Ok(Arc::new(FileDevice::open(device, how).map_err(|e| io::Error::other(e.to_string()))?))
}

impl Fs for BraidFs {
    type File = OpenFile;
    type Dir = BraidDir;

    fn open(&self, path: &CStr, how: How) -> io::Result<OpenFile> {
        let open = OpenHow {
            read: true,
            write: how.write,
            create: how.create,
            exclusive: how.exclusive,
            mode: 0o700,
            ..OpenHow::default()
        };
        self.volume.open_path(path.to_bytes(), open, &self.cred).map_err(host)
    }
    fn stat(&self, path: &CStr) -> io::Result<u64> {
        Ok(self.volume.resolve(path.to_bytes(), true, &self.cred).map_err(host)?.size)
    }
    fn mkdir(&self, path: &CStr) -> io::Result<()> {
        self.volume.mkdir_path(path.to_bytes(), 0o755, &self.cred).map_err(host)?;
        Ok(())
    }
    fn rmdir(&self, path: &CStr) -> io::Result<()> {
        self.volume.rmdir_path(path.to_bytes(), &self.cred).map_err(host)
    }
    fn unlink(&self, path: &CStr) -> io::Result<()> {
        self.volume.unlink_path(path.to_bytes(), &self.cred).map_err(host)
    }
    fn rename(&self, from: &CStr, to: &CStr) -> io::Result<()> {
        self.volume.rename_path(from.to_bytes(), to.to_bytes(), RenameMode::Replace, &self.cred).map_err(host)
    }
    fn read_at(&self, file: &OpenFile, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        whole(self.volume.read(file, offset, buf).map_err(host)?, buf.len())
    }
    fn read_some(&self, file: &OpenFile, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        self.volume.read(file, offset, buf).map_err(host)
    }
    fn write_at(&self, file: &OpenFile, offset: u64, data: &[u8]) -> io::Result<()> {
        whole(self.volume.write(file, offset, data).map_err(host)?, data.len())
    }
    fn append(&self, file: &OpenFile, data: &[u8]) -> io::Result<()> {
        self.volume.append(file, data).map_err(host)?;
        Ok(())
    }
    fn truncate(&self, file: &OpenFile, len: u64) -> io::Result<()> {
        let set = braidfs::SetAttr { size: Some(len), ..braidfs::SetAttr::default() };
        self.volume.setattr(file.ino(), &set).map_err(host)?;
        Ok(())
    }
    fn fsync(&self, file: &OpenFile, data_only: bool) -> io::Result<()> {
        self.volume.fsync(file.ino(), data_only).map_err(host)
    }
    fn sync(&self) -> io::Result<()> {
        self.volume.sync().map_err(host)
    }
    fn open_dir(&self, path: &CStr) -> io::Result<BraidDir> {
        let dir = self.volume.resolve(path.to_bytes(), true, &self.cred).map_err(host)?;
        Ok(BraidDir { dir: dir.ino, cookie: 0, left: 0 })
    }
    fn next_entry(&self, dir: &mut BraidDir) -> io::Result<bool> {
        if dir.left == 0 {
            let (mut left, mut cookie) = (0, dir.cookie);
            let mut each = |e: braidfs::DirEntry<'_>| {
                if left == BATCH {
                    return false;
                }
                left += 1;
                cookie = e.next;
                std::hint::black_box(e.name);
                true
            };
            self.volume.readdir(dir.dir, dir.cookie, &mut each).map_err(host)?;
            (dir.left, dir.cookie) = (left, cookie);
        }
        if dir.left == 0 {
            return Ok(false);
        }
        dir.left -= 1;
        Ok(true)
    }
    fn set_nocow(&self, file: &OpenFile) -> io::Result<()> {
        let flags = self.volume.getattr(file.ino()).map_err(host)?.flags | braidfs::format::inode::NOCOW;
        let set = braidfs::SetAttr { flags: Some(flags), ..braidfs::SetAttr::default() };
        self.volume.setattr(file.ino(), &set).map_err(host)?;
        Ok(())
    }
    fn has_direct(&self) -> bool {
        false
    }
}
