//! What the tests need of a file system beyond [`FileSystem`]: directory streams, and what only some file systems have.

use crate::sys::DirStream;
use braidfs_vfs::FileSystem;
use rustix::fd::OwnedFd;
use std::ffi::CStr;
use std::io;

#[cfg(feature = "braidfs")]
pub use braidfs_vfs::Library;
pub use braidfs_vfs::{Kernel, OpenHow};

/// Room of a file system, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Space {
    /// What is used and what is available: what df(1) takes its percents of.
    pub all: u64,
    /// What its users could still write.
    pub available: u64,
}

/// A file system under test. All functions fail with what it answered.
#[allow(clippy::missing_errors_doc)] // said once, above
pub trait Fs: FileSystem + 'static {
    /// An open directory stream.
    type Dir: Send;

    /// opendir(3): an open directory, to be read from the beginning.
    fn open_dir(&self, path: &CStr) -> io::Result<Self::Dir>;
    /// readdir(3): whether there was another entry.
    fn next_entry(&self, dir: &mut Self::Dir) -> io::Result<bool>;
    /// Is O_DIRECT of any use here?
    fn has_direct(&self) -> bool;
    /// Is a file opened with [`OpenHow::sync`] durable after each write? Else who writes has to sync it.
    fn has_open_sync(&self) -> bool;
    /// Bytes of the file system, and those of them that its users could still write, as df(1) offers them.
    fn space(&self) -> io::Result<Space>;
    /// The flag NOCOW of an empty file, as chattr +C. A file system without the flag overwrites in place anyway.
    fn set_nocow(&self, file: &Self::File) -> io::Result<()>;

    /// mkdir(2) that does not mind a directory that is there.
    fn ensure_dir(&self, path: &CStr) -> io::Result<()> {
        match self.mkdir(path, 0o755) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            done => done,
        }
    }
}

impl Fs for Kernel {
    type Dir = DirStream;

    fn open_dir(&self, path: &CStr) -> io::Result<DirStream> {
        DirStream::new(Kernel::open_dir(self, path)?)
    }
    #[inline]
    fn next_entry(&self, dir: &mut DirStream) -> io::Result<bool> {
        dir.next_entry()
    }
    fn has_direct(&self) -> bool {
        true
    }
    fn has_open_sync(&self) -> bool {
        true
    }
    fn space(&self) -> io::Result<Space> {
        let s = rustix::fs::fstatvfs(Kernel::open_dir(self, c".")?)?;
        let all = (s.f_blocks - s.f_bfree + s.f_bavail) * s.f_frsize;
        Ok(Space { all, available: s.f_bavail * s.f_frsize })
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

#[cfg(feature = "braidfs")]
pub use in_process::Stream;

#[cfg(feature = "braidfs")]
mod in_process {
    use super::{Fs, Space};
    use braidfs::{DirEntry, InodeNo, OpenFile, SetAttr};
    use braidfs_vfs::{Library, call};
    use std::ffi::CStr;
    use std::io;

    /// A directory stream: names are fetched in batches, as getdents(2) does.
    #[derive(Debug)]
    pub struct Stream {
        dir: InodeNo,
        cookie: u64,
        /// Entries fetched and not yet given.
        left: usize,
    }

    /// Entries per fetch: as many of our names as 32 KiB of getdents(2) hold.
    const BATCH: usize = 1024;

    impl Fs for Library {
        type Dir = Stream;

        fn open_dir(&self, path: &CStr) -> io::Result<Stream> {
            Ok(Stream { dir: self.attr(path, true)?.ino, cookie: 0, left: 0 })
        }
        #[inline]
        fn next_entry(&self, dir: &mut Stream) -> io::Result<bool> {
            if dir.left == 0 {
                let (mut left, mut cookie) = (0, dir.cookie);
                let mut each = |e: DirEntry<'_>| {
                    if left == BATCH {
                        return false;
                    }
                    left += 1;
                    cookie = e.next;
                    std::hint::black_box(e.name);
                    true
                };
                call(self.volume.readdir(dir.dir, dir.cookie, &mut each))?;
                (dir.left, dir.cookie) = (left, cookie);
            }
            if dir.left == 0 {
                return Ok(false);
            }
            dir.left -= 1;
            Ok(true)
        }
        /// The library has no page cache of the kernel to go around.
        fn has_direct(&self) -> bool {
            false
        }
        fn has_open_sync(&self) -> bool {
            false
        }
        fn space(&self) -> io::Result<Space> {
            let s = self.volume.statfs();
            let bytes = |blocks: u64| blocks * braidfs_device::BLOCK_BYTES as u64;
            Ok(Space { all: bytes(s.blocks - s.free + s.available), available: bytes(s.available) })
        }
        fn set_nocow(&self, file: &OpenFile) -> io::Result<()> {
            let flags = call(self.volume.getattr(file.ino()))?.flags | braidfs::format::inode::NOCOW;
            call(self.volume.setattr(file.ino(), &SetAttr { flags: Some(flags), ..SetAttr::default() })).map(drop)
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
