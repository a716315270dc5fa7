//! Serving a volume at a mount point from start to end, signals included.

use crate::channel::Channel;
use crate::mount::{Mount, MountConfig, take_over};
use crate::node;
use crate::session::{self, RunError};
use braidfs::Volume;
use rustix::fs::{Mode, OFlags};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;

/// What the kernel is told to read ahead, KiB: one full READ in flight while one is consumed.
const READAHEAD_KIB: u32 = 2048;

/// Why a volume was not served, or not closed.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Mounting failed.
    #[error("cannot mount on {point}: {source}", point = point.display())]
    Mount {
        /// Where.
        point: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Inode numbers do not fit what FUSE calls inodes by.
    #[error("cannot serve: the volume has room for {0} inodes, a FUSE mount for {max} (2 PiB); use the library",
        max = node::INODES_MAX)]
    TooLarge(u64),
    /// Threads, descriptors or signal handlers.
    #[error("cannot serve: {0}")]
    Start(io::Error),
    /// The volume was served, but could not be closed cleanly; it will be recovered at the next mount.
    #[error("closing the volume: {0}")]
    Close(braidfs::Error),
}

/// Mounts `vol` and serves it until it is unmounted; then closes it, before returning.
///
/// `ready` is called when the mount can be used. SIGTERM, SIGINT and SIGHUP unmount: at once, or, where the mount is
/// busy, after a sync and lazily; a second signal cuts the users off. The volume is closed in every case, also where
/// mounting fails. A caller who keeps a reference to `vol` closes it themselves; it is then only synced here.
///
/// # Errors
/// See [`ServeError`].
pub fn serve(vol: Arc<Volume>, cfg: &MountConfig, ready: impl FnOnce()) -> Result<(), ServeError> {
    match check(&vol).and_then(|()| attach(cfg)) {
        Ok(attached) => attached.run(vol, cfg, ready),
        Err(e) => {
            if let Err(e) = session::close(vol) {
                tracing::error!(error = %e, "closing the volume");
            }
            Err(e)
        }
    }
}

/// Whether the kernel can be given ids for all inodes of the volume.
fn check(vol: &Volume) -> Result<(), ServeError> {
    let geometry = vol.super_block().geometry().map_err(|e| ServeError::Start(io::Error::other(e)))?;
    node::check(&geometry).map_err(ServeError::TooLarge)
}

/// A mount with nobody serving it yet.
struct Attached {
    mount: Arc<Mount>,
    channel: Channel,
    signals: Signals,
}

fn attach(cfg: &MountConfig) -> Result<Attached, ServeError> {
    let failed = |source| ServeError::Mount { point: cfg.mountpoint.clone(), source };
    crate::latency::check(cfg.latency).map_err(ServeError::Start)?;
    // Before the mount exists, so that no signal leaves it behind.
    let signals = Signals::new([SIGTERM, SIGINT, SIGHUP]).map_err(ServeError::Start)?;
    take_over(&cfg.mountpoint).map_err(failed)?;
    let (mount, fd) = Mount::new(cfg).map_err(failed)?;
    Ok(Attached { mount: Arc::new(mount), channel: Channel::new(fd), signals })
}

impl Attached {
    fn run(self, vol: Arc<Volume>, cfg: &MountConfig, ready: impl FnOnce()) -> Result<(), ServeError> {
        let Self { mount, channel, mut signals } = self;
        let agreed = match session::handshake(&channel) {
            Ok(agreed) => agreed,
            Err(source) => {
                // Ends the connection first: nobody would answer what unmounting may ask.
                drop(channel);
                drop(mount);
                let closed = session::close(vol);
                tracing::debug!(?closed, "volume closed after a failed handshake");
                return Err(ServeError::Mount { point: cfg.mountpoint.clone(), source });
            }
        };
        mount.set_readahead(READAHEAD_KIB);
        mount.limit_dirty(crate::room::KERNEL_DIRTY_BYTES);
        let handle = signals.handle();
        let watcher = {
            let mount = mount.clone();
            thread::Builder::new().name("fuse-signals".into()).spawn(move || watch(&mount, &mut signals))
        };
        ready();
        let abandon = || {
            if let Err(e) = mount.abort() {
                tracing::error!(error = %e, "cannot end the FUSE connection");
            }
        };
        let result = session::run(vol, agreed, channel, cfg, &abandon);
        handle.close();
        match watcher {
            Ok(thread) => drop(thread.join()),
            Err(e) => tracing::warn!(error = %e, "no thread for signals: unmount to end"),
        }
        result.map_err(|e| match e {
            RunError::Start(e) => ServeError::Start(e),
            RunError::Close(e) => ServeError::Close(e),
        })
    }
}

/// Unmounts on the first signal, cuts off on the second.
fn watch(mount: &Mount, signals: &mut Signals) {
    let mut told = false;
    for signal in signals.forever() {
        tracing::info!(signal, "asked to end");
        let done = if told { mount.abort() } else { end(mount) };
        if let Err(e) = done {
            tracing::error!(point = %mount.point().display(), error = %e, "cannot unmount");
        }
        told = true;
    }
}

fn end(mount: &Mount) -> io::Result<()> {
    if !mount.exists() {
        return Ok(());
    }
    match mount.unmount(false) {
        Err(e) if e.raw_os_error() == Some(libc::EBUSY) => {
            tracing::warn!(point = %mount.point().display(), "busy: synced and detached; ends with its last user");
            let root =
                rustix::fs::open(mount.point(), OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
            rustix::fs::syncfs(&root)?;
            drop(root);
            mount.unmount(true)
        }
        done => done,
    }
}
