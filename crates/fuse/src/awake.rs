//! Keeping idle CPUs from halting while requests come in quick succession (`latency=low`).
//!
//! A process that waits for a request and the thread that serves it wake each other on two CPUs, and the CPU that is
//! woken has nothing else to do: it is halted. Waking a halted CPU takes 1 to 10 µs on a bare machine (more where deep
//! sleep states are allowed), and 15 to 45 µs in a virtual one, where each interrupt between CPUs goes through the
//! hypervisor; the work for most requests takes 2 to 5 µs. A system-wide wish of no wake-up latency (`PM QoS`,
//! `/dev/cpu_dma_latency`) lets idle CPUs poll instead, and then no interrupt is sent at all. It costs power, and turbo
//! of the others, so it is held only while there are requests, and only where the user asked for it.

use crossbeam::utils::CachePadded;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

const DEVICE: &str = "/dev/cpu_dma_latency";
/// How often requests are counted.
const TICK: Duration = Duration::from_millis(10);
/// So many in a tick are quick succession.
const BUSY: u64 = 10;
/// Ticks without, until CPUs may halt again.
const PATIENCE: u32 = 10;

/// Requests of each serving thread. A thread writes only its own line.
pub(crate) struct Served(Box<[CachePadded<AtomicU64>]>);

impl Served {
    /// For so many threads.
    pub fn new(threads: usize) -> Self {
        Self((0..threads).map(|_| CachePadded::default()).collect())
    }

    /// Thread `i` received a request.
    pub fn count(&self, i: usize) {
        // Only thread `i` writes: no locked instruction is needed.
        self.0[i].store(self.0[i].load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    fn total(&self) -> u64 {
        self.0.iter().fold(0, |sum, n| sum.wrapping_add(n.load(Ordering::Relaxed)))
    }
}

/// Whether the wish can be expressed: the file is opened and closed.
///
/// # Errors
/// Not root, or a kernel without PM QoS.
pub(crate) fn check() -> io::Result<()> {
    wish().map(drop).map_err(|e| io::Error::new(e.kind(), format!("latency=low needs root and {DEVICE}: {e}")))
}

/// The wish; it holds as long as the file is open.
fn wish() -> io::Result<File> {
    let mut file = OpenOptions::new().write(true).open(DEVICE)?;
    file.write_all(&0i32.to_ne_bytes())?;
    Ok(file)
}

/// Looks after the wish until the other end of `end` is gone.
pub(crate) fn watch(served: &Served, end: &Receiver<()>) {
    let (mut held, mut state, mut before) = (None, State::default(), served.total());
    while end.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
        let now = served.total();
        let wanted = state.tick(now.wrapping_sub(before));
        before = now;
        if wanted != held.is_some() {
            // Was possible when the mount was made; where not any more, requests are slower.
            held = if wanted { wish().inspect_err(|e| tracing::debug!(error = %e, DEVICE)).ok() } else { None };
        }
    }
}

/// Whether requests are coming.
#[derive(Debug, Default)]
struct State {
    left: u32,
}

impl State {
    /// After a tick with so many requests: should CPUs stay awake?
    fn tick(&mut self, requests: u64) -> bool {
        self.left = if requests >= BUSY { PATIENCE } else { self.left.saturating_sub(1) };
        self.left > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn awake_while_requests_come_and_a_little_longer() {
        let mut s = State::default();
        assert!(!s.tick(0) && !s.tick(BUSY - 1));
        assert!(s.tick(BUSY));
        assert_eq!((0..20).filter(|_| s.tick(0)).count() as u32, PATIENCE - 1);
        assert!(s.tick(1000) && s.tick(0) && s.tick(1000));
    }

    #[test]
    fn counts_of_all_threads() {
        let served = Served::new(3);
        for i in [0, 2, 2] {
            served.count(i);
        }
        assert_eq!(served.total(), 3);
    }
}
