//! What is being done when power fails: after ACE (Mohan et al., "Finding Crash-Consistency Bugs with Bounded Black-Box
//! Crash Testing", OSDI 2018), all sequences of one and two operations over a few objects, each operation followed by
//! every kind of sync or none.
//!
//! The directories `A` and `B` lie in different domains, so that most sequences cross domains.

use crate::model::{Ino, Model};
use crate::ops::{At, Op, P, SyncWay};
use crate::run::{Runner, Setup, set_clock};
use crate::states::final_image;
use crate::subject::Key;
use At::{Path, Slot};
use braidfs::{
    DataMode, FallocMode, FileKind, Overwrite, Placement, RenameMode, SetAttr, SetTime, Timestamp, XattrMode,
};
use braidfs_device::Image;
use std::collections::BTreeMap;

/// A volume to begin with.
pub struct Base {
    /// How it was made.
    pub setup: Setup,
    /// Content of the device.
    pub image: Image,
    /// What is on it.
    pub model: Model,
    /// Which inode is which.
    pub keys: BTreeMap<Ino, Key>,
    /// Which of them it is.
    pub kind: Kind,
}

impl Base {
    /// A volume as a run has it now.
    ///
    /// # Errors
    /// Of reading it.
    pub fn of(r: &Runner, kind: Kind) -> Self {
        // without the log of the run
        let image = final_image(r.device()).compact();
        Self { image, model: r.model.clone(), keys: r.keys().clone(), setup: r.setup().clone(), kind }
    }
}

fn file(path: P) -> Op {
    Op::Create { path, kind: FileKind::File, mode: 0o644 }
}

fn dir(path: P) -> Op {
    Op::Create { path, kind: FileKind::Dir, mode: 0o755 }
}

fn write(path: P, off: u64, len: u32, seed: u32) -> Op {
    Op::Write { at: Path(path), off, len, seed }
}

/// Pages that a kernel had cached, which keep the times.
fn write_back(path: P, off: u64, len: u32, seed: u32) -> Op {
    Op::WriteBack { at: Path(path), off, len, seed }
}

/// The times of such pages, which the kernel tells by themselves.
fn times(path: P, sec: i64) -> Op {
    Op::SetAttr { at: Path(path), set: set_times(sec) }
}

fn set_times(sec: i64) -> SetAttr {
    let time = Some(SetTime::At(Timestamp { sec, nsec: 8_000_000 }));
    SetAttr { mtime: time, ctime: time, ..SetAttr::default() }
}

/// Which volume to begin with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    /// Where directories are placed.
    pub placement: Placement,
    /// It was not unmounted, so that everything is in its journals.
    pub dirty: bool,
    /// Data checksums, no inline files.
    pub sums: bool,
    /// Everything is written out of place.
    pub journal: bool,
    /// No fsync overwrites blocks of ordinary files.
    pub log: bool,
    /// Without room for a page in the cache: what is written goes to the device at once, before its transaction. Its
    /// domains commit from the last to the first.
    pub pressed: bool,
    /// `A` and `B` have several buckets each, and are changed as by several threads.
    pub shared: bool,
    /// What users and groups use is counted ([`Setup::quotas`]).
    pub quotas: bool,
    /// It has two devices: the journals of `A`'s and `B`'s domains lie each on another one, and what is written of files on
    /// the other one of both.
    pub apart: bool,
}

/// What most kinds have in common.
const PLAIN: Kind = Kind {
    placement: Placement::Dirs,
    dirty: false,
    sums: false,
    journal: false,
    log: false,
    pressed: false,
    shared: false,
    quotas: false,
    apart: false,
};

impl Kind {
    /// All that the workloads are run on: ordinary ones, a pressed one, those with shared directories, those on two devices.
    pub const ALL: [Kind; Self::ORDINARY + 1 + Self::SHARED + Self::APART] = [
        PLAIN,
        Kind { dirty: true, ..PLAIN },
        Kind { placement: Placement::Spread, ..PLAIN },
        Kind { placement: Placement::Spread, dirty: true, log: true, ..PLAIN },
        Kind { dirty: true, sums: true, ..PLAIN },
        Kind { placement: Placement::Spread, journal: true, ..PLAIN },
        Kind { pressed: true, ..PLAIN },
        // not dirty ones: as long as entries may be stale all changes have the directory for themselves
        Kind { placement: Placement::Spread, shared: true, ..PLAIN },
        Kind { shared: true, ..PLAIN },
        Kind { placement: Placement::Spread, pressed: true, shared: true, quotas: true, ..PLAIN },
        Kind { apart: true, ..PLAIN },
        Kind { placement: Placement::Spread, dirty: true, sums: true, apart: true, ..PLAIN },
        Kind { pressed: true, quotas: true, apart: true, ..PLAIN },
    ];
    /// How many of them have two devices.
    pub const APART: usize = 3;
    /// How many of them have shared directories.
    pub const SHARED: usize = 3;
    /// How many of them are neither pressed, nor have shared directories or two devices.
    pub const ORDINARY: usize = 6;
}

