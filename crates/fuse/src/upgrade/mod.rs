//! A new program takes a mount over, without an unmount: the kernel's connection, what the kernel holds, the volume's devices.
//!
//! The *old* process starts the new program as its child, with a socket between them. A child, since it then runs where the
//! mount runs (mount namespace, limits, service), and since its parent can end it and wait for its end: only then may the old
//! process touch the volume again. Not an `exec` of the old process, which could not go back. What passes over the socket
//! ([`wire`]), and who goes on when one of them dies:
//!
//! | step | old | new | if it dies here |
//! |---|---|---|---|
//! | greet | starts it | *Hello*: which records it takes | the old one never stopped |
//! | offer | *Offer*: devices, what was agreed with the kernel | looks at all that, *Willing* or why not | the same |
//! | stop | its threads stop receiving, what is under way ends ([`stop`]); the volume is unmounted, what is held is kept ([`Volume::unmount_holding`]) | waits | old: the connection ends. New: the old one mounts and serves again |
//! | take | *Take*: the record ([`record`]) and the connection | mounts ([`Volume::mount_holding`]), *Mounted* | old: the new one goes on. New: the old one, as above |
//! | go | *Go* | *Going*, then serves | the same |
//! | end | ends | answers the request that asked for all this | the new one serves: the connection ends with it |
//!
//! No request is received between *stop* and *Going*: they wait in the kernel. So each is served once, and none is served
//! by a process whose volume misses what another one acknowledged: nothing is acknowledged that is not durable by then. Where
//! the old one cannot close the volume, so that some of that may be gone, and where it cannot know that the new one has not
//! served, the connection ends as after a crash. Tenants without a journal are told of as in use only when it is known who
//! serves ([`Volume::end_hand_over`]): nobody finds them discarded on the way.
//! The connection lives as long as one of the two has a descriptor of it, and the new one gets it with the record only, when
//! all is durable: it never outlives an old process that was killed with something to lose.
//!
//! Where the old one is killed after *Take*, the new one reads the end of the socket, which is only closed by the end of
//! the old process or after it has ended the new one, and goes on as if told to.
//!
//! Not with rings: their queues belong to threads and memory of the process that registered them.

pub(crate) mod new;
pub(crate) mod old;
pub(crate) mod record;
pub(crate) mod stop;
mod wire;

pub use new::Heir;
pub(crate) use old::Upgrades;

use braidfs::{HeldInode, MountOptions, Remount, Volume};
use braidfs_device::{Device, FileDevice};
use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};

/// What a process must know to hand its mount over to another one.
#[derive(Debug)]
pub struct Upgradable {
    /// The volume's devices, as they were opened. They go with the volume.
    pub devices: Vec<Weak<FileDevice>>,
    /// How the volume was mounted; what a remount changed is asked of the volume.
    pub options: MountOptions,
    /// What the new program is called with: as it was mounted, and that it takes over.
    pub arguments: Vec<OsString>,
    /// The pipe to a parent that looks after this process ([`crate::supervise`]).
    pub supervisor: Option<OwnedFd>,
    /// Environment variables that are not for the new program.
    pub withheld: Vec<&'static str>,
    /// Why it cannot be.
    pub refused: Option<String>,
}

/// Mounts a volume that was unmounted for a hand-over: in the new process, or in the old one again.
pub(crate) fn mount_again(
    devices: &[Arc<FileDevice>],
    options: &MountOptions,
    now: &Remount,
    held: &[HeldInode],
) -> braidfs::Result<Volume> {
    let devices = devices.iter().map(|d| Arc::clone(d) as Arc<dyn Device>).collect();
    let options = MountOptions {
        commit_interval: now.commit_interval.unwrap_or(options.commit_interval),
        atime: now.atime.unwrap_or(options.atime),
        nodiratime: now.nodiratime.unwrap_or(options.nodiratime),
        lazytime: now.lazytime.unwrap_or(options.lazytime),
        read_only: now.read_only.unwrap_or(options.read_only),
        ..options.clone()
    };
    Volume::mount_holding(devices, options, held)
}

/// This process serves the volume from now on, and no other one mounts it by the same list.
pub(crate) fn end_hand_over(vol: &Volume) {
    if let Err(e) = vol.end_hand_over() {
        tracing::error!(error = %e, "tenants without a journal keep one until the next mount");
    }
}

/// A variable that names a file, for tests: where that has the line `STEP WHAT` the process that comes to the step removes the
/// file and does it: `kill` (SIGKILL to itself), `stop` (SIGSTOP), `fail`.
const FAILPOINT: &str = "BRAIDFS_TEST_UPGRADE";

/// # Errors
/// A test wants it.
pub(crate) fn at_step(step: &str) -> Result<(), String> {
    let Some(file) = std::env::var_os(FAILPOINT) else { return Ok(()) };
    let Ok(text) = std::fs::read_to_string(&file) else { return Ok(()) };
    let what = match text.trim().split_once(' ') {
        Some((wanted, what)) if wanted == step => what,
        _ => return Ok(()),
    };
    let _ = std::fs::remove_file(&file);
    let signal = match what {
        "kill" => rustix::process::Signal::KILL,
        "stop" => rustix::process::Signal::STOP,
        _ => return Err(format!("a test wants it to fail at {step}")),
    };
    let _ = rustix::process::kill_process(rustix::process::getpid(), signal);
    Ok(())
}
