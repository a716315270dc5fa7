//! What the helpers of a commit share: cells to take, what each made of them, who is still at it.

use super::tx::Tx;
use crate::cell::Cell;
use crate::error::{Error, Result};
use crate::planted::{Bug, planted};
use crate::types::*;
use braidfs_format::journal::Record;
use braidfs_format::node::NodeRecord;
use braidfs_sync::{Condvar, Mutex, MutexGuard, fetch, rank};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

/// Cells are asked for so many before they are taken: most lie in no near cache. By the helper that takes them where it is alone or
/// takes turns with one other; of more, another one mostly takes them, out of that one's cache rather than out of memory.
const AHEAD: usize = 2;

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
    pub(super) nodes: Vec<NodeRecord>,
    error: Option<Error>,
    /// Threads that take cells at this moment.
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

    /// A thread helps, where there is something left.
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

    /// The next cell; `None` where there is none left, or a helper has failed.
    pub(super) fn take(&self) -> Option<&Arc<Cell>> {
        if self.stop.load(Relaxed) {
            return None;
        }
        let next = self.next.fetch_add(1, Relaxed);
        if let Some(later) = self.cells.get(next + AHEAD) {
            fetch::to_change::<Cell>(later);
        }
        self.cells.get(next)
    }

    /// The commit fails.
    pub(super) fn fail(&self, e: Error) {
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
    pub(super) work: &'a Work,
    left: bool,
}

impl Helper<'_> {
    /// Takes what the others have left over, where it is the last one: nobody begins any more once there are no cells left.
    pub(super) fn takes_rest(&self, nodes: &mut Vec<NodeRecord>) -> bool {
        let mut share = self.work.result.lock();
        let last = share.active == 1;
        if last {
            nodes.append(&mut share.nodes);
        }
        last
    }
    /// Hands over what it made, and leaves; or stays, as the last one, with what is still to be packed.
    pub(super) fn leave(&mut self, made: &mut Share) -> Option<Vec<NodeRecord>> {
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
