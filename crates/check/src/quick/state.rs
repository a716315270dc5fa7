//! What the threads of the quick pass share, and what they add up.

use super::multiset::{Keys, MultisetHash};
use crate::model::Model;
use crate::parts::domain::is_data;
use crate::report::{Bad, FsckReport, Log};
use crate::rules::Rules;
use braidfs_format::node::NodeEntry;
use braidfs_format::{BlockAddr, NodeId};
use braidfs_store::Store;
use braidfs_sync::plain::Mutex;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64};

/// What a volume that holds consists of.
#[derive(Debug, Default)]
pub struct Outcome {
    /// The counts; findings: data that is not what was written. All else holds.
    pub report: FsckReport,
    /// Data blocks compared.
    pub data_checked: u64,
    /// Data blocks without a checksum.
    pub data_unchecked: u64,
}

/// Why the volume may not hold.
#[derive(Debug)]
pub struct Doubt(pub String);

impl From<Bad> for Doubt {
    fn from(b: Bad) -> Self {
        Self(format!("E{}: {}", b.code, b.why))
    }
}

/// Leaves it to the full pass.
///
/// # Errors
/// Always: the doubt.
pub fn doubt<T>(why: impl Into<String>) -> Result<T, Doubt> {
    Err(Doubt(why.into()))
}

/// Leaves it to the full pass where a rule has found something.
///
/// # Errors
/// The first finding.
pub fn nothing_found(log: &Log) -> Result<(), Doubt> {
    match log.findings.first() {
        Some(f) => doubt(format!("E{}: {}", f.code, f.message)),
        None => Ok(()),
    }
}

/// A node in use, packed: address of its record's block (48 bits), index, flags; generation; number; when its block was
/// written. 24 bytes.
#[derive(Clone, Copy)]
pub struct Slot([u32; 6]);

impl Slot {
    /// The table entry `e` of `node`.
    pub fn new(node: NodeId, e: &NodeEntry) -> Self {
        let high = (e.addr.0 >> 32) as u32 & 0xffff | u32::from(e.index) << 16 | u32::from(e.flags) << 24;
        Self([e.addr.0 as u32, high, e.generation, node.0 as u32, (node.0 >> 32) as u32, e.written])
    }
    pub fn addr(&self) -> u64 {
        u64::from(self.0[0]) | u64::from(self.0[1] & 0xffff) << 32
    }
    pub fn index(&self) -> u8 {
        (self.0[1] >> 16) as u8
    }
    pub fn flags(&self) -> u8 {
        (self.0[1] >> 24) as u8
    }
    pub fn entry(&self) -> NodeEntry {
        let (addr, generation, written) = (BlockAddr(self.addr()), self.0[2], self.0[5]);
        NodeEntry { addr, index: self.index(), flags: self.flags(), generation, written }
    }
    pub fn node(&self) -> NodeId {
        NodeId(u64::from(self.0[3]) | u64::from(self.0[4]) << 32)
    }
    /// Its place in the order of the device.
    pub fn key(&self) -> u64 {
        self.addr() << 8 | u64::from(self.index())
    }
}

/// An overflow node, to be claimed by one inode.
pub struct OverflowNode {
    pub node: u64,
    pub entry: NodeEntry,
    pub taken: AtomicBool,
}

/// What stays of a group.
pub struct GroupBitmap {
    pub number: u32,
    pub domain: u16,
    pub blocks: u32,
    /// Valid blocks that nothing has claimed yet, by words of the group.
    pub left: Box<[AtomicU64]>,
}

/// What all threads share.
pub struct Ctx<'a> {
    pub m: &'a Model,
    pub store: &'a Store,
    pub rules: Rules,
    pub keys: Keys,
    pub data: bool,
    pub threads: usize,
    /// The groups with an owner.
    pub claimed: Vec<u32>,
    /// Blocks in use, one map per block group.
    pub bitmaps: Vec<OnceLock<GroupBitmap>>,
    /// By domain: first block and blocks of the journal.
    pub journals: Vec<(u64, u64)>,
    /// Overflow nodes by number.
    pub overflow_nodes: Vec<OverflowNode>,
    /// Blocks ticked off, for the progress.
    pub done: AtomicU64,
}

impl Ctx<'_> {
    /// The group of `addr`, where `len` blocks from there are data blocks of `domain`.
    pub fn bitmap(&self, domain: u16, addr: BlockAddr, len: u64) -> Option<&GroupBitmap> {
        let g = self.store.geometry();
        let bitmap = self.bitmaps.get(g.group_of(addr) as usize)?.get()?;
        let journal = self.journals.get(usize::from(domain)).copied()?;
        (bitmap.domain == domain && is_data(g, addr, len, bitmap.blocks, Some(journal))).then_some(bitmap)
    }

    /// Domain that owns a node.
    pub fn domain_of(&self, node: impl Into<NodeId>) -> Option<u16> {
        let (group, _) = self.store.geometry().node_place(node)?;
        self.m.bat.get(group as usize)?.domain.map(|d| d.0)
    }
}

/// What the tables of the groups say.
#[derive(Default)]
pub struct TableTotals {
    pub overflow_nodes: Vec<OverflowNode>,
    /// Blocks as the owner tables have them.
    pub owners: MultisetHash,
    /// Blocks that the segment tables have as valid.
    pub valid: u64,
}

/// Lists of inodes, one per domain.
pub type Lists = Vec<Mutex<Vec<Slot>>>;

/// Empty lists with room for what `of_group` says of each of their groups, at most for `most`: a list that grew would
/// be in memory twice, and room that is not used takes none.
pub fn lists(cx: &Ctx<'_>, of_group: impl Fn(u32) -> u64, most: u64) -> Lists {
    let mut room = vec![0u64; cx.m.domains.len()];
    for (group, e) in (0u32..).zip(&cx.m.bat) {
        if let Some(n) = e.domain.and_then(|d| room.get_mut(usize::from(d.0))) {
            *n += of_group(group);
        }
    }
    room.into_iter().map(|n| Mutex::new(Vec::with_capacity(n.min(most) as usize))).collect()
}

/// Appends to the list of `domain`.
///
/// # Errors
/// There is no such domain.
pub fn add(lists: &Lists, domain: u16, slots: &[Slot]) -> Result<(), Doubt> {
    match lists.get(usize::from(domain)) {
        Some(list) => list.lock().extend_from_slice(slots),
        None => return doubt(format!("domain {domain} does not exist")),
    }
    Ok(())
}
