//! One more domain for a volume in use.
//!
//! The block group allocation table counts: a domain is there once its first group is its own, and that is one write of a
//! shadow pair. Before it comes all that a mount would read: the domain's header, a blank journal, the group's tables. So a
//! crash leaves a group that is nobody's and a header that nobody reads, or the domain. The superblocks tell the number of
//! domains afterwards: who finds the table short of a domain that they tell of knows that a claim was lost.

use super::claim::Unmade;
use super::groups::Bat;
use super::mount::open_domain;
use super::{MountedVolume, Volume};
use crate::device_set::DeviceSet;
use crate::domain::peers::Peers;
use crate::error::{Error, Result};
use crate::planted::{self, Bug};
use crate::space::Space;
use crate::types::DomainId;
use braidfs_device::BLOCK_BYTES;
use braidfs_format::BlockAddr;
use braidfs_format::bat::BatEntry;
use braidfs_format::domain::{CLEAN, DomainHeader};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// `seq` of a header that is written for the first time.
const FIRST_SEQ: u64 = 1;
/// How often a group is emptied for a domain.
const ATTEMPTS: usize = 4;
/// Blocks of a journal that are zeroed at a time.
const ZERO_BLOCKS: u32 = 256;

impl Volume {
    /// Adds a domain while the volume is in use; durable, and there for everybody, when this returns. It has a group of its
    /// own and a journal as long as the first domain's, and placement gives it new inodes as any other.
    ///
    /// # Errors
    /// [`Error::ReadOnly`]; [`Error::Busy`] where the volume's tables have no room for one more, or groups are being emptied for
    /// something else; [`Error::NoSpace`] where no domain can spare a whole group, nor empty one (those that could not be emptied
    /// in the last five seconds are not tried again); of a device.
    pub fn add_domain(&self) -> Result<DomainId> {
        self.mounted().add_domain(0, DeviceSet::ALL)
    }
}

impl MountedVolume {
    /// [`Volume::add_domain`], with these `tenant_flags` in its header, its journal on one of `devices`. The caller is inside
    /// no gate and holds no lock.
    pub(crate) fn add_domain(&self, tenant_flags: u32, devices: DeviceSet) -> Result<DomainId> {
        // another may take what was emptied
        for _ in 0..ATTEMPTS {
            match self.try_add_domain(tenant_flags, devices) {
                Err(Error::NoSpace) if self.relocate_for_new_domain(devices)? => {}
                done => return done,
            }
        }
        self.try_add_domain(tenant_flags, devices)
    }

    /// [`Self::add_domain`] where a group is nobody's, or holds nothing.
    fn try_add_domain(&self, tenant_flags: u32, devices: DeviceSet) -> Result<DomainId> {
        // no group is claimed, given back or trimmed meanwhile, and no other domain is added
        let mut bat = self.bat.lock();
        if self.shared.read_only.load(Ordering::Relaxed) || self.shared.closing.load(Ordering::Relaxed) {
            return Err(Error::ReadOnly);
        }
        self.shared.check_alive()?;
        let number = self.domains.len();
        if number >= self.domains.room() {
            return Err(Error::Busy(format!("the volume has {number} domains: its tables have room for no more")));
        }
        let id = DomainId(number as u16);
        // An attempt before this one may have come so far, and have failed behind it: with a group on a device that this one may not
        // use, perhaps.
        let not = self.unclaimable(devices);
        let end = bat.claim_end() as u32;
        self.free_half_made(&mut bat, |g| g >= end || not.iter().any(|groups| groups.contains(&g)))?;
        if bat.groups_of(id).is_empty() {
            self.make_domain(&mut bat, id, tenant_flags, devices)?;
        }
        let sb = *self.sb.read();
        let peers: Arc<dyn Peers> = self.siblings.clone();
        let (d, _) = open_domain(&sb, &self.store, &self.shared, &peers, &bat, id)?;
        // also where the header is that of an attempt for something else
        d.mark_added(tenant_flags)?;
        self.siblings.add(&d);
        let groups = d.space.groups();
        // whoever is given the domain for an inode finds whose its group is
        let own = || groups.into_iter().for_each(|g| self.siblings.set_owner(g, Some(id)));
        if !self.domains.push(d, own) {
            unreachable!("{id} is not the next one"); // the table is locked
        }
        self.count_unclaimed_in(&bat);
        self.tell_domains()?;
        tracing::info!("{id} was added");
        Ok(id)
    }

    /// A group of a domain that was about to be added when something failed is nobody's again, durably, where `which` says so.
    pub(super) fn free_half_made(&self, bat: &mut Bat, which: impl Fn(u32) -> bool) -> Result<()> {
        let id = DomainId(self.domains.len() as u16);
        for g in bat.groups_of(id).into_iter().filter(|g| which(*g)) {
            bat.set_free(&**self.store.device(0), g)?;
            self.count_unclaimed_in(bat);
        }
        Ok(())
    }

    /// The superblocks tell how many domains there are, durably: that of the first device, which counts, and those of the others as
    /// far as these can be written.
    pub(super) fn tell_domains(&self) -> Result<()> {
        let label = self.label.lock();
        self.sb.write().domains = (self.domains.len() as u16).into();
        let mut sb = *self.sb.read();
        (sb.label, sb.compat) = (*label, self.compat.load(Ordering::Relaxed).into());
        for n in 0..sb.device_table().len() {
            match self.write_supers_on(n, &sb) {
                Err(e) if n > 0 => {
                    tracing::warn!("{}: a superblock tells of fewer domains: {e}", self.store.device(n).name());
                }
                done => done?,
            }
        }
        Ok(())
    }

