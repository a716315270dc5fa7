//! Serving a volume at a mount point from start to end, signals included.

use crate::abi::init;
use crate::channel::Channel;
use crate::daemon::{asked_to_end, tell_parent};
use crate::ending::Ending;
use crate::fs::Negotiated;
use crate::mount::{Mount, MountConfig};
use crate::mount_table::MountId;
use crate::node;
use crate::session::{self, Fresh, RunError, Service, SessionEnd};
use crate::transport::{self, RingPlace, Transport};
use crate::upgrade::old::{self, HandedOver};
use crate::watch::listen::Listener;
use braidfs::Volume;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// What the kernel is told to read ahead, KiB: one full READ in flight while one is consumed.
pub(crate) const READAHEAD_KIB: u32 = 2048;

/// Why a volume was not served, or not closed.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The kernel, or fusermount, refused the mount.
    #[error("cannot mount on {point}: {source}", point = point.display())]
    Mount {
        /// The mount point.
        point: PathBuf,
        /// What the system answered.
        source: io::Error,
    },
    /// Inode numbers do not fit what FUSE calls inodes by.
    #[error("cannot serve: the volume has room for {0} inodes, a FUSE mount for {max} (2 PiB); use the library",
        max = node::INODES_MAX)]
    TooLarge(u64),
    /// The user wants rings and nothing else.
    #[error("transport=ring: {0}")]
    Ring(io::Error),
    /// Threads, descriptors or signal handlers.
    #[error("cannot serve: {0}")]
    Start(io::Error),
    /// It was to take a mount over.
    #[error("cannot take the mount over: {0}")]
    TakeOver(String),
    /// The volume was served, but could not be closed cleanly; it will be recovered at the next mount.
    #[error("closing the volume: {0}")]
    Close(braidfs::Error),
}

/// How far a mount is.
#[derive(Debug, Clone, Copy)]
pub enum Progress {
    /// It is in the table of mounts; not known which it is where that cannot be read.
    Mounted(Option<MountId>),
    /// It can be used.
    Ready,
    /// The process with this number serves it from now on; [`serve`] returns.
    HandedOver(u32),
}

/// Mounts `vol` and serves it until it is unmounted; then closes it, before returning.
///
/// `tell` is called when the mount is made, which may be more than once, and when it can be used. SIGTERM, SIGINT and SIGHUP
/// unmount: at once, or, where the mount is
/// busy, after a sync and lazily; a second signal cuts the users off, whatever the first one waits for. Where another program takes over
/// ([`MountConfig::upgrade`], [`crate::control::upgrade`]) it returns, too, and the mount goes on. The volume is closed in
/// every case, also where
/// mounting fails. A caller who keeps a reference to `vol` closes it themselves; it is then only synced here.
///
/// # Errors
/// See [`ServeError`].
pub fn serve(vol: Arc<Volume>, cfg: &MountConfig, mut tell: impl FnMut(Progress)) -> Result<(), ServeError> {
    let closing = |vol, e| {
        if let Err(e) = session::close(vol) {
            tracing::error!(error = %e, "closing the volume");
        }
        Err(e)
    };
    let mut rings = match check(&vol).and_then(|()| choose(cfg.transport)) {
        Ok(rings) => rings,
        Err(e) => return closing(vol, e),
    };
    let metrics = match cfg.metrics.as_ref().map(Listener::bind).transpose() {
        Ok(metrics) => metrics,
        Err(e) => return closing(vol, ServeError::Start(io::Error::new(e.kind(), format!("metrics: {e}")))),
    };
    let (mut vol, mut told) = (vol, false);
    loop {
        let attached = match attach(cfg) {
            Ok(attached) => attached,
            Err(e) => return closing(vol, e),
        };
        tell(Progress::Mounted(attached.mount.id()));
        let mut progress = |p| match p {
            Progress::Ready if std::mem::replace(&mut told, true) => {}
            p => tell(p),
        };
        match attached.run(vol, (cfg, metrics.as_ref()), std::mem::take(&mut rings), &mut progress) {
            Ok(Served::Unmounted) => return Ok(()),
            Ok(Served::HandedOver) => {
                metrics.into_iter().for_each(Listener::leave);
                return Ok(());
            }
            Err(Ended::Badly(e)) => return Err(e),
            // A connection that knew rings cannot go on without them: another one, at the device.
            Err(Ended::WithoutRings(unserved, why)) => {
                if cfg.transport == Transport::Ring {
                    return closing(unserved, ServeError::Ring(why));
                }
                tracing::warn!(reason = %why, "io_uring refused by the kernel: mounting anew, by /dev/fuse");
                vol = unserved;
            }
        }
    }
}

