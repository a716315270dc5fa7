//! Rules of one inode: its record, overflow nodes and extents.

use super::dir::Buckets;
use super::{AT_A_TIME, Rules, Visitor, corrupt};
use crate::codes;
use crate::parts::ino::Ino;
use crate::report::{Bad, Checked};
use braidfs_format::file_kind::FileKind;
use braidfs_format::inode::{
    Content, EXTENT_MAX, Extent, Inode, LeafRef, SUMMED_EXTENT_MAX, TARGET_MAX, decode_extents, decode_links,
    decode_refs, decode_xattrs,
};
use braidfs_format::node::{DIR, NodeKind, NodeRecord, OVERFLOW, USED};
use braidfs_format::{InodeNo, NodeId, quota};

/// The inode in a record.
///
/// # Errors
/// [`codes::RECORD`], [`codes::INODE`]: there is none.
pub fn decode(r: &NodeRecord) -> Checked<Inode> {
    if r.kind != NodeKind::Inode {
        return Err(Bad::new(codes::RECORD, format!("{} is {:?} and no inode", r.node, r.kind)));
    }
    let i = Inode::decode(&r.payload).map_err(corrupt(codes::INODE))?;
    if FileKind::from_mode(i.mode).is_none() {
        return Err(Bad::new(codes::INODE, format!("mode {:o} is no file type", i.mode)));
    }
    Ok(i)
}

/// Checks `ino`, the inode in `r` with the flags of its node table entry, and makes it what it should be: with its links
/// and attributes from overflow nodes. Extents go to the visitor, entries of a directory where there are `buckets`.
///
/// # Errors
/// What [`Visitor::bad`] gives back.
pub fn check(
    rules: &Rules,
    visitor: &mut dyn Visitor,
    r: &NodeRecord,
    ino: &mut Ino,
    buckets: Option<Buckets>,
) -> Checked<()> {
    let (node, flags) = (r.node.inode(), ino.flags);
    let right = (flags & !(DIR | OVERFLOW)) | if ino.is_dir() { DIR } else { 0 } | USED;
    if right != flags || r.flags & (DIR | OVERFLOW) != right & (DIR | OVERFLOW) {
        let why = format!("flags {flags:#x} in the node table, {:#x} in the record", r.flags);
        visitor.bad(Bad::new(codes::ENTRY_FLAGS, why))?;
        ino.flags = right;
        ino.dirty.record = true;
    }
    links_and_xattrs(visitor, node, ino)?;
    let mut walk = Walk { rules, visitor, node, ino, buckets, end: 0, blocks: 0, begins: false };
    walk.content()?;
    let Walk { buckets, mut blocks, begins, .. } = walk;
    check_content(visitor, ino, &mut blocks)?;
    check_target(visitor, ino, &mut blocks, begins)?;
    if let Some(b) = buckets.filter(|_| ino.is_dir()) {
        b.finish(rules, visitor, &ino.inode.content)?;
    }
    if ino.inode.blocks != blocks {
        let why = format!("counts {} blocks, has {blocks}", ino.inode.blocks);
        visitor.bad(Bad::new(codes::BLOCK_COUNT, why))?;
        ino.inode.blocks = blocks;
        ino.dirty.record = true;
    }
    Ok(())
}

/// The payloads of `nodes`, one behind the other; nodes that do not hold are dropped, and then there is nothing.
fn gather(
    visitor: &mut dyn Visitor,
    owner: InodeNo,
    nodes: &mut Vec<NodeId>,
    kind: NodeKind,
) -> Checked<Option<Vec<u8>>> {
    let payloads = visitor.overflow(owner, nodes, kind)?;
    let whole = payloads.iter().all(Option::is_some);
    let mut there = payloads.iter().map(Option::is_some);
    nodes.retain(|_| there.next().unwrap_or(false));
    Ok(whole.then(|| payloads.into_iter().flatten().flatten().collect()))
}

/// Fetches links and extended attributes from overflow nodes.
fn links_and_xattrs(visitor: &mut dyn Visitor, node: InodeNo, ino: &mut Ino) -> Checked<()> {
    if !ino.inode.link_nodes.is_empty() {
        let bytes = gather(visitor, node, &mut ino.inode.link_nodes, NodeKind::Links)?;
        match bytes.map(|b| decode_links(&b)) {
            Some(Ok(links)) => ino.inode.links = links,
            lost => {
                if let Some(Err(e)) = lost {
                    visitor.bad(Bad::new(codes::LINKS_CONTENT, e.to_string()))?;
                }
                (ino.links_lost, ino.dirty.links) = (true, true);
            }
        }
    }
    if !ino.inode.xattr_nodes.is_empty() {
        let bytes = gather(visitor, node, &mut ino.inode.xattr_nodes, NodeKind::Xattrs)?;
        match bytes.map(|b| decode_xattrs(&b)) {
            Some(Ok(xattrs)) => ino.inode.xattrs = xattrs,
            lost => {
                if let Some(Err(e)) = lost {
                    visitor.bad(Bad::new(codes::XATTRS_CONTENT, e.to_string()))?;
                }
                ino.dirty.xattrs = true;
            }
        }
    }
    quotas(visitor, node, ino)
}

