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

use super::resize::{NewSize, Resized, bytes, resized, with_blocks};
use super::{MountedVolume, Volume};
use crate::domain::Domain;
use crate::error::{Error, Result};
use crate::space::Emptying;
use braidfs_device::BLOCK_BYTES;
use braidfs_format::super_block::SuperBlock;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Blocks that are moved between two commits.
const MOVED_TOGETHER: usize = 512;
/// How often what is in a group is looked at: others may write to blocks that are being moved.
const PASSES: usize = 6;
/// Groups that a domain without room takes at most for what lies in one: the first may make up for what the domain keeps back.
const CLAIMED_FOR_ONE: usize = 2;

impl Volume {
    /// Makes a volume larger ([`Self::grow`]) or smaller ([`Self::shrink`]), by which `progress` is told how far it is.
    ///
    /// # Errors
    /// As these.
    pub fn resize(&self, size: NewSize, progress: &dyn Fn(u64, u64)) -> Result<Resized> {
        match size {
            NewSize::Bytes(n) if self.is_smaller(size) => self.shrink(n, progress),
            size => self.grow(size),
        }
    }

    /// Whether the volume uses more of its last device now.
    pub fn is_smaller(&self, size: NewSize) -> bool {
        let now = self.super_block().device_table().last().map_or(0, |d| d.blocks.get());
        matches!(size, NewSize::Bytes(n) if n / (BLOCK_BYTES as u64) < now)
    }

    /// Has a volume use `size` bytes of its last device, fewer than now, while it is in use. `progress` is told how many
    /// groups have been given up, and of how many. An image file is cut off. Not for a front end that holds accepted writes
    /// back (see the module's text): [`Self::write`] and the like tell at once where there is no room any more.
    ///
    /// # Errors
    /// [`Error::ReadOnly`]; [`Error::Size`] where something cannot leave, with the least size that can be had;
    /// [`Error::Busy`]; of a device.
    pub fn shrink(&self, size: u64, progress: &dyn Fn(u64, u64)) -> Result<Resized> {
        let i = self.mounted();
        if self.read_only() {
            return Err(Error::ReadOnly);
        }
        let _one = i.emptying.lock();
        // what it makes room for must not wait for what this thread holds
        i.while_emptying(|| {
            let (mut end, old, sb) = End::begin(i, size / BLOCK_BYTES as u64)?;
            end.close()?;
            end.empty(progress)?;
            let last = old.device_table().len() - 1;
            i.end_here(&old, sb, last)?;
            Ok(resized(&old, &sb, last))
        })
    }
}

/// The groups at the end, while they are being given up. Dropped, those that are there still are like any others.
struct End<'a> {
    volume: &'a MountedVolume,
    first: u32,
    /// Those of them that are domains', and whose.
    owned: Vec<(u32, &'a Arc<Domain>)>,
}

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.owned.iter().for_each(|(g, d)| d.nodes.reopen_group(*g));
        let mut bat = self.volume.bat.lock();
        bat.claim_below(None);
        self.volume.count_unclaimed_in(&bat);
    }
}

impl<'a> End<'a> {
    /// Has nobody claim what lies behind `blocks` blocks of the last device; with the superblock of now and the one to come.
    /// The size stays until this is dropped.
    fn begin(volume: &'a MountedVolume, blocks: u64) -> Result<(Self, SuperBlock, SuperBlock)> {
        let mut bat = volume.bat.lock();
        let old = *volume.sb.read();
        let last = old.device_table().len() - 1;
        if blocks >= old.device[last].blocks.get() {
            return Err(Error::Size("the volume is no larger than that".into()));
        }
        let sb = with_blocks(&old, last, blocks, true)?;
        bat.claim_below(Some(sb.groups.get() as usize));
        volume.count_unclaimed_in(&bat);
        drop(bat);
        Ok((Self { volume, first: sb.groups.get(), owned: Vec::new() }, old, sb))
    }

