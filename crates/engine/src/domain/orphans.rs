//! Inodes without a name that wait for their end.

use crate::types::InodeNo;
use braidfs_sync::slots::Line;
use braidfs_sync::{Mutex, rank};
use foldhash::fast::RandomState;
use std::collections::HashSet;
use std::sync::atomic::{
    AtomicU64, AtomicUsize,
    Ordering::{Acquire, Release},
};

/// Those of a domain. Whoever adds or takes away an inode has its cell locked. Lock rank: leaf.
#[derive(Debug, Default)]
pub struct Orphans {
    set: Mutex<HashSet<InodeNo, RandomState>, rank::Orphans>,
    /// How many there are: who deletes an inode that was never one mostly writes nothing.
    len: Line<AtomicUsize>,
    /// Replaced ones that have been deleted since the mount, behind the commits that they waited for.
    replaced_gone: Line<AtomicU64>,
}

impl Orphans {
    /// Adds an inode, once.
    pub fn insert(&self, ino: InodeNo) {
        let mut set = self.set.lock();
        set.insert(ino);
        self.len.store(set.len(), Release);
    }
    /// Adds inodes that have lost their last name.
    pub fn extend(&self, inos: impl IntoIterator<Item = InodeNo>) {
        let mut set = self.set.lock();
        set.extend(inos);
        self.len.store(set.len(), Release);
    }
    /// Takes an inode away, if it is there.
    pub fn remove(&self, ino: InodeNo) {
        if self.is_empty() {
            return; // others come and go, not this one
        }
        let mut set = self.set.lock();
        set.remove(&ino);
        self.len.store(set.len(), Release);
    }
    /// Whether an inode is there.
    pub fn contains(&self, ino: InodeNo) -> bool {
        !self.is_empty() && self.set.lock().contains(&ino)
    }
    /// How many there are.
    pub fn len(&self) -> usize {
        self.len.load(Acquire)
    }
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// How many that were replaced are gone so far. Who asks before an attempt, and meets a limit of the domain then, knows whether
    /// another thread has ended what was in the way.
    pub fn replaced_gone(&self) -> u64 {
        self.replaced_gone.load(Acquire)
    }
    /// One more.
    pub fn note_replaced_gone(&self) {
        self.replaced_gone.fetch_add(1, Release);
    }
    /// All, in no order.
    pub fn list(&self) -> Vec<InodeNo> {
        self.set.lock().iter().copied().collect()
    }
}
