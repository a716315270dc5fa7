//! What hangs in a directory whose inode is lost keeps its names; what hangs nowhere stays in its domain where no name leaves it.

use super::*;
use braidfs::{Cred, FileKind, MountOptions, NewNode, Volume};
use braidfs_device::CountDevice;
use braidfs_format::domain::JournalMode;
use std::time::Duration;

/// Takes the inode of a directory out of the volume, and nothing else.
fn lose(m: &mut Model, node: InodeNo) {
    let (store, domain) = (Arc::clone(&m.store), usize::from(m.domain_of(node).unwrap()));
    m.body(node).unwrap();
    m.inodes.forget(node);
    m.domains[domain].free_node(&store, node.node());
}

fn codes_of(r: &FsckReport, node: InodeNo) -> Vec<u32> {
    r.findings.iter().filter(|f| f.node == Some(node.0)).map(|f| f.code).collect()
}

#[test]
fn a_lost_directory_comes_back_in_its_place() {
    let dev = populated();
    let mut m = model(&dev);
    let (b, file) = (find(&mut m, "a/b"), find(&mut m, "a/b/file-7"));
    lose(&mut m, b);
    repair::write(&mut m).unwrap();
    let r = run(&dev, &REPAIR);
    assert_eq!(r.unfixed(), 0, "{:#?}", r.findings);
    let told = [codes::LINK_PARENT, codes::ENTRY_STALE, codes::LINK_COUNT, codes::REMOTE_FLAG];
    assert_eq!(codes_of(&r, b), told, "{:#?}", r.findings);
    assert!(!r.findings.iter().any(|f| f.code == codes::UNLINKED));
    let after = run(&dev, &FORCE);
    assert_eq!((after.findings, after.files, after.dirs), (vec![], 404, 4));
    let mut m = model(&dev);
    assert_eq!((find(&mut m, "a/b"), find(&mut m, "a/b/file-7")), (b, file));
    find(&mut m, "a/b/c/a rather long name of a hard link, number 7");
    // whose it was nobody knows
    assert_eq!((m.body(b).unwrap().inode.mode & 0o7777, m.body(b).unwrap().inode.uid), (0o700, 0));
}

#[test]
fn a_lost_directory_without_a_name_goes_to_lost_found_with_all_names() {
    let dev = populated();
    let mut m = model(&dev);
    let (a, b) = (find(&mut m, "a"), find(&mut m, "a/b"));
    let (first, second) = (find(&mut m, "a/b/file-1"), find(&mut m, "a/b/file-2"));
    // the later one of two with one name has it
    let name = m.body(first).unwrap().inode.links[0].name.clone();
    let ino = m.body(second).unwrap();
    (ino.inode.links[0].name, ino.inode.link_seq) = (name, 1 << 40);
    (ino.dirty.links, ino.dirty.record) = (true, true);
    lose(&mut m, b);
    let ino = m.body(a).unwrap();
    ino.entries.retain(|e| e.node != b);
    (ino.inode.nlink, ino.dirty.entries) = (2, true);
    repair::write(&mut m).unwrap();
    assert_eq!(run(&dev, &REPAIR).unfixed(), 0);
    let after = run(&dev, &FORCE);
    assert_eq!((after.findings, after.files, after.dirs), (vec![], 404, 5));
    let mut m = model(&dev);
    assert_eq!(find(&mut m, &format!("lost+found/#{}", b.0)), b);
    assert_eq!(find(&mut m, &format!("lost+found/#{}/file-1", b.0)), second);
    assert_eq!(find(&mut m, &format!("lost+found/#{}", first.0)), first);
    find(&mut m, &format!("lost+found/#{}/file-399", b.0));
    let lost = find(&mut m, "lost+found");
    assert_eq!(m.body(lost).unwrap().entries.len(), 2);
}

