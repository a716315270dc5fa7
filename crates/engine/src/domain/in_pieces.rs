//! Which files of a domain lie in many short pieces, as far as it has seen: to be made whole when there is time.
//!
//! Only a hint, in memory: a file that is forgotten is noted again when it is next written or read from the device.

use crate::types::*;
use std::collections::{HashMap, HashSet, VecDeque};

/// Files noted at most; later ones are forgotten.
const NOTED_MAX: usize = 1024;

/// What became of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// From this block on there is more.
    GoOn {
        /// Block of the file.
        from: u64,
    },
    /// Not now: to be tried again.
    Later,
    /// It is as whole as it gets, in so many extents.
    Ended {
        /// Of its map.
        extents: usize,
    },
}

/// See the module.
#[derive(Debug, Default)]
pub struct InPieces {
    /// The first one is worked on, from this block.
    waiting: VecDeque<(InodeNo, u64)>,
    /// All of these: every flush of such a file asks.
    noted: HashSet<InodeNo>,
    /// Those that have been made as whole as they get, and in how many extents they were then.
    ended: HashMap<InodeNo, usize>,
}

impl InPieces {
    /// A file in so many extents, which are short.
    pub fn note(&mut self, ino: InodeNo, extents: usize) {
        if self.noted.contains(&ino) || self.waiting.len() >= NOTED_MAX {
            return;
        }
        if self.ended.get(&ino).is_some_and(|then| extents <= then + then / 4) {
            return;
        }
        self.ended.remove(&ino);
        self.noted.insert(ino);
        self.waiting.push_back((ino, 0));
    }

    /// The file to work on, and from which block.
    pub fn next(&self) -> Option<(InodeNo, u64)> {
        self.waiting.front().copied()
    }

    /// Some of it was done.
    pub fn done(&mut self, ino: InodeNo, how: Progress) {
        let Some(at) = self.waiting.iter().position(|(i, _)| *i == ino) else { return };
        match how {
            Progress::GoOn { from } => self.waiting[at].1 = from,
            // behind all others
            Progress::Later => {
                if let Some(one) = self.waiting.remove(at) {
                    self.waiting.push_back(one);
                }
            }
            Progress::Ended { extents } => {
                self.waiting.remove(at);
                self.noted.remove(&ino);
                if self.ended.len() >= NOTED_MAX {
                    self.ended.clear();
                }
                if extents > 0 {
                    self.ended.insert(ino, extents);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_noted_once_and_again_when_it_fell_to_pieces() {
        let (a, b) = (InodeNo(7), InodeNo(8));
        let mut p = InPieces::default();
        p.note(a, 100);
        p.note(b, 50);
        p.note(a, 200);
        assert_eq!(p.next(), Some((a, 0)));
        p.done(a, Progress::GoOn { from: 512 });
        assert_eq!(p.next(), Some((a, 512)));
        p.done(a, Progress::Later);
        assert_eq!(p.next(), Some((b, 0)));
        p.done(b, Progress::Ended { extents: 0 });
        p.done(a, Progress::Ended { extents: 20 });
        assert_eq!(p.next(), None);
        p.note(a, 25);
        assert_eq!(p.next(), None, "it is as whole as it gets");
        p.note(a, 26);
        assert_eq!(p.next(), Some((a, 0)));
    }

    #[test]
    fn only_so_many_are_noted() {
        let mut p = InPieces::default();
        (0..5000).for_each(|i| p.note(InodeNo(i), 100));
        let mut n = 0;
        while let Some((ino, _)) = p.next() {
            p.done(ino, Progress::Ended { extents: 5 });
            n += 1;
        }
        assert_eq!(n, NOTED_MAX);
    }
}
