//! Work that nobody waits for: stale entries and lost links after a crash, cleaning, memory.

use super::{Child, Op, may_hang};
use crate::braid::entry::{By, Edit};
use crate::cell::cache::{CELL_BYTES, Memory};
use crate::cell::{Body, Cell, State};
use crate::domain::Domain;
use crate::error::{Error, Result};
use crate::types::*;
use crate::volume::{Inner, Volume};
use braidfs_format::domain::NEEDS_GC;
use braidfs_format::group::Owner;
use braidfs_format::node::{OVERFLOW, REMOTE};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Inodes, each with the node of a record of theirs.
type LiveRecords = Vec<(Arc<Cell>, NodeId)>;

/// Node blocks that one compaction looks at.
const COMPACT_BLOCKS: usize = 512;

/// Has the overflow record of `node` written again with its touched inode.
fn mark_node(c: &Cell, st: &mut State, node: NodeId) {
    if node != c.ino {
        match &mut st.body {
            Body::File(f) => f.map.mark_dirty(&[node]),
            Body::Dir(b) => b.map.mark_dirty(&[node]),
            Body::Special => {}
        }
    }
}

/// What became of a missing entry.
enum Relinked {
    Done,
    Needless,
    /// This inode was locked by another thread.
    Busy(Arc<Cell>),
}

impl Inner {
    /// Background GC (SpanFS section 3.3): walks the node tables for inodes with a parent in another domain and makes
    /// missing entries again; walks directories and drops entries whose inode is gone. Each finding is looked at a second
    /// time under the locks before anything changes (two-phase validation). Number mended.
    pub(crate) fn collect_stale(&self, stop: &dyn Fn() -> bool) -> Result<u64> {
        let mut mended = 0;
        for d in &self.domains {
            if d.failed().is_some() {
                continue;
            }
            let mut remote = Vec::new();
            let mut dirs = Vec::new();
            d.nodes.for_each_used(&mut |n, e| {
                if e.flags & OVERFLOW == 0 {
                    if e.flags & REMOTE != 0 {
                        remote.push(n);
                    }
                    if e.flags & braidfs_format::node::DIR != 0 {
                        dirs.push(n);
                    }
                }
                Ok(())
            })?;
            for n in remote {
                if stop() {
                    return Ok(mended);
                }
                mended += self.relink_lost(n)?;
            }
            for n in dirs {
                if stop() {
                    return Ok(mended);
                }
                mended += self.drop_stale(n)?;
            }
        }
        self.commit_all()?;
        for d in &self.domains {
            if d.failed().is_none() {
                d.write_header(|h| h.flags = (h.flags.get() & !NEEDS_GC).into())?;
            }
        }
        self.maybe_stale.store(false, Ordering::Relaxed);
        Ok(mended)
    }

    fn relink_lost(&self, ino: NodeId) -> Result<u64> {
        let Ok(c) = self.cell(ino) else { return Ok(0) };
        let links = c.state.read().links.clone();
        let mut n = 0;
        for l in links.iter().filter(|l| may_hang(ino, l.parent)) {
            let Ok(dir) = self.dir_cell(l.parent) else { continue };
            if self.find_entry(&dir, &mut dir.state.write(), &l.name)?.is_some_and(|e| e.node == ino) {
                continue;
            }
            n += loop {
                match self.relink(&c, &dir, &l.name)? {
                    Relinked::Done => break 1,
                    Relinked::Needless => break 0,
                    Relinked::Busy(x) => Child::wait(&x),
                }
            };
        }
        Ok(n)
    }

