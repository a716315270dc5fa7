//! Making inodes and names: create, mkdir, symlink, mknod, tmpfile, link.

use super::{Child, Op, check_alive, check_changeable, check_name, check_takes_names};
use crate::attributes::acl;
use crate::braid::entry::{By, Edit};
use crate::cell::record::{LINK_BYTES_MAX, LINKS_MAX};
use crate::cell::{Body, Cell, State};
use crate::error::{Error, Result};
use crate::types::*;
use crate::volume::{MountedVolume, OpenFile, Volume};
use braidfs_format::inode::NOCOW;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Metadata blocks that one entry can dirty: a bucket, the other half of a split, and packed records.
const ENTRY_BLOCKS: u64 = 4;

impl MountedVolume {
    /// Where a new object of `dir` goes ([`Placement`]).
    fn place(&self, dir: &Cell, st: &State, kind: FileKind) -> DomainId {
        let policy = match st.placement {
            Placement::Unset => self.default_placement(),
            p => p,
        };
        let spread = match policy {
            Placement::Spread => true,
            Placement::Inherit => kind == FileKind::Dir && dir.ino == NodeId::ROOT,
            _ => kind == FileKind::Dir,
        };
        let n = self.domains.len() as u32;
        // the next domain that can take it
        for _ in 0..if spread { n } else { 0 } {
            let d = &self.domains[(self.next_domain.fetch_add(1, Ordering::Relaxed) % n) as usize];
            if d.failed().is_none() && self.has_room(d) {
                return d.id;
            }
        }
        if self.has_room(self.dom(dir.domain)) {
            return dir.domain;
        }
        self.roomiest().filter(|d| self.has_room(d)).map_or(dir.domain, |d| d.id)
    }

    pub(crate) fn default_placement(&self) -> Placement {
        Placement::from_u8(self.sb.placement).unwrap_or_default()
    }

    /// A new inode's number in domain `home`, or in another one where that has none; and the domain. Not inside a gate.
    fn new_node_anywhere(&self, home: DomainId, near: NodeId) -> Result<(NodeId, u32, DomainId)> {
        let first = self.new_node(home, near).map(|(ino, gener)| (ino, gener, home));
        if !matches!(first, Err(Error::NoSpace)) {
            return first;
        }
        for d in self.domains.iter().filter(|d| d.id != home && d.failed().is_none()) {
            match d.nodes.alloc(None) {
                Ok((ino, gener)) => return Ok((ino, gener, d.id)),
                Err(Error::NoSpace) => {}
                Err(e) => return Err(e),
            }
        }
        first
    }

    /// A new inode's number, its domain given more groups if need be, or those of deleted inodes. Not inside a gate.
    fn new_node(&self, d: DomainId, near: NodeId) -> Result<(NodeId, u32)> {
        let dom = self.dom(d);
        let mut given_back = false;
        loop {
            match dom.nodes.alloc(Some(near)) {
                Err(Error::NoSpace) => {
                    if self.claim_group(dom)? {
                        continue;
                    }
                    if given_back {
                        return Err(Error::NoSpace);
                    }
                    given_back = true;
                    // numbers become free when the deletion is durable, those of directories at a checkpoint
                    self.reap_zombies()?;
                    dom.commit()?;
                    if dom.held_numbers() > 0 {
                        dom.checkpoint()?;
                    }
                }
                r => return r,
            }
        }
    }

    /// A fresh state with owner, group and permissions as POSIX has them.
    fn fresh(&self, dir: &State, new: &NewNode<'_>, cred: &Cred) -> Result<State> {
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
        if new.kind == FileKind::Dir {
            st.placement = match dir.placement {
                // below the top level nothing spreads any more
                Placement::Unset => Placement::Unset,
                p => p,
            };
        }
        if new.kind == FileKind::Symlink {
            if new.target.len() > 4095 {
                return Err(Error::NameTooLong);
            }
            if new.target.is_empty() {
                return Err(Error::NotFound);
            }
            st.size = new.target.len() as u64;
            if let Body::File(f) = &mut st.body {
                f.inline = Some(new.target.to_vec());
            }
        }
        Ok(st)
    }

    pub(crate) fn create(&self, dir: NodeId, name: &[u8], new: &NewNode<'_>, cred: &Cred) -> Result<(Arc<Cell>, Attr)> {
        self.create_in(&self.cell(dir)?, name, new, cred)
    }

