//! Blocks for the records of an inode that joins a transaction outside of an operation, to have its dirty pages written.
//!
//! The operation that made them dirty had blocks reserved for the transaction of its time. Where that was committed without the pages
//! (`data=writeback`), or is being committed, the inode's records are written once more, in another one: by a commit that must not find
//! the domain full.

use super::tx::Tx;
use super::{Domain, packed};
use crate::cell::{Body, FileBody, State};
use braidfs_format::inode::NOCOW;
use braidfs_format::node::PAYLOAD_MAX;

/// Extents that take no more than so many bytes have room in a record, whatever else is in it.
const IN_RECORD: usize = 512;
/// Bytes of extents in a leaf at least, but for a few.
const LEAF_BYTES: usize = PAYLOAD_MAX / 2;
/// Leaves that an index node names, at least.
const LEAVES_OF_INDEX: usize = 100;
/// Bytes of the extents by which a run of pages adds to a map: its own, and the rest of the one in which it lies.
const RUN_BYTES: usize = 32;
/// Pages of an extent that has checksums, at most.
const SUMS_OF_EXTENT: usize = 256;

/// What is promised, until it is the transaction's ([`Domain::keep_promise`]).
#[derive(Debug, Default)]
pub(super) struct Promised {
    blocks: u64,
    /// Of the inode's record, where the transaction does not have it yet.
    weight: u64,
    /// Leaves of its extents that the transaction had to write before; `None` where it is known what becomes of them.
    leaves: Option<usize>,
}

/// Nodes of extents that change where the map comes by so many bytes, in so many runs.
fn nodes_of(f: &FileBody, runs: usize, bytes: usize) -> usize {
    let had = f.map.encoded_bytes();
    if had + bytes <= IN_RECORD {
        return 0;
    }
    let leaves = had / LEAF_BYTES + 1;
    (2 * runs).min(leaves) + bytes / LEAF_BYTES + 1 + indexes_of(f)
}

fn indexes_of(f: &FileBody) -> usize {
    f.map.encoded_bytes() / LEAF_BYTES / LEAVES_OF_INDEX + 2
}

/// Runs of dirty pages.
fn dirty_runs(f: &FileBody) -> usize {
    let mut next = None;
    f.pages.dirty_blocks().filter(|l| next.replace(l + 1) != Some(*l)).count()
}

impl Domain {
    /// Promises blocks for what a transaction writes of a file's records once its dirty pages have their places; `None` where the
    /// domain has too few. Nothing where an operation of this transaction had them reserved.
    pub(super) fn promise_records(&self, tx: &Tx, st: &mut State) -> Option<Promised> {
        let fresh = st.durability.dirty_tx() != Some(tx.id);
        let late = self.lazy_data();
        if !fresh && !late {
            return Some(Promised::default());
        }
        let (mut bytes, mut nodes, mut leaves) = (0, 0, None);
        if late && let Body::File(f) = &st.body {
            let (dirty, runs) = (f.pages.dirty_count(), dirty_runs(f));
            let sums = if self.shared.data_sums && st.flags & NOCOW == 0 { size_of::<u32>() * dirty } else { 0 };
            bytes = (runs + dirty / SUMS_OF_EXTENT) * RUN_BYTES + sums;
            nodes = nodes_of(f, runs, bytes);
            leaves = Some(f.map.dirty_leaves());
        }
        let weight = if fresh { packed::weight(st.record_bytes_with(bytes)) } else { 0 };
        let blocks = weight.div_ceil(packed::BLOCK) + nodes as u64;
        // it makes room: what it overwrites becomes free, and what was reserved for it
        self.space.reserve(blocks, true).ok()?;
        Some(Promised { blocks, weight, leaves })
    }

    /// Hands promised blocks to the transaction, as many as it will need by now, and gives the others back.
    pub(super) fn keep_promise(&self, tx: &Tx, promised: Promised, st: &State) {
        let Promised { blocks, weight, leaves } = promised;
        let nodes = match (&st.body, leaves) {
            (Body::File(f), Some(before)) if f.map.encoded_bytes() > IN_RECORD => {
                let changed = f.map.dirty_leaves().saturating_sub(before);
                changed + if changed > 0 { indexes_of(f) } else { 0 }
            }
            _ => 0,
        };
        let needs = tx.pack(weight) + nodes as u64;
        let kept = needs.min(blocks);
        self.space.unreserve(blocks - kept);
        tx.add_credits(kept);
        // The places are in more pieces than was to be expected: out of what is kept for commits. Where it is not there the commit
        // looks again.
        if needs > kept && self.space.reserve_for_commit(needs - kept).is_ok() {
            tx.add_credits(needs - kept);
        }
    }
}
