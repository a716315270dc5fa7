//! The full pass: reads a volume into a [`Model`](crate::model::Model), corrects it there, and notes each correction.

pub mod dirs;
mod lost;
pub mod names;
pub mod nodes;
mod records;
pub mod shared;
pub mod space;
pub mod tables;
mod taken;
mod unnamed;
pub mod volume;

/// Groups of a volume that one thread scans: it is read sooner than threads start.
pub const SMALL_GROUPS: usize = 16;
