//! Groups that hold nothing leave the domain.
//!
//! In steps, so that nobody can use a block of a group that others may have by then: [`Space::close_group`] takes its blocks
//! out of what may be reserved and allocated; a checkpoint that has no record of it left in the journal writes its segment
//! table as the next claim would ([`Space::write_home`]); the block group allocation table gives it to nobody; then
//! [`Space::drop_group`] forgets it. A crash before the checkpoint ended has changed nothing; one behind it leaves a group
//! that [`Group::open`](super::group::Group::open) knows as given back. (docs/disk-format.md, Groups that change owner.)

use super::Space;
use super::bitmap;
use super::group::{Abandoned, Group};
use super::limit::kept_back;
use crate::error::Result;
use braidfs_format::BlockAddr;
use braidfs_format::geometry::SEGMENT_BLOCKS;
use braidfs_format::group::Owner;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// A group with more blocks in use is not emptied.
const SPARSE_BLOCKS: u32 = 32;

/// A group that is being emptied. One that is dropped by a panic waits for [`Space::end_abandoned`].
#[derive(Debug)]
pub(crate) struct Emptying {
    group: Arc<Group>,
    /// What is valid in it, and whose that is.
    pub blocks: Vec<(BlockAddr, Owner)>,
    /// Where it goes when it is dropped, unless its end was told.
    abandoned: Option<Abandoned>,
}

impl Drop for Emptying {
    fn drop(&mut self) {
        if let Some(abandoned) = self.abandoned.take() {
            abandoned.lock().push(self.group.clone());
        }
    }
}

impl Emptying {
    /// Which group it is.
    pub fn number(&self) -> u32 {
        self.group.number
    }
}

/// Of what is not kept back, blocks that are not offered.
fn margin_of(hidden: u64) -> u64 {
    (hidden / 16).max(8)
}

impl Space {
    /// Blocks kept back from ordinary reservations, for metadata, deletions and cleaning.
    pub(crate) fn hidden(&self) -> u64 {
        kept_back(self.total.load(Relaxed))
    }

    /// The domain has more blocks, or fewer.
    pub(super) fn resize(&self, change: impl Fn(u64) -> u64) {
        let now = |total| Some(change(total));
        let before = self.total.fetch_update(Relaxed, Relaxed, now).unwrap_or_else(|total| total);
        let total = change(before);
        self.account.resize(total, kept_back(total));
    }

    /// Whether there are so many unused blocks that nobody has to count them ([`Self::available`] would say thousands).
    pub(crate) fn has_plenty(&self) -> bool {
        self.account.has_plenty()
    }

    /// Blocks that ordinary reservations could have once the domain had `more` blocks, of which none is used; counting what
    /// the running transaction freed. A little less, so that it can be had also by who makes a file for it first. Takes no
    /// lock.
    pub fn available_with(&self, more: u64) -> u64 {
        let hidden = kept_back(self.total.load(Relaxed) + more);
        self.left_with(more, hidden + margin_of(hidden))
    }

    /// [`Self::available_with`] to the last block that writes to a file which is there can have: each of them has `metadata` blocks
    /// beside its own, and gives back what it does not need of these.
    pub(crate) fn writable_with(&self, more: u64, metadata: u64) -> u64 {
        self.left_with(more, kept_back(self.total.load(Relaxed) + more) + metadata)
    }

    fn left_with(&self, more: u64, kept: u64) -> u64 {
        let n = self.account.sum() + self.pending.sum() + more as i64 - self.withheld_more(more);
        (n - kept as i64).max(0) as u64
    }

    /// [`Self::available_with`] nothing more.
    pub fn available(&self) -> u64 {
        self.available_with(0)
    }

    /// Blocks that ordinary reservations can have beyond [`Self::available`].
    pub(crate) fn margin(&self) -> u64 {
        margin_of(self.hidden())
    }

    /// Groups that hold no block in use, as a hint, with their blocks; the highest first.
    pub(crate) fn empty_groups(&self) -> Vec<(u32, u64)> {
        let groups = self.groups.read();
        let empty = groups.values().rev().filter(|g| !g.is_closed() && g.is_empty());
        empty.map(|g| (g.number, u64::from(g.total()))).collect()
    }

