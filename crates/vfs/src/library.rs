//! The braidfs library in this process: the same calls without the kernel's file layer.
//!
//! Paths start at the root of the volume, with or without a slash. O_DIRECT means nothing: there is no page
//! cache of the kernel to go around, and [`FileSystem::append`] says itself where it writes.

use crate::{FileKind, FileSystem, OpenHow, Stat, Xattr};
use braidfs::{
    Attr, Cred, Error, MkfsOptions, MountOptions, NewNode, OpenFile, RenameMode, SetAttr, SetTime, Volume, XattrMode,
    mkfs,
};
use braidfs_device::{Device, FileDevice};
use std::ffi::CStr;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// A mounted volume, called as one user.
#[derive(Debug)]
pub struct Library {
    /// The volume that is called.
    pub volume: Volume,
    /// Who calls, in all functions.
    pub cred: Cred,
    /// Permissions that new files do not get, but where a default ACL of the directory says what they have.
    pub umask: u32,
}

/// The answer of the library as the kernel would give it: of the errno's kind, with the library's text.
///
/// # Errors
/// The same.
#[inline]
pub fn call<T>(answer: braidfs::Result<T>) -> io::Result<T> {
    answer.map_err(error)
}

#[cold]
fn error(e: Error) -> io::Error {
    io::Error::new(io::Error::from_raw_os_error(e.errno()).kind(), e)
}

fn open(device: &Path) -> io::Result<Arc<dyn Device>> {
    let how = braidfs_device::OpenHow { write: true, direct: true };
    Ok(Arc::new(FileDevice::open(device, how).map_err(|e| io::Error::other(e.to_string()))?))
}

/// The volume takes paths relative to its root.
#[inline]
fn relative(path: &CStr) -> &[u8] {
    let path = path.to_bytes();
    match path {
        [b'/', ..] => &path[path.iter().take_while(|b| **b == b'/').count()..],
        _ => path,
    }
}

#[inline]
fn told(a: &Attr) -> Stat {
    Stat {
        kind: a.kind(),
        mode: a.mode & 0o7777,
        uid: a.uid,
        gid: a.gid,
        size: a.size,
        atime: a.atime,
        mtime: a.mtime,
        rdev: a.rdev,
        nlink: a.nlink.into(),
        id: (0, a.ino.0),
    }
}

/// What [`FileSystem::set_attributes`] sets.
fn attributes(stat: &Stat) -> SetAttr {
    SetAttr {
        mode: (stat.kind != FileKind::Symlink).then_some(stat.mode),
        uid: Some(stat.uid),
        gid: Some(stat.gid),
        atime: Some(SetTime::At(stat.atime)),
        mtime: Some(SetTime::At(stat.mtime)),
        ..SetAttr::default()
    }
}

