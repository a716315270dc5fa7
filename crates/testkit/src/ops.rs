//! Operations as data, and how one is done on a [`Subject`]: the volume, the model, or what else wants comparing.
//!
//! An operation names its objects by path (walked with `lookup`, never following symlinks) or by the number of a slot
//! that holds an open file, so that it means something after others were taken out of the sequence: shrinking needs that.

use crate::model::{self, Model, Times};
use braidfs::format::inode::APPEND;
use braidfs::{Error, FallocMode, FileKind, NewNode, RenameMode, Result, SetAttr, SetTime, Timestamp, XattrMode};
use std::collections::BTreeSet;

/// A path from the root without a slash in front; a slash at the end or a `.` means nothing special.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct P(pub &'static str);

impl P {
    /// From a made-up string. The memory is kept for good, one copy of each path.
    pub fn new(path: &str) -> Self {
        static ALL: std::sync::Mutex<BTreeSet<&'static str>> = std::sync::Mutex::new(BTreeSet::new());
        let mut all = ALL.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(p) = all.get(path) {
            return P(p);
        }
        let p: &'static str = Box::leak(path.into());
        all.insert(p);
        P(p)
    }

    /// Directory and last name.
    pub fn split(self) -> (P, &'static str) {
        match self.0.rsplit_once('/') {
            Some((dir, name)) => (P(dir), name),
            None => (P(""), self.0),
        }
    }

    /// A name in this directory.
    pub fn join(self, name: &str) -> P {
        if self.0.is_empty() { P::new(name) } else { P::new(&format!("{}/{name}", self.0)) }
    }
}

/// A file by path or an open one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    /// By its path.
    Path(P),
    /// Open in this slot.
    Slot(u8),
}
use At::{Path, Slot};

/// Number of slots for open files.
pub const SLOTS: usize = 4;

/// An operation on a file system, as data.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // The fields are the arguments of the call of the same name.
pub enum Op {
    /// Anything with a name but symlinks.
    Create {
        path: P,
        kind: FileKind,
        mode: u32,
    },
    Symlink {
        path: P,
        target: P,
    },
    Link {
        from: P,
        to: P,
    },
    Unlink {
        path: P,
    },
    Rmdir {
        path: P,
    },
    Rename {
        from: P,
        to: P,
        mode: RenameMode,
    },
    Tmpfile {
        dir: P,
        slot: u8,
    },
    /// `linkat` of an open file.
    LinkSlot {
        slot: u8,
        to: P,
    },
    Open {
        path: P,
        slot: u8,
    },
    Close {
        slot: u8,
    },
    Write {
        at: At,
        off: u64,
        len: u32,
        seed: u32,
    },
    /// Pages of a kernel's cache, which it has accepted before: the times stay.
    WriteBack {
        at: At,
        off: u64,
        len: u32,
        seed: u32,
    },
    Append {
        at: At,
        len: u32,
        seed: u32,
    },
    Truncate {
        at: At,
        size: u64,
    },
    Fallocate {
        at: At,
        mode: FallocMode,
        off: u64,
        len: u64,
    },
    CopyRange {
        from: P,
        from_off: u64,
        to: P,
        to_off: u64,
        len: u64,
    },
    Read {
        at: At,
        off: u64,
        len: u32,
    },
    Seek {
        at: At,
        off: u64,
        hole: bool,
    },
    SetMode {
        path: P,
        mode: u32,
    },
    SetOwner {
        path: P,
        uid: u32,
        gid: u32,
    },
    SetMtime {
        path: P,
        sec: i64,
    },
    SetAtime {
        path: P,
        sec: i64,
    },
    /// Both times become now.
    Touch {
        path: P,
    },
    /// `chattr`: all flags of a file or directory, as an inode record has them.
    SetFlags {
        path: P,
        flags: u32,
    },
    /// Several attributes at once, as a kernel tells them: in memory alone where the inode is to be written anyway.
    SetAttr {
        at: At,
        set: SetAttr,
    },
    SetXattr {
        path: P,
        name: P,
        len: u32,
        seed: u32,
        mode: XattrMode,
    },
    GetXattr {
        path: P,
        name: P,
    },
    ListXattr {
        path: P,
    },
    RemoveXattr {
        path: P,
        name: P,
    },
    Stat {
        path: P,
    },
    Readlink {
        path: P,
    },
    Readdir {
        path: P,
    },
    Fsync {
        at: At,
        data_only: bool,
    },
    /// An fsync by another of the calls that do one.
    FsyncAs {
        at: At,
        data_only: bool,
        way: SyncWay,
    },
    Sync,
    /// All free space is discarded.
    Trim,
    /// The cleaner empties a segment of each domain, where there is one to empty.
    Clean,
    /// A file that lies in pieces is made whole, as far as there is room; without `commit` what moves waits for the next
    /// commit, beside which others may change the file.
    Defragment {
        at: At,
        commit: bool,
    },
    /// The domain of an inode commits by itself, as after the commit interval, and writes a checkpoint or not.
    Commit {
        path: P,
        checkpoint: bool,
    },
}

