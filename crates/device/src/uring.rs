//! Parallel writes through io_uring. Low-level module.
//!
//! Owns a pool of rings per device; a ring belongs to one thread from `take` to `give`. A thread that writes batches
//! again and again gets a ring of its own, for all devices, on which it is woken once, when the last write of a batch is
//! done (DEFER_TASKRUN; such a ring works in the thread that made it and in no other). On a shared one each write that
//! completes wakes it. Invariant: a ring that nobody uses has nothing in flight, and no function here returns while the
//! kernel may still read the caller's buffers. A ring belongs to one process: after a `fork` the child makes rings of its
//! own.
//!
//! A flush is no entry of a ring behind the writes: the kernel hands every fsync of a ring to a worker thread of its own
//! (`io_fsync_prep` in io_uring/sync.c), two switches more than the caller's fdatasync.

use crate::rw::Gather;
use braidfs_sync::device::Mutex;
use braidfs_sync::rank;
use io_uring::{IoUring, Probe, opcode, types};
use rustix::fd::{AsRawFd, BorrowedFd};
use std::cell::RefCell;
use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

/// Writes in flight per ring; longer batches go in waves.
pub(crate) const ENTRIES: u32 = 64;
/// Idle rings kept per device.
const MAX_IDLE: usize = 64;
/// Threads with a ring of their own.
const MAX_OWN: usize = 64;
/// Batches that a thread writes before it gets one: making it costs more than some batches.
const BATCHES_FIRST: u32 = 8;
/// `IORING_ENTER_GETEVENTS` of io_uring_enter(2): wait for completions.
const ENTER_GETEVENTS: u32 = 1;

/// Whether this kernel (and container) gives io_uring to us. Asked once per process.
pub(crate) fn available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| match try_ring() {
        Ok(yes) => yes,
        Err(e) => {
            tracing::info!("no io_uring here ({e}): devices use pread and pwrite");
            false
        }
    })
}

fn try_ring() -> io::Result<bool> {
    let ring = IoUring::new(2)?;
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    Ok(probe.is_supported(opcode::Writev::CODE))
}

/// The rings of one device.
#[derive(Default)]
pub(crate) struct RingPool {
    idle: Mutex<Idle, rank::Rings>,
}

#[derive(Default)]
struct Idle {
    rings: Vec<IoUring>,
    /// The process that made them.
    process: u32,
}

/// How many threads of the process have a [`ThreadRing`] that is made.
static OWN_RINGS: AtomicUsize = AtomicUsize::new(0);

thread_local!(static THREAD_RING: RefCell<ThreadRing> = RefCell::default());

/// A ring that works in this thread only (Linux 6.1).
fn thread_ring() -> io::Result<IoUring> {
    IoUring::builder().dontfork().setup_single_issuer().setup_defer_taskrun().build(ENTRIES)
}

/// The ring of one thread.
#[derive(Default)]
struct ThreadRing {
    ring: Option<IoUring>,
    /// The process that made it.
    process: u32,
    batches: u32,
}

impl ThreadRing {
    /// The ring, once the thread has written some batches; none where there is none to be had.
    fn get(&mut self) -> Option<&mut IoUring> {
        self.batches = self.batches.saturating_add(1);
        if self.batches < BATCHES_FIRST {
            return None;
        }
        let process = std::process::id();
        if self.process != process {
            self.process = process;
            // as in `RingPool::take`
            std::mem::forget(self.ring.take());
            if OWN_RINGS.fetch_add(1, Relaxed) < MAX_OWN {
                self.ring =
                    thread_ring().inspect_err(|e| tracing::debug!("no io_uring of this thread's own ({e})")).ok();
            }
            if self.ring.is_none() {
                OWN_RINGS.fetch_sub(1, Relaxed);
            }
        }
        self.ring.as_mut()
    }

    /// The ring is of no more use.
    fn lose(&mut self) {
        if self.ring.take().is_some() {
            OWN_RINGS.fetch_sub(1, Relaxed);
        }
    }
}

