//! A test by the clock, without valgrind: nanoseconds per operation with so many threads at once, each on a CPU of its own.
//!
//! Each measurement is a process of its own ([`child`]), since switches for experiments are read once: it runs the same
//! load on the same volume as [`crate::cell`], an image in memory, without threads in the background. A round is some
//! untimed steps, then timed ones until [`ROUND`] is over or the load's files are used up. Between rounds everything is
//! made durable and the files are made again, which is not timed. So no commit is in the figures.

use crate::cell::{context, mount};
use crate::drive::work_dir;
use crate::matrix::{CellId, Domains};
use crate::{Error, Result, host};
use fxmark::suite::{TestId, build};
use fxmark::worker::{Aged, Ctx, Load, Scale, Sizes, Step};
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

/// Timed part of a round.
const ROUND: Duration = Duration::from_millis(20);
/// Steps before it.
const WARM: usize = 64;
/// Steps between looks at the clock.
const LOOK: usize = 32;
/// Rounds of a process.
const ROUNDS: usize = 5;
const SCALE: Scale = Scale { files: 4096, entries: 128, blocks: 4096, branch: 4, aged: Aged::SMALL, sizes: Sizes::OWN };

/// What was measured of a test.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Timed {
    /// Test of the suite.
    pub test: String,
    /// Number of threads that worked at once.
    pub workers: usize,
    /// Names of the switches for experiments that were on; empty: none.
    pub switches: String,
    /// Nanoseconds per operation of all threads together, one figure for each round.
    pub ns: Vec<f64>,
}

impl Timed {
    /// The median of the rounds.
    pub fn median(&self) -> f64 {
        fxmark::stats::median(&self.ns)
    }
}

/// What is to be timed: a test, threads, and names of switches for experiments (empty: none).
pub type Job = (String, usize, String);

/// Times each of them in `repetitions` processes: all once, then all again.
///
/// # Errors
/// A process that failed.
pub fn run(jobs: &[Job], repetitions: usize) -> Result<Vec<Timed>> {
    let timed = |(test, workers, switches): &Job| Timed {
        test: test.clone(),
        workers: *workers,
        switches: switches.clone(),
        ns: Vec::new(),
    };
    let mut all: Vec<Timed> = jobs.iter().map(timed).collect();
    for _ in 0..repetitions {
        for t in &mut all {
            t.ns.extend(process(&t.test, t.workers, &t.switches)?);
        }
    }
    Ok(all)
}

fn process(test: &str, workers: usize, switches: &str) -> Result<Vec<f64>> {
    let this = std::env::current_exe().map_err(|e| Error::io(Path::new("this program"), e))?;
    let dir = work_dir()?;
    let mut child = Command::new(this);
    child.args(["timed", test, &workers.to_string(), if switches.is_empty() { "-" } else { switches }]);
    let out = child.current_dir(&dir).stderr(std::process::Stdio::inherit()).output();
    let out = out.map_err(|e| Error::io(Path::new("a process that is timed"), e))?;
    if !out.status.success() {
        return Err(Error::Cell(format!("{test} with {workers} threads, switches `{switches}`: failed, see above")));
    }
    Ok(serde_json::from_slice(&out.stdout)?)
}

/// What a process of [`run`] does, in a directory for its image: prints the figures of its rounds.
///
/// # Errors
/// Of its arguments, or of the volume. A failed operation ends the process: other threads wait for this one's.
pub fn child(args: &[String]) -> Result<()> {
    let [test, workers, switches] = args else {
        return Err(Error::Cell("this is for `braidfs-conflicts time`".into()));
    };
    if switches != "-" {
        host::turn_on(switches)?;
    }
    let workers: usize = workers.parse().map_err(|_| Error::Cell("no number of threads".into()))?;
    let test: TestId = test.parse()?;
    let id = CellId::usual(test.to_string(), workers, Domains::One);
    let fs = Arc::new(mount(&id)?);
    let cpus = fxmark::sys::allowed().map_err(|e| Error::io(Path::new("the CPUs of this process"), e))?;
    let together = Barrier::new(workers);
    let halt = AtomicBool::new(false);
    let one = |id: usize| -> Result<Vec<(u64, Instant, Instant)>> {
        if let Some(&cpu) = cpus.get(id % cpus.len().max(1)) {
            fxmark::sys::pin(cpu).map_err(|e| Error::io(Path::new("pinning a thread"), e))?;
        }
        let context = context(&fs, (id, workers), SCALE);
        let mut load = build(&test, &context);
        if id == 0 {
            load.share(&context)?;
        }
        together.wait();
        load.prepare(&context)?;
        together.wait();
        load.after_prepare(&context)?;
        let mut rounds = Vec::new();
        for _ in 0..ROUNDS {
            if together.wait().is_leader() {
                fs.volume.sync()?;
                halt.store(false, Relaxed);
            }
            together.wait();
            for _ in 0..WARM {
                load.step(&context)?;
            }
            together.wait();
            rounds.push(round(&context, &mut *load, &halt)?);
            together.wait();
            load.refill(&context)?;
        }
        Ok(rounds)
    };
    let all: Vec<Vec<(u64, Instant, Instant)>> = std::thread::scope(|s| {
        let one = &one;
        let start = |id| {
            s.spawn(move || {
                one(id).unwrap_or_else(|e| {
                    eprintln!("braidfs-conflicts: {e}");
                    std::process::exit(2)
                })
            })
        };
        let all: Vec<_> = (0..workers).map(start).collect();
        all.into_iter().map(|t| t.join().map_err(|_| Error::Died)).collect::<Result<_>>()
    })?;
    let ns: Vec<f64> = (0..ROUNDS).filter_map(|r| together_ns(all.iter().map(|w| w[r]))).collect();
    println!("{}", serde_json::to_string(&ns)?);
    Ok(())
}

/// Steps until the time is over, or anybody's files are used up: operations, begin and end.
fn round(
    c: &Ctx<braidfs_vfs::Library>,
    load: &mut dyn Load<braidfs_vfs::Library>,
    halt: &AtomicBool,
) -> Result<(u64, Instant, Instant)> {
    let begin = Instant::now();
    let (mut ops, mut now) = (0, begin);
    while !halt.load(Relaxed) && now - begin < ROUND {
        for _ in 0..LOOK {
            match load.step(c)? {
                Step::Did(n) => ops += n,
                Step::Empty => {
                    halt.store(true, Relaxed);
                    break;
                }
            }
        }
        now = Instant::now();
    }
    Ok((ops, begin, now))
}

fn together_ns(workers: impl Iterator<Item = (u64, Instant, Instant)>) -> Option<f64> {
    let sum = workers.reduce(|a, b| (a.0 + b.0, a.1.min(b.1), a.2.max(b.2)))?;
    (sum.0 > 0).then(|| (sum.2 - sum.1).as_nanos() as f64 / sum.0 as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_timed_together() {
        let t = Instant::now();
        let ms = |n| t + Duration::from_millis(n);
        let ns = together_ns([(1000, ms(0), ms(2)), (3000, ms(1), ms(4))].into_iter());
        assert_eq!(ns, Some(1000.0));
        assert_eq!(together_ns([(0, ms(0), ms(2))].into_iter()), None);
    }
}
