//! Each rule of docs/locking.md, broken once.

use crate::rank::{self, Rank};
use crate::{
    CHECKED, Condvar, Mutex, MutexGuard, PassLock, ProcessMutex, RwLock, RwLockReadGuard, RwLockWriteGuard, device,
    taken_downwards,
};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

type Of<R> = Mutex<u8, R>;

fn gate(n: u64) -> PassLock<u8, rank::Gate> {
    PassLock::keyed(0, n)
}

fn cell(n: u64) -> RwLock<u8, rank::Cell> {
    RwLock::keyed(0, n)
}

/// What the checker says of `f`; empty where it lets it pass.
fn said(f: impl FnOnce()) -> String {
    let outcome = catch_unwind(AssertUnwindSafe(f));
    // whatever was held is let go: the next lock is free to be taken
    drop(Of::<rank::Background>::default().lock());
    outcome.err().map_or_else(String::new, |p| p.downcast_ref::<String>().cloned().unwrap_or_else(|| "?".into()))
}

fn passes(f: impl FnOnce()) {
    assert_eq!(said(f), "");
}

fn fails(why: &str, f: impl FnOnce()) {
    let said = said(f);
    assert!(if CHECKED { said.contains(why) } else { said.is_empty() }, "{said}");
}

const RANKS: &str = "against the order of ranks";
const SECOND: &str = "a second entry of one lock";
const NUMBERS: &str = "against the order of their numbers";

#[test]
fn downwards_only() {
    let (commit, checkpoint, gate, cell) =
        (Of::<rank::Commit>::default(), Of::<rank::Checkpoint>::default(), gate(0), cell(7));
    passes(|| {
        let _a = checkpoint.lock();
        let _b = commit.lock();
        let _c = gate.read();
        let _d = cell.write();
    });
    fails(RANKS, || {
        let _c = gate.read();
        let _b = commit.lock();
    });
    fails(RANKS, || {
        let _d = cell.read();
        let _c = gate.read();
    });
    fails(RANKS, || {
        let _b = commit.lock();
        let _a = checkpoint.lock();
    });
}

#[test]
fn a_report_names_both_locks_and_both_places() {
    let (gate, cell) = (gate(3), cell(77));
    let said = said(|| {
        let _c = cell.read();
        let _g = gate.read();
    });
    if CHECKED {
        assert!(said.contains("takes `gate` (rank 6, number 3) at "), "{said}");
        assert!(said.contains("holds `Cell::state` (rank 7, number 77) at "), "{said}");
        assert_eq!(said.matches(file!()).count(), 2, "{said}");
    }
}

#[test]
fn the_order_of_letting_go_is_free() {
    let (a, b, c) = (Of::<rank::Commit>::default(), gate(1), cell(1));
    passes(|| {
        let ga = a.lock();
        let gb = b.read();
        drop(ga);
        let _gc = c.read();
        drop(gb);
    });
    fails(RANKS, || {
        let _gc = c.read();
        drop(a.lock());
    });
}

#[test]
fn a_lock_is_entered_once() {
    let (gate, cell) = (gate(0), cell(1));
    // a writer that came in between would wait for the first reader, and the second reader for it
    fails(SECOND, || {
        let _a = gate.read();
        let _b = gate.read();
    });
    fails(SECOND, || {
        let _a = cell.read();
        let _b = cell.read();
    });
    if CHECKED {
        fails(SECOND, || {
            let _a = cell.write();
            let _b = cell.read();
        });
        let work = Of::<rank::Work>::default();
        fails(SECOND, || {
            let _a = work.lock();
            let _b = work.lock();
        });
    }
    passes(|| {
        drop(gate.read());
        drop(gate.read());
    });
}

#[test]
fn gates_by_rising_numbers() {
    let (one, two) = (gate(1), gate(2));
    passes(|| {
        let _a = one.read();
        let _b = two.read();
    });
    fails(NUMBERS, || {
        let _b = two.read();
        let _a = one.read();
    });
}

#[test]
fn cells_in_an_order_that_the_code_states() {
    let (one, two) = (cell(1), cell(2));
    // a directory before its child, whatever their numbers
    passes(|| {
        let _b = two.write();
        let _a = one.write();
    });
    passes(|| {
        let a = one.write();
        let _b = two.write_above(&a);
    });
    fails(NUMBERS, || {
        let b = two.write();
        let _a = one.write_above(&b);
    });
}

#[test]
fn the_code_asks_which_of_two_cells_came_first() {
    let (one, two, three) = (cell(1), cell(2), cell(3));
    let downwards = |above, below| taken_downwards::<rank::Cell>(above, below);
    let (_two, _one) = (two.write(), one.write());
    let _three = three.try_write().unwrap();
    assert!(downwards(2, 1) && downwards(2, 3) && downwards(1, 3));
    assert_eq!(downwards(1, 2), !CHECKED);
    assert!(downwards(3, 2), "it was only tried");
    assert!(downwards(4, 1) && downwards(1, 4) && downwards(1, 1), "one of them is not held");
}

#[test]
fn one_at_a_time() {
    let (one, two) = (Of::<rank::Commit>::default(), Of::<rank::Commit>::default());
    fails("one is taken at a time", || {
        let _a = one.lock();
        let _b = two.lock();
    });
}

