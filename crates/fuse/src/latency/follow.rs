//! Serving one busy process on its own CPU.
//!
//! The serving threads are bound to the CPU that their only client runs on, so that a request wakes nobody elsewhere:
//! the client sleeps, and the CPU goes on with the thread that serves it. The way back needs more, for the scheduler
//! would put the client, when the reply wakes it, on another CPU that is idle. It takes a CPU for idle also where only
//! threads of the policy `SCHED_IDLE` run; so the serving threads take that policy while they follow.
//!
//! A thread of that policy gets next to nothing where others want the CPU. So it is tried where the machine does not
//! look crowded, kept where more requests are served that way than before, and ended at the first tick in which the
//! client sent little, whatever the reason: if a request waited in vain behind another process, it did so for a tick.
//! After each try that did not help, the next one comes later.
//!
//! Streams are not followed: there the serving threads had better work beside the process than in turn with it.

use super::Served;
use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_setaffinity};
use std::io;

/// Requests in a tick that a client must send to be followed.
const BUSY: u64 = 20;
/// Ticks that it must look worthwhile, and that a try takes.
const PATIENCE: u32 = 8;
/// Ticks from one try to the next, at first and at most.
const REST: u32 = 25;
const REST_MAX: u32 = 2500;

/// What was served in a tick.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Load {
    pub requests: u64,
    pub large: u64,
    pub changes: u64,
    pub client: u32,
    pub same_client: bool,
}

impl Load {
    /// One client, many small requests?
    fn one_small(&self) -> bool {
        self.requests >= BUSY && self.changes == 0 && self.same_client && self.large * 10 <= self.requests
    }
}

/// The serving threads' places.
#[derive(Debug)]
pub(super) struct Follow {
    /// Where they may run.
    home: CpuSet,
    /// More running threads than this are a crowd.
    crowd: u32,
    state: State,
    cpu: Option<usize>,
}

impl Follow {
    /// `None` where the policy cannot be given back (not root), where the administrator chose one, or where the machine
    /// has one CPU.
    pub fn new() -> Option<Self> {
        let home = sched_getaffinity(None).ok()?;
        (home.count() >= 2 && may_idle()).then(|| Self {
            crowd: crowd(home.count()),
            home,
            state: State::default(),
            cpu: None,
        })
    }

    /// After a tick.
    pub fn tick(&mut self, load: &Load, served: &Served) {
        let crowded = || running().is_none_or(|n| n > self.crowd);
        if !self.state.tick(load, crowded) {
            return self.leave(served);
        }
        match cpu_of(load.client).filter(|&cpu| self.home.is_set(cpu)) {
            Some(cpu) if self.cpu == Some(cpu) => {}
            Some(cpu) => self.move_to(cpu, served),
            None => self.leave(served),
        }
    }

    fn move_to(&mut self, cpu: usize, served: &Served) {
        self.cpu = Some(cpu);
        let mut there = CpuSet::new();
        there.set(cpu);
        let moved = served
            .threads()
            .try_for_each(|t| sched_setaffinity(Some(t), &there).map_err(io::Error::from).and_then(|()| idle(t)));
        if let Err(e) = moved {
            tracing::debug!(error = %e, cpu, "cannot serve on the client's CPU");
            self.leave(served);
        }
    }

    /// Everything as it was.
    pub fn leave(&mut self, served: &Served) {
        if self.cpu.take().is_none() {
            return;
        }
        for thread in served.threads() {
            if let Err(e) = self.back(thread) {
                tracing::warn!(error = %e, "cannot give a serving thread its place back");
            }
        }
        free_started(&self.home, |_| false);
    }

    fn back(&self, thread: Pid) -> io::Result<()> {
        // The policy first: it is what a waiting request waits for.
        set_policy(Some(thread), libc::SCHED_OTHER)?;
        Ok(sched_setaffinity(Some(thread), &self.home)?)
    }
}

/// Threads that the serving threads started meanwhile (for syncs, side by side commits, by the kernel for io_uring) have
/// got their policy and CPU with their life. Nothing else of this process has that policy, but serving threads that
/// are to keep it.
pub(super) fn free_started(home: &CpuSet, keep: impl Fn(Pid) -> bool) {
    // Those may start others while we look. Not for ever.
    for _ in 0..8 {
        let mut found = false;
        let idle = |t: &Pid| policy(Some(*t)).is_ok_and(|p| p == libc::SCHED_IDLE) && !keep(*t);
        for thread in own_threads().filter(idle) {
            // It may be gone by now; and the kernel's own threads cannot be bound, and were not.
            found |= set_policy(Some(thread), libc::SCHED_OTHER).is_ok();
            let _ = sched_setaffinity(Some(thread), home);
        }
        if !found {
            return;
        }
    }
}

