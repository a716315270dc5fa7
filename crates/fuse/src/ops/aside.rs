//! Requests that a thread of its own answers, since they wait for a device, for groups or for whoever has them: a serving thread
//! may be the only one for its queue.

use crate::abi;
use crate::fs::{BraidFs, Context};
use crate::ops::flags::ioctl_out;
use crate::request::{Answer, Handled, Outcome};
use crate::session::run_aside;
use crate::transport::Later;
use braidfs::Volume;
use braidfs_sync::MutexGuard;
use rustix::io::Errno;
use std::sync::Arc;
use std::thread::JoinHandle;
use zerocopy::{Immutable, IntoBytes};

/// The answer to an ioctl that is still to come. Where it is dropped, EIO.
pub(super) struct IoctlReply {
    later: Later,
    /// Bytes that who asks has room for.
    room: usize,
}

impl IoctlReply {
    /// Sends it.
    pub fn send<T: IntoBytes + Immutable>(self, said: Result<T, Errno>) {
        let mut out = Answer::new(size_of::<T>());
        match said.and_then(|value| ioctl_out(&mut out, self.room, &value)) {
            Ok(()) => self.later.answer(&mut out),
            Err(e) => self.later.done(Err(e)),
        }
    }
}

impl BraidFs {
    /// Has a thread `name` answer the ioctl with what `work` returns. The volume is let go before the answer goes out.
    pub(super) fn ioctl_aside<T: IntoBytes + Immutable>(
        &self,
        name: &str,
        arg: &abi::IoctlIn,
        cx: &Context<'_>,
        work: impl FnOnce(Arc<Volume>) -> Result<T, Errno> + Send + 'static,
    ) -> Handled {
        self.ioctl_aside_later(name, arg, cx, |vol, reply| reply.send(work(vol)))
    }

    /// Has a thread `name` do `work`, which lets the volume go and then answers the ioctl, or has somebody else answer it.
    pub(super) fn ioctl_aside_later(
        &self,
        name: &str,
        arg: &abi::IoctlIn,
        cx: &Context<'_>,
        work: impl FnOnce(Arc<Volume>, IoctlReply) + Send + 'static,
    ) -> Handled {
        let (vol, reply) = (self.vol.clone(), IoctlReply { later: cx.later(), room: arg.out_size as usize });
        // Where there is no thread, what was to be its work is dropped, and answers EIO.
        self.asides().extend(run_aside(name, move || work(vol, reply)).ok());
        Ok(Outcome::Deferred)
    }

    /// The threads that the end of the mount waits for, without those that have ended.
    pub(super) fn asides(&self) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
        let mut asides = self.asides.lock();
        asides.retain(|t| !t.is_finished());
        asides
    }
}

/// As much of a text as there is room for, cut between characters.
pub(super) fn short<const ROOM: usize>(text: &str) -> [u8; ROOM] {
    let mut room = [0; ROOM];
    let end = (0..=ROOM.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
    room[..end].copy_from_slice(&text.as_bytes()[..end]);
    room
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_reason_is_cut_between_characters() {
        const ROOM: usize = 464;
        let cut = short::<ROOM>(&format!("x{}", "é".repeat(ROOM)));
        let end = cut.iter().position(|b| *b == 0).unwrap_or(cut.len());
        assert!(std::str::from_utf8(&cut[..end]).is_ok() && end >= ROOM - 1);
        assert_eq!(&short::<ROOM>("why")[..4], b"why\0");
    }
}
