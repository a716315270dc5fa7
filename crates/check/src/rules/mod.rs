//! What must hold of the parts of a volume, each rule stated once.
//!
//! A rule looks at one part and tells a [`Visitor`] (of inodes and directories) or a [`Log`](crate::report::Log) (of
//! tables) what does not hold. The passes differ in what they do then: the full pass notes it and goes on with the part
//! as the rule corrected it; the quick and the online pass stop at the first finding of a part. A rule keeps nothing:
//! extents and entries are handed to the visitor one by one, overflow nodes and buckets are read some hundred at a
//! time.
//!
//! What takes two inodes (names against links, blocks used twice) is compared by the passes; what it must come to is in
//! [`link`] and [`space`].

pub mod dir;
pub mod group;
pub mod inode;
pub mod link;
pub mod record;
pub mod space;
pub mod tenant;
pub mod volume;

#[cfg(test)]
mod tests;

use crate::report::{Bad, Checked};
use braidfs_format::dentry::Dentry;
use braidfs_format::inode::Extent;
use braidfs_format::node::NodeKind;
use braidfs_format::super_block::{INCOMPAT_DATA_SUMS, SuperBlock};
use braidfs_format::{BlockAddr, Corrupt, InodeNo, NodeId};
use std::ops::Range;

/// Overflow nodes or buckets read at a time (4 KiB each).
const AT_A_TIME: usize = 128;

/// Turns what a decoder says into a finding.
fn corrupt(code: u32) -> impl Fn(Corrupt) -> Bad {
    move |e| Bad::new(code, e.to_string())
}

/// What the volume asks of every inode.
#[derive(Debug, Clone, Copy)]
pub struct Rules {
    /// Low half of the volume's UUID.
    pub volume: u32,
    /// Key of the directory hash.
    pub hash_key: [u8; 16],
    /// Extents may carry checksums.
    pub data_sums: bool,
}

impl Rules {
    /// Of the volume with this superblock.
    pub fn of(sb: &SuperBlock) -> Self {
        let data_sums = sb.incompat.get() & INCOMPAT_DATA_SUMS != 0;
        Self { volume: sb.volume_id(), hash_key: sb.hash_key, data_sums }
    }
}

/// What a pass does with the parts of an inode, and with what does not hold of them.
pub trait Visitor {
    /// Something does not hold. With `Ok` the walk goes on with what the rule corrects.
    ///
    /// # Errors
    /// The finding, where the walk is to end.
    fn bad(&mut self, bad: Bad) -> Checked<()> {
        Err(bad)
    }

    /// The payloads of overflow nodes of `owner`, which must all be of `kind`, in the order of `nodes`; `None` of one
    /// that does not hold, after [`Self::bad`] was told.
    ///
    /// # Errors
    /// [`OVERFLOW_MISSING`](crate::codes::OVERFLOW_MISSING) and the like, where the walk is to end.
    fn overflow(&mut self, owner: InodeNo, nodes: &[NodeId], kind: NodeKind) -> Checked<Vec<Option<Vec<u8>>>>;

    /// Extent leaves that belong to `owner`, whose record is of `version`, and that nothing names since the index node that did
    /// is lost: each with its extents, in the order of logical blocks, all of them in `range`. A pass that repairs nothing
    /// has none.
    fn spare_leaves(&mut self, owner: InodeNo, version: u64, range: Range<u64>) -> Vec<(NodeId, Vec<Extent>)> {
        let _ = (owner, version, range);
        Vec::new()
    }

    /// Whether `len` blocks from `addr` are data blocks of the inode's domain.
    fn holds(&self, addr: BlockAddr, len: u64) -> bool;

    /// Takes an extent that holds by itself, in rising order of logical blocks; `data`: of file data, not of buckets.
    ///
    /// # Errors
    /// What does not hold of it beside others.
    fn extent(&mut self, ino: InodeNo, e: Extent, data: bool) -> Checked<()>;

    /// Whether the directory bucket at `lblk` is to be read.
    fn bucket(&mut self, lblk: u64) -> bool {
        let _ = lblk;
        true
    }

    /// The blocks at `addrs`, in this order.
    ///
    /// # Errors
    /// [`UNREADABLE`](crate::codes::UNREADABLE), where the walk is to end; [`Bad::at`] is then the index of the block.
    fn blocks(&mut self, addrs: &[BlockAddr]) -> Checked<Vec<u8>>;

    /// Takes an entry of a directory, in the order of positions.
    fn entry(&mut self, dir: InodeNo, e: Dentry);
}

/// A name for messages.
pub fn show(name: &[u8]) -> String {
    format!("{:?}", String::from_utf8_lossy(name))
}
