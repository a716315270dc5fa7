//! Pages of a file that several threads overwrite at once, with the file's cell locked for reading.
//!
//! A dirty page may have a lock of its own, on a line of its own. Who has the map for reading may change the bytes of a page
//! that is dirty, has a lock, and is shared with no I/O, with that lock held; nothing else. All that a look at such a page
//! needs to be right stays as it is meanwhile: pages come and go, become dirty and clean, and are cloned for an I/O only by
//! who has the map alone; for a reader that pins them they are cloned by a view ([`View::page`]), which has the locks. So whoever reads a clean page, or one of a file without such locks, just reads it; of the others a
//! reader takes the lock ([`View`]).
//!
//! A write or a view of several pages takes all their locks, by rising blocks, before it touches the first byte: of two that
//! meet one comes first as a whole.
//!
//! This is a low-level module with unsafe code: a page is written through a shared reference.

use super::locks::{Lock, Locks};
use super::{GROUP, Group, Page, PageMap, place};
use braidfs_format::BLOCK_BYTES;
use braidfs_sync::{RwLockReadGuard, RwLockWriteGuard};
use smallvec::SmallVec;
use std::sync::atomic::Ordering::Relaxed;

/// A view of more pages takes the file's lock alone rather than so many: a mebibyte, and what it begins and ends in.
const VIEW_PAGES: u64 = 257;

impl Group {
    /// The lock of a page that may be overwritten by who has the map for reading.
    fn lock(&self, i: usize) -> Option<&Lock> {
        self.locks.as_ref().filter(|_| self.dirty >> i & 1 == 1).map(|l| l.of(i))
    }
}

/// Pages that are looked at, with the locks of those that others may overwrite.
pub struct View<'a> {
    map: &'a PageMap,
    first: u64,
    last: u64,
    /// One word, as the view is moved about, and nearly always has none: copied in other pieces than it was written in, it would
    /// cost each read a fifth of its time (a load that spans several stores waits until they are in the cache).
    _locks: Option<Box<ReadLocks<'a>>>,
}

/// Locks of pages, for reading.
struct ReadLocks<'a>(#[expect(dead_code, reason = "to be given up together")] Vec<RwLockReadGuard<'a, ()>>);

impl View<'_> {
    /// The bytes of the page at `lblk`, one of those that were asked for; `None` where it is not cached.
    #[inline]
    pub fn get(&self, lblk: u64) -> Option<&[u8; BLOCK_BYTES]> {
        debug_assert!((self.first..=self.last).contains(&lblk));
        if !(self.first..=self.last).contains(&lblk) {
            return None;
        }
        self.map.look(lblk).map(|p| &**p)
    }

    /// [`Self::get`] the page itself, to keep: from then on whoever overwrites it copies it first.
    pub fn page(&self, lblk: u64) -> Option<Page> {
        self.get(lblk)?;
        self.map.look(lblk).cloned()
    }
}

impl PageMap {
    /// Lets the dirty pages of `first ..= last` be overwritten by who has the map for reading ([`Self::overwrite`]), and all
    /// others of their groups, as long as there is a dirty one in the group.
    pub fn share(&mut self, first: u64, last: u64) {
        for g in first / GROUP..=last / GROUP {
            if let Some(group) = self.groups.get_mut(g)
                && group.dirty != 0
                && group.locks.is_none()
            {
                group.locks = Some(Locks::new(g));
                self.groups.shared += 1;
            }
        }
    }

    /// The page at `lblk`, for a write with the map for reading, and its lock.
    fn shared_page(&self, lblk: u64) -> Option<(&Page, &Lock)> {
        let (g, i) = place(lblk);
        let group = self.groups.get(g)?;
        let lock = group.lock(i)?;
        let page = group.pages[i].as_ref()?;
        if group.hot.load(Relaxed) >> i & 1 == 0 {
            group.hot.fetch_or(1 << i, Relaxed);
        }
        Some((page, lock))
    }

