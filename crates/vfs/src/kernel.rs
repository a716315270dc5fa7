//! The kernel's file systems, by system calls. Low-level module: the `unsafe` of one that rustix lacks is here.

use crate::{FileKind, FileSystem, OpenHow, Stat, Timestamp, Xattr};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};
use rustix::fs::{self, AtFlags, CWD, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid, XattrFlags};
use rustix::io::Errno;
use std::ffi::CStr;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::thread;

const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// Bytes of the names of all extended attributes of a file, and of one value, at most.
const XATTRS_MAX: usize = 1 << 16;

/// A mounted file system. An interrupted call is made again.
#[derive(Debug)]
pub struct Kernel {
    /// Where paths start; none: at the working directory, which costs the kernel less than a descriptor.
    root: Option<OwnedFd>,
}

impl Kernel {
    /// Paths start at the working directory of the process.
    pub const fn here() -> Self {
        Self { root: None }
    }
    /// Paths start at this directory.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn at(dir: &Path) -> io::Result<Self> {
        Ok(fs::open(dir, DIRECTORY, Mode::empty())?.into())
    }
    #[inline]
    fn root(&self) -> BorrowedFd<'_> {
        self.root.as_ref().map_or(CWD, AsFd::as_fd)
    }
    /// The directory at which paths start; none: the working directory.
    pub fn root_dir(&self) -> Option<&OwnedFd> {
        self.root.as_ref()
    }
    /// A descriptor (O_PATH) of the file itself: what takes its name meanwhile is another one. A symlink is followed, or not.
    ///
    /// # Errors
    /// Of open(2).
    pub fn itself(&self, path: &CStr, follow: bool) -> io::Result<OwnedFd> {
        let mut itself = OFlags::PATH | OFlags::CLOEXEC;
        itself.set(OFlags::NOFOLLOW, !follow);
        again(|| fs::openat(self.root(), path, itself, Mode::empty()))
    }
    /// link(2) between two places: `to` becomes another name of `from`, which is found from another root on.
    ///
    /// # Errors
    /// Of link(2).
    pub fn link_from(&self, root: &Self, from: &CStr, to: &CStr) -> io::Result<()> {
        Ok(fs::linkat(root.root(), from, self.root(), to, AtFlags::empty())?)
    }
    /// Names in the directory at which paths start, which was opened to be read, as [`FileSystem::list`] has them. By who may
    /// read it, whether they may search it or not.
    ///
    /// # Errors
    /// Of getdents(2); of a working directory, EBADF.
    pub fn list_root(&self) -> io::Result<Vec<Vec<u8>>> {
        let root = self.root.as_ref().ok_or(Errno::BADF)?;
        let mut dir = fs::Dir::new(root.try_clone()?)?;
        dir.rewind();
        names(dir)
    }
    /// Opens a directory.
    ///
    /// # Errors
    /// Of open(2).
    pub fn open_dir(&self, path: &CStr) -> io::Result<OwnedFd> {
        again(|| fs::openat(self.root(), path, DIRECTORY, Mode::empty()))
    }
}

fn names(dir: fs::Dir) -> io::Result<Vec<Vec<u8>>> {
    let names = dir.map(|e| Ok(e?.file_name().to_bytes().to_vec()));
    names.filter(|n: &io::Result<Vec<u8>>| !matches!(n.as_deref(), Ok(b"." | b".."))).collect()
}

/// Calls in a thread whose working directory is this one; that of no other changes.
fn within<T: Send>(dir: BorrowedFd<'_>, call: impl FnOnce() -> rustix::io::Result<T> + Send) -> io::Result<T> {
    let work = move || {
        // SAFETY: the kernel touches no memory of the process; no thread but this one has another working directory by it.
        if unsafe { libc::unshare(libc::CLONE_FS) } != 0 {
            return Err(io::Error::last_os_error());
        }
        rustix::process::fchdir(dir)?;
        Ok(call()?)
    };
    thread::scope(|s| {
        let done = thread::Builder::new().spawn_scoped(s, work)?.join();
        done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Paths start at this directory.
impl From<OwnedFd> for Kernel {
    fn from(dir: OwnedFd) -> Self {
        Self { root: Some(dir) }
    }
}

/// The directory at which paths start.
impl AsFd for Kernel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.root()
    }
}

/// A signal may cut a call short before it did anything.
#[inline]
fn again<T>(mut call: impl FnMut() -> rustix::io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            done => return Ok(done?),
        }
    }
}

