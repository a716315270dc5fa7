//! A directory stream of the C library, as programs use it: at the end, every further call asks the kernel again.

use rustix::fd::{IntoRawFd, OwnedFd};
use std::io;
use std::ptr::NonNull;

/// An open directory stream: opendir(3), closed when it is dropped.
#[derive(Debug)]
pub struct DirStream(NonNull<libc::DIR>);

// SAFETY: a DIR may be used by any thread, one at a time; `next_entry` takes `&mut self`.
unsafe impl Send for DirStream {}

impl DirStream {
    /// Of an open directory.
    ///
    /// # Errors
    /// It is no directory.
    pub fn new(dir: OwnedFd) -> io::Result<Self> {
        let fd = dir.into_raw_fd();
        // SAFETY: fdopendir takes the descriptor over; where it fails, it does not, and we close it.
        unsafe {
            NonNull::new(libc::fdopendir(fd)).map(Self).ok_or_else(|| {
                let why = io::Error::last_os_error();
                libc::close(fd);
                why
            })
        }
    }

    /// readdir(3): is there another entry?
    ///
    /// # Errors
    /// Of the kernel.
    pub fn next_entry(&mut self) -> io::Result<bool> {
        // SAFETY: the stream is open until drop; the entry is not kept. errno is this thread's own.
        let (entry, errno) = unsafe {
            *libc::__errno_location() = 0;
            (libc::readdir64(self.0.as_ptr()), *libc::__errno_location())
        };
        match (entry.is_null(), errno) {
            (false, _) => Ok(true),
            (true, 0) => Ok(false),
            (true, e) => Err(io::Error::from_raw_os_error(e)),
        }
    }
}

impl Drop for DirStream {
    fn drop(&mut self) {
        // SAFETY: open, and nobody uses it any more. Reading only, there is nothing that closing could lose.
        unsafe { libc::closedir(self.0.as_ptr()) };
    }
}
