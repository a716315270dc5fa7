//! The index against a plain table, with a disk of buckets below.

use super::buckets::lower_bound;
use super::*;
use braidfs_format::dentry::{decode_entries, encode_entries};
use proptest::prelude::*;
use std::collections::BTreeMap;

fn dentry(name: &[u8], node: u64) -> Dentry {
    Dentry { hash: 0, node: InodeNo(node), generation: 1, kind: 8, name: name.into() }
}

/// What the device holds.
#[derive(Debug, Clone, PartialEq)]
enum Disk {
    Inline(Vec<u8>),
    Buckets(BTreeMap<u64, Vec<u8>>),
}

impl Disk {
    fn load(&self, lblk: u64) -> Result<Vec<Dentry>> {
        match self {
            Disk::Buckets(b) => Ok(decode_entries(&b[&lblk])?),
            Disk::Inline(_) => panic!("an inline directory loads bucket {lblk}"),
        }
    }

    fn apply(&mut self, w: DirWrite<'_>) {
        let mut old = match std::mem::replace(self, Disk::Inline(vec![])) {
            Disk::Buckets(b) => b,
            Disk::Inline(_) => BTreeMap::new(),
        };
        *self = match w {
            DirWrite::Inline(entries, dropped) => {
                for d in dropped {
                    assert!(old.remove(&d).is_some());
                }
                assert!(old.is_empty(), "buckets are left behind");
                Disk::Inline(encode_entries(entries.iter()))
            }
            DirWrite::Buckets { write, dropped } => {
                for d in dropped {
                    assert!(old.remove(&d).is_some());
                }
                for (first, entries) in write {
                    assert_eq!(bucket_first(bucket_lblk(first)), first);
                    let body = encode_entries(entries.iter());
                    assert!(body.len() <= BUCKET_BYTES);
                    old.insert(bucket_lblk(first), body);
                }
                Disk::Buckets(old)
            }
        };
    }

    fn open(&self) -> DirIndex {
        match self {
            Disk::Inline(b) => DirIndex::from_inline(decode_entries(b).unwrap()),
            Disk::Buckets(b) => DirIndex::from_buckets(b.keys().copied(), 0),
        }
    }
}

/// Hashes that collide often, lie at borders of prefixes, and are spread.
fn hash_of(n: u16) -> u64 {
    match n % 4 {
        0 => u64::from(n / 40),
        1 => HASH_MAX - u64::from(n / 30),
        2 => (u64::from(n / 8) << 15).wrapping_sub(u64::from(n % 5)) & HASH_MAX,
        _ => u64::from(n).wrapping_mul(0x9e37_79b9_7f4a_7c15) & HASH_MAX,
    }
}

fn name_of(n: u16) -> Vec<u8> {
    let mut name = format!("{n}").into_bytes();
    name.resize(name.len() + usize::from(n % 97), b'x');
    name
}

