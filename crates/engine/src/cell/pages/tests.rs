use super::*;
use proptest::prelude::*;

thread_local! {
    /// Groups, and places without one, that this thread looked at.
    pub static LOOKS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// How many of them `f` takes.
pub fn looks<T>(f: impl FnOnce() -> T) -> (usize, T) {
    let before = LOOKS.get();
    let r = f();
    (LOOKS.get() - before, r)
}

impl PageMap {
    /// First byte of a page and whether it is dirty, without warming it.
    fn peek(&self, lblk: u64) -> Option<(u8, bool)> {
        let (g, i) = place(lblk);
        let g = self.groups.get(g)?;
        Some((g.pages[i].as_ref()?[0], g.dirty >> i & 1 == 1))
    }
}

fn page(b: u8) -> Page {
    Page::from_slice(&[b; BLOCK_BYTES], Home::ANYWHERE)
}

#[test]
fn pages_are_aligned_and_copied_on_write() {
    let a = Page::from_slice(b"abc", Home::ANYWHERE);
    assert_eq!(a.as_ptr() as usize % BLOCK_BYTES, 0);
    assert_eq!((&a[..4], a[4095]), (b"abc\0".as_slice(), 0));
    let mut b = a.clone();
    assert!(b.same(&a));
    b.make_mut()[0] = b'x';
    assert_eq!((a[0], b[0]), (b'a', b'x'));
    let at = b.as_ptr();
    b.make_mut()[1] = b'y';
    assert_eq!(b.as_ptr(), at, "a page that nobody shares is changed in place");
}

#[test]
fn a_write_during_write_out_does_not_change_what_is_written() {
    let mut m = PageMap::new();
    m.put_dirty(3, page(1));
    m.put_dirty(4, page(2));
    let runs = m.dirty_runs(usize::MAX);
    assert_eq!(m.write(4, 10, b"new"), Some(false));
    assert_eq!(runs[0].1[1][10], 2, "the I/O sees what it was given");
    assert!(m.is_dirty(4));
    assert!(!m.insert_clean(4, page(9)), "what a reader brings does not replace it");
    assert_eq!(m.get(4).map(|p| p[10]), Some(b'n'));
}

#[test]
fn what_was_written_meanwhile_is_not_forgotten() {
    let mut m = PageMap::new();
    (3..6).for_each(|l| assert!(m.put_dirty(l, page(l as u8))));
    let written = m.dirty_runs(usize::MAX).remove(0).1;
    m.mark_clean(3, 6);
    assert_eq!(m.write(4, 10, b"new"), Some(true));
    let forgotten: Vec<u64> = (3..6).zip(&written).filter(|(l, p)| m.forget(*l, p)).map(|(l, _)| l).collect();
    assert_eq!((forgotten, m.len(), m.is_dirty(4)), (vec![3, 5], 1, true));
    m.mark_clean(4, 5);
    assert!(!m.forget(4, &written[1]), "clean by now, but not what was written");
    assert!(!m.forget(3, &written[0]) && !m.forget(1 << 30, &written[0]), "there is none");
    let newest = m.get(4).unwrap().clone();
    assert!(m.forget(4, &newest) && m.is_empty() && m.groups.low.is_empty());
}

#[test]
fn hot_pages_get_a_second_chance() {
    let mut m = PageMap::new();
    (0..8).for_each(|l| assert!(m.insert_clean(l, page(0))));
    m.put_dirty(8, page(1));
    (0..4).for_each(|l| assert!(m.get(l).is_some()));
    assert_eq!(m.evict_clean(2), 2);
    assert_eq!((0..20).filter(|l| m.peek(*l).is_some()).collect::<Vec<_>>(), [0, 1, 2, 3, 6, 7, 8]);
    assert_eq!(m.evict_clean(100), 6, "the rest, the hot ones by their second turn");
    assert!(m.is_dirty(8) && m.len() == 1);
    assert_eq!(m.evict_clean(100), 0);
}

#[test]
fn far_groups_come_near_when_there_are_many() {
    let mut m = PageMap::new();
    for l in [5 * GROUP, 1 << 40, 0, GROUP, 7 * GROUP, 2 * GROUP] {
        m.put_dirty(l, page(1));
    }
    let far = |m: &PageMap| m.groups.high.as_ref().map_or(0, |h| h.groups.len());
    assert_eq!((m.groups.low.len(), far(&m)), (8, 1));
    assert!(m.dirty_blocks().eq([0, GROUP, 2 * GROUP, 5 * GROUP, 7 * GROUP, 1 << 40]));
    assert_eq!(m.remove_range(0, u64::MAX), 6);
    assert!(m.groups.low.is_empty() && far(&m) == 0);
}

/// A large file that is read here and there, and of which few pages are written.
#[test]
fn who_looks_for_dirty_pages_looks_at_no_clean_group() {
    const GROUPS: u64 = 2000;
    // found by an index, and by a search
    for first in [0, 1 << 30] {
        let mut m = PageMap::new();
        let lblk = |g: u64| (first + g) * GROUP + 5;
        (0..GROUPS).for_each(|g| assert!(m.insert_clean(lblk(g), page(0))));
        assert_eq!(looks(|| m.dirty_runs(usize::MAX).len()), (0, 0));
        assert_eq!(looks(|| m.next_dirty(0)), (0, None));
        for dirty in [vec![1000], vec![3, 4, 1999], (0..50).map(|i| 40 * i).collect()] {
            let n = dirty.len();
            dirty.iter().for_each(|g| assert!(m.dirty(lblk(*g))));
            let (looked, blocks) = looks(|| m.dirty_blocks().collect::<Vec<_>>());
            assert!(blocks.into_iter().eq(dirty.iter().map(|g| lblk(*g))));
            assert_eq!(looked, n);
            let (looked, runs) = looks(|| m.dirty_runs(usize::MAX));
            assert_eq!((looked, runs.len()), (2 * n, n));
            assert_eq!(looks(|| m.next_dirty(lblk(dirty[0]) + 1)), (2.min(n), dirty.get(1).map(|g| lblk(*g))));
            assert_eq!(looks(|| m.dirty_in(lblk(dirty[0]) + 1, lblk(dirty[0]) + 50).count()), (1, 0));
            // one that is dirty again while the others are written
            let again = lblk(dirty[n / 2]);
            assert_eq!(looks(|| m.mark_clean(0, u64::MAX)).0, n);
            assert!(m.dirty(again) && !m.dirty(again));
            assert_eq!(looks(|| m.dirty_blocks().collect::<Vec<_>>()), (1, vec![again]));
            m.mark_clean(again, again + 1);
            assert_eq!((m.dirty_count(), looks(|| m.dirty_blocks().count())), (0, (0, 0)));
        }
    }
}

/// Blocks that lie together, near the beginning, and far away.
fn block() -> impl Strategy<Value = u64> {
    prop_oneof![4 => 40..150u64, 2 => 0..1000u64, 1 => (1 << 40)..(1 << 40) + 100u64]
}

proptest! {
    #[test]
    fn like_a_table(ops in prop::collection::vec((0..11u8, block(), block(), any::<u8>()), 1..200)) {
        let mut m = PageMap::new();
        let mut model: BTreeMap<u64, (u8, bool)> = BTreeMap::new();
        for (op, a, b, v) in ops {
            match op {
                10 => {
                    m.share(a, b.clamp(a, a + 200));
                    let dirty = model.get(&a).is_some_and(|o| o.1);
                    model.entry(a).and_modify(|o| if o.1 { o.0 = v });
                    prop_assert_eq!(m.overwrite(a * 4096, &[v; BLOCK_BYTES]), dirty);
                }
                9 => {
                    let (from, to) = (a.min(b), a.max(b));
                    let rest = model.split_off(&from);
                    if v % 2 == 0 {
                        m.shift(from, to);
                        model.extend(rest.into_iter().map(|(l, p)| (l + to - from, p)));
                    } else {
                        model.clear();
                        m.remove_range(0, from);
                        m.shift(from, from / 2);
                        model.extend(rest.into_iter().map(|(l, p)| (l - from + from / 2, p)));
                    }
                }
                0 | 1 => {
                    prop_assert_eq!(m.insert_clean(a, page(v)), !model.contains_key(&a));
                    model.entry(a).or_insert((v, false));
                }
                2 | 3 => {
                    let was_clean = !model.insert(a, (v, true)).is_some_and(|o| o.1);
                    prop_assert_eq!(m.put_dirty(a, page(v)), was_clean);
                }
                4 => {
                    let was = model.get_mut(&a).map(|o| !std::mem::replace(o, (v, true)).1);
                    prop_assert_eq!(m.write(a, 0, &[v; BLOCK_BYTES]), was);
                }
                5 => {
                    m.mark_clean(a, b);
                    model.iter_mut().filter(|o| (a..b).contains(o.0)).for_each(|o| o.1.1 = false);
                }
                6 => {
                    let dirty = model.iter().filter(|o| (a..b).contains(o.0) && o.1.1).count();
                    model.retain(|l, _| !(a..b).contains(l));
                    prop_assert_eq!(m.remove_range(a, b), dirty);
                }
                7 => {
                    let a = a.min(150);
                    let n = m.evict_clean(a as usize);
                    let before = model.len();
                    model.retain(|l, o| o.1 || m.peek(*l).is_some());
                    prop_assert_eq!(before - model.len(), n);
                    prop_assert!(n <= a as usize);
                }
                _ => {
                    let was = model.get_mut(&a).map(|o| !std::mem::replace(o, (0, true)).1);
                    prop_assert_eq!(m.zero_tail(a, 0), was);
                }
            }
            prop_assert_eq!(m.len(), model.len());
            let dirty: Vec<u64> = model.iter().filter(|o| o.1.1).map(|o| *o.0).collect();
            prop_assert_eq!(m.dirty_count(), dirty.len());
            let shared: Vec<u64> =
                m.groups.range(0, u64::MAX).filter(|g| g.1.locks.is_some()).map(|g| g.1.dirty).collect();
            prop_assert_eq!(m.groups.shared as usize, shared.len());
            prop_assert!(shared.iter().all(|dirty| *dirty != 0));
            let groups = m.groups.range(0, u64::MAX).filter(|g| g.1.dirty != 0).map(|g| g.0);
            prop_assert!(m.groups.dirty_range(0, u64::MAX).eq(groups));
            let (from, to) = (a.min(b), a.max(b));
            prop_assert!(m.dirty_in(from, to).eq(dirty.iter().copied().filter(|l| (from..to).contains(l))));
            prop_assert_eq!(m.next_dirty(a), dirty.iter().copied().find(|l| *l >= a));
            let runs = m.dirty_runs(usize::MAX);
            let in_runs: Vec<u64> = runs.iter().flat_map(|r| r.0..r.0 + r.1.len() as u64).collect();
            prop_assert_eq!(in_runs, dirty);
            prop_assert!(runs.windows(2).all(|w| w[0].0 + (w[0].1.len() as u64) < w[1].0));
            let short = m.dirty_runs(3);
            prop_assert!(short.iter().all(|r| (1..=3).contains(&r.1.len())));
            prop_assert_eq!(short.iter().map(|r| r.1.len()).sum::<usize>(), m.dirty_count());
        }
        for l in (0..1000).chain((1 << 40)..(1 << 40) + 100) {
            prop_assert_eq!(m.peek(l), model.get(&l).copied());
        }
    }
}