/// The volumes of all kinds.
///
/// # Errors
/// Of any operation.
pub fn bases() -> Result<Vec<Base>, String> {
    Kind::ALL.iter().map(|k| base(*k)).collect()
}

/// A small volume with the files of the workload.
///
/// # Errors
/// Of any operation.
pub fn base(kind: Kind) -> Result<Base, String> {
    set_clock(0);
    let mut setup = Setup { bytes: 24 << 20, ..Setup::default() };
    setup.mkfs.domains = Some(2);
    setup.mkfs.mlogs = Some(1);
    // short, so that it is read quickly and is full now and then
    setup.mkfs.journal_bytes = Some(128 << 10);
    setup.mkfs.placement = kind.placement;
    if kind.sums {
        setup.mkfs.data_checksums = true;
        setup.mkfs.inline_max = 0;
    }
    if kind.journal {
        setup.data = DataMode::Journal;
    }
    if kind.log {
        setup.overwrite = Overwrite::Log;
    }
    setup.share_dirs = kind.shared;
    setup.quotas = kind.quotas;
    if kind.pressed {
        setup.cache = 1;
        setup.falling = true;
    }
    if kind.apart {
        // two groups on the first one: each domain gets one of either device, and has as much room beside its file as on one
        (setup.bytes, setup.second) = (17 << 19, 105 << 18);
    }
    let mut r = Runner::empty(&setup)?;
    r.apply(&dir(P("A")))?;
    // Takes directories until one is in another domain than A.
    for i in 0..8 {
        let spare = P::new(&format!("z{i}"));
        r.apply(&dir(spare))?;
        if domain(&r, "A")? != domain(&r, spare.0)? {
            r.apply(&Op::Rename { from: spare, to: P("B"), mode: RenameMode::Replace })?;
            break;
        }
        r.apply(&Op::Rmdir { path: spare })?;
    }
    if r.model.lookup(crate::model::ROOT, b"B").is_err() {
        return Err("no directory was placed in another domain".into());
    }
    let content = [
        file(P("A/f")),
        write(P("A/f"), 0, 9000, 1),
        file(P("A/g")),
        write(P("A/g"), 0, 50, 2),
        dir(P("A/e")),
        dir(P("A/s")),
        file(P("A/s/x")),
        write(P("A/s/x"), 0, 100, 3),
        file(P("B/h")),
        write(P("B/h"), 0, 5000, 4),
        dir(P("B/k")),
        Op::Sync,
    ];
    content.iter().try_for_each(|op| r.apply(op))?;
    if kind.shared {
        ["A", "B"].iter().flat_map(|d| many_names(P(d))).chain([Op::Sync]).try_for_each(|op| r.apply(&op))?;
    }
    if kind.shared {
        // as long as entries may be stale all changes have the directory for themselves
        r.close()?;
    } else if !kind.dirty {
        r.remount()?;
    }
    Ok(Base::of(&r, kind))
}

/// Names of a directory that take three buckets: they are long, and few inodes have them all.
pub fn many_names(dir: P) -> Vec<Op> {
    let name = |i: usize| dir.join(&format!("{i:02}-{}", "x".repeat(240)));
    let make = |i| if i % 8 == 0 { file(name(i)) } else { Op::Link { from: name(i / 8 * 8), to: name(i) } };
    (0..32).map(make).collect()
}

/// Before the workload on a volume with shared directories, in the same transaction: its first change has a directory for
/// itself.
pub fn prelude() -> Vec<Op> {
    [P("A/p"), P("B/p")].into_iter().flat_map(|path| [file(path), Op::Unlink { path }]).collect()
}

