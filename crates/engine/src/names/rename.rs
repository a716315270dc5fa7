//! Rename over all domains: replace, no-replace, exchange, and with a whiteout that is left (`super::whiteout`).
//!
//! The moved inode's own record is where the rename becomes durable; entries follow (hints), a victim of another domain
//! gets a conditional tombstone, partners of an exchange name each other. Nothing is committed in the foreground, but in
//! rare cases that meet an earlier rename of another domain which is not durable yet, and for the exchange of directories
//! of two domains (docs/crash-contract.md says which and why).

use super::asker::{Asker, SEARCH, WRITE};
use super::checks::{check_alive, check_changeable, check_name, check_takes_directory, check_takes_names};
use super::entries::{Child, ENTRY_BLOCKS, Named};
use super::placement::NewInode;
use super::prerequisites::Unwritten;
use super::whiteout::{Spare, Whiteout};
use crate::braid::durability::Before;
use crate::braid::entry::{By, Edit};
use crate::braid::plan::{Plan, Rename, Subject, Waits, Which, plan};
use crate::braid::rules::{move_directory, names_durable_first};
use crate::cell::{Cell, State};
use crate::error::{Error, Result};
use crate::planted::{Bug, planted};
use crate::types::*;
use crate::volume::operation::Op;
use crate::volume::{MountedVolume, Volume};
use braidfs_sync::BiasedWriteGuard;
use smallvec::{SmallVec, smallvec};
use std::sync::Arc;

/// Metadata blocks that a rename can dirty in one domain.
pub(super) const RENAME_BLOCKS: u64 = 8;

/// So often are two directories locked one after the other, the second only where nobody has it.
pub(super) const LOCK_ATTEMPTS: usize = 8;

/// One directory or two, locked.
type Dirs<'c> = SmallVec<[BiasedWriteGuard<'c, State>; 2]>;

/// One side of a rename.
struct Side<'n> {
    dir: Arc<Cell>,
    name: &'n [u8],
    /// Of the name.
    hash: u64,
}

/// A rename whose names were looked up outside the gates. They may name others when the directories are locked.
struct Request<'r> {
    from: &'r Side<'r>,
    to: &'r Side<'r>,
    src: Arc<Cell>,
    /// What has the new name: a victim, or the partner of an exchange.
    dst: Option<Arc<Cell>>,
    mode: RenameMode,
    asker: Asker<'r>,
    /// The number of the whiteout that is left, and who makes it.
    leaves: Option<(NewInode, &'r Cred)>,
    /// Of what moves to the other directory: whether nothing has written `src`, or the partner.
    unwritten: [Unwritten; 2],
    /// The rename lock is held: directories are locked by their places in the tree.
    in_order: bool,
    /// Metadata blocks that are reserved in each domain.
    blocks: u64,
}

