//! A domain: an independent micro file system with its own journal, allocator, node table, cells and transactions
//! (SpanFS section 3.1). Assembles the layers below; `volume` assembles domains.
//! A domain knows no other: what it asks of them goes through [`peers::Peers`], which it is given.
//!
//! Life of a transaction: *running* (operations enter through the gate and put the cells that they change on its list)
//! → *committing* (`commit`: cells are serialised, data and node blocks written, then the commit record) → *committed*
//! (`space` and `nodes` take over the new state) → *checkpointed* (`checkpoint`: home tables written, journal tail moved).
//! At most one runs and one commits.
//!
//! Lock ranks, outer first: `checkpoint_lock` → `commit_lock` → gate (read by operations, written by the flip) → cell
//! locks → leaves (transaction lists, space, nodes, journal, caches). Nobody waits for a commit inside the gate. All
//! of them: docs/locking.md.

pub mod ahead;
#[cfg(feature = "planted-bugs")]
mod bugs;
pub(crate) mod ceiling;
pub mod checkpoint;
mod checkpointing;
mod clock;
pub mod commit;
pub mod enter;
mod first_pos;
pub mod flush;
mod help;
pub mod in_pieces;
pub mod in_place;
pub mod inodes;
mod journal_use;
pub mod load;
pub mod memory;
mod on_panic;
mod orphans;
mod out;
pub(crate) mod own_work;
pub(crate) mod packed;
pub mod peers;
mod pile;
pub mod placed;
mod promised;
mod quarantine;
pub mod quiesce;
pub mod recover;
pub mod recovered;
pub(crate) mod replay;
mod roll_forward;
pub(crate) mod scratch;
pub mod serialise;
mod shared;
pub mod sync;
pub(crate) mod tenant;
pub mod tx;
mod work;

use crate::braid::frontier::Frontier;
use crate::braid::vacated::VacatedNames;
use crate::budget::{self, Budget};
use crate::cell::cache::{CellCache, Memory};
use crate::cell::{Body, Cell, State};
use crate::error::{Error, Result};
use crate::journal::Journal;
use crate::nodes::{Closing, NodeTable};
use crate::planted::{Bug, planted};
use crate::space::Space;
use crate::store::Store;
use crate::types::*;
use braidfs_format::domain::{DomainHeader, KEPT_FOR_TENANTS, PEER_FAILED};
use braidfs_sync::ablation::{self, Switch};
use braidfs_sync::rounds::Rounds;
use braidfs_sync::slots::{Counter, Line};
use braidfs_sync::{Mutex, PassLock, rank};
use crossbeam::utils::CachePadded;
pub use enter::Enter;
use foldhash::fast::RandomState;
use memory::MemoryUse;
pub(crate) use on_panic::FailOnPanic;
pub use orphans::Orphans;
use out::Out;
use peers::Peers;
pub use shared::Shared;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use tx::Tx;
use work::Work;

/// The domain's header on disk: which copy is current.
#[derive(Debug)]
pub struct HeaderPair {
    /// Device block of the pair.
    pub pair: u64,
    /// Which copy of the shadow pair is current, 0 or 1.
    pub copy: usize,
    /// Its sequence number.
    pub seq: u64,
    /// The newest one that is known to be durable.
    pub durable: u64,
    /// The header as that copy has it.
    pub header: DomainHeader,
}

/// Counters for `info` and benchmarks.
#[derive(Debug, Default)]
pub struct Counters {
    /// Transactions committed since the mount.
    pub commits: AtomicU64,
    /// Transactions that ended since the mount, but for those that the background ended for what it does of itself.
    pub ended_by_others: AtomicU64,
    /// Threads that helped commits which others led.
    pub joiners: AtomicU64,
    /// Checkpoints since the mount.
    pub checkpoints: AtomicU64,
    /// Roll-forward batches: by slots, as every fsync counts, and who enters reads what lies beside these counters.
    pub fast_syncs: Counter,
    /// Blocks moved by the cleaner.
    pub cleaned: AtomicU64,
    /// Blocks moved so that their files lie in fewer pieces.
    pub defragmented: AtomicU64,
    /// Blocks moved out of groups that other domains needed.
    pub relocated: AtomicU64,
}

