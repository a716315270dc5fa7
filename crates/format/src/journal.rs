//! Journal chunks: what a commit, an fsync and nothing else writes to a domain's journal.
//!
//! A journal is a ring of blocks. Position `p` (a count of blocks that never wraps) lies at block
//! `p % journal_blocks`. A transaction has as many chunks (a *stream*) as its records take; the commit record
//! is a chunk that names every chunk of the transaction by position and checksum. A chunk is not wrapped at
//! the end of the ring: a writer that meets the end leaves the rest unused.

use crate::codec::{Put, Reader};
use crate::group::{SegmentKind, Temperature};
use crate::node::{NodeEntry, NodeRecord, NodeRecordRef, REMOTE};
use crate::{BLOCK_BYTES, BlockAddr, COUNTER_MAX, Corrupt, DomainId, InodeNo, NodeId, TxId};
use std::ops::Range;
use std::sync::Arc;

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
    /// Its number in its transaction.
    pub stream: u16,
    /// Blocks it takes.
    pub blocks: u32,
    /// CRC-32C of the chunk.
    pub crc: u32,
    /// In the order in which they are to be replayed.
    pub records: Records,
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
        RecordRef::decode(r).map(|r| r.to_owned())
    }
}

/// A [`Record`] whose variable part lies where it was read: a journal has millions of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordRef<'a> {
    /// [`Record::Node`], [`Record::Alloc`], [`Record::Free`] or [`Record::Live`].
    Table(TableRecord),
    /// [`Record::Remote`].
    Remote {
        /// The directory that the entry is in.
        dir: InodeNo,
        /// The inode it names or named.
        child: InodeNo,
        /// That inode's generation.
        generation: u32,
        /// The name of the entry.
        name: &'a [u8],
    },
    /// [`Record::Orphans`].
    Orphans(Numbers<'a>),
    /// [`Record::Full`].
    Full(NodeRecordRef<'a>),
    /// [`Record::Sums`].
    Sums {
        /// The first of the blocks.
        addr: BlockAddr,
        /// CRC-32C per block.
        sums: Sums<'a>,
    },
    /// [`Record::Part`].
    Part {
        /// Where the chunk lies.
        pos: u64,
        /// CRC-32C of the chunk.
        crc: u32,
    },
    /// [`Record::After`].
    After(TxId),
}

/// What a record sets in the tables of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TableRecord {
    /// [`Record::Node`].
    Node {
        /// The node's number.
        node: NodeId,
        /// Its new entry.
        entry: NodeEntry,
    },
    /// [`Record::Alloc`].
    Alloc {
        /// The first of the blocks.
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
    /// [`Record::Free`].
    Free {
        /// The first of the blocks.
        addr: BlockAddr,
        /// How many there are.
        len: u32,
    },
    /// [`Record::Live`].
    Live {
        /// The node block.
        addr: BlockAddr,
        /// How many records.
        live: u8,
    },
}

/// Encoded inode numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Numbers<'a>(&'a [u8]);

impl<'a> Numbers<'a> {
    /// The numbers, in their order.
    pub fn iter(self) -> impl Iterator<Item = InodeNo> + 'a {
        self.0.chunks_exact(8).map(|b| InodeNo(u64::from_le_bytes(b.try_into().unwrap_or_default())))
    }
}

/// Encoded checksums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sums<'a>(&'a [u8]);

impl<'a> Sums<'a> {
    /// How many there are.
    pub fn len(self) -> usize {
        self.0.len() / 4
    }
    /// Whether there is none.
    pub fn is_empty(self) -> bool {
        self.0.is_empty()
    }
    /// The checksums, in the order of the blocks.
    pub fn iter(self) -> impl Iterator<Item = u32> + 'a {
        self.0.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap_or_default()))
    }
    /// At most `most` of them, from number `first` on.
    pub fn part(self, first: usize, most: usize) -> Self {
        let from = first.min(self.len());
        Self(&self.0[4 * from..4 * (from + most.min(self.len() - from))])
    }
}

/// The first `N` bytes from `at` on, as a number.
#[inline]
fn number<const N: usize>(bytes: &[u8], at: usize) -> u64 {
    let mut all = [0; 8];
    all[..N].copy_from_slice(&bytes[at..at + N]);
    u64::from_le_bytes(all)
}

impl<'a> RecordRef<'a> {
    /// # Errors
    /// [`Corrupt`].
    #[inline]
    pub fn decode(r: &mut Reader<'a>) -> Result<Self, Corrupt> {
        let kind = r.u8()?;
        if kind == 1 {
            let b: &[u8; 20] = r.array()?;
            let (addr, generation) = (BlockAddr(number::<6>(b, 8)), number::<4>(b, 16) as u32);
            let entry = NodeEntry { addr, index: b[14], flags: b[15], generation, written: 0 };
            return Ok(Self::Table(TableRecord::Node { node: NodeId(number::<8>(b, 0)), entry }));
        }
        Self::decode_other(kind, r)
    }

