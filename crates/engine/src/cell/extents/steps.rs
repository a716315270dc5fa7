//! Steps that work on extents takes, counted in debug builds: a test compares files of few and of many extents by them
//! and not by the clock.

/// Counts a leaf or a reference that the calling thread looks at.
#[inline(always)]
pub(crate) fn visit() {
    #[cfg(debug_assertions)]
    count::STEPS.with(|s| s.set(s.get() + 1));
}

/// Steps that the calling thread took since its begin.
#[cfg(debug_assertions)]
pub fn taken() -> u64 {
    count::STEPS.with(std::cell::Cell::get)
}

#[cfg(debug_assertions)]
mod count {
    thread_local! {
        pub(super) static STEPS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
    }
}
