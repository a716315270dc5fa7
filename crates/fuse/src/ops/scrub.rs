//! A scrub of the volume while it is mounted: one at a time, on a thread of its own with low priority, which lives no longer
//! than the open directory that asked for it (see [`crate::control`]), or, where the kernel tells of no opens, than the thread
//! that did.

use crate::abi;
use crate::control::{NO_DATA, SCRUB_START, SCRUB_STATUS, ScrubStart, ScrubStatus, ScrubText, TEXT_BYTES};
use crate::fs::BraidFs;
use crate::ops::flags::ioctl_out;
use crate::request::{Answer, Handled, Outcome, Request};
use crate::session::run_aside;
use braidfs::{InodeNo, Volume};
use braidfs_check::online::{ScrubOptions, scrub_mounted};
use braidfs_sync::{Mutex, rank};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, FromZeros};

/// Least claim on the CPU; the kernel derives that on the device from it.
const NICE: i32 = 19;

/// How often a scrub looks whether the thread is still there that asked for it, and how long it goes on without being asked
/// for its progress where that cannot be seen.
const LOOK: Duration = Duration::from_secs(1);
const UNASKED: Duration = Duration::from_secs(60);

/// Who asked for a scrub.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    /// The handle of the open directory.
    Handle(u64),
    /// The thread; 0: one that has no number here.
    Thread(u32),
}

impl Owner {
    /// Whether it is seen to be gone.
    fn is_gone(self) -> bool {
        matches!(self, Self::Thread(t) if t != 0 && !std::path::Path::new(&format!("/proc/{t}")).exists())
    }
}

/// The scrub that runs, or ran last.
pub(crate) struct Scrubbing {
    owner: Owner,
    stop: Arc<AtomicBool>,
    state: Arc<Mutex<State, rank::ScrubState>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct State {
    phase: String,
    done: u64,
    total: u64,
    /// The report, once it is done.
    text: Option<Vec<u8>>,
    /// When its owner last asked for something.
    asked: Option<Instant>,
}

impl Scrubbing {
    fn start(vol: Arc<Volume>, owner: Owner, options: ScrubOptions) -> Result<Self, Errno> {
        let state = State { asked: Some(Instant::now()), ..State::default() };
        let (stop, state) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(state)));
        let (told, shown) = (stop.clone(), state.clone());
        let work = move || {
            if let Err(e) = rustix::process::setpriority_process(Some(rustix::thread::gettid()), NICE) {
                tracing::debug!(error = %e, "the scrub runs at ordinary priority");
            }
            tracing::info!("scrub begins");
            let mut looked = Instant::now();
            let report = scrub_mounted(&*vol, &options, &mut |phase, done, total| {
                let mut s = shown.lock();
                if s.phase != phase {
                    s.phase = phase.to_owned();
                }
                (s.done, s.total) = (done, total);
                let unasked = s.asked.is_some_and(|at| at.elapsed() > UNASKED);
                drop(s);
                if matches!(owner, Owner::Thread(_)) && looked.elapsed() > LOOK {
                    looked = Instant::now();
                    if owner.is_gone() || (owner == Owner::Thread(0) && unasked) {
                        told.store(true, Relaxed);
                    }
                }
                !told.load(Relaxed)
            });
            drop(vol);
            tracing::info!(findings = report.findings.len(), stopped = report.stopped, "scrub ends");
            shown.lock().text = Some(serde_json::to_vec(&report).unwrap_or_default());
        };
        let thread = run_aside("fuse-scrub", work).map_err(|_| Errno::AGAIN)?;
        Ok(Self { owner, stop, state, thread: Some(thread) })
    }

    pub fn running(&self) -> bool {
        self.thread.as_ref().is_some_and(|t| !t.is_finished())
    }
}

/// A report that its owner has yet to fetch, for another process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct HandedScrub {
    /// The handle of the open directory, or the thread.
    handle: Option<u64>,
    thread: u32,
    phase: String,
    done: u64,
    total: u64,
    report: String,
}

