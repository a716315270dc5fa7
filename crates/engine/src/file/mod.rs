//! Content of regular files: read, write, truncate, `fallocate`, where the blocks lie.

pub mod ahead;
mod copy;
pub mod defragment;
pub mod extents;
pub mod falloc;
pub mod pinned;
pub mod read;
mod reserve;
mod shift;
mod truncate;
pub mod write;

use braidfs_format::inode::LBLK_MAX;
pub(crate) use truncate::cuts;

/// Bytes of a page, which is a block.
const PAGE: u64 = 4096;
/// Longest file, bytes: 48-bit logical blocks.
pub(crate) const SIZE_MAX: u64 = (LBLK_MAX + 1) * PAGE;
