//! The commands, one file each: its arguments (`Args`) and `run`.

pub mod bench;
pub mod cat;
pub mod completions;
pub mod cp;
pub mod defrag;
pub mod dump;
pub mod fsck;
pub mod image;
pub mod info;
pub mod ls;
pub mod man;
pub mod man_text;
pub mod mkdir;
pub mod mkfs;
pub mod mount;
pub mod mount_options;
pub mod option_table;
pub mod probe;
pub mod remount;
pub mod resize;
pub mod rm;
pub mod scrub;
pub mod stats;
pub mod tenant;
pub mod top;
pub mod umount;
