//! A device made for one recovery: a shared image with a few blocks replaced, which notes what is read and written.
//!
//! Crash tests mount thousands of images that differ in a few blocks. Making one costs a table of these blocks and
//! nothing else. Of the blocks in the table it notes the order in which they are first read before they are
//! overwritten: two images that agree in these give the same recovery, provided that it does not depend on anything
//! else. It also keeps the log of writes and flushes, so that a crash of the recovery itself can be tested.
//! One lock; not meant for many threads.

use crate::{BLOCK_BYTES, Device, Event, Image, WriteOp, check_discard, check_ops, check_range};
use braidfs_sync::device::Mutex;
use braidfs_sync::rank;
use foldhash::fast::FixedState;
use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// What a block of the table holds.
#[derive(Debug, Clone)]
pub enum BlockContent {
    /// What the image has there.
    AsImage,
    /// As after a discard ([`Image::discarded`]).
    Discarded,
    /// A block-sized part of some bytes, from this offset on.
    Bytes(Arc<[u8]>, usize),
}

#[derive(Debug)]
struct Slot {
    content: BlockContent,
    /// Given at the start, neither read nor overwritten since.
    fresh: bool,
}

#[derive(Debug, Default)]
struct State {
    table: HashMap<u64, Slot, FixedState>,
    reads: Vec<u64>,
    log: Vec<Event>,
}

/// See the module.
#[derive(Debug)]
pub struct TraceDevice {
    image: Image,
    state: Mutex<State, rank::Trace>,
}

impl TraceDevice {
    /// `image` with some blocks replaced; reads of these are noted.
    pub fn new(image: Image, blocks: impl IntoIterator<Item = (u64, BlockContent)>) -> Self {
        let table = blocks.into_iter().map(|(b, content)| (b, Slot { content, fresh: true })).collect();
        Self { image, state: Mutex::new(State { table, ..State::default() }) }
    }

    /// The replaced blocks that were read before they were overwritten, in the order of the first reads.
    pub fn reads(&self) -> Vec<u64> {
        self.state.lock().reads.clone()
    }

    /// Number of events in the log.
    pub fn log_len(&self) -> usize {
        self.state.lock().log.len()
    }

    /// All writes, discards and flushes.
    pub fn log(&self) -> Vec<Event> {
        self.state.lock().log.clone()
    }

    pub(crate) fn record_flush(&self, blocks: Range<u64>) -> io::Result<()> {
        let mut state = self.state.lock();
        let covers = state.log.len();
        state.log.push(Event::Flush { covers, blocks, thread: 0 });
        Ok(())
    }
}

impl State {
    fn put(&mut self, block: u64, content: BlockContent) {
        self.table.insert(block, Slot { content, fresh: false });
    }
}

impl Device for TraceDevice {
    fn blocks(&self) -> u64 {
        self.image.blocks()
    }

    fn read(&self, block: u64, buf: &mut [u8]) -> io::Result<()> {
        check_range(self.blocks(), block, buf.len(), io::ErrorKind::UnexpectedEof)?;
        let mut state = self.state.lock();
        let State { table, reads, .. } = &mut *state;
        for (b, out) in (block..).zip(buf.chunks_mut(BLOCK_BYTES)) {
            let Some(slot) = table.get_mut(&b) else {
                self.image.read_block(b, out);
                continue;
            };
            if std::mem::take(&mut slot.fresh) {
                reads.push(b);
            }
            match &slot.content {
                BlockContent::AsImage => self.image.read_block(b, out),
                BlockContent::Discarded => out.fill(self.image.discarded()),
                BlockContent::Bytes(data, at) => out.copy_from_slice(&data[*at..at + BLOCK_BYTES]),
            }
        }
        Ok(())
    }

    fn write_batch(&self, ops: &[WriteOp<'_>]) -> io::Result<()> {
        check_ops(self.blocks(), ops)?;
        let mut state = self.state.lock();
        for op in ops {
            let data: Arc<[u8]> = match &op.bufs[..] {
                [one] => Arc::from(*one),
                many => Arc::from(many.concat()),
            };
            for (b, at) in (op.block..).zip((0..data.len()).step_by(BLOCK_BYTES)) {
                state.put(b, BlockContent::Bytes(data.clone(), at));
            }
            if !data.is_empty() {
                state.log.push(Event::Write { block: op.block, data, thread: 0 });
            }
        }
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        self.record_flush(0..self.blocks())
    }

    fn discard(&self, block: u64, blocks: u64) -> io::Result<()> {
        check_discard(self.blocks(), block, blocks)?;
        let mut state = self.state.lock();
        for b in block..block + blocks {
            state.put(b, BlockContent::Discarded);
        }
        if blocks > 0 {
            state.log.push(Event::Discard { block, blocks, thread: 0 });
        }
        Ok(())
    }

    fn name(&self) -> String {
        "crash image".into()
    }
}
