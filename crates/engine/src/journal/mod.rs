//! The journal of one domain: a ring of blocks.
//!
//! Owns the ring's head and tail. Positions count blocks and never wrap (`braidfs_format::journal`). Space between tail
//! and head belongs to chunks that recovery may still need; [`Journal::release`] moves the tail once a checkpoint is
//! durable. Lock rank: leaf.

use crate::error::Result;
use crate::planted::{Bug, planted};
use crate::store::Store;
use braidfs_format::domain::DomainHeader;
use braidfs_format::journal::Chunk;
use braidfs_format::{BLOCK_BYTES, BlockAddr, DomainId};
use braidfs_store::ring::{Reading, Ring};
use braidfs_sync::workers::Workers;
use braidfs_sync::{Mutex, rank};
use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Debug, Clone, Copy)]
struct Ends {
    head: u64,
    tail: u64,
}

impl Ends {
    /// Where a chunk goes in a ring of `size` blocks of which at most `most` may be in use.
    fn next(self, blocks: u32, size: u64, most: u64) -> Option<u64> {
        let (n, in_ring) = (u64::from(blocks), self.head % size);
        // a chunk does not wrap: the end of the ring stays unused
        let pos = if in_ring + n > size { self.head + (size - in_ring) } else { self.head };
        (pos + n - self.tail <= most.min(size)).then_some(pos)
    }
}

/// See the module.
#[derive(Debug)]
pub struct Journal {
    ring: Ring,
    ends: Mutex<Ends, rank::JournalRing>,
    /// `head - tail`, for those who only look: every operation does.
    used: AtomicU64,
}

impl Journal {
    /// The journal that `header` describes, its head where the header says.
    pub fn open(store: Arc<Store>, domain: DomainId, header: &DomainHeader) -> Self {
        let ends = Ends { head: header.head_pos.get(), tail: header.tail_pos.get() };
        let used = AtomicU64::new(ends.head.saturating_sub(ends.tail));
        Self { ring: Ring::new(store, domain, header), used, ends: Mutex::new(ends) }
    }

    /// Size in blocks.
    pub fn blocks(&self) -> u64 {
        self.ring.blocks()
    }
    /// Blocks between tail and head.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }
    /// Where the next chunk goes at the earliest.
    pub fn head(&self) -> u64 {
        self.ends.lock().head
    }
    /// Oldest position still needed.
    pub fn tail(&self) -> u64 {
        self.ends.lock().tail
    }

    /// Takes `blocks` neighbouring blocks; their position, or `None` where more than `most` would be in use then. Decided when
    /// they are taken: of several that looked before, each found room.
    pub fn take_below(&self, blocks: u32, most: u64) -> Option<u64> {
        let mut r = self.ends.lock();
        let pos = r.next(blocks, self.ring.blocks(), most)?;
        r.head = pos + u64::from(blocks);
        self.used.store(r.head - r.tail, Ordering::Relaxed);
        Some(pos)
    }

    /// Whether so many neighbouring blocks could be taken.
    pub fn has_room(&self, blocks: u32) -> bool {
        let size = self.ring.blocks();
        self.ends.lock().next(blocks, size, size).is_some()
    }

    /// The tail may move to `pos`: everything before is in the home tables.
    pub fn release(&self, pos: u64) {
        let mut r = self.ends.lock();
        assert!(pos <= r.head && pos >= r.tail, "journal tail {} to {pos}, head {}", r.tail, r.head);
        r.tail = pos;
        self.used.store(r.head - r.tail, Ordering::Relaxed);
    }

    /// After the scan: the head goes behind everything found.
    pub fn set_head(&self, pos: u64) {
        let mut r = self.ends.lock();
        r.head = pos;
        self.used.store(r.head.saturating_sub(r.tail), Ordering::Relaxed);
    }

    /// Block address of a position.
    pub fn addr(&self, pos: u64) -> BlockAddr {
        self.ring.addr(pos)
    }

    /// Whether `addr` lies in the journal.
    pub fn contains(&self, addr: BlockAddr) -> bool {
        self.ring.contains(addr)
    }

    /// Whether a chunk lies at the head, where the header says that nothing was written yet: a later header is lost.
    ///
    /// # Errors
    /// Of the device.
    pub fn goes_on(&self) -> Result<bool> {
        Ok(self.ring.goes_on(self.head())?)
    }

    /// Every whole chunk from the tail on, in the order of positions, and the position behind the last one
    /// ([`Ring::scan`]).
    ///
    /// # Errors
    /// Of the device; `Corrupt` where the tail is one of an older header: the chunks from there on were overwritten.
    pub fn scan(&self, workers: &Workers) -> Result<(Vec<Chunk>, u64)> {
        Ok(self.ring.scan(self.tail(), workers, &Planted)?)
    }

    /// Traces of chunks that a crash cut off, or damage ([`Ring::traces`]).
    ///
    /// # Errors
    /// Of the device.
    pub fn traces(&self, chunks: &[Chunk], end: u64, last: u64) -> Result<Vec<String>> {
        Ok(self.ring.traces(self.tail(), chunks, end, last)?)
    }
}

/// As it is, but for the planted bugs.
struct Planted;

impl Reading for Planted {
    /// With [`Bug::TornAccepted`] every checksum holds.
    fn image<'b>(&self, chunk: &'b [u8], blocks: u32) -> Cow<'b, [u8]> {
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

    fn unreadable(&self, why: braidfs_store::Error) -> braidfs_store::Result<()> {
        if planted(Bug::UnreadableBlank) { Ok(()) } else { Err(why) }
    }
}
