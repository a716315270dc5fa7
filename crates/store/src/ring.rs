//! Reading the journal of one domain: a ring of blocks, and the chunks that lie in it.
//!
//! Positions count blocks and never wrap (`braidfs_format::journal`). Nothing here is changed or remembered: who writes
//! the journal owns its head and tail.

mod buffers;
mod scan;

use crate::{Result, Store};
use braidfs_format::domain::DomainHeader;
use braidfs_format::journal::{Chunk, ChunkKind, peek_chunk};
use braidfs_format::{BLOCK_BYTES, BlockAddr, DomainId};
use braidfs_sync::workers::Workers;
pub(crate) use buffers::Buffers;
pub use scan::{AsItIs, Reading};
use std::sync::Arc;

/// The blocks of a journal.
#[derive(Debug, Clone)]
pub struct Ring {
    store: Arc<Store>,
    domain: DomainId,
    start: BlockAddr,
    blocks: u64,
}

impl Ring {
    /// The ring of the journal that `header` describes.
    pub fn new(store: Arc<Store>, domain: DomainId, header: &DomainHeader) -> Self {
        let start = BlockAddr(header.journal_start.get());
        Self { store, domain, start, blocks: u64::from(header.journal_blocks.get()) }
    }

    /// Size in blocks.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Block address of a position.
    pub fn addr(&self, pos: u64) -> BlockAddr {
        BlockAddr(self.start.0 + pos % self.blocks)
    }

    /// Whether `addr` lies in the ring.
    pub fn contains(&self, addr: BlockAddr) -> bool {
        (self.start.0..self.start.0 + self.blocks).contains(&addr.0)
    }

    /// Whether a chunk lies at `head`, where the header says that nothing was written yet: a later header is lost.
    ///
    /// # Errors
    /// Of the device.
    pub fn goes_on(&self, head: u64) -> Result<bool> {
        // a chunk that does not fit the rest of the ring goes to its start
        for pos in [head, head.next_multiple_of(self.blocks)] {
            let mut block = vec![0u8; BLOCK_BYTES];
            self.store.read(self.addr(pos), &mut block)?;
            if peek_chunk(&block, self.store.volume, self.domain, pos).is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// What lies behind `tail` and is no whole chunk, where a writer may have left one: cut off by a crash, or damaged.
    /// `chunks` and `end` are what [`Self::scan`] found, `last` is the newest transaction known before them.
    ///
    /// # Errors
    /// Of the device.
    pub fn traces(&self, tail: u64, chunks: &[Chunk], end: u64, last: u64) -> Result<Vec<String>> {
        let mut out = Vec::new();
        let mut note = |pos: u64, what: &str| {
            let why = "cut off by the crash, or damaged; if damaged, what was synced with it is lost";
            out.push(format!("journal of {}, position {pos}: {what}: {why}", self.domain));
        };
        let mut next = tail;
        for c in chunks {
            // the end of the ring may stay unused
            if c.pos != next && c.pos % self.blocks != 0 {
                note(next, "a chunk is missing");
            }
            next = c.pos + u64::from(c.blocks);
        }
        let mut block = vec![0u8; BLOCK_BYTES];
        self.store.read(self.addr(next), &mut block)?;
        // in later laps there may be any part of an older chunk
        if end > next || next < self.blocks && block.iter().any(|b| *b != 0) {
            note(next, "a chunk does not hold");
        }
        let commits = chunks.iter().filter(|c| c.kind == ChunkKind::Commit);
        let newest = commits.map(|c| c.tx.0).max().unwrap_or(0).max(last);
        if let Some(c) = chunks.iter().find(|c| c.kind == ChunkKind::Stream && c.tx.0 > newest) {
            note(c.pos, &format!("transaction {} has no commit record", c.tx.0));
        }
        Ok(out)
    }

    /// Every whole chunk from `tail` on, in the order of positions, and the position behind the last one. Torn and
    /// missing chunks are passed over, so that all of the ring is read: the time is bounded by the journal's size.
    ///
    /// # Errors
    /// Of the device, wherever in the ring: what cannot be read is neither blank nor the end. `Corrupt` where the tail is one
    /// of an older header: the chunks from there on were overwritten.
    pub fn scan(&self, tail: u64, workers: &Workers, reading: &impl Reading) -> Result<(Vec<Chunk>, u64)> {
        scan::Scan { ring: self, tail, reading }.run(workers)
    }
}
