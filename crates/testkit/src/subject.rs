//! The two [`Subject`]s: the model, and a mounted volume.

use crate::model::{self, Ino, Model, Times};
use crate::ops::{Subject, SyncWay};
use braidfs::{
    Attr, Cred, DirEntry, Error, FallocMode, FileKind, InodeNo, NewNode, OpenFile, RenameMode, Result, SetAttr, Volume,
    XattrMode,
};
use std::collections::{BTreeMap, BTreeSet};

impl Subject for Model {
    type Id = Ino;
    type File = Ino;

    fn root(&self) -> Ino {
        model::ROOT
    }
    fn id(&self, file: &Ino) -> Ino {
        *file
    }
    fn lookup(&mut self, dir: Ino, name: &[u8]) -> Result<Ino> {
        Model::lookup(self, dir, name)
    }
    fn stat(&mut self, id: Ino) -> Result<(model::Stat, Times)> {
        Ok((Model::stat(self, id)?, self.node(id).map(|n| n.times).unwrap_or_default()))
    }
    fn create(&mut self, dir: Ino, name: &[u8], new: &NewNode<'_>) -> Result<Ino> {
        Model::create(self, dir, name, new)
    }
    fn tmpfile(&mut self, dir: Ino, new: &NewNode<'_>) -> Result<(Ino, Ino)> {
        Model::tmpfile(self, dir, new).map(|i| (i, i))
    }
    fn link(&mut self, id: Ino, dir: Ino, name: &[u8]) -> Result<()> {
        Model::link(self, id, dir, name)
    }
    fn unlink(&mut self, dir: Ino, name: &[u8]) -> Result<()> {
        Model::unlink(self, dir, name)
    }
    fn rmdir(&mut self, dir: Ino, name: &[u8]) -> Result<()> {
        Model::rmdir(self, dir, name)
    }
    fn rename(&mut self, a: Ino, n: &[u8], b: Ino, m: &[u8], mode: RenameMode) -> Result<()> {
        Model::rename(self, a, n, b, m, mode)
    }
    fn readlink(&mut self, id: Ino) -> Result<Vec<u8>> {
        let target = Model::readlink(self, id)?;
        self.accessed(id);
        Ok(target)
    }
    fn readdir(&mut self, dir: Ino) -> Result<BTreeSet<Vec<u8>>> {
        let names = Model::readdir(self, dir)?;
        self.accessed(dir);
        Ok(names)
    }
    fn open(&mut self, id: Ino) -> Result<Ino> {
        Model::open(self, id).map(|()| id)
    }
    fn close(&mut self, file: Ino) {
        Model::close(self, file);
    }
    fn read(&mut self, file: &Ino, off: u64, len: usize) -> Result<Vec<u8>> {
        let data = Model::read(self, *file, off, len)?;
        // what reads nothing is not noted
        if !data.is_empty() {
            self.accessed(*file);
        }
        Ok(data)
    }
    fn write(&mut self, file: &Ino, off: u64, data: &[u8]) -> Result<usize> {
        Model::write(self, *file, off, data)
    }
    fn append(&mut self, file: &Ino, data: &[u8]) -> Result<u64> {
        Model::append(self, *file, data)
    }
    fn write_back(&mut self, file: &Ino, off: u64, data: &[u8]) -> Result<usize> {
        Model::write_back(self, *file, off, data)
    }
    fn fallocate(&mut self, file: &Ino, mode: FallocMode, off: u64, len: u64) -> Result<()> {
        Model::fallocate(self, *file, mode, off, len)
    }
    fn seek(&mut self, _: &Ino, _: u64, _: bool) -> Result<u64> {
        // Many answers are right: see `Model::seek_allows`.
        Ok(0)
    }
    fn copy_range(&mut self, a: &Ino, off: u64, b: &Ino, to: u64, len: u64) -> Result<u64> {
        Model::copy_range(self, *a, off, *b, to, len)
    }
    fn setattr(&mut self, id: Ino, set: &SetAttr) -> Result<()> {
        Model::setattr(self, id, set)
    }
    fn setxattr(&mut self, id: Ino, name: &[u8], value: &[u8], mode: XattrMode) -> Result<()> {
        Model::setxattr(self, id, name, value, mode)
    }
    fn getxattr(&mut self, id: Ino, name: &[u8]) -> Result<Vec<u8>> {
        Model::getxattr(self, id, name)
    }
    fn listxattr(&mut self, id: Ino) -> Result<BTreeSet<Vec<u8>>> {
        Model::listxattr(self, id)
    }
    fn removexattr(&mut self, id: Ino, name: &[u8]) -> Result<()> {
        Model::removexattr(self, id, name)
    }
    fn fsync(&mut self, _: Ino, _: bool) -> Result<()> {
        Ok(())
    }
    fn sync(&mut self) -> Result<()> {
        Ok(())
    }
    fn trim(&mut self) -> Result<()> {
        Ok(())
    }
    fn clean(&mut self) -> Result<()> {
        Ok(())
    }
    fn defragment(&mut self, _: &Ino, _: bool) -> Result<()> {
        Ok(())
    }
    fn commit(&mut self, _: Ino, _: bool) -> Result<()> {
        Ok(())
    }
}

