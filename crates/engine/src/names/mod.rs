//! Names and files over all domains: one file per family of verbs.
//!
//! Every changing operation has one shape: find the domains that it changes; enter them in order; lock its cells
//! (parents before children, then by number); check; reserve; change; leave. What can wait (a commit, a claim of a group,
//! reading a whole file) is done outside the gate, and the operation starts again.

pub mod create;
pub mod lookup;
pub mod path;
pub mod readdir;
pub mod remove;
pub mod rename;

use crate::braid::durability::Before;
use crate::braid::frontier::Frontier;
use crate::braid::rules::{Taking, end_directory, take_name};
use crate::braid::vacated::Leavers;
use crate::cell::names::Key;
use crate::cell::{Body, Cell, State, name_hash};
use crate::domain::commit::{Enters, enter_all};
use crate::domain::tx::Tx;
use crate::domain::{Domain, Enter};
use crate::error::{Error, Result};
use crate::types::*;
use crate::volume::MountedVolume;
use braidfs_format::dentry::Dentry;
use braidfs_format::inode::NAME_MAX;
use braidfs_format::journal::Record;
use smallvec::SmallVec;
use std::sync::Arc;
use std::sync::atomic::Ordering;

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

/// What an entry says but for its name, which whoever looked for it has.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Named {
    pub node: NodeId,
    pub gener: u32,
    /// `d_type`.
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

/// The domains that an operation changes, entered.
pub(crate) struct Op<'a> {
    pub inner: &'a MountedVolume,
    enters: Enters<'a>,
    /// Blocks reserved per entered domain and not yet handed to a transaction.
    held: SmallVec<[u64; 2]>,
}

