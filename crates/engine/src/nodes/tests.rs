//! The node table against a naive model, across crashes and to the last slot.

use super::*;
use crate::space::Space;
use crate::space::testdev::{TestDevice, store};
use braidfs_format::dentry::encode_bucket;
use braidfs_format::node::{NodeBlockBuilder, NodeKind, USED};
use braidfs_format::{BlockAddr, InodeNo, NodeId};
use proptest::prelude::*;
use std::collections::{BTreeMap, HashSet};

const D: DomainId = DomainId(3);
const GROUPS: [u32; 2] = [0, 2];
const NODES: u64 = 2 * 8 * 254;

fn fixture() -> (Arc<TestDevice>, Arc<Store>) {
    let (device, store) = store(2, 3, 1024);
    GROUPS.iter().for_each(|&g| Space::init_group(&store, D, g, 1, None).unwrap());
    device.crash(|| true);
    (device, store)
}

fn open_table(store: &Arc<Store>, groups: &[u32]) -> Result<NodeTable> {
    let space = Space::open(store.clone(), D, 1, &GROUPS, None, None)?;
    NodeTable::open(store.clone(), D, groups, &space)
}

fn entry(addr: u64, generation: u32) -> NodeEntry {
    NodeEntry { addr: BlockAddr(addr), index: 1, flags: USED, generation, written: 0 }
}

fn record(node: NodeId, generation: u32, payload: u8) -> NodeRecord {
    NodeRecord {
        node,
        generation,
        kind: NodeKind::Inode,
        flags: USED,
        owner: node.inode(),
        version: 1,
        payload: vec![payload; 9],
    }
}

fn used(table: &NodeTable) -> BTreeMap<NodeId, NodeEntry> {
    let mut all = BTreeMap::new();
    let mut add = |n, e| {
        all.insert(n, e);
        Ok(())
    };
    table.for_each_used(&mut add).unwrap();
    all
}

fn run_model(seed: u64, steps: usize) {
    let (device, store) = fixture();
    let open = || open_table(&store, &GROUPS).unwrap();
    let mut table = open();
    let (mut model, mut loose, mut random) = (BTreeMap::new(), Vec::new(), fastrand::Rng::with_seed(seed));
    let mut generations: BTreeMap<NodeId, u32> = BTreeMap::new();
    let mut log: Vec<Vec<Record>> = Vec::new();
    for _ in 0..steps {
        match random.usize(..100) {
            0..40 => {
                for _ in 0..random.usize(..200) {
                    let near = (random.usize(..3) == 0).then(|| NodeId(random.usize(..300) as u64));
                    let (node, generation) = table.alloc(near).unwrap().unwrap();
                    assert!(node.0 > 1 && generation == generations.get(&node).map_or(1, |g| g + 1));
                    assert!(!model.contains_key(&node) && !loose.contains(&(node, generation)));
                    loose.push((node, generation));
                }
            }
            40..50 if !loose.is_empty() => table.release(loose.swap_remove(random.usize(..loose.len())).0),
            50..90 => {
                let mut records = Vec::new();
                for (node, old) in model.clone() {
                    if random.usize(..8) == 0 {
                        let old: NodeEntry = old;
                        let gone = random.usize(..2) == 0;
                        let new = match gone {
                            true => NodeEntry { generation: old.generation, ..NodeEntry::default() },
                            false => NodeEntry { addr: BlockAddr(100 + random.usize(..900) as u64), ..old },
                        };
                        let _ = match gone {
                            true => model.remove(&node),
                            false => model.insert(node, new),
                        };
                        records.push(Record::Node { node, entry: new });
                    }
                }
                for _ in 0..random.usize(..1 + loose.len()) {
                    let (node, generation) = loose.swap_remove(random.usize(..loose.len()));
                    let new = entry(100 + random.usize(..900) as u64, generation);
                    model.insert(node, new);
                    generations.insert(node, generation);
                    records.push(Record::Node { node, entry: new });
                }
                table.apply(&records).unwrap();
                log.push(records);
            }
            90..95 => {
                device.broken.store(random.usize(..3) == 0, Relaxed);
                if table.write_home().is_ok() {
                    device.crash(|| true);
                    log.clear();
                }
                device.broken.store(false, Relaxed);
            }
            _ => {
                if random.usize(..2) == 0 {
                    table.write_home().unwrap();
                }
                let percent = random.usize(..101);
                device.crash(|| random.usize(..100) < percent);
                table = open();
                replay(&table, log.iter().flatten()).unwrap();
                loose.clear();
                table.write_home().unwrap();
                device.crash(|| true);
                log.clear();
            }
        }
        assert_eq!(used(&table), model);
        assert_eq!(table.total(), NODES - 1);
        let root = u64::from(!model.contains_key(&InodeNo::ROOT.node()));
        assert_eq!(table.free(), NODES - 1 - root - model.len() as u64 - loose.len() as u64);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, ..ProptestConfig::default() })]
    #[test]
    fn equals_the_model(seed: u64) {
        run_model(seed, 40);
    }
}

