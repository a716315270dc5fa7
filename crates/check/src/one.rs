//! What can be said of one inode by itself: its record, overflow nodes, extents, and the entries of a directory.
//!
//! Both the streaming check of an unmounted volume ([`super::quick`]) and the scrub of a mounted one ([`super::online`])
//! look at inodes through this. Nothing of an inode is kept: extents and entries are handed over one by one, overflow
//! nodes and buckets are read some hundred at a time.
//!
//! Not checked here: what takes a second inode, and whether blocks are used twice.

use super::codes;
use super::dirs::show;
use braidfs_device::AlignedBuf;
use braidfs_format::dentry::name_hash;
use braidfs_format::dentry::{Dentry, HASH_MAX, HASH_PROBES, bucket_first, decode_bucket, decode_entries};
use braidfs_format::file_kind::FileKind;
use braidfs_format::inode::{
    Content, Extent, Inode, LeafRef, decode_extents, decode_links, decode_refs, decode_xattrs,
};
use braidfs_format::name::FileName;
use braidfs_format::node::{DIR, NodeBlock, NodeEntry, NodeKind, NodeRecord, OVERFLOW, USED};
use braidfs_format::super_block::{INCOMPAT_DATA_SUMS, SuperBlock};
use braidfs_format::{BLOCK_BYTES, BlockAddr, Corrupt, NodeId};
use braidfs_store::Store;
use std::collections::VecDeque;

/// Overflow nodes or buckets read at a time (4 KiB each).
const AT_A_TIME: usize = 128;

/// The first thing of an inode that does not hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bad {
    /// A number of [`codes`].
    pub code: u32,
    /// In words.
    pub why: String,
    /// The logical block of the bucket or of the data that does not hold; `None`: something else.
    pub at: Option<u64>,
    /// It is file data.
    pub data: bool,
}

impl Bad {
    /// A finding.
    pub fn new(code: u32, why: impl Into<String>) -> Self {
        Self { code, why: why.into(), at: None, data: false }
    }
    /// Of one logical block.
    pub fn at(self, lblk: u64) -> Self {
        Self { at: Some(lblk), ..self }
    }
}

/// What a check comes to.
pub type Checked<T> = std::result::Result<T, Bad>;

fn bad<T>(code: u32, why: impl Into<String>) -> Checked<T> {
    Err(Bad::new(code, why))
}

fn corrupt(code: u32) -> impl Fn(Corrupt) -> Bad {
    move |e| Bad::new(code, e.to_string())
}

/// What the volume asks of every inode.
#[derive(Debug, Clone, Copy)]
pub struct Rules {
    /// Low half of the volume's UUID.
    pub volume: u32,
    /// Key of the directory hash.
    pub hash_key: [u8; 16],
    /// Extents may carry checksums.
    pub data_sums: bool,
}

impl Rules {
    /// Of the volume with this superblock.
    pub fn of(sb: &SuperBlock) -> Self {
        let data_sums = sb.incompat.get() & INCOMPAT_DATA_SUMS != 0;
        Self { volume: sb.volume_id(), hash_key: sb.hash_key, data_sums }
    }
}

/// Where the other parts of an inode come from.
pub trait Parts {
    /// The payloads of overflow nodes of `owner`, which must all be of `kind`, in the order of `nodes`.
    ///
    /// # Errors
    /// [`codes::OVERFLOW_MISSING`] and the like.
    fn overflow(&mut self, owner: NodeId, nodes: &[NodeId], kind: NodeKind) -> Checked<Vec<Vec<u8>>>;
    /// Whether the bucket at `lblk` is to be read.
    fn bucket(&mut self, lblk: u64) -> bool;
    /// The blocks at `addrs`, in this order.
    ///
    /// # Errors
    /// [`codes::UNREADABLE`]; [`Bad::at`] is then the index of the block.
    fn blocks(&mut self, addrs: &[BlockAddr]) -> Checked<Vec<u8>>;
    /// Whether `len` blocks from `addr` are data blocks of the inode's domain.
    fn holds(&self, addr: BlockAddr, len: u64) -> bool;
    /// Told of every extent, in order; `data`: of file data, not of buckets.
    ///
    /// # Errors
    /// What does not hold of it.
    fn extent(&mut self, ino: NodeId, e: &Extent, data: bool) -> Checked<()>;
    /// Told of every entry of a directory, in order.
    fn entry(&mut self, dir: NodeId, e: &Dentry);
}

