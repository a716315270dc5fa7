//! Attributes: getattr, statx, setattr, statfs; and what a change of owner or content takes away.
//!
//! With HANDLE_KILLPRIV_V2 it is the file system that clears setuid, setgid and `security.capability`; in return the
//! kernel does not ask for that attribute before each write.

use crate::abi::{self, fattr};
use crate::fs::{BraidFs, Context, TTL_SECONDS, errno};
use crate::node::WireId;
use crate::opened::Opened;
use crate::request::{Answer, Handled, Outcome, Request};
use crate::requester;
use crate::within_quota::Within;
use braidfs::format::inode::{APPEND, IMMUTABLE};
use braidfs::{Attr, Error, FileKind, InodeNo, SetAttr, SetTime, Timestamp};
use rustix::io::Errno;
use std::sync::atomic::Ordering;
use zerocopy::FromZeros;

/// The attribute that holds file capabilities.
pub(crate) const CAPS: &[u8] = b"security.capability";
/// STATX_BASIC_STATS and STATX_BTIME.
const STATX_TOLD: u32 = 0x0fff;

impl BraidFs {
    pub(crate) fn getattr(&self, req: &Request<'_>, out: &mut Answer, cx: &Context<'_>) -> Handled {
        let (arg, id) = (req.arg::<abi::GetattrIn>()?, req.node());
        if arg.getattr_flags & abi::GETATTR_FH != 0 && !self.negotiated.opens() {
            let flags = self.attr(id)?.flags;
            if flags & (IMMUTABLE | APPEND) != 0 && requester::is_writing(req) {
                return Err(Errno::PERM);
            }
            match self.getattr_within_quota(req, cx)? {
                Within::Waits(outcome) => return Ok(outcome),
                Within::Goes(granted) if self.is_tight(id.ino()) => {
                    return self.getattr_of_writer(req, granted, out, cx);
                }
                Within::Goes(_) => {}
            }
        } else if arg.getattr_flags & abi::GETATTR_FH != 0
            && (self.is_tight(id.ino()) || self.flagged.is_immutable(id.ino()) || self.asks_for_quota(id.ino()))
            && self.may_write_cached(id, arg.fh)
        {
            if self.flagged.is_immutable(id.ino()) && requester::is_writing(req) {
                return Err(Errno::PERM);
            }
            // where its owner has a limit it was opened before that
            match self.getattr_within_quota(req, cx)? {
                Within::Waits(outcome) => return Ok(outcome),
                Within::Goes(granted) if self.is_tight(id.ino()) => {
                    return self.getattr_of_writer(req, granted, out, cx);
                }
                Within::Goes(_) => {}
            }
        }
        let attr = self.attr(id)?;
        out.put(&attr_out(&attr, self.attr_ttl(&attr)));
        Ok(Outcome::Reply)
    }

    pub(crate) fn statx(&self, req: &Request<'_>, out: &mut Answer) -> Handled {
        let attr = self.attr(req.node())?;
        out.put(&abi::StatxOut {
            attr_valid: self.attr_ttl(&attr),
            attr_valid_nsec: 0,
            flags: 0,
            spare: [0; 2],
            stat: statx_of(&attr),
        });
        Ok(Outcome::Reply)
    }