/// More running threads than this are a crowd, on so many CPUs: the client, who serves it, and who counts may just be
/// running.
pub(super) fn crowd(cpus: u32) -> u32 {
    cpus + 2
}

/// Whether the policy can be changed, and given back (by root), and is not one that the administrator chose.
pub(super) fn may_idle() -> bool {
    // Else it would not be ours to change.
    if !policy(None).is_ok_and(|p| p == libc::SCHED_OTHER) {
        return false;
    }
    // Tried by a thread that ends with it.
    let there_and_back = || set_policy(None, libc::SCHED_IDLE).and_then(|()| set_policy(None, libc::SCHED_OTHER));
    let tried = std::thread::scope(|s| s.spawn(there_and_back).join());
    matches!(tried, Ok(Ok(())))
}

/// All threads of this process.
fn own_threads() -> impl Iterator<Item = Pid> {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    tasks.filter_map(|t| Pid::from_raw(t.file_name().to_str()?.parse().ok()?))
}

fn idle(thread: Pid) -> io::Result<()> {
    set_policy(Some(thread), libc::SCHED_IDLE)
}

/// `None`: the calling thread.
pub(super) fn policy(thread: Option<Pid>) -> io::Result<libc::c_int> {
    // SAFETY: the call takes and gives a number.
    let policy = unsafe { libc::sched_getscheduler(thread.map_or(0, |t| t.as_raw_nonzero().get())) };
    if policy < 0 { Err(io::Error::last_os_error()) } else { Ok(policy & !libc::SCHED_RESET_ON_FORK) }
}

