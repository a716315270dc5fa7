//! What a check holds in memory: the state of the volume as it should be. (Of the inodes: [`super::inodes`].)
//!
//! A check reads the volume into this model and, where something does not hold, reports it and corrects the *model*.
//! A repair then makes the device equal to the model. So there is one decision per damage, taken in one place.

use super::inodes::Inodes;
use super::pair::PairState;
use super::{Finding, codes, nodes};
use braidfs_device::AlignedBuf;
use braidfs_format::bat::BatEntry;
use braidfs_format::dentry::Dentry;
use braidfs_format::domain::DomainHeader;
use braidfs_format::geometry::NODES_PER_BLOCK;
use braidfs_format::group::{SegmentEntry, Written};
use braidfs_format::inode::{Extent, Inode, Link};
use braidfs_format::node::NodeEntry;
use braidfs_format::super_block::SuperBlock;
use braidfs_format::{BLOCK_BYTES, BlockAddr, BlockKind, NodeId};
use braidfs_store::Store;
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, HashSet};

/// Names kept for the paths of findings.
const NAMES_MAX: usize = 4096;
/// Parents that a path is followed through.
const DEPTH_MAX: usize = 4096;

/// Collects findings of one domain, or of the volume.
#[derive(Debug, Default)]
pub struct Log {
    /// What was found.
    pub findings: Vec<Finding>,
    /// The domain that is looked at.
    pub domain: Option<u16>,
}

impl Log {
    /// A log of one domain.
    pub fn of(domain: u16) -> Self {
        Self { findings: Vec::new(), domain: Some(domain) }
    }
    /// Adds a finding.
    pub fn add(&mut self, code: u32, node: Option<NodeId>, message: impl Into<String>) {
        let message = message.into();
        tracing::debug!(code, domain = self.domain, ?node, %message, "finding");
        self.findings.push(Finding {
            code,
            domain: self.domain,
            node: node.map(|n| n.0),
            path: None,
            message,
            fixed: false,
        });
    }
    /// Reads blocks; those that the device cannot read count as zeros and are reported.
    pub fn read(&mut self, store: &Store, addr: BlockAddr, blocks: usize) -> AlignedBuf {
        let mut buf = AlignedBuf::zeroed(blocks * BLOCK_BYTES);
        if store.read(addr, &mut buf).is_err() {
            for (i, b) in buf.chunks_mut(BLOCK_BYTES).enumerate() {
                let at = BlockAddr(addr.0 + i as u64);
                if let Err(e) = store.read(at, b) {
                    b.fill(0);
                    self.add(codes::UNREADABLE, None, format!("{at} cannot be read: {e}"));
                }
            }
        }
        buf
    }
}

/// A block to write over the damaged copy of a pair.
#[derive(Debug)]
pub struct Mend {
    /// Where.
    pub addr: BlockAddr,
    /// What.
    pub block: Vec<u8>,
}

/// The node table of a group. A block of it takes memory only where it says something.
#[derive(Debug, Default)]
pub struct Table(Vec<Option<Box<[NodeEntry]>>>);

impl Table {
    /// Appends a block of [`NODES_PER_BLOCK`] entries.
    pub fn push(&mut self, block: Vec<NodeEntry>) {
        let blank = block.iter().all(|e| *e == NodeEntry::default());
        self.0.push((!blank).then(|| block.into_boxed_slice()));
    }

    /// The entry of `slot`.
    pub fn get(&self, slot: u32) -> Option<NodeEntry> {
        match self.0.get((slot / NODES_PER_BLOCK) as usize)? {
            Some(block) => block.get((slot % NODES_PER_BLOCK) as usize).copied(),
            None => Some(NodeEntry::default()),
        }
    }

    /// The entry of `slot`, to set it.
    pub fn get_mut(&mut self, slot: u32) -> Option<&mut NodeEntry> {
        let block = self.0.get_mut((slot / NODES_PER_BLOCK) as usize)?;
        let blank = || vec![NodeEntry::default(); NODES_PER_BLOCK as usize].into();
        block.get_or_insert_with(blank).get_mut((slot % NODES_PER_BLOCK) as usize)
    }

    /// The slots in use.
    pub fn used(&self) -> impl Iterator<Item = (u32, &NodeEntry)> {
        let blocks = (0u32..).zip(&self.0).filter_map(|(at, b)| Some((at * NODES_PER_BLOCK, b.as_deref()?)));
        blocks.flat_map(|(first, block)| (first..).zip(block)).filter(|(_, e)| e.used())
    }

    /// The first slot from `from` on that is not in use.
    pub fn free(&self, from: u32) -> Option<u32> {
        (from..self.0.len() as u32 * NODES_PER_BLOCK).find(|slot| self.get(*slot).is_some_and(|e| !e.used()))
    }

