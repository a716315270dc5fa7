//! What the home places of nodes hold: table entries, records and names, as they lie on the device.

use crate::error::{Error, Result};
use crate::rules::record::{node_block, record};
use braidfs_device::AlignedBuf;
use braidfs_format::geometry::NODES_PER_BLOCK;
use braidfs_format::inode::Inode;
use braidfs_format::node::{NodeEntry, NodeRecord, NodeTableBlock};
use braidfs_format::{BLOCK_BYTES, Corrupt, InodeNo, NodeId};
use braidfs_store::Store;
use std::cmp::Ordering;

/// Parents that a path is followed through.
const DEPTH_MAX: usize = 4096;

/// The table entry of a node, as it lies on the device.
///
/// # Errors
/// [`Error::NotFound`] for a number that the volume has not; a table block that does not hold; of the device.
pub fn entry(store: &Store, node: NodeId) -> Result<NodeEntry> {
    let g = store.geometry();
    let (group, slot) = g.node_place(node).ok_or(Error::NotFound)?;
    let addr = g.node_table_addr(group, slot / NODES_PER_BLOCK);
    let mut pair = AlignedBuf::zeroed(2 * BLOCK_BYTES);
    store.read(addr, &mut pair)?;
    let (_, _, entries) = NodeTableBlock::decode(&pair, store.volume, addr)?;
    Ok(entries.get((slot % NODES_PER_BLOCK) as usize).copied().unwrap_or_default())
}

/// The record of a node, as it lies on the device: where a journal was not replayed, perhaps a newer one than the table tells of.
///
/// # Errors
/// [`Error::NotFound`] where the node is not in use; a block or record that does not hold; of the device.
pub fn node(store: &Store, node: NodeId) -> Result<NodeRecord> {
    let e = Some(entry(store, node)?).filter(NodeEntry::used).ok_or(Error::NotFound)?;
    let mut block = AlignedBuf::zeroed(BLOCK_BYTES);
    store.read(e.addr, &mut block)?;
    node_block(&block, store.volume, e.addr)
        .and_then(|()| match e.compare_block(&block) {
            Ordering::Greater => record(&block, node, &NodeEntry { written: 0, ..e }),
            _ => record(&block, node, &e),
        })
        .map_err(|b| Corrupt::new("node record", b.why).into())
}

/// Directory and name of an inode by the first link in its record, as it lies on the device.
pub fn first_name(store: &Store, at: InodeNo) -> Option<(InodeNo, String)> {
    let link = Inode::decode(&node(store, at.node()).ok()?.payload).ok()?.links.into_iter().next()?;
    Some((link.parent, String::from_utf8_lossy(&link.name).into_owned()))
}

/// The path of an inode for messages: `name` tells the directory and the name of each on the way up. `None` where one
/// has none, or the way does not end.
pub fn path(node: InodeNo, mut name: impl FnMut(InodeNo) -> Option<(InodeNo, String)>) -> Option<String> {
    let mut parts: Vec<String> = Vec::new();
    let mut at = node;
    while at != InodeNo::ROOT {
        let (parent, part) = name(at)?;
        parts.push(part);
        at = parent;
        if parts.len() > DEPTH_MAX {
            return None;
        }
    }
    parts.reverse();
    Some(format!("/{}", parts.join("/")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_does_not_end_is_none() {
        assert_eq!(path(InodeNo::ROOT, |_| None).as_deref(), Some("/"));
        assert_eq!(path(InodeNo(9), |_| Some((InodeNo::ROOT, "a".into()))).as_deref(), Some("/a"));
        assert_eq!(path(InodeNo(9), |_| Some((InodeNo(9), "a".into()))), None);
        assert_eq!(path(InodeNo(9), |_| None), None);
    }
}
