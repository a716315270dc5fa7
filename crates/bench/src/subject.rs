//! What is measured: the library on an image file, and kernel file systems through system calls.

use crate::Result;
use braidfs::namespace::paths::OpenHow;
use braidfs::{Cred, MkfsOptions, MountOptions, OpenFile, RenameMode, Volume, mkfs};
use braidfs_device::{Device, FileDevice};
use rustix::fd::OwnedFd;
use rustix::fs::{AtFlags, Mode, OFlags};
use std::ffi::CStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

/// A file system under test. Paths are relative to its root, so that both sides look up the same number of parts.
pub trait Subject: Sync {
    /// An open file.
    type File: Send;
    /// Makes a directory.
    fn mkdir(&self, path: &CStr) -> Result<()>;
    /// Opens for reading and writing.
    fn open(&self, path: &CStr) -> Result<Self::File>;
    /// Makes an empty file, which must not exist, and closes it.
    fn create(&self, path: &CStr) -> Result<()>;
    /// Size of a file, by its path.
    fn stat(&self, path: &CStr) -> Result<u64>;
    /// Removes a file.
    fn unlink(&self, path: &CStr) -> Result<()>;
    /// Renames a file.
    fn rename(&self, from: &CStr, to: &CStr) -> Result<()>;
    /// Writes all of `data`.
    fn write(&self, file: &Self::File, offset: u64, data: &[u8]) -> Result<()>;
    /// Fills `buf`.
    fn read(&self, file: &Self::File, offset: u64, buf: &mut [u8]) -> Result<()>;
    /// Makes everything durable.
    fn sync(&self) -> Result<()>;
}

/// `braidfs::Volume` on an image file with direct I/O, called as a library.
#[derive(Debug)]
pub struct Library {
    volume: Volume,
    cred: Cred,
}

impl Library {
    /// Formats an image of `bytes` bytes at `image` and mounts it.
    ///
    /// # Errors
    /// Where the image cannot be made.
    pub fn make(image: &Path, bytes: u64, options: MountOptions) -> Result<Self> {
        let device = image_device(image, bytes)?;
        mkfs::format(std::slice::from_ref(&device), &MkfsOptions::default())?;
        Ok(Self { volume: Volume::mount(vec![device], options)?, cred: Cred::root() })
    }
    /// The volume.
    pub fn volume(&self) -> &Volume {
        &self.volume
    }
}

/// A new sparse image, opened past the page cache.
///
/// # Errors
/// Where it cannot be made or opened.
pub fn image_device(image: &Path, bytes: u64) -> Result<Arc<dyn Device>> {
    drop(FileDevice::create(image, bytes)?);
    Ok(Arc::new(FileDevice::open(image, braidfs_device::OpenHow { write: true, direct: true })?))
}

const OPEN: OpenHow =
    OpenHow { read: true, write: true, create: false, exclusive: false, truncate: false, no_follow: false, mode: 0 };

impl Subject for Library {
    type File = OpenFile;
    fn mkdir(&self, path: &CStr) -> Result<()> {
        self.volume.mkdir_path(path.to_bytes(), 0o755, &self.cred)?;
        Ok(())
    }
    fn open(&self, path: &CStr) -> Result<OpenFile> {
        Ok(self.volume.open_path(path.to_bytes(), OPEN, &self.cred)?)
    }
    fn create(&self, path: &CStr) -> Result<()> {
        let how = OpenHow { create: true, exclusive: true, mode: 0o644, ..OPEN };
        self.volume.open_path(path.to_bytes(), how, &self.cred)?;
        Ok(())
    }
    fn stat(&self, path: &CStr) -> Result<u64> {
        Ok(self.volume.resolve(path.to_bytes(), true, &self.cred)?.size)
    }
    fn unlink(&self, path: &CStr) -> Result<()> {
        Ok(self.volume.unlink_path(path.to_bytes(), &self.cred)?)
    }
    fn rename(&self, from: &CStr, to: &CStr) -> Result<()> {
        Ok(self.volume.rename_path(from.to_bytes(), to.to_bytes(), RenameMode::Replace, &self.cred)?)
    }
    fn write(&self, file: &OpenFile, offset: u64, data: &[u8]) -> Result<()> {
        let n = self.volume.write(file, offset, data)?;
        if n == data.len() { Ok(()) } else { Err("short write".into()) }
    }
    fn read(&self, file: &OpenFile, offset: u64, buf: &mut [u8]) -> Result<()> {
        let n = self.volume.read(file, offset, buf)?;
        if n == buf.len() { Ok(()) } else { Err("short read".into()) }
    }
    fn sync(&self) -> Result<()> {
        Ok(self.volume.sync()?)
    }
}

