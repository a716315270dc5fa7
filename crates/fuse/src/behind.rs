//! No stale pages behind direct writes.
//!
//! A direct write goes past the kernel's page cache. The kernel drops the pages of the range before it sends the
//! WRITE, and, where the writer waits for it, again afterwards (`generic_file_direct_write`); after an asynchronous
//! one it does not (`fuse_direct_IO` in `fs/fuse/file.c` returns before the WRITE is answered). A page that a
//! buffered or mapped read fetched between the two, with the old content, then stays for good. So the daemon has the
//! kernel drop such pages (FUSE_NOTIFY_INVAL_INODE) after the volume has the new content and before it answers the
//! WRITE.
//!
//! **Which pages.** Every page that comes to the cache comes through this daemon: by a READ, or by a WRITE that the
//! cache sent (its page may stay, clean). Such requests come without the flag LOCKOWNER, direct ones have it, and so
//! the pages are noted here, one bit each, *before* the volume is read or written. A direct WRITE changes the volume,
//! *then* looks whether pages of its range are noted. A page with content from before the WRITE was noted before the
//! volume was read, which was before the volume was written, which was before this look. Where none is noted, the
//! answer goes out at once: a file that is only read and written past the cache pays one look into a table. Pages are
//! noted only while a handle for direct writing is open: what was fetched before the open is dropped by the kernel
//! before the first WRITE is sent. A handle that was made direct by `fcntl` is not known as one; its writes always
//! have their range dropped.
//!
//! **Who waits for whom.** The kernel waits for the lock of each page that it drops: until a READ of it is answered,
//! or, where it is dirty, until a WRITE of it is. So no serving thread may ask for it: the helper thread does, and
//! answers the direct WRITE then. The serving threads wait for nobody. What the helper waits for is answered by them;
//! it is never a direct WRITE that waits for the helper itself: the only WRITE under way with a page locked is that
//! of `fuse_perform_write`, which is no direct one and is answered at once. One bound is the kernel's: it hands out
//! only [`MAX_BACKGROUND`](crate::fs::MAX_BACKGROUND) requests at a time of those that nobody waits for synchronously, and both direct WRITEs and the
//! READs (readahead) that the helper may wait for are such; a queue of a ring has places for fewer. If all of these were
//! direct WRITEs that wait for the helper, nobody would ever go on. So a limited number waits
//! ([`BraidFs::let_wait`]); what exceeds that is answered at once, and its
//! pages are dropped as soon as the helper comes to it. That is the only case in which a reader may see old data, for
//! that moment.
//!
//! Where both a direct write and a store to the same page through a map or the cache are under way, the store may write
//! the whole page back, as on other file systems: the kernel keeps no order between the two.

use crate::channel::Channel;
use crate::fs::{BraidFs, Context};
use crate::handles::Handle;
use crate::request::{Answer, Outcome};
use braidfs::NodeId;
use crossbeam::utils::CachePadded;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

const PAGE: u64 = 4096;
/// Pages of one entry of [`Pages`].
const RUN: u64 = 512;
/// Entries of one file (32 GiB of pages); beyond that all its pages count as noted.
const RUNS_MAX: usize = 16384;
/// A power of two.
const SHARDS: usize = 32;

/// A set of page numbers.
#[derive(Debug, Default)]
struct Pages {
    runs: HashMap<u64, [u64; (RUN / 64) as usize]>,
    /// There were too many to tell them apart.
    all: bool,
}

impl Pages {
    fn add(&mut self, pages: Range<u64>) {
        if self.all {
            return;
        }
        for (run, within) in by_run(pages) {
            let bits = self.runs.entry(run).or_default();
            within.for_each(|p| bits[(p / 64) as usize] |= 1 << (p % 64));
        }
        if self.runs.len() > RUNS_MAX {
            self.runs = HashMap::new();
            self.all = true;
        }
    }

    /// Takes pages out; whether any of them was there.
    fn take(&mut self, pages: Range<u64>) -> bool {
        if self.all {
            return true;
        }
        let mut found = false;
        for (run, within) in by_run(pages) {
            let Some(bits) = self.runs.get_mut(&run) else { continue };
            for p in within {
                let (word, bit) = (&mut bits[(p / 64) as usize], 1 << (p % 64));
                found |= *word & bit != 0;
                *word &= !bit;
            }
            if bits.iter().all(|w| *w == 0) {
                self.runs.remove(&run);
            }
        }
        found
    }
}

/// A file that is open for direct writing.
#[derive(Debug, Default)]
struct File {
    handles: u32,
    /// Pages that may be in the cache.
    cached: Pages,
    /// Ranges that the helper has yet to have dropped.
    dropping: Vec<Range<u64>>,
}

/// The files that are open for direct writing.
#[derive(Debug, Default)]
pub(crate) struct Behind {
    /// How many handles. Written when such a file is opened and closed.
    handles: CachePadded<AtomicUsize>,
    files: [CachePadded<Mutex<HashMap<u64, File>>>; SHARDS],
}

/// Cuts a range of pages into pieces of one run: its number, and the pages counted from its begin.
fn by_run(pages: Range<u64>) -> impl Iterator<Item = (u64, Range<u64>)> {
    (pages.start / RUN..pages.end.div_ceil(RUN)).map(move |run| {
        let begin = run * RUN;
        (run, pages.start.max(begin) - begin..pages.end.min(begin + RUN) - begin)
    })
}

