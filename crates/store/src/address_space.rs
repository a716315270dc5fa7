//! Which block of the group space lies where on which device.

use crate::members::Members;
use crate::ring::Buffers;
use crate::{Error, Result};
use braidfs_device::{BLOCK_BYTES, Device, WriteOp};
use braidfs_format::super_block::SuperBlock;
use braidfs_format::{BlockAddr, Corrupt, Geometry};
use braidfs_sync::phases::{self, Phase};
use braidfs_sync::slots::Counter;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// The devices of a volume behind one address space. Cheap to share; its only state is which devices there are, and how large
/// the volume is.
#[derive(Debug)]
pub struct Store {
    members: Members,
    /// As the volume was when it was opened.
    opened: Geometry,
    /// Groups that it has now. Written after the end of the last device, and read before it.
    groups: AtomicU32,
    /// Low half of the UUID.
    pub volume: u32,
    /// Bytes that were asked for, read or written.
    asked: Counter,
    /// What journals are read to.
    pub(crate) buffers: Arc<Buffers>,
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
        let members = Members::new();
        for (d, dev) in table.iter().zip(devices) {
            if dev.blocks() < d.blocks.get() {
                let why = format!(
                    "{} has {} blocks, the volume needs {}: it was truncated",
                    dev.name(),
                    dev.blocks(),
                    d.blocks.get()
                );
                return Err(Corrupt::new("volume", why).into());
            }
            members.add(dev, d, geometry);
        }
        let groups = AtomicU32::new(geometry.groups);
        let (asked, buffers) = Default::default();
        Ok(Self { members, opened: geometry, groups, volume: sb.volume_id(), asked, buffers })
    }

    /// All journals have been read: the memory for it goes back.
    pub fn release_journal_buffers(&self) {
        self.buffers.close();
    }

    /// Sizes of the volume, as they are now: of two calls the later one may tell of more groups.
    #[inline]
    pub fn geometry(&self) -> Geometry {
        Geometry { groups: self.groups.load(Ordering::Acquire), ..self.opened }
    }

    /// The volume has changed its size: its last device is as `sb` says from now on. Nobody uses a group that is not there
    /// before and afterwards.
    pub fn resize(&self, sb: &SuperBlock) {
        if let Some(d) = sb.device_table().last() {
            self.members.resize_last(d, self.opened);
            self.groups.store(sb.groups.get(), Ordering::Release);
        }
    }

    /// Whether the volume may get one more device before it is closed: how many it can have had until then is limited.
    pub fn has_seat(&self) -> bool {
        self.members.has_seat()
    }

    /// The volume has one device more, the last of `sb`; false where it cannot. One at a time.
    pub fn add_device(&self, device: Arc<dyn Device>, sb: &SuperBlock) -> bool {
        let Some(entry) = sb.device_table().last() else { return false };
        let added = self.members.add(device, entry, self.opened);
        if added {
            self.groups.store(sb.groups.get(), Ordering::Release);
        }
        added
    }

    /// The volume is as `sb` says, without what was its last device, which is let go. Nobody uses one of its groups.
    pub fn remove_last_device(&self, sb: &SuperBlock) {
        self.groups.store(sb.groups.get(), Ordering::Release);
        self.members.remove_last();
    }

    /// The device that holds `addr .. addr + blocks` and the block there.
    ///
    /// # Errors
    /// [`Error::Corrupt`] where no device holds them.
    pub fn place(&self, addr: BlockAddr, blocks: u64) -> Result<(usize, u64)> {
        if let Some((i, seat)) = self.members.of(addr)
            && addr.0.checked_add(blocks).is_some_and(|e| e <= seat.end())
        {
            return Ok((i, addr.0 - seat.first + seat.start));
        }
        Err(Corrupt::new("block address", format!("{addr} + {blocks} lies outside the volume")).into())
    }

    /// Blocks of `group` (the last of a device may be short).
    pub fn group_blocks(&self, group: u32) -> u32 {
        let start = self.opened.group_start(group);
        let end = self.members.of(start).map_or(start.0, |(_, seat)| seat.end());
        end.saturating_sub(start.0).min(u64::from(self.opened.group_blocks())) as u32
    }

    /// Reads whole blocks; `buf` is a multiple of 4096 bytes.
    ///
    /// # Errors
    /// Of the device, or an address outside the volume.
    pub fn read(&self, addr: BlockAddr, buf: &mut [u8]) -> Result<()> {
        let (d, b) = self.place(addr, (buf.len() / BLOCK_BYTES) as u64)?;
        self.asked.add(buf.len() as i64);
        let _phase = phases::enter(Phase::Read);
        self.device(d).read(b, buf).map_err(Error::Io)
    }

    /// Writes one run.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn write(&self, addr: BlockAddr, buf: &[u8]) -> Result<()> {
        let (d, b) = self.place(addr, (buf.len() / BLOCK_BYTES) as u64)?;
        self.asked.add(buf.len() as i64);
        let _phase = phases::enter(Phase::Write);
        self.device(d).write(b, buf).map_err(Error::Io)
    }

    /// Writes all runs in parallel and waits for them.
    ///
    /// # Errors
    /// As [`Self::read`]; any of the writes may have happened.
    pub fn write_batch(&self, ops: &[(BlockAddr, Vec<&[u8]>)]) -> Result<()> {
        self.write_by(ops, |d, ops| self.device(d).write_batch(ops))
    }

    /// As [`Self::write_batch`], of who flushes right afterwards.
    ///
    /// # Errors
    /// As [`Self::write_batch`].
    pub fn write_batch_through(&self, ops: &[(BlockAddr, Vec<&[u8]>)]) -> Result<()> {
        let mut end = 0;
        let written = self.write_by(ops, |d, ops| {
            end = d;
            self.device(d).write_batch_through(ops)
        });
        if written.is_err() {
            // The flush that others wait for does not follow: the devices before the one that failed would have them step back for a
            // sync that never ends. An error of it comes again with the next flush.
            let is_written = |d: &usize| ops.iter().any(|(at, _)| self.place(*at, 1).is_ok_and(|(on, _)| on == *d));
            (0..end).filter(is_written).for_each(|d| drop(self.device(d).flush()));
        }
        written
    }

    /// This thread has written by [`Self::write_batch_through`], and may leave the flush of a device to another one.
    pub fn end_syncs(&self) {
        (0..self.devices()).for_each(|d| self.device(d).end_sync());
    }

    fn write_by(
        &self,
        ops: &[(BlockAddr, Vec<&[u8]>)],
        mut write: impl FnMut(usize, &[WriteOp<'_>]) -> std::io::Result<()>,
    ) -> Result<()> {
        let mut per: Vec<Vec<WriteOp<'_>>> = Vec::new();
        let mut bytes = 0;
        for (addr, bufs) in ops {
            let blocks = bufs.iter().map(|b| b.len()).sum::<usize>() / BLOCK_BYTES;
            bytes += blocks * BLOCK_BYTES;
            let (d, block) = self.place(*addr, blocks as u64)?;
            if per.len() <= d {
                per.resize(d + 1, Vec::new());
            }
            per[d].push(WriteOp { block, bufs: bufs.clone() });
        }
        self.asked.add(bytes as i64);
        let _phase = phases::enter(Phase::Write);
        for (d, ops) in per.iter().enumerate() {
            if !ops.is_empty() {
                write(d, ops)?;
            }
        }
        Ok(())
    }

    /// Bytes that were asked of the devices so far, read or written, by whomever; what goes to a device by itself
    /// ([`Self::device`]) is not in it. Exact while nobody asks.
    pub fn bytes_asked(&self) -> u64 {
        self.asked.sum().max(0) as u64
    }

    /// Makes all writes that have returned durable, on every device.
    ///
    /// # Errors
    /// Of a device.
    pub fn flush(&self) -> Result<()> {
        let _phase = phases::enter(Phase::Flush);
        (0..self.devices()).try_for_each(|d| self.device(d).flush()).map_err(Error::Io)
    }

    /// Makes all writes to `groups` that have returned durable: flushes the devices that these lie on, and no other, so
    /// that a device that fails takes along only who has blocks on it.
    ///
    /// # Errors
    /// Of a device.
    pub fn flush_groups(&self, groups: impl IntoIterator<Item = u32>) -> Result<()> {
        if self.devices() == 1 {
            return self.flush();
        }
        let _phase = phases::enter(Phase::Flush);
        self.devices_of(groups).into_iter().try_for_each(|d| self.device(d).flush().map_err(Error::Io))
    }

    /// [`Self::flush_groups`] of groups on these devices, by their numbers; one that has left the volume has none.
    ///
    /// # Errors
    /// Of a device.
    pub fn flush_devices(&self, which: impl IntoIterator<Item = usize>) -> Result<()> {
        let _phase = phases::enter(Phase::Flush);
        let all = self.devices();
        which.into_iter().filter(|d| *d < all).try_for_each(|d| self.device(d).flush().map_err(Error::Io))
    }

    /// Number of the device that `group` lies on; `None` of one that has left the volume.
    pub fn device_of(&self, group: u32) -> Option<usize> {
        self.members.of(self.opened.group_start(group)).map(|(i, _)| i)
    }

    /// The devices that `groups` lie on, rising.
    pub fn devices_of(&self, groups: impl IntoIterator<Item = u32>) -> Vec<usize> {
        let mut wanted = vec![false; self.devices()];
        for g in groups {
            // one of a device that has just left is nobody's
            if let Some(w) = self.device_of(g).and_then(|i| wanted.get_mut(i)) {
                *w = true;
            }
        }
        (0..wanted.len()).filter(|d| wanted[*d]).collect()
    }

    /// Number of devices.
    pub fn devices(&self) -> usize {
        self.members.len()
    }

    /// Says that blocks hold nothing of use. What they read as is then undefined.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where the device cannot discard; of the device; an address outside the volume.
    pub fn discard(&self, addr: BlockAddr, blocks: u64) -> Result<()> {
        let (d, b) = self.place(addr, blocks)?;
        self.device(d).discard(b, blocks).map_err(|e| match e.kind() {
            std::io::ErrorKind::Unsupported => Error::Unsupported("the device cannot discard"),
            _ => Error::Io(e),
        })
    }

    /// Calls of device `i` that failed since the volume was opened; where it cannot discard is none of them.
    ///
    /// # Panics
    /// As [`Self::device`].
    pub fn errors_of(&self, i: usize) -> u64 {
        self.members.seat(i).errors()
    }

    /// Whether a flush of device `i` has failed since the volume was opened: no later one succeeds.
    ///
    /// # Panics
    /// As [`Self::device`].
    pub fn cannot_flush(&self, i: usize) -> bool {
        self.members.seat(i).cannot_flush()
    }

    /// Whether other machines reach device `i`, too. (What [`Self::device`] gives has no [`Device::remote`].)
    ///
    /// # Panics
    /// As [`Self::device`].
    pub fn is_elsewhere(&self, i: usize) -> bool {
        self.members.seat(i).is_elsewhere()
    }

    /// Device `i`, for the volume's own tables. Of one that has just left the volume what is left of it: it flushes nothing, and
    /// fails else.
    ///
    /// # Panics
    /// Where there was never such a device.
    pub fn device(&self, i: usize) -> &Arc<dyn Device> {
        &self.members.seat(i).device
    }
}