/// The rings that the mount is to take, none for the device.
fn choose(transport: Transport) -> Result<Vec<RingPlace>, ServeError> {
    if transport == Transport::Dev {
        tracing::info!(transport = "dev", "as asked for");
        return Ok(Vec::new());
    }
    match transport::rings() {
        Ok(rings) => {
            let (cpus, queues) = (rings.len(), rings.iter().map(|p| p.queues.len()).sum::<usize>());
            tracing::info!(transport = "ring", cpus, queues, "requests come through io_uring");
            Ok(rings)
        }
        Err(why) if transport == Transport::Ring => Err(ServeError::Ring(why)),
        Err(why) => {
            tracing::info!(transport = "dev", reason = %why, "requests come through /dev/fuse, not io_uring");
            Ok(Vec::new())
        }
    }
}

/// How a session ended that was not unmounted.
enum Ended {
    Badly(ServeError),
    /// It began with rings that the kernel refused; nothing was served.
    WithoutRings(Arc<Volume>, io::Error),
}

/// Whether the kernel can be given ids for all inodes of the volume.
fn check(vol: &Volume) -> Result<(), ServeError> {
    let geometry = vol.super_block().geometry().map_err(|e| ServeError::Start(io::Error::other(e)))?;
    node::check(&geometry).map_err(ServeError::TooLarge)
}

/// How serving ended well.
pub(crate) enum Served {
    Unmounted,
    /// The mount goes on.
    HandedOver,
}

/// A mount with nobody serving it yet.
pub(crate) struct Attached {
    pub mount: Arc<Mount>,
    pub channel: Arc<Channel>,
    pub signals: Signals,
}

fn attach(cfg: &MountConfig) -> Result<Attached, ServeError> {
    let failed = |source| ServeError::Mount { point: cfg.mountpoint.clone(), source };
    crate::latency::check(cfg.latency).map_err(ServeError::Start)?;
    // Before the mount exists, so that no signal leaves it behind.
    let signals = Signals::new([SIGTERM, SIGINT, SIGHUP]).map_err(ServeError::Start)?;
    let (mount, fd) = Mount::new(cfg).map_err(failed)?;
    Ok(Attached { mount: Arc::new(mount), channel: Arc::new(Channel::new(fd)), signals })
}

impl Attached {
    fn run(
        self,
        vol: Arc<Volume>,
        (cfg, metrics): (&MountConfig, Option<&Listener>),
        mut rings: Vec<RingPlace>,
        tell: &mut dyn FnMut(Progress),
    ) -> Result<Served, Ended> {
        let Self { mount, channel, .. } = &self;
        let opens = cfg.opens || vol.guarded();
        let negotiated = match session::handshake(channel, !rings.is_empty(), opens, cfg.profile) {
            Ok(negotiated) => negotiated,
            Err(source) => {
                // Ends the connection first: nobody would answer what unmounting may ask.
                let Self { mount, channel, .. } = self;
                drop(channel);
                drop(mount);
                let closed = session::close(vol);
                tracing::debug!(?closed, "volume closed after a failed handshake");
                return Err(Ended::Badly(ServeError::Mount { point: cfg.mountpoint.clone(), source }));
            }
        };
        if !rings.is_empty() && !negotiated.has(init::OVER_IO_URING) {
            let why = io::Error::new(io::ErrorKind::Unsupported, "the kernel does not offer it");
            if cfg.transport == Transport::Ring {
                return Err(Ended::WithoutRings(vol, why));
            }
            tracing::info!(transport = "dev", reason = %why, "requests come through /dev/fuse after all");
            rings.clear();
        }
        mount.set_readahead(READAHEAD_KIB);
        let fresh = Fresh::new(vol, negotiated, cfg, mount.dirty_limit());
        self.serve(fresh, (cfg, metrics), negotiated, rings, tell).map_err(|e| match e {
            RunError::Start(e) => Ended::Badly(ServeError::Start(e)),
            RunError::Close(e) => Ended::Badly(ServeError::Close(e)),
            RunError::Rings { why, vol } => Ended::WithoutRings(vol, why),
        })
    }

