//! Calls by path that make, move and remove names.

use crate::arguments::{fill, path, room};
use crate::error::{Fail, count, status};
use crate::volume::{Volume, fs};
use braidfs_fs::RenameMode;
use std::ffi::{c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;

/// `mkdir`: one directory, with permissions `mode` before the umask.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_mkdir(volume: *const Volume, name: *const c_char, mode: u32) -> c_int {
    // SAFETY: an open volume, a C string
    status(|| Ok(unsafe { fs(volume)?.create_dir_with(path(name)?, mode) }?))
}

/// mkdir of all that is missing on a path.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_mkdir_all(volume: *const Volume, name: *const c_char) -> c_int {
    // SAFETY: an open volume, a C string
    status(|| Ok(unsafe { fs(volume)?.create_dir_all(path(name)?) }?))
}

/// `rmdir`: removes an empty directory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_rmdir(volume: *const Volume, name: *const c_char) -> c_int {
    // SAFETY: an open volume, a C string
    status(|| Ok(unsafe { fs(volume)?.remove_dir(path(name)?) }?))
}

/// `unlink`: removes a name of what is no directory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_unlink(volume: *const Volume, name: *const c_char) -> c_int {
    // SAFETY: an open volume, a C string
    status(|| Ok(unsafe { fs(volume)?.remove_file(path(name)?) }?))
}

/// A directory and all below it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_remove_all(volume: *const Volume, name: *const c_char) -> c_int {
    // SAFETY: an open volume, a C string
    status(|| Ok(unsafe { fs(volume)?.remove_dir_all(path(name)?) }?))
}

/// `renameat2`; `flags` is 0, 1 (the new name must be free), 2 (the two change places), 4 (a whiteout stays under the old name) or 5.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_rename(
    volume: *const Volume,
    from: *const c_char,
    to: *const c_char,
    flags: u32,
) -> c_int {
    status(|| {
        let mode = match flags {
            0 => RenameMode::Replace,
            1 => RenameMode::NoReplace,
            2 => RenameMode::Exchange,
            4 => RenameMode::Whiteout,
            5 => RenameMode::NoReplaceWhiteout,
            _ => return Err(Fail::invalid("rename: unknown flags")),
        };
        // SAFETY: an open volume, C strings
        Ok(unsafe { fs(volume)?.rename_with(path(from)?, path(to)?, mode) }?)
    })
}

/// `link`: a second name for a file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_link(volume: *const Volume, original: *const c_char, link: *const c_char) -> c_int {
    // SAFETY: an open volume, C strings
    status(|| Ok(unsafe { fs(volume)?.hard_link(path(original)?, path(link)?) }?))
}

/// `symlink`: makes `link`, which points to `target`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_symlink(volume: *const Volume, target: *const c_char, link: *const c_char) -> c_int {
    // SAFETY: an open volume, C strings
    status(|| Ok(unsafe { fs(volume)?.symlink(path(target)?, path(link)?) }?))
}

/// readlink, which does not cut the target off.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn braidfs_readlink(
    volume: *const Volume,
    name: *const c_char,
    buffer: *mut c_void,
    size: usize,
) -> i64 {
    count(|| {
        // SAFETY: an open volume, a C string, room of this size
        let (fs, name, out) = unsafe { (fs(volume)?, path(name)?, room(buffer, size)?) };
        fill(out, fs.read_link(name)?.as_os_str().as_bytes())
    })
}
