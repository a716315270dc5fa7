//! The ioctl FITRIM (`fstrim`): the kernel hands it on like any other that it does not know. It takes as long
//! as the device needs to discard all that is free ([`super::aside`]).

use crate::abi;
use crate::fs::{BraidFs, Context, errno};
use crate::request::{Handled, Request};
use crate::requester;
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
        if !requester::is_administrator(req) {
            return Err(Errno::PERM);
        }
        let (mut range, _) = TrimRange::read_from_prefix(input).map_err(|_| Errno::INVAL)?;
        self.ioctl_aside("fuse-trim", arg, cx, move |vol| {
            let end = range.start.saturating_add(range.len);
            range.len = vol.trim(range.start..end, range.minlen).map_err(errno)?;
            Ok(range)
        })
    }
}
