//! Bringing cells, buckets and pages into memory.

use super::Domain;
use crate::cell::cache::Memory;
use crate::cell::pages::Page;
use crate::cell::record::{Places, decode_cell};
use crate::cell::{Body, Cell, FileBody, State, dir::DirIndex, extents::ExtentMap};
use crate::error::{Error, Result};
use crate::types::*;
use braidfs_format::dentry::{Dentry, decode_bucket};
use braidfs_format::inode::NOCOW;
use braidfs_format::node::{NodeEntry, OVERFLOW};
use braidfs_format::{BLOCK_BYTES, Corrupt};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// Pages read at once at most.
pub(crate) const READ_PAGES: u64 = 256;

/// Directories' memory is counted when it has changed by this much: so much of each directory may be left out.
const COUNT_STEP: usize = 1 << 10;

impl Domain {
    /// The cell of an inode of this domain; `None` where there is no such inode.
    ///
    /// # Errors
    /// [`Error::Corrupt`], or of the device.
    pub fn find(&self, ino: InodeNo) -> Result<Option<Arc<Cell>>> {
        if let Some(c) = self.cells.get(ino) {
            return Ok(Some(c));
        }
        let before = self.cells.before_load(ino);
        let entry = match self.nodes.look(ino.node())? {
            Some(e) if e.used() && e.flags & OVERFLOW == 0 => e,
            _ => return Ok(None),
        };
        let cell = match self.decode(ino, &entry) {
            Ok(cell) => cell,
            // The inode may have moved or gone since its entry was read: what its old block holds now says nothing. (A
            // commit keeps the cell in memory until block and entry have changed.) Where the volume became smaller there is
            // nothing to read any more.
            Err(why) => match self.cells.get_surely(ino) {
                Some(c) => return Ok(Some(c)),
                None if self.nodes.get(ino.node())? != entry => return self.find(ino),
                None => return Err(why),
            },
        };
        // a deletion may have committed since the entry was read
        if self.nodes.get(ino.node())? != entry && self.cells.get_surely(ino).is_none() {
            return self.find(ino);
        }
        // What was freed may still look right. (A commit frees the old block before it sets the entry, and keeps the cell
        // in memory until both are done. Nor is it the domain's any more where its group has left since.)
        let valid = self.space.is_valid(entry.addr);
        if !matches!(valid, Ok(true)) {
            return match self.cells.get_surely(ino) {
                Some(c) => Ok(Some(c)),
                None if self.nodes.get(ino.node())? != entry => self.find(ino),
                None => {
                    valid?;
                    Err(Corrupt::new("node table", format!("{ino} lies in {}, which is free", { entry.addr })).into())
                }
            };
        }
        let (cell, own) = self.counted(cell);
        match self.cells.insert_loaded(cell.clone(), before) {
            Some(c) => {
                if Arc::ptr_eq(&c, &cell) {
                    self.memory.cells_came(&own);
                }
                Ok(Some(c))
            }
            None => self.find(ino),
        }
    }

    /// A cell that was just loaded, and what it adds to the count of memory once others find it.
    fn counted(&self, mut cell: Cell) -> (Arc<Cell>, Memory) {
        let st = cell.state.get_mut();
        *cell.attached.get_mut() = st.attached_steps();
        match &mut st.body {
            Body::File(f) => f.counted = f.index_steps(),
            Body::Dir(d) => d.counted = d.index.loaded_bytes(),
            Body::Special => {}
        }
        let own = Memory::of(&cell);
        (Arc::new(cell), own)
    }

    /// Takes a cell out of the cache, and what goes with it out of the count of memory.
    pub(super) fn forget_cell(&self, cell: &Arc<Cell>) {
        self.cells.remove(cell);
        self.memory.cells_left(&Memory::of(cell));
    }

