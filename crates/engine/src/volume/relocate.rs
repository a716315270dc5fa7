//! Groups in use that are emptied for a domain that lacks room (SpanFS section 3.2.1).
//!
//! The last resort, before an operation is refused, a domain is not added, or something that has to move (out of the end of a
//! volume that becomes smaller, off a device) has no room in its domain: no group is nobody's, and no domain has one that holds
//! nothing, but one has as much free as a group is large, in pieces. What lies in its group with least in use is written elsewhere
//! in that domain, as the cleaner does it, by ordinary commits. The group is given up then, with a higher epoch, and claimed as
//! any other: each step is one that a drain takes as well, and a crash between two of them leaves the group with one of the
//! domains or with none.
//!
//! A group in which an inode has its number stays with its domain, as the number says where its entry stands; so do the group
//! of a journal, and one with blocks that have a fixed place (files that are overwritten in place, allocated blocks that were
//! never written). Whether there are such blocks is looked for only when the group is to be emptied, before anything is moved: what
//! can be had so is therefore not told of as room ([`crate::Volume::statfs_of`]), and who writes on gets more than was told.

use super::MountedVolume;
use super::kept::Kept;
use super::need::{Need, may_wait};
use super::room::accepted;
use crate::budget;
use crate::device_set::DeviceSet;
use crate::domain::Domain;
use crate::error::{Error, Result};
use braidfs_sync::MutexGuard;
use std::fmt::{self, Display};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// What moves changes the records of its files as well: room for that, beside an eighth of what moves.
const METADATA_BLOCKS: u64 = 64;
/// So long it is waited for another thread that empties groups, where a lock is held that others want, or where that thread
/// does not let others in between.
const PATIENCE: Duration = Duration::from_secs(2);
/// So often it is looked whether it does.
pub(super) const LOOK: Duration = Duration::from_millis(100);

/// For whom a group is emptied.
#[derive(Clone, Copy)]
enum For<'a> {
    /// One that lacks room.
    Domain(&'a Arc<Domain>),
    /// One that is to be added, on these devices: its first group must be as long as groups are.
    NewDomain(DeviceSet),
}

impl For<'_> {
    fn devices(self) -> DeviceSet {
        match self {
            For::Domain(d) => d.devices(),
            For::NewDomain(devices) => devices,
        }
    }
}

impl Display for For<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            For::Domain(d) => d.id.fmt(f),
            For::NewDomain(_) => f.write_str("a domain to be added"),
        }
    }
}

impl MountedVolume {
    /// Has another domain empty a group for `d`, which takes it; true also where this waited while another thread emptied groups:
    /// there may be room now. `attempt` counts how often that was asked for one operation: who has waited often enough is not
    /// told to try again for that alone. The caller is inside no gate and holds no lock, and `d` is at no limit of its own.
    ///
    /// # Errors
    /// Of the device; [`Error::ReadOnly`] where the volume has become so.
    pub(crate) fn relocate_for(&self, d: &Arc<Domain>, need: Need, attempt: u32) -> Result<bool> {
        if self.is_emptying() {
            return Ok(false); // it is the one for whom room is made
        }
        let mut kept = match self.emptying.try_lock() {
            Some(kept) => kept,
            None => match self.emptying_in_turn() {
                Some(_) if may_wait(attempt) => return Ok(true),
                Some(kept) => kept,
                None => return Ok(false),
            },
        };
        self.while_emptying(|| {
            let mut tried = kept.stayed();
            self.lend_group(d, need, &mut tried, &mut |group| kept.note_stayed(group))
        })
    }

    /// [`Self::relocate_for`] by the one that holds `emptying`, and also where a limit keeps `d` from using more blocks. None of
    /// the groups in `tried` is emptied; those that are tried come to it, and `stays` is told of those that could not be emptied.
    ///
    /// # Errors
    /// As there.
    pub(super) fn lend_group(
        &self,
        d: &Arc<Domain>,
        need: Need,
        tried: &mut Vec<u32>,
        stays: &mut dyn FnMut(u32),
    ) -> Result<bool> {
        loop {
            if self.claim_beyond_limit(d, need)? {
                return Ok(true);
            }
            if self.empty_cheapest(For::Domain(d), tried, stays)?.is_none() {
                return Ok(false);
            }
        }
    }

    /// Has a domain empty a group that can be the first of a domain to be added on `devices`; whether there may be one that is
    /// nobody's now. The caller is inside no gate and holds no lock but the tenants'.
    ///
    /// # Errors
    /// As of [`Self::relocate_for`]; [`Error::Busy`] where groups are being emptied for something that takes long.
    pub(super) fn relocate_for_new_domain(&self, devices: DeviceSet) -> Result<bool> {
        if self.is_emptying() {
            return Ok(false); // a domain is asked for while a volume becomes smaller, by who is told how far that is
        }
        let Some(mut kept) = self.emptying_in_a_moment() else {
            return Err(Error::Busy(
                "block groups are being emptied (for a drain, say): try again when that has ended".into(),
            ));
        };
        self.while_emptying(|| {
            let mut tried = kept.stayed();
            loop {
                match self.empty_cheapest(For::NewDomain(devices), &mut tried, &mut |group| kept.note_stayed(group))? {
                    Some(false) => {}
                    found => return Ok(found.is_some()),
                }
            }
        })
    }

