//! braidfs: a file system of many independent logs (*domains*) braided into one POSIX namespace.
//!
//! The modules show the way that data takes, from the top down; no module uses one above it:
//! [`names`], [`mod@file`], [`attributes`], [`fsync`] (what a user asks for, by family of verbs) and [`volume`] (the domains,
//! mounted as one) → [`domain`] (transactions, commit, checkpoint, recovery of one micro file system) → [`cell`] (all state
//! of one file) → [`journal`] → [`nodes`] and [`space`] (node table; segments, mlogs, cleaning) → the crates
//! `braidfs-store` (which block lies on which device) and `braidfs-device`. [`braid`] is the protocol between domains.

pub mod attributes;
pub mod braid;
mod budget;
pub mod cell;
pub mod domain;
pub mod error;
pub mod file;
pub mod fsync;
pub mod journal;
pub mod lazy;
pub mod mkfs;
pub mod names;
pub mod nodes;
pub mod planted;
pub mod quota;
pub mod runtime_options;
pub mod space;
pub mod types;
pub mod volume;

pub use braidfs_device as device;
pub use braidfs_format as format;
pub use braidfs_store as store;
pub use budget::{Credit, Paid, RateUse, Turn};
pub use cell::pieces::{Defragmented, Pieces};
pub use domain::ahead::Advice;
pub use error::{Error, Result};
pub use file::extents::FileExtent;
pub use file::pinned::{Piece, Pinned};
pub use names::path::OpenHow;
pub use quota::{Force, Forced, forced};
pub use types::*;
pub use volume::add_device::DeviceChange;
pub use volume::drain::{Drained, HeldDirectory};
pub use volume::held::hand_over::NotHandedOver;
pub use volume::journal_replay::JournalReplay;
pub use volume::quotas::{Quota, QuotaLimits};
pub use volume::rebalance::Rebalanced;
pub use volume::resize::{NewSize, Resized};
pub use volume::tenants::{
    GRACE, SoftLimit, TENANT_BPS_MIN, TENANT_INODES_MAX, TENANT_IOPS_MIN, TENANT_MEMORY_MIN, Tenant, TenantBudget,
};
pub use volume::{OpenFile, Ticket, Volume};
