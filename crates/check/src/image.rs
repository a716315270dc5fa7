//! All metadata of a volume without its data, for bug reports: what [`metadata`] hands out, written to blank devices, is a
//! volume on which a check finds what it finds on this one.
//!
//! File data, inline or not, and the values of extended attributes become zeros, and their checksums those of zeros; so do the
//! values in the record that the header of a domain without a journal keeps of its root directory. Names, targets of symbolic
//! links that lie in the inode's record, sizes, owners and times stay. Journals are replayed first, in memory, as a check without
//! repair does it; what they held is then in the tables, and they are left out. Left out, too: node blocks in segments
//! whose table says that they hold data.

use crate::error::Result;
use crate::repair::prepare;
use crate::report::Finding;
use braidfs_device::{AlignedBuf, BLOCK_BYTES, Device};
use braidfs_format::block::{self, BlockHeader, BlockKind, HEADER_BYTES};
use braidfs_format::codec::Reader;
use braidfs_format::domain::{CLEAN, DomainHeader};
use braidfs_format::geometry::SEGMENT_BLOCKS;
use braidfs_format::group::{SegmentKind, SegmentTable};
use braidfs_format::inode::{Content, Inode, Xattr, decode_extents, decode_xattrs, encode_extents, encode_xattrs};
use braidfs_format::node::{NodeBlock, NodeKind, NodeRecord};
use braidfs_format::super_block::SuperBlock;
use braidfs_format::{BlockAddr, NodeId, quota};
use braidfs_store::Store;
use braidfs_store::interface::Replay;
use braidfs_store::overlay::OverlayDevice;
use braidfs_store::super_io::read_super;
use std::collections::HashMap;
use std::io;
use std::sync::Arc;

/// Takes whole blocks that are not all zero: device in the order of the volume, block, bytes.
pub type Sink<'a> = dyn FnMut(usize, u64, &[u8]) -> io::Result<()> + 'a;

/// Tables of a group.
const TABLES: [BlockKind; 4] = [BlockKind::Group, BlockKind::SegmentTable, BlockKind::Owners, BlockKind::NodeTable];

/// What is known of the volume before its blocks come.
#[derive(Debug, Clone)]
pub struct Volume {
    devices: Vec<Arc<dyn Device>>,
    sb: SuperBlock,
    /// What the replay of journals met, and mended before: a check of the image does not find it again.
    pub findings: Vec<Finding>,
    /// Traces of the crash in the journals.
    pub notes: Vec<String>,
}

/// Opens the volume on `devices`, and replays its journals in memory where it was not unmounted.
///
/// # Errors
/// No volume, a device missing, or of a device.
pub fn open(devices: &[Arc<dyn Device>], replay: &dyn Replay) -> Result<Volume> {
    let (sb, order) = read_super(devices)?;
    let mut volume = Volume { devices: order, sb, findings: Vec::new(), notes: Vec::new() };
    if volume.is_dirty() {
        let overlay = |d: &Arc<dyn Device>| Arc::new(OverlayDevice::new(Arc::clone(d))) as Arc<dyn Device>;
        volume.devices = volume.devices.iter().map(overlay).collect();
        let prepared = prepare::run(&volume.devices, replay, false)?;
        (volume.findings, volume.notes) = (prepared.log.findings, prepared.notes);
        volume.sb = read_super(&volume.devices)?.0;
    }
    Ok(volume)
}

impl Volume {
    /// Blocks of each device that the volume uses.
    pub fn device_blocks(&self) -> Vec<u64> {
        self.sb.device_table().iter().map(|d| d.blocks.get()).collect()
    }

    fn is_dirty(&self) -> bool {
        (0..self.sb.domains.get()).any(|number| {
            let at = self.sb.domain_table.get() + 2 * u64::from(number);
            let mut pair = AlignedBuf::zeroed(2 * BLOCK_BYTES);
            let read = self.devices[0].read(at, &mut pair);
            // a lost header is a finding of the image, too
            let header = read.ok().and_then(|()| DomainHeader::from_pair(&pair, self.sb.volume_id(), at, number).ok());
            header.is_some_and(|(.., h)| h.flags.get() & CLEAN == 0)
        })
    }

