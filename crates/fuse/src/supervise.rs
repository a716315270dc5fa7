//! A parent that starts the serving process anew when it dies, so that programs that come later find the files.
//!
//! The parent has one thread, no volume and no connection: it forks the serving process, waits for its end, and unless the
//! mount is gone by then (somebody unmounted it) forks another one, which recovers the volume, detaches the dead mount and
//! mounts at the same place, in this order: the directory below the mount is seen for a moment only. What is held open on
//! the dead mount stays dead: no connection outlives its process, as what was acknowledged and not synced is lost.
//!
//! [`History`] decides when it is tried again, and when no more. Low-level module: fork, signals.

use crate::daemon::{Ready, fork_child};
use crate::mount::{Found, device_of, look_at, take_over};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, kill_process, waitpid};
use std::collections::VecDeque;
use std::fmt::Display;
use std::fs::File;
use std::io::{self, Read};
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How often a serving process that dies is replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limit {
    /// So many ends ...
    pub times: u32,
    /// ... within this time are too many.
    pub within: Duration,
}

impl Default for Limit {
    fn default() -> Self {
        Self { times: 5, within: Duration::from_secs(600) }
    }
}

/// Why nothing is served any more.
#[derive(Debug, thiserror::Error)]
pub enum SuperviseError {
    /// No process can be started.
    #[error("cannot start the serving process: {0}")]
    Start(#[from] io::Error),
    /// What the first serving process said before it was ready.
    #[error("{0}")]
    Failed(String),
    /// The first one ended before it was ready, without a word.
    #[error("the serving process died before it was ready ({0})")]
    Died(String),
    /// The mount was ended, but not cleanly.
    #[error("the mount has ended, and its process failed ({0}): see its log")]
    Ended(String),
    /// As [`Limit`] says.
    #[error("gives up on {point}: {why}", point = .0.display(), why = .1)]
    GaveUp(PathBuf, String),
}

/// A start that failed is tried again so often: a damaged volume does not become sound by it.
const STARTS: u32 = 3;
/// The first wait after two ends in a row; it doubles up to the longest.
const FIRST_WAIT: Duration = Duration::from_millis(100);
const LONGEST_WAIT: Duration = Duration::from_secs(10);
/// How often a mount point is looked at that somebody has mounted over.
const COVERED_WAIT: Duration = Duration::from_secs(1);

/// The ends so far.
#[derive(Debug)]
struct History {
    limit: Limit,
    ends: VecDeque<Duration>,
    failed_starts: u32,
    wait: Duration,
}

impl History {
    fn new(limit: Limit) -> Self {
        Self { limit, ends: VecDeque::new(), failed_starts: 0, wait: Duration::ZERO }
    }

