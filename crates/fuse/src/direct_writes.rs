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
//! answer goes out at once: a file that is only read and written past the cache pays one look into a table.
//!
//! **Of which files.** Nobody tells that a file is about to be written directly (a mount may run without OPEN, and
//! `fcntl` makes any descriptor a direct one). Pages are noted of files that are *known*: a file is from its first direct
//! WRITE on, and until it was not written so for [`QUIET`] or the kernel has forgotten it. The WRITE that finds its file
//! unknown makes it known, *then* has all its pages dropped, not those of its range alone: a READ of what another direct
//! WRITE is about to change may have been answered, unnoted, after the kernel's own dropping for that one. The pages of
//! such a READ are locked in the cache from before it was sent until it is answered, so the drop finds them. Until the
//! drop is done every direct WRITE of the file waits for one of its own. A file may become unknown at any moment: the
//! next direct WRITE begins anew.
//!
//! **Who waits for whom.** The kernel waits for the lock of each page that it drops: until a READ of it is answered,
//! or, where it is dirty, until a WRITE of it is. So no serving thread may ask for it: a helper thread does, and
//! answers the direct WRITE then. The serving threads wait for nobody. What a helper waits for is answered by them;
//! it is never a direct WRITE that waits for a helper itself: the only WRITE under way with a page locked is that
//! of `fuse_perform_write`, which is no direct one and is answered at once. One bound is the kernel's: it hands out
//! only [`MAX_BACKGROUND`](crate::fs::MAX_BACKGROUND) requests at a time of those that nobody waits for synchronously, and both direct WRITEs and the
//! READs (readahead) that a helper may wait for are such; a queue of a ring has places for fewer. If all of these were
//! direct WRITEs that wait for a helper, nobody would ever go on. So a limited number waits
//! ([`BraidFs::let_wait`]); what exceeds that is answered at once, and its
//! pages are dropped as soon as a helper comes to it. That is the only case in which a reader may see old data, for
//! that moment.
//!
//! Where both a direct write and a store to the same page through a map or the cache are under way, the store may write
//! the whole page back, as on other file systems: the kernel keeps no order between the two.

use crate::channel::Channel;
use crate::fs::{BraidFs, Context};
use crate::helpers::{Kind, Whose};
use crate::node::WireId;
use crate::request::{Answer, Handled, Outcome, Request};
use crate::shards::Shards;
use braidfs::InodeNo;
use braidfs_sync::rank;
use crossbeam::utils::CachePadded;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A file that was not written directly for so long need not be known.
const QUIET: Duration = Duration::from_secs(30);
/// Known files of one shard; one beyond that takes the place of another.
const KNOWN_MAX: usize = 4096;
const PAGE: u64 = 4096;
/// Pages of one entry of [`Pages`].
const RUN: u64 = 512;
/// Entries of one file (32 GiB of pages); beyond that all its pages count as noted.
const RUNS_MAX: usize = 16384;
/// See [`Shards`].
const SHARDS: usize = 32;
/// The pages of a whole file.
const ALL: Range<u64> = 0..u64::MAX;

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

/// A file that is written directly.
#[derive(Debug)]
struct File {
    /// When that was last seen.
    last: Instant,
    /// Pages that may be in the cache.
    cached: Pages,
    /// What the helpers have yet to have dropped.
    dropping: Vec<Dropping>,
}

/// Pages that have to be dropped.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Dropping {
    pages: Range<u64>,
    /// Tells it from all others.
    number: u64,
}

