//! A block group: header, segment table, owner tables.
//!
//! A device may confirm a write and lose it; then the older copy of a shadow pair is whole, and looks like the newest. So
//! the segment table of a group says how often each other table of the group was written ([`Written`]), and the domain
//! header has a sum over the segment tables ([`table_mark`]). Both tell of the last checkpoint that ended: its header is
//! written after everything else is flushed, and tables of a later checkpoint say so by its number.

use crate::block::{BlockHeader, BlockKind, HEADER_BYTES, open, open_pair, seal};
use crate::geometry::{GROUP_SEGMENTS, NODE_BLOCKS_PER_SEGMENT, SEGMENT_BLOCKS};
use crate::{BLOCK_BYTES, BlockAddr, COUNTER_MAX, Corrupt, InodeNo};
use std::ops::Range;
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// What a segment is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(u8)]
pub enum SegmentKind {
    /// No valid block.
    #[default]
    Free = 0,
    /// Content of files.
    Data = 1,
    /// Node blocks and directory buckets.
    Node = 2,
    /// The domain's journal.
    Journal = 3,
    /// Past the end of a short group.
    Absent = 4,
}

/// How soon the blocks of a segment are expected to be rewritten.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, PartialOrd, Ord)]
#[repr(u8)]
pub enum Temperature {
    /// Node blocks, directories, files rewritten often.
    Hot = 0,
    /// Data of all other files.
    #[default]
    Warm = 1,
    /// Data moved by the cleaner, large sequential files.
    Cold = 2,
}

impl SegmentKind {
    /// # Errors
    /// Where `v` is no kind.
    pub fn from_u8(v: u8) -> Result<Self, Corrupt> {
        Ok(match v {
            0 => Self::Free,
            1 => Self::Data,
            2 => Self::Node,
            3 => Self::Journal,
            4 => Self::Absent,
            _ => return Err(Corrupt::new("segment kind", v.to_string())),
        })
    }
}
impl Temperature {
    /// # Errors
    /// Where `v` is no temperature.
    pub fn from_u8(v: u8) -> Result<Self, Corrupt> {
        Ok(match v {
            0 => Self::Hot,
            1 => Self::Warm,
            2 => Self::Cold,
            _ => return Err(Corrupt::new("temperature", v.to_string())),
        })
    }
}

/// First block of a group.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct GroupHeader {
    /// Magic, kind, place, number and checksum, which [`crate::block`] sets when all else is there.
    pub header: BlockHeader,
    /// The group's own number.
    pub group: U32,
    /// Blocks of the group.
    pub blocks: U32,
    /// Epoch of the claim in the BAT that initialised it.
    pub epoch: U32,
    /// Number of the domain that owns it.
    pub domain: U16,
    /// Unused, written as 0.
    pub reserved0: U16,
    /// Unused, written as 0.
    pub reserved: [u8; 4048],
}
const _: () = assert!(size_of::<GroupHeader>() == BLOCK_BYTES);

impl GroupHeader {
    /// Of a group of `blocks` blocks that `domain` claimed in `epoch`.
    pub fn new(group: u32, blocks: u32, epoch: u32, domain: u16) -> Self {
        let mut h = Self::new_zeroed();
        h.group = group.into();
        h.blocks = blocks.into();
        h.epoch = epoch.into();
        h.domain = domain.into();
        h
    }
    /// The sealed block, copy `copy` of the pair at `pair`.
    pub fn to_block(&self, volume: u32, pair: BlockAddr, copy: usize, seq: u64) -> Vec<u8> {
        let mut b = self.as_bytes().to_vec();
        seal(&mut b, BlockKind::Group, self.domain.get(), volume, pair.0 + copy as u64, seq);
        b
    }
    /// Decodes the pair at `pair`.
    ///
    /// # Errors
    /// [`Corrupt`] where no copy holds.
    pub fn from_pair(buf: &[u8], volume: u32, pair: BlockAddr) -> Result<(usize, u64, Self), Corrupt> {
        let (copy, h) = open_pair(buf, BlockKind::Group, volume, pair.0)?;
        let s = Self::read_from_bytes(&buf[copy * BLOCK_BYTES..(copy + 1) * BLOCK_BYTES])
            .map_err(|_| Corrupt::new("group header", "too short"))?;
        Ok((copy, h.seq.get(), s))
    }
}

