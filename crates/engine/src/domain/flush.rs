//! Writing dirty data before its transaction commits: under memory pressure, and for `data=writeback`.

use super::out::Out;
use super::{Domain, Enter};
use crate::cell::{Body, Cell, State};
use crate::error::Result;
use crate::types::*;
use braidfs_sync::BiasedWriteGuard;
use std::sync::Arc;

/// What became of a file's dirty pages, of who waits for nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flushed {
    /// They are written.
    Yes,
    /// Another thread has the file.
    Locked,
    /// The domain must commit first.
    NoRoom,
}

impl Domain {
    /// Gives a file's dirty pages their places in the running transaction and writes them.
    ///
    /// # Errors
    /// Of the device: the domain is then read-only.
    pub fn flush_cell(&self, cell: &Arc<Cell>) -> Result<()> {
        if !matches!(&cell.state.read().body, Body::File(f) if f.pages.dirty_count() > 0) {
            return Ok(());
        }
        let e = self.enter()?;
        let st = cell.state.write();
        self.flush_entered(e, cell, st)
    }

    /// [`Self::flush_cell`] where neither the journal's room nor the file's lock must be waited for.
    ///
    /// # Errors
    /// As [`Self::flush_cell`].
    pub(crate) fn flush_cell_at_once(&self, cell: &Arc<Cell>) -> Result<Flushed> {
        let Some(e) = self.enter_if_room()? else { return Ok(Flushed::NoRoom) };
        let Some(st) = cell.state.try_write() else { return Ok(Flushed::Locked) };
        self.flush_entered(e, cell, st)?;
        Ok(Flushed::Yes)
    }

    fn flush_entered(&self, e: Enter<'_>, cell: &Arc<Cell>, mut guard: BiasedWriteGuard<'_, State>) -> Result<()> {
        let mut out = Out::default();
        let _io = {
            let st = &mut *guard;
            let dirty = matches!(&st.body, Body::File(f) if f.pages.dirty_count() > 0);
            if st.deleted || !dirty {
                return Ok(());
            }
            if self.commit_overwrites(st) {
                self.touch_content(e.tx(), cell, st)?;
            } else {
                self.touch(e.tx(), cell, st)?;
            }
            self.flush_file(e.tx(), cell, st, &mut out, self.pick_mlog()).inspect_err(|e| self.fail(e))?;
            st.durability.memory_writes_data_early(e.tx().id);
            e.begin_io()
        };
        // the cell first, as they were taken
        drop(guard);
        drop(e);
        // before `_io` lets a commit go on
        self.failing_on_panic("a write of data", || self.submit(out.writes)).inspect_err(|e| self.fail(e))
    }

    /// Whether commits leave data alone (`data=writeback`): whoever promises that data is durable asks for it first.
    pub fn lazy_data(&self) -> bool {
        self.data_mode() == DataMode::Writeback
    }

    /// Writes the data of all files in memory: before a commit that promises everything (`data=writeback`; in the other
    /// modes a commit does it).
    ///
    /// # Errors
    /// As [`Self::flush_cell`].
    pub fn flush_all(&self) -> Result<()> {
        if !self.lazy_data() || self.failed().is_some() {
            return Ok(());
        }
        // kept until they are written: nobody else may hold them, and the cache lets go of such cells
        let _lazy = std::mem::take(&mut *self.lazy.lock());
        self.cells.all().iter().filter(|c| c.kind == FileKind::File).try_for_each(|c| self.flush_cell(c))
    }

    /// Has [`Self::flush_lazy`] write a file that is about to be committed: a commit puts it there with `data=writeback`, too late for
    /// who wants the blocks moved by it.
    pub(crate) fn write_lazily(&self, cell: &Arc<Cell>) {
        if self.lazy_data() {
            let mut lazy = self.lazy.lock();
            if lazy.last().is_none_or(|last| !Arc::ptr_eq(last, cell)) {
                lazy.push(cell.clone());
            }
        }
    }

    /// Writes the data that commits left alone (`data=writeback`).
    ///
    /// # Errors
    /// As [`Self::flush_cell`].
    pub fn flush_lazy(&self) -> Result<()> {
        let cells = std::mem::take(&mut *self.lazy.lock());
        cells.iter().try_for_each(|c| self.flush_cell(c))
    }
}
