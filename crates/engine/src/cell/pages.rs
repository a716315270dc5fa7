//! The page cache of one file.
//!
//! Owns the pages of a file that are in memory and knows which of them are dirty. A page that an I/O still
//! holds is never changed under it: a writer copies it first (copy on write through the `Arc`).
//!
//! Invariants
//! - A dirty page is never evicted, and never replaced by what a reader brings from disk.
//! - `dirty` names exactly the pages that are dirty.
//!
//! Not promised: any locking (the file's cell does that). Look-ups through `&PageMap` write no shared memory
//! but for a page's `hot` bit, and that only where it is not set yet.

use braidfs_format::BLOCK_BYTES;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Bound, Deref};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The bytes, aligned for direct I/O.
#[derive(Clone)]
#[repr(C, align(4096))]
struct Aligned([u8; BLOCK_BYTES]);

const _: () = assert!(size_of::<Aligned>() == BLOCK_BYTES);

/// A block-sized buffer aligned to its size. Boxed apart from the reference count, which would otherwise take
/// a page of its own.
#[derive(Clone)]
pub struct PageBuf(Box<Aligned>);

impl PageBuf {
    fn new(bytes: Aligned) -> Self {
        // written in place: no copy by way of the stack in optimised builds
        Self(Box::write(Box::new_uninit(), bytes))
    }
}

/// One cached block; a clone shares the bytes.
#[derive(Clone)]
pub struct Page(Arc<PageBuf>);

impl Page {
    /// A page of zeros.
    pub fn zeroed() -> Self {
        Self(Arc::new(PageBuf::new(Aligned([0; BLOCK_BYTES]))))
    }

    /// The first block of `bytes`; what is missing to a whole block is zeros.
    pub fn from_slice(bytes: &[u8]) -> Self {
        if let Some(whole) = bytes.first_chunk::<BLOCK_BYTES>() {
            return Self(Arc::new(PageBuf::new(Aligned(*whole))));
        }
        let mut p = Self::zeroed();
        p.write(0, bytes);
        p
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.0.0.0
    }

    /// Changes the bytes from `offset` on; a page that is shared is copied first.
    ///
    /// # Panics
    /// Where `bytes` do not fit (a bug of ours).
    pub fn write(&mut self, offset: usize, bytes: &[u8]) {
        self.make_mut()[offset..offset + bytes.len()].copy_from_slice(bytes);
    }

    /// The bytes, to change; a page that is shared is copied first.
    pub fn make_mut(&mut self) -> &mut [u8; BLOCK_BYTES] {
        &mut Arc::make_mut(&mut self.0).0.0
    }

    /// Whether both are one buffer: nobody has changed one since it was cloned from the other.
    pub fn same(&self, other: &Page) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Deref for Page {
    type Target = [u8; BLOCK_BYTES];
    fn deref(&self) -> &Self::Target {
        &self.0.0.0
    }
}

impl std::fmt::Debug for Page {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Page({:p})", self.as_ptr())
    }
}

#[derive(Debug)]
struct Slot {
    page: Page,
    dirty: bool,
    /// Used since the evictor last came by.
    hot: AtomicBool,
}

/// The cached pages of a file by logical block; see the module.
#[derive(Debug, Default)]
pub struct PageMap {
    slots: BTreeMap<u64, Slot>,
    dirty: BTreeSet<u64>,
    /// Where the evictor goes on.
    hand: u64,
}

impl PageMap {
    /// Without pages.
    pub fn new() -> Self {
        Self::default()
    }

    /// Pages cached.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Whether no page is cached.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Pages that are dirty.
    pub fn dirty_count(&self) -> usize {
        self.dirty.len()
    }

    /// Whether the page at `lblk` is cached and dirty.
    pub fn is_dirty(&self, lblk: u64) -> bool {
        self.slots.get(&lblk).is_some_and(|s| s.dirty)
    }

