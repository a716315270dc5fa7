//! What is allocated: a run of blocks, for a log of some class.

use braidfs_format::BlockAddr;
use braidfs_format::group::{SegmentKind, Temperature};

/// What a log is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Class {
    /// [`SegmentKind::Data`] or [`SegmentKind::Node`].
    pub kind: SegmentKind,
    /// How soon its blocks are expected to die.
    pub temperature: Temperature,
}

impl Class {
    /// Number of different classes.
    pub(super) const COUNT: usize = 6;
    pub(super) fn slot(self) -> usize {
        usize::from(self.kind == SegmentKind::Node) * 3 + self.temperature as usize
    }
}

/// Consecutive blocks of the volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Run {
    /// Address of the first one.
    pub addr: BlockAddr,
    /// Number of blocks.
    pub len: u32,
}
