//! A parent that starts the serving process anew when it dies, so that programs that come later find the files.
//!
//! The parent has one thread, no volume and no connection: it forks the serving process, waits for its end, and unless that was
//! clean or the mount is gone by then (somebody unmounted it) forks another one, which recovers the volume, sees that the dead
//! mount is still on top, detaches it and mounts at the same place, in this order: the directory below the mount is seen for a
//! moment only. Mounts of others are never touched ([`crate::mount_table`] tells them apart). What is held open on
//! the dead mount stays dead: no connection outlives its process, as what was acknowledged and not synced is lost.
//!
//! A process that hands over to another program ([`crate::upgrade`]) says which process that is, and which program, before it does.
//! That one is its child, and this process' when it has ended, since this one is a *subreaper* (prctl(2)): it is followed, and
//! this process goes on as that program, too ([`successor`]). Where that cannot be, what is started anew, should the process
//! die, is this process' own program, the old one.
//!
//! [`History`] decides when it is tried again, and when no more. Low-level module: fork.

mod guard;
mod signals;
mod successor;

pub use guard::Guard;
use signals::{Event, HeldSignals};
use successor::State;
pub use successor::{Looked, Successor, greeting};

use crate::daemon::{ChildReport, Handing, Ready, Told, fork_child, handed_to, parse_report};
use crate::mount::abort;
use crate::mount_table::{DeadMount, Found, MountId, look_at, top_at};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, WaitOptions, WaitStatus, kill_process, waitid, waitpid};
use std::collections::VecDeque;
use std::ffi::CStr;
use std::fmt::Display;
use std::fs::File;
use std::io::{self, Read};
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
/// How often a serving process is looked at that may be half dead.
const LOOK: Duration = Duration::from_secs(1);
/// So much of what a serving process has said is kept; a hand-over says at most 4 KiB.
const HEARD_BYTES: usize = 64 << 10;
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

/// A mount that is looked after.
pub struct Supervised<'a> {
    /// Where it is.
    pub point: &'a Path,
    /// When it is given up.
    pub limit: Limit,
    /// The serving process leaves the terminal when it is ready.
    pub in_background: bool,
    /// How another program is called that is to look after it; `None`: none is.
    pub successor: Option<&'a dyn Successor>,
    /// What that is to be told besides: [`Looked::note`].
    pub note: &'a str,
}

/// Runs `work` in a process of its own, and in another one each time that it dies while the mount stands. Returns
/// when the mount has been ended: by umount(8), or by SIGTERM, SIGINT or SIGHUP to this process, which are handed on.
///
/// `outer` is told when the first process can be used. A serving process tells [`Ready::mounted`] and [`Ready::ready`], and never
/// returns from `work`. Where it is not the first one it gets the dead mount, which it detaches ([`DeadMount::detach`], with
/// [`Ready::detaching`] before) and mounts in its place, or says [`Ready::ended`]. After an upgrade this process goes on as another
/// program, where `mount` says how, by [`look_after`].
///
/// Must run before the process has threads.
///
/// # Errors
/// See [`SuperviseError`].
pub fn supervise<E: Display>(
    mount: &Supervised<'_>,
    outer: &mut Ready,
    work: impl FnMut(&mut Ready, Option<&DeadMount>) -> Result<(), E>,
) -> Result<(), SuperviseError> {
    let signals = HeldSignals::hold()?;
    let look = Look { mount, signals, begun: Instant::now(), history: History::new(mount.limit) };
    look.run(None, outer, work)
}

/// As [`supervise`], of a mount that another program looked after in this process, until it became this one.
///
/// # Errors
/// See [`SuperviseError`].
pub fn look_after<E: Display>(
    mount: &Supervised<'_>,
    looked: Looked,
    work: impl FnMut(&mut Ready, Option<&DeadMount>) -> Result<(), E>,
) -> Result<(), SuperviseError> {
    let signals = HeldSignals::held(looked.blocked)?;
    tracing::info!(point = %mount.point.display(), before = looked.version, pid = looked.child.pid.as_raw_pid(),
                   "this program looks after the mount from now on");
    let look = Look { mount, signals, begun: looked.begun, history: looked.history(mount.limit) };
    look.run(Some(looked), &mut Ready::silent(), work)
}

/// Name of the process that looks after others.
const WATCHER: &CStr = c"braidfs-superv";

