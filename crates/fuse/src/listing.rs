//! Which parts of a listing tell attributes with the names.
//!
//! Whoever lists a directory mostly asks for what the names stand for next: `find`, `cp -r`, `rm -r`, `ls -l`, `git
//! status`. A name that came without attributes costs a LOOKUP then, a trip for each. The kernel's own choice
//! (READDIRPLUS_AUTO, `fuse_use_readdirplus` in fs/fuse/readdir.c) wants attributes with the first part of a listing
//! only, and with a later one where a name of the directory was looked up meanwhile; but fts(3), which the programs above
//! use, lists 10,000 names before it looks at the first. So the kernel is told to want them always, and this module
//! chooses: the first [`PLENTY`] entries tell theirs, and those after them only where somebody looked for one. Else to
//! list the names of a directory of millions would read all inodes and fill the kernel's caches with them.

use braidfs::InodeNo;
use crossbeam::utils::CachePadded;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Entries of a directory whose attributes are told unasked.
pub(crate) const PLENTY: u64 = 1 << 14;
/// Directories that are remembered; of two with one place the later stays.
const DIRS: usize = 64;
/// Bits of the count in a word; the others are of the directory's number.
const COUNT_BITS: u32 = 24;

/// Directories listed lately, and how many attributes each told since its start. Guesses: threads may overwrite each
/// other's, and two directories may look like one. Then a LOOKUP more is sent, or some attributes are told in vain. Each on a
/// line of its own: every LOOKUP reads that of its directory.
#[derive(Debug)]
pub(crate) struct Listings([CachePadded<AtomicU64>; DIRS]);

impl Default for Listings {
    fn default() -> Self {
        Self([const { CachePadded::new(AtomicU64::new(0)) }; DIRS])
    }
}

impl Listings {
    fn place(&self, dir: InodeNo) -> (&AtomicU64, u64) {
        (&self.0[dir.0 as usize % DIRS], dir.0 << COUNT_BITS)
    }

    /// How many attributes were told of `dir`; `None` where that is not remembered.
    fn told_of(&self, dir: InodeNo) -> Option<u64> {
        let (place, tag) = self.place(dir);
        let word = place.load(Relaxed);
        (word >> COUNT_BITS << COUNT_BITS == tag).then_some(word ^ tag)
    }

    /// Whether the part of the listing of `dir` from `offset` on is to tell attributes.
    pub fn wants_attributes(&self, dir: InodeNo, offset: u64) -> bool {
        if offset == 0 {
            let (place, tag) = self.place(dir);
            place.store(tag, Relaxed);
            return true;
        }
        self.told_of(dir).is_none_or(|told| told < PLENTY)
    }

    /// The attributes of `entries` more were told.
    pub fn told(&self, dir: InodeNo, entries: u64) {
        let (place, tag) = self.place(dir);
        let told = self.told_of(dir).unwrap_or(0) + entries;
        place.store(tag | told.min((1 << COUNT_BITS) - 1), Relaxed);
    }

    /// A name of `dir` was looked up: whoever lists it wants attributes.
    pub fn looked_up(&self, dir: InodeNo) {
        // mostly a load: every LOOKUP comes by
        if self.told_of(dir).is_some_and(|told| told >= PLENTY) {
            let (place, tag) = self.place(dir);
            place.store(tag, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIR: InodeNo = InodeNo(0x1234_5678);

    #[test]
    fn a_huge_directory_tells_attributes_at_first_and_on_demand() {
        let l = Listings::default();
        assert!(l.wants_attributes(DIR, 0));
        for part in 1..=PLENTY / 128 {
            l.told(DIR, 128);
            assert_eq!(l.wants_attributes(DIR, 77), part < PLENTY / 128);
        }
        l.looked_up(InodeNo(DIR.0 + 1));
        assert!(!l.wants_attributes(DIR, 77));
        l.looked_up(DIR);
        assert!(l.wants_attributes(DIR, 77));
        l.told(DIR, 1 << 40);
        assert!(!l.wants_attributes(DIR, 77));
        assert!(l.wants_attributes(DIR, 0), "a new listing");
        assert!(l.wants_attributes(DIR, 77));
    }

    #[test]
    fn another_directory_of_the_same_place_starts_anew() {
        let (l, other) = (Listings::default(), InodeNo(DIR.0 + DIRS as u64));
        l.wants_attributes(DIR, 0);
        l.told(DIR, PLENTY);
        assert!(l.wants_attributes(other, 5));
        l.told(other, 3);
        assert_eq!((l.told_of(other), l.told_of(DIR)), (Some(3), None));
        assert!(l.wants_attributes(DIR, 5));
    }
}
