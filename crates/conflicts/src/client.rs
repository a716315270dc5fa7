//! What a program says to the valgrind tool `tool/conflicts.c`, and the allocator that tells it of heap blocks.
//!
//! This is the only module with `unsafe`: a client request is a sequence of instructions that does nothing on a CPU, and
//! that valgrind takes for a call; an allocator hands out raw memory; and fork(2) is one of libc's.

use std::alloc::{GlobalAlloc, Layout};
use std::ffi::CStr;
use std::io;

/// The requests; the same numbers stand in `tool/conflicts.c`.
#[derive(Clone, Copy)]
#[repr(usize)]
enum Request {
    Present = (b'B' as usize) << 24 | (b'F' as usize) << 16,
    Machine,
    Begin,
    End,
    Clear,
    Report,
    Allocated,
    Freed,
    #[cfg_attr(not(feature = "lock-sections"), expect(dead_code, reason = "told of by one build only"))]
    Locked,
    #[cfg_attr(not(feature = "lock-sections"), expect(dead_code, reason = "told of by one build only"))]
    Unlocked,
}

/// Whom an operation is counted for; the same numbers stand in the tool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum Count {
    /// It moves lines, and is not counted: warm-up.
    Not,
    /// The operations under test.
    Foreground,
    /// Commits and checkpoints beside them.
    Background,
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn request(what: Request, a: usize, b: usize) -> usize {
    let args = [what as usize, a, b, 0, 0, 0];
    let mut answer = 0usize;
    // SAFETY: valgrind's client request for amd64 (valgrind.h): rax points to six words, rdx is the answer. Without
    // valgrind, rdi is rotated by 128 bits in all, which leaves it as it was, and rbx exchanged with itself.
    unsafe {
        std::arch::asm!(
            "rol rdi, 3", "rol rdi, 13", "rol rdi, 61", "rol rdi, 51", "xchg rbx, rbx",
            in("rax") args.as_ptr(), inout("rdx") answer, options(nostack),
        );
    }
    answer
}

#[cfg(not(target_arch = "x86_64"))]
fn request(_: Request, _: usize, _: usize) -> usize {
    0
}

/// Does the tool run this process?
pub fn present() -> bool {
    request(Request::Present, 0, 0) == 1
}

/// The process sees a machine with so many CPUs (1 to 64). All lines are forgotten.
pub fn machine(cpus: usize) {
    request(Request::Machine, cpus, 0);
}

/// This thread is the CPU `cpu` while `f` runs: one operation, counted for `count`.
#[inline]
pub fn operation<R>(cpu: usize, count: Count, f: impl FnOnce() -> R) -> R {
    request(Request::Begin, cpu, count as usize);
    let r = f();
    request(Request::End, 0, 0);
    r
}

/// Tells the tool of locks that threads have for themselves, from now on.
#[cfg(feature = "lock-sections")]
pub fn tell_locks() {
    use braidfs_sync::sections::{Listener, listen};
    listen(Listener {
        taken: |lock| {
            request(Request::Locked, lock, 0);
        },
        left: |lock| {
            request(Request::Unlocked, lock, 0);
        },
    });
}

/// Forgets what was counted. Who holds which line stays.
pub fn clear() {
    request(Request::Clear, 0, 0);
}

/// Writes what was counted to a file.
pub fn report(path: &CStr) {
    request(Request::Report, path.as_ptr() as usize, 0);
}

/// The allocator `A`, whose blocks the tool knows.
#[derive(Debug)]
pub struct Told<A>(pub A);

// SAFETY: all memory is that of `A`, under the caller's promises; the requests do nothing to it.
unsafe impl<A: GlobalAlloc> GlobalAlloc for Told<A> {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as promised to us
        let p = unsafe { self.0.alloc(layout) };
        request(Request::Allocated, p as usize, layout.size());
        p
    }
    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as promised to us
        let p = unsafe { self.0.alloc_zeroed(layout) };
        request(Request::Allocated, p as usize, layout.size());
        p
    }
    #[inline]
    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        request(Request::Freed, p as usize, 0);
        // SAFETY: as promised to us
        unsafe { self.0.dealloc(p, layout) }
    }
    #[inline]
    unsafe fn realloc(&self, p: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        request(Request::Freed, p as usize, 0);
        // SAFETY: as promised to us
        let p = unsafe { self.0.realloc(p, layout, size) };
        request(Request::Allocated, p as usize, size);
        p
    }
}

/// Runs `child` in a copy of this process, which has one thread, and waits for its end: did it succeed?
///
/// # Errors
/// There is no memory for a process more.
pub fn in_child(child: impl FnOnce() -> bool) -> io::Result<bool> {
    // SAFETY: no other thread is there that could hold a lock in the copy.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => std::process::exit(i32::from(!child())),
        pid => {
            let mut status = 0;
            loop {
                // SAFETY: `pid` is our child, `status` lives as long as the call.
                match unsafe { libc::waitpid(pid, &raw mut status, 0) } {
                    -1 if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
                    -1 => return Err(io::Error::last_os_error()),
                    _ => return Ok(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0),
                }
            }
        }
    }
}
