//! Groups that are given up while the volume is in use: those at the end of a volume that becomes smaller, or those of a device
//! that leaves it or is drained.
//!
//! Nobody claims them from the beginning on. What is valid in one is written elsewhere, as the cleaner does it, by ordinary
//! commits; a group that is empty then goes back to nobody by itself.

use super::MountedVolume;
use super::kept::Kept;
use super::need::Need;
use super::relocate::LOOK;
use super::resize::{bytes, size_text};
use crate::domain::Domain;
use crate::error::{Error, Result};
use crate::nodes::Closing;
use crate::space::Emptying;
use braidfs_format::super_block::SuperBlock;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Blocks that are moved between two commits.
const MOVED_TOGETHER: usize = 512;
/// How often what is in a group is looked at: others may write to blocks that are being moved.
const PASSES: usize = 6;
/// Groups that a domain without room takes at most for what lies in one: the first may make up for what the domain keeps back.
const CLAIMED_FOR_ONE: usize = 2;

/// The groups at the end, while they are being given up. Dropped, those that are there still are like any others.
pub(super) struct End<'a> {
    volume: &'a MountedVolume,
    first: u32,
    /// They are all that the last device has, and it leaves.
    leaves: bool,
    /// Those of them that are domains', and whose.
    owned: Vec<(u32, &'a Arc<Domain>)>,
    /// Those in which nothing is allocated any more.
    kept: Kept,
    /// Groups before the end that other domains were asked to empty for what moves.
    tried: Vec<u32>,
}

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.volume.let_go(&mut self.kept);
        self.owned.iter().for_each(|(g, d)| d.nodes.reopen_group(*g));
        let mut bat = self.volume.bat.lock();
        bat.claim_below(None);
        self.volume.count_unclaimed_in(&bat);
    }
}

impl<'a> End<'a> {
    /// Has nobody claim what is behind the end of the volume that `smaller` makes of the present one; with the superblock of now
    /// and the one to come. The size stays until this is dropped.
    pub(super) fn begin(
        volume: &'a MountedVolume,
        smaller: impl FnOnce(&SuperBlock) -> Result<SuperBlock>,
    ) -> Result<(Self, SuperBlock, SuperBlock)> {
        let mut bat = volume.bat.lock();
        let old = *volume.sb.read();
        let sb = smaller(&old)?;
        bat.claim_below(Some(sb.groups.get() as usize));
        volume.count_unclaimed_in(&bat);
        drop(bat);
        let leaves = sb.devices < old.devices;
        Ok((
            Self {
                volume,
                first: sb.groups.get(),
                leaves,
                owned: Vec::new(),
                kept: Kept::default(),
                tried: Vec::new(),
            },
            old,
            sb,
        ))
    }

    /// The first group behind the end.
    pub(super) fn first(&self) -> u32 {
        self.first
    }

    /// What keeps `group`, for the user.
    fn cannot(&self, group: u32, why: &str) -> Error {
        if self.leaves {
            return Error::Size(format!("the device cannot leave: {why} (block group {group})"));
        }
        let least = size_text(self.volume.least_with(group));
        Error::Size(format!("block group {group} cannot leave: {why}; the least size is {least}"))
    }

    /// No inode is given out behind the end any more, where all that is there can leave.
    pub(super) fn close(&mut self) -> Result<()> {
        let volume = self.volume;
        volume.forget_removed()?;
        volume.free_half_made(&mut volume.bat.lock(), |g| g >= self.first)?;
        let all = volume.store.geometry().groups;
        let mut stays = None;
        for g in self.first..all {
            let Some(d) = volume.siblings.owner_of(g).map(|id| volume.dom(id)) else { continue };
            if d.failed().is_some() {
                stays = Some((g, format!("{} is read-only after an error", d.id)));
            } else if d.journal_group() == g {
                stays = Some((g, format!("the journal of {} lies there", d.id)));
            } else {
                match volume.close_numbers(d, g) {
                    Closing::Done => self.owned.push((g, d)),
                    Closing::InUse => stays = Some((g, NUMBERS.to_string())),
                    Closing::Needed => stays = Some((g, format!("{} has too few other inode numbers", d.id))),
                }
            }
        }
        stays.map_or(Ok(()), |(g, why)| Err(self.cannot(g, &why)))
    }

