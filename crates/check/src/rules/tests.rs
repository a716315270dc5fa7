//! Each rule finds what it is for, with its number, whether the walk goes on after a finding or ends with it.

use super::dir::Buckets;
use super::{Rules, Visitor, inode, record};
use crate::codes;
use crate::parts::ino::Ino;
use crate::report::{Bad, Checked};
use crate::scan::names::new_dir;
use braidfs_format::dentry::{BUCKET_BYTES, Dentry, bucket_first, encode_bucket, encode_entries, name_hash};
use braidfs_format::inode::{Content, Extent, Inode, LeafRef, Link, encode_extents, encode_links, encode_refs};
use braidfs_format::name::FileName;
use braidfs_format::node::{DIR, NodeKind, NodeRecord, USED};
use braidfs_format::{BLOCK_BYTES, BlockAddr, InodeNo, NodeId};
use std::collections::HashMap;

const RULES: Rules = Rules { volume: 7, hash_key: [3; 16], data_sums: false };
const NODE: InodeNo = InodeNo(9);

/// A domain of one inode: blocks from 1000 to 1999 are data blocks.
#[derive(Default)]
struct World {
    overflow: HashMap<NodeId, (NodeKind, Vec<u8>)>,
    blocks: HashMap<BlockAddr, Vec<u8>>,
    /// The walk goes on after a finding.
    goes_on: bool,
    found: Vec<u32>,
    extents: Vec<(u64, u32)>,
    names: Vec<Vec<u8>>,
}

impl Visitor for World {
    fn bad(&mut self, bad: Bad) -> Checked<()> {
        self.found.push(bad.code);
        if self.goes_on { Ok(()) } else { Err(bad) }
    }
    fn overflow(&mut self, owner: InodeNo, nodes: &[NodeId], kind: NodeKind) -> Checked<Vec<Option<Vec<u8>>>> {
        let mut out = Vec::new();
        for n in nodes {
            let there =
                self.overflow.get(n).map(|(k, p)| record::overflow(*n, (NODE, *k), owner, kind).map(|()| p.clone()));
            out.push(match there.unwrap_or_else(|| Err(record::missing(*n, kind))) {
                Ok(p) => Some(p),
                Err(bad) => {
                    self.bad(bad)?;
                    None
                }
            });
        }
        Ok(out)
    }
    fn holds(&self, addr: BlockAddr, len: u64) -> bool {
        addr.0 >= 1000 && addr.0 + len <= 2000
    }
    fn extent(&mut self, _: InodeNo, e: Extent, _: bool) -> Checked<()> {
        self.extents.push((e.lblk, e.len));
        Ok(())
    }
    fn blocks(&mut self, addrs: &[BlockAddr]) -> Checked<Vec<u8>> {
        Ok(addrs.iter().flat_map(|a| self.blocks.get(a).cloned().unwrap_or(vec![0; BLOCK_BYTES])).collect())
    }
    fn entry(&mut self, _: InodeNo, e: Dentry) {
        self.names.push(e.name.to_vec());
    }
}

fn file(content: Content) -> Inode {
    Inode { mode: 0o100_644, nlink: 1, content, ..new_dir(1, vec![], 0o755).inode }
}

fn extent(lblk: u64, addr: u64, len: u32) -> Extent {
    Extent { lblk, addr: BlockAddr(addr), len, unwritten: false, sums: None }
}

fn entry(name: &str, shift: u64) -> Dentry {
    let hash = name_hash(&RULES.hash_key, name.as_bytes()) + shift;
    Dentry { hash, node: InodeNo(20), generation: 1, kind: 8, name: FileName::from(name.as_bytes()) }
}

/// Walks through `i` twice: to the end, then until the first finding. What the first walk made of it, and found.
fn walk(mut world: World, i: &Inode, flags: u8) -> (World, Ino) {
    let r = NodeRecord {
        node: NODE.node(),
        generation: 1,
        kind: NodeKind::Inode,
        flags,
        owner: NODE,
        version: 1,
        payload: i.encode(),
    };
    let run = |world: &mut World, buckets| {
        let mut ino = Ino::new(r.generation, r.version, flags, inode::decode(&r)?);
        inode::check(&RULES, world, &r, &mut ino, Some(buckets)).map(|()| ino)
    };
    world.goes_on = true;
    let ino = run(&mut world, Buckets::to_the_end(NODE)).unwrap();
    let mut strict = World { overflow: world.overflow.clone(), blocks: world.blocks.clone(), ..World::default() };
    let first = run(&mut strict, Buckets::until_bad(NODE)).err().map(|b| b.code);
    assert_eq!(first, world.found.first().copied(), "{:?}", world.found);
    assert_eq!(first.is_none(), strict.found.is_empty());
    (world, ino)
}

