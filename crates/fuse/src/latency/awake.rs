//! Keeping idle CPUs from halting while requests come: the system-wide wish of no wake-up latency (PM QoS). Idle CPUs
//! poll then, and are woken without an interrupt. It costs power, and turbo of the others.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};

const DEVICE: &str = "/dev/cpu_dma_latency";
/// So many requests in a tick are quick succession.
const BUSY: u64 = 4;
/// Ticks without, until CPUs may halt again.
const PATIENCE: u32 = 25;

/// Whether the wish can be expressed: the file is opened and closed.
pub(super) fn check() -> io::Result<()> {
    wish().map(drop).map_err(|e| io::Error::new(e.kind(), format!("latency=low needs root and {DEVICE}: {e}")))
}

/// The wish; it holds as long as the file is open.
fn wish() -> io::Result<File> {
    let mut file = OpenOptions::new().write(true).open(DEVICE)?;
    file.write_all(&0i32.to_ne_bytes())?;
    Ok(file)
}

/// The wish while it is held.
#[derive(Debug, Default)]
pub(super) struct Awake {
    held: Option<File>,
    left: u32,
}

impl Awake {
    /// After a tick with so many requests.
    pub fn tick(&mut self, requests: u64) {
        if self.wanted(requests) != self.held.is_some() {
            // Was possible when the mount was made; where not any more, requests are slower.
            self.held = match self.held {
                None => wish().inspect_err(|e| tracing::debug!(error = %e, DEVICE)).ok(),
                Some(_) => None,
            };
        }
    }

    fn wanted(&mut self, requests: u64) -> bool {
        self.left = if requests >= BUSY { PATIENCE } else { self.left.saturating_sub(1) };
        self.left > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn awake_while_requests_come_and_a_little_longer() {
        let mut a = Awake::default();
        assert!(!a.wanted(0) && !a.wanted(BUSY - 1));
        assert!(a.wanted(BUSY));
        assert_eq!((0..100).filter(|_| a.wanted(0)).count() as u32, PATIENCE - 1);
        assert!(a.wanted(1000) && a.wanted(0) && a.wanted(1000));
    }
}
