//! What a request costs besides its work: waking each other up.
//!
//! A process that waits for a request and the thread that serves it wake each other. The scheduler puts whoever is
//! woken on a CPU that has nothing to do; that CPU is halted, and waking it takes 1 to 10 µs on a bare machine (more
//! where deep sleep states are allowed), 15 to 45 µs in a virtual one, where each interrupt between CPUs goes through
//! the hypervisor: twice per request, whose work takes 2 to 5 µs. Two remedies, both only while requests come in quick
//! succession; a thread looks every [`TICK`]:
//! - [`follow`]: where they all come from one thread, serve it on its own CPU;
//! - [`awake`]: keep idle CPUs from halting. It costs power, so only where the user asked for it.

mod awake;
mod follow;

use crate::abi::{ReadIn, op};
use crate::request::Request;
use crossbeam::utils::CachePadded;
use follow::{Follow, Load};
use rustix::thread::Pid;
use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

/// How often requests are counted while they come.
const TICK: Duration = Duration::from_millis(4);
/// And while none came for a while.
const IDLE_TICK: Duration = Duration::from_millis(200);
/// Idle ticks until the longer ones.
const IDLE_TICKS: u32 = 50;
/// Bytes of a request that is rather a stream's: better served beside its process than in turn with it.
const LARGE_BYTES: u32 = 32 << 10;

/// What is done about wake-ups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Latency {
    /// A process that alone sends many requests is served on its own CPU (as root; else nothing).
    #[default]
    Auto,
    /// Also, idle CPUs do not halt while requests come (root only): fastest, for more power.
    Low,
    /// Nothing: threads run where the scheduler puts them.
    Off,
}

/// What one serving thread tells of its requests. Only it writes this line.
#[derive(Debug, Default)]
struct Line {
    requests: AtomicU64,
    large: AtomicU64,
    /// Thread that the last request came from, and how often that changed.
    client: AtomicU32,
    changes: AtomicU64,
    /// The serving thread's own id; 0 until it runs, and when it has ended.
    tid: AtomicU32,
}

/// A thread that serves: its number may be another thread's, of another process, when it has ended.
pub(crate) struct Serving<'a>(&'a Line);

impl Drop for Serving<'_> {
    fn drop(&mut self) {
        self.0.tid.store(0, Ordering::Relaxed);
    }
}

/// Requests of each serving thread.
pub(crate) struct Served(Box<[CachePadded<Line>]>);

impl Served {
    /// For so many threads.
    pub fn new(threads: usize) -> Self {
        Self((0..threads).map(|_| CachePadded::default()).collect())
    }

    /// The calling thread is serving thread `i`, until the value that it is given is dropped.
    #[must_use]
    pub fn begin(&self, i: usize) -> Serving<'_> {
        self.0[i].tid.store(rustix::thread::gettid().as_raw_nonzero().get() as u32, Ordering::Relaxed);
        Serving(&self.0[i])
    }

    /// Serving thread `i` received a request.
    pub fn count(&self, i: usize, req: &Request<'_>) {
        // No locked instruction is needed where one thread writes.
        let rise = |n: &AtomicU64| n.store(n.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        let line = &self.0[i];
        rise(&line.requests);
        let bytes = match req.head.opcode {
            op::READ => req.arg::<ReadIn>().map_or(0, |arg| arg.size),
            _ => req.head.len,
        };
        if bytes >= LARGE_BYTES {
            rise(&line.large);
        }
        // 0: the kernel itself, or a process of another PID namespace.
        let client = req.head.pid;
        if client != 0 && client != line.client.load(Ordering::Relaxed) {
            line.client.store(client, Ordering::Relaxed);
            rise(&line.changes);
        }
    }

    /// Sums since the mount began; the client of the thread that served most is as good as any.
    fn total(&self) -> Load {
        let mut sum = Load::default();
        let mut clients = self.0.iter().map(|l| l.client.load(Ordering::Relaxed)).filter(|&c| c != 0);
        sum.client = clients.next().unwrap_or(0);
        // Threads that served nobody for long remember another one; then their next request counts as a change.
        sum.same_client = clients.all(|c| c == sum.client);
        for line in &self.0 {
            sum.requests = sum.requests.wrapping_add(line.requests.load(Ordering::Relaxed));
            sum.large = sum.large.wrapping_add(line.large.load(Ordering::Relaxed));
            sum.changes = sum.changes.wrapping_add(line.changes.load(Ordering::Relaxed));
        }
        sum
    }

    /// Ids of the serving threads.
    fn threads(&self) -> impl Iterator<Item = Pid> {
        self.0.iter().filter_map(|l| Pid::from_raw(l.tid.load(Ordering::Relaxed) as i32))
    }
}

/// Whether the wish can be fulfilled here.
///
/// # Errors
/// [`Latency::Low`] without root, or on a kernel without PM QoS.
pub(crate) fn check(wish: Latency) -> io::Result<()> {
    if wish == Latency::Low { awake::check() } else { Ok(()) }
}

/// Looks after it until the other end of `end` is gone. Returns at once where nothing can be done.
pub(crate) fn watch(wish: Latency, served: &Served, end: &Receiver<()>) {
    let mut follow = Follow::new();
    if wish == Latency::Off || (wish == Latency::Auto && follow.is_none()) {
        return;
    }
    let mut awake = (wish == Latency::Low).then(awake::Awake::default);
    let (mut before, mut idle) = (served.total(), 0);
    while end.recv_timeout(if idle < IDLE_TICKS { TICK } else { IDLE_TICK }) == Err(RecvTimeoutError::Timeout) {
        let now = served.total();
        let load = now.since(&before);
        before = now;
        idle = if load.requests == 0 { idle + 1 } else { 0 };
        if let Some(awake) = &mut awake {
            awake.tick(load.requests);
        }
        if let Some(follow) = &mut follow {
            follow.tick(&load, served);
        }
    }
    if let Some(follow) = &mut follow {
        follow.leave(served);
    }
}