/// State of one segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentEntry {
    /// What its blocks hold; free where they hold nothing.
    pub kind: SegmentKind,
    /// Temperature of the log that filled it.
    pub temperature: Temperature,
    /// Transaction that last wrote to it: its age for the cleaner.
    pub age: u64,
    /// Bit `i`: block `i` holds something valid.
    pub valid: [u64; 8],
}

impl Default for SegmentEntry {
    fn default() -> Self {
        Self { kind: SegmentKind::Free, temperature: Temperature::Warm, age: 0, valid: [0; 8] }
    }
}

impl SegmentEntry {
    /// How many of its blocks are valid.
    pub fn valid_count(&self) -> u32 {
        self.valid.iter().map(|w| w.count_ones()).sum()
    }
    /// Whether block `i` is valid.
    pub fn is_valid(&self, i: u32) -> bool {
        self.valid[(i / 64) as usize] >> (i % 64) & 1 == 1
    }
    /// Marks block `i`.
    pub fn set(&mut self, i: u32, on: bool) {
        let bit = 1u64 << (i % 64);
        if on {
            self.valid[(i / 64) as usize] |= bit;
        } else {
            self.valid[(i / 64) as usize] &= !bit;
        }
    }
}

const SEGMENT_ENTRY_BYTES: usize = 80;

/// Where [`Written`] stands in a segment table: behind the entries of the largest group.
const WRITTEN_AT: usize = HEADER_BYTES + *GROUP_SEGMENTS.end() as usize * SEGMENT_ENTRY_BYTES;
const _: () = assert!(WRITTEN_AT + 8 + 4 * tables_of(*GROUP_SEGMENTS.end()) as usize <= BLOCK_BYTES);

/// How often the tables of a group were written when its segment table was.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Written {
    /// The checkpoint that wrote the segment table; 0: mkfs, or the claim of the group.
    pub checkpoint: u64,
    /// Per pair of [`crate::Geometry::owners_index`] and [`crate::Geometry::node_table_index`] the low half of its `seq`.
    pub counts: Vec<u32>,
}

/// Pairs of a group of `segments` that are counted: owner tables and node table.
const fn tables_of(segments: u32) -> u32 {
    (2 + NODE_BLOCKS_PER_SEGMENT) * segments
}

impl Written {
    /// Nothing was written since the claim of a group of `segments`.
    pub fn blank(segments: u32) -> Self {
        Self { checkpoint: 0, counts: vec![0; tables_of(segments) as usize] }
    }
}

/// The `seq` that a claim with `epoch` gives the tables of its group; the low half counts writes.
pub fn claim_seq(epoch: u32) -> u64 {
    u64::from(epoch) << 32
}

/// Mixes the bits of a number (the finaliser of splitmix64).
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// What the segment table of `group` adds to the sum in the domain header when it was last written as `seq`. One that was
/// not written since the claim adds nothing, so that a claim changes no sum.
pub fn table_mark(group: u32, seq: u64) -> u64 {
    if seq as u32 == 0 { 0 } else { mix(mix(u64::from(group) + 1) ^ seq) }
}

/// Sum of the marks of segment tables (group, `seq`).
pub fn table_sum(tables: &[(u32, u64)]) -> u64 {
    tables.iter().fold(0, |s, (g, seq)| s.wrapping_add(table_mark(*g, *seq)))
}

/// The group whose segment table, written once more, would make the sum of `tables` (group, `seq`) equal to `sum`: where
/// the device lost one write, that of its table.
pub fn lost_table(tables: &[(u32, u64)], sum: u64) -> Option<u32> {
    let is = table_sum(tables);
    let lost = |(g, seq): &&(u32, u64)| {
        is.wrapping_sub(table_mark(*g, *seq)).wrapping_add(table_mark(*g, seq.wrapping_add(1))) == sum
    };
    tables.iter().find(lost).map(|(g, _)| *g)
}

/// A segment table, as one of its copies has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segments {
    /// Which of the two copies holds and is the newest, 0 or 1.
    pub copy: usize,
    /// Sequence number of that copy; the next write has a higher one.
    pub seq: u64,
    /// In the order of the segments in the group.
    pub entries: Vec<SegmentEntry>,
    /// How often the other tables of the group were written.
    pub written: Written,
    /// The other copy holds, and is of a checkpoint that did not end; or this one is.
    pub unfinished: bool,
}

