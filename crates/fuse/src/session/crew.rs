//! The threads of a session: who they are, how they begin, and what they are told at its end.

use super::server::Server;
use super::{Quiesced, RunError, Slot, at_device_threads, close_volume, empty, quiesce, serve_paced};
use crate::channel::Channel;
use crate::counters::Counters;
use crate::fs::BraidFs;
use crate::helpers::{self, Jobs, Work};
use crate::latency::{self, Served};
use crate::mount::MountConfig;
use crate::pace::{self, Pacer};
use crate::transport::{Loan, Ring, RingPlace};
use crate::upgrade::Upgrades;
use crate::upgrade::old::Prepared;
use crate::watch::listen::Listener;
use crate::watch::openmetrics;
use braidfs_sync::{Mutex, rank};
use rustix::pipe::{PipeFlags, pipe_with};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::{self, Scope, ScopedJoinHandle};

/// Threads that serve what is large, where rings carry the requests, are at most so many.
const LARGE_THREADS: usize = 8;

/// Which slot is whose.
#[derive(Debug, Clone, Copy)]
pub(super) struct Places {
    /// Serving threads; with rings one more than these, which reads what stays at the device.
    pub serving: usize,
    /// Those that rings lend large requests to.
    large: usize,
}

impl Places {
    /// Of a session with so many rings, of none where its threads are at the device.
    pub fn of(rings: usize, cfg: &MountConfig) -> Self {
        Self {
            serving: if rings == 0 { at_device_threads(cfg) } else { rings + 1 },
            // By one CPU alone nothing is gained.
            large: if rings > 1 { rings.min(LARGE_THREADS) } else { 0 },
        }
    }

    fn helpers(self) -> Range<usize> {
        self.serving..self.serving + helpers::MOST
    }

    fn large(self) -> impl Iterator<Item = usize> {
        (0..self.large).map(move |i| self.helpers().end + i)
    }

    fn metrics(self) -> usize {
        self.helpers().end + self.large
    }

    /// Of threads for what was parked.
    fn paced(self) -> impl Iterator<Item = usize> {
        (0..pace::THREADS).map(move |i| self.metrics() + 1 + i)
    }

    /// How many there are.
    pub fn all(self) -> usize {
        self.metrics() + 1 + pace::THREADS
    }
}

/// Closes the volume of a session, once, whoever comes first.
pub(super) struct Closing<'a> {
    channel: &'a Channel,
    slots: &'a [Slot],
    pacer: Arc<Pacer>,
    done: Mutex<Option<braidfs::Result<()>>, rank::Closing>,
}

impl<'a> Closing<'a> {
    pub fn new(channel: &'a Channel, slots: &'a [Slot], pacer: Arc<Pacer>) -> Self {
        Self { channel, slots, pacer, done: Mutex::new(None) }
    }

    /// `over` is called before.
    pub fn close(&self, over: &dyn Fn()) {
        let mut done = self.done.lock();
        if done.is_none() {
            over();
            self.channel.connections().end();
            // Not before: what users of tenants asked for last waits its turn. Of the volume's own mount nobody waits any more.
            self.pacer.end();
            *done = Some(close_volume(self.slots));
        }
    }

    /// How that went; well where nobody did it.
    pub fn result(self) -> braidfs::Result<()> {
        self.done.into_inner().unwrap_or(Ok(()))
    }
}

/// A file system that another program takes over, and that program.
pub(super) type Stopped = (Box<BraidFs>, Box<Prepared>);

/// Why threads do not serve.
enum Refused {
    /// Threads or descriptors.
    Start(io::Error),
    /// Rings, before anything was served.
    Rings(io::Error),
}

impl From<io::Error> for Refused {
    fn from(e: io::Error) -> Self {
        Self::Start(e)
    }
}

/// What the threads of a session have in common.
pub(super) struct Crew<'a> {
    pub channel: &'a Arc<Channel>,
    pub cfg: &'a MountConfig,
    pub metrics: Option<&'a Listener>,
    /// Ends the connection by force.
    pub abandon: &'a (dyn Fn() + Sync),
    pub slots: &'a [Slot],
    pub places: Places,
    pub served: Served,
    pub counters: Arc<Counters>,
    pub upgrades: Arc<Upgrades>,
    pub pacer: Arc<Pacer>,
    /// Closes the volume.
    pub close: &'a (dyn Fn() + Sync),
    /// The connection has ended, or nobody can serve it.
    pub gone: AtomicBool,
    /// For the helper threads.
    pub work: Work,
}

/// Threads that serve. Of those at the device also what each has of the connection, and how many others have that.
#[derive(Default)]
struct Serving<'s> {
    threads: Vec<ScopedJoinHandle<'s, ()>>,
    channels: Vec<Arc<Channel>>,
    others: Vec<usize>,
}

