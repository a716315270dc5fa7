//! Writes inodes of a model to their domain: records, overflow nodes, directory buckets, each to a free block.
//!
//! Nothing that the device refers to is overwritten, as long as there are other blocks: so a repair that is interrupted
//! before it writes the tables has changed nothing. Where there are none, blocks are taken that the tables still have
//! and nothing in the model does. What goes there is held until all that is to be written has found its place, and the
//! headers say that a repair goes on: so one that finds too little room has changed nothing either.

use crate::error::{Error, Result};
use crate::model::Model;
use crate::parts::domain::Domain;
use crate::parts::ino::{Dirty, Ino};
use crate::scan::names::take_node;
use crate::scan::space::{Expected, Used, expected};
use braidfs_format::dentry::{
    BUCKET_BYTES, Dentry, HASH_PROBES, INLINE_DIR_MAX, bucket_lblk, encode_bucket, encode_entries, name_hash,
};
use braidfs_format::geometry::SEGMENT_BLOCKS;
use braidfs_format::inode::{
    Content, Extent, LEAF_REFS_MAX, LeafRef, encode_extents, encode_links, encode_refs, encode_xattrs,
};
use braidfs_format::node::{NodeBlockBuilder, NodeEntry, NodeKind, NodeRecord, OVERFLOW, PAYLOAD_MAX, USED};
use braidfs_format::{BlockAddr, InodeNo, NodeId};
use braidfs_store::Store;
use std::collections::{BTreeMap, HashSet};

/// Finds free blocks of a domain.
struct Free {
    /// Groups not looked at yet, last first; with `true` blocks that the device still marks valid are left alone, and segments
    /// that the journal is in, which the cleaner leaves alone.
    groups: Vec<(u32, bool)>,
    blocks: Vec<BlockAddr>,
    /// The device may refer to these.
    in_use: bool,
}

impl Free {
    fn new(domain: &Domain) -> Self {
        let numbers = || domain.groups.keys().rev().copied();
        let groups = numbers().map(|g| (g, false)).chain(numbers().map(|g| (g, true))).collect();
        Self { groups, blocks: Vec::new(), in_use: false }
    }
}

/// Blocks that the device may refer to as something else, and what is to be written there.
pub type Held = Vec<(BlockAddr, Vec<u8>)>;

/// Writes nodes and buckets of one domain.
struct Writer<'a> {
    store: &'a Store,
    domain: &'a mut Domain,
    /// State of the groups before anything was written.
    before: BTreeMap<u32, Expected>,
    free: Free,
    given: HashSet<BlockAddr>,
    held: &'a mut Held,
    builder: NodeBlockBuilder,
    /// Nodes in the builder.
    pending: Vec<(NodeId, NodeEntry)>,
    seq: u64,
}

/// Writes all inodes of `m` that differ from the device, and sets their node table entries in the model; but for what
/// goes to blocks that the device may refer to: that is to be written once the headers say that a repair goes on.
///
/// # Errors
/// Of the device, or [`Error::NoSpace`].
pub fn write_inodes(m: &mut Model) -> Result<Held> {
    let mut held = Held::new();
    let store = std::sync::Arc::clone(&m.store);
    for domain in &mut m.domains {
        let differ: Vec<InodeNo> = m.inodes.wholes_of(domain).filter(|(_, i)| i.dirty.any()).map(|(n, _)| n).collect();
        if differ.is_empty() {
            continue;
        }
        let used = Used::of(domain, &m.inodes);
        let before = domain.groups.iter().map(|(n, g)| {
            let e = expected(&store, domain, g, &used.group(&store, *n));
            // of the owners there is one per block, and they are not asked for
            (*n, Expected { owners: Vec::new(), ..e })
        });
        let before = before.collect::<BTreeMap<_, _>>();
        let free = Free::new(domain);
        let seq = domain.header.map_or(1, |h| h.last_tx.get().max(1));
        let mut w = Writer {
            store: &store,
            before,
            free,
            given: Default::default(),
            held: &mut held,
            builder: NodeBlockBuilder::default(),
            pending: Vec::new(),
            seq,
            domain,
        };
        for node in differ {
            if let Some(ino) = m.inodes.whole_mut(node) {
                w.inode(&m.sb.hash_key, node, ino)?;
            }
        }
        w.finish_block()?;
    }
    Ok(held)
}

