//! Whether the readers of a lock publish themselves on lines of their own instead of counting themselves in its word.
//!
//! BRAVO (Dice and Kogan, USENIX ATC 2019): the lock below stays as it is; a mark on it says that readers need not take it.
//! Who writes takes the lock below, takes the mark away, and waits for the published readers.
//!
//! There are two marks. One is for all readers; it is set where several threads read in turn: each such turn moves the line
//! of the lock's word. After a write so many turns have to come again, which pays for the writer's search. The other is for
//! one thread, the owner; it is set where this thread has read so often with no other in between. The owner needs no locked
//! instruction, as the writer has the kernel make its fence ([`crate::membarrier`]): what the owner copied before need not be
//! seen by all before it goes on. That costs the writer a microsecond or several, so that each time it was for nothing the owner
//! has to read twice as often before it is one again. A thread that owns the lock and writes itself pays nothing.

use crate::ablation::{self, Switch};
use crate::membarrier;
#[cfg(loom)]
use crate::one_order::AtomicU32;
use crate::published::{self, Place};
#[cfg(not(loom))]
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};

/// All readers publish themselves.
const BIASED: u32 = 1 << 31;
/// The thread whose number is [`READER`] may have published itself without a fence; beside [`BIASED`] it does so no more.
const OWNED: u32 = 1 << 30;
/// Number of the last reader, or of the owner.
const READER: u32 = 0xffff;
/// How often another thread came to read since the last write; from this bit on, below the marks.
const TURN: u32 = 1 << 16;
const TURNS_MASK: u32 = (OWNED - 1) & !READER;
/// So many turns set the mark, with few threads.
const TURNS: u32 = 3;
/// With many threads, whose lines a writer has to look through: so many at most.
const TURNS_MAX: u32 = 48;
/// So many reads by one thread make it the owner, the first time, and at most.
const READS: u32 = 64;
const READS_MAX: u32 = 1 << 15;
/// Where the owner itself has written, so many make it the owner again.
const READS_AGAIN: u32 = 16;
/// Reads that are still to come; above it how many they were, to begin with.
const TO_COME: u32 = 0xffff;
const TO_BEGIN_WITH: u32 = 16;

/// Whether a scheduler of tests runs this thread: when threads end, and give their numbers to others, it does not say.
fn in_turns() -> bool {
    #[cfg(feature = "schedule")]
    return crate::schedule::scheduled();
    #[cfg(not(feature = "schedule"))]
    false
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Bias {
    marks: AtomicU32,
    /// Reads by the thread of [`READER`] until it is the owner. A guess: threads may write it at once.
    reads: AtomicU32,
}

/// Readers that may have published themselves before a writer took the marks away.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Readers {
    marks: u32,
    /// There is but one, the thread that writes.
    myself: bool,
}

impl Readers {
    /// All others, each with a fence.
    pub const FENCED: Self = Self { marks: BIASED, myself: false };

    /// Those of them by whose lines the writer has to look see that the mark is gone, or are seen, from here on.
    pub fn before_looking(self) {
        if self.marks & OWNED == 0 {
            published::before_looking();
        } else if !self.myself {
            membarrier::in_all_threads();
        }
        // a thread sees what it wrote itself
    }
    /// Whether the thread with this number may be one.
    pub fn may_be(self, number: u32) -> bool {
        self.marks & BIASED != 0 || self.marks & READER == number
    }
}

