//! The cells of one domain that are in memory: a sharded table with second-chance eviction.
//!
//! A cell leaves the table only when nobody else holds it: dirty cells are held by their transaction, open ones by
//! their handles. Lock rank: shards are leaves.

mod index;

use super::{Body, Cell, FileBody, State};
use crate::types::{DomainId, InodeNo, TxId};
use braidfs_format::geometry::NODES_PER_BLOCK;
use braidfs_sync::slots::Line;
use braidfs_sync::{RwLock, rank};
use index::{CellIndex, Owned, let_go, unused};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{
    AtomicUsize,
    Ordering::{Acquire, Relaxed},
};

const SHARDS: usize = 64;

/// So many cells of a shard are let go together: whoever does looks at a line of each thread.
const LATE: usize = 32;

/// Memory of a cell in the cache, about: one with extents. What it holds beyond that is counted
/// ([`Memory::attached`]).
pub const CELL_BYTES: u64 = 800;

/// Some of the cells.
#[derive(Debug)]
struct Shard {
    /// What all look-ups read, apart from what only changes write.
    index: Line<CellIndex>,
    table: Line<RwLock<Table, rank::CellShard>>,
}

/// What readers of a shard's cells do not look at.
#[derive(Debug, Default)]
struct Table {
    owned: Owned,
    cells: usize,
    /// How many cells have left so far.
    left: u64,
    /// Cells that were taken out, at which somebody may look still.
    late: Vec<Arc<Cell>>,
}

impl Default for Shard {
    fn default() -> Self {
        Self { index: Line(CellIndex::new()), table: Line::default() }
    }
}

impl Shard {
    fn all(&self) -> Vec<Arc<Cell>> {
        let _still = self.table.read();
        self.index.all()
    }
    fn put(&self, t: &mut Table, cell: Arc<Cell>) {
        match self.index.put(&mut t.owned, cell) {
            Some(old) => t.late.push(old),
            None => t.cells += 1,
        }
    }
    fn taken(&self, t: &mut Table, ino: InodeNo) {
        t.cells -= 1;
        t.left += 1;
        self.index.vacate(ino);
    }

    /// Takes a cell out that nobody uses and that need not stay in memory, where it is such a one: what goes with it.
    fn evict_cell(
        &self,
        c: &Arc<Cell>,
        pending: &dyn Fn(DomainId, TxId) -> bool,
        leaves: &dyn Fn(&State),
    ) -> Option<Memory> {
        let mut t = self.table.write();
        // the table and the caller hold it
        let free = || Arc::strong_count(c) == 2 && c.opens.load(Acquire) == 0;
        if !free() || waits(c, pending, leaves) {
            return None;
        }
        // out of the index no new one finds it; who did before may have it now, or have changed it
        let own = self.index.take(c.ino)?;
        // one that was removed since it was listed has perhaps a successor
        if !Arc::ptr_eq(&own, c) || !unused(&own) || !free() || waits(c, pending, leaves) {
            self.index.put(&mut t.owned, own);
            return None;
        }
        drop(own);
        self.taken(&mut t, c.ino);
        drop(t);
        Some(Memory::of(c))
    }
}

impl Drop for Shard {
    fn drop(&mut self) {
        self.index.0.clear(&mut self.table.0.get_mut().owned);
    }
}

pub use index::HazardRef;

/// A cell to look at, in memory until this is dropped.
#[derive(Debug)]
pub enum CellRef<'a> {
    /// It was there.
    Published(HazardRef<'a>),
    /// It was loaded.
    Loaded(Arc<Cell>),
}

impl CellRef<'_> {
    /// The cell for longer, and for changes.
    pub fn arc(&self) -> Arc<Cell> {
        match self {
            Self::Published(c) => c.arc(),
            Self::Loaded(c) => c.clone(),
        }
    }
}