    /// The entries of block `index`.
    pub fn block(&self, index: u32) -> Cow<'_, [NodeEntry]> {
        match self.0.get(index as usize) {
            Some(Some(block)) => Cow::Borrowed(block),
            _ => Cow::Owned(vec![NodeEntry::default(); NODES_PER_BLOCK as usize]),
        }
    }
}

/// Tables of one group.
#[derive(Debug)]
pub struct Group {
    /// Its number.
    pub number: u32,
    /// Epoch of the claim, from the BAT.
    pub epoch: u32,
    /// Its blocks.
    pub blocks: u32,
    /// The header must be written again.
    pub header_bad: bool,
    /// The segment table as it is on the device; `None` where it is lost.
    pub segments: Option<Vec<SegmentEntry>>,
    /// The node table as it should be.
    pub entries: Table,
    /// Node table blocks that differ from the device.
    pub entries_dirty: Vec<bool>,
    /// Node table blocks that were lost.
    pub lost: Vec<u32>,
    /// Node table blocks that may be older than the volume: the other copy is lost.
    pub doubtful: Vec<u32>,
    /// The segment table may be older than the volume.
    pub segments_doubtful: bool,
    /// The segment table is to be written as it is here.
    pub segments_dirty: bool,
    /// Halves of owner tables that are lost: counted through the segments.
    pub owners_lost: Vec<u32>,
    /// Damaged copies.
    pub mend: Vec<Mend>,
    /// `seq` of the segment table; 0 where it is lost.
    pub table_seq: u64,
    /// How often the other tables must have been written; nothing where the segment table is lost.
    pub written: Written,
    /// The segment table must be written anew, since it does not count right.
    pub counts_wrong: bool,
}

impl Group {
    /// The lowest `seq` that table `index` ([`Written`]) may have.
    pub fn floor(&self, index: usize) -> u64 {
        let base = self.table_seq & !u64::from(u32::MAX);
        self.written.counts.get(index).map_or(0, |c| base + u64::from(*c))
    }

    /// Whether the device lost the newest copy of table `index`, of which `state` was found: then notes it.
    pub fn lost_write(
        &self,
        log: &mut Log,
        state: &PairState,
        index: usize,
        code: u32,
        what: std::fmt::Arguments<'_>,
    ) -> bool {
        let (Some((_, seq)), floor) = (state.current(), self.floor(index)) else { return false };
        if seq < floor {
            log.add(code, None, format!("{what}: is number {seq:#x}, should be {floor:#x}"));
        }
        seq < floor
    }
}

/// One domain.
#[derive(Debug)]
pub struct Domain {
    /// Its number.
    pub number: u16,
    /// Its header; `None` where it is lost.
    pub header: Option<DomainHeader>,
    /// The header must be written again.
    pub header_dirty: bool,
    /// The journal cannot be replayed and is to be emptied.
    pub reset_journal: bool,
    /// Its groups by number.
    pub groups: BTreeMap<u32, Group>,
    /// Nodes whose table entries were found again by a scan.
    pub recovered: HashSet<NodeId>,
}

impl Domain {
    /// The journal: first block and blocks.
    pub fn journal(&self) -> Option<(u64, u64)> {
        self.header.map(|h| (h.journal_start.get(), u64::from(h.journal_blocks.get())))
    }

    /// Whether `len` blocks from `addr` are data blocks of one group of this domain (no metadata, no journal).
    pub fn holds(&self, store: &Store, addr: BlockAddr, len: u64) -> bool {
        let g = store.geometry;
        let Some(group) = self.groups.get(&g.group_of(addr)) else { return false };
        let at = addr.0 - g.group_start(group.number).0;
        if at < u64::from(g.meta_blocks()) || at + len > u64::from(group.blocks) {
            return false;
        }
        self.journal().is_none_or(|(start, n)| addr.0 >= start.saturating_add(n) || addr.0 + len <= start)
    }

    /// The table entry of a node of this domain.
    pub fn entry(&self, store: &Store, node: NodeId) -> Option<NodeEntry> {
        let (group, slot) = store.geometry.node_place(node)?;
        self.groups.get(&group)?.entries.get(slot)
    }

    /// Sets the table entry of a node of this domain.
    pub fn set_entry(&mut self, store: &Store, node: NodeId, entry: NodeEntry) {
        let Some((group, slot)) = store.geometry.node_place(node) else { return };
        let Some(g) = self.groups.get_mut(&group) else { return };
        if let Some(e) = g.entries.get_mut(slot) {
            *e = entry;
            g.entries_dirty[(slot / NODES_PER_BLOCK) as usize] = true;
        }
    }

    /// Frees the slot of a node; its generation stays.
    pub fn free_node(&mut self, store: &Store, node: NodeId) {
        if let Some(e) = self.entry(store, node) {
            self.set_entry(store, node, NodeEntry { gener: e.gener, ..NodeEntry::default() });
        }
    }
}

