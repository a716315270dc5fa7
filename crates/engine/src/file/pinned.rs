//! Reading without a copy: the reader gets the cache's pages themselves, and has them pinned for as long as it looks at them.
//!
//! As in bladefs (section 1.3.2, its get/put interface) a page is referenced, not copied. What is pinned is the content of one
//! moment: whoever overwrites such a page copies it first and leaves the old one to its readers, and so do truncation and
//! removal of the file, which take the page out of the cache. The evictor passes it over. Nothing that a reader of the
//! ordinary way looks at is written: references are counted in the frame ([`crate::cell::frames`]), pages per slot of threads
//! ([`crate::domain::memory`]).

use super::PAGE;
use super::read::clip;
use crate::cell::extents::ExtentMap;
use crate::cell::frames::pool::Home;
use crate::cell::pages::Page;
use crate::cell::pages::shared::View;
use crate::cell::{Body, Cell, State};
use crate::domain::ahead::Ahead;
use crate::error::{Error, Result};
use crate::types::*;
use crate::volume::{MountedVolume, OpenFile, Volume, VolumeRef};
use std::ops::{Deref, Range};
use std::sync::Arc;

/// What holes are made of.
static ZEROS: [u8; PAGE as usize] = [0; PAGE as usize];

/// Consecutive bytes of a file, at most a page of them, where the cache has them. There are no copies of it: what is pinned is counted
/// until its [`Pinned`] is dropped, and no longer.
pub struct Piece {
    /// `None`: zeros.
    page: Option<Page>,
    from: u16,
    to: u16,
}

impl Piece {
    fn new(page: Option<Page>, bytes: Range<usize>) -> Self {
        // both at most 4096
        Self { page, from: bytes.start as u16, to: bytes.end as u16 }
    }
    /// Whether it is of a hole, or of blocks that were never written: zeros that take no memory.
    pub fn is_hole(&self) -> bool {
        self.page.is_none()
    }
}

impl Deref for Piece {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.page.as_ref().map_or(&ZEROS[..], |p| p.bytes())[usize::from(self.from)..usize::from(self.to)]
    }
}

impl std::fmt::Debug for Piece {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Piece({:?}, {}..{})", self.page, self.from, self.to)
    }
}

/// Pages that count as pinned, until this is dropped.
struct Count {
    volume: Arc<VolumeRef>,
    domain: DomainId,
    pages: u64,
}

impl Count {
    /// Counts this many pages from now on.
    fn set(&mut self, pages: u64) -> Result<()> {
        let memory = &self.volume.dom(self.domain).memory;
        match pages.checked_sub(self.pages) {
            Some(more) => memory.pin(more).map_err(|limit| Error::Pinned { limit })?,
            None => memory.unpin(self.pages - pages),
        }
        self.pages = pages;
        Ok(())
    }
}

impl Drop for Count {
    fn drop(&mut self) {
        if self.pages > 0 {
            self.volume.dom(self.domain).memory.unpin(self.pages);
        }
    }
}

/// Bytes of a file as of the moment of [`Volume::read_pinned`], in the cache's own pages: [pieces](Piece) in their order, each
/// a slice of bytes. They stay as they are until this is dropped, whatever becomes of file and volume. The volume's devices
/// stay open for as long.
pub struct Pinned {
    pieces: Vec<Piece>,
    len: usize,
    // behind the pages, so that they are counted until they are gone
    _count: Count,
}

impl Pinned {
    /// Bytes in all: fewer than asked for only at the end of the file.
    pub fn bytes(&self) -> usize {
        self.len
    }
    /// A copy of them.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut all = Vec::with_capacity(self.len);
        self.pieces.iter().for_each(|p| all.extend_from_slice(p));
        all
    }
}

impl Deref for Pinned {
    type Target = [Piece];
    fn deref(&self) -> &[Piece] {
        &self.pieces
    }
}

impl std::fmt::Debug for Pinned {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pinned({} bytes in {} pieces)", self.len, self.pieces.len())
    }
}

/// The pages from byte `offset` on, `n` bytes; the first page that is missing, if any.
fn collect(map: &ExtentMap, pages: &View<'_>, offset: u64, n: usize, pieces: &mut Vec<Piece>) -> Option<u64> {
    pieces.clear();
    let mut done = 0;
    while done < n {
        let at = offset + done as u64;
        let (lblk, from) = (at / PAGE, (at % PAGE) as usize);
        let to = (from + n - done).min(PAGE as usize);
        let page = pages.page(lblk);
        if page.is_none() && map.get(lblk).is_some_and(|p| !p.unwritten) {
            return Some(lblk);
        }
        pieces.push(Piece::new(page, from..to));
        done += to - from;
    }
    None
}