/// See the module.
#[derive(Debug)]
pub struct Domain {
    /// Number of the domain.
    pub id: DomainId,
    /// The volume's devices.
    pub store: Arc<Store>,
    /// Where it belongs.
    pub place: placed::Place,
    /// Common to all domains.
    pub shared: Arc<Shared>,
    /// Its groups, segments and logs.
    pub space: Space,
    /// Where the newest record of each of its nodes lies.
    pub nodes: NodeTable,
    /// Head and tail of its journal.
    pub journal: Journal,
    /// Cells in memory.
    pub cells: CellCache,
    /// What these and their pages take of the cache, and may.
    pub memory: MemoryUse,
    /// What its readers have read ahead.
    pub ahead: Line<ahead::AheadBudget>,
    /// The gate. Operations hold it for reading while they change something; the flip of the running transaction is its
    /// only writer. Operations of different threads write no common line to enter it.
    gate: PassLock<Arc<Tx>, rank::Gate>,
    /// Number of the transaction in `gate`, changed under its writer side; on a line of its own, as every overwrite reads
    /// it.
    running: CachePadded<AtomicU64>,
    committing: Mutex<Option<Arc<Tx>>, rank::Committing>,
    /// Journal bytes that the one in `committing` takes, for those who enter: they do not lock it.
    pending: Line<AtomicUsize>,
    committed: AtomicU64,
    /// The newest transaction that a sync of a directory, or of everything, is about to make durable ([`Domain::want`]).
    wanted: Line<AtomicU64>,
    /// The transaction whose commit record is the newest in the journal (numbers between it and `committed` were never
    /// committed: they were cut off by a crash).
    durable: AtomicU64,
    commit_lock: Mutex<(), rank::Commit>,
    checkpoint_lock: Mutex<(), rank::Checkpoint>,
    checkpointing: checkpointing::Checkpointing,
    /// Who commits, and who waits for it.
    rounds: Rounds<Arc<Work>, rank::Work>,
    /// Threads that are woken to help a commit at most: as many as there are CPUs, none with the switch for experiments.
    helpers_max: usize,
    failed: OnceLock<String>,
    header: Mutex<HeaderPair, rank::Header>,
    /// Inodes unlinked but open (or waiting for another domain).
    pub orphans: Orphans,
    /// The newest commit lists some: a checkpoint keeps it.
    orphans_listed: AtomicBool,
    /// Transactions of other domains that committed transactions of this one touched: durable before our tail moves.
    peer_txs: Mutex<Frontier, rank::PeerTxs>,
    first_pos: Mutex<first_pos::FirstPositions, rank::FirstPos>,
    /// Generation of overflow nodes allocated and not yet committed.
    new_generations: Mutex<HashMap<NodeId, u32, RandomState>, rank::NewGenerations>,
    quarantine: Mutex<quarantine::Quarantine, rank::QuarantinedNodes>,
    /// A checkpoint has passed the failure of another domain: directories that are made are noted.
    notes_directories: AtomicBool,
    /// Files with dirty pages that a commit left alone (`data=writeback`).
    lazy: Mutex<Vec<Arc<Cell>>, rank::LazyFiles>,
    /// Blocks of writes that a front end may have accepted and the volume has not seen ([`crate::Volume::keep_room`]).
    /// On a line of its own: in a domain with little room each `write` through a front end's cache writes it.
    pub accepted_above: Line<AtomicU64>,
    /// Files to be made whole when there is time.
    pub in_pieces: Mutex<in_pieces::InPieces, rank::InPieces>,
    /// The last file of which the log says that it has as many extents as it can ([`Domain::extents_full`]), 0: none
    /// yet.
    told_full: AtomicU64,
    /// Names of this domain's directories that inodes left, by renames or unlinks that may not be durable yet.
    pub vacated: VacatedNames,
    /// Root directory of the tenant that the domain is bound to, 0: none.
    tenant_root: AtomicU64,
    /// What is of no tenant is not placed here.
    kept: AtomicBool,
    /// Whether it has a journal, and what that is for.
    journal_use: journal_use::JournalUse,
    /// Devices on which it may claim groups, as the header has them.
    devices: AtomicU32,
    /// How many inodes there are, and may be; counted in domains for tenants.
    pub inodes: inodes::InodeCount,
    /// What its tenant may ask of the device in a second.
    pub budget: Arc<Budget>,
    /// The other domains.
    peers: Arc<dyn Peers>,
    /// What was done since the mount, for `info`, `stats` and tests.
    pub counters: Counters,
    /// The transaction as of which packing node blocks together gained none, and the blocks that it could have used for that: what
    /// lies in node blocks changes with commits alone.
    pub(crate) compacted_at: (AtomicU64, AtomicU64),
    /// Fsyncs that wrote elsewhere for want of a commit ([`in_place`]).
    missed: CachePadded<AtomicU32>,
    /// Cost of a transaction whose cells take an eighth of the cache, or a quarter of the domain's ceiling.
    pinned_max: AtomicUsize,
    /// Cost of a transaction up to which nobody who enters looks closely.
    short: usize,
}

