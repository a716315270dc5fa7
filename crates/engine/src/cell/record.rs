//! A cell's state as node records and back: which part goes into the inode record and which into overflow nodes.

use super::dir::DirIndex;
use super::extents::ExtentMap;
use super::{Body, Cell, DirBody, FileBody, State};
use crate::braid::durability::Durability;
use crate::error::{Error, Result};
use crate::lazy::Lazy;
use crate::types::*;
use braidfs_format::Corrupt;
use braidfs_format::dentry::decode_entries;
use braidfs_format::inode::{
    Content, Extent, FIXED_BYTES, Inode, LEAF_REFS_MAX, LeafRef, NAME_MAX, TARGET_MAX, decode_extents, decode_links,
    decode_refs, decode_xattrs, encode_links, encode_xattrs,
};
use braidfs_format::node::{DIR, NodeKind, NodeRecord, OVERFLOW, PAYLOAD_MAX, REMOTE, USED};
use std::collections::HashSet;

/// Most bytes of encoded links: their overflow nodes must be nameable in the inode record.
pub const LINK_BYTES_MAX: usize = 440_000;
/// Most links of one inode that is no directory.
pub const LINKS_MAX: usize = 65_000;
/// Most links of a directory, two of which are its own: so many subdirectories but two, as XFS has it.
pub const DIR_LINKS_MAX: u32 = 1 << 31;
/// Bytes of an encoded link without its name.
const LINK_FIXED_BYTES: usize = 9;
/// Most bytes of extended attributes of one inode.
pub const XATTR_BYTES_MAX: usize = 64 * 1024;
/// Bytes that a record keeps free of content when links or xattrs are in overflow nodes.
const SECTION_HEADER: usize = 3;

/// What one serialisation writes.
#[derive(Debug, Default)]
pub struct Records {
    /// Nodes to write, the inode's own last.
    pub write: Vec<NodeRecord>,
    /// Nodes that are no longer used.
    pub free: Vec<NodeId>,
}

impl State {
    /// Whether the inode's record can name one link more, in the place of `instead` where that is another name of the inode.
    ///
    /// # Errors
    /// [`Error::TooManyLinks`].
    pub fn check_gains(&self, name: &[u8], instead: Option<&[u8]>) -> Result<()> {
        let bytes_of = |name: &[u8]| LINK_FIXED_BYTES + name.len();
        // with few links, and where they do not take more room, nobody counts
        if instead.is_some_and(|old| name.len() <= old.len())
            || (self.links.len() + 1) * (LINK_FIXED_BYTES + NAME_MAX) <= LINK_BYTES_MAX
        {
            return Ok(());
        }
        let all: usize = self.links.iter().map(|l| bytes_of(&l.name)).sum();
        let bytes = (all + bytes_of(name)).saturating_sub(instead.map_or(0, bytes_of));
        let links = self.links.len() + usize::from(instead.is_none());
        if links > LINKS_MAX || bytes > LINK_BYTES_MAX { Err(Error::TooManyLinks) } else { Ok(()) }
    }
}

/// How the sections of an inode share its record.
struct Split {
    spill_links: bool,
    spill_xattrs: bool,
    content: usize,
}

fn split(st: &State, content_min: usize) -> Split {
    let links = encode_links(&st.links).len();
    let xattrs = if st.xattrs.is_empty() { 0 } else { encode_xattrs(&st.xattrs).len() };
    let tomb: usize = st.durability.tombstones().iter().map(|t| 20 + 9 + t.link.name.len()).sum();
    let fixed = FIXED_BYTES + 6 * SECTION_HEADER + tomb + 20;
    let room = PAYLOAD_MAX.saturating_sub(fixed);
    let refs = |bytes: usize| bytes.div_ceil(PAYLOAD_MAX) * 8;
    let (mut l, mut x) = (links, xattrs);
    let (mut spill_links, mut spill_xattrs) = (false, false);
    if l + x + content_min > room && xattrs > 0 {
        spill_xattrs = true;
        x = refs(xattrs);
    }
    if l + x + content_min > room {
        spill_links = true;
        l = refs(links);
    }
    Split { spill_links, spill_xattrs, content: room.saturating_sub(l + x) }
}

/// Bytes that `st` leaves for inline content in its record, links and xattrs spilled if need be.
pub fn inline_room(st: &State) -> usize {
    split(st, PAYLOAD_MAX).content
}

