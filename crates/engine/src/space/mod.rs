//! Space of one domain: block groups, segments, mlogs, reservations, cleaning.
//!
//! Owns the segment tables and owner tables of the domain's groups. A block has two states: *used* (the running view:
//! what is committed plus what operations took since; in memory only) and *valid* (the committed view: what the home
//! tables say). `alloc` sets used; [`Space::apply`] makes the records of a durable transaction valid, and only there
//! does a freed block become unused, so that no block is reused before the transaction that freed it is durable.
//!
//! Invariants: valid ⊆ used. The home tables never hold uncommitted state. Metadata, journal and blocks past a short
//! group's end are always used and valid. `account` = unused blocks − reserved blocks of the domain.
//!
//! Locks, in this order: an mlog, the right to discard, the pool of free segments, the list of groups, a segment's state
//! or half of its owner table. They are leaves to the rest of the engine: nothing is called with one held but the store, for table I/O. Two
//! mlogs share the counters of free blocks (one per group, one per domain) and nothing else until segments run out.
//!
//! Not promised: fairness between mlogs once no segment is free; that `apply` is called by one thread at a time (the
//! transaction layer sees to it).
//!
//! Multi-head logging, victim choice and slack space recycling are those of F2FS (FAST '15, section 2.4 and 2.5), the
//! independent logs those of Max (ATC '21, section 4.3).

mod account;
mod affinity;
mod alloc;
mod apply;
mod bitmap;
pub mod cleaning;
mod giving;
mod group;
mod home;
mod home_batch;
mod init;
mod inside;
mod limit;
mod limited;
pub(crate) mod paired;
mod pairs_ahead;
mod pool;
mod recycle;
mod replay;
mod reserve;
mod run;
#[cfg(test)]
pub(crate) mod testdev;
#[cfg(test)]
mod tests;
mod trim;
mod victim;

use crate::error::Result;
use crate::store::Store;
pub(crate) use account::Account;
use braidfs_format::group::{Owner, lost_table, table_mark};
use braidfs_format::super_block::MAX_DEVICES;
use braidfs_format::{BlockAddr, Corrupt, DomainId};
use braidfs_sync::slots::Counter;
use braidfs_sync::{Mutex, RwLock, rank};
use crossbeam::utils::CachePadded;
pub(crate) use giving::Emptying;
use group::Group;
pub(crate) use home_batch::HomeBatch;
use limit::Limit;
use paired::{Counts, Residency, TABLE_BLOCKS_MAX, table_blocks};
pub(crate) use pairs_ahead::PairsAhead;
use pool::{Affinity, Mlog, Pool};
pub use run::{Class, Run};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

/// Counts of blocks of a domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SpaceStats {
    /// Blocks that can hold data or nodes: all but metadata and journal.
    pub blocks: u64,
    /// Unused right now, reserved ones included.
    pub free: u64,
    /// Promised to operations that have not yet taken them.
    pub reserved: u64,
    /// Freed by transactions that are not yet durable.
    pub pending: u64,
    /// Kept for metadata and deletions.
    pub hidden: u64,
    /// Segments without a used block.
    pub free_segments: u64,
    /// All segments that can hold any.
    pub segments: u64,
}

/// A segment to clean.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Victim {
    /// Number of its block group.
    pub group: u32,
    /// Its number in the group.
    pub segment: u32,
    /// Its valid blocks and whose they are.
    pub blocks: Vec<(BlockAddr, Owner)>,
}

/// The allocator of one domain.
#[derive(Debug)]
pub struct Space {
    store: Arc<Store>,
    domain: DomainId,
    journal: Option<Run>,
    groups: RwLock<BTreeMap<u32, Arc<Group>>, rank::SpaceGroups>,
    /// So many of them lie on each device: who flushes goes through no groups.
    on_devices: [AtomicU32; MAX_DEVICES],
    mlogs: Box<[CachePadded<Mutex<Mlog, rank::Mlog>>]>,
    /// Which of them threads write to.
    affinity: Affinity,
    pool: Mutex<Pool, rank::SegmentPool>,
    /// Unused − reserved.
    account: Account,
    /// Part of what the domain has that it may not use.
    limit: Limit,
    /// Freed by transactions that are not yet durable.
    pending: Counter,
    /// Blocks that are not metadata or journal.
    total: AtomicU64,
    /// The cleaner's last victims.
    cleaning: cleaning::Cleaning,
    owners: Residency,
    /// Segment tables of later checkpoints did not become valid.
    upto: u64,
    /// Sum of the marks of the segment tables, as they were written last.
    table_sum: AtomicU64,
    /// One write of the home tables at a time.
    home: Mutex<(), rank::SpaceHome>,
    /// Groups that [`Self::open`] found given back.
    returned: Vec<u32>,
    /// Groups whose emptying a panic has ended.
    abandoned: group::Abandoned,
    /// One segment at a time is being discarded.
    trimming: Mutex<(), rank::Trimming>,
    /// Whether segments that become free are noted in `freed`.
    noting: AtomicBool,
    freed: Mutex<BTreeSet<(u32, u32)>, rank::Freed>,
}

