//! What is being done when power fails: after ACE (Mohan et al., "Finding Crash-Consistency Bugs with Bounded Black-Box
//! Crash Testing", OSDI 2018), all sequences of one and two operations over a few objects, each operation followed by
//! every kind of sync or none.
//!
//! The directories `A` and `B` lie in different domains, so that most sequences cross domains.

use crate::crash::states::final_image;
use crate::model::{Ino, Model};
use crate::ops::{At, Op, P};
use crate::run::{Runner, Setup};
use crate::subject::Key;
use At::{Path, Slot};
use braidfs::{FallocMode, FileKind, Placement, RenameMode, XattrMode};
use braidfs_device::Image;
use std::collections::BTreeMap;

/// A volume to begin with.
pub struct Base {
    /// How it was made.
    pub setup: Setup,
    /// Its content.
    pub image: Image,
    /// What is on it.
    pub model: Model,
    /// Which inode is which.
    pub keys: BTreeMap<Ino, Key>,
    /// For messages.
    pub name: String,
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

/// A small volume with the files of the workload. `dirty`: it was not unmounted, so that everything is in its journals.
///
/// # Errors
/// Of any operation.
pub fn base(placement: Placement, dirty: bool) -> Result<Base, String> {
    let mut setup = Setup { bytes: 24 << 20, ..Setup::default() };
    setup.mkfs.domains = Some(2);
    setup.mkfs.mlogs = Some(1);
    setup.mkfs.placement = placement;
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
    if !dirty {
        r.remount()?;
    }
    let name = format!("placement {placement:?}, {}", if dirty { "in the journal" } else { "unmounted" });
    Ok(Base { image: final_image(r.device()), model: r.model.clone(), keys: r.keys().clone(), setup, name })
}

fn domain(r: &Runner, name: &str) -> Result<u16, String> {
    let v = r.volume()?;
    let a = v.lookup(braidfs::NodeId::ROOT, name.as_bytes()).map_err(|e| e.to_string())?;
    v.domain_of(a.ino).map(|d| d.0).map_err(|e| e.to_string())
}

/// What is done as one of the sequence's operations, and what may be synced behind it.
#[derive(Clone, Debug)]
pub struct Basic {
    ops: Vec<Op>,
    file: Option<P>,
    dirs: Vec<P>,
}

fn one(op: Op, file: P) -> Basic {
    Basic { ops: vec![op], file: Some(file), dirs: vec![file.split().0] }
}

fn rename(from: P, to: P, mode: RenameMode) -> Basic {
    let mut dirs = vec![to.split().0];
    if from.split().0 != dirs[0] {
        dirs.push(from.split().0);
    }
    Basic { ops: vec![Op::Rename { from, to, mode }], file: Some(to), dirs }
}

fn gone(op: Op, path: P) -> Basic {
    Basic { ops: vec![op], file: None, dirs: vec![path.split().0] }
}

/// The operations of the workload.
pub fn basics() -> Vec<Basic> {
    let f = P("A/f");
    let (replace, exchange) = (RenameMode::Replace, RenameMode::Exchange);
    let falloc = |mode, off, len| one(Op::Fallocate { at: Path(f), mode, off, len }, f);
    let unlink = |path| gone(Op::Unlink { path }, path);
    let rmdir = |path| gone(Op::Rmdir { path }, path);
    let xattr = |len, seed| one(Op::SetXattr { path: f, name: P("user.a"), len, seed, mode: XattrMode::Set }, f);
    let mut all = vec![
        one(file(P("A/n")), P("A/n")),
        one(file(P("B/n")), P("B/n")),
        one(dir(P("A/m")), P("A/m")),
        one(Op::Symlink { path: P("A/y"), target: P("f") }, P("A/y")),
        one(write(f, 0, 4096, 11), f),
        one(write(f, 1000, 6000, 12), f),
        one(write(P("A/g"), 10, 20, 13), P("A/g")),
        one(Op::Append { at: Path(f), len: 5000, seed: 14 }, f),
        one(Op::Append { at: Path(P("A/n")), len: 300, seed: 15 }, P("A/n")),
        one(Op::Append { at: Path(P("B/h")), len: 10, seed: 16 }, P("B/h")),
        one(Op::Truncate { at: Path(f), size: 100 }, f),
        one(Op::Truncate { at: Path(f), size: 20_000 }, f),
        one(Op::Truncate { at: Path(P("A/g")), size: 0 }, P("A/g")),
        one(Op::Link { from: f, to: P("A/l") }, P("A/l")),
        one(Op::Link { from: f, to: P("B/l") }, P("B/l")),
        rename(f, P("A/r"), replace),
        rename(f, P("B/n"), replace),
        rename(f, P("A/g"), replace),
        rename(f, P("B/h"), replace),
        rename(P("B/h"), f, replace),
        rename(P("B/n"), P("B/h"), replace),
        rename(P("A/e"), P("A/m"), replace),
        rename(P("A/e"), P("B/k"), replace),
        rename(P("A/s"), P("B/k"), replace),
        rename(P("A/s"), P("B/s"), replace),
        rename(P("A"), P("B/A"), replace),
        rename(P("B"), P("A/e/B"), replace),
        rename(f, P("B/h"), exchange),
        rename(f, P("A/g"), exchange),
        rename(P("A/s"), P("B/k"), exchange),
        rename(P("A/s"), P("B/h"), exchange),
        unlink(f),
        unlink(P("A/g")),
        unlink(P("B/h")),
        unlink(P("A/s/x")),
        rmdir(P("A/e")),
        rmdir(P("B/k")),
        rmdir(P("A/s")),
        xattr(20, 21),
        xattr(3000, 22),
        one(Op::SetMode { path: f, mode: 0o600 }, f),
        one(Op::SetMode { path: P("A"), mode: 0o700 }, P("A")),
        falloc(FallocMode::Allocate { keep_size: true }, 8192, 40_000),
        falloc(FallocMode::Allocate { keep_size: false }, 0, 40_000),
        falloc(FallocMode::PunchHole, 0, 4096),
        falloc(FallocMode::PunchHole, 100, 6000),
        falloc(FallocMode::ZeroRange { keep_size: true }, 100, 8000),
        one(Op::CopyRange { from: P("B/h"), from_off: 0, to: f, to_off: 100, len: 5000 }, f),
    ];
    let mut tmpfile = one(Op::Tmpfile { dir: P("A"), slot: 0 }, P("B/t"));
    tmpfile.ops.push(Op::Write { at: Slot(0), off: 0, len: 4500, seed: 30 });
    tmpfile.ops.push(Op::LinkSlot { slot: 0, to: P("B/t") });
    all.push(tmpfile);
    let mut orphan = gone(Op::Open { path: f, slot: 1 }, f);
    orphan.ops.push(Op::Unlink { path: f });
    orphan.ops.push(Op::Append { at: Slot(1), len: 100, seed: 31 });
    all.push(orphan);
    let mut again = one(Op::Unlink { path: f }, f);
    again.ops.push(file(f));
    again.ops.push(write(f, 0, 200, 32));
    all.push(again);
    all
}

/// The syncs that may follow: none first.
fn followed(b: &Basic) -> Vec<Vec<Op>> {
    let fsync = |p: P, data_only| Op::Fsync { at: Path(p), data_only };
    let mut out = vec![vec![], vec![Op::Sync], vec![fsync(P("A/g"), false)]];
    if let Some(f) = b.file {
        out.push(vec![fsync(f, false)]);
        out.push(vec![fsync(f, true)]);
    }
    out.extend(b.dirs.iter().map(|d| vec![fsync(*d, false)]));
    out.into_iter().map(|then| b.ops.iter().cloned().chain(then).collect()).collect()
}

/// All sequences of `length` (1 or 2) operations.
pub fn sequences(length: usize) -> Vec<Vec<Op>> {
    let single: Vec<Vec<Op>> = basics().iter().flat_map(followed).collect();
    if length < 2 {
        return single;
    }
    single.iter().flat_map(|a| single.iter().map(move |b| a.iter().chain(b).cloned().collect())).collect()
}
