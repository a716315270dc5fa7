//! Why a check, a repair or a dump could not be done. What does not hold on a volume is no error, but a finding.

use crate::finding::Finding;
use braidfs_format::Corrupt;

/// A [`std::result::Result`] with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a check, a repair or a dump could not be done.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The device failed.
    #[error("device error: {0}")]
    Io(#[from] std::io::Error),
    /// There is no volume, or what is to be shown does not hold.
    #[error(transparent)]
    Corrupt(#[from] Corrupt),
    /// A repair finds no block or node for what it must write.
    #[error("no space left on the volume")]
    NoSpace,
    /// An inode has more links, attributes or extents than can be written.
    #[error("file too large")]
    TooBig,
    /// There is no such thing to be shown.
    #[error("no such file or directory")]
    NotFound,
    /// A path leads through something that is no directory.
    #[error("not a directory")]
    NotDir,
    /// A check or a repair ended before its end, by this error, and had found something. What told of it may be gone from the device.
    #[error("{why}")]
    Unfinished {
        /// Why it ended.
        why: Box<Error>,
        /// What was found until then.
        found: Vec<Finding>,
    },
}

impl Error {
    /// The error behind what was found before.
    pub(crate) fn after(self, mut before: Vec<Finding>) -> Self {
        match self {
            Self::Unfinished { why, mut found } => {
                found.retain(|f| !before.contains(f));
                before.append(&mut found);
                Self::Unfinished { why, found: before }
            }
            why if before.is_empty() => why,
            why => Self::Unfinished { why: Box::new(why), found: before },
        }
    }

    /// The error alone, and what was found before it.
    pub fn into_parts(self) -> (Self, Vec<Finding>) {
        match self {
            Self::Unfinished { why, found } => (*why, found),
            why => (why, Vec::new()),
        }
    }
}

impl From<braidfs_store::Error> for Error {
    fn from(e: braidfs_store::Error) -> Self {
        match e {
            braidfs_store::Error::Io(e) => Self::Io(e),
            braidfs_store::Error::Corrupt(e) => Self::Corrupt(e),
            braidfs_store::Error::Held(who) => Self::Io(std::io::Error::other(who)),
            braidfs_store::Error::Unsupported(what) => {
                Self::Io(std::io::Error::new(std::io::ErrorKind::Unsupported, what))
            }
        }
    }
}
