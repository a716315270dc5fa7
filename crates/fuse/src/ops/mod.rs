//! The handlers, one file per group of operations: names, attributes, directories, file data, extended attributes,
//! inode flags and the scrub.

mod attrs;
mod data;
mod dirs;
mod flags;
mod names;
mod scrub;
#[cfg(test)]
mod tests;
mod xattrs;

pub(crate) use attrs::attr_out;
pub(crate) use scrub::Scrubbing;
