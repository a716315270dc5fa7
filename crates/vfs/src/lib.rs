//! One way to call a file system, whatever it is: [`Kernel`] makes system calls, `Library` calls the braidfs library in
//! this process. Benchmarks, tests and `braidfs cp` are written once, for any [`FileSystem`], and compiled for each.
//!
//! The calls are those of POSIX, by path and by open file. Paths start at the root of the file system that the value
//! stands for (or at the working directory); what a caller needs beyond it is a trait of its own over this one.
//!
//! Not promised: that a path cannot leave the root through `..` or a symlink.
//!
//! Why no crate for it: `vfs` has boxed streams by path and neither pread nor fsync, `cap-std` resolves every path in
//! several system calls and knows the kernel only, the types of `fuser` are those of a server.

mod kernel;
#[cfg(feature = "library")]
mod library;

pub use braidfs_format::file_kind::FileKind;
pub use braidfs_format::inode::Timestamp;
pub use kernel::Kernel;
#[cfg(feature = "library")]
pub use library::{Library, call};

use std::ffi::CStr;
use std::io;
use std::ops::Range;

/// How to open a file, as openat2(2)'s `struct open_how` says it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OpenHow {
    /// O_RDONLY or O_RDWR.
    pub read: bool,
    /// O_WRONLY or O_RDWR.
    pub write: bool,
    /// O_CREAT: made where it is not there.
    pub create: bool,
    /// O_EXCL: [`io::ErrorKind::AlreadyExists`] where it is there.
    pub exclusive: bool,
    /// O_TRUNC: emptied where it is there.
    pub truncate: bool,
    /// O_APPEND: writes go to the end.
    pub append: bool,
    /// O_DIRECT: past the kernel's cache; nothing to a library.
    pub direct: bool,
    /// O_SYNC: each write is durable when it returns; nothing to a library.
    pub sync: bool,
    /// O_NOFOLLOW: a symlink at the end is refused.
    pub no_follow: bool,
    /// O_DIRECTORY: what is no directory is refused.
    pub directory: bool,
    /// O_NONBLOCK: the open of a pipe waits for nobody; nothing to a library.
    pub no_wait: bool,
    /// Permissions of a new file.
    pub mode: u32,
}

impl OpenHow {
    /// O_RDONLY of a file that is there.
    pub const READ: Self = Self {
        read: true,
        write: false,
        create: false,
        exclusive: false,
        truncate: false,
        append: false,
        direct: false,
        sync: false,
        no_follow: false,
        directory: false,
        no_wait: false,
        mode: 0,
    };
    /// O_RDWR of a file that is there.
    pub const WRITE: Self = Self { write: true, ..Self::READ };
    /// O_RDWR | O_CREAT, for the owner.
    pub const CREATE: Self = Self { create: true, mode: 0o700, ..Self::WRITE };
    /// O_RDWR | O_CREAT | O_EXCL, for the owner.
    pub const FRESH: Self = Self { exclusive: true, ..Self::CREATE };

    /// The same with or without O_DIRECT.
    #[inline]
    #[must_use]
    pub const fn direct(self, direct: bool) -> Self {
        Self { direct, ..self }
    }
}

/// What stat(2) tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stat {
    /// Type of the inode.
    pub kind: FileKind,
    /// Permissions, 12 bits.
    pub mode: u32,
    /// User ID of the owner.
    pub uid: u32,
    /// ID of the owning group.
    pub gid: u32,
    /// Bytes, also of a symlink's target.
    pub size: u64,
    /// Last access to the content.
    pub atime: Timestamp,
    /// Last change of the content.
    pub mtime: Timestamp,
    /// Device number of a device file.
    pub rdev: u64,
    /// Names of the file.
    pub nlink: u64,
    /// Device and inode: tells the files of one file system apart.
    pub id: (u64, u64),
}

/// An extended attribute: its name and its value.
pub type Xattr = (Vec<u8>, Vec<u8>);

/// A file system, called from any number of threads. All functions fail with what it answered; the error's kind is that
/// of the errno.
#[allow(clippy::missing_errors_doc)] // said once, above
pub trait FileSystem: Send + Sync {
    /// An open file; closed when dropped, and nobody is told how that went.
    type File: Send;

