//! What a function answers where it fails.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};

/// Why a call failed.
pub struct Fail {
    errno: c_int,
    text: String,
}

impl Fail {
    /// An argument that cannot be.
    pub fn invalid(text: impl Into<String>) -> Self {
        Self { errno: libc::EINVAL, text: text.into() }
    }
    /// With this errno.
    pub fn new(errno: c_int, text: impl Into<String>) -> Self {
        Self { errno, text: text.into() }
    }
    /// The errno that a system call would give.
    pub fn errno(&self) -> c_int {
        self.errno
    }
}

impl<E: Into<braidfs_fs::Error>> From<E> for Fail {
    fn from(e: E) -> Self {
        let e = e.into();
        Self { errno: e.errno(), text: e.to_string() }
    }
}

/// A function has panicked: what it changed in memory may be half done, and is not to reach the devices.
static BROKEN: AtomicBool = AtomicBool::new(false);

/// Whether the library does nothing more.
pub fn broken() -> bool {
    BROKEN.load(Ordering::Relaxed)
}

thread_local! {
    static TEXT: RefCell<CString> = RefCell::default();
}

fn tell(fail: &Fail) {
    let mut text = fail.text.clone().into_bytes();
    text.retain(|b| *b != 0);
    let text = CString::new(text).unwrap_or_default();
    // at the end of a thread the place is gone, and nobody is left to read it
    let _ = TEXT.try_with(|t| *t.borrow_mut() = text);
}

/// Runs what a function does: its number, or minus an errno.
pub fn count(f: impl FnOnce() -> Result<i64, Fail>) -> i64 {
    let done = if broken() {
        Err(Fail::new(libc::ENOTRECOVERABLE, "the library has stopped after an error of its own: end the process"))
    } else {
        end(f)
    };
    done.unwrap_or_else(|fail| {
        tell(&fail);
        -i64::from(fail.errno)
    })
}

/// [`count`] where there is nothing to count.
pub fn status(f: impl FnOnce() -> Result<(), Fail>) -> c_int {
    // 0 or minus an errno
    count(|| f().map(|()| 0)) as c_int
}

/// Catches a panic, also where the library has stopped: for closes.
pub fn end(f: impl FnOnce() -> Result<i64, Fail>) -> Result<i64, Fail> {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|panic| {
        BROKEN.store(true, Ordering::Relaxed);
        let what = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
        let what = what.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        // its drop could panic, too
        std::mem::forget(panic);
        Err(Fail::new(libc::ENOTRECOVERABLE, format!("an error of the library itself, please report it: {what}")))
    })
}

/// [`status`] that runs also where the library has stopped.
pub fn closing(f: impl FnOnce() -> Result<(), Fail>) -> c_int {
    match end(|| f().map(|()| 0)) {
        Ok(_) => 0,
        Err(fail) => {
            tell(&fail);
            -fail.errno
        }
    }
}

/// What the last call of this thread that failed had to say; valid until another one fails.
#[unsafe(no_mangle)]
pub extern "C" fn braidfs_error() -> *const c_char {
    TEXT.try_with(|t| t.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// Version of the library.
#[unsafe(no_mangle)]
pub extern "C" fn braidfs_version() -> *const c_char {
    const VERSION: &CStr = match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
        Ok(v) => v,
        Err(_) => c"",
    };
    VERSION.as_ptr()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::volume::{braidfs_close, braidfs_open_memory};

    /// The only test here that runs calls: it stops the library in this process.
    #[test]
    fn a_panic_is_an_answer_and_the_last_one() {
        let text = || {
            // SAFETY: the text of this thread, until the next failure
            unsafe { CStr::from_ptr(braidfs_error()) }.to_str().unwrap().to_owned()
        };
        assert_eq!(status(|| Err(Fail::invalid("a zero\0byte"))), -libc::EINVAL);
        assert_eq!(text(), "a zerobyte");
        let mut volume = std::ptr::null_mut();
        // SAFETY: room for a pointer
        assert_eq!(unsafe { braidfs_open_memory(16 << 20, std::ptr::null(), &raw mut volume) }, 0);
        assert_eq!(count(|| panic!("on {}", "purpose")), -i64::from(libc::ENOTRECOVERABLE));
        assert!(text().ends_with("on purpose"), "{}", text());
        assert_eq!(status(|| Ok(())), -libc::ENOTRECOVERABLE);
        // a close goes on, writes nothing, and says so
        // SAFETY: an open volume, which is given up
        assert_eq!(unsafe { braidfs_close(volume) }, -libc::ENOTRECOVERABLE);
        assert!(text().contains("the volume is closed"), "{}", text());
        assert_eq!(closing(|| Ok(())), 0);
        assert!(broken());
    }
}