/// Checks the inode with the record `r`, whose node table entry has `flags`; the inode with all its links and attributes.
///
/// # Errors
/// The first thing that does not hold.
pub fn inode(rules: &Rules, parts: &mut dyn Parts, r: &NodeRecord, flags: u8) -> Checked<Inode> {
    if r.kind != NodeKind::Inode {
        return bad(codes::RECORD, format!("{} is {:?} and no inode", r.node, r.kind));
    }
    let mut i = Inode::decode(&r.payload).map_err(corrupt(codes::INODE))?;
    let Some(kind) = FileKind::from_mode(i.mode) else {
        return bad(codes::INODE, format!("mode {:o} is no file type", i.mode));
    };
    let right = (flags & !(DIR | OVERFLOW)) | if kind == FileKind::Dir { DIR } else { 0 } | USED;
    if right != flags || r.flags & (DIR | OVERFLOW) != right & (DIR | OVERFLOW) {
        return bad(codes::ENTRY_FLAGS, format!("flags {flags:#x} in the node table, {:#x} in the record", r.flags));
    }
    if !i.link_nodes.is_empty() {
        let bytes = parts.overflow(r.node, &i.link_nodes, NodeKind::Links)?.concat();
        i.links = decode_links(&bytes).map_err(corrupt(codes::LINKS_CONTENT))?;
    }
    if !i.xattr_nodes.is_empty() {
        let bytes = parts.overflow(r.node, &i.xattr_nodes, NodeKind::Xattrs)?.concat();
        i.xattrs = decode_xattrs(&bytes).map_err(corrupt(codes::XATTRS_CONTENT))?;
    }
    let blocks = content(rules, parts, r.node, kind, &i)?;
    if i.blocks != blocks {
        return bad(codes::BLOCK_COUNT, format!("counts {} blocks, has {blocks}", i.blocks));
    }
    Ok(i)
}

/// Checks the content; the blocks of all extents.
fn content(rules: &Rules, parts: &mut dyn Parts, node: NodeId, kind: FileKind, i: &Inode) -> Checked<u64> {
    let wrong = |why: String| bad(codes::CONTENT, why);
    let mut walk = Walk { rules, parts, node, dir: None, end: 0, blocks: 0 };
    match (kind, &i.content) {
        (FileKind::File | FileKind::Symlink, Content::Inline(b)) if b.len() as u64 != i.size => {
            return wrong(format!("{} inline bytes, size {}", b.len(), i.size));
        }
        (FileKind::File | FileKind::Symlink, Content::InlineDir(_)) => {
            return wrong("a file with directory entries".into());
        }
        (FileKind::File | FileKind::Symlink, _) => {}
        (FileKind::Dir, Content::Inline(_)) => return wrong("a directory with file content".into()),
        (FileKind::Dir, _) => walk.dir = Some(Buckets::default()),
        (_, Content::None) => {}
        _ => return wrong("a special file with content".into()),
    }
    match &i.content {
        Content::Extents(e) => walk.extents(e)?,
        Content::Tree { depth: 2, refs } => {
            for (first, end, n) in ranges(refs, u64::MAX) {
                let payload = walk.parts.overflow(node, &[n], NodeKind::ExtentIndex)?.concat();
                let refs = decode_refs(&payload).map_err(corrupt(codes::EXTENT_ORDER))?;
                if !refs.iter().all(|r| r.first >= first && r.first < end) {
                    return bad(codes::EXTENT_ORDER, format!("extent index {n} leaves its range"));
                }
                walk.leaves(&ranges(&refs, end))?;
            }
        }
        Content::Tree { refs, .. } => walk.leaves(&ranges(refs, u64::MAX))?,
        Content::InlineDir(bytes) => {
            let entries = decode_entries(bytes).map_err(corrupt(codes::INLINE_ENTRIES))?;
            if let Some(d) = &mut walk.dir {
                d.entries(rules, walk.parts, node, &entries)?;
            }
        }
        Content::None | Content::Inline(_) => {}
    }
    if let Some(mut d) = walk.dir.take() {
        d.read(rules, walk.parts, node, true)?;
    }
    Ok(walk.blocks)
}

/// (first, one past the last logical block, node) of references.
fn ranges(refs: &[LeafRef], end: u64) -> Vec<(u64, u64, NodeId)> {
    let ends = refs.iter().skip(1).map(|r| r.first).chain([end]);
    refs.iter().zip(ends).map(|(r, e)| (r.first, e, r.node)).collect()
}

