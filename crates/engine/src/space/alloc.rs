//! mlogs: independent logs that take blocks. Each has a lock of its own and an active segment per class.
//!
//! A log goes through: its active segment; a free segment; what is left of its active segments; inactive segments with
//! slack, of the same kind first; any unused block of the domain. "Active" is a preference of the other logs, not what
//! keeps blocks apart: that is the bitmap under the segment's lock.

use super::bitmap;
use super::pool::{Mlog, SegmentRef};
use super::{Class, Run, Space};
use crate::error::{Error, Result};
use braidfs_format::BlockAddr;
use braidfs_format::geometry::SEGMENT_BLOCKS;

/// A run of this length is good enough to stay in a segment.
const GOOD_RUN: u32 = 64;
/// Scans for the last blocks of a domain before giving up: others may free and take while one scan runs.
const LAST_SCANS: usize = 64;

impl SegmentRef {
    fn take(&self, want: u32, enough: u32) -> Option<Run> {
        self.group.take(self.index, want, enough)
    }
}

impl Space {
    /// Takes 1 to `want` consecutive blocks that the caller has reserved, from log `mlog`, in a segment for `class`.
    /// `near` is where the run should start if it can. What is not taken stays reserved.
    ///
    /// # Errors
    /// [`Error::NoSpace`] only where nothing at all is unused, which a reservation rules out.
    pub fn alloc(&self, mlog: usize, class: Class, want: u32, near: Option<BlockAddr>) -> Result<Run> {
        if want == 0 {
            return Err(Error::Invalid("an allocation of no blocks"));
        }
        let mut log = self.mlogs[mlog % self.mlogs.len()].lock();
        let slot = class.slot();
        let enough = want.min(GOOD_RUN);
        // one that was emptied since is as good as any other: the lowest is better
        if let Some(seg) = log.active[slot].take_if(|seg| seg.group.segments[seg.index as usize].is_fresh()) {
            self.leave(&seg);
        }
        if let Some(run) = log.active[slot].as_ref().and_then(|seg| self.take_near(seg, near, want)) {
            return Ok(run);
        }
        if let Some(run) = log.active[slot].as_ref().and_then(|seg| seg.take(want, enough)) {
            return Ok(run);
        }
        // With few segments left, the temperatures of one kind share what they have.
        let siblings = slot / 3 * 3..slot / 3 * 3 + 3;
        if self.segments_scarce()
            && let Some(run) = log.active[siblings.clone()].iter().flatten().find_map(|seg| seg.take(want, enough))
        {
            return Ok(run);
        }
        if let Some(seg) = self.take_free(class, near, false)
            && let Some(run) = self.switch(&mut log, slot, seg, want)
        {
            return Ok(run);
        }
        if let Some(run) = log.active[siblings].iter().flatten().find_map(|seg| seg.take(want, 0)) {
            return Ok(run);
        }
        while let Some(seg) = self.recycle(class) {
            if let Some(run) = self.switch(&mut log, slot, seg, want) {
                return Ok(run);
            }
        }
        while let Some(seg) = self.take_free(class, near, true) {
            if let Some(run) = self.switch(&mut log, slot, seg, want) {
                return Ok(run);
            }
        }
        self.take_any(want).ok_or(Error::NoSpace)
    }

    /// Continues at `near` where that lies in the log's own segment.
    fn take_near(&self, seg: &SegmentRef, near: Option<BlockAddr>, want: u32) -> Option<Run> {
        let start = seg.group.segments[seg.index as usize].start.0;
        let at = near?.0.checked_sub(start).filter(|&at| at < u64::from(SEGMENT_BLOCKS))?;
        seg.group.take_at(seg.index, at as u32, want)
    }

    /// Makes `seg` the active segment and takes from it; the old one becomes anybody's.
    fn switch(&self, log: &mut Mlog, slot: usize, seg: SegmentRef, want: u32) -> Option<Run> {
        let run = seg.take(want, want.min(GOOD_RUN)).or_else(|| seg.take(want, 0));
        if let Some(old) = log.active[slot].replace(seg) {
            self.leave(&old);
        }
        run
    }

    /// A segment is no longer the active one of a log: it becomes anybody's.
    pub(super) fn leave(&self, seg: &SegmentRef) {
        seg.group.leave(seg.index);
        self.offer(seg);
    }

    /// The last resort: any unused block, also in segments that other logs are writing.
    fn take_any(&self, want: u32) -> Option<Run> {
        let groups: Vec<_> = self.groups.read().values().cloned().collect();
        for _ in 0..LAST_SCANS {
            for group in &groups {
                let found = (0..group.segments.len() as u32).find_map(|index| group.take(index, want, 0));
                if found.is_some() {
                    return found;
                }
            }
            // by the segments: what is counted in the group is a hint
            if groups.iter().flat_map(|g| &g.segments).all(|s| s.free() == 0) {
                return None;
            }
            // the last blocks may be those that are being discarded
            drop(self.trimming.lock());
            braidfs_sync::give_way(0);
        }
        None
    }

    /// Gives back blocks that were allocated but are in no record. They are free at once and no longer reserved. Blocks of
    /// the committed view are left alone. For tests.
    #[cfg(test)]
    pub(crate) fn unalloc(&self, run: Run) {
        let (mut at, end) = (run.addr.0, run.addr.0 + u64::from(run.len));
        while at < end {
            let Ok((group, index, block)) = self.locate(BlockAddr(at)) else {
                debug_assert!(false, "{run:?} is not of {}", self.domain);
                return;
            };
            let len = (SEGMENT_BLOCKS - block).min((end - at) as u32);
            let segment = &group.segments[index as usize];
            let mut state = segment.state.lock();
            let bits = bitmap::and_not(&bitmap::mask(block, len), &state.entry.valid);
            let freed = group.clear_used(segment, &mut state, &bits);
            debug_assert_eq!(freed, len, "{run:?} was not allocated, or is committed");
            let (idle, withheld) = (!state.active, state.withheld);
            drop(state);
            self.account.add(if withheld { 0 } else { freed.into() });
            if idle && segment.is_fresh() {
                self.offer(&SegmentRef { group, index });
            }
            at += u64::from(len);
        }
    }

    /// The planted bug [`crate::planted::Bug::FreedReused`].
    #[cfg(feature = "planted-bugs")]
    pub(crate) fn free_early(&self, runs: &[(BlockAddr, u32)]) {
        for (addr, len) in runs {
            let _ = self.for_each_piece(*addr, *len, |group, index, (from, len)| {
                let segment = &group.segments[index as usize];
                let n = group.clear_used(segment, &mut segment.state.lock(), &bitmap::mask(from, len));
                self.account.add(i64::from(n));
                Ok(())
            });
        }
    }

    /// Marks blocks used that no record made valid: data that recovery found behind a roll-forward record. Blocks that
    /// are used already stay so. Needs no reservation.
    ///
    /// # Errors
    /// `Corrupt` where the run is not of this domain or touches metadata or journal.
    pub fn take(&self, run: Run) -> Result<()> {
        self.for_each_piece(run.addr, run.len, |group, index, (from, len)| {
            let segment = &group.segments[index as usize];
            let new = group.set_used(segment, &mut segment.state.lock(), &bitmap::mask(from, len));
            self.withdraw(group.number, index);
            self.account.force(new);
            Ok(())
        })
    }
}