/// Gives a file away by `chown`, as far as that is allowed, and tells the mode that it may have then: set-user-ID and
/// set-group-ID were meant for the owner and the group that `stat` says, and no others.
fn may_have(
    stat: &Stat,
    chown: impl Fn(Option<Uid>, Option<Gid>) -> rustix::io::Result<()>,
) -> rustix::io::Result<u32> {
    let gid = Some(Gid::from_raw(stat.gid));
    // the owner first: a change of owner clears setuid
    match chown(Some(Uid::from_raw(stat.uid)), gid) {
        Ok(()) => return Ok(stat.mode),
        Err(Errno::PERM) => {}
        Err(e) => return Err(e),
    }
    // a group that one is in can be had all the same
    match chown(None, gid) {
        Ok(()) | Err(Errno::PERM) => Ok(stat.mode & 0o777),
        Err(e) => Err(e),
    }
}

/// A name of what an O_PATH descriptor is of, which leads to a symlink itself, too; there is none without a /proc, in a chroot for
/// instance.
fn name_of(file: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// All extended attributes, by calls that fill a buffer with all names, and with the value of one.
fn all_xattrs(
    list: impl FnOnce(&mut [u8]) -> rustix::io::Result<usize>,
    get: impl Fn(&[u8], &mut [u8]) -> rustix::io::Result<usize>,
) -> rustix::io::Result<Vec<Xattr>> {
    let mut names = vec![0; XATTRS_MAX];
    let len = match list(&mut names) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => return Ok(Vec::new()),
        len => len?,
    };
    let (mut found, mut value) = (Vec::new(), vec![0; XATTRS_MAX]);
    for name in names[..len].split(|b| *b == 0).filter(|name| !name.is_empty()) {
        match get(name, &mut value) {
            // it is gone; or a name for something else, which cannot be read
            Err(Errno::NODATA | Errno::OPNOTSUPP) => {}
            len => found.push((name.to_vec(), value[..len?].to_vec())),
        }
    }
    Ok(found)
}