impl Drop for ThreadRing {
    fn drop(&mut self) {
        if self.process == std::process::id() {
            self.lose();
        } else {
            std::mem::forget(self.ring.take());
        }
    }
}

impl RingPool {
    /// Writes all of `ops`; returns when none is in flight any more.
    pub(crate) fn write(&self, fd: BorrowedFd<'_>, ops: &mut [Gather<'_>]) -> io::Result<()> {
        self.write_as(fd, ops, 0).map(drop)
    }

    /// As [`Self::write`], each write durable when it is done. False: for one of them that is not so, a flush must do it.
    ///
    /// The kernel sends such a write as one request that goes past the cache, or that it follows with a flush by itself
    /// (`dio_bio_write_op` in block/fops.c). The same write by pwritev2 would be flushed once more (`generic_write_sync`).
    pub(crate) fn write_through(&self, fd: BorrowedFd<'_>, ops: &mut [Gather<'_>]) -> io::Result<bool> {
        self.write_as(fd, ops, libc::RWF_DSYNC)
    }

    /// Writes with these `RWF_` flags; whether all had them.
    fn write_as(&self, fd: BorrowedFd<'_>, ops: &mut [Gather<'_>], flags: i32) -> io::Result<bool> {
        let own = THREAD_RING.try_with(|own| {
            let own = &mut *own.try_borrow_mut().ok()?;
            let mut ring = Some(own.get()?);
            let written = write_waves(&mut ring, fd, ops, flags);
            if ring.is_none() {
                own.lose();
            }
            Some(written)
        });
        // The error: the thread is ending.
        if let Ok(Some(written)) = own {
            return written;
        }
        let mut taken = self.take();
        let mut ring = taken.as_mut();
        let written = write_waves(&mut ring, fd, ops, flags);
        if ring.is_some()
            && let Some(ring) = taken
        {
            let mut idle = self.idle.lock();
            if idle.rings.len() < MAX_IDLE {
                idle.rings.push(ring);
            }
        }
        written
    }

    /// A ring, or none where the process has run out of descriptors or locked memory.
    fn take(&self) -> Option<IoUring> {
        let process = std::process::id();
        {
            let mut idle = self.idle.lock();
            if idle.process != process {
                idle.process = process;
                // Rings from before a `fork` are not mapped here, and something else may lie in their place:
                // not even their destructors may run.
                idle.rings.drain(..).for_each(std::mem::forget);
            }
            if let Some(ring) = idle.rings.pop() {
                return Some(ring);
            }
        }
        IoUring::builder()
            .dontfork()
            .build(ENTRIES)
            .inspect_err(|e| tracing::debug!("no further io_uring ({e}): this batch goes by pwrite"))
            .ok()
    }
}