/// Sequences whose operations meet in names of shared directories.
pub fn names_met() -> Vec<(&'static str, Vec<Op>)> {
    let mv = |a: &'static str, b: &'static str| Op::Rename { from: P(a), to: P(b), mode: RenameMode::Replace };
    let link = |a: &'static str, b: &'static str| Op::Link { from: P(a), to: P(b) };
    let unlink = |p: &'static str| Op::Unlink { path: P(p) };
    let fsync = |p: &'static str| Op::Fsync { at: Path(P(p)), data_only: false };
    let commit = |p: &'static str| Op::Commit { path: P(p), checkpoint: false };
    let leave: [(&str, Vec<Op>); 4] = [
        ("moved away", vec![mv("A/f", "B/n")]),
        ("unlinked, with another name", vec![link("A/f", "B/l"), unlink("A/f")]),
        ("unlinked", vec![unlink("A/f")]),
        ("moved away and unlinked", vec![mv("A/f", "B/n"), unlink("B/n")]),
    ];
    let take: [(&str, Vec<Op>); 5] = [
        ("made again", vec![file(P("A/f"))]),
        ("made again twice", vec![file(P("A/f")), unlink("A/f"), file(P("A/f"))]),
        ("taken by a rename", vec![mv("B/h", "A/f")]),
        ("taken by another file", vec![mv("B/h", "B/i"), mv("B/i", "A/f")]),
        ("taken, left and taken", vec![mv("B/h", "A/f"), mv("A/f", "B/h"), file(P("A/f"))]),
    ];
    let ends: [(&str, Vec<Op>); 6] = [
        ("sync of the file", vec![fsync("A/f")]),
        ("sync of the directory", vec![fsync("A")]),
        ("sync of the other directory", vec![fsync("B")]),
        ("its domain commits", vec![commit("A/f"), fsync("A/g")]),
        ("the first directory's domain commits", vec![commit("A"), fsync("A/g")]),
        ("the other directory's domain commits", vec![commit("B"), fsync("A/g")]),
    ];
    let mut all = Vec::new();
    for (l, leave) in &leave {
        for (_, take) in &take {
            for (_, end) in &ends {
                all.push((*l, [leave.clone(), take.clone(), end.clone()].concat()));
            }
        }
    }
    all
}

fn domain(r: &Runner, name: &str) -> Result<u16, String> {
    let v = r.volume()?;
    let a = v.lookup(braidfs::InodeNo::ROOT, name.as_bytes()).map_err(|e| e.to_string())?;
    v.domain_of(a.ino).map(|d| d.0).map_err(|e| e.to_string())
}

/// What is done as one of the sequence's operations, and what may be synced behind it.
#[derive(Clone, Debug)]
pub struct Basic {
    /// Class of operation and arguments, for the coverage of pairs.
    pub name: &'static str,
    /// It changes names, links or attributes, and no data.
    pub metadata: bool,
    ops: Vec<Op>,
    file: Option<P>,
    dirs: Vec<P>,
}

/// A basic operation with what follows it.
#[derive(Clone, Debug)]
pub struct Single {
    /// Number of the basic operation.
    pub basic: usize,
    /// All of it.
    pub ops: Vec<Op>,
    /// Whether the last of them is a sync.
    pub synced: bool,
    /// It is of another file.
    pub of_other: bool,
}

fn one(name: &'static str, op: Op, file: P) -> Basic {
    Basic { name, metadata: false, ops: vec![op], file: Some(file), dirs: vec![file.split().0] }
}

fn names(name: &'static str, op: Op, file: P) -> Basic {
    Basic { metadata: true, ..one(name, op, file) }
}

fn rename(name: &'static str, from: P, to: P, mode: RenameMode) -> Basic {
    let mut dirs = vec![to.split().0];
    if from.split().0 != dirs[0] {
        dirs.push(from.split().0);
    }
    Basic { name, metadata: true, ops: vec![Op::Rename { from, to, mode }], file: Some(to), dirs }
}

/// A rename that leaves a whiteout, which may be synced, too.
fn hide(name: &'static str, from: P, to: P) -> Basic {
    let mut basic = rename(name, from, to, RenameMode::Whiteout);
    basic.dirs.push(from);
    basic
}

fn gone(name: &'static str, op: Op, path: P) -> Basic {
    Basic { name, metadata: true, ops: vec![op], file: None, dirs: vec![path.split().0] }
}

