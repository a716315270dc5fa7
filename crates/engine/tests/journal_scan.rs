//! The scan of a journal finds the same, however many threads read it: on journals that random writers and accidents left,
//! compared with a walk of one thread, block by block, over a copy in memory.

use braidfs::{MkfsOptions, mkfs};
use braidfs_device::{CountDevice, Device, Effect, FaultDevice, MemDevice, Op, Rule};
use braidfs_format::domain::DomainHeader;
use braidfs_format::journal::{
    CHUNK_MAX_BLOCKS, Chunk, ChunkId, ChunkKind, Record, decode_chunk, encode_chunk, peek_chunk,
};
use braidfs_format::{BLOCK_BYTES, BlockAddr, DomainId, InodeNo, TxId};
use braidfs_store::Store;
use braidfs_store::ring::{AsItIs, Ring};
use braidfs_store::super_io::read_super;
use braidfs_sync::workers::Workers;
use std::sync::Arc;
use zerocopy::FromZeros;

/// Where the ring lies: behind the tables of group 1.
const START: u64 = 5000;
const DOMAIN: DomainId = DomainId(3);

/// What a scan says, its error being one of these.
#[derive(Debug, PartialEq)]
enum Said {
    Found(Vec<Chunk>, u64),
    /// The header is an old one.
    Ahead,
    Unreadable,
}

/// A ring of blocks, and what happened to it.
struct Ringed {
    blocks: Vec<[u8; BLOCK_BYTES]>,
    unreadable: Vec<bool>,
    volume: u32,
    /// Where chunks of the newest lap begin.
    begins: Vec<u64>,
}

impl Ringed {
    fn bytes(&self, at: usize, n: usize) -> Vec<u8> {
        self.blocks[at..self.blocks.len().min(at + n)].concat()
    }

    fn put(&mut self, pos: u64, bytes: &[u8]) {
        let at = (pos % self.blocks.len() as u64) as usize;
        for (i, b) in bytes.chunks_exact(BLOCK_BYTES).enumerate() {
            self.blocks[at + i].copy_from_slice(b);
        }
    }

    /// Writes chunks from `pos` on to `end`, as a journal does; some are lost, torn, or written in part.
    fn write(&mut self, mut pos: u64, end: u64, rng: &mut fastrand::Rng) {
        let ring = self.blocks.len() as u64;
        self.begins.clear();
        while pos < end {
            let records = records(self.volume, pos, ring, rng);
            let kind = rng.choice([ChunkKind::Stream, ChunkKind::Commit, ChunkKind::RollForward]).unwrap();
            let id = |pos| ChunkId { kind, domain: DOMAIN, volume: self.volume, pos, tx: TxId(pos / 7 + 1), stream: 0 };
            let blocks = (encode_chunk(id(pos), &records).0.len() / BLOCK_BYTES) as u64;
            if blocks > ring {
                continue;
            }
            if pos % ring + blocks > ring {
                pos = pos.next_multiple_of(ring);
                if pos >= end {
                    return;
                }
            }
            let mut chunk = encode_chunk(id(pos), &records).0;
            match rng.u8(..12) {
                // never written
                0 => {}
                1 => {
                    let i = rng.usize(..chunk.len());
                    chunk[i] ^= 1 << rng.u8(..8);
                    self.put(pos, &chunk);
                }
                2 => {
                    let some = rng.usize(..=blocks as usize);
                    self.put(pos, &chunk[..some * BLOCK_BYTES]);
                }
                _ => self.put(pos, &chunk),
            }
            self.begins.push(pos);
            pos += blocks;
        }
    }

    /// As the engine read it when one thread did all.
    fn walk(&self, tail: u64) -> Said {
        if self.unreadable.contains(&true) {
            return Said::Unreadable;
        }
        let ring = self.blocks.len() as u64;
        let (mut pos, mut out, mut end) = (tail, Vec::new(), tail);
        while pos < tail + ring {
            let at = (pos % ring) as usize;
            let block = &self.blocks[at];
            match peek_chunk(block, self.volume, DOMAIN, pos) {
                Some(n) if pos + u64::from(n) <= tail + ring => {
                    match decode_chunk(&self.bytes(at, n as usize), self.volume, DOMAIN, pos) {
                        Ok(c) => {
                            pos += u64::from(n);
                            end = pos;
                            out.push(c);
                            continue;
                        }
                        Err(_) => end = pos + 1,
                    }
                }
                _ => {
                    let said = u64::from_le_bytes(block[16..24].try_into().unwrap());
                    if said >= tail + ring
                        && said % ring == at as u64
                        && let Some(n) = peek_chunk(block, self.volume, DOMAIN, said)
                        && decode_chunk(&self.bytes(at, n as usize), self.volume, DOMAIN, said).is_ok()
                    {
                        return Said::Ahead;
                    }
                }
            }
            pos += 1;
        }
        Said::Found(out, end)
    }
}

