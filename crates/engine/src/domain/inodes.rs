//! How many inodes of a domain there are, and the most that may be.
//!
//! Counted in domains that are kept for tenants only: who makes an inode elsewhere touches nothing that others write. What is
//! left of the limit is one number, so that a compare-and-swap of it is exact with any number of threads, also while the
//! limit changes. An inode counts from before it is made until it is deleted, not until that is durable: files,
//! directories, symbolic links and special files, with a name or without, but not the nodes that hold what their records have
//! no room for.

use braidfs_sync::slots::Line;
use std::sync::atomic::{
    AtomicBool, AtomicI64, AtomicU64,
    Ordering::{Acquire, Relaxed, SeqCst},
};

/// What is left where there is no limit and nothing in use: more than there are numbers, and far from an overflow.
const NO_LIMIT: i64 = i64::MAX / 4;

/// See the module.
#[derive(Debug)]
pub struct InodeCount {
    counted: AtomicBool,
    /// The limit, or [`NO_LIMIT`].
    limit: AtomicI64,
    /// The limit less what is in use: below 0 where the limit was set below that.
    left: Line<AtomicI64>,
    /// Rises before and after each change of the limit: readers want both numbers of one moment.
    changes: AtomicU64,
}

impl InodeCount {
    /// Nothing in use yet.
    pub fn new(counted: bool, limit: Option<u64>) -> Self {
        let limit = number(limit);
        Self {
            counted: AtomicBool::new(counted),
            limit: AtomicI64::new(limit),
            left: Line(AtomicI64::new(limit)),
            changes: AtomicU64::new(0),
        }
    }

    /// Whether inodes are counted here.
    pub fn is_counted(&self) -> bool {
        self.counted.load(Relaxed)
    }

    /// Counts from now on, in a domain that has no inode yet.
    pub fn begin(&self) {
        self.counted.store(true, Relaxed);
    }

    /// Counts one more; false where the limit is reached.
    pub fn take(&self) -> bool {
        !self.is_counted() || self.left.fetch_update(SeqCst, Relaxed, |n| (n > 0).then_some(n - 1)).is_ok()
    }

    /// One is gone, or was not made.
    pub fn give(&self) {
        if self.is_counted() {
            self.left.fetch_add(1, SeqCst);
        }
    }

    /// So many there are: before anybody makes or deletes one.
    pub fn recount(&self, used: u64) {
        self.left.store(self.limit.load(Relaxed) - used as i64, SeqCst);
    }

    /// Changes the limit. By one thread at a time.
    pub fn set_limit(&self, limit: Option<u64>) {
        let new = number(limit);
        self.changes.fetch_add(1, SeqCst);
        self.left.fetch_add(new - self.limit.swap(new, SeqCst), SeqCst);
        self.changes.fetch_add(1, SeqCst);
    }

    /// How many there are, and the limit.
    pub fn used_and_limit(&self) -> (u64, Option<u64>) {
        loop {
            let before = self.changes.load(Acquire);
            let (limit, left) = (self.limit.load(SeqCst), self.left.load(SeqCst));
            if before.is_multiple_of(2) && self.changes.load(SeqCst) == before {
                return ((limit - left).max(0) as u64, (limit < NO_LIMIT).then_some(limit as u64));
            }
            std::hint::spin_loop();
        }
    }
}

fn number(limit: Option<u64>) -> i64 {
    limit.map_or(NO_LIMIT, |n| i64::try_from(n).map_or(NO_LIMIT, |n| n.min(NO_LIMIT)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    /// The limit is had to the last inode, by 64 threads as by one, and what is given back is had again.
    #[test]
    fn the_limit_is_exact_with_many_threads_as_with_one() {
        for threads in [1, 64] {
            let c = InodeCount::new(true, Some(1000));
            c.recount(10);
            std::thread::scope(|s| {
                for _ in 0..threads {
                    s.spawn(|| {
                        while c.take() {
                            let (used, limit) = c.used_and_limit();
                            assert!(used <= 1000 && limit == Some(1000), "{used}");
                        }
                    });
                }
            });
            assert_eq!(c.used_and_limit(), (1000, Some(1000)), "{threads} threads");
            (0..5).for_each(|_| c.give());
            assert_eq!((0..9).filter(|_| c.take()).count(), 5);
        }
    }

    /// While the limit changes nobody gets more than the highest one allows, and each change counts at once.
    #[test]
    fn the_limit_changes_while_inodes_are_made() {
        let c = InodeCount::new(true, None);
        let made = AtomicUsize::new(0);
        std::thread::scope(|s| {
            for _ in 0..8 {
                s.spawn(|| {
                    for _ in 0..2000 {
                        if c.take() {
                            made.fetch_add(1, SeqCst);
                        }
                    }
                });
            }
            for n in 0..200 {
                c.set_limit(Some(n % 7 * 100));
                c.used_and_limit();
            }
            c.set_limit(None);
        });
        let made = made.load(SeqCst) as u64;
        assert_eq!(c.used_and_limit(), (made, None));
        c.set_limit(Some(made.saturating_sub(2)));
        assert!(!c.take());
        (0..3.min(made)).for_each(|_| c.give());
        assert!(made < 3 || c.take());
        assert!(!c.take());
    }

    #[test]
    fn what_is_not_counted_has_no_limit() {
        let c = InodeCount::new(false, Some(0));
        assert!(c.take() && c.take());
        c.give();
        assert_eq!(c.used_and_limit(), (0, Some(0)));
    }
}
