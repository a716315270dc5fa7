//! Names that inodes left by a rename or unlink which may not be durable yet.
//!
//! Until that is durable, a crash brings the inode back under its old name. Where the inode lives on by another name, a
//! newcomer to the name, or the end of the directory, must not become durable before it: of two inodes that claim a name
//! recovery keeps the later one, and the earlier would lose the only name that it durably has. Where the inode is gone,
//! an fsync of the newcomer makes that durable too: else the name could come back to it when the newcomer moves on.
//! Whoever takes a name asks here first.
//!
//! Lock rank: leaf.

use crate::types::*;
use foldhash::fast::RandomState;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};

/// By directory, then by name.
type Names = HashMap<NodeId, HashMap<Box<[u8]>, Left, RandomState>, RandomState>;

/// Who left a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Left {
    /// Domain of the inode.
    pub domain: DomainId,
    /// Its transaction.
    pub tx: TxId,
    /// It lives on by another name, or is a directory that something moved out of.
    pub alive: bool,
}

/// See the module.
#[derive(Debug, Default)]
pub struct LeftNames {
    names: Mutex<Names>,
    /// Directories in `names`: most look-ups find nothing and write nothing.
    dirs: AtomicUsize,
}

impl LeftNames {
    /// An inode left `dir/name`. Who took it over from another one of its domain and left it again stands for both.
    pub fn add(&self, dir: NodeId, name: &[u8], mut left: Left) {
        let mut all = self.names.lock();
        let names = all.entry(dir).or_default();
        if let Some(old) = names.get_mut(name) {
            left.alive |= old.alive && old.domain == left.domain;
            *old = left;
        } else {
            names.insert(name.into(), left);
        }
        self.dirs.store(all.len(), Ordering::Release);
    }

    /// Who left this name last.
    pub fn get(&self, dir: NodeId, name: &[u8]) -> Option<Left> {
        if self.dirs.load(Ordering::Acquire) == 0 {
            return None;
        }
        self.names.lock().get(&dir)?.get(name).copied()
    }

    /// Everybody who left this directory and lives on.
    pub fn of_dir(&self, dir: NodeId) -> Vec<(DomainId, TxId)> {
        if self.dirs.load(Ordering::Acquire) == 0 {
            return Vec::new();
        }
        self.names
            .lock()
            .get(&dir)
            .map_or_else(Vec::new, |n| n.values().filter(|l| l.alive).map(|l| (l.domain, l.tx)).collect())
    }

    /// Forgets renames that are durable.
    pub fn prune(&self, durable: impl Fn(DomainId, TxId) -> bool) {
        if self.dirs.load(Ordering::Acquire) == 0 {
            return;
        }
        let mut all = self.names.lock();
        all.retain(|_, names| {
            names.retain(|_, l| !durable(l.domain, l.tx));
            !names.is_empty()
        });
        self.dirs.store(all.len(), Ordering::Release);
    }
}
