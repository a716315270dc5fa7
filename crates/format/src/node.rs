//! The node table and the packed node blocks.
//!
//! A node table entry says where the newest durable copy of a node lies: a block of node records and the
//! record's index in it. Records are written out of place; several small ones share a block (braidfs packs
//! them where F2FS and Max spend a 4 KiB page on each inode).

use crate::block::{BlockHeader, BlockKind, HEADER_BYTES, open, open_pair, seal};
use crate::codec::{Put, Reader};
use crate::geometry::NODES_PER_BLOCK;
use crate::{BLOCK_BYTES, BlockAddr, COUNTER_MAX, Corrupt, InodeNo, NodeId};
use std::cmp::Ordering;

/// Entry is in use.
pub const USED: u8 = 1;
/// Inode with a parent directory in another domain.
pub const REMOTE: u8 = 2;
/// Not an inode but an overflow node of one.
pub const OVERFLOW: u8 = 4;
/// Inode of a directory.
pub const DIR: u8 = 8;
/// A repair found the record in a node block, since the block of the node table was lost, and has not ended: it may have been
/// deleted, and what it names may be others' by now. In node tables alone, while a journal is replayed for a check.
pub const FOUND: u8 = 16;

/// Where the newest durable copy of a node lies. 18 bytes, not 24: programs keep tables of millions in memory. Of fields longer
/// than two bytes no references can be taken: `{ entry.addr }` copies one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C, packed(2))]
pub struct NodeEntry {
    /// The node block.
    pub addr: BlockAddr,
    /// Index of the record in it.
    pub index: u8,
    /// [`USED`], [`REMOTE`], [`OVERFLOW`], [`DIR`], [`FOUND`].
    pub flags: u8,
    /// Generation of the node in this slot; of a free slot, the last one used.
    pub generation: u32,
    /// Low half of the number of the transaction that wrote the node block ([`NodeBlock::written`]); 0 where it is not known,
    /// as in entries by programs that did not keep it, and in free slots.
    pub written: u32,
}

impl NodeEntry {
    /// Whether the slot holds a node.
    pub fn used(&self) -> bool {
        self.flags & USED != 0
    }
    /// Whether both say the same of the node, where one of them may not know when its block was written.
    pub fn is_same_record(&self, other: &Self) -> bool {
        Self { written: 0, ..*self } == Self { written: 0, ..*other }
    }
    /// How the node block `block`, found where the entry says, compares with the one that the entry is about: `Less` where it
    /// is an older one, so that a write of the block was lost; `Greater` where it is a newer one, so that a write of the node
    /// table was. `Equal` also where the entry does not know.
    pub fn compare_block(&self, block: &[u8]) -> Ordering {
        self.compare_written(NodeBlock::written(block))
    }
    /// As [`Self::compare_block`], by when the block was written ([`NodeBlock::written`]).
    pub fn compare_written(&self, found: u32) -> Ordering {
        match self.written {
            0 => Ordering::Equal,
            // the numbers wrap: of two, the later one is less than half a round ahead
            written => (found.wrapping_sub(written) as i32).cmp(&0),
        }
    }
}

const ENTRY_BYTES: usize = 16;

/// One block of a group's node table, in a shadow pair.
pub struct NodeTableBlock;

impl NodeTableBlock {
    /// The sealed block with [`NODES_PER_BLOCK`] entries.
    pub fn encode(entries: &[NodeEntry], domain: u16, volume: u32, pair: BlockAddr, copy: usize, seq: u64) -> Vec<u8> {
        assert_eq!(entries.len(), NODES_PER_BLOCK as usize);
        let mut b = vec![0u8; BLOCK_BYTES];
        for (e, to) in entries.iter().zip(b[HEADER_BYTES..].chunks_exact_mut(ENTRY_BYTES)) {
            to[..6].copy_from_slice(&{ e.addr }.0.to_le_bytes()[..6]);
            (to[6], to[7]) = (e.index, e.flags);
            to[8..12].copy_from_slice(&{ e.generation }.to_le_bytes());
            to[12..].copy_from_slice(&{ e.written }.to_le_bytes());
        }
        seal(&mut b, BlockKind::NodeTable, domain, volume, pair.0 + copy as u64, seq);
        b
    }
    /// Decodes the pair at `pair`.
    ///
    /// # Errors
    /// [`Corrupt`] where no copy holds.
    pub fn decode(buf: &[u8], volume: u32, pair: BlockAddr) -> Result<(usize, u64, Vec<NodeEntry>), Corrupt> {
        let (copy, h) = open_pair(buf, BlockKind::NodeTable, volume, pair.0)?;
        let mut r = Reader::new(&buf[copy * BLOCK_BYTES + HEADER_BYTES..(copy + 1) * BLOCK_BYTES], "node table");
        let mut out = Vec::with_capacity(NODES_PER_BLOCK as usize);
        for _ in 0..NODES_PER_BLOCK {
            let (addr, index, flags) = (BlockAddr(r.u48()?), r.u8()?, r.u8()?);
            out.push(NodeEntry { addr, index, flags, generation: r.u32()?, written: r.u32()? });
        }
        Ok((copy, h.seq.get(), out))
    }
}