    /// The right to empty groups, unless another thread has it for longer. Who asks may hold the lock of the tenants.
    fn emptying_in_a_moment(&self) -> Option<MutexGuard<'_, Kept>> {
        self.emptying.lock_within(PATIENCE)
    }

    /// The right to empty groups, once who has it lets it go: behind one block group. `None` where that takes long, since a volume
    /// becomes smaller.
    pub(super) fn emptying_in_turn(&self) -> Option<MutexGuard<'_, Kept>> {
        let end = Instant::now() + PATIENCE;
        loop {
            let kept = self.emptying.lock_within(LOOK);
            if kept.is_some() || self.becomes_smaller.load(Ordering::SeqCst) && Instant::now() > end {
                return kept;
            }
        }
    }

    /// Empties the group that costs least, and none of those that were tried: whether it is nobody's now. `None` where there is
    /// none.
    fn empty_cheapest(&self, to: For<'_>, tried: &mut Vec<u32>, stays: &mut dyn FnMut(u32)) -> Result<Option<bool>> {
        let Some((owner, group)) = self.cheapest_to_empty(to, tried) else { return Ok(None) };
        let gone = self.empty_for(to, owner, group)?;
        if !gone {
            stays(group);
        }
        tried.push(group);
        Ok(Some(gone))
    }

    /// [`Self::room`], and where that is below `want` what there is once other domains have emptied groups, unless all that is
    /// free in them could not make up for it. As [`Self::relocate_for`].
    ///
    /// # Errors
    /// As there.
    pub(crate) fn room_by_relocation(&self, d: &Arc<Domain>, want: u64) -> Result<u64> {
        let others = || self.domains.iter().filter(|o| o.id != d.id && o.failed().is_none());
        let (mut room, mut attempt) = (self.room(d, want), 0);
        while room < want && !d.space.at_limit() {
            let most = others().map(|o| o.space.available()).sum::<u64>();
            if want > room.saturating_add(most) || !self.relocate_for(d, Need::Blocks, attempt)? {
                break;
            }
            attempt += 1;
            room = self.room(d, want);
        }
        Ok(room)
    }

    /// Empties a group of `owner`, where all that lies there can move; whether it is the owner's no longer. Nothing moves out of one
    /// that blocks with a fixed place keep. What that asks of the device counts for the domain that lacks room, for nobody where it is to be
    /// added, and not for the owner.
    fn empty_for(&self, to: For<'_>, owner: &Arc<Domain>, group: u32) -> Result<bool> {
        let used = owner.space.used_in(group);
        let mut kept = Kept::default();
        let payer = match to {
            For::Domain(d) => Some(&d.budget),
            For::NewDomain(_) => None,
        };
        let empty = || match self.any_is_fixed(owner, &owner.space.blocks_in(group)?)? {
            true => Ok(false),
            false => self.empty_group(&mut kept, owner, group, None),
        };
        let emptied = budget::paid_by(&owner.budget, payer, empty);
        self.let_go(&mut kept);
        match emptied {
            Ok(_) | Err(Error::NoSpace) => {}
            Err(Error::ReadOnly) => return Err(Error::ReadOnly),
            // its error, and none of `to`'s: others have room perhaps
            Err(e) => tracing::warn!("{} cannot empty group {group} for {to}: {e}", owner.id),
        }
        let gone = self.siblings.owner_of(group) != Some(owner.id);
        if gone {
            owner.counters.relocated.fetch_add(used, Ordering::Relaxed);
            tracing::debug!("{} has moved {used} blocks out of group {group} for {to}", owner.id);
        }
        Ok(gone)
    }

    /// Of the groups that other domains can empty and go without, one that can be had for `to` and that holds least.
    fn cheapest_to_empty(&self, to: For<'_>, tried: &[u32]) -> Option<(&Arc<Domain>, u32)> {
        let not = self.forbidden(to.devices());
        let (but, least) = match to {
            For::Domain(d) => (Some(d.id), 0),
            For::NewDomain(_) => (None, self.store.geometry().group_blocks()),
        };
        let mut all = Vec::new();
        for o in self.domains.iter().filter(|o| Some(o.id) != but && o.failed().is_none() && self.can_flush(o)) {
            for (g, used, total) in o.space.used_groups() {
                let fits = self.can_claim(g, &not) && g != o.journal_group() && !tried.contains(&g);
                let fits = fits && self.store.group_blocks(g) >= least;
                if fits && o.space.can_spare(total + used / 8 + METADATA_BLOCKS, accepted(o)) {
                    all.push((used, std::cmp::Reverse(g), o));
                }
            }
        }
        all.sort_by_key(|(used, g, _)| (*used, *g));
        // the tables of numbers are read for these alone
        all.into_iter().find(|(_, g, o)| o.nodes.is_empty(g.0) && o.nodes.can_spare(1)).map(|(_, g, o)| (o, g.0))
    }
}

#[cfg(test)]
mod tests;
