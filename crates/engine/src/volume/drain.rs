//! A device is drained: nothing new comes to lie on it, what can move moves, and what keeps it is told.
//!
//! Its superblock entry says so, so that it goes on after the next mount. No domain claims one of its groups; in those that
//! domains have no inode number is given out, and no block but where a domain has no room elsewhere. A group in which no
//! inode has its number is emptied and given up; of the others the data moves, and their numbers keep them: once the files
//! are removed (copied elsewhere in the volume, as a rule) they are empty, too.

use super::emptying::Left;
use super::groups::Bat;
use super::kept::Kept;
use super::{MountedVolume, Volume};
use crate::domain::Domain;
use crate::error::{Error, Result};
use crate::nodes::Closing;
use crate::types::*;
use braidfs_format::super_block::{DRAINED, SuperBlock};
use braidfs_store::interface::LiveVolume;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Directories that are told of at most.
const TOLD: usize = 100;
/// A path has no more names: what is longer is a loop that a check would find.
const DEPTH: usize = 4096;

/// What is still on a device that is drained.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Drained {
    /// Number of the device.
    pub device: u16,
    /// Its block groups that domains have.
    pub groups: u32,
    /// Of them, those with the journal of a domain: they never leave.
    pub journals: u32,
    /// Blocks of data and metadata that did not move: there is no room elsewhere, they have a fixed place, or cannot be read.
    pub blocks: u64,
    /// Inodes that have their numbers there, or that of an overflow node.
    pub inodes: u64,
    /// Directories in which these have a name, as far as they can be read.
    pub directories: u64,
    /// Some of them, those with most inodes first.
    pub told: Vec<HeldDirectory>,
}

impl Drained {
    /// Nothing keeps the device: it can be removed.
    pub fn is_empty(&self) -> bool {
        self.groups == 0
    }
}

/// A directory with inodes that keep a device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct HeldDirectory {
    /// From the root of the volume on; empty where it has none (files that are removed and open).
    pub path: Vec<u8>,
    /// Number of its inodes that keep the device.
    pub inodes: u64,
}

impl Volume {
    /// Keeps new inodes and data away from a device, from now on and after later mounts, moves what can move, and says what
    /// keeps the device. `progress` is told how many block groups were looked at, and of how many, and says whether to go on.
    /// Again, it goes on. A volume has one such device at a time.
    ///
    /// # Errors
    /// [`Error::ReadOnly`]; [`Error::Size`] where there is no such device, or no other one, or none that a tenant may use
    /// ([`crate::TenantBudget::devices`]); [`Error::Busy`], also where the drain is ended meanwhile ([`Self::end_drain`]);
    /// [`Error::Stopped`] by `progress`; of a device.
    pub fn drain_device(&self, device: usize, progress: &dyn Fn(u64, u64) -> bool) -> Result<Drained> {
        if self.read_only() {
            return Err(Error::ReadOnly);
        }
        let i = self.mounted();
        {
            let mut kept = i.emptying.lock();
            i.while_emptying(|| -> Result<()> {
                i.mark_drained(device, true)?;
                i.keep_drained(&mut kept);
                Ok(())
            })?;
        }
        i.forget_removed()?;
        i.empty_device(device, progress)?;
        self.what_keeps(device)
    }

    /// A device that is drained is like any other again.
    ///
    /// # Errors
    /// [`Error::ReadOnly`]; [`Error::Size`] where there is no such device; of a device.
    pub fn end_drain(&self, device: usize) -> Result<()> {
        if self.read_only() {
            return Err(Error::ReadOnly);
        }
        let i = self.mounted();
        let mut kept = i.emptying.lock();
        i.mark_drained(device, false)?;
        // lets those go that no tenant is kept off
        i.keep_drained(&mut kept);
        Ok(())
    }

    /// The device that is drained, if one is.
    pub fn drained_device(&self) -> Option<usize> {
        drained_of(&self.super_block())
    }

