//! The ranks of all locks: the table of docs/locking.md as types.
//!
//! A thread takes locks only downwards: of a higher rank number than all that it holds. Among locks of one rank the order is
//! that of their [`Class::chain`] and [`Class::step`]; locks of one class follow its [`Many`]. `order/checked.rs` checks that in
//! debug builds and in all tests.

/// What is known of all locks of one rank type.
#[derive(Debug, PartialEq, Eq)]
pub struct Class {
    /// The name that a report shows.
    pub name: &'static str,
    /// Row of the table in docs/locking.md; of the front end below 0. Locks with a higher one may be taken below this.
    pub rank: i8,
    /// Locks of one rank are taken together only where they are of one chain.
    pub chain: &'static str,
    /// Place in the chain, rising.
    pub step: u8,
    /// Whether a thread may hold several of this class.
    pub many: Many,
}

/// How many locks of one class a thread may wait for while it holds one. Others it may only try.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Many {
    /// One at a time.
    One,
    /// Several, by rising keys.
    Rising,
    /// Several, in an order that the code states where it takes them (`write_above` for the order by keys).
    Several,
}

/// The rank of a lock, as a type.
pub trait Rank: 'static {
    /// What tells locks of this rank apart in their order and in reports; `()` where nothing does.
    type Key: Key;
    /// `None`: the lock takes no part in the order.
    const CLASS: Option<&'static Class>;
}

/// Value of a [`Rank::Key`].
pub trait Key: Copy + Send + Sync + std::fmt::Debug + 'static {
    /// As a number that rises with the order.
    fn number(self) -> u64;
}

impl Key for () {
    fn number(self) -> u64 {
        0
    }
}

impl Key for u64 {
    fn number(self) -> u64 {
        self
    }
}

/// For locks that are held by code that takes no other one: those of tests and of programs beside the engine.
#[derive(Debug)]
pub enum Unranked {}

impl Rank for Unranked {
    type Key = ();
    const CLASS: Option<&'static Class> = None;
}

