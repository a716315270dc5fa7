//! Dirty pages in the way of a cache that is over its budget: whose are written, and by whom.
//!
//! Those of domains that hold more than their *share*: as much as all may hold so that together they keep to the budget, where one
//! that holds less leaves the rest to the others, and nobody's share is below its floor (max-min fairness). They are written by who
//! uses these domains, and by a thread of the background, which whoever comes first asks. A thread whose own domain keeps to its
//! share waits for none of that: it takes the room of clean pages, and where those who should write do not keep up, it writes some
//! small files of others.

use super::MountedVolume;
use super::eviction::Held;
use crate::domain::Domain;
use crate::domain::ceiling::dirty_pages_of;
use crate::domain::flush::Flushed;
use crate::panics::caught;
use std::ops::ControlFlow;
use std::sync::Arc;

/// Who finds another thread writing for its domain goes on where less than this part of the budget is beyond it, or where a third
/// one waits already; and who keeps to its share writes nothing of others.
const PATIENCE_PART: u64 = 8;
/// Pages of others that a thread writes at a time whose own domain keeps to its share.
const HELP_PAGES: usize = 256;

/// The most that each may hold, but for higher floors, so that all together hold no more than `goal`: of what each `holds` and its
/// floor, bytes.
fn share_of(all: impl Iterator<Item = (u64, u64)> + Clone, goal: u64) -> u64 {
    let together = |share: u64| all.clone().map(|(holds, floor)| holds.min(floor.max(share))).sum::<u64>();
    let (mut fits, mut beyond) = (0, goal.saturating_add(1));
    while beyond - fits > 1 {
        let middle = fits + (beyond - fits) / 2;
        if together(middle) <= goal { fits = middle } else { beyond = middle }
    }
    fits
}

impl MountedVolume {
    /// Whether so much of the cache is dirty that it must be written for others to have room.
    pub(super) fn is_dirt_in_the_way(&self) -> bool {
        self.dirty_pages() * 4096 > self.cache_budget() / 2
    }

    /// Domains that hold more than their share and can write, those with most beyond it first.
    fn beyond_share(&self, held: &Held) -> Vec<&Arc<Domain>> {
        let all = self.domains.iter().zip(held.taken.iter().map(|t| t.bytes())).zip(&held.floors);
        // what a domain that failed holds dirty stays: the others have to do without
        let (failed, able): (Vec<_>, Vec<_>) = all.partition(|((d, _), _)| d.failed().is_some());
        let stays: u64 = failed.iter().map(|((_, bytes), _)| bytes).sum();
        let goal = held.goal().saturating_sub(held.tables).saturating_sub(stays);
        let share = share_of(able.iter().map(|((_, bytes), floor)| (*bytes, **floor)), goal);
        let beyond = |((d, bytes), floor): ((_, u64), &u64)| {
            let d: &Arc<Domain> = d;
            bytes.checked_sub(share.max(*floor)).filter(|n| *n > 0).map(|n| (n, d))
        };
        let mut heavy: Vec<_> = able.into_iter().filter_map(beyond).collect();
        heavy.sort_by_key(|(n, d)| (std::cmp::Reverse(*n), d.id));
        heavy.into_iter().map(|(_, d)| d).collect()
    }

    /// Has dirty pages written that are in the way of a cache over its budget, by a thread that has used `d` and has nothing locked.
    pub(super) fn write_back_for(&self, d: &Domain) {
        if !self.is_dirt_in_the_way() {
            return;
        }
        let held = Held::of(self);
        let much = held.used > held.budget + held.budget / PATIENCE_PART;
        let heavy = self.beyond_share(&held);
        let (own, others): (Vec<_>, Vec<_>) = heavy.into_iter().partition(|o| o.id == d.id);
        let others: Vec<_> = others.into_iter().filter(|o| o.memory.dirty() > 0).collect();
        if !others.is_empty() {
            self.calls.ask();
        }
        if !own.is_empty() {
            if let Some(_one) = d.memory.begin_to_write_back(much)
                && self.is_dirt_in_the_way()
            {
                d.write_dirty();
            }
        } else if much {
            // of one after the other, until it has written something
            others.iter().any(|o| o.write_some(HELP_PAGES) > 0);
        }
    }

    /// Writes back whenever somebody asks, until the calls end.
    pub(super) fn serve_calls(&self) {
        while self.calls.wait() {
            // who asked does not wait for it; who asks next finds the thread
            let _ = caught("writing back for want of memory", || self.write_back());
        }
    }

    /// The background's part of it: all domains beyond their share, until enough is written.
    pub(super) fn write_back(&self) {
        let held = Held::of(self);
        if held.used <= held.budget || !self.is_dirt_in_the_way() {
            return;
        }
        for d in self.beyond_share(&held) {
            if !self.is_dirt_in_the_way() {
                break;
            }
            // where another thread is at it, that one does
            if let Some(_one) = d.memory.begin_to_write_back(false) {
                d.write_dirty();
            }
        }
    }
}

impl Domain {
    /// Writes small files, of so many dirty pages together at most, where neither the journal nor a lock keeps it waiting: for who
    /// has nothing to do with this domain. Pages written.
    fn write_some(&self, most: usize) -> usize {
        let mut left = most;
        self.cells.visit(|c| {
            let fits = |n: &usize| (1..=left).contains(n);
            let Some(dirty) = dirty_pages_of(c).filter(fits) else { return ControlFlow::Continue(()) };
            match self.flush_cell_at_once(c) {
                Ok(Flushed::Yes) => left -= dirty,
                Ok(Flushed::Locked) => {}
                // the domain says itself that it has failed
                Ok(Flushed::NoRoom) | Err(_) => return ControlFlow::Break(()),
            }
            if left == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        most - left
    }
}

#[cfg(test)]
mod tests;
