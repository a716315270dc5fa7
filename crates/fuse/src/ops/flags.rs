//! Inode flags through `ioctl` (`lsattr`, `chattr`, `xfs_io`): FS_IOC_GETFLAGS, SETFLAGS, FSGETXATTR, FSSETXATTR.
//!
//! The kernel has checked the owner, and CAP_LINUX_IMMUTABLE for the flags that need it, before it asks by these numbers. The
//! ones of 32-bit programs (FS_IOC32_SETFLAGS) it turns into these; from anybody else it would hand them over unchecked
//! (`do_vfs_ioctl` and the compat `ioctl` in fs/ioctl.c), so they are as unknown here as they are to ext4.

use super::trim::FITRIM;
use crate::abi;
use crate::control::{
    DEFRAG, DEVICE_START, DEVICE_STATUS, DEVICE_TEXT, FS_IOC_GETFSLABEL, FS_IOC_SETFSLABEL, QUOTA, REMOUNT, RESIZE,
    SAMPLE, SCRUB_START, SCRUB_STATUS, SCRUB_TEXT, STATS, TENANT, UPGRADE,
};
use crate::fs::{BraidFs, Context, errno};
use crate::node::WireId;
use crate::request::{Answer, Handled, Outcome, Request};
use braidfs::format::inode::{APPEND, IMMUTABLE, NOATIME, NOCOW};
use braidfs::{FileKind, SetAttr};
use rustix::io::Errno;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

const FS_IOC_GETFLAGS: u32 = 0x8008_6601;
const FS_IOC_SETFLAGS: u32 = 0x4008_6602;
const FS_IOC_FSGETXATTR: u32 = 0x801c_581f;
const FS_IOC_FSSETXATTR: u32 = 0x401c_5820;

/// (flag of the inode, FS_*_FL, FS_XFLAG_* or 0)
const FLAGS: [(u32, u32, u32); 4] =
    [(NOCOW, 0x0080_0000, 0), (IMMUTABLE, 0x10, 0x8), (APPEND, 0x20, 0x10), (NOATIME, 0x80, 0x40)];

impl BraidFs {
    pub(crate) fn ioctl(&self, req: &Request<'_>, out: &mut Answer, cx: &Context<'_>) -> Handled {
        let (arg, input) = req.arg_and_rest::<abi::IoctlIn>()?;
        let input = input.get(..arg.in_size as usize).ok_or(Errno::INVAL)?;
        let room = arg.out_size as usize;
        let id = req.node();
        let node = self.opened_node(id, arg.fh)?;
        let now = || self.vol.getattr(node).map(|a| a.flags).map_err(errno);
        let of_files =
            sets_flags(arg.cmd) || matches!(arg.cmd, FS_IOC_GETFLAGS | FS_IOC_FSGETXATTR | FS_IOC_GETFSLABEL);
        if cx.channel.own().is_some() && !of_files {
            // who has a tenant's mount alone has no business with the volume's, nor with its own limits
            return Err(Errno::OPNOTSUPP);
        }
        match arg.cmd {
            FS_IOC_GETFLAGS => ioctl_out(out, room, &to_fl(now()?))?,
            FS_IOC_SETFLAGS => {
                let (fl, _) = u32::read_from_prefix(input).map_err(|_| Errno::INVAL)?;
                self.set_flags(id, from_fl(fl)?, cx)?;
                ioctl_out(out, room, &())?;
            }
            FS_IOC_FSGETXATTR => {
                let attr = self.vol.getattr(node).map_err(errno)?;
                let (xflags, projid) = (to_xflags(attr.flags), attr.project);
                ioctl_out(out, room, &abi::Fsxattr { xflags, projid, ..abi::Fsxattr::new_zeroed() })?;
            }
            FS_IOC_FSSETXATTR => {
                let (x, _) = abi::Fsxattr::read_from_prefix(input).map_err(|_| Errno::INVAL)?;
                if x.extsize != 0 || x.projid != self.vol.getattr(node).map_err(errno)?.project || x.cowextsize != 0 {
                    return Err(Errno::OPNOTSUPP);
                }
                // There is no FS_XFLAG for it.
                let keep = now()? & NOCOW;
                self.set_flags(id, from_xflags(x.xflags)? | keep, cx)?;
                ioctl_out(out, room, &())?;
            }
            // of the volume, asked on any of its files
            SCRUB_START | SCRUB_STATUS | SCRUB_TEXT => return self.scrub_ioctl(req, &arg, input, out),
            DEVICE_START | DEVICE_STATUS | DEVICE_TEXT => return self.device_ioctl(req, &arg, input, out),
            REMOUNT => return self.remount_ioctl(req, &arg, input, out),
            FS_IOC_GETFSLABEL => return self.get_label(&arg, out),
            FS_IOC_SETFSLABEL => return self.set_label(req, &arg, input, out),
            FITRIM => return self.trim_ioctl(req, &arg, input, cx),
            STATS => return self.stats_ioctl(&arg, out),
            SAMPLE => return self.sample_ioctl(req, &arg, input, out),
            TENANT => return self.tenant_ioctl(req, (id, node), &arg, input, cx),
            QUOTA => return self.quota_ioctl(req, node, (&arg, input), out, cx),
            DEFRAG => return self.defrag_ioctl(req, &arg, input, cx),
            RESIZE => return self.resize_ioctl(req, &arg, input, cx),
            UPGRADE => return self.upgrade_ioctl(req, &arg, input, cx),
            _ => return Err(Errno::NOTTY),
        }
        Ok(Outcome::Reply)
    }

