//! The conflict checker: which cache lines do threads share on the hot paths of braidfs?
//!
//! An operation that touches no line that another CPU writes scales on any cache-coherent machine; one that does pays a
//! transfer each time. That is counted here, not timed, so that two cores are enough. The steps of the benchmark suite
//! ([`fxmark`]) run on the library, with the profile, the features and the allocator of the command of braidfs, under a
//! valgrind tool that sees every access to memory (`tool/conflicts.c`).
//!
//! [`drive`] starts processes under valgrind ([`host`]), each of which runs cells ([`cell`]: a test, so many workers in
//! [`turns`], one domain or many) and says by [`client`] requests what the tool is to count. [`report`] reads its
//! findings, [`matrix`] holds them, [`baseline`] compares them with what may be, [`page`] shows them. Before all cells run
//! programs whose sharing is [`known`]. What they say of more cores than there are is in [`model`], which needs times of
//! one thread ([`clock`]), and is drawn by [`picture`]. What each switch for experiments costs is in [`ablations`].
//!
//! Not promised: time. Transfers are those of caches without limits on one line at a time, with operations that never
//! overlap; `docs/conflicts.md` says what that leaves out.

pub mod ablations;
pub mod baseline;
pub mod cell;
pub mod client;
pub mod clock;
pub mod drive;
mod error;
pub mod host;
pub mod known;
pub mod matrix;
pub mod model;
pub mod page;
pub mod picture;
pub mod report;
pub mod turns;

pub use error::{Error, Result};