    pub(crate) fn setattr(&self, req: &Request<'_>, out: &mut Answer) -> Handled {
        let arg: abi::SetattrIn = req.arg()?;
        if let Some(attr) = self.set_beside(&arg, req.node())? {
            out.put(&attr_out(&attr, self.attr_ttl(&attr)));
            return Ok(Outcome::Reply);
        }
        let held = match self.hold(req.node()) {
            // After an unlink the kernel sends the times that it kept, also of an inode which is gone then; it looks at
            // the error only, and the next syncfs would report that.
            Err(Errno::STALE) if only_cached_times(arg.valid) => {
                out.put(&abi::AttrOut::new_zeroed());
                return Ok(Outcome::Reply);
            }
            held => held?,
        };
        let node = held.ino();
        let mut set = set_attr(&arg);
        if only_times(arg.valid) {
            self.accept_times(req, &arg, node, &mut set)?;
        }
        let given = if set.uid.is_some() || set.gid.is_some() || changes_no_attribute(arg.valid) {
            let attr = self.vol.getattr(node).map_err(errno)?;
            Some(attr).filter(|attr| !changes_no_attribute(arg.valid) || is_chown_of_nothing(arg.valid, attr.kind()))
        } else {
            None
        };
        let strips = if let Some(attr) = given {
            // A new owner never inherits privileges, whoever gives the file away.
            set.kill_suid |= attr.kind() != FileKind::Dir;
            // who asks is looked up only where it matters: root gives away each file that it unpacks
            is_marked(&attr) && requester::uid(req) != Some(0)
        } else {
            arg.valid & fattr::KILL_SUIDGID != 0
        };
        if strips {
            set = self.stripping(req, node, set)?.unwrap_or(set);
        }
        let refuses = IMMUTABLE | APPEND;
        if (set.size.is_some() || set.kill_suid) && self.vol.getattr(node).map_err(errno)?.flags & refuses == 0 {
            self.drop_caps(node)?;
        }
        let _as = self.as_requester(req);
        let attr = self.vol.setattr(node, &set).map_err(errno)?;
        if set.mtime.is_some() {
            self.past_cache.forget(node);
        }
        out.put(&attr_out(&attr, self.attr_ttl(&attr)));
        Ok(Outcome::Reply)
    }

    /// A change of mode and times that goes into memory alone, as most of those do that the kernel sends after a rename, an
    /// unlink or a link. `None`: for who has the inode open. So is all of files of whose times the kernel does
    /// not know, and all while there are files of whose flags it does not.
    fn set_beside(&self, arg: &abi::SetattrIn, id: WireId) -> Result<Option<Attr>, Errno> {
        let set = set_attr(arg);
        let small = set.size.is_none() && set.uid.is_none() && set.gid.is_none() && !set.kill_suid;
        if !small || changes_no_attribute(arg.valid) || self.flagged.any() || self.past_cache.known(id.ino()).is_some()
        {
            return Ok(None);
        }
        self.vol.setattr_beside(id.ino(), |g| id.is_of(g), &set).map_err(errno)
    }

    /// What is special about a change of times alone: some the kernel has accepted before, some are allowed where others
    /// are not.
    fn accept_times(
        &self,
        req: &Request<'_>,
        arg: &abi::SetattrIn,
        node: InodeNo,
        set: &mut SetAttr,
    ) -> Result<(), Errno> {
        let cached = only_cached_times(arg.valid);
        if let (true, Some(SetTime::At(ctime))) = (cached, set.ctime) {
            set.ctime = Some(SetTime::At(self.flagged.not_before(node, ctime)));
        }
        let now = self.vol.getattr(node).map_err(errno)?;
        let mut of_past = false;
        if let (true, Some(SetTime::At(mtime)), Some(SetTime::At(ctime))) = (cached, set.mtime, set.ctime)
            && self.is_of_past(req, mtime, &now)
        {
            // it stays as it is
            (of_past, set.mtime, set.ctime) = (true, None, Some(SetTime::At(ctime.max(now.ctime))));
        }
        set.accepted = match now.flags & (IMMUTABLE | APPEND) {
            0 => false,
            flags => {
                // With its writeback cache the kernel fills in the time that it means by "now".
                let same = set.mtime.is_some() && set.mtime == set.ctime;
                let touch = arg.valid & fattr::ATIME_NOW != 0 && (same || arg.valid & fattr::MTIME_NOW != 0);
                // What it keeps is of a write, before the flag or since, while a writer has the file open (through its
                // cache, or an append-only one, by the handle that it names); else only the change time is newer than
                // here.
                let through = || arg.valid & fattr::FH != 0 && self.handles.get(arg.fh).is_ok_and(|h| h.append_only);
                let held = !self.negotiated.opens() || self.handles.has_cached_writer(node);
                let writer = held || self.is_tight(node) || through();
                let before = Timestamp { sec: arg.ctime, nsec: arg.ctimensec } <= now.ctime;
                let kept = of_past || set.mtime == Some(SetTime::At(now.mtime)) || (writer && (same || before));
                (cached && kept) || (touch && flags & IMMUTABLE == 0)
            }
        };
        Ok(())
    }

