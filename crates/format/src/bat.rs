//! Block group allocation table: which domain owns which group (SpanFS 3.2.1).
//!
//! Blocks of entries in shadow pairs on device 0. A claim or release of a group changes one entry, so it
//! is atomic by the pair and needs no journal of its own.

use crate::block::{BlockKind, HEADER_BYTES, open_pair, seal};
use crate::{BLOCK_BYTES, Corrupt, DomainId};

/// Entries in a block.
pub const ENTRIES_PER_BLOCK: u32 = 500;
const ENTRY_BYTES: usize = 8;

/// Owner of one group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BatEntry {
    /// `None`: the group is free and its metadata may never have been written.
    pub domain: Option<DomainId>,
    /// Rises with each change of the owner.
    pub epoch: u32,
}

/// The sealed block number `index` (its pair starts at device block `pair`), for copy `copy` (0 or 1).
pub fn encode(entries: &[BatEntry], volume: u32, pair: u64, copy: usize, seq: u64) -> Vec<u8> {
    assert!(entries.len() <= ENTRIES_PER_BLOCK as usize);
    let mut b = vec![0u8; BLOCK_BYTES];
    for (i, e) in entries.iter().enumerate() {
        let at = HEADER_BYTES + i * ENTRY_BYTES;
        b[at..at + 2].copy_from_slice(&e.domain.map_or(0, |d| d.0 + 1).to_le_bytes());
        b[at + 4..at + 8].copy_from_slice(&e.epoch.to_le_bytes());
    }
    seal(&mut b, BlockKind::Bat, 0xffff, volume, pair + copy as u64, seq);
    b
}

/// Decodes the pair at device block `pair`: which copy holds, its `seq`, and `count` entries.
///
/// # Errors
/// [`Corrupt`] where no copy holds or an entry names no domain below `domains`.
pub fn decode(
    buf: &[u8],
    volume: u32,
    pair: u64,
    count: usize,
    domains: u16,
) -> Result<(usize, u64, Vec<BatEntry>), Corrupt> {
    let (copy, h) = open_pair(buf, BlockKind::Bat, volume, pair)?;
    let b = &buf[copy * BLOCK_BYTES..];
    let mut out = Vec::with_capacity(count);
    for i in 0..count.min(ENTRIES_PER_BLOCK as usize) {
        let at = HEADER_BYTES + i * ENTRY_BYTES;
        let d = u16::from_le_bytes([b[at], b[at + 1]]);
        if d > domains {
            return Err(Corrupt::new("block group allocation table", format!("entry {i} names domain {}", d - 1)));
        }
        let epoch = u32::from_le_bytes([b[at + 4], b[at + 5], b[at + 6], b[at + 7]]);
        out.push(BatEntry { domain: (d > 0).then(|| DomainId(d - 1)), epoch });
    }
    Ok((copy, h.seq.get(), out))
}