/// Cuts an encoded section into overflow nodes, using those in `have` first.
fn spill(
    bytes: &[u8],
    have: &mut Vec<NodeId>,
    kind: NodeKind,
    out: &mut Records,
    base: &NodeRecord,
    alloc: &mut dyn FnMut() -> Result<NodeId>,
) -> Result<()> {
    let parts: Vec<&[u8]> = bytes.chunks(PAYLOAD_MAX).collect();
    while have.len() < parts.len() {
        have.push(alloc()?);
    }
    out.free.extend(have.drain(parts.len()..));
    for (node, part) in have.iter().zip(parts) {
        out.write.push(NodeRecord {
            node: *node,
            kind,
            flags: USED | OVERFLOW,
            payload: part.to_vec(),
            ..base.clone()
        });
    }
    Ok(())
}

impl State {
    /// As a record tells it, but for content and overflow nodes.
    pub fn to_inode(&self) -> Inode {
        Inode {
            mode: self.mode,
            uid: self.uid,
            gid: self.gid,
            nlink: self.nlink,
            size: self.size,
            rdev: self.rdev,
            flags: self.flags,
            placement: self.placement,
            atime: self.atime,
            mtime: self.mtime,
            ctime: self.ctime,
            btime: self.btime,
            link_seq: self.link_seq,
            links: self.links.to_vec(),
            xattrs: self.xattrs.to_vec(),
            ..Inode::default()
        }
    }
}

impl Cell {
    /// Encodes the inode and its overflow nodes that changed. File data and directory buckets have their places already.
    ///
    /// `remote`: a parent lies in another domain. `alloc` gives new nodes.
    ///
    /// # Errors
    /// Of `alloc`.
    pub fn encode(&self, st: &mut State, remote: bool, alloc: &mut dyn FnMut() -> Result<NodeId>) -> Result<Records> {
        let mut out = Records::default();
        let base = NodeRecord {
            node: self.ino.node(),
            generation: self.generation,
            kind: NodeKind::Inode,
            flags: USED | if remote { REMOTE } else { 0 } | if self.kind == FileKind::Dir { DIR } else { 0 },
            owner: self.ino,
            version: st.durability.version(),
            payload: Vec::new(),
        };
        let content_min = match &st.body {
            Body::File(f) => match &f.inline {
                Some(b) => b.len(),
                // a tree's root takes up to LEAF_REFS_MAX references
                None if f.map.extent_count() * 16 <= 600 => 600,
                None => LEAF_REFS_MAX * 14,
            },
            Body::Dir(_) => braidfs_format::dentry::INLINE_DIR_MAX,
            Body::Special => 0,
        };
        let sp = split(st, content_min);
        let mut link_nodes = st.link_nodes.take();
        let mut xattr_nodes = st.xattr_nodes.take();
        if sp.spill_links {
            spill(&encode_links(&st.links), &mut link_nodes, NodeKind::Links, &mut out, &base, alloc)?;
        } else {
            out.free.append(&mut link_nodes);
        }
        if sp.spill_xattrs {
            spill(&encode_xattrs(&st.xattrs), &mut xattr_nodes, NodeKind::Xattrs, &mut out, &base, alloc)?;
        } else {
            out.free.append(&mut xattr_nodes);
        }
        st.link_nodes = link_nodes.into();
        st.xattr_nodes = xattr_nodes.into();
        let budget = sp.content;
        let content = match &mut st.body {
            Body::Special => Content::None,
            Body::File(f) => match &f.inline {
                Some(b) => {
                    let content = Content::Inline(b.clone());
                    // one that became empty gives the nodes of its tree back
                    if f.map.there().is_some() {
                        layout(&mut f.map, budget, &base, &mut out, alloc)?;
                    }
                    content
                }
                None => layout(&mut f.map, budget, &base, &mut out, alloc)?,
            },
            Body::Dir(d) => match d.index.inline_entries() {
                Some(e) => {
                    // a directory that became empty gives its bucket nodes back
                    layout(&mut d.map, budget, &base, &mut out, alloc)?;
                    Content::InlineDir(braidfs_format::dentry::encode_entries(e.iter()))
                }
                None => layout(&mut d.map, budget, &base, &mut out, alloc)?,
            },
        };
        out.free.append(&mut st.dropped.take());
        let inode = Inode {
            blocks: match &st.body {
                Body::File(f) => f.map.blocks(),
                Body::Dir(d) => d.map.blocks(),
                Body::Special => 0,
            },
            link_nodes: st.link_nodes.to_vec(),
            xattr_nodes: st.xattr_nodes.to_vec(),
            tombstones: st.durability.tombstones().to_vec(),
            exchange: st.durability.exchange().map(|p| (p.inode.ino, p.inode.generation, p.version)),
            content,
            ..st.to_inode()
        };
        out.write.push(NodeRecord { payload: inode.encode(), ..base });
        Ok(out)
    }

