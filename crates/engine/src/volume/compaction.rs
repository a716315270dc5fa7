//! Compaction of node blocks: records of blocks that are mostly dead are packed together again.

use super::MountedVolume;
use super::cleaner::mark_node;
use crate::domain::{Domain, packed};
use crate::error::Result;
use crate::types::*;
use braidfs_format::BLOCK_BYTES;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Node blocks that one compaction looks at.
const COMPACT_BLOCKS: usize = 512;

impl MountedVolume {
    /// Packs the records of node blocks that are mostly dead together again, for a domain without free space: a commit of
    /// few inodes leaves a block with few records each time. The caller, which is inside no gate, commits afterwards.
    /// Blocks that become free by that, about.
    pub(crate) fn compact_nodes(&self, d: &Arc<Domain>) -> Result<u64> {
        // the new blocks come out of what is left
        let s = d.space.stats();
        let room = s.free.saturating_sub(s.reserved) / 4;
        let now = d.committed_tx();
        let (at, had) = &d.compacted_at;
        // each operation on a full domain asks, and this reads its whole node table
        if at.load(Ordering::Relaxed) == now.0 && room <= had.load(Ordering::Relaxed) {
            return Ok(0);
        }
        let mut live: HashMap<BlockAddr, u32> = HashMap::new();
        d.nodes.for_each_used(&mut |_, e| {
            *live.entry(e.addr).or_insert(0) += 1;
            Ok(())
        })?;
        let mut sparse: Vec<(u32, BlockAddr)> =
            live.into_iter().map(|(a, n)| (n, a)).filter(|(n, _)| *n <= 6).collect();
        sparse.sort();
        sparse.truncate(COMPACT_BLOCKS);
        let mut budget = room as usize * BLOCK_BYTES;
        let (mut chosen, mut bytes_all) = (Vec::new(), 0);
        for (_, addr) in sparse {
            let (records, bytes) = self.live_records(d, addr)?;
            if bytes > 2048 {
                continue;
            }
            if bytes > budget {
                break;
            }
            budget -= bytes;
            bytes_all += bytes;
            chosen.push(records);
        }
        let emptied = (chosen.len() as u64).saturating_sub((bytes_all as u64).div_ceil(packed::BLOCK));
        if emptied == 0 {
            // nothing is changed then: what a change needs would be taken until the next commit
            at.store(now.0, Ordering::Relaxed);
            had.store(room, Ordering::Relaxed);
            return Ok(0);
        }
        for (c, node) in chosen.into_iter().flatten() {
            let e = d.enter()?;
            let mut st = c.state.write();
            if st.deleted {
                continue;
            }
            // what is in records of their own is written again, too
            let fresh = st.durability.dirty_tx() != Some(e.tx().id);
            let inode = if fresh { packed::weight(st.record_bytes()) } else { 0 };
            if inode > packed::BLOCK {
                continue; // it takes more than it gives
            }
            let blocks = e.tx().pack(inode + if node == c.ino.node() { 0 } else { packed::BLOCK });
            if d.space.reserve_for_commit(blocks).is_err() {
                break;
            }
            e.tx().add_credits(blocks);
            d.touch(e.tx(), &c, &mut st)?;
            mark_node(&c, &mut st, node);
        }
        Ok(emptied)
    }
}
