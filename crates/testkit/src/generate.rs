//! Random operations from a seed.
//!
//! Few names and few directories, so that operations collide; most paths are drawn from those that exist in the model,
//! so that most operations succeed. The tree stays at about a hundred objects.

use crate::model::{Ino, Model};
use crate::ops::{At, Op, P, SLOTS, SyncWay};
use braidfs::format::inode::{APPEND, IMMUTABLE, NOATIME, NOCOW};
use braidfs::{FallocMode, FileKind, RenameMode, SetAttr, SetTime, Timestamp, XattrMode};
use std::collections::VecDeque;

/// What to generate.
#[derive(Clone, Copy, Debug)]
pub struct Profile {
    /// Depth of the deepest directory.
    pub depth: usize,
    /// Objects from which on removing is preferred.
    pub objects: usize,
    /// Most operations write below this offset; a few go far beyond.
    pub file_bytes: u64,
    /// Of 1000 operations, this many are fsyncs and a fifth as many syncs.
    pub syncs: u32,
    /// Tmpfiles and open slots (a crash test of single objects has no use for them).
    pub slots: bool,
    /// Nearly nothing but changes of names.
    pub names: bool,
    /// Of 1000 operations, this many are commits of one domain alone.
    pub commits: u32,
    /// Also flags (`chattr`), and other times than those of content. What is immutable or append-only gets many operations,
    /// and soon it is neither any more.
    pub flags: bool,
    /// Renames may leave whiteouts.
    pub whiteouts: bool,
    /// Many writes are of whole or part blocks that are there, with an fsync at once; the cleaner works now and then.
    pub rewrites: bool,
    /// Half of the writes are a kernel's of pages that it had cached, which tells their times by themselves, before or after;
    /// several attributes are set at once; and files are synced by each of the calls for that.
    pub write_back: bool,
}

impl Default for Profile {
    fn default() -> Self {
        Self {
            depth: 4,
            objects: 100,
            file_bytes: 200_000,
            syncs: 40,
            slots: true,
            names: false,
            commits: 0,
            flags: false,
            whiteouts: false,
            rewrites: false,
            write_back: false,
        }
    }
}

const XATTRS: [P; 4] = [P("user.a"), P("user.b"), P("trusted.c"), P("user.a-longer-name-than-the-others")];

/// Source of operations.
#[derive(Debug)]
pub struct Generator {
    rng: fastrand::Rng,
    profile: Profile,
    writes: u32,
    /// What comes next.
    then: VecDeque<Op>,
    /// What a flag guards, and how many operations more.
    guarded: Option<(P, u32)>,
    /// Directory below which everything happens (of a thread of its own); empty: the root.
    pub top: P,
}

impl Generator {
    /// The same seed and the same models give the same operations.
    pub fn new(seed: u64, profile: Profile) -> Self {
        Self {
            rng: fastrand::Rng::with_seed(seed),
            profile,
            then: VecDeque::new(),
            guarded: None,
            writes: (seed as u32) << 20,
            top: P(""),
        }
    }

    fn name(&mut self) -> String {
        match self.rng.u8(..40) {
            0 => "n".repeat(255),
            1 => format!("{}é", "m".repeat(self.rng.usize(60..70))),
            2..14 => format!("d{}", self.rng.u8(..4)),
            _ => ((b'a' + self.rng.u8(..10)) as char).to_string(),
        }
    }

    fn seed(&mut self) -> u32 {
        self.writes = self.writes.wrapping_add(1);
        self.writes
    }

    fn mode(&mut self) -> u32 {
        self.rng.choice([0o644, 0o600, 0o755, 0o700, 0o1777]).unwrap_or(0o644)
    }

    fn offset(&mut self) -> u64 {
        let max = self.profile.file_bytes;
        match self.rng.u8(..100) {
            0 => (1 << 32) + self.rng.u64(..max),
            1..30 => self.rng.u64(..max / 4096) * 4096,
            30..60 => self.rng.u64(..5000),
            _ => self.rng.u64(..max),
        }
    }

