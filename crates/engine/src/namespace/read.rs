//! Reading file data, SEEK_DATA and SEEK_HOLE.

use crate::cell::{Body, Cell, State};
use crate::error::{Error, Result};
use crate::types::*;
use crate::volume::{Inner, OpenFile, Volume};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

const PAGE: u64 = 4096;

/// A day, in seconds: relatime updates an access time that is older.
const RELATIME_AGE: i64 = 24 * 3600;

/// Copies what is in memory; the first page that is missing, if any.
fn copy_cached(st: &State, offset: u64, buf: &mut [u8]) -> Option<u64> {
    let Body::File(f) = &st.body else { return None };
    if let Some(b) = &f.inline {
        let rest = usize::try_from(offset).ok().and_then(|at| b.get(at..)).unwrap_or(&[]);
        let n = rest.len().min(buf.len());
        buf[..n].copy_from_slice(&rest[..n]);
        buf[n..].fill(0);
        return None;
    }
    let mut done = 0;
    while done < buf.len() {
        let at = offset + done as u64;
        let (lblk, from) = (at / PAGE, (at % PAGE) as usize);
        let n = (PAGE as usize - from).min(buf.len() - done);
        let out = &mut buf[done..done + n];
        match f.pages.get(lblk) {
            Some(p) => out.copy_from_slice(&p.bytes()[from..from + n]),
            None => match f.map.get(lblk) {
                Some(p) if !p.unwritten => return Some(lblk),
                _ => out.fill(0),
            },
        }
        done += n;
    }
    None
}

impl Inner {
    /// Reads from a file or symlink; fewer bytes only at its end.
    pub(crate) fn read_cell(&self, c: &Arc<Cell>, offset: u64, buf: &mut [u8]) -> Result<usize> {
        Ok(self.read_then(c, offset, buf, |_| ())?.0)
    }

    /// [`Self::read_cell`], and what `f` says of the state that was read.
    fn read_then<R>(&self, c: &Arc<Cell>, offset: u64, buf: &mut [u8], f: impl Fn(&State) -> R) -> Result<(usize, R)> {
        loop {
            let missing = {
                let st = c.state.read();
                let n = st.size.saturating_sub(offset).min(buf.len() as u64) as usize;
                match copy_cached(&st, offset, &mut buf[..n]) {
                    None => return Ok((n, f(&st))),
                    Some(lblk) => (lblk, (offset + n as u64).div_ceil(PAGE)),
                }
            };
            let (first, end) = missing;
            let mut st = c.state.write();
            self.dom(c.domain).load_pages(c, &mut st, first, end.saturating_sub(first).max(1))?;
            // copied under the same lock: an evictor could win for ever otherwise
            let n = st.size.saturating_sub(offset).min(buf.len() as u64) as usize;
            if copy_cached(&st, offset, &mut buf[..n]).is_none() {
                return Ok((n, f(&st)));
            }
        }
    }

    /// The time that a file read just now gets as its access time, where the mount's mode asks for it.
    fn access_due(&self, st: &State) -> Option<Timestamp> {
        let mode = self.shared.live.atime();
        if mode == AtimeMode::Noatime || self.shared.read_only.load(Relaxed) {
            return None;
        }
        let now = self.shared.now();
        let old = st.atime <= st.mtime || st.atime <= st.ctime || now.sec - st.atime.sec >= RELATIME_AGE;
        let due = mode == AtimeMode::Strictatime || old;
        let not = now == st.atime || st.flags & braidfs_format::inode::NOATIME != 0 || st.deleted;
        (due && !not).then_some(now)
    }

    /// Updates the access time.
    fn set_atime(&self, c: &Arc<Cell>, now: Timestamp) {
        // a volume too full for an access time is still readable
        if let Ok(mut op) = super::Op::begin(self, &[c.domain], 1, true) {
            let mut st = c.state.write();
            if !st.deleted && op.touch(c, &mut st).is_ok() {
                st.atime = now;
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
        match file.cell.kind {
            FileKind::File => {}
            FileKind::Dir => return Err(Error::IsDir),
            _ => return Err(Error::Invalid("not a regular file")),
        }
        let (n, due) = self.inner().read_then(&file.cell, offset, buf, |st| self.inner().access_due(st))?;
        if let Some(now) = due.filter(|_| n > 0) {
            self.inner().set_atime(&file.cell, now);
        }
        self.inner().maybe_evict();
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
