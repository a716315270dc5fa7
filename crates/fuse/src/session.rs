//! The serving threads: receive, handle, reply, until the file system is unmounted; then close the volume.
//!
//! Each thread has its own descriptor of the connection, or its own ring ([`crate::transport`]), and its own reference to
//! the [`BraidFs`], in a slot that only it locks: requests write nothing shared here. The slots are what makes an orderly
//! end possible while other threads sleep in `read`: on DESTROY (sent by `umount` of a `fuseblk` mount, which waits for
//! the reply) one thread empties them all, closes the volume and only then replies. A plain `fuse` mount sends no DESTROY;
//! the threads see that the connection is gone, and the volume is closed when all have left.
//!
//! For an upgrade ([`crate::upgrade`]) the threads at the device stop while the connection goes on, and what is under way ends
//! ([`quiesce`]); the file system is given back then, or served again.
//!
//! With rings no request is served before the kernel has taken all of them: a session whose rings are refused ends
//! without having touched the volume.

mod crew;
mod server;

use crate::abi::{self, op};
use crate::channel::Channel;
use crate::counters::Counters;
use crate::dirty::DirtyLimit;
use crate::fs::{BraidFs, MAX_IO_BYTES, Negotiated, negotiate};
use crate::helpers::{self, Kind, Whose, Work};
use crate::latency::Served;
use crate::mount::MountConfig;
use crate::pace::Pacer;
use crate::profile::Profile;
use crate::request::{Answer, Request};
use crate::transport::RingPlace;
use crate::upgrade::old::{Prepared, Untold};
use crate::upgrade::record::Front;
use crate::upgrade::stop::Stop;
use crate::upgrade::{Upgrades, old};
use crate::watch::listen::Listener;
use braidfs::Volume;
use braidfs_sync::{Mutex, rank};
pub(crate) use crew::spawn_thread;
use crew::{Closing, Crew, Places};
use crossbeam::utils::CachePadded;
use rustix::io::Errno;
use rustix::thread::{sched_getaffinity, sched_setaffinity};
use server::{RECEIVE_BYTES, Server};
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::{Duration, Instant};

/// How long what is under way has to end before an upgrade; how long nothing is received meanwhile, and then something is.
const QUIESCE_WITHIN: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(20);
const TURN: Duration = Duration::from_millis(50);
/// How long somebody else has to let the volume go.
const LET_GO: Duration = Duration::from_millis(200);

/// The file system of a thread that handles requests.
pub(crate) type Slot = CachePadded<Mutex<Option<Arc<BraidFs>>, rank::ServingSlot>>;

/// Answers the kernel's INIT; `rings`: they are there, should the kernel know them. With `opens` the kernel is to ask for
/// each open.
pub(crate) fn handshake(channel: &Channel, rings: bool, opens: bool, profile: Profile) -> io::Result<Negotiated> {
    let mut buf = vec![0; RECEIVE_BYTES];
    let Some(n) = channel.receive(&mut buf)? else {
        return Err(io::Error::new(io::ErrorKind::NotConnected, "unmounted before it was served"));
    };
    let req = Request::parse(&buf[..n])?;
    if req.head.opcode != op::INIT {
        channel.reply_error(req.head.unique, Errno::IO);
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the first FUSE request was not INIT"));
    }
    if let Err(e) = profile.check_module() {
        channel.reply_error(req.head.unique, Errno::PERM);
        return Err(e);
    }
    let mut out = Answer::new(64);
    // by a number anything in the volume could be asked for
    let without = if channel.own().is_some() { abi::init::EXPORT_SUPPORT } else { 0 };
    match negotiate(&req, &mut out, rings, opens, profile, without) {
        Ok(negotiated) => {
            channel.reply(req.head.unique, &mut out);
            Ok(negotiated)
        }
        Err(e) => {
            channel.reply_error(req.head.unique, e);
            Err(if e == Errno::OPNOTSUPP { profile.refused() } else { e.into() })
        }
    }
}

/// A file system that is about to be served.
pub(crate) struct Fresh {
    fs: BraidFs,
    work: Work,
}