#[derive(Debug, Clone)]
enum Op {
    Insert(u16),
    Many(u16),
    Remove(u16),
    /// By who has the directory locked for reading, where that can be.
    InsertOpen(u16),
    RemoveOpen(u16),
    RemoveFrom(u16),
    Replace(u16, u64),
    SplitAhead(u16),
    Unshare,
    Commit,
    Evict,
    Reopen,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (0..800u16).prop_map(Op::Insert),
        2 => (0..800u16).prop_map(Op::Many),
        5 => (0..800u16).prop_map(Op::Remove),
        6 => (0..800u16).prop_map(Op::InsertOpen),
        5 => (0..800u16).prop_map(Op::RemoveOpen),
        1 => (0..800u16).prop_map(Op::RemoveFrom),
        2 => (0..800u16, 1..99u64).prop_map(|(n, v)| Op::Replace(n, v)),
        2 => (0..800u16).prop_map(Op::SplitAhead),
        1 => Just(Op::Unshare),
        3 => Just(Op::Commit),
        1 => Just(Op::Evict),
        1 => Just(Op::Reopen),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn like_a_table(ops in prop::collection::vec(op(), 1..80)) {
        let mut d = DirIndex::new_empty();
        let mut disk = Disk::Inline(vec![]);
        let mut model: BTreeMap<u16, u64> = BTreeMap::new();
        for op in ops {
            let on_disk = disk.clone();
            let load: Load<'_> = &mut |l| on_disk.load(l);
            let mut insert = |d: &mut DirIndex, n: u16| {
                if let std::collections::btree_map::Entry::Vacant(v) = model.entry(n) {
                    match d.insert(hash_of(n), dentry(&name_of(n), u64::from(n) + 1), load) {
                        Ok(()) => { v.insert(u64::from(n) + 1); }
                        Err(Error::NoSpace) => {}
                        Err(e) => panic!("{e}"),
                    }
                }
            };
            match op {
                Op::Insert(n) => insert(&mut d, n),
                Op::Many(n) => (n..n + 150).for_each(|n| insert(&mut d, n)),
                Op::Remove(n) => {
                    let got = d.remove(hash_of(n), &name_of(n), load).unwrap();
                    prop_assert_eq!(got.map(|g| g.node.0), model.remove(&n));
                }
                Op::InsertOpen(n) => {
                    d.set_shared(true);
                    let Some(mut b) = d.open(hash_of(n)) else { continue };
                    prop_assert_eq!(b.find(&name_of(n)).map(|e| e.node.0), model.get(&n).copied());
                    if model.contains_key(&n) {
                        continue;
                    }
                    let Some(room) = b.room(&name_of(n)) else { continue };
                    let by = b.insert(room, dentry(&name_of(n), u64::from(n) + 1));
                    drop(b);
                    d.opened_changed(by.entries, by.memory, by.first.as_slice());
                    model.insert(n, u64::from(n) + 1);
                }
                Op::RemoveOpen(n) => {
                    d.set_shared(true);
                    let Some(mut b) = d.open(hash_of(n)) else { continue };
                    let changed = if b.can_remove(&name_of(n)) { b.remove(&name_of(n)) } else { continue };
                    drop(b);
                    prop_assert_eq!(changed.is_some(), model.remove(&n).is_some());
                    if let Some(by) = changed {
                        d.opened_changed(by.entries, by.memory, by.first.as_slice());
                    }
                }
                Op::RemoveFrom(from) => {
                    for n in from..1000 {
                        let got = d.remove(hash_of(n), &name_of(n), load).unwrap();
                        prop_assert_eq!(got.map(|g| g.node.0), model.remove(&n));
                    }
                    prop_assert_eq!(d.is_empty(load).unwrap(), model.is_empty());
                }
                Op::Replace(n, v) => {
                    let before = d.find(hash_of(n), &name_of(n), load).unwrap().cloned();
                    let old = d.replace(hash_of(n), &name_of(n), InodeNo(v), 3, 4, load).unwrap();
                    prop_assert_eq!(&old, &before);
                    let new = d.find(hash_of(n), &name_of(n), load).unwrap();
                    prop_assert_eq!(new.map(|d| d.hash), old.map(|d| d.hash));
                    if let Some(m) = model.get_mut(&n) { *m = v; }
                }
                Op::SplitAhead(n) => {
                    let had = d.buckets.len();
                    d.set_shared(true);
                    d.split_ahead(hash_of(n), 3);
                    prop_assert!(d.buckets.len() <= had + 3 * (SPLIT_PARTS as usize - 1));
                }
                Op::Unshare => d.set_shared(false),
                Op::Commit => {
                    disk.apply(d.take_dirty());
                    prop_assert!(!d.is_dirty());
                }
                Op::Evict => d.evict_clean(),
                Op::Reopen => {
                    disk.apply(d.take_dirty());
                    d = disk.open();
                }
            }
            if let Some(n) = d.count() {
                prop_assert_eq!(n, model.len() as u64);
            }
            let dirty = d.dirty.clone();
            let all: Vec<_> = d.buckets.iter_mut().collect();
            prop_assert!(dirty.iter().all(|f| all.iter().any(|(first, b)| first == f && b.entries.is_some())));
            prop_assert!(all.iter().all(|(f, b)| *f == 0 || b.entries.as_ref().is_none_or(|e| !e.is_empty())));
            prop_assert_eq!(d.unloaded, all.iter().filter(|b| b.1.entries.is_none()).count());
            let loaded = || all.iter().filter_map(|b| b.1.entries.as_ref());
            prop_assert_eq!(d.memory, loaded().map(Entries::memory).sum::<usize>());
            prop_assert!(loaded().all(|e| e.iter().is_sorted_by(|a, b| a.hash < b.hash)));
            prop_assert!(all.iter().all(|(first, b)| b.dirty == dirty.contains(first)));
            let bytes = |b: &Content| b.entries.as_ref().map_or(0, |e| encoded(e.iter()));
            prop_assert!(all.iter().all(|(_, b)| b.bytes as usize == bytes(b)));
        }
        let load: Load<'_> = &mut |l| disk.load(l);
        for n in 0..1000u16 {
            let before = match d.find_loaded(hash_of(n), &name_of(n), |e| e.node.0) {
                Lookup::Found(node) => Some(Some(node)),
                Lookup::Absent => Some(None),
                Lookup::NotLoaded => None,
            };
            let got = d.find(hash_of(n), &name_of(n), load).unwrap().map(|e| e.node.0);
            prop_assert_eq!(got, model.get(&n).copied());
            prop_assert!(before.is_none_or(|b| b == got));
        }
        let (mut pos, mut seen, mut names) = (0, 0, Vec::new());
        while let Some(e) = d.next_after(pos, load).unwrap() {
            prop_assert!(e.hash > pos.max(2));
            pos = e.hash;
            seen += 1;
            names.push(e.clone());
        }
        prop_assert_eq!(seen, model.len());
        // the same by pieces, all being loaded now
        let (mut pos, mut listed) = (0, Vec::new());
        loop {
            let from = listed.len();
            prop_assert!(d.list_loaded(pos, 7, &mut |e| listed.push(e.clone())));
            prop_assert!(listed.len() <= from + 7);
            if listed.len() == from {
                break;
            }
            pos = listed[listed.len() - 1].hash;
        }
        prop_assert_eq!(listed, names);
    }
}

