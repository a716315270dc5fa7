//! The protocol between domains: what must be durable before what, so that logs that know nothing of each other are one
//! namespace after a crash at any moment. docs/braid.md explains it.
//!
//! - [`frontier`], [`durability`], [`vacated`]: what is remembered, of inodes and of names that were left.
//! - [`rules`], [`plan`]: pure functions from that to what must be durable first, and what recovery decides.
//! - `entry`: how an entry of a directory changes, in operation and in recovery.
//! - `reconcile`: how recovery makes the domains agree.
//! - `stale`: what recovery could not see, found in the background.

pub mod durability;
pub(crate) mod entry;
pub mod frontier;
pub mod plan;
pub(crate) mod reconcile;
pub mod rules;
mod stale;
pub mod vacated;

#[cfg(test)]
mod tests;
