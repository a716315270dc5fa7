//! The entries of one bucket.
//!
//! Positions stand in order in an array of their own, so that a search in a large directory, whose buckets are in no cache
//! of the processor, touches two or three cache lines, and an insertion moves nine bytes for each entry behind it and not
//! the entries themselves. They lie in the order in which they came.
//!
//! Invariants: `keys` rise; the entry of `keys[i]` is `slots[order[i]]`; all three have the same length, at most
//! [`MOST`].

use super::encoded;
use braidfs_format::dentry::{BUCKET_BYTES, Dentry, ENTRY_FIXED_BYTES};
use std::ops::Range;

/// Most entries: what fits a bucket with names of one byte, and the one that makes it split.
pub const MOST: usize = BUCKET_BYTES / (ENTRY_FIXED_BYTES + 1) + 1;
const _: () = assert!(MOST <= 256, "numbers of slots are bytes");

/// Index of the first of the rising `keys` at or behind `pos`. Hashes are spread evenly: the search begins where the key
/// should be, which touches less memory than halving.
pub fn lower_bound(keys: &[u64], pos: u64) -> usize {
    let (Some(&lo), Some(&hi)) = (keys.first(), keys.last()) else { return 0 };
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
    if keys[from] < pos {
        // the answer lies behind `from`, and not behind `to`
        while keys[to] < pos {
            from = to;
            to = (to + step).min(n);
            step *= 2;
        }
    } else {
        while keys[from] >= pos {
            to = from;
            from = from.saturating_sub(step);
            step *= 2;
        }
    }
    from + 1 + keys[from + 1..to].partition_point(|k| *k < pos)
}

/// See the module.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Entries {
    /// Positions, rising.
    keys: Vec<u64>,
    /// Where the entry of each lies in `slots`.
    order: Vec<u8>,
    slots: Vec<Dentry>,
}

impl Entries {
    /// Of entries that rise. At most [`MOST`]: others would not fit a bucket.
    pub fn new(slots: Vec<Dentry>) -> Self {
        debug_assert!(slots.len() <= 256 && slots.is_sorted_by(|a, b| a.hash < b.hash));
        Self { keys: slots.iter().map(|e| e.hash).collect(), order: (0..slots.len()).map(|i| i as u8).collect(), slots }
    }

    /// None.
    pub const fn new_empty() -> Self {
        Self { keys: Vec::new(), order: Vec::new(), slots: Vec::new() }
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Positions, rising.
    pub fn keys(&self) -> &[u64] {
        &self.keys
    }

    /// The entry of the position that is the `rank`th.
    pub fn get(&self, rank: usize) -> Option<&Dentry> {
        self.slots.get(usize::from(*self.order.get(rank)?))
    }

    /// [`Self::get`], to change all but its position.
    pub fn get_mut(&mut self, rank: usize) -> Option<&mut Dentry> {
        self.slots.get_mut(usize::from(*self.order.get(rank)?))
    }

    /// Entries in order.
    pub fn iter(&self) -> impl Iterator<Item = &Dentry> + Clone {
        self.order.iter().map(|slot| &self.slots[usize::from(*slot)])
    }

    /// Rank of the first entry at or behind `pos`.
    pub fn lower_bound(&self, pos: u64) -> usize {
        lower_bound(&self.keys, pos)
    }

    /// Adds an entry, whose position is not taken; its rank.
    pub fn insert(&mut self, entry: Dentry) -> usize {
        let rank = self.lower_bound(entry.hash);
        debug_assert!(self.keys.get(rank) != Some(&entry.hash) && self.slots.len() < 256);
        self.keys.insert(rank, entry.hash);
        self.order.insert(rank, self.slots.len() as u8);
        self.slots.push(entry);
        rank
    }

    /// Takes the entry of a rank out.
    pub fn remove(&mut self, rank: usize) -> Option<Dentry> {
        let slot = usize::from(*self.order.get(rank)?);
        self.keys.remove(rank);
        self.order.remove(rank);
        let entry = self.slots.swap_remove(slot);
        // the last one took its place
        if let Some(moved) = self.slots.get(slot) {
            let its = self.lower_bound(moved.hash);
            self.order[its] = slot as u8;
        }
        Some(entry)
    }

    /// Bytes of these ranks as they are encoded.
    pub fn encoded(&self, ranks: Range<usize>) -> usize {
        encoded(self.order[ranks].iter().map(|slot| &self.slots[usize::from(*slot)]))
    }

    /// Leaves the ranks before the first of `starts`, which rise, and gives those from each to the next.
    pub fn split_at(&mut self, starts: &[usize]) -> Vec<Self> {
        let mut slots: Vec<Option<Dentry>> = std::mem::take(&mut self.slots).into_iter().map(Some).collect();
        let order = std::mem::take(&mut self.order);
        let mut part = |ranks: Range<usize>| {
            let entries = order[ranks].iter().filter_map(|slot| slots[usize::from(*slot)].take());
            // with room to grow: it will
            let mut of = Vec::with_capacity(MOST / 2);
            of.extend(entries);
            Self::new(of)
        };
        let ends = starts.iter().skip(1).copied().chain([order.len()]);
        let parts = starts.iter().zip(ends).map(|(from, to)| part(*from..to)).collect();
        *self = part(0..starts.first().copied().unwrap_or(order.len()));
        parts
    }
}
