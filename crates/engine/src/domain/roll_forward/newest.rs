//! Which roll-forward records of a journal count: of each node the newest, of each fsync that reached the device whole.
//!
//! Decoding, and the comparison of data with its checksums, is done by several threads, chunk by chunk and run by run of
//! blocks; which record is the newest is decided in the order of the chunks.

use crate::domain::recovered::{Claim, Forward, Recovered};
use crate::error::Result;
use crate::planted::{Bug, planted};
use crate::store::Store;
use crate::types::*;
use braidfs_device::AlignedBuf;
use braidfs_format::BLOCK_BYTES;
use braidfs_format::inode::Inode;
use braidfs_format::journal::{Chunk, ChunkKind, RecordRef, Sums};
use braidfs_format::node::{DIR, NodeKind, NodeRecord, NodeRecordRef};
use braidfs_sync::workers::Workers;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

/// Chunks that one thread has decoded before another has started.
const FEW_CHUNKS: usize = 32;
/// Blocks of data that a thread has in memory: a record may name a GiB of them.
const RUN_BLOCKS: u64 = 256;
/// Blocks between two that are wanted which are read rather than passed over by another request.
const GAP_BLOCKS: u64 = 8;

/// Of the roll-forward chunks of transactions after `last`, per inode its newest records. All names that they claim go to the
/// claims of `rec`, and to its traces goes what came with an fsync and cannot be read.
///
/// # Errors
/// `Corrupt` where an inode does not hold; of a device that answers nothing.
pub(in crate::domain) fn newest_records(
    store: &Store,
    chunks: &[Chunk],
    last: u64,
    workers: &Workers,
    rec: &mut Recovered,
) -> Result<Vec<Forward>> {
    let Recovered { claims, traces, .. } = rec;
    let mut forward: Vec<&Chunk> =
        chunks.iter().filter(|c| c.kind == ChunkKind::RollForward && c.tx.0 > last).collect();
    forward.sort_by_key(|c| c.pos);
    let torn = torn(store, &forward, workers, traces)?;
    let names =
        workers.each(forward.len(), FEW_CHUNKS, |i| if torn[i] { Ok(Vec::new()) } else { claims_of(forward[i]) })?;
    let mut merged: BTreeMap<NodeId, NodeRecordRef<'_>> = BTreeMap::new();
    let mut claimed: HashMap<InodeNo, Range<usize>> = HashMap::new();
    for (i, names) in names.into_iter().enumerate().filter(|(i, _)| !torn[*i]) {
        for (ino, names) in names {
            // mostly those that it had before
            let before = claimed.get(&ino).map(|r| &claims[r.clone()]);
            if before != Some(names.as_slice()) {
                claimed.insert(ino, claims.len()..claims.len() + names.len());
                claims.extend(names);
            }
        }
        for r in &forward[i].records {
            let RecordRef::Full(r) = r else { continue };
            let newer = merged.get(&r.node).is_none_or(|o| {
                r.generation != o.generation || (r.version >= o.version) != planted(Bug::VersionInverted)
            });
            if newer {
                merged.insert(r.node, r);
            }
        }
    }
    let (inodes, overflow): (Vec<_>, Vec<_>) = merged.into_values().partition(|r| r.kind == NodeKind::Inode);
    let mut by_owner: HashMap<InodeNo, Vec<NodeRecord>> = HashMap::new();
    for r in overflow {
        by_owner.entry(r.owner).or_default().push(r.to_owned());
    }
    let with_overflow = |i: &NodeRecordRef<'_>| {
        let record = NodeRecordRef { payload: &[], ..*i }.to_owned();
        let overflow = by_owner.remove(&i.node.inode()).unwrap_or_default();
        Ok(Forward { record, inode: Inode::decode(i.payload)?, overflow })
    };
    inodes.iter().map(with_overflow).collect()
}

