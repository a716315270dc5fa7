//! Entries of directories and the inodes that they name.
//!
//! An entry is an index to an inode: it counts only where that exists, in its generation, and says that it hangs there.
//! After a crash some do not; who finds one treats the name as free.

use crate::cell::cache::CellRef;
use crate::cell::dentries::Key;
use crate::cell::{Cell, State, name_hash};
use crate::error::Result;
use crate::types::*;
use crate::volume::MountedVolume;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Metadata blocks that one entry can dirty: a bucket, the other half of a split, and packed records.
pub(super) const ENTRY_BLOCKS: u64 = 4;

/// What an entry says but for its name, which whoever looked for it has.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Named {
    pub inode: InodeRef,
    /// Type of the inode, as `d_type` of readdir(3).
    pub kind: u8,
}

/// What an entry names, for who has its directory locked.
pub(crate) enum Child {
    /// An inode that hangs there.
    Lives,
    Stale,
    /// Another thread has this one locked: the caller lets everything go, [waits](Child::wait) and starts again.
    Busy(Arc<Cell>),
}

impl Child {
    /// Waits until the other thread has let it go. The caller holds nothing.
    pub fn wait(busy: &Cell) {
        drop(busy.state.read());
    }
}

impl MountedVolume {
    /// Position of a name.
    pub fn hash(&self, name: &[u8]) -> u64 {
        name_hash(&self.shared.hash_key, name)
    }

    /// A name is about to change: whoever looks it up waits for the directory, which the caller has locked for writing.
    pub(crate) fn forget_name(&self, dir: &Cell, name: &[u8]) {
        self.dentries.forget(&Key::of(dir.ino, dir.generation, name));
    }

    /// The entry of a name, buckets read as needed. The caller holds the directory's lock for writing.
    pub fn find_entry(&self, dir: &Cell, st: &mut State, name: &[u8]) -> Result<Option<Named>> {
        self.find_entry_at(dir, st, name, self.hash(name))
    }

    /// [`Self::find_entry`] of a name with `hash`.
    pub fn find_entry_at(&self, dir: &Cell, st: &mut State, name: &[u8], hash: u64) -> Result<Option<Named>> {
        self.dom(dir.domain).with_index(dir.ino, st, |ix, load| {
            Ok(ix.find(hash, name, load)?.map(|e| Named { inode: e.into(), kind: e.kind }))
        })
    }

    /// The inode that the entry `name` → `inode` of a directory names, if it is not stale: it exists in that generation and hangs
    /// there.
    ///
    /// # Errors
    /// Of loading it.
    pub fn child_at(&self, dir: &Cell, name: &[u8], inode: InodeRef) -> Result<Option<Arc<Cell>>> {
        Ok(self.child_seen(dir, name, inode)?.map(|c| c.arc()))
    }

    /// [`Self::child_at`], to be looked at.
    ///
    /// # Errors
    /// Of loading it.
    pub fn child_seen(&self, dir: &Cell, name: &[u8], inode: InodeRef) -> Result<Option<CellRef<'_>>> {
        if !may_be_linked(inode.ino, dir.ino) {
            return Ok(None);
        }
        let Some(c) = self.see_found(inode.ino)?.filter(|c| c.is(inode)) else { return Ok(None) };
        if self.child_in_doubt(&c, dir.domain) && !is_linked_at(&c.state.read(), dir.ino, name) {
            return Ok(None);
        }
        Ok(Some(c))
    }

    /// [`Self::child_at`] for who has the directory locked, and `also` those. A stale entry may name any inode, also one
    /// above the directory, which other threads lock first: it is not waited for here.
    pub fn child_below(&self, dir: &Cell, also: &[(&Cell, &State)], name: &[u8], inode: InodeRef) -> Result<Child> {
        let Some(c) = self.child_cell(dir.ino, inode)? else { return Ok(Child::Stale) };
        let hangs = if !self.child_in_doubt(&c, dir.domain) {
            true
        } else if let Some((_, st)) = also.iter().find(|(l, _)| l.ino == inode.ino) {
            is_linked_at(st, dir.ino, name)
        } else {
            let Some(st) = c.state.try_read() else { return Ok(Child::Busy(c)) };
            is_linked_at(&st, dir.ino, name)
        };
        Ok(if hangs { Child::Lives } else { Child::Stale })
    }

    /// The inode that an entry of `dir` names, if there is one in that generation that can hang there.
    fn child_cell(&self, dir: InodeNo, inode: InodeRef) -> Result<Option<Arc<Cell>>> {
        if !may_be_linked(inode.ino, dir) {
            return Ok(None);
        }
        Ok(self.find(inode.ino)?.filter(|c| c.is(inode)))
    }

    /// Whether an entry of a directory in domain `dir_domain` may be there without the inode's link.
    fn child_in_doubt(&self, c: &Cell, dir_domain: DomainId) -> bool {
        c.domain != dir_domain || self.maybe_stale.load(Ordering::Relaxed)
    }

    /// Whether all entries of a directory that is not empty are stale (left over from a crash), for who has it and `also`
    /// locked: [`Child::Lives`] where one is not, [`Child::Busy`] where that cannot be seen now.
    pub(crate) fn only_stale(&self, c: &Arc<Cell>, st: &mut State, also: &[(&Cell, &State)]) -> Result<Child> {
        if !self.maybe_stale.load(Ordering::Relaxed) {
            return Ok(Child::Lives);
        }
        let mut pos = 2;
        loop {
            let next = self.dom(c.domain).with_index(c.ino, st, |ix, load| Ok(ix.next_after(pos, load)?.cloned()))?;
            let Some(e) = next else { return Ok(Child::Stale) };
            pos = e.hash;
            match self.child_below(c, also, &e.name, (&e).into())? {
                Child::Stale => {}
                other => return Ok(other),
            }
        }
    }
}

/// Whether an inode can hang in a directory at all: an entry that names its own directory, or the root, is damage.
pub(crate) fn may_be_linked(node: InodeNo, dir: InodeNo) -> bool {
    node != dir && node != InodeNo::ROOT
}

fn is_linked_at(st: &State, dir: InodeNo, name: &[u8]) -> bool {
    !st.deleted && st.has_link(dir, name)
}

#[cfg(test)]
mod tests;
