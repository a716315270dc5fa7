//! Checkpoint: committed → checkpointed. The home tables get the committed state, then the journal's tail moves.
//!
//! Node records and data already lie where they belong, so a checkpoint writes node table, owner table and segment
//! table blocks only, each to the other half of its shadow pair. Then the domain header tells of it. Domains checkpoint
//! on their own and in parallel, and nobody stops writing meanwhile.

use super::Domain;
use crate::braid::frontier::Frontier;
use crate::error::{Error, Result};
use crate::nodes::Closing;
use crate::planted::{self, Bug, planted};
use crate::space::Emptying;
use crate::types::{InodeNo, TxId, Way};
use braidfs_format::domain::{CLEAN, DomainHeader, NEEDS_GC, PEER_FAILED};
use braidfs_sync::MutexGuard;
use braidfs_sync::phases::{self, Phase};
use std::sync::atomic::Ordering;

/// A checkpoint that was begun ([`Domain::begin_checkpoint`]).
pub(crate) struct Begun {
    number_of_this: u64,
    /// The newest transaction that it covers.
    upto: TxId,
    quarantined: Vec<InodeNo>,
    /// Transactions of other domains, which are durable, or of domains that have failed.
    peers: Frontier,
    /// There are such domains among these.
    peer_failed: bool,
    /// As the header counts.
    number: u64,
}

/// What the header tells of a checkpoint.
pub(crate) struct NewHeader {
    /// The first transaction that is kept, and where the journal begins from now on.
    keep: u64,
    tail: u64,
    /// Number of the header.
    seq: u64,
}

impl Domain {
    /// Numbers of removed directories that stay taken until the next checkpoint.
    pub fn quarantined_numbers(&self) -> usize {
        self.quarantine.lock().len()
    }

    /// A directory is about to be made: nothing hangs in it yet.
    pub(crate) fn note_new_directory(&self, ino: InodeNo) {
        if self.notes_directories.load(Ordering::Acquire) {
            self.quarantine.lock().note_made(ino);
        }
    }

    /// Checkpoints all that is committed, or waits for a checkpoint that does so: of those who ask while one is being
    /// written one writes the next, for all of them. The caller is inside no gate and holds no cell lock.
    ///
    /// # Errors
    /// Of the device: the domain is then read-only.
    pub fn checkpoint(&self) -> Result<()> {
        let wanted = self.checkpointing.next();
        let _one = self.checkpoint_lock.lock();
        if self.checkpointing.has_ended(wanted) {
            return Ok(());
        }
        self.checkpoint_locked(&[]).inspect_err(|e| self.fail(e))
    }

    /// [`Self::checkpoint`], unless the journal's tail has moved on from `tail`: whoever needs room looks again then.
    fn checkpoint_beyond(&self, tail: u64) -> Result<()> {
        let wanted = self.checkpointing.next();
        let _one = self.checkpoint_lock.lock();
        if self.journal.tail() != tail || self.checkpointing.has_ended(wanted) {
            return Ok(());
        }
        self.checkpoint_locked(&[]).inspect_err(|e| self.fail(e))
    }

    /// Gives up those of `groups` that hold nothing: a checkpoint after which neither the tables nor the journal say
    /// anything of them. Then calls `given` with them, while no other checkpoint runs, and forgets them. Blocks that a
    /// transaction freed are in use until it is durable, and so are numbers of inodes. The caller is inside no gate, holds
    /// no cell lock, and keeps others from claiming groups.
    ///
    /// # Errors
    /// Of the device: the domain is then read-only.
    pub(crate) fn give_up_groups(&self, groups: &[u32], given: impl FnOnce(&[u32]) -> Result<()>) -> Result<()> {
        if self.nodes.is_few_without(groups.len() as u64) {
            // what has been promised numbers takes them first, in those groups perhaps
            self.commit()?;
        }
        let _one = self.checkpoint_lock.lock();
        let close = |g: &u32| {
            if !self.space.close_group(*g) {
                return false;
            }
            let closed = self.close_numbers(*g) == Closing::Done;
            if !closed {
                self.space.reopen_group(*g);
            }
            closed
        };
        let leaving: Vec<u32> = groups.iter().copied().filter(close).collect();
        if leaving.is_empty() { Ok(()) } else { self.let_go_of(&leaving, given) }
    }