    /// All nodes of the inode: its own, extent leaves and index nodes, overflow nodes.
    pub fn nodes(&self, st: &State) -> Vec<NodeId> {
        let mut v = match &st.body {
            Body::File(f) => f.map.nodes(),
            Body::Dir(d) => d.map.nodes(),
            Body::Special => Vec::new(),
        };
        v.extend(st.link_nodes.iter());
        v.extend(st.xattr_nodes.iter());
        v.extend(st.dropped.iter());
        v.push(self.ino.node());
        v
    }
}

fn layout(
    map: &mut ExtentMap,
    budget: usize,
    base: &NodeRecord,
    out: &mut Records,
    alloc: &mut dyn FnMut() -> Result<NodeId>,
) -> Result<Content> {
    let l = map.layout(budget, alloc)?;
    for (node, kind, payload) in l.write {
        out.write.push(NodeRecord { node, kind, flags: USED | OVERFLOW, payload, ..base.clone() });
    }
    out.free.extend(l.dropped);
    Ok(match l.content {
        Content::Extents(e) if e.is_empty() => Content::None,
        c => c,
    })
}

/// What is wrong with the inode of a node.
fn bad(node: NodeId, why: String) -> Corrupt {
    Corrupt::new("inode", format!("{node}: {why}"))
}

/// Where blocks of inodes can lie, and how many there can be of one: records that say otherwise are not believed, as memory
/// grows with what they name.
#[derive(Clone, Copy)]
pub struct Places<'p> {
    /// Whether so many blocks from there on are data blocks of one group of the domain.
    pub holds: &'p dyn Fn(BlockAddr, u32) -> bool,
    /// Blocks of the domain.
    pub blocks: u64,
}

/// Overflow nodes of an inode, and who reads them.
struct Overflow<'f> {
    ino: InodeNo,
    places: Places<'f>,
    /// Those that were read: one that is named again and again does not fill memory.
    seen: HashSet<NodeId>,
    fetch: &'f mut dyn FnMut(NodeId) -> Result<NodeRecord>,
}

impl Overflow<'_> {
    /// What lies in one, which is to be of this kind.
    fn payload(&mut self, node: NodeId, kind: NodeKind) -> Result<Vec<u8>> {
        if !self.seen.insert(node) {
            return Err(bad(self.ino.node(), format!("names overflow {node} twice")).into());
        }
        let r = (self.fetch)(node)?;
        if r.owner != self.ino || r.kind != kind {
            let why = format!("overflow {node} belongs to {} as {:?}", r.owner, r.kind);
            return Err(bad(self.ino.node(), why).into());
        }
        Ok(r.payload)
    }

    /// What lies in all of these together; `None` where there are none.
    fn payloads(&mut self, nodes: &[NodeId], kind: NodeKind) -> Result<Option<Vec<u8>>> {
        let mut all = Vec::new();
        for node in nodes {
            all.extend(self.payload(*node, kind)?);
        }
        Ok((!nodes.is_empty()).then_some(all))
    }

    /// Extents that lie in a tree of nodes.
    fn tree(&mut self, depth: u8, refs: Vec<LeafRef>) -> Result<ExtentMap> {
        let mut index = Vec::new();
        let leaf_refs = if depth == 2 {
            let mut all = Vec::new();
            for r in refs {
                let inner = decode_refs(&self.payload(r.node, NodeKind::ExtentIndex)?)?;
                all.extend(inner.iter().copied());
                index.push((r, inner));
            }
            all
        } else {
            refs
        };
        let mut leaves = Vec::with_capacity(leaf_refs.len());
        for r in leaf_refs {
            let extents = decode_extents(&self.payload(r.node, NodeKind::ExtentLeaf)?)?;
            leaves.push((r, self.placed(extents)?));
        }
        Ok(ExtentMap::from_leaves(leaves, index)?)
    }

    /// Extents that lie where they can.
    fn placed(&self, extents: Vec<Extent>) -> Result<Vec<Extent>> {
        match extents.iter().find(|e| !(self.places.holds)(e.addr, e.len)) {
            Some(e) => {
                let why = format!("has {} blocks at {}, where no data of its domain can be", e.len, e.addr);
                Err(bad(self.ino.node(), why).into())
            }
            None => Ok(extents),
        }
    }

    /// What an inode of this kind and size holds.
    fn body(&mut self, kind: FileKind, content: Content, size: u64) -> Result<Body> {
        match kind {
            FileKind::File | FileKind::Symlink => self.file(kind, content, size).map(Body::File),
            FileKind::Dir => self.dir(content).map(Body::Dir),
            _ => Ok(Body::Special),
        }
    }

    fn file(&mut self, kind: FileKind, content: Content, size: u64) -> Result<FileBody> {
        if kind == FileKind::Symlink && size > TARGET_MAX as u64 {
            return Err(bad(self.ino.node(), format!("a symbolic link of {size} bytes")).into());
        }
        let mut f = FileBody::default();
        match content {
            Content::None => {
                if size == 0 {
                    f.inline = Some(Vec::new());
                }
            }
            Content::Inline(b) => {
                if b.len() as u64 != size {
                    let why = format!("{} inline bytes, size {size}", b.len());
                    return Err(bad(self.ino.node(), why).into());
                }
                f.inline = Some(b);
            }
            Content::Extents(e) => f.map = Lazy::of(ExtentMap::from_inline(self.placed(e)?)),
            Content::Tree { depth, refs } => f.map = Lazy::of(self.tree(depth, refs)?),
            Content::InlineDir(_) => return Err(self.wrong(kind, "directory")),
        }
        Ok(f)
    }

    fn dir(&mut self, content: Content) -> Result<Box<DirBody>> {
        let map = match content {
            Content::None => return Ok(DirBody::new(DirIndex::new_empty(), ExtentMap::new())),
            Content::InlineDir(b) => {
                return Ok(DirBody::new(DirIndex::from_inline(decode_entries(&b)?), ExtentMap::new()));
            }
            Content::Extents(e) => ExtentMap::from_inline(self.placed(e)?),
            Content::Tree { depth, refs } => self.tree(depth, refs)?,
            Content::Inline(_) => return Err(self.wrong(FileKind::Dir, "file")),
        };
        // each takes memory, and several extents may name the same blocks
        if map.blocks() > self.places.blocks {
            let why = format!("{} buckets in a domain of {} blocks", map.blocks(), self.places.blocks);
            return Err(bad(self.ino.node(), why).into());
        }
        Ok(DirBody::new(bucket_index(&map), map))
    }

    fn wrong(&self, kind: FileKind, content: &str) -> Error {
        bad(self.ino.node(), format!("{kind:?} with {content} content")).into()
    }
}

