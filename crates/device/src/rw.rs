//! Whole reads and writes by `pread` and `pwritev`: what comes up short is continued.

use rustix::fd::{AsFd, BorrowedFd};
use rustix::io::{Errno, pread, pwritev};
use std::io::{self, IoSlice};

/// Most pieces of a write: as many pages as the kernel gives a device in one request (`BIO_MAX_VECS`). A ring leaves a
/// longer one to a worker thread of the kernel, since it may have to wait for a second request.
pub(crate) const MAX_PIECES: usize = 256;

/// A write of `bytes` bytes at `offset`, gathered from at most [`MAX_PIECES`] slices.
pub(crate) struct Gather<'a> {
    pub(crate) offset: u64,
    pub(crate) bytes: usize,
    pub(crate) bufs: Vec<IoSlice<'a>>,
}

impl Gather<'_> {
    /// Writes all but the first `done` bytes.
    pub(crate) fn finish(&mut self, fd: BorrowedFd<'_>, mut done: usize) -> io::Result<()> {
        let mut left = &mut self.bufs[..];
        IoSlice::advance_slices(&mut left, done);
        while done < self.bytes {
            match pwritev(fd, left, self.offset + done as u64) {
                Ok(0) => return Err(io::Error::new(io::ErrorKind::WriteZero, "the device takes no more bytes")),
                Ok(n) => {
                    done += n;
                    IoSlice::advance_slices(&mut left, n);
                }
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }
}

/// Fills `buf` from `offset` on.
pub(crate) fn read_exact_at(fd: impl AsFd, mut buf: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !buf.is_empty() {
        match pread(&fd, &mut *buf, offset) {
            Ok(0) => {
                let text = format!("the device ends at byte {offset}: it was truncated");
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, text));
            }
            Ok(n) => {
                buf = &mut buf[n..];
                offset += n as u64;
            }
            Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}
