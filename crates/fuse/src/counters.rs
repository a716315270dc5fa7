//! What was asked, by operation code: requests, those put off, and the time that handlers took. For `braidfs stats`.
//!
//! Each serving thread writes lines of its own ([`Line`]), without locked instructions; they are summed when somebody
//! asks ([`Counters::sum`]), who sees each number as it was at about that moment.
//!
//! Requests are counted one by one. The clock is read for one request of [`SAMPLED`], chosen by chance (a fixed distance
//! could hit the same one of a sequence that repeats), just before and just after its handler: a pair of readings takes
//! 50 ns where the kernel lends its clock to user space and 1 µs where it does not, of requests that take 2 µs. So a
//! handler's mean time is known to some percent after some hundred requests.
//!
//! Does not promise: the time a request waited in the kernel's queue, of which FUSE tells nothing; and of a request that
//! is answered later, by another thread ([`Outcome::Deferred`]), the time until then: only that there was one.

use crate::request::{Handled, Outcome};
use braidfs_sync::{Mutex, rank};
use crossbeam::utils::CachePadded;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Instant;

/// Operation codes that are told apart: 1 to 63. 0 stands for all others.
pub(crate) const CODES: usize = 64;
/// One request of so many is timed, on average.
pub(crate) const SAMPLED: u32 = 16;

/// Of one operation code.
#[derive(Debug, Default)]
struct Op {
    requests: AtomicU64,
    deferred: AtomicU64,
    timed: AtomicU64,
    nanos: AtomicU64,
}

/// What one thread counts. Only that thread writes it.
#[derive(Debug)]
pub(crate) struct Line {
    ops: [Op; CODES],
    /// Requests until the next that is timed.
    wait: AtomicU32,
    /// Of the generator (xorshift32; Marsaglia, "Xorshift RNGs", 2003, section 3); never 0.
    seed: AtomicU32,
}

/// A request that is being handled.
#[must_use]
pub(crate) struct Begun {
    code: usize,
    at: Option<Instant>,
}

/// The lines of all threads of a mount.
#[derive(Debug, Default)]
pub(crate) struct Counters(Mutex<Vec<Arc<CachePadded<Line>>>, rank::CounterLines>);

/// The sum over all threads, of one operation code.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Sum {
    pub requests: u64,
    pub deferred: u64,
    pub timed: u64,
    pub nanos: u64,
}

/// No locked instruction is needed where one thread writes.
fn rise(n: &AtomicU64, by: u64) {
    n.store(n.load(Relaxed).wrapping_add(by), Relaxed);
}

impl Line {
    fn new(seed: u32) -> Self {
        Self {
            ops: std::array::from_fn(|_| Op::default()),
            wait: AtomicU32::new(0),
            seed: AtomicU32::new(seed.wrapping_mul(0x9e37_79b9) | 1),
        }
    }

    /// A request was received.
    pub fn begin(&self, opcode: u32) -> Begun {
        let code = if (opcode as usize) < CODES { opcode as usize } else { 0 };
        rise(&self.ops[code].requests, 1);
        let at = match self.wait.load(Relaxed) {
            0 => {
                self.wait.store(self.chance() % (2 * SAMPLED - 1), Relaxed);
                Some(Instant::now())
            }
            left => {
                self.wait.store(left - 1, Relaxed);
                None
            }
        };
        Begun { code, at }
    }

    /// Its handler returned; the answer need not be sent yet.
    pub fn end(&self, begun: Begun, handled: &Handled) {
        let op = &self.ops[begun.code];
        if let Some(at) = begun.at {
            rise(&op.timed, 1);
            rise(&op.nanos, u64::try_from(at.elapsed().as_nanos()).unwrap_or(u64::MAX));
        }
        if *handled == Ok(Outcome::Deferred) {
            rise(&op.deferred, 1);
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

impl Counters {
    /// A line for the calling thread.
    pub fn line(&self) -> Arc<CachePadded<Line>> {
        let mut lines = self.0.lock();
        let line = Arc::new(CachePadded::new(Line::new(lines.len() as u32 + 1)));
        lines.push(line.clone());
        line
    }

    /// Threads that count.
    pub fn threads(&self) -> usize {
        self.0.lock().len()
    }

    /// By operation code.
    pub fn sum(&self) -> [Sum; CODES] {
        let mut all = [Sum::default(); CODES];
        for line in self.0.lock().iter() {
            for (sum, op) in all.iter_mut().zip(&line.ops) {
                sum.requests += op.requests.load(Relaxed);
                sum.deferred += op.deferred.load(Relaxed);
                sum.timed += op.timed.load(Relaxed);
                sum.nanos += op.nanos.load(Relaxed);
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
            line.end(line.begin(op::FSYNC), &Ok(Outcome::Deferred));
            line.end(line.begin(op::GETATTR), &Err(rustix::io::Errno::IO));
        }
        a.end(a.begin(op::GETATTR), &Ok(Outcome::Reply));
        a.end(a.begin(4096), &Ok(Outcome::Reply));
        a.end(a.begin(u32::MAX), &Ok(Outcome::Reply));
        let sum = counters.sum();
        let of = |code: u32| (sum[code as usize].requests, sum[code as usize].deferred);
        assert_eq!((of(op::FSYNC), of(op::GETATTR), of(0), of(op::LOOKUP)), ((2, 2), (3, 0), (2, 0), (0, 0)));
        assert_eq!(counters.threads(), 2);
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
            line.end(begun, &Ok(Outcome::Reply));
        }
        let sum = counters.sum();
        for (code, s) in sum.iter().enumerate().skip(1).take(4) {
            assert_eq!(s.requests, 4000);
            assert!((200..320).contains(&s.timed), "{} of code {code} were timed", s.timed);
        }
        assert!(sum[4].nanos / sum[4].timed >= 100_000 && sum[1].nanos / sum[1].timed < 50_000);
    }
}
