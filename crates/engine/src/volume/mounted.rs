//! What is mounted: the domains and what they have in common. Operations, background threads and handles share it.

use super::cleaner::share::Share;
use super::domains::Domains;
use super::groups::Bat;
use super::held::table::LookupCounts;
use super::kept::Kept;
use super::memory_calls::Calls;
use super::siblings::Siblings;
use crate::braid::frontier::Frontier;
use crate::cell::cache::{CellRef, HazardRef};
use crate::cell::dentries::DentryCache;
use crate::cell::{Cell, frames};
use crate::domain::peers::Peers;
use crate::domain::{Domain, Shared};
use crate::error::{Error, Result};
use crate::fsync::committers::Committers;
use crate::fsync::queue::Syncing;
use crate::fsync::ticket::Pool;
use crate::quota::Limits;
use crate::store::Store;
use crate::types::*;
use braidfs_format::super_block::SuperBlock;
use braidfs_sync::{Mutex, RwLock, rank};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, OnceLock};

/// What operations, background threads and handles share.
#[derive(Debug)]
pub(crate) struct MountedVolume {
    /// With the size that the volume has; of the label `label` tells, of `compat` that. Written under the lock of `label`.
    pub sb: RwLock<SuperBlock, rank::SuperBlock>,
    /// Where new objects go, of directories that do not say otherwise.
    pub placement: Placement,
    /// What the label is now. Lock rank: leaf, with superblock I/O.
    pub label: Mutex<[u8; 64], rank::Label>,
    /// What the superblocks' `compat` is now. Written under the lock of `label`.
    pub compat: AtomicU32,
    pub store: Arc<Store>,
    pub shared: Arc<Shared>,
    /// The domains as they see each other.
    pub siblings: Arc<Siblings>,
    pub domains: Domains,
    /// The group table; the lock also serialises claims.
    pub bat: Mutex<Bat, rank::GroupTable>,
    /// Held by who makes, changes or removes a tenant.
    pub tenants: Mutex<(), rank::Tenants>,
    /// Held by who gives a directory limits or takes them away, until all below it says so.
    pub quota_trees: Mutex<(), rank::QuotaTrees>,
    /// Limits of users, groups and directories, as the root directory has them.
    pub quotas: Mutex<Limits, rank::QuotaLimits>,
    /// They say of soft limits what the root directory could not be told yet.
    pub quotas_unwritten: AtomicBool,
    /// Renames that move a directory to another parent, or go over one there, one at a time.
    pub rename: Mutex<(), rank::Rename>,
    /// The latest move of a directory to another parent: its domain and transaction. Lock rank: leaf.
    pub last_move: Mutex<Option<(DomainId, TxId)>, rank::LastMove>,
    /// Round-robin counters of placement `spread` and of directories.
    pub next_domain: AtomicU32,
    /// Inodes whose last name went to an inode of another domain that is not durable yet.
    pub zombies: Mutex<Vec<Arc<Cell>>, rank::Zombies>,
    /// Inodes without a name that could not be deleted when the last handle or hold was gone.
    pub unreaped: Mutex<VecDeque<InodeNo>, rank::Unreaped>,
    /// Traces in the journals, as recovery found them.
    pub traces: Vec<String>,
    /// Entries may be stale after a crash until the GC has run.
    pub maybe_stale: AtomicBool,
    /// Held by the one that gives memory back. Lock rank: outside all gates.
    pub evicting: Mutex<(), rank::Evicting>,
    /// Has the background write dirty pages for want of memory.
    pub calls: Arc<Calls>,
    /// Held by the one that empties groups ([`Self::empty_sparse`]). Lock rank: outside all gates; not waited for by who
    /// holds it. With those that stay empty, as a device is drained.
    pub emptying: Mutex<Kept, rank::Emptying>,
    /// Who holds it does so for long, for a volume that becomes smaller.
    pub becomes_smaller: AtomicBool,
    /// What the cleaner may take of the devices, which others want, too.
    pub cleaner_share: Mutex<Share, rank::CleanerShare>,
    /// The groups of a device that is drained, as the table of owners has it: the first one, and the one behind the last.
    pub drained: [AtomicU32; 2],
    /// Devices, a bit each, on which claims have failed a moment ago, as the table of owners has it.
    pub resting: AtomicU32,
    /// The first group that must not be claimed, as the table of owners has it.
    pub claim_end: AtomicU32,
    /// fsync and sync that go on behind a [`Ticket`](crate::Ticket).
    pub pool: RwLock<Option<Pool>, rank::SyncPool>,
    /// What is synced in several domains at once.
    pub committers: Committers,
    /// fsyncs of a front end.
    pub syncing: Syncing,
    /// Names looked up lately.
    pub dentries: DentryCache,
    /// Generation of the root, where it was loaded once.
    pub root_generation: OnceLock<u32>,
    /// Inodes that a front end's kernel knows.
    pub held: LookupCounts,
    /// Last: dropped after all pages.
    pub _frames: frames::Used,
}