    /// Overwrites bytes from byte `offset` of the file on, at least one, as a whole. False, and nothing changed, where one
    /// of the pages is not dirty, has no lock ([`Self::share`]) or is shared with an I/O or with who has it pinned.
    pub fn overwrite(&self, offset: u64, bytes: &[u8]) -> bool {
        const PAGE: u64 = BLOCK_BYTES as u64;
        let end = offset + bytes.len() as u64;
        let mut locked: SmallVec<[(&Page, RwLockWriteGuard<'_, ()>); 2]> = SmallVec::new();
        for lblk in offset / PAGE..end.div_ceil(PAGE) {
            let Some((page, lock)) = self.shared_page(lblk) else { return false };
            let lock = lock.write();
            // Looked at with the lock: until then a view may have cloned it.
            if !page.is_alone() {
                return false;
            }
            locked.push((page, lock));
        }
        let (mut from, mut rest) = ((offset % PAGE) as usize, bytes);
        for (page, _) in &locked {
            let (part, after) = rest.split_at((BLOCK_BYTES - from).min(rest.len()));
            // SAFETY: this map was seen to have the only reference to the frame, with the page's lock held for writing. The
            // frame is cloned, or handed out as bytes, by functions that need the map alone, and by `View`, which holds that
            // lock for reading where the page is dirty and has one.
            unsafe { page.0.write_locked(from, part) };
            (from, rest) = (0, after);
        }
        true
    }

    /// The pages `first ..= last`, for who has the map for reading; `None` where they are too many to lock.
    #[inline]
    pub fn view(&self, first: u64, last: u64) -> Option<View<'_>> {
        let locks = if self.groups.shared > 0 { self.lock_for_reading(first, last)? } else { None };
        Some(View { map: self, first, last, _locks: locks })
    }

    /// All pages, for who has the map alone.
    pub fn view_alone(&mut self) -> View<'_> {
        View { map: self, first: 0, last: u64::MAX, _locks: None }
    }

