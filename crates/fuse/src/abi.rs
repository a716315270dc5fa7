//! The FUSE wire protocol (7.31 to 7.45): structures, operation codes and flags as `linux/fuse.h` declares
//! (and documents) them.
//!
//! Owns nothing but layout: no I/O, no policy. Native byte order. Every structure is padded to 8 bytes and asserted
//! below; incoming ones are copied out of the request, so that nothing depends on the buffer's alignment.

use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Major version of the protocol.
pub const MAJOR: u32 = 7;
/// Newest minor version whose structures are declared here.
pub const MINOR: u32 = 45;
/// Oldest minor version that is served (Linux 5.4; whole-structure INIT replies, MAX_PAGES, copy_file_range).
pub const MINOR_MIN: u32 = 31;

/// Declares `pub mod op` and a name for the log.
macro_rules! opcodes {
    ($($name:ident = $n:literal),* $(,)?) => {
        /// Operation codes: those that are served, and others that the kernel may ask once.
        pub mod op {
            $(pub const $name: u32 = $n;)*
            /// For the log.
            pub fn name(code: u32) -> &'static str {
                match code { $($name => stringify!($name),)* _ => "?" }
            }
        }
    };
}

opcodes! {
    LOOKUP = 1, FORGET = 2, GETATTR = 3, SETATTR = 4, READLINK = 5, SYMLINK = 6, MKNOD = 8, MKDIR = 9, UNLINK = 10,
    RMDIR = 11, RENAME = 12, LINK = 13, OPEN = 14, READ = 15, WRITE = 16, STATFS = 17, RELEASE = 18, FSYNC = 20,
    SETXATTR = 21, GETXATTR = 22, LISTXATTR = 23, REMOVEXATTR = 24, FLUSH = 25, INIT = 26, OPENDIR = 27,
    READDIR = 28, RELEASEDIR = 29, FSYNCDIR = 30, GETLK = 31, SETLK = 32, SETLKW = 33, ACCESS = 34, CREATE = 35,
    INTERRUPT = 36, BMAP = 37, DESTROY = 38, IOCTL = 39, POLL = 40, NOTIFY_REPLY = 41, BATCH_FORGET = 42, FALLOCATE = 43,
    READDIRPLUS = 44, RENAME2 = 45, LSEEK = 46, COPY_FILE_RANGE = 47, SETUPMAPPING = 48, REMOVEMAPPING = 49, SYNCFS = 50,
    TMPFILE = 51, STATX = 52, COPY_FILE_RANGE_64 = 53,
}

/// Declares `pub mod init` and names for the log.
macro_rules! init_flags {
    ($($name:ident = $bit:literal),* $(,)?) => {
        /// INIT flags, both halves as one number.
        pub mod init {
            $(pub const $name: u64 = 1 << $bit;)*
            /// The names of those in `flags`, as of `linux/fuse.h`, for the log.
            pub fn names(flags: u64) -> String {
                let all = [$(($name, stringify!($name))),*];
                let set = all.iter().filter(|(flag, _)| flags & flag != 0).map(|(_, name)| *name);
                set.collect::<Vec<_>>().join(",")
            }
        }
    };
}

init_flags! {
    ASYNC_READ = 0, ATOMIC_O_TRUNC = 3, EXPORT_SUPPORT = 4, BIG_WRITES = 5, DONT_MASK = 6, HAS_IOCTL_DIR = 11,
    DO_READDIRPLUS = 13, ASYNC_DIO = 15, WRITEBACK_CACHE = 16, NO_OPEN_SUPPORT = 17, PARALLEL_DIROPS = 18,
    POSIX_ACL = 20, MAX_PAGES = 22, CACHE_SYMLINKS = 23, NO_OPENDIR_SUPPORT = 24, EXPLICIT_INVAL_DATA = 25,
    HANDLE_KILLPRIV_V2 = 28, SETXATTR_EXT = 29, INIT_EXT = 30, CREATE_SUPP_GROUP = 34, DIRECT_IO_ALLOW_MMAP = 36,
    NO_EXPORT_SUPPORT = 38, ALLOW_IDMAP = 40, OVER_IO_URING = 41,
}

/// SETATTR `valid` bits.
pub mod fattr {
    pub const MODE: u32 = 1 << 0;
    pub const UID: u32 = 1 << 1;
    pub const GID: u32 = 1 << 2;
    pub const SIZE: u32 = 1 << 3;
    pub const ATIME: u32 = 1 << 4;
    pub const MTIME: u32 = 1 << 5;
    pub const FH: u32 = 1 << 6;
    pub const ATIME_NOW: u32 = 1 << 7;
    pub const MTIME_NOW: u32 = 1 << 8;
    pub const CTIME: u32 = 1 << 10;
    pub const KILL_SUIDGID: u32 = 1 << 11;
}