/// All segments of a group, one block in a shadow pair.
pub struct SegmentTable;

impl SegmentTable {
    /// The sealed block.
    ///
    /// # Panics
    /// Where there are more segments or counts than a group has.
    pub fn encode(
        segs: &[SegmentEntry],
        written: &Written,
        domain: u16,
        volume: u32,
        pair: BlockAddr,
        copy: usize,
        seq: u64,
    ) -> Vec<u8> {
        let mut b = vec![0u8; BLOCK_BYTES];
        assert!(segs.len() <= *GROUP_SEGMENTS.end() as usize);
        b[WRITTEN_AT..WRITTEN_AT + 8].copy_from_slice(&written.checkpoint.to_le_bytes());
        for (c, to) in written.counts.iter().zip(b[WRITTEN_AT + 8..].chunks_exact_mut(4)) {
            to.copy_from_slice(&c.to_le_bytes());
        }
        for (i, s) in segs.iter().enumerate() {
            let e = &mut b[HEADER_BYTES + i * SEGMENT_ENTRY_BYTES..][..SEGMENT_ENTRY_BYTES];
            e[0] = s.kind as u8;
            e[1] = s.temperature as u8;
            e[8..16].copy_from_slice(&s.age.to_le_bytes());
            for (w, v) in s.valid.iter().enumerate() {
                e[16 + 8 * w..24 + 8 * w].copy_from_slice(&v.to_le_bytes());
            }
        }
        seal(&mut b, BlockKind::SegmentTable, domain, volume, pair.0 + copy as u64, seq);
        b
    }
    /// Decodes `segments` entries of the pair at `pair`.
    ///
    /// # Errors
    /// [`Corrupt`] where no copy holds.
    pub fn decode(
        buf: &[u8],
        segments: u32,
        volume: u32,
        pair: BlockAddr,
    ) -> Result<(usize, u64, Vec<SegmentEntry>), Corrupt> {
        Self::decode_upto(buf, segments, volume, pair, u64::MAX).map(|t| (t.copy, t.seq, t.entries))
    }

    /// As [`Self::decode`]: the newest copy of the checkpoint `upto` or an earlier one, where there is such a copy.
    ///
    /// # Errors
    /// [`Corrupt`] where no copy holds.
    pub fn decode_upto(
        buf: &[u8],
        segments: u32,
        volume: u32,
        pair: BlockAddr,
        upto: u64,
    ) -> Result<Segments, Corrupt> {
        let (newest, newest_header) = open_pair(buf, BlockKind::SegmentTable, volume, pair.0)?;
        let (mut copy, mut seq) = (newest, newest_header.seq.get());
        let unfinished = checkpoint_of(&buf[copy * BLOCK_BYTES..]) > upto;
        if unfinished {
            let other = &buf[(1 - newest) * BLOCK_BYTES..(2 - newest) * BLOCK_BYTES];
            let older = open(other, BlockKind::SegmentTable, volume, pair.0 + 1 - newest as u64);
            if let Some(h) = older.ok().filter(|_| checkpoint_of(other) <= upto) {
                (copy, seq) = (1 - newest, h.seq.get());
            }
        }
        let checkpoint = checkpoint_of(&buf[copy * BLOCK_BYTES..]);
        if checkpoint > COUNTER_MAX {
            return Err(Corrupt::new("segment table", format!("{pair}: is of checkpoint {checkpoint}")));
        }
        let (entries, written) = Self::body(&buf[copy * BLOCK_BYTES..(copy + 1) * BLOCK_BYTES], segments)?;
        Ok(Segments { copy, seq, entries, written, unfinished })
    }

