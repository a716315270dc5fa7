//! Blocks of node records and buckets of directories that were read lately, checked.
//!
//! A block on its way from the device while it is invalidated does not enter: it may be what lay there before. A commit
//! invalidates each node block that it wrote when the write is durable and before an entry of the node table names the
//! block, and each bucket when it is written and before its directory may leave memory. So a block that nobody names may
//! be read at any time, also in the midst of its write: what came of that is never looked at.
//!
//! That allows reading ahead. Inodes that were made together lie together, and the buckets of their directories among
//! them, so a walk through a tree that is not in memory asks for all blocks of a run, in the order of its names. Where a
//! block is missed soon after another one near it, the aligned [`RUN`] blocks round it are read at once (ext4 does so with
//! its inode tables, `inode_readahead_blks`); a miss by itself, as in look-ups at random, reads one block.

use crate::budget::Budget;
use crate::error::Result;
use crate::store::Store;
use crate::types::{Way, hashed_place};
use braidfs_device::AlignedBuf;
use braidfs_format::dentry::check_bucket;
use braidfs_format::node::NodeBlock;
use braidfs_format::{BLOCK_BYTES, BlockAddr, Corrupt};
use braidfs_sync::{Mutex, rank};
use crossbeam::utils::CachePadded;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

const SHARDS: usize = 16;
/// Blocks of a shard at most, 8 MiB of a domain: a tree of some ten thousand files is read once, in whatever order.
const SHARD_BLOCKS: usize = 128;
/// At least: a run enters all shards.
const SHARD_BLOCKS_MIN: usize = 8;
/// Blocks read at once where misses lie close together. One for each shard.
const RUN: u64 = SHARDS as u64;
/// Blocks of a region: two misses within one are close together.
const REGION: u64 = 64;
/// Regions remembered, those of the latest misses. Together as many blocks as half of the cache holds, so that scattered
/// blocks which are used again and again do not push each other out by their neighbours.
const REGIONS: usize = 16;

#[derive(Debug)]
pub(super) struct BlockCache {
    /// Of the tenant that the blocks are read for.
    budget: Option<Arc<Budget>>,
    /// Blocks of each shard at most.
    shard_blocks: usize,
    shards: [CachePadded<Mutex<Shard, rank::NodeCache>>; SHARDS],
    /// Regions of the latest misses, each plus one, in the place that a hash of its number gives it. A guess, so that threads
    /// may overwrite each other's. On a line of its own: what lies beside it is read without a miss.
    missed: CachePadded<[AtomicU64; REGIONS]>,
}

#[derive(Debug, Default)]
struct Shard {
    blocks: HashMap<u64, Cached>,
    tick: u64,
    invalidations: u64,
}

#[derive(Debug)]
struct Cached {
    block: Arc<[u8]>,
    kind: Kind,
    /// Tick of its last use.
    used: u64,
}

/// What a block was found to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Records of nodes.
    Nodes,
    /// A bucket of a directory.
    Bucket,
}

impl Kind {
    fn check(self, bytes: &[u8], volume: u32, at: BlockAddr) -> std::result::Result<(), Corrupt> {
        match self {
            Self::Nodes => NodeBlock::check(bytes, volume, at).map(|_| ()),
            Self::Bucket => check_bucket(bytes, volume, at),
        }
    }
}

impl Shard {
    /// Where it is full, forgets the half that was used least lately.
    fn make_room(&mut self, most: usize) {
        if self.blocks.len() < most {
            return;
        }
        let mut used: Vec<u64> = self.blocks.values().map(|c| c.used).collect();
        let (_, &mut median, _) = used.select_nth_unstable(most / 2);
        self.blocks.retain(|_, c| c.used > median);
    }
}

impl Default for BlockCache {
    fn default() -> Self {
        Self { budget: None, shard_blocks: SHARD_BLOCKS, shards: Default::default(), missed: CachePadded::default() }
    }
}

impl BlockCache {
    /// Keeps about so many bytes at most.
    pub fn limit(&mut self, bytes: u64) {
        let blocks = bytes / (SHARDS * BLOCK_BYTES) as u64;
        self.shard_blocks = (blocks as usize).clamp(SHARD_BLOCKS_MIN, SHARD_BLOCKS);
    }

