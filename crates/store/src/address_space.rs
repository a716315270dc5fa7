//! Which block of the group space lies where on which device.

use crate::{Error, Result};
use braidfs_device::{BLOCK_BYTES, Device, SharedFlushes, WriteOp};
use braidfs_format::super_block::{DeviceEntry, SuperBlock};
use braidfs_format::{BlockAddr, Corrupt, Geometry};
use braidfs_sync::phases::{self, Phase};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// The devices of a volume behind one address space. Cheap to share; its only state is how large the volume is.
#[derive(Debug)]
pub struct Store {
    devices: Vec<Arc<dyn Device>>,
    map: Vec<Span>,
    /// As the volume was when it was opened.
    opened: Geometry,
    /// Groups that it has now. Written after the end of the last device, and read before it.
    groups: AtomicU32,
    /// Low half of the UUID.
    pub volume: u32,
}

/// The groups of a device.
#[derive(Debug)]
struct Span {
    /// First block in the group space.
    first: u64,
    /// One past the last usable block. Changes of the last device only.
    end: AtomicU64,
    /// Device block of the first one.
    start: u64,
}

impl Span {
    fn end(&self) -> u64 {
        self.end.load(Ordering::Acquire)
    }
}

/// One past the last usable block of a device, in the group space.
fn end_of(d: &DeviceEntry, g: Geometry) -> u64 {
    let first = u64::from(d.first_group.get()) * u64::from(g.group_blocks());
    first + u64::from(d.groups.get() - 1) * u64::from(g.group_blocks()) + u64::from(d.last_group_blocks.get())
}

impl Store {
    /// `devices` in the order of the superblock's device table.
    ///
    /// # Errors
    /// Where a device is missing or smaller than the superblock says.
    pub fn new(devices: Vec<Arc<dyn Device>>, sb: &SuperBlock) -> Result<Self> {
        let geometry = sb.geometry()?;
        let table = sb.device_table();
        if table.len() != devices.len() {
            return Err(Corrupt::new(
                "volume",
                format!("has {} devices, {} were given: name all of them", table.len(), devices.len()),
            )
            .into());
        }
        let mut map = Vec::new();
        for (d, dev) in table.iter().zip(&devices) {
            if dev.blocks() < d.blocks.get() {
                let why = format!(
                    "{} has {} blocks, the volume needs {}: it was truncated",
                    dev.name(),
                    dev.blocks(),
                    d.blocks.get()
                );
                return Err(Corrupt::new("volume", why).into());
            }
            let first = u64::from(d.first_group.get()) * u64::from(geometry.group_blocks());
            map.push(Span { first, end: AtomicU64::new(end_of(d, geometry)), start: d.data_start.get() });
        }
        // one flush for all domains that wait at the same time
        let devices = devices.into_iter().map(SharedFlushes::of).collect();
        let groups = AtomicU32::new(geometry.groups);
        Ok(Self { devices, map, opened: geometry, groups, volume: sb.volume_id() })
    }

    /// Sizes of the volume, as they are now: of two calls the later one may tell of more groups.
    #[inline]
    pub fn geometry(&self) -> Geometry {
        Geometry { groups: self.groups.load(Ordering::Acquire), ..self.opened }
    }

    /// The volume has changed its size: its last device is as `sb` says from now on. Nobody uses a group that is not there
    /// before and afterwards.
    pub fn resize(&self, sb: &SuperBlock) {
        if let (Some(span), Some(d)) = (self.map.last(), sb.device_table().last()) {
            span.end.store(end_of(d, self.opened), Ordering::Release);
            self.groups.store(sb.groups.get(), Ordering::Release);
        }
    }

    /// The device that holds `addr .. addr + blocks` and the block there.
    ///
    /// # Errors
    /// [`Error::Corrupt`] where no device holds them.
    pub fn place(&self, addr: BlockAddr, blocks: u64) -> Result<(usize, u64)> {
        let i = self.map.partition_point(|m| m.first <= addr.0);
        if i > 0 {
            let m = &self.map[i - 1];
            if addr.0.checked_add(blocks).is_some_and(|e| e <= m.end()) {
                return Ok((i - 1, addr.0 - m.first + m.start));
            }
        }
        Err(Corrupt::new("block address", format!("{addr} + {blocks} lies outside the volume")).into())
    }

    /// Blocks of `group` (the last of a device may be short).
    pub fn group_blocks(&self, group: u32) -> u32 {
        let start = self.opened.group_start(group).0;
        let i = self.map.partition_point(|m| m.first <= start);
        let end = if i > 0 { self.map[i - 1].end() } else { start };
        end.saturating_sub(start).min(u64::from(self.opened.group_blocks())) as u32
    }

