//! The reference: a file system in maps, with the semantics of Linux on ext4 (`rename(2)`, `link(2)` … and the order in
//! which the VFS finds errors).
//!
//! Right because it is simple: no caching, no sharing but of content (so that snapshots are cheap). It knows no space
//! limits, no permissions (the caller is root) and no clock: it says which times an operation changes, and who has a clock
//! tells it what they are then ([`Model::learn`]).

use crate::blocks::Blocks;
use crate::sparse::Sparse;
use braidfs::format::inode::{APPEND, IMMUTABLE, NOATIME, NOCOW};
use braidfs::{
    AtimeMode, Attr, Error, FallocMode, FileKind, NewNode, RenameMode, Result, SetAttr, SetTime, Timestamp, XattrMode,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Inode number of the model. Never used twice.
pub type Ino = u64;
/// The root directory.
pub const ROOT: Ino = 1;

/// A name of an inode: directory and name in it.
pub type Link = (Ino, Vec<u8>);

/// An inode with its content and its names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// What kind of file it is.
    pub kind: FileKind,
    /// Permissions, 12 bits.
    pub mode: u32,
    /// User ID of the owner.
    pub uid: u32,
    /// ID of the owning group.
    pub gid: u32,
    /// Of device files.
    pub rdev: u64,
    /// What was set, or learned since the last operation that changed them.
    pub times: Times,
    /// Values by name.
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Content of a regular file.
    pub data: Sparse,
    /// Of a symlink.
    pub target: Vec<u8>,
    /// Of a directory.
    pub entries: BTreeMap<Vec<u8>, Ino>,
    /// Its names. A directory but the root has one.
    pub links: BTreeSet<Link>,
    /// Flags of `chattr`, as an inode record has them.
    pub flags: u32,
    /// Which pages have blocks: a crash may mix versions of what these hold where they are overwritten in place.
    pub blocks: Blocks,
    /// O_TMPFILE and never linked: may get its first name.
    pub linkable: bool,
}

/// Times of an inode, as far as they are known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Times {
    /// When the content was last read.
    pub atime: Option<Timestamp>,
    /// Last change of content.
    pub mtime: Option<Timestamp>,
    /// Last change of the inode.
    pub ctime: Option<Timestamp>,
    /// When it was made.
    pub btime: Option<Timestamp>,
}

impl Times {
    /// All that a volume tells.
    pub fn of(a: &Attr) -> Self {
        Self { atime: Some(a.atime), mtime: Some(a.mtime), ctime: Some(a.ctime), btime: Some(a.btime) }
    }

    /// Each with its name.
    fn named(self) -> [(&'static str, Option<Timestamp>); 4] {
        [("atime", self.atime), ("mtime", self.mtime), ("ctime", self.ctime), ("btime", self.btime)]
    }

    /// The first time that is known here, and is another one there.
    pub fn differ(self, got: Self) -> Option<String> {
        self.named().into_iter().zip(got.named()).find_map(|((name, want), (_, got))| {
            want.filter(|w| got != Some(*w)).map(|w| format!("{name} {got:?}, model {w:?}"))
        })
    }

    /// Makes those of the last changes unknown.
    pub fn forget_changes(&mut self) {
        (self.mtime, self.ctime) = (None, None);
    }

    /// Those that are not known here get to be known from `now`.
    fn fill(&mut self, now: Self) {
        self.atime = self.atime.or(now.atime);
        self.mtime = self.mtime.or(now.mtime);
        self.ctime = self.ctime.or(now.ctime);
        self.btime = self.btime.or(now.btime);
    }

    /// Whether none is unknown.
    fn all_known(self) -> bool {
        self.named().iter().all(|(_, t)| t.is_some())
    }
}

/// What `stat` tells and the model knows.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Stat {
    /// What kind of file it is.
    pub kind: FileKind,
    /// Permissions, 12 bits.
    pub mode: u32,
    /// User ID of the owner.
    pub uid: u32,
    /// ID of the owning group.
    pub gid: u32,
    /// Of device files, else 0.
    pub rdev: u64,
    /// Links; of a directory 2 + its subdirectories.
    pub nlink: u32,
    /// Bytes; 0 for what has no size of its own (directories).
    pub size: u64,
    /// Flags of `chattr`.
    pub flags: u32,
}