    /// Hands all metadata to `sink`. `progress` is called with groups done and groups.
    ///
    /// # Errors
    /// Of the sink. Blocks that cannot be read are left out.
    pub fn metadata(&self, sink: &mut Sink<'_>, progress: &dyn Fn(u64, u64)) -> Result<()> {
        let store = Store::new(self.devices.clone(), &self.sb)?;
        for (i, d) in self.sb.device_table().iter().enumerate() {
            // the tables of the volume lie before the groups of device 0
            let first = if i == 0 { d.data_start.get() } else { 1 };
            copy(self.devices[i].as_ref(), i, self.sb.volume_id(), 0..first, sink)?;
            copy(self.devices[i].as_ref(), i, self.sb.volume_id(), d.blocks.get() - 1..d.blocks.get(), sink)?;
        }
        let groups = u64::from(store.geometry().groups);
        let values = Values::find(&store, &|done| progress(done, 2 * groups));
        for group in 0..store.geometry().groups {
            progress(groups + u64::from(group), 2 * groups);
            let mut put = |addr: BlockAddr, block: &[u8]| -> Result<()> {
                let (device, at) = store.place(addr, 1)?;
                if block.iter().any(|b| *b != 0) {
                    sink(device, at, block)?;
                }
                Ok(())
            };
            for_each_block(&store, group, &mut |addr, block, table| {
                if table {
                    return put(addr, &known(block, &TABLES, store.volume, addr.0));
                }
                match blank(block, store.volume, addr, &values) {
                    Some(blanked) => put(addr, &blanked),
                    None => Ok(()),
                }
            })?;
        }
        Ok(())
    }
}

/// Copies the volume's own tables on one device. Between and behind them are blocks that nobody has written: what lies
/// there may be the content of a file of an earlier volume.
fn copy(
    device: &dyn Device,
    number: usize,
    volume: u32,
    blocks: std::ops::Range<u64>,
    sink: &mut Sink<'_>,
) -> Result<()> {
    const KINDS: [BlockKind; 3] = [BlockKind::Super, BlockKind::Domain, BlockKind::Bat];
    let mut buf = AlignedBuf::zeroed(BLOCK_BYTES);
    for at in blocks {
        if device.read(at, &mut buf).is_ok() && buf.iter().any(|b| *b != 0) {
            sink(number, at, &known(&buf, &KINDS, volume, at))?;
        }
    }
    Ok(())
}

/// Whether a block begins as one of this volume, or of one of this place. Content of a file may begin with the magic, too.
fn has_header(block: &[u8], volume: u32, addr: u64) -> bool {
    let is_own = |h: &BlockHeader| h.volume.get() == volume || h.addr.get() == addr;
    block.starts_with(&block::MAGIC.to_le_bytes()) && BlockHeader::of_block(block).is_some_and(|h| is_own(&h))
}

/// A block of a table. One that is none of `kinds` may be anything, on a device that was used before: its header alone is
/// kept, so that it does not hold in the image either.
fn known(block: &[u8], kinds: &[BlockKind], volume: u32, addr: u64) -> Vec<u8> {
    let Some(kind) = kinds.iter().find(|kind| block::open(block, **kind, volume, addr).is_ok()) else {
        return stub(block, volume, addr);
    };
    if *kind == BlockKind::Domain { domain_header(block, volume, addr) } else { block.to_vec() }
}

/// The header of a domain without values of attributes. That of one without a journal keeps the record of its root directory,
/// which has some.
fn domain_header(block: &[u8], volume: u32, addr: u64) -> Vec<u8> {
    let (Some(mut h), Ok(seal)) = (DomainHeader::of_block(block), block::open(block, BlockKind::Domain, volume, addr))
    else {
        return stub(block, volume, addr);
    };
    let kept = h.scratch_root_record();
    let mut out = vec![0; kept.len()];
    // what is no record may be anything, and becomes zeros, which are none either
    if let Ok(record) = NodeRecord::decode(&mut Reader::new(kept, "root directory of a tenant")) {
        let blanked = blank_record(record, &Values::default()).encode();
        let len = blanked.len().min(out.len());
        out[..len].copy_from_slice(&blanked[..len]);
    }
    h.keep_scratch_root(&out);
    h.to_block(volume, addr, 0, seal.seq.get())
}

/// The header of a block that does not hold, and no more of it.
fn stub(block: &[u8], volume: u32, addr: u64) -> Vec<u8> {
    let mut out = vec![0; BLOCK_BYTES];
    // its first bytes: not zero where the block was not, since a pair that was never written is no finding
    let keep = if has_header(block, volume, addr) { HEADER_BYTES } else { usize::from(block.iter().any(|b| *b != 0)) };
    out[..keep].copy_from_slice(&block[..keep]);
    if keep == 1 {
        out[0] = 0xff;
    }
    // a table without entries is zeros, and the damage may have been in them
    if keep == HEADER_BYTES && out[4..8] == block::checksum(&out).to_le_bytes() {
        out[4] ^= 1;
    }
    out
}

