//! The two [`Subject`]s: the model, and a mounted volume.

use crate::model::{self, Ino, Model};
use crate::ops::Subject;
use braidfs::{
    Attr, Cred, Error, FallocMode, FileKind, InodeNo, NewNode, OpenFile, RenameMode, Result, SetAttr, Timestamp,
    Volume, XattrMode,
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
    fn stat(&mut self, id: Ino) -> Result<(model::Stat, Option<Timestamp>)> {
        Ok((Model::stat(self, id)?, self.node(id).and_then(|n| n.mtime)))
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
        Model::readlink(self, id)
    }
    fn readdir(&mut self, dir: Ino) -> Result<BTreeSet<Vec<u8>>> {
        Model::readdir(self, dir)
    }
    fn open(&mut self, id: Ino) -> Result<Ino> {
        Model::open(self, id).map(|()| id)
    }
    fn close(&mut self, file: Ino) {
        Model::close(self, file);
    }
    fn read(&mut self, file: &Ino, off: u64, len: usize) -> Result<Vec<u8>> {
        Model::read(self, *file, off, len)
    }
    fn write(&mut self, file: &Ino, off: u64, data: &[u8]) -> Result<usize> {
        Model::write(self, *file, off, data)
    }
    fn append(&mut self, file: &Ino, data: &[u8]) -> Result<u64> {
        Model::append(self, *file, data)
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

/// What the model knows of an inode's attributes, and the modification time.
pub fn stat_of(a: &Attr) -> (model::Stat, Option<Timestamp>) {
    let kind = a.kind();
    let size = if matches!(kind, FileKind::File | FileKind::Symlink) { a.size } else { 0 };
    let rdev = if matches!(kind, FileKind::Char | FileKind::Block) { a.rdev } else { 0 };
    let stat = model::Stat { kind, mode: a.mode & 0o7777, uid: a.uid, gid: a.gid, rdev, nlink: a.nlink, size };
    (stat, Some(a.mtime))
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

/// A volume as a subject. Borrows: the volume can still be unmounted.
#[derive(Clone, Copy)]
pub struct OnVolume<'v>(pub &'v Volume);

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
        self.0.lookup(dir.0, name).map(|a| (a.ino, a.generation))
    }
    fn stat(&mut self, id: Key) -> Result<(model::Stat, Option<Timestamp>)> {
        self.0.getattr(id.0).map(|a| stat_of(&a))
    }
    fn create(&mut self, dir: Key, name: &[u8], new: &NewNode<'_>) -> Result<Key> {
        self.0.create(dir.0, name, new, &Cred::root()).map(|a| (a.ino, a.generation))
    }
    fn tmpfile(&mut self, dir: Key, new: &NewNode<'_>) -> Result<(Key, Self::File)> {
        self.0.tmpfile(dir.0, new, &Cred::root()).map(|(a, f)| ((a.ino, a.generation), (f, a.generation)))
    }
    fn link(&mut self, id: Key, dir: Key, name: &[u8]) -> Result<()> {
        self.0.link(id.0, dir.0, name).map(|_| ())
    }
    fn unlink(&mut self, dir: Key, name: &[u8]) -> Result<()> {
        self.0.unlink(dir.0, name)
    }
    fn rmdir(&mut self, dir: Key, name: &[u8]) -> Result<()> {
        self.0.rmdir(dir.0, name)
    }
    fn rename(&mut self, a: Key, n: &[u8], b: Key, m: &[u8], mode: RenameMode) -> Result<()> {
        self.0.rename(a.0, n, b.0, m, mode)
    }
    fn readlink(&mut self, id: Key) -> Result<Vec<u8>> {
        self.0.readlink(id.0)
    }
    fn readdir(&mut self, dir: Key) -> Result<BTreeSet<Vec<u8>>> {
        names(self.0, dir.0)
    }
    fn open(&mut self, id: Key) -> Result<Self::File> {
        self.0.open(id.0).map(|f| (f, id.1))
    }
    fn close(&mut self, file: Self::File) {
        drop(file);
    }
    fn read(&mut self, file: &Self::File, off: u64, len: usize) -> Result<Vec<u8>> {
        let mut buf = vec![0xa5; len];
        let n = self.0.read(&file.0, off, &mut buf)?;
        buf.truncate(n);
        Ok(buf)
    }
    fn write(&mut self, file: &Self::File, off: u64, data: &[u8]) -> Result<usize> {
        self.0.write(&file.0, off, data)
    }
    fn append(&mut self, file: &Self::File, data: &[u8]) -> Result<u64> {
        self.0.append(&file.0, data)
    }
    fn fallocate(&mut self, file: &Self::File, mode: FallocMode, off: u64, len: u64) -> Result<()> {
        self.0.fallocate(&file.0, mode, off, len)
    }
    fn seek(&mut self, file: &Self::File, off: u64, hole: bool) -> Result<u64> {
        self.0.seek(&file.0, off, hole)
    }
    fn copy_range(&mut self, a: &Self::File, off: u64, b: &Self::File, to: u64, len: u64) -> Result<u64> {
        self.0.copy_range(&a.0, off, &b.0, to, len)
    }
    fn setattr(&mut self, id: Key, set: &SetAttr) -> Result<()> {
        self.0.setattr(id.0, set).map(|_| ())
    }
    fn setxattr(&mut self, id: Key, name: &[u8], value: &[u8], mode: XattrMode) -> Result<()> {
        self.0.setxattr(id.0, name, value, mode)
    }
    fn getxattr(&mut self, id: Key, name: &[u8]) -> Result<Vec<u8>> {
        self.0.getxattr(id.0, name)
    }
    fn listxattr(&mut self, id: Key) -> Result<BTreeSet<Vec<u8>>> {
        Ok(self.0.listxattr(id.0)?.into_iter().filter(|n| !n.starts_with(b"braidfs.")).collect())
    }
    fn removexattr(&mut self, id: Key, name: &[u8]) -> Result<()> {
        self.0.removexattr(id.0, name)
    }
    fn fsync(&mut self, id: Key, data_only: bool) -> Result<()> {
        if data_only {
            // of several files, none of which may wait: the same but for that
            return self.0.fsync_files(&[(id.0, true)]).pop().unwrap_or(Ok(()));
        }
        self.0.fsync(id.0, false)
    }
    fn sync(&mut self) -> Result<()> {
        self.0.sync()
    }
    fn trim(&mut self) -> Result<()> {
        self.0.trim(0..u64::MAX, 0).map(drop)
    }
    fn clean(&mut self) -> Result<()> {
        self.0.clean(1).map(drop)
    }
    fn defragment(&mut self, file: &Self::File, commit: bool) -> Result<()> {
        let ino = file.0.ino();
        let done =
            if commit { self.0.defragment(ino, 0).map(drop) } else { self.0.defragment_uncommitted(ino).map(drop) };
        if matches!(done, Err(Error::NoSpace)) { Ok(()) } else { done }
    }
    fn commit(&mut self, id: Key, checkpoint: bool) -> Result<()> {
        self.0.commit_domain(self.0.domain_of(id.0)?, checkpoint)
    }
}