/// Limits of users, groups and directories, which the root directory has. Who cannot read them keeps to none, so that they go.
fn quotas(visitor: &mut dyn Visitor, node: InodeNo, ino: &mut Ino) -> Checked<()> {
    for record in quota::RECORDS.into_iter().filter(|_| node == InodeNo::ROOT) {
        let limits = ino.inode.xattrs.iter().find(|(name, _)| **name == *record);
        if let Some((_, value)) = limits
            && let Err(e) = quota::decode(record, value)
        {
            visitor.bad(Bad::new(codes::QUOTA, format!("{}: {e}", String::from_utf8_lossy(record))))?;
            ino.inode.xattrs.retain(|(name, _)| **name != *record);
            ino.dirty.xattrs = true;
        }
    }
    Ok(())
}

/// Kind of content and size must fit the type.
fn check_content(visitor: &mut dyn Visitor, ino: &mut Ino, blocks: &mut u64) -> Checked<()> {
    let mut wrong = |why: String| visitor.bad(Bad::new(codes::CONTENT, why));
    match (FileKind::from_mode(ino.inode.mode), &ino.inode.content) {
        (Some(FileKind::File | FileKind::Symlink), Content::Inline(b)) if b.len() as u64 != ino.inode.size => {
            let bytes = b.len() as u64;
            wrong(format!("{bytes} inline bytes, size {}", ino.inode.size))?;
            ino.inode.size = bytes;
            ino.dirty.record = true;
        }
        (Some(FileKind::Symlink), _) if ino.inode.size > TARGET_MAX as u64 => {
            wrong(format!("a symbolic link of {} bytes", ino.inode.size))?;
            ino.inode.size = TARGET_MAX as u64;
            ino.dirty.record = true;
        }
        (Some(FileKind::File | FileKind::Symlink), Content::InlineDir(_)) => {
            wrong("a file with directory entries".into())?;
            (ino.inode.content, ino.inode.size) = (Content::None, 0);
            ino.dirty.record = true;
        }
        (Some(FileKind::Dir), Content::Inline(_)) => {
            wrong("a directory with file content".into())?;
            ino.inode.content = Content::None;
            ino.dirty.entries = true;
        }
        (Some(FileKind::File | FileKind::Symlink | FileKind::Dir), _) | (_, Content::None) => {}
        _ => {
            wrong("a special file with content".into())?;
            (ino.inode.content, *blocks) = (Content::None, 0);
            ino.dirty.extents = true;
        }
    }
    Ok(())
}

/// Whether `extents` have the block with the target of a symbolic link, which is never longer than one.
pub fn has_target(extents: &[Extent]) -> bool {
    extents.first().is_some_and(begins)
}

/// Whether `e` is of written blocks from the first one on.
fn begins(e: &Extent) -> bool {
    e.lblk == 0 && !e.unwritten
}

/// A symbolic link has a target. One that has lost it leads nowhere, whatever its size: it is left without content, and who
/// repairs takes it away.
fn check_target(visitor: &mut dyn Visitor, ino: &mut Ino, blocks: &mut u64, begins: bool) -> Checked<()> {
    let inline = matches!(ino.inode.content, Content::Inline(_));
    if FileKind::from_mode(ino.inode.mode) != Some(FileKind::Symlink) || ino.inode.size > 0 && (inline || begins) {
        return Ok(());
    }
    visitor.bad(Bad::new(codes::CONTENT, format!("a symbolic link without a target, size {}", ino.inode.size)))?;
    (ino.inode.content, ino.inode.size, *blocks) = (Content::None, 0, 0);
    ino.dirty.extents = true;
    Ok(())
}

/// (first, one past the last logical block, node) of references.
fn ranges(refs: &[LeafRef], end: u64) -> Vec<(u64, u64, NodeId)> {
    let ends = refs.iter().skip(1).map(|r| r.first).chain([end]);
    refs.iter().zip(ends).map(|(r, e)| (r.first, e, r.node)).collect()
}

/// Walk through the extents of an inode: they must rise, lie in data blocks of the domain and in the range of their
/// leaf, and have checksums only where the volume has.
struct Walk<'a> {
    rules: &'a Rules,
    visitor: &'a mut dyn Visitor,
    node: InodeNo,
    ino: &'a mut Ino,
    buckets: Option<Buckets>,
    /// One past the last logical block so far.
    end: u64,
    blocks: u64,
    /// The first logical block is written.
    begins: bool,
}