    fn decode_other(kind: u8, r: &mut Reader<'a>) -> Result<Self, Corrupt> {
        Ok(match kind {
            2 => {
                let b: &[u8; 24] = r.array()?;
                Self::Table(TableRecord::Alloc {
                    addr: BlockAddr(number::<6>(b, 0)),
                    len: number::<4>(b, 6) as u32,
                    kind: SegmentKind::from_u8(b[10])?,
                    temperature: Temperature::from_u8(b[11])?,
                    owner: InodeNo(number::<6>(b, 12)),
                    lblk: number::<6>(b, 18),
                })
            }
            3 => {
                let b: &[u8; 10] = r.array()?;
                Self::Table(TableRecord::Free { addr: BlockAddr(number::<6>(b, 0)), len: number::<4>(b, 6) as u32 })
            }
            4 => {
                let b: &[u8; 7] = r.array()?;
                Self::Table(TableRecord::Live { addr: BlockAddr(number::<6>(b, 0)), live: b[6] })
            }
            5 => {
                let (dir, child, generation) = (InodeNo(r.u64()?), InodeNo(r.u64()?), r.u32()?);
                let n = usize::from(r.u8()?);
                Self::Remote { dir, child, generation, name: r.bytes(n)? }
            }
            6 => {
                let n = r.u32()? as usize;
                if n > r.left() / 8 {
                    return Err(r.bad(format!("{n} orphans")));
                }
                Self::Orphans(Numbers(r.bytes(8 * n)?))
            }
            7 => Self::Full(NodeRecordRef::decode(r)?),
            8 => {
                let addr = BlockAddr(r.u48()?);
                let n = r.u32()? as usize;
                if n > r.left() / 4 {
                    return Err(r.bad(format!("{n} checksums")));
                }
                Self::Sums { addr, sums: Sums(r.bytes(4 * n)?) }
            }
            9 => Self::Part { pos: r.u64()?, crc: r.u32()? },
            10 => Self::After(TxId(r.u64()?)),
            k => return Err(r.bad(format!("unknown record {k}"))),
        })
    }

    /// The same, with memory of its own.
    pub fn to_owned(&self) -> Record {
        match *self {
            Self::Table(TableRecord::Node { node, entry }) => Record::Node { node, entry },
            Self::Table(TableRecord::Alloc { addr, len, kind, temperature, owner, lblk }) => {
                Record::Alloc { addr, len, kind, temperature, owner, lblk }
            }
            Self::Table(TableRecord::Free { addr, len }) => Record::Free { addr, len },
            Self::Table(TableRecord::Live { addr, live }) => Record::Live { addr, live },
            Self::Remote { dir, child, generation, name } => {
                Record::Remote { dir, child, generation, name: name.into() }
            }
            Self::Orphans(numbers) => Record::Orphans(numbers.iter().collect()),
            Self::Full(r) => Record::Full(r.to_owned()),
            Self::Sums { addr, sums } => Record::Sums { addr, sums: sums.iter().collect() },
            Self::Part { pos, crc } => Record::Part { pos, crc },
            Self::After(tx) => Record::After(tx),
        }
    }
}

impl Record {
    /// What the record sets in the tables of a group, where it does.
    pub fn table(&self) -> Option<TableRecord> {
        match *self {
            Self::Node { node, entry } => Some(TableRecord::Node { node, entry }),
            Self::Alloc { addr, len, kind, temperature, owner, lblk } => {
                Some(TableRecord::Alloc { addr, len, kind, temperature, owner, lblk })
            }
            Self::Free { addr, len } => Some(TableRecord::Free { addr, len }),
            Self::Live { addr, live } => Some(TableRecord::Live { addr, live }),
            _ => None,
        }
    }
}

/// Bytes of [`Record::Node`], its tag among them.
const NODE_RECORD_BYTES: usize = 21;

/// The [`Record::Node`] at the beginning of `bytes`, where there is one.
#[inline(always)]
fn node_at(bytes: &[u8]) -> Option<(NodeId, NodeEntry)> {
    let b: &[u8; NODE_RECORD_BYTES] = bytes.first_chunk()?;
    if b[0] != 1 {
        return None;
    }
    // whole words: bytes that were put together in memory could not be read again as one for some time
    let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| b[at + i]));
    let place = word(9);
    let entry = NodeEntry {
        addr: BlockAddr(place & 0xffff_ffff_ffff),
        index: (place >> 48) as u8,
        flags: (place >> 56) as u8,
        generation: u32::from_le_bytes([b[17], b[18], b[19], b[20]]),
        written: 0,
    };
    Some((NodeId(word(1)), entry))
}

