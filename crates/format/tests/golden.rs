//! A format change must come with a new format version.
//!
//! One of every structure is encoded with fixed contents; the CRC-32C of each result stands in `golden.txt` under the
//! format version that it belongs to. After a deliberate change: raise `FORMAT_VERSION`, then run the test once with
//! `BRAIDFS_BLESS=1`, and write down in docs/disk-format.md what changed.

use braidfs_format::bat::{self, BatEntry};
use braidfs_format::dentry::{self, Dentry};
use braidfs_format::domain::{CLEAN, DomainHeader};
use braidfs_format::group::{
    GroupHeader, OWNERS_PER_BLOCK, Owner, SegmentEntry, SegmentKind, SegmentTable, Temperature, Written, encode_owners,
    table_mark,
};
use braidfs_format::inode::{Content, Extent, Inode, LeafRef, Link, NOCOW, Placement, Timestamp, Tombstone};
use braidfs_format::journal::{ChunkId, ChunkKind, Record, encode_chunk};
use braidfs_format::node::{DIR, NodeBlockBuilder, NodeEntry, NodeKind, NodeRecord, NodeTableBlock, REMOTE, USED};
use braidfs_format::super_block::{DeviceEntry, INCOMPAT_DATA_SUMS, SuperBlock};
use braidfs_format::{BlockAddr, DomainId, FORMAT_VERSION, Geometry, InodeNo, NodeId, TxId};
use std::fmt::Write;

const VOLUME: u32 = 0x0403_0201;

fn super_block() -> Vec<u8> {
    let mut s = SuperBlock::empty();
    s.uuid = std::array::from_fn(|i| i as u8 + 1);
    s.incompat = INCOMPAT_DATA_SUMS.into();
    s.group_blocks = 1024.into();
    s.label[..5].copy_from_slice(b"golden"[..5].as_ref());
    s.groups = 7.into();
    s.domains = 2.into();
    s.max_domains = 16.into();
    s.devices = 1.into();
    s.inline_max = 3400.into();
    s.mlogs = 2.into();
    s.domain_table = 1.into();
    s.bat = 33.into();
    s.bat_pairs = 4.into();
    s.placement = Placement::Dirs as u8;
    s.hash_key = [9; 16];
    s.created = 1_700_000_000.into();
    s.device[0] = DeviceEntry {
        uuid: [3; 16],
        blocks: 8192.into(),
        data_start: 48.into(),
        first_group: 0.into(),
        groups: 7.into(),
        last_group_blocks: 1024.into(),
        flags: 0.into(),
        reserved: [0; 16],
    };
    s.to_block(0, 0, 1)
}

fn inode(content: Content) -> Inode {
    Inode {
        mode: 0o100_640,
        uid: 1000,
        gid: 100,
        nlink: 2,
        size: 123_456,
        blocks: 31,
        rdev: 0x0801,
        flags: NOCOW,
        placement: Placement::Spread,
        atime: Timestamp { sec: -1, nsec: 5 },
        mtime: Timestamp { sec: 1_700_000_000, nsec: 999_999_999 },
        ctime: Timestamp { sec: 1_700_000_001, nsec: 0 },
        btime: Timestamp { sec: 1_600_000_000, nsec: 1 },
        link_seq: 77,
        links: vec![
            Link { parent: InodeNo::ROOT, name: b"file".as_slice().into() },
            Link { parent: InodeNo(300), name: b"other".as_slice().into() },
        ],
        xattrs: vec![(b"user.k".as_slice().into(), b"value".as_slice().into())],
        link_nodes: vec![],
        xattr_nodes: vec![],
        tombstones: vec![Tombstone {
            link: Link { parent: InodeNo(7), name: b"lost".as_slice().into() },
            newcomer: InodeNo(8),
            generation: 2,
            version: 9,
        }],
        exchange: Some((InodeNo(10), 3, 11)),
        content,
    }
}

fn inodes() -> Vec<u8> {
    let extents = vec![
        Extent { lblk: 0, addr: BlockAddr(100), len: 2, unwritten: false, sums: Some(Box::new([1, 2])) },
        Extent { lblk: 9, addr: BlockAddr(200), len: 30, unwritten: true, sums: None },
    ];
    let refs = vec![LeafRef { first: 0, node: NodeId(50) }, LeafRef { first: 4096, node: NodeId(51) }];
    let contents = [
        Content::None,
        Content::Inline(b"small".to_vec()),
        Content::InlineDir(dentry::encode_entries(&entries())),
        Content::Extents(extents),
        Content::Tree { depth: 1, refs: refs.clone() },
        Content::Tree { depth: 2, refs },
    ];
    let mut all: Vec<u8> = contents.into_iter().flat_map(|c| inode(c).encode()).collect();
    let overflow =
        Inode { link_nodes: vec![NodeId(60), NodeId(61)], xattr_nodes: vec![NodeId(62)], ..inode(Content::None) };
    all.extend(overflow.encode());
    all
}

fn entries() -> Vec<Dentry> {
    vec![
        Dentry { hash: 3, node: InodeNo(5), generation: 1, kind: 8, name: b"a".as_slice().into() },
        Dentry { hash: 1 << 50, node: InodeNo(6), generation: 2, kind: 4, name: b"directory".as_slice().into() },
    ]
}

fn record(node: u64, payload: Vec<u8>) -> NodeRecord {
    let node = InodeNo(node);
    NodeRecord {
        node: node.node(),
        generation: 4,
        kind: NodeKind::Inode,
        flags: USED | REMOTE,
        owner: node,
        version: 12,
        payload,
    }
}

