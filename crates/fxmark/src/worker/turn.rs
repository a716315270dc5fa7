//! One worker: obeys orders, times its operations.
//!
//! Throughput comes from the worker's own clock, read at both ends of each timed phase. Latencies are taken of every
//! operation, or of one in [`SAMPLE`] where an operation is so short that reading the clock would show. Every worker does one
//! operation at least, however late it comes.

use super::{Control, Ctx, Load, Order, Report, Step};
use crate::error::On;
use crate::fs::Fs;
use crate::results::LockWait;
use crate::{Error, Result, sys};
use hdrhistogram::Histogram;
use std::time::Instant;

/// Operations per timed one, for short operations.
const SAMPLE: u64 = 16;
/// Operations that take less on average, nanoseconds, are sampled.
const SHORT_NS: u64 = 5_000;
/// Operations between two reports of progress.
const PROGRESS: u64 = 256;
/// Longest latency that is told apart, nanoseconds.
const LATENCY_MAX: u64 = 3_600_000_000_000;

/// Runs one worker to its end.
///
/// # Errors
/// The first failed operation.
pub fn work<F: Fs>(c: &Ctx<F>, load: &mut dyn Load<F>, control: &Control) -> Result<Report> {
    let mut turn = Turn {
        report: Report { id: c.id, background: c.background, ..Report::default() },
        hist: Histogram::new_with_bounds(1, LATENCY_MAX, 3).map_err(|e| Error::Other(format!("histogram: {e}")))?,
        warm: (0, 0),
    };
    let mut seen = 0;
    loop {
        let (number, order) = control.next(seen);
        seen = number;
        match order {
            Order::Share if c.leads => load.share(c)?,
            Order::Sync if c.leads => c.fs.sync().on("syncfs", c".")?,
            Order::Share | Order::Sync => {}
            Order::Prepare => load.prepare(c)?,
            Order::AfterPrepare => load.after_prepare(c)?,
            Order::Refill => load.refill(c)?,
            Order::Warm => turn.warm(c, load, control, number)?,
            Order::Measure => turn.measure(c, load, control, number)?,
            Order::Finish => {
                turn.report.latency =
                    turn.hist.iter_recorded().map(|b| (b.value_iterated_to(), b.count_at_value())).collect();
                return Ok(turn.report);
            }
        }
        control.arrive();
    }
}

struct Turn {
    report: Report,
    hist: Histogram<u64>,
    /// Operations and nanoseconds of the warm-up.
    warm: (u64, u64),
}

impl Turn {
    fn warm<F: Fs>(&mut self, c: &Ctx<F>, load: &mut dyn Load<F>, control: &Control, number: u32) -> Result<()> {
        control.start(c.workers, number);
        let start = Instant::now();
        let mut ops = 0;
        while !control.halted(number) {
            match load.step(c)? {
                Step::Did(n) => ops += n,
                Step::Empty => {
                    control.halt(number);
                    break;
                }
            }
        }
        self.warm = (self.warm.0 + ops, self.warm.1 + start.elapsed().as_nanos() as u64);
        Ok(())
    }

    fn measure<F: Fs>(&mut self, c: &Ctx<F>, load: &mut dyn Load<F>, control: &Control, number: u32) -> Result<()> {
        let every = match (c.original(), self.warm) {
            // the original does not look at the clock
            (true, _) => 0,
            (_, (ops, ns)) if ops > 0 && ns / ops < SHORT_NS => SAMPLE,
            _ => 1,
        };
        self.report.sampled = every;
        control.start(c.workers, number);
        let waited = lock_waits();
        let before = sys::Usage::of_thread();
        let start = Instant::now();
        let ops = match every {
            0 => plain(c, load, control, number),
            1 => self.each(c, load, control, number),
            n => self.sampled(c, load, control, number, n),
        }?;
        self.report.secs += start.elapsed().as_secs_f64();
        self.report.ops += ops;
        let used = sys::Usage::of_thread() - before;
        self.report.voluntary += used.voluntary;
        self.report.involuntary += used.involuntary;
        self.report.major_faults += used.major_faults;
        if c.leads {
            LockWait::add(&mut self.report.lock_waits, &since(&waited));
        }
        control.progress(c.id, self.report.ops);
        Ok(())
    }

    /// Every operation timed: the end of one is the start of the next.
    fn each<F: Fs>(&mut self, c: &Ctx<F>, load: &mut dyn Load<F>, control: &Control, number: u32) -> Result<u64> {
        let (mut ops, mut last) = (0, Instant::now());
        loop {
            match load.step(c)? {
                Step::Did(n) => {
                    let now = Instant::now();
                    self.hist.saturating_record((now - last).as_nanos() as u64);
                    last = now;
                    ops += n;
                    control.progress(c.id, self.report.ops + ops);
                }
                Step::Empty => return Ok(empty(c, load, control, number, ops)),
            }
            if control.halted(number) {
                return Ok(ops);
            }
        }
    }

    /// One in `every` operations timed by itself.
    fn sampled<F: Fs>(
        &mut self,
        c: &Ctx<F>,
        load: &mut dyn Load<F>,
        control: &Control,
        number: u32,
        every: u64,
    ) -> Result<u64> {
        let (mut ops, mut steps) = (0, 0u64);
        loop {
            let from = steps.is_multiple_of(every).then(Instant::now);
            steps += 1;
            match load.step(c)? {
                Step::Did(n) => ops += n,
                Step::Empty => return Ok(empty(c, load, control, number, ops)),
            }
            if let Some(from) = from {
                self.hist.saturating_record(from.elapsed().as_nanos() as u64);
                if steps % PROGRESS == 1 {
                    control.progress(c.id, self.report.ops + ops);
                }
            }
            if control.halted(number) {
                return Ok(ops);
            }
        }
    }
}

/// What threads of this process have waited for locks; nothing in a build that does not count it.
fn lock_waits() -> Vec<LockWait> {
    #[cfg(feature = "lock-waits")]
    {
        let wait = |w: &braidfs_sync::waits::Waits| LockWait {
            lock: w.lock.to_owned(),
            waits: w.waits,
            secs: w.nanos as f64 / 1e9,
        };
        braidfs_sync::waits::so_far().iter().map(wait).collect()
    }
    #[cfg(not(feature = "lock-waits"))]
    Vec::new()
}

/// What they have waited since then.
fn since(before: &[LockWait]) -> Vec<LockWait> {
    let mut now = lock_waits();
    for w in &mut now {
        if let Some(b) = before.iter().find(|b| b.lock == w.lock) {
            (w.waits, w.secs) = (w.waits - b.waits, w.secs - b.secs);
        }
    }
    now.retain(|w| w.waits > 0);
    now
}

/// No operation timed.
fn plain<F: Fs>(c: &Ctx<F>, load: &mut dyn Load<F>, control: &Control, number: u32) -> Result<u64> {
    let mut ops = 0;
    loop {
        match load.step(c) {
            Ok(Step::Did(n)) => ops += n,
            Ok(Step::Empty) => return Ok(empty(c, load, control, number, ops)),
            // there a full disk ends the measurement, it does not fail it
            Err(e) if e.no_space() => return Ok(empty(c, load, control, number, ops)),
            Err(e) => return Err(e),
        }
        if control.halted(number) {
            return Ok(ops);
        }
    }
}

fn empty<F: Fs>(c: &Ctx<F>, load: &dyn Load<F>, control: &Control, number: u32, ops: u64) -> u64 {
    if load.empty_ends_all(c) {
        control.halt(number);
    }
    ops
}
