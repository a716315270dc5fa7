//! Attributes, by path and by file.

use crate::arguments::{bytes, fill, name, needed, number, offset, one, path, put, room};
use crate::error::{Fail, count, status};
use crate::file::{File, file};
use crate::volume::{Volume, fs};
use braidfs_fs::{Attr, Fs, SetAttr, SetTime, Timestamp, XattrMode};
use std::ffi::{c_char, c_int, c_void};
use std::path::Path;

/// `BRAIDFS_NOFOLLOW`: the symlink at the end of the path is meant, not its target.
const NOFOLLOW: u32 = 1;
/// `BRAIDFS_TIME_NOW`, as nanoseconds: the present time.
const TIME_NOW: u32 = 0x3fff_ffff;
/// `BRAIDFS_TIME_OMIT`, as nanoseconds: the time stays as it is.
const TIME_OMIT: u32 = 0x3fff_fffe;

/// `struct braidfs_time` of the header: seconds since 1970, nanoseconds.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Time {
    sec: i64,
    nsec: u32,
    reserved: u32,
}

impl From<Timestamp> for Time {
    fn from(t: Timestamp) -> Self {
        Self { sec: t.sec, nsec: t.nsec, reserved: 0 }
    }
}

/// `struct braidfs_stat` of the header.
#[repr(C)]
pub struct Stat {
    ino: u64,
    size: u64,
    /// Allocated, in units of 512 bytes.
    blocks: u64,
    rdev: u64,
    mode: u32,
    nlink: u32,
    uid: u32,
    gid: u32,
    atime: Time,
    mtime: Time,
    ctime: Time,
    btime: Time,
    reserved: [u64; 4],
}

impl From<&Attr> for Stat {
    fn from(a: &Attr) -> Self {
        Self {
            ino: a.ino.0,
            size: a.size,
            blocks: a.sectors,
            rdev: a.rdev,
            mode: a.mode,
            nlink: a.nlink,
            uid: a.uid,
            gid: a.gid,
            atime: a.atime.into(),
            mtime: a.mtime.into(),
            ctime: a.ctime.into(),
            btime: a.btime.into(),
            reserved: [0; 4],
        }
    }
}

/// Whether symlinks at the end are followed.
fn followed(flags: u32) -> Result<bool, Fail> {
    match flags {
        0 => Ok(true),
        NOFOLLOW => Ok(false),
        _ => Err(Fail::invalid("unknown flags")),
    }
}

/// `stat`, with [`NOFOLLOW`] `lstat`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_stat(volume: *const Volume, name: *const c_char, flags: u32, out: *mut Stat) -> c_int {
    status(|| {
        // SAFETY: an open volume, a C string
        let (fs, name) = unsafe { (fs(volume)?, path(name)?) };
        let found = if followed(flags)? { fs.metadata(name)? } else { fs.symlink_metadata(name)? };
        // SAFETY: room for the result
        unsafe { put(out, found.attr().into()) }
    })
}

/// `fstat`: attributes of an open file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_fstat(f: *const File, out: *mut Stat) -> c_int {
    // SAFETY: an open file, room for the result
    status(|| unsafe { put(out, file(f)?.metadata()?.attr().into()) })
}

/// # Safety
/// An open volume, a C string.
unsafe fn set(volume: *const Volume, name: *const c_char, flags: u32, set: &SetAttr) -> Result<(), Fail> {
    // SAFETY: as of the caller
    let (fs, name) = unsafe { (fs(volume)?, path(name)?) };
    Ok(fs.set_attributes(name, followed(flags)?, set)?)
}

/// `chmod`: sets the permission bits (07777) of what a path names.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_chmod(volume: *const Volume, name: *const c_char, mode: u32) -> c_int {
    // SAFETY: an open volume, a C string
    status(|| unsafe { set(volume, name, 0, &SetAttr { mode: Some(mode & 0o7777), ..SetAttr::default() }) })
}

/// `chown`, with [`NOFOLLOW`] `lchown`; an id of `UINT32_MAX` stays.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_chown(
    volume: *const Volume,
    name: *const c_char,
    uid: u32,
    gid: u32,
    flags: u32,
) -> c_int {
    let id = |id| (id != u32::MAX).then_some(id);
    // SAFETY: an open volume, a C string
    status(|| unsafe { set(volume, name, flags, &SetAttr { uid: id(uid), gid: id(gid), ..SetAttr::default() }) })
}

