//! Which checkpoints of a domain have begun, and which have ended.

use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Which checkpoints of a domain have begun, and which have ended. Their numbers are those of this mount.
///
/// A checkpoint covers all that was committed when it began. So it does for whoever asks before it begins, and whoever asks
/// later needs the next one.
#[derive(Debug, Default)]
pub(super) struct Checkpointing {
    begun: AtomicU64,
    ended: AtomicU64,
}

impl Checkpointing {
    /// The first one that begins after this call: it finds all that was committed before.
    pub(super) fn next(&self) -> u64 {
        // pairs with `begin`: either that one has this thread's commit, or this call its number
        fence(Ordering::SeqCst);
        self.begun.load(Ordering::Relaxed) + 1
    }
    /// One begins, under `checkpoint_lock`; its number. What it covers is looked at afterwards.
    pub(super) fn begin(&self) -> u64 {
        let number = self.begun.fetch_add(1, Ordering::Relaxed) + 1;
        fence(Ordering::SeqCst);
        number
    }
    /// It is durable. Under `checkpoint_lock`.
    pub(super) fn end(&self, number: u64) {
        self.ended.store(number, Ordering::Relaxed);
    }
    /// Whether `number`, or a later one, has ended. Under `checkpoint_lock`.
    pub(super) fn has_ended(&self, number: u64) -> bool {
        self.ended.load(Ordering::Relaxed) >= number
    }
}
