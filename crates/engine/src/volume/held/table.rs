//! How often each inode was told: the table of inodes that are held, and nothing of the volume.

use crate::cell::Cell;
use crate::types::*;
use braidfs_sync::{Mutex, MutexGuard, rank};
use crossbeam::utils::CachePadded;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::{Deref, DerefMut};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

const SHARDS: usize = 256;
/// In [`Count::times`]: the inode has no name, its end waits for the last count.
pub(super) const ORPHAN: u32 = 1 << 31;
/// In [`Count::times`]: a regular file.
const FILE: u32 = 1 << 30;
/// So often an inode is counted at most; one that was told more often is held until the unmount.
pub(super) const TIMES_MAX: u32 = FILE - 1;
/// Below this many entries a shard's table is not made smaller.
const SHRINK_MIN: usize = 64;

/// [`FILE`] of a regular file.
pub(super) fn kind_bit(kind: FileKind) -> u32 {
    if kind == FileKind::File { FILE } else { 0 }
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Count {
    pub(super) generation: u32,
    /// How often it was told; [`ORPHAN`], [`FILE`].
    pub(super) times: u32,
}

impl Count {
    pub(super) fn times(self) -> u32 {
        self.times & TIMES_MAX
    }
    pub(super) fn is_orphan(self) -> bool {
        self.times & ORPHAN != 0
    }
    pub(super) fn is_file(self) -> bool {
        self.times & FILE != 0
    }
}

#[derive(Debug, Default)]
pub(super) struct Shard {
    pub(super) counts: HashMap<u64, Count, foldhash::fast::RandomState>,
    /// Marked entries, and those whose inode is being reaped.
    pub(super) orphans: usize,
    /// Those whose last count was given back: their end is under way.
    pub(super) ending: usize,
    /// When an orphan was last left that is not open.
    pub(super) left: Option<Instant>,
}

/// What became of a count that was given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GivenBack {
    /// The inode is still held, or is another one.
    StillHeld,
    /// That was the last; whether the inode was waiting for it.
    Last { orphan: bool },
    /// More than was told.
    TooMuch { orphan: bool },
}

/// A shard with its lock.
#[derive(Debug, Default)]
pub(super) struct LockedShard {
    /// How many inodes it has: a library holds none, and a look there moves no line.
    len: AtomicUsize,
    shard: Mutex<Shard, rank::HeldShard>,
}

/// The right to a shard, which tells how many inodes there are then.
pub(super) struct ShardGuard<'a> {
    len: &'a AtomicUsize,
    shard: MutexGuard<'a, Shard>,
}

impl LockedShard {
    pub(super) fn lock(&self) -> ShardGuard<'_> {
        ShardGuard { shard: self.shard.lock(), len: &self.len }
    }
    /// Whether it has no inode. Who was told of one, and then has had a lock that the caller has, was counted before.
    fn is_empty(&self) -> bool {
        self.len.load(Relaxed) == 0
    }
}

impl Drop for ShardGuard<'_> {
    fn drop(&mut self) {
        let now = self.shard.counts.len();
        if self.len.load(Relaxed) != now {
            self.len.store(now, Relaxed);
        }
    }
}

impl Deref for ShardGuard<'_> {
    type Target = Shard;
    fn deref(&self) -> &Shard {
        &self.shard
    }
}

