//! Memory of the page cache: block-sized buffers, aligned to their size, cut from large chunks.
//!
//! A general allocator gives such a buffer with as much again to align it, a page fault for each, and its memory back to
//! the system at the first occasion. Chunks are of the size of a huge page, and ask to be one: a fault for 511 frames,
//! and few entries of the processor's address cache for all pages of a file. The first block of a chunk holds the
//! reference counts of its frames: whoever has a frame reads its bytes without a look at anything else. Free frames stay
//! in lists that threads share out among them; behind these stands the pool of chunks. A chunk that is wholly free goes
//! back to the system, but for [`SPARE`], and up to [`SPARE_MAX`] that were in use a moment ago: the kernel clears what it
//! gives, which takes several times as long as a copy of data to it.
//!
//! Not promised: that a chunk with one frame in use gives the others' memory back.
//!
//! This is a low-level module: with unsafe code, as `cell/opened.rs`, `cell/cache/index.rs` and `cell/pages/shared.rs` are.
//! A [`Frame`] shares its bytes as an `Arc` does; all that is unsafe is its count, and where frames come from and go to.
//! Locks: a list, then the pool; leaves.

use crate::types::thread_slot;
use braidfs_format::BLOCK_BYTES;
use braidfs_sync::{ProcessMutex, rank};
use crossbeam::utils::CachePadded;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use std::alloc::{Layout, handle_alloc_error};
use std::collections::{BTreeMap, BTreeSet};
use std::ptr::NonNull;
use std::sync::atomic::{
    AtomicU32,
    Ordering::{Acquire, Relaxed, Release},
    fence,
};
use std::time::{Duration, Instant};

/// Bytes of a chunk.
const CHUNK: usize = 2 << 20;
/// Blocks of it: the counts, then the frames.
const BLOCKS: usize = CHUNK / BLOCK_BYTES;
/// Frames in it.
const FRAMES: usize = BLOCKS - 1;
/// More references to a frame than this are a leak: the process ends before the count runs over (as with `Arc`).
const REFERENCES_MAX: u32 = u32::MAX / 2;
/// Chunks kept though they are free.
const SPARE: usize = 2;
/// As many at most until [`trim`] finds that nobody wanted them, for as long as [`IDLE`].
const SPARE_MAX: usize = 64;
const IDLE: Duration = Duration::from_secs(10);
/// Lists of free frames.
const LISTS: usize = 128;
/// Free frames that a list keeps at most, and how many it takes from the pool or gives back at a time.
const LIST_MAX: usize = 512;
const BATCH: usize = 256;

type Bytes = [u8; BLOCK_BYTES];

const _: () = assert!(BLOCKS * size_of::<AtomicU32>() <= BLOCK_BYTES);

const LAYOUT: Layout = match Layout::from_size_align(CHUNK, CHUNK) {
    Ok(l) => l,
    Err(_) => panic!("a chunk's size is a power of two"),
};