/// By which call of a volume a file is synced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyncWay {
    /// By itself.
    Alone,
    /// As one of several that are written and flushed together, none of which may wait. [`braidfs::Volume::fsync_here`] and
    /// [`braidfs::Volume::fsync_start`] do the same, on a thread that depends on how long others took.
    Together,
}

impl Op {
    /// The paths that it names.
    pub fn paths(&self) -> Vec<P> {
        match *self {
            Op::Create { path, .. }
            | Op::Symlink { path, .. }
            | Op::Unlink { path }
            | Op::Rmdir { path }
            | Op::Tmpfile { dir: path, .. }
            | Op::LinkSlot { to: path, .. }
            | Op::Open { path, .. }
            | Op::SetMode { path, .. }
            | Op::SetOwner { path, .. }
            | Op::SetMtime { path, .. }
            | Op::SetAtime { path, .. }
            | Op::Touch { path }
            | Op::SetFlags { path, .. }
            | Op::SetXattr { path, .. }
            | Op::GetXattr { path, .. }
            | Op::ListXattr { path }
            | Op::RemoveXattr { path, .. }
            | Op::Stat { path }
            | Op::Readlink { path }
            | Op::Readdir { path }
            | Op::Commit { path, .. } => vec![path],
            Op::Link { from, to } | Op::Rename { from, to, .. } | Op::CopyRange { from, to, .. } => vec![from, to],
            Op::Write { at, .. }
            | Op::WriteBack { at, .. }
            | Op::SetAttr { at, .. }
            | Op::Append { at, .. }
            | Op::Truncate { at, .. }
            | Op::Fallocate { at, .. }
            | Op::Read { at, .. }
            | Op::Seek { at, .. }
            | Op::Fsync { at, .. }
            | Op::FsyncAs { at, .. }
            | Op::Defragment { at, .. } => match at {
                Path(path) => vec![path],
                Slot(_) => Vec::new(),
            },
            Op::Close { .. } | Op::Sync | Op::Trim | Op::Clean => Vec::new(),
        }
    }
}

/// The operation as Rust code, for `tests/regressions.rs`.
pub fn to_rust(op: &Op) -> String {
    if let Op::SetAttr { at, set } = op {
        return format!("Op::SetAttr {{ at: At::{at:?}, set: {} }}", set_to_rust(set));
    }
    let text = format!("Op::{op:?}").replace("at: ", "at: At::").replace("kind: ", "kind: FileKind::");
    let mode = match op {
        Op::Rename { .. } => "mode: RenameMode::",
        Op::Fallocate { .. } => "mode: FallocMode::",
        Op::SetXattr { .. } => "mode: XattrMode::",
        _ => "mode: ",
    };
    text.replace("mode: ", mode).replace("way: ", "way: SyncWay::")
}

