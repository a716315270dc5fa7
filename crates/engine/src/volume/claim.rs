//! Claims: a domain, or one to be added, takes a group that is nobody's.
//!
//! Blank metadata is written to the group and made durable before the table of owners names it. Where that fails, another group is
//! taken, which may lie on another device: one that cannot flush never can again, and none of its groups is claimed any more
//! ([`MountedVolume::unclaimable`]); where something else fails, the group is left alone for some time, and after a second error
//! for a short time the whole device, since each error may take as long as a device has to answer. From the first error on no domain
//! is asked for a group on that device for as long: it would write there to give it back, and an error then is its own.

use super::MountedVolume;
use super::groups::Bat;
use super::need::Need;
use crate::device_set::DeviceSet;
use crate::domain::Domain;
use crate::error::{Error, Result};
use crate::planted::{Bug, planted};
use crate::space::Space;
use crate::types::*;
use braidfs_format::BLOCK_BYTES;
use braidfs_format::bat::BatEntry;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// A group that could not be made claimable is not tried again for so long.
const GROUP_RESTS: Duration = Duration::from_secs(60);
/// Nor are all groups of a device on which several could not.
const DEVICE_RESTS: Duration = Duration::from_secs(5);
/// So many errors of one device are enough for one claim.
const ERRORS_OF_DEVICE: usize = 2;

/// Why a group is not claimable.
pub(super) enum Unmade {
    /// What was written to the group, or its device: that of another one may be sound.
    Group(Error),
    /// Something else: no other group would do.
    Volume(Error),
}

impl MountedVolume {
    /// Gives the domain another group: one of nobody's, else one that holds nothing of a domain that can spare it. False
    /// where there is none. The claim is durable before the first block of it can be named by anything durable.
    ///
    /// # Errors
    /// Of the device.
    pub fn claim_group(&self, d: &Arc<Domain>) -> Result<bool> {
        if d.space.at_limit() {
            return Ok(false);
        }
        self.claim_beyond_limit(d, Need::Blocks)
    }

    /// [`Self::claim_group`], also where a limit keeps the domain from using more blocks: it needs numbers of inodes, or what
    /// was promised before the limit went down.
    ///
    /// # Errors
    /// Of the device.
    pub(crate) fn claim_beyond_limit(&self, d: &Arc<Domain>, need: Need) -> Result<bool> {
        self.shared.check_alive()?;
        let before = d.space.groups().len();
        let mut bat = self.bat.lock();
        if d.space.groups().len() > before {
            return Ok(true); // somebody else did it meanwhile
        }
        let find = |bat: &mut Bat| -> Result<Option<u32>> {
            let not = self.unclaimable(d.devices());
            Ok(match bat.find_free(&not) {
                None if self.give_back(bat, Some(d.id), &not)? => bat.find_free(&not),
                // what was accepted before its tenant was kept off a device is not lost for want of room elsewhere
                None if need == Need::Blocks && d.space.promised() > 0 => {
                    bat.find_free(&self.unclaimable(DeviceSet::ALL))
                }
                found => found,
            }
            .map(|g| g as u32))
        };
        let make = |_: &mut Bat, group, epoch| self.make_claimable(d, group, epoch).map_err(Unmade::Group);
        let Some((group, epoch)) = self.find_claimable(&mut bat, find, make)? else { return Ok(false) };
        if let Err(e) = bat.set(&**self.store.device(0), group as usize, BatEntry { domain: Some(d.id), epoch }) {
            // nobody gets it now: it is no room either
            self.count_unclaimed_in(&bat);
            return Err(e);
        }
        d.space.add_group_when(group, || {
            // first, so that an inode made in it by another thread is found at once
            self.siblings.set_owner(group, Some(d.id));
            d.nodes.add_group(group, &d.space)?;
            d.nodes.keep_group(group, self.gives_no_numbers(&bat, d, group));
            Ok(())
        })?;
        self.count_unclaimed_in(&bat);
        tracing::debug!("{} takes group {group}", d.id);
        Ok(true)
    }