/// The operations of the workload.
pub fn basics() -> Vec<Basic> {
    let f = P("A/f");
    let (replace, exchange) = (RenameMode::Replace, RenameMode::Exchange);
    let falloc = |name, mode, off, len| one(name, Op::Fallocate { at: Path(f), mode, off, len }, f);
    let unlink = |name, path| gone(name, Op::Unlink { path }, path);
    let rmdir = |name, path| gone(name, Op::Rmdir { path }, path);
    let xattr =
        |name, len, seed| names(name, Op::SetXattr { path: f, name: P("user.a"), len, seed, mode: XattrMode::Set }, f);
    let mut all = vec![
        names("create", file(P("A/n")), P("A/n")),
        names("create in the other domain", file(P("B/n")), P("B/n")),
        names("mkdir", dir(P("A/m")), P("A/m")),
        Basic {
            ops: vec![dir(P("B/d")), file(P("B/d/x")), write(P("B/d/x"), 0, 300, 10)],
            ..names("create in a new directory", dir(P("B/d")), P("B/d/x"))
        },
        names("symlink", Op::Symlink { path: P("A/y"), target: P("f") }, P("A/y")),
        one("overwrite a block", write(f, 0, 4096, 11), f),
        one("overwrite unaligned and overlapping", write(f, 1000, 6000, 12), f),
        one("overwrite a small file", write(P("A/g"), 10, 20, 13), P("A/g")),
        one("append blocks", Op::Append { at: Path(f), len: 5000, seed: 14 }, f),
        one("append to a new file", Op::Append { at: Path(P("A/n")), len: 300, seed: 15 }, P("A/n")),
        one("append a few bytes", Op::Append { at: Path(P("B/h")), len: 10, seed: 16 }, P("B/h")),
        one("truncate to a part of a block", Op::Truncate { at: Path(f), size: 100 }, f),
        one("truncate up", Op::Truncate { at: Path(f), size: 20_000 }, f),
        one("truncate to nothing", Op::Truncate { at: Path(P("A/g")), size: 0 }, P("A/g")),
        names("link in the same directory", Op::Link { from: f, to: P("A/l") }, P("A/l")),
        names("link in the other domain", Op::Link { from: f, to: P("B/l") }, P("B/l")),
        rename("rename", f, P("A/r"), replace),
        rename("rename to the other domain", f, P("B/n"), replace),
        rename("rename onto a file", f, P("A/g"), replace),
        rename("rename onto a file of the other domain", f, P("B/h"), replace),
        rename("rename onto it from the other domain", P("B/h"), f, replace),
        rename("rename of what was moved there", P("B/n"), P("B/h"), replace),
        rename("rename of a directory", P("A/e"), P("A/m"), replace),
        rename("rename of an empty directory onto another's", P("A/e"), P("B/k"), replace),
        rename("rename of a directory onto an empty one", P("A/s"), P("B/k"), replace),
        rename("move of a directory to the other domain", P("A/s"), P("B/s"), replace),
        rename("move of the parent below the other", P("A"), P("B/A"), replace),
        rename("move of the other below the parent", P("B"), P("A/e/B"), replace),
        rename("move of the other back up", P("A/e/B"), P("B"), replace),
        rename("exchange of files over domains", f, P("B/h"), exchange),
        rename("exchange of files", f, P("A/g"), exchange),
        rename("exchange of directories over domains", P("A/s"), P("B/k"), exchange),
        rename("exchange of a directory and a file", P("A/s"), P("B/h"), exchange),
        unlink("unlink", f),
        unlink("unlink of a small file", P("A/g")),
        unlink("unlink in the other domain", P("B/h")),
        unlink("unlink below", P("A/s/x")),
        rmdir("rmdir", P("A/e")),
        rmdir("rmdir in the other domain", P("B/k")),
        rmdir("rmdir of what may have moved", P("A/s")),
        xattr("small attribute", 20, 21),
        xattr("large attribute", 3000, 22),
        names("chmod", Op::SetMode { path: f, mode: 0o600 }, f),
        names("chmod of a directory", Op::SetMode { path: P("A"), mode: 0o700 }, P("A")),
        falloc("fallocate behind the end", FallocMode::Allocate { keep_size: true }, 8192, 40_000),
        falloc("fallocate", FallocMode::Allocate { keep_size: false }, 0, 40_000),
        falloc("punch a block", FallocMode::PunchHole, 0, 4096),
        falloc("punch unaligned", FallocMode::PunchHole, 100, 6000),
        falloc("collapse a block", FallocMode::CollapseRange, 0, 4096),
        falloc("insert a block", FallocMode::InsertRange, 4096, 4096),
        falloc("zero a range", FallocMode::ZeroRange { keep_size: true }, 100, 8000),
        one("copy a range", Op::CopyRange { from: P("B/h"), from_off: 0, to: f, to_off: 100, len: 5000 }, f),
    ];
    let mut tmpfile = names("tmpfile, then link", Op::Tmpfile { dir: P("A"), slot: 0 }, P("B/t"));
    tmpfile.ops.push(Op::Write { at: Slot(0), off: 0, len: 4500, seed: 30 });
    tmpfile.ops.push(Op::LinkSlot { slot: 0, to: P("B/t") });
    all.push(tmpfile);
    let mut orphan = gone("unlink of an open file", Op::Open { path: f, slot: 1 }, f);
    orphan.ops.push(Op::Unlink { path: f });
    orphan.ops.push(Op::Append { at: Slot(1), len: 100, seed: 31 });
    all.push(orphan);
    let mut again = names("unlink, then create", Op::Unlink { path: f }, f);
    again.ops.push(file(f));
    again.ops.push(write(f, 0, 200, 32));
    all.push(again);
    all.extend([
        hide("rename with a whiteout", f, P("A/r")),
        hide("rename with a whiteout, to the other domain", f, P("B/n")),
        hide("rename with a whiteout, onto a file of the other domain", f, P("B/h")),
        hide("rename with a whiteout, of what was moved there", P("B/n"), P("A/r")),
        hide("rename with a whiteout, of a directory", P("A/s"), P("B/s")),
    ]);
    let several = SetAttr { mode: Some(0o4711), ..set_times(1_700_000_400) };
    all.extend([
        Basic {
            ops: vec![write_back(f, 0, 4096, 33), times(f, 1_700_000_100)],
            ..one("write back, then times", Op::Sync, f)
        },
        Basic {
            ops: vec![times(f, 1_700_000_200), write_back(f, 8000, 5000, 34)],
            ..one("times, then write back of a longer file", Op::Sync, f)
        },
        Basic {
            ops: vec![write_back(P("A/g"), 10, 20, 35), times(P("A/g"), 1_700_000_300)],
            ..one("write back of a small file, then times", Op::Sync, P("A/g"))
        },
        one("several attributes", Op::SetAttr { at: Path(f), set: several }, f),
    ]);
    all
}

