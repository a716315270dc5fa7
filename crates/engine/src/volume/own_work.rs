//! What the threads of the background do of themselves, told apart from what somebody does with the volume.

use super::domains::Domains;
use crate::domain::Domain;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU64, fence};

/// Misses of the cache and transactions of such work.
#[derive(Debug, Default)]
pub(crate) struct OwnWork {
    misses: AtomicU64,
    transactions: AtomicU64,
    begun: AtomicU64,
    ended: AtomicU64,
}

/// Ends what has begun, also where it panics.
struct AtWork<'a>(&'a OwnWork);

impl Drop for AtWork<'_> {
    fn drop(&mut self) {
        self.0.ended.fetch_add(1, Release);
    }
}

impl OwnWork {
    /// Does such work in a domain.
    pub fn in_domain<R>(&self, d: &Domain, work: impl FnOnce() -> R) -> R {
        self.begun.fetch_add(1, AcqRel);
        let _at_work = AtWork(self);
        let before = done_in(d);
        let done = work();
        let after = done_in(d);
        self.misses.fetch_add(after.0 - before.0, Relaxed);
        self.transactions.fetch_add(after.1 - before.1, Relaxed);
        done
    }

    /// Misses and transactions of all domains that are not such work, as numbers to compare; `None` while some is under way.
    pub fn others_in(&self, domains: &Domains) -> Option<(u64, u64)> {
        let ended = self.ended.load(Acquire);
        let own = (self.misses.load(Relaxed), self.transactions.load(Relaxed));
        let all = domains.iter().map(|d| done_in(d)).fold((0, 0), |sum, of| (sum.0 + of.0, sum.1 + of.1));
        fence(Acquire);
        (self.begun.load(Relaxed) == ended).then(|| (all.0.wrapping_sub(own.0), all.1.wrapping_sub(own.1)))
    }
}

/// Misses of its cache and its transactions.
fn done_in(d: &Domain) -> (u64, u64) {
    (d.memory.hits_and_misses().1, d.running().0)
}