    /// As [`Self::give_up_groups`], of a group that was emptied for it, and of which no inode is given out any more. Where it
    /// holds something still, or again, it is one like any other afterwards, and the answer is false.
    ///
    /// # Errors
    /// As [`Self::give_up_groups`].
    pub(crate) fn give_up_emptied(&self, e: Emptying, given: impl FnOnce(&[u32]) -> Result<()>) -> Result<bool> {
        let _one = self.checkpoint_lock.lock();
        let Some(group) = self.space.close_emptied(e) else { return Ok(false) };
        self.let_go_of(&[group], given).map(|()| true)
    }

    /// The part of [`Self::give_up_groups`] behind the closing of the groups; under the lock of the checkpoint.
    fn let_go_of(&self, leaving: &[u32], given: impl FnOnce(&[u32]) -> Result<()>) -> Result<()> {
        let let_go = || -> Result<()> {
            // The newest transaction is kept for its list of orphans, and may be the one that freed what was there. Also where
            // there are none right now: a file may lose its name before the checkpoint has ended.
            self.list_orphans()?;
            // with the bug the transaction that freed what was there has not been committed
            planted::too_early(Bug::GivenEarly, || self.commit())?;
            self.checkpoint_locked(leaving)
        };
        let early = if planted(Bug::EmptiedGivenEarly) { Bug::EmptiedGivenEarly } else { Bug::GivenEarly };
        planted::in_order(early, let_go, || given(leaving)).inspect_err(|e| self.fail(e))?;
        for g in leaving {
            if planted(Bug::OwnedTwice) {
                self.nodes.reopen_group(*g);
                self.space.reopen_group(*g);
                continue;
            }
            self.nodes.drop_group(*g);
            self.space.drop_group(*g);
        }
        Ok(())
    }

    fn checkpoint_locked(&self, leaving: &[u32]) -> Result<()> {
        let _spending = self.shared.spend(&self.budget);
        let _span = tracing::debug_span!("checkpoint", domain = %self.id).entered();
        let begun = self.begin_checkpoint()?;
        self.write_home(&begun, leaving)?;
        self.flush_devices_but(Bug::HomesOneDevice)?;
        let told = self.write_checkpoint_header(&begun)?;
        self.store.device(0).flush()?;
        self.end_checkpoint(&begun, &told);
        Ok(())
    }

    /// The first step of a checkpoint, under `checkpoint_lock` as the others: what it covers, and that the other domains'
    /// sides of that are durable.
    pub(crate) fn begin_checkpoint(&self) -> Result<Begun> {
        if let Some(why) = self.failed() {
            return Err(Error::DomainFailed { domain: self.id, why: why.to_owned() });
        }
        let number_of_this = self.checkpointing.begin();
        let upto = self.committed_tx();
        // before `peer_txs`: let go when those are durable
        let mut quarantined = self.quarantine.lock().take();
        // other domains' sides of our cross-domain operations must survive without our journal
        let peers = self.peer_txs.lock().clone();
        let mut peer_failed = false;
        for (d, t) in peers.iter() {
            if !planted(Bug::PeersForgotten) {
                // the journal of this one goes on all the same, and the next mount is told
                peer_failed |= self.peers.commit_upto(d, t).is_err();
            }
        }
        // What the failed domain takes back may hang in directories that are gone here.
        if peer_failed || self.has_passed_failure() {
            let mut q = self.quarantine.lock();
            if peer_failed {
                q.pass_failure();
                self.notes_directories.store(true, Ordering::Release);
            }
            q.retain_made(&mut quarantined);
        }
        let number = self.header.lock().header.checkpoint.get().saturating_add(1);
        Ok(Begun { number_of_this, upto, quarantined, peers, peer_failed, number })
    }

    /// The second step: the home tables, but for a flush of the domain's devices, which must follow.
    pub(crate) fn write_home(&self, begun: &Begun, leaving: &[u32]) -> Result<()> {
        planted::too_early(Bug::TailEarly, || {
            let (_, tail) = self.newest_tail(begun);
            self.write_header(|h| self.move_tail(begun, h, tail))
        })?;
        // the segment tables last: they count what is written
        let blocks = self.nodes.write_home()? + self.space.write_home_without(begun.number, leaving)?;
        self.budget.charge(Way::Write, blocks * 4096, blocks);
        Ok(())
    }

