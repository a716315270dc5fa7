//! Domains without a journal, of tenants that want none (docs/journal-modes.md; the third mode of bladefs' journal, thesis,
//! section 1.3.3).
//!
//! Transactions run and end as in any domain, so that memory and blocks are given back. But a commit writes data and node
//! blocks only, no chunk, and flushes nothing: it is done for want of memory or room, and nobody is promised anything by
//! it. So what lies on the device is in no order, and none of it is believed after a crash: the header, which says from
//! before the first write on that the domain is in use, has the next mount *discard* everything.
//!
//! The tables on the device are those of the last checkpoint at any time, also in the middle of the next one. So a discard
//! reads them, frees all that they say is in use, puts the root directory back as the header keeps it, and is a checkpoint
//! like any other: tables, a flush, the header. A crash before the header's end discards once more.
//!
//! While it is made ready for a rest (an unmount, read-only, a journal again) the domain keeps a journal, as it does until
//! the mount has marked it as in use, and where it is handed over, until that is done: then its state on the device is a
//! whole one, with orphans and all.

use super::sync::skeleton;
use super::{Domain, HeaderPair};
use crate::cell::{Cell, State};
use crate::error::{Error, Result};
use crate::nodes::NodeTable;
use crate::planted::{Bug, planted};
use crate::space::{Class, Space};
use crate::store::Store;
use crate::types::*;
use braidfs_format::Corrupt;
use braidfs_format::codec::Reader;
use braidfs_format::domain::{CLEAN, DomainHeader, JournalMode};
use braidfs_format::group::{SegmentKind, Temperature};
use braidfs_format::inode::{Inode, NOCOW};
use braidfs_format::journal::TableRecord;
use braidfs_format::node::{DIR, NodeBlockBuilder, NodeEntry, NodeKind, NodeRecord};
use std::sync::atomic::Ordering;

/// Generations that numbers of a discarded domain skip: more inodes than one mount gives one number. So none of those that
/// are gone is taken for one that is made later.
const GENERATIONS: u32 = 1 << 20;

/// Numbers of transactions that it skips: more than one mount commits without a journal, of which nothing tells. So no node
/// block that one of them wrote is taken for one that is written later.
const TRANSACTIONS: u64 = 1 << 20;

/// Bytes of extended attributes that such a root directory may have: its header keeps them.
pub(crate) const SCRATCH_ROOT_XATTRS: usize = 2048;

impl Domain {
    /// How it uses its journal, as its header says; `None`: as the mount says.
    pub fn journal_mode(&self) -> Option<JournalMode> {
        JournalMode::from_number(self.journal_use.mode.load(Ordering::Relaxed)).unwrap_or_default()
    }

    /// Whether it has no journal, but for a rest.
    pub(crate) fn is_scratch(&self) -> bool {
        self.journal_mode() == Some(JournalMode::Scratch)
    }

    /// What is written when.
    pub fn data_mode(&self) -> DataMode {
        self.data_mode_of(self.journal_mode())
    }

    /// The same, had its header such a mode.
    pub(crate) fn data_mode_of(&self, mode: Option<JournalMode>) -> DataMode {
        match mode {
            None => self.shared.options.data,
            Some(JournalMode::Ordered | JournalMode::Scratch) => DataMode::Ordered,
            Some(JournalMode::Data) => DataMode::Journal,
        }
    }

    pub(super) fn set_journal_mode(&self, mode: Option<JournalMode>) {
        self.journal_use.mode.store(JournalMode::number(mode), Ordering::Relaxed);
    }

    /// Whether blocks are reserved also for pages that would be overwritten in place.
    pub(crate) fn reserves_all(&self) -> bool {
        self.journal_use.reserves_all.load(Ordering::Relaxed)
    }

    /// Before and after nothing is overwritten in place: who makes pages dirty from now on reserves blocks for all of them, or not.
    /// When the first returns there are no others.
    ///
    /// # Errors
    /// As [`Domain::flush_cell`].
    pub(crate) fn reserve_all(&self, all: bool) -> Result<()> {
        if self.journal_use.reserves_all.swap(all, Ordering::Relaxed) == all || !all {
            return Ok(());
        }
        // Who did not see that has the file locked until its pages are dirty.
        let in_place = |c: &Cell| c.kind == FileKind::File && c.state.write().flags & NOCOW != 0;
        self.cells.all().iter().filter(|c| in_place(c)).try_for_each(|c| self.flush_cell(c))
    }

