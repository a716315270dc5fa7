//! A table block that lives in a shadow pair: loaded on first need, changed in memory, written to the other copy.
//!
//! Invariants: the copy that is current on the device is never written. A changed block, and one whose write is under
//! way, stays in memory. A copy that was written fewer times than the group's segment table says is not believed: the
//! device lost a newer one. Shared by the owner tables and the node table.

use crate::error::Result;
use crate::store::Store;
use braidfs_format::block::{kind_name, other_copy_lost};
use braidfs_format::group::{Owner, Segments, Written, decode_owners, encode_owners};
use braidfs_format::node::{NodeEntry, NodeTableBlock};
use braidfs_format::{BLOCK_BYTES, BlockAddr, BlockKind, Corrupt, DomainId};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering::Relaxed};

/// How often the tables of a group were written, by their index ([`Written`]): at least, as long as they were not read.
#[derive(Debug)]
pub(crate) struct Counts {
    /// `seq` of a table that was never written.
    base: u64,
    counts: Box<[AtomicU32]>,
    /// Something was written since the segment table was made.
    changed: AtomicBool,
    /// The segment table may be an old one: a table that lost a copy may be, too.
    doubted: AtomicBool,
}

impl Counts {
    /// As the segment table has it.
    pub fn new(table: &Segments) -> Self {
        let counts = table.written.counts.iter().map(|&c| AtomicU32::new(c)).collect();
        Self {
            base: table.seq & !u64::from(u32::MAX),
            counts,
            changed: AtomicBool::new(false),
            doubted: AtomicBool::new(false),
        }
    }
    /// The segment table is not to be trusted.
    pub fn doubt(&self) {
        self.doubted.store(true, Relaxed);
    }
    /// The lowest `seq` that table `index` may have.
    pub fn floor(&self, index: usize) -> u64 {
        self.counts.get(index).map_or(0, |c| self.base + u64::from(c.load(Relaxed)))
    }
    /// Table `index` was written with `seq`.
    pub fn wrote(&self, index: usize, seq: u64) {
        if let Some(c) = self.counts.get(index) {
            c.store(seq as u32, Relaxed);
            self.changed.store(true, Relaxed);
        }
    }
    /// Whether something was written since the last call.
    pub fn take_changed(&self) -> bool {
        self.changed.swap(false, Relaxed)
    }
    /// For the segment table that `checkpoint` writes.
    pub fn written(&self, checkpoint: u64) -> Written {
        Written { checkpoint, counts: self.counts.iter().map(|c| c.load(Relaxed)).collect() }
    }
}

/// A table of a group: where its pair lies, and how often it was written.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place<'a> {
    /// First block of the pair.
    pub pair: BlockAddr,
    /// Of the group.
    pub counts: &'a Counts,
    /// Its index there.
    pub index: usize,
}

impl Place<'_> {
    /// Whether the table was not written since the group was claimed.
    pub fn is_blank(&self) -> bool {
        self.counts.floor(self.index) == self.counts.base && !self.counts.doubted.load(Relaxed)
    }

    /// Whether the copy of `buf`, the pair, that counts (with its `seq`) was written as often as it must have been.
    ///
    /// # Errors
    /// `Corrupt` where it was not.
    pub fn check<T: TableEntry>(&self, buf: &[u8], volume: u32, (copy, seq): (usize, u64)) -> Result<(), Corrupt> {
        let floor = self.counts.floor(self.index);
        if seq < floor {
            let why = format!("at {}: written {floor:#x}, found {seq:#x}: the device lost the newest copy", self.pair);
            return Err(Corrupt::new(kind_name(T::KIND), why));
        }
        match other_copy_lost(buf, T::KIND, volume, self.pair.0, (copy, seq)) {
            Some(lost) if self.counts.doubted.load(Relaxed) => Err(lost),
            _ => Ok(()),
        }
    }
}

