//! Inodes whose last names were taken by inodes of other domains.

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