#[test]
fn every_slot_once_from_many_threads() {
    let (_, store) = fixture();
    let table = open_table(&store, &GROUPS).unwrap();
    let seen = braidfs_sync::plain::Mutex::new(HashSet::new());
    let by_four = |alloc: &(dyn Fn() -> crate::error::Result<Option<(NodeId, u32)>> + Sync)| {
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    while let Some((node, _)) = alloc().unwrap() {
                        assert!(seen.lock().insert(node));
                    }
                });
            }
        });
    };
    by_four(&|| table.alloc(None));
    let kept = table.reserve();
    assert!(kept >= 16 && seen.lock().len() as u64 == NODES - 2 - kept, "{kept}");
    assert_eq!((table.free(), table.free_for_inodes(), table.is_short(|| 0)), (kept, 0, false));
    // also where so many may be asked for
    assert!(table.is_short(|| kept / 10) && !table.is_short(|| kept / 100));
    by_four(&|| table.alloc_overflow(NodeId(300)));
    assert_eq!((seen.lock().len() as u64, table.free(), table.is_short(|| 0)), (NODES - 2, 0, true));
    table.release(NodeId(77));
    assert_eq!(table.free(), 1);
    assert_eq!(table.alloc(None).unwrap().unwrap(), (NodeId(77), 1));
}

#[test]
fn counts_without_having_read() {
    let (_, store) = fixture();
    let table = open_table(&store, &GROUPS).unwrap();
    table.take(NodeId(500)).unwrap();
    table.take(NodeId(500)).unwrap();
    assert_eq!((table.free(), table.total()), (NODES - 3, NODES - 1));
    assert_eq!(table.resident.count(), 1);
}

#[test]
fn records_are_read_and_checked() {
    let (_, store) = fixture();
    let table = open_table(&store, &GROUPS).unwrap();
    let (node, generation) = table.alloc(None).unwrap().unwrap();
    let record = |node, payload| record(node, generation, payload);
    let write = |payload| {
        let mut builder = NodeBlockBuilder::default();
        builder.push(&record(NodeId(999), 0).encode()).unwrap();
        builder.push(&record(node, payload).encode()).unwrap();
        store.write(BlockAddr(600), &builder.finish(D.0, store.volume, BlockAddr(600), 1)).unwrap();
    };
    write(1);
    let e = entry(600, generation);
    assert!(matches!(table.load(node, &table.get(node).unwrap()), Err(Error::NotFound)));
    table.apply(&[Record::Node { node, entry: e }]).unwrap();
    assert_eq!(table.get(node).unwrap(), e);
    assert_eq!(table.load(node, &e).unwrap(), record(node, 1));
    write(2);
    assert_eq!(table.load(node, &e).unwrap(), record(node, 1));
    table.invalidate(BlockAddr(600));
    assert_eq!(table.load(node, &e).unwrap(), record(node, 2));
    assert_eq!(table.load(node, &NodeEntry { written: 1, ..e }).unwrap(), record(node, 2));
    for wrong in [
        NodeEntry { index: 0, ..e },
        NodeEntry { index: 2, ..e },
        entry(601, generation),
        entry(600, generation + 1),
        // the block is older, and newer
        NodeEntry { written: 2, ..e },
        NodeEntry { written: u32::MAX, ..e },
    ] {
        assert!(matches!(table.load(node, &wrong), Err(Error::Corrupt(_))), "{wrong:?}");
    }
    for i in 0..2000 {
        let _ = table.load(node, &entry(i, generation));
        assert!(table.load(node, &e).is_ok());
    }
}

