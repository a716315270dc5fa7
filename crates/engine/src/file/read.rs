//! Reading file data, SEEK_DATA and SEEK_HOLE.

use super::PAGE;
use crate::cell::extents::ExtentMap;
use crate::cell::pages::shared::View;
use crate::cell::{Body, Cell, FileBody, State};
use crate::domain::ahead::Ahead;
use crate::error::{Error, Result};
use crate::planted::sharing::{Place, share};
use crate::types::*;
use crate::volume::{MountedVolume, OpenFile, Volume};
use std::sync::Arc;

fn copy_inline(content: &[u8], offset: u64, buf: &mut [u8]) {
    let rest = usize::try_from(offset).ok().and_then(|at| content.get(at..)).unwrap_or(&[]);
    let n = rest.len().min(buf.len());
    buf[..n].copy_from_slice(&rest[..n]);
    buf[n..].fill(0);
}

/// Copies what is in memory from byte `done` of `buf` on; the first page that is missing, if any.
#[inline]
fn copy_pages(map: &ExtentMap, pages: &View<'_>, offset: u64, mut done: usize, buf: &mut [u8]) -> Option<u64> {
    while done < buf.len() {
        let at = offset + done as u64;
        let (lblk, from) = (at / PAGE, (at % PAGE) as usize);
        let n = (PAGE as usize - from).min(buf.len() - done);
        let out = &mut buf[done..done + n];
        match pages.get(lblk) {
            Some(p) => out.copy_from_slice(&p[from..from + n]),
            None => match map.get(lblk) {
                Some(p) if !p.unwritten => return Some(lblk),
                _ => out.fill(0),
            },
        }
        done += n;
    }
    None
}

impl MountedVolume {
    /// Reads what is not in memory, from block `lblk` on, straight to `buf`, of which the first `n` bytes are of the file:
    /// who asks keeps it. Whether all was to be had so.
    fn read_around_pages(
        &self,
        c: &Cell,
        (st, pages): (&State, &View<'_>),
        offset: u64,
        (n, buf): (usize, &mut [u8]),
        mut lblk: u64,
    ) -> Result<bool> {
        let Body::File(f) = &st.body else { return Ok(false) };
        if !self.shared.options.cached_above || !offset.is_multiple_of(PAGE) {
            return Ok(false);
        }
        loop {
            let at = (lblk * PAGE - offset) as usize;
            let read = self.dom(c.domain).read_past_pages(c, st, lblk, &mut buf[at..])?;
            if read == 0 {
                return Ok(false);
            }
            match copy_pages(&f.map, pages, offset, (at + read).min(n), &mut buf[..n]) {
                None => return Ok(true),
                Some(next) => lblk = next,
            }
        }
    }

    /// Reads from a file or symlink, by the handle whose reads `ahead` knows; fewer bytes only at its end. And what `f` says of the state that was read.
    pub(crate) fn read_then<R>(
        &self,
        c: &Arc<Cell>,
        ahead: Option<&Ahead>,
        offset: u64,
        buf: &mut [u8],
        f: impl Fn(&State) -> R,
    ) -> Result<(usize, R)> {
        let memory = &self.dom(c.domain).memory;
        loop {
            let (first, end) = {
                let st = c.state.read();
                let n = st.size.saturating_sub(offset).min(buf.len() as u64) as usize;
                let Body::File(file) = &st.body else { return Ok((n, f(&st))) };
                if let Some(b) = &file.inline {
                    copy_inline(b, offset, &mut buf[..n]);
                    memory.hit();
                    return Ok((n, f(&st)));
                }
                if n == 0 {
                    return Ok((n, f(&st)));
                }
                let (first, last) = (offset / PAGE, (offset + n as u64 - 1) / PAGE);
                let missing = match file.pages.view(first, last) {
                    Some(pages) => match copy_pages(&file.map, &pages, offset, 0, &mut buf[..n]) {
                        None => {
                            memory.hit();
                            return Ok((n, f(&st)));
                        }
                        Some(lblk) if self.read_around_pages(c, (&st, &pages), offset, (n, buf), lblk)? => {
                            memory.miss();
                            return Ok((n, f(&st)));
                        }
                        Some(lblk) => lblk,
                    },
                    // others may overwrite more pages of them than a reader locks
                    None => first,
                };
                (missing, last + 1)
            };
            let mut st = c.state.write();
            self.load_for_reader(c, &mut st, (first, end), ahead)?;
            // copied under the same lock: an evictor could win for ever otherwise
            let n = st.size.saturating_sub(offset).min(buf.len() as u64) as usize;
            let out = &mut buf[..n];
            let missing = match &mut st.body {
                Body::File(FileBody { inline: Some(b), .. }) => {
                    copy_inline(b, offset, out);
                    None
                }
                Body::File(FileBody { map, pages, .. }) => copy_pages(map, &pages.view_alone(), offset, 0, out),
                _ => None,
            };
            if missing.is_none() {
                memory.miss();
                let seen = f(&st);
                drop(st);
                // only who reads from the device adds pages
                self.maybe_evict(self.dom(c.domain));
                return Ok((n, seen));
            }
        }
    }
}

impl Volume {
    /// Reads up to `buf.len()` bytes at `offset`; fewer only at the end of the file. Updates the access time by the
    /// mount's mode.
    ///
    /// # Errors
    /// [`Error::IsDir`], [`Error::Invalid`] for special files, or of the device.
    pub fn read(&self, file: &OpenFile, offset: u64, buf: &mut [u8]) -> Result<usize> {
        share(Place::Read);
        self.read_noting(file, offset, buf, true)
    }

