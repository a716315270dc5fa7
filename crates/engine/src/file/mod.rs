//! Content of regular files: read, write, truncate, `fallocate`, where the blocks lie.

pub mod extents;
pub mod falloc;
pub mod read;
mod shift;
pub mod write;