#[test]
fn neighbours_of_a_missed_record_are_read_with_it() {
    let (device, store) = fixture();
    let table = open_table(&store, &GROUPS).unwrap();
    let (node, generation) = table.alloc(None).unwrap().unwrap();
    let record = |payload| record(node, generation, payload);
    let write = |addr: u64, payload| {
        let mut builder = NodeBlockBuilder::default();
        builder.push(&record(payload).encode()).unwrap();
        store.write(BlockAddr(addr), &builder.finish(D.0, store.volume, BlockAddr(addr), 1)).unwrap();
    };
    let load = |addr| table.load(node, &NodeEntry { index: 0, ..entry(addr, generation) });
    let reads = || device.reads.load(Relaxed);
    // the one at 652 is no node block: nothing was written there
    (600..700).filter(|&a| a != 652).for_each(|a| write(a, a as u8));

    let before = reads();
    for addr in (600..700).rev().filter(|&a| a != 652) {
        assert_eq!(load(addr).unwrap(), record(addr as u8));
    }
    // the first miss of each 64 blocks reads one block, the others runs of 16 that lie at multiples of 16
    assert_eq!(reads() - before, 2 + 7);
    // as of a block that cannot be read with others: once in its run, once by itself
    let before = reads();
    assert!(matches!(load(652), Err(Error::Corrupt(_))));
    assert_eq!(reads() - before, 2);

    // what was read ahead is read anew once it was written
    write(610, 1);
    assert_eq!(load(610).unwrap(), record(610u64 as u8));
    table.invalidate(BlockAddr(610));
    assert_eq!(load(610).unwrap(), record(1));
}

#[test]
fn buckets_among_them_are_read_with_them() {
    let (device, store) = fixture();
    let table = open_table(&store, &GROUPS).unwrap();
    let (node, generation) = table.alloc(None).unwrap().unwrap();
    let bucket = |addr: u64, seq| encode_bucket(&[], node.inode(), addr << 20, D.0, store.volume, BlockAddr(addr), seq);
    for addr in 600..640 {
        let mut builder = NodeBlockBuilder::default();
        builder.push(&record(node, generation, 1).encode()).unwrap();
        let nodes = builder.finish(D.0, store.volume, BlockAddr(addr), 1);
        store.write(BlockAddr(addr), &if addr % 2 == 0 { nodes } else { bucket(addr, 1) }).unwrap();
    }
    let load = |addr| table.load(node, &NodeEntry { index: 0, ..entry(addr, generation) });
    let reads = || device.reads.load(Relaxed);
    let before = reads();
    for addr in (600..640).step_by(2) {
        assert!(load(addr).is_ok());
        assert_eq!(table.bucket(BlockAddr(addr + 1)).unwrap()[..], bucket(addr + 1, 1), "{addr}");
    }
    assert_eq!(reads() - before, 1 + 3, "a miss by itself, and three runs");
    // neither is taken for the other, and both stay
    assert!(matches!(table.bucket(BlockAddr(602)), Err(Error::Corrupt(_))));
    assert!(matches!(load(603), Err(Error::Corrupt(_))));
    let before = reads();
    assert!(load(602).is_ok() && table.bucket(BlockAddr(603)).is_ok());
    assert_eq!(reads(), before);
    store.write(BlockAddr(603), &bucket(603, 2)).unwrap();
    table.invalidate(BlockAddr(603));
    assert_eq!(table.bucket(BlockAddr(603)).unwrap()[..], bucket(603, 2));
}

/// More blocks than the cache takes: the newest stay.
#[test]
fn what_was_used_least_lately_is_read_again() {
    let (device, store) = store(4, 3, 2040);
    GROUPS.iter().for_each(|&g| Space::init_group(&store, D, g, 1, None).unwrap());
    let table = open_table(&store, &GROUPS).unwrap();
    let all = || (300..2000u64).chain(2340..4040);
    for addr in all() {
        let block = encode_bucket(&[], InodeNo(9), 0, D.0, store.volume, BlockAddr(addr), 1);
        store.write(BlockAddr(addr), &block).unwrap();
    }
    let reads_of = |blocks: &mut dyn Iterator<Item = u64>| {
        let before = device.reads.load(Relaxed);
        blocks.for_each(|a| assert!(table.bucket(BlockAddr(a)).is_ok()));
        device.reads.load(Relaxed) - before
    };
    assert!(reads_of(&mut all()) > 3400 / 16);
    assert_eq!(reads_of(&mut (3300..4040)), 0, "the newest");
    assert!(reads_of(&mut (300..400)) > 0, "not the oldest");
    assert!(reads_of(&mut all()) > 3400 / 16 / 2);
}

