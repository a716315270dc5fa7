//! Node table of one domain: which nodes exist and where the newest durable record of each lies.
//!
//! Owns the node table blocks of the domain's groups, the choice of free slots and a small cache of node blocks. As in
//! [`crate::space`], there are two views: *taken* slots (committed ones plus what operations took; in memory only) and
//! the committed entries, which [`NodeTable::apply`] changes and [`NodeTable::write_home`] writes. The slot of a node
//! that was removed becomes free when the removal is durable.
//!
//! Nothing is read when the table is opened. A table block is read when one of its nodes is asked for or a slot is
//! looked for in it; its bitmap of taken slots then stays (32 bytes), its entries as long as they are in use.
//! [`NodeTable::free`] reads whatever was not read yet: call it once in the background after mounting.
//!
//! Locks, in this order: a cursor, the list of groups (read while a table block is used), a table block; a shard of the
//! block cache by itself. They are
//! leaves to the rest of the engine: nothing is called with one held but the store, for table I/O.
//!
//! Not promised: that `apply` may be called by several threads at a time for the same node.

mod cache;
mod free_slots;
mod giving;
mod home;
mod newest;
mod slots;
#[cfg(test)]
mod tests;

use crate::budget::Budget;
use crate::error::{Error, Result};
use crate::space::Space;
use crate::space::paired::{Residency, TABLE_BLOCKS_MAX, table_blocks};
use crate::store::Store;
use braidfs_format::geometry::NODES_PER_BLOCK;
use braidfs_format::journal::Record;
use braidfs_format::node::{NodeBlock, NodeEntry, NodeRecord, RECORDS_MAX};
use braidfs_format::{Corrupt, DomainId, NodeId};
use braidfs_sync::slots::{Counter, Line, PerSlot};
use braidfs_sync::{Mutex, PassLock, PassPart, rank};
use cache::{BlockCache, Kind};
pub(crate) use giving::Closing;
use slots::{Cursor, NodeGroup};
use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

type Groups = BTreeMap<u32, Arc<NodeGroup>>;
/// A group that stays the domain's for as long as this lives: not to be held where the list of groups is read again.
type GroupRef<'a> = PassPart<'a, NodeGroup, Groups, rank::NodeGroups>;

/// The node table of one domain.
#[derive(Debug)]
pub struct NodeTable {
    store: Arc<Store>,
    domain: DomainId,
    groups: PassLock<Groups, rank::NodeGroups>,
    /// Threads look for slots in table blocks of their own.
    cursors: PerSlot<Mutex<Cursor, rank::NodeCursor>>,
    total: AtomicU64,
    /// There are slots of the reserve only ([`NodeGroup::reserved`]), or were. Read by each operation, seldom written.
    few: Line<AtomicBool>,
    /// Free slots of the table blocks that were read; see `uncounted`.
    free: Counter,
    /// Table blocks that were not read yet.
    uncounted: Line<AtomicU64>,
    resident: Line<Residency>,
    cache: BlockCache,
    /// Slots that stay taken when their removal is applied, until they are released.
    quarantined: Mutex<std::collections::HashSet<NodeId>, rank::QuarantinedNumbers>,
    /// One write of the home tables at a time.
    home: Mutex<(), rank::NodesHome>,
    /// How many generations a new inode skips ([`NodeTable::set_mounts`]).
    mount: u32,
}

/// So many mounts, one after the other, give generations of their own.
const MOUNTS_APART: u32 = 1024;

impl NodeTable {
    /// Opens the node table of `domain`, which owns `groups`, all of them open in `space`.
    ///
    /// # Errors
    /// `Corrupt` where a group lies outside the volume.
    pub fn open(store: Arc<Store>, domain: DomainId, groups: &[u32], space: &Space) -> Result<Self> {
        let table = Self {
            store,
            domain,
            groups: PassLock::default(),
            cursors: PerSlot::default(),
            total: AtomicU64::new(0),
            few: Line::default(),
            free: Counter::default(),
            uncounted: Line(AtomicU64::new(0)),
            resident: Line(Residency::new(TABLE_BLOCKS_MAX)),
            cache: BlockCache::default(),
            quarantined: Mutex::default(),
            home: Mutex::default(),
            mount: 0,
        };
        groups.iter().try_for_each(|&g| table.add_group(g, space))?;
        Ok(table)
    }

    /// The domain was opened for writing so often before. A number that was given out and not committed before a crash is free
    /// again, and its next inode must be another one for who holds the old one's handle: each mount gives generations that
    /// are as many higher.
    pub fn set_mounts(&mut self, mounts: u32) {
        // far fewer than there are generations, and no handle is held over so many mounts
        self.mount = mounts % MOUNTS_APART;
    }

    /// Bounds what is kept of the tables and of node blocks and buckets to about so many bytes each.
    pub fn limit(&mut self, bytes: u64) {
        self.resident.0.limit(table_blocks(bytes));
        self.cache.limit(bytes);
    }

