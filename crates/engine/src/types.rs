//! Types of the library API.

use crate::numa::Numa;
use braidfs_format::dentry::Dentry;
pub use braidfs_format::domain::JournalMode;
pub use braidfs_format::file_kind::FileKind;
use braidfs_format::inode::Tombstone;
pub use braidfs_format::inode::{Placement, Timestamp};
pub use braidfs_format::{BlockAddr, DomainId, InodeNo, NodeId, TxId};
use std::sync::Arc;

/// An inode for good: its number goes to others later, with other generations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct InodeRef {
    /// Number of the inode: group × nodes per group + slot.
    pub ino: InodeNo,
    /// Generation of the number.
    pub generation: u32,
}

/// An inode as it was with one of its changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InodeVersion {
    /// The inode that has that version.
    pub inode: InodeRef,
    /// The version that has the change.
    pub version: u64,
}

impl From<&Dentry> for InodeRef {
    fn from(e: &Dentry) -> Self {
        Self { ino: e.node, generation: e.generation }
    }
}

impl From<&Tombstone> for InodeVersion {
    /// The newcomer, with the name that it took.
    fn from(t: &Tombstone) -> Self {
        Self { inode: InodeRef { ino: t.newcomer, generation: t.generation }, version: t.version }
    }
}

/// For whom blocks and inodes are counted and limited (docs/quotas.md).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum QuotaOwner {
    /// A user, by number.
    User(u32),
    /// A group, by number.
    Group(u32),
    /// The project of a directory tree, by number.
    Project(u32),
}

impl QuotaOwner {
    /// What is said to who may have no more.
    pub(crate) fn refusal(self) -> &'static str {
        match self {
            Self::User(_) => "the user's limit is reached",
            Self::Group(_) => "the group's limit is reached",
            Self::Project(_) => "the directory's limit is reached",
        }
    }
}

/// The user for whom an operation is done: permissions are checked against it, and new inodes belong to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cred {
    /// Effective user number (the one of the file system, where Linux tells them apart).
    pub uid: u32,
    /// Effective group number.
    pub gid: u32,
    /// Supplementary groups, in any order.
    pub groups: Arc<[u32]>,
    /// May do what root may (CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_CHOWN, CAP_FSETID …).
    pub privileged: bool,
}

impl Cred {
    /// Root with all capabilities, no supplementary groups.
    pub fn root() -> Self {
        Self { uid: 0, gid: 0, groups: Arc::new([]), privileged: true }
    }
    /// An ordinary user (root where `uid` is 0).
    pub fn user(uid: u32, gid: u32) -> Self {
        Self { uid, gid, groups: Arc::new([]), privileged: uid == 0 }
    }
    /// Whether the group is one of theirs.
    pub fn in_group(&self, gid: u32) -> bool {
        self.gid == gid || self.groups.contains(&gid)
    }
}

/// What `stat` tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Attr {
    /// Inode number (`st_ino`).
    pub ino: InodeNo,
    /// Generation of the number (NFS export).
    pub generation: u32,
    /// Type and permissions.
    pub mode: u32,
    /// Number of names; of a directory 2 and one for each directory in it.
    pub nlink: u32,
    /// Number of the owning user.
    pub uid: u32,
    /// Number of the owning group.
    pub gid: u32,
    /// Device number of a device file.
    pub rdev: u64,
    /// Size in bytes; of a symbolic link the length of its target.
    pub size: u64,
    /// 512-byte units allocated; of a regular file in its inode record the units that its content fills, as ext4 tells it: a
    /// program may take a file without any for one that has no data.
    pub sectors: u64,
    /// When the content was last read, as far as [`AtimeMode`] lets it be noted.
    pub atime: Timestamp,
    /// Last change of content.
    pub mtime: Timestamp,
    /// Last change of the inode.
    pub ctime: Timestamp,
    /// When the inode was made; never changes.
    pub btime: Timestamp,
    /// `braidfs_format::inode` flags (NOCOW, IMMUTABLE, APPEND, NOATIME).
    pub flags: u32,
    /// Project that it counts for, 0: none.
    pub project: u32,
}

