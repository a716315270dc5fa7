//! The entries of one bucket, of a directory that one thread changes.
//!
//! A large directory lies in no cache of the processor, so that what an operation costs there is the number of cache lines
//! that it touches, above all of those that it finds only after others. So the positions stand in order in an array of their
//! own, each with the place of its entry in one word ([`Key`]): a search begins where the position should be and touches one
//! or two lines of it, then the entry. Entries stay where they came to lie, and the place of one that left is taken by the
//! next that comes. Until then it is as it was: who removes a name that a commit has read writes keys only, of which eight lie in
//! a cache line.
//!
//! Invariants: the heads of the first `len` keys rise, of keys with the same head the positions; there are at most [`MOST`]. The keys
//! behind them name the slots that are free, the one that left last first; of their heads nothing is known. All heads of the others
//! lie between `lo` and `hi`.

use braidfs_format::dentry::{BUCKET_BYTES, Dentry, ENTRY_FIXED_BYTES, HASH_MAX};
use std::ops::Range;

/// Most entries: what fits a bucket with names of one byte, and the one that makes it split.
pub const MOST: usize = BUCKET_BYTES / (ENTRY_FIXED_BYTES + 1) + 1;
const _: () = assert!(MOST <= 256, "numbers of slots are bytes");

/// The upper 56 bits of a position, which has 63: the head; of more than that, the highest.
fn head(pos: u64) -> u64 {
    pos.min(HASH_MAX) >> 7
}

/// What says where a head should stand among others.
fn upper(head: u64) -> u32 {
    (head >> 24) as u32
}

/// A head, and below it the slot of the entry.
#[derive(Debug, Clone, Copy)]
struct Key(u64);

impl Key {
    fn new(head: u64, slot: u8) -> Self {
        Self(head << 8 | u64::from(slot))
    }
    fn head(self) -> u64 {
        self.0 >> 8
    }
    fn slot(self) -> usize {
        (self.0 & 0xff) as usize
    }
}

/// See the module.
#[derive(Debug, Clone)]
pub struct Sorted {
    keys: Vec<Key>,
    slots: Vec<Dentry>,
    /// Bounds of the heads, their upper 32 bits: a search reads neither end of the array.
    lo: u32,
    hi: u32,
    /// Keys of entries. As many as there are slots name those that are free.
    len: u16,
}

impl Default for Sorted {
    fn default() -> Self {
        Self::new_empty()
    }
}

impl Sorted {
    /// Of entries that rise. At most [`MOST`]: others would not fit a bucket.
    pub fn new(slots: Vec<Dentry>) -> Self {
        debug_assert!(slots.len() <= 256 && slots.is_sorted_by(|a, b| a.hash < b.hash));
        // as much room to grow as the entries have, which is none where they were just read
        let mut keys = Vec::with_capacity(slots.capacity());
        keys.extend((0u8..=255).zip(&slots).map(|(i, e)| Key::new(head(e.hash), i)));
        let lo = slots.first().map_or(u32::MAX, |e| upper(head(e.hash)));
        let hi = slots.last().map_or(0, |e| upper(head(e.hash)));
        let len = slots.len() as u16;
        Self { keys, slots, lo, hi, len }
    }

    /// With no entries.
    pub const fn new_empty() -> Self {
        Self { keys: Vec::new(), slots: Vec::new(), lo: u32::MAX, hi: 0, len: 0 }
    }

    /// Memory of keys and slots, those that are free and those that are yet to come included, bytes.
    pub fn table_bytes(&self) -> usize {
        self.keys.capacity() * size_of::<Key>() + self.slots.capacity() * size_of::<Dentry>()
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        usize::from(self.len)
    }

    /// The keys of entries.
    fn used(&self) -> &[Key] {
        &self.keys[..self.len()]
    }

    /// The entry of the position that is the `rank`th.
    pub fn get(&self, rank: usize) -> Option<&Dentry> {
        self.slots.get(self.used().get(rank)?.slot())
    }

    /// [`Self::get`], to change all but its position.
    pub fn get_mut(&mut self, rank: usize) -> Option<&mut Dentry> {
        let slot = self.used().get(rank)?.slot();
        self.slots.get_mut(slot)
    }

    /// Whether the entry of the rank stands at this position.
    pub fn is_at(&self, rank: usize, pos: u64) -> bool {
        self.has_head(rank, pos) && self.get(rank).is_some_and(|e| e.hash == pos)
    }

    fn has_head(&self, rank: usize, pos: u64) -> bool {
        self.used().get(rank).is_some_and(|k| k.head() == head(pos))
    }

    /// Rank of the entry with this name between two positions.
    pub fn find(&self, positions: Range<u64>, name: &[u8]) -> Option<usize> {
        let end = head(positions.end);
        let mut rank = self.search(head(positions.start));
        while self.used().get(rank)?.head() <= end {
            if self.get(rank).is_some_and(|e| positions.contains(&e.hash) && *e.name == *name) {
                return Some(rank);
            }
            rank += 1;
        }
        None
    }

