//! Room: groups that domains take ([`super::claim`]) and give back online (SpanFS section 3.2.1), and what they can still write.
//!
//! A group of the volume is a domain's or nobody's. A domain without room takes one of nobody's, else others give back
//! those of theirs that hold nothing: no block and no inode in use, and nothing that a crash could bring back. What is
//! told of room ([`Volume::statfs_of`]) counts just that. Before an operation is refused, another domain empties a group that is
//! in use ([`super::relocate`]).

use super::need::{Need, may_wait};
use super::operation::METADATA_OF_WRITE;
use super::{MountedVolume, Volume};
use crate::cell;
use crate::device_set::DeviceSet;
use crate::domain::Domain;
use crate::error::{Error, Result};
use crate::nodes::NodeTable;
use crate::types::*;
use braidfs_format::super_block::MAX_DEVICES;
use braidfs_sync::phases::{self, Phase};
use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Groups that a domain gives back at once at most: they share a checkpoint.
const GIVE_MAX: usize = 8;
/// A domain without a journal is committed for others where it has freed this part of a group.
const FREED_PART: u64 = 4;
/// With so many blocks it is not counted what other domains could give (256 MiB).
const PLENTY: u64 = 1 << 16;
/// Room that a domain must have for a new file to be placed there, at most; small domains by their reserve.
const PLACE_BLOCKS: u64 = 512;

thread_local! {
    /// This thread empties groups, and must not wait for that.
    static EMPTYING: Cell<bool> = const { Cell::new(false) };
}

/// This thread is [`EMPTYING`], until it is dropped, by a panic as well: groups that it was emptying are like any others then.
struct WhileEmptying<'a> {
    mounted: &'a MountedVolume,
    outer: bool,
}

impl Drop for WhileEmptying<'_> {
    fn drop(&mut self) {
        EMPTYING.set(self.outer);
        if std::thread::panicking() {
            self.mounted.domains.iter().for_each(|d| d.space.end_abandoned());
        }
    }
}

/// What of a domain's room a front end may have accepted writes for.
pub(super) fn accepted(d: &Domain) -> u64 {
    d.accepted_above.load(Ordering::SeqCst)
}

/// As [`accepted`], once the front end has handed all of that on: as it has before anybody is refused.
fn none_accepted(_: &Domain) -> u64 {
    0
}

impl MountedVolume {
    /// Data blocks of groups that nobody owns.
    pub fn count_unclaimed(&self) {
        let bat = self.bat.lock();
        self.count_unclaimed_in(&bat);
    }

    /// [`Self::count_unclaimed`] by the one that holds the table.
    pub(super) fn count_unclaimed_in(&self, bat: &super::groups::Bat) {
        let meta = u64::from(self.store.geometry().meta_blocks());
        let (sb, mut of) = (*self.sb.read(), [0; MAX_DEVICES]);
        let not = self.unclaimable(DeviceSet::ALL);
        for (g, _) in (0u32..).zip(bat.claimable_but(&not)).filter(|(_, owner)| owner.is_none()) {
            let device = sb.device_table().partition_point(|d| d.first_group.get() <= g).saturating_sub(1);
            of[device] += u64::from(self.store.group_blocks(g)).saturating_sub(meta);
        }
        self.shared.unclaimed.store(of.iter().sum(), Ordering::Relaxed);
        self.shared.unclaimed_of.iter().zip(of).for_each(|(n, of)| n.store(of, Ordering::Relaxed));
        self.claim_end.store(bat.claim_end() as u32, Ordering::Relaxed);
        let drained = bat.drained();
        self.drained[1].store(drained.end, Ordering::Relaxed);
        self.drained[0].store(drained.start, Ordering::Relaxed);
        let rests = (0..sb.device_table().len()).filter(|n| bat.rests(&self.groups_of_device(*n)));
        self.resting.store(rests.fold(0, |bits, n| bits | 1 << n), Ordering::Relaxed);
        self.shared.note_tried_again(bat.tried_again_at());
    }

