//! Requests that fail by what no user can have caused, in the log: the first with an error, and from then on one a minute
//! with this error, which tells how many there were since. A domain that is read-only fails each write of each program.
//!
//! Does not promise: every error. Of [`TEXTS`] different ones in a minute the others are counted with the next that is told.

use braidfs::Error;
use braidfs_sync::{Mutex, rank};
use std::time::{Duration, Instant};

/// How long an error that was told is only counted.
const PAUSE: Duration = Duration::from_secs(60);
/// Different errors that are told within [`PAUSE`].
const TEXTS: usize = 16;

/// Of the process: an error is turned into its errno where no mount is at hand.
static TOLD: Mutex<Told, rank::FailureLog> = Mutex::new(Told { texts: Vec::new(), others: 0 });

#[derive(Debug)]
struct Told {
    texts: Vec<Text>,
    /// Requests whose errors found no place in `texts`.
    others: u64,
}

#[derive(Debug)]
struct Text {
    error: String,
    told: Instant,
    left_out: u64,
}

/// Tells that a request failed.
pub(crate) fn tell(e: &Error) {
    let error = e.to_string();
    // the lock is not held while it is logged
    let told = TOLD.lock().may_tell(&error, Instant::now());
    if let Some(left_out) = told {
        let left_out = (left_out > 0).then_some(left_out);
        tracing::error!(error, left_out, "operation failed");
    }
}

impl Told {
    /// Whether there may be a line, and how many were left out before it.
    fn may_tell(&mut self, error: &str, now: Instant) -> Option<u64> {
        let over = |t: &Text| now.saturating_duration_since(t.told) >= PAUSE;
        if let Some(text) = self.texts.iter_mut().find(|t| t.error == error) {
            if !over(text) {
                text.left_out += 1;
                return None;
            }
            text.told = now;
            return Some(std::mem::take(&mut text.left_out));
        }
        if self.texts.len() >= TEXTS {
            let others = &mut self.others;
            self.texts.retain(|t| {
                *others += if over(t) { t.left_out } else { 0 };
                !over(t)
            });
        }
        if self.texts.len() >= TEXTS {
            self.others += 1;
            return None;
        }
        self.texts.push(Text { error: error.into(), told: now, left_out: 0 });
        Some(std::mem::take(&mut self.others))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_told_once_a_minute() {
        let mut told = Told { texts: Vec::new(), others: 0 };
        let start = Instant::now();
        assert_eq!((0..100).filter_map(|_| told.may_tell("a", start)).collect::<Vec<_>>(), [0]);
        assert_eq!(told.may_tell("b", start), Some(0), "another one is told at once");
        let later = start + PAUSE;
        assert_eq!(told.may_tell("a", later), Some(99));
        assert_eq!(told.may_tell("a", later), None);
    }

    #[test]
    fn many_different_errors_do_not_flood_the_log() {
        let mut told = Told { texts: Vec::new(), others: 0 };
        let start = Instant::now();
        let lines = (0..100).filter(|n| told.may_tell(&n.to_string(), start).is_some()).count();
        assert_eq!(lines, TEXTS);
        assert_eq!(told.may_tell("new", start + PAUSE), Some(100 - TEXTS as u64));
        assert_eq!(told.texts.len(), 1, "old ones are forgotten");
    }
}