fn time(t: Time) -> Result<Option<SetTime>, Fail> {
    match t.nsec {
        TIME_NOW => Ok(Some(SetTime::Now)),
        TIME_OMIT => Ok(None),
        0..1_000_000_000 => Ok(Some(SetTime::At(Timestamp { sec: t.sec, nsec: t.nsec }))),
        _ => Err(Fail::invalid("a time with more than 999999999 nanoseconds")),
    }
}

/// `utimensat` by path: sets access and modification time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_utimens(
    volume: *const Volume,
    name: *const c_char,
    atime: *const Time,
    mtime: *const Time,
    flags: u32,
) -> c_int {
    status(|| {
        // SAFETY: two times
        let (atime, mtime) = unsafe { (time(*one(atime)?)?, time(*one(mtime)?)?) };
        if atime.is_none() && mtime.is_none() {
            // SAFETY: an open volume, a C string
            let (fs, name) = unsafe { (fs(volume)?, path(name)?) };
            let there = if followed(flags)? { fs.metadata(name) } else { fs.symlink_metadata(name) };
            return Ok(there.map(drop)?);
        }
        // SAFETY: an open volume, a C string
        unsafe { set(volume, name, flags, &SetAttr { atime, mtime, ..SetAttr::default() }) }
    })
}

/// `truncate`: the file gets `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_truncate(volume: *const Volume, name: *const c_char, size: i64) -> c_int {
    // SAFETY: an open volume, a C string
    status(|| unsafe { set(volume, name, 0, &SetAttr { size: Some(offset(size)?), ..SetAttr::default() }) })
}

/// # Safety
/// An open volume, two C strings.
unsafe fn target<'a>(
    volume: *const Volume,
    at: *const c_char,
    attribute: *const c_char,
    flags: u32,
) -> Result<(&'a Fs, &'a Path, &'a [u8], bool), Fail> {
    // SAFETY: as of the caller
    unsafe { Ok((fs(volume)?, path(at)?, name(attribute)?, followed(flags)?)) }
}

/// `getxattr`: the length of the value in bytes; `size` 0 only asks for it, -ERANGE where the value is longer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_getxattr(
    volume: *const Volume,
    path: *const c_char,
    attribute: *const c_char,
    value: *mut c_void,
    size: usize,
    flags: u32,
) -> i64 {
    count(|| {
        // SAFETY: an open volume, two C strings, room of this size
        let ((fs, at, attribute, follow), out) =
            unsafe { (target(volume, path, attribute, flags)?, room(value, size)?) };
        fill(out, &fs.xattr(at, follow, attribute)?)
    })
}

/// `setxattr`; `how` is 0, 1 (only where it is missing) or 2 (only where it is there).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_setxattr(
    volume: *const Volume,
    path: *const c_char,
    attribute: *const c_char,
    value: *const c_void,
    size: usize,
    how: u32,
    flags: u32,
) -> c_int {
    status(|| {
        // SAFETY: an open volume, two C strings, so many bytes
        let ((fs, at, attribute, follow), value) =
            unsafe { (target(volume, path, attribute, flags)?, bytes(value, size)?) };
        let mode = match how {
            0 => XattrMode::Set,
            1 => XattrMode::Create,
            2 => XattrMode::Replace,
            _ => return Err(Fail::invalid("setxattr: unknown flags")),
        };
        Ok(fs.set_xattr(at, follow, attribute, value, mode)?)
    })
}

/// listxattr: each name with a zero byte behind it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_listxattr(
    volume: *const Volume,
    at: *const c_char,
    names: *mut c_void,
    size: usize,
    flags: u32,
) -> i64 {
    count(|| {
        // SAFETY: an open volume, a C string, room of this size
        let (fs, at, out) = unsafe { (fs(volume)?, path(at)?, room(names, size)?) };
        let mut all = Vec::new();
        for name in fs.xattrs(at, followed(flags)?)? {
            all.extend_from_slice(&name);
            all.push(0);
        }
        fill(out, &all)
    })
}

/// `removexattr`: -ENODATA where there is none of that name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_removexattr(
    volume: *const Volume,
    path: *const c_char,
    attribute: *const c_char,
    flags: u32,
) -> c_int {
    status(|| {
        // SAFETY: an open volume, two C strings
        let (fs, at, attribute, follow) = unsafe { target(volume, path, attribute, flags)? };
        Ok(fs.remove_xattr(at, follow, attribute)?)
    })
}

/// Bytes that a file can have more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_room(f: *const File, out: *mut u64) -> c_int {
    status(|| {
        needed(out)?;
        // SAFETY: an open file
        let space = unsafe { file(f)? }.statvfs()?;
        let bytes = number(space.available.saturating_mul(4096))?;
        // SAFETY: room for the result
        unsafe { put(out, bytes as u64) }
    })
}
