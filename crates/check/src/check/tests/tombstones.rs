//! Inodes whose last names were taken by inodes of other domains. (Of those with other names: [`super::lost_header`].)

use super::*;
use braidfs_format::inode::Tombstone;

/// A file of domain 2 that lost its name to one of domain 0, as `by` says of that one's generation and version; whether its entry is
/// still there.
fn replaced(by: impl FnOnce(&Ino) -> (u32, u64), entry: bool) -> (Arc<SparseDevice>, InodeNo) {
    let dev = populated();
    let mut m = model(&dev);
    let newcomer = find(&mut m, "a/small");
    let (generation, version) = by(m.body(newcomer).unwrap());
    let root = InodeNo::ROOT;
    let victim = add(&mut m, 2, 0o100_644, &[(root, "victim")], Content::Inline(b"kept".to_vec()));
    let ino = m.body(victim).unwrap();
    let link = ino.inode.links.remove(0);
    (ino.inode.nlink, ino.linked) = (0, vec![]);
    ino.inode.tombstones = vec![Tombstone { link, newcomer, generation, version }];
    if !entry {
        m.body(root).unwrap().entries.retain(|e| e.node != victim);
    }
    repair::write(&mut m).unwrap();
    (dev, victim)
}

#[test]
fn a_name_that_nobody_took_comes_back() {
    type By = fn(&Ino) -> (u32, u64);
    let cases: [(By, bool); 5] = [
        (|i| (i.generation, i.version), false),
        (|i| (i.generation, i.version + 1), true),
        // its number was given out again, or never with this generation
        (|i| (i.generation - 1, i.version + 1), false),
        (|i| (i.generation + 1, 1), true),
        (|i| (i.generation, i.version.saturating_sub(1)), false),
    ];
    for (i, (by, comes_back)) in cases.into_iter().enumerate() {
        for entry in [true, false] {
            let (dev, victim) = replaced(by, entry);
            let seen = run(&dev, &FORCE).findings;
            let told = |code| seen.iter().any(|f| (f.code, f.node) == (code, Some(victim.0)));
            assert_eq!((told(codes::ENTRY_STALE), told(codes::ORPHAN)), (comes_back, !comes_back), "{i}: {seen:#?}");
            assert_eq!(run(&dev, &REPAIR).unfixed(), 0, "{i}");
            assert_eq!(run(&dev, &FORCE).findings, vec![], "{i}");
            let mut m = model(&dev);
            assert_eq!(m.inodes.get(victim).is_some(), comes_back, "{i}");
            if comes_back {
                assert_eq!(find(&mut m, "victim"), victim);
                let inode = &m.body(victim).unwrap().inode;
                assert_eq!((inode.nlink, inode.tombstones.len()), (1, 0), "{i}");
                assert_eq!(inode.content, Content::Inline(b"kept".to_vec()));
            }
        }
    }
}

/// A file of domain 2 lost one of its names to one of domain 0, whose journal is given up.
#[test]
fn a_name_that_nobody_took_comes_back_beside_another_one() {
    for (newer, names) in [(0, 1), (1, 2)] {
        let dev = populated();
        let mut m = model(&dev);
        let newcomer = find(&mut m, "a/small");
        let (generation, version) = m.body(newcomer).map(|i| (i.generation, i.version + newer)).unwrap();
        let root = InodeNo::ROOT;
        let victim = add(&mut m, 2, 0o100_644, &[(root, "victim"), (root, "kept")], Content::None);
        let ino = m.body(victim).unwrap();
        let link = ino.inode.links.remove(0);
        (ino.inode.nlink, ino.linked) = (1, vec![true]);
        ino.inode.tombstones = vec![Tombstone { link, newcomer, generation, version }];
        m.body(root).unwrap().entries.retain(|e| *e.name != *b"victim");
        repair::write(&mut m).unwrap();
        // of a volume that holds nothing is said
        assert_eq!(run(&dev, &FORCE).findings, vec![]);
        lost_header::lose_header(&dev, 0);
        assert_eq!(run(&dev, &REPAIR).unfixed(), 0);
        assert_eq!(run(&dev, &FORCE).findings, vec![]);
        let mut m = model(&dev);
        assert_eq!(m.body(victim).unwrap().inode.nlink, names);
        assert_eq!(find(&mut m, "kept"), victim);
        if names == 2 {
            assert_eq!(find(&mut m, "victim"), victim);
        }
    }
}

