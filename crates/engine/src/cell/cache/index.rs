//! Which cells of a shard are in memory, for readers that take no lock and write to no common line.
//!
//! This is a low-level module with unsafe code. Cells are found by runs of numbers, runs by a table with open addressing.
//! Changes are made by one thread at a time, which has the shard locked. Nothing that a reader may be looking at is freed
//! while it may:
//! - **cells**: a reader publishes the address that it found, and looks whether it still stands there (a hazard pointer:
//!   Michael, IEEE TPDS 2004). Who takes a cell out looks for that before it lets the cell go ([`unused`]).
//! - **runs and tables** stay until the index goes. A run without cells serves other numbers in its place; a table that is
//!   too small is kept beside the next one, which is twice its size.
//!
//! Not promised: that memory of runs shrinks, and that it is as little as the cells of a moment need: a run serves other numbers
//! where these look for a place and find it first, which is seldom in a table with room. It is 9 to 16 bytes for each number
//! that was ever looked up where these lie side by side, and 290 for one that has no neighbours.

use crate::cell::Cell;
use crate::types::{InodeNo, hashed_place};
use braidfs_sync::ablation::{self, Switch};
use braidfs_sync::pins;
use braidfs_sync::published::{self, Place};
use std::marker::PhantomData;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{
    AtomicPtr, AtomicU64,
    Ordering::{Acquire, Relaxed, Release, SeqCst},
};

/// Numbers that lie side by side: files made together are found together.
const RUN: u64 = 32;
/// [`Run::number`] of one without cells.
const NONE: u64 = u64::MAX;
/// Runs in the first table.
const FIRST: usize = 8;

/// Cells of numbers that lie side by side.
struct Run {
    /// The first number, divided by [`RUN`].
    number: AtomicU64,
    cells: [AtomicPtr<Cell>; RUN as usize],
}

impl Run {
    fn new(number: u64) -> Box<Self> {
        let cells = std::array::from_fn(|_| AtomicPtr::default());
        Box::new(Self { number: AtomicU64::new(number), cells })
    }
    fn is_empty(&self) -> bool {
        self.cells.iter().all(|c| c.load(Relaxed).is_null())
    }
}

/// Places for runs; a power of two.
type Table = Box<[AtomicPtr<Run>]>;

/// See the module. The index owns a reference to each of its cells.
#[derive(Debug)]
pub(super) struct CellIndex {
    /// The last of `tables`; null where there is none.
    now: AtomicPtr<Table>,
    /// Nobody looks: all count (`Switch::Arcs`).
    counted: bool,
}

/// What only the thread that has the shard locked looks at.
#[derive(Debug, Default)]
pub(super) struct Owned {
    /// All tables that there were, the largest last.
    tables: Vec<AtomicPtr<Table>>,
    /// Places of the last table that are taken.
    runs: usize,
}

/// A cell that somebody looks at: it stays in memory until this is dropped.
#[derive(Debug)]
pub struct HazardRef<'a> {
    cell: NonNull<Cell>,
    place: &'static Place,
    _index: PhantomData<&'a CellIndex>,
}

impl HazardRef<'_> {
    /// The pointer that the index keeps: that of an `Arc`.
    pub fn as_ptr(&self) -> *const Cell {
        self.cell.as_ptr()
    }
    /// What the cell is published and pinned by.
    pub fn address(&self) -> usize {
        self.cell.addr().get()
    }
    /// The cell for longer.
    pub fn arc(&self) -> Arc<Cell> {
        // SAFETY: the index, which made the pointer from an `Arc`, has a reference to the cell, or whoever took it out
        // keeps it until the place is clear.
        unsafe {
            Arc::increment_strong_count(self.as_ptr());
            Arc::from_raw(self.as_ptr())
        }
    }
}

impl Deref for HazardRef<'_> {
    type Target = Cell;
    #[inline(always)]
    fn deref(&self) -> &Cell {
        // SAFETY: as in `arc`.
        unsafe { self.cell.as_ref() }
    }
}

impl Drop for HazardRef<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.place.clear();
    }
}

