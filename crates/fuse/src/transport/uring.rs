//! A ring of io_uring that ends with the thread that made it, whatever becomes of its process.
//!
//! Otherwise a ring is a descriptor and two mappings. A process that is killed while one of its threads waits in the kernel, for
//! a device that does not answer or for a page that is on its way to itself, keeps all descriptors and mappings until that
//! thread comes back. A request that came to such a ring and was not taken stays there, for with IORING_SETUP_DEFER_TASKRUN only the
//! ring's own thread takes it, or the end of the ring: not even the end of the connection ends it, and its caller waits
//! (`fuse_uring_abort_end_requests` in fs/fuse/dev_uring.c leaves it to that thread). So this ring has no descriptor
//! (IORING_SETUP_REGISTERED_FD_ONLY): the thread has it registered, and its end is the ring's. And its memory is ordinary memory that the
//! kernel was given (IORING_SETUP_NO_MMAP), not a mapping of the ring. Both are older (Linux 6.5) than FUSE over io_uring (6.14).
//!
//! Low-level module: system calls, and memory that the kernel has in common with it.

use io_uring::squeue::Entry128;
use memmap2::{MmapMut, MmapOptions};
use rustix::io_uring::{
    IoringEnterFlags, IoringRegisterFlags, IoringRegisterOp, IoringSetupFlags, IoringSqFlags, io_uring_params,
    io_uring_ptr, io_uring_rsrc_update,
};
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicU32, Ordering};

/// Of the memory of a ring: more than `struct io_rings` has before the completions.
const HEAD_BYTES: usize = 4096;
const SQE_BYTES: usize = size_of::<Entry128>();
const CQE_BYTES: usize = size_of::<Completion>();
const _: () = assert!(SQE_BYTES == 128 && CQE_BYTES == 16);

/// What became of a submission: `struct io_uring_cqe`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(super) struct Completion {
    /// The submission's `user_data`.
    pub who: u64,
    /// As a system call has it: below 0 a negated errno.
    pub result: i32,
    flags: u32,
}

/// One direction of the ring: places of its fields, in bytes from the begin of its memory.
#[derive(Debug, Clone, Copy)]
struct Side {
    head: usize,
    tail: usize,
    mask: u32,
}

/// A ring of the thread that made it; of use to no other one.
#[derive(Debug)]
pub(super) struct Uring {
    /// Among the rings that the thread has registered.
    index: u32,
    /// Submissions.
    sqes: MmapMut,
    /// All else: heads, tails and completions.
    rings: MmapMut,
    submissions: Side,
    flags: usize,
    completions: Side,
    cqes: usize,
    /// Submissions that were pushed.
    tail: u32,
    of_its_thread: PhantomData<*const ()>,
}

impl Uring {
    /// For so many submissions at a time, and completions, powers of two.
    ///
    /// # Errors
    /// There is no io_uring (seccomp, a sysctl), or no memory to be had that stays where it is (RLIMIT_MEMLOCK).
    pub fn new(submissions: u32, completions: u32) -> io::Result<Self> {
        let mut sqes = MmapOptions::new().len(submissions as usize * SQE_BYTES).map_anon()?;
        let mut rings = MmapOptions::new().len(HEAD_BYTES + completions as usize * CQE_BYTES).map_anon()?;
        let mut params = io_uring_params::default();
        params.flags = IoringSetupFlags::CQSIZE
            | IoringSetupFlags::SQE128
            | IoringSetupFlags::SUBMIT_ALL
            | IoringSetupFlags::SINGLE_ISSUER
            | IoringSetupFlags::DEFER_TASKRUN
            | IoringSetupFlags::NO_MMAP
            | IoringSetupFlags::REGISTERED_FD_ONLY
            | IoringSetupFlags::NO_SQARRAY;
        params.cq_entries = completions;
        params.sq_off.user_addr = io_uring_ptr::new(sqes.as_mut_ptr().cast());
        params.cq_off.user_addr = io_uring_ptr::new(rings.as_mut_ptr().cast());
        // SAFETY: the structure is the kernel's. Both addresses in it are of mappings that belong to the ring from here on. The kernel
        // keeps their pages for as long as the ring lives, wherever they are mapped then.
        let index = system_call(unsafe { libc::syscall(libc::SYS_io_uring_setup, submissions, &raw mut params) })?;
        let at = |offset: u32| offset as usize;
        let fields =
            [params.sq_off.head, params.sq_off.tail, params.sq_off.flags, params.cq_off.head, params.cq_off.tail];
        let is_field = |f: &u32| at(*f) + size_of::<AtomicU32>() <= HEAD_BYTES && f.is_multiple_of(4);
        let fits = fields.iter().all(is_field)
            && at(params.cq_off.cqes) <= HEAD_BYTES
            && params.cq_off.cqes.is_multiple_of(align_of::<Completion>() as u32)
            && params.cq_entries <= completions
            && params.sq_entries <= submissions
            && params.sq_entries.is_power_of_two()
            && params.cq_entries.is_power_of_two();
        let ring = Self {
            index,
            sqes,
            rings,
            submissions: Side {
                head: at(params.sq_off.head),
                tail: at(params.sq_off.tail),
                mask: params.sq_entries - 1,
            },
            flags: at(params.sq_off.flags),
            completions: Side {
                head: at(params.cq_off.head),
                tail: at(params.cq_off.tail),
                mask: params.cq_entries - 1,
            },
            cqes: at(params.cq_off.cqes),
            tail: 0,
            of_its_thread: PhantomData,
        };
        // what a later kernel lays out otherwise is not looked for where it is not
        let otherwise = "this kernel's rings have another layout than braidfs knows; transport=dev does without";
        if fits { Ok(ring) } else { Err(io::Error::new(io::ErrorKind::Unsupported, otherwise)) }
    }

