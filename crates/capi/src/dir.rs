//! Listings of directories.

use crate::arguments::{needed, path, put};
use crate::error::{Fail, count, status};
use crate::handle::Handle;
use crate::volume::{Volume, fs};
use braidfs_fs::ReadDir;
use std::ffi::{c_char, c_int};
use std::os::unix::ffi::OsStrExt;
use std::sync::{Mutex, PoisonError};

/// `braidfs_dir` of the header: a listing.
pub type Dir = Handle<Mutex<ReadDir>>;

/// `struct braidfs_dirent` of the header.
#[repr(C)]
pub struct Dirent {
    ino: u64,
    /// As `d_type`: the type bits of a mode, shifted.
    kind: u32,
    name_length: u32,
    name: [u8; 256],
}

/// `opendir`: begins a listing, which [`braidfs_closedir`] ends.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_opendir(volume: *const Volume, name: *const c_char, out: *mut *mut Dir) -> c_int {
    status(|| {
        needed(out)?;
        // SAFETY: an open volume, a C string
        let entries = unsafe { fs(volume)?.read_dir(path(name)?)? };
        // SAFETY: room for a pointer
        unsafe { put(out, Dir::of(Mutex::new(entries))) }
    })
}

/// readdir: 1, or 0 at the end.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_readdir(d: *const Dir, out: *mut Dirent) -> c_int {
    let n = count(|| {
        needed(out)?;
        // SAFETY: an open listing
        let entries = unsafe { Dir::get(d) }?;
        let Some(entry) = entries.lock().unwrap_or_else(PoisonError::into_inner).next() else { return Ok(0) };
        let entry = entry?;
        let bytes = entry.file_name().as_bytes();
        let mut name = [0; 256];
        // a zero byte follows: the format has no longer names
        let room = name[..255].get_mut(..bytes.len());
        room.ok_or_else(|| Fail::new(libc::ENAMETOOLONG, "a name of more than 255 bytes"))?.copy_from_slice(bytes);
        let kind = entry.kind().d_type().into();
        // SAFETY: room for an entry
        unsafe { put(out, Dirent { ino: entry.ino(), kind, name_length: bytes.len() as u32, name }) }?;
        Ok(1)
    });
    // 0, 1 or minus an errno
    n as c_int
}

/// `closedir`; a null pointer is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_closedir(d: *mut Dir) -> c_int {
    // SAFETY: of an open listing, which the caller gives up
    unsafe { Dir::close(d) }
}
