//! What can go wrong: a failed operation of the file system under test, of the machine around it, or of the user.

use std::ffi::CStr;
use std::io;
use std::path::Path;

/// A [`std::result::Result`] with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a run stopped. Messages read "what: where: what to do".
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An operation of the file system under test failed: the run does not count.
    #[error("{op} {path}: {why}")]
    Op {
        /// The operation, as the manual calls it.
        op: &'static str,
        /// What it was done to.
        path: String,
        /// The file system's answer.
        why: io::Error,
    },
    /// Something around it failed.
    #[error("{what}: {why}")]
    Io {
        /// What was done, and to what.
        what: String,
        /// The system's answer.
        why: io::Error,
    },
    /// A program that was called failed.
    #[error("`{command}` failed: {said}")]
    Command {
        /// The whole command.
        command: String,
        /// What it wrote to standard error.
        said: String,
    },
    /// The file system does not offer what the test needs: the cell is left out, and the result says so.
    #[error("{0}")]
    Unsupported(String),
    /// Arguments that do not fit together.
    #[error("{0}")]
    Usage(String),
    /// A results file that cannot be used.
    #[error("{path}: {why}")]
    Results {
        /// The results file.
        path: String,
        /// What is wrong with it.
        why: String,
    },
    /// A worker failed, with its message.
    #[error("{test} on {target} with {cores} core(s): {why}")]
    Run {
        /// Name of the test.
        test: String,
        /// Name of the target.
        target: String,
        /// Number of cores.
        cores: usize,
        /// The first failure.
        why: String,
    },
    /// SIGINT or SIGTERM.
    #[error("interrupted")]
    Interrupted,
    /// What is none of these, in words.
    #[error("{0}")]
    Other(String),
}

impl Error {
    /// With what was done and to what.
    pub fn io(what: impl Into<String>, why: impl Into<io::Error>) -> Self {
        Self::Io { what: what.into(), why: why.into() }
    }
    /// Of a results file.
    pub fn results(path: &Path, why: impl std::fmt::Display) -> Self {
        Self::Results { path: path.display().to_string(), why: why.to_string() }
    }
    /// Is it an operation that found no room?
    pub fn no_space(&self) -> bool {
        matches!(self, Self::Op { why, .. } if why.kind() == io::ErrorKind::StorageFull)
    }
    /// The exit code: 2 for usage, 130 when interrupted, else 1.
    pub fn code(&self) -> u8 {
        match self {
            Self::Usage(_) => 2,
            Self::Interrupted => 130,
            _ => 1,
        }
    }
}

/// Names the operation and its object where one failed.
pub trait On<T> {
    /// `op` on `path`.
    ///
    /// # Errors
    /// The failed operation.
    fn on(self, op: &'static str, path: &CStr) -> Result<T>;
}

impl<T> On<T> for io::Result<T> {
    fn on(self, op: &'static str, path: &CStr) -> Result<T> {
        self.map_err(|why| Error::Op { op, path: path.to_string_lossy().into_owned(), why })
    }
}
