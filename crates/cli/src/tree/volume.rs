//! A volume's file tree, as the administrator who holds its devices sees it: no permission is asked.

use super::Tree;
use crate::failure::Failure;
use crate::open;
use crate::text;
use braidfs::{Attr, Cred, Error, FileKind, InodeNo, NewNode, OpenFile, Volume};
use braidfs_vfs::{Library, call};
use std::collections::HashSet;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// An open volume and what it is called in messages.
pub struct VolumeTree {
    fs: Library,
    device: String,
}

/// One entry of a directory.
pub struct Entry {
    pub name: Vec<u8>,
    /// As the entry says.
    pub ino: InodeNo,
    /// What `stat` tells of it; of `.` and `..` too. An inode that cannot be read does not hide the others.
    pub attr: braidfs::Result<Attr>,
}

impl Entry {
    /// Whether it is known to be a directory, `.` and `..` apart.
    pub fn is_dir_below(&self) -> bool {
        self.name != b"." && self.name != b".." && self.attr.as_ref().is_ok_and(|a| a.kind() == FileKind::Dir)
    }
}

impl VolumeTree {
    /// Opens the volume on `device` (see [`open::expand`]).
    ///
    /// # Errors
    /// As [`open::volume_to_walk`].
    pub fn open(device: &Path, write: bool) -> Result<Self, Failure> {
        // It can only be read by setting it; nothing makes files meanwhile.
        let umask = rustix::process::umask(rustix::fs::Mode::empty());
        rustix::process::umask(umask);
        let volume = open::volume_to_walk(&[device.to_path_buf()], write)?;
        // New files belong to who runs the command; every file may be touched.
        let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
        let cred = Cred { uid, gid, groups: Arc::new([]), privileged: true };
        Ok(Self { fs: Library { volume, cred, umask: umask.as_raw_mode() }, device: device.display().to_string() })
    }

    /// See [`open::close`].
    ///
    /// # Errors
    /// See there.
    pub fn close(self) -> Result<(), Failure> {
        open::close(self.fs.volume)
    }

    pub fn volume(&self) -> &Volume {
        &self.fs.volume
    }

    /// Attributes of a path.
    ///
    /// # Errors
    /// Of the volume.
    pub fn attr(&self, path: &[u8], follow: bool) -> braidfs::Result<Attr> {
        self.volume().resolve(relative(path), follow, &self.fs.cred)
    }

    /// The directory and the name in it that `path` names.
    ///
    /// # Errors
    /// Of the volume; the root and `..` are no entries.
    pub fn parent<'p>(&self, path: &'p [u8]) -> braidfs::Result<(InodeNo, &'p [u8])> {
        if text::base_name(path).is_empty() {
            return Err(Error::Invalid("this path names no entry of a directory"));
        }
        self.volume().resolve_parent(relative(path), &self.fs.cred)
    }

    /// Makes a directory.
    ///
    /// # Errors
    /// Of the volume.
    pub fn mkdir(&self, path: &[u8], mode: u32) -> braidfs::Result<()> {
        let (dir, name) = self.parent(path)?;
        let new = NewNode { kind: FileKind::Dir, mode, umask: 0, rdev: 0, target: b"" };
        self.volume().create(dir, name, &new, &self.fs.cred).map(drop)
    }

    /// All entries of a directory, `.` and `..` too, in the order of the directory.
    ///
    /// # Errors
    /// Of the volume.
    pub fn entries(&self, dir: InodeNo) -> braidfs::Result<Vec<Entry>> {
        let mut found = Vec::new();
        self.volume().readdir_plus(dir, 0, &mut |e, attr| {
            found.push((e.name.to_vec(), e.ino, attr.copied()));
            true
        })?;
        let entry = |(name, ino, attr): (Vec<u8>, InodeNo, Option<Attr>)| Entry {
            attr: attr.map_or_else(|| self.volume().lookup(dir, &name), Ok),
            name,
            ino,
        };
        Ok(found.into_iter().map(entry).collect())
    }

    /// Opens a file by its path.
    ///
    /// # Errors
    /// Of the volume; a directory is none.
    pub fn open_file(&self, path: &[u8]) -> braidfs::Result<OpenFile> {
        let attr = self.attr(path, true)?;
        match attr.kind() {
            FileKind::Dir => Err(Error::IsDir),
            FileKind::File => self.volume().open(attr.ino),
            _ => Err(Error::Invalid("not a regular file")),
        }
    }
}

/// Without slashes in front. One at the end says that a directory is meant.
fn relative(path: &[u8]) -> &[u8] {
    let start = path.iter().position(|&b| b != b'/').unwrap_or(path.len());
    &path[start..]
}

impl Tree for VolumeTree {
    type Fs = Library;
    fn fs(&self) -> &Library {
        &self.fs
    }
    fn trim<'p>(&self, path: &'p [u8]) -> &'p [u8] {
        relative(path)
    }
    fn show(&self, path: &[u8]) -> String {
        format!("{}:/{}", self.device, text::name(text::without_end(relative(path))))
    }
    fn way_up(&self, dir: &[u8]) -> io::Result<Vec<(u64, u64)>> {
        let mut at = call(self.attr(dir, true))?.ino;
        let (mut way, mut seen) = (Vec::new(), HashSet::new());
        // above the root is the root; directories that are damaged may lead up in a circle
        while seen.insert(at) {
            way.push((0, at.0));
            at = call(self.volume().lookup(at, b".."))?.ino;
        }
        Ok(way)
    }
    fn has_one_name_each(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::relative;

    #[test]
    fn paths_become_relative() {
        for (path, want) in [("/a/b/", "a/b/"), ("//a", "a"), ("//", ""), ("", ""), ("a", "a")] {
            assert_eq!(relative(path.as_bytes()), want.as_bytes());
        }
    }
}
