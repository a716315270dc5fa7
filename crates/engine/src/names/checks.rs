//! What every operation on names asks first.

use crate::cell::State;
use crate::cell::record::DIR_LINKS_MAX;
use crate::error::{Error, Result};
use crate::planted::{Bug, planted};
use crate::types::{DomainId, QuotaOwner};
use crate::volume::MountedVolume;
use braidfs_format::inode::NAME_MAX;

/// Names may not be empty, `.`, `..` or too long, nor hold `/` or NUL.
pub(crate) fn check_name(name: &[u8]) -> Result<()> {
    if name.len() > NAME_MAX {
        return Err(Error::NameTooLong);
    }
    if name.is_empty() {
        return Err(Error::NotFound);
    }
    if name == b"." || name == b".." || name.iter().any(|&b| b == b'/' || b == 0) {
        return Err(Error::Invalid("not a file name"));
    }
    Ok(())
}

/// # Errors
/// [`Error::NotFound`] where the directory has been removed.
pub(crate) fn check_alive(st: &State) -> Result<()> {
    if st.deleted || st.nlink == 0 { Err(Error::NotFound) } else { Ok(()) }
}

/// # Errors
/// [`Error::Perm`] for immutable and append-only objects.
pub(crate) fn check_changeable(st: &State) -> Result<()> {
    use braidfs_format::inode::{APPEND, IMMUTABLE};
    if st.flags & (IMMUTABLE | APPEND) != 0 { Err(Error::Perm) } else { Ok(()) }
}

/// # Errors
/// [`Error::Perm`] for an immutable directory: an append-only one takes names, and gives none away.
pub(crate) fn check_takes_names(st: &State) -> Result<()> {
    if st.flags & braidfs_format::inode::IMMUTABLE != 0 { Err(Error::Perm) } else { Ok(()) }
}

/// # Errors
/// [`Error::TooManyLinks`] where the directory has as many subdirectories as it can count.
pub(super) fn check_takes_directory(st: &State) -> Result<()> {
    if st.nlink >= DIR_LINKS_MAX { Err(Error::TooManyLinks) } else { Ok(()) }
}

impl MountedVolume {
    /// # Errors
    /// [`Error::CrossProject`] where a directory that counts for a limit of its own is to take an inode that does not count for it
    /// (XFS's project inheritance). One whose number has lost its limits takes all.
    pub(super) fn check_project(&self, dir: &State, st: &State) -> Result<()> {
        let n = dir.project();
        let takes = n == 0 || n == st.project() || !self.quotas.lock().contains_key(&QuotaOwner::Project(n));
        if takes { Ok(()) } else { Err(Error::CrossProject) }
    }

    /// # Errors
    /// [`Error::CrossScratch`] where an inode of one domain would have a name in a directory of another, and one of them has no
    /// journal: what it says of names is of no use after a crash.
    pub(super) fn check_border(&self, inode: DomainId, dir: DomainId) -> Result<()> {
        let closed = |d| self.dom(d).is_closed() && !planted(Bug::ScratchBorderOpen);
        if inode != dir && (closed(inode) || closed(dir)) { Err(Error::CrossScratch) } else { Ok(()) }
    }
}
