//! The page cache of one file.
//!
//! Owns the pages of a file that are in memory and knows which of them are dirty. A page that an I/O still
//! holds, or a reader has pinned (`file/pinned.rs`), is never changed under it: a writer copies it first (copy on write, see
//! [`Frame`]).
//!
//! Invariants
//! - A dirty page is never evicted, and never replaced by what a reader brings from disk. Nor is one evicted that is shared.
//! - A bit of `cached` is set where there is a page, one of `dirty` for a cached page only; `pages` and `dirty` are the numbers
//!   over all groups, and `Groups::dirty` names those with a bit in `dirty`.
//! - A group has locks of its pages ([`shared`]) only while a page of it is dirty; bytes and clones of pages are handed out
//!   with the map borrowed alone, or by a view ([`shared`]).
//!
//! Cost: what asks for dirty pages looks at the groups that have some, not at all that are cached.
//!
//! Not promised: any locking but that of [`shared`] (the file's cell does that). Look-ups through `&PageMap` write no shared
//! memory but for a page's bit in `hot`, and that only where it is not set yet.

mod dirty;
pub mod locks;
pub mod shared;

use super::frames::Frame;
use super::frames::pool::Home;
use braidfs_format::BLOCK_BYTES;
use dirty::DirtyGroups;
use locks::{Locks, PAGES};
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// One cached block; a clone shares the bytes.
#[derive(Clone)]
pub struct Page(Frame);

impl Page {
    /// A page of zeros, with memory from `home` if possible.
    pub fn zeroed(home: Home) -> Self {
        Self(Frame::zeroed(home))
    }

    /// The first block of `bytes`; what is missing to a whole block is zeros. With memory from `home` if possible.
    pub fn from_slice(bytes: &[u8], home: Home) -> Self {
        if let Some(whole) = bytes.first_chunk::<BLOCK_BYTES>() {
            return Self(Frame::copy_of(whole, home));
        }
        let mut p = Self::zeroed(home);
        p.write(0, bytes);
        p
    }

    /// Content of the page, 4096 bytes.
    pub fn bytes(&self) -> &[u8] {
        &*self.0
    }

    /// Changes the bytes from `offset` on; a page that is shared is copied first.
    ///
    /// # Panics
    /// Where `bytes` do not fit (a bug of ours).
    pub fn write(&mut self, offset: usize, bytes: &[u8]) {
        self.make_mut()[offset..offset + bytes.len()].copy_from_slice(bytes);
    }

    /// Changes all bytes; nothing is copied where the page is shared.
    pub fn replace(&mut self, bytes: &[u8; BLOCK_BYTES]) {
        self.0.replace(bytes);
    }

    /// The bytes, to change; a page that is shared is copied first.
    pub fn make_mut(&mut self) -> &mut [u8; BLOCK_BYTES] {
        self.0.make_mut()
    }

    /// Whether nobody shares the bytes: no I/O, and no reader that has the page pinned.
    pub fn is_alone(&self) -> bool {
        self.0.is_alone()
    }

    /// Where its memory came from.
    #[cfg(test)]
    pub fn home(&self) -> Home {
        self.0.home()
    }

    /// Whether both are one buffer: nobody has changed one since it was cloned from the other.
    pub fn same(&self, other: &Page) -> bool {
        self.0.address() == other.0.address()
    }
}

impl Deref for Page {
    type Target = [u8; BLOCK_BYTES];
    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl std::fmt::Debug for Page {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Page({:p})", self.0.address())
    }
}

/// Pages of a group.
const GROUP: u64 = PAGES as u64;

/// The pages of 64 consecutive blocks, and a bit for each: there, dirty, and used since the evictor last came by.
#[derive(Debug)]
struct Group {
    pages: [Option<Page>; GROUP as usize],
    cached: u64,
    dirty: u64,
    hot: AtomicU64,
    locks: Option<Box<Locks>>,
}