/// What is set, as Rust code.
fn set_to_rust(set: &SetAttr) -> String {
    let SetAttr { mode, uid, gid, size, atime, mtime, ctime, flags, kill_suid, kill_sgid, accepted, later: () } = *set;
    let numbers = [("mode", mode), ("uid", uid), ("gid", gid), ("flags", flags)];
    let mut out: String = numbers.iter().filter_map(|(name, n)| Some(format!("{name}: Some({}), ", (*n)?))).collect();
    out.extend(size.map(|n| format!("size: Some({n}), ")));
    for (name, t) in [("atime", atime), ("mtime", mtime), ("ctime", ctime)] {
        out.extend(t.map(|t| format!("{name}: Some(SetTime::{t:?}), ")));
    }
    let marks = [("kill_suid", kill_suid), ("kill_sgid", kill_sgid), ("accepted", accepted)];
    for (name, _) in marks.iter().filter(|(_, is)| *is) {
        out += &format!("{name}: true, ");
    }
    format!("SetAttr {{ {out}..SetAttr::default() }}")
}

/// Bytes that a write with this seed puts at `off`: they tell who wrote them, and where.
pub fn fill(seed: u32, off: u64, len: usize) -> Vec<u8> {
    let word = |i: u64| {
        let mut z = i.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(seed).wrapping_mul(0xd6e8_feb8_6659_fd93);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z ^ (z >> 27)
    };
    let mut out = Vec::with_capacity(len + 16);
    let mut i = off / 8;
    let skip = (off % 8) as usize;
    while out.len() < len + skip {
        out.extend_from_slice(&word(i).to_le_bytes());
        i += 1;
    }
    out.drain(..skip);
    out.truncate(len);
    out
}

/// What an operation answered.
#[derive(Clone, Debug, PartialEq)]
pub enum Out<Id> {
    /// Nothing but success.
    Unit,
    /// An object was made.
    Made(Id),
    /// A length or offset.
    Number(u64),
    /// Content of a file.
    Bytes(Vec<u8>),
    /// A set of names.
    Names(BTreeSet<Vec<u8>>),
    /// Attributes and, as far as they are known, times.
    Stat(model::Stat, Times),
}

/// Whether two subjects answered alike. Which object was made each may name as it likes; a time counts where `want`
/// knows it; errors are alike whose errno is.
pub fn same_answer<A, B>(got: &Result<Out<A>>, want: &Result<Out<B>>) -> bool {
    match (got, want) {
        (Ok(Out::Made(_)), Ok(Out::Made(_))) | (Ok(Out::Unit), Ok(Out::Unit)) => true,
        (Ok(Out::Stat(g, gt)), Ok(Out::Stat(w, wt))) => g == w && wt.differ(*gt).is_none(),
        (Ok(Out::Bytes(g)), Ok(Out::Bytes(w))) => g == w,
        (Ok(Out::Number(g)), Ok(Out::Number(w))) => g == w,
        (Ok(Out::Names(g)), Ok(Out::Names(w))) => g == w,
        (Err(g), Err(w)) => g.errno() == w.errno(),
        _ => false,
    }
}