    /// Of the groups that `find` names one after the other the first that `make` can write blank metadata to, for a claim with that
    /// epoch; `None` where there is none. Those that it cannot are not named again for a while ([`Bat::leave_alone`]).
    ///
    /// # Errors
    /// The first one, where no group can be had.
    pub(super) fn find_claimable(
        &self,
        bat: &mut Bat,
        find: impl Fn(&mut Bat) -> Result<Option<u32>>,
        make: impl Fn(&mut Bat, u32, u32) -> Result<(), Unmade>,
    ) -> Result<Option<(u32, u32)>> {
        if bat.try_again(Instant::now()) {
            self.count_unclaimed_in(bat);
        }
        let mut errors: Vec<(Option<usize>, Error)> = Vec::new();
        let found = loop {
            let group = match find(bat) {
                Ok(Some(group)) => group,
                Ok(None) => break Ok(None),
                Err(e) => break Err(e),
            };
            let epoch = bat.entry(group).epoch.wrapping_add(1);
            match make(bat, group, epoch) {
                Ok(()) => break Ok(Some((group, epoch))),
                Err(Unmade::Volume(e)) => break Err(e),
                Err(Unmade::Group(e)) => {
                    tracing::warn!("group {group} cannot be claimed: {e}");
                    let device = self.store.device_of(group);
                    errors.push((device, e));
                    let of_device = errors.iter().filter(|(d, _)| *d == device).count();
                    let now = Instant::now();
                    bat.leave_alone(group..group + 1, now + GROUP_RESTS);
                    if of_device >= ERRORS_OF_DEVICE {
                        bat.leave_alone(self.groups_beside(group), now + DEVICE_RESTS);
                    }
                    // a domain that gives a group there back writes to the device, and an error of that would fail it
                    bat.suspect(self.groups_beside(group), now + DEVICE_RESTS);
                    // nobody gets them now: they are no room either, and nobody is asked for such before the next look
                    self.count_unclaimed_in(bat);
                }
            }
        };
        match (found, errors.into_iter().next()) {
            (Ok(None), Some((_, e))) => Err(e),
            (found, _) => found,
        }
    }

    /// Writes blank metadata to a group that is nobody's, for a claim with `epoch`, and makes it durable: on the group's device,
    /// which alone is written to.
    fn make_claimable(&self, d: &Domain, group: u32, epoch: u32) -> Result<()> {
        Space::init_group(&self.store, d.id, group, epoch, None)?;
        // with the entry of the table
        d.budget.charge_run(Way::Write, (self.store.geometry().meta_blocks() as usize + 1) * BLOCK_BYTES);
        if planted(Bug::ClaimOneDevice) {
            return self.store.device(0).flush().map_err(Error::Io);
        }
        Ok(self.store.flush_groups([group])?)
    }

    /// All groups of the device that has `group`.
    fn groups_beside(&self, group: u32) -> Range<u32> {
        self.store.device_of(group).map_or(group..group + 1, |device| self.groups_of_device(device))
    }

    /// Groups that are claimed by nobody who may use these devices: those of other devices, and of such as could not flush.
    pub(super) fn unclaimable(&self, devices: DeviceSet) -> Vec<Range<u32>> {
        let lost = |n: usize| self.store.cannot_flush(n);
        if devices.is_all() && !(0..self.store.devices()).any(lost) {
            return Vec::new();
        }
        self.groups_of_devices(|n| !devices.contains(n) || lost(n))
    }

    /// Whether groups of a device can be claimed once a domain has given them back, a hint: whether it can flush, and has not failed a
    /// moment ago.
    pub(super) fn takes_claims(&self, device: usize) -> bool {
        !self.store.cannot_flush(device) && self.resting.load(Ordering::Relaxed) & 1 << device == 0
    }

    /// Whether all devices that a domain has groups on can flush: else the next checkpoint or commit fails it.
    pub(super) fn can_flush(&self, d: &Domain) -> bool {
        !d.space.devices().any(|n| self.store.cannot_flush(n))
    }
}

#[cfg(test)]
mod tests;