    /// Serves until it is unmounted, or another process does.
    pub(crate) fn serve(
        self,
        fresh: Fresh,
        (cfg, metrics): (&MountConfig, Option<&Listener>),
        negotiated: Negotiated,
        rings: Vec<RingPlace>,
        tell: &mut dyn FnMut(Progress),
    ) -> Result<Served, RunError> {
        let Self { mount, channel, mut signals } = self;
        let handle = signals.handle();
        let ending = Arc::new(Ending {
            mount: mount.clone(),
            channel: Arc::downgrade(&channel),
            connections: channel.connections().clone(),
            told: AtomicBool::new(false),
            goes_on: AtomicBool::new(false),
        });
        let watcher = {
            let ending = ending.clone();
            thread::Builder::new().name("fuse-signals".into()).spawn(move || ending.watch(&mut signals))
        };
        let abandon = || {
            if let Err(e) = mount.abort() {
                tracing::error!(error = %e, "cannot end the FUSE connection");
            }
        };
        let over = || mount.unguard();
        let mut next = (fresh, rings);
        let result = loop {
            let (fresh, rings) = next;
            let service = Service { channel: channel.clone(), rings, cfg, metrics, abandon: &abandon, over: &over };
            let (fs, prepared) = match session::run(fresh, service, || tell(Progress::Ready)) {
                Ok(SessionEnd::Stopped(fs, prepared)) => (fs, prepared),
                Ok(SessionEnd::Unmounted) => break Ok(Served::Unmounted),
                Err(e) => break Err(e),
            };
            let with = old::Served { config: cfg.upgrade.as_ref(), channel: &channel, mount: &mount, metrics };
            match old::hand_over(*fs, *prepared, &with) {
                HandedOver::To(pid) => {
                    tracing::info!(pid, "upgraded: another process serves the mount");
                    mount.leave();
                    tell(Progress::HandedOver(pid));
                    if ending.told.load(Ordering::SeqCst) {
                        hand_on_the_end(pid, cfg.upgrade.as_ref().and_then(|u| u.supervisor.as_ref()));
                    }
                    // what a signal began may wait for an answer of the mount: it ends with this process
                    return Ok(Served::HandedOver);
                }
                HandedOver::No { vol, front, handles, untold } => {
                    let again = Fresh::again(vol, negotiated, cfg, mount.dirty_limit(), *front, Some(*untold));
                    // opened anew by now
                    drop(handles);
                    match again {
                        Ok(fresh) => next = (fresh, Vec::new()),
                        Err(why) => {
                            mount.leave();
                            break Err(RunError::Start(io::Error::other(why)));
                        }
                    }
                }
                // who looks after this process sees a dead mount
                HandedOver::Lost(e) => {
                    mount.leave();
                    break Err(RunError::Close(e));
                }
            }
        };
        handle.close();
        match watcher {
            Ok(thread) => drop(thread.join()),
            Err(e) => tracing::warn!(error = %e, "no thread for signals: unmount to end"),
        }
        result
    }
}

/// Who asked this process to end meant whoever serves the mount. A parent may have been asked, too: it tells that once.
fn hand_on_the_end(pid: u32, parent: Option<&OwnedFd>) {
    if let Some(parent) = parent {
        if let Err(e) = tell_parent(parent, &asked_to_end()) {
            tracing::warn!(error = %e, "asked to end, and cannot tell the parent");
        }
        return;
    }
    let pid = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw);
    if let Some(pid) = pid
        && let Err(e) = rustix::process::kill_process(pid, rustix::process::Signal::TERM)
    {
        tracing::warn!(error = %e, "asked to end, and cannot hand that on");
    }
}
