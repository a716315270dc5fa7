//! Path-level operations that check a [`Cred`]. Paths are bytes, relative to the root of the volume, `/`-separated.

use super::asker::{Asker, READ, SEARCH, WRITE};
use super::lookup::is_named;
use crate::attributes::acl;
use crate::cell::Cell;
use crate::cell::cache::{CellRef, HazardRef};
use crate::cell::dentries::{Key, Target};
use crate::cell::opened::OpenCell;
use crate::error::{Error, Result};
use crate::planted::sharing::{Place, share};
use crate::types::*;
use crate::volume::{OpenFile, Volume};
use braidfs_format::inode::{APPEND, IMMUTABLE};
use std::borrow::Cow;
use std::sync::Arc;

/// Symlinks followed on one path.
const SYMLINKS_MAX: u32 = 40;
/// Longest path, bytes.
const PATH_MAX: usize = 4096;

/// How to open a path. A literal ends in `..OpenHow::default()`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OpenHow {
    /// O_RDONLY or O_RDWR.
    pub read: bool,
    /// O_WRONLY or O_RDWR.
    pub write: bool,
    /// O_APPEND, with `write`: it is written by [`Volume::append`] alone. So is an append-only file.
    pub append: bool,
    /// Make the file where there is none (O_CREAT).
    pub create: bool,
    /// Fail where there is one (O_EXCL, with `create`).
    pub exclusive: bool,
    /// Cut it to no bytes (O_TRUNC).
    pub truncate: bool,
    /// Fail where the last part of the path is a symbolic link (O_NOFOLLOW).
    pub no_follow: bool,
    /// Permissions of a new file. In a set-group-ID directory whose group the maker is not of, one that its group may execute gets
    /// no set-group-ID, unless the maker may do all.
    pub mode: u32,
    /// Permissions that a new file does not get, but where the directory has a default ACL: that takes the place of it.
    pub umask: u32,
    /// Not for you to name: a literal ends in `..Default::default()`, so that an option that comes breaks nobody.
    #[doc(hidden)]
    pub later: (),
}

const ROOT: &str = "the path names the root directory";

impl Volume {
    /// # Errors
    /// [`Error::Access`] where `cred` may not do `want` with the inode.
    fn permit_cell(&self, c: &Cell, cred: &Cred, want: u32) -> Result<()> {
        Asker::of(cred).check_early(c, want)
    }

    /// Walks a path by names looked up lately alone, writing to no memory that threads share but locks of directories that
    /// few read. `None` where that does not lead to its end: past a symlink or `..`, or where `cred` may not go on.
    fn quick(&self, path: &[u8], cred: &Cred) -> Option<Target> {
        let i = self.mounted();
        if path.len() > PATH_MAX {
            return None;
        }
        let mut at = Target { node: InodeNo::ROOT, generation: *i.root_generation.get()?, kind: FileKind::Dir };
        let (mut part, mut rest) = next_part(path);
        while !part.is_empty() {
            if !cred.privileged {
                let dir = i.look(at.node).filter(|c| c.is(at.inode()))?;
                if !acl::allows(&dir.state.read(), cred, SEARCH) {
                    return None;
                }
            }
            let key = Key::of(at.node, at.generation, part);
            let dir = at.node;
            at = i.dentries.get(&key)?;
            if key.is_hashed() {
                i.look(at.node).filter(|c| c.is(at.inode()) && is_named(c, &key, dir, part))?;
            }
            (part, rest) = next_part(rest);
        }
        (at.kind == FileKind::Dir || !path.ends_with(b"/")).then_some(at)
    }

