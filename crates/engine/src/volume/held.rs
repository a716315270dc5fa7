//! Inodes that somebody outside holds by number, without having them open: a kernel that was told of them (FUSE's
//! counted look-ups). Such an inode stays when its last name goes, as an orphan, until it is given back.
//!
//! Owns how often each inode was told. An entry takes 17 bytes of a hash table that is between 44 and 87 % full, and
//! nothing else: a cell may leave memory while its inode is held. Counting writes only to the shard of the inode.
//!
//! Who comes first, look-up or removal: a look-up counts, then reads under the cell's lock whether the inode was
//! deleted ([`MountedVolume::hold`]); a removal marks the inode as gone, then asks for the count, both under the cell's lock
//! for writing ([`MountedVolume::last_name_gone`]). So either the look-up sees the deletion, and takes its count back, or the
//! removal sees the count, and leaves an orphan. Whoever gives the last count back sees the mark that the removal
//! left here, and reaps.
//!
//! Lock rank: shards are leaves.

use super::{MountedVolume, Volume};
use crate::cell::Cell;
use crate::error::{Error, Result};
use crate::types::*;
use braidfs_sync::{Mutex, rank};
use crossbeam::utils::CachePadded;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const SHARDS: usize = 256;
/// In [`Count::times`]: the inode has no name, its end waits for the last count.
const ORPHAN: u32 = 1 << 31;
/// In [`Count::times`]: a regular file.
const FILE: u32 = 1 << 30;
/// So often an inode is counted at most; one that was told more often is held until the unmount.
const TIMES_MAX: u32 = FILE - 1;
/// Below this many entries a shard's table is not made smaller.
const SHRINK_MIN: usize = 64;

#[derive(Debug, Clone, Copy)]
struct Count {
    gener: u32,
    /// How often it was told; [`ORPHAN`], [`FILE`].
    times: u32,
}

impl Count {
    fn times(self) -> u32 {
        self.times & TIMES_MAX
    }
    fn is_orphan(self) -> bool {
        self.times & ORPHAN != 0
    }
    fn is_file(self) -> bool {
        self.times & FILE != 0
    }
}

#[derive(Debug, Default)]
struct Shard {
    counts: HashMap<u64, Count, foldhash::fast::RandomState>,
    /// Marked entries, and those whose inode is being reaped.
    orphans: usize,
    /// Those whose last count was given back: their end is under way.
    ending: usize,
    /// When an orphan was last left that is not open.
    left: Option<Instant>,
}

/// What became of a count that was given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GivenBack {
    /// The inode is still held, or is another one.
    Held,
    /// That was the last; whether the inode was waiting for it.
    Last { orphan: bool },
    /// More than was told.
    TooMuch { orphan: bool },
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Held {
    shards: Box<[CachePadded<Mutex<Shard, rank::HeldShard>>]>,
    /// It was said that more was given back than had been told.
    complained: AtomicBool,
    /// Counts that were given back in excess.
    excess: AtomicUsize,
}

impl Default for Held {
    fn default() -> Self {
        let shards = (0..SHARDS).map(|_| CachePadded::default()).collect();
        Self { shards, complained: AtomicBool::new(false), excess: AtomicUsize::new(0) }
    }
}