    /// [`Self::create`] in a directory that is at hand.
    pub(crate) fn create_in(
        &self,
        d: &Arc<Cell>,
        name: &[u8],
        new: &NewNode<'_>,
        cred: &Cred,
    ) -> Result<(Arc<Cell>, Attr)> {
        check_name(name)?;
        if d.kind != FileKind::Dir {
            return Err(Error::NotDir);
        }
        let home = {
            let st = d.state.read();
            check_alive(&st)?;
            if let Body::Dir(b) = &st.body
                && let crate::cell::dir::Lookup::Found(e) = b.index.find_loaded(self.hash(name), name)
            {
                let (node, gener) = (e.node, e.gener);
                drop(st);
                // an existence test needs no number and no transaction
                if self.child_at(d, name, node, gener)?.is_some() {
                    return Err(Error::Exists);
                }
                let st = d.state.read();
                self.place(d, &st, new.kind)
            } else {
                self.place(d, &st, new.kind)
            }
        };
        let (ino, gener, home) = self.new_node_anywhere(home, d.ino)?;
        let r = loop {
            match self.settle_name(d, name, home).and_then(|()| self.create_at(d, name, new, cred, home, ino, gener)) {
                Ok(None) => {}
                Ok(Some(made)) => break Ok(made),
                Err(e) => break Err(e),
            }
        };
        if r.is_err() {
            self.dom(home).nodes.release(ino);
        }
        r
    }

    /// `None` where the name must be settled first, or what it names was locked.
    #[allow(clippy::too_many_arguments)]
    fn create_at(
        &self,
        d: &Arc<Cell>,
        name: &[u8],
        new: &NewNode<'_>,
        cred: &Cred,
        home: DomainId,
        ino: NodeId,
        gener: u32,
    ) -> Result<Option<(Arc<Cell>, Attr)>> {
        let lender = (home != d.domain).then_some(d.domain);
        let mut op = Op::begin_lending(self, &[d.domain, home], ENTRY_BLOCKS, false, lender)?;
        let mut dst = d.state.write();
        check_alive(&dst)?;
        check_takes_names(&dst)?;
        let stale = match self.find_entry(d, &mut dst, name)? {
            Some(e) => match self.child_below(d, &[], name, e.node, e.gener)? {
                Child::Lives => return Err(Error::Exists),
                Child::Stale => true,
                Child::Busy(c) => {
                    drop((dst, op));
                    Child::wait(&c);
                    return Ok(None);
                }
            },
            None => false,
        };
        if new.kind == FileKind::Dir && dst.nlink as usize >= LINKS_MAX {
            return Err(Error::TooManyLinks);
        }
        let Some(before) = op.may_take(d, name, home) else { return Ok(None) };
        let mut st = self.fresh(&dst, new, cred)?;
        st.durability.inode_takes_name(&before);
        st.gain_link(d.ino, name, self.shared.next_seq(0));
        if new.kind == FileKind::Dir {
            st.parent = d.ino;
        } else {
            st.nlink = 1;
        }
        let cell = Arc::new(Cell::new(ino, gener, home, new.kind, st));
        op.touch(d, &mut dst)?;
        let edit = if stale { Edit::Replace(&cell) } else { Edit::Add(&cell) };
        self.edit_entry(By::Operation(&mut op), d, &mut dst, name, edit)?;
        // nothing fails from here on but the domain itself
        let mut st = cell.state.write();
        op.touch(&cell, &mut st)?;
        st.durability.operation_changes_names();
        op.hint(d, name, &cell);
        let attr = cell.attr(&st);
        drop(st);
        self.dom(home).cells.insert_new(cell.clone());
        Ok(Some((cell, attr)))
    }
}

impl Volume {
    /// Makes a file, directory, symlink or special file owned by `cred` (setgid directories hand down their group;
    /// default ACLs and `umask` applied).
    ///
    /// # Errors
    /// [`Error::Exists`], [`Error::NoSpace`], [`Error::NameTooLong`], [`Error::NotFound`] where the directory is gone.
    pub fn create(&self, dir: NodeId, name: &[u8], new: &NewNode<'_>, cred: &Cred) -> Result<Attr> {
        self.inner().create(dir, name, new, cred).map(|(_, a)| a)
    }

