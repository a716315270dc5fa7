//! A transaction: what changed in a domain between two flips (compound transaction, journaling-fast18 section 4).
//!
//! Operations insert concurrently; the committer and its helpers fetch. Blocks change hands through [`Tx::record`]:
//! a block freed here is used again only after the transaction is durable.

use super::out::Out;
use super::packed;
use super::pile::Pile;
use crate::braid::frontier::Frontier;
use crate::cell::Cell;
use crate::planted::{Bug, planted};
use crate::types::*;
use braidfs_format::journal::Record;
use braidfs_sync::slots::{Line, PerSlot};
use braidfs_sync::{Mutex, rank};
use std::sync::atomic::{
    AtomicBool, AtomicI64, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};
use std::sync::{Arc, OnceLock};

/// See the module. Lock rank: its mutexes are leaves.
///
/// What operations put in lies in parts, one per slot, so that threads write no common line (journaling-fast18 section
/// 3.1 has lists for concurrent insertion instead; here the flip, which waits for all who are inside the gate, lets the
/// committer gather the parts). Of the order of facts of different threads only what [`Self::take_records`] says is kept.
#[derive(Debug)]
pub struct Tx {
    /// Number of the transaction; rises by one with each of its domain.
    pub id: TxId,
    parts: PerSlot<SlotWork>,
    /// Bytes that the parts have told of; each tells of more than [`Self::step`].
    told: Line<AtomicI64>,
    step: i64,
    /// What all read before they enter, and hardly anybody writes.
    marks: Line<Marks>,
    /// Facts that take the place of earlier ones ([`Self::record_again`]).
    again: Mutex<Vec<Record>, rank::TxList>,
    out: Mutex<Out, rank::TxList>,
    /// The parts' credits, once nobody adds any.
    credits: AtomicI64,
}

#[derive(Debug, Default)]
struct Marks {
    /// Whether anything was changed in it; one without changes is not written.
    changed: AtomicBool,
    /// It has told of [`Tx::short`] bytes.
    long: AtomicBool,
    /// Operations of it changed other domains, too.
    has_peers: AtomicBool,
}

/// What threads of one slot have put into a transaction.
#[derive(Debug, Default)]
struct SlotWork {
    /// Bytes of journal that were not told of yet.
    untold: AtomicI64,
    credits: AtomicI64,
    packed: AtomicU64,
    /// Writes of its data that its commit record has to wait for. In memory of the slot's own, made for the first: who has such a
    /// write under way keeps that alive, and not the transaction, whose count of owners all threads would write.
    io: OnceLock<Arc<AtomicU64>>,
    cells: Mutex<Pile<Arc<Cell>>, rank::TxList>,
    records: Mutex<Pile<Record>, rank::TxList>,
    peers: Mutex<Frontier, rank::TxList>,
}

/// A write of a transaction's data is under way outside the committer; dropping it says that it is done (or that the
/// domain has failed).
#[derive(Debug)]
pub struct PendingIo(Arc<AtomicU64>);

impl Drop for PendingIo {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Release);
    }
}

/// Journal bytes that a dirty cell costs at most on average: node table entry, share of the node block's records.
pub(super) const CELL_COST: usize = 80;

/// Journal bytes that a dirty page costs at most: where nothing near it is written, it has its own `Alloc` and `Free`.
pub(super) const PAGE_COST: usize = 40;

/// Writes a mark where it is not there.
fn set(mark: &AtomicBool) {
    if !mark.load(Relaxed) {
        mark.store(true, Relaxed);
    }
}

