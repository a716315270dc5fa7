//! Bugs planted on purpose, to show that the crash tests see them.
//!
//! A bug is a failpoint in a step of the engine: the step is left out (`step`), done before its time (`too_early`,
//! `in_order`), or one of its conditions forgotten (`planted`). What stands at the failpoint is the step as it has to be.
//!
//! Without the feature `planted-bugs` there is no switch, every question after a bug is a constant "no", and the steps are
//! plain calls. The command line does not compile with the feature.

pub mod sharing;

/// A deliberate bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Bug {
    /// The commit record is written before the chunks that it names.
    CommitBeforeChunks = 1,
    /// No flush between data and chunks and the commit record.
    NoFlushBeforeCommit,
    /// No flush after the commit record.
    NoFlushAfterCommit,
    /// A fast fsync does not flush.
    NoFlushAfterSync,
    /// Blocks are taken again before what freed them is durable.
    FreedReused,
    /// Recovery does not make lost entries of other domains again.
    RelinkSkipped,
    /// Of two synced versions of a file recovery takes the older.
    VersionInverted,
    /// A replaced file is gone whether or not the newcomer survived.
    TombstoneUnconditional,
    /// The journal's tail moves before the home tables are written.
    TailEarly,
    /// A torn journal chunk is taken for whole.
    TornAccepted,
    /// The data of a synced file is not compared with its checksums.
    DataUnchecked,
    /// Moves of directories in different domains are not ordered.
    MovesUnordered,
    /// fsync forgets that a directory above is new.
    AncestorForgotten,
    /// Unlinked open files are not listed in the journal.
    OrphansLost,
    /// Allocations are not replayed.
    BitmapNotReplayed,
    /// What moved is synced without the whiteout that it left.
    WhiteoutAlone,
    /// Recovery does not complete an exchange of which one side survived.
    ExchangeHalf,
    /// Recovery forgets what it carried out before that is durable everywhere.
    JudgedEarly,
    /// A checkpoint does not wait for the domains that it shares operations with.
    PeersForgotten,
    /// An unmount marks a domain as clean before its last commit and checkpoint.
    CleanEarly,
    /// A synced directory's children in other domains are not committed.
    ChildrenForgotten,
    /// A synced directory forgets the domains of inodes that left it or were replaced in it.
    LeaverForgotten,
    /// A sync does not wait for a commit that another thread is doing.
    CommitUnderWayForgotten,
    /// A fast fsync does not flush what was written before its transaction's commit.
    EarlyDataForgotten,
    /// A domain goes on to use a group that it gave away.
    OwnedTwice,
    /// A group is given away before it is durable that what it held was freed.
    GivenEarly,
    /// Blocks are discarded before what freed them is durable.
    DiscardEarly,
    /// An fsync writes in place although where the blocks lie is not durable.
    PlaceForgotten,
    /// A move by the cleaner does not count as a change of where blocks lie. Not in [`Bug::ALL`], as the next: only threads
    /// that overwrite one file show them (the test kit's `planted_shared`).
    MoveForgotten,
    /// Blocks are overwritten of which older content is on its way to the device.
    InFlightForgotten,
    /// A truncate does not count as a change: an fsync of overwritten blocks leaves it out.
    TruncateForgotten,
    /// An fsync of overwritten blocks leaves changed times out.
    TimesForgotten,
    /// Blocks are written in place whose checksums a roll-forward record holds.
    SumsForgotten,
    /// Who takes a name does not have it later than who left it. Not in [`Bug::ALL`]: only a clock that was set back shows it
    /// (the test kit's `planted_clock`).
    ClockNotRaised,
    /// The flip does not wait for operations of one slot.
    SlotMissed,
    /// A transaction frees blocks before it allocates them.
    FreeBeforeAlloc,
    /// A bucket of a directory that several threads change is not written by the commit.
    BucketLeftOut,
    /// An inode whose name is taken away beside other changes of the directory is not written by the commit.
    InodeLeftOut,
    /// Who left a name of a directory that several threads change is forgotten.
    VacatedUntold,
    /// Of a group recovery replays newer transactions before older ones.
    ReplayUnordered,
    /// A checkpoint of all domains tells of home tables before they are durable.
    HomesUnflushed,
    /// A part of the journal that cannot be read counts as blank. Not in [`Bug::ALL`]: only a device that fails shows it
    /// (the test kit's `recovery_threads`).
    UnreadableBlank,
    /// A commit does not wait for a thread that joined it.
    HelperForgotten,
    /// What a commit has written may leave memory before the node table says where it lies.
    CellsLetGo,
    /// Who flushes a device takes a flush for its own that others began before it came.
    FlushUnderWayTaken,
    /// Blocks that make a file whole are free where they lay before the commit that says where they are now.
    MovedFreedEarly,
    /// What makes a file whole is copied from the device, without what was written since.
    MovedCopyStale,
    /// Superblocks tell of a larger volume before its group table is durable. Not in [`Bug::ALL`]: the test kit's
    /// `planted_resize` shows it.
    SizeEarly,
    /// The superblock that counts tells of one more device before that has its own. Not in [`Bug::ALL`], as the last one.
    DeviceEarly,
    /// A device that leaves is wiped before the superblock that counts is without it. Not in [`Bug::ALL`], as the last one.
    LeftEarly,
    /// A domain without a journal is in use before its header says so. Not in [`Bug::ALL`], as the three that follow: the test
    /// kit's `planted_scratch` shows them.
    ScratchUntold,
    /// It is in use before what its header says of that is durable.
    ScratchToldLate,
    /// The header of a domain that is emptied after a crash says that it is whole before its tables are empty.
    ScratchEmptiedLate,
    /// A name crosses the border of a domain without a journal.
    ScratchBorderOpen,
    /// What moves out of a block group is not durable when the commit record says where it is. Not in [`Bug::ALL`], as the
    /// next: the test kit's `planted_moves` shows them.
    CopyUnflushed,
    /// A block group that was emptied is nobody's before the checkpoint after which no journal tells of it.
    EmptiedGivenEarly,
    /// A domain that is added is counted before its header is durable. Not in [`Bug::ALL`]: the test kit's `planted_resize`
    /// shows it.
    DomainEarly,
    /// Of a domain's devices, a commit flushes the journal's alone before its record. This and the next three are seen on volumes
    /// of several devices.
    CommitOneDevice,
    /// A fast fsync flushes the journal's device alone.
    SyncOneDevice,
    /// A checkpoint flushes the journal's device alone before the header tells of home tables.
    HomesOneDevice,
    /// A claim flushes the device of the group table alone before that tells of the group.
    ClaimOneDevice,
    /// An fdatasync takes names that changed for times that changed, and leaves them out.
    NamesForgotten,
    /// A file lives by overwrites for ever, also after an fsync that wrote elsewhere.
    LivesOn,
}