impl Library {
    /// Makes a volume on `device`, a block device or an image, with the defaults.
    ///
    /// # Errors
    /// The device cannot be used.
    pub fn format(device: &Path) -> io::Result<()> {
        call(mkfs::format(&[open(device)?], &MkfsOptions::default())).map(drop)
    }
    /// Mounts the volume on `device` with the defaults, and calls it as root.
    ///
    /// # Errors
    /// It cannot be mounted.
    pub fn mount(device: &Path) -> io::Result<Self> {
        Self::mount_on(vec![open(device)?])
    }
    /// The device of a volume, past the kernel's page cache: for [`Library::mount_on`].
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn device(path: &Path) -> io::Result<Arc<dyn Device>> {
        open(path)
    }
    /// Mounts the volume on these devices, as [`Library::mount`] does on one: for those that count, fail or are slow.
    ///
    /// # Errors
    /// It cannot be mounted.
    pub fn mount_on(devices: Vec<Arc<dyn Device>>) -> io::Result<Self> {
        Self::mount_with(devices, MountOptions::default())
    }
    /// [`Library::mount_on`] with other options than the defaults.
    ///
    /// # Errors
    /// It cannot be mounted.
    pub fn mount_with(devices: Vec<Arc<dyn Device>>, options: MountOptions) -> io::Result<Self> {
        Ok(Self { volume: call(Volume::mount(devices, options))?, cred: Cred::root(), umask: 0 })
    }
    /// Unmounts it.
    ///
    /// # Errors
    /// What was not written.
    pub fn unmount(self) -> io::Result<()> {
        call(self.volume.unmount())
    }
    /// The inode of a path.
    ///
    /// # Errors
    /// As stat(2).
    #[inline]
    pub fn attr(&self, path: &CStr, follow: bool) -> io::Result<Attr> {
        call(self.volume.resolve(relative(path), follow, &self.cred))
    }
    fn make(&self, path: &CStr, kind: FileKind, mode: u32, rdev: u64, target: &[u8]) -> io::Result<()> {
        let (dir, name) = call(self.volume.resolve_parent(relative(path), &self.cred))?;
        call(self.volume.create(dir, name, &NewNode { kind, mode, umask: self.umask, rdev, target }, &self.cred))
            .map(drop)
    }
    /// Opens what a path names, a symlink too where it is not to be followed; nothing of another kind than `kind`.
    fn itself(&self, path: &CStr, follow: bool, kind: Option<FileKind>) -> io::Result<OpenFile> {
        let found = self.attr(path, follow)?;
        let file = call(self.volume.open(found.ino))?;
        if kind.is_some_and(|k| k != found.kind()) || file.generation() != found.generation {
            return Err(crate::replaced());
        }
        Ok(file)
    }
    /// File capabilities are not for other content, nor for another owner. The kernel takes them away at the first write;
    /// here that is done by the open for writing, so that no write has to look.
    #[inline]
    fn remove_capabilities(&self, file: &OpenFile) -> io::Result<()> {
        if !self.volume.has_capabilities(file) {
            return Ok(());
        }
        match self.volume.remove_capabilities(file.ino()) {
            Err(Error::NoAttr) => Ok(()),
            done => call(done),
        }
    }
}

impl FileSystem for Library {
    type File = OpenFile;

