//! Another size for a volume in use.
//!
//! A volume grows on its last device: the group space goes on there, and every other device keeps the numbers of its
//! groups. What is told by superblocks is true at any moment of a growth: first the group table has pairs for the new
//! groups, durably, then come the replicas, and the superblock of device 0, which counts, is the last. So a crash leaves
//! the old size or the new one, and the same call again goes on. Nobody uses a new group before the call is through.

use super::groups::Bat;
use super::{MountedVolume, Volume};
use crate::error::{Error, Result};
use crate::planted::{self, Bug};
use braidfs_device::{BLOCK_BYTES, Device};
use braidfs_format::bat::ENTRIES_PER_BLOCK;
use braidfs_format::super_block::SuperBlock;
use braidfs_store::super_io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// How often a growth is prepared where others change the volume's size meanwhile.
const ATTEMPTS: usize = 4;
/// Of superblocks: mkfs writes 1.
pub(super) const SEQ: u64 = 2;

/// How much of its last device a volume shall use, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NewSize {
    /// All that there is.
    Device,
    /// So much. An image file is extended, where it is shorter.
    Bytes(u64),
    /// So much more than now, likewise.
    More(u64),
}

/// What has become of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resized {
    /// Bytes of the device that were used before.
    pub before: u64,
    /// And are now.
    pub after: u64,
    /// Bytes of all devices of the volume.
    pub volume: u64,
    /// Block groups that the volume has now.
    pub groups: u32,
}

impl Volume {
    /// Makes a volume larger while it is in use: durable, and there for everybody, when this returns.
    ///
    /// # Errors
    /// [`Error::ReadOnly`]; [`Error::Size`] where the volume is larger than that already, the device is smaller, or the
    /// volume's tables have no room for it; [`Error::Busy`] where others change its size; of a device: the volume has its old
    /// size then.
    pub fn grow(&self, size: NewSize) -> Result<Resized> {
        let i = self.mounted();
        if self.read_only() {
            return Err(Error::ReadOnly);
        }
        i.shared.check_alive()?;
        for _ in 0..ATTEMPTS {
            let growth = i.prepare_growth(size)?;
            if let Some(done) = i.grow_to(&growth)? {
                return Ok(done);
            }
        }
        Err(Error::Busy("its size changes all the time: try again".into()))
    }
}

/// A larger size, for which the device has room.
struct Growth {
    device: Arc<dyn Device>,
    /// What the superblock says that the volume uses of it.
    before: u64,
    /// What it shall use.
    blocks: u64,
}

impl MountedVolume {
    /// Looks how large the volume can become, and has its last device as large as that. It may be elsewhere, and slow to answer:
    /// nothing is locked meanwhile.
    fn prepare_growth(&self, size: NewSize) -> Result<Growth> {
        let (old, last, device) = {
            // the last device may leave at any other moment
            let _bat = self.bat.lock();
            let old = *self.sb.read();
            let last = old.device_table().len() - 1;
            (old, last, Arc::clone(self.store.device(last)))
        };
        let before = old.device[last].blocks.get();
        let blocks = wanted(&*device, before, size)?;
        if blocks < before {
            return Err(Error::Size(format!(
                "that is no growth: the volume uses {} of {}",
                size_text(bytes(before)),
                device.name()
            )));
        }
        self.bat.lock().check_may_resize()?;
        self.with_more(&old, last, blocks)?;
        if blocks > before {
            extend(&*device, blocks)?;
        }
        Ok(Growth { device, before, blocks })
    }

    /// `old` with `blocks` blocks of device `last`, where this mount can have that.
    fn with_more(&self, old: &SuperBlock, last: usize, blocks: u64) -> Result<SuperBlock> {
        let sb = with_blocks(old, last, blocks, false)?;
        if sb.groups.get() as usize > self.siblings.room() {
            return Err(Error::Size("that is too much for one mount: mount it again between two sizes".into()));
        }
        Ok(sb)
    }

