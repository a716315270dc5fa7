//! The buckets of a directory by their first positions.
//!
//! Two levels of sorted arrays: hashes are spread evenly, so that a search by interpolation finds its way through a
//! directory of millions of names by three or four cache lines, where a balanced tree takes one or two for each of its
//! levels.
//!
//! This is a low-level module with unsafe code: who knows that no bucket is changed beside it looks at one without its lock.
//!
//! Invariants: positions rise; no chunk is empty; `starts[i]` is the first position of `chunks[i]`.

use super::entries::Entries;
use crate::braid::vacated::Lately;
use braidfs_sync::{BiasedReadGuard, BiasedRwLock, BiasedWriteGuard, Guarded, rank};
use std::collections::BTreeSet;

/// Entries whose hashes have a prefix in common. On cache lines of its own, with its lock: threads that have the directory
/// locked for reading change different ones at the same time.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct Bucket(BiasedRwLock<Content, rank::Bucket>);

/// A bucket that stays as it is.
pub(super) enum Look<'b> {
    /// Others may change the directory at the same time.
    Locked(BiasedReadGuard<'b, Content>),
    /// Nobody changes it.
    Free(&'b Content),
}

impl std::ops::Deref for Look<'_> {
    type Target = Content;
    #[inline]
    fn deref(&self) -> &Content {
        match self {
            Self::Locked(guard) => guard,
            Self::Free(content) => content,
        }
    }
}

/// What a bucket holds. What a change of a bucket of a shared directory touches is in the lock's line.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Content {
    /// When names of it were taken or left last by those who have the directory locked for reading, in logical time, unless
    /// the directory knows a later one.
    pub name_time: u64,
    /// Names that were left lately.
    pub left: Lately,
    /// Encoded length of the entries, where they are loaded.
    pub bytes: u16,
    pub on_disk: bool,
    /// It is one of those to write.
    pub dirty: bool,
    /// `None`: on disk, not loaded.
    pub entries: Option<Entries>,
}

impl Guarded for Content {}

impl Bucket {
    /// The bucket that begins at `first`.
    pub fn new(first: u64, entries: Option<Entries>, bytes: usize) -> Self {
        let (on_disk, left) = (entries.is_none(), Lately::UNKNOWN);
        let content = Content { on_disk, entries, bytes: bytes as u16, dirty: false, left, name_time: 0 };
        Self(BiasedRwLock::keyed(content, first))
    }
    /// For whoever has the directory locked for writing.
    pub fn own(&mut self) -> &mut Content {
        self.0.get_mut()
    }
    /// For whoever has the directory locked.
    ///
    /// # Safety
    /// Without `shared`: as long as it lives nobody takes the bucket for writing ([`Self::write`]).
    #[inline]
    pub unsafe fn read(&self, shared: bool) -> Look<'_> {
        if shared {
            return Look::Locked(self.0.read());
        }
        // SAFETY: the caller's
        Look::Free(unsafe { self.0.unlocked() })
    }
    /// For whoever has a directory locked that several threads change.
    pub fn write(&self) -> BiasedWriteGuard<'_, Content> {
        self.0.write()
    }
}

/// A chunk of more buckets is cut in two.
const CHUNK_MAX: usize = 256;

/// What begins at a position.
pub(super) trait Begins {
    fn begins(&self) -> u64;
}

impl Begins for u64 {
    fn begins(&self) -> u64 {
        *self
    }
}

/// Index of the first of the `keys`, which rise, at or behind `pos`. Hashes are spread evenly: the search begins where the key
/// should be, which touches less memory than halving.
pub(super) fn lower_bound<K: Begins>(keys: &[K], pos: u64) -> usize {
    let (Some(lo), Some(hi)) = (keys.first(), keys.last()) else { return 0 };
    let (lo, hi) = (lo.begins(), hi.begins());
    if pos <= lo {
        return 0;
    }
    if pos > hi {
        return keys.len();
    }
    // from here on lo < pos <= hi; keys have 63 bits, and an array at most 2^20 of them
    let n = keys.len() - 1;
    let guess = (((pos - lo) >> 20) * n as u64 / (((hi - lo) >> 20) + 1)) as usize;
    let mut step = 2;
    let (mut from, mut to) = (guess.min(n), guess.min(n));
    if keys[from].begins() < pos {
        // the answer lies behind `from`, and not behind `to`
        while keys[to].begins() < pos {
            from = to;
            to = (to + step).min(n);
            step *= 2;
        }
    } else {
        while keys[from].begins() >= pos {
            to = from;
            from = from.saturating_sub(step);
            step *= 2;
        }
    }
    from + 1 + keys[from + 1..to].partition_point(|k| k.begins() < pos)
}

