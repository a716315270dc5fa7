//! Arguments of C as values of Rust.

use crate::error::Fail;
use std::ffi::{CStr, OsStr, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

fn null() -> Fail {
    Fail::new(libc::EFAULT, "a null pointer")
}

/// What a pointer points to.
///
/// # Safety
/// It is null, or points to a value that lives as long as the call and is not written meanwhile.
pub unsafe fn one<'a, T>(p: *const T) -> Result<&'a T, Fail> {
    // SAFETY: as of the caller
    unsafe { p.as_ref() }.ok_or_else(null)
}

/// Puts a result where the caller wants it.
///
/// # Safety
/// The pointer is null, or points to room for a value.
pub unsafe fn put<T>(p: *mut T, value: T) -> Result<(), Fail> {
    if p.is_null() {
        return Err(null());
    }
    // SAFETY: as of the caller
    unsafe { p.write(value) };
    Ok(())
}

/// Refuses a null pointer for a result before anything is done.
pub fn needed<T>(p: *mut T) -> Result<(), Fail> {
    if p.is_null() { Err(null()) } else { Ok(()) }
}

/// # Safety
/// The pointer is null, or points to a string that ends with a zero byte and lives as long as the call.
unsafe fn string<'a>(p: *const c_char) -> Result<&'a CStr, Fail> {
    if p.is_null() {
        return Err(null());
    }
    // SAFETY: as of the caller
    Ok(unsafe { CStr::from_ptr(p) })
}

/// A path: any bytes.
///
/// # Safety
/// As of a C string.
pub unsafe fn path<'a>(p: *const c_char) -> Result<&'a Path, Fail> {
    // SAFETY: as of the caller
    Ok(Path::new(OsStr::from_bytes(unsafe { string(p) }?.to_bytes())))
}

/// The bytes of a C string.
///
/// # Safety
/// As of a C string.
pub unsafe fn name<'a>(p: *const c_char) -> Result<&'a [u8], Fail> {
    // SAFETY: as of the caller
    Ok(unsafe { string(p) }?.to_bytes())
}

/// Options, which are UTF-8; null: none.
///
/// # Safety
/// As of a C string.
pub unsafe fn options<'a>(p: *const c_char) -> Result<&'a str, Fail> {
    if p.is_null() {
        return Ok("");
    }
    // SAFETY: as of the caller
    unsafe { string(p) }?.to_str().map_err(|_| Fail::invalid("options that are not UTF-8"))
}

fn length<T>(p: *const T, n: usize) -> Result<(), Fail> {
    match n.checked_mul(size_of::<T>()) {
        Some(bytes) if isize::try_from(bytes).is_err() => Err(Fail::invalid("a length beyond the address space")),
        None => Err(Fail::invalid("a length beyond the address space")),
        Some(bytes) if bytes > 0 && p.is_null() => Err(null()),
        _ => Ok(()),
    }
}

/// `n` values to read.
///
/// # Safety
/// The pointer is null, or points to so many values, which nobody writes during the call.
pub unsafe fn slice<'a, T>(p: *const T, n: usize) -> Result<&'a [T], Fail> {
    length(p, n)?;
    // SAFETY: as of the caller; an empty slice needs no memory
    Ok(if n == 0 { &[] } else { unsafe { std::slice::from_raw_parts(p, n) } })
}

/// Bytes to read.
///
/// # Safety
/// As of [`slice`].
pub unsafe fn bytes<'a>(p: *const c_void, n: usize) -> Result<&'a [u8], Fail> {
    // SAFETY: as of the caller
    unsafe { slice(p.cast(), n) }
}

/// Bytes to write.
///
/// # Safety
/// The pointer is null, or points to room for so many bytes, which nobody else uses during the call.
pub unsafe fn room<'a>(p: *mut c_void, n: usize) -> Result<&'a mut [u8], Fail> {
    length::<u8>(p.cast(), n)?;
    // SAFETY: as of the caller; what the bytes were before is not looked at
    Ok(if n == 0 { &mut [] } else { unsafe { std::slice::from_raw_parts_mut(p.cast(), n) } })
}

/// A file's offset or length, which is not negative.
pub fn offset(n: i64) -> Result<u64, Fail> {
    n.try_into().map_err(|_| Fail::invalid("a negative offset or length"))
}

/// A number to answer.
pub fn number(n: u64) -> Result<i64, Fail> {
    n.try_into().map_err(|_| Fail::new(libc::EOVERFLOW, "a number beyond 63 bits"))
}

/// Fills `out` with `value` as getxattr(2) does: its length alone where there is no room at all.
pub fn fill(out: &mut [u8], value: &[u8]) -> Result<i64, Fail> {
    if !out.is_empty() {
        let room = out.get_mut(..value.len());
        room.ok_or_else(|| Fail::new(libc::ERANGE, "the buffer is too small"))?.copy_from_slice(value);
    }
    number(value.len() as u64)
}
