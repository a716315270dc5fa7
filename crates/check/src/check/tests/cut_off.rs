//! Repairs that are cut off: killed, or by a loss of power, which tears what was not flushed.

use super::*;
use braidfs::{Cred, FileKind, MountOptions, NewNode, RenameMode, Volume};
use braidfs_device::{Event, MemDevice, RecordDevice};
use braidfs_format::domain::FAILED;
use braidfs_format::geometry::NODES_PER_BLOCK;
use std::cell::Cell;
use std::collections::BTreeSet;
use std::time::Duration;

/// Bytes that a device writes at once, or not at all.
const SECTOR_BYTES: usize = 512;
/// Content of a file that was synced.
const SYNCED: &[u8] = b"synced before the crash";

/// A volume with a file whose extents are in leaves, these in a block of the node table behind that of the file or before it.
fn with_leaves(leaves_first: bool) -> Arc<SparseDevice> {
    let dev = formatted(64, 1, Some(16 << 20));
    let mut m = model(&dev);
    let store = Arc::clone(&m.store);
    let some: Vec<NodeId> = (0..8).map(|_| names::take_node(&store, &mut m.domains[0]).unwrap().0).collect();
    let first = (!leaves_first).then(|| add(&mut m, 0, 0o100_600, &[(InodeNo::ROOT, "big")], Content::None));
    for i in 0..300 {
        add(&mut m, 0, 0o100_644, &[(InodeNo::ROOT, &format!("file-{i}"))], Content::Inline(vec![i as u8; 50]));
    }
    let big = first.unwrap_or_else(|| add(&mut m, 0, 0o100_600, &[(InodeNo::ROOT, "big")], Content::None));
    add_extents(&mut m, big, 1000);
    if leaves_first {
        some.iter().for_each(|n| m.domains[0].free_node(&store, *n));
    }
    repair::write(&mut m).unwrap();
    if !leaves_first {
        some.iter().for_each(|n| m.domains[0].free_node(&store, *n));
        repair::write(&mut m).unwrap();
    }
    let mut m = model(&dev);
    assert_eq!(m.log.findings, vec![]);
    let n = find(&mut m, "big");
    let block = |n: NodeId| store.geometry().node_place(n).unwrap().1 / NODES_PER_BLOCK;
    let leaves: Vec<u32> = m.body(n).unwrap().tree.iter().map(|l| block(*l)).collect();
    assert!(leaves.len() >= 4 && leaves.iter().all(|b| (*b < block(n.node())) == leaves_first), "{leaves:?}");
    dev
}

/// Extents of the file.
fn extents(dev: &Arc<SparseDevice>) -> usize {
    let mut m = model(dev);
    let n = find(&mut m, "big");
    m.body(n).unwrap().extents.len()
}

/// What `repair` writes and flushes.
pub fn repaired(base: &Arc<SparseDevice>, repair: impl FnOnce(Arc<dyn Device>)) -> Vec<Event> {
    let image = MemDevice::new(base.blocks());
    let mut block = vec![0; BLOCK_BYTES];
    for b in base.written() {
        base.read(b, &mut block).unwrap();
        image.write(b, &block).unwrap();
    }
    let recorder = Arc::new(RecordDevice::new(image.snapshot()));
    repair(recorder.clone());
    recorder.log()
}

pub fn by_hand(dev: Arc<dyn Device>) {
    check(&[dev], &REPAIR, &JournalReplay, &|_, _, _| {}).unwrap();
}

fn at_boot(dev: Arc<dyn Device>) {
    let r = preen(&[dev], true, &Limits::default(), &JournalReplay, &|_, _, _| {}).unwrap();
    assert!(!r.by_hand && !r.findings.is_empty(), "{:#?}", r.findings);
}

/// Cuts a repair off at each of its writes, and in each way; how often.
pub fn each_cut(base: &Arc<SparseDevice>, events: &[Event], look: impl Fn(&Arc<SparseDevice>, &str)) -> usize {
    let (mut flushed, mut states) = (0, 0);
    for (at, event) in events.iter().enumerate() {
        let Event::Write { .. } = event else {
            if matches!(event, Event::Flush { .. }) {
                flushed = at;
            }
            continue;
        };
        // Killed: all that was written. Power lost: what was flushed, this one, whole or torn; or all but one of the others.
        let cuts: [&dyn Fn(usize) -> Option<usize>; 4] = [
            &|_| Some(BLOCK_BYTES),
            &|i| (i <= flushed || i == at).then_some(BLOCK_BYTES),
            &|i| (i <= flushed).then_some(BLOCK_BYTES).or(Some(SECTOR_BYTES)),
            &|i| (i <= flushed || (i + at) % 2 == 1).then_some(BLOCK_BYTES),
        ];
        for (how, cut) in cuts.iter().enumerate() {
            look(&after(base, &events[..=at], cut), &format!("cut off at {at}, {how}"));
            states += 1;
        }
    }
    states
}