impl Held {
    fn shard(&self, ino: NodeId) -> &Mutex<Shard, rank::HeldShard> {
        // numbers given one after another go to different shards
        &self.shards[(ino.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - SHARDS.trailing_zeros())) as usize]
    }

    /// Counts; false where a later inode of the number is held: this one is gone.
    fn add(&self, ino: NodeId, gener: u32, kind: FileKind) -> bool {
        let first = 1 | if kind == FileKind::File { FILE } else { 0 };
        let mut guard = self.shard(ino).lock();
        let s = &mut *guard;
        match s.counts.entry(ino.0) {
            Entry::Vacant(e) => {
                e.insert(Count { gener, times: first });
            }
            Entry::Occupied(mut e) => {
                let c = e.get_mut();
                if c.gener == gener {
                    c.times += u32::from(c.times() < TIMES_MAX);
                } else if gener.wrapping_sub(c.gener).cast_signed() > 0 {
                    // that of a look-up which has yet to see that its inode is gone
                    s.orphans -= usize::from(c.is_orphan());
                    *c = Count { gener, times: first };
                } else {
                    return false;
                }
            }
        }
        true
    }

    fn give_back(&self, ino: NodeId, is_it: impl Fn(u32) -> bool, times: u64) -> GivenBack {
        let mut s = self.shard(ino).lock();
        let Entry::Occupied(mut e) = s.counts.entry(ino.0) else {
            return GivenBack::TooMuch { orphan: false };
        };
        let c = e.get_mut();
        if !is_it(c.gener) || c.times() == TIMES_MAX {
            return GivenBack::Held;
        }
        let had = u64::from(c.times());
        if times < had {
            c.times -= times as u32;
            return GivenBack::Held;
        }
        let orphan = e.remove().is_orphan();
        s.ending += usize::from(orphan);
        if s.counts.capacity() > 8 * s.counts.len().max(SHRINK_MIN) {
            let room = 2 * s.counts.len();
            s.counts.shrink_to(room);
        }
        if times > had { GivenBack::TooMuch { orphan } } else { GivenBack::Last { orphan } }
    }

    /// An inode has lost its last name: whether it is held. Whoever gives the last count back will know.
    pub fn orphaned(&self, c: &Cell) -> bool {
        let mut guard = self.shard(c.ino).lock();
        let s = &mut *guard;
        let Some(count) = s.counts.get_mut(&c.ino.0).filter(|x| x.gener == c.gener) else { return false };
        if !count.is_orphan() {
            count.times |= ORPHAN;
            s.orphans += 1;
        }
        if c.opens.load(Ordering::SeqCst) == 0 {
            s.left = Some(Instant::now());
        }
        true
    }

    /// An inode without a name got one.
    pub fn named(&self, c: &Cell) {
        let mut guard = self.shard(c.ino).lock();
        let s = &mut *guard;
        if let Some(count) = s.counts.get_mut(&c.ino.0).filter(|x| x.gener == c.gener && x.is_orphan()) {
            count.times &= !ORPHAN;
            s.orphans -= 1;
        }
    }

    /// Whether the inode is held.
    pub fn holds(&self, c: &Cell) -> bool {
        self.shard(c.ino).lock().counts.get(&c.ino.0).is_some_and(|x| x.gener == c.gener)
    }

    /// See [`Volume::orphans_due`].
    fn due(&self, lately: Duration) -> bool {
        self.shards.iter().any(|s| {
            let s = s.lock();
            s.ending > 0 || s.orphans > 0 && s.left.is_some_and(|at| at.elapsed() < lately)
        })
    }

    /// An orphan whose last count was given back has been dealt with.
    fn reaped(&self, ino: NodeId) {
        let mut s = self.shard(ino).lock();
        s.orphans -= 1;
        s.ending -= 1;
    }
}

impl MountedVolume {
    /// Counts the inode as held and tells its attributes; `None` where it is gone.
    pub(crate) fn hold(&self, c: &Arc<Cell>) -> Option<Attr> {
        // the root never goes
        let counted = c.ino != NodeId::ROOT;
        if counted && !self.held.add(c.ino, c.gener, c.kind) {
            return None;
        }
        let st = c.state.read();
        if st.deleted {
            drop(st);
            self.held.give_back(c.ino, |g| g == c.gener, 1);
            return None;
        }
        if st.nlink == 0 {
            self.held.orphaned(c);
        }
        Some(c.attr(&st))
    }

    /// Takes one count back where the look-up did not get through to the holder.
    pub(crate) fn unhold(&self, ino: NodeId, gener: u32) {
        self.take_back(ino, &|g| g == gener, 1);
    }

    /// Whether that was the last.
    fn take_back(&self, ino: NodeId, is_it: &dyn Fn(u32) -> bool, times: u64) -> bool {
        if ino == NodeId::ROOT || times == 0 {
            return false;
        }
        let orphan = match self.held.give_back(ino, is_it, times) {
            GivenBack::Held => return false,
            GivenBack::Last { orphan } => orphan,
            GivenBack::TooMuch { orphan } => {
                self.held.excess.fetch_add(1, Ordering::Relaxed);
                if !self.held.complained.swap(true, Ordering::Relaxed) {
                    tracing::warn!("inode {ino} was given back more often than it had been told; not said again");
                }
                orphan
            }
        };
        if orphan {
            self.reap_given_back(ino, is_it);
            self.held.reaped(ino);
        }
        true
    }