/// The only piece of a file whose content is in its inode: a copy, since that has no page.
fn collect_inline(content: &[u8], home: Home, offset: u64, n: usize, pieces: &mut Vec<Piece>) {
    pieces.clear();
    if n > 0 {
        // what the content is shorter than the file is zeros; both end within the first page
        let at = offset as usize;
        pieces.push(Piece::new(Some(Page::from_slice(content, home)), at..at + n));
    }
}

impl MountedVolume {
    /// [`Self::read_then`] that pins; the pages are counted before the first of them comes into memory.
    fn pin_then<R>(
        &self,
        c: &Arc<Cell>,
        ahead: &Ahead,
        (offset, len): (u64, usize),
        count: &mut Count,
        f: impl Fn(&State) -> R,
    ) -> Result<(usize, Vec<Piece>, R)> {
        let (memory, home) = (&self.dom(c.domain).memory, self.dom(c.domain).place.home());
        let mut pieces = Vec::new();
        loop {
            let missing = {
                let st = c.state.read();
                let (n, pages) = clip(&st, offset, len);
                count.set(pages.end - pages.start)?;
                let Body::File(file) = &st.body else { return Err(Error::Invalid("not a regular file")) };
                let missing = match &file.inline {
                    Some(content) => {
                        collect_inline(content, home, offset, n, &mut pieces);
                        None
                    }
                    None if n == 0 => None,
                    None => match file.pages.view(pages.start, pages.end - 1) {
                        Some(view) => collect(&file.map, &view, offset, n, &mut pieces),
                        None => Some(pages.start),
                    },
                };
                match missing {
                    None => {
                        memory.hit();
                        return Ok((n, pieces, f(&st)));
                    }
                    Some(first) => first..pages.end,
                }
            };
            // Not with pages of the first try: a thread that has the file alone would copy what it finds shared.
            pieces.clear();
            let mut st = c.state.write();
            let (n, pages) = clip(&st, offset, len);
            count.set(pages.end - pages.start)?;
            let missing = missing.start..missing.end.min(pages.end);
            if !missing.is_empty() {
                self.load_for_reader(c, &mut st, (missing.start, missing.end), Some(ahead))?;
            }
            // taken under the same lock: an evictor could win for ever otherwise
            if let Body::File(file) = &mut st.body
                && file.inline.is_none()
                && collect(&file.map, &file.pages.view_alone(), offset, n, &mut pieces).is_none()
            {
                memory.miss();
                return Ok((n, pieces, f(&st)));
            }
        }
    }
}

impl Volume {
    /// Reads up to `len` bytes at `offset` as [`Self::read`] does, without a copy: what comes back refers to the cache's
    /// pages, and shows the file as it was at one moment of this call. Overwriting the file, truncating or removing it changes
    /// nothing of that. Content that lies in the inode (short files) is copied.
    ///
    /// Pinned pages count as memory of the cache beside its pages (each page of the range once, of holes, too, and again where it
    /// is pinned again). A quarter of the cache may be pinned, and of a tenant with a ceiling of memory a quarter of that; threads
    /// may go over it by a thirty-second part.
    ///
    /// # Errors
    /// [`Error::Pinned`] where more would be pinned than may be: nothing is then. Else as [`Self::read`].
    pub fn read_pinned(&self, file: &OpenFile, offset: u64, len: usize) -> Result<Pinned> {
        match file.cell.kind {
            FileKind::File => {}
            FileKind::Dir => return Err(Error::IsDir),
            _ => return Err(Error::Invalid("not a regular file")),
        }
        let i = self.mounted();
        let c = &file.cell;
        let asked = clip(&c.state.read(), offset, len).0;
        let _paid = i.pace(c.domain, Demand::read(asked));
        let mut count = Count { volume: self.reference(), domain: c.domain, pages: 0 };
        let (n, pieces, due) = i.pin_then(c, &file.ahead, (offset, len), &mut count, |st| i.access_due(st))?;
        if let Some(now) = due.filter(|_| n > 0) {
            i.set_atime(c, now);
        }
        i.maybe_evict(i.dom(c.domain));
        Ok(Pinned { pieces, len: n, _count: count })
    }
}

#[cfg(test)]
mod tests;
