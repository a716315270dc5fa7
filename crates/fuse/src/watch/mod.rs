//! What a mount does and how long it takes: collected by serving threads, told as one [`sample`].
//!
//! `histogram` has the buckets of times, `processes` the bounded table of who asks; [`crate::counters`] fills both.
//! `sample` is what is told, by `ops/watch.rs` to [`crate::control::sample`]. `openmetrics` tells
//! it as text to who asks the socket of `listen`.

pub(crate) mod histogram;
pub(crate) mod listen;
pub(crate) mod openmetrics;
pub(crate) mod processes;
pub mod sample;

pub use listen::MetricsAt;
