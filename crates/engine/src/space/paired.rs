//! A table block that lives in a shadow pair: loaded on first need, changed in memory, written to the other copy.
//!
//! Invariants: the copy that is current on the device is never written. A changed block, and one whose write is under
//! way, stays in memory. Shared by the owner tables and the node table.

use crate::error::Result;
use crate::store::Store;
use braidfs_format::block::{BlockKind, other_copy_lost};
use braidfs_format::group::{Owner, decode_owners, encode_owners};
use braidfs_format::node::{NodeEntry, NodeTableBlock};
use braidfs_format::{BLOCK_BYTES, BlockAddr, Corrupt, DomainId};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

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
    /// The entries, read from the pair at `pair` where they are not in memory. Where one copy is damaged, the other may be
    /// older, and is believed only while a journal is replayed: a write that the crash tore is in it.
    pub fn load(&mut self, store: &Store, pair: BlockAddr, resident: &Residency) -> Result<&mut [T]> {
        self.touched = true;
        if self.entries.is_none() {
            let mut buf = vec![0u8; 2 * BLOCK_BYTES];
            store.read(pair, &mut buf)?;
            let (index, seq, entries) = T::decode(&buf, store.volume, pair)?;
            if let Some(lost) = resident.doubt::<T>(&buf, store.volume, pair, (index, seq)) {
                return Err(lost.into());
            }
            self.current = PairCopy { index, seq };
            self.entries = Some(entries.into_boxed_slice());
            resident.add(1);
        }
        Ok(self.entries.as_deref_mut().unwrap_or_default())
    }
    /// As [`Self::load`], for a change.
    pub fn edit(&mut self, store: &Store, pair: BlockAddr, resident: &Residency) -> Result<&mut [T]> {
        self.load(store, pair, resident)?;
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
    /// Forgets entries that were not used since the last call and are as on the device.
    pub fn evict(&mut self, resident: &Residency) {
        if self.dirty || self.writing || self.entries.is_none() || std::mem::take(&mut self.touched) {
            return;
        }
        self.entries = None;
        resident.add(-1);
    }
}

/// How many table blocks are in memory, and when to look for some to forget; whether they may be torn.
#[derive(Debug)]
pub(crate) struct Residency {
    torn_allowed: AtomicBool,
    /// A damaged copy was met while it was allowed.
    torn_seen: AtomicBool,
    count: AtomicUsize,
    sweep_at: AtomicUsize,
    max: usize,
}

impl Residency {
    /// At most about `max` clean blocks.
    pub fn new(max: usize) -> Self {
        Self {
            torn_allowed: AtomicBool::new(false),
            torn_seen: AtomicBool::new(false),
            count: AtomicUsize::new(0),
            sweep_at: AtomicUsize::new(max),
            max,
        }
    }
    /// A journal is being replayed, or no longer is: a torn copy of a pair is no damage then.
    pub fn allow_torn(&self, on: bool) {
        self.torn_allowed.store(on, Relaxed);
    }
    /// Why the copy of a pair that counts may not be the newest.
    pub fn doubt<T: TableEntry>(
        &self,
        buf: &[u8],
        volume: u32,
        pair: BlockAddr,
        current: (usize, u64),
    ) -> Option<Corrupt> {
        let doubt = other_copy_lost(buf, T::KIND, volume, pair.0, current)?;
        if self.torn_allowed.load(Relaxed) {
            self.torn_seen.store(true, Relaxed);
            return None;
        }
        Some(doubt)
    }
    /// Whether a damaged copy was met while that was allowed.
    pub fn torn_seen(&self) -> bool {
        self.torn_seen.load(Relaxed)
    }
    fn add(&self, n: isize) {
        self.count.fetch_add(n as usize, Relaxed);
    }
    /// Blocks in memory.
    pub fn count(&self) -> usize {
        self.count.load(Relaxed)
    }
    /// Whether there are more than the limit.
    pub fn excessive(&self) -> bool {
        self.count() > self.max
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