    /// `None` where the volume has changed since the growth was prepared.
    fn grow_to(&self, growth: &Growth) -> Result<Option<Resized>> {
        let Growth { device, before, blocks } = growth;
        let i = self;
        // no group is claimed, given back or trimmed meanwhile
        let mut bat = i.bat.lock();
        if i.shared.read_only.load(Ordering::SeqCst) {
            return Err(Error::ReadOnly); // a remount was faster
        }
        bat.check_may_resize()?;
        let old = *i.sb.read();
        let last = old.device_table().len() - 1;
        let same = Arc::ptr_eq(i.store.device(last), device) && old.device[last].blocks.get() == *before;
        // who made it smaller in between may have cut an image file off
        if !same || blocks > before && device.blocks() < *blocks {
            return Ok(None);
        }
        let mut sb = i.with_more(&old, last, *blocks)?;
        if blocks > before {
            let supers = i.label.lock();
            i.take_over(&mut sb, &supers);
            planted::in_order(
                Bug::SizeEarly,
                || bat.extend(&**i.store.device(0), sb.groups.get() as usize),
                || i.write_new_size(&sb, None),
            )?;
            *i.sb.write() = sb;
            drop(supers);
            i.store.resize(&sb);
            bat.resize(sb.groups.get() as usize);
            i.note_drained(&mut bat);
            i.count_unclaimed_in(&bat);
            tracing::info!(
                from = bytes(*before),
                to = bytes(*blocks),
                groups = sb.groups.get(),
                "the volume has grown"
            );
        }
        Ok(Some(resized(&old, &sb, last)))
    }
}

/// What has become of `old`, of which device `last` has changed.
pub(super) fn resized(old: &SuperBlock, new: &SuperBlock, last: usize) -> Resized {
    let of = |sb: &SuperBlock| bytes(sb.device[last].blocks.get());
    let volume = new.device_table().iter().map(|d| bytes(d.blocks.get())).sum();
    Resized { before: of(old), after: of(new), volume, groups: new.groups.get() }
}

/// So many groups a volume can have: its group table has room for them, and no more than mkfs leaves room for is believed of
/// what an image says, since memory is taken for them.
pub(super) fn most_groups(sb: &SuperBlock) -> u64 {
    let room = u64::from(sb.bat_pairs.get()) * u64::from(ENTRIES_PER_BLOCK);
    room.min(u64::from(sb.groups.get()).saturating_mul(4).max(1 << 20))
}

/// `13012992 bytes (12.4 MiB)`: exact for who types it, and readable.
pub(super) fn size_text(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    match (0..UNITS.len()).rev().find(|&u| bytes >> (10 * (u + 1)) > 0) {
        Some(unit) => {
            let scaled = bytes as f64 / (1u64 << (10 * (unit + 1))) as f64;
            format!("{bytes} bytes ({scaled:.1} {})", UNITS[unit])
        }
        None => format!("{bytes} bytes"),
    }
}

pub(super) fn bytes(blocks: u64) -> u64 {
    blocks.saturating_mul(BLOCK_BYTES as u64)
}

/// Blocks of `device` that the volume shall use, of which it uses `now`.
fn wanted(device: &dyn Device, now: u64, size: NewSize) -> Result<u64> {
    let block = BLOCK_BYTES as u64;
    match size {
        NewSize::Device => Ok(device.grown()?),
        NewSize::Bytes(n) => Ok(n / block),
        NewSize::More(n) => now.checked_add(n / block).ok_or(Error::Size("that is too much".into())),
    }
}

/// `old` with `blocks` blocks of device `last`; of a volume that becomes smaller whole groups only.
pub(super) fn with_blocks(old: &SuperBlock, last: usize, blocks: u64, smaller: bool) -> Result<SuperBlock> {
    let mut sb = *old;
    let (geometry, entry) = (old.geometry()?, &mut sb.device[last]);
    if blocks >= 1 << 48 {
        return Err(Error::Size("a device must be smaller than 1 EiB".into()));
    }
    // the last block is the superblock's replica
    let usable = blocks.saturating_sub(entry.data_start.get() + 1);
    let (groups, last_blocks) = match smaller {
        true => (usable / u64::from(geometry.group_blocks()), geometry.group_blocks()),
        false => geometry.groups_on(usable),
    };
    if groups == 0 {
        let least = size_text(bytes(entry.data_start.get() + u64::from(geometry.group_blocks()) + 1));
        return Err(Error::Size(format!("too small for a block group: the least size is {least}")));
    }
    let room = most_groups(old);
    let all = u64::from(entry.first_group.get()) + groups;
    let all = u32::try_from(all).ok().filter(|n| u64::from(*n) <= room).ok_or_else(|| {
        let here = (room - u64::from(entry.first_group.get())) * u64::from(geometry.group_blocks());
        let most = size_text(bytes(entry.data_start.get() + here + 1));
        Error::Size(format!("its group table has room for {room} groups: this device can have {most} at most"))
    })?;
    entry.blocks = blocks.into();
    entry.groups = (all - entry.first_group.get()).into();
    entry.last_group_blocks = last_blocks.into();
    sb.groups = all.into();
    // what is about to be written must be accepted when it is read (a bug of ours otherwise)
    SuperBlock::from_block(&sb.to_block(last as u16, 0, SEQ), 0)?;
    Ok(sb)
}

