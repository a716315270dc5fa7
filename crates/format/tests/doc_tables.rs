//! Compares the tables of docs/disk-format.md with the code.
//!
//! A structure's rows are compared with `offset_of!`. What an encoder writes is found by encoding twice with one field
//! changed: the bytes that differ are the field's. Rows must follow each other without a gap.

use braidfs_format::bat::{self, BatEntry};
use braidfs_format::block::{self, BlockHeader, BlockKind, HEADER_BYTES};
use braidfs_format::dentry::{self, Dentry};
use braidfs_format::domain::DomainHeader;
use braidfs_format::geometry;
use braidfs_format::group::{
    GroupHeader, OWNERS_PER_BLOCK, Owner, SegmentEntry, SegmentKind, SegmentTable, Temperature, Written, encode_owners,
};
use braidfs_format::inode::{self, Content, Extent, Inode, LeafRef, Link, Placement, Timestamp, Tombstone};
use braidfs_format::journal::{self, ChunkId, ChunkKind, Record, encode_chunk};
use braidfs_format::node::{self, NodeEntry, NodeKind, NodeRecord, NodeTableBlock};
use braidfs_format::owner::OwnerRecord;
use braidfs_format::quota::QuotaEntry;
use braidfs_format::super_block::{self, DeviceEntry, SuperBlock};
use braidfs_format::{BLOCK_BYTES, BlockAddr, DomainId, FORMAT_VERSION, InodeNo, NodeId, TxId};
use std::mem::offset_of;

const DOC: &str = include_str!("../../../docs/disk-format.md");
const A48: u64 = (1 << 48) - 1;

/// The cells of the table behind a marker, header and rule left out.
fn table(marker: &str) -> Vec<Vec<String>> {
    let marker = format!("<!-- {marker} -->");
    let at = DOC.find(&marker).unwrap_or_else(|| panic!("docs/disk-format.md has no {marker}"));
    DOC[at + marker.len()..]
        .lines()
        .skip(1)
        .take_while(|l| l.starts_with('|'))
        .skip(2)
        .map(|l| l.trim_matches('|').split('|').map(|c| c.trim().to_owned()).collect())
        .collect()
}