/// Writes a newer record of a file, with other content, to a free block: of a transaction that was never committed.
fn write_uncommitted(dev: &Arc<SparseDevice>, path: &str) {
    let mut m = model(dev);
    let n = find(&mut m, path).node();
    let (store, d) = (Arc::clone(&m.store), &m.domains[0]);
    let (entry, mut newer) = Records::new(&store, d).get(n).unwrap();
    let inode = Inode::decode(&newer.payload).unwrap();
    newer.version += 5;
    newer.payload = Inode { content: Content::Inline(b"never committed".to_vec()), size: 15, ..inode }.encode();
    let group = d.groups.values().next_back().unwrap();
    let free = |at: &u32| !group.segments.as_ref().unwrap()[(at / 512) as usize].is_valid(at % 512);
    let at = (0..group.blocks).rev().find(free).unwrap();
    let addr = BlockAddr(store.geometry().group_start(group.number).0 + u64::from(at));
    let mut block = NodeBlockBuilder::default();
    block.push(&newer.encode()).unwrap();
    store.write(addr, &block.finish(0, store.volume, addr, u64::from(entry.written) + 7)).unwrap();
}

/// The device behind `events`, of each of which only some bytes of each block came to it, or none.
fn after(base: &Arc<SparseDevice>, events: &[Event], came: impl Fn(usize) -> Option<usize>) -> Arc<SparseDevice> {
    let dev = base.fork();
    let mut now = vec![0; BLOCK_BYTES];
    for (i, e) in events.iter().enumerate() {
        let (Event::Write { block, data, .. }, Some(bytes)) = (e, came(i)) else { continue };
        for (b, part) in (*block..).zip(data.chunks(BLOCK_BYTES)) {
            dev.read(b, &mut now).unwrap();
            now[..bytes].copy_from_slice(&part[..bytes]);
            dev.write(b, &now).unwrap();
        }
    }
    dev
}

/// Damages a leaf, lets a repair be cut off at each of its writes and in each way, and repairs again.
fn keeps_what_it_can(leaves_first: bool) {
    let base = with_leaves(leaves_first);
    {
        let mut m = model(&base);
        let n = find(&mut m, "big");
        let leaf = m.body(n).unwrap().tree[1];
        let addr = m.domains[0].entry(&m.store, leaf).unwrap().addr;
        let mut block = vec![0; BLOCK_BYTES];
        m.store.read(addr, &mut block).unwrap();
        block[200] ^= 4;
        m.store.write(addr, &block).unwrap();
    }
    write_uncommitted(&base, "file-7");
    let events = repaired(&base, by_hand);
    let whole = after(&base, &events, |_| Some(BLOCK_BYTES));
    let (kept, there) = (extents(&whole), preen::stored(&whole));
    assert!((700..1000).contains(&kept), "{kept} extents are left");
    assert_eq!(run(&whole, &FORCE).findings, vec![]);
    let states = each_cut(&base, &events, |dev, cut| {
        let again = run(dev, &REPAIR);
        assert_eq!(again.unfixed(), 0, "{cut}: {:#?}", again.findings);
        let lost = [codes::BAT_LOST, codes::DOMAIN_LOST, codes::NODES_LOST, codes::SEGMENTS_OLD];
        assert!(!again.findings.iter().any(|f| lost.contains(&f.code)), "{cut}: {:#?}", again.findings);
        assert_eq!(extents(dev), kept, "extents after a repair {cut}");
        assert!(preen::stored(dev) == there, "files after a repair {cut}");
        assert_eq!(run(dev, &FORCE).findings, vec![], "{cut}");
    });
    assert!(states > 40, "{states} states");
}

#[test]
fn a_repair_that_is_cut_off_keeps_what_it_can() {
    keeps_what_it_can(false);
    keeps_what_it_can(true);
}