#[test]
fn leaves_by_themselves_or_along_their_chain() {
    let (first, ring) = (Of::<rank::FirstPos>::default(), Of::<rank::JournalRing>::default());
    let other = Of::<rank::Orphans>::default();
    passes(|| {
        let _a = first.lock();
        let _b = ring.lock();
    });
    fails("against the order within the rank", || {
        let _b = ring.lock();
        let _a = first.lock();
    });
    fails("taken each by itself", || {
        let _a = first.lock();
        let _b = other.lock();
    });
}

#[test]
fn trying_is_never_wrong_and_counts() {
    let (a, b) = (Of::<rank::FileSync>::default(), Of::<rank::FileSync>::default());
    let (gate, cell) = (gate(0), cell(1));
    passes(|| {
        let _a = a.lock();
        let _b = b.try_lock().unwrap();
        let _c = cell.try_read().unwrap();
        let _d = cell.try_read().unwrap();
    });
    passes(|| {
        let _c = cell.try_write().unwrap();
        assert!(cell.try_read().is_none());
    });
    fails(RANKS, || {
        let _c = cell.try_read().unwrap();
        let _g = gate.read();
    });
    fails(SECOND, || {
        let _c = cell.try_read().unwrap();
        let _d = cell.read();
    });
}

#[test]
fn the_front_end_stands_above_and_devices_below_all() {
    let slot = Mutex::<u8, rank::ServingSlot>::new(0);
    let closed = Mutex::<u8, rank::Closing>::new(0);
    let grants = Mutex::<u8, rank::Grants>::new(0);
    let writers = Mutex::<u8, rank::WriterShard>::new(0);
    let background = Mutex::<u8, rank::Background>::new(0);
    let header = Mutex::<u8, rank::Header>::new(0);
    let frames = Mutex::<u8, rank::FreeFrames>::new(0);
    let log = device::Mutex::<u8, rank::RecordLog>::new(0);
    let chunk = device::RwLock::<u8, rank::MemoryChunk>::new(0);
    let mailbox = Mutex::<u8, rank::Mailbox>::new(0);
    passes(|| {
        let _closed = closed.lock();
        let (_slot, _grants, _header) = (slot.lock(), grants.lock(), header.lock());
        let (_frames, _log) = (frames.lock(), log.lock());
        drop(chunk.write());
        drop(mailbox.lock());
    });
    let wrong = "against the order of ranks";
    fails(wrong, || drop((background.lock(), grants.lock())));
    fails(wrong, || drop((grants.lock(), slot.lock())));
    fails("against the order within the rank", || drop((slot.lock(), closed.lock())));
    passes(|| drop((grants.lock(), writers.lock())));
    fails("against the order within the rank", || drop((writers.lock(), grants.lock())));
    fails(wrong, || drop((log.lock(), header.lock())));
    fails(wrong, || drop((chunk.read(), frames.lock())));
    fails(wrong, || drop((chunk.read(), log.lock())));
    fails("two of one rank", || drop((chunk.read(), mailbox.lock())));
}

#[test]
fn who_waits_for_a_condition_holds_the_lock_no_more() {
    let (flag, condition) = (Of::<rank::StopFlag>::default(), Condvar::new());
    passes(|| {
        let mut f = flag.lock();
        condition.wait_for(&mut f, Duration::from_millis(1));
        drop(f);
        drop(cell(1).read());
    });
    // taken again after the wait, when a leaf below it is held
    fails("taken each by itself", || {
        let mut f = flag.lock();
        let other = Of::<rank::Orphans>::default();
        let _o = other.try_lock().unwrap();
        condition.wait_for(&mut f, Duration::from_millis(1));
    });
}

#[test]
fn threads_have_lists_of_their_own() {
    let (gate, cell) = (gate(0), cell(1));
    let _c = cell.read();
    std::thread::scope(|s| {
        s.spawn(|| drop(gate.read()));
    });
}

/// In a release build ranks take no memory: the locks and guards are those of `parking_lot`.
#[test]
fn no_bytes_without_the_checker() {
    type Guards<'a> = [(usize, usize); 3];
    let sizes: Guards<'_> = [
        (size_of::<MutexGuard<'_, u64>>(), size_of::<parking_lot::MutexGuard<'_, u64>>()),
        (size_of::<RwLockReadGuard<'_, u64>>(), size_of::<parking_lot::RwLockReadGuard<'_, u64>>()),
        (size_of::<RwLockWriteGuard<'_, u64>>(), size_of::<parking_lot::RwLockWriteGuard<'_, u64>>()),
    ];
    assert!(sizes.iter().all(|(ours, theirs)| CHECKED || ours == theirs), "{sizes:?}");
    assert_eq!(size_of::<ProcessMutex<u64, rank::FramePool>>(), size_of::<parking_lot::Mutex<u64>>());
    assert_eq!(size_of::<Of<rank::Commit>>(), size_of::<parking_lot::Mutex<u8>>());
    let keyed = size_of::<RwLock<u64, rank::Cell>>() - size_of::<parking_lot::RwLock<u64>>();
    assert_eq!(keyed, if CHECKED { size_of::<<rank::Cell as Rank>::Key>() } else { 0 });
}
