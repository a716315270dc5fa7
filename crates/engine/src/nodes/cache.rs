//! Node blocks read lately, checked. Least recently used out first, per shard.
//!
//! A block on its way from the device while it is invalidated does not enter: it may be what lay there before.

use crate::error::Result;
use crate::store::Store;
use braidfs_format::node::NodeBlock;
use braidfs_format::{BLOCK_BYTES, BlockAddr};
use braidfs_sync::{Mutex, rank};
use crossbeam::utils::CachePadded;
use std::collections::HashMap;
use std::sync::Arc;

const SHARDS: usize = 16;
const SHARD_BLOCKS: usize = 32;

#[derive(Debug, Default)]
pub(super) struct BlockCache {
    shards: [CachePadded<Mutex<Shard, rank::NodeCache>>; SHARDS],
}

#[derive(Debug, Default)]
struct Shard {
    /// Block, and the tick of its last use.
    blocks: HashMap<u64, (Arc<[u8]>, u64)>,
    tick: u64,
    invalidations: u64,
}

impl BlockCache {
    fn shard(&self, addr: BlockAddr) -> &Mutex<Shard, rank::NodeCache> {
        &self.shards[addr.0 as usize % SHARDS]
    }

    /// The checked node block at `addr`.
    pub fn get(&self, store: &Store, addr: BlockAddr) -> Result<Arc<[u8]>> {
        let invalidations = {
            let mut shard = self.shard(addr).lock();
            shard.tick += 1;
            let tick = shard.tick;
            if let Some((block, used)) = shard.blocks.get_mut(&addr.0) {
                *used = tick;
                return Ok(block.clone());
            }
            shard.invalidations
        };
        let mut buf = vec![0u8; BLOCK_BYTES];
        store.read(addr, &mut buf)?;
        NodeBlock::check(&buf, store.volume, addr)?;
        let block: Arc<[u8]> = buf.into();
        let mut shard = self.shard(addr).lock();
        if shard.invalidations == invalidations {
            if shard.blocks.len() >= SHARD_BLOCKS
                && let Some(oldest) = shard.blocks.iter().min_by_key(|(_, (_, used))| *used).map(|(&addr, _)| addr)
            {
                shard.blocks.remove(&oldest);
            }
            let tick = shard.tick;
            shard.blocks.insert(addr.0, (block.clone(), tick));
        }
        Ok(block)
    }

    pub fn invalidate(&self, addr: BlockAddr) {
        let mut shard = self.shard(addr).lock();
        shard.invalidations += 1;
        shard.blocks.remove(&addr.0);
    }
}
