//! Devices that a tenant may use: its domain claims groups on these only, and what it has on others moves.
//!
//! The domain's header says which, so that it goes on after the next mount. In its groups on other devices no number of an
//! inode is given out, and no block but where the domain has no room elsewhere; they are emptied one by one, as those of a
//! device that is drained ([`super::drain`]), and given back, but for the one with the journal and those in which an inode
//! still has its number. While not all of them can be kept from being written to, since the devices that it may use are full,
//! the tenant has nothing more than it uses at that moment.
//!
//! What a front end had accepted before may lie on any device until it says that it holds no more of that: nothing moves before.

use super::drain::drained_of;
use super::groups::Bat;
use super::kept::Kept;
use super::moves::{Elsewhere, Moves};
use super::need::Need;
use super::{MountedVolume, Volume};
use crate::device_set::DeviceSet;
use crate::domain::Domain;
use crate::error::{Error, Result};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// A front end that holds accepted writes of other domains back finds so many blocks, or this part of the volume, that nobody
/// owns: what moves takes no more (64 MiB).
const LEFT_TO_OTHERS: u64 = 16_384;
const LEFT_PART: u64 = 16;
/// So often it is looked whether a front end has written back what it had accepted.
const LOOK: Duration = Duration::from_millis(20);
/// What did not move is tried again after so long, and after twice as long each time.
const AGAIN: Duration = Duration::from_secs(1);
const AGAIN_MAX: Duration = Duration::from_secs(64);

impl Volume {
    /// Moves what a tenant has on devices that it may not use ([`crate::TenantBudget::devices`]) to those that it may, as far as
    /// that can move, and says what is left. The background does it by itself. `progress` is told how many block groups were
    /// looked at, and of how many, and says whether to go on. Waits until a front end that had accepted writes before has
    /// written them back.
    ///
    /// # Errors
    /// [`Error::NotFound`] where there is no such tenant; [`Error::ReadOnly`]; [`Error::Stopped`] by `progress`; of a device.
    pub fn tenant_move(&self, name: &str, progress: &dyn Fn(u64, u64) -> bool) -> Result<Elsewhere> {
        let i = self.mounted();
        let d = self.tenant(name).map(|t| i.dom(t.domain).clone())?;
        let groups = i.forbidden_groups(&d);
        let all = groups.len() as u64;
        while i.owes(&d) {
            if !progress(0, all) {
                return Err(Error::Stopped);
            }
            std::thread::sleep(LOOK);
        }
        i.forget_removed()?;
        i.move_groups(&d, groups, &|done| progress(done, all))?;
        progress(all, all);
        Ok(i.elsewhere(&d))
    }
}

impl MountedVolume {
    /// Groups of the devices that are not among these.
    pub(super) fn forbidden(&self, devices: DeviceSet) -> Vec<Range<u32>> {
        if devices.is_all() {
            return Vec::new();
        }
        self.groups_of_devices(|n| !devices.contains(n))
    }

    /// Whether a group lies where its domain's tenant may not have it.
    pub(super) fn is_forbidden(&self, d: &Domain, group: u32) -> bool {
        self.forbidden(d.devices()).iter().any(|g| g.contains(&group))
    }

    /// Whether no number of an inode may be given out in a group.
    pub(super) fn gives_no_numbers(&self, bat: &Bat, d: &Domain, group: u32) -> bool {
        bat.drained().contains(&group) || self.is_forbidden(d, group)
    }

    fn forbidden_groups(&self, d: &Domain) -> Vec<u32> {
        let not = self.forbidden(d.devices());
        if not.is_empty() {
            return Vec::new();
        }
        d.space.groups().into_iter().filter(|g| not.iter().any(|n| n.contains(g))).collect()
    }

    /// What a front end has accepted may still come, and lie anywhere.
    fn owes(&self, d: &Domain) -> bool {
        self.shared.options.cached_above && d.space.promised() > 0
    }

