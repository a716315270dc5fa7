//! The cells of one domain that are in memory: a sharded table with second-chance eviction.
//!
//! A cell leaves the table only when nobody else holds it: dirty cells are held by their transaction, open ones by
//! their handles. Lock rank: shards are leaves.

use super::{Body, Cell, State};
use crate::types::{Attr, DomainId, NodeId, TxId};
use braidfs_sync::{RwLock, rank};
use crossbeam::utils::CachePadded;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{
    AtomicUsize,
    Ordering::{Acquire, Relaxed},
};

const SHARDS: usize = 64;

/// Memory of a cell in the cache, about: one with extents.
pub const CELL_BYTES: u64 = 800;

/// Numbers that lie side by side: files made together are found together.
const RUN: u64 = 32;

type Run = [Option<Arc<Cell>>; RUN as usize];
type Shard = CachePadded<RwLock<Table, rank::CellShard>>;

/// Cells by runs of numbers.
#[derive(Debug, Default)]
struct Table {
    runs: HashMap<u64, Box<Run>, foldhash::fast::RandomState>,
    cells: usize,
    /// How many cells have left so far.
    left: u64,
}

impl Table {
    fn get(&self, ino: NodeId) -> Option<&Arc<Cell>> {
        self.runs.get(&(ino.0 / RUN))?[(ino.0 % RUN) as usize].as_ref()
    }
    /// The place of a number, which the caller fills.
    fn place(&mut self, ino: NodeId) -> &mut Option<Arc<Cell>> {
        let run = self.runs.entry(ino.0 / RUN).or_insert_with(|| Box::new([const { None }; RUN as usize]));
        let place = &mut run[(ino.0 % RUN) as usize];
        self.cells += usize::from(place.is_none());
        place
    }
    fn remove(&mut self, ino: NodeId) {
        let Some(run) = self.runs.get_mut(&(ino.0 / RUN)) else { return };
        let n = u64::from(run[(ino.0 % RUN) as usize].take().is_some());
        self.cells -= n as usize;
        self.left += n;
        if run.iter().all(Option::is_none) {
            self.runs.remove(&(ino.0 / RUN));
        }
    }
    fn all(&self) -> Vec<Arc<Cell>> {
        self.runs.values().flat_map(|r| r.iter().flatten()).cloned().collect()
    }
}

/// See the module.
#[derive(Debug)]
pub struct CellCache {
    shards: Box<[Shard]>,
    /// Where the next eviction begins.
    hand: AtomicUsize,
}

impl Default for CellCache {
    fn default() -> Self {
        Self { shards: (0..SHARDS).map(|_| Shard::default()).collect(), hand: AtomicUsize::new(0) }
    }
}

impl CellCache {
    fn shard(&self, ino: NodeId) -> &Shard {
        let run = ino.0 / RUN;
        &self.shards[(run ^ (run >> 6)) as usize % SHARDS]
    }
    /// The cell, if in memory.
    pub fn get(&self, ino: NodeId) -> Option<Arc<Cell>> {
        let c = self.shard(ino).read().get(ino).cloned();
        if let Some(c) = &c
            && !c.hot.load(Relaxed)
        {
            c.hot.store(true, Relaxed);
        }
        c
    }
    /// Attributes of an inode in that generation. `None` where it is not in memory, or is just being changed: whoever asks
    /// here does not wait.
    pub fn attr(&self, ino: NodeId, gener: u32) -> Option<Attr> {
        let shard = self.shard(ino).read();
        let c = shard.get(ino).filter(|c| c.gener == gener)?;
        if !c.hot.load(Relaxed) {
            c.hot.store(true, Relaxed);
        }
        // cells are locked before shards: not waited for here
        let st = c.state.try_read()?;
        (!st.deleted).then(|| c.attr(&st))
    }
    /// For [`Self::insert_loaded`], before the inode's entry in the node table is read.
    pub fn before_load(&self, ino: NodeId) -> Loading {
        Loading(self.shard(ino).read().left)
    }
    /// Puts a cell that was just loaded; the one already there wins. `None` where cells have left since `before`: perhaps
    /// this inode's, which another thread loaded, changed and committed meanwhile, so that what was loaded here is old.
    pub fn insert_loaded(&self, cell: Arc<Cell>, before: Loading) -> Option<Arc<Cell>> {
        let ino = cell.ino;
        let mut shard = self.shard(ino).write();
        if let Some(c) = shard.get(ino) {
            return Some(c.clone());
        }
        (shard.left == before.0).then(|| shard.place(ino).insert(cell).clone())
    }
    /// Puts a new inode's cell.
    pub fn insert_new(&self, cell: Arc<Cell>) {
        let ino = cell.ino;
        *self.shard(ino).write().place(ino) = Some(cell);
    }
    /// Forgets a cell, if it is this one.
    pub fn remove(&self, cell: &Arc<Cell>) {
        let mut s = self.shard(cell.ino).write();
        if s.get(cell.ino).is_some_and(|c| Arc::ptr_eq(c, cell)) {
            s.remove(cell.ino);
        }
    }
    /// Number of cells.
    pub fn len(&self) -> usize {
        self.shards.iter().map(|s| s.read().cells).sum()
    }
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// All cells (a snapshot).
    pub fn all(&self) -> Vec<Arc<Cell>> {
        self.shards.iter().flat_map(|s| s.read().all()).collect()
    }