    fn body(b: &[u8], segments: u32) -> Result<(Vec<SegmentEntry>, Written), Corrupt> {
        let mut out = Vec::with_capacity(segments as usize);
        for i in 0..segments as usize {
            let e = &b[HEADER_BYTES + i * SEGMENT_ENTRY_BYTES..][..SEGMENT_ENTRY_BYTES];
            let word = |at: usize| u64::from_le_bytes(e[at..at + 8].try_into().unwrap_or_default());
            let mut valid = [0; 8];
            for (w, v) in valid.iter_mut().enumerate() {
                *v = word(16 + 8 * w);
            }
            out.push(SegmentEntry {
                kind: SegmentKind::from_u8(e[0])?,
                temperature: Temperature::from_u8(e[1])?,
                age: word(8),
                valid,
            });
        }
        let counts = b[WRITTEN_AT + 8..].chunks_exact(4).take(tables_of(segments) as usize);
        let counts = counts.map(|c| u32::from_le_bytes(c.try_into().unwrap_or_default())).collect();
        Ok((out, Written { checkpoint: checkpoint_of(b), counts }))
    }
}

fn checkpoint_of(table: &[u8]) -> u64 {
    u64::from_le_bytes(table[WRITTEN_AT..WRITTEN_AT + 8].try_into().unwrap_or_default())
}

/// Blocks that half an owner table describes.
pub const OWNERS_PER_BLOCK: u32 = SEGMENT_BLOCKS / 2;

/// The birth of all blocks of a volume that never had a snapshot.
pub const NO_SNAPSHOT: u32 = 0;

/// Who uses a block: what the cleaner needs to move it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Owner {
    /// The inode whose data or directory bucket it is; 0 for a node block (its records name themselves).
    pub node: InodeNo,
    /// Logical block in that inode.
    pub lblk: u64,
    /// For a node block: records in it that the node table still points to.
    pub live: u8,
    /// Number of the newest snapshot when the block's content came to be (u24): 0 before the first (docs/snapshots.md).
    pub birth: u32,
}

/// Bytes of an owner: node (6), logical block or live records (6), birth (3).
const OWNER_BYTES: usize = 15;

impl Owner {
    fn encode(&self, to: &mut [u8]) {
        let place = if self.node.0 == 0 { self.live.into() } else { self.lblk };
        to[..6].copy_from_slice(&self.node.0.to_le_bytes()[..6]);
        to[6..12].copy_from_slice(&place.to_le_bytes()[..6]);
        to[12..15].copy_from_slice(&self.birth.to_le_bytes()[..3]);
    }
    fn decode(e: &[u8]) -> Result<Self, Corrupt> {
        let number = |at: Range<usize>| {
            let mut bytes = [0; 8];
            bytes[..at.len()].copy_from_slice(&e[at]);
            u64::from_le_bytes(bytes)
        };
        let (node, place, birth) = (number(0..6), number(6..12), number(12..15) as u32);
        if node != 0 {
            return Ok(Self { node: InodeNo(node), lblk: place, live: 0, birth });
        }
        let live = u8::try_from(place).map_err(|_| Corrupt::new("owner table", format!("{place} live records")))?;
        Ok(Self { live, birth, ..Self::default() })
    }
}

/// The sealed block with the owners of half a segment.
pub fn encode_owners(owners: &[Owner], domain: u16, volume: u32, pair: BlockAddr, copy: usize, seq: u64) -> Vec<u8> {
    assert_eq!(owners.len(), OWNERS_PER_BLOCK as usize);
    let mut b = vec![0u8; BLOCK_BYTES];
    for (o, to) in owners.iter().zip(b[HEADER_BYTES..].chunks_exact_mut(OWNER_BYTES)) {
        o.encode(to);
    }
    seal(&mut b, BlockKind::Owners, domain, volume, pair.0 + copy as u64, seq);
    b
}

/// Decodes the pair at `pair`.
///
/// # Errors
/// [`Corrupt`] where no copy holds.
pub fn decode_owners(buf: &[u8], volume: u32, pair: BlockAddr) -> Result<(usize, u64, Vec<Owner>), Corrupt> {
    let (copy, h) = open_pair(buf, BlockKind::Owners, volume, pair.0)?;
    let entries = buf[copy * BLOCK_BYTES + HEADER_BYTES..].chunks_exact(OWNER_BYTES).take(OWNERS_PER_BLOCK as usize);
    // those that may fail have no length known beforehand
    let mut out = Vec::with_capacity(OWNERS_PER_BLOCK as usize);
    for e in entries {
        out.push(Owner::decode(e)?);
    }
    Ok((copy, h.seq.get(), out))
}
