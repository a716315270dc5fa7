//! The visitor of the full pass: keeps what the rules hand it, notes what does not hold and goes on.

use crate::codes;
use crate::error::Result;
use crate::parts::domain::Domain;
use crate::parts::ino::Ino;
use crate::read::read_scattered;
use crate::report::{Bad, Checked, Log};
use crate::rules::dir::Buckets;
use crate::rules::{Rules, Visitor, inode, record};
use braidfs_device::{AlignedBuf, BLOCK_BYTES};
use braidfs_format::dentry::Dentry;
use braidfs_format::inode::{Content, Extent, Inode};
use braidfs_format::node::{NodeEntry, NodeKind, NodeRecord};
use braidfs_format::{BlockAddr, Corrupt, InodeNo, NodeId};
use braidfs_store::Store;
use std::ops::Range;

/// What was read before is not there any more.
pub fn changed(node: NodeId, why: &str) -> Corrupt {
    Corrupt::new("inode", format!("{node} was read, and cannot be read again: {why}"))
}

/// Reads single records. The last block is kept: neighbours often lie in one.
pub struct Records<'a> {
    store: &'a Store,
    domain: &'a Domain,
    at: Option<BlockAddr>,
    block: AlignedBuf,
}

impl<'a> Records<'a> {
    /// Of the records that the node table of `domain` names; nothing is read yet.
    pub fn new(store: &'a Store, domain: &'a Domain) -> Self {
        Self { store, domain, at: None, block: AlignedBuf::zeroed(BLOCK_BYTES) }
    }

    /// The entry and record of `node`.
    ///
    /// # Errors
    /// Where it has none, or what lies there is another.
    pub fn get(&mut self, node: NodeId) -> Result<(NodeEntry, NodeRecord)> {
        let entry = self.domain.entry(self.store, node).filter(NodeEntry::used);
        let entry = entry.ok_or_else(|| changed(node, "it is not in the node table"))?;
        let again = |b: Bad| changed(node, &b.why);
        if self.at != Some(entry.addr) {
            self.at = None;
            self.store.read(entry.addr, &mut self.block)?;
            record::node_block(&self.block, self.store.volume, entry.addr).map_err(again)?;
            self.at = Some(entry.addr);
        }
        Ok((entry, record::record(&self.block, node, &entry).map_err(again)?))
    }
}

/// Where overflow nodes come from.
pub trait Source {
    /// The payload of `node`, which `owner` refers to as `kind`.
    ///
    /// # Errors
    /// [`codes::OVERFLOW_MISSING`], [`codes::OVERFLOW_SHARED`].
    fn take(&mut self, owner: InodeNo, node: NodeId, kind: NodeKind) -> Checked<Vec<u8>>;

    /// As [`Visitor::spare_leaves`].
    fn spare_leaves(&mut self, owner: InodeNo, version: u64, range: Range<u64>) -> Vec<(NodeId, Vec<Extent>)> {
        let _ = (owner, version, range);
        Vec::new()
    }
}

impl Source for Records<'_> {
    fn take(&mut self, owner: InodeNo, node: NodeId, kind: NodeKind) -> Checked<Vec<u8>> {
        let (_, r) = self.get(node).map_err(|e| Bad::new(codes::OVERFLOW_MISSING, e.to_string()))?;
        record::overflow(node, (r.owner, r.kind), owner, kind)?;
        Ok(r.payload)
    }
}

/// Collects the parts of one inode.
pub struct Collector<'a> {
    store: &'a Store,
    /// Where blocks of the inode may lie; `None`: extents are not looked at.
    domain: Option<&'a Domain>,
    node: InodeNo,
    /// Where findings go; `None`: the first one ends the walk.
    log: Option<&'a mut Log>,
    /// Where overflow nodes come from; `None`: there are none.
    source: Option<&'a mut (dyn Source + 'a)>,
    extents: Vec<Extent>,
    entries: Vec<Dentry>,
    found: bool,
}

impl<'a> Collector<'a> {
    fn new(store: &'a Store, node: InodeNo, log: Option<&'a mut Log>) -> Self {
        let (extents, entries) = (Vec::new(), Vec::new());
        Self { store, domain: None, node, log, source: None, extents, entries, found: false }
    }
}

