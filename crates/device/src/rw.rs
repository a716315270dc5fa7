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

/// Bytes from which on a write is not made longer by the next one: several are under way at a time.
const JOIN_BYTES: usize = 1 << 19;

impl<'a> Gather<'a> {
    /// Appends `bufs`, which go to `offset`, as writes that the kernel takes whole. Where they lie behind the last one of
    /// `all`, they lengthen it: a commit writes many single blocks side by side, and each request costs as much as some
    /// blocks do.
    pub(crate) fn add(all: &mut Vec<Gather<'a>>, mut offset: u64, bufs: &[&'a [u8]]) {
        for bufs in bufs.chunks(MAX_PIECES) {
            let bytes: usize = bufs.iter().map(|b| b.len()).sum();
            let slices = bufs.iter().map(|b| IoSlice::new(b));
            match all.last_mut() {
                Some(last)
                    if last.offset + last.bytes as u64 == offset
                        && last.bytes + bytes <= JOIN_BYTES
                        && last.bufs.len() + bufs.len() <= MAX_PIECES =>
                {
                    last.bytes += bytes;
                    last.bufs.extend(slices);
                }
                _ if bytes > 0 => all.push(Gather { offset, bytes, bufs: slices.collect() }),
                _ => {}
            }
            offset += bytes as u64;
        }
    }

    /// Takes the first pieces off, of so many bytes at most, but one at least. `None`: there is no more than that.
    pub(crate) fn take_front(&mut self, bytes: usize) -> Option<Self> {
        let mut sum = 0;
        let fit = self.bufs.iter().take_while(|b| {
            sum += b.len();
            sum <= bytes
        });
        let n = fit.count().max(1);
        if n >= self.bufs.len() {
            return None;
        }
        let later = self.bufs.split_off(n);
        let bufs = std::mem::replace(&mut self.bufs, later);
        let front = Self { offset: self.offset, bytes: bufs.iter().map(|b| b.len()).sum(), bufs };
        self.offset += front.bytes as u64;
        self.bytes -= front.bytes;
        Some(front)
    }

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

#[cfg(test)]
mod tests {
    use super::*;

    /// A write that goes in pieces: all of it, in order, and no piece is longer than asked for unless it cannot be cut.
    #[test]
    fn a_write_in_pieces_is_the_same_write() {
        let bytes: Vec<u8> = (0..100).collect();
        for most in [0, 1, 3, 7, 30, 99, 100, 1000] {
            let mut write = Gather { offset: 1000, bytes: 100, bufs: bytes.chunks(7).map(IoSlice::new).collect() };
            let mut pieces = Vec::new();
            while let Some(piece) = write.take_front(most) {
                pieces.push(piece);
            }
            pieces.push(write);
            let mut at = 1000;
            for p in &pieces {
                assert_eq!((p.offset, p.bytes), (at, p.bufs.iter().map(|b| b.len()).sum()));
                assert!(p.bytes > 0 && (p.bytes <= most || p.bufs.len() == 1), "{} bytes of {most}", p.bytes);
                at += p.bytes as u64;
            }
            let all: Vec<u8> = pieces.iter().flat_map(|p| p.bufs.iter().flat_map(|b| b.to_vec())).collect();
            assert_eq!(all, bytes, "{most}");
            assert_eq!(pieces.len() == 1, most >= 100);
        }
    }

    /// What is written where, and by how many writes, is what was asked for.
    #[test]
    fn neighbours_are_one_write() {
        let bytes: Vec<u8> = (0..1 << 21).map(|i: usize| (i / 4096 % 251) as u8).collect();
        let block = |i: usize| &bytes[i * 4096..(i + 1) * 4096];
        let mut all = Vec::new();
        // side by side, in front of these, behind a hole; nothing
        for (at, from, n) in [(10, 0, 1), (11, 1, 2), (9, 3, 1), (20, 4, 1), (21, 5, 0), (21, 5, 1)] {
            let bufs: Vec<&[u8]> = (from..from + n).map(block).collect();
            Gather::add(&mut all, at * 4096, &bufs);
        }
        let told: Vec<(u64, usize)> = all.iter().map(|g| (g.offset / 4096, g.bytes / 4096)).collect();
        assert_eq!(told, [(10, 3), (9, 1), (20, 2)]);
        let content: Vec<u8> = all.iter().flat_map(|g| g.bufs.iter().map(|b| b[0])).collect();
        assert_eq!(content, [0, 1, 2, 3, 4, 5]);
        // no longer than is good, and of no more pieces than the kernel takes
        let mut all = Vec::new();
        (0..300).for_each(|i| Gather::add(&mut all, i as u64 * 4096, &[block(i)]));
        assert_eq!(
            all.iter().map(|g| g.bytes).collect::<Vec<_>>(),
            [JOIN_BYTES, JOIN_BYTES, 300 * 4096 - 2 * JOIN_BYTES]
        );
        let mut all = Vec::new();
        (0..3 * MAX_PIECES).for_each(|i| Gather::add(&mut all, i as u64, &[&bytes[..1]]));
        assert!(all.iter().all(|g| g.bufs.len() == MAX_PIECES) && all.len() == 3);
    }
}
