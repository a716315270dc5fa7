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

/// How old a reading of the thread's time on a CPU may be where a watch begins: reading it is a system call, which costs more than
/// many operations do. What it can make `work` too long by is as much.
const CPU_IS_FRESH: Duration = Duration::from_micros(100);

/// Of a thread.
struct Watched {
    is_watched: Cell<bool>,
    /// When the watch began.
    since: Cell<Option<Instant>>,
    /// The phase that it is in, and from when on that is not yet counted.
    now: Cell<Option<Phase>>,
    from: Cell<Option<Instant>>,
    /// The thread's time on a CPU, and when that was read.
    cpu: Cell<Duration>,
    cpu_at: Cell<Option<Instant>>,
    /// Whether the sums below are more than nothing: most watches count nothing before they end.
    counted: Cell<bool>,
    spent: [Cell<Duration>; PHASES],
    work: Cell<Duration>,
}

/// How long the calling thread was on a CPU.
fn cpu() -> Duration {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(t).unwrap_or_default()
}

thread_local! {
    static THREAD: Watched = const {
        Watched {
            is_watched: Cell::new(false),
            since: Cell::new(None),
            now: Cell::new(None),
            from: Cell::new(None),
            cpu: Cell::new(Duration::ZERO),
            cpu_at: Cell::new(None),
            counted: Cell::new(false),
            spent: [const { Cell::new(Duration::ZERO) }; PHASES],
            work: Cell::new(Duration::ZERO),
        }
    };
}

/// Watches the calling thread from now on, with all sums at nothing.
pub fn watch() {
    watch_from(Instant::now());
}

/// [`watch`], by who has just read the clock.
pub fn watch_from(now: Instant) {
    THREAD.with(|t| {
        if t.cpu_at.get().is_none_or(|at| now.saturating_duration_since(at) >= CPU_IS_FRESH) {
            t.cpu.set(cpu());
            t.cpu_at.set(Some(now));
        }
        if t.counted.replace(false) {
            t.spent.iter().chain([&t.work]).for_each(|sum| sum.set(Duration::ZERO));
        }
        t.since.set(Some(now));
        t.from.set(Some(now));
        t.now.set(None);
        t.is_watched.set(true);
    });
}

/// Watches it no longer.
pub fn end() {
    THREAD.with(|t| t.is_watched.set(false));
}

/// Begins anew where the thread is watched: its next operation begins.
pub fn next() {
    if is_watched() {
        watch();
    }
}

/// Whether the calling thread is watched.
#[inline]
pub fn is_watched() -> bool {
    THREAD.with(|t| t.is_watched.get())
}

/// What the calling thread did so far; `None` where nobody watches it.
pub fn so_far() -> Option<Times> {
    THREAD.with(|t| {
        let since = t.since.get().filter(|_| t.is_watched.get())?;
        t.count();
        Some(Times { since, spent: t.spent.each_ref().map(Cell::get), work: t.work.get() })
    })
}

impl Watched {
    /// Counts what has passed for the phase that it is in.
    fn count(&self) {
        let (now, cpu) = (Instant::now(), cpu());
        let (from, cpu_before) = (self.from.replace(Some(now)), self.cpu.replace(cpu));
        let (sum, more) = match self.now.get() {
            Some(phase) => {
                (&self.spent[phase as usize], from.map_or(Duration::ZERO, |from| now.saturating_duration_since(from)))
            }
            None => (&self.work, cpu.saturating_sub(cpu_before)),
        };
        sum.set(sum.get() + more);
        self.cpu_at.set(Some(now));
        self.counted.set(true);
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
    let before = is_watched().then(|| change(Some(phase)));
    InPhase { before, not_send: std::marker::PhantomData }
}

#[cold]
fn change(to: Option<Phase>) -> Option<Phase> {
    THREAD.with(|t| {
        t.count();
        t.now.replace(to)
    })
}

impl Drop for InPhase {
    fn drop(&mut self) {
        // the watch may have ended meanwhile, and another one begun: then nothing is in a phase that it does not know of
        if let Some(before) = self.before
            && is_watched()
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
    fn a_watch_soon_after_another_has_none_of_its_time() {
        let busy = |t: Duration| {
            let begun = Instant::now();
            while begun.elapsed() < t {}
        };
        watch();
        {
            let _read = enter(Phase::Read);
            sleep(2 * MS);
        }
        busy(3 * MS);
        // nobody has asked how long it was on a CPU since then
        end();
        watch();
        let times = so_far().unwrap();
        assert!(times.work < MS && times.all() == Duration::ZERO, "{times:?}");
        // at once another one: the reading is young enough
        let before = THREAD.with(|t| t.cpu_at.get());
        let now = before.unwrap() + CPU_IS_FRESH / 2;
        watch_from(now);
        assert_eq!(THREAD.with(|t| t.cpu_at.get()), before);
        watch_from(now + CPU_IS_FRESH);
        assert_ne!(THREAD.with(|t| t.cpu_at.get()), before);
        end();
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