    /// Has what is read of node blocks and buckets charged there.
    pub fn charge(&mut self, budget: Arc<Budget>) {
        self.cache.charge(budget);
    }

    /// Whether many more table blocks are kept than that, because they changed.
    pub(crate) fn has_excess_tables(&self) -> bool {
        self.resident.is_far_beyond()
    }

    /// Memory of the tables, node blocks and buckets that are kept: bytes.
    pub fn memory_bytes(&self) -> u64 {
        self.resident.bytes() + self.cache.bytes()
    }

    /// Takes a group into use that the domain claimed (initialised by `Space::init_group`) or owned before, and that
    /// `space` has.
    ///
    /// # Errors
    /// As [`NodeTable::open`].
    pub fn add_group(&self, number: u32, space: &Space) -> Result<()> {
        let geometry = self.store.geometry();
        let Some(counts) = space.counts(number) else {
            let why = format!("group {number} of {} is not of {}", geometry.groups, self.domain);
            return Err(Corrupt::new("node table", why).into());
        };
        let mut groups = self.groups.write();
        if groups.contains_key(&number) {
            return Ok(());
        }
        groups.insert(number, Arc::new(NodeGroup::new(number, geometry.node_blocks(), counts)));
        self.uncounted.fetch_add(u64::from(geometry.node_blocks()), Relaxed);
        self.few.store(false, Relaxed);
        // Node 0 is none.
        self.total.fetch_add(u64::from(geometry.nodes()) - u64::from(number == 0), Relaxed);
        Ok(())
    }

    /// The committed entry of `node`; one that is not used where the slot is free.
    ///
    /// # Errors
    /// `Corrupt` where the node is not of this domain; of the device.
    pub fn get(&self, node: NodeId) -> Result<NodeEntry> {
        let entry = {
            let (group, index, slot) = self.locate(node)?;
            self.with_block(&group, index, |block| Ok(block.entries(self.tables(), &group, index)?[slot as usize]))
        };
        self.evict_entries();
        entry
    }

    /// [`Self::get`] for a number that may be anybody's: `None` where the group is not the domain's.
    ///
    /// # Errors
    /// Of the device.
    pub fn look(&self, node: NodeId) -> Result<Option<NodeEntry>> {
        let known = self.store.geometry().node_place(node).is_some_and(|(g, _)| self.groups.read().contains_key(&g));
        if known { self.get(node).map(Some) } else { Ok(None) }
    }

    /// Applies the [`Record::Node`]s of a durable transaction (others are ignored). An entry that is not used frees the
    /// slot.
    ///
    /// # Errors
    /// `Corrupt` where a node, or the block it is said to lie in, is not of this domain; of the device. The records
    /// before the one that failed are then applied.
    pub fn apply(&self, records: &[Record]) -> Result<()> {
        let done = records.iter().try_for_each(|record| match *record {
            Record::Node { node, entry } => self.set(node, entry),
            _ => Ok(()),
        });
        self.evict_entries();
        done
    }

    fn set(&self, node: NodeId, entry: NodeEntry) -> Result<()> {
        if entry.used() {
            let group = self.store.geometry().group_of(entry.addr);
            let ours = self.store.geometry().contains(entry.addr, 1) && self.groups.read().contains_key(&group);
            if !ours || usize::from(entry.index) >= RECORDS_MAX {
                let why = format!("{node}: record {} of {} is not of {}", entry.index, { entry.addr }, self.domain);
                return Err(Corrupt::new("node table entry", why).into());
            }
        }
        let taken = entry.used() || self.quarantined.lock().contains(&node);
        let (group, index, slot) = self.locate(node)?;
        self.with_block(&group, index, |block| {
            block.edit(self.tables(), &group, index)?[slot as usize] = entry;
            block.set_taken(slot, taken);
            group.dirty.store(true, Relaxed);
            Ok(())
        })
    }

    /// Frees all nodes, before anybody uses the domain; those that are made from now on have generations that are higher by
    /// so many.
    ///
    /// # Errors
    /// `Corrupt` where a block does not hold; of the device.
    pub(crate) fn free_all(&self, generations: u32) -> Result<()> {
        let groups: Vec<_> = self.groups.read().values().cloned().collect();
        for group in &groups {
            for index in 0..group.len() {
                self.with_block(group, index, |block| {
                    for entry in block.edit(self.tables(), group, index)? {
                        *entry = NodeEntry {
                            generation: entry.generation.wrapping_add(generations),
                            ..NodeEntry::default()
                        };
                    }
                    (0..NODES_PER_BLOCK)
                        .for_each(|slot| block.set_taken(slot, (group.number, index) == (0, 0) && slot < 2));
                    group.dirty.store(true, Relaxed);
                    Ok(())
                })?;
            }
            self.evict_entries();
        }
        Ok(())
    }

