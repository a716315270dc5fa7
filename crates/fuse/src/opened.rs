//! The file that a request works on; what takes the place of OPEN, OPENDIR and CREATE on a mount without them.
//!
//! To the first OPEN, OPENDIR and CREATE of a mount ENOSYS is answered, and the kernel sends no further one
//! (`fuse_file_open` and `fuse_atomic_open` in `fs/fuse`): opening and closing what it knows takes no request, and a file
//! is created by MKNOD. All later requests have the handle 0. What a handle does otherwise:
//! - *It keeps an unlinked file.* The kernel has the inode while anybody has it open, so its look-ups are not given back
//!   ([`crate::lookups`]). Here the inode is opened for the moment of a request.
//! - *It truncates* (ATOMIC_O_TRUNC). Not negotiated, the kernel sends SETATTR of the size (`do_truncate` in `fs/open.c`),
//!   without a handle, with KILL_SUIDGID where the user has no CAP_FSETID.
//! - *It says who writes through the cache.* Everybody may: see [`crate::room`], and `lseek`, which has the kernel write
//!   back first.
//! - *It says who appends.* Nobody knows: a mount without OPEN cannot guard append-only and immutable files. It refuses to
//!   make such; a volume that has some is served with OPEN ([`braidfs::Volume::guarded`]).
//! - *It ties a scrub to who asked for it*: see [`crate::ops`].
//!
//! TMPFILE has no such substitute: its answer tells of a handle, 0 then, and the kernel sends a RELEASE of it.

use crate::fs::BraidFs;
use crate::handles::{Handle, Kept};
use crate::node::WireId;
use braidfs::{InodeNo, OpenFile};
use rustix::io::Errno;

/// A file while a request works on it.
pub(crate) enum Opened<'a> {
    /// The kernel asked to open it.
    Handle(Kept<'a>),
    /// It is open for the request.
    Briefly(OpenFile),
}

impl Opened<'_> {
    /// The engine's handle.
    pub fn file(&self) -> &OpenFile {
        match self {
            Self::Handle(handle) => &handle.file,
            Self::Briefly(file) => file,
        }
    }

    /// What the kernel asked to open.
    pub fn handle(&self) -> Option<&Handle> {
        match self {
            Self::Handle(handle) => Some(handle),
            Self::Briefly(_) => None,
        }
    }

    pub fn ino(&self) -> InodeNo {
        self.file().ino()
    }

    /// What the kernel calls that.
    pub fn id(&self) -> WireId {
        WireId::new(self.file().ino(), self.file().generation())
    }
}

impl BraidFs {
    /// The file of a request that names an inode and a handle, which must be of that inode.
    pub(crate) fn opened(&self, id: WireId, fh: u64) -> Result<Opened<'_>, Errno> {
        if !self.negotiated.opens() {
            return Ok(Opened::Briefly(self.hold(id)?));
        }
        let handle = self.handles.get(fh)?;
        if handle.id() == id { Ok(Opened::Handle(handle)) } else { Err(Errno::STALE) }
    }

    /// The inode of such a request, where its number is all that is wanted.
    pub(crate) fn opened_node(&self, id: WireId, fh: u64) -> Result<InodeNo, Errno> {
        if self.negotiated.opens() { Ok(self.opened(id, fh)?.ino()) } else { self.live(id) }
    }
}
