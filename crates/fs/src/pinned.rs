//! Reading without a copy.

use crate::fs::SharedRef;
use braidfs::Piece;
use std::ops::Deref;

/// What [`File::read_pinned`](crate::File::read_pinned) read: [pieces](Piece) of the file in their order, each a slice of at most
/// 4,096 bytes where the cache has them.
///
/// The bytes are those that the file had at one moment of that call, and stay so: who overwrites a page that is pinned copies it
/// first, and truncation, removal and an error of the volume change nothing of it. No page of it is evicted. Holes and blocks that
/// were never written are zeros that take no page; the content of very short files, which lies in their inodes, is copied.
///
/// What is pinned counts as memory of the cache beside the cache's pages, and may be a quarter of it. The file may be closed
/// before; the volume cannot be ([`Fs::close`](crate::Fs::close) answers EBUSY), and an [`Fs`](crate::Fs) that is dropped closes
/// with the last of its handles and of these.
pub struct Pinned {
    pub(crate) pinned: braidfs::Pinned,
    // behind the pages
    pub(crate) _shared: SharedRef,
}

impl std::fmt::Debug for Pinned {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.pinned.fmt(f)
    }
}

impl Pinned {
    /// Bytes in all: fewer than asked for only at the end of the file.
    pub fn bytes(&self) -> usize {
        self.pinned.bytes()
    }
    /// A copy of them.
    pub fn to_vec(&self) -> Vec<u8> {
        self.pinned.to_vec()
    }
}

impl Deref for Pinned {
    type Target = [Piece];
    fn deref(&self) -> &[Piece] {
        &self.pinned
    }
}