/// What a parent does.
struct Look<'a> {
    mount: &'a Supervised<'a>,
    signals: HeldSignals,
    begun: Instant,
    history: History,
}

impl Look<'_> {
    /// From the first process on, or from `looked`.
    fn run<E: Display>(
        mut self,
        mut looked: Option<Looked>,
        outer: &mut Ready,
        mut work: impl FnMut(&mut Ready, Option<&DeadMount>) -> Result<(), E>,
    ) -> Result<(), SuperviseError> {
        // Of what a serving process leaves.
        rustix::process::set_child_subreaper(Some(rustix::process::getpid())).map_err(io::Error::from)?;
        // For who looks at processes; the one that serves has the program's name.
        let own = rustix::thread::name().map_err(io::Error::from)?;
        rustix::thread::set_name(WATCHER).map_err(io::Error::from)?;
        // The mount of the last process that could be used, once it is dead.
        let mut dead: Option<DeadMount> = None;
        loop {
            let (end, mounted) = match looked.take() {
                Some(Looked { mut child, mounted, since, .. }) => {
                    let mut stopping = false;
                    let status = self.attend(&mut child, mounted, since, &mut stopping)?;
                    (End::served(since, status, stopping), mounted)
                }
                None => self.serve_once(&own, dead.as_ref(), outer, &mut work)?,
            };
            let wait = match self.after(end, mounted, &mut dead)? {
                Next::Over => return Ok(()),
                Next::In(wait) => wait,
                Next::Again { served } => {
                    let next = self.history.ended(self.begun.elapsed(), served);
                    next.map_err(|why| SuperviseError::GaveUp(self.mount.point.to_owned(), why))?
                }
            };
            if let Some(dead) = &mut dead
                && !until_free(self.mount.point, dead, wait, &self.signals)?
            {
                return Ok(());
            }
        }
    }

    /// Runs `work` in a process with the name `own`, and looks after it to its end. Also gives the mount that it made last.
    ///
    /// # Errors
    /// Where none can be started, and none could before.
    fn serve_once<E: Display>(
        &self,
        own: &CStr,
        dead: Option<&DeadMount>,
        outer: &mut Ready,
        work: &mut impl FnMut(&mut Ready, Option<&DeadMount>) -> Result<(), E>,
    ) -> Result<(End, Option<MountId>), SuperviseError> {
        // Processes that were to take over from one that was killed, and have ended: no other is there now.
        while let Ok(Some(_)) = waitpid(None, WaitOptions::NOHANG) {}
        rustix::thread::set_name(own).map_err(io::Error::from)?;
        let started = Child::start(&self.signals, self.mount.in_background, |ready| {
            outer.forget();
            work(ready, dead)
        });
        rustix::thread::set_name(WATCHER).map_err(io::Error::from)?;
        match started {
            Ok(child) => Ok(self.served(child, |pid| match dead {
                None => outer.ready(),
                Some(dead) => tracing::info!(point = %dead.point().display(), pid, "mounted again"),
            })?),
            Err(e) if dead.is_none() => Err(e.into()),
            Err(e) => Ok((End::Failed { why: e.to_string(), detaching: false, status: String::new() }, None)),
        }
    }

    /// What follows the end of a process, which mounted `mounted`. `dead`: the mount that is to be made again, if there was one
    /// before, and if there is one now.
    ///
    /// # Errors
    /// Why none follows.
    fn after(&self, end: End, mounted: Option<MountId>, dead: &mut Option<DeadMount>) -> Result<Next, SuperviseError> {
        let point = self.mount.point;
        match (end, &mut *dead) {
            (End::Served { clean: true, .. }, _) => Ok(Next::Over),
            // It unmounts where it can, as asked, and what it does not can be seen by all.
            (End::Served { stopped: true, status, .. }, _) => {
                if let Some(id) = mounted
                    && let Found::Dead(top) = look_until_closed(point, &id)
                {
                    DeadMount::new(top).detach()?;
                }
                Err(SuperviseError::Ended(status))
            }
            (End::Served { served, status, .. }, _) => {
                *dead = match self.left_by(mounted, status)? {
                    Some(left) => Some(left),
                    None => return Ok(Next::Over),
                };
                Ok(Next::Again { served: Some(served) })
            }
            (End::Failed { why, status, .. }, None) if why.is_empty() => Err(SuperviseError::Died(status)),
            (End::Failed { why, .. }, None) => Err(SuperviseError::Failed(why)),
            (End::Stopped, None) => Err(SuperviseError::Died("asked to end".into())),
            (End::Stopped, Some(dead)) => {
                dead.detach_if_there(point)?;
                Ok(Next::Over)
            }
            (End::Failed { why, detaching, status }, Some(dead)) => {
                let why = if why.is_empty() { &status } else { &why };
                tracing::error!(point = %point.display(), error = %why, "cannot be mounted again");
                dead.note_failure(point, detaching, mounted);
                Ok(Next::Again { served: None })
            }
            (End::Over(_), None) => Err(SuperviseError::Died("nothing to serve".into())),
            (End::Over(why), Some(_)) => {
                tracing::warn!(point = %point.display(), reason = why, "not mounted again now");
                Ok(Next::In(COVERED_WAIT))
            }
        }
    }

    /// The dead mount of a process that died while it served. `None`: the mount has ended meanwhile.
    ///
    /// # Errors
    /// [`SuperviseError::Ended`] where there is none that is dead.
    fn left_by(&self, mounted: Option<MountId>, status: String) -> Result<Option<DeadMount>, SuperviseError> {
        let point = self.mount.point;
        let Some(id) = mounted else { return Err(SuperviseError::Ended(status)) };
        match look_until_closed(point, &id) {
            Found::Dead(top) => {
                let dead = DeadMount::new(top);
                tracing::error!(point = %dead.point().display(), status, "the serving process died: mounting again");
                Ok(Some(dead))
            }
            Found::Covered => {
                tracing::error!(point = %point.display(), status, "the serving process died");
                Ok(uncovered(point, &id, &self.signals)?)
            }
            Found::Gone | Found::Alive => Err(SuperviseError::Ended(status)),
        }
    }

    /// From the start of a serving process to its end; and the mount that it made last.
    fn served(&self, mut child: Child, ready: impl FnOnce(i32)) -> io::Result<(End, Option<MountId>)> {
        let (since, mut stopping) = (Instant::now(), false);
        let said = child.wait_ready(&self.signals, &mut stopping)?;
        if said.told == Some(Told::Ready) {
            child.heard.clone_from(&said.later);
            ready(child.pid.as_raw_pid());
            let status = self.attend(&mut child, said.mounted, since, &mut stopping)?;
            return Ok((End::served(since, status, stopping), said.mounted));
        }
        let status = show(child.wait_end(&self.signals, &mut stopping, said.mounted)?);
        let end = match said.told {
            _ if stopping => End::Stopped,
            Some(Told::Ended(why)) => End::Over(why),
            Some(Told::Failed(why)) => End::Failed { why, detaching: said.detaching, status },
            Some(Told::Ready) | None => End::Failed { why: String::new(), detaching: said.detaching, status },
        };
        Ok((end, said.mounted))
    }

    /// From when a process can be used to the end of the last one that takes its place. This process may become another program
    /// meanwhile.
    fn attend(
        &self,
        child: &mut Child,
        mounted: Option<MountId>,
        since: Instant,
        stopping: &mut bool,
    ) -> io::Result<WaitStatus> {
        loop {
            let status = child.wait_end(&self.signals, stopping, mounted)?;
            let Some(program) = child.follow(*stopping)? else { return Ok(status) };
            let &Supervised { point, successor: Some(how), note, .. } = self.mount else { continue };
            if *stopping {
                continue;
            }
            let state =
                State { signals: &self.signals, history: &self.history, begun: self.begun, mounted, since, note };
            let gone_on = match &program {
                Some(program) => successor::go_on_as(program, how, child, &state, stopping),
                None => Err("is not known".into()),
            };
            let Err(why) = gone_on;
            if *stopping {
                continue;
            }
            tracing::warn!(
                point = %point.display(), program = successor::show(program.as_deref()), reason = why,
                "the program that serves now does not look after the mount: braidfs {}, which did so far, goes on with that, \
                 and would mount again itself", env!("CARGO_PKG_VERSION")
            );
        }
    }
}