fn found(world: World, i: &Inode, flags: u8) -> Vec<u32> {
    walk(world, i, flags).0.found
}

#[test]
fn what_holds_is_handed_over_whole() {
    let mut i = file(Content::Extents(vec![extent(0, 1000, 4), extent(9, 1500, 1)]));
    i.blocks = 5;
    let (world, ino) = walk(World::default(), &i, USED);
    assert_eq!((world.found, world.extents), (vec![], vec![(0, 4), (9, 1)]));
    assert!(!ino.dirty.any());

    let refs = vec![LeafRef { first: 0, node: NodeId(30) }, LeafRef { first: 100, node: NodeId(31) }];
    let mut tree = file(Content::Tree { depth: 1, refs });
    tree.blocks = 3;
    let mut world = World::default();
    world.overflow.insert(NodeId(30), (NodeKind::ExtentLeaf, encode_extents(&[extent(3, 1000, 2)])));
    world.overflow.insert(NodeId(31), (NodeKind::ExtentLeaf, encode_extents(&[extent(100, 1010, 1)])));
    let (world, ino) = walk(world, &tree, USED);
    assert_eq!((world.found, world.extents), (vec![], vec![(3, 2), (100, 1)]));
    assert_eq!(ino.tree, [NodeId(30), NodeId(31)]);
}

#[test]
fn extents_are_corrected_one_by_one() {
    let mut i = file(Content::Extents(vec![extent(0, 1000, 4), extent(4, 10, 1), extent(8, 1100, 1)]));
    i.blocks = 5;
    let (world, ino) = walk(World::default(), &i, USED);
    assert_eq!(world.found, [codes::EXTENT_PLACE]);
    assert_eq!(world.extents, [(0, 4), (8, 1)]);
    assert!(ino.dirty.extents);
    i.blocks = 6;
    assert_eq!(found(World::default(), &i, USED), [codes::EXTENT_PLACE, codes::BLOCK_COUNT]);
    let sums = Extent { sums: Some(vec![1, 2].into()), ..extent(0, 1000, 2) };
    let mut i = file(Content::Extents(vec![sums]));
    i.blocks = 2;
    assert_eq!(found(World::default(), &i, USED), [codes::EXTENT_SUMS]);
}

#[test]
fn overflow_nodes_are_of_their_kind_and_range() {
    let refs = vec![LeafRef { first: 0, node: NodeId(30) }, LeafRef { first: 100, node: NodeId(31) }];
    let mut tree = file(Content::Tree { depth: 1, refs });
    tree.blocks = 1;
    let leaf = |first| encode_extents(&[extent(first, 1000 + first, 1)]);
    let world = |kind, first| {
        let mut w = World::default();
        w.overflow.insert(NodeId(30), (kind, leaf(first)));
        w.overflow.insert(NodeId(31), (NodeKind::ExtentLeaf, leaf(100)));
        w
    };
    assert_eq!(found(world(NodeKind::ExtentIndex, 5), &tree, USED), [codes::OVERFLOW_MISSING]);
    assert_eq!(found(world(NodeKind::ExtentLeaf, 200), &tree, USED), [codes::EXTENT_ORDER]);
    tree.content = Content::Tree { depth: 2, refs: vec![LeafRef { first: 50, node: NodeId(40) }] };
    tree.blocks = 0;
    let mut w = World::default();
    let outside = encode_refs(&[LeafRef { first: 7, node: NodeId(30) }]);
    w.overflow.insert(NodeId(40), (NodeKind::ExtentIndex, outside));
    // nor does the tree begin at 0
    assert_eq!(found(w, &tree, USED), [codes::EXTENT_ORDER, codes::EXTENT_ORDER]);

    let mut i = file(Content::None);
    i.link_nodes = vec![NodeId(50), NodeId(51)];
    let (w, ino) = walk(World::default(), &i, USED);
    assert_eq!(w.found, [codes::OVERFLOW_MISSING, codes::OVERFLOW_MISSING]);
    assert!(ino.links_lost && ino.inode.link_nodes.is_empty());
    let mut w = World::default();
    let link = Link { parent: InodeNo(1), name: FileName::from(b"a".as_slice()) };
    w.overflow.insert(NodeId(50), (NodeKind::Links, encode_links(&[link])));
    w.overflow.insert(NodeId(51), (NodeKind::Links, vec![1, 2, 3]));
    assert_eq!(found(w, &i, USED), [codes::LINKS_CONTENT]);
}