    /// What lies on a device, as of the last commit.
    fn what_keeps(&self, device: usize) -> Result<Drained> {
        let i = self.mounted();
        i.forget_removed()?;
        let mut told = Drained { device: device as u16, ..Drained::default() };
        let mut dirs: HashMap<Option<InodeNo>, u64> = HashMap::new();
        for g in i.groups_of_device(device) {
            let Some(d) = i.siblings.owner_of(g).map(|id| i.dom(id)) else { continue };
            told.groups += 1;
            told.journals += u32::from(d.journal_group() == g);
            told.blocks += d.space.used_in(g);
            d.nodes.for_each_used_of(g, &mut |node, entry| {
                let owner = match d.nodes.load(node, &entry) {
                    Ok(record) => record.owner,
                    // it has gone, or moved, since
                    Err(Error::NotFound | Error::Corrupt(_)) if d.nodes.get(node).is_ok_and(|now| now != entry) => {
                        return Ok(());
                    }
                    // whose it is, and where it hangs, nobody knows
                    Err(e) => {
                        tracing::warn!("{node} keeps device {device}, and cannot be read: {e}");
                        told.inodes += 1;
                        return Ok(());
                    }
                };
                told.inodes += 1;
                *dirs.entry(self.first_link(owner).map(|l| l.parent)).or_default() += 1;
                Ok(())
            })?;
        }
        told.directories = dirs.len() as u64;
        let mut dirs: Vec<_> = dirs.into_iter().collect();
        dirs.sort_unstable_by_key(|(dir, n)| (std::cmp::Reverse(*n), dir.map_or(0, |d| d.0)));
        dirs.truncate(TOLD);
        told.told = dirs
            .into_iter()
            .map(|(dir, inodes)| HeldDirectory { path: dir.map_or_else(Vec::new, |d| self.path_of(d)), inodes })
            .collect();
        Ok(told)
    }

    /// A path of a directory from the root on; from where it is not known which one, `?`.
    fn path_of(&self, dir: InodeNo) -> Vec<u8> {
        let (mut names, mut at) = (Vec::new(), dir);
        while at != InodeNo::ROOT {
            let Some(link) = self.first_link(at).filter(|_| names.len() < DEPTH) else {
                names.push(b"?".to_vec());
                break;
            };
            names.push(link.name.to_vec());
            at = link.parent;
        }
        let mut path = Vec::new();
        names.iter().rev().for_each(|n| {
            path.push(b'/');
            path.extend_from_slice(n);
        });
        if path.is_empty() { b"/".to_vec() } else { path }
    }
}

/// The device that the superblock says is drained; none where it is the only one.
pub(super) fn drained_of(sb: &SuperBlock) -> Option<usize> {
    let all = sb.device_table();
    all.iter().position(|d| d.flags.get() & DRAINED != 0).filter(|_| all.len() > 1)
}

impl MountedVolume {
    /// Groups of a device; none where there is no such device.
    pub(super) fn groups_of_device(&self, device: usize) -> Range<u32> {
        let sb = self.sb.read();
        sb.device_table().get(device).map_or(0..0, |d| d.first_group.get()..d.first_group.get() + d.groups.get())
    }

    /// [`Self::groups_of_device`] of each of which `which` says so.
    pub(super) fn groups_of_devices(&self, which: impl Fn(usize) -> bool) -> Vec<Range<u32>> {
        let all = self.sb.read().device_table().len();
        (0..all).filter(|n| which(*n)).map(|n| self.groups_of_device(n)).collect()
    }

    /// The superblocks say that a device is drained, durably, or not any more; no group of it is claimed then, no inode number
    /// given out.
    fn mark_drained(&self, device: usize, on: bool) -> Result<()> {
        let mut bat = self.bat.lock();
        if self.shared.read_only.load(Ordering::SeqCst) || self.shared.closing.load(Ordering::SeqCst) {
            return Err(Error::ReadOnly);
        }
        bat.check_may_resize()?;
        let sb = *self.sb.read();
        let now = drained_of(&sb);
        if device >= sb.device_table().len() {
            return Err(Error::Size(format!("the volume has no device {device}: it has {}", sb.device_table().len())));
        }
        if on && sb.device_table().len() == 1 {
            return Err(Error::Size("it is the volume's only device: what lies there cannot move".into()));
        }
        if let Some(other) = now.filter(|n| *n != device && on) {
            return Err(Error::Busy(format!("device {other} is being drained: end that first")));
        }
        if on {
            self.check_is_spared(device)?;
        }
        let flags = sb.device[device].flags.get();
        if (flags & DRAINED != 0) != on {
            let label = self.label.lock();
            let set = |flags: u32| self.sb.write().device[device].flags = flags.into();
            set(if on { flags | DRAINED } else { flags & !DRAINED });
            self.write_supers(&label, self.compat.load(Ordering::Relaxed)).inspect_err(|_| set(flags))?;
        }
        self.note_drained(&mut bat);
        self.count_unclaimed_in(&bat);
        self.keep_numbers(&bat, device);
        Ok(())
    }