/// The first change beside others turns a bucket into what several threads change. Whatever memory that takes more or less, none
/// with 64 names, the name that is taken out is the one that was asked for.
#[test]
fn who_begins_to_share_a_bucket_takes_its_own_name() {
    let none: Load<'_> = &mut |_| panic!("all is loaded");
    let hash = |i: u64| i.wrapping_mul(0x9e37_79b9_7f4a_7c15) & HASH_MAX;
    let name = |i: u64| format!("a name that is not short {i:03}").into_bytes();
    for n in 45..=70 {
        let mut d = DirIndex::new_empty();
        // it has grown to room for 128
        for i in 1..=72 {
            d.insert(hash(i), dentry(&name(i), i), none).unwrap();
        }
        for i in n + 1..=72 {
            d.remove(hash(i), &name(i), none).unwrap().unwrap();
        }
        assert!(!d.is_inline() && d.buckets.len() == 1, "{n}");
        d.set_shared(true);
        let one = n / 3;
        let mut bucket = d.open(hash(one)).unwrap();
        assert!(bucket.can_remove(&name(one)));
        bucket.remove(&name(one)).unwrap();
        drop(bucket);
        for i in 1..=n {
            let found = d.find(hash(i), &name(i), none).unwrap().map(|e| e.node.0);
            assert_eq!(found, (i != one).then_some(i), "{n}");
        }
    }
}

/// What is counted is what is allocated; and names that were only read have no room to grow.
#[test]
fn memory_counts_what_is_allocated() {
    let none: Load<'_> = &mut |_| panic!("all is loaded");
    let hash = |i: u64| i.wrapping_mul(0x9e37_79b9_7f4a_7c15) & HASH_MAX;
    let mut d = DirIndex::new_empty();
    for i in 1..=1000u64 {
        d.insert(hash(i), dentry(format!("file-{i:08}").as_bytes(), i), none).unwrap();
    }
    let allocated = |d: &mut DirIndex| -> usize {
        let tables = d.buckets.iter_mut().filter_map(|b| match b.1.entries.as_ref()? {
            Entries::Sorted(s) => Some(s.table_bytes()),
            Entries::Spread(_) => None,
        });
        tables.sum()
    };
    let grown = allocated(&mut d);
    assert!(grown >= 1000 * 56 && d.memory == grown, "{grown} and {}", d.memory);
    let mut disk = Disk::Inline(vec![]);
    disk.apply(d.take_dirty());
    let mut d = disk.open();
    let load: Load<'_> = &mut |l| disk.load(l);
    let mut pos = 0;
    while let Some(e) = d.next_after(pos, load).unwrap() {
        pos = e.hash;
    }
    assert_eq!((allocated(&mut d), d.memory), (1000 * 56, 1000 * 56));
}

