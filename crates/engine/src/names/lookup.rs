//! Name → inode, attributes.

use super::checks::check_alive;
use super::entries::may_be_linked;
use crate::cell::Cell;
use crate::cell::cache::CellRef;
use crate::cell::dentries::{Key, Target};
use crate::cell::dir::Lookup;
use crate::cell::opened::OpenCell;
use crate::domain::Domain;
use crate::error::{Error, Result};
use crate::types::*;
use crate::volume::{MountedVolume, OpenFile, Volume};
use braidfs_format::Corrupt;
use braidfs_format::dentry::Dentry;
use braidfs_format::inode::NAME_MAX;
use braidfs_sync::fetch;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl MountedVolume {
    /// The inode of a name; a stale entry counts as absent.
    pub(crate) fn lookup(&self, dir: InodeNo, name: &[u8]) -> Result<Arc<Cell>> {
        self.lookup_in(&self.dir_cell(dir)?, name)
    }

    /// [`Self::lookup`] in a directory that is at hand.
    pub(crate) fn lookup_in(&self, d: &Arc<Cell>, name: &[u8]) -> Result<Arc<Cell>> {
        match self.find_in(d, name)? {
            Some(c) => Ok(c),
            None => Err(Error::NotFound),
        }
    }

    /// [`Self::lookup_in`] of a name that is to be taken away from its inode.
    pub(super) fn lookup_to_leave(&self, d: &Arc<Cell>, name: &[u8]) -> Result<Arc<Cell>> {
        if name == b"." {
            return Ok(d.clone());
        }
        self.find_seen(d, name, true)?.map(|c| c.arc()).ok_or(Error::NotFound)
    }

    /// [`Self::lookup_in`] of a name that may be free: then `None`.
    ///
    /// # Errors
    /// [`Error::NotFound`] where the directory has been removed, and as of [`Volume::lookup`].
    pub(crate) fn find_in(&self, d: &Arc<Cell>, name: &[u8]) -> Result<Option<Arc<Cell>>> {
        if name == b"." {
            return Ok(Some(d.clone()));
        }
        Ok(self.find_seen(d, name, false)?.map(|c| c.arc()))
    }

    /// [`Self::lookup`] in a directory that is only looked at, of an inode that is only looked at.
    pub(crate) fn lookup_seen<'a>(&'a self, d: &CellRef<'a>, name: &[u8]) -> Result<CellRef<'a>> {
        if d.kind != FileKind::Dir {
            return Err(Error::NotDir);
        }
        if name == b"." {
            return Ok(CellRef::Loaded(d.arc()));
        }
        match self.find_seen(d, name, false)? {
            Some(c) => Ok(c),
            None => Err(Error::NotFound),
        }
    }

    /// [`Self::find_in`] a directory that is only looked at, of another name than `.`. `leave`: it is to be taken away.
    fn find_seen(&self, d: &Cell, name: &[u8], leave: bool) -> Result<Option<CellRef<'_>>> {
        if name == b".." {
            return Ok(self.find_above(d)?.map(CellRef::Loaded));
        }
        if name.len() > NAME_MAX {
            return Err(Error::NameTooLong);
        }
        // after a crash an entry may be stale: it is noted when its inode was seen to hang there
        let stale = self.maybe_stale.load(Ordering::Relaxed);
        let key = Key::of(d.ino, d.generation, name);
        let known = if leave { self.dentries.get_to_forget(&key) } else { self.dentries.get(&key) };
        if let Some(t) = known {
            let seen = self.see_found(t.node)?;
            if leave && let Some(c) = &seen {
                fetch::to_change::<Cell>(c);
            }
            match seen {
                Some(c) if c.is(t.inode()) && is_named(&c, &key, d.ino, name) => return Ok(Some(c)),
                _ => {} // gone since
            }
        }
        let note = |inode: InodeRef, d_type: u8| {
            if let Some(kind) = FileKind::from_mode(u32::from(d_type) << 12)
                && may_be_linked(inode.ino, d.ino)
                && !stale
            {
                self.dentries.put(&key, Target { node: inode.ino, generation: inode.generation, kind });
            }
        };
        let hash = self.hash(name);
        // where the inode is there, which is so nearly always, nobody asks for it
        let mut wants_version = stale;
        loop {
            let loaded = {
                let st = d.state.read();
                check_alive(&st)?;
                match &st.body {
                    crate::cell::Body::Dir(b) => {
                        // noted as long as nobody can change the entry
                        let see = |e: &Dentry| {
                            let inode = e.into();
                            note(inode, e.kind);
                            (Some(inode), if wants_version { st.version() } else { 0 })
                        };
                        match b.index.find_loaded(hash, name, see) {
                            Lookup::Found(seen) => Some(seen),
                            Lookup::Absent => Some((None, 0)),
                            Lookup::NotLoaded => None,
                        }
                    }
                    _ => return Err(Error::NotDir),
                }
            };
            let (entry, version) = match loaded {
                Some(e) => e,
                None => {
                    let mut st = d.state.write();
                    let e = self.find_entry(d, &mut st, name)?;
                    e.iter().for_each(|e| note(e.inode, e.kind));
                    wants_version = true;
                    (e.map(|e| e.inode), st.version())
                }
            };
            let Some(inode) = entry else { return Ok(None) };
            if let Some(c) = self.child_at(d, name, inode)? {
                let st = d.state.read();
                // the entry is what it was, and stays so meanwhile
                if stale && st.version() == version && !st.is_shared_dir() {
                    self.dentries.put(&key, Target { node: c.ino, generation: c.generation, kind: c.kind });
                }
                return Ok(Some(CellRef::Loaded(c)));
            }
            if self.maybe_stale.load(Ordering::Relaxed) {
                return Ok(None);
            }
            if !std::mem::replace(&mut wants_version, true) {
                continue;
            }
            // A directory whose changes are not written any more comes back from the device as it was before them.
            if self.dom(d.domain).failed().is_some() {
                return Ok(None);
            }
            // Without a crash before, an entry is stale only while it is being removed: an operation changes entry, link
            // and version of the directory in one step. One that stays names what is lost.
            if d.state.read().version() == version {
                return Err(self.fail_for_lost(d, inode));
            }
        }
    }

    /// The directory above another one, of which only the number is known: what was found counts where it is still there, and above
    /// `d`, after that.
    ///
    /// # Errors
    /// [`Error::NotFound`] where `d` has been removed: what was above it may be gone, and another inode have its number.
    fn find_above(&self, d: &Cell) -> Result<Option<Arc<Cell>>> {
        let above = || {
            let st = d.state.read();
            check_alive(&st).map(|()| st.parent)
        };
        let mut parent = above()?;
        loop {
            let found = self.find(parent)?;
            let now = above()?;
            if now == parent {
                return Ok(found.filter(|c| c.kind == FileKind::Dir && !c.state.read().deleted));
            }
            parent = now;
        }
    }

    /// An entry names an inode that is not there, or has no such name. Where its domain knows of none that had the number so late, the
    /// inode is lost, and that domain fails. Else the entry is what is old, and its directory's domain fails.
    #[cold]
    fn fail_for_lost(&self, dir: &Cell, lost: InodeRef) -> Error {
        let why = format!("{} names {}, which is lost", dir.ino, lost.ino);
        let why = Error::Corrupt(Corrupt::new("directory", why));
        let known = |d: &Arc<Domain>| d.nodes.look(lost.ino.node());
        match self.domain_of(lost.ino).map(|d| (d, known(d))) {
            None | Some((_, Ok(None))) => self.dom(dir.domain).fail(&why),
            Some((_, Ok(Some(e)))) if e.generation >= lost.generation => self.dom(dir.domain).fail(&why),
            Some((owner, _)) => owner.fail(&why),
        }
        why
    }
}