/// A single link says that a number was a directory only where something was found that cost it its inode.
#[test]
fn one_name_in_a_lost_directory_is_kept_where_its_inode_was_given_up() {
    let dev = populated();
    let mut m = model(&dev);
    let d = add(&mut m, 1, 0o040_755, &[(InodeNo::ROOT, "d")], Content::InlineDir(vec![]));
    // alone in its node block
    let only = add(&mut m, 2, 0o100_600, &[(d, "only")], Content::None);
    repair::write(&mut m).unwrap();
    let m = model(&dev);
    let entry = m.domains[1].entry(&m.store, d.node()).unwrap();
    m.store.write(entry.addr, &[0; BLOCK_BYTES]).unwrap();
    let r = run(&dev, &REPAIR);
    assert_eq!(r.unfixed(), 0, "{:#?}", r.findings);
    assert_eq!(codes_of(&r, d)[..3], [codes::NODE_BLOCK, codes::LINK_PARENT, codes::ENTRY_STALE], "{:#?}", r.findings);
    assert_eq!(run(&dev, &FORCE).findings, vec![]);
    assert_eq!(find(&mut model(&dev), "d/only"), only);
}

/// The block of the node table that told its generation is lost as well: the entry that names it tells.
#[test]
fn a_lost_directory_comes_back_without_its_node_table() {
    let dev = populated();
    let mut m = model(&dev);
    let (b, file) = (find(&mut m, "a/b"), find(&mut m, "a/b/file-7"));
    let (group, slot) = m.store.geometry().node_place(b).unwrap();
    let entry = m.domains[usize::from(m.domain_of(b).unwrap())].entry(&m.store, b.node()).unwrap();
    m.store.write(entry.addr, &[0; BLOCK_BYTES]).unwrap();
    let table = m.store.geometry().node_table_addr(group, slot / braidfs_format::geometry::NODES_PER_BLOCK);
    m.store.write(table, &[0; 2 * BLOCK_BYTES]).unwrap();
    let r = run(&dev, &REPAIR);
    assert_eq!(r.unfixed(), 0, "{:#?}", r.findings);
    assert_eq!(run(&dev, &FORCE).findings, vec![]);
    let mut m = model(&dev);
    assert_eq!((find(&mut m, "a/b"), find(&mut m, "a/b/file-7")), (b, file));
}

/// Of a tenant without a journal no name crosses the border: not one that a repair makes either.
#[test]
fn a_tenant_without_a_journal_has_a_lost_found_of_its_own() {
    let dev = fresh(64, 3);
    let mut m = model(&dev);
    let root = InodeNo::ROOT;
    let a = add(&mut m, 1, 0o040_755, &[(root, "a")], Content::InlineDir(vec![]));
    let inside = add(&mut m, 1, 0o100_600, &[(a, "inside")], Content::None);
    let dir = add(&mut m, 1, 0o040_755, &[(a, "dir")], Content::InlineDir(vec![]));
    let beside = add(&mut m, 0, 0o100_600, &[(root, "beside")], Content::None);
    repair::write(&mut m).unwrap();
    let mut m = model(&dev);
    let ino = m.body(a).unwrap();
    let mut kept = Inode::decode(&ino.inode.encode()).unwrap();
    kept.content = Content::InlineDir(vec![]);
    let record = NodeRecord {
        node: a.node(),
        generation: ino.generation,
        kind: NodeKind::Inode,
        flags: ino.flags,
        owner: a,
        version: ino.version,
        payload: kept.encode(),
    };
    bind(&mut m, 1, "a", "one", |h| {
        (h.tenant_journal, h.scratch_at_rest) = (JournalMode::Scratch as u8, 1);
        assert!(h.keep_scratch_root(&record.encode()));
    });
    repair::write(&mut m).unwrap();
    assert_eq!(run(&dev, &FORCE).findings, vec![]);
    let mut m = model(&dev);
    for (node, parent) in [(inside, 77_777), (beside, 77_778)] {
        let ino = m.body(node).unwrap();
        (ino.inode.links[0].parent, ino.dirty.links) = (InodeNo(parent), true);
    }
    // below itself
    let ino = m.body(dir).unwrap();
    (ino.inode.links[0].parent, ino.dirty.links) = (dir, true);
    repair::write(&mut m).unwrap();
    assert_eq!(run(&dev, &REPAIR).unfixed(), 0);
    assert_eq!(run(&dev, &FORCE).findings, vec![]);
    let mut m = model(&dev);
    for node in [inside, dir] {
        assert_eq!(find(&mut m, &format!("a/lost+found/#{}", node.0)), node);
    }
    assert_eq!(find(&mut m, &format!("lost+found/#{}", beside.0)), beside);
    let homes = ["a/lost+found", "lost+found"].map(|p| find(&mut m, p));
    assert_eq!(homes.map(|n| m.domain_of(n)), [Some(1), Some(0)]);
    assert!(m.domains[1].header.unwrap().is_scratch());
}