    /// Transactions from the first one on are kept, and the journal from the second one on.
    fn newest_tail(&self, begun: &Begun) -> (u64, u64) {
        // orphans are listed in the newest commit only: it stays
        let listed = self.orphans_listed.load(Ordering::Acquire) || !self.orphans.is_empty();
        let keep = if listed { begun.upto.0 } else { begun.upto.0 + 1 };
        let first_pos = self.first_pos.lock();
        let tail = first_pos.tail(keep, begun.upto.0).unwrap_or_else(|| self.journal.head());
        // before a header says so
        let (old, head) = (self.journal.tail(), self.journal.head());
        assert!(old <= tail && tail <= head, "{}: journal tail {old} to {tail}, head {head}", self.id);
        (keep, tail)
    }

    fn move_tail(&self, begun: &Begun, h: &mut DomainHeader, tail: u64) {
        if begun.peer_failed {
            h.flags = (h.flags.get() | PEER_FAILED).into();
        }
        h.tail_pos = tail.into();
        h.head_pos = self.journal.head().into();
        h.checkpointed_tx = begun.upto.0.into();
        h.last_tx = begun.upto.0.into();
    }

    /// The third step: the header tells of the home tables, which are durable. A flush of it must follow.
    pub(crate) fn write_checkpoint_header(&self, begun: &Begun) -> Result<NewHeader> {
        let (keep, tail) = self.newest_tail(begun);
        let seq = self.change_header(|h| {
            self.move_tail(begun, h, tail);
            h.checkpoint = begun.number.into();
            h.tables = self.space.table_sum().into();
        })?;
        Ok(NewHeader { keep, tail, seq })
    }

    /// The last step: the header is durable.
    pub(crate) fn end_checkpoint(&self, begun: &Begun, told: &NewHeader) {
        self.note_header_durable(told.seq);
        self.journal.release(told.tail);
        self.first_pos.lock().forget_before(told.keep, begun.upto.0);
        for n in &begun.quarantined {
            self.nodes.release(n.node());
        }
        self.peer_txs.lock().drop_covered(&begun.peers);
        self.checkpointing.end(begun.number_of_this);
        self.counters.checkpoints.fetch_add(1, Ordering::Relaxed);
    }

    /// Changes the domain header and makes it durable.
    ///
    /// # Errors
    /// Of the device.
    pub fn write_header(&self, change: impl FnOnce(&mut DomainHeader)) -> Result<()> {
        let seq = self.change_header(change)?;
        self.store.device(0).flush()?;
        self.note_header_durable(seq);
        Ok(())
    }

    /// Changes the domain header; its number. A flush of the volume's first device must follow, and then
    /// [`Self::note_header_durable`].
    pub(crate) fn change_header(&self, change: impl FnOnce(&mut DomainHeader)) -> Result<u64> {
        self.shared.check_alive()?;
        let mut h = self.header.lock();
        let mut new = h.header;
        change(&mut new);
        let dev = self.store.device(0);
        if h.durable < h.seq {
            // the copy that is about to be overwritten may be the only one on the device that holds
            dev.flush()?;
            h.durable = h.seq;
        }
        let (copy, seq) = (1 - h.copy, h.seq + 1);
        let block = new.to_block(self.store.volume, h.pair, copy, seq);
        self.budget.charge_run(Way::Write, block.len());
        dev.write(h.pair + copy as u64, &block)?;
        h.copy = copy;
        h.seq = seq;
        h.header = new;
        Ok(seq)
    }

    /// A flush has succeeded that began after [`Self::change_header`] gave `seq`.
    pub(crate) fn note_header_durable(&self, seq: u64) {
        let mut h = self.header.lock();
        h.durable = h.durable.max(seq);
    }

    /// The header says that the numbers of this mount's transactions are used up ([`DomainHeader::first_tx`]).
    pub(crate) fn mark_opened(&self, h: &mut DomainHeader) {
        h.mounts = (h.mounts.get().wrapping_add(1)).into();
    }