impl Fresh {
    fn of(vol: Arc<Volume>, negotiated: Negotiated, cfg: &MountConfig) -> Self {
        let (jobs, work) = helpers::queue();
        let mut fs = BraidFs::new(vol, negotiated, jobs);
        fs.profile = cfg.profile;
        // as that says
        fs.keep_rooms();
        fs.tell_devices = cfg.tell_devices.clone();
        fs.upgrades = Arc::new(Upgrades::new(cfg.upgrade.clone(), negotiated, at_device_threads(cfg)));
        Self { fs, work }
    }

    /// Requests of tenants may wait, where there are such.
    fn raise_threshold(&self) {
        if self.fs.vol.any_rates() {
            self.fs.raise_threshold();
        }
    }

    /// For a mount that was just made.
    pub fn new(vol: Arc<Volume>, negotiated: Negotiated, cfg: &MountConfig, dirty: Option<DirtyLimit>) -> Self {
        let mut fresh = Self::of(vol, negotiated, cfg);
        fresh.fs.allow_dirty(dirty);
        fresh.raise_threshold();
        fresh.fs.counters = Arc::new(Counters::new(cfg.slow));
        fresh.fs.durable.set(Some(cfg.sync), Some(cfg.dirsync));
        fresh
    }

    /// For one that was served before, by this process, which knows what is `untold`, or another one.
    ///
    /// # Errors
    /// Open files that are not there.
    pub fn again(
        vol: Arc<Volume>,
        negotiated: Negotiated,
        cfg: &MountConfig,
        dirty: Option<DirtyLimit>,
        front: Front,
        untold: Option<Untold>,
    ) -> Result<Self, String> {
        let mut fresh = Self::of(vol, negotiated, cfg);
        fresh.fs.dirty = dirty;
        fresh.raise_threshold();
        match untold {
            Some(Untold { counters, past_cache }) => (fresh.fs.counters, fresh.fs.past_cache) = (counters, past_cache),
            None => fresh.fs.counters = Arc::new(Counters::new(cfg.slow)),
        }
        old::restore(&mut fresh.fs, front)?;
        Ok(fresh)
    }

    /// As soon as it is served the kernel writes back what it took of owners with limits, of which nothing is known. The job has
    /// the channel when it is done only: who has it when the serving threads begin is taken to have it for ever.
    pub fn write_back_limited(&self) {
        if self.fs.vol.any_quotas() {
            self.fs.jobs.send(Kind::Quota, Whose::Mount, |fs| {
                if let Some(channel) = fs.connections.main() {
                    fs.quotas_changed(&channel);
                }
            });
        }
    }
}

fn at_device_threads(cfg: &MountConfig) -> usize {
    cfg.threads.max(2)
}

/// How serving ended well.
pub(crate) enum SessionEnd {
    /// The volume is closed.
    Unmounted,
    /// For an upgrade: nothing is under way, and the connection goes on.
    Stopped(Box<BraidFs>, Box<Prepared>),
}

/// How a session is served.
pub(crate) struct Service<'a> {
    pub channel: Arc<Channel>,
    /// A thread for each; where there are none, threads at the device.
    pub rings: Vec<RingPlace>,
    pub cfg: &'a MountConfig,
    /// Who wants metrics asks there.
    pub metrics: Option<&'a Listener>,
    /// Ends the connection by force, where it cannot be served.
    pub abandon: &'a (dyn Fn() + Sync),
    /// Called when the connection has ended, before the volume is closed.
    pub over: &'a (dyn Fn() + Sync),
}