    /// The cell of an inode from its records, of which the first is where `entry` says.
    fn decode(&self, ino: InodeNo, entry: &NodeEntry) -> Result<Cell> {
        let mut fetch = |n: NodeId| {
            if self.domain_of(n) != Some(self.id) {
                return Err(Corrupt::new("inode", format!("{ino} names {n} of another domain")).into());
            }
            let e = self.nodes.get(n)?;
            if !e.used() {
                return Err(Corrupt::new("inode", format!("{ino} names the free {n}")).into());
            }
            self.nodes.load(n, &e)
        };
        let inside = self.space.inside();
        let holds = |addr, len| inside.holds(addr, len);
        let cell = decode_cell(&self.nodes.load(ino.node(), entry)?, self.id, self.places(&holds), &mut fetch)?;
        debug_assert!(cell.ino == ino && cell.generation == entry.generation, "{} read for {ino}", cell.ino);
        self.note_if_in_pieces(&cell);
        Ok(cell)
    }

    /// What records of its inodes can name, which `holds` says of blocks (`Inside::holds` of its space).
    pub(super) fn places<'p>(&self, holds: &'p dyn Fn(BlockAddr, u32) -> bool) -> Places<'p> {
        Places { holds, blocks: self.space.blocks_in_all() }
    }

    fn note_if_in_pieces(&self, cell: &Cell) {
        let st = cell.state.read();
        match &st.body {
            Body::File(f) if f.is_in_pieces() && st.flags & NOCOW == 0 => {
                self.in_pieces.lock().note(cell.ino, f.map.extent_count());
            }
            _ => {}
        }
    }

    /// Reads a bucket of directory `ino`.
    ///
    /// # Errors
    /// [`Error::Corrupt`] where the block is not that bucket: the domain is then read-only; or of the device.
    pub fn load_bucket(&self, ino: InodeNo, map: &ExtentMap, lblk: u64) -> Result<Vec<Dentry>> {
        self.look_at_bucket(ino, map, lblk).inspect_err(|e| {
            if matches!(e, Error::Corrupt(_)) {
                self.fail(e);
            }
        })
    }

    /// [`Self::load_bucket`] for whom damage is no reason to end the domain: nobody asked for the directory.
    ///
    /// # Errors
    /// [`Error::Corrupt`] where the block is not that bucket; of the device.
    pub fn look_at_bucket(&self, ino: InodeNo, map: &ExtentMap, lblk: u64) -> Result<Vec<Dentry>> {
        let p = map.get(lblk).ok_or_else(|| Corrupt::new("directory", format!("{ino} has no bucket at {lblk}")))?;
        let decode = |b: Arc<[u8]>| Ok(decode_bucket(&b, ino, lblk, self.store.volume, p.addr)?);
        self.nodes.bucket(p.addr).and_then(decode)
    }

    /// Runs `f` on the directory's index with a loader for buckets that are not in memory.
    ///
    /// # Errors
    /// [`Error::NotDir`], or of `f`.
    pub fn with_index<R>(
        &self,
        ino: InodeNo,
        st: &mut State,
        f: impl FnOnce(&mut DirIndex, &mut dyn FnMut(u64) -> Result<Vec<Dentry>>) -> Result<R>,
    ) -> Result<R> {
        let d = st.dir().ok_or(Error::NotDir)?;
        let map = &d.map;
        let r = f(&mut d.index, &mut |lblk| self.load_bucket(ino, map, lblk));
        // in steps: the count is the whole volume's
        let bytes = d.index.loaded_bytes();
        if bytes.abs_diff(d.counted) >= COUNT_STEP {
            self.memory.add_index_bytes(bytes as i64 - d.counted as i64);
            d.counted = bytes;
        }
        r
    }

    /// Reads the run of blocks from `lblk` on, which has no page in memory, to `buf`, as far as it is to be had by one request
    /// of the device to whole blocks; no page is kept. Gives the bytes read, 0 where there is no such run or `buf` is
    /// shorter than a block. Behind the file's end stands anything.
    ///
    /// # Errors
    /// As [`Self::load_pages`].
    pub fn read_past_pages(&self, cell: &Cell, st: &State, lblk: u64, buf: &mut [u8]) -> Result<usize> {
        let Body::File(f) = &st.body else { return Err(Error::Invalid("no file")) };
        let Some(p) = f.map.get(lblk).filter(|p| !p.unwritten) else { return Ok(0) };
        let most = u64::from(p.len).min((buf.len() / BLOCK_BYTES) as u64);
        let n = (0..most).find(|k| f.pages.has(lblk + k)).unwrap_or(most);
        let buf = &mut buf[..n as usize * BLOCK_BYTES];
        if n > 0 {
            self.budget.charge_run(Way::Read, buf.len());
            self.store.read(p.addr, buf)?;
            self.check_sums(cell, f, lblk, buf)?;
        }
        Ok(buf.len())
    }

    /// Compares what was read of the blocks from `first` on with their checksums.
    fn check_sums(&self, cell: &Cell, f: &FileBody, first: u64, blocks: &[u8]) -> Result<()> {
        if !self.shared.data_sums {
            return Ok(());
        }
        for (lblk, block) in (first..).zip(blocks.chunks(BLOCK_BYTES)) {
            if let Some(p) = f.map.get(lblk)
                && p.sum.is_some_and(|sum| crc32c::crc32c(block) != sum)
            {
                let what = format!("{} block {lblk} at {}: checksum does not match", cell.ino, p.addr);
                return Err(Corrupt::new("file data", what).into());
            }
        }
        Ok(())
    }

    /// Brings the pages `first .. first + count` of a file into memory, holes as zeros.
    ///
    /// # Errors
    /// Of the device; [`Error::Corrupt`] where a data checksum does not match.
    pub fn load_pages(&self, cell: &Cell, st: &mut State, first: u64, count: u64) -> Result<()> {
        let size = st.size;
        let Body::File(f) = &mut st.body else { return Err(Error::Invalid("no file")) };
        let before = f.pages.len();
        let loaded = self.load_missing(cell, f, size, first, first + count);
        // also what came before an error
        self.memory.add(f.pages.len() - before, 0);
        self.count_index(f);
        loaded
    }

    fn load_missing(&self, cell: &Cell, f: &mut FileBody, size: u64, first: u64, end: u64) -> Result<()> {
        let mut at = first;
        while at < end {
            if f.pages.has(at) {
                at += 1;
                continue;
            }
            let Some(p) = f.map.get(at).filter(|p| !p.unwritten) else {
                at += 1; // holes are not kept as pages
                continue;
            };
            let mut n = u64::from(p.len).min(end - at).min(READ_PAGES);
            if let Some(k) = (1..n).find(|k| f.pages.has(at + k)) {
                n = k;
            }
            let mut buf = braidfs_device::AlignedBuf::zeroed(n as usize * BLOCK_BYTES);
            self.budget.charge_run(Way::Read, buf.len());
            self.store.read(p.addr, &mut buf)?;
            self.check_sums(cell, f, at, &buf)?;
            for block in buf.chunks(BLOCK_BYTES) {
                let mut page = Page::from_slice(block, self.place.home());
                // a write in place that no transaction carried may have left bytes behind the end of the file
                let start = at * BLOCK_BYTES as u64;
                if size < start + BLOCK_BYTES as u64 {
                    page.make_mut()[size.saturating_sub(start) as usize..].fill(0);
                }
                f.pages.insert_clean(at, page);
                at += 1;
            }
        }
        Ok(())
    }

    /// What hangs on the cell has changed: so does the count of memory.
    pub fn count_attached(&self, cell: &Cell, st: &State) {
        let (steps, before) = (st.attached_steps(), cell.attached.load(Relaxed));
        if steps != before {
            cell.attached.store(steps, Relaxed);
            self.memory.add_attached((i64::from(steps) - i64::from(before)) * State::ATTACHED_STEP as i64);
        }
    }

    /// What the indexes of a file have grown or shrunk by comes into the volume's count of memory.
    pub fn count_index(&self, f: &mut FileBody) {
        let steps = f.index_steps();
        if steps != f.counted {
            let more = i64::from(steps) - i64::from(f.counted);
            self.memory.add_index_bytes(more * FileBody::INDEX_STEP as i64);
            f.counted = steps;
        }
    }
}
