//! Content that is lost in part: extent leaves whose index is gone.

use super::*;
use braidfs_format::inode::{decode_extents, encode_extents, encode_refs};
use braidfs_format::node::OVERFLOW;

/// Data blocks of domain 0 that nothing uses.
fn free_blocks(m: &Model) -> impl Iterator<Item = BlockAddr> {
    let (store, d) = (&m.store, &m.domains[0]);
    d.groups.values().flat_map(move |group| {
        let start = store.geometry().group_start(group.number).0;
        let free = |at: &u32| !group.segments.as_ref().unwrap()[(at / 512) as usize].is_valid(at % 512);
        let addrs = (0..group.blocks).filter(free).map(move |at| BlockAddr(start + u64::from(at)));
        addrs.filter(|addr| d.holds(store, *addr, 1))
    })
}

/// Gives `owner` an overflow node of `version`, alone in its block.
fn add_node(m: &mut Model, owner: InodeNo, version: u64, kind: NodeKind, payload: Vec<u8>) -> NodeId {
    let store = Arc::clone(&m.store);
    let (node, generation) = names::take_node(&store, &mut m.domains[0]).unwrap();
    // not one that is taken here already
    let taken: Vec<BlockAddr> = m.domains[0].groups.values().flat_map(|g| g.entries.used()).map(|e| e.1.addr).collect();
    let addr = free_blocks(m).filter(|b| !taken.contains(b)).last().unwrap();
    let flags = USED | OVERFLOW;
    let r = NodeRecord { node, generation, kind, flags, owner, version, payload };
    let mut block = NodeBlockBuilder::default();
    let index = block.push(&r.encode()).unwrap();
    store.write(addr, &block.finish(0, store.volume, addr, 1)).unwrap();
    m.domains[0].set_entry(&store, node, NodeEntry { addr, index, flags, generation, written: 1 });
    node
}

/// A volume with a file whose extent tree has two index nodes, and a file beside it with one block; the two.
fn deep() -> (Arc<SparseDevice>, [InodeNo; 2]) {
    // one group has room for all extents
    let dev = formatted(256, 1, Some(64 << 20));
    let mut m = model(&dev);
    let made = ["big", "other"].map(|name| add(&mut m, 0, 0o100_600, &[(InodeNo::ROOT, name)], Content::None));
    let mut free = free_blocks(&m).collect::<Vec<_>>().into_iter();
    for (node, count) in made.into_iter().zip([2600, 1]) {
        let ino = m.body(node).unwrap();
        let mut next = |lblk| Extent { lblk, addr: free.next().unwrap(), len: 1, unwritten: false, sums: None };
        ino.extents = (0..count).map(|i| next(2 * i)).collect();
        (ino.inode.content, ino.inode.blocks) = (Content::Extents(vec![]), count);
        (ino.inode.size, ino.dirty.extents) = (2 * count * BLOCK_BYTES as u64, true);
    }
    repair::write(&mut m).unwrap();
    let mut m = model(&dev);
    let ino = m.body(made[0]).unwrap();
    let (version, Content::Tree { depth: 1, refs }) = (ino.version, &ino.inode.content) else { panic!("no leaves") };
    let refs = refs.clone();
    assert!(refs.len() > 8, "{refs:?}");
    let top = [&refs[..6], &refs[6..]].map(|part| {
        let node = add_node(&mut m, made[0], version, NodeKind::ExtentIndex, encode_refs(part));
        LeafRef { first: part[0].first, node }
    });
    let ino = m.body(made[0]).unwrap();
    (ino.inode.content, ino.dirty.record) = (Content::Tree { depth: 2, refs: top.to_vec() }, true);
    repair::write(&mut m).unwrap();
    assert_eq!(run(&dev, &FORCE).findings, vec![]);
    (dev, made)
}

#[test]
fn leaves_of_a_lost_index_are_found() {
    let (dev, [n, other]) = deep();
    let mut m = model(&dev);
    let theirs = m.body(other).unwrap().extents[0].addr;
    let ino = m.body(n).unwrap();
    let (whole, version, leaf) = (ino.extents.clone(), ino.version, ino.tree[1]);
    let Content::Tree { depth: 2, refs } = ino.inode.content.clone() else { panic!("no index nodes") };
    let (_, r) = Records::new(&m.store, &m.domains[0]).get(leaf).unwrap();
    // behind the last block of the first leaf, and before the first of the second
    let gap = decode_extents(&r.payload).unwrap().last().unwrap().end();
    // one that is older than what covers its blocks, one of a state that is lost, and one whose block is another's by now
    for (version, lblk) in [(0, 1), (version + 1, gap), (0, gap)] {
        let extent = Extent { lblk, addr: theirs, len: 1, unwritten: false, sums: None };
        add_node(&mut m, n, version, NodeKind::ExtentLeaf, encode_extents(&[extent]));
    }
    repair::write(&mut m).unwrap();
    let entry = m.domains[0].entry(&m.store, refs[0].node).unwrap();
    m.store.write(entry.addr, &[0; BLOCK_BYTES]).unwrap();

    let r = run(&dev, &REPAIR);
    let mut told: Vec<u32> = r.findings.iter().map(|f| f.code).collect();
    told.sort_unstable();
    let wanted = [
        codes::NODE_BLOCK,
        codes::OVERFLOW_MISSING,
        codes::OVERFLOW_UNUSED,
        codes::OVERFLOW_UNUSED,
        codes::BLOCK_COUNT,
        codes::EXTENT_OLD,
        codes::LEAKED,
    ];
    assert_eq!((told.as_slice(), r.unfixed()), (wanted.as_slice(), 0), "{:#?}", r.findings);
    assert_eq!(run(&dev, &FORCE).findings, vec![]);
    assert!(model(&dev).body(n).unwrap().extents == whole, "the content is not what it was");
}
