//! Parallel writes through io_uring. Low-level module.
//!
//! Owns a pool of rings per device; a ring belongs to one thread from `take` to `give`. Invariant: a ring in
//! the pool has nothing in flight, and no function here returns while the kernel may still read the caller's
//! buffers. A ring belongs to one process: after a `fork` the child makes rings of its own.

use crate::rw::Gather;
use io_uring::{IoUring, Probe, opcode, types};
use parking_lot::Mutex;
use rustix::fd::{AsRawFd, BorrowedFd};
use std::io;
use std::sync::OnceLock;
use std::time::Duration;

/// Writes in flight per ring; longer batches go in waves.
const ENTRIES: u32 = 64;
/// Idle rings kept per device.
const MAX_IDLE: usize = 64;

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
    idle: Mutex<Idle>,
}

#[derive(Default)]
struct Idle {
    rings: Vec<IoUring>,
    /// The process that made them.
    process: u32,
}

impl RingPool {
    /// Writes all of `ops`; returns when none is in flight any more.
    pub(crate) fn write(&self, fd: BorrowedFd<'_>, ops: &mut [Gather<'_>]) -> io::Result<()> {
        let mut first_error = Ok(());
        let mut ring = self.take();
        let mut results = [None; ENTRIES as usize];
        for wave in ops.chunks_mut(ENTRIES as usize) {
            let results = &mut results[..wave.len()];
            results.fill(None);
            if let Some(r) = &mut ring
                && !run(r, fd, wave, results)
            {
                ring = None;
            }
            for (op, result) in wave.iter_mut().zip(results) {
                let done = match *result {
                    Some(n) if n >= 0 => op.finish(fd, n as usize),
                    Some(e) if e != -libc::EINTR && e != -libc::EAGAIN => Err(io::Error::from_raw_os_error(-e)),
                    _ => op.finish(fd, 0),
                };
                first_error = first_error.and(done);
            }
        }
        if let Some(ring) = ring {
            let mut idle = self.idle.lock();
            if idle.rings.len() < MAX_IDLE {
                idle.rings.push(ring);
            }
        }
        first_error
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

/// Runs one wave. `results[i]` is what the kernel said of `wave[i]`, `None` where it never took it.
/// False: the ring is of no more use.
fn run(ring: &mut IoUring, fd: BorrowedFd<'_>, wave: &[Gather<'_>], results: &mut [Option<i32>]) -> bool {
    let mut pushed = 0;
    {
        let mut queue = ring.submission();
        for (i, op) in wave.iter().enumerate() {
            // `IoSlice` has the layout of `iovec` by its documentation.
            let entry = opcode::Writev::new(types::Fd(fd.as_raw_fd()), op.bufs.as_ptr().cast(), op.bufs.len() as u32)
                .offset(op.offset)
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

    /// A daemon forks after it has opened, and perhaps written, its devices.
    #[test]
    fn a_child_writes_batches_too() {
        let dir = tempfile::tempdir().unwrap();
        let dev = FileDevice::create(&dir.path().join("i"), 64 * BLOCK_BYTES as u64).unwrap();
        let batch = |first: u64, v: u8| {
            let data = [v; BLOCK_BYTES];
            let ops: Vec<_> = (first..first + 8).map(|block| WriteOp { block, bufs: vec![&data[..]] }).collect();
            dev.write_batch(&ops)
        };
        batch(0, 1).unwrap();
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