impl Attr {
    /// The file's type.
    pub fn kind(&self) -> FileKind {
        FileKind::from_mode(self.mode).unwrap_or(FileKind::File)
    }
}

/// A time to set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SetTime {
    /// The volume's clock.
    Now,
    /// The time that is given.
    At(Timestamp),
}

/// Attributes to change; `None` leaves one. A literal ends in `..SetAttr::default()`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SetAttr {
    /// Permissions (12 bits).
    pub mode: Option<u32>,
    /// New owner; only a privileged user may give a file away.
    pub uid: Option<u32>,
    /// New group; who is not privileged must be in it.
    pub gid: Option<u32>,
    /// Truncate or extend.
    pub size: Option<u64>,
    /// New access time.
    pub atime: Option<SetTime>,
    /// New time of the last change of content.
    pub mtime: Option<SetTime>,
    /// Change time (a front end whose kernel keeps it: FUSE writeback).
    pub ctime: Option<SetTime>,
    /// New flags, all of them: NOCOW, IMMUTABLE, APPEND, NOATIME of `braidfs_format::inode`.
    pub flags: Option<u32>,
    /// Clear setuid and setgid as a write or truncate by an ordinary user does.
    pub kill_suid: bool,
    /// Clear setgid, of a directory, too, and where the group may not execute: who changes it is not of the group.
    pub kill_sgid: bool,
    /// Of times alone: a front end has accepted them before, or its user only sets them to now. Inode flags do not refuse
    /// them.
    pub accepted: bool,
    /// Not for you to name: a literal ends in `..Default::default()`, so that an option that comes breaks nobody.
    #[doc(hidden)]
    pub later: (),
}

/// What to make.
#[derive(Debug, Clone)]
pub struct NewNode<'a> {
    /// What is made: a file, directory, symbolic link, device, pipe or socket.
    pub kind: FileKind,
    /// Permissions asked for (12 bits), before umask and ACLs.
    pub mode: u32,
    /// Permission bits to leave out; not applied where the directory has a default ACL.
    pub umask: u32,
    /// For device files.
    pub rdev: u64,
    /// For symbolic links: 1 to 4095 bytes, none of them zero.
    pub target: &'a [u8],
}

/// What a rename does where the new name exists, and what it leaves under the old one: flags of renameat2(2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum RenameMode {
    /// Replace what the new name names.
    #[default]
    Replace,
    /// Fail where the new name exists.
    NoReplace,
    /// Swap the two.
    Exchange,
    /// Replace, and leave a *whiteout* under the old name, a character device 0:0 without permissions: so an overlayfs hides what
    /// a lower layer has there. It belongs to who renames.
    Whiteout,
    /// The same, and fail where the new name exists.
    NoReplaceWhiteout,
}

impl RenameMode {
    /// Whether it fails where the new name exists.
    pub fn keeps_what_is_there(self) -> bool {
        matches!(self, Self::NoReplace | Self::NoReplaceWhiteout)
    }

    /// Whether it leaves a whiteout under the old name.
    pub fn leaves_whiteout(self) -> bool {
        matches!(self, Self::Whiteout | Self::NoReplaceWhiteout)
    }
}

/// What fallocate(2) is to do with a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum FallocMode {
    /// Reserve blocks; `keep_size` does not extend the file.
    Allocate {
        /// The size stays where the range ends behind it (FALLOC_FL_KEEP_SIZE).
        keep_size: bool,
    },
    /// Make a hole (keeps the size).
    PunchHole,
    /// Make it read as zeros.
    ZeroRange {
        /// The size stays where the range ends behind it (FALLOC_FL_KEEP_SIZE).
        keep_size: bool,
    },
    /// Take the range out: what lies behind it moves to its beginning.
    CollapseRange,
    /// Make room: what lies at the offset and behind it moves up, and a hole is left.
    InsertRange,
}

/// Whether an extended attribute must be new, or must be there: flags of setxattr(2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum XattrMode {
    /// Make it, or change it where it is there.
    #[default]
    Set,
    /// Make it; an error where it is there (XATTR_CREATE).
    Create,
    /// Change it; an error where it is not there (XATTR_REPLACE).
    Replace,
}