fn node_block() -> Vec<u8> {
    let mut b = NodeBlockBuilder::default();
    for (i, n) in [10, 0, 600].into_iter().enumerate() {
        b.push(&record(i as u64 + 1, vec![7; n]).encode()).expect("room");
    }
    b.finish(1, VOLUME, BlockAddr(70), 5)
}

fn journal() -> Vec<u8> {
    let records = [
        Record::Node {
            node: NodeId(5),
            entry: NodeEntry { addr: BlockAddr(70), index: 1, flags: USED, generation: 4, written: 4 },
        },
        Record::Alloc {
            addr: BlockAddr(71),
            len: 3,
            kind: SegmentKind::Data,
            temperature: Temperature::Cold,
            owner: InodeNo(5),
            lblk: 6,
        },
        Record::Free { addr: BlockAddr(80), len: 2 },
        Record::Live { addr: BlockAddr(70), live: 3 },
        Record::Remote { dir: InodeNo(1), child: InodeNo(5), generation: 4, name: b"name".as_slice().into() },
        Record::Orphans(vec![InodeNo(8), InodeNo(9)]),
        Record::Full(record(5, b"state".to_vec())),
        Record::Sums { addr: BlockAddr(71), sums: vec![11, 12, 13] },
        Record::Part { pos: 33, crc: 0xdead_beef },
        Record::After(TxId(3)),
    ];
    let mut body = Vec::new();
    records.iter().for_each(|r| r.encode(&mut body));
    let kinds = [ChunkKind::Stream, ChunkKind::Commit, ChunkKind::RollForward];
    let chunk = |kind| {
        let id = ChunkId { kind, domain: DomainId(1), volume: VOLUME, pos: 40, tx: TxId(4), stream: 2 };
        encode_chunk(id, &body).0
    };
    kinds.into_iter().flat_map(chunk).collect()
}

fn home_tables() -> Vec<(&'static str, Vec<u8>)> {
    let pair = BlockAddr(2);
    let mut segments = [SegmentEntry::default(); 2];
    segments[1] = SegmentEntry { kind: SegmentKind::Node, temperature: Temperature::Hot, age: 6, valid: [5; 8] };
    let mut owners = [Owner::default(); OWNERS_PER_BLOCK as usize];
    owners[1] = Owner { node: InodeNo(5), lblk: (1 << 40) + 2, live: 0, birth: 0x10203 };
    owners[255] = Owner { live: 9, ..Owner::default() };
    let mut nodes = [NodeEntry::default(); 254];
    nodes[1] = NodeEntry { addr: BlockAddr(70), index: 2, flags: USED | DIR, generation: 1, written: 0 };
    let mut domain = DomainHeader::empty();
    domain.domain = 1.into();
    domain.flags = CLEAN.into();
    domain.journal_start = 60.into();
    domain.journal_blocks = 128.into();
    domain.tail_pos = 7.into();
    domain.head_pos = 9.into();
    domain.checkpointed_tx = 3.into();
    domain.last_tx = 4.into();
    domain.mounts = 5.into();
    domain.checkpoint = 6.into();
    domain.tables = table_mark(3, (2 << 32) + 8).into();
    let written = Written { checkpoint: 6, counts: (1..=12).collect() };
    let bat = [BatEntry { domain: Some(DomainId(1)), epoch: 2 }, BatEntry { domain: None, epoch: 3 }];
    vec![
        ("bat", bat::encode(&bat, VOLUME, 33, 1, 8)),
        ("domain header", domain.to_block(VOLUME, 3, 1, 8)),
        ("group header", GroupHeader::new(3, 1024, 2, 1).to_block(VOLUME, BlockAddr(0), 1, 8)),
        ("segment table", SegmentTable::encode(&segments, &written, 1, VOLUME, pair, 1, 8)),
        ("owner table", encode_owners(&owners, 1, VOLUME, pair, 1, 8)),
        ("node table", NodeTableBlock::encode(&nodes, 1, VOLUME, pair, 1, 8)),
    ]
}

/// Where the regions of a group lie.
fn geometry() -> Vec<u8> {
    let mut v = Vec::new();
    for segments in [2u32, 32] {
        let g = Geometry::new(segments * 512, 5).expect("a good size");
        let places = [
            g.segment_table_addr(3),
            g.owners_addr(3, 1, 1),
            g.node_table_addr(3, 5),
            BlockAddr(g.meta_blocks().into()),
            BlockAddr(g.node(4, 2).0),
        ];
        v.extend(places.iter().flat_map(|a| a.0.to_le_bytes()));
    }
    v
}

#[test]
fn bytes_are_those_of_the_format_version() {
    let mut all = vec![("superblock", super_block())];
    all.extend(home_tables());
    all.push(("inode records", inodes()));
    all.push(("node block", node_block()));
    all.push(("bucket", dentry::encode_bucket(&entries(), InodeNo(1), 0, 1, VOLUME, BlockAddr(90), 8)));
    all.push(("journal chunks", journal()));
    all.push(("geometry", geometry()));
    let mut now = format!("format version {FORMAT_VERSION}\n");
    for (name, bytes) in &all {
        writeln!(now, "{:08x} {name}", crc32c::crc32c(bytes)).expect("a string takes it");
    }
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden.txt");
    if std::env::var_os("BRAIDFS_BLESS").is_some() {
        std::fs::write(path, &now).expect("golden.txt can be written");
    }
    let golden = std::fs::read_to_string(path).expect("golden.txt");
    assert_eq!(golden, now, "the format has changed: raise FORMAT_VERSION, then bless (see the top of this file)");
}