    /// No number of an inode is given out in groups of a device from which the drain, or its tenant, keeps a domain away.
    pub(super) fn keep_numbers(&self, bat: &Bat, device: usize) {
        for g in self.groups_of_device(device) {
            if let Some(d) = bat.entry(g).domain.map(|id| self.dom(id)) {
                d.nodes.keep_group(g, self.gives_no_numbers(bat, d, g));
            }
        }
    }

    /// Has no group claimed of the device that the superblock says is drained.
    pub(super) fn note_drained(&self, bat: &mut Bat) {
        let drained = drained_of(&self.sb.read());
        bat.drain(drained.map_or(0..0, |device| self.groups_of_device(device)));
    }

    /// A mount goes on with what an earlier one began.
    pub(super) fn go_on_draining(&self) {
        let sb = *self.sb.read();
        let Some(device) = drained_of(&sb) else { return };
        let mut bat = self.bat.lock();
        self.note_drained(&mut bat);
        self.count_unclaimed_in(&bat);
        self.keep_numbers(&bat, device);
        drop(bat);
        self.keep_drained(&mut self.emptying.lock());
        tracing::info!(device, "a device is being drained");
    }

    /// Has nothing allocated in the groups that domains have on a device that is drained, as far as they have room elsewhere.
    pub(super) fn keep_drained(&self, kept: &mut Kept) {
        let device = drained_of(&self.sb.read());
        if let Some(device) = device {
            self.keep_out_of(kept, self.groups_of_device(device));
        }
        self.keep_tenants_off(kept);
    }

    /// Empties the groups of a device, from the last one on, and gives up those that no inode number keeps.
    fn empty_device(&self, device: usize, progress: &dyn Fn(u64, u64) -> bool) -> Result<()> {
        let groups = self.groups_of_device(device);
        let all = u64::from(groups.end - groups.start);
        let mut tried = Vec::new();
        self.group_by_group(groups.rev(), &|done| progress(done, all), &mut |kept, g| {
            self.check_drains(device)?;
            if let Some(d) = self.siblings.owner_of(g).map(|id| self.dom(id)) {
                let emptied = self.empty_group(kept, d, g, Some(&mut tried));
                self.keep_drained(kept);
                emptied?;
            }
            Ok(())
        })?;
        self.check_drains(device)?;
        progress(all, all);
        Ok(())
    }

    /// # Errors
    /// [`Error::Busy`] where a drain was ended.
    fn check_drains(&self, device: usize) -> Result<()> {
        match drained_of(&self.sb.read()) {
            Some(n) if n == device => Ok(()),
            _ => Err(Error::Busy(format!("the drain of device {device} was ended meanwhile"))),
        }
    }

    /// Empties a group, and gives it up where no inode number keeps it. What stays, where there is no room for it elsewhere, or
    /// somebody writes there all the time, is told by who asks; nothing is allocated there any more, unless there was no room
    /// at all: then false. `tried` as of [`Self::begin_emptying`].
    pub(super) fn empty_group(
        &self,
        kept: &mut Kept,
        d: &Arc<Domain>,
        g: u32,
        tried: Option<&mut Vec<u32>>,
    ) -> Result<bool> {
        if d.failed().is_some() {
            return Ok(true);
        }
        let Some(mut e) = self.begin_emptying(d, g, kept.take(g), tried)? else { return Ok(false) };
        match self.move_all(d, &mut e) {
            Ok(Left { blocks: 0, .. }) if d.journal_group() != g && self.close_numbers(d, g) == Closing::Done => {
                // one that was written to meanwhile is as before
                if !self.give_up_emptied(d, e).inspect_err(|_| d.nodes.reopen_group(g))? {
                    d.nodes.reopen_group(g);
                }
            }
            Ok(_) | Err(Error::NoSpace) => kept.push(d.id, e),
            Err(why) => {
                kept.push(d.id, e);
                return Err(why);
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests;
