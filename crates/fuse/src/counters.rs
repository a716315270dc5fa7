//! What was asked, by operation code: requests, those put off, the time that handlers took, and how the times until the
//! answer are distributed; these by the domain of the inode that was asked for, too. For `braidfs stats` and those who watch ([`crate::watch`]).
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
//! ([`Timing::answered`]), which also tells whether it is an error.
//!
//! Does not promise: the time a request waited in the kernel's queue, of which FUSE tells nothing.

use crate::request::{Handled, Outcome};
use crate::slow::{Asked, SlowLog};
use crate::watch::histogram::{BUCKETS, Histogram};
use crate::watch::processes::{Asked as AskedBy, Processes, Took};
use braidfs::DomainId;
use braidfs::format::super_block::MAX_DOMAINS;
use braidfs_sync::{Mutex, phases, rank};
use crossbeam::utils::CachePadded;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Operation codes that are told apart: 1 to 63. 0 stands for all others.
pub(crate) const CODES: usize = 64;
/// One request of so many is timed, on average.
pub(crate) const SAMPLED: u32 = 16;

/// An environment variable of the server: where it is set nothing is counted (`make watch-cost` compares).
const NOT_COUNTED: &str = "BRAIDFS_NOT_COUNTED";

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
    later: OnceLock<Box<Later>>,
}

/// What other threads count, which share it.
#[derive(Debug, Default)]
struct Later {
    times: Histogram,
    errors: AtomicU64,
    bytes: AtomicU64,
}

/// Times until the answer of what was asked of one domain: by the thread of the line, and by others.
#[derive(Debug, Default)]
struct OfDomain {
    at_once: OnceLock<Box<Histogram>>,
    later: OnceLock<Box<Histogram>>,
}

/// By their numbers. Some 4 KiB of places, and 2 to 4 KiB for each domain that the thread was asked for.
#[derive(Debug)]
struct Domains([OnceLock<Box<OfDomain>>; MAX_DOMAINS as usize]);

impl Default for Domains {
    fn default() -> Self {
        Self(std::array::from_fn(|_| OnceLock::new()))
    }
}

impl Domains {
    /// `None`: no such domain.
    fn of(&self, domain: DomainId) -> Option<&OfDomain> {
        Some(self.0.get(usize::from(domain.0))?.get_or_init(Box::default))
    }
}

/// What one thread counts. Only that thread writes it, but for `later`.
#[derive(Debug)]
pub(crate) struct Line {
    ops: [Op; CODES],
    /// Requests until the next that is timed.
    wait: AtomicU32,
    /// Of the generator (xorshift32; Marsaglia, "Xorshift RNGs", 2003, section 3); never 0.
    seed: AtomicU32,
    /// Of requests that were timed.
    domains: OnceLock<Box<Domains>>,
    /// Who asked, while somebody watched.
    processes: OnceLock<Box<Processes>>,
    /// Who of these was answered by other threads.
    answered: OnceLock<Box<Mutex<Processes, rank::AnsweredProcesses>>>,
    /// Common to all lines.
    mode: Arc<Mode>,
}

/// What is to be counted: read with every request, written when somebody begins or ends to watch.
#[derive(Debug)]
struct Mode {
    /// Rises by one when somebody begins to watch, and when the time for that is over: while it is odd, somebody does.
    watched: CachePadded<AtomicU64>,
    /// Until when, milliseconds since `start`.
    until: AtomicU64,
    start: Instant,
    clock_is_quick: bool,
    /// False where an experiment wants to know what counting costs ([`NOT_COUNTED`]).
    counts: bool,
    /// Where slow operations are to be told.
    slow: Option<SlowLog>,
}

/// A request that is being handled.
#[must_use]
pub(crate) struct Begun {
    code: usize,
    at: Option<Instant>,
    /// How long it had been here before.
    waited: Duration,
    /// [`Mode::watched`] as it was when the request came.
    watched: u64,
    /// Where slow operations are told.
    asked: Option<Asked>,
    of: Option<Of>,
}

impl Begun {
    /// When it was received, where it is timed.
    fn received(&self) -> Option<Instant> {
        self.at.map(|at| at.checked_sub(self.waited).unwrap_or(at))
    }
}

