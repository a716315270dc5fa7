//! Volumes: making, opening, closing.

use crate::arguments::{needed, options, path, put, slice};
use crate::error::{Fail, broken, closing, status};
use crate::handle::Handle;
use braidfs_fs::{Fs, Options, StatFs, parse_mkfs};
use std::ffi::{c_char, c_int};

/// `braidfs_volume` of the header: an open volume.
pub type Volume = Handle<Fs>;

/// The volume behind a handle.
///
/// # Safety
/// It is null, or of an open volume.
pub unsafe fn fs<'a>(v: *const Volume) -> Result<&'a Fs, Fail> {
    // SAFETY: as of the caller
    unsafe { Volume::get(v) }
}

/// Makes an image file and a volume in it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_format(image: *const c_char, size: u64, opts: *const c_char) -> c_int {
    status(|| {
        // SAFETY: a C string each
        let (image, opts) = unsafe { (path(image)?, options(opts)?) };
        Ok(Fs::format(image, size, &parse_mkfs(opts)?)?)
    })
}

/// Opens a volume.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_open(
    devices: *const *const c_char,
    count: usize,
    opts: *const c_char,
    volume: *mut *mut Volume,
) -> c_int {
    status(|| {
        needed(volume)?;
        // SAFETY: so many C strings, and one
        let (names, opts) = unsafe { (slice(devices, count)?, options(opts)?) };
        // SAFETY: C strings
        let paths = names.iter().map(|p| unsafe { path(*p) }).collect::<Result<Vec<_>, Fail>>()?;
        let fs = Fs::open(&paths, &Options::parse(opts)?)?;
        // SAFETY: room for a pointer
        unsafe { put(volume, Volume::of(fs)) }
    })
}

/// A new volume in memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_open_memory(size: u64, opts: *const c_char, volume: *mut *mut Volume) -> c_int {
    status(|| {
        needed(volume)?;
        // SAFETY: a C string
        let opts = unsafe { options(opts)? };
        let fs = Fs::in_memory(size, &Options::parse(opts)?)?;
        // SAFETY: room for a pointer
        unsafe { put(volume, Volume::of(fs)) }
    })
}

/// Makes all durable and closes the volume.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_close(volume: *mut Volume) -> c_int {
    closing(|| {
        if volume.is_null() {
            return Ok(());
        }
        // SAFETY: of an open volume
        if unsafe { fs(volume)? }.open_handles() > 0 && !broken() {
            return Err(Fail::new(
                libc::EBUSY,
                "files or listings of the volume are still open, or pages of it pinned: close or unpin them first",
            ));
        }
        // SAFETY: of an open volume, which the caller gives up
        let owned = unsafe { Volume::take(volume) };
        if broken() {
            owned.abandon();
            // closed, but not as who gets 0 may think
            let why = "the library has stopped after an error of its own: the volume is closed, and what was not durable \
                is lost";
            return Err(Fail::new(libc::ENOTRECOVERABLE, why));
        }
        owned.close().map_err(|e| {
            let e = braidfs_fs::Error::from(e);
            // of a device: the volume is gone, and EBUSY would say that it is there
            let errno = if e.errno() == libc::EBUSY { libc::EIO } else { e.errno() };
            Fail::new(errno, e.to_string())
        })
    })
}

/// `syncfs`: when it returns, everything survives a crash.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_sync(volume: *const Volume) -> c_int {
    // SAFETY: an open volume
    status(|| Ok(unsafe { fs(volume) }?.sync()?))
}

/// `struct braidfs_statvfs` of the header; blocks of `block_size` bytes.
#[repr(C)]
pub struct StatVfs {
    block_size: u64,
    blocks: u64,
    free: u64,
    available: u64,
    inodes: u64,
    inodes_free: u64,
    reserved: [u64; 4],
}

impl From<StatFs> for StatVfs {
    fn from(s: StatFs) -> Self {
        Self {
            block_size: 4096,
            blocks: s.blocks,
            free: s.free,
            available: s.available,
            inodes: s.inodes,
            inodes_free: s.inodes_free,
            reserved: [0; 4],
        }
    }
}

/// statvfs of the volume.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_statvfs(volume: *const Volume, out: *mut StatVfs) -> c_int {
    // SAFETY: an open volume, room for the result
    status(|| unsafe { put(out, fs(volume)?.statvfs().into()) })
}
