//! What makes changes durable when somebody asks: fsync, sync (docs/crash-contract.md).
//!
//! - [`one`]: an fsync of one inode, with what is above it in all domains.
//! - `batch`: several files, written together and flushed once.
//! - `start`: which thread does the fsyncs of a front end; `queue`: those that wait. [`ticket`]: what it holds meanwhile.
//! - `committers`: threads that sync domains side by side.

mod batch;
pub(crate) mod committers;
pub mod one;
pub(crate) mod queue;
mod start;
pub mod ticket;

#[cfg(test)]
mod tests;