    fn len(&mut self) -> u32 {
        match self.rng.u8(..20) {
            0 => 0,
            1..8 => self.rng.u32(1..200),
            8..12 => self.rng.u32(1..5) * 4096,
            12..19 => self.rng.u32(1..9000),
            _ => self.rng.u32(1..70_000),
        }
    }
}

/// The existing paths that the next operation may name.
struct Tree {
    all: Vec<(P, FileKind)>,
    dirs: Vec<P>,
}

impl Generator {
    fn tree(&self, model: &Model) -> Tree {
        let (mut all, mut dirs) = (Vec::new(), Vec::new());
        let mut kinds: Vec<(P, Ino)> = Vec::new();
        if let Ok(top) = crate::ops::walk_path(&mut model.clone(), self.top) {
            kinds.push((self.top, top));
        }
        let mut at = 0;
        while at < kinds.len() {
            let (path, ino) = kinds[at];
            at += 1;
            let Some(n) = model.node(ino) else { continue };
            all.push((path, n.kind));
            if n.kind == FileKind::Dir && path.0.split('/').count() <= self.profile.depth {
                dirs.push(path);
                for (name, child) in &n.entries {
                    if let Ok(name) = std::str::from_utf8(name) {
                        kinds.push((path.join(name), *child));
                    }
                }
            }
        }
        Tree { all, dirs }
    }

    /// A path that most likely exists and has this type.
    fn old(&mut self, t: &Tree, kind: Option<FileKind>) -> P {
        if self.rng.u8(..12) == 0 {
            return self.new_path(t);
        }
        if let Some((path, _)) = self.guarded
            && self.rng.u8(..3) == 0
        {
            return path;
        }
        let of_kind: Vec<P> =
            t.all.iter().filter(|(p, k)| *p != self.top && kind.is_none_or(|w| w == *k)).map(|(p, _)| *p).collect();
        self.rng.choice(of_kind).unwrap_or_else(|| self.new_path(t))
    }

    /// A path that may exist, or not; its directory does.
    fn new_path(&mut self, t: &Tree) -> P {
        let dir = match self.guarded {
            Some((path, _)) if self.rng.u8(..3) == 0 => path,
            _ => self.rng.choice(&t.dirs).copied().unwrap_or(self.top),
        };
        dir.join(&self.name())
    }

    fn at(&mut self, t: &Tree) -> At {
        if self.profile.slots && self.rng.u8(..5) == 0 {
            At::Slot(self.rng.u8(..SLOTS as u8))
        } else {
            At::Path(self.old(t, Some(FileKind::File)))
        }
    }

    fn dir(&mut self, t: &Tree) -> P {
        self.rng.choice(&t.dirs).copied().unwrap_or(self.top)
    }

    /// The next operation on a file system that equals `model`.
    pub fn next(&mut self, model: &Model) -> Op {
        if let Some(op) = self.then.pop_front() {
            return op;
        }
        let t = &self.tree(model);
        if self.profile.flags {
            if let Some(op) = self.guard(t, model) {
                return op;
            }
            if self.rng.u8(..16) == 0 {
                return self.flags(t);
            }
        }
        let syncs = self.profile.syncs;
        match self.rng.u32(..1000) {
            n if n < syncs => {
                let at = match self.rng.u8(..3) {
                    0 => At::Path(self.dir(t)),
                    _ => self.at(t),
                };
                return self.fsync(at);
            }
            n if n < syncs + syncs / 5 => return Op::Sync,
            n if n < syncs + syncs / 5 + self.profile.commits => {
                return Op::Commit { path: self.old(t, None), checkpoint: self.rng.u8(..4) == 0 };
            }
            _ => {}
        }
        let full = t.all.len() > self.profile.objects;
        match self.rng.u32(..100) {
            n if self.profile.names && n < 88 => self.namespace(t, full),
            0..30 => self.namespace(t, full),
            30..60 => self.data(t),
            60..72 => self.attributes(t),
            72..80 if self.profile.slots => self.slot(t),
            _ => self.question(t),
        }
    }

