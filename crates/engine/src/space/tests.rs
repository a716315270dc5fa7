//! The allocator against a naive model, across crashes and to the last block.

use super::cleaning::Choice;
use super::testdev::{TestDevice, store};
use super::*;
use crate::Error;
use braidfs_format::geometry::SEGMENT_BLOCKS;
use braidfs_format::group::SegmentEntry;
use braidfs_format::group::{SegmentKind, Temperature};
use braidfs_format::journal::Record;
use braidfs_format::{InodeNo, TxId};
use proptest::prelude::*;
use std::collections::{BTreeMap, HashSet};

const D: DomainId = DomainId(3);
const DATA: Class = Class { kind: SegmentKind::Data, temperature: Temperature::Warm };
const COLD: Class = Class { kind: SegmentKind::Data, temperature: Temperature::Cold };
const NODE: Class = Class { kind: SegmentKind::Node, temperature: Temperature::Hot };
const CLASSES: [Class; 3] = [DATA, COLD, NODE];

fn alloc_record(run: Run, class: Class, owner: u64, lblk: u64) -> Record {
    let Class { kind, temperature } = class;
    Record::Alloc { addr: run.addr, len: run.len, kind, temperature, owner: InodeNo(owner), lblk }
}
fn blocks(run: Run) -> impl Iterator<Item = u64> {
    run.addr.0..run.addr.0 + u64::from(run.len)
}

/// Groups 0 (with a journal of 300 blocks) and 2 (short) of a volume belong to the domain.
fn fixture() -> (Arc<TestDevice>, Arc<Store>, Option<Run>) {
    let (device, store) = store(2, 3, 700);
    let journal = Run { addr: BlockAddr(28), len: 300 };
    Space::init_group(&store, D, 0, 1, Some((28, 300))).unwrap();
    Space::init_group(&store, D, 2, 1, None).unwrap();
    device.flush_all();
    (device, store, Some(journal))
}
impl TestDevice {
    fn flush_all(&self) {
        self.crash(|| true);
    }
}
const USABLE: u64 = 1024 - 28 - 300 + 700 - 28;

/// The committed view.
fn committed(space: &Space) -> (Vec<SegmentEntry>, Vec<Owner>) {
    let (mut entries, mut owners) = (Vec::new(), Vec::new());
    for group in space.groups.read().values() {
        for (i, s) in group.segments.iter().enumerate() {
            entries.push(s.state.lock().entry);
            owners.extend((0..SEGMENT_BLOCKS).map(|b| group.owner(&space.store, &space.owners, i as u32, b).unwrap()));
        }
    }
    (entries, owners)
}

#[derive(Debug, Default)]
struct Model {
    used: HashSet<u64>,
    committed: BTreeMap<u64, Owner>,
    /// Allocated, in no record yet.
    loose: Vec<(Run, Class)>,
}

fn check(space: &Space, model: &Model) {
    let stats = space.stats();
    assert_eq!(stats.blocks, USABLE);
    assert_eq!(stats.free, USABLE - model.used.len() as u64);
    assert_eq!(stats.reserved, 0);
    for (addr, owner) in &model.committed {
        assert_eq!(space.owner(BlockAddr(*addr)).unwrap(), *owner, "block {addr}");
    }
}

