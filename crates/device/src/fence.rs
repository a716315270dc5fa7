//! The fence before a device that others could write from elsewhere: no write passes it behind the end of a lease.
//!
//! Who holds the lease ([`Fence::extend`]) is told of the device's owner record by a layer above, which knows where on the
//! volume that lies. Time is CLOCK_BOOTTIME: it goes on while the machine sleeps.
//!
//! Where the lease is lost the device fails: what is read from then on may be the next owner's.
//!
//! Invariants: a [`Pass`] is given only before the deadline less the margin; between the look at the clock and the end of
//! the submission the pass lives. Where the process is stopped in between (SIGSTOP, a debugger) it cannot look again: with
//! [`Fence::kill_when_stopped`] a timer of the kernel then kills it at the deadline, before anybody else may take over. A
//! machine that is stopped as a whole is not seen by that: docs/remote.md.

use braidfs_sync::device::Mutex;
use braidfs_sync::{IdleCondvar, MutexGuard, rank};
use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

/// A moment of CLOCK_BOOTTIME, in nanoseconds.
pub fn boot_time() -> Duration {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::new(t.tv_sec.unsigned_abs(), t.tv_nsec.unsigned_abs() as u32)
}

/// Blocks of a device before its fence opens, and by a connection that is not in use yet: for the owner record.
pub trait RecordIo {
    /// Reads one block.
    ///
    /// # Errors
    /// Of the device.
    fn read_record(&mut self, block: u64, buf: &mut [u8]) -> io::Result<()>;
    /// Writes one block, durably.
    ///
    /// # Errors
    /// Of the device.
    fn write_record(&mut self, block: u64, buf: &[u8]) -> io::Result<()>;
}

/// Looks whether the lease is still ours when a device has been away, before anything is written to it.
pub trait Rejoin: Send + Sync + std::fmt::Debug {
    /// By `io`, on a connection that nothing else uses.
    ///
    /// # Errors
    /// Of the device; [`io::ErrorKind::PermissionDenied`]: others have the volume, or it is another one.
    fn rejoin(&self, io: &mut dyn RecordIo) -> io::Result<()>;
}

/// How long the process may be without a life sign while a submission waits for the server behind the end of the lease.
const IN_FLIGHT: Duration = Duration::from_secs(1);

/// What a test does between the look at the clock and the submission.
type Hook = Box<dyn Fn() + Send + Sync>;

/// What is to be done once the lease is lost, with the reason.
type WhenLost = Box<dyn Fn(&str) + Send + Sync>;

/// See the module.
#[derive(Default)]
pub struct Fence {
    /// Nanoseconds of [`boot_time`]; 0 before the lease is taken.
    deadline: AtomicU64,
    margin: AtomicU64,
    /// Submissions between check and end.
    inside: AtomicUsize,
    lost: OnceLock<String>,
    when_lost: OnceLock<WhenLost>,
    rejoin: OnceLock<Box<dyn Rejoin>>,
    watchdog: OnceLock<Watchdog>,
    hook: OnceLock<Hook>,
    /// For the timer, and for who waits.
    lock: Mutex<(), rank::Fence>,
    changed: IdleCondvar,
}

/// The right to submit writes, until it is dropped.
#[derive(Debug)]
pub struct Pass<'a>(&'a Fence);

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        self.0.inside.fetch_sub(1, SeqCst);
    }
}

impl Fence {
    /// A fence that is closed. Nothing passes `margin` before the deadline.
    pub fn new(margin: Duration) -> Self {
        Self { margin: AtomicU64::new(nanos(margin)), ..Self::default() }
    }

    /// Who looks whether the lease is still ours after the device was away. Once.
    pub fn set_rejoin(&self, rejoin: Box<dyn Rejoin>) {
        let _ = self.rejoin.set(rejoin);
    }

    /// Has `then` called once the lease is lost: at once where it is so already. The first call counts.
    pub(crate) fn when_lost(&self, then: WhenLost) {
        let _ = self.when_lost.set(then);
        if let Some(why) = self.lost() {
            self.tell_lost(why);
        }
    }

