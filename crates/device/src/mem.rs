//! Memory as a device, and cheap copies of whole devices.
//!
//! An [`Image`] is a table of chunks of pages, shared copy-on-write: a clone costs one reference per chunk,
//! a first write after it one chunk table and one page. Pages that were never written are zeros, or the pattern of a soiled
//! image, and take no memory. Locks of a [`MemDevice`]: one per chunk, a leaf; a write is atomic per chunk, not beyond.

use crate::{BLOCK_BYTES, BlockContent, Device, SECTOR_BYTES, WriteOp, check_discard, check_ops, check_range};
use braidfs_sync::device::RwLock;
use braidfs_sync::rank;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

/// Blocks of a chunk.
const CHUNK_BLOCKS: usize = 128;

/// Bytes of a soiled image that nobody wrote: what a disk has that was in use before.
const OLD: u8 = 0xa5;
/// Bytes of a soiled image that were discarded, and not written since.
const DISCARDED: u8 = 0x5a;

/// The content of one block: a block-sized part of `data`, which may be shared with a log or other images.
#[derive(Debug, Clone)]
pub(crate) struct Page {
    data: Arc<[u8]>,
    at: usize,
}

impl Page {
    fn copy_of(bytes: &[u8]) -> Self {
        Self { data: Arc::from(bytes), at: 0 }
    }

    fn bytes(&self) -> &[u8] {
        &self.data[self.at..self.at + BLOCK_BYTES]
    }
}

type Chunk = [Option<Page>; CHUNK_BLOCKS];

/// The chunk of `slot` for a change of it, made if it is not there.
fn chunk_mut(slot: &mut Option<Arc<Chunk>>) -> &mut Chunk {
    Arc::make_mut(slot.get_or_insert_with(|| Arc::new([const { None }; CHUNK_BLOCKS])))
}

/// Pages of a soiled image that were discarded. They are shared by all.
static DISCARDED_CHUNK: LazyLock<Arc<Chunk>> = LazyLock::new(|| {
    let page = Page::copy_of(&[DISCARDED; BLOCK_BYTES]);
    Arc::new(std::array::from_fn(|_| Some(page.clone())))
});

/// `old`: the bytes of what was never written.
fn read_page(chunk: Option<&Chunk>, i: usize, old: u8, out: &mut [u8]) {
    match chunk.and_then(|c| c[i].as_ref()) {
        Some(page) => out.copy_from_slice(page.bytes()),
        None => out.fill(old),
    }
}

/// Discards `pages` of a chunk.
fn discard_pages(slot: &mut Option<Arc<Chunk>>, pages: Range<usize>, soiled: bool) {
    match (soiled, pages.len()) {
        (false, CHUNK_BLOCKS) => *slot = None,
        (true, CHUNK_BLOCKS) => *slot = Some(DISCARDED_CHUNK.clone()),
        (false, _) if slot.is_none() => {}
        _ => {
            let page = soiled.then(|| DISCARDED_CHUNK[0].clone()).flatten();
            chunk_mut(slot)[pages].fill(page);
        }
    }
}

fn write_page(chunk: &mut Chunk, i: usize, bytes: &[u8]) {
    if let Some(page) = &mut chunk[i]
        && page.data.len() == BLOCK_BYTES
        && let Some(own) = Arc::get_mut(&mut page.data)
    {
        own.copy_from_slice(bytes);
    } else {
        chunk[i] = Some(Page::copy_of(bytes));
    }
}

fn chunk_of(block: u64) -> (usize, usize) {
    ((block / CHUNK_BLOCKS as u64) as usize, (block % CHUNK_BLOCKS as u64) as usize)
}

/// The chunks that some blocks lie in, and which pages of each they are.
fn pages_of(blocks: Range<u64>) -> impl Iterator<Item = (usize, Range<usize>)> {
    let mut at = blocks.start;
    std::iter::from_fn(move || {
        let (c, first) = chunk_of(at);
        let n = blocks.end.saturating_sub(at).min((CHUNK_BLOCKS - first) as u64);
        at += n;
        (n > 0).then_some((c, first..first + n as usize))
    })
}

fn chunk_count(blocks: u64) -> usize {
    blocks.div_ceil(CHUNK_BLOCKS as u64) as usize
}