/// Every basic operation with every sync that may follow: none first.
pub fn singles() -> Vec<Single> {
    let mut all = Vec::new();
    for (basic, b) in basics().iter().enumerate() {
        let mut add = |sync: Option<Op>, of_other: bool| {
            let synced = sync.is_some();
            let ops: Vec<Op> = b.ops.iter().cloned().chain(sync).collect();
            if !all.iter().any(|s: &Single| s.basic == basic && s.ops == ops) {
                all.push(Single { basic, ops, synced, of_other });
            }
        };
        let fsync = |p: P, data_only| Some(Op::Fsync { at: Path(p), data_only });
        add(None, false);
        add(Some(Op::Sync), false);

        if let Some(f) = b.file {
            add(fsync(f, false), false);
            add(fsync(f, true), false);
        }
        for d in &b.dirs {
            add(fsync(*d, false), false);
        }
        add(fsync(P("A/g"), false), true);
    }
    all
}

/// Every basic operation that changes no data, with no commit or one of either domain alone behind it.
pub fn alone() -> Vec<Single> {
    let commit = |path| Op::Commit { path: P(path), checkpoint: false };
    let mut all = Vec::new();
    for (basic, b) in basics().iter().enumerate().filter(|(_, b)| b.metadata) {
        // files that few operations take away
        for end in [None, Some(commit("A/g")), Some(commit("B/h"))] {
            let synced = end.is_some();
            all.push(Single { basic, ops: b.ops.iter().cloned().chain(end).collect(), synced, of_other: false });
        }
    }
    all
}

