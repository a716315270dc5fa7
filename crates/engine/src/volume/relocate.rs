//! Groups in use that are emptied for a domain that lacks room (SpanFS section 3.2.1).
//!
//! The last resort, before an operation is refused: no group is nobody's, and no domain has one that holds nothing, but one has as
//! much free as a group is large, in pieces. What lies in its group with least in use is written elsewhere in that domain, as
//! the cleaner does it, by ordinary commits. The group is given up then, with a higher epoch, and claimed as any other: each step
//! is one that a drain takes as well, and a crash between two of them leaves the group with one of the domains or with none.
//!
//! A group in which an inode has its number stays with its domain, as the number says where its entry stands; so do the group
//! of a journal, and one with blocks that have a fixed place (files that are overwritten in place, allocated blocks that were
//! never written). Whether there are such blocks shows when they are moved: what can be had so is therefore not told of as room
//! ([`crate::Volume::statfs_of`]), and who writes on gets more than was told.

use super::MountedVolume;
use super::kept::Kept;
use super::room::accepted;
use crate::domain::Domain;
use crate::error::{Error, Result};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// What moves changes the records of its files as well: room for that, beside an eighth of what moves.
const METADATA_BLOCKS: u64 = 64;

impl MountedVolume {
    /// Has another domain empty a group for `d`, which takes it; true also where this waited while another thread emptied groups:
    /// there may be room now. The caller is inside no gate and holds no lock, and `d` is at no limit of its own.
    ///
    /// # Errors
    /// Of the device; [`Error::ReadOnly`] where the volume has become so.
    pub(crate) fn relocate_for(&self, d: &Arc<Domain>) -> Result<bool> {
        if self.is_emptying() {
            return Ok(false); // it is the one for whom room is made
        }
        let Some(mut kept) = self.emptying.try_lock() else {
            drop(self.emptying.lock());
            return Ok(true);
        };
        self.while_emptying(|| {
            let mut tried = kept.stayed();
            loop {
                if self.claim_group(d)? {
                    return Ok(true);
                }
                let Some((owner, group)) = self.cheapest_to_empty(d, &tried) else { return Ok(false) };
                if !self.empty_for(d, owner, group)? {
                    kept.note_stayed(group);
                }
                tried.push(group);
            }
        })
    }

    /// [`Self::room`], and where that is below `want` what there is once other domains have emptied groups, unless all that is
    /// free in them could not make up for it. As [`Self::relocate_for`].
    ///
    /// # Errors
    /// As there.
    pub(crate) fn room_by_relocation(&self, d: &Arc<Domain>, want: u64) -> Result<u64> {
        let others = || self.domains.iter().filter(|o| o.id != d.id && o.failed().is_none());
        let mut room = self.room(d, want);
        while room < want && !d.space.at_limit() {
            let most = others().map(|o| o.space.available()).sum::<u64>();
            if want > room.saturating_add(most) || !self.relocate_for(d)? {
                break;
            }
            room = self.room(d, want);
        }
        Ok(room)
    }

    /// Empties a group of `owner`, where all that lies there can move; whether it is the owner's no longer. What could move has
    /// done so in any case.
    fn empty_for(&self, d: &Domain, owner: &Arc<Domain>, group: u32) -> Result<bool> {
        let used = owner.space.used_in(group);
        let mut kept = Kept::default();
        let emptied = self.empty_group(&mut kept, owner, group);
        self.let_go(&mut kept);
        match emptied {
            Ok(_) | Err(Error::NoSpace) => {}
            Err(Error::ReadOnly) => return Err(Error::ReadOnly),
            // its error, and none of `d`'s: others have room perhaps
            Err(e) => tracing::warn!("{} cannot empty group {group} for {}: {e}", owner.id, d.id),
        }
        let gone = self.siblings.owner_of(group) != Some(owner.id);
        if gone {
            owner.counters.relocated.fetch_add(used, Ordering::Relaxed);
            tracing::debug!("{} has moved {used} blocks out of group {group} for {}", owner.id, d.id);
        }
        Ok(gone)
    }

    /// Of the groups that other domains can empty and go without, one that `d` may have and that holds least. Those of domains
    /// with limited rates come last: what moves counts there.
    fn cheapest_to_empty(&self, d: &Domain, tried: &[u32]) -> Option<(&Arc<Domain>, u32)> {
        let not = self.forbidden(d.devices());
        let mut all = Vec::new();
        for o in self.domains.iter().filter(|o| o.id != d.id && o.failed().is_none()) {
            for (g, used, total) in o.space.used_groups() {
                let fits = self.can_claim(g, &not) && g != o.journal_group() && !tried.contains(&g);
                if fits && o.space.can_spare(total + used / 8 + METADATA_BLOCKS, accepted(o)) {
                    all.push((o.budget.is_on(), used, std::cmp::Reverse(g), o));
                }
            }
        }
        all.sort_by_key(|(limited, used, g, _)| (*limited, *used, *g));
        // the tables of numbers are read for these alone
        all.into_iter().find(|(_, _, g, o)| o.nodes.is_empty(g.0)).map(|(_, _, g, o)| (o, g.0))
    }
}