/// Serves until it is unmounted, then closes the volume; or until another program is to take over. `ready` is called when the
/// mount can be used.
///
/// # Errors
/// Of starting threads (the volume is closed then, too), of rings that the kernel refused, or of closing the volume.
pub(crate) fn run(fresh: Fresh, service: Service<'_>, ready: impl FnOnce()) -> Result<SessionEnd, RunError> {
    let Fresh { mut fs, work } = fresh;
    let Service { channel, rings, cfg, metrics, abandon, over } = service;
    let places = Places::of(rings.len(), cfg);
    let (counters, upgrades, pacer) = (fs.counters.clone(), fs.upgrades.clone(), fs.pacer.clone());
    fs.connections = channel.connections().clone();
    let fs = Arc::new(fs);
    let slots: Arc<[Slot]> = (0..places.all()).map(|_| CachePadded::new(Mutex::new(Some(fs.clone())))).collect();
    drop(fs);
    channel.connections().serve_main(&channel, cfg, &slots);
    let closing = Closing::new(&channel, &slots, pacer.clone());
    let close = || closing.close(over);
    let crew = Crew {
        channel: &channel,
        cfg,
        metrics,
        abandon,
        slots: &slots,
        places,
        served: Served::new(places.serving),
        counters,
        upgrades,
        pacer,
        close: &close,
        gone: AtomicBool::new(false),
        work,
    };
    match thread::scope(|scope| crew.serve(scope, rings, ready))? {
        Some((fs, prepared)) => Ok(SessionEnd::Stopped(fs, prepared)),
        None => closing.result().map(|()| SessionEnd::Unmounted).map_err(RunError::Close),
    }
}

/// Why serving ended badly.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RunError {
    /// Threads or descriptors.
    #[error(transparent)]
    Start(#[from] io::Error),
    /// The kernel refused a ring; nothing was served. The connection is cut off.
    #[error("the kernel refused io_uring: {why}")]
    Rings {
        /// What it said.
        why: io::Error,
        /// As it was.
        vol: Arc<Volume>,
    },
    /// Closing the volume failed, after all was served.
    #[error(transparent)]
    Close(braidfs::Error),
}

