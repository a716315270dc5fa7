//! A sparse device in memory, for tests of large volumes.

use crate::{BLOCK_BYTES, Device, WriteOp};
use braidfs_sync::device::Mutex;
use braidfs_sync::rank;
use std::collections::HashMap;
use std::io;
use std::sync::Arc;

/// Blocks never written read as zeros.
pub struct SparseDevice {
    blocks: u64,
    /// Copies of the device share what neither wrote since.
    data: Mutex<HashMap<u64, Arc<[u8]>, foldhash::fast::RandomState>, rank::SparseBlocks>,
}

impl std::fmt::Debug for SparseDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SparseDevice({} blocks)", self.blocks)
    }
}

impl SparseDevice {
    /// A device of `blocks` zero blocks.
    pub fn new(blocks: u64) -> Arc<Self> {
        Arc::new(Self { blocks, data: Mutex::default() })
    }
    /// A copy of its present content.
    pub fn fork(&self) -> Arc<Self> {
        Arc::new(Self { blocks: self.blocks, data: Mutex::new(self.data.lock().clone()) })
    }
    /// Numbers of the blocks that were written.
    pub fn written(&self) -> Vec<u64> {
        let mut v: Vec<u64> = self.data.lock().keys().copied().collect();
        v.sort_unstable();
        v
    }
}

impl Device for SparseDevice {
    fn blocks(&self) -> u64 {
        self.blocks
    }
    fn read(&self, block: u64, buf: &mut [u8]) -> io::Result<()> {
        if block + (buf.len() / BLOCK_BYTES) as u64 > self.blocks {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let data = self.data.lock();
        for (i, b) in buf.chunks_mut(BLOCK_BYTES).enumerate() {
            match data.get(&(block + i as u64)) {
                Some(d) => b.copy_from_slice(d),
                None => b.fill(0),
            }
        }
        Ok(())
    }
    fn write_batch(&self, ops: &[WriteOp<'_>]) -> io::Result<()> {
        let mut data = self.data.lock();
        for op in ops {
            for (at, b) in (op.block..).zip(op.bufs.iter().flat_map(|b| b.chunks(BLOCK_BYTES))) {
                if at >= self.blocks {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                if b.iter().any(|&x| x != 0) {
                    data.insert(at, b.into());
                } else {
                    data.remove(&at);
                }
            }
        }
        Ok(())
    }
    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
    fn discard(&self, _: u64, _: u64) -> io::Result<()> {
        Ok(())
    }
    fn name(&self) -> String {
        "memory".into()
    }
}