/// Where the repair at a boot is cut off, that at the next one ends it: what it left half done is no write that the device lost.
#[test]
fn the_next_boot_ends_a_repair() {
    let base = with_leaves(false);
    write_uncommitted(&base, "file-7");
    let there = preen::stored(&base);
    let mut m = model(&base);
    for path in ["big", "file-9"] {
        let n = find(&mut m, path);
        let ino = m.body(n).unwrap();
        (ino.inode.blocks, ino.inode.nlink, ino.dirty.record) = (77, 9, true);
    }
    repair::write(&mut m).unwrap();
    let (store, g) = (Arc::clone(&m.store), m.store.geometry());
    for group in m.domains[0].groups.keys() {
        // a copy of a node table block, which does not count, and all that is known of owners
        store.write(BlockAddr(g.node_table_addr(*group, 0).0 + 1), &[1; BLOCK_BYTES]).unwrap();
        (0..2).for_each(|i| store.write(BlockAddr(g.owners_addr(*group, 1, 0).0 + i), &[1; BLOCK_BYTES]).unwrap());
    }
    let events = repaired(&base, at_boot);
    let states = each_cut(&base, &events, |dev, cut| {
        let again = preen::preened(dev);
        assert!(!again.by_hand && again.unfixed() == 0, "{cut}: {:#?}", again.findings);
        assert_eq!(run(dev, &FORCE).findings, vec![], "{cut}");
        assert!(preen::stored(dev) == there, "files after a repair {cut}");
    });
    assert!(states > 40, "{states} states");
}

/// The same of tables that are mended before journals are replayed.
#[test]
fn the_next_boot_ends_what_comes_before_a_replay() {
    let base = preen::crashed(4);
    let devices = [Arc::clone(&base) as Arc<dyn Device>];
    let m = volume::read(&devices).unwrap();
    let g = m.store.geometry();
    for (group, _) in (0u32..).zip(&m.bat).filter(|(_, e)| e.domain.is_some()) {
        (0..2).for_each(|i| m.store.write(BlockAddr(g.owners_addr(group, 0, 1).0 + i), &[1; BLOCK_BYTES]).unwrap());
    }
    let events = repaired(&base, at_boot);
    let states = each_cut(&base, &events, |dev, cut| {
        let again = preen::preened(dev);
        assert!(!again.by_hand && again.unfixed() == 0, "{cut}: {:#?}", again.findings);
        assert_eq!((run(dev, &FORCE).findings, again.files), (vec![], 4), "{cut}");
    });
    assert!(states > 40, "{states} states");
}

/// A volume of two domains that stopped, of which both copies of the first blocks of the node tables are lost; files and directories
/// were removed whose records lie beside others'. And the names that it has.
fn without_node_tables() -> (Arc<SparseDevice>, BTreeSet<String>) {
    let dev = fresh(32, 2);
    let mounted = || {
        let options =
            MountOptions { background: false, commit_interval: Duration::from_secs(3600), ..MountOptions::default() };
        Volume::mount(vec![Arc::clone(&dev) as Arc<dyn Device>], options).unwrap()
    };
    let (root, me) = (InodeNo::ROOT, Cred::root());
    let new = |kind| NewNode { kind, mode: 0o755, umask: 0, rdev: 0, target: b"" };
    let make = |v: &Volume, name: &str, kind| v.create(root, name.as_bytes(), &new(kind), &me).unwrap().ino;
    let v = mounted();
    let dirs: Vec<InodeNo> = (0..8).map(|i| make(&v, &format!("d{i}"), FileKind::Dir)).collect();
    assert!(dirs.iter().skip(1).step_by(2).any(|d| v.domain_of(*d).unwrap() != v.domain_of(root).unwrap()));
    for i in 0..40 {
        let f = v.open(make(&v, &format!("f{i}"), FileKind::File)).unwrap();
        v.write(&f, 0, &[i as u8; 5000]).unwrap();
    }
    v.unmount().unwrap();
    let v = mounted();
    (1..40).step_by(2).for_each(|i| v.unlink(root, format!("f{i}").as_bytes()).unwrap());
    (1..8).step_by(2).for_each(|i| v.rmdir(root, format!("d{i}").as_bytes()).unwrap());
    v.unmount().unwrap();
    let v = mounted();
    make(&v, "last", FileKind::File);
    let more = ["e0", "e1"].map(|name| make(&v, name, FileKind::Dir));
    v.sync().unwrap();
    // durable by its fsync alone, in the other domain than its name, which has committed
    let other = more.into_iter().find(|d| v.domain_of(*d).unwrap() != v.domain_of(root).unwrap()).unwrap();
    let synced = v.create(other, b"synced", &new(FileKind::File), &me).unwrap().ino;
    v.write(&v.open(synced).unwrap(), 0, SYNCED).unwrap();
    v.rename(other, b"synced", root, b"synced", RenameMode::Replace).unwrap();
    v.fsync(synced, false).unwrap();
    v.commit_domain(v.domain_of(root).unwrap(), false).unwrap();
    let crashed = dev.fork();
    v.crash();
    let m = volume::read(&[Arc::clone(&crashed) as Arc<dyn Device>]).unwrap();
    for (group, _) in (0u32..).zip(&m.bat).filter(|(_, e)| e.domain.is_some()) {
        let pair = m.store.geometry().node_table_addr(group, 0).0;
        (0..2).for_each(|i| m.store.write(BlockAddr(pair + i), &[1; BLOCK_BYTES]).unwrap());
    }
    let there = (0..40).step_by(2).map(|i| format!("f{i}")).chain((0..8).step_by(2).map(|i| format!("d{i}")));
    (crashed, there.chain(["last", "e0", "e1", "synced"].map(String::from)).collect())
}