/// Of whom a request that is timed asks, and who.
#[derive(Debug, Clone, Copy, Default)]
struct Of {
    domain: Option<DomainId>,
    /// The thread that asks, and in which watch.
    client: Option<(u32, u64)>,
}

/// Where the request at hand is counted.
#[derive(Clone, Copy)]
pub(crate) enum Counted<'l> {
    /// By the thread of the line.
    Here(&'l Arc<CachePadded<Line>>, &'l Begun),
    /// By another one.
    Aside(&'l Timing),
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

/// Where a request that another thread answers is to be counted.
#[derive(Debug, Clone)]
pub(crate) struct Timing {
    line: Arc<CachePadded<Line>>,
    code: usize,
    /// Where it is timed.
    at: Option<Instant>,
    asked: Option<Asked>,
    of: Option<Of>,
}

impl Counted<'_> {
    /// It moved so many bytes of data.
    pub fn moved(&self, bytes: u64) {
        match self {
            Self::Here(line, begun) => rise(&line.ops[begun.code].bytes, bytes),
            Self::Aside(timing) => {
                let later = timing.line.ops[timing.code].later.get_or_init(Box::default);
                later.bytes.fetch_add(bytes, Relaxed);
            }
        }
    }

    /// For the case that another thread answers.
    pub fn timing(&self) -> Timing {
        match *self {
            Self::Here(line, begun) => {
                Timing { line: line.clone(), code: begun.code, at: begun.received(), asked: begun.asked, of: begun.of }
            }
            Self::Aside(timing) => timing.clone(),
        }
    }
}

impl Timing {
    /// It was answered, maybe with an error.
    pub fn answered(&self, failed: bool) {
        let op = &self.line.ops[self.code];
        let slow = self.line.mode.slow.as_ref().zip(self.asked.as_ref());
        let now = if self.at.is_some() || slow.is_some() { Some(Instant::now()) } else { None };
        if let Some((at, now)) = self.at.zip(now) {
            let took = nanos(at, now);
            op.later.get_or_init(Box::default).times.record_shared(took);
            self.line.answered_later(self.of.unwrap_or_default(), took);
        }
        if failed {
            op.later.get_or_init(Box::default).errors.fetch_add(1, Relaxed);
        }
        if let Some(((slow, asked), now)) = slow.zip(now) {
            slow.answered(asked, now, true, failed);
        }
    }

    /// For a handler, in another thread.
    pub fn counted(&self) -> Counted<'_> {
        Counted::Aside(self)
    }
}

fn nanos(since: Instant, now: Instant) -> u64 {
    u64::try_from(now.saturating_duration_since(since).as_nanos()).unwrap_or(u64::MAX)
}

impl Mode {
    fn new(slow: Option<Duration>) -> Self {
        let start = Instant::now();
        // The least of some: a thread may be interrupted.
        let pair = |_| {
            let from = Instant::now();
            std::hint::black_box(Instant::now());
            from.elapsed()
        };
        let quick = (0..8).map(pair).min().is_some_and(|least| least < CLOCK_IS_QUICK);
        Self {
            watched: CachePadded::default(),
            until: AtomicU64::new(0),
            start,
            clock_is_quick: quick,
            counts: std::env::var_os(NOT_COUNTED).is_none(),
            slow: slow.map(SlowLog::new),
        }
    }

    /// Nobody watches any more, where the time is over.
    fn look(&self, now: Instant) {
        self.look_while(now, || ());
    }

    /// [`Self::look`]; `meanwhile` is for tests: what others do before this says that the time is over.
    fn look_while(&self, now: Instant, meanwhile: impl FnOnce()) {
        let watched = self.watched.load(SeqCst);
        let now = now.saturating_duration_since(self.start).as_millis();
        let over = || now >= u128::from(self.until.load(SeqCst));
        if !is_watched(watched) || !over() {
            return;
        }
        meanwhile();
        if self.watched.compare_exchange(watched, watched + 1, SeqCst, SeqCst).is_ok() && !over() {
            // Somebody asked between the two, and may have seen that all is counted: it is the same watch. Where this
            // fails another one has begun.
            let _ = self.watched.compare_exchange(watched + 1, watched, SeqCst, SeqCst);
        }
    }