impl DerefMut for ShardGuard<'_> {
    fn deref_mut(&mut self) -> &mut Shard {
        &mut self.shard
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct LookupCounts {
    /// Made when the first inode is held: a library holds none.
    shards: OnceLock<Box<[CachePadded<LockedShard>]>>,
    /// It was said that more was given back than had been told.
    pub(super) complained: AtomicBool,
    /// Counts that were given back in excess.
    pub(super) excess: AtomicUsize,
}

impl LookupCounts {
    /// All there are.
    pub(super) fn shards(&self) -> &[CachePadded<LockedShard>] {
        self.shards.get().map_or(&[], |all| all)
    }
    /// The shard of an inode; none where no inode was ever held.
    pub(super) fn known_shard(&self, ino: InodeNo) -> Option<&LockedShard> {
        // numbers given one after another go to different shards
        self.shards.get().map(|all| &*all[hashed_place(ino.0, SHARDS)])
    }
    /// The shard of an inode.
    pub(super) fn shard(&self, ino: InodeNo) -> &LockedShard {
        let all = self.shards.get_or_init(|| (0..SHARDS).map(|_| CachePadded::default()).collect());
        &all[hashed_place(ino.0, SHARDS)]
    }

    /// Counts; false where a later inode of the number is held: this one is gone.
    pub(super) fn add(&self, ino: InodeNo, generation: u32, kind: FileKind) -> bool {
        let first = 1 | kind_bit(kind);
        let mut guard = self.shard(ino).lock();
        let s = &mut *guard;
        match s.counts.entry(ino.0) {
            Entry::Vacant(e) => {
                e.insert(Count { generation, times: first });
            }
            Entry::Occupied(mut e) => {
                let c = e.get_mut();
                if c.generation == generation {
                    c.times += u32::from(c.times() < TIMES_MAX);
                } else if generation.wrapping_sub(c.generation).cast_signed() > 0 {
                    // that of a look-up which has yet to see that its inode is gone
                    s.orphans -= usize::from(c.is_orphan());
                    *c = Count { generation, times: first };
                } else {
                    return false;
                }
            }
        }
        true
    }

    pub(super) fn give_back(&self, ino: InodeNo, is_it: impl Fn(u32) -> bool, times: u64) -> GivenBack {
        let mut s = self.shard(ino).lock();
        let Entry::Occupied(mut e) = s.counts.entry(ino.0) else {
            return GivenBack::TooMuch { orphan: false };
        };
        let c = e.get_mut();
        if !is_it(c.generation) || c.times() == TIMES_MAX {
            return GivenBack::StillHeld;
        }
        let had = u64::from(c.times());
        if times < had {
            c.times -= times as u32;
            return GivenBack::StillHeld;
        }
        let orphan = e.remove().is_orphan();
        s.ending += usize::from(orphan);
        if s.counts.capacity() > 8 * s.counts.len().max(SHRINK_MIN) {
            let room = 2 * s.counts.len();
            s.counts.shrink_to(room);
        }
        if times > had { GivenBack::TooMuch { orphan } } else { GivenBack::Last { orphan } }
    }

    /// An inode, which the caller has locked, has lost its last name: whether it is held. Whoever gives the last count back
    /// will know.
    pub fn orphaned(&self, c: &Cell) -> bool {
        self.orphaned_while(c, || c.is_open())
    }

    /// [`Self::orphaned`]; `open`: whether somebody has it open.
    pub fn orphaned_while(&self, c: &Cell, open: impl FnOnce() -> bool) -> bool {
        let Some(shard) = self.known_shard(c.ino).filter(|s| !s.is_empty()) else { return false };
        let mut guard = shard.lock();
        let s = &mut *guard;
        let Some(count) = s.counts.get_mut(&c.ino.0).filter(|x| x.generation == c.generation) else { return false };
        if !count.is_orphan() {
            count.times |= ORPHAN;
            s.orphans += 1;
        }
        if !open() {
            s.left = Some(Instant::now());
        }
        true
    }

    /// An inode without a name got one.
    pub fn named(&self, c: &Cell) {
        let Some(shard) = self.known_shard(c.ino) else { return };
        let mut guard = shard.lock();
        let s = &mut *guard;
        if let Some(count) = s.counts.get_mut(&c.ino.0).filter(|x| x.generation == c.generation && x.is_orphan()) {
            count.times &= !ORPHAN;
            s.orphans -= 1;
        }
    }

    /// Whether the inode is held.
    pub fn holds(&self, c: &Cell) -> bool {
        let is_it = |x: &Count| x.generation == c.generation;
        self.known_shard(c.ino).is_some_and(|s| s.lock().counts.get(&c.ino.0).is_some_and(is_it))
    }

    /// Whether orphans wait to be deleted: [`crate::Volume::orphans_due`].
    pub(super) fn due(&self, lately: Duration) -> bool {
        self.shards().iter().any(|s| {
            let s = s.lock();
            s.ending > 0 || s.orphans > 0 && s.left.is_some_and(|at| at.elapsed() < lately)
        })
    }

    /// Whether something lost its last name lately: [`crate::Volume::removed_lately`].
    pub(super) fn removed_lately(&self, lately: Duration) -> bool {
        self.shards().iter().any(|s| {
            let s = s.lock();
            s.ending > 0 || s.left.is_some_and(|at| at.elapsed() < lately)
        })
    }

    /// An orphan whose last count was given back has been dealt with.
    pub(super) fn reaped(&self, ino: InodeNo) {
        let mut s = self.shard(ino).lock();
        s.orphans -= 1;
        s.ending -= 1;
    }
}