/// Sees to it that the device has so many blocks.
fn extend(device: &dyn Device, blocks: u64) -> Result<()> {
    device.extend(blocks).map_err(|e| match e.kind() {
        std::io::ErrorKind::Unsupported => {
            Error::Size(format!("{} has {} only", device.name(), size_text(bytes(device.blocks()))))
        }
        _ => Error::Io(e),
    })
}

impl MountedVolume {
    /// Writes the superblocks of a volume that has grown, durably: the one that counts last. `new`: its last device, where it
    /// has not had that. The caller holds the lock of the label.
    pub(super) fn write_new_size(&self, sb: &SuperBlock, new: Option<&Arc<dyn Device>>) -> Result<()> {
        let known = self.store.devices();
        let device = |n: usize| new.filter(|_| n >= known).unwrap_or_else(|| self.store.device(n));
        let write = |n: usize, addr: u64| device(n).write(addr, &sb.to_block(n as u16, addr, SEQ)).map_err(Error::Io);
        let devices = || sb.device_table().iter().enumerate().rev();
        let counting = || -> Result<()> {
            write(0, 0)?;
            Ok(device(0).flush()?)
        };
        let others = || -> Result<()> {
            devices().try_for_each(|(n, entry)| write(n, entry.blocks.get() - 1))?;
            devices().try_for_each(|(n, _)| device(n).flush()).map_err(Error::Io)?;
            for (n, _) in devices().filter(|(n, _)| *n > 0) {
                write(n, 0)?;
                device(n).flush()?;
            }
            Ok(())
        };
        planted::in_order(Bug::DeviceEarly, others, counting)
    }

    /// Has superblocks tell of the volume's size that a crash left with another one; durably. Those are the copies that do not
    /// count.
    pub(super) fn tell_size(&self) -> Result<()> {
        let supers = self.label.lock();
        let mut sb = *self.sb.read();
        self.take_over(&mut sb, &supers);
        for (n, entry) in sb.device_table().iter().enumerate() {
            let device = self.store.device(n);
            for addr in [entry.blocks.get() - 1, 0] {
                let other = |s: SuperBlock| (s.devices, s.groups) != (sb.devices, sb.groups);
                // a copy that does not hold is told of by a check
                if super_io::read_at(device, addr).is_ok_and(other) {
                    device.write(addr, &sb.to_block(n as u16, addr, SEQ))?;
                    device.flush()?;
                }
            }
        }
        Ok(())
    }
}

/// The group table of a volume that changes its size.
impl Bat {
    /// # Errors
    /// [`Error::Busy`] where it is changing, or it is not known which size the device tells of.
    pub(super) fn check_may_resize(&self) -> Result<()> {
        if self.is_shrinking() {
            return Err(Error::Busy("the volume is being made smaller".into()));
        }
        if self.is_doubtful() {
            return Err(Error::Busy("a device failed while the volume was made smaller: unmount it first".into()));
        }
        Ok(())
    }

    /// Has pairs for `groups` groups on the device, durably: what a pair says that is there already stays, so that the
    /// epochs of groups go on which the volume had once before.
    ///
    /// # Errors
    /// Of the device.
    pub(super) fn extend(&mut self, device: &dyn Device, groups: usize) -> Result<()> {
        self.free_behind_end(device)?;
        let before = self.room();
        let mut add = || -> Result<()> {
            while self.room() < groups {
                self.add_pair(device)?;
            }
            Ok(device.flush()?)
        };
        // pairs that may not be there are written again by the next attempt
        add().inspect_err(|_| self.forget_pairs(before))
    }
}

#[cfg(test)]
mod tests;
