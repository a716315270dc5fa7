//! FxMark for today: how file systems scale with cores, measured so that the figures can be trusted.
//!
//! The suite follows "Understanding Manycore Scalability of File Systems" (USENIX ATC '16): nineteen microbenchmarks,
//! each one operation at one level of sharing, and applications. One run goes through these modules, top down:
//!
//! [`cli`] (arguments) → [`run`] (which cells, in which order; drives the workers of one cell) → [`target`] (makes and
//! removes the file system of a run) → [`worker`] (pinned processes or threads, phases, clocks) → [`suite`] and
//! [`apps`] (what a worker does) → [`fs`] (system calls, or the braidfs library). [`report`] reads what [`results`]
//! holds; [`stats`] has the arithmetic, [`sys`] what the kernel tells. `speed` and [`aging`] are comparisons of
//! their own: single operations of the library beside system calls; what months of use do to a file system.
//!
//! Every failed operation fails the run. What was made for a run is removed after it, also when it fails or is
//! interrupted. Not promised: figures that mean something on a machine that does other work meanwhile.

pub mod aging;
pub mod apps;
pub mod cli;
pub mod error;
pub mod external;
pub mod figures;
pub mod fs;
pub mod isolation;
pub mod lab_args;
pub mod names;
pub mod report;
pub mod results;
pub mod results_args;
pub mod run;
#[cfg(feature = "braidfs")]
pub mod speed;
pub mod stats;
pub mod suite;
pub mod sys;
pub mod target;
#[cfg(feature = "braidfs")]
pub mod times;
pub mod worker;

pub use error::{Error, Result};