    /// The slot of `node`, whose removal is about to be applied, stays taken until [`NodeTable::release`]: its number must
    /// not come back while something durable may still name it.
    pub fn quarantine(&self, node: NodeId) {
        self.quarantined.lock().insert(node);
    }

    /// Reads the record that `entry` of `node` points to, and checks that it is that node's, in the block that the entry is
    /// about and no older one.
    ///
    /// # Errors
    /// [`Error::NotFound`] where the entry is not used; `Corrupt`; of the device.
    pub fn load(&self, node: NodeId, entry: &NodeEntry) -> Result<NodeRecord> {
        if !entry.used() {
            return Err(Error::NotFound);
        }
        let block = self.cache.get(&self.store, entry.addr, Kind::Nodes)?;
        let record = NodeBlock::record(&block, usize::from(entry.index))?;
        if record.node != node || record.generation != entry.generation {
            let why = format!(
                "record {} of {} is {} generation {}, not {node} generation {}",
                entry.index,
                { entry.addr },
                record.node,
                record.generation,
                { entry.generation }
            );
            return Err(Corrupt::new("node block", why).into());
        }
        // The same nodes may have lain in the same places before: an older block then has all that is asked for.
        let lost = match entry.compare_block(&block) {
            Ordering::Equal => return Ok(record),
            Ordering::Less => "older",
            Ordering::Greater => "newer",
        };
        let why = format!(
            "{} is {lost} than the node table says of {node}: of transaction {:#x}, not {:#x} (low halves)",
            { entry.addr },
            NodeBlock::written(&block),
            { entry.written }
        );
        Err(Corrupt::new("node block", why).into())
    }

    /// The block at `addr`, some bucket of a directory: they lie among the node blocks, and are read ahead with them.
    ///
    /// # Errors
    /// `Corrupt` where it is none; of the device.
    pub fn bucket(&self, addr: braidfs_format::BlockAddr) -> Result<Arc<[u8]>> {
        self.cache.get(&self.store, addr, Kind::Bucket)
    }

    /// Drops the block at `addr` from the cache: it was freed, or was just written and nobody looks for it there yet.
    pub fn invalidate(&self, addr: braidfs_format::BlockAddr) {
        self.cache.invalidate(addr);
    }

    /// Calls `f` with every node of the committed view, in order, no lock held. What changes meanwhile may be seen or
    /// not.
    ///
    /// # Errors
    /// The first of `f`, of the device, or `Corrupt`.
    pub fn for_each_used(&self, f: &mut dyn FnMut(NodeId, NodeEntry) -> Result<()>) -> Result<()> {
        let groups: Vec<_> = self.groups.read().values().cloned().collect();
        groups.iter().try_for_each(|group| self.for_each_in(group, f, &mut Err))
    }

    /// [`Self::for_each_used`] of all that can be read: `failed` is called for each block of the tables that cannot.
    pub fn for_each_readable(&self, f: &mut dyn FnMut(NodeId, NodeEntry), failed: &mut dyn FnMut(Error)) {
        let groups: Vec<_> = self.groups.read().values().cloned().collect();
        for group in groups {
            let mut f = |node, entry| {
                f(node, entry);
                Ok(())
            };
            let mut failed = |e| {
                failed(e);
                Ok(())
            };
            let all = self.for_each_in(&group, &mut f, &mut failed);
            debug_assert!(all.is_ok(), "each block is passed over by itself: {all:?}");
        }
    }

    fn for_each_in(
        &self,
        group: &NodeGroup,
        f: &mut dyn FnMut(NodeId, NodeEntry) -> Result<()>,
        failed: &mut dyn FnMut(Error) -> Result<()>,
    ) -> Result<()> {
        for index in 0..group.len() {
            let entries =
                self.with_block(group, index, |block| Ok(block.entries(self.tables(), group, index)?.to_vec()));
            if group.closed.load(Relaxed) {
                break; // it has no nodes, and may be another domain's by now
            }
            let entries: Vec<NodeEntry> = match entries {
                Ok(entries) => entries,
                Err(e) => {
                    failed(e)?;
                    continue;
                }
            };
            self.evict_entries();
            for (slot, entry) in (0u32..).zip(entries).filter(|(_, e)| e.used()) {
                f(self.store.geometry().node(group.number, index * NODES_PER_BLOCK + slot), entry)?;
            }
        }
        Ok(())
    }

    /// Group, table block and slot in the block of `node`.
    fn locate(&self, node: NodeId) -> Result<(GroupRef<'_>, u32, u32)> {
        let outside = || Corrupt::new("node number", format!("{node} is not of {}", self.domain));
        let (number, slot) = self.store.geometry().node_place(node).ok_or_else(outside)?;
        let group = self.groups.read().find(|groups| groups.get(&number).map(|g| &**g)).ok_or_else(outside)?;
        Ok((group, slot / NODES_PER_BLOCK, slot % NODES_PER_BLOCK))
    }
}