    /// Groups that hold something, as a hint, each with its blocks in use and all of them.
    pub(crate) fn used_groups(&self) -> Vec<(u32, u64, u64)> {
        let groups = self.groups.read();
        let open = groups.values().filter(|g| !g.is_closed());
        let open = open.map(|g| (g.number, u64::from(g.used()), u64::from(g.total())));
        open.filter(|(_, used, _)| *used > 0).collect()
    }

    /// All groups, each with its blocks in use and those that can be had besides: none where it is closed.
    pub(crate) fn use_of_groups(&self) -> Vec<(u32, u64, u64)> {
        let groups = self.groups.read();
        let free = |g: &Group| if g.is_closed() { 0 } else { u64::from(g.total() - g.used()) };
        groups.values().map(|g| (g.number, u64::from(g.used()), free(g))).collect()
    }

    /// Groups that hold little metadata and nothing else, as [`Self::empty_groups`], where lower ones have room for it:
    /// so nothing is moved to and fro.
    pub(crate) fn sparse_groups(&self) -> Vec<(u32, u64)> {
        let groups = self.groups.read();
        let (mut sparse, mut lower) = (Vec::new(), 0);
        for g in groups.values().filter(|g| !g.is_closed()) {
            if lower >= u64::from(g.total() / 4) && g.is_sparse(SPARSE_BLOCKS) {
                sparse.push((g.number, u64::from(g.total())));
            }
            lower += u64::from(g.free());
        }
        sparse.reverse();
        sparse
    }

    /// Keeps others from allocating in a sparse group, and says what is valid in it and whose that is: to be written
    /// elsewhere. `None` where the domain has not that much room. [`Self::end_emptying`] must follow.
    ///
    /// # Errors
    /// Of the device, or `Corrupt`: owner tables are read.
    pub(crate) fn begin_emptying(&self, number: u32) -> Result<Option<Emptying>> {
        let Some(mut e) = self.keep_out(number) else { return Ok(None) };
        if let Err(why) = self.look_again(&mut e) {
            self.end_emptying(e);
            return Err(why);
        }
        Ok(Some(e))
    }

    /// [`Self::begin_emptying`] without a look at what is there.
    pub(crate) fn keep_out(&self, number: u32) -> Option<Emptying> {
        let group = self.groups.read().get(&number).cloned().filter(|g| !g.is_closed())?;
        // Its blocks are taken from the account before nobody finds them any more: who has reserved some elsewhere finds those.
        let expected = i64::from(group.free());
        // what of it is withheld is nothing that ordinary reservations could have had
        let floor = self.hidden() as i64 - self.withheld_less(u64::from(group.total())).min(expected);
        if !self.account.take(expected, floor) {
            return None;
        }
        let Some(unused) = group.stop() else {
            self.account.add(expected);
            return None;
        };
        self.pool.lock().remove_group(&group);
        if unused > expected && !self.account.take(unused - expected, floor) {
            // what became unused in between is reserved by now
            let now = group.go_on();
            self.pool.lock().add_group(&group);
            self.account.add(now - (unused - expected));
            return None;
        }
        self.account.add((expected - unused).max(0));
        Some(Emptying { group, blocks: Vec::new(), abandoned: Some(self.abandoned.clone()) })
    }

    /// Blocks in use in group `number`; 0 where the domain has it not.
    pub(crate) fn used_in(&self, number: u32) -> u64 {
        self.groups.read().get(&number).map_or(0, |g| u64::from(g.used()))
    }

    /// Says anew what is valid in a group that is being emptied.
    ///
    /// # Errors
    /// As [`Self::begin_emptying`].
    pub(crate) fn look_again(&self, e: &mut Emptying) -> Result<()> {
        e.blocks.clear();
        self.valid_in(&e.group, &mut e.blocks)
    }