#[test]
fn content_fits_the_type() {
    let wrong = [
        (0o100_644, USED, Content::Inline(vec![1])),
        (0o100_644, USED, Content::InlineDir(vec![])),
        (0o040_755, USED | DIR, Content::Inline(vec![])),
        (0o020_644, USED, Content::Extents(vec![extent(0, 1000, 1)])),
    ];
    for (mode, flags, content) in wrong {
        let mut i = file(content);
        i.mode = mode;
        assert_eq!(found(World::default(), &i, flags), [codes::CONTENT], "{i:?}");
    }
    assert_eq!(found(World::default(), &file(Content::None), USED | DIR), [codes::ENTRY_FLAGS]);
}

#[test]
fn entries_stand_where_their_names_say() {
    let mut dir = file(Content::InlineDir(encode_entries(&[entry("a", 0)])));
    dir.mode = 0o040_755;
    let (world, _) = walk(World::default(), &dir, USED | DIR);
    assert_eq!((world.found, world.names), (vec![], vec![b"a".to_vec()]));
    dir.content = Content::InlineDir(encode_entries(&[entry("a", 9)]));
    assert_eq!(found(World::default(), &dir, USED | DIR), [codes::ENTRY_HASH]);
    dir.content = Content::InlineDir(encode_entries(&[entry("a", 0), entry("a", 1)]));
    assert_eq!(found(World::default(), &dir, USED | DIR), [codes::NAME_TWICE]);
    dir.content = Content::InlineDir(vec![9; 30]);
    assert_eq!(found(World::default(), &dir, USED | DIR), [codes::INLINE_ENTRIES]);

    // two buckets: the second begins behind the name
    let e = entry("name", 0);
    let cut = (e.hash >> 15) + 1;
    assert!(e.hash < bucket_first(cut) && e.name.len() < BUCKET_BYTES);
    dir.content = Content::Extents(vec![extent(0, 1000, 1), extent(cut, 1001, 1)]);
    dir.blocks = 2;
    let bucket = |entries: &[Dentry], lblk, addr| {
        let b = encode_bucket(entries, NODE, bucket_first(lblk), 0, RULES.volume, BlockAddr(addr), 1);
        (BlockAddr(addr), b)
    };
    let world = |first: &[Dentry], second: &[Dentry]| World {
        blocks: HashMap::from([bucket(first, 0, 1000), bucket(second, cut, 1001)]),
        ..World::default()
    };
    let (w, _) = walk(world(std::slice::from_ref(&e), &[]), &dir, USED | DIR);
    assert_eq!((w.found, w.names), (vec![], vec![b"name".to_vec()]));
    assert_eq!(found(world(&[], std::slice::from_ref(&e)), &dir, USED | DIR), [codes::BUCKET_RANGE]);
    let lost = World { blocks: HashMap::from([bucket(&[e], 0, 1000)]), ..World::default() };
    assert_eq!(found(lost, &dir, USED | DIR), [codes::BUCKET]);
}

/// Limits that do not hold are found, and go, with nothing else.
#[test]
fn limits_of_the_root_hold() {
    use braidfs_format::quota::{self, QuotaEntry};
    let user = QuotaEntry { kind: quota::USER, id: 1000.into(), blocks: 7.into(), ..QuotaEntry::default() };
    let kept: (Box<[u8]>, Box<[u8]>) = (b"user.x".as_slice().into(), b"y".as_slice().into());
    let group = QuotaEntry { kind: quota::GROUP, ..user };
    let find = |node: InodeNo, record: &[u8], value: &[u8]| {
        let mut i = new_dir(1, vec![], 0o755).inode;
        i.xattrs = vec![kept.clone(), (record.into(), value.into())];
        let r = NodeRecord {
            node: node.node(),
            generation: 1,
            kind: NodeKind::Inode,
            flags: USED | DIR,
            owner: node,
            version: 1,
            payload: i.encode(),
        };
        let mut world = World { goes_on: true, ..World::default() };
        let mut ino = Ino::new(1, 1, USED | DIR, inode::decode(&r).unwrap());
        inode::check(&RULES, &mut world, &r, &mut ino, None).unwrap();
        (world.found, ino.inode.xattrs.len(), ino.dirty.xattrs)
    };
    for (record, good) in [(quota::XATTR, user), (quota::GROUPS_XATTR, group)] {
        let bytes = |entries: &[QuotaEntry]| quota::encode(record, entries);
        let other = if good == user {
            quota::encode(quota::GROUPS_XATTR, &[group])
        } else {
            quota::encode(quota::XATTR, &[user])
        };
        assert_eq!(find(InodeNo::ROOT, record, &bytes(&[good])), (vec![], 2, false));
        for wrong in [&bytes(&[good])[1..], &bytes(&[good, good]), &other] {
            assert_eq!(find(InodeNo::ROOT, record, wrong), (vec![codes::QUOTA], 1, true));
            assert_eq!(find(NODE, record, wrong), (vec![], 2, false), "elsewhere it means nothing");
        }
    }
}
