//! Node ids: what the kernel calls an inode in requests and notifications.
//!
//! When an inode is deleted, its number goes to another one with a higher generation. While the kernel knows an inode that
//! does not happen ([`crate::lookups`]), but an NFS client keeps handles for ever, and the kernel may send the times that
//! it kept when it has thrown the inode out of its cache. So the id itself tells the generations apart:
//!
//! | bits | hold |
//! |---|---|
//! | 0 to 39 | inode number ([`check`] refuses volumes that have larger ones) |
//! | 40 to 63 | low bits of the generation |
//!
//! The root is 1, as the protocol wants it. `st_ino` and `d_ino` are the bare number.
//!
//! A request is answered ESTALE when the inode that its id was given for is gone. How that is found out:
//! [`BraidFs::opened`] of a file whose content is asked for, which keeps the inode alive; [`BraidFs::attr`] where attributes are all that
//! is wanted; [`BraidFs::hold`] where the inode must not go meanwhile: to open it, and for SETATTR, which the kernel
//! also sends on its own, at any time (but where it is a change in memory alone, which looks for itself); [`BraidFs::live`] for the rest: there the kernel knows the inode, which keeps it.
//!
//! Does not promise: to tell an id from one of the same number 2^24 generations later.

use crate::fs::{BraidFs, errno};
use braidfs::format::geometry::Geometry;
use braidfs::{Attr, Error, InodeNo, OpenFile};
use rustix::io::Errno;
use std::fmt;

/// Bits of the inode number.
const INO_BITS: u32 = 40;
/// Inode numbers that fit.
pub(crate) const INODES_MAX: u64 = 1 << INO_BITS;

/// A node id, as it stands in requests, answers and notifications. Any value may come in; [`BraidFs`] has the checks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WireId(pub u64);

impl WireId {
    /// The kernel's number of the root, FUSE_ROOT_ID.
    pub const ROOT: Self = Self(1);

    /// The id of an inode.
    pub fn new(ino: InodeNo, generation: u32) -> Self {
        debug_assert!(ino.0 < INODES_MAX, "{ino} does not fit a node id");
        if ino == InodeNo::ROOT { Self::ROOT } else { Self(ino.0 | u64::from(generation) << INO_BITS) }
    }

    /// The id of the inode that has these attributes.
    pub fn of(attr: &Attr) -> Self {
        Self::new(attr.ino, attr.generation)
    }

    /// The inode's number; an inode of that number need not be the one that is meant.
    pub fn ino(self) -> InodeNo {
        InodeNo(self.0 % INODES_MAX)
    }

    /// Whether the inode of that number is meant, which has this generation.
    pub fn is_of(self, generation: u32) -> bool {
        self == Self::new(self.ino(), generation)
    }
}

impl fmt::Display for WireId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} generation {}", self.ino(), self.0 >> INO_BITS)
    }
}

/// Whether all inode numbers of the volume fit; else how many there may be.
pub(crate) fn check(g: &Geometry) -> Result<(), u64> {
    let inodes = u64::from(g.groups) * u64::from(g.nodes());
    if inodes <= INODES_MAX { Ok(()) } else { Err(inodes) }
}

impl BraidFs {
    /// The inode of a request without a handle.
    pub(crate) fn live(&self, id: WireId) -> Result<InodeNo, Errno> {
        if id == WireId::ROOT {
            return Ok(InodeNo::ROOT);
        }
        let generation = self.vol.generation(id.ino()).map_err(gone)?;
        if id.is_of(generation) { Ok(id.ino()) } else { Err(Errno::STALE) }
    }

    /// The attributes of the inode.
    pub(crate) fn attr(&self, id: WireId) -> Result<Attr, Errno> {
        let attr = self.vol.getattr(id.ino()).map_err(gone)?;
        if id.is_of(attr.generation) { Ok(attr) } else { Err(Errno::STALE) }
    }

    /// Opens the inode, so that it, and its number, stay until that is dropped.
    pub(crate) fn hold(&self, id: WireId) -> Result<OpenFile, Errno> {
        // In this order: of an inode that is open the number is not given again.
        let file = self.vol.open(id.ino()).map_err(gone)?;
        if id.is_of(file.generation()) { Ok(file) } else { Err(Errno::STALE) }
    }
}

/// What is told of an inode that cannot be had.
fn gone(e: Error) -> Errno {
    match e {
        Error::NotFound => Errno::STALE,
        e => errno(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_carry_number_and_generation() {
        let last = InodeNo(INODES_MAX - 1);
        for ino in [InodeNo(2), InodeNo(77), last] {
            for generation in [1, 2, 0xff_ffff] {
                let id = WireId::new(ino, generation);
                assert_eq!((id.ino(), id.0 >> 40), (ino, u64::from(generation)));
                assert!(id.is_of(generation) && !id.is_of(generation + 1) && !id.is_of(generation - 1));
            }
        }
        // only the low bits of a generation fit
        assert_eq!(WireId::new(last, 0x0300_0001), WireId::new(last, 1));
        assert_eq!(WireId::new(InodeNo(5), 0x0100_0000), WireId(5));
        assert_ne!(WireId::new(InodeNo(5), 1), WireId::new(InodeNo(5), 2));
        assert_eq!(WireId::new(InodeNo(5), 3).to_string(), format!("{} generation 3", InodeNo(5)));
    }

    #[test]
    fn the_root_has_one_id() {
        for generation in [0, 1, 9] {
            assert_eq!(WireId::new(InodeNo::ROOT, generation), WireId(1));
            assert!(WireId::ROOT.is_of(generation));
            assert!(!WireId(1 | 1 << INO_BITS).is_of(generation), "another id of the root");
        }
    }

    #[test]
    fn numbers_of_large_volumes_fit() {
        let groups = |bytes: u64, segments: u32| (bytes / (u64::from(segments) << 21)) as u32;
        for segments in [2, 4, 8, 16, 32] {
            let g = |bytes| Geometry::new(segments * 512, groups(bytes, segments)).unwrap();
            let of_16_tib = g(16 << 40);
            assert!(check(&of_16_tib).is_ok());
            assert!(of_16_tib.node(of_16_tib.groups - 1, of_16_tib.nodes() - 1).0 < 1 << 34);
            assert!(check(&g(2 << 50)).is_ok());
            assert!(check(&g(3 << 50)).is_err());
        }
    }
}