/// One entry that `readdir` gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DirEntry<'a> {
    /// Number of the inode that the entry names.
    pub ino: InodeNo,
    /// Generation of that number.
    pub generation: u32,
    /// Type of the inode, as `d_type`.
    pub kind: FileKind,
    /// Name in the directory, 1 to 255 bytes without `/` and NUL.
    pub name: &'a [u8],
    /// Cookie to go on after this entry.
    pub next: u64,
}

/// What `statfs` tells, in 4 KiB blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
#[non_exhaustive]
pub struct StatFs {
    /// All data blocks.
    pub blocks: u64,
    /// Blocks that nothing uses, in all domains together.
    pub free: u64,
    /// Free for ordinary users.
    pub available: u64,
    /// Inodes that there is room for.
    pub inodes: u64,
    /// Inodes that can still be made.
    pub inodes_free: u64,
}

/// Inodes that are held from outside without being open, see [`crate::Volume::hold`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct HeldStats {
    /// Inodes that somebody holds.
    pub inodes: usize,
    /// Those of them that have no name any more.
    pub orphans: usize,
    /// How often more was given back than had been counted.
    pub excess: usize,
    /// Memory of the table, bytes.
    pub bytes: usize,
}

/// An inode that is held, as one mount tells the next: [`crate::Volume::unmount_holding`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeldInode {
    /// The inode, by number and generation.
    pub inode: InodeRef,
    /// How often [`crate::Volume::forget`] must be told of it.
    pub times: u32,
}

/// How file data and metadata are ordered (`data=` as in ext4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DataMode {
    /// Data is durable before the metadata that names it.
    #[default]
    Ordered,
    /// No file is overwritten in place: all of them change atomically with their metadata.
    Journal,
    /// A commit leaves dirty data to the one after it: after a crash a file may have its new size and its old data (zeros
    /// where there was none), never foreign data. Syncs and the unmount write it.
    Writeback,
}

/// Where overwrites go that are synced (`overwrite=`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Overwrite {
    /// An fsync of a file whose dirty blocks are all on the device already writes these where they lie, where that costs
    /// less and once it is durable that they lie there (F2FS' in-place policies `F2FS_IPU_FSYNC` and `F2FS_IPU_UTIL`); from
    /// then on commits of the file do, too. Not with data checksums or [`DataMode::Journal`].
    #[default]
    Auto,
    /// Always elsewhere: an ordinary file's content changes with its transaction, or with its fsync, whole.
    Log,
}

/// So many dirty blocks of a file an fsync writes in place whatever else it costs ([`Overwrite::Auto`]; F2FS'
/// `min_fsync_blocks`).
pub const OVERWRITE_BLOCKS: usize = 8;

/// When a read changes the access time (`relatime`, `noatime`, `strictatime` of mount(8)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AtimeMode {
    /// Once a day, or where it is not newer than the last change.
    #[default]
    Relatime,
    /// Reads leave it.
    Noatime,
    /// Each read changes it.
    Strictatime,
}

