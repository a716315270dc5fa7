//! Extended attributes. ACLs too: the kernel caches and enforces them, the engine keeps them in step with the mode.

use super::attrs::CAPS;
use crate::abi::{self, init};
use crate::fs::{BraidFs, Context, errno};
use crate::profile::Xattr;
use crate::request::{Answer, Handled, Outcome, Request};
use crate::requester;
use braidfs::{Error, Volume, XattrMode};
use rustix::io::Errno;
use std::sync::atomic::Ordering;

impl BraidFs {
    pub(crate) fn setxattr(&self, req: &Request<'_>, cx: &Context<'_>) -> Handled {
        let (arg, rest) = if self.negotiated.has(init::SETXATTR_EXT) {
            req.arg_and_rest::<abi::SetxattrIn>()?
        } else {
            let (old, rest) = req.arg_and_rest::<abi::SetxattrCompatIn>()?;
            (abi::SetxattrIn { size: old.size, flags: old.flags, setxattr_flags: 0, padding: 0 }, rest)
        };
        let end = rest.iter().position(|&b| b == 0).ok_or(Errno::INVAL)?;
        let (name, value) = (&rest[..end], &rest[end + 1..]);
        let value = value.get(..arg.size as usize).ok_or(Errno::INVAL)?;
        self.allows(name)?;
        let node = self.live(req.node())?;
        let mode = xattr_mode(arg.flags)?;
        let _taking = match self.take_room_for_name(req, node, value.len(), cx) {
            Ok(taking) => taking,
            Err(handled) => return handled,
        };
        let kills = arg.setxattr_flags & abi::SETXATTR_ACL_KILL_SGID != 0;
        let set = if kills { Volume::setxattr_kill_sgid } else { Volume::setxattr };
        set(&self.vol, node, name, value, mode).map_err(errno)?;
        if name == CAPS {
            self.caps_epoch.fetch_add(1, Ordering::AcqRel);
        }
        Ok(Outcome::Reply)
    }

    pub(crate) fn getxattr(&self, req: &Request<'_>, out: &mut Answer) -> Handled {
        let (arg, name) = req.arg_and_name::<abi::GetxattrIn>()?;
        self.allows(name)?;
        let value = self.vol.getxattr(self.live(req.node())?, name).map_err(errno)?;
        sized(out, arg.size, &value)
    }

    pub(crate) fn listxattr(&self, req: &Request<'_>, out: &mut Answer) -> Handled {
        let arg: abi::GetxattrIn = req.arg()?;
        let mut list = Vec::new();
        for name in self.vol.listxattr(self.live(req.node())?).map_err(errno)? {
            // The kernel shows the values of these to nobody else, but would show the names. A file system above (overlayfs) asks
            // as who mounted it, which the request may tell, and `/proc` never does.
            let told = !name.starts_with(b"trusted.") || req.head.uid == 0 || requester::is_administrator(req);
            if told && self.profile.xattr(Some(&name)) == Xattr::Kept {
                list.extend_from_slice(&name);
                list.push(0);
            }
        }
        sized(out, arg.size, &list)
    }

    pub(crate) fn removexattr(&self, req: &Request<'_>) -> Handled {
        let name = req.name()?;
        self.allows(name)?;
        match self.vol.removexattr(self.live(req.node())?, name) {
            // To have no access list is to have none beyond the mode: there is nothing to do.
            Err(Error::NoAttr) if name.starts_with(b"system.posix_acl_") => {}
            removed => removed.map_err(errno)?,
        }
        Ok(Outcome::Reply)
    }

    /// Whether the mount has attributes of this name.
    fn allows(&self, name: &[u8]) -> Result<(), Errno> {
        if self.profile.xattr(Some(name)) == Xattr::Kept { Ok(()) } else { Err(Errno::OPNOTSUPP) }
    }
}

/// `value` where `size` bytes hold it; only its length where `size` is 0.
fn sized(out: &mut Answer, size: u32, value: &[u8]) -> Handled {
    if size == 0 {
        out.put(&abi::GetxattrOut { size: value.len() as u32, padding: 0 });
    } else if value.len() <= size as usize {
        out.put_bytes(value);
    } else {
        return Err(Errno::RANGE);
    }
    Ok(Outcome::Reply)
}

fn xattr_mode(flags: u32) -> Result<XattrMode, Errno> {
    match flags as i32 {
        0 => Ok(XattrMode::Set),
        libc::XATTR_CREATE => Ok(XattrMode::Create),
        libc::XATTR_REPLACE => Ok(XattrMode::Replace),
        _ => Err(Errno::INVAL),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::op;
    use crate::fs::Context;
    use crate::node::WireId;
    use crate::ops::tests::{ROOT, Served, WITHOUT_OPEN, request};
    use braidfs::MkfsOptions;
    use zerocopy::{FromBytes, IntoBytes};

    /// What a request says of who asks counts, where it says so: its thread may be another's.
    #[test]
    fn names_for_root_are_told_to_whom_the_request_names() {
        let s = Served::of(WITHOUT_OPEN, 16384, &MkfsOptions::default());
        let id = WireId(s.mknod(ROOT, "f").nodeid);
        s.fs.vol.setxattr(id.ino(), b"trusted.t", b"1", XattrMode::Set).unwrap();
        let told = |uid: u32| {
            let mut frame = request(op::LISTXATTR, id, abi::GetxattrIn { size: 4096, padding: 0 }.as_bytes());
            let (mut head, _) = abi::InHeader::read_from_prefix(&frame).unwrap();
            (head.uid, head.pid) = (uid, 0);
            frame[..size_of::<abi::InHeader>()].copy_from_slice(head.as_bytes());
            let mut out = Answer::new(4096);
            let cx = Context::new(&s.channel, 1, None);
            s.fs.handle(&Request::parse(&frame).unwrap(), &mut out, &cx).unwrap();
            out.body().to_vec()
        };
        assert_eq!([0, 1000, u32::MAX].map(told), [b"trusted.t\0".to_vec(), Vec::new(), Vec::new()]);
    }

    #[test]
    fn sizes_are_probed_and_checked() {
        let mut out = Answer::new(0);
        sized(&mut out, 0, b"abc").unwrap();
        assert_eq!(out.body(), [3, 0, 0, 0, 0, 0, 0, 0]);
        out.clear();
        sized(&mut out, 3, b"abc").unwrap();
        assert_eq!(out.body(), b"abc");
        assert_eq!(sized(&mut out, 2, b"abc"), Err(Errno::RANGE));
        assert_eq!(xattr_mode(3), Err(Errno::INVAL));
    }
}