/// What a domain header says of the segment tables: see [`braidfs_format::group`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Checkpointed {
    /// The last checkpoint that ended.
    pub checkpoint: u64,
    /// The sum as it left them.
    pub sum: u64,
}

impl Checkpointed {
    /// As `header` says.
    pub fn of(header: &braidfs_format::domain::DomainHeader) -> Self {
        Self { checkpoint: header.checkpoint.get(), sum: header.tables.get() }
    }
}

impl Space {
    /// Opens the space of `domain`: reads the headers and segment tables of its `groups`. `journal` is the domain's
    /// journal, which is never allocated. Of segment tables the last checkpoint that ended counts, with `last`: what a
    /// later one wrote is in the journal, too. Without it the newest ones count.
    ///
    /// # Errors
    /// `Corrupt` where a group's metadata does not hold or is of another domain; of the device.
    pub fn open(
        store: Arc<Store>,
        domain: DomainId,
        mlogs: u16,
        groups: &[u32],
        journal: Option<Run>,
        last: Option<Checkpointed>,
    ) -> Result<Self> {
        let mut space = Self {
            store,
            domain,
            journal,
            groups: RwLock::default(),
            on_devices: Default::default(),
            mlogs: (0..mlogs.max(1)).map(|_| CachePadded::default()).collect(),
            affinity: Affinity::default(),
            pool: Mutex::default(),
            account: Account::default(),
            limit: Limit::default(),
            pending: Counter::default(),
            total: AtomicU64::new(0),
            cleaning: cleaning::Cleaning::default(),
            owners: Residency::new(TABLE_BLOCKS_MAX),
            upto: last.map_or(u64::MAX, |l| l.checkpoint),
            table_sum: AtomicU64::new(0),
            home: Mutex::default(),
            returned: Vec::new(),
            abandoned: group::Abandoned::default(),
            trimming: Mutex::default(),
            noting: AtomicBool::new(false),
            freed: Mutex::default(),
        };
        for &g in groups {
            if space.add_group(g)? {
                continue;
            }
            let holds_journal = journal.is_some_and(|j| space.store.geometry().group_of(j.addr) == g);
            if g == 0 || holds_journal {
                let why =
                    format!("of group {g} says that {domain} gave it back, which has the journal or the root in it");
                return Err(Corrupt::new("segment table", why).into());
            }
            space.returned.push(g);
        }
        Ok(space)
    }

    /// Takes a group into use that [`Space::init_group`] made, or that the domain owned before; false where it had given
    /// that back.
    ///
    /// # Errors
    /// As [`Space::open`].
    pub fn add_group(&self, number: u32) -> Result<bool> {
        self.add_group_when(number, || Ok(()))
    }

    /// [`Self::add_group`], of which no block is had before `known` has told all others whose it is: a commit may be waiting for
    /// room, and what it writes there must be found.
    ///
    /// # Errors
    /// As [`Space::open`]; of `known`.
    pub(crate) fn add_group_when(&self, number: u32, known: impl FnOnce() -> Result<()>) -> Result<bool> {
        let Some(group) = Group::open(&self.store, self.domain, number, self.journal, self.upto)?.map(Arc::new) else {
            return Ok(false);
        };
        {
            let mut groups = self.groups.write();
            if groups.contains_key(&number) {
                return Ok(true);
            }
            groups.insert(number, group.clone());
            // before a block of it can be written to
            if let Some(n) = self.on_device_of(number) {
                n.fetch_add(1, Relaxed);
            }
        }
        known()?;
        self.table_sum.fetch_add(table_mark(number, group.table.lock().seq), Relaxed);
        self.resize(|total| total + u64::from(group.total()));
        // before what is new can be had
        self.withhold();
        self.pool.lock().add_group(&group);
        self.account.add(i64::from(group.free()));
        Ok(true)
    }

    /// The sum of the segment tables' marks, for the domain header.
    pub fn table_sum(&self) -> u64 {
        self.table_sum.load(Relaxed)
    }

    /// Bounds what is kept of the owner tables to about so many bytes.
    pub(crate) fn limit(&mut self, bytes: u64) {
        self.owners.limit(table_blocks(bytes));
    }

