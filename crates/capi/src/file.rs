//! Calls on open files: reading, writing, syncing.

use crate::arguments::{bytes, needed, number, offset, path, put, room};
use crate::error::{Fail, count, end, status};
use crate::handle::Handle;
use crate::volume::{Volume, fs};
use braidfs_fs::{Advice, FallocMode, OpenOptions};
use std::ffi::{c_char, c_int, c_void};
use std::io::{Read, Seek, SeekFrom, Write};

/// `braidfs_file` of the header: an open file.
pub type File = Handle<braidfs_fs::File>;

/// The file behind a handle.
///
/// # Safety
/// It is null, or of an open file.
pub unsafe fn file<'a>(f: *const File) -> Result<&'a braidfs_fs::File, Fail> {
    // SAFETY: as of the caller
    unsafe { File::get(f) }
}

const WRONLY: u32 = 0x1;
const RDWR: u32 = 0x2;
const CREAT: u32 = 0x40;
const EXCL: u32 = 0x80;
const TRUNC: u32 = 0x200;
const APPEND: u32 = 0x400;
const NOFOLLOW: u32 = 0x2_0000;

/// `BRAIDFS_O_…` as options.
fn how(flags: u32, mode: u32) -> Result<OpenOptions, Fail> {
    let known = WRONLY | RDWR | CREAT | EXCL | TRUNC | APPEND | NOFOLLOW;
    if flags & !known != 0 || flags & WRONLY != 0 && flags & RDWR != 0 {
        return Err(Fail::invalid("open: unknown flags"));
    }
    let is = |flag| flags & flag != 0;
    if is(EXCL) && !is(CREAT) {
        return Err(Fail::invalid("open: BRAIDFS_O_EXCL without BRAIDFS_O_CREAT"));
    }
    if is(APPEND) && !is(WRONLY) && !is(RDWR) {
        return Err(Fail::invalid("open: BRAIDFS_O_APPEND without writing"));
    }
    let mut how = OpenOptions::new();
    how.read(!is(WRONLY)).write(is(WRONLY) || is(RDWR)).append(is(APPEND)).create(is(CREAT)).create_new(is(EXCL));
    how.truncate(is(TRUNC)).no_follow(is(NOFOLLOW)).mode(mode);
    Ok(how)
}

/// `open`; `mode` is that of a new file, before the umask.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_file_open(
    volume: *const Volume,
    name: *const c_char,
    flags: u32,
    mode: u32,
    out: *mut *mut File,
) -> c_int {
    status(|| {
        needed(out)?;
        // SAFETY: an open volume, a C string
        let file = unsafe { how(flags, mode)?.open(fs(volume)?, path(name)?)? };
        // SAFETY: room for a pointer
        unsafe { put(out, File::of(file)) }
    })
}

/// `close`; a null pointer is fine. Nothing is synced.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_file_close(f: *mut File) -> c_int {
    // SAFETY: of an open file, which the caller gives up
    unsafe { File::close(f) }
}

/// `pread`: bytes read, fewer than `size` only at the end.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_pread(f: *const File, buffer: *mut c_void, size: usize, at: i64) -> i64 {
    // SAFETY: an open file, room of this size
    count(|| number(unsafe { file(f)?.read_at(room(buffer, size)?, offset(at)?) }? as u64))
}

/// `pwrite`: bytes written, fewer than `size` where space runs out.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_pwrite(f: *const File, data: *const c_void, size: usize, at: i64) -> i64 {
    // SAFETY: an open file, so many bytes
    count(|| number(unsafe { file(f)?.write_at(bytes(data, size)?, offset(at)?) }? as u64))
}

/// An error of [`std::io`]'s traits.
fn inner(e: std::io::Error) -> Fail {
    match e.downcast::<braidfs_fs::Error>() {
        Ok(e) => e.into(),
        Err(e) => Fail::new(e.raw_os_error().unwrap_or(libc::EIO), e.to_string()),
    }
}

/// read, at the position.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_read(f: *const File, buffer: *mut c_void, size: usize) -> i64 {
    count(|| {
        // SAFETY: an open file, room of this size
        let (mut file, buffer) = unsafe { (file(f)?, room(buffer, size)?) };
        number(file.read(buffer).map_err(inner)? as u64)
    })
}

