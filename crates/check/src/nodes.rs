//! Checks the nodes of one domain: node table entries, node blocks, inode records and their overflow nodes.
//!
//! Afterwards every used node table entry belongs to an inode of the model, as itself or as one of its overflow nodes.

use super::inodes::{Inodes, changed};
use super::model::{Dirty, Domain, Ino, Log};
use super::records::Records;
use super::{codes, records};
use crate::error::Result;
use braidfs_format::NodeId;
use braidfs_format::file_kind::FileKind;
use braidfs_format::inode::{
    Content, Extent, Inode, LeafRef, decode_extents, decode_links, decode_refs, decode_xattrs,
};
use braidfs_format::node::{DIR, NodeEntry, NodeKind, NodeRecord, OVERFLOW, USED};
use braidfs_format::super_block::{INCOMPAT_DATA_SUMS, SuperBlock};
use braidfs_store::Store;

/// An overflow node of a domain.
struct Overflow {
    node: NodeId,
    owner: NodeId,
    kind: NodeKind,
    /// Its owner has claimed it.
    taken: bool,
}

/// Where overflow nodes come from.
trait Source {
    /// The payload of `node`, which `owner` refers to as `kind`.
    fn take(&mut self, log: &mut Log, owner: NodeId, node: NodeId, kind: NodeKind) -> Option<Vec<u8>>;
}

/// For inodes that have no overflow nodes.
struct Nowhere;

impl Source for Nowhere {
    fn take(&mut self, log: &mut Log, owner: NodeId, node: NodeId, kind: NodeKind) -> Option<Vec<u8>> {
        log.add(codes::OVERFLOW_MISSING, Some(owner), format!("overflow {node} ({kind:?}) is missing"));
        None
    }
}

/// Overflow nodes of a domain, by number; each is given once.
struct Overflows<'a> {
    nodes: Vec<Overflow>,
    records: Records<'a>,
}

impl Source for Overflows<'_> {
    fn take(&mut self, log: &mut Log, owner: NodeId, node: NodeId, kind: NodeKind) -> Option<Vec<u8>> {
        let Ok(at) = self.nodes.binary_search_by_key(&node, |o| o.node) else {
            log.add(codes::OVERFLOW_MISSING, Some(owner), format!("overflow {node} ({kind:?}) is missing"));
            return None;
        };
        let o = &mut self.nodes[at];
        if o.taken {
            let other = o.owner;
            log.add(codes::OVERFLOW_SHARED, Some(owner), format!("overflow {node} is also used by {other}"));
            return None;
        }
        if (o.owner, o.kind) != (owner, kind) {
            let why = format!("overflow {node} is {:?} of {}, not {kind:?}", o.kind, o.owner);
            log.add(codes::OVERFLOW_MISSING, Some(owner), why);
            return None;
        }
        o.taken = true;
        match self.records.get(node) {
            Ok((_, r)) => Some(r.payload),
            Err(e) => {
                log.add(codes::OVERFLOW_MISSING, Some(owner), e.to_string());
                None
            }
        }
    }
}

impl Source for Records<'_> {
    fn take(&mut self, log: &mut Log, owner: NodeId, node: NodeId, kind: NodeKind) -> Option<Vec<u8>> {
        match self.get(node) {
            Ok((_, r)) if (r.owner, r.kind) == (owner, kind) => Some(r.payload),
            _ => {
                log.add(codes::OVERFLOW_MISSING, Some(owner), format!("overflow {node} ({kind:?}) is missing"));
                None
            }
        }
    }
}

/// Reads an inode of `domain` that holds once more, whole but for the entries of a directory.
///
/// # Errors
/// Where it no longer is what it was.
pub fn load(store: &Store, domain: &Domain, node: NodeId) -> Result<Ino> {
    let mut log = Log::of(domain.number);
    let mut records = Records::new(store, domain);
    let (entry, record) = records.get(node)?;
    let inode = Inode::decode(&record.payload)?;
    let mut ino = make_ino(&mut log, domain.number, node, entry, &record, inode);
    resolve(&mut log, node, &mut ino, &mut records);
    match log.findings.first() {
        Some(f) => Err(changed(node, &f.message).into()),
        None => Ok(ino),
    }
}

