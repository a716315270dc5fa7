//! A smaller size for a volume in use: the groups at its end are emptied and given up.
//!
//! A front end that has accepted writes which the volume has not seen, as a kernel's writeback cache, must not ask for it: room
//! goes that these were accepted for.
//!
//! Nobody claims them from the beginning on, and no inode is given out in them. What is valid in them is written elsewhere,
//! as the cleaner does it, by ordinary commits; each group that is empty goes back to nobody by itself. Last come the
//! superblocks, when all these groups are nobody's: so a crash at any moment leaves a volume of the old size, some of whose
//! groups are nobody's, or one of the new size. Where something cannot leave, all is as before but for what was moved.
//!
//! What cannot leave: a group in which an inode has its number, since the number says in which group its entry stands, and
//! the journal of a domain. Nor do blocks with a fixed place (files that are overwritten in place, blocks that were
//! allocated and never written).

use super::emptying::End;
use super::resize::{NewSize, Resized, bytes, resized, with_blocks};
use super::{MountedVolume, Volume};
use crate::error::{Error, Result};
use crate::planted::{self, Bug};
use braidfs_device::BLOCK_BYTES;
use braidfs_format::super_block::SuperBlock;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};

impl Volume {
    /// Makes a volume larger ([`Self::grow`]) or smaller ([`Self::shrink`]), by which `progress` is told how far it is.
    ///
    /// # Errors
    /// As these.
    pub fn resize(&self, size: NewSize, progress: &dyn Fn(u64, u64)) -> Result<Resized> {
        self.resize_while(size, &|done, all| {
            progress(done, all);
            true
        })
    }

    /// [`Self::resize`], where `progress` says whether to go on.
    ///
    /// # Errors
    /// As of that; [`Error::Stopped`] by `progress`: the volume has its old size.
    pub fn resize_while(&self, size: NewSize, progress: &dyn Fn(u64, u64) -> bool) -> Result<Resized> {
        match size {
            NewSize::Bytes(n) if self.is_smaller(size) => self.shrink_while(n, progress),
            size => self.grow(size),
        }
    }

    /// Whether the volume uses more of its last device now.
    pub fn is_smaller(&self, size: NewSize) -> bool {
        let now = self.super_block().device_table().last().map_or(0, |d| d.blocks.get());
        matches!(size, NewSize::Bytes(n) if n / (BLOCK_BYTES as u64) < now)
    }

    /// Has a volume use `size` bytes of its last device, no more than now, while it is in use. `progress` is told how many
    /// groups have been given up, and of how many. An image file is cut off. Not for a front end that holds accepted writes
    /// back (see the module's text): [`Self::write`] and the like tell at once where there is no room any more.
    ///
    /// # Errors
    /// [`Error::ReadOnly`]; [`Error::Size`] where something cannot leave, with the least size that can be had;
    /// [`Error::Busy`]; of a device.
    pub fn shrink(&self, size: u64, progress: &dyn Fn(u64, u64)) -> Result<Resized> {
        self.shrink_while(size, &|done, all| {
            progress(done, all);
            true
        })
    }

    fn shrink_while(&self, size: u64, progress: &dyn Fn(u64, u64) -> bool) -> Result<Resized> {
        let i = self.mounted();
        if self.read_only() {
            return Err(Error::ReadOnly);
        }
        let done = Cell::new(None);
        let last_smaller = |old: &SuperBlock| {
            let (last, blocks) = (old.device_table().len() - 1, size / BLOCK_BYTES as u64);
            let now = old.device[last].blocks.get();
            if blocks == now {
                // who asked for the same has had it done meanwhile
                done.set(Some(resized(old, old, last)));
            }
            if blocks >= now {
                return Err(Error::Size("the volume is no larger than that".into()));
            }
            with_blocks(old, last, blocks, true)
        };
        let smaller = i.become_smaller(last_smaller, progress);
        if let Some(done) = done.take() {
            return Ok(done);
        }
        let (old, sb) = smaller?;
        Ok(resized(&old, &sb, old.device_table().len() - 1))
    }
}

/// The volume becomes smaller, until this is dropped, by a panic as well.
struct BecomesSmaller<'a>(&'a AtomicBool);

impl<'a> BecomesSmaller<'a> {
    fn begin(mark: &'a AtomicBool) -> Self {
        mark.store(true, Ordering::SeqCst);
        Self(mark)
    }
}

impl Drop for BecomesSmaller<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

impl MountedVolume {
    /// Gives up what lies behind the end of the volume that `smaller` makes of the present one, and ends there; what the
    /// superblocks said and say. `progress` as of [`End::empty`].
    pub(super) fn become_smaller(
        &self,
        smaller: impl FnOnce(&SuperBlock) -> Result<SuperBlock>,
        progress: &dyn Fn(u64, u64) -> bool,
    ) -> Result<(SuperBlock, SuperBlock)> {
        let mut drained = self.emptying.lock();
        // all of it at once: others do not wait for that
        let _smaller = BecomesSmaller::begin(&self.becomes_smaller);
        // what it makes room for must not wait for what this thread holds
        self.while_emptying(|| {
            let (mut end, old, sb) = End::begin(self, smaller)?;
            // Groups that a drain keeps empty are like any others for it. Those before the end that a tenant is kept off stay closed:
            // what moves does not come to lie there.
            let opens = |d, g| g >= end.first() || !self.is_forbidden(self.dom(d), g);
            self.let_go(&mut drained.take_those(opens));
            // else limits of space would not count what is open again
            self.domains.iter().for_each(|d| self.count_shut(d));
            let done = end
                .close()
                .and_then(|()| end.check_room())
                .and_then(|()| end.empty(progress))
                .and_then(|()| self.end_here(&old, sb));
            drop(end);
            self.keep_drained(&mut drained);
            done.map(|()| (old, sb))
        })
    }