/// This part of the journal is a transaction that is short ([`Tx::cost_at_most`]).
const SHORT_PART: usize = 16;
/// The layers below a domain, opened and replayed.
#[derive(Debug)]
pub struct Layers {
    /// Its groups, segments and logs.
    pub space: Space,
    /// Where the newest record of each of its nodes lies.
    pub nodes: NodeTable,
    /// Head and tail of its journal.
    pub journal: Journal,
    /// The transaction that runs first.
    pub first_tx: TxId,
}

impl Domain {
    /// A domain whose tables are loaded and whose journal is replayed.
    pub fn new(
        id: DomainId,
        store: Arc<Store>,
        shared: Arc<Shared>,
        peers: Arc<dyn Peers>,
        layers: Layers,
        header: HeaderPair,
    ) -> Self {
        let Layers { mut space, mut nodes, journal, first_tx } = layers;
        let kept = header.header.tenant_flags.get() & KEPT_FOR_TENANTS != 0;
        let tenant_root = header.header.tenant_root.get();
        let devices = if tenant_root > 0 { header.header.tenant_devices.get() } else { 0 };
        let inodes_max = Some(header.header.tenant_inodes.get()).filter(|n| *n > 0);
        let (rates, serving) = (budget::rates(&header.header), budget::serving(&header.header));
        let budget = Budget::new(&rates, serving, shared.options.rate_clock, shared.options.processor_clock);
        shared.note_limits(&budget);
        nodes.charge(budget.clone());
        space.set_hard_limit(Some(header.header.tenant_blocks.get()).filter(|n| *n > 0), 0);
        space.limit(shared.table_bytes);
        nodes.limit(shared.table_bytes);
        let last = first_tx.0 - 1;
        if shared.options.discard {
            space.note_freed();
        }
        let passed_failure = header.header.flags.get() & PEER_FAILED != 0;
        let journal_use = journal_use::JournalUse::of(&header.header);
        let held = memory::budget_of(&header.header);
        let pinned_max = memory::pinned_max(shared.options.cache_bytes, held.most);
        let memory = MemoryUse::new(shared.looks.clone());
        memory.set_limits(held.least, held.most);
        let short = (journal.blocks() as usize * 4096 / SHORT_PART).min(pinned_max / 4);
        let helpers_max = if ablation::is_on(Switch::Leader) { 0 } else { shared.cpus };
        let tx = Arc::new(Tx::new(first_tx, short));
        let place = placed::place_of(shared.numa.as_ref(), id, &store, || space.groups());
        Self {
            id,
            store,
            place,
            memory,
            ahead: Line::default(),
            shared,
            space,
            nodes,
            first_pos: Mutex::default(),
            journal,
            cells: CellCache::default(),
            running: CachePadded::new(AtomicU64::new(tx.id.0)),
            gate: PassLock::keyed(tx, u64::from(id.0)),
            committing: Mutex::new(None),
            pending: Line::default(),
            committed: AtomicU64::new(last),
            wanted: Line::default(),
            durable: AtomicU64::new(last),
            commit_lock: Mutex::new(()),
            checkpoint_lock: Mutex::new(()),
            checkpointing: checkpointing::Checkpointing::default(),
            rounds: Rounds::default(),
            helpers_max,
            failed: OnceLock::new(),
            header: Mutex::new(header),
            orphans: Orphans::default(),
            orphans_listed: AtomicBool::new(false),
            peer_txs: Mutex::default(),
            new_generations: Mutex::default(),
            quarantine: Mutex::default(),
            notes_directories: AtomicBool::new(passed_failure),
            lazy: Mutex::default(),
            accepted_above: Line::default(),
            in_pieces: Mutex::default(),
            told_full: AtomicU64::new(0),
            vacated: VacatedNames::default(),
            tenant_root: AtomicU64::new(tenant_root),
            kept: AtomicBool::new(kept),
            journal_use,
            devices: AtomicU32::new(devices),
            inodes: inodes::InodeCount::new(kept || tenant_root > 0, inodes_max),
            budget,
            peers,
            counters: Counters::default(),
            compacted_at: Default::default(),
            missed: CachePadded::default(),
            pinned_max: AtomicUsize::new(pinned_max),
            short,
        }
    }