/// The file system. Cloning is cheap enough to do it after every operation.
#[derive(Clone, Debug)]
pub struct Model {
    nodes: BTreeMap<Ino, Arc<Node>>,
    open: BTreeMap<Ino, u32>,
    next: Ino,
    /// When a read renews the access time.
    pub atime: AtimeMode,
    /// Seconds of the clock, for that.
    pub second: i64,
}

/// `relatime` renews an access time that is older than a day, in seconds.
const RELATIME_AGE: i64 = 24 * 3600;

fn new_node(kind: FileKind, mode: u32) -> Node {
    Node {
        kind,
        mode,
        uid: 0,
        gid: 0,
        rdev: 0,
        times: Times::default(),
        xattrs: BTreeMap::new(),
        data: Sparse::default(),
        target: Vec::new(),
        entries: BTreeMap::new(),
        links: BTreeSet::new(),
        flags: 0,
        blocks: Blocks::default(),
        linkable: false,
    }
}

impl Node {
    /// Whether its blocks are overwritten in place, so that a crash may mix versions of its content: by `chattr +C`, or
    /// since `fallocate` has reserved some.
    pub fn in_place(&self) -> bool {
        self.kind == FileKind::File && self.flags & NOCOW != 0
    }

    /// # Errors
    /// Of what is immutable, or append-only: nothing of it changes, nor loses it a name or gives one away.
    fn changeable(&self) -> Result<()> {
        if self.is_guarded() { Err(Error::Perm) } else { Ok(()) }
    }

    /// Whether a flag refuses changes.
    pub fn is_guarded(&self) -> bool {
        self.flags & (IMMUTABLE | APPEND) != 0
    }

    /// # Errors
    /// Of what is immutable. An append-only directory takes names, and an append-only file that is open is written to:
    /// whether it may be opened so is the front end's to say.
    fn grows(&self) -> Result<()> {
        if self.flags & IMMUTABLE != 0 { Err(Error::Perm) } else { Ok(()) }
    }

    /// By an operation: the inode changes.
    fn changes(&mut self) {
        self.times.ctime = None;
    }

    /// By an operation: the content changes.
    fn content_changes(&mut self) {
        self.times.forget_changes();
    }
}

impl Default for Model {
    fn default() -> Self {
        let root = Arc::new(new_node(FileKind::Dir, 0o755));
        Self {
            nodes: BTreeMap::from([(ROOT, root)]),
            open: BTreeMap::new(),
            next: ROOT + 1,
            atime: AtimeMode::Noatime,
            second: 0,
        }
    }
}

impl Model {
    /// From inodes that are known (a walk of a recovered volume). `nodes` must hold [`ROOT`].
    pub fn from_nodes(nodes: BTreeMap<Ino, Node>) -> Self {
        let next = nodes.keys().next_back().map_or(ROOT, |i| *i) + 1;
        let nodes = nodes.into_iter().map(|(i, n)| (i, Arc::new(n))).collect();
        Self { nodes, next, ..Self::default() }
    }

    /// Makes the times of changes of directories unknown.
    pub fn forget_dir_times(&mut self) {
        for n in self.nodes.values_mut().filter(|n| n.kind == FileKind::Dir) {
            Arc::make_mut(n).content_changes();
        }
    }

    /// Times that the last operation changed, and that nobody has told since: gets them from who knows them.
    ///
    /// # Errors
    /// Of `tell`; what a time is that the operation cannot have made, by `may`.
    pub fn learn(
        &mut self,
        tell: &mut dyn FnMut(Ino) -> std::result::Result<Times, String>,
        may: &dyn Fn(Timestamp) -> bool,
    ) -> std::result::Result<(), String> {
        for (ino, n) in self.nodes.iter_mut().filter(|(_, n)| !n.times.all_known()) {
            let now = tell(*ino)?;
            for ((name, known), (_, t)) in n.times.named().into_iter().zip(now.named()) {
                if let Some(t) = t.filter(|t| known.is_none() && !may(*t)) {
                    return Err(format!(
                        "inode {ino} of the model: {name} {t:?} is not of an operation that changes it"
                    ));
                }
            }
            Arc::make_mut(n).times.fill(now);
        }
        Ok(())
    }

