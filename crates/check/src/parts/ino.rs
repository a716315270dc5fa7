//! An inode with all that belongs to it, as it should be.

use braidfs_format::NodeId;
use braidfs_format::dentry::Dentry;
use braidfs_format::inode::{Extent, Inode};
use std::ops::Range;

/// What of an inode must be written again.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Dirty {
    /// The inode's own record.
    pub record: bool,
    /// Its links, in the record or in overflow nodes.
    pub links: bool,
    /// The extended attributes.
    pub xattrs: bool,
    /// Its extents, in the record or as a tree.
    pub extents: bool,
    /// The directory's entries.
    pub entries: bool,
}

impl Dirty {
    /// Whether anything must be.
    pub fn any(self) -> bool {
        self != Self::default()
    }
}

/// An inode with all that belongs to it.
#[derive(Debug)]
pub struct Ino {
    /// Generation of its number.
    pub generation: u32,
    /// Version of the newest record.
    pub version: u64,
    /// Flags of the node table entry.
    pub flags: u8,
    /// The record; `links` and `xattrs` are filled from the overflow nodes too, extents are in [`Self::extents`].
    pub inode: Inode,
    /// Nodes of the extent tree.
    pub tree: Vec<NodeId>,
    /// All extents of the file, or buckets of the directory, by logical block.
    pub extents: Vec<Extent>,
    /// All entries of a directory.
    pub entries: Vec<Dentry>,
    /// Per link: its entry was found.
    pub linked: Vec<bool>,
    /// The links were lost: entries that name the inode are believed.
    pub links_lost: bool,
    /// What differs from the device.
    pub dirty: Dirty,
}

impl Ino {
    /// An inode whose node table entry has `flags`, before anything is fetched from other nodes.
    pub fn new(generation: u32, version: u64, flags: u8, inode: Inode) -> Self {
        Self {
            generation,
            version,
            flags,
            inode,
            tree: Vec::new(),
            extents: Vec::new(),
            entries: Vec::new(),
            linked: Vec::new(),
            links_lost: false,
            dirty: Dirty::default(),
        }
    }

    /// Whether it is a directory.
    pub fn is_dir(&self) -> bool {
        self.inode.mode & 0o170_000 == 0o040_000
    }

    /// Blocks of all extents.
    pub fn extent_blocks(&self) -> u64 {
        self.extents.iter().map(|e| u64::from(e.len)).sum()
    }

    /// Takes the logical blocks of `holes` out of the extents. The holes rise and do not overlap.
    pub fn punch(&mut self, holes: impl IntoIterator<Item = Range<u64>>) {
        let mut holes = holes.into_iter().peekable();
        let mut out = Vec::with_capacity(self.extents.len());
        for e in self.extents.drain(..) {
            let mut from = e.lblk;
            while let Some(h) = holes.peek().filter(|h| h.start < e.end()) {
                if h.start > from {
                    out.push(e.part(from, h.start));
                }
                from = from.max(h.end.min(e.end()));
                // it may reach into the next one
                if h.end > e.end() {
                    break;
                }
                holes.next();
            }
            match from {
                _ if from == e.lblk => out.push(e),
                _ if from < e.end() => out.push(e.part(from, e.end())),
                _ => {}
            }
        }
        self.extents = out;
        self.dirty.extents = true;
    }

    /// All overflow nodes.
    pub fn overflow(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.tree.iter().chain(&self.inode.link_nodes).chain(&self.inode.xattr_nodes).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use braidfs_format::BlockAddr;
    use braidfs_format::inode::Timestamp;

    #[test]
    fn holes_are_made_in_one_go() {
        let mut random = fastrand::Rng::with_seed(5);
        for _ in 0..500 {
            let mut ino = Ino::new(1, 1, 0, Inode::empty_dir(0, Timestamp { sec: 0, nsec: 0 }));
            let mut lblk = 0;
            for _ in 0..random.u64(0..6) {
                lblk += random.u64(0..4);
                let addr = BlockAddr(1000 + random.u64(0..1000));
                let len = random.u32(1..6);
                ino.extents.push(Extent { lblk, addr, len, unwritten: false, sums: None });
                lblk += u64::from(len);
            }
            let mut holes: Vec<Range<u64>> = Vec::new();
            let mut at = 0;
            for _ in 0..random.u64(0..6) {
                let from = at + random.u64(0..4);
                at = from + random.u64(1..8);
                holes.push(from..at);
            }
            let blocks = |ino: &Ino| {
                let of = |e: &Extent| (0..u64::from(e.len)).map(|i| (e.lblk + i, e.addr.0 + i)).collect::<Vec<_>>();
                ino.extents.iter().flat_map(of).collect::<Vec<_>>()
            };
            let mut wanted = blocks(&ino);
            wanted.retain(|(lblk, _)| !holes.iter().any(|h| h.contains(lblk)));
            ino.punch(holes);
            assert_eq!(blocks(&ino), wanted);
        }
    }
}
