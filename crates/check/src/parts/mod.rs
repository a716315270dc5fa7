//! The parts of a volume as they should be: what a rule corrects, and what a repair makes the device equal to.

pub mod domain;
pub mod ino;