impl std::ops::Deref for CellRef<'_> {
    type Target = Cell;
    fn deref(&self) -> &Cell {
        match self {
            Self::Published(c) => c,
            Self::Loaded(c) => c,
        }
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
    fn shard(&self, ino: InodeNo) -> &Shard {
        // threads make inodes in table blocks of their own
        let block = ino.0 / u64::from(NODES_PER_BLOCK);
        &self.shards[(block ^ (block >> 6)) as usize % SHARDS]
    }
    /// The cell, if in memory.
    pub fn get(&self, ino: InodeNo) -> Option<Arc<Cell>> {
        match self.shard(ino).index.look(ino) {
            Ok(found) => found.map(|c| {
                c.warm();
                c.arc()
            }),
            Err(()) => self.get_surely(ino),
        }
    }
    /// [`Self::get`] that waits for who takes a cell out and puts it back, and moves a part of the index: for who takes its
    /// absence for damage.
    pub fn get_surely(&self, ino: InodeNo) -> Option<Arc<Cell>> {
        let shard = self.shard(ino);
        let _still = shard.table.read();
        shard.index.get(ino)
    }
    /// The cell, if in memory, to be looked at: without a write to a line that threads share. `None` also where this thread
    /// looks at very many.
    #[inline]
    pub fn look(&self, ino: InodeNo) -> Option<HazardRef<'_>> {
        let c = self.shard(ino).index.look(ino).ok()??;
        c.warm();
        Some(c)
    }
    /// For [`Self::insert_loaded`], before the inode's entry in the node table is read.
    pub fn before_load(&self, ino: InodeNo) -> Loading {
        Loading(self.shard(ino).table.read().left)
    }
    /// Puts a cell that was just loaded; the one already there wins. `None` where cells have left since `before`: perhaps
    /// this inode's, which another thread loaded, changed and committed meanwhile, so that what was loaded here is old.
    pub fn insert_loaded(&self, cell: Arc<Cell>, before: Loading) -> Option<Arc<Cell>> {
        let shard = self.shard(cell.ino);
        let mut t = shard.table.write();
        if let Some(c) = shard.index.get(cell.ino) {
            return Some(c);
        }
        (t.left == before.0).then(|| {
            shard.put(&mut t, cell.clone());
            cell
        })
    }
    /// Puts a new inode's cell.
    pub fn insert_new(&self, cell: Arc<Cell>) {
        let shard = self.shard(cell.ino);
        shard.put(&mut shard.table.write(), cell);
    }
    /// Forgets a cell, if it is this one.
    pub fn remove(&self, cell: &Arc<Cell>) {
        let shard = self.shard(cell.ino);
        let mut t = shard.table.write();
        if shard.index.get(cell.ino).is_some_and(|c| Arc::ptr_eq(&c, cell)) {
            t.late.extend(shard.index.take(cell.ino));
            shard.taken(&mut t, cell.ino);
        }
        if t.late.len() >= LATE {
            let_go(&mut t.late);
        }
    }
    /// Number of cells.
    pub fn len(&self) -> usize {
        self.shards.iter().map(|s| s.table.read().cells).sum()
    }
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// All cells (a snapshot).
    pub fn all(&self) -> Vec<Arc<Cell>> {
        self.shards.iter().flat_map(|s| s.all()).collect()
    }

    /// Shows all cells, some after the other, until `f` has seen enough.
    pub fn visit(&self, mut f: impl FnMut(&Arc<Cell>) -> ControlFlow<()>) {
        // not all at once: there may be very many
        let _ = self.shards.iter().try_for_each(|s| s.all().iter().try_for_each(&mut f));
    }

    /// Drops about as much as `want` says: clean pages, cells that nobody uses, buckets of directories that are on the
    /// device; where indexes are wanted, also cells of files for the sake of their extents, which go with them. Cells and pages
    /// used since the last round stay for this one. What is gone. `pending`: whether a transaction
    /// is not durable yet.
    /// `leaves` is told of each cell before others can load it anew.
    pub fn evict(&self, mut want: Memory, pending: &dyn Fn(DomainId, TxId) -> bool, leaves: &dyn Fn(&State)) -> Memory {
        let mut gone = Memory::default();
        let from = self.hand.fetch_add(1, Relaxed);
        for s in (0..SHARDS).map(|i| &self.shards[(from + i) % SHARDS]) {
            if want.is_none() {
                break;
            }
            for c in s.all() {
                let cold = (want.cells > 0 || want.index_bytes > 0) && !c.hot.swap(false, Relaxed);
                let has_extents = evict_content(&c, cold, pending, &mut want, &mut gone);
                if (want.cells > 0 || has_extents)
                    && cold
                    && let Some(own) = s.evict_cell(&c, pending, leaves)
                {
                    gone.pages += own.pages;
                    gone.index_bytes += own.index_bytes;
                    gone.attached += own.attached;
                    gone.cells += 1;
                    want.cells = want.cells.saturating_sub(1);
                    want.index_bytes = want.index_bytes.saturating_sub(own.index_bytes);
                }
            }
        }
        gone
    }
}