    /// No inode is given out behind the end any more, where all that is there can leave.
    fn close(&mut self) -> Result<()> {
        let volume = self.volume;
        // what was removed is gone then, also what waited for a commit
        volume.commit_everything()?;
        volume.reap_for_room();
        volume.commit_everything()?;
        // numbers of removed directories are taken until a checkpoint
        for d in volume.domains.iter().filter(|d| d.failed().is_none() && d.quarantined_numbers() > 0) {
            d.checkpoint()?;
        }
        let all = volume.store.geometry().groups;
        let mut stays = None;
        for g in self.first..all {
            let Some(d) = volume.siblings.owner_of(g).map(|id| volume.dom(id)) else { continue };
            if d.failed().is_some() {
                stays = Some((g, format!("{} is read-only after an error", d.id)));
            } else if d.journal_group() == g {
                stays = Some((g, format!("the journal of {} lies there", d.id)));
            } else if d.nodes.close_group(g) {
                self.owned.push((g, d));
            } else {
                stays = Some((g, "files and directories have their inode numbers there".to_string()));
            }
        }
        match stays {
            None => Ok(()),
            Some((g, why)) => Err(Error::Size(format!(
                "block group {g} cannot leave: {why}; the least size is {} bytes",
                volume.least_with(g)
            ))),
        }
    }

    /// Empties and gives up all of them, from the last one on.
    fn empty(&self, progress: &dyn Fn(u64, u64)) -> Result<()> {
        let all = self.owned.len() as u64;
        for (done, (group, d)) in (0..).zip(self.owned.iter().rev()) {
            progress(done, all);
            self.empty_one(d, *group)?;
        }
        progress(all, all);
        Ok(())
    }

    fn empty_one(&self, d: &Arc<Domain>, group: u32) -> Result<()> {
        let v = self.volume;
        let busy = || Error::Busy(format!("block group {group} is written to all the time"));
        for _ in 0..PASSES {
            if v.siblings.owner_of(group) != Some(d.id) {
                return Ok(()); // given back meanwhile
            }
            let no_room = || Error::Size(format!("{} has no room for what lies in block group {group}", d.id));
            let mut e = self.begin_emptying(d, group)?.ok_or_else(no_room)?;
            let left = self.move_all(d, &mut e);
            if !matches!(left, Ok(Left { blocks: 0, .. })) {
                let room = d.space.available();
                d.space.end_emptying(e);
                return Err(match left {
                    Err(Error::NoSpace) => no_room(),
                    Ok(left) if left.blocks > room => no_room(),
                    Ok(left) if left.fewer => busy(),
                    Err(e) => e,
                    Ok(_) => Error::Size(format!(
                        "block group {group} cannot leave: blocks with a fixed place lie there, of files that are \
                         overwritten in place or allocated, or removed and open; the least size is {} bytes",
                        v.least_with(group)
                    )),
                });
            }
            let mut bat = v.bat.lock();
            if v.shared.closing.load(Ordering::SeqCst) {
                // a remount has marked the domain clean, or is about to
                d.space.end_emptying(e);
                return Err(Error::ReadOnly);
            }
            let gone = d.give_up_emptied(e, |given| {
                for &g in given {
                    v.siblings.set_owner(g, None);
                    bat.set_free(&**v.store.device(0), g)?;
                }
                Ok(())
            })?;
            v.count_unclaimed_in(&bat);
            if gone {
                return Ok(());
            }
        }
        Err(busy())
    }

    /// Keeps others from allocating in a group, where the domain has room for what lies there, or takes other groups for it.
    /// `None` where there is no room.
    fn begin_emptying(&self, d: &Arc<Domain>, group: u32) -> Result<Option<Emptying>> {
        let v = self.volume;
        let mut begun = d.space.begin_emptying(group)?;
        for _ in 0..CLAIMED_FOR_ONE {
            let enough = begun.as_ref().is_some_and(|e| d.space.available() >= e.blocks.len() as u64);
            if enough {
                break;
            }
            match v.claim_group(d) {
                Ok(true) if begun.is_none() => begun = d.space.begin_emptying(group)?,
                Ok(true) => {}
                // what there is may do: blocks that are removed meanwhile need not move
                Ok(false) => break,
                Err(e) => {
                    begun.into_iter().for_each(|e| d.space.end_emptying(e));
                    return Err(e);
                }
            }
        }
        Ok(begun)
    }

