//! Reading the superblocks of a volume's devices and putting the devices in order.
//!
//! A damaged superblock is read from its replica in the device's last block; nothing is written here (the next
//! superblock write or fsck mends the damaged one).

use crate::{Error, Result};
use braidfs_device::{BLOCK_BYTES, Device};
use braidfs_format::Corrupt;
use braidfs_format::super_block::SuperBlock;
use std::sync::Arc;

/// Reads the superblock of one device: block 0, else the replica in the last block.
///
/// # Errors
/// The error of block 0 where neither holds.
pub fn read_one(device: &Arc<dyn Device>) -> Result<SuperBlock> {
    if device.blocks() < 2 {
        return Err(Corrupt::new("superblock", format!("{}: too small to hold a volume", device.name())).into());
    }
    let first = read_at(device, 0);
    let Err(why) = first else { return first };
    let last = device.blocks() - 1;
    match read_at(device, last) {
        Ok(sb) => {
            tracing::warn!(device = %device.name(), block = last, error = %why, "superblock is bad, using its replica");
            Ok(sb)
        }
        Err(_) => Err(why),
    }
}

/// Decodes the superblock at `block` of `device`; errors name the device.
///
/// # Errors
/// Of the device, or where the block holds no superblock of this format.
pub fn read_at(device: &Arc<dyn Device>, block: u64) -> Result<SuperBlock> {
    let mut buf = vec![0u8; BLOCK_BYTES];
    device.read(block, &mut buf).map_err(Error::Io)?;
    SuperBlock::from_block(&buf, block)
        .map_err(|e| Corrupt::new(e.what, format!("{}: {}", device.name(), e.why)).into())
}

/// The superblock of the volume on `devices`, and these in the order of its device table.
///
/// # Errors
/// No volume, devices of different volumes, one given twice or missing, or one smaller than it was.
pub fn read_super(devices: &[Arc<dyn Device>]) -> Result<(SuperBlock, Vec<Arc<dyn Device>>)> {
    let bad = |why: String| Err(Corrupt::new("volume", why).into());
    let mut found: Vec<(SuperBlock, &Arc<dyn Device>)> = Vec::with_capacity(devices.len());
    for d in devices {
        found.push((read_one(d)?, d));
    }
    let Some(&(first, first_device)) = found.first() else {
        return bad("no device was given".into());
    };
    let mut order: Vec<Option<Arc<dyn Device>>> = vec![None; first.device_table().len()];
    for (sb, d) in &found {
        if sb.uuid != first.uuid || sb.devices != first.devices {
            return bad(format!("{} and {} belong to different volumes", first_device.name(), d.name()));
        }
        match order.get_mut(usize::from(sb.this_device.get())) {
            Some(slot @ None) => *slot = Some(Arc::clone(d)),
            _ => return bad(format!("{} was given twice (device {})", d.name(), sb.this_device.get())),
        }
    }
    let total = order.len();
    let order: Vec<_> = order.into_iter().flatten().collect();
    if order.len() != total {
        return bad(format!("has {total} devices, {} were given: name all of them", order.len()));
    }
    // The tables are identical on all devices but for `this_device`; the one of device 0 is taken as the truth.
    let sb = found.iter().find(|(sb, _)| sb.this_device.get() == 0).map_or(first, |f| f.0);
    Ok((sb, order))
}
