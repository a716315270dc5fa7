//! The map against one entry per block.

use super::*;
use crate::error::Error;
use braidfs_format::inode::{Content, decode_extents, decode_refs};
use braidfs_format::node::NodeKind;
use proptest::prelude::*;
use std::collections::{BTreeMap, HashMap};

type Model = BTreeMap<u64, (u64, bool, Option<u32>)>;

#[derive(Debug, Clone)]
enum Op {
    Insert { lblk: u64, addr: u64, len: u32, unwritten: bool, sums: bool },
    Append { len: u32, sums: bool },
    Remove { from: u64, len: u64 },
    Written { from: u64, len: u64 },
    Layout { budget: usize },
    AllDirty,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (0..600u64, 0..1u64 << 20, 1..40u32, any::<bool>(), any::<bool>()).prop_map(|(lblk, addr, len, u, s)| Op::Insert {
            lblk, addr, len, unwritten: u, sums: s && !u,
        }),
        4 => (0..600u64).prop_map(|lblk| Op::Insert { lblk, addr: 1 << 30 | lblk, len: 1, unwritten: false, sums: true }),
        3 => (1..30u32, any::<bool>()).prop_map(|(len, sums)| Op::Append { len, sums }),
        2 => (0..600u64, 0..60u64).prop_map(|(from, len)| Op::Remove { from, len }),
        1 => (0..600u64, 0..600u64).prop_map(|(from, len)| Op::Remove { from, len }),
        3 => (0..600u64, 0..80u64).prop_map(|(from, len)| Op::Written { from, len }),
        3 => prop_oneof![Just(40usize), Just(120), Just(6000)].prop_map(|budget| Op::Layout { budget }),
        1 => Just(Op::AllDirty),
    ]
}

impl ExtentMap {
    fn check(&self) {
        let mut count = 0;
        let mut blocks = 0;
        for (first, l) in &self.leaves {
            assert!(!l.extents.is_empty() && l.bytes <= usize::from(self.limits.leaf_bytes));
            assert_eq!(l.bytes, l.extents.iter().map(Extent::encoded_bytes).sum::<usize>());
            assert!(!l.dirty || self.dirty.contains(first));
            assert!(!l.rolled || self.rolled.contains(first));
            let end = self.leaf_after(*first).map_or(u64::MAX, |n| n.0);
            let mut at = *first;
            for e in &l.extents {
                assert!(e.lblk >= at && e.end() <= end, "{e:?} in [{at}, {end})");
                at = e.end();
                count += 1;
                blocks += u64::from(e.len);
            }
            // with checksums a cut may leave neighbours that were too long to be one before
            let pairs = l.extents.windows(2).filter(|w| w[0].sums.is_none());
            assert_eq!(pairs.filter(|w| self.continues(&w[0], &w[1])).count(), 0, "two extents that are one");
        }
        assert!(self.leaves.first_key_value().is_none_or(|l| *l.0 == 0));
        assert_eq!((count, blocks), (self.count, self.blocks));
        assert_eq!(self.bytes, self.leaves.values().map(|l| l.bytes).sum::<usize>());
    }
}

fn run_blocks(freed: &[(BlockAddr, u32)]) -> Vec<u64> {
    let mut v: Vec<u64> = freed.iter().flat_map(|&(a, n)| a.0..a.0 + u64::from(n)).collect();
    v.sort_unstable();
    v
}

/// What the disk holds of a map's nodes.
#[derive(Default)]
struct Disk {
    nodes: HashMap<NodeId, Option<(NodeKind, Vec<u8>)>>,
    next: u64,
}