    /// A process ended at `now`, which had `served` so long (`None`: it failed to start). How long to wait before the next
    /// one.
    ///
    /// # Errors
    /// Why there is to be no next one.
    fn ended(&mut self, now: Duration, served: Option<Duration>) -> Result<Duration, String> {
        let Limit { times, within } = self.limit;
        self.ends.push_back(now);
        self.ends.retain(|end| now.saturating_sub(*end) < within);
        self.failed_starts = if served.is_some() { 0 } else { self.failed_starts + 1 };
        if self.failed_starts >= STARTS {
            return Err(format!("it could not be mounted {STARTS} times in a row"));
        }
        if self.ends.len() > times as usize {
            let seconds = within.as_secs();
            return Err(format!("its process ended more than {times} times within {seconds} seconds"));
        }
        let next = (self.wait * 2).clamp(FIRST_WAIT, LONGEST_WAIT);
        let in_a_row = self.ends.len() > 1 && served.unwrap_or_default() < 10 * next;
        self.wait = if in_a_row { next } else { Duration::ZERO };
        Ok(self.wait)
    }
}

/// Runs `work` in a process of its own, and in another one each time that it dies while the mount on `point` stands. Returns
/// when the mount has been ended: by umount(8), or by SIGTERM, SIGINT or SIGHUP to this process, which are handed on.
///
/// `ready` is called when the first process can be used. In a serving process `work` calls [`Ready::ready`] then, and
/// finds a dead mount on `point` where it is not the first one; it never returns there. `in_background`: the serving process
/// leaves the terminal when it is ready.
///
/// Must run before the process has threads.
///
/// # Errors
/// See [`SuperviseError`].
pub fn supervise<E: Display>(
    point: &Path,
    limit: Limit,
    in_background: bool,
    ready: impl FnOnce(),
    mut work: impl FnMut(&mut Ready) -> Result<(), E>,
) -> Result<(), SuperviseError> {
    let signals = HeldSignals::hold()?;
    // For who looks at processes; the one that serves has the program's name.
    let (own, watcher) = (rustix::thread::name().map_err(io::Error::from)?, c"braidfs-superv");
    let begun = Instant::now();
    let (mut history, mut ready, mut stopping) = (History::new(limit), Some(ready), false);
    // The mount of the last process that could be used.
    let mut ours = None;
    loop {
        rustix::thread::set_name(&own).map_err(io::Error::from)?;
        let mut child = Child::start(&signals, in_background, &mut work)?;
        rustix::thread::set_name(watcher).map_err(io::Error::from)?;
        let since = Instant::now();
        let told = child.wait_ready(&signals, &mut stopping)?;
        let served = match told {
            Told::Ready => {
                ours = device_of(point)?;
                if let Some(ready) = ready.take() {
                    ready();
                } else {
                    tracing::info!(point = %point.display(), pid = child.pid.as_raw_pid(), "mounted again");
                }
                Some(since)
            }
            Told::Failed(why) => {
                let status = child.wait_end(&signals, &mut stopping)?;
                match () {
                    () if stopping => {}
                    () if ready.is_some() && why.is_empty() => return Err(SuperviseError::Died(show(status))),
                    () if ready.is_some() => return Err(SuperviseError::Failed(why)),
                    () => tracing::error!(point = %point.display(), error = %why, "cannot be mounted again"),
                }
                None
            }
        };
        let mut status = child.status;
        if served.is_some() {
            status = Some(child.wait_end(&signals, &mut stopping)?);
        }
        let status = status.map_or_else(String::new, show);
        let served = served.map(|since| since.elapsed());
        let found = look_at(point, ours);
        if stopping {
            if found == Found::Dead {
                take_over(point)?;
            }
            return Ok(());
        }
        // A process that failed to start may have detached the dead mount already.
        if served.is_some() && found == Found::Gone {
            return if child.succeeded() { Ok(()) } else { Err(SuperviseError::Ended(status)) };
        }
        if served.is_some() {
            tracing::error!(point = %point.display(), %status, "the serving process died: mounting again");
        }
        let wait =
            history.ended(begun.elapsed(), served).map_err(|why| SuperviseError::GaveUp(point.to_owned(), why))?;
        if !until_free(point, ours, served.is_some(), wait, &signals)? {
            return Ok(());
        }
    }
}

/// Waits for `wait`, and until nobody else has mounted over the dead mount. False: the mount is to end.
fn until_free(
    point: &Path,
    ours: Option<(u32, u32)>,
    stood: bool,
    wait: Duration,
    signals: &HeldSignals,
) -> io::Result<bool> {
    let (mut wait, mut told) = (wait, false);
    loop {
        if signals.next(wait)? == Some(Event::Stop) {
            if look_at(point, ours) == Found::Dead {
                take_over(point)?;
            }
            return Ok(false);
        }
        match look_at(point, ours) {
            Found::Dead => return Ok(true),
            Found::Gone if stood => {
                tracing::info!(point = %point.display(), "unmounted meanwhile");
                return Ok(false);
            }
            Found::Gone => return Ok(true),
            Found::Covered => {}
        }
        if !told {
            tracing::warn!(point = %point.display(), "somebody has mounted over the dead mount: waiting for its end");
            told = true;
        }
        wait = COVERED_WAIT;
    }
}

/// What a serving process says first.
enum Told {
    Ready,
    /// Why not; empty: it died without a word.
    Failed(String),
}

/// A serving process.
struct Child {
    pid: Pid,
    pipe: File,
    status: Option<WaitStatus>,
}

impl Child {
    fn start<E: Display>(
        signals: &HeldSignals,
        in_background: bool,
        work: &mut impl FnMut(&mut Ready) -> Result<(), E>,
    ) -> io::Result<Self> {
        let (pid, pipe) = fork_child(in_background, |ready| {
            signals.release();
            work(ready)
        })?;
        let pid = Pid::from_raw(pid).ok_or_else(|| io::Error::other("fork returned no process"))?;
        Ok(Self { pid, pipe: pipe.into(), status: None })
    }

