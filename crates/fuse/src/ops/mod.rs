//! The handlers, one file per group of operations: names, attributes, directories, file data, extended attributes,
//! inode flags, the scrub, the trim, options that change, counts of requests and who watches, and what is made durable at once, and on
//! which thread.

mod attrs;
mod data;
mod defrag;
mod dirs;
mod durable;
mod flags;
mod names;
mod remount;
mod resize;
mod scrub;
mod stats;
mod syncs;
mod tenant;
#[cfg(test)]
mod tests;
mod trim;
mod volume;
mod watch;
mod xattrs;

pub(crate) use attrs::attr_out;
pub(crate) use durable::Durable;
pub(crate) use scrub::Scrubbing;
pub(crate) use syncs::Syncs;
pub(crate) use watch::Samples;
