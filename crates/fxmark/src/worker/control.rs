//! The page that the coordinator and the workers of one cell share: commands go down, arrivals and progress come up.
//!
//! A command is a number that grows, with what to do. A worker does it and arrives. The timed phases run until someone
//! halts their number: the coordinator by the clock, or a worker whose files are used up, so that all stop at once.
//! This is the only module with `unsafe` besides [`crate::sys`].

use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Most workers of one cell.
pub const WORKERS_MAX: usize = 1024;
/// Between two looks at the command: far below any measured time, and no load on the CPUs.
const POLL: Duration = Duration::from_micros(20);

/// What workers are told to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Order {
    /// The leader makes what all use.
    Share = 1,
    /// Every worker makes its own files.
    Prepare,
    /// What needs the others' files to be there.
    AfterPrepare,
    /// The leader makes everything durable.
    Sync,
    /// Run until halted; nothing counts.
    Warm,
    /// Run until halted; counts.
    Measure,
    /// Make again what was used up.
    Refill,
    /// Close files and report.
    Finish,
}

impl Order {
    fn of(n: u32) -> Option<Self> {
        use Order::{AfterPrepare, Finish, Measure, Prepare, Refill, Share, Sync, Warm};
        [Share, Prepare, AfterPrepare, Sync, Warm, Measure, Refill, Finish].into_iter().find(|o| *o as u32 == n)
    }
}

/// Operations of one worker, in a cache line of its own.
#[derive(Debug)]
#[repr(C, align(128))]
struct Slot(AtomicU64);

/// The shared page. Zeroed memory is a valid one.
#[derive(Debug)]
#[repr(C)]
pub struct Control {
    /// `number << 8 | order`.
    command: AtomicU32,
    /// Timed phases up to this number are over.
    halted: AtomicU32,
    arrived: Slot,
    started: Slot,
    failed: AtomicU32,
    done: [Slot; WORKERS_MAX],
}

impl Control {
    /// Gives an order to all workers; its number.
    pub fn order(&self, order: Order) -> u32 {
        self.arrived.0.store(0, Ordering::Relaxed);
        self.started.0.store(0, Ordering::Relaxed);
        let number = (self.command.load(Ordering::Relaxed) >> 8) + 1;
        self.command.store(number << 8 | order as u32, Ordering::Release);
        number
    }
    /// Waits for an order after number `seen`; where a worker has failed, the order is to finish.
    pub fn next(&self, seen: u32) -> (u32, Order) {
        loop {
            let command = self.command.load(Ordering::Acquire);
            if command >> 8 > seen
                && let Some(order) = Order::of(command & 0xff)
            {
                return (command >> 8, order);
            }
            if self.failed() {
                return (u32::MAX, Order::Finish);
            }
            std::thread::sleep(POLL);
        }
    }
    /// Ends the timed phase of this number.
    pub fn halt(&self, number: u32) {
        self.halted.fetch_max(number, Ordering::Relaxed);
    }
    /// Is it over?
    #[inline]
    pub fn halted(&self, number: u32) -> bool {
        self.halted.load(Ordering::Relaxed) >= number
    }
    /// A worker begins a timed phase: it waits until all have come.
    pub fn start(&self, workers: usize, number: u32) {
        self.started.0.fetch_add(1, Ordering::AcqRel);
        while !self.all_started(workers) && !self.halted(number) {
            std::thread::yield_now();
        }
    }
    /// Have all workers begun the timed phase?
    pub fn all_started(&self, workers: usize) -> bool {
        self.started.0.load(Ordering::Acquire) as usize >= workers
    }
    /// A worker has done its order.
    pub fn arrive(&self) {
        self.arrived.0.fetch_add(1, Ordering::Release);
    }
    /// How many have.
    pub fn arrived(&self) -> usize {
        self.arrived.0.load(Ordering::Acquire) as usize
    }
    /// A worker has failed: all stop.
    pub fn fail(&self) {
        self.failed.store(1, Ordering::Release);
        self.halted.store(u32::MAX, Ordering::Relaxed);
    }
    /// Whether a worker has failed.
    pub fn failed(&self) -> bool {
        self.failed.load(Ordering::Acquire) != 0
    }
    /// Tells of progress.
    pub fn progress(&self, worker: usize, ops: u64) {
        if let Some(slot) = self.done.get(worker) {
            slot.0.store(ops, Ordering::Relaxed);
        }
    }
    /// Operations of all workers so far.
    pub fn total(&self, workers: usize) -> u64 {
        self.done.iter().take(workers).map(|s| s.0.load(Ordering::Relaxed)).sum()
    }
}

/// A [`Control`] in memory that child processes can map, too.
#[derive(Debug)]
pub struct Shared {
    at: NonNull<Control>,
    fd: OwnedFd,
}

// SAFETY: a `Control` is atomics only, and the mapping lives as long as the value.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    /// New memory. The descriptor is inherited by children.
    ///
    /// # Errors
    /// No memory or no descriptors.
    pub fn new() -> io::Result<Self> {
        let fd = rustix::fs::memfd_create(c"fxmark", MemfdFlags::empty())?;
        rustix::fs::ftruncate(&fd, size_of::<Control>() as u64)?;
        Self::map(fd)
    }

    /// The memory behind an inherited descriptor.
    ///
    /// # Errors
    /// It is not one of ours.
    pub fn map(fd: OwnedFd) -> io::Result<Self> {
        if rustix::fs::fstat(&fd)?.st_size as u64 != size_of::<Control>() as u64 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not the control memory of fxmark"));
        }
        // SAFETY: a fresh shared mapping at an address of the kernel's choice; the file has the size of a `Control`,
        // checked above, and nobody shrinks it. Pages are aligned for any type.
        let at = unsafe {
            mmap(
                std::ptr::null_mut(),
                size_of::<Control>(),
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                fd.as_fd(),
                0,
            )?
        };
        let at = NonNull::new(at.cast()).ok_or(rustix::io::Errno::NOMEM)?;
        Ok(Self { at, fd })
    }

    /// The memory behind the descriptor of this number, which a parent process left open for us.
    ///
    /// # Errors
    /// There is none, or it is not one of ours.
    pub fn inherit(number: i32) -> io::Result<Self> {
        // SAFETY: only looked at, and no longer than this call; a bad number answers EBADF.
        let lent = unsafe { rustix::fd::BorrowedFd::borrow_raw(number.max(0)) };
        Self::map(rustix::io::fcntl_dupfd_cloexec(lent, 3)?)
    }

    /// The descriptor, for children.
    pub fn fd(&self) -> &OwnedFd {
        &self.fd
    }
}

impl std::ops::Deref for Shared {
    type Target = Control;
    fn deref(&self) -> &Control {
        // SAFETY: mapped in `map` until drop; zeroed memory and any later content are valid atomics.
        unsafe { self.at.as_ref() }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: the mapping of `map`; no reference outlives `self`.
        let _ = unsafe { munmap(self.at.as_ptr().cast(), size_of::<Control>()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_reach_another_mapping() {
        let a = Shared::new().expect("memory");
        let b = Shared::map(a.fd().try_clone().expect("descriptor")).expect("the same memory");
        let n = a.order(Order::Measure);
        assert_eq!(b.next(0), (n, Order::Measure));
        assert!(!b.halted(n));
        b.progress(3, 7);
        b.arrive();
        b.halt(n);
        assert!(a.halted(n) && !a.halted(n + 1));
        assert_eq!((a.arrived(), a.total(4), a.total(3)), (1, 7, 0));
        a.order(Order::Finish);
        assert_eq!((b.next(n).1, b.arrived()), (Order::Finish, 0));
    }
}