/// An inode of a volume: number and generation, so that a number used again is another inode.
pub type Key = (InodeNo, u32);

/// What the model knows of an inode's attributes, and the times.
pub fn stat_of(a: &Attr) -> (model::Stat, Times) {
    let kind = a.kind();
    let size = if matches!(kind, FileKind::File | FileKind::Symlink) { a.size } else { 0 };
    let rdev = if matches!(kind, FileKind::Char | FileKind::Block) { a.rdev } else { 0 };
    let stat =
        model::Stat { kind, mode: a.mode & 0o7777, uid: a.uid, gid: a.gid, rdev, nlink: a.nlink, size, flags: a.flags };
    (stat, Times::of(a))
}

/// Extended attributes but those that a volume tells of itself.
///
/// # Errors
/// Of the volume.
pub fn xattrs(v: &Volume, ino: InodeNo) -> Result<BTreeMap<Vec<u8>, Vec<u8>>> {
    let names = v.listxattr(ino)?.into_iter().filter(|n| !n.starts_with(b"braidfs."));
    names.map(|name| v.getxattr(ino, &name).map(|value| (name, value))).collect()
}

/// Names in a directory, checked: `.` and `..` once each and in front, no name twice.
///
/// # Errors
/// Of the volume, or [`Error::Invalid`] with what is wrong.
pub fn names(v: &Volume, dir: InodeNo) -> Result<BTreeSet<Vec<u8>>> {
    let (mut names, mut dots, mut double) = (BTreeSet::new(), 0, false);
    v.readdir(dir, 0, &mut |e| {
        match e.name {
            b"." | b".." => dots += 1,
            n => double |= !names.insert(n.to_vec()),
        }
        true
    })?;
    match (double, dots) {
        (true, _) => Err(Error::Invalid("readdir gives a name twice")),
        (false, 2) => Ok(names),
        _ => Err(Error::Invalid("readdir does not give . and .. once each")),
    }
}

/// An entry of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Inode that it names.
    pub key: Key,
    /// Type of that inode.
    pub kind: FileKind,
    name: Vec<u8>,
    next: u64,
}

impl Entry {
    fn of(e: &DirEntry<'_>) -> Self {
        Self { key: (e.ino, e.generation), kind: e.kind, name: e.name.to_vec(), next: e.next }
    }

    /// Whether it names the inode of these attributes.
    pub fn names(&self, a: &Attr) -> bool {
        (self.key, self.kind) == ((a.ino, a.generation), a.kind())
    }
}

/// Lists a directory again, stopping at random places.
fn check_goes_on(v: &Volume, dir: InodeNo, all: &[Entry], rng: &mut fastrand::Rng) -> Result<()> {
    let (mut again, mut at) = (Vec::new(), 0);
    loop {
        let mut most = rng.usize(1..all.len() + 2);
        let mut each = |e: &DirEntry<'_>| {
            let takes = most > 0;
            most = most.saturating_sub(1);
            if takes {
                again.push(Entry::of(e));
            }
            takes
        };
        if rng.bool() {
            v.readdir(dir, at, &mut |e| each(&e))?;
        } else {
            v.readdir_plus(dir, at, &mut |e, _| each(&e))?;
        }
        if most > 0 {
            break;
        }
        at = again.last().map_or(0, |e| e.next);
    }
    if *all == again[..] { Ok(()) } else { Err(Error::Invalid("readdir gives something else where it goes on")) }
}

