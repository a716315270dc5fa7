//! FS_IOC_FIEMAP: where the blocks of a file lie.

use rustix::fd::{AsFd, AsRawFd};
use std::io;

/// A run of blocks of a file, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Where in the file.
    pub logical: u64,
    /// Where on the device, or in the file system's own space of addresses.
    pub physical: u64,
    /// Its length, bytes.
    pub length: u64,
}

/// `_IOWR('f', 11, struct fiemap)`, of linux/fs.h.
const FS_IOC_FIEMAP: libc::c_ulong = 0xC020_660B;
/// Blocks that were only reserved get their place first.
const FLAG_SYNC: u32 = 1;
/// The last extent of the file.
const EXTENT_LAST: u32 = 1;
/// Extents asked for at once.
const BATCH: usize = 512;

/// `struct fiemap_extent` of linux/fiemap.h.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct RawExtent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved64: [u64; 2],
    flags: u32,
    reserved: [u32; 3],
}

/// `struct fiemap` with room for [`BATCH`] extents.
#[repr(C)]
struct Request {
    start: u64,
    length: u64,
    flags: u32,
    mapped: u32,
    count: u32,
    reserved: u32,
    extents: [RawExtent; BATCH],
}

/// All extents of an open file, rising.
///
/// # Errors
/// Of the ioctl; `Unsupported` where the file system has none, as FUSE.
pub fn extents(file: impl AsFd) -> io::Result<Vec<Extent>> {
    let mut request = Request {
        start: 0,
        length: 0,
        flags: 0,
        mapped: 0,
        count: BATCH as u32,
        reserved: 0,
        extents: [RawExtent::default(); BATCH],
    };
    let mut all = Vec::new();
    loop {
        (request.length, request.flags, request.mapped) = (u64::MAX - request.start, FLAG_SYNC, 0);
        // SAFETY: the descriptor is open; the kernel fills at most `count` extents, for which there is room, and `request`
        // is plain data, valid with any bytes.
        let answer = unsafe { libc::ioctl(file.as_fd().as_raw_fd(), FS_IOC_FIEMAP, &raw mut request) };
        if answer != 0 {
            return Err(io::Error::last_os_error());
        }
        let got = &request.extents[..(request.mapped as usize).min(BATCH)];
        all.extend(got.iter().map(|e| Extent { logical: e.logical, physical: e.physical, length: e.length }));
        let Some(last) = got.last().filter(|e| e.flags & EXTENT_LAST == 0) else { return Ok(all) };
        request.start = last.logical + last.length;
    }
}
