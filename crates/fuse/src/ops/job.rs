//! Long work for whoever opened a directory: one at a time of its kind, on a thread of its own, which goes on no longer than the
//! open directory that asked for it (see [`crate::control`]), or, where the kernel tells of no opens, than the thread that did.

use crate::control::{ScrubStatus, ScrubText, TEXT_BYTES};
use crate::fs::BraidFs;
use crate::request::Request;
use crate::session::run_aside;
use braidfs_sync::{Mutex, rank};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, FromZeros};

/// How often the work looks whether the thread is still there that asked for it, and how long it goes on without being asked
/// for its progress where that cannot be seen.
const LOOK: Duration = Duration::from_millis(100);
const UNASKED: Duration = Duration::from_secs(60);

/// Who asked for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owner {
    /// The handle of the open directory.
    Handle(u64),
    /// The thread; 0: one that has no number here.
    Thread(u32),
}

impl Owner {
    /// Of a request with handle `fh`.
    pub(super) fn of(fs: &BraidFs, req: &Request<'_>, fh: u64) -> Self {
        if fs.negotiated.opens() { Self::Handle(fh) } else { Self::Thread(req.head.pid) }
    }

    /// Whether it is seen to be gone.
    fn is_gone(self) -> bool {
        matches!(self, Self::Thread(t) if t != 0 && !std::path::Path::new(&format!("/proc/{t}")).exists())
    }
}

/// Work that runs, or ran last.
pub(crate) struct Job {
    pub(crate) owner: Owner,
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

/// By which work says how far it is (what it does, steps done, steps), and is told whether to go on.
pub(crate) type Show<'a> = dyn Fn(&str, u64, u64) -> bool + 'a;

impl Job {
    /// Begins `work`, which returns its report.
    pub(super) fn start(
        name: &str,
        owner: Owner,
        work: impl FnOnce(&Show<'_>) -> Vec<u8> + Send + 'static,
    ) -> Result<Self, Errno> {
        let state = State { asked: Some(Instant::now()), ..State::default() };
        let (stop, state) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(state)));
        let (told, shown) = (stop.clone(), state.clone());
        let run = move || {
            let looked = std::cell::Cell::new(Instant::now());
            let report = work(&|phase, done, total| {
                let mut s = shown.lock();
                if s.phase != phase {
                    s.phase = phase.to_owned();
                }
                (s.done, s.total) = (done, total);
                let unasked = s.asked.is_some_and(|at| at.elapsed() > UNASKED);
                drop(s);
                if matches!(owner, Owner::Thread(_)) && looked.get().elapsed() > LOOK {
                    looked.set(Instant::now());
                    if owner.is_gone() || (owner == Owner::Thread(0) && unasked) {
                        told.store(true, Relaxed);
                    }
                }
                !told.load(Relaxed)
            });
            shown.lock().text = Some(report);
        };
        let thread = run_aside(name, run).map_err(|_| Errno::AGAIN)?;
        Ok(Self { owner, stop, state, thread: Some(thread) })
    }

    /// Whether it goes on still.
    pub(crate) fn running(&self) -> bool {
        self.thread.as_ref().is_some_and(|t| !t.is_finished())
    }

    /// How far it is, for its owner.
    pub(super) fn status(&self) -> Result<ScrubStatus, Errno> {
        let mut state = self.state.lock();
        state.asked = Some(Instant::now());
        let mut status = ScrubStatus::new_zeroed();
        (status.done, status.total) = (state.done, state.total);
        if let Some(text) = &state.text {
            (status.ended, status.text_bytes) = (1, text.len() as u64);
        } else if !self.running() {
            return Err(Errno::IO);
        }
        for (to, from) in status.phase.iter_mut().zip(state.phase.bytes()) {
            *to = from;
        }
        Ok(status)
    }

    /// The part of its report that `input` asks for.
    pub(super) fn text(&self, input: &[u8]) -> Result<ScrubText, Errno> {
        let state = self.state.lock();
        let (mut part, _) = ScrubText::read_from_prefix(input).map_err(|_| Errno::INVAL)?;
        let text = state.text.as_ref().ok_or(Errno::NODATA)?;
        let from = usize::try_from(part.offset).unwrap_or(usize::MAX).min(text.len());
        let some = &text[from..text.len().min(from + TEXT_BYTES)];
        part.text[..some.len()].copy_from_slice(some);
        part.bytes = some.len() as u32;
        Ok(part)
    }

    /// Of work that has ended what there is to fetch, for another process.
    pub(crate) fn handed(&self) -> Option<HandedJob> {
        let state = self.state.lock();
        let report = String::from_utf8(state.text.clone()?).ok()?;
        let (handle, thread) = match self.owner {
            Owner::Handle(fh) => (Some(fh), 0),
            Owner::Thread(thread) => (None, thread),
        };
        Some(HandedJob { handle, thread, phase: state.phase.clone(), done: state.done, total: state.total, report })
    }

    /// That of another process.
    pub(crate) fn of_handed(handed: HandedJob) -> Self {
        let HandedJob { handle, thread, phase, done, total, report } = handed;
        let state = State { phase, done, total, text: Some(report.into_bytes()), asked: Some(Instant::now()) };
        Self {
            owner: handle.map_or(Owner::Thread(thread), Owner::Handle),
            stop: Arc::default(),
            state: Arc::new(Mutex::new(state)),
            thread: None,
        }
    }

    /// Has it stop, for whom to wait for it.
    pub(super) fn abandon(mut self) -> Option<JoinHandle<()>> {
        self.stop.store(true, Relaxed);
        self.thread.take()
    }
}

/// A report that its owner has yet to fetch, for another process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct HandedJob {
    /// The handle of the open directory, or the thread.
    handle: Option<u64>,
    thread: u32,
    phase: String,
    done: u64,
    total: u64,
    report: String,
}

impl Drop for Job {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            // a panic was told by the thread itself
            let _ = thread.join();
        }
    }
}
