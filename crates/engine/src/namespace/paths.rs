//! Path-level operations that check a [`Cred`]. Paths are bytes, relative to the root of the volume, `/`-separated.

use super::acl;
use crate::error::{Error, Result};
use crate::types::*;
use crate::volume::{OpenFile, Volume};

/// Symlinks followed on one path.
const SYMLINKS_MAX: u32 = 40;
/// Longest path, bytes.
const PATH_MAX: usize = 4096;

const READ: u32 = 4;
const WRITE: u32 = 2;
const SEARCH: u32 = 1;

/// How to open a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OpenHow {
    /// O_RDONLY or O_RDWR.
    pub read: bool,
    /// O_WRONLY or O_RDWR.
    pub write: bool,
    /// O_CREAT.
    pub create: bool,
    /// O_EXCL.
    pub exclusive: bool,
    /// O_TRUNC.
    pub truncate: bool,
    /// O_NOFOLLOW.
    pub no_follow: bool,
    /// Permissions of a new file, umask already applied.
    pub mode: u32,
}

impl Volume {
    /// # Errors
    /// [`Error::Access`] where `cred` may not do `want` with the inode.
    fn permit(&self, ino: NodeId, cred: &Cred, want: u32) -> Result<()> {
        if cred.privileged {
            return Ok(());
        }
        let c = self.inner().cell(ino)?;
        let st = c.state.read();
        if acl::allows(&st, cred, want) { Ok(()) } else { Err(Error::Access) }
    }

    /// # Errors
    /// [`Error::Perm`] where the sticky bit keeps `cred` from removing the entry.
    fn permit_removal(&self, dir: NodeId, child: &Attr, cred: &Cred) -> Result<()> {
        self.permit(dir, cred, WRITE | SEARCH)?;
        let d = self.getattr(dir)?;
        let sticky = d.mode & 0o1000 != 0 && cred.uid != d.uid && cred.uid != child.uid;
        if sticky && !cred.privileged { Err(Error::Perm) } else { Ok(()) }
    }

    /// Walks to the directory of the last part; that part, empty where the path is the root. Symlinks at the end are
    /// followed where `follow`, and then the rest of the path is owned.
    fn walk(&self, path: &[u8], follow: bool, cred: &Cred) -> Result<(NodeId, Vec<u8>)> {
        if path.len() > PATH_MAX {
            return Err(Error::NameTooLong);
        }
        let mut todo: Vec<Vec<u8>> = parts(path);
        todo.reverse();
        let must_dir = path.ends_with(b"/");
        let (mut at, mut links) = (NodeId::ROOT, 0);
        while let Some(part) = todo.pop() {
            let last = todo.is_empty();
            self.permit(at, cred, SEARCH)?;
            if last && !follow && !must_dir {
                return Ok((at, part));
            }
            let a = match self.lookup(at, &part) {
                Ok(a) => a,
                Err(Error::NotFound) if last => return Ok((at, part)),
                Err(e) => return Err(e),
            };
            if a.kind() == FileKind::Symlink {
                links += 1;
                if links > SYMLINKS_MAX {
                    return Err(Error::Loop);
                }
                let target = self.readlink(a.ino)?;
                if target.starts_with(b"/") {
                    at = NodeId::ROOT;
                }
                let mut more = parts(&target);
                more.reverse();
                todo.extend(more);
                if todo.is_empty() {
                    return Ok((at, b".".to_vec()));
                }
                continue;
            }
            if last {
                return Ok((at, part));
            }
            if a.kind() != FileKind::Dir {
                return Err(Error::NotDir);
            }
            at = a.ino;
        }
        Ok((at, b".".to_vec()))
    }

    /// Walks a path. `follow`: also a symlink at its end.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::NotDir`], [`Error::Access`], [`Error::Loop`].
    pub fn resolve(&self, path: &[u8], follow: bool, cred: &Cred) -> Result<Attr> {
        let (dir, name) = self.walk(path, follow, cred)?;
        let a = self.lookup(dir, &name)?;
        if path.ends_with(b"/") && a.kind() != FileKind::Dir {
            return Err(Error::NotDir);
        }
        Ok(a)
    }