fn run_model(seed: u64, steps: usize) {
    let (device, store, journal) = fixture();
    let open = |last| Space::open(store.clone(), D, 3, &[0, 2], journal, Some(last)).unwrap();
    // what the domain header would say
    let mut last = Checkpointed { checkpoint: 0, sum: 0 };
    let mut space = open(last);
    let (mut model, mut random, mut tx) = (Model::default(), fastrand::Rng::with_seed(seed), 1);
    let mut log: Vec<(TxId, Vec<Record>)> = Vec::new();
    for _ in 0..steps {
        match random.usize(..100) {
            0..50 => {
                let class = CLASSES[random.usize(..3)];
                let most = if random.usize(..4) == 0 { 200 } else { 9 };
                let want = 1 + random.usize(..most) as u32;
                if space.reserve(u64::from(want), true).is_err() {
                    assert!(space.stats().free < u64::from(want));
                    continue;
                }
                let near = model.loose.last().map(|(r, _)| BlockAddr(r.addr.0 + u64::from(r.len)));
                let run = space.alloc(random.usize(..4), class, want, near).unwrap();
                assert!((1..=want).contains(&run.len));
                space.unreserve(u64::from(want - run.len));
                for b in blocks(run) {
                    assert!(model.used.insert(b), "block {b} twice");
                    let (group, segment, block) = store.geometry().split(BlockAddr(b));
                    let group = space.groups.read()[&group].clone();
                    assert!(!bitmap::get(&group.segments[segment as usize].fixed, block));
                }
                model.loose.push((run, class));
            }
            50..58 if !model.loose.is_empty() => {
                let (run, _) = model.loose.swap_remove(random.usize(..model.loose.len()));
                blocks(run).for_each(|b| assert!(model.used.remove(&b)));
                space.unalloc(run);
            }
            58..90 => {
                let mut records = Vec::new();
                for _ in 0..random.usize(..1 + model.loose.len()) {
                    let (run, class) = model.loose.swap_remove(random.usize(..model.loose.len()));
                    if class == NODE {
                        records.push(alloc_record(run, class, 0, 0));
                        for b in blocks(run) {
                            let live = 1 + random.usize(..60) as u8;
                            // Before or after the allocation: the streams of a transaction are not ordered.
                            let at = if random.usize(..2) == 0 { records.len() } else { 0 };
                            records.insert(at, Record::Live { addr: BlockAddr(b), live });
                            model.committed.insert(b, Owner { live, ..Owner::default() });
                        }
                    } else {
                        let (owner, lblk) = (2 + random.usize(..90) as u64, random.usize(..1 << 40) as u64);
                        records.push(alloc_record(run, class, owner, lblk));
                        for (i, b) in blocks(run).enumerate() {
                            let owner = Owner { node: InodeNo(owner), lblk: lblk + i as u64, ..Owner::default() };
                            model.committed.insert(b, owner);
                        }
                    }
                }
                // What this transaction made valid is not freed by it.
                let made: HashSet<u64> = records
                    .iter()
                    .flat_map(|r| match *r {
                        Record::Alloc { addr, len, .. } => blocks(Run { addr, len }).collect::<Vec<_>>(),
                        _ => Vec::new(),
                    })
                    .collect();
                let old: Vec<u64> = model.committed.keys().copied().filter(|b| !made.contains(b)).collect();
                let percent = random.usize(..101);
                for b in old {
                    if random.usize(..100) < percent {
                        let node = model.committed.remove(&b).unwrap().node.0 == 0;
                        assert!(model.used.remove(&b));
                        space.pending_free(1);
                        records.push(match node {
                            true => Record::Live { addr: BlockAddr(b), live: 0 },
                            false => Record::Free { addr: BlockAddr(b), len: 1 },
                        });
                    }
                }
                space.apply(&records, TxId(tx)).unwrap();
                assert_eq!(space.stats().pending, 0);
                log.push((TxId(tx), records));
                tx += 1;
            }
            90..94 => {
                device.broken.store(random.usize(..3) == 0, Relaxed);
                if space.write_home(last.checkpoint + 1).is_ok() {
                    device.flush_all();
                    log.clear();
                    last = Checkpointed { checkpoint: last.checkpoint + 1, sum: space.table_sum() };
                    assert_eq!(space.write_home(last.checkpoint + 1).unwrap(), 0);
                }
                device.broken.store(false, Relaxed);
            }
            94..98 => {
                let before = committed(&space);
                if random.usize(..2) == 0 {
                    space.write_home(last.checkpoint + 1).unwrap();
                }
                let percent = random.usize(..101);
                device.crash(|| random.usize(..100) < percent);
                space = open(last);
                assert_eq!(space.doubt(last.sum), None, "a crash costs no segment table of an earlier checkpoint");
                replay(&space, &log).unwrap();
                assert_eq!(committed(&space), before);
                space.write_home(last.checkpoint + 1).unwrap();
                device.flush_all();
                last = Checkpointed { checkpoint: last.checkpoint + 1, sum: space.table_sum() };
                log.clear();
                let loose = std::mem::take(&mut model.loose);
                loose.iter().flat_map(|(r, _)| blocks(*r)).for_each(|b| assert!(model.used.remove(&b)));
            }
            _ => {
                let Some(victim) = space.victim(TxId(tx), &HashSet::new(), Choice::ANY).unwrap() else { continue };
                for (addr, owner) in &victim.blocks {
                    assert_eq!(model.committed[&addr.0], *owner);
                }
                let in_segment = |b: &u64| {
                    let (group, segment, _) = store.geometry().split(BlockAddr(*b));
                    (group, segment) == (victim.group, victim.segment)
                };
                assert_eq!(victim.blocks.len(), model.committed.keys().filter(|b| in_segment(b)).count());
                let skip = HashSet::from([(victim.group, victim.segment)]);
                assert!(
                    space
                        .victim(TxId(tx), &skip, Choice::ANY)
                        .unwrap()
                        .is_none_or(|v| !skip.contains(&(v.group, v.segment)))
                );
            }
        }
        check(&space, &model);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn equals_the_model(seed: u64) {
        run_model(seed, 150);
    }
}

#[test]
fn allocates_to_the_last_block() {
    for want in [1, 7, 64, 512] {
        let (_, store, journal) = fixture();
        let space = Space::open(store, D, 4, &[0, 2], journal, None).unwrap();
        assert_eq!(space.stats().blocks, USABLE);
        assert!(matches!(space.reserve(USABLE - 31, false), Err(Error::NoSpace)));
        space.reserve(USABLE - 32, false).unwrap();
        assert!(matches!(space.reserve(25, true), Err(Error::NoSpace)));
        space.reserve(24, true).unwrap();
        assert!(matches!(space.reserve(1, true), Err(Error::NoSpace)));
        assert!(matches!(space.reserve_for_commit(9), Err(Error::NoSpace)));
        space.reserve_for_commit(8).unwrap();
        assert_eq!((space.stats().reserved, space.stats().hidden), (USABLE, 32));
        let (mut seen, mut i) = (HashSet::new(), 0);
        while (seen.len() as u64) < USABLE {
            let run = space.alloc(i, CLASSES[i / 3 % 3], want, None).unwrap();
            assert!(blocks(run).all(|b| seen.insert(b)));
            i += 1;
        }
        assert!(matches!(space.alloc(0, DATA, 1, None), Err(Error::NoSpace)));
        assert_eq!((space.stats().free, space.stats().reserved, space.stats().free_segments), (0, 0, 0));
    }
}

#[test]
fn threads_share_a_full_domain() {
    let (_, store, journal) = fixture();
    let space = Space::open(store, D, 4, &[0, 2], journal, None).unwrap();
    std::thread::scope(|scope| {
        for t in 0..4 {
            let space = &space;
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(t as u64 + 9);
                let mut mine: Vec<Run> = Vec::new();
                for _ in 0..3000 {
                    let want = 1 + random.usize(..40) as u32;
                    if space.reserve(u64::from(want), true).is_ok() {
                        let run = space.alloc(t, CLASSES[random.usize(..3)], want, None).unwrap();
                        space.unreserve(u64::from(want - run.len));
                        mine.push(run);
                    } else if !mine.is_empty() {
                        space.unalloc(mine.swap_remove(random.usize(..mine.len())));
                    }
                }
                mine.into_iter().for_each(|run| space.unalloc(run));
            });
        }
    });
    assert_eq!((space.stats().free, space.stats().reserved), (USABLE, 0));
}