/// Walk through the extents of an inode.
struct Walk<'a> {
    rules: &'a Rules,
    parts: &'a mut dyn Parts,
    node: NodeId,
    dir: Option<Buckets>,
    /// One past the last logical block so far.
    end: u64,
    blocks: u64,
}

impl Walk<'_> {
    fn leaves(&mut self, leaves: &[(u64, u64, NodeId)]) -> Checked<()> {
        for some in leaves.chunks(AT_A_TIME) {
            let nodes: Vec<NodeId> = some.iter().map(|l| l.2).collect();
            let payloads = self.parts.overflow(self.node, &nodes, NodeKind::ExtentLeaf)?;
            for (&(first, end, n), payload) in some.iter().zip(payloads) {
                let extents = decode_extents(&payload).map_err(corrupt(codes::EXTENT_ORDER))?;
                if !extents.iter().all(|e| e.lblk >= first && e.end() <= end) {
                    return bad(codes::EXTENT_ORDER, format!("extent leaf {n} leaves its range"));
                }
                self.extents(&extents)?;
            }
        }
        Ok(())
    }

    fn extents(&mut self, extents: &[Extent]) -> Checked<()> {
        for e in extents {
            let bad = |code, why| bad(code, format!("extent of {} blocks at {} ({}) {why}", e.len, e.lblk, e.addr));
            if e.lblk < self.end {
                return bad(codes::EXTENT_ORDER, "overlaps the one before");
            }
            if !self.parts.holds(e.addr, u64::from(e.len)) {
                return bad(codes::EXTENT_PLACE, "lies outside the data blocks of its domain");
            }
            if e.sums.as_ref().is_some_and(|s| !self.rules.data_sums || s.len() != e.len as usize) {
                return bad(codes::EXTENT_SUMS, "has checksums it must not have");
            }
            self.end = e.end();
            self.blocks += u64::from(e.len);
            self.parts.extent(self.node, e, self.dir.is_none())?;
            if let Some(d) = &mut self.dir {
                d.add(self.rules, self.parts, self.node, e)?;
            }
        }
        Ok(())
    }
}

/// The buckets of a directory, read some at a time in the order of hashes.
#[derive(Default)]
struct Buckets {
    /// Not read yet: logical block and address.
    todo: Vec<(u64, BlockAddr)>,
    /// The entries of the last positions, where a name could stand that comes again.
    last: VecDeque<(u64, FileName)>,
}

impl Buckets {
    fn add(&mut self, rules: &Rules, parts: &mut dyn Parts, dir: NodeId, e: &Extent) -> Checked<()> {
        for i in (0..u64::from(e.len)).filter(|i| parts.bucket(e.lblk + i)).collect::<Vec<_>>() {
            self.todo.push((e.lblk + i, BlockAddr(e.addr.0 + i)));
            if self.todo.len() > AT_A_TIME {
                self.read(rules, parts, dir, false)?;
            }
        }
        Ok(())
    }

    /// Reads the buckets so far but the last one (whose end the next one tells), or all of them.
    fn read(&mut self, rules: &Rules, parts: &mut dyn Parts, dir: NodeId, all: bool) -> Checked<()> {
        let todo = std::mem::take(&mut self.todo);
        let now = if all { todo.len() } else { todo.len().saturating_sub(1) };
        let addrs: Vec<BlockAddr> = todo[..now].iter().map(|t| t.1).collect();
        let lblk_of = |b: Bad| Bad { at: b.at.map(|i| todo[i as usize].0), ..b };
        let blocks = if now > 0 { parts.blocks(&addrs).map_err(lblk_of)? } else { Vec::new() };
        for (i, block) in blocks.chunks(BLOCK_BYTES).enumerate() {
            let (lblk, addr) = todo[i];
            let entries = decode_bucket(block, dir, lblk, rules.volume, addr)
                .map_err(|e| Bad::new(codes::BUCKET, format!("bucket {lblk}: {e}")).at(lblk))?;
            let end = todo.get(i + 1).map_or(HASH_MAX + 1, |b| bucket_first(b.0));
            if let Some(e) = entries.iter().find(|e| e.hash < bucket_first(lblk) || e.hash >= end) {
                return Err(
                    Bad::new(codes::BUCKET_RANGE, format!("{} stands in bucket {lblk}", show(&e.name))).at(lblk)
                );
            }
            self.entries(rules, parts, dir, &entries).map_err(|b| b.at(lblk))?;
        }
        self.todo = todo[now..].to_vec();
        Ok(())
    }

