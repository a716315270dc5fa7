//! Listings of directories.

use crate::arguments::{needed, one, path, put};
use crate::error::{Fail, closing, count, status};
use crate::fork::Process;
use crate::volume::{Volume, foreign, fs};
use braidfs_fs::ReadDir;
use std::ffi::{c_char, c_int};
use std::os::unix::ffi::OsStrExt;
use std::sync::{Mutex, PoisonError};

/// `braidfs_dir` of the header: a listing, with the process that opened it.
pub struct Dir {
    entries: Mutex<ReadDir>,
    process: Process,
}

/// `struct braidfs_dirent` of the header.
#[repr(C)]
pub struct Dirent {
    ino: u64,
    /// As `d_type`: the type bits of a mode, shifted.
    kind: u32,
    name_length: u32,
    name: [u8; 256],
}

/// # Safety
/// The handle is null, or of an open listing.
unsafe fn dir<'a>(d: *const Dir) -> Result<&'a Dir, Fail> {
    // SAFETY: as of the caller
    let d = unsafe { one(d) }?;
    if d.process.is_this() { Ok(d) } else { Err(foreign()) }
}

/// `opendir`: begins a listing, which [`braidfs_closedir`] ends.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_opendir(volume: *const Volume, name: *const c_char, out: *mut *mut Dir) -> c_int {
    status(|| {
        needed(out)?;
        // SAFETY: an open volume, a C string
        let entries = unsafe { fs(volume)?.read_dir(path(name)?)? };
        let handle = Box::into_raw(Box::new(Dir { entries: Mutex::new(entries), process: Process::this() }));
        // SAFETY: room for a pointer
        unsafe { put(out, handle) }
    })
}

/// readdir: 1, or 0 at the end.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_readdir(d: *const Dir, out: *mut Dirent) -> c_int {
    let n = count(|| {
        needed(out)?;
        // SAFETY: an open listing
        let entries = unsafe { &dir(d)?.entries };
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
    closing(|| {
        if d.is_null() {
            return Ok(());
        }
        // SAFETY: of an open listing
        unsafe { dir(d)? };
        // SAFETY: of an open listing, which the caller gives up
        drop(unsafe { Box::from_raw(d) });
        Ok(())
    })
}
