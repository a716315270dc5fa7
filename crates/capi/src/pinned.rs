//! Reading without a copy.

use crate::arguments::{needed, number, offset, put};
use crate::error::count;
use crate::file::{File, file};
use crate::handle::Handle;
use std::ffi::{c_int, c_void};

/// `struct braidfs_piece` of the header, laid out as a `struct iovec`.
#[repr(C)]
pub struct Piece {
    data: *const c_void,
    size: usize,
}

/// `braidfs_pinned` of the header: what was read, and what keeps it.
pub type Pinned = Handle<(Vec<Piece>, braidfs_fs::Pinned)>;

/// [`crate::file::braidfs_pread`] without a copy: the bytes read, and what keeps them until [`braidfs_unpin`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_read_pinned(f: *const File, size: usize, at: i64, out: *mut *mut Pinned) -> i64 {
    count(|| {
        needed(out)?;
        // SAFETY: an open file
        let read = unsafe { file(f)? }.read_pinned(offset(at)?, size)?;
        let n = number(read.bytes() as u64)?;
        let pieces = read.iter().map(|p| Piece { data: p.as_ptr().cast(), size: p.len() }).collect();
        // SAFETY: room for a pointer
        unsafe { put(out, Pinned::of((pieces, read))) }?;
        Ok(n)
    })
}

/// Where the bytes are: how many pieces.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_pinned_pieces(p: *const Pinned, out: *mut *const Piece) -> i64 {
    count(|| {
        needed(out)?;
        // SAFETY: of `braidfs_read_pinned`
        let (pieces, _) = unsafe { Pinned::get(p) }?;
        // SAFETY: room for a pointer
        unsafe { put(out, pieces.as_ptr()) }?;
        number(pieces.len() as u64)
    })
}

/// Lets go of what was read; a null pointer is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_unpin(p: *mut Pinned) -> c_int {
    // SAFETY: of `braidfs_read_pinned`, which the caller gives up
    unsafe { Pinned::close(p) }
}
