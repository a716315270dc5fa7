//! Data moves from devices that are fuller than others to those, until all are used evenly: behind an added device.
//!
//! Group by group, as the cleaner moves blocks: by ordinary commits. While one is emptied no domain takes a group of a fuller
//! device, and the domain whose group it is allocates nothing in those that it has there. What is done stays, wherever it
//! ends, and the same call goes on.

use super::emptying::Left;
use super::{MountedVolume, Volume};
use crate::error::{Error, Result};
use crate::nodes::Closing;
use std::collections::HashSet;
use std::sync::atomic::Ordering;

/// What has become of the volume's devices.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Rebalanced {
    /// Block groups that data was moved out of.
    pub moved: u64,
    /// Of each device blocks of data and metadata that are in use, and blocks that can be.
    pub devices: Vec<(u64, u64)>,
}

impl Rebalanced {
    /// Blocks that device `i` uses beyond its part, fewer than none where it has less.
    fn over(&self, i: usize, drained: Option<usize>) -> i64 {
        let mine = |(i, _): &(usize, &(u64, u64))| Some(*i) != drained;
        let sum = |f: &dyn Fn(&(u64, u64)) -> u64| -> u64 {
            self.devices.iter().enumerate().filter(mine).map(|(_, d)| f(d)).sum()
        };
        let (used, blocks) = (sum(&|d| d.0), sum(&|d| d.1).max(1));
        let (here, of) = self.devices[i];
        here as i64 - (u128::from(used) * u128::from(of) / u128::from(blocks)) as i64
    }
}

impl Volume {
    /// Moves data to the devices that are used less than others, until none is used by more than a block group beyond its
    /// part, or nothing more moves. A device that is drained takes no part. `progress` is told how many groups have been
    /// looked at, and of how many about, and says whether to go on.
    ///
    /// # Errors
    /// [`Error::ReadOnly`]; [`Error::Size`] of a volume on one device; [`Error::Busy`] while its size changes;
    /// [`Error::Stopped`] by `progress`; of a device.
    pub fn rebalance(&self, progress: &dyn Fn(u64, u64) -> bool) -> Result<Rebalanced> {
        let i = self.mounted();
        let drained = self.drained_device();
        if self.super_block().device_table().len() - usize::from(drained.is_some()) < 2 {
            return Err(Error::Size("there is one device only: nothing can move to another one".into()));
        }
        let (mut tried, mut moved) = (HashSet::new(), 0);
        loop {
            if self.read_only() || i.shared.closing.load(Ordering::Relaxed) {
                return Err(Error::ReadOnly);
            }
            let now = i.use_of_devices(moved);
            let group = u64::from(i.store.geometry().group_blocks());
            let over = (0..now.devices.len()).filter(|d| Some(*d) != drained).map(|d| (now.over(d, drained), d));
            let over: Vec<_> = over.filter(|(n, _)| *n > group as i64).collect();
            let left = over.iter().map(|(n, _)| *n as u64 / group).sum::<u64>();
            let done = tried.len() as u64;
            if !progress(done, done + left) {
                return Err(Error::Stopped);
            }
            let Some((_, device)) = over.iter().max() else { return Ok(now) };
            let Some(next) = i.fullest_group(*device, &tried) else { return Ok(now) };
            tried.insert(next);
            moved += u64::from(i.move_away(next, over.iter().map(|(_, d)| *d))?);
        }
    }
}

/// Nobody claims some groups, until this is dropped, by a panic as well.
struct Avoiding<'a>(&'a MountedVolume);

impl Drop for Avoiding<'_> {
    fn drop(&mut self) {
        let mut bat = self.0.bat.lock();
        bat.avoid(Vec::new());
        self.0.count_unclaimed_in(&bat);
    }
}

impl MountedVolume {
    fn use_of_devices(&self, moved: u64) -> Rebalanced {
        let meta = u64::from(self.store.geometry().meta_blocks());
        let of = |device| {
            self.groups_of_device(device).fold((0, 0), |(used, blocks), g| {
                let here = self.siblings.owner_of(g).map_or(0, |id| self.dom(id).space.used_in(g));
                (used + here, blocks + u64::from(self.store.group_blocks(g)).saturating_sub(meta))
            })
        };
        Rebalanced { moved, devices: (0..self.store.devices()).map(of).collect() }
    }

    /// The group on a device that holds most, of those that were not tried.
    fn fullest_group(&self, device: usize, tried: &HashSet<u32>) -> Option<u32> {
        let groups = self.groups_of_device(device).filter(|g| !tried.contains(g)).filter_map(|g| {
            let d = self.dom(self.siblings.owner_of(g)?);
            let used = d.space.used_in(g);
            // what its tenant may not have there moves by itself
            let moves = self.is_forbidden(d, g);
            (d.failed().is_none() && used > 0 && !moves).then_some((used, g))
        });
        groups.max().map(|(_, g)| g)
    }

    /// Has what lies in a group written to devices that are not among `full`; whether something was.
    fn move_away(&self, group: u32, full: impl Iterator<Item = usize>) -> Result<bool> {
        let mut drained = self.emptying.lock();
        let Some(d) = self.siblings.owner_of(group).map(|id| self.dom(id)) else { return Ok(false) };
        self.while_emptying(|| {
            let full: Vec<_> = full.map(|device| self.groups_of_device(device)).collect();
            let avoiding = {
                let mut bat = self.bat.lock();
                bat.check_may_resize()?;
                bat.avoid(full.clone());
                self.count_unclaimed_in(&bat);
                Avoiding(self)
            };
            let own = full.into_iter().flatten().filter(|g| self.siblings.owner_of(*g) == Some(d.id));
            let mut kept = super::kept::Kept::default();
            self.keep_out_of(&mut kept, own);
            let moved = self.begin_emptying(d, group, kept.take(group), None).and_then(|e| {
                let Some(mut e) = e else { return Ok(false) };
                let before = e.blocks.len() as u64;
                match self.move_all(d, &mut e) {
                    Ok(Left { blocks: 0, .. })
                        if d.journal_group() != group && self.close_numbers(d, group) == Closing::Done =>
                    {
                        if !self.give_up_emptied(d, e).inspect_err(|_| d.nodes.reopen_group(group))? {
                            d.nodes.reopen_group(group);
                        }
                        Ok(before > 0)
                    }
                    Ok(Left { blocks, .. }) => {
                        kept.push(d.id, e);
                        Ok(blocks < before)
                    }
                    // there is no room for it: others may be smaller
                    Err(Error::NoSpace) => {
                        kept.push(d.id, e);
                        Ok(false)
                    }
                    Err(why) => {
                        kept.push(d.id, e);
                        Err(why)
                    }
                }
            });
            self.let_go(&mut kept);
            drop(avoiding);
            self.keep_drained(&mut drained);
            moved
        })
    }
}