fn pages_of(offset: u64, len: usize) -> Range<u64> {
    offset / PAGE..offset.saturating_add(len as u64).div_ceil(PAGE)
}

impl Behind {
    fn shard(&self, ino: NodeId) -> &Mutex<HashMap<u64, File>> {
        &self.files[(ino.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - SHARDS.trailing_zeros())) as usize]
    }

    /// A handle for direct writing is about to be given out.
    pub fn opened(&self, ino: NodeId) {
        self.handles.fetch_add(1, Ordering::SeqCst);
        self.shard(ino).lock().entry(ino.0).or_default().handles += 1;
    }

    /// It was closed.
    pub fn closed(&self, ino: NodeId) {
        let mut files = self.shard(ino).lock();
        if let Some(f) = files.get_mut(&ino.0) {
            f.handles -= 1;
            if f.handles == 0 {
                files.remove(&ino.0);
            }
        }
        drop(files);
        self.handles.fetch_sub(1, Ordering::SeqCst);
    }

    /// The cache asks for, or sends, these bytes: to be called before the volume is asked.
    pub fn cached(&self, ino: NodeId, offset: u64, len: usize) {
        if self.handles.load(Ordering::SeqCst) == 0 {
            return;
        }
        if let Some(f) = self.shard(ino).lock().get_mut(&ino.0) {
            f.cached.add(pages_of(offset, len));
        }
    }

    /// These bytes were written past the cache: whether pages of them must be dropped. If so, [`Self::dropped`]
    /// follows.
    fn must_drop(&self, ino: NodeId, offset: u64, len: usize) -> bool {
        let pages = pages_of(offset, len);
        let mut files = self.shard(ino).lock();
        let Some(f) = files.get_mut(&ino.0) else { return false };
        let under_way = f.dropping.iter().any(|d| d.start < pages.end && pages.start < d.end);
        let must = f.cached.take(pages.clone()) || under_way;
        if must {
            f.dropping.push(pages);
        }
        must
    }

    fn dropped(&self, ino: NodeId, offset: u64, len: usize) {
        let pages = pages_of(offset, len);
        if let Some(f) = self.shard(ino).lock().get_mut(&ino.0)
            && let Some(at) = f.dropping.iter().position(|d| *d == pages)
        {
            f.dropping.swap_remove(at);
        }
    }
}

impl BraidFs {
    /// Answers a direct WRITE, whose bytes the volume has: at once where the kernel has no page of them.
    pub(crate) fn written_direct(
        &self,
        handle: &Handle,
        offset: u64,
        len: usize,
        out: &mut Answer,
        cx: &Context<'_>,
    ) -> Outcome {
        let (id, known) = (handle.id(), handle.direct_writer);
        if known && !self.behind.must_drop(id.ino(), offset, len) {
            return Outcome::Reply;
        }
        let drop_pages = move |fs: &BraidFs, channel: &Channel| {
            channel.invalidate_range(id, offset, len as u64);
            if known {
                fs.behind.dropped(id.ino(), offset, len);
            }
        };
        let Some(waiting) = self.let_wait(true) else {
            let channel = cx.channel.clone();
            // Not sent only where the mount is ending.
            let _ = self.jobs.send(Box::new(move |fs: &BraidFs| drop_pages(fs, &channel)));
            return Outcome::Reply;
        };
        let (later, body, channel): (_, _, Arc<Channel>) = (cx.later(), out.body().to_vec(), cx.channel.clone());
        let job = Box::new(move |fs: &BraidFs| {
            drop_pages(fs, &channel);
            drop(waiting);
            let mut out = Answer::new(body.len());
            out.put_bytes(&body);
            later.answer(&mut out);
        });
        // A job that cannot be handed over is dropped, and answers EIO.
        let _ = self.jobs.send(job);
        Outcome::Deferred
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const F: NodeId = NodeId(7);

    #[test]
    fn only_pages_of_the_cache_are_dropped() {
        let b = Behind::default();
        b.cached(F, 0, 1 << 20);
        assert!(!b.must_drop(F, 0, 4096), "not open for direct writing");
        b.opened(F);
        b.cached(F, 8192, 4096);
        b.cached(NodeId(8), 0, 1 << 20);
        assert!(!b.must_drop(F, 0, 8192) && !b.must_drop(F, 12288, 4096));
        assert!(b.must_drop(F, 8191, 2), "the second byte is on the page");
        assert!(b.must_drop(F, 8192, 10), "it is still being dropped");
        b.dropped(F, 8191, 2);
        b.dropped(F, 8192, 10);
        assert!(!b.must_drop(F, 0, 1 << 20));
        b.cached(F, 5 << 20, 100);
        b.opened(F);
        b.closed(F);
        assert!(b.must_drop(F, (5 << 20) + 4000, 4096), "one handle is left");
        b.dropped(F, (5 << 20) + 4000, 4096);
        b.cached(F, 0, 1);
        b.closed(F);
        b.opened(F);
        assert!(!b.must_drop(F, 0, 1), "a new file begins with nothing");
        assert_eq!(b.handles.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn pages_are_a_bounded_set() {
        let mut p = Pages::default();
        p.add(510..1030);
        assert!(!p.take(0..510) && !p.take(1030..9999) && p.take(1029..5000) && p.take(0..511));
        assert!(p.take(511..1029) && p.runs.is_empty());
        (0..=RUNS_MAX as u64).for_each(|n| p.add(n * RUN..n * RUN + 1));
        assert!(p.all && p.runs.is_empty() && p.take(1..2));
    }
}
