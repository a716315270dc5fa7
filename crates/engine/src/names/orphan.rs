//! Inodes without a name: deleted at once, or orphans until the last handle, hold or wait is gone.

use crate::cell::extents::Runs;
use crate::cell::{Body, Cell, State};
use crate::domain::Enter;
use crate::error::{Error, Result};
use crate::types::*;
use crate::volume::MountedVolume;
use crate::volume::operation::Op;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

thread_local! {
    /// This thread deletes what waited for another domain.
    static REAPING: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// This thread is [`REAPING`], until it is dropped, by a panic as well: the thread may reap again after that.
struct Reaping;

impl Drop for Reaping {
    fn drop(&mut self) {
        REAPING.set(false);
    }
}

/// Does `work`; `None` where this thread is at it already.
fn reaping<R>(work: impl FnOnce() -> R) -> Option<R> {
    if REAPING.replace(true) {
        return None;
    }
    let _reaping = Reaping;
    Some(work())
}

/// Inodes that wait to be deleted. Where a panic at one ends that, those behind it wait on.
struct Waiting<'a> {
    mounted: &'a MountedVolume,
    cells: VecDeque<Arc<Cell>>,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if !self.cells.is_empty() {
            self.mounted.zombies.lock().extend(self.cells.drain(..));
        }
    }
}

impl MountedVolume {
    /// Whether the inode may lose a name. One that is open or held stays without, and each commit lists all that do in the journal.
    ///
    /// # Errors
    /// [`Error::NoSpace`] where it is the last name, and the journal has no room for more of them.
    pub(super) fn check_may_stay(&self, c: &Cell, st: &State) -> Result<()> {
        let is_last = c.kind == FileKind::Dir || st.nlink <= 1;
        // what is not open asks nothing that others write
        let stays = is_last && (c.is_open() || self.held.holds(c)) && self.dom(c.domain).has_most_orphans();
        if stays { Err(Error::NoSpace) } else { Ok(()) }
    }

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
        debug_assert!(st.durability.dirty_tx() == Some(op.tx(cell.domain).id), "{}: not touched", cell.ino);
        st.nlink = 0;
        st.links.clear();
        let d = self.dom(cell.domain);
        // in this order: a handle being opened or closed counts itself, then looks whether the inode is gone
        cell.nameless.store(true, Ordering::SeqCst);
        let open = cell.ask_to_tell();
        let held = self.held.orphaned_while(cell, || open);
        let waits = !st.durability.tombstones().is_empty();
        if held || open || waits {
            d.orphans.insert(cell.ino);
            if waits {
                // else nobody would come by: the last handle may be gone before what it waits for is durable
                self.zombies.lock().push(cell.clone());
            }
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
            e.domain.orphans.insert(cell.ino);
            self.zombies.lock().push(cell.clone());
        } else {
            self.delete_content(e, cell, st);
        }
    }

    /// The inode is gone: its blocks become free with this transaction, its nodes when the cell is serialised. The
    /// caller has touched the cell.
    pub(crate) fn delete_content(&self, e: &Enter<'_>, c: &Arc<Cell>, st: &mut State) {
        // a second time would free its blocks, which may be another's by then
        assert!(!st.deleted, "{}: deleted twice", c.ino);
        debug_assert!(st.durability.dirty_tx() == Some(e.tx().id), "{}: not touched", c.ino);
        e.domain.shared.quotas.gone(c, st);
        let mut runs = Runs::new();
        match &mut st.body {
            Body::File(f) => {
                e.domain.memory.remove(f.pages.len(), f.pages.dirty_count());
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
        e.domain.free_runs(e.tx(), &mut runs);
        c.nameless.store(true, Ordering::SeqCst);
        st.deleted = true;
        st.nlink = 0;
        st.links.clear();
        e.domain.orphans.remove(c.ino);
        e.domain.inodes.give();
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
        let mut op = Op::new(self);
        op.begin(&[cell.domain], 1, true)?;
        let mut st = cell.state.write();
        if st.deleted || st.nlink > 0 || cell.is_open() || self.held.holds(cell) {
            return Ok(true);
        }
        if st.durability.waits_for().any(|d, t| self.dom(d).committed_tx() < t) {
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

    /// Deletes inodes whose last name went to an inode of another domain, where that is durable by now. Those of domains that
    /// have failed stay orphans, for the next mount.
    ///
    /// Who deletes may need room, and then comes here again: this does nothing then.
    ///
    /// # Errors
    /// As [`Self::reap`], the first one: that inode is tried again another time, and those behind it are deleted all the
    /// same. Who looks for room goes on: it may be a domain that he does not need.
    pub(crate) fn reap_zombies(&self) -> Result<()> {
        reaping(|| self.reap_all()).unwrap_or(Ok(()))
    }

    /// [`Self::reap_zombies`], by who goes on whatever becomes of it: a commit, which follows, may free more.
    pub(crate) fn reap_for_room(&self) {
        if let Err(e) = self.reap_zombies() {
            tracing::debug!(error = %e, "replaced files that cannot be deleted now");
        }
    }

    fn reap_all(&self) -> Result<()> {
        let mut all = Waiting { mounted: self, cells: std::mem::take(&mut *self.zombies.lock()).into() };
        let mut result = Ok(());
        while let Some(c) = all.cells.pop_front() {
            if self.dom(c.domain).failed().is_some() {
                continue;
            }
            let waits = c.state.read().durability.waits_for().any(|d, t| self.pending(d, t));
            if waits {
                self.zombies.lock().push(c);
            } else if !c.is_open()
                && let Err(e) = self.reap(&c)
            {
                self.zombies.lock().push(c);
                result = result.and(Err(e));
            }
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Cred, MkfsOptions, MountOptions, NewNode, Volume};
    use braidfs_device::{Device, MemDevice};
    use std::panic::{AssertUnwindSafe, catch_unwind};

    #[test]
    fn a_thread_reaps_again_after_a_panic() {
        let panics = || reaping(|| -> () { panic!("on purpose") });
        std::panic::catch_unwind(panics).unwrap_err();
        assert!(reaping(|| reaping(|| ()).is_none()).expect("it is at it still"));
    }

    #[test]
    fn a_panic_at_one_leaves_the_others_to_be_reaped() {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(16384));
        crate::mkfs::format(std::slice::from_ref(&device), &MkfsOptions::default()).unwrap();
        let v = Volume::mount(vec![device], MountOptions { background: false, ..MountOptions::default() }).unwrap();
        let node = NewNode { kind: FileKind::File, mode: 0o644, umask: 0, rdev: 0, target: b"" };
        let file = |name: &[u8]| {
            let ino = v.create(InodeNo::ROOT, name, &node, &Cred::root()).unwrap().ino;
            v.mounted().cell(ino).unwrap()
        };
        let (first, last) = (file(b"first"), file(b"last"));
        // there is no such domain
        let st = State::fresh(FileKind::File, 0, 0, 0, Timestamp::default());
        let inode = InodeRef { ino: last.ino, generation: 0 };
        let bad = Arc::new(Cell::new(inode, DomainId(999), FileKind::File, st));
        let i = v.mounted();
        i.zombies.lock().extend([first.clone(), bad, last.clone(), first.clone()]);
        catch_unwind(AssertUnwindSafe(|| i.reap_zombies())).unwrap_err();
        let left: Vec<InodeNo> = i.zombies.lock().iter().map(|c| c.ino).collect();
        assert_eq!(left, [last.ino, first.ino], "those behind it");
        i.reap_zombies().unwrap();
        assert!(i.zombies.lock().is_empty());
        drop((first, last));
        v.unmount().unwrap();
    }
}