    /// Newest durable transaction.
    pub fn committed_tx(&self) -> TxId {
        TxId(self.committed.load(Ordering::Acquire))
    }
    /// A sync has looked at what changed in this transaction, or will, and makes it durable then. Until it is, names of its inodes
    /// do not move below what is not durable: what the sync saw would be in no place after a crash.
    pub fn want(&self, tx: TxId) {
        self.wanted.fetch_max(tx.0, Ordering::SeqCst);
    }
    /// Whether a sync is about to make the transaction durable.
    pub fn is_wanted(&self, tx: TxId) -> bool {
        self.wanted.load(Ordering::SeqCst) >= tx.0
    }
    /// The running transaction's number. Outside the gate another may run by now; never an older one than this thread has
    /// changed something in.
    pub fn running(&self) -> TxId {
        TxId(self.running.load(Ordering::Acquire))
    }
    /// Whether something changed in the running transaction.
    pub fn has_changes(&self) -> bool {
        !self.gate.read().is_empty()
    }
    /// No number of a group is given out any more, where none is in use, and what has changed can be committed without
    /// ([`NodeTable::close_group`]). The caller is inside no gate.
    pub(crate) fn close_numbers(&self, group: u32) -> Closing {
        self.nodes.close_group(group, || (self.gate.read().cost() / tx::CELL_COST) as u64)
    }
    /// A thread of the volume's own begins to work for the domain: it runs on the CPUs of the domain's node from now on. Others stay
    /// where they are, and so does everybody where there is one node.
    pub fn run_near(&self) {
        if let Some(nodes) = &self.shared.numa {
            nodes.come_near(self.place);
        }
    }
    /// Why the domain is read-only, if it is.
    pub fn failed(&self) -> Option<&str> {
        self.failed.get().map(String::as_str)
    }
    /// # Errors
    /// Where the domain failed, the volume is read-only or was killed.
    pub fn check_writable(&self) -> Result<()> {
        if let Some(why) = self.failed.get() {
            return Err(Error::DomainFailed { domain: self.id, why: why.clone() });
        }
        if self.shared.read_only.load(Ordering::Relaxed) {
            return Err(Error::ReadOnly);
        }
        Ok(())
    }
    /// The domain goes read-only for good (until the next mount), alone.
    pub fn fail(&self, why: &Error) {
        if self.failed.set(why.to_string()).is_ok() && !self.shared.dead.load(Ordering::Relaxed) {
            tracing::error!("{} goes read-only: {why}. Unmount and run fsck.braidfs.", self.id);
        }
    }
    /// Makes everything durable that was written to this domain's groups.
    ///
    /// # Errors
    /// Of a device.
    pub fn flush_devices(&self) -> Result<()> {
        if self.store.devices() == 1 {
            return Ok(self.store.flush()?);
        }
        Ok(self.store.flush_devices(self.space.devices())?)
    }
    /// [`Self::flush_devices`]; with the bug, of the journal's device alone.
    ///
    /// # Errors
    /// Of a device.
    pub(crate) fn flush_devices_but(&self, bug: Bug) -> Result<()> {
        if planted(bug) {
            return Ok(self.store.flush_groups([self.journals_group()])?);
        }
        self.flush_devices()
    }
    /// The devices that hold blocks of this domain; with the bug, the journal's alone.
    pub(crate) fn devices_but(&self, bug: Bug) -> Vec<usize> {
        if planted(bug) {
            return self.store.devices_of([self.journals_group()]);
        }
        let all = self.store.devices();
        self.space.devices().filter(|i| *i < all).collect()
    }
    fn journals_group(&self) -> u32 {
        self.store.geometry().group_of(self.journal.addr(self.journal.head()))
    }
    /// Newest durable transaction of any domain of the volume.
    pub fn committed_tx_of(&self, id: DomainId) -> TxId {
        if id == self.id {
            return self.committed_tx();
        }
        self.peers.committed_tx(id)
    }
    /// Domain of a node, by its number.
    pub fn domain_of(&self, node: impl Into<NodeId>) -> Option<DomainId> {
        let (g, _) = self.store.geometry().node_place(node)?;
        self.peers.owner(g)
    }
    /// The mlog for what this thread writes next: its own, where nothing is to be said against that ([`Space::pick_log`]).
    pub fn pick_mlog(&self) -> usize {
        self.space.pick_log(self.shared.unclaimed_on(self.devices()) == 0)
    }

