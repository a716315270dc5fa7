//! Entries of directories: one function changes them, for an operation and for recovery, but for entries of files in directories that
//! several threads change (`names/beside.rs`).
//!
//! An entry is an index to its inode, which alone says where it hangs. The number of a directory's links follows its
//! entries, here and nowhere else.

use crate::cell::dentries::{Key, Target};
use crate::cell::dir::DirIndex;
use crate::cell::{Cell, State};
use crate::domain::Enter;
use crate::error::Result;
use crate::planted::{Bug, planted};
use crate::types::{FileKind, InodeNo, TxId};
use crate::volume::MountedVolume;
use crate::volume::operation::Op;
use braidfs_format::dentry::Dentry;
use braidfs_sync::{CHECKED, rank, taken_downwards};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Who changes an entry.
pub(crate) enum By<'o, 'a> {
    /// An operation: it pays for what the directory grows by, and changes the directory's times.
    Operation(&'o mut Op<'a>),
    /// Recovery, in its own transaction.
    Recovery(&'o Enter<'a>),
}

/// What becomes of an entry.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Edit<'c> {
    /// A name that is not there names this inode.
    Add(&'c Cell),
    /// The entry of a name names this inode, and no longer what it named.
    Replace(&'c Cell),
    /// The name goes, if it is there.
    Remove,
}

impl MountedVolume {
    /// Changes the entry `name` of a directory, which the caller has locked, and touched in the transaction of who changes it.
    /// Where the inode is locked, too, the directory was first.
    ///
    /// # Errors
    /// Of reading the directory; [`crate::Error::NoSpace`] where its index is full. Nothing has changed then.
    pub(crate) fn edit_entry(
        &self,
        by: By<'_, '_>,
        dir: &Arc<Cell>,
        st: &mut State,
        name: &[u8],
        edit: Edit<'_>,
    ) -> Result<()> {
        self.edit_entry_at(by, dir, st, (name, self.hash(name)), edit)
    }

    /// [`Self::edit_entry`] of a name whose hash is at hand.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn edit_entry_at(
        &self,
        mut by: By<'_, '_>,
        dir: &Arc<Cell>,
        st: &mut State,
        (name, hash): (&[u8], u64),
        edit: Edit<'_>,
    ) -> Result<()> {
        debug_assert!(st.durability.dirty_tx() == Some(by.tx(dir)), "{}: not touched", dir.ino);
        let child = match edit {
            Edit::Add(c) | Edit::Replace(c) => Some(c),
            Edit::Remove => None,
        };
        let key = Key::of(dir.ino, dir.generation, name);
        match edit {
            // of a name that is not there nothing is known
            Edit::Add(_) => {
                debug_assert!(self.dentries.get(&key).is_none());
                self.dentries.fetch(&key);
            }
            // who walks by names looked up lately waits for the directory
            Edit::Replace(_) | Edit::Remove => self.dentries.forget(&key),
        }
        if let (By::Operation(op), Some(_)) = (&mut by, child) {
            op.grows_by_name(dir.domain, name);
        }
        // gives the inode that the name named, and its kind
        let change = |ix: &mut DirIndex, load: &mut dyn FnMut(u64) -> Result<Vec<Dentry>>| {
            let old = match edit {
                Edit::Add(c) => {
                    let entry = Dentry {
                        hash,
                        node: c.ino,
                        generation: c.generation,
                        kind: c.kind.d_type(),
                        name: name.into(),
                    };
                    ix.insert(hash, entry, load)?;
                    None
                }
                Edit::Replace(c) => ix.replace(hash, name, c.ino, c.generation, c.kind.d_type(), load)?,
                Edit::Remove => ix.remove(hash, name, load)?,
            };
            Ok(old.map(|e| (e.node, e.kind)))
        };
        let old = match &mut by {
            By::Operation(op) => op.with_index(dir, st, change)?,
            By::Recovery(e) => e.domain.with_index(dir.ino, st, change)?,
        };
        check_lock_order(dir, child, old);
        debug_assert!(old.is_some() != matches!(edit, Edit::Add(_)), "{edit:?} of {old:?}");
        if old.is_some_and(|e| e.1 == FileKind::Dir.d_type()) {
            st.nlink = st.nlink.saturating_sub(1).max(2);
        }
        if child.is_some_and(|c| c.kind == FileKind::Dir) {
            st.nlink += 1;
        }
        if let By::Operation(op) = &by {
            self.operation_edited(op, dir, st, &key, child, old);
        }
        Ok(())
    }

    /// What follows from an entry that an operation changed: the dentry cache, what an fsync of the directory concerns, its
    /// times, and whether several threads change it.
    fn operation_edited(
        &self,
        op: &Op<'_>,
        dir: &Cell,
        st: &mut State,
        key: &Key,
        child: Option<&Cell>,
        old: Option<(InodeNo, u8)>,
    ) {
        if let Some(c) = child
            && !self.maybe_stale.load(Ordering::Relaxed)
        {
            // most new names are looked up soon
            self.dentries.put(key, Target { node: c.ino, generation: c.generation, kind: c.kind });
        }
        let left = old.filter(|_| !planted(Bug::LeaverForgotten)).and_then(|e| self.domain(e.0).ok());
        let both = [child.map(|c| c.domain), left.map(|d| d.id)];
        if let Some(d) = st.dir() {
            for (domain, tx) in both.into_iter().flatten().filter_map(|inode| op.concerned(dir.domain, inode)) {
                d.entry_concerns(domain, tx);
            }
            d.note_changer(self.shared.options.share_dirs);
        }
        // seldom: it lies in a line that look-ups read
        if st.is_shared_dir() && !dir.wide.load(Ordering::Relaxed) {
            dir.wide.store(true, Ordering::Relaxed);
        }
        let now = self.shared.now();
        (st.mtime, st.ctime) = (now, now);
        st.durability.operation_changes_data();
    }
}

/// The directory was locked before the inode that an entry of it names now, or named.
fn check_lock_order(dir: &Cell, child: Option<&Cell>, old: Option<(InodeNo, u8)>) {
    // of an entry that is replaced only its inode could say whether it hung here
    if let Some(below) = child.map(|c| c.ino).or(old.map(|e| e.0)).filter(|_| CHECKED) {
        let order = taken_downwards::<rank::Cell>(dir.ino.0, below.0);
        assert!(order, "lock order, parents before children: waits for {}, holds {below}; docs/locking.md", dir.ino);
    }
}

impl By<'_, '_> {
    /// The transaction that the change belongs to.
    fn tx(&self, dir: &Cell) -> TxId {
        match self {
            By::Operation(op) => op.tx(dir.domain).id,
            By::Recovery(e) => e.tx().id,
        }
    }
}