/// Who has reserved a block finds one, also while others look whether the group in which it is can be emptied, and find that it
/// cannot.
#[test]
fn a_group_that_cannot_be_emptied_keeps_its_blocks_for_who_reserved_them() {
    let (_, store, journal) = fixture();
    let space = Space::open(store, D, 4, &[0, 2], journal, None).unwrap();
    // all that is left lies in the last group
    let in_first = u64::from(space.groups.read()[&0].free());
    let (mut left, mut other) = (in_first, Vec::new());
    space.reserve(in_first, true).unwrap();
    while left > 0 {
        let run = space.alloc(0, DATA, left as u32, None).unwrap();
        if space.store.geometry().group_of(run.addr) == 0 {
            left -= u64::from(run.len);
        } else {
            space.reserve(u64::from(run.len), true).unwrap();
            other.push(run);
        }
    }
    other.into_iter().for_each(|run| space.unalloc(run));
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !done.load(Relaxed) {
                    assert!(space.keep_out(2).is_none());
                }
            });
        }
        let takers: Vec<_> = (0..4)
            .map(|t| {
                let space = &space;
                scope.spawn(move || {
                    for n in 0..5000 {
                        space.reserve(1, true).unwrap();
                        match space.alloc(t, DATA, 1, None) {
                            Ok(run) => space.unalloc(run),
                            Err(e) => return Err(format!("block {n} of thread {t}: {e}")),
                        }
                    }
                    Ok(())
                })
            })
            .collect();
        let took: Result<Vec<()>, String> = takers.into_iter().map(|t| t.join().unwrap()).collect();
        done.store(true, Relaxed);
        took.unwrap();
    });
}