    fn tell_lost(&self, why: &str) {
        if let Some(then) = self.when_lost.get() {
            then(why);
        }
    }

    /// For tests: called between the look at the clock and the submission of writes.
    #[doc(hidden)]
    pub fn set_hook(&self, hook: Hook) {
        let _ = self.hook.set(hook);
    }

    /// From now on the kernel kills this process where it is stopped at the deadline. For programs that own their process.
    ///
    /// # Errors
    /// Of the system: there are no more timers.
    pub fn kill_when_stopped(&self) -> io::Result<()> {
        if self.watchdog.get().is_none() {
            let _ = self.watchdog.set(Watchdog::new()?);
        }
        self.wind_up();
        Ok(())
    }

    /// The lease lasts until `deadline` of [`boot_time`].
    pub fn extend(&self, deadline: Duration) {
        self.end_at(|_| nanos(deadline));
    }

    /// The lease lasts until `deadline` of [`boot_time`] at least: of two renewals the later one counts, whichever ends last.
    pub fn renew(&self, deadline: Duration) {
        self.end_at(|now| now.max(nanos(deadline)));
    }

    /// The lease lasts until what `end` makes of its deadline.
    fn end_at(&self, end: impl FnOnce(u64) -> u64) {
        {
            let one = self.lock.lock();
            let at = end(self.deadline.load(SeqCst));
            // the timer first: who passes because of the new deadline passes with the timer set
            if self.is_open_until(at)
                && let Some(watchdog) = self.watchdog.get()
            {
                watchdog.set(Some(Duration::from_nanos(at)));
            }
            self.deadline.store(at, SeqCst);
            self.wind(&one);
        }
        self.changed.notify_all();
    }

    /// Until when the lease lasts; zero where it was not taken.
    pub fn deadline(&self) -> Duration {
        Duration::from_nanos(self.deadline.load(SeqCst))
    }

    /// The lease is lost for good, and with it the device.
    pub fn lose(&self, why: String) {
        let _ = self.lost.set(why);
        drop(self.lock.lock());
        self.changed.notify_all();
        if let Some(why) = self.lost() {
            self.tell_lost(why);
        }
    }

    /// Why the lease is lost.
    pub fn lost(&self) -> Option<&str> {
        self.lost.get().map(String::as_str)
    }

    /// Whether the lease was taken, and has come to its end without being given back: what is read now may be what its next owner
    /// wrote.
    pub(crate) fn is_over(&self) -> bool {
        let deadline = self.deadline.load(SeqCst);
        deadline > 0 && nanos(boot_time()) >= deadline
    }

    /// Whether writes pass.
    pub fn is_open(&self) -> bool {
        self.is_open_until(self.deadline.load(SeqCst))
    }

    fn is_open_until(&self, deadline: u64) -> bool {
        let end = deadline.saturating_sub(self.margin.load(SeqCst));
        self.lost.get().is_none() && nanos(boot_time()) < end
    }