/// Longer sequences that are known to be hard, each with a name.
pub fn hard() -> Vec<(&'static str, Vec<Op>)> {
    let mv = |a: &'static str, b: &'static str| Op::Rename { from: P(a), to: P(b), mode: RenameMode::Replace };
    let swap = |a: &'static str, b: &'static str| Op::Rename { from: P(a), to: P(b), mode: RenameMode::Exchange };
    let hide = |a: &'static str, b: &'static str| Op::Rename { from: P(a), to: P(b), mode: RenameMode::Whiteout };
    let fsync = |p: &'static str| Op::Fsync { at: Path(P(p)), data_only: false };
    let falloc = |mode, off, len| Op::Fallocate { at: Path(P("A/f")), mode, off, len };
    let append = |p: &'static str, len, seed| Op::Append { at: Path(P(p)), len, seed };
    let cut = |size| Op::Truncate { at: Path(P("A/f")), size };
    let commit = || Op::Commit { path: P("A"), checkpoint: false };
    let datasync = |p: &'static str| Op::Fsync { at: Path(P(p)), data_only: true };
    let together = |p: &'static str| Op::FsyncAs { at: Path(P(p)), data_only: false, way: SyncWay::Together };
    let mut filling = vec![mv("B/h", "A/f")];
    for i in 0..24 {
        filling.extend([append("A/g", 40, 50 + i), fsync("A/g")]);
    }
    let mut attributes = Vec::new();
    for i in 0..3 {
        let set = Op::SetXattr { path: P("A/g"), name: P("user.a"), len: 900, seed: 80 + i, mode: XattrMode::Set };
        attributes.extend([set, fsync("A/g")]);
    }
    vec![
        // ScaleFS's case: two moves that are legal one after the other, and an fsync that needs the second only
        (
            "moves over domains, fsync of a file",
            vec![mv("B", "A/e/B"), Op::Sync, mv("A/e/B", "B"), mv("A", "B/A"), fsync("B/A/g")],
        ),
        (
            "moves over domains, fsync of a directory",
            vec![mv("A", "B/A"), Op::Sync, mv("B/A", "A"), mv("B", "A/B"), fsync("A/B/k")],
        ),
        ("moves over domains, sync", vec![mv("A", "B/A"), Op::Sync, mv("B/A", "A"), mv("B", "A/s/B"), Op::Sync]),
        (
            "fsync again and again",
            vec![
                append("A/g", 30, 40),
                fsync("A/g"),
                append("A/g", 30, 41),
                fsync("A/g"),
                write(P("A/g"), 5, 9, 42),
                fsync("A/g"),
            ],
        ),
        (
            "fsync of blocks again and again",
            vec![write(P("A/f"), 0, 4096, 43), fsync("A/f"), write(P("A/f"), 100, 5000, 44), fsync("A/f")],
        ),
        (
            "fsync below new directories",
            vec![dir(P("A/m")), dir(P("A/m/n")), file(P("A/m/n/x")), append("A/m/n/x", 5000, 45), fsync("A/m/n/x")],
        ),
        ("rename into new directories", vec![dir(P("B/m")), dir(P("B/m/n")), mv("A/f", "B/m/n/f"), fsync("B/m/n/f")]),
        ("a name given to another", vec![mv("A/f", "B/n"), file(P("A/f")), append("A/f", 10, 46), fsync("A/f")]),
        ("a name taken twice", vec![mv("B/h", "A/f"), mv("A/g", "A/f"), fsync("A/f")]),
        (
            "replaced in the other domain, then synced",
            vec![append("A/f", 10, 47), mv("B/h", "A/f"), fsync("A/f"), append("A/f", 10, 48), Op::Sync],
        ),
        ("exchange, then exchange back", vec![swap("A/f", "B/h"), fsync("A/f"), swap("A/f", "B/h"), fsync("B/h")]),
        (
            "exchange of directories, then files below",
            vec![swap("A/s", "B/k"), file(P("A/s/y")), fsync("A/s/y"), Op::Sync],
        ),
        ("children of a new directory in the other domain", vec![mv("A/g", "B/k/g"), mv("A/f", "B/k/f"), fsync("B/k")]),
        (
            "unlinked and open while others sync",
            vec![
                Op::Open { path: P("A/f"), slot: 1 },
                Op::Unlink { path: P("A/f") },
                append("A/g", 10, 49),
                fsync("A/g"),
                Op::Sync,
                append("B/h", 1, 50),
                Op::Sync,
            ],
        ),
        ("the journal fills while another domain waits", filling),
        ("large attributes synced again and again", attributes),
        (
            "freed and written again",
            vec![
                write(P("A/f"), 0, 9000, 51),
                write(P("B/h"), 0, 5000, 52),
                Op::Truncate { at: Path(P("A/f")), size: 0 },
                file(P("A/n")),
                append("A/n", 9000, 53),
                fsync("A/n"),
                append("A/n", 9000, 54),
                Op::Sync,
            ],
        ),
        (
            "freed, trimmed and written again",
            vec![
                write(P("A/f"), 0, 9000, 55),
                Op::Trim,
                fsync("A/f"),
                Op::Trim,
                Op::Unlink { path: P("A/f") },
                write(P("B/h"), 0, 5000, 56),
                Op::Trim,
                Op::Commit { path: P("A"), checkpoint: false },
                Op::Trim,
                append("A/g", 9000, 57),
                fsync("A/g"),
                Op::Trim,
                Op::Sync,
                Op::Trim,
            ],
        ),
        (
            "overwritten and synced",
            vec![
                write(P("A/f"), 0, 4096, 61),
                fsync("A/f"),
                write(P("A/f"), 100, 5000, 62),
                datasync("A/f"),
                Op::SetMtime { path: P("A/f"), sec: 12345 },
                fsync("A/f"),
                write(P("A/f"), 8192, 800, 63),
                Op::SetMtime { path: P("A/f"), sec: 12346 },
                fsync("A/f"),
            ],
        ),
        (
            "overwritten under a commit",
            vec![
                write(P("A/f"), 0, 4096, 64),
                commit(),
                write(P("A/f"), 0, 8192, 65),
                fsync("A/f"),
                write(P("A/f"), 4000, 200, 66),
                Op::Commit { path: P("A"), checkpoint: true },
                write(P("A/f"), 0, 100, 67),
                fsync("A/f"),
            ],
        ),
        (
            "grown and synced, then overwritten",
            vec![append("A/f", 5000, 68), fsync("A/f"), write(P("A/f"), 8192, 4096, 69), fsync("A/f")],
        ),
        (
            "cut, overwritten, grown",
            vec![
                write(P("A/f"), 4096, 4904, 70),
                fsync("A/f"),
                cut(5000),
                write(P("A/f"), 4200, 700, 71),
                fsync("A/f"),
                commit(),
                write(P("A/f"), 4300, 700, 72),
                fsync("A/f"),
                cut(8192),
                fsync("A/f"),
                cut(9000),
                commit(),
                write(P("A/f"), 4096, 10, 73),
                fsync("A/f"),
            ],
        ),
        (
            "punched and overwritten",
            vec![
                falloc(FallocMode::PunchHole, 4096, 4096),
                write(P("A/f"), 0, 9000, 74),
                fsync("A/f"),
                write(P("A/f"), 0, 9000, 75),
                fsync("A/f"),
                commit(),
                write(P("A/f"), 0, 9000, 76),
                fsync("A/f"),
            ],
        ),
        (
            "cleaned and overwritten",
            vec![
                append("B/h", 30_000, 77),
                cut(0),
                append("A/f", 9000, 78),
                Op::Sync,
                write(P("A/f"), 0, 4096, 79),
                Op::Clean,
                write(P("A/f"), 0, 4096, 83),
                fsync("A/f"),
                Op::Clean,
                fsync("A/f"),
            ],
        ),
        (
            "synced, placed, overwritten",
            vec![
                append("A/f", 20_000, 84),
                fsync("A/f"),
                falloc(FallocMode::Allocate { keep_size: true }, 0, 4096),
                write(P("A/f"), 12_288, 4096, 85),
                fsync("A/f"),
            ],
        ),
        (
            "lives by overwrites",
            vec![
                append("A/f", 36_000, 86),
                commit(),
                write(P("A/f"), 4096, 4096, 87),
                fsync("A/f"),
                write(P("A/f"), 0, 45_000, 88),
                commit(),
                write(P("A/f"), 4000, 20_000, 89),
                write(P("B/h"), 0, 5000, 90),
                commit(),
                write(P("A/f"), 0, 45_000, 91),
                fsync("A/f"),
                write(P("A/f"), 0, 9000, 92),
                cut(5000),
                write(P("A/f"), 100, 4500, 93),
                commit(),
                write(P("A/f"), 0, 5000, 94),
                commit(),
                cut(9000),
                fsync("A/f"),
            ],
        ),
        (
            "lives by overwrites and is cleaned",
            vec![
                append("B/h", 30_000, 95),
                cut(0),
                append("A/f", 9000, 96),
                Op::Sync,
                write(P("A/f"), 0, 4096, 97),
                fsync("A/f"),
                write(P("A/f"), 4096, 4096, 98),
                Op::Clean,
                write(P("A/f"), 0, 8192, 99),
                commit(),
                write(P("A/f"), 100, 9000, 100),
                Op::Clean,
                fsync("A/f"),
            ],
        ),
        (
            "collapsed in place, written, inserted",
            vec![
                falloc(FallocMode::Allocate { keep_size: false }, 0, 40_000),
                write(P("A/f"), 0, 30_000, 58),
                fsync("A/f"),
                falloc(FallocMode::CollapseRange, 4096, 8192),
                write(P("A/f"), 4096, 9000, 59),
                fsync("A/f"),
                falloc(FallocMode::InsertRange, 8192, 4096),
                write(P("A/f"), 8192, 100, 60),
                Op::Truncate { at: Path(P("A/f")), size: 20_000 },
                Op::Sync,
            ],
        ),
        (
            "hidden, then synced under the new name",
            vec![fsync("A/f"), hide("A/f", "B/n"), append("B/n", 10, 101), fsync("B/n"), fsync("A/f")],
        ),
        (
            "hidden, and the whiteout taken by others",
            vec![hide("A/f", "B/n"), mv("B/h", "A/f"), fsync("A/f"), hide("A/f", "B/h"), fsync("B/h"), Op::Sync],
        ),
        (
            "hidden again and again",
            vec![hide("A/f", "B/n"), hide("B/n", "A/f"), hide("A/f", "B/h"), commit(), fsync("A"), fsync("B")],
        ),
        (
            "the whiteout is moved",
            vec![
                hide("A/f", "B/n"),
                mv("A/f", "B/w"),
                hide("B/w", "A/w"),
                fsync("A/w"),
                swap("B/w", "B/h"),
                fsync("B/h"),
            ],
        ),
        (
            "a directory is hidden, then files below",
            vec![
                hide("A/s", "B/s"),
                file(P("B/s/y")),
                fsync("B/s/y"),
                Op::Rmdir { path: P("A/e") },
                fsync("B/s"),
                fsync("A"),
            ],
        ),
        (
            "hidden over a directory, unlinked, made again",
            vec![hide("A/s", "B/k"), Op::Unlink { path: P("A/s") }, dir(P("A/s")), file(P("A/s/z")), fsync("A/s/z")],
        ),
        (
            // one of the two is of another domain
            "new, moved into new directories, hidden from there",
            vec![
                dir(P("B/d")),
                dir(P("B/e")),
                file(P("A/n")),
                file(P("A/p")),
                mv("A/n", "B/d/n"),
                mv("A/p", "B/e/p"),
                hide("B/d/n", "A/m"),
                hide("B/e/p", "A/q"),
                commit(),
                append("A/m", 10, 102),
                fsync("A/m"),
            ],
        ),
        (
            "new, hidden into new directories",
            vec![
                dir(P("B/d")),
                dir(P("B/e")),
                file(P("A/n")),
                file(P("A/p")),
                hide("A/n", "B/d/n"),
                hide("A/p", "B/e/p"),
                commit(),
                append("A/g", 10, 103),
                fsync("A/g"),
            ],
        ),
        (
            "lives by overwrites until an fsync brings new blocks",
            vec![
                append("A/f", 9000, 104),
                Op::Sync,
                write(P("A/f"), 0, 4096, 105),
                fsync("A/f"),
                append("A/f", 9000, 106),
                fsync("A/f"),
                commit(),
                write(P("A/f"), 100, 8000, 107),
                commit(),
                write(P("A/f"), 0, 9000, 108),
                fsync("A/f"),
            ],
        ),
        (
            // with and without a record beside what is overwritten, as the times are told before, after, or not at all
            "written back, and its times beside",
            vec![
                write_back(P("A/f"), 0, 4096, 104),
                times(P("A/f"), 1_700_000_001),
                together("A/f"),
                write_back(P("A/f"), 100, 5000, 105),
                together("A/f"),
                times(P("A/f"), 1_700_000_002),
                together("A/f"),
                times(P("A/f"), 1_700_000_003),
                write_back(P("A/f"), 4096, 4096, 106),
                Op::FsyncAs { at: Path(P("A/f")), data_only: true, way: SyncWay::Alone },
                together("A/f"),
                write_back(P("A/f"), 8192, 800, 107),
                times(P("A/f"), 1_700_000_004),
                write_back(P("A/f"), 0, 9000, 108),
                fsync("A/f"),
            ],
        ),
        (
            "written back beside commits",
            vec![
                write_back(P("A/f"), 0, 4096, 109),
                commit(),
                times(P("A/f"), 1_700_000_005),
                commit(),
                write_back(P("A/f"), 0, 8192, 110),
                together("A/f"),
                write_back(P("A/f"), 4000, 200, 111),
                times(P("A/f"), 1_700_000_006),
                commit(),
                together("A/f"),
                write_back(P("A/f"), 0, 100, 112),
                Op::Commit { path: P("A"), checkpoint: true },
                times(P("A/f"), 1_700_000_007),
                together("A/f"),
            ],
        ),
        (
            "new, written back, longer, cut, synced each time",
            vec![
                file(P("A/n")),
                write_back(P("A/n"), 0, 9000, 113),
                times(P("A/n"), 1_700_000_008),
                together("A/n"),
                write_back(P("A/n"), 8192, 9000, 114),
                together("A/n"),
                times(P("A/n"), 1_700_000_009),
                Op::SetAttr { at: Path(P("A/n")), set: SetAttr { size: Some(5000), ..set_times(1_700_000_010) } },
                write_back(P("A/n"), 4096, 904, 115),
                together("A/n"),
                Op::SetAttr { at: Path(P("A/n")), set: SetAttr { mode: Some(0o755), ..set_times(1_700_000_011) } },
                write_back(P("A/n"), 0, 4096, 116),
                together("A/n"),
            ],
        ),
        (
            "what took a name moves below a new directory",
            vec![
                file(P("A/tmp")),
                mv("A/tmp", "A/f"),
                dir(P("A/n")),
                dir(P("B/n")),
                mv("A/f", "A/n/moved"),
                file(P("B/tmp")),
                mv("B/tmp", "B/h"),
                mv("B/h", "B/n/moved"),
                commit(),
            ],
        ),
    ]
}
