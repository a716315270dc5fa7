//! The ioctl FITRIM (`fstrim`): the kernel hands it on like any other that it does not know.
//!
//! It is served by the thread that received it; the others go on meanwhile.

use crate::abi;
use crate::asker;
use crate::fs::{BraidFs, errno};
use crate::ops::flags::ioctl_out;
use crate::request::{Answer, Handled, Outcome, Request};
use rustix::io::Errno;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// `_IOWR('X', 121, struct fstrim_range)` of linux/fs.h.
const FITRIM: u32 = 0xc018_5879;

/// `struct fstrim_range`: bytes. `len` comes back as what was discarded.
#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
struct TrimRange {
    start: u64,
    len: u64,
    minlen: u64,
}

impl BraidFs {
    /// FITRIM; `None` for other ioctls. Only root may, as the kernel does not check CAP_SYS_ADMIN for us.
    pub(crate) fn trim_ioctl(
        &self,
        req: &Request<'_>,
        arg: &abi::IoctlIn,
        input: &[u8],
        out: &mut Answer,
    ) -> Option<Handled> {
        if arg.cmd != FITRIM {
            return None;
        }
        let trim = |out: &mut Answer| {
            if asker::uid(req) != Some(0) {
                return Err(Errno::PERM);
            }
            let (mut range, _) = TrimRange::read_from_prefix(input).map_err(|_| Errno::INVAL)?;
            let end = range.start.saturating_add(range.len);
            range.len = self.vol.trim(range.start..end, range.minlen).map_err(errno)?;
            ioctl_out(out, arg.out_size as usize, &range)?;
            Ok(Outcome::Reply)
        };
        Some(trim(out))
    }
}
