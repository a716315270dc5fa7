//! What may fail.

use std::path::Path;

/// Why a cell, or the whole, could not be run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The benchmark's part.
    #[error("{0}")]
    Suite(#[from] fxmark::Error),
    /// The file system's part.
    #[error("{0}")]
    Braidfs(#[from] braidfs::Error),
    /// A file of ours, or a program.
    #[error("{0}: {1}")]
    Io(String, std::io::Error),
    /// JSON of ours.
    #[error("{0}")]
    Json(#[from] serde_json::Error),
    /// A thread panicked.
    #[error("a worker died: its message stands above")]
    Died,
    /// Anything else, in words.
    #[error("{0}")]
    Cell(String),
}

impl Error {
    /// With the path, or what else it is about.
    pub fn io(what: &Path, why: std::io::Error) -> Self {
        Self::Io(what.display().to_string(), why)
    }
}

/// A result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;