#[test]
fn a_directory_grows_to_buckets_and_goes_back_when_empty() {
    let none: Load<'_> = &mut |_| panic!("all is loaded");
    let mut d = DirIndex::new_empty();
    let mut disk = Disk::Inline(vec![]);
    let hash = |i: u64| i.wrapping_mul(0x9e37_79b9_7f4a_7c15) & HASH_MAX;
    for i in 1..=20_000u64 {
        d.insert(hash(i), dentry(format!("file{i}").as_bytes(), i), none).unwrap();
    }
    assert_eq!((d.count(), d.is_inline()), (Some(20_000), false));
    disk.apply(d.take_dirty());
    let used = 20_000 * 31;
    assert!(d.buckets.len() < 2 * used / BUCKET_BYTES + 2, "{} buckets", d.buckets.len());
    let mut d = disk.open();
    assert_eq!(d.find_loaded(hash(7), b"file7", |_| ()), Lookup::NotLoaded);
    let on_disk = disk.clone();
    let load: Load<'_> = &mut |l| on_disk.load(l);
    assert!(!d.is_empty(load).unwrap());
    for i in 1..=20_000u64 {
        assert!(d.remove(hash(i), format!("file{i}").as_bytes(), load).unwrap().is_some());
    }
    assert!(d.is_empty(load).unwrap() && d.is_inline());
    disk.apply(d.take_dirty());
    assert_eq!(disk, Disk::Inline(vec![]));
}

/// Also where the first bucket, which is always there, was emptied before the others, and is not in memory.
#[test]
fn a_directory_goes_back_whose_first_bucket_was_emptied_first() {
    let mut d = DirIndex::new_empty();
    let mut disk = Disk::Inline(vec![]);
    let hash = |i: u64| i.wrapping_mul(0x9e37_79b9_7f4a_7c15) & HASH_MAX;
    let name = |i: u64| format!("file{i}").into_bytes();
    let none: Load<'_> = &mut |_| panic!("all is loaded");
    (1..=1000u64).for_each(|i| d.insert(hash(i), dentry(&name(i), i), none).unwrap());
    let second = d.buckets.next_first(0).unwrap();
    let in_first = |i: &u64| hash(*i) < second;
    (1..=1000).filter(in_first).for_each(|i| drop(d.remove(hash(i), &name(i), none).unwrap().unwrap()));
    disk.apply(d.take_dirty());
    d.evict_clean();
    let on_disk = disk.clone();
    let load: Load<'_> = &mut |l| on_disk.load(l);
    (1..=1000).filter(|i| !in_first(i)).for_each(|i| drop(d.remove(hash(i), &name(i), load).unwrap().unwrap()));
    assert!(d.is_empty(load).unwrap() && d.is_inline());
    disk.apply(d.take_dirty());
    assert_eq!(disk, Disk::Inline(vec![]));
}

