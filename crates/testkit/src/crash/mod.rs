//! Crash tests: power fails after any prefix of the flushes, with any subset of the later writes on the device.
//!
//! - [`workload`]: what was being done: all sequences of one and two operations with every kind of sync behind each.
//! - [`states`]: what the device may hold after the crash.
//! - [`history`]: what was done and promised up to then.
//! - [`oracle`]: whether the recovered tree is one that the durability contract allows.
//! - [`explore`]: runs them against one another.
//!
//! The contract: after `fsync(file)` its data, attributes and every name on its path survive; after `fsync(dir)` all
//! changes of its entries so far; after `sync` everything. Else each domain comes back as of a transaction boundary,
//! rename is atomic, and no stale or foreign data can be read.

pub mod explore;
pub mod history;
pub mod oracle;
pub mod states;
pub mod workload;
