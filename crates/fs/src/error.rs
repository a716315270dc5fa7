//! Errors of the calls.

use crate::Fs;
use braidfs_device::{NbdError, OpenError};
use rustix::io::Errno;
use std::io;

/// Result of this crate's calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The volume's answer.
    #[error(transparent)]
    Volume(#[from] braidfs::Error),
    /// A device of the volume cannot be opened or made.
    #[error(transparent)]
    Device(#[from] OpenError),
    /// The text of an option does not hold.
    #[error("option `{option}`: {why}")]
    Option {
        /// As it was given.
        option: String,
        /// What is wrong with it.
        why: &'static str,
    },
}

impl Error {
    /// The errno that a kernel file system would answer.
    pub fn errno(&self) -> i32 {
        let errno = match self {
            // what the device said, where it said something
            Self::Volume(braidfs::Error::Io(e)) => return e.raw_os_error().unwrap_or(Errno::IO.raw_os_error()),
            Self::Volume(e) => return e.errno(),
            Self::Device(e) => match e {
                OpenError::NotFound { .. } => Errno::NOENT,
                OpenError::PermissionDenied { .. } => Errno::ACCESS,
                OpenError::InUse { .. } | OpenError::Busy { .. } => Errno::BUSY,
                OpenError::ReadOnly { .. } => Errno::ROFS,
                OpenError::Exists { .. } => Errno::EXIST,
                OpenError::Io { error, .. } => return error.raw_os_error().unwrap_or(Errno::IO.raw_os_error()),
                OpenError::Nbd(NbdError::Connect { error, .. }) => {
                    return error.raw_os_error().unwrap_or(Errno::IO.raw_os_error());
                }
                OpenError::Nbd(NbdError::ReadOnly { .. }) => Errno::ROFS,
                OpenError::Nbd(NbdError::Refused { .. } | NbdError::NotDurable { .. }) => Errno::IO,
                OpenError::Uri { .. }
                | OpenError::WrongKind { .. }
                | OpenError::TooSmall { .. }
                | OpenError::Twice { .. }
                | OpenError::NoDevice => Errno::INVAL,
            },
            Self::Option { .. } => Errno::INVAL,
        };
        errno.raw_os_error()
    }

    /// [`Self::errno`] as the standard library sorts it.
    pub fn kind(&self) -> io::ErrorKind {
        io::Error::from_raw_os_error(self.errno()).kind()
    }
}

impl From<Error> for io::Error {
    /// Of the errno's kind; the [`Error`] is inside ([`io::Error::get_ref`]).
    fn from(e: Error) -> Self {
        Self::new(e.kind(), e)
    }
}

/// A volume could not be closed.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct CloseError {
    /// Why the volume could not be closed.
    #[source]
    pub error: Error,
    /// Where files or listings of it were still open: the volume, as it was. Else it is closed.
    pub fs: Option<Fs>,
}

impl From<CloseError> for io::Error {
    /// The volume, if it is still open, is dropped: it closes with its last file.
    fn from(e: CloseError) -> Self {
        e.error.into()
    }
}

impl From<CloseError> for Error {
    /// Keeps the reason, drops the volume.
    fn from(e: CloseError) -> Self {
        e.error
    }
}