    /// What files in the directory that it is asked of can have, or the file.
    pub(crate) fn statfs(&self, req: &Request<'_>, out: &mut Answer) -> Handled {
        // an inode that is gone is asked of by who still holds it: then the volume's
        let st = self.vol.statfs_of(req.node().ino()).unwrap_or_else(|_| self.vol.statfs());
        out.put(&abi::StatfsOut {
            blocks: st.blocks,
            bfree: st.free,
            bavail: self.writable(req.node().ino(), st.available),
            files: st.inodes,
            ffree: st.inodes_free,
            bsize: 4096,
            namelen: braidfs::format::inode::NAME_MAX as u32,
            frsize: 4096,
            padding: 0,
            spare: [0; 6],
        });
        Ok(Outcome::Reply)
    }

    /// Clears setuid and setgid as a write by an ordinary user does; whether there was anything to clear.
    pub(crate) fn kill_suid(&self, req: &Request<'_>, node: InodeNo) -> Result<bool, Errno> {
        let set = SetAttr { kill_suid: true, ..SetAttr::default() };
        let Some(set) = self.stripping(req, node, set)? else { return Ok(false) };
        self.vol.setattr(node, &set).map_err(errno)?;
        Ok(true)
    }

    /// The change `set`, which takes privileges, for this user: setgid without group execute is no privilege, but only
    /// the file's group may leave it (as the kernel's `setattr_should_drop_sgid`). `None`: the file has none.
    pub(crate) fn stripping(
        &self,
        req: &Request<'_>,
        node: InodeNo,
        mut set: SetAttr,
    ) -> Result<Option<SetAttr>, Errno> {
        let attr = self.vol.getattr(node).map_err(errno)?;
        if is_marked(&attr) && set.mode.is_none() && !requester::in_group(req, attr.gid) {
            set.kill_sgid = true;
            return Ok(Some(set));
        }
        let some = attr.mode & 0o4000 != 0 || attr.mode & 0o2010 == 0o2010;
        Ok(some.then_some(set))
    }

    /// Removes file capabilities, if there are any.
    pub(crate) fn drop_caps(&self, node: InodeNo) -> Result<(), Errno> {
        match self.vol.remove_capabilities(node) {
            // A volume or file that takes no change: what comes next says so where it matters.
            Ok(()) | Err(Error::NoAttr | Error::ReadOnly | Error::Perm) => Ok(()),
            Err(e) => Err(errno(e)),
        }
    }

    /// [`Self::drop_caps`] before a write, once per handle and change.
    pub(crate) fn drop_caps_once(&self, opened: &Opened<'_>) -> Result<(), Errno> {
        let Some(handle) = opened.handle() else {
            return if self.vol.has_capabilities(opened.file()) { self.drop_caps(opened.ino()) } else { Ok(()) };
        };
        let now = self.caps_epoch.load(Ordering::Acquire);
        if handle.caps_epoch.load(Ordering::Relaxed) != now {
            self.drop_caps(handle.ino())?;
            handle.caps_epoch.store(now, Ordering::Relaxed);
        }
        Ok(())
    }

    /// What opening for writing must refuse at once: with a writeback cache the write itself would fail unseen. Whether the
    /// file is append-only.
    pub(crate) fn may_write(&self, node: InodeNo, flags: u32) -> Result<bool, Errno> {
        let attr = self.vol.getattr(node).map_err(errno)?;
        let append_only = flags & libc::O_APPEND as u32 != 0 && flags & libc::O_TRUNC as u32 == 0;
        if attr.flags & IMMUTABLE != 0 || (attr.flags & APPEND != 0 && !append_only) {
            return Err(Errno::PERM);
        }
        Ok(attr.flags & APPEND != 0)
    }
}