/// A name just before a place where a bucket could begin is changed beside others, unless one does begin there.
#[test]
fn a_name_near_a_border_is_opened_where_no_bucket_begins_there() {
    let none: Load<'_> = &mut |_| panic!("all is loaded");
    let mut d = DirIndex::new_empty();
    let hash = |i: u64| i.wrapping_mul(0x9e37_79b9_7f4a_7c15) & HASH_MAX;
    for i in 1..=2000u64 {
        d.insert(hash(i), dentry(format!("file{i}").as_bytes(), i), none).unwrap();
    }
    d.set_shared(true);
    let firsts: Vec<u64> = d.buckets.iter().map(|b| b.0).collect();
    assert!(firsts.len() > 8);
    for first in &firsts[1..] {
        assert!(d.open(first - HASH_PROBES).is_none() && d.open(first - 1).is_none());
        assert!(d.open(first - HASH_PROBES - 1).is_some() && d.open(*first).is_some());
        let other = first + (1 << 15);
        assert!(!d.buckets.has(other));
        let mut b = d.open(other - 1).unwrap();
        let room = |b: &OpenBucket<'_>| b.room(b"near").unwrap();
        assert!(b.find(b"near").is_none());
        let by = b.insert(room(&b), dentry(b"near", 9));
        // the next one stands behind the border
        let by2 = b.insert(room(&b), dentry(b"behind", 10));
        assert_eq!(
            (b.find(b"near").map(|e| e.hash), b.find(b"behind").map(|e| e.hash)),
            (Some(other - 1), Some(other))
        );
        drop(b);
        d.opened_changed(by.entries + by2.entries, by.memory + by2.memory, by.first.as_slice());
        for name in [&b"near"[..], b"behind"] {
            assert!(d.remove(other - 1, name, none).unwrap().is_some());
        }
    }
}

/// What who changes one bucket looks at of the index lies in other cache lines than what is put together.
#[test]
fn counts_lie_behind_what_changers_look_at() {
    use std::mem::offset_of;
    let read = [offset_of!(DirIndex, buckets) + size_of::<Buckets>(), offset_of!(DirIndex, shared) + 1];
    assert!(read.iter().all(|end| *end <= 64), "{read:?}");
    let put = [offset_of!(DirIndex, dirty), offset_of!(DirIndex, count), offset_of!(DirIndex, memory)];
    assert!(put.iter().all(|at| *at >= 64), "{put:?}");
}

#[test]
fn hashes_with_one_prefix_cannot_be_split() {
    let none: Load<'_> = &mut |_| panic!("all is loaded");
    let mut d = DirIndex::new_empty();
    let mut n = 0u64;
    let err = loop {
        n += 1;
        if let Err(e) = d.insert(n * 16, dentry(&[b'a'; 200], n), none) {
            break e;
        }
    };
    assert!(matches!(err, Error::NoSpace));
    assert_eq!(d.count(), Some(n - 1));
    assert_eq!(n - 1, (BUCKET_BYTES / 222) as u64);
    // other prefixes still go
    d.insert(1 << 40, dentry(&[b'b'; 200], 1), none).unwrap();
    assert_eq!(d.buckets.len(), 2);
}

#[test]
fn a_bucket_with_foreign_entries_is_corrupt() {
    let mut d = DirIndex::from_buckets([0, 5].into_iter(), 0);
    let mut e = dentry(b"a", 1);
    e.hash = 5 << 15;
    let load: Load<'_> = &mut |_| Ok(vec![e.clone()]);
    assert!(matches!(d.find(100, b"a", load), Err(Error::Corrupt(_))));
    assert!(d.find(5 << 15, b"a", load).unwrap().is_some());
    assert!(d.next_after(u64::MAX, load).unwrap().is_none());
}