impl Writer<'_> {
    /// A block that nothing refers to.
    fn block(&mut self) -> Result<BlockAddr> {
        loop {
            while let Some(b) = self.free.blocks.pop() {
                if self.given.insert(b) {
                    return Ok(b);
                }
            }
            let (number, careful) = self.free.groups.pop().ok_or(Error::NoSpace)?;
            let (Some(group), Some(e)) = (self.domain.groups.get(&number), self.before.get(&number)) else { continue };
            let start = self.store.geometry().group_start(number).0;
            for at in (0..group.blocks).rev() {
                let (s, i) = ((at / SEGMENT_BLOCKS) as usize, at % SEGMENT_BLOCKS);
                let used = e.valid[s][(i / 64) as usize] >> (i % 64) & 1 == 1;
                // what is not known may be in use
                let known = group.segments.as_ref().filter(|_| !group.segments_doubtful);
                let on_device = known.is_none_or(|t| t[s].is_valid(i));
                if !used && !(careful && (on_device || e.journal[s])) {
                    self.free.blocks.push(BlockAddr(start + u64::from(at)));
                }
            }
            self.free.in_use = !careful;
        }
    }

    /// Writes the block that [`Self::block`] gave last.
    fn write(&mut self, addr: BlockAddr, block: Vec<u8>) -> Result<()> {
        if self.free.in_use {
            self.held.push((addr, block));
            return Ok(());
        }
        Ok(self.store.write(addr, &block)?)
    }

    /// Adds a record; its table entry is set when its block is written.
    fn record(&mut self, r: &NodeRecord) -> Result<()> {
        let bytes = r.encode();
        let index = match self.builder.push(&bytes) {
            Some(i) => i,
            None => {
                self.finish_block()?;
                self.builder.push(&bytes).ok_or(Error::TooBig)?
            }
        };
        let (addr, written) = (BlockAddr(0), self.seq as u32);
        self.pending.push((r.node, NodeEntry { addr, index, flags: r.flags, generation: r.generation, written }));
        Ok(())
    }

    fn finish_block(&mut self) -> Result<()> {
        if self.builder.is_empty() {
            return Ok(());
        }
        let addr = self.block()?;
        let block = self.builder.finish(self.domain.number, self.store.volume, addr, self.seq);
        self.write(addr, block)?;
        for (node, entry) in std::mem::take(&mut self.pending) {
            self.domain.set_entry(self.store, node, NodeEntry { addr, ..entry });
        }
        Ok(())
    }

    /// Writes an overflow node of `base` (the inode's record).
    fn overflow(&mut self, base: &NodeRecord, kind: NodeKind, payload: Vec<u8>) -> Result<NodeId> {
        let (node, generation) = match take_node(self.store, self.domain) {
            Some(taken) => taken,
            None => {
                // Where all numbers are in use, better a repair that must not be cut off than none.
                let replaced = std::mem::take(&mut self.domain.replaced);
                replaced.into_iter().for_each(|n| self.domain.free_node(self.store, n));
                take_node(self.store, self.domain).ok_or(Error::NoSpace)?
            }
        };
        self.domain.fresh.push(node);
        self.record(&NodeRecord { node, generation, kind, flags: USED | OVERFLOW, payload, ..base.clone() })?;
        Ok(node)
    }

    fn inode(&mut self, key: &[u8; 16], node: InodeNo, ino: &mut Ino) -> Result<()> {
        if ino.dirty.entries {
            self.directory(key, node, ino)?;
        }
        if ino.dirty.extents || ino.dirty.entries {
            self.domain.replaced.append(&mut ino.tree);
            ino.inode.content = match std::mem::replace(&mut ino.inode.content, Content::None) {
                _ if !ino.extents.is_empty() => Content::Extents(Vec::new()),
                c @ (Content::Inline(_) | Content::InlineDir(_)) => c,
                _ => Content::None,
            };
            ino.inode.blocks = ino.extent_blocks();
        }
        if ino.dirty.links {
            self.domain.replaced.append(&mut ino.inode.link_nodes);
        }
        if ino.dirty.xattrs {
            self.domain.replaced.append(&mut ino.inode.xattr_nodes);
        }
        if !self.domain.undecided.contains(&node.node()) {
            ino.version += 1;
        }
        let base = NodeRecord {
            node: node.node(),
            generation: ino.generation,
            kind: NodeKind::Inode,
            flags: ino.flags,
            owner: node,
            version: ino.version,
            payload: Vec::new(),
        };
        let payload = self.fit(&base, ino)?;
        self.record(&NodeRecord { payload, ..base })?;
        ino.dirty = Dirty::default();
        Ok(())
    }

    /// The payload of the inode's record, with what does not fit moved to overflow nodes.
    fn fit(&mut self, base: &NodeRecord, ino: &mut Ino) -> Result<Vec<u8>> {
        loop {
            let in_record = matches!(ino.inode.content, Content::Extents(_));
            let extents = if in_record { encode_extents(&ino.extents).len() } else { 0 };
            // A section has a length of 16 bits: what is too long must not be encoded into the record at all.
            let links = if ino.inode.link_nodes.is_empty() { encode_links(&ino.inode.links).len() } else { 0 };
            let xattrs = if ino.inode.xattr_nodes.is_empty() { encode_xattrs(&ino.inode.xattrs).len() } else { 0 };
            if extents.max(links).max(xattrs) < PAYLOAD_MAX {
                if in_record {
                    ino.inode.content = Content::Extents(std::mem::take(&mut ino.extents));
                }
                let payload = ino.inode.encode();
                if let Content::Extents(e) = &mut ino.inode.content {
                    ino.extents = std::mem::take(e);
                }
                if payload.len() <= PAYLOAD_MAX {
                    return Ok(payload);
                }
            }
            if extents >= links.max(xattrs) && extents > 0 {
                ino.inode.content = self.tree(base, &ino.extents, &mut ino.tree)?;
            } else if xattrs >= links && xattrs > 0 {
                for part in encode_xattrs(&ino.inode.xattrs).chunks(PAYLOAD_MAX) {
                    ino.inode.xattr_nodes.push(self.overflow(base, NodeKind::Xattrs, part.to_vec())?);
                }
            } else if links > 0 {
                for part in encode_links(&ino.inode.links).chunks(PAYLOAD_MAX) {
                    ino.inode.link_nodes.push(self.overflow(base, NodeKind::Links, part.to_vec())?);
                }
            } else {
                return Err(Error::TooBig);
            }
        }
    }

    /// Writes an extent tree; the references to it.
    fn tree(&mut self, base: &NodeRecord, extents: &[Extent], nodes: &mut Vec<NodeId>) -> Result<Content> {
        let mut refs: Vec<LeafRef> = Vec::new();
        let mut leaf: Vec<u8> = Vec::new();
        let mut first = 0;
        for e in extents {
            if leaf.len() + e.encoded_bytes() > PAYLOAD_MAX {
                let node = self.overflow(base, NodeKind::ExtentLeaf, std::mem::take(&mut leaf))?;
                refs.push(LeafRef { first, node });
                first = e.lblk;
            }
            e.encode(&mut leaf);
        }
        let node = self.overflow(base, NodeKind::ExtentLeaf, leaf)?;
        refs.push(LeafRef { first, node });
        nodes.extend(refs.iter().map(|r| r.node));
        if refs.len() <= LEAF_REFS_MAX {
            return Ok(Content::Tree { depth: 1, refs });
        }
        let mut top = Vec::new();
        for part in refs.chunks(LEAF_REFS_MAX) {
            let node = self.overflow(base, NodeKind::ExtentIndex, encode_refs(part))?;
            nodes.push(node);
            top.push(LeafRef { first: part[0].first, node });
        }
        if top.len() > LEAF_REFS_MAX {
            return Err(Error::TooBig);
        }
        Ok(Content::Tree { depth: 2, refs: top })
    }

    /// Writes the entries of a directory into its record or to new buckets.
    fn directory(&mut self, key: &[u8; 16], node: InodeNo, ino: &mut Ino) -> Result<()> {
        let (entries, failed) = arrange(key, std::mem::take(&mut ino.entries));
        for e in failed {
            tracing::warn!(dir = node.0, name = %String::from_utf8_lossy(&e.name), "no free position in the directory");
        }
        ino.extents.clear();
        let bytes: usize = entries.iter().map(Dentry::encoded_bytes).sum();
        if bytes <= INLINE_DIR_MAX {
            ino.inode.content = Content::InlineDir(encode_entries(&entries));
        } else {
            for (lblk, part) in buckets(&entries) {
                let addr = self.block()?;
                let first = lblk << 15;
                let b = encode_bucket(part, node, first, self.domain.number, self.store.volume, addr, self.seq);
                self.write(addr, b)?;
                ino.extents.push(Extent { lblk, addr, len: 1, unwritten: false, sums: None });
            }
        }
        ino.entries = entries;
        Ok(())
    }
}