    /// The header says that the domain is in use from now on, and after a crash, whose recovery has been told of
    /// ([`Self::mark_opened`]), that links across domains are to be compared.
    pub(crate) fn mark_in_use(&self, h: &mut DomainHeader, after_crash: bool) {
        let mut f = h.flags.get() & !CLEAN;
        if after_crash {
            f |= NEEDS_GC;
        } else {
            self.mark_opened(h);
        }
        h.flags = f.into();
        h.head_pos = self.journal.head().into();
    }

    /// Whether the background GC after a crash has not finished.
    pub fn needs_gc(&self) -> bool {
        self.header.lock().header.flags.get() & NEEDS_GC != 0
    }

    /// Whether a checkpoint passed the failure of another domain ([`PEER_FAILED`]), and no mount has compared the links since.
    pub fn has_passed_failure(&self) -> bool {
        self.header.lock().header.flags.get() & PEER_FAILED != 0
    }

    /// All links across domains were compared, and what that changed is in the tables.
    ///
    /// # Errors
    /// Of the device.
    pub fn forget_passed_failure(&self) -> Result<()> {
        self.write_header(|h| h.flags = (h.flags.get() & !PEER_FAILED).into())?;
        self.notes_directories.store(false, Ordering::Release);
        self.quarantine.lock().forget_made();
        Ok(())
    }

    /// Commits and checkpoints until an operation may enter again: done by the thread that needs the room.
    ///
    /// # Errors
    /// As [`Self::commit`] and [`Self::checkpoint`].
    pub fn make_journal_room(&self) -> Result<()> {
        let _phase = phases::enter(Phase::Journal);
        let tail = self.journal.tail();
        let cost = self.gate.read().cost();
        if cost > 0 {
            self.commit()?;
        }
        if !self.fits_journal() {
            return Ok(());
        }
        // somebody else may have done it while we waited, or does it now
        if self.journal.tail() == tail {
            self.checkpoint_beyond(tail)?;
        }
        if self.journal.tail() == tail && cost == 0 {
            // the newest commit is kept for its list of orphans and fills the journal: log the list anew
            self.relist_orphans()?;
        }
        Ok(())
    }

    /// Writes the list of orphans into a transaction of its own, so that an older one need not be kept.
    fn relist_orphans(&self) -> Result<()> {
        self.list_orphans()?;
        self.checkpoint()
    }

    /// Commits a transaction that begins no earlier than now and lists the orphans.
    pub(super) fn list_orphans(&self) -> Result<()> {
        {
            let g = self.gate.read();
            g.record_all([braidfs_format::journal::Record::Orphans(Vec::new())]);
        }
        self.commit()
    }

    /// The header as a proper unmount leaves it, where all is checkpointed and no inode is unlinked and open. What came into
    /// the journal after the checkpoint began is in no home table: where there is such, the next mount replays it. Nor is it clean
    /// where another domain's failure was passed.
    pub(crate) fn mark_clean(&self, h: &mut DomainHeader) {
        self.mark_scratch_at_rest(h);
        let passed = h.flags.get() & PEER_FAILED != 0;
        if !passed && self.orphans.is_empty() && !self.first_pos.lock().has_newer(h.checkpointed_tx.get()) {
            h.tail_pos = h.head_pos;
            h.flags = (h.flags.get() | CLEAN).into();
        }
    }

    /// Whether a header could be clean ([`Self::mark_clean`]), and the newest one is not.
    pub(crate) fn is_left_unclean(&self) -> bool {
        let flags = self.header.lock().header.flags.get();
        self.failed().is_none() && self.orphans.is_empty() && flags & (CLEAN | PEER_FAILED) == 0
    }

    /// The header before its time: a planted bug.
    pub(crate) fn clean_early(&self) -> Result<()> {
        planted::too_early(Bug::CleanEarly, || {
            self.write_header(|h| {
                h.head_pos = self.journal.head().into();
                h.tail_pos = h.head_pos;
                h.flags = (h.flags.get() | CLEAN).into();
            })
        })
    }

    /// Keeps others from checkpointing this domain; `None`: one does.
    pub(crate) fn try_checkpoint_alone(&self) -> Option<MutexGuard<'_, ()>> {
        self.checkpoint_lock.try_lock()
    }
}