    /// # Errors
    /// Where a tenant cannot have these devices and no others. The size of the volume stays as long as the table is locked.
    pub(super) fn check_devices(&self, bat: &Bat, devices: DeviceSet) -> Result<()> {
        if devices.is_all() {
            return Ok(());
        }
        bat.check_may_resize()?;
        let sb = *self.sb.read();
        let all = sb.device_table().len();
        if devices.within(all) != Some(devices) {
            return Err(Error::Size(format!("the volume has {all} devices, with the numbers 0 to {}", all - 1)));
        }
        if let Some(device) = drained_of(&sb).filter(|d| DeviceSet::of([*d]) == Some(devices)) {
            return Err(Error::Size(format!("device {device} is being drained: a tenant needs another one")));
        }
        Ok(())
    }

    /// # Errors
    /// [`Error::Size`] where a tenant may use no device but this one, or but one that is drained: nobody claims groups there. The
    /// table of groups is locked.
    pub(super) fn check_is_spared(&self, device: usize) -> Result<()> {
        let drained = drained_of(&self.sb.read());
        let needs = |s: DeviceSet| s.numbers().all(|n| n == device || Some(n) == drained) && s.contains(device);
        for d in self.domains.iter() {
            if let Some(b) = d.binding().filter(|b| !b.devices.is_all() && needs(b.devices)) {
                return Err(Error::Size(format!("tenant {} may use no other device: allow it one first", b.name)));
            }
        }
        Ok(())
    }

    /// From now on a domain claims groups on these devices only, and gives out no number elsewhere.
    pub(super) fn set_devices(&self, bat: &Bat, d: &Domain, devices: DeviceSet) {
        d.set_devices(devices);
        for g in d.space.groups() {
            d.nodes.keep_group(g, self.gives_no_numbers(bat, d, g));
        }
    }

    /// What has become of a domain's groups with that, where nobody empties any: else the next look does it.
    pub(super) fn devices_changed(&self, d: &Arc<Domain>) {
        let Some(mut kept) = self.emptying.try_lock() else { return };
        self.while_emptying(|| {
            self.keep_drained(&mut kept);
            // one that has no other group needs some first
            for _ in 0..=self.forbidden_groups(d).len() {
                if !self.has_open(d) || !self.leaves_enough(0) {
                    break;
                }
                match self.claim_beyond_limit(d, Need::Blocks) {
                    Ok(true) => self.keep_drained(&mut kept),
                    Ok(false) => break,
                    Err(e) => {
                        tracing::warn!("{}: no group on the devices that its tenant may use: {e}", d.id);
                        break;
                    }
                }
            }
            self.hold_where_crowded(d);
        });
    }

    /// Whether something may be allocated where the tenant may have no groups.
    fn has_open(&self, d: &Domain) -> bool {
        !self.owes(d) && self.forbidden_groups(d).iter().any(|g| d.space.is_open(*g))
    }

    /// Where that is so after all was tried, the domain has nothing more than it uses.
    fn hold_where_crowded(&self, d: &Domain) {
        let crowded = self.has_open(d);
        let _bat = self.bat.lock();
        d.space.crowd(crowded.then(|| d.space.used()));
    }

    /// Has nothing allocated where tenants may have no groups, as far as their domains have room elsewhere, and again where they
    /// may.
    pub(super) fn keep_tenants_off(&self, kept: &mut Kept) {
        let have = kept.domains();
        for d in self.domains.iter().filter(|d| d.failed().is_none()) {
            let not = self.forbidden_groups(d);
            // what it has shut may be counted anew already
            if not.is_empty() && !have.contains(&d.id) && !d.space.has_shut() && !d.space.is_crowded() {
                continue;
            }
            let drained = self.drained_groups();
            for g in d.space.groups().into_iter().filter(|g| !not.contains(g) && !drained.contains(g)) {
                if let Some(e) = kept.take(g) {
                    d.space.end_emptying(e);
                }
            }
            if !self.owes(d) {
                self.keep_out_of(kept, not);
            }
            self.count_shut(d);
        }
    }

    /// A limit of space counts what can be had beside groups in which nothing is allocated.
    pub(super) fn count_shut(&self, d: &Domain) {
        let drained = self.drained_groups();
        if d.devices().is_all() && drained.is_empty() && !d.space.has_shut() {
            return;
        }
        let not = self.forbidden_groups(d);
        let _bat = self.bat.lock();
        let shut: Vec<u32> = d.space.groups().into_iter().filter(|g| not.contains(g) || drained.contains(g)).collect();
        d.space.note_shut(&shut);
    }