    /// Reads whole blocks; `buf` is a multiple of 4096 bytes.
    ///
    /// # Errors
    /// Of the device, or an address outside the volume.
    pub fn read(&self, addr: BlockAddr, buf: &mut [u8]) -> Result<()> {
        let (d, b) = self.place(addr, (buf.len() / BLOCK_BYTES) as u64)?;
        let _phase = phases::enter(Phase::Read);
        self.devices[d].read(b, buf).map_err(Error::Io)
    }

    /// Writes one run.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn write(&self, addr: BlockAddr, buf: &[u8]) -> Result<()> {
        let (d, b) = self.place(addr, (buf.len() / BLOCK_BYTES) as u64)?;
        let _phase = phases::enter(Phase::Write);
        self.devices[d].write(b, buf).map_err(Error::Io)
    }

    /// Writes all runs in parallel and waits for them.
    ///
    /// # Errors
    /// As [`Self::read`]; any of the writes may have happened.
    pub fn write_batch(&self, ops: &[(BlockAddr, Vec<&[u8]>)]) -> Result<()> {
        self.write_by(ops, |d, ops| d.write_batch(ops))
    }

    /// As [`Self::write_batch`], of who flushes right afterwards.
    ///
    /// # Errors
    /// As [`Self::write_batch`].
    pub fn write_batch_through(&self, ops: &[(BlockAddr, Vec<&[u8]>)]) -> Result<()> {
        self.write_by(ops, |d, ops| d.write_batch_through(ops))
    }

    fn write_by(
        &self,
        ops: &[(BlockAddr, Vec<&[u8]>)],
        write: impl Fn(&dyn Device, &[WriteOp<'_>]) -> std::io::Result<()>,
    ) -> Result<()> {
        let mut per: Vec<Vec<WriteOp<'_>>> = vec![Vec::new(); self.devices.len()];
        for (addr, bufs) in ops {
            let blocks = bufs.iter().map(|b| b.len()).sum::<usize>() / BLOCK_BYTES;
            let (d, block) = self.place(*addr, blocks as u64)?;
            per[d].push(WriteOp { block, bufs: bufs.clone() });
        }
        let _phase = phases::enter(Phase::Write);
        for (d, ops) in per.iter().enumerate() {
            if !ops.is_empty() {
                write(&*self.devices[d], ops)?;
            }
        }
        Ok(())
    }

    /// Makes all writes that have returned durable, on every device.
    ///
    /// # Errors
    /// Of a device.
    pub fn flush(&self) -> Result<()> {
        let _phase = phases::enter(Phase::Flush);
        self.devices.iter().try_for_each(|d| d.flush()).map_err(Error::Io)
    }

    /// Makes all writes to `groups` that have returned durable: flushes the devices that these lie on, and no other, so
    /// that a device that fails takes along only who has blocks on it.
    ///
    /// # Errors
    /// Of a device.
    pub fn flush_groups(&self, groups: impl IntoIterator<Item = u32>) -> Result<()> {
        if self.devices.len() == 1 {
            return self.flush();
        }
        let _phase = phases::enter(Phase::Flush);
        self.devices_of(groups).into_iter().try_for_each(|d| self.devices[d].flush().map_err(Error::Io))
    }

    /// The devices that `groups` lie on, rising.
    pub fn devices_of(&self, groups: impl IntoIterator<Item = u32>) -> Vec<usize> {
        let mut wanted = vec![false; self.devices.len()];
        for g in groups {
            let start = self.opened.group_start(g).0;
            if let Some(w) = wanted.get_mut(self.map.partition_point(|m| m.first <= start).saturating_sub(1)) {
                *w = true;
            }
        }
        (0..wanted.len()).filter(|d| wanted[*d]).collect()
    }

    /// Number of devices.
    pub fn devices(&self) -> usize {
        self.devices.len()
    }

    /// Says that blocks hold nothing of use. What they read as is then undefined.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where the device cannot discard; of the device; an address outside the volume.
    pub fn discard(&self, addr: BlockAddr, blocks: u64) -> Result<()> {
        let (d, b) = self.place(addr, blocks)?;
        self.devices[d].discard(b, blocks).map_err(|e| match e.kind() {
            std::io::ErrorKind::Unsupported => Error::Unsupported("the device cannot discard"),
            _ => Error::Io(e),
        })
    }

    /// Device `i`, for the volume's own tables.
    pub fn device(&self, i: usize) -> &Arc<dyn Device> {
        &self.devices[i]
    }
}