/// Runs work on a thread of its own, wherever the process may run: who starts it may be bound to a CPU.
pub(crate) fn run_aside(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<thread::JoinHandle<()>> {
    thread::Builder::new().name(name.into()).spawn(move || {
        let all = sched_getaffinity(Some(rustix::process::getpid()));
        if let Err(e) = all.and_then(|all| sched_setaffinity(None, &all)) {
            tracing::debug!(error = %e, "a thread stays on the CPU of who started it");
        }
        work();
    })
}

/// Serves a further connection of a file system that is served, by threads of its own, until it ends. `ready` is called when
/// they have begun, `ended` by each of them when it sees the end.
///
/// # Errors
/// Of starting them; `abandon` has ended the connection then.
pub(crate) fn serve_also(
    fs: Arc<BraidFs>,
    channel: &Arc<Channel>,
    threads: usize,
    abandon: impl Fn(),
    ready: impl FnOnce(),
    ended: impl Fn() + Sync,
) -> io::Result<()> {
    let (counters, connections) = (fs.counters.clone(), fs.connections.clone());
    let slots: Arc<[Slot]> = (0..threads).map(|_| CachePadded::new(Mutex::new(Some(fs.clone())))).collect();
    drop(fs);
    connections.serve_also(&slots);
    let (served, stop, gone) = (Served::new(threads), Stop::new(threads), AtomicBool::new(false));
    let close = || {};
    thread::scope(|scope| {
        let start = || -> io::Result<()> {
            for i in 0..threads {
                let channel = if i == 0 { channel.clone() } else { Arc::new(channel.try_clone()?) };
                let server = Server {
                    i,
                    slot: &slots[i],
                    channel,
                    served: &served,
                    counts: counters.line(),
                    lend: None,
                    close: &close,
                    gone: &gone,
                };
                let (stop, ended) = (&stop, &ended);
                let serve = move || {
                    server.at_device(stop);
                    ended();
                };
                spawn_thread(scope, format!("fuse-tenant-{i}"), serve)?;
            }
            Ok(())
        };
        match start() {
            Ok(()) => {
                ready();
                Ok(())
            }
            // threads that did start sleep until the connection ends
            Err(e) => {
                abandon();
                Err(e)
            }
        }
    })
}

/// Whether nothing is under way any more.
enum Quiesced {
    Yes,
    /// The connection has ended.
    Gone,
    No(String),
}

/// Waits for the end of all that is under way, while no thread serves: what the helpers have to do, what is answered from
/// elsewhere. Each of them has the descriptor that its request came by: `let_go` says whether nobody else has one any more. They
/// may wait for the kernel, which waits for answers: so in turn with waiting `last` serves what comes.
fn quiesce(last: &Server<'_>, let_go: impl Fn() -> bool) -> Quiesced {
    let end = Instant::now() + QUIESCE_WITHIN;
    let (mut buf, mut out) = (vec![0; RECEIVE_BYTES], Answer::of_pages(MAX_IO_BYTES as usize));
    // Nobody waits for a rate meanwhile, which could take longer than all of this.
    let pacer = match &*last.slot.lock() {
        Some(fs) => fs.pacer.clone(),
        None => return Quiesced::Gone,
    };
    let _hurry = pacer.hurry();
    loop {
        let jobs = match &*last.slot.lock() {
            // also what has come since it was asked for
            Some(fs) => match fs.cannot_hand_over() {
                Some(why) => return Quiesced::No(why),
                None => fs.jobs.clone(),
            },
            None => return Quiesced::Gone,
        };
        let asides = || match &*last.slot.lock() {
            Some(fs) => fs.asides.lock().iter().all(thread::JoinHandle::is_finished),
            None => false,
        };
        let quiet = || let_go() && asides();
        let pause = Instant::now() + PAUSE;
        while !quiet() && Instant::now() < pause {
            thread::sleep(Duration::from_micros(200));
        }
        if quiet() {
            // nobody is left who hands the helpers anything but they themselves
            while !jobs.is_quiet() && Instant::now() < pause + PAUSE {
                thread::sleep(Duration::from_micros(200));
            }
            if jobs.is_quiet() && quiet() {
                return Quiesced::Yes;
            }
        }
        if Instant::now() > end {
            return Quiesced::No(format!("requests did not end within {} s", QUIESCE_WITHIN.as_secs()));
        }
        drop(jobs);
        if last.serve_for(TURN, &mut buf, &mut out).is_err() {
            return Quiesced::Gone;
        }
    }
}

/// Serves requests of tenants when their turn has come.
fn serve_paced(slot: &Slot, pacer: &Pacer) {
    let mut out = Answer::of_pages(MAX_IO_BYTES as usize);
    pacer.run(|turned| {
        // Dropped where the volume is closed, it answers EIO.
        if let Some(fs) = &*slot.lock() {
            fs.serve_turned(turned, &mut out);
        }
    });
}

/// Takes the file system out of all slots, waiting for the operations under way. `None`: somebody else has it, too.
fn empty(slots: &[Slot]) -> Option<BraidFs> {
    let mut last = None;
    for slot in slots {
        last = slot.lock().take();
    }
    let last = last?;
    // Who mounts a tenant has it for a moment longer, and sees that the volume is going.
    let end = Instant::now() + QUIESCE_WITHIN;
    while Arc::strong_count(&last) > 1 && Instant::now() < end {
        thread::sleep(Duration::from_millis(1));
    }
    Arc::into_inner(last)
}

/// [`empty`]; closes the volume.
fn close_volume(slots: &[Slot]) -> braidfs::Result<()> {
    match empty(slots) {
        Some(fs) => close(fs.into_volume()),
        // Only the thread that empties the slots holds references outside them.
        None => Err(braidfs::Error::Busy("the file system is still in use".into())),
    }
}

/// Unmounts the volume; where the caller of `serve` shares it, makes all durable and leaves the rest to them.
pub(crate) fn close(vol: Arc<Volume>) -> braidfs::Result<()> {
    match Arc::try_unwrap(vol) {
        Ok(vol) => vol.unmount(),
        Err(shared) => {
            shared.sync()?;
            // Who was making it durable just now is done with that, too, and lets it go.
            let end = Instant::now() + LET_GO;
            while Arc::strong_count(&shared) > 1 && Instant::now() < end {
                thread::sleep(Duration::from_millis(1));
            }
            Arc::try_unwrap(shared).map_or(Ok(()), Volume::unmount)
        }
    }
}
