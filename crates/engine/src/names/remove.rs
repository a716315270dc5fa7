//! Taking names away: unlink, rmdir; what becomes of an inode without a name.

use super::{Child, Op, check_alive, check_changeable, check_name};
use crate::braid::entry::{By, Edit};
use crate::braid::vacated::Vacated;
use crate::cell::{Body, Cell, State};
use crate::domain::Enter;
use crate::error::{Error, Result};
use crate::types::*;
use crate::volume::{MountedVolume, Volume};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Metadata blocks that a removal can dirty.
const REMOVE_BLOCKS: u64 = 3;

impl MountedVolume {
    /// The inode lost a name, of a directory the only one. `cell` is touched.
    pub(crate) fn name_gone(&self, op: &Op<'_>, cell: &Arc<Cell>, st: &mut State) {
        let left = if cell.kind == FileKind::Dir { 0 } else { st.nlink.saturating_sub(1) };
        st.nlink = left;
        if left == 0 {
            self.last_name_gone(op, cell, st);
        }
    }

    /// The inode lost its last name: it is deleted, or becomes an orphan while it is open or held. `cell` is touched.
    pub(crate) fn last_name_gone(&self, op: &Op<'_>, cell: &Arc<Cell>, st: &mut State) {
        st.nlink = 0;
        st.links.clear();
        let d = self.dom(cell.domain);
        // in this order: a handle being opened or closed counts itself, then looks whether the inode is gone
        cell.nameless.store(true, Ordering::SeqCst);
        let held = self.held.orphaned(cell);
        if held || cell.opens.load(Ordering::SeqCst) > 0 || !st.durability.tombstones().is_empty() {
            d.orphans.lock().insert(cell.ino);
        } else {
            self.delete(op.enter(cell.domain), cell, st);
        }
    }

    /// Deletes an inode without a name. One of very many extents is left for [`Self::reap_zombies`], which does it in
    /// several transactions, or in a later one where the journal has too little room for it now. `cell` is touched.
    pub(crate) fn delete(&self, e: &Enter<'_>, cell: &Arc<Cell>, st: &mut State) {
        let extents = if let Body::File(f) = &st.body { f.map.extent_count() } else { 0 };
        if extents > e.domain.pieces_max() || !e.expect_pieces(extents) {
            cell.nameless.store(true, Ordering::SeqCst);
            e.domain.orphans.lock().insert(cell.ino);
            self.zombies.lock().push(cell.clone());
        } else {
            self.delete_content(e, cell, st);
        }
    }

    /// The inode is gone: its blocks become free with this transaction, its nodes when the cell is serialised. The
    /// caller has touched the cell.
    pub(crate) fn delete_content(&self, e: &Enter<'_>, c: &Arc<Cell>, st: &mut State) {
        let mut runs = Vec::new();
        match &mut st.body {
            Body::File(f) => {
                self.shared.left(f.pages.len(), f.pages.dirty_count());
                f.pages.remove_range(0, u64::MAX);
                if f.reserved > 0 {
                    e.domain.space.unreserve(f.reserved);
                    f.reserved = 0;
                }
                runs.extend(f.map.iter().map(|x| (x.addr, x.len)));
                f.inline = None;
            }
            Body::Dir(d) => runs.extend(d.map.iter().map(|x| (x.addr, x.len))),
            Body::Special => {}
        }
        e.domain.free_runs(e.tx(), runs);
        c.nameless.store(true, Ordering::SeqCst);
        st.deleted = true;
        st.nlink = 0;
        st.links.clear();
        e.domain.orphans.lock().remove(&c.ino);
    }

    /// Deletes an orphan that nobody has open or holds any more.
    ///
    /// # Errors
    /// Of the domain; the inode then stays an orphan.
    pub(crate) fn reap(&self, cell: &Arc<Cell>) -> Result<()> {
        while !self.reap_piece(cell)? {}
        Ok(())
    }

    /// As [`Self::reap`], as far as one operation may go; whether nothing is left to do.
    fn reap_piece(&self, cell: &Arc<Cell>) -> Result<bool> {
        let mut op = Op::begin(self, &[cell.domain], 1, true)?;
        let mut st = cell.state.write();
        if st.deleted || st.nlink > 0 || cell.opens.load(Ordering::Acquire) > 0 || self.held.holds(cell) {
            return Ok(true);
        }
        if st.durability.waits_for().any(|d, t| self.dom(d).committed() < t) {
            drop(st);
            self.zombies.lock().push(cell.clone());
            return Ok(true);
        }
        if !op.expect_frees(cell, &st) {
            drop((st, op));
            self.dom(cell.domain).make_journal_room()?;
            return Ok(false);
        }
        if self.truncate_piece(&mut op, cell, &mut st, 0)? {
            return Ok(false);
        }
        op.touch(cell, &mut st)?;
        self.delete_content(op.enter(cell.domain), cell, &mut st);
        Ok(true)
    }

