//! An fsync of one inode, with the directories above it, by a roll-forward record or by commits; sync of everything.

use super::batch::Gathered;
use crate::braid::frontier::Frontier;
use crate::cell::{Body, Cell};
use crate::domain::sync::skeleton_fits;
use crate::error::Result;
use crate::planted::{Bug, planted};
use crate::types::*;
use crate::volume::{MountedVolume, Ticket, Volume};
use std::sync::Arc;

/// Directories on a file's paths that are not durable yet.
pub(super) struct Path {
    /// The file's version when it got the names that were followed. Names may change until what they need is written:
    /// whoever writes it looks whether they are still the same.
    pub linked_at: u64,
    /// New directories, to be written as roll-forward records beside the file, with their own `linked_at`.
    pub fresh: Vec<(Arc<Cell>, u64)>,
    /// Domains whose running transaction must be committed instead.
    pub commit: Vec<DomainId>,
    /// Transactions of other domains that must be durable, too: inodes there had the names of directories on the path.
    pub with: Frontier,
}

impl MountedVolume {
    /// Walks up from `c` by all its names.
    pub(super) fn pending_path(&self, c: &Arc<Cell>) -> Result<Path> {
        let (linked_at, mut todo) = {
            let st = c.state.read();
            (st.durability.names_changed_at(), st.links.iter().map(|l| l.parent).collect::<Vec<_>>())
        };
        let mut p = Path { linked_at, fresh: Vec::new(), commit: Vec::new(), with: Frontier::EMPTY };
        let mut seen = std::collections::HashSet::new();
        while let Some(n) = todo.pop() {
            if n == InodeNo::ROOT || !seen.insert(n) {
                continue;
            }
            let Some(d) = self.find(n)? else { continue }; // removed meanwhile
            let dom = self.dom(d.domain);
            let st = d.state.read();
            todo.push(st.parent);
            let pending = st.durability.sync_with().iter().filter(|(d, t)| self.dom(*d).committed_tx() < *t);
            pending.for_each(|(d, t)| p.with.raise(d, t));
            if dom.links_durable(&st) {
                continue;
            }
            let known = dom.nodes.get(n.node())?;
            let born = !known.used() || known.generation != d.generation;
            if born && planted(Bug::AncestorForgotten) {
                continue;
            }
            let plain = st.durability.is_plain(dom.committed_tx()) && dom.is_newest(&st);
            if born && plain && skeleton_fits(&st) {
                p.fresh.push((d.clone(), st.durability.names_changed_at()));
            } else {
                p.commit.push(d.domain);
            }
        }
        Ok(p)
    }

    /// Everything that an fsync of the object needs, by commits.
    pub(crate) fn sync_by_commit(&self, c: &Arc<Cell>) -> Result<()> {
        loop {
            let linked_at = self.commit_for(c)?;
            let st = c.state.read();
            // where it was moved meanwhile, the commit has its new name, and perhaps not the directory
            if st.durability.names_changed_at() == linked_at || st.deleted {
                return Ok(());
            }
        }
    }

    /// Commits what an fsync of the object needs with the names that it has now: since this version, which is returned.
    fn commit_for(&self, c: &Arc<Cell>) -> Result<u64> {
        let own = self.dom(c.domain);
        if own.lazy_data() {
            self.flush_cell(c)?; // a commit would leave the data alone
        }
        let mut which = Frontier::EMPTY;
        let path = self.pending_path(c)?;
        which.merge(&path.with);
        for d in path.fresh.iter().map(|(d, _)| d.domain).chain(path.commit) {
            which.raise(d, self.dom(d).running());
        }
        {
            let st = c.state.read();
            which.merge(st.durability.waits_for());
            which.merge(st.durability.sync_with());
            if let Body::Dir(d) = &st.body {
                // its own record; and inodes of other domains that came, left or were replaced: each says itself where it hangs
                let own_tx = st.durability.dirty_tx().or_else(|| st.durability.sent_tx(own.committed_tx()));
                own_tx.into_iter().for_each(|tx| which.raise(c.domain, tx));
                if !planted(Bug::ChildrenForgotten) {
                    which.merge(&d.concerned());
                }
                // With the directory locked: who moves something out of it that nothing has written comes before this, or sees it.
                which.iter().for_each(|(d, t)| self.dom(d).want(t));
            }
        }
        if c.kind != FileKind::Dir {
            // victims and newcomers of renames: whatever shared operations with this domain
            which.raise(c.domain, own.running());
            let mut peers = own.peers_of_running();
            // what this inode needs of one that has failed stands above
            peers.retain(|d, _| self.dom(d).failed().is_none());
            which.merge(&peers);
        }
        self.commit_some(&which)?;
        Ok(path.linked_at)
    }