/// Writes `ops`, wave by wave; takes the ring away where it is of no more use. Without one, by `pwritev`. Whether all went by
/// the ring, with the flags.
fn write_waves(
    ring: &mut Option<&mut IoUring>,
    fd: BorrowedFd<'_>,
    ops: &mut [Gather<'_>],
    flags: i32,
) -> io::Result<bool> {
    let mut first_error = Ok(());
    let mut by_ring = true;
    let mut results = [None; ENTRIES as usize];
    for wave in ops.chunks_mut(ENTRIES as usize) {
        let results = &mut results[..wave.len()];
        results.fill(None);
        if let Some(r) = ring
            && !run(r, fd, wave, flags, results)
        {
            *ring = None;
        }
        for (op, result) in wave.iter_mut().zip(results) {
            by_ring &= result.is_some_and(|n| n >= 0 && n as usize == op.bytes);
            let done = match *result {
                Some(n) if n >= 0 => op.finish(fd, n as usize),
                Some(e) if e != -libc::EINTR && e != -libc::EAGAIN => Err(io::Error::from_raw_os_error(-e)),
                _ => op.finish(fd, 0),
            };
            first_error = first_error.and(done);
        }
    }
    first_error.map(|()| by_ring)
}

/// Runs one wave. `results[i]` is what the kernel said of `wave[i]`, `None` where it never took it.
/// False: the ring is of no more use.
fn run(ring: &mut IoUring, fd: BorrowedFd<'_>, wave: &[Gather<'_>], flags: i32, results: &mut [Option<i32>]) -> bool {
    let mut pushed = 0;
    {
        let mut queue = ring.submission();
        for (i, op) in wave.iter().enumerate() {
            // `IoSlice` has the layout of `iovec` by its documentation.
            let entry = opcode::Writev::new(types::Fd(fd.as_raw_fd()), op.bufs.as_ptr().cast(), op.bufs.len() as u32)
                .offset(op.offset)
                .rw_flags(flags)
                .build()
                .user_data(i as u64);
            // SAFETY: the slices and their bytes are borrowed for the whole of this function, which does not
            // return before each entry that the kernel took has completed.
            if unsafe { queue.push(&entry) }.is_err() {
                break;
            }
            pushed += 1;
        }
    }
    let mut done = 0;
    let mut sound = true;
    while done < pushed {
        if sound {
            match ring.submit_and_wait(pushed - done) {
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => {
                    tracing::warn!("io_uring_enter failed ({e}): going on by pwrite");
                    sound = false;
                    // What the kernel has not taken it never will; the rest must still complete.
                    pushed -= ring.submission().len();
                }
            }
        } else {
            std::thread::sleep(Duration::from_micros(200));
            // A ring of the thread's own completes nothing before it is asked.
            // SAFETY: no argument is passed, and nothing is submitted.
            let _ = unsafe { ring.submitter().enter::<libc::sigset_t>(0, 0, ENTER_GETEVENTS, None) };
        }
        for entry in ring.completion() {
            if let Some(slot) = results.get_mut(entry.user_data() as usize) {
                *slot = Some(entry.result());
            }
            done += 1;
        }
    }
    sound
}

#[cfg(test)]
mod tests {
    use crate::{BLOCK_BYTES, Device, FileDevice, WriteOp};

    /// A daemon forks after it has opened, and perhaps written, its devices. With rings shared by threads, and with one of
    /// the thread's own.
    #[test]
    fn a_child_writes_batches_too() {
        for batches in [0, super::BATCHES_FIRST] {
            writes_in_a_child(batches);
        }
    }

    fn writes_in_a_child(batches: u32) {
        let dir = tempfile::tempdir().unwrap();
        let dev = FileDevice::create(&dir.path().join("i"), 64 * BLOCK_BYTES as u64).unwrap().with_rings();
        let batch = |first: u64, v: u8| {
            let data = [v; BLOCK_BYTES];
            // neighbours would be one write, which takes no ring
            let blocks = [0, 2, 4, 6, 1, 3, 5, 7].map(|i| first + i);
            dev.write_batch(&blocks.map(|block| WriteOp { block, bufs: vec![&data[..]] }))
        };
        batch(0, 1).unwrap();
        (0..batches).for_each(|_| batch(0, 1).unwrap());
        let own = super::THREAD_RING.with_borrow(|r| r.ring.is_some());
        assert!(batches == 0 || own || super::thread_ring().is_err(), "no ring of this thread's own");
        // SAFETY: the child calls only what works after a fork (system calls, the allocator) and `_exit`.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            let code = if batch(8, 2).and_then(|()| batch(16, 3)).is_ok() { 0 } else { 1 };
            // SAFETY: ends the child without running anything of the parent's.
            unsafe { libc::_exit(code) };
        }
        batch(24, 4).unwrap();
        let mut status = 0;
        // SAFETY: waits for our own child and writes to `status`.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0, "the child crashed or failed");
        let mut out = [0; BLOCK_BYTES];
        for block in 0..32 {
            dev.read(block, &mut out).unwrap();
            assert_eq!(out, [block as u8 / 8 + 1; BLOCK_BYTES]);
        }
    }
}
