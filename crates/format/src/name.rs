//! File names in memory.

use std::borrow::Borrow;
use std::hash::{Hash, Hasher};
use std::ops::Deref;

/// Longest name that needs no memory of its own.
pub const SHORT_MAX: usize = 22;

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
        let mut bytes = [0; SHORT_MAX];
        bytes[..name.len()].copy_from_slice(name);
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
    fn compares_and_hashes_as_bytes() {
        let bytes: [&[u8]; 5] = [b"a", b"a\0", &[b'a'; 30], b"ab", b"b"];
        let names = bytes.map(FileName::from);
        assert!(names.windows(2).all(|w| w[0] < w[1]));
        let set: HashSet<FileName> = names.into();
        assert!(bytes.iter().all(|b| set.contains(*b)));
        assert!(!set.contains(&b"aa"[..]));
    }
}