impl Visitor for Collector<'_> {
    fn bad(&mut self, bad: Bad) -> Checked<()> {
        let Some(log) = &mut self.log else { return Err(bad) };
        self.found = true;
        log.add(bad.code, Some(self.node.node()), bad.why);
        Ok(())
    }

    fn overflow(&mut self, owner: InodeNo, nodes: &[NodeId], kind: NodeKind) -> Checked<Vec<Option<Vec<u8>>>> {
        let mut out = Vec::with_capacity(nodes.len());
        for &n in nodes {
            let payload = match &mut self.source {
                Some(source) => source.take(owner, n, kind),
                None => Err(record::missing(n, kind)),
            };
            out.push(match payload {
                Ok(p) => Some(p),
                Err(bad) => {
                    self.bad(bad)?;
                    None
                }
            });
        }
        Ok(out)
    }

    fn spare_leaves(&mut self, owner: InodeNo, version: u64, range: Range<u64>) -> Vec<(NodeId, Vec<Extent>)> {
        self.source.as_mut().map_or_else(Vec::new, |source| source.spare_leaves(owner, version, range))
    }

    fn holds(&self, addr: BlockAddr, len: u64) -> bool {
        self.domain.is_none_or(|d| d.holds(self.store, addr, len))
    }

    fn extent(&mut self, _: InodeNo, e: Extent, _: bool) -> Checked<()> {
        self.extents.push(e);
        Ok(())
    }

    fn blocks(&mut self, addrs: &[BlockAddr]) -> Checked<Vec<u8>> {
        match (read_scattered(self.store, addrs), &mut self.log) {
            // which one cannot be read is told by itself; what it holds does not hold
            (Err(_), Some(log)) => Ok(addrs.iter().flat_map(|a| log.read(self.store, *a, 1).to_vec()).collect()),
            (read, _) => read,
        }
    }

    fn entry(&mut self, _: InodeNo, e: Dentry) {
        self.entries.push(e);
    }
}

/// Checks an inode of `domain` by itself, with its overflow nodes from `source`; the inode as it should be, but for the
/// entries of a directory.
pub fn checked<'a>(
    rules: &Rules,
    store: &'a Store,
    log: &'a mut Log,
    domain: &'a Domain,
    (entry, r, i): (NodeEntry, &NodeRecord, Inode),
    source: Option<&'a mut (dyn Source + 'a)>,
) -> Checked<Ino> {
    let mut c = Collector { domain: Some(domain), source, ..Collector::new(store, r.node.inode(), Some(log)) };
    whole(rules, &mut c, entry, r, i)
}

/// Reads an inode of `domain` that holds once more, whole but for the entries of a directory.
///
/// # Errors
/// Where it no longer is what it was.
pub fn load(rules: &Rules, store: &Store, domain: &Domain, node: InodeNo) -> Result<Ino> {
    let mut records = Records::new(store, domain);
    let (entry, r) = records.get(node.node())?;
    let mut c = Collector { domain: Some(domain), source: Some(&mut records), ..Collector::new(store, node, None) };
    let ino = inode::decode(&r).and_then(|i| whole(rules, &mut c, entry, &r, i));
    Ok(ino.map_err(|b| changed(node.node(), &b.why))?)
}

fn whole(rules: &Rules, c: &mut Collector<'_>, entry: NodeEntry, r: &NodeRecord, i: Inode) -> Checked<Ino> {
    let mut ino = Ino::new(r.generation, r.version, entry.flags, i);
    inode::check(rules, c, r, &mut ino, None)?;
    if matches!(ino.inode.content, Content::Extents(_) | Content::Tree { .. }) {
        ino.extents = std::mem::take(&mut c.extents);
    }
    ino.linked = vec![false; ino.inode.links.len()];
    Ok(ino)
}

/// The entries of a directory in which all holds, once more.
///
/// # Errors
/// Where that is no longer so.
pub fn load_entries(rules: &Rules, store: &Store, node: InodeNo, ino: &Ino) -> Result<Vec<Dentry>> {
    let mut c = Collector::new(store, node, None);
    let walk = Buckets::until_bad(node).walk(rules, &mut c, &ino.inode.content, &ino.extents);
    walk.map_err(|b| changed(node.node(), &format!("its entries: {}", b.why)))?;
    Ok(c.entries)
}

/// Fills [`Ino::entries`] of directory `node`, and notes what does not hold. What cannot be read is made again from the
/// links of the inodes.
pub fn read_entries(rules: &Rules, store: &Store, log: &mut Log, node: InodeNo, ino: &mut Ino) {
    let mut c = Collector::new(store, node, Some(log));
    let walk = Buckets::to_the_end(node).walk(rules, &mut c, &ino.inode.content, &ino.extents);
    ino.dirty.entries |= c.found || walk.is_err();
    ino.entries = c.entries;
}
