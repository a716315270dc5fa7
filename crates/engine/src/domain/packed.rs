//! How node records share blocks, and how many blocks they can come to fill: operations reserve by that, so that a commit
//! finds what it needs.
//!
//! One block is filled at a time. Where a record does not fit, the fuller one of that block and of a new one with the record
//! in it is written, and the other is filled on. So each record costs a part of a block at most, its *weight*, whatever
//! comes before and behind it. For let the block that is being filled own at least as much weight as it has bytes in it, or a
//! whole block's. A small record that does not fit finds it so full that this is a block's, which pays. A large one pays for
//! the block that is written: for its own, or for the one that it replaces, whose weight it gets. One in between pays a
//! part of the block that it replaces; what that one has beyond it pays the rest.

use braidfs_format::node::{NodeBlockBuilder, NodeRecord, RECORD_HEADER_BYTES, RECORD_MAX};

/// Weight of a block: so many bytes of small records it holds at least before one does not fit.
pub(crate) const BLOCK: u64 = 2800;
/// Bytes that a record takes beside its payload: its header, and its place in the block.
const BESIDE: u64 = RECORD_HEADER_BYTES as u64 + 2;
/// What a block has room for, of that.
const ROOM: u64 = RECORD_MAX as u64 + 2;
/// A record up to this is small.
const SMALL: u64 = ROOM - BLOCK;
/// Two that are larger than this do not share a block.
const HALF: u64 = ROOM / 2;

/// The most that the records of an inode weigh together which has so many bytes to write.
pub(crate) fn weight(bytes: usize) -> u64 {
    let bytes = bytes as u64 + BESIDE;
    if bytes <= SMALL {
        bytes
    } else if bytes <= HALF {
        bytes * BLOCK / HALF
    } else if bytes <= ROOM {
        BLOCK
    } else {
        // names and attributes in whole records and one that is not, each; the inode's own
        (bytes / (ROOM - BESIDE) + 3) * BLOCK
    }
}

/// Records that share a block.
#[derive(Debug, Default)]
pub(super) struct Together {
    pub builder: NodeBlockBuilder,
    /// Each with its place.
    pub records: Vec<(NodeRecord, u8)>,
    bytes: u64,
}

impl Together {
    /// Adds a record; gives it back where it does not fit.
    fn add(&mut self, r: NodeRecord) -> Option<NodeRecord> {
        let Some(place) = self.builder.push_record(&r) else { return Some(r) };
        self.bytes += r.payload.len() as u64 + BESIDE;
        self.records.push((r, place));
        None
    }

    /// The block is made: another one begins, in the same memory.
    pub fn begin(&mut self) {
        debug_assert!(self.builder.is_empty() && self.records.is_empty());
        self.bytes = 0;
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Packer {
    /// Is filled on.
    pub open: Together,
    /// Is to be written; else empty.
    pub full: Together,
}

impl Packer {
    /// Adds a record; whether [`Self::full`] must be written before the next.
    pub fn push(&mut self, r: NodeRecord) -> bool {
        let Some(r) = self.open.add(r) else { return false };
        let none = self.full.add(r).is_none();
        // else it would be lost
        assert!(none, "a record that fits no block");
        if self.full.bytes <= self.open.bytes {
            std::mem::swap(&mut self.open, &mut self.full);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use braidfs_format::node::{NodeKind, PAYLOAD_MAX};
    use braidfs_format::{BlockAddr, InodeNo, NodeId};
    use proptest::prelude::*;

    fn record(bytes: usize) -> NodeRecord {
        let payload = vec![0; bytes];
        NodeRecord {
            node: NodeId(9),
            generation: 1,
            kind: NodeKind::Inode,
            flags: 1,
            owner: InodeNo(9),
            version: 1,
            payload,
        }
    }

    fn write(t: &mut Together) {
        t.builder.finish(0, 1, BlockAddr(9), 1);
        t.records.clear();
        t.begin();
    }

    /// Blocks that records of these sizes fill.
    fn blocks(sizes: impl Iterator<Item = usize>) -> u64 {
        let (mut packer, mut blocks) = (Packer::default(), 0);
        for n in sizes {
            if packer.push(record(n)) {
                write(&mut packer.full);
                blocks += 1;
            }
            assert!(packer.full.records.is_empty());
        }
        blocks + u64::from(!packer.open.records.is_empty())
    }

    proptest! {
        /// As they come they fill no more blocks than they weigh, and one that is begun.
        #[test]
        fn records_fill_no_more_blocks_than_they_weigh(
            sizes in prop::collection::vec(prop_oneof![100..400usize, 400..2200usize, 1200..2100usize, 1900..PAYLOAD_MAX], 1..300),
        ) {
            let weight: u64 = sizes.iter().map(|n| weight(*n)).sum();
            let blocks = blocks(sizes.into_iter());
            prop_assert!(blocks <= weight / BLOCK + 1, "{blocks} blocks of weight {weight}");
        }
    }

    #[test]
    fn records_of_which_two_fit_no_block_have_one_each() {
        for n in [1999, 2100, 2590, 2800, PAYLOAD_MAX] {
            assert_eq!((blocks([n; 100].into_iter()), weight(n)), (100, BLOCK), "{n} bytes");
        }
        // with small ones between them, which have one together
        let mixed = (0..200).map(|i| if i % 2 == 0 { 3900 } else { 150 });
        assert_eq!(blocks(mixed), 100 + 100u64.div_ceil(22));
    }
}
