//! The serving threads: receive, handle, reply, until the file system is unmounted; then close the volume.
//!
//! Each thread has its own descriptor of the connection and its own reference to the [`BraidFs`], in a slot that only
//! it locks: requests write nothing shared here. The slots are what makes an orderly end possible while other threads
//! sleep in `read`: on DESTROY (sent by `umount` of a `fuseblk` mount, which waits for the reply) one thread empties
//! them all, closes the volume and only then replies. A plain `fuse` mount sends no DESTROY; the threads see ENODEV,
//! and the volume is closed when all have left.

use crate::abi::op;
use crate::channel::{Channel, Later};
use crate::fs::{Agreed, BraidFs, Context, Job, MAX_IO_BYTES, negotiate};
use crate::latency::{self, Served};
use crate::mount::MountConfig;
use crate::request::{Answer, Outcome, Request};
use braidfs::Volume;
use crossbeam::utils::CachePadded;
use parking_lot::Mutex;
use rustix::io::Errno;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};
use std::thread;

/// A request and its header; the kernel wants room for 4 KiB besides the largest WRITE.
const RECEIVE_BYTES: usize = MAX_IO_BYTES as usize + 4096;

type Slot = CachePadded<Mutex<Option<Arc<BraidFs>>>>;

/// Answers the kernel's INIT.
pub(crate) fn handshake(channel: &Channel) -> io::Result<Agreed> {
    let mut buf = vec![0; RECEIVE_BYTES];
    let Some(n) = channel.receive(&mut buf)? else {
        return Err(io::Error::new(io::ErrorKind::NotConnected, "unmounted before it was served"));
    };
    let req = Request::parse(&buf[..n])?;
    if req.head.opcode != op::INIT {
        channel.reply_error(req.head.unique, Errno::IO);
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the first FUSE request was not INIT"));
    }
    let mut out = Answer::new(64);
    match negotiate(&req, &mut out) {
        Ok(agreed) => {
            channel.reply(req.head.unique, &mut out);
            Ok(agreed)
        }
        Err(e) => {
            channel.reply_error(req.head.unique, e);
            Err(e.into())
        }
    }
}

/// Serves `vol` with `cfg.threads` threads until it is unmounted, then closes it. `abandon` ends the connection by force,
/// where not all threads can be started.
///
/// # Errors
/// Of starting threads (the volume is closed then, too), or of closing the volume.
pub(crate) fn run(
    vol: Arc<Volume>,
    agreed: Agreed,
    channel: Channel,
    cfg: &MountConfig,
    abandon: &dyn Fn(),
) -> Result<(), RunError> {
    let (jobs, work) = mpsc::channel();
    let (threads, latency) = (cfg.threads.max(2), cfg.latency);
    let fs = Arc::new(BraidFs::new(vol, agreed, jobs));
    fs.durable.set(Some(cfg.sync), Some(cfg.dirsync));
    // One slot per serving thread and one for the helper.
    let slots: Vec<Slot> = (0..=threads).map(|_| CachePadded::new(Mutex::new(Some(fs.clone())))).collect();
    drop(fs);
    let served = Served::new(threads);
    let closed = Mutex::new(None);
    let close = || {
        let mut closed = closed.lock();
        if closed.is_none() {
            *closed = Some(close_volume(&slots));
        }
    };
    let started = thread::scope(|scope| -> io::Result<()> {
        let (slots, served, close) = (&slots, &served, &close);
        let (awake, end) = mpsc::channel::<()>();
        let mut serving = Vec::with_capacity(threads);
        let spawn = || {
            let channel = Arc::new(channel);
            thread::Builder::new()
                .name("fuse-helper".into())
                .spawn_scoped(scope, move || help(&slots[threads], work))?;
            for (i, slot) in slots.iter().enumerate().take(threads) {
                let channel = if i == 0 { channel.clone() } else { Arc::new(channel.try_clone()?) };
                let server = Server { i, slot, channel, served, close };
                let work = move || server.serve();
                serving.push(thread::Builder::new().name(format!("fuse-{i}")).spawn_scoped(scope, work)?);
            }
            thread::Builder::new()
                .name("fuse-latency".into())
                .spawn_scoped(scope, move || latency::watch(latency, served, &end))?;
            Ok(())
        };
        let started = spawn();
        if started.is_err() {
            // Threads that did start sleep in `read` until the connection ends.
            abandon();
        }
        for thread in serving {
            // Panics of handlers are caught; whatever else a thread died of, the volume must be closed.
            let _ = thread.join();
        }
        drop(awake);
        // The helper ends when the file system is gone.
        close();
        started
    });
    started?;
    closed.into_inner().unwrap_or(Ok(())).map_err(RunError::Close)
}