/// A file system that the kernel has mounted for the benchmark; unmounted when dropped.
#[derive(Debug)]
pub struct Mounted {
    root: Option<OwnedFd>,
    at: PathBuf,
}

fn run(program: &str, args: &[&str]) -> Result<String> {
    let out = Command::new(program).args(args).output().map_err(|e| format!("{program}: {e}"))?;
    if out.status.success() {
        Ok(String::from_utf8_lossy(&out.stdout).trim().to_owned())
    } else {
        Err(format!("{program} {}: {}", args.join(" "), String::from_utf8_lossy(&out.stderr).trim()).into())
    }
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().ok_or_else(|| format!("{}: not UTF-8", path.display()).into())
}

impl Mounted {
    fn at(at: PathBuf) -> Result<Self> {
        let root = rustix::fs::open(&at, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Self { root: Some(root), at })
    }

    /// tmpfs of `bytes` bytes at a new directory `at`. Needs root.
    ///
    /// # Errors
    /// Where it cannot be mounted.
    pub fn tmpfs(at: &Path, bytes: u64) -> Result<Self> {
        std::fs::create_dir(at)?;
        run("mount", &["-t", "tmpfs", "-o", &format!("size={bytes}"), "tmpfs", text(at)?])?;
        Self::at(at.to_owned())
    }

    /// ext4 with its defaults on a loop device (direct I/O) over a new image of `bytes` bytes, mounted at a new
    /// directory `at`. Needs root.
    ///
    /// # Errors
    /// Where it cannot be made or mounted.
    pub fn ext4(image: &Path, at: &Path, bytes: u64) -> Result<Self> {
        std::fs::create_dir(at)?;
        std::fs::File::create_new(image)?.set_len(bytes)?;
        // everything is laid out at once: no lazy initialisation works behind the measurement
        run("mkfs.ext4", &["-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", text(image)?])?;
        let device = run("losetup", &["--find", "--show", "--direct-io=on", text(image)?])
            .or_else(|_| run("losetup", &["--find", "--show", text(image)?]))?;
        let mounted = run("mount", &["-t", "ext4", &device, text(at)?]);
        // in use by the mount, it goes away with it
        run("losetup", &["--detach", &device])?;
        mounted?;
        Self::at(at.to_owned())
    }

    fn root(&self) -> &OwnedFd {
        // taken by `drop` only
        self.root.as_ref().unwrap_or_else(|| unreachable!("used after unmount"))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        self.root.take();
        let done = text(&self.at).and_then(|at| run("umount", &[at]).or_else(|_| run("umount", &["--lazy", at])));
        if let Err(e) = done {
            eprintln!("{e}");
        }
    }
}

impl Subject for Mounted {
    type File = OwnedFd;
    fn mkdir(&self, path: &CStr) -> Result<()> {
        Ok(rustix::fs::mkdirat(self.root(), path, Mode::from_raw_mode(0o755))?)
    }
    fn open(&self, path: &CStr) -> Result<OwnedFd> {
        Ok(rustix::fs::openat(self.root(), path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?)
    }
    fn create(&self, path: &CStr) -> Result<()> {
        let how = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        rustix::fs::openat(self.root(), path, how, Mode::from_raw_mode(0o644))?;
        Ok(())
    }
    fn stat(&self, path: &CStr) -> Result<u64> {
        Ok(rustix::fs::statat(self.root(), path, AtFlags::empty())?.st_size as u64)
    }
    fn unlink(&self, path: &CStr) -> Result<()> {
        Ok(rustix::fs::unlinkat(self.root(), path, AtFlags::empty())?)
    }
    fn rename(&self, from: &CStr, to: &CStr) -> Result<()> {
        Ok(rustix::fs::renameat(self.root(), from, self.root(), to)?)
    }
    fn write(&self, file: &OwnedFd, offset: u64, data: &[u8]) -> Result<()> {
        if rustix::io::pwrite(file, data, offset)? == data.len() { Ok(()) } else { Err("short write".into()) }
    }
    fn read(&self, file: &OwnedFd, offset: u64, buf: &mut [u8]) -> Result<()> {
        if rustix::io::pread(file, &mut *buf, offset)? == buf.len() { Ok(()) } else { Err("short read".into()) }
    }
    fn sync(&self) -> Result<()> {
        Ok(rustix::fs::syncfs(self.root())?)
    }
}