    pub(crate) fn fsync(&self, ino: InodeNo, data_only: bool) -> Result<()> {
        let c = self.cell(ino)?;
        let dom = self.dom(c.domain);
        dom.check_failed()?;
        // one without a journal promises nothing
        if self.read_only() || !dom.keeps_journal() {
            return Ok(());
        }
        if c.kind == FileKind::Dir {
            return self.sync_by_commit(&c);
        }
        let _one = c.sync.lock();
        loop {
            match self.gather(&c, data_only, true)? {
                Gathered::Clean => return Ok(()),
                Gathered::Changed => {}
                Gathered::Commit => return self.sync_by_commit(&c),
                Gathered::Wait(tx) => dom.commit_upto(tx)?,
                Gathered::Ready(one) => {
                    return match self.write_gathered([*one]).pop() {
                        Some(Ok(true)) | None => Ok(()),
                        Some(Ok(false)) => self.sync_by_commit(&c),
                        Some(Err(e)) => Err(e),
                    };
                }
            }
        }
    }

    pub(super) fn read_only(&self) -> bool {
        self.shared.read_only.load(std::sync::atomic::Ordering::Relaxed)
    }

    pub(crate) fn sync(&self) -> Result<()> {
        self.shared.check_alive()?;
        if self.read_only() {
            return Ok(());
        }
        self.commit_everything()
    }
}

impl Volume {
    /// After it returns, the file's data, attributes and every name on its path survive a crash; of a directory, all
    /// changes of its entries so far. `data_only` as fdatasync.
    ///
    /// # Errors
    /// Of the device: the domain is read-only from then on, and every later fsync in it says so.
    pub fn fsync(&self, ino: InodeNo, data_only: bool) -> Result<()> {
        let _paid = self.mounted().pace_inode(ino, Demand::sync());
        self.mounted().fsync(ino, data_only)
    }

    /// [`Self::fsync`] of several files, which are written together and flushed once; each with its `data_only`. The results
    /// are in the order of `files`.
    pub fn fsync_files(&self, files: &[(InodeNo, bool)]) -> Vec<Result<()>> {
        let i = self.mounted();
        for (ino, _) in files {
            // of those that go together each waits until what was before is paid
            i.pace_change(*ino);
        }
        let done = i.fsync_together(files);
        done.into_iter().zip(files).map(|(r, (ino, data))| r.unwrap_or_else(|| i.fsync(*ino, *data))).collect()
    }

    /// [`Self::fsync`] that returns at once. Who waits at the same time is written and flushed together.
    ///
    /// Where the rates of a tenant are limited it returns when the tenant's turn has come.
    pub fn fsync_start(&self, ino: InodeNo, data_only: bool) -> Ticket {
        self.mounted().pace_change(ino);
        self.mounted().fsync_start(ino, data_only)
    }

    /// [`Self::fsync`] on this thread where that costs less than handing it to another one, and takes nothing from others:
    /// fewer than `threads` fsyncs are under way, no more than `threads` were in the last 10 ms, the device is quick and the file has
    /// at most 1 MiB to write. `None` where it is not so, or where the fsync needs a commit: it is still to be done, by
    /// [`Self::fsync_start`].
    pub fn fsync_here(&self, ino: InodeNo, data_only: bool, threads: usize) -> Option<Result<()>> {
        self.mounted().fsync_here(ino, data_only, threads)
    }

    /// After it returns, everything survives.
    ///
    /// # Errors
    /// Of a device; the other domains are durable all the same.
    pub fn sync(&self) -> Result<()> {
        self.mounted().sync()
    }

    /// [`Self::sync`] that returns at once.
    pub fn sync_start(&self) -> Ticket {
        let i = self.mounted().clone();
        self.start(move || i.sync())
    }

    fn start(&self, f: impl FnOnce() -> Result<()> + Send + 'static) -> Ticket {
        let (ticket, work) = Ticket::of(f);
        self.mounted().run_beside(work);
        ticket
    }
}
