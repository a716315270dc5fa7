//! A fence in all threads of the process at once: membarrier(2).
//!
//! Of two threads that each write something and then look at what the other wrote, one has to see the other: both need a fence
//! in between, which waits until what they wrote before can be seen, as all that they copied. Where one of the two comes a
//! thousand times as often, it goes without ([`light`]), and the other has the kernel make one in all threads ([`in_all_threads`]).
//!
//! Where the kernel has no such call, or a filter of system calls denies it, [`is_ready`] says no, and nobody goes without.

#[cfg(loom)]
use crate::one_order::fence;
use rustix::io::Errno;
use rustix::thread::{MembarrierCommand, membarrier};
use std::sync::atomic::{
    AtomicU8,
    Ordering::{Relaxed, SeqCst},
};
#[cfg(not(loom))]
use std::sync::atomic::{compiler_fence as light_fence, fence};
use std::time::Duration;

const UNKNOWN: u8 = 0;
const READY: u8 = 1;
const DENIED: u8 = 2;

static STATE: AtomicU8 = AtomicU8::new(UNKNOWN);

/// Tells the kernel that this process will ask for such fences; early, as in a process of several threads it takes some
/// milliseconds. Once it is denied, it is not tried again.
pub fn prepare() {
    if STATE.load(Relaxed) == UNKNOWN {
        let known = membarrier(MembarrierCommand::RegisterPrivateExpedited);
        STATE.store(if known.is_ok() { READY } else { DENIED }, Relaxed);
    }
}

/// Whether [`prepare`] has been called, and the kernel knows.
pub(crate) fn is_ready() -> bool {
    #[cfg(test)]
    if DENIED_HERE.get() {
        return false;
    }
    STATE.load(Relaxed) == READY
}

#[cfg(test)]
thread_local! {
    /// As if the kernel did not know it, for this thread.
    pub(crate) static DENIED_HERE: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// In the place of a fence, by the thread that comes often: the compiler keeps to the order.
#[inline(always)]
pub(crate) fn light() {
    #[cfg(not(loom))]
    light_fence(SeqCst);
    // a model has no system calls: there it is a fence on both sides
    #[cfg(loom)]
    fence(SeqCst);
}

/// A fence here, and in all other threads of the process.
#[cold]
#[inline(never)]
pub(crate) fn in_all_threads() {
    fence(SeqCst);
    if cfg!(loom) {
        return;
    }
    match membarrier(MembarrierCommand::PrivateExpedited) {
        Ok(()) => return,
        Err(Errno::NOMEM) => {}
        // a filter that came after `prepare`: from here on no more locks get owners
        Err(_) => STATE.store(DENIED, Relaxed),
    }
    // Processors write what they keep back within a microsecond: whoever went without a fence before is seen after this.
    std::thread::sleep(Duration::from_millis(10));
    fence(SeqCst);
}
