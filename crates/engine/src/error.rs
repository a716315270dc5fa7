//! The error of every operation of a volume. Front ends turn it into an errno ([`Error::errno`]).

use braidfs_format::{Corrupt, DomainId};

/// Shorthand.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// ENOENT.
    #[error("no such file or directory")]
    NotFound,
    /// EEXIST.
    #[error("file exists")]
    Exists,
    /// ENOTDIR.
    #[error("not a directory")]
    NotDir,
    /// EISDIR.
    #[error("is a directory")]
    IsDir,
    /// ENOTEMPTY.
    #[error("directory not empty")]
    NotEmpty,
    /// ENOSPC.
    #[error("no space left on the volume")]
    NoSpace,
    /// ENAMETOOLONG.
    #[error("file name too long")]
    NameTooLong,
    /// EINVAL, and what was wrong.
    #[error("invalid argument: {0}")]
    Invalid(&'static str),
    /// EACCES.
    #[error("permission denied")]
    Access,
    /// EPERM.
    #[error("operation not permitted")]
    Perm,
    /// EROFS.
    #[error("read-only file system")]
    ReadOnly,
    /// EFBIG.
    #[error("file too large")]
    TooBig,
    /// EMLINK.
    #[error("too many links")]
    TooManyLinks,
    /// ELOOP.
    #[error("too many levels of symbolic links")]
    Loop,
    /// ESTALE: the inode number's generation is gone.
    #[error("stale inode")]
    Stale,
    /// ENODATA.
    #[error("no such attribute")]
    NoAttr,
    /// ERANGE.
    #[error("result too large")]
    Range,
    /// E2BIG.
    #[error("argument too long")]
    ArgTooLong,
    /// EBUSY.
    #[error("busy: {0}")]
    Busy(String),
    /// EOPNOTSUPP.
    #[error("not supported: {0}")]
    Unsupported(&'static str),
    /// ENXIO (seek past the end).
    #[error("no data there")]
    NoData,
    /// EBADF.
    #[error("bad file handle")]
    BadHandle,
    /// EIO: the device failed.
    #[error("device error: {0}")]
    Io(#[from] std::io::Error),
    /// EIO (EUCLEAN): what the device holds does not hold.
    #[error(transparent)]
    Corrupt(#[from] Corrupt),
    /// EROFS: the domain stopped after an error of its own; the rest of the volume goes on.
    #[error("{domain} is read-only since: {why}")]
    DomainFailed {
        /// Which.
        domain: DomainId,
        /// The first error.
        why: String,
    },
}

impl From<braidfs_store::Error> for Error {
    fn from(e: braidfs_store::Error) -> Self {
        match e {
            braidfs_store::Error::Io(e) => Self::Io(e),
            braidfs_store::Error::Corrupt(e) => Self::Corrupt(e),
            braidfs_store::Error::Unsupported(what) => Self::Unsupported(what),
        }
    }
}

impl Error {
    /// The errno that a POSIX front end answers.
    pub fn errno(&self) -> i32 {
        use rustix::io::Errno as E;
        match self {
            Self::NotFound => E::NOENT,
            Self::Exists => E::EXIST,
            Self::NotDir => E::NOTDIR,
            Self::IsDir => E::ISDIR,
            Self::NotEmpty => E::NOTEMPTY,
            Self::NoSpace => E::NOSPC,
            Self::NameTooLong => E::NAMETOOLONG,
            Self::Invalid(_) => E::INVAL,
            Self::Access => E::ACCESS,
            Self::Perm => E::PERM,
            Self::ReadOnly | Self::DomainFailed { .. } => E::ROFS,
            Self::TooBig => E::FBIG,
            Self::TooManyLinks => E::MLINK,
            Self::Loop => E::LOOP,
            Self::Stale => E::STALE,
            Self::NoAttr => E::NODATA,
            Self::Range => E::RANGE,
            Self::ArgTooLong => E::TOOBIG,
            Self::Busy(_) => E::BUSY,
            Self::Unsupported(_) => E::OPNOTSUPP,
            Self::NoData => E::NXIO,
            Self::BadHandle => E::BADF,
            Self::Io(_) | Self::Corrupt(_) => E::IO,
        }
        .raw_os_error()
    }
}