/// Everything in a directory but `.` and `..`, by name, and what `..` names. Checked: `.` and `..` are in front, no name
/// comes twice; of one listing in `one_of` also that who stops anywhere and goes on from there finds the same, with attributes
/// or without.
///
/// # Errors
/// Of the volume, or [`Error::Invalid`] with what is wrong.
pub fn listing(v: &Volume, dir: InodeNo, one_of: u64) -> Result<(BTreeMap<Vec<u8>, Entry>, InodeNo)> {
    let mut all = Vec::new();
    v.readdir(dir, 0, &mut |e| {
        all.push(Entry::of(&e));
        true
    })?;
    let mut rng = fastrand::Rng::with_seed(dir.0 ^ all.last().map_or(0, |e| e.next));
    if rng.u64(..one_of) == 0 {
        check_goes_on(v, dir, &all, &mut rng)?;
    }
    let [dot, up, rest @ ..] = &all[..] else { return Err(Error::Invalid("readdir gives no . and ..")) };
    if (&dot.name[..], dot.key.0, &up.name[..]) != (b".", dir, b"..") {
        return Err(Error::Invalid("readdir does not begin with . and .."));
    }
    let by_name: BTreeMap<Vec<u8>, Entry> = rest.iter().map(|e| (e.name.clone(), e.clone())).collect();
    match by_name.len() == rest.len() && !by_name.contains_key(&b"."[..]) && !by_name.contains_key(&b".."[..]) {
        true => Ok((by_name, up.key.0)),
        false => Err(Error::Invalid("readdir gives a name twice")),
    }
}

/// A volume as a subject. Borrows: the volume can still be unmounted.
#[derive(Clone, Copy)]
pub struct OnVolume<'v> {
    vol: &'v Volume,
    alone: bool,
}

impl<'v> OnVolume<'v> {
    /// That only this subject changes: what a call tells of an inode is at once compared with what others tell. A
    /// difference is a panic.
    pub fn alone(vol: &'v Volume) -> Self {
        Self { vol, alone: true }
    }

    /// That others change at the same time.
    pub fn among_others(vol: &'v Volume) -> Self {
        Self { vol, alone: false }
    }

    /// Attributes that a call has returned.
    fn returned(&self, what: &str, a: Attr) -> Result<Key> {
        if self.alone {
            let now = self.vol.getattr(a.ino)?;
            assert_eq!(a, now, "{what} returns other attributes than getattr");
        }
        Ok((a.ino, a.generation))
    }
}