/// A field: name, offset, bytes.
type Field = (&'static str, usize, usize);

/// Compares a table of fields. Constant fields (`magic`, `crc`, `zero`) and those whose bytes are `n` need no partner in
/// `code` but must fit between the others; all others must be the same on both sides.
fn compare(name: &str, code: &[Field]) {
    let mut next = 0;
    let mut seen = Vec::new();
    for row in table(&format!("table: {name}")) {
        let (offset, bytes, field) = (&row[0], &row[1], row[2].as_str());
        let found = code.iter().find(|f| f.0 == field);
        if let Ok(offset) = offset.parse::<usize>() {
            assert_eq!(offset, next, "{name}.{field}: a gap, or rows that overlap");
            if let Some(f) = found {
                assert_eq!(offset, f.1, "{name}.{field}: offset");
            }
        }
        match bytes.parse::<usize>() {
            Ok(n) => {
                match found {
                    Some(f) => assert_eq!(n, f.2, "{name}.{field}: bytes"),
                    None => assert!(
                        ["magic", "crc", "zero", "header", "len", "name_len", "value_len"].contains(&field),
                        "{name}.{field}: nothing checks it"
                    ),
                }
                next += n;
            }
            Err(_) => assert_eq!(bytes, "n", "{name}.{field}"),
        }
        seen.push(field.to_owned());
    }
    for f in code {
        assert!(seen.iter().any(|s| s == f.0), "{name}.{}: not in the table", f.0);
    }
}

/// Where two encodings differ: first offset and length of the range.
fn differ(a: &[u8], b: &[u8]) -> (usize, usize) {
    assert_eq!(a.len(), b.len());
    let first = a.iter().zip(b).position(|(x, y)| x != y).expect("the field is not encoded");
    let last = a.iter().zip(b).rposition(|(x, y)| x != y).expect("just found");
    (first, last + 1 - first)
}

/// A field's name, and what changes all of its bytes.
type Change<T> = (&'static str, fn(&mut T));

/// The fields of `base` that `changes` set, as `encode` writes them.
fn probe<T: Clone>(base: &T, encode: impl Fn(&T) -> Vec<u8>, changes: &[Change<T>]) -> Vec<Field> {
    changes
        .iter()
        .map(|(name, change)| {
            let mut other = base.clone();
            change(&mut other);
            let (at, n) = differ(&encode(base), &encode(&other));
            (*name, at, n)
        })
        .collect()
}

fn bytes_of<T, F>(_: impl Fn(&T) -> &F) -> usize {
    size_of::<F>()
}

macro_rules! fields {
    ($t:ty: $($f:ident),*) => { &[$((stringify!($f), offset_of!($t, $f), bytes_of(|t: &$t| &t.$f))),*] };
}

#[test]
fn structures() {
    compare("BlockHeader", fields!(BlockHeader: magic, crc, kind, reserved, domain, volume, addr, seq));
    compare(
        "SuperBlock",
        fields!(SuperBlock: header, version, incompat, compat, group_blocks, uuid, label, groups, domains, max_domains,
            devices, this_device, inline_max, mlogs, domain_table, bat, bat_pairs, placement, reserved0, hash_key,
            created, device, ro_compat, reserved),
    );
    compare(
        "DeviceEntry",
        fields!(DeviceEntry: uuid, blocks, data_start, first_group, groups, last_group_blocks, flags, reserved),
    );
    compare(
        "DomainHeader",
        fields!(DomainHeader: header, domain, reserved0, flags, journal_start, journal_blocks, reserved1, tail_pos,
            head_pos, checkpointed_tx, last_tx, mounts, reserved2, checkpoint, tables, tenant_root,
            tenant_generation, tenant_flags, tenant_blocks, tenant_name, tenant_inodes, tenant_rates,
            tenant_soft_blocks, tenant_soft_since, tenant_grace, tenant_devices, tenant_memory_min,
            tenant_memory_max, tenant_journal, scratch_at_rest, scratch_root_bytes, reserved4, scratch_root, tenant_serving,
            reserved),
    );
    compare(
        "OwnerRecord",
        fields!(OwnerRecord: header, nonce, state, reserved0, lease_ms, io_ms, renewed, boot, pid, reserved1, pid_namespace,
            started, host, reserved),
    );
    compare(
        "QuotaEntry",
        fields!(QuotaEntry: kind, reserved0, id, blocks, soft_blocks, inodes, soft_inodes, grace, root_generation, root,
            blocks_since, inodes_since),
    );
    compare("GroupHeader", fields!(GroupHeader: header, group, blocks, epoch, domain, reserved0, reserved));
    for (name, bytes) in [
        ("SuperBlock", 4096),
        ("DeviceEntry", 64),
        ("DomainHeader", 4096),
        ("GroupHeader", 4096),
        ("OwnerRecord", 4096),
        ("QuotaEntry", 72),
    ] {
        let last = table(&format!("table: {name}")).pop().expect("rows");
        let end: usize = last[0].parse::<usize>().expect("offset") + last[1].parse::<usize>().expect("bytes");
        assert_eq!(end, bytes, "{name} ends early");
    }
    let (header, super_block, domain) = (HEADER_BYTES, super_block::INCOMPAT_DATA_SUMS, braidfs_format::domain::CLEAN);
    assert_eq!((header, super_block, domain), (32, 1, 1));
    assert_eq!((braidfs_format::domain::FAILED, braidfs_format::domain::NEEDS_GC), (2, 4));
    assert_eq!((braidfs_format::domain::TABLES_SOUND, braidfs_format::domain::PEER_FAILED), (8, 16));
}

/// The body of a sealed block.
fn body(block: Vec<u8>) -> Vec<u8> {
    block[HEADER_BYTES..].to_vec()
}

#[test]
fn table_entries() {
    let fields = probe(
        &BatEntry::default(),
        |e| body(bat::encode(&[*e], 1, 0, 0, 1)),
        &[("domain", |e| e.domain = Some(DomainId(0xfffe))), ("epoch", |e| e.epoch = u32::MAX)],
    );
    compare("BatEntry", &fields);

    let fields = probe(
        &SegmentEntry { temperature: Temperature::Hot, ..SegmentEntry::default() },
        |e| body(SegmentTable::encode(&[*e], &Written::default(), 0, 1, BlockAddr(2), 0, 1)),
        &[
            ("kind", |e| e.kind = SegmentKind::Absent),
            ("temperature", |e| e.temperature = Temperature::Cold),
            ("age", |e| e.age = u64::MAX),
            ("valid", |e| e.valid = [u64::MAX; 8]),
        ],
    );
    compare("SegmentEntry", &fields);
    let fields = probe(
        &Written::blank(32),
        |w| SegmentTable::encode(&[], w, 0, 1, BlockAddr(2), 0, 1)[2592..].to_vec(),
        &[("checkpoint", |w| w.checkpoint = u64::MAX), ("counts", |w| w.counts.fill(u32::MAX))],
    );
    assert_eq!(fields[1].2, 4 * 6 * 32, "four bytes per pair of a group");
    compare("Written", &fields);

    let owners = |o: &Owner| {
        let mut all = [Owner::default(); OWNERS_PER_BLOCK as usize];
        all[0] = *o;
        body(encode_owners(&all, 0, 1, BlockAddr(4), 0, 1))
    };
    let fields =
        probe(&Owner::default(), owners, &[("node", |o| o.node = InodeNo(A48)), ("birth", |o| o.birth = 0xff_ffff)]);
    let of_data = Owner { node: InodeNo(1), ..Owner::default() };
    let lblk = probe(&of_data, owners, &[("lblk", |o| o.lblk = A48)]);
    compare("Owner", &[&fields[..], &lblk].concat());
    let live = probe(&Owner::default(), owners, &[("live", |o| o.live = u8::MAX)]);
    assert_eq!((live[0].1, live[0].2), (lblk[0].1, 1), "a node block has its records in place of a logical block");
    let second = |o: &Owner| {
        let mut all = [Owner::default(); OWNERS_PER_BLOCK as usize];
        all[1] = *o;
        body(encode_owners(&all, 0, 1, BlockAddr(4), 0, 1))
    };
    assert_eq!(
        probe(&Owner::default(), second, &[("node", |o| o.node = InodeNo(1))])[0].1,
        15,
        "owners lie side by side"
    );

    let nodes = |e: &NodeEntry| {
        let mut all = [NodeEntry::default(); geometry::NODES_PER_BLOCK as usize];
        all[0] = *e;
        body(NodeTableBlock::encode(&all, 0, 1, BlockAddr(6), 0, 1))
    };
    let fields = probe(
        &NodeEntry::default(),
        nodes,
        &[
            ("addr", |e| e.addr = BlockAddr(A48)),
            ("index", |e| e.index = u8::MAX),
            ("flags", |e| e.flags = u8::MAX),
            ("generation", |e| e.generation = u32::MAX),
            ("written", |e| e.written = u32::MAX),
        ],
    );
    compare("NodeEntry", &fields);
    assert_eq!((node::USED, node::REMOTE, node::OVERFLOW, node::DIR), (1, 2, 4, 8));
}

#[test]
fn records_of_nodes() {
    let record = NodeRecord {
        node: NodeId(0),
        generation: 0,
        kind: NodeKind::Inode,
        flags: 0,
        owner: InodeNo(0),
        version: 0,
        payload: vec![0],
    };
    let mut fields = probe(
        &record,
        NodeRecord::encode,
        &[
            ("node", |r| r.node = NodeId(u64::MAX)),
            ("owner", |r| r.owner = InodeNo(u64::MAX)),
            ("version", |r| r.version = u64::MAX),
            ("generation", |r| r.generation = u32::MAX),
            ("kind", |r| r.kind = NodeKind::ExtentLeaf),
            ("flags", |r| r.flags = u8::MAX),
            ("payload", |r| r.payload = vec![1]),
        ],
    );
    let at = 28;
    assert_eq!(&record.encode()[at..at + 2], &[1, 0], "length of the payload");
    fields.push(("len", at, 2));
    compare("NodeRecord", &fields);

    const T: Timestamp = Timestamp { sec: -1, nsec: u32::MAX };
    let fields = probe(
        &Inode::default(),
        Inode::encode,
        &[
            ("mode", |i| i.mode = u32::MAX),
            ("uid", |i| i.uid = u32::MAX),
            ("gid", |i| i.gid = u32::MAX),
            ("nlink", |i| i.nlink = u32::MAX),
            ("size", |i| i.size = u64::MAX),
            ("blocks", |i| i.blocks = u64::MAX),
            ("rdev", |i| i.rdev = u64::MAX),
            ("flags", |i| i.flags = u32::MAX),
            ("placement", |i| i.placement = Placement::Inherit),
            ("inline", |i| i.content = Content::Inline(vec![])),
            ("atime", |i| i.atime = T),
            ("mtime", |i| i.mtime = T),
            ("ctime", |i| i.ctime = T),
            ("btime", |i| i.btime = T),
            ("link_seq", |i| i.link_seq = u64::MAX),
        ],
    );
    compare("Inode", &fields);
    let rows = table("table: Inode");
    let last = rows.last().expect("rows");
    assert_eq!(last[0].parse::<usize>().expect("offset") + 8, inode::FIXED_BYTES);
    assert_eq!((inode::NOCOW, inode::IMMUTABLE, inode::APPEND, inode::NOATIME), (1, 2, 4, 8));
}

fn link(parent: u64, name: u8) -> Link {
    Link { parent: InodeNo(parent), name: [name].into() }
}

#[test]
fn parts_of_inodes() {
    let encode = |l: &Link| inode::encode_links(std::slice::from_ref(l));
    let changes: &[Change<Link>] =
        &[("parent", |l| l.parent = InodeNo(u64::MAX)), ("name", |l| l.name = [b'b'].into())];
    compare("Link", &probe(&link(0, b'a'), encode, changes));

    let x: inode::Xattr = (Box::new([b'a']), Box::new([b'x']));
    let fields = probe(
        &x,
        |x| inode::encode_xattrs(std::slice::from_ref(x)),
        &[("name", |x| x.0 = Box::new([b'b'])), ("value", |x| x.1 = Box::new([b'y']))],
    );
    assert_eq!((fields[0].1, fields[1].1), (5, 6));
    compare("Xattr", &fields[..1]);

    let e = Extent { lblk: 0, addr: BlockAddr(0), len: 0, unwritten: false, sums: None };
    let encode = |e: &Extent| inode::encode_extents(std::slice::from_ref(e));
    let mut fields = probe(
        &e,
        encode,
        &[
            ("lblk", |e| e.lblk = A48),
            ("addr", |e| e.addr = BlockAddr(A48)),
            ("len", |e| e.len = inode::EXTENT_MAX),
            ("flags", |e| e.unwritten = true),
        ],
    );
    let with = |sum: u32| encode(&Extent { sums: Some(Box::new([sum])), ..e.clone() });
    let (at, n) = differ(&with(0), &with(u32::MAX));
    fields.push(("sums", at, n));
    compare("Extent", &fields);
    assert_eq!(with(0)[15], 2, "flag of checksums");

    let fields = probe(
        &LeafRef { first: 0, node: NodeId(0) },
        |r| inode::encode_refs(&[*r]),
        &[("first", |r| r.first = A48), ("node", |r| r.node = NodeId(u64::MAX))],
    );
    compare("LeafRef", &fields);

    // a section's body starts behind its kind and length
    let start = inode::FIXED_BYTES + 3;
    let section = |i: &Inode| i.encode()[start..].to_vec();
    let t = Tombstone { link: link(0, b'a'), newcomer: InodeNo(0), generation: 0, version: 0 };
    let fields = probe(
        &Inode { tombstones: vec![t], ..Inode::default() },
        section,
        &[
            ("newcomer", |i| i.tombstones[0].newcomer = InodeNo(u64::MAX)),
            ("generation", |i| i.tombstones[0].generation = u32::MAX),
            ("version", |i| i.tombstones[0].version = u64::MAX),
            ("link", |i| i.tombstones[0].link.parent = InodeNo(u64::MAX)),
        ],
    );
    compare("Tombstone", &fields);
    let fields = probe(
        &Inode { exchange: Some((InodeNo(0), 0, 0)), ..Inode::default() },
        section,
        &[
            ("node", |i| i.exchange = Some((InodeNo(u64::MAX), 0, 0))),
            ("generation", |i| i.exchange = Some((InodeNo(0), u32::MAX, 0))),
            ("version", |i| i.exchange = Some((InodeNo(0), 0, u64::MAX))),
        ],
    );
    compare("Exchange", &fields);
}

#[test]
fn directories() {
    let entry = Dentry { hash: 0, node: InodeNo(0), generation: 0, kind: 0, name: [b'a'].into() };
    let fields = probe(
        &entry,
        |e| dentry::encode_entries(std::slice::from_ref(e)),
        &[
            ("hash", |e| e.hash = u64::MAX),
            ("node", |e| e.node = InodeNo(u64::MAX)),
            ("generation", |e| e.generation = u32::MAX),
            ("kind", |e| e.kind = u8::MAX),
            ("name", |e| e.name = [b'b'].into()),
        ],
    );
    compare("Dentry", &fields);
    let encode = |(dir, first, entry): &(u64, u64, Dentry)| {
        let mut b = dentry::encode_bucket(std::slice::from_ref(entry), InodeNo(*dir), *first, 0, 1, BlockAddr(9), 1);
        b[4..8].fill(0);
        b
    };
    let fields = probe(
        &(0, 0, entry),
        encode,
        &[("dir", |b| b.0 = u64::MAX), ("lblk", |b| b.1 = dentry::HASH_MAX), ("entries", |b| b.2.hash = u64::MAX)],
    );
    compare("Bucket", &fields);
    assert_eq!(encode(&(0, 0, Dentry { hash: 1, node: InodeNo(1), generation: 1, kind: 1, name: [1].into() }))[46], 23);
}

fn samples() -> Vec<(&'static str, Record, Vec<usize>)> {
    let entry = NodeEntry::default();
    let full = NodeRecord {
        node: NodeId(0),
        generation: 0,
        kind: NodeKind::Inode,
        flags: 0,
        owner: InodeNo(0),
        version: 0,
        payload: vec![],
    };
    let alloc = Record::Alloc {
        addr: BlockAddr(0),
        len: 0,
        kind: SegmentKind::Free,
        temperature: Temperature::Hot,
        owner: InodeNo(0),
        lblk: 0,
    };
    // the bytes of `n` in each sample
    vec![
        ("Node", Record::Node { node: NodeId(0), entry }, vec![]),
        ("Alloc", alloc, vec![]),
        ("Free", Record::Free { addr: BlockAddr(0), len: 0 }, vec![]),
        ("Live", Record::Live { addr: BlockAddr(0), live: 0 }, vec![]),
        (
            "Remote",
            Record::Remote { dir: InodeNo(0), child: InodeNo(0), generation: 0, name: Box::new(*b"xyz") },
            vec![3],
        ),
        ("Orphans", Record::Orphans(vec![InodeNo(1), InodeNo(2)]), vec![16]),
        ("Full", Record::Full(full), vec![32]),
        ("Sums", Record::Sums { addr: BlockAddr(0), sums: vec![1, 2, 3] }, vec![12]),
        ("Part", Record::Part { pos: 0, crc: 0 }, vec![]),
        ("After", Record::After(TxId(0)), vec![]),
    ]
}

#[test]
fn journal_records_and_chunks() {
    let rows = table("records");
    let samples = samples();
    assert_eq!(rows.len(), samples.len());
    for (row, (name, record, variable)) in rows.iter().zip(samples) {
        let mut bytes = Vec::new();
        record.encode(&mut bytes);
        assert_eq!((row[0].parse::<u8>().expect("tag"), row[1].as_str()), (bytes[0], name));
        let mut variable = variable.into_iter();
        let sum: usize = row[2]
            .split('(')
            .skip(1)
            .map(|part| match part.split(')').next().expect("a closing bracket") {
                "n" => variable.next().expect("a length for n"),
                n => n.parse().expect("a number of bytes"),
            })
            .sum();
        assert_eq!(1 + sum, bytes.len(), "{name}");
    }

    let id = ChunkId { kind: ChunkKind::Stream, domain: DomainId(0), volume: 0, pos: 0, tx: TxId(0), stream: 0 };
    let encode = |(id, body): &(ChunkId, Vec<u8>)| {
        let mut bytes = encode_chunk(*id, body).0;
        bytes[4..8].fill(0);
        bytes
    };
    let mut fields = probe(
        &(id, vec![0; 7]),
        encode,
        &[
            ("kind", |c| c.0.kind = ChunkKind::Commit),
            ("domain", |c| c.0.domain = DomainId(u16::MAX)),
            ("volume", |c| c.0.volume = u32::MAX),
            ("pos", |c| c.0.pos = u64::MAX),
            ("tx", |c| c.0.tx = TxId(u64::MAX)),
            ("stream", |c| c.0.stream = u16::MAX),
            ("records", |c| c.1[0] = 1),
        ],
    );
    let b = encode(&(id, vec![0; 7]));
    assert_eq!((&b[32..36], &b[36..40]), (&[1, 0, 0, 0][..], &[7, 0, 0, 0][..]));
    fields.extend([("blocks", 32, 4), ("len", 36, 4)]);
    compare("Chunk", &fields);
    assert_eq!(block::MAGIC.to_le_bytes(), *b"BRFS");
    assert_eq!(journal::MAGIC.to_le_bytes(), *b"BRJL");
}

/// Compares a table of values.
fn values(name: &str, code: &[(u8, &str)]) {
    let rows: Vec<(u8, String)> =
        table(&format!("values: {name}")).into_iter().map(|r| (r[0].parse().expect("a value"), r[1].clone())).collect();
    assert_eq!(rows, code.iter().map(|(v, n)| (*v, (*n).to_owned())).collect::<Vec<_>>(), "{name}");
}

macro_rules! values {
    ($t:ident: $($v:ident),*) => { values(stringify!($t), &[$(($t::$v as u8, stringify!($v))),*]) };
}

#[test]
fn numbers_of_kinds() {
    values!(BlockKind: Super, Bat, Domain, Group, SegmentTable, Owners, NodeTable, Node, Dir, Owner);
    values!(NodeKind: Inode, ExtentLeaf, ExtentIndex, Xattrs, Links);
    values!(ChunkKind: Stream, Commit, RollForward);

    let e = || vec![Extent { lblk: 0, addr: BlockAddr(1), len: 1, unwritten: false, sums: None }];
    let refs = || vec![LeafRef { first: 0, node: NodeId(2) }];
    let tombstone = Tombstone { link: link(1, b'a'), newcomer: InodeNo(2), generation: 1, version: 1 };
    let sections = [
        ("Links", Inode { links: vec![link(1, b'a')], ..Inode::default() }),
        ("Xattrs", Inode { xattrs: vec![(Box::new([b'a']), Box::new([b'x']))], ..Inode::default() }),
        ("Inline", Inode { content: Content::Inline(vec![1]), ..Inode::default() }),
        ("InlineDir", Inode { content: Content::InlineDir(vec![1]), ..Inode::default() }),
        ("Extents", Inode { content: Content::Extents(e()), ..Inode::default() }),
        ("Tree1", Inode { content: Content::Tree { depth: 1, refs: refs() }, ..Inode::default() }),
        ("Tree2", Inode { content: Content::Tree { depth: 2, refs: refs() }, ..Inode::default() }),
        ("LinkNodes", Inode { link_nodes: vec![NodeId(3)], ..Inode::default() }),
        ("XattrNodes", Inode { xattr_nodes: vec![NodeId(3)], ..Inode::default() }),
        ("Tombstones", Inode { tombstones: vec![tombstone], ..Inode::default() }),
        ("Exchange", Inode { exchange: Some((InodeNo(1), 1, 1)), ..Inode::default() }),
    ];
    let tags: Vec<(u8, &str)> = sections.iter().map(|(n, i)| (i.encode()[inode::FIXED_BYTES], *n)).collect();
    values("Section", &tags);
}

#[test]
fn constants() {
    let code: &[(&str, u64)] = &[
        ("FORMAT_VERSION", FORMAT_VERSION.into()),
        ("BLOCK_BYTES", BLOCK_BYTES as u64),
        ("SEGMENT_BLOCKS", geometry::SEGMENT_BLOCKS.into()),
        ("NODES_PER_BLOCK", geometry::NODES_PER_BLOCK.into()),
        ("NODE_BLOCKS_PER_SEGMENT", geometry::NODE_BLOCKS_PER_SEGMENT.into()),
        ("bat ENTRIES_PER_BLOCK", bat::ENTRIES_PER_BLOCK.into()),
        ("OWNERS_PER_BLOCK", OWNERS_PER_BLOCK.into()),
        ("MAX_DEVICES", super_block::MAX_DEVICES as u64),
        ("MAX_DOMAINS", super_block::MAX_DOMAINS.into()),
        ("RECORDS_MAX", node::RECORDS_MAX as u64),
        ("RECORD_MAX", node::RECORD_MAX as u64),
        ("PAYLOAD_MAX", node::PAYLOAD_MAX as u64),
        ("INLINE_MAX", inode::INLINE_MAX as u64),
        ("INLINE_DIR_MAX", dentry::INLINE_DIR_MAX as u64),
        ("BUCKET_BYTES", dentry::BUCKET_BYTES as u64),
        ("NAME_MAX", inode::NAME_MAX as u64),
        ("LBLK_MAX", inode::LBLK_MAX),
        ("EXTENT_MAX", inode::EXTENT_MAX.into()),
        ("SUMMED_EXTENT_MAX", inode::SUMMED_EXTENT_MAX.into()),
        ("TARGET_MAX", inode::TARGET_MAX as u64),
        ("LEAF_REFS_MAX", inode::LEAF_REFS_MAX as u64),
        ("HASH_PROBES", dentry::HASH_PROBES),
        ("CHUNK_MAX_BLOCKS", journal::CHUNK_MAX_BLOCKS.into()),
    ];
    let rows: Vec<(String, u64)> =
        table("constants").into_iter().map(|r| (r[0].clone(), r[1].parse().expect("a number"))).collect();
    assert_eq!(rows, code.iter().map(|(n, v)| ((*n).to_owned(), *v)).collect::<Vec<_>>());
}