    /// All that a mount reads of a domain, durably.
    fn make_domain(&self, bat: &mut Bat, id: DomainId, tenant_flags: u32, devices: DeviceSet) -> Result<()> {
        let find = |bat: &mut Bat| self.whole_group(bat, devices);
        let make = |bat: &mut Bat, group, epoch| self.make_domain_in(bat, id, tenant_flags, (group, epoch));
        self.find_claimable(bat, find, make)?.map(drop).ok_or(Error::NoSpace)
    }

    /// [`Self::make_domain`] with its journal in this group, claimed with that epoch.
    fn make_domain_in(&self, bat: &mut Bat, id: DomainId, tenant_flags: u32, at: (u32, u32)) -> Result<(), Unmade> {
        let (store, sb, (group, epoch)) = (&self.store, *self.sb.read(), at);
        let geometry = store.geometry();
        let first = self.domains.iter().next().map_or(0, |d| d.journal.blocks() as u32);
        let (at, blocks) = (geometry.meta_blocks(), first.min(geometry.journal_max(store.group_blocks(group))));
        let start = geometry.group_start(group).0 + u64::from(at);

        let journal = || -> Result<()> {
            // what a file had there must not look like a chunk
            let zeros = vec![0; ZERO_BLOCKS as usize * BLOCK_BYTES];
            for done in (0..blocks).step_by(ZERO_BLOCKS as usize) {
                let n = (blocks - done).min(ZERO_BLOCKS) as usize;
                store.write(BlockAddr(start + u64::from(done)), &zeros[..n * BLOCK_BYTES])?;
            }
            Ok(store.flush_groups([group])?)
        };
        let header = || -> Result<()> {
            let mut h = DomainHeader::empty();
            h.domain = id.0.into();
            h.flags = CLEAN.into();
            h.tenant_flags = tenant_flags.into();
            h.journal_start = start.into();
            h.journal_blocks = blocks.into();
            let pair = sb.domain_table.get() + 2 * u64::from(id.0);
            let mut both = h.to_block(store.volume, pair, 0, FIRST_SEQ);
            // nothing that an attempt before this one wrote is the newer copy
            both.resize(2 * BLOCK_BYTES, 0);
            store.device(0).write(pair, &both)?;
            Ok(store.device(0).flush()?)
        };
        let tables = || -> Result<()> {
            Space::init_group(store, id, group, epoch, Some((at, blocks)))?;
            Ok(store.flush_groups([group])?)
        };
        let claim = || -> Result<(), Unmade> {
            // behind the header, so that whoever finds the group's header only may believe it
            tables().map_err(Unmade::Group)?;
            bat.set(&**store.device(0), group as usize, BatEntry { domain: Some(id), epoch }).map_err(Unmade::Volume)
        };
        journal().map_err(Unmade::Group)?;
        planted::in_order(Bug::DomainEarly, || header().map_err(Unmade::Volume), claim)
    }

    /// A group of these devices that is nobody's and as long as groups are; where there is none, one that a domain gives back.
    fn whole_group(&self, bat: &mut Bat, devices: DeviceSet) -> Result<Option<u32>> {
        let all = self.store.geometry().group_blocks();
        let not = self.unclaimable(devices);
        let whole = |bat: &Bat| {
            let free = (0u32..).zip(bat.claimable_but(&not)).filter(|(_, owner)| owner.is_none());
            free.map(|(g, _)| g).find(|g| self.store.group_blocks(*g) == all)
        };
        loop {
            if let Some(g) = whole(bat) {
                return Ok(Some(g));
            }
            if !self.give_back(bat, None, &not)? {
                return Ok(None);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MkfsOptions, MountOptions, mkfs};
    use braidfs_device::{Device, Effect, FaultDevice, MemDevice, Op, Rule};

    /// Two devices, the first group of a domain on the second one, and an error behind that.
    fn half_made() -> (Volume, [Arc<FaultDevice>; 2]) {
        let both = [1, 2].map(|seed| Arc::new(FaultDevice::new(Arc::new(MemDevice::new(64 << 8)), seed)));
        let devices: Vec<Arc<dyn Device>> = both.iter().map(|d| Arc::clone(d) as Arc<dyn Device>).collect();
        let how = MkfsOptions { domains: Some(1), group_bytes: Some(4 << 20), ..MkfsOptions::default() };
        mkfs::format(&devices, &how).unwrap();
        let v = Volume::mount(devices, MountOptions { background: false, ..MountOptions::default() }).unwrap();
        let second = DeviceSet::of([1]).unwrap();
        // all that it writes there is written before anything is read
        both[1].add(Rule::new(Op::Read, Effect::Fail(5)).times(1));
        assert!(v.mounted().add_domain(0, second).is_err());
        let groups = v.mounted().bat.lock().groups_of(DomainId(1));
        assert!(
            groups.len() == 1 && v.mounted().store.device_of(groups[0]) == Some(1),
            "{groups:?}: this test sees nothing"
        );
        (v, both)
    }

    #[test]
    fn what_is_left_of_a_domain_is_not_used_where_it_must_not_be() {
        let (v, _both) = half_made();
        let first = DeviceSet::of([0]).unwrap();
        let id = v.mounted().add_domain(0, first).unwrap();
        let i = v.mounted();
        let groups = i.bat.lock().groups_of(id);
        assert!(groups.iter().all(|g| i.store.device_of(*g) == Some(0)), "{groups:?}");
        assert_eq!(i.store.device_of(i.dom(id).journal_group()), Some(0));
        v.unmount().unwrap();
    }

    #[test]
    fn what_is_left_of_a_domain_keeps_no_device() {
        let (v, _both) = half_made();
        v.remove_device(1, &|_, _| true).unwrap();
        // nor is it in the way of the next one
        assert_eq!(v.add_domain().unwrap(), DomainId(1));
        v.unmount().unwrap();
    }
}