/// fchmodat2(2) of what an O_PATH descriptor is of; since Linux 6.6.
fn chmod_of(file: &OwnedFd, mode: Mode) -> io::Result<()> {
    // SAFETY: the kernel reads an empty string, which lives for ever, and no other memory.
    let done = unsafe {
        libc::syscall(libc::SYS_fchmodat2, file.as_raw_fd(), c"".as_ptr(), mode.as_raw_mode(), libc::AT_EMPTY_PATH)
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[inline]
#[allow(clippy::unnecessary_cast, reason = "some are of another width on other machines")]
fn told(s: &fs::Stat) -> Stat {
    let time = |sec: i64, nsec: u64| Timestamp { sec, nsec: nsec as u32 };
    Stat {
        kind: FileKind::from_mode(s.st_mode).unwrap_or(FileKind::File),
        mode: s.st_mode & 0o7777,
        uid: s.st_uid,
        gid: s.st_gid,
        size: s.st_size as u64,
        atime: time(s.st_atime as i64, s.st_atime_nsec as u64),
        mtime: time(s.st_mtime as i64, s.st_mtime_nsec as u64),
        rdev: s.st_rdev,
        nlink: s.st_nlink as u64,
        id: (s.st_dev, s.st_ino),
    }
}

fn times(stat: &Stat) -> Timestamps {
    let time = |t: Timestamp| Timespec { tv_sec: t.sec, tv_nsec: t.nsec.into() };
    Timestamps { last_access: time(stat.atime), last_modification: time(stat.mtime) }
}

impl FileSystem for Kernel {
    type File = OwnedFd;

    #[inline]
    fn open(&self, path: &CStr, how: OpenHow) -> io::Result<OwnedFd> {
        let access = match (how.read, how.write) {
            (true, true) => OFlags::RDWR,
            (false, true) => OFlags::WRONLY,
            _ => OFlags::RDONLY,
        };
        let mut flags = access | OFlags::CLOEXEC;
        flags.set(OFlags::CREATE, how.create);
        flags.set(OFlags::EXCL, how.exclusive);
        flags.set(OFlags::TRUNC, how.truncate);
        flags.set(OFlags::APPEND, how.append);
        flags.set(OFlags::DIRECT, how.direct);
        flags.set(OFlags::SYNC, how.sync);
        flags.set(OFlags::NOFOLLOW, how.no_follow);
        flags.set(OFlags::DIRECTORY, how.directory);
        flags.set(OFlags::NONBLOCK, how.no_wait);
        again(|| fs::openat(self.root(), path, flags, Mode::from_raw_mode(how.mode)))
    }
    #[inline]
    fn stat(&self, path: &CStr, follow: bool) -> io::Result<Stat> {
        let flags = if follow { AtFlags::empty() } else { AtFlags::SYMLINK_NOFOLLOW };
        Ok(told(&fs::statat(self.root(), path, flags)?))
    }
    #[inline]
    fn stat_of(&self, file: &OwnedFd) -> io::Result<Stat> {
        Ok(told(&fs::fstat(file)?))
    }
    fn close(&self, file: OwnedFd) -> io::Result<()> {
        // SAFETY: nobody else has the descriptor
        let done = unsafe { libc::close(file.into_raw_fd()) };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
    fn list(&self, path: &CStr) -> io::Result<Vec<Vec<u8>>> {
        names(fs::Dir::new(self.open_dir(path)?)?)
    }
    fn read_link(&self, path: &CStr) -> io::Result<Vec<u8>> {
        Ok(fs::readlinkat(self.root(), path, Vec::new())?.into_bytes())
    }
    fn mkdir(&self, path: &CStr, mode: u32) -> io::Result<()> {
        Ok(fs::mkdirat(self.root(), path, Mode::from_raw_mode(mode))?)
    }
    fn symlink(&self, target: &CStr, path: &CStr) -> io::Result<()> {
        Ok(fs::symlinkat(target, self.root(), path)?)
    }
    fn link(&self, from: &CStr, to: &CStr) -> io::Result<()> {
        Ok(fs::linkat(self.root(), from, self.root(), to, AtFlags::empty())?)
    }
    fn mknod(&self, path: &CStr, kind: FileKind, mode: u32, rdev: u64) -> io::Result<()> {
        let kind = FileType::from_raw_mode(kind.mode_bits());
        Ok(fs::mknodat(self.root(), path, kind, Mode::from_raw_mode(mode), rdev)?)
    }
    fn rmdir(&self, path: &CStr) -> io::Result<()> {
        Ok(fs::unlinkat(self.root(), path, AtFlags::REMOVEDIR)?)
    }
    #[inline]
    fn unlink(&self, path: &CStr) -> io::Result<()> {
        Ok(fs::unlinkat(self.root(), path, AtFlags::empty())?)
    }
    #[inline]
    fn rename(&self, from: &CStr, to: &CStr) -> io::Result<()> {
        Ok(fs::renameat(self.root(), from, self.root(), to)?)
    }
    fn set_attributes(&self, path: &CStr, stat: &Stat, follow: bool) -> io::Result<()> {
        let file = self.itself(path, follow)?;
        if FileKind::from_mode(fs::fstat(&file)?.st_mode) != Some(stat.kind) {
            return Err(crate::replaced());
        }
        let mode = may_have(stat, |uid, gid| fs::chownat(&file, c"", uid, gid, AtFlags::EMPTY_PATH))?;
        // where it has no such name, by newer system calls
        let name = name_of(&file);
        let mode = Mode::from_raw_mode(mode);
        if stat.kind != FileKind::Symlink {
            match fs::chmodat(CWD, &*name, mode, AtFlags::empty()) {
                Err(Errno::NOENT) if stat.kind == FileKind::Dir => {
                    fs::fchmod(again(|| fs::openat(&file, c".", DIRECTORY, Mode::empty()))?, mode)?;
                }
                Err(Errno::NOENT) => chmod_of(&file, mode)?,
                done => done?,
            }
        }
        match fs::utimensat(CWD, &*name, &times(stat), AtFlags::empty()) {
            Err(Errno::NOENT) => Ok(fs::utimensat(&file, c"", &times(stat), AtFlags::EMPTY_PATH)?),
            done => Ok(done?),
        }
    }
    fn set_attributes_of(&self, file: &OwnedFd, stat: &Stat) -> io::Result<()> {
        let mode = may_have(stat, |uid, gid| fs::fchown(file, uid, gid))?;
        fs::fchmod(file, Mode::from_raw_mode(mode))?;
        Ok(fs::futimens(file, &times(stat))?)
    }
    fn xattrs_of(&self, file: &OwnedFd) -> io::Result<Vec<Xattr>> {
        Ok(all_xattrs(|names| fs::flistxattr(file, names), |name, value| fs::fgetxattr(file, name, value))?)
    }
    fn xattrs(&self, path: &CStr) -> io::Result<Vec<Xattr>> {
        let file = self.itself(path, false)?;
        let name = name_of(&file);
        match all_xattrs(|names| fs::listxattr(&*name, names), |n, value| fs::getxattr(&*name, n, value)) {
            // no /proc
            Err(Errno::NOENT) => {
                let by_path =
                    || all_xattrs(|names| fs::llistxattr(path, names), |n, value| fs::lgetxattr(path, n, value));
                match &self.root {
                    Some(root) => within(root.as_fd(), by_path),
                    None => Ok(by_path()?),
                }
            }
            found => Ok(found?),
        }
    }
    fn set_xattr(&self, path: &CStr, kind: FileKind, name: &[u8], value: &[u8]) -> io::Result<()> {
        let file = self.itself(path, false)?;
        if FileKind::from_mode(fs::fstat(&file)?.st_mode) != Some(kind) {
            return Err(crate::replaced());
        }
        Ok(fs::setxattr(name_of(&file), name, value, XattrFlags::empty())?)
    }
    fn set_xattr_of(&self, file: &OwnedFd, name: &[u8], value: &[u8]) -> io::Result<()> {
        Ok(fs::fsetxattr(file, name, value, XattrFlags::empty())?)
    }

    #[inline]
    fn read(&self, file: &OwnedFd, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        again(|| rustix::io::pread(file, &mut *buf, offset))
    }
    #[inline]
    fn write(&self, file: &OwnedFd, offset: u64, data: &[u8]) -> io::Result<usize> {
        again(|| rustix::io::pwrite(file, data, offset))
    }
    #[inline]
    fn append(&self, file: &OwnedFd, data: &[u8]) -> io::Result<()> {
        let mut done = 0;
        while done < data.len() {
            match again(|| rustix::io::write(file, &data[done..]))? {
                0 => return Err(crate::short(io::ErrorKind::WriteZero, done, data.len())),
                n => done += n,
            }
        }
        Ok(())
    }
    #[inline]
    fn truncate(&self, file: &OwnedFd, len: u64) -> io::Result<()> {
        again(|| fs::ftruncate(file, len))
    }
    fn next_data(&self, file: &OwnedFd, offset: u64) -> io::Result<Option<Range<u64>>> {
        let start = match fs::seek(file, fs::SeekFrom::Data(offset)) {
            Ok(start) => start,
            Err(Errno::NXIO) => return Ok(None),
            // a file system that knows no holes
            Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(Some(offset..u64::MAX)),
            Err(e) => return Err(e.into()),
        };
        Ok(Some(start..fs::seek(file, fs::SeekFrom::Hole(start))?))
    }
    #[inline]
    fn fsync(&self, file: &OwnedFd, data_only: bool) -> io::Result<()> {
        again(|| if data_only { fs::fdatasync(file) } else { fs::fsync(file) })
    }
    fn sync(&self) -> io::Result<()> {
        match &self.root {
            Some(root) => Ok(fs::syncfs(root)?),
            None => Ok(fs::syncfs(self.open_dir(c".")?)?),
        }
    }
}