    /// The locks of the pages `first ..= last`, as far as they have some; `None` where those are too many pages.
    #[cold]
    #[inline(never)]
    fn lock_for_reading(&self, first: u64, last: u64) -> Option<Option<Box<ReadLocks<'_>>>> {
        if last - first >= VIEW_PAGES {
            return None;
        }
        let lock = |lblk| {
            let (g, i) = place(lblk);
            self.groups.get(g).and_then(|g| g.lock(i)).map(Lock::read)
        };
        let locks: Vec<_> = (first..=last).filter_map(lock).collect();
        Some((!locks.is_empty()).then(|| Box::new(ReadLocks(locks))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cell::frames::pool::Home;
    use std::sync::atomic::AtomicBool;

    const PAGE: u64 = BLOCK_BYTES as u64;

    /// Dirty pages `0 .. n`.
    fn dirty(n: u64) -> PageMap {
        let mut m = PageMap::new();
        (0..n).for_each(|l| assert!(m.put_dirty(l, Page::zeroed(Home::ANYWHERE))));
        m
    }

    #[test]
    fn only_dirty_pages_with_a_lock_are_overwritten_and_all_or_none() {
        let mut m = dirty(3);
        assert!(!m.overwrite(0, b"x"), "no locks");
        m.share(0, 1 << 20);
        assert!(m.overwrite(PAGE - 2, b"abcd"));
        assert!(m.overwrite(PAGE + 10, b"e"));
        assert!(!m.overwrite(2 * PAGE, &[1; 4097]), "the second page is none");
        assert!(!m.overwrite(64 * PAGE, b"x") && !m.overwrite(1 << 50, b"x"));
        let view = m.view(0, 2).unwrap();
        assert_eq!(
            (&view.get(0).unwrap()[4093..], &view.get(1).unwrap()[..12]),
            (&b"\0ab"[..], &b"cd\0\0\0\0\0\0\0\0e\0"[..])
        );
        assert!(view.get(2).unwrap().iter().all(|b| *b == 0), "not one byte of a write that is none");
        drop(view);
        let runs = m.dirty_runs(usize::MAX);
        assert!(!m.overwrite(0, b"x"), "an I/O has the page");
        m.mark_clean(1, 2);
        drop(runs);
        assert!(m.overwrite(0, b"x") && !m.overwrite(PAGE, b"x") && !m.overwrite(0, &[1; 4097]), "one is clean");
        assert_eq!(m.groups.shared, 1);
        m.mark_clean(0, u64::MAX);
        assert_eq!(m.groups.shared, 0, "with the last dirty page the locks go");
        m.dirty(0);
        assert!(!m.overwrite(0, b"x"));
    }

    #[test]
    fn a_view_of_many_pages_is_refused_only_where_some_have_locks() {
        let mut m = dirty(600);
        assert!(m.view(0, 599).is_some());
        m.share(0, 0);
        assert!(m.view(0, 599).is_none() && m.view(0, VIEW_PAGES).is_none());
        assert!(m.view(100, 100 + VIEW_PAGES - 1).is_some());
        assert!(m.view_alone().get(599).is_some());
    }

    /// Two that overwrite a range of three pages, whole or in part, and one that looks at it, which is never torn.
    #[test]
    fn writes_and_views_of_several_pages_come_one_after_the_other() {
        const ROUNDS: u32 = 20_000;
        let mut m = dirty(4);
        m.share(0, 3);
        let (m, stop) = (&m, &AtomicBool::new(false));
        std::thread::scope(|s| {
            let writers: Vec<_> = [0u8, 128]
                .map(|own| {
                    s.spawn(move || {
                        for n in 0..ROUNDS {
                            let b = own | (n % 128) as u8;
                            assert!(m.overwrite(PAGE / 2, &[b; 3 * BLOCK_BYTES]));
                        }
                    })
                })
                .into();
            s.spawn(move || {
                while !stop.load(Relaxed) {
                    let view = m.view(0, 3).unwrap();
                    let middle = |l: u64| -> &[u8] {
                        let page = view.get(l).unwrap();
                        match l {
                            0 => &page[BLOCK_BYTES / 2..],
                            3 => &page[..BLOCK_BYTES / 2],
                            _ => page,
                        }
                    };
                    let first = middle(0)[0];
                    assert!((0..4).all(|l| middle(l).iter().all(|b| *b == first)), "torn");
                    assert!(view.get(0).unwrap()[..BLOCK_BYTES / 2].iter().all(|b| *b == 0));
                }
            });
            writers.into_iter().for_each(|w| w.join().unwrap());
            stop.store(true, Relaxed);
        });
    }

    /// One that overwrites pages, and one that takes them from views to keep: they stay as they were taken.
    #[test]
    fn what_a_view_gave_away_is_not_overwritten() {
        let mut m = dirty(2);
        m.share(0, 1);
        let (m, stop) = (&m, &AtomicBool::new(false));
        std::thread::scope(|s| {
            s.spawn(move || {
                // tries alone would not do: while the other thread has a page and no CPU, each fails
                let (mut done, mut tries) = (0, 0u32);
                while done < 1000 || tries < 200_000 {
                    done += u32::from(m.overwrite(PAGE, &[tries as u8; BLOCK_BYTES]));
                    tries = tries.wrapping_add(1);
                }
                stop.store(true, Relaxed);
            });
            while !stop.load(Relaxed) {
                let page = m.view(1, 1).unwrap().page(1).unwrap();
                let first = page[0];
                for _ in 0..20 {
                    assert!(page.iter().all(|b| *b == first), "overwritten");
                }
                drop(page);
                std::thread::yield_now();
            }
        });
        assert!(m.view(0, 0).unwrap().page(0).unwrap().same(m.groups.get(0).unwrap().pages[0].as_ref().unwrap()));
        assert!(m.view(5, 5).unwrap().page(5).is_none());
    }
}