    pub(super) fn elsewhere(&self, d: &Domain) -> Elsewhere {
        let groups = self.forbidden_groups(d);
        Elsewhere {
            groups: groups.len() as u32,
            bytes: groups.iter().map(|g| d.space.used_in(*g)).sum::<u64>() << 12,
            journal: groups.contains(&d.journal_group()),
            crowded: d.space.is_crowded(),
        }
    }

    /// Empties these groups of a domain, as far as its tenant may not have them, from the last one on. `go_on` is told how many
    /// were looked at.
    fn move_groups(&self, d: &Arc<Domain>, groups: Vec<u32>, go_on: &dyn Fn(u64) -> bool) -> Result<()> {
        if groups.is_empty() {
            // Those that were kept may be the tenant's again. Where somebody else empties groups it is looked again: who asks may be a
            // thread that a remount waits for.
            if let Some(mut kept) = self.emptying.try_lock() {
                self.while_emptying(|| self.keep_drained(&mut kept));
            }
        }
        self.group_by_group(groups.into_iter().rev(), go_on, &mut |kept, g| {
            let there = self.siblings.owner_of(g) == Some(d.id) && self.is_forbidden(d, g);
            let (used, has) = (d.space.used_in(g), d.space.movable());
            if there && !self.owes(d) && (has >= used || self.leaves_enough(used - has)) {
                self.empty_group(kept, d, g, None)?;
                self.keep_drained(kept);
            }
            Ok(())
        })?;
        self.count_shut(d);
        self.hold_where_crowded(d);
        Ok(())
    }

    /// Whether nothing is allocated in a group although its domain may have it: while somebody empties it, or since the domain was
    /// allowed it when another thread emptied groups.
    fn has_left_closed(&self, d: &Domain, not: &[u32]) -> bool {
        let drained = self.drained_groups();
        d.space.closed_groups().iter().any(|g| !not.contains(g) && !drained.contains(g))
    }

    /// Whether groups can be claimed for so many blocks, and what others accepted still finds room.
    fn leaves_enough(&self, blocks: u64) -> bool {
        let g = self.store.geometry();
        let all = u64::from(g.groups) * u64::from(g.group_blocks());
        let least = LEFT_TO_OTHERS.min(all / LEFT_PART);
        !self.shared.options.cached_above || self.shared.unclaimed.load(Ordering::Relaxed) > blocks + least
    }

    /// The background empties what tenants have where they may have nothing; `stop`: whether the volume ends.
    pub(super) fn move_tenants(&self, moves: &mut Moves, stop: &dyn Fn() -> bool) {
        for d in self.domains.iter().filter(|d| d.failed().is_none()) {
            let devices = d.devices();
            let groups = self.forbidden_groups(d);
            let rests = !d.space.has_shut() && !d.space.is_crowded() && !self.has_left_closed(d, &groups);
            if groups.is_empty() && rests {
                moves.0.remove(&d.id);
                continue;
            }
            let now = Instant::now();
            let (last, due, pause) = moves.0.get(&d.id).copied().unwrap_or((devices, now, AGAIN));
            if self.owes(d) || last == devices && due > now {
                continue;
            }
            let before = self.elsewhere(d);
            if let Err(e) = self.move_groups(d, groups, &|_| !stop())
                && !matches!(e, Error::Stopped | Error::ReadOnly)
            {
                // a domain that fails says so itself
                tracing::warn!("{}: what its tenant has on other devices does not move: {e}", d.id);
            }
            let pause = if self.elsewhere(d) == before { (pause * 2).min(AGAIN_MAX) } else { AGAIN };
            moves.0.insert(d.id, (devices, Instant::now() + pause, pause));
        }
    }

    /// Headers name no device of a number that a later one will have, of a volume that has `devices` now.
    ///
    /// # Errors
    /// Of the device.
    pub(super) fn forget_devices(&self, devices: usize) -> Result<()> {
        let _one = self.tenants.lock();
        for d in self.domains.iter().filter(|d| d.failed().is_none()) {
            let Some(mut b) = d.binding() else { continue };
            let within = b.devices.within(devices).unwrap_or(DeviceSet::ALL);
            if within != b.devices {
                b.devices = within;
                d.bind(Some(&b))?;
                let bat = self.bat.lock();
                self.set_devices(&bat, d, within);
            }
        }
        Ok(())
    }
}