impl<'a> Op<'a> {
    /// Enters `domains` and reserves `blocks` metadata blocks in each.
    ///
    /// # Errors
    /// [`Error::NoSpace`] where nothing can be made free.
    pub fn begin(inner: &'a MountedVolume, domains: &[DomainId], blocks: u64, essential: bool) -> Result<Op<'a>> {
        Self::begin_lending(inner, domains, blocks, essential, None)
    }

    /// [`Self::begin`], with the blocks in domain `lender` out of half its reserve where it has no others: what is made goes
    /// to another one, since this has no room.
    ///
    /// # Errors
    /// As [`Self::begin`].
    pub fn begin_lending(
        inner: &'a MountedVolume,
        domains: &[DomainId],
        blocks: u64,
        essential: bool,
        lender: Option<DomainId>,
    ) -> Result<Op<'a>> {
        let mut ids: SmallVec<[DomainId; 4]> = SmallVec::from_slice(domains);
        ids.sort_unstable();
        ids.dedup();
        let doms: SmallVec<[&Domain; 2]> = ids.iter().map(|d| &**inner.dom(*d)).collect();
        let mut attempt = 0;
        'again: loop {
            let enters = enter_all(&doms)?;
            if inner.shared.closing.load(Ordering::Relaxed) {
                return Err(Error::ReadOnly);
            }
            for (i, e) in enters.iter().enumerate() {
                let space = &e.domain.space;
                let lends = lender == Some(e.domain.id) && space.reserve_again(blocks).is_ok();
                if !lends && space.reserve(blocks, essential).is_err() {
                    enters[..i].iter().for_each(|e| e.domain.space.unreserve(blocks));
                    let short = ids[i];
                    drop(enters);
                    inner.make_room(inner.dom(short), &mut attempt)?;
                    continue 'again;
                }
            }
            let held = SmallVec::from_elem(blocks, enters.len());
            return Ok(Op { inner, enters, held });
        }
    }

    fn index(&self, d: DomainId) -> usize {
        // every domain that an operation touches was entered by `begin`
        self.enters.iter().position(|e| e.domain.id == d).unwrap_or_else(|| unreachable!("{d} was not entered"))
    }
    /// The entered domain.
    pub fn enter(&self, d: DomainId) -> &Enter<'a> {
        &self.enters[self.index(d)]
    }
    /// Its running transaction.
    pub fn tx(&self, d: DomainId) -> &Tx {
        self.enter(d).tx()
    }

    /// Marks a cell as changed. Where its record begins a new node block, a reserved block becomes the transaction's.
    pub fn touch(&mut self, cell: &Arc<Cell>, st: &mut State) -> Result<()> {
        self.touch_content(cell, st)?;
        st.durability.operation_changes_inode(self.tx(cell.domain).id);
        Ok(())
    }

    /// [`Self::touch`] by what changes nothing but times and the content of blocks ([`Domain::touch_content`]).
    pub fn touch_content(&mut self, cell: &Arc<Cell>, st: &mut State) -> Result<()> {
        let i = self.index(cell.domain);
        let (d, tx) = (self.enters[i].domain, self.enters[i].tx());
        let fresh = st.durability.dirty_tx() != tx.id;
        d.touch_content(tx, cell, st)?;
        if fresh {
            self.grows(cell.domain, st.record_bytes());
        }
        Ok(())
    }

    /// Before blocks are reserved for pages of a file: what an older transaction has still to write of it is written out.
    /// That takes the reservations of its dirty pages, which the operation would else count on, and lose when it touches
    /// the file.
    pub fn settle(&mut self, cell: &Arc<Cell>, st: &mut State) -> Result<()> {
        let by = st.durability.dirty_tx();
        if by.0 == 0 || by == self.tx(cell.domain).id { Ok(()) } else { self.touch_content(cell, st) }
    }

    /// Announces that extents of a file go, as many as one operation may free. False where the journal has too little room
    /// ([`Enter::expect_pieces`]).
    #[must_use]
    pub fn expect_frees(&self, cell: &Cell, st: &State) -> bool {
        let Body::File(f) = &st.body else { return true };
        let e = self.enter(cell.domain);
        e.expect_pieces(f.map.extent_count().min(e.domain.pieces_max()))
    }

    /// The record of a touched cell grows.
    pub fn grows(&mut self, d: DomainId, bytes: usize) {
        let blocks = self.tx(d).pack_bytes(bytes);
        if blocks > 0 {
            self.credit(d, blocks);
        }
    }

    /// Hands reserved blocks to the transaction: it will need them to write metadata.
    pub fn credit(&mut self, d: DomainId, blocks: u64) {
        let i = self.index(d);
        let n = blocks.min(self.held[i]);
        self.held[i] -= n;
        self.enters[i].tx().add_credits(n);
    }

    /// Two domains' transactions share this operation: neither checkpoints without the other being durable.
    pub fn braid(&self, a: DomainId, b: DomainId) {
        if a != b {
            let (x, y) = (self.tx(a), self.tx(b));
            x.peer(b, y.id);
            y.peer(a, x.id);
        }
    }

    /// A cross-domain entry changes: both journals say so, for recovery to compare the sides.
    pub fn hint(&self, dir: &Cell, name: &[u8], child: &Cell) {
        if dir.domain != child.domain {
            self.hint_always(dir, name, child);
        }
    }

    /// [`Self::hint`] also within one domain: the fate of the child depends on an inode of another domain.
    pub fn hint_always(&self, dir: &Cell, name: &[u8], child: &Cell) {
        let r = Record::Remote { dir: dir.ino, child: child.ino, gener: child.gener, name: name.into() };
        self.tx(child.domain).record(r.clone());
        if dir.domain != child.domain {
            self.tx(dir.domain).record(r);
            self.braid(dir.domain, child.domain);
        }
    }

    /// An inode of `domain` takes `dir/name`: what must be durable with it. `None` where an inode of another domain left
    /// the name, lives on, and must be made durable first ([`MountedVolume::settle_name`]).
    pub fn may_take(&self, dir: &Cell, name: &[u8], domain: DomainId) -> Option<Before> {
        match take_name(&self.inner.left_by(dir, name), domain) {
            Taking::Syncs(before) => Some(before),
            Taking::Commits(_) => None,
        }
    }

    /// Runs `f` on the names of a directory that was touched; new dirty buckets get their reserved blocks.
    pub fn with_index<R>(
        &mut self,
        dir: &Arc<Cell>,
        st: &mut State,
        f: impl FnOnce(&mut crate::cell::dir::DirIndex, &mut dyn FnMut(u64) -> Result<Vec<Dentry>>) -> Result<R>,
    ) -> Result<R> {
        let d = self.enter(dir.domain).domain;
        let mut delta = 0;
        let r = d.with_index(dir.ino, st, |ix, load| {
            let before = ix.dirty_buckets();
            let r = f(ix, load);
            delta = ix.dirty_buckets().saturating_sub(before);
            r
        });
        self.credit(dir.domain, delta as u64);
        r
    }
}