/// Loses all of the first block of the node tables.
fn lose_node_tables(dev: &Arc<SparseDevice>) {
    let m = volume::read(&[Arc::clone(dev) as Arc<dyn Device>]).unwrap();
    for (group, _) in (0u32..).zip(&m.bat).filter(|(_, e)| e.domain.is_some()) {
        m.store.write(m.store.geometry().node_table_addr(group, 0), &[1; 2 * BLOCK_BYTES]).unwrap();
    }
}

/// A directory was removed with all that was in it, at once: its last record names what it had. The records of all lie beside
/// others', and are found again.
#[test]
fn what_was_removed_with_its_directory_does_not_come_back_with_the_node_table() {
    let dev = fresh(32, 1);
    let options =
        || MountOptions { background: false, commit_interval: Duration::from_secs(3600), ..MountOptions::default() };
    let mounted = || Volume::mount(vec![Arc::clone(&dev) as Arc<dyn Device>], options()).unwrap();
    let (root, me) = (InodeNo::ROOT, Cred::root());
    let new = |kind| NewNode { kind, mode: 0o755, umask: 0, rdev: 0, target: b"" };
    let make = |v: &Volume, dir, name: &[u8], kind| v.create(dir, name, &new(kind), &me).unwrap().ino;
    let v = mounted();
    make(&v, root, b"stays", FileKind::File);
    let dir = make(&v, root, b"dir", FileKind::Dir);
    let below = make(&v, dir, b"below", FileKind::Dir);
    for name in [b"x", b"y"] {
        make(&v, below, name, FileKind::File);
    }
    make(&v, dir, b"z", FileKind::File);
    v.unmount().unwrap();
    let v = mounted();
    [b"x", b"y"].iter().for_each(|name| v.unlink(below, *name).unwrap());
    v.unlink(dir, b"z").unwrap();
    v.rmdir(dir, b"below").unwrap();
    v.rmdir(root, b"dir").unwrap();
    v.unmount().unwrap();
    assert_eq!(run(&dev, &FORCE).findings, vec![]);
    lose_node_tables(&dev);
    let r = run(&dev, &REPAIR);
    assert_eq!(r.unfixed(), 0, "{:#?}", r.findings);
    let dropped = r.findings.iter().filter(|f| f.code == codes::RECOVERED_UNNAMED).count();
    assert_eq!(dropped, 5, "{:#?}", r.findings);
    let after = run(&dev, &FORCE);
    assert_eq!((after.findings, after.files, after.dirs), (vec![], 1, 1), "{:#?}", r.findings);
    find(&mut model(&dev), "stays");
}

/// A bucket is lost together with the node table: the links of what was found again tell the names, as those of others do.
#[test]
fn files_found_again_keep_their_names_where_a_bucket_is_lost() {
    let dev = populated();
    let mut m = model(&dev);
    let b = find(&mut m, "a/b");
    let buckets: Vec<BlockAddr> = m.body(b).unwrap().extents.iter().map(|e| e.addr).collect();
    assert!(buckets.len() > 2, "{buckets:?}");
    m.store.write(buckets[1], &[1; BLOCK_BYTES]).unwrap();
    drop(m);
    lose_node_tables(&dev);
    let r = run(&dev, &REPAIR);
    assert_eq!(r.unfixed(), 0, "{:#?}", r.findings);
    let after = run(&dev, &FORCE);
    assert_eq!((after.findings, after.files, after.dirs), (vec![], 404, 4));
    let mut m = model(&dev);
    for i in 0..400 {
        find(&mut m, &format!("a/b/file-{i}"));
    }
}

/// Nor are those lost whose directory was given up with its record: its name and its number are there.
#[test]
fn files_found_again_stay_where_their_directory_is_given_up() {
    let dev = populated();
    let mut m = model(&dev);
    let b = find(&mut m, "a/b");
    let entry = m.domains[usize::from(m.domain_of(b).unwrap())].entry(&m.store, b.node()).unwrap();
    m.store.write(entry.addr, &[0; BLOCK_BYTES]).unwrap();
    drop(m);
    lose_node_tables(&dev);
    let r = run(&dev, &REPAIR);
    assert_eq!(r.unfixed(), 0, "{:#?}", r.findings);
    let after = run(&dev, &FORCE);
    // what lay in that node block is gone
    let lost = 404 - after.files;
    assert!(after.findings.is_empty() && lost < 64, "{lost}: {:#?}", r.findings);
    let mut m = model(&dev);
    assert_eq!(find(&mut m, "a/b"), b);
    assert!(m.body(b).unwrap().entries.len() as u64 >= 400 - lost);
}

