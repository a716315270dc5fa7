//! The cells of one domain that are in memory: a sharded table with second-chance eviction.
//!
//! A cell leaves the table only when nobody else holds it: dirty cells are held by their transaction, open ones by
//! their handles. Lock rank: shards are leaves.

use super::{Body, Cell};
use crate::types::NodeId;
use parking_lot::RwLock;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

const SHARDS: usize = 64;

type Shard = RwLock<HashMap<NodeId, Arc<Cell>, foldhash::fast::RandomState>>;

/// See the module.
#[derive(Debug)]
pub struct CellCache {
    shards: Box<[Shard]>,
}

impl Default for CellCache {
    fn default() -> Self {
        Self { shards: (0..SHARDS).map(|_| Shard::default()).collect() }
    }
}

impl CellCache {
    fn shard(&self, ino: NodeId) -> &Shard {
        // neighbouring numbers are created together: spread them
        &self.shards[(ino.0 ^ (ino.0 >> 6)) as usize % SHARDS]
    }
    /// The cell, if in memory.
    pub fn get(&self, ino: NodeId) -> Option<Arc<Cell>> {
        let c = self.shard(ino).read().get(&ino).cloned();
        if let Some(c) = &c
            && !c.hot.load(Relaxed)
        {
            c.hot.store(true, Relaxed);
        }
        c
    }
    /// Puts a cell that was just loaded; the one already there wins.
    pub fn insert_loaded(&self, cell: Arc<Cell>) -> Arc<Cell> {
        self.shard(cell.ino).write().entry(cell.ino).or_insert(cell).clone()
    }
    /// Puts a new inode's cell.
    pub fn insert_new(&self, cell: Arc<Cell>) {
        self.shard(cell.ino).write().insert(cell.ino, cell);
    }
    /// Forgets a cell, if it is this one.
    pub fn remove(&self, cell: &Arc<Cell>) {
        let mut s = self.shard(cell.ino).write();
        if s.get(&cell.ino).is_some_and(|c| Arc::ptr_eq(c, cell)) {
            s.remove(&cell.ino);
        }
    }
    /// Number of cells.
    pub fn len(&self) -> usize {
        self.shards.iter().map(|s| s.read().len()).sum()
    }
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// All cells (a snapshot).
    pub fn all(&self) -> Vec<Arc<Cell>> {
        self.shards.iter().flat_map(|s| s.read().values().cloned().collect::<Vec<_>>()).collect()
    }

    /// Drops clean pages until about `pages` are gone, and, where `cells`, cells that nobody uses. Cells and pages used
    /// since the last round stay for this one. Pages dropped and cells dropped.
    pub fn evict(&self, mut pages: usize, mut cells: usize) -> (usize, usize) {
        let (mut gone_pages, mut gone_cells) = (0, 0);
        for s in &self.shards {
            let list: Vec<_> = s.read().values().cloned().collect();
            for c in list {
                if pages > 0
                    && let Some(mut st) = c.state.try_write()
                    && c.inflight.load(Acquire) == 0
                {
                    match &mut st.body {
                        Body::File(f) => {
                            let n = f.pages.evict_clean(pages);
                            gone_pages += n;
                            pages = pages.saturating_sub(n);
                        }
                        // held by no transaction: its buckets are on the device
                        Body::Dir(d) if !c.hot.load(Relaxed) && Arc::strong_count(&c) == 2 => d.index.evict_clean(),
                        _ => {}
                    }
                }
                if cells > 0 && !c.hot.swap(false, Relaxed) {
                    let mut map = s.write();
                    // the table and this loop hold it; nobody can take another while the shard is locked
                    if Arc::strong_count(&c) == 2 && c.opens.load(Acquire) == 0 && c.inflight.load(Acquire) == 0 {
                        let st = c.state.read();
                        if !st.waits_for.is_empty() {
                            continue; // only memory knows for what
                        }
                        let n = match &st.body {
                            Body::File(f) => f.pages.len(),
                            _ => 0,
                        };
                        drop(st);
                        map.remove(&c.ino);
                        gone_pages += n;
                        gone_cells += 1;
                        cells -= 1;
                    }
                }
            }
            if pages == 0 && cells == 0 {
                break;
            }
        }
        (gone_pages, gone_cells)
    }
}
