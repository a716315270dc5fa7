//! The handlers, one file per group of operations: names, attributes, directories, file data, extended attributes
//! and inode flags.

mod attrs;
mod data;
mod dirs;
mod flags;
mod names;
#[cfg(test)]
mod tests;
mod xattrs;

pub(crate) use attrs::attr_out;
