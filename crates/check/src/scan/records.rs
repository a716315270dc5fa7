//! Reads all node records of a domain in the order of the device.

use crate::codes;
use crate::parts::domain::Domain;
use crate::read::runs;
use crate::report::{Bad, Log};
use crate::rules::record::{node_block, record};
use braidfs_device::{AlignedBuf, BLOCK_BYTES};
use braidfs_format::node::{NodeEntry, NodeRecord};
use braidfs_format::{BlockAddr, NodeId};
use braidfs_store::Store;

/// Most node blocks read at once.
const RUN_BLOCKS: u64 = 64;

/// A node in use: address (48 bits) and index of its record, and its number. Sorted, they are in the order of the
/// device.
type Place = (u64, NodeId);

fn addr_of(place: &Place) -> BlockAddr {
    BlockAddr(place.0 >> 8)
}

/// Calls `f` with the records of all used entries, in the order of the device; entries without one are freed.
pub fn each(
    store: &Store,
    log: &mut Log,
    domain: &mut Domain,
    f: &mut dyn FnMut(&mut Log, &mut Domain, NodeEntry, NodeRecord),
) {
    let g = store.geometry();
    let mut used: Vec<Place> = Vec::with_capacity(domain.groups.values().map(|g| g.entries.used().count()).sum());
    for group in domain.groups.values() {
        let place = |e: &NodeEntry| e.addr.0 << 8 | u64::from(e.index);
        used.extend(group.entries.used().map(|(slot, e)| (place(e), g.node(group.number, slot))));
    }
    used.sort_unstable();
    let mut buf = AlignedBuf::zeroed(RUN_BLOCKS as usize * BLOCK_BYTES);
    for (first, blocks, some) in runs(&used, |p| addr_of(p).0, RUN_BLOCKS) {
        let whole = store.read(BlockAddr(first), &mut buf[..blocks as usize * BLOCK_BYTES]).is_ok();
        for of_block in some.chunk_by(|a, b| addr_of(a) == addr_of(b)) {
            let addr = addr_of(&of_block[0]);
            if !domain.holds(store, addr, 1) {
                for &(_, node) in of_block {
                    log.add(codes::ENTRY_PLACE, Some(node), format!("the node table names {addr}, no data block"));
                    domain.free_node(store, node);
                }
                continue;
            }
            let at = (addr.0 - first) as usize * BLOCK_BYTES;
            if !whole {
                // which one cannot be read is told by itself
                buf[at..][..BLOCK_BYTES].copy_from_slice(&log.read(store, addr, 1));
            }
            let block = &buf[at..][..BLOCK_BYTES];
            let holds = node_block(block, store.volume, addr);
            for &(_, node) in of_block {
                let entry = domain.entry(store, node).unwrap_or_default();
                // node 0 has no entry of its own
                let found = match &holds {
                    _ if node.0 == 0 => Err(Bad::new(codes::ENTRY_PLACE, "node 0 is in use")),
                    Err(bad) => Err(bad.clone()),
                    Ok(()) => record(block, node, &entry),
                };
                match found {
                    Ok(r) => f(log, domain, entry, r),
                    Err(bad) => {
                        log.add(bad.code, Some(node), bad.why);
                        domain.free_node(store, node);
                    }
                }
            }
        }
    }
}
