//! What users ask about the volume by an ioctl on any of its files: the label (`FS_IOC_GETFSLABEL`, `FS_IOC_SETFSLABEL`).
//!
//! FS_IOC_GETFSUUID and FIFREEZE never come here: the kernel answers them by itself, with ENOTTY and EOPNOTSUPP, since
//! FUSE gives its superblock no UUID and no `freeze_fs` (`fs/ioctl.c`: `ioctl_getfsuuid`, `ioctl_fsfreeze`).

use super::flags::ioctl_out;
use crate::abi;
use crate::control::LABEL_BYTES;
use crate::fs::{BraidFs, errno};
use crate::request::{Answer, Handled, Outcome, Request};
use crate::requester;
use braidfs::InodeNo;
use rustix::io::Errno;

impl BraidFs {
    pub(super) fn get_label(&self, arg: &abi::IoctlIn, out: &mut Answer) -> Handled {
        let mut text = [0; LABEL_BYTES];
        for (to, from) in text.iter_mut().zip(self.vol.label().bytes().take(LABEL_BYTES - 1)) {
            *to = from;
        }
        ioctl_out(out, arg.out_size as usize, &text)?;
        Ok(Outcome::Reply)
    }

    pub(super) fn set_label(&self, req: &Request<'_>, arg: &abi::IoctlIn, input: &[u8], out: &mut Answer) -> Handled {
        self.check_may_administer(req)?;
        let end = input.iter().position(|b| *b == 0).ok_or(Errno::INVAL)?;
        let text = std::str::from_utf8(&input[..end]).map_err(|_| Errno::INVAL)?;
        self.vol.set_label(text).map_err(errno)?;
        ioctl_out(out, arg.out_size as usize, &())?;
        Ok(Outcome::Reply)
    }

    /// Only an administrator and who owns the mount's root directory (where that is not root) may ask for what changes or loads the whole volume.
    pub(super) fn check_may_administer(&self, req: &Request<'_>) -> Result<(), Errno> {
        let owner = self.vol.getattr(InodeNo::ROOT).map_err(errno)?.uid;
        let may = |uid| if uid == 0 { requester::is_administrator(req) } else { uid == owner };
        if requester::uid(req).is_some_and(may) { Ok(()) } else { Err(Errno::PERM) }
    }
}