/// Records of one block, or of many; some hold bytes that look like a chunk which begins at a block of this one.
fn records(volume: u32, pos: u64, ring: u64, rng: &mut fastrand::Rng) -> Vec<u8> {
    let most = ring.min(u64::from(CHUNK_MAX_BLOCKS)) as usize;
    let scale = rng.u8(..9);
    let blocks = rng.usize(1..=most.min(1 << scale));
    let mut v = Vec::new();
    if blocks == 1 || rng.bool() {
        for _ in 0..rng.usize(..30) {
            Record::Free { addr: BlockAddr(rng.u64(..1 << 40)), len: rng.u32(1..) }.encode(&mut v);
        }
        let n = (blocks - 1) * BLOCK_BYTES / 8;
        Record::Orphans((0..n).map(|_| InodeNo(rng.u64(..))).collect()).encode(&mut v);
        return v;
    }
    // 64 bytes of header, 5 of the record: then numbers of inodes, which may be any bytes
    let mut bytes = vec![0u8; (blocks - 1) * BLOCK_BYTES / 8 * 8];
    for inside in 1..blocks - 1 {
        if rng.bool() {
            continue;
        }
        // of this position, or of any other
        let at = if rng.u8(..4) > 0 { pos + inside as u64 } else { rng.u64(..pos + 3 * ring) };
        let id = ChunkId { kind: ChunkKind::RollForward, domain: DOMAIN, volume, pos: at, tx: TxId(1), stream: 0 };
        let mut inner = Vec::new();
        Record::Orphans((0..rng.usize(..1500)).map(|_| InodeNo(rng.u64(..))).collect()).encode(&mut inner);
        let chunk = encode_chunk(id, &inner).0;
        let from = inside * BLOCK_BYTES - 69;
        let n = chunk.len().min(bytes.len() - from);
        bytes[from..from + n].copy_from_slice(&chunk[..n]);
    }
    let numbers = bytes.chunks_exact(8).map(|b| InodeNo(u64::from_le_bytes(b.try_into().unwrap())));
    Record::Orphans(numbers.collect()).encode(&mut v);
    v
}

fn said(r: braidfs_store::Result<(Vec<Chunk>, u64)>) -> Said {
    match r {
        Ok((chunks, end)) => Said::Found(chunks, end),
        Err(braidfs_store::Error::Corrupt(_)) => Said::Ahead,
        Err(_) => Said::Unreadable,
    }
}