    /// Drops about as much as `want` says: clean pages, cells that nobody uses, buckets of directories that are on the
    /// device. Cells and pages used since the last round stay for this one. What is gone. `pending`: whether a transaction
    /// is not durable yet.
    /// `leaves` is told of each cell before others can load it anew.
    pub fn evict(&self, mut want: Memory, pending: &dyn Fn(DomainId, TxId) -> bool, leaves: &dyn Fn(&State)) -> Memory {
        let mut gone = Memory::default();
        let from = self.hand.fetch_add(1, Relaxed);
        for s in (0..SHARDS).map(|i| &self.shards[(from + i) % SHARDS]) {
            if want.is_none() {
                break;
            }
            let list = s.read().all();
            for c in list {
                let cold = (want.cells > 0 || want.dir_bytes > 0) && !c.hot.swap(false, Relaxed);
                if (want.pages > 0 || want.dir_bytes > 0 && cold)
                    && let Some(mut st) = c.state.try_write()
                    // under the lock: a flush raises it there
                    && c.inflight.load(Acquire) == 0
                {
                    match &mut st.body {
                        Body::File(f) if want.pages > 0 => {
                            let n = f.pages.evict_clean(want.pages);
                            gone.pages += n;
                            want.pages = want.pages.saturating_sub(n);
                        }
                        // held by no transaction: its buckets are on the device
                        Body::Dir(d) if cold && Arc::strong_count(&c) == 2 => {
                            d.index.evict_clean();
                            let n = d.counted.saturating_sub(d.index.loaded_bytes());
                            d.counted -= n;
                            gone.dir_bytes += n;
                            want.dir_bytes = want.dir_bytes.saturating_sub(n);
                        }
                        _ => {}
                    }
                }
                if want.cells > 0 && cold {
                    let mut map = s.write();
                    // the table and this loop hold it; nobody can take another while the shard is locked
                    if Arc::strong_count(&c) == 2 && c.opens.load(Acquire) == 0 && c.inflight.load(Acquire) == 0 {
                        let waits = {
                            // nobody else has it, to lock it
                            let Some(st) = c.state.try_read() else { continue };
                            // only memory knows for what; and in no transaction are pages that a commit left alone
                            let waits = st.durability.waits(pending)
                                || matches!(&st.body, Body::File(f) if f.pages.dirty_count() > 0);
                            if !waits {
                                leaves(&st);
                            }
                            waits
                        };
                        if waits {
                            continue;
                        }
                        map.remove(c.ino);
                        drop(map);
                        let own = Memory::of(&c);
                        gone.pages += own.pages;
                        gone.dir_bytes += own.dir_bytes;
                        gone.cells += 1;
                        want.cells -= 1;
                    }
                }
            }
        }
        gone
    }
}

/// The moment at which the loading of a cell began.
#[derive(Debug, Clone, Copy)]
pub struct Loading(u64);

/// What cells hold, or are to give up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Memory {
    /// Pages of files.
    pub pages: usize,
    /// Cells themselves.
    pub cells: usize,
    /// Names of directories, bytes.
    pub dir_bytes: usize,
}

impl Memory {
    /// What goes with a cell, as far as the volume counts it.
    pub fn of(c: &Cell) -> Self {
        match &c.state.read().body {
            Body::File(f) => Self { pages: f.pages.len(), ..Self::default() },
            Body::Dir(d) => Self { dir_bytes: d.counted, ..Self::default() },
            Body::Special => Self::default(),
        }
    }
    fn is_none(&self) -> bool {
        *self == Self::default()
    }
}