impl Request<'_> {
    fn two_dirs(&self) -> bool {
        self.from.dir.ino != self.to.dir.ino
    }
    /// With what the moved inode exchanges names.
    fn partner(&self) -> Option<&Arc<Cell>> {
        self.dst.as_ref().filter(|_| self.mode == RenameMode::Exchange)
    }
    /// The domain of who takes the old name: a partner, or a whiteout.
    fn heir(&self) -> Option<DomainId> {
        self.partner().map(|d| d.domain).or(self.mode.leaves_whiteout().then_some(self.src.domain))
    }
    /// Whether the other inode is of another domain.
    fn is_apart(&self) -> bool {
        self.dst.as_ref().is_some_and(|d| d.domain != self.src.domain)
    }
    /// Whether recovery completes it from one half: an exchange over domains.
    fn is_completed(&self) -> bool {
        self.partner().is_some() && self.is_apart()
    }
    /// Whether the moved inode is a directory that changes its parent.
    fn src_moves(&self) -> bool {
        self.two_dirs() && self.src.kind == FileKind::Dir
    }
    fn partner_moves(&self) -> bool {
        self.two_dirs() && self.partner().is_some_and(|d| d.kind == FileKind::Dir)
    }
    /// Whether it may change which directory is above which, or has to know that.
    fn changes_tree(&self) -> bool {
        self.two_dirs() && (self.src_moves() || self.dst.as_ref().is_some_and(|d| d.kind == FileKind::Dir))
    }
    /// Whether who asks may take the names and give them. As in Linux, who moves a directory changes its `..`.
    fn check_asker(&self, l: &Locked<'_>) -> Result<()> {
        let (old, new, asker) = (&l.dirs[l.old], &l.dirs[l.new], self.asker);
        asker.check_remove(old, l.src.uid)?;
        asker.check_add(new)?;
        if self.src_moves() {
            asker.check(&l.src, WRITE)?;
        }
        let Some(other) = &l.dst else { return Ok(()) };
        asker.check_remove(new, other.uid)?;
        if self.partner_moves() { asker.check(other, WRITE) } else { Ok(()) }
    }
    /// [`Self::check_asker`] before anything is locked ([`Asker::check_early`]).
    fn check_asker_early(&self) -> Result<()> {
        let asker = self.asker;
        if self.dst.as_ref().is_some_and(|d| d.ino == self.src.ino) {
            // nothing changes
            return Ok(());
        }
        asker.check_remove_early(&self.from.dir, &self.src)?;
        asker.check_early(&self.to.dir, WRITE | SEARCH)?;
        if self.src_moves() {
            asker.check_early(&self.src, WRITE)?;
        }
        let Some(other) = &self.dst else { return Ok(()) };
        asker.check_remove_early(&self.to.dir, other)?;
        if self.partner_moves() { asker.check_early(other, WRITE) } else { Ok(()) }
    }
    /// Locks the inodes, by number.
    fn lock_inodes(&self) -> (BiasedWriteGuard<'_, State>, Option<BiasedWriteGuard<'_, State>>) {
        match &self.dst {
            Some(d) if d.ino < self.src.ino => {
                let dst = d.state.write();
                (self.src.state.write_above(&dst), Some(dst))
            }
            dst => {
                let src = self.src.state.write();
                let dst = dst.as_ref().map(|d| d.state.write_above(&src));
                (src, dst)
            }
        }
    }
}

/// A tree this deep is a loop, which only a damaged volume has.
const DEEPEST: u32 = 1_000_000;

/// Why a rename starts again.
enum Restart {
    /// Names changed meanwhile, or something must be durable first.
    Changed,
    /// Another thread has this inode locked, which a stale entry may name ([`Child::Busy`]).
    Busy(Arc<Cell>),
    /// Others keep the two directories locked, now the one and now the other: only in an order can both be waited for.
    Contended,
    /// The journal of this domain has no room for more inodes without a name.
    Orphans(DomainId),
    /// So many blocks must be reserved ([`Op::lacks`]).
    Lacks(u64),
}

/// A part of a rename, or that it starts again.
type Attempt<T> = std::result::Result<T, Restart>;

/// All that a rename changes, locked.
struct Locked<'c> {
    dirs: Dirs<'c>,
    /// The directory of the old and of the new name in `dirs`.
    old: usize,
    new: usize,
    src: BiasedWriteGuard<'c, State>,
    dst: Option<BiasedWriteGuard<'c, State>>,
}

impl Locked<'_> {
    /// [`Op::lacks`] of all of them.
    fn lacks(&mut self, op: &Op<'_>, r: &Request<'_>) -> Option<u64> {
        let mut touched: SmallVec<[(DomainId, &mut State); 4]> = smallvec![(r.src.domain, &mut *self.src)];
        for (i, st) in self.dirs.iter_mut().enumerate() {
            touched.push((if i == self.old { r.from.dir.domain } else { r.to.dir.domain }, st));
        }
        touched.extend(r.dst.as_ref().map(|d| d.domain).zip(self.dst.as_deref_mut()));
        op.lacks_for(&mut touched)
    }
}

impl MountedVolume {
    /// Whether `above` is `below` or an ancestor of it. Under the rename lock.
    fn is_ancestor(&self, above: InodeNo, below: &Arc<Cell>) -> Result<bool> {
        let mut at = below.clone();
        for _ in 0..DEEPEST {
            if at.ino == above {
                return Ok(true);
            }
            if at.ino == InodeNo::ROOT {
                return Ok(false);
            }
            let parent = at.state.read().parent;
            at = self.cell(parent)?;
        }
        Err(Error::Loop)
    }

