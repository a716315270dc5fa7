//! The handlers, one file per group of operations: names, attributes, directories, file data, extended attributes,
//! inode flags, the scrub, the trim, the volume's devices, options that change, counts of requests and who watches, and what is
//! made durable at once, and on
//! which thread.

mod aside;
mod attrs;
mod data;
mod defrag;
mod device;
mod dirs;
mod durable;
mod flags;
mod job;
mod names;
mod quota;
mod remount;
mod resize;
mod scrub;
mod stats;
mod syncs;
mod tenant;
#[cfg(test)]
pub(crate) mod tests;
mod trim;
mod volume;
mod watch;
mod xattrs;

pub(crate) use attrs::attr_out;
pub use device::TellDevices;
pub(crate) use durable::Durable;
pub(crate) use flags::{ioctl_out, sets_flags};
pub(crate) use job::{HandedJob, Job};
pub(crate) use syncs::Syncs;
pub(crate) use watch::Samples;