    #[inline]
    fn open(&self, path: &CStr, how: OpenHow) -> io::Result<OpenFile> {
        let OpenHow { read, write, append, create, exclusive, truncate, no_follow, directory, mode, .. } = how;
        let how = braidfs::OpenHow {
            read,
            write,
            append,
            create,
            exclusive,
            truncate,
            no_follow,
            mode,
            umask: self.umask,
            ..Default::default()
        };
        let file = call(self.volume.open_path(relative(path), how, &self.cred))?;
        if write || truncate {
            self.remove_capabilities(&file)?;
        }
        if directory && call(self.volume.getattr(file.ino()))?.kind() != FileKind::Dir {
            return Err(error(Error::NotDir));
        }
        Ok(file)
    }
    #[inline]
    fn stat(&self, path: &CStr, follow: bool) -> io::Result<Stat> {
        Ok(told(&self.attr(path, follow)?))
    }
    #[inline]
    fn stat_of(&self, file: &OpenFile) -> io::Result<Stat> {
        Ok(told(&call(self.volume.getattr(file.ino()))?))
    }
    fn close(&self, file: OpenFile) -> io::Result<()> {
        // what was put off is the volume's
        drop(file);
        Ok(())
    }
    fn list(&self, path: &CStr) -> io::Result<Vec<Vec<u8>>> {
        let (dir, mut names) = (self.attr(path, true)?, Vec::new());
        call(self.volume.readdir(dir.ino, 0, &mut |e| {
            if e.name != b"." && e.name != b".." {
                names.push(e.name.to_vec());
            }
            true
        }))?;
        Ok(names)
    }
    fn read_link(&self, path: &CStr) -> io::Result<Vec<u8>> {
        call(self.volume.readlink(self.attr(path, false)?.ino))
    }
    fn mkdir(&self, path: &CStr, mode: u32) -> io::Result<()> {
        call(self.volume.mkdir_path_with(relative(path), mode, self.umask, &self.cred)).map(drop)
    }
    fn symlink(&self, target: &CStr, path: &CStr) -> io::Result<()> {
        self.make(path, FileKind::Symlink, 0o777, 0, target.to_bytes())
    }
    fn link(&self, from: &CStr, to: &CStr) -> io::Result<()> {
        call(self.volume.link_path(relative(from), relative(to), &self.cred))
    }
    fn mknod(&self, path: &CStr, kind: FileKind, mode: u32, rdev: u64) -> io::Result<()> {
        self.make(path, kind, mode, rdev, b"")
    }
    fn rmdir(&self, path: &CStr) -> io::Result<()> {
        call(self.volume.rmdir_path(relative(path), &self.cred))
    }
    #[inline]
    fn unlink(&self, path: &CStr) -> io::Result<()> {
        call(self.volume.unlink_path(relative(path), &self.cred))
    }
    #[inline]
    fn rename(&self, from: &CStr, to: &CStr) -> io::Result<()> {
        call(self.volume.rename_path(relative(from), relative(to), RenameMode::Replace, &self.cred))
    }
    fn set_attributes(&self, path: &CStr, stat: &Stat, follow: bool) -> io::Result<()> {
        self.set_attributes_of(&self.itself(path, follow, Some(stat.kind))?, stat)
    }
    fn set_attributes_of(&self, file: &OpenFile, stat: &Stat) -> io::Result<()> {
        self.remove_capabilities(file)?;
        call(self.volume.setattr(file.ino(), &attributes(stat))).map(drop)
    }
    fn xattrs_of(&self, file: &OpenFile) -> io::Result<Vec<Xattr>> {
        let names = call(self.volume.listxattr(file.ino()))?;
        let value = |name: Vec<u8>| match self.volume.getxattr(file.ino(), &name) {
            Err(Error::NoAttr) => None,
            value => Some(call(value).map(|value| (name, value))),
        };
        names.into_iter().filter_map(value).collect()
    }
    fn xattrs(&self, path: &CStr) -> io::Result<Vec<Xattr>> {
        self.xattrs_of(&self.itself(path, false, None)?)
    }
    fn set_xattr(&self, path: &CStr, kind: FileKind, name: &[u8], value: &[u8]) -> io::Result<()> {
        self.set_xattr_of(&self.itself(path, false, Some(kind))?, name, value)
    }
    fn set_xattr_of(&self, file: &OpenFile, name: &[u8], value: &[u8]) -> io::Result<()> {
        call(self.volume.setxattr(file.ino(), name, value, XattrMode::Set))
    }

    #[inline]
    fn read(&self, file: &OpenFile, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        call(self.volume.read(file, offset, buf))
    }
    #[inline]
    fn write(&self, file: &OpenFile, offset: u64, data: &[u8]) -> io::Result<usize> {
        call(self.volume.write(file, offset, data))
    }
    #[inline]
    fn append(&self, file: &OpenFile, data: &[u8]) -> io::Result<()> {
        call(self.volume.append(file, data)).map(drop)
    }
    #[inline]
    fn truncate(&self, file: &OpenFile, len: u64) -> io::Result<()> {
        let set = SetAttr { size: Some(len), ..SetAttr::default() };
        call(self.volume.setattr(file.ino(), &set)).map(drop)
    }
    fn next_data(&self, file: &OpenFile, offset: u64) -> io::Result<Option<Range<u64>>> {
        let start = match self.volume.seek(file, offset, false) {
            Ok(start) => start,
            Err(Error::NoData) => return Ok(None),
            Err(e) => return Err(error(e)),
        };
        Ok(Some(start..call(self.volume.seek(file, start, true))?))
    }
    #[inline]
    fn fsync(&self, file: &OpenFile, data_only: bool) -> io::Result<()> {
        call(self.volume.fsync(file.ino(), data_only))
    }
    fn sync(&self) -> io::Result<()> {
        call(self.volume.sync())
    }
}
