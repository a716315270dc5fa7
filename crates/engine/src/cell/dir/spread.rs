//! The entries of one bucket, of a directory that several threads change.
//!
//! Who changes a bucket there mostly finds in another thread's cache what it touches, so what a change costs is the number of
//! lines that it reads and writes. In a sorted array that is half of the array. Here the keys lie in groups by a hash of the
//! position, a group being one cache line, and each entry in memory of its own, which the thread that made it allocated: a
//! change touches one group, and an entry only where it is the one that is looked for. A key tells where the bucket can be
//! cut, and the length of the name, so that a split reads keys and no entries. What has to be in order is sorted when somebody
//! asks for it.
//!
//! Entries that were there when the directory began to be shared stay where they are (`kept`), and are only read: nobody
//! frees memory that another thread allocated.
//!
//! Invariants: of a group of which keys lie in `overflow` all places are taken; a group that [`Spread::used`] has no bit of has no
//! keys.

use super::sorted::{MOST, Sorted};
use braidfs_format::dentry::{Dentry, ENTRY_FIXED_BYTES, HASH_MAX, bucket_lblk};
use smallvec::SmallVec;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Groups: a full bucket of short names has two or three keys in each. With the line of [`Rest`] they take a page of memory.
const GROUPS: usize = 63;
/// Keys of a group: those of a cache line.
const WAYS: usize = 4;
/// Bytes of memory that the table takes.
pub const TABLE_BYTES: usize = size_of::<Table>();
const _: () = assert!(size_of::<Group>() == 64 && size_of::<Rest>() == 64 && TABLE_BYTES == 4096 && MOST < 255);

/// What is known of an entry without a look at it; or a place for that, which is free.
#[derive(Debug, Default)]
struct Key {
    /// 0 of a free place. The logical block of a bucket that would begin at the entry's position; below it eight bits that say
    /// which of the kept entries it is, counted from 1 (0: none), and eight of the length of the name, which is not 0.
    word: AtomicU64,
    /// The entry that is not kept.
    own: Option<Box<Dentry>>,
}

/// The logical block of a bucket that would begin at a position; of more than there are, the last.
fn block(pos: u64) -> u64 {
    bucket_lblk(pos.min(HASH_MAX))
}

impl Key {
    fn new(entry: &Dentry, kept: u64) -> Self {
        debug_assert!(!entry.name.is_empty());
        let word = block(entry.hash) << 16 | kept << 8 | entry.name.len() as u64;
        Self { word: AtomicU64::new(word), own: None }
    }
    fn of_own(entry: Dentry) -> Self {
        let key = Self::new(&entry, 0);
        Self { own: Some(Box::new(entry)), ..key }
    }
    #[inline]
    fn word(&self) -> u64 {
        // who changes it has the bucket locked for writing
        self.word.load(Relaxed)
    }
    #[inline]
    fn is_free(&self) -> bool {
        self.word() == 0
    }
    #[inline]
    fn block(&self) -> u64 {
        self.word() >> 16
    }
    /// Bytes of the encoded entry.
    fn bytes(&self) -> usize {
        ENTRY_FIXED_BYTES + (self.word() & 0xff) as usize
    }
    fn entry<'e>(&'e self, kept: &'e [Dentry]) -> &'e Dentry {
        match &self.own {
            Some(entry) => entry,
            // who has none of its own is one of those
            None => &kept[(self.word() >> 8 & 0xff) as usize - 1],
        }
    }
}

/// Keys on a cache line of their own.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Group([Key; WAYS]);

impl Group {
    fn keys(&self) -> impl Iterator<Item = &Key> {
        self.0.iter().filter(|k| !k.is_free())
    }
    fn is_full(&self) -> bool {
        !self.0.iter().any(Key::is_free)
    }
    /// Has the line brought to be written, by who has the bucket locked for writing: else it would come for the look before the
    /// change, and be taken from all others again for the change.
    #[inline]
    fn claim(&self) {
        // never the case: the line is as it was
        let _ = self.0[0].word.compare_exchange(u64::MAX, u64::MAX, Relaxed, Relaxed);
    }
}

/// What is not in groups: one cache line, too.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Rest {
    /// Keys that found no place in their group: mostly no more than have room here.
    overflow: SmallVec<[Key; 2]>,
    kept: Option<Arc<Vec<Dentry>>>,
    /// What [`Rest::claim`] writes to.
    mark: AtomicU64,
}

impl Rest {
    /// As [`Group::claim`].
    fn claim(&self) {
        let _ = self.mark.compare_exchange(u64::MAX, u64::MAX, Relaxed, Relaxed);
    }
}

