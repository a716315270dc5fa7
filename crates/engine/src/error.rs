//! The error of every operation of a volume: what is wrong, in the terms of the file system. Only front ends turn it into
//! an errno, all by one table ([`Error::errno`]); the engine looks at those of devices only (`volume/remount.rs`).

use crate::types::{InodeRef, QuotaOwner};
use braidfs_format::{Corrupt, DomainId};

/// Result of the engine's calls; the error is [`enum@Error`] unless another one is named.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No inode has the name or the number that a caller gave. Inside the engine a look-up that may miss answers `None`.
    #[error("no such file or directory")]
    NotFound,
    /// The name is taken.
    #[error("file exists")]
    Exists,
    /// A directory is needed, and this is none.
    #[error("not a directory")]
    NotDir,
    /// The inode is a directory.
    #[error("is a directory")]
    IsDir,
    /// The directory has entries.
    #[error("directory not empty")]
    NotEmpty,
    /// No block, or no inode number, is to be had.
    #[error("no space left on the volume")]
    NoSpace,
    /// A limit of a user (EDQUOT) or of a directory (ENOSPC) is reached.
    #[error("{}", .0.refusal())]
    Quota(QuotaOwner),
    /// EXDEV: into a directory with a limit of its own come only files that count there: they are copied.
    #[error("the inode counts for another directory's limit")]
    CrossProject,
    /// EXDEV: no name crosses the border of a tenant without a journal: what is to be on the other side is copied.
    #[error("a tenant without a journal is a file system of its own: copy")]
    CrossScratch,
    /// ENOSPC: a transaction, or a roll-forward record, does not fit what is left of a domain's journal. An fsync that meets
    /// it commits instead; a commit, for which operations keep room, fails the domain.
    #[error("the journal is full")]
    JournalFull,
    /// A name of more than 255 bytes, a path of more than 4,096, a target of more than 4,095.
    #[error("file name too long")]
    NameTooLong,
    /// EINVAL, and what was wrong.
    #[error("invalid argument: {0}")]
    Invalid(&'static str),
    /// The permissions of an inode do not allow it to this user.
    #[error("permission denied")]
    Access,
    /// Only the owner or a privileged user may, or the inode is immutable or append-only.
    #[error("operation not permitted")]
    Perm,
    /// The volume is mounted read-only.
    #[error("read-only file system")]
    ReadOnly,
    /// Beyond the longest file.
    #[error("file too large")]
    TooBig,
    /// The file has as many extents as one can have, and this may need one more (EFBIG).
    #[error("file too large: it lies in as many pieces as a file can")]
    TooManyExtents,
    /// The inode has as many names, or the directory as many subdirectories, as there can be.
    #[error("too many links")]
    TooManyLinks,
    /// Too many symbolic links on a path, or a loop of directories.
    #[error("too many levels of symbolic links")]
    Loop,
    /// ESTALE: the inode number's generation is gone.
    #[error("stale inode")]
    Stale,
    /// ESTALE: an inode that is said to be held over a mount is not on the volume, or its number is another's.
    #[error("inode {} of generation {} is said to be held, and is not there", .inode.ino, .inode.generation)]
    HeldGone {
        /// The inode as the list of held inodes names it.
        inode: InodeRef,
    },
    /// The inode has no such extended attribute.
    #[error("no such attribute")]
    NoAttr,
    /// The name of an extended attribute is too long.
    #[error("result too large")]
    Range,
    /// The value of an extended attribute is too long.
    #[error("argument too long")]
    ArgTooLong,
    /// EBUSY: somebody uses it (a tenant's root that is removed, a volume with open files); the text says what.
    #[error("busy: {0}")]
    Busy(String),
    /// EOPNOTSUPP: the kind of file, the volume or its mount has no such call; the text says which.
    #[error("not supported: {0}")]
    Unsupported(&'static str),
    /// EINVAL: a volume cannot have the size that was asked for, and why.
    #[error("{0}")]
    Size(String),
    /// EINTR: whoever asked for long work had it stopped. What was done by then stays, and the same call goes on.
    #[error("stopped before its end: the same again goes on")]
    Stopped,
    /// No data, or no hole, from there on (seek).
    #[error("no data there")]
    NoData,
    /// ENOMEM: readers have pinned as much of the cache as they may, or would with this.
    #[error("more than {} KiB of the cache would be pinned: let go of what is pinned, pin less at once, or give more memory (cache=, or the tenant's)", .limit >> 10)]
    Pinned {
        /// Bytes that may be pinned at once.
        limit: u64,
    },
    /// The handle is not open for that.
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
        /// The domain that stopped.
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
            braidfs_store::Error::Held(who) => Self::Busy(who),
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
            Self::NoSpace | Self::JournalFull | Self::Quota(QuotaOwner::Project(_)) => E::NOSPC,
            Self::Quota(QuotaOwner::User(_) | QuotaOwner::Group(_)) => E::DQUOT,
            Self::CrossProject | Self::CrossScratch => E::XDEV,
            Self::NameTooLong => E::NAMETOOLONG,
            Self::Invalid(_) | Self::Size(_) => E::INVAL,
            Self::Access => E::ACCESS,
            Self::Perm => E::PERM,
            Self::ReadOnly | Self::DomainFailed { .. } => E::ROFS,
            Self::TooBig | Self::TooManyExtents => E::FBIG,
            Self::TooManyLinks => E::MLINK,
            Self::Loop => E::LOOP,
            Self::Stale | Self::HeldGone { .. } => E::STALE,
            Self::NoAttr => E::NODATA,
            Self::Range => E::RANGE,
            Self::ArgTooLong => E::TOOBIG,
            Self::Busy(_) => E::BUSY,
            Self::Unsupported(_) => E::OPNOTSUPP,
            Self::Stopped => E::INTR,
            Self::NoData => E::NXIO,
            Self::Pinned { .. } => E::NOMEM,
            Self::BadHandle => E::BADF,
            Self::Io(_) | Self::Corrupt(_) => E::IO,
        }
        .raw_os_error()
    }
}
