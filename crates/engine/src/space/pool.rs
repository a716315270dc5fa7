//! Segments without a used block, and segments with slack to recycle once there are none; those that a log is in; the logs that
//! threads write to.

use super::group::Group;
use super::run::Class;
use braidfs_format::group::SegmentKind;
use braidfs_sync::slots::PerSlot;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
/// A segment of a group.
#[derive(Debug, Clone)]
pub(super) struct SegmentRef {
    pub group: Arc<Group>,
    pub index: u32,
}

/// Free segments of the domain. An entry is a hint: whoever takes it checks under the segment's lock.
#[derive(Debug, Default)]
pub(super) struct Pool {
    pub whole: BTreeMap<(u32, u32), Arc<Group>>,
    /// Behind metadata or journal: shorter, so the node logs, which want short runs, get them first.
    pub partial: BTreeMap<(u32, u32), Arc<Group>>,
    /// Slack found by the last scan, most free blocks last.
    pub slack: Vec<(SegmentKind, SegmentRef)>,
    pub segments: usize,
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
    pub fn pop(&mut self, class: Class, from: (u32, u32)) -> Option<SegmentRef> {
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

/// One log of a domain (Max, section 4.3): the segment that it writes, by temperature.
#[derive(Debug, Default)]
pub(super) struct Mlog {
    pub active: [Option<SegmentRef>; Class::COUNT],
}

/// Home logs of threads, and whether there is only one log for all.
#[derive(Debug, Default)]
pub(super) struct Affinity {
    /// By slot of threads: the home log, plus one; 0: none yet.
    pub homes: PerSlot<AtomicU32>,
    /// Who comes next gets this one.
    next: AtomicU32,
    /// Free segments are few. Changed under the pool's lock.
    pub few: AtomicBool,
    /// The other logs have given up their segments.
    pub gathered: AtomicBool,
}

impl Affinity {
    /// The home log of this thread, of `logs`.
    pub fn home(&self, logs: usize) -> usize {
        let mine = self.homes.mine();
        let home = match mine.load(Relaxed) {
            0 => {
                // counts through all logs: two threads have one only where there are more threads than logs
                let home = self.next.fetch_add(1, Relaxed) % logs as u32 + 1;
                mine.store(home, Relaxed);
                home
            }
            home => home,
        };
        (home as usize - 1) % logs
    }
}