#[test]
fn checkpoints_beside_commits() {
    let (device, store, journal) = fixture();
    let space = Space::open(store.clone(), D, 2, &[0, 2], journal, None).unwrap();
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Relaxed) {
                space.write_home(0).unwrap();
                device.flush_all();
            }
        });
        let (mut random, mut mine) = (fastrand::Rng::with_seed(5), Vec::new());
        for tx in 1..3000 {
            let want = 1 + random.usize(..20) as u32;
            let record = if space.reserve(u64::from(want), true).is_ok() {
                let run = space.alloc(tx as usize, DATA, want, None).unwrap();
                space.unreserve(u64::from(want - run.len));
                mine.push(run);
                alloc_record(run, DATA, tx, 0)
            } else {
                let run = mine.swap_remove(random.usize(..mine.len()));
                Record::Free { addr: run.addr, len: run.len }
            };
            space.apply(&[record], TxId(tx)).unwrap();
        }
        done.store(true, Relaxed);
    });
    space.write_home(0).unwrap();
    let again = Space::open(store, D, 2, &[0, 2], journal, None).unwrap();
    assert_eq!(committed(&again), committed(&space));
    assert_eq!((again.stats().free, again.stats().reserved), (space.stats().free, 0));
}

#[test]
fn long_runs_and_separate_logs() {
    let (_, store) = store(32, 2, 32 * 512);
    for g in 0..2 {
        Space::init_group(&store, D, g, 1, None).unwrap();
    }
    let space = Space::open(store.clone(), D, 2, &[0, 1], None, None).unwrap();
    assert_eq!(space.stats().free_segments, 64);
    space.reserve(10_000, false).unwrap();
    let a = space.alloc(0, DATA, 100, None).unwrap();
    let b = space.alloc(1, DATA, 100, None).unwrap();
    let n = space.alloc(0, NODE, 1, None).unwrap();
    let a2 = space.alloc(0, DATA, 500, Some(BlockAddr(a.addr.0 + 100))).unwrap();
    assert_eq!((a.len, b.len, a2.len, a2.addr.0), (100, 100, 412, a.addr.0 + 100));
    let place = |r: Run| store.geometry().split(r.addr).1;
    assert!(place(a) != place(b) && place(n) == 0);
    // A segment with only short holes is left for a free one.
    (0..10).for_each(|i| space.unalloc(Run { addr: BlockAddr(a.addr.0 + 20 * i), len: 10 }));
    assert_eq!(space.alloc(0, DATA, 64, None).unwrap().len, 64);
    assert_eq!(space.stats().free_segments, 60);
}

#[test]
fn reuse_only_after_apply() {
    let (_, store, journal) = fixture();
    let space = Space::open(store, D, 1, &[0, 2], journal, None).unwrap();
    space.reserve(8, false).unwrap();
    let run = space.alloc(0, DATA, 8, None).unwrap();
    space.apply(&[alloc_record(run, DATA, 9, 100)], TxId(1)).unwrap();
    assert_eq!(space.owner(BlockAddr(run.addr.0 + 3)).unwrap().lblk, 103);
    space.pending_free(8);
    assert_eq!((space.stats().free, space.stats().pending), (USABLE - 8, 8));
    space.apply(&[Record::Free { addr: run.addr, len: 8 }], TxId(2)).unwrap();
    assert_eq!((space.stats().free, space.stats().pending), (USABLE, 0));
    assert_eq!(space.owner(run.addr).unwrap(), Owner::default());
}

/// As recovery does it.
fn replay(space: &Space, log: &[(TxId, Vec<Record>)]) -> Result<()> {
    let mut replaying = space.replaying();
    let all = log.iter().flat_map(|(tx, records)| records.iter().filter_map(Record::table).map(|r| (*tx, r)));
    all.into_iter().try_for_each(|(tx, r)| replaying.apply(r, tx))
}

