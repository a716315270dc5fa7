//! What was asked, by operation code: requests, those put off, the time that handlers took, and how the times until the
//! answer are distributed. For `braidfs stats` and those who watch ([`crate::watch`]).
//!
//! Each serving thread writes lines of its own ([`Line`]), without locked instructions; they are summed when somebody
//! asks ([`Counters::sum`]), who sees each number as it was at about that moment.
//!
//! Requests are counted one by one. The clock is read for one request of [`SAMPLED`], chosen by chance (a fixed distance
//! could hit the same one of a sequence that repeats), just before and just after its handler: a pair of readings takes
//! 50 ns where the kernel lends its clock to user space and 1 µs where it does not, of requests that take 2 µs. So a
//! handler's mean time is known to some percent after some hundred requests. While somebody watches ([`Counters::watch`]) every
//! request is timed, and counted for the thread that asks; not where the clock is a slow one.
//!
//! The time of a request that is answered later, by another thread ([`Outcome::Deferred`]), ends with that answer
//! ([`Timing::answered`]).
//!
//! Does not promise: the time a request waited in the kernel's queue, of which FUSE tells nothing.

use crate::request::{Handled, Outcome};
use crate::watch::histogram::{BUCKETS, Histogram};
use crate::watch::processes::Processes;
use braidfs_sync::{Mutex, rank};
use crossbeam::utils::CachePadded;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Operation codes that are told apart: 1 to 63. 0 stands for all others.
pub(crate) const CODES: usize = 64;
/// One request of so many is timed, on average.
pub(crate) const SAMPLED: u32 = 16;

/// Two readings of a clock that take longer are not made for every request.
const CLOCK_IS_QUICK: Duration = Duration::from_nanos(250);
/// Somebody watches for so long at most without asking again.
const WATCH_SECONDS_MAX: u32 = 3600;

/// Of one operation code.
#[derive(Debug, Default)]
struct Op {
    requests: AtomicU64,
    deferred: AtomicU64,
    errors: AtomicU64,
    bytes: AtomicU64,
    timed: AtomicU64,
    nanos: AtomicU64,
    /// Until they were answered: by the thread of the line.
    at_once: OnceLock<Box<Histogram>>,
    /// By other threads, which share this.
    later: OnceLock<Box<Histogram>>,
}

/// What one thread counts. Only that thread writes it, but for `later`.
#[derive(Debug)]
pub(crate) struct Line {
    ops: [Op; CODES],
    /// Requests until the next that is timed.
    wait: AtomicU32,
    /// Of the generator (xorshift32; Marsaglia, "Xorshift RNGs", 2003, section 3); never 0.
    seed: AtomicU32,
    /// Who asked, while somebody watched.
    processes: OnceLock<Box<Processes>>,
    /// Common to all lines.
    mode: Arc<Mode>,
}

/// What is to be counted: read with every request, written when somebody begins or ends to watch.
#[derive(Debug)]
struct Mode {
    watched: CachePadded<AtomicBool>,
    /// Until when, milliseconds since `start`.
    until: AtomicU64,
    start: Instant,
    clock_is_quick: bool,
}

/// A request that is being handled.
#[must_use]
pub(crate) struct Begun {
    code: usize,
    at: Option<Instant>,
    /// It is counted for who asks.
    watched: bool,
}

/// The lines of all threads of a mount.
#[derive(Debug)]
pub(crate) struct Counters {
    lines: Mutex<Vec<Arc<CachePadded<Line>>>, rank::CounterLines>,
    mode: Arc<Mode>,
}

/// The sum over all threads, of one operation code.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Sum {
    pub requests: u64,
    pub deferred: u64,
    pub errors: u64,
    pub bytes: u64,
    pub timed: u64,
    pub nanos: u64,
}

/// Where the time of a request that another thread answers is to be counted.
#[derive(Debug, Clone)]
pub(crate) struct Timing {
    line: Arc<CachePadded<Line>>,
    code: usize,
    at: Instant,
}

impl Timing {
    /// It was answered.
    pub fn answered(&self) {
        let histogram = self.line.ops[self.code].later.get_or_init(Box::default);
        histogram.record_shared(nanos(self.at));
    }
}

