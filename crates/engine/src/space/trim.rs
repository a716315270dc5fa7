//! Discarding: telling the devices that free blocks hold nothing (TRIM, hole punch).
//!
//! A block may be discarded when it may be overwritten, which is when it is unused: whatever freed it is durable then
//! ([`Space::apply`]), and no recovery reads it. While a segment's free blocks are being discarded nothing is allocated in
//! it, since a discard that passed the write of new data would destroy that. No lock is held meanwhile that an allocation
//! waits for, but where no other segment has a block left.

use super::group::Group;
use super::pool::SegmentRef;
use super::{Run, Space, bitmap};
use crate::error::Result;
use braidfs_format::BlockAddr;
use braidfs_format::geometry::SEGMENT_BLOCKS;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// Says that the discard of a segment has ended, also where it failed.
struct Discarding<'a> {
    space: &'a Space,
    segment: SegmentRef,
}

impl Discarding<'_> {
    /// Keeps allocations out of the segment, and gives its unused runs within `blocks` of at least `min` blocks.
    fn begin(group: &Group, index: u32, blocks: &Range<u32>, min: u32, whole: bool) -> Vec<Run> {
        let segment = &group.segments[index as usize];
        let mut state = segment.state.lock();
        if whole && (state.active || !segment.is_fresh()) {
            return Vec::new();
        }
        let mut runs = Vec::new();
        let mut at = blocks.start;
        while at < blocks.end {
            let len = bitmap::clear_len(&state.used, at).min(blocks.end - at);
            if len >= min {
                runs.push(Run { addr: BlockAddr(segment.start.0 + u64::from(at)), len });
            }
            at += len.max(1);
        }
        state.discarding = !runs.is_empty();
        runs
    }
}

impl Drop for Discarding<'_> {
    fn drop(&mut self) {
        self.segment.group.segments[self.segment.index as usize].state.lock().discarding = false;
        // whoever came upon it meanwhile may have taken it from the pool
        self.space.pool.lock().offer(&self.segment);
    }
}

impl Space {
    /// Discards the unused runs of segment `index` of group `number` that lie in `range` and have at least `min` blocks;
    /// blocks discarded. 0 where the group is not of this domain. The caller keeps the group from changing its owner.
    ///
    /// # Errors
    /// Of the device, [`crate::Error::Unsupported`] where it cannot discard.
    pub fn trim_segment(&self, number: u32, index: u32, range: &Range<BlockAddr>, min: u32) -> Result<u64> {
        let Some(group) = self.groups.read().get(&number).cloned() else { return Ok(0) };
        let start = group.segments[index as usize].start.0;
        let clip = |at: BlockAddr| at.0.saturating_sub(start).min(u64::from(SEGMENT_BLOCKS)) as u32;
        self.discard(&group, index, &(clip(range.start)..clip(range.end)), min.max(1), false)
    }

    /// Discards segment `index` of group `number` where nothing in it is used.
    ///
    /// # Errors
    /// As [`Self::trim_segment`].
    pub fn trim_if_free(&self, number: u32, index: u32) -> Result<u64> {
        let Some(group) = self.groups.read().get(&number).cloned() else { return Ok(0) };
        self.discard(&group, index, &(0..SEGMENT_BLOCKS), 1, true)
    }

    fn discard(&self, group: &Arc<Group>, index: u32, blocks: &Range<u32>, min: u32, whole: bool) -> Result<u64> {
        // held until the segment can be used again: see `Space::take_any`
        let _one = self.trimming.lock();
        let runs = Discarding::begin(group, index, blocks, min, whole);
        if runs.is_empty() {
            return Ok(0);
        }
        let _end = Discarding { space: self, segment: SegmentRef { group: group.clone(), index } };
        let mut done = 0;
        for run in runs {
            self.store.discard(run.addr, u64::from(run.len))?;
            done += u64::from(run.len);
        }
        Ok(done)
    }

    /// From now on [`Self::take_freed`] tells which segments were freed.
    pub fn note_freed(&self) {
        self.noting.store(true, Relaxed);
    }

    /// Notes that a segment has become free.
    pub(super) fn freed(&self, seg: &SegmentRef) {
        if self.noting.load(Relaxed) {
            self.freed.lock().insert((seg.group.number, seg.index));
        }
    }

    /// The segments, as group and number in it, that have become free since the last call.
    pub fn take_freed(&self) -> Vec<(u32, u32)> {
        std::mem::take(&mut *self.freed.lock()).into_iter().collect()
    }
}
