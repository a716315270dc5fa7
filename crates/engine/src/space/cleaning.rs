//! What is cleaned at this moment: by which choice segments are taken (`victim` makes it), and which ones are being emptied.

use braidfs_format::TxId;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// How a segment to clean is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// A segment with a higher share of valid blocks, in percent, is not worth moving: logs recycle its slack, which moves
    /// nothing.
    pub valid_max: u32,
    /// By free blocks alone: room is needed now. Else by cost and benefit.
    pub greedy: bool,
}

impl Choice {
    /// Whatever gives a free segment.
    pub const ANY: Self = Self { valid_max: 95, greedy: true };
}

/// Victims of one look at most.
pub const AT_ONCE: usize = 4;

/// The segments that are being emptied, each as `group << 32 | segment`: they are not to be recycled meanwhile.
#[derive(Debug)]
pub(super) struct Cleaning {
    segments: [AtomicU64; AT_ONCE],
    /// As of which transaction there was no victim, and with what share of valid blocks at most: `tx << 8 | percent`.
    no_victim: AtomicU64,
}

impl Default for Cleaning {
    fn default() -> Self {
        Self { segments: [const { AtomicU64::new(u64::MAX) }; AT_ONCE], no_victim: AtomicU64::new(0) }
    }
}

impl Cleaning {
    pub fn clear(&self) {
        self.segments.iter().for_each(|s| s.store(u64::MAX, Relaxed));
    }
    /// One that is the `nth` of its look.
    pub fn add(&self, group: u32, segment: u32, nth: usize) {
        if nth == 0 {
            self.clear();
        }
        self.segments[nth % AT_ONCE].store(u64::from(group) << 32 | u64::from(segment), Relaxed);
    }
    pub fn has(&self, group: u32, segment: u32) -> bool {
        self.segments.iter().any(|s| s.load(Relaxed) == u64::from(group) << 32 | u64::from(segment))
    }
    /// The group leaves the domain.
    pub fn forget_group(&self, group: u32) {
        for s in &self.segments {
            let now = s.load(Relaxed);
            if now >> 32 == u64::from(group) {
                let _ = s.compare_exchange(now, u64::MAX, Relaxed, Relaxed);
            }
        }
    }
    /// Whether there was none as of this transaction: what is valid changes with commits alone.
    pub fn has_no_victim(&self, now: TxId, how: Choice) -> bool {
        let none = self.no_victim.load(Relaxed);
        none >> 8 == now.0 && u64::from(how.valid_max) <= none & 0xff
    }
    pub fn note_no_victim(&self, now: TxId, how: Choice) {
        self.no_victim.store(now.0 << 8 | u64::from(how.valid_max), Relaxed);
    }
}