    /// Deletes inodes whose last name went to an inode of another domain, where that is durable by now.
    ///
    /// # Errors
    /// As [`Self::reap`].
    pub(crate) fn reap_zombies(&self) -> Result<()> {
        let all = std::mem::take(&mut *self.zombies.lock());
        for c in all {
            let waits = c.state.read().durability.waits_for().any(|d, t| self.pending(d, t));
            if waits {
                self.zombies.lock().push(c);
            } else if c.opens.load(Ordering::Acquire) == 0 {
                self.reap(&c)?;
            }
        }
        Ok(())
    }

    /// Finds the entry's inode outside the gate: which domains the operation will change.
    pub(crate) fn peek(&self, dir: &Arc<Cell>, name: &[u8]) -> Result<Arc<Cell>> {
        self.lookup_in(dir, name)
    }
}

impl Volume {
    /// Removes a name of something that is no directory.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::IsDir`].
    pub fn unlink(&self, dir: NodeId, name: &[u8]) -> Result<()> {
        let i = self.inner();
        i.remove_in(&i.dir_cell(dir)?, name, false)
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::NotDir`], [`Error::NotEmpty`].
    pub fn rmdir(&self, dir: NodeId, name: &[u8]) -> Result<()> {
        let i = self.inner();
        i.remove_in(&i.dir_cell(dir)?, name, true)
    }
}

impl MountedVolume {
    /// Removes a name of a directory that is at hand: [`Volume::rmdir`], else [`Volume::unlink`].
    pub(crate) fn remove_in(&self, d: &Arc<Cell>, name: &[u8], want_dir: bool) -> Result<()> {
        if want_dir && name == b"." {
            return Err(Error::Invalid("the last part of the path is `.`"));
        }
        if want_dir && name == b".." {
            return Err(Error::NotEmpty);
        }
        check_name(name)?;
        let i = self;
        loop {
            let c = i.peek(d, name)?;
            match (want_dir, c.kind == FileKind::Dir) {
                (true, false) => return Err(Error::NotDir),
                (false, true) => return Err(Error::IsDir),
                _ => {}
            }
            if want_dir {
                i.settle_dir(&c, c.domain)?;
            }
            i.settle_exchange(&c)?;
            let mut op = Op::begin(i, &[d.domain, c.domain], REMOVE_BLOCKS, true)?;
            let mut dst = d.state.write();
            check_alive(&dst)?;
            match i.find_entry(d, &mut dst, name)? {
                Some(e) if e.node == c.ino && e.gener == c.gener => {}
                _ => continue, // another one has the name now
            }
            let mut st = c.state.write();
            if st.deleted || i.exchanging(&st) {
                continue;
            }
            check_changeable(&st)?;
            check_changeable(&dst)?;
            if want_dir && !i.dom(c.domain).with_index(c.ino, &mut st, |ix, load| ix.is_empty(load))? {
                match i.only_stale(&c, &mut st, &[(d, &dst)])? {
                    Child::Stale => {}
                    Child::Lives => return Err(Error::NotEmpty),
                    Child::Busy(busy) => {
                        drop((st, dst, op));
                        Child::wait(&busy);
                        continue;
                    }
                }
            }
            if want_dir && !i.left_dir(&c, c.domain).is_empty() {
                continue;
            }
            op.touch(d, &mut dst)?;
            i.edit_entry(By::Operation(&mut op), d, &mut dst, name, Edit::Remove)?;
            op.touch(&c, &mut st)?;
            let now = i.shared.now();
            st.ctime = now;
            let seq = i.shared.next_seq(st.link_seq);
            st.remove_link(d.ino, name, seq);
            st.durability.operation_changes_names();
            op.hint(d, name, &c);
            i.name_gone(&op, &c, &mut st);
            // where it lives on, its other names may not be durable yet; what moved out of a directory would come back
            // into it
            let moved_out = want_dir && i.left_any(&c);
            let left = Vacated { domain: c.domain, tx: op.tx(c.domain).id, alive: st.nlink > 0 || moved_out };
            i.dom(d.domain).vacated.add(d.ino, name, left);
            return Ok(());
        }
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
            match self.child_below(c, also, &e.name, e.node, e.gener)? {
                Child::Stale => {}
                other => return Ok(other),
            }
        }
    }
}