proptest! {
    #[test]
    fn lower_bound_halves_in_the_end(mut at in prop::collection::btree_set(3..HASH_MAX, 0..90), near in 3..200_000u64, ask in any::<u64>()) {
        // some that stand close, as names with one prefix of the hash
        at.extend((0..7).map(|i| near + i * i));
        let keys: Vec<u64> = at.iter().copied().collect();
        for pos in at.iter().flat_map(|&p| [p - 1, p, p + 1]).chain([0, ask, near + 2, u64::MAX]) {
            prop_assert_eq!(lower_bound(&keys, pos), keys.partition_point(|k| *k < pos));
        }
        prop_assert_eq!(lower_bound::<u64>(&[], ask), 0);
    }

    #[test]
    fn entries_like_a_tree(
        shared in any::<bool>(),
        steps in prop::collection::vec((any::<u64>(), 0..5u8, any::<bool>()), 1..400),
    ) {
        let (mut mine, mut tree) = (Entries::default(), BTreeMap::<u64, Dentry>::new());
        mine.share(shared);
        for (n, (random, shape, add)) in steps.into_iter().enumerate() {
            // spread; near each other, so that many have one upper half; at both ends; some in one group of keys
            let pos = match shape {
                0 => random >> 1,
                1 => (9 << 40) + random % 50,
                2 => HASH_MAX - random % 20,
                3 => 3 + random % 20,
                _ => {
                    mine.share(random % 8 < 4);
                    mine.share(shared);
                    random >> 1
                }
            };
            let at = |mine: &Entries, pos| mine.lower_bound(pos).and_then(|p| mine.get(p).cloned());
            prop_assert_eq!(at(&mine, pos), tree.range(pos..).next().map(|e| e.1.clone()));
            let free = (pos..).find(|p| !tree.contains_key(p) || *p > pos + 5).unwrap();
            prop_assert_eq!(mine.first_free(pos, pos + 5), free);
            let name = format!("{n:03}").into_bytes();
            if tree.contains_key(&pos) {
                let (near, of) = (pos.saturating_sub(random % 9)..pos + random % 9 + 1, &tree[&pos]);
                let place = mine.find(near, &Dentry::clone(of).name);
                prop_assert_eq!(place.and_then(|p| mine.get(p)), Some(of));
                prop_assert_eq!(mine.find(pos + 1..pos + 9, &of.name), None);
                prop_assert_eq!(mine.remove(place.unwrap()), tree.remove(&pos));
            } else if add && tree.len() < 200 {
                let d = Dentry { hash: pos, ..dentry(&name, n as u64) };
                let place = mine.insert(d.clone());
                prop_assert_eq!(mine.get_mut(place).cloned(), Some(d.clone()));
                tree.insert(pos, d);
            } else if let Some((&first, _)) = tree.range(pos..).next() {
                let place = mine.lower_bound(pos).unwrap();
                prop_assert_eq!(mine.remove(place), tree.remove(&first));
            }
            prop_assert!(mine.iter().eq(tree.values()) && mine.len() == tree.len());
            prop_assert_eq!(at(&mine, 0), tree.values().next().cloned());
            prop_assert_eq!(mine.lower_bound(u64::MAX), None);
            let mut some = Vec::new();
            prop_assert_eq!(mine.list(pos, 3, &mut |e| some.push(e.clone())), some.len());
            prop_assert!(some.iter().eq(tree.range(pos..).take(3).map(|e| e.1)));
            prop_assert!(mine.layout().into_iter().eq(tree.values().map(|e| (bucket_lblk(e.hash), e.encoded_bytes()))));
        }
        // at borders of blocks, as `Spread` asks for
        let blocks: std::collections::BTreeSet<u64> = tree.keys().map(|p| bucket_lblk(*p)).skip(1).collect();
        let from: Vec<u64> = blocks.into_iter().step_by(7).map(bucket_first).collect();
        let parts = mine.split_at(&from);
        prop_assert!(parts.iter().zip(&from).all(|(p, from)| p.iter().all(|e| e.hash >= *from)));
        prop_assert!(mine.iter().chain(parts.iter().flat_map(|p| p.iter())).eq(tree.values()));
        prop_assert_eq!(mine.len() + parts.iter().map(Entries::len).sum::<usize>(), tree.len());
    }
}

/// Keys beyond what a group takes are found, and come back into it.
#[test]
fn groups_that_run_over() {
    // one head, so one group
    let mut all = Entries::default();
    all.share(true);
    let at = |i: u64| (77 << 20) + i;
    for i in 0..40 {
        all.insert(Dentry { hash: at(i), ..dentry(format!("{i}").as_bytes(), i) });
    }
    for i in (0..40).filter(|i| i % 3 != 0).chain((0..40).filter(|i| i % 3 == 0)) {
        let place = all.find(at(i)..at(i) + 9, format!("{i}").as_bytes());
        assert_eq!(all.remove(place.unwrap()).map(|e| e.node), Some(InodeNo(i)));
        assert_eq!(all.find(at(i)..at(i) + 9, format!("{i}").as_bytes()), None);
        assert_eq!(all.first_free(at(i), at(i) + 8), at(i));
    }
    assert!(all.is_empty());
}