impl Subject for OnVolume<'_> {
    type Id = Key;
    type File = (OpenFile, u32);

    fn root(&self) -> Key {
        (InodeNo::ROOT, 0)
    }
    fn id(&self, file: &Self::File) -> Key {
        (file.0.ino(), file.1)
    }
    fn lookup(&mut self, dir: Key, name: &[u8]) -> Result<Key> {
        self.vol.lookup(dir.0, name).and_then(|a| self.returned("lookup", a))
    }
    fn stat(&mut self, id: Key) -> Result<(model::Stat, Times)> {
        self.vol.getattr(id.0).map(|a| stat_of(&a))
    }
    fn create(&mut self, dir: Key, name: &[u8], new: &NewNode<'_>) -> Result<Key> {
        let made = self.vol.create(dir.0, name, new, &Cred::root()).and_then(|a| self.returned("create", a))?;
        if self.alone {
            assert_eq!(self.lookup(dir, name)?, made, "lookup finds something else than create has made");
        }
        Ok(made)
    }
    fn tmpfile(&mut self, dir: Key, new: &NewNode<'_>) -> Result<(Key, Self::File)> {
        let (a, f) = self.vol.tmpfile(dir.0, new, &Cred::root())?;
        self.returned("tmpfile", a).map(|key| (key, (f, key.1)))
    }
    fn link(&mut self, id: Key, dir: Key, name: &[u8]) -> Result<()> {
        let named = self.vol.link(id.0, dir.0, name).and_then(|a| self.returned("link", a))?;
        if self.alone {
            assert_eq!(self.lookup(dir, name)?, named, "lookup finds something else than was linked");
        }
        Ok(())
    }
    fn unlink(&mut self, dir: Key, name: &[u8]) -> Result<()> {
        self.vol.unlink(dir.0, name)
    }
    fn rmdir(&mut self, dir: Key, name: &[u8]) -> Result<()> {
        self.vol.rmdir(dir.0, name)
    }
    fn rename(&mut self, a: Key, n: &[u8], b: Key, m: &[u8], mode: RenameMode) -> Result<()> {
        self.vol.rename(a.0, n, b.0, m, mode)
    }
    fn readlink(&mut self, id: Key) -> Result<Vec<u8>> {
        self.vol.readlink(id.0)
    }
    fn readdir(&mut self, dir: Key) -> Result<BTreeSet<Vec<u8>>> {
        if !self.alone {
            return names(self.vol, dir.0);
        }
        let (entries, _) = listing(self.vol, dir.0, 1)?;
        for (name, e) in &entries {
            let a = self.vol.lookup(dir.0, name)?;
            assert!(e.names(&a), "readdir gives {e:?}, lookup {a:?}");
        }
        self.vol.readdir_plus(dir.0, 0, &mut |e, a| {
            let told = a.map(|a| self.vol.getattr(a.ino).is_ok_and(|now| now == *a && Entry::of(&e).names(a)));
            assert_ne!(told, Some(false), "readdir_plus gives {e:?} with {a:?}");
            true
        })?;
        Ok(entries.into_keys().collect())
    }
    fn open(&mut self, id: Key) -> Result<Self::File> {
        self.vol.open(id.0).map(|f| (f, id.1))
    }
    fn close(&mut self, file: Self::File) {
        drop(file);
    }
    fn read(&mut self, file: &Self::File, off: u64, len: usize) -> Result<Vec<u8>> {
        let mut buf = vec![0xa5; len];
        let n = self.vol.read(&file.0, off, &mut buf)?;
        buf.truncate(n);
        Ok(buf)
    }
    fn write(&mut self, file: &Self::File, off: u64, data: &[u8]) -> Result<usize> {
        self.vol.write(&file.0, off, data)
    }
    fn append(&mut self, file: &Self::File, data: &[u8]) -> Result<u64> {
        self.vol.append(&file.0, data)
    }
    fn write_back(&mut self, file: &Self::File, off: u64, data: &[u8]) -> Result<usize> {
        self.vol.write_accepted_keeping_times(&file.0, off, data)
    }
    fn fallocate(&mut self, file: &Self::File, mode: FallocMode, off: u64, len: u64) -> Result<()> {
        self.vol.fallocate(&file.0, mode, off, len)
    }
    fn seek(&mut self, file: &Self::File, off: u64, hole: bool) -> Result<u64> {
        self.vol.seek(&file.0, off, hole)
    }
    fn copy_range(&mut self, a: &Self::File, off: u64, b: &Self::File, to: u64, len: u64) -> Result<u64> {
        self.vol.copy_range(&a.0, off, &b.0, to, len)
    }
    fn setattr(&mut self, id: Key, set: &SetAttr) -> Result<()> {
        self.vol.setattr(id.0, set).and_then(|a| self.returned("setattr", a)).map(drop)
    }
    fn set_beside(&mut self, id: Key, set: &SetAttr) -> Result<()> {
        match self.vol.setattr_beside(id.0, |generation| generation == id.1, set)? {
            Some(a) => self.returned("setattr_beside", a).map(drop),
            None => self.setattr(id, set),
        }
    }
    fn setxattr(&mut self, id: Key, name: &[u8], value: &[u8], mode: XattrMode) -> Result<()> {
        self.vol.setxattr(id.0, name, value, mode)
    }
    fn getxattr(&mut self, id: Key, name: &[u8]) -> Result<Vec<u8>> {
        self.vol.getxattr(id.0, name)
    }
    fn listxattr(&mut self, id: Key) -> Result<BTreeSet<Vec<u8>>> {
        Ok(self.vol.listxattr(id.0)?.into_iter().filter(|n| !n.starts_with(b"braidfs.")).collect())
    }
    fn removexattr(&mut self, id: Key, name: &[u8]) -> Result<()> {
        self.vol.removexattr(id.0, name)
    }
    fn fsync(&mut self, id: Key, data_only: bool) -> Result<()> {
        if data_only {
            // of several files, none of which may wait: the same but for that
            return self.vol.fsync_files(&[(id.0, true)]).pop().unwrap_or(Ok(()));
        }
        self.vol.fsync(id.0, false)
    }
    fn fsync_as(&mut self, id: Key, data_only: bool, way: SyncWay) -> Result<()> {
        match way {
            SyncWay::Alone => self.vol.fsync(id.0, data_only),
            SyncWay::Together => self.vol.fsync_files(&[(id.0, data_only)]).pop().unwrap_or(Ok(())),
        }
    }
    fn sync(&mut self) -> Result<()> {
        self.vol.sync()
    }
    fn trim(&mut self) -> Result<()> {
        self.vol.trim(0..u64::MAX, 0).map(drop)
    }
    fn clean(&mut self) -> Result<()> {
        self.vol.clean(1).map(drop)
    }
    fn defragment(&mut self, file: &Self::File, commit: bool) -> Result<()> {
        let ino = file.0.ino();
        let done =
            if commit { self.vol.defragment(ino, 0).map(drop) } else { self.vol.defragment_uncommitted(ino).map(drop) };
        if matches!(done, Err(Error::NoSpace)) { Ok(()) } else { done }
    }
    fn commit(&mut self, id: Key, checkpoint: bool) -> Result<()> {
        self.vol.commit_domain(self.vol.domain_of(id.0)?, checkpoint)
    }
}
