//! The names of one directory.
//!
//! Owns the entries of a directory, ordered by position (the name's hash, moved up past taken ones), and knows
//! which of them are in memory and which parts have to be written. A small directory is one bucket that lies
//! in the inode record; a larger one has a block per bucket. A bucket owns the positions from its first to the
//! next bucket's first, and its first position says at which logical block it lies.
//!
//! Invariants
//! - There is a bucket at position 0; every other bucket begins at a multiple of 2^15 and is not empty.
//! - Entries of a bucket rise, and lie in the positions that it owns.
//! - A bucket that is dirty, or not on disk, is in memory.
//!
//! Who has the directory locked for writing has all of it. Who has it locked for reading looks at names, and changes those that
//! one bucket alone can hold, under that bucket's lock ([`DirIndex::open`]), if the directory is shared; which buckets there are
//! does not change then. Of one that is not shared nobody needs a bucket's lock. This is a low-level module with unsafe code
//! for these looks.
//!
//! Not promised: that neighbours with few entries are joined. No I/O: what is not in memory is asked
//! for through the caller's loader.

mod buckets;
mod entries;
pub mod open;
mod sorted;
mod spread;
#[cfg(test)]
mod tests;

use crate::braid::vacated::Lately;
use crate::error::{Error, Result};
use braidfs_format::dentry::{BUCKET_BYTES, Dentry, HASH_MAX, HASH_PROBES, INLINE_DIR_MAX, bucket_first, bucket_lblk};
use braidfs_format::{Corrupt, InodeNo};
use std::collections::BTreeSet;

use buckets::{Bucket, Buckets, Content};
pub use entries::Entries;
use entries::encoded;
pub use open::OpenBucket;

/// Reads the bucket at a logical block of the directory.
pub type Load<'a> = &'a mut dyn FnMut(u64) -> Result<Vec<Dentry>>;

/// What is known of a name, or position, without I/O.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lookup<T> {
    /// What was asked of the entry.
    Found(T),
    /// There is none.
    Absent,
    /// A bucket has to be loaded to tell.
    NotLoaded,
}

