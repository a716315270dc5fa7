//! Check and repair of a volume, scrub, readable dumps of its structures, and images of all of its metadata.
//!
//! [`check()`] is for unmounted volumes, which nobody else may use meanwhile; [`online`] for volumes in use. What must
//! hold is stated once, in `rules`, and visited by three passes: the *quick* one, which says only that all holds; the
//! *full* one, which finds out what does not and corrects it in a model of the volume; and the *online* one. The crate
//! cannot use the engine, which it checks, but for what it is handed through `braidfs_store::interface`.
//!
//! Imports go down this list (`make layers`): `check`, `image`; `repair`, `quick`, `online`, `dump`; `scan` (the full pass),
//! `data`; `model`; `collect` (the full pass's visitor), `home`; `rules`; `parts` (domains and inodes as they should
//! be); `pair`, `read`; `report`; `usage`; `codes`, `error`,
//! `threads`.
//!
//! Not promised: that file *data* is right (that is what data checksums and scrubbing are for), or that an interrupted
//! repair leaves a volume that mounts; running it again does.

mod check;
pub mod codes;
mod collect;
mod data;
pub mod dump;
mod error;
mod finding;
mod home;
pub mod image;
mod model;
pub mod online;
mod pair;
mod parts;
mod quick;
mod read;
mod repair;
mod report;
mod rules;
mod scan;
mod threads;
pub mod usage;

pub use check::{check, check_within, is_closed, preen, scrub};
pub use error::{Error, Result};
pub use report::{Finding, FsckOptions, FsckReport, Limits, ScrubReport};