/// Brings a block's lines into this CPU's cache, all at once: stores by themselves wait for one after the other where the
/// block is not in the nearest caches.
#[inline]
fn prefetch(at: NonNull<Bytes>) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
        for line in (0..BLOCK_BYTES).step_by(64) {
            // SAFETY: of an address in the block, and a prefetch reads and writes nothing, whatever the address.
            unsafe { _mm_prefetch::<_MM_HINT_ET0>(at.as_ptr().cast::<i8>().add(line)) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// A buffer of a block. A clone shares the bytes; they are changed only where nobody shares them.
pub struct Frame(NonNull<Bytes>);

// SAFETY: bytes that several threads have are only read (`get_mut` gives them to the one that has them alone), or written
// under a lock of the page that readers take, too (`pages/shared.rs`); the count is atomic.
unsafe impl Send for Frame {}
// SAFETY: as above; `&Frame` gives `&[u8]` and clones.
unsafe impl Sync for Frame {}

impl Frame {
    /// A frame full of zeros.
    pub fn zeroed() -> Self {
        let at = take();
        // SAFETY: `take` gives a block's bytes that nobody else has, writable and aligned.
        unsafe { at.as_ptr().write_bytes(0, 1) };
        Self(at)
    }
    /// With this content.
    pub fn copy_of(bytes: &Bytes) -> Self {
        let at = take();
        prefetch(at);
        // SAFETY: as in `zeroed`; `bytes` cannot overlap what nobody else has.
        unsafe { std::ptr::copy_nonoverlapping(bytes, at.as_ptr(), 1) };
        Self(at)
    }
    /// Takes this content; the bytes are other ones where they are shared.
    pub fn replace(&mut self, bytes: &Bytes) {
        let at = self.0;
        match self.get_mut() {
            Some(own) => {
                prefetch(at);
                own.copy_from_slice(bytes);
            }
            None => *self = Self::copy_of(bytes),
        }
    }
    /// Whether this is the only reference: while nobody clones it, it stays so.
    pub fn is_alone(&self) -> bool {
        // Acquire: what others did with the bytes before they let go of them came before
        count(self.0).load(Acquire) == 1
    }
    /// Changes the bytes from `offset` on, of a frame that others see, too.
    ///
    /// # Safety
    /// This is the only reference to the frame, nobody clones it, and nobody else reads or writes the bytes meanwhile; so
    /// there is no reference to them.
    ///
    /// # Panics
    /// Where `bytes` do not fit (a bug of ours).
    pub unsafe fn write_locked(&self, offset: usize, bytes: &[u8]) {
        assert!(bytes.len() <= BLOCK_BYTES && offset <= BLOCK_BYTES - bytes.len());
        if bytes.len() == BLOCK_BYTES {
            prefetch(self.0);
        }
        // SAFETY: in the block, as was just checked; nobody else has to do with its bytes, says the caller. The source is
        // none of them for the same reason.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.0.as_ptr().cast::<u8>().add(offset), bytes.len()) };
    }
    /// Where the bytes lie; nothing is read of them.
    pub fn address(&self) -> *const u8 {
        self.0.as_ptr().cast()
    }
    /// The bytes, to change, where nobody shares them.
    pub fn get_mut(&mut self) -> Option<&mut Bytes> {
        if !self.is_alone() {
            return None;
        }
        // SAFETY: of one reference, the one that `&mut self` is of, there are no others, and none can come.
        Some(unsafe { self.0.as_mut() })
    }
    /// The bytes, to change; copied first where they are shared.
    pub fn make_mut(&mut self) -> &mut Bytes {
        if self.get_mut().is_none() {
            *self = Self::copy_of(self);
        }
        // SAFETY: nobody shares them, as in `get_mut`: so it was, or they are new.
        unsafe { self.0.as_mut() }
    }
}

impl std::ops::Deref for Frame {
    type Target = Bytes;
    fn deref(&self) -> &Bytes {
        // SAFETY: the bytes were written when the frame was made, and stay until the last reference is dropped.
        unsafe { self.0.as_ref() }
    }
}

impl Clone for Frame {
    fn clone(&self) -> Self {
        // Relaxed: whoever has one reference may make another, as `Arc` explains
        if count(self.0).fetch_add(1, Relaxed) > REFERENCES_MAX {
            std::process::abort();
        }
        Self(self.0)
    }
}

impl Drop for Frame {
    fn drop(&mut self) {
        if count(self.0).fetch_sub(1, Release) == 1 {
            // what others did with the bytes comes before the next owner's writes
            fence(Acquire);
            give(self.0);
        }
    }
}

/// The references to a frame. Of no use when the frame is gone.
fn count<'a>(at: NonNull<Bytes>) -> &'a AtomicU32 {
    let block = (at.as_ptr().addr() & (CHUNK - 1)) / BLOCK_BYTES;
    let counts = at.as_ptr().map_addr(|a| a & !(CHUNK - 1)).cast::<AtomicU32>();
    // SAFETY: frames are made by `Pool::take` only, of chunks that are aligned to their size and begin with a block of
    // counts, one for each block, which `grow` has written. The chunk stays while one of its frames is in use, and no
    // caller keeps the reference longer than its frame.
    unsafe { &*counts.add(block) }
}

/// A free frame.
struct Free(NonNull<Bytes>);

// SAFETY: a free frame is nobody's; the list or the pool that holds it owns it.
unsafe impl Send for Free {}

static FREE: [CachePadded<ProcessMutex<Vec<Free>, rank::FreeFrames>>; LISTS] =
    [const { CachePadded::new(ProcessMutex::new(Vec::new())) }; LISTS];
static POOL: ProcessMutex<Pool, rank::FramePool> = ProcessMutex::new(Pool::new());

/// The chunks by address.
struct Pool {
    /// Frames of each that are in the pool, a bit each; and how many.
    chunks: BTreeMap<usize, Chunk>,
    /// Addresses of those that have a free frame: the lowest are used first, so that others become free.
    open: BTreeSet<usize>,
    /// Chunks wholly free.
    free: usize,
    /// The fewest that were, since `looked`: so many nobody wanted.
    idle: usize,
    looked: Option<Instant>,
}

struct Chunk {
    at: NonNull<u8>,
    /// A bit for each block; never the first.
    bits: [u64; BLOCKS / 64],
    count: usize,
}

// SAFETY: the pool owns the chunks' free frames; the addresses are used under its lock only.
unsafe impl Send for Chunk {}

fn take() -> NonNull<Bytes> {
    let mut list = FREE[thread_slot(LISTS)].lock();
    if list.is_empty() {
        POOL.lock().take(&mut list);
    }
    match list.pop() {
        Some(f) => {
            count(f.0).store(1, Relaxed);
            f.0
        }
        None => handle_alloc_error(LAYOUT),
    }
}

fn give(at: NonNull<Bytes>) {
    let mut list = FREE[thread_slot(LISTS)].lock();
    if list.len() >= LIST_MAX {
        let from = list.len() - BATCH;
        POOL.lock().give(list.drain(from..));
    }
    list.push(Free(at));
}

/// Memory for a chunk, aligned to its size; `None` where the system has none. It comes from the system itself: memory of an
/// allocator has mostly been touched before, if only its first bytes, and the kernel makes no huge page where there is a
/// small one.
fn map_chunk() -> Option<NonNull<u8>> {
    let (access, private) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    // SAFETY: a new mapping, at an address that the kernel chooses.
    let all = unsafe { mmap_anonymous(std::ptr::null_mut(), 2 * CHUNK, access, private) }.ok()?;
    let before = all.addr().wrapping_neg() & (CHUNK - 1);
    let at = all.wrapping_byte_add(before);
    // SAFETY: what lies around the chunk belongs to the mapping just made, and nobody knows it.
    let _ = unsafe { munmap(at.wrapping_byte_add(CHUNK), CHUNK - before) };
    if before > 0 {
        // SAFETY: as above.
        let _ = unsafe { munmap(all, before) };
    }
    // It works without.
    // SAFETY: the range is ours, and whether its pages are huge changes nothing of what is in them.
    let _ = unsafe { madvise(at, CHUNK, Advice::LinuxHugepage) };
    NonNull::new(at.cast())
}

/// Gives chunks back to the system that nobody has wanted for a while. To be called now and then; cheap.
pub fn trim() {
    POOL.lock().trim(Instant::now());
}

impl Pool {
    const fn new() -> Self {
        Self { chunks: BTreeMap::new(), open: BTreeSet::new(), free: 0, idle: 0, looked: None }
    }

    /// Moves a batch of free frames to `list`, from a new chunk if need be.
    fn take(&mut self, list: &mut Vec<Free>) {
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

    fn give(&mut self, frames: impl Iterator<Item = Free>) {
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
            // SAFETY: mapped by `map_chunk` for `grow`; all its frames are here, so that nobody uses it.
            let _ = unsafe { munmap(c.at.as_ptr().cast(), CHUNK) };
        }
    }

    /// Unmaps what has been free since `IDLE` before `now`, but for `SPARE` chunks; the highest ones, which are used last.
    fn trim(&mut self, now: Instant) {
        if self.looked.is_some_and(|before| now.duration_since(before) < IDLE) {
            return;
        }
        self.looked = Some(now);
        let unwanted = std::mem::replace(&mut self.idle, self.free).min(self.free.saturating_sub(SPARE));
        let free = self.open.iter().rev().filter(|a| self.chunks.get(a).is_some_and(|c| c.count == FRAMES));
        for addr in free.copied().take(unwanted).collect::<Vec<_>>() {
            self.unmap(addr);
        }
        self.idle = self.idle.min(self.free);
    }

    fn grow(&mut self) {
        let Some(at) = map_chunk() else { return };
        // SAFETY: the first block is ours, aligned and long enough for a count for each block; zeros are counts.
        unsafe { at.cast::<Bytes>().write([0; BLOCK_BYTES]) };
        let addr = at.as_ptr() as usize;
        let mut bits = [u64::MAX; BLOCKS / 64];
        bits[0] &= !1;
        self.chunks.insert(addr, Chunk { at, bits, count: FRAMES });
        self.open.insert(addr);
        self.free += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Write as _, stderr};

    fn stamp(n: u64) -> Bytes {
        let mut b = [0; BLOCK_BYTES];
        for c in b.chunks_exact_mut(8) {
            c.copy_from_slice(&n.to_le_bytes());
        }
        b
    }

    #[test]
    fn frames_are_aligned_zeroed_and_apart() {
        let mut dirty = Frame::zeroed();
        dirty.make_mut().fill(0xff);
        drop(dirty);
        let f = Frame::zeroed();
        assert!(f.iter().all(|b| *b == 0), "a frame that was used before");
        assert_eq!(f.as_ptr() as usize % BLOCK_BYTES, 0);
        let mut g = f.clone();
        assert_eq!(g.as_ptr(), f.as_ptr());
        assert!(g.get_mut().is_none());
        g.make_mut()[0] = 1;
        assert_eq!((f[0], g[0]), (0, 1));
        let at = g.as_ptr();
        g.replace(&stamp(7));
        assert_eq!((g.as_ptr(), *g), (at, stamp(7)));
        let h = g.clone();
        g.replace(&stamp(8));
        assert_eq!((*g, *h, h.as_ptr()), (stamp(8), stamp(7), at));
    }

    /// Threads that make, pass on, check and drop frames, more than a few chunks hold.
    #[test]
    fn nobody_else_writes_to_a_frame() {
        let (send, receive) = crossbeam::channel::unbounded::<(u64, Frame)>();
        std::thread::scope(|s| {
            for t in 0..3u64 {
                let (send, receive) = (send.clone(), receive.clone());
                s.spawn(move || {
                    let mut own = std::collections::VecDeque::new();
                    for i in 0..6000u64 {
                        let n = t << 32 | i;
                        own.push_back((n, Frame::copy_of(&stamp(n))));
                        if i % 3 == 0 {
                            // somebody else drops it
                            send.send(own.pop_front().unwrap()).unwrap();
                        }
                        if i % 7 == 0
                            && let Some((n, f)) = own.front()
                        {
                            // both have it, and either may be the last
                            send.send((*n, f.clone())).unwrap();
                        }
                        if i % 5 == 0
                            && let Ok((n, mut f)) = receive.try_recv()
                        {
                            assert_eq!(*f, stamp(n));
                            f.make_mut().fill(0xee);
                        }
                        if own.len() > 1500 {
                            own.drain(..1000).for_each(|(n, f)| assert_eq!(*f, stamp(n)));
                        }
                    }
                    own.into_iter().for_each(|(n, f)| assert_eq!(*f, stamp(n)));
                });
            }
        });
        drop(send);
        receive.into_iter().for_each(|(n, f)| assert_eq!(*f, stamp(n)));
    }

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

    /// What the kernel tells of the mapping that holds `at`: kibibytes of huge pages.
    fn huge_kib(at: usize) -> u64 {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut inside = false;
        for line in maps.lines() {
            let range = line.split(' ').next().and_then(|r| r.split_once('-'));
            if let Some((Ok(from), Ok(to))) =
                range.map(|(a, b)| (usize::from_str_radix(a, 16), usize::from_str_radix(b, 16)))
            {
                inside = (from..to).contains(&at);
            } else if let Some(kib) = line.strip_prefix("AnonHugePages:").filter(|_| inside) {
                return kib.trim().trim_end_matches(" kB").parse().unwrap();
            }
        }
        0
    }

    #[test]
    fn chunks_are_huge_pages_where_the_kernel_has_them() {
        let enabled = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
        if !enabled.contains("[madvise]") && !enabled.contains("[always]") {
            _ = writeln!(stderr(), "SKIPPED: no transparent huge pages here");
            return;
        }
        // memory may be in pieces too small for one chunk or another, not for each of several
        let frames: Vec<Frame> = (0..8 * FRAMES).map(|_| Frame::zeroed()).collect();
        let huge = frames.iter().step_by(FRAMES).filter(|f| huge_kib(f.as_ptr() as usize) > 0).count();
        assert!(huge > 0, "none of 8 chunks is a huge page");
    }
}
