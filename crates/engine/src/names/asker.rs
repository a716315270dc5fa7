//! For whom names change. Who comes by a path is checked here, with all that changes locked: what has the name by then need not be
//! what had it when the path was walked. For who comes by numbers the kernel has asked, or nobody has to.

#[cfg(test)]
use super::path::tests;
use crate::attributes::acl;
use crate::cell::{Cell, State};
use crate::error::{Error, Result};
use crate::types::Cred;

/// In a sticky directory names are their owners', and the directory's.
const STICKY: u32 = 0o1000;

/// May read.
pub(super) const READ: u32 = 4;
/// May change the content, of a directory its names.
pub(super) const WRITE: u32 = 2;
/// May look names up.
pub(super) const SEARCH: u32 = 1;

/// Who is to be checked; `None` may do all.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asker<'c>(Option<&'c Cred>);

impl<'c> Asker<'c> {
    /// Who may do all.
    pub const ANY: Asker<'static> = Asker(None);

    /// Who has these rights.
    pub fn of(cred: &'c Cred) -> Self {
        Self((!cred.privileged).then_some(cred))
    }

    /// # Errors
    /// [`Error::Access`] where he may not do `want` with the inode.
    pub fn check(self, st: &State, want: u32) -> Result<()> {
        match self.0 {
            Some(cred) if !acl::allows(st, cred, want) => Err(Error::Access),
            _ => Ok(()),
        }
    }

    /// # Errors
    /// [`Error::Access`] where he may not put names into the directory.
    pub fn check_add(self, dir: &State) -> Result<()> {
        self.check(dir, WRITE | SEARCH)
    }

    /// # Errors
    /// [`Error::Access`] where he may not take names out of the directory; [`Error::Perm`] where its sticky bit keeps him from
    /// taking those of an inode that belongs to `owner`.
    pub fn check_remove(self, dir: &State, owner: u32) -> Result<()> {
        let Some(cred) = self.0 else { return Ok(()) };
        self.check_add(dir)?;
        let sticky = dir.mode & STICKY != 0;
        if sticky && cred.uid != dir.uid && cred.uid != owner { Err(Error::Perm) } else { Ok(()) }
    }

    /// [`Self::check`] of what is not locked: so nobody has anything made durable, or learns of what is there, who may do nothing.
    pub fn check_early(self, c: &Cell, want: u32) -> Result<()> {
        let may = if self.0.is_none() { Ok(()) } else { self.check(&c.state.read(), want) };
        #[cfg(test)]
        tests::reached(tests::Place::Asked);
        may
    }

    /// [`Self::check_remove`], as [`Self::check_early`].
    pub fn check_remove_early(self, dir: &Cell, child: &Cell) -> Result<()> {
        if self.0.is_none() {
            return Ok(());
        }
        let owner = child.state.read().uid;
        let may = self.check_remove(&dir.state.read(), owner);
        #[cfg(test)]
        tests::reached(tests::Place::Asked);
        may
    }
}