    /// Groups that were left alone after an error, and whose time has come, count as room again. Whoever claims sees to that, but
    /// nobody does who is told that there is no room. Where another thread has the table, it is he who counts, or the next one.
    fn count_tried_again(&self) {
        if self.shared.has_come()
            && let Some(mut bat) = self.bat.try_lock()
            && bat.try_again(Instant::now())
        {
            self.count_unclaimed_in(&bat);
        }
    }

    /// Free blocks of groups on these devices that nobody owns, and that can be claimed.
    fn unclaimed_on(&self, devices: DeviceSet) -> u64 {
        let lost = (0..self.store.devices()).filter(|n| devices.contains(*n) && self.store.cannot_flush(*n));
        let lost = lost.map(|n| self.shared.unclaimed_of[n].load(Ordering::Relaxed)).sum();
        self.shared.unclaimed_on(devices).saturating_sub(lost)
    }

    /// Groups on these devices that are nobody's, and that nobody claims for a moment ([`super::groups::Bat::avoid`]); and their data
    /// blocks.
    pub(super) fn avoided_on(&self, bat: &super::groups::Bat, devices: DeviceSet) -> (u64, u64) {
        let (meta, not) = (u64::from(self.store.geometry().meta_blocks()), self.unclaimable(devices));
        let blocks = |g: u32| u64::from(self.store.group_blocks(g)).saturating_sub(meta);
        bat.avoided_but(&not).fold((0, 0), |(n, all), g| (n + 1, all + blocks(g)))
    }

    /// The groups of a device that is drained: nobody claims them. A hint.
    pub(super) fn drained_groups(&self) -> std::ops::Range<u32> {
        self.drained[0].load(Ordering::Relaxed)..self.drained[1].load(Ordering::Relaxed)
    }

