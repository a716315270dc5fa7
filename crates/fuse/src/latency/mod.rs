//! What a request costs besides its work: waking each other up.
//!
//! A process that waits for a request and the thread that serves it wake each other. The scheduler puts whoever is
//! woken on a CPU that has nothing to do; that CPU is halted, and waking it takes 1 to 10 µs on a bare machine (more
//! where deep sleep states are allowed), 15 to 45 µs in a virtual one, where each interrupt between CPUs goes through
//! the hypervisor: twice per request, whose work takes 2 to 5 µs. Two remedies, both only while requests come in quick
//! succession; a thread looks every [`TICK`]:
//! - [`follow`]: where they all come from one thread, serve it on its own CPU;
//! - [`stay`]: serving threads that have rings stand on the CPU of their clients already; keep these there;
//! - [`awake`]: keep idle CPUs from halting. It costs power, so only where the user asked for it.

mod awake;
mod follow;
mod stay;

use crate::abi::{ReadIn, op};
use crate::request::Request;
use crossbeam::utils::CachePadded;
use follow::{Follow, Load};
use rustix::thread::Pid;
use stay::Stay;
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

/// A [`Line`] as of one moment.
#[derive(Debug, Clone, Copy, Default)]
struct Counts {
    requests: u64,
    large: u64,
    changes: u64,
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

    /// What came since `before`, which is brought up to date: to each thread.
    fn since_each(&self, before: &mut Vec<Counts>) -> Vec<Load> {
        before.resize(self.0.len(), Counts::default());
        let load = |(line, before): (&CachePadded<Line>, &mut Counts)| {
            let now = Counts {
                requests: line.requests.load(Ordering::Relaxed),
                large: line.large.load(Ordering::Relaxed),
                changes: line.changes.load(Ordering::Relaxed),
            };
            let then = std::mem::replace(before, now);
            Load {
                requests: now.requests.wrapping_sub(then.requests),
                large: now.large.wrapping_sub(then.large),
                changes: now.changes.wrapping_sub(then.changes),
                client: line.client.load(Ordering::Relaxed),
                same_client: true,
            }
        };
        self.0.iter().zip(before).map(load).collect()
    }

    /// As [`Self::since_each`], of all together.
    fn since(&self, before: &mut Vec<Counts>) -> Load {
        let mut load = Load { same_client: true, ..Load::default() };
        for one in self.since_each(before) {
            load.requests += one.requests;
            load.large += one.large;
            load.changes += one.changes;
            // A thread that served nobody meanwhile may remember a client of long ago.
            if one.requests > 0 && one.client != 0 {
                load.same_client &= load.client == 0 || load.client == one.client;
                load.client = one.client;
            }
        }
        load
    }

    /// Ids of the serving threads.
    fn threads(&self) -> impl Iterator<Item = Pid> {
        (0..self.0.len()).filter_map(|i| self.thread(i))
    }

    /// Id of one, while it serves.
    fn thread(&self, i: usize) -> Option<Pid> {
        Pid::from_raw(self.0.get(i)?.tid.load(Ordering::Relaxed) as i32)
    }
}

/// Whether the wish can be fulfilled here.
///
/// # Errors
/// [`Latency::Low`] without root, or on a kernel without PM QoS.
pub(crate) fn check(wish: Latency) -> io::Result<()> {
    if wish == Latency::Low { awake::check() } else { Ok(()) }
}

/// What is done about the place of serving threads, or of their clients.
enum Place {
    Follow(Follow),
    Stay(Stay),
}

/// Looks after it until the other end of `end` is gone. Returns at once where nothing can be done. `may_move`: the serving
/// threads may be bound to a CPU; those with a ring stand on theirs already.
pub(crate) fn watch(wish: Latency, may_move: bool, served: &Served, end: &Receiver<()>) {
    if wish == Latency::Off {
        return;
    }
    let mut place = if may_move { Follow::new().map(Place::Follow) } else { Stay::new().map(Place::Stay) };
    if wish == Latency::Auto && place.is_none() {
        return;
    }
    let mut awake = (wish == Latency::Low).then(awake::Awake::default);
    let (mut before, mut idle) = (Vec::new(), 0);
    served.since(&mut before);
    loop {
        let slow = idle >= IDLE_TICKS;
        if end.recv_timeout(if slow { IDLE_TICK } else { TICK }) != Err(RecvTimeoutError::Timeout) {
            break;
        }
        let mut earlier = before.clone();
        let load = served.since(&mut before);
        idle = if load.requests == 0 { idle + 1 } else { 0 };
        if let Some(awake) = &mut awake {
            awake.tick(load.requests);
        }
        // What came in a long tick says nothing of how many a short one brings.
        match &mut place {
            Some(Place::Follow(follow)) if !slow => follow.tick(&load, served),
            Some(Place::Stay(stay)) if !slow => stay.tick(&served.since_each(&mut earlier), served),
            _ => {}
        }
    }
    match &mut place {
        Some(Place::Follow(follow)) => follow.leave(served),
        Some(Place::Stay(stay)) => stay.leave(served),
        None => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::InHeader;
    use zerocopy::{FromBytes, IntoBytes};

    fn count(served: &Served, i: usize, client: u32) {
        let mut head: InHeader = FromBytes::read_from_bytes(&[0; 40]).unwrap();
        (head.len, head.opcode, head.pid) = (40, op::GETATTR, client);
        served.count(i, &Request::parse(head.as_bytes()).unwrap());
    }

    #[test]
    fn a_client_of_long_ago_does_not_count() {
        let (served, mut before) = (Served::new(3), Vec::new());
        count(&served, 0, 7);
        count(&served, 1, 8);
        count(&served, 1, 0);
        let load = served.since(&mut before);
        assert!((load.requests, load.changes) == (3, 2) && !load.same_client);
        count(&served, 1, 8);
        let load = served.since(&mut before);
        let expected = Load { requests: 1, large: 0, changes: 0, client: 8, same_client: true };
        assert_eq!(load, expected);
        assert_eq!(served.since(&mut before).requests, 0);
    }
}