    /// What moves has room before the end, as far as that is seen before anything moves.
    ///
    /// # Errors
    /// [`Error::Size`] where it has not, whatever domains lend each other, with the least size by that.
    pub(super) fn check_room(&self) -> Result<()> {
        let mut room = self.volume.room_before(self.first);
        if room.fits() {
            return Ok(());
        }
        let moves = size_text(bytes(room.moves()));
        if self.leaves {
            return Err(Error::Size(format!(
                "the device cannot leave: what lies there ({moves}) has no room elsewhere"
            )));
        }
        let all = self.volume.store.geometry().groups;
        let stays = (self.first..all).find(|g| {
            room.put_before(*g);
            room.fits()
        });
        let least = size_text(self.volume.least_with(stays.unwrap_or(all - 1)));
        let why =
            format!("what lies behind that end ({moves}) has no room before it; the least size is {least} at present");
        Err(Error::Size(why))
    }

    /// Empties and gives up all of them, from the last one on. `progress` is told how many have gone, and of how many, and says
    /// whether to go on.
    pub(super) fn empty(&mut self, progress: &dyn Fn(u64, u64) -> bool) -> Result<()> {
        let (all, owned) = (self.owned.len() as u64, self.owned.clone());
        // what moves out of one shall not come into another, as far as there is room elsewhere
        self.volume.keep_out_of(&mut self.kept, owned.iter().map(|(g, _)| *g));
        for (done, (group, d)) in (0..).zip(owned.into_iter().rev()) {
            if !progress(done, all) {
                return Err(Error::Stopped);
            }
            self.empty_one(d, group)?;
        }
        // a volume of few groups has no other moment at which whoever asked is known to be gone
        if progress(all, all) { Ok(()) } else { Err(Error::Stopped) }
    }

    fn empty_one(&mut self, d: &Arc<Domain>, group: u32) -> Result<()> {
        let v = self.volume;
        let busy = || Error::Busy(format!("block group {group} is written to all the time: try again"));
        for _ in 0..PASSES {
            if v.siblings.owner_of(group) != Some(d.id) {
                return Ok(()); // given back meanwhile
            }
            // those behind it have been given up
            let no_room =
                |end: &Self| end.cannot(group, &format!("{} has no room elsewhere for what lies there", d.id));
            let kept = self.kept.take(group);
            let begun = v.begin_emptying(d, group, kept, Some(&mut self.tried))?;
            let mut e = begun.ok_or_else(|| no_room(self))?;
            let left = v.move_all(d, &mut e);
            if !matches!(left, Ok(Left { blocks: 0, .. })) {
                let room = d.space.available();
                d.space.end_emptying(e);
                return Err(match left {
                    Err(Error::NoSpace) => no_room(self),
                    Ok(left) if left.blocks > room => no_room(self),
                    Ok(left) if left.fewer => busy(),
                    Err(e) => e,
                    Ok(_) => self.cannot(group, FIXED),
                });
            }
            if v.give_up_emptied(d, e)? {
                return Ok(());
            }
        }
        Err(busy())
    }
}

/// What there is on both sides of an end of the volume, in blocks.
struct Room {
    /// Data blocks of a whole group.
    group: u64,
    /// Groups before the end that are nobody's.
    nobodys: u64,
    /// Of each domain that works.
    domains: Vec<RoomOfOne>,
}

/// What a domain has on both sides.
struct RoomOfOne {
    /// What is in use behind the end.
    moves: u64,
    /// What it can have before the end.
    free: u64,
    /// Its groups behind the end, the last one first, each with what is in use and what is not.
    behind: Vec<(u32, u64, u64)>,
}

impl Room {
    /// What moves.
    fn moves(&self) -> u64 {
        self.domains.iter().map(|d| d.moves).sum()
    }

    /// Whether what moves may have room: a domain that lacks some takes whole groups, of nobody's or of others that can spare
    /// them. What commits need meanwhile is not counted, so that nothing is refused that could be done.
    fn fits(&self) -> bool {
        let of = |n: fn(&RoomOfOne, u64) -> u64| self.domains.iter().map(|d| n(d, self.group)).sum::<u64>();
        let lent = of(|d, group| d.free.saturating_sub(d.moves) / group);
        let lacks = of(|d, group| d.moves.saturating_sub(d.free).div_ceil(group));
        lacks <= self.nobodys + lent
    }