/// Two files of different domains exchanged names; of the one of domain 0, whose journal is given up, nothing but its old name is left.
#[test]
fn half_an_exchange_is_completed() {
    for entry in [true, false] {
        let dev = populated();
        let mut m = model(&dev);
        let partner = find(&mut m, "a/small");
        let (root, a) = (InodeNo::ROOT, find(&mut m, "a"));
        let (generation, version, seq) =
            m.body(partner).map(|i| (i.generation, i.version + 1, i.inode.link_seq)).unwrap();
        let moved = add(&mut m, 2, 0o100_644, &[(root, "moved")], Content::Inline(b"moved".to_vec()));
        let ino = m.body(moved).unwrap();
        let link = ino.inode.links.remove(0);
        ino.inode.links = vec![Link { parent: a, name: b"small".as_slice().into() }];
        (ino.inode.link_seq, ino.linked) = (seq + 1, vec![true]);
        ino.inode.tombstones = vec![Tombstone { link, newcomer: partner, generation, version }];
        ino.inode.exchange = Some((partner, generation, version));
        if !entry {
            m.body(root).unwrap().entries.retain(|e| e.node != moved);
        }
        repair::write(&mut m).unwrap();
        lost_header::lose_header(&dev, 0);
        assert_eq!(run(&dev, &REPAIR).unfixed(), 0);
        assert_eq!(run(&dev, &FORCE).findings, vec![]);
        let mut m = model(&dev);
        assert_eq!((find(&mut m, "a/small"), find(&mut m, "moved")), (moved, partner));
        for node in [moved, partner] {
            let inode = &m.body(node).unwrap().inode;
            assert_eq!((inode.nlink, inode.exchange, inode.tombstones.len()), (1, None, 0));
        }
    }
}

/// Who took a name, and never came to be, must not look as if it had, since a repair wrote it, or gave its number out,
/// and was cut off.
#[test]
fn a_name_that_nobody_took_comes_back_behind_a_repair_that_is_cut_off() {
    for is_new in [false, true] {
        let dev = populated();
        let mut m = model(&dev);
        let (root, taker) = (InodeNo::ROOT, find(&mut m, "a/small"));
        let ino = m.body(taker).unwrap();
        (ino.inode.blocks, ino.dirty.record) = (77, true);
        let taken = (taker, ino.generation, ino.version + 2);
        // this one goes to a new `/lost+found`
        let homeless = add(&mut m, 0, 0o100_644, &[(root, "homeless")], Content::None);
        let victim = add(&mut m, 2, 0o100_644, &[(root, "victim")], Content::Inline(b"kept".to_vec()));
        m.body(root).unwrap().entries.retain(|e| e.node != homeless && e.node != victim);
        for node in [homeless, victim] {
            let ino = m.body(node).unwrap();
            (ino.inode.links, ino.linked) = (vec![], vec![]);
        }
        let (store, link) = (Arc::clone(&m.store), Link { parent: root, name: b"victim".as_slice().into() });
        let (next, generation) = names::take_node(&store, &mut m.domains[0]).unwrap();
        let free = NodeEntry { generation: generation - 1, ..NodeEntry::default() };
        m.domains[0].set_entry(&store, next, free);
        let (newcomer, generation, version) = if is_new { (next.inode(), generation, 1) } else { taken };
        let ino = m.body(victim).unwrap();
        ino.inode.nlink = 0;
        ino.inode.tombstones = vec![Tombstone { link, newcomer, generation, version }];
        repair::write(&mut m).unwrap();
        let events = cut_off::repaired(&dev, cut_off::by_hand);
        let states = cut_off::each_cut(&dev, &events, |dev, cut| {
            let again = run(dev, &REPAIR);
            assert_eq!(again.unfixed(), 0, "{cut}: {:#?}", again.findings);
            assert_eq!(run(dev, &FORCE).findings, vec![], "{cut}");
            let mut m = model(dev);
            assert!(m.inodes.get(victim).is_some(), "new: {is_new}, {cut}: {:#?}", again.findings);
            assert_eq!(find(&mut m, "victim"), victim, "{cut}");
        });
        assert!(states > 20, "{states} states");
    }
}