#[derive(Debug)]
#[repr(C)]
struct Table {
    groups: [Group; GROUPS],
    rest: Rest,
}

/// See the module.
#[derive(Debug)]
pub struct Spread {
    table: Box<Table>,
    /// A bit for each group that had keys since the bucket was made. It lies in the bucket's own line: who reads all keys leaves
    /// the lines alone that have none.
    used: u64,
}

/// The group of positions in this block.
#[inline]
fn group_of(block: u64) -> usize {
    let hash = block.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    ((hash * GROUPS as u64) >> 32) as usize
}

/// Those of `groups` that have a bit in `used`.
fn used_of(groups: &[Group; GROUPS], used: u64) -> impl Iterator<Item = &Group> {
    groups.iter().enumerate().filter(move |(g, _)| used >> g & 1 != 0).map(|(_, group)| group)
}

impl Spread {
    fn new(kept: Option<Arc<Vec<Dentry>>>) -> Self {
        let groups = std::array::from_fn(|_| Group::default());
        Self { table: Box::new(Table { groups, rest: Rest { kept, ..Rest::default() } }), used: 0 }
    }

    /// How many: counted.
    pub fn len(&self) -> usize {
        self.keys().count()
    }

    fn kept(&self) -> &[Dentry] {
        self.table.rest.kept.as_ref().map_or(&[], |kept| kept)
    }
    fn overflowing(&self) -> &[Key] {
        &self.table.rest.overflow
    }

    fn keys(&self) -> impl Iterator<Item = &Key> {
        used_of(&self.table.groups, self.used).flat_map(Group::keys).chain(self.overflowing())
    }

    /// Those from a position on, in order.
    fn sorted(&self, from: u64) -> Vec<&Dentry> {
        let keys = self.keys().filter(|k| k.block() >= block(from));
        let mut all: Vec<&Dentry> = keys.map(|k| k.entry(self.kept())).filter(|e| e.hash >= from).collect();
        all.sort_unstable_by_key(|e| e.hash);
        all
    }

    /// All entries, in order.
    pub fn in_order(&self) -> Vec<&Dentry> {
        self.sorted(0)
    }

    /// Who has the bucket locked for writing will change the entry of a name that stands here if nothing is in its way, or make
    /// it.
    #[inline]
    pub fn claim(&self, home: u64) {
        let group = &self.table.groups[group_of(block(home))];
        group.claim();
        if group.is_full() {
            self.table.rest.claim();
        }
    }

    /// The logical block of a bucket that began there, and the encoded bytes, of each entry in order, before a split.
    pub fn layout(&self) -> Vec<(u64, usize)> {
        used_of(&self.table.groups, self.used).for_each(Group::claim);
        let mut all: Vec<(u64, usize)> = self.keys().map(|k| (k.block(), k.bytes())).collect();
        // those of one block are not parted: their order does not matter
        all.sort_unstable();
        all
    }

    /// Place of the entry in this block of which `is` holds.
    #[inline]
    fn place(&self, block: u64, is: impl Fn(&Dentry) -> bool) -> Option<usize> {
        let g = group_of(block);
        let is = |k: &Key| k.block() == block && is(k.entry(self.kept()));
        let group = &self.table.groups[g];
        if let Some(i) = group.0.iter().position(|k| !k.is_free() && is(k)) {
            return Some(g * WAYS + i);
        }
        if !group.is_full() {
            return None;
        }
        Some(GROUPS * WAYS + self.overflowing().iter().position(is)?)
    }

    fn key(&self, place: usize) -> Option<&Key> {
        match place.checked_sub(GROUPS * WAYS) {
            None => Some(&self.table.groups[place / WAYS].0[place % WAYS]).filter(|k| !k.is_free()),
            Some(i) => self.overflowing().get(i),
        }
    }

    /// Place of the entry with this name between two positions, which are not far from each other.
    pub fn find(&self, positions: Range<u64>, name: &[u8]) -> Option<usize> {
        let mut blocks = block(positions.start)..=block(positions.end);
        blocks.find_map(|b| self.place(b, |e| positions.contains(&e.hash) && *e.name == *name))
    }

    /// The entry of a place.
    pub fn get(&self, place: usize) -> Option<&Dentry> {
        self.key(place).map(|k| k.entry(self.kept()))
    }

