//! Where a panic ends: work that others wait for, or that is done again and again, is told apart from the thread that does it.

use crate::error::Error;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Does `work`, what `what` calls it; `None` where it panics, which the log is told. What it changed may be half done: who calls
/// this sees to it that nobody takes that for whole.
pub(crate) fn caught<T>(what: &str, work: impl FnOnce() -> T) -> Option<T> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(done) => Some(done),
        Err(panic) => {
            // it may be a user's, whose drop could panic, too
            std::mem::forget(panic);
            tracing::error!("a panic in {what}");
            None
        }
    }
}

/// The error of who waits for work that has panicked.
pub(crate) fn error_of(what: &str) -> Error {
    Error::Io(io::Error::other(format!("a thread panicked in {what}")))
}
