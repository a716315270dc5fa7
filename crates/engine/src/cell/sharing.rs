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
    parts: PerSlot<SlotChanges>,
}

/// What the threads of one slot did: one cache line.
#[derive(Debug)]
struct SlotChanges {
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
    seldom: Mutex<Seldom, rank::FirstChanges>,
}
const _: () = assert!(braidfs_sync::CHECKED || size_of::<SlotChanges>() <= 64);

/// What few changes have to tell. Mostly nothing.
type Seldom = Option<Box<Told>>;

#[derive(Debug, Default)]
struct Told {
    /// Buckets of which they made the first change since these were written, by their first position.
    firsts: Vec<u64>,
    /// Transactions of other domains that entries changed with.
    concerned: Frontier,
}

impl Default for SlotChanges {
    fn default() -> Self {
        Self {
            changes: AtomicU64::new(0),
            time: AtomicI64::new(NEVER),
            name_time: AtomicU64::new(0),
            entries: AtomicI64::new(0),
            memory: AtomicI64::new(0),
            seldom: Mutex::default(),
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
    /// Versions of the directory that its changers have made.
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

impl Sums {
    fn and(self, other: Self) -> Self {
        Self {
            changes: self.changes + other.changes,
            time: self.time.max(other.time),
            name_time: self.name_time.max(other.name_time),
            entries: self.entries + other.entries,
            memory: self.memory + other.memory,
        }
    }
}

impl Sharing {
    /// What the parts have, where they have anything.
    pub fn sums(&self) -> Option<Sums> {
        // who sees a change sees what else the part says of it
        let all = self.parts.used().map(|p| (p, p.changes.load(Acquire))).filter(|p| p.1 > 0);
        all.map(|(p, changes)| Sums {
            changes,
            time: unpacked(p.time.load(Relaxed)),
            name_time: p.name_time.load(Relaxed),
            entries: p.entries.load(Relaxed),
            memory: p.memory.load(Relaxed),
        })
        .reduce(Sums::and)
    }

    /// [`Self::sums`], which then begin anew, the buckets that they changed first, and the transactions of other domains that
    /// they concern. Nobody else uses them.
    pub fn take(&mut self) -> Option<(Sums, Vec<u64>, Frontier)> {
        let (mut firsts, mut concerned) = (Vec::new(), Frontier::EMPTY);
        // changes first: a part's line comes to be written at once
        let all = self.parts.used().map(|p| (p, p.changes.swap(0, Acquire))).filter(|p| p.1 > 0);
        let sums = all.map(|(p, changes)| {
            if let Some(mut seldom) = p.seldom.lock().take() {
                firsts.append(&mut seldom.firsts);
                concerned.merge(&seldom.concerned);
            }
            Sums {
                changes,
                // so that a clock which was set back shows
                time: unpacked(p.time.swap(NEVER, Relaxed)),
                name_time: p.name_time.swap(0, Relaxed),
                entries: p.entries.swap(0, Relaxed),
                memory: p.memory.swap(0, Relaxed),
            }
        });
        Some((sums.reduce(Sums::and)?, firsts, concerned))
    }

    /// Transactions of other domains that entries changed with.
    pub fn concerned(&self) -> Frontier {
        let mut all = Frontier::EMPTY;
        // who sees a change sees what it concerns
        self.parts.used().filter(|p| p.changes.load(Acquire) > 0).for_each(|p| {
            if let Some(told) = &*p.seldom.lock() {
                all.merge(&told.concerned);
            }
        });
        all
    }

    /// A name changed, of an inode of the directory's own domain or in this transaction of another one.
    pub fn note(&self, counts: Changed, now: Timestamp, name_time: u64, concerned: Option<(DomainId, TxId)>) {
        let part = self.parts.mine();
        if let Some((domain, tx)) = concerned {
            part.seldom.lock().get_or_insert_default().concerned.raise(domain, tx);
        }
        if let Some(first) = counts.first {
            part.seldom.lock().get_or_insert_default().firsts.push(first);
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
