//! Chunks of page frames, and who has which of them.
//!
//! This is a low-level module, with unsafe code: chunks are mapped and given back here, and the first block of a chunk is
//! counts and the number of its home.

use crate::numa::{self, Binder};
use braidfs_format::BLOCK_BYTES;
use braidfs_sync::{ProcessMutex, rank};
use crossbeam::utils::CachePadded;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use std::collections::{BTreeMap, BTreeSet};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Bytes of a chunk.
pub(super) const CHUNK: usize = 2 << 20;
/// Blocks of it: the counts, then the frames.
pub(super) const BLOCKS: usize = CHUNK / BLOCK_BYTES;
/// Frames in it.
pub(super) const FRAMES: usize = BLOCKS - 1;
/// Chunks kept though they are free.
const SPARE: usize = 2;
/// As many at most until [`Pool::trim`] finds that nobody wanted them, for as long as [`IDLE`]: 2 GiB. A stream's pages are free
/// when their commit is over, hundreds of MiB at once, and wanted again at once.
const SPARE_MAX: usize = 1024;
pub(super) const IDLE: Duration = Duration::from_secs(10);
/// Lists of free frames.
pub(super) const LISTS: usize = 128;
/// Free frames that a list keeps at most, and how many it takes from the pool or gives back at a time.
pub(super) const LIST_MAX: usize = 512;
pub(super) const BATCH: usize = 256;

pub(super) type Bytes = [u8; BLOCK_BYTES];

/// Behind the counts in the first block of a chunk: its [`Home`].
pub(super) const HOME_AT: usize = BLOCKS;
/// Chunks for which a node's pool asks the system at once. Each mapping with a policy of its own counts, and a process may have
/// some 65,000: those of one run are one.
pub(super) const RUN: usize = 16;

const _: () = assert!((HOME_AT + 1) * size_of::<AtomicU32>() <= BLOCK_BYTES);

/// The references to a frame. Of no use when the frame is gone.
pub(super) fn count<'a>(at: NonNull<Bytes>) -> &'a AtomicU32 {
    let block = (at.as_ptr().addr() & (CHUNK - 1)) / BLOCK_BYTES;
    let counts = at.as_ptr().map_addr(|a| a & !(CHUNK - 1)).cast::<AtomicU32>();
    // SAFETY: frames are made by `Pool::take` only, of chunks that are aligned to their size and begin with a block of
    // counts, one for each block, which `grow` has written. The chunk stays while one of its frames is in use, and no
    // caller keeps the reference longer than its frame.
    unsafe { &*counts.add(block) }
}

/// Who has pages: a node's pool, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Home(pub(super) u8);

impl Home {
    /// Of no node.
    pub const ANYWHERE: Self = Self(0);
}

/// Whose chunk a frame is in.
#[inline]
pub(super) fn home_of(at: NonNull<Bytes>) -> Home {
    let counts = at.as_ptr().map_addr(|a| a & !(CHUNK - 1)).cast::<AtomicU32>();
    // SAFETY: as in `count`: this word lies in the chunk's first block, too. `grow` has written it, and nobody changes it.
    Home(unsafe { (*counts.add(HOME_AT)).load(Relaxed) } as u8)
}

/// A free frame.
pub(super) struct Free(pub NonNull<Bytes>);

// SAFETY: a free frame is nobody's; the list or the pool that holds it owns it.
unsafe impl Send for Free {}

impl Free {
    /// In use from now on, with one reference.
    pub(super) fn begin(self) -> NonNull<Bytes> {
        count(self.0).store(1, Relaxed);
        self.0
    }
}

pub(super) type List = CachePadded<ProcessMutex<Vec<Free>, rank::FreeFrames>>;

/// The chunks by address.
pub(super) struct Pool {
    /// Frames of each that are in the pool, a bit each; and how many.
    pub(super) chunks: BTreeMap<usize, Chunk>,
    /// Addresses of those that have a free frame: the lowest are used first, so that others become free.
    open: BTreeSet<usize>,
    /// Chunks wholly free.
    free: usize,
    /// The fewest that were, since `looked`: so many nobody wanted.
    idle: usize,
    looked: Option<Instant>,
    /// Whose it is.
    home: Home,
    /// The node that its memory shall come from, and who is told so.
    bound: Option<(u32, Arc<dyn Binder>)>,
    /// Chunks that it shall have at most as long as others have fewer than theirs.
    pub(super) share: usize,
    /// Address space that follows, of so many chunks, which nothing was touched of yet.
    run: Option<(NonNull<u8>, usize)>,
}

// SAFETY: as of a chunk: nobody else knows the addresses of `run`.
unsafe impl Send for Pool {}

pub(super) struct Chunk {
    at: NonNull<u8>,
    /// A bit for each block; never the first.
    bits: [u64; BLOCKS / 64],
    pub(super) count: usize,
}

// SAFETY: the pool owns the chunks' free frames; the addresses are used under its lock only.
unsafe impl Send for Chunk {}

