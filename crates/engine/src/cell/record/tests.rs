//! Records as nobody writes them: they are refused before memory is taken for what they name.

use super::*;
use braidfs_format::geometry::{Geometry, SEGMENT_BLOCKS};
use braidfs_format::inode::{encode_extents, encode_refs};

const DIR_MODE: u32 = 0o040_755;
const FILE_MODE: u32 = 0o100_644;
const NODE: NodeId = NodeId(77);
/// The longest extent that 16 bytes can tell of.
const LONGEST: u32 = (1 << 24) - 1;

fn geometry() -> Geometry {
    Geometry::new(4 * SEGMENT_BLOCKS, 4).unwrap()
}

/// All groups are the domain's.
fn places() -> Places<'static> {
    let g = geometry();
    let holds = &|addr, len| geometry().holds_data(addr, u64::from(len));
    Places { holds, blocks: 4 * u64::from(g.group_blocks() - g.meta_blocks()) }
}

fn extent(lblk: u64, addr: u64, len: u32) -> Extent {
    Extent { lblk, addr: BlockAddr(addr), len, unwritten: false, sums: None }
}

fn record(kind: NodeKind, payload: Vec<u8>) -> NodeRecord {
    NodeRecord { node: NODE, generation: 1, kind, flags: USED, owner: NODE.inode(), version: 1, payload }
}

/// What becomes of an inode with this content, whose overflow nodes all hold `overflow`, and how many of them were read.
fn decoded(mode: u32, content: Content, overflow: &dyn Fn(NodeId) -> NodeRecord) -> (Result<Cell>, usize) {
    let inode = Inode { mode, nlink: 1, content, ..Inode::default() };
    let mut read = 0;
    let cell = decode_cell(&record(NodeKind::Inode, inode.encode()), DomainId(0), places(), &mut |n| {
        read += 1;
        Ok(overflow(n))
    });
    (cell, read)
}

/// A link's target is read at once.
#[test]
fn a_symbolic_link_is_no_longer_than_a_path() {
    for (size, holds) in [(4095, true), (4096, false), (1 << 62, false)] {
        let inode = Inode { mode: 0o120_777, nlink: 1, size, ..Inode::default() };
        let record = record(NodeKind::Inode, inode.encode());
        let cell = decode_cell(&record, DomainId(0), places(), &mut |n| panic!("{n} was read"));
        assert_eq!(cell.is_ok(), holds, "{size}");
    }
}

fn is_refused(mode: u32, content: Content) {
    let told = format!("{content:?}");
    let r = decoded(mode, content, &|n| panic!("{n} was read")).0;
    assert!(matches!(r, Err(Error::Corrupt(_))), "{r:?} of {}", &told[..told.len().min(200)]);
}

#[test]
fn blocks_lie_where_data_can_be() {
    let (g, first) = (geometry(), u64::from(geometry().meta_blocks()));
    let data = g.group_blocks() - g.meta_blocks();
    for mode in [DIR_MODE, FILE_MODE] {
        for e in [
            extent(0, first, LONGEST),
            extent(0, first, data + 1),
            extent(0, 0, 1),
            extent(0, first - 1, 2),
            extent(0, 4 * u64::from(g.group_blocks()), 1),
            extent(1 << 40, (1 << 48) - 1, LONGEST),
        ] {
            is_refused(mode, Content::Extents(vec![extent(0, first, 1), Extent { lblk: e.lblk + 1, ..e }]));
        }
        // all of one group can be had
        let content = Content::Extents(vec![extent(0, first, data)]);
        let cell = decoded(mode, content, &|n| panic!("{n} was read")).0.unwrap();
        match &cell.state.read().body {
            Body::Dir(d) => assert_eq!(d.map.blocks(), u64::from(data)),
            Body::File(f) => assert_eq!(f.map.blocks(), u64::from(data)),
            Body::Special => panic!("it is special"),
        };
    }
}

/// Each extent holds by itself, and all name the same blocks.
#[test]
fn a_directory_has_no_more_buckets_than_its_domain_has_blocks() {
    let g = geometry();
    let data = g.group_blocks() - g.meta_blocks();
    let many = |n: u64| {
        let one = |k: u64| extent(k * u64::from(data), g.meta_blocks().into(), data);
        (0..n).map(one).collect::<Vec<_>>()
    };
    is_refused(DIR_MODE, Content::Extents(many(5)));
    is_refused(DIR_MODE, Content::Extents(many(200)));
}

#[test]
fn extents_in_leaves_are_looked_at_as_well() {
    let refs = vec![LeafRef { first: 0, node: NodeId(5) }];
    let bad = |_| record(NodeKind::ExtentLeaf, encode_extents(&[extent(0, 4096, LONGEST)]));
    for mode in [DIR_MODE, FILE_MODE] {
        let (r, _) = decoded(mode, Content::Tree { depth: 1, refs: refs.clone() }, &bad);
        assert!(matches!(r, Err(Error::Corrupt(_))), "{r:?}");
    }
}

/// An index node that is named 200 times, and would name a leaf 200 times each.
#[test]
fn a_node_is_read_once() {
    let refs = |node: u64| (0..200).map(|k| LeafRef { first: k, node: NodeId(node) }).collect::<Vec<_>>();
    let overflow = |n: NodeId| match n.0 {
        5 => record(NodeKind::ExtentIndex, encode_refs(&refs(6))),
        _ => record(NodeKind::ExtentLeaf, encode_extents(&[])),
    };
    for mode in [DIR_MODE, FILE_MODE] {
        let (r, read) = decoded(mode, Content::Tree { depth: 2, refs: refs(5) }, &overflow);
        assert!(matches!(r, Err(Error::Corrupt(_))), "{r:?}");
        assert_eq!(read, 1);
    }
}