    /// Waits until the process can be used, or has ended.
    fn wait_ready(&mut self, signals: &HeldSignals, stopping: &mut bool) -> io::Result<Told> {
        let mut said = Vec::new();
        let mut buf = [0; 4096];
        loop {
            self.take_signal(signals, Duration::ZERO, stopping)?;
            let mut fds = [PollFd::new(&self.pipe, PollFlags::IN)];
            // Signals are held back, so that they cannot end the poll.
            let pause = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
            match poll(&mut fds, Some(&pause)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => continue,
                Ok(_) => {}
                Err(e) => return Err(e.into()),
            }
            match self.pipe.read(&mut buf)? {
                0 => break,
                n => said.extend_from_slice(&buf[..n]),
            }
        }
        Ok(match crate::daemon::understand(&said) {
            None => Told::Failed(String::new()),
            Some(Ok(())) => Told::Ready,
            Some(Err(why)) => Told::Failed(why),
        })
    }

    fn wait_end(&mut self, signals: &HeldSignals, stopping: &mut bool) -> io::Result<WaitStatus> {
        loop {
            if let Some(status) = self.status {
                return Ok(status);
            }
            if let Some((_, status)) = waitpid(Some(self.pid), WaitOptions::NOHANG)? {
                self.status = Some(status);
                return Ok(status);
            }
            // The longest wait only makes up for a signal that got lost.
            self.take_signal(signals, LONGEST_WAIT, stopping)?;
        }
    }

    /// Waits for a signal; hands on one that asks to end.
    fn take_signal(&self, signals: &HeldSignals, wait: Duration, stopping: &mut bool) -> io::Result<()> {
        if signals.next(wait)? == Some(Event::Stop) {
            tracing::info!("asked to end");
            *stopping = true;
            if self.status.is_none() {
                // Not waited for yet, so that the number is still its.
                kill_process(self.pid, Signal::TERM)?;
            }
        }
        Ok(())
    }

    fn succeeded(&self) -> bool {
        self.status.is_some_and(|s| s.exit_status() == Some(0))
    }
}

fn show(status: WaitStatus) -> String {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (_, Some(signal)) => format!("signal {signal}"),
        _ => "no status".into(),
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Event {
    ChildEnded,
    Stop,
}

/// Signals that wait until they are asked for. Without threads and without handlers, which a forked process would inherit.
struct HeldSignals {
    held: libc::sigset_t,
    before: libc::sigset_t,
}

impl HeldSignals {
    fn hold() -> io::Result<Self> {
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
        Ok(Self { held, before })
    }

    /// As it was before: for the process that serves.
    fn release(&self) {
        // SAFETY: `before` is a set that the system made.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, std::ptr::null_mut()) };
    }

    /// The next signal, waited for at most so long.
    fn next(&self, wait: Duration) -> io::Result<Option<Event>> {
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

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    fn history(times: u32) -> History {
        History::new(Limit { times, within: 60 * S })
    }

    #[test]
    fn the_first_end_is_not_waited_for_and_ends_in_a_row_are() {
        let mut h = history(100);
        assert_eq!(h.ended(10 * S, Some(10 * S)), Ok(Duration::ZERO));
        let waits: Vec<_> = (0..10).map(|n| h.ended((10 + n) * S, Some(Duration::ZERO)).unwrap()).collect();
        assert_eq!((waits[0], waits[1], waits[9]), (FIRST_WAIT, 2 * FIRST_WAIT, LONGEST_WAIT));
        // one that has served for a while
        assert_eq!(h.ended(30 * S, Some(1000 * S)), Ok(Duration::ZERO));
    }

    #[test]
    fn too_many_ends_within_the_time_are_the_last() {
        let mut h = history(3);
        for n in 1..=3 {
            assert!(h.ended(n * S, Some(S)).is_ok(), "end {n}");
        }
        // the first is forgotten
        assert!(h.ended(61 * S, Some(50 * S)).is_ok());
        let why = h.ended(61 * S, Some(S)).unwrap_err();
        assert!(why.contains("more than 3 times within 60 seconds"), "{why}");
    }

    #[test]
    fn a_mount_that_fails_is_not_tried_for_ever() {
        let mut h = history(1000);
        assert!(h.ended(S, None).is_ok() && h.ended(1000 * S, None).is_ok());
        // one that came up between
        assert!(h.ended(2000 * S, Some(S)).is_ok());
        assert!(h.ended(3000 * S, None).is_ok() && h.ended(4000 * S, None).is_ok());
        assert!(h.ended(5000 * S, None).unwrap_err().contains("could not be mounted"));
    }
}
