//! Files that lie in many short pieces are made whole in the background, while nobody asks for anything.
//!
//! A domain notes files of which it writes, or reads, a long list of short extents ([`crate::domain::in_pieces`]). A thread of the background
//! moves some 2 MiB of one of them per look ([`MountedVolume::tidy`]), as long as nothing else changes on the volume and
//! nobody waits for the device: with the first change, and the first read that memory does not answer, it stops for
//! [`QUIET_LOOKS`] looks. It never moves a file that somebody changed lately, and never makes room.

use super::MountedVolume;
use crate::cell::pieces::Defragmented;
use crate::cell::{Body, Cell};
use crate::domain::Domain;
use crate::domain::in_pieces::Progress;
use crate::domain::own_work::as_own;
use crate::error::Error;
use crate::types::*;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// So many looks (of 100 ms) nothing changed and nobody waited for the device.
const QUIET_LOOKS: u32 = 20;
/// So many seconds a file is left alone after it was changed.
const SETTLED_SECONDS: i64 = 10;
/// Blocks moved per look.
const MOST: u64 = 512;
/// Segments of the domain that stay free: twice what lets the cleaner begin. Fewer do where there is more to be had.
const SPARE_SEGMENTS: u64 = 8;
const SPARE_OF_MANY: u64 = 2;
/// Where groups of nobody's have more than this part of what a domain has, room is plenty: one that has too little takes one.
const PLENTY_PART: u64 = 2;

/// What a thread of the background saw of the volume when it last looked, but for what all of them did themselves.
#[derive(Debug, Default)]
pub(super) struct Quiet {
    /// Misses of the cache, and transactions.
    seen: (u64, u64),
    looks: u32,
}

impl Quiet {
    /// Looks: whether it has been quiet for long enough.
    pub fn look(&mut self, mounted: &MountedVolume) -> bool {
        let changed = mounted.domains.iter().any(|d| d.has_changes());
        let others =
            |d: &Arc<Domain>| (d.memory.misses_of_others(), d.counters.ended_by_others.load(Ordering::Relaxed));
        let now = mounted.domains.iter().map(others).fold((0, 0), |sum, of| (sum.0 + of.0, sum.1 + of.1));
        let was = std::mem::replace(&mut self.seen, now);
        let quiet = !changed && was == self.seen;
        self.looks = if quiet { self.looks + 1 } else { 0 };
        self.looks >= QUIET_LOOKS
    }
}

impl MountedVolume {
    /// Moves a part of a file that lies in pieces, if there is one, and room is plenty; whether it did. The next call goes on.
    pub(super) fn tidy(&self, d: &Arc<Domain>) -> bool {
        let Some((ino, from)) = d.in_pieces.lock().next() else { return false };
        let _spending = self.shared.spend(&d.budget);
        let (how, moved) = as_own(|| self.tidy_file(d, ino, from));
        d.in_pieces.lock().done(ino, how);
        moved
    }

    fn tidy_file(&self, d: &Arc<Domain>, ino: InodeNo, from: u64) -> (Progress, bool) {
        let Ok(Some(c)) = d.find(ino) else { return (Progress::Ended { extents: 0 }, false) };
        let age = self.shared.second() - c.state.read().mtime.sec;
        // a time of the future was set by somebody
        if (0..SETTLED_SECONDS).contains(&age) {
            return (Progress::Later, false);
        }
        let unclaimed = self.shared.unclaimed_on(d.devices());
        let plenty = unclaimed > d.space.stats().blocks / PLENTY_PART;
        match self.defragment(&c, from, MOST, if plenty { SPARE_OF_MANY } else { SPARE_SEGMENTS }) {
            Ok(Defragmented { next: Some(from), moved }) => (Progress::GoOn { from }, moved > 0),
            Ok(done) => (ended(&c), done.moved > 0),
            Err(Error::NoSpace) if plenty && self.claim_group(d).is_ok_and(|got| got) => {
                (Progress::GoOn { from }, true)
            }
            Err(Error::NoSpace) => (Progress::Later, false),
            // the domain tells of it itself, or the file is gone
            Err(_) => (ended(&c), false),
        }
    }
}

/// It is as whole as it gets: noted again where it falls to pieces.
fn ended(c: &Cell) -> Progress {
    match &c.state.read().body {
        Body::File(f) => Progress::Ended { extents: f.map.extent_count() },
        _ => Progress::Ended { extents: 0 },
    }
}

#[cfg(test)]
mod tests;
