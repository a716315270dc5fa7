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
use std::ops::Range;
use std::sync::Arc;

/// A read of more bytes is done in pieces of so many at least,
const PIECE_MIN: usize = 1 << 20;
/// and of so many at most,
const PIECE_MAX: usize = 16 << 20;
/// of this part of what the domain may hold.
const PIECE_PART: u64 = 32;

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

/// How many of `len` bytes from `offset` on are of the file, and the pages that they lie in.
#[inline(always)]
pub(super) fn clip(st: &State, offset: u64, len: usize) -> (usize, Range<u64>) {
    let n = st.size.saturating_sub(offset).min(len as u64) as usize;
    let first = offset / PAGE;
    (n, first..if n == 0 { first } else { (offset + n as u64).div_ceil(PAGE) })
}

/// What of the bytes that were asked for is in memory.
enum Cached<'a> {
    All,
    /// The pages, and the first block that is missing.
    Not(View<'a>, u64),
    /// Others may overwrite more pages of them than a reader locks.
    TooManyLocks,
}

/// Copies what is in memory from `offset` on, where the file has all bytes that are asked for.
#[inline(always)]
fn copy_cached<'a>(st: &'a State, offset: u64, buf: &mut [u8]) -> Cached<'a> {
    let Body::File(file) = &st.body else { return Cached::All };
    if let Some(b) = &file.inline {
        copy_inline(b, offset, buf);
        return Cached::All;
    }
    if buf.is_empty() {
        return Cached::All;
    }
    let Some(pages) = file.pages.view(offset / PAGE, (offset + buf.len() as u64 - 1) / PAGE) else {
        return Cached::TooManyLocks;
    };
    match copy_pages(&file.map, &pages, offset, 0, buf) {
        None => Cached::All,
        Some(lblk) => Cached::Not(pages, lblk),
    }
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

    /// Reads from a file or symlink, by the handle whose reads `ahead` knows; fewer bytes only at its end. `f` is shown the
    /// state that was read.
    #[inline(always)]
    pub(crate) fn read_then(
        &self,
        c: &Arc<Cell>,
        ahead: Option<&Ahead>,
        offset: u64,
        buf: &mut [u8],
        mut f: impl FnMut(&State),
    ) -> Result<usize> {
        {
            let st = c.state.read();
            let (n, _) = clip(&st, offset, buf.len());
            if let Cached::All = copy_cached(&st, offset, &mut buf[..n]) {
                self.dom(c.domain).memory.hit();
                f(&st);
                return Ok(n);
            }
        }
        self.read_missing(c, ahead, offset, buf, &mut f)
    }

    /// [`Self::read_then`] where not all is in memory.
    #[inline(never)]
    fn read_missing(
        &self,
        c: &Arc<Cell>,
        ahead: Option<&Ahead>,
        offset: u64,
        buf: &mut [u8],
        f: &mut dyn FnMut(&State),
    ) -> Result<usize> {
        let memory = &self.dom(c.domain).memory;
        loop {
            let (first, end) = {
                let st = c.state.read();
                let (n, pages) = clip(&st, offset, buf.len());
                let missing = match copy_cached(&st, offset, &mut buf[..n]) {
                    Cached::All => {
                        memory.hit();
                        f(&st);
                        return Ok(n);
                    }
                    Cached::Not(view, lblk) if self.read_around_pages(c, (&st, &view), offset, (n, buf), lblk)? => {
                        memory.miss();
                        f(&st);
                        return Ok(n);
                    }
                    Cached::Not(_, lblk) => lblk,
                    Cached::TooManyLocks => pages.start,
                };
                (missing, pages.end)
            };
            let mut st = c.state.write();
            self.load_for_reader(c, &mut st, (first, end), ahead)?;
            // copied under the same lock: an evictor could win for ever otherwise
            let (n, _) = clip(&st, offset, buf.len());
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
                f(&st);
                drop(st);
                // only who reads from the device adds pages
                self.maybe_evict(self.dom(c.domain));
                return Ok(n);
            }
        }
    }

    /// [`Self::read_then`] of as many bytes as a program likes. All that one piece lacks comes into memory before any of it leaves
    /// again, and with the inode locked, for which a commit waits, too.
    #[cold]
    #[inline(never)]
    fn read_in_pieces(&self, file: &OpenFile, offset: u64, buf: &mut [u8], f: &mut dyn FnMut(&State)) -> Result<usize> {
        let c = &file.cell;
        let part = usize::try_from(self.dom(c.domain).memory.may_hold() / PIECE_PART).unwrap_or(PIECE_MAX);
        let piece = part.clamp(PIECE_MIN, PIECE_MAX).next_multiple_of(PAGE as usize);
        // they meet between pages
        let (mut done, mut end) = (0, piece - (offset % PAGE) as usize);
        loop {
            end = end.min(buf.len());
            let wanted = end - done;
            let got = self.read_then(c, Some(&file.ahead), offset + done as u64, &mut buf[done..end], &mut *f)?;
            done += got;
            if got < wanted || done == buf.len() {
                return Ok(done);
            }
            end += piece;
        }
    }
}

impl Volume {
    /// Reads up to `buf.len()` bytes at `offset`; fewer only at the end of the file. Updates the access time by the
    /// mount's mode. Up to 1 MiB are those of one moment, and up to a 32nd part of the cache where that is more, up to 16 MiB; of
    /// what is longer each piece is.
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
        if self.mounted().is_paced() {
            return self.read_paced(file, offset, buf, noting);
        }
        self.read_unpaced(file, offset, buf, noting)
    }

    #[cold]
    #[inline(never)]
    fn read_paced(&self, file: &OpenFile, offset: u64, buf: &mut [u8], noting: bool) -> Result<usize> {
        let _paid = self.mounted().pace(file.cell.domain, Demand::read(buf.len()));
        self.read_unpaced(file, offset, buf, noting)
    }

    #[inline(always)]
    fn read_unpaced(&self, file: &OpenFile, offset: u64, buf: &mut [u8], noting: bool) -> Result<usize> {
        let (i, mut due) = (self.mounted(), None);
        let mut note = |st: &State| {
            if noting {
                due = i.access_due(st);
            }
        };
        let n = if buf.len() <= PIECE_MIN {
            i.read_then(&file.cell, Some(&file.ahead), offset, buf, note)?
        } else {
            i.read_in_pieces(file, offset, buf, &mut note)?
        };
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
                let cached = f.pages.next_dirty(lblk);
                match next_written(f, lblk, cached.unwrap_or(u64::MAX)).or(cached) {
                    Some(next) => next,
                    None => return if hole { Ok(offset) } else { Err(Error::NoData) },
                }
            };
        }
    }
}

/// The next logical block from `lblk` with written data on disk, of those before `end`.
fn next_written(f: &crate::cell::FileBody, mut lblk: u64, end: u64) -> Option<u64> {
    loop {
        let p = f.map.next_from(lblk).filter(|p| p.lblk < end)?;
        if !p.unwritten {
            return Some(p.lblk.max(lblk));
        }
        lblk = p.lblk + u64::from(p.len);
    }
}

#[cfg(test)]
mod tests;