    fn namespace(&mut self, t: &Tree, full: bool) -> Op {
        match self.rng.u8(..30) {
            0..7 if full => {
                let a_whiteout = self.profile.whiteouts && self.rng.u8(..4) == 0;
                let kind = if a_whiteout { FileKind::Char } else { FileKind::File };
                Op::Unlink { path: self.old(t, Some(kind)) }
            }
            0..6 => Op::Create { path: self.new_path(t), kind: FileKind::File, mode: self.mode() },
            6 => {
                let kind = self.rng.choice([FileKind::Fifo, FileKind::Char, FileKind::Block, FileKind::Socket]);
                Op::Create { path: self.new_path(t), kind: kind.unwrap_or(FileKind::Fifo), mode: 0o640 }
            }
            7..10 => Op::Create { path: self.new_path(t), kind: FileKind::Dir, mode: self.mode() },
            10 => {
                let target = match self.rng.u8(..4) {
                    0 => P::new(&"x/".repeat(self.rng.usize(1..2000))),
                    _ => self.new_path(t),
                };
                Op::Symlink { path: self.new_path(t), target: if target.0.is_empty() { P("x") } else { target } }
            }
            11..14 => {
                let kind = if self.rng.u8(..6) == 0 { None } else { Some(FileKind::File) };
                Op::Link { from: self.old(t, kind), to: self.new_path(t) }
            }
            14..18 => {
                let kind = if self.rng.u8(..3) == 0 { None } else { Some(FileKind::File) };
                Op::Unlink { path: self.old(t, kind) }
            }
            18..21 => {
                let kind = if self.rng.u8(..6) == 0 { None } else { Some(FileKind::Dir) };
                Op::Rmdir { path: self.old(t, kind) }
            }
            _ => {
                let kind = match self.rng.u8(..5) {
                    0..2 => Some(FileKind::Dir),
                    2 => None,
                    _ => Some(FileKind::File),
                };
                let from = self.old(t, kind);
                let mode = match self.rng.u8(..6) {
                    0 => RenameMode::NoReplace,
                    1 => RenameMode::Exchange,
                    2 if self.profile.whiteouts && self.rng.u8(..3) == 0 => RenameMode::NoReplaceWhiteout,
                    2 if self.profile.whiteouts => RenameMode::Whiteout,
                    _ => RenameMode::Replace,
                };
                let onto = mode == RenameMode::Exchange || self.rng.bool();
                let to = if onto {
                    let kind = if self.rng.u8(..4) == 0 { None } else { kind };
                    self.old(t, kind)
                } else {
                    self.new_path(t)
                };
                Op::Rename { from, to, mode }
            }
        }
    }

    /// An fsync; of those that write back by any of the calls for it.
    fn fsync(&mut self, at: At) -> Op {
        let data_only = self.rng.u8(..4) == 0;
        if !self.profile.write_back || self.rng.bool() {
            return Op::Fsync { at, data_only };
        }
        // as the other one does it
        Op::FsyncAs { at, data_only, way: if data_only { SyncWay::Alone } else { SyncWay::Together } }
    }

    /// A time of a kernel's clock: near those of the tests' clock, now and then one of them.
    fn time(&mut self) -> Option<SetTime> {
        let at = Timestamp { sec: 1_700_000_000 + self.rng.i64(0..1100), nsec: self.rng.u32(..250) * 4_000_000 };
        Some(SetTime::At(at))
    }

    /// What a kernel with a writeback cache does of a write: pages, their times by themselves, often a sync.
    fn write_back(&mut self, at: At) -> Op {
        let (off, len) = match self.rng.u8(..4) {
            0 => (self.rng.u64(..4) * 4096, 4096),
            1 => (self.rng.u64(..9000), self.rng.u32(1..5000)),
            _ => (self.offset(), self.len()),
        };
        let write = Op::WriteBack { at, off, len, seed: self.seed() };
        let time = self.time();
        let set = SetAttr { mtime: time, ctime: time, accepted: self.rng.bool(), ..SetAttr::default() };
        let (times, sync) = (Op::SetAttr { at, set }, self.fsync(at));
        let mut all = match self.rng.u8(..8) {
            0 => vec![times, write, sync],
            1..3 => vec![write, times, sync],
            3 => vec![write, sync, times],
            4 => vec![write, sync],
            5 => vec![times, write],
            6 => vec![write],
            _ => vec![write, times],
        };
        let first = all.remove(0);
        self.then.extend(all);
        first
    }

