//! What the helpers of a commit share, and what each of them does.

use super::Domain;
use super::out::{Out, Payload};
use super::tx::Tx;
use crate::cell::Cell;
use crate::error::{Error, Result};
use crate::planted::{Bug, planted};
use crate::types::*;
use braidfs_format::group::{SegmentKind, Temperature};
use braidfs_format::journal::Record;
use braidfs_format::node::{NodeBlockBuilder, NodeEntry, NodeRecord, RECORDS_MAX};
use braidfs_sync::{Condvar, Mutex, MutexGuard, rank};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

/// Bytes of data that a helper gathers before it writes them.
const BATCH_BYTES: usize = 4 << 20;

/// A commit that is under way, as far as others can help.
#[derive(Debug)]
pub struct Work {
    pub(super) tx: Arc<Tx>,
    pub(super) cells: Vec<Arc<Cell>>,
    next: AtomicUsize,
    /// One has failed.
    stop: AtomicBool,
    result: Mutex<Share, rank::WorkResult>,
    idle: Condvar,
}

/// What helpers hand to the committer.
#[derive(Debug, Default)]
pub(super) struct Share {
    pub(super) records: Vec<Record>,
    pub(super) free: Vec<(NodeId, u32)>,
    pub(super) dead: Vec<Arc<Cell>>,
    /// Node records that fill no block: the last helper packs those of all.
    nodes: Vec<NodeRecord>,
    error: Option<Error>,
    /// Who helps.
    active: usize,
}

impl Work {
    /// The cells of a transaction that no operation changes any more.
    pub(super) fn new(tx: Arc<Tx>) -> Self {
        Self {
            cells: tx.take_cells(),
            tx,
            next: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            result: Mutex::default(),
            idle: Condvar::new(),
        }
    }

    /// Cells that somebody has taken.
    #[cfg(test)]
    pub(super) fn taken(&self) -> usize {
        self.next.load(Relaxed)
    }

    pub(super) fn begin(&self) -> Option<Helper<'_>> {
        let mut share = self.result.lock();
        if self.next.load(Relaxed) >= self.cells.len() || self.stop.load(Relaxed) {
            return None;
        }
        share.active += 1;
        Some(Helper { work: self, left: false })
    }

    fn leave(&self, mut share: MutexGuard<'_, Share>) {
        share.active -= 1;
        if share.active == 0 {
            self.idle.notify_all();
        }
    }

    fn take(&self) -> Option<&Arc<Cell>> {
        if self.stop.load(Relaxed) {
            return None;
        }
        self.cells.get(self.next.fetch_add(1, Relaxed))
    }

    fn fail(&self, e: Error) {
        self.stop.store(true, Relaxed);
        self.result.lock().error.get_or_insert(e);
    }

    /// What all helpers made, once none is at it any more: by the committer, when there are no cells left.
    ///
    /// # Errors
    /// The first of a helper.
    pub(super) fn end(&self) -> Result<Share> {
        let mut share = self.result.lock();
        while share.active > 0 && !planted(Bug::HelperForgotten) {
            self.idle.wait(&mut share);
        }
        let active = share.active;
        let mut made = std::mem::replace(&mut *share, Share { active, ..Share::default() });
        match made.error.take() {
            Some(e) => Err(e),
            None => Ok(made),
        }
    }
}

/// A thread that helps. Where it panics the commit fails, and nobody waits for it.
pub(super) struct Helper<'a> {
    work: &'a Work,
    left: bool,
}

impl Helper<'_> {
    /// Takes what the others have left over, where it is the last one: nobody begins any more once there are no cells left.
    fn takes_rest(&self, nodes: &mut Vec<NodeRecord>) -> bool {
        let mut share = self.work.result.lock();
        let last = share.active == 1;
        if last {
            nodes.append(&mut share.nodes);
        }
        last
    }
    /// Hands over what it made, and leaves; or stays, as the last one, with what is still to be packed.
    fn leave(&mut self, made: &mut Share) -> Option<Vec<NodeRecord>> {
        let mut share = self.work.result.lock();
        share.nodes.append(&mut made.nodes);
        if share.active == 1 && !share.nodes.is_empty() {
            return Some(std::mem::take(&mut share.nodes));
        }
        share.records.append(&mut made.records);
        share.free.append(&mut made.free);
        share.dead.append(&mut made.dead);
        self.left = true;
        self.work.leave(share);
        None
    }
}