    /// Makes an entry again that is missing, if it still is.
    fn relink(&self, c: &Arc<Cell>, dir: &Arc<Cell>, name: &[u8]) -> Result<Relinked> {
        let mut op = Op::begin(self, &[dir.domain, c.domain], 4, true)?;
        let mut dst = dir.state.write();
        if dst.deleted || dst.nlink == 0 {
            return Ok(Relinked::Needless);
        }
        // under the locks: does it still claim the name, and is the name still without a rightful owner?
        let old = self.find_entry(dir, &mut dst, name)?;
        if let Some(e) = &old {
            if e.node == c.ino {
                return Ok(Relinked::Needless);
            }
            match self.child_below(dir, &[], name, e.node, e.gener)? {
                Child::Stale => {}
                Child::Lives => return Ok(Relinked::Needless),
                Child::Busy(x) => return Ok(Relinked::Busy(x)),
            }
        }
        // what no longer hangs there may be above the directory by now
        let Some(st) = c.state.try_read() else { return Ok(Relinked::Busy(c.clone())) };
        if !st.has_link(dir.ino, name) {
            return Ok(Relinked::Needless);
        }
        drop(st);
        op.touch(dir, &mut dst)?;
        let edit = if old.is_some() { Edit::Replace(c) } else { Edit::Add(c) };
        self.edit_entry(By::Operation(&mut op), dir, &mut dst, name, edit)?;
        op.hint(dir, name, c);
        Ok(Relinked::Done)
    }

    fn drop_stale(&self, ino: NodeId) -> Result<u64> {
        let Ok(dir) = self.dir_cell(ino) else { return Ok(0) };
        let mut suspects = Vec::new();
        let mut pos = 2;
        loop {
            let next = {
                let mut st = dir.state.write();
                self.dom(dir.domain).with_index(ino, &mut st, |ix, load| Ok(ix.next_after(pos, load)?.cloned()))?
            };
            let Some(e) = next else { break };
            pos = e.hash;
            // entries of the own domain change in one transaction with their inodes
            if self.domain(e.node).is_ok_and(|d| d.id == dir.domain) && may_hang(e.node, ino) {
                continue;
            }
            if self.child(ino, &e)?.is_none() {
                suspects.push(e);
            }
        }
        let mut n = 0;
        while let Some(e) = suspects.pop() {
            let mut op = Op::begin(self, &[dir.domain], 2, true)?;
            let mut st = dir.state.write();
            let still = self.find_entry(&dir, &mut st, &e.name)?;
            if !still.is_some_and(|s| s.node == e.node && s.gener == e.gener) {
                continue;
            }
            match self.child_below(&dir, &[], &e.name, e.node, e.gener)? {
                Child::Stale => {}
                Child::Lives => continue,
                Child::Busy(x) => {
                    drop((st, op));
                    Child::wait(&x);
                    suspects.push(e);
                    continue;
                }
            }
            op.touch(&dir, &mut st)?;
            self.edit_entry(By::Operation(&mut op), &dir, &mut st, &e.name, Edit::Remove)?;
            n += 1;
        }
        Ok(n)
    }

    /// Empties up to `segments` segments of a domain: their valid blocks are made dirty, so that the next flush or commit
    /// writes them elsewhere (only what is still the newest moves). Blocks moved.
    pub(crate) fn clean_domain(&self, d: &Arc<Domain>, segments: u32) -> Result<u64> {
        let mut moved = 0;
        let mut skip = HashSet::new();
        for _ in 0..segments {
            let s = d.space.stats();
            // moving needs room of its own
            if s.free < s.reserved + s.hidden / 2 + 600 {
                break;
            }
            let Some(v) = d.space.victim(d.committed(), &skip)? else { break };
            skip.insert((v.group, v.segment));
            moved += self.move_blocks(d, &v.blocks)?;
        }
        d.counters.cleaned.fetch_add(moved, Ordering::Relaxed);
        Ok(moved)
    }

    /// Has blocks and whose they were written elsewhere, by a commit; how many.
    pub(crate) fn move_blocks(&self, d: &Arc<Domain>, blocks: &[(BlockAddr, Owner)]) -> Result<u64> {
        let mut moved = 0;
        for (addr, owner) in blocks {
            let r = if owner.node.0 == 0 {
                self.move_node_block(d, *addr)
            } else {
                self.move_block(d, *addr, owner.node, owner.lblk)
            };
            match r {
                Ok(true) => moved += 1,
                Ok(false) | Err(Error::NotFound) => {}
                Err(e) => return Err(e),
            }
        }
        d.flush_lazy()?;
        d.commit()?;
        Ok(moved)
    }

