//! One more device for a volume in use.
//!
//! Its groups come behind all others: the group space goes on there, as it does on the last device of a volume that grows
//! (`super::resize`), and the order of writes is the same. First the group table has pairs for the new groups, durably; then
//! come the replicas and the new device's own superblock; the superblock of device 0, which counts, is the last. A crash
//! leaves the old volume, of which the new device is no part whatever its own superblock says, or the new one.

use super::Volume;
use super::resize::{bytes, most_groups, size_text};
use super::trim::discard_device;
use crate::error::{Error, Result};
use crate::planted::{self, Bug};
use braidfs_device::Device;
use braidfs_format::super_block::{DRAINED, DeviceEntry, MAX_DEVICES, SuperBlock};
use braidfs_store::super_io;
use std::sync::Arc;

/// Space that came, or went, with a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceChange {
    /// Number of the device.
    pub device: u16,
    /// UUID of the device.
    pub uuid: [u8; 16],
    /// Bytes of it that the volume uses, or used.
    pub bytes: u64,
    /// Its block groups.
    pub groups: u32,
    /// Bytes of all devices of the volume, as it is now.
    pub volume: u64,
    /// Block groups that the volume has now.
    pub volume_groups: u32,
}

impl DeviceChange {
    /// Of the last device of `with`; `now` is the volume.
    pub(super) fn of(with: &SuperBlock, now: &SuperBlock) -> Self {
        let last = with.device_table().len() - 1;
        let d = &with.device[last];
        Self {
            device: last as u16,
            uuid: d.uuid,
            bytes: bytes(d.blocks.get()),
            groups: d.groups.get(),
            volume: now.device_table().iter().map(|d| bytes(d.blocks.get())).sum(),
            volume_groups: now.groups.get(),
        }
    }
}

impl Volume {
    /// Adds a device while the volume is in use: durable, and its space there for everybody, when this returns. All of it is
    /// used. The next mount needs it, too. Whatever lies on it is lost: nothing is checked for old content but whether it is a
    /// device of this volume; the command does that. With `blank` it is discarded first, where it can be.
    ///
    /// # Errors
    /// [`Error::ReadOnly`]; [`Error::Size`] where it is too small, one of the volume's, or elsewhere ([`Device::remote`]), or the
    /// volume's tables have no room for it; [`Error::Busy`]; of a device: the volume is without it then, as long as it is
    /// mounted. A mount afterwards finds
    /// out which of both is true, where the new device is named, too.
    pub fn add_device(&self, device: Arc<dyn Device>, blank: bool) -> Result<DeviceChange> {
        let i = self.mounted();
        i.forget_devices(i.store.devices())?;
        let may = || {
            if self.read_only() {
                return Err(Error::ReadOnly);
            }
            i.shared.check_alive()?;
            Ok(())
        };
        may()?;
        if device.remote().is_some() {
            let why = "a device that is elsewhere belongs to a volume from mkfs on, as its lease is taken at the mount";
            return Err(Error::Size(why.into()));
        }
        // before anything is written there: what can be refused is
        with_device(&i.sb.read(), &device)?;
        if blank {
            discard_device(&*device, device.blocks());
        }
        // no group is claimed, given back or trimmed meanwhile
        let mut bat = i.bat.lock();
        may()?; // a remount was faster
        bat.check_may_resize()?;
        let old = *i.sb.read();
        let mut sb = with_device(&old, &device)?;
        if sb.groups.get() as usize > i.siblings.room() || !i.store.has_seat() {
            return Err(Error::Size("that is too much for one mount: mount the volume again before it".into()));
        }
        let supers = i.label.lock();
        i.take_over(&mut sb, &supers);
        planted::in_order(
            Bug::SizeEarly,
            || bat.extend(&**i.store.device(0), sb.groups.get() as usize),
            || i.write_new_size(&sb, Some(&device)),
        )?;
        *i.sb.write() = sb;
        let name = device.name();
        if !i.store.add_device(device, &sb) {
            unreachable!("there was room for it"); // the table is locked
        }
        drop(supers);
        bat.resize(sb.groups.get() as usize);
        i.note_drained(&mut bat);
        i.count_unclaimed_in(&bat);
        tracing::info!(device = %name, groups = sb.groups.get(), "a device was added");
        Ok(DeviceChange::of(&sb, &sb))
    }
}

/// `old` with all of `device` as its last one.
fn with_device(old: &SuperBlock, device: &Arc<dyn Device>) -> Result<SuperBlock> {
    let (geometry, number) = (old.geometry()?, old.device_table().len());
    if let Ok(own) = super_io::read_one(device)
        && super_io::names(old, &own)
    {
        return Err(Error::Size(format!("{} is a device of the volume already", device.name())));
    }
    if number >= MAX_DEVICES {
        return Err(Error::Size(format!("the volume has {number} devices: it can have no more")));
    }
    let blocks = device.blocks();
    if blocks >= 1 << 48 {
        return Err(Error::Size("a device must be smaller than 1 EiB".into()));
    }
    let (start, uuid) = (DeviceEntry::groups_from(blocks, 0), *uuid::Uuid::new_v4().as_bytes());
    let entry = DeviceEntry::lay_out(uuid, blocks, 0, old.groups.get(), geometry).ok_or_else(|| {
        let least = size_text(bytes(start + u64::from(geometry.least_group()) + 1));
        let has = size_text(bytes(blocks));
        Error::Size(format!(
            "{} has {has}, too few for a block group of this volume: the least size is {least}",
            device.name()
        ))
    })?;
    let mut sb = not_drained_alone(old);
    let (room, all) = (most_groups(old), u64::from(old.groups.get()) + u64::from(entry.groups.get()));
    let all = u32::try_from(all).ok().filter(|n| u64::from(*n) <= room).ok_or_else(|| {
        let left = room.saturating_sub(u64::from(old.groups.get())) * u64::from(geometry.group_blocks());
        Error::Size(format!(
            "the volume's group table has room for {room} groups: a device more can have {} at most",
            size_text(if left == 0 { 0 } else { bytes(start + left + 1) })
        ))
    })?;
    sb.devices = (number as u16 + 1).into();
    sb.groups = all.into();
    sb.device[number] = entry;
    // what is about to be written must be accepted when it is read (a bug of ours otherwise)
    SuperBlock::from_block(&sb.to_block(number as u16, 0, super::resize::SEQ), 0)?;
    Ok(sb)
}

/// `old` without its last device.
pub(super) fn without_last(old: &SuperBlock) -> Result<SuperBlock> {
    let mut sb = *old;
    let last = old.device_table().len() - 1;
    if last == 0 {
        return Err(Error::Size("it is the volume's only device".into()));
    }
    sb.devices = (last as u16).into();
    sb.groups = old.device[last].first_group;
    sb.device[last] = DeviceEntry::empty();
    sb = not_drained_alone(&sb);
    SuperBlock::from_block(&sb.to_block(0, 0, super::resize::SEQ), 0)?;
    Ok(sb)
}

/// A volume's only device is not drained, nor is it when another one comes: what lies there could go nowhere.
fn not_drained_alone(sb: &SuperBlock) -> SuperBlock {
    let mut sb = *sb;
    if sb.device_table().len() == 1 {
        sb.device[0].flags = (sb.device[0].flags.get() & !DRAINED).into();
    }
    sb
}