/// Whether parts of `inode` lie in nodes of their own.
fn overflows(inode: &Inode) -> bool {
    !inode.link_nodes.is_empty() || !inode.xattr_nodes.is_empty() || matches!(inode.content, Content::Tree { .. })
}

/// Reads all nodes of `domain`. Inodes are checked as they come, those with overflow nodes at last; the findings are in the
/// order of the numbers all the same.
pub fn read(store: &Store, sb: &SuperBlock, log: &mut Log, domain: &mut Domain, mut inodes: Inodes) -> Inodes {
    let sums = sb.incompat.get() & INCOMPAT_DATA_SUMS != 0;
    let mut nodes: Vec<Overflow> = Vec::new();
    let mut last: Vec<NodeId> = Vec::new();
    let mut later = Log::of(domain.number);
    for group in domain.groups.values() {
        inodes.reserve(group.number, group.entries.used().count());
    }
    records::each(store, log, domain, &mut |log, domain, node, entry, record| {
        if record.kind != NodeKind::Inode {
            nodes.push(Overflow { node, owner: record.owner, kind: record.kind, taken: false });
            return;
        }
        match Inode::decode(&record.payload) {
            Ok(i) if FileKind::from_mode(i.mode).is_some() => {
                let apart = overflows(&i);
                let ino = make_ino(log, domain.number, node, entry, &record, i);
                if apart {
                    last.push(node);
                } else {
                    let ino = check(store, &mut later, domain, node, ino, &mut Nowhere, sums);
                    inodes.add(node, ino);
                }
                return;
            }
            Ok(i) => log.add(codes::INODE, Some(node), format!("mode {:o} is no file type", i.mode)),
            Err(e) => log.add(codes::INODE, Some(node), e.to_string()),
        }
        domain.free_node(store, node);
    });
    nodes.sort_unstable_by_key(|o| o.node);
    last.sort_unstable();
    let mut from = Overflows { nodes, records: Records::new(store, domain) };
    let mut records = Records::new(store, domain);
    for node in last {
        let mut again = || -> Result<Ino> {
            let (entry, record) = records.get(node)?;
            let inode = Inode::decode(&record.payload)?;
            // what this finds was found before
            Ok(make_ino(&mut Log::default(), domain.number, node, entry, &record, inode))
        };
        match again() {
            Ok(ino) => {
                let ino = check(store, &mut later, domain, node, ino, &mut from, sums);
                inodes.add(node, ino);
            }
            Err(e) => inodes.fail(e),
        }
    }
    later.findings.sort_by_key(|f| f.node);
    log.findings.append(&mut later.findings);
    let Overflows { nodes, .. } = from;
    for o in nodes.into_iter().filter(|o| !o.taken) {
        let why = format!("overflow node ({:?}) of {} is not used", o.kind, o.owner);
        log.add(codes::OVERFLOW_UNUSED, Some(o.node), why);
        domain.free_node(store, o.node);
    }
    inodes.sort();
    inodes
}

/// Checks an inode by itself, with its overflow nodes.
fn check(
    store: &Store,
    log: &mut Log,
    domain: &Domain,
    node: NodeId,
    mut ino: Ino,
    from: &mut dyn Source,
    sums: bool,
) -> Ino {
    resolve(log, node, &mut ino, from);
    check_extents(store, log, domain, node, &mut ino, sums);
    check_content(log, node, &mut ino);
    ino
}

