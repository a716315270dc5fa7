//! Operations on names: lookup, create, link, unlink, rename, symlinks.

use super::attrs::entry_out;
use crate::abi::{self, fopen};
use crate::fs::{BraidFs, Context, TTL_SECONDS, errno};
use crate::node::WireId;
use crate::request::{Answer, Handled, Outcome, Request};
use braidfs::{Error, FileKind, NewNode, RenameMode};
use rustix::io::Errno;
use zerocopy::FromZeros;

impl BraidFs {
    pub(crate) fn lookup(&self, req: &Request<'_>, out: &mut Answer) -> Handled {
        let (id, name) = (req.node(), req.name()?);
        match name {
            // Of any inode, also of a file: so an NFS file handle comes back to life.
            b"." => {
                let attr = self.count_known(id)?;
                out.put(&entry_out(&attr, self.attr_ttl(&attr)));
                return Ok(Outcome::Reply);
            }
            // And so it finds its way up. The parent of a removed directory may be gone, and its number given again.
            b".." if self.attr(id)?.nlink == 0 => return Err(Errno::STALE),
            _ => {}
        }
        let dir = self.live(id)?;
        self.listings.looked_up(dir);
        match self.vol.lookup_held(dir, name) {
            Ok(attr) => out.put(&entry_out(&attr, self.attr_ttl(&attr))),
            // Node 0 with a time to live: the kernel keeps the absence of the name.
            Err(Error::NotFound) => out.put(&abi::EntryOut { entry_valid: TTL_SECONDS, ..abi::EntryOut::new_zeroed() }),
            Err(e) => return Err(errno(e)),
        }
        Ok(Outcome::Reply)
    }

    pub(crate) fn mknod(&self, req: &Request<'_>, out: &mut Answer, cx: &Context<'_>) -> Handled {
        let (arg, name) = req.arg_and_name::<abi::MknodIn>()?;
        let kind = FileKind::from_mode(arg.mode).ok_or(Errno::INVAL)?;
        let new = NewNode { kind, mode: arg.mode & 0o7777, umask: arg.umask, rdev: arg.rdev.into(), target: &[] };
        self.make(req, name, &new, out, cx)
    }

    pub(crate) fn mkdir(&self, req: &Request<'_>, out: &mut Answer, cx: &Context<'_>) -> Handled {
        let (arg, name) = req.arg_and_name::<abi::MkdirIn>()?;
        let new = NewNode { kind: FileKind::Dir, mode: arg.mode & 0o7777, umask: arg.umask, rdev: 0, target: &[] };
        self.make(req, name, &new, out, cx)
    }

    pub(crate) fn symlink(&self, req: &Request<'_>, out: &mut Answer, cx: &Context<'_>) -> Handled {
        let (name, target) = req.two_names()?;
        let new = NewNode { kind: FileKind::Symlink, mode: 0o777, umask: 0, rdev: 0, target };
        self.make(req, name, &new, out, cx)
    }

    fn make(&self, req: &Request<'_>, name: &[u8], new: &NewNode<'_>, out: &mut Answer, cx: &Context<'_>) -> Handled {
        let dir = self.live(req.node())?;
        let _taking = match self.take_room_for_name(req, dir, new.target.len(), cx) {
            Ok(taking) => taking,
            Err(handled) => return handled,
        };
        let attr = self.vol.create_held(dir, name, new, &req.cred()).map_err(errno)?;
        if !self.negotiated.opens() {
            self.watch_room(attr.ino, 0, cx.channel);
        }
        out.put(&entry_out(&attr, self.attr_ttl(&attr)));
        Ok(Outcome::Reply)
    }

    pub(crate) fn create(&self, req: &Request<'_>, out: &mut Answer, cx: &Context<'_>) -> Handled {
        let (arg, name) = req.arg_and_name::<abi::CreateIn>()?;
        let new = NewNode { kind: FileKind::File, mode: arg.mode & 0o7777, umask: arg.umask, rdev: 0, target: &[] };
        let dir = self.live(req.node())?;
        let _taking = match self.take_room_for_name(req, dir, 0, cx) {
            Ok(taking) => taking,
            Err(handled) => return handled,
        };
        let attr = match self.vol.create(dir, name, &new, &req.cred()) {
            // The kernel takes the name for absent, after a CREATE that could not be made durable for instance. It must look
            // the file up, also at its permissions, and does when it is told this (`do_filp_open` in fs/namei.c).
            Err(Error::Exists) if arg.flags & libc::O_EXCL as u32 == 0 => return Err(Errno::STALE),
            made => made.map_err(errno)?,
        };
        let file = self.hold(WireId::of(&attr))?;
        let open = self.keep(file, arg.flags, false, cx)?;
        let attr = self.count(&attr)?;
        out.put(&entry_out(&attr, self.attr_ttl(&attr)));
        out.put(&open);
        Ok(Outcome::Reply)
    }