/// What follows the end of a serving process.
enum Next {
    /// Nothing: the mount has ended.
    Over,
    /// Another process, after a pause by how often that was needed lately. `served`: how long this one did, where it did.
    Again { served: Option<Duration> },
    /// Another process, in so long.
    In(Duration),
}

/// How a serving process ended.
enum End {
    /// It could be used before.
    Served { served: Duration, clean: bool, stopped: bool, status: String },
    /// Before it could be used; `why` is empty where it died without a word.
    Failed { why: String, detaching: bool, status: String },
    /// As `Failed`, and we were asked to end.
    Stopped,
    /// It found nothing to serve.
    Over(String),
}

impl End {
    fn served(since: Instant, status: WaitStatus, stopped: bool) -> Self {
        Self::Served { served: since.elapsed(), clean: status.exit_status() == Some(0), stopped, status: show(status) }
    }
}

/// [`look_at`] a mount whose process has ended: the kernel may close its connection a moment later.
fn look_until_closed(point: &Path, ours: &MountId) -> Found {
    let end = Instant::now() + LONGEST_WAIT;
    loop {
        match look_at(point, ours) {
            Found::Alive if Instant::now() < end => std::thread::sleep(Duration::from_millis(20)),
            found => return found,
        }
    }
}

/// Waits until nobody else's mount lies over ours, which is dead then; `None`: the mount is to end.
fn uncovered(point: &Path, ours: &MountId, signals: &HeldSignals) -> io::Result<Option<DeadMount>> {
    tracing::warn!(point = %point.display(), "somebody has mounted over the dead mount: waiting for its end");
    loop {
        if signals.stop_within(COVERED_WAIT)? {
            return Ok(None);
        }
        match look_until_closed(point, ours) {
            Found::Dead(top) => return Ok(Some(DeadMount::new(top))),
            Found::Covered => {}
            Found::Gone | Found::Alive => {
                tracing::info!(point = %point.display(), "unmounted meanwhile");
                return Ok(None);
            }
        }
    }
}