/// Names of the inodes in a chunk.
fn claims_of(c: &Chunk) -> Result<Vec<(InodeNo, Vec<Claim>)>> {
    let mut claims = Vec::new();
    for r in &c.records {
        if let RecordRef::Full(r) = r
            && r.kind == NodeKind::Inode
        {
            let (i, ino) = (Inode::decode(r.payload)?, r.node.inode());
            let claim = |link| Claim { ino, link, seq: i.link_seq };
            claims.push((ino, i.links.into_iter().map(claim).collect()));
        }
    }
    Ok(claims)
}

/// Blocks that must have these checksums.
#[derive(Clone, Copy)]
struct Piece<'c> {
    addr: u64,
    sums: Sums<'c>,
    /// Else this chunk is torn.
    chunk: usize,
}

impl Piece<'_> {
    fn end(&self) -> u64 {
        self.addr + self.sums.len() as u64
    }
    fn holds(&self, blocks: &[u8]) -> bool {
        blocks.chunks(BLOCK_BYTES).zip(self.sums.iter()).all(|(b, s)| crc32c::crc32c(b) == s)
    }
}

/// A piece that does not hold.
struct Wrong {
    /// The chunk with which it came.
    chunk: usize,
    /// Where it begins, if it could not be read.
    unreadable: Option<u64>,
}

/// Which of `chunks`, in the order of their positions, are torn: the data blocks that came with them did not reach the device.
/// A write that a crash cuts off may also leave blocks that cannot be read. They might as well have been durable, and gone bad since:
/// `traces` is told of them.
fn torn(store: &Store, chunks: &[&Chunk], workers: &Workers, traces: &mut Vec<String>) -> Result<Vec<bool>> {
    let mut torn = vec![false; chunks.len()];
    if planted(Bug::DataUnchecked) {
        return Ok(torn);
    }
    // a file syncs one at a time, so only its last chunk can be torn
    let mut latest: HashMap<NodeId, usize> = HashMap::new();
    for (i, c) in chunks.iter().enumerate() {
        if let Some(RecordRef::Full(r)) = c.records.iter().next()
            && r.flags & DIR == 0
        {
            latest.insert(r.node, i);
        }
    }
    let mut pieces = Vec::new();
    for chunk in latest.into_values() {
        for r in &chunks[chunk].records {
            let RecordRef::Sums { addr, sums } = r else { continue };
            if !store.geometry().contains(addr, sums.len() as u64) {
                torn[chunk] = true;
            } else if !torn[chunk] {
                let part = |at: usize| (addr.0 + at as u64, sums.part(at, RUN_BLOCKS as usize));
                let parts = (0..sums.len()).step_by(RUN_BLOCKS as usize).map(part);
                pieces.extend(parts.map(|(addr, sums)| Piece { addr, sums, chunk }));
            }
        }
    }
    pieces.sort_unstable_by_key(|p| (p.addr, p.chunk));
    let runs = runs(&pieces);
    let wrong = workers.each_with(runs.len(), 1, || None, |buf, i| compare(store, &pieces[runs[i].clone()], buf))?;
    let mut unreadable = BTreeMap::new();
    for w in wrong.into_iter().flatten() {
        torn[w.chunk] = true;
        if let Some(addr) = w.unreadable {
            unreadable.entry(w.chunk).or_insert(addr);
        }
    }
    for (chunk, addr) in unreadable {
        let c = chunks[chunk];
        traces.push(format!(
            "journal of {}, position {}: data that was synced cannot be read, at block {addr} or behind it: cut off by the crash, \
             or damaged; if damaged, what was synced with it is lost",
            c.domain, c.pos
        ));
    }
    Ok(torn)
}