/// Options of a mount. A literal ends in `..MountOptions::default()`: there will be more.
#[derive(Debug, Clone)]
pub struct MountOptions {
    /// Change nothing (a dirty journal is replayed in memory only).
    pub read_only: bool,
    /// What is durable before what of data and metadata.
    pub data: DataMode,
    /// Where an overwrite of blocks goes.
    pub overwrite: Overwrite,
    /// A running transaction is committed after this long.
    pub commit_interval: std::time::Duration,
    /// When a read changes the access time.
    pub atime: AtimeMode,
    /// No access times of directories.
    pub nodiratime: bool,
    /// Accepted, and shown by [`crate::Volume::options_now`]; changes nothing: times are written with the
    /// next commit, as without it.
    pub lazytime: bool,
    /// Memory for pages and cells, bytes; 0: a quarter of the machine's.
    pub cache_bytes: u64,
    /// Bytes that an open file reads at once at most where it reads in a row; 0: what was asked for. Not above 1 MiB, nor the
    /// 32nd part of what its domain may hold of the cache, and nothing with `cached_above`, where the kernel reads ahead.
    pub readahead: u64,
    /// Who writes keeps what was written in a cache of its own, as the kernel does above a mount: pages are given up once
    /// the device has them, a commit comes before much memory is dirty, so that a long write goes through few pages, and
    /// what is read of the device goes to who asks and is not kept.
    pub cached_above: bool,
    /// As of the last checkpoint: no journal is replayed. To look at a volume that somebody else has mounted (read-only,
    /// see [`crate::Volume::look_at`]).
    pub checkpoint_only: bool,
    /// Whole segments (2 MiB) that become free are discarded in the background, once that is durable.
    pub discard: bool,
    /// Files in many short pieces are made whole in the background while nothing else goes on.
    pub defragment: bool,
    /// Run the threads that commit every interval, checkpoint, clean, free memory and mend links after a crash. While the volume is
    /// read-only, the one that frees memory.
    pub background: bool,
    /// Domains are opened and commit one after the other, so that a seed replays a run; for tests.
    pub serial: bool,
    /// Threads of a mount and of an unmount, the caller's included; 0: two for each CPU (of which one works while the other
    /// waits for the device), with `serial` one, and one where the volume is small. For tests and experiments.
    #[doc(hidden)]
    pub recovery_threads: usize,
    /// With `serial`: they commit from the last to the first.
    pub falling: bool,
    /// Directories that do not lie in their inode record count as changed by several threads, from the first change of a
    /// transaction on, also where one thread changes them ([`crate::Volume::changed_beside`]); for tests.
    pub share_dirs: bool,
    /// Placement of memory and threads by NUMA node.
    pub numa: Numa,
    /// Where time comes from; tests set their own.
    pub clock: Option<fn() -> Timestamp>,
    /// Where that comes from by which tenants' rates are measured: since any moment, never back.
    pub rate_clock: Option<fn() -> std::time::Duration>,
    /// Of tests: how long the thread that asks has run, in place of the processor time that the system counts for it.
    pub processor_clock: Option<fn() -> std::time::Duration>,
    /// Who calls has asked before whether a tenant may ([`crate::Volume::come`]), and let its thread do something else
    /// meanwhile: no call waits for that by itself.
    pub paced_above: bool,
    /// As [`crate::Volume::kill_when_stopped`], and already while the volume is recovered. For programs that own their process.
    pub kill_when_stopped: bool,
}

impl Default for MountOptions {
    fn default() -> Self {
        Self {
            read_only: false,
            data: DataMode::Ordered,
            overwrite: Overwrite::Auto,
            commit_interval: std::time::Duration::from_secs(5),
            atime: AtimeMode::Relatime,
            nodiratime: false,
            lazytime: false,
            cache_bytes: 0,
            readahead: 1 << 20,
            cached_above: false,
            checkpoint_only: false,
            discard: false,
            defragment: true,
            background: true,
            serial: false,
            recovery_threads: 0,
            falling: false,
            share_dirs: false,
            numa: Numa::Auto,
            clock: None,
            rate_clock: None,
            processor_clock: None,
            paced_above: false,
            kill_when_stopped: false,
        }
    }
}

/// What a remount changes; `None`: it stays. A literal ends in `..Remount::default()`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Remount {
    /// Read-only, or writable (again).
    pub read_only: Option<bool>,
    /// [`MountOptions::data`]. It cannot change: another mode than that of the mount is refused.
    pub data: Option<DataMode>,
    /// A new [`MountOptions::commit_interval`].
    pub commit_interval: Option<std::time::Duration>,
    /// A new [`MountOptions::atime`].
    pub atime: Option<AtimeMode>,
    /// A new [`MountOptions::nodiratime`].
    pub nodiratime: Option<bool>,
    /// A new [`MountOptions::lazytime`].
    pub lazytime: Option<bool>,
    /// Not for you to name: a literal ends in `..Default::default()`, so that an option that comes breaks nobody.
    #[doc(hidden)]
    pub later: (),
}

