//! The entries of one bucket.
//!
//! A large directory lies in no cache of the processor, so that what an operation costs there is the number of cache lines
//! that it touches, above all of those that it finds only after others. So the upper halves of the positions stand in order
//! in an array of their own: a search begins where the position should be and touches one or two lines of it, an insertion
//! moves five bytes for each entry behind it. The entries themselves stay where they came to lie, and the place of one that
//! left is taken by the next that comes.
//!
//! Invariants: `heads` rise, of entries with the same head the positions; the entry of `heads[i]` is `slots[order[i]]`; both
//! have the same length, at most [`MOST`]. Slots that are in no `order` are the list that begins at `free`. All heads lie
//! between `lo` and `hi`.

use super::encoded;
use braidfs_format::NodeId;
use braidfs_format::dentry::{BUCKET_BYTES, Dentry, ENTRY_FIXED_BYTES};
use std::ops::Range;

/// Most entries: what fits a bucket with names of one byte, and the one that makes it split.
pub const MOST: usize = BUCKET_BYTES / (ENTRY_FIXED_BYTES + 1) + 1;
const _: () = assert!(MOST <= 256, "numbers of slots are bytes");

/// No slot, in the list of free ones.
const NONE: u64 = u64::MAX;

/// The upper half of a position, which has 63 bits; of more than that, the highest.
fn head(pos: u64) -> u32 {
    u32::try_from(pos >> 31).unwrap_or(u32::MAX)
}

/// See the module.
#[derive(Debug, Clone)]
pub struct Entries {
    /// Upper halves of the positions, rising.
    heads: Vec<u32>,
    /// Where the entry of each lies in `slots`.
    order: Vec<u8>,
    slots: Vec<Dentry>,
    /// First free slot, whose `hash` is the next one's number.
    free: u64,
    /// Bounds of the heads: a search reads neither end of the array.
    lo: u32,
    hi: u32,
}

impl Default for Entries {
    fn default() -> Self {
        Self::new_empty()
    }
}

impl PartialEq for Entries {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

impl Eq for Entries {}

impl Entries {
    /// Of entries that rise. At most [`MOST`]: others would not fit a bucket.
    pub fn new(slots: Vec<Dentry>) -> Self {
        debug_assert!(slots.len() <= 256 && slots.is_sorted_by(|a, b| a.hash < b.hash));
        // as much room to grow as the entries have
        let (mut heads, mut order) = (Vec::with_capacity(slots.capacity()), Vec::with_capacity(slots.capacity()));
        heads.extend(slots.iter().map(|e| head(e.hash)));
        order.extend((0..slots.len()).map(|i| i as u8));
        let (lo, hi) = (heads.first().copied().unwrap_or(u32::MAX), heads.last().copied().unwrap_or(0));
        Self { heads, order, slots, free: NONE, lo, hi }
    }

    /// None.
    pub const fn new_empty() -> Self {
        Self { heads: Vec::new(), order: Vec::new(), slots: Vec::new(), free: NONE, lo: u32::MAX, hi: 0 }
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.heads.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.heads.is_empty()
    }

    /// The entry of the position that is the `rank`th.
    pub fn get(&self, rank: usize) -> Option<&Dentry> {
        self.slots.get(usize::from(*self.order.get(rank)?))
    }

    /// [`Self::get`], to change all but its position.
    pub fn get_mut(&mut self, rank: usize) -> Option<&mut Dentry> {
        self.slots.get_mut(usize::from(*self.order.get(rank)?))
    }

    /// Whether the entry of the rank stands at this position.
    pub fn is_at(&self, rank: usize, pos: u64) -> bool {
        self.heads.get(rank) == Some(&head(pos)) && self.get(rank).is_some_and(|e| e.hash == pos)
    }

    /// Rank of the entry with this name between two positions.
    pub fn find(&self, positions: Range<u64>, name: &[u8]) -> Option<usize> {
        let end = head(positions.end);
        let mut rank = self.search(head(positions.start));
        while *self.heads.get(rank)? <= end {
            if self.get(rank).is_some_and(|e| positions.contains(&e.hash) && *e.name == *name) {
                return Some(rank);
            }
            rank += 1;
        }
        None
    }

    /// Entries in order.
    pub fn iter(&self) -> impl Iterator<Item = &Dentry> + Clone {
        self.order.iter().map(|slot| &self.slots[usize::from(*slot)])
    }

    /// Reads the entries once as they lie in memory: who is about to walk over them in order then waits for none of them.
    pub fn fetch(&self) {
        let bytes: usize = self.slots.iter().map(|e| e.name.len()).sum();
        std::hint::black_box(bytes);
    }

    /// Rank of the first entry whose head is at least this. Positions are hashes and spread evenly: the search begins where
    /// the head should be, which touches less memory than halving.
    fn search(&self, head: u32) -> usize {
        let heads = self.heads.as_slice();
        let n = heads.len();
        if head <= self.lo || n == 0 {
            return 0;
        }
        if head > self.hi {
            return n;
        }
        // from here on lo < head <= hi
        let (off, span) = (u64::from(head - self.lo), u64::from(self.hi - self.lo) + 1);
        let guess = (off * n as u64 / span) as usize;
        let mut step = 4;
        let (mut from, mut to) = (guess, guess);
        if heads[guess] < head {
            // the answer lies behind `from`, and not behind `to`
            while to < n && heads[to] < head {
                from = to;
                to = (to + step).min(n);
                step *= 2;
            }
            from += 1;
        } else {
            // the answer lies at `from` at the earliest
            while from > 0 && heads[from - 1] >= head {
                to = from - 1;
                from = from.saturating_sub(step);
                step *= 2;
            }
        }
        from + heads[from..to].partition_point(|h| *h < head)
    }

    /// Rank of the first entry at or behind `pos`.
    pub fn lower_bound(&self, pos: u64) -> usize {
        let mut rank = self.search(head(pos));
        while self.heads.get(rank) == Some(&head(pos)) && self.get(rank).is_some_and(|e| e.hash < pos) {
            rank += 1;
        }
        rank
    }

    /// Adds an entry, whose position is not taken; its rank.
    pub fn insert(&mut self, entry: Dentry) -> usize {
        let rank = self.lower_bound(entry.hash);
        debug_assert!(!self.is_at(rank, entry.hash) && self.len() < 256);
        let head = head(entry.hash);
        (self.lo, self.hi) = (self.lo.min(head), self.hi.max(head));
        let slot = match self.slots.get_mut(self.free as usize) {
            Some(free) => {
                let slot = std::mem::replace(&mut self.free, free.hash) as usize;
                *free = entry;
                slot
            }
            None => {
                self.slots.push(entry);
                self.slots.len() - 1
            }
        };
        self.heads.insert(rank, head);
        self.order.insert(rank, slot as u8);
        rank
    }

    /// Takes the entry of a rank out.
    pub fn remove(&mut self, rank: usize) -> Option<Dentry> {
        let slot = usize::from(*self.order.get(rank)?);
        let free = Dentry { hash: self.free, node: NodeId(0), gener: 0, kind: 0, name: [].into() };
        let entry = std::mem::replace(self.slots.get_mut(slot)?, free);
        self.free = slot as u64;
        self.heads.remove(rank);
        self.order.remove(rank);
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
