//! Reading without a copy.

use crate::arguments::{needed, number, offset, one, put};
use crate::error::{Fail, closing, count};
use crate::file::{File, file};
use crate::fork::Process;
use crate::volume::foreign;
use std::ffi::{c_int, c_void};

/// `struct braidfs_piece` of the header, laid out as a `struct iovec`.
#[repr(C)]
pub struct Piece {
    data: *const c_void,
    size: usize,
}

/// `braidfs_pinned` of the header: what was read, with the process that did.
pub struct Pinned {
    pieces: Vec<Piece>,
    // keeps what they point to
    _pinned: braidfs_fs::Pinned,
    process: Process,
}

/// # Safety
/// The pointer is null, or of [`braidfs_read_pinned`].
unsafe fn pinned<'a>(p: *const Pinned) -> Result<&'a Pinned, Fail> {
    // SAFETY: as of the caller
    let p = unsafe { one(p) }?;
    if p.process.is_this() { Ok(p) } else { Err(foreign()) }
}

/// [`crate::file::braidfs_pread`] without a copy: the bytes read, and what keeps them until [`braidfs_unpin`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_read_pinned(f: *const File, size: usize, at: i64, out: *mut *mut Pinned) -> i64 {
    count(|| {
        needed(out)?;
        // SAFETY: an open file
        let read = unsafe { file(f)? }.read_pinned(offset(at)?, size)?;
        let n = number(read.bytes() as u64)?;
        let pieces = read.iter().map(|p| Piece { data: p.as_ptr().cast(), size: p.len() }).collect();
        let handle = Box::into_raw(Box::new(Pinned { pieces, _pinned: read, process: Process::this() }));
        // SAFETY: room for a pointer
        unsafe { put(out, handle) }?;
        Ok(n)
    })
}

/// Where the bytes are: how many pieces.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_pinned_pieces(p: *const Pinned, out: *mut *const Piece) -> i64 {
    count(|| {
        needed(out)?;
        // SAFETY: of `braidfs_read_pinned`
        let pieces = unsafe { &pinned(p)?.pieces };
        // SAFETY: room for a pointer
        unsafe { put(out, pieces.as_ptr()) }?;
        number(pieces.len() as u64)
    })
}

/// Lets go of what was read; a null pointer is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_unpin(p: *mut Pinned) -> c_int {
    closing(|| {
        if p.is_null() {
            return Ok(());
        }
        // SAFETY: of `braidfs_read_pinned`
        unsafe { pinned(p)? };
        // SAFETY: of `braidfs_read_pinned`, which the caller gives up
        drop(unsafe { Box::from_raw(p) });
        Ok(())
    })
}