/// Takes a block, and whether it is one of its group's tables.
type Visit<'a> = dyn FnMut(BlockAddr, &[u8], bool) -> Result<()> + 'a;

/// Calls `f` with the blocks of a group that may hold metadata.
fn for_each_block(store: &Store, group: u32, f: &mut Visit<'_>) -> Result<()> {
    let g = store.geometry();
    let mut pair = AlignedBuf::zeroed(2 * BLOCK_BYTES);
    let addr = g.segment_table_addr(group);
    let table = store
        .read(addr, &mut pair)
        .ok()
        .and_then(|()| SegmentTable::decode(&pair, g.segments, store.volume, addr).ok());
    let mut buf = AlignedBuf::zeroed(SEGMENT_BLOCKS as usize * BLOCK_BYTES);
    let blocks = store.group_blocks(group);
    for segment in 0..g.segments {
        let first = segment * SEGMENT_BLOCKS;
        let kind = table.as_ref().and_then(|(.., entries)| entries.get(segment as usize)).map(|e| e.kind);
        // behind a journal, in its last segment, there are nodes
        let data = kind.is_some_and(|k| matches!(k, SegmentKind::Data | SegmentKind::Free));
        let end = if data { g.meta_blocks().min(first + SEGMENT_BLOCKS) } else { first + SEGMENT_BLOCKS };
        let end = end.min(blocks);
        if end <= first {
            continue;
        }
        let start = BlockAddr(g.group_start(group).0 + u64::from(first));
        let run = &mut buf[..(end - first) as usize * BLOCK_BYTES];
        if store.read(start, run).is_err() {
            run.fill(0);
            for (i, block) in (0u64..).zip(run.chunks_mut(BLOCK_BYTES)) {
                // what cannot be read stays zero
                let _ = store.read(BlockAddr(start.0 + i), block);
            }
        }
        for (i, block) in (0u32..).zip(run.chunks(BLOCK_BYTES)) {
            f(BlockAddr(start.0 + u64::from(i)), block, first + i < g.meta_blocks())?;
        }
    }
    Ok(())
}

/// A block of nodes or of a directory without data; `None` for anything else.
fn blank(block: &[u8], volume: u32, addr: BlockAddr, values: &Values) -> Option<Vec<u8>> {
    if block::open(block, BlockKind::Dir, volume, addr.0).is_ok() {
        return Some(block.to_vec());
    }
    let Ok(n) = NodeBlock::check(block, volume, addr) else {
        return has_header(block, volume, addr.0).then(|| stub(block, volume, addr.0));
    };
    let header = block::open(block, BlockKind::Node, volume, addr.0).ok()?;
    let mut out = block.to_vec();
    // count of records, and per record the offset of its end from behind the last of these
    let (ends, body) = (HEADER_BYTES + 8, HEADER_BYTES + 8 + 2 * n);
    let mut from = body;
    for index in 0..n {
        let end = body + usize::from(u16::from_le_bytes([block[ends + 2 * index], block[ends + 2 * index + 1]]));
        if end < from || end > BLOCK_BYTES {
            break;
        }
        match NodeBlock::record(block, index) {
            Ok(record) => {
                let blanked = blank_record(record, values).encode();
                let len = blanked.len().min(end - from);
                out[from..from + len].copy_from_slice(&blanked[..len]);
                // what follows the record's own length is nobody's
                out[from + len..end].fill(0);
            }
            // its kind or length does not hold: it may be anything
            Err(_) => out[from..end].fill(0),
        }
        from = end;
    }
    out[from..].fill(0);
    block::seal(&mut out, BlockKind::Node, header.domain.get(), volume, addr.0, header.seq.get());
    Some(out)
}