    /// O_TMPFILE: a file without a name, gone when closed unless linked.
    ///
    /// # Errors
    /// As [`Self::create`].
    pub fn tmpfile(&self, dir: NodeId, new: &NewNode<'_>, cred: &Cred) -> Result<(Attr, OpenFile)> {
        let i = self.inner();
        let d = i.dir_cell(dir)?;
        let (ino, gener) = i.new_node(d.domain, dir)?;
        let r = (|| {
            let mut op = Op::begin(i, &[d.domain], ENTRY_BLOCKS, false)?;
            let dst = d.state.read();
            check_alive(&dst)?;
            check_takes_names(&dst)?;
            let st = i.fresh(&dst, new, cred)?;
            drop(dst);
            let cell = Arc::new(Cell::new(ino, gener, d.domain, new.kind, st));
            let mut st = cell.state.write();
            op.touch(&cell, &mut st)?;
            let attr = cell.attr(&st);
            drop(st);
            let dom = i.dom(d.domain);
            dom.orphans.lock().insert(ino);
            dom.cells.insert_new(cell.clone());
            Ok((attr, OpenFile::new(cell, self.keeper())))
        })();
        if r.is_err() {
            i.dom(d.domain).nodes.release(ino);
        }
        r
    }

    /// Another name for a file (not a directory).
    ///
    /// # Errors
    /// [`Error::Exists`], [`Error::Perm`] for directories, [`Error::TooManyLinks`], [`Error::NoSpace`].
    pub fn link(&self, ino: NodeId, dir: NodeId, name: &[u8]) -> Result<Attr> {
        let i = self.inner();
        let d = i.dir_cell(dir)?;
        i.link_in(&i.cell(ino)?, &d, name)
    }
}

impl MountedVolume {
    /// [`Volume::link`] of an inode in a directory that are at hand.
    pub(crate) fn link_in(&self, c: &Arc<Cell>, d: &Arc<Cell>, name: &[u8]) -> Result<Attr> {
        check_name(name)?;
        loop {
            self.settle_name(d, name, c.domain)?;
            self.settle_exchange(c)?;
            self.settle_parent(d, c, c.domain)?;
            if let Some(attr) = self.link_at(c, d, name)? {
                return Ok(attr);
            }
        }
    }

    /// `None` where something must be settled first, or what has the name was locked.
    fn link_at(&self, c: &Arc<Cell>, d: &Arc<Cell>, name: &[u8]) -> Result<Option<Attr>> {
        let (i, ino) = (self, c.ino);
        let mut op = Op::begin(i, &[d.domain, c.domain], ENTRY_BLOCKS, false)?;
        let mut dst = d.state.write();
        check_alive(&dst)?;
        let stale = match i.find_entry(d, &mut dst, name)? {
            Some(e) => match i.child_below(d, &[], name, e.node, e.gener)? {
                Child::Lives => return Err(Error::Exists),
                Child::Stale => true,
                Child::Busy(busy) => {
                    drop((dst, op));
                    Child::wait(&busy);
                    return Ok(None);
                }
            },
            None => false,
        };
        if c.kind == FileKind::Dir {
            return Err(Error::Perm);
        }
        let Some(before) = op.may_take(d, name, c.domain) else { return Ok(None) };
        let mut st = c.state.write();
        if i.exchanging(&st) {
            return Ok(None);
        }
        let kept = || c.opens.load(Ordering::Acquire) > 0 || i.held.holds(c);
        let tmp = st.nlink == 0 && i.dom(c.domain).orphans.lock().contains(&ino) && kept();
        if st.deleted || (st.nlink == 0 && !tmp) {
            return Err(Error::NotFound);
        }
        check_changeable(&st)?;
        check_takes_names(&dst)?;
        let bytes: usize = st.links.iter().map(|l| l.name.len() + 9).sum();
        if st.links.len() >= LINKS_MAX || bytes + name.len() + 9 > LINK_BYTES_MAX {
            return Err(Error::TooManyLinks);
        }
        op.touch(d, &mut dst)?;
        let edit = if stale { Edit::Replace(c) } else { Edit::Add(c) };
        i.edit_entry(By::Operation(&mut op), d, &mut dst, name, edit)?;
        op.touch(c, &mut st)?;
        st.durability.inode_takes_name(&before);
        let seq = i.shared.next_seq(st.link_seq);
        st.gain_link(d.ino, name, seq);
        st.nlink += 1;
        st.ctime = i.shared.now();
        st.durability.operation_changes_names();
        if tmp {
            i.dom(c.domain).orphans.lock().remove(&ino);
            i.held.named(c);
        }
        op.hint(d, name, c);
        Ok(Some(c.attr(&st)))
    }
}
