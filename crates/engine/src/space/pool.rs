//! Segments without a used block, and segments with slack to recycle once there are none.

use super::group::Group;
use super::{Class, Space};
use braidfs_format::BlockAddr;
use braidfs_format::group::{SegmentKind, Temperature};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// Segments looked up by one scan for slack.
const RECYCLE_BATCH: usize = 256;
/// Domains with fewer segments keep none back for the cleaner.
const SMALL_DOMAIN: usize = 16;

/// A segment of a group.
#[derive(Debug, Clone)]
pub(super) struct SegmentRef {
    pub group: Arc<Group>,
    pub index: u32,
}

/// Free segments of the domain. An entry is a hint: whoever takes it checks under the segment's lock.
#[derive(Debug, Default)]
pub(super) struct Pool {
    whole: BTreeMap<(u32, u32), Arc<Group>>,
    /// Behind metadata or journal: shorter, so the node logs, which want short runs, get them first.
    partial: BTreeMap<(u32, u32), Arc<Group>>,
    /// Slack found by the last scan, most free blocks last.
    slack: Vec<(SegmentKind, SegmentRef)>,
    segments: usize,
}

impl Pool {
    pub fn len(&self) -> usize {
        self.whole.len() + self.partial.len()
    }
    pub fn add_group(&mut self, group: &Arc<Group>) {
        self.segments += group.segments.iter().filter(|s| s.total() > 0).count();
        (0..group.segments.len() as u32).for_each(|index| self.offer(&SegmentRef { group: group.clone(), index }));
    }
    /// Forgets the segments of a group that was closed, or of which nothing more is to be had.
    pub fn remove_group(&mut self, group: &Group) {
        self.segments = self.segments.saturating_sub(group.segments.iter().filter(|s| s.total() > 0).count());
        for index in 0..group.segments.len() as u32 {
            self.whole.remove(&(group.number, index));
            self.partial.remove(&(group.number, index));
        }
        self.slack.retain(|(_, seg)| seg.group.number != group.number);
    }
    /// Takes in a segment where it has become free.
    pub fn offer(&mut self, seg: &SegmentRef) {
        let segment = &seg.group.segments[seg.index as usize];
        let state = segment.state.lock();
        if seg.group.is_closed() {
            return;
        }
        if segment.is_fresh() && !state.active {
            let set = if segment.fixed_count == 0 { &mut self.whole } else { &mut self.partial };
            set.insert((seg.group.number, seg.index), seg.group.clone());
        }
    }
    fn pop(&mut self, class: Class, from: (u32, u32)) -> Option<SegmentRef> {
        let lowest = |set: &BTreeMap<(u32, u32), Arc<Group>>| set.keys().next().map_or(u32::MAX, |(g, _)| *g);
        // what stays when files go keeps to the lowest groups, so that the others can be given back
        let set = match class.kind {
            SegmentKind::Node if lowest(&self.partial) <= lowest(&self.whole) => &mut self.partial,
            SegmentKind::Node => &mut self.whole,
            _ if self.whole.is_empty() => &mut self.partial,
            _ => &mut self.whole,
        };
        let key = *set.range(from..).next().or_else(|| set.iter().next())?.0;
        let group = set.remove(&key)?;
        Some(SegmentRef { group, index: key.1 })
    }
}

impl Space {
    /// Hands a segment back to the pool where it has no used block left.
    pub(super) fn offer(&self, seg: &SegmentRef) {
        self.pool.lock().offer(seg);
        self.freed(seg);
    }

    /// Forgets a segment that recovery found to be used.
    pub(super) fn withdraw(&self, group: u32, index: u32) {
        let mut pool = self.pool.lock();
        pool.whole.remove(&(group, index));
        pool.partial.remove(&(group, index));
    }

    /// A free segment for `class`, after `near` if there is one. Ordinary logs leave the last one to the cleaner (which
    /// writes to cold logs), or it could not move anything; with `last`, they take that too.
    pub(super) fn take_free(&self, class: Class, near: Option<BlockAddr>, last: bool) -> Option<SegmentRef> {
        let from = near.map_or((0, 0), |near| {
            let (group, segment, _) = self.store.geometry.split(near);
            (group, segment)
        });
        let mut pool = self.pool.lock();
        let keep = usize::from(!last && class.temperature != Temperature::Cold && pool.segments >= SMALL_DOMAIN);
        while pool.len() > keep {
            let seg = pool.pop(class, from)?;
            if seg.group.segments[seg.index as usize].activate(class, |s| s.is_fresh() && !seg.group.is_closed()) {
                return Some(seg);
            }
        }
        None
    }

    /// Whether free segments are fewer than the logs that could want one.
    pub(super) fn segments_scarce(&self) -> bool {
        self.pool.lock().len() <= self.mlogs.len()
    }

    /// An inactive segment with slack, of the class's kind if there is one; made active.
    pub(super) fn recycle(&self, class: Class) -> Option<SegmentRef> {
        let mut pool = self.pool.lock();
        let mut scanned = false;
        loop {
            let best = pool.slack.iter().rposition(|(kind, _)| *kind == class.kind);
            if let Some(at) = best.or_else(|| pool.slack.len().checked_sub(1).filter(|_| scanned)) {
                let (_, seg) = pool.slack.remove(at);
                if seg.group.segments[seg.index as usize].activate(class, |s| s.free() > 0 && !seg.group.is_closed()) {
                    return Some(seg);
                }
            } else if scanned {
                return None;
            } else {
                scanned = true;
                pool.slack = self.scan_slack(class.kind);
            }
        }
    }

    /// Inactive segments with unused blocks: `kind` last, and among equals the ones with most unused blocks last.
    fn scan_slack(&self, kind: SegmentKind) -> Vec<(SegmentKind, SegmentRef)> {
        let cleaning = self.cleaning.load(Relaxed);
        let mut found = Vec::new();
        for group in self.groups.read().values().filter(|g| g.free() > 0 && !g.is_closed()) {
            for (index, segment) in (0u32..).zip(&group.segments) {
                let free = segment.free();
                if free == 0 || segment.is_fresh() || cleaning == u64::from(group.number) << 32 | u64::from(index) {
                    continue;
                }
                let state = segment.state.lock();
                if !state.active {
                    found.push(((state.kind == kind, free), state.kind, SegmentRef { group: group.clone(), index }));
                }
            }
        }
        found.sort_by_key(|f| f.0);
        let excess = found.len().saturating_sub(RECYCLE_BATCH);
        found.drain(excess..).map(|(_, kind, seg)| (kind, seg)).collect()
    }
}
