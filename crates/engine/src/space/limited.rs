//! A domain's account under a limit ([`super::limit`]).

use super::Space;
use super::limit::kept_back;
use crate::error::{Error, Result};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

/// With so many blocks more, what is accepted goes on for a while (4 MiB).
const PROMISED_STEP: u64 = 1024;

impl Space {
    /// The most blocks that may be in use or reserved.
    pub(crate) fn hard_limit(&self) -> Option<u64> {
        Some(self.limit.hard.load(Relaxed)).filter(|n| *n < u64::MAX)
    }

    /// Changes it. Where more is in use already nothing more is to be had until enough is deleted. `promised`: so many blocks
    /// beyond it may have been accepted by a front end ([`Self::reserve_accepted`]).
    pub(crate) fn set_hard_limit(&self, blocks: Option<u64>, promised: u64) {
        self.limit.changes.fetch_add(1, SeqCst);
        self.limit.promised.store(promised, Relaxed);
        self.limit.hard.store(blocks.unwrap_or(u64::MAX), Relaxed);
        self.withhold();
    }

    /// Blocks beyond the limit that may still come from what was accepted.
    pub(crate) fn promised(&self) -> u64 {
        self.limit.promised.load(Relaxed)
    }

    /// How often the limit was changed.
    pub(crate) fn limit_changes(&self) -> u64 {
        self.limit.changes.load(SeqCst)
    }

    /// Nobody holds anything that was accepted before the limit was changed for the `changes`th time; if it was changed again,
    /// what was accepted before that is still promised. Under the lock of the group table, as the changes are.
    pub(crate) fn end_promises(&self, changes: u64) {
        if self.limit_changes() == changes {
            self.limit.promised.store(0, Relaxed);
        }
    }

    /// Whether the domain has too few blocks of its own for what was accepted before its limit went down.
    pub(crate) fn lacks_promised(&self) -> bool {
        let want = self.promised().min(PROMISED_STEP) as i64;
        want > 0 && self.account.sum() + self.withheld() - want < self.hidden() as i64
    }

    /// Promises blocks for what a front end accepted: as an ordinary reservation, else out of what was promised before the
    /// limit went down. How many came out of that: for [`Self::unreserve_accepted`].
    ///
    /// # Errors
    /// [`Error::NoSpace`].
    pub(crate) fn reserve_accepted(&self, blocks: u64) -> Result<u64> {
        if self.reserve(blocks, false).is_ok() {
            return Ok(0);
        }
        let enough = |n: u64| n.checked_sub(blocks);
        if self.limit.promised.fetch_update(Relaxed, Relaxed, enough).is_err() {
            return Err(Error::NoSpace);
        }
        let taken = self.take_from_account(blocks, self.hidden() as i64 - self.withheld());
        if taken.is_err() {
            self.limit.promised.fetch_add(blocks, Relaxed);
        }
        taken.map(|()| blocks)
    }

    /// Gives back reserved blocks that were not taken, `promised` of which came out of what was promised: they are promised
    /// again, to a write that was accepted and is tried once more. (Where the promises ended just now that is a few blocks too
    /// many until the limit changes; the other way round an accepted write would be lost.)
    pub(crate) fn unreserve_accepted(&self, blocks: u64, promised: u64) {
        self.unreserve(blocks);
        if promised > 0 {
            self.limit.promised.fetch_add(promised, Relaxed);
        }
    }

    /// Blocks that are withheld.
    pub(super) fn withheld(&self) -> i64 {
        self.limit.withheld.load(Relaxed)
    }

    /// Blocks that would be withheld less, were the domain without `blocks` of its own.
    pub(super) fn withheld_less(&self, blocks: u64) -> i64 {
        let total = self.staying();
        self.limit.withheld_of(total) - self.limit.withheld_of(total.saturating_sub(blocks))
    }

    /// Blocks that would be withheld more, had the domain so many more.
    pub(super) fn withheld_more(&self, blocks: u64) -> i64 {
        let total = self.staying();
        self.limit.withheld_of(total + blocks) - self.limit.withheld_of(total)
    }