/// Entries of a table block.
pub(crate) trait TableEntry: Sized {
    /// What the block says it is.
    const KIND: BlockKind;
    /// Current copy, its sequence number and the entries of the pair at `pair`.
    fn decode(buf: &[u8], volume: u32, pair: BlockAddr) -> Result<(usize, u64, Vec<Self>), Corrupt>;
    /// The sealed block.
    fn encode(entries: &[Self], domain: u16, volume: u32, pair: BlockAddr, copy: usize, seq: u64) -> Vec<u8>;
}

impl TableEntry for Owner {
    const KIND: BlockKind = BlockKind::Owners;
    fn decode(buf: &[u8], volume: u32, pair: BlockAddr) -> Result<(usize, u64, Vec<Self>), Corrupt> {
        decode_owners(buf, volume, pair)
    }
    fn encode(entries: &[Self], domain: u16, volume: u32, pair: BlockAddr, copy: usize, seq: u64) -> Vec<u8> {
        encode_owners(entries, domain, volume, pair, copy, seq)
    }
}

impl TableEntry for NodeEntry {
    const KIND: BlockKind = BlockKind::NodeTable;
    fn decode(buf: &[u8], volume: u32, pair: BlockAddr) -> Result<(usize, u64, Vec<Self>), Corrupt> {
        NodeTableBlock::decode(buf, volume, pair)
    }
    fn encode(entries: &[Self], domain: u16, volume: u32, pair: BlockAddr, copy: usize, seq: u64) -> Vec<u8> {
        NodeTableBlock::encode(entries, domain, volume, pair, copy, seq)
    }
}

/// Which copy of a pair is current.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PairCopy {
    /// 0 or 1.
    pub index: usize,
    /// Its sequence number.
    pub seq: u64,
}

impl PairCopy {
    /// The copy that is written next.
    pub fn other(self) -> Self {
        Self { index: 1 - self.index, seq: self.seq + 1 }
    }
    /// Where it lies in the pair at `pair`.
    pub fn addr(self, pair: BlockAddr) -> BlockAddr {
        BlockAddr(pair.0 + self.index as u64)
    }
}

/// A table block. The caller's lock protects it.
#[derive(Debug)]
pub(crate) struct Paired<T> {
    current: PairCopy,
    entries: Option<Box<[T]>>,
    dirty: bool,
    writing: bool,
    touched: bool,
}

impl<T> Default for Paired<T> {
    fn default() -> Self {
        Self { current: PairCopy { index: 0, seq: 0 }, entries: None, dirty: false, writing: false, touched: false }
    }
}

