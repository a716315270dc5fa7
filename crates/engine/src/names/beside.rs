//! Names of a directory that several threads change at the same time (`cell::changers`): made and taken away with the
//! directory locked for reading, and the bucket of the name for writing.
//!
//! So is done what is plain. What is not (a directory is made or removed, a bucket has to be read, split or given up, something
//! must be durable first, or fails) is left to the operation that has the directory for itself: `None`, and nothing
//! has changed. What can fail (a domain, as it writes out an older state) is done before the first entry changes.
//!
//! Locks: the directory, then the inode, then the bucket. All that is said of a name is said with its bucket locked: the
//! entry, the inode's link, who left it, and what is known of names looked up lately.

use super::asker::{Asker, SEARCH, WRITE};
use super::checks::{check_alive, check_changeable, check_name, check_takes_names};
use super::create::{Made, blocks_of};
use super::lookup::is_named;
use super::placement::NewInode;
use super::remove::REMOVE_BLOCKS;
use super::rename::{LOCK_ATTEMPTS, RENAME_BLOCKS};
use crate::braid::entry::{By, Edit};
use crate::braid::vacated::Vacated;
use crate::cell::dentries::{Key, Target};
use crate::cell::dir::{Lookup, OpenBucket, SPLIT_PARTS};
use crate::cell::{Body, Cell, State};
use crate::error::Result;
use crate::planted::{Bug, planted, step};
use crate::types::*;
use crate::volume::MountedVolume;
use crate::volume::operation::Op;
use braidfs_format::dentry::Dentry;
use braidfs_sync::{BiasedReadGuard, BiasedWriteGuard};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Buckets that are split together: all of a directory of some ten thousand names, whose buckets fill up together, so that the others
/// wait once for that.
const SPLITS: usize = 64;
/// Blocks that this makes dirty at most.
const SPLIT_BLOCKS: u64 = SPLIT_PARTS * SPLITS as u64;

impl MountedVolume {
    /// Whether names of a directory are to be changed so, if they can.
    pub(super) fn is_shared(d: &Cell) -> bool {
        d.kind == FileKind::Dir && d.wide.load(Ordering::Relaxed)
    }

    /// Makes an inode with its first name.
    ///
    /// # Errors
    /// As [`Self::create_in`], but those that its other way would tell, too.
    pub(super) fn create_beside(&self, d: &Cell, name: &[u8], new: &NewNode<'_>, cred: &Cred) -> Result<Option<Made>> {
        if new.kind == FileKind::Dir || self.maybe_stale.load(Ordering::Relaxed) || check_name(name).is_err() {
            return Ok(None);
        }
        let key = Key::of(d.ino, d.generation, name);
        // who finds that a name is taken, or has no room, needs no number and no blocks
        if self.dentries.get(&key).is_some() {
            return Ok(None);
        }
        let hash = self.hash(name);
        let mut full = self.is_full_beside(d, name, hash);
        if full == Some(true) {
            self.split_beside(d, hash)?;
            full = self.is_full_beside(d, name, hash);
        }
        if full != Some(false) {
            return Ok(None);
        }
        let target = self.place(d, &d.state.read(), new.kind);
        let inode = self.new_inode_anywhere(target, d.ino)?;
        let r = self.create_beside_at(d, (name, &key, hash), new, cred, inode);
        if !matches!(r, Ok(Some(_))) {
            self.give_number_back(inode.domain, inode.inode);
        }
        r
    }

    /// Whether the bucket in which a name would stand that is not there has to be split for it; `None` where it is to be made by
    /// who has the directory for itself.
    fn is_full_beside(&self, d: &Cell, name: &[u8], hash: u64) -> Option<bool> {
        let st = d.state.read();
        let dir = st.shared_in(self.dom(d.domain).running()).filter(|_| check_alive(&st).is_ok())?;
        let bucket = dir.index.open(hash).filter(|b| b.find(name).is_none())?;
        bucket.is_full(name).then_some(true).or_else(|| bucket.room(name).map(|_| false))
    }