/// Drops what a cell has and does not need: clean pages, where some are wanted, or of a `cold` directory its buckets. Whether it is a
/// cold file of so many extents that they count as an index, which is wanted and goes with the cell alone.
fn evict_content(
    c: &Arc<Cell>,
    cold: bool,
    pending: &dyn Fn(DomainId, TxId) -> bool,
    want: &mut Memory,
    gone: &mut Memory,
) -> bool {
    if (want.pages > 0 || want.index_bytes > 0 && cold)
        && let Some(mut st) = c.state.try_write()
        // under the lock: a flush raises it there
        && c.inflight.load(Acquire) == 0
    {
        // Held by no transaction, or all that any has written is durable: its buckets are on the device, whoever has it open. (The
        // buckets of one that a commit is writing count as clean before they are there.)
        let on_device = Arc::strong_count(c) == 2 || st.durability.is_written(|t| pending(c.domain, t));
        match &mut st.body {
            Body::File(f) if want.pages > 0 => {
                let n = f.pages.evict_clean(want.pages);
                gone.pages += n;
                want.pages = want.pages.saturating_sub(n);
                // with the last page of a group its index goes
                let n = f.counted.saturating_sub(f.index_steps());
                f.counted -= n;
                gone.index_bytes += usize::from(n) * FileBody::INDEX_STEP;
            }
            Body::Dir(d) if cold && on_device => {
                d.index.evict_clean();
                let n = d.counted.saturating_sub(d.index.loaded_bytes());
                d.counted -= n;
                gone.index_bytes += n;
                want.index_bytes = want.index_bytes.saturating_sub(n);
            }
            _ => {}
        }
        return cold && want.index_bytes > 0 && matches!(&st.body, Body::File(f) if f.counted > 0);
    }
    false
}

/// Whether a cell that nobody uses must stay in memory. Where not, `leaves` is told of it: before anybody loads it anew, who
/// needs the table's lock for that, which the caller has.
fn waits(c: &Cell, pending: &dyn Fn(DomainId, TxId) -> bool, leaves: &dyn Fn(&State)) -> bool {
    if c.inflight.load(Acquire) > 0 {
        return true;
    }
    // Where it is locked for writing, somebody has it. Who changes a directory with it locked for reading
    // does so in one that a transaction will write, which waits.
    let Some(st) = c.state.try_read() else { return true };
    // only memory knows for what; and in no transaction are pages that a commit left alone
    let waits = st.durability.waits(pending)
        || match &st.body {
            // or it has pages that somebody has pinned
            Body::File(f) => f.pages.dirty_count() > 0 || f.pages.any_shared(),
            Body::Dir(d) => d.waits(pending),
            Body::Special => false,
        };
    if !waits {
        leaves(&st);
    }
    waits
}

/// The moment at which the loading of a cell began.
#[derive(Debug, Clone, Copy)]
pub struct Loading(u64);

/// What cells hold, or are to give up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Memory {
    /// Pages of files.
    pub pages: usize,
    /// The cells themselves, without what hangs on them.
    pub cells: usize,
    /// Names of directories, indexes of extents and pages: bytes.
    pub index_bytes: usize,
    /// Content, names, attributes and extents that go with the cells: bytes ([`State::attached_steps`]).
    pub attached: usize,
}

impl Memory {
    /// What goes with a cell, as far as the volume counts it.
    pub fn of(c: &Cell) -> Self {
        let st = c.state.read();
        let (pages, index_bytes) = match &st.body {
            Body::File(f) => (f.pages.len(), f.counted_bytes()),
            Body::Dir(d) => (0, d.counted),
            Body::Special => (0, 0),
        };
        Self { pages, cells: 0, index_bytes, attached: usize::from(c.attached.load(Relaxed)) * State::ATTACHED_STEP }
    }
    fn is_none(&self) -> bool {
        *self == Self::default()
    }
}
