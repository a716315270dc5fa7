//! What the replay of a domain's journal leaves for the volume to do.

use crate::cell::Cell;
use crate::types::*;
use braidfs_format::inode::{Inode, Link};
use braidfs_format::node::NodeRecord;
use std::sync::Arc;

/// A directory entry that a replayed transaction changed: of another domain than its inode, or of an inode whose fate depends on
/// one of another domain.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Hint {
    /// Number of the directory.
    pub dir: InodeNo,
    /// The name in it.
    pub name: Box<[u8]>,
    /// The inode that it names or named.
    pub child: InodeRef,
}

/// A name that an inode had by a roll-forward record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// Number of the inode.
    pub ino: InodeNo,
    /// Directory and name that it says to have.
    pub link: Link,
    /// When it got its names, in logical time.
    pub seq: u64,
}

/// An inode that was rolled forward: its links before and after are to be compared.
#[derive(Debug)]
pub struct Forwarded {
    /// The cell, already in the recovery transaction.
    pub cell: Arc<Cell>,
    /// Its committed links.
    pub old_links: Vec<Link>,
    /// The directory of its first link; 0 without one.
    pub parent: InodeNo,
    /// When it got its names, in logical time.
    pub named: u64,
    /// It is a directory.
    pub is_dir: bool,
}

/// The newest roll-forward records of an inode.
#[derive(Debug)]
pub struct Forward {
    /// Its own, without the payload.
    pub record: NodeRecord,
    /// What the payload is.
    pub inode: Inode,
    /// Its overflow nodes'.
    pub overflow: Vec<NodeRecord>,
}

/// What replay leaves for the volume to do.
#[derive(Debug, Default)]
pub struct Recovered {
    /// The domain was not unmounted properly.
    pub dirty: bool,
    /// Committed transactions that were replayed.
    pub transactions: usize,
    /// Traces of the crash in the journal that might be damage.
    pub traces: Vec<String>,
    /// Entries and inodes of other domains to compare.
    pub hints: Vec<Hint>,
    /// Inodes replayed with a parent in another domain.
    pub remote: Vec<InodeNo>,
    /// Unlinked but open when it stopped.
    pub orphans: Vec<InodeNo>,
    /// Names that rolled-forward inodes once had durably, also where a later record moved them on: whoever claims such a
    /// name by an older record lost it.
    pub claims: Vec<Claim>,
    /// Roll-forward records, by inode.
    pub(super) forward: Vec<Forward>,
}

/// Roll-forward records of a domain that are worth a thread.
const MUCH: usize = 16;

impl Recovered {
    /// The roll-forward records, for [`Domain::roll_forward`](super::Domain::roll_forward).
    pub fn take_forward(&mut self) -> Vec<Forward> {
        std::mem::take(&mut self.forward)
    }

    /// Whether there are many of them.
    pub fn has_much(&self) -> bool {
        self.forward.len() >= MUCH
    }
}
