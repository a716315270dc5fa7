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
use braidfs_format::name::FileName;
use braidfs_sync::slots::Line;
use braidfs_sync::{Mutex, rank};
use foldhash::fast::RandomState;
use smallvec::{SmallVec, smallvec};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};

/// By directory, then by name: the latest inode of each domain that left it.
type Names = HashMap<NodeId, HashMap<FileName, VacatedList, RandomState>, RandomState>;

/// Mostly one.
pub type VacatedList = SmallVec<[Vacated; 1]>;

/// Who left a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Vacated {
    /// Domain of the inode.
    pub domain: DomainId,
    /// Its transaction.
    pub tx: TxId,
    /// It lives on by another name, or is a directory that something moved out of.
    pub alive: bool,
}

/// Parts of the table, a power of two. Directories made one after the other have one each.
const PARTS: u64 = 64;

/// See the module.
#[derive(Debug)]
pub struct VacatedNames {
    parts: Box<[Line<Part>]>,
}

/// The names of some directories.
#[derive(Debug, Default)]
struct Part {
    names: Mutex<Names, rank::VacatedNames>,
    /// Directories in `names`: most look-ups find nothing and write nothing.
    dirs: AtomicUsize,
}

impl Default for VacatedNames {
    fn default() -> Self {
        Self { parts: (0..PARTS).map(|_| Line::default()).collect() }
    }
}

impl VacatedNames {
    fn part(&self, dir: NodeId) -> &Part {
        &self.parts[(dir.0 % PARTS) as usize]
    }

    /// An inode left `dir/name`. Who took it over from another one of its domain and left it again stands for both.
    pub fn add(&self, dir: NodeId, name: &[u8], left: Vacated) {
        let part = self.part(dir);
        let mut all = part.names.lock();
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
        part.note(&all);
    }

    /// Who left this name.
    pub fn get(&self, dir: NodeId, name: &[u8]) -> VacatedList {
        let part = self.part(dir);
        if part.is_empty() {
            return VacatedList::new();
        }
        part.names.lock().get(&dir).and_then(|n| n.get(name)).cloned().unwrap_or_default()
    }

    /// Everybody who left this directory and lives on.
    pub fn of_dir(&self, dir: NodeId) -> Frontier {
        let part = self.part(dir);
        if part.is_empty() {
            return Frontier::EMPTY;
        }
        let names = part.names.lock();
        let left =
            names.get(&dir).map(|n| n.values().flatten().filter(|l| l.alive).map(|l| (l.domain, l.tx)).collect());
        left.unwrap_or(Frontier::EMPTY)
    }

    /// Forgets renames that are durable.
    pub fn prune(&self, durable: impl Fn(DomainId, TxId) -> bool) {
        for part in self.parts.iter().filter(|p| !p.is_empty()) {
            let mut all = part.names.lock();
            all.retain(|_, names| {
                names.retain(|_, all| {
                    all.retain(|l| !durable(l.domain, l.tx));
                    !all.is_empty()
                });
                !names.is_empty()
            });
            part.note(&all);
        }
    }
}

impl Part {
    fn is_empty(&self) -> bool {
        self.dirs.load(Ordering::Acquire) == 0
    }
    fn note(&self, names: &Names) {
        self.dirs.store(names.len(), Ordering::Release);
    }
}