    /// [`Self::get`], to change all but its position and its name.
    pub fn get_mut(&mut self, place: usize) -> Option<&mut Dentry> {
        let Table { groups, rest: Rest { overflow: over, kept, .. } } = &mut *self.table;
        let kept = kept.as_ref().map_or(&[][..], |kept| kept);
        let key = match place.checked_sub(GROUPS * WAYS) {
            None => Some(&mut groups[place / WAYS].0[place % WAYS]).filter(|k| !k.is_free()),
            Some(i) => over.get_mut(i),
        }?;
        if key.own.is_none() {
            *key = Key::of_own(key.entry(kept).clone());
        }
        key.own.as_deref_mut()
    }

    /// The first position from `pos` on that is not taken, `end + 1` at most.
    pub fn first_free(&self, mut pos: u64, end: u64) -> u64 {
        while pos <= end && self.place(block(pos), |e| e.hash == pos).is_some() {
            pos += 1;
        }
        pos
    }

    /// Place of the first entry at or behind `pos`.
    pub fn lower_bound(&self, pos: u64) -> Option<usize> {
        let first = self.sorted(pos).first()?.hash;
        self.place(block(first), |e| e.hash == first)
    }

    /// Hands up to `most` entries at or behind `pos` to `each`, in order; how many there were.
    pub fn list(&self, pos: u64, most: usize, each: &mut dyn FnMut(&Dentry)) -> usize {
        self.sorted(pos).into_iter().take(most).map(each).count()
    }

    /// Adds an entry, whose position is not taken; its place.
    pub fn insert(&mut self, entry: Dentry) -> usize {
        debug_assert!(self.place(block(entry.hash), |e| e.hash == entry.hash).is_none());
        self.put(Key::of_own(entry))
    }

    fn put(&mut self, key: Key) -> usize {
        let g = group_of(key.block());
        let places = &mut self.table.groups[g].0;
        if let Some(i) = places.iter().position(Key::is_free) {
            places[i] = key;
            self.used |= 1 << g;
            return g * WAYS + i;
        }
        let keys = &mut self.table.rest.overflow;
        keys.push(key);
        GROUPS * WAYS + keys.len() - 1
    }

    /// Takes the entry of a place out.
    pub fn remove(&mut self, place: usize) -> Option<Dentry> {
        let key = match place.checked_sub(GROUPS * WAYS) {
            None => {
                let g = place / WAYS;
                let Table { groups, rest: Rest { overflow: over, .. } } = &mut *self.table;
                let was_full = groups[g].is_full();
                let freed = &mut groups[g].0[place % WAYS];
                let key = std::mem::take(freed);
                if key.is_free() {
                    return None;
                }
                if was_full {
                    // one that found no place has one now
                    let next = over.iter().position(|k| group_of(k.block()) == g);
                    *freed = next.map_or_else(Key::default, |i| over.swap_remove(i));
                }
                key
            }
            Some(i) => {
                let over = Some(&mut self.table.rest.overflow).filter(|over| i < over.len())?;
                over.swap_remove(i)
            }
        };
        let kept = self.kept();
        Some(match key.own {
            Some(entry) => *entry,
            None => key.entry(kept).clone(),
        })
    }

    /// Keeps what lies before the first of the positions, which rise and are those of blocks, and gives what lies from each
    /// to the next. No entry is read or moved.
    pub fn split_at(&mut self, from: &[u64]) -> Vec<Self> {
        let over = std::mem::take(&mut self.table.rest.overflow);
        let mut parts: Vec<Self> = from.iter().map(|_| Self::new(self.table.rest.kept.clone())).collect();
        let starts: Vec<u64> = from.iter().map(|pos| block(*pos)).collect();
        let part_of = |k: &Key| starts.partition_point(|s| *s <= k.block()).checked_sub(1);
        let used = self.used;
        for (g, group) in self.table.groups.iter_mut().enumerate().filter(|(g, _)| used >> g & 1 != 0) {
            for place in &mut group.0 {
                if !place.is_free()
                    && let Some(part) = part_of(place)
                {
                    parts[part].put(std::mem::take(place));
                }
            }
            if group.keys().next().is_none() {
                self.used &= !(1 << g);
            }
        }
        for key in over {
            match part_of(&key) {
                Some(part) => parts[part].put(key),
                None => self.put(key),
            };
        }
        parts
    }
}

impl From<Sorted> for Spread {
    fn from(sorted: Sorted) -> Self {
        let (slots, kept) = sorted.into_slots();
        let mut all = Self::new(None);
        for slot in slots {
            let e = &kept[slot];
            all.put(Key::new(e, slot as u64 + 1));
        }
        all.table.rest.kept = (!kept.is_empty()).then(|| Arc::new(kept));
        all
    }
}

impl From<Spread> for Sorted {
    fn from(spread: Spread) -> Self {
        Self::new(spread.in_order().into_iter().cloned().collect())
    }
}
