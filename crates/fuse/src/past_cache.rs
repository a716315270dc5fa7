//! Files that were written past the kernel's cache, of which it goes on to tell the times of before.
//!
//! With its writeback cache the kernel trusts its own modification and change time of a regular file, and takes none
//! from anybody (`fuse_get_cache_mask` in fs/fuse/inode.c). A `write` through a handle that is opened write-through
//! (FOPEN_DIRECT_IO) does not move them (`fuse_direct_write_iter` in fs/fuse/file.c). With the next rename or link of
//! the file the kernel sends them all the same (`fuse_update_ctime`), and the volume would have the old time for the
//! new content.
//!
//! So from the first such `write` on it is noted which time the file had, and the kernel with it. While that is known,
//! a time that the kernel may have kept, from that one to the volume's own, changes nothing. `utimensat` of the
//! modification time alone looks the same; so of times in between it is looked whether the thread that asks is in that
//! call, which takes a tenth of a second at most. When the last descriptor is closed the inode is dropped from the
//! kernel's memory ([`BraidFs::show_change`]), and the kernel asks anew.
//!
//! Does not promise: that the new time is shown: not while the file is open, and not before Linux 6.18 until the kernel
//! forgets the file; that `utimensat` of the modification time alone gives the file just the time back that it had
//! before the first `write`, nor, to a thread whose call is not seen (an NFS server's, a program of 32 bits), any time in
//! between; anything of what was written before another process took over ([`crate::upgrade`]).

use crate::fs::BraidFs;
use crate::opened::Opened;
use crate::request::Request;
use crate::requester::{self, Call};
use crate::shards::Shards;
use braidfs::{Attr, InodeNo, Timestamp};
use braidfs_sync::rank;
use crossbeam::utils::CachePadded;
use std::sync::atomic::{AtomicUsize, Ordering};

/// See [`Shards`].
const SHARDS: usize = 32;
/// More of one shard are not noted.
const KEPT: usize = 4096;

/// A file that was written so since the kernel learned its times.
#[derive(Debug, Clone, Copy)]
struct Past {
    /// The modification time that the kernel knows, or an earlier one.
    mtime: Timestamp,
    /// It was written since the kernel was made to forget it.
    unseen: bool,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct PastCache {
    files: Shards<Past, rank::DirectShard, SHARDS>,
    /// How many: mostly none. Written when one comes or goes.
    count: CachePadded<AtomicUsize>,
}

impl PastCache {
    /// Whether there are any.
    fn any(&self) -> bool {
        self.count.load(Ordering::Relaxed) != 0
    }

    /// The file is about to be written; whether it was before.
    fn is_noted(&self, ino: InodeNo) -> bool {
        self.any() && self.files.of(ino.0).lock().get_mut(&ino.0).map(|past| past.unseen = true).is_some()
    }

    /// The file is about to be written, for the first time or at the same time as others, and had this modification
    /// time before.
    fn note(&self, ino: InodeNo, mtime: Timestamp) {
        let mut files = self.files.of(ino.0).lock();
        if files.len() < KEPT && !files.contains_key(&ino.0) {
            files.insert(ino.0, Past { mtime, unseen: true });
            self.count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The modification time that the kernel may know, or an earlier one.
    pub fn known(&self, ino: InodeNo) -> Option<Timestamp> {
        if self.any() { self.files.of(ino.0).lock().get(&ino.0).map(|past| past.mtime) } else { None }
    }

    /// The kernel has forgotten the file, or its time is the volume's.
    pub fn forget(&self, ino: InodeNo) {
        if self.any() && self.files.of(ino.0).lock().remove(&ino.0).is_some() {
            self.count.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Whether the kernel has yet to be made to forget the file.
    pub fn is_unseen(&self, ino: InodeNo) -> bool {
        self.any() && self.files.of(ino.0).lock().get(&ino.0).is_some_and(|past| past.unseen)
    }

    /// It is being made to; or where `unseen` it did not let go of the file.
    pub fn set_unseen(&self, ino: InodeNo, unseen: bool) {
        if self.any()
            && let Some(past) = self.files.of(ino.0).lock().get_mut(&ino.0)
        {
            past.unseen = unseen;
        }
    }
}

impl BraidFs {
    /// The file is about to be written directly: where that is through a handle that is written through, its time is
    /// noted.
    pub(crate) fn note_past_cache(&self, opened: &Opened<'_>) {
        let through = opened.handle().is_some_and(|handle| !handle.is_cached_writer());
        if through
            && !self.past_cache.is_noted(opened.ino())
            && let Ok(attr) = self.vol.getattr(opened.ino())
        {
            self.past_cache.note(opened.ino(), attr.mtime);
        }
    }

    /// Whether a modification time, which the kernel tells of a file that has these attributes, is one that it kept
    /// while the file was written past its cache.
    pub(crate) fn is_of_past(&self, req: &Request<'_>, mtime: Timestamp, now: &Attr) -> bool {
        let Some(known) = self.past_cache.known(now.ino) else { return false };
        mtime == known || (known < mtime && mtime < now.mtime && !self.sets_times(req))
    }

    /// Whether the thread that asks is seen to set times. It may ask for a file that an `execve` of its own closes, so that
    /// it is not looked at from here.
    fn sets_times(&self, req: &Request<'_>) -> bool {
        let Some(thread) = requester::thread(req) else { return false };
        let seen = self.looks.at(vec![thread]).remove(&thread);
        seen.and_then(|seen| seen.call).is_some_and(Call::sets_times)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_time_is_kept_until_the_kernel_forgets_it() {
        let (p, ino, at) = (PastCache::default(), InodeNo(7), |sec| Timestamp { sec, nsec: 5 });
        assert!(!p.is_noted(ino) && p.known(ino).is_none() && !p.is_unseen(ino));
        p.note(ino, at(1));
        p.note(ino, at(2));
        assert_eq!((p.known(ino), p.known(InodeNo(8)), p.is_unseen(ino)), (Some(at(1)), None, true));
        p.set_unseen(ino, false);
        assert!(!p.is_unseen(ino) && p.is_noted(ino) && p.is_unseen(ino), "it was written again");
        p.forget(ino);
        p.forget(ino);
        assert!(!p.any() && p.known(ino).is_none());
    }

    #[test]
    fn the_table_is_bounded() {
        let p = PastCache::default();
        (2..300_000).for_each(|n| p.note(InodeNo(n), Timestamp::default()));
        assert_eq!(p.count.load(Ordering::Relaxed), SHARDS * KEPT);
    }
}
