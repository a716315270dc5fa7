//! What is the volume's and no domain's: options, clock, counters of memory, marks of its life.

use crate::live::LiveOptions;
use crate::types::*;
use braidfs_format::super_block::{INCOMPAT_DATA_SUMS, SuperBlock};
use crossbeam::utils::CachePadded;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};

/// What all domains of a volume share, and its operations with them: the logical clock, limits, counters. It says nothing of
/// any domain. Read-mostly: what many write has cache lines of its own.
#[derive(Debug)]
pub struct Shared {
    /// Logical time of link changes.
    pub seq: CachePadded<AtomicU64>,
    /// Options of the mount.
    pub options: MountOptions,
    /// Key of the directory hash.
    pub hash_key: [u8; 16],
    /// Checksum every data block.
    pub data_sums: bool,
    /// Largest inline file.
    pub inline_max: usize,
    /// Pages in memory, about.
    pub pages: CachePadded<AtomicI64>,
    /// Bytes of directories' names in memory, about.
    pub dir_bytes: CachePadded<AtomicI64>,
    /// Dirty pages in memory, about.
    pub dirty_pages: CachePadded<AtomicI64>,
    /// The volume stops without writing another block (`Volume::crash`).
    pub dead: AtomicBool,
    /// A forced read-only volume.
    pub read_only: AtomicBool,
    /// The volume is about to become read-only: operations are refused, what they changed so far is still committed. Set
    /// before the last commit's flip: who enters a domain after that sees it.
    pub closing: AtomicBool,
    /// Those of `options` that a remount changes.
    pub live: LiveOptions,
    /// Recovery has not made the domains agree yet: tombstones and exchanges in records count.
    pub recovering: AtomicBool,
}

impl Shared {
    /// At the mount, where recovery has not begun.
    pub fn new(options: MountOptions, sb: &SuperBlock) -> Self {
        Self {
            seq: CachePadded::new(AtomicU64::new(0)),
            hash_key: sb.hash_key,
            data_sums: sb.incompat.get() & INCOMPAT_DATA_SUMS != 0,
            inline_max: usize::from(sb.inline_max.get()),
            pages: CachePadded::new(AtomicI64::new(0)),
            dir_bytes: CachePadded::new(AtomicI64::new(0)),
            dirty_pages: CachePadded::new(AtomicI64::new(0)),
            dead: AtomicBool::new(false),
            read_only: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            live: LiveOptions::new(&options),
            recovering: AtomicBool::new(true),
            options,
        }
    }
    /// The next logical time: above all before in this mount, and above `than`, the latest of the inodes whose names change
    /// now. So who takes a name has it later than who left it, also where the clock was set back since an earlier mount.
    pub fn next_seq(&self, than: u64) -> u64 {
        let now = self.now();
        let now = (now.sec as u64).wrapping_mul(1_000_000_000).wrapping_add(u64::from(now.nsec));
        let mut old = self.seq.load(Ordering::Relaxed);
        loop {
            let new = now.max(old.max(than).saturating_add(1));
            match self.seq.compare_exchange_weak(old, new, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return new,
                Err(o) => old = o,
            }
        }
    }
    /// So many pages have left memory, of them so many dirty ones. Where there were none it touches no line that all files
    /// share.
    pub fn left(&self, pages: usize, dirty: usize) {
        for (count, gone) in [(&self.pages, pages), (&self.dirty_pages, dirty)] {
            if gone > 0 {
                count.fetch_sub(gone as i64, Ordering::Relaxed);
            }
        }
    }
    /// Time of day.
    pub fn now(&self) -> Timestamp {
        if let Some(f) = self.options.clock {
            return f();
        }
        // as exact as a kernel's file times, and far cheaper
        let t = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
        Timestamp { sec: t.tv_sec, nsec: t.tv_nsec as u32 }
    }
}
