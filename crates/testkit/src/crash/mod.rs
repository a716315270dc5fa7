//! Crash tests: power fails after any prefix of the flushes, with any subset of the later writes on the device
//! ([`crate::states`]), and what is recovered is held against what was promised ([`crate::oracle`]).
//!
//! - [`workload`]: what was being done: basic operations with every kind of sync behind each, and the volumes to begin
//!   with. [`plan`]: all sequences of one, two and three of them, and random runs, by number.
//!   [`groups`], [`pieces`]: sequences in which groups change their owner, and files in pieces are made whole. [`apart`]: volumes
//!   on two devices.
//! - `threads`: random runs of several threads, with the feature `schedule`; `shared`: of threads that overwrite one file.
//! - [`check`]: recovers the images of a log and judges them; crashes recoveries too. [`tree`]: which images are one to
//!   recovery.
//! - [`explore`]: runs the plan on several threads. [`minimise`] (and `minimise_threads`): makes a failure short.
//!
//! The contract: after `fsync(file)` its data, attributes and every name on its path survive; after `fsync(dir)` all
//! changes of its entries so far; after `sync` everything. Else each domain comes back as of a transaction boundary,
//! rename is atomic, and no stale or foreign data can be read.

pub mod apart;
pub mod check;
pub mod explore;
pub mod groups;
pub mod minimise;
#[cfg(feature = "schedule")]
pub mod minimise_threads;
pub mod pieces;
pub mod plan;
#[cfg(feature = "planted-bugs")]
pub mod planted;
pub mod run;
#[cfg(feature = "schedule")]
pub mod shared;
#[cfg(feature = "schedule")]
pub mod threads;
pub mod tree;
pub mod workload;