/// Somebody has given all the names that come to mind first.
#[test]
fn there_is_no_end_of_names_for_lost_found() {
    let dev = fresh(64, 1);
    let mut m = model(&dev);
    let root = InodeNo::ROOT;
    for more in 0..=255 - "lost+found".len() {
        add(&mut m, 0, 0o100_600, &[(root, &format!("lost+found{}", "_".repeat(more)))], Content::None);
    }
    let lost = add(&mut m, 0, 0o100_600, &[(root, "lost")], Content::None);
    repair::write(&mut m).unwrap();
    assert_eq!(run(&dev, &FORCE).findings, vec![]);
    let mut m = model(&dev);
    let ino = m.body(lost).unwrap();
    (ino.inode.links[0].parent, ino.dirty.links) = (InodeNo(77_777), true);
    repair::write(&mut m).unwrap();
    let r = run(&dev, &REPAIR);
    assert_eq!(r.unfixed(), 0, "{:#?}", r.findings);
    assert_eq!(run(&dev, &FORCE).findings, vec![]);
    assert_eq!(find(&mut model(&dev), &format!("lost+found_2/#{}", lost.0)), lost);
}

/// A file whose content looks like a node block, with a later record of an inode of which the node table is lost.
#[test]
fn content_of_files_is_not_taken_for_node_blocks() {
    let dev = populated();
    let mut m = model(&dev);
    let (file, big) = (find(&mut m, "a/b/file-7"), find(&mut m, "a/big"));
    let domain = m.domain_of(big).unwrap();
    assert_eq!(m.domain_of(file), Some(domain));
    let addr = m.body(big).unwrap().extents[3].addr;
    let store = Arc::clone(&m.store);
    let (_, mut forged) = Records::new(&store, &m.domains[usize::from(domain)]).get(file.node()).unwrap();
    forged.version += 1000;
    forged.payload = Inode { mode: 0o104_777, ..Inode::decode(&forged.payload).unwrap() }.encode();
    let mut block = NodeBlockBuilder::default();
    block.push(&forged.encode()).unwrap();
    store.write(addr, &block.finish(domain, store.volume, addr, 1 << 20)).unwrap();
    assert_eq!(run(&dev, &FORCE).findings, vec![]);
    lose_node_tables(&dev);
    assert_eq!(run(&dev, &REPAIR).unfixed(), 0);
    let mut m = model(&dev);
    assert_eq!(m.log.findings, vec![]);
    assert_eq!(m.body(file).unwrap().inode.mode, 0o100_644);
}

/// Nor is it read, though something is found which makes the check look for records.
#[test]
fn a_check_that_finds_something_reads_no_content_of_files() {
    let read = |blocks: u32| {
        let dev = formatted(64, 1, Some(16 << 20));
        let mut m = model(&dev);
        let small = add(&mut m, 0, 0o100_600, &[(InodeNo::ROOT, "small")], Content::None);
        let large = add(&mut m, 0, 0o100_600, &[(InodeNo::ROOT, "large")], Content::None);
        add_extents(&mut m, large, 1);
        let ino = m.body(large).unwrap();
        ino.extents[0].len = blocks;
        ino.inode.size = u64::from(blocks) * BLOCK_BYTES as u64;
        ino.inode.blocks = blocks.into();
        repair::write(&mut m).unwrap();
        let mut m = model(&dev);
        set_written(&mut m, small.node(), |w| w + 1);
        repair::write(&mut m).unwrap();
        drop(m);
        let counted = Arc::new(CountDevice::new(dev as Arc<dyn Device>));
        let report = check(&[Arc::clone(&counted) as Arc<dyn Device>], &FORCE, &JournalReplay, &|_, _, _| {}).unwrap();
        assert!(report.findings.iter().any(|f| f.code == codes::NODE_BLOCK_OLD), "{:#?}", report.findings);
        counted.counters().read_blocks
    };
    assert_eq!(read(2500), read(100));
}
