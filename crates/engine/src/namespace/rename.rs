//! Rename over all domains: replace, no-replace, exchange.
//!
//! The moved inode's own record is where the rename becomes durable; entries follow (hints), a victim of another domain
//! gets a conditional tombstone, partners of an exchange name each other. Nothing is committed in the foreground, but in
//! rare cases that meet an earlier rename of another domain which is not durable yet, and for the exchange of directories
//! of two domains (docs/crash-contract.md says which and why).

use super::{Op, check_alive, check_changeable, check_name, check_takes_names};
use crate::braid::entry::{By, Edit};
use crate::braid::rules::{move_directory, names_durable_first};
use crate::braid::vacated::Vacated;
use crate::cell::{Cell, State};
use crate::error::{Error, Result};
use crate::planted::{Bug, planted};
use crate::types::*;
use crate::volume::{Inner, Volume};
use braidfs_format::inode::{Link, Tombstone};
use braidfs_sync::RwLockWriteGuard;
use smallvec::{SmallVec, smallvec};
use std::sync::Arc;

/// Metadata blocks that a rename can dirty in one domain.
const RENAME_BLOCKS: u64 = 8;

/// One directory or two, locked.
type Locked<'c> = SmallVec<[RwLockWriteGuard<'c, State>; 2]>;

/// One side of a rename.
struct Side<'n> {
    dir: Arc<Cell>,
    name: &'n [u8],
}

impl Inner {
    /// Whether `above` is `below` or an ancestor of it. Under the rename lock.
    fn is_ancestor(&self, above: NodeId, below: &Arc<Cell>) -> Result<bool> {
        let mut at = below.clone();
        // a tree this deep is a loop, which only a damaged volume has
        for _ in 0..1_000_000 {
            if at.ino == above {
                return Ok(true);
            }
            if at.ino == NodeId::ROOT {
                return Ok(false);
            }
            let parent = at.state.read().parent;
            at = self.cell(parent)?;
        }
        Err(Error::Loop)
    }

    /// Directory moves are totally ordered: an earlier one is made durable first, where [`move_directory`] says so.
    fn order_move(&self, domain: DomainId, completed: bool) -> Result<()> {
        if planted(Bug::MovesUnordered) {
            return Ok(());
        }
        let first = move_directory(*self.last_move.lock(), domain, completed);
        self.commit_some(&first)
    }