/// `Name = rank, chain step, many, key: name in reports;`
macro_rules! ranks {
    ($($(#[$doc:meta])* $name:ident = $rank:literal, $chain:literal $step:literal, $many:ident, $key:ty: $text:literal;)*) => {
        $(
            $(#[$doc])*
            #[derive(Debug)]
            pub enum $name {}
            impl Rank for $name {
                type Key = $key;
                const CLASS: Option<&'static Class> = Some(&Class {
                    name: $text, rank: $rank, chain: $chain, step: $step, many: Many::$many,
                });
            }
        )*
        /// All ranks, in the order of the table.
        pub const ALL: &[&Class] = &[$(match $name::CLASS { Some(c) => c, None => unreachable!() }),*];
    };
}

ranks! {
    /// How serving ended: of the volume that was closed, or kept.
    Closing = -3, "serving" 0, One, (): "closing";
    /// The file system of a serving thread, for a request.
    ServingSlot = -3, "serving" 1, One, (): "slot of a serving thread";
    /// FORGETs that are being served.
    Forgets = -2, "forgets" 0, One, (): "forgets";
    /// Tenants that are mounted by themselves.
    Connections = -1, "connections" 0, One, (): "connections";
    /// The same, for who asks whether one has an inode to itself.
    InodeOwners = -1, "connections" 1, One, (): "owners of inodes";
    /// A shard of what the kernel was told over a tenant's connection.
    ToldShard = -1, "connections" 2, One, (): "shard of what a connection was told";
    /// A shard of files with direct writes.
    DirectShard = -1, "direct" 0, One, (): "shard of direct writes";
    /// Files whose flags changed.
    FlaggedFiles = -1, "flagged" 0, One, (): "flagged files";
    /// Inodes for the kernel to drop.
    FlaggedDrop = -1, "flagged" 1, One, (): "inodes to drop";
    /// What writers were granted, with a look at the room that there is.
    Grants = -1, "grants" 0, One, (): "grants";
    /// A shard of the kernel's writers by inode.
    WriterShard = -1, "grants" 1, One, (): "shard of writers";
    /// What writers were granted, by owners with limits.
    QuotaGrants = -1, "quota grants" 0, One, (): "grants by owner";
    /// Who looks what writers do.
    Looks = -1, "looks" 0, One, (): "looks at writers";
    /// The scrub that runs.
    Scrub = -1, "scrub" 0, One, (): "scrub";
    /// The change of devices that runs.
    DeviceJob = -1, "device job" 0, One, (): "change of devices";
    /// Bounds of what the kernel holds dirty of tenants that are mounted by themselves.
    DirtyTenants = -1, "dirty tenants" 0, One, (): "bounds of tenants";
    /// Threads that answer requests by themselves.
    Asides = -1, "asides" 0, One, (): "asides";
    /// Requests that wait for a tenant's turn.
    Paced = -1, "paced" 0, One, (): "parked requests";
    /// Answers that are held back while a domain becomes tight.
    HeldBack = -1, "held back" 0, One, (): "answers held back";

    /// Starting and stopping the background's thread.
    Background = 0, "background" 0, One, (): "background";
    /// Giving directories limits of their own and taking them away, with all that lies below.
    QuotaTrees = 0, "background" 1, One, (): "directories with limits";
    /// Making, changing and removing tenants. A remount to read-only waits for it with the background's lock held.
    Tenants = 0, "background" 2, One, (): "tenants";
    /// A rename that moves a directory to another parent, or goes over one there.
    Rename = 1, "rename" 0, One, (): "rename lock";
    /// An fsync of one file.
    FileSync = 2, "sync" 0, One, (): "Cell::sync";
    /// Giving memory back.
    Evicting = 3, "volume" 0, One, (): "evicting";
    /// Emptying groups for a claim.
    Emptying = 3, "volume" 1, One, (): "emptying";
    /// The group table, with claims of groups.
    GroupTable = 3, "volume" 2, One, (): "group table";
    /// Keeping a domain to its ceiling of memory.
    Ceiling = 3, "volume" 3, One, (): "ceiling of memory";
    /// A checkpoint of one domain. One thread may hold those of several domains, got by `try_lock`, as long as whoever holds one
    /// waits for no other.
    Checkpoint = 4, "checkpoint" 0, One, (): "checkpoint_lock";
    /// A commit of one domain.
    Commit = 5, "commit" 0, One, (): "commit_lock";
    /// The gate of a domain, by its number.
    Gate = 6, "gate" 0, Rising, u64: "gate";
    /// A cell's state; the key is the inode number. Parents before children, else by number.
    Cell = 7, "cell" 0, Several, u64: "Cell::state";
    /// A bucket of a directory whose cell is locked for reading; the key is its first position.
    Bucket = 7, "cell" 1, Rising, u64: "bucket of a directory";
    /// Buckets that the threads of one slot were the first to change, and the domains that they changed with entries.
    FirstChanges = 7, "cell" 2, One, (): "first changes of buckets";

    /// The latest move of a directory.
    LastMove = 8, "last_move" 0, One, (): "last_move";
    /// What the cleaner may take of the devices.
    CleanerShare = 8, "cleaner" 0, One, (): "share of the cleaner";
    /// Inodes without a name that wait for another domain.
    Zombies = 8, "zombies" 0, One, (): "zombies";
    /// Inodes without a name that are to be deleted once more.
    Unreaped = 8, "unreaped" 0, One, (): "unreaped";
    /// The threads that serve fsyncs.
    SyncPool = 8, "tickets" 0, One, (): "pool";
    /// Their join handles.
    SyncThreads = 8, "tickets" 1, One, (): "threads of the pool";
    /// One of the queues of fsyncs.
    SyncQueue = 8, "tickets" 2, One, (): "queue of syncing";
    /// State of a ticket.
    Ticket = 8, "tickets" 3, One, (): "state of a ticket";
    /// A shard of the inodes that the front end holds.
    HeldShard = 8, "tickets" 4, One, (): "shard of held";
    /// Parts that threads do side by side.
    SideBySide = 8, "side by side" 0, One, (): "parts done side by side";
    /// The label, with superblock I/O.
    Label = 8, "label" 0, One, (): "label";
    /// What superblocks say of the volume's size.
    SuperBlock = 8, "label" 1, One, (): "superblock";
    /// Whether the background is to stop, and whether it is asked to write dirty pages.
    StopFlag = 8, "stop" 0, One, (): "stop flag";

    /// The committing transaction.
    Committing = 8, "tx" 0, One, (): "committing";
    /// Transactions of peers to be durable before a checkpoint.
    PeerTxs = 8, "tx" 1, One, (): "peer_txs";
    /// A list of a transaction.
    TxList = 8, "tx" 2, One, (): "list of a transaction";
    /// What is shared out of a commit.
    Work = 8, "work" 0, One, (): "work";
    /// What helpers of a commit made.
    WorkResult = 8, "work" 1, One, (): "Work::result";
    /// Inodes unlinked and open.
    Orphans = 8, "orphans" 0, One, (): "orphans";
    /// Generations of new overflow nodes.
    NewGenerations = 8, "new_generations" 0, One, (): "new_generations";
    /// Numbers of freed directories that must not come back yet.
    QuarantinedNodes = 8, "quarantined" 0, One, (): "quarantine (domain)";
    /// Files that a commit left alone.
    LazyFiles = 8, "lazy" 0, One, (): "lazy";
    /// Putting names that threads left lately where all are looked for.
    VacatedRound = 8, "vacated" 0, One, (): "round of vacated names";
    /// Names that the threads of one slot left lately.
    VacatedLately = 8, "vacated" 1, One, (): "names vacated lately";
    /// Files that lie in pieces.
    InPieces = 8, "in pieces" 0, One, (): "files in pieces";
    /// Names left by renames.
    VacatedNames = 8, "vacated" 2, One, (): "vacated names";
    /// A domain's header, with its I/O.
    Header = 8, "journal" 0, One, (): "header";
    /// First chunks of transactions in the journal.
    FirstPos = 8, "journal" 1, One, (): "first_pos";
    /// The ends of the journal ring.
    JournalRing = 8, "journal" 2, One, (): "journal ring";

    /// Bytes of a dirty page, where several threads overwrite a file; the key is the block.
    PageBytes = 8, "page" 0, Rising, u64: "page";

    /// A shard of the table of cells.
    CellShard = 8, "cells" 0, One, (): "shard of cells";

    /// Inodes that are counted for quotas, while counting goes on.
    QuotaCounted = 8, "quota counted" 0, One, (): "inodes counted for quotas";
    /// The counts of owners that the threads of one slot know.
    QuotaKnown = 8, "account" 0, One, (): "counts of owners of a slot";
    /// The counts of all owners.
    QuotaOwners = 8, "account" 1, One, (): "counts of all owners";
    /// The limits of users, groups and directories.
    QuotaLimits = 8, "quota limits" 0, One, (): "limits of users and directories";
    /// A limit of an owner, while it changes.
    QuotaLimit = 8, "account" 2, One, (): "limit of an owner";
    /// Adding up what slots have of a domain's unused blocks, or of what is left of an owner's limit.
    Account = 8, "account" 3, One, (): "account of blocks";

    /// Writing segment tables home.
    SpaceHome = 8, "space" 0, One, (): "home (space)";
    /// One mlog: where it writes next.
    Mlog = 8, "space" 1, One, (): "mlog";
    /// The right to discard.
    Trimming = 8, "space" 2, One, (): "trimming";
    /// Segments in which something was freed.
    Freed = 8, "space" 3, One, (): "freed";
    /// The free segments of a domain.
    SegmentPool = 8, "space" 4, One, (): "pool (space)";
    /// The list of a domain's groups.
    SpaceGroups = 8, "space" 5, One, (): "list of groups (space)";
    /// State of a segment.
    Segment = 8, "space" 6, One, (): "segment";
    /// Half of a segment's owner table, with table I/O.
    Owners = 8, "space" 7, One, (): "owner table";
    /// Which copy of a group's segment table is current.
    SegmentTable = 8, "space" 8, One, (): "segment table";

    /// Writing node tables home.
    NodesHome = 8, "nodes" 0, One, (): "home (nodes)";
    /// Where a thread takes its next inode numbers.
    NodeCursor = 8, "nodes" 1, One, (): "cursor";
    /// The list of groups with node tables.
    NodeGroups = 8, "nodes" 2, One, (): "list of groups (nodes)";
    /// A block of a node table, with table I/O.
    TableBlock = 8, "nodes" 3, One, (): "table block";
    /// Numbers of freed inodes that must not come back yet.
    QuarantinedNumbers = 8, "nodes" 4, One, (): "quarantined (nodes)";
    /// A shard of the cache of node blocks.
    NodeCache = 8, "node cache" 0, One, (): "shard of the block cache";

    /// A list of free page frames: pages are given back wherever the last who has them drops them.
    FreeFrames = 9, "frames" 0, One, (): "list of free frames";
    /// The chunks that frames come from.
    FramePool = 9, "frames" 1, One, (): "pool of chunks";
    /// A device of a volume, for as long as something is read or written there.
    Member = 9, "member" 0, One, (): "device of a volume";

    /// Rules of a faulty device.
    FaultRules = 10, "fault" 0, One, (): "rules of faults";
    /// Operations of a faulty device that stall.
    FaultStalls = 10, "fault" 1, One, (): "stalled operations";
    /// Whether a flush of a faulty device failed.
    FaultFlush = 10, "fault flush" 0, One, (): "failed flush";
    /// Events of a recording device.
    RecordLog = 10, "record" 0, One, (): "recorded events";
    /// Images that a recording device keeps.
    RecordImages = 10, "record" 1, One, (): "kept images";
    /// Blocks and events of a tracing device.
    Trace = 10, "trace" 0, One, (): "traced blocks";

    /// The exclusive claim on a block device.
    DeviceClaim = 11, "file" 0, One, (): "claim on a device";
    /// The range lock of a device file.
    DeviceRange = 11, "file" 1, One, (): "range lock of a device";
    /// The flush of a device that threads share.
    Flush = 11, "flush" 0, One, (): "flush gate";
    /// Bytes of large batches that a device has under way.
    LargeBatches = 11, "large batches" 0, One, (): "large batches of a device";
    /// The fence before a remote device: for who waits for it to open.
    Fence = 11, "fence" 0, One, (): "fence";
    /// Which fence a network block device has.
    NbdFence = 11, "nbd fence" 0, One, (): "fence of a network block device";
    /// Connections and requests of a network block device.
    NbdState = 11, "nbd" 0, One, (): "state of a network block device";
    /// A connection while a request goes out.
    NbdSend = 11, "nbd" 1, One, (): "sending on a connection";
    /// What a caller of a network block device waits for.
    NbdBatch = 11, "nbd" 2, One, (): "batch of requests";
    /// Rings that no thread uses.
    Rings = 11, "rings" 0, One, (): "rings";
    /// A chunk of a device in memory.
    MemoryChunk = 11, "memory" 0, One, (): "chunk of memory";
    /// Blocks of a sparse device.
    SparseBlocks = 11, "sparse" 0, One, (): "blocks of a sparse device";

    /// How far a scrub has come.
    ScrubState = 11, "scrub state" 0, One, (): "state of a scrub";
    /// Lines of counters.
    CounterLines = 11, "counters" 0, One, (): "counters";
    /// Who was answered by other threads than the one of a line of counters.
    AnsweredProcesses = 11, "counters" 1, One, (): "processes answered later";
    /// How many slow operations were told.
    SlowLog = 11, "slow operations" 0, One, (): "log of slow operations";
    /// Which failures were told.
    FailureLog = 11, "failures" 0, One, (): "log of failures";
    /// Samples that are fetched in parts.
    Samples = 11, "samples" 0, One, (): "kept samples";
    /// What a tenant has asked of the device, and who waits for it.
    Budget = 11, "budget" 0, One, (): "meter of a tenant";
    /// What the helper threads of a mount have to do.
    Helpers = 11, "helpers" 0, One, (): "work for helpers";
    /// Answers for a ring: any thread may give one.
    Mailbox = 11, "mailbox" 0, One, (): "mailbox of a ring";
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two ranks at one place could be taken in any order.
    #[test]
    fn each_rank_has_a_place_of_its_own() {
        let mut places: Vec<_> = ALL.iter().map(|c| (c.rank, c.chain, c.step)).collect();
        assert!(places.is_sorted_by_key(|p| p.0), "in the order of the table");
        places.sort_unstable();
        let n = places.len();
        places.dedup();
        assert_eq!(places.len(), n);
        let mut names: Vec<_> = ALL.iter().map(|c| c.name).collect();
        names.sort_unstable();
        assert!(names.windows(2).all(|w| w[0] != w[1]), "two of a name: {names:?}");
        let mut chains: Vec<_> = ALL.iter().map(|c| (c.chain, c.rank)).collect();
        chains.sort_unstable();
        chains.dedup();
        assert!(chains.windows(2).all(|w| w[0].0 != w[1].0), "a chain of two ranks: {chains:?}");
    }
}