/// The content of a device at one moment. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Image {
    blocks: u64,
    soiled: bool,
    chunks: Vec<Option<Arc<Chunk>>>,
}

impl Image {
    /// `blocks` blocks of zeros, which take no memory.
    pub fn new(blocks: u64) -> Self {
        Self { blocks, soiled: false, chunks: vec![None; chunk_count(blocks)] }
    }

    /// `blocks` blocks of a disk that was in use before: what was never written reads as bytes 0xa5, what was discarded as 0x5a.
    /// They take no memory, either.
    pub fn soiled(blocks: u64) -> Self {
        Self { soiled: true, ..Self::new(blocks) }
    }

    /// What was never written reads as bytes of this.
    fn old(&self) -> u8 {
        if self.soiled { OLD } else { 0 }
    }

    /// What was discarded reads as bytes of this.
    pub fn discarded(&self) -> u8 {
        if self.soiled { DISCARDED } else { 0 }
    }

    /// Number of blocks.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Reads whole blocks.
    ///
    /// # Errors
    /// `UnexpectedEof` past the end, `InvalidInput` for a part of a block.
    pub fn read(&self, block: u64, buf: &mut [u8]) -> io::Result<()> {
        check_range(self.blocks, block, buf.len(), io::ErrorKind::UnexpectedEof)?;
        for (b, out) in (block..).zip(buf.chunks_mut(BLOCK_BYTES)) {
            let (c, i) = chunk_of(b);
            read_page(self.chunks[c].as_deref(), i, self.old(), out);
        }
        Ok(())
    }

    /// Writes whole blocks.
    ///
    /// # Errors
    /// `InvalidInput` past the end or for a part of a block.
    pub fn write(&mut self, block: u64, buf: &[u8]) -> io::Result<()> {
        check_range(self.blocks, block, buf.len(), io::ErrorKind::InvalidInput)?;
        for (b, bytes) in (block..).zip(buf.chunks(BLOCK_BYTES)) {
            let (c, i) = chunk_of(b);
            write_page(chunk_mut(&mut self.chunks[c]), i, bytes);
        }
        Ok(())
    }

    /// As [`Image::write`], but refers to `data` instead of copying it.
    ///
    /// # Errors
    /// As [`Image::write`].
    pub fn share(&mut self, block: u64, data: &Arc<[u8]>) -> io::Result<()> {
        check_range(self.blocks, block, data.len(), io::ErrorKind::InvalidInput)?;
        for (b, at) in (block..).zip((0..data.len()).step_by(BLOCK_BYTES)) {
            self.share_block(b, data, at);
        }
        Ok(())
    }

    /// One block, which lies within.
    pub(crate) fn read_block(&self, block: u64, out: &mut [u8]) {
        let (c, i) = chunk_of(block);
        read_page(self.chunks[c].as_deref(), i, self.old(), out);
    }

    /// Replaces a block of the device.
    ///
    /// # Panics
    /// Where it lies past the end.
    pub fn put(&mut self, block: u64, content: &BlockContent) {
        assert!(block < self.blocks, "block {block} of {}", self.blocks);
        match content {
            BlockContent::AsImage => {}
            BlockContent::Discarded => self.discard(block, 1),
            BlockContent::Bytes(data, at) => self.share_block(block, data, *at),
        }
    }

    /// Makes `block` refer to the block of `data` at byte `at`. Both lie within.
    pub(crate) fn share_block(&mut self, block: u64, data: &Arc<[u8]>, at: usize) {
        let (c, i) = chunk_of(block);
        chunk_mut(&mut self.chunks[c])[i] = Some(Page { data: data.clone(), at });
    }

    /// Replaces those of the eight sectors of `block` (within the device) whose bit is set.
    pub(crate) fn overlay(&mut self, block: u64, bytes: &[u8], sectors: u8) {
        let (c, i) = chunk_of(block);
        let mut merged = [0; BLOCK_BYTES];
        read_page(self.chunks[c].as_deref(), i, self.old(), &mut merged);
        let pairs = merged.chunks_mut(SECTOR_BYTES).zip(bytes.chunks(SECTOR_BYTES));
        for (s, (to, from)) in pairs.enumerate() {
            if sectors & (1 << s) != 0 {
                to.copy_from_slice(from);
            }
        }
        write_page(chunk_mut(&mut self.chunks[c]), i, &merged);
    }

