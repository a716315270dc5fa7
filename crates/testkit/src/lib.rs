//! Test kit of braidfs: a reference model, random operations, and crash tests that judge by the durability contract.
//!
//! - [`model`]: an in-memory file system that is right because it is simple.
//! - [`blocks`]: which pages of a file have blocks, so that they may be overwritten there.
//! - [`ops`]: operations as data, their generator, and how one is done on any [`ops::Subject`].
//! - [`subject`]: the volume and the model as subjects. [`generate`]: random operations.
//! - [`run`]: the same operations on a volume and on the model, compared one by one.
//! - [`full`]: when an operation may find no space.
//! - [`shared_dir`], [`shared_file`]: a directory in which several threads change names; a file that they overwrite.
//! - [`walk`]: reads a whole volume into memory, checking what a tree must be; comparison with the model; fsck.
//! - [`shrink`]: makes a failing sequence short.
//! - [`states`]: what a device may hold after a crash; [`late`]: the same by numbers, for many crashes of one point.
//! - [`history`]: what was done and promised up to then. [`oracle`]: whether the recovered tree is one that the
//!   durability contract allows.
//! - [`crash`]: workloads, and all the crashes of each.
//! - [`nbd`]: a network block device whose server loses, cuts, hangs and goes away.
//! - [`small`]: small volumes in memory, filled and read back.
//! - [`damage`]: spoilt metadata blocks, and what becomes of the files.
//!
//! Nothing here is part of the product; no test of it depends on time or on the order of threads, unless it says so.

pub mod add_domain;
pub mod blocks;
pub mod crash;
pub mod damage;
pub mod defragment;
pub mod devices;
pub mod discards;
pub mod full;
pub mod generate;
pub mod history;
pub mod late;
pub mod model;
pub mod nbd;
pub mod ops;
pub mod oracle;
pub mod quota;
pub mod resize;
pub mod run;
pub mod scratch;
pub mod shared_dir;
pub mod shared_file;
pub mod shrink;
pub mod small;
pub mod sparse;
pub mod states;
pub mod subject;
pub mod tenant;
pub mod tenant_changes;
pub mod tenant_devices;
mod torn;
pub mod walk;

/// A number from the environment, or `default`; the name of a test's knob is part of its documentation.
///
/// # Panics
/// Where the variable is set to something that is no number: a typo must not pass as the default.
pub fn env_number(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(v) => v.parse().unwrap_or_else(|_| panic!("{name}={v} is no number")),
        Err(_) => default,
    }
}

/// The seed of a run: `BRAIDFS_SEED` to replay one, else a new one. Print it.
pub fn seed() -> u64 {
    match std::env::var("BRAIDFS_SEED").as_deref() {
        Ok("random") => fastrand::u64(..),
        _ => env_number("BRAIDFS_SEED", DEFAULT_SEED),
    }
}

/// Where test runs begin without `BRAIDFS_SEED`: the same in every run, so that a red run is the change's fault.
const DEFAULT_SEED: u64 = 1;
