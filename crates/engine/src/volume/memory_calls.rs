//! How who is short of memory calls the thread of the background that writes dirty pages.

use braidfs_sync::{IdleCondvar, Mutex, rank};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Asks the background's thread to write dirty pages.
#[derive(Debug, Default)]
pub(crate) struct Calls {
    /// Whether somebody has asked since the thread began: so that others need no lock.
    asked: AtomicBool,
    state: Mutex<Wanted, rank::StopFlag>,
    wake: IdleCondvar,
}

#[derive(Debug, Default, PartialEq, Eq, Clone, Copy)]
enum Wanted {
    #[default]
    Nothing,
    Work,
    End,
}

impl Calls {
    /// The thread looks whose dirty pages are to be written (`write_back.rs`).
    pub fn ask(&self) {
        // looked at first: all threads that are short of memory come here
        if !self.asked.load(Relaxed) && !self.asked.swap(true, Relaxed) {
            self.set(Wanted::Work);
        }
    }

    fn set(&self, wanted: Wanted) {
        let mut state = self.state.lock();
        if *state != Wanted::End {
            *state = wanted;
        }
        drop(state);
        self.wake.notify_all();
    }

    /// The thread that serves calls ends.
    pub fn end(&self) {
        self.set(Wanted::End);
    }

    /// There will be such a thread.
    pub fn begin(&self) {
        *self.state.lock() = Wanted::Nothing;
        self.asked.store(false, Relaxed);
    }

    /// Waits until somebody asks; false at the end.
    pub fn wait(&self) -> bool {
        let mut state = self.state.lock();
        while *state == Wanted::Nothing {
            self.wake.wait(&mut state);
        }
        if *state == Wanted::Work {
            *state = Wanted::Nothing;
            self.asked.store(false, Relaxed);
        }
        *state != Wanted::End
    }
}
