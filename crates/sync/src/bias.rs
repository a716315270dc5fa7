//! Whether the readers of a lock publish themselves on lines of their own instead of counting themselves in its word.
//!
//! BRAVO (Dice and Kogan, USENIX ATC 2019): the lock below stays as it is; a mark on it says that readers need not take it.
//! Who writes takes the lock below, takes the mark away, and waits for the published readers. Here the mark is set where
//! several threads read in turn: each such turn moves the line of the lock's word, and a lock that one thread uses alone
//! gains nothing by the mark. After a write so many turns have to come again, which pays for the writer's search.

use crate::ablation::{self, Switch};
use crate::published::{self, Place};
#[cfg(loom)]
use loom::sync::atomic::AtomicU32;
#[cfg(not(loom))]
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};

/// Readers publish themselves.
const BIASED: u32 = 1 << 31;
/// Number of the last reader.
const READER: u32 = 0xffff;
/// How often another thread came to read since the last write; from this bit on.
const TURN: u32 = 1 << 16;
/// So many turns set the mark, with few threads.
const TURNS: u32 = 3;
/// With many threads, whose lines a writer has to look through: so many at most.
const TURNS_MAX: u32 = 48;

/// See the module.
#[derive(Debug)]
pub(crate) struct Bias(AtomicU32);

impl Bias {
    pub(crate) fn new() -> Self {
        Self(AtomicU32::new(0))
    }
    #[inline(always)]
    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Relaxed) & BIASED != 0
    }
    /// Where the mark is set: a published reader may read what the lock guards until it clears its place.
    #[inline(always)]
    pub(crate) fn enter<'l>(&self, publish: impl FnOnce() -> Option<&'l Place>) -> Option<&'l Place> {
        if !self.is_set() {
            return None;
        }
        let place = publish()?;
        // what the last writer did is seen by who sees the mark that was set after it
        if self.0.load(if cfg!(loom) { Acquire } else { SeqCst }) & BIASED != 0 {
            return Some(place);
        }
        place.clear();
        None
    }
    /// By a reader that has the lock below for reading, which keeps writers out meanwhile.
    #[inline(always)]
    pub(crate) fn note_reader(&self, reader: u32) {
        let word = self.0.load(Relaxed);
        if word & READER != reader & READER {
            self.another_reader(reader);
        }
    }
    #[cold]
    #[inline(never)]
    fn another_reader(&self, reader: u32) {
        self.turn(reader, (TURNS + published::lines() / 4).min(TURNS_MAX));
    }
    /// Another thread came to read; so many `turns` set the mark.
    pub(crate) fn turn(&self, reader: u32, turns: u32) {
        let word = self.0.load(Relaxed);
        if word & BIASED != 0 || ablation::is_on(Switch::Cells) {
            return;
        }
        let had = word / TURN;
        let new = if had + 1 < turns { (had + 1) * TURN + (reader & READER) } else { BIASED };
        // another reader may be faster: then it has counted
        let _ = self.0.compare_exchange(word, new, Release, Relaxed);
    }
    /// By a writer that has the lock below for writing: no reader publishes itself from here on, and turns count from 0.
    /// Whether some may be published.
    #[inline(always)]
    pub(crate) fn clear(&self) -> bool {
        let word = self.0.load(Relaxed);
        if word < TURN {
            return false;
        }
        self.0.store(word & READER, SeqCst);
        word & BIASED != 0
    }
    /// By a writer that found readers, does not wait for them, and has changed nothing; or that does nothing more.
    pub(crate) fn set(&self) {
        self.0.store(BIASED, Release);
    }
}
