//! Vacated names: those that inodes left by a rename or unlink which may not be durable yet.
//!
//! Until that is durable, a crash brings the inode back under its old name. Where the inode lives on by another name, a
//! newcomer to the name, or the end of the directory, must not become durable before it: of two inodes that claim a name
//! recovery keeps the later one, and the earlier would lose the only name that it durably has. Where the inode is gone,
//! an fsync of the newcomer makes that durable too: else the name could come back to it when the newcomer moves on.
//! Whoever takes a name asks here first; the rule is [`take_name`](super::rules::take_name).
//!
//! Lock rank: leaf.

use crate::braid::frontier::Frontier;
use crate::types::*;
use braidfs_format::geometry::NODES_PER_BLOCK;
use braidfs_format::name::FileName;
use braidfs_sync::slots::Line;
use braidfs_sync::{Mutex, rank};
use foldhash::fast::RandomState;
use smallvec::{SmallVec, smallvec};
use std::collections::HashMap;
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// By directory, then by name: the latest inode of each domain that left it.
type Names = HashMap<InodeNo, HashMap<FileName, VacatedList, RandomState>, RandomState>;

/// Who left one name, at most one inode of each domain: mostly one.
pub type VacatedList = SmallVec<[Vacated; 1]>;

/// Who left a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Vacated {
    /// Domain of the inode.
    pub domain: DomainId,
    /// Transaction in which the name was given up.
    pub tx: TxId,
    /// It lives on by another name, or is a directory that something moved out of.
    pub alive: bool,
}

/// Parts of each table, a power of two. Directories made one after the other have one each.
const PARTS: u64 = 64;

/// See the module.
#[derive(Debug)]
pub struct VacatedNames {
    /// Vacated names, by hash of their directory, each part on a line of its own.
    parts: Box<[Line<Part>]>,
    /// Names of directories that several threads change at the same time, by directory and name.
    shared: Box<[Line<Part>]>,
    /// Whether there was ever one of these.
    any_shared: Line<AtomicBool>,
    hasher: RandomState,
}

/// The names of some directories.
#[derive(Debug, Default)]
struct Part {
    names: Mutex<Names, rank::VacatedNames>,
    /// A bit for each directory in `names`, perhaps the same for two: most look-ups find nothing and write nothing.
    dirs: AtomicU64,
}

impl Default for VacatedNames {
    fn default() -> Self {
        let parts = || (0..PARTS).map(|_| Line::default()).collect();
        Self { parts: parts(), shared: parts(), any_shared: Line::default(), hasher: RandomState::default() }
    }
}

impl VacatedNames {
    fn part(&self, dir: InodeNo) -> &Part {
        // directories that threads make are one after the other, or in table blocks of the threads' own
        &self.parts[((dir.0 ^ (dir.0 / u64::from(NODES_PER_BLOCK))) % PARTS) as usize]
    }

    fn shared_part(&self, dir: InodeNo, name: &[u8]) -> &Part {
        &self.shared[(self.hasher.hash_one((dir, name)) % PARTS) as usize]
    }

    /// An inode left `dir/name`. Who took it over from another one of its domain and left it again stands for both.
    pub fn add(&self, dir: InodeNo, name: &[u8], left: Vacated) {
        self.part(dir).add(dir, name, left);
    }

    /// [`Self::add`] of a directory that several threads change at the same time.
    pub fn add_shared(&self, dir: InodeNo, name: &[u8], left: Vacated) {
        if !self.any_shared.load(Ordering::Relaxed) {
            self.any_shared.store(true, Ordering::Relaxed);
        }
        self.shared_part(dir, name).add(dir, name, left);
    }

    /// Who left this name.
    pub fn get(&self, dir: InodeNo, name: &[u8]) -> VacatedList {
        let mut all = self.part(dir).get(dir, name);
        // which of both the directory was when they left may have changed since; who left this name did so under a lock that
        // the caller has
        if self.any_shared.load(Ordering::Relaxed) {
            all.extend(self.shared_part(dir, name).get(dir, name));
        }
        all
    }

    /// Everybody who left this directory and lives on.
    pub fn of_dir(&self, dir: InodeNo) -> Frontier {
        let mut all = self.part(dir).of_dir(dir);
        // whoever left it did so under a lock that the caller has had since, or asks again under it
        if self.any_shared.load(Ordering::Relaxed) {
            self.shared.iter().for_each(|p| all.merge(&p.of_dir(dir)));
        }
        all
    }

    /// Forgets renames that are durable.
    pub fn prune(&self, durable: impl Fn(DomainId, TxId) -> bool) {
        self.parts.iter().chain(&self.shared).for_each(|p| p.prune(&durable));
    }
}

impl Part {
    fn add(&self, dir: InodeNo, name: &[u8], left: Vacated) {
        let mut all = self.names.lock();
        let names = all.entry(dir).or_default();
        match names.get_mut(name) {
            Some(old) => match old.iter_mut().find(|o| o.domain == left.domain) {
                Some(o) => {
                    debug_assert!(o.tx <= left.tx, "{o:?}, then {left:?}");
                    *o = Vacated { alive: left.alive || o.alive, ..left };
                }
                None => old.push(left),
            },
            None => {
                names.insert(name.into(), smallvec![left]);
            }
        }
        if !self.may_have(dir) {
            self.dirs.fetch_or(bit(dir), Ordering::Release);
        }
    }

    fn get(&self, dir: InodeNo, name: &[u8]) -> VacatedList {
        if !self.may_have(dir) {
            return VacatedList::new();
        }
        self.names.lock().get(&dir).and_then(|n| n.get(name)).cloned().unwrap_or_default()
    }

    fn of_dir(&self, dir: InodeNo) -> Frontier {
        if !self.may_have(dir) {
            return Frontier::EMPTY;
        }
        let names = self.names.lock();
        let left =
            names.get(&dir).map(|n| n.values().flatten().filter(|l| l.alive).map(|l| (l.domain, l.tx)).collect());
        left.unwrap_or(Frontier::EMPTY)
    }

    fn prune(&self, durable: impl Fn(DomainId, TxId) -> bool) {
        if self.is_empty() {
            return;
        }
        let mut all = self.names.lock();
        all.retain(|_, names| {
            names.retain(|_, all| {
                all.retain(|l| !durable(l.domain, l.tx));
                !all.is_empty()
            });
            !names.is_empty()
        });
        self.dirs.store(all.keys().fold(0, |bits, dir| bits | bit(*dir)), Ordering::Release);
    }

    fn is_empty(&self) -> bool {
        self.dirs.load(Ordering::Acquire) == 0
    }
    fn may_have(&self, dir: InodeNo) -> bool {
        self.dirs.load(Ordering::Acquire) & bit(dir) != 0
    }
}

/// The bit of a directory in [`Part::dirs`]. Those of one part are spread.
fn bit(dir: InodeNo) -> u64 {
    1 << (dir.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58)
}
