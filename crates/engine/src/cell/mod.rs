//! File cells: all in-memory state of one inode in one object.
//!
//! Owns attributes, links, extended attributes, extents or directory entries, and pages of a file. A cell knows nothing
//! of transactions but their numbers; `domain` writes it out.
//!
//! Invariants, under [`Cell::state`]:
//! - the inode stands on the list of the transaction that will write it ([`Durability::dirty_tx`]), and on no other.
//! - a clean page equals what its extent holds on the device, or will hold when `inflight` is back at 0.
//!
//! Lock rank: cell locks come after the transaction gate; parents before children, then by inode number.

pub mod dir;
pub mod extents;
pub mod frames;
pub mod pages;

pub mod cache;
mod changers;
mod counted;
pub mod dentries;
pub mod opened;
pub mod pieces;
pub mod record;
pub mod sharing;
mod untouched;

use crate::braid::durability::Durability;
use crate::braid::frontier::Frontier;
use crate::lazy::Lazy;
use crate::types::*;
use braidfs_format::dentry::Dentry;
use braidfs_format::inode::{Link, PROJECT_MASK, Xattr};
use braidfs_sync::{BiasedRwLock, Mutex, rank};
use dir::DirIndex;
use extents::ExtentMap;
use pages::PageMap;
use pages::locks::Writers;
use smallvec::SmallVec;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, Ordering::Relaxed};

pub use braidfs_format::dentry::name_hash;

/// One inode in memory. What a look-up reads lies together, at the beginning.
#[derive(Debug)]
#[repr(C)]
pub struct Cell {
    /// Number of the inode; never changes.
    pub ino: InodeNo,
    /// Generation of the number.
    pub generation: u32,
    /// The domain that it lives in.
    pub domain: DomainId,
    /// Type; never changes.
    pub kind: FileKind,
    /// Second chance of the cache.
    pub hot: AtomicBool,
    /// It has, or once had, no name: whoever opens or closes it looks into the state. Set before `opens` is looked at,
    /// read after `opens` was changed.
    pub nameless: AtomicBool,
    /// Several threads overwrite it ([`pages::shared`]), or change names of it ([`changers`]): they try with `state` locked
    /// for reading first. A hint for who has no lock; written with `state` locked for writing.
    pub wide: AtomicBool,
    /// The thread that was the last to count itself in `opens`.
    pub opener: AtomicU16,
    /// Open handles that are counted here; others are pins ([`opened`]).
    pub opens: AtomicU32,
    /// All that changes, under one lock.
    pub state: BiasedRwLock<State, rank::Cell>,
    /// Write batches of this file's pages that are not on the device yet: its pages must stay.
    pub inflight: AtomicU32,
    /// Steps of memory ([`State::attached_steps`]) that the domain's count has. Written with `state` locked for writing.
    pub attached: AtomicU16,
    /// One fsync at a time: the last roll-forward record is the only one that can be torn.
    pub sync: Mutex<(), rank::FileSync>,
}

/// What the dirty pages of a file are to who writes them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Dirty {
    /// Nothing special.
    #[default]
    Ordinary,
    /// An fsync found that it costs less to overwrite the file's blocks, and none since that it does not: the file lives by
    /// that, and commits overwrite, too.
    Overwritten,
    /// Its content was inline before the first page was made, which has no place yet: the record that a transaction writes
    /// does not hold it any more, so the same transaction writes the page.
    WasInline,
    /// Its last page was cut where commits leave data alone: the transaction with the smaller size writes it all the same. After a
    /// crash what was cut off would else be there again once the file grows. So it is where a file grows that is overwritten where it
    /// lies, or is so no longer: behind its end there may be bytes of a write that a crash undid.
    Cut,
}

/// Content of a regular file or symlink.
#[derive(Debug, Default)]
pub struct FileBody {
    /// Content of a small file; then `map` and `pages` are empty.
    pub inline: Option<Vec<u8>>,
    /// Where its blocks lie; read from the node table when it is first asked for.
    pub map: Lazy<ExtentMap>,
    /// Cached and dirty pages.
    pub pages: PageMap,
    /// Blocks reserved for the dirty pages.
    pub reserved: u64,
    /// Whether extents were written by the cleaner or are large: goes to the cold log.
    pub cold: bool,
    /// What its dirty pages are.
    pub dirty: Dirty,
    /// Steps of the indexes' memory ([`FileBody::index_steps`]) that the volume's count has.
    pub counted: u16,
    /// Who overwrites it.
    pub writers: Writers,
}