/// Memory for chunks that follow each other, aligned to their size; `None` where the system has none. It comes from the system itself:
/// memory of an allocator has mostly been touched before, if only its first bytes, and the kernel makes no huge page where
/// there is a small one.
fn map_chunks(chunks: usize) -> Option<NonNull<u8>> {
    let (access, private) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    let bytes = chunks * CHUNK;
    // SAFETY: a new mapping, at an address that the kernel chooses.
    let all = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes + CHUNK, access, private) }.ok()?;
    let before = all.addr().wrapping_neg() & (CHUNK - 1);
    let at = all.wrapping_byte_add(before);
    // SAFETY: what lies around the chunks belongs to the mapping just made, and nobody knows it.
    let _ = unsafe { munmap(at.wrapping_byte_add(bytes), CHUNK - before) };
    if before > 0 {
        // SAFETY: as above.
        let _ = unsafe { munmap(all, before) };
    }
    // It works without.
    // SAFETY: the range is ours, and whether its pages are huge changes nothing of what is in them.
    let _ = unsafe { madvise(at, bytes, Advice::LinuxHugepage) };
    NonNull::new(at.cast())
}

impl Pool {
    pub(super) const fn new() -> Self {
        Self {
            chunks: BTreeMap::new(),
            open: BTreeSet::new(),
            free: 0,
            idle: 0,
            looked: None,
            home: Home::ANYWHERE,
            bound: None,
            share: 0,
            run: None,
        }
    }

    /// Of the node of this number.
    pub(super) fn of_node(home: Home, node: u32, binder: Arc<dyn Binder>) -> Self {
        let mut new = Self::new();
        (new.home, new.bound) = (home, Some((node, binder)));
        new
    }

    #[cfg(test)]
    pub(super) fn node(&self) -> Option<u32> {
        self.bound.as_ref().map(|(node, _)| *node)
    }

    /// Whether it has nothing free, and as many chunks as it shall have.
    pub(super) fn is_used_up(&self) -> bool {
        self.open.is_empty() && self.chunks.len() >= self.share
    }

    /// Moves a batch of free frames to `list`, from a new chunk if need be.
    pub(super) fn take(&mut self, list: &mut Vec<Free>) {
        if self.open.is_empty() {
            self.grow();
        }
        while list.len() < BATCH
            && let Some(&addr) = self.open.first()
            && let Some(c) = self.chunks.get_mut(&addr)
        {
            self.free -= usize::from(c.count == FRAMES);
            self.idle = self.idle.min(self.free);
            for (w, bits) in c.bits.iter_mut().enumerate() {
                while *bits != 0 && list.len() < BATCH {
                    let i = w * 64 + bits.trailing_zeros() as usize;
                    *bits &= *bits - 1;
                    c.count -= 1;
                    // SAFETY: block `i` of `BLOCKS` lies in the chunk.
                    list.push(Free(unsafe { c.at.add(i * BLOCK_BYTES) }.cast()));
                }
            }
            if c.count == 0 {
                self.open.remove(&addr);
            }
        }
    }

    pub(super) fn give(&mut self, frames: impl Iterator<Item = Free>) {
        for Free(at) in frames {
            let addr = at.as_ptr() as usize & !(CHUNK - 1);
            let i = (at.as_ptr() as usize - addr) / BLOCK_BYTES;
            let Some(c) = self.chunks.get_mut(&addr) else { continue };
            c.bits[i / 64] |= 1 << (i % 64);
            c.count += 1;
            if c.count == 1 {
                self.open.insert(addr);
            }
            if c.count == FRAMES {
                self.free += 1;
                if self.free > SPARE_MAX {
                    self.unmap(addr);
                }
            }
        }
    }

    /// Gives a chunk that is wholly free back to the system.
    fn unmap(&mut self, addr: usize) {
        if let Some(c) = self.chunks.remove(&addr) {
            self.open.remove(&addr);
            self.free -= 1;
            // SAFETY: mapped by `map_chunks` for `grow`; all its frames are here, so that nobody uses it.
            let _ = unsafe { munmap(c.at.as_ptr().cast(), CHUNK) };
        }
    }

    /// Unmaps what has been free since `IDLE` before `now`, but for `SPARE` chunks; the highest ones, which are used last.
    pub(super) fn trim(&mut self, now: Instant) {
        if self.looked.is_some_and(|before| now.duration_since(before) < IDLE) {
            return;
        }
        self.looked = Some(now);
        let unwanted = std::mem::replace(&mut self.idle, self.free).min(self.free.saturating_sub(SPARE));
        self.unmap_free(unwanted);
    }

    /// Unmaps all that is free, but for `SPARE` chunks: nobody will want it.
    pub(super) fn shrink(&mut self) {
        self.unmap_free(self.free.saturating_sub(SPARE));
    }

    /// So many free chunks, the highest ones.
    fn unmap_free(&mut self, unwanted: usize) {
        let free = self.open.iter().rev().filter(|a| self.chunks.get(a).is_some_and(|c| c.count == FRAMES));
        for addr in free.copied().take(unwanted).collect::<Vec<_>>() {
            self.unmap(addr);
        }
        self.idle = self.idle.min(self.free);
    }