impl Scrubbing {
    /// What there is to fetch.
    pub fn handed(&self) -> Option<HandedScrub> {
        let state = self.state.lock();
        let report = String::from_utf8(state.text.clone()?).ok()?;
        let (handle, thread) = match self.owner {
            Owner::Handle(fh) => (Some(fh), 0),
            Owner::Thread(thread) => (None, thread),
        };
        Some(HandedScrub { handle, thread, phase: state.phase.clone(), done: state.done, total: state.total, report })
    }

    /// That of another process.
    pub fn of_handed(handed: HandedScrub) -> Self {
        let HandedScrub { handle, thread, phase, done, total, report } = handed;
        let state = State { phase, done, total, text: Some(report.into_bytes()), asked: Some(Instant::now()) };
        Self {
            owner: handle.map_or(Owner::Thread(thread), Owner::Handle),
            stop: Arc::default(),
            state: Arc::new(Mutex::new(state)),
            thread: None,
        }
    }
}

impl Drop for Scrubbing {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            // a panic was told by the thread itself
            let _ = thread.join();
        }
    }
}

impl BraidFs {
    /// The three of [`crate::control`].
    pub(super) fn scrub_ioctl(&self, req: &Request<'_>, arg: &abi::IoctlIn, input: &[u8], out: &mut Answer) -> Handled {
        if req.node().ino() != InodeNo::ROOT {
            return Err(Errno::NOTTY);
        }
        let room = arg.out_size as usize;
        let owner = if self.negotiated.opens() { Owner::Handle(arg.fh) } else { Owner::Thread(req.head.pid) };
        let mut scrub = self.scrub.lock();
        if arg.cmd == SCRUB_START {
            self.may_administer(req)?;
            if scrub.as_ref().is_some_and(Scrubbing::running) {
                return Err(Errno::BUSY);
            }
            let (how, _) = ScrubStart::read_from_prefix(input).map_err(|_| Errno::INVAL)?;
            let options = ScrubOptions { data: how.flags & NO_DATA == 0, bytes_per_second: how.bytes_per_second };
            self.scrubs.store(true, Relaxed);
            *scrub = Some(Scrubbing::start(self.vol.clone(), owner, options)?);
            ioctl_out(out, room, &())?;
            return Ok(Outcome::Reply);
        }
        let Some(scrub) = scrub.as_ref().filter(|s| s.owner == owner) else { return Err(Errno::NODATA) };
        let mut state = scrub.state.lock();
        state.asked = Some(Instant::now());
        if arg.cmd == SCRUB_STATUS {
            let mut status = ScrubStatus::new_zeroed();
            (status.done, status.total) = (state.done, state.total);
            if let Some(text) = &state.text {
                (status.ended, status.text_bytes) = (1, text.len() as u64);
            } else if !scrub.running() {
                return Err(Errno::IO);
            }
            for (to, from) in status.phase.iter_mut().zip(state.phase.bytes()) {
                *to = from;
            }
            ioctl_out(out, room, &status)?;
        } else {
            let (mut part, _) = ScrubText::read_from_prefix(input).map_err(|_| Errno::INVAL)?;
            let text = state.text.as_ref().ok_or(Errno::NODATA)?;
            let from = usize::try_from(part.offset).unwrap_or(usize::MAX).min(text.len());
            let some = &text[from..text.len().min(from + TEXT_BYTES)];
            part.text[..some.len()].copy_from_slice(some);
            part.bytes = some.len() as u32;
            ioctl_out(out, room, &part)?;
        }
        Ok(Outcome::Reply)
    }

    /// Closes a directory; a scrub that was started through it stops.
    pub(crate) fn releasedir(&self, req: &Request<'_>) -> Handled {
        let fh = req.arg::<abi::ReleaseIn>()?.fh;
        if self.scrubs.load(Relaxed) {
            let mut scrub = self.scrub.lock();
            if scrub.as_ref().is_some_and(|s| s.owner == Owner::Handle(fh)) {
                *scrub = None;
                self.scrubs.store(false, Relaxed);
            }
        }
        if self.negotiated.opens() {
            self.handles.release(fh)?;
        }
        Ok(Outcome::Reply)
    }
}
