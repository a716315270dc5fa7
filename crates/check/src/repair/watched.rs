//! A device that remembers that it could not be written: what a replay says of a journal then is nothing that the journal holds.

use braidfs_device::{Device, Remote, WriteOp};
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

/// A device below, and its first error of a write or a flush.
#[derive(Debug)]
pub struct WatchedDevice {
    below: Arc<dyn Device>,
    failed: Mutex<Option<(io::ErrorKind, String)>>,
}

impl WatchedDevice {
    /// Over `below`, of which nothing has failed.
    pub fn new(below: Arc<dyn Device>) -> Self {
        Self { below, failed: Mutex::default() }
    }

    /// # Errors
    /// The first of a write or a flush.
    pub fn check_written(&self) -> io::Result<()> {
        match &*self.failed.lock().unwrap_or_else(PoisonError::into_inner) {
            Some((kind, why)) => {
                let what = "so the journals could not be replayed, and nothing of them is given up: mend the device, or make room where \
                            its file lies, and check again";
                Err(io::Error::new(*kind, format!("{}: {why}; {what}", self.name())))
            }
            None => Ok(()),
        }
    }

    fn note(&self, r: io::Result<()>) -> io::Result<()> {
        if let Err(e) = &r {
            let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
            failed.get_or_insert_with(|| (e.kind(), e.to_string()));
        }
        r
    }
}

impl Device for WatchedDevice {
    fn blocks(&self) -> u64 {
        self.below.blocks()
    }

    fn read(&self, block: u64, buf: &mut [u8]) -> io::Result<()> {
        self.below.read(block, buf)
    }

    fn write_batch(&self, ops: &[WriteOp<'_>]) -> io::Result<()> {
        self.note(self.below.write_batch(ops))
    }

    fn write_batch_through(&self, ops: &[WriteOp<'_>]) -> io::Result<()> {
        self.note(self.below.write_batch_through(ops))
    }

    fn end_sync(&self) {
        self.below.end_sync();
    }

    fn flush(&self) -> io::Result<()> {
        self.note(self.below.flush())
    }

    fn shares_flushes(&self) -> bool {
        self.below.shares_flushes()
    }

    fn discard(&self, block: u64, blocks: u64) -> io::Result<()> {
        self.below.discard(block, blocks)
    }

    fn grown(&self) -> io::Result<u64> {
        self.below.grown()
    }

    fn extend(&self, blocks: u64) -> io::Result<()> {
        self.below.extend(blocks)
    }

    fn cut_off(&self, blocks: u64) -> io::Result<()> {
        self.below.cut_off(blocks)
    }

    fn remote(&self) -> Option<&dyn Remote> {
        self.below.remote()
    }

    fn block_device(&self) -> Option<(u32, u32)> {
        self.below.block_device()
    }

    fn name(&self) -> String {
        self.below.name()
    }
}
