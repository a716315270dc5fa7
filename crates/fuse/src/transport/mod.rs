//! How requests come from the kernel and answers go back: through `/dev/fuse`, or through io_uring (Linux 6.14).
//!
//! | | `dev` | `ring` |
//! |---|---|---|
//! | a request waits in | one queue, for any thread | the queue of the CPU that the caller runs on |
//! | it is served by | whichever thread is woken, often elsewhere | the thread of that CPU, bound to it |
//! | answer and next request | `write`, `read` | one `io_uring_enter` |
//! | FORGET, INTERRUPT, notifications | the same descriptor | `/dev/fuse` |
//!
//! Both hand a [`Request`] to the same code and send what that answers; [`Later`] is the duty to answer from another
//! thread. `cpus` decides which thread owns which queue, `ring` is the loop of such a thread, `uring` the io_uring that it
//! waits at, `entry` its memory, `loan` has large requests served by other threads, `mailbox` brings answers from elsewhere,
//! `forgets` reads what stays on the device.
//!
//! *Not turned on behind anybody's back*: the kernel takes rings only where its module has the parameter `enable_uring`.
//! Where a ring cannot be had, `auto` takes the device and says why in the log.
//!
//! [`Request`]: crate::request::Request

mod cpus;
mod entry;
mod forgets;
mod later;
mod loan;
mod mailbox;
mod ring;
mod uring;

pub(crate) use forgets::Forgets;
pub(crate) use later::Later;
pub(crate) use loan::Loan;
pub(crate) use mailbox::Ticket;
pub(crate) use ring::{DEFERRED_MAX, Reply, Ring, RingPlace};

use std::io;
use std::str::FromStr;

/// The kernel's switch: `Y` or `N`; absent before Linux 6.14, and where it was built without.
const SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";

/// Which transport a mount is to take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Transport {
    /// Rings where the kernel takes them.
    #[default]
    Auto,
    /// Rings, or the mount fails.
    Ring,
    /// Reads of and writes to `/dev/fuse`.
    Dev,
}

impl FromStr for Transport {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "auto" => Ok(Self::Auto),
            "ring" => Ok(Self::Ring),
            "dev" => Ok(Self::Dev),
            other => Err(format!("transport={other}: it is auto, ring (io_uring) or dev (/dev/fuse)")),
        }
    }
}

/// Where the rings of this mount are to be, for all CPUs that this process may use.
///
/// # Errors
/// The kernel's switch is off (the message says how to turn it on), or there is no io_uring (seccomp, a sysctl, memory).
pub(crate) fn rings() -> io::Result<Vec<RingPlace>> {
    // Opening it loads the module, with the parameters of modprobe.d.
    let _ = crate::channel::open_device();
    let switch = std::fs::read_to_string(SWITCH).map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => {
            io::Error::new(io::ErrorKind::Unsupported, "this kernel's FUSE has no io_uring (Linux 6.14 has)")
        }
        kind => io::Error::new(kind, format!("{SWITCH}: {e}")),
    })?;
    if switch.trim() != "Y" {
        return Err(io::Error::new(
            io::ErrorKind::Unsupported,
            format!("it is turned off; `echo Y > {SWITCH}` as root turns it on until the next boot"),
        ));
    }
    let places: Vec<RingPlace> =
        cpus::Plan::of_this_machine()?.owners.into_iter().map(|(cpu, queues)| RingPlace { cpu, queues }).collect();
    // A ring is of the thread that makes it: this one tells whether there can be any.
    let can = places.first().map_or(Ok(()), RingPlace::try_ring);
    can.map_err(|e| io::Error::new(e.kind(), format!("io_uring: {e}")))?;
    Ok(places)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transports_have_names() {
        assert_eq!(
            ["auto", "ring", "dev"].map(|s| s.parse()),
            [Ok(Transport::Auto), Ok(Transport::Ring), Ok(Transport::Dev)]
        );
        assert!("uring".parse::<Transport>().unwrap_err().contains("auto, ring"));
    }
}
