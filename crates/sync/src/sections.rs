//! When a thread has a lock for itself: told to the conflict checker, in a build with the feature `lock-sections`. In every
//! other build a [`Section`] is nothing, of no size.
//!
//! A section begins when the lock is had, not when it is waited for, and ends after it is let go. Shared holds of a lock are
//! no sections.

#[cfg(feature = "lock-sections")]
use std::sync::OnceLock;

/// What is told: the address of the lock that this thread now has for itself, or has let go.
#[cfg(feature = "lock-sections")]
#[derive(Debug, Clone, Copy)]
pub struct Listener {
    /// It has it.
    pub taken: fn(usize),
    /// It has let it go.
    pub left: fn(usize),
}

#[cfg(feature = "lock-sections")]
static LISTENER: OnceLock<Listener> = OnceLock::new();

/// Tells `listener` from now on. Only the first one is told.
#[cfg(feature = "lock-sections")]
pub fn listen(listener: Listener) {
    // a second one is not told
    let _ = LISTENER.set(listener);
}

/// This thread has a lock for itself until this is dropped.
#[derive(Debug)]
pub struct Section {
    #[cfg(feature = "lock-sections")]
    lock: usize,
}

impl Section {
    /// Of a lock that was just taken.
    #[inline(always)]
    pub fn of<L: ?Sized>(lock: &L) -> Self {
        #[cfg(feature = "lock-sections")]
        {
            let lock = std::ptr::from_ref(lock).cast::<()>().addr();
            if let Some(l) = LISTENER.get() {
                (l.taken)(lock);
            }
            Self { lock }
        }
        #[cfg(not(feature = "lock-sections"))]
        {
            let _ = lock;
            Self {}
        }
    }
    /// While `f` runs the lock is let go.
    #[inline(always)]
    pub fn without<R>(&mut self, f: impl FnOnce() -> R) -> R {
        #[cfg(feature = "lock-sections")]
        if let Some(l) = LISTENER.get() {
            (l.left)(self.lock);
            let r = f();
            (l.taken)(self.lock);
            return r;
        }
        f()
    }
}

#[cfg(feature = "lock-sections")]
impl Drop for Section {
    #[inline(always)]
    fn drop(&mut self) {
        if let Some(l) = LISTENER.get() {
            (l.left)(self.lock);
        }
    }
}
