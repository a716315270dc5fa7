//! A transaction: what changed in a domain between two flips (compound transaction, journaling-fast18 section 4).
//!
//! Operations insert concurrently; the committer and its helpers fetch. Blocks change hands through [`Tx::record`]:
//! a block freed here is used again only after the transaction is durable.

use super::out::Out;
use crate::braid::frontier::Frontier;
use crate::cell::Cell;
use crate::types::*;
use braidfs_format::journal::Record;
use braidfs_sync::{Mutex, rank};
use std::sync::Arc;
use std::sync::atomic::{
    AtomicI64, AtomicU64, AtomicUsize,
    Ordering::{Acquire, Relaxed, Release},
};

/// See the module. Lock rank: its mutexes are leaves.
#[derive(Debug)]
pub struct Tx {
    /// Its number.
    pub id: TxId,
    cells: Mutex<Vec<Arc<Cell>>, rank::TxList>,
    records: Mutex<Vec<Record>, rank::TxList>,
    out: Mutex<Out, rank::TxList>,
    peers: Mutex<Frontier, rank::TxList>,
    cost: AtomicUsize,
    credits: AtomicI64,
    packed: AtomicU64,
    /// Writes of its data that its commit record has to wait for.
    io: AtomicU64,
}

/// A write of a transaction's data is under way outside the committer; dropping it says that it is done (or that the
/// domain has failed).
#[derive(Debug)]
pub struct PendingIo(Arc<Tx>);

impl Drop for PendingIo {
    fn drop(&mut self) {
        self.0.io.fetch_sub(1, Release);
    }
}

/// Journal bytes that a dirty cell costs at most on average: node table entry, share of the node block's records.
pub(super) const CELL_COST: usize = 80;

/// Journal bytes that a dirty page costs at most: where nothing near it is written, it has its own `Alloc` and `Free`.
pub(super) const PAGE_COST: usize = 40;

/// Bytes of records that a node block is expected to hold; the last one of a block rarely fits.
const PACKED_BYTES: u64 = 2800;

impl Tx {
    /// An empty transaction.
    pub fn new(id: TxId) -> Self {
        Self {
            id,
            cells: Mutex::default(),
            records: Mutex::default(),
            out: Mutex::default(),
            peers: Mutex::default(),
            cost: AtomicUsize::new(0),
            credits: AtomicI64::new(0),
            packed: AtomicU64::new(0),
            io: AtomicU64::new(0),
        }
    }
    /// Announces a write of its data; called inside the gate.
    pub fn begin_io(self: &Arc<Self>) -> PendingIo {
        self.io.fetch_add(1, Relaxed);
        PendingIo(self.clone())
    }
    /// Waits for the announced writes (committer, after the flip).
    pub fn wait_io(&self) {
        let mut spins = 0u32;
        while self.io.load(Acquire) > 0 {
            spins += 1;
            braidfs_sync::give_way(spins);
        }
    }
    /// Journal bytes that it will take, an upper bound.
    pub fn cost(&self) -> usize {
        self.cost.load(Relaxed)
    }
    /// Whether nothing changed in it.
    pub fn is_empty(&self) -> bool {
        self.cost() == 0
    }
    /// Puts a cell on the list; [`super::Domain::touch`] sees to it that it is there once.
    pub fn add_cell(&self, cell: Arc<Cell>) {
        self.cost.fetch_add(CELL_COST, Relaxed);
        self.cells.lock().push(cell);
    }
    /// So many pages became dirty that it will write: their places are facts, too.
    pub fn expect_pages(&self, pages: usize) {
        self.cost.fetch_add(pages * PAGE_COST, Relaxed);
    }
    /// Counts bytes that an operation may come to cost; what it costs by then.
    pub fn expect(&self, bytes: usize) -> usize {
        self.cost.fetch_add(bytes, Relaxed) + bytes
    }
    /// The operation is over.
    pub fn expect_no_more(&self, bytes: usize) {
        self.cost.fetch_sub(bytes, Relaxed);
    }
    /// Adds a fact, in order.
    pub fn record(&self, r: Record) {
        let name = if let Record::Remote { name, .. } = &r { name.len() } else { 0 };
        self.cost.fetch_add(30 + name, Relaxed);
        self.records.lock().push(r);
    }
    /// Adds facts, in order.
    pub fn record_all(&self, rs: impl IntoIterator<Item = Record>) {
        let mut n = 0;
        self.records.lock().extend(rs.into_iter().inspect(|_| n += 30));
        self.cost.fetch_add(n, Relaxed);
    }
    /// Output of a cell that was serialised outside the committer.
    pub fn give(&self, out: Out) {
        self.out.lock().append(out);
    }
    /// An operation changed another domain too, in its transaction `tx`.
    pub fn peer(&self, domain: DomainId, tx: TxId) {
        self.peers.lock().raise(domain, tx);
    }
    /// Metadata blocks that were reserved for it.
    pub fn add_credits(&self, blocks: u64) {
        self.credits.fetch_add(blocks as i64, Relaxed);
    }
    /// Takes one reserved metadata block; false where none is left.
    pub fn take_credit(&self) -> bool {
        self.credits.fetch_update(Relaxed, Relaxed, |c| (c > 0).then_some(c - 1)).is_ok()
    }
    /// What is left of the reservations, now the caller's to give back.
    pub fn take_credits(&self) -> u64 {
        self.credits.swap(0, Relaxed).max(0) as u64
    }
    /// Counts bytes of records that it will write packed; how many node blocks more they fill.
    pub fn pack_bytes(&self, bytes: usize) -> u64 {
        let old = self.packed.fetch_add(bytes as u64, Relaxed);
        (old + bytes as u64).div_ceil(PACKED_BYTES) - old.div_ceil(PACKED_BYTES)
    }
    /// All cells (committer).
    pub fn take_cells(&self) -> Vec<Arc<Cell>> {
        std::mem::take(&mut *self.cells.lock())
    }
    /// All facts (committer).
    pub fn take_records(&self) -> Vec<Record> {
        std::mem::take(&mut *self.records.lock())
    }
    /// Output given by others (committer).
    pub fn take_out(&self) -> Out {
        std::mem::take(&mut *self.out.lock())
    }
    /// Other domains and their transactions that it shares operations with so far.
    pub fn peers_so_far(&self) -> Frontier {
        self.peers.lock().clone()
    }
}