    /// Makes `file` the first one of those that submissions name by a number.
    ///
    /// # Errors
    /// Of the kernel.
    pub fn register_file(&self, file: BorrowedFd<'_>) -> io::Result<()> {
        let fd = file.as_raw_fd();
        // SAFETY: the argument is one descriptor, which the kernel reads during the call.
        unsafe { self.register(IoringRegisterOp::RegisterFiles, (&raw const fd).cast()) }
    }

    /// # Safety
    /// `arg` is what the operation wants to be told one of.
    unsafe fn register(&self, what: IoringRegisterOp, arg: *const libc::c_void) -> io::Result<()> {
        let what = what as u32 | IoringRegisterFlags::USE_REGISTERED_RING.bits();
        // SAFETY: see above; the ring is this thread's.
        system_call(unsafe { libc::syscall(libc::SYS_io_uring_register, self.index, what, arg, 1) })?;
        Ok(())
    }

    /// A field that the kernel reads or writes, too: one of those whose places [`Self::new`] was told.
    fn field(&self, at: usize) -> &AtomicU32 {
        // SAFETY: it lies in the mapping and is aligned, as `new` has seen of each; the mapping lives as long as `self`, and both
        // sides use the field as an atomic alone.
        unsafe { &*self.rings.as_ptr().add(at).cast::<AtomicU32>() }
    }

    /// Submissions that the kernel has not taken.
    pub fn unsubmitted(&self) -> u32 {
        self.tail.wrapping_sub(self.field(self.submissions.head).load(Ordering::Acquire))
    }

    /// Whether nothing more can be pushed before [`Self::enter`].
    pub fn is_full(&self) -> bool {
        self.unsubmitted() > self.submissions.mask
    }

    /// Appends a submission; false where there is no place.
    ///
    /// # Safety
    /// What the submission points to lives until the ring is dropped, or until its completion has come.
    pub unsafe fn push(&mut self, sqe: &Entry128) -> bool {
        if self.is_full() {
            return false;
        }
        let at = (self.tail & self.submissions.mask) as usize;
        // SAFETY: the mapping was made for more submissions than `at`, and the kernel has taken what was there: it is not full.
        unsafe { std::ptr::copy_nonoverlapping(sqe, self.sqes.as_mut_ptr().cast::<Entry128>().add(at), 1) };
        self.tail = self.tail.wrapping_add(1);
        self.field(self.submissions.tail).store(self.tail, Ordering::Release);
        true
    }

    /// Hands over what was pushed, and waits for so many completions. What it has taken is no more among [`Self::unsubmitted`],
    /// also where it failed.
    ///
    /// # Errors
    /// Of the kernel; EINTR, EAGAIN and EBUSY pass.
    pub fn enter(&self, wait: u32) -> io::Result<()> {
        let overflow = IoringSqFlags::CQ_OVERFLOW.bits();
        let mut flags = IoringEnterFlags::REGISTERED_RING;
        if wait > 0 || self.field(self.flags).load(Ordering::Relaxed) & overflow != 0 {
            flags |= IoringEnterFlags::GETEVENTS;
        }
        let none = std::ptr::null::<libc::c_void>();
        // SAFETY: the ring is this thread's, and what its submissions point to is theirs to answer for who pushed them.
        let done = unsafe {
            libc::syscall(libc::SYS_io_uring_enter, self.index, self.unsubmitted(), wait, flags.bits(), none, 0_usize)
        };
        system_call(done).map(drop)
    }

