//! Journal chunks: what a commit, an fsync and nothing else writes to a domain's journal.
//!
//! A journal is a ring of blocks. Position `p` (a count of blocks that never wraps) lies at block
//! `p % journal_blocks`. Each helper of a commit writes chunks of its own (a *stream*); the commit record
//! is a chunk that names every chunk of the transaction by position and checksum. A chunk that is not
//! wrapped at the end of the ring: a writer that meets the end leaves the rest unused.

use crate::codec::{Put, Reader};
use crate::group::{SegmentKind, Temperature};
use crate::node::{NodeEntry, NodeRecord};
use crate::{BLOCK_BYTES, BlockAddr, Corrupt, DomainId, InodeNo, NodeId, TxId};

/// `BRJL`, the first four bytes of a chunk.
pub const MAGIC: u32 = u32::from_le_bytes(*b"BRJL");
/// Bytes before the records of a chunk.
pub const CHUNK_HEADER_BYTES: usize = 64;
/// Most blocks of a chunk (1 MiB).
pub const CHUNK_MAX_BLOCKS: u32 = 256;

/// What a chunk is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum ChunkKind {
    /// Part of a transaction; counts only with the commit record.
    Stream = 1,
    /// Names the chunks of a transaction.
    Commit = 2,
    /// Written by one fsync; counts by itself, until its transaction is committed.
    RollForward = 3,
}

/// A decoded chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunk {
    /// Whether it is part of a transaction, commits one, or counts by itself.
    pub kind: ChunkKind,
    /// The domain whose journal it lies in.
    pub domain: DomainId,
    /// Position in the journal.
    pub pos: u64,
    /// The transaction: its own, or for a roll-forward chunk the one that was running.
    pub tx: TxId,
    /// Which helper wrote it.
    pub stream: u16,
    /// Blocks it takes.
    pub blocks: u32,
    /// CRC-32C of the chunk.
    pub crc: u32,
    /// In the order in which they are to be replayed.
    pub records: Vec<Record>,
}

/// One fact in a chunk. Each sets a state, so applying it twice changes nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Record {
    /// The node table entry of a node.
    Node {
        /// Its number, which says in which table block and slot the entry is.
        node: NodeId,
        /// Its new entry. `written` is not part of the record: it is the transaction of the chunk.
        entry: NodeEntry,
    },
    /// Blocks that became valid.
    Alloc {
        /// The first of them.
        addr: BlockAddr,
        /// How many there are.
        len: u32,
        /// What the segment is used for.
        kind: SegmentKind,
        /// Temperature of the log.
        temperature: Temperature,
        /// Inode that owns them, 0 for node blocks.
        owner: InodeNo,
        /// Logical block of the first.
        lblk: u64,
    },
    /// Blocks that are no longer valid.
    Free {
        /// The first of them.
        addr: BlockAddr,
        /// How many there are.
        len: u32,
    },
    /// Records of a node block that the node table still points to; 0 frees the block.
    Live {
        /// The node block.
        addr: BlockAddr,
        /// How many records.
        live: u8,
    },
    /// A directory entry whose inode lies in another domain was made, changed or removed.
    Remote {
        /// The directory that the entry is in.
        dir: InodeNo,
        /// The inode it names or named.
        child: InodeNo,
        /// That inode's generation.
        generation: u32,
        /// The name of the entry, 1 to 255 bytes.
        name: Box<[u8]>,
    },
    /// All inodes that are unlinked but open, as of this transaction.
    Orphans(Vec<InodeNo>),
    /// The full state of a node (roll-forward).
    Full(NodeRecord),
    /// Checksums of data blocks written with a roll-forward chunk: it counts only if they match.
    Sums {
        /// The first of them.
        addr: BlockAddr,
        /// CRC-32C per block.
        sums: Vec<u32>,
    },
    /// A chunk of the transaction (commit record).
    Part {
        /// Where it lies.
        pos: u64,
        /// CRC-32C of the chunk.
        crc: u32,
    },
    /// The transaction committed before this one (commit record): a missing one is noticed.
    After(TxId),
}

