//! Errors of the calls.

use crate::Fs;
use braidfs_device::OpenError;
use rustix::io::Errno;
use std::io;

/// Result of this crate's calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call failed. [`Self::kind`] sorts it as the standard library does, [`Self::errno`] as a kernel file system would;
/// what is inside tells more, and its text says what was wrong.
///
/// ```
/// use braidfs_fs::{Error, Fs, Options, VolumeError};
/// use std::io::ErrorKind;
/// # let fs = Fs::in_memory(64 << 20, &Options::default())?;
/// let error = fs.read("nowhere").unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::NotFound);
/// assert!(matches!(error, Error::Volume(VolumeError::NotFound)));
/// // `?` makes an io::Error of it, with the error inside
/// let error: std::io::Error = error.into();
/// assert!(error.get_ref().is_some_and(|e| e.is::<Error>()));
/// // of options, of devices
/// assert_eq!(Options::parse("noatime,cach=1M").unwrap_err().to_string(), "option `cach=1M`: unknown, or with a value too many or missing");
/// assert_eq!(Fs::open(&["/nowhere"], &Options::default()).unwrap_err().kind(), ErrorKind::NotFound);
/// # Ok::<(), Error>(())
/// ```
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
        match self {
            // what the device said, where it said something
            Self::Volume(braidfs::Error::Io(e)) => e.raw_os_error().unwrap_or(Errno::IO.raw_os_error()),
            Self::Volume(e) => e.errno(),
            Self::Device(e) => e.errno(),
            Self::Option { .. } => Errno::INVAL.raw_os_error(),
        }
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
#[non_exhaustive]
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