impl Drop for Helper<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.work.fail(Error::Io(std::io::Error::other("a thread panicked in a commit")));
        }
        if !self.left {
            self.work.leave(self.work.result.lock());
        }
    }
}

impl Domain {
    /// Takes cells from the list and writes them out, until there is none left. How many it took.
    pub(super) fn help(&self, w: &Work) -> usize {
        let Some(mut helper) = w.begin() else { return 0 };
        let mut took = 0;
        if let Err(e) = self.write_cells(&mut helper, &mut took) {
            w.fail(e);
        }
        took
    }

    fn write_cells(&self, helper: &mut Helper<'_>, took: &mut usize) -> Result<()> {
        let w = helper.work;
        let mlog = self.pick_mlog();
        let mut out = Out::default();
        while let Some(cell) = w.take() {
            *took += 1;
            let mut st = cell.state.write();
            self.serialise(&w.tx, cell, &mut st, &mut out, mlog)?;
            drop(st);
            if out.bytes >= BATCH_BYTES {
                out.bytes = 0;
                self.submit(std::mem::take(&mut out.writes))?;
            }
        }
        let mut made = Share::default();
        let mut nodes = std::mem::take(&mut out.nodes);
        loop {
            let all = helper.takes_rest(&mut nodes);
            made.nodes = self.pack(&w.tx, nodes, all, &mut out, &mut made.records, mlog)?;
            self.submit(std::mem::take(&mut out.writes))?;
            made.free.append(&mut out.free);
            made.dead.append(&mut out.dead);
            match helper.leave(&mut made) {
                Some(rest) => nodes = rest,
                None => return Ok(()),
            }
        }
    }

    /// Packs node records into node blocks of the node log; their facts go to `records`, the blocks to `out`. Records that
    /// fill no block are returned, but with `all`.
    pub(super) fn pack(
        &self,
        tx: &Tx,
        nodes: Vec<NodeRecord>,
        all: bool,
        out: &mut Out,
        records: &mut Vec<Record>,
        mlog: usize,
    ) -> Result<Vec<NodeRecord>> {
        let mut b = NodeBlockBuilder::default();
        let mut in_block: Vec<(NodeRecord, u8)> = Vec::new();
        let mut nodes = nodes.into_iter().peekable();
        while nodes.peek().is_some() || !b.is_empty() {
            if let Some(n) = nodes.peek() {
                if let Some(index) = b.push(&n.encode()) {
                    in_block.extend(nodes.next().map(|n| (n, index)));
                    continue;
                }
            } else if !all {
                break;
            }
            // else this would write empty blocks for ever
            assert!(!in_block.is_empty() && in_block.len() <= RECORDS_MAX, "{} records in a block", in_block.len());
            let addr = self.alloc_meta(tx, mlog)?;
            let block = b.finish(self.id.0, self.store.volume, addr, tx.id.0);
            records.push(Record::Alloc {
                addr,
                len: 1,
                kind: SegmentKind::Node,
                temperature: Temperature::Hot,
                owner: InodeNo(0),
                lblk: 0,
            });
            records.push(Record::Live { addr, live: in_block.len() as u8 });
            for (n, index) in in_block.drain(..) {
                let entry = NodeEntry { addr, index, flags: n.flags, generation: n.generation };
                records.push(Record::Node { node: n.node, entry });
            }
            out.bytes += block.len();
            out.writes.push((addr, Payload::Raw(block)));
        }
        Ok(in_block.into_iter().map(|(n, _)| n).collect())
    }
}