impl Record {
    /// Appends the record.
    pub fn encode(&self, v: &mut Vec<u8>) {
        match self {
            Self::Node { node, entry } => {
                v.put_u8(1);
                v.put_u64(node.0);
                v.put_u48(entry.addr.0);
                v.put_u8(entry.index);
                v.put_u8(entry.flags);
                v.put_u32(entry.generation);
            }
            Self::Alloc { addr, len, kind, temperature, owner, lblk } => {
                v.put_u8(2);
                v.put_u48(addr.0);
                v.put_u32(*len);
                v.put_u8(*kind as u8);
                v.put_u8(*temperature as u8);
                v.put_u48(owner.0);
                v.put_u48(*lblk);
            }
            Self::Free { addr, len } => {
                v.put_u8(3);
                v.put_u48(addr.0);
                v.put_u32(*len);
            }
            Self::Live { addr, live } => {
                v.put_u8(4);
                v.put_u48(addr.0);
                v.put_u8(*live);
            }
            Self::Remote { dir, child, generation, name } => {
                v.put_u8(5);
                v.put_u64(dir.0);
                v.put_u64(child.0);
                v.put_u32(*generation);
                v.put_u8(name.len() as u8);
                v.extend_from_slice(name);
            }
            Self::Orphans(nodes) => {
                v.put_u8(6);
                v.put_u32(nodes.len() as u32);
                nodes.iter().for_each(|n| v.put_u64(n.0));
            }
            Self::Full(rec) => {
                v.put_u8(7);
                rec.encode_to(v);
            }
            Self::Sums { addr, sums } => {
                v.put_u8(8);
                v.put_u48(addr.0);
                v.put_u32(sums.len() as u32);
                sums.iter().for_each(|s| v.put_u32(*s));
            }
            Self::Part { pos, crc } => {
                v.put_u8(9);
                v.put_u64(*pos);
                v.put_u32(*crc);
            }
            Self::After(tx) => {
                v.put_u8(10);
                v.put_u64(tx.0);
            }
        }
    }

    /// A record; of a node table entry only its chunk tells when the node block was written.
    ///
    /// # Errors
    /// [`Corrupt`].
    pub fn decode(r: &mut Reader<'_>) -> Result<Self, Corrupt> {
        Ok(match r.u8()? {
            1 => Self::Node {
                node: NodeId(r.u64()?),
                entry: NodeEntry {
                    addr: BlockAddr(r.u48()?),
                    index: r.u8()?,
                    flags: r.u8()?,
                    generation: r.u32()?,
                    written: 0,
                },
            },
            2 => Self::Alloc {
                addr: BlockAddr(r.u48()?),
                len: r.u32()?,
                kind: SegmentKind::from_u8(r.u8()?)?,
                temperature: Temperature::from_u8(r.u8()?)?,
                owner: InodeNo(r.u48()?),
                lblk: r.u48()?,
            },
            3 => Self::Free { addr: BlockAddr(r.u48()?), len: r.u32()? },
            4 => Self::Live { addr: BlockAddr(r.u48()?), live: r.u8()? },
            5 => {
                let (dir, child, generation) = (InodeNo(r.u64()?), InodeNo(r.u64()?), r.u32()?);
                let n = usize::from(r.u8()?);
                Self::Remote { dir, child, generation, name: r.bytes(n)?.into() }
            }
            6 => {
                let n = r.u32()? as usize;
                if n > r.left() / 8 {
                    return Err(r.bad(format!("{n} orphans")));
                }
                Self::Orphans((0..n).map(|_| r.u64().map(InodeNo)).collect::<Result<_, _>>()?)
            }
            7 => Self::Full(NodeRecord::decode(r)?),
            8 => {
                let addr = BlockAddr(r.u48()?);
                let n = r.u32()? as usize;
                if n > r.left() / 4 {
                    return Err(r.bad(format!("{n} checksums")));
                }
                Self::Sums { addr, sums: (0..n).map(|_| r.u32()).collect::<Result<_, _>>()? }
            }
            9 => Self::Part { pos: r.u64()?, crc: r.u32()? },
            10 => Self::After(TxId(r.u64()?)),
            k => return Err(r.bad(format!("unknown record {k}"))),
        })
    }
}

/// Bytes of `n` bytes of records as whole blocks with the chunk header.
pub fn chunk_blocks(record_bytes: usize) -> u32 {
    (CHUNK_HEADER_BYTES + record_bytes).div_ceil(BLOCK_BYTES) as u32
}