    /// Whether the running transaction has reserved blocks for metadata. Lock rank of the gate.
    pub(crate) fn has_credits(&self) -> bool {
        self.gate.read().has_credits()
    }

    /// [`Tx::new`] for the transaction behind the running one.
    pub(super) fn next_tx(&self, running: &Tx) -> Arc<Tx> {
        if !own_work::is_own() {
            self.counters.ended_by_others.fetch_add(1, Ordering::Relaxed);
        }
        let short = self.short.min(self.pinned_max.load(Ordering::Relaxed) / 4);
        Arc::new(Tx::new(TxId(running.id.0 + 1), short))
    }

    /// Drops clean pages and unused cells, and counts them out.
    pub fn evict(&self, want: Memory) {
        let leaves = |st: &State| {
            if let Body::Dir(d) = &st.body {
                self.shared.forget_name_time(d.last_name_time());
            }
        };
        let gone = self.cells.evict(want, &|d, t| self.committed_tx_of(d) < t, &leaves);
        if gone.pages > 0 {
            self.ahead.thrown_out(gone.pages as u64, self.memory.may_hold());
        }
        self.memory.remove(gone.pages, 0);
        self.memory.cells_left(&gone);
    }

    /// Marks a cell as changed in `tx`: serialises it first where an older transaction still has to (the cooperative
    /// frozen copy), then puts it on the list, once.
    ///
    /// # Errors
    /// Of writing in-place data or of allocating what was reserved; the domain fails then.
    pub fn touch(&self, tx: &Tx, cell: &Arc<Cell>, st: &mut State) -> Result<()> {
        self.touch_content(tx, cell, st)?;
        st.durability.operation_changes_inode(tx.id);
        Ok(())
    }