impl MountedVolume {
    /// The domain that a node is in by its number; `None` where no domain owns such a number.
    pub fn domain_of(&self, node: InodeNo) -> Option<&Arc<Domain>> {
        let owner = self.store.geometry().node_place(node).and_then(|(g, _)| self.siblings.owner(g));
        owner.and_then(|d| self.domains.get(usize::from(d.0)))
    }

    /// [`Self::domain_of`] a node that a caller names.
    ///
    /// # Errors
    /// [`Error::NotFound`] where no domain owns such a number.
    pub fn domain(&self, node: InodeNo) -> Result<&Arc<Domain>> {
        // an error made before it is needed would have to be dropped again each time
        match self.domain_of(node) {
            Some(d) => Ok(d),
            None => Err(Error::NotFound),
        }
    }

    /// The cell of an inode; `None` where it does not exist (any more).
    ///
    /// # Errors
    /// Of loading it.
    pub fn find(&self, ino: InodeNo) -> Result<Option<Arc<Cell>>> {
        let Some(d) = self.domain_of(ino) else { return Ok(None) };
        d.find(ino).or_else(|e| match e {
            // its group has left the domain meanwhile, in which there was no inode then
            Error::Corrupt(_) if d.domain_of(ino) != Some(d.id) => Ok(None),
            Error::Corrupt(_) if self.shared.replays => Err(e),
            Error::Corrupt(_) => {
                // what stands beside it may be as wrong: nothing more is written there
                d.fail(&e);
                Err(e)
            }
            e => Err(e),
        })
    }