    /// Splits a full bucket of a directory that several threads change, and others that nearly are, so that who has it for
    /// itself for that has it seldom. Where there are not so many blocks, one operation after the other splits what it must.
    fn split_beside(&self, d: &Cell, hash: u64) -> Result<()> {
        let mut op = Op::new(self);
        if !op.begin_if_room(d.domain, SPLIT_BLOCKS)? {
            return Ok(());
        }
        let mut st = d.state.write();
        if st.shared_in(op.tx(d.domain).id).is_none() {
            return Ok(());
        }
        let domain = op.enter(d.domain).domain;
        let dirtied = domain.with_index(d.ino, &mut st, |ix, _| {
            let before = ix.dirty_buckets();
            ix.split_ahead(hash, SPLITS);
            Ok(ix.dirty_buckets().saturating_sub(before))
        })?;
        op.credit(d.domain, dirtied as u64);
        // each is written elsewhere: the journal must have room for that
        op.tx(d.domain).expect_pages(dirtied);
        Ok(())
    }

    fn create_beside_at(
        &self,
        d: &Cell,
        (name, key, hash): (&[u8], &Key, u64),
        new: &NewNode<'_>,
        cred: &Cred,
        NewInode { inode, domain: target }: NewInode,
    ) -> Result<Option<Made>> {
        let lender = (target != d.domain).then_some(d.domain);
        let mut op = Op::new(self);
        op.begin_lending(&[d.domain, target], blocks_of(new), false, lender)?;
        let dst = d.state.read();
        let Some(dir) = dst.shared_in(op.tx(d.domain).id) else { return Ok(None) };
        if check_alive(&dst).and_then(|()| check_takes_names(&dst)).is_err() {
            return Ok(None);
        }
        let Ok(mut st) = self.fresh(&dst, new, cred) else { return Ok(None) };
        if op.lacks_for(&mut [(target, &mut st)]).is_some() {
            return Ok(None);
        }
        let Ok(mut charge) = self.charge_inode(&st, cred) else { return Ok(None) };
        st.nlink = 1;
        let cell = Arc::new(Cell::new(inode, target, new.kind, st));
        let mut st = cell.state.write();
        let Some(mut bucket) = dir.index.open(hash) else { return Ok(None) };
        if bucket.find(name).is_some() {
            return Ok(None);
        }
        let Some(room) = bucket.room(name) else { return Ok(None) };
        let left = self.vacated_lately(d, name, hash, &mut bucket);
        let Some(before) = Op::before(&left, target) else { return Ok(None) };
        let kind = new.kind.d_type();
        let entry = Dentry { hash: 0, node: inode.ino, generation: inode.generation, kind, name: name.into() };
        let time = self.shared.name_time_beside(dir, &mut bucket, 0);
        st.durability.inode_takes_name(&before);
        st.gain_link(d.ino, name, time);
        if Self::needs_page(&st, new) {
            if charge.blocks(1).is_err() {
                return Ok(None);
            }
            self.give_page(&mut op, target, &mut st);
        }
        op.touch(&cell, &mut st)?;
        // nothing fails from here on
        st.durability.operation_changes_names();
        let counts = bucket.insert(room, entry);
        dir.note_change(counts, self.shared.now(), time, op.concerned(d.domain, target));
        self.shared.count_beside();
        if counts.first.is_some() {
            op.credit(d.domain, 1);
        }
        op.grows_by_name(d.domain, name);
        self.dentries.put(key, Target { node: inode.ino, generation: inode.generation, kind: new.kind });
        op.hint(d, name, &cell);
        let attr = cell.attr(&st);
        drop(st);
        self.note_inode_made(&cell, charge);
        // before anybody can find its entry
        self.dom(target).cells.insert_new(cell.clone());
        drop(bucket);
        Ok(Some((cell, attr)))
    }

    /// What a name of a shared directory names, if that can be told from memory, and is no directory.
    fn find_beside(&self, d: &Cell, name: &[u8], key: &Key) -> Result<Option<Arc<Cell>>> {
        let inode: InodeRef = match self.dentries.get_to_forget(key) {
            Some(t) => t.inode(),
            None => {
                let st = d.state.read();
                let Body::Dir(b) = &st.body else { return Ok(None) };
                match b.index.find_loaded(self.hash(name), name, |e| e.into()) {
                    Lookup::Found(inode) => inode,
                    _ => return Ok(None),
                }
            }
        };
        let c = self.find(inode.ino)?;
        Ok(c.filter(|c| c.is(inode) && c.kind != FileKind::Dir && is_named(c, key, d.ino, name)))
    }