impl<T: TableEntry> Paired<T> {
    /// The entries, read where they are not in memory. A damaged copy does not matter where the other one was written as
    /// often as it must be.
    pub fn load(&mut self, store: &Store, place: Place<'_>, resident: &Residency) -> Result<&mut [T]> {
        if self.entries.is_none() {
            let mut buf = vec![0u8; 2 * BLOCK_BYTES];
            store.read(place.pair, &mut buf)?;
            self.fill(&buf, store.volume, place, resident)?;
        }
        self.touched = true;
        Ok(self.entries.as_deref_mut().unwrap_or_default())
    }
    /// Takes the entries from `pair`, which was read, where they are not in memory.
    ///
    /// # Errors
    /// `Corrupt` as of [`Self::load`].
    pub fn fill(&mut self, pair: &[u8], volume: u32, place: Place<'_>, resident: &Residency) -> Result<()> {
        if self.entries.is_none() {
            let (index, seq, entries) = T::decode(pair, volume, place.pair)?;
            place.check::<T>(pair, volume, (index, seq))?;
            self.current = PairCopy { index, seq };
            self.entries = Some(entries.into_boxed_slice());
            resident.add(1);
        }
        Ok(())
    }
    /// Whether the entries are in memory.
    pub fn is_loaded(&self) -> bool {
        self.entries.is_some()
    }
    /// As [`Self::load`], for a change.
    pub fn edit(&mut self, store: &Store, place: Place<'_>, resident: &Residency) -> Result<&mut [T]> {
        self.load(store, place, resident)?;
        self.dirty = true;
        Ok(self.entries.as_deref_mut().unwrap_or_default())
    }
    /// The block for the other copy, where something changed; [`Self::end_write`] must follow.
    pub fn begin_write(&mut self, domain: DomainId, volume: u32, pair: BlockAddr) -> Option<(PairCopy, Vec<u8>)> {
        let entries = self.entries.as_deref().filter(|_| self.dirty)?;
        let next = self.current.other();
        let block = T::encode(entries, domain.0, volume, pair, next.index, next.seq);
        (self.dirty, self.writing) = (false, true);
        Some((next, block))
    }
    /// The write of [`Self::begin_write`] succeeded with copy `written`, or failed.
    pub fn end_write(&mut self, written: Option<PairCopy>) {
        self.writing = false;
        match written {
            Some(copy) => self.current = copy,
            None => self.dirty = true,
        }
    }
    /// Forgets the entries, changed or not: the block is no longer this table's.
    pub fn forget(&mut self, resident: &Residency) {
        if self.entries.take().is_some() {
            resident.add(-1);
        }
        (self.dirty, self.writing) = (false, false);
    }
    /// Forgets entries that were not used since the last call and are as on the device.
    pub fn evict(&mut self, resident: &Residency) {
        if self.dirty || self.writing || self.entries.is_none() || std::mem::take(&mut self.touched) {
            return;
        }
        self.entries = None;
        resident.add(-1);
    }
}

/// Memory of a table block, with its entries decoded.
pub(crate) const TABLE_BLOCK_BYTES: u64 = 6 << 10;
/// Clean blocks of one kind of table that a domain keeps in memory at most: 24 MiB.
pub(crate) const TABLE_BLOCKS_MAX: usize = 4096;

/// As many table blocks as take so many bytes; at least a few, at most those of a large domain.
pub(crate) fn table_blocks(bytes: u64) -> usize {
    (bytes / TABLE_BLOCK_BYTES).clamp(16, TABLE_BLOCKS_MAX as u64) as usize
}

/// How many table blocks are in memory, and when to look for some to forget.
#[derive(Debug)]
pub(crate) struct Residency {
    count: AtomicUsize,
    sweep_at: AtomicUsize,
    max: usize,
}

impl Residency {
    /// At most about `max` clean blocks.
    pub fn new(max: usize) -> Self {
        Self { count: AtomicUsize::new(0), sweep_at: AtomicUsize::new(max), max }
    }
    fn add(&self, n: isize) {
        self.count.fetch_add(n as usize, Relaxed);
    }
    /// From now on at most about `max` clean blocks.
    pub fn limit(&mut self, max: usize) {
        *self = Self { count: AtomicUsize::new(self.count()), ..Self::new(max) };
    }
    /// Memory of the blocks, bytes.
    pub fn bytes(&self) -> u64 {
        self.count() as u64 * TABLE_BLOCK_BYTES
    }
    /// Blocks in memory.
    pub fn count(&self) -> usize {
        self.count.load(Relaxed)
    }
    /// Whether there are more than the limit.
    pub fn excessive(&self) -> bool {
        self.count() > self.max
    }
    /// Whether there are twice as many.
    pub fn is_far_beyond(&self) -> bool {
        self.count() / 2 > self.max
    }
    /// Whether a sweep is due; the caller that gets `true` does it and then calls [`Self::swept`].
    pub fn sweep_due(&self) -> bool {
        let at = self.sweep_at.load(Relaxed);
        at != usize::MAX
            && self.count() > at
            && self.sweep_at.compare_exchange(at, usize::MAX, Relaxed, Relaxed).is_ok()
    }
    /// Dirty blocks cannot be forgotten: the next sweep waits for a quarter more, or it would be done at every load.
    pub fn swept(&self) {
        self.sweep_at.store(self.max.max(self.count() + self.count() / 4), Relaxed);
    }
}