/// Whether it is a file with setgid and without group execute, which is no privilege but for its group.
fn is_marked(attr: &Attr) -> bool {
    attr.mode & 0o2010 == 0o2000 && attr.kind() == FileKind::File
}

/// Whether a SETATTR changes nothing else.
fn only_times(valid: u32) -> bool {
    use fattr::{ATIME, ATIME_NOW, CTIME, FH, MTIME, MTIME_NOW};
    valid & !(ATIME | ATIME_NOW | MTIME | MTIME_NOW | CTIME | FH) == 0
}

/// Whether a SETATTR names nothing that is to change, but for the change time.
fn changes_no_attribute(valid: u32) -> bool {
    matches!(valid & !fattr::FH, 0 | fattr::CTIME)
}

/// Whether such a SETATTR is a `chown` that names neither user nor group, which takes privileges as any (`chown_common` in fs/open.c).
/// Of a file whose times are not the kernel's own it is not told from one that comes after file capabilities were taken for a `write`
/// (`__remove_privs` in fs/inode.c), also by root, whose `write` leaves setuid.
fn is_chown_of_nothing(valid: u32, kind: FileKind) -> bool {
    match kind {
        FileKind::Dir => false,
        FileKind::File => valid & fattr::CTIME != 0,
        _ => true,
    }
}

/// Whether a SETATTR may be the kernel's writeback of times that it keeps itself.
fn only_cached_times(valid: u32) -> bool {
    valid & !fattr::FH == fattr::MTIME | fattr::CTIME
}

fn set_attr(arg: &abi::SetattrIn) -> SetAttr {
    let has = |bit: u32| arg.valid & bit != 0;
    let time = |bit, now, sec, nsec| match (has(bit), has(now)) {
        (true, true) => Some(SetTime::Now),
        (true, false) => Some(SetTime::At(Timestamp { sec, nsec })),
        _ => None,
    };
    SetAttr {
        mode: has(fattr::MODE).then_some(arg.mode & 0o7777),
        uid: has(fattr::UID).then_some(arg.uid),
        gid: has(fattr::GID).then_some(arg.gid),
        size: has(fattr::SIZE).then_some(arg.size),
        atime: time(fattr::ATIME, fattr::ATIME_NOW, arg.atime, arg.atimensec),
        mtime: time(fattr::MTIME, fattr::MTIME_NOW, arg.mtime, arg.mtimensec),
        ctime: time(fattr::CTIME, 0, arg.ctime, arg.ctimensec),
        kill_suid: has(fattr::KILL_SUIDGID),
        ..SetAttr::default()
    }
}

/// 512-byte units of an inode, for the kernel, which keeps them for as long as attributes are valid, and then tells them also of
/// a file that has been written to in its cache. So a regular file has one at least: what has none is taken for a hole as a
/// whole, and `tar --sparse` does not look whether it is one.
fn told_sectors(a: &Attr) -> u64 {
    if a.kind() == FileKind::File { a.sectors.max(1) } else { a.sectors }
}

fn attr_of(a: &Attr) -> abi::Attr {
    abi::Attr {
        ino: a.ino.0,
        size: a.size,
        blocks: told_sectors(a),
        atime: a.atime.sec,
        mtime: a.mtime.sec,
        ctime: a.ctime.sec,
        atimensec: a.atime.nsec,
        mtimensec: a.mtime.nsec,
        ctimensec: a.ctime.nsec,
        mode: a.mode,
        nlink: a.nlink,
        uid: a.uid,
        gid: a.gid,
        rdev: a.rdev as u32,
        blksize: 4096,
        flags: 0,
    }
}

pub(crate) fn attr_out(a: &Attr, ttl: u64) -> abi::AttrOut {
    abi::AttrOut { attr_valid: ttl, attr_valid_nsec: 0, dummy: 0, attr: attr_of(a) }
}

/// An inode as the answer to a look-up.
pub(crate) fn entry_out(a: &Attr, ttl: u64) -> abi::EntryOut {
    abi::EntryOut {
        nodeid: WireId::of(a).0,
        generation: a.generation.into(),
        entry_valid: TTL_SECONDS,
        attr_valid: ttl,
        entry_valid_nsec: 0,
        attr_valid_nsec: 0,
        attr: attr_of(a),
    }
}

