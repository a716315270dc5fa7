//! A mounted volume: domains opened and braided into one namespace. The library's API.
//!
//! Owns the superblock, the group table and the domains. [`Volume`]'s operations on names and files are in
//! `crate::names`, `crate::file`, `crate::attributes` and `crate::fsync`, one file per family of verbs.

pub mod background;
mod cleaner;
mod compaction;
mod eviction;
pub mod groups;
pub(crate) mod held;
pub mod label;
mod live;
pub mod look;
pub mod mount;
pub mod remount;
pub mod replay;
pub mod room;
pub mod trim;

use crate::braid::frontier::Frontier;
use crate::cell::Cell;
use crate::cell::names::NameCache;
use crate::domain::{Domain, Shared};
use crate::error::{Error, Result};
use crate::fsync::queue::Syncing;
use crate::fsync::ticket::Pool;
use crate::store::Store;
use crate::store::overlay::Overlays;
use crate::types::*;
use braidfs_format::super_block::SuperBlock;
use braidfs_sync::{Mutex, RwLock, rank};
use crossbeam::utils::CachePadded;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

pub use crate::fsync::ticket::Ticket;
pub use crate::types::DomainInfo;

/// A mounted volume. All operations take `&self` and may run on any number of threads.
///
/// Inode-level operations do no permission checks (a kernel front end with `default_permissions` has done
/// them); [`crate::names::path`] has the path-level operations that check a [`Cred`].
///
/// ```
/// use braidfs::{Cred, MkfsOptions, MountOptions, Volume, device::MemDevice, OpenHow};
/// use std::sync::Arc;
/// # fn main() -> braidfs::Result<()> {
/// let device: Arc<dyn braidfs::device::Device> = Arc::new(MemDevice::new(16384)); // 64 MiB
/// braidfs::mkfs::format(&[device.clone()], &MkfsOptions::default())?;
/// let volume = Volume::mount(vec![device], MountOptions::default())?;
/// let me = Cred::root();
/// volume.mkdir_path(b"mail", 0o755, &me)?;
/// let how = OpenHow { read: true, write: true, create: true, mode: 0o644, ..OpenHow::default() };
/// let file = volume.open_path(b"mail/1", how, &me)?;
/// volume.write(&file, 0, b"hello")?;
/// volume.fsync(file.ino(), false)?; // survives a crash from here on
/// let mut buf = [0; 5];
/// assert_eq!(volume.read(&file, 0, &mut buf)?, 5);
/// drop(file);
/// volume.unmount()
/// # }
/// ```
pub struct Volume {
    pub(crate) inner: Option<Arc<MountedVolume>>,
    /// The threads that work by themselves. Locked for as long as the volume changes between writable and read-only.
    background: Mutex<Option<background::Background>, rank::Background>,
    /// Of a volume that was mounted read-only: what its recovery wrote.
    overlays: Overlays,
    /// What handles hold of the volume. Threads take different ones, so that they do not share a reference count.
    keepers: Box<[Arc<Keeper>]>,
}

/// A reference to the volume, on cache lines of its own.
pub(crate) type Keeper = CachePadded<Arc<MountedVolume>>;

/// References to the volume that threads share out among them.
const KEEPERS: usize = 32;

impl std::fmt::Debug for Volume {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Volume").field("label", &self.inner().sb.label_str()).finish_non_exhaustive()
    }
}

/// What operations, background threads and handles share.
#[derive(Debug)]
pub(crate) struct MountedVolume {
    /// As it was at the mount; of the label `label` tells.
    pub sb: SuperBlock,
    /// What the label is now. Lock rank: leaf, with superblock I/O.
    pub label: Mutex<[u8; 64], rank::Label>,
    /// What the superblocks' `compat` is now. Written under the lock of `label`.
    pub compat: AtomicU32,
    pub store: Arc<Store>,
    pub shared: Arc<Shared>,
    pub domains: Vec<Arc<Domain>>,
    /// The group table; the lock also serialises claims.
    pub bat: Mutex<groups::Bat, rank::GroupTable>,
    /// Renames between two directories, one at a time. Outermost lock rank (docs/locking.md).
    pub rename: Mutex<(), rank::Rename>,
    /// The latest move of a directory to another parent: its domain and transaction. Lock rank: leaf.
    pub last_move: Mutex<Option<(DomainId, TxId)>, rank::LastMove>,
    /// Round-robin counters of placement `spread` and of directories.
    pub next_domain: AtomicU32,
    /// Inodes whose last name went to an inode of another domain that is not durable yet.
    pub zombies: Mutex<Vec<Arc<Cell>>, rank::Zombies>,
    /// Traces in the journals, as recovery found them.
    pub traces: Vec<String>,
    /// Entries may be stale after a crash until the GC has run.
    pub maybe_stale: std::sync::atomic::AtomicBool,
    /// Free blocks of groups that no domain owns, kept for `statfs`.
    pub unclaimed: AtomicU64,
    /// Held by the one that gives memory back. Lock rank: outside all gates.
    pub evicting: Mutex<(), rank::Evicting>,
    /// Held by the one that empties groups ([`MountedVolume::empty_sparse`]). Lock rank: outside all gates; not waited for by who
    /// holds it.
    pub emptying: Mutex<(), rank::Emptying>,
    /// fsync and sync that go on behind a [`Ticket`].
    pub pool: RwLock<Option<Pool>, rank::SyncPool>,
    /// fsyncs of a front end.
    pub syncing: Syncing,
    /// Names looked up lately.
    pub names: NameCache,
    /// Generation of the root, where it was loaded once.
    pub root_gener: OnceLock<u32>,
    /// Inodes that a front end's kernel knows.
    pub held: held::Held,
}