#[test]
fn threads_find_in_a_journal_what_one_finds() {
    let seed = std::env::var("BRAIDFS_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(1);
    let mem = Arc::new(MemDevice::new(64 << 8));
    mkfs::format(&[mem.clone() as Arc<dyn Device>], &MkfsOptions::default()).unwrap();
    let faulty = Arc::new(FaultDevice::new(mem.clone(), seed));
    let (sb, devices) = read_super(&[faulty.clone() as Arc<dyn Device>]).unwrap();
    let store = Arc::new(Store::new(devices, &sb).unwrap());
    let (_, start) = store.place(BlockAddr(START), 1).unwrap();
    let workers = [Workers::alone(), Workers::always(2), Workers::always(5)];
    let (mut found, mut ahead, mut unreadable, mut hidden, mut wrapped) = (0, 0, 0, 0, 0);
    for round in 0..800 {
        let mut rng = fastrand::Rng::with_seed(seed ^ (round << 32));
        // from rings of a few blocks to such that are read in pieces of full size
        let scale = rng.u8(1..9);
        let ring = if round % 40 == 0 { rng.u64(4000..6000) } else { rng.u64(1..=1 << scale) };
        let laps = rng.u64(..3);
        let mut r = Ringed {
            blocks: vec![[0; BLOCK_BYTES]; ring as usize],
            unreadable: vec![false; ring as usize],
            volume: store.volume,
            begins: Vec::new(),
        };
        let head = ring * laps + rng.u64(..=ring);
        let from = if rng.bool() { 0 } else { head.saturating_sub(ring) };
        r.write(from, head, &mut rng);
        // mostly one that a checkpoint leaves, also that of an older header, or anything
        let kept: Vec<u64> = r.begins.iter().copied().filter(|p| *p + ring >= head).collect();
        let tail = match rng.u8(..8) {
            0 => head.saturating_sub(rng.u64(..=2 * ring)),
            1 => head,
            _ => rng.choice(&kept).copied().unwrap_or(head),
        };
        if rng.u8(..6) == 0 {
            let bad = rng.usize(..ring as usize);
            r.unreadable[bad] = true;
            let at = start + bad as u64;
            faulty.add(Rule::new(Op::Read, Effect::Fail(5)).blocks(at..at + 1));
        }
        for (i, b) in r.blocks.iter().enumerate() {
            mem.write(start + i as u64, b).unwrap();
        }
        let mut header = DomainHeader::new_zeroed();
        header.journal_start = START.into();
        header.journal_blocks = (ring as u32).into();
        let ring_of = Ring::new(store.clone(), DOMAIN, &header);
        let want = r.walk(tail);
        for w in &workers {
            let got = said(ring_of.scan(tail, w, &AsItIs));
            assert!(got == want, "seed {seed}, round {round}, {w:?}: ring of {ring}, tail {tail}, head {head}");
        }
        faulty.clear();
        match &want {
            Said::Found(chunks, _) => {
                found += chunks.len();
                // pieces begin at quarters of the ring
                let cut = |c: &&Chunk| {
                    (1..4)
                        .any(|q| (tail + q * (ring / 4)) > c.pos && tail + q * (ring / 4) < c.pos + u64::from(c.blocks))
                };
                hidden += chunks.iter().filter(cut).count();
                wrapped += usize::from(chunks.windows(2).any(|w| w[0].pos / ring < w[1].pos / ring));
            }
            Said::Ahead => ahead += 1,
            Said::Unreadable => unreadable += 1,
        }
    }
    eprintln!(
        "{found} chunks, {hidden} over two pieces, {wrapped} journals wrapped, {ahead} ahead, {unreadable} unreadable"
    );
    assert!(found > 1000 && hidden > 100 && wrapped > 20 && ahead > 5 && unreadable > 20);
}

/// A ring in which each block claims to begin a chunk of the greatest length: that is not read anew for each of them.
#[test]
fn torn_heads_cost_no_read_each() {
    const RING: u64 = 4096;
    let mem = Arc::new(MemDevice::new(64 << 8));
    mkfs::format(&[mem.clone() as Arc<dyn Device>], &MkfsOptions::default()).unwrap();
    let counted = Arc::new(CountDevice::new(mem.clone() as Arc<dyn Device>));
    let (sb, devices) = read_super(&[counted.clone() as Arc<dyn Device>]).unwrap();
    let store = Arc::new(Store::new(devices, &sb).unwrap());
    let (_, start) = store.place(BlockAddr(START), 1).unwrap();
    let mut body = Vec::new();
    let n = (CHUNK_MAX_BLOCKS as usize - 1) * BLOCK_BYTES / 8;
    Record::Orphans(vec![InodeNo(1); n]).encode(&mut body);
    let (kind, volume) = (ChunkKind::Stream, store.volume);
    let chunk = encode_chunk(ChunkId { kind, domain: DOMAIN, volume, pos: 0, tx: TxId(1), stream: 0 }, &body).0;
    let mut head = chunk[..BLOCK_BYTES].to_vec();
    for pos in 0..RING {
        head[16..24].copy_from_slice(&pos.to_le_bytes());
        assert_eq!(peek_chunk(&head, volume, DOMAIN, pos), Some(CHUNK_MAX_BLOCKS));
        mem.write(start + pos, &head).unwrap();
    }
    let mut header = DomainHeader::new_zeroed();
    header.journal_start = START.into();
    header.journal_blocks = (RING as u32).into();
    let ring = Ring::new(store, DOMAIN, &header);
    for w in [Workers::alone(), Workers::always(3)] {
        let before = counted.counters();
        let (chunks, end) = ring.scan(0, &w, &AsItIs).unwrap();
        let read = (counted.counters() - before).read_blocks;
        assert!(chunks.is_empty() && end > 0);
        assert!(read <= 2 * RING, "{read} blocks were read of a ring of {RING}");
    }
}
