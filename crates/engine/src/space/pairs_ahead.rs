//! Pairs of tables, read a run at a time: what recovery changes lies close together.

use crate::store::Store;
use braidfs_device::AlignedBuf;
use braidfs_format::{BLOCK_BYTES, BlockAddr};

/// Blocks of a run: 256 KiB, which takes hardly longer to read than one pair.
const RUN_BLOCKS: u64 = 64;

/// The run that was read last. Nobody may write tables of its group meanwhile.
#[derive(Debug, Default)]
pub(crate) struct PairsAhead {
    buf: Option<AlignedBuf>,
    first: u64,
    /// How many of `buf` hold something.
    blocks: u64,
}

impl PairsAhead {
    /// The pair at `pair`, of a group whose tables lie together up to `end`. `None` where the run from there on cannot be read:
    /// the pair by itself tells why, or can.
    pub fn pair(&mut self, store: &Store, pair: BlockAddr, end: BlockAddr) -> Option<&[u8]> {
        if pair.0 < self.first || pair.0 + 2 > self.first + self.blocks {
            let blocks = end.0.checked_sub(pair.0)?.min(RUN_BLOCKS);
            let bytes = blocks as usize * BLOCK_BYTES;
            // nothing is known of it after an error
            self.blocks = 0;
            // small groups have short tables
            let buf = match &mut self.buf {
                Some(buf) if buf.len() >= bytes => buf,
                none => none.insert(AlignedBuf::zeroed(bytes)),
            };
            store.read(pair, &mut buf[..bytes]).ok()?;
            (self.first, self.blocks) = (pair.0, blocks);
        }
        let at = (pair.0 - self.first) as usize * BLOCK_BYTES;
        self.buf.as_ref()?.get(..self.blocks as usize * BLOCK_BYTES)?.get(at..at + 2 * BLOCK_BYTES)
    }
}
