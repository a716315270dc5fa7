//! A domain fails where a thread panics that has taken something on itself: what is no more marked as changed, and is not
//! durable, would else be taken for durable.

use super::Domain;
use crate::panics;

/// Dropped by a panic, it fails the domain. It must be gone before what others wait for: a variable is declared behind that, a field
/// before it.
pub(crate) struct FailOnPanic<'d> {
    domain: &'d Domain,
    what: &'static str,
}

impl FailOnPanic<'_> {
    /// To be called at the end: nothing has panicked.
    pub fn disarm(self) {
        std::mem::forget(self);
    }
}

impl Drop for FailOnPanic<'_> {
    fn drop(&mut self) {
        self.domain.fail(&panics::error_of(self.what));
    }
}

impl Domain {
    /// To be disarmed in the end, also after an error.
    pub(crate) fn fail_on_panic(&self, what: &'static str) -> FailOnPanic<'_> {
        FailOnPanic { domain: self, what }
    }

    /// Does `work`, what `what` calls it; where it panics the domain fails before anybody is told that it is over.
    pub(crate) fn failing_on_panic<T>(&self, what: &'static str, work: impl FnOnce() -> T) -> T {
        let panics = self.fail_on_panic(what);
        let done = work();
        panics.disarm();
        done
    }
}
