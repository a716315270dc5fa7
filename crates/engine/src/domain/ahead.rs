//! What is known of a handle's reads, and how much of a domain's memory may hold what was read ahead and perhaps is not used yet
//! (bladefs, section 2.2: readahead by open file). `file/ahead.rs` reads.
//!
//! Each handle that reads on gives back what it held when it reads ahead anew. One that stops in the middle keeps its part: it
//! is nobody's any more once the domain has thrown out as many pages as it may hold, and with them what was read ahead before.
//! A domain that holds less than half of what it may does not count so closely.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed};

/// All windows together may hold this part of what the domain may take of the cache, and one of them the other.
const BUDGET_PART: u64 = 8;
const WINDOW_PART: u64 = 32;

/// Pages that were read ahead for a handle.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Grant {
    /// How many.
    pub pages: u32,
    era: u32,
}

impl Grant {
    /// In one word, 0 where there is nothing.
    pub fn packed(self) -> u64 {
        if self.pages == 0 { 0 } else { u64::from(self.era) << 32 | u64::from(self.pages) }
    }
    /// What was [packed](Self::packed).
    pub fn unpacked(word: u64) -> Self {
        Self { pages: word as u32, era: (word >> 32) as u32 }
    }
}

/// See the module. Looked at by reads that wait for the device anyway.
#[derive(Debug, Default)]
pub struct AheadBudget {
    held: AtomicU64,
    /// Pages thrown out in this era.
    gone: AtomicU64,
    era: AtomicU32,
}

impl AheadBudget {
    /// Pages of a window at most, in a domain that may hold so many bytes.
    pub fn window_max(bytes: u64) -> u64 {
        bytes / WINDOW_PART / 4096
    }

    /// Up to so many pages, in a domain that may hold so many bytes; `is_roomy`: whether it holds less than half of them.
    pub fn take(&self, pages: u32, bytes: u64, is_roomy: impl FnOnce() -> bool) -> Grant {
        let era = self.era.load(Relaxed);
        let most = bytes / BUDGET_PART / 4096;
        let before = self.held.fetch_add(pages.into(), Relaxed);
        if before + u64::from(pages) <= most || is_roomy() {
            return Grant { pages, era };
        }
        let got = most.saturating_sub(before) as u32;
        self.give(Grant { pages: pages - got, era });
        Grant { pages: got, era }
    }

    /// The handle has used them, or is closed.
    pub fn give(&self, grant: Grant) {
        if grant.pages > 0 && grant.era == self.era.load(Relaxed) {
            let _ = self.held.fetch_update(Relaxed, Relaxed, |held| Some(held.saturating_sub(grant.pages.into())));
        }
    }

    /// So many pages were thrown out of a domain that may hold so many bytes.
    pub fn thrown_out(&self, pages: u64, bytes: u64) {
        if self.gone.fetch_add(pages, Relaxed) + pages >= bytes / 4096 {
            self.era.fetch_add(1, Relaxed);
            self.held.store(0, Relaxed);
            self.gone.store(0, Relaxed);
        }
    }
}

/// A first window is so many times what was asked for.
const FIRST: u64 = 4;

/// What a handle is about to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Advice {
    /// Nothing is known: it is found out.
    Normal,
    /// It reads in a row: the longest window, from the first read on.
    Sequential,
    /// It reads here and there: nothing is read ahead.
    Random,
}

/// What is known of a handle's reads. Changed by those of them that wait for the device, which have the file's cell alone.
#[derive(Debug)]
pub struct Ahead {
    /// The page behind those that were read last, in which a reader in a row misses next.
    next: AtomicU64,
    /// Pages of the last window; 0: there was none.
    window: AtomicU32,
    /// Of these, what counts as read ahead.
    granted: AtomicU64,
    advice: AtomicU8,
}

impl Default for Ahead {
    fn default() -> Self {
        Self {
            next: AtomicU64::new(u64::MAX),
            window: AtomicU32::new(0),
            granted: AtomicU64::new(0),
            advice: AtomicU8::new(0),
        }
    }
}

impl Ahead {
    /// What the reads from now on will be like.
    pub fn advise(&self, advice: Advice) {
        let n = match advice {
            Advice::Normal => 0,
            Advice::Sequential => 1,
            Advice::Random => 2,
        };
        self.advice.store(n, Relaxed);
    }

    fn advice(&self) -> Advice {
        match self.advice.load(Relaxed) {
            0 => Advice::Normal,
            1 => Advice::Sequential,
            _ => Advice::Random,
        }
    }

    /// How many pages to read behind `first .. end`, which are missing, in a window of `max` at most; `trim` says how many of so
    /// many can be had by the same request, `bytes` what the domain may hold, `is_roomy` whether it holds less than half of that.
    pub fn plan(
        &self,
        budget: &AheadBudget,
        (bytes, is_roomy): (u64, impl FnOnce() -> bool),
        (first, end): (u64, u64),
        max: u64,
        trim: impl FnOnce(u64) -> u64,
    ) -> u64 {
        self.give_back(budget);
        let (advice, asked) = (self.advice(), end - first);
        let in_a_row = advice == Advice::Sequential || advice == Advice::Normal && self.next.load(Relaxed) == first;
        let window = match self.window.load(Relaxed) {
            _ if !in_a_row => 0,
            _ if advice == Advice::Sequential => max,
            0 => asked.saturating_mul(FIRST).min(max),
            before => (u64::from(before) * 2).min(max),
        };
        let grant = match trim(window.saturating_sub(asked)) {
            0 => Grant::default(),
            n => budget.take(n as u32, bytes, is_roomy),
        };
        self.window.store(window as u32, Relaxed);
        self.next.store(end + u64::from(grant.pages), Relaxed);
        self.granted.store(grant.packed(), Relaxed);
        grant.pages.into()
    }

    /// What was read ahead for it is used, or the handle is closed.
    pub fn give_back(&self, budget: &AheadBudget) {
        // most handles never read ahead, and write nothing when they are closed
        if self.granted.load(Relaxed) != 0 {
            budget.give(Grant::unpacked(self.granted.swap(0, Relaxed)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_share_a_part_of_the_memory_and_who_stops_does_not_keep_it_for_ever() {
        const BYTES: u64 = 8 << 20;
        let budget = AheadBudget::default();
        let take = |pages| budget.take(pages, BYTES, || false);
        assert_eq!(AheadBudget::window_max(BYTES), 64);
        let grants: Vec<Grant> = (0..5).map(|_| take(60)).collect();
        assert_eq!(grants.iter().map(|g| g.pages).collect::<Vec<_>>(), [60, 60, 60, 60, 16]);
        assert_eq!(take(60), Grant { pages: 0, era: 0 });
        budget.give(Grant::unpacked(grants[0].packed()));
        assert_eq!(take(64).pages, 60);
        let more = budget.take(60, BYTES, || true);
        assert_eq!((more.pages, take(1).pages), (60, 0));
        budget.give(more);
        // the others never come back: their part is free when all their pages are gone
        budget.thrown_out(2000, BYTES);
        assert_eq!(take(60).pages, 0);
        budget.thrown_out(48, BYTES);
        // what was of an era before gives nothing back
        assert_eq!(take(200).pages, 200);
        budget.give(grants[1]);
        assert_eq!(take(60).pages, 56);
    }
}