fn nanos(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

impl Mode {
    fn new() -> Self {
        let start = Instant::now();
        // The least of some: a thread may be interrupted.
        let pair = |_| {
            let from = Instant::now();
            std::hint::black_box(Instant::now());
            from.elapsed()
        };
        let quick = (0..8).map(pair).min().is_some_and(|least| least < CLOCK_IS_QUICK);
        Self { watched: CachePadded::default(), until: AtomicU64::new(0), start, clock_is_quick: quick }
    }

    /// Nobody watches any more, where the time is over.
    fn look(&self, now: Instant) {
        if self.watched.load(Relaxed)
            && now.duration_since(self.start).as_millis() >= u128::from(self.until.load(Relaxed))
        {
            self.watched.store(false, Relaxed);
        }
    }
}

/// No locked instruction is needed where one thread writes.
fn rise(n: &AtomicU64, by: u64) {
    n.store(n.load(Relaxed).wrapping_add(by), Relaxed);
}

impl Line {
    fn new(seed: u32, mode: Arc<Mode>) -> Self {
        Self {
            ops: std::array::from_fn(|_| Op::default()),
            wait: AtomicU32::new(0),
            seed: AtomicU32::new(seed.wrapping_mul(0x9e37_79b9) | 1),
            processes: OnceLock::new(),
            mode,
        }
    }

    /// A request was received.
    pub fn begin(&self, opcode: u32) -> Begun {
        let code = if (opcode as usize) < CODES { opcode as usize } else { 0 };
        rise(&self.ops[code].requests, 1);
        let watched = self.mode.watched.load(Relaxed);
        let at = match self.wait.load(Relaxed) {
            0 => {
                self.wait.store(self.chance() % (2 * SAMPLED - 1), Relaxed);
                let now = Instant::now();
                self.mode.look(now);
                Some(now)
            }
            left => {
                self.wait.store(left - 1, Relaxed);
                (watched && self.mode.clock_is_quick).then(Instant::now)
            }
        };
        Begun { code, at, watched }
    }

    /// Its handler returned; the answer need not be sent yet. `client`: the thread that asks.
    pub fn end(&self, begun: Begun, handled: &Handled, client: u32) {
        let op = &self.ops[begun.code];
        let deferred = *handled == Ok(Outcome::Deferred);
        let took = begun.at.map(nanos);
        if let Some(took) = took {
            rise(&op.timed, 1);
            rise(&op.nanos, took);
            if !deferred {
                op.at_once.get_or_init(Box::default).record(took);
            }
        }
        if deferred {
            rise(&op.deferred, 1);
        }
        if handled.is_err() {
            rise(&op.errors, 1);
        }
        if begun.watched {
            self.processes.get_or_init(Box::default).count(client, took.unwrap_or(0));
        }
    }

    /// A request moved so many bytes of data.
    pub fn moved(&self, opcode: u32, bytes: u64) {
        if let Some(op) = self.ops.get(opcode as usize) {
            rise(&op.bytes, bytes);
        }
    }

    fn chance(&self) -> u32 {
        let mut x = self.seed.load(Relaxed);
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        self.seed.store(x, Relaxed);
        x
    }
}

impl Begun {
    /// For the case that another thread answers, where the request is timed; `line` began it.
    pub fn timing(&self, line: &Arc<CachePadded<Line>>) -> Option<Timing> {
        self.at.map(|at| Timing { line: line.clone(), code: self.code, at })
    }
}

impl Default for Counters {
    fn default() -> Self {
        Self { lines: Mutex::default(), mode: Arc::new(Mode::new()) }
    }
}

impl Counters {
    /// Somebody watches, for so many seconds at most.
    pub fn watch(&self, seconds: u32) {
        if seconds > 0 {
            let for_ms = u128::from(seconds.min(WATCH_SECONDS_MAX)) * 1000;
            let until = u64::try_from(self.uptime().as_millis() + for_ms).unwrap_or(u64::MAX);
            self.mode.until.fetch_max(until, Relaxed);
            self.mode.watched.store(true, Relaxed);
        }
    }

    /// Since the mount.
    pub fn uptime(&self) -> Duration {
        self.mode.start.elapsed()
    }

    /// One request of so many is timed.
    pub fn sampled(&self) -> u32 {
        if self.mode.watched.load(Relaxed) && self.mode.clock_is_quick { 1 } else { SAMPLED }
    }

    /// A line for the calling thread.
    pub fn line(&self) -> Arc<CachePadded<Line>> {
        let mut lines = self.lines.lock();
        let line = Arc::new(CachePadded::new(Line::new(lines.len() as u32 + 1, self.mode.clone())));
        lines.push(line.clone());
        line
    }

    /// Threads that count.
    pub fn threads(&self) -> usize {
        self.lines.lock().len()
    }

    /// By operation code.
    pub fn sum(&self) -> [Sum; CODES] {
        let mut all = [Sum::default(); CODES];
        for line in self.lines.lock().iter() {
            for (sum, op) in all.iter_mut().zip(&line.ops) {
                sum.requests += op.requests.load(Relaxed);
                sum.deferred += op.deferred.load(Relaxed);
                sum.errors += op.errors.load(Relaxed);
                sum.bytes += op.bytes.load(Relaxed);
                sum.timed += op.timed.load(Relaxed);
                sum.nanos += op.nanos.load(Relaxed);
            }
        }
        all
    }

    /// Times of one operation code until the answer.
    pub fn times(&self, code: usize) -> [u64; BUCKETS] {
        let mut all = [0; BUCKETS];
        for line in self.lines.lock().iter() {
            if let Some(op) = line.ops.get(code) {
                [&op.at_once, &op.later].into_iter().filter_map(|h| h.get()).for_each(|h| h.add_to(&mut all));
            }
        }
        all
    }

    /// (requests, nanoseconds) of the threads that asked while somebody watched.
    pub fn processes(&self) -> HashMap<u32, (u64, u64)> {
        let mut all = HashMap::<u32, (u64, u64)>::new();
        for processes in self.lines.lock().iter().filter_map(|l| l.processes.get()) {
            for (thread, requests, nanos) in processes.iter() {
                let sum = all.entry(thread).or_default();
                (sum.0, sum.1) = (sum.0 + requests, sum.1 + nanos);
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::op;
    use std::time::Duration;

    #[test]
    fn threads_are_summed() {
        let counters = Counters::default();
        let (a, b) = (counters.line(), counters.line());
        for line in [&a, &b] {
            line.end(line.begin(op::FSYNC), &Ok(Outcome::Deferred), 1);
            line.end(line.begin(op::GETATTR), &Err(rustix::io::Errno::IO), 1);
        }
        a.end(a.begin(op::GETATTR), &Ok(Outcome::Reply), 1);
        a.end(a.begin(4096), &Ok(Outcome::Reply), 1);
        a.end(a.begin(u32::MAX), &Ok(Outcome::Reply), 1);
        a.moved(op::READ, 4096);
        a.moved(u32::MAX, 1);
        let sum = counters.sum();
        let of = |code: u32| (sum[code as usize].requests, sum[code as usize].deferred);
        assert_eq!((of(op::FSYNC), of(op::GETATTR), of(0), of(op::LOOKUP)), ((2, 2), (3, 0), (2, 0), (0, 0)));
        assert_eq!(counters.threads(), 2);
        assert_eq!((sum[op::GETATTR as usize].errors, sum[op::READ as usize].bytes, sum[0].bytes), (2, 4096, 0));
    }

    #[test]
    fn a_sample_is_timed_whatever_the_sequence() {
        let counters = Counters::default();
        let line = counters.line();
        // each fourth one takes longer
        for n in 0..16_000u32 {
            let begun = line.begin(1 + n % 4);
            if begun.at.is_some() && n % 4 == 3 {
                std::thread::sleep(Duration::from_micros(100));
            }
            line.end(begun, &Ok(Outcome::Reply), 1);
        }
        let sum = counters.sum();
        for (code, s) in sum.iter().enumerate().skip(1).take(4) {
            assert_eq!(s.requests, 4000);
            assert!((200..320).contains(&s.timed), "{} of code {code} were timed", s.timed);
        }
        assert!(sum[4].nanos / sum[4].timed >= 100_000 && sum[1].nanos / sum[1].timed < 50_000);
    }

    #[test]
    fn every_request_is_timed_while_somebody_watches_and_no_longer() {
        let counters = Counters { mode: Arc::new(Mode { clock_is_quick: true, ..Mode::new() }), ..Counters::default() };
        let line = counters.line();
        let ask = |n: u32| {
            for i in 0..n {
                line.end(line.begin(op::GETATTR), &Ok(Outcome::Reply), i % 2);
            }
            let times = counters.times(op::GETATTR as usize).iter().sum::<u64>();
            assert_eq!(times, counters.sum()[op::GETATTR as usize].timed);
            times
        };
        let before = ask(1000);
        assert!(before < 200 && counters.processes().is_empty(), "{before}");
        counters.watch(0);
        assert_eq!(counters.sampled(), SAMPLED);
        counters.watch(3600);
        assert_eq!((ask(1000) - before, counters.sampled()), (1000, 1));
        let processes = counters.processes();
        assert_eq!((processes[&0].0, processes[&1].0, processes.len()), (500, 500, 2));
        // the hour is over
        counters.mode.until.store(0, Relaxed);
        let (watched, after) = (before + 1000, ask(10_000));
        assert!(after - watched < 1500, "{after}");
        assert_eq!(counters.sampled(), SAMPLED);
    }

    #[test]
    fn what_is_answered_later_is_timed_until_then() {
        let counters = Counters::default();
        let line = counters.line();
        let begun = line.begin(op::FSYNC);
        let timing = begun.timing(&line).expect("the first one is timed");
        line.end(begun, &Ok(Outcome::Deferred), 1);
        assert_eq!(counters.times(op::FSYNC as usize), [0; BUCKETS]);
        std::thread::sleep(Duration::from_millis(2));
        timing.answered();
        let times = crate::watch::sample::Latency::new(&counters.times(op::FSYNC as usize));
        assert_eq!(times.count(), 1);
        assert!(times.quantile(1.0).unwrap() >= 2_000_000);
    }
}
