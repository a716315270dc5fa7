//! The journal of one domain: a ring of blocks.
//!
//! Owns the ring's head and tail. Positions count blocks and never wrap (`braidfs_format::journal`). Space between tail
//! and head belongs to chunks that recovery may still need; [`Journal::release`] moves the tail once a checkpoint is
//! durable. Lock rank: leaf.

use crate::error::Result;
use crate::planted::{Bug, planted};
use crate::store::Store;
use braidfs_format::domain::DomainHeader;
use braidfs_format::journal::{CHUNK_MAX_BLOCKS, Chunk, ChunkKind, decode_chunk, peek_chunk};
use braidfs_format::{BLOCK_BYTES, BlockAddr, Corrupt, DomainId};
use braidfs_sync::Mutex;
use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Debug, Clone, Copy)]
struct Ring {
    head: u64,
    tail: u64,
}

/// See the module.
#[derive(Debug)]
pub struct Journal {
    store: Arc<Store>,
    domain: DomainId,
    start: BlockAddr,
    blocks: u64,
    ring: Mutex<Ring>,
    /// `head - tail`, for those who only look: every operation does.
    used: AtomicU64,
}

impl Journal {
    /// The journal that `header` describes, its head where the header says.
    pub fn open(store: Arc<Store>, domain: DomainId, header: &DomainHeader) -> Self {
        let ring = Ring { head: header.head_pos.get(), tail: header.tail_pos.get() };
        Self {
            store,
            domain,
            start: BlockAddr(header.journal_start.get()),
            blocks: u64::from(header.journal_blocks.get()),
            used: AtomicU64::new(ring.head.saturating_sub(ring.tail)),
            ring: Mutex::new(ring),
        }
    }

    /// Size in blocks.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }
    /// Blocks between tail and head.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }
    /// Where the next chunk goes at the earliest.
    pub fn head(&self) -> u64 {
        self.ring.lock().head
    }
    /// Oldest position still needed.
    pub fn tail(&self) -> u64 {
        self.ring.lock().tail
    }

    /// Takes `blocks` neighbouring blocks; their position, or `None` where the ring is too full.
    pub fn take(&self, blocks: u32) -> Option<u64> {
        let n = u64::from(blocks);
        let mut r = self.ring.lock();
        let in_ring = r.head % self.blocks;
        // a chunk does not wrap: the end of the ring stays unused
        let pos = if in_ring + n > self.blocks { r.head + (self.blocks - in_ring) } else { r.head };
        if pos + n - r.tail > self.blocks {
            return None;
        }
        r.head = pos + n;
        self.used.store(r.head - r.tail, Ordering::Relaxed);
        Some(pos)
    }

    /// The tail may move to `pos`: everything before is in the home tables.
    pub fn release(&self, pos: u64) {
        let mut r = self.ring.lock();
        assert!(pos <= r.head && pos >= r.tail, "journal tail {} to {pos}, head {}", r.tail, r.head);
        r.tail = pos;
        self.used.store(r.head - r.tail, Ordering::Relaxed);
    }

    /// After the scan: the head goes behind everything found.
    pub fn set_head(&self, pos: u64) {
        let mut r = self.ring.lock();
        r.head = pos;
        self.used.store(r.head.saturating_sub(r.tail), Ordering::Relaxed);
    }

    /// Block address of a position.
    pub fn addr(&self, pos: u64) -> BlockAddr {
        BlockAddr(self.start.0 + pos % self.blocks)
    }

    /// Whether `addr` lies in the journal.
    pub fn contains(&self, addr: BlockAddr) -> bool {
        (self.start.0..self.start.0 + self.blocks).contains(&addr.0)
    }

    /// Whether a chunk lies at the head, where the header says that nothing was written yet: a later header is lost.
    ///
    /// # Errors
    /// Of the device.
    pub fn goes_on(&self) -> Result<bool> {
        let head = self.head();
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

    /// What lies behind the tail and is no whole chunk, where a writer may have left one: cut off by a crash, or damaged.
    /// `chunks` and `end` are what [`Self::scan`] found, `last` is the newest transaction known before them.
    ///
    /// # Errors
    /// Of the device.
    pub fn traces(&self, chunks: &[Chunk], end: u64, last: u64) -> Result<Vec<String>> {
        let mut out = Vec::new();
        let mut note = |pos: u64, what: &str| {
            let why = "cut off by the crash, or damaged; if damaged, what was synced with it is lost";
            out.push(format!("journal of {}, position {pos}: {what}: {why}", self.domain));
        };
        let mut next = self.tail();
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

    /// Every whole chunk from the tail on, in the order of positions, and the position behind the last one. Torn and
    /// missing chunks are passed over: the time is bounded by the journal's size.
    ///
    /// # Errors
    /// Of the device; `Corrupt` where the tail is one of an older header: the chunks from there on were overwritten.
    pub fn scan(&self) -> Result<(Vec<Chunk>, u64)> {
        let mut window = Window { journal: self, first: 0, buf: Vec::new() };
        let tail = self.tail();
        let (mut pos, mut out, mut end) = (tail, Vec::new(), tail);
        while pos < tail + self.blocks {
            let at = pos % self.blocks;
            let peeked = peek_chunk(window.from(at, 1)?, self.store.volume, self.domain, pos);
            let step = match peeked {
                // what lies past the lap is older
                Some(n) if pos + u64::from(n) <= tail + self.blocks => {
                    let whole = window.from(at, u64::from(n))?;
                    let whole = forged(whole, n);
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

/// The part of the ring that [`Journal::scan`] has in memory.
struct Window<'j> {
    journal: &'j Journal,
    /// Its first block in the ring.
    first: u64,
    buf: Vec<u8>,
}

impl Window<'_> {
    /// The ring from block `at` on: at least `blocks`, fewer only where the ring ends.
    fn from(&mut self, at: u64, blocks: u64) -> Result<&[u8]> {
        // several of the longest chunks, so that blocks are not read over and over whatever chunks say of their length
        const PIECE_MAX: u64 = 4 * CHUNK_MAX_BLOCKS as u64;
        let j = self.journal;
        let piece = (j.blocks / 4).min(PIECE_MAX);
        let end = self.first + (self.buf.len() / BLOCK_BYTES) as u64;
        if at < self.first || (at + blocks).min(j.blocks) > end {
            let n = blocks.max(piece).min(j.blocks - at);
            self.buf.resize(n as usize * BLOCK_BYTES, 0);
            j.store.read(BlockAddr(j.start.0 + at), &mut self.buf)?;
            self.first = at;
        }
        Ok(&self.buf[(at - self.first) as usize * BLOCK_BYTES..])
    }
}

/// As it is; with the planted bug [`Bug::TornAccepted`] a checksum that holds.
fn forged(chunk: &[u8], blocks: u32) -> Cow<'_, [u8]> {
    match chunk.get(..blocks as usize * BLOCK_BYTES) {
        Some(whole) if planted(Bug::TornAccepted) => {
            let mut v = whole.to_vec();
            let crc = braidfs_format::block::checksum(&v);
            v[4..8].copy_from_slice(&crc.to_le_bytes());
            v.into()
        }
        _ => chunk.into(),
    }
}