#[test]
fn a_replay_reads_owner_tables_in_runs() {
    let (device, store, journal) = fixture();
    let space = Space::open(store, D, 1, &[0, 2], journal, None).unwrap();
    let run = |addr| Run { addr: BlockAddr(addr), len: 2 };
    let runs = [400, 510, 767, 900, 2048 + 100, 2048 + 300, 2048 + 600].map(run);
    let records = runs.iter().zip(9..).map(|(r, owner)| alloc_record(*r, DATA, owner, 5)).collect();
    let before = device.reads.load(Relaxed);
    replay(&space, &[(TxId(1), records)]).unwrap();
    assert_eq!(device.reads.load(Relaxed) - before, 2, "one of each group");
    for (r, owner) in runs.iter().zip(9..) {
        let owners = blocks(*r).map(|b| space.owner(BlockAddr(b)).unwrap());
        assert!(owners.map(|o| (o.node.0, o.lblk)).eq([(owner, 5), (owner, 6)]), "{r:?}");
    }
}

#[test]
fn foreign_runs_are_corrupt() {
    let (_, store, journal) = fixture();
    let space = Space::open(store.clone(), D, 1, &[0, 2], journal, None).unwrap();
    // Metadata, journal, other domain, past a short group, past a group, past the volume, empty, endless.
    let bad =
        [(27, 1), (30, 1), (327, 2), (1100, 1), (2048 + 699, 2), (1020, 8), (1 << 40, 1), (400, 0), (400, u32::MAX)];
    for (addr, len) in bad {
        let run = Run { addr: BlockAddr(addr), len };
        let records = [alloc_record(run, DATA, 9, 0), Record::Free { addr: run.addr, len }];
        for record in records {
            assert!(matches!(replay(&space, &[(TxId(1), vec![record])]), Err(Error::Corrupt(_))), "{run:?}");
        }
        assert!(matches!(space.take(run), Err(Error::Corrupt(_))));
    }
    let bad_kind = Class { kind: SegmentKind::Absent, temperature: Temperature::Warm };
    let run = Run { addr: BlockAddr(400), len: 1 };
    assert!(matches!(replay(&space, &[(TxId(1), vec![alloc_record(run, bad_kind, 9, 0)])]), Err(Error::Corrupt(_))));
    assert_eq!(space.stats().free, USABLE);
    space.take(run).unwrap();
    assert_eq!(space.stats().free, USABLE - 1);
    assert!(matches!(Space::open(store.clone(), DomainId(4), 1, &[0], None, None), Err(Error::Corrupt(_))));
    assert!(matches!(Space::open(store.clone(), D, 1, &[1], None, None), Err(Error::Corrupt(_))));
    assert!(matches!(Space::open(store, D, 1, &[77], None, None), Err(Error::Corrupt(_))));
}

#[test]
fn claimed_group_joins() {
    let (_, store, journal) = fixture();
    let space = Space::open(store.clone(), D, 1, &[0], journal, None).unwrap();
    assert!(matches!(Space::init_group(&store, D, 1, 2, Some((27, 9))), Err(Error::Invalid(_))));
    assert!(matches!(Space::init_group(&store, D, 2, 2, Some((28, 673))), Err(Error::Invalid(_))));
    Space::init_group(&store, D, 1, 2, None).unwrap();
    // nobody has a block of it before it is known whose it is
    let all = |space: &Space| space.reserve(1, false).and_then(|()| space.reserve(696, true)).is_ok();
    let known = || {
        assert!(space.groups() == [0, 1] && !all(&space), "its blocks are given out");
        space.unreserve(1);
        Ok(())
    };
    space.add_group_when(1, known).unwrap();
    assert!(all(&space));
    space.unreserve(697);
    space.add_group(1).unwrap();
    assert_eq!(space.groups(), [0, 1]);
    assert_eq!((space.stats().blocks, space.stats().free), (696 + 996, 696 + 996));
}

#[test]
fn owner_tables_are_evicted() {
    let (device, store, journal) = fixture();
    let mut space = Space::open(store, D, 1, &[0, 2], journal, None).unwrap();
    space.owners = Residency::new(1);
    space.reserve(1200, false).unwrap();
    let mut left = 1200;
    while left > 0 {
        let run = space.alloc(0, DATA, left, None).unwrap();
        space.apply(&[alloc_record(run, DATA, 9, u64::from(left))], TxId(1)).unwrap();
        left -= run.len;
    }
    let before = committed(&space);
    assert!(space.owners.count() > 2);
    space.write_home(0).unwrap();
    device.flush_all();
    space.owner(BlockAddr(2048 + 100)).unwrap();
    space.owners.swept();
    assert_eq!(committed(&space), before);
    (0..4).for_each(|_| assert!(space.owner(BlockAddr(2048 + 100)).is_ok()));
    assert!(space.owners.count() <= 4, "{}", space.owners.count());
    assert_eq!(committed(&space), before);
}