/// A bucket and where it begins. Buckets stay where they are: who makes one between others moves none of their lines.
#[derive(Debug)]
struct Slot {
    first: u64,
    bucket: Box<Bucket>,
}

impl Begins for Slot {
    fn begins(&self) -> u64 {
        self.first
    }
}

#[derive(Debug, Default)]
struct Chunk {
    slots: Vec<Slot>,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Buckets {
    starts: Vec<u64>,
    chunks: Vec<Chunk>,
    len: usize,
}

impl Buckets {
    /// Number of buckets.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Chunk and place in it of the last bucket that begins at or before `pos`.
    fn at_or_before(&self, pos: u64) -> Option<(usize, usize)> {
        let chunk = lower_bound(&self.starts, pos.saturating_add(1)).checked_sub(1)?;
        let place = lower_bound(&self.chunks[chunk].slots, pos.saturating_add(1)).checked_sub(1)?;
        Some((chunk, place))
    }

    fn place(&self, first: u64) -> Option<(usize, usize)> {
        self.at_or_before(first).filter(|(c, i)| self.chunks[*c].slots[*i].first == first)
    }

    /// The last bucket that begins at or before `pos`.
    pub fn floor(&self, pos: u64) -> Option<(u64, &Bucket)> {
        let (c, i) = self.at_or_before(pos)?;
        let slot = &self.chunks[c].slots[i];
        Some((slot.first, &slot.bucket))
    }

    /// [`Self::floor`], to change.
    pub fn floor_mut(&mut self, pos: u64) -> Option<(u64, &mut Content)> {
        let (c, i) = self.at_or_before(pos)?;
        let slot = &mut self.chunks[c].slots[i];
        Some((slot.first, slot.bucket.own()))
    }

    /// Where the first bucket begins that does so behind `pos`.
    pub fn next_first(&self, pos: u64) -> Option<u64> {
        match self.at_or_before(pos) {
            None => self.starts.first().copied(),
            Some((c, i)) => {
                self.chunks[c].slots.get(i + 1).map(|s| s.first).or_else(|| self.starts.get(c + 1).copied())
            }
        }
    }

    /// Whether a bucket begins at `first`.
    pub fn has(&self, first: u64) -> bool {
        self.place(first).is_some()
    }

    /// The bucket that begins at `first`.
    pub fn get_mut(&mut self, first: u64) -> Option<&mut Content> {
        let (c, i) = self.place(first)?;
        Some(self.chunks[c].slots[i].bucket.own())
    }

    /// Puts a bucket; one that begins there already is replaced.
    pub fn insert(&mut self, first: u64, bucket: Bucket) {
        if let Some((c, i)) = self.place(first) {
            *self.chunks[c].slots[i].bucket = bucket;
            return;
        }
        self.len += 1;
        if self.chunks.is_empty() {
            self.starts.push(first);
            // most directories have one bucket
            self.chunks.push(Chunk { slots: Vec::with_capacity(1) });
        }
        let c = lower_bound(&self.starts, first).saturating_sub(1);
        let chunk = &mut self.chunks[c];
        let i = lower_bound(&chunk.slots, first);
        chunk.slots.insert(i, Slot { first, bucket: Box::new(bucket) });
        self.starts[c] = chunk.slots[0].first;
        if chunk.slots.len() > CHUNK_MAX {
            let half = chunk.slots.len() / 2;
            let new = Chunk { slots: chunk.slots.split_off(half) };
            self.starts.insert(c + 1, new.slots[0].first);
            self.chunks.insert(c + 1, new);
        }
    }

    /// Takes the bucket out that begins at `first`.
    pub fn remove(&mut self, first: u64) -> Option<Content> {
        let (c, i) = self.place(first)?;
        self.len -= 1;
        let chunk = &mut self.chunks[c];
        let slot = chunk.slots.remove(i);
        match chunk.slots.first() {
            Some(start) => self.starts[c] = start.first,
            None => {
                self.chunks.remove(c);
                self.starts.remove(c);
            }
        }
        Some(slot.bucket.0.into_inner())
    }

    /// All in order.
    #[cfg(test)]
    pub fn iter(&self) -> impl Iterator<Item = (u64, &Bucket)> {
        self.chunks.iter().flat_map(|c| c.slots.iter().map(|s| (s.first, &*s.bucket)))
    }