impl Drop for Op<'_> {
    fn drop(&mut self) {
        for (e, n) in self.enters.iter().zip(&self.held) {
            if *n > 0 {
                e.domain.space.unreserve(*n);
            }
        }
    }
}

impl MountedVolume {
    /// Position of a name.
    pub fn hash(&self, name: &[u8]) -> u64 {
        name_hash(&self.shared.hash_key, name)
    }

    /// A name is about to change: whoever looks it up waits for the directory, which the caller has locked for writing.
    pub(crate) fn forget_name(&self, dir: &Cell, name: &[u8]) {
        Key::of(dir.ino, dir.gener, name).iter().for_each(|k| self.names.forget(k));
    }

    /// The entry of a name, buckets read as needed. The caller holds the directory's lock for writing.
    pub fn find_entry(&self, dir: &Cell, st: &mut State, name: &[u8]) -> Result<Option<Named>> {
        let hash = self.hash(name);
        self.dom(dir.domain).with_index(dir.ino, st, |ix, load| {
            Ok(ix.find(hash, name, load)?.map(|e| Named { node: e.node, gener: e.gener, kind: e.kind }))
        })
    }

    /// The inode that an entry names, if it is not stale: it exists in that generation and hangs there.
    ///
    /// # Errors
    /// Of loading it.
    pub fn child(&self, dir: NodeId, e: &Dentry) -> Result<Option<Arc<Cell>>> {
        self.child_from(dir, self.domain(dir)?.id, &e.name, e.node, e.gener)
    }

    /// [`Self::child`] of the entry `name` → `node`, `gener` of a directory that is at hand.
    pub fn child_at(&self, dir: &Cell, name: &[u8], node: NodeId, gener: u32) -> Result<Option<Arc<Cell>>> {
        self.child_from(dir.ino, dir.domain, name, node, gener)
    }

    fn child_from(
        &self,
        dir: NodeId,
        home: DomainId,
        name: &[u8],
        node: NodeId,
        gener: u32,
    ) -> Result<Option<Arc<Cell>>> {
        let Some(c) = self.child_cell(dir, node, gener)? else { return Ok(None) };
        if self.child_in_doubt(&c, home) && !hangs_at(&c.state.read(), dir, name) {
            return Ok(None);
        }
        Ok(Some(c))
    }

    /// [`Self::child_at`] for who has the directory locked, and `also` those. A stale entry may name any inode, also one
    /// above the directory, which other threads lock first: it is not waited for here.
    pub fn child_below(
        &self,
        dir: &Cell,
        also: &[(&Cell, &State)],
        name: &[u8],
        node: NodeId,
        gener: u32,
    ) -> Result<Child> {
        let Some(c) = self.child_cell(dir.ino, node, gener)? else { return Ok(Child::Stale) };
        let hangs = if !self.child_in_doubt(&c, dir.domain) {
            true
        } else if let Some((_, st)) = also.iter().find(|(l, _)| l.ino == node) {
            hangs_at(st, dir.ino, name)
        } else {
            let Some(st) = c.state.try_read() else { return Ok(Child::Busy(c)) };
            hangs_at(&st, dir.ino, name)
        };
        Ok(if hangs { Child::Lives } else { Child::Stale })
    }

