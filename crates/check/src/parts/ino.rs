//! An inode with all that belongs to it, as it should be.

use braidfs_format::NodeId;
use braidfs_format::dentry::Dentry;
use braidfs_format::inode::{Extent, Inode};

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

    /// Takes the logical blocks `from .. to` out of the extents.
    pub fn punch(&mut self, from: u64, to: u64) {
        let mut out = Vec::with_capacity(self.extents.len() + 1);
        for e in self.extents.drain(..) {
            if e.end() <= from || e.lblk >= to {
                out.push(e);
                continue;
            }
            if e.lblk < from {
                out.push(e.part(e.lblk, from));
            }
            if e.end() > to {
                out.push(e.part(to, e.end()));
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
