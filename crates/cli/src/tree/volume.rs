//! A volume's file tree, as the administrator who holds its devices sees it: no permission is asked.

use super::{Meta, Res, Sink, Source, Tree};
use crate::failure::Failure;
use crate::open;
use crate::text;
use braidfs::namespace::paths::OpenHow;
use braidfs::{Attr, Cred, Error, FileKind, NewNode, NodeId, OpenFile, SetAttr, SetTime, Timestamp, Volume};
use std::path::Path;
use std::sync::Arc;

/// An open volume and what it is called in messages.
pub struct VolumeTree {
    /// The volume.
    pub volume: Volume,
    device: String,
    cred: Cred,
}

/// One entry of a directory.
pub struct Entry {
    /// Its name.
    pub name: Vec<u8>,
    /// What `stat` tells of it; of `.` and `..` too.
    pub attr: Attr,
}

impl VolumeTree {
    /// Opens the volume on `device` (see [`open::expand`]).
    ///
    /// # Errors
    /// As [`open::volume`].
    pub fn open(device: &Path, write: bool) -> Result<Self, Failure> {
        let volume = open::volume(&[device.to_path_buf()], write)?;
        // New files belong to who runs the command; every file may be touched.
        let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
        let cred = Cred { uid, gid, groups: Arc::new([]), privileged: true };
        Ok(Self { volume, device: device.display().to_string(), cred })
    }

    /// See [`open::close`].
    ///
    /// # Errors
    /// See there.
    pub fn close(self) -> Result<(), Failure> {
        open::close(self.volume)
    }

    /// Attributes of a path.
    ///
    /// # Errors
    /// Of the volume.
    pub fn attr(&self, path: &[u8], follow: bool) -> braidfs::Result<Attr> {
        match relative(path) {
            [] => self.volume.getattr(NodeId::ROOT),
            path => self.volume.resolve(path, follow, &self.cred),
        }
    }

    /// The directory and the name in it that `path` names.
    ///
    /// # Errors
    /// Of the volume; the root and `..` are no entries.
    pub fn parent<'p>(&self, path: &'p [u8]) -> braidfs::Result<(NodeId, &'p [u8])> {
        if text::base_name(path).is_empty() {
            return Err(Error::Invalid("this path names no entry of a directory"));
        }
        self.volume.resolve_parent(relative(path), &self.cred)
    }

    /// Makes a directory.
    ///
    /// # Errors
    /// Of the volume.
    pub fn mkdir(&self, path: &[u8], mode: u32) -> braidfs::Result<()> {
        let (dir, name) = self.parent(path)?;
        self.node(dir, name, FileKind::Dir, mode, 0, b"").map(drop)
    }

    /// All entries of a directory, `.` and `..` too, in the order of the directory.
    ///
    /// # Errors
    /// Of the volume.
    pub fn entries(&self, dir: NodeId) -> braidfs::Result<Vec<Entry>> {
        let mut found = Vec::new();
        let mut dots = Vec::new();
        self.volume.readdir_plus(dir, 0, &mut |e, attr| {
            match attr {
                Some(attr) => found.push(Entry { name: e.name.to_vec(), attr: *attr }),
                None => dots.push((e.name.to_vec(), e.ino)),
            }
            true
        })?;
        let mut all = Vec::with_capacity(dots.len() + found.len());
        for (name, ino) in dots {
            all.push(Entry { name, attr: self.volume.getattr(ino)? });
        }
        all.append(&mut found);
        Ok(all)
    }

    /// Opens a file by its path.
    ///
    /// # Errors
    /// Of the volume; a directory is none.
    pub fn open_file(&self, path: &[u8]) -> braidfs::Result<OpenFile> {
        let attr = self.attr(path, true)?;
        match attr.kind() {
            FileKind::Dir => Err(Error::IsDir),
            FileKind::File => self.volume.open(attr.ino),
            _ => Err(Error::Invalid("not a regular file")),
        }
    }

    fn node(
        &self,
        dir: NodeId,
        name: &[u8],
        kind: FileKind,
        mode: u32,
        rdev: u64,
        target: &[u8],
    ) -> braidfs::Result<Attr> {
        self.volume.create(dir, name, &NewNode { kind, mode, umask: 0, rdev, target }, &self.cred)
    }
}

/// The volume takes paths relative to its root.
fn relative(path: &[u8]) -> &[u8] {
    let start = path.iter().position(|&b| b != b'/').unwrap_or(path.len());
    let end = path.iter().rposition(|&b| b != b'/').map_or(start, |i| i + 1);
    &path[start..end]
}

fn reason(e: Error) -> String {
    e.to_string()
}

impl Tree for VolumeTree {
    fn stat(&self, path: &[u8], follow: bool) -> Res<Option<Meta>> {
        match self.attr(path, follow) {
            Ok(a) => Ok(Some(Meta {
                kind: a.kind(),
                mode: a.mode & 0o7777,
                uid: a.uid,
                gid: a.gid,
                size: a.size,
                atime: a.atime,
                mtime: a.mtime,
                rdev: a.rdev,
                id: (0, a.ino.0),
            })),
            Err(Error::NotFound) => Ok(None),
            Err(e) => Err(reason(e)),
        }
    }