/// Memory that a part of a journal was read to.
pub type Image = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// The records of a chunk, encoded as the journal has them: no count in them takes more memory than the bytes that came with it.
#[derive(Clone)]
pub struct Records {
    /// Where they lie, and others beside them.
    image: Image,
    place: Range<usize>,
    count: usize,
    /// The transaction that tells of them.
    tx: TxId,
    /// Each is nothing but what it sets in the tables of a group.
    tables_only: bool,
}

impl Records {
    /// All records that `bytes` are, of the transaction `tx`.
    ///
    /// # Errors
    /// [`Corrupt`] where one does not hold.
    pub fn new(bytes: &[u8], tx: TxId) -> Result<Self, Corrupt> {
        Self::within(Arc::new(Box::<[u8]>::from(bytes)), 0..bytes.len(), tx)
    }

    /// As [`Self::new`], of those that lie in `image`, which stays in memory as long as these do.
    fn within(image: Image, place: Range<usize>, tx: TxId) -> Result<Self, Corrupt> {
        let bytes = (*image).as_ref().get(place.clone()).unwrap_or_default();
        let mut r = Reader::new(bytes, "journal record");
        let (mut count, mut tables_only) = (0, true);
        while r.left() > 0 {
            // nearly all records are of this kind, and each of them holds
            if let Some((_, entry)) = bytes.get(bytes.len() - r.left()..).and_then(node_at) {
                tables_only &= entry.flags & REMOTE == 0;
                count += 1;
                r.bytes(NODE_RECORD_BYTES)?;
                continue;
            }
            tables_only &= match RecordRef::decode(&mut r)? {
                RecordRef::Table(TableRecord::Node { entry, .. }) => entry.flags & REMOTE == 0,
                other => matches!(other, RecordRef::Table(_)),
            };
            count += 1;
        }
        Ok(Self { image, place, count, tx, tables_only })
    }

    fn bytes(&self) -> &[u8] {
        (*self.image).as_ref().get(self.place.clone()).unwrap_or_default()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Whether none of them says anything beside tables, and none is the entry of an inode with a parent in another domain.
    pub fn is_tables_only(&self) -> bool {
        self.tables_only
    }

    /// Calls `node` with the records that are entries of nodes, and `other` with all else that sets something in tables, in
    /// the order in which they are to be replayed. As [`Self::iter`], in half the time: a journal has millions of them.
    ///
    /// # Errors
    /// The first one of these.
    pub fn tables<E>(
        &self,
        mut node: impl FnMut(NodeId, NodeEntry) -> Result<(), E>,
        mut other: impl FnMut(TableRecord) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut rest = self.bytes();
        loop {
            while let Some((number, mut entry)) = node_at(rest) {
                if entry.used() {
                    entry.written = self.tx.0 as u32;
                }
                node(number, entry)?;
                rest = &rest[NODE_RECORD_BYTES..];
            }
            let mut records = RecordIter(Reader::new(rest, "journal record"), self.tx);
            match records.next() {
                Some(RecordRef::Table(r)) => other(r)?,
                Some(_) => {}
                None => return Ok(()),
            }
            rest = &rest[rest.len() - records.0.left()..];
        }
    }

    /// In the order in which they are to be replayed.
    pub fn iter(&self) -> RecordIter<'_> {
        RecordIter(Reader::new(self.bytes(), "journal record"), self.tx)
    }
}

impl PartialEq for Records {
    fn eq(&self, other: &Self) -> bool {
        (self.tx, self.bytes()) == (other.tx, other.bytes())
    }
}

impl Eq for Records {}

impl std::fmt::Debug for Records {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self).finish()
    }
}

impl<'a> IntoIterator for &'a Records {
    type Item = RecordRef<'a>;
    type IntoIter = RecordIter<'a>;
    fn into_iter(self) -> RecordIter<'a> {
        self.iter()
    }
}

/// Iterator over [`Records`].
#[derive(Debug, Clone)]
pub struct RecordIter<'a>(Reader<'a>, TxId);

impl<'a> Iterator for RecordIter<'a> {
    type Item = RecordRef<'a>;
    #[inline]
    fn next(&mut self) -> Option<RecordRef<'a>> {
        if self.0.left() == 0 {
            return None;
        }
        // `Records::new` has seen that each holds
        let mut record = RecordRef::decode(&mut self.0).ok()?;
        if let RecordRef::Table(TableRecord::Node { entry, .. }) = &mut record
            && entry.used()
        {
            // a transaction tells of the node blocks that it wrote itself
            entry.written = self.1.0 as u32;
        }
        Some(record)
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
    /// The first four bytes of the volume's UUID.
    pub volume: u32,
    /// Position in the journal.
    pub pos: u64,
    /// The transaction: its own, or for a roll-forward chunk the one that runs.
    pub tx: TxId,
    /// Its number in its transaction.
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

/// How many blocks a chunk has, by its first one. `None` where that opens no chunk of this journal at this position.
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
    chunk_of(buf, volume, domain, pos, |place, tx| Records::new(&buf[place], tx))
}

