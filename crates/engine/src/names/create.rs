//! Making inodes with their first name: create, mkdir, symlink, mknod; tmpfile, without one.

use super::checks::{check_alive, check_name, check_takes_directory, check_takes_names};
use super::entries::{Child, ENTRY_BLOCKS};
use super::placement::NewInode;
use crate::attributes::acl;
use crate::braid::entry::{By, Edit};
use crate::cell::dir::Lookup;
use crate::cell::opened::OpenCell;
use crate::cell::record::inline_room;
use crate::cell::{Body, Cell, State};
use crate::error::{Error, Result};
use crate::quota::Charge;
use crate::types::*;
use crate::volume::operation::Op;
use crate::volume::{MountedVolume, OpenFile, Volume};
use braidfs_format::inode::{INLINE_MAX, NOATIME, NOCOW, PROJECT_MASK, TARGET_MAX};
use std::sync::Arc;

/// Why an inode is not made at the first attempt.
enum Unmade {
    /// Something must be durable or deleted first, or what the name names was locked.
    Waits,
    /// The directory or the inode, which inherits its attributes, is written whole: so many blocks more are needed.
    Lacks(u64),
}

/// A new inode and its attributes.
pub(super) type Made = (Arc<Cell>, Attr);

/// A target up to this long fits every record beside a name.
const RECORD_TARGET: usize = INLINE_MAX;

/// Blocks that making an inode takes at most: those of its entry, and one of a long target.
pub(super) fn blocks_of(new: &NewNode<'_>) -> u64 {
    ENTRY_BLOCKS + u64::from(new.target.len() > RECORD_TARGET)
}

impl MountedVolume {
    /// A fresh state with owner, group and permissions as POSIX has them.
    pub(super) fn fresh(&self, dir: &State, new: &NewNode<'_>, cred: &Cred) -> Result<State> {
        let mut perm = new.mode & 0o7777;
        let sgid = dir.mode & 0o2000 != 0;
        let gid = if sgid { dir.gid } else { cred.gid };
        if sgid && new.kind == FileKind::Dir {
            perm |= 0o2000;
        }
        let acls = acl::inherit(dir, new.kind, &mut perm, new.umask)?;
        let mut st = State::fresh(new.kind, perm, cred.uid, gid, self.shared.now());
        st.xattrs = acls.into();
        st.rdev = new.rdev;
        if new.kind == FileKind::File || new.kind == FileKind::Dir {
            st.flags |= dir.flags & NOCOW;
        }
        st.flags |= dir.flags & (NOATIME | PROJECT_MASK);
        if new.kind == FileKind::Dir {
            st.placement = dir.placement;
        }
        if new.kind == FileKind::Symlink {
            if new.target.len() > TARGET_MAX {
                return Err(Error::NameTooLong);
            }
            if new.target.is_empty() {
                return Err(Error::NotFound);
            }
            if new.target.contains(&0) {
                return Err(Error::Invalid("a target with a zero byte"));
            }
            st.size = new.target.len() as u64;
            if let Body::File(f) = &mut st.body {
                f.inline = Some(new.target.to_vec());
            }
        }
        Ok(st)
    }

    /// Whether an inode that is to be made, with its name, has content that its record has no room for: a target. It becomes a
    /// page then, so that its block is reserved and charged for here, and not by the commit.
    pub(super) fn needs_page(st: &State, new: &NewNode<'_>) -> bool {
        new.target.len() > RECORD_TARGET && new.kind == FileKind::Symlink && new.target.len() > inline_room(st)
    }

    /// It gets that page, with one of the blocks that the operation has reserved ([`blocks_of`]).
    pub(super) fn give_page(&self, op: &mut Op<'_>, d: DomainId, st: &mut State) {
        let domain = op.enter(d).domain;
        let reserved = op.take_reserved(d);
        debug_assert!(reserved, "an operation that makes a link with a long target reserves a block for it");
        if let Body::File(f) = &mut st.body {
            domain.uninline(f);
            f.reserved = u64::from(reserved);
            op.tx(d).expect_pages(1);
        }
    }