    fn set_flags(&self, id: WireId, flags: u32, cx: &Context<'_>) -> Result<(), Errno> {
        self.check_may_guard(self.vol.getattr(id.ino()).map_err(errno)?.flags, flags)?;
        let set = SetAttr { flags: Some(flags), ..SetAttr::default() };
        let attr = self.vol.setattr(id.ino(), &set).map_err(errno)?;
        if attr.kind() == FileKind::File {
            self.flagged.note(attr.ino, attr.ctime, flags & IMMUTABLE != 0);
            self.show_change_soon(id);
        }
        // The kernel does not expect the change time to change, nor that writers have to ask from now on.
        cx.channel.invalidate(id, false);
        Ok(())
    }
}

/// Whether the ioctl changes flags of an inode.
pub(crate) fn sets_flags(number: u32) -> bool {
    matches!(number, FS_IOC_SETFLAGS | FS_IOC_FSSETXATTR)
}

/// Success and `value`, cut to what the caller has room for.
pub(crate) fn ioctl_out<T: IntoBytes + Immutable>(out: &mut Answer, room: usize, value: &T) -> Result<(), Errno> {
    let bytes = value.as_bytes();
    out.put(&abi::IoctlOut { result: 0, flags: 0, in_iovs: 0, out_iovs: 0 });
    if bytes.len() > room {
        return Err(Errno::INVAL);
    }
    out.put_bytes(bytes);
    Ok(())
}

fn to_fl(flags: u32) -> u32 {
    FLAGS.iter().filter(|f| flags & f.0 != 0).fold(0, |all, f| all | f.1)
}

fn to_xflags(flags: u32) -> u32 {
    FLAGS.iter().filter(|f| flags & f.0 != 0).fold(0, |all, f| all | f.2)
}

fn from_fl(fl: u32) -> Result<u32, Errno> {
    let flags = FLAGS.iter().filter(|f| fl & f.1 != 0).fold(0, |all, f| all | f.0);
    if to_fl(flags) == fl { Ok(flags) } else { Err(Errno::OPNOTSUPP) }
}

fn from_xflags(xflags: u32) -> Result<u32, Errno> {
    let flags = FLAGS.iter().filter(|f| xflags & f.2 != 0).fold(0, |all, f| all | f.0);
    if to_xflags(flags) == xflags { Ok(flags) } else { Err(Errno::OPNOTSUPP) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_translate_both_ways() {
        for flags in 0..16 {
            assert_eq!(from_fl(to_fl(flags)), Ok(flags));
            assert_eq!(from_xflags(to_xflags(flags)), Ok(flags & !NOCOW));
        }
        assert_eq!(from_fl(0x1), Err(Errno::OPNOTSUPP));
        assert_eq!(from_xflags(0x2), Err(Errno::OPNOTSUPP));
    }
}