    /// The end comes behind `group`, which was the first one behind it.
    fn put_before(&mut self, group: u32) {
        for d in &mut self.domains {
            if let Some((_, used, unused)) = d.behind.pop_if(|(g, ..)| *g == group) {
                (d.moves, d.free) = (d.moves - used, d.free + unused);
                return;
            }
        }
        self.nobodys += 1;
    }
}

/// What [`End::close`] says of a group in which inodes have their numbers.
pub(super) const NUMBERS: &str = "files and directories have their inode numbers there";

/// What does not move.
const FIXED: &str = "blocks that cannot move lie there, of files that are overwritten in place or allocated, or removed and open, or \
     that cannot be read (the log says which)";

impl MountedVolume {
    /// What moves where the volume ends before group `first`, and what room there is.
    fn room_before(&self, first: u32) -> Room {
        let g = self.store.geometry();
        let nobodys = (0..first).filter(|g| self.siblings.owner_of(*g).is_none()).count() as u64;
        let of = |d: &Arc<Domain>| {
            let (before, mut behind): (Vec<_>, Vec<_>) =
                d.space.use_of_groups().into_iter().partition(|(g, ..)| *g < first);
            behind.reverse();
            let freed = d.space.stats().pending;
            let free = before.iter().map(|(_, _, free)| free).sum::<u64>() + freed;
            RoomOfOne { moves: behind.iter().map(|(_, used, _)| used).sum(), free, behind }
        };
        let works = self.domains.iter().filter(|d| d.failed().is_none());
        Room { group: u64::from(g.group_blocks() - g.meta_blocks()), nobodys, domains: works.map(of).collect() }
    }

    /// Has nothing allocated in these groups of domains, as far as those have room elsewhere.
    pub(super) fn keep_out_of(&self, kept: &mut Kept, groups: impl IntoIterator<Item = u32>) {
        for g in groups {
            let Some(d) = self.siblings.owner_of(g).map(|id| self.dom(id)) else { continue };
            if d.failed().is_none()
                && let Some(e) = d.space.keep_out(g)
            {
                kept.push(d.id, e);
            }
        }
    }

    /// Does `work` for each of these groups that some domain has, with nothing allocated where devices are drained, or tenants may
    /// have nothing: what moves out of one shall not come into another. Others that wait for the right to empty groups come in
    /// between, and may have changed anything. `go_on` is told how many were looked at, also while this waits.
    ///
    /// # Errors
    /// [`Error::Stopped`] by `go_on`; [`Error::ReadOnly`]; of `work`.
    pub(super) fn group_by_group(
        &self,
        groups: impl Iterator<Item = u32>,
        go_on: &dyn Fn(u64) -> bool,
        work: &mut dyn FnMut(&mut Kept, u32) -> Result<()>,
    ) -> Result<()> {
        for (done, g) in (0..).zip(groups) {
            loop {
                if !go_on(done) {
                    return Err(Error::Stopped);
                }
                if self.shared.read_only.load(Ordering::SeqCst) || self.shared.closing.load(Ordering::SeqCst) {
                    return Err(Error::ReadOnly);
                }
                if self.siblings.owner_of(g).is_none() {
                    break;
                }
                // while a volume becomes smaller somebody may wait for this thread to stop
                if let Some(mut kept) = self.emptying.lock_within(LOOK) {
                    self.while_emptying(|| {
                        self.keep_drained(&mut kept);
                        work(&mut kept, g)
                    })?;
                    break;
                }
            }
        }
        Ok(())
    }

    /// Has no number of a group given out any more, where none is in use; a domain that has too few others takes another group first.
    pub(super) fn close_numbers(&self, d: &Arc<Domain>, group: u32) -> Closing {
        let closing = d.close_numbers(group);
        if closing != Closing::Needed {
            return closing;
        }
        let claimed = self.claim_beyond_limit(d, Need::Numbers).unwrap_or_else(|e| {
            tracing::warn!("{}: no group for the numbers that it needs beside group {group}: {e}", d.id);
            false
        });
        if claimed { d.close_numbers(group) } else { closing }
    }

    /// They are like any others.
    pub(super) fn let_go(&self, kept: &mut Kept) {
        kept.take_all().for_each(|(d, e)| self.dom(d).space.end_emptying(e));
    }

