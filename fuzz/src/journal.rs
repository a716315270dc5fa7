//! Journals: chunks of a volume that crashed get other records, with right checksums, also in the commit record that names
//! them. Then the volume is mounted, which replays them.
//!
//! Input: which chunk (1 byte), what to do (1), then records, or edits of the chunk's records.

use crate::Input;
use crate::image::{bases, use_up};
use braidfs::device::{BLOCK_BYTES, Image};
use braidfs::format::domain::DomainHeader;
use braidfs::format::journal::{Chunk, ChunkId, ChunkKind, Record, decode_chunk, encode_chunk};
use braidfs::format::super_block::SuperBlock;
use braidfs::format::{DomainId, TxId};

/// A domain's journal on the device of a sample.
struct Ring {
    domain: u16,
    volume: u32,
    first: u64,
    blocks: u64,
    chunks: Vec<Chunk>,
}

fn read(image: &Image, block: u64, blocks: u64) -> Vec<u8> {
    let mut b = vec![0; blocks as usize * BLOCK_BYTES];
    // a block of our own image
    image.read(block, &mut b).unwrap_or_default();
    b
}

fn rings(image: &Image) -> Vec<Ring> {
    let Ok(sb) = SuperBlock::from_block(&read(image, 0, 1), 0) else { return Vec::new() };
    let mut out = Vec::new();
    for domain in 0..sb.domains.get() {
        let at = sb.domain_table.get() + 2 * u64::from(domain);
        let Ok((_, _, h)) = DomainHeader::from_pair(&read(image, at, 2), sb.volume_id(), at, domain) else { continue };
        let first = h.journal_start.get() + sb.device[0].data_start.get();
        let mut ring = Ring {
            domain,
            volume: sb.volume_id(),
            first,
            blocks: u64::from(h.journal_blocks.get()),
            chunks: Vec::new(),
        };
        let bytes = read(image, first, ring.blocks);
        let mut pos = h.tail_pos.get();
        while pos < h.tail_pos.get() + ring.blocks {
            let rest = &bytes[(pos % ring.blocks) as usize * BLOCK_BYTES..];
            match decode_chunk(rest, ring.volume, DomainId(domain), pos) {
                Ok(c) => {
                    pos += u64::from(c.blocks);
                    ring.chunks.push(c);
                }
                Err(_) => pos += 1,
            }
        }
        out.push(ring);
    }
    out
}

/// Writes a chunk in the place of another one; its new checksum. Too long a body is cut.
fn write(image: &mut Image, ring: &Ring, c: &Chunk, body: &[u8]) -> u32 {
    let room = c.blocks as usize * BLOCK_BYTES - 64;
    let body = &body[..body.len().min(room)];
    let id = ChunkId {
        kind: c.kind,
        domain: DomainId(ring.domain),
        volume: ring.volume,
        pos: c.pos,
        tx: TxId(c.tx.0),
        stream: c.stream,
    };
    let (mut bytes, mut crc) = encode_chunk(id, body);
    if bytes.len() < c.blocks as usize * BLOCK_BYTES {
        // as long as the old one, so that the ring stays whole
        bytes.resize(c.blocks as usize * BLOCK_BYTES, 0);
        bytes[32..36].copy_from_slice(&c.blocks.to_le_bytes());
        crc = braidfs::format::block::checksum(&bytes);
        bytes[4..8].copy_from_slice(&crc.to_le_bytes());
    }
    image.write(ring.first + c.pos % ring.blocks, &bytes).unwrap_or_default();
    crc
}

/// Replaces records of a chunk and replays the journal.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let (sample, _) = &bases()[1];
    let rings = rings(&sample.image);
    let all: Vec<(&Ring, &Chunk)> = rings.iter().flat_map(|r| r.chunks.iter().map(move |c| (r, c))).collect();
    if all.is_empty() {
        return;
    }
    let (ring, chunk) = all[usize::from(input.byte()) % all.len()];
    let mut body = Vec::new();
    let how = input.byte();
    if how % 4 == 0 {
        body.extend_from_slice(input.0);
    } else {
        chunk.records.iter().for_each(|r| r.to_owned().encode(&mut body));
        for _ in 0..16 {
            if input.is_empty() {
                break;
            }
            let at = input.number(2) as usize % body.len().max(1);
            let value = input.byte();
            if let Some(b) = body.get_mut(at) {
                *b = value;
            }
        }
        if how % 4 == 1 {
            body.extend_from_slice(input.0);
        }
    }
    let mut image = sample.image.clone();
    let crc = write(&mut image, ring, chunk, &body);
    for commit in ring.chunks.iter().filter(|c| c.kind == ChunkKind::Commit && c.pos != chunk.pos) {
        let mut changed = false;
        let mut body = Vec::new();
        for r in &commit.records {
            match r.to_owned() {
                Record::Part { pos, .. } if pos == chunk.pos => {
                    changed = true;
                    Record::Part { pos, crc }.encode(&mut body);
                }
                other => other.encode(&mut body),
            }
        }
        if changed {
            write(&mut image, ring, commit, &body);
        }
    }
    use_up(&image, sample);
}