    /// What is valid in group `number`, and whose that is; nothing where the domain has it not.
    ///
    /// # Errors
    /// As [`Self::begin_emptying`].
    pub(crate) fn blocks_in(&self, number: u32) -> Result<Vec<(BlockAddr, Owner)>> {
        let group = self.groups.read().get(&number).cloned();
        let mut blocks = Vec::new();
        group.map_or(Ok(()), |group| self.valid_in(&group, &mut blocks))?;
        Ok(blocks)
    }

    fn valid_in(&self, group: &Group, blocks: &mut Vec<(BlockAddr, Owner)>) -> Result<()> {
        for (index, segment) in (0u32..).zip(&group.segments) {
            let valid = bitmap::and_not(&segment.state.lock().entry.valid, &segment.fixed);
            for block in (0..SEGMENT_BLOCKS).filter(|&b| bitmap::get(&valid, b)) {
                let owner = group.owner(&self.store, &self.owners, index, block)?;
                blocks.push((BlockAddr(segment.start.0 + u64::from(block)), owner));
            }
        }
        Ok(())
    }

    /// Leaves an emptied group closed, for [`Self::drop_group`]; its number. `None` where it holds something: then it is one
    /// like any other again.
    pub(crate) fn close_emptied(&self, mut e: Emptying) -> Option<u32> {
        if e.group.is_emptied() {
            e.abandoned = None;
            self.leave_taken(u64::from(e.group.total()));
            return Some(e.group.number);
        }
        self.end_emptying(e);
        None
    }

    /// The group is one like any other again.
    pub(crate) fn end_emptying(&self, mut e: Emptying) {
        e.abandoned = None;
        self.use_again(&e.group);
    }

    /// So are those whose emptying a panic has ended.
    pub(crate) fn end_abandoned(&self) {
        let all = std::mem::take(&mut *self.abandoned.lock());
        all.iter().for_each(|group| self.use_again(group));
    }

    fn use_again(&self, group: &Arc<Group>) {
        let unused = group.go_on();
        self.pool.lock().add_group(group);
        self.account.add(unused);
    }

    /// Whether ordinary reservations would find as much as before where `blocks` unused blocks were gone: enough, and `kept` beside.
    pub(crate) fn can_spare(&self, blocks: u64, kept: u64) -> bool {
        let left = self.account.sum() - blocks as i64 + self.withheld_less(blocks) - kept as i64;
        left >= kept_back(self.total.load(Relaxed).saturating_sub(blocks)) as i64
    }

    /// Takes a group out of use where it holds nothing and its blocks can be spared. False where it is in use.
    pub(crate) fn close_group(&self, number: u32) -> bool {
        let Some(group) = self.groups.read().get(&number).cloned().filter(|g| g.is_empty()) else { return false };
        let blocks = u64::from(group.total());
        if !self.leave_account(blocks) {
            return false;
        }
        if !group.close() {
            self.stay_in_account(blocks);
            return false;
        }
        self.pool.lock().remove_group(&group);
        true
    }

    /// Gives blocks of the group again, after [`Self::close_group`] whose group could not be given up.
    pub(crate) fn reopen_group(&self, number: u32) {
        let Some(group) = self.groups.read().get(&number).cloned().filter(|g| g.is_closed()) else { return };
        group.reopen();
        self.pool.lock().add_group(&group);
        self.stay_in_account(u64::from(group.total()));
    }

    /// Forgets a closed group that is the domain's no longer.
    pub(crate) fn drop_group(&self, number: u32) {
        let Some(group) = self.forget(number) else { return };
        for (_, _, table) in group.owner_tables() {
            table.lock().forget(&self.owners);
        }
        self.resize(|total| total - u64::from(group.total()));
        self.have_left(u64::from(group.total()));
        self.cleaning.forget_group(number);
    }

    fn forget(&self, number: u32) -> Option<Arc<Group>> {
        let mut groups = self.groups.write();
        if !groups.get(&number)?.is_closed() {
            return None;
        }
        let group = groups.remove(&number);
        if let Some(n) = self.on_device_of(number) {
            n.fetch_sub(1, Relaxed);
        }
        group
    }

    /// Groups that were given back when the volume stopped, before the table of owners said so.
    pub(crate) fn returned(&self) -> &[u32] {
        &self.returned
    }
}