/// What a commit has to write of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DirWrite<'a> {
    /// All entries go into the inode record; and the logical blocks of buckets that no longer exist.
    Inline(&'a Entries, Vec<u64>),
    /// Buckets go to blocks.
    Buckets {
        /// First position and entries of each bucket that changed.
        write: Vec<(u64, &'a Entries)>,
        /// Logical blocks of buckets that no longer exist.
        dropped: Vec<u64>,
    },
}

/// The entries of a directory; see the module. What who changes one bucket looks at comes first, in one line: what is put together
/// when somebody has the directory for itself lies behind it.
#[derive(Debug)]
#[repr(C)]
pub struct DirIndex {
    buckets: Buckets,
    /// The one bucket lies in the inode record.
    inline: bool,
    /// Several threads may change names at the same time, each one bucket ([`Self::open`]).
    shared: bool,
    /// First positions of the buckets to write.
    dirty: BTreeSet<u64>,
    /// Logical blocks to give up.
    dropped: BTreeSet<u64>,
    /// Buckets that are not loaded.
    unloaded: usize,
    /// Entries, where known.
    count: Option<u64>,
    /// Bytes of the entries in memory.
    memory: usize,
}

/// The position at which a name with `hash` stands if nothing is in its way.
fn home_position(hash: u64) -> u64 {
    hash.clamp(3, HASH_MAX - HASH_PROBES)
}

/// Whether no bucket begins in the range in which a name of `home` may stand.
fn is_in_one(home: u64) -> bool {
    bucket_lblk(home) == bucket_lblk(home + HASH_PROBES)
}

/// Where to cut entries of which [`Entries::layout`] is told, so that both parts have about as many bytes: at a border where
/// the logical block changes. `None`: there is none.
fn middle(layout: &[(u64, usize)]) -> Option<usize> {
    let all: usize = layout.iter().map(|e| e.1).sum();
    let mut best: Option<(usize, usize)> = None;
    let mut left = 0;
    for (i, pair) in layout.windows(2).enumerate() {
        left += pair[0].1;
        let off = left.abs_diff(all - left);
        if pair[0].0 != pair[1].0 && best.is_none_or(|b| off < b.0) {
            best = Some((off, i + 1));
        }
    }
    best.map(|b| b.1)
}

/// Cuts entries into parts that each fit a bucket: first logical block and bytes of each. `false`: too many share one.
fn cut(layout: &[(u64, usize)], out: &mut Vec<BucketPart>) -> bool {
    let bytes: usize = layout.iter().map(|e| e.1).sum();
    if bytes <= BUCKET_BYTES {
        out.extend(layout.first().map(|e| BucketPart { lblk: e.0, bytes }));
        return true;
    }
    let Some(at) = middle(layout) else { return false };
    cut(&layout[..at], out) && cut(&layout[at..], out)
}

/// Cuts entries in halves so many times: first logical block and bytes of each part.
fn halve(layout: &[(u64, usize)], times: u32, out: &mut Vec<BucketPart>) {
    match middle(layout).filter(|_| times > 0) {
        Some(at) => {
            halve(&layout[..at], times - 1, out);
            halve(&layout[at..], times - 1, out);
        }
        None => {
            let bytes = layout.iter().map(|e| e.1).sum();
            out.extend(layout.first().map(|e| BucketPart { lblk: e.0, bytes }));
        }
    }
}

/// What becomes a bucket.
#[derive(Debug, Clone, Copy)]
struct BucketPart {
    lblk: u64,
    bytes: usize,
}

/// A bucket of a directory that several threads change is cut in halves so many times at once ([`DirIndex::split_ahead`]).
const HALVINGS: u32 = 2;
/// Parts that come of it.
pub const SPLIT_PARTS: u64 = 1 << HALVINGS;

impl DirIndex {
    fn with(all: impl IntoIterator<Item = (u64, Option<Entries>)>, inline: bool) -> Self {
        let mut d = Self {
            inline,
            dirty: BTreeSet::new(),
            dropped: BTreeSet::new(),
            unloaded: 0,
            count: Some(0),
            memory: 0,
            shared: false,
            buckets: Buckets::default(),
        };
        let mut count = 0;
        for (first, entries) in all {
            let bytes = entries.as_ref().map_or(0, |e| encoded(e.iter()));
            match &entries {
                Some(e) => {
                    count += e.len() as u64;
                    d.memory += e.memory();
                }
                None => d.unloaded += 1,
            }
            d.buckets.insert(first, Bucket::new(first, entries, bytes));
        }
        d.count = (d.unloaded == 0).then_some(count);
        d
    }

    /// A new directory; its (empty) inline section counts as not written.
    pub fn new_empty() -> Self {
        let mut d = Self::from_inline(Vec::new());
        d.mark(0);
        d
    }

    /// From the inline section (as `decode_entries` gives it: rising).
    pub fn from_inline(entries: Vec<Dentry>) -> Self {
        Self::with([(0, Some(Entries::new(entries)))], true)
    }

    /// From the logical blocks of the buckets, none of which is loaded yet, and the number of entries (0: unknown;
    /// an empty directory has no buckets).
    pub fn from_buckets(lblks: impl Iterator<Item = u64>, entries: u64) -> Self {
        let empty = [(0, Some(Entries::default()))];
        let mut d = Self::with(empty.into_iter().chain(lblks.map(|l| (bucket_first(l), None))), false);
        if entries > 0 {
            d.count = Some(entries);
        }
        d
    }

    /// The bucket that begins at `first` is to be written.
    fn mark(&mut self, first: u64) {
        if let Some(b) = self.buckets.get_mut(first)
            && !std::mem::replace(&mut b.dirty, true)
        {
            self.dirty.insert(first);
        }
    }

    /// First position of the bucket that owns `pos`.
    fn owner(&self, pos: u64) -> u64 {
        self.buckets.floor(pos).map_or(0, |b| b.0)
    }

    /// Loads the bucket that begins at `first`.
    fn ensure(&mut self, first: u64, load: Load<'_>) -> Result<()> {
        if self.unloaded == 0 || self.buckets.get_mut(first).is_none_or(|b| b.entries.is_some()) {
            return Ok(());
        }
        let end = self.buckets.next_first(first).unwrap_or(HASH_MAX + 1);
        let Some(b) = self.buckets.get_mut(first) else { return Ok(()) };
        let lblk = bucket_lblk(first);
        let entries = load(lblk)?;
        let bytes = encoded(entries.iter());
        let mut at = first.max(3);
        for e in &entries {
            if e.hash < at || e.hash >= end {
                let why = format!("bucket {lblk} holds position {:#x}, outside [{first:#x}, {end:#x})", e.hash);
                return Err(Corrupt::new("directory", why).into());
            }
            at = e.hash + 1;
        }
        if bytes > BUCKET_BYTES {
            return Err(Corrupt::new("directory", format!("bucket {lblk} of {bytes} bytes")).into());
        }
        let entries = Entries::new(entries);
        self.memory += entries.memory();
        b.bytes = bytes as u16;
        b.entries = Some(entries);
        self.unloaded -= 1;
        if self.unloaded == 0 {
            self.count = Some(self.buckets.iter_mut().flat_map(|b| &b.1.entries).map(|e| e.len() as u64).sum());
        }
        Ok(())
    }

    /// Loads what may hold a name with the position `home`: at most two buckets, as buckets are far wider
    /// than the probed range.
    fn ensure_probed(&mut self, home: u64, load: Load<'_>) -> Result<()> {
        if self.unloaded == 0 {
            return Ok(());
        }
        let a = self.owner(home);
        self.ensure(a, load)?;
        if is_in_one(home) {
            return Ok(());
        }
        let b = self.owner(home + HASH_PROBES);
        if a != b { self.ensure(b, load) } else { Ok(()) }
    }

    /// Bucket and place in it of `name`. What may hold it is loaded.
    fn locate(&mut self, hash: u64, name: &[u8]) -> Option<(u64, usize)> {
        let home = home_position(hash);
        let mut from = home;
        loop {
            let (first, b) = self.buckets.floor_mut(from)?;
            if let Some(i) = b.entries.as_ref().and_then(|e| e.find(from..home + HASH_PROBES + 1, name)) {
                return Some((first, i));
            }
            from = self.next_probed(home, first)?;
        }
    }

    /// Where the bucket begins behind that at `first`, if a name of `home` may stand in it.
    fn next_probed(&self, home: u64, first: u64) -> Option<u64> {
        if is_in_one(home) {
            return None;
        }
        self.buckets.next_first(first).filter(|next| *next <= home + HASH_PROBES)
    }

    /// What `see` says of the entry of `name`, whose own hash is `hash`, if that can be told from memory. It stays as it is
    /// meanwhile.
    pub fn find_loaded<T>(&self, hash: u64, name: &[u8], see: impl FnOnce(&Dentry) -> T) -> Lookup<T> {
        let home = home_position(hash);
        let (mut from, mut whole) = (home, true);
        while let Some((first, b)) = self.buckets.floor(from) {
            // SAFETY: of a directory that is not shared `open` gives no bucket, and it becomes shared by `&mut self`
            let b = unsafe { b.read(self.shared) };
            match &b.entries {
                None => whole = false,
                Some(entries) => {
                    let at = entries.find(from..home + HASH_PROBES + 1, name);
                    if let Some(e) = at.and_then(|i| entries.get(i)) {
                        return Lookup::Found(see(e));
                    }
                }
            }
            let Some(next) = self.next_probed(home, first) else { break };
            from = next;
        }
        if whole { Lookup::Absent } else { Lookup::NotLoaded }
    }

    /// The entry of `name`, whose own hash is `hash`.
    ///
    /// # Errors
    /// Of the loader, and [`Corrupt`] where it brings entries of other positions.
    pub fn find(&mut self, hash: u64, name: &[u8], load: Load<'_>) -> Result<Option<&Dentry>> {
        self.ensure_probed(home_position(hash), load)?;
        let Some((first, i)) = self.locate(hash, name) else { return Ok(None) };
        Ok(self.buckets.get_mut(first).and_then(|b| b.entries.as_ref()?.get(i)))
    }

    /// Adds an entry for a name that is not there, at the first free position from `hash` on.
    ///
    /// # Errors
    /// As [`Self::find`]; [`Error::NoSpace`] where all positions are taken or the bucket cannot be split (too
    /// many hashes with one prefix). Nothing has changed then.
    pub fn insert(&mut self, hash: u64, mut d: Dentry, load: Load<'_>) -> Result<()> {
        let home = home_position(hash);
        self.ensure_probed(home, load)?;
        let pos = self.free_position(home).ok_or(Error::NoSpace)?;
        d.hash = pos;
        let size = d.encoded_bytes() as u16;
        let max = if self.inline { INLINE_DIR_MAX } else { BUCKET_BYTES };
        let shared = self.shared && !self.inline;
        let Some((first, (bytes, dirty), entries)) = self.buckets.floor_mut(pos).and_then(|(first, b)| {
            let Content { entries, bytes, dirty, .. } = b;
            entries.as_mut().map(|e| (first, (bytes, dirty), e))
        }) else {
            return Err(Corrupt::new("directory", "a bucket was not loaded").into());
        };
        self.memory = self.memory.saturating_add_signed(entries.share(shared).unwrap_or(0) as isize);
        let (table, memory) = (entries.table_bytes(), entries.memory_of(&d));
        let at = entries.insert(d);
        self.memory += entries.table_bytes() - table;
        *bytes += size;
        let mut parts = Vec::new();
        if *bytes as usize > max && !cut(&entries.layout(), &mut parts) {
            entries.remove(at);
            *bytes -= size;
            return Err(Error::NoSpace);
        }
        if !std::mem::replace(dirty, true) {
            self.dirty.insert(first);
        }
        if !parts.is_empty() {
            self.inline = false;
            self.split(first, &parts);
        }
        self.memory += memory;
        self.count = self.count.map(|n| n + 1);
        Ok(())
    }

    /// Makes buckets of parts of the entries of bucket `first`, which keeps the first of them.
    fn split(&mut self, first: u64, parts: &[BucketPart]) {
        let (Some((own, others)), Some(b)) = (parts.split_first(), self.buckets.get_mut(first)) else { return };
        let Some(entries) = b.entries.as_mut() else { return };
        let from: Vec<u64> = others.iter().map(|p| bucket_first(p.lblk)).collect();
        let made = entries.split_at(&from);
        b.bytes = own.bytes as u16;
        let left = b.left;
        debug_assert_eq!(encoded(entries.iter()), own.bytes);
        for (entries, (at, part)) in made.into_iter().zip(from.into_iter().zip(others)) {
            debug_assert!(at > first && !self.buckets.has(at) && encoded(entries.iter()) == part.bytes);
            self.memory += entries.table_bytes();
            let mut bucket = Bucket::new(at, Some(entries), part.bytes);
            bucket.own().left = left;
            self.buckets.insert(at, bucket);
            self.mark(at);
        }
    }

    /// Of a directory that several threads change: splits the bucket of a name with `hash`, and, up to `most` in all, those
    /// of the next ones that are more than five eighths full, into [`SPLIT_PARTS`] each. Names spread evenly, so that buckets fill
    /// up together, and who splits one has the directory for itself: rather once than for each. And who splits one has all lines
    /// of its keys brought, which others wrote, whatever number of parts it makes: of four, names come to fill three more before
    /// the next split where of two they fill one.
    pub fn split_ahead(&mut self, hash: u64, most: usize) {
        if !self.shared || self.inline {
            return;
        }
        let from = self.owner(home_position(hash));
        let next = self.buckets.iter_from(from).chain(self.buckets.iter_from(0));
        let firsts: Vec<u64> = next.take(self.buckets.len().min(2 * most)).map(|b| b.0).collect();
        let mut left = most;
        for first in firsts {
            let Some(b) = self.buckets.get_mut(first).filter(|_| left > 0) else { break };
            if b.bytes as usize <= BUCKET_BYTES / 8 * 5 {
                continue;
            }
            left -= 1;
            let Some(entries) = b.entries.as_mut() else { continue };
            self.memory = self.memory.saturating_add_signed(entries.share(true).unwrap_or(0) as isize);
            let mut parts = Vec::new();
            halve(&entries.layout(), HALVINGS, &mut parts);
            if parts.len() < 2 {
                continue;
            }
            self.split(first, &parts);
            self.mark(first);
        }
    }

    /// The first position of those that a name of `home` may have where nothing is loaded.
    fn free_position(&mut self, home: u64) -> Option<u64> {
        let end = home + HASH_PROBES;
        let mut pos = home;
        while pos <= end {
            let (_, b) = self.buckets.floor_mut(pos)?;
            let Some(entries) = &b.entries else { return Some(pos) };
            let start = pos;
            pos = entries.first_free(pos, end);
            if pos == start {
                return Some(pos);
            }
            // taken to here in this bucket: the next position may be another's
        }
        None
    }

    /// Takes out the entry of `name`.
    ///
    /// # Errors
    /// As [`Self::find`].
    pub fn remove(&mut self, hash: u64, name: &[u8], load: Load<'_>) -> Result<Option<Dentry>> {
        self.ensure_probed(home_position(hash), load)?;
        let Some((first, i)) = self.locate(hash, name) else { return Ok(None) };
        if first != 0 && self.buckets.len() == 2 {
            // it may be the last name: whether there is one in the first bucket has to be known then
            self.ensure(0, load)?;
        }
        let shared = self.shared && !self.inline;
        let Some(b) = self.buckets.get_mut(first) else { return Ok(None) };
        let Some(entries) = b.entries.as_mut() else { return Ok(None) };
        let Some(d) = entries.remove(i) else { return Ok(None) };
        self.memory -= entries.memory_of(&d);
        self.memory = self.memory.saturating_add_signed(entries.share(shared).unwrap_or(0) as isize);
        b.bytes -= d.encoded_bytes() as u16;
        let emptied = entries.is_empty();
        self.count = self.count.map(|n| n.saturating_sub(1));
        if !std::mem::replace(&mut b.dirty, true) {
            self.dirty.insert(first);
        }
        if emptied && first != 0 {
            self.dirty.remove(&first);
            if let Some(b) = self.buckets.remove(first) {
                self.memory -= b.entries.map_or(0, |e| e.table_bytes());
                if b.on_disk {
                    self.dropped.insert(bucket_lblk(first));
                }
                // it has the other one's names now, of which it knows nothing
                if let Some((_, before)) = self.buckets.floor_mut(first) {
                    before.left = Lately::UNKNOWN;
                }
            }
        }
        self.inline_if_empty();
        Ok(Some(d))
    }

    /// An empty directory goes back into its inode record.
    fn inline_if_empty(&mut self) {
        if self.inline || self.buckets.len() > 1 {
            return;
        }
        if let Some(b) = self.buckets.get_mut(0)
            && let Some(entries) = b.entries.as_mut().filter(|e| e.is_empty())
        {
            self.memory = self.memory.saturating_add_signed(entries.share(false).unwrap_or(0) as isize);
            if std::mem::take(&mut b.on_disk) {
                self.dropped.insert(0);
            }
            self.inline = true;
            self.mark(0);
        }
    }

    /// Lets `name` name another inode, at the same position. Gives the entry as it was.
    ///
    /// # Errors
    /// As [`Self::find`].
    pub fn replace(
        &mut self,
        hash: u64,
        name: &[u8],
        node: InodeNo,
        generation: u32,
        kind: u8,
        load: Load<'_>,
    ) -> Result<Option<Dentry>> {
        self.ensure_probed(home_position(hash), load)?;
        let Some((first, i)) = self.locate(hash, name) else { return Ok(None) };
        let entries = self.buckets.get_mut(first).and_then(|b| b.entries.as_mut());
        let Some(d) = entries.and_then(|e| e.get_mut(i)) else { return Ok(None) };
        let old = d.clone();
        (d.node, d.generation, d.kind) = (node, generation, kind);
        self.mark(first);
        Ok(Some(old))
    }

    /// Hands up to `most` entries behind position `pos` to `each`, in order; false where a bucket has to be loaded for more.
    pub fn list_loaded(&self, pos: u64, most: usize, each: &mut dyn FnMut(&Dentry)) -> bool {
        let mut left = most;
        for (_, b) in self.buckets.iter_from(pos) {
            if left == 0 {
                break;
            }
            // SAFETY: as in `find_loaded`
            let b = unsafe { b.read(self.shared) };
            let Some(entries) = &b.entries else { return false };
            left -= entries.list(pos.saturating_add(1), left, each);
        }
        true
    }

    /// First position of the bucket and place in it of the first entry behind `pos`, or the bucket to load to find out.
    fn seek_after(&mut self, pos: u64) -> Result<Option<(u64, usize)>, u64> {
        let mut at = pos;
        while let Some((first, b)) = self.buckets.floor_mut(at) {
            let Some(entries) = &b.entries else { return Err(first) };
            if let Some(place) = entries.lower_bound(pos.saturating_add(1)) {
                return Ok(Some((first, place)));
            }
            let Some(next) = self.buckets.next_first(first) else { break };
            at = next;
        }
        Ok(None)
    }

    /// The first entry behind position `pos` (0: the first of all).
    ///
    /// # Errors
    /// As [`Self::find`].
    pub fn next_after(&mut self, pos: u64, load: Load<'_>) -> Result<Option<&Dentry>> {
        let at = loop {
            match self.seek_after(pos) {
                Ok(at) => break at,
                Err(first) => self.ensure(first, load)?,
            }
        };
        let Some((first, place)) = at else { return Ok(None) };
        Ok(self.buckets.get_mut(first).and_then(|b| b.entries.as_ref()?.get(place)))
    }

    /// Whether the directory has no entries.
    ///
    /// # Errors
    /// As [`Self::find`].
    pub fn is_empty(&mut self, load: Load<'_>) -> Result<bool> {
        match self.count {
            Some(n) => Ok(n == 0),
            None => Ok(self.next_after(0, load)?.is_none()),
        }
    }

    /// Whether several threads may change names at the same time from now on.
    pub fn set_shared(&mut self, shared: bool) {
        self.shared = shared;
    }

    /// Those who had the directory locked for reading made this of its counts ([`Self::open`]).
    ///
    /// `first`: the buckets that they were the first to change since these were written.
    pub fn opened_changed(&mut self, entries: i64, memory: i64, first: &[u64]) {
        self.count = self.count.map(|n| n.saturating_add_signed(entries));
        self.memory = self.memory.saturating_add_signed(memory as isize);
        self.dirty.extend(first);
        debug_assert!(self.counts_hold(), "{self:?}");
    }

    /// Whether the counts are those of the entries, where all are in memory.
    fn counts_hold(&mut self) -> bool {
        let (mut entries, mut memory, mut dirty) = (0, 0, 0);
        for (_, b) in self.buckets.iter_mut() {
            dirty += usize::from(b.dirty);
            let Some(e) = &b.entries else { return true };
            entries += e.len() as u64;
            memory += e.memory();
        }
        self.count.is_none_or(|n| n == entries) && self.memory == memory && self.dirty.len() == dirty
    }

    /// Entries, where that is known: it was given, or all buckets have been in memory once.
    pub fn count(&self) -> Option<u64> {
        self.count
    }

    /// Memory that the index takes, roughly, in bytes.
    pub fn loaded_bytes(&self) -> usize {
        self.memory + self.buckets.len() * (size_of::<Bucket>() + 16)
    }

    /// All entries, where the directory lies in its inode record.
    pub fn inline_entries(&mut self) -> Option<&Entries> {
        if self.inline { self.buckets.get_mut(0)?.entries.as_ref() } else { None }
    }

    /// Whether the directory lies in its inode record.
    pub fn is_inline(&self) -> bool {
        self.inline
    }

    /// Whether there is anything to write or to give up.
    pub fn is_dirty(&self) -> bool {
        !self.dirty.is_empty() || !self.dropped.is_empty()
    }

    /// Buckets that are to be written; 0 for a directory in its inode record.
    pub fn dirty_buckets(&self) -> usize {
        if self.inline { 0 } else { self.dirty.len() }
    }

    /// What a commit writes. Everything then counts as written: the caller must not [`Self::evict_clean`] before
    /// it is.
    pub fn take_dirty(&mut self) -> DirWrite<'_> {
        let dirty = std::mem::take(&mut self.dirty);
        let mut dropped = std::mem::take(&mut self.dropped);
        for (_, b) in self.buckets.these_mut(&dirty) {
            b.dirty = false;
            b.on_disk |= !self.inline && b.entries.is_some();
        }
        if self.inline {
            static NONE: Entries = Entries::new_empty();
            let entries = self.buckets.get_mut(0).and_then(|b| b.entries.as_ref()).unwrap_or(&NONE);
            return DirWrite::Inline(entries, dropped.into_iter().collect());
        }
        // a bucket may have come back where one had been dropped
        dropped.retain(|&l| !self.buckets.has(bucket_first(l)));
        let write = self.buckets.these_mut(&dirty);
        let write = write.filter_map(|(first, b)| Some((first, b.entries.as_ref()?))).collect();
        DirWrite::Buckets { write, dropped: dropped.into_iter().collect() }
    }

    /// Whether the entries of the bucket that starts at `first` are to be read yet.
    pub fn is_unread(&mut self, first: u64) -> bool {
        self.unloaded > 0 && self.buckets.get_mut(first).is_some_and(|b| b.entries.is_none())
    }

    /// Marks the bucket that starts at `first` as to be written again, read if need be (the cleaner moves it).
    ///
    /// # Errors
    /// Of `load`.
    pub fn dirty_bucket(&mut self, first: u64, load: Load<'_>) -> Result<()> {
        if self.buckets.has(first) {
            self.ensure(first, load)?;
            self.mark(first);
        }
        Ok(())
    }

    /// Forgets the entries of buckets that are on disk as they are.
    pub fn evict_clean(&mut self) {
        for (_, b) in self.buckets.iter_mut() {
            if b.on_disk
                && !b.dirty
                && let Some(e) = b.entries.take()
            {
                self.memory -= e.memory();
                b.bytes = 0;
                self.unloaded += 1;
            }
        }
    }
}