impl Group {
    fn new() -> Box<Self> {
        let pages = [const { None }; GROUP as usize];
        Box::new(Self { pages, cached: 0, dirty: 0, hot: AtomicU64::new(0), locks: None })
    }
    /// Marks pages clean; how many of them were dirty. With the last dirty page the locks go, which `unshared` counts.
    fn clean(&mut self, mask: u64, unshared: &mut u32) -> u32 {
        let gone = self.dirty & mask;
        self.dirty &= !mask;
        if self.dirty == 0 && self.locks.take().is_some() {
            *unshared += 1;
        }
        gone.count_ones()
    }
    fn is_empty(&self) -> bool {
        debug_assert!(self.pages.iter().enumerate().all(|(i, p)| p.is_some() == (self.cached >> i & 1 == 1)));
        self.cached == 0
    }
    /// Puts a page in its place; what was there.
    fn put(&mut self, i: usize, page: Page) -> Option<Page> {
        self.cached |= 1 << i;
        self.pages[i].replace(page)
    }
    /// Takes a page away.
    fn take(&mut self, i: usize) -> Option<Page> {
        self.cached &= !(1 << i);
        self.pages[i].take()
    }
    /// Marks a page used and dirty; whether it was clean, and whether all were.
    fn make_dirty(&mut self, i: usize) -> (bool, bool) {
        *self.hot.get_mut() |= 1 << i;
        let first = self.dirty == 0;
        let was_clean = self.dirty >> i & 1 == 0;
        self.dirty |= 1 << i;
        (was_clean, first)
    }
}

/// Changes bytes of a page. What is replaced as a whole need not be copied first.
fn put(page: &mut Page, offset: usize, bytes: &[u8]) {
    match bytes.first_chunk::<BLOCK_BYTES>() {
        Some(whole) if offset == 0 && bytes.len() == BLOCK_BYTES => page.replace(whole),
        _ => page.write(offset, bytes),
    }
}

/// Group of a block, and its place there.
fn place(lblk: u64) -> (u64, usize) {
    (lblk / GROUP, (lblk % GROUP) as usize)
}

/// The bits of those blocks of `group` that lie in `[from, to)`.
fn mask(group: u64, from: u64, to: u64) -> u64 {
    let first = group * GROUP;
    let (lo, hi) = (from.saturating_sub(first).min(GROUP), to.saturating_sub(first).min(GROUP));
    if lo < hi { u64::MAX >> (GROUP - (hi - lo)) << lo } else { 0 }
}

/// The places of the bits, rising.
fn bits(mut m: u64) -> impl Iterator<Item = u64> {
    std::iter::from_fn(move || {
        let i = m.trailing_zeros();
        m &= m.wrapping_sub(1);
        (i < 64).then_some(u64::from(i))
    })
}

/// What of its groups only a large file has.
#[derive(Debug, Default)]
struct Far {
    /// Those behind `low`, by their numbers.
    groups: BTreeMap<u64, Box<Group>>,
    /// Those with a dirty page, where they are several.
    dirty: BTreeSet<u64>,
}

/// The groups of a file by their numbers. Those of a file that is cached from its beginning, or nearly so, are found by
/// an index; those of a large file that is cached here and there, by a search.
#[derive(Debug, Default)]
struct Groups {
    low: Vec<Option<Box<Group>>>,
    /// Most files have none.
    high: Option<Box<Far>>,
    /// In `low` and `high`.
    count: u32,
    /// Those of them that have locks.
    shared: u32,
    /// Which of them have a dirty page.
    dirty: DirtyGroups,
}

/// Counts groups that the calling thread looks at, or places without one: a test compares files by them and not by
/// the clock.
#[inline(always)]
fn note_look() {
    #[cfg(test)]
    tests::LOOKS.set(tests::LOOKS.get() + 1);
}