    /// Whether a commit makes anything durable. Else nobody waits for one but for memory and room.
    pub fn keeps_journal(&self) -> bool {
        self.journal_use.keeps.load(Ordering::Acquire)
    }

    /// Whether the running transaction has to fit the journal.
    pub(super) fn fits_journal(&self) -> bool {
        self.journal_use.fits.load(Ordering::Acquire)
    }

    /// Whether no name crosses its border.
    pub fn is_closed(&self) -> bool {
        self.journal_use.closed.load(Ordering::Relaxed)
    }

    /// No name crosses its border from now on, or again.
    pub(crate) fn close_border(&self, closed: bool) {
        self.journal_use.closed.store(closed, Ordering::Relaxed);
    }

    /// It keeps no journal from now on: the header says durably that it is in use, and has no journal.
    pub(crate) fn begin_scratch(&self) {
        if self.is_scratch() {
            let _one = self.commit_lock.lock();
            self.journal_use.keeps.store(false, Ordering::Release);
            self.journal_use.fits.store(false, Ordering::Release);
        }
    }

    /// It keeps a journal again, before it is checkpointed for a rest or to have one for good: all that it did without one is
    /// committed, so that the next checkpoint has it.
    ///
    /// # Errors
    /// As [`Domain::commit`].
    pub(crate) fn end_scratch(&self) -> Result<()> {
        if self.keeps_journal() {
            return Ok(());
        }
        // who enters after that makes no transaction that the journal could not take
        self.journal_use.fits.store(true, Ordering::Release);
        self.commit()?;
        {
            let _one = self.commit_lock.lock();
            self.journal_use.keeps.store(true, Ordering::Release);
        }
        // no commit has listed them in the journal
        if self.orphans.is_empty() { Ok(()) } else { self.list_orphans() }
    }

    /// A domain without a journal, whose tables nothing else has written, checkpoints where those that changed take much more
    /// memory than tables shall. The caller is inside no gate and holds no cell lock.
    ///
    /// # Errors
    /// As [`Domain::checkpoint`].
    pub(crate) fn write_excess_tables(&self) -> Result<()> {
        let excess = || self.space.has_excess_tables() || self.nodes.has_excess_tables();
        if self.keeps_journal() || !excess() {
            return Ok(());
        }
        self.checkpoint()?;
        self.space.sweep_owners();
        self.nodes.sweep_entries();
        Ok(())
    }

    /// The header of a domain that is told of as in use: of one without a journal nothing is believed from now on.
    pub(crate) fn mark_scratch_in_use(&self, h: &mut DomainHeader) {
        if !planted(Bug::ScratchUntold) && !planted(Bug::ScratchToldLate) {
            h.scratch_at_rest = 0;
        }
    }

    /// What the bug leaves for the second copy of that header, which it does not flush; without it nothing.
    pub(crate) fn mark_scratch_late(&self, h: &mut DomainHeader) {
        if planted(Bug::ScratchToldLate) {
            h.scratch_at_rest = 0;
        }
    }

    /// The header of one that is checkpointed, with what came since in the journal.
    pub(super) fn mark_scratch_at_rest(&self, h: &mut DomainHeader) {
        h.scratch_at_rest = (h.is_scratch() && self.keeps_journal()).into();
    }

    /// The record of the root directory, as a discard puts it back.
    ///
    /// # Errors
    /// [`Error::NoSpace`] where its attributes and its name are more than the header takes.
    pub(crate) fn root_record(&self, root: &Cell, st: &State) -> Result<Vec<u8>> {
        let record = skeleton(self, root, st).encode();
        if record.len() > braidfs_format::domain::SCRATCH_ROOT_MAX { Err(Error::NoSpace) } else { Ok(record) }
    }

    /// Whether the header keeps this one, which is the root directory of a domain without a journal.
    pub(crate) fn keeps_root(&self, c: &Cell) -> bool {
        self.is_scratch() && self.is_tenant_root(c.ino)
    }

    /// Has the header keep what has changed of the root directory, durably, where this is one of a domain without a journal.
    /// The caller has its cell locked.
    ///
    /// # Errors
    /// As [`Self::root_record`]; of the device.
    pub(crate) fn keep_root(&self, c: &Cell, st: &State) -> Result<()> {
        if !self.keeps_root(c) {
            return Ok(());
        }
        let record = self.root_record(c, st)?;
        let keep = |h: &mut DomainHeader| {
            h.keep_scratch_root(&record);
        };
        self.write_header(keep).and_then(|()| self.write_header(keep))
    }
}