#[test]
fn a_miss_by_itself_reads_one_block() {
    let (device, store) = store(4, 3, 2040);
    GROUPS.iter().for_each(|&g| Space::init_group(&store, D, g, 1, None).unwrap());
    let table = open_table(&store, &GROUPS).unwrap();
    let (node, generation) = table.alloc(None).unwrap().unwrap();
    let reads_of = |addr| {
        let before = device.reads.load(Relaxed);
        assert!(matches!(table.load(node, &entry(addr, generation)), Err(Error::Corrupt(_))));
        device.reads.load(Relaxed) - before
    };
    (0..6).for_each(|region| assert_eq!(reads_of(region * 1024 + 500), 1));
    // near another miss, but its run would end behind the volume
    assert_eq!((reads_of(6134), reads_of(6135)), (1, 1));
}

/// As recovery does it.
fn replay<'r>(table: &NodeTable, records: impl IntoIterator<Item = &'r Record>) -> crate::error::Result<()> {
    let mut newest = table.newest();
    for r in records {
        if let Record::Node { node, entry } = r {
            newest.set(*node, *entry)?;
        }
    }
    newest.bring_home()
}

#[test]
fn a_replay_reads_tables_in_runs_and_leaves_the_newest_entry() {
    let (device, store) = fixture();
    let table = open_table(&store, &GROUPS).unwrap();
    let before = device.reads.load(Relaxed);
    let in_block = |g: u32, b: u64| [2, 77, 253].map(|slot| NodeId(u64::from(g) * NODES / 2 + b * 254 + slot));
    let nodes: Vec<NodeId> = GROUPS.iter().flat_map(|g| (0..8).flat_map(|b| in_block(*g, b))).collect();
    let mut newest = table.newest();
    for generation in 1..=3 {
        for n in &nodes {
            newest.set(*n, entry(100 + u64::from(generation), generation)).unwrap();
        }
    }
    newest.bring_home().unwrap();
    assert_eq!(device.reads.load(Relaxed) - before, 2, "one of each group");
    assert_eq!(used(&table), nodes.iter().map(|n| (*n, entry(103, 3))).collect());
    assert_eq!(table.free(), NODES - 2 - nodes.len() as u64);
}

#[test]
fn foreign_nodes_are_corrupt() {
    let (_, store) = fixture();
    let table = open_table(&store, &GROUPS).unwrap();
    for node in [0, NODES / 2, NODES / 2 * 3, u64::MAX] {
        assert!(matches!(table.get(NodeId(node)), Err(Error::Corrupt(_))));
        let record = Record::Node { node: NodeId(node), entry: entry(100, 1) };
        assert!(matches!(replay(&table, &[record]), Err(Error::Corrupt(_))));
        assert!(matches!(table.take(NodeId(node)), Err(Error::Corrupt(_))));
    }
    for bad in [entry(1024, 1), entry(1 << 47, 1), NodeEntry { index: 64, ..entry(100, 1) }] {
        assert!(matches!(replay(&table, &[Record::Node { node: NodeId(9), entry: bad }]), Err(Error::Corrupt(_))));
    }
    assert!(matches!(open_table(&store, &[3]), Err(Error::Corrupt(_))));
    assert_eq!(table.free(), NODES - 2);
}

#[test]
fn entries_are_evicted() {
    let (device, store) = fixture();
    let mut table = open_table(&store, &GROUPS).unwrap();
    table.resident = Line(Residency::new(2));
    let nodes: Vec<_> = (0..2000).map(|_| table.alloc(None).unwrap().unwrap()).collect();
    let records: Vec<_> =
        nodes.iter().map(|&(node, generation)| Record::Node { node, entry: entry(300, generation) }).collect();
    table.apply(&records).unwrap();
    assert!(table.resident.count() >= 8);
    table.write_home().unwrap();
    device.crash(|| true);
    table.resident.swept();
    (0..40).for_each(|_| drop(used(&table)));
    assert!(table.resident.count() <= 12, "{}", table.resident.count());
    assert_eq!(used(&table).len(), 2000);
}