impl Disk {
    fn layout(&mut self, m: &mut ExtentMap, budget: usize) {
        let before = self.nodes.len();
        let (nodes, next) = (&mut self.nodes, &mut self.next);
        let l = match m.layout(budget, &mut || {
            *next += 1;
            nodes.insert(NodeId(*next), None);
            Ok(NodeId(*next))
        }) {
            Ok(l) => l,
            Err(Error::TooManyExtents) => {
                assert_eq!(before, self.nodes.len());
                return;
            }
            Err(e) => panic!("{e}"),
        };
        for (n, kind, payload) in l.write {
            assert!(payload.len() <= PAYLOAD_MAX);
            *self.nodes.get_mut(&n).expect("not allocated") = Some((kind, payload));
        }
        for n in l.dropped {
            assert!(self.nodes.remove(&n).is_some(), "{n} dropped twice");
        }
        let mut own = m.nodes();
        own.sort();
        let mut on_disk: Vec<NodeId> = self.nodes.keys().copied().collect();
        on_disk.sort();
        assert_eq!(own, on_disk);
        let back = match l.content {
            Content::None => ExtentMap::new(),
            Content::Extents(e) => {
                assert!(e.iter().map(Extent::encoded_bytes).sum::<usize>() <= budget);
                ExtentMap::from_inline(e)
            }
            Content::Tree { depth, refs } => {
                assert!(refs.len() <= LEAF_REFS_MAX && refs.len() * 14 <= budget);
                let read = |r: &LeafRef, k: NodeKind| {
                    let (kind, payload) = self.nodes[&r.node].clone().expect("never written");
                    assert_eq!(kind, k);
                    payload
                };
                let index: Vec<(LeafRef, Vec<LeafRef>)> = if depth == 2 {
                    refs.iter().map(|r| (*r, decode_refs(&read(r, NodeKind::ExtentIndex)).unwrap())).collect()
                } else {
                    vec![]
                };
                assert!(index.iter().all(|i| i.1.len() <= usize::from(m.limits.refs)));
                let leaves = if depth == 2 { index.iter().flat_map(|i| i.1.clone()).collect() } else { refs };
                let leaves =
                    leaves.iter().map(|r| (*r, decode_extents(&read(r, NodeKind::ExtentLeaf)).unwrap())).collect();
                ExtentMap::from_leaves(leaves, index).unwrap()
            }
            other => panic!("{other:?}"),
        };
        back_equals(&back, m);
        // nothing is written twice
        let again = m.layout(budget, &mut || panic!("second layout allocates")).unwrap();
        assert!(again.write.is_empty() && again.dropped.is_empty());
    }
}

fn back_equals(back: &ExtentMap, m: &ExtentMap) {
    assert_eq!((back.blocks(), back.last_end()), (m.blocks(), m.last_end()));
    let blocks = |m: &ExtentMap| -> Vec<Piece> {
        m.iter().flat_map(|e| (e.lblk..e.end()).map(|b| Piece { len: 1, ..Piece::of(e, b) })).collect()
    };
    assert_eq!(blocks(back), blocks(m));
}

fn insert(m: &mut ExtentMap, model: &mut Model, e: Extent) {
    let mut freed = Runs::new();
    let mut gone = Vec::new();
    for i in 0..u64::from(e.len) {
        let sum = e.sums.as_ref().map(|s| s[i as usize]);
        gone.extend(model.insert(e.lblk + i, (e.addr.0 + i, e.unwritten, sum)).map(|o| o.0));
    }
    m.insert(e, &mut freed);
    gone.sort_unstable();
    assert_eq!(run_blocks(&freed), gone);
}

fn extent(lblk: u64, addr: u64, len: u32, unwritten: bool, sums: bool) -> Extent {
    let sums = sums.then(|| (0..u64::from(len)).map(|i| ((lblk + i) ^ addr) as u32).collect());
    Extent { lblk, addr: BlockAddr(addr), len, unwritten, sums }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn like_a_table_of_blocks(ops in prop::collection::vec(op(), 1..120)) {
        let mut m = ExtentMap::new();
        // small nodes, so that few extents make a deep tree
        m.limits = Limits { leaf_bytes: 200, leaf_split: 80, few_leaves: 9, summed_blocks: 8, refs: 6 };
        let mut model = Model::new();
        let mut disk = Disk::default();
        let mut next_addr = 1u64 << 32;
        for op in ops {
            match op {
                Op::Insert { lblk, addr, len, unwritten, sums } => {
                    insert(&mut m, &mut model, extent(lblk, addr, len, unwritten, sums));
                }
                Op::Append { len, sums } => {
                    let at = m.last_end();
                    insert(&mut m, &mut model, extent(at, next_addr, len, false, sums));
                    next_addr += u64::from(len);
                }
                Op::Remove { from, len } => {
                    let mut freed = Runs::new();
                    m.remove(from, from + len, &mut freed);
                    let mut gone: Vec<u64> = (from..from + len).filter_map(|b| model.remove(&b)).map(|o| o.0).collect();
                    gone.sort_unstable();
                    prop_assert_eq!(run_blocks(&freed), gone);
                }
                Op::Written { from, len } => {
                    m.mark_written(from, from + len);
                    for (_, v) in model.range_mut(from..from + len).filter(|b| b.1.1) {
                        *v = (v.0, false, None);
                    }
                }
                Op::Layout { budget } => disk.layout(&mut m, budget),
                Op::AllDirty => m.all_dirty(),
            }
            m.check();
            prop_assert_eq!(m.last_end(), model.last_key_value().map_or(0, |(k, _)| k + 1));
            prop_assert_eq!(m.blocks(), model.len() as u64);
        }
        for b in 0..m.last_end() + 3 {
            let p = m.get(b);
            prop_assert_eq!(p.map(|p| (p.addr.0, p.unwritten, p.sum)), model.get(&b).copied());
            prop_assert_eq!(m.next_from(b).map(|p| p.lblk), model.range(b..).next().map(|e| *e.0));
            let floor = m.iter().filter(|e| e.lblk <= b).last();
            prop_assert_eq!(m.floor(b), floor);
        }
        disk.layout(&mut m, 6000);
        disk.layout(&mut m, 0);
    }
}