    pub(crate) fn tmpfile(&self, req: &Request<'_>, out: &mut Answer, cx: &Context<'_>) -> Handled {
        let arg: abi::CreateIn = req.arg()?;
        let new = NewNode { kind: FileKind::File, mode: arg.mode & 0o7777, umask: arg.umask, rdev: 0, target: &[] };
        let dir = self.live(req.node())?;
        let _taking = match self.take_room_for_name(req, dir, 0, cx) {
            Ok(taking) => taking,
            Err(handled) => return handled,
        };
        let (attr, file) = self.vol.tmpfile(dir, &new, &req.cred()).map_err(errno)?;
        // counted while it is open: nothing else keeps it
        let attr = self.count(&attr)?;
        let open = if self.negotiated.opens() {
            self.keep(file, arg.flags, false, cx).inspect_err(|_| self.uncount(&attr))?
        } else {
            abi::OpenOut { fh: 0, open_flags: fopen::KEEP_CACHE | fopen::NOFLUSH, padding: 0 }
        };
        out.put(&entry_out(&attr, self.attr_ttl(&attr)));
        out.put(&open);
        Ok(Outcome::Reply)
    }

    pub(crate) fn link(&self, req: &Request<'_>, out: &mut Answer, cx: &Context<'_>) -> Handled {
        let (arg, name) = req.arg_and_name::<abi::LinkIn>()?;
        let (old, dir) = (self.live(WireId(arg.oldnodeid))?, self.live(req.node())?);
        let _taking = match self.take_room_for_name(req, dir, 0, cx) {
            Ok(taking) => taking,
            Err(handled) => return handled,
        };
        let attr = self.vol.link_held(old, dir, name).map_err(errno)?;
        out.put(&entry_out(&attr, self.attr_ttl(&attr)));
        Ok(Outcome::Reply)
    }

    pub(crate) fn unlink(&self, req: &Request<'_>) -> Handled {
        self.vol.unlink(self.live(req.node())?, req.name()?).map_err(errno)?;
        Ok(Outcome::Reply)
    }

    pub(crate) fn rmdir(&self, req: &Request<'_>) -> Handled {
        self.vol.rmdir(self.live(req.node())?, req.name()?).map_err(errno)?;
        Ok(Outcome::Reply)
    }

    pub(crate) fn rename(&self, req: &Request<'_>, cx: &Context<'_>) -> Handled {
        let (arg, from, to) = req.arg_and_two_names::<abi::RenameIn>()?;
        self.rename_to(req, from, cx.channel.node(WireId(arg.newdir)), to, RenameMode::Replace, cx)
    }

    pub(crate) fn rename2(&self, req: &Request<'_>, cx: &Context<'_>) -> Handled {
        let (arg, from, to) = req.arg_and_two_names::<abi::Rename2In>()?;
        let mode = rename_mode(arg.flags)?;
        self.rename_to(req, from, cx.channel.node(WireId(arg.newdir)), to, mode, cx)
    }

    fn rename_to(
        &self,
        req: &Request<'_>,
        from: &[u8],
        newdir: WireId,
        to: &[u8],
        mode: RenameMode,
        cx: &Context<'_>,
    ) -> Handled {
        let olddir = self.live(req.node())?;
        let newdir = if newdir == req.node() { olddir } else { self.live(newdir)? };
        // a name that is there already needs no room, and who replaces a file may do so to make some; a whiteout is a new inode
        let is_new = self.is_tight(newdir) && matches!(self.vol.lookup(newdir, to), Err(Error::NotFound));
        let mut taken = Vec::new();
        for (dir, makes) in [(newdir, is_new), (olddir, mode.leaves_whiteout())] {
            if makes {
                match self.take_room_for_name(req, dir, 0, cx) {
                    Ok(taking) => taken.push(taking),
                    Err(handled) => return handled,
                }
            }
        }
        self.vol.rename_by(olddir, from, newdir, to, mode, &req.cred()).map_err(errno)?;
        Ok(Outcome::Reply)
    }

    pub(crate) fn readlink(&self, req: &Request<'_>, out: &mut Answer) -> Handled {
        out.put_bytes(&self.vol.readlink(self.live(req.node())?).map_err(errno)?);
        Ok(Outcome::Reply)
    }
}

/// A whiteout is left where the new name is free.
const NOREPLACE_WHITEOUT: u32 = libc::RENAME_NOREPLACE | libc::RENAME_WHITEOUT;

/// `renameat2` flags. Of an exchange with others the kernel does not ask.
fn rename_mode(flags: u32) -> Result<RenameMode, Errno> {
    match flags {
        0 => Ok(RenameMode::Replace),
        libc::RENAME_NOREPLACE => Ok(RenameMode::NoReplace),
        libc::RENAME_EXCHANGE => Ok(RenameMode::Exchange),
        libc::RENAME_WHITEOUT => Ok(RenameMode::Whiteout),
        NOREPLACE_WHITEOUT => Ok(RenameMode::NoReplaceWhiteout),
        _ => Err(Errno::INVAL),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rename_flags() {
        assert_eq!(rename_mode(0), Ok(RenameMode::Replace));
        assert_eq!(rename_mode(1), Ok(RenameMode::NoReplace));
        assert_eq!(rename_mode(2), Ok(RenameMode::Exchange));
        assert_eq!(rename_mode(3), Err(Errno::INVAL));
        assert_eq!(rename_mode(4), Ok(RenameMode::Whiteout));
        assert_eq!(rename_mode(5), Ok(RenameMode::NoReplaceWhiteout));
        assert_eq!(rename_mode(6), Err(Errno::INVAL));
        assert_eq!(rename_mode(7), Err(Errno::INVAL));
        assert_eq!(rename_mode(8), Err(Errno::INVAL));
    }
}