/// Slots of a group that is about to leave are promised to nobody, and it does not leave where they are needed.
#[test]
fn a_closed_group_has_no_slots() {
    let (_device, store) = fixture();
    let table = open_table(&store, &GROUPS).unwrap();
    let of = |node: NodeId| store.geometry().node_place(node).unwrap().0;
    let counts = || (table.total(), table.free());
    let all = counts();
    assert!(table.can_spare(1) && !table.can_spare(2));
    assert_eq!(table.close_group(2, || 0), Closing::Done);
    assert_eq!(counts(), (NODES / 2 - 1, NODES / 2 - 2));
    assert_eq!(table.close_group(2, || 0), Closing::Done);
    assert_eq!(counts(), (NODES / 2 - 1, NODES / 2 - 2));
    while let Some((node, _)) = table.alloc(None).unwrap() {
        assert_eq!(of(node), 0);
    }
    let reserve = table.reserve();
    assert_eq!((table.free(), table.is_short(|| 0)), (reserve, false));
    table.reopen_group(2);
    assert_eq!((table.total(), table.free(), table.reserve()), (all.0, NODES / 2 + reserve, 2 * reserve));
    // so many may be needed by what has changed
    assert_eq!(table.close_group(2, || reserve), Closing::Needed);
    assert!(table.is_empty(2) && table.free() == NODES / 2 + reserve);
    assert_eq!(table.close_group(2, || 0), Closing::Done);
    // and so many of the reserve are gone
    let taken: Vec<_> = (0..reserve / 2).map(|_| table.alloc_overflow(NodeId(300)).unwrap().unwrap().0).collect();
    assert!(taken.iter().all(|node| of(*node) == 0) && table.is_short(|| 0));
    table.reopen_group(2);
    assert!(!table.can_spare(1));
    assert_eq!(table.close_group(2, || 0), Closing::Needed);
    let (node, _) = table.alloc_overflow(NodeId(300)).unwrap().unwrap();
    assert_eq!((of(node), table.close_group(2, || 0)), (2, Closing::InUse));
}

/// Of a group that is to leave and gives no numbers out either, the slots are missing once.
#[test]
fn a_closed_group_that_gives_no_numbers_counts_once() {
    let (_device, store) = fixture();
    let table = open_table(&store, &GROUPS).unwrap();
    table.keep_group(2, true);
    let kept = (table.kept_free(), table.free_for_inodes());
    assert_eq!(kept, (NODES / 2, NODES / 2 - 2 - table.reserve()));
    assert_eq!(table.close_group(2, || 0), Closing::Done);
    assert_eq!((table.kept_free(), table.free_for_inodes()), (0, NODES / 2 - 2 - table.reserve()));
    table.reopen_group(2);
    assert_eq!((table.kept_free(), table.free_for_inodes()), kept);
}

/// A thread whose cursor is in a group that has left looks for a slot elsewhere, and reads nothing of that group.
#[test]
fn a_cursor_in_a_group_that_left() {
    let (_device, store) = fixture();
    let table = open_table(&store, &GROUPS).unwrap();
    let (node, _) = table.alloc(Some(store.geometry().node(2, 5))).unwrap().unwrap();
    assert_eq!(store.geometry().node_place(node).unwrap().0, 2);
    table.release(node);
    assert_eq!(table.close_group(2, || 0), Closing::Done);
    table.drop_group(2);
    let resident = table.resident.count();
    // another domain makes it its own, and is writing this block
    store.write(store.geometry().node_table_addr(2, 0), &[0; 2 * braidfs_format::BLOCK_BYTES]).unwrap();
    let (node, _) = table.alloc(None).unwrap().unwrap();
    assert_eq!(store.geometry().node_place(node).unwrap().0, 0);
    assert_eq!(table.resident.count(), resident + 1);
}

/// What a mount gave out, and no commit wrote, the next one gives out as another inode.
#[test]
fn numbers_after_a_crash_are_of_other_inodes() {
    let (_device, store) = fixture();
    let mut seen = HashSet::new();
    for mounts in 0..5 {
        let mut table = open_table(&store, &GROUPS).unwrap();
        table.set_mounts(mounts);
        assert!(seen.insert(table.alloc(None).unwrap()), "mount {mounts}");
    }
}
