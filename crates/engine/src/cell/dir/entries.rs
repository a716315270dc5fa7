//! The entries of one bucket: [`Sorted`] of a directory that one thread changes, [`Spread`] of one that several do.
//!
//! Which of both it is changes when the bucket is changed next, so that a directory of any size begins and ends to be shared
//! at once. An entry is named by its *place*, which is good until the entries change.

use super::sorted::Sorted;
use super::spread::{Spread, TABLE_BYTES};
use braidfs_format::dentry::{Dentry, bucket_lblk};
use std::ops::Range;

/// See the module.
#[derive(Debug)]
pub enum Entries {
    /// In order of their positions.
    Sorted(Sorted),
    /// In memory of their own each.
    Spread(Spread),
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

/// Entries in order.
#[derive(Debug, Clone)]
enum InOrder<A, B> {
    Sorted(A),
    Spread(B),
}

impl<'e, A: Iterator<Item = &'e Dentry>, B: Iterator<Item = &'e Dentry>> Iterator for InOrder<A, B> {
    type Item = &'e Dentry;
    #[inline]
    fn next(&mut self) -> Option<&'e Dentry> {
        match self {
            Self::Sorted(a) => a.next(),
            Self::Spread(b) => b.next(),
        }
    }
}

impl Entries {
    /// Of entries that rise. At most as many as fit a bucket.
    pub fn new(entries: Vec<Dentry>) -> Self {
        Self::Sorted(Sorted::new(entries))
    }

    /// A bucket without entries.
    pub const fn new_empty() -> Self {
        Self::Sorted(Sorted::new_empty())
    }

    /// Makes them what a directory that several threads change has, or what another one has. Where they were not, bytes of
    /// memory more, or less: places have then changed, also where that is 0.
    #[inline]
    pub fn share(&mut self, shared: bool) -> Option<i64> {
        if matches!(self, Self::Spread(_)) == shared { None } else { Some(self.convert()) }
    }

    #[cold]
    #[inline(never)]
    fn convert(&mut self) -> i64 {
        let before = self.own_bytes();
        *self = match std::mem::take(self) {
            Self::Sorted(s) => Self::Spread(s.into()),
            Self::Spread(s) => Self::Sorted(s.into()),
        };
        self.own_bytes() - before
    }

    /// [`Self::memory`] without that of long names.
    fn own_bytes(&self) -> i64 {
        (self.table_bytes() + self.len() * self.entry_bytes()) as i64
    }

    /// Who has the bucket locked for writing will change the entry of a name that stands here if nothing is in its way, or make
    /// it.
    #[inline]
    pub fn claim(&self, home: u64) {
        if let Self::Spread(s) = self {
            s.claim(home);
        }
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        match self {
            Self::Sorted(s) => s.len(),
            Self::Spread(s) => s.len(),
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Memory that they take, roughly, in bytes.
    pub fn memory(&self) -> usize {
        self.table_bytes() + self.iter().map(|e| self.memory_of(e)).sum::<usize>()
    }

    /// What of it does not change with each entry that comes or goes.
    pub fn table_bytes(&self) -> usize {
        match self {
            Self::Sorted(s) => s.table_bytes(),
            Self::Spread(_) => TABLE_BYTES,
        }
    }

    /// What each entry takes beside that, without a long name.
    fn entry_bytes(&self) -> usize {
        if matches!(self, Self::Spread(_)) { size_of::<Dentry>() } else { 0 }
    }

    /// Memory of one entry, bytes.
    pub fn memory_of(&self, d: &Dentry) -> usize {
        self.entry_bytes() + d.name.heap_bytes()
    }

    /// The entry of a place.
    pub fn get(&self, place: usize) -> Option<&Dentry> {
        match self {
            Self::Sorted(s) => s.get(place),
            Self::Spread(s) => s.get(place),
        }
    }

    /// [`Self::get`], to change all but its position and its name.
    pub fn get_mut(&mut self, place: usize) -> Option<&mut Dentry> {
        match self {
            Self::Sorted(s) => s.get_mut(place),
            Self::Spread(s) => s.get_mut(place),
        }
    }

    /// Place of the entry with this name between two positions, which are not far from each other.
    #[inline]
    pub fn find(&self, positions: Range<u64>, name: &[u8]) -> Option<usize> {
        match self {
            Self::Sorted(s) => s.find(positions, name),
            Self::Spread(s) => s.find(positions, name),
        }
    }

    /// The first position from `pos` on that is not taken, `end + 1` at most.
    #[inline]
    pub fn first_free(&self, pos: u64, end: u64) -> u64 {
        match self {
            Self::Sorted(s) => s.first_free(pos, end),
            Self::Spread(s) => s.first_free(pos, end),
        }
    }

    /// Place of the first entry at or behind `pos`.
    pub fn lower_bound(&self, pos: u64) -> Option<usize> {
        match self {
            Self::Sorted(s) => Some(s.lower_bound(pos)).filter(|rank| *rank < s.len()),
            Self::Spread(s) => s.lower_bound(pos),
        }
    }

    /// Hands up to `most` entries at or behind `pos` to `each`, in order; how many there were.
    pub fn list(&self, pos: u64, most: usize, each: &mut dyn FnMut(&Dentry)) -> usize {
        match self {
            Self::Sorted(s) => {
                let from = s.lower_bound(pos);
                let to = s.len().min(from + most);
                (from..to).filter_map(|rank| s.get(rank)).for_each(each);
                to - from
            }
            Self::Spread(s) => s.list(pos, most, each),
        }
    }

    /// Entries in order.
    pub fn iter(&self) -> impl Iterator<Item = &Dentry> + Clone {
        match self {
            Self::Sorted(s) => InOrder::Sorted(s.iter()),
            Self::Spread(s) => InOrder::Spread(s.in_order().into_iter()),
        }
    }

    /// Reads the entries once as they lie in memory: who is about to walk over them in order then waits for none of them.
    pub fn fetch(&self) {
        if let Self::Sorted(s) = self {
            s.fetch();
        }
    }

    /// The logical block of a bucket that began there, and the encoded bytes, of each entry in order, before a split.
    pub fn layout(&self) -> Vec<(u64, usize)> {
        match self {
            Self::Sorted(s) => {
                s.fetch();
                s.iter().map(|e| (bucket_lblk(e.hash), e.encoded_bytes())).collect()
            }
            Self::Spread(s) => s.layout(),
        }
    }

    /// Adds an entry, whose position is not taken; its place.
    #[inline]
    pub fn insert(&mut self, entry: Dentry) -> usize {
        match self {
            Self::Sorted(s) => s.insert(entry),
            Self::Spread(s) => s.insert(entry),
        }
    }

    /// Takes the entry of a place out.
    #[inline]
    pub fn remove(&mut self, place: usize) -> Option<Dentry> {
        match self {
            Self::Sorted(s) => s.remove(place),
            Self::Spread(s) => s.remove(place),
        }
    }

    /// Keeps what lies before the first of the positions, which rise and are those of blocks, and gives what lies from each
    /// to the next.
    pub fn split_at(&mut self, from: &[u64]) -> Vec<Self> {
        match self {
            Self::Sorted(s) => s.split_at(from).into_iter().map(Self::Sorted).collect(),
            Self::Spread(s) => s.split_at(from).into_iter().map(Self::Spread).collect(),
        }
    }
}

/// Bytes of entries in a bucket.
pub(super) fn encoded<'a>(entries: impl Iterator<Item = &'a Dentry>) -> usize {
    entries.map(Dentry::encoded_bytes).sum()
}