/// What a node record holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum NodeKind {
    /// An inode, with what fits into it: [`crate::inode::Inode`].
    Inode = 1,
    /// Extents of a file or buckets of a directory.
    ExtentLeaf = 2,
    /// (first logical block, leaf node) pairs.
    ExtentIndex = 3,
    /// Part of an inode's encoded extended attributes.
    Xattrs = 4,
    /// Part of an inode's encoded links.
    Links = 5,
}

impl NodeKind {
    /// # Errors
    /// Where `v` is no kind.
    pub fn from_u8(v: u8) -> Result<Self, Corrupt> {
        Ok(match v {
            1 => Self::Inode,
            2 => Self::ExtentLeaf,
            3 => Self::ExtentIndex,
            4 => Self::Xattrs,
            5 => Self::Links,
            _ => return Err(Corrupt::new("node record", format!("kind {v}"))),
        })
    }
}

/// Bytes before the payload of a record.
pub const RECORD_HEADER_BYTES: usize = 32;
/// Block header, record count.
const BODY_START: usize = HEADER_BYTES + 8;
/// Longest record, its header included: it has a block of its own, with one offset.
pub const RECORD_MAX: usize = BLOCK_BYTES - BODY_START - 2;
/// Longest payload of a record.
pub const PAYLOAD_MAX: usize = RECORD_MAX - RECORD_HEADER_BYTES;
/// Most records in a block.
pub const RECORDS_MAX: usize = 64;

/// One node as it is written to a node block or a roll-forward chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeRecord {
    /// Number of the node that this is the record of.
    pub node: NodeId,
    /// Generation of the slot.
    pub generation: u32,
    /// What the payload is.
    pub kind: NodeKind,
    /// Flags of the node table entry ([`USED`] and so on).
    pub flags: u8,
    /// The inode that an overflow node belongs to; for an inode itself.
    pub owner: InodeNo,
    /// Rises with each change of the inode; of two records of a node the higher version is the newer.
    pub version: u64,
    /// The encoded content.
    pub payload: Vec<u8>,
}

impl NodeRecord {
    /// Header and payload.
    ///
    /// # Panics
    /// Where the payload is longer than [`PAYLOAD_MAX`] (a bug of ours).
    pub fn encode(&self) -> Vec<u8> {
        let mut v = Vec::with_capacity(RECORD_HEADER_BYTES + self.payload.len());
        self.encode_to(&mut v);
        v
    }
    /// Appends the encoded record.
    ///
    /// # Panics
    /// As [`Self::encode`].
    pub fn encode_to(&self, v: &mut Vec<u8>) {
        assert!(self.payload.len() <= PAYLOAD_MAX, "{} bytes in a node record", self.payload.len());
        v.put_u64(self.node.0);
        v.put_u64(self.owner.0);
        v.put_u64(self.version);
        v.put_u32(self.generation);
        v.put_u16(self.payload.len() as u16);
        v.put_u8(self.kind as u8);
        v.put_u8(self.flags);
        v.extend_from_slice(&self.payload);
    }
    /// # Errors
    /// [`Corrupt`] where the bytes end early or the kind is none.
    pub fn decode(r: &mut Reader<'_>) -> Result<Self, Corrupt> {
        NodeRecordRef::decode(r).map(|r| r.to_owned())
    }
}

