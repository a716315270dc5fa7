//! The first blocks of a larger device.

use crate::{Device, WriteOp, check_discard, check_ops, check_range};
use std::io;
use std::sync::Arc;

/// A device that ends before the one below it does.
#[derive(Debug)]
pub struct CutDevice {
    below: Arc<dyn Device>,
    blocks: u64,
}

impl CutDevice {
    /// The first `blocks` of `below`; all of it where it has no more.
    pub fn new(below: Arc<dyn Device>, blocks: u64) -> Self {
        let blocks = blocks.min(below.blocks());
        Self { below, blocks }
    }
}

impl Device for CutDevice {
    fn blocks(&self) -> u64 {
        self.blocks
    }

    fn read(&self, block: u64, buf: &mut [u8]) -> io::Result<()> {
        check_range(self.blocks, block, buf.len(), io::ErrorKind::UnexpectedEof)?;
        self.below.read(block, buf)
    }

    fn write_batch(&self, ops: &[WriteOp<'_>]) -> io::Result<()> {
        check_ops(self.blocks, ops)?;
        self.below.write_batch(ops)
    }

    fn flush(&self) -> io::Result<()> {
        self.below.flush()
    }

    fn shares_flushes(&self) -> bool {
        self.below.shares_flushes()
    }

    fn discard(&self, block: u64, blocks: u64) -> io::Result<()> {
        check_discard(self.blocks, block, blocks)?;
        self.below.discard(block, blocks)
    }

    fn remote(&self) -> Option<&dyn crate::Remote> {
        self.below.remote()
    }

    fn name(&self) -> String {
        self.below.name()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BLOCK_BYTES, MemDevice};

    #[test]
    fn nothing_behind_the_cut_is_reached() {
        let whole: Arc<dyn Device> = Arc::new(MemDevice::new(8));
        let cut = CutDevice::new(whole.clone(), 4);
        let mut two = vec![7; 2 * BLOCK_BYTES];
        cut.write(2, &two).unwrap();
        assert!(cut.write(3, &two).is_err() && cut.read(3, &mut two).is_err() && cut.discard(3, 2).is_err());
        whole.read(3, &mut two).unwrap();
        assert!(two[..BLOCK_BYTES].iter().all(|b| *b == 7) && two[BLOCK_BYTES..].iter().all(|b| *b == 0));
        assert_eq!((cut.blocks(), CutDevice::new(whole, 99).blocks()), (4, 8));
    }
}
