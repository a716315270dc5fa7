//! What lies on each device of a volume, and whose, for who looks.

use super::drain::drained_of;
use super::{MountedVolume, Volume};
use crate::types::DomainId;
use braidfs_format::BLOCK_BYTES;
use std::collections::BTreeMap;

/// A device, and what lies on it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceUse {
    /// Its number, from 0.
    pub device: u16,
    /// A path or a URI.
    pub name: String,
    /// Bytes of data and metadata that can lie on it; not those of the tables of block groups.
    pub bytes: u64,
    /// Of these, unused ones: of no domain, or of the domain of the group.
    pub free: u64,
    /// Block groups.
    pub groups: u32,
    /// Of these, nobody's.
    pub unclaimed: u32,
    /// Nothing new comes to lie on it ([`Volume::drain_device`]).
    pub drained: bool,
    /// Calls of it that failed since the mount.
    pub errors: u64,
    /// Domains that have block groups on it, by their numbers, with the bytes that are used in these; a journal is among them.
    pub domains: Vec<(DomainId, u64)>,
}

impl Volume {
    /// The devices, with what lies on them now.
    pub fn device_uses(&self) -> Vec<DeviceUse> {
        let i = self.mounted();
        let drained = drained_of(&self.super_block());
        (0..i.store.devices()).map(|n| DeviceUse { drained: drained == Some(n), ..i.device_use(n) }).collect()
    }
}

impl MountedVolume {
    fn device_use(&self, device: usize) -> DeviceUse {
        let meta = u64::from(self.store.geometry().meta_blocks());
        let (mut blocks, mut used, mut groups, mut unclaimed) = (0, 0, 0, 0);
        let mut domains: BTreeMap<DomainId, u64> = BTreeMap::new();
        for g in self.groups_of_device(device) {
            groups += 1;
            blocks += u64::from(self.store.group_blocks(g)).saturating_sub(meta);
            let Some(id) = self.siblings.owner_of(g) else {
                unclaimed += 1;
                continue;
            };
            let here = self.dom(id).space.used_in(g);
            used += here;
            *domains.entry(id).or_default() += here * BLOCK_BYTES as u64;
        }
        DeviceUse {
            device: device as u16,
            name: self.store.device(device).name(),
            bytes: blocks * BLOCK_BYTES as u64,
            free: blocks.saturating_sub(used) * BLOCK_BYTES as u64,
            groups,
            unclaimed,
            drained: false,
            errors: self.store.errors_of(device),
            domains: domains.into_iter().collect(),
        }
    }
}
