//! Names over all domains: one file per verb, and what they share.
//!
//! Every changing operation (also of content and attributes) has one shape: find the domains that it changes; enter them in
//! order; lock its cells (parents before children, then by number); check; reserve; change; leave. What can wait (a commit,
//! a claim of a group, reading a whole file) is done outside the gate, and the operation starts again.

pub(crate) mod asker;
mod beside;
pub(crate) mod checks;
pub mod create;
pub(crate) mod entries;
pub mod link;
pub mod lookup;
mod orphan;
pub mod path;
mod placement;
mod prerequisites;
pub mod readdir;
pub mod remove;
pub mod rename;
mod whiteout;