/// As [`decode_chunk`], of one that lies in `image` at `place`: its records stay there.
///
/// # Errors
/// As there.
pub fn decode_chunk_within(
    image: &Image,
    place: Range<usize>,
    volume: u32,
    domain: DomainId,
    pos: u64,
) -> Result<Chunk, Corrupt> {
    let from = place.start;
    let buf = (**image).as_ref().get(place).unwrap_or_default();
    chunk_of(buf, volume, domain, pos, |at, tx| Records::within(image.clone(), from + at.start..from + at.end, tx))
}

/// A chunk, of whose records `records` is told where they lie in `buf`.
fn chunk_of(
    buf: &[u8],
    volume: u32,
    domain: DomainId,
    pos: u64,
    records: impl FnOnce(Range<usize>, TxId) -> Result<Records, Corrupt>,
) -> Result<Chunk, Corrupt> {
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
    if tx.0 > COUNTER_MAX {
        return Err(bad(&format!("transaction {}", tx.0)));
    }
    r.u32()?;
    let len = r.u32()? as usize;
    let stream = r.u16()?;
    if CHUNK_HEADER_BYTES + len > bytes {
        return Err(bad("records longer than the chunk"));
    }
    let records = records(CHUNK_HEADER_BYTES..CHUNK_HEADER_BYTES + len, tx)?;
    Ok(Chunk { kind, domain, pos, tx, stream, blocks, crc, records })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::{DIR, USED};

    /// What a journal says of tables is the same, whichever way it is read.
    #[test]
    fn tables_are_what_the_iterator_says_of_them() {
        let entry = |flags, generation| NodeEntry {
            addr: BlockAddr(0xba98_7654_3210),
            index: 63,
            flags,
            generation,
            written: 0,
        };
        let node = |n: u64, flags| Record::Node { node: NodeId(n), entry: entry(flags, u32::MAX - n as u32) };
        let (kind, temperature) = (SegmentKind::Data, Temperature::Cold);
        let alloc = Record::Alloc { addr: BlockAddr(7), len: 9, kind, temperature, owner: InodeNo(5), lblk: 11 };
        let remote = Record::Remote { dir: InodeNo(1), child: InodeNo(2), generation: 3, name: (*b"\x01name").into() };
        let live = Record::Live { addr: BlockAddr(1), live: 1 };
        let all = [
            vec![],
            vec![node(u64::MAX, USED)],
            vec![node(1, USED), node(2, 0), alloc.clone(), node(3, USED | DIR), live.clone()],
            vec![
                Record::Orphans(vec![InodeNo(1); 3]),
                node(4, USED),
                remote,
                Record::Free { addr: BlockAddr(1), len: 1 },
            ],
            vec![alloc, node(5, USED | REMOTE), live, node(6, USED)],
        ];
        for records in all {
            let mut bytes = Vec::new();
            records.iter().for_each(|r| r.encode(&mut bytes));
            let encoded = Records::new(&bytes, TxId(0x1_0000_0007)).unwrap();
            assert_eq!(encoded.len(), records.len());
            let only = |r: &Record| match r {
                Record::Node { entry, .. } => entry.flags & REMOTE == 0,
                r => r.table().is_some(),
            };
            assert_eq!(encoded.is_tables_only(), records.iter().all(only));
            let told = std::cell::RefCell::new(Vec::new());
            let tell = |r| {
                told.borrow_mut().push(r);
                Ok::<_, ()>(())
            };
            encoded.tables(|node, entry| tell(TableRecord::Node { node, entry }), tell).unwrap();
            let want = encoded.iter().filter_map(|r| match r {
                RecordRef::Table(t) => Some(t),
                _ => None,
            });
            assert_eq!(told.into_inner(), want.collect::<Vec<_>>());
            // cut off within any record
            let whole =
                |n: usize| (0..=records.len()).any(|k| records[..k].iter().map(encoded_len).sum::<usize>() == n);
            for n in 0..bytes.len() {
                assert_eq!(Records::new(&bytes[..n], TxId(1)).is_ok(), whole(n), "{n} bytes of {records:?}");
            }
        }
    }

    fn encoded_len(r: &Record) -> usize {
        let mut bytes = Vec::new();
        r.encode(&mut bytes);
        bytes.len()
    }
}
