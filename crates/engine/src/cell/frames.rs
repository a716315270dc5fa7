//! Memory of the page cache: block-sized buffers, aligned to their size, cut from large chunks.
//!
//! A general allocator gives such a buffer with as much again to align it, a page fault for each, and its memory back to
//! the system at the first occasion. Chunks are of the size of a huge page, and ask to be one: a fault for 512 frames,
//! and few entries of the processor's address cache for all pages of a file. Free frames stay in lists that threads share
//! out among them; behind these stands the pool of chunks. A chunk that is wholly free goes back to the system, but for
//! [`SPARE`].
//!
//! Not promised: that a chunk with one frame in use gives the others' memory back.
//!
//! This is a low-level module: the only one of the engine with unsafe code. A [`Frame`] owns its bytes as a `Box` does;
//! all that is unsafe is where frames come from and where they go. Locks: a list, then the pool; leaves.

use crate::types::thread_slot;
use braidfs_format::BLOCK_BYTES;
use braidfs_sync::ProcessMutex as Mutex;
use crossbeam::utils::CachePadded;
use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::collections::{BTreeMap, BTreeSet};
use std::ptr::NonNull;

/// Bytes of a chunk.
const CHUNK: usize = 2 << 20;
/// Frames in it.
const FRAMES: usize = CHUNK / BLOCK_BYTES;
/// Chunks kept though they are free.
const SPARE: usize = 2;
/// Lists of free frames.
const LISTS: usize = 16;
/// Free frames that a list keeps at most, and how many it takes from the pool or gives back at a time.
const LIST_MAX: usize = 64;
const BATCH: usize = 32;

type Bytes = [u8; BLOCK_BYTES];

const LAYOUT: Layout = match Layout::from_size_align(CHUNK, CHUNK) {
    Ok(l) => l,
    Err(_) => panic!("a chunk's size is a power of two"),
};

/// Brings a block's lines into this CPU's cache, all at once: stores by themselves wait for one after the other. An
/// overwrite of random blocks, beyond the cache, takes a seventh less time with it.
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

/// A buffer of a block.
pub struct Frame(NonNull<Bytes>);

// SAFETY: a frame owns its bytes and nothing else; no two frames have the same, as those in the lists are free.
unsafe impl Send for Frame {}
// SAFETY: as above; `&Frame` gives `&[u8]` only.
unsafe impl Sync for Frame {}

impl Frame {
    /// Of zeros.
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
    /// Takes this content instead.
    pub fn replace(&mut self, bytes: &Bytes) {
        prefetch(self.0);
        self.copy_from_slice(bytes);
    }
}

impl std::ops::Deref for Frame {
    type Target = Bytes;
    fn deref(&self) -> &Bytes {
        // SAFETY: the bytes were written when the frame was made, and are its own until it is dropped.
        unsafe { self.0.as_ref() }
    }
}

impl std::ops::DerefMut for Frame {
    fn deref_mut(&mut self) -> &mut Bytes {
        // SAFETY: as in `deref`; `&mut self` excludes other users.
        unsafe { self.0.as_mut() }
    }
}

impl Clone for Frame {
    fn clone(&self) -> Self {
        Self::copy_of(self)
    }
}

impl Drop for Frame {
    fn drop(&mut self) {
        give(self.0);
    }
}

/// A free frame.
struct Free(NonNull<Bytes>);

// SAFETY: a free frame is nobody's; the list or the pool that holds it owns it.
unsafe impl Send for Free {}

static FREE: [CachePadded<Mutex<Vec<Free>>>; LISTS] = [const { CachePadded::new(Mutex::new(Vec::new())) }; LISTS];
static POOL: Mutex<Pool> = Mutex::new(Pool { chunks: BTreeMap::new(), open: BTreeSet::new(), free: 0 });

/// The chunks by address.
struct Pool {
    /// Frames of each that are in the pool, a bit each; and how many.
    chunks: BTreeMap<usize, Chunk>,
    /// Addresses of those that have a free frame: the lowest are used first, so that others become free.
    open: BTreeSet<usize>,
    /// Chunks wholly free.
    free: usize,
}

struct Chunk {
    at: NonNull<u8>,
    bits: [u64; FRAMES / 64],
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
        Some(f) => f.0,
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

impl Pool {
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
            for (w, bits) in c.bits.iter_mut().enumerate() {
                while *bits != 0 && list.len() < BATCH {
                    let i = w * 64 + bits.trailing_zeros() as usize;
                    *bits &= *bits - 1;
                    c.count -= 1;
                    // SAFETY: frame `i` of a chunk of `FRAMES` lies in it.
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
                if self.free > SPARE
                    && let Some(c) = self.chunks.remove(&addr)
                {
                    self.open.remove(&addr);
                    self.free -= 1;
                    // SAFETY: allocated by `grow` with this layout; all its frames are here, so that nobody uses it.
                    unsafe { dealloc(c.at.as_ptr(), LAYOUT) };
                }
            }
        }
    }

    fn grow(&mut self) {
        // SAFETY: the layout is not of size 0.
        let Some(at) = NonNull::new(unsafe { alloc(LAYOUT) }) else { return };
        // what it is good for: see the module. It works without.
        // SAFETY: the range is ours, and whether its pages are huge changes nothing of what is in them.
        let _ = unsafe { rustix::mm::madvise(at.as_ptr().cast(), CHUNK, rustix::mm::Advice::LinuxHugepage) };
        let addr = at.as_ptr() as usize;
        self.chunks.insert(addr, Chunk { at, bits: [u64::MAX; FRAMES / 64], count: FRAMES });
        self.open.insert(addr);
        self.free += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        dirty.fill(0xff);
        drop(dirty);
        let f = Frame::zeroed();
        assert!(f.iter().all(|b| *b == 0), "a frame that was used before");
        assert_eq!(f.as_ptr() as usize % BLOCK_BYTES, 0);
        let mut g = f.clone();
        g[0] = 1;
        assert_eq!((f[0], g[0]), (0, 1));
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
                        if i % 5 == 0
                            && let Ok((n, f)) = receive.try_recv()
                        {
                            assert_eq!(*f, stamp(n));
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
        let mut p = Pool { chunks: BTreeMap::new(), open: BTreeSet::new(), free: 0 };
        let mut all = Vec::new();
        for _ in 0..5 * FRAMES / BATCH {
            let mut some = Vec::new();
            p.take(&mut some);
            assert_eq!(some.len(), BATCH);
            all.extend(some);
        }
        assert_eq!((p.chunks.len(), p.free, p.open.len()), (5, 0, 0));
        let mut seen: Vec<usize> = all.iter().map(|f| f.0.as_ptr() as usize).collect();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 5 * FRAMES);
        p.give(all.drain(..));
        assert_eq!((p.chunks.len(), p.free, p.open.len()), (SPARE, SPARE, SPARE));
        // they are used before there is a new one
        for _ in 0..SPARE * FRAMES / BATCH {
            p.take(&mut Vec::new());
        }
        assert_eq!((p.chunks.len(), p.free, p.open.len()), (SPARE, 0, 0));
    }
}
