//! Table blocks on their way home.

use super::paired::PairCopy;
use crate::error::Result;
use crate::store::Store;
use braidfs_format::BlockAddr;

/// Blocks encoded before a batch is written: bounds the memory of a checkpoint (8 MiB).
const BATCH_BLOCKS: usize = 2048;

/// Encoded table blocks on their way home. `K` says whose they are.
pub(crate) struct HomeBatch<K> {
    blocks: Vec<(BlockAddr, Vec<u8>)>,
    keys: Vec<(K, PairCopy)>,
    written: u64,
}

impl<K> HomeBatch<K> {
    /// An empty batch.
    pub fn new() -> Self {
        Self { blocks: Vec::new(), keys: Vec::new(), written: 0 }
    }
    /// Adds the block for `copy` of the pair at `pair`.
    pub fn push(&mut self, pair: BlockAddr, copy: PairCopy, block: Vec<u8>, key: K) {
        self.blocks.push((copy.addr(pair), block));
        self.keys.push((key, copy));
    }
    /// Whether it is time to write.
    pub fn full(&self) -> bool {
        self.blocks.len() >= BATCH_BLOCKS
    }
    /// Writes all of it, then tells `done` for each block the copy that is now current, `None` where the write failed.
    pub fn write(&mut self, store: &Store, done: &mut dyn FnMut(K, Option<PairCopy>)) -> Result<()> {
        if self.blocks.is_empty() {
            return Ok(());
        }
        self.blocks.sort_unstable_by_key(|b| b.0);
        let ops: Vec<_> = self.blocks.iter().map(|(addr, b)| (*addr, vec![b.as_slice()])).collect();
        let result = store.write_batch(&ops);
        for (key, copy) in self.keys.drain(..) {
            done(key, result.is_ok().then_some(copy));
        }
        self.written += self.blocks.len() as u64;
        self.blocks.clear();
        Ok(result?)
    }
    /// Blocks written so far.
    pub fn written(&self) -> u64 {
        self.written
    }
}