/// Memory of names and extents that a cell is counted for by itself ([`cache::CELL_BYTES`]).
const ATTACHED_FREE: usize = 512;
/// Extents from which on a file may be in pieces, and blocks that they have on average at most.
const MANY_EXTENTS: usize = 16;
const SHORT_EXTENT: u64 = 32;
/// Bytes of extents in a record at most, about: more lie in records of their own, and the record names these.
const RECORD_EXTENTS_MAX: usize = 3500;

impl FileBody {
    /// Whether its dirty pages are written with its record also where commits leave data alone.
    pub fn goes_with_record(&self) -> bool {
        matches!(self.dirty, Dirty::WasInline | Dirty::Cut)
    }

    /// No page is left that had to go with the record.
    pub fn has_left_record(&mut self) {
        if self.goes_with_record() {
            self.dirty = Dirty::Ordinary;
        }
    }

    /// Whether its map could come to have more extents than it holds ([`ExtentMap::lacks_room`]), were so many pages more
    /// dirty, and so many extents more made at once. What is dirty by now counts: each page may get a place of its own, in
    /// the middle of an extent.
    pub fn lacks_extents(&self, pages: usize, extents: usize) -> bool {
        self.map.lacks_room(2 * (self.pages.dirty_count() + pages) + extents)
    }

    /// Whether the file lies in very many short extents. Cheap.
    pub fn is_in_pieces(&self) -> bool {
        let n = self.map.extent_count();
        n >= MANY_EXTENTS && n as u64 * SHORT_EXTENT > self.map.blocks()
    }

    /// Bytes of memory of which the indexes are counted by: the count is the whole volume's.
    pub const INDEX_STEP: usize = 16 << 10;

    /// Memory of the indexes of extents and of pages, about, in whole steps.
    pub fn index_steps(&self) -> u16 {
        let bytes = self.map.memory_bytes() + self.pages.index_bytes();
        u16::try_from(bytes / Self::INDEX_STEP).unwrap_or(u16::MAX)
    }

    /// Bytes that the volume's count has of it.
    pub fn counted_bytes(&self) -> usize {
        usize::from(self.counted) * Self::INDEX_STEP
    }
}

/// Content of a directory. What threads that change it side by side look at, the beginning of the index and `sharing`, lies in other
/// cache lines than what who then has it for itself puts together.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct DirBody {
    /// Entries by hash of their names.
    pub index: DirIndex,
    /// Changes made side by side since the last commit.
    together: u64,
    /// Bytes of the index that the volume's count of directory memory has.
    pub counted: usize,
    /// Transactions of other domains that changed inodes with entries of it, as far as they are not known durable: what an
    /// fsync of it waits for besides its own record.
    concerned: Frontier,
    /// Where the buckets lie.
    pub map: ExtentMap,
    /// Of a directory that threads change side by side ([`sharing`]).
    sharing: Option<Box<sharing::Sharing>>,
    /// When names of it were taken or left last, since it is in memory: logical time (`domain::Shared::name_time`). Each of them
    /// looks at it.
    pub name_time: u64,
    /// The slot of the thread that changed names last with the directory for itself.
    changer: u16,
    /// How often that was another one than the last.
    turns: u16,
}

impl DirBody {
    /// A directory with these names.
    pub fn new(index: DirIndex, map: ExtentMap) -> Box<Self> {
        Box::new(Self {
            index,
            map,
            counted: 0,
            name_time: 0,
            concerned: Frontier::EMPTY,
            sharing: None,
            together: 0,
            changer: 0,
            turns: 0,
        })
    }
}

/// Names of an inode: nearly all have one for ever.
pub type Links = SmallVec<[Link; 1]>;

/// What an inode is made of besides its attributes.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "most cells are files; theirs shall take no allocation of its own")]
pub enum Body {
    /// Regular file, symlink.
    File(FileBody),
    /// A directory: its index.
    Dir(Box<DirBody>),
    /// A device, pipe or socket: attributes only.
    Special,
}