impl Tx {
    /// An empty transaction. Up to `short` bytes of journal nobody has to know how long exactly it is.
    pub fn new(id: TxId, short: usize) -> Self {
        let parts = PerSlot::<SlotWork>::default();
        let step = (short / parts.parts()).max(1) as i64;
        Self {
            id,
            parts,
            told: Line::default(),
            step,
            marks: Line::default(),
            again: Mutex::default(),
            out: Mutex::default(),
            credits: AtomicI64::new(0),
        }
    }
    /// Announces a write of its data; called inside the gate.
    pub fn begin_io(&self) -> PendingIo {
        let io = self.parts.mine().io.get_or_init(Arc::default).clone();
        io.fetch_add(1, Relaxed);
        PendingIo(io)
    }
    /// Waits for the announced writes (committer, after the flip).
    pub fn wait_io(&self) {
        let mut spins = 0u32;
        // who announced one did so inside the gate, before the flip
        while self.has_io() {
            spins += 1;
            braidfs_sync::give_way(spins);
        }
    }
    /// Whether announced writes are under way.
    pub fn has_io(&self) -> bool {
        self.parts.iter().any(|p| p.io.get().is_some_and(|io| io.load(Acquire) > 0))
    }
    fn short(&self) -> i64 {
        self.step * self.parts.parts() as i64
    }
    /// Counts journal bytes.
    fn costs(&self, part: &SlotWork, bytes: i64) {
        if part.untold.fetch_add(bytes, Relaxed) + bytes >= self.step {
            self.tell(part);
        }
    }
    #[cold]
    fn tell(&self, part: &SlotWork) {
        let bytes = part.untold.swap(0, Relaxed);
        if self.told.fetch_add(bytes, Relaxed) + bytes >= self.short() {
            set(&self.marks.long);
        }
    }
    /// An upper bound of its [`Self::cost`], about, which touches few lines that others write; a low one where it is short.
    pub fn cost_at_most(&self) -> usize {
        let told = if self.marks.long.load(Relaxed) { self.told.load(Relaxed).max(0) } else { self.short() };
        (told + self.short()) as usize
    }
    /// Journal bytes that it will take, an upper bound. Reads the lines of all slots.
    pub fn cost(&self) -> usize {
        let untold: i64 = self.parts.iter().map(|p| p.untold.load(Relaxed)).sum();
        (self.told.load(Relaxed) + untold).max(0) as usize
    }
    /// Whether nothing changed in it.
    pub fn is_empty(&self) -> bool {
        !self.marks.changed.load(Relaxed)
    }
    /// Puts a cell on the list; [`super::Domain::touch`] sees to it that it is there once.
    pub fn add_cell(&self, cell: Arc<Cell>) {
        let part = self.parts.mine();
        set(&self.marks.changed);
        self.costs(part, CELL_COST as i64);
        part.cells.lock().push(cell);
    }
    /// So many pages became dirty that it will write: their places are facts, too.
    pub fn expect_pages(&self, pages: usize) {
        self.costs(self.parts.mine(), (pages * PAGE_COST) as i64);
    }
    /// Counts bytes that an operation may come to cost; what it costs by then.
    pub fn expect(&self, bytes: usize) -> usize {
        self.costs(self.parts.mine(), bytes as i64);
        self.cost()
    }
    /// The operation is over.
    pub fn expect_no_more(&self, bytes: usize) {
        self.costs(self.parts.mine(), -(bytes as i64));
    }
    /// Adds a fact.
    pub fn record(&self, r: Record) {
        let name = if let Record::Remote { name, .. } = &r { name.len() } else { 0 };
        let part = self.parts.mine();
        set(&self.marks.changed);
        self.costs(part, 30 + name as i64);
        part.records.lock().push(r);
    }
    /// Adds facts (`Alloc`, `Free`, `Live`, `Node`) that its commit tells the journal.
    pub fn record_all(&self, rs: impl IntoIterator<Item = Record>) {
        let part = self.parts.mine();
        let mut n = 0;
        {
            let mut records = part.records.lock();
            for r in rs {
                n += 30;
                records.push(r);
            }
        }
        self.costs_if_any(part, n);
    }
    /// Adds facts that take the place of earlier ones of this transaction: whose blocks are now what. Later ones do so, too,
    /// whichever thread adds them.
    pub fn record_again(&self, rs: impl IntoIterator<Item = Record>) {
        let mut n = 0;
        self.again.lock().extend(rs.into_iter().inspect(|_| n += 30));
        self.costs_if_any(self.parts.mine(), n);
    }
    fn costs_if_any(&self, part: &SlotWork, bytes: i64) {
        if bytes > 0 {
            set(&self.marks.changed);
            self.costs(part, bytes);
        }
    }
    /// Output of a cell that was serialised outside the committer.
    pub fn give(&self, out: Out) {
        self.out.lock().append(out);
    }
    /// An operation changed another domain too, in its transaction `tx`.
    pub fn peer(&self, domain: DomainId, tx: TxId) {
        self.parts.mine().peers.lock().raise(domain, tx);
        set(&self.marks.has_peers);
    }
    /// Metadata blocks that were reserved for it. Inside the gate.
    pub fn add_credits(&self, blocks: u64) {
        if blocks > 0 {
            self.parts.mine().credits.fetch_add(blocks as i64, Relaxed);
        }
    }
    /// Nobody is inside its gate any more: the flip.
    pub fn end_of_operations(&self) {
        let credits = self.parts.iter().map(|p| p.credits.load(Relaxed)).sum();
        self.credits.store(credits, Relaxed);
    }
    /// Takes one reserved metadata block; false where none is left. After the flip: whoever writes a cell out for it.
    pub fn take_credit(&self) -> bool {
        self.credits.fetch_update(Relaxed, Relaxed, |c| (c > 0).then_some(c - 1)).is_ok()
    }
    /// Whether it has reserved blocks for metadata.
    pub(crate) fn has_credits(&self) -> bool {
        self.credits.load(Relaxed) > 0 || self.parts.iter().any(|p| p.credits.load(Relaxed) > 0)
    }
    /// What is left of the reservations, now the caller's to give back.
    pub fn take_credits(&self) -> u64 {
        self.credits.swap(0, Relaxed).max(0) as u64
    }
    /// Counts records of so much [`packed::weight`] that it will write packed; how many node blocks more they fill.
    pub fn pack(&self, weight: u64) -> u64 {
        let old = self.parts.mine().packed.fetch_add(weight, Relaxed);
        (old + weight).div_ceil(packed::BLOCK) - old.div_ceil(packed::BLOCK)
    }
    /// All cells (committer).
    pub fn take_cells(&self) -> Vec<Arc<Cell>> {
        let mut all = Vec::new();
        self.parts.iter().for_each(|p| p.cells.lock().empty_into(&mut all));
        all
    }
    /// All facts (committer).
    ///
    /// Of a block an `Alloc` comes before its `Free`, also where different threads added them: a block that the transaction
    /// frees is not used again before it is durable, so there is no `Alloc` behind a `Free`. Each block is allocated once;
    /// what was said of it again ([`Self::record_again`]) comes behind that, in order. Of all else the order is free.
    pub fn take_records(&self) -> Vec<Record> {
        let mut all = Vec::new();
        self.parts.iter().for_each(|p| p.records.lock().empty_into(&mut all));
        let again = std::mem::take(&mut *self.again.lock());
        let rank = |r: &Record| u8::from(matches!(r, Record::Free { .. }) != planted(Bug::FreeBeforeAlloc));
        if all.iter().map(rank).is_sorted() {
            // mostly there is nothing to be freed, or nothing else
            let frees = all.iter().position(|r| matches!(r, Record::Free { .. })).unwrap_or(all.len());
            all.splice(frees..frees, again);
            return all;
        }
        let (mut first, mut last): (Vec<_>, Vec<_>) = all.into_iter().partition(|r| rank(r) == 0);
        first.reserve(again.len() + last.len());
        first.extend(again);
        first.append(&mut last);
        first
    }
    /// Output given by others (committer).
    pub fn take_out(&self) -> Out {
        std::mem::take(&mut *self.out.lock())
    }
    /// Other domains and their transactions that it shares operations with so far.
    pub fn peers_so_far(&self) -> Frontier {
        let mut all = Frontier::EMPTY;
        if self.marks.has_peers.load(Relaxed) {
            self.parts.iter().for_each(|p| all.merge(&p.peers.lock()));
        }
        all
    }
}
