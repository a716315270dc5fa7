//! The most blocks that a domain may use, of those that it has.
//!
//! What the domain has beyond its limit is withheld from the account, so that ordinary reservations end at the limit as
//! they would at the domain's last block: at the same one with any number of threads. Deletions may use what is withheld,
//! as they may use what is kept back. The limit counts blocks in use and reserved ones, data and metadata; the group's own
//! tables and the journal are none of them.
//!
//! What internal work writes elsewhere, and what is overwritten, may use what is withheld for as long as the old blocks are
//! not free. And what a front end accepted before the limit went down is *promised*: it may go beyond the limit, up to
//! where the limit was, until the front end says that it holds no more of it.
//!
//! The limit, the number of blocks and what is withheld change under the lock of the group table, or while the domain is
//! opened. Others read them.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};

/// See the module.
#[derive(Debug)]
pub(super) struct Limit {
    pub hard: AtomicU64,
    /// Blocks that the account does not tell of.
    pub withheld: AtomicI64,
    /// Blocks of groups that were closed, and are counted still.
    pub leaving: AtomicU64,
    /// Unused blocks of groups that give none out for long, as the volume has counted them last.
    pub shut: AtomicU64,
    /// As many as the domain uses, while it must have no more whatever its limit is; else the highest number.
    pub crowd: AtomicU64,
    /// Blocks beyond the limit that may have been promised before it went down.
    pub promised: AtomicU64,
    /// How often the limit was changed.
    pub changes: AtomicU64,
}

impl Default for Limit {
    fn default() -> Self {
        Self {
            hard: AtomicU64::new(u64::MAX),
            withheld: AtomicI64::new(0),
            leaving: AtomicU64::new(0),
            shut: AtomicU64::new(0),
            crowd: AtomicU64::new(u64::MAX),
            promised: AtomicU64::new(0),
            changes: AtomicU64::new(0),
        }
    }
}

impl Limit {
    /// Of so many blocks.
    pub fn withheld_of(&self, total: u64) -> i64 {
        // what is kept back is so by all blocks
        let usable = total.saturating_sub(kept_back(total + self.shut.load(Relaxed)));
        usable.saturating_sub(self.most()) as i64
    }

    /// Blocks that may be in use at most.
    pub fn most(&self) -> u64 {
        self.hard.load(Relaxed).min(self.crowd.load(Relaxed))
    }
}

/// Blocks kept back from ordinary reservations, of `total`.
pub(super) fn kept_back(total: u64) -> u64 {
    (total / 64).clamp(32, 8192)
}