    /// Somebody watches until then. First until when, then that it is so: [`Self::look`] does it the other way round.
    fn watch(&self, until: u64) {
        self.until.fetch_max(until, SeqCst);
        let watched = self.watched.load(SeqCst);
        if !is_watched(watched) {
            // Else somebody else did.
            let _ = self.watched.compare_exchange(watched, watched + 1, SeqCst, SeqCst);
        }
    }
}

/// Whether that value of [`Mode::watched`] says that requests are timed now.
fn is_watched(watched: u64) -> bool {
    watched % 2 == 1
}

/// The number of the watch that goes on, or was the last one.
fn generation(watched: u64) -> u64 {
    watched.div_ceil(2)
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
            domains: OnceLock::new(),
            processes: OnceLock::new(),
            answered: OnceLock::new(),
            mode,
        }
    }

    /// A request was received.
    pub fn begin(&self, opcode: u32) -> Begun {
        self.begin_waited(opcode, None)
    }

    /// [`Self::begin`] of one that was received by another thread at that moment.
    pub fn begin_waited(&self, opcode: u32, received: Option<Instant>) -> Begun {
        let code = if (opcode as usize) < CODES { opcode as usize } else { 0 };
        if !self.mode.counts {
            return Begun { code, at: None, waited: Duration::ZERO, watched: 0, asked: None, of: None };
        }
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
                (is_watched(watched) && self.mode.clock_is_quick).then(Instant::now)
            }
        };
        let waited = at.zip(received).map(|(now, received)| now.saturating_duration_since(received));
        Begun { code, at, waited: waited.unwrap_or_default(), watched, asked: None, of: None }
    }

    /// What it asks, where slow operations are told: then the calling thread is watched until its handler has returned.
    pub fn about(&self, begun: &mut Begun, received: Option<Instant>, asked: impl FnOnce(Instant) -> Asked) {
        if self.mode.slow.is_some() {
            let now = begun.at.unwrap_or_else(Instant::now);
            phases::watch_from(now);
            begun.asked = Some(asked(received.unwrap_or(now)));
        }
    }

    /// Of which domain it asks, where it is timed. `client`: the thread that does, 0: the kernel.
    pub fn of(&self, begun: &mut Begun, client: u32, domain: impl FnOnce() -> Option<DomainId>) {
        if begun.at.is_some() {
            let client = is_watched(begun.watched).then(|| (client, generation(begun.watched)));
            begun.of = Some(Of { domain: domain(), client });
        }
    }

    /// Another thread answered a request in so many nanoseconds.
    fn answered_later(&self, of: Of, took: u64) {
        if let Some(domain) = of.domain.and_then(|d| self.domains.get_or_init(Box::default).of(d)) {
            domain.later.get_or_init(Box::default).record_shared(took);
        }
        if let Some((client, generation)) = of.client {
            let took = Took { handler: None, answer: Some(took) };
            self.answered.get_or_init(Box::default).lock().count(generation, client, took);
        }
    }

    /// Its handler returned; the answer need not be sent yet. `client`: the thread that asks.
    #[inline]
    pub fn end(&self, begun: &Begun, handled: &Handled, client: u32) {
        if self.mode.counts && !matches!(handled, Ok(Outcome::Reply | Outcome::Silent)) {
            let op = &self.ops[begun.code];
            rise(if handled.is_err() { &op.errors } else { &op.deferred }, 1);
        }
        // while somebody watches each is timed, but where the clock is slow
        if begun.at.is_some() || begun.asked.is_some() || is_watched(begun.watched) {
            self.end_timed(begun, handled, client);
        }
    }

    /// [`Self::end`] where more of it is wanted than how many there were.
    fn end_timed(&self, begun: &Begun, handled: &Handled, client: u32) {
        let op = &self.ops[begun.code];
        let deferred = *handled == Ok(Outcome::Deferred);
        let slow = self.mode.slow.as_ref().zip(begun.asked.as_ref());
        // one reading for all
        let now = if begun.at.is_some() || (slow.is_some() && !deferred) { Some(Instant::now()) } else { None };
        let handler = begun.at.zip(now).map(|(at, now)| nanos(at, now));
        let answer = handler.filter(|_| !deferred).map(|took| took.saturating_add(begun.waited.as_nanos() as u64));
        if let Some(took) = handler {
            rise(&op.timed, 1);
            rise(&op.nanos, took);
        }
        if let Some(took) = answer {
            op.at_once.get_or_init(Box::default).record(took);
            let domain = begun.of.and_then(|of| of.domain);
            if let Some(domain) = domain.and_then(|d| self.domains.get_or_init(Box::default).of(d)) {
                domain.at_once.get_or_init(Box::default).record(took);
            }
        }
        if let Some((slow, asked)) = slow {
            if let Some(now) = now.filter(|_| !deferred) {
                slow.answered(asked, now, !begun.waited.is_zero(), handled.is_err());
            }
            phases::end();
        }
        if is_watched(begun.watched) {
            self.processes.get_or_init(Box::default).count(generation(begun.watched), client, Took { handler, answer });
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
    /// For the handler; `line` began it.
    pub fn counted<'l>(&'l self, line: &'l Arc<CachePadded<Line>>) -> Counted<'l> {
        Counted::Here(line, self)
    }
}

impl Default for Counters {
    fn default() -> Self {
        Self { lines: Mutex::default(), mode: Arc::new(Mode::new(None)) }
    }
}

impl Counters {
    /// Those of a mount that tells of operations that take longer than `slow`.
    pub fn new(slow: Option<Duration>) -> Self {
        Self { mode: Arc::new(Mode::new(slow)), ..Self::default() }
    }

    /// Somebody watches, for so many seconds at most.
    pub fn watch(&self, seconds: u32) {
        if seconds > 0 {
            let for_ms = u128::from(seconds.min(WATCH_SECONDS_MAX)) * 1000;
            let until = u64::try_from(self.uptime().as_millis() + for_ms).unwrap_or(u64::MAX);
            self.mode.watch(until);
        }
    }

    /// Whether somebody watches.
    #[cfg(test)]
    pub fn is_watched(&self) -> bool {
        is_watched(self.mode.watched.load(SeqCst))
    }

    /// Since the mount.
    pub fn uptime(&self) -> Duration {
        self.mode.start.elapsed()
    }

    /// One request of so many is timed.
    pub fn sampled(&self) -> u32 {
        if is_watched(self.mode.watched.load(Relaxed)) && self.mode.clock_is_quick { 1 } else { SAMPLED }
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
                if let Some(later) = op.later.get() {
                    sum.errors += later.errors.load(Relaxed);
                    sum.bytes += later.bytes.load(Relaxed);
                }
            }
        }
        all
    }

    /// Times of one operation code until the answer.
    pub fn times(&self, code: usize) -> [u64; BUCKETS] {
        let mut all = [0; BUCKETS];
        for line in self.lines.lock().iter() {
            if let Some(op) = line.ops.get(code) {
                let both = [op.at_once.get().map(Box::as_ref), op.later.get().map(|l| &l.times)];
                both.into_iter().flatten().for_each(|h| h.add_to(&mut all));
            }
        }
        all
    }

    /// Times until the answer of what was asked of a domain.
    pub fn times_of_domain(&self, domain: u16) -> [u64; BUCKETS] {
        let mut all = [0; BUCKETS];
        for line in self.lines.lock().iter() {
            let of = line.domains.get().and_then(|d| d.0.get(usize::from(domain))?.get());
            let both = of.map(|of| [&of.at_once, &of.later]);
            both.into_iter().flatten().filter_map(|h| h.get()).for_each(|h| h.add_to(&mut all));
        }
        all
    }

    /// What the threads asked that did while somebody watched, this time or, where nobody does, the last time.
    pub fn processes(&self) -> HashMap<u32, AskedBy> {
        let generation = generation(self.mode.watched.load(SeqCst));
        let mut all = HashMap::<u32, AskedBy>::new();
        let lines = self.lines.lock();
        for processes in lines.iter().filter_map(|l| l.processes.get()) {
            processes.of(generation).for_each(|(thread, asked)| all.entry(thread).or_default().add(&asked));
        }
        for answered in lines.iter().filter_map(|l| l.answered.get()) {
            for (thread, asked) in answered.lock().of(generation) {
                if let Some(sum) = all.get_mut(&thread) {
                    sum.add_latency(&asked);
                }
            }
        }
        all
    }
}

#[cfg(test)]
mod tests;