/// An open file: keeps the inode alive while it is unlinked. Dropping it closes.
pub struct OpenFile {
    pub(crate) cell: Arc<Cell>,
    keeper: Arc<Keeper>,
}

impl std::fmt::Debug for OpenFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "OpenFile({})", self.cell.ino.0)
    }
}

impl OpenFile {
    /// The inode.
    pub fn ino(&self) -> NodeId {
        self.cell.ino
    }
    /// Generation of the inode's number.
    pub fn gener(&self) -> u32 {
        self.cell.gener
    }
    pub(crate) fn new(cell: Arc<Cell>, keeper: Arc<Keeper>) -> Self {
        cell.opens.fetch_add(1, Ordering::SeqCst);
        Self { cell, keeper }
    }
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        // in this order: whoever takes the last name says so, then looks at the count
        if self.cell.opens.fetch_sub(1, Ordering::SeqCst) == 1 && self.cell.nameless.load(Ordering::SeqCst) {
            let orphan = {
                let st = self.cell.state.read();
                st.nlink == 0 && !st.deleted
            };
            // one that is held goes when it is given back
            if orphan
                && !self.keeper.held.orphaned(&self.cell)
                && let Err(e) = self.keeper.reap(&self.cell)
            {
                // it stays an orphan: the next mount reclaims it
                tracing::warn!("closing unlinked inode {}: {e}", self.cell.ino.0);
            }
        }
    }
}

impl Volume {
    pub(crate) fn inner(&self) -> &Arc<MountedVolume> {
        // taken only by `unmount`, `crash` and `drop`, which consume the volume
        self.inner.as_ref().unwrap_or_else(|| unreachable!("a volume is used after its end"))
    }

    pub(crate) fn new(inner: Arc<MountedVolume>, overlays: Overlays) -> Self {
        let keepers = (0..KEEPERS).map(|_| Arc::new(CachePadded::new(inner.clone()))).collect();
        Self { inner: Some(inner), background: Mutex::new(None), overlays, keepers }
    }

    /// A reference for a handle.
    pub(crate) fn keeper(&self) -> Arc<Keeper> {
        self.keepers[crate::types::thread_slot(KEEPERS)].clone()
    }

    /// Makes everything durable, checkpoints, marks the volume clean and closes it. Files still open become orphans
    /// if they are unlinked; their handles answer errors. (Dropping a `Volume` does the same, without telling of errors.)
    ///
    /// # Errors
    /// Of a device; domains without an error are clean all the same.
    pub fn unmount(mut self) -> Result<()> {
        self.close()
    }

    fn close(&mut self) -> Result<()> {
        // its threads end before the last commit
        drop(self.background.lock().take());
        let Some(inner) = self.inner.take() else { return Ok(()) };
        inner.pool.write().take();
        let r = if inner.shared.read_only.load(Ordering::Relaxed) { Ok(()) } else { inner.close() };
        inner.shared.read_only.store(true, Ordering::Relaxed);
        r
    }

    /// Stops at once without writing anything: what a crash does. For tests.
    pub fn crash(mut self) {
        if let Some(i) = &self.inner {
            i.shared.dead.store(true, Ordering::SeqCst);
        }
        drop(self.background.lock().take());
        if let Some(i) = self.inner.take() {
            i.pool.write().take();
            i.shared.read_only.store(true, Ordering::Relaxed);
        }
    }

    /// The superblock as it was at the mount ([`Self::label`] may have changed).
    pub fn super_block(&self) -> &SuperBlock {
        &self.inner().sb
    }