/// What of an inode must be written again.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Dirty {
    /// The record.
    pub record: bool,
    /// The links.
    pub links: bool,
    /// The extended attributes.
    pub xattrs: bool,
    /// The extents.
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
    /// Its domain.
    pub domain: u16,
    /// Generation.
    pub gener: u32,
    /// Version of the newest record.
    pub version: u64,
    /// Flags of the node table entry.
    pub flags: u8,
    /// The record; `links` and `xattrs` are filled from the overflow nodes too, extents are in [`Self::extents`].
    pub inode: Inode,
    /// Nodes of the extent tree.
    pub tree: Vec<NodeId>,
    /// All extents.
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
            let part = |a: u64, b: u64| Extent {
                lblk: a,
                addr: BlockAddr(e.addr.0 + (a - e.lblk)),
                len: (b - a) as u32,
                unwritten: e.unwritten,
                sums: e.sums.as_ref().map(|s| s[(a - e.lblk) as usize..(b - e.lblk) as usize].into()),
            };
            if e.lblk < from {
                out.push(part(e.lblk, from));
            }
            if e.end() > to {
                out.push(part(to, e.end()));
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

/// The volume.
#[derive(Debug)]
pub struct Model {
    /// Superblock.
    pub sb: SuperBlock,
    /// Where the blocks lie.
    pub store: std::sync::Arc<Store>,
    /// Owners of all groups.
    pub bat: Vec<BatEntry>,
    /// BAT pairs to write again (index).
    pub bat_dirty: Vec<usize>,
    /// Blocks of volume structures to write: device, block, content.
    pub volume_writes: Vec<(usize, u64, Vec<u8>)>,
    /// Domains by number.
    pub domains: Vec<Domain>,
    /// Inodes of all domains.
    pub inodes: Inodes,
    /// The segment tables of a domain are not those that its header tells of.
    pub tables_old: bool,
    /// Findings.
    pub log: Log,
}

impl Model {
    /// Domain that owns a node.
    pub fn domain_of(&self, node: NodeId) -> Option<u16> {
        let (group, _) = self.store.geometry.node_place(node)?;
        self.bat.get(group as usize)?.domain.map(|d| d.0)
    }

    /// An inode, whole: read again where it is not, with the entries of a directory.
    pub fn body(&mut self, node: NodeId) -> Option<&mut Ino> {
        let domain = self.domains.get(usize::from(self.domain_of(node)?))?;
        self.inodes.body(&self.store, domain, node, true)
    }

    /// Removes an inode with its overflow nodes.
    pub fn remove(&mut self, node: NodeId) {
        if self.body(node).is_none() {
            return;
        }
        let Some(ino) = self.inodes.forget(node) else { return };
        let Some(domain) = self.domains.get_mut(usize::from(ino.domain)) else { return };
        for n in ino.overflow().chain([node]) {
            domain.free_node(&self.store, n);
        }
    }

    /// Directory and name of an inode by its first link.
    fn name(&self, node: NodeId) -> Option<(NodeId, String)> {
        let shown = |links: &[Link]| links.first().map(|l| (l.parent, String::from_utf8_lossy(&l.name).into_owned()));
        if let Some(ino) = self.inodes.whole(node) {
            return shown(&ino.inode.links);
        }
        self.inodes.get(node).filter(|s| s.links() > 0)?;
        let domain = self.domains.get(usize::from(self.domain_of(node)?))?;
        shown(&nodes::load(&self.store, domain, node).ok()?.inode.links)
    }

    /// Path of an inode for messages, by its first links. `known` are names found before.
    pub fn path(&self, node: NodeId, known: &mut Names) -> Option<String> {
        let mut parts: Vec<String> = Vec::new();
        let mut at = node;
        while at != NodeId::ROOT {
            if known.0.len() > NAMES_MAX {
                known.0.clear();
            }
            let (parent, name) = known.0.entry(at).or_insert_with(|| self.name(at)).clone()?;
            parts.push(name);
            at = parent;
            if parts.len() > DEPTH_MAX {
                return None;
            }
        }
        parts.reverse();
        Some(format!("/{}", parts.join("/")))
    }
}

/// Names of inodes, for paths.
#[derive(Debug, Default)]
pub struct Names(HashMap<NodeId, Option<(NodeId, String)>>);

/// Kind of block for messages about pairs: the codes for one bad copy and for both.
pub fn pair_codes(kind: BlockKind) -> (u32, u32) {
    match kind {
        BlockKind::Bat => (codes::BAT_COPY, codes::BAT_LOST),
        BlockKind::Domain => (codes::DOMAIN_COPY, codes::DOMAIN_LOST),
        BlockKind::Group => (codes::GROUP_COPY, codes::GROUP_LOST),
        BlockKind::SegmentTable => (codes::SEGMENTS_COPY, codes::SEGMENTS_LOST),
        BlockKind::Owners => (codes::OWNERS_COPY, codes::OWNERS_LOST),
        _ => (codes::NODES_COPY, codes::NODES_LOST),
    }
}
