//! Times at which the whole machine stood still: a virtual machine whose host gave its CPUs to others.
//!
//! A guest need not be told of that (`steal` may stay 0), and a pause of 20 ms is a 99th percentile of everything that ran
//! then. So a thread of real-time priority on each CPU sleeps a millisecond at a time and notes when it wakes late. What runs on a
//! CPU does not make it late, except for what the kernel does without a look at its run queue, which is over before all CPUs
//! are late at once.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const SLEEP: Duration = Duration::from_millis(1);
/// Later than this, and the CPU stood still.
const LATE: Duration = Duration::from_millis(5);

/// From when to when, since the watch began.
type Gap = (Duration, Duration);

/// Watches for pauses of the machine from its making to [`PauseWatch::end`].
#[derive(Debug)]
pub struct PauseWatch {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Vec<Gap>>>,
}

impl PauseWatch {
    /// With a thread on each of these CPUs.
    ///
    /// # Errors
    /// No thread, or no real-time priority for one (root has it): without that lateness says nothing.
    pub fn begin(cpus: &[usize]) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let begun = Instant::now();
        let (tell, ready) = std::sync::mpsc::channel();
        let mut watch = Self { stop: stop.clone(), threads: Vec::new() };
        for &cpu in cpus {
            let (stop, tell) = (stop.clone(), tell.clone());
            let work = move || {
                let first = super::pin(cpu).and_then(|()| first_in_line());
                let failed = first.is_err();
                // who waits for it is there until all have told
                let _ = tell.send(first);
                if failed { Vec::new() } else { gaps(begun, &stop) }
            };
            watch.threads.push(std::thread::Builder::new().name("fxmark-pauses".into()).spawn(work)?);
        }
        // a watch that is dropped ends its threads
        ready.iter().take(cpus.len()).collect::<io::Result<()>>()?;
        Ok(watch)
    }

    /// How long all its CPUs stood still at once, in all.
    pub fn end(mut self) -> Duration {
        self.stop.store(true, Ordering::Relaxed);
        let cpus: Vec<Vec<Gap>> = self.threads.drain(..).map(|t| t.join().unwrap_or_default()).collect();
        at_once(&cpus)
    }
}

impl Drop for PauseWatch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// The calling thread runs before all that have no real-time priority.
fn first_in_line() -> io::Result<()> {
    let first = libc::sched_param { sched_priority: 1 };
    // SAFETY: the parameter is read during the call only
    match unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const first) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn gaps(begun: Instant, stop: &AtomicBool) -> Vec<Gap> {
    let (mut late, mut before) = (Vec::new(), begun.elapsed());
    while !stop.load(Ordering::Relaxed) {
        std::thread::sleep(SLEEP);
        let now = begun.elapsed();
        if now - before > SLEEP + LATE {
            late.push((before + SLEEP, now));
        }
        before = now;
    }
    late
}

/// What all have in common of their gaps.
fn at_once(cpus: &[Vec<Gap>]) -> Duration {
    let Some((first, others)) = cpus.split_first() else { return Duration::ZERO };
    let common = others.iter().fold(first.clone(), |common, gaps| {
        let both = |a: &Gap, b: &Gap| Some((a.0.max(b.0), a.1.min(b.1))).filter(|(from, to)| from < to);
        common.iter().flat_map(|a| gaps.iter().filter_map(move |b| both(a, b))).collect()
    });
    common.iter().map(|(from, to)| *to - *from).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gap(from: u64, to: u64) -> Gap {
        (Duration::from_millis(from), Duration::from_millis(to))
    }

    #[test]
    fn a_pause_is_what_all_cpus_missed() {
        let ms = Duration::from_millis;
        assert_eq!(at_once(&[]), ms(0));
        assert_eq!(at_once(&[vec![gap(10, 30), gap(50, 60)]]), ms(30));
        let (a, b) = (vec![gap(10, 30), gap(50, 60), gap(90, 99)], vec![gap(20, 55), gap(70, 80), gap(91, 93)]);
        assert_eq!(at_once(&[a.clone(), b.clone()]), ms(10 + 5 + 2));
        assert_eq!(at_once(&[a, b, vec![gap(29, 52)]]), ms(1 + 2));
    }

    #[test]
    fn a_watch_ends_or_says_why_there_is_none() {
        let cpu = crate::sys::allowed().unwrap()[0];
        match PauseWatch::begin(&[cpu]) {
            // a busy host may have stopped us meanwhile
            Ok(watch) => assert!(watch.end() < Duration::from_secs(3600)),
            Err(e) => assert_eq!(e.kind(), io::ErrorKind::PermissionDenied, "{e}"),
        }
    }
}
