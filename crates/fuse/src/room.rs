//! Telling ENOSPC at the `write` although the kernel's writeback cache takes writes before the volume sees them.
//!
//! Room is counted per domain: its free blocks and those of groups that it can still claim. The kernel holds at most
//! [`KERNEL_DIRTY_BYTES`] (the mount sets that bound). While a domain has twice as much, nothing is done. Below, the
//! domain is *tight*:
//! 1. Files opened for writing are opened write-through: the volume answers each `write` itself, exactly.
//! 2. Files that were opened before stay cached, the kernel offers no way back. But each `write` needs valid attributes,
//!    so they are told without a time to live: the kernel then asks (GETATTR with the handle) before each `write`. When
//!    a domain becomes tight, all such files are written back once and lose their attributes.
//! 3. Asked so with less room than the kernel may hold, the volume first has the kernel write back what is promised to
//!    others, commits, and says ENOSPC where less than [`LAST_BLOCKS`] are left, or a MiB for each such writer.
//!
//! Does not promise: ENOSPC for stores to a shared map, nor for a single `write` of more than [`LAST_BLOCKS`] (of several
//! writers, 1 MiB) through a handle of rule 2; both are told at `fsync` and `close`. The last blocks cannot be had through such a handle, and where
//! they are all that is left it gets ENOSPC for a `read` across the end of the file too: the kernel asks the same.

use crate::channel::Channel;
use crate::fs::{BraidFs, Context, TTL_SECONDS};
use crate::ops::attr_out;
use crate::request::{Answer, Handled, Outcome};
use braidfs::NodeId;
use rustix::io::Errno;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What the kernel may hold dirty for one mount.
pub(crate) const KERNEL_DIRTY_BYTES: u64 = 64 << 20;
const KERNEL_DIRTY_BLOCKS: u64 = KERNEL_DIRTY_BYTES / 4096;
const TIGHT_BLOCKS: u64 = 2 * KERNEL_DIRTY_BLOCKS;
/// A tight domain is so until it has this much: it does not change its mind with each write.
const ROOMY_BLOCKS: u64 = 3 * KERNEL_DIRTY_BLOCKS;
const LAST_BLOCKS: u64 = (2 << 20) / 4096;
/// What each of several writers is taken to write at once: all of them may have been told to go on before one of them did.
const WRITE_BLOCKS: u64 = (1 << 20) / 4096;

/// Which domains are tight. Read by all threads, written only when one changes.
pub(crate) struct Tight(Box<[AtomicBool]>);

impl Tight {
    pub fn new(domains: usize) -> Self {
        Self((0..domains).map(|_| AtomicBool::new(false)).collect())
    }
}

impl BraidFs {
    /// Whether writers of the file must be watched.
    pub(crate) fn is_tight(&self, ino: NodeId) -> bool {
        self.domain_index(ino).is_some_and(|d| self.tight.0[d].load(Ordering::Relaxed))
    }

    fn domain_index(&self, ino: NodeId) -> Option<usize> {
        let d = usize::from(self.vol.domain_of(ino).ok()?.0);
        (d < self.tight.0.len()).then_some(d)
    }

    /// Looks how much room the file has; to be called where room is taken. The first to see a tight domain has its
    /// cached writers written back.
    pub(crate) fn watch_room(&self, ino: NodeId, channel: &Arc<Channel>) {
        let Some(d) = self.domain_index(ino) else { return };
        let (flag, room) = (&self.tight.0[d], self.vol.write_room(ino));
        if flag.load(Ordering::Relaxed) {
            if room >= ROOMY_BLOCKS {
                flag.store(false, Ordering::Relaxed);
            }
        } else if room < TIGHT_BLOCKS && !flag.swap(true, Ordering::SeqCst) {
            let channel = channel.clone();
            // Not sent only where the mount is ending.
            let _ = self.jobs.send(Box::new(move |fs: &BraidFs| fs.write_back(d, &channel)));
        }
    }

    /// How long the kernel may trust a file's attributes: while it is written through the cache of a tight domain, or
    /// became immutable under writers, not at all.
    pub(crate) fn attr_ttl(&self, ino: NodeId) -> u64 {
        let asks = self.is_tight(ino) || self.flagged.is_immutable(ino);
        if asks && self.handles.has_cached_writer(ino) { 0 } else { TTL_SECONDS }
    }

    /// GETATTR before a `write` through the cache of a tight domain: may it go on? Answered by the helper thread, since
    /// what the kernel writes back comes to the serving threads. The file is open.
    pub(crate) fn getattr_of_writer(&self, ino: NodeId, out: &mut Answer, cx: &Context<'_>) -> Handled {
        if self.vol.write_room(ino) >= KERNEL_DIRTY_BLOCKS {
            self.handles.promise(ino);
            out.put(&attr_out(&self.vol.getattr(ino).map_err(crate::fs::errno)?, 0));
            return Ok(Outcome::Reply);
        }
        let Some(waiting) = self.let_wait(false) else { return self.getattr_of_one_of_many(ino, out) };
        let later = cx.later();
        let job = Box::new(move |fs: &BraidFs| {
            let _waiting = waiting;
            if let Some(d) = fs.domain_index(ino) {
                fs.write_back(d, later.channel());
            }
            let last = fs.last_blocks(ino);
            match fs.vol.settle_room(ino, last) {
                Ok(room) if room >= last => {}
                Ok(_) => return later.done(Err(Errno::NOSPC)),
                Err(e) => return later.done(Err(crate::fs::errno(e))),
            }
            fs.handles.promise(ino);
            match fs.vol.getattr(ino) {
                Ok(attr) => {
                    let mut out = Answer::new(256);
                    out.put(&attr_out(&attr, 0));
                    later.answer(&mut out);
                }
                Err(e) => later.done(Err(crate::fs::errno(e))),
            }
        });
        // A job that cannot be handed over is dropped, and answers EIO.
        let _ = self.jobs.send(job);
        Ok(Outcome::Deferred)
    }

    /// The same where so many writers wait already that this one must not: it is let through while there is more room
    /// than all of them may take now.
    fn getattr_of_one_of_many(&self, ino: NodeId, out: &mut Answer) -> Handled {
        if self.vol.write_room(ino) < self.last_blocks(ino) {
            return Err(Errno::NOSPC);
        }
        self.handles.promise(ino);
        out.put(&attr_out(&self.vol.getattr(ino).map_err(crate::fs::errno)?, 0));
        Ok(Outcome::Reply)
    }

    /// With less room than this, writers through the cache are refused.
    fn last_blocks(&self, ino: NodeId) -> u64 {
        let domain = self.domain_index(ino);
        let writers = self.handles.cached_writers(|other| self.domain_index(other) == domain);
        LAST_BLOCKS.max(writers * WRITE_BLOCKS + WRITE_BLOCKS / 2)
    }

    /// Has the kernel write back what it was promised room for in this domain. By the helper thread only.
    fn write_back(&self, domain: usize, channel: &Channel) {
        for id in self.handles.take_promised(|ino| self.domain_index(ino) == Some(domain)) {
            channel.invalidate(id, true);
        }
    }
}
