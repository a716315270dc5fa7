//! Directory entries and buckets.
//!
//! A directory's entries are ordered by a 63-bit keyed hash of the name; a bucket block holds the entries
//! of a range of hashes and lies in the directory's extent map at logical block `first_hash >> 15` (48
//! bits). So the extent map is the directory's index, and a hash is a `readdir` cookie that stays valid.

use crate::block::{BlockKind, HEADER_BYTES, open, seal};
use crate::codec::{Put, Reader};
use crate::inode::valid_name;
use crate::name::FileName;
use crate::{BLOCK_BYTES, BlockAddr, Corrupt, InodeNo};
use siphasher::sip::SipHasher13;
use std::hash::Hasher;

/// A name in a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dentry {
    /// Position in the directory: the name's hash, moved up past taken positions. Unique; above 2.
    pub hash: u64,
    /// The inode that the name names.
    pub node: InodeNo,
    /// Its generation: an entry with another one is stale.
    pub generation: u32,
    /// File type, as `d_type` (`st_mode >> 12`).
    pub kind: u8,
    /// 1 to 255 bytes.
    pub name: FileName,
}

/// Names hash to at most this: 63 bits.
pub const HASH_MAX: u64 = (1 << 63) - 1;
/// Positions after a name's own hash where it may stand instead.
pub const HASH_PROBES: u64 = 8;
/// Bytes of an entry without its name.
pub const ENTRY_FIXED_BYTES: usize = 8 + 8 + 4 + 1 + 1;
/// Bytes for entries in a bucket block.
pub const BUCKET_BYTES: usize = BLOCK_BYTES - HEADER_BYTES - 16;
/// Most bytes of inline entries in an inode record.
pub const INLINE_DIR_MAX: usize = 2048;

impl Dentry {
    /// Bytes of the encoded entry.
    pub fn encoded_bytes(&self) -> usize {
        ENTRY_FIXED_BYTES + self.name.len()
    }
}

/// Position of `name` in a directory: SipHash-1-3 under the volume's key, 63 bits, above the cookies of `.` and `..`.
/// Keyed so that nobody can aim names at one bucket.
pub fn name_hash(key: &[u8; 16], name: &[u8]) -> u64 {
    let mut h = SipHasher13::new_with_key(key);
    h.write(name);
    (h.finish() >> 1).clamp(3, HASH_MAX - HASH_PROBES)
}

/// Logical block of the bucket that starts at `first_hash`.
pub fn bucket_lblk(first_hash: u64) -> u64 {
    first_hash >> 15
}

/// Lowest hash of the bucket at logical block `lblk`.
pub fn bucket_first(lblk: u64) -> u64 {
    lblk << 15
}

/// What stands before the name of an encoded entry.
fn encode_fixed(e: &Dentry) -> [u8; ENTRY_FIXED_BYTES] {
    let mut fixed = [0; ENTRY_FIXED_BYTES];
    fixed[..8].copy_from_slice(&e.hash.to_le_bytes());
    fixed[8..16].copy_from_slice(&e.node.0.to_le_bytes());
    fixed[16..20].copy_from_slice(&e.generation.to_le_bytes());
    (fixed[20], fixed[21]) = (e.kind, e.name.len() as u8);
    fixed
}

/// Encodes entries (the inline section).
pub fn encode_entries<'a>(entries: impl IntoIterator<Item = &'a Dentry>) -> Vec<u8> {
    let mut v = Vec::new();
    for e in entries {
        v.extend_from_slice(&encode_fixed(e));
        v.extend_from_slice(&e.name);
    }
    v
}

/// Encodes entries as [`encode_entries`] into the head of `to`; their bytes, `None` where they do not fit.
fn put_entries<'a>(mut to: &mut [u8], entries: impl IntoIterator<Item = &'a Dentry>) -> Option<usize> {
    let room = to.len();
    for e in entries {
        let (fixed, rest) = to.split_at_mut_checked(ENTRY_FIXED_BYTES)?;
        fixed.copy_from_slice(&encode_fixed(e));
        let (name, rest) = rest.split_at_mut_checked(e.name.len())?;
        name.copy_from_slice(&e.name);
        to = rest;
    }
    Some(room - to.len())
}

/// Decodes entries with rising hashes.
///
/// # Errors
/// [`Corrupt`].
pub fn decode_entries(buf: &[u8]) -> Result<Vec<Dentry>, Corrupt> {
    let mut r = Reader::new(buf, "directory entries");
    // of a directory that is only looked at they take no more memory than that
    let mut out: Vec<Dentry> = Vec::with_capacity(count_entries(buf));
    while r.left() > 0 {
        let (hash, node, generation, kind) = (r.u64()?, InodeNo(r.u64()?), r.u32()?, r.u8()?);
        let n = usize::from(r.u8()?);
        let name = r.bytes(n)?;
        if !valid_name(name) {
            return Err(r.bad("an entry has no valid name"));
        }
        if !(3..=HASH_MAX).contains(&hash) || out.last().is_some_and(|l| l.hash >= hash) {
            return Err(r.bad(format!("entry at position {hash:#x} is out of order")));
        }
        out.push(Dentry { hash, node, generation, kind, name: name.into() });
    }
    Ok(out)
}

/// How many entries there are in what holds them, if it does hold.
fn count_entries(buf: &[u8]) -> usize {
    let (mut n, mut at) = (0, 0);
    while let Some(name) = buf.get(at + ENTRY_FIXED_BYTES - 1) {
        at += ENTRY_FIXED_BYTES + usize::from(*name);
        n += 1;
    }
    n
}

/// The sealed bucket block of directory `dir` with the lowest hash `first`.
pub fn encode_bucket<'a>(
    entries: impl IntoIterator<Item = &'a Dentry>,
    dir: InodeNo,
    first: u64,
    domain: u16,
    volume: u32,
    addr: BlockAddr,
    seq: u64,
) -> Vec<u8> {
    let mut b = Vec::with_capacity(BLOCK_BYTES);
    b.resize(HEADER_BYTES, 0);
    b.put_u64(dir.0);
    b.put_u48(bucket_lblk(first));
    let at = b.len();
    b.resize(BLOCK_BYTES, 0);
    let bytes = put_entries(&mut b[at + 2..], entries);
    assert!(bytes.is_some(), "more entries than a bucket takes");
    b[at..at + 2].copy_from_slice(&(bytes.unwrap_or(0) as u16).to_le_bytes());
    seal(&mut b, BlockKind::Dir, domain, volume, addr.0, seq);
    b
}

/// Whether the block is a bucket, of whatever directory.
///
/// # Errors
/// [`Corrupt`] where it is not.
pub fn check_bucket(block: &[u8], volume: u32, addr: BlockAddr) -> Result<(), Corrupt> {
    open(block, BlockKind::Dir, volume, addr.0).map(|_| ())
}

/// Decodes the bucket of `dir` at logical block `lblk`.
///
/// # Errors
/// [`Corrupt`] where the block is not that bucket.
pub fn decode_bucket(
    block: &[u8],
    dir: InodeNo,
    lblk: u64,
    volume: u32,
    addr: BlockAddr,
) -> Result<Vec<Dentry>, Corrupt> {
    open(block, BlockKind::Dir, volume, addr.0)?;
    let mut r = Reader::new(&block[HEADER_BYTES..], "directory bucket");
    let (d, l) = (r.u64()?, r.u48()?);
    let n = usize::from(r.u16()?);
    if d != dir.0 || l != lblk {
        return Err(r.bad(format!("at {addr} is of directory {d}, bucket {l}, not {} bucket {lblk}", dir.0)));
    }
    decode_entries(r.bytes(n)?)
}
