//! Which chunks a journal holds, found by several threads.
//!
//! The lap from the tail on is cut into pieces. Each is searched by itself, from its first block on, as if a chunk could begin
//! there; what it finds depends on nothing but the blocks. Then one walk from the tail decides what counts: it goes from chunk
//! to chunk, and asks the pieces what begins at a position. Only where a chunk reaches into the next piece can that piece have
//! taken a block for a beginning which is the inside of that chunk: a record may hold bytes that look like a chunk. The walk
//! passes these over, and looks for itself where one of them hides what it needs. So the result is that of a walk of one thread.

use super::Ring;
use super::buffers::Buffer;
use crate::{Error, Result};
use braidfs_format::journal::{CHUNK_MAX_BLOCKS, Chunk, Image, decode_chunk, decode_chunk_within, peek_chunk};
use braidfs_format::{BLOCK_BYTES, BlockAddr, Corrupt};
use braidfs_sync::workers::Workers;
use std::borrow::Cow;
use std::sync::Arc;

/// Blocks of a piece at most: several of the longest chunks, so that little is read twice.
const PIECE_MAX: u64 = 4 * CHUNK_MAX_BLOCKS as u64;

/// How a scan takes what it reads: as it is, but in tests that plant a bug there.
pub trait Reading: Sync {
    /// The bytes of a chunk of so many blocks, before it is decoded.
    fn image<'b>(&self, chunk: &'b [u8], _blocks: u32) -> Cow<'b, [u8]> {
        chunk.into()
    }

    /// A piece that cannot be read.
    ///
    /// # Errors
    /// Always: `Ok` takes it for blank.
    fn unreadable(&self, why: Error) -> Result<()> {
        Err(why)
    }
}

/// The [`Reading`] of everybody.
#[derive(Debug, Clone, Copy)]
pub struct AsItIs;

impl Reading for AsItIs {}

/// A scan of one lap.
pub(super) struct Scan<'r, R> {
    pub ring: &'r Ring,
    /// Where it begins.
    pub tail: u64,
    pub reading: &'r R,
}

/// What begins at a position; nothing where there is none of these.
#[derive(Debug)]
enum Found {
    Whole(Chunk),
    /// The head of a chunk that does not hold.
    Torn,
    /// A whole chunk of this position, a lap or more ahead of what the tail allows.
    Ahead(u64),
}

/// A part of the lap that lies in one run of blocks.
struct Piece {
    /// Its first position.
    first: u64,
    /// The position behind it.
    end: u64,
    /// By rising positions. None of these lies inside a whole chunk before it.
    found: Vec<(u64, Found)>,
}

impl<R: Reading> Scan<'_, R> {
    pub fn run(self, workers: &Workers) -> Result<(Vec<Chunk>, u64)> {
        let pieces = self.ring.pieces(self.tail);
        // a thread starts sooner than so many blocks are read
        let grain = PIECE_MAX / self.ring.piece_blocks();
        let found = workers.each_with(pieces.len(), grain as usize, Window::default, |window, i| {
            let (first, end) = pieces[i];
            self.search(window, first, end)
        })?;
        self.walk(found)
    }

    /// The position behind the lap.
    fn lap(&self) -> u64 {
        self.ring.lap(self.tail)
    }

    fn search(&self, window: &mut Window, first: u64, end: u64) -> Result<Piece> {
        let mut found = Vec::new();
        let mut pos = first;
        while pos < end {
            let here = self.look(window, pos, end)?;
            let step = here.as_ref().map_or(1, Found::blocks);
            found.extend(here.map(|here| (pos, here)));
            pos += step;
        }
        Ok(Piece { first, end, found })
    }

    /// What begins at `pos`, in a piece that ends at `end`.
    fn look(&self, window: &mut Window, pos: u64, end: u64) -> Result<Option<Found>> {
        let Ring { domain, blocks, store, .. } = self.ring;
        let at = pos % blocks;
        let lap = self.lap();
        let block = window.from(self, at, 1, end - pos)?;
        match peek_chunk(block, store.volume, *domain, pos) {
            // what lies past the lap is older
            Some(n) if pos.checked_add(u64::from(n)).is_some_and(|end| end <= lap) => {
                let changed = match self.reading.image(window.from(self, at, u64::from(n), end - pos)?, n) {
                    Cow::Owned(changed) => Some(changed),
                    Cow::Borrowed(_) => None,
                };
                let chunk = match changed {
                    Some(changed) => decode_chunk(&changed, store.volume, *domain, pos),
                    None => window.chunk(self.ring, (at, u64::from(n)), pos),
                };
                Ok(Some(chunk.map_or(Found::Torn, Found::Whole)))
            }
            _ => {
                let said = block.get(16..24).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes);
                if said < lap || said % blocks != at {
                    return Ok(None);
                }
                let Some(n) = peek_chunk(block, store.volume, *domain, said) else { return Ok(None) };
                let whole = window.from(self, at, u64::from(n), end - pos)?;
                Ok(decode_chunk(whole, store.volume, *domain, said).is_ok().then_some(Found::Ahead(said)))
            }
        }
    }

    /// Goes from the tail from chunk to chunk.
    fn walk(&self, pieces: Vec<Piece>) -> Result<(Vec<Chunk>, u64)> {
        let mut window = Window::default();
        let (mut pos, mut out, mut end) = (self.tail, Vec::new(), self.tail);
        for piece in pieces {
            let mut found = piece.found.into_iter().peekable();
            // what the piece did not look at: up to here a chunk reaches that it took to begin in another one
            let mut hidden = piece.first;
            while pos < piece.end {
                while let Some((at, passed)) = found.next_if(|(at, _)| *at < pos) {
                    hidden = at + passed.blocks();
                }
                let here = if pos < hidden {
                    self.look(&mut window, pos, piece.end)?
                } else {
                    let Some((at, next)) = found.next() else { break };
                    pos = at;
                    Some(next)
                };
                let Some(here) = here else {
                    pos += 1;
                    continue;
                };
                let step = here.blocks();
                match here {
                    Found::Whole(c) => {
                        out.push(c);
                        end = pos + step;
                    }
                    // its blocks were taken, so the head lies behind its first one at least
                    Found::Torn => end = pos + 1,
                    Found::Ahead(ahead) => {
                        let why =
                            format!("{}: the journal has position {ahead}, the header {}", self.ring.domain, self.tail);
                        return Err(Corrupt::new("domain header", why).into());
                    }
                }
                pos += step;
            }
            pos = pos.max(piece.end);
        }
        Ok((out, end))
    }
}