/// write, at the position or at the end.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_write(f: *const File, data: *const c_void, size: usize) -> i64 {
    count(|| {
        // SAFETY: an open file, so many bytes
        let (mut file, data) = unsafe { (file(f)?, bytes(data, size)?) };
        number(file.write(data).map_err(inner)? as u64)
    })
}

/// lseek, with SEEK_DATA and SEEK_HOLE.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_lseek(f: *const File, by: i64, whence: u32) -> i64 {
    count(|| {
        // SAFETY: an open file
        let mut file = unsafe { file(f)? };
        let to = match whence {
            0 => SeekFrom::Start(offset(by)?),
            1 => SeekFrom::Current(by),
            2 => SeekFrom::End(by),
            3 | 4 => {
                let found = file.seek_data(offset(by)?, whence == 4)?;
                SeekFrom::Start(found.ok_or_else(|| Fail::new(libc::ENXIO, "no data there"))?)
            }
            _ => return Err(Fail::invalid("lseek: unknown whence")),
        };
        number(file.seek(to).map_err(inner)?)
    })
}

/// `fsync`, with `data_only` `fdatasync`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_fsync(f: *const File, data_only: c_int) -> c_int {
    status(|| {
        // SAFETY: an open file
        let file = unsafe { file(f)? };
        Ok(if data_only != 0 { file.sync_data() } else { file.sync_all() }?)
    })
}

/// What is called when an fsync is done.
type Done = Option<unsafe extern "C" fn(context: *mut c_void, result: c_int)>;

/// A pointer of the caller that another thread gives back to it.
struct Context(*mut c_void);
// SAFETY: it is not looked at here, and the header says that it comes back on any thread
unsafe impl Send for Context {}

/// fsync that calls a function when it is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_fsync_start(
    f: *const File,
    data_only: c_int,
    done: Done,
    context: *mut c_void,
) -> c_int {
    status(|| {
        // SAFETY: an open file
        let file = unsafe { file(f)? };
        let done = done.ok_or_else(|| Fail::new(libc::EFAULT, "a null pointer"))?;
        let context = Context(context);
        file.sync_start(data_only != 0).on_done(Box::new(move |result| {
            let context = context;
            let result = end(|| Ok(result.map(|()| 0)?));
            let result = result.map_or_else(|fail| -fail.errno(), |_| 0);
            // SAFETY: the caller's function with the caller's context
            unsafe { done(context.0, result) };
        }));
        Ok(())
    })
}

/// `ftruncate`: the file gets `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_ftruncate(f: *const File, size: i64) -> c_int {
    // SAFETY: an open file
    status(|| Ok(unsafe { file(f)? }.set_len(offset(size)?)?))
}

/// `fallocate` by the mode bits of Linux; -EOPNOTSUPP for those that are not known.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_fallocate(f: *const File, mode: u32, at: i64, size: i64) -> c_int {
    status(|| {
        let mode = match mode {
            0 => FallocMode::Allocate { keep_size: false },
            0x1 => FallocMode::Allocate { keep_size: true },
            // as in Linux, a hole keeps the size
            0x3 => FallocMode::PunchHole,
            0x8 => FallocMode::CollapseRange,
            0x10 => FallocMode::ZeroRange { keep_size: false },
            0x11 => FallocMode::ZeroRange { keep_size: true },
            0x20 => FallocMode::InsertRange,
            _ => return Err(Fail::new(libc::EOPNOTSUPP, "fallocate: unknown mode")),
        };
        // SAFETY: an open file
        Ok(unsafe { file(f)? }.allocate(mode, offset(at)?, offset(size)?)?)
    })
}

/// `posix_fadvise`; of `size` 0, as there, all from the offset on.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_fadvise(f: *const File, at: i64, size: i64, advice: u32) -> c_int {
    status(|| {
        // SAFETY: an open file
        let file = unsafe { file(f)? };
        let (at, size) = (offset(at)?, offset(size)?);
        match advice {
            0 => file.advise(Advice::Normal),
            1 => file.advise(Advice::Random),
            2 => file.advise(Advice::Sequential),
            3 => {
                file.will_need(at, if size == 0 { u64::MAX } else { size })?;
            }
            _ => return Err(Fail::invalid("fadvise: unknown advice")),
        }
        Ok(())
    })
}