/// Whether what was found by `key` is what `name` names: a hash may stand for the name.
pub(super) fn is_named(c: &Cell, key: &Key, dir: InodeNo, name: &[u8]) -> bool {
    !key.is_hashed() || c.state.read().has_link(dir, name)
}

impl Volume {
    /// Name → inode. `.` and `..` are allowed.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::NotDir`], [`Error::NameTooLong`], or of the device.
    pub fn lookup(&self, dir: InodeNo, name: &[u8]) -> Result<Attr> {
        let c = self.mounted().lookup(dir, name)?;
        let st = c.state.read();
        Ok(c.attr(&st))
    }

    /// `stat`.
    ///
    /// # Errors
    /// [`Error::NotFound`] where the inode is gone.
    pub fn getattr(&self, ino: InodeNo) -> Result<Attr> {
        let c = self.mounted().see(ino)?;
        let st = c.state.read();
        if st.deleted {
            return Err(Error::NotFound);
        }
        Ok(c.attr(&st))
    }

    /// Opens an inode (file or directory); keeps it alive.
    ///
    /// # Errors
    /// [`Error::NotFound`] where the inode is gone.
    pub fn open(&self, ino: InodeNo) -> Result<OpenFile> {
        match self.mounted().see(ino)? {
            CellRef::Published(c) => self.open_if_there(OpenCell::of_ref(&c)).ok_or(Error::NotFound),
            CellRef::Loaded(c) => self.open_cell(c),
        }
    }