    /// Has what is valid in a group written elsewhere; what could not be.
    fn move_all(&self, d: &Arc<Domain>, e: &mut Emptying) -> Result<Left> {
        let (mut fewer, mut pass) = (false, 0);
        loop {
            // what an open transaction wrote there, or freed, is seen now
            d.flush_all()?;
            d.commit()?;
            d.space.look_again(e)?;
            let blocks = std::mem::take(&mut e.blocks);
            let left = blocks.len() as u64;
            if left == 0 || pass == PASSES {
                return Ok(Left { blocks: left, fewer });
            }
            let mut moved = 0;
            for some in blocks.chunks(MOVED_TOGETHER) {
                moved += self.volume.move_blocks(d, some)?;
            }
            (fewer, pass) = (moved > 0, pass + 1);
            if !fewer {
                return Ok(Left { blocks: left, fewer });
            }
        }
    }
}

/// What a group holds that could not be moved.
struct Left {
    blocks: u64,
    /// The last pass moved some.
    fewer: bool,
}

impl MountedVolume {
    /// Bytes of the last device up to the end of `group`, with what is needed besides.
    fn least_with(&self, group: u32) -> u64 {
        let sb = *self.sb.read();
        let Some(d) = sb.device_table().last() else { return 0 };
        let here = u64::from(group + 1 - d.first_group.get().min(group)) * u64::from(sb.group_blocks.get());
        bytes((d.data_start.get() + here + 1).min(d.blocks.get()))
    }

    /// The volume ends where `sb` says; behind that nothing is anybody's.
    fn end_here(&self, old: &SuperBlock, mut sb: SuperBlock, last: usize) -> Result<()> {
        if self.shared.dead.load(Ordering::Relaxed) {
            return Err(Error::Io(std::io::Error::other("the volume was killed")));
        }
        let mut bat = self.bat.lock();
        if self.shared.read_only.load(Ordering::SeqCst) {
            return Err(Error::ReadOnly); // a remount was faster
        }
        if let Some(g) = (sb.groups.get()..old.groups.get()).find(|g| bat.entry(*g).domain.is_some()) {
            return Err(Error::Busy(format!("block group {g} was taken meanwhile")));
        }
        let supers = self.label.lock();
        (sb.label, sb.compat) = (*supers, self.compat.load(Ordering::Relaxed).into());
        // one may have been added meanwhile
        sb.domains = self.sb.read().domains;
        // from here on an error does not tell which size a mount would find
        bat.doubt(sb.groups.get() as usize);
        self.write_counting_super(&sb, last)?;
        // This is the size now, whatever happens.
        if let Err(e) = self.write_other_supers(old, &sb, last) {
            tracing::warn!("a superblock besides the one that counts tells of the larger volume: {e}");
        }
        *self.sb.write() = sb;
        drop(supers);
        self.store.resize(&sb);
        bat.resize(sb.groups.get() as usize);
        self.count_unclaimed_in(&bat);
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
    fn write_counting_super(&self, sb: &SuperBlock, last: usize) -> Result<()> {
        self.write_super(sb, last, sb.device[last].blocks.get() - 1)?;
        self.write_super(sb, 0, 0)
    }

    /// And the others. Those that tell of the larger volume until they are written tell of nothing that would not be there.
    fn write_other_supers(&self, old: &SuperBlock, sb: &SuperBlock, last: usize) -> Result<()> {
        for n in 1..=last {
            self.write_super(sb, n, 0)?;
        }
        for n in 0..last {
            self.write_super(sb, n, sb.device[n].blocks.get() - 1)?;
        }
        // nobody must find the old size by it
        let device = self.store.device(last);
        device.write(old.device[last].blocks.get() - 1, &[0; BLOCK_BYTES])?;
        Ok(device.flush()?)
    }
}