    /// The dirty pages' logical blocks, rising.
    pub fn dirty_blocks(&self) -> impl Iterator<Item = u64> + '_ {
        self.dirty.iter().copied()
    }

    /// The first dirty page at or behind `lblk`.
    pub fn next_dirty(&self, lblk: u64) -> Option<u64> {
        self.dirty.range(lblk..).next().copied()
    }

    /// Makes a cached page dirty as it is; whether it was clean.
    pub fn dirty(&mut self, lblk: u64) -> bool {
        let Some(s) = self.slots.get_mut(&lblk) else { return false };
        s.dirty = true;
        self.dirty.insert(lblk)
    }

    /// The page at `lblk`.
    pub fn get(&self, lblk: u64) -> Option<&Page> {
        let s = self.slots.get(&lblk)?;
        if !s.hot.load(Ordering::Relaxed) {
            s.hot.store(true, Ordering::Relaxed);
        }
        Some(&s.page)
    }

    /// Caches what was read from disk. A page that is there already stays: it is as new or newer. Gives whether
    /// the page was taken.
    pub fn insert_clean(&mut self, lblk: u64, page: Page) -> bool {
        let mut taken = false;
        self.slots.entry(lblk).or_insert_with(|| {
            taken = true;
            Slot { page, dirty: false, hot: AtomicBool::new(false) }
        });
        taken
    }

    /// Puts `page` in place of whatever is cached at `lblk`, dirty. Gives whether there was no dirty page.
    pub fn put_dirty(&mut self, lblk: u64, page: Page) -> bool {
        self.slots.insert(lblk, Slot { page, dirty: true, hot: AtomicBool::new(true) });
        self.dirty.insert(lblk)
    }

    /// Changes a cached page and marks it dirty. Gives whether it was clean before, `None` where the page is
    /// not cached (and nothing was written).
    ///
    /// # Panics
    /// Where `bytes` do not fit the page from `offset` on (a bug of ours).
    #[must_use]
    pub fn write(&mut self, lblk: u64, offset: usize, bytes: &[u8]) -> Option<bool> {
        self.change(lblk, |p| p.write(offset, bytes))
    }

    /// Zeroes a cached page from `from_offset` on and marks it dirty. Gives as [`Self::write`].
    #[must_use]
    pub fn zero_tail(&mut self, lblk: u64, from_offset: usize) -> Option<bool> {
        self.change(lblk, |p| p.make_mut()[from_offset..].fill(0))
    }

    fn change(&mut self, lblk: u64, f: impl FnOnce(&mut Page)) -> Option<bool> {
        let s = self.slots.get_mut(&lblk)?;
        f(&mut s.page);
        *s.hot.get_mut() = true;
        let was_clean = !std::mem::replace(&mut s.dirty, true);
        if was_clean {
            self.dirty.insert(lblk);
        }
        Some(was_clean)
    }

    /// All dirty pages, as runs of consecutive blocks of at most `max_run` pages each. They stay dirty.
    pub fn dirty_runs(&self, max_run: usize) -> Vec<(u64, Vec<Page>)> {
        self.dirty_runs_in(0, u64::MAX, max_run)
    }

    /// As [`Self::dirty_runs`], of the blocks `[from, to)`.
    pub fn dirty_runs_in(&self, from: u64, to: u64, max_run: usize) -> Vec<(u64, Vec<Page>)> {
        let mut runs: Vec<(u64, Vec<Page>)> = Vec::new();
        if from >= to {
            return runs;
        }
        for &lblk in self.dirty.range(from..to) {
            let Some(s) = self.slots.get(&lblk) else { continue };
            match runs.last_mut() {
                Some((first, pages)) if *first + pages.len() as u64 == lblk && pages.len() < max_run => {
                    pages.push(s.page.clone());
                }
                _ => runs.push((lblk, vec![s.page.clone()])),
            }
        }
        runs
    }

    /// Marks the pages of `[from, to)` clean, whatever they hold. Right where the caller has not let a writer in
    /// since it took the pages to write out; else see [`Self::mark_written`].
    pub fn mark_clean(&mut self, from: u64, to: u64) {
        if from >= to {
            return;
        }
        let gone: Vec<u64> = self.dirty.range(from..to).copied().collect();
        for lblk in gone {
            self.clean(lblk);
        }
    }

    /// Marks those pages of a run clean that still are what was written out. A page that was changed meanwhile
    /// is another buffer, because the run given here shared the old one, and stays dirty. Gives how many became
    /// clean.
    pub fn mark_written(&mut self, lblk: u64, pages: &[Page]) -> usize {
        let mut n = 0;
        for (at, page) in (lblk..).zip(pages) {
            if self.slots.get(&at).is_some_and(|s| s.dirty && s.page.same(page)) {
                self.clean(at);
                n += 1;
            }
        }
        n
    }

    fn clean(&mut self, lblk: u64) {
        self.dirty.remove(&lblk);
        if let Some(s) = self.slots.get_mut(&lblk) {
            s.dirty = false;
        }
    }

    /// Forgets the pages of `[from, to)`. Gives how many of them were dirty.
    pub fn remove_range(&mut self, from: u64, to: u64) -> usize {
        if from >= to {
            return 0;
        }
        let gone: Vec<u64> = self.slots.range(from..to).map(|s| *s.0).collect();
        gone.iter().filter(|l| self.slots.remove(l).is_some_and(|s| s.dirty) && self.dirty.remove(l)).count()
    }

    /// Forgets up to `max_pages` clean pages and gives how many. Goes once round the file; a page used since
    /// the evictor last came by is passed over once (second chance).
    pub fn evict_clean(&mut self, max_pages: usize) -> usize {
        let mut victims = Vec::new();
        let hand = self.hand;
        for part in [(Bound::Included(hand), Bound::Unbounded), (Bound::Unbounded, Bound::Excluded(hand))] {
            for (&lblk, s) in self.slots.range_mut(part) {
                if victims.len() == max_pages {
                    break;
                }
                self.hand = lblk + 1;
                if !s.dirty && !std::mem::take(s.hot.get_mut()) {
                    victims.push(lblk);
                }
            }
        }
        for v in &victims {
            self.slots.remove(v);
        }
        victims.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn page(b: u8) -> Page {
        Page::from_slice(&[b; BLOCK_BYTES])
    }

    #[test]
    fn pages_are_aligned_and_copied_on_write() {
        let a = Page::from_slice(b"abc");
        assert_eq!(a.as_ptr() as usize % BLOCK_BYTES, 0);
        assert_eq!((&a[..4], a[4095]), (b"abc\0".as_slice(), 0));
        let mut b = a.clone();
        assert!(b.same(&a));
        b.make_mut()[0] = b'x';
        assert_eq!((a[0], b[0]), (b'a', b'x'));
        let at = b.as_ptr();
        b.make_mut()[1] = b'y';
        assert_eq!(b.as_ptr(), at, "a page that nobody shares is changed in place");
    }

    #[test]
    fn a_write_during_write_out_stays_dirty() {
        let mut m = PageMap::new();
        m.put_dirty(3, page(1));
        m.put_dirty(4, page(2));
        let runs = m.dirty_runs(usize::MAX);
        assert_eq!(m.write(4, 10, b"new"), Some(false));
        assert_eq!(runs[0].1[1][10], 2, "the I/O sees what it was given");
        assert_eq!(m.mark_written(3, &runs[0].1), 1);
        assert!(!m.is_dirty(3) && m.is_dirty(4));
        assert!(!m.insert_clean(4, page(9)), "what a reader brings does not replace it");
        assert_eq!(m.get(4).map(|p| p[10]), Some(b'n'));
    }

    #[test]
    fn hot_pages_get_a_second_chance() {
        let mut m = PageMap::new();
        (0..8).for_each(|l| assert!(m.insert_clean(l, page(0))));
        m.put_dirty(8, page(1));
        (0..4).for_each(|l| assert!(m.get(l).is_some()));
        assert_eq!(m.evict_clean(2), 2);
        assert_eq!(m.slots.keys().copied().collect::<Vec<_>>(), [0, 1, 2, 3, 6, 7, 8]);
        assert_eq!(m.evict_clean(100), 6, "the rest, the hot ones by their second turn");
        assert!(m.is_dirty(8) && m.len() == 1);
        assert_eq!(m.evict_clean(100), 0);
    }

    proptest! {
        #[test]
        fn like_a_table(ops in prop::collection::vec((0..9u8, 0..40u64, 0..40u64, any::<u8>()), 1..200)) {
            let mut m = PageMap::new();
            let mut model: BTreeMap<u64, (u8, bool)> = BTreeMap::new();
            for (op, a, b, v) in ops {
                match op {
                    0 | 1 => {
                        prop_assert_eq!(m.insert_clean(a, page(v)), !model.contains_key(&a));
                        model.entry(a).or_insert((v, false));
                    }
                    2 | 3 => {
                        let was_clean = !model.insert(a, (v, true)).is_some_and(|o| o.1);
                        prop_assert_eq!(m.put_dirty(a, page(v)), was_clean);
                    }
                    4 => {
                        let was = model.get_mut(&a).map(|o| !std::mem::replace(o, (v, true)).1);
                        prop_assert_eq!(m.write(a, 0, &[v; BLOCK_BYTES]), was);
                    }
                    5 => {
                        m.mark_clean(a, b);
                        model.iter_mut().filter(|o| (a..b).contains(o.0)).for_each(|o| o.1.1 = false);
                    }
                    6 => {
                        let dirty = model.iter().filter(|o| (a..b).contains(o.0) && o.1.1).count();
                        model.retain(|l, _| !(a..b).contains(l));
                        prop_assert_eq!(m.remove_range(a, b), dirty);
                    }
                    7 => {
                        let n = m.evict_clean(a as usize);
                        let before = model.len();
                        model.retain(|l, o| o.1 || m.slots.contains_key(l));
                        prop_assert_eq!(before - model.len(), n);
                        prop_assert!(n <= a as usize);
                    }
                    _ => {
                        let was = model.get_mut(&a).map(|o| !std::mem::replace(o, (0, true)).1);
                        prop_assert_eq!(m.zero_tail(a, 0), was);
                    }
                }
                prop_assert_eq!(m.len(), model.len());
                let dirty: Vec<u64> = model.iter().filter(|o| o.1.1).map(|o| *o.0).collect();
                prop_assert_eq!(m.dirty_count(), dirty.len());
                let runs = m.dirty_runs(usize::MAX);
                let in_runs: Vec<u64> = runs.iter().flat_map(|r| r.0..r.0 + r.1.len() as u64).collect();
                prop_assert_eq!(in_runs, dirty);
                prop_assert!(runs.windows(2).all(|w| w[0].0 + (w[0].1.len() as u64) < w[1].0));
                let short = m.dirty_runs(3);
                prop_assert!(short.iter().all(|r| (1..=3).contains(&r.1.len())));
                prop_assert_eq!(short.iter().map(|r| r.1.len()).sum::<usize>(), m.dirty_count());
            }
            for l in 0..40 {
                prop_assert_eq!(m.slots.get(&l).map(|s| (s.page[0], s.dirty)), model.get(&l).copied());
            }
        }
    }
}
