//! Keeping the client of a ring on the CPU of the thread that serves it.
//!
//! The reply wakes the client while the serving thread still runs; the scheduler looks for a CPU that has nothing to do,
//! and the client would go on there, wake that CPU's serving thread with its next request, and so on: two CPUs awake in
//! turn for the work of one. A CPU on which only threads of the policy `SCHED_IDLE` run counts as one that has nothing to
//! do. So a serving thread takes that policy while one client sends it many small requests, by the same rules as
//! [`super::follow`]: not where the machine is crowded, only while it helps, and no longer than a tick where little comes
//! (which is also how it looks when the thread does not get the CPU).

use super::Served;
use super::follow::{Load, State, crowd, free_started, may_idle, running, set_policy};
use rustix::thread::{CpuSet, sched_getaffinity};

/// Ticks from one look for threads that serving threads have started to the next.
const LOOK: u32 = 25;

/// Of each serving thread.
#[derive(Debug, Default)]
struct Thread {
    state: State,
    idle: bool,
}

#[derive(Debug)]
pub(super) struct Stay {
    threads: Vec<Thread>,
    /// Where threads that the serving threads start may run.
    home: CpuSet,
    crowd: u32,
    ticks: u32,
}

impl Stay {
    /// `None` where the policy cannot be given back (not root), where the administrator chose one, or where the process may
    /// use one CPU only.
    pub fn new() -> Option<Self> {
        let home = sched_getaffinity(None).ok()?;
        let cpus = home.count();
        (cpus >= 2 && may_idle()).then(|| Self { threads: Vec::new(), home, crowd: crowd(cpus), ticks: 0 })
    }

    /// After a tick.
    pub fn tick(&mut self, loads: &[Load], served: &Served) {
        self.threads.resize_with(loads.len(), Thread::default);
        let crowded = || running().is_none_or(|n| n > self.crowd);
        for (i, (thread, load)) in self.threads.iter_mut().zip(loads).enumerate() {
            let wanted = thread.state.tick(load, crowded);
            if wanted != thread.idle {
                thread.idle = set(served, i, wanted);
            }
        }
        self.ticks += 1;
        if self.ticks >= LOOK && self.threads.iter().any(|t| t.idle) {
            self.ticks = 0;
            free_started(&self.home, |t| served.threads().any(|s| s == t));
        }
    }

    /// Everything as it was.
    pub fn leave(&mut self, served: &Served) {
        for (i, thread) in self.threads.iter_mut().enumerate().filter(|(_, t)| t.idle) {
            thread.idle = set(served, i, false);
        }
        free_started(&self.home, |_| false);
    }
}

/// Gives thread `i` the policy `SCHED_IDLE`, or takes it; whether it has it then.
fn set(served: &Served, i: usize, idle: bool) -> bool {
    let Some(thread) = served.thread(i) else { return false };
    let policy = if idle { libc::SCHED_IDLE } else { libc::SCHED_OTHER };
    match set_policy(Some(thread), policy) {
        Ok(()) => idle,
        Err(e) => {
            tracing::debug!(error = %e, idle, "the policy of a serving thread stays");
            !idle
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::follow::policy;
    use super::*;
    use std::io::{Write as _, stderr};

    #[test]
    fn a_thread_with_one_busy_client_yields_to_it_and_others_do_not() {
        let Some(mut stay) = Stay::new() else {
            _ = writeln!(stderr(), "SKIPPED: needs root and two CPUs");
            return;
        };
        // Whatever else this machine does at the moment.
        stay.crowd = u32::MAX;
        std::thread::scope(|s| {
            s.spawn(|| {
                let served = Served::new(2);
                let _serving = served.begin(1);
                let busy = Load { requests: 1000, large: 0, changes: 0, client: 7, same_client: true };
                let mut more = Load { requests: 3000, ..busy };
                let quiet = Load { requests: 0, ..busy };
                assert!((0..100).any(|_| {
                    stay.tick(&[quiet, busy], &served);
                    stay.threads[1].idle
                }));
                assert_eq!(policy(None).unwrap(), libc::SCHED_IDLE);
                // What it starts now, and lives on.
                let (look, asked) = std::sync::mpsc::channel::<()>();
                let child = std::thread::spawn(move || {
                    asked.recv().unwrap();
                    policy(None).unwrap()
                });
                for _ in 0..LOOK {
                    stay.tick(&[quiet, more], &served);
                    assert_eq!(policy(None).unwrap(), libc::SCHED_IDLE);
                    more.requests += 1000;
                }
                look.send(()).unwrap();
                assert_eq!(child.join().unwrap(), libc::SCHED_OTHER, "of what it starts");
                more.changes = 1;
                stay.tick(&[quiet, more], &served);
                assert_eq!(policy(None).unwrap(), libc::SCHED_OTHER, "another client came");
                assert!(!stay.threads[0].idle);
                stay.leave(&served);
                assert_eq!(policy(None).unwrap(), libc::SCHED_OTHER);
            });
        });
    }
}