/// What a mount finds of the file that was synced.
fn synced_of(v: &Volume) -> Option<Vec<u8>> {
    let ino = v.lookup(InodeNo::ROOT, b"synced").ok()?.ino;
    let mut buf = vec![0; SYNCED.len()];
    let n = v.read(&v.open(ino).ok()?, 0, &mut buf).ok()?;
    buf.truncate(n);
    Some(buf)
}

/// The names in the root directory.
fn names_of(dev: &Arc<SparseDevice>) -> BTreeSet<String> {
    let mut m = model(dev);
    let root = m.body(InodeNo::ROOT).unwrap();
    root.entries.iter().map(|e| String::from_utf8_lossy(&e.name).into_owned()).collect()
}

/// What was removed does not come back by a check that is cut off: the next one knows what was found again, and looks at it.
#[test]
fn what_was_found_again_is_known_to_the_next_check() {
    let (base, there) = without_node_tables();
    let events = repaired(&base, by_hand);
    let whole = after(&base, &events, |_| Some(BLOCK_BYTES));
    assert_eq!((run(&whole, &FORCE).findings, names_of(&whole)), (vec![], there.clone()));
    let states = each_cut(&base, &events, |dev, cut| {
        // as the system runs it, which does not force it
        let again = run(dev, &FsckOptions { repair: true, force: false });
        assert_eq!(again.unfixed(), 0, "{cut}: {:#?}", again.findings);
        let left = run(dev, &FORCE);
        assert_eq!((left.findings, names_of(dev)), (vec![], there.clone()), "{cut}: {:#?}", again.findings);
    });
    assert!(states > 40, "{states} states");
}

/// A mount behind a check that was cut off before it replayed the journals has nothing that was synced go: it is refused, or finds
/// it. Read-only, which keeps nothing, it is not refused.
#[test]
fn a_mount_behind_a_check_that_was_cut_off_takes_nothing_back() {
    let (base, _) = without_node_tables();
    let events = repaired(&base, by_hand);
    let (refused, read) = (Cell::new(0), Cell::new(0));
    let states = each_cut(&base, &events, |dev, cut| {
        let mount = |read_only| {
            let options = MountOptions { background: false, read_only, ..MountOptions::default() };
            Volume::mount(vec![Arc::clone(dev) as Arc<dyn Device>], options)
        };
        match mount(false) {
            Ok(v) => {
                assert_eq!(synced_of(&v).as_deref(), Some(SYNCED), "{cut}: of a mount");
                // a domain that is being repaired is read-only, and says so
                let _ = v.unmount();
            }
            Err(e) if e.to_string().contains("run fsck.braidfs") => {
                refused.set(refused.get() + 1);
                if mount(true).is_ok() {
                    read.set(read.get() + 1);
                }
            }
            // a table that is lost still
            Err(e) => assert!(e.to_string().contains("corrupt"), "{cut}: {e}"),
        }
        assert_eq!(run(dev, &REPAIR).unfixed(), 0, "{cut}");
        let v = mount(false).unwrap();
        assert_eq!(synced_of(&v).as_deref(), Some(SYNCED), "{cut}: behind the next check");
    });
    let counts = (states, refused.get(), read.get());
    assert!(counts.0 > 40 && counts.1 > 0 && counts.2 > 0, "states, refused, of these readable: {counts:?}");
}