/// The places of a table in the order of a search for `number`, again and again.
#[inline]
fn search(table: &Table, number: u64) -> impl Iterator<Item = &AtomicPtr<Run>> {
    let from = hashed_place(number, table.len());
    (from..).map(|at| &table[at & (table.len() - 1)])
}

impl CellIndex {
    pub(super) fn new() -> Self {
        Self { now: AtomicPtr::default(), counted: ablation::is_on(Switch::Arcs) }
    }

    fn table(&self) -> Option<&Table> {
        // SAFETY: null, or a table that lives as long as `self`.
        unsafe { self.now.load(Acquire).as_ref() }
    }

    /// The run of a number, or where its search ends: at a place that was never taken.
    #[inline]
    fn find_run(&self, number: u64) -> Option<&Run> {
        for place in search(self.table()?, number) {
            // SAFETY: null, or a run that lives as long as `self`. There is always a null: tables are not filled.
            let run = unsafe { place.load(Acquire).as_ref() }?;
            if run.number.load(Acquire) == number {
                return Some(run);
            }
        }
        None
    }

    /// Where the cell of this number stands, if it does.
    #[inline]
    fn place(&self, ino: InodeNo) -> Option<&AtomicPtr<Cell>> {
        Some(&self.find_run(ino.0 / RUN)?.cells[(ino.0 % RUN) as usize])
    }

    /// The cell of this number, if there is one, and something to look at it with. `Err` where this thread looks at too many
    /// already, or none does.
    #[inline]
    pub(super) fn look(&self, ino: InodeNo) -> Result<Option<HazardRef<'_>>, ()> {
        if self.counted {
            return Err(());
        }
        let Some(place) = self.place(ino) else { return Ok(None) };
        loop {
            let Some(found) = NonNull::new(place.load(Acquire)) else { return Ok(None) };
            let Some(published) = published::publish(found.addr().get()) else { return Err(()) };
            if place.load(SeqCst) != found.as_ptr() {
                published.clear();
                continue;
            }
            // it stood there after it was published, so that who takes it out finds it published
            let looked = HazardRef { cell: found, place: published, _index: PhantomData };
            // its run may have become that of other numbers
            return Ok((looked.ino == ino).then_some(looked));
        }
    }

    /// The cell of this number. The shard is locked.
    pub(super) fn get(&self, ino: InodeNo) -> Option<Arc<Cell>> {
        let found = self.place(ino)?.load(Acquire);
        // SAFETY: null, or a cell to which the index has a reference, which nobody takes out while the shard is locked.
        (!found.is_null()).then(|| unsafe {
            Arc::increment_strong_count(found);
            Arc::from_raw(found)
        })
    }

    /// All cells. The shard is locked.
    pub(super) fn all(&self) -> Vec<Arc<Cell>> {
        let mut all = Vec::new();
        // SAFETY: as in `find_run` and `get`.
        for run in self.table().into_iter().flatten().filter_map(|p| unsafe { p.load(Acquire).as_ref() }) {
            for found in run.cells.iter().map(|c| c.load(Acquire)).filter(|c| !c.is_null()) {
                // SAFETY: as in `get`.
                all.push(unsafe {
                    Arc::increment_strong_count(found);
                    Arc::from_raw(found)
                });
            }
        }
        all
    }

    /// Puts a cell in; the one that was there. The shard is locked for writing.
    pub(super) fn put(&self, owned: &mut Owned, cell: Arc<Cell>) -> Option<Arc<Cell>> {
        let ino = cell.ino;
        let run = match self.find_run(ino.0 / RUN) {
            Some(run) => run,
            None => self.new_run(owned, ino.0 / RUN),
        };
        let old = run.cells[(ino.0 % RUN) as usize].swap(Arc::into_raw(cell).cast_mut(), SeqCst);
        // SAFETY: the index had a reference to it, which nobody else takes.
        (!old.is_null()).then(|| unsafe { Arc::from_raw(old) })
    }

    /// Takes a cell out. Readers may look at it: it must stay while it is not [`unused`]. The shard is locked for writing.
    pub(super) fn take(&self, ino: InodeNo) -> Option<Arc<Cell>> {
        let old = self.place(ino)?.swap(std::ptr::null_mut(), SeqCst);
        // SAFETY: as in `put`.
        (!old.is_null()).then(|| unsafe { Arc::from_raw(old) })
    }

    /// After cells were taken out: the run may serve other numbers. The shard is locked for writing.
    pub(super) fn vacate(&self, ino: InodeNo) {
        if let Some(run) = self.find_run(ino.0 / RUN).filter(|r| r.is_empty()) {
            run.number.store(NONE, Release);
        }
    }

    fn new_run(&self, owned: &mut Owned, number: u64) -> &Run {
        if let Some(run) = self.table().and_then(|t| vacant(t, number)) {
            run.number.store(number, Release);
            return run;
        }
        if owned.runs * 4 >= self.table().map_or(0, |t| t.len() * 3) {
            self.grow(owned);
        }
        let run = Box::into_raw(Run::new(number));
        if let Some(table) = self.table() {
            append(table, number, run);
        }
        owned.runs += 1;
        // SAFETY: as in `find_run`.
        unsafe { &*run }
    }

    /// A table of twice the size, of runs that are in use. The others stay in it too: readers may be looking at them.
    fn grow(&self, owned: &mut Owned) {
        let places = self.table().map_or(FIRST, |t| 2 * t.len());
        let table: Table = (0..places).map(|_| AtomicPtr::default()).collect();
        for (i, p) in self.table().into_iter().flatten().enumerate() {
            let run = p.load(Relaxed);
            // SAFETY: as in `find_run`.
            match unsafe { run.as_ref() }.map(|r| r.number.load(Relaxed)) {
                None => {}
                // anywhere
                Some(NONE) => append(&table, i as u64, run),
                Some(number) => append(&table, number, run),
            }
        }
        let table = Box::into_raw(Box::new(table));
        owned.tables.push(AtomicPtr::new(table));
        self.now.store(table, Release);
    }

    /// The index goes; nobody looks at it any more.
    pub(super) fn clear(&mut self, owned: &mut Owned) {
        for run in self.table().into_iter().flatten().map(|p| p.load(Relaxed)).filter(|r| !r.is_null()) {
            // SAFETY: each run is once in the last table, and nobody uses it after this.
            let run = unsafe { Box::from_raw(run) };
            for cell in run.cells.iter().map(|c| c.load(Relaxed)).filter(|c| !c.is_null()) {
                // SAFETY: the reference of the index.
                drop(unsafe { Arc::from_raw(cell) });
            }
        }
        self.now.store(std::ptr::null_mut(), Relaxed);
        for table in owned.tables.drain(..) {
            // SAFETY: `grow` made it, and nobody uses it after this.
            drop(unsafe { Box::from_raw(table.into_inner()) });
        }
        owned.runs = 0;
    }
}

