//! What becomes of a mount whose process is asked to end by signals: the first one unmounts, the second one cuts off who uses it.
//!
//! What the first one asks of the kernel may take any time: it waits for pages to be written back, for the device, and for answers
//! of this process. So that has a thread of its own, and the one that waits for signals is free for the second.
//!
//! Signals that come together are one: a service manager may send SIGHUP right after SIGTERM, and a machine that shuts down signals a
//! process and the one that looks after it, which hands that on. So what comes within [`SAME`] of the first changes nothing.
//!
//! In every case but that of a mount that is unmounted at once, all is made durable: a kill may come next, or the second signal.
//! Where the root of the mount cannot be reached (something is mounted over it, or it was detached) the kernel is asked to write
//! back file by file ([`BraidFs::write_back_all`]): a sync(2) of the machine would wait for other file systems, too.

use crate::channel::Channel;
use crate::connections::Connections;
use crate::fs::BraidFs;
use crate::mount::Mount;
use crate::mount_table::Place;
use crate::node::WireId;
use crate::session::run_aside;
use rustix::fs::{Mode, OFlags};
use signal_hook::iterator::Signals;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Signals that come within so long after the first one are the same wish.
const SAME: Duration = Duration::from_secs(3);

/// What a signal ends.
pub(crate) struct Ending {
    pub mount: Arc<Mount>,
    pub channel: Weak<Channel>,
    pub connections: Arc<Connections>,
    /// A signal has come: the mount is to end.
    pub told: AtomicBool,
    /// What the signal before began has ended, and the mount goes on, as something else was mounted over it.
    pub goes_on: AtomicBool,
}

impl Ending {
    /// Until no signals are waited for any more, and what the first one began has ended.
    pub fn watch(self: &Arc<Self>, signals: &mut Signals) {
        let mut work: Option<JoinHandle<()>> = None;
        let mut first: Option<Instant> = None;
        for signal in signals.forever() {
            tracing::info!(signal, "asked to end");
            match first {
                Some(first) if first.elapsed() < SAME => continue,
                Some(_) if !self.is_uncovered() => {
                    self.cut_off();
                    continue;
                }
                _ => first = Some(Instant::now()),
            }
            self.goes_on.store(false, Ordering::SeqCst);
            self.told.store(true, Ordering::SeqCst);
            let own = self.clone();
            match run_aside("fuse-end", move || own.unmount()) {
                Ok(thread) => work = Some(thread),
                Err(e) => {
                    tracing::debug!(error = %e, "no thread to unmount on");
                    self.unmount();
                }
            }
        }
        // Its connections have ended, and so has all that it waits for.
        work.map(JoinHandle::join);
    }

    fn unmount(&self) {
        // of one that goes on the tenants do, too
        let covered = self.mount.place() == Place::Covered;
        if !covered {
            self.connections.unmount();
        }
        if let Err(e) = end(&self.mount, &self.connections, &self.channel) {
            tracing::error!(point = %self.mount.point().display(), error = %e, "cannot unmount");
        }
        if covered {
            self.told.store(false, Ordering::SeqCst);
            self.goes_on.store(true, Ordering::SeqCst);
        }
    }

    /// It was covered when a signal came, and went on; it is so no more: the next signal is a first one.
    fn is_uncovered(&self) -> bool {
        self.goes_on.load(Ordering::SeqCst) && self.mount.place() != Place::Covered
    }

    fn cut_off(&self) {
        self.connections.cut_off();
        if is_over(&self.channel) {
            return;
        }
        if let Err(e) = self.mount.abort() {
            tracing::error!(point = %self.mount.point().display(), error = %e, "cannot end the FUSE connection");
        }
    }
}

fn is_over(channel: &Weak<Channel>) -> bool {
    channel.upgrade().is_none_or(|channel| channel.is_over())
}

/// Unmounts; where it is busy after a sync, and lazily. What cannot be unmounted is made durable, and goes on.
///
/// # Errors
/// It could not be made durable, or be unmounted.
pub(crate) fn end(mount: &Mount, all: &Connections, channel: &Weak<Channel>) -> io::Result<()> {
    let point = match mount.place() {
        Place::OnTop(point) => point,
        _ if is_over(channel) => return Ok(()),
        elsewhere => {
            let why = match elsewhere {
                Place::Covered => {
                    "something else is mounted over it: synced, and it goes on; unmount that and then this, or ask again to cut off \
                     its users"
                }
                _ => "it was detached before: synced; it ends with its last user, or ask again to cut off its users",
            };
            all.write_back_all();
            all.make_durable()?;
            tracing::warn!(point = %mount.point().display(), "{why}");
            return Ok(());
        }
    };
    match mount.unmount(false) {
        Err(e) if e.raw_os_error() == Some(libc::EBUSY) => {
            match sync(&point).and_then(|()| all.make_durable()) {
                Ok(()) => {
                    tracing::warn!(point = %point.display(), "busy: synced and detached; ends with its last user")
                }
                Err(e) => {
                    tracing::error!(point = %point.display(), error = %e,
                                    "busy: detached, and could not be synced; ends with its last user");
                }
            }
            mount.unmount(true)
        }
        Err(e) => {
            all.write_back_all();
            if let Err(e) = all.make_durable() {
                tracing::error!(point = %point.display(), error = %e, "could not be synced");
            }
            Err(e)
        }
        Ok(()) => Ok(()),
    }
}

/// Has the kernel write what it holds.
fn sync(point: &Path) -> io::Result<()> {
    let root = rustix::fs::open(point, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    Ok(rustix::fs::syncfs(&root)?)
}

impl Connections {
    /// Has the kernel write back what it holds of all files that it knows, over all connections. It waits for that: on a thread
    /// that serves nothing.
    pub fn write_back_all(&self) {
        if let (Some(fs), Some(channel)) = (self.file_system(), self.main()) {
            fs.write_back_all(&channel);
        }
    }

    /// What has reached the volume becomes durable; nothing to do where it is being closed.
    ///
    /// # Errors
    /// Of the volume's devices.
    pub fn make_durable(&self) -> io::Result<()> {
        // not with the file system, whose end waits for nobody for ever
        let Some(volume) = self.file_system().map(|fs| fs.vol.clone()) else { return Ok(()) };
        volume.sync().map_err(io::Error::other)
    }
}

impl BraidFs {
    fn write_back_all(&self, channel: &Channel) {
        // not as they are listed, under a lock
        for file in self.vol.held_files(|_| true) {
            self.drop_pages(WireId::new(file.ino, file.generation), None, channel);
        }
    }
}