/// A [`NodeRecord`] whose payload lies where it was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeRecordRef<'a> {
    /// Number of the node that this is the record of.
    pub node: NodeId,
    /// Generation of the slot.
    pub generation: u32,
    /// What the payload is.
    pub kind: NodeKind,
    /// Flags of the node table entry ([`USED`] and so on).
    pub flags: u8,
    /// The inode that an overflow node belongs to; for an inode itself.
    pub owner: InodeNo,
    /// As [`NodeRecord::version`].
    pub version: u64,
    /// The encoded content.
    pub payload: &'a [u8],
}

impl<'a> NodeRecordRef<'a> {
    /// # Errors
    /// [`Corrupt`] where the bytes end early or the kind is none.
    pub fn decode(r: &mut Reader<'a>) -> Result<Self, Corrupt> {
        let node = NodeId(r.u64()?);
        let owner = InodeNo(r.u64()?);
        let version = r.u64()?;
        let generation = r.u32()?;
        let len = usize::from(r.u16()?);
        let kind = NodeKind::from_u8(r.u8()?)?;
        let flags = r.u8()?;
        if len > PAYLOAD_MAX {
            return Err(r.bad(format!("payload of {len} bytes")));
        }
        if version > COUNTER_MAX {
            return Err(r.bad(format!("version {version}")));
        }
        Ok(Self { node, generation, kind, flags, owner, version, payload: r.bytes(len)? })
    }

    /// The same, with a payload of its own.
    pub fn to_owned(&self) -> NodeRecord {
        let Self { node, generation, kind, flags, owner, version, payload } = *self;
        NodeRecord { node, generation, kind, flags, owner, version, payload: payload.to_vec() }
    }
}

/// Packs records into one block; [`NodeBlockBuilder::push`] says when it is full.
#[derive(Debug, Default)]
pub struct NodeBlockBuilder {
    body: Vec<u8>,
    ends: Vec<u16>,
}

impl NodeBlockBuilder {
    /// Adds an encoded record; its index in the block, or `None` where it no longer fits.
    pub fn push(&mut self, record: &[u8]) -> Option<u8> {
        self.has_room(record.len()).then(|| self.add(|body| body.extend_from_slice(record)))
    }
    /// [`Self::push`] of a record that is encoded where there is room for it.
    pub fn push_record(&mut self, record: &NodeRecord) -> Option<u8> {
        self.has_room(RECORD_HEADER_BYTES + record.payload.len()).then(|| self.add(|body| record.encode_to(body)))
    }
    fn has_room(&self, bytes: usize) -> bool {
        let need = BODY_START + 2 * (self.ends.len() + 1) + self.body.len() + bytes;
        need <= BLOCK_BYTES && self.ends.len() < RECORDS_MAX
    }
    fn add(&mut self, encode: impl FnOnce(&mut Vec<u8>)) -> u8 {
        self.body.reserve(BLOCK_BYTES - self.body.len());
        encode(&mut self.body);
        self.ends.push(self.body.len() as u16);
        (self.ends.len() - 1) as u8
    }
    /// Records so far.
    pub fn len(&self) -> usize {
        self.ends.len()
    }
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }
    /// The sealed block for `addr`; the builder is empty afterwards.
    pub fn finish(&mut self, domain: u16, volume: u32, addr: BlockAddr, seq: u64) -> Vec<u8> {
        let mut b = vec![0u8; BLOCK_BYTES];
        b[HEADER_BYTES..HEADER_BYTES + 2].copy_from_slice(&(self.ends.len() as u16).to_le_bytes());
        for (i, e) in self.ends.iter().enumerate() {
            b[BODY_START + 2 * i..][..2].copy_from_slice(&e.to_le_bytes());
        }
        let at = BODY_START + 2 * self.ends.len();
        b[at..at + self.body.len()].copy_from_slice(&self.body);
        seal(&mut b, BlockKind::Node, domain, volume, addr.0, seq);
        self.body.clear();
        self.ends.clear();
        b
    }
}

/// Records of a node block, decoded one by one.
pub struct NodeBlock;