    /// Takes a name of something away that is no directory.
    ///
    /// # Errors
    /// Of the domain.
    pub(super) fn remove_beside(&self, d: &Cell, name: &[u8], asker: Asker<'_>) -> Result<Option<()>> {
        if self.maybe_stale.load(Ordering::Relaxed) || check_name(name).is_err() {
            return Ok(None);
        }
        let key = Key::of(d.ino, d.generation, name);
        let Some(c) = self.find_beside(d, name, &key)? else { return Ok(None) };
        let mut op = Op::new(self);
        op.begin(&[d.domain, c.domain], REMOVE_BLOCKS, true)?;
        let dst = d.state.read();
        let Some(dir) = dst.shared_in(op.tx(d.domain).id) else { return Ok(None) };
        if check_alive(&dst).and_then(|()| check_changeable(&dst)).is_err() {
            return Ok(None);
        }
        let mut st = c.state.write();
        if !self.may_leave(&st) || !self.may_stay(&c, &st, false) || asker.check_remove(&dst, st.uid).is_err() {
            return Ok(None);
        }
        // (the directory is the transaction's by now)
        if !self.goes_with_name(&c, &st) && op.lacks(&c, &mut st).is_some() || !self.expect_to_go(&op, &c, &st) {
            return Ok(None);
        }
        let hash = self.hash(name);
        let Some(mut bucket) = dir.index.open(hash) else { return Ok(None) };
        if !names(&bucket, name, &c) || !st.has_link(d.ino, name) || !bucket.can_remove(name) {
            return Ok(None);
        }
        // what is durable by now must not keep the inode when this was its last name
        self.dom(c.domain).forget_durable(&mut st);
        step(Bug::InodeLeftOut, || op.touch(&c, &mut st))?;
        // nothing fails from here on
        self.dentries.forget(&key);
        let Some(counts) = bucket.remove(name) else { return Ok(None) };
        let now = self.shared.now();
        let time = self.shared.name_time_beside(dir, &mut bucket, st.link_seq);
        dir.note_change(counts, now, time, op.concerned(d.domain, c.domain));
        self.shared.count_beside();
        if counts.first.is_some() {
            op.credit(d.domain, 1);
        }
        st.ctime = now;
        st.remove_link(d.ino, name, time);
        st.durability.operation_changes_names();
        op.hint(d, name, &c);
        self.name_gone(&op, &c, &mut st);
        let left = Vacated { domain: c.domain, tx: op.tx(c.domain).id, alive: st.nlink > 0 };
        if !planted(Bug::VacatedUntold) {
            let round = self.dom(d.domain).vacated.add_lately(d.ino, name, left);
            bucket.left().note(hash, round);
        }
        Ok(Some(()))
    }

