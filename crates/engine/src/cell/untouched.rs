//! Words that are zero, of which nothing is touched before it is used. Low-level module: the `unsafe` of their memory is here.
//!
//! The memory comes from the system itself: an allocator that gives again what another volume had clears it, and so touches all of it.
//! A few pages ([`CLEARED`]) it clears in less time than the system takes to map them and to give a page at each first use.

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

/// Bytes up to which the allocator is asked.
const CLEARED: usize = 64 << 10;
/// Where the memory begins: at a cache line, and the one that is fetched with it.
const ALIGN: usize = 128;

/// See the module. At the beginning of two cache lines.
pub(super) struct Words {
    at: NonNull<AtomicU64>,
    words: usize,
}

// SAFETY: the memory is its own, as that of a `Box<[AtomicU64]>` would be.
unsafe impl Send for Words {}
// SAFETY: as above; shared access goes through atomics.
unsafe impl Sync for Words {}

impl Words {
    /// So many words; none where there are none wanted, or the system has not so much memory.
    pub fn new(words: usize) -> Self {
        Self::map(words).unwrap_or(Self { at: NonNull::dangling(), words: 0 })
    }

    fn map(words: usize) -> Option<Self> {
        let bytes = words.checked_mul(size_of::<AtomicU64>())?;
        if let Some(layout) = small(bytes) {
            // SAFETY: of more than no bytes.
            let at = unsafe { alloc_zeroed(layout) };
            return Some(Self { at: NonNull::new(at.cast())?, words });
        }
        let (access, private) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let at = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, access, private) }.ok()?;
        Some(Self { at: NonNull::new(at.cast())?, words })
    }
}

impl Deref for Words {
    type Target = [AtomicU64];
    #[inline]
    fn deref(&self) -> &[AtomicU64] {
        // SAFETY: so many words are there, zero at first, for as long as `self` lives; or there is none.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.words) }
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        let bytes = self.words * size_of::<AtomicU64>();
        if let Some(layout) = small(bytes) {
            // SAFETY: allocated by `map` with that layout, and nobody has a reference to it any more.
            unsafe { dealloc(self.at.as_ptr().cast(), layout) };
        } else if bytes > 0 {
            // SAFETY: mapped by `map`, and nobody has a reference to it any more.
            let _ = unsafe { munmap(self.at.as_ptr().cast(), bytes) };
        }
    }
}

/// How so many bytes are allocated, where they are few enough, and more than none.
fn small(bytes: usize) -> Option<Layout> {
    if !(1..=CLEARED).contains(&bytes) {
        return None;
    }
    Layout::from_size_align(bytes, ALIGN).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering::Relaxed;

    #[test]
    fn words_are_zero_and_keep_what_they_are_told() {
        let few = CLEARED / size_of::<AtomicU64>();
        for len in [1, 3000, few, few + 1, 4 * few] {
            for _again in 0..2 {
                let words = Words::new(len);
                assert!(words.len() == len && words.as_ptr().addr().is_multiple_of(ALIGN));
                assert!(words.iter().all(|w| w.load(Relaxed) == 0), "{len} words");
                words.iter().zip(7..).for_each(|(w, n)| w.store(n, Relaxed));
                assert!(words.iter().zip(7..).all(|(w, n)| w.load(Relaxed) == n));
            }
        }
        assert!(Words::new(0).is_empty() && Words::new(usize::MAX / 8).is_empty() && Words::new(usize::MAX).is_empty());
    }
}
