//! Why blocks of a volume cannot be read or written.

use braidfs_format::Corrupt;

/// A [`std::result::Result`] with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why blocks of a volume cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The device failed.
    #[error("device error: {0}")]
    Io(#[from] std::io::Error),
    /// What the device holds does not hold, or an address lies outside the volume.
    #[error(transparent)]
    Corrupt(#[from] Corrupt),
    /// Somebody else writes the volume, or may: who, and until when.
    #[error("{0}")]
    Held(String),
    /// The device has no such operation.
    #[error("not supported: {0}")]
    Unsupported(&'static str),
}