    fn lock_dirs<'c>(&self, a: &'c Arc<Cell>, b: &'c Arc<Cell>) -> Result<(Locked<'c>, usize, usize)> {
        if a.ino == b.ino {
            return Ok((smallvec![a.state.write()], 0, 0));
        }
        // an ancestor first, else by number
        let a_first = self.is_ancestor(a.ino, b)? || (!self.is_ancestor(b.ino, a)? && a.ino < b.ino);
        Ok(if a_first {
            (smallvec![a.state.write(), b.state.write()], 0, 1)
        } else {
            (smallvec![b.state.write(), a.state.write()], 1, 0)
        })
    }

    fn rename(&self, from: &Side<'_>, to: &Side<'_>, mode: RenameMode) -> Result<()> {
        let cross = from.dir.ino != to.dir.ino;
        let _one = cross.then(|| self.rename.lock());
        loop {
            let src = self.peek(&from.dir, from.name)?;
            let dst = match self.peek(&to.dir, to.name) {
                Ok(c) => Some(c),
                Err(Error::NotFound) => None,
                Err(e) => return Err(e),
            };
            self.check_rename(from, to, &src, dst.as_ref(), mode)?;
            if let Some(d) = &dst
                && d.ino == src.ino
            {
                return Ok(());
            }
            let moves = cross && src.kind == FileKind::Dir;
            let swaps = mode == RenameMode::Exchange && cross && dst.as_ref().is_some_and(|d| d.kind == FileKind::Dir);
            let completed = mode == RenameMode::Exchange && dst.as_ref().is_some_and(|d| d.domain != src.domain);
            if moves {
                self.order_move(src.domain, completed)?;
            }
            if swaps && let Some(d) = &dst {
                self.order_move(d.domain, completed)?;
            }
            self.settle_name(&to.dir, to.name, src.domain)?;
            self.settle_exchange(&src)?;
            if cross {
                let partner = dst.as_ref().filter(|_| mode == RenameMode::Exchange);
                self.settle_parent(&to.dir, &src, partner.map_or(src.domain, |d| d.domain))?;
                if let Some(d) = partner {
                    self.settle_parent(&from.dir, d, src.domain)?;
                }
            }
            dst.as_ref().map_or(Ok(()), |d| self.settle_exchange(d))?;
            match &dst {
                Some(d) if mode == RenameMode::Exchange => self.settle_name(&from.dir, from.name, d.domain)?,
                Some(d) if d.kind == FileKind::Dir => self.settle_dir(d, src.domain)?,
                _ => {}
            }
            if let Some(d) = &dst
                && d.domain != src.domain
            {
                for (c, victim) in [(&src, false), (d, true)] {
                    let known = self.known_for(mode, c, &c.state.read(), victim);
                    if !known {
                        self.dom(c.domain).commit()?;
                    }
                }
            }
            let mut domains: SmallVec<[DomainId; 4]> = smallvec![from.dir.domain, to.dir.domain, src.domain];
            domains.extend(dst.as_ref().map(|d| d.domain));
            let Some(done) = self.rename_in(from, to, &src, dst.as_ref(), mode, &domains)? else { continue };
            if moves || swaps {
                *self.last_move.lock() = Some((src.domain, done));
            }
            if (moves || swaps)
                && mode == RenameMode::Exchange
                && let Some(d) = &dst
                && d.domain != src.domain
            {
                // two directory moves in two domains at once
                let (a, b) = (self.dom(src.domain), self.dom(d.domain));
                self.commit_some(&[(a.id, done), (b.id, b.running())].into_iter().collect())?;
            }
            return Ok(());
        }
    }

    fn check_rename(
        &self,
        from: &Side<'_>,
        to: &Side<'_>,
        src: &Arc<Cell>,
        dst: Option<&Arc<Cell>>,
        mode: RenameMode,
    ) -> Result<()> {
        match (mode, dst) {
            (RenameMode::NoReplace, Some(_)) => return Err(Error::Exists),
            (RenameMode::Exchange, None) => return Err(Error::NotFound),
            _ => {}
        }
        let cross = from.dir.ino != to.dir.ino;
        if cross && src.kind == FileKind::Dir && self.is_ancestor(src.ino, &to.dir)? {
            return Err(Error::Invalid("a directory cannot move below itself"));
        }
        if let Some(d) = dst
            && d.ino != src.ino
        {
            if cross && d.kind == FileKind::Dir && self.is_ancestor(d.ino, &from.dir)? {
                return Err(if mode == RenameMode::Exchange {
                    Error::Invalid("a directory cannot move below itself")
                } else {
                    Error::NotEmpty
                });
            }
            if mode == RenameMode::Replace {
                match (src.kind == FileKind::Dir, d.kind == FileKind::Dir) {
                    (true, false) => return Err(Error::NotDir),
                    (false, true) => return Err(Error::IsDir),
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// Whether the names of `c`, of a rename or exchange (`victim`: what has the new name) over domains, are durable as far
    /// as recovery needs them.
    fn known_for(&self, mode: RenameMode, c: &Cell, st: &State, victim: bool) -> bool {
        let needed = names_durable_first(mode, victim, c.kind == FileKind::Dir, st.nlink);
        !needed || self.dom(c.domain).links_durable(st)
    }

    /// The rename itself; `None` where a name changed meanwhile. The transaction of the moved inode's domain.
    fn rename_in(
        &self,
        from: &Side<'_>,
        to: &Side<'_>,
        src: &Arc<Cell>,
        dst: Option<&Arc<Cell>>,
        mode: RenameMode,
        domains: &[DomainId],
    ) -> Result<Option<TxId>> {
        let mut op = Op::begin(self, domains, RENAME_BLOCKS, dst.is_some())?;
        let (mut dirs, a, b) = self.lock_dirs(&from.dir, &to.dir)?;
        for d in &dirs {
            check_alive(d)?;
        }
        let names =
            |e: &Option<super::Named>, c: &Cell| e.as_ref().is_some_and(|e| e.node == c.ino && e.gener == c.gener);
        let old = self.find_entry(&from.dir, &mut dirs[a], from.name)?;
        let new = self.find_entry(&to.dir, &mut dirs[b], to.name)?;
        if !names(&old, src) {
            return Ok(None);
        }
        let stale = match (dst, &new) {
            (Some(d), e) if names(e, d) => true,
            (None, None) => false,
            (None, Some(e)) if self.child_at(&to.dir, to.name, e.node, e.gener)?.is_none() => true,
            _ => return Ok(None),
        };
        // by number
        let (mut s, mut v) = match dst {
            Some(d) if d.ino < src.ino => {
                let v = d.state.write();
                (src.state.write(), Some(v))
            }
            Some(d) => {
                let s = src.state.write();
                (s, Some(d.state.write()))
            }
            None => (src.state.write(), None),
        };
        if s.deleted || self.exchanging(&s) || v.as_ref().is_some_and(|v| v.deleted || self.exchanging(v)) {
            return Ok(None);
        }
        if let (Some(d), Some(v)) = (dst, v.as_ref())
            && d.domain != src.domain
            && !(self.known_for(mode, src, &s, false) && self.known_for(mode, d, v, true))
        {
            return Ok(None); // `rename` saw to it; names have changed since
        }
        // what is durable by now must not mix with what follows
        self.dom(src.domain).settle_waits(&mut s);
        if let (Some(d), Some(v)) = (dst, v.as_mut()) {
            self.dom(d.domain).settle_waits(v);
        }
        check_changeable(&s)?;
        check_changeable(&dirs[a])?;
        // a new name may go into an append-only directory; one that is there may not be taken away
        if dst.is_some() {
            check_changeable(&dirs[b])?
        } else {
            check_takes_names(&dirs[b])?
        }
        if let (Some(d), Some(v)) = (dst, v.as_mut()) {
            check_changeable(v)?;
            let empty = d.kind != FileKind::Dir
                || mode == RenameMode::Exchange
                || self.dom(d.domain).with_index(d.ino, v, |ix, load| ix.is_empty(load))?
                || self.only_stale(d, v)?;
            if !empty {
                return Err(Error::NotEmpty);
            }
            if d.kind == FileKind::Dir && mode != RenameMode::Exchange && !self.left_dir(d, src.domain).is_empty() {
                return Ok(None);
            }
        }
        let Some(before) = op.may_take(&to.dir, to.name, src.domain) else { return Ok(None) };
        let before_dst = match dst {
            Some(d) if mode == RenameMode::Exchange => op.may_take(&from.dir, from.name, d.domain),
            _ => Some(super::Before::default()),
        };
        let Some(before_dst) = before_dst else { return Ok(None) };
        let cross = from.dir.ino != to.dir.ino;
        let (src_dir, dst_dir) = (src.kind == FileKind::Dir, dst.is_some_and(|d| d.kind == FileKind::Dir));
        let tx = op.tx(src.domain).id;
        let now = self.shared.now();

        op.touch(&from.dir, &mut dirs[a])?;
        if cross {
            op.touch(&to.dir, &mut dirs[b])?;
        }
        op.touch(src, &mut s)?;
        if let (Some(d), Some(v)) = (dst, v.as_mut()) {
            op.touch(d, v)?;
        }
        // nobody who walks by names looked up lately finds the inode under the new name and then under the old one, too
        self.forget_name(&from.dir, from.name);
        let edit = if stale { Edit::Replace(src) } else { Edit::Add(src) };
        self.edit_entry(By::Operation(&mut op), &to.dir, &mut dirs[b], to.name, edit)?;
        let edit = match (mode, dst) {
            (RenameMode::Exchange, Some(d)) => Edit::Replace(d),
            _ => Edit::Remove,
        };
        self.edit_entry(By::Operation(&mut op), &from.dir, &mut dirs[a], from.name, edit)?;
        let seq = self.shared.next_seq(s.link_seq.max(v.as_ref().map_or(0, |v| v.link_seq)));
        s.remove_link(from.dir.ino, from.name, seq);
        s.gain_link(to.dir.ino, to.name, seq);
        s.ctime = now;
        s.durability.operation_changes_names();
        if src_dir && cross {
            s.parent = to.dir.ino;
            s.durability.directory_moves();
        }
        s.durability.inode_takes_name(&before);
        self.dom(from.dir.domain).vacated.add(from.dir.ino, from.name, Vacated { domain: src.domain, tx, alive: true });
        op.hint(&from.dir, from.name, src);
        op.hint(&to.dir, to.name, src);
        op.braid(src.domain, from.dir.domain);
        op.braid(src.domain, to.dir.domain);

        if let (Some(d), Some(v)) = (dst, v.as_mut()) {
            v.remove_link(to.dir.ino, to.name, seq);
            v.ctime = now;
            v.durability.operation_changes_names();
            op.hint(&to.dir, to.name, d);
            let apart = d.domain != src.domain;
            if apart {
                op.braid(d.domain, src.domain);
                let link = Link { parent: to.dir.ino, name: to.name.into() };
                let version = s.durability.version();
                let t = Tombstone { link, newcomer: src.ino, gener: src.gener, version };
                v.durability.newcomer_takes_name(t, src.domain, tx);
                op.hint_always(&to.dir, to.name, d);
                // not only the newcomer: whoever has the name after it, too
                let vtx = op.tx(d.domain).id;
                s.durability.inode_syncs_with(d.domain, vtx);
                self.dom(to.dir.domain).vacated.add(
                    to.dir.ino,
                    to.name,
                    Vacated { domain: d.domain, tx: vtx, alive: false },
                );
            }
            if mode == RenameMode::Exchange {
                v.gain_link(from.dir.ino, from.name, seq);
                let vtx = op.tx(d.domain).id;
                self.dom(to.dir.domain).vacated.add(
                    to.dir.ino,
                    to.name,
                    Vacated { domain: d.domain, tx: vtx, alive: true },
                );
                v.durability.inode_takes_name(&before_dst);
                if d.domain == src.domain {
                    // each has the other's old name
                    s.durability.inode_follows(tx);
                    v.durability.inode_follows(vtx);
                }
                op.hint(&from.dir, from.name, d);
                if dst_dir && cross {
                    v.parent = from.dir.ino;
                    v.durability.directory_moves();
                }
                if apart {
                    v.durability.partner_exchanges_name((src.ino, src.gener, s.durability.version()));
                    let link = Link { parent: from.dir.ino, name: from.name.into() };
                    let (newcomer, gener, version) = (d.ino, d.gener, v.durability.version());
                    s.durability.newcomer_takes_name(Tombstone { link, newcomer, gener, version }, d.domain, vtx);
                    s.durability.partner_exchanges_name((newcomer, gener, version));
                    op.hint_always(&from.dir, from.name, d);
                    op.hint_always(&from.dir, from.name, src);
                    op.hint_always(&to.dir, to.name, src);
                }
            } else {
                let left = Vacated { domain: src.domain, tx, alive: true };
                if dst_dir {
                    if self.left_any(d) {
                        // what moved out of it would come back into it: whoever has the name is not durable before
                        s.durability.inode_follows(tx);
                        self.dom(to.dir.domain).vacated.add(to.dir.ino, to.name, left);
                    }
                    self.last_name_gone(&op, d, v);
                } else {
                    v.nlink = v.nlink.saturating_sub(1);
                    if !apart {
                        // a victim with other names may not lose this one before the newcomer has it
                        v.durability.inode_follows(tx);
                    }
                    if v.nlink == 0 {
                        self.last_name_gone(&op, d, v);
                    } else if !apart {
                        // not only the newcomer: whoever has the name after it, too
                        s.durability.inode_follows(tx);
                        self.dom(to.dir.domain).vacated.add(to.dir.ino, to.name, left);
                    }
                }
                if apart && v.nlink == 0 && !v.deleted {
                    self.zombies.lock().push(d.clone());
                }
            }
        }
        Ok(Some(tx))
    }
}

impl Volume {
    /// Renames; atomic also across domains and crashes.
    ///
    /// # Errors
    /// As `renameat2`: [`Error::NotFound`], [`Error::Exists`], [`Error::NotEmpty`], [`Error::IsDir`], [`Error::NotDir`],
    /// [`Error::Invalid`] for a directory below itself.
    pub fn rename(&self, dir: NodeId, name: &[u8], new_dir: NodeId, new_name: &[u8], mode: RenameMode) -> Result<()> {
        check_name(name)?;
        check_name(new_name)?;
        let i = self.inner();
        let from = Side { dir: i.dir_cell(dir)?, name };
        let to = Side { dir: i.dir_cell(new_dir)?, name: new_name };
        i.rename(&from, &to, mode)
    }
}