    /// Walks to the parent directory of a path and gives it with the last name.
    ///
    /// # Errors
    /// As [`Self::resolve`]; [`Error::Invalid`] where the path names the root.
    pub fn resolve_parent<'p>(&self, path: &'p [u8], cred: &Cred) -> Result<(NodeId, &'p [u8])> {
        let trimmed = &path[..path.len() - path.iter().rev().take_while(|b| **b == b'/').count()];
        let at = trimmed.iter().rposition(|b| *b == b'/').map_or(0, |i| i + 1);
        let name = &trimmed[at..];
        if name.is_empty() {
            return Err(Error::Invalid("the path names the root directory"));
        }
        let dir = if at == 0 { self.getattr(NodeId::ROOT)? } else { self.resolve(&trimmed[..at - 1], true, cred)? };
        if dir.kind() != FileKind::Dir {
            return Err(Error::NotDir);
        }
        self.permit(dir.ino, cred, SEARCH)?;
        Ok((dir.ino, name))
    }

    /// Opens or creates a file.
    ///
    /// # Errors
    /// As `open(2)`.
    pub fn open_path(&self, path: &[u8], how: OpenHow, cred: &Cred) -> Result<OpenFile> {
        let follow = !(how.no_follow || how.create && how.exclusive);
        let (dir, name) = self.walk(path, follow, cred)?;
        loop {
            let found = match self.lookup(dir, &name) {
                Ok(a) => Some(a),
                Err(Error::NotFound) if how.create => None,
                Err(e) => return Err(e),
            };
            let Some(a) = found else {
                self.permit(dir, cred, WRITE | SEARCH)?;
                let new = NewNode { kind: FileKind::File, mode: how.mode, umask: 0, rdev: 0, target: b"" };
                return match self.create(dir, &name, &new, cred) {
                    Ok(a) => self.open(a.ino),
                    Err(Error::Exists) if !how.exclusive => continue, // somebody was faster
                    Err(e) => Err(e),
                };
            };
            if how.create && how.exclusive {
                return Err(Error::Exists);
            }
            match a.kind() {
                FileKind::Symlink => return Err(Error::Loop),
                FileKind::Dir if how.write || how.create => return Err(Error::IsDir),
                _ => {}
            }
            let want = if how.read { READ } else { 0 } | if how.write || how.truncate { WRITE } else { 0 };
            self.permit(a.ino, cred, want)?;
            let f = self.open(a.ino)?;
            if how.truncate && a.kind() == FileKind::File && a.size > 0 {
                self.setattr(a.ino, &SetAttr { size: Some(0), kill_suid: !cred.privileged, ..SetAttr::default() })?;
            }
            return Ok(f);
        }
    }

    fn make(&self, path: &[u8], new: &NewNode<'_>, cred: &Cred) -> Result<Attr> {
        let (dir, name) = self.resolve_parent(path, cred)?;
        if self.lookup(dir, name).is_ok() {
            return Err(Error::Exists);
        }
        self.permit(dir, cred, WRITE | SEARCH)?;
        self.create(dir, name, new, cred)
    }

    /// `mkdir`.
    ///
    /// # Errors
    /// As `mkdir(2)`.
    pub fn mkdir_path(&self, path: &[u8], mode: u32, cred: &Cred) -> Result<Attr> {
        self.make(path, &NewNode { kind: FileKind::Dir, mode, umask: 0, rdev: 0, target: b"" }, cred)
    }

    /// `symlink`.
    ///
    /// # Errors
    /// As `symlink(2)`.
    pub fn symlink_path(&self, target: &[u8], path: &[u8], cred: &Cred) -> Result<Attr> {
        self.make(path, &NewNode { kind: FileKind::Symlink, mode: 0o777, umask: 0, rdev: 0, target }, cred)
    }

    /// Removes a file name.
    ///
    /// # Errors
    /// As `unlink(2)`.
    pub fn unlink_path(&self, path: &[u8], cred: &Cred) -> Result<()> {
        let (dir, name) = self.resolve_parent(path, cred)?;
        let a = self.lookup(dir, name)?;
        self.permit_removal(dir, &a, cred)?;
        self.unlink(dir, name)
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// As `rmdir(2)`.
    pub fn rmdir_path(&self, path: &[u8], cred: &Cred) -> Result<()> {
        let (dir, name) = self.resolve_parent(path, cred)?;
        let a = self.lookup(dir, name)?;
        self.permit_removal(dir, &a, cred)?;
        self.rmdir(dir, name)
    }

    /// `rename`.
    ///
    /// # Errors
    /// As `renameat2(2)`.
    pub fn rename_path(&self, from: &[u8], to: &[u8], mode: RenameMode, cred: &Cred) -> Result<()> {
        let (dir, name) = self.resolve_parent(from, cred)?;
        let (new_dir, new_name) = self.resolve_parent(to, cred)?;
        let a = self.lookup(dir, name)?;
        self.permit_removal(dir, &a, cred)?;
        self.permit(new_dir, cred, WRITE | SEARCH)?;
        if let Ok(b) = self.lookup(new_dir, new_name) {
            self.permit_removal(new_dir, &b, cred)?;
        }
        // a directory's `..` changes with its parent
        if a.kind() == FileKind::Dir && dir != new_dir {
            self.permit(a.ino, cred, WRITE)?;
        }
        self.rename(dir, name, new_dir, new_name, mode)
    }

    /// `link`.
    ///
    /// # Errors
    /// As `link(2)`.
    pub fn link_path(&self, from: &[u8], to: &[u8], cred: &Cred) -> Result<()> {
        let a = self.resolve(from, false, cred)?;
        let (dir, name) = self.resolve_parent(to, cred)?;
        self.permit(dir, cred, WRITE | SEARCH)?;
        self.link(a.ino, dir, name).map(|_| ())
    }
}

/// The parts of a path, empty ones left out.
fn parts(path: &[u8]) -> Vec<Vec<u8>> {
    path.split(|b| *b == b'/').filter(|p| !p.is_empty()).map(<[u8]>::to_vec).collect()
}
