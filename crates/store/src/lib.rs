//! What the engine and the checker of braidfs share above the device: where a volume's blocks lie ([`Store`]), which
//! superblock counts ([`super_io`]), what lies in the ring of a journal ([`ring`]), and writes that stay in memory
//! ([`overlay`]).
//!
//! Who writes a volume that other machines reach, too, holds its [`lease`].
//!
//! Here are also the two interfaces between them ([`interface`]): the checker cannot use the engine, which it checks,
//! but for what it is handed through these.
//!
//! Nothing here decides what a volume means, and nothing is cached: whoever reads through this sees the device.

mod address_space;
mod error;
pub mod interface;
pub mod lease;
mod members;
pub mod overlay;
pub mod ring;
pub mod super_io;

pub use address_space::Store;
pub use error::{Error, Result};
