//! Which pages of a file have blocks, and since when: what a crash may mix where these are overwritten in place.
//!
//! A page has a block from its first write on; one that was only reserved reads as zeros until then, as a hole does. The
//! block is another one after the page was cut away, punched or zeroed, and written again. Where a range was collapsed or
//! inserted nothing is overwritten before that is durable, so that the blocks of the whole file count as new.

use crate::sparse::PAGE;
use std::collections::BTreeMap;
use std::ops::Range;

/// What the model knows of a file's blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Blocks {
    /// Pages with a block, by the first of a run: one past the last, and which of the blocks that the page had.
    runs: BTreeMap<u64, (u64, u32)>,
    /// Given to what is written next.
    next: u32,
    /// Ranges that were collapsed or inserted.
    moves: u32,
}

impl Blocks {
    /// Of a file of which only what it holds is known: each of its pages may have a block.
    pub fn of_unknown(size: u64) -> Self {
        let mut blocks = Self::default();
        blocks.write(0, size);
        blocks
    }

    /// Which of the blocks that it had a page has now; `None` where it has none.
    pub fn block(&self, page: u64) -> Option<u32> {
        self.runs.range(..=page).next_back().filter(|(_, (end, _))| page < *end).map(|(_, (_, n))| *n)
    }

    /// How many ranges were collapsed or inserted so far.
    pub fn moves(&self) -> u32 {
        self.moves
    }

    /// Whether each page has the same block here as there, or none.
    pub fn same(&self, other: &Self) -> bool {
        self.runs == other.runs
    }

    /// Whether each page that has a block there has the same here; others may have one here.
    pub fn keeps(&self, other: &Self) -> bool {
        other.runs.iter().all(|(first, (end, n))| {
            let mut at = *first;
            while at < *end {
                match self.runs.range(..=at).next_back() {
                    Some((_, (to, m))) if at < *to && m == n => at = *to,
                    _ => return false,
                }
            }
            true
        })
    }

    /// A range of bytes is written.
    pub fn write(&mut self, offset: u64, len: u64) {
        if len == 0 {
            return;
        }
        let (mut at, end) = (offset / PAGE as u64, (offset + len).div_ceil(PAGE as u64));
        while at < end {
            let run = self.runs.range(..=at).next_back().map(|(_, (end, _))| *end).filter(|end| at < *end);
            if let Some(end) = run {
                at = end;
                continue;
            }
            let to = self.runs.range(at..).next().map_or(end, |(first, _)| end.min(*first));
            self.runs.insert(at, (to, self.next));
            at = to;
        }
        self.next += 1;
    }

    /// These pages have none any more.
    pub fn drop_pages(&mut self, pages: Range<u64>) {
        if pages.is_empty() {
            return;
        }
        self.split(pages.start);
        self.split(pages.end);
        self.runs.retain(|first, _| !pages.contains(first));
    }

    /// A range of bytes of a file of `size` bytes is punched or zeroed. Pages that it cuts stay, but for the last one of the
    /// file.
    pub fn zero(&mut self, offset: u64, end: u64, size: u64) {
        let page = PAGE as u64;
        let last = if end >= size { (end / page).max(size.div_ceil(page)) } else { end / page };
        self.drop_pages(offset.div_ceil(page)..last);
    }

    /// The file has `size` bytes from now on.
    pub fn resize(&mut self, size: u64) {
        self.drop_pages(size.div_ceil(PAGE as u64)..u64::MAX);
    }

    /// Whole pages are taken out; those behind them come to their place.
    pub fn collapse(&mut self, offset: u64, len: u64) {
        let (first, n) = (offset / PAGE as u64, len / PAGE as u64);
        self.drop_pages(first..first + n);
        self.shift(first + n, |page| page - n);
    }

    /// Room is made for whole pages, which have no blocks.
    pub fn insert(&mut self, offset: u64, len: u64) {
        let (first, n) = (offset / PAGE as u64, len / PAGE as u64);
        self.split(first);
        self.shift(first, |page| page + n);
    }

    /// Moves the runs from a page on, and gives all of the file another number.
    fn shift(&mut self, from: u64, to: impl Fn(u64) -> u64) {
        let moved = |first: u64, end: u64| if first < from { (first, end) } else { (to(first), to(end)) };
        let all = std::mem::take(&mut self.runs);
        for (first, (end, _)) in all {
            let (first, end) = moved(first, end);
            self.runs.insert(first, (end, self.next));
        }
        self.next += 1;
        self.moves += 1;
    }

    /// Makes a run end at a page, where there is one over it.
    fn split(&mut self, page: u64) {
        let over = self.runs.range_mut(..page).next_back().filter(|(_, (end, _))| page < *end);
        if let Some((_, (end, n))) = over {
            let rest = (*end, *n);
            *end = page;
            self.runs.insert(page, rest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A number for each page with a block, by a map of pages.
    #[test]
    fn behaves_as_a_map_of_pages() {
        let (mut rng, page) = (fastrand::Rng::with_seed(3), PAGE as u64);
        let (mut b, mut want, mut next) = (Blocks::default(), BTreeMap::<u64, u32>::new(), 0);
        for _ in 0..4000 {
            let (off, len) = (rng.u64(..30 * page), rng.u64(..8 * page));
            let (first, n) = (off / page, len / page);
            match rng.u8(..10) {
                0..4 => {
                    b.write(off, len);
                    if len > 0 {
                        (first..(off + len).div_ceil(page)).for_each(|p| _ = want.entry(p).or_insert(next));
                        next += 1;
                    }
                }
                4..6 => {
                    b.zero(off, off + len, 20 * page);
                    let last = (off + len) / page;
                    let last = if off + len >= 20 * page { last.max(20) } else { last };
                    want.retain(|p, _| !(off.div_ceil(page)..last).contains(p));
                }
                6 => {
                    b.resize(off);
                    want.retain(|p, _| *p < off.div_ceil(page));
                }
                7..9 => {
                    b.collapse(first * page, n * page);
                    want.retain(|p, _| !(first..first + n).contains(p));
                    want = want.into_keys().map(|p| (if p < first { p } else { p - n }, next)).collect();
                    next += 1;
                }
                _ => {
                    b.insert(first * page, n * page);
                    want = want.into_keys().map(|p| (if p < first { p } else { p + n }, next)).collect();
                    next += 1;
                }
            }
            assert!((0..200).all(|p| b.block(p) == want.get(&p).copied()), "{b:?}, not {want:?}");
            let (mut more, mut less) = (b.clone(), b.clone());
            more.write(off, len);
            less.zero(off, off + len, 20 * page);
            assert!(more.keeps(&b) && b.keeps(&less));
            assert_eq!(b.keeps(&more), more.same(&b));
            assert_eq!(less.keeps(&b), less.same(&b));
        }
        assert!(b.same(&b.clone()) && !b.same(&Blocks::default()));
        assert_eq!(Blocks::of_unknown(page + 1).block(1), Some(0));
    }
}
