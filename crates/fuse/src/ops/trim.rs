//! The ioctl FITRIM (`fstrim`): the kernel hands it on like any other that it does not know.
//!
//! It takes as long as the device needs to discard all that is free, so that a thread of its own does it: a serving thread may
//! be the only one for its queue.

use crate::abi;
use crate::fs::{BraidFs, Context, errno};
use crate::ops::flags::ioctl_out;
use crate::request::{Answer, Handled, Outcome, Request};
use crate::requester;
use crate::session::run_aside;
use rustix::io::Errno;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// `_IOWR('X', 121, struct fstrim_range)` of linux/fs.h.
pub(super) const FITRIM: u32 = 0xc018_5879;

/// `struct fstrim_range`: bytes. `len` comes back as what was discarded.
#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
struct TrimRange {
    start: u64,
    len: u64,
    minlen: u64,
}

impl BraidFs {
    /// Only root may, as the kernel does not check CAP_SYS_ADMIN for us.
    pub(super) fn trim_ioctl(&self, req: &Request<'_>, arg: &abi::IoctlIn, input: &[u8], cx: &Context<'_>) -> Handled {
        if requester::uid(req) != Some(0) {
            return Err(Errno::PERM);
        }
        let (mut range, _) = TrimRange::read_from_prefix(input).map_err(|_| Errno::INVAL)?;
        let (vol, later, room) = (self.vol.clone(), cx.later(), arg.out_size as usize);
        let work = move || {
            let end = range.start.saturating_add(range.len);
            let mut out = Answer::new(64);
            let trimmed = vol.trim(range.start..end, range.minlen).map_err(errno).and_then(|bytes| {
                range.len = bytes;
                ioctl_out(&mut out, room, &range)
            });
            drop(vol);
            match trimmed {
                Ok(()) => later.answer(&mut out),
                Err(e) => later.done(Err(e)),
            }
        };
        let mut trims = self.trims.lock();
        trims.retain(|t| !t.is_finished());
        // Where there is no thread, what was to be its work is dropped, and answers EIO.
        if let Ok(thread) = run_aside("fuse-trim", work) {
            trims.push(thread);
        }
        Ok(Outcome::Deferred)
    }
}
