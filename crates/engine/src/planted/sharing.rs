//! Shared writes planted on purpose, to show that the conflict checker sees them (`make conflicts-planted`).
//!
//! Each is a cache line that threads have no need to share, written at one place of a hot path. Without the feature
//! `planted-sharing` the places are empty functions. The command line does not compile with the feature.

/// A place of a hot path where something can be shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// An open by path.
    Open,
    /// A read of data.
    Read,
    /// In an overwrite of a block.
    Write,
    /// In an append.
    Append,
    /// A change of attributes, the size among them.
    SetAttr,
    /// A part of a directory's listing.
    List,
    /// A commit that writes something.
    Commit,
}

/// What is planted for this place is shared now.
#[inline(always)]
pub(crate) fn share(place: Place) {
    #[cfg(feature = "planted-sharing")]
    planted::share(place);
    #[cfg(not(feature = "planted-sharing"))]
    let _ = place;
}

/// Whether the build can have shared writes planted.
pub const POSSIBLE: bool = cfg!(feature = "planted-sharing");

#[cfg(feature = "planted-sharing")]
pub use planted::{Sharing, plant};

#[cfg(feature = "planted-sharing")]
mod planted {
    use super::Place;
    use crate::types::thread_slot;
    use crossbeam::utils::CachePadded;
    use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};
    use std::sync::{Arc, LazyLock, Mutex, PoisonError};

    /// A shared write on purpose.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    #[repr(u8)]
    pub enum Sharing {
        /// A counter of opens.
        CounterInOpen = 1,
        /// Each read clones one `Arc`.
        ArcCloned,
        /// Each overwrite adds 0 to a counter.
        AddOfZero,
        /// Each thread that lists has a word of its own, all of them on one line.
        NeighbourOnLine,
        /// Each overwrite stores the value that is there.
        SameValueStored,
        /// Each thread that appends has a heap block of its own, which one thread allocated one after the other.
        HeapNeighbour,
        /// Each change of attributes takes a lock that nobody else holds.
        LockTaken,
        /// Each open reads a flag, and one thread writes it.
        FlagWritten,
        /// The first overwrites after a commit write a counter.
        InCommit,
        /// Each read writes one of sixteen lines, by its thread: none is shared by fewer threads.
        ManyThreads,
    }

    impl Sharing {
        /// All, with a short name and what is shared.
        pub const ALL: &'static [(Sharing, &'static str, &'static str)] = &[
            (Sharing::CounterInOpen, "counter", "a counter in open"),
            (Sharing::ArcCloned, "arc", "a cloned Arc in read"),
            (Sharing::AddOfZero, "zero", "0 added to a counter in overwrite"),
            (Sharing::NeighbourOnLine, "neighbour", "threads' own words on one line in readdir"),
            (Sharing::SameValueStored, "same", "the same value stored in overwrite"),
            (Sharing::HeapNeighbour, "heap", "threads' own heap blocks side by side in append"),
            (Sharing::LockTaken, "lock", "a lock word in truncate"),
            (Sharing::FlagWritten, "flag", "a flag that opens read and one thread writes"),
            (Sharing::InCommit, "commit", "a counter in the first overwrites after a commit"),
            (Sharing::ManyThreads, "many", "sixteen lines for 32 threads in read"),
        ];
    }

    static PLANTED: AtomicU8 = AtomicU8::new(0);

    /// From now on the whole process has this one.
    pub fn plant(what: Sharing) {
        PLANTED.store(what as u8, Relaxed);
    }

    static WORD: CachePadded<AtomicU64> = CachePadded::new(AtomicU64::new(0));
    static ARC: LazyLock<Arc<()>> = LazyLock::new(Arc::default);
    static ON_ONE_LINE: CachePadded<[AtomicU64; 8]> = CachePadded::new([const { AtomicU64::new(0) }; 8]);
    static PADDED: [CachePadded<AtomicU64>; 16] = [const { CachePadded::new(AtomicU64::new(0)) }; 16];
    static BLOCKS: LazyLock<Vec<Box<AtomicU64>>> = LazyLock::new(|| (0..64).map(|_| Box::default()).collect());
    static LOCK: Mutex<()> = Mutex::new(());

    pub fn share(place: Place) {
        use Place::{Append, Commit, List, Open, Read, SetAttr, Write};
        let planted = PLANTED.load(Relaxed);
        let Some((what, ..)) = Sharing::ALL.iter().find(|s| s.0 as u8 == planted) else { return };
        match (what, place) {
            (Sharing::CounterInOpen, Open) => drop(WORD.fetch_add(1, Relaxed)),
            (Sharing::ArcCloned, Read) => drop(std::hint::black_box(Arc::clone(&ARC))),
            (Sharing::AddOfZero, Write) => drop(WORD.fetch_add(std::hint::black_box(0), Relaxed)),
            (Sharing::NeighbourOnLine, List) => drop(ON_ONE_LINE[thread_slot(8)].fetch_add(1, Relaxed)),
            (Sharing::SameValueStored, Write) => WORD.store(std::hint::black_box(0), Relaxed),
            (Sharing::HeapNeighbour, Append) => drop(BLOCKS[thread_slot(64)].fetch_add(1, Relaxed)),
            (Sharing::LockTaken, SetAttr) => drop(LOCK.lock().unwrap_or_else(PoisonError::into_inner)),
            (Sharing::FlagWritten, Open) if thread_slot(4) == 0 => WORD.store(1, Relaxed),
            (Sharing::FlagWritten, Open) => drop(std::hint::black_box(WORD.load(Relaxed))),
            (Sharing::InCommit, Commit) => WORD.store(64, Relaxed),
            (Sharing::InCommit, Write) if WORD.load(Relaxed) > 0 => drop(WORD.fetch_sub(1, Relaxed)),
            (Sharing::ManyThreads, Read) => drop(PADDED[thread_slot(16)].fetch_add(1, Relaxed)),
            _ => {}
        }
    }
}