/// What a repair began in doubt is in doubt still when it is cut off.
#[test]
fn a_doubt_outlives_a_repair_that_is_cut_off() {
    let base = with_leaves(false);
    let before = base.fork();
    let mut m = model(&base);
    let n = find(&mut m, "file-7");
    let ino = m.body(n).unwrap();
    (ino.inode.content, ino.dirty.record) = (Content::Inline(vec![0xee; 50]), true);
    repair::write(&mut m).unwrap();
    // The device has lost the newest of all tables, and the header tells so.
    let (g, start) = (m.store.geometry(), m.sb.device[0].data_start.get());
    let mut block = vec![0; BLOCK_BYTES];
    for at in
        m.domains[0].groups.keys().flat_map(|n| g.group_start(*n).0..g.group_start(*n).0 + u64::from(g.meta_blocks()))
    {
        before.read(start + at, &mut block).unwrap();
        base.write(start + at, &block).unwrap();
    }
    let content = |dev: &Arc<SparseDevice>| {
        let mut m = model(dev);
        m.body(n).unwrap().inode.content == Content::Inline(vec![0xee; 50])
    };
    let events = repaired(&base, by_hand);
    assert!(content(&after(&base, &events, |_| Some(BLOCK_BYTES))), "the newest record is not found");
    each_cut(&base, &events, |dev, cut| {
        assert_eq!(run(dev, &REPAIR).unfixed(), 0, "{cut}");
        assert!(content(dev), "{cut}: the newest record is not found");
    });
}

/// A torn header costs the most where there is no journal: what changes nothing of a domain does not write its header.
#[test]
fn a_repair_leaves_the_headers_of_other_domains_alone() {
    let dev = populated();
    let headers = || {
        let m = volume::read(&[Arc::clone(&dev) as Arc<dyn Device>]).unwrap();
        let pair = |d: u16| Log::default().read_pair(&m.store, crate::rules::volume::header_place(&m.sb, d));
        (0..3).map(pair).collect::<Vec<_>>()
    };
    let mut m = model(&dev);
    let n = find(&mut m, "a/big");
    let (of, ino) = (m.domain_of(n).unwrap(), m.body(n).unwrap());
    (ino.inode.nlink, ino.dirty.record) = (9, true);
    let before = headers();
    repair::write(&mut m).unwrap();
    let between = headers();
    assert_eq!(run(&dev, &REPAIR).unfixed(), 0);
    let behind = headers();
    for d in 0..3 {
        let same = d != usize::from(of);
        assert_eq!((before[d] == between[d], between[d] == behind[d]), (same, same), "domain {d}");
    }
}

/// A volume in which a directory of thousands of names must be laid out anew; all blocks are in use but a few, and of
/// these some by a file that goes. And where that lies.
fn nearly_full(free_blocks: usize, of_what_goes: usize) -> (Arc<SparseDevice>, BTreeSet<u64>) {
    let dev = formatted(16, 1, None);
    let mut m = model(&dev);
    let names: Vec<String> = (0..3000).map(|i| format!("{i:0200}")).collect();
    let root = InodeNo::ROOT;
    let d = add(&mut m, 0, 0o040_755, &[(root, "d")], Content::InlineDir(vec![]));
    let files = ["f", "goes"].map(|name| add(&mut m, 0, 0o100_600, &[(root, name)], Content::Inline(vec![])));
    let links: Vec<(InodeNo, &str)> = names.iter().map(|n| (d, n.as_str())).collect();
    add(&mut m, 0, 0o100_600, &links, Content::None);
    repair::write(&mut m).unwrap();
    let mut m = model(&dev);
    assert_eq!(m.log.findings, vec![]);
    let (g, store) = (m.store.geometry(), Arc::clone(&m.store));
    let used = Used::of(&m.domains[0], &m.inodes);
    let mut free = Vec::new();
    for group in m.domains[0].groups.values() {
        let e = space::expected(&store, &m.domains[0], group, &used.group(&store, group.number));
        let is_free = |b: &u32| e.valid[(b / 512) as usize][(b % 512 / 64) as usize] >> (b % 64) & 1 == 0;
        free.extend((0..group.blocks).filter(is_free).map(|b| g.group_start(group.number).0 + u64::from(b)));
    }
    free.truncate(free.len() - free_blocks);
    let goes = free.split_off(free.len() - of_what_goes);
    for (file, blocks) in files.into_iter().zip([&free, &goes]).filter(|(_, blocks)| !blocks.is_empty()) {
        let ino = m.body(file).unwrap();
        ino.inode.content = Content::Extents(vec![]);
        ino.extents = Vec::new();
        for (lblk, addr) in (0u64..).zip(blocks) {
            match ino.extents.last_mut() {
                Some(e) if e.addr.0 + u64::from(e.len) == *addr => e.len += 1,
                _ => ino.extents.push(Extent { lblk, addr: BlockAddr(*addr), len: 1, unwritten: false, sums: None }),
            }
        }
        (ino.inode.blocks, ino.inode.size) = (blocks.len() as u64, blocks.len() as u64 * BLOCK_BYTES as u64);
        ino.dirty.extents = true;
    }
    repair::write(&mut m).unwrap();
    let mut m = model(&dev);
    assert_eq!(m.log.findings, vec![]);
    let bucket = m.body(d).unwrap().extents[0].addr;
    if of_what_goes > 0 {
        m.body(root).unwrap().entries.retain(|e| e.node != files[1]);
        m.body(root).unwrap().dirty.entries = true;
        let ino = m.body(files[1]).unwrap();
        (ino.inode.nlink, ino.inode.links, ino.linked, ino.dirty.links) = (0, vec![], vec![], true);
        repair::write(&mut m).unwrap();
    }
    let mut block = vec![0; BLOCK_BYTES];
    store.read(bucket, &mut block).unwrap();
    block[100] ^= 1;
    store.write(bucket, &block).unwrap();
    let start = m.sb.device[0].data_start.get();
    (dev, goes.into_iter().map(|b| start + b).collect())
}