    /// An inode that exists (it has a name or is open).
    pub fn node(&self, ino: Ino) -> Option<&Node> {
        self.nodes.get(&ino).map(|n| &**n)
    }

    /// As [`Self::node`]; shared with the snapshots in which it is the same.
    pub fn shared(&self, ino: Ino) -> Option<&Arc<Node>> {
        self.nodes.get(&ino)
    }

    /// All inodes with their numbers, those without a name too.
    pub fn nodes(&self) -> impl DoubleEndedIterator<Item = (Ino, &Arc<Node>)> {
        self.nodes.iter().map(|(i, n)| (*i, n))
    }

    /// The content is read, also that of a directory or symlink: its access time may be another one.
    pub fn accessed(&mut self, ino: Ino) {
        let Some(n) = self.node(ino) else { return };
        let t = n.times;
        let due = match (self.atime, t.atime, t.mtime.max(t.ctime)) {
            (AtimeMode::Noatime, ..) => false,
            (AtimeMode::Relatime, Some(a), Some(changed)) if t.mtime.is_some() && t.ctime.is_some() => {
                a <= changed || self.second - a.sec >= RELATIME_AGE
            }
            _ => true,
        };
        if due && n.flags & NOATIME == 0 {
            self.nodes.entry(ino).and_modify(|n| Arc::make_mut(n).times.atime = None);
        }
    }

    /// Somebody has read everything.
    pub fn all_accessed(&mut self) {
        let all: Vec<Ino> = self.nodes.keys().copied().collect();
        all.into_iter().for_each(|i| self.accessed(i));
    }

    fn get(&self, ino: Ino) -> Result<&Node> {
        self.node(ino).ok_or(Error::Stale)
    }

    fn change(&mut self, ino: Ino) -> Result<&mut Node> {
        self.nodes.get_mut(&ino).map(Arc::make_mut).ok_or(Error::Stale)
    }

    fn dir(&self, ino: Ino) -> Result<&Node> {
        let n = self.get(ino)?;
        if n.kind == FileKind::Dir { Ok(n) } else { Err(Error::NotDir) }
    }

    /// Name → inode.
    pub fn lookup(&self, dir: Ino, name: &[u8]) -> Result<Ino> {
        let d = self.dir(dir)?;
        if name.len() > 255 {
            return Err(Error::NameTooLong);
        }
        d.entries.get(name).copied().ok_or(Error::NotFound)
    }

