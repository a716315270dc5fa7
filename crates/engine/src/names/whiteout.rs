//! Whiteouts: what a rename may leave under the old name (RENAME_WHITEOUT of renameat2(2)): a character device 0:0 without
//! permissions, as ext4 makes it. An overlayfs hides with it what a lower layer has under the name.
//!
//! It is an inode of the moved inode's domain, made in the same transaction, whatever domain the directory is of; and no fsync
//! of either is durable before that one (`crate::braid::plan`). So a crash keeps both or none. Where the domain has no number
//! or no block for it, the rename fails, since nowhere else could it be made as one with the rename.

use super::placement::NewInode;
use crate::braid::durability::Before;
use crate::cell::{Cell, State};
use crate::error::{Error, Result};
use crate::quota::Charge;
use crate::types::*;
use crate::volume::MountedVolume;
use crate::volume::operation::Op;
use std::sync::Arc;

/// The number of a whiteout that is to be made. It is given back unless [`Self::used`].
pub(super) struct Spare<'a> {
    mounted: &'a MountedVolume,
    number: Option<NewInode>,
}

impl<'a> Spare<'a> {
    /// None yet.
    pub fn new(mounted: &'a MountedVolume) -> Self {
        Self { mounted, number: None }
    }

    /// One of domain `d`: that from before, where it is of this domain. Not inside a gate.
    ///
    /// # Errors
    /// [`Error::NoSpace`] where the domain has none, also by a tenant's limit; of the device.
    pub fn of_domain(&mut self, d: DomainId, near: InodeNo) -> Result<NewInode> {
        if let Some(n) = self.number.filter(|n| n.domain == d) {
            return Ok(n);
        }
        self.give_back();
        let inode = self.mounted.new_inode(d, near)?.ok_or(Error::NoSpace)?;
        Ok(*self.number.insert(NewInode { inode, domain: d }))
    }

    /// The whiteout is made.
    pub fn used(&mut self) {
        self.number = None;
    }

    fn give_back(&mut self) {
        if let Some(n) = self.number.take() {
            self.mounted.give_number_back(n.domain, n.inode);
        }
    }
}

impl Drop for Spare<'_> {
    fn drop(&mut self) {
        self.give_back();
    }
}

/// A whiteout that is charged for, and not made yet.
pub(super) struct Whiteout<'a> {
    pub cell: Arc<Cell>,
    charge: Charge<'a>,
}

impl MountedVolume {
    /// A whiteout for a name of `dir`, which `cred` makes. All that can fail of it is done here. `before`: what must be durable
    /// with who takes the name.
    ///
    /// # Errors
    /// [`Error::Quota`]; of what it inherits.
    pub(super) fn new_whiteout(
        &self,
        dir: &State,
        NewInode { inode, domain }: NewInode,
        cred: &Cred,
        before: &Before,
    ) -> Result<Whiteout<'_>> {
        let new = NewNode { kind: FileKind::Char, mode: 0, umask: 0, rdev: 0, target: b"" };
        let mut st = self.fresh(dir, &new, cred)?;
        let charge = self.charge_inode(&st, cred)?;
        st.nlink = 1;
        st.durability.inode_takes_name(before);
        Ok(Whiteout { cell: Arc::new(Cell::new(inode, domain, new.kind, st)), charge })
    }

    /// It is there, with its entry. The caller has the directory locked; `seq`: the time of this change of names.
    pub(super) fn make_whiteout(
        &self,
        op: &mut Op<'_>,
        Whiteout { cell, charge }: Whiteout<'_>,
        (dir, name): (&Cell, &[u8]),
        seq: u64,
    ) -> Result<()> {
        let mut st = cell.state.write();
        st.gain_link(dir.ino, name, seq);
        // one that is new is on no list of an older transaction: this does not fail
        op.touch(&cell, &mut st)?;
        st.durability.operation_changes_names();
        let tx = op.tx(cell.domain).id;
        st.durability.inode_follows(tx);
        drop(st);
        op.hint(dir, name, &cell);
        self.note_inode_made(&cell, charge);
        self.dom(cell.domain).cells.insert_new(cell.clone());
        Ok(())
    }
}
