//! Locks of pages, each on a line of its own, and when a file has them ([`super::shared`]).

use braidfs_sync::ablation::{self, Switch};
use braidfs_sync::{RwLock, rank};

/// Pages of a group.
pub const PAGES: usize = 64;
/// Lines that a processor fetches together.
const PAIR: usize = 2;

/// The lock of a page: of its bytes.
pub type Lock = RwLock<(), rank::PageBytes>;

#[derive(Debug)]
#[repr(align(64))]
struct Line(Lock);

/// The locks of a group's pages.
#[derive(Debug)]
pub struct Locks([Line; PAGES]);

/// Pages that lie side by side have locks that do not: threads often share a file block by block.
fn spread(i: usize) -> usize {
    let n = PAGES;
    i * PAIR % n + i * PAIR / n
}

impl Locks {
    /// Of the group with this number.
    pub fn new(group: u64) -> Box<Self> {
        let n = PAGES;
        let page = |line: usize| (line / PAIR + line % PAIR * (n / PAIR)) as u64;
        Box::new(Self(std::array::from_fn(|line| Line(RwLock::keyed((), group * PAGES as u64 + page(line))))))
    }
    /// That of a page of the group.
    pub fn of(&self, i: usize) -> &Lock {
        &self.0[spread(i)].0
    }
}

/// Whether several threads overwrite a file: they take turns.
#[derive(Debug, Default)]
pub struct Writers {
    last: u16,
    turns: u16,
}

impl Writers {
    /// So many turns say it: as many as make a lock biased towards readers, where threads are few.
    const TURNS: u16 = 3;

    /// This thread overwrites; whether several do.
    #[inline]
    pub fn note(&mut self, thread: u16) -> bool {
        if self.last != thread {
            self.last = thread;
            // the first writer is no turn
            if !ablation::is_on(Switch::Cells) {
                self.turns = (self.turns + 1).min(Self::TURNS + 1);
            }
        }
        self.are_several()
    }

    /// Whether several do, as far as is known.
    pub fn are_several(&self) -> bool {
        self.turns > Self::TURNS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_page_of_a_group_has_a_line_of_its_own() {
        let mut lines: Vec<usize> = (0..PAGES).map(spread).collect();
        assert!(lines.windows(2).all(|w| w[0] / PAIR != w[1] / PAIR));
        lines.sort_unstable();
        assert!(lines.into_iter().eq(0..PAGES));
        assert_eq!(align_of::<Locks>(), 64);
        if !braidfs_sync::CHECKED {
            assert_eq!(size_of::<Locks>(), 4096);
        }
    }

    #[test]
    fn three_turns_make_several_writers() {
        let mut w = Writers::default();
        assert!((0..100).all(|_| !w.note(5)));
        assert!([6, 6, 5, 5].iter().all(|t| !w.note(*t)));
        assert!(w.note(6) && w.note(6) && w.are_several());
    }
}