fn statx_of(a: &Attr) -> abi::Statx {
    let time = |t: Timestamp| abi::SxTime { sec: t.sec, nsec: t.nsec, reserved: 0 };
    let known = (libc::STATX_ATTR_IMMUTABLE | libc::STATX_ATTR_APPEND) as u64;
    let mut attributes = 0;
    for (flag, bit) in [(IMMUTABLE, libc::STATX_ATTR_IMMUTABLE), (APPEND, libc::STATX_ATTR_APPEND)] {
        if a.flags & flag != 0 {
            attributes |= bit as u64;
        }
    }
    abi::Statx {
        mask: STATX_TOLD,
        blksize: 4096,
        attributes,
        attributes_mask: known,
        nlink: a.nlink,
        uid: a.uid,
        gid: a.gid,
        mode: a.mode as u16,
        ino: a.ino.0,
        size: a.size,
        blocks: told_sectors(a),
        atime: time(a.atime),
        btime: time(a.btime),
        ctime: time(a.ctime),
        mtime: time(a.mtime),
        rdev_major: rustix::fs::major(a.rdev),
        rdev_minor: rustix::fs::minor(a.rdev),
        ..abi::Statx::new_zeroed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn setattr_maps_bits_and_times() {
        let mut arg = abi::SetattrIn::new_zeroed();
        arg.valid = fattr::SIZE | fattr::ATIME | fattr::ATIME_NOW | fattr::MTIME | fattr::CTIME | fattr::KILL_SUIDGID;
        (arg.size, arg.mtime, arg.mtimensec, arg.ctime, arg.mode) = (5, -2, 800_000_000, 9, 0o777);
        let set = set_attr(&arg);
        assert_eq!(
            set,
            SetAttr {
                size: Some(5),
                atime: Some(SetTime::Now),
                mtime: Some(SetTime::At(Timestamp { sec: -2, nsec: 800_000_000 })),
                ctime: Some(SetTime::At(Timestamp { sec: 9, nsec: 0 })),
                kill_suid: true,
                ..SetAttr::default()
            }
        );
        assert!(!only_cached_times(arg.valid) && only_cached_times(fattr::MTIME | fattr::CTIME | fattr::FH));
        arg.valid = fattr::MODE;
        arg.mode = 0o104_755;
        assert_eq!(set_attr(&arg), SetAttr { mode: Some(0o4755), ..SetAttr::default() });
    }

    #[test]
    fn a_chown_without_an_owner_is_recognized() {
        use fattr::{CTIME, FH, MODE, MTIME};
        assert!([0, FH, CTIME, CTIME | FH].into_iter().all(changes_no_attribute));
        assert!(![MODE | CTIME, MTIME | CTIME, fattr::KILL_SUIDGID].into_iter().any(changes_no_attribute));
        let seen = |kind| [CTIME, 0].map(|valid| is_chown_of_nothing(valid, kind));
        assert_eq!([FileKind::File, FileKind::Dir, FileKind::Fifo].map(seen), [[true, false], [false; 2], [true; 2]]);
    }

    #[test]
    fn device_numbers_survive() {
        let rdev = u64::from(8u32 << 8 | 0x1234 & 0xff | (0x1234 & !0xff) << 12); // major 8, minor 0x1234
        let mut a = Attr::default();
        (a.ino, a.generation, a.mode, a.nlink, a.rdev, a.flags) = (InodeNo(3), 4, 0o060_600, 1, rdev, IMMUTABLE);
        let entry = entry_out(&a, 1);
        assert_eq!((entry.nodeid, entry.generation, entry.attr.ino), (3 | 4 << 40, 4, 3));
        assert_eq!(entry.attr.rdev, rdev as u32);
        let sx = statx_of(&a);
        assert_eq!((sx.rdev_major, sx.rdev_minor, sx.attributes), (8, 0x1234, libc::STATX_ATTR_IMMUTABLE as u64));
    }
}
