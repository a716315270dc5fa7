//! Options that can change while the volume is mounted (`mount -o remount`). Read on hot paths: atomics that are hardly
//! ever written.

use crate::types::{AtimeMode, MountOptions};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64};
use std::time::Duration;

/// See the module.
#[derive(Debug)]
pub struct RuntimeOptions {
    atime: AtomicU8,
    nodiratime: AtomicBool,
    lazytime: AtomicBool,
    /// Age at which a running transaction is committed, in milliseconds.
    commit_interval: AtomicU64,
}

impl RuntimeOptions {
    /// As they are at the mount.
    pub fn new(options: &MountOptions) -> Self {
        let new = Self {
            atime: AtomicU8::new(0),
            nodiratime: AtomicBool::new(options.nodiratime),
            lazytime: AtomicBool::new(options.lazytime),
            commit_interval: AtomicU64::new(0),
        };
        new.set_atime(options.atime);
        new.set_commit_interval(options.commit_interval);
        new
    }

    /// When access times change, at this moment: [`MountOptions::atime`].
    pub fn atime(&self) -> AtimeMode {
        match self.atime.load(Relaxed) {
            0 => AtimeMode::Relatime,
            1 => AtimeMode::Noatime,
            _ => AtimeMode::Strictatime,
        }
    }

    /// Whether directories have no access times, at this moment: [`MountOptions::nodiratime`].
    pub fn nodiratime(&self) -> bool {
        self.nodiratime.load(Relaxed)
    }

    /// What was said, at this moment, of times that may wait in memory: [`MountOptions::lazytime`].
    pub fn lazytime(&self) -> bool {
        self.lazytime.load(Relaxed)
    }

    /// Age at which a running transaction is committed, at this moment: [`MountOptions::commit_interval`].
    pub fn commit_interval(&self) -> Duration {
        Duration::from_millis(self.commit_interval.load(Relaxed))
    }

    /// Changes [`Self::atime`] for operations that begin from now on.
    pub fn set_atime(&self, mode: AtimeMode) {
        let mode = match mode {
            AtimeMode::Relatime => 0,
            AtimeMode::Noatime => 1,
            AtimeMode::Strictatime => 2,
        };
        self.atime.store(mode, Relaxed);
    }

    /// Changes [`Self::nodiratime`] for operations that begin from now on.
    pub fn set_nodiratime(&self, on: bool) {
        self.nodiratime.store(on, Relaxed);
    }

    /// Changes what [`Self::lazytime`] tells.
    pub fn set_lazytime(&self, on: bool) {
        self.lazytime.store(on, Relaxed);
    }

    /// Changes [`Self::commit_interval`]; the background thread sees it at its next look.
    pub fn set_commit_interval(&self, interval: Duration) {
        self.commit_interval.store(u64::try_from(interval.as_millis()).unwrap_or(u64::MAX), Relaxed);
    }
}