/// Flags of an OPEN reply.
pub mod fopen {
    pub const DIRECT_IO: u32 = 1 << 0;
    pub const KEEP_CACHE: u32 = 1 << 1;
    pub const CACHE_DIR: u32 = 1 << 3;
    pub const NOFLUSH: u32 = 1 << 5;
    pub const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
}

/// `open_flags` of OPEN and CREATE requests.
pub const OPEN_KILL_SUIDGID: u32 = 1;
/// WRITE of the page cache's own accord, not for a `write` that waits for it.
pub const WRITE_CACHE: u32 = 1 << 0;
/// WRITE of a direct `write`: the kernel tells an owner of locks only then.
pub const WRITE_LOCKOWNER: u32 = 1 << 1;
/// As [`WRITE_LOCKOWNER`], of a READ.
pub const READ_LOCKOWNER: u32 = 1 << 1;
/// WRITE by a user without CAP_FSETID.
pub const WRITE_KILL_SUIDGID: u32 = 1 << 2;
/// `GetattrIn::getattr_flags`: `fh` is valid.
pub const GETATTR_FH: u32 = 1;
/// SETXATTR of an ACL by a user who may not keep setgid.
pub const SETXATTR_ACL_KILL_SGID: u32 = 1;
/// FSYNC as fdatasync(2).
pub const FSYNC_FDATASYNC: u32 = 1;
/// Extension: supplementary groups.
pub const EXT_GROUPS: u32 = 32;
/// Notification: forget attributes and, from `off`, pages of an inode.
pub const NOTIFY_INVAL_INODE: i32 = 2;
pub const NOTIFY_INVAL_ENTRY: i32 = 3;
/// Notification: drop inodes that nobody uses; from [`MINOR_PRUNE`] on.
pub const NOTIFY_PRUNE: i32 = 9;
/// First minor version with FUSE_NOTIFY_PRUNE (Linux 6.18).
pub const MINOR_PRUNE: u32 = 45;
/// io_uring command: gives an entry to a queue.
pub const URING_REGISTER: u32 = 1;
/// io_uring command: the answer is in the entry; fetch the next request into it.
pub const URING_COMMIT_AND_FETCH: u32 = 2;
/// `_IOR(229, 0, u32)`: a further descriptor of the same connection.
pub const DEV_IOC_CLONE: u64 = 0x8004_e500;