    /// [`Self::quick`] to an inode that is in memory and no symlink.
    fn quick_look(&self, path: &[u8], cred: &Cred) -> Option<HazardRef<'_>> {
        let t = self.quick(path, cred).filter(|t| t.kind != FileKind::Symlink)?;
        self.mounted().look(t.node).filter(|c| c.is(t.inode()))
    }

    /// [`Self::quick`] to an inode that is no symlink, also where it has to be loaded.
    fn quick_seen(&self, path: &[u8], cred: &Cred) -> Option<CellRef<'_>> {
        let t = self.quick(path, cred).filter(|t| t.kind != FileKind::Symlink)?;
        let i = self.mounted();
        match i.look(t.node) {
            Some(c) => c.is(t.inode()).then_some(CellRef::Published(c)),
            None => i.find(t.node).ok().flatten().filter(|c| c.is(t.inode())).map(CellRef::Loaded),
        }
    }

    /// [`Self::quick_seen`] for longer.
    fn quick_cell(&self, path: &[u8], cred: &Cred) -> Option<Arc<Cell>> {
        self.quick_seen(path, cred).map(|c| c.arc())
    }

    /// Walks to the last part of a path. Symlinks at the end are followed where `follow`.
    fn walk<'p>(&self, path: &'p [u8], follow: bool, cred: &Cred) -> Result<Walked<'p>> {
        if path.len() > PATH_MAX {
            return Err(Error::NameTooLong);
        }
        let look = follow || path.ends_with(b"/");
        let root = self.mounted().dir_cell(InodeNo::ROOT)?;
        self.mounted().root_generation.get_or_init(|| root.generation);
        let mut slash = path.ends_with(b"/");
        let (mut at, mut todo) = match self.steps(root, path, look, cred)? {
            Step::Done { dir, name, found } => return Ok(Walked { dir, name: Cow::Borrowed(name), found, slash }),
            Step::Link { dir, path, slash: more } => {
                slash |= more;
                (dir, path)
            }
        };
        // the first symlink is behind us
        for _ in 1..=SYMLINKS_MAX {
            if todo.starts_with(b"/") {
                at = self.mounted().dir_cell(InodeNo::ROOT)?;
            }
            let (dir, path) = match self.steps(at, &todo, look, cred)? {
                Step::Done { dir, name, found } => {
                    return Ok(Walked { dir, name: Cow::Owned(name.to_vec()), found, slash });
                }
                Step::Link { dir, path, slash: more } => {
                    slash |= more;
                    (dir, path)
                }
            };
            (at, todo) = (dir, path);
        }
        Err(Error::Loop)
    }

    /// Goes on from `at` to the last part of `path` or to the first symlink. The last part is looked up where `look`.
    fn steps<'p>(&self, mut at: Arc<Cell>, path: &'p [u8], look: bool, cred: &Cred) -> Result<Step<'p>> {
        let (mut part, mut rest) = next_part(path);
        if part.is_empty() {
            return Ok(Step::Done { dir: at, name: b".", found: None });
        }
        loop {
            self.permit_cell(&at, cred, SEARCH)?;
            let (next, after) = next_part(rest);
            let last = next.is_empty();
            if last && !look {
                return Ok(Step::Done { dir: at, name: part, found: None });
            }
            let c = match self.mounted().find_in(&at, part)? {
                Some(c) => c,
                None if last => return Ok(Step::Done { dir: at, name: part, found: None }),
                None => return Err(Error::NotFound),
            };
            if c.kind == FileKind::Symlink {
                let mut path = self.readlink(c.ino)?;
                let slash = last && path.ends_with(b"/");
                path.push(b'/');
                path.extend_from_slice(rest);
                return Ok(Step::Link { dir: at, path, slash });
            }
            if last {
                return Ok(Step::Done { dir: at, name: part, found: Some(c) });
            }
            if c.kind != FileKind::Dir {
                return Err(Error::NotDir);
            }
            (at, part, rest) = (c, next, after);
        }
    }

    /// Walks a path. `follow`: also a symlink at its end.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::NotDir`], [`Error::Access`], [`Error::Loop`].
    pub fn resolve(&self, path: &[u8], follow: bool, cred: &Cred) -> Result<Attr> {
        if let Some(t) = self.quick(path, cred)
            && !(follow && t.kind == FileKind::Symlink)
            && let Some(c) = self.mounted().look(t.node).filter(|c| c.is(t.inode()))
        {
            let st = c.state.read();
            if !st.deleted {
                return Ok(c.attr(&st));
            }
        }
        let c = self.resolve_cell(path, follow, cred)?;
        let st = c.state.read();
        Ok(c.attr(&st))
    }

    fn resolve_cell(&self, path: &[u8], follow: bool, cred: &Cred) -> Result<Arc<Cell>> {
        let w = self.walk(path, follow, cred)?;
        let c = match w.found {
            Some(c) => c,
            None => self.mounted().lookup_in(&w.dir, &w.name)?,
        };
        if w.slash && c.kind != FileKind::Dir {
            return Err(Error::NotDir);
        }
        Ok(c)
    }

    /// Walks to the parent directory of a path and gives it with the last name. The directory may be removed, and another
    /// get its number, before the caller comes to use it: the operations on paths below do not go this way.
    ///
    /// # Errors
    /// As [`Self::resolve`]; [`Error::Invalid`] where the path names the root.
    pub fn resolve_parent<'p>(&self, path: &'p [u8], cred: &Cred) -> Result<(InodeNo, &'p [u8])> {
        self.parent_cell(path, cred).map(|(dir, name)| (dir.ino, name))
    }

    /// [`Self::resolve_parent`] to the directory itself, whose cell tells when it is gone.
    pub(super) fn parent_cell<'p>(&self, path: &'p [u8], cred: &Cred) -> Result<(Arc<Cell>, &'p [u8])> {
        self.parent_seen(path, cred).map(|(dir, name)| (dir.arc(), name))
    }

    /// [`Self::parent_cell`], to be looked at.
    fn parent_seen<'p>(&self, path: &'p [u8], cred: &Cred) -> Result<(CellRef<'_>, &'p [u8])> {
        if path.len() > PATH_MAX {
            return Err(Error::NameTooLong);
        }
        let trimmed = &path[..path.len() - path.iter().rev().take_while(|b| **b == b'/').count()];
        let at = trimmed.iter().rposition(|b| *b == b'/').map_or(0, |i| i + 1);
        let name = &trimmed[at..];
        if name.is_empty() {
            return Err(Error::Invalid(ROOT));
        }
        if let Some(dir) = self.quick_seen(&trimmed[..at], cred)
            && dir.kind == FileKind::Dir
            && self.permit_cell(&dir, cred, SEARCH).is_ok()
        {
            return Ok((dir, name));
        }
        let dir = self.resolve_cell(&trimmed[..at], true, cred)?;
        if dir.kind != FileKind::Dir {
            return Err(Error::NotDir);
        }
        self.permit_cell(&dir, cred, SEARCH)?;
        Ok((CellRef::Loaded(dir), name))
    }

    /// Opens or creates a file.
    ///
    /// # Errors
    /// As `open(2)`.
    pub fn open_path(&self, path: &[u8], how: OpenHow, cred: &Cred) -> Result<OpenFile> {
        share(Place::Open);
        if how.create && path.ends_with(b"/") {
            // no file is made by such a path, nor opened, whatever is there
            self.parent_seen(path, cred).map_err(|e| of_no_name(path, e, |_| Error::IsDir))?;
            return Err(Error::IsDir);
        }
        let fresh = how.create && how.exclusive;
        // of a path that is too long the walk tells
        if fresh {
            let (above, name) = path.split_at(path.iter().rposition(|b| *b == b'/').map_or(0, |i| i + 1));
            if path.len() <= PATH_MAX
                && !matches!(name, b"" | b"." | b"..")
                && let Some(dir) = self.quick_seen(above, cred)
                && self.permit_cell(&dir, cred, WRITE | SEARCH).is_ok()
            {
                return self.create_open(&dir, || dir.arc(), name, (how.mode, how.umask), cred);
            }
        } else if let Some(c) = self.quick_look(path, cred)
            && let Some(f) = self.open_found(&c, || OpenCell::of_ref(&c), how, cred)?
        {
            return Ok(f);
        }
        loop {
            if let Some(f) = self.open_walked(self.walk(path, !(how.no_follow || fresh), cred)?, how, cred)? {
                return Ok(f);
            }
            // its name may be another's by now, or free
        }
    }

    /// Opens or creates the last part of a path; `None` where it was removed since the walk came there.
    fn open_walked(&self, mut w: Walked<'_>, how: OpenHow, cred: &Cred) -> Result<Option<OpenFile>> {
        let fresh = how.create && how.exclusive;
        if w.slash && how.create {
            return Err(Error::IsDir);
        }
        if w.slash && w.found.as_ref().is_some_and(|c| c.kind != FileKind::Dir) {
            return Err(Error::NotDir);
        }
        loop {
            let c = match w.found.take() {
                Some(c) => Some(c),
                // creating tells whether the name is there
                None if fresh && self.permit_cell(&w.dir, cred, WRITE | SEARCH).is_ok() => None,
                None => match self.mounted().find_in(&w.dir, &w.name)? {
                    None if !how.create => return Err(Error::NotFound),
                    c => c,
                },
            };
            let Some(c) = c else {
                self.permit_cell(&w.dir, cred, WRITE | SEARCH)?;
                return match self.create_open(&w.dir, || w.dir.clone(), &w.name, (how.mode, how.umask), cred) {
                    Err(Error::Exists) if !how.exclusive => continue, // somebody was faster
                    done => done.map(Some),
                };
            };
            if fresh {
                return Err(Error::Exists);
            }
            let open = self.open_found(&c, || OpenCell::counted(c.clone()), how, cred)?;
            // a directory of a failed domain that comes from the device again may name it still
            return match open {
                None if self.mounted().dom(c.domain).failed().is_some() => Err(Error::NotFound),
                open => Ok(open),
            };
        }
    }

    /// Creates and opens a file in a directory; once more where somebody has removed it before it was open. `whole`: the directory
    /// for more than a look at it.
    fn create_open(
        &self,
        dir: &Cell,
        whole: impl Fn() -> Arc<Cell>,
        name: &[u8],
        (mode, umask): (u32, u32),
        cred: &Cred,
    ) -> Result<OpenFile> {
        let i = self.mounted();
        let mode = without_foreign_group(dir, mode, cred);
        let new = NewNode { kind: FileKind::File, mode, umask, rdev: 0, target: b"" };
        i.pace_change(dir.ino);
        loop {
            let (c, _) = i.create_seen(dir, &whole, name, &new, cred)?;
            if let Some(f) = self.open_if_there(OpenCell::counted(c)) {
                return Ok(f);
            }
        }
    }

    /// Opens what a path led to; `None` where it was removed since: another one may have its name.
    fn open_found(
        &self,
        c: &Cell,
        open: impl FnOnce() -> OpenCell,
        how: OpenHow,
        cred: &Cred,
    ) -> Result<Option<OpenFile>> {
        match c.kind {
            FileKind::Symlink => return Err(Error::Loop),
            FileKind::Dir if how.write || how.create => return Err(Error::IsDir),
            _ => {}
        }
        let writes = how.write || how.truncate;
        // what is behind a pipe, a socket or a device is no part of the volume
        if writes && c.kind == FileKind::File && self.read_only() {
            return Err(Error::ReadOnly);
        }
        let flags = if writes { c.state.read().flags } else { 0 };
        if flags & IMMUTABLE != 0 {
            return Err(Error::Perm);
        }
        let want = if how.read { READ } else { 0 } | if writes { WRITE } else { 0 };
        self.permit_cell(c, cred, want)?;
        if flags & APPEND != 0 && (!how.append || how.truncate) {
            return Err(Error::Perm);
        }
        let Some(f) = self.open_if_there(open()) else { return Ok(None) };
        if how.truncate && f.cell.kind == FileKind::File {
            let cut = SetAttr { size: Some(0), kill_suid: !cred.privileged, ..SetAttr::default() };
            self.setattr(f.ino(), &cut)?;
        }
        Ok(Some(f))
    }

    fn make(&self, path: &[u8], new: &NewNode<'_>, cred: &Cred) -> Result<Attr> {
        self.make_at(path, new, cred).map_err(|e| of_no_name(path, e, |_| Error::Exists))
    }

    fn make_at(&self, path: &[u8], new: &NewNode<'_>, cred: &Cred) -> Result<Attr> {
        let (dir, name) = self.parent_cell(path, cred)?;
        if self.mounted().lookup_in(&dir, name).is_ok() {
            return Err(Error::Exists);
        }
        if path.ends_with(b"/") && new.kind != FileKind::Dir {
            return Err(Error::NotFound);
        }
        self.permit_cell(&dir, cred, WRITE | SEARCH)?;
        self.mounted().pace_change(dir.ino);
        self.mounted().create_in(&dir, name, new, cred).map(|(_, a)| a)
    }

    /// `mkdir`, with the umask 0.
    ///
    /// # Errors
    /// As `mkdir(2)`.
    pub fn mkdir_path(&self, path: &[u8], mode: u32, cred: &Cred) -> Result<Attr> {
        self.mkdir_path_with(path, mode, 0, cred)
    }

    /// `mkdir`. A default ACL of the directory above takes the place of `umask`.
    ///
    /// # Errors
    /// As `mkdir(2)`.
    pub fn mkdir_path_with(&self, path: &[u8], mode: u32, umask: u32, cred: &Cred) -> Result<Attr> {
        self.make(path, &NewNode { kind: FileKind::Dir, mode, umask, rdev: 0, target: b"" }, cred)
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
        self.remove_path(path, false, cred).map_err(|e| of_no_name(path, e, |_| Error::IsDir))
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// As `rmdir(2)`.
    pub fn rmdir_path(&self, path: &[u8], cred: &Cred) -> Result<()> {
        self.remove_path(path, true, cred).map_err(|e| {
            of_no_name(path, e, |last| match last {
                b"." => Error::Invalid("`.` is not removed by that name"),
                b".." => Error::NotEmpty,
                _ => Error::Busy(ROOT.into()),
            })
        })
    }

    fn remove_path(&self, path: &[u8], want_dir: bool, cred: &Cred) -> Result<()> {
        let i = self.mounted();
        let (dir, name) = self.parent_seen(path, cred)?;
        if !want_dir && path.ends_with(b"/") {
            let found = i.find_in(&dir.arc(), name)?.ok_or(Error::NotFound)?;
            return Err(if found.kind == FileKind::Dir { Error::IsDir } else { Error::NotDir });
        }
        i.pace_change(dir.ino);
        #[cfg(test)]
        tests::reached(tests::Place::Walked);
        i.remove_seen(&dir, || dir.arc(), name, want_dir, Asker::of(cred))
    }

    /// `rename`.
    ///
    /// # Errors
    /// As `renameat2(2)`.
    pub fn rename_path(&self, from: &[u8], to: &[u8], mode: RenameMode, cred: &Cred) -> Result<()> {
        let done = self.rename_at(from, to, mode, cred);
        [from, to].into_iter().fold(done, |done, path| {
            done.map_err(|e| of_no_name(path, e, |_| Error::Busy("the root, `.` and `..` keep their names".into())))
        })
    }

    fn rename_at(&self, from: &[u8], to: &[u8], mode: RenameMode, cred: &Cred) -> Result<()> {
        let i = self.mounted();
        let (dir, name) = self.parent_cell(from, cred)?;
        let (new_dir, new_name) = self.parent_seen(to, cred)?;
        if from.ends_with(b"/") || to.ends_with(b"/") {
            self.check_slashes((&dir, name, from), (&new_dir.arc(), new_name, to), mode)?;
        }
        i.pace_change(dir.ino);
        #[cfg(test)]
        tests::reached(tests::Place::Walked);
        i.rename_seen((dir, name), &new_dir, || new_dir.arc(), (new_name, mode), (cred, Asker::of(cred)))
    }

    /// A slash follows the name of a directory alone, or of what is to be one.
    ///
    /// # Errors
    /// [`Error::NotDir`]. What else refuses the rename comes first where it does in renameat2(2).
    fn check_slashes(
        &self,
        (dir, name, from): (&Arc<Cell>, &[u8], &[u8]),
        (new_dir, new_name, to): (&Arc<Cell>, &[u8], &[u8]),
        mode: RenameMode,
    ) -> Result<()> {
        let i = self.mounted();
        let is_dir = |c: &Arc<Cell>| c.kind == FileKind::Dir;
        if [name, new_name].iter().any(|n| matches!(*n, b"." | b"..")) {
            // refused for that
            return Ok(());
        }
        let old = i.find_in(dir, name)?.ok_or(Error::NotFound)?;
        let wrong = match mode {
            RenameMode::Exchange => {
                let new = i.find_in(new_dir, new_name)?.ok_or(Error::NotFound)?;
                to.ends_with(b"/") && !is_dir(&new)
            }
            RenameMode::NoReplace if i.find_in(new_dir, new_name)?.is_some() => return Err(Error::Exists),
            _ => to.ends_with(b"/") && !is_dir(&old),
        };
        if wrong || from.ends_with(b"/") && !is_dir(&old) { Err(Error::NotDir) } else { Ok(()) }
    }

    /// `link`.
    ///
    /// # Errors
    /// As `link(2)`.
    pub fn link_path(&self, from: &[u8], to: &[u8], cred: &Cred) -> Result<()> {
        let c = match self.quick_cell(from, cred) {
            Some(c) => c,
            None => self.resolve_cell(from, false, cred)?,
        };
        self.link_at(&c, to, cred).map_err(|e| of_no_name(to, e, |_| Error::Exists))
    }

    fn link_at(&self, c: &Arc<Cell>, to: &[u8], cred: &Cred) -> Result<()> {
        let (dir, name) = self.parent_cell(to, cred)?;
        if to.ends_with(b"/") {
            return Err(self.mounted().find_in(&dir, name)?.map_or(Error::NotFound, |_| Error::Exists));
        }
        self.mounted().pace_change(dir.ino);
        #[cfg(test)]
        tests::reached(tests::Place::Walked);
        self.mounted().link_in(c, &dir, name, Asker::of(cred)).map(|_| ())
    }
}