fn make_ino(log: &mut Log, domain: u16, node: NodeId, entry: NodeEntry, record: &NodeRecord, inode: Inode) -> Ino {
    let mut ino = Ino {
        domain,
        gener: record.gener,
        version: record.version,
        flags: entry.flags,
        inode,
        tree: Vec::new(),
        extents: Vec::new(),
        entries: Vec::new(),
        linked: Vec::new(),
        links_lost: false,
        dirty: Dirty::default(),
    };
    let right = (entry.flags & !(DIR | OVERFLOW)) | if ino.is_dir() { DIR } else { 0 } | USED;
    if right != entry.flags || record.flags & (DIR | OVERFLOW) != right & (DIR | OVERFLOW) {
        let why = format!("flags {:#x} in the node table, {:#x} in the record", entry.flags, record.flags);
        log.add(codes::ENTRY_FLAGS, Some(node), why);
        ino.flags = right;
        ino.dirty.record = true;
    }
    ino
}

/// Fetches links, extended attributes and extents from the overflow nodes.
fn resolve(log: &mut Log, node: NodeId, ino: &mut Ino, from: &mut dyn Source) {
    let mut gather = |log: &mut Log, nodes: &mut Vec<NodeId>, kind| {
        let mut bytes = Vec::new();
        let mut whole = true;
        nodes.retain(|n| match from.take(log, node, *n, kind) {
            Some(p) => {
                bytes.extend_from_slice(&p);
                true
            }
            None => {
                whole = false;
                false
            }
        });
        whole.then_some(bytes)
    };
    if !ino.inode.link_nodes.is_empty() {
        let bytes = gather(log, &mut ino.inode.link_nodes, NodeKind::Links);
        match bytes.map(|b| decode_links(&b)) {
            Some(Ok(links)) => ino.inode.links = links,
            lost => {
                if let Some(Err(e)) = lost {
                    log.add(codes::LINKS_CONTENT, Some(node), e.to_string());
                }
                (ino.links_lost, ino.dirty.links) = (true, true);
            }
        }
    }
    if !ino.inode.xattr_nodes.is_empty() {
        let bytes = gather(log, &mut ino.inode.xattr_nodes, NodeKind::Xattrs);
        match bytes.map(|b| decode_xattrs(&b)) {
            Some(Ok(xattrs)) => ino.inode.xattrs = xattrs,
            lost => {
                if let Some(Err(e)) = lost {
                    log.add(codes::XATTRS_CONTENT, Some(node), e.to_string());
                }
                ino.dirty.xattrs = true;
            }
        }
    }
    match &mut ino.inode.content {
        Content::Extents(e) => ino.extents = std::mem::take(e),
        Content::Tree { depth, refs } => {
            let (depth, refs) = (*depth, refs.clone());
            let mut walk = Walk { log, node, ino, from };
            let leaves = if depth == 2 { walk.index(&refs) } else { ranges(&refs, u64::MAX) };
            walk.leaves(&leaves);
        }
        _ => {}
    }
    ino.linked = vec![false; ino.inode.links.len()];
}

/// (first, one past the last logical block, node) of references.
fn ranges(refs: &[LeafRef], end: u64) -> Vec<(u64, u64, NodeId)> {
    let ends = refs.iter().skip(1).map(|r| r.first).chain([end]);
    refs.iter().zip(ends).map(|(r, e)| (r.first, e, r.node)).collect()
}

/// Walk through an extent tree.
struct Walk<'a> {
    log: &'a mut Log,
    node: NodeId,
    ino: &'a mut Ino,
    from: &'a mut dyn Source,
}