    pub(crate) fn open_cell(&self, c: Arc<Cell>) -> Result<OpenFile> {
        self.open_if_there(OpenCell::counted(c)).ok_or(Error::NotFound)
    }

    /// Opens an inode that may be gone by now: then `None`.
    pub(super) fn open_if_there(&self, c: OpenCell) -> Option<OpenFile> {
        // it has counted itself first: whoever removes the last name looks at the count after that
        let f = OpenFile::new(c, self.reference());
        let gone = f.cell.nameless.load(Ordering::SeqCst) && f.cell.state.read().deleted;
        (!gone).then_some(f)
    }

    /// Target of a symlink.
    ///
    /// # Errors
    /// [`Error::Invalid`] where it is none; [`Error::Corrupt`] where its target is lost.
    pub fn readlink(&self, ino: InodeNo) -> Result<Vec<u8>> {
        let c = self.mounted().cell(ino)?;
        if c.kind != FileKind::Symlink {
            return Err(Error::Invalid("not a symbolic link"));
        }
        let n = c.state.read().size as usize;
        let mut b = vec![0; n];
        let i = self.mounted();
        let mut due = None;
        let got = i.read_then(&c, None, 0, &mut b, |st| due = i.access_due(st))?;
        b.truncate(got);
        // a hole, or blocks of something else: no path has a zero byte, and programs would take it for an end
        if b.is_empty() || b.contains(&0) {
            return Err(Corrupt::new("symbolic link", format!("inode {ino} has no target")).into());
        }
        if let Some(now) = due {
            i.set_atime(&c, now);
        }
        Ok(b)
    }
}

#[cfg(test)]
mod tests {
    use crate::cell::cache::Memory;
    use crate::types::*;
    use crate::{Cred, Error, MkfsOptions, MountOptions, NewNode, Volume, mkfs};
    use braidfs_device::{Device, Effect, FaultDevice, MemDevice, Op, Rule};
    use std::sync::Arc;

    /// A directory of a failed domain is read from the device again, as it was before changes whose other side is durable: a name in
    /// it of what is gone is no sign that anything of the other domain is lost.
    #[test]
    fn an_old_directory_of_a_failed_domain_takes_nobody_along() {
        let faults = [0, 1].map(|i| Arc::new(FaultDevice::new(Arc::new(MemDevice::new(8192)), i)));
        let devices: Vec<Arc<dyn Device>> = faults.iter().map(|f| f.clone() as Arc<dyn Device>).collect();
        let o = MkfsOptions { domains: Some(2), placement: Placement::Spread, ..MkfsOptions::default() };
        mkfs::format(&devices, &o).unwrap();
        let v = Volume::mount(devices, MountOptions { background: false, ..MountOptions::default() }).unwrap();
        let make = |dir: InodeNo, domain: u16, kind| {
            let new = NewNode { kind, mode: 0o700, umask: 0, rdev: 0, target: b"" };
            let one = |i: u32| {
                let name = format!("{i}").into_bytes();
                (v.create(dir, &name, &new, &Cred::root()).unwrap().ino, name)
            };
            (0..64).map(one).find(|(ino, _)| v.domain_of(*ino).unwrap() == DomainId(domain)).unwrap()
        };
        let dir = make(InodeNo::ROOT, 1, FileKind::Dir).0;
        let name = make(dir, 0, FileKind::File).1;
        v.sync().unwrap();
        v.unlink(dir, &name).unwrap();
        faults[1].add(Rule::new(Op::Write, Effect::Fail(5)));
        assert!(v.sync().is_err());
        faults[1].clear();
        let domain = v.mounted().dom(DomainId(1));
        for _ in 0..3 {
            domain.evict(Memory { pages: 1 << 20, cells: 1 << 20, index_bytes: 1 << 30, attached: 0 });
        }
        assert!(matches!(v.lookup(dir, &name), Err(Error::NotFound)));
        let failed: Vec<bool> = v.domains().iter().map(|d| d.failed.is_some()).collect();
        assert_eq!(failed, [false, true]);
        assert!(v.unmount().is_err());
    }
}
