//! Inodes without a name: deleted at once, or orphans until the last handle, hold or wait is gone.

use crate::braid::frontier::Frontier;
use crate::cell::extents::Runs;
use crate::cell::{Body, Cell, State};
use crate::domain::Enter;
use crate::error::{Error, Result};
use crate::types::*;
use crate::volume::MountedVolume;
use crate::volume::operation::Op;
use std::collections::HashSet;
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

/// What an operation knows of replaced files that may be why it meets the limit of an owner ([`MountedVolume::end_replaced_of`]).
#[derive(Debug)]
pub(crate) struct Replaced {
    /// So many were gone before it was attempted, of whichever owner.
    gone: u64,
    /// It was attempted once more since others were.
    again: bool,
}

/// What became of an inode without a name that was to be deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reaped {
    /// It is deleted, or not to be: somebody has it open or holds it, or it has a name again.
    Done,
    /// Who took its name is not durable.
    Waits,
    /// As far as one operation may go.
    InPart,
}

/// Those that need not wait in the list any more. They are taken off it also where a panic at the last of them ends the work, so
/// that those behind it are not kept waiting by it each time.
struct Ended<'a> {
    mounted: &'a MountedVolume,
    cells: HashSet<*const Cell>,
}

impl Ended<'_> {
    fn take_off(&mut self) -> HashSet<*const Cell> {
        let ended = std::mem::take(&mut self.cells);
        if !ended.is_empty() {
            self.mounted.zombies.lock().retain(|c| !ended.contains(&Arc::as_ptr(c)));
        }
        ended
    }
}

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.take_off();
    }
}

/// What is freed one by one where the inode goes.
fn extents_of(st: &State) -> usize {
    if let Body::File(f) = &st.body { f.map.extent_count() } else { 0 }
}

impl MountedVolume {
    /// Whether the inode may lose a name. One that is open or held, or `waits` for who takes the name, stays without, and each
    /// commit lists all that do in the journal: no where that has no room for more of them. The caller lets everything go,
    /// has [`Self::shorten_orphans`] see to it, and begins again.
    pub(super) fn may_stay(&self, c: &Cell, st: &State, waits: bool) -> bool {
        let is_last = c.kind == FileKind::Dir || st.nlink <= 1;
        // what is not open, and does not wait, asks nothing that others write
        if !is_last {
            true
        } else if c.is_open() || self.held.holds(c) {
            !self.dom(c.domain).has_most_orphans()
        } else {
            !waits || !self.dom(c.domain).has_most_replaced()
        }
    }

    /// Whether an inode is deleted with the name that it is about to lose: what it has need not be written then. Of a short one it is
    /// not asked ([`Op::is_short`]).
    pub(super) fn goes_with_name(&self, c: &Cell, st: &State) -> bool {
        let is_last = c.kind == FileKind::Dir || st.nlink <= 1;
        let goes = is_last && !c.is_open() && !self.held.holds(c) && st.durability.tombstones().is_empty();
        Op::is_short(st) || goes && extents_of(st) <= self.dom(c.domain).pieces_max()
    }

    /// Announces what an inode of a long record frees as it goes with its name ([`Self::goes_with_name`]), which then needs no
    /// blocks: left for later it would be written whole. False where the journal has too little room now: the caller lets
    /// everything go, has [`crate::domain::Domain::make_journal_room`] make some, and begins again.
    #[must_use]
    pub(super) fn expect_to_go(&self, op: &Op<'_>, c: &Cell, st: &State) -> bool {
        Op::is_short(st) || !self.goes_with_name(c, st) || op.enter(c.domain).expect_pieces(extents_of(st))
    }

    /// Deletes replaced files of a domain whose journal has no room for more inodes without a name. Not inside a gate.
    ///
    /// # Errors
    /// [`Error::NoSpace`] where there is none that can go, and none has gone since [`Self::replaced_gone`] said `gone`.
    pub(super) fn shorten_orphans(&self, d: DomainId, gone: u64) -> Result<()> {
        if self.end_replaced_since(d, gone) { Ok(()) } else { Err(Error::NoSpace) }
    }

