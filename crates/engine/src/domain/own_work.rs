//! What the threads of the background do of themselves, told apart from what somebody does with the volume.

use std::cell::Cell;

thread_local! {
    /// This thread is at such work.
    static OWN: Cell<bool> = const { Cell::new(false) };
}

/// This thread is at what it was at before once this is dropped, by a panic as well.
struct Before(bool);

impl Drop for Before {
    fn drop(&mut self) {
        OWN.set(self.0);
    }
}

/// Does such work: what this thread waits for of the device, and the transactions that it ends, are no use of the volume.
pub(crate) fn as_own<R>(work: impl FnOnce() -> R) -> R {
    let _before = Before(OWN.replace(true));
    work()
}

/// Whether this thread is at such work.
pub(super) fn is_own() -> bool {
    OWN.get()
}