    /// The cell of an inode that is in memory, to be looked at without a write to a line that threads share.
    #[inline]
    pub fn look(&self, ino: InodeNo) -> Option<HazardRef<'_>> {
        self.domain_of(ino)?.cells.look(ino)
    }

    /// The cell of an inode to be looked at, loaded where it is not in memory.
    ///
    /// # Errors
    /// As [`Self::cell`].
    #[inline]
    pub fn see(&self, ino: InodeNo) -> Result<CellRef<'_>> {
        match self.look(ino) {
            Some(c) => Ok(CellRef::Published(c)),
            None => self.cell(ino).map(CellRef::Loaded),
        }
    }

    /// [`Self::find`] a cell to be looked at.
    ///
    /// # Errors
    /// Of loading it.
    #[inline]
    pub fn see_found(&self, ino: InodeNo) -> Result<Option<CellRef<'_>>> {
        match self.look(ino) {
            Some(c) => Ok(Some(CellRef::Published(c))),
            None => Ok(self.find(ino)?.map(CellRef::Loaded)),
        }
    }

    /// [`Self::find`] an inode that a caller names.
    ///
    /// # Errors
    /// [`Error::NotFound`] where it does not exist (any more), or of loading it.
    pub fn cell(&self, ino: InodeNo) -> Result<Arc<Cell>> {
        match self.find(ino)? {
            Some(c) => Ok(c),
            None => Err(Error::NotFound),
        }
    }

    /// [`Self::find`] of a directory; `None` also where it is something else.
    ///
    /// # Errors
    /// Of loading it.
    pub fn find_dir(&self, ino: InodeNo) -> Result<Option<Arc<Cell>>> {
        Ok(self.find(ino)?.filter(|c| c.kind == FileKind::Dir))
    }

    /// Domain by number.
    pub fn dom(&self, id: DomainId) -> &Arc<Domain> {
        &self.domains[usize::from(id.0)]
    }

    /// Commits all domains that have something to commit, side by side; but for those without a journal, where nothing becomes
    /// durable by that.
    ///
    /// # Errors
    /// The first one; the other domains are committed all the same.
    pub fn commit_all(&self) -> Result<()> {
        self.commit_those(|_| true)
    }

    /// [`Self::commit_all`], of some domains.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn commit_those(&self, those: impl Fn(&Domain) -> bool) -> Result<()> {
        let running = || {
            let some = self.domains.iter().filter(|d| those(d));
            some.map(|d| (d.id, d.running())).collect::<Frontier>()
        };
        let mut all = running();
        loop {
            all.iter().for_each(|(d, t)| self.dom(d).want(t));
            // Who moves something that nothing has written, and did not see that, has made the place before: it is in these.
            let now = running();
            if now == all {
                return self.commit_some(&all);
            }
            all = now;
        }
    }

    /// Makes these transactions durable, side by side (SpanFS's parallel two-phase synchronisation: submit to all, then
    /// wait for all).
    ///
    /// # Errors
    /// The first one.
    pub fn commit_some(&self, which: &Frontier) -> Result<()> {
        let todo: Vec<_> = which.as_slice().iter().filter(|(d, t)| self.dom(*d).needs_commit(*t)).collect();
        match todo.as_slice() {
            [] => Ok(()),
            [(d, t)] => self.dom(*d).commit_upto(*t),
            all if self.shared.options.serial => {
                let commit = |r: Result<()>, (d, t): &&(DomainId, TxId)| r.and(self.dom(*d).commit_upto(*t));
                if self.shared.options.falling {
                    all.iter().rev().fold(Ok(()), commit)
                } else {
                    all.iter().fold(Ok(()), commit)
                }
            }
            _ => {
                let commit = |(d, t): (DomainId, TxId)| -> Box<dyn FnOnce() -> Result<()> + Send> {
                    let d = self.dom(d).clone();
                    Box::new(move || {
                        d.run_near();
                        d.commit_upto(t)
                    })
                };
                let parts = todo.into_iter().copied().map(commit).collect();
                self.committers.side_by_side(parts).into_iter().fold(Ok(()), Result::and)
            }
        }
    }

    /// [`Self::commit_all`], of domains without a journal, too: what was freed can be used again then, and what was made stands
    /// in the tables.
    ///
    /// Of the domains that work: one that has failed, before or by this, is left out, and its error is not the caller's, who
    /// gets it where the domain is its own. So this is for whoever looks for room, or at the tables, and no promise. What a
    /// failed domain has freed stays its own: its tables do not say that it is free, and it gives no group back. Where it
    /// matters that nothing comes back by a crash of what a failed domain has let go of, [`Self::commit_all`] is asked.
    pub fn settle_all(&self) {
        let works = |d: &Domain| d.failed().is_none();
        for d in self.domains.iter().filter(|d| !d.keeps_journal() && works(d)) {
            // an error of a commit fails its domain, which says so itself; here and below
            let _ = d.commit();
        }
        let _ = self.commit_those(works);
    }

    /// [`Self::settle_all`], with the data that commits leave alone (`data=writeback`).
    ///
    /// # Errors
    /// Of a domain that works all the same.
    pub(super) fn settle_everything(&self) -> Result<()> {
        for d in &self.domains {
            let written = d.flush_all();
            if d.failed().is_none() {
                written?;
            }
        }
        self.settle_all();
        Ok(())
    }

    /// [`Self::commit_all`], with the data that commits leave alone (`data=writeback`).
    ///
    /// # Errors
    /// As [`Self::commit_all`].
    pub fn commit_everything(&self) -> Result<()> {
        let mut r = Ok(());
        for d in &self.domains {
            r = r.and(self.flush_with_room(d, Domain::flush_all));
        }
        r.and(self.commit_all())
    }

    pub(super) fn close(&self) -> Result<()> {
        let mut r = self.commit_everything();
        r = r.and(self.reap_zombies());
        r = r.and(self.commit_all());
        r.and(self.close_all())
    }

    /// A directory's cell.
    pub fn dir_cell(&self, ino: InodeNo) -> Result<Arc<Cell>> {
        let c = self.cell(ino)?;
        if c.kind != FileKind::Dir {
            return Err(Error::NotDir);
        }
        Ok(c)
    }

    /// A failed domain's changes will never be durable, nor those of one without a journal: nothing waits for them.
    pub fn pending(&self, d: DomainId, t: TxId) -> bool {
        let d = self.dom(d);
        d.committed_tx() < t && d.failed().is_none() && d.keeps_journal()
    }
}

#[cfg(test)]
mod tests;
