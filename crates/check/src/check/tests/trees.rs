//! Content that is lost in part: extent leaves whose index is gone, and symbolic links without a target.

use super::*;
use braidfs::{Cred, MountOptions, Volume};
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

/// Mounts a copy of the volume.
fn mounted(dev: &Arc<SparseDevice>) -> Volume {
    let o = MountOptions { background: false, ..MountOptions::default() };
    Volume::mount(vec![dev.fork() as Arc<dyn Device>], o).unwrap()
}

#[test]
fn a_symbolic_link_without_a_target_goes() {
    let base = fresh(64, 1);
    // what the engine makes of a long target, and of one that no path can be
    let v = Volume::mount(vec![Arc::clone(&base) as Arc<dyn Device>], MountOptions::default()).unwrap();
    v.symlink_path(&[b'x'; 4095], b"long", &Cred::root()).unwrap();
    assert!(v.symlink_path(b"a\0b", b"zero", &Cred::root()).is_err());
    v.unmount().unwrap();
    let r = run(&base, &FORCE);
    assert_eq!((r.findings.as_slice(), r.symlinks), ([].as_slice(), 1));
    assert!(agree(&base));

    let block = |m: &Model| free_blocks(m).nth(5).unwrap();
    let extent = |lblk, addr, unwritten| Extent { lblk, addr, len: 1, unwritten, sums: None };
    type Forge<'a> = &'a dyn Fn(&mut Model, InodeNo);
    let with = |m: &mut Model, n: InodeNo, extents: Vec<Extent>| {
        let ino = m.body(n).unwrap();
        ino.inode.blocks = extents.len() as u64;
        (ino.extents, ino.inode.content, ino.dirty.extents) = (extents, Content::Extents(vec![]), true);
    };
    let cases: [(&str, Forge<'_>, &[u32]); 5] = [
        ("nothing", &|_, _| (), &[]),
        ("unwritten", &|m, n| with(m, n, vec![extent(0, block(m), true)]), &[]),
        ("a hole", &|m, n| with(m, n, vec![extent(1, block(m), false)]), &[]),
        ("nowhere", &|m, n| with(m, n, vec![extent(0, BlockAddr(1 << 40), false)]), &[codes::EXTENT_PLACE]),
        (
            "another's",
            &|m, n| {
                let addr = block(m);
                with(m, n, vec![extent(0, addr, false)]);
                let file = add(m, 0, 0o100_600, &[(InodeNo::ROOT, "file")], Content::None);
                with(m, file, vec![extent(0, addr, false)]);
                m.body(file).unwrap().inode.size = 4096;
            },
            &[codes::BLOCK_SHARED],
        ),
    ];
    for (what, forge, more) in cases {
        let dev = base.fork();
        let mut m = model(&dev);
        let n = add(&mut m, 0, 0o120_777, &[(InodeNo::ROOT, "link")], Content::None);
        m.body(n).unwrap().inode.size = 7;
        forge(&mut m, n);
        repair::write(&mut m).unwrap();
        if more.is_empty() {
            let v = mounted(&dev);
            assert!(matches!(v.readlink(n), Err(braidfs::Error::Corrupt(_))), "{what}: {:?}", v.readlink(n));
            assert!(v.resolve(b"link/x", true, &Cred::root()).is_err(), "{what}");
        }
        let r = run(&dev, &FORCE);
        assert!(
            r.findings.iter().any(|f| f.code == codes::CONTENT && f.node == Some(n.0)),
            "{what}: {:#?}",
            r.findings
        );
        assert!(more.iter().all(|code| r.findings.iter().any(|f| f.code == *code)), "{what}: {:#?}", r.findings);
        assert_eq!(run(&dev, &REPAIR).unfixed(), 0, "{what}");
        let after = run(&dev, &FORCE);
        assert_eq!((after.findings.as_slice(), after.symlinks), ([].as_slice(), 1), "{what}");
        mounted(&dev).unmount().unwrap();
    }
}