    /// Makes a data block or directory bucket dirty, if the inode still has it there.
    fn move_block(&self, d: &Arc<Domain>, addr: BlockAddr, ino: NodeId, lblk: u64) -> Result<bool> {
        let c = d.cell(ino)?;
        let mut op = Op::begin(self, &[d.id], 3, false)?;
        let mut st = c.state.write();
        let here = match &st.body {
            Body::File(f) => f.map.get(lblk).filter(|p| p.addr == addr),
            Body::Dir(b) => b.map.get(lblk).filter(|p| p.addr == addr),
            Body::Special => None,
        };
        let Some(p) = here else { return Ok(false) };
        if st.deleted || p.unwritten || (c.kind != FileKind::Dir && d.in_place(&st)) {
            return Ok(false); // blocks with a fixed place stay
        }
        if c.kind == FileKind::Dir {
            op.touch(&c, &mut st)?;
            let first = braidfs_format::dentry::bucket_first(lblk);
            op.with_index(&c, &mut st, |ix, load| ix.dirty_bucket(first, load))?;
            return Ok(true);
        }
        op.settle(&c, &mut st)?;
        d.load_pages(&c, &mut st, lblk, 1)?;
        if !self.reserve_pages(&c, &mut st, lblk, lblk) {
            return Ok(false);
        }
        op.touch(&c, &mut st)?;
        let Body::File(f) = &mut st.body else { return Ok(false) };
        f.cold = true;
        if f.pages.dirty(lblk) {
            self.shared.dirty_pages.fetch_add(1, Ordering::Relaxed);
        }
        Ok(true)
    }

    /// The inodes to which the live records of a node block belong, each with the record's node; and the live bytes.
    fn live_records(&self, d: &Arc<Domain>, addr: BlockAddr) -> Result<(LiveRecords, usize)> {
        let mut block = vec![0u8; 4096];
        d.store.read(addr, &mut block)?;
        let (mut live, mut bytes) = (Vec::new(), 0);
        let Ok(n) = braidfs_format::node::NodeBlock::check(&block, d.store.volume, addr) else {
            return Ok((live, bytes));
        };
        for i in 0..n {
            let Ok(r) = braidfs_format::node::NodeBlock::record(&block, i) else { continue };
            let e = match d.nodes.look(r.node) {
                Err(Error::NotFound) => continue, // a dead record of a number whose group has left the domain
                e => e?,
            };
            if !e.used() || e.addr != addr || usize::from(e.index) != i {
                continue;
            }
            match d.cell(r.owner) {
                Ok(c) => live.push((c, r.node)),
                Err(Error::NotFound) => continue,
                Err(e) => return Err(e),
            }
            bytes += r.payload.len();
        }
        Ok((live, bytes))
    }

    /// Makes the inodes of the live records of a node block dirty.
    fn move_node_block(&self, d: &Arc<Domain>, addr: BlockAddr) -> Result<bool> {
        let mut any = false;
        for (c, node) in self.live_records(d, addr)?.0 {
            let mut op = Op::begin(self, &[d.id], 3, false)?;
            let mut st = c.state.write();
            if st.deleted {
                continue;
            }
            op.touch(&c, &mut st)?;
            op.credit(d.id, 1);
            mark_node(&c, &mut st, node);
            any = true;
        }
        Ok(any)
    }