impl Serving<'_> {
    /// Panics of handlers are caught; whatever else a thread died of, the volume must be closed.
    fn join(&mut self) {
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }

    /// Whether nobody has the connection besides those who had it when the threads began, and these two.
    fn only_have(&self, one: Option<&Arc<Channel>>, other: Option<&Arc<Channel>>) -> bool {
        self.channels.iter().zip(&self.others).all(|(channel, others)| {
            let also = [one, other].into_iter().flatten().filter(|a| Arc::ptr_eq(a, channel)).count();
            Arc::strong_count(channel) == others + also
        })
    }
}

impl Crew<'_> {
    /// Serves until it is unmounted, or another program is to take over (then that), and closes the volume in the first case.
    /// `ready` is called when the mount can be used.
    ///
    /// # Errors
    /// Of starting threads; of rings that the kernel refused, with the volume as it was.
    pub fn serve<'s>(
        &'s self,
        scope: &'s Scope<'s, '_>,
        rings: Vec<RingPlace>,
        ready: impl FnOnce(),
    ) -> Result<Option<Stopped>, RunError> {
        let mut serving = Serving::default();
        // Dropped when all is over: so the threads of the latency and of metrics know.
        let (awake, end) = mpsc::channel();
        let mut metrics_go_on = None;
        let start = || -> Result<(), Refused> {
            let at_device = rings.is_empty();
            self.start_serving(scope, rings, &mut serving)?;
            // not before it is counted who has the connection
            self.work.start(scope, &self.slots[self.places.helpers()], self.cfg.slow.is_some())?;
            metrics_go_on = self.start_metrics(scope)?;
            self.start_paced(scope)?;
            let watch = move || latency::watch(self.cfg.latency, at_device, &self.served, &end);
            spawn_thread(scope, "fuse-latency".into(), watch)?;
            Ok(())
        };
        let started = start();
        match &started {
            Ok(()) => ready(),
            // Threads that did start sleep until the connection ends.
            Err(_) => (self.abandon)(),
        }
        let stopped = self.stay(scope, &mut serving, started.is_ok());
        drop(awake);
        // The helpers end when the file system is gone.
        let ended = match started {
            Ok(()) if stopped.is_some() => Ok(stopped),
            Ok(()) => {
                (self.close)();
                Ok(None)
            }
            Err(Refused::Rings(why)) => match empty(self.slots).map(BraidFs::into_volume) {
                Some(vol) => Err(RunError::Rings { why, vol }),
                None => Err(RunError::Start(why)),
            },
            Err(Refused::Start(e)) => {
                (self.close)();
                Err(RunError::Start(e))
            }
        };
        // its threads end, also where the volume is not closed here: nothing is put aside then
        self.pacer.end();
        drop(metrics_go_on);
        ended
    }

    /// Until the serving threads have ended for good. Where another program takes over, the file system is what was served,
    /// and nobody else has it.
    fn stay<'s>(&'s self, scope: &'s Scope<'s, '_>, serving: &mut Serving<'s>, started: bool) -> Option<Stopped> {
        loop {
            serving.join();
            // dropped where the mount has ended: the new process, too
            let stopped = self.upgrades.all_stopped();
            let prepared = stopped.filter(|_| started && !self.gone.load(Ordering::SeqCst))?;
            let last = self.server(0, serving.channels[0].clone());
            // a tenant's mount that has ended may still be made durable
            let quiet =
                || !self.channel.connections().any() && serving.only_have(Some(&last.channel), prepared.channel());
            match quiesce(&last, quiet) {
                Quiesced::Yes => {
                    let Some(mut fs) = empty(self.slots) else {
                        prepared.refuse("the file system is still in use");
                        (self.abandon)();
                        return None;
                    };
                    // the helpers end
                    fs.jobs = Jobs::to_nobody();
                    return Some((Box::new(fs), Box::new(prepared)));
                }
                Quiesced::Gone => return None,
                Quiesced::No(why) => prepared.refuse(&why),
            }
            self.upgrades.go_on();
            if let Err(e) = self.start_at_device(scope, serving) {
                tracing::error!(error = %e, "no thread serves the mount: it ends");
                (self.abandon)();
            }
        }
    }

    fn server(&self, i: usize, channel: Arc<Channel>) -> Server<'_> {
        Server {
            i,
            slot: &self.slots[i],
            channel,
            served: &self.served,
            counts: self.counters.line(),
            lend: None,
            close: self.close,
            gone: &self.gone,
        }
    }

    /// Starts who receives requests: a thread for each ring, or those at the device.
    fn start_serving<'s>(
        &'s self,
        scope: &'s Scope<'s, '_>,
        rings: Vec<RingPlace>,
        serving: &mut Serving<'s>,
    ) -> Result<(), Refused> {
        if !rings.is_empty() {
            return self.start_at_rings(scope, rings, serving);
        }
        serving.channels.push(self.channel.clone());
        for _ in 1..self.places.serving {
            serving.channels.push(Arc::new(self.channel.try_clone()?));
        }
        serving.others = serving.channels.iter().map(Arc::strong_count).collect();
        Ok(self.start_at_device(scope, serving)?)
    }

    fn start_at_device<'s>(&'s self, scope: &'s Scope<'s, '_>, serving: &mut Serving<'s>) -> io::Result<()> {
        for (i, channel) in serving.channels.iter().enumerate() {
            let server = self.server(i, channel.clone());
            let serve = move || server.at_device(&self.upgrades.stop);
            serving.threads.push(spawn_thread(scope, format!("fuse-{i}"), serve)?);
        }
        Ok(())
    }

    /// Starts who serves what rings carry, what they lend, and what does not come through them.
    fn start_at_rings<'s>(
        &'s self,
        scope: &'s Scope<'s, '_>,
        rings: Vec<RingPlace>,
        serving: &mut Serving<'s>,
    ) -> Result<(), Refused> {
        let (lend, lent) = crossbeam::channel::unbounded::<Loan>();
        for (i, place) in self.places.large().enumerate() {
            let (server, lent) = (self.server(place, self.channel.clone()), lent.clone());
            spawn_thread(scope, format!("fuse-large-{i}"), move || server.serve_large(&lent))?;
        }
        let with_server = rings.into_iter().enumerate().map(|(i, place)| {
            let lend = (self.places.large > 0).then(|| lend.clone());
            (place, Server { lend, ..self.server(i, self.channel.clone()) })
        });
        start_rings(scope, with_server, &mut serving.threads, self.abandon)?;
        let server = self.server(self.places.serving - 1, self.channel.clone());
        serving.threads.push(spawn_thread(scope, "fuse-forgets".into(), move || server.read_forgets())?);
        Ok(())
    }

    /// Answers who wants metrics, as long as what is returned lives.
    fn start_metrics<'s>(&'s self, scope: &'s Scope<'s, '_>) -> Result<Option<OwnedFd>, Refused> {
        let Some(listener) = self.metrics else { return Ok(None) };
        let (end, go_on) = pipe_with(PipeFlags::CLOEXEC).map_err(io::Error::from)?;
        let slot = &self.slots[self.places.metrics()];
        let text = move || slot.lock().as_ref().map(|fs| openmetrics::text(&fs.sample(false)));
        spawn_thread(scope, "fuse-metrics".into(), move || listener.serve(&end, text))?;
        Ok(Some(go_on))
    }

    /// Starts who serves what was parked.
    fn start_paced<'s>(&'s self, scope: &'s Scope<'s, '_>) -> io::Result<()> {
        for (i, place) in self.places.paced().enumerate() {
            spawn_thread(scope, format!("fuse-paced-{i}"), move || serve_paced(&self.slots[place], &self.pacer))?;
        }
        Ok(())
    }
}