    /// Lets one submission through as soon as the lease lasts.
    ///
    /// # Errors
    /// [`io::ErrorKind::PermissionDenied`]: it is lost; [`io::ErrorKind::TimedOut`]: it was not renewed within `patience`.
    pub fn enter(&self, patience: Duration) -> io::Result<Pass<'_>> {
        let end = Instant::now() + patience;
        loop {
            // before the look: who sees nobody inside has a later look's answer
            self.inside.fetch_add(1, SeqCst);
            if self.is_open() {
                let pass = Pass(self);
                if let Some(hook) = self.hook.get() {
                    hook();
                }
                return Ok(pass);
            }
            self.inside.fetch_sub(1, SeqCst);
            self.check_lost()?;
            let mut guard = self.lock.lock();
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let text = "the lease on the volume could not be renewed in time";
                return Err(io::Error::new(io::ErrorKind::TimedOut, text));
            }
            if !self.is_open() && self.lost.get().is_none() {
                self.changed.wait_for(&mut guard, left.min(Duration::from_secs(1)));
            }
        }
    }

    /// For the renewal of the lease, which no closed fence holds back: as long as it lives the timer runs, since a process that is
    /// stopped before it submits must not go on with that where somebody else has the lease.
    pub fn beside(&self) -> Pass<'_> {
        self.inside.fetch_add(1, SeqCst);
        let pass = Pass(self);
        self.wind_up();
        pass
    }

    /// # Errors
    /// The lease is lost.
    pub fn check_lost(&self) -> io::Result<()> {
        match self.lost.get() {
            Some(why) => Err(io::Error::new(io::ErrorKind::PermissionDenied, why.clone())),
            None => Ok(()),
        }
    }

    /// Has the lease looked at, on a connection that nothing else uses.
    ///
    /// # Errors
    /// As [`Rejoin::rejoin`].
    pub(crate) fn rejoin(&self, io: &mut dyn RecordIo) -> io::Result<()> {
        self.check_lost()?;
        self.rejoin.get().map_or(Ok(()), |r| r.rejoin(io))
    }

    /// How often [`Self::wind_up`] is to be called for a lease: several times before the timer that it sets could run out in a
    /// process that is well, and several times while the margin of the lease is left.
    pub fn winding(lease: Duration) -> Duration {
        (lease / 32).min(IN_FLIGHT / 4)
    }

    /// To be called again and again ([`Self::winding`]) by a thread of the holder: sets the kernel's timer. Where it is not
    /// called the process is stopped, or hangs as a whole.
    pub fn wind_up(&self) {
        if self.watchdog.get().is_some() {
            self.wind(&self.lock.lock());
        }
    }

    /// By who has the lock: what one thread has found it must not do behind what another one has found, and done, since.
    fn wind(&self, _one: &MutexGuard<'_, ()>) {
        let Some(watchdog) = self.watchdog.get() else { return };
        let deadline = self.deadline();
        if self.is_open() {
            watchdog.set(Some(deadline));
        } else if self.inside.load(SeqCst) == 0 {
            // nothing passes before the next `extend`
            watchdog.set(None);
        } else {
            // Somebody passed before and waits for the server to take it: in flight, which is bounded by the I/O timeout.
            watchdog.set(Some(boot_time() + IN_FLIGHT));
        }
    }
}

impl std::fmt::Debug for Fence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fence")
            .field("deadline", &self.deadline())
            .field("lost", &self.lost.get())
            .finish_non_exhaustive()
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// A timer of the kernel that kills this process. Low-level: the `unsafe` of timers is here.
#[derive(Debug)]
struct Watchdog(libc::timer_t);

// SAFETY: a timer's id is a number of the process, which any thread may use.
unsafe impl Send for Watchdog {}
// SAFETY: as above; timer_settime(2) is safe to call from several threads.
unsafe impl Sync for Watchdog {}