impl NodeBlock {
    /// Checks the block's header; the number of its records.
    ///
    /// # Errors
    /// [`Corrupt`].
    pub fn check(block: &[u8], volume: u32, addr: BlockAddr) -> Result<usize, Corrupt> {
        open(block, BlockKind::Node, volume, addr.0)?;
        let n = usize::from(u16::from_le_bytes([block[HEADER_BYTES], block[HEADER_BYTES + 1]]));
        if n > RECORDS_MAX {
            return Err(Corrupt::new("node block", format!("{n} records at {addr}")));
        }
        Ok(n)
    }
    /// Number of the transaction that wrote a block of [`BLOCK_BYTES`]: what its header says.
    pub fn transaction(block: &[u8]) -> u64 {
        const SEQ: usize = std::mem::offset_of!(BlockHeader, seq);
        block[SEQ..SEQ + 8].try_into().map_or(0, u64::from_le_bytes)
    }
    /// Low half of the number of the transaction that wrote a block of [`BLOCK_BYTES`]: what its header says.
    pub fn written(block: &[u8]) -> u32 {
        Self::transaction(block) as u32
    }
    /// Record `index` of a block that [`Self::check`] accepted.
    ///
    /// # Errors
    /// [`Corrupt`] where there is no such record.
    pub fn record(block: &[u8], index: usize) -> Result<NodeRecord, Corrupt> {
        let n = usize::from(u16::from_le_bytes([block[HEADER_BYTES], block[HEADER_BYTES + 1]]));
        let bad = |why: String| Corrupt::new("node block", why);
        if n > RECORDS_MAX || index >= n {
            return Err(bad(format!("no record {index} of {n}")));
        }
        let end =
            |i: usize| usize::from(u16::from_le_bytes([block[BODY_START + 2 * i], block[BODY_START + 2 * i + 1]]));
        let body = &block[BODY_START + 2 * n..];
        let (from, to) = (if index == 0 { 0 } else { end(index - 1) }, end(index));
        if from > to || to > body.len() {
            return Err(bad(format!("record {index} from {from} to {to}")));
        }
        NodeRecord::decode(&mut Reader::new(&body[from..to], "node record"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rec(i: u64, n: usize) -> NodeRecord {
        NodeRecord {
            node: NodeId(i),
            generation: 3,
            kind: NodeKind::Inode,
            flags: USED,
            owner: InodeNo(i),
            version: 9,
            payload: vec![i as u8; n],
        }
    }

    /// A block of a past or coming transaction is told from the one that an entry is about, also where the low half of the
    /// numbers wraps. An entry that does not know takes any.
    #[test]
    fn a_block_is_older_or_newer_than_its_entry() {
        let block = |tx: u64| {
            let mut b = NodeBlockBuilder::default();
            b.push(&rec(1, 10).encode()).unwrap();
            b.finish(0, 1, BlockAddr(9), tx)
        };
        let entry = |written| NodeEntry { addr: BlockAddr(9), index: 0, flags: USED, generation: 3, written };
        let high = 7 << 32;
        assert_eq!(NodeBlock::written(&block(high + 5)), 5);
        for (tx, written, want) in [
            (high + 5, 5, Ordering::Equal),
            (high + 4, 5, Ordering::Less),
            (high + 6, 5, Ordering::Greater),
            (high - 1, 1, Ordering::Less),
            (high + 1, u32::MAX, Ordering::Greater),
            (high, 1, Ordering::Less),
            (high + 4, 0, Ordering::Equal),
        ] {
            assert_eq!(entry(written).compare_block(&block(tx)), want, "{tx:#x} and {written:#x}");
        }
        assert!(entry(5).is_same_record(&entry(0)) && entry(5) != entry(0));
        assert!(!entry(5).is_same_record(&NodeEntry { index: 1, ..entry(5) }));
        assert_eq!(size_of::<NodeEntry>(), 18);
    }

    #[test]
    fn packs_and_reads_back() {
        let mut b = NodeBlockBuilder::default();
        let mut n = 0;
        while b.push(&rec(n, 150).encode()).is_some() {
            n += 1;
        }
        assert!(n >= 20, "{n}");
        let block = b.finish(1, 77, BlockAddr(5), 1);
        assert_eq!(NodeBlock::check(&block, 77, BlockAddr(5)).unwrap(), n as usize);
        for i in 0..n {
            assert_eq!(NodeBlock::record(&block, i as usize).unwrap(), rec(i, 150));
        }
        assert!(NodeBlock::record(&block, n as usize).is_err());
        assert!(NodeBlock::check(&block, 77, BlockAddr(6)).is_err());
        assert!(NodeBlock::check(&block, 78, BlockAddr(5)).is_err());
        assert!(b.push(&rec(1, PAYLOAD_MAX).encode()).is_some());
        assert!(b.push(&rec(1, 0).encode()).is_none());
    }
}
