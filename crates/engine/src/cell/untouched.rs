//! Words that are zero, of which nothing is touched before it is used. Low-level module: the `unsafe` of their memory is here.
//!
//! The memory comes from the system itself: an allocator that gives again what another volume had clears it, and so touches all of it.

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

/// See the module. At the beginning of a page.
pub(super) struct Words {
    at: NonNull<AtomicU64>,
    words: usize,
}

// SAFETY: the mapping is its own, as memory of a `Box<[AtomicU64]>` would be.
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
        // SAFETY: so many words are mapped there, zero at first, for as long as `self` lives; or there is none.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.words) }
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        if self.words > 0 {
            // SAFETY: mapped by `new`, and nobody has a reference to it any more.
            let _ = unsafe { munmap(self.at.as_ptr().cast(), self.words * size_of::<AtomicU64>()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering::Relaxed;

    #[test]
    fn words_are_zero_and_keep_what_they_are_told() {
        let words = Words::new(3000);
        assert!(words.len() == 3000 && words.iter().all(|w| w.load(Relaxed) == 0));
        words.iter().zip(7..).for_each(|(w, n)| w.store(n, Relaxed));
        assert!(words.iter().zip(7..).all(|(w, n)| w.load(Relaxed) == n));
        assert!(Words::new(0).is_empty() && Words::new(usize::MAX / 8).is_empty() && Words::new(usize::MAX).is_empty());
    }
}
