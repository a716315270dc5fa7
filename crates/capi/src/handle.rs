//! Handles: what the library gives out by a pointer, with the process that opened it.

use crate::arguments::one;
use crate::error::{Fail, closing};
use crate::fork::Process;
use std::ffi::c_int;

/// What a handle of C points to.
pub struct Handle<T> {
    value: T,
    process: Process,
}

impl<T> Handle<T> {
    /// A handle for `value`, which [`Self::take`] or [`Self::close`] ends.
    pub fn of(value: T) -> *mut Self {
        Box::into_raw(Box::new(Self { value, process: Process::this() }))
    }

    /// What is behind it; a handle that came by fork(2) is refused.
    ///
    /// # Safety
    /// It is null, or open.
    pub unsafe fn get<'a>(handle: *const Self) -> Result<&'a T, Fail> {
        // SAFETY: as of the caller
        let h = unsafe { one(handle) }?;
        if h.process.is_this() {
            return Ok(&h.value);
        }
        // its memory is a copy, whose threads stayed with the parent: nothing of it may run
        Err(Fail::new(
            libc::EBADF,
            "the handle was opened by the parent, before a fork: open the volume in the process that uses it",
        ))
    }

    /// What was behind it.
    ///
    /// # Safety
    /// It is open, and the caller gives it up.
    pub unsafe fn take(handle: *mut Self) -> T {
        // SAFETY: as of the caller, of `of`
        unsafe { Box::from_raw(handle) }.value
    }

    /// Drops what is behind it; a null pointer is fine.
    ///
    /// # Safety
    /// It is null, or open, and the caller gives it up.
    pub unsafe fn close(handle: *mut Self) -> c_int {
        closing(|| {
            if handle.is_null() {
                return Ok(());
            }
            // SAFETY: as of the caller
            unsafe {
                Self::get(handle)?;
                drop(Self::take(handle));
            }
            Ok(())
        })
    }
}