    /// Whether somebody has the inode open, if there is such an inode.
    pub fn is_open(&self, ino: NodeId) -> bool {
        self.inner().cell(ino).is_ok_and(|c| c.opens.load(Ordering::SeqCst) > 0)
    }

    /// Whether it is read-only: mounted so, or made so by [`Self::remount`].
    pub fn read_only(&self) -> bool {
        self.inner().shared.read_only.load(Ordering::Relaxed)
    }

    /// What recovery found in the journals at the mount and could not use: writes that the crash cut off, or damage. One
    /// cannot be told from the other by a journal alone.
    pub fn recovery_traces(&self) -> &[String] {
        &self.inner().traces
    }

    /// State of every domain.
    pub fn domains(&self) -> Vec<DomainInfo> {
        self.inner().domains.iter().map(|d| d.info()).collect()
    }

    /// Domain of an inode.
    ///
    /// # Errors
    /// [`Error::NotFound`] where no domain owns such a number.
    pub fn domain_of(&self, ino: NodeId) -> Result<DomainId> {
        Ok(self.inner().domain(ino)?.id)
    }

    /// Commits one domain, as every domain does by itself after the commit interval; with a checkpoint, as when its journal
    /// has filled up.
    ///
    /// # Errors
    /// [`Error::NotFound`] where there is no such domain; of the device.
    pub fn commit_domain(&self, domain: DomainId, checkpoint: bool) -> Result<()> {
        let d = self.inner().domains.get(usize::from(domain.0)).ok_or(Error::NotFound)?;
        d.commit()?;
        if checkpoint { d.checkpoint() } else { Ok(()) }
    }

    /// Generation of an inode: tells it from those that had its number before.
    ///
    /// # Errors
    /// [`Error::NotFound`] where no inode has the number.
    pub fn generation(&self, ino: NodeId) -> Result<u32> {
        let c = self.inner().cell(ino)?;
        if c.state.read().deleted { Err(Error::NotFound) } else { Ok(c.gener) }
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        if let Err(e) = self.close() {
            tracing::error!("closing the volume: {e}");
        }
    }
}

impl MountedVolume {
    /// The domain of a node.
    pub fn domain(&self, ino: NodeId) -> Result<&Arc<Domain>> {
        // an error made before it is needed would have to be dropped again each time
        let found = self.store.geometry.node_place(ino).and_then(|(g, _)| self.shared.group_owner(g));
        match found.and_then(|d| self.domains.get(usize::from(d.0))) {
            Some(d) => Ok(d),
            None => Err(Error::NotFound),
        }
    }

    /// The cell of an inode.
    ///
    /// # Errors
    /// [`Error::NotFound`] where it does not exist (any more), or of loading it.
    pub fn cell(&self, ino: NodeId) -> Result<Arc<Cell>> {
        let d = self.domain(ino)?;
        d.cell(ino).map_err(|e| match e {
            // its group has left the domain meanwhile, in which there was no inode then
            Error::Corrupt(_) if d.domain_of(ino) != Some(d.id) => Error::NotFound,
            Error::Corrupt(_) => {
                // what stands beside it may be as wrong: nothing more is written there
                d.fail(&e);
                e
            }
            e => e,
        })
    }

    /// Domain by number.
    pub fn dom(&self, id: DomainId) -> &Arc<Domain> {
        &self.domains[usize::from(id.0)]
    }

    /// Commits all domains that have something to commit, side by side.
    ///
    /// # Errors
    /// The first one; the other domains are committed all the same.
    pub fn commit_all(&self) -> Result<()> {
        self.commit_some(&self.domains.iter().map(|d| (d.id, d.running())).collect())
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
            _ => std::thread::scope(|s| {
                let (first, rest) = (todo[0], &todo[1..]);
                let threads: Vec<_> = rest.iter().map(|(d, t)| s.spawn(move || self.dom(*d).commit_upto(*t))).collect();
                let mut r = self.dom(first.0).commit_upto(first.1);
                for t in threads {
                    let other = t.join().unwrap_or_else(|p| std::panic::resume_unwind(p));
                    r = r.and(other);
                }
                r
            }),
        }
    }

    /// [`Self::commit_all`], with the data that commits leave alone (`data=writeback`).
    ///
    /// # Errors
    /// As [`Self::commit_all`].
    pub fn commit_everything(&self) -> Result<()> {
        let mut r = Ok(());
        for d in &self.domains {
            r = r.and(d.flush_all());
        }
        r.and(self.commit_all())
    }

    fn close(&self) -> Result<()> {
        let mut r = self.commit_everything();
        r = r.and(self.reap_zombies());
        r = r.and(self.commit_all());
        for d in &self.domains {
            if d.failed().is_none() {
                r = r.and(d.close());
            }
        }
        r
    }
}