    /// Charges what it reads there.
    pub fn charge(&mut self, budget: Arc<Budget>) {
        self.budget = Some(budget);
    }

    fn read(&self, store: &Store, addr: BlockAddr, buf: &mut [u8]) -> Result<()> {
        if let Some(budget) = &self.budget {
            budget.charge_run(Way::Read, buf.len());
        }
        Ok(store.read(addr, buf)?)
    }

    /// Bytes of blocks that are kept at this moment.
    pub fn bytes(&self) -> u64 {
        self.shards.iter().map(|s| s.lock().blocks.len() as u64).sum::<u64>() * BLOCK_BYTES as u64
    }

    fn shard(&self, addr: BlockAddr) -> &Mutex<Shard, rank::NodeCache> {
        &self.shards[addr.0 as usize % SHARDS]
    }

    /// The block at `addr`, checked to be of that kind.
    pub fn get(&self, store: &Store, addr: BlockAddr, kind: Kind) -> Result<Arc<[u8]>> {
        let invalidations = {
            let mut shard = self.shard(addr).lock();
            shard.tick += 1;
            let tick = shard.tick;
            if let Some(c) = shard.blocks.get_mut(&addr.0).filter(|c| c.kind == kind) {
                c.used = tick;
                return Ok(c.block.clone());
            }
            shard.invalidations
        };
        if self.is_near_a_miss(addr)
            && let Some(block) = self.read_run(store, addr, kind)
        {
            return Ok(block);
        }
        let mut buf = vec![0u8; BLOCK_BYTES];
        self.read(store, addr, &mut buf)?;
        kind.check(&buf, store.volume, addr)?;
        let block: Arc<[u8]> = buf.into();
        self.insert(addr, &block, kind, invalidations);
        Ok(block)
    }

    /// Whether a block of the region was missed lately. It was now.
    fn is_near_a_miss(&self, addr: BlockAddr) -> bool {
        let region = addr.0 / REGION;
        // those of groups are powers of two apart
        let place = &self.missed[hashed_place(region, REGIONS)];
        let near = place.load(Relaxed) == region + 1;
        if !near {
            place.store(region + 1, Relaxed);
        }
        near
    }

    /// Reads the run that `addr` lies in and keeps what there is of both kinds; the one at `addr`. `None` where the run or the
    /// block cannot be read, or does not lie within the volume: reading the block by itself tells why.
    fn read_run(&self, store: &Store, addr: BlockAddr, kind: Kind) -> Option<Arc<[u8]>> {
        let first = addr.0 / RUN * RUN;
        if !store.geometry().contains(BlockAddr(first), RUN) {
            return None;
        }
        let run = (first..first + RUN).map(BlockAddr);
        let before: Vec<u64> = run.clone().map(|a| self.shard(a).lock().invalidations).collect();
        let mut buf = AlignedBuf::zeroed(RUN as usize * BLOCK_BYTES);
        self.read(store, BlockAddr(first), &mut buf).ok()?;
        let mut wanted = None;
        for ((at, bytes), invalidations) in run.zip(buf.chunks_exact(BLOCK_BYTES)).zip(before) {
            let found = [Kind::Nodes, Kind::Bucket].into_iter().find(|k| k.check(bytes, store.volume, at).is_ok());
            // others hold data, or nothing yet
            let Some(found) = found else { continue };
            let block: Arc<[u8]> = bytes.into();
            self.insert(at, &block, found, invalidations);
            if at == addr && found == kind {
                wanted = Some(block);
            }
        }
        wanted
    }

    /// Keeps a block that was read since its shard had counted `invalidations`.
    fn insert(&self, addr: BlockAddr, block: &Arc<[u8]>, kind: Kind, invalidations: u64) {
        let mut shard = self.shard(addr).lock();
        if shard.invalidations != invalidations {
            return;
        }
        shard.make_room(self.shard_blocks);
        // each at a time of its own: of those that were read ahead together some are the oldest
        shard.tick += 1;
        let used = shard.tick;
        shard.blocks.insert(addr.0, Cached { block: block.clone(), kind, used });
    }

    pub fn invalidate(&self, addr: BlockAddr) {
        let mut shard = self.shard(addr).lock();
        shard.invalidations += 1;
        shard.blocks.remove(&addr.0);
    }
}