/// Waits for `wait`, and until nobody else has mounted over the dead mount, or, where it was detached, in its place. False: the
/// mount is to end.
fn until_free(point: &Path, dead: &mut DeadMount, wait: Duration, signals: &HeldSignals) -> io::Result<bool> {
    if signals.stop_within(wait)? {
        dead.detach_if_there(point)?;
        return Ok(false);
    }
    if dead.detached {
        let mut told = false;
        while !top_at(dead.point()).is_ok_and(|top| dead.leaves_free(top.as_ref())) {
            if !std::mem::replace(&mut told, true) {
                tracing::warn!(point = %point.display(), "somebody has mounted there meanwhile: waiting for its end");
            }
            if signals.stop_within(COVERED_WAIT)? {
                return Ok(false);
            }
        }
        return Ok(true);
    }
    let found = match look_until_closed(point, &dead.id()) {
        // with the options that it has now
        Found::Dead(top) => Some(DeadMount::new(top)),
        Found::Covered => uncovered(point, &dead.id(), signals)?,
        Found::Gone | Found::Alive => {
            tracing::info!(point = %point.display(), "unmounted meanwhile");
            None
        }
    };
    Ok(found.map(|found| *dead = found).is_some())
}

impl DeadMount {
    /// Unmounts it where it is on top yet.
    fn detach_if_there(&self, point: &Path) -> io::Result<()> {
        match look_at(point, &self.id()) {
            Found::Dead(top) if !self.detached => DeadMount::new(top).detach().map(|_| ()),
            _ => Ok(()),
        }
    }

    /// A process that was to take its place failed: what it has left.
    fn note_failure(&mut self, point: &Path, detaching: bool, mounted: Option<MountId>) {
        if let Some(id) = mounted
            && let Found::Dead(top) = look_until_closed(point, &id)
        {
            *self = DeadMount::new(top);
        } else if detaching && look_at(point, &self.id()) == Found::Gone {
            self.detached = true;
        }
    }
}

/// A serving process.
#[derive(Debug)]
struct Child {
    pid: Pid,
    pipe: File,
    status: Option<WaitStatus>,
    /// What it said while it served, as far as that is read.
    heard: Vec<u8>,
}

impl Child {
    fn of(pid: Pid, pipe: File) -> Self {
        Self { pid, pipe, status: None, heard: Vec::new() }
    }

    fn start<E: Display>(
        signals: &HeldSignals,
        in_background: bool,
        work: impl FnOnce(&mut Ready) -> Result<(), E>,
    ) -> io::Result<Self> {
        let (pid, pipe) = fork_child(in_background, |ready| {
            signals.release();
            work(ready)
        })?;
        let pid = Pid::from_raw(pid).ok_or_else(|| io::Error::other("fork returned no process"))?;
        Ok(Self::of(pid, pipe.into()))
    }

