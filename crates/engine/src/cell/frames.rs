//! Memory of the page cache: block-sized buffers, aligned to their size, cut from large chunks.
//!
//! A general allocator gives such a buffer with as much again to align it, a page fault for each, and its memory back to
//! the system at the first occasion. Chunks are of the size of a huge page, and ask to be one: a fault for 511 frames,
//! and few entries of the processor's address cache for all pages of a file. The first block of a chunk holds the
//! reference counts of its frames: whoever has a frame reads its bytes without a look at anything else. Free frames stay
//! in lists that threads share out among them; behind these stands the pool of chunks ([`pool`]). A chunk that is wholly free goes
//! back to the system, but for two and those that were in use a moment ago: the kernel clears what it gives, which takes
//! several times as long as a copy of data to it, and keeps others off the processor meanwhile. So what is mapped is bound by
//! what was in use in the last seconds. When the last volume of the process ends ([`Used`]), all that is free goes
//! back, but for two chunks of a pool.
//!
//! Of a machine with several NUMA nodes there are lists and a pool for each ([`homes`]); a chunk says whose it is, and its
//! frames come back there. What belongs nowhere, and all where there is one node, comes from the lists and the pool here.
//!
//! Not promised: that a chunk with one frame in use gives the others' memory back.
//!
//! This is a low-level module: with unsafe code, as `cell/opened.rs`, `cell/cache/index.rs` and `cell/pages/shared.rs` are.
//! A [`Frame`] shares its bytes as an `Arc` does; all that is unsafe is its count, and where frames come from and go to.
//! Locks: a list, then the pool; leaves.

pub mod homes;
pub mod pool;

use crate::types::thread_slot;
use braidfs_format::BLOCK_BYTES;
use braidfs_sync::{ProcessMutex, rank};
use crossbeam::utils::CachePadded;
use pool::{BATCH, Bytes, CHUNK, Free, Home, LIST_MAX, LISTS, List, Pool, count};
use std::alloc::{Layout, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::atomic::{
    AtomicUsize,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
    fence,
};
use std::time::Instant;

/// More references to a frame than this are a leak: the process ends before the count runs over (as with `Arc`).
const REFERENCES_MAX: u32 = u32::MAX / 2;

const LAYOUT: Layout = match Layout::from_size_align(CHUNK, CHUNK) {
    Ok(l) => l,
    Err(_) => panic!("a chunk's size is a power of two"),
};

/// A buffer of a block. A clone shares the bytes; they are changed only where nobody shares them.
pub struct Frame(NonNull<Bytes>);

// SAFETY: bytes that several threads have are only read (`get_mut` gives them to the one that has them alone), or written
// under a lock of the page that readers take, too (`pages/shared.rs`); the count is atomic.
unsafe impl Send for Frame {}
// SAFETY: as above; `&Frame` gives `&[u8]` and clones.
unsafe impl Sync for Frame {}

impl Frame {
    /// A frame full of zeros.
    pub fn zeroed(home: Home) -> Self {
        let at = take(home);
        // SAFETY: `take` gives a block's bytes that nobody else has, writable and aligned.
        unsafe { at.as_ptr().write_bytes(0, 1) };
        Self(at)
    }
    /// With this content.
    pub fn copy_of(bytes: &Bytes, home: Home) -> Self {
        let at = take(home);
        // its lines are not asked for beforehand: a whole block is copied as fast as memory takes it, and asking costs a third more
        // SAFETY: as in `zeroed`; `bytes` cannot overlap what nobody else has.
        unsafe { std::ptr::copy_nonoverlapping(bytes, at.as_ptr(), 1) };
        Self(at)
    }
    /// Takes this content; the bytes are other ones where they are shared.
    pub fn replace(&mut self, bytes: &Bytes) {
        match self.get_mut() {
            Some(own) => own.copy_from_slice(bytes),
            None => *self = Self::copy_of(bytes, self.home()),
        }
    }
    /// Whose frame it is: not of whom it was asked for, where that had none left.
    pub fn home(&self) -> Home {
        home_of(self.0)
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
            *self = Self::copy_of(self, self.home());
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
        // The only reference, of which none can be made meanwhile: there is nothing to count.
        if self.is_alone() {
            give(self.0);
        } else if count(self.0).fetch_sub(1, Release) == 1 {
            // what others did with the bytes comes before the next owner's writes
            fence(Acquire);
            give(self.0);
        }
    }
}

/// Whose chunk a frame is in.
#[inline]
fn home_of(at: NonNull<Bytes>) -> Home {
    if homes::are_there() { pool::home_of(at) } else { Home::ANYWHERE }
}

static FREE: [List; LISTS] = [const { CachePadded::new(ProcessMutex::new(Vec::new())) }; LISTS];
static POOL: ProcessMutex<Pool, rank::FramePool> = ProcessMutex::new(Pool::new());

fn take(home: Home) -> NonNull<Bytes> {
    if let Some(at) = home.take() {
        return at;
    }
    let mut list = FREE[thread_slot(LISTS)].lock();
    if list.is_empty() {
        POOL.lock().take(&mut list);
    }
    match list.pop() {
        Some(f) => f.begin(),
        None => handle_alloc_error(LAYOUT),
    }
}

fn give(at: NonNull<Bytes>) {
    let (lists, pool) = home_of(at).lists_and_pool().unwrap_or((&FREE[..], &POOL));
    let mut list = lists[thread_slot(LISTS)].lock();
    if list.len() >= LIST_MAX {
        let from = list.len() - BATCH;
        pool.lock().give(list.drain(from..));
    }
    list.push(Free(at));
}

/// Gives chunks back to the system that nobody has wanted for a while. To be called now and then; cheap.
pub fn trim() {
    let now = Instant::now();
    POOL.lock().trim(now);
    homes::trim(now);
}

/// Volumes that have frames.
static USED: AtomicUsize = AtomicUsize::new(0);

/// A volume that may have frames; to be dropped after them. The last one gives the memory back: nobody calls [`trim`] any more.
#[derive(Debug)]
pub struct Used(());

impl Used {
    /// Counts one.
    pub fn begin() -> Self {
        USED.fetch_add(1, Relaxed);
        Self(())
    }
}

impl Drop for Used {
    fn drop(&mut self) {
        // one that begins meanwhile finds what is left, and maps more
        if USED.fetch_sub(1, AcqRel) == 1 {
            pool::give_all(&FREE, &POOL);
            homes::give_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::pool::FRAMES;
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
        let mut dirty = Frame::zeroed(Home::ANYWHERE);
        dirty.make_mut().fill(0xff);
        drop(dirty);
        let f = Frame::zeroed(Home::ANYWHERE);
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
                        own.push_back((n, Frame::copy_of(&stamp(n), Home::ANYWHERE)));
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
        let frames: Vec<Frame> = (0..8 * FRAMES).map(|_| Frame::zeroed(Home::ANYWHERE)).collect();
        let huge = frames.iter().step_by(FRAMES).filter(|f| huge_kib(f.as_ptr() as usize) > 0).count();
        assert!(huge > 0, "none of 8 chunks is a huge page");
    }
}