    /// Charges the owners of an inode that is to be made.
    pub(super) fn charge_inode(&self, st: &State, cred: &Cred) -> Result<Charge<'_>> {
        let mut charge = self.shared.quotas.charge_new(st.owners());
        charge.inode(cred.privileged)?;
        Ok(charge)
    }

    /// It is made, and nobody else has seen it.
    pub(super) fn note_inode_made(&self, c: &Cell, charge: Charge<'_>) {
        if charge.is_on() {
            self.shared.quotas.note_counted(c.ino);
        }
        charge.keep();
    }

    pub(crate) fn create(&self, dir: InodeNo, name: &[u8], new: &NewNode<'_>, cred: &Cred) -> Result<Made> {
        self.create_in(&self.cell(dir)?, name, new, cred)
    }

    /// [`Self::create`] in a directory that is at hand.
    pub(crate) fn create_in(&self, d: &Arc<Cell>, name: &[u8], new: &NewNode<'_>, cred: &Cred) -> Result<Made> {
        self.create_seen(d, || d.clone(), name, new, cred)
    }

    /// [`Self::create_in`] in a directory that is only looked at. `whole`: the directory for more than that.
    pub(super) fn create_seen(
        &self,
        d: &Cell,
        whole: impl FnOnce() -> Arc<Cell>,
        name: &[u8],
        new: &NewNode<'_>,
        cred: &Cred,
    ) -> Result<Made> {
        if Self::is_shared(d)
            && let Some(made) = self.create_beside(d, name, new, cred)?
        {
            return Ok(made);
        }
        self.create_alone(&whole(), name, new, cred)
    }

    /// [`Self::create_in`] with the directory for itself.
    fn create_alone(&self, d: &Arc<Cell>, name: &[u8], new: &NewNode<'_>, cred: &Cred) -> Result<Made> {
        check_name(name)?;
        if d.kind != FileKind::Dir {
            return Err(Error::NotDir);
        }
        let hash = self.hash(name);
        let target = {
            let st = d.state.read();
            check_alive(&st)?;
            if let Body::Dir(b) = &st.body
                && let Lookup::Found(inode) = b.index.find_loaded(hash, name, |e| -> InodeRef { e.into() })
            {
                drop(st);
                // an existence test needs no number and no transaction
                if self.child_at(d, name, inode)?.is_some() {
                    return Err(Error::Exists);
                }
                let st = d.state.read();
                self.place(d, &st, new.kind)
            } else {
                self.place(d, &st, new.kind)
            }
        };
        let inode = self.new_inode_anywhere(target, d.ino)?;
        self.create_with(d, (name, hash), new, cred, inode)
    }

    /// [`Self::create_alone`] with the number at hand, which is given back where the inode is not made.
    fn create_with(
        &self,
        d: &Arc<Cell>,
        name: (&[u8], u64),
        new: &NewNode<'_>,
        cred: &Cred,
        number: NewInode,
    ) -> Result<Made> {
        if new.kind == FileKind::Dir {
            self.dom(number.domain).note_new_directory(number.inode.ino);
        }
        let (mut replaced, mut blocks) = (self.replaced(), blocks_of(new));
        let r = loop {
            match self.try_create(d, name, new, cred, number, blocks) {
                // mostly nobody has to be durable first, which is seen with the directory locked
                Ok(Err(Unmade::Waits)) => {
                    if let Err(e) = self.commit_vacating_rename(d, name.0, number.domain) {
                        break Err(e);
                    }
                }
                Ok(Err(Unmade::Lacks(more))) => blocks = blocks_of(new) + more,
                Ok(Ok(made)) => break Ok(made),
                Err(Error::Quota(owner)) if self.end_replaced_of(owner, &mut replaced) => {}
                Err(e) => break Err(e),
            }
        };
        if r.is_err() {
            self.give_number_back(number.domain, number.inode);
        }
        r
    }

    /// Makes the root directory of a tenant in a domain, which is bound to it before anybody can see it; where it is not made,
    /// it is bound no longer.
    ///
    /// # Errors
    /// As [`Volume::create`].
    pub(crate) fn make_tenant_root(
        &self,
        d: &Arc<Cell>,
        name: &[u8],
        mode: u32,
        cred: &Cred,
        target: DomainId,
    ) -> Result<Made> {
        check_name(name)?;
        if d.kind != FileKind::Dir {
            return Err(Error::NotDir);
        }
        let new = NewNode { kind: FileKind::Dir, mode, umask: 0, rdev: 0, target: b"" };
        let inode = self.new_inode(target, d.ino)?.ok_or(Error::NoSpace)?;
        let bound = self.dom(target);
        bound.set_tenant_root(Some(inode.ino));
        let made = self.create_with(d, (name, self.hash(name)), &new, cred, NewInode { inode, domain: target });
        made.inspect_err(|_| bound.set_tenant_root(None))
    }

    /// With so many blocks reserved.
    fn try_create(
        &self,
        d: &Arc<Cell>,
        (name, hash): (&[u8], u64),
        new: &NewNode<'_>,
        cred: &Cred,
        NewInode { inode, domain: target }: NewInode,
        blocks: u64,
    ) -> Result<Result<Made, Unmade>> {
        let lender = (target != d.domain).then_some(d.domain);
        let mut op = Op::new(self);
        op.begin_lending(&[d.domain, target], blocks, false, lender)?;
        let mut dst = d.state.write();
        check_alive(&dst)?;
        check_takes_names(&dst)?;
        let stale = match self.find_entry_at(d, &mut dst, name, hash)? {
            Some(e) => match self.child_below(d, &[], name, e.inode)? {
                Child::Lives => return Err(Error::Exists),
                Child::Stale => true,
                Child::Busy(c) => {
                    drop((dst, op));
                    Child::wait(&c);
                    return Ok(Err(Unmade::Waits));
                }
            },
            None => false,
        };
        if new.kind == FileKind::Dir {
            check_takes_directory(&dst)?;
        }
        let Some(before) = op.may_take(d, name, target) else { return Ok(Err(Unmade::Waits)) };
        let mut st = self.fresh(&dst, new, cred)?;
        if let Some(more) = op.lacks_for(&mut [(d.domain, &mut dst), (target, &mut st)]) {
            return Ok(Err(Unmade::Lacks(more)));
        }
        let mut charge = self.charge_inode(&st, cred)?;
        st.durability.inode_takes_name(&before);
        st.gain_link(d.ino, name, self.shared.name_time(&mut [&mut dst], 0));
        let needs_page = Self::needs_page(&st, new);
        charge.blocks(needs_page.into())?;
        if new.kind == FileKind::Dir {
            st.parent = d.ino;
        } else {
            st.nlink = 1;
        }
        let cell = Arc::new(Cell::new(inode, target, new.kind, st));
        op.touch(d, &mut dst)?;
        let edit = if stale { Edit::Replace(&cell) } else { Edit::Add(&cell) };
        self.edit_entry_at(By::Operation(&mut op), d, &mut dst, (name, hash), edit)?;
        // nothing fails from here on but the domain itself
        let mut st = cell.state.write();
        if needs_page {
            self.give_page(&mut op, target, &mut st);
        }
        op.touch(&cell, &mut st)?;
        st.durability.operation_changes_names();
        op.hint(d, name, &cell);
        debug_assert!(st.has_link(d.ino, name) && st.durability.dirty_tx() == Some(op.tx(target).id), "{}", cell.ino);
        let attr = cell.attr(&st);
        drop(st);
        self.note_inode_made(&cell, charge);
        self.dom(target).cells.insert_new(cell.clone());
        Ok(Ok((cell, attr)))
    }

    /// Makes an inode without a name, open, with so many blocks reserved. It waits where the journal of its domain has no room for more
    /// of them.
    fn try_tmpfile(
        &self,
        d: &Cell,
        new: &NewNode<'_>,
        cred: &Cred,
        NewInode { inode, domain: target }: NewInode,
        blocks: u64,
    ) -> Result<Result<(Attr, OpenCell), Unmade>> {
        let mut op = Op::new(self);
        op.begin(&[target], blocks, false)?;
        let dst = d.state.read();
        check_alive(&dst)?;
        check_takes_names(&dst)?;
        let mut st = self.fresh(&dst, new, cred)?;
        drop(dst);
        if let Some(more) = op.lacks_for(&mut [(target, &mut st)]) {
            return Ok(Err(Unmade::Lacks(more)));
        }
        let dom = self.dom(target);
        if dom.has_most_orphans() {
            return Ok(Err(Unmade::Waits));
        }
        let charge = self.charge_inode(&st, cred)?;
        let cell = Arc::new(Cell::new(inode, target, new.kind, st));
        let mut st = cell.state.write();
        op.touch(&cell, &mut st)?;
        let attr = cell.attr(&st);
        drop(st);
        dom.orphans.insert(inode.ino);
        self.note_inode_made(&cell, charge);
        dom.cells.insert_new(cell.clone());
        Ok(Ok((attr, OpenCell::counted(cell))))
    }
}