#[test]
fn appended_blocks_are_one_extent() {
    let mut m = ExtentMap::new();
    for i in 0..10_000 {
        m.insert(extent(i, 500 + i, 1, false, false), &mut Runs::new());
    }
    assert_eq!(m.extent_count(), 1);
    let mut m = ExtentMap::new();
    for i in 0..10_000 {
        m.insert(extent(i, 500 + i, 1, false, true), &mut Runs::new());
    }
    assert_eq!(m.extent_count(), 10_000usize.div_ceil(256));
    m.check();
}

#[test]
fn a_large_fragmented_file_makes_a_tree_of_depth_2() {
    let mut m = ExtentMap::new();
    for i in 0..120_000 {
        m.insert(extent(2 * i, 4 * i, 1, false, false), &mut Runs::new());
    }
    m.check();
    let mut disk = Disk::default();
    disk.layout(&mut m, 2800);
    assert_eq!(m.index.len(), m.leaves.len().div_ceil(LEAF_REFS_MAX));
    // one change in the middle writes one leaf and no index
    m.insert(extent(120_000, 7, 1, false, false), &mut Runs::new());
    let l = m.layout(2800, &mut || panic!("no new node")).unwrap();
    assert_eq!(l.write.len(), 1);
}

/// What docs/mounted.md says of a file that is written in order, 1 MiB at a time.
#[test]
fn a_file_with_checksums_ends_at_115_gib() {
    let mut m = ExtentMap::new();
    let piece: u64 = 256;
    let mut at = 0;
    while !m.lacks_room(2 * piece as usize) {
        let sums = Some(vec![7; piece as usize].into());
        let e = Extent { lblk: at, addr: BlockAddr(at), len: piece as u32, unwritten: false, sums };
        m.insert(e, &mut Runs::new());
        at += piece;
    }
    let gib = at >> 18;
    assert_eq!((gib, m.leaves.len() as u64), (115, (at / piece).div_ceil(3)));
    assert!(m.leaves.len() <= LEAF_REFS_MAX * LEAF_REFS_MAX);
    let mut next = 0;
    let l = m.layout(LEAF_REFS_MAX * 14, &mut || {
        next += 1;
        Ok(NodeId(next))
    });
    let l = l.unwrap();
    assert!(matches!(&l.content, Content::Tree { depth: 2, refs } if refs.len() <= LEAF_REFS_MAX));
    assert!(l.write.iter().all(|(_, _, payload)| payload.len() <= PAYLOAD_MAX));
    // blocks in no order: at worst all leaves are half full
    let block = EXTENT_FIXED_BYTES + 4;
    let of = |leaf: usize| (LEAF_REFS_MAX * LEAF_REFS_MAX * leaf) >> 18;
    assert_eq!((PAYLOAD_MAX / block, of(PAYLOAD_MAX / block), of(PAYLOAD_MAX / block / 2)), (201, 30, 15));
}

