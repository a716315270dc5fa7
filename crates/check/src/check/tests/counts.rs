//! Volumes that stopped, of which tables of blocks are lost: what these counted is not known while journals are
//! replayed.

use super::lost_header::{content, mounted, write};
use super::*;
use braidfs_format::group::OWNERS_PER_BLOCK;
use std::collections::BTreeSet;

const FILES: usize = 100;

/// Which tables are lost.
#[derive(PartialEq, Eq)]
enum Lost {
    /// Those of owners that count the records in the blocks of the files, of a domain that has another group with room.
    Counts,
    /// Those, and some of all groups.
    Owners,
    /// The segment tables of all groups.
    Segments,
}

/// A volume that stopped, of which some files were synced since its last commit, and tables are lost.
fn without_tables(dev: &Arc<SparseDevice>, what: &Lost) -> (Arc<SparseDevice>, Vec<(InodeNo, String)>) {
    let v = mounted(dev);
    let mut files: Vec<(InodeNo, String)> =
        (0..FILES).map(|i| format!("file-{i}")).map(|n| (write(&v, &n), n)).collect();
    if *what == Lost::Counts {
        let big = v.open(write(&v, "big")).unwrap();
        (0..20u64).for_each(|i| assert_eq!(v.write(&big, i << 20, &vec![1; 1 << 20]).unwrap(), 1 << 20));
    }
    v.unmount().unwrap();
    let v = mounted(dev);
    for (f, content) in files.iter_mut().step_by(9) {
        *content = content.to_uppercase();
        v.write(&v.open(*f).unwrap(), 0, content.as_bytes()).unwrap();
        v.fsync(*f, false).unwrap();
    }
    let then = dev.fork();
    v.crash();
    let m = model(&then);
    let g = m.store.geometry();
    let lose = |addr: u64| (0..2).for_each(|i| m.store.write(BlockAddr(addr + i), &[1; BLOCK_BYTES]).unwrap());
    let counts = files.iter().map(|(f, _)| {
        let addr = m.domains[0].entry(&m.store, f.node()).unwrap().addr;
        (g.group_of(addr), (addr.0 - g.group_start(g.group_of(addr)).0) as u32 / OWNERS_PER_BLOCK)
    });
    let counts: BTreeSet<(u32, u32)> = counts.collect();
    let owned = m.domains[0].groups.keys();
    match what {
        Lost::Counts => assert!(owned.len() > counts.iter().map(|c| c.0).collect::<BTreeSet<_>>().len()),
        Lost::Owners => owned.for_each(|group| lose(g.owners_addr(*group, 0, 0).0)),
        Lost::Segments => owned.for_each(|group| lose(g.segment_table_addr(*group).0)),
    }
    if *what != Lost::Segments {
        counts.iter().for_each(|(group, half)| lose(g.owners_addr(*group, half / 2, half % 2).0));
    }
    (then, files)
}

/// What a repair makes of it.
fn kept(dev: &Arc<SparseDevice>, files: &[(InodeNo, String)]) -> FsckReport {
    let r = run(dev, &REPAIR);
    assert_eq!(r.unfixed(), 0, "{:#?}", r.findings);
    let given_up = [codes::REPLAY_FAILED, codes::CHANGES_LOST, codes::NOT_MARKED];
    assert!(r.findings.iter().all(|f| !given_up.contains(&f.code)), "{:#?}", r.findings);
    assert_eq!(run(dev, &FORCE).findings, vec![]);
    let v = mounted(dev);
    for (f, wanted) in files {
        assert_eq!(content(&v, *f), *wanted, "{:#?}", r.findings);
    }
    v.unmount().unwrap();
    r
}

#[test]
fn a_replay_frees_no_node_block_whose_count_is_lost() {
    let (dev, files) = without_tables(&formatted(64, 1, Some(16 << 20)), &Lost::Counts);
    kept(&dev, &files);
}

/// What was synced has room, though it is not known of any group what is in use, or whose it is.
#[test]
fn what_was_synced_stays_where_tables_of_all_groups_are_lost() {
    for what in [Lost::Owners, Lost::Segments] {
        for mib in [16, 64] {
            let (dev, files) = without_tables(&fresh(mib, 1), &what);
            kept(&dev, &files);
        }
    }
}
