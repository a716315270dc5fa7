//! Stale entries and lost links between domains, found in the background after a crash (SpanFS section 3.3), and on
//! demand: what recovery could not see, since no journal tells of it any more.

use crate::braid::entry::{By, Edit};
use crate::cell::Cell;
use crate::error::Result;
use crate::names::entries::{Child, may_be_linked};
use crate::types::*;
use crate::volume::operation::Op;
use crate::volume::{MountedVolume, Volume};
use braidfs_format::domain::NEEDS_GC;
use braidfs_format::node::{DIR, FOUND, OVERFLOW, REMOTE};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// What became of a missing entry.
enum Relinked {
    Done,
    Needless,
    /// This inode was locked by another thread.
    Busy(Arc<Cell>),
}

/// So many directories, or inodes, are looked at until somebody looks at memory.
const LOOK_DIRS: usize = 64;
pub(super) const LOOK_INODES: usize = 4096;

impl MountedVolume {
    /// Background GC (SpanFS section 3.3): walks the node tables for inodes with a parent in another domain and makes
    /// missing entries again; walks directories and drops entries whose inode is gone. Each finding is looked at a second
    /// time under the locks before anything changes (two-phase validation). What cannot be looked at is passed over, and the next
    /// mount looks again.
    ///
    /// # Errors
    /// Of a commit or a header; of a node table that cannot be read.
    pub(crate) fn collect_stale(&self, stop: &dyn Fn() -> bool) -> Result<Collected> {
        let mut all = Collected::default();
        let mut note = |looked: Result<u64>, ino: InodeNo| match looked {
            Ok(n) => all.mended += n,
            Err(error) => {
                tracing::debug!(%ino, %error, "not compared with its links");
                all.passed_over += 1;
            }
        };
        let mut stopped = false;
        for d in &self.domains {
            stopped |= stop();
            if stopped {
                break;
            }
            if d.failed().is_some() {
                continue;
            }
            let mut remote = Vec::new();
            let mut dirs = Vec::new();
            d.nodes.for_each_used(&mut |n, e| {
                if e.flags & OVERFLOW == 0 {
                    // what was found again in the place of a lost table may have been deleted: a check sees to that
                    if e.flags & (REMOTE | FOUND) == REMOTE {
                        remote.push(n.inode());
                    }
                    if e.flags & DIR != 0 {
                        dirs.push(n.inode());
                    }
                }
                Ok(())
            })?;
            // all names of the volume come by, and where there is no background nobody else looks at memory
            for (i, n) in remote.into_iter().enumerate() {
                stopped |= stop();
                if stopped {
                    break;
                }
                note(self.relink_lost(n), n);
                if i % LOOK_INODES == LOOK_INODES - 1 {
                    self.balance_memory();
                }
            }
            for (i, n) in dirs.into_iter().enumerate() {
                stopped |= stop();
                if stopped {
                    break;
                }
                note(self.drop_stale(n), n);
                if i % LOOK_DIRS == LOOK_DIRS - 1 {
                    self.balance_memory();
                }
            }
        }
        if stopped {
            return Ok(all);
        }
        self.commit_all()?;
        // those of a domain that has failed were passed over, too
        all.failed_domains = self.domains.iter().filter(|d| d.failed().is_some()).count();
        if all.passed_over > 0 {
            tracing::warn!(
                "links of {} inodes could not be compared with the entries that name them: the next mount tries again; \
                 where all domains work, run fsck.braidfs",
                all.passed_over
            );
            return Ok(all);
        }
        for d in self.domains.iter().filter(|d| d.failed().is_none()) {
            d.write_header(|h| h.flags = (h.flags.get() & !NEEDS_GC).into())?;
        }
        self.maybe_stale.store(all.failed_domains > 0, Ordering::Relaxed);
        Ok(all)
    }

    fn relink_lost(&self, ino: InodeNo) -> Result<u64> {
        let Some(c) = self.find(ino)? else { return Ok(0) };
        let links = c.state.read().links.clone();
        let mut n = 0;
        for l in links.iter().filter(|l| may_be_linked(ino, l.parent)) {
            let Some(dir) = self.find_dir(l.parent)? else { continue };
            if self.find_entry(&dir, &mut dir.state.write(), &l.name)?.is_some_and(|e| e.inode == c.inode()) {
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
        let mut op = Op::new(self);
        op.begin(&[dir.domain, c.domain], 4, true)?;
        let mut dst = dir.state.write();
        if dst.deleted || dst.nlink == 0 {
            return Ok(Relinked::Needless);
        }
        // under the locks: does it still claim the name, and is the name still without a rightful owner?
        let old = self.find_entry(dir, &mut dst, name)?;
        if let Some(e) = &old {
            if e.inode == c.inode() {
                return Ok(Relinked::Needless);
            }
            match self.child_below(dir, &[], name, e.inode)? {
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

    fn drop_stale(&self, ino: InodeNo) -> Result<u64> {
        let Some(dir) = self.find_dir(ino)? else { return Ok(0) };
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
            if self.domain_of(e.node).is_some_and(|d| d.id == dir.domain) && may_be_linked(e.node, ino) {
                continue;
            }
            if self.child_seen(&dir, &e.name, (&e).into())?.is_none() {
                suspects.push(e);
            }
        }
        let mut n = 0;
        while let Some(e) = suspects.pop() {
            let mut op = Op::new(self);
            op.begin(&[dir.domain], 2, true)?;
            let mut st = dir.state.write();
            let still = self.find_entry(&dir, &mut st, &e.name)?;
            if still.is_none_or(|s| s.inode != InodeRef::from(&e)) {
                continue;
            }
            match self.child_below(&dir, &[], &e.name, (&e).into())? {
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
}

impl Volume {
    /// Finds and mends stale entries and lost links of cross-domain objects (background GC; `scrub --mend`). What is damaged is passed
    /// over, and counted.
    ///
    /// # Errors
    /// Of a commit; of a node table that cannot be read.
    pub fn collect_stale(&self) -> Result<Collected> {
        self.mounted().collect_stale(&|| false)
    }
}
