//! Repairs that are cut off: killed, or by a loss of power, which tears what was not flushed.

use super::*;
use braidfs_device::{Event, MemDevice, RecordDevice};
use braidfs_format::domain::FAILED;
use braidfs_format::geometry::NODES_PER_BLOCK;

/// Bytes that a device writes at once, or not at all.
const SECTOR_BYTES: usize = 512;

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

/// What a repair of it does.
fn repaired(base: &Arc<SparseDevice>) -> Vec<Event> {
    let image = MemDevice::new(base.blocks());
    let mut block = vec![0; BLOCK_BYTES];
    for b in base.written() {
        base.read(b, &mut block).unwrap();
        image.write(b, &block).unwrap();
    }
    let recorder = Arc::new(RecordDevice::new(image.snapshot()));
    check(&[recorder.clone() as Arc<dyn Device>], &REPAIR, &JournalReplay, &|_, _, _| {}).unwrap();
    recorder.log()
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
    let events = repaired(&base);
    let whole = after(&base, &events, |_| Some(BLOCK_BYTES));
    let kept = extents(&whole);
    assert!((700..1000).contains(&kept), "{kept} extents are left");
    assert_eq!(run(&whole, &FORCE).findings, vec![]);
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
            let dev = after(&base, &events[..=at], cut);
            let again = run(&dev, &REPAIR);
            assert_eq!(again.unfixed(), 0, "cut off at {at}, {how}: {:#?}", again.findings);
            let lost = [codes::BAT_LOST, codes::DOMAIN_LOST, codes::NODES_LOST];
            assert!(!again.findings.iter().any(|f| lost.contains(&f.code)), "{at}, {how}: {:#?}", again.findings);
            assert_eq!(extents(&dev), kept, "extents after a repair cut off at {at}, {how}");
            assert_eq!(run(&dev, &FORCE).findings, vec![], "cut off at {at}, {how}");
            states += 1;
        }
    }
    assert!(states > 40, "{states} states");
}

#[test]
fn a_repair_that_is_cut_off_keeps_what_it_can() {
    keeps_what_it_can(false);
    keeps_what_it_can(true);
}

#[test]
fn a_repair_without_room_changes_nothing() {
    let dev = formatted(16, 1, None);
    let mut m = model(&dev);
    let names: Vec<String> = (0..3000).map(|i| format!("{i:0200}")).collect();
    let d = add(&mut m, 0, 0o040_755, &[(InodeNo::ROOT, "d")], Content::InlineDir(vec![]));
    let f = add(&mut m, 0, 0o100_600, &[(InodeNo::ROOT, "f")], Content::Inline(vec![]));
    let links: Vec<(InodeNo, &str)> = names.iter().map(|n| (d, n.as_str())).collect();
    add(&mut m, 0, 0o100_600, &links, Content::None);
    repair::write(&mut m).unwrap();
    let mut m = model(&dev);
    assert_eq!(m.log.findings, vec![]);
    // all that is free but a few blocks is the file's
    let (g, store) = (m.store.geometry(), Arc::clone(&m.store));
    let used = Used::of(&m.domains[0], &m.inodes);
    let mut free = Vec::new();
    for group in m.domains[0].groups.values() {
        let e = space::expected(&store, &m.domains[0], group, &used.group(&store, group.number));
        let is_free = |b: &u32| e.valid[(b / 512) as usize][(b % 512 / 64) as usize] >> (b % 64) & 1 == 0;
        free.extend((0..group.blocks).filter(is_free).map(|b| g.group_start(group.number).0 + u64::from(b)));
    }
    free.truncate(free.len() - 8);
    let ino = m.body(f).unwrap();
    ino.inode.content = Content::Extents(vec![]);
    ino.extents = Vec::new();
    for (lblk, addr) in (0u64..).zip(&free) {
        match ino.extents.last_mut() {
            Some(e) if e.addr.0 + u64::from(e.len) == *addr => e.len += 1,
            _ => ino.extents.push(Extent { lblk, addr: BlockAddr(*addr), len: 1, unwritten: false, sums: None }),
        }
    }
    (ino.inode.blocks, ino.inode.size) = (free.len() as u64, free.len() as u64 * BLOCK_BYTES as u64);
    ino.dirty.extents = true;
    repair::write(&mut m).unwrap();
    let mut m = model(&dev);
    assert_eq!(m.log.findings, vec![]);
    let bucket = m.body(d).unwrap().extents[0].addr;
    let mut block = vec![0; BLOCK_BYTES];
    store.read(bucket, &mut block).unwrap();
    block[100] ^= 1;
    store.write(bucket, &block).unwrap();
    let devices = [Arc::clone(&dev) as Arc<dyn Device>];
    let refused = check(&devices, &REPAIR, &JournalReplay, &|_, _, _| {});
    assert!(matches!(refused, Err(crate::Error::NoSpace)), "{refused:?}");
    let flags = |d: &Domain| d.header.unwrap().flags.get();
    assert!(
        volume::read(&devices).unwrap().domains.iter().all(|d| flags(d) & FAILED == 0),
        "a domain is marked as failed"
    );
}