    /// Several attributes that a kernel tells at once, of a chmod, a chown, utimes or a truncate.
    fn several(&mut self, t: &Tree) -> Op {
        let kind = if self.rng.u8(..3) == 0 { None } else { Some(FileKind::File) };
        let at = if self.rng.u8(..8) == 0 { self.at(t) } else { At::Path(self.old(t, kind)) };
        let mode = self.rng.choice([0o600, 0o644, 0o755, 0o4755, 0o6755, 0o2644, 0o2755, 0o4711]);
        let ctime = if self.rng.bool() { self.time() } else { None };
        let none = SetAttr::default();
        let set = match self.rng.u8(..7) {
            0 => SetAttr { mode, ctime, ..none },
            1 => {
                let (uid, gid) = (Some(self.rng.u32(..5) * 1000), Some(self.rng.u32(..5)));
                SetAttr { uid, gid, ctime, kill_suid: self.rng.bool(), ..none }
            }
            2 => SetAttr { atime: self.time(), mtime: Some(SetTime::Now), ctime, ..none },
            3 => SetAttr { atime: self.time(), mtime: self.time(), ctime, ..none },
            4 => SetAttr { kill_suid: true, kill_sgid: ctime.is_some(), ..none },
            5 => SetAttr { mode, atime: Some(SetTime::Now), mtime: self.time(), ctime, ..none },
            _ => {
                let (size, mtime) = (Some(self.offset()), self.time());
                SetAttr { size, mtime, ctime: mtime, kill_suid: self.rng.bool(), ..none }
            }
        };
        Op::SetAttr { at, set }
    }

    fn data(&mut self, t: &Tree) -> Op {
        let at = self.at(t);
        if self.profile.write_back && self.rng.bool() {
            return self.write_back(at);
        }
        if self.profile.rewrites && self.rng.bool() {
            let fsync = self.fsync(at);
            self.then.push_back(fsync);
            let (off, len) = match self.rng.u8(..3) {
                0 => (self.rng.u64(..4) * 4096, 4096),
                1 => (self.rng.u64(..9000), self.rng.u32(1..5000)),
                _ => (self.rng.u64(..4) * 4096, self.rng.u32(1..9) * 4096),
            };
            return Op::Write { at, off, len, seed: self.seed() };
        }
        match self.rng.u8(..20) {
            0..9 => Op::Write { at, off: self.offset(), len: self.len(), seed: self.seed() },
            9..13 => Op::Append { at, len: self.len(), seed: self.seed() },
            13..16 => {
                let size = if self.rng.u8(..4) == 0 { 0 } else { self.offset() };
                Op::Truncate { at, size }
            }
            16..19 => {
                let keep_size = self.rng.bool();
                let mode = match self.rng.u8(..8) {
                    0..2 => FallocMode::PunchHole,
                    2..4 => FallocMode::Allocate { keep_size },
                    4 => FallocMode::ZeroRange { keep_size },
                    5..7 => FallocMode::CollapseRange,
                    _ => FallocMode::InsertRange,
                };
                if matches!(mode, FallocMode::CollapseRange | FallocMode::InsertRange) && self.rng.u8(..20) > 0 {
                    // short files are the most
                    let (off, len) = (self.rng.u64(..8) * 4096, self.rng.u64(1..4) * 4096);
                    return Op::Fallocate { at, mode, off, len };
                }
                Op::Fallocate { at, mode, off: self.offset(), len: u64::from(self.len()) * self.rng.u64(1..4) }
            }
            _ => Op::CopyRange {
                from: self.old(t, Some(FileKind::File)),
                from_off: self.offset(),
                to: self.old(t, Some(FileKind::File)),
                to_off: self.offset(),
                len: u64::from(self.len()) + 1,
            },
        }
    }