/// Identity of a chunk about to be written.
#[derive(Debug, Clone, Copy)]
pub struct ChunkId {
    /// Whether it is part of a transaction, commits one, or counts by itself.
    pub kind: ChunkKind,
    /// The domain whose journal it goes to.
    pub domain: DomainId,
    /// Low half of the volume's UUID.
    pub volume: u32,
    /// Position in the journal.
    pub pos: u64,
    /// The transaction: its own, or for a roll-forward chunk the one that runs.
    pub tx: TxId,
    /// Number of the helper that writes it.
    pub stream: u16,
}

/// The whole chunk (a multiple of 4096 bytes) around encoded records, and its checksum.
///
/// # Panics
/// Where it is longer than [`CHUNK_MAX_BLOCKS`] (a bug of ours).
pub fn encode_chunk(id: ChunkId, records: &[u8]) -> (Vec<u8>, u32) {
    let blocks = chunk_blocks(records.len());
    assert!(blocks <= CHUNK_MAX_BLOCKS, "a chunk of {blocks} blocks");
    let mut v = Vec::with_capacity(blocks as usize * BLOCK_BYTES);
    v.put_u32(MAGIC);
    v.put_u32(0);
    v.put_u8(id.kind as u8);
    v.put_u8(0);
    v.put_u16(id.domain.0);
    v.put_u32(id.volume);
    v.put_u64(id.pos);
    v.put_u64(id.tx.0);
    v.put_u32(blocks);
    v.put_u32(records.len() as u32);
    v.put_u16(id.stream);
    v.resize(CHUNK_HEADER_BYTES, 0);
    v.extend_from_slice(records);
    v.resize(blocks as usize * BLOCK_BYTES, 0);
    let crc = crate::block::checksum(&v);
    v[4..8].copy_from_slice(&crc.to_le_bytes());
    (v, crc)
}

/// What the first block of a chunk says: kind, blocks, transaction. `None` where it opens no chunk of this journal
/// at this position.
pub fn peek_chunk(block: &[u8], volume: u32, domain: DomainId, pos: u64) -> Option<u32> {
    let mut r = Reader::new(block, "journal chunk");
    let magic = r.u32().ok()?;
    r.u32().ok()?;
    r.u16().ok()?;
    let (d, v, p) = (r.u16().ok()?, r.u32().ok()?, r.u64().ok()?);
    r.u64().ok()?;
    let blocks = r.u32().ok()?;
    (magic == MAGIC && d == domain.0 && v == volume && p == pos && (1..=CHUNK_MAX_BLOCKS).contains(&blocks))
        .then_some(blocks)
}

/// Decodes a whole chunk.
///
/// # Errors
/// [`Corrupt`] where the checksum or a record does not hold: it was torn or never written.
pub fn decode_chunk(buf: &[u8], volume: u32, domain: DomainId, pos: u64) -> Result<Chunk, Corrupt> {
    let bad = |why: &str| Corrupt::new("journal chunk", format!("at position {pos}: {why}"));
    let blocks = peek_chunk(buf, volume, domain, pos).ok_or_else(|| bad("no chunk"))?;
    let bytes = blocks as usize * BLOCK_BYTES;
    if buf.len() < bytes {
        return Err(bad("cut off"));
    }
    let buf = &buf[..bytes];
    let crc = u32::from_le_bytes([buf[4], buf[5], buf[6], buf[7]]);
    if crc != crate::block::checksum(buf) {
        return Err(bad("checksum does not match"));
    }
    let mut r = Reader::new(buf, "journal chunk");
    r.bytes(8)?;
    let kind = match r.u8()? {
        1 => ChunkKind::Stream,
        2 => ChunkKind::Commit,
        3 => ChunkKind::RollForward,
        k => return Err(bad(&format!("kind {k}"))),
    };
    r.bytes(1 + 2 + 4 + 8)?;
    let tx = TxId(r.u64()?);
    r.u32()?;
    let len = r.u32()? as usize;
    let stream = r.u16()?;
    if CHUNK_HEADER_BYTES + len > bytes {
        return Err(bad("records longer than the chunk"));
    }
    let mut body = Reader::new(&buf[CHUNK_HEADER_BYTES..CHUNK_HEADER_BYTES + len], "journal record");
    let mut records = Vec::new();
    while body.left() > 0 {
        let mut record = Record::decode(&mut body)?;
        if let Record::Node { entry, .. } = &mut record
            && entry.used()
        {
            // a transaction tells of the node blocks that it wrote itself
            entry.written = tx.0 as u32;
        }
        records.push(record);
    }
    Ok(Chunk { kind, domain, pos, tx, stream, blocks, crc, records })
}
