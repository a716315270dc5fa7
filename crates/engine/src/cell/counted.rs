//! What an inode counts for in quotas.

use super::{Body, Cell, FileBody, State};
use crate::error::Result;
use crate::quota::{self, Charge, Force, Owners, Quotas};
use crate::types::QuotaOwner;
use braidfs_format::inode::PROJECT_SHIFT;

impl State {
    /// Number of the project that it is of; 0: of none.
    pub fn project(&self) -> u32 {
        self.flags >> PROJECT_SHIFT
    }

    /// For whom it counts.
    pub fn owners(&self) -> Owners {
        Owners { uid: self.uid, gid: self.gid, project: self.project() }
    }

    /// Blocks of the content, each once, whether it has its place or not.
    pub fn content_blocks(&self) -> u64 {
        match &self.body {
            Body::File(f) if f.pages.dirty_count() == 0 => f.map.blocks(),
            Body::File(f) => f.map.blocks() + dirty_in_holes(f),
            Body::Dir(d) => d.map.blocks(),
            Body::Special => 0,
        }
    }
}

/// Dirty pages that have no place yet. Looks at no page that has one by itself, nor at pages of one hole.
fn dirty_in_holes(f: &FileBody) -> u64 {
    let (mut at, mut count) = (0, 0);
    // of a file that is overwritten in many pieces each `stat` would look at each extent
    if f.map.blocks() == f.map.last_end() {
        at = f.map.last_end();
    }
    while let Some(lblk) = f.pages.next_dirty(at) {
        at = match f.map.next_from(lblk) {
            Some(p) if p.lblk <= lblk => p.lblk + u64::from(p.len),
            hole => {
                let end = hole.map_or(u64::MAX, |p| p.lblk);
                count += f.pages.dirty_count_in(lblk, end);
                end
            }
        };
    }
    count
}

impl State {
    /// Blocks that writing a range would add to [`Self::content_blocks`].
    pub fn new_blocks(&self, offset: u64, len: u64) -> u64 {
        let Body::File(f) = &self.body else { return 0 };
        let (first, end) = (offset / 4096, offset.saturating_add(len).div_ceil(4096));
        // mapped runs, and dirty pages without a place
        let (mut at, mut there) = (first, 0);
        while let Some(p) = f.map.next_from(at).filter(|p| p.lblk < end) {
            let to = (p.lblk + u64::from(p.len)).min(end);
            there += to - p.lblk.max(at);
            at = to;
        }
        let dirty = f.pages.dirty_in(first, end).filter(|l| f.map.get(*l).is_none()).count();
        (end - first).saturating_sub(there + dirty as u64)
    }
}

impl Quotas {
    /// Charges for an inode whose cell is locked for writing.
    #[inline]
    pub fn charge(&self, c: &Cell, st: &State) -> Charge<'_> {
        let on = self.is_on();
        if on && !st.deleted {
            self.count(c.ino, st.owners(), || st.content_blocks());
        }
        Charge::of(on.then_some(self), st.owners())
    }

    /// [`State::content_blocks`], 0 where nothing is counted: for [`Charge::settle`].
    pub fn blocks_of(&self, st: &State) -> u64 {
        if self.is_on() { st.content_blocks() } else { 0 }
    }

    /// An inode is about to be deleted, its blocks still there. Its cell is locked for writing.
    pub fn gone(&self, c: &Cell, st: &State) {
        if self.is_on() {
            self.count(c.ino, st.owners(), || st.content_blocks());
            self.give(st.owners(), st.content_blocks(), 1);
        }
    }

    /// Gives an inode whose cell is locked for writing to another group: who may do that need not be privileged, and is held to
    /// the limits of the group as who makes an inode in it. Unless `whatever`.
    ///
    /// # Errors
    /// [`Error::Quota`]: nothing was changed.
    pub fn regroup(&self, c: &Cell, st: &mut State, gid: u32, whatever: bool) -> Result<()> {
        if self.is_on() && st.gid != gid {
            self.count(c.ino, st.owners(), || st.content_blocks());
            let (blocks, force) = (st.content_blocks(), if whatever { Force::All } else { quota::force() });
            self.take_of(QuotaOwner::Group(gid), blocks, 1, force)?;
            self.give_of(QuotaOwner::Group(st.gid), blocks, 1);
        }
        st.gid = gid;
        Ok(())
    }

    /// Changes the owners of an inode whose cell is locked for writing; limits do not hold for who may do that. An owner that
    /// stays is charged nothing, not even for a moment: somebody else who writes would be refused what it may have.
    pub fn transfer(&self, c: &Cell, st: &mut State, change: impl FnOnce(&mut State)) {
        if !self.is_on() {
            return change(st);
        }
        self.count(c.ino, st.owners(), || st.content_blocks());
        let (before, blocks) = (st.owners(), st.content_blocks());
        change(st);
        let after = st.owners();
        for owner in after.each().filter(|new| !before.each().any(|old| old == *new)) {
            self.force_of(owner, blocks, 1);
        }
        for owner in before.each().filter(|old| !after.each().any(|new| new == *old)) {
            self.give_of(owner, blocks, 1);
        }
    }
}

#[cfg(test)]
mod tests;
