//! The cache's budget: who goes over it writes dirty pages and gives pages, cells and names of directories back.
//!
//! Which pages and cells go, `cell/cache.rs` chooses (second chance), in each domain by itself.

use super::MountedVolume;
use crate::cell::Body;
use crate::cell::cache::{CELL_BYTES, Memory};
use crate::types::CacheUse;
use crate::volume::Volume;

impl Volume {
    /// What the cache holds, and what it was good for.
    pub fn cache_use(&self) -> CacheUse {
        let i = self.mounted();
        let memory = &i.shared.memory;
        let (hits, misses) = memory.hits_and_misses();
        CacheUse {
            budget: i.cache_budget(),
            data: memory.pages() * 4096,
            dirty: memory.dirty() * 4096,
            index: memory.index_bytes(),
            hits,
            misses,
        }
    }
}

impl MountedVolume {
    pub(crate) fn cache_budget(&self) -> u64 {
        self.shared.options.cache_bytes
    }

    /// Gives memory back where the cache is over its budget. Cheap where it is not.
    pub(crate) fn maybe_evict(&self) {
        let memory = &self.shared.memory;
        if memory.is_to_look()
            && memory.pages() * 4096 + memory.index_bytes() > self.cache_budget()
            && let Some(_one) = self.evicting.try_lock()
        {
            self.evict();
        }
    }

    /// The background's look at memory: pages and cells.
    pub(crate) fn balance_memory(&self) {
        let _one = self.evicting.lock();
        self.evict();
    }

    fn evict(&self) {
        let budget = self.cache_budget();
        let pages = self.shared.memory.pages();
        let cells: u64 = self.domains.iter().map(|d| d.cells.len() as u64).sum();
        let index_bytes = self.shared.memory.index_bytes();
        // tables have limits of their own, and nothing here makes them smaller
        let tables: u64 = self.domains.iter().map(|d| d.space.table_bytes() + d.nodes.memory_bytes()).sum();
        let used = pages * 4096 + cells * CELL_BYTES + index_bytes + tables.min(budget / 4);
        if used <= budget {
            return;
        }
        // dirty pages in the way are written first, the largest files by themselves
        if self.shared.memory.dirty() * 4096 > budget / 2 {
            for d in &self.domains {
                for c in d.cells.all() {
                    let dirty = c.state.try_read().map_or(0, |st| match &st.body {
                        Body::File(f) => f.pages.dirty_count(),
                        _ => 0,
                    });
                    if dirty > 0 && d.flush_cell(&c).is_err() {
                        break;
                    }
                }
            }
        }
        let goal = budget - budget / 8;
        let over = used - goal;
        let n = self.domains.len() as u64;
        for d in &self.domains {
            let want_cells = if cells * CELL_BYTES > goal / 2 { over / CELL_BYTES / n + 1 } else { 0 };
            d.evict(Memory {
                pages: ((over / 4096).min(pages) / n + 1) as usize,
                cells: want_cells as usize,
                index_bytes: (over.min(index_bytes) / n) as usize,
            });
        }
    }
}

#[cfg(test)]
mod tests;