impl Bias {
    pub(crate) fn new() -> Self {
        Self { marks: AtomicU32::new(0), reads: AtomicU32::new(READS << TO_BEGIN_WITH | READS) }
    }
    /// Whether some readers need not take the lock below.
    #[inline(always)]
    pub(crate) fn has_mark(&self) -> bool {
        self.marks.load(Relaxed) >= OWNED
    }
    /// Where there is a mark for the thread with the number `reader`: it may read what the lock guards until it clears its place.
    #[inline(always)]
    pub(crate) fn enter<'l>(
        &self,
        reader: u32,
        publish: impl FnOnce() -> Option<&'l Place>,
        publish_without_fence: impl FnOnce() -> Option<&'l Place>,
    ) -> Option<&'l Place> {
        let marks = self.marks.load(Relaxed);
        let (place, still) = if marks & BIASED != 0 {
            let place = publish()?;
            // what the last writer did is seen by who sees the mark that was set after it
            (place, self.marks.load(SeqCst) & BIASED != 0)
        } else if marks & OWNED != 0 && marks & READER == reader {
            let place = publish_without_fence()?;
            // The owner set the mark, and had the lock below then; so it has seen what the last writer did.
            let now = self.marks.load(Acquire);
            (place, (now ^ marks) & (BIASED | OWNED | READER) == 0)
        } else {
            return None;
        };
        if still {
            return Some(place);
        }
        place.clear();
        None
    }
    /// By a reader that has the lock below for reading, which keeps writers out meanwhile.
    #[inline(always)]
    pub(crate) fn note_reader(&self, reader: u32) {
        if !self.is_last(reader) {
            self.another_reader(reader);
        } else {
            let reads = self.reads.load(Relaxed);
            if reads & TO_COME > 0 {
                self.reads.store(reads - 1, Relaxed);
            } else {
                self.own(reader);
            }
        }
    }
    /// Whether the last reader that had the lock below, or the owner, is the thread with this number.
    #[inline(always)]
    pub(crate) fn is_last(&self, reader: u32) -> bool {
        self.marks.load(Relaxed) & READER == reader & READER
    }
    #[cold]
    #[inline(never)]
    fn another_reader(&self, reader: u32) {
        self.wait_for_reads(self.reads.load(Relaxed) >> TO_BEGIN_WITH);
        self.turn(reader, (TURNS + published::lines() / 4).min(TURNS_MAX));
    }
    /// Another thread came to read; so many `turns` set the mark.
    pub(crate) fn turn(&self, reader: u32, turns: u32) {
        let marks = self.marks.load(Relaxed);
        if marks & BIASED != 0 || ablation::is_on(Switch::Cells) {
            return;
        }
        let had = (marks & TURNS_MASK) / TURN;
        // the owner stays the owner of places that it may have published, until a writer has looked
        let owner = if marks & OWNED != 0 { marks & (OWNED | READER) } else { 0 };
        let new = match (had + 1 < turns, owner) {
            (true, 0) => (had + 1) * TURN + (reader & READER),
            (true, owner) => (had + 1) * TURN + owner,
            (false, owner) => BIASED | owner,
        };
        // another reader may be faster: then it has counted
        let _ = self.marks.compare_exchange(marks, new, Release, Relaxed);
    }
    /// The thread that has the lock below for reading, and has read so often with no other in between, becomes the owner.
    #[cold]
    #[inline(never)]
    pub(crate) fn own(&self, reader: u32) {
        let marks = self.marks.load(Relaxed);
        let free = marks & (BIASED | OWNED) == 0 && marks & READER == reader & READER;
        // a thread that ends has number 0, and cannot publish; of a larger one the marks have a part
        let may = free && reader > 0 && reader <= READER && (cfg!(loom) || membarrier::is_ready()) && !in_turns();
        if !may
            || ablation::is_on(Switch::Cells)
            || self.marks.compare_exchange(marks, OWNED | marks & READER, Release, Relaxed).is_err()
        {
            self.wait_for_reads(READS_MAX);
        }
    }
    fn wait_for_reads(&self, reads: u32) {
        self.reads.store(self.reads.load(Relaxed) & !TO_COME | reads, Relaxed);
    }
    /// By a writer that has the lock below for writing: no reader publishes itself from here on, and turns count from 0.
    /// Those that may have done so before.
    #[inline(always)]
    pub(crate) fn clear(&self, myself: impl FnOnce() -> u32) -> Option<Readers> {
        let marks = self.marks.load(Relaxed);
        if marks < TURN {
            return None;
        }
        if marks < OWNED {
            // nobody reads past the lock below, or counts turns: no fence
            self.marks.store(marks & READER, Relaxed);
            return None;
        }
        self.marks.store(marks & READER, SeqCst);
        Some(Readers { marks, myself: marks & (BIASED | OWNED) == OWNED && marks & READER == myself() })
    }
    /// By a writer that took marks away, and goes on: when one thread owns the lock again.
    pub(crate) fn put_off_owner(&self, readers: Readers) {
        if readers.myself {
            self.wait_for_reads(READS_AGAIN);
        } else if readers.marks & OWNED != 0 {
            let twice = ((self.reads.load(Relaxed) >> TO_BEGIN_WITH) * 2).min(READS_MAX);
            self.reads.store(twice << TO_BEGIN_WITH | twice, Relaxed);
        }
    }
    /// By a writer that found readers, does not wait for them, and has changed nothing.
    pub(crate) fn restore(&self, readers: Readers) {
        self.marks.store(readers.marks, Release);
    }
    /// By a writer that does nothing more.
    pub(crate) fn set(&self) {
        self.marks.store(BIASED, Release);
    }
    /// Whether all readers publish themselves now.
    #[cfg(test)]
    pub(crate) fn is_set(&self) -> bool {
        self.marks.load(Relaxed) & BIASED != 0
    }
    /// The number of the thread that owns it alone.
    #[cfg(test)]
    pub(crate) fn owner(&self) -> Option<u32> {
        let marks = self.marks.load(Relaxed);
        (marks & (BIASED | OWNED) == OWNED).then_some(marks & READER)
    }
}
