//! Numbers of removed directories, which nobody gets as long as something durable may name them as a parent.
//!
//! That is until a checkpoint, which has seen to what other domains have of the same transactions. Where one of these has failed, it
//! takes back what it had not committed, and what hung in a directory then is there again: the number is nobody's in this mount. A
//! directory that was made behind all such failures is in no durable state of a domain that has failed, and its number comes back.

use crate::types::InodeNo;
use foldhash::fast::RandomState;
use std::collections::HashSet;

/// Of a domain.
#[derive(Debug, Default)]
pub(super) struct Quarantine {
    /// Of directories whose removal is committed.
    removed: Vec<InodeNo>,
    /// Of directories made since a checkpoint last passed the failure of another domain, in this mount or before it.
    made: HashSet<InodeNo, RandomState>,
}

impl Quarantine {
    /// How many are taken until the next checkpoint.
    pub fn len(&self) -> usize {
        self.removed.len()
    }

    /// A directory was removed.
    pub fn add(&mut self, ino: InodeNo) {
        self.removed.push(ino);
    }

    /// A directory is made, behind a failure.
    pub fn note_made(&mut self, ino: InodeNo) {
        self.made.insert(ino);
    }

    /// Those that a checkpoint takes on.
    pub fn take(&mut self) -> Vec<InodeNo> {
        std::mem::take(&mut self.removed)
    }

    /// A checkpoint passes a failure: something may have hung in these directories that is durable in the domain that failed.
    pub fn pass_failure(&mut self) {
        self.made.clear();
    }

    /// Leaves those whose directories were made behind all failures.
    pub fn retain_made(&mut self, quarantined: &mut Vec<InodeNo>) {
        quarantined.retain(|ino| self.made.remove(ino));
    }

    /// No domain takes anything back any more.
    pub fn forget_made(&mut self) {
        self.made = HashSet::default();
    }
}
