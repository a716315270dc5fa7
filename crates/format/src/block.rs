//! The header that opens every metadata block, and its checksum.
//!
//! A block says what it is, which volume it belongs to and where it was meant to lie, so that a torn,
//! stale or misplaced block is recognised (CRC-32C over the whole block with the field `crc` as zero).

use crate::{COUNTER_MAX, Corrupt};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of a block.
pub const BLOCK_BYTES: usize = 4096;
/// Bytes of a [`BlockHeader`].
pub const HEADER_BYTES: usize = 32;
/// `BRFS`, the first four bytes of every block with a header.
pub const MAGIC: u32 = u32::from_le_bytes(*b"BRFS");

/// What a metadata block holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum BlockKind {
    /// The volume's header: [`crate::super_block::SuperBlock`].
    Super = 1,
    /// Block group allocation table, [`crate::bat`].
    Bat = 2,
    /// A domain's header: [`crate::domain::DomainHeader`].
    Domain = 3,
    /// A block group's header: [`crate::group::GroupHeader`].
    Group = 4,
    /// The segments of a block group: [`crate::group::SegmentTable`].
    SegmentTable = 5,
    /// Half of a segment's owner table, [`crate::group`].
    Owners = 6,
    /// Part of a group's node table, [`crate::node::NodeTableBlock`].
    NodeTable = 7,
    /// Packed node records, [`crate::node`].
    Node = 8,
    /// A directory bucket, [`crate::dentry`].
    Dir = 9,
    /// Who writes the volume: [`crate::owner::OwnerRecord`].
    Owner = 10,
}

/// First 32 bytes of a metadata block.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct BlockHeader {
    /// [`MAGIC`] in every block with a header.
    pub magic: U32,
    /// CRC-32C of the block with this field zero.
    pub crc: U32,
    /// A [`BlockKind`] as a number.
    pub kind: u8,
    /// Unused, written as 0.
    pub reserved: u8,
    /// The domain that wrote it, `0xffff` for the volume.
    pub domain: U16,
    /// Low half of the volume's UUID: a block of another volume is foreign.
    pub volume: U32,
    /// Where the block lies: block number in the group space, or on the device for volume structures.
    pub addr: U64,
    /// Transaction or sequence number of the write; the newer one of a shadow pair wins.
    pub seq: U64,
}
const _: () = assert!(size_of::<BlockHeader>() == HEADER_BYTES);

impl BlockHeader {
    /// The first bytes of `block`, whatever they say; `None` where it is too short.
    pub fn of_block(block: &[u8]) -> Option<Self> {
        Self::read_from_prefix(block).ok().map(|(h, _)| h)
    }
}

/// CRC-32C of `block` with bytes 4..8 taken as zero.
pub fn checksum(block: &[u8]) -> u32 {
    let crc = crc32c::crc32c(&block[..4]);
    let crc = crc32c::crc32c_append(crc, &[0; 4]);
    crc32c::crc32c_append(crc, &block[8..])
}

/// Writes the header of `block` (4096 bytes) and its checksum, over the first 32 bytes.
pub fn seal(block: &mut [u8], kind: BlockKind, domain: u16, volume: u32, addr: u64, seq: u64) {
    assert_eq!(block.len(), BLOCK_BYTES);
    let mut h = BlockHeader {
        magic: MAGIC.into(),
        crc: 0.into(),
        kind: kind as u8,
        reserved: 0,
        domain: domain.into(),
        volume: volume.into(),
        addr: addr.into(),
        seq: seq.into(),
    };
    block[..HEADER_BYTES].copy_from_slice(h.as_bytes());
    h.crc = checksum(block).into();
    block[..HEADER_BYTES].copy_from_slice(h.as_bytes());
}