impl Groups {
    fn get(&self, g: u64) -> Option<&Group> {
        note_look();
        match self.low.get(g as usize) {
            Some(slot) => slot.as_deref(),
            None => self.high.as_ref()?.groups.get(&g).map(|g| &**g),
        }
    }
    fn get_mut(&mut self, g: u64) -> Option<&mut Group> {
        note_look();
        match self.low.get_mut(g as usize) {
            Some(slot) => slot.as_deref_mut(),
            None => self.high.as_mut()?.groups.get_mut(&g).map(|g| &mut **g),
        }
    }
    /// The group, made where there is none.
    fn entry(&mut self, g: u64) -> &mut Group {
        // so that `low` is never much longer than there are groups
        if g >= self.low.len() as u64 && g <= 2 * u64::from(self.count) + 1 {
            self.low.resize_with(g as usize + 1, || None);
            if let Some(high) = self.high.as_deref_mut() {
                let rest = high.groups.split_off(&(g + 1));
                for (g, group) in std::mem::replace(&mut high.groups, rest) {
                    self.low[g as usize] = Some(group);
                }
            }
        }
        let count = &mut self.count;
        let new = || {
            *count += 1;
            Group::new()
        };
        match self.low.get_mut(g as usize) {
            Some(slot) => slot.get_or_insert_with(new),
            None => self.high.get_or_insert_default().groups.entry(g).or_insert_with(new),
        }
    }
    fn remove(&mut self, g: u64) {
        let gone = match self.low.get_mut(g as usize) {
            Some(slot) => slot.take(),
            None => self.high.as_mut().and_then(|h| h.groups.remove(&g)),
        };
        self.count -= u32::from(gone.is_some());
        if self.count == 0 {
            *self = Self::default();
        }
    }
    /// Those of `[from, to)`, rising.
    fn range(&self, from: u64, to: u64) -> impl Iterator<Item = (u64, &Group)> {
        let (a, b) = self.indexes(from, to);
        let low = (a as u64..).zip(&self.low[a..b]).inspect(|_| note_look());
        let low = low.filter_map(|(g, slot)| Some((g, slot.as_deref()?)));
        let high = self.high.iter().flat_map(move |h| h.groups.range(from..to.max(from)));
        low.chain(high.inspect(|_| note_look()).map(|(g, group)| (*g, &**group)))
    }
    /// As [`Self::range`], to change.
    fn range_mut(&mut self, from: u64, to: u64) -> impl Iterator<Item = (u64, &mut Group)> {
        let (a, b) = self.indexes(from, to);
        let low = (a as u64..).zip(&mut self.low[a..b]).inspect(|_| note_look());
        let low = low.filter_map(|(g, slot)| Some((g, slot.as_deref_mut()?)));
        let high = self.high.iter_mut().flat_map(move |h| h.groups.range_mut(from..to.max(from)));
        low.chain(high.inspect(|_| note_look()).map(|(g, group)| (*g, &mut **group)))
    }
    /// Those of `[from, to)` with a dirty page, by their numbers, rising.
    fn dirty_range(&self, from: u64, to: u64) -> impl Iterator<Item = u64> + '_ {
        self.dirty.range(self.high.as_deref().map(|h| &h.dirty), from, to)
    }
    /// A page of this group has become dirty, and none was.
    fn became_dirty(&mut self, g: u64) {
        self.dirty.insert(g, || &mut self.high.get_or_insert_default().dirty);
    }
    /// No page of these groups is dirty any more.
    fn became_clean(&mut self, gone: &[u64]) {
        self.dirty.remove(gone, self.high.as_deref_mut().map(|h| &mut h.dirty));
        self.high.take_if(|h| h.groups.is_empty() && h.dirty.is_empty());
    }
    /// The part of `low` in `[from, to)`.
    fn indexes(&self, from: u64, to: u64) -> (usize, usize) {
        let n = self.low.len() as u64;
        let a = from.min(n);
        (a as usize, to.min(n).max(a) as usize)
    }
}

/// The cached pages of a file by logical block; see the module.
#[derive(Debug, Default)]
pub struct PageMap {
    groups: Groups,
    /// In memory, so that 32 bits count them.
    pages: u32,
    dirty: u32,
    /// Where the evictor goes on.
    hand: u64,
}