    fn reap_given_back(&self, ino: NodeId, is_it: &dyn Fn(u32) -> bool) {
        let reaped = match self.cell(ino) {
            Ok(c) if is_it(c.gener) => self.reap(&c),
            Ok(_) | Err(Error::NotFound) => Ok(()),
            Err(e) => Err(e),
        };
        if let Err(e) = reaped {
            // it stays an orphan: the next mount reclaims it
            tracing::warn!("reclaiming unlinked inode {ino}: {e}");
        }
    }
}

impl Volume {
    /// [`Volume::lookup`] that counts the inode as held from outside until [`Volume::forget`].
    ///
    /// # Errors
    /// As [`Volume::lookup`]; nothing is counted then.
    pub fn lookup_held(&self, dir: NodeId, name: &[u8]) -> Result<Attr> {
        let i = self.inner();
        loop {
            let c = i.lookup(dir, name)?;
            if let Some(attr) = i.hold(&c) {
                return Ok(attr);
            }
            if name == b"." || name == b".." {
                return Err(Error::NotFound);
            }
            // removed since: the name may be another's by now
        }
    }

    /// Counts an inode as held, if it is there and of the generation meant.
    ///
    /// # Errors
    /// [`Error::NotFound`] where it is not; nothing is counted then.
    pub fn hold(&self, ino: NodeId, is_it: impl Fn(u32) -> bool) -> Result<Attr> {
        let c = self.inner().cell(ino)?;
        if !is_it(c.gener) {
            return Err(Error::NotFound);
        }
        self.inner().hold(&c).ok_or(Error::NotFound)
    }

    /// Gives `times` counts of an inode back, if the number is held in the generation meant. An inode that lost its
    /// last name meanwhile goes with the last count. More than was counted is taken as all, and said once in the log.
    /// Whether none is left.
    pub fn forget(&self, ino: NodeId, is_it: impl Fn(u32) -> bool, times: u64) -> bool {
        self.inner().take_back(ino, &is_it, times)
    }

    /// Whether the inode is held, of whatever generation.
    pub fn is_held(&self, ino: NodeId) -> bool {
        self.inner().held.shard(ino).lock().counts.contains_key(&ino.0)
    }

    /// Number and generation of all regular files that are held, among those that are `wanted`. Those that come or go
    /// meanwhile may be missing.
    pub fn held_files(&self, wanted: impl Fn(NodeId) -> bool) -> Vec<(NodeId, u32)> {
        let mut found = Vec::new();
        for shard in &self.inner().held.shards {
            let shard = shard.lock();
            let files = shard.counts.iter().filter(|(_, c)| c.is_file()).map(|(ino, c)| (NodeId(*ino), c.gener));
            found.extend(files.filter(|(ino, _)| wanted(*ino)));
        }
        found
    }

    /// Gives everything back: who held the inodes is gone.
    pub fn forget_all(&self) {
        let i = self.inner();
        for shard in &i.held.shards {
            let counts = {
                let mut s = shard.lock();
                let counts = std::mem::take(&mut s.counts);
                s.ending += counts.values().filter(|c| c.is_orphan()).count();
                counts
            };
            for (ino, count) in counts.into_iter().filter(|(_, c)| c.is_orphan()) {
                i.reap_given_back(NodeId(ino), &|g| g == count.gener);
                i.held.reaped(NodeId(ino));
            }
        }
    }

    /// How many inodes are held, how many of them have no name any more, and how often more was given back than had
    /// been counted.
    pub fn held(&self) -> HeldStats {
        let held = &self.inner().held;
        let mut s = HeldStats { excess: held.excess.load(Ordering::Relaxed), ..HeldStats::default() };
        for shard in &held.shards {
            let shard = shard.lock();
            s.inodes += shard.counts.len();
            s.orphans += shard.orphans;
            s.bytes += shard.counts.capacity() * (size_of::<(u64, Count)>() + 1);
        }
        s
    }

    /// Whether something was removed less than `lately` ago whose end waits for its holder alone, or is under way: its
    /// space and its number are about to come back.
    pub fn orphans_due(&self, lately: Duration) -> bool {
        self.inner().held.due(lately)
    }

    /// Whether something ends just now that its last holder gave back.
    pub fn orphans_ending(&self) -> bool {
        self.inner().held.due(Duration::ZERO)
    }
}

#[cfg(test)]
mod tests;
