//! Which segment to clean. `volume/cleaner.rs` moves its blocks, by the cells that they belong to: these know the newest copy.

use super::cleaning::Choice;
use super::{Space, Victim};
use crate::error::Result;
use braidfs_format::BlockAddr;
use braidfs_format::TxId;
use braidfs_format::geometry::SEGMENT_BLOCKS;
use std::collections::HashSet;
use std::sync::Arc;

/// Segments with fewer blocks to gain at all (behind metadata or journal) are left alone.
const WORTH_BLOCKS: u32 = 32;
/// After so many transactions it is tried again whether something moves out of a segment: what keeps a block in its place is not told
/// by the tables of space.
const TRIED_AGAIN: u64 = 1024;

impl Space {
    /// The best segment to clean as of transaction `now`, by cost and benefit, (1 − u) · age / (1 + u) (Rosenblum and
    /// Ousterhout, SOSP '91), or by free blocks alone. Neither one that a log is writing nor
    /// one in `skip`, those of this look, nor one of which nothing moved since its valid blocks changed ([`Self::note_stays`]);
    /// `None` where nothing is worth it. Until the next look, logs do not recycle its slack.
    ///
    /// # Errors
    /// Of the device, or `Corrupt`: its owner table is read.
    pub fn victim(&self, now: TxId, skip: &HashSet<(u32, u32)>, how: Choice) -> Result<Option<Victim>> {
        // of a large domain that is a long look
        if skip.is_empty() && self.cleaning.has_no_victim(now, how) {
            return Ok(None);
        }
        let groups: Vec<_> = self.groups.read().values().cloned().collect();
        let mut best = None;
        for group in &groups {
            for (index, segment) in (0u32..).zip(&group.segments) {
                let total = segment.total();
                if total < WORTH_BLOCKS || segment.is_fresh() || skip.contains(&(group.number, index)) {
                    continue;
                }
                let state = segment.state.lock();
                let valid = state.entry.valid_count() - segment.fixed_count;
                if state.active || valid == 0 || valid * 100 >= total * how.valid_max {
                    continue;
                }
                if state.stays.is_some_and(|(n, since)| n == valid && now.0 < since.0.saturating_add(TRIED_AGAIN)) {
                    continue;
                }
                let share = f64::from(valid) / f64::from(total);
                let age = now.0.saturating_sub(state.entry.age).max(1);
                let score =
                    if how.greedy { f64::from(total - valid) } else { (1.0 - share) * age as f64 / (1.0 + share) };
                if best.as_ref().is_none_or(|(s, _, _)| score > *s) {
                    best = Some((score, Arc::clone(group), index));
                }
            }
        }
        let Some((_, group, index)) = best else {
            if skip.is_empty() {
                self.cleaning.clear();
                self.cleaning.note_no_victim(now, how);
            }
            return Ok(None);
        };
        self.cleaning.add(group.number, index, skip.len());
        // found to have slack before
        self.pool.lock().slack.retain(|(_, s)| (s.group.number, s.index) != (group.number, index));
        let segment = &group.segments[index as usize];
        let valid = super::bitmap::and_not(&segment.state.lock().entry.valid, &segment.fixed);
        let owned = |block| {
            let owner = group.owner(&self.store, &self.owners, index, block)?;
            Ok((BlockAddr(segment.start.0 + u64::from(block)), owner))
        };
        let blocks: Result<Vec<_>> =
            (0..SEGMENT_BLOCKS).filter(|&b| super::bitmap::get(&valid, b)).map(owned).collect();
        // whose they are cannot be read: the next look takes another segment
        let blocks = blocks.inspect_err(|_| segment.note_stays(super::bitmap::count(&valid), now))?;
        self.evict_owners();
        Ok(Some(Victim { group: group.number, segment: index, blocks }))
    }
    /// None of a victim's blocks can move, as of transaction `now`: others are better, however little it has.
    pub fn note_stays(&self, v: &Victim, now: TxId) {
        let groups = self.groups.read();
        if let Some(segment) = groups.get(&v.group).and_then(|g| g.segments.get(v.segment as usize)) {
            segment.note_stays(v.blocks.len() as u32, now);
        }
    }
}
