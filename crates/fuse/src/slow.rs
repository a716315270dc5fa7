//! Slow operations in the log (`-o slow=MILLISECONDS`): what was asked, by whom, and where the time went.
//!
//! Without the option nothing of this runs. With it the clock is read for each request, the thread that serves it is
//! watched ([`braidfs_sync::phases`]), and so is the one of the engine's that it is handed to. What is told of the threads:
//! the wait before the work began (of what is handed on), what the engine waited for, the work itself by the thread's time on a CPU,
//! and the rest: locks, and a CPU that others had.
//!
//! Does not promise: every slow operation; there are at most [`LINES`] lines a second, and the next one tells how many were
//! left out.

use crate::abi::op;
use crate::node::WireId;
use braidfs_sync::phases::{self, NAMES, Times};
use braidfs_sync::{Mutex, rank};
use std::fmt::Write;
use std::time::{Duration, Instant};

/// Lines a second.
const LINES: u32 = 10;

/// Of a mount.
#[derive(Debug)]
pub(crate) struct SlowLog {
    limit: Duration,
    told: Mutex<Told, rank::SlowLog>,
}

#[derive(Debug)]
struct Told {
    since: Instant,
    lines: u32,
    left_out: u64,
}

/// What was asked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked {
    pub opcode: u32,
    pub node: u64,
    pub thread: u32,
    /// Of data, for a read or write.
    pub bytes: Option<u32>,
    /// When it was received.
    pub at: Instant,
}

impl SlowLog {
    /// Tells of operations that take longer than `limit`.
    pub fn new(limit: Duration) -> Self {
        Self { limit, told: Mutex::new(Told { since: Instant::now(), lines: 0, left_out: 0 }) }
    }

    /// The calling thread has answered the request, with an error or without, at `now`. `aside`: another thread received it.
    pub fn answered(&self, asked: &Asked, now: Instant, aside: bool, failed: bool) {
        let took = now.saturating_duration_since(asked.at);
        if took < self.limit {
            return;
        }
        if let Some(left_out) = self.may_tell(now) {
            let times = phases::so_far();
            let bytes = asked.bytes.map(tracing::field::display);
            let (op, node, thread) = (op::name(asked.opcode), WireId(asked.node), asked.thread);
            let ms = format_args!("{:.1}", took.as_secs_f64() * 1e3);
            let parts = parts(took, asked.at, times.as_ref());
            let left_out = (left_out > 0).then_some(left_out);
            tracing::warn!(op, %node, bytes, thread, %ms, %parts, aside, failed, left_out, "slow operation");
        }
    }

    /// Whether there may be another line, and how many were left out before it.
    fn may_tell(&self, now: Instant) -> Option<u64> {
        let mut told = self.told.lock();
        if now.saturating_duration_since(told.since) >= Duration::from_secs(1) {
            (told.since, told.lines) = (now, 0);
        }
        if told.lines >= LINES {
            told.left_out += 1;
            return None;
        }
        told.lines += 1;
        Some(std::mem::take(&mut told.left_out))
    }
}

/// Where the time went, in milliseconds.
fn parts(took: Duration, received: Instant, times: Option<&Times>) -> String {
    let Some(times) = times else { return "unknown".into() };
    let mut text = String::new();
    let mut part = |name: &str, d: Duration| {
        if d >= Duration::from_micros(100) {
            let space = if text.is_empty() { "" } else { " " };
            // to a String nothing fails
            let _ = write!(text, "{space}{name}={:.1}", d.as_secs_f64() * 1e3);
        }
    };
    let queue = times.since.saturating_duration_since(received);
    part("queue", queue);
    NAMES.iter().for_each(|(phase, name)| part(name, times.of(*phase)));
    part("work", times.work);
    part("wait", took.saturating_sub(queue + times.all() + times.work));
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use braidfs_sync::phases::Phase;

    #[test]
    fn the_parts_are_those_of_the_thread_that_answers() {
        let received = Instant::now();
        std::thread::sleep(Duration::from_millis(4));
        phases::watch();
        let flush = phases::enter(Phase::Flush);
        std::thread::sleep(Duration::from_millis(3));
        drop(flush);
        let text = parts(Duration::from_secs(1), received, phases::so_far().as_ref());
        phases::end();
        let names: Vec<&str> = text.split(' ').map(|p| p.split_once('=').unwrap().0).collect();
        let ms: f64 = text.split(' ').map(|p| p.split_once('=').unwrap().1.parse::<f64>().unwrap()).sum();
        assert_eq!((names[..2].to_vec(), names.last()), (vec!["queue", "flush"], Some(&"wait")), "{text}");
        assert!((ms - 1000.0).abs() < 0.5, "{text}");
        assert_eq!(parts(Duration::from_secs(1), received, None), "unknown");
    }

    #[test]
    fn the_log_is_not_flooded() {
        let log = SlowLog::new(Duration::ZERO);
        let start = Instant::now();
        let told = (0..100).filter(|_| log.may_tell(start).is_some()).count();
        assert_eq!(told, LINES as usize);
        let later = start + Duration::from_millis(1100);
        assert_eq!(log.may_tell(later), Some(90));
        assert_eq!(log.may_tell(later), Some(0));
    }
}
