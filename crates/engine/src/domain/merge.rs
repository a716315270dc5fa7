//! Which roll-forward records of a journal count: of each node the newest, of each fsync that reached the device whole.
//!
//! Decoding, and the comparison of data with its checksums, is done by several threads, chunk by chunk; which record is the
//! newest is decided in the order of the chunks.

use super::recovered::{Claim, Forward};
use crate::error::Result;
use crate::planted::{Bug, planted};
use crate::store::Store;
use crate::types::*;
use braidfs_format::BLOCK_BYTES;
use braidfs_format::inode::Inode;
use braidfs_format::journal::{Chunk, ChunkKind, Record};
use braidfs_format::node::{DIR, NodeKind, NodeRecord};
use braidfs_sync::workers::Workers;
use std::collections::{BTreeMap, HashMap};

/// Chunks that one thread has decoded before another has started.
const FEW_CHUNKS: usize = 32;
/// Blocks of data that a thread has in memory: a record may name a GiB of them.
const PIECE_BLOCKS: usize = 256;

/// Merges the roll-forward chunks of transactions after `last`: per inode, its newest records.
///
/// # Errors
/// `Corrupt` where an inode does not hold; of the device.
pub(super) fn merge(
    store: &Store,
    chunks: &[Chunk],
    last: u64,
    workers: &Workers,
    claims: &mut Vec<Claim>,
) -> Result<Vec<Forward>> {
    let mut forward: Vec<&Chunk> =
        chunks.iter().filter(|c| c.kind == ChunkKind::RollForward && c.tx.0 > last).collect();
    forward.sort_by_key(|c| c.pos);
    // a file syncs one at a time, so only its last chunk can be torn; its data is then compared with the checksums
    let about = |c: &Chunk| match c.records.first() {
        Some(Record::Full(r)) if r.flags & DIR == 0 => Some(r.node),
        _ => None,
    };
    let mut latest: HashMap<NodeId, u64> = HashMap::new();
    for c in &forward {
        if let Some(n) = about(c) {
            latest.insert(n, c.pos);
        }
    }
    let looked_at = workers.each(forward.len(), FEW_CHUNKS, |i| {
        let c = forward[i];
        let newest = about(c).is_some_and(|n| latest[&n] == c.pos);
        if newest && !data_holds(store, c)? { Ok(None) } else { claims_of(c).map(Some) }
    })?;
    let mut merged: BTreeMap<NodeId, &NodeRecord> = BTreeMap::new();
    for (c, names) in forward.iter().zip(looked_at) {
        let Some(names) = names else { continue };
        claims.extend(names);
        for r in &c.records {
            if let Record::Full(r) = r {
                let newer = merged.get(&r.node).is_none_or(|o| {
                    r.generation != o.generation || (r.version >= o.version) != planted(Bug::VersionInverted)
                });
                if newer {
                    merged.insert(r.node, r);
                }
            }
        }
    }
    let (inodes, overflow): (Vec<_>, Vec<_>) = merged.into_values().partition(|r| r.kind == NodeKind::Inode);
    let mut by_owner: HashMap<InodeNo, Vec<NodeRecord>> = HashMap::new();
    for r in overflow {
        by_owner.entry(r.owner).or_default().push(r.clone());
    }
    let with_overflow = |i: &NodeRecord| (i.clone(), by_owner.remove(&i.node.inode()).unwrap_or_default());
    Ok(inodes.into_iter().map(with_overflow).collect())
}

/// Names of the inodes in a chunk.
fn claims_of(c: &Chunk) -> Result<Vec<Claim>> {
    let mut claims = Vec::new();
    for r in &c.records {
        if let Record::Full(r) = r
            && r.kind == NodeKind::Inode
        {
            let i = Inode::decode(&r.payload)?;
            claims.extend(i.links.into_iter().map(|link| Claim { ino: r.node.inode(), link, seq: i.link_seq }));
        }
    }
    Ok(claims)
}

/// Whether the data blocks that came with a roll-forward chunk reached the device.
fn data_holds(store: &Store, c: &Chunk) -> Result<bool> {
    if planted(Bug::DataUnchecked) {
        return Ok(true);
    }
    for r in &c.records {
        if let Record::Sums { addr, sums } = r
            && !sums_hold(store, *addr, sums)?
        {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether the blocks from `addr` on have these checksums.
fn sums_hold(store: &Store, addr: BlockAddr, sums: &[u32]) -> Result<bool> {
    if !store.geometry().contains(addr, sums.len() as u64) {
        return Ok(false);
    }
    let mut buf = vec![0u8; sums.len().min(PIECE_BLOCKS) * BLOCK_BYTES];
    let mut at = addr;
    for piece in sums.chunks(PIECE_BLOCKS) {
        let blocks = &mut buf[..piece.len() * BLOCK_BYTES];
        store.read(at, blocks)?;
        if blocks.chunks(BLOCK_BYTES).zip(piece).any(|(b, s)| crc32c::crc32c(b) != *s) {
            return Ok(false);
        }
        at.0 += piece.len() as u64;
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::space::testdev::store;
    use std::sync::atomic::Ordering::Relaxed;

    #[test]
    fn data_is_compared_piece_by_piece() {
        let (device, store) = store(2, 1, 1024);
        let addr = BlockAddr(100);
        let (n, piece) = (2 * PIECE_BLOCKS + 88, PIECE_BLOCKS);
        let data: Vec<u8> = (0..n * BLOCK_BYTES).map(|i| (i / 7 + i / BLOCK_BYTES) as u8).collect();
        store.write(addr, &data).unwrap();
        let mut sums: Vec<u32> = data.chunks(BLOCK_BYTES).map(crc32c::crc32c).collect();
        let before = device.reads.load(Relaxed);
        assert!(sums_hold(&store, addr, &sums).unwrap());
        assert_eq!(device.reads.load(Relaxed) - before, 3, "no more than a piece at a time is in memory");
        for torn in [0, piece - 1, piece, 2 * piece - 1, 2 * piece, n - 1] {
            sums[torn] ^= 1;
            assert!(!sums_hold(&store, addr, &sums).unwrap(), "block {torn}");
            sums[torn] ^= 1;
        }
        assert!(sums_hold(&store, addr, &[]).unwrap());
        assert!(!sums_hold(&store, BlockAddr(u64::MAX), &sums).unwrap());
    }
}