/// Changeable state of a cell. What `stat` tells comes first.
#[derive(Debug)]
#[repr(C)]
pub struct State {
    /// Type and permissions.
    pub mode: u32,
    /// Links; of a directory 2 + subdirectories.
    pub nlink: u32,
    /// Number of the owning user.
    pub uid: u32,
    /// Number of the owning group.
    pub gid: u32,
    /// Size in bytes.
    pub size: u64,
    /// The inode is gone; only its transaction still needs the cell.
    pub deleted: bool,
    /// Where new objects go.
    pub placement: Placement,
    /// Flags of `braidfs_format::inode` (NOCOW, IMMUTABLE …), with the project's number.
    pub flags: u32,
    /// Device number of a device file, else 0.
    pub rdev: u64,
    /// When the content was last read.
    pub atime: Timestamp,
    /// When the content last changed.
    pub mtime: Timestamp,
    /// When the inode last changed.
    pub ctime: Timestamp,
    /// When it was made.
    pub btime: Timestamp,
    /// What the type brings with it: pages, entries or a target.
    pub body: Body,
    /// Logical time of the last link change.
    pub link_seq: u64,
    /// Its names, as (directory, name) pairs.
    pub links: Links,
    /// Extended attributes; read when they are first asked for.
    pub xattrs: Lazy<Vec<Xattr>>,
    /// Overflow nodes in use for links.
    pub link_nodes: Lazy<Vec<NodeId>>,
    /// Overflow nodes in use for xattrs.
    pub xattr_nodes: Lazy<Vec<NodeId>>,
    /// What is durable of its changes, and what they wait for.
    pub durability: Durability,
    /// Nodes dropped (extent leaves, overflow nodes) that the next serialisation frees.
    pub dropped: Lazy<Vec<NodeId>>,
    /// The parent of `..` of a directory.
    pub parent: InodeNo,
}

impl Cell {
    /// A cell with this state, which is not to be moved from place to place on its way there.
    #[inline(always)]
    pub fn new(inode: InodeRef, domain: DomainId, kind: FileKind, state: State) -> Self {
        Self {
            ino: inode.ino,
            generation: inode.generation,
            domain,
            kind,
            nameless: AtomicBool::new(state.nlink == 0),
            state: BiasedRwLock::keyed(state, inode.ino.0),
            opener: AtomicU16::new(braidfs_sync::pins::thread()),
            opens: AtomicU32::new(0),
            inflight: AtomicU32::new(0),
            attached: AtomicU16::new(0),
            hot: AtomicBool::new(true),
            wide: AtomicBool::new(false),
            sync: Mutex::new(()),
        }
    }
    /// It is used: the cache's second chance. A look where it is warm already.
    #[inline]
    pub fn warm(&self) {
        if !self.hot.load(Relaxed) {
            self.hot.store(true, Relaxed);
        }
    }
    /// Number and generation.
    pub fn inode(&self) -> InodeRef {
        InodeRef { ino: self.ino, generation: self.generation }
    }
    /// Whether it is the cell of that inode.
    pub fn is(&self, inode: InodeRef) -> bool {
        self.inode() == inode
    }
    /// What `stat` tells, from the state that the caller has locked.
    #[inline]
    pub fn attr(&self, st: &State) -> Attr {
        let (mtime, ctime) = st.change_times();
        Attr {
            ino: self.ino,
            generation: self.generation,
            mode: st.mode,
            nlink: st.nlink,
            uid: st.uid,
            gid: st.gid,
            rdev: st.rdev,
            size: st.size,
            sectors: st.sectors(),
            atime: st.atime,
            mtime,
            ctime,
            btime: st.btime,
            flags: st.flags & !PROJECT_MASK,
            project: st.project(),
        }
    }
}

impl State {
    /// A fresh inode with all times at `now`.
    pub fn fresh(kind: FileKind, perm: u32, uid: u32, gid: u32, now: Timestamp) -> Self {
        let body = match kind {
            FileKind::File | FileKind::Symlink => {
                Body::File(FileBody { inline: Some(Vec::new()), ..FileBody::default() })
            }
            FileKind::Dir => Body::Dir(DirBody::new(DirIndex::new_empty(), ExtentMap::new())),
            _ => Body::Special,
        };
        Self {
            mode: kind.mode_bits() | (perm & 0o7777),
            uid,
            gid,
            nlink: if kind == FileKind::Dir { 2 } else { 0 },
            size: 0,
            rdev: 0,
            flags: 0,
            placement: Placement::Unset,
            atime: now,
            mtime: now,
            ctime: now,
            btime: now,
            link_seq: 0,
            links: Links::new(),
            xattrs: Lazy::default(),
            link_nodes: Lazy::default(),
            xattr_nodes: Lazy::default(),
            body,
            durability: Durability::new(),
            dropped: Lazy::default(),
            deleted: false,
            parent: InodeNo(0),
        }
    }
    /// The content changed at `now`, by an operation that has made this version.
    pub fn modified(&mut self, now: Timestamp) {
        if self.mtime != now || self.ctime != now {
            (self.mtime, self.ctime) = (now, now);
            self.durability.operation_changes_times();
        }
    }
    /// What `stat` tells of [`Self::content_blocks`], in units of 512 bytes. Content in the record of a regular file counts, though it
    /// takes no block.
    fn sectors(&self) -> u64 {
        match &self.body {
            Body::File(FileBody { inline: Some(content), .. })
                if FileKind::from_mode(self.mode) == Some(FileKind::File) =>
            {
                content.len().div_ceil(512) as u64
            }
            _ => self.content_blocks() * 8,
        }
    }
    /// Bytes by which that is counted.
    pub const ATTACHED_STEP: usize = 64;

