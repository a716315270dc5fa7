//! Reads node records: all of a domain in the order of the device, or single ones where the node table says they are.

use super::codes;
use super::inodes::changed;
use super::model::{Domain, Log};
use crate::error::Result;
use braidfs_device::{AlignedBuf, BLOCK_BYTES};
use braidfs_format::node::{NodeBlock, NodeEntry, NodeRecord};
use braidfs_format::{BlockAddr, NodeId};
use braidfs_store::Store;

/// Most node blocks read at once.
const RUN_BLOCKS: u64 = 64;
/// Blocks nobody asks for that are read along rather than cutting a read in two.
const GAP_BLOCKS: u64 = 8;

/// Reads single records. The last block is kept: neighbours often lie in one.
pub struct Records<'a> {
    store: &'a Store,
    domain: &'a Domain,
    at: Option<BlockAddr>,
    block: AlignedBuf,
}

impl<'a> Records<'a> {
    /// Of `domain`.
    pub fn new(store: &'a Store, domain: &'a Domain) -> Self {
        Self { store, domain, at: None, block: AlignedBuf::zeroed(BLOCK_BYTES) }
    }

    /// The entry and record of `node`.
    ///
    /// # Errors
    /// Where it has none, or what lies there is another.
    pub fn get(&mut self, node: NodeId) -> Result<(NodeEntry, NodeRecord)> {
        let entry = self.domain.entry(self.store, node).filter(NodeEntry::used);
        let entry = entry.ok_or_else(|| changed(node, "it is not in the node table"))?;
        if self.at != Some(entry.addr) {
            self.at = None;
            self.store.read(entry.addr, &mut self.block)?;
            NodeBlock::check(&self.block, self.store.volume, entry.addr)?;
            self.at = Some(entry.addr);
        }
        let record = NodeBlock::record(&self.block, usize::from(entry.index))?;
        if (record.node, record.gener) != (node, entry.gener) {
            return Err(changed(node, "another record lies there").into());
        }
        Ok((entry, record))
    }
}

/// A node in use: address (48 bits) and index of its record, and its number. Sorted, they are in the order of the device.
type Place = (u64, NodeId);

fn addr_of(place: &Place) -> BlockAddr {
    BlockAddr(place.0 >> 8)
}

/// Node blocks that are near each other, read together.
struct Run {
    first: u64,
    blocks: u64,
    buf: AlignedBuf,
}

impl Run {
    /// The node block at which `todo` begins, which is not empty.
    fn block(&mut self, store: &Store, log: &mut Log, todo: &[Place]) -> Result<AlignedBuf, String> {
        let addr = addr_of(&todo[0]);
        if !(self.first..self.first + self.blocks).contains(&addr.0) {
            self.read(store, todo);
        }
        let block = match self.buf.get((addr.0 - self.first) as usize * BLOCK_BYTES..).filter(|_| self.blocks > 0) {
            Some(b) => {
                let mut block = AlignedBuf::zeroed(BLOCK_BYTES);
                block.copy_from_slice(&b[..BLOCK_BYTES]);
                block
            }
            // which one cannot be read is told by itself
            None => log.read(store, addr, 1),
        };
        match NodeBlock::check(&block, store.volume, addr) {
            Ok(_) => Ok(block),
            Err(e) => Err(e.to_string()),
        }
    }

    /// Reads from the first block of `todo` on; nothing where that fails.
    fn read(&mut self, store: &Store, todo: &[Place]) {
        let first = addr_of(&todo[0]).0;
        let group = store.geometry.group_of(BlockAddr(first));
        let mut last = first;
        for next in todo.iter().map(addr_of) {
            let near = next.0 <= last + 1 + GAP_BLOCKS && next.0 < first + RUN_BLOCKS;
            if !near || store.geometry.group_of(next) != group {
                break;
            }
            last = next.0;
        }
        (self.first, self.blocks) = (first, last + 1 - first);
        if store.read(BlockAddr(first), &mut self.buf[..self.blocks as usize * BLOCK_BYTES]).is_err() {
            self.blocks = 0;
        }
    }
}

/// Calls `f` with the records of all used entries, in the order of the device; entries without one are freed.
pub fn each(
    store: &Store,
    log: &mut Log,
    domain: &mut Domain,
    f: &mut dyn FnMut(&mut Log, &mut Domain, NodeId, NodeEntry, NodeRecord),
) {
    let g = store.geometry;
    let mut used: Vec<Place> = Vec::with_capacity(domain.groups.values().map(|g| g.entries.used().count()).sum());
    for group in domain.groups.values() {
        let place = |e: &NodeEntry| e.addr.0 << 8 | u64::from(e.index);
        used.extend(group.entries.used().map(|(slot, e)| (place(e), g.node(group.number, slot))));
    }
    used.sort_unstable();
    let mut run = Run { first: 0, blocks: 0, buf: AlignedBuf::zeroed(RUN_BLOCKS as usize * BLOCK_BYTES) };
    let mut at = None;
    let mut block = Err(String::new());
    for (i, place) in used.iter().enumerate() {
        // node 0 has no entry of its own
        let (addr, node) = (addr_of(place), place.1);
        let entry = domain.entry(store, node).unwrap_or(NodeEntry { addr, ..NodeEntry::default() });
        if node.0 == 0 || !domain.holds(store, entry.addr, 1) {
            log.add(codes::ENTRY_PLACE, Some(node), format!("the node table names {}, no data block", entry.addr));
            domain.free_node(store, node);
            continue;
        }
        if at != Some(entry.addr) {
            at = Some(entry.addr);
            block = run.block(store, log, &used[i..]);
        }
        let record = match &block {
            Ok(b) => NodeBlock::record(b, usize::from(entry.index)).map_err(|e| (codes::RECORD, e.to_string())),
            Err(e) => Err((codes::NODE_BLOCK, e.clone())),
        };
        let record = record.and_then(|r| {
            if (r.node, r.gener) == (node, entry.gener) {
                return Ok(r);
            }
            let why = format!(
                "record {} of {} is of {} generation {}, not {}",
                entry.index, entry.addr, r.node, r.gener, entry.gener
            );
            Err((codes::RECORD, why))
        });
        match record {
            Ok(r) => f(log, domain, node, entry, r),
            Err((code, why)) => {
                log.add(code, Some(node), why);
                domain.free_node(store, node);
            }
        }
    }
}