impl Walk<'_> {
    fn content(&mut self) -> Checked<()> {
        let (depth, refs) = match &mut self.ino.inode.content {
            Content::Extents(e) => {
                let extents = std::mem::take(e);
                return self.extents(extents);
            }
            Content::Tree { depth, refs } => (*depth, refs.clone()),
            _ => return Ok(()),
        };
        if refs.first().is_some_and(|r| r.first != 0) {
            self.bad(codes::EXTENT_ORDER, "the first extent leaf does not begin at 0".into())?;
        }
        if depth != 2 {
            return self.leaves(&ranges(&refs, u64::MAX));
        }
        for (first, end, n) in ranges(&refs, u64::MAX) {
            let Some(payload) = self.visitor.overflow(self.node, &[n], NodeKind::ExtentIndex)?.pop().flatten() else {
                self.ino.dirty.extents = true;
                self.spare(first, end)?;
                continue;
            };
            self.ino.tree.push(n);
            let lost = match decode_refs(&payload) {
                Ok(refs) if refs.iter().all(|r| r.first >= first && r.first < end) => {
                    if refs.first().is_none_or(|r| r.first != first) {
                        self.bad(codes::EXTENT_ORDER, format!("extent index {n} does not begin at {first}"))?;
                    }
                    self.leaves(&ranges(&refs, end))?;
                    continue;
                }
                Ok(_) => "leaves its range".into(),
                Err(e) => e.to_string(),
            };
            self.bad(codes::EXTENT_ORDER, format!("extent index {n}: {lost}"))?;
            self.spare(first, end)?;
        }
        Ok(())
    }

    /// Takes the extents in leaves that a lost index node for `first..end` named.
    fn spare(&mut self, first: u64, end: u64) -> Checked<()> {
        for (n, extents) in self.visitor.spare_leaves(self.node, self.ino.version, first..end) {
            self.ino.tree.push(n);
            self.extents_of_leaf(extents)?;
        }
        Ok(())
    }

    fn leaves(&mut self, leaves: &[(u64, u64, NodeId)]) -> Checked<()> {
        for some in leaves.chunks(AT_A_TIME) {
            let nodes: Vec<NodeId> = some.iter().map(|l| l.2).collect();
            let payloads = self.visitor.overflow(self.node, &nodes, NodeKind::ExtentLeaf)?;
            for (&(first, end, n), payload) in some.iter().zip(payloads) {
                let Some(payload) = payload else {
                    self.ino.dirty.extents = true;
                    continue;
                };
                self.ino.tree.push(n);
                match decode_extents(&payload) {
                    Ok(e) if e.is_empty() => self.bad(codes::EXTENT_ORDER, format!("extent leaf {n} is empty"))?,
                    Ok(e) if e.iter().all(|e| e.lblk >= first && e.end() <= end) => self.extents_of_leaf(e)?,
                    Ok(_) => self.bad(codes::EXTENT_ORDER, format!("extent leaf {n} leaves its range"))?,
                    Err(e) => self.bad(codes::EXTENT_ORDER, format!("extent leaf {n}: {e}"))?,
                }
            }
        }
        Ok(())
    }

    fn extents_of_leaf(&mut self, extents: Vec<Extent>) -> Checked<()> {
        let is_long = |e: &Extent| e.sums.is_some() && e.len > SUMMED_EXTENT_MAX;
        let Some(long) = extents.iter().find(|e| is_long(e)) else { return self.extents(extents) };
        self.bad(
            codes::EXTENT_SUMS,
            format!("extent of {} blocks at {} with checksums is too long", long.len, long.lblk),
        )?;
        let cut = |e: &Extent| {
            let (e, step) = (e.clone(), if is_long(e) { SUMMED_EXTENT_MAX } else { EXTENT_MAX });
            (e.lblk..e.end()).step_by(step as usize).map(move |from| e.part(from, e.end().min(from + u64::from(step))))
        };
        self.extents(extents.iter().flat_map(cut).collect())
    }

    fn extents(&mut self, extents: Vec<Extent>) -> Checked<()> {
        let data = !self.ino.is_dir();
        for mut e in extents {
            let shown = |why| format!("extent of {} blocks at {} ({}) {why}", e.len, e.lblk, e.addr);
            if e.lblk < self.end {
                self.bad(codes::EXTENT_ORDER, shown("overlaps the one before"))?;
                continue;
            }
            if !self.visitor.holds(e.addr, u64::from(e.len)) {
                self.bad(codes::EXTENT_PLACE, shown("lies outside the data blocks of its domain"))?;
                continue;
            }
            if e.sums.as_ref().is_some_and(|s| !self.rules.data_sums || s.len() != e.len as usize) {
                self.bad(codes::EXTENT_SUMS, shown("has checksums it must not have"))?;
                e.sums = None;
            }
            self.end = e.end();
            self.blocks += u64::from(e.len);
            self.begins |= begins(&e);
            let (lblk, addr, len) = (e.lblk, e.addr, e.len);
            self.visitor.extent(self.node, e, data)?;
            if let Some(b) = self.buckets.as_mut().filter(|_| !data) {
                b.add(self.rules, self.visitor, lblk, addr, len)?;
            }
        }
        Ok(())
    }

    fn bad(&mut self, code: u32, why: String) -> Checked<()> {
        self.visitor.bad(Bad::new(code, why))?;
        self.ino.dirty.extents = true;
        Ok(())
    }
}
