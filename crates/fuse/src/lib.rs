//! The FUSE front end of braidfs: mounts a [`braidfs::Volume`] and answers the kernel.
//!
//! The modules, in the order in which a request passes: `mount` (gets the connection; `mount_table` tells which mount is where)
//! → `session` (serving threads)
//! → `transport`, `channel` and `request` (how it comes; `abi` declares the frames) → `fs` (which handler) → `ops` (the
//! handlers, over the engine's API) → `node` (which inode is meant), `lookups` (what the kernel was told of) → `opened`
//! (its file), `handles` (files that the kernel asked to open), `helpers` (what serving threads must not wait for), `room` and `dirty` (ENOSPC in time), `direct_writes` (no stale pages behind
//! direct writes). `serve` runs the whole from mount to unmount,
//! `connections` keeps tenants that are mounted by themselves apart from the rest, `tenant_mount` mounts them,
//! `latency` looks after the serving threads meanwhile, `counters` counts what they are asked, `watch` tells it, `slow` tells
//! the log of what took long; `profile` says
//! what a mount gives up to be asked less; `daemon` and `supervise` help the command line. `upgrade` hands all of it to another program.
//!
//! The protocol is spoken directly, not through a crate: `sync` (SYNCFS), unnamed files (TMPFILE), birth times (STATX)
//! and an `umount` that waits until the volume is closed (DESTROY) need operations that the crates do not pass on.
//!
//! `unsafe` is confined to `daemon` (fork), `supervise` and `upgrade::stop` (signals), `supervise::successor` (another program
//! in this process), `channel` and `control` (one ioctl each), `latency::follow`
//! (scheduling policy), `transport::ring` (submissions), `transport::uring` (io_uring) and `transport::entry` (memory given back).

mod abi;
mod channel;
mod connections;
pub mod control;
mod counters;
mod daemon;
mod direct_writes;
mod dirty;
mod dirty_grants;
mod ending;
mod failed;
mod flagged;
mod fs;
mod handles;
mod helpers;
mod latency;
mod listing;
mod looks;
mod lookups;
mod mount;
mod mount_table;
mod node;
mod opened;
mod ops;
mod pace;
mod past_cache;
mod profile;
mod request;
mod requester;
mod room;
mod serve;
mod session;
mod shards;
mod slow;
mod supervise;
mod tenant_mount;
mod transport;
mod upgrade;
pub mod watch;
mod within_quota;

pub use daemon::{DaemonError, Ready, daemonize};
pub use latency::Latency;
pub use mount::{MountConfig, abort as cut_off, remount};
pub use mount_table::{DeadMount, MountId, dead_at};
pub use ops::TellDevices;
pub use profile::{Cache, Profile};
pub use serve::{Progress, ServeError, serve};
pub use supervise::{Guard, Limit, Looked, Successor, SuperviseError, Supervised, greeting, look_after, supervise};
pub use transport::Transport;
pub use upgrade::{Heir, Upgradable};
