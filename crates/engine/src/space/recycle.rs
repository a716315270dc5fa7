//! Which segment a log takes next: a free one, or one with slack once there are none.

use super::Space;
use super::pool::SegmentRef;
use super::run::Class;
use braidfs_format::BlockAddr;
use braidfs_format::group::{SegmentKind, Temperature};

/// Segments looked up by one scan for slack.
const RECYCLE_BATCH: usize = 256;
/// Domains with fewer segments keep none back for the cleaner.
const SMALL_DOMAIN: usize = 16;

impl Space {
    /// Hands a segment back to the pool where it has no used block left.
    pub(super) fn offer(&self, seg: &SegmentRef) {
        let mut pool = self.pool.lock();
        pool.offer(seg);
        self.note_free(pool.len());
        drop(pool);
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
            let (group, segment, _) = self.store.geometry().split(near);
            (group, segment)
        });
        let mut pool = self.pool.lock();
        let keep = usize::from(!last && class.temperature != Temperature::Cold && pool.segments >= SMALL_DOMAIN);
        while pool.len() > keep {
            let seg = pool.pop(class, from)?;
            self.note_free(pool.len());
            if seg.group.activate(seg.index, class, |s| s.is_fresh() && !seg.group.is_closed()) {
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
                if seg.group.activate(seg.index, class, |s| s.free() > 0 && !seg.group.is_closed()) {
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
        let mut found = Vec::new();
        for group in self.groups.read().values().filter(|g| g.free() > 0 && !g.is_closed()) {
            for (index, segment) in (0u32..).zip(&group.segments) {
                let free = segment.free();
                if free == 0 || segment.is_fresh() || self.cleaning.has(group.number, index) {
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
