//! A mounted volume: domains opened and braided into one namespace. The library's API.
//!
//! Owns the superblock, the group table and the domains. [`Volume`]'s operations on names and files are in
//! `crate::names`, `crate::file`, `crate::attributes` and `crate::fsync`, one file per family of verbs.

pub mod add_device;
pub mod add_domain;
pub mod background;
pub mod claim;
mod cleaner;
mod compaction;
#[cfg(test)]
pub(crate) mod crowd;
pub mod device_use;
mod domains;
pub mod drain;
mod emptying;
mod eviction;
pub mod groups;
pub(crate) mod held;
pub mod journal_replay;
mod kept;
pub mod label;
pub mod look;
mod memory_calls;
pub mod mount;
mod mounted;
pub mod moves;
pub(crate) mod need;
mod online_check;
pub mod open_file;
pub(crate) mod operation;
pub mod quotas;
pub mod rebalance;
mod relocate;
pub mod remount;
pub mod remove_device;
pub mod resize;
pub mod room;
pub mod shrink;
mod siblings;
mod side_by_side;
pub mod tenant_devices;
pub mod tenants;
pub(crate) mod tidy;
mod to_scratch;
pub mod trim;
mod write_back;

use crate::error::{Error, Result};
use crate::store::lease::Lease;
use crate::store::overlay::Overlays;
use crate::types::*;
use braidfs_format::super_block::SuperBlock;
use braidfs_sync::{Mutex, rank};
use crossbeam::utils::CachePadded;
use std::sync::Arc;
use std::sync::atomic::Ordering;

pub use crate::fsync::ticket::Ticket;
pub(crate) use mounted::MountedVolume;
pub use open_file::OpenFile;
pub(crate) use open_file::VolumeRef;

/// A mounted volume. All operations take `&self` and may run on any number of threads.
///
/// Inode-level operations do no permission checks (a kernel front end with `default_permissions` has done them); those by
/// path, [`Volume::open_path`] and its like, check a [`Cred`].
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
    pub(crate) mounted: Option<Arc<MountedVolume>>,
    /// Locked for as long as the volume changes between writable and read-only.
    running: Mutex<Running, rank::Background>,
    /// Of a volume that was mounted read-only: what its recovery wrote.
    overlays: Overlays,
    /// What handles hold of the volume. Threads take different ones, so that they do not share a reference count.
    references: Box<[Arc<VolumeRef>]>,
}

/// What runs beside the operations, until the volume is closed or killed.
#[derive(Default)]
struct Running {
    /// The threads that work by themselves.
    background: Option<background::Background>,
    /// On devices that other machines reach, too. Given back when all is written.
    lease: Option<Lease>,
}

/// References to the volume that threads share out among them.
const REFERENCES: usize = 128;

impl std::fmt::Debug for Volume {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Volume").field("label", &self.label()).finish_non_exhaustive()
    }
}

impl Volume {
    pub(crate) fn mounted(&self) -> &Arc<MountedVolume> {
        // taken only by `unmount`, `crash` and `drop`, which consume the volume
        self.mounted.as_ref().unwrap_or_else(|| unreachable!("a volume is used after its end"))
    }

    pub(crate) fn new(mounted: Arc<MountedVolume>, overlays: Overlays, lease: Option<Lease>) -> Self {
        let references = (0..REFERENCES).map(|_| Arc::new(CachePadded::new(mounted.clone()))).collect();
        Self { mounted: Some(mounted), running: Mutex::new(Running { background: None, lease }), overlays, references }
    }

    /// A reference for a handle.
    pub(crate) fn reference(&self) -> Arc<VolumeRef> {
        self.references[crate::types::thread_slot(REFERENCES)].clone()
    }

    /// Makes everything durable, checkpoints, marks the volume clean and closes it. Files still open become orphans
    /// if they are unlinked; their handles answer errors. (Dropping a `Volume` does the same, without telling of errors.)
    ///
    /// # Errors
    /// Of a device; domains without an error are clean all the same. After [`Self::kill`].
    pub fn unmount(mut self) -> Result<()> {
        self.close()
    }

