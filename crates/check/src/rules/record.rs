//! Rules of node blocks and the records in them.

use super::corrupt;
use crate::codes;
use crate::read::read_scattered;
use crate::report::{Bad, Checked};
use braidfs_format::node::{NodeBlock, NodeEntry, NodeKind, NodeRecord};
use braidfs_format::{BLOCK_BYTES, BlockAddr, InodeNo, NodeId};
use braidfs_store::Store;
use std::cmp::Ordering;

/// The node block at `addr` is one.
///
/// # Errors
/// [`codes::NODE_BLOCK`].
pub fn node_block(block: &[u8], volume: u32, addr: BlockAddr) -> Checked<()> {
    NodeBlock::check(block, volume, addr).map(|_| ()).map_err(corrupt(codes::NODE_BLOCK))
}

/// The record of `node`, whose table entry is `entry`, in the node block `block`.
///
/// # Errors
/// [`codes::RECORD`] where it does not hold, or is of another node or generation; [`codes::NODE_BLOCK_OLD`] and
/// [`codes::ENTRY_OLD`] where it is that node's, and the block is not the one that the entry is about.
pub fn record(block: &[u8], node: NodeId, entry: &NodeEntry) -> Checked<NodeRecord> {
    let r = NodeBlock::record(block, usize::from(entry.index)).map_err(corrupt(codes::RECORD))?;
    if (r.node, r.generation) == (node, entry.generation) {
        return age(block, entry).map(|()| r);
    }
    let (index, addr, want) = (entry.index, entry.addr, entry.generation);
    let why = format!("record {index} of {addr} is of {} generation {}, not of {node} {want}", r.node, r.generation);
    Err(Bad::new(codes::RECORD, why))
}

/// `block` was written by the transaction that `entry` tells of. Where the same nodes lay in the same places before, nothing
/// else tells an older block from the newest one.
///
/// # Errors
/// [`codes::NODE_BLOCK_OLD`], [`codes::ENTRY_OLD`].
pub fn age(block: &[u8], entry: &NodeEntry) -> Checked<()> {
    let code = match entry.compare_block(block) {
        Ordering::Equal => return Ok(()),
        Ordering::Less => codes::NODE_BLOCK_OLD,
        Ordering::Greater => codes::ENTRY_OLD,
    };
    let (addr, written, found) = (entry.addr, entry.written, NodeBlock::written(block));
    let why = format!("{addr} is of transaction {found:#x}, the node table says {written:#x} (low halves)");
    Err(Bad::new(code, why))
}

/// A node is an overflow node of `owner` of this kind.
///
/// # Errors
/// [`codes::OVERFLOW_MISSING`].
pub fn overflow(node: NodeId, is: (InodeNo, NodeKind), owner: InodeNo, kind: NodeKind) -> Checked<()> {
    if is == (owner, kind) {
        return Ok(());
    }
    let why = format!("overflow {node} is {:?} of {}, not {kind:?}", is.1, is.0);
    Err(Bad::new(codes::OVERFLOW_MISSING, why))
}

/// The finding of an overflow node that is not there.
pub fn missing(node: NodeId, kind: NodeKind) -> Bad {
    Bad::new(codes::OVERFLOW_MISSING, format!("overflow {node} ({kind:?}) is missing"))
}

/// The payloads of overflow nodes of `owner`, read from where their table entries say.
///
/// # Errors
/// Of the first block or record that does not hold, or is no such node of `owner`.
pub fn read_overflow(
    store: &Store,
    owner: InodeNo,
    nodes: &[(NodeId, NodeEntry)],
    kind: NodeKind,
) -> Checked<Vec<Option<Vec<u8>>>> {
    let addrs: Vec<BlockAddr> = nodes.iter().map(|n| n.1.addr).collect();
    let blocks = read_scattered(store, &addrs).map_err(|b| Bad { at: None, ..b })?;
    let payload = |((node, e), block): (&(NodeId, NodeEntry), &[u8])| {
        node_block(block, store.volume, e.addr)?;
        let r = record(block, *node, e)?;
        overflow(*node, (r.owner, r.kind), owner, kind)?;
        Ok(Some(r.payload))
    };
    nodes.iter().zip(blocks.chunks(BLOCK_BYTES)).map(payload).collect()
}