    /// Directory moves are totally ordered: an earlier one is made durable first, where [`move_directory`] says so. One of a
    /// domain that has failed the next mount takes back: others move on, but not to below what it moved
    /// ([`Self::check_above`]). Under the rename lock.
    fn order_move(&self, domain: DomainId, to: &Arc<Cell>, completed: bool) -> Result<()> {
        if planted(Bug::MovesUnordered) {
            return Ok(());
        }
        let last = self.last_move.lock().filter(|(d, _)| completed || self.dom(*d).failed().is_none());
        self.commit_some(&move_directory(last, domain, completed))?;
        self.check_above(to)
    }

    /// Where a directory comes to in `to`, no domain that has failed decides which directories are above it: else the next
    /// mount could take back that such a one came here from below what moves now, and both would be below each other.
    ///
    /// # Errors
    /// Of that domain.
    fn check_above(&self, to: &Arc<Cell>) -> Result<()> {
        if self.domains.iter().all(|d| d.failed().is_none()) {
            return Ok(());
        }
        let mut at = to.clone();
        for _ in 0..DEEPEST {
            if at.ino == InodeNo::ROOT {
                return Ok(());
            }
            self.commit_exchange(&at)?;
            let d = self.dom(at.domain);
            let (known, parent) = {
                let st = at.state.read();
                (st.durability.names_durable(d.committed_tx()) || !d.keeps_journal(), st.parent)
            };
            if !known {
                d.check_failed()?;
            }
            at = self.cell(parent)?;
        }
        Err(Error::Loop)
    }

