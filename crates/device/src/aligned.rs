//! Memory at a block boundary, as `O_DIRECT` wants it.
//!
//! Owns one allocation per buffer. Low-level module: the `unsafe` of this crate's memory is here.

use crate::BLOCK_BYTES;
use std::alloc::{Layout, alloc, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// A byte buffer that starts at a multiple of 4096. Reads and writes from it need no bounce copy.
pub struct AlignedBuf {
    data: NonNull<u8>,
    len: usize,
}

// SAFETY: the buffer owns its memory alone, like a `Box<[u8]>`.
unsafe impl Send for AlignedBuf {}
// SAFETY: shared access only reads, like a `Box<[u8]>`.
unsafe impl Sync for AlignedBuf {}

impl AlignedBuf {
    /// A buffer of `bytes` zeros.
    ///
    /// # Panics
    /// Where `bytes` rounded up to a block exceeds `isize::MAX`.
    pub fn zeroed(bytes: usize) -> Self {
        let layout = Self::layout(bytes);
        // SAFETY: the layout has a size of at least one block, so it is not zero.
        let data = unsafe { alloc_zeroed(layout) };
        let Some(data) = NonNull::new(data) else { handle_alloc_error(layout) };
        Self { data, len: bytes }
    }

    /// A copy of `parts`, one behind the other.
    ///
    /// # Panics
    /// As [`AlignedBuf::zeroed`].
    pub fn gather(parts: &[&[u8]]) -> Self {
        let bytes = parts.iter().map(|p| p.len()).sum();
        let layout = Self::layout(bytes);
        // SAFETY: as in `zeroed`. Nobody has a reference to it before all of it is written.
        let data = unsafe { alloc(layout) };
        let Some(data) = NonNull::new(data) else { handle_alloc_error(layout) };
        let mut at = 0;
        for part in parts {
            // SAFETY: there is room for all parts, and new memory overlaps none of them.
            unsafe { data.as_ptr().add(at).copy_from_nonoverlapping(part.as_ptr(), part.len()) };
            at += part.len();
        }
        Self { data, len: bytes }
    }

    /// Whether `O_DIRECT` takes `bytes` as they lie.
    pub fn is_aligned(bytes: &[u8]) -> bool {
        bytes.as_ptr().addr().is_multiple_of(BLOCK_BYTES)
    }

    fn layout(bytes: usize) -> Layout {
        // A size of zero is no valid allocation, so an empty buffer has a block too.
        Layout::from_size_align(bytes.max(1), BLOCK_BYTES)
            .map(|l| l.pad_to_align())
            .expect("a buffer of at most isize::MAX bytes")
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        // SAFETY: `data` came from the allocator with this layout (`len` never changes).
        unsafe { dealloc(self.data.as_ptr(), Self::layout(self.len)) }
    }
}

impl Deref for AlignedBuf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `data` points to `len` initialised bytes that live as long as `self`.
        unsafe { std::slice::from_raw_parts(self.data.as_ptr(), self.len) }
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.data.as_ptr(), self.len) }
    }
}

impl std::fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AlignedBuf({} bytes)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aligned_zeroed_and_gathered() {
        for bytes in [0, 1, 4096, 5000, 1 << 20] {
            let mut b = AlignedBuf::zeroed(bytes);
            assert_eq!(b.len(), bytes);
            assert!(AlignedBuf::is_aligned(&b) && b.iter().all(|&x| x == 0));
            b.fill(7);
        }
        let b = AlignedBuf::gather(&[b"ab", b"", b"cde"]);
        assert_eq!(&b[..], b"abcde");
        assert!(!AlignedBuf::is_aligned(&b[1..]));
    }
}
