//! The serving threads: receive, handle, reply, until the file system is unmounted; then close the volume.
//!
//! Each thread has its own descriptor of the connection, or its own ring ([`crate::transport`]), and its own reference to
//! the [`BraidFs`], in a slot that only it locks: requests write nothing shared here. The slots are what makes an orderly
//! end possible while other threads sleep in `read`: on DESTROY (sent by `umount` of a `fuseblk` mount, which waits for
//! the reply) one thread empties them all, closes the volume and only then replies. A plain `fuse` mount sends no DESTROY;
//! the threads see that the connection is gone, and the volume is closed when all have left.
//!
//! For an upgrade ([`crate::upgrade`]) the threads at the device stop while the connection goes on, and what is under way ends
//! ([`settle`]); the file system is given back then, or served again.
//!
//! With rings no request is served before the kernel has taken all of them: a session whose rings are refused ends
//! without having touched the volume.

mod crew;

use crate::abi::{self, op};
use crate::channel::{Channel, Received};
use crate::counters::{Counters, Line};
use crate::dirty::DirtyLimit;
use crate::fs::{BraidFs, Context, Job, MAX_IO_BYTES, Negotiated, negotiate};
use crate::latency::Served;
use crate::mount::MountConfig;
use crate::pace::Pacer;
use crate::profile::Profile;
use crate::request::{Answer, Outcome, Request};
use crate::slow::Asked;
use crate::transport::{Forgets, Later, Loan, Reply, Ring, Ticket};
use crate::upgrade::old::Prepared;
use crate::upgrade::record::Front;
use crate::upgrade::stop::Stop;
use crate::upgrade::{Upgrades, old};
use crate::watch::listen::Listener;
use braidfs::{Spending, Volume};
use braidfs_sync::{Mutex, phases, rank};
use crew::{Closing, Crew, Places, spawn_thread};
use crossbeam::utils::CachePadded;
use rustix::io::Errno;
use rustix::thread::{sched_getaffinity, sched_setaffinity};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

/// A request and its header; the kernel wants room for 4 KiB besides the largest WRITE.
const RECEIVE_BYTES: usize = MAX_IO_BYTES as usize + 4096;

/// How long what is under way has to end before an upgrade; how long nothing is received meanwhile, and then something is.
const QUIESCE_WITHIN: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(20);
const TURN: Duration = Duration::from_millis(50);

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
    work: mpsc::Receiver<Job>,
}

