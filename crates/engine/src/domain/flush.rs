//! Writing dirty data before its transaction commits: under memory pressure, and for `data=writeback`.

use super::Domain;
use super::out::Out;
use crate::cell::{Body, Cell};
use crate::error::Result;
use crate::types::*;
use std::sync::Arc;

impl Domain {
    /// Gives a file's dirty pages their places in the running transaction and writes them.
    ///
    /// # Errors
    /// Of the device: the domain is then read-only.
    pub fn flush_cell(&self, cell: &Arc<Cell>) -> Result<()> {
        if !matches!(&cell.state.read().body, Body::File(f) if f.pages.dirty_count() > 0) {
            return Ok(());
        }
        let mut out = Out::default();
        let _io = {
            let e = self.enter()?;
            let mut st = cell.state.write();
            let dirty = matches!(&st.body, Body::File(f) if f.pages.dirty_count() > 0);
            if st.deleted || !dirty {
                return Ok(());
            }
            if self.commit_overwrites(&st) {
                self.touch_content(e.tx(), cell, &mut st)?;
            } else {
                self.touch(e.tx(), cell, &mut st)?;
            }
            self.flush_file(e.tx(), cell, &mut st, &mut out, self.pick_mlog()).inspect_err(|e| self.fail(e))?;
            st.durability.memory_writes_data_early(e.tx().id);
            e.begin_io()
        };
        self.submit(out.writes).inspect_err(|e| self.fail(e))
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

    /// Writes the data that commits left alone (`data=writeback`).
    ///
    /// # Errors
    /// As [`Self::flush_cell`].
    pub fn flush_lazy(&self) -> Result<()> {
        let cells = std::mem::take(&mut *self.lazy.lock());
        cells.iter().try_for_each(|c| self.flush_cell(c))
    }
}
