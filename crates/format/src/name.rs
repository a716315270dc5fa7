//! File names in memory.

use std::borrow::Borrow;
use std::hash::{Hash, Hasher};
use std::ops::Deref;

/// Longest name that needs no memory of its own.
pub const SHORT_MAX: usize = 22;

/// The first `8 * N` bytes, at most, as little-endian words, the last of them filled up with zeros.
///
/// All in registers: a copy of a length that is not known would be a call, and who then reads as words what it wrote as bytes waits
/// until that is in the cache.
#[inline]
pub fn words<const N: usize>(bytes: &[u8]) -> [u64; N] {
    let (whole, rest) = bytes.as_chunks::<8>();
    let end = match bytes.last_chunk::<8>() {
        _ if rest.is_empty() => 0,
        // the last eight bytes without those that are in the word before
        Some(last) => u64::from_le_bytes(*last) >> (64 - 8 * rest.len()),
        None => short(bytes),
    };
    std::array::from_fn(|i| match whole.get(i) {
        Some(chunk) => u64::from_le_bytes(*chunk),
        None if i == whole.len() => end,
        None => 0,
    })
}

/// Less than eight bytes as a word: of two reads that overlap both have the same bits there.
#[inline]
fn short(bytes: &[u8]) -> u64 {
    let both = |first: u64, last: u64, read: usize| first | last << (8 * (bytes.len() - read));
    if let (Some(first), Some(last)) = (bytes.first_chunk::<4>(), bytes.last_chunk::<4>()) {
        both(u32::from_le_bytes(*first).into(), u32::from_le_bytes(*last).into(), 4)
    } else if let (Some(first), Some(last)) = (bytes.first_chunk::<2>(), bytes.last_chunk::<2>()) {
        both(u16::from_le_bytes(*first).into(), u16::from_le_bytes(*last).into(), 2)
    } else {
        bytes.first().map_or(0, |b| u64::from(*b))
    }
}

/// A file's name: bytes that do not change. Most names are short and lie in the value itself (24 bytes), so that whoever
/// walks over the entries of a directory, or the names of many inodes, does not go from allocation to allocation.
#[derive(Clone)]
pub struct FileName(Repr);

#[derive(Clone)]
enum Repr {
    /// How many of the bytes are the name.
    Short(u8, [u8; SHORT_MAX]),
    Long(Box<[u8]>),
}

impl Deref for FileName {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match &self.0 {
            Repr::Short(len, bytes) => &bytes[..usize::from(*len)],
            Repr::Long(bytes) => bytes,
        }
    }
}

impl FileName {
    /// Memory beside the value itself, bytes.
    pub fn heap_bytes(&self) -> usize {
        if let Repr::Long(b) = &self.0 { b.len() } else { 0 }
    }
}

impl From<&[u8]> for FileName {
    fn from(name: &[u8]) -> Self {
        if name.len() > SHORT_MAX {
            return Self(Repr::Long(name.into()));
        }
        let [a, b, c] = words(name).map(u64::to_le_bytes);
        let mut bytes = [0; SHORT_MAX];
        bytes[..8].copy_from_slice(&a);
        bytes[8..16].copy_from_slice(&b);
        bytes[16..].copy_from_slice(&c[..SHORT_MAX - 16]);
        Self(Repr::Short(name.len() as u8, bytes))
    }
}

impl<const N: usize> From<[u8; N]> for FileName {
    fn from(name: [u8; N]) -> Self {
        name.as_slice().into()
    }
}

impl From<Vec<u8>> for FileName {
    fn from(name: Vec<u8>) -> Self {
        name.as_slice().into()
    }
}

impl From<FileName> for Box<[u8]> {
    fn from(name: FileName) -> Self {
        match name.0 {
            Repr::Short(..) => (*name).into(),
            Repr::Long(bytes) => bytes,
        }
    }
}

impl Borrow<[u8]> for FileName {
    fn borrow(&self) -> &[u8] {
        self
    }
}

impl PartialEq for FileName {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for FileName {}

impl PartialOrd for FileName {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for FileName {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (**self).cmp(&**other)
    }
}

impl Hash for FileName {
    /// As of the bytes: names are looked up by slices.
    fn hash<H: Hasher>(&self, state: &mut H) {
        (**self).hash(state);
    }
}

impl std::fmt::Debug for FileName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        (**self).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn bytes_of_every_length() {
        assert_eq!(size_of::<FileName>(), 24);
        let long = [b'x'; 255];
        for n in 0..=long.len() {
            let (name, bytes) = (FileName::from(&long[..n]), &long[..n]);
            assert_eq!(&*name, bytes);
            assert_eq!(name.clone(), name);
            assert_eq!(name.heap_bytes(), if n > SHORT_MAX { n } else { 0 });
            assert_eq!(&*Box::<[u8]>::from(name), bytes);
        }
    }

    #[test]
    fn words_of_every_length() {
        let bytes: [u8; 40] = std::array::from_fn(|i| i as u8 ^ 0xa5);
        for n in 0..=bytes.len() {
            let mut padded = [0; 32];
            let of = n.min(32);
            padded[..of].copy_from_slice(&bytes[..of]);
            let (want, _) = padded.as_chunks::<8>();
            assert_eq!(words::<4>(&bytes[..n]).map(u64::to_le_bytes), want, "{n} bytes");
        }
    }

    #[test]
    fn compares_and_hashes_as_bytes() {
        let bytes: [&[u8]; 5] = [b"a", b"a\0", &[b'a'; 30], b"ab", b"b"];
        let names = bytes.map(FileName::from);
        assert!(names.windows(2).all(|w| w[0] < w[1]));
        let set: HashSet<FileName> = names.into();
        assert!(bytes.iter().all(|b| set.contains(*b)));
        assert!(!set.contains(&b"aa"[..]));
    }
}