    /// [`Self::end_replaced`] of a domain; also true where another thread has ended some since [`Self::replaced_gone`] said `gone`,
    /// before the attempt that was refused: they are on no list any more, and may be what was in the way.
    pub(super) fn end_replaced_since(&self, d: DomainId, gone: u64) -> bool {
        self.end_replaced(|c, _| c.domain == d) || self.replaced_gone(d) != gone
    }

    /// How many replaced files of a domain are gone so far.
    #[inline]
    pub(super) fn replaced_gone(&self, d: DomainId) -> u64 {
        self.dom(d).orphans.replaced_gone()
    }

    /// Before an operation that may meet the limit of an owner.
    #[inline]
    pub(crate) fn replaced(&self) -> Replaced {
        Replaced { gone: self.shared.replaced_gone.load(Ordering::Acquire), again: false }
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
        let extents = extents_of(st);
        if extents > e.domain.pieces_max() || !(e.expects(extents) || e.expect_pieces(extents)) {
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
        if self.reap_whole(cell)? == Reaped::Waits {
            self.zombies.lock().push(cell.clone());
        }
        Ok(())
    }

    /// An orphan could not be deleted when the last that kept it was gone: it is tried again. Its number is not given out again before.
    pub(crate) fn reap_later(&self, ino: InodeNo) {
        self.unreaped.lock().push_back(ino);
    }

    /// Deletes what could not be deleted before. The first that fails again ends it: what it lacks the others lack, too, mostly. It is
    /// the last one the next time.
    fn reap_failed(&self) {
        let all = self.unreaped.lock().len();
        for _ in 0..all {
            let Some(ino) = self.unreaped.lock().pop_front() else { return };
            // those of a domain that has failed are left to the next mount
            if !self.domain(ino).is_ok_and(|d| d.failed().is_none()) {
                continue;
            }
            if let Err(e) = self.find(ino).and_then(|c| c.map_or(Ok(()), |c| self.reap(&c))) {
                tracing::debug!(error = %e, %ino, "an unlinked inode that cannot be deleted now");
                self.reap_later(ino);
                return;
            }
        }
    }

    fn reap_whole(&self, cell: &Arc<Cell>) -> Result<Reaped> {
        loop {
            let reaped = self.reap_piece(cell)?;
            if reaped != Reaped::InPart {
                return Ok(reaped);
            }
        }
    }

    fn reap_piece(&self, cell: &Arc<Cell>) -> Result<Reaped> {
        let mut op = Op::new(self);
        op.begin(&[cell.domain], 1, true)?;
        let mut st = cell.state.write();
        if st.deleted || st.nlink > 0 || cell.is_open() || self.held.holds(cell) {
            return Ok(Reaped::Done);
        }
        if self.waits(&st) {
            return Ok(Reaped::Waits);
        }
        if !op.expect_frees(cell, &st) {
            drop((st, op));
            self.dom(cell.domain).make_journal_room()?;
            return Ok(Reaped::InPart);
        }
        if self.truncate_piece(&mut op, cell, &mut st, 0)? {
            return Ok(Reaped::InPart);
        }
        op.touch(cell, &mut st)?;
        self.delete_content(op.enter(cell.domain), cell, &mut st);
        Ok(Reaped::Done)
    }

    /// Deletes inodes whose last name went to an inode of another domain, where that is durable by now, and those that could not be
    /// deleted before ([`Self::reap_later`]). Those of domains that have failed stay orphans, for the next mount.
    ///
    /// Who deletes may need room, and then comes here again: this does nothing then.
    ///
    /// # Errors
    /// As [`Self::reap`], the first one: that inode is tried again another time, and those behind it are deleted all the
    /// same. Who looks for room goes on: it may be a domain that he does not need.
    pub(crate) fn reap_zombies(&self) -> Result<()> {
        reaping(|| {
            self.reap_failed();
            let all = self.zombies.lock().clone();
            self.reap_all(&all)
        })
        .unwrap_or(Ok(()))
    }

    /// [`Self::reap_zombies`], by who goes on whatever becomes of it: a commit, which follows, may free more.
    pub(crate) fn reap_for_room(&self) {
        if let Err(e) = self.reap_zombies() {
            tracing::debug!(error = %e, "replaced files that cannot be deleted now");
        }
    }

    /// [`Self::reap_zombies`] where the one that waits longest needs to wait no more, for who comes again.
    pub(crate) fn reap_if_due(&self) {
        let first = self.zombies.lock().first().cloned();
        if first.is_some_and(|c| !self.waits(&c.state.read())) {
            self.reap_for_room();
        }
    }

    /// Deletes replaced inodes of which `of` says so, after the commits that they wait for: whether any of them is gone. For who
    /// would else say that there is no room, or that somebody has as much as may be: what was replaced is no longer there.
    /// Not inside a gate.
    fn end_replaced(&self, of: impl Fn(&Cell, &State) -> bool) -> bool {
        reaping(|| {
            let mut all = self.zombies.lock().clone();
            let mut first = Frontier::EMPTY;
            all.retain(|c| {
                let st = c.state.read();
                let goes = of(c, &st) && !c.is_open() && !self.held.holds(c);
                if goes {
                    st.durability.waits_for().iter().filter(|(d, t)| self.pending(*d, *t)).for_each(|(d, t)| {
                        first.raise(d, t);
                    });
                }
                goes
            });
            // an error fails its domain, which says so itself; what waits for others can go all the same
            let ended = self.commit_some(&first).and(self.reap_all(&all));
            if let Err(e) = ended {
                tracing::debug!(error = %e, "replaced files that cannot be deleted now");
            }
            all.iter().any(|c| c.state.read().deleted)
        })
        .unwrap_or(false)
    }

    /// [`Self::end_replaced`] of a domain, and [`Self::reap_for_room`] of the others, which may give groups then: by who goes on
    /// whatever becomes of it.
    pub(crate) fn end_replaced_in(&self, d: DomainId) {
        self.end_replaced(|c, _| c.domain == d);
        self.reap_for_room();
    }

    /// [`Self::end_replaced`] of what counts for an owner, who has met a limit: where something is gone, what was refused is
    /// tried again.
    ///
    /// Also true where another thread has ended some since `before`, which are on no list any more. But of whom they were nobody knows:
    /// so that who has his limit is not kept trying by all who replace files, that is true for an operation once.
    pub(crate) fn end_replaced_of(&self, owner: QuotaOwner, before: &mut Replaced) -> bool {
        if self.end_owners_replaced(owner) {
            return true;
        }
        let others = self.replaced().gone != before.gone;
        others && !std::mem::replace(&mut before.again, true)
    }

    /// [`Self::end_replaced`] of an owner.
    pub(crate) fn end_owners_replaced(&self, owner: QuotaOwner) -> bool {
        self.end_replaced(|_, st| st.owners().each().any(|o| o == owner))
    }

    /// Whether somebody decides about names of the inode whose transaction is not durable. That of a domain that has failed never
    /// will be.
    fn waits(&self, st: &State) -> bool {
        st.durability.waits_for().any(|d, t| self.dom(d).committed_tx() < t)
    }

    /// [`Self::reap_zombies`] of these. They stand in the list meanwhile: who comes by finds them, and waits for those at which
    /// another thread is.
    fn reap_all(&self, all: &[Arc<Cell>]) -> Result<()> {
        let mut ended = Ended { mounted: self, cells: HashSet::new() };
        let mut result = Ok(());
        for c in all {
            ended.cells.insert(Arc::as_ptr(c));
            match self.reap_zombie(c) {
                Ok(Reaped::Waits) => drop(ended.cells.remove(&Arc::as_ptr(c))),
                Ok(_) => {}
                Err(e) => {
                    ended.cells.remove(&Arc::as_ptr(c));
                    result = result.and(Err(e));
                }
            }
        }
        let gone = ended.take_off();
        if gone.is_empty() {
            return result;
        }
        // one that was open may have been closed before it was taken off the list
        let again = |c: &&Arc<Cell>| {
            gone.contains(&Arc::as_ptr(c)) && !c.is_open() && !self.held.holds(c) && self.is_left(c, &c.state.read())
        };
        let left: Vec<_> = all.iter().filter(again).cloned().collect();
        if !left.is_empty() {
            self.zombies.lock().extend(left);
        }
        result
    }

    /// Whether an inode without a name is to be deleted by and by.
    fn is_left(&self, c: &Cell, st: &State) -> bool {
        !st.deleted && st.nlink == 0 && self.dom(c.domain).failed().is_none()
    }

    fn reap_zombie(&self, c: &Arc<Cell>) -> Result<Reaped> {
        {
            let st = c.state.read();
            if !self.is_left(c, &st) {
                return Ok(Reaped::Done);
            }
            if self.waits(&st) {
                return Ok(Reaped::Waits);
            }
        }
        if c.is_open() {
            return Ok(Reaped::Done);
        }
        let reaped = self.reap_whole(c)?;
        if reaped == Reaped::Done && c.state.read().deleted {
            // before it leaves the list: who finds it there no more sees this
            self.shared.replaced_gone.fetch_add(1, Ordering::Release);
            self.dom(c.domain).orphans.note_replaced_gone();
        }
        Ok(reaped)
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
        i.zombies.lock().extend([first.clone(), bad, last.clone()]);
        catch_unwind(AssertUnwindSafe(|| i.reap_zombies())).unwrap_err();
        let left: Vec<InodeNo> = i.zombies.lock().iter().map(|c| c.ino).collect();
        assert_eq!(left, [last.ino], "what is behind it");
        i.reap_zombies().unwrap();
        assert!(i.zombies.lock().is_empty());
        drop((first, last));
        v.unmount().unwrap();
    }

    /// Another thread ends what was in the way between a refusal and the look for what could go: it is on no list any more.
    #[test]
    fn what_another_thread_has_ended_counts_for_who_was_refused() {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(32768));
        let how = MkfsOptions { domains: Some(2), ..MkfsOptions::default() };
        crate::mkfs::format(std::slice::from_ref(&device), &how).unwrap();
        let v = Volume::mount(vec![device], MountOptions { background: false, ..MountOptions::default() }).unwrap();
        let new = |kind| NewNode { kind, mode: 0o755, umask: 0, rdev: 0, target: b"" };
        let make = |dir, name: &[u8], kind| v.create(dir, name, &new(kind), &Cred::root()).unwrap().ino;
        let dirs = [b"a", b"b"].map(|name| make(InodeNo::ROOT, name, FileKind::Dir));
        assert_ne!(v.domain_of(dirs[0]).unwrap(), v.domain_of(dirs[1]).unwrap());
        dirs.iter().for_each(|dir| _ = make(*dir, b"f", FileKind::File));
        v.sync().unwrap();
        let i = v.mounted();
        let [own, other] = [1, 0].map(|n: usize| v.domain_of(dirs[n]).unwrap());
        let (mut before, owner) = (i.replaced(), QuotaOwner::User(0));
        let gone = [own, other].map(|d| i.replaced_gone(d));
        v.rename_by(dirs[0], b"f", dirs[1], b"f", RenameMode::Replace, &Cred::root()).unwrap();
        assert_eq!((i.zombies.lock().len(), i.replaced_gone(own)), (1, gone[0]));
        v.sync().unwrap();
        i.reap_zombies().unwrap();
        assert!(i.zombies.lock().is_empty());
        assert!(i.end_replaced_of(owner, &mut before), "it is gone");
        assert!(!i.end_replaced_of(owner, &mut before), "once: of others there may always be some");
        assert!(!i.end_replaced_of(owner, &mut i.replaced()), "and nothing since");
        assert!(i.shorten_orphans(own, gone[0]).is_ok() && i.shorten_orphans(own, i.replaced_gone(own)).is_err());
        assert!(i.shorten_orphans(other, gone[1]).is_err(), "in another domain");
        v.unmount().unwrap();
    }
}