/// The record with zeros for data, as long as it was. What does not decode may be data: all of it becomes zeros, and does
/// not decode either.
fn blank_record(record: NodeRecord, values: &Values) -> NodeRecord {
    let len = record.payload.len();
    let payload = match record.kind {
        NodeKind::Inode => Inode::decode(&record.payload).ok().map(|i| blank_inode(i).encode()),
        NodeKind::ExtentLeaf => decode_extents(&record.payload).ok().map(|mut extents| {
            extents.iter_mut().for_each(|e| blank_sums(&mut e.sums));
            encode_extents(&extents)
        }),
        NodeKind::Xattrs => values.of(&record),
        NodeKind::ExtentIndex | NodeKind::Links => Some(record.payload.clone()),
    };
    let payload = payload.filter(|p| p.len() == len).unwrap_or_else(|| vec![0; len]);
    NodeRecord { payload, ..record }
}

fn blank_inode(mut inode: Inode) -> Inode {
    const S_IFMT: u32 = 0o170_000;
    const S_IFLNK: u32 = 0o120_000;
    match &mut inode.content {
        Content::Inline(data) if inode.mode & S_IFMT != S_IFLNK => data.fill(0),
        Content::Extents(extents) => extents.iter_mut().for_each(|e| blank_sums(&mut e.sums)),
        _ => {}
    }
    blank_values(&mut inode.xattrs);
    inode
}

/// Values of attributes as zeros, but for limits of users, groups and directories, which are metadata.
fn blank_values(xattrs: &mut [Xattr]) {
    for (_, value) in xattrs.iter_mut().filter(|(name, _)| !quota::RECORDS.contains(&&**name)) {
        *value = vec![0; value.len()].into();
    }
}

/// Checksums of blocks of zeros.
fn blank_sums(sums: &mut Option<Box<[u32]>>) {
    if let Some(sums) = sums {
        sums.fill(crc32c::crc32c(&[0; BLOCK_BYTES]));
    }
}

/// Overflow nodes with extended attributes, blanked: each has a part of the list, so that only all of them together tell
/// where the values are.
#[derive(Debug, Default)]
struct Values {
    /// Version and payload.
    parts: HashMap<NodeId, (u64, Vec<u8>)>,
}

impl Values {
    fn find(store: &Store, progress: &dyn Fn(u64)) -> Self {
        let mut lists: HashMap<NodeId, (u64, Vec<NodeId>)> = HashMap::new();
        let mut parts: HashMap<NodeId, (u64, Vec<u8>)> = HashMap::new();
        for group in 0..store.geometry().groups {
            progress(group.into());
            // the closure does not fail
            let _ = for_each_block(store, group, &mut |addr, block, table| {
                let n = if table { 0 } else { NodeBlock::check(block, store.volume, addr).unwrap_or(0) };
                for record in (0..n).filter_map(|i| NodeBlock::record(block, i).ok()) {
                    let version = record.version;
                    match record.kind {
                        NodeKind::Xattrs => newest(&mut parts, record.node, version, || record.payload),
                        NodeKind::Inode => {
                            let nodes = Inode::decode(&record.payload).map(|i| i.xattr_nodes).unwrap_or_default();
                            // most inodes have none, and are not remembered
                            if !nodes.is_empty() || lists.contains_key(&record.node) {
                                newest(&mut lists, record.node, version, || nodes);
                            }
                        }
                        _ => {}
                    }
                }
                Ok(())
            });
        }
        let mut blanked = HashMap::new();
        for (_, nodes) in lists.into_values().filter(|(_, nodes)| !nodes.is_empty()) {
            let Some(found) = nodes.iter().map(|n| parts.get(n)).collect::<Option<Vec<_>>>() else { continue };
            let whole: Vec<u8> = found.iter().flat_map(|(_, payload)| payload.iter().copied()).collect();
            let Ok(mut list) = decode_xattrs(&whole) else { continue };
            blank_values(&mut list);
            let whole = encode_xattrs(&list);
            let mut rest = whole.as_slice();
            for (node, (version, payload)) in nodes.iter().zip(found) {
                let (part, later) = rest.split_at(payload.len().min(rest.len()));
                blanked.insert(*node, (*version, part.to_vec()));
                rest = later;
            }
        }
        Self { parts: blanked }
    }

    /// `None` for a part of an older list, which nothing names.
    fn of(&self, record: &NodeRecord) -> Option<Vec<u8>> {
        self.parts.get(&record.node).filter(|(version, _)| *version == record.version).map(|(_, part)| part.clone())
    }
}

/// Keeps what has the highest version.
fn newest<T>(map: &mut HashMap<NodeId, (u64, T)>, node: NodeId, version: u64, what: impl FnOnce() -> T) {
    if map.get(&node).is_none_or(|(known, _)| *known <= version) {
        map.insert(node, (version, what()));
    }
}
