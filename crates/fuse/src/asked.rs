//! Who may hold dirty pages in a domain with little room, where the kernel tells of no opens: files whose writers asked.
//!
//! Nobody knows which files are open for writing. But in such a domain the kernel asks before each `write` ([`crate::room`]),
//! and so the files that were told to go on are known here, each until it was written back and asked no more for
//! [`LATELY`]: a writer that was told to go on a moment ago may not have stored its bytes yet.

use crate::node::WireId;
use braidfs::NodeId;
use crossbeam::utils::CachePadded;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// So long after it was told to go on a `write` is taken to be under way still.
const LATELY: Duration = Duration::from_secs(2);
/// A power of two.
const SHARDS: usize = 32;

#[derive(Debug)]
struct Writer {
    id: WireId,
    /// The kernel may hold dirty pages for which there must be room.
    promised: bool,
    /// When it was last told to go on.
    told: Instant,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Asked {
    shards: [CachePadded<Mutex<HashMap<u64, Writer>>>; SHARDS],
}

impl Asked {
    fn shard(&self, ino: NodeId) -> &Mutex<HashMap<u64, Writer>> {
        &self.shards[(ino.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - SHARDS.trailing_zeros())) as usize]
    }

    /// The kernel may put dirty pages of the file into its cache.
    pub fn promise(&self, id: WireId) {
        self.shard(id.ino()).lock().insert(id.ino().0, Writer { id, promised: true, told: Instant::now() });
    }

    /// How many files among `which` are written.
    pub fn writers(&self, which: impl Fn(NodeId) -> bool) -> u64 {
        let of = |s: &CachePadded<Mutex<HashMap<u64, Writer>>>| s.lock().values().filter(|w| which(w.id.ino())).count();
        self.shards.iter().map(of).sum::<usize>() as u64
    }

    /// The files among `which` that were promised room since they were last asked for here.
    pub fn take_promised(&self, which: impl Fn(NodeId) -> bool) -> Vec<WireId> {
        let mut found = Vec::new();
        for shard in &self.shards {
            shard.lock().retain(|_, w| {
                if !which(w.id.ino()) {
                    return true;
                }
                if std::mem::take(&mut w.promised) {
                    found.push(w.id);
                }
                w.told.elapsed() < LATELY
            });
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writers_are_known_a_while() {
        let a = Asked::default();
        let id = |n| WireId::new(NodeId(n), 1);
        let even = |n: NodeId| n.0.is_multiple_of(2);
        (10..20).for_each(|n| a.promise(id(n)));
        a.promise(id(12));
        assert_eq!((a.writers(even), a.writers(|_| true)), (5, 10));
        let mut taken: Vec<_> = a.take_promised(even).iter().map(|id| id.ino().0).collect();
        taken.sort_unstable();
        assert_eq!(taken, [10, 12, 14, 16, 18]);
        assert!(a.take_promised(even).is_empty());
        assert_eq!(a.writers(even), 5, "they may be about to store what they were allowed");
        a.promise(id(12));
        for n in [10, 12] {
            a.shard(NodeId(n)).lock().get_mut(&n).unwrap().told -= 2 * LATELY;
        }
        assert_eq!(a.take_promised(even), [id(12)]);
        assert_eq!((a.writers(even), a.writers(|_| true)), (3, 8));
    }
}
