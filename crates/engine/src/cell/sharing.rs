//! What threads that change one directory at the same time change of the directory itself ([`super::changers`]): it lies in
//! parts, one per slot of threads, until it is put together.

use super::dir::open::Changed;
use crate::braid::frontier::Frontier;
use crate::types::*;
use braidfs_sync::slots::PerSlot;
use braidfs_sync::{Mutex, rank};
use std::sync::atomic::{
    AtomicI64, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};

/// What threads changed side by side.
#[derive(Debug, Default)]
pub struct Sharing {
    parts: PerSlot<Part>,
}

/// What the threads of one slot did.
#[derive(Debug)]
struct Part {
    /// Versions that they made.
    changes: AtomicU64,
    /// Time of the latest change: seconds, and in the lower [`NANOS`] bits nanoseconds. [`NEVER`] where there is none.
    time: AtomicI64,
    /// Latest logical time of a name taken or left.
    name_time: AtomicU64,
    /// Entries added, less those taken away.
    entries: AtomicI64,
    /// Memory that entries take, so, too.
    memory: AtomicI64,
    /// Buckets of which they made the first change since these were written.
    first: Mutex<Vec<u64>, rank::FirstChanges>,
    /// Transactions of other domains that entries changed with.
    concerned: Mutex<Frontier, rank::Concerned>,
}

impl Default for Part {
    fn default() -> Self {
        Self {
            changes: AtomicU64::new(0),
            time: AtomicI64::new(NEVER),
            name_time: AtomicU64::new(0),
            entries: AtomicI64::new(0),
            memory: AtomicI64::new(0),
            first: Mutex::default(),
            concerned: Mutex::default(),
        }
    }
}

/// Before all times.
const NEVER: i64 = i64::MIN;

/// Bits of the nanoseconds of a time.
const NANOS: u32 = 30;

/// The seconds that fit beside the nanoseconds: up to the year 2242.
const SECONDS: std::ops::RangeInclusive<i64> = -(1 << (63 - NANOS))..=(1 << (63 - NANOS)) - 1;

/// Rises with the time. What has no place is the first or last time that has one.
fn packed(t: Timestamp) -> i64 {
    t.sec.clamp(*SECONDS.start(), *SECONDS.end()) << NANOS | i64::from(t.nsec)
}

fn unpacked(t: i64) -> Timestamp {
    Timestamp { sec: t >> NANOS, nsec: (t & ((1 << NANOS) - 1)) as u32 }
}

/// Sums over the parts.
#[derive(Debug, Clone, Copy)]
pub struct Sums {
    /// Versions made.
    pub changes: u64,
    /// Time of the latest change.
    pub time: Timestamp,
    /// Latest logical time of a name taken or left.
    pub name_time: u64,
    /// Entries added, less those taken away.
    pub entries: i64,
    /// Memory that they take, so, too.
    pub memory: i64,
}

impl Sharing {
    /// What the parts have, where they have anything.
    pub fn sums(&self) -> Option<Sums> {
        // who sees a change sees what else the part says of it
        let all = self.parts.iter().map(|p| (p, p.changes.load(Acquire))).filter(|p| p.1 > 0);
        all.map(|(p, changes)| Sums {
            changes,
            time: unpacked(p.time.load(Relaxed)),
            name_time: p.name_time.load(Relaxed),
            entries: p.entries.load(Relaxed),
            memory: p.memory.load(Relaxed),
        })
        .reduce(|a, b| Sums {
            changes: a.changes + b.changes,
            time: a.time.max(b.time),
            name_time: a.name_time.max(b.name_time),
            entries: a.entries + b.entries,
            memory: a.memory + b.memory,
        })
    }

    /// [`Self::sums`], which then begin anew, the buckets that they changed first, and the transactions of other domains that
    /// they concern. Nobody else uses them.
    pub fn take(&mut self) -> Option<(Sums, Vec<u64>, Frontier)> {
        let sums = self.sums()?;
        let (mut first, mut concerned) = (Vec::new(), Frontier::EMPTY);
        self.parts.iter().filter(|p| p.changes.load(Relaxed) > 0).for_each(|p| {
            p.changes.store(0, Relaxed);
            // so that a clock which was set back shows
            p.time.store(NEVER, Relaxed);
            p.name_time.store(0, Relaxed);
            p.entries.store(0, Relaxed);
            p.memory.store(0, Relaxed);
            first.append(&mut p.first.lock());
            concerned.merge(&std::mem::take(&mut p.concerned.lock()));
        });
        Some((sums, first, concerned))
    }

    /// Transactions of other domains that entries changed with.
    pub fn concerned(&self) -> Frontier {
        let mut all = Frontier::EMPTY;
        // who sees a change sees what it concerns
        self.parts.iter().filter(|p| p.changes.load(Acquire) > 0).for_each(|p| all.merge(&p.concerned.lock()));
        all
    }

    /// A name changed, of an inode of the directory's own domain or in this transaction of another one.
    pub fn note(&self, counts: Changed, now: Timestamp, name_time: u64, concerned: Option<(DomainId, TxId)>) {
        let part = self.parts.mine();
        if let Some((domain, tx)) = concerned {
            part.concerned.lock().raise(domain, tx);
        }
        if let Some(first) = counts.first {
            part.first.lock().push(first);
        }
        part.entries.fetch_add(counts.entries, Relaxed);
        part.memory.fetch_add(counts.memory, Relaxed);
        part.name_time.fetch_max(name_time, Relaxed);
        let time = packed(now);
        // the other one may have taken a later time, and be faster
        if part.time.load(Relaxed) < time {
            part.time.fetch_max(time, Relaxed);
        }
        part.changes.fetch_add(1, Release);
    }
}
