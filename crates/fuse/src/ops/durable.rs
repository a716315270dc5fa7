//! Changes that must be durable before they are answered: on mounts with `sync` or `dirsync`, and writes with O_SYNC that
//! pass by the kernel's cache.
//!
//! For a cached write on a `sync` mount, or to a file opened with O_SYNC, the kernel sends WRITE and FSYNC by itself
//! (generic_write_sync); about names and attributes it does nothing.

use crate::abi::{self, op};
use crate::fs::{BraidFs, Context, errno};
use crate::node::WireId;
use crate::ops::flags::sets_flags;
use crate::request::{Handled, Outcome, Request};
use braidfs::{Error, InodeNo};
use rustix::io::Errno;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// What the mount wants durable at once.
#[derive(Debug, Default)]
pub(crate) struct Durable {
    /// All operations are durable when they return (`sync`).
    sync: AtomicBool,
    /// Changes of directories.
    dirsync: AtomicBool,
}

impl Durable {
    /// `sync` and `dirsync`.
    pub fn get(&self) -> (bool, bool) {
        (self.sync.load(Relaxed), self.dirsync.load(Relaxed))
    }

    /// Changes what is said.
    pub fn set(&self, sync: Option<bool>, dirsync: Option<bool>) {
        sync.into_iter().for_each(|on| self.sync.store(on, Relaxed));
        dirsync.into_iter().for_each(|on| self.dirsync.store(on, Relaxed));
    }
}

impl BraidFs {
    /// Makes durable what a request has changed, where the mount or the request wants that; `handled` is how it went.
    /// Where it cannot be made durable the request fails, though the change is there.
    #[inline]
    pub(crate) fn sync_changes(&self, req: &Request<'_>, handled: Handled, cx: &Context<'_>) -> Handled {
        let (sync, names) = self.durable.get();
        if (sync || names || req.head.opcode == op::WRITE) && handled == Ok(Outcome::Reply) {
            self.sync_changed(req, sync, names, cx)?;
        }
        handled
    }

    fn sync_changed(&self, req: &Request<'_>, sync: bool, names: bool, cx: &Context<'_>) -> Result<(), Errno> {
        for (ino, data_only) in changed(req, sync, sync || names, |id| cx.channel.node(id))?.into_iter().flatten() {
            match self.vol.fsync(ino, data_only) {
                // removed meanwhile
                Ok(()) | Err(Error::NotFound) => {}
                Err(e) => return Err(errno(e)),
            }
        }
        Ok(())
    }
}

/// At most two inodes to sync, each with whether its data is enough.
type ToSync = [Option<(InodeNo, bool)>; 2];

/// What `req` has changed: `all` of it counts, or only `names`, or neither. `node`: what an id means on its connection.
fn changed(req: &Request<'_>, all: bool, names: bool, node: impl Fn(WireId) -> WireId) -> Result<ToSync, Errno> {
    let one = |id: WireId| [Some((id.ino(), false)), None];
    Ok(match req.head.opcode {
        op::CREATE | op::MKNOD | op::MKDIR | op::SYMLINK | op::UNLINK | op::RMDIR | op::LINK if names => {
            one(req.node())
        }
        op::RENAME | op::RENAME2 if names => {
            // the same start in both
            let to = node(WireId(req.arg::<abi::RenameIn>()?.newdir));
            let also = (to != req.node()).then(|| (to.ino(), false));
            [Some((req.node().ino(), false)), also]
        }
        op::SETATTR | op::SETXATTR | op::REMOVEXATTR | op::FALLOCATE if all => one(req.node()),
        op::IOCTL if all && sets_flags(req.arg::<abi::IoctlIn>()?.cmd) => one(req.node()),
        op::OPEN if all && req.arg::<abi::OpenIn>()?.flags & libc::O_TRUNC as u32 != 0 => one(req.node()),
        op::COPY_FILE_RANGE | op::COPY_FILE_RANGE_64 if all => one(WireId(req.arg::<abi::CopyRangeIn>()?.nodeid_out)),
        op::WRITE => {
            let flags = req.arg::<abi::WriteIn>()?.flags as i32;
            let wanted = flags & libc::O_DSYNC != 0;
            [wanted.then(|| (req.node().ino(), flags & libc::O_SYNC != libc::O_SYNC)), None]
        }
        _ => [None, None],
    })
}