    /// As [`Self::read`], of a file opened with O_NOATIME.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn read_unnoted(&self, file: &OpenFile, offset: u64, buf: &mut [u8]) -> Result<usize> {
        self.read_noting(file, offset, buf, false)
    }

    fn read_noting(&self, file: &OpenFile, offset: u64, buf: &mut [u8], noting: bool) -> Result<usize> {
        match file.cell.kind {
            FileKind::File => {}
            FileKind::Dir => return Err(Error::IsDir),
            _ => return Err(Error::Invalid("not a regular file")),
        }
        let i = self.mounted();
        let _paid = i.pace(file.cell.domain, Demand::read(buf.len()));
        let (n, due) =
            i.read_then(&file.cell, Some(&file.ahead), offset, buf, |st| if noting { i.access_due(st) } else { None })?;
        if let Some(now) = due.filter(|_| n > 0) {
            i.set_atime(&file.cell, now);
        }
        Ok(n)
    }

    /// SEEK_DATA (`hole` false) or SEEK_HOLE.
    ///
    /// # Errors
    /// [`Error::NoData`] at or past the end of the file, or where no data follows.
    pub fn seek(&self, file: &OpenFile, offset: u64, hole: bool) -> Result<u64> {
        let st = file.cell.state.read();
        let Body::File(f) = &st.body else { return Err(Error::Invalid("not a regular file")) };
        if offset >= st.size {
            return Err(Error::NoData);
        }
        if f.inline.is_some() {
            return Ok(if hole { st.size } else { offset });
        }
        let mut lblk = offset / PAGE;
        loop {
            if lblk * PAGE >= st.size {
                return if hole { Ok(st.size) } else { Err(Error::NoData) };
            }
            // end of the run of data from here, or the start of the next
            let dirty = f.pages.is_dirty(lblk);
            let piece = f.map.get(lblk).filter(|p| !p.unwritten);
            let data = dirty || piece.is_some();
            if data != hole {
                return Ok((lblk * PAGE).max(offset));
            }
            lblk = if data {
                piece.map_or(lblk + 1, |p| if dirty { lblk + 1 } else { lblk + u64::from(p.len) })
            } else {
                let mapped = next_written(f, lblk);
                let cached = f.pages.next_dirty(lblk);
                match (mapped, cached) {
                    (Some(a), Some(b)) => a.min(b),
                    (Some(a), None) | (None, Some(a)) => a,
                    (None, None) => return if hole { Ok(offset) } else { Err(Error::NoData) },
                }
            };
        }
    }
}

/// The next logical block from `lblk` with written data on disk.
fn next_written(f: &crate::cell::FileBody, mut lblk: u64) -> Option<u64> {
    loop {
        let p = f.map.next_from(lblk)?;
        if !p.unwritten {
            return Some(p.lblk.max(lblk));
        }
        lblk = p.lblk + u64::from(p.len);
    }
}