impl Walk<'_> {
    fn index(&mut self, refs: &[LeafRef]) -> Vec<(u64, u64, NodeId)> {
        let mut out = Vec::new();
        for (first, end, n) in ranges(refs, u64::MAX) {
            let Some(payload) = self.from.take(self.log, self.node, n, NodeKind::ExtentIndex) else {
                self.ino.dirty.extents = true;
                continue;
            };
            self.ino.tree.push(n);
            match decode_refs(&payload) {
                Ok(refs) if refs.iter().all(|r| r.first >= first && r.first < end) => out.extend(ranges(&refs, end)),
                Ok(_) => self.bad(format!("extent index {n} leaves its range")),
                Err(e) => self.bad(format!("extent index {n}: {e}")),
            }
        }
        out
    }

    fn leaves(&mut self, leaves: &[(u64, u64, NodeId)]) {
        for &(first, end, n) in leaves {
            let Some(payload) = self.from.take(self.log, self.node, n, NodeKind::ExtentLeaf) else {
                self.ino.dirty.extents = true;
                continue;
            };
            self.ino.tree.push(n);
            match decode_extents(&payload) {
                Ok(extents) if extents.iter().all(|e| e.lblk >= first && e.end() <= end) => {
                    self.ino.extents.extend(extents);
                }
                Ok(_) => self.bad(format!("extent leaf {n} leaves its range")),
                Err(e) => self.bad(format!("extent leaf {n}: {e}")),
            }
        }
    }

    fn bad(&mut self, why: String) {
        self.log.add(codes::EXTENT_ORDER, Some(self.node), why);
        self.ino.dirty.extents = true;
    }
}

/// Extents must rise, lie in data blocks of the domain, and have checksums only where the volume has.
fn check_extents(store: &Store, log: &mut Log, domain: &Domain, node: NodeId, ino: &mut Ino, sums: bool) {
    let mut end = 0;
    let mut dirty = ino.dirty.extents;
    let mut keep = |e: &mut Extent| {
        let why = if e.lblk < end {
            (codes::EXTENT_ORDER, "overlaps the one before")
        } else if !domain.holds(store, e.addr, u64::from(e.len)) {
            (codes::EXTENT_PLACE, "lies outside the data blocks of its domain")
        } else if e.sums.is_some() && !sums || e.sums.as_ref().is_some_and(|s| s.len() != e.len as usize) {
            e.sums = None;
            dirty = true;
            log.add(codes::EXTENT_SUMS, Some(node), format!("extent at {} has checksums it must not have", e.lblk));
            end = e.end();
            return true;
        } else {
            end = e.end();
            return true;
        };
        log.add(why.0, Some(node), format!("extent of {} blocks at {} ({}) {}", e.len, e.lblk, e.addr, why.1));
        dirty = true;
        false
    };
    let mut extents = std::mem::take(&mut ino.extents);
    extents.retain_mut(&mut keep);
    ino.extents = extents;
    ino.dirty.extents = dirty;
}

/// Kind of content and size must fit the type.
fn check_content(log: &mut Log, node: NodeId, ino: &mut Ino) {
    let kind = FileKind::from_mode(ino.inode.mode);
    let mut wrong = |why: String| log.add(codes::CONTENT, Some(node), why);
    let mapped = matches!(ino.inode.content, Content::Extents(_) | Content::Tree { .. });
    match kind {
        Some(FileKind::File | FileKind::Symlink) => match &ino.inode.content {
            Content::Inline(b) if b.len() as u64 != ino.inode.size => {
                wrong(format!("{} inline bytes, size {}", b.len(), ino.inode.size));
                ino.inode.size = b.len() as u64;
                ino.dirty.record = true;
            }
            Content::InlineDir(_) => {
                wrong("a file with directory entries".into());
                ino.inode.content = Content::None;
                ino.inode.size = 0;
                ino.dirty.record = true;
            }
            _ => {}
        },
        Some(FileKind::Dir) => {
            if let Content::Inline(_) = ino.inode.content {
                wrong("a directory with file content".into());
                ino.inode.content = Content::None;
                ino.dirty.entries = true;
            }
        }
        _ => {
            if mapped || !matches!(ino.inode.content, Content::None) {
                wrong("a special file with content".into());
                ino.inode.content = Content::None;
                ino.extents.clear();
                ino.dirty.extents = true;
            }
        }
    }
    let blocks = ino.extent_blocks();
    if ino.inode.blocks != blocks {
        let why = format!("counts {} blocks, has {blocks}", ino.inode.blocks);
        log.add(codes::BLOCK_COUNT, Some(node), why);
        ino.inode.blocks = blocks;
        ino.dirty.record = true;
    }
}