/// Pieces that are read together, of those that rise.
fn runs(pieces: &[Piece<'_>]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    let mut end = 0;
    for (i, p) in pieces.iter().enumerate() {
        match runs.last_mut() {
            Some(run) if p.addr <= end + GAP_BLOCKS && p.end().max(end) - pieces[run.start].addr <= RUN_BLOCKS => {
                run.end = i + 1;
                end = end.max(p.end());
            }
            _ => {
                runs.push(i..i + 1);
                end = p.end();
            }
        }
    }
    runs
}

/// Reads a run; the pieces of it that do not hold.
fn compare(store: &Store, run: &[Piece<'_>], buf: &mut Option<AlignedBuf>) -> Result<Vec<Wrong>> {
    let Some(first) = run.first().map(|p| p.addr) else { return Ok(Vec::new()) };
    let blocks = run.iter().map(|p| p.end() - first).max().unwrap_or(0) as usize;
    let bytes = blocks * BLOCK_BYTES;
    let buf = match buf {
        Some(buf) if buf.len() >= bytes => buf,
        none => none.insert(AlignedBuf::zeroed(bytes)),
    };
    // what lies between may be what cannot be read, or the end of a device
    let together = store.read(BlockAddr(first), &mut buf[..bytes]).is_ok();
    let mut wrong = Vec::new();
    for p in run {
        let at = (p.addr - first) as usize * BLOCK_BYTES;
        let blocks = &mut buf[at..at + p.sums.len() * BLOCK_BYTES];
        if !together && let Err(why) = store.read(BlockAddr(p.addr), blocks) {
            // what is on a device that is away is not lost, and must not be given up
            if !answers(store, BlockAddr(p.addr)) {
                return Err(why.into());
            }
            wrong.push(Wrong { chunk: p.chunk, unreadable: Some(p.addr) });
        } else if !p.holds(blocks) {
            wrong.push(Wrong { chunk: p.chunk, unreadable: None });
        }
    }
    Ok(wrong)
}

/// Whether the device of a block reads at least the first block of the same group.
fn answers(store: &Store, addr: BlockAddr) -> bool {
    let g = store.geometry();
    let mut block = AlignedBuf::zeroed(BLOCK_BYTES);
    store.read(g.group_start(g.group_of(addr)), &mut block).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::space::testdev::{TestDevice, store};
    use braidfs_format::TxId;
    use braidfs_format::journal::{ChunkId, Record, decode_chunk, encode_chunk};
    use braidfs_format::node::USED;
    use std::sync::Arc;
    use std::sync::atomic::Ordering::Relaxed;

    const D: DomainId = DomainId(0);

    /// What an fsync of inode `node` writes, with the checksums of these runs of blocks.
    fn chunk(node: u64, pos: u64, sums: &[(u64, Vec<u32>)]) -> Chunk {
        let mut body = Vec::new();
        let (flags, payload) = (USED, Vec::new());
        let node = NodeId(node);
        let full = NodeRecord {
            node,
            generation: 1,
            kind: NodeKind::Inode,
            flags,
            owner: node.inode(),
            version: pos,
            payload,
        };
        Record::Full(full).encode(&mut body);
        sums.iter().for_each(|(a, s)| Record::Sums { addr: BlockAddr(*a), sums: s.clone() }.encode(&mut body));
        let id = ChunkId { kind: ChunkKind::RollForward, domain: D, volume: 7, pos, tx: TxId(3), stream: 0 };
        decode_chunk(&encode_chunk(id, &body).0, 7, D, pos).unwrap()
    }

    /// Blocks that all differ, and the checksums of `n` of them from `addr` on.
    fn filled() -> (Arc<TestDevice>, Arc<Store>, impl Fn(u64, usize) -> Vec<u32>) {
        let (device, store) = store(2, 1, 1024);
        let data: Vec<u8> = (0..1024 * BLOCK_BYTES).map(|i| (i / 7 + i / BLOCK_BYTES) as u8).collect();
        store.write(BlockAddr(0), &data).unwrap();
        let sums = move |addr: u64, n: usize| {
            data.chunks(BLOCK_BYTES).skip(addr as usize).take(n).map(crc32c::crc32c).collect()
        };
        (device, store, sums)
    }

    fn torn_of(store: &Store, chunks: &[Chunk]) -> Vec<bool> {
        let all: Vec<&Chunk> = chunks.iter().collect();
        let one = torn(store, &all, &Workers::alone(), &mut Vec::new()).unwrap();
        assert_eq!(one, torn(store, &all, &Workers::always(3), &mut Vec::new()).unwrap());
        one
    }

    #[test]
    fn data_is_compared_piece_by_piece() {
        let (device, store, of) = filled();
        let (n, piece) = (2 * RUN_BLOCKS as usize + 88, RUN_BLOCKS as usize);
        let mut sums = of(100, n);
        let before = device.reads.load(Relaxed);
        assert_eq!(
            torn(&store, &[&chunk(5, 0, &[(100, sums.clone())])], &Workers::alone(), &mut Vec::new()).unwrap(),
            [false]
        );
        assert_eq!(device.reads.load(Relaxed) - before, 3, "no more than a run at a time is in memory");
        for at in [0, piece - 1, piece, 2 * piece - 1, 2 * piece, n - 1] {
            sums[at] ^= 1;
            assert_eq!(torn_of(&store, &[chunk(5, 0, &[(100, sums.clone())])]), [true], "block {at}");
            sums[at] ^= 1;
        }
        assert_eq!(torn_of(&store, &[chunk(5, 0, &[(100, Vec::new())])]), [false]);
        assert_eq!(torn_of(&store, &[chunk(5, 0, &[((1 << 48) - 1, sums)])]), [true]);
    }

    #[test]
    fn a_block_that_cannot_be_read_is_torn_and_told() {
        const START: u64 = 8;
        let (device, store, of) = filled();
        let unreadable = |blocks: Range<u64>| *device.unreadable.lock() = START + blocks.start..START + blocks.end;
        let both = [chunk(5, 0, &[(100, of(100, 10))]), chunk(6, 1, &[(112, of(112, 10))])];
        let torn_of = |chunks: &[Chunk]| {
            let mut traces = Vec::new();
            (torn(&store, &chunks.iter().collect::<Vec<_>>(), &Workers::alone(), &mut traces), traces)
        };
        // both are read together otherwise
        unreadable(105..106);
        let (found, traces) = torn_of(&both);
        assert_eq!(found.unwrap(), [true, false]);
        assert!(traces.len() == 1 && traces[0].starts_with("journal of domain 0, position 0:"), "{traces:?}");
        // nobody wants it
        unreadable(110..111);
        assert!(matches!(torn_of(&both), (Ok(found), traces) if found == [false, false] && traces.is_empty()));
        // an fsync of the same file came later, so this one was durable
        unreadable(105..106);
        let again = [chunk(5, 0, &[(100, of(100, 10))]), chunk(5, 1, &[(112, of(112, 10))])];
        assert!(matches!(torn_of(&again), (Ok(found), traces) if found == [false, false] && traces.is_empty()));
        // nothing can be read: what was synced may be there again when the device is
        unreadable(0..1024);
        assert!(torn_of(&both).0.is_err());
    }

    /// Small files that were synced one after the other lie side by side, and are read together; whose is torn is told all the
    /// same. Only the newest chunk of a file is looked at.
    #[test]
    fn neighbours_are_read_together() {
        let (device, store, of) = filled();
        let mut rng = fastrand::Rng::with_seed(4);
        let mut chunks: Vec<Chunk> = (0..200u64)
            .map(|i| {
                // with holes between, in which blocks of others lie
                let (a, b) = (100 + 4 * i, 100 + 4 * i + 1 + i % 2);
                chunk(1000 + i, i, &[(b, of(b, 1)), (a, of(a, 1))])
            })
            .collect();
        rng.shuffle(&mut chunks);
        let before = device.reads.load(Relaxed);
        let all: Vec<&Chunk> = chunks.iter().collect();
        assert!(!torn(&store, &all, &Workers::alone(), &mut Vec::new()).unwrap().contains(&true));
        assert_eq!(device.reads.load(Relaxed) - before, 4, "800 blocks");
        // overlapping claims, of which one is wrong
        let overlap = [
            chunk(1, 0, &[(300, of(300, 200))]),
            chunk(2, 1, &[(310, of(311, 3))]),
            chunk(3, 2, &[(320, of(320, 250)), (90, of(90, 1))]),
        ];
        assert_eq!(torn_of(&store, &overlap), [false, true, false]);
        // the same file again
        let newest = [chunk(1, 0, &[(300, of(301, 2))]), chunk(1, 1, &[(300, of(300, 2))])];
        assert_eq!(torn_of(&store, &newest), [false, false]);
    }
}