impl Watchdog {
    fn new() -> io::Result<Self> {
        // SAFETY: all zero is a valid `sigevent`; the fields that SIGEV_SIGNAL wants are set below.
        let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
        event.sigev_notify = libc::SIGEV_SIGNAL;
        event.sigev_signo = libc::SIGKILL;
        let mut id: libc::timer_t = std::ptr::null_mut();
        // SAFETY: timer_create reads `event` and writes `id`, which both live until it returns.
        match unsafe { libc::timer_create(libc::CLOCK_BOOTTIME, &mut event, &mut id) } {
            0 => Ok(Self(id)),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Kills at `at` of [`boot_time`]; `None`: not at all.
    fn set(&self, at: Option<Duration>) {
        let at = at.unwrap_or_default();
        let spec = libc::itimerspec {
            it_interval: libc::timespec { tv_sec: 0, tv_nsec: 0 },
            it_value: libc::timespec {
                tv_sec: at.as_secs() as libc::time_t,
                tv_nsec: libc::c_long::from(at.subsec_nanos() as i32),
            },
        };
        // SAFETY: the timer lives as long as `self`, the kernel reads `spec`, and no old value is asked for.
        let set = unsafe { libc::timer_settime(self.0, libc::TIMER_ABSTIME, &spec, std::ptr::null_mut()) };
        debug_assert_eq!(set, 0, "a timer of ours");
    }

    /// Whether it is set to a time to come.
    #[cfg(test)]
    fn is_set(&self) -> bool {
        // SAFETY: all zero is a valid `itimerspec`.
        let mut spec: libc::itimerspec = unsafe { std::mem::zeroed() };
        // SAFETY: the timer lives as long as `self`, the kernel writes `spec`.
        assert_eq!(unsafe { libc::timer_gettime(self.0, &mut spec) }, 0);
        spec.it_value.tv_sec > 0 || spec.it_value.tv_nsec > 0
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        // SAFETY: the timer is ours and is not used any more.
        unsafe { libc::timer_delete(self.0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_passes_before_the_lease_and_behind_its_end() {
        let fence = Fence::new(Duration::from_millis(10));
        assert_eq!(fence.enter(Duration::from_millis(5)).unwrap_err().kind(), io::ErrorKind::TimedOut);
        fence.extend(boot_time() + Duration::from_millis(200));
        drop(fence.enter(Duration::ZERO).unwrap());
        std::thread::sleep(Duration::from_millis(195));
        assert!(fence.enter(Duration::ZERO).is_err(), "within the margin");
        std::thread::scope(|s| {
            s.spawn(|| fence.enter(Duration::from_secs(20)).map(drop).unwrap());
            std::thread::sleep(Duration::from_millis(20));
            fence.extend(boot_time() + Duration::from_secs(100));
        });
        fence.lose("taken".into());
        assert_eq!(fence.enter(Duration::from_secs(9)).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    }

    #[test]
    fn a_renewal_does_not_shorten_the_lease() {
        let (fence, now) = (Fence::new(Duration::ZERO), boot_time());
        let [earlier, later] = [100, 200].map(|s| now + Duration::from_secs(s));
        fence.renew(later);
        fence.renew(earlier);
        assert_eq!(fence.deadline(), later);
        fence.extend(Duration::ZERO);
        assert!(!fence.is_open(), "it was given back");
    }

    /// A process that is well winds the timer up several times before it runs out, whatever the lease.
    #[test]
    fn the_timer_is_wound_up_before_it_runs_out() {
        for seconds in 2..=3600 {
            let lease = Duration::from_secs(seconds);
            let every = Fence::winding(lease);
            assert!(!every.is_zero() && every * 4 <= IN_FLIGHT && every * 4 <= lease / 8, "{seconds} s: {every:?}");
        }
    }

    /// Who has found the lease at its end does not stop the timer that who renews the lease has set since.
    #[test]
    fn the_timer_runs_while_the_lease_does() {
        const ROUNDS: usize = 20_000;
        let fence = Fence::new(Duration::ZERO);
        fence.kill_when_stopped().unwrap();
        let (asked, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let wait_for = |count: &AtomicUsize, round| {
            while count.load(SeqCst) < round {
                std::thread::yield_now();
            }
        };
        std::thread::scope(|s| {
            s.spawn(|| {
                for round in 1..=ROUNDS {
                    wait_for(&asked, round);
                    fence.wind_up();
                    done.store(round, SeqCst);
                }
            });
            for round in 1..=ROUNDS {
                fence.extend(Duration::ZERO);
                asked.store(round, SeqCst);
                fence.extend(boot_time() + Duration::from_secs(3600));
                wait_for(&done, round);
                // the other thread ends its rounds also where this one panics
                if !fence.watchdog.get().unwrap().is_set() {
                    asked.store(ROUNDS, SeqCst);
                    panic!("the timer is off in round {round}");
                }
            }
        });
    }
}