    /// Renames something that is no directory to a free name of a shared directory, from another one, which is locked for
    /// writing.
    ///
    /// # Errors
    /// Of the domains.
    pub(super) fn rename_beside(
        &self,
        (from, name): (&Arc<Cell>, &[u8]),
        (to, new): (&Cell, &[u8]),
        asker: Asker<'_>,
    ) -> Result<Option<()>> {
        if from.ino == to.ino
            || self.maybe_stale.load(Ordering::Relaxed)
            || check_name(name).and_then(|()| check_name(new)).is_err()
        {
            return Ok(None);
        }
        let (key, new_key) = (Key::of(from.ino, from.generation, name), Key::of(to.ino, to.generation, new));
        let Some(c) = self.find_beside(from, name, &key)? else { return Ok(None) };
        let may = asker.check_remove_early(from, &c).and_then(|()| asker.check_early(to, WRITE | SEARCH));
        if may.is_err() || self.check_border(c.domain, to.domain).is_err() {
            return Ok(None);
        }
        let hash = self.hash(new);
        if self.is_full_beside(to, new, hash) == Some(true) {
            self.split_beside(to, hash)?;
        }
        let unwritten = self.commit_new_parents(to, &c, c.domain)?;
        let mut op = Op::new(self);
        op.begin(&[from.domain, to.domain, c.domain], RENAME_BLOCKS, false)?;
        let Some((mut fst, tst)) = lock_two(from, to) else { return Ok(None) };
        let Some(dir) = tst.shared_in(op.tx(to.domain).id) else { return Ok(None) };
        if check_alive(&fst).and_then(|()| check_changeable(&fst)).is_err()
            || check_alive(&tst).and_then(|()| check_takes_names(&tst)).is_err()
            // once more: a tenant may be about to lose its journal since, and looks with its directory locked
            || self.check_border(c.domain, to.domain).is_err()
            || !self.find_entry(from, &mut fst, name)?.is_some_and(|e| c.is(e.inode))
        {
            return Ok(None);
        }
        let mut st = c.state.write();
        if self.check_project(&tst, &st).is_err() || st.check_gains(new, Some(name)).is_err() {
            return Ok(None);
        }
        if asker.check_remove(&fst, st.uid).and_then(|()| asker.check_add(&tst)).is_err() {
            return Ok(None);
        }
        if !self.may_leave(&st) || !st.has_link(from.ino, name) || !unwritten.holds(op.enter(c.domain), &c, &st) {
            return Ok(None);
        }
        let Some(mut bucket) = dir.index.open(hash) else { return Ok(None) };
        if bucket.find(new).is_some() {
            return Ok(None);
        }
        let Some(room) = bucket.room(new) else { return Ok(None) };
        let left = self.vacated_lately(to, new, hash, &mut bucket);
        let Some(before) = Op::before(&left, c.domain) else { return Ok(None) };
        if op.lacks_for(&mut [(from.domain, &mut fst), (c.domain, &mut st)]).is_some() {
            return Ok(None);
        }
        self.dom(c.domain).forget_durable(&mut st);
        op.touch(from, &mut fst)?;
        step(Bug::InodeLeftOut, || op.touch(&c, &mut st))?;
        // nobody who walks by names looked up lately finds the inode under the new name and then under the old one, too
        self.dentries.forget(&key);
        self.edit_entry(By::Operation(&mut op), from, &mut fst, name, Edit::Remove)?;
        // nothing fails from here on
        let kind = c.kind.d_type();
        let entry = Dentry { hash: 0, node: c.ino, generation: c.generation, kind, name: new.into() };
        let counts = bucket.insert(room, entry);
        let now = self.shared.now();
        let than = st.link_seq.max(fst.dir().map_or(0, |d| d.name_time));
        let time = self.shared.name_time_beside(dir, &mut bucket, than);
        self.shared.raise_name_time(&mut fst, time);
        dir.note_change(counts, now, time, op.concerned(to.domain, c.domain));
        self.shared.count_beside();
        if counts.first.is_some() {
            op.credit(to.domain, 1);
        }
        op.grows_by_name(to.domain, new);
        self.dentries.put(&new_key, Target { node: c.ino, generation: c.generation, kind: c.kind });
        st.remove_link(from.ino, name, time);
        st.gain_link(to.ino, new, time);
        st.ctime = now;
        st.durability.operation_changes_names();
        st.durability.inode_takes_name(&before);
        // as `plan` has it of one that takes a free name
        let left = Vacated { domain: c.domain, tx: op.tx(c.domain).id, alive: true };
        if !planted(Bug::VacatedUntold) {
            self.note_vacated(from, &fst, name, left);
        }
        op.hint(from, name, &c);
        op.hint(to, new, &c);
        Ok(Some(()))
    }

    /// Whether an inode may lose a name without anything being made durable first, or an error.
    fn may_leave(&self, st: &State) -> bool {
        !st.deleted && !self.exchanging(st) && check_changeable(st).is_ok()
    }
}

/// Locks two directories of which nobody knows whether one is above the other, the first for writing, the second for reading:
/// none is waited for with the other one locked. `None` where others keep them locked.
fn lock_two<'c>(one: &'c Cell, other: &'c Cell) -> Option<(BiasedWriteGuard<'c, State>, BiasedReadGuard<'c, State>)> {
    for _ in 0..LOCK_ATTEMPTS / 2 {
        let first = one.state.write();
        if let Some(second) = other.state.try_read() {
            return Some((first, second));
        }
        drop(first);
        let second = other.state.read();
        if let Some(first) = one.state.try_write() {
            return Some((first, second));
        }
    }
    None
}

/// Whether the entry of the name is that of this inode.
fn names(bucket: &OpenBucket<'_>, name: &[u8], c: &Cell) -> bool {
    bucket.find(name).is_some_and(|e| c.is(e.into()))
}
