//! The file systems under test, behind one trait: [`SysFs`] calls the kernel, `BraidFs` the braidfs library in process.
//!
//! Paths are relative to the root of the test. An error is what the file system answered; a short read or write is
//! one, too, since no test expects it.

#[cfg(feature = "braidfs")]
mod braid;
mod sys;

#[cfg(feature = "braidfs")]
pub use braid::BraidFs;
pub use sys::SysFs;

use std::ffi::CStr;
use std::io;

/// How to open a file. Always for reading; `write` adds writing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct How {
    /// O_RDWR instead of O_RDONLY.
    pub write: bool,
    /// O_CREAT.
    pub create: bool,
    /// O_EXCL.
    pub exclusive: bool,
    /// O_APPEND.
    pub append: bool,
    /// O_DIRECT.
    pub direct: bool,
}

impl How {
    /// O_RDONLY.
    pub const READ: Self = Self { write: false, create: false, exclusive: false, append: false, direct: false };
    /// O_RDWR.
    pub const WRITE: Self = Self { write: true, ..Self::READ };
    /// O_RDWR | O_CREAT.
    pub const CREATE: Self = Self { create: true, ..Self::WRITE };
    /// O_RDWR | O_CREAT | O_EXCL.
    pub const FRESH: Self = Self { exclusive: true, ..Self::CREATE };

    /// The same with or without O_DIRECT.
    #[must_use]
    pub const fn direct(self, direct: bool) -> Self {
        Self { direct, ..self }
    }
}

/// A file system under test. All functions fail with what it answered.
#[allow(clippy::missing_errors_doc)] // said once, above
pub trait Fs: Send + Sync + 'static {
    /// An open file; closed when dropped.
    type File: Send;
    /// An open directory stream.
    type Dir: Send;

    /// open(2).
    fn open(&self, path: &CStr, how: How) -> io::Result<Self::File>;
    /// stat(2): the size.
    fn stat(&self, path: &CStr) -> io::Result<u64>;
    /// mkdir(2).
    fn mkdir(&self, path: &CStr) -> io::Result<()>;
    /// rmdir(2).
    fn rmdir(&self, path: &CStr) -> io::Result<()>;
    /// unlink(2).
    fn unlink(&self, path: &CStr) -> io::Result<()>;
    /// rename(2).
    fn rename(&self, from: &CStr, to: &CStr) -> io::Result<()>;
    /// pread(2) of all of `buf`.
    fn read_at(&self, file: &Self::File, offset: u64, buf: &mut [u8]) -> io::Result<()>;
    /// pread(2) of what there is; the number of bytes.
    fn read_some(&self, file: &Self::File, offset: u64, buf: &mut [u8]) -> io::Result<usize>;
    /// pwrite(2) of all of `data`.
    fn write_at(&self, file: &Self::File, offset: u64, data: &[u8]) -> io::Result<()>;
    /// write(2) of all of `data` at the end (of a file opened with `append`, or only written here).
    fn append(&self, file: &Self::File, data: &[u8]) -> io::Result<()>;
    /// ftruncate(2).
    fn truncate(&self, file: &Self::File, len: u64) -> io::Result<()>;
    /// fsync(2), or fdatasync(2) where `data_only`.
    fn fsync(&self, file: &Self::File, data_only: bool) -> io::Result<()>;
    /// syncfs(2).
    fn sync(&self) -> io::Result<()>;
    /// opendir(3).
    fn open_dir(&self, path: &CStr) -> io::Result<Self::Dir>;
    /// readdir(3): whether there was another entry.
    fn next_entry(&self, dir: &mut Self::Dir) -> io::Result<bool>;

    /// Is O_DIRECT of any use here?
    fn has_direct(&self) -> bool {
        true
    }
    /// The flag NOCOW of an empty file, as chattr +C. A file system without the flag overwrites in place anyway.
    fn set_nocow(&self, _: &Self::File) -> io::Result<()> {
        Ok(())
    }
    /// mkdir(2) that does not mind a directory that is there.
    fn ensure_dir(&self, path: &CStr) -> io::Result<()> {
        match self.mkdir(path) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            done => done,
        }
    }
}

/// A buffer that O_DIRECT takes.
#[repr(C, align(4096))]
pub struct Page(pub [u8; 4096]);

impl Page {
    /// Filled with a pattern that does not compress to nothing.
    pub fn new() -> Box<Self> {
        let mut page = Box::new(Self([0; 4096]));
        let mut rng = crate::names::Rng::new(7, 0);
        page.0.chunks_exact_mut(8).for_each(|c| c.copy_from_slice(&rng.draw().to_le_bytes()));
        page
    }
}

impl std::fmt::Debug for Page {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Page")
    }
}
