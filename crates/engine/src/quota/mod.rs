//! Limits of users, groups and directories: what each may use of the volume, and uses (docs/quotas.md).
//!
//! Owns the counts, by owner: a user, a group, or a *project*, the number that inodes of a directory tree carry (XFS's project
//! quotas). Each inode is counted for its user, its group, and for its project where it has one, with the blocks of its content. Nothing is counted
//! until a volume has its first limit ([`Quotas::begin`]); then it is until the unmount.
//!
//! Invariant, while counting has ended and no operation is under way: what an owner uses is the sum over its inodes that are not
//! deleted, each with its mapped and its dirty blocks. Whoever changes that of an inode has its cell locked for writing, and
//! charges before ([`Charge`]) or after.
//!
//! **Exact and shared by nobody.** A count is the account of what is left of a limit ([`Account`]): while much is left each slot
//! of threads has some for itself; near the limit all are one number, so that the last block is had by whoever asks first, with
//! one thread as with many. Where an owner has no limit there is always much left.
//!
//! **Counting.** The inodes that there are when counting begins are visited one by one while the volume is in use. An inode is
//! counted by whoever comes first, the visitor or an operation that is about to change it; `counted` says whose turn is over.
//! Whether it was is asked with the inode's cell locked.
//!
//! Not promised: that a limit holds for what was accepted before it was set, or is charged by force: by a privileged user (limits
//! of users and groups only), by the kernel's write-back, for blocks of directories.

mod charge;
mod count;
mod owners;
#[cfg(test)]
mod tests;

pub(crate) use charge::force;
pub use charge::{Charge, Forced, forced};
pub(crate) use owners::Used;
pub use owners::{Force, Owners, Quotas};

use crate::types::QuotaOwner;
use braidfs_format::quota::QuotaEntry;
use std::collections::BTreeMap;

/// The limits of a volume, as its root directory has them. Changed under the lock of tenants.
pub(crate) type Limits = BTreeMap<QuotaOwner, QuotaEntry>;
