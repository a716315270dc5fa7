//! Signals of the parent, which waits for them where it wants to. Low-level module: masks of signals.

use std::io;
use std::mem::MaybeUninit;
use std::time::{Duration, Instant};

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Event {
    ChildEnded,
    Stop,
}

/// Signals that wait until they are asked for. Without threads and without handlers, which a forked process would inherit.
pub(super) struct HeldSignals {
    held: libc::sigset_t,
    before: libc::sigset_t,
}

impl HeldSignals {
    /// Those that a program before this one held back in this process; `blocked` were so before it did.
    pub fn held(blocked: u64) -> io::Result<Self> {
        let mut signals = Self::hold()?;
        // SAFETY: the first call makes `before` a set, which the others change; numbers beyond those of signals are refused.
        unsafe {
            libc::sigemptyset(&raw mut signals.before);
            for signal in (1..=64).filter(|n| blocked & (1 << (n - 1)) != 0) {
                libc::sigaddset(&raw mut signals.before, signal);
            }
        }
        Ok(signals)
    }

    /// Signals that were blocked before: bit n - 1 is signal n.
    pub fn blocked_before(&self) -> u64 {
        // SAFETY: `before` is a set that the system made.
        let has = |n: &i32| unsafe { libc::sigismember(&raw const self.before, *n) } == 1;
        (1..=64).filter(has).map(|n| 1 << (n - 1)).sum()
    }

    pub fn hold() -> io::Result<Self> {
        let (mut held, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: the first call makes `held` a set, which the next ones change; the last one reads it and makes `before`
        // one. All pointers are valid for the calls.
        let (rc, held, before) = unsafe {
            libc::sigemptyset(held.as_mut_ptr());
            for signal in [libc::SIGCHLD, libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
                libc::sigaddset(held.as_mut_ptr(), signal);
            }
            let rc = libc::pthread_sigmask(libc::SIG_BLOCK, held.as_ptr(), before.as_mut_ptr());
            if rc != 0 {
                return Err(io::Error::from_raw_os_error(rc));
            }
            (rc, held.assume_init(), before.assume_init())
        };
        debug_assert_eq!(rc, 0);
        // Ignored, as a starting program may have left it, children are not waited for by waitpid.
        // SAFETY: no handler is set; the default action of SIGCHLD is none.
        unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
        Ok(Self { held, before })
    }

    /// As it was before: for the process that serves.
    pub fn release(&self) {
        // SAFETY: `before` is a set that the system made.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, std::ptr::null_mut()) };
    }

    /// Waits for so long; true, and at once: we are asked to end.
    pub fn stop_within(&self, wait: Duration) -> io::Result<bool> {
        let end = Instant::now() + wait;
        loop {
            match self.next(end.saturating_duration_since(Instant::now()))? {
                Some(Event::Stop) => return Ok(true),
                // of a process that was waited for
                Some(Event::ChildEnded) => {}
                None => return Ok(false),
            }
        }
    }

    /// The next signal, waited for at most so long.
    pub fn next(&self, wait: Duration) -> io::Result<Option<Event>> {
        let end = Instant::now() + wait;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let timeout =
                libc::timespec { tv_sec: left.as_secs() as libc::time_t, tv_nsec: left.subsec_nanos().into() };
            // SAFETY: the set was made by `hold`; no siginfo is wanted; the timeout lives until the call returns.
            let signal = unsafe { libc::sigtimedwait(&raw const self.held, std::ptr::null_mut(), &raw const timeout) };
            match signal {
                libc::SIGCHLD => return Ok(Some(Event::ChildEnded)),
                -1 => match io::Error::last_os_error() {
                    e if e.raw_os_error() == Some(libc::EAGAIN) => return Ok(None),
                    e if e.kind() == io::ErrorKind::Interrupted => {}
                    e => return Err(e),
                },
                _ => return Ok(Some(Event::Stop)),
            }
        }
    }
}

impl Drop for HeldSignals {
    fn drop(&mut self) {
        self.release();
    }
}
