//! Has the serving threads stop receiving, without an end of the connection. Low-level module: a signal.
//!
//! A thread that waits for a request sleeps in `read` of the device, which a signal interrupts before it has taken a request, and
//! never after (`fuse_dev_do_read`): no request is lost. Threads say when they wait; those are sent the signal, again and
//! again until all have stopped, since one that comes just before the thread sleeps is in vain. The signal is SIGURG: nothing
//! happens where it meets a process without our handler. It is no process' own business where it comes in the midst of
//! something else: what waits there goes on waiting (device I/O by io_uring, too).

use crossbeam::utils::CachePadded;
use rustix::process::Pid;
use std::io;
use std::mem::MaybeUninit;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

/// See the module.
#[derive(Debug)]
pub(crate) struct Stop {
    asked: AtomicBool,
    /// Of each serving thread its id while it waits for a request, else 0. Only it writes the line.
    waiting: Box<[CachePadded<AtomicI32>]>,
}

/// A thread that may be stopped.
#[derive(Debug)]
pub(crate) struct Stoppable<'a> {
    stop: &'a Stop,
    line: &'a AtomicI32,
    own: i32,
}

impl Stop {
    pub fn new(threads: usize) -> Self {
        Self { asked: AtomicBool::new(false), waiting: (0..threads).map(|_| CachePadded::default()).collect() }
    }

    /// The calling thread is serving thread `i`.
    pub fn thread(&self, i: usize) -> Stoppable<'_> {
        take_signal();
        let own = Pid::as_raw(Some(rustix::thread::gettid()));
        Stoppable { stop: self, line: &self.waiting[i], own }
    }

    /// All are to stop: [`Self::wake`] until they have.
    pub fn ask(&self) -> io::Result<()> {
        handle_signal()?;
        self.asked.store(true, Ordering::SeqCst);
        Ok(())
    }

    /// Whether they are to.
    pub fn is_asked(&self) -> bool {
        self.asked.load(Ordering::SeqCst)
    }

    /// They go on after all.
    pub fn take_back(&self) {
        self.asked.store(false, Ordering::SeqCst);
    }

    /// Wakes those that wait for a request.
    pub fn wake(&self) {
        for thread in self.waiting.iter().map(|t| t.load(Ordering::SeqCst)).filter(|t| *t != 0) {
            // SAFETY: no memory is passed; a thread of this process that is gone by now is an error, which is ignored.
            unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, libc::SIGURG) };
        }
    }
}

impl Stoppable<'_> {
    /// Does `receive`, which may be interrupted; `None`: it is to stop.
    pub fn receive<T>(&self, receive: impl FnOnce() -> T) -> Option<T> {
        // Who asks looks again and again, so that no order is needed between the two.
        self.line.store(self.own, Ordering::Relaxed);
        let received = (!self.stop.asked.load(Ordering::Relaxed)).then(receive);
        self.line.store(0, Ordering::Relaxed);
        received
    }
}

extern "C" fn nothing(_: libc::c_int) {}

/// The signal interrupts: its handler does nothing, and calls are not begun again.
fn handle_signal() -> io::Result<()> {
    static DONE: OnceLock<Option<i32>> = OnceLock::new();
    let failed = DONE.get_or_init(|| {
        // SAFETY: a `sigaction` of zeros is one with an empty mask and no flags; the handler touches nothing, and lives as
        // long as the program.
        let rc = unsafe {
            let mut action: libc::sigaction = MaybeUninit::zeroed().assume_init();
            action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as libc::sighandler_t;
            libc::sigaction(libc::SIGURG, &raw const action, std::ptr::null_mut())
        };
        (rc != 0).then(|| io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
    });
    failed.map_or(Ok(()), |e| Err(io::Error::from_raw_os_error(e)))
}

/// Whoever started the program may have blocked the signal.
fn take_signal() {
    let mut set = MaybeUninit::uninit();
    // SAFETY: the first call makes `set` a set, which the others read; only the calling thread's mask changes.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), libc::SIGURG);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, set.as_ptr(), std::ptr::null_mut());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn threads_that_sleep_in_read_stop() {
        let (read, write) = rustix::pipe::pipe().unwrap();
        let stop = Stop::new(3);
        let (stop, read) = (&stop, &read);
        let work = |i: usize| {
            let thread = stop.thread(i);
            while let Some(got) = thread.receive(|| rustix::io::read(read, &mut [0; 1])) {
                assert_eq!(got, Err(rustix::io::Errno::INTR), "nothing was written");
            }
        };
        std::thread::scope(|scope| {
            let threads = [0, 1, 2].map(|i| scope.spawn(move || work(i)));
            std::thread::sleep(Duration::from_millis(20));
            stop.ask().unwrap();
            while threads.iter().any(|t| !t.is_finished()) {
                stop.wake();
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        drop(write);
    }
}
