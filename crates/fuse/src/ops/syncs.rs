//! Whether a serving thread may wait for the device itself: an fsync that is handed to another thread costs two wake-ups,
//! one that is not keeps its thread from other requests. How busy the volume is, and how quick its device, the volume
//! itself looks after ([`braidfs::Volume::fsync_here`]).

use std::cell::Cell;
use std::time::{Duration, Instant};

/// So long a thread remembers whose fsync it served.
const REMEMBERED: Duration = Duration::from_millis(10);

thread_local! {
    /// Who sent the last FSYNC to this thread, and when.
    static LAST: Cell<Option<(u32, Instant)>> = const { Cell::new(None) };
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Syncs {
    cpus: usize,
}

impl Default for Syncs {
    fn default() -> Self {
        Self { cpus: std::thread::available_parallelism().map_or(2, |n| n.get().max(2)) }
    }
}

impl Syncs {
    /// How many serving threads may wait at once. Of those that share the device's requests one is always left for others;
    /// those that are `bound`, each to a queue of its own, do not stand in for each other anyway.
    pub fn threads(&self, bound: bool) -> usize {
        if bound { self.cpus } else { self.cpus - 1 }
    }

    /// Whether the fsync of thread `client` may be served here. Of a thread that is `bound` nobody sees how many wait behind
    /// it: that they take turns tells it. Where several do, groups are formed.
    pub fn may_wait(&self, client: u32, bound: bool) -> bool {
        if !bound {
            return true;
        }
        let now = Instant::now();
        let last = LAST.replace(Some((client, now)));
        last.is_none_or(|(before, at)| before == client || now.duration_since(at) > REMEMBERED)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_are_noticed() {
        let s = Syncs { cpus: 4 };
        assert!(s.may_wait(1, true) && s.may_wait(1, true), "one alone");
        assert!(!s.may_wait(2, true) && !s.may_wait(1, true), "two in turn");
        assert!(s.may_wait(1, true), "one is alone again");
        assert!(s.may_wait(2, false) && s.may_wait(3, false), "others serve the queue, too");
        std::thread::sleep(REMEMBERED + Duration::from_millis(1));
        assert!(s.may_wait(2, true), "it was long ago");
        assert_eq!((s.threads(true), s.threads(false)), (4, 3));
    }
}