/// Why serving ended badly.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RunError {
    /// Threads or descriptors.
    #[error(transparent)]
    Start(#[from] io::Error),
    /// The volume.
    #[error(transparent)]
    Close(braidfs::Error),
}

/// One serving thread.
struct Server<'a> {
    i: usize,
    slot: &'a Slot,
    channel: Arc<Channel>,
    served: &'a Served,
    close: &'a (dyn Fn() + Sync),
}

impl Server<'_> {
    fn serve(&self) {
        let _serving = self.served.begin(self.i);
        let mut buf = vec![0; RECEIVE_BYTES];
        let mut out = Answer::new(MAX_IO_BYTES as usize);
        loop {
            match self.channel.receive(&mut buf) {
                Ok(Some(n)) => {
                    if !self.dispatch(&buf[..n], &mut out) {
                        return;
                    }
                }
                Ok(None) => return,
                Err(e) => {
                    tracing::error!(error = %e, "cannot receive from the FUSE device");
                    return;
                }
            }
        }
    }

    /// Handles one frame; false after DESTROY.
    fn dispatch(&self, frame: &[u8], out: &mut Answer) -> bool {
        let req = match Request::parse(frame) {
            Ok(req) => req,
            Err(_) => {
                tracing::error!(bytes = frame.len(), "the kernel sent a FUSE request that does not parse");
                return true;
            }
        };
        self.served.count(self.i, &req);
        let (channel, unique) = (&self.channel, req.head.unique);
        if req.head.opcode == op::DESTROY {
            let later = Later::new(channel, unique);
            (self.close)();
            later.done(Ok(()));
            return false;
        }
        out.clear();
        let slot = self.slot.lock();
        let handled = match &*slot {
            // A panic is our bug; the request that ran into it fails, the mount lives on.
            Some(fs) => catch_unwind(AssertUnwindSafe(|| fs.serve(frame, &req, out, &Context { channel, unique })))
                .unwrap_or_else(|_| {
                    tracing::error!(op = op::name(req.head.opcode), node = %req.node(), "panic in a FUSE operation");
                    Err(Errno::IO)
                }),
            None if matches!(req.head.opcode, op::FORGET | op::BATCH_FORGET) => Ok(Outcome::Silent),
            None => Err(Errno::NODEV),
        };
        match handled {
            Ok(Outcome::Reply) => match &*slot {
                Some(fs) => fs.reply(req.head.opcode, channel, unique, out),
                None => channel.reply_error(unique, Errno::NODEV),
            },
            Ok(Outcome::Deferred | Outcome::Silent) => {}
            Err(e) => {
                tracing::trace!(op = op::name(req.head.opcode), node = %req.node(), error = %e);
                channel.reply_error(unique, e);
            }
        }
        true
    }
}

/// The helper thread: work during which serving threads must go on serving.
fn help(slot: &Slot, work: mpsc::Receiver<Job>) {
    // Ends when the file system, which holds the sender, is gone.
    for job in work {
        if let Some(fs) = &*slot.lock() {
            // A job that panics drops its duty to reply, which answers EIO.
            let _ = catch_unwind(AssertUnwindSafe(|| job(fs)));
        }
    }
}

/// Takes the file system out of all slots, waiting for the operations under way, and closes the volume.
fn close_volume(slots: &[Slot]) -> braidfs::Result<()> {
    let mut last = None;
    for slot in slots {
        last = slot.lock().take();
    }
    match last.and_then(Arc::into_inner) {
        Some(fs) => close(fs.into_volume()),
        // Only the thread that empties the slots holds references outside them.
        None => Err(braidfs::Error::Busy("the file system is still in use".into())),
    }
}

/// Unmounts the volume; where the caller of `serve` shares it, makes all durable and leaves the rest to them.
pub(crate) fn close(vol: Arc<Volume>) -> braidfs::Result<()> {
    match Arc::try_unwrap(vol) {
        Ok(vol) => vol.unmount(),
        Err(shared) => shared.sync(),
    }
}