/// Declares wire structures and asserts their sizes.
macro_rules! wire {
    ($($(#[$doc:meta])* $name:ident: $size:literal { $($field:ident: $ty:ty),* $(,)? })*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable)]
        #[repr(C)]
        pub struct $name { $(pub $field: $ty),* }
        const _: () = assert!(size_of::<$name>() == $size);
    )*};
}

wire! {
    InHeader: 40 { len: u32, opcode: u32, unique: u64, nodeid: u64, uid: u32, gid: u32, pid: u32, total_extlen: u16, padding: u16 }
    OutHeader: 16 { len: u32, error: i32, unique: u64 }
    Attr: 88 {
        ino: u64, size: u64, blocks: u64, atime: i64, mtime: i64, ctime: i64, atimensec: u32, mtimensec: u32,
        ctimensec: u32, mode: u32, nlink: u32, uid: u32, gid: u32, rdev: u32, blksize: u32, flags: u32,
    }
    EntryOut: 128 {
        nodeid: u64, generation: u64, entry_valid: u64, attr_valid: u64, entry_valid_nsec: u32, attr_valid_nsec: u32,
        attr: Attr,
    }
    AttrOut: 104 { attr_valid: u64, attr_valid_nsec: u32, dummy: u32, attr: Attr }
    SxTime: 16 { sec: i64, nsec: u32, reserved: i32 }
    Statx: 256 {
        mask: u32, blksize: u32, attributes: u64, nlink: u32, uid: u32, gid: u32, mode: u16, spare0: u16, ino: u64,
        size: u64, blocks: u64, attributes_mask: u64, atime: SxTime, btime: SxTime, ctime: SxTime, mtime: SxTime,
        rdev_major: u32, rdev_minor: u32, dev_major: u32, dev_minor: u32, spare2: [u64; 14],
    }
    GetattrIn: 16 { getattr_flags: u32, dummy: u32, fh: u64 }
    StatxIn: 24 { getattr_flags: u32, reserved: u32, fh: u64, sx_flags: u32, sx_mask: u32 }
    StatxOut: 288 { attr_valid: u64, attr_valid_nsec: u32, flags: u32, spare: [u64; 2], stat: Statx }
    ForgetIn: 8 { nlookup: u64 }
    BatchForgetIn: 8 { count: u32, dummy: u32 }
    ForgetOne: 16 { nodeid: u64, nlookup: u64 }
    MknodIn: 16 { mode: u32, rdev: u32, umask: u32, padding: u32 }
    MkdirIn: 8 { mode: u32, umask: u32 }
    RenameIn: 8 { newdir: u64 }
    Rename2In: 16 { newdir: u64, flags: u32, padding: u32 }
    LinkIn: 8 { oldnodeid: u64 }
    SetattrIn: 88 {
        valid: u32, padding: u32, fh: u64, size: u64, lock_owner: u64, atime: i64, mtime: i64, ctime: i64,
        atimensec: u32, mtimensec: u32, ctimensec: u32, mode: u32, unused4: u32, uid: u32, gid: u32, unused5: u32,
    }
    OpenIn: 8 { flags: u32, open_flags: u32 }
    CreateIn: 16 { flags: u32, mode: u32, umask: u32, open_flags: u32 }
    OpenOut: 16 { fh: u64, open_flags: u32, padding: u32 }
    ReleaseIn: 24 { fh: u64, flags: u32, release_flags: u32, lock_owner: u64 }
    ReadIn: 40 { fh: u64, offset: u64, size: u32, read_flags: u32, lock_owner: u64, flags: u32, padding: u32 }
    WriteIn: 40 { fh: u64, offset: u64, size: u32, write_flags: u32, lock_owner: u64, flags: u32, padding: u32 }
    WriteOut: 8 { size: u32, padding: u32 }
    StatfsOut: 80 {
        blocks: u64, bfree: u64, bavail: u64, files: u64, ffree: u64, bsize: u32, namelen: u32, frsize: u32,
        padding: u32, spare: [u32; 6],
    }
    FsyncIn: 16 { fh: u64, fsync_flags: u32, padding: u32 }
    /// As it was before SETXATTR_EXT.
    SetxattrCompatIn: 8 { size: u32, flags: u32 }
    SetxattrIn: 16 { size: u32, flags: u32, setxattr_flags: u32, padding: u32 }
    GetxattrIn: 8 { size: u32, padding: u32 }
    GetxattrOut: 8 { size: u32, padding: u32 }
    InitIn: 64 { major: u32, minor: u32, max_readahead: u32, flags: u32, flags2: u32, unused: [u32; 11] }
    /// As it was before INIT_EXT.
    InitCompatIn: 16 { major: u32, minor: u32, max_readahead: u32, flags: u32 }
    InitOut: 64 {
        major: u32, minor: u32, max_readahead: u32, flags: u32, max_background: u16, congestion_threshold: u16,
        max_write: u32, time_gran: u32, max_pages: u16, map_alignment: u16, flags2: u32, unused: [u32; 7],
    }
    IoctlIn: 32 { fh: u64, flags: u32, cmd: u32, arg: u64, in_size: u32, out_size: u32 }
    IoctlOut: 16 { result: i32, flags: u32, in_iovs: u32, out_iovs: u32 }
    FallocateIn: 32 { fh: u64, offset: u64, length: u64, mode: u32, padding: u32 }
    Dirent: 24 { ino: u64, off: u64, namelen: u32, kind: u32 }
    LseekIn: 24 { fh: u64, offset: u64, whence: u32, padding: u32 }
    LseekOut: 8 { offset: u64 }
    CopyRangeIn: 56 { fh_in: u64, off_in: u64, nodeid_out: u64, fh_out: u64, off_out: u64, len: u64, flags: u64 }
    CopyRangeOut: 8 { bytes_copied: u64 }
    InvalInodeOut: 24 { ino: u64, off: i64, len: i64 }
    /// Node ids follow.
    PruneOut: 16 { count: u32, padding: u32, spare: u64 }
    ExtHeader: 8 { size: u32, kind: u32 }
    UringInOut: 32 { flags: u64, commit_id: u64, payload_size: u32, padding: u32, reserved: u64 }
    /// The first part of an entry of a ring: the header of the request, later that of its answer; the structure of the
    /// operation; how much the second part holds.
    UringHeader: 288 { in_out: [u8; 128], op_in: [u8; 128], ent: UringInOut }
    /// At the start of an SQE's command.
    UringCommand: 24 { flags: u64, commit_id: u64, qid: u16, padding: [u8; 6] }
    /// `struct fsxattr` of `linux/fs.h`.
    Fsxattr: 28 { xflags: u32, extsize: u32, nextents: u32, projid: u32, cowextsize: u32, pad: [u8; 8] }
}
