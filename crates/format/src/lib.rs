//! On-disk structures of braidfs.
//!
//! This crate owns every byte that reaches a device: fixed-size structures with compile-time size
//! checks, and codecs for the variable-length records. It does no I/O and takes no lock. Whatever is
//! read from a device is decoded here and never panics: a structure that does not hold yields
//! [`Corrupt`].
//!
//! Addresses: a [`BlockAddr`] counts 4 KiB blocks through the *group space* of a volume (all block
//! groups of all devices one behind the other). [`super_block`] says where on which device a group lies.
#![forbid(unsafe_code)]

pub mod bat;
pub mod block;
pub mod codec;
pub mod dentry;
pub mod domain;
pub mod file_kind;
pub mod geometry;
pub mod group;
pub mod inode;
pub mod journal;
pub mod name;
pub mod node;
pub mod owner;
pub mod quota;
pub mod super_block;

pub use block::{BLOCK_BYTES, BlockHeader, BlockKind};
pub use geometry::Geometry;

/// Newest format that this code writes and the only one that it mounts.
pub const FORMAT_VERSION: u32 = 3;

/// The highest number of a transaction, of a version or of a checkpoint that is taken from a device. A volume in use counts on from
/// there; by itself it never comes so far.
pub const COUNTER_MAX: u64 = 1 << 62;

/// A structure read from a device does not hold.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("corrupt {what}: {why}")]
pub struct Corrupt {
    /// The structure, e.g. `inode record`.
    pub what: &'static str,
    /// What about it is wrong.
    pub why: String,
}

impl Corrupt {
    /// A [`Corrupt`] for `what`, with the reason `why`.
    pub fn new(what: &'static str, why: impl Into<String>) -> Self {
        Self { what, why: why.into() }
    }
}

/// 4 KiB block number in the group space of a volume. Group 0's header is block 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct BlockAddr(pub u64);

/// Number of a node, a slot of the node table: an inode, or an overflow node of one (extent leaf, xattrs, links).
///
/// `group * nodes_per_group + slot`. Node 0 is never used, node 1 is the root directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct NodeId(pub u64);

impl NodeId {
    /// The inode whose own node this is. Only for who knows that it is no overflow node: of its record's kind, or of the
    /// flags of its table entry.
    pub fn inode(self) -> InodeNo {
        InodeNo(self.0)
    }
}

/// Number of an inode: that of the node which holds its record. On disk 0 stands for none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct InodeNo(pub u64);

impl InodeNo {
    /// The root directory.
    pub const ROOT: InodeNo = InodeNo(1);

    /// The inode's own node.
    pub fn node(self) -> NodeId {
        NodeId(self.0)
    }
}

impl From<InodeNo> for NodeId {
    fn from(ino: InodeNo) -> Self {
        ino.node()
    }
}

/// Number of a domain in its volume, from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct DomainId(pub u16);

/// Number of a transaction in its domain. Rises by one per transaction; 0 is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct TxId(pub u64);

impl std::fmt::Display for BlockAddr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "block {}", self.0)
    }
}
impl std::fmt::Display for NodeId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "node {}", self.0)
    }
}
impl std::fmt::Display for InodeNo {
    /// As its node: messages and `dump` have one number space.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.node().fmt(f)
    }
}
impl std::fmt::Display for DomainId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "domain {}", self.0)
    }
}
impl std::fmt::Display for TxId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "tx {}", self.0)
    }
}
