//! Which log a thread writes to.
//!
//! A thread has a home log, which it gets at its first write and keeps (threads that come after it on its slot keep it, too): what
//! it writes lies together, and its log's lines stay with its CPU. Where somebody else writes to the home log at this moment,
//! the thread takes one that nobody writes to. Once free segments are few, and there are no groups that the domain could
//! claim, all threads write to one log (Max, ATC '21, section 4.3), and the others give up their segments: what is
//! unused in these could be had by no other log, and no cleaner would take them.

use super::Space;
use std::sync::atomic::Ordering::Relaxed;

impl Space {
    /// The log for what the calling thread writes next; `alone`: there are no groups that the domain could claim.
    pub fn pick_log(&self, alone: bool) -> usize {
        let logs = self.mlogs.len();
        if logs == 1 {
            return 0;
        }
        let gathered = self.affinity.gathered.load(Relaxed);
        if alone && self.affinity.few.load(Relaxed) {
            if !gathered && !self.affinity.gathered.swap(true, Relaxed) {
                (1..logs).for_each(|log| self.give_up_segments(log));
            }
            return 0;
        }
        if gathered {
            self.affinity.gathered.store(false, Relaxed);
        }
        let home = self.affinity.home(logs);
        (home..home + logs).map(|log| log % logs).find(|&log| self.mlogs[log].try_lock().is_some()).unwrap_or(home)
    }

    /// Log `log` lets go of the segments that it writes.
    fn give_up_segments(&self, log: usize) {
        let mut log = self.mlogs[log].lock();
        log.active.iter_mut().filter_map(Option::take).for_each(|seg| self.leave(&seg));
    }

    /// The pool has `free` segments now; its lock is held. Few are so many as there are logs, and that ends at twice as many:
    /// logs that begin again take a segment each.
    pub(super) fn note_free(&self, free: usize) {
        let (logs, few) = (self.mlogs.len(), self.affinity.few.load(Relaxed));
        let now = free <= if few { 2 * logs } else { logs };
        if now != few {
            self.affinity.few.store(now, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::space::Class;
    use crate::space::testdev::store;
    use braidfs_format::DomainId;
    use braidfs_format::group::{SegmentKind, Temperature};
    use braidfs_sync::plain::Mutex;
    use braidfs_sync::slots::PerSlot;
    use std::sync::Barrier;
    use std::sync::atomic::AtomicU32;

    const D: DomainId = DomainId(0);
    const WARM: Class = Class { kind: SegmentKind::Data, temperature: Temperature::Warm };

    fn space(groups: u32, logs: u16) -> Space {
        let (_, store) = store(2, groups, 1024);
        let all: Vec<u32> = (0..groups).collect();
        all.iter().for_each(|g| Space::init_group(&store, D, *g, 1, None).unwrap());
        Space::open(store, D, logs, &all, None, None).unwrap()
    }

    fn take(space: &Space, log: usize, want: u32) -> u32 {
        space.reserve_for_commit(want.into()).unwrap();
        let run = space.alloc(log, WARM, want, None).unwrap();
        space.unreserve(u64::from(want - run.len));
        run.len
    }

    /// Threads that are there together have logs of their own, and keep them.
    #[test]
    fn threads_have_logs_of_their_own() {
        let mut space = space(4, 3);
        // threads of other tests may have all slots
        space.affinity.homes = PerSlot::with(1024, |_| AtomicU32::new(0));
        let (picked, together) = (Mutex::new(Vec::new()), Barrier::new(3));
        std::thread::scope(|s| {
            for _ in 0..3 {
                s.spawn(|| {
                    // one after the other: a log that is busy is passed by
                    let first = {
                        let mut picked = picked.lock();
                        let first = space.pick_log(false);
                        picked.push(first);
                        first
                    };
                    together.wait();
                    let one = picked.lock();
                    assert!((0..20).all(|_| space.pick_log(false) == first));
                    drop(one);
                    together.wait();
                });
            }
        });
        let mut picked = picked.into_inner();
        picked.sort_unstable();
        assert_eq!(picked, [0, 1, 2]);
    }

    /// A log that somebody writes to is left to him for now; where all are busy the thread waits for its own.
    #[test]
    fn a_busy_log_is_passed_by() {
        let space = space(4, 3);
        let home = space.pick_log(false);
        let other = {
            let busy = &space.mlogs[home];
            let (held, done) = (Barrier::new(2), Barrier::new(2));
            std::thread::scope(|s| {
                s.spawn(|| {
                    let _lock = busy.lock();
                    held.wait();
                    done.wait();
                });
                held.wait();
                let other = space.pick_log(false);
                done.wait();
                other
            })
        };
        assert_ne!(other, home);
        assert_eq!(space.pick_log(false), home);
    }

    /// With few segments left there is one log, and no segment of another one is out of reach.
    #[test]
    fn the_last_segments_are_for_one_log() {
        let space = space(4, 3);
        let (second, third) = (take(&space, 1, 10), take(&space, 2, 10));
        assert_eq!((second, third), (10, 10));
        let active = |log: usize| space.mlogs[log].lock().active.iter().flatten().count();
        while space.stats().free_segments > 3 {
            take(&space, 0, 512);
        }
        space.pick_log(false);
        assert_eq!((active(1), active(2)), (1, 1), "groups that can be claimed are segments to come");
        assert_eq!(space.pick_log(true), 0);
        assert_eq!((active(0), active(1), active(2)), (1, 0, 0));
        // a log that begins again after that keeps its segment until the next time
        std::thread::scope(|s| {
            s.spawn(|| assert_eq!(space.pick_log(true), 0));
        });
        let free = space.stats().free;
        let mut taken = 0;
        while taken < free {
            taken += u64::from(take(&space, 0, (free - taken).min(64) as u32));
        }
        assert_eq!(space.stats().free, 0);
    }

    /// It ends only when there are clearly more free segments again: logs would take what has just become free at once.
    #[test]
    fn one_log_is_not_left_for_a_single_segment() {
        let space = space(4, 2);
        for (free, one) in [(5, false), (3, false), (2, true), (3, true), (4, true), (5, false), (3, false)] {
            space.note_free(free);
            assert_eq!(space.affinity.few.load(Relaxed), one, "{free} free segments");
        }
    }
}