    /// Memory for a chunk of its node, of which nothing was touched.
    fn map(&mut self) -> Option<NonNull<u8>> {
        let Some((node, binder)) = &self.bound else { return map_chunks(1) };
        let (at, left) = match self.run.take() {
            Some(run) => run,
            None => {
                // where there is not so much left, one may fit
                let (at, chunks) = map_chunks(RUN).map(|at| (at, RUN)).or_else(|| Some((map_chunks(1)?, 1)))?;
                if let Err(e) = binder.bind_memory(at.as_ptr() as usize, chunks * CHUNK, *node) {
                    numa::tell_refused("memory", &e);
                }
                (at, chunks)
            }
        };
        if left > 1 {
            // SAFETY: the mapping has `left` chunks from `at` on.
            self.run = Some((unsafe { at.add(CHUNK) }, left - 1));
        }
        Some(at)
    }

    fn grow(&mut self) {
        let Some(at) = self.map() else { return };
        // SAFETY: the first block is ours, aligned and long enough for a count for each block; zeros are counts.
        unsafe { at.cast::<Bytes>().write([0; BLOCK_BYTES]) };
        // SAFETY: the word lies in the same block, behind the counts.
        unsafe { at.cast::<u32>().add(HOME_AT).write(self.home.0.into()) };
        let addr = at.as_ptr() as usize;
        let mut bits = [u64::MAX; BLOCKS / 64];
        bits[0] &= !1;
        self.chunks.insert(addr, Chunk { at, bits, count: FRAMES });
        self.open.insert(addr);
        self.free += 1;
    }
}

/// Gives what is free in the lists back to their pool, and that to the system.
pub(super) fn give_all(lists: &[List], pool: &ProcessMutex<Pool, rank::FramePool>) {
    for list in lists {
        let mut list = list.lock();
        pool.lock().give(std::mem::take(&mut *list).into_iter());
    }
    pool.lock().shrink();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_go_back() {
        let mut p = Pool::new();
        let mut all = Vec::new();
        while all.len() < 5 * FRAMES {
            let mut some = Vec::new();
            p.take(&mut some);
            // the last ones of a chunk are fewer
            assert!((1..=BATCH).contains(&some.len()));
            all.extend(some);
        }
        assert_eq!((p.chunks.len(), p.free, p.open.len()), (5, 0, 0));
        let mut seen: Vec<usize> = all.iter().map(|f| f.0.as_ptr() as usize).collect();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 5 * FRAMES);
        assert!(seen.iter().all(|a| a % CHUNK >= BLOCK_BYTES), "the counts are nobody's");
        let start = Instant::now();
        p.trim(start);
        p.give(all.drain(..));
        assert_eq!((p.chunks.len(), p.free), (5, 5), "what was in use a moment ago stays");
        p.trim(start + IDLE / 2);
        p.trim(start + IDLE);
        assert_eq!((p.chunks.len(), p.free), (5, 5), "they were in use in this time");
        // one is wanted now and then
        let mut some = Vec::new();
        p.take(&mut some);
        p.give(some.into_iter());
        p.trim(start + 2 * IDLE);
        assert_eq!((p.chunks.len(), p.free), (SPARE, SPARE), "of 4 that nobody wanted, those above the spare ones");
        p.trim(start + 3 * IDLE);
        assert_eq!((p.chunks.len(), p.free, p.open.len()), (SPARE, SPARE, SPARE));
        // they are used before there is a new one
        let mut taken = 0;
        while taken < SPARE * FRAMES {
            let mut some = Vec::new();
            p.take(&mut some);
            taken += some.len();
        }
        assert_eq!((p.chunks.len(), p.free, p.open.len()), (SPARE, 0, 0));
    }

    /// Also those of which frames lie in lists.
    #[test]
    fn all_chunks_go_back_when_nobody_will_want_them() {
        let lists: [List; 3] = [const { CachePadded::new(ProcessMutex::new(Vec::new())) }; 3];
        let pool = ProcessMutex::new(Pool::new());
        let mut used = Vec::new();
        for i in 0..5 * FRAMES {
            let mut list = lists[i % 3].lock();
            if list.is_empty() {
                pool.lock().take(&mut list);
            }
            used.extend(list.pop());
        }
        used.into_iter().enumerate().for_each(|(i, f)| lists[i % 3].lock().push(f));
        let mapped = || {
            let pool = pool.lock();
            (pool.chunks.len(), pool.free)
        };
        assert!(mapped().0 >= 5 && mapped().1 == 0, "{:?}", mapped());
        let kept = lists[0].lock().pop();
        give_all(&lists, &pool);
        assert_eq!(mapped(), (SPARE + 1, SPARE), "one has a frame in use");
        pool.lock().give(kept.into_iter());
        give_all(&lists, &pool);
        assert_eq!(mapped(), (SPARE, SPARE));
    }
}