/// Builds a cell from its inode record; `fetch` reads an overflow node.
///
/// # Errors
/// [`Corrupt`] where records do not fit together, or of `fetch`.
pub fn decode_cell(
    rec: &NodeRecord,
    domain: DomainId,
    places: Places<'_>,
    fetch: &mut dyn FnMut(NodeId) -> Result<NodeRecord>,
) -> Result<Cell> {
    if rec.kind != NodeKind::Inode {
        return Err(bad(rec.node, format!("is a {:?} record", rec.kind)).into());
    }
    cell_of(rec, Inode::decode(&rec.payload)?, domain, places, fetch)
}

/// As [`decode_cell`], of the inode that the payload of `rec` is.
pub fn cell_of(
    rec: &NodeRecord,
    i: Inode,
    domain: DomainId,
    places: Places<'_>,
    fetch: &mut dyn FnMut(NodeId) -> Result<NodeRecord>,
) -> Result<Cell> {
    let ino = rec.node.inode();
    let kind = FileKind::from_mode(i.mode).ok_or_else(|| bad(rec.node, format!("mode {:o}", i.mode)))?;
    let mut overflow = Overflow { ino, places, seen: HashSet::new(), fetch };
    let links = match overflow.payloads(&i.link_nodes, NodeKind::Links)? {
        Some(b) => decode_links(&b)?,
        None => i.links,
    };
    let xattrs = match overflow.payloads(&i.xattr_nodes, NodeKind::Xattrs)? {
        Some(b) => decode_xattrs(&b)?,
        None => i.xattrs,
    };
    let body = overflow.body(kind, i.content, i.size)?;
    let partner =
        i.exchange.map(|(ino, generation, version)| InodeVersion { inode: InodeRef { ino, generation }, version });
    let parent = if ino == InodeNo::ROOT { InodeNo::ROOT } else { links.first().map_or(InodeNo(0), |l| l.parent) };
    let st = State {
        mode: i.mode,
        uid: i.uid,
        gid: i.gid,
        nlink: i.nlink,
        size: i.size,
        rdev: i.rdev,
        flags: i.flags,
        placement: i.placement,
        atime: i.atime,
        mtime: i.mtime,
        ctime: i.ctime,
        btime: i.btime,
        link_seq: i.link_seq,
        links: links.into(),
        xattrs: xattrs.into(),
        link_nodes: i.link_nodes.into(),
        xattr_nodes: i.xattr_nodes.into(),
        body,
        durability: Durability::loaded(rec.version, i.tombstones, partner),
        dropped: Lazy::default(),
        deleted: false,
        parent,
    };
    Ok(Cell::new(InodeRef { ino, generation: rec.generation }, domain, kind, st))
}

fn bucket_index(m: &ExtentMap) -> DirIndex {
    // neighbouring buckets may have merged into one extent
    DirIndex::from_buckets(m.iter().flat_map(|e| e.lblk..e.end()), 0)
}

#[cfg(test)]
mod tests;
