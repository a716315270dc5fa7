//! Writes that a server has, or was sent, and that no flush has made durable yet.
//!
//! A server that is killed loses what it acknowledged and did not flush. All of it is kept here until a flush that was sent
//! after it was acknowledged has succeeded, and sent again on a new connection before anything else is. Of a block that was
//! written twice only the newest content is sent: then the order in which a server works does not matter.

use crate::BLOCK_BYTES;
use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

#[derive(Debug)]
struct Kept {
    block: u64,
    data: Arc<[u8]>,
    acknowledged: bool,
}

/// In the order in which they were handed over.
#[derive(Debug, Default)]
pub(crate) struct Retained {
    writes: BTreeMap<u64, Kept>,
    next: u64,
    bytes: usize,
}

impl Retained {
    /// Bytes that are kept.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Keeps a write that is about to be sent, under the number that it returns.
    pub(crate) fn keep(&mut self, block: u64, data: Arc<[u8]>) -> u64 {
        let number = self.next;
        self.next += 1;
        self.bytes += data.len();
        self.writes.insert(number, Kept { block, data, acknowledged: false });
        number
    }

    /// The number that the next write gets: all below were kept before.
    pub(crate) fn end(&self) -> u64 {
        self.next
    }

    /// The server says that it has it.
    pub(crate) fn acknowledge(&mut self, number: u64) {
        if let Some(kept) = self.writes.get_mut(&number) {
            kept.acknowledged = true;
        }
    }

    /// Its caller was told that it failed.
    pub(crate) fn forget(&mut self, number: u64) {
        if let Some(kept) = self.writes.remove(&number) {
            self.bytes -= kept.data.len();
        }
    }

    /// What a flush that is sent from now on makes durable.
    pub(crate) fn acknowledged(&self) -> Vec<u64> {
        self.writes.iter().filter(|(_, k)| k.acknowledged).map(|(n, _)| *n).collect()
    }

    /// The newest content of each block, as runs that do not overlap: first block, and the part of the bytes.
    pub(crate) fn newest(&self) -> Vec<(u64, Arc<[u8]>, Range<usize>)> {
        let mut seen = HashSet::new();
        let mut runs = Vec::new();
        for kept in self.writes.values().rev() {
            let mut run: Option<Range<u64>> = None;
            let blocks = kept.block..kept.block + (kept.data.len() / BLOCK_BYTES) as u64;
            let mut end = |run: &mut Option<Range<u64>>| {
                if let Some(r) = run.take() {
                    let at = |b: u64| (b - kept.block) as usize * BLOCK_BYTES;
                    runs.push((r.start, Arc::clone(&kept.data), at(r.start)..at(r.end)));
                }
            };
            for block in blocks {
                if seen.insert(block) {
                    run.get_or_insert(block..block).end = block + 1;
                } else {
                    end(&mut run);
                }
            }
            end(&mut run);
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn blocks(value: u8, n: usize) -> Arc<[u8]> {
        vec![value; n * BLOCK_BYTES].into()
    }

    #[test]
    fn a_flush_covers_what_was_acknowledged_when_it_was_sent() {
        let mut kept = Retained::default();
        let (a, b) = (kept.keep(0, blocks(1, 1)), kept.keep(1, blocks(2, 2)));
        kept.acknowledge(a);
        let covered = kept.acknowledged();
        kept.acknowledge(b);
        covered.into_iter().for_each(|n| kept.forget(n));
        assert_eq!(kept.bytes(), 2 * BLOCK_BYTES);
        assert_eq!(kept.newest(), [(1, blocks(2, 2), 0..2 * BLOCK_BYTES)]);
        kept.forget(b);
        kept.forget(b);
        assert_eq!((kept.bytes(), kept.newest().len()), (0, 0));
    }

    proptest! {
        /// What is sent again gives each block what the last write to it had, and touches no block twice.
        #[test]
        fn the_newest_content_of_each_block(writes in prop::collection::vec((0u64..20, 1usize..6), 0..30)) {
            let mut kept = Retained::default();
            let mut model = BTreeMap::new();
            for (i, (block, n)) in writes.iter().enumerate() {
                kept.keep(*block, blocks(i as u8, *n));
                model.extend((*block..block + *n as u64).map(|b| (b, i as u8)));
            }
            let mut sent = BTreeMap::new();
            for (block, data, part) in kept.newest() {
                for (b, bytes) in (block..).zip(data[part].chunks(BLOCK_BYTES)) {
                    prop_assert_eq!(sent.insert(b, bytes[0]), None);
                }
            }
            prop_assert_eq!(sent, model);
        }
    }
}
