//! When an operation may be told that there is no space: how often, by its kind, and only where there is little room.

use crate::ops::{At, Op, P, SLOTS, Slots, to_rust, walk_path};
use crate::sparse::PAGE;
use crate::subject::OnVolume;
use braidfs::{FallocMode, InodeNo, Volume};

/// Operations that need room for the same things.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Content is written.
    Write,
    /// Blocks are reserved, all of them before the first is taken, or moved.
    Reserve,
    /// A name comes, or goes elsewhere.
    Name,
    /// Attributes change, or the size.
    Attribute,
    /// Something goes.
    Free,
    /// What was promised before is done, or nothing is changed: there is always room for that.
    Never,
}

impl Kind {
    /// All of them, by their numbers.
    pub const ALL: [Self; 6] = [Self::Write, Self::Reserve, Self::Name, Self::Attribute, Self::Free, Self::Never];

    /// Of an operation.
    pub fn of(op: &Op) -> Self {
        match op {
            Op::Write { .. } | Op::WriteBack { .. } | Op::Append { .. } | Op::CopyRange { .. } => Self::Write,
            Op::Fallocate { mode: FallocMode::PunchHole, .. } => Self::Free,
            Op::Fallocate { .. } => Self::Reserve,
            Op::Create { .. } | Op::Symlink { .. } | Op::Link { .. } | Op::Rename { .. } => Self::Name,
            Op::Tmpfile { .. } | Op::LinkSlot { .. } => Self::Name,
            Op::SetMode { .. } | Op::SetOwner { .. } | Op::SetMtime { .. } | Op::SetXattr { .. } => Self::Attribute,
            Op::Truncate { .. } | Op::SetAttr { .. } => Self::Attribute,
            Op::Unlink { .. } | Op::Rmdir { .. } | Op::RemoveXattr { .. } => Self::Free,
            _ => Self::Never,
        }
    }
}

/// Blocks that may be available where an operation finds none: what it reserves for metadata beside what it writes, in each of the
/// two domains that it may change, and what `statfs` has not counted as taken since (see docs/architecture.md, What `df` says).
const SPARE: u64 = 64;
/// Numbers of inodes that are left to each domain for the blocks of its extents.
const NUMBERS: u64 = 64;

/// Whether an operation collapses or inserts a range.
pub fn moves_blocks(op: &Op) -> bool {
    matches!(op, Op::Fallocate { mode: FallocMode::CollapseRange | FallocMode::InsertRange, .. })
}

/// How many operations of each kind were done, and how many of them found no space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Full([(u64, u64); Kind::ALL.len()]);

impl Full {
    /// Counts an operation.
    pub fn add(&mut self, op: &Op, full: bool) {
        let (done, found_none) = &mut self.0[Kind::of(op) as usize];
        *done += 1;
        *found_none += u64::from(full);
    }

    /// Adds what another run counted.
    pub fn sum(&mut self, other: &Self) {
        for ((done, full), (d, f)) in self.0.iter_mut().zip(&other.0) {
            (*done, *full) = (*done + d, *full + f);
        }
    }

    /// Operations of a kind that were done, and that found no space.
    pub fn of(&self, kind: Kind) -> (u64, u64) {
        self.0[kind as usize]
    }

    /// Of each kind that `most` names at most one operation in so many found no space, of the others none.
    ///
    /// # Errors
    /// Of which kind more did.
    pub fn within(&self, most: &[(Kind, u64)]) -> Result<(), String> {
        for kind in Kind::ALL {
            let (done, full) = self.of(kind);
            let one_in = most.iter().find(|(k, _)| *k == kind).map(|(_, n)| *n);
            if one_in.map_or(full > 0, |n| full * n > done) {
                return Err(format!("{kind:?}: {full} of {done} found no space; at most one in {one_in:?} may"));
            }
        }
        Ok(())
    }

    /// Operations that found no space.
    pub fn total(&self) -> u64 {
        self.0.iter().map(|(_, full)| full).sum()
    }
}

/// The paths of an operation, and the open file.
fn names(op: &Op) -> (Vec<P>, Option<u8>) {
    let of = |at: At| match at {
        At::Path(p) => (vec![p], None),
        At::Slot(n) => (Vec::new(), Some(n)),
    };
    match *op {
        Op::Write { at, .. } | Op::Append { at, .. } | Op::Truncate { at, .. } | Op::Fallocate { at, .. } => of(at),
        Op::WriteBack { at, .. } | Op::SetAttr { at, .. } => of(at),
        Op::Link { from, to } | Op::Rename { from, to, .. } | Op::CopyRange { from, to, .. } => (vec![from, to], None),
        Op::Create { path, .. } | Op::Symlink { path, .. } | Op::Unlink { path } | Op::Rmdir { path } => {
            (vec![path], None)
        }
        Op::SetMode { path, .. } | Op::SetOwner { path, .. } | Op::SetMtime { path, .. } => (vec![path], None),
        Op::SetXattr { path, .. } | Op::RemoveXattr { path, .. } => (vec![path], None),
        Op::Tmpfile { dir, .. } => (vec![dir], None),
        Op::LinkSlot { slot, to } => (vec![to], Some(slot)),
        _ => (Vec::new(), None),
    }
}

/// The inodes that an operation is about, as far as they are there, and the directories of its names.
fn concerned(vol: &Volume, slots: &Slots<OnVolume<'_>>, op: &Op) -> Vec<InodeNo> {
    let (paths, slot) = names(op);
    let with_dirs = paths.into_iter().flat_map(|p| [p, p.split().0]);
    let found = with_dirs.filter_map(|p| walk_path(&mut OnVolume::among_others(vol), p).ok()).map(|k| k.0);
    let open = slot.and_then(|n| slots[usize::from(n) % SLOTS].as_ref()).map(|f| f.0.ino());
    found.chain(open).collect()
}

/// Blocks of content that an operation asks for at most.
fn asked(op: &Op) -> u64 {
    let pages = |off: u64, len: u64| (off % PAGE as u64 + len).div_ceil(PAGE as u64);
    match *op {
        Op::Write { off, len, .. } | Op::WriteBack { off, len, .. } => pages(off, len.into()),
        // wherever it begins
        Op::Append { len, .. } => pages(PAGE as u64 - 1, len.into()),
        Op::CopyRange { to_off, len, .. } => pages(to_off, len),
        Op::Fallocate { off, len, .. } => pages(off, len),
        _ => 1,
    }
}

/// Judges an operation that was told that there is no space: of none that keeps a promise, and of others where `statfs` of what
/// they are about shows less than they ask for and [`SPARE`] blocks, or hardly a number of an inode.
///
/// # Errors
/// What room there is.
pub fn little_room(vol: &Volume, slots: &Slots<OnVolume<'_>>, op: &Op) -> Result<(), String> {
    let (kind, all) = (Kind::of(op), vol.statfs());
    let about = concerned(vol, slots, op).into_iter().filter_map(|i| Some(vol.statfs_of(i).ok()?.available));
    let available = about.min().unwrap_or(all.available);
    let little = available < asked(op) + SPARE || all.inodes_free < NUMBERS;
    if kind != Kind::Never && little {
        return Ok(());
    }
    Err(format!("{}: no space, with {available} blocks available of {all:?}", to_rust(op)))
}
