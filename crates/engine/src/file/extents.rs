//! Where the blocks of a file lie: what FIEMAP tells on other file systems. (The kernel's FUSE does not hand that on.)

use super::PAGE;
use crate::cell::Body;
use crate::error::{Error, Result};
use crate::types::*;
use crate::volume::Volume;

/// A part of a file that has, or will get, blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct FileExtent {
    /// Where in the file, bytes.
    pub offset: u64,
    /// Bytes, a multiple of 4096; the last extent may reach past the end of the file.
    pub len: u64,
    /// Device (in the order of the volume's) and byte on it. `None`: in the inode's record, or not written yet.
    pub place: Option<(usize, u64)>,
    /// It reads as zeros.
    pub unwritten: bool,
}

impl Volume {
    /// The extents of a regular file, rising. True for a moment: the cleaner and overwriting move blocks.
    ///
    /// # Errors
    /// [`Error::NotFound`]; [`Error::IsDir`], [`Error::Invalid`] for what has no data; of the device.
    pub fn extents(&self, ino: InodeNo) -> Result<Vec<FileExtent>> {
        let i = self.mounted();
        let c = i.cell(ino)?;
        match c.kind {
            FileKind::File => {}
            FileKind::Dir => return Err(Error::IsDir),
            _ => return Err(Error::Invalid("not a regular file")),
        }
        let st = c.state.read();
        let Body::File(f) = &st.body else { return Err(Error::Invalid("not a regular file")) };
        let waiting = |offset, len| FileExtent { offset, len, place: None, unwritten: false };
        if f.inline.as_ref().is_some_and(|b| !b.is_empty()) {
            return Ok(vec![waiting(0, PAGE)]);
        }
        let mut all = Vec::with_capacity(f.map.extent_count());
        for e in f.map.iter() {
            let (device, block) = i.store.place(e.addr, u64::from(e.len))?;
            let len = u64::from(e.len) * PAGE;
            let place = Some((device, block * PAGE));
            all.push(FileExtent { offset: e.lblk * PAGE, len, place, unwritten: e.unwritten });
        }
        // pages that have no place yet
        let mut fresh: Vec<FileExtent> = Vec::new();
        for l in f.pages.dirty_blocks().filter(|l| f.map.get(*l).is_none()) {
            match fresh.last_mut() {
                Some(last) if last.offset + last.len == l * PAGE => last.len += PAGE,
                _ => fresh.push(waiting(l * PAGE, PAGE)),
            }
        }
        all.append(&mut fresh);
        all.sort_unstable_by_key(|e| e.offset);
        Ok(all)
    }
}