impl Ring {
    /// The position behind the lap from `tail` on.
    fn lap(&self, tail: u64) -> u64 {
        tail.saturating_add(self.blocks)
    }

    /// Blocks of a piece, fewer only where the ring or the lap ends.
    fn piece_blocks(&self) -> u64 {
        (self.blocks / 4).clamp(1, PIECE_MAX)
    }

    /// Memory for so many bytes, as large as that for any other piece.
    fn piece_buffer(&self, bytes: usize) -> Buffer {
        self.store.buffers.take(bytes.max(self.piece_blocks() as usize * BLOCK_BYTES))
    }

    /// First positions of the pieces of the lap from `tail` on, and those behind them.
    fn pieces(&self, tail: u64) -> Vec<(u64, u64)> {
        let (blocks, lap) = (self.blocks, self.lap(tail));
        let most = self.piece_blocks();
        let mut pieces = Vec::new();
        let mut first = tail;
        while first < lap {
            let to_end_of_ring = blocks - first % blocks;
            let end = first.saturating_add(most.min(to_end_of_ring)).min(lap);
            pieces.push((first, end));
            first = end;
        }
        pieces
    }
}

impl Found {
    /// How far it is to what may begin behind it.
    fn blocks(&self) -> u64 {
        match self {
            Self::Whole(c) => u64::from(c.blocks),
            Self::Torn | Self::Ahead(_) => 1,
        }
    }
}

/// The part of the ring that a thread has in memory.
#[derive(Default)]
struct Window {
    /// Its first block in the ring.
    first: u64,
    blocks: u64,
    /// Shared with the records that lie in it.
    buf: Option<Arc<Buffer>>,
}

impl Window {
    /// The chunk of `blocks` from block `at` of the ring on, which are in memory. Its records stay in the window's memory, which
    /// is not read to again then; but where that holds hardly more than they are copied.
    fn chunk(&self, ring: &Ring, (at, blocks): (u64, u64), pos: u64) -> std::result::Result<Chunk, Corrupt> {
        let (volume, domain) = (ring.store.volume, ring.domain);
        let from = (at - self.first) as usize * BLOCK_BYTES;
        let to = (at - self.first + blocks).min(self.blocks) as usize * BLOCK_BYTES;
        match &self.buf {
            Some(buf) if self.blocks >= ring.piece_blocks() / 2 => {
                let image: Image = buf.clone();
                decode_chunk_within(&image, from..to, volume, domain, pos)
            }
            buf => decode_chunk(buf.as_ref().map_or(&[], |buf| &(**buf).as_ref()[from..to]), volume, domain, pos),
        }
    }

    /// The ring from block `at` on: at least `blocks`, fewer only where the ring ends. Where they are not in memory, all of
    /// `ahead` are read, which are wanted next. Whoever goes beyond these twice has met a torn chunk, and may meet one in each
    /// block up to there: then all that they can claim is read at once, and not anew for each.
    fn from<R: Reading>(&mut self, scan: &Scan<'_, R>, at: u64, blocks: u64, ahead: u64) -> Result<&[u8]> {
        let ring = scan.ring;
        let in_memory = self.first..self.first + self.blocks;
        if at < in_memory.start || (at + blocks).min(ring.blocks) > in_memory.end {
            let again = in_memory.contains(&at) && in_memory.end > at + ahead;
            let wanted = if again { ahead + u64::from(CHUNK_MAX_BLOCKS) } else { ahead };
            let n = blocks.max(wanted).min(ring.blocks - at);
            let bytes = n as usize * BLOCK_BYTES;
            // nothing is known of it after an error
            self.blocks = 0;
            // that of before, where no records lie in it
            let free = self.buf.take().and_then(Arc::into_inner).filter(|buf| buf.as_ref().len() >= bytes);
            let mut buf = free.unwrap_or_else(|| ring.piece_buffer(bytes));
            let to = &mut buf.bytes_mut()[..bytes];
            if let Err(why) = ring.store.read(BlockAddr(ring.start.0 + at), to) {
                scan.reading.unreadable(why)?;
                to.fill(0);
            }
            (self.first, self.blocks, self.buf) = (at, n, Some(Arc::new(buf)));
        }
        let from = (at - self.first) as usize * BLOCK_BYTES;
        Ok(self.buf.as_ref().map_or(&[], |buf| &(**buf).as_ref()[from..self.blocks as usize * BLOCK_BYTES]))
    }
}