/// Options of `mkfs`. A literal ends in `..MkfsOptions::default()`: there will be more.
#[derive(Debug, Clone)]
pub struct MkfsOptions {
    /// Domains; `None`: by CPUs and size.
    pub domains: Option<u16>,
    /// Bytes of a group, a power of two from 4 MiB to 64 MiB; `None`: by size.
    pub group_bytes: Option<u64>,
    /// At most 63 bytes.
    pub label: String,
    /// `None`: a new one.
    pub uuid: Option<[u8; 16]>,
    /// Largest inline file, bytes (0 to 3400).
    pub inline_max: u16,
    /// CRC-32C per data block. A file with such ends at 115 GiB, or earlier (docs/mounted.md).
    pub data_checksums: bool,
    /// Journal bytes per domain; `None`: by size.
    pub journal_bytes: Option<u64>,
    /// mlogs per domain; `None`: one per CPU, at most 8.
    pub mlogs: Option<u16>,
    /// Where new objects go in directories that say nothing else.
    pub placement: Placement,
    /// Owner of the root directory.
    pub root_owner: (u32, u32),
    /// Discard the devices first, those that can.
    pub discard: bool,
    /// Not for you to name: a literal ends in `..Default::default()`, so that an option that comes breaks nobody.
    #[doc(hidden)]
    pub later: (),
}

impl Default for MkfsOptions {
    fn default() -> Self {
        Self {
            domains: None,
            group_bytes: None,
            label: String::new(),
            uuid: None,
            inline_max: braidfs_format::inode::INLINE_MAX as u16,
            data_checksums: false,
            journal_bytes: None,
            mlogs: None,
            placement: Placement::Dirs,
            root_owner: (0, 0),
            discard: false,
            later: (),
        }
    }
}

/// What became of entries and links that a crash left behind ([`crate::Volume::collect_stale`]).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Collected {
    /// Entries that were dropped, or made again.
    pub mended: u64,
    /// Inodes that could not be compared with the entries that name them. The next mount looks again.
    pub passed_over: u64,
    /// Domains that have failed: nobody looked at theirs.
    pub failed_domains: usize,
}

/// What the cache of a mounted volume holds, in bytes, and how many reads it answered since the mount.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheUse {
    /// What it may hold.
    pub budget: u64,
    /// Data of files and directories.
    pub data: u64,
    /// Of these, what is not written yet.
    pub dirty: u64,
    /// Names of directories, and indexes of extents and pages.
    pub index: u64,
    /// Pages that readers have pinned ([`Volume::read_pinned`](crate::Volume::read_pinned)), beside `data`; a page that is pinned twice
    /// counts twice.
    pub pinned: u64,
    /// Reads that it answered alone; about, where more threads read than there are slots for.
    pub hits: u64,
    /// Reads that waited for the device.
    pub misses: u64,
}

/// What a tenant may hold of the volume's cache, bytes: pages, inodes, names and indexes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemoryBudget {
    /// Others take nothing of it as long as it holds no more. All tenants together have three quarters so at most of what
    /// the cache shrinks to when it gives back, less what tables take: beyond that each has its part of them.
    pub least: u64,
    /// It holds no more; `None`: as much as there is.
    pub most: Option<u64>,
}

