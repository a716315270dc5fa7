//! Reading the journal of one domain: a ring of blocks, and the chunks that lie in it.
//!
//! Positions count blocks and never wrap (`braidfs_format::journal`). Nothing here is changed or remembered: who writes
//! the journal owns its head and tail.

use crate::{Result, Store};
use braidfs_format::domain::DomainHeader;
use braidfs_format::journal::{CHUNK_MAX_BLOCKS, Chunk, ChunkKind, decode_chunk, peek_chunk};
use braidfs_format::{BLOCK_BYTES, BlockAddr, Corrupt, DomainId};
use std::borrow::Cow;
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

    /// The position of the whole chunk at `at` in the ring, where that is a lap or more ahead of what the tail allows.
    fn ahead(&self, window: &mut Window<'_>, at: u64, tail: u64) -> Result<Option<u64>> {
        let block = window.from(at, 1)?;
        let pos = block.get(16..24).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes);
        if pos < tail.saturating_add(self.blocks) || pos % self.blocks != at {
            return Ok(None);
        }
        let Some(n) = peek_chunk(block, self.store.volume, self.domain, pos) else { return Ok(None) };
        let whole = decode_chunk(window.from(at, u64::from(n))?, self.store.volume, self.domain, pos).is_ok();
        Ok(whole.then_some(pos))
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
    /// missing chunks are passed over: the time is bounded by the journal's size. `image` may change the bytes of a
    /// chunk of so many blocks before it is decoded, for tests that plant a bug there.
    ///
    /// # Errors
    /// Of the device; `Corrupt` where the tail is one of an older header: the chunks from there on were overwritten.
    pub fn scan(&self, tail: u64, image: impl Fn(&[u8], u32) -> Cow<'_, [u8]>) -> Result<(Vec<Chunk>, u64)> {
        let mut window = Window { ring: self, first: 0, buf: Vec::new() };
        let (mut pos, mut out, mut end) = (tail, Vec::new(), tail);
        while pos < tail + self.blocks {
            let at = pos % self.blocks;
            let peeked = peek_chunk(window.from(at, 1)?, self.store.volume, self.domain, pos);
            let step = match peeked {
                // what lies past the lap is older
                Some(n) if pos + u64::from(n) <= tail + self.blocks => {
                    let whole = image(window.from(at, u64::from(n))?, n);
                    match decode_chunk(&whole, self.store.volume, self.domain, pos) {
                        Ok(c) => {
                            out.push(c);
                            end = pos + u64::from(n);
                            u64::from(n)
                        }
                        Err(_) => {
                            // torn: its blocks were taken, so the head lies behind its first one at least
                            end = pos + 1;
                            1
                        }
                    }
                }
                _ => {
                    if let Some(ahead) = self.ahead(&mut window, at, tail)? {
                        let why = format!("{}: the journal has position {ahead}, the header {tail}", self.domain);
                        return Err(Corrupt::new("domain header", why).into());
                    }
                    1
                }
            };
            pos += step;
        }
        Ok((out, end))
    }
}

/// The part of the ring that [`Ring::scan`] has in memory.
struct Window<'r> {
    ring: &'r Ring,
    /// Its first block in the ring.
    first: u64,
    buf: Vec<u8>,
}

impl Window<'_> {
    /// The ring from block `at` on: at least `blocks`, fewer only where the ring ends.
    fn from(&mut self, at: u64, blocks: u64) -> Result<&[u8]> {
        // several of the longest chunks, so that blocks are not read over and over whatever chunks say of their length
        const PIECE_MAX: u64 = 4 * CHUNK_MAX_BLOCKS as u64;
        let r = self.ring;
        let piece = (r.blocks / 4).min(PIECE_MAX);
        let end = self.first + (self.buf.len() / BLOCK_BYTES) as u64;
        if at < self.first || (at + blocks).min(r.blocks) > end {
            let n = blocks.max(piece).min(r.blocks - at);
            self.buf.resize(n as usize * BLOCK_BYTES, 0);
            r.store.read(BlockAddr(r.start.0 + at), &mut self.buf)?;
            self.first = at;
        }
        Ok(&self.buf[(at - self.first) as usize * BLOCK_BYTES..])
    }
}