    /// Discards blocks; what lies past the end is ignored.
    pub fn discard(&mut self, block: u64, blocks: u64) {
        for (c, pages) in pages_of(block..block.saturating_add(blocks).min(self.blocks)) {
            discard_pages(&mut self.chunks[c], pages, self.soiled);
        }
    }

    /// The same content in memory of its own, page by page: what refers to a part of something longer keeps all of that.
    pub fn compact(&self) -> Self {
        let mut out = Self { chunks: vec![None; self.chunks.len()], ..*self };
        for (old, new) in self.chunks.iter().zip(&mut out.chunks) {
            let Some(old) = old else { continue };
            let page = |p: &Page| if p.data.len() == BLOCK_BYTES { p.clone() } else { Page::copy_of(p.bytes()) };
            *new = Some(Arc::new(std::array::from_fn(|i| old[i].as_ref().map(page))));
        }
        out
    }

    /// The blocks that were ever written (of a soiled image: or discarded), rising.
    pub fn used(&self) -> impl Iterator<Item = u64> + '_ {
        self.chunks.iter().enumerate().filter_map(|(c, chunk)| Some((c, chunk.as_ref()?))).flat_map(|(c, chunk)| {
            (0..CHUNK_BLOCKS).filter(|&i| chunk[i].is_some()).map(move |i| (c * CHUNK_BLOCKS + i) as u64)
        })
    }

    /// Writes all of it that was ever written to `device`, e.g. to look at a crash image with other tools.
    ///
    /// # Errors
    /// Of the device, or where it is smaller.
    pub fn copy_to(&self, device: &dyn Device) -> io::Result<()> {
        let mut buf = crate::AlignedBuf::zeroed(BLOCK_BYTES);
        for block in self.used() {
            self.read(block, &mut buf)?;
            device.write(block, &buf)?;
        }
        device.flush()
    }

    /// The content of `device`, blocks of zeros left out.
    ///
    /// # Errors
    /// Of the device.
    pub fn copy_of(device: &dyn Device) -> io::Result<Self> {
        let mut image = Self::new(device.blocks());
        let mut buf = crate::AlignedBuf::zeroed(BLOCK_BYTES);
        for block in 0..device.blocks() {
            device.read(block, &mut buf)?;
            if buf[..] != [0; BLOCK_BYTES] {
                image.write(block, &buf)?;
            }
        }
        Ok(image)
    }
}

/// A device in memory. Nothing survives it but its [`MemDevice::snapshot`]s.
#[derive(Debug)]
pub struct MemDevice {
    blocks: u64,
    soiled: bool,
    chunks: Box<[RwLock<Option<Arc<Chunk>>, rank::MemoryChunk>]>,
    flushes: AtomicU64,
}

impl MemDevice {
    /// A device of `blocks` zeroed blocks. Takes memory as it is written.
    pub fn new(blocks: u64) -> Self {
        Self::from_image(Image::new(blocks))
    }

    /// [`MemDevice::new`] of a size that somebody else chose. It needs a table, 2^-15 of the size or less.
    ///
    /// # Errors
    /// ENOMEM where there is no memory for the table.
    pub fn try_new(blocks: u64) -> io::Result<Self> {
        let (mut chunks, count) = (Vec::new(), chunk_count(blocks));
        chunks.try_reserve_exact(count).map_err(|_| rustix::io::Errno::NOMEM)?;
        chunks.resize_with(count, || RwLock::new(None));
        Ok(Self { blocks, soiled: false, chunks: chunks.into(), flushes: AtomicU64::new(0) })
    }

    /// A device that was in use before, as [`Image::soiled`].
    pub fn soiled(blocks: u64) -> Self {
        Self::from_image(Image::soiled(blocks))
    }

    /// A device with the content of `image`, which it shares until it is written.
    pub fn from_image(image: Image) -> Self {
        Self {
            blocks: image.blocks,
            soiled: image.soiled,
            chunks: image.chunks.into_iter().map(RwLock::new).collect(),
            flushes: AtomicU64::new(0),
        }
    }