/// Cuts sorted entries into buckets, three quarters full: logical block and entries.
fn buckets(entries: &[Dentry]) -> Vec<(u64, &[Dentry])> {
    let mut out = Vec::new();
    let (mut start, mut bytes, mut lblk) = (0, 0, 0);
    for (i, e) in entries.iter().enumerate() {
        // A cut is possible only between two hashes that differ in their logical block.
        let here = bucket_lblk(e.hash);
        let can_cut = i > start && here > bucket_lblk(entries[i - 1].hash) && here > lblk;
        if can_cut && bytes + e.encoded_bytes() > BUCKET_BYTES * 3 / 4 {
            out.push((lblk, &entries[start..i]));
            (start, bytes, lblk) = (i, 0, here);
        }
        bytes += e.encoded_bytes();
    }
    out.push((lblk, &entries[start..]));
    out
}

/// Gives all entries their positions again, in order. Entries that find no free one are returned.
fn arrange(key: &[u8; 16], entries: Vec<Dentry>) -> (Vec<Dentry>, Vec<Dentry>) {
    let mut taken: HashSet<u64> = HashSet::with_capacity(entries.len());
    let (mut placed, mut failed) = (Vec::with_capacity(entries.len()), Vec::new());
    let mut moved = Vec::new();
    // Those that stand right keep their position, which is a cookie that programs may hold.
    for e in entries {
        let h = name_hash(key, &e.name);
        if (h..=h + HASH_PROBES).contains(&e.hash) && taken.insert(e.hash) {
            placed.push(e);
        } else {
            moved.push(e);
        }
    }
    for mut e in moved {
        let h = name_hash(key, &e.name);
        match (h..=h + HASH_PROBES).find(|p| taken.insert(*p)) {
            Some(p) => {
                e.hash = p;
                placed.push(e);
            }
            None => failed.push(e),
        }
    }
    placed.sort_by_key(|e| e.hash);
    (placed, failed)
}
