//! Names that inodes left by a rename which may not be durable yet.
//!
//! Until that rename is durable, a crash brings the inode back under its old name. A newcomer to the name, or the end of
//! the directory, must therefore not become durable before it: of two inodes that claim a name recovery keeps the later
//! one, and the earlier would lose the only name that it has. Whoever takes a name asks here first.
//!
//! Lock rank: leaf.

use crate::types::*;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};

/// By directory, then by name: the domain and transaction of the rename.
type Names = HashMap<NodeId, HashMap<Box<[u8]>, (DomainId, TxId)>>;

/// See the module.
#[derive(Debug, Default)]
pub struct LeftNames {
    names: Mutex<Names>,
    /// Directories in `names`: most look-ups find nothing and write nothing.
    dirs: AtomicUsize,
}

impl LeftNames {
    /// An inode of `domain` left `dir/name` in `tx`.
    pub fn add(&self, dir: NodeId, name: &[u8], domain: DomainId, tx: TxId) {
        let mut all = self.names.lock();
        all.entry(dir).or_default().insert(name.into(), (domain, tx));
        self.dirs.store(all.len(), Ordering::Release);
    }

    /// Who left this name last.
    pub fn get(&self, dir: NodeId, name: &[u8]) -> Option<(DomainId, TxId)> {
        if self.dirs.load(Ordering::Acquire) == 0 {
            return None;
        }
        self.names.lock().get(&dir)?.get(name).copied()
    }

    /// Everybody who left this directory.
    pub fn of_dir(&self, dir: NodeId) -> Vec<(DomainId, TxId)> {
        if self.dirs.load(Ordering::Acquire) == 0 {
            return Vec::new();
        }
        self.names.lock().get(&dir).map_or_else(Vec::new, |n| n.values().copied().collect())
    }

    /// Forgets renames that are durable.
    pub fn prune(&self, durable: impl Fn(DomainId, TxId) -> bool) {
        if self.dirs.load(Ordering::Acquire) == 0 {
            return;
        }
        let mut all = self.names.lock();
        all.retain(|_, names| {
            names.retain(|_, (d, t)| !durable(*d, *t));
            !names.is_empty()
        });
        self.dirs.store(all.len(), Ordering::Release);
    }
}