    /// The content now. Chunk by chunk: writes that run meanwhile may be in it in part.
    pub fn snapshot(&self) -> Image {
        let chunks = self.chunks.iter().map(|c| c.read().clone()).collect();
        Image { blocks: self.blocks, soiled: self.soiled, chunks }
    }

    /// Flushes so far.
    pub fn flushes(&self) -> u64 {
        self.flushes.load(Ordering::Relaxed)
    }

    /// Makes blocks (within the device) refer to `data` instead of copying it.
    pub(crate) fn share(&self, block: u64, data: &Arc<[u8]>) {
        for (b, at) in (block..).zip((0..data.len()).step_by(BLOCK_BYTES)) {
            let (c, i) = chunk_of(b);
            chunk_mut(&mut self.chunks[c].write())[i] = Some(Page { data: data.clone(), at });
        }
    }

    /// Discards blocks (within the device).
    pub(crate) fn clear(&self, block: u64, blocks: u64) {
        for (c, pages) in pages_of(block..block + blocks) {
            discard_pages(&mut self.chunks[c].write(), pages, self.soiled);
        }
    }

    /// Writes one piece, with one lock per chunk that it touches.
    fn put(&self, mut block: u64, mut buf: &[u8]) {
        while !buf.is_empty() {
            let (c, first) = chunk_of(block);
            let blocks = (buf.len() / BLOCK_BYTES).min(CHUNK_BLOCKS - first);
            let (now, rest) = buf.split_at(blocks * BLOCK_BYTES);
            let mut slot = self.chunks[c].write();
            let chunk = chunk_mut(&mut slot);
            for (i, bytes) in (first..).zip(now.chunks(BLOCK_BYTES)) {
                write_page(chunk, i, bytes);
            }
            block += blocks as u64;
            buf = rest;
        }
    }
}

impl Device for MemDevice {
    fn blocks(&self) -> u64 {
        self.blocks
    }

    fn read(&self, mut block: u64, mut buf: &mut [u8]) -> io::Result<()> {
        check_range(self.blocks, block, buf.len(), io::ErrorKind::UnexpectedEof)?;
        let old = if self.soiled { OLD } else { 0 };
        while !buf.is_empty() {
            let (c, first) = chunk_of(block);
            let blocks = (buf.len() / BLOCK_BYTES).min(CHUNK_BLOCKS - first);
            let (now, rest) = buf.split_at_mut(blocks * BLOCK_BYTES);
            let slot = self.chunks[c].read();
            for (i, out) in (first..).zip(now.chunks_mut(BLOCK_BYTES)) {
                read_page(slot.as_deref(), i, old, out);
            }
            block += blocks as u64;
            buf = rest;
        }
        Ok(())
    }

    fn write_batch(&self, ops: &[WriteOp<'_>]) -> io::Result<()> {
        check_ops(self.blocks, ops)?;
        for op in ops {
            let mut block = op.block;
            for buf in &op.bufs {
                self.put(block, buf);
                block += (buf.len() / BLOCK_BYTES) as u64;
            }
        }
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        self.flushes.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// One does nothing: there is no work to share.
    fn shares_flushes(&self) -> bool {
        true
    }

    fn discard(&self, block: u64, blocks: u64) -> io::Result<()> {
        check_discard(self.blocks, block, blocks)?;
        self.clear(block, blocks);
        Ok(())
    }

    fn name(&self) -> String {
        "memory".into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use braidfs_sync::{CHECKED, Mutex};
    use std::panic::{AssertUnwindSafe, catch_unwind};

    /// A lock of the engine is held during I/O; none is taken where a device has one of its own.
    #[test]
    fn a_chunk_is_below_the_engine() {
        let device = MemDevice::new(8);
        let header = Mutex::<(), rank::Header>::new(());
        let held = header.lock();
        device.write_batch(&[WriteOp { block: 1, bufs: vec![&[7; BLOCK_BYTES]] }]).unwrap();
        drop(held);
        let chunk = device.chunks[0].read();
        let inverted = catch_unwind(AssertUnwindSafe(|| drop(header.lock())));
        drop(chunk);
        assert_eq!(inverted.is_err(), CHECKED);
    }
}