    /// [`Self::touch`] by what changes nothing but times and the content of blocks: an fsync may then write these blocks
    /// where they lie ([`Self::in_place_writes`]).
    ///
    /// # Errors
    /// As [`Self::touch`].
    pub fn touch_content(&self, tx: &Tx, cell: &Arc<Cell>, st: &mut State) -> Result<()> {
        let before = st.durability.dirty_tx();
        if before != Some(tx.id) {
            if let Some(older) = before {
                let old = self.committing.lock().clone();
                match old {
                    Some(t) if t.id == older => {
                        let mut out = Out::default();
                        let r = self.serialise(&t, cell, st, &mut out, self.pick_mlog());
                        t.give(out);
                        if let Err(e) = r {
                            self.fail(&e);
                            return Err(e);
                        }
                    }
                    _ => {
                        let e = Error::Corrupt(braidfs_format::Corrupt::new(
                            "transaction",
                            "a cell waits for a transaction that is gone",
                        ));
                        self.fail(&e);
                        return Err(e);
                    }
                }
            }
            st.durability.transaction_takes_inode(tx.id);
            self.forget_durable(st);
            tx.add_cell(cell.clone());
        }
        st.durability.operation_makes_version();
        debug_assert!(st.durability.dirty_tx() == Some(tx.id) && cell.domain == self.id, "{}: {}", cell.ino, tx.id);
        Ok(())
    }

    /// Numbers for `info`.
    pub fn info(&self) -> DomainInfo {
        let s = self.space.stats();
        DomainInfo {
            domain: self.id.0,
            groups: self.space.groups().len() as u32,
            blocks: s.blocks,
            free: s.free,
            segments_free: s.free_segments,
            inodes: self.nodes.total(),
            inodes_free: self.nodes.free(),
            journal_blocks: self.journal.blocks(),
            journal_used: self.journal.used(),
            running_tx: self.running().0,
            committed_tx: self.committed_tx().0,
            commits: self.counters.commits.load(Ordering::Relaxed),
            joiners: self.counters.joiners.load(Ordering::Relaxed),
            checkpoints: self.counters.checkpoints.load(Ordering::Relaxed),
            fast_syncs: self.counters.fast_syncs.sum().max(0) as u64,
            cleaned_blocks: self.counters.cleaned.load(Ordering::Relaxed),
            defragmented_blocks: self.counters.defragmented.load(Ordering::Relaxed),
            relocated_blocks: self.counters.relocated.load(Ordering::Relaxed),
            tenant: self.tenant_root().and_then(|_| self.binding()).map(|b| b.name),
            journal_mode: self.journal_mode().map(braidfs_format::domain::JournalMode::name),
            numa_node: self.place.node(),
            failed: self.failed().map(str::to_owned),
        }
    }
}

impl Domain {
    /// # Errors
    /// Where the domain failed, or the volume was killed.
    pub fn check_failed(&self) -> Result<()> {
        match self.failed.get() {
            Some(why) => Err(Error::DomainFailed { domain: self.id, why: why.clone() }),
            None => self.shared.check_alive(),
        }
    }
    /// Transactions of other domains that shared operations with this one's transactions since the last checkpoint, the
    /// running one included.
    pub fn peers_of_running(&self) -> Frontier {
        // in this order: a commit adds to `peer_txs` before its transaction leaves `committing`
        let mut all = self.gate.read().peers_so_far();
        let committing = self.committing.lock().clone();
        if let Some(t) = committing {
            all.merge(&t.peers_so_far());
        }
        all.merge(&self.peer_txs.lock());
        all
    }
}

#[cfg(test)]
mod tests;
