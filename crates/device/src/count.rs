//! Counting of what a device is asked.
//!
//! Counters are relaxed atomics that all threads share: for tests and measured runs, not for production.

use crate::{BLOCK_BYTES, Device, WriteOp};
use std::io;
use std::ops::Sub;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Operations that a device was asked for, whatever became of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Calls of `read`.
    pub reads: u64,
    /// Blocks that they asked for.
    pub read_blocks: u64,
    /// Calls of `write` and `write_batch`.
    pub batches: u64,
    /// Writes in them.
    pub writes: u64,
    /// Blocks of these writes.
    pub write_blocks: u64,
    /// Calls of `flush`.
    pub flushes: u64,
    /// Calls of `discard`.
    pub discards: u64,
    /// Blocks that they named.
    pub discard_blocks: u64,
}

impl Sub for Counters {
    type Output = Counters;

    /// What came between the `earlier` reading and this one.
    fn sub(self, earlier: Counters) -> Counters {
        Counters {
            reads: self.reads - earlier.reads,
            read_blocks: self.read_blocks - earlier.read_blocks,
            batches: self.batches - earlier.batches,
            writes: self.writes - earlier.writes,
            write_blocks: self.write_blocks - earlier.write_blocks,
            flushes: self.flushes - earlier.flushes,
            discards: self.discards - earlier.discards,
            discard_blocks: self.discard_blocks - earlier.discard_blocks,
        }
    }
}

/// The counters while they count.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    reads: AtomicU64,
    read_blocks: AtomicU64,
    batches: AtomicU64,
    writes: AtomicU64,
    write_blocks: AtomicU64,
    flushes: AtomicU64,
    discards: AtomicU64,
    discard_blocks: AtomicU64,
}

impl Tally {
    pub(crate) fn read(&self, bytes: usize) {
        self.reads.fetch_add(1, Relaxed);
        self.read_blocks.fetch_add((bytes / BLOCK_BYTES) as u64, Relaxed);
    }

    pub(crate) fn write(&self, ops: &[WriteOp<'_>]) {
        let bytes = crate::bytes_of(ops);
        self.batches.fetch_add(1, Relaxed);
        self.writes.fetch_add(ops.len() as u64, Relaxed);
        self.write_blocks.fetch_add((bytes / BLOCK_BYTES) as u64, Relaxed);
    }

    pub(crate) fn flush(&self) {
        self.flushes.fetch_add(1, Relaxed);
    }

    pub(crate) fn discard(&self, blocks: u64) {
        self.discards.fetch_add(1, Relaxed);
        self.discard_blocks.fetch_add(blocks, Relaxed);
    }

    pub(crate) fn get(&self) -> Counters {
        Counters {
            reads: self.reads.load(Relaxed),
            read_blocks: self.read_blocks.load(Relaxed),
            batches: self.batches.load(Relaxed),
            writes: self.writes.load(Relaxed),
            write_blocks: self.write_blocks.load(Relaxed),
            flushes: self.flushes.load(Relaxed),
            discards: self.discards.load(Relaxed),
            discard_blocks: self.discard_blocks.load(Relaxed),
        }
    }
}

/// A device that counts and does nothing else.
#[derive(Debug)]
pub struct CountDevice {
    inner: Arc<dyn Device>,
    tally: Tally,
}

impl CountDevice {
    /// Counts from zero what goes to `inner`.
    pub fn new(inner: Arc<dyn Device>) -> Self {
        Self { inner, tally: Tally::default() }
    }

    /// The counts so far.
    pub fn counters(&self) -> Counters {
        self.tally.get()
    }
}

impl Device for CountDevice {
    fn blocks(&self) -> u64 {
        self.inner.blocks()
    }

    fn grown(&self) -> io::Result<u64> {
        self.inner.grown()
    }

    fn extend(&self, blocks: u64) -> io::Result<()> {
        self.inner.extend(blocks)
    }

    fn cut_off(&self, blocks: u64) -> io::Result<()> {
        self.inner.cut_off(blocks)
    }

    fn read(&self, block: u64, buf: &mut [u8]) -> io::Result<()> {
        self.tally.read(buf.len());
        self.inner.read(block, buf)
    }

    fn write_batch(&self, ops: &[WriteOp<'_>]) -> io::Result<()> {
        self.tally.write(ops);
        self.inner.write_batch(ops)
    }

    fn flush(&self) -> io::Result<()> {
        self.tally.flush();
        self.inner.flush()
    }

    fn shares_flushes(&self) -> bool {
        self.inner.shares_flushes()
    }

    fn discard(&self, block: u64, blocks: u64) -> io::Result<()> {
        self.tally.discard(blocks);
        self.inner.discard(block, blocks)
    }

    fn name(&self) -> String {
        self.inner.name()
    }
}