/// Permissions of a new file in a directory: without set-group-ID where the file would run as a group, that of the directory, that its
/// maker is not of (Linux's `mode_strip_sgid`; the umask comes after it). For who comes by numbers the kernel has done that.
fn without_foreign_group(dir: &Cell, mode: u32, cred: &Cred) -> u32 {
    const SET_GROUP: u32 = 0o2000;
    const GROUP_EXECUTES: u32 = 0o010;
    let runs_as_group = SET_GROUP | GROUP_EXECUTES;
    if mode & runs_as_group != runs_as_group || cred.privileged {
        return mode;
    }
    let st = dir.state.read();
    let foreign = st.mode & SET_GROUP != 0 && !cred.in_group(st.gid);
    if foreign { mode & !SET_GROUP } else { mode }
}

/// What Linux answers where the last part of a path is none that an entry could have: the root's, which is empty, `.` or `..`.
fn of_no_name(path: &[u8], e: Error, instead: impl FnOnce(&[u8]) -> Error) -> Error {
    let last = path.rsplit(|b| *b == b'/').find(|part| !part.is_empty()).unwrap_or_default();
    match e {
        Error::Invalid(_) if matches!(last, b"" | b"." | b"..") => instead(last),
        e => e,
    }
}

/// Where a path leads.
struct Walked<'p> {
    dir: Arc<Cell>,
    /// The last part, `.` where the path is the root.
    name: Cow<'p, [u8]>,
    /// What it names, where that was looked up.
    found: Option<Arc<Cell>>,
    /// A slash follows the last part, of the path or of a symlink at its end: it names a directory, or nothing.
    slash: bool,
}

/// How far the walk came.
enum Step<'p> {
    Done {
        dir: Arc<Cell>,
        name: &'p [u8],
        found: Option<Arc<Cell>>,
    },
    /// A symlink in `dir`: the path to go on with, from there. `slash`: it is the last part, and a slash ends it.
    Link {
        dir: Arc<Cell>,
        path: Vec<u8>,
        slash: bool,
    },
}

/// The first part of a path, empty where there is none, and what follows it.
fn next_part(path: &[u8]) -> (&[u8], &[u8]) {
    let from = path.iter().position(|b| *b != b'/').unwrap_or(path.len());
    let path = &path[from..];
    path.split_at(path.iter().position(|b| *b == b'/').unwrap_or(path.len()))
}

#[cfg(test)]
pub(super) mod tests;