    /// Packs the records of node blocks that are mostly dead together again, for a domain without free space: a commit of
    /// few inodes leaves a block with few records each time. The caller, which is inside no gate, commits afterwards.
    /// Blocks that become free by that, about.
    pub(crate) fn compact_nodes(&self, d: &Arc<Domain>) -> Result<u64> {
        let mut live: HashMap<BlockAddr, u32> = HashMap::new();
        d.nodes.for_each_used(&mut |_, e| {
            *live.entry(e.addr).or_insert(0) += 1;
            Ok(())
        })?;
        let mut sparse: Vec<(u32, BlockAddr)> =
            live.into_iter().map(|(a, n)| (n, a)).filter(|(n, _)| *n <= 6).collect();
        sparse.sort();
        sparse.truncate(COMPACT_BLOCKS);
        // the new blocks come out of what is left
        let s = d.space.stats();
        let mut budget = s.free.saturating_sub(s.reserved) as usize / 4 * 4096;
        let (mut emptied, mut bytes_all) = (0, 0);
        for (_, addr) in sparse {
            let (records, bytes) = self.live_records(d, addr)?;
            if bytes > 2048 {
                continue;
            }
            if bytes > budget {
                break;
            }
            budget -= bytes;
            bytes_all += bytes;
            emptied += 1;
            for (c, node) in records {
                let e = d.enter()?;
                let mut st = c.state.write();
                if !st.deleted {
                    d.touch(e.tx(), &c, &mut st)?;
                    mark_node(&c, &mut st, node);
                }
            }
        }
        Ok((emptied as u64).saturating_sub(bytes_all.div_ceil(2800) as u64))
    }

    pub(crate) fn cache_budget(&self) -> u64 {
        self.shared.options.cache_bytes
    }

    /// Gives memory back where the cache is over its budget. Cheap where it is not.
    pub(crate) fn maybe_evict(&self) {
        let pages = self.shared.pages.load(Ordering::Relaxed).max(0) as u64;
        if pages * 4096 > self.cache_budget()
            && let Some(_one) = self.evicting.try_lock()
        {
            self.evict();
        }
    }

    /// The background's look at memory: pages and cells.
    pub(crate) fn balance_memory(&self) {
        let _one = self.evicting.lock();
        self.evict();
    }

    fn evict(&self) {
        let budget = self.cache_budget();
        let pages = self.shared.pages.load(Ordering::Relaxed).max(0) as u64;
        let cells: u64 = self.domains.iter().map(|d| d.cells.len() as u64).sum();
        let dir_bytes = self.shared.dir_bytes.load(Ordering::Relaxed).max(0) as u64;
        let used = pages * 4096 + cells * CELL_BYTES + dir_bytes;
        if used <= budget {
            return;
        }
        // dirty pages in the way are written first, the largest files by themselves
        if self.shared.dirty_pages.load(Ordering::Relaxed).max(0) as u64 * 4096 > budget / 2 {
            for d in &self.domains {
                for c in d.cells.all() {
                    let dirty = c.state.try_read().map_or(0, |st| match &st.body {
                        Body::File(f) => f.pages.dirty_count(),
                        _ => 0,
                    });
                    if dirty > 0 && d.flush_cell(&c).is_err() {
                        break;
                    }
                }
            }
        }
        let goal = budget - budget / 8;
        let over = used - goal;
        let n = self.domains.len() as u64;
        for d in &self.domains {
            let want_cells = if cells * CELL_BYTES > goal / 2 { over / CELL_BYTES / n + 1 } else { 0 };
            d.evict(Memory {
                pages: ((over / 4096).min(pages) / n + 1) as usize,
                cells: want_cells as usize,
                dir_bytes: (over.min(dir_bytes) / n) as usize,
            });
        }
    }
}

impl Volume {
    /// Finds and mends stale entries and lost links of cross-domain objects (background GC; `scrub`). Number mended.
    ///
    /// # Errors
    /// Of the device, or damage.
    pub fn collect_stale(&self) -> Result<u64> {
        self.inner().collect_stale(&|| false)
    }

    /// Cleans up to `segments` segments per domain; blocks moved.
    ///
    /// # Errors
    /// Of the device.
    pub fn clean(&self, segments: u32) -> Result<u64> {
        let i = self.inner();
        i.domains.iter().filter(|d| d.failed().is_none()).try_fold(0, |n, d| Ok(n + i.clean_domain(d, segments)?))
    }
}

#[cfg(test)]
mod tests;
