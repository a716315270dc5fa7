//! Which segment to clean. The moving itself is the file cells' work: they know the newest copy.

use super::{Space, Victim};
use crate::error::Result;
use braidfs_format::BlockAddr;
use braidfs_format::TxId;
use braidfs_format::geometry::SEGMENT_BLOCKS;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// A segment with a higher share of valid blocks, in percent, is not worth moving.
const VALID_MAX_PERCENT: u32 = 95;
/// Segments with fewer blocks to gain at all (behind metadata or journal) are left alone.
const WORTH_BLOCKS: u32 = 32;

impl Space {
    /// The best segment to clean as of transaction `now`, by cost and benefit, (1 − u) · age / (1 + u) (Rosenblum and
    /// Ousterhout, SOSP '91), or by free blocks alone while free segments are few. Neither one that a log is writing nor
    /// one in `skip`; `None` where nothing is worth it. Until the next call, logs do not recycle its slack.
    ///
    /// # Errors
    /// Of the device, or `Corrupt`: its owner table is read.
    pub fn victim(&self, now: TxId, skip: &HashSet<(u32, u32)>) -> Result<Option<Victim>> {
        let groups: Vec<_> = self.groups.read().values().cloned().collect();
        let segments: usize = groups.iter().map(|g| g.segments.len()).sum();
        let greedy = self.pool.lock().len() < (2 * self.mlogs.len()).max(segments / 32);
        let mut best = None;
        for group in &groups {
            for (index, segment) in (0u32..).zip(&group.segments) {
                let total = segment.total();
                if total < WORTH_BLOCKS || segment.is_fresh() || skip.contains(&(group.number, index)) {
                    continue;
                }
                let state = segment.state.lock();
                let valid = state.entry.valid_count() - segment.fixed_count;
                if state.active || valid == 0 || valid * 100 >= total * VALID_MAX_PERCENT {
                    continue;
                }
                let share = f64::from(valid) / f64::from(total);
                let age = now.0.saturating_sub(state.entry.age).max(1);
                let score = if greedy { f64::from(total - valid) } else { (1.0 - share) * age as f64 / (1.0 + share) };
                if best.as_ref().is_none_or(|(s, _, _)| score > *s) {
                    best = Some((score, Arc::clone(group), index));
                }
            }
        }
        let Some((_, group, index)) = best else {
            self.cleaning.store(u64::MAX, Relaxed);
            return Ok(None);
        };
        self.cleaning.store(u64::from(group.number) << 32 | u64::from(index), Relaxed);
        let segment = &group.segments[index as usize];
        let valid = super::bitmap::and_not(&segment.state.lock().entry.valid, &segment.fixed);
        let mut blocks = Vec::new();
        for block in (0..SEGMENT_BLOCKS).filter(|&b| super::bitmap::get(&valid, b)) {
            let owner = group.owner(&self.store, &self.owners, index, block)?;
            blocks.push((BlockAddr(segment.start.0 + u64::from(block)), owner));
        }
        self.evict_owners();
        Ok(Some(Victim { group: group.number, segment: index, blocks }))
    }
}