    /// What was removed is gone then, also what waited for a commit; and its numbers. Of domains that work: one that has failed
    /// keeps all its groups, and those of others are given up as ever, by a commit and a checkpoint of their own domain.
    ///
    /// # Errors
    /// Of a domain that works all the same.
    pub(super) fn forget_removed(&self) -> Result<()> {
        self.settle_everything()?;
        self.reap_for_room();
        self.settle_everything()?;
        // numbers of removed directories are taken until a checkpoint
        for d in self.domains.iter().filter(|d| d.failed().is_none() && d.quarantined_numbers() > 0) {
            // an error fails that domain, which says so itself
            let _ = d.checkpoint();
        }
        Ok(())
    }

    /// A group that is being emptied is nobody's, where it is empty and no number of it is given out; else it is as before.
    pub(super) fn give_up_emptied(&self, d: &Arc<Domain>, e: Emptying) -> Result<bool> {
        let mut bat = self.bat.lock();
        if self.shared.closing.load(Ordering::SeqCst) {
            // a remount has marked the domain clean, or is about to
            d.space.end_emptying(e);
            return Err(Error::ReadOnly);
        }
        let gone = d.give_up_emptied(e, |given| {
            for &g in given {
                self.siblings.set_owner(g, None);
                bat.set_free(&**self.store.device(0), g)?;
            }
            Ok(())
        })?;
        self.count_unclaimed_in(&bat);
        Ok(gone)
    }

    /// Keeps others from allocating in a group (as `kept` does), where the domain has room for what lies there, or takes other groups for it.
    /// With `tried`, other domains empty groups for it where none is nobody's ([`Self::lend_group`]). `None` where there is no room.
    pub(super) fn begin_emptying(
        &self,
        d: &Arc<Domain>,
        group: u32,
        kept: Option<Emptying>,
        mut tried: Option<&mut Vec<u32>>,
    ) -> Result<Option<Emptying>> {
        let mut begun = match kept {
            Some(mut e) => match d.space.look_again(&mut e) {
                Ok(()) => Some(e),
                Err(why) => {
                    d.space.end_emptying(e);
                    return Err(why);
                }
            },
            None => d.space.begin_emptying(group)?,
        };
        for _ in 0..CLAIMED_FOR_ONE {
            let room = || d.space.available().max(d.space.movable().saturating_sub(d.space.margin()));
            let enough = begun.as_ref().is_some_and(|e| room() >= e.blocks.len() as u64);
            if enough {
                break;
            }
            // a limit of space is none for what moves: as much becomes free
            let claimed = match &mut tried {
                Some(tried) => self.lend_group(d, Need::Blocks, tried, &mut |_| {}),
                None => self.claim_beyond_limit(d, Need::Blocks),
            };
            match claimed {
                Ok(true) if begun.is_none() => begun = d.space.begin_emptying(group)?,
                Ok(true) => {}
                // what there is may do: blocks that are removed meanwhile need not move
                Ok(false) => break,
                Err(e) => {
                    begun.into_iter().for_each(|e| d.space.end_emptying(e));
                    return Err(e);
                }
            }
        }
        Ok(begun)
    }

    /// Has what is valid in a group written elsewhere; what could not be.
    pub(super) fn move_all(&self, d: &Arc<Domain>, e: &mut Emptying) -> Result<Left> {
        let (mut fewer, mut pass) = (false, 0);
        loop {
            // what an open transaction wrote there, or freed, is seen now
            d.flush_all()?;
            d.commit()?;
            d.space.look_again(e)?;
            let blocks = std::mem::take(&mut e.blocks);
            let left = blocks.len() as u64;
            if left == 0 || pass == PASSES {
                return Ok(Left { blocks: left, fewer });
            }
            let mut moved = 0;
            for some in blocks.chunks(MOVED_TOGETHER) {
                moved += self.move_blocks(d, some)?;
                // where there is no background nobody else looks at memory
                self.keep_to_budget();
            }
            (fewer, pass) = (moved > 0, pass + 1);
            if !fewer {
                return Ok(Left { blocks: left, fewer });
            }
        }
    }
}

/// What a group holds that could not be moved.
pub(super) struct Left {
    pub(super) blocks: u64,
    /// The last pass moved some.
    pub(super) fewer: bool,
}

#[cfg(test)]
mod tests;
