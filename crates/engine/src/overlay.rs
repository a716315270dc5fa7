//! A device that keeps its writes in memory and leaves the device below as it is.
//!
//! With it a read-only mount, and a check without repair, replay the journals of a volume that was not unmounted and
//! look at the result. Promises nothing about memory: it keeps every block written.

use braidfs_device::{BLOCK_BYTES, Device, WriteOp};
use braidfs_sync::RwLock;
use std::collections::HashMap;
use std::io;
use std::sync::Arc;

/// See the module.
#[derive(Debug)]
pub struct OverlayDevice {
    base: Arc<dyn Device>,
    written: RwLock<HashMap<u64, Box<[u8]>>>,
}

impl OverlayDevice {
    /// An overlay over `base` without writes.
    pub fn new(base: Arc<dyn Device>) -> Self {
        Self { base, written: RwLock::default() }
    }
}

impl Device for OverlayDevice {
    fn blocks(&self) -> u64 {
        self.base.blocks()
    }

    fn read(&self, block: u64, buf: &mut [u8]) -> io::Result<()> {
        self.base.read(block, buf)?;
        let written = self.written.read();
        if written.is_empty() {
            return Ok(());
        }
        for (i, b) in buf.chunks_mut(BLOCK_BYTES).enumerate() {
            if let Some(w) = written.get(&(block + i as u64)) {
                b.copy_from_slice(w);
            }
        }
        Ok(())
    }

    fn write_batch(&self, ops: &[WriteOp<'_>]) -> io::Result<()> {
        let mut written = self.written.write();
        for op in ops {
            for (at, b) in (op.block..).zip(op.bufs.iter().flat_map(|b| b.chunks(BLOCK_BYTES))) {
                if at >= self.base.blocks() {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                written.insert(at, b.into());
            }
        }
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn discard(&self, _block: u64, _blocks: u64) -> io::Result<()> {
        Ok(())
    }

    fn name(&self) -> String {
        self.base.name()
    }
}
