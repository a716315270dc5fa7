//! The protocol between domains: what must be durable before what, so that logs that know nothing of each other are one
//! namespace after a crash at any moment. docs/braid.md explains it.

pub mod durability;
pub(crate) mod entry;
pub mod frontier;
pub mod plan;
mod reconcile;
pub mod rules;
pub mod vacated;

#[cfg(test)]
mod tests;
