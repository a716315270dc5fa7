//! Numbers that a volume in use counts on from are bounded where they are read: none can pass its end afterwards.

use braidfs_format::block::{BlockKind, open, seal};
use braidfs_format::codec::Reader;
use braidfs_format::domain::DomainHeader;
use braidfs_format::group::{SegmentEntry, SegmentTable, Written, claim_seq};
use braidfs_format::journal::{ChunkId, ChunkKind, decode_chunk, encode_chunk};
use braidfs_format::node::{NodeKind, NodeRecord, USED};
use braidfs_format::{BLOCK_BYTES, BlockAddr, COUNTER_MAX, DomainId, InodeNo, NodeId, TxId};

const VOLUME: u32 = 7;
/// The last number that is taken, and some that are none.
const LAST: u64 = COUNTER_MAX;
const NONE: [u64; 3] = [COUNTER_MAX + 1, u64::MAX - 2, u64::MAX];

#[test]
fn of_a_domain_header() {
    let sets: [fn(&mut DomainHeader, u64); 3] =
        [|h, n| h.last_tx = n.into(), |h, n| h.checkpointed_tx = n.into(), |h, n| h.checkpoint = n.into()];
    for set in sets {
        let holds = |n: u64| {
            let mut h = DomainHeader::empty();
            h.journal_blocks = 16.into();
            set(&mut h, n);
            let pair = [h.to_block(VOLUME, 10, 0, 1), vec![0; BLOCK_BYTES]].concat();
            DomainHeader::from_pair(&pair, VOLUME, 10, 0).is_ok()
        };
        assert!(holds(0) && holds(LAST) && !NONE.into_iter().any(holds));
    }
}

#[test]
fn of_a_chunk() {
    let holds = |n: u64| {
        let id =
            ChunkId { kind: ChunkKind::Commit, domain: DomainId(0), volume: VOLUME, pos: 3, tx: TxId(n), stream: 0 };
        decode_chunk(&encode_chunk(id, &[]).0, VOLUME, DomainId(0), 3).is_ok()
    };
    assert!(holds(1) && holds(LAST) && !NONE.into_iter().any(holds));
}

#[test]
fn of_a_node_record() {
    let holds = |version: u64| {
        let record = NodeRecord {
            node: NodeId(5),
            generation: 1,
            kind: NodeKind::Inode,
            flags: USED,
            owner: InodeNo(5),
            version,
            payload: Vec::new(),
        };
        let mut bytes = Vec::new();
        record.encode_to(&mut bytes);
        NodeRecord::decode(&mut Reader::new(&bytes, "node record")).is_ok()
    };
    assert!(holds(1) && holds(LAST) && !NONE.into_iter().any(holds));
}

#[test]
fn of_a_checkpoint() {
    let holds = |checkpoint: u64| {
        let written = Written { checkpoint, ..Written::blank(2) };
        let addr = BlockAddr(2);
        let table = SegmentTable::encode(&[SegmentEntry::default(); 2], &written, 0, VOLUME, addr, 0, 1);
        SegmentTable::decode(&[table, vec![0; BLOCK_BYTES]].concat(), 2, VOLUME, addr).is_ok()
    };
    assert!(holds(1) && holds(LAST) && !NONE.into_iter().any(holds));
}

/// Of a group's tables the high half is the number of the claim: all of these are right, and there is room for writes.
#[test]
fn of_a_block() {
    let holds = |kind: BlockKind, seq: u64| {
        let mut b = vec![0; BLOCK_BYTES];
        seal(&mut b, kind, 0, VOLUME, 9, seq);
        open(&b, kind, VOLUME, 9).is_ok()
    };
    for kind in [BlockKind::Super, BlockKind::Bat, BlockKind::Domain, BlockKind::Node, BlockKind::Dir, BlockKind::Owner]
    {
        assert!(holds(kind, 0) && holds(kind, LAST) && !NONE.into_iter().any(|n| holds(kind, n)), "{kind:?}");
    }
    for kind in [BlockKind::Group, BlockKind::SegmentTable, BlockKind::Owners, BlockKind::NodeTable] {
        assert!(holds(kind, claim_seq(1 << 31)) && holds(kind, claim_seq(u32::MAX) + (1 << 30)), "{kind:?}");
        assert!(!holds(kind, u64::MAX) && !holds(kind, claim_seq(u32::MAX) + (3 << 30)), "{kind:?}");
    }
}