    fn list(&self, path: &[u8]) -> Res<Vec<Vec<u8>>> {
        let dir = self.attr(path, true).map_err(reason)?;
        let mut names = Vec::new();
        self.volume
            .readdir(dir.ino, 0, &mut |e| {
                if e.name != b"." && e.name != b".." {
                    names.push(e.name.to_vec());
                }
                true
            })
            .map_err(reason)?;
        Ok(names)
    }

    fn read_link(&self, path: &[u8]) -> Res<Vec<u8>> {
        let attr = self.attr(path, false).map_err(reason)?;
        self.volume.readlink(attr.ino).map_err(reason)
    }

    fn open(&self, path: &[u8]) -> Res<Box<dyn Source + '_>> {
        let file = self.open_file(path).map_err(reason)?;
        Ok(Box::new(VolumeFile { volume: &self.volume, file }))
    }

    fn create(&self, path: &[u8], mode: u32) -> Res<Box<dyn Sink + '_>> {
        let how = OpenHow { write: true, create: true, truncate: true, no_follow: true, mode, ..OpenHow::default() };
        let file = self.volume.open_path(relative(path), how, &self.cred).map_err(reason)?;
        Ok(Box::new(VolumeFile { volume: &self.volume, file }))
    }

    fn make_dir(&self, path: &[u8], mode: u32) -> Res<()> {
        self.mkdir(path, mode).map_err(reason)
    }

    fn make_link(&self, path: &[u8], target: &[u8]) -> Res<()> {
        let (dir, name) = self.parent(path).map_err(reason)?;
        self.node(dir, name, FileKind::Symlink, 0o777, 0, target).map(drop).map_err(reason)
    }

    fn make_special(&self, path: &[u8], meta: &Meta, mode: u32) -> Res<()> {
        let (dir, name) = self.parent(path).map_err(reason)?;
        self.node(dir, name, meta.kind, mode, meta.rdev, b"").map(drop).map_err(reason)
    }

    fn remove(&self, path: &[u8]) -> Res<()> {
        let (dir, name) = self.parent(path).map_err(reason)?;
        self.volume.unlink(dir, name).map_err(reason)
    }

    fn set_meta(&self, path: &[u8], meta: &Meta) -> Res<()> {
        let at = |t: Timestamp| Some(SetTime::At(t));
        let set = SetAttr {
            mode: (meta.kind != FileKind::Symlink).then_some(meta.mode),
            uid: Some(meta.uid),
            gid: Some(meta.gid),
            atime: at(meta.atime),
            mtime: at(meta.mtime),
            ..SetAttr::default()
        };
        let attr = self.attr(path, false).map_err(reason)?;
        self.volume.setattr(attr.ino, &set).map(drop).map_err(reason)
    }

    fn show(&self, path: &[u8]) -> String {
        format!("{}:/{}", self.device, text::name(relative(path)))
    }
}

struct VolumeFile<'v> {
    volume: &'v Volume,
    file: OpenFile,
}

impl Source for VolumeFile<'_> {
    fn read(&self, offset: u64, buf: &mut [u8]) -> Res<usize> {
        self.volume.read(&self.file, offset, buf).map_err(reason)
    }

    fn data(&self, offset: u64) -> Res<Option<(u64, u64)>> {
        let start = match self.volume.seek(&self.file, offset, false) {
            Ok(start) => start,
            Err(Error::NoData) => return Ok(None),
            Err(e) => return Err(reason(e)),
        };
        Ok(Some((start, self.volume.seek(&self.file, start, true).map_err(reason)?)))
    }
}

impl Sink for VolumeFile<'_> {
    fn write(&mut self, offset: u64, data: &[u8]) -> Res<()> {
        let mut done = 0;
        while done < data.len() {
            match self.volume.write(&self.file, offset + done as u64, &data[done..]) {
                Ok(0) => return Err(format!("wrote {done} of {} bytes", data.len())),
                // the last blocks of a volume; the next write says that it is full
                Ok(n) => done += n,
                Err(e) => return Err(reason(e)),
            }
        }
        Ok(())
    }

    fn set_size(&mut self, size: u64) -> Res<()> {
        let set = SetAttr { size: Some(size), ..SetAttr::default() };
        self.volume.setattr(self.file.ino(), &set).map(drop).map_err(reason)
    }
}

#[cfg(test)]
mod tests {
    use super::relative;

    #[test]
    fn paths_become_relative() {
        for (path, want) in [("/a/b/", "a/b"), ("//a", "a"), ("/", ""), ("", ""), ("a", "a")] {
            assert_eq!(relative(path.as_bytes()), want.as_bytes());
        }
    }
}