    /// Has the domain that can spare most groups give some back, for `to`, or for a domain to be, which cannot have those
    /// among `not`; false where none can.
    pub(super) fn give_back(
        &self,
        bat: &mut super::groups::Bat,
        to: Option<DomainId>,
        not: &[Range<u32>],
    ) -> Result<bool> {
        self.settle_scratch(to);
        let mut all: Vec<(&Arc<Domain>, Vec<u32>)> = self
            .domains
            .iter()
            .filter(|d| Some(d.id) != to && d.failed().is_none())
            .map(|d| (d, self.spare(d, not, accepted(d)).0))
            .collect();
        all.sort_by_key(|(_, groups)| groups.len());
        while let Some((d, mut groups)) = all.pop() {
            groups.truncate(GIVE_MAX);
            let mut gave = false;
            if groups.is_empty() {
                continue;
            }
            let result = d.give_up_groups(&groups, |given| {
                for &g in given {
                    // first, so that who looks for an inode there does not ask the domain
                    self.siblings.set_owner(g, None);
                    bat.set_free(&**self.store.device(0), g)?;
                    gave = true;
                    tracing::debug!("{} gives group {g} back", d.id);
                }
                Ok(())
            });
            if let Err(e) = result {
                // that domain has failed, which it says itself; others have room perhaps
                tracing::warn!("{} gives no group back: {e}", d.id);
            }
            self.count_unclaimed_in(bat);
            if gave {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// What was freed in domains without a journal is free, where it may be groups: else nobody commits them.
    fn settle_scratch(&self, but: Option<DomainId>) {
        let much = u64::from(self.store.geometry().group_blocks()) / FREED_PART;
        let has_much = |d: &&Arc<Domain>| !d.keeps_journal() && Some(d.id) != but && d.space.stats().pending >= much;
        for d in self.domains.iter().filter(has_much) {
            // an error fails that domain, which says so itself
            let _ = d.commit();
        }
    }

    /// Groups that a domain could give back, and go without, a hint: those that it can now, and those that it can when
    /// the metadata in them has been written elsewhere; and the blocks of all. None of those among `not`, and none that
    /// leaves it less than `kept` blocks. None of a domain that could not flush what giving them back writes.
    fn spare(&self, d: &Domain, not: &[Range<u32>], kept: u64) -> (Vec<u32>, Vec<u32>, u64) {
        if !self.can_flush(d) {
            return Default::default();
        }
        let (mut blocks, mut groups) = (0, 0);
        let mut fits = |n: u64, room: u64| {
            let can = d.space.can_spare(blocks + n + room, kept) && d.nodes.can_spare(groups + 1);
            if can {
                blocks += n;
                groups += 1;
            }
            can
        };
        let unused = |(g, _): &(u32, u64)| self.can_claim(*g, not) && d.nodes.is_empty(*g);
        let empty = d.space.empty_groups().into_iter().filter(unused);
        let empty = empty.filter(|(_, n)| fits(*n, 0)).map(|(g, _)| g).collect();
        let sparse = d.space.sparse_groups().into_iter().filter(unused);
        let sparse = sparse.filter(|(_, n)| fits(*n, n / 2)).map(|(g, _)| g).collect();
        (empty, sparse, blocks)
    }

    /// Whether a domain that may not have those among `not` could claim a group if it were nobody's, a hint.
    pub(super) fn can_claim(&self, group: u32, not: &[Range<u32>]) -> bool {
        let end = self.claim_end.load(Ordering::Relaxed);
        let there = group < end && !self.drained_groups().contains(&group) && !not.iter().any(|n| n.contains(&group));
        there && self.store.device_of(group).is_some_and(|device| self.takes_claims(device))
    }

    /// Has a domain write the metadata elsewhere that keeps groups from being empty; whether there was some. Does nothing
    /// while another thread does so. The caller is inside no gate and holds no lock.
    ///
    /// # Errors
    /// Of the device.
    pub(crate) fn empty_sparse(&self, d: &Arc<Domain>) -> Result<bool> {
        // moving may need room itself
        let Some(_one) = self.emptying.try_lock() else { return Ok(false) };
        self.empty_sparse_of(d)
    }

    /// [`Self::empty_sparse`] of all domains but `d`, which lacks room. Who finds another thread at it waits: what that one
    /// holds meanwhile, and what it empties, may be all the room that there is. Whether there may be more room now.
    ///
    /// # Errors
    /// [`Error::ReadOnly`] where the volume has become so.
    fn empty_sparse_for(&self, d: &Domain) -> Result<bool> {
        if EMPTYING.get() {
            return Ok(false);
        }
        let free = self.emptying.try_lock();
        let mut any = free.is_none();
        let Some(_one) = free.or_else(|| self.emptying_in_turn()) else { return Ok(false) };
        for o in self.domains.iter().filter(|o| o.id != d.id && o.failed().is_none()) {
            match self.empty_sparse_of(o) {
                Ok(emptied) => any |= emptied,
                Err(Error::ReadOnly) => return Err(Error::ReadOnly),
                Err(Error::NoSpace) => {}
                // its error, and none of `d`'s: others have room perhaps
                Err(e) => tracing::warn!("{} empties no group for {}: {e}", o.id, d.id),
            }
        }
        Ok(any)
    }

    /// [`Self::claim_group`], after others had but metadata in some of theirs, and have written it elsewhere. The caller is inside
    /// no gate and holds no lock.
    ///
    /// # Errors
    /// Of the device.
    fn claim_emptied_group(&self, d: &Arc<Domain>) -> Result<bool> {
        Ok(!d.space.at_limit() && self.empty_sparse_for(d)? && self.claim_group(d)?)
    }

    /// Waits while another thread empties groups; whether one did, where what it has done may be room for `d`. Who is at a limit of
    /// its own gains nothing by what becomes of others' groups.
    fn wait_for_emptying(&self, d: &Domain) -> bool {
        let gains = || !d.space.at_limit() || d.space.has_closed();
        if EMPTYING.get() || !gains() || self.emptying.try_lock().is_some() {
            return false;
        }
        self.emptying_in_turn().is_some()
    }

    /// Whether this thread is the one that empties groups.
    pub(super) fn is_emptying(&self) -> bool {
        EMPTYING.get()
    }

    /// [`Self::empty_sparse`] by the one that holds `emptying`.
    fn empty_sparse_of(&self, d: &Arc<Domain>) -> Result<bool> {
        self.while_emptying(|| self.empty_groups(d))
    }

    /// Does something that empties groups, as the one that holds `emptying`: it does not wait for itself.
    pub(super) fn while_emptying<R>(&self, empty: impl FnOnce() -> R) -> R {
        let _emptying = WhileEmptying { mounted: self, outer: EMPTYING.replace(true) };
        empty()
    }

    fn empty_groups(&self, d: &Arc<Domain>) -> Result<bool> {
        let mut any = false;
        for g in self.spare(d, &[], accepted(d)).1.into_iter().take(GIVE_MAX) {
            let Some(e) = d.space.begin_emptying(g)? else { continue };
            let moved = self.move_blocks(d, &e.blocks);
            d.space.end_emptying(e);
            any |= moved? > 0;
        }
        Ok(any)
    }

    /// Makes room in a domain that has too little for an operation: another group, else a commit that releases what was
    /// freed or reserved. The caller is inside no gate and holds no lock. `attempt` counts the commits for one operation.
    ///
    /// # Errors
    /// [`Error::NoSpace`] where nothing more can be gained.
    pub fn make_room(&self, d: &Arc<Domain>, attempt: &mut u32) -> Result<()> {
        let _phase = phases::enter(Phase::Space);
        self.count_shut(d);
        if self.claim_group(d)? {
            return Ok(());
        }
        let n = *attempt;
        *attempt += 1;
        let s = d.space.stats();
        // who is at a limit of its own gains nothing by what others do
        let others = !d.space.at_limit();
        let none = || {
            let more = match others {
                true => self.relocate_for(d, Need::Blocks, n)?,
                false => may_wait(n) && self.wait_for_emptying(d),
            };
            if more { Ok(()) } else { Err(Error::NoSpace) }
        };
        if n >= 3 {
            return none();
        }
        if n == 1 && self.claim_emptied_group(d)? {
            return Ok(());
        }
        if n > 0 && self.compact_nodes(d)? == 0 && s.pending == 0 && s.reserved == 0 {
            return none();
        }
        // a commit writes reserved pages at their real size and lets freed blocks go
        self.end_replaced_in(d.id);
        d.flush_all_that_fits()?;
        d.commit()?;
        if n > 0 && others {
            self.settle_all();
        }
        Ok(())
    }

    /// [`Domain::flush_cell`], with [`Self::make_room`] where the domain lacks some. The caller is inside no gate and holds no lock.
    ///
    /// # Errors
    /// As of both.
    pub(crate) fn flush_cell(&self, c: &Arc<cell::Cell>) -> Result<()> {
        self.flush_with_room(self.dom(c.domain), |d| d.flush_cell(c))
    }

    /// [`Self::flush_cell`] of several: [`Domain::flush_all`], [`Domain::flush_lazy`].
    ///
    /// # Errors
    /// As there.
    pub(crate) fn flush_with_room(&self, d: &Arc<Domain>, flush: impl Fn(&Domain) -> Result<()>) -> Result<()> {
        let mut attempt = 0;
        loop {
            match flush(d) {
                Err(Error::NoSpace) => self.make_room(d, &mut attempt)?,
                flushed => return flushed,
            }
        }
    }

    /// For an operation after which a commit may need nodes of a domain that is short of them: another group brings some; else
    /// the commit takes what has been promised so far, and half of the reserve must be left. Inside no gate.
    ///
    /// # Errors
    /// [`Error::NoSpace`] where it is not; of the device.
    pub(crate) fn make_nodes(&self, d: &Arc<Domain>) -> Result<()> {
        let _phase = phases::enter(Phase::Space);
        if !d.space.at_limit() && self.claim_beyond_limit(d, Need::Numbers)? {
            return Ok(());
        }
        d.commit()?;
        if !d.nodes.has_half_the_reserve() {
            self.free_numbers(d)?;
        }
        if d.nodes.has_half_the_reserve() { Ok(()) } else { Err(Error::NoSpace) }
    }

    /// Has the numbers of what was deleted given out again: they become free when the deletion is durable, those of directories
    /// at a checkpoint. Inside no gate.
    ///
    /// # Errors
    /// Of the device.
    pub(crate) fn free_numbers(&self, d: &Arc<Domain>) -> Result<()> {
        self.end_replaced_in(d.id);
        d.commit()?;
        if d.quarantined_numbers() > 0 {
            d.checkpoint()?;
        }
        Ok(())
    }

    /// Blocks that files of a domain can still take: its own, and those of groups that it can get. Exact below `enough`.
    pub(crate) fn room(&self, d: &Domain, enough: u64) -> u64 {
        self.room_as(d, enough, accepted, |more| d.space.available_with(more))
    }

    /// [`Self::room`] as it is told to whoever asks how much there is: without what others keep for a front end, which may be
    /// little, and is nothing by the time that somebody needs it.
    fn room_to_tell(&self, d: &Domain) -> u64 {
        self.room_as(d, u64::MAX, none_accepted, |more| d.space.available_with(more))
    }

    /// As [`Volume::sure_room`].
    fn sure_room(&self, d: &Domain) -> u64 {
        let others = self.domains.iter().filter(|o| o.id != d.id && o.failed().is_none()).count() as u64;
        let theirs = others * u64::from(self.store.geometry().group_blocks());
        self.room_as(d, PLENTY, accepted, |more| d.space.available_with(more.saturating_sub(theirs)))
    }

    /// [`Self::room_to_tell`] to the last block that writes to one file can have, where nobody else takes any. Inside no gate.
    pub(super) fn room_of_one(&self, d: &Domain) -> u64 {
        // the commit that makes room in the end writes its inode's record, and frees the block in which it was
        let metadata = METADATA_OF_WRITE - u64::from(d.has_credits());
        self.room_as(d, u64::MAX, none_accepted, |more| d.space.writable_with(more, metadata))
    }

    fn room_as(&self, d: &Domain, enough: u64, kept: fn(&Domain) -> u64, with: impl Fn(u64) -> u64) -> u64 {
        self.count_tried_again();
        let mut more = self.unclaimed_on(d.devices());
        let sure = with(more);
        if sure >= enough {
            return sure;
        }
        let others = self.domains.iter().filter(|o| o.id != d.id && o.failed().is_none());
        let not = self.forbidden(d.devices());
        more += others.map(|o| self.spare(o, &not, kept(o)).2).sum::<u64>();
        with(more)
    }

    /// Whether a new file can be placed in a domain.
    pub(crate) fn has_room(&self, d: &Domain) -> bool {
        let enough = || {
            let least = d.space.hidden().min(PLACE_BLOCKS);
            self.room(d, least) >= least
        };
        d.failed().is_none() && (d.space.has_plenty() || enough())
    }

    /// The domain that has most room.
    pub(crate) fn roomiest(&self) -> Option<&Arc<Domain>> {
        self.domains.iter().filter(|d| d.failed().is_none() && !d.is_kept()).max_by_key(|d| self.room(d, u64::MAX))
    }
}

impl Volume {
    /// Space and inodes of the whole volume: `available` is what all domains together could still write.
    pub fn statfs(&self) -> StatFs {
        let i = self.mounted();
        // a group that goes from hand to hand meanwhile would count twice, or not at all
        let mut bat = i.bat.lock();
        let not = i.unclaimable(DeviceSet::ALL);
        if bat.try_again(Instant::now()) || !not.is_empty() {
            i.count_unclaimed_in(&bat);
        }
        let mut s = StatFs::default();
        for d in &i.domains {
            let x = d.space.stats();
            s.blocks += x.blocks;
            s.free += (x.free + x.pending).saturating_sub(x.reserved);
            s.available += d.space.available();
            s.inodes += d.nodes.total().saturating_sub(d.nodes.reserve());
            s.inodes_free += d.nodes.free_for_inodes();
        }
        let g = i.store.geometry();
        let unclaimed = i.shared.unclaimed.load(Ordering::Relaxed);
        // those that nobody takes just now are there all the same
        let (avoided, avoided_blocks) = i.avoided_on(&bat, DeviceSet::ALL);
        let free_groups = u64::from(bat.free_groups_but(&not)) + avoided;
        s.blocks += unclaimed + avoided_blocks;
        s.free += unclaimed + avoided_blocks;
        // whoever takes them keeps some back
        s.available += unclaimed - unclaimed / 64;
        // whoever takes them keeps some numbers back, too
        s.inodes += free_groups * NodeTable::inodes_of_group(g);
        s.inodes_free += free_groups * NodeTable::inodes_of_group(g);
        s
    }

    /// [`Self::statfs`] with `available` as files of an inode can have it, or new files in it where it is a directory:
    /// those of one domain. What lies in groups that other domains use is not theirs.
    ///
    /// # Errors
    /// [`Error::NotFound`] where no domain has such a number.
    pub fn statfs_of(&self, ino: InodeNo) -> Result<StatFs> {
        let i = self.mounted();
        let d = i.domain(ino)?;
        let tenant = d.tenant_root().is_some();
        let mut s = if tenant && (d.space.hard_limit().is_some() || !d.devices().is_all()) {
            i.statfs_of_tenant(d)
        } else {
            StatFs { available: i.room_below(ino)?, ..self.statfs() }
        };
        if tenant {
            i.inodes_of_tenant(d, &mut s);
        }
        i.limit_statfs(ino, &mut s);
        Ok(s)
    }

    /// Blocks that writes to `ino` could still take right now, less what is reserved: those of its domain and of groups
    /// that it can get. Exact where it is short. A front end with a writeback cache goes write-through near 0.
    pub fn write_room(&self, ino: InodeNo) -> u64 {
        let i = self.mounted();
        i.domain_of(ino).map_or(0, |d| i.room(d, PLENTY))
    }

    /// Blocks that writing a range of a file may take of [`Self::write_room`], however often it is written before a commit: none for
    /// those that are written where they lie, as the first time those that `fallocate` gave it.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub fn blocks_to_write(&self, ino: InodeNo, offset: u64, len: u64) -> Result<u64> {
        let i = self.mounted();
        let c = i.cell(ino)?;
        let n = i.blocks_to_reserve(&c, &c.state.read(), (offset, len));
        Ok(n)
    }

    /// [`Self::write_room`] of the files of a domain; 0 where there is no such domain.
    pub fn domain_room(&self, domain: DomainId) -> u64 {
        let i = self.mounted();
        i.domains.get(usize::from(domain.0)).map_or(0, |d| i.room(d, PLENTY))
    }

    /// What of [`Self::domain_room`] the domain has itself: no other domain takes it, as far as [`Self::keep_room`] says. 0 where
    /// there is no such domain.
    pub fn own_room(&self, domain: DomainId) -> u64 {
        self.mounted().domains.get(usize::from(domain.0)).map_or(0, |d| d.space.available())
    }

    /// [`Self::own_room`], and that of the groups that it can get beyond one for each other domain.
    pub fn sure_room(&self, domain: DomainId) -> u64 {
        let i = self.mounted();
        i.domains.get(usize::from(domain.0)).map_or(0, |d| i.sure_room(d))
    }

    /// A front end may have accepted writes for files of a domain that the volume has not seen: the domain gives others none of its
    /// groups that leave it less than so many blocks. 0 at first.
    pub fn keep_room(&self, domain: DomainId, blocks: u64) {
        if let Some(d) = self.mounted().domains.get(usize::from(domain.0)) {
            d.accepted_above.store(blocks, Ordering::SeqCst);
        }
    }

    /// How many domains there are; the next one to be added has this number.
    pub fn domain_count(&self) -> usize {
        self.mounted().domains.len()
    }

    /// Whether a domain has a limit of its own, or some of the devices only: how little room it has says nothing of others'.
    pub fn is_limited(&self, domain: DomainId) -> bool {
        let limited = |d: &Arc<Domain>| d.space.hard_limit().is_some() || !d.devices().is_all();
        self.mounted().domains.get(usize::from(domain.0)).is_some_and(limited)
    }

    /// How often the limit of a domain was changed: asked before the front end has written back, for
    /// [`Self::promises_are_kept`].
    pub fn limit_changes(&self, domain: DomainId) -> u64 {
        self.mounted().domains.get(usize::from(domain.0)).map_or(0, |d| d.space.limit_changes())
    }

    /// A front end holds nothing more of what it accepted for files of a domain before it asked for `changes`
    /// ([`Self::limit_changes`]): [`Self::write_accepted`] has no more there than [`Self::write`] from now on, unless the limit
    /// has been changed again.
    pub fn promises_are_kept(&self, domain: DomainId, changes: u64) {
        let i = self.mounted();
        if let Some(d) = i.domains.get(usize::from(domain.0)) {
            let _bat = i.bat.lock();
            d.space.end_promises(changes);
        }
    }

    /// [`Self::write_room`], where that is below `want` after a commit: operations reserve more for metadata than they need,
    /// and what was freed by others counts when it is durable; other domains empty groups that are in use. For whoever is about
    /// to say that there is no space. Below a front end's cache ([`MountOptions::cached_above`]) the domain takes the groups at
    /// once: what is told is [its own](Self::own_room).
    ///
    /// # Errors
    /// [`Error::NotFound`] where no domain has such a number; of a commit.
    pub fn find_room(&self, ino: InodeNo, want: u64) -> Result<u64> {
        let i = self.mounted();
        let d = i.domain(ino)?;
        if i.room(d, want) < want {
            i.end_replaced_in(d.id);
            d.flush_all_that_fits()?;
            d.commit()?;
        }
        if i.room(d, want) < want && !d.space.at_limit() {
            i.settle_all();
        }
        if i.room(d, want) < want {
            i.wait_for_emptying(d);
        }
        let room = i.room_by_relocation(d, want)?;
        if i.shared.options.cached_above { self.claim_room(ino, want) } else { Ok(room) }
    }

    /// Has the file's domain take the groups that it can have until it has so much [itself](Self::own_room), unless it cannot have so
    /// much; what it has. Where other domains have but metadata in them, that is written elsewhere first.
    ///
    /// # Errors
    /// [`Error::NotFound`] where no domain has such a number; of the device.
    pub fn claim_room(&self, ino: InodeNo, want: u64) -> Result<u64> {
        let i = self.mounted();
        let d = i.domain(ino)?;
        while d.space.available() < want
            && i.room(d, want) >= want
            && (i.claim_group(d)? || i.claim_emptied_group(d)?)
        {}
        Ok(d.space.available())
    }
}

impl MountedVolume {
    /// What a file below a directory can have, or a file: the least of the domains that placement may choose.
    fn room_below(&self, ino: InodeNo) -> Result<u64> {
        let d = self.domain(ino)?;
        let spread = match self.find(ino) {
            Ok(Some(c)) if c.kind == FileKind::Dir => match c.state.read().placement {
                Placement::Unset => self.default_placement() == Placement::Spread,
                p => p == Placement::Spread,
            },
            _ => false,
        };
        let spread = spread && d.tenant_root().is_none();
        let all = self.domains.iter().filter(|o| spread && o.failed().is_none() && !o.is_kept());
        Ok(all.map(|o| self.room_to_tell(o)).min().unwrap_or_else(|| self.room_to_tell(d)))
    }
}

#[cfg(test)]
mod tests;