impl Bug {
    /// All that the crash explorer finds, with a short name and what is wrong.
    pub const ALL: &'static [(Bug, &'static str, &'static str)] = &[
        (Bug::CommitBeforeChunks, "commit-first", "commit record before the data"),
        (Bug::NoFlushBeforeCommit, "no-flush-before", "missing flush before the commit record"),
        (Bug::NoFlushAfterCommit, "no-flush-after", "missing flush after the commit record"),
        (Bug::NoFlushAfterSync, "no-flush-sync", "missing flush in the fast path of fsync"),
        (Bug::FreedReused, "reuse", "freed block reused too early"),
        (Bug::RelinkSkipped, "no-relink", "relink skipped"),
        (Bug::VersionInverted, "version", "version compare inverted"),
        (Bug::TombstoneUnconditional, "tombstone", "tombstone unconditional"),
        (Bug::TailEarly, "tail", "checkpoint tail moved early"),
        (Bug::TornAccepted, "torn", "torn record accepted"),
        (Bug::DataUnchecked, "data-unchecked", "data of a torn fsync accepted"),
        (Bug::MovesUnordered, "moves", "directory moves unordered"),
        (Bug::AncestorForgotten, "ancestor", "fsync fast path forgets the ancestor"),
        (Bug::OrphansLost, "orphans", "orphan list lost"),
        (Bug::BitmapNotReplayed, "bitmap", "bitmap not replayed"),
        (Bug::ExchangeHalf, "exchange", "half an exchange not completed"),
        (Bug::WhiteoutAlone, "whiteout", "fsync of what moved forgets the whiteout that it left"),
        (Bug::JudgedEarly, "settled", "recovery forgets tombstones before they are carried out everywhere"),
        (Bug::PeersForgotten, "peers", "checkpoint without the other domains' commits"),
        (Bug::CleanEarly, "clean", "marked clean before the last commit and checkpoint"),
        (Bug::ChildrenForgotten, "children", "fsync of a directory forgets children in other domains"),
        (Bug::LeaverForgotten, "leaver", "fsync of a directory forgets the domain of what left it"),
        (Bug::CommitUnderWayForgotten, "under-way", "sync does not wait for a commit that another thread is doing"),
        (Bug::EarlyDataForgotten, "early-data", "fsync forgets data that left the full cache before it"),
        (Bug::OwnedTwice, "owned-twice", "a group owned twice"),
        (Bug::GivenEarly, "given-early", "a group given away before its frees are durable"),
        (Bug::DiscardEarly, "discard", "blocks discarded before what freed them is durable"),
        (Bug::PlaceForgotten, "place", "fsync overwrites blocks whose place is not durable"),
        (Bug::TruncateForgotten, "truncate", "fsync in place forgets a truncate"),
        (Bug::TimesForgotten, "times", "fsync in place forgets times"),
        (Bug::SumsForgotten, "sums", "blocks overwritten whose checksums a roll-forward record holds"),
        (Bug::SlotMissed, "slot", "the flip does not wait for a thread that is inside the gate"),
        (Bug::FreeBeforeAlloc, "free-first", "frees of a transaction come before its allocations"),
        (Bug::BucketLeftOut, "bucket", "a bucket of a directory that several change is left out of the commit"),
        (Bug::InodeLeftOut, "inode", "an inode that lost a name in such a directory is left out of the commit"),
        (Bug::VacatedUntold, "vacated", "who left a name of such a directory is forgotten"),
        (Bug::ReplayUnordered, "replay-order", "recovery replays newer transactions of a group first"),
        (Bug::HomesUnflushed, "homes", "checkpoint of all domains told of before its tables are durable"),
        (Bug::HelperForgotten, "joined", "a commit does not wait for a thread that joined it"),
        (Bug::CellsLetGo, "let-go", "what a commit has written leaves memory before it is durable"),
        (Bug::MovedFreedEarly, "moved-early", "blocks of a file made whole freed before the commit that moves them"),
        (
            Bug::MovedCopyStale,
            "moved-stale",
            "a file made whole from what the device has, without what was written since",
        ),
        (Bug::FlushUnderWayTaken, "flush-under-way", "a flush that began before the write is taken for its own"),
        (Bug::CommitOneDevice, "commit-device", "commit record before the data on another device"),
        (Bug::SyncOneDevice, "sync-device", "fsync flushes the journal's device alone"),
        (Bug::HomesOneDevice, "homes-device", "checkpoint told of before tables on another device are durable"),
        (Bug::ClaimOneDevice, "claim-device", "a group claimed before its metadata on another device is durable"),
        (Bug::NamesForgotten, "names", "fdatasync forgets that names changed"),
        (Bug::LivesOn, "lives-on", "commits overwrite a file although its last fsync wrote elsewhere"),
    ];
}

