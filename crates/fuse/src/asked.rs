//! Who may hold dirty pages in a domain with little room, where the kernel tells of no opens: files whose writers asked.
//!
//! Nobody knows which files are open for writing. But in such a domain the kernel asks before each `write` ([`crate::room`]).
//! So two things are known: the files for which somebody was told to go on since they were last written back, and the threads
//! that were, of which each is in one `write` at a time. A thread that was told to go on a moment ago may not have stored its
//! bytes yet; one that is seen to do something else has.

use crate::asker::{self, Doing};
use crate::node::WireId;
use braidfs::NodeId;
use crossbeam::utils::CachePadded;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// So long after it was told to go on a `write` is taken to be under way, whose thread is not seen.
const LATELY: Duration = Duration::from_secs(2);
/// A power of two.
const SHARDS: usize = 32;

#[derive(Debug)]
struct Writer {
    ino: NodeId,
    /// What it may take.
    blocks: u64,
    told: Instant,
}

type Sharded<T> = [CachePadded<Mutex<HashMap<u64, T>>>; SHARDS];

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Asked {
    /// By inode: the kernel may hold dirty pages for which there must be room.
    promised: Sharded<WireId>,
    /// By thread; of an unknown one by [`NAMELESS`] and the inode.
    writers: Sharded<Writer>,
}

/// Not a thread.
const NAMELESS: u64 = 1 << 63;

fn shard<T>(all: &Sharded<T>, key: u64) -> &Mutex<HashMap<u64, T>> {
    &all[(key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - SHARDS.trailing_zeros())) as usize]
}

impl Asked {
    /// The kernel may put dirty pages of the file into its cache that take so many blocks, for a thread; 0: it is not known.
    pub fn promise(&self, id: WireId, thread: u32, blocks: u64) {
        shard(&self.promised, id.ino().0).lock().insert(id.ino().0, id);
        let key = if thread == 0 { NAMELESS | id.ino().0 } else { thread.into() };
        shard(&self.writers, key).lock().insert(key, Writer { ino: id.ino(), blocks, told: Instant::now() });
    }

    /// What may be about to be written to files among `which` by others than this thread, blocks, at most.
    pub fn by_others(&self, thread: u32, which: impl Fn(NodeId) -> bool) -> u64 {
        let others = |(key, w): (&u64, &Writer)| (*key != u64::from(thread) && which(w.ino)).then_some(w.blocks);
        let of = |s: &CachePadded<Mutex<HashMap<u64, Writer>>>| s.lock().iter().filter_map(others).sum::<u64>();
        self.writers.iter().map(of).sum()
    }

    /// Looks who of them has written by now.
    pub fn look_at_writers(&self) {
        self.look(asker::thread_is_doing);
    }

    fn look(&self, doing: impl Fn(u32) -> Doing) {
        for shard in &self.writers {
            shard.lock().retain(|key, w| match u32::try_from(*key).map_or(Doing::Unknown, &doing) {
                Doing::Writing(_) => true,
                Doing::Other => false,
                Doing::Unknown => w.told.elapsed() < LATELY,
            });
        }
    }

    /// The files among `which` that were promised room since they were last asked for here.
    pub fn take_promised(&self, which: impl Fn(NodeId) -> bool) -> Vec<WireId> {
        let mut found = Vec::new();
        for shard in &self.promised {
            found.extend(shard.lock().extract_if(|_, id| which(id.ino())).map(|(_, id)| id));
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_promised_and_threads_write() {
        let a = Asked::default();
        let id = |n| WireId::new(NodeId(n), 1);
        let even = |n: NodeId| n.0.is_multiple_of(2);
        (10..20).for_each(|n| a.promise(id(n), 7, 100));
        a.promise(id(12), 8, 10);
        a.promise(id(13), 9, 1);
        a.promise(id(14), 0, 1000);
        a.promise(id(14), 0, 1000);
        let mut taken: Vec<_> = a.take_promised(even).iter().map(|id| id.ino().0).collect();
        taken.sort_unstable();
        assert_eq!(taken, [10, 12, 14, 16, 18]);
        assert!(a.take_promised(even).is_empty());
        assert_eq!(a.take_promised(|_| true).len(), 5);
        // thread 7 was last told of file 19
        assert_eq!((a.by_others(1, even), a.by_others(1, |_| true), a.by_others(7, |_| true)), (1010, 1111, 1011));
        a.look(|thread| if thread == 8 { Doing::Other } else { Doing::Unknown });
        assert_eq!((a.by_others(1, even), a.by_others(1, |_| true)), (1000, 1101));
        for key in [7, NAMELESS | 14] {
            shard(&a.writers, key).lock().get_mut(&key).unwrap().told -= 2 * LATELY;
        }
        a.look(|thread| if thread == 7 { Doing::Writing(None) } else { Doing::Unknown });
        assert_eq!(a.by_others(1, |_| true), 101);
    }

    #[test]
    fn who_is_gone_writes_nothing() {
        let a = Asked::default();
        a.promise(WireId::new(NodeId(3), 1), u32::MAX >> 2, 5);
        a.look_at_writers();
        assert_eq!(a.by_others(0, |_| true), 0);
    }
}