#[cfg(debug_assertions)]
/// Steps and encoded bytes of an overwrite, on average, with a layout every hundred, as an fsync does it, and one for all
/// of them, as a commit does it, every thousand.
fn work_per_overwrite(extents: u64) -> (u64, u64) {
    let mut m = ExtentMap::new();
    for i in 0..extents {
        m.insert(extent(i, (1 << 40) | (2 * i), 1, false, false), &mut Runs::new());
    }
    let mut node = 0;
    let mut layout = |m: &mut ExtentMap| -> u64 {
        let l = m.layout(2800, &mut || {
            node += 1;
            Ok(NodeId(node))
        });
        l.unwrap().write.iter().map(|w| w.2.len() as u64).sum()
    };
    layout(&mut m);
    let (before, mut bytes, overwrites) = (steps::taken(), 0, 10_000u64);
    let mut freed = Runs::new();
    for i in 0..overwrites {
        let lblk = i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
        let lblk = lblk % extents;
        m.insert(extent(lblk, (1 << 41) | (2 * i), 1, false, false), &mut freed);
        if i % 100 == 99 {
            bytes += layout(&mut m);
            m.rolled_forward();
        }
        if i % 1000 == 999 {
            m.write_rolled();
            bytes += layout(&mut m);
        }
    }
    m.check();
    ((steps::taken() - before) / overwrites, bytes / overwrites)
}

#[cfg(debug_assertions)]
#[test]
fn work_does_not_grow_with_the_number_of_extents() {
    // of few leaves several overwrites meet in one; of many each has its own, which an fsync and a commit look at and write
    for extents in [10_000, 100_000, 1_000_000] {
        let (steps, bytes) = work_per_overwrite(extents);
        assert!(steps <= 8, "{extents} extents: {steps} steps an overwrite");
        assert!(bytes <= 2 * 1024, "{extents} extents: {bytes} bytes an overwrite");
    }
}

#[test]
fn a_failed_allocation_loses_nothing() {
    let mut m = ExtentMap::new();
    for i in 0..2000 {
        m.insert(extent(2 * i, 4 * i, 1, false, false), &mut Runs::new());
    }
    let mut n = 0;
    let r = m.layout(100, &mut || {
        n += 1;
        if n > 3 { Err(Error::NoSpace) } else { Ok(NodeId(n)) }
    });
    assert!(matches!(r, Err(Error::NoSpace)));
    assert_eq!(m.nodes(), [NodeId(1), NodeId(2), NodeId(3)]);
    let l = m
        .layout(100, &mut || {
            n += 1;
            Ok(NodeId(n))
        })
        .unwrap();
    assert_eq!(l.write.len(), m.nodes().len());
}

#[test]
fn bad_trees_are_refused() {
    let r = |first, node| LeafRef { first, node: NodeId(node) };
    let e = |lblk, len| vec![extent(lblk, 9, len, false, false)];
    assert!(ExtentMap::from_leaves(vec![(r(0, 5), e(0, 4)), (r(10, 6), e(10, 1))], vec![]).is_ok());
    for bad in [
        vec![(r(1, 5), e(1, 4))],
        vec![(r(0, 5), e(0, 11)), (r(10, 6), e(11, 1))],
        vec![(r(0, 5), e(0, 4)), (r(10, 5), e(10, 1))],
        vec![(r(0, 5), e(0, 4)), (r(10, 6), e(9, 1))],
        vec![(r(0, 5), e(0, 4)), (r(10, 6), vec![])],
        vec![(r(0, 0), e(0, 4))],
        vec![(r(0, 5), e(7, 1)), (r(0, 6), e(8, 1))],
    ] {
        assert!(ExtentMap::from_leaves(bad.clone(), vec![]).is_err(), "{bad:?}");
    }
    let leaves = vec![(r(0, 5), e(0, 4)), (r(10, 6), e(10, 1))];
    assert!(ExtentMap::from_leaves(leaves.clone(), vec![(r(0, 7), vec![r(0, 5)])]).is_err());
    assert!(ExtentMap::from_leaves(leaves.clone(), vec![(r(1, 7), vec![r(0, 5), r(10, 6)])]).is_err());
    assert!(ExtentMap::from_leaves(leaves, vec![(r(0, 7), vec![r(0, 5), r(10, 6)])]).is_ok());
}