    /// Entries in order.
    pub fn iter(&self) -> impl Iterator<Item = &Dentry> + Clone {
        self.used().iter().map(|key| &self.slots[key.slot()])
    }

    /// Reads the entries once as they lie in memory: who is about to walk over them in order then waits for none of them.
    pub fn fetch(&self) {
        let bytes: usize = self.slots.iter().map(|e| e.name.len()).sum();
        std::hint::black_box(bytes);
    }

    /// Rank of the first entry whose head is at least this. Positions are hashes and spread evenly: the search begins where
    /// the head should be, which touches less memory than halving.
    fn search(&self, head: u64) -> usize {
        let keys = self.used();
        let (n, top) = (keys.len(), upper(head));
        if top < self.lo || n == 0 {
            return 0;
        }
        if top > self.hi {
            return n;
        }
        let (off, span) = (u64::from(top - self.lo), u64::from(self.hi - self.lo) + 1);
        let guess = (off * n as u64 / span) as usize;
        let mut step = 4;
        let (mut from, mut to) = (guess, guess);
        if keys[guess].head() < head {
            // the answer lies behind `from`, and not behind `to`
            while to < n && keys[to].head() < head {
                from = to;
                to = (to + step).min(n);
                step *= 2;
            }
            from += 1;
        } else {
            // the answer lies at `from` at the earliest
            while from > 0 && keys[from - 1].head() >= head {
                to = from - 1;
                from = from.saturating_sub(step);
                step *= 2;
            }
        }
        from + keys[from..to].partition_point(|k| k.head() < head)
    }

    /// Rank of the first entry at or behind `pos`.
    pub fn lower_bound(&self, pos: u64) -> usize {
        let mut rank = self.search(head(pos));
        while self.has_head(rank, pos) && self.get(rank).is_some_and(|e| e.hash < pos) {
            rank += 1;
        }
        rank
    }

    /// Adds an entry, whose position is not taken; its rank.
    pub fn insert(&mut self, entry: Dentry) -> usize {
        let rank = self.lower_bound(entry.hash);
        debug_assert!(!self.is_at(rank, entry.hash) && self.len() < 256);
        let head = head(entry.hash);
        (self.lo, self.hi) = (self.lo.min(upper(head)), self.hi.max(upper(head)));
        let len = self.len();
        match self.keys.get(len) {
            Some(free) => self.slots[free.slot()] = entry,
            None => {
                self.keys.push(Key::new(0, self.slots.len() as u8));
                self.slots.push(entry);
            }
        }
        let slot = self.keys[len].slot();
        self.keys.copy_within(rank..len, rank + 1);
        self.keys[rank] = Key::new(head, slot as u8);
        self.len += 1;
        rank
    }

    /// Takes the entry of a rank out.
    pub fn remove(&mut self, rank: usize) -> Option<Dentry> {
        let freed = *self.used().get(rank)?;
        let entry = self.take(freed.slot())?;
        let last = self.len() - 1;
        self.keys.copy_within(rank + 1..=last, rank);
        self.keys[last] = freed;
        self.len -= 1;
        Some(entry)
    }

    /// The first position from `pos` on that is not taken, `end + 1` at most.
    pub fn first_free(&self, mut pos: u64, end: u64) -> u64 {
        let mut rank = self.lower_bound(pos);
        while pos <= end && self.is_at(rank, pos) {
            (rank, pos) = (rank + 1, pos + 1);
        }
        pos
    }

    /// Keeps what lies before the first of the positions, which rise, and gives what lies from each to the next. Entries that
    /// stay are not moved.
    pub fn split_at(&mut self, from: &[u64]) -> Vec<Self> {
        let mut parts: Vec<Self> = from.iter().rev().map(|pos| self.split_off(self.lower_bound(*pos))).collect();
        parts.reverse();
        parts
    }

    /// Gives the entries from a rank on.
    fn split_off(&mut self, rank: usize) -> Self {
        let (rank, len) = (rank.min(self.len()), self.len());
        // with room to grow: it will
        let mut slots = Vec::with_capacity((len - rank).max(MOST / 2));
        for i in rank..len {
            slots.extend(self.take(self.keys[i].slot()));
        }
        self.len = rank as u16;
        self.hi = self.used().last().map_or(0, |key| upper(key.head()));
        Self::new(slots)
    }

    /// The slots of the entries in order, and what is in the slots.
    pub fn into_slots(self) -> (impl Iterator<Item = usize>, Vec<Dentry>) {
        let len = self.len();
        (self.keys.into_iter().take(len).map(Key::slot), self.slots)
    }

    /// The entry of a slot that is about to be free. A name that has memory of its own is taken out; else the slot is only read.
    fn take(&mut self, slot: usize) -> Option<Dentry> {
        let entry = self.slots.get_mut(slot)?;
        if entry.name.heap_bytes() == 0 {
            return Some(entry.clone());
        }
        Some(Dentry { name: std::mem::replace(&mut entry.name, [].into()), ..*entry })
    }
}