    /// Memory that hangs on the cell and goes with it, about, beyond what each cell is counted for: content of a small file,
    /// names, attributes, extents of a record. In whole steps.
    pub fn attached_steps(&self) -> u16 {
        let names: usize = self.links.iter().map(|l| l.name.len() + 32).sum();
        let xattrs: usize = self.xattrs.iter().map(|(n, v)| n.len() + v.len() + 64).sum();
        let content = match &self.body {
            // more extents are counted as an index
            Body::File(f) => f.inline.as_ref().map_or(0, Vec::len) + f.map.memory_bytes().min(FileBody::INDEX_STEP),
            Body::Dir(_) | Body::Special => 0,
        };
        let bytes = (names + xattrs + content).saturating_sub(ATTACHED_FREE);
        u16::try_from(bytes / Self::ATTACHED_STEP).unwrap_or(u16::MAX)
    }
    /// Bytes that its inode record takes, about.
    pub fn record_bytes(&mut self) -> usize {
        self.record_bytes_with(0)
    }
    /// The same, with so many bytes of extents more.
    pub fn record_bytes_with(&mut self, more: usize) -> usize {
        let names: usize = self.links.iter().map(|l| l.name.len() + 9).sum();
        let xattrs: usize = self.xattrs.iter().map(|(n, v)| n.len() + v.len() + 5).sum();
        // of extents that may come, some; a tree's leaves are records of their own
        let of_map = |map: &ExtentMap| (200 + map.encoded_bytes() + more).min(RECORD_EXTENTS_MAX);
        let content = match &mut self.body {
            Body::File(f) => f.inline.as_ref().map_or_else(|| of_map(&f.map), Vec::len),
            Body::Dir(d) => match d.index.inline_entries() {
                Some(e) => e.iter().map(Dentry::encoded_bytes).sum(),
                None => of_map(&d.map),
            },
            Body::Special => 0,
        };
        200 + names + xattrs + content
    }
    /// The file content.
    pub fn file(&mut self) -> Option<&mut FileBody> {
        match &mut self.body {
            Body::File(f) => Some(f),
            _ => None,
        }
    }
    /// The directory content.
    pub fn dir(&mut self) -> Option<&mut DirBody> {
        match &mut self.body {
            Body::Dir(d) => Some(d),
            _ => None,
        }
    }
    /// Adds a name.
    pub fn add_link(&mut self, parent: InodeNo, name: &[u8], seq: u64) {
        self.links.push(Link { parent, name: name.into() });
        self.link_seq = seq;
    }
    /// [`Self::add_link`] of an operation: whoever took this name from the inode before has lost it again, so that its
    /// fate no longer decides about it.
    pub fn gain_link(&mut self, parent: InodeNo, name: &[u8], seq: u64) {
        self.durability.inode_regains_name(parent, name);
        self.add_link(parent, name, seq);
    }
    /// Takes a name away; whether it was there.
    pub fn remove_link(&mut self, parent: InodeNo, name: &[u8], seq: u64) -> bool {
        let at = self.links.iter().position(|l| l.parent == parent && *l.name == *name);
        if let Some(i) = at {
            self.links.swap_remove(i);
            self.link_seq = seq;
        }
        at.is_some()
    }
    /// Whether it has this name.
    pub fn has_link(&self, parent: InodeNo, name: &[u8]) -> bool {
        self.links.iter().any(|l| l.parent == parent && *l.name == *name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Millions of them are in memory, in allocations of 512 bytes: whoever adds what few inodes have uses a [`Lazy`].
    #[test]
    fn a_cell_is_small() {
        // the checker of locks keeps the number of the cell once more
        let checker = if braidfs_sync::CHECKED { size_of::<u64>() } else { 0 };
        assert!(size_of::<Cell>() <= 496 + checker, "{} bytes", size_of::<Cell>());
    }

    /// What each change of a directory that several threads change looks at is in one line.
    #[test]
    fn what_changers_of_a_directory_look_at_lies_together() {
        use std::mem::offset_of;
        let line = |at: usize| at / 64;
        let read = line(offset_of!(DirBody, sharing));
        assert_eq!(read, line(offset_of!(DirBody, name_time)));
        let put = [offset_of!(DirBody, together), offset_of!(DirBody, concerned) + size_of::<Frontier>() - 1];
        assert!(put.iter().all(|at| line(*at) != read), "{put:?} and {read}");
    }
}