    /// Checks entries at rising positions.
    fn entries(&mut self, rules: &Rules, parts: &mut dyn Parts, dir: NodeId, entries: &[Dentry]) -> Checked<()> {
        for e in entries {
            let h = name_hash(&rules.hash_key, &e.name);
            if !(h..=h + HASH_PROBES).contains(&e.hash) {
                let why = format!("{} stands at {:#x}, its name says {h:#x}", show(&e.name), e.hash);
                return bad(codes::ENTRY_HASH, why);
            }
            while self.last.front().is_some_and(|l| l.0 + HASH_PROBES < e.hash) {
                self.last.pop_front();
            }
            if self.last.iter().any(|l| l.1 == e.name) {
                return bad(codes::NAME_TWICE, format!("{} stands there twice", show(&e.name)));
            }
            self.last.push_back((e.hash, e.name.clone()));
            parts.entry(dir, e);
        }
        Ok(())
    }
}

/// Reads the blocks at `addrs`, in the order of the device and neighbours together; they come in the order of `addrs`.
///
/// # Errors
/// [`codes::UNREADABLE`], with the index of the block as [`Bad::at`].
pub fn read_scattered(store: &Store, addrs: &[BlockAddr]) -> Checked<Vec<u8>> {
    let mut order: Vec<u32> = (0..addrs.len() as u32).collect();
    order.sort_unstable_by_key(|&i| addrs[i as usize]);
    let mut out = vec![0u8; addrs.len() * BLOCK_BYTES];
    let mut buf = AlignedBuf::zeroed(BLOCK_BYTES);
    let mut at = 0;
    while at < order.len() {
        let first = addrs[order[at] as usize];
        let n = order[at..].iter().zip(0u64..).take_while(|(i, k)| addrs[**i as usize].0 == first.0 + k).count();
        if buf.len() < n * BLOCK_BYTES {
            buf = AlignedBuf::zeroed(n * BLOCK_BYTES);
        }
        let run = &mut buf[..n * BLOCK_BYTES];
        if store.read(first, run).is_err() {
            // one bad sector fails them all: which?
            for (i, block) in order[at..at + n].iter().zip(run.chunks_mut(BLOCK_BYTES)) {
                let addr = addrs[*i as usize];
                let bad = |e| Bad::new(codes::UNREADABLE, format!("{addr} cannot be read: {e}")).at(u64::from(*i));
                store.read(addr, block).map_err(bad)?;
            }
        }
        for (i, block) in order[at..at + n].iter().zip(run.chunks(BLOCK_BYTES)) {
            out[*i as usize * BLOCK_BYTES..][..BLOCK_BYTES].copy_from_slice(block);
        }
        at += n;
    }
    Ok(out)
}

/// The payloads of overflow nodes of `owner`, which lie where their entries say.
///
/// # Errors
/// A block or record that does not hold, or is not such a node of `owner`.
pub fn overflow_payloads(
    store: &Store,
    owner: NodeId,
    nodes: &[(NodeId, NodeEntry)],
    kind: NodeKind,
) -> Checked<Vec<Vec<u8>>> {
    let addrs: Vec<BlockAddr> = nodes.iter().map(|n| n.1.addr).collect();
    let blocks = read_scattered(store, &addrs).map_err(|b| Bad { at: None, ..b })?;
    let mut out = Vec::with_capacity(nodes.len());
    for ((node, e), block) in nodes.iter().zip(blocks.chunks(BLOCK_BYTES)) {
        NodeBlock::check(block, store.volume, e.addr).map_err(corrupt(codes::NODE_BLOCK))?;
        let r = NodeBlock::record(block, usize::from(e.index)).map_err(corrupt(codes::RECORD))?;
        if (r.node, r.gener) != (*node, e.gener) {
            let why = format!("record {} of {} is of {} generation {}", e.index, e.addr, r.node, r.gener);
            return bad(codes::RECORD, why);
        }
        if r.owner != owner || r.kind != kind {
            let why = format!("overflow {node} is {:?} of {}, not {kind:?}", r.kind, r.owner);
            return bad(codes::OVERFLOW_MISSING, why);
        }
        out.push(r.payload);
    }
    Ok(out)
}