/// Checks magic, checksum, kind, volume and place of `block`.
///
/// # Errors
/// [`Corrupt`] that names the first thing that does not hold.
pub fn open(block: &[u8], kind: BlockKind, volume: u32, addr: u64) -> Result<BlockHeader, Corrupt> {
    let what = kind_name(kind);
    let bad = |why: String| Err(Corrupt::new(what, format!("at {addr}: {why}")));
    if block.len() != BLOCK_BYTES {
        return bad(format!("{} bytes instead of {BLOCK_BYTES}", block.len()));
    }
    let Ok((h, _)) = BlockHeader::read_from_prefix(block) else {
        return bad("too short".into());
    };
    if h.magic.get() != MAGIC {
        return bad(format!("magic {:#010x}", h.magic.get()));
    }
    if h.crc.get() != checksum(block) {
        return bad("checksum does not match".into());
    }
    if h.kind != kind as u8 {
        return bad(format!("is of kind {}", h.kind));
    }
    if h.volume.get() != volume {
        return bad("belongs to another volume".into());
    }
    if h.addr.get() != addr {
        return bad(format!("was written for {}", h.addr.get()));
    }
    if h.seq.get() > seq_max(kind) {
        return bad(format!("was write number {}", h.seq.get()));
    }
    Ok(h)
}

/// The highest number of a write that is taken from a device. The high half of those of a group's tables is the number of its claim,
/// which comes round; the low half counts writes since.
fn seq_max(kind: BlockKind) -> u64 {
    match kind {
        BlockKind::Group | BlockKind::SegmentTable | BlockKind::Owners | BlockKind::NodeTable => u64::MAX - (1 << 31),
        _ => COUNTER_MAX,
    }
}

/// Of two copies of a shadow pair (at `addr` and `addr + 1`), the valid one with the newer `seq`:
/// its index and header. The other place is the one to write next.
///
/// # Errors
/// [`Corrupt`] where neither holds.
pub fn open_pair(pair: &[u8], kind: BlockKind, volume: u32, addr: u64) -> Result<(usize, BlockHeader), Corrupt> {
    if pair.len() != 2 * BLOCK_BYTES {
        return Err(Corrupt::new(kind_name(kind), format!("at {addr}: a pair of {} bytes", pair.len())));
    }
    let a = open(&pair[..BLOCK_BYTES], kind, volume, addr);
    let b = open(&pair[BLOCK_BYTES..], kind, volume, addr + 1);
    match (a, b) {
        (Ok(a), Ok(b)) => Ok(if b.seq.get() > a.seq.get() { (1, b) } else { (0, a) }),
        (Ok(a), Err(_)) => Ok((0, a)),
        (Err(_), Ok(b)) => Ok((1, b)),
        (Err(e), Err(_)) => Err(e),
    }
}

/// Why the copy of a pair that does not count (`copy` does, with `seq`) is no block that a writer left: the copy that
/// counts may then be an older one. `None` where it holds, or was never written. For pairs of which nothing else tells how
/// often they were written: see [`crate::group`] for the others.
pub fn other_copy_lost(
    pair: &[u8],
    kind: BlockKind,
    volume: u32,
    addr: u64,
    (copy, seq): (usize, u64),
) -> Option<Corrupt> {
    let other = 1 - copy;
    let block = pair.get(other * BLOCK_BYTES..(other + 1) * BLOCK_BYTES)?;
    let why = open(block, kind, volume, addr + other as u64).err()?;
    // The first write of a pair goes to copy 0; a group counts its writes from the claim on.
    let first = match kind {
        BlockKind::Super | BlockKind::Bat | BlockKind::Domain => seq <= 1,
        _ => seq & 0xffff_ffff == 0,
    };
    if copy == 0 && first && block.iter().all(|&b| b == 0) {
        return None;
    }
    Some(Corrupt::new(why.what, format!("{}; its other copy may be older", why.why)))
}

/// The name of a kind for messages.
pub fn kind_name(kind: BlockKind) -> &'static str {
    match kind {
        BlockKind::Super => "superblock",
        BlockKind::Bat => "block group allocation table",
        BlockKind::Domain => "domain header",
        BlockKind::Group => "group header",
        BlockKind::SegmentTable => "segment table",
        BlockKind::Owners => "owner table",
        BlockKind::NodeTable => "node table",
        BlockKind::Node => "node block",
        BlockKind::Dir => "directory bucket",
        BlockKind::Owner => "owner record",
    }
}