    fn close(&mut self) -> Result<()> {
        // its threads end before the last commit
        let Running { background, lease } = std::mem::take(&mut *self.running.lock());
        drop(background);
        let Some(mounted) = self.mounted.take() else { return Ok(()) };
        // its threads run code of users', which may start a sync: not with the lock
        let pool = mounted.pool.write().take();
        drop(pool);
        let r = match mounted.shared.read_only.load(Ordering::Relaxed) {
            // of one that was killed nothing is durable that was not so before
            true => mounted.shared.check_alive(),
            false => mounted.close(),
        };
        mounted.shared.read_only.store(true, Ordering::Relaxed);
        drop(lease);
        r
    }

    /// From now on the kernel kills this process where it is stopped (SIGSTOP, a debugger) past the end of its lease on devices
    /// that other machines reach: it could not look again before it goes on writing. For programs that own their process.
    ///
    /// # Errors
    /// Of the system.
    pub fn kill_when_stopped(&self) -> Result<()> {
        self.running.lock().lease.as_ref().map_or(Ok(()), |l| Ok(l.kill_when_stopped()?))
    }

    /// How many names were changed beside others, in directories locked for reading. Counted with
    /// [`MountOptions::share_dirs`] alone; for tests.
    pub fn changed_beside(&self) -> u64 {
        self.mounted().shared.changed_beside.load(Ordering::Relaxed)
    }

    /// [`Self::kill`], and closes it. For tests.
    pub fn crash(self) {
        self.kill();
    }

    /// Stops at once without writing anything more, as a crash does, also where files are open: what would change something, or
    /// make it durable, is an error from then on, and closing the volume writes nothing. The next mount recovers what was
    /// durable. For a process that has found its memory to be wrong.
    pub fn kill(&self) {
        let mounted = self.mounted();
        // before its threads end, which would write what they have begun
        mounted.shared.dead.store(true, Ordering::SeqCst);
        let mut running = self.running.lock();
        drop(running.background.take());
        mounted.shared.read_only.store(true, Ordering::SeqCst);
        running.lease.take().into_iter().for_each(Lease::abandon);
        drop(running);
        // as in `close`
        let pool = mounted.pool.write().take();
        drop(pool);
    }

    /// The superblock as it is now, but for what [`Self::label`] and [`Self::guarded`] tell.
    pub fn super_block(&self) -> SuperBlock {
        *self.mounted().sb.read()
    }

    /// Whether somebody has the inode open, if there is such an inode.
    pub fn is_open(&self, ino: InodeNo) -> bool {
        self.mounted().cell(ino).is_ok_and(|c| c.is_open())
    }

    /// Whether it is read-only: mounted so, or made so by [`Self::remount`].
    pub fn read_only(&self) -> bool {
        self.mounted().shared.read_only.load(Ordering::Relaxed)
    }

    /// What recovery found in the journals at the mount and could not use: writes that the crash cut off, or damage. One
    /// cannot be told from the other by a journal alone.
    pub fn recovery_traces(&self) -> &[String] {
        &self.mounted().traces
    }

    /// State of every domain.
    pub fn domains(&self) -> Vec<DomainInfo> {
        self.mounted().domains.iter().map(|d| d.info()).collect()
    }

    /// Domain of an inode.
    ///
    /// # Errors
    /// [`Error::NotFound`] where no domain owns such a number.
    pub fn domain_of(&self, ino: InodeNo) -> Result<DomainId> {
        Ok(self.mounted().domain(ino)?.id)
    }

    /// Commits one domain, as every domain does by itself after the commit interval; with a checkpoint, as when its journal
    /// has filled up.
    ///
    /// # Errors
    /// [`Error::NotFound`] where there is no such domain; of the device.
    pub fn commit_domain(&self, domain: DomainId, checkpoint: bool) -> Result<()> {
        let d = self.mounted().domains.get(usize::from(domain.0)).ok_or(Error::NotFound)?;
        d.commit()?;
        if checkpoint { d.checkpoint() } else { Ok(()) }
    }

    /// Generation of an inode: tells it from those that had its number before.
    ///
    /// # Errors
    /// [`Error::NotFound`] where no inode has the number.
    pub fn generation(&self, ino: InodeNo) -> Result<u32> {
        let c = self.mounted().see(ino)?;
        if c.state.read().deleted { Err(Error::NotFound) } else { Ok(c.generation) }
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        let killed = self.mounted.as_ref().is_some_and(|m| m.shared.dead.load(Ordering::Relaxed));
        if let Err(e) = self.close()
            && !killed
        {
            tracing::error!("closing the volume: {e}");
        }
    }
}