    /// Whether many more owner tables are kept than that, because they changed.
    pub(crate) fn has_excess_tables(&self) -> bool {
        self.owners.is_far_beyond()
    }

    /// Memory of the owner tables that are kept: bytes.
    pub(crate) fn table_bytes(&self) -> u64 {
        self.owners.bytes()
    }

    /// How often the tables of group `number` were written.
    pub(crate) fn counts(&self, number: u32) -> Option<Arc<Counts>> {
        self.groups.read().get(&number).map(|g| g.counts.clone())
    }

    /// Why the segment tables are not those that the checkpoint of a header with `sum` left, so that nothing may be
    /// allocated: one was lost. Asked before anything is written.
    pub fn doubt(&self, sum: u64) -> Option<Corrupt> {
        let is = self.table_sum();
        if is == sum {
            return None;
        }
        let marks: Vec<(u32, u64)> = self.groups.read().values().map(|g| (g.number, g.table.lock().seq)).collect();
        // of which group it is can only be guessed, where more than one is lost
        self.groups.read().values().for_each(|g| g.counts.doubt());
        let which = lost_table(&marks, sum).map_or("one".into(), |g| format!("that of group {g}"));
        let why = format!("{}: {which} is not the newest: the device lost a write", self.domain);
        Some(Corrupt::new("segment table", why))
    }

    /// The epoch of the claim by which the domain has group `number`; `None` where it has it not.
    pub fn epoch(&self, number: u32) -> Option<u32> {
        self.groups.read().get(&number).map(|g| g.epoch)
    }

    /// Whether something valid lies at `addr`.
    ///
    /// # Errors
    /// `Corrupt` where it is not of this domain.
    pub fn is_valid(&self, addr: BlockAddr) -> Result<bool> {
        let (group, segment, block) = self.locate(addr)?;
        let state = group.segments[segment as usize].state.lock();
        Ok(bitmap::get(&state.entry.valid, block))
    }

    /// The domain's groups, in order.
    pub fn groups(&self) -> Vec<u32> {
        self.groups.read().keys().copied().collect()
    }

    fn on_device_of(&self, group: u32) -> Option<&AtomicU32> {
        self.on_devices.get(self.store.device_of(group)?)
    }

    /// Numbers of the devices that the domain's groups lie on, rising. Takes no lock.
    pub fn devices(&self) -> impl Iterator<Item = usize> + '_ {
        self.on_devices.iter().enumerate().filter(|(_, n)| n.load(Relaxed) > 0).map(|(i, _)| i)
    }

    /// Blocks that are neither in use nor promised, about. Takes no lock, and goes through no groups.
    pub(crate) fn unused(&self) -> u64 {
        (self.account.sum() + self.withheld()).max(0) as u64
    }

    /// Counts for `statfs` and for the cleaner.
    pub fn stats(&self) -> SpaceStats {
        let (free_segments, segments) = {
            let pool = self.pool.lock();
            (pool.len() as u64, pool.segments as u64)
        };
        // what is unused in a group that gives none out is nothing that the account has
        let (shut, free) = self.groups.read().values().fold((0, 0), |(shut, free), g| {
            let n = u64::from(g.free());
            if g.is_closed() { (shut + n, free) } else { (shut, free + n) }
        });
        SpaceStats {
            blocks: self.total.load(Relaxed).saturating_sub(shut),
            free,
            reserved: (free as i64 - self.withheld() - self.account.sum()).max(0) as u64,
            pending: self.pending.sum().max(0) as u64,
            hidden: self.hidden(),
            free_segments,
            segments,
        }
    }

    /// Blocks that are not metadata or journal, used and unused. Takes no lock.
    pub(crate) fn blocks_in_all(&self) -> u64 {
        self.total.load(Relaxed)
    }

    /// Blocks in use or promised.
    pub(crate) fn used(&self) -> u64 {
        let s = self.stats();
        s.blocks.saturating_sub((s.free + s.pending).saturating_sub(s.reserved))
    }

    /// The group of the domain that holds `addr`, and the place there: segment, block in the segment.
    fn locate(&self, addr: BlockAddr) -> Result<(Arc<Group>, u32, u32)> {
        let outside = || Corrupt::new("block address", format!("{addr} lies outside {}", self.domain));
        if !self.store.geometry().contains(addr, 1) {
            return Err(outside().into());
        }
        let (number, segment, block) = self.store.geometry().split(addr);
        let group = self.groups.read().get(&number).cloned().ok_or_else(outside)?;
        Ok((group, segment, block))
    }
}
