//! Reading ahead, by open file (bladefs, section 2.2: after two reads in a row, and not past the end of an extent).
//!
//! A read that waits for the device brings more pages than it was asked for where the handle reads in a row, four times as many
//! at first, then twice as many each time as before. It is the same request of the device, only longer: none is made for what
//! lies elsewhere, and a read at random brings nothing more. Reads that memory answers look at nothing and write nothing here.
//! Below a mount the kernel reads ahead, and the volume does not.

use super::PAGE;
use crate::cell::extents::ExtentMap;
use crate::cell::{Body, Cell, FileBody, State};
use crate::domain::Domain;
use crate::domain::ahead::{Advice, Ahead, AheadBudget};
use crate::domain::load::READ_PAGES;
use crate::error::{Error, Result};
use crate::types::*;
use crate::volume::{MountedVolume, OpenFile, Volume};

/// How many of `pages` from `end` on the device has right behind `end - 1`, in the file, and are not in memory.
fn behind(f: &FileBody, size: u64, end: u64, pages: u64) -> u64 {
    let in_file = size.div_ceil(PAGE).saturating_sub(end);
    let in_extent = |map: &ExtentMap| {
        let last = map.get(end.checked_sub(1)?)?;
        (!last.unwritten).then(|| u64::from(last.len) - 1)
    };
    let n = pages.min(in_file).min(in_extent(&f.map).unwrap_or(0));
    (0..n).find(|k| f.pages.has(end + k)).unwrap_or(n)
}

impl MountedVolume {
    /// [`Domain::load_pages`] `first .. end` for a reader, and more where its handle reads in a row.
    pub(crate) fn load_for_reader(
        &self,
        c: &Cell,
        st: &mut State,
        (first, end): (u64, u64),
        ahead: Option<&Ahead>,
    ) -> Result<()> {
        let d = self.dom(c.domain);
        let bytes = d.memory.may_hold();
        let max = (self.shared.options.readahead / PAGE).min(READ_PAGES).min(AheadBudget::window_max(bytes));
        let more = match (ahead, &st.body) {
            (Some(a), Body::File(f)) if max > 0 && !self.shared.options.cached_above => {
                let is_roomy = || d.memory.pages() * 4096 < bytes / 2;
                a.plan(&d.ahead, (bytes, is_roomy), (first, end), max, |n| behind(f, st.size, end, n))
            }
            _ => 0,
        };
        if more > 0 && d.load_pages(c, st, first, end + more - first).is_ok() {
            if let Body::File(f) = &mut st.body {
                // or they would be the first to go
                (end..end + more).for_each(|l| {
                    f.pages.get(l);
                });
            }
            return Ok(());
        }
        // what nobody asked for is no error of this read
        d.load_pages(c, st, first, end - first)
    }
}

impl Volume {
    /// What a handle's reads will be like, for those from now on.
    pub fn advise(&self, file: &OpenFile, advice: Advice) {
        file.ahead.advise(advice);
    }

    /// Brings `len` bytes from `offset` on into memory, as far as they are in the file, and an eighth of what the domain may hold:
    /// in requests of a mebibyte, charged as reads. How many bytes of the file were or came in reach.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn will_need(&self, file: &OpenFile, offset: u64, len: u64) -> Result<u64> {
        if file.cell.kind != FileKind::File {
            return Err(if file.cell.kind == FileKind::Dir {
                Error::IsDir
            } else {
                Error::Invalid("not a regular file")
            });
        }
        let i = self.mounted();
        let d: &Domain = i.dom(file.cell.domain);
        let most = (d.memory.may_hold() / 8 / PAGE).max(1);
        let first = offset / PAGE;
        let end = offset.saturating_add(len).div_ceil(PAGE).min(first.saturating_add(most));
        let mut at = first;
        loop {
            let to = end.min(at + READ_PAGES);
            let _paid = i.pace(d.id, Demand::read(((to - at) * PAGE) as usize));
            let mut st = file.cell.state.write();
            let size = st.size;
            let to = to.min(size.div_ceil(PAGE));
            if at < to && matches!(&st.body, Body::File(f) if f.inline.is_none()) {
                d.load_pages(&file.cell, &mut st, at, to - at)?;
            }
            drop(st);
            i.maybe_evict(d);
            if to <= at || to == end {
                let reached = (to.max(at) * PAGE).min(size).min(offset.saturating_add(len));
                return Ok(reached.saturating_sub(offset));
            }
            at = to;
        }
    }
}