#[test]
fn a_repair_without_room_changes_nothing() {
    for of_what_goes in [0, 20] {
        let (dev, goes) = nearly_full(8, of_what_goes);
        let before = dev.fork();
        let devices = [Arc::clone(&dev) as Arc<dyn Device>];
        let (why, found) = check(&devices, &REPAIR, &JournalReplay, &|_, _, _| {}).unwrap_err().into_parts();
        assert!(matches!(why, crate::Error::NoSpace), "{why:?}");
        assert!(found.iter().any(|f| f.code == codes::BUCKET && !f.fixed), "{found:#?}");
        let flags = |d: &Domain| d.header.unwrap().flags.get();
        assert!(
            volume::read(&devices).unwrap().domains.iter().all(|d| flags(d) & FAILED == 0),
            "a domain is marked as failed"
        );
        let (mut is, mut was) = (vec![0; BLOCK_BYTES], vec![0; BLOCK_BYTES]);
        for block in goes {
            dev.read(block, &mut is).unwrap();
            before.read(block, &mut was).unwrap();
            assert!(is == was, "block {block}, of a file that the tables have, is written over");
        }
    }
}

/// What the tables have is written over when the header says that a repair goes on, and not before.
#[test]
fn a_domain_is_marked_before_what_is_in_use_is_written_over() {
    let (dev, goes) = nearly_full(8, 400);
    let events = repaired(&dev, by_hand);
    let whole = after(&dev, &events, |_| Some(BLOCK_BYTES));
    assert_eq!(run(&whole, &FORCE).findings, vec![]);
    let m = volume::read(&[Arc::clone(&dev) as Arc<dyn Device>]).unwrap();
    let header = crate::rules::volume::header_place(&m.sb, 0);
    let writes = |to: &dyn Fn(u64) -> bool| {
        events.iter().position(|e| {
            matches!(e, Event::Write { block, data, .. }
            if (*block..).take(data.len() / BLOCK_BYTES).any(to))
        })
    };
    let (marked, over) =
        (writes(&|b| b == header || b == header + 1).unwrap(), writes(&|b| goes.contains(&b)).unwrap());
    assert!(marked < over, "the header is written as number {marked}, what is in use as number {over}");
    let between = &events[marked..over];
    assert!(between.iter().any(|e| matches!(e, Event::Flush { .. })), "no flush between");
    let names = preen::stored(&whole);
    let cuts: Vec<usize> = (over..events.len()).step_by(events.len() / 8).collect();
    for cut in cuts {
        let dev = after(&dev, &events[..=cut], |_| Some(BLOCK_BYTES));
        let again = run(&dev, &FsckOptions { repair: true, force: false });
        assert_eq!(again.unfixed(), 0, "cut off at {cut}: {:#?}", again.findings);
        assert_eq!(run(&dev, &FORCE).findings, vec![], "cut off at {cut}");
        assert!(preen::stored(&dev).len() == names.len(), "cut off at {cut}");
    }
}
