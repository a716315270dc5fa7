//! Reading the superblocks of a volume's devices and putting the devices in order.
//!
//! A damaged superblock is read from its replica in the device's last block; nothing is written here (the next
//! superblock write or fsck mends the damaged one).

use crate::{Error, Result};
use braidfs_device::{BLOCK_BYTES, Device};
use braidfs_format::Corrupt;
use braidfs_format::super_block::{NO_MAGIC, SuperBlock};
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
            let (name, why) = (device.name(), why_alone(&why, &device.name()));
            tracing::warn!(
                "the superblock at block 0 of {name} does not hold ({why}), its replica at block {last} does: repair with \
                 `braidfs fsck -p {name}`"
            );
            Ok(sb)
        }
        Err(_) => Err(match why {
            Error::Corrupt(c) if c.why.ends_with(NO_MAGIC) => {
                Corrupt::new(c.what, format!("{}: this is not a braidfs volume", c.why)).into()
            }
            why => why,
        }),
    }
}

/// Why a superblock does not hold, for who names the device before: [`read_at`] names it, too.
pub fn why_alone(e: &Error, device: &str) -> String {
    let Error::Corrupt(c) = e else { return e.to_string() };
    c.why.strip_prefix(device).and_then(|why| why.strip_prefix(": ")).unwrap_or(&c.why).to_owned()
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
/// That of device 0 counts. A device that it does not name, though its own superblock tells of the volume, is left out: a crash
/// came while it was being added, or removed.
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
    if let Some((_, d)) = found.iter().find(|(sb, _)| sb.uuid != first.uuid) {
        return bad(format!("{} and {} belong to different volumes", first_device.name(), d.name()));
    }
    let sb = found.iter().find(|(sb, _)| sb.this_device.get() == 0).map_or(first, |f| f.0);
    let mut order: Vec<Option<Arc<dyn Device>>> = vec![None; sb.device_table().len()];
    for (own, d) in &found {
        if !names(&sb, own) {
            tracing::warn!(
                "{} is none of the volume's {} devices and left out: it was being added or removed when the volume stopped",
                d.name(),
                order.len()
            );
            continue;
        }
        match order.get_mut(usize::from(own.this_device.get())) {
            Some(slot @ None) => *slot = Some(Arc::clone(d)),
            _ => return bad(format!("{} was given twice (device {})", d.name(), own.this_device.get())),
        }
    }
    let missing = (0..).zip(&order).filter(|(_, d)| d.is_none()).map(|(i, _)| what(&sb, i)).collect::<Vec<_>>();
    if !missing.is_empty() {
        let (total, given) = (order.len(), order.len() - missing.len());
        let missing = missing.join(", ");
        return bad(format!("has {total} devices, {given} were given: name all of them; missing: {missing}"));
    }
    Ok((sb, order.into_iter().flatten().collect()))
}

/// Whether `sb`, which counts, names the device whose own superblock is `own`.
pub fn names(sb: &SuperBlock, own: &SuperBlock) -> bool {
    let entry = |of: &SuperBlock| of.device_table().get(usize::from(own.this_device.get())).map(|d| d.uuid);
    sb.uuid == own.uuid && entry(sb).is_some() && entry(sb) == entry(own)
}

/// Device `i`, by what its superblock tells of it.
fn what(sb: &SuperBlock, i: usize) -> String {
    let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
    let entry = &sb.device[i];
    let parts = [0..4, 4..6, 6..8, 8..10, 10..16].map(|r| hex(&entry.uuid[r])).join("-");
    let mib = entry.blocks.get().saturating_mul(BLOCK_BYTES as u64) >> 20;
    format!("device {i} (UUID {parts}, {mib} MiB; `braidfs probe DEVICE` tells a device's)")
}