    /// open(2) or creat(2), as `how` says.
    fn open(&self, path: &CStr, how: OpenHow) -> io::Result<Self::File>;
    /// stat(2), or lstat(2) where a symlink at the end is not to be followed.
    fn stat(&self, path: &CStr, follow: bool) -> io::Result<Stat>;
    /// fstat(2).
    fn stat_of(&self, file: &Self::File) -> io::Result<Stat>;
    /// close(2), which may tell of writes that a file system has put off: one of the network, of a quota. Closed it is all the same.
    fn close(&self, file: Self::File) -> io::Result<()>;
    /// Names in a directory, without `.` and `..`.
    fn list(&self, path: &CStr) -> io::Result<Vec<Vec<u8>>>;
    /// readlink(2): the whole target.
    fn read_link(&self, path: &CStr) -> io::Result<Vec<u8>>;
    /// mkdir(2), with permissions `mode`.
    fn mkdir(&self, path: &CStr, mode: u32) -> io::Result<()>;
    /// symlink(2): `path` is the new one.
    fn symlink(&self, target: &CStr, path: &CStr) -> io::Result<()>;
    /// link(2): `to` becomes another name of `from`, also of a symlink.
    fn link(&self, from: &CStr, to: &CStr) -> io::Result<()>;
    /// mknod(2): a pipe, a socket or a device file.
    fn mknod(&self, path: &CStr, kind: FileKind, mode: u32, rdev: u64) -> io::Result<()>;
    /// rmdir(2): of an empty directory.
    fn rmdir(&self, path: &CStr) -> io::Result<()>;
    /// unlink(2): of anything but a directory.
    fn unlink(&self, path: &CStr) -> io::Result<()>;
    /// rename(2): what `to` names is replaced.
    fn rename(&self, from: &CStr, to: &CStr) -> io::Result<()>;
    /// Gives a file owner, permissions and times of `stat`: a symlink, which has no permissions, itself where it is not to be
    /// followed. Who may not give files away keeps them, as with `cp -p`, and then without set-user-ID, set-group-ID and
    /// sticky. Nothing of another kind than `stat` says is changed.
    fn set_attributes(&self, path: &CStr, stat: &Stat, follow: bool) -> io::Result<()>;
    /// As [`FileSystem::set_attributes`], of an open file: whatever has its name by now.
    fn set_attributes_of(&self, file: &Self::File, stat: &Stat) -> io::Result<()>;
    /// llistxattr(2) and lgetxattr(2): all extended attributes of what the path names, of a symlink those of itself.
    fn xattrs(&self, path: &CStr) -> io::Result<Vec<Xattr>>;
    /// lsetxattr(2): made or replaced. Nothing of another kind is changed.
    fn set_xattr(&self, path: &CStr, kind: FileKind, name: &[u8], value: &[u8]) -> io::Result<()>;
    /// flistxattr(2) and fgetxattr(2): all extended attributes, names with values; none where the file system knows none.
    fn xattrs_of(&self, file: &Self::File) -> io::Result<Vec<Xattr>>;
    /// fsetxattr(2): made or replaced.
    fn set_xattr_of(&self, file: &Self::File, name: &[u8], value: &[u8]) -> io::Result<()>;

    /// pread(2): the number of bytes, 0 at the end.
    fn read(&self, file: &Self::File, offset: u64, buf: &mut [u8]) -> io::Result<usize>;
    /// pwrite(2): the number of bytes, fewer than wanted where there is no room for more.
    fn write(&self, file: &Self::File, offset: u64, data: &[u8]) -> io::Result<usize>;
    /// write(2) of all of `data` at the end (of a file opened with `append`, or only written here; to a pipe or a device).
    fn append(&self, file: &Self::File, data: &[u8]) -> io::Result<()>;
    /// ftruncate(2): cut off or made longer, with zeros.
    fn truncate(&self, file: &Self::File, len: u64) -> io::Result<()>;
    /// The next run of data at or after `offset`, by lseek(2)'s SEEK_DATA and SEEK_HOLE; none where a hole is all that is
    /// left.
    fn next_data(&self, file: &Self::File, offset: u64) -> io::Result<Option<Range<u64>>>;
    /// fsync(2), or fdatasync(2) where `data_only`.
    fn fsync(&self, file: &Self::File, data_only: bool) -> io::Result<()>;
    /// syncfs(2): all that returned before is durable.
    fn sync(&self) -> io::Result<()>;

    /// Fills `buf`; [`io::ErrorKind::UnexpectedEof`] where the file ends before.
    #[inline]
    fn read_exact(&self, file: &Self::File, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < buf.len() {
            match self.read(file, offset + done as u64, &mut buf[done..])? {
                0 => return Err(short(io::ErrorKind::UnexpectedEof, done, buf.len())),
                n => done += n,
            }
        }
        Ok(())
    }
    /// Writes all of `data`. After a short write the next one says what is wrong.
    #[inline]
    fn write_all(&self, file: &Self::File, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut done = 0;
        while done < data.len() {
            match self.write(file, offset + done as u64, &data[done..])? {
                0 => return Err(short(io::ErrorKind::WriteZero, done, data.len())),
                n => done += n,
            }
        }
        Ok(())
    }
}

#[cold]
fn replaced() -> io::Error {
    io::Error::other("a file of another kind has its name by now")
}

#[cold]
fn short(kind: io::ErrorKind, done: usize, wanted: usize) -> io::Error {
    io::Error::new(kind, format!("{done} bytes instead of {wanted}"))
}