    /// Those from the last one on that begins at or before `pos`.
    pub fn iter_from(&self, pos: u64) -> impl Iterator<Item = (u64, &Bucket)> {
        let (chunk, place) = self.at_or_before(pos).unwrap_or((0, 0));
        let skip = move |n: usize| if n == 0 { place } else { 0 };
        let chunks = self.chunks[chunk..].iter().enumerate();
        chunks.flat_map(move |(n, c)| c.slots[skip(n)..].iter().map(|s| (s.first, &*s.bucket)))
    }

    /// All in order, to change.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (u64, &mut Content)> {
        self.chunks.iter_mut().flat_map(|c| c.slots.iter_mut().map(|s| (s.first, s.bucket.own())))
    }

    /// Those that begin at `firsts`, to change. Others are not touched.
    pub fn these_mut<'b>(&'b mut self, firsts: &BTreeSet<u64>) -> impl Iterator<Item = (u64, &'b mut Content)> {
        let ends = self.starts.iter().skip(1).copied().chain([u64::MAX]);
        let chunks = self.chunks.iter_mut().zip(self.starts.iter().copied().zip(ends));
        let some = chunks.filter(|(_, (from, to))| firsts.range(*from..*to).next().is_some());
        let all = some.flat_map(|(c, _)| &mut c.slots);
        all.filter(|s| firsts.contains(&s.first)).map(|s| (s.first, s.bucket.own()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn bucket(bytes: usize) -> Bucket {
        Bucket::new(0, None, bytes)
    }

    /// What who changes a name of a shared directory touches of the bucket lies in one cache line, with the lock.
    #[test]
    fn a_shared_bucket_has_one_line_at_its_beginning() {
        let mut entries = Entries::default();
        entries.share(true);
        let mut bucket = Box::new(Bucket::new(0, Some(entries), 0));
        let from = std::ptr::from_ref(&*bucket).addr();
        let content = bucket.own();
        let Some(Entries::Spread(spread)) = &content.entries else { panic!("{content:?}") };
        let ends = [
            std::ptr::from_ref(&content.dirty).addr() + 1,
            std::ptr::from_ref(&content.name_time).addr() + 8,
            std::ptr::from_ref(spread).addr() + size_of_val(spread),
        ];
        // the checker of locks keeps the place of the lock before all
        let checker = if braidfs_sync::CHECKED { 64 } else { 0 };
        assert!(ends.iter().all(|end| *end <= from + 64 + checker), "{ends:?} from {from}");
    }

    /// Against a tree, in the order of a small generator; keys in clusters, so that guesses miss.
    #[test]
    fn like_a_tree() {
        let (mut mine, mut tree) = (Buckets::default(), BTreeMap::new());
        let mut seed = 7u64;
        for round in 0..40_000usize {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let key = [seed >> 50, seed >> 1, (seed >> 44) << 40][round % 3];
            // it grows to several chunks, then shrinks to nothing
            if seed >> 20 & 7 < if round < 20_000 { 6 } else { 1 } {
                mine.insert(key, bucket(round));
                tree.insert(key, round);
            } else if let Some((&first, _)) = tree.range(key..).next() {
                assert_eq!(mine.remove(first).map(|b| b.bytes as usize), tree.remove(&first));
            }
            assert_eq!(mine.len(), tree.len());
            assert_eq!(mine.floor(key).map(|b| b.0), tree.range(..=key).next_back().map(|b| *b.0));
            assert_eq!(mine.floor_mut(key).map(|b| b.1.bytes as usize), tree.range(..=key).next_back().map(|b| *b.1));
            assert_eq!(mine.next_first(key), tree.range(key + 1..).next().map(|b| *b.0));
            assert_eq!(mine.get_mut(key).map(|b| b.bytes as usize), tree.get(&key).copied());
            if round % 1000 == 0 {
                assert!(mine.iter().map(|b| (b.0, b.1.0.read().bytes as usize)).eq(tree.iter().map(|b| (*b.0, *b.1))));
                assert!(mine.iter_mut().map(|b| b.0).eq(tree.keys().copied()));
                let some: BTreeSet<u64> = tree.keys().copied().filter(|k| k % 7 < 2).chain([key]).collect();
                assert!(mine.these_mut(&some).map(|b| b.0).eq(some.iter().copied().filter(|k| tree.contains_key(k))));
                let from = tree.range(..=key).next_back().map_or(0, |b| *b.0);
                assert!(mine.iter_from(key).map(|b| b.0).eq(tree.range(from..).map(|b| *b.0)));
                if round == 20_000 {
                    assert!(mine.chunks.len() > 10);
                }
            }
        }
        for first in tree.keys() {
            mine.remove(*first);
        }
        assert!(mine.chunks.is_empty() && mine.starts.is_empty() && mine.floor(u64::MAX).is_none());
    }
}