    fn attributes(&mut self, t: &Tree) -> Op {
        if self.profile.write_back && self.rng.u8(..3) == 0 {
            return self.several(t);
        }
        let path = self.old(t, None);
        let name = self.rng.choice(XATTRS).unwrap_or(P("user.a"));
        match self.rng.u8(..12) {
            0..2 => {
                Op::SetMode { path, mode: self.rng.choice([0o600, 0o644, 0o444, 0o777, 0o1755, 0o2755]).unwrap_or(0) }
            }
            2 => Op::SetOwner { path, uid: self.rng.u32(..5) * 1000, gid: self.rng.u32(..5) },
            3 => Op::SetMtime { path, sec: i64::from(self.rng.i32(-2_000_000_000..)) },
            4..9 => {
                let mode = match self.rng.u8(..6) {
                    0 => XattrMode::Create,
                    1 => XattrMode::Replace,
                    _ => XattrMode::Set,
                };
                let len = match self.rng.u8(..10) {
                    0 => self.rng.u32(1000..3500),
                    _ => self.rng.u32(..100),
                };
                Op::SetXattr { path, name, len, seed: self.seed(), mode }
            }
            9..11 => Op::RemoveXattr { path, name },
            _ => Op::GetXattr { path, name },
        }
    }

    /// Takes the flags off what has been guarded for long enough.
    fn guard(&mut self, t: &Tree, model: &Model) -> Option<Op> {
        self.guarded = match self.guarded {
            Some((path, more)) if more > 0 => Some((path, more - 1)),
            _ => {
                // it may have moved meanwhile, with a directory above
                let is = |p: P| {
                    let ino = crate::ops::walk_path(&mut model.clone(), p).ok();
                    ino.and_then(|i| model.node(i)).is_some_and(crate::model::Node::is_guarded)
                };
                if let Some((path, _)) = t.all.iter().find(|(p, _)| is(*p)) {
                    return Some(Op::SetFlags { path: *path, flags: 0 });
                }
                None
            }
        };
        None
    }

    fn flags(&mut self, t: &Tree) -> Op {
        match self.rng.u8(..12) {
            0..3 => Op::SetAtime { path: self.old(t, None), sec: i64::from(self.rng.i32(-2_000_000_000..)) },
            3..5 => Op::Touch { path: self.old(t, None) },
            5..8 => {
                let kind = if self.rng.u8(..3) == 0 { FileKind::Dir } else { FileKind::File };
                let flags = self.rng.choice([0, NOCOW, NOCOW, NOATIME, NOCOW | NOATIME]).unwrap_or(0);
                Op::SetFlags { path: self.old(t, Some(kind)), flags }
            }
            _ => {
                let kind = if self.rng.bool() { FileKind::Dir } else { FileKind::File };
                let path = self.old(t, Some(kind));
                self.guarded = Some((path, self.rng.u32(2..20)));
                Op::SetFlags { path, flags: self.rng.choice([APPEND, IMMUTABLE]).unwrap_or(APPEND) }
            }
        }
    }

    fn slot(&mut self, t: &Tree) -> Op {
        let slot = self.rng.u8(..SLOTS as u8);
        match self.rng.u8(..10) {
            0..2 => Op::Tmpfile { dir: self.dir(t), slot },
            2..4 => Op::LinkSlot { slot, to: self.new_path(t) },
            4..8 => Op::Open { path: self.old(t, Some(FileKind::File)), slot },
            _ => Op::Close { slot },
        }
    }

    fn question(&mut self, t: &Tree) -> Op {
        match self.rng.u8(..21) {
            20 if self.profile.rewrites && self.rng.bool() => match self.rng.u8(..4) {
                0 => Op::Clean,
                _ => Op::Defragment { at: self.at(t), commit: self.rng.bool() },
            },
            20 => Op::Trim,
            0..8 => Op::Read { at: self.at(t), off: self.offset(), len: self.len() },
            8..12 => Op::Seek { at: self.at(t), off: self.offset(), hole: self.rng.bool() },
            12..14 => Op::Stat { path: self.old(t, None) },
            14..16 => Op::Readlink { path: self.old(t, Some(FileKind::Symlink)) },
            16..18 => Op::Readdir { path: self.old(t, Some(FileKind::Dir)) },
            _ => Op::ListXattr { path: self.old(t, None) },
        }
    }
}