/// State of a domain, for `info` and tests.
#[derive(Debug, Clone, serde::Serialize)]
#[non_exhaustive]
pub struct DomainInfo {
    /// Number of the domain, from 0.
    pub domain: u16,
    /// Block groups that it owns.
    pub groups: u32,
    /// Data blocks of its groups.
    pub blocks: u64,
    /// Data blocks that nothing uses.
    pub free: u64,
    /// Segments without a used block.
    pub segments_free: u64,
    /// Slots of the node tables of its groups.
    pub inodes: u64,
    /// Slots that hold no inode and no overflow node.
    pub inodes_free: u64,
    /// Journal size in blocks.
    pub journal_blocks: u64,
    /// Journal blocks in use.
    pub journal_used: u64,
    /// Number of the running transaction.
    pub running_tx: u64,
    /// Newest durable transaction.
    pub committed_tx: u64,
    /// Commits since mount.
    pub commits: u64,
    /// Threads that helped commits which others led, since mount.
    pub joiners: u64,
    /// Checkpoints since mount.
    pub checkpoints: u64,
    /// fsync fast path batches since mount.
    pub fast_syncs: u64,
    /// Blocks moved by the cleaner since mount.
    pub cleaned_blocks: u64,
    /// Blocks moved since mount so that their files lie in fewer pieces.
    pub defragmented_blocks: u64,
    /// Blocks that lay in groups since mount which it emptied for other domains that lacked room.
    pub relocated_blocks: u64,
    /// Name of the tenant that it belongs to.
    pub tenant: Option<String>,
    /// How it uses its journal: `ordered`, `data`, or `scratch` for not at all; `None`: as the mount says.
    pub journal_mode: Option<&'static str>,
    /// Number of the NUMA node that its pages and the threads that work for it are placed on, where there are several.
    pub numa_node: Option<u32>,
    /// Why it is read-only, if it is.
    pub failed: Option<String>,
}

/// Where `n` belongs in a table of `places`, a power of two above 1: numbers that follow each other, or lie a power of two
/// apart, go to different places (Fibonacci hashing).
pub(crate) fn hashed_place(n: u64, places: usize) -> usize {
    (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - places.trailing_zeros())) as usize
}

/// A number below `n` for this thread, others for other threads as far as there are enough: which of `n` copies of
/// something it uses, so that threads keep out of each other's way.
pub(crate) fn thread_slot(n: usize) -> usize {
    braidfs_sync::slots::mine() % n
}

/// What may be had in a second, bytes or requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    /// At least 1.
    pub per_second: u64,
    /// So many may come at once after a pause; `None`: a tenth of a second's.
    pub burst: Option<u64>,
}

impl Rate {
    /// So many may come at once.
    pub fn burst(&self) -> u64 {
        self.burst.unwrap_or(self.per_second / 10)
    }
}

/// What a tenant may ask of the device; `None`: as much as that can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Rates {
    /// Bytes read, per second.
    pub read_bps: Option<Rate>,
    /// Bytes written, per second.
    pub write_bps: Option<Rate>,
    /// Requests that read.
    pub read_iops: Option<Rate>,
    /// Requests that write.
    pub write_iops: Option<Rate>,
}

impl Rates {
    /// Bytes and requests of reads.
    pub fn read(&self) -> [Option<Rate>; 2] {
        [self.read_bps, self.read_iops]
    }

    /// Bytes and requests of writes.
    pub fn write(&self) -> [Option<Rate>; 2] {
        [self.write_bps, self.write_iops]
    }

    /// Whether nothing is limited.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Which way data goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// From the device.
    Read,
    /// To the device.
    Write,
}

/// What a call is going to ask of the device, as far as that can be told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Demand {
    /// Whether it reads or writes.
    pub way: Way,
    /// Bytes that it reads or writes.
    pub bytes: u64,
    /// Requests that these bytes take.
    pub requests: u64,
    /// What was paid for ahead counts ([`crate::Turn::pay_ahead`]): who asked before it wrote.
    pub ahead: bool,
}

impl Demand {
    /// Of who reads so many bytes.
    pub fn read(bytes: usize) -> Self {
        Self { way: Way::Read, bytes: bytes as u64, requests: u64::from(bytes > 0), ahead: false }
    }

    /// Of who writes so many bytes, which go to memory first.
    pub fn write(bytes: usize) -> Self {
        Self { way: Way::Write, bytes: bytes as u64, requests: 0, ahead: false }
    }

    /// Of who changes something else. What that costs is told when it is written.
    pub fn change() -> Self {
        Self { way: Way::Write, bytes: 0, requests: 0, ahead: false }
    }

    /// Of an fsync: the chunk of its record, and the data's.
    pub fn sync() -> Self {
        Self { way: Way::Write, bytes: 4096, requests: 2, ahead: false }
    }
}
