//! Discarding free space: `fstrim` and the mount option `discard`.

use super::{MountedVolume, Volume};
use crate::domain::Domain;
use crate::error::{Error, Result};
use crate::types::*;
use braidfs_device::{BLOCK_BYTES, Device};
use braidfs_format::geometry::SEGMENT_BLOCKS;
use std::ops::Range;
use std::sync::atomic::Ordering::SeqCst;

/// Bytes of a block.
const BLOCK: u64 = 4096;
/// Longest run that is looked for, bytes: a segment.
pub const TRIM_MIN_MAX: u64 = SEGMENT_BLOCKS as u64 * BLOCK;

impl MountedVolume {
    /// Discards what is free in `range` of segment `index` of `group`; blocks discarded.
    fn trim_segment(&self, group: u32, index: u32, range: &Range<BlockAddr>, min: u32) -> Result<u64> {
        // no domain gets or gives up the group meanwhile
        let bat = self.bat.lock();
        if self.shared.read_only.load(SeqCst) {
            return Err(Error::ReadOnly); // a remount was faster
        }
        let Some(owner) = bat.entry(group).domain else {
            let g = self.store.geometry();
            // not the metadata: a header may tell of a claim that the table has lost
            let first = g.group_start(group).0 + u64::from((index * SEGMENT_BLOCKS).max(g.meta_blocks()));
            let end =
                g.group_start(group).0 + u64::from(self.store.group_blocks(group).min((index + 1) * SEGMENT_BLOCKS));
            let (from, to) = (first.max(range.start.0), end.min(range.end.0));
            if to.saturating_sub(from) < u64::from(min) {
                return Ok(0);
            }
            self.store.discard(BlockAddr(from), to - from)?;
            return Ok(to - from);
        };
        let d = self.dom(owner);
        if d.failed().is_some() {
            return Ok(0);
        }
        d.space.trim_segment(group, index, range, min)
    }

    fn check_alive(&self) -> Result<()> {
        self.shared.check_alive()?;
        Ok(())
    }

    /// Discards the segments of a domain that have become free, with the mount option `discard`.
    pub(crate) fn discard_freed(&self, d: &Domain) {
        for (group, index) in d.space.take_freed() {
            let bat = self.bat.lock();
            if self.check_alive().is_err() {
                return;
            }
            let done = match bat.entry(group).domain {
                Some(owner) if owner == d.id => d.space.trim_if_free(group, index),
                // it changed its owner since
                _ => Ok(0),
            };
            match done {
                Ok(_) => {}
                Err(Error::Unsupported(_)) => tracing::debug!("discard: the device of group {group} cannot"),
                // a hint that was not taken; an error of the device shows where data is written
                Err(e) => tracing::warn!("discard of segment {index} of group {group}: {e}"),
            }
        }
    }
}

impl Volume {
    /// Discards the segments that have become free, as the background does with the mount option `discard`. For tests.
    #[doc(hidden)]
    pub fn discard_freed(&self) {
        let i = self.mounted();
        i.domains.iter().for_each(|d| i.discard_freed(d));
    }

    /// Discards free space (`fstrim`): every run of at least `min` bytes of blocks that are free, and were freed by nothing
    /// that a crash could undo, in the byte range `range` of the volume's blocks (`0 .. u64::MAX`: all). Bytes discarded.
    /// What is discarded reads as zeros or as anything. Safe beside all other operations; no run is longer than a segment
    /// (2 MiB).
    ///
    /// # Errors
    /// [`Error::ReadOnly`]; [`Error::Invalid`] where the range begins behind the end of the volume, or `min` is more than
    /// [`TRIM_MIN_MAX`]; [`Error::Unsupported`] where no device can discard; of a device.
    pub fn trim(&self, range: Range<u64>, min: u64) -> Result<u64> {
        let i = self.mounted();
        if self.read_only() {
            return Err(Error::ReadOnly);
        }
        let g = i.store.geometry();
        let blocks = u64::from(g.groups) * u64::from(g.group_blocks());
        if min > TRIM_MIN_MAX {
            return Err(Error::Invalid("no free run is longer than 2 MiB"));
        }
        if range.start >= blocks * BLOCK {
            return Err(Error::Invalid("the range begins behind the end of the volume"));
        }
        // whole blocks within the range
        let range = BlockAddr(range.start.div_ceil(BLOCK))..BlockAddr((range.end / BLOCK).min(blocks));
        let min = min.div_ceil(BLOCK).max(1) as u32;
        let (mut done, mut able, mut unable) = (0, false, None);
        for group in 0..g.groups {
            let start = g.group_start(group).0;
            if start >= range.end.0 || start + u64::from(g.group_blocks()) <= range.start.0 {
                continue;
            }
            for index in 0..g.segments {
                i.check_alive()?;
                match i.trim_segment(group, index, &range, min) {
                    Ok(n) => {
                        able |= n > 0;
                        done += n * BLOCK;
                    }
                    // another device of the volume may
                    Err(e @ Error::Unsupported(_)) => unable = Some(e),
                    Err(e) => return Err(e),
                }
            }
        }
        match unable {
            Some(e) if !able => Err(e),
            _ => Ok(done),
        }
    }
}

/// Discards a device, where it can. Piece by piece: the discard of a large device cannot be interrupted.
pub(crate) fn discard_device(dev: &dyn Device, blocks: u64) {
    const PIECE_BLOCKS: u64 = (1 << 30) / BLOCK_BYTES as u64;
    let mut at = 0;
    while at < blocks {
        let n = PIECE_BLOCKS.min(blocks - at);
        match dev.discard(at, n) {
            Ok(()) => at += n,
            Err(e) if e.kind() == std::io::ErrorKind::Unsupported => return,
            Err(e) => {
                // the volume is as good without
                tracing::warn!("{}: discard: {e}", dev.name());
                return;
            }
        }
    }
}