/// Makes a domain that was in use without a journal when the volume stopped an empty one, with its root directory:
/// tables, a flush, then the header, durably. Blocks and numbers are as its last checkpoint left them.
///
/// # Errors
/// Of the device; [`Error::Corrupt`] where tables do not hold, or the header's record of the root directory is none.
pub(super) fn discard(
    store: &Store,
    id: DomainId,
    space: &Space,
    nodes: &NodeTable,
    header: &mut HeaderPair,
) -> Result<()> {
    // only the daemon may have died: nothing that counts is overwritten before the newest header is durable
    store.flush()?;
    let mut new = header.header;
    if planted(Bug::ScratchEmptiedLate) {
        let mut h = header.header;
        h.scratch_at_rest = 1;
        h.flags = (h.flags.get() | CLEAN).into();
        write(store, header, h)?;
    }
    empty(store, id, space, nodes, &mut new)?;
    store.flush()?;
    write(store, header, new)
}

fn write(store: &Store, header: &mut HeaderPair, new: DomainHeader) -> Result<()> {
    let (copy, seq) = (1 - header.copy, header.seq + 1);
    let dev = store.device(0);
    dev.write(header.pair + copy as u64, &new.to_block(store.volume, header.pair, copy, seq))?;
    dev.flush()?;
    *header = HeaderPair { pair: header.pair, copy, seq, durable: seq, header: new };
    Ok(())
}

/// [`discard`] but for the header, which is only changed, and a flush.
///
/// # Errors
/// As [`discard`].
pub(crate) fn empty(
    store: &Store,
    id: DomainId,
    space: &Space,
    nodes: &NodeTable,
    header: &mut DomainHeader,
) -> Result<()> {
    let root = root_of(header)?;
    nodes.free_all(GENERATIONS)?;
    space.free_all()?;
    let tx = TxId(header.last_tx.get().saturating_add(TRANSACTIONS));
    header.last_tx = tx.0.into();
    space.reserve(1, true)?;
    let addr = space.alloc(0, Class { kind: SegmentKind::Node, temperature: Temperature::Hot }, 1, None)?.addr;
    let mut block = NodeBlockBuilder::default();
    let index = block.push(&root.encode()).ok_or_else(|| bad("the record of its root directory fits no block"))?;
    store.write(addr, &block.finish(id.0, store.volume, addr, tx.0))?;
    let entry =
        NodeEntry { addr, index, flags: root.flags, generation: root.generation, written: header.last_tx.get() as u32 };
    let alloc = TableRecord::Alloc {
        addr,
        len: 1,
        kind: SegmentKind::Node,
        temperature: Temperature::Hot,
        owner: InodeNo(0),
        lblk: 0,
    };
    let mut blocks = space.replaying();
    blocks.apply(alloc, tx)?;
    blocks.apply(TableRecord::Live { addr, live: 1 }, tx)?;
    let mut newest = nodes.newest();
    newest.set(root.node, entry)?;
    newest.bring_home()?;
    header.checkpoint = header.checkpoint.get().saturating_add(1).into();
    nodes.write_home()?;
    space.write_home(header.checkpoint.get())?;
    header.tables = space.table_sum().into();
    header.checkpointed_tx = header.last_tx;
    header.scratch_at_rest = 1;
    header.flags = (header.flags.get() | CLEAN).into();
    Ok(())
}

/// The root directory, without names in it.
fn root_of(header: &DomainHeader) -> Result<NodeRecord> {
    let record = NodeRecord::decode(&mut Reader::new(header.scratch_root_record(), "root directory of a tenant"))?;
    let inode = Inode::decode(&record.payload)?;
    let is_root = record.node == InodeNo(header.tenant_root.get()).node()
        && record.generation == header.tenant_generation.get()
        && record.kind == NodeKind::Inode
        && record.flags & DIR != 0
        && FileKind::from_mode(inode.mode) == Some(FileKind::Dir)
        && !inode.links.is_empty();
    if is_root { Ok(record) } else { Err(bad("its record of the tenant's root directory is of another inode")) }
}

fn bad(why: &str) -> Error {
    Corrupt::new("domain header", why).into()
}
