//! A device leaves a volume that is in use: the last one, whose block groups are the last.
//!
//! It is a volume that becomes smaller by all of them (`super::shrink`): they are emptied and given up, then the superblock of
//! device 0 counts one device less, durably, then the others, and at last the superblock on the device itself is wiped. A
//! crash leaves the old volume, some of whose groups are nobody's, or the new one.

use super::add_device::{DeviceChange, without_last};
use super::emptying::NUMBERS;
use super::{MountedVolume, Volume};
use crate::error::{Error, Result};
use braidfs_format::super_block::SuperBlock;

impl Volume {
    /// Moves all that lies on the volume's last device, whose number is `device`, to the others, and removes it, while the
    /// volume is in use. `progress` is told how many block groups have gone, and of how many, and says whether to go on. Nobody
    /// takes the device for one of the volume afterwards, and it is closed. As for [`Self::shrink`]: not for a front end that
    /// holds accepted writes back.
    ///
    /// # Errors
    /// [`Error::ReadOnly`]; [`Error::Size`] where it is not the last one, is elsewhere ([`braidfs_device::Device::remote`]), or a
    /// tenant may use no other one, or something cannot leave it: inodes whose numbers
    /// are there ([`Self::drain_device`] says which), journals, blocks with a fixed place; [`Error::Stopped`] by `progress`;
    /// [`Error::Busy`]; of a device. The volume has the device still, but for an error of the superblock that counts: then the
    /// next mount finds out.
    pub fn remove_device(&self, device: usize, progress: &dyn Fn(u64, u64) -> bool) -> Result<DeviceChange> {
        if self.read_only() {
            return Err(Error::ReadOnly);
        }
        let i = self.mounted();
        if device < i.store.devices() && i.store.is_elsewhere(device) {
            let why =
                "a device that is elsewhere stays: the volume has its lease, and its connection, until it is unmounted";
            return Err(Error::Size(why.into()));
        }
        let last_leaves = |old: &SuperBlock| {
            check_is_last(old, device)?;
            // the table of groups is locked: no tenant gets other devices until this is done
            i.check_is_spared(device)?;
            without_last(old)
        };
        let inodes = || i.inodes_of(device).map_or(0, |n| n);
        let (old, sb) = i.become_smaller(last_leaves, progress).map_err(|e| match e {
            Error::Size(why) if why.contains(NUMBERS) => Error::Size(why.replace(NUMBERS, &numbers(inodes()))),
            e => e,
        })?;
        if let Err(e) = i.forget_devices(device) {
            tracing::warn!("tenants are still said to use device {device}, until the next mount: {e}");
        }
        Ok(DeviceChange::of(&old, &sb))
    }

    /// Number of the device with this UUID, if the volume has it.
    pub fn device_number(&self, uuid: &[u8; 16]) -> Option<usize> {
        self.super_block().device_table().iter().position(|d| d.uuid == *uuid)
    }
}

fn numbers(inodes: u64) -> String {
    format!(
        "{inodes} files and directories (or parts of large ones) have their numbers there: drain it first, which says where they are"
    )
}

/// Refuses a device that cannot leave, since others have later block groups.
fn check_is_last(sb: &SuperBlock, device: usize) -> Result<()> {
    let last = sb.device_table().len() - 1;
    if device == last {
        return Ok(());
    }
    if device > last {
        return Err(Error::Size(format!("the volume has no device {device}: it has {}", last + 1)));
    }
    Err(Error::Size(format!(
        "only the last device can be removed, since block groups are numbered from device to device: that is device {last} ({})",
        uuid::Uuid::from_bytes(sb.device[last].uuid)
    )))
}

impl MountedVolume {
    /// Nodes in use that have their numbers on a device.
    pub(super) fn inodes_of(&self, device: usize) -> Result<u64> {
        let mut all = 0;
        for g in self.groups_of_device(device) {
            if let Some(d) = self.siblings.owner_of(g).map(|id| self.dom(id)) {
                d.nodes.for_each_used_of(g, &mut |_, _| {
                    all += 1;
                    Ok(())
                })?;
            }
        }
        Ok(all)
    }
}
