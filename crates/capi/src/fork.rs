//! Handles that came into a child by fork(2). The threads behind a volume stayed with the parent, which goes on writing
//! the devices: a child that closed its copy would write them, too.

use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

/// Forks between the process that loaded the library and this one.
static FORKS: AtomicU64 = AtomicU64::new(0);

/// Of which process a handle is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Process(u64);

impl Process {
    /// The process that asks.
    pub fn this() -> Self {
        static WATCH: Once = Once::new();
        extern "C" fn child() {
            FORKS.fetch_add(1, Ordering::Relaxed);
        }
        WATCH.call_once(|| {
            // SAFETY: the function takes no lock and allocates nothing, and lives as long as the library. Without memory for
            // it handles are not told apart, as in any library.
            unsafe { libc::pthread_atfork(None, None, Some(child)) };
        });
        Self(FORKS.load(Ordering::Relaxed))
    }
    /// Whether it is this one.
    pub fn is_this(self) -> bool {
        self.0 == FORKS.load(Ordering::Relaxed)
    }
}