/// The files that are written directly.
#[derive(Debug, Default)]
pub(crate) struct DirectWrites {
    /// How many. Written when one becomes known, or unknown.
    known: CachePadded<AtomicUsize>,
    files: Shards<File, rank::DirectShard, SHARDS>,
    /// Of the last [`Dropping`].
    drops: CachePadded<AtomicU64>,
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

impl DirectWrites {
    /// The kernel has forgotten the file.
    pub fn forget(&self, ino: InodeNo) {
        if self.known.load(Ordering::SeqCst) != 0 && self.files.of(ino.0).lock().remove(&ino.0).is_some() {
            self.known.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// The cache asks for, or sends, these bytes: to be called before the volume is asked.
    pub fn cached(&self, ino: InodeNo, offset: u64, len: usize) {
        // One that becomes known after this look has all its pages dropped after that.
        if self.known.load(Ordering::SeqCst) == 0 {
            return;
        }
        let mut files = self.files.of(ino.0).lock();
        let Some(f) = files.get_mut(&ino.0) else { return };
        if f.last.elapsed() < QUIET {
            f.cached.add(pages_of(offset, len));
        } else {
            files.remove(&ino.0);
            self.known.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// These bytes were written past the cache: what of the cache must be dropped. If something, [`Self::dropped`] follows.
    fn must_drop(&self, ino: InodeNo, offset: u64, len: usize) -> Option<Dropping> {
        let pages = pages_of(offset, len);
        let mut files = self.files.of(ino.0).lock();
        if let Some(f) = files.get_mut(&ino.0) {
            f.last = Instant::now();
            let under_way = f.dropping.iter().any(|d| d.pages.start < pages.end && pages.start < d.pages.end);
            return (f.cached.take(pages.clone()) || under_way).then(|| self.drop_of(f, pages));
        }
        if files.len() >= KNOWN_MAX
            && let Some(other) = files.keys().next().copied()
        {
            files.remove(&other);
            self.known.fetch_sub(1, Ordering::SeqCst);
        }
        // before it is there to be found, see `cached`
        self.known.fetch_add(1, Ordering::SeqCst);
        let f = files.entry(ino.0).or_insert_with(|| File {
            last: Instant::now(),
            cached: Pages::default(),
            dropping: Vec::new(),
        });
        Some(self.drop_of(f, ALL))
    }

    fn drop_of(&self, f: &mut File, pages: Range<u64>) -> Dropping {
        let drop = Dropping { pages, number: self.drops.fetch_add(1, Ordering::Relaxed) };
        f.dropping.push(drop.clone());
        drop
    }

    /// What [`Self::must_drop`] told is dropped.
    fn dropped(&self, ino: InodeNo, drop: &Dropping) {
        if let Some(f) = self.files.of(ino.0).lock().get_mut(&ino.0)
            && let Some(at) = f.dropping.iter().position(|d| d == drop)
        {
            f.dropping.swap_remove(at);
        }
    }
}

impl BraidFs {
    /// Answers a direct WRITE, whose bytes the volume has: at once where the kernel has no page of them. What the request
    /// wants durable is so before: nobody does that for an answer that comes later.
    pub(crate) fn written_direct(
        &self,
        req: &Request<'_>,
        offset: u64,
        len: usize,
        out: &mut Answer,
        cx: &Context<'_>,
    ) -> Handled {
        let id = req.node();
        let Some(stale) = self.direct_writes.must_drop(id.ino(), offset, len) else { return Ok(Outcome::Reply) };
        let (synced, whose) = (self.sync_changes(req, Ok(Outcome::Reply), cx), Whose::of(req, cx.channel));
        let Some(waiting) = self.let_wait(true).filter(|_| synced.is_ok()) else {
            let channel = cx.channel.clone();
            // Not sent only where the mount is ending.
            self.jobs.send(Kind::Pages, whose, move |fs| fs.drop_stale(id, &stale, &channel));
            return synced;
        };
        let (later, body, channel): (_, _, Arc<Channel>) = (cx.later(), out.body().to_vec(), cx.channel.clone());
        let job = move |fs: &Self| {
            fs.drop_stale(id, &stale, &channel);
            drop(waiting);
            let mut out = Answer::new(body.len());
            out.put_bytes(&body);
            later.answer(&mut out);
        };
        // A job that cannot be handed over is dropped, and answers EIO.
        self.jobs.send(Kind::Pages, whose, job);
        Ok(Outcome::Deferred)
    }

    /// As [`Self::written_direct`], of a WRITE that is answered with an error: nobody waits until the pages are gone.
    pub(crate) fn part_written_direct(&self, req: &Request<'_>, offset: u64, len: usize, cx: &Context<'_>) {
        let id = req.node();
        if let Some(stale) = self.direct_writes.must_drop(id.ino(), offset, len) {
            let channel = cx.channel.clone();
            let whose = Whose::of(req, &channel);
            self.jobs.send(Kind::Pages, whose, move |fs| fs.drop_stale(id, &stale, &channel));
        }
    }

    fn drop_stale(&self, id: WireId, stale: &Dropping, channel: &Channel) {
        let bytes = |page: u64| page.saturating_mul(PAGE);
        let (from, to) = (bytes(stale.pages.start), bytes(stale.pages.end));
        self.drop_pages(id, Some((from, to - from)), channel);
        self.direct_writes.dropped(id.ino(), stale);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const F: InodeNo = InodeNo(7);

    /// The first direct WRITE of a file, with what follows.
    fn known(b: &DirectWrites, ino: InodeNo) {
        let all = b.must_drop(ino, 1 << 30, 1).unwrap();
        assert_eq!(all.pages, ALL);
        b.dropped(ino, &all);
    }

    #[test]
    fn only_pages_of_the_cache_are_dropped() {
        let b = DirectWrites::default();
        b.cached(F, 0, 1 << 20);
        known(&b, F);
        b.cached(F, 8192, 4096);
        b.cached(InodeNo(8), 0, 1 << 20);
        assert_eq!((b.must_drop(F, 0, 8192), b.must_drop(F, 12288, 4096)), (None, None));
        let first = b.must_drop(F, 8191, 2).expect("the second byte is on the page");
        let second = b.must_drop(F, 8192, 10).expect("it is still being dropped");
        assert_eq!((&first.pages, &second.pages), (&(1..3), &(2..3)));
        b.dropped(F, &first);
        b.dropped(F, &second);
        assert_eq!(b.must_drop(F, 0, 1 << 20), None);
        b.cached(F, 5 << 20, 100);
        b.forget(F);
        b.forget(InodeNo(8));
        assert_eq!(b.known.load(Ordering::Relaxed), 0);
        known(&b, F);
        assert_eq!(b.must_drop(F, 5 << 20, 4096), None, "all was dropped when it became known again");
        assert_eq!(b.known.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn until_all_is_dropped_each_write_waits() {
        let b = DirectWrites::default();
        let all = b.must_drop(F, 0, 4096).unwrap();
        let other = b.must_drop(F, 1 << 40, 4096).expect("its pages may have been read before the file was known");
        b.dropped(F, &all);
        b.dropped(F, &other);
        assert_eq!(b.must_drop(F, 1 << 40, 4096), None);
    }

    #[test]
    fn a_late_drop_is_not_taken_for_a_new_one() {
        let b = DirectWrites::default();
        let late = b.must_drop(F, 0, 4096).unwrap();
        b.forget(F);
        let new = b.must_drop(F, 0, 4096).unwrap();
        b.dropped(F, &late);
        assert!(b.must_drop(F, 0, 4096).is_some(), "the new one is under way");
        b.dropped(F, &new);
    }

    #[test]
    fn a_file_that_is_quiet_becomes_unknown() {
        let b = DirectWrites::default();
        known(&b, F);
        b.files.of(F.0).lock().get_mut(&F.0).unwrap().last -= 2 * QUIET;
        b.cached(F, 0, 4096);
        assert_eq!(b.known.load(Ordering::Relaxed), 0);
        assert_eq!(b.must_drop(F, 0, 1).map(|d| d.pages), Some(ALL));
    }

    #[test]
    fn known_files_are_bounded() {
        let b = DirectWrites::default();
        (2..1_000_000).for_each(|n| known(&b, InodeNo(n)));
        let found: usize = b.files.iter().map(|f| f.lock().len()).sum();
        assert!(found <= SHARDS * KNOWN_MAX && b.known.load(Ordering::Relaxed) == found);
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