/// A run without cells on the way of a look-up of `number`.
fn vacant(table: &Table, number: u64) -> Option<&Run> {
    // SAFETY: as in `CellIndex::find_run`.
    let mut runs = search(table, number).map_while(|place| unsafe { place.load(Relaxed).as_ref() });
    runs.find(|run| run.number.load(Relaxed) == NONE)
}

fn append(table: &Table, number: u64, run: *mut Run) {
    if let Some(place) = search(table, number).find(|place| place.load(Relaxed).is_null()) {
        place.store(run, Release);
    }
}

/// [`unused`] of many, with one look at what threads look at: those that are not stay.
pub(super) fn let_go(taken: &mut Vec<Arc<Cell>>) {
    let looked_at = published::all();
    taken.retain(|c| {
        let at = Arc::as_ptr(c).addr();
        looked_at.contains(&at) || pins::is_pinned(at)
    });
}

/// Whether nobody looks at a cell that was taken out of its index, and no handle counts on it. Those who found it before
/// make no new reference any more but from one that they have: from a look a handle's or an `Arc`, from a handle an
/// `Arc`. So looks come first here, then handles, and the caller looks at the number of `Arc`s last.
pub(super) fn unused(cell: &Arc<Cell>) -> bool {
    let at = Arc::as_ptr(cell).addr();
    !published::is_published(at) && !pins::is_pinned(at)
}