    /// Bytes of the last device up to the end of `group`, with what is needed besides.
    pub(super) fn least_with(&self, group: u32) -> u64 {
        let sb = *self.sb.read();
        let Some(d) = sb.device_table().last() else { return 0 };
        let here = u64::from(group + 1 - d.first_group.get().min(group)) * u64::from(sb.group_blocks.get());
        bytes((d.data_start.get() + here + 1).min(d.blocks.get()))
    }

    /// The volume ends where `sb` says; behind that nothing is anybody's.
    fn end_here(&self, old: &SuperBlock, mut sb: SuperBlock) -> Result<()> {
        let last = old.device_table().len() - 1;
        let leaves = sb.devices < old.devices;
        self.shared.check_alive()?;
        let mut bat = self.bat.lock();
        if self.shared.read_only.load(Ordering::SeqCst) {
            return Err(Error::ReadOnly); // a remount was faster
        }
        if let Some(g) = (sb.groups.get()..old.groups.get()).find(|g| bat.entry(*g).domain.is_some()) {
            return Err(Error::Busy(format!("block group {g} was taken meanwhile")));
        }
        let supers = self.label.lock();
        // emptying took long: a domain may have been added, a tenant may have lost its journal
        self.take_over(&mut sb, &supers);
        // from here on an error does not tell which size a mount would find
        bat.doubt(sb.groups.get() as usize);
        planted::too_early(Bug::LeftEarly, || self.write_other_supers(old, &sb))?;
        self.write_counting_super(old, &sb)?;
        // This is the size now, whatever happens.
        if let Err(e) = self.write_other_supers(old, &sb) {
            tracing::warn!("a superblock besides the one that counts tells of the larger volume: {e}");
        }
        *self.sb.write() = sb;
        if leaves {
            self.store.remove_last_device(&sb);
        } else {
            self.store.resize(&sb);
        }
        drop(supers);
        bat.resize(sb.groups.get() as usize);
        self.note_drained(&mut bat);
        self.count_unclaimed_in(&bat);
        // the only device that is left is drained no longer
        (0..sb.device_table().len()).for_each(|device| self.keep_numbers(&bat, device));
        if leaves {
            tracing::info!(device = last, groups = sb.groups.get(), "a device was removed");
            return Ok(());
        }
        tracing::info!(to = bytes(sb.device[last].blocks.get()), groups = sb.groups.get(), "the volume is smaller");
        drop(bat);
        // what is behind the end is of no use: if it stays, it does no harm
        if let Err(e) = self.store.device(last).cut_off(sb.device[last].blocks.get()) {
            tracing::warn!("{}: cannot be cut off: {e}", self.store.device(last).name());
        }
        Ok(())
    }

    fn write_super(&self, sb: &SuperBlock, n: usize, addr: u64) -> Result<()> {
        let device = self.store.device(n);
        device.write(addr, &sb.to_block(n as u16, addr, super::resize::SEQ)).map_err(Error::Io)?;
        Ok(device.flush()?)
    }

    /// Writes the superblock of a volume that is smaller that counts, durably, once there is a replica for it.
    fn write_counting_super(&self, old: &SuperBlock, sb: &SuperBlock) -> Result<()> {
        if sb.devices == old.devices {
            let last = sb.device_table().len() - 1;
            self.write_super(sb, last, sb.device[last].blocks.get() - 1)?;
        }
        self.write_super(sb, 0, 0)
    }

    /// And the others. Those that tell of the larger volume until they are written tell of nothing that would not be there. Last
    /// the copies at the old end, or on the device that has left, are wiped: nobody must find the old volume by them.
    fn write_other_supers(&self, old: &SuperBlock, sb: &SuperBlock) -> Result<()> {
        let (last, left) = (old.device_table().len() - 1, sb.devices < old.devices);
        let wipe = || -> Result<()> {
            let device = self.store.device(last);
            let replica = old.device[last].blocks.get() - 1;
            for addr in [0, replica].into_iter().filter(|addr| left || *addr > 0) {
                device.write(addr, &[0; BLOCK_BYTES])?;
            }
            Ok(device.flush()?)
        };
        let others = || -> Result<()> {
            let stay = sb.device_table().len();
            for n in 1..stay {
                self.write_super(sb, n, 0)?;
            }
            for n in (0..stay).filter(|n| left || *n < last) {
                self.write_super(sb, n, sb.device[n].blocks.get() - 1)?;
            }
            Ok(())
        };
        others()?;
        wipe()
    }
}