#[cfg(feature = "planted-bugs")]
static PLANTED: std::sync::atomic::AtomicU8 = std::sync::atomic::AtomicU8::new(0);

/// From now on the whole process has this bug, or none.
#[cfg(feature = "planted-bugs")]
pub fn plant(bug: Option<Bug>) {
    PLANTED.store(bug.map_or(0, |b| b as u8), std::sync::atomic::Ordering::SeqCst);
    // the device knows of no other
    braidfs_device::planted::take_flush_under_way(bug == Some(Bug::FlushUnderWayTaken));
}

/// Whether the build can have bugs planted.
pub const POSSIBLE: bool = cfg!(feature = "planted-bugs");

/// A step, which the bug leaves out.
#[inline(always)]
pub(crate) fn step<E>(bug: Bug, act: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
    if planted(bug) { Ok(()) } else { act() }
}

/// What the bug does before its time. It is done only then: the step itself follows later.
#[inline(always)]
pub(crate) fn too_early<E>(bug: Bug, act: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
    if planted(bug) { act() } else { Ok(()) }
}

/// Two steps in this order, which the bug turns round.
#[inline(always)]
pub(crate) fn in_order<E>(
    bug: Bug,
    first: impl FnOnce() -> Result<(), E>,
    then: impl FnOnce() -> Result<(), E>,
) -> Result<(), E> {
    if planted(bug) {
        then()?;
        return first();
    }
    first()?;
    then()
}

/// Whether this bug is planted.
#[inline(always)]
pub(crate) fn planted(bug: Bug) -> bool {
    #[cfg(feature = "planted-bugs")]
    return PLANTED.load(std::sync::atomic::Ordering::Relaxed) == bug as u8;
    #[cfg(not(feature = "planted-bugs"))]
    {
        let _ = bug;
        false
    }
}
