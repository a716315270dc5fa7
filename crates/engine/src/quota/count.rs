//! How much an owner uses of one kind, counted down from its limit.

use crate::space::Account;
use braidfs_sync::{Mutex, rank};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// What is left where there is no limit and nothing in use: more than there can be, and far from an overflow.
const NO_LIMIT: i64 = i64::MAX / 8;
/// Below what is left at any time.
const NO_FLOOR: i64 = i64::MIN / 2;

/// See the module.
#[derive(Debug)]
pub(super) struct Count {
    left: Account,
    /// The limit, or [`NO_LIMIT`]. Held while it changes, and by who wants both numbers of one moment.
    limit: Mutex<i64, rank::QuotaLimit>,
    /// Whether there is a limit: for who asks often.
    limited: AtomicBool,
}

impl Count {
    /// Nothing in use, and no limit.
    pub fn new() -> Self {
        let left = Account::default();
        left.resize(NO_LIMIT as u64, 0);
        left.add(NO_LIMIT);
        Self { left, limit: Mutex::new(NO_LIMIT), limited: AtomicBool::new(false) }
    }

    /// Counts `n` more; false where that would exceed the limit, unless it is `forced`.
    pub fn take(&self, n: u64, forced: bool) -> bool {
        let Ok(n) = i64::try_from(n) else { return false };
        n == 0 || self.left.take(n, if forced { NO_FLOOR } else { 0 })
    }

    /// Counts `n` less.
    pub fn give(&self, n: u64) {
        self.left.give(n as i64);
    }

    /// Changes the limit, also to less than is in use: nothing more is to be had then.
    pub fn set_limit(&self, limit: Option<u64>) {
        let new = limit.map_or(NO_LIMIT, |n| i64::try_from(n).map_or(NO_LIMIT, |n| n.min(NO_LIMIT)));
        let mut limit = self.limit.lock();
        self.limited.store(new < NO_LIMIT, Relaxed);
        let more = new - std::mem::replace(&mut *limit, new);
        self.left.resize(new as u64, 0);
        if more < 0 {
            self.left.withhold(-more);
        } else {
            self.left.add(more);
        }
    }

    /// Whether there is a limit.
    pub fn is_limited(&self) -> bool {
        self.limited.load(Relaxed)
    }

    /// How much is in use, and the limit.
    pub fn used_and_limit(&self) -> (u64, Option<u64>) {
        let limit = self.limit.lock();
        let used = (*limit - self.left.sum()).max(0) as u64;
        (used, (*limit < NO_LIMIT).then_some(*limit as u64))
    }
}