    /// Whether another group would give the domain nothing.
    pub(crate) fn at_limit(&self) -> bool {
        let total = self.staying();
        let hidden = kept_back(total + self.limit.shut.load(Relaxed));
        total.saturating_sub(hidden) >= self.limit.most()
    }

    fn staying(&self) -> u64 {
        let away = self.limit.leaving.load(Relaxed) + self.limit.shut.load(Relaxed);
        self.total.load(Relaxed).saturating_sub(away)
    }

    /// Says how many unused blocks lie in these groups, which give none out: the limit counts what can be had beside them.
    /// Under the lock of the group table.
    pub(crate) fn note_shut(&self, groups: &[u32]) {
        let all = self.groups.read();
        let shut = groups.iter().filter_map(|n| all.get(n)).filter(|g| g.is_closed());
        let blocks = shut.map(|g| u64::from(g.free())).sum();
        drop(all);
        if self.limit.shut.swap(blocks, Relaxed) != blocks {
            self.withhold();
        }
    }

    /// Whether there are such groups.
    pub(crate) fn has_shut(&self) -> bool {
        self.limit.shut.load(Relaxed) > 0
    }

    /// Whether blocks of a group are given out.
    pub(crate) fn is_open(&self, group: u32) -> bool {
        self.groups.read().get(&group).is_some_and(|g| !g.is_closed())
    }

    /// Groups of which no blocks are given out.
    pub(crate) fn closed_groups(&self) -> Vec<u32> {
        self.groups.read().iter().filter(|(_, g)| g.is_closed()).map(|(n, _)| *n).collect()
    }

    /// Whether there are such groups.
    pub(crate) fn has_closed(&self) -> bool {
        self.groups.read().values().any(|g| g.is_closed())
    }

    /// The domain has nothing beyond what it `uses` until this is called with `None`. Under the lock of the group table.
    pub(crate) fn crowd(&self, uses: Option<u64>) {
        let most = uses.unwrap_or(u64::MAX);
        if self.limit.crowd.swap(most, Relaxed) != most {
            self.withhold();
        }
    }

    /// Whether it is so.
    pub(crate) fn is_crowded(&self) -> bool {
        self.limit.crowd.load(Relaxed) < u64::MAX
    }

    /// Blocks that internal work can have: those that a limit withholds, too, but for the reserve.
    pub(crate) fn movable(&self) -> u64 {
        (self.account.sum() + self.withheld() - self.hidden() as i64).max(0) as u64
    }

    /// Withholds as much as must be, by the number of blocks and the limit.
    pub(super) fn withhold(&self) {
        let wanted = self.limit.withheld_of(self.staying());
        match wanted - self.limit.withheld.swap(wanted, Relaxed) {
            more @ 1.. => self.account.withhold(more),
            less => self.account.add(-less),
        }
    }

    /// `blocks` unused blocks leave: taken from the account, but for what of them was withheld. False where there is too
    /// little.
    pub(super) fn leave_account(&self, blocks: u64) -> bool {
        let floor = kept_back(self.total.load(Relaxed).saturating_sub(blocks)) as i64;
        let less = self.withheld_less(blocks);
        if !self.account.take(blocks as i64 - less, floor) {
            return false;
        }
        self.limit.leaving.fetch_add(blocks, Relaxed);
        self.limit.withheld.fetch_sub(less, Relaxed);
        true
    }

    /// Likewise, of blocks that were taken from the account before.
    pub(super) fn leave_taken(&self, blocks: u64) {
        let less = self.withheld_less(blocks);
        self.limit.leaving.fetch_add(blocks, Relaxed);
        self.limit.withheld.fetch_sub(less, Relaxed);
        self.account.add(less);
    }

    /// So many withheld blocks stay in the account.
    pub(super) fn stay_in_account(&self, blocks: u64) {
        self.limit.leaving.fetch_sub(blocks, Relaxed);
        let more = self.withheld_more_than_now();
        self.limit.withheld.fetch_add(more, Relaxed);
        self.account.add(blocks as i64 - more);
    }

    /// They have left.
    pub(super) fn have_left(&self, blocks: u64) {
        self.limit.leaving.fetch_sub(blocks, Relaxed);
    }

    fn withheld_more_than_now(&self) -> i64 {
        self.limit.withheld_of(self.staying()) - self.withheld()
    }
}
