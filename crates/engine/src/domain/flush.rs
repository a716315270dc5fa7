//! Writing dirty data before its transaction commits: under memory pressure, and for `data=writeback`.

use super::out::Out;
use super::{Domain, Enter};
use crate::cell::{Body, Cell, State};
use crate::error::{Error, Result};
use crate::types::*;
use braidfs_sync::BiasedWriteGuard;
use std::sync::Arc;

/// A flush that lacks blocks commits so often before it says so: others may take what the first commit gives.
const COMMITS: usize = 2;

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
    /// Of the device: the domain is then read-only. [`Error::NoSpace`] where there is no block for the file's records, not even after
    /// a commit: the pages stay dirty then.
    pub fn flush_cell(&self, cell: &Arc<Cell>) -> Result<()> {
        if !matches!(&cell.state.read().body, Body::File(f) if f.pages.dirty_count() > 0) {
            return Ok(());
        }
        for commits in 0..=COMMITS {
            if commits > 0 {
                // what was reserved and not needed comes back by it, and what lies elsewhere by now
                self.commit()?;
            }
            let e = self.enter()?;
            if self.flush_entered(e, cell, cell.state.write())? {
                return Ok(());
            }
        }
        Err(Error::NoSpace)
    }

    /// [`Self::flush_cell`] where neither the journal's room nor the file's lock must be waited for.
    ///
    /// # Errors
    /// As [`Self::flush_cell`].
    pub(crate) fn flush_cell_at_once(&self, cell: &Arc<Cell>) -> Result<Flushed> {
        let Some(e) = self.enter_if_room()? else { return Ok(Flushed::NoRoom) };
        let Some(st) = cell.state.try_write() else { return Ok(Flushed::Locked) };
        Ok(if self.flush_entered(e, cell, st)? { Flushed::Yes } else { Flushed::NoRoom })
    }

    /// False, with nothing changed, where there are too few blocks for the file's records.
    fn flush_entered(&self, e: Enter<'_>, cell: &Arc<Cell>, mut guard: BiasedWriteGuard<'_, State>) -> Result<bool> {
        let mut out = Out::default();
        let _io = {
            let st = &mut *guard;
            let dirty = matches!(&st.body, Body::File(f) if f.pages.dirty_count() > 0);
            if st.deleted || !dirty {
                return Ok(true);
            }
            let Some(promised) = self.promise_records(e.tx(), st) else { return Ok(false) };
            if self.commit_overwrites(st) {
                self.touch_content(e.tx(), cell, st)?;
            } else {
                self.touch(e.tx(), cell, st)?;
            }
            self.flush_file(e.tx(), cell, st, &mut out, self.pick_mlog()).inspect_err(|e| self.fail(e))?;
            self.keep_promise(e.tx(), promised, st);
            st.durability.memory_writes_data_early(e.tx().id);
            e.begin_io()
        };
        // the cell first, as they were taken
        drop(guard);
        drop(e);
        // before `_io` lets a commit go on
        let written = self.failing_on_panic("a write of data", || self.submit(out.writes));
        written.map(|()| true).inspect_err(|e| self.fail(e))
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
        let lazy = std::mem::take(&mut *self.lazy.lock());
        let written = self.cells.all().iter().filter(|c| c.kind == FileKind::File).try_for_each(|c| self.flush_cell(c));
        if written.is_err() {
            self.lazy.lock().extend(lazy);
        }
        written
    }

    /// [`Self::flush_all`] by who goes on where some of it finds no room: it is tried again later.
    ///
    /// # Errors
    /// Of the device.
    pub(crate) fn flush_all_that_fits(&self) -> Result<()> {
        match self.flush_all() {
            Err(Error::NoSpace) => Ok(()),
            flushed => flushed,
        }
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
        for (n, c) in cells.iter().enumerate() {
            if let Err(e) = self.flush_cell(c) {
                // see `flush_all`
                self.lazy.lock().extend_from_slice(&cells[n..]);
                return Err(e);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
