//! braidfs: a file system of many independent logs (*domains*) braided into one POSIX namespace.
//!
//! [`Volume`] is the way in: a volume is made by [`mkfs::format`], opened by [`Volume::mount`], and used by its methods, by
//! path ([`Volume::open_path`] and its like, which check the permissions of a [`Cred`]) or by inode. The crate `braidfs-fs`
//! has the calls of `std::fs` above it. Devices are those of [`device`]; [`mod@format`] and [`store`] say what lies on them,
//! for programs that look at a volume without opening it.
//!
//! The modules inside show the way that data takes, from the top down; no module uses one above it: `names`, `file`,
//! `attributes`, `fsync` (what a user asks for, by family of verbs) and `volume` (the domains, mounted as one) → `domain`
//! (transactions, commit, checkpoint, recovery of one micro file system) → `cell` (all state of one file) → `journal` →
//! `nodes` and `space` (node table; segments, mlogs, cleaning) → the crates `braidfs-store` (which block lies on which device)
//! and `braidfs-device`. `braid` is the protocol between domains.

mod attributes;
mod braid;
mod budget;
mod cell;
mod device_set;
mod domain;
mod error;
mod file;
mod fsync;
mod journal;
mod lazy;
pub mod mkfs;
mod names;
mod nodes;
pub mod numa;
mod panics;
// Bugs on purpose, and what they are called: for test programs.
#[doc(hidden)]
pub mod planted;
mod quota;
mod runtime_options;
mod space;
mod spending;
mod types;
mod volume;

#[cfg(debug_assertions)]
#[doc(hidden)]
pub use cell::extents::steps::taken as extent_steps;

pub use braidfs_device as device;
pub use braidfs_format as format;
pub use braidfs_store as store;
pub use budget::{Credit, Paid, RateUse, ServingUse, Turn};
pub use cell::pieces::{Defragmented, Pieces};
pub use device_set::DeviceSet;
pub use domain::ahead::Advice;
pub use error::{Error, Result};
pub use file::extents::FileExtent;
pub use file::pinned::{Piece, Pinned};
pub use names::path::OpenHow;
pub use quota::{Force, Forced, forced};
pub use spending::Spending;
pub use types::*;
pub use volume::add_device::DeviceChange;
pub use volume::device_use::DeviceUse;
pub use volume::drain::{Drained, HeldDirectory};
pub use volume::held::hand_over::NotHandedOver;
pub use volume::journal_replay::JournalReplay;
pub use volume::label::LABEL_MAX;
pub use volume::moves::Elsewhere;
pub use volume::quotas::{Quota, QuotaLimits};
pub use volume::rebalance::Rebalanced;
pub use volume::resize::{NewSize, Resized};
pub use volume::tenants::{
    GRACE, SoftLimit, TENANT_BPS_MIN, TENANT_INODES_MAX, TENANT_IOPS_MIN, TENANT_MEMORY_MIN, TENANT_SERVING_MIN,
    Tenant, TenantBudget,
};
pub use volume::trim::TRIM_MIN_MAX;
pub use volume::{OpenFile, Ticket, Volume};
