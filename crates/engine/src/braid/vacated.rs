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
use braidfs_sync::{Mutex, rank};
use foldhash::fast::RandomState;
use smallvec::{SmallVec, smallvec};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};

/// By directory, then by name: the latest inode of each domain that left it.
type Names = HashMap<NodeId, HashMap<FileName, Leavers, RandomState>, RandomState>;

/// Mostly one.
pub type Leavers = SmallVec<[Vacated; 1]>;

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

/// See the module.
#[derive(Debug, Default)]
pub struct VacatedNames {
    names: Mutex<Names, rank::VacatedNames>,
    /// Directories in `names`: most look-ups find nothing and write nothing.
    dirs: AtomicUsize,
}

impl VacatedNames {
    /// An inode left `dir/name`. Who took it over from another one of its domain and left it again stands for both.
    pub fn add(&self, dir: NodeId, name: &[u8], left: Vacated) {
        let mut all = self.names.lock();
        let names = all.entry(dir).or_default();
        match names.get_mut(name) {
            Some(old) => match old.iter_mut().find(|o| o.domain == left.domain) {
                Some(o) => *o = Vacated { alive: left.alive || o.alive, ..left },
                None => old.push(left),
            },
            None => {
                names.insert(name.into(), smallvec![left]);
            }
        }
        self.dirs.store(all.len(), Ordering::Release);
    }

    /// Who left this name.
    pub fn get(&self, dir: NodeId, name: &[u8]) -> Leavers {
        if self.dirs.load(Ordering::Acquire) == 0 {
            return Leavers::new();
        }
        self.names.lock().get(&dir).and_then(|n| n.get(name)).cloned().unwrap_or_default()
    }

    /// Everybody who left this directory and lives on.
    pub fn of_dir(&self, dir: NodeId) -> Frontier {
        if self.dirs.load(Ordering::Acquire) == 0 {
            return Frontier::EMPTY;
        }
        self.names
            .lock()
            .get(&dir)
            .map_or(Frontier::EMPTY, |n| n.values().flatten().filter(|l| l.alive).map(|l| (l.domain, l.tx)).collect())
    }

    /// Forgets renames that are durable.
    pub fn prune(&self, durable: impl Fn(DomainId, TxId) -> bool) {
        if self.dirs.load(Ordering::Acquire) == 0 {
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
        self.dirs.store(all.len(), Ordering::Release);
    }
}
