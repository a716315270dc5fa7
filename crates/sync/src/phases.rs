//! Where the time of an operation went: while a thread is watched ([`watch`]), what it spends in a [`Phase`] is added up. A phase inside
//! of another one is taken from that: each moment counts once.
//!
//! A thread that nobody watches reads one byte of its own for each phase that it enters, and no clock.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// What an operation waits for, or has to do besides its own work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// A commit: its own, another one's that it waits for, or its part of that.
    Commit,
    /// Room in the journal: the checkpoint that gives it.
    Journal,
    /// Room for blocks: cleaning, groups of other domains.
    Space,
    /// The device reads.
    Read,
    /// The device writes.
    Write,
    /// The device makes it durable.
    Flush,
}

/// How many there are.
pub const PHASES: usize = 6;

/// All of them with their names.
pub const NAMES: [(Phase, &str); PHASES] = [
    (Phase::Commit, "commit"),
    (Phase::Journal, "journal"),
    (Phase::Space, "space"),
    (Phase::Read, "read"),
    (Phase::Write, "write"),
    (Phase::Flush, "flush"),
];

/// What a thread did since somebody began to watch it.
#[derive(Debug, Clone, Copy)]
pub struct Times {
    /// When that was.
    pub since: Instant,
    spent: [Duration; PHASES],
    /// Time on a CPU in no phase.
    pub work: Duration,
}

impl Times {
    /// In one phase.
    pub fn of(&self, phase: Phase) -> Duration {
        self.spent[phase as usize]
    }

    /// In all phases.
    pub fn all(&self) -> Duration {
        self.spent.iter().sum()
    }
}

/// Of a thread that is watched.
#[derive(Clone, Copy)]
struct Watched {
    times: Times,
    /// The phase that it is in, and from when on that is not yet counted.
    now: Option<Phase>,
    from: Instant,
    /// The thread's time on a CPU by then.
    cpu: Duration,
}

/// How long the calling thread was on a CPU.
fn cpu() -> Duration {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(t).unwrap_or_default()
}

thread_local! {
    static IS_WATCHED: Cell<bool> = const { Cell::new(false) };
    static WATCHED: Cell<Option<Watched>> = const { Cell::new(None) };
}

/// Watches the calling thread from now on, with all sums at nothing.
pub fn watch() {
    let now = Instant::now();
    let times = Times { since: now, spent: [Duration::ZERO; PHASES], work: Duration::ZERO };
    WATCHED.set(Some(Watched { times, now: None, from: now, cpu: cpu() }));
    IS_WATCHED.set(true);
}

/// Watches it no longer.
pub fn end() {
    IS_WATCHED.set(false);
    WATCHED.set(None);
}

/// Begins anew where the thread is watched: its next operation begins.
pub fn next() {
    if IS_WATCHED.get() {
        watch();
    }
}

/// Whether the calling thread is watched.
pub fn is_watched() -> bool {
    IS_WATCHED.get()
}

/// What the calling thread did so far; `None` where nobody watches it.
pub fn so_far() -> Option<Times> {
    WATCHED.get().map(|mut w| {
        w.count();
        w.times
    })
}

impl Watched {
    /// Counts what has passed for the phase that it is in.
    fn count(&mut self) {
        let (now, cpu) = (Instant::now(), cpu());
        match self.now {
            Some(phase) => self.times.spent[phase as usize] += now.saturating_duration_since(self.from),
            None => self.times.work += cpu.saturating_sub(self.cpu),
        }
        (self.from, self.cpu) = (now, cpu);
    }
}

/// The thread is in a phase as long as this lives.
#[derive(Debug)]
#[must_use]
pub struct InPhase {
    /// What it was in before; nothing where nobody watches.
    before: Option<Option<Phase>>,
    not_send: std::marker::PhantomData<*const ()>,
}

/// The calling thread enters a phase.
#[inline]
pub fn enter(phase: Phase) -> InPhase {
    let before = IS_WATCHED.get().then(|| change(Some(phase)));
    InPhase { before, not_send: std::marker::PhantomData }
}

#[cold]
fn change(to: Option<Phase>) -> Option<Phase> {
    let mut watched = WATCHED.get()?;
    watched.count();
    let before = std::mem::replace(&mut watched.now, to);
    WATCHED.set(Some(watched));
    before
}

impl Drop for InPhase {
    fn drop(&mut self) {
        // the watch may have ended meanwhile, and another one begun: then nothing is in a phase that it does not know of
        if let Some(before) = self.before
            && IS_WATCHED.get()
        {
            change(before);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread::sleep;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_phase_inside_of_another_is_taken_from_it() {
        watch();
        {
            let _commit = enter(Phase::Commit);
            sleep(2 * MS);
            {
                let _flush = enter(Phase::Flush);
                sleep(20 * MS);
            }
            sleep(2 * MS);
        }
        sleep(5 * MS);
        while so_far().unwrap().work < MS {}
        let times = so_far().unwrap();
        assert!(times.of(Phase::Commit) >= 4 * MS && times.of(Phase::Flush) >= 20 * MS, "{times:?}");
        assert!(times.all() + 5 * MS <= times.since.elapsed(), "what is in no phase is in no sum: {times:?}");
        assert_eq!(times.all(), times.of(Phase::Commit) + times.of(Phase::Flush));
        next();
        assert_eq!(so_far().unwrap().all(), Duration::ZERO);
        end();
    }

    #[test]
    fn nothing_is_counted_where_nobody_watches() {
        let phase = enter(Phase::Read);
        assert!(so_far().is_none() && phase.before.is_none());
        // begun before the watch: it is none of it
        watch();
        drop(phase);
        assert_eq!(so_far().unwrap().all(), Duration::ZERO);
        let phase = enter(Phase::Read);
        end();
        drop(phase);
        next();
        assert!(so_far().is_none());
    }

    #[test]
    fn a_phase_that_goes_on_counts_so_far() {
        watch();
        let _phase = enter(Phase::Space);
        sleep(3 * MS);
        assert!(so_far().unwrap().of(Phase::Space) >= 3 * MS);
        end();
    }
}