/// `None`: the calling thread.
pub(super) fn set_policy(thread: Option<Pid>, policy: libc::c_int) -> io::Result<()> {
    let tid = thread.map_or(0, |t| t.as_raw_nonzero().get());
    // All of its fields are integers, and 0 is the priority that these policies want.
    let param = libc::sched_param { sched_priority: 0 };
    // SAFETY: the call reads one `sched_param`, which `param` is, and keeps no pointer.
    let rc = unsafe { libc::sched_setscheduler(tid, policy, &raw const param) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// When to follow.
#[derive(Debug)]
pub(super) struct State {
    /// Ticks in a row with one busy client.
    worth: u32,
    /// Until the next try; and after the next one that does not help.
    rest: u32,
    next_rest: u32,
    following: bool,
    /// Requests in the last ticks: without following, and so far in this try.
    before: u64,
    now: u64,
}

impl Default for State {
    fn default() -> Self {
        Self { worth: 0, rest: 0, next_rest: REST, following: false, before: 0, now: 0 }
    }
}

impl State {
    /// After a tick: should the client be followed? `crowded` is asked before it is tried.
    pub fn tick(&mut self, load: &Load, crowded: impl FnOnce() -> bool) -> bool {
        self.rest = self.rest.saturating_sub(1);
        if !load.one_small() {
            if self.following {
                self.rest = REST;
            }
            *self = Self { rest: self.rest, next_rest: self.next_rest, ..Self::default() };
            return false;
        }
        self.worth += 1;
        if !self.following {
            // The mean of some ticks; times PATIENCE, as the other sum.
            self.before = if self.worth == 1 { load.requests * u64::from(PATIENCE) } else { self.before };
            self.before = self.before - self.before / u64::from(PATIENCE) + load.requests;
            if self.worth > PATIENCE && self.rest == 0 {
                self.following = !crowded();
                self.rest = if self.following { 0 } else { REST };
                (self.worth, self.now) = (0, 0);
            }
            return self.following;
        }
        // The tick of the change counts for neither.
        self.now += if self.worth == 1 { 0 } else { load.requests };
        if self.worth > PATIENCE {
            if self.now < self.before + self.before / 10 {
                self.rest = self.next_rest;
                *self = Self { rest: self.rest, next_rest: (self.next_rest * 2).min(REST_MAX), ..Self::default() };
                return false;
            }
            (self.worth, self.now, self.next_rest) = (1, 0, REST);
        }
        true
    }
}

/// Threads that run or want to, the calling one among them.
pub(super) fn running() -> Option<u32> {
    parse_running(&std::fs::read_to_string("/proc/loadavg").ok()?)
}

fn parse_running(loadavg: &str) -> Option<u32> {
    loadavg.split_whitespace().nth(3)?.split('/').next()?.parse().ok()
}

/// The CPU that a thread ran on last.
fn cpu_of(tid: u32) -> Option<usize> {
    parse_cpu(&std::fs::read_to_string(format!("/proc/{tid}/stat")).ok()?)
}

/// Field 39 of proc_pid_stat(5); the name in the second may hold anything.
fn parse_cpu(stat: &str) -> Option<usize> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(36)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Write as _, stderr};

    const GOOD: Load = Load { requests: BUSY, large: 0, changes: 0, client: 7, same_client: true };

    /// Ticks until it follows.
    fn ticks_until(s: &mut State, load: &Load, follows: bool) -> Option<u32> {
        (1..10_000).find(|_| s.tick(load, || false) == follows)
    }

    #[test]
    fn follows_one_busy_client_while_that_helps() {
        let mut s = State::default();
        assert_eq!(ticks_until(&mut s, &GOOD, true), Some(PATIENCE + 1));
        let better = Load { requests: 2 * BUSY, ..GOOD };
        assert!((0..100).all(|_| s.tick(&better, || false)));
        // Another phase of the same client, no better than before.
        assert!(ticks_until(&mut s, &GOOD, false).is_some());
    }

    #[test]
    fn tries_that_do_not_help_become_rare() {
        let mut s = State::default();
        let mut pauses = Vec::new();
        for _ in 0..12 {
            pauses.push(ticks_until(&mut s, &GOOD, true).unwrap());
            assert!(ticks_until(&mut s, &GOOD, false).unwrap() <= PATIENCE + 1);
        }
        assert!(pauses.is_sorted() && pauses[0] <= PATIENCE + 1, "{pauses:?}");
        assert_eq!(*pauses.last().unwrap(), REST_MAX);
    }

    #[test]
    fn stops_at_once_when_little_comes_and_rests() {
        let mut s = State::default();
        assert!(ticks_until(&mut s, &GOOD, true).is_some());
        assert!(!s.tick(&Load { requests: BUSY - 1, ..GOOD }, || false));
        assert_eq!(ticks_until(&mut s, &GOOD, true), Some(REST));
    }

    #[test]
    fn streams_several_clients_and_crowds_are_not_followed() {
        for load in [Load { large: BUSY, ..GOOD }, Load { changes: 1, ..GOOD }, Load { same_client: false, ..GOOD }] {
            assert_eq!(ticks_until(&mut State::default(), &load, true), None, "{load:?}");
        }
        let mut s = State::default();
        assert!((0..100).all(|_| !s.tick(&GOOD, || true)));
    }

    #[test]
    fn reads_proc() {
        let stat = "12 (a) b (c) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 \
                    31 32 33 34 35 5 0";
        assert_eq!(parse_cpu(stat), Some(5));
        assert_eq!(parse_cpu("12 (a) S 1"), None);
        assert_eq!(parse_running("0.10 0.20 0.30 3/411 12345\n"), Some(3));
        assert_eq!(parse_running(""), None);
        let here = cpu_of(rustix::thread::gettid().as_raw_nonzero().get() as u32);
        assert!(here.is_some_and(|cpu| cpu < CpuSet::MAX_CPU) && running().is_some_and(|n| n >= 1));
    }

    #[test]
    fn moves_threads_and_gives_them_back() {
        let Some(mut f) = Follow::new() else {
            _ = writeln!(stderr(), "SKIPPED: needs root and two CPUs");
            return;
        };
        let cpu = (0..CpuSet::MAX_CPU).find(|&c| f.home.is_set(c)).unwrap();
        std::thread::scope(|s| {
            s.spawn(|| {
                let served = Served::new(1);
                let _serving = served.begin(0);
                f.move_to(cpu, &served);
                let there = sched_getaffinity(None).unwrap();
                assert!(there.count() == 1 && there.is_set(cpu));
                assert_eq!(policy(None).unwrap(), libc::SCHED_IDLE);
                // What a serving thread starts now, and lives on.
                let (started, ready) = std::sync::mpsc::channel();
                let (left, end) = std::sync::mpsc::channel::<()>();
                let other = std::thread::spawn(move || {
                    let place = || (policy(None).unwrap(), sched_getaffinity(None).unwrap());
                    let before = place();
                    started.send(()).unwrap();
                    assert!(end.recv().is_err());
                    (before, place())
                });
                ready.recv().unwrap();
                f.leave(&served);
                drop(left);
                assert_eq!(sched_getaffinity(None).unwrap(), f.home);
                assert_eq!(policy(None).unwrap(), libc::SCHED_OTHER);
                let (before, after) = other.join().unwrap();
                assert_eq!(before, (libc::SCHED_IDLE, there));
                assert_eq!(after, (libc::SCHED_OTHER, f.home));
            });
        });
    }
}
