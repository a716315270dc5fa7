//! The newest entry that a replay has for each node, before it goes to the node table: a journal may name a node a hundred
//! times, and a table block is read, changed and counted once.

use super::slots::NodeGroup;
use super::{NODES_PER_BLOCK, NodeTable};
use crate::error::Result;
use crate::space::PairsAhead;
use braidfs_format::node::{NodeEntry, RECORDS_MAX};
use braidfs_format::{Corrupt, NodeId};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// Table blocks whose entries are gathered before they go to the table: bounds the memory, 12 MiB. Tests have small tables.
const BLOCKS_MAX: usize = if cfg!(test) { 2 } else { 2048 };
/// In `Newest::places`: nothing yet.
const NONE: u32 = u32::MAX;

/// Entries of nodes, the newest of each. Of one thread; several may have nodes of different groups.
pub(crate) struct Newest<'t> {
    table: &'t NodeTable,
    /// The domain's groups, by rising numbers, and per table block where it is in `blocks`.
    groups: Vec<(Arc<NodeGroup>, Box<[u32]>)>,
    blocks: Vec<Block>,
    /// The block of the last node.
    last: usize,
    /// Blocks of the group that the last entry led to.
    ours: Range<u64>,
    ahead: PairsAhead,
}

/// What is set in a table block.
struct Block {
    /// Place of the group in `Newest::groups`, and the block's in the group.
    at: (usize, u32),
    /// The first of its nodes.
    first: u64,
    set: [u64; 4],
    entries: [NodeEntry; NODES_PER_BLOCK as usize],
}

impl NodeTable {
    /// Gathers what a replay says of nodes. Records set states, so bringing to the table what is there already changes
    /// nothing. Several threads may do so at a time, each with nodes of groups of its own.
    pub(crate) fn newest(&self) -> Newest<'_> {
        let with_places = |g: &Arc<NodeGroup>| (g.clone(), vec![NONE; g.blocks.len()].into_boxed_slice());
        let groups: Vec<_> = self.groups.read().values().map(with_places).collect();
        // room that is not touched before it is needed: to move blocks to larger and larger room takes longer
        let most = groups.iter().map(|(g, _)| g.blocks.len()).sum::<usize>().min(BLOCKS_MAX);
        Newest {
            table: self,
            groups,
            blocks: Vec::with_capacity(most),
            last: 0,
            ours: 0..0,
            ahead: PairsAhead::default(),
        }
    }
}

impl Newest<'_> {
    /// The entry of `node` is this one from now on.
    ///
    /// # Errors
    /// `Corrupt` where the node, or the block that the entry leads to, is not of the domain; of the device.
    pub fn set(&mut self, node: NodeId, entry: NodeEntry) -> Result<()> {
        if entry.used() && (!self.ours.contains(&{ entry.addr }.0) || usize::from(entry.index) >= RECORDS_MAX) {
            self.look_where_it_leads(node, entry)?;
        }
        let slot = match self.blocks.get(self.last).map(|b| node.0.wrapping_sub(b.first)) {
            Some(slot) if slot < u64::from(NODES_PER_BLOCK) => slot as usize,
            _ => self.go_to(node)?,
        };
        let block = &mut self.blocks[self.last];
        block.set[slot / 64] |= 1 << (slot % 64);
        block.entries[slot] = entry;
        Ok(())
    }

    /// Sets `ours` to the group that `entry` leads to.
    fn look_where_it_leads(&mut self, node: NodeId, entry: NodeEntry) -> Result<()> {
        let (table, geometry) = (self.table, self.table.store.geometry());
        let number = geometry.group_of(entry.addr);
        let ours = geometry.contains(entry.addr, 1) && self.group(number).is_some();
        if !ours || usize::from(entry.index) >= RECORDS_MAX {
            let why = format!("{node}: record {} of {} is not of {}", entry.index, { entry.addr }, table.domain);
            return Err(Corrupt::new("node table entry", why).into());
        }
        // the last group of a device may be short
        let start = geometry.group_start(number).0;
        self.ours = start..start + u64::from(table.store.group_blocks(number));
        Ok(())
    }

    fn group(&self, number: u32) -> Option<usize> {
        self.groups.binary_search_by_key(&number, |(g, _)| g.number).ok()
    }

    /// Goes to the block of `node`; its slot there.
    fn go_to(&mut self, node: NodeId) -> Result<usize> {
        let outside = || Corrupt::new("node number", format!("{node} is not of {}", self.table.domain));
        let (number, slot) = self.table.store.geometry().node_place(node).ok_or_else(outside)?;
        let group = self.group(number).ok_or_else(outside)?;
        let (index, slot) = (slot / NODES_PER_BLOCK, slot % NODES_PER_BLOCK);
        if self.groups[group].1[index as usize] == NONE {
            if self.blocks.len() >= BLOCKS_MAX {
                self.bring_home()?;
            }
            self.groups[group].1[index as usize] = self.blocks.len() as u32;
            let first = node.0 - u64::from(slot);
            let entries = [NodeEntry::default(); NODES_PER_BLOCK as usize];
            self.blocks.push(Block { at: (group, index), first, set: [0; 4], entries });
        }
        self.last = self.groups[group].1[index as usize] as usize;
        Ok(slot as usize)
    }

    /// Sets all of it in the node table, in the order of the table blocks.
    ///
    /// # Errors
    /// `Corrupt` where a table block does not hold; of the device.
    pub fn bring_home(&mut self) -> Result<()> {
        let mut blocks = std::mem::take(&mut self.blocks);
        blocks.sort_unstable_by_key(|b| b.at);
        let done = blocks.iter().try_for_each(|b| {
            let (group, places) = &mut self.groups[b.at.0];
            places[b.at.1 as usize] = NONE;
            put(self.table, group, b, &mut self.ahead)
        });
        blocks.clear();
        // the memory is used again
        (self.blocks, self.last) = (blocks, 0);
        self.table.evict_entries();
        done
    }
}

/// Brings one block to the table.
fn put(table: &NodeTable, group: &NodeGroup, new: &Block, ahead: &mut PairsAhead) -> Result<()> {
    let index = new.at.1;
    let quarantined = table.quarantined.lock().clone();
    table.with_block(group, index, |block| {
        block.fill_ahead(table.tables(), group, index, ahead);
        let entries = block.edit(table.tables(), group, index)?;
        let slots = (0..NODES_PER_BLOCK).filter(|s| new.set[(s / 64) as usize] >> (s % 64) & 1 == 1);
        slots.clone().for_each(|s| entries[s as usize] = new.entries[s as usize]);
        for s in slots {
            let node = NodeId(new.first + u64::from(s));
            block.set_taken(s, new.entries[s as usize].used() || quarantined.contains(&node));
        }
        group.dirty.store(true, Relaxed);
        Ok(())
    })
}