/// Starts a thread of a session, which the session waits for.
pub(crate) fn spawn_thread<'s>(
    scope: &'s Scope<'s, '_>,
    name: String,
    work: impl FnOnce() + Send + 's,
) -> io::Result<ScopedJoinHandle<'s, ()>> {
    thread::Builder::new().name(name).spawn_scoped(scope, work)
}

/// Starts a thread for each ring; they serve when the kernel has taken all of them.
fn start_rings<'s>(
    scope: &'s Scope<'s, '_>,
    rings: impl Iterator<Item = (RingPlace, Server<'s>)>,
    serving: &mut Vec<ScopedJoinHandle<'s, ()>>,
    abandon: &'s (dyn Fn() + Sync),
) -> Result<(), Refused> {
    let (report, reports) = mpsc::channel();
    let mut waiting = Vec::new();
    for (place, server) in rings {
        let (go, may_go) = mpsc::channel::<()>();
        let report = report.clone();
        let name = format!("fuse-cpu-{}", place.cpu);
        let work = move || {
            let (ring, told) = match Ring::start(place, server.channel.as_fd()) {
                Ok(ring) => (Some(ring), Ok(())),
                Err(e) => (None, Err(e)),
            };
            let _ = report.send(told);
            drop(report);
            // Not told to go: another ring was refused.
            if let Some(mut ring) = ring
                && may_go.recv().is_ok()
                && let Err(e) = server.at_ring(&mut ring)
            {
                // Its CPUs would wait for ever.
                tracing::error!(error = %e, "a ring broke: the mount ends");
                abandon();
            }
        };
        serving.push(spawn_thread(scope, name, work)?);
        waiting.push(go);
    }
    drop(report);
    reports.iter().collect::<io::Result<Vec<()>>>().map_err(Refused::Rings)?;
    for go in waiting {
        // A thread that is gone by now has said so.
        let _ = go.send(());
    }
    Ok(())
}