impl Fresh {
    fn of(vol: Arc<Volume>, negotiated: Negotiated, cfg: &MountConfig) -> Self {
        let (jobs, work) = mpsc::channel();
        let mut fs = BraidFs::new(vol, negotiated, jobs);
        fs.profile = cfg.profile;
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

    /// For one that was served before, by this process or another one; `counters` go on.
    ///
    /// # Errors
    /// Open files that are not there.
    pub fn again(
        vol: Arc<Volume>,
        negotiated: Negotiated,
        cfg: &MountConfig,
        dirty: Option<DirtyLimit>,
        front: Front,
        counters: Option<Arc<Counters>>,
    ) -> Result<Self, String> {
        let mut fresh = Self::of(vol, negotiated, cfg);
        fresh.fs.dirty = dirty;
        fresh.raise_threshold();
        fresh.fs.counters = counters.unwrap_or_else(|| Arc::new(Counters::new(cfg.slow)));
        old::restore(&mut fresh.fs, front)?;
        Ok(fresh)
    }

    /// As soon as it is served the kernel writes back what it took of owners with limits, of which nothing is known.
    pub fn write_back_limited(&self, channel: &Arc<Channel>) {
        if self.fs.vol.any_quotas() {
            let channel = Arc::clone(channel);
            // `self` has the other end
            let _ = self.fs.jobs.send(Box::new(move |fs: &BraidFs| fs.quotas_changed(&channel)));
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
    pub rings: Vec<Ring>,
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
    let closing = Closing::new(&channel, &slots);
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
    };
    match thread::scope(|scope| crew.serve(scope, rings, work, ready))? {
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

/// One serving thread.
struct Server<'a> {
    i: usize,
    slot: &'a Slot,
    channel: Arc<Channel>,
    served: &'a Served,
    counts: Arc<CachePadded<Line>>,
    /// Who serves large requests of a ring.
    lend: Option<crossbeam::channel::Sender<Loan>>,
    close: &'a (dyn Fn() + Sync),
    /// The connection has ended, or nobody can serve it.
    gone: &'a AtomicBool,
}

impl Server<'_> {
    /// Serves from the device, until the connection is gone, or it is to stop.
    fn at_device(&self, stop: &Stop) {
        let _serving = self.served.begin(self.i);
        let stoppable = stop.thread(self.i);
        let mut buf = vec![0; RECEIVE_BYTES];
        let mut out = Answer::of_pages(MAX_IO_BYTES as usize);
        while let Some(received) = stoppable.receive(|| self.channel.try_receive(&mut buf)) {
            if self.take(received, &buf, &mut out).is_err() {
                return;
            }
        }
    }

    /// Serves what was received; whether that was something.
    ///
    /// # Errors
    /// Nothing more will come.
    fn take(&self, received: io::Result<Received>, buf: &[u8], out: &mut Answer) -> Result<bool, ()> {
        match received {
            // interrupted, or a request that was
            Ok(Received::Bytes(0) | Received::Nothing) => return Ok(false),
            Ok(Received::Bytes(n)) if self.serve_frame(&buf[..n], out) => return Ok(true),
            Ok(Received::Bytes(_) | Received::Gone) => {}
            Err(e) => tracing::error!(error = %e, "cannot receive from the FUSE device"),
        }
        self.gone.store(true, Ordering::SeqCst);
        Err(())
    }

    /// Serves what comes within `turn`, where no other thread does.
    fn serve_for(&self, turn: Duration, buf: &mut [u8], out: &mut Answer) -> Result<(), ()> {
        let end = Instant::now() + turn;
        let begun = self.channel.set_blocking(false);
        let served = (|| {
            while begun.is_ok() && Instant::now() < end {
                let received = self.channel.try_receive(buf);
                if !self.take(received, buf, out)? {
                    self.channel.await_request(Duration::from_millis(1));
                }
            }
            Ok(())
        })();
        match begun.and_then(|()| self.channel.set_blocking(true)) {
            Ok(()) => served,
            Err(e) => self.take(Err(e), buf, out).map(drop),
        }
    }

    /// Serves from a ring, until the connection is gone.
    fn at_ring(&self, ring: &mut Ring) -> io::Result<()> {
        let _serving = self.served.begin(self.i);
        let lend = |loan: Loan| {
            if let Ok(req) = loan.request() {
                self.served.count(self.i, &req);
            }
            if let Some(others) = &self.lend {
                // Where nobody takes it, it is dropped, and answers EIO.
                let _ = others.send(loan);
            }
        };
        let lend = self.lend.as_ref().map(|_| &lend as &dyn Fn(Loan));
        ring.run(|req, out, ticket| self.dispatch(req, out, Some(ticket), &mut None), lend)
    }

    /// Serves what rings have lent, until they are gone.
    fn serve_large(&self, lent: &crossbeam::channel::Receiver<Loan>) {
        let mut scratch = Answer::new(4096);
        for loan in lent {
            let received = loan.received();
            loan.serve(&mut scratch, |req, out, ticket| self.handle(req, out, Some(ticket), Some(received), &mut None));
        }
    }

    /// Serves what does not come through rings.
    fn read_forgets(&self) {
        let forgets = Forgets::new(self.channel.clone(), RECEIVE_BYTES, self.counts.clone()).map(Arc::new);
        let read = forgets.and_then(|forgets| {
            if let Some(fs) = &*self.slot.lock() {
                // Set once: there is one such thread.
                let _ = fs.forgets.set(forgets.clone());
            }
            forgets.watch(|| match &*self.slot.lock() {
                Some(fs) => fs.take_forgets(&forgets),
                None => Ok(None),
            })
        });
        if let Err(e) = read {
            tracing::error!(error = %e, "cannot receive from the FUSE device");
        }
    }

    /// Handles one frame of the device; false after DESTROY.
    fn serve_frame(&self, frame: &[u8], out: &mut Answer) -> bool {
        let mut req = match Request::parse(frame) {
            Ok(req) => req,
            Err(_) => {
                tracing::error!(bytes = frame.len(), "the kernel sent a FUSE request that does not parse");
                return true;
            }
        };
        out.clear();
        req.head.nodeid = self.channel.node(req.node()).0;
        let (opcode, unique) = (req.head.opcode, req.head.unique);
        // until it is answered
        let mut spending = None;
        match self.dispatch(&req, out, None, &mut spending) {
            Reply::Body if self.channel.reply(unique, out) => {}
            Reply::Body => {
                if let Some(fs) = &*self.slot.lock() {
                    fs.refused(self.channel.own(), opcode, out.body());
                }
            }
            Reply::Empty => self.channel.reply_empty(unique),
            Reply::Error(e) => self.channel.reply_error(unique, e),
            Reply::Deferred | Reply::Silent => {}
        }
        opcode != op::DESTROY
    }

    /// Handles a request of either transport, at the cost of its tenant for as long as `spending` lives.
    fn dispatch(
        &self,
        req: &Request<'_>,
        out: &mut Answer,
        ticket: Option<&Ticket>,
        spending: &mut Option<Spending>,
    ) -> Reply {
        self.served.count(self.i, req);
        if req.head.opcode == op::DESTROY {
            // answered when it is done, also where that panics
            let later = ticket.is_none().then(|| Later::new(&self.channel, req.head.unique, None));
            (self.close)();
            if let Some(later) = later {
                later.done(Ok(()));
                return Reply::Deferred;
            }
            return Reply::Empty;
        }
        self.handle(req, out, ticket, None, spending)
    }

    /// Handles a request that the volume is still there for. `received`: when another thread got it.
    fn handle(
        &self,
        req: &Request<'_>,
        out: &mut Answer,
        ticket: Option<&Ticket>,
        received: Option<Instant>,
        spending: &mut Option<Spending>,
    ) -> Reply {
        let (channel, unique, opcode) = (&self.channel, req.head.unique, req.head.opcode);
        let slot = self.slot.lock();
        *spending = slot.as_ref().and_then(|fs| fs.spend(req.node()));
        let mut begun = self.counts.begin_waited(opcode, received);
        self.counts.about(&mut begun, received, |at| {
            let bytes = match opcode {
                // of both the size lies at the same place
                op::READ | op::WRITE => req.arg::<abi::ReadIn>().ok().map(|r| r.size),
                _ => None,
            };
            Asked { opcode, node: req.head.nodeid, thread: req.head.pid, bytes, at }
        });
        let domain = || slot.as_ref().and_then(|fs| fs.vol.domain_of(req.node().ino()).ok());
        self.counts.of(&mut begun, req.head.pid, domain);
        let span = tracing::trace_span!("request", op = op::name(opcode), node = %req.node(), thread = req.head.pid);
        let _span = span.entered();
        let handled = match &*slot {
            // A panic is our bug; the request that ran into it fails, the mount lives on.
            Some(fs) => {
                let cx = Context::new(channel, unique, ticket).counted(Some(begun.counted(&self.counts)));
                catch_unwind(AssertUnwindSafe(|| fs.serve(req, out, &cx))).unwrap_or_else(|_| {
                    tracing::error!(op = op::name(opcode), node = %req.node(), "panic in a FUSE operation");
                    Err(Errno::IO)
                })
            }
            None if matches!(opcode, op::FORGET | op::BATCH_FORGET) => Ok(Outcome::Silent),
            None => Err(Errno::NODEV),
        };
        self.counts.end(&begun, &handled, req.head.pid);
        match handled {
            Ok(Outcome::Reply) => Reply::Body,
            Ok(Outcome::Deferred) => Reply::Deferred,
            Ok(Outcome::Silent) => Reply::Silent,
            Err(e) => {
                tracing::trace!(op = op::name(opcode), node = %req.node(), error = %e);
                Reply::Error(e)
            }
        }
    }
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

/// The helper thread: work during which serving threads must go on serving. `slow`: the log is told where its time goes.
fn help(slot: &Slot, work: mpsc::Receiver<Job>, slow: bool) {
    // Ends when the file system, which holds the sender, is gone.
    for job in work {
        if slow {
            phases::watch();
        }
        if let Some(fs) = &*slot.lock() {
            // A job that panics drops its duty to reply, which answers EIO.
            let _ = catch_unwind(AssertUnwindSafe(|| job(fs)));
        }
    }
}

/// Whether nothing is under way any more.
enum Quiesced {
    Yes,
    /// The connection has ended.
    Gone,
    No(String),
}

/// Waits for the end of all that is under way, while no thread serves: what the helper has to do, what is answered from
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
            // What was handed to the helper before is done when this is; it hands itself only what has a descriptor.
            let (done, told) = mpsc::channel();
            let barrier = Box::new(move |_: &BraidFs| {
                let _ = done.send(());
            });
            let sent = jobs.send(barrier).is_ok();
            if sent && told.recv_timeout(PAUSE).is_ok() && quiet() {
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
        Err(shared) => shared.sync(),
    }
}