impl PageMap {
    /// A map without pages.
    pub fn new() -> Self {
        Self::default()
    }

    /// Number of pages in the cache, dirty ones among them.
    pub fn len(&self) -> usize {
        self.pages as usize
    }

    /// Memory of the groups, about: what finds the pages.
    pub fn index_bytes(&self) -> usize {
        let g = &self.groups;
        g.count as usize * size_of::<Group>()
            + g.shared as usize * size_of::<Locks>()
            + g.low.capacity() * size_of::<usize>()
    }

    /// Whether no page is cached.
    pub fn is_empty(&self) -> bool {
        self.pages == 0
    }

    /// Pages that are dirty.
    pub fn dirty_count(&self) -> usize {
        self.dirty as usize
    }

    /// Whether the page at `lblk` is cached and dirty.
    pub fn is_dirty(&self, lblk: u64) -> bool {
        let (g, i) = place(lblk);
        self.groups.get(g).is_some_and(|g| g.dirty >> i & 1 == 1)
    }

    /// The dirty pages' logical blocks of `[from, to)`, rising.
    pub fn dirty_in(&self, from: u64, to: u64) -> impl Iterator<Item = u64> + '_ {
        self.groups.dirty_range(from / GROUP, to.div_ceil(GROUP)).flat_map(move |g| {
            let dirty = self.groups.get(g).map_or(0, |group| group.dirty);
            bits(dirty & mask(g, from, to)).map(move |i| g * GROUP + i)
        })
    }

    /// How many pages of `[from, to)` are dirty.
    pub fn dirty_count_in(&self, from: u64, to: u64) -> u64 {
        let dirty = |g| self.groups.get(g).map_or(0, |group| group.dirty) & mask(g, from, to);
        self.groups.dirty_range(from / GROUP, to.div_ceil(GROUP)).map(|g| u64::from(dirty(g).count_ones())).sum()
    }

    /// The dirty pages' logical blocks, rising.
    pub fn dirty_blocks(&self) -> impl Iterator<Item = u64> + '_ {
        self.dirty_in(0, u64::MAX)
    }

    /// The first dirty page at or behind `lblk`.
    pub fn next_dirty(&self, lblk: u64) -> Option<u64> {
        self.dirty_in(lblk, u64::MAX).next()
    }

    /// Whether all pages of `first ..= last` are dirty.
    pub fn all_dirty(&self, first: u64, last: u64) -> bool {
        (first..=last).all(|l| self.is_dirty(l))
    }

    /// Makes a cached page dirty as it is; whether it was clean.
    pub fn dirty(&mut self, lblk: u64) -> bool {
        self.change(lblk, |_| {}).unwrap_or(false)
    }

    /// The page at `lblk`.
    pub fn get(&mut self, lblk: u64) -> Option<&Page> {
        self.look(lblk)
    }

    /// Whether the page at `lblk` is cached.
    pub fn has(&self, lblk: u64) -> bool {
        let (g, i) = place(lblk);
        self.groups.get(g).is_some_and(|g| g.pages[i].is_some())
    }

    fn look(&self, lblk: u64) -> Option<&Page> {
        let (g, i) = place(lblk);
        let g = self.groups.get(g)?;
        let page = g.pages[i].as_ref()?;
        if g.hot.load(Relaxed) >> i & 1 == 0 {
            g.hot.fetch_or(1 << i, Relaxed);
        }
        Some(page)
    }

    /// Caches what was read from disk. A page that is there already stays: it is as new or newer. Gives whether
    /// the page was taken.
    pub fn insert_clean(&mut self, lblk: u64, page: Page) -> bool {
        let (g, i) = place(lblk);
        let group = self.groups.entry(g);
        let taken = group.pages[i].is_none();
        if taken {
            group.put(i, page);
            self.pages += 1;
        }
        taken
    }

    /// Puts `page` in place of whatever is cached at `lblk`, dirty. Gives whether there was no dirty page.
    pub fn put_dirty(&mut self, lblk: u64, page: Page) -> bool {
        let (g, i) = place(lblk);
        let group = self.groups.entry(g);
        self.pages += u32::from(group.put(i, page).is_none());
        let (was_clean, first) = group.make_dirty(i);
        self.dirty += u32::from(was_clean);
        if first {
            self.groups.became_dirty(g);
        }
        was_clean
    }

    /// Changes a cached page and marks it dirty. Gives whether it was clean before, `None` where the page is
    /// not cached (and nothing was written).
    ///
    /// # Panics
    /// Where `bytes` do not fit the page from `offset` on (a bug of ours).
    #[must_use]
    pub fn write(&mut self, lblk: u64, offset: usize, bytes: &[u8]) -> Option<bool> {
        self.change(lblk, |p| put(p, offset, bytes))
    }

    /// Changes a page that is dirty; false, and nothing changed, where it is not.
    ///
    /// # Panics
    /// As [`Self::write`].
    pub fn write_dirty(&mut self, lblk: u64, offset: usize, bytes: &[u8]) -> bool {
        let (g, i) = place(lblk);
        let Some(group) = self.groups.get_mut(g).filter(|g| g.dirty >> i & 1 == 1) else { return false };
        let Some(page) = &mut group.pages[i] else { return false };
        *group.hot.get_mut() |= 1 << i;
        put(page, offset, bytes);
        true
    }

    /// Zeroes a cached page from `from_offset` on and marks it dirty. Gives as [`Self::write`].
    #[must_use]
    pub fn zero_tail(&mut self, lblk: u64, from_offset: usize) -> Option<bool> {
        self.change(lblk, |p| p.make_mut()[from_offset..].fill(0))
    }

    fn change(&mut self, lblk: u64, f: impl FnOnce(&mut Page)) -> Option<bool> {
        let (g, i) = place(lblk);
        let group = self.groups.get_mut(g)?;
        f(group.pages[i].as_mut()?);
        let (was_clean, first) = group.make_dirty(i);
        self.dirty += u32::from(was_clean);
        if first {
            self.groups.became_dirty(g);
        }
        Some(was_clean)
    }

    /// All dirty pages, as runs of consecutive blocks of at most `max_run` pages each. They stay dirty.
    pub fn dirty_runs(&mut self, max_run: usize) -> Vec<(u64, Vec<Page>)> {
        self.dirty_runs_in(0, u64::MAX, max_run)
    }

    /// As [`Self::dirty_runs`], of the blocks `[from, to)`.
    pub fn dirty_runs_in(&mut self, from: u64, to: u64, max_run: usize) -> Vec<(u64, Vec<Page>)> {
        let mut runs: Vec<(u64, Vec<Page>)> = Vec::new();
        for lblk in self.dirty_in(from, to) {
            let (g, i) = place(lblk);
            let Some(page) = self.groups.get(g).and_then(|g| g.pages[i].as_ref()) else { continue };
            match runs.last_mut() {
                Some((first, pages)) if *first + pages.len() as u64 == lblk && pages.len() < max_run => {
                    pages.push(page.clone());
                }
                _ => runs.push((lblk, vec![page.clone()])),
            }
        }
        runs
    }

    /// Marks the pages of `[from, to)` clean, whatever they hold. Right where the caller has not let a writer in
    /// since it took the pages to write out.
    pub fn mark_clean(&mut self, from: u64, to: u64) {
        if from >= to {
            return;
        }
        let mut unshared = 0;
        let mut clean: SmallVec<[u64; 4]> = self.groups.dirty_range(from / GROUP, to.div_ceil(GROUP)).collect();
        clean.retain(|g| {
            let Some(group) = self.groups.get_mut(*g) else { return false };
            self.dirty -= group.clean(mask(*g, from, to), &mut unshared);
            group.dirty == 0
        });
        self.groups.became_clean(&clean);
        self.groups.shared -= unshared;
    }

    /// Forgets the pages of `[from, to)`. Gives how many of them were dirty.
    pub fn remove_range(&mut self, from: u64, to: u64) -> usize {
        if from >= to {
            return 0;
        }
        let before = self.dirty;
        // with the numbers of dirty pages and of groups that have some
        self.mark_clean(from, to);
        let mut empty = Vec::new();
        for (g, group) in self.groups.range_mut(from / GROUP, to.div_ceil(GROUP)) {
            let gone = mask(g, from, to);
            *group.hot.get_mut() &= !gone;
            for i in bits(gone & group.cached) {
                self.pages -= u32::from(group.take(i as usize).is_some());
            }
            if group.is_empty() {
                empty.push(g);
            }
        }
        for g in empty {
            self.groups.remove(g);
        }
        (before - self.dirty) as usize
    }

    /// Moves the pages at `from` and behind so that the one at `from` is at `to`; what is at its new place must be empty or
    /// move, too.
    pub fn shift(&mut self, from: u64, to: u64) {
        let mut moved = Vec::new();
        for (g, group) in self.groups.range_mut(from / GROUP, u64::MAX) {
            for i in bits(mask(g, from, u64::MAX) & group.cached) {
                if let Some(page) = group.take(i as usize) {
                    moved.push((g * GROUP + i, page, group.dirty >> i & 1 == 1));
                }
            }
        }
        self.pages -= moved.len() as u32;
        // what is left of them is empty
        self.remove_range(from, u64::MAX);
        for (lblk, page, dirty) in moved {
            let lblk = lblk - from + to;
            debug_assert!(self.get(lblk).is_none(), "a page at {lblk} is in the way");
            if dirty {
                self.put_dirty(lblk, page)
            } else {
                self.insert_clean(lblk, page)
            };
        }
    }

    /// Forgets the page at `lblk` where it is this one, and clean; whether it did.
    pub fn forget(&mut self, lblk: u64, page: &Page) -> bool {
        let (g, i) = place(lblk);
        let Some(group) = self.groups.get_mut(g) else { return false };
        if group.dirty >> i & 1 == 1 || !group.pages[i].as_ref().is_some_and(|p| p.same(page)) {
            return false;
        }
        group.take(i);
        if group.is_empty() {
            self.groups.remove(g);
        }
        self.pages -= 1;
        true
    }

    /// Whether a page is shared with an I/O or with a reader that has it pinned.
    pub fn any_shared(&self) -> bool {
        self.groups.range(0, u64::MAX).any(|(_, g)| g.pages.iter().flatten().any(|p| !p.is_alone()))
    }

    /// Forgets up to `max_pages` clean pages and gives how many. Goes once round the file; a page used since
    /// the evictor last came by is passed over once (second chance), one that somebody shares each time.
    pub fn evict_clean(&mut self, max_pages: usize) -> usize {
        let (hand, mut gone, mut empty) = (self.hand, 0, Vec::new());
        for (from, to) in [(hand, u64::MAX), (0, hand)] {
            if from >= to {
                continue;
            }
            for (g, group) in self.groups.range_mut(from / GROUP, to.div_ceil(GROUP)) {
                for i in bits(mask(g, from, to) & group.cached) {
                    if gone == max_pages {
                        break;
                    }
                    let bit = 1 << i;
                    self.hand = g * GROUP + i + 1;
                    let hot = group.hot.get_mut();
                    if group.dirty & bit == 0 && *hot & bit == 0 {
                        // of no use: its memory stays with who has it pinned
                        if group.pages[i as usize].as_ref().is_some_and(|p| !p.is_alone()) {
                            continue;
                        }
                        group.take(i as usize);
                        gone += 1;
                    } else if group.dirty & bit == 0 {
                        *hot &= !bit;
                    }
                }
                if group.is_empty() {
                    empty.push(g);
                }
                if gone == max_pages {
                    break;
                }
            }
        }
        for g in empty {
            self.groups.remove(g);
        }
        self.pages -= gone as u32;
        gone
    }
}

#[cfg(test)]
pub mod tests;