    /// Completions that have come and were not [taken](Self::take).
    pub fn completions(&self) -> impl Iterator<Item = Completion> + '_ {
        let head = self.field(self.completions.head).load(Ordering::Relaxed);
        let tail = self.field(self.completions.tail).load(Ordering::Acquire);
        (0..tail.wrapping_sub(head)).map(move |n| {
            let at = self.cqes + (head.wrapping_add(n) & self.completions.mask) as usize * CQE_BYTES;
            // SAFETY: the mapping has room for all completions behind the first one's place. The kernel wrote this one before it
            // moved the tail, and writes no other one there before the head is moved.
            unsafe { self.rings.as_ptr().add(at).cast::<Completion>().read() }
        })
    }

    /// Takes the completions that have come.
    pub fn take(&mut self, to: &mut Vec<Completion>) {
        let before = to.len();
        to.extend(self.completions());
        let n = (to.len() - before) as u32;
        let head = self.field(self.completions.head);
        head.store(head.load(Ordering::Relaxed).wrapping_add(n), Ordering::Release);
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        let mut this = io_uring_rsrc_update::default();
        this.offset = self.index;
        // SAFETY: the argument is one such structure, which names this ring.
        let gone = unsafe { self.register(IoringRegisterOp::UnregisterRingFds, (&raw const this).cast()) };
        if let Err(e) = gone {
            tracing::debug!(error = %e, "a ring stays until its thread ends");
        }
    }
}

/// What a system call has returned.
fn system_call(result: libc::c_long) -> io::Result<u32> {
    u32::try_from(result).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;
    use io_uring::opcode;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use std::io::{Write as _, stderr};
    use std::os::fd::AsFd;

    fn ring() -> Option<Uring> {
        Uring::new(8, 16).inspect_err(|e| drop(writeln!(stderr(), "SKIPPED: no io_uring here: {e}"))).ok()
    }

    fn nop(who: u64) -> Entry128 {
        opcode::Nop::new().build().user_data(who).into()
    }

    #[test]
    fn what_is_pushed_completes_in_turn() {
        let Some(mut ring) = ring() else { return };
        let mut came = Vec::new();
        // around the end of both queues
        for round in 0..10 {
            for n in 0..8 {
                assert!(!ring.is_full());
                // SAFETY: it points to nothing.
                assert!(unsafe { ring.push(&nop(round * 8 + n)) });
            }
            assert!(ring.is_full());
            // SAFETY: it points to nothing.
            assert!(!unsafe { ring.push(&nop(0)) }, "a ninth one");
            ring.enter(8).unwrap();
            assert_eq!(ring.unsubmitted(), 0);
            assert_eq!(ring.completions().count(), 8);
            ring.take(&mut came);
            assert_eq!(ring.completions().count(), 0);
        }
        let all: Vec<_> = (0..80).map(|who| Completion { who, result: 0, flags: 0 }).collect();
        assert_eq!(came, all);
    }

    #[test]
    fn it_has_no_descriptor_and_ends_with_its_thread() {
        let Some(_one) = ring() else { return };
        let rings = || {
            let fds = std::fs::read_dir("/proc/self/fd").unwrap();
            fds.filter(|f| {
                f.as_ref().is_ok_and(|f| std::fs::read_link(f.path()).is_ok_and(|to| to.ends_with("[io_uring]")))
            })
            .count()
        };
        let mappings = std::fs::read_to_string("/proc/self/maps").unwrap();
        assert!(rings() == 0 && !mappings.contains("io_uring"), "{} descriptors\n{mappings}", rings());
        // a pipe of which the ring's request alone keeps an end
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        std::thread::spawn(move || {
            let ring = ring().unwrap();
            ring.register_file(writer.as_fd()).unwrap();
            drop(writer);
            // never dropped
            std::mem::forget(ring);
        })
        .join()
        .unwrap();
        let mut end = [PollFd::new(&reader, PollFlags::IN)];
        let soon = Timespec { tv_sec: 20, tv_nsec: 0 };
        assert_eq!(poll(&mut end, Some(&soon)).unwrap(), 1, "the ring has its file still");
    }
}