    /// Locks the directories; the places of those of the old and of the new name.
    fn lock_dirs<'c>(&self, r: &'c Request<'_>) -> Result<Attempt<(Dirs<'c>, usize, usize)>> {
        let (a, b) = (&r.from.dir, &r.to.dir);
        if !r.two_dirs() {
            return Ok(Ok((smallvec![a.state.write()], 0, 0)));
        }
        if !r.in_order {
            debug_assert!(!r.changes_tree());
            return Ok(lock_unrelated(a, b).ok_or(Restart::Contended));
        }
        // an ancestor first, else by number
        let a_above = self.is_ancestor(a.ino, b)?;
        let related = a_above || self.is_ancestor(b.ino, a)?;
        let a_first = if related { a_above } else { a.ino < b.ino };
        let (first, second) = if a_first { (a, b) } else { (b, a) };
        let above = first.state.write();
        let below = if related { second.state.write() } else { second.state.write_above(&above) };
        Ok(Ok((smallvec![above, below], usize::from(!a_first), usize::from(a_first))))
    }

    fn rename(
        &self,
        from: &Side<'_>,
        to: &Side<'_>,
        mode: RenameMode,
        (cred, asker): (&Cred, Asker<'_>),
    ) -> Result<()> {
        let mut spare = Spare::new(self);
        let (mut tree, mut again, mut replaced) = (None, false, self.replaced());
        // a whiteout is an inode with a name of its own
        let least = RENAME_BLOCKS + if mode.leaves_whiteout() { ENTRY_BLOCKS } else { 0 };
        let mut blocks = least;
        loop {
            let src = self.lookup_to_leave(&from.dir, from.name)?;
            let dst = self.find_in(&to.dir, to.name)?;
            let unwritten = [Unwritten::default(); 2];
            let in_order = tree.is_some();
            let mut r = Request { from, to, src, dst, mode, asker, leaves: None, unwritten, in_order, blocks };
            if tree.is_none() && r.changes_tree() {
                // what the names name may be others by the time it is had
                tree = Some(self.rename.lock());
                continue;
            }
            self.check_rename(&r)?;
            if r.dst.as_ref().is_some_and(|d| d.ino == r.src.ino) {
                return Ok(());
            }
            if mode.leaves_whiteout() {
                r.leaves = Some((spare.of_domain(r.src.domain, from.dir.ino)?, cred));
            }
            r.unwritten = self.commit_before(&r, again)?;
            let gone = r.dst.as_ref().map_or(0, |d| self.replaced_gone(d.domain));
            match self.try_rename(&r) {
                Ok(Ok(done)) => {
                    spare.used();
                    return self.note_move(&r, done);
                }
                Ok(Err(Restart::Changed)) => again = true,
                Ok(Err(Restart::Busy(c))) => Child::wait(&c),
                Ok(Err(Restart::Contended)) => tree = Some(self.rename.lock()),
                Ok(Err(Restart::Orphans(d))) => self.shorten_orphans(d, gone)?,
                Ok(Err(Restart::Lacks(more))) => blocks = least + more,
                // of a whiteout
                Err(Error::Quota(owner)) if self.end_replaced_of(owner, &mut replaced) => {}
                Err(e) => return Err(e),
            }
        }
    }

    /// Makes durable what must be so before the rename (docs/braid.md). Not inside a gate. That somebody left the names, or
    /// exchanged one of the inodes, and must be durable first, is rare and seen with all of them locked: only then, `again`, it is
    /// looked for here.
    fn commit_before(&self, r: &Request<'_>, again: bool) -> Result<[Unwritten; 2]> {
        let mut unwritten = [Unwritten::default(); 2];
        if r.src_moves() {
            self.order_move(r.src.domain, &r.to.dir, r.is_completed())?;
        }
        if let Some(d) = r.partner().filter(|_| r.partner_moves()) {
            self.order_move(d.domain, &r.from.dir, r.is_completed())?;
        }
        if again {
            self.commit_vacating_rename(&r.to.dir, r.to.name, r.src.domain)?;
            if let Some(heir) = r.heir() {
                self.commit_vacating_rename(&r.from.dir, r.from.name, heir)?;
            }
            self.commit_exchange(&r.src)?;
        }
        if r.two_dirs() && r.mode.leaves_whiteout() {
            // else a crash leaves one of the two: the whiteout, or what had its name
            for dir in [&r.from.dir, &r.to.dir] {
                self.commit_above(dir, &r.src, true)?;
            }
        } else if r.two_dirs() {
            unwritten[0] =
                self.commit_new_parents(&r.to.dir, &r.src, r.partner().map_or(r.src.domain, |d| d.domain))?;
            if let Some(d) = r.partner() {
                unwritten[1] = self.commit_new_parents(&r.from.dir, d, r.src.domain)?;
            }
        }
        let Some(d) = &r.dst else { return Ok(unwritten) };
        if again {
            self.commit_exchange(d)?;
        }
        if r.partner().is_none() && d.kind == FileKind::Dir {
            self.commit_vacating_renames(d, r.src.domain)?;
        }
        for (c, is_victim) in [(&r.src, false), (d, true)] {
            let known = !r.is_apart() || self.names_known(r.mode, c, &c.state.read(), is_victim);
            if !known {
                self.dom(c.domain).commit()?;
            }
        }
        Ok(unwritten)
    }

    /// Whether the names of `c`, of a rename over domains, are durable as far as recovery needs them.
    fn names_known(&self, mode: RenameMode, c: &Cell, st: &State, is_victim: bool) -> bool {
        let needed = names_durable_first(mode, is_victim, c.kind == FileKind::Dir, st.nlink);
        !needed || self.dom(c.domain).links_durable(st)
    }

    /// A directory has moved, in transaction `done` of the moved inode's domain.
    fn note_move(&self, r: &Request<'_>, done: TxId) -> Result<()> {
        if !r.src_moves() && !r.partner_moves() {
            return Ok(());
        }
        *self.last_move.lock() = Some((r.src.domain, done));
        match r.partner().filter(|_| r.is_completed()) {
            // two directory moves in two domains at once
            Some(d) => {
                let both = [(r.src.domain, done), (d.domain, self.dom(d.domain).running())];
                self.commit_some(&both.into_iter().collect())
            }
            None => Ok(()),
        }
    }

    /// # Errors
    /// [`Error::CrossScratch`] as of [`Self::check_border`], and [`Error::Busy`] for the root of such a tenant.
    fn check_borders(&self, r: &Request<'_>) -> Result<()> {
        for (c, dir) in [(Some(&r.src), &r.to.dir), (r.partner(), &r.from.dir)] {
            let Some(c) = c else { continue };
            if c.kind == FileKind::Dir && self.dom(c.domain).is_closed() && self.dom(c.domain).is_tenant_root(c.ino) {
                return Err(Error::Busy("it is the root of a tenant without a journal, which keeps its name".into()));
            }
            self.check_border(c.domain, dir.domain)?;
        }
        Ok(())
    }

    fn check_rename(&self, r: &Request<'_>) -> Result<()> {
        let Request { from, to, src, dst, mode, .. } = r;
        match (*mode, dst) {
            (m, Some(_)) if m.keeps_what_is_there() => return Err(Error::Exists),
            (RenameMode::Exchange, None) => return Err(Error::NotFound),
            _ => {}
        }
        r.check_asker_early()?;
        self.check_borders(r)?;
        let cross = r.two_dirs();
        if cross && src.kind == FileKind::Dir && self.is_ancestor(src.ino, &to.dir)? {
            return Err(Error::Invalid("a directory cannot move below itself"));
        }
        if let Some(d) = dst
            && d.ino != src.ino
        {
            if cross && d.kind == FileKind::Dir && self.is_ancestor(d.ino, &from.dir)? {
                return Err(if *mode == RenameMode::Exchange {
                    Error::Invalid("a directory cannot move below itself")
                } else {
                    Error::NotEmpty
                });
            }
            if *mode != RenameMode::Exchange {
                match (src.kind == FileKind::Dir, d.kind == FileKind::Dir) {
                    (true, false) => return Err(Error::NotDir),
                    (false, true) => return Err(Error::IsDir),
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// The rename itself: the transaction of the moved inode's domain.
    fn try_rename(&self, r: &Request<'_>) -> Result<Attempt<TxId>> {
        let mut domains: SmallVec<[DomainId; 4]> = smallvec![r.from.dir.domain, r.to.dir.domain, r.src.domain];
        if let Some(d) = &r.dst {
            domains.push(d.domain);
        }
        let mut op = Op::new(self);
        // what is replaced makes room, but not before a whiteout needs some
        op.begin(&domains, r.blocks, r.dst.is_some() && r.leaves.is_none())?;
        let (mut dirs, old, new) = match self.lock_dirs(r)? {
            Ok(locked) => locked,
            Err(again) => return Ok(Err(again)),
        };
        for d in &dirs {
            check_alive(d)?;
        }
        let replaces = match self.names_hold(r, &mut dirs, old, new)? {
            Ok(replaces) => replaces,
            Err(again) => return Ok(Err(again)),
        };
        let (src, dst) = r.lock_inodes();
        let mut l = Locked { dirs, old, new, src, dst };
        if let Err(again) = self.check_change(&op, r, &mut l)? {
            return Ok(Err(again));
        }
        let takes_new = op.may_take(&r.to.dir, r.to.name, r.src.domain);
        let takes_old = r.heir().map_or(Some(Before::default()), |d| op.may_take(&r.from.dir, r.from.name, d));
        let (Some(takes_new), Some(takes_old)) = (takes_new, takes_old) else { return Ok(Err(Restart::Changed)) };
        if let Some(more) = l.lacks(&op, r) {
            return Ok(Err(Restart::Lacks(more)));
        }
        let whiteout = match r.leaves {
            Some((number, cred)) => Some(self.new_whiteout(&l.dirs[l.old], number, cred, &takes_old)?),
            None => None,
        };
        let tx = op.tx(r.src.domain).id;
        self.change_entries(&mut op, r, &mut l, replaces, whiteout.as_ref())?;
        let plan = plan(&self.facts(&op, r, &l));
        let seq = self.change_inodes(&op, r, &mut l, &plan, [takes_new, takes_old]);
        if let Some(w) = whiteout {
            self.make_whiteout(&mut op, w, (&r.from.dir, r.from.name), seq)?;
        }
        Ok(Ok(tx))
    }

    /// Whether the entries name what was looked up, and the new name has one.
    fn names_hold(&self, r: &Request<'_>, dirs: &mut Dirs<'_>, old: usize, new: usize) -> Result<Attempt<bool>> {
        let names = |e: &Option<Named>, c: &Cell| e.is_some_and(|e| c.is(e.inode));
        let from = self.find_entry_at(&r.from.dir, &mut dirs[old], r.from.name, r.from.hash)?;
        let to = self.find_entry_at(&r.to.dir, &mut dirs[new], r.to.name, r.to.hash)?;
        if !names(&from, &r.src) {
            return Ok(Err(Restart::Changed));
        }
        Ok(match (&r.dst, &to) {
            (Some(d), e) if names(e, d) => Ok(true),
            (None, None) => Ok(false),
            (None, Some(e)) => {
                let also: &[(&Cell, &State)] = &[(&r.from.dir, &dirs[old])];
                match self.child_below(&r.to.dir, also, r.to.name, e.inode)? {
                    // left over from a crash
                    Child::Stale => Ok(true),
                    Child::Lives => Err(Restart::Changed),
                    Child::Busy(c) => Err(Restart::Busy(c)),
                }
            }
            _ => Err(Restart::Changed),
        })
    }

    /// Whether the locked inodes may take part.
    ///
    /// # Errors
    /// Those of the rename: flags that forbid it, [`Error::NotEmpty`].
    fn check_change(&self, op: &Op<'_>, r: &Request<'_>, l: &mut Locked<'_>) -> Result<Attempt<()>> {
        let holds = |i: usize, c: &Cell, st: &State| r.unwritten[i].holds(op.enter(c.domain), c, st);
        if l.src.deleted || self.exchanging(&l.src) || !holds(0, &r.src, &l.src) {
            return Ok(Err(Restart::Changed));
        }
        if let (Some(d), Some(v)) = (&r.dst, &l.dst) {
            let known = || self.names_known(r.mode, &r.src, &l.src, false) && self.names_known(r.mode, d, v, true);
            // `commit_before` saw to it; names have changed since
            if v.deleted || self.exchanging(v) || (r.is_apart() && !known()) || !holds(1, d, v) {
                return Ok(Err(Restart::Changed));
            }
        }
        r.check_asker(l)?;
        // once more: a tenant that is about to lose its journal looks with its directory locked whether anything came into it
        self.check_borders(r)?;
        // what is durable by now must not mix with what follows
        self.dom(r.src.domain).forget_durable(&mut l.src);
        if let (Some(d), Some(v)) = (&r.dst, &mut l.dst) {
            self.dom(d.domain).forget_durable(v);
        }
        check_changeable(&l.src)?;
        check_changeable(&l.dirs[l.old])?;
        l.src.check_gains(r.to.name, Some(r.from.name))?;
        if let (Some(_), Some(v)) = (r.partner(), &l.dst) {
            v.check_gains(r.from.name, Some(r.to.name))?;
        }
        if r.src_moves() && r.dst.as_ref().is_none_or(|d| d.kind != FileKind::Dir) {
            check_takes_directory(&l.dirs[l.new])?;
        }
        if r.partner_moves() && r.src.kind != FileKind::Dir {
            check_takes_directory(&l.dirs[l.old])?;
        }
        if r.two_dirs() {
            self.check_project(&l.dirs[l.new], &l.src)?;
            if let (Some(_), Some(v)) = (r.partner(), &l.dst) {
                self.check_project(&l.dirs[l.old], v)?;
            }
        }
        // a new name may go into an append-only directory; one that is there may not be taken away
        let (Some(d), Some(v)) = (&r.dst, &mut l.dst) else {
            check_takes_names(&l.dirs[l.new])?;
            return Ok(Ok(()));
        };
        check_changeable(&l.dirs[l.new])?;
        check_changeable(v)?;
        // one that another domain's inode replaces stays until that is durable
        if r.partner().is_none() && !self.may_stay(d, v, r.is_apart()) {
            return Ok(Err(Restart::Orphans(d.domain)));
        }
        if d.kind != FileKind::Dir || r.partner().is_some() {
            return Ok(Ok(()));
        }
        self.check_no_tenant(d)?;
        if !self.dom(d.domain).with_index(d.ino, v, |ix, load| ix.is_empty(load))? {
            let also: &[(&Cell, &State)] =
                &[(&r.from.dir, &l.dirs[l.old]), (&r.to.dir, &l.dirs[l.new]), (&r.src, &l.src)];
            match self.only_stale(d, v, also)? {
                Child::Stale => {}
                Child::Lives => return Err(Error::NotEmpty),
                Child::Busy(c) => return Ok(Err(Restart::Busy(c))),
            }
        }
        Ok(if self.vacated_in(d, r.src.domain).is_empty() { Ok(()) } else { Err(Restart::Changed) })
    }

    /// Touches all that changes, and changes the entries.
    fn change_entries(
        &self,
        op: &mut Op<'_>,
        r: &Request<'_>,
        l: &mut Locked<'_>,
        replaces: bool,
        whiteout: Option<&Whiteout<'_>>,
    ) -> Result<()> {
        op.touch(&r.from.dir, &mut l.dirs[l.old])?;
        if r.two_dirs() {
            op.touch(&r.to.dir, &mut l.dirs[l.new])?;
        }
        op.touch(&r.src, &mut l.src)?;
        if let (Some(d), Some(v)) = (&r.dst, &mut l.dst) {
            op.touch(d, v)?;
        }
        // nobody who walks by names looked up lately finds the inode under the new name and then under the old one, too
        self.forget_name(&r.from.dir, r.from.name);
        let edit = if replaces { Edit::Replace(&r.src) } else { Edit::Add(&r.src) };
        self.edit_entry_at(By::Operation(op), &r.to.dir, &mut l.dirs[l.new], (r.to.name, r.to.hash), edit)?;
        let heir = r.partner().or(whiteout.map(|w| &w.cell));
        let edit = heir.map_or(Edit::Remove, |c| Edit::Replace(c));
        self.edit_entry_at(By::Operation(op), &r.from.dir, &mut l.dirs[l.old], (r.from.name, r.from.hash), edit)
    }

    /// What decides what the rename means for durability. All that changes is touched.
    fn facts(&self, op: &Op<'_>, r: &Request<'_>, l: &Locked<'_>) -> Rename {
        let victim = r.dst.as_ref().filter(|d| r.partner().is_none() && d.kind == FileKind::Dir);
        Rename {
            moved: subject(op, &r.src, &l.src),
            other: r.dst.as_ref().zip(l.dst.as_ref()).map(|(d, v)| subject(op, d, v)),
            exchange: r.partner().is_some(),
            whiteout: r.leaves.is_some() && !planted(Bug::WhiteoutAlone),
            two_dirs: r.two_dirs(),
            left_other: victim.is_some_and(|d| self.any_vacated_in(d)),
        }
    }

    /// The inodes of a rename get their names, and what they wait for. `takes`: what must be durable with the new and the
    /// old name. The logical time of the change.
    fn change_inodes(&self, op: &Op<'_>, r: &Request<'_>, l: &mut Locked<'_>, plan: &Plan, takes: [Before; 2]) -> u64 {
        let now = self.shared.now();
        let than = l.src.link_seq.max(l.dst.as_ref().map_or(0, |v| v.link_seq));
        let mut dirs: SmallVec<[&mut State; 2]> = l.dirs.iter_mut().map(|d| &mut **d).collect();
        let seq = self.shared.name_time(&mut dirs, than);
        debug_assert!(seq >= than, "names changed at {seq}, before {than}");
        drop(dirs);
        change_names(&mut l.src, r.from, Some(r.to), seq, now);
        l.src.durability.inode_takes_name(&takes[0]);
        if let (Some(d), Some(v), None) = (&r.dst, &l.dst, r.partner()) {
            l.src.durability.inode_replaces(&v.durability, op.tx(d.domain).id);
        }
        plan.moved.note(&mut l.src.durability, r.from.dir.ino, r.from.name);
        if plan.moved.moves {
            l.src.parent = r.to.dir.ino;
        }
        if let Some(v) = &mut l.dst {
            change_names(v, r.to, r.partner().map(|_| r.from), seq, now);
            if r.partner().is_some() {
                v.durability.inode_takes_name(&takes[1]);
            }
            plan.other.note(&mut v.durability, r.to.dir.ino, r.to.name);
            if plan.other.moves {
                v.parent = r.from.dir.ino;
            }
        }
        for (which, vacated) in &plan.vacated {
            let (side, dir) = if *which == Which::Old { (r.from, l.old) } else { (r.to, l.new) };
            self.note_vacated(&side.dir, &l.dirs[dir], side.name, *vacated);
        }
        self.hint_rename(op, r, plan);
        if let (Some(d), Some(v), None) = (&r.dst, &mut l.dst, r.partner()) {
            self.name_gone(op, d, v);
        }
        seq
    }

    /// What recovery compares: names over domains; and, of an inode whose fate depends on one of another domain, all names
    /// that change.
    fn hint_rename(&self, op: &Op<'_>, r: &Request<'_>, plan: &Plan) {
        let hint = |side: &Side<'_>, c: &Cell, waits: &Waits| match waits.lost_to {
            Some(_) => op.hint_always(&side.dir, side.name, c),
            None => op.hint(&side.dir, side.name, c),
        };
        hint(r.from, &r.src, &plan.moved);
        hint(r.to, &r.src, &plan.moved);
        if let Some(d) = &r.dst {
            op.braid(d.domain, r.src.domain);
            hint(r.to, d, &plan.other);
            if r.partner().is_some() {
                hint(r.from, d, &plan.other);
            }
        }
    }
}

/// Locks two directories of which nobody knows whether one is above the other: other threads may lock them in either order, so
/// none is waited for with the other one locked. The places of `a` and `b` in what it gives; `None` where others keep them
/// locked.
fn lock_unrelated<'c>(a: &'c Cell, b: &'c Cell) -> Option<(Dirs<'c>, usize, usize)> {
    let mut a_first = a.ino < b.ino;
    for _ in 0..LOCK_ATTEMPTS {
        let (first, second) = if a_first { (a, b) } else { (b, a) };
        let one = first.state.write();
        if let Some(other) = second.state.try_write() {
            return Some((smallvec![one, other], usize::from(!a_first), usize::from(a_first)));
        }
        drop(one);
        // the one that was locked is waited for next
        a_first = !a_first;
    }
    None
}

/// An inode that a rename has touched.
fn subject(op: &Op<'_>, c: &Cell, st: &State) -> Subject {
    Subject {
        changed: InodeVersion { inode: c.inode(), version: st.durability.version() },
        domain: c.domain,
        tx: op.tx(c.domain).id,
        is_dir: c.kind == FileKind::Dir,
        nlink: st.nlink,
    }
}

/// An inode loses a name and gains another one.
fn change_names(st: &mut State, old: &Side<'_>, new: Option<&Side<'_>>, seq: u64, now: Timestamp) {
    st.remove_link(old.dir.ino, old.name, seq);
    if let Some(new) = new {
        st.gain_link(new.dir.ino, new.name, seq);
    }
    debug_assert!(st.durability.dirty_tx().is_some() && st.link_seq == seq, "{seq}: {:?}", st.durability);
    st.ctime = now;
    st.durability.operation_changes_names();
}

impl Volume {
    /// Renames; atomic also across domains and crashes.
    ///
    /// # Errors
    /// As `renameat2`: [`Error::NotFound`], [`Error::Exists`], [`Error::NotEmpty`], [`Error::IsDir`], [`Error::NotDir`],
    /// [`Error::Invalid`] for a directory below itself; [`Error::CrossProject`]. With a whiteout, which belongs to root, as
    /// [`Self::rename_by`].
    pub fn rename(&self, dir: InodeNo, name: &[u8], new_dir: InodeNo, new_name: &[u8], mode: RenameMode) -> Result<()> {
        self.rename_by(dir, name, new_dir, new_name, mode, &Cred::root())
    }

    /// [`Self::rename`] by a user, to whom the whiteout belongs that a mode may leave. It is as one with the rename, also across a
    /// crash.
    ///
    /// # Errors
    /// As [`Self::rename`]; with a whiteout also [`Error::NoSpace`], where the domain of what is moved has no room for it, and
    /// [`Error::Quota`].
    pub fn rename_by(
        &self,
        dir: InodeNo,
        name: &[u8],
        new_dir: InodeNo,
        new_name: &[u8],
        mode: RenameMode,
        cred: &Cred,
    ) -> Result<()> {
        let i = self.mounted();
        i.pace_change(dir);
        let (dir, new_dir) = (i.dir_cell(dir)?, i.dir_cell(new_dir)?);
        i.rename_seen((dir, name), &new_dir, || new_dir.clone(), (new_name, mode), (cred, Asker::ANY))
    }
}

impl MountedVolume {
    /// [`Volume::rename_by`] in directories that are at hand, the new one only looked at, for `asker`. `whole`: that one for more than
    /// that. What may be left belongs to `cred`.
    pub(super) fn rename_seen(
        &self,
        (dir, name): (Arc<Cell>, &[u8]),
        new_dir: &Cell,
        whole: impl FnOnce() -> Arc<Cell>,
        (new_name, mode): (&[u8], RenameMode),
        (cred, asker): (&Cred, Asker<'_>),
    ) -> Result<()> {
        let plain = matches!(mode, RenameMode::Replace | RenameMode::NoReplace) && Self::is_shared(new_dir);
        if plain && self.rename_beside((&dir, name), (new_dir, new_name), asker)?.is_some() {
            return Ok(());
        }
        check_name(name)?;
        check_name(new_name)?;
        let side = |dir, name| Side { dir, name, hash: self.hash(name) };
        self.rename(&side(dir, name), &side(whole(), new_name), mode, (cred, asker))
    }
}

#[cfg(test)]
mod tests;