impl Volume {
    /// Makes a file, directory, symlink or special file owned by `cred` (setgid directories hand down their group;
    /// default ACLs and `umask` applied).
    ///
    /// # Errors
    /// [`Error::Exists`], [`Error::NoSpace`], [`Error::NameTooLong`], [`Error::NotFound`] where the directory is gone.
    pub fn create(&self, dir: InodeNo, name: &[u8], new: &NewNode<'_>, cred: &Cred) -> Result<Attr> {
        self.mounted().pace_change(dir);
        self.mounted().create(dir, name, new, cred).map(|(_, a)| a)
    }

    /// O_TMPFILE: a file without a name, gone when closed unless linked.
    ///
    /// # Errors
    /// As [`Self::create`].
    pub fn tmpfile(&self, dir: InodeNo, new: &NewNode<'_>, cred: &Cred) -> Result<(Attr, OpenFile)> {
        let i = self.mounted();
        let d = i.dir_cell(dir)?;
        let target = i.place(&d, &d.state.read(), new.kind);
        let number = i.new_inode_anywhere(target, dir)?;
        let (mut replaced, mut blocks) = (i.replaced(), ENTRY_BLOCKS);
        let r = loop {
            let gone = i.replaced_gone(number.domain);
            match i.try_tmpfile(&d, new, cred, number, blocks) {
                Ok(Err(Unmade::Lacks(more))) => blocks = ENTRY_BLOCKS + more,
                Ok(Ok((attr, cell))) => break Ok((attr, OpenFile::new(cell, self.reference()))),
                Ok(Err(Unmade::Waits)) => {
                    if let Err(e) = i.shorten_orphans(number.domain, gone) {
                        break Err(e);
                    }
                }
                Err(Error::Quota(owner)) if i.end_replaced_of(owner, &mut replaced) => {}
                Err(e) => break Err(e),
            }
        };
        if r.is_err() {
            i.give_number_back(number.domain, number.inode);
        }
        r
    }
}