    fn lookup_opt(&self, dir: Ino, name: &[u8]) -> Result<Option<Ino>> {
        match self.lookup(dir, name) {
            Ok(i) => Ok(Some(i)),
            Err(Error::NotFound) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Links, as `stat` counts them.
    pub fn nlink(&self, ino: Ino) -> Result<u32> {
        let n = self.get(ino)?;
        if n.kind != FileKind::Dir {
            return Ok(n.links.len() as u32);
        }
        if ino != ROOT && n.links.is_empty() {
            return Ok(0);
        }
        Ok(2 + n.entries.values().filter(|c| self.node(**c).is_some_and(|c| c.kind == FileKind::Dir)).count() as u32)
    }

    /// What stat(2) would tell of it.
    pub fn stat(&self, ino: Ino) -> Result<Stat> {
        let n = self.get(ino)?;
        let size = match n.kind {
            FileKind::File => n.data.size(),
            FileKind::Symlink => n.target.len() as u64,
            _ => 0,
        };
        let nlink = self.nlink(ino)?;
        Ok(Stat { kind: n.kind, mode: n.mode, uid: n.uid, gid: n.gid, rdev: n.rdev, nlink, size, flags: n.flags })
    }

    fn enter(&mut self, dir: Ino, name: &[u8], ino: Ino) -> Result<()> {
        let d = self.change(dir)?;
        d.entries.insert(name.to_vec(), ino);
        d.content_changes();
        let n = self.change(ino)?;
        n.links.insert((dir, name.to_vec()));
        n.changes();
        Ok(())
    }

    fn leave(&mut self, dir: Ino, name: &[u8]) -> Result<Ino> {
        let d = self.change(dir)?;
        let ino = d.entries.remove(name).ok_or(Error::NotFound)?;
        d.content_changes();
        let n = self.change(ino)?;
        n.links.remove(&(dir, name.to_vec()));
        n.changes();
        Ok(ino)
    }

    fn drop_if_gone(&mut self, ino: Ino) {
        let gone = self.node(ino).is_some_and(|n| n.links.is_empty()) && ino != ROOT;
        if gone && !self.open.contains_key(&ino) {
            self.nodes.remove(&ino);
        }
    }

    fn make(&mut self, dir: Ino, new: &NewNode<'_>) -> Result<Ino> {
        let parent = self.dir(dir)?;
        parent.grows()?;
        let mut n = new_node(new.kind, new.mode & !new.umask & 0o7777);
        if parent.mode & 0o2000 != 0 {
            n.gid = parent.gid;
            if new.kind == FileKind::Dir {
                n.mode |= 0o2000;
            }
        }
        n.flags = parent.flags & NOATIME;
        if matches!(new.kind, FileKind::File | FileKind::Dir) {
            n.flags |= parent.flags & NOCOW;
        }
        match new.kind {
            FileKind::Symlink => {
                n.mode = 0o777;
                n.target = new.target.to_vec();
            }
            FileKind::Char | FileKind::Block => n.rdev = new.rdev,
            _ => {}
        }
        let ino = self.next;
        self.next += 1;
        self.nodes.insert(ino, Arc::new(n));
        Ok(ino)
    }

    /// Makes anything with a name.
    pub fn create(&mut self, dir: Ino, name: &[u8], new: &NewNode<'_>) -> Result<Ino> {
        if self.lookup_opt(dir, name)?.is_some() {
            return Err(Error::Exists);
        }
        let ino = self.make(dir, new)?;
        self.enter(dir, name, ino)?;
        Ok(ino)
    }

    /// O_TMPFILE; it is open.
    pub fn tmpfile(&mut self, dir: Ino, new: &NewNode<'_>) -> Result<Ino> {
        let ino = self.make(dir, new)?;
        self.change(ino)?.linkable = true;
        self.open(ino)?;
        Ok(ino)
    }

    /// link(2): another name of `ino`.
    pub fn link(&mut self, ino: Ino, dir: Ino, name: &[u8]) -> Result<()> {
        if self.lookup_opt(dir, name)?.is_some() {
            return Err(Error::Exists);
        }
        let n = self.get(ino)?;
        if n.kind == FileKind::Dir {
            return Err(Error::Perm);
        }
        if n.links.is_empty() && !n.linkable {
            return Err(Error::NotFound);
        }
        n.changeable()?;
        self.dir(dir)?.grows()?;
        self.change(ino)?.linkable = false;
        self.enter(dir, name, ino)
    }

    /// Removes a name of no directory.
    pub fn unlink(&mut self, dir: Ino, name: &[u8]) -> Result<()> {
        let ino = self.lookup(dir, name)?;
        self.dir(dir)?.changeable()?;
        self.get(ino)?.changeable()?;
        if self.get(ino)?.kind == FileKind::Dir {
            return Err(Error::IsDir);
        }
        self.leave(dir, name)?;
        self.drop_if_gone(ino);
        Ok(())
    }

    /// Removes an empty directory.
    pub fn rmdir(&mut self, dir: Ino, name: &[u8]) -> Result<()> {
        let ino = self.lookup(dir, name)?;
        self.dir(dir)?.changeable()?;
        self.get(ino)?.changeable()?;
        if !self.dir(ino)?.entries.is_empty() {
            return Err(Error::NotEmpty);
        }
        self.leave(dir, name)?;
        self.drop_if_gone(ino);
        Ok(())
    }

    /// Whether `dir` is `top` or lies below it.
    pub fn is_below(&self, dir: Ino, top: Ino) -> bool {
        let mut at = dir;
        loop {
            if at == top {
                return true;
            }
            match self.node(at).and_then(|n| n.links.first()) {
                Some((parent, _)) => at = *parent,
                None => return false,
            }
        }
    }

    /// renameat2(2): moves or exchanges names.
    pub fn rename(&mut self, dir: Ino, name: &[u8], to_dir: Ino, to: &[u8], mode: RenameMode) -> Result<()> {
        self.dir(to_dir)?;
        let ino = self.lookup(dir, name)?;
        let victim = self.lookup_opt(to_dir, to)?;
        match (mode, victim) {
            (m, Some(_)) if m.keeps_what_is_there() => return Err(Error::Exists),
            (RenameMode::Exchange, None) => return Err(Error::NotFound),
            _ => {}
        }
        if self.get(ino)?.kind == FileKind::Dir && self.is_below(to_dir, ino) {
            return Err(Error::Invalid("a directory would lie in itself"));
        }
        if let Some(v) = victim {
            if self.get(v)?.kind == FileKind::Dir && self.is_below(dir, v) {
                return Err(match mode {
                    RenameMode::Exchange => Error::Invalid("a directory would lie in itself"),
                    _ => Error::NotEmpty,
                });
            }
            if v == ino {
                return Ok(());
            }
            self.dir(to_dir)?.changeable()?;
            self.get(v)?.changeable()?;
            self.dir(dir)?.changeable()?;
            self.get(ino)?.changeable()?;
            if mode != RenameMode::Exchange {
                match (self.get(ino)?.kind == FileKind::Dir, self.get(v)?.kind == FileKind::Dir) {
                    (true, false) => return Err(Error::NotDir),
                    (false, true) => return Err(Error::IsDir),
                    (true, true) if !self.get(v)?.entries.is_empty() => return Err(Error::NotEmpty),
                    _ => {}
                }
            }
            self.leave(to_dir, to)?;
        }
        self.dir(dir)?.changeable()?;
        self.get(ino)?.changeable()?;
        self.dir(to_dir)?.grows()?;
        self.leave(dir, name)?;
        self.enter(to_dir, to, ino)?;
        if let Some(v) = victim {
            match mode {
                RenameMode::Exchange => self.enter(dir, name, v)?,
                _ => self.drop_if_gone(v),
            }
        }
        if mode.leaves_whiteout() {
            let whiteout = NewNode { kind: FileKind::Char, mode: 0, umask: 0, rdev: 0, target: b"" };
            let made = self.make(dir, &whiteout)?;
            self.enter(dir, name, made)?;
        }
        Ok(())
    }

    /// Target of a symlink.
    pub fn readlink(&self, ino: Ino) -> Result<Vec<u8>> {
        let n = self.get(ino)?;
        if n.kind == FileKind::Symlink { Ok(n.target.clone()) } else { Err(Error::Invalid("not a symlink")) }
    }

    /// Names of a directory, without `.` and `..`.
    pub fn readdir(&self, dir: Ino) -> Result<BTreeSet<Vec<u8>>> {
        Ok(self.dir(dir)?.entries.keys().cloned().collect())
    }

    /// Keeps an inode alive.
    pub fn open(&mut self, ino: Ino) -> Result<()> {
        self.get(ino)?;
        *self.open.entry(ino).or_default() += 1;
        Ok(())
    }

    /// Undoes one [`Self::open`].
    pub fn close(&mut self, ino: Ino) {
        if let Some(n) = self.open.get_mut(&ino) {
            *n -= 1;
            if *n == 0 {
                self.open.remove(&ino);
                self.drop_if_gone(ino);
            }
        }
    }

    /// Closes everything, as an unmount or a crash does.
    pub fn close_all(&mut self) {
        self.open.clear();
        self.nodes.retain(|i, n| *i == ROOT || !n.links.is_empty());
    }

    /// The content of a file, to change it.
    fn content(&mut self, ino: Ino) -> Result<&mut Sparse> {
        let n = self.change(ino)?;
        n.content_changes();
        Ok(&mut n.data)
    }

    /// pwrite(2): the number of bytes.
    pub fn write(&mut self, ino: Ino, offset: u64, data: &[u8]) -> Result<usize> {
        // a write of nothing changes nothing, times neither
        if !data.is_empty() {
            self.get(ino)?.grows()?;
            self.content(ino)?.write(offset, data);
            self.change(ino)?.blocks.write(offset, data.len() as u64);
        }
        Ok(data.len())
    }

    /// Writes what a kernel has accepted before, to whatever flags the file has got since; it keeps the times: the number of
    /// bytes.
    pub fn write_back(&mut self, ino: Ino, offset: u64, data: &[u8]) -> Result<usize> {
        if !data.is_empty() {
            let n = self.change(ino)?;
            n.data.write(offset, data);
            n.blocks.write(offset, data.len() as u64);
        }
        Ok(data.len())
    }

    /// Writes at the end; the offset.
    pub fn append(&mut self, ino: Ino, data: &[u8]) -> Result<u64> {
        let at = self.get(ino)?.data.size();
        self.write(ino, at, data)?;
        Ok(at)
    }

    /// pread(2): fewer bytes at the end.
    pub fn read(&self, ino: Ino, offset: u64, len: usize) -> Result<Vec<u8>> {
        Ok(self.get(ino)?.data.read(offset, len))
    }

    /// fallocate(2) in all its modes.
    pub fn fallocate(&mut self, ino: Ino, mode: FallocMode, offset: u64, len: u64) -> Result<()> {
        if len == 0 {
            return Err(Error::Invalid("no length"));
        }
        let n = self.get(ino)?;
        if n.flags & IMMUTABLE != 0 || (n.is_guarded() && !matches!(mode, FallocMode::Allocate { .. })) {
            return Err(Error::Perm);
        }
        let end = offset + len;
        if let FallocMode::CollapseRange | FallocMode::InsertRange = mode {
            return self.shift(ino, mode, offset, len);
        }
        let n = self.change(ino)?;
        if !matches!(mode, FallocMode::PunchHole) {
            n.flags |= NOCOW;
        }
        if !matches!(mode, FallocMode::Allocate { .. }) {
            n.blocks.zero(offset, end, n.data.size());
        }
        let data = self.content(ino)?;
        if !matches!(mode, FallocMode::Allocate { .. }) {
            data.zero(offset, len);
        }
        match mode {
            FallocMode::Allocate { keep_size: false } | FallocMode::ZeroRange { keep_size: false } => {
                data.resize(data.size().max(end));
            }
            _ => {}
        }
        Ok(())
    }

    /// Collapses or inserts a range, as ext4 does it with blocks of 4 KiB.
    fn shift(&mut self, ino: Ino, mode: FallocMode, offset: u64, len: u64) -> Result<()> {
        if !offset.is_multiple_of(4096) || !len.is_multiple_of(4096) {
            return Err(Error::Invalid("not whole blocks"));
        }
        let size = self.get(ino)?.data.size();
        if mode == FallocMode::CollapseRange {
            if offset + len >= size {
                return Err(Error::Invalid("it reaches the end of the file"));
            }
            self.content(ino)?.collapse(offset, len);
            self.change(ino)?.blocks.collapse(offset, len);
        } else {
            if offset >= size {
                return Err(Error::Invalid("it begins behind the file"));
            }
            self.content(ino)?.insert(offset, len);
            self.change(ino)?.blocks.insert(offset, len);
        }
        Ok(())
    }

    /// `copy_file_range` between two files.
    pub fn copy_range(&mut self, from: Ino, from_off: u64, to: Ino, to_off: u64, len: u64) -> Result<u64> {
        let data = self.read(from, from_off, len as usize)?;
        if !data.is_empty() {
            self.accessed(from);
        }
        self.write(to, to_off, &data)?;
        Ok(data.len() as u64)
    }

    /// Whether `answer` of SEEK_DATA or SEEK_HOLE is one that a file system may give: data is never passed over.
    pub fn seek_allows(&self, ino: Ino, offset: u64, hole: bool, answer: &Result<u64>) -> Result<bool> {
        let data = &self.get(ino)?.data;
        let size = data.size();
        Ok(match answer {
            _ if offset >= size => matches!(answer, Err(Error::NoData)),
            Ok(at) if hole => {
                let block_end = (at / 4096 + 1) * 4096;
                *at >= offset && (*at == size || (*at < size && data.is_zero(*at, block_end - at)))
            }
            Ok(at) => *at >= offset && *at < size && data.is_zero(offset, at - offset),
            Err(Error::NoData) => !hole && data.is_zero(offset, size - offset),
            Err(_) => false,
        })
    }

    /// chmod(2), chown(2), truncate(2), utimensat(2), in one.
    pub fn setattr(&mut self, ino: Ino, set: &SetAttr) -> Result<()> {
        let n = self.get(ino)?;
        if n.is_guarded() && set.flags.is_none() {
            // as by touch(1), which an append-only file lets everybody do; and what a kernel had accepted before
            let SetAttr { atime, mtime, ctime, accepted, kill_suid, kill_sgid, .. } = *set;
            let times = SetAttr { atime, mtime, ctime, accepted, kill_suid, kill_sgid, ..SetAttr::default() };
            let touch = ctime.is_none() && atime == mtime && atime.is_none_or(|t| t == SetTime::Now);
            if *set != times || !(accepted || (touch && n.flags & IMMUTABLE == 0)) {
                return Err(Error::Perm);
            }
        }
        if let Some(size) = set.size {
            match self.get(ino)?.kind {
                FileKind::File => {
                    self.content(ino)?.resize(size);
                    self.change(ino)?.blocks.resize(size);
                }
                FileKind::Dir => return Err(Error::IsDir),
                _ => return Err(Error::Invalid("no size")),
            }
        }
        let n = self.change(ino)?;
        if let Some(m) = set.mode {
            n.mode = m & 0o7777;
        }
        if set.kill_suid && n.kind != FileKind::Dir {
            // without group execute, setgid is no privilege
            n.mode &= if n.mode & 0o010 != 0 { !0o6000 } else { !0o4000 };
        }
        if set.kill_sgid {
            n.mode &= !0o2000;
        }
        n.uid = set.uid.unwrap_or(n.uid);
        n.gid = set.gid.unwrap_or(n.gid);
        n.flags = set.flags.unwrap_or(n.flags);
        let time = |t: SetTime| match t {
            SetTime::At(t) => Some(t),
            SetTime::Now => None,
        };
        n.times.ctime = set.ctime.and_then(time);
        n.times.atime = set.atime.map_or(n.times.atime, time);
        n.times.mtime = set.mtime.map_or(n.times.mtime, time);
        Ok(())
    }

    /// Sets an extended attribute.
    pub fn setxattr(&mut self, ino: Ino, name: &[u8], value: &[u8], mode: XattrMode) -> Result<()> {
        self.get(ino)?.changeable()?;
        let there = self.get(ino)?.xattrs.contains_key(name);
        match mode {
            XattrMode::Create if there => return Err(Error::Exists),
            XattrMode::Replace if !there => return Err(Error::NoAttr),
            _ => {}
        }
        let n = self.change(ino)?;
        n.xattrs.insert(name.to_vec(), value.to_vec());
        n.changes();
        Ok(())
    }

    /// Value of an extended attribute.
    pub fn getxattr(&self, ino: Ino, name: &[u8]) -> Result<Vec<u8>> {
        self.get(ino)?.xattrs.get(name).cloned().ok_or(Error::NoAttr)
    }

    /// Names of all.
    pub fn listxattr(&self, ino: Ino) -> Result<BTreeSet<Vec<u8>>> {
        Ok(self.get(ino)?.xattrs.keys().cloned().collect())
    }

    /// removexattr(2): an error where there is none of that name.
    pub fn removexattr(&mut self, ino: Ino, name: &[u8]) -> Result<()> {
        self.get(ino)?.changeable()?;
        self.get(ino)?.xattrs.get(name).ok_or(Error::NoAttr)?;
        let n = self.change(ino)?;
        n.xattrs.remove(name);
        n.changes();
        Ok(())
    }

    /// Every path with its inode, the root (as an empty path) first; inodes with several names several times.
    pub fn paths(&self) -> Vec<(Vec<u8>, Ino)> {
        let mut out = vec![(Vec::new(), ROOT)];
        let mut at = 0;
        while at < out.len() {
            let (path, ino) = out[at].clone();
            for (name, child) in self.node(ino).into_iter().flat_map(|n| &n.entries) {
                let mut p = path.clone();
                if !p.is_empty() {
                    p.push(b'/');
                }
                p.extend_from_slice(name);
                out.push((p, *child));
            }
            at += 1;
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file<'a>(kind: FileKind) -> NewNode<'a> {
        NewNode { kind, mode: 0o644, umask: 0, rdev: 0, target: b"t" }
    }

    #[test]
    fn rename_finds_the_errors_of_linux() {
        let mut m = Model::default();
        let d = m.create(ROOT, b"d", &file(FileKind::Dir)).unwrap();
        let e = m.create(d, b"e", &file(FileKind::Dir)).unwrap();
        let f = m.create(ROOT, b"f", &file(FileKind::File)).unwrap();
        let errno = |r: Result<()>| r.map_err(|e| e.errno()).err();
        use RenameMode::{Exchange, NoReplace, NoReplaceWhiteout, Replace, Whiteout};
        assert_eq!(errno(m.rename(ROOT, b"d", e, b"x", Replace)), Some(22));
        assert_eq!(errno(m.rename(ROOT, b"d", d, b"x", Replace)), Some(22));
        assert_eq!(errno(m.rename(d, b"e", ROOT, b"d", Replace)), Some(39));
        assert_eq!(errno(m.rename(d, b"e", ROOT, b"d", Exchange)), Some(22));
        assert_eq!(errno(m.rename(ROOT, b"f", ROOT, b"d", Replace)), Some(21));
        assert_eq!(errno(m.rename(ROOT, b"d", ROOT, b"f", Replace)), Some(20));
        assert_eq!(errno(m.rename(ROOT, b"f", ROOT, b"f", NoReplace)), Some(17));
        assert_eq!(errno(m.rename(ROOT, b"f", ROOT, b"g", Exchange)), Some(2));
        m.link(f, d, b"f2").unwrap();
        assert_eq!(errno(m.rename(ROOT, b"f", d, b"f2", Replace)), None);
        assert_eq!(m.nlink(f).unwrap(), 2, "a rename onto the same inode does nothing");
        assert_eq!(errno(m.rename(ROOT, b"f", d, b"e", Exchange)), None);
        assert_eq!(m.lookup(ROOT, b"f").unwrap(), e);
        assert_eq!(m.nlink(ROOT).unwrap(), 4);
        assert_eq!(m.nlink(d).unwrap(), 2);
        assert_eq!(m.paths().len(), 5);
        assert_eq!(errno(m.rename(d, b"f2", d, b"e", NoReplaceWhiteout)), Some(17));
        assert_eq!(errno(m.rename(d, b"f2", d, b"e", Whiteout)), None);
        assert_eq!(m.paths().len(), 5, "the same inode: nothing is left");
        assert_eq!(errno(m.rename(d, b"f2", ROOT, b"f", Whiteout)), Some(21));
        assert_eq!(errno(m.rename(d, b"f2", ROOT, b"g", NoReplaceWhiteout)), None);
        let left = m.stat(m.lookup(d, b"f2").unwrap()).unwrap();
        assert_eq!((left.kind, left.mode, left.rdev, left.nlink), (FileKind::Char, 0, 0, 1));
        assert_eq!((m.lookup(ROOT, b"g").unwrap(), m.nlink(f).unwrap()), (f, 2));
        assert_eq!(errno(m.rename(ROOT, b"f", d, b"e2", Whiteout)), None);
        assert_eq!((m.nlink(ROOT).unwrap(), m.nlink(d).unwrap(), m.lookup(d, b"e2").unwrap()), (3, 3, e));
    }

    #[test]
    fn an_open_file_outlives_its_name() {
        let mut m = Model::default();
        let f = m.create(ROOT, b"f", &file(FileKind::File)).unwrap();
        m.open(f).unwrap();
        m.unlink(ROOT, b"f").unwrap();
        assert!(m.link(f, ROOT, b"g").is_err());
        m.append(f, b"x").unwrap();
        m.close(f);
        assert!(m.node(f).is_none());
        let t = m.tmpfile(ROOT, &file(FileKind::File)).unwrap();
        m.link(t, ROOT, b"t").unwrap();
        m.close(t);
        assert!(m.node(t).is_some());
    }
}