    /// The inode that an entry of `dir` names, if there is one in that generation that can hang there.
    fn child_cell(&self, dir: NodeId, node: NodeId, gener: u32) -> Result<Option<Arc<Cell>>> {
        if !may_hang(node, dir) {
            return Ok(None);
        }
        match self.cell(node) {
            Ok(c) => Ok((c.gener == gener).then_some(c)),
            Err(Error::NotFound) => Ok(None),
            Err(x) => Err(x),
        }
    }

    /// Whether an entry of a directory in domain `home` may be there without the inode's link.
    fn child_in_doubt(&self, c: &Cell, home: DomainId) -> bool {
        c.domain != home || self.maybe_stale.load(Ordering::Relaxed)
    }

    /// Who left `dir/name` without that being durable yet (`crate::braid::vacated`).
    pub fn left_by(&self, dir: &Cell, name: &[u8]) -> Leavers {
        let mut all = self.dom(dir.domain).vacated.get(dir.ino, name);
        all.retain(|l| self.pending(l.domain, l.tx));
        all
    }

    /// Inodes that left a directory without that being durable yet, which must be so before its end is, decided in domain
    /// `end`: its own where it is removed, the newcomer's where it is replaced.
    pub fn left_dir(&self, dir: &Cell, end: DomainId) -> Frontier {
        let mut all = end_directory(self.dom(dir.domain).vacated.of_dir(dir.ino), end);
        all.retain(|d, t| self.pending(d, t));
        all
    }

    /// Whether something left a directory, and lives on, without that being durable yet.
    pub fn left_any(&self, dir: &Cell) -> bool {
        self.dom(dir.domain).vacated.of_dir(dir.ino).any(|d, t| self.pending(d, t))
    }

    /// A failed domain's changes will never be durable: nothing waits for them.
    pub fn pending(&self, d: DomainId, t: TxId) -> bool {
        let d = self.dom(d);
        d.committed() < t && d.failed().is_none()
    }

    /// Makes the rename durable by which an inode of another domain than `newcomer` left `dir/name`, if there is one.
    /// Not inside a gate. One of the rare commits in the foreground.
    pub fn settle_name(&self, dir: &Cell, name: &[u8], newcomer: DomainId) -> Result<()> {
        match take_name(&self.left_by(dir, name), newcomer) {
            Taking::Commits(first) => self.commit_some(&first),
            Taking::Syncs(_) => Ok(()),
        }
    }

    /// Whether the inode was exchanged with one of another domain, or lost a name to one, that is not durable yet.
    /// Recovery completes such an exchange from this inode's record, and gives such a name back as of the time of the
    /// record's last change of names: until then its names may not change.
    pub fn exchanging(&self, st: &State) -> bool {
        st.durability.is_judged() && st.durability.waits_for().any(|d, t| self.pending(d, t))
    }

    /// Makes the partner's side of an exchange durable before names of `c` change. Not inside a gate.
    pub fn settle_exchange(&self, c: &Cell) -> Result<()> {
        let mut waits = {
            let st = c.state.read();
            if !self.exchanging(&st) {
                return Ok(());
            }
            st.durability.waits_for().clone()
        };
        waits.retain(|d, t| self.pending(d, t));
        self.commit_some(&waits)
    }

    /// Makes all renames away from a directory durable before it goes ([`Self::left_dir`]). Not inside a gate.
    pub fn settle_dir(&self, dir: &Cell, end: DomainId) -> Result<()> {
        self.commit_some(&self.left_dir(dir, end))
    }

    /// A directory's cell.
    pub fn dir_cell(&self, ino: NodeId) -> Result<Arc<Cell>> {
        let c = self.cell(ino)?;
        if c.kind != FileKind::Dir {
            return Err(Error::NotDir);
        }
        Ok(c)
    }
}

/// Whether an inode can hang in a directory at all: an entry that names its own directory, or the root, is damage.
pub(crate) fn may_hang(node: NodeId, dir: NodeId) -> bool {
    node != dir && node != NodeId::ROOT
}

fn hangs_at(st: &State, dir: NodeId, name: &[u8]) -> bool {
    !st.deleted && st.has_link(dir, name)
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

#[cfg(test)]
mod tests;