/// A file system that [`perform`] can work on.
pub trait Subject {
    /// Names an object.
    type Id: Copy + std::fmt::Debug + PartialEq;
    /// An open file.
    type File;
    /// The root directory.
    fn root(&self) -> Self::Id;
    /// Inode of an open file.
    fn id(&self, file: &Self::File) -> Self::Id;
    /// See the method of the same name of [`braidfs::Volume`] (as all below).
    fn lookup(&mut self, dir: Self::Id, name: &[u8]) -> Result<Self::Id>;
    #[allow(missing_docs)]
    fn stat(&mut self, id: Self::Id) -> Result<(model::Stat, Times)>;
    #[allow(missing_docs)]
    fn create(&mut self, dir: Self::Id, name: &[u8], new: &NewNode<'_>) -> Result<Self::Id>;
    #[allow(missing_docs)]
    fn tmpfile(&mut self, dir: Self::Id, new: &NewNode<'_>) -> Result<(Self::Id, Self::File)>;
    #[allow(missing_docs)]
    fn link(&mut self, id: Self::Id, dir: Self::Id, name: &[u8]) -> Result<()>;
    #[allow(missing_docs)]
    fn unlink(&mut self, dir: Self::Id, name: &[u8]) -> Result<()>;
    #[allow(missing_docs)]
    fn rmdir(&mut self, dir: Self::Id, name: &[u8]) -> Result<()>;
    #[allow(missing_docs)]
    fn rename(&mut self, a: Self::Id, n: &[u8], b: Self::Id, m: &[u8], mode: RenameMode) -> Result<()>;
    #[allow(missing_docs)]
    fn readlink(&mut self, id: Self::Id) -> Result<Vec<u8>>;
    /// Names without `.` and `..`; a name given twice is an error of the subject that it panics about.
    fn readdir(&mut self, dir: Self::Id) -> Result<BTreeSet<Vec<u8>>>;
    #[allow(missing_docs)]
    fn open(&mut self, id: Self::Id) -> Result<Self::File>;
    #[allow(missing_docs)]
    fn close(&mut self, file: Self::File);
    #[allow(missing_docs)]
    fn read(&mut self, file: &Self::File, off: u64, len: usize) -> Result<Vec<u8>>;
    #[allow(missing_docs)]
    fn write(&mut self, file: &Self::File, off: u64, data: &[u8]) -> Result<usize>;
    #[allow(missing_docs)]
    fn append(&mut self, file: &Self::File, data: &[u8]) -> Result<u64>;
    /// Writes what was accepted before; the times stay. Who has no such call of its own writes as ever.
    fn write_back(&mut self, file: &Self::File, off: u64, data: &[u8]) -> Result<usize> {
        self.write(file, off, data)
    }
    #[allow(missing_docs)]
    fn fallocate(&mut self, file: &Self::File, mode: FallocMode, off: u64, len: u64) -> Result<()>;
    #[allow(missing_docs)]
    fn seek(&mut self, file: &Self::File, off: u64, hole: bool) -> Result<u64>;
    #[allow(missing_docs)]
    fn copy_range(&mut self, a: &Self::File, off: u64, b: &Self::File, to: u64, len: u64) -> Result<u64>;
    #[allow(missing_docs)]
    fn setattr(&mut self, id: Self::Id, set: &SetAttr) -> Result<()>;
    /// [`Self::setattr`], by the shorter way where that does it.
    fn set_beside(&mut self, id: Self::Id, set: &SetAttr) -> Result<()> {
        self.setattr(id, set)
    }
    #[allow(missing_docs)]
    fn setxattr(&mut self, id: Self::Id, name: &[u8], value: &[u8], mode: XattrMode) -> Result<()>;
    #[allow(missing_docs)]
    fn getxattr(&mut self, id: Self::Id, name: &[u8]) -> Result<Vec<u8>>;
    #[allow(missing_docs)]
    fn listxattr(&mut self, id: Self::Id) -> Result<BTreeSet<Vec<u8>>>;
    #[allow(missing_docs)]
    fn removexattr(&mut self, id: Self::Id, name: &[u8]) -> Result<()>;
    #[allow(missing_docs)]
    fn fsync(&mut self, id: Self::Id, data_only: bool) -> Result<()>;
    /// [`Self::fsync`] by one of the ways that there are.
    fn fsync_as(&mut self, id: Self::Id, data_only: bool, _: SyncWay) -> Result<()> {
        self.fsync(id, data_only)
    }
    #[allow(missing_docs)]
    fn sync(&mut self) -> Result<()>;
    #[allow(missing_docs)]
    fn trim(&mut self) -> Result<()>;
    #[allow(missing_docs)]
    fn clean(&mut self) -> Result<()>;
    /// Makes an open file whole, or does what comes before the commit of that. Too little room is no error.
    fn defragment(&mut self, file: &Self::File, commit: bool) -> Result<()>;
    /// Commits the inode's domain alone.
    fn commit(&mut self, id: Self::Id, checkpoint: bool) -> Result<()>;
}

/// Open files of a subject.
pub type Slots<S> = [Option<<S as Subject>::File>; SLOTS];

/// Whether Linux front ends would refuse the call before it reaches a file system: a link to an open file that was
/// unlinked.
pub fn is_refused(op: &Op, model: &Model, slots: &Slots<Model>) -> bool {
    match op {
        Op::LinkSlot { slot, .. } => slots[usize::from(*slot) % SLOTS]
            .and_then(|i| model.node(i))
            .is_some_and(|n| n.links.is_empty() && !n.linkable),
        _ => false,
    }
}

/// Walks a path.
///
/// # Errors
/// Of the lookups.
pub fn walk_path<S: Subject>(s: &mut S, path: P) -> Result<S::Id> {
    let mut at = s.root();
    for name in path.0.split('/').filter(|n| !n.is_empty()) {
        at = s.lookup(at, name.as_bytes())?;
    }
    Ok(at)
}

fn parent<S: Subject>(s: &mut S, path: P) -> Result<(S::Id, &'static [u8])> {
    let (dir, name) = path.split();
    Ok((walk_path(s, dir)?, name.as_bytes()))
}

fn open_file<S: Subject>(s: &mut S, path: P) -> Result<S::File> {
    let id = walk_path(s, path)?;
    match s.stat(id)?.0.kind {
        FileKind::File => s.open(id),
        FileKind::Dir => Err(Error::IsDir),
        _ => Err(Error::Invalid("no regular file")),
    }
}

/// With the file that `at` names: opened for the occasion, or from its slot.
fn with_file<S: Subject, T>(
    s: &mut S,
    slots: &mut Slots<S>,
    at: At,
    f: impl FnOnce(&mut S, &S::File) -> Result<T>,
) -> Result<T> {
    match at {
        Path(p) => {
            let file = open_file(s, p)?;
            let r = f(s, &file);
            s.close(file);
            r
        }
        Slot(n) => match &slots[usize::from(n) % SLOTS] {
            Some(file) => f(s, file),
            None => Err(Error::BadHandle),
        },
    }
}

/// The inode that `at` names, of any kind.
fn id_at<S: Subject>(s: &mut S, slots: &mut Slots<S>, at: At) -> Result<S::Id> {
    match at {
        Path(p) => walk_path(s, p),
        Slot(_) => with_file(s, slots, at, |s, f| Ok(s.id(f))),
    }
}

fn put<S: Subject>(s: &mut S, slots: &mut Slots<S>, slot: u8, file: S::File) {
    if let Some(old) = slots[usize::from(slot) % SLOTS].replace(file) {
        s.close(old);
    }
}

/// Linux keeps `user.*` attributes to files and directories; a front end's duty, so it is done here.
fn may_have_xattr<S: Subject>(s: &mut S, id: S::Id, name: P) -> Result<()> {
    let kind = s.stat(id)?.0.kind;
    if name.0.starts_with("user.") && !matches!(kind, FileKind::File | FileKind::Dir) {
        return Err(Error::Perm);
    }
    Ok(())
}

/// Linux opens an append-only file for appends alone, which is a front end's duty, too. Who has it open since before may
/// write.
fn may_write_at<S: Subject>(s: &mut S, at: At, file: &S::File) -> Result<()> {
    let appends = s.stat(s.id(file))?.0.flags & APPEND != 0;
    if appends && matches!(at, Path(_)) { Err(Error::Perm) } else { Ok(()) }
}

/// Does an operation.
///
/// # Errors
/// Of the subject.
pub fn perform<S: Subject>(s: &mut S, slots: &mut Slots<S>, op: &Op) -> Result<Out<S::Id>> {
    let new = |kind, mode| NewNode { kind, mode, umask: 0, rdev: 0x0103, target: b"" };
    match *op {
        Op::Create { path, kind, mode } => {
            let (dir, name) = parent(s, path)?;
            s.create(dir, name, &new(kind, mode)).map(Out::Made)
        }
        Op::Symlink { path, target } => {
            let (dir, name) = parent(s, path)?;
            let new = NewNode { target: target.0.as_bytes(), ..new(FileKind::Symlink, 0o777) };
            s.create(dir, name, &new).map(Out::Made)
        }
        Op::Link { from, to } => {
            let id = walk_path(s, from)?;
            let (dir, name) = parent(s, to)?;
            s.link(id, dir, name).map(|()| Out::Unit)
        }
        Op::Unlink { path } => {
            let (dir, name) = parent(s, path)?;
            s.unlink(dir, name).map(|()| Out::Unit)
        }
        Op::Rmdir { path } => {
            let (dir, name) = parent(s, path)?;
            s.rmdir(dir, name).map(|()| Out::Unit)
        }
        Op::Rename { from, to, mode } => {
            let (a, n) = parent(s, from)?;
            let (b, m) = parent(s, to)?;
            if !mode.leaves_whiteout() {
                return s.rename(a, n, b, m, mode).map(|()| Out::Unit);
            }
            let moved = s.lookup(a, n).ok();
            s.rename(a, n, b, m, mode)?;
            // nothing is left where both are names of one inode
            let left = s.lookup(a, n)?;
            Ok(if moved == Some(left) { Out::Unit } else { Out::Made(left) })
        }
        Op::Tmpfile { dir, slot } => {
            let dir = walk_path(s, dir)?;
            let (id, file) = s.tmpfile(dir, &new(FileKind::File, 0o600))?;
            put(s, slots, slot, file);
            Ok(Out::Made(id))
        }
        Op::LinkSlot { slot, to } => {
            let (dir, name) = parent(s, to)?;
            with_file(s, slots, Slot(slot), |s, f| s.link(s.id(f), dir, name)).map(|()| Out::Unit)
        }
        Op::Open { path, slot } => {
            let file = open_file(s, path)?;
            put(s, slots, slot, file);
            Ok(Out::Unit)
        }
        Op::Close { slot } => {
            if let Some(f) = slots[usize::from(slot) % SLOTS].take() {
                s.close(f);
            }
            Ok(Out::Unit)
        }
        Op::Write { at, off, len, seed } => with_file(s, slots, at, |s, f| {
            may_write_at(s, at, f)?;
            s.write(f, off, &fill(seed, off, len as usize)).map(|n| Out::Number(n as u64))
        }),
        // it was opened for writing before it got its flags
        Op::WriteBack { at, off, len, seed } => with_file(s, slots, at, |s, f| {
            s.write_back(f, off, &fill(seed, off, len as usize)).map(|n| Out::Number(n as u64))
        }),
        Op::Append { at, len, seed } => {
            with_file(s, slots, at, |s, f| s.append(f, &fill(seed, 0, len as usize)).map(Out::Number))
        }
        Op::Truncate { at, size } => {
            let set = SetAttr { size: Some(size), ..SetAttr::default() };
            match at {
                Path(p) => walk_path(s, p).and_then(|id| s.setattr(id, &set)),
                Slot(_) => with_file(s, slots, at, |s, f| s.setattr(s.id(f), &set)),
            }
            .map(|()| Out::Unit)
        }
        Op::Fallocate { at, mode, off, len } => {
            with_file(s, slots, at, |s, f| s.fallocate(f, mode, off, len)).map(|()| Out::Unit)
        }
        Op::CopyRange { from, from_off, to, to_off, len } => {
            with_file(s, slots, Path(from), |s, a| {
                let b = open_file(s, to)?;
                // Overlapping ranges of one file are refused by the VFS.
                let r = if s.id(a) == s.id(&b) {
                    Err(Error::Invalid("the same file"))
                } else if let Err(e) = may_write_at(s, Path(to), &b) {
                    Err(e)
                } else {
                    s.copy_range(a, from_off, &b, to_off, len)
                };
                s.close(b);
                r.map(Out::Number)
            })
        }
        Op::Read { at, off, len } => with_file(s, slots, at, |s, f| s.read(f, off, len as usize)).map(Out::Bytes),
        Op::Seek { at, off, hole } => with_file(s, slots, at, |s, f| s.seek(f, off, hole)).map(Out::Number),
        Op::SetMode { path, mode } => {
            let id = walk_path(s, path)?;
            // setuid and setgid of files are cleared by calls in ways that are the front end's to say.
            let mode = if s.stat(id)?.0.kind == FileKind::Dir { mode } else { mode & 0o1777 };
            s.setattr(id, &SetAttr { mode: Some(mode), ..SetAttr::default() }).map(|()| Out::Unit)
        }
        Op::SetOwner { path, uid, gid } => {
            let id = walk_path(s, path)?;
            s.setattr(id, &SetAttr { uid: Some(uid), gid: Some(gid), ..SetAttr::default() }).map(|()| Out::Unit)
        }
        Op::SetMtime { path, sec } => {
            let id = walk_path(s, path)?;
            let mtime = Some(SetTime::At(Timestamp { sec, nsec: 7 }));
            s.setattr(id, &SetAttr { mtime, ..SetAttr::default() }).map(|()| Out::Unit)
        }
        Op::SetAtime { path, sec } => {
            let id = walk_path(s, path)?;
            let atime = Some(SetTime::At(Timestamp { sec, nsec: 8 }));
            s.setattr(id, &SetAttr { atime, ..SetAttr::default() }).map(|()| Out::Unit)
        }
        Op::Touch { path } => {
            let id = walk_path(s, path)?;
            let now = Some(SetTime::Now);
            s.setattr(id, &SetAttr { atime: now, mtime: now, ..SetAttr::default() }).map(|()| Out::Unit)
        }
        Op::SetFlags { path, flags } => {
            let id = walk_path(s, path)?;
            if !matches!(s.stat(id)?.0.kind, FileKind::File | FileKind::Dir) {
                return Err(Error::Unsupported("flags of special files are none that a front end could set"));
            }
            s.setattr(id, &SetAttr { flags: Some(flags), ..SetAttr::default() }).map(|()| Out::Unit)
        }
        Op::SetAttr { at, ref set } => {
            let id = id_at(s, slots, at)?;
            s.set_beside(id, set).map(|()| Out::Unit)
        }
        Op::SetXattr { path, name, len, seed, mode } => {
            let id = walk_path(s, path)?;
            may_have_xattr(s, id, name)?;
            s.setxattr(id, name.0.as_bytes(), &fill(seed, 0, len as usize), mode).map(|()| Out::Unit)
        }
        Op::GetXattr { path, name } => {
            let id = walk_path(s, path)?;
            s.getxattr(id, name.0.as_bytes()).map(Out::Bytes)
        }
        Op::ListXattr { path } => {
            let id = walk_path(s, path)?;
            s.listxattr(id).map(Out::Names)
        }
        Op::RemoveXattr { path, name } => {
            let id = walk_path(s, path)?;
            may_have_xattr(s, id, name)?;
            s.removexattr(id, name.0.as_bytes()).map(|()| Out::Unit)
        }
        Op::Stat { path } => {
            let id = walk_path(s, path)?;
            s.stat(id).map(|(stat, times)| Out::Stat(stat, times))
        }
        Op::Readlink { path } => {
            let id = walk_path(s, path)?;
            s.readlink(id).map(Out::Bytes)
        }
        Op::Readdir { path } => {
            let id = walk_path(s, path)?;
            s.readdir(id).map(Out::Names)
        }
        Op::Fsync { at, data_only } => {
            let id = id_at(s, slots, at)?;
            s.fsync(id, data_only).map(|()| Out::Unit)
        }
        Op::FsyncAs { at, data_only, way } => {
            let id = id_at(s, slots, at)?;
            s.fsync_as(id, data_only, way).map(|()| Out::Unit)
        }
        Op::Sync => s.sync().map(|()| Out::Unit),
        Op::Trim => s.trim().map(|()| Out::Unit),
        Op::Clean => s.clean().map(|()| Out::Unit),
        Op::Defragment { at, commit } => with_file(s, slots, at, |s, f| s.defragment(f, commit)).map(|()| Out::Unit),
        Op::Commit { path, checkpoint } => {
            let id = walk_path(s, path)?;
            s.commit(id, checkpoint).map(|()| Out::Unit)
        }
    }
}