    /// Waits until the process can be used, or has ended.
    fn wait_ready(&mut self, signals: &HeldSignals, stopping: &mut bool) -> io::Result<ChildReport> {
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
            // it keeps its end
            if parse_report(&said).told == Some(Told::Ready) {
                break;
            }
        }
        Ok(parse_report(&said))
    }

    /// The process has ended: whether another one has taken its place, which is this one's child then; and its program.
    fn follow(&mut self, stopping: bool) -> io::Result<Option<Option<PathBuf>>> {
        self.hear()?;
        let said = std::mem::take(&mut self.heard);
        let Some(Handing { pid, program, asked_to_end }) = handed_to(&said) else { return Ok(None) };
        let Some(pid) = Pid::from_raw(pid) else { return Ok(None) };
        // It may have ended by now; that is waited for as for others.
        let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        match waitid(WaitId::Pid(pid), look) {
            Ok(_) => (self.pid, self.status) = (pid, None),
            // it was ended by the one that it was to follow
            Err(rustix::io::Errno::CHILD) => return Ok(None),
            Err(e) => return Err(e.into()),
        }
        tracing::info!(pid = pid.as_raw_pid(), "another process serves: it is followed");
        if stopping || asked_to_end {
            // the one before was told, and may have had no time for it
            kill_process(pid, Signal::TERM)?;
        }
        Ok(Some(program.or_else(|| successor::program_of(pid))))
    }

    /// Reads what it has said while it serves, so that the pipe has room. Others may have the other end.
    fn hear(&mut self) -> io::Result<()> {
        let mut buf = [0; 4096];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        while poll(&mut [PollFd::new(&self.pipe, PollFlags::IN)], Some(&now)).is_ok_and(|n| n > 0) {
            match self.pipe.read(&mut buf)? {
                0 => break,
                n => self.heard.extend_from_slice(&buf[..n]),
            }
        }
        // the last hand-over counts, in whole lines
        if self.heard.len() > HEARD_BYTES {
            let rest = self.heard.split_off(self.heard.len() - HEARD_BYTES / 2);
            self.heard = rest.into_iter().skip_while(|b| *b != b'\n').collect();
        }
        Ok(())
    }

    /// Waits for the end of the process, and sees to it: a thread of it that waits in the kernel for pages of `mounted` to be
    /// written back (`fuse_reverse_inval_inode`) waits for the process' own answer, which will not come where that was killed. The
    /// rest of the process has ended then, and the connection has not, as the thread keeps it. So it is cut off.
    fn wait_end(
        &mut self,
        signals: &HeldSignals,
        stopping: &mut bool,
        mounted: Option<MountId>,
    ) -> io::Result<WaitStatus> {
        let mut half_dead = HalfDead::of(self.pid);
        loop {
            if let Some(status) = self.status {
                return Ok(status);
            }
            if let Some((_, status)) = waitpid(Some(self.pid), WaitOptions::NOHANG)? {
                self.status = Some(status);
                return Ok(status);
            }
            self.hear()?;
            self.take_signal(signals, LOOK, stopping)?;
            if half_dead.stays()
                && let Some(id) = mounted
            {
                tracing::error!("the serving process was killed and waits for itself: its connection is cut off");
                if let Err(e) = abort(id.dev) {
                    tracing::error!(error = %e, "cannot cut off the FUSE connection");
                }
            }
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
}

/// A process that may have been killed and wait for itself.
struct HalfDead {
    pid: Pid,
    /// How often in a row it was half dead.
    times: u32,
}

impl HalfDead {
    fn of(pid: Pid) -> Self {
        Self { pid, times: 0 }
    }

    /// Whether it is half dead, and was so when it was last looked at: once, it may be just about to end.
    fn stays(&mut self) -> bool {
        self.times = if is_half_dead(self.pid) { self.times + 1 } else { 0 };
        self.times >= 2
    }
}

/// Whether the first thread of a process has ended and others have not: so it is only where it was killed.
fn is_half_dead(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_pid())).unwrap_or_default();
    // the name may have anything in it, but what follows it
    let state = stat.rsplit_once(") ").map(|(_, rest)| rest.starts_with('Z'));
    let threads = std::fs::read_dir(format!("/proc/{}/task", pid.as_raw_pid())).map_or(0, Iterator::count);
    state == Some(true) && threads > 1
}

fn show(status: WaitStatus) -> String {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (_, Some(signal)) => format!("signal {signal}"),
        _ => "no status".into(),
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
