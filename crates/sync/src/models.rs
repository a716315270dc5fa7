//! Models under loom, which explores the orders in which threads run and in which their stores become visible.
//!
//! loom knows no order of all `SeqCst` accesses, only that of fences: `one_order.rs` makes those, and what publishes a place is run as on
//! processors without a locked exchange. The cells that `unsafe` blocks look into are loom's: it tells of two that use one at once.

#![allow(clippy::undocumented_unsafe_blocks, reason = "loom checks what they would have to promise")]

use crate::bias::{Bias, Readers};
use crate::doors::Doors;
use crate::pins::{Table, leave, leave_marked, set_mark};
use crate::published::{Line, before_looking};
use crate::rank;
use crate::rounds::{Lead, Rounds, Seen, Turn};
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering, Ordering::*};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

const LOCK: usize = 64;
/// A thread that reads nothing.
const COMMITTER: usize = 2;

/// A biased lock: the lock below is a mutex, which keeps writers and who counts turns apart.
struct Model {
    bias: Bias,
    lines: [Line; 2],
    below: Mutex<()>,
    value: UnsafeCell<(u32, u32)>,
    /// What has a lock of its own, besides.
    part: Mutex<()>,
    bucket: UnsafeCell<u32>,
    /// A bug on purpose: writers make no fence before they look.
    spares_fence: bool,
}

impl Model {
    /// As a reader: published where the lock is biased, else counted.
    fn together(&self, thread: usize, f: impl FnOnce()) {
        let line = &self.lines[thread];
        let number = thread as u32 + 1;
        if let Some(place) = self.bias.enter(number, || line.publish(LOCK), || line.publish_without_fence(LOCK)) {
            f();
            return place.clear();
        }
        let _below = self.below.lock().unwrap();
        f();
        // two reads by one thread make it the owner, two turns let all go past the lock
        if self.bias.is_last(number) { self.bias.own(number) } else { self.bias.turn(number, 2) }
    }
    /// Who may read, by a writer that has the lock below.
    fn readers(&self, writer: usize) -> Option<Readers> {
        let readers = self.bias.clear(|| writer as u32 + 1)?;
        if !self.spares_fence {
            readers.before_looking();
        }
        Some(readers)
    }
    fn lines_of(&self, readers: Readers) -> impl Iterator<Item = &Line> {
        self.lines.iter().enumerate().filter(move |(i, _)| readers.may_be(*i as u32 + 1)).map(|(_, l)| l)
    }
    fn alone(&self, writer: usize, f: impl FnOnce()) {
        let _below = self.below.lock().unwrap();
        for line in self.readers(writer).into_iter().flat_map(|r| self.lines_of(r)) {
            while line.has(LOCK) {
                thread::yield_now();
            }
        }
        f();
    }
    fn read(&self, thread: usize) {
        // loom tells where a writer is about
        self.together(thread, || self.value.with(|v| assert_eq!(unsafe { (*v).0 }, unsafe { (*v).1 })));
    }
    fn write(&self, thread: usize) {
        self.alone(thread, || self.change());
    }
    fn change(&self) {
        self.value.with_mut(|v| unsafe {
            (*v).0 += 1;
            (*v).1 += 1;
        });
    }
    /// As the lock of something that several threads change side by side: the mark stays.
    fn write_shared(&self, thread: usize) {
        self.alone(thread, || {
            self.change();
            self.bias.set();
        });
    }
    /// By who has it for reading, and a part of it, as a bucket, for writing.
    fn write_part(&self, thread: usize) {
        self.together(thread, || {
            let _part = self.part.lock().unwrap();
            self.bucket.with_mut(|v| unsafe { *v += 1 });
        });
    }
    /// A commit: who has it for writing takes no lock of a part.
    fn take_parts(&self) -> u32 {
        let mut had = 0;
        self.alone(COMMITTER, || {
            had = self.bucket.with_mut(|v| unsafe { std::mem::take(&mut *v) });
            self.bias.set();
        });
        had
    }
}

fn model() -> Model {
    let m = Model {
        bias: Bias::new(),
        lines: [Line::new(), Line::new()],
        below: Mutex::new(()),
        value: UnsafeCell::new((0, 0)),
        part: Mutex::new(()),
        bucket: UnsafeCell::new(0),
        spares_fence: false,
    };
    m.bias.set();
    m
}

// Two threads do these, each by its number and a letter.
fn both<T: 'static>(shared: &Arc<T>, ops: [&'static [u8]; 2], act: fn(&T, usize, u8)) {
    let start = |(i, ops): (usize, &'static [u8])| {
        let shared = shared.clone();
        thread::spawn(move || ops.iter().for_each(|op| act(&shared, i, *op)))
    };
    let threads = ops.into_iter().enumerate().map(start).collect::<Vec<_>>();
    threads.into_iter().for_each(|t| t.join().unwrap());
}

/// One that the first thread owns.
fn owned() -> Model {
    let m = Model { bias: Bias::new(), ..model() };
    m.read(0);
    m.read(0);
    assert_eq!(m.bias.owner(), Some(1));
    m
}

// What each thread does with it.
fn run_on(model: fn() -> Model, one: &'static [u8], other: &'static [u8]) {
    check(move || {
        both(&Arc::new(model()), [one, other], |m, i, op| match op {
            b'r' => m.read(i),
            b's' => m.write_shared(i),
            _ => m.write(i),
        });
    });
}

// With the mark for all readers set at first.
fn run(one: &'static [u8], other: &'static [u8]) {
    run_on(model, one, other);
}

#[test]
fn a_writer_sees_the_owner() {
    run_on(owned, b"rr", b"w");
    run_on(owned, b"r", b"ww");
    run_on(owned, b"rw", b"w");
    run_on(owned, b"wr", b"rw");
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_writer_that_spares_the_fence_is_seen() {
    run_on(|| Model { spares_fence: true, ..owned() }, b"rr", b"w");
}

#[test]
fn another_reader_ends_what_the_owner_may_and_a_writer_sees_both() {
    run_on(owned, b"rr", b"rw");
    run_on(owned, b"r", b"rrw");
    run_on(owned, b"rw", b"rr");
}

#[test]
fn another_thread_becomes_the_owner_after_a_write() {
    run_on(owned, b"rr", b"wrrr");
    // the second write looks at the lines of the new owner alone
    run_on(owned, b"r", b"wrrw");
    run_on(owned, b"rwr", b"wrr");
}

#[test]
fn a_writer_sees_published_readers() {
    run(b"rr", b"w");
    run(b"r", b"ww");
}

#[test]
fn a_mark_that_a_writer_leaves_lets_readers_see_what_it_wrote() {
    run(b"rr", b"s");
    run(b"r", b"ss");
    run(b"sr", b"wr");
}

/// Two threads change a bucket of a directory that they have locked for reading; a commit takes it between, before or after.
#[test]
fn a_commit_takes_each_change_of_a_bucket_once() {
    check(|| {
        let m = Arc::new(model());
        let threads: Vec<_> = (0..2)
            .map(|i| {
                let m = m.clone();
                thread::spawn(move || m.write_part(i))
            })
            .collect();
        let first = m.take_parts();
        threads.into_iter().for_each(|t| t.join().unwrap());
        assert_eq!(first + m.take_parts(), 2);
    });
}

#[test]
fn readers_after_a_new_mark_see_what_was_written() {
    run(b"rwr", b"rr");
}

fn check(f: impl Fn() + Send + Sync + 'static) {
    let mut b = loom::model::Builder::new();
    b.preemption_bound = Some(3);
    b.check(f);
}

/// An object is freed by who takes it out of its place where nobody looks at it, and read by who looks.
#[test]
fn what_is_looked_at_is_not_freed() {
    const OBJECT: usize = 128;
    check(|| {
        let place = Arc::new(AtomicUsize::new(OBJECT));
        let line = Arc::new(Line::new());
        let object = Arc::new(UnsafeCell::new(1));
        let reader = {
            let (place, line, object) = (place.clone(), line.clone(), object.clone());
            thread::spawn(move || {
                for _ in 0..2 {
                    let found = place.load(Acquire);
                    if found == 0 {
                        return;
                    }
                    let mine = line.publish(found).unwrap();
                    if place.load(Acquire) == found {
                        object.with(|o| assert_eq!(unsafe { *o }, 1));
                    }
                    mine.clear();
                }
            })
        };
        place.store(0, SeqCst);
        before_looking();
        if !line.has(OBJECT) {
            object.with_mut(|o| unsafe { *o = 0 });
        }
        reader.join().unwrap();
    });
}

/// A file that is opened and closed while its last name goes: it ends once, by who took the name or by the last who closes.
#[test]
fn the_end_of_an_inode_is_seen_by_one() {
    use crate::one_order::{AtomicBool, AtomicU32, fence};
    const INODE: u64 = 256;
    struct File {
        nameless: AtomicBool,
        opens: AtomicU32,
        tables: [Table; 2],
        ended: Mutex<bool>,
    }
    impl File {
        fn pinned(&self, mut found: impl FnMut(&crate::pins::Entry) -> bool) -> bool {
            before_looking();
            self.tables.iter().filter_map(|t| t.find(INODE)).fold(false, |any, e| found(e) | any)
        }
        /// As `reap`: under a lock, which is that of the cell.
        fn end_if_closed(&self) {
            let mut ended = self.ended.lock().unwrap();
            if !self.pinned(|_| true) && self.opens.load(SeqCst) == 0 {
                *ended = true;
            }
        }
        fn open_and_close(&self, thread: usize) {
            let e = self.tables[thread].pin(INODE).unwrap();
            if !self.nameless.load(SeqCst) {
                assert!(!*self.ended.lock().unwrap(), "open, and has a name: not ended");
                if !leave(e) {
                    leave_marked(e);
                    self.end_if_closed();
                }
                return;
            }
            self.opens.fetch_add(1, SeqCst);
            if !leave(e) {
                leave_marked(e);
            }
            fence(SeqCst);
            if self.opens.fetch_sub(1, SeqCst) == 1 {
                self.end_if_closed();
            }
        }
        fn unlink(&self) {
            let mut ended = self.ended.lock().unwrap();
            self.nameless.store(true, SeqCst);
            let open = self.pinned(|e| set_mark(e, INODE)) | (self.opens.load(SeqCst) > 0);
            if !open {
                *ended = true;
            }
        }
    }
    check(|| {
        let file = Arc::new(File {
            nameless: AtomicBool::new(false),
            opens: AtomicU32::new(0),
            tables: [Table::new(), Table::new()],
            ended: Mutex::new(false),
        });
        let threads: Vec<_> = (0..2)
            .map(|i| {
                let file = file.clone();
                thread::spawn(move || file.open_and_close(i))
            })
            .collect();
        file.unlink();
        threads.into_iter().for_each(|t| t.join().unwrap());
        assert!(*file.ended.lock().unwrap(), "nobody ended it");
    });
}

/// A reader that goes on to another lock at once: its line has that one's address when the writer looks.
#[test]
fn a_reader_goes_on_to_another_lock() {
    const OTHER: usize = 512;
    check(|| {
        let m = Arc::new(model());
        let reader = {
            let m = m.clone();
            thread::spawn(move || {
                m.read(0);
                // one that nobody writes
                if let Some(place) = m.lines[0].publish(OTHER) {
                    place.clear();
                }
            })
        };
        m.write(COMMITTER);
        reader.join().unwrap();
    });
}

/// Who only tries to write gives up where somebody reads, and leaves the mark.
#[test]
fn who_tries_to_write_leaves_readers_alone() {
    tries_to_write(model);
    tries_to_write(owned);
}

fn tries_to_write(model: fn() -> Model) {
    check(move || {
        let m = Arc::new(model());
        let reader = {
            let m = m.clone();
            thread::spawn(move || {
                m.read(0);
                m.read(0);
            })
        };
        {
            let _below = m.below.lock().unwrap();
            match m.readers(COMMITTER) {
                Some(readers) if m.lines_of(readers).any(|l| l.has(LOCK)) => m.bias.restore(readers),
                _ => m.change(),
            }
        }
        m.write(COMMITTER);
        reader.join().unwrap();
    });
}

/// A file that several threads overwrite: who writes and who reads has its cell for reading, and takes the lock of a page
/// that is dirty; a commit, and who dirties the page again, has the cell alone.
struct File {
    cell: Model,
    dirty: UnsafeCell<bool>,
    page: Mutex<()>,
    bytes: UnsafeCell<(u32, u32)>,
    /// What the last commit took.
    taken: UnsafeCell<u32>,
}

impl File {
    fn alone(&self, f: impl FnOnce(&mut bool, &UnsafeCell<(u32, u32)>)) {
        self.cell.alone(COMMITTER, || self.dirty.with_mut(|d| f(unsafe { &mut *d }, &self.bytes)));
    }
    fn together(&self, thread: usize, f: impl FnOnce(bool)) {
        self.cell.together(thread, || f(self.dirty.with(|d| unsafe { *d })));
    }
    fn add(bytes: &UnsafeCell<(u32, u32)>) {
        bytes.with_mut(|b| unsafe {
            (*b).0 += 1;
            (*b).1 += 1;
        });
    }
    fn write(&self, thread: usize) {
        let mut done = false;
        self.together(thread, |dirty| {
            if dirty {
                let _page = self.page.lock().unwrap();
                Self::add(&self.bytes);
                done = true;
            }
        });
        if !done {
            self.alone(|dirty, bytes| {
                *dirty = true;
                Self::add(bytes);
            });
        }
    }
    fn look(&self) {
        self.bytes.with(|b| assert_eq!(unsafe { (*b).0 }, unsafe { (*b).1 }));
    }
    /// `locks`: as it must; else as a reader that does not know of writers.
    fn read(&self, thread: usize, locks: bool) {
        self.together(thread, |dirty| {
            let _page = (dirty && locks).then(|| self.page.lock().unwrap());
            self.look();
        });
    }
    fn commit(&self) {
        self.alone(|dirty, bytes| {
            self.look();
            let now = bytes.with(|b| unsafe { (*b).0 });
            self.taken.with_mut(|t| unsafe { *t = now });
            *dirty = false;
        });
    }
}

// `w`rite, `r`ead, a `c`areless read, `C`ommit, of two threads on a dirty page.
fn overwrite(one: &'static [u8], other: &'static [u8]) {
    check(move || {
        let file = File {
            cell: model(),
            dirty: UnsafeCell::new(true),
            page: Mutex::new(()),
            bytes: UnsafeCell::new((0, 0)),
            taken: UnsafeCell::new(0),
        };
        let file = Arc::new(file);
        both(&file, [one, other], |file, i, op| match op {
            b'w' => file.write(i),
            b'C' => file.commit(),
            _ => file.read(i, op == b'r'),
        });
        let writes = [one, other].concat().iter().filter(|op| **op == b'w').count() as u32;
        file.alone(|dirty, bytes| {
            let (all, taken) = (bytes.with(|b| unsafe { (*b).0 }), file.taken.with(|t| unsafe { *t }));
            assert_eq!(all, writes, "a write is gone");
            assert!(*dirty || taken == all, "a clean page is what the commit took");
        });
    });
}

#[test]
fn a_page_is_overwritten_by_one_at_a_time() {
    overwrite(b"ww", b"wr");
    overwrite(b"wr", b"rw");
}

#[test]
fn a_commit_takes_whole_writes() {
    overwrite(b"wr", b"Cw");
    overwrite(b"wC", b"wr");
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_reader_that_takes_no_lock_of_a_dirty_page_is_seen() {
    overwrite(b"w", b"c");
}

/// Commits as of a domain: a change goes into the running round, who waits for a round leads it, helps or sleeps.
struct Commits {
    rounds: Rounds<Arc<Shared>, rank::Work>,
    /// The running round, and what changed in it.
    running: Mutex<(u64, u32)>,
    /// Rounds that are over, and what they made durable.
    committed: AtomicUsize,
    durable: AtomicUsize,
    failed: AtomicBool,
    /// Rounds with this number and later ones fail.
    fails_from: u64,
    /// Something else fails while this round ends, which is over all the same.
    fails_beside: u64,
    /// The leader lets go of the lead before the round counts as over.
    careless: bool,
}

/// What helpers share of a round.
struct Shared {
    /// Changes left, and who is at one.
    left: Mutex<(u32, u32)>,
    idle: Condvar,
    done: AtomicUsize,
}

impl Shared {
    /// Does what `Domain::help` does.
    fn help(&self) {
        loop {
            {
                let mut left = self.left.lock().unwrap();
                if left.0 == 0 {
                    return;
                }
                *left = (left.0 - 1, left.1 + 1);
            }
            self.done.fetch_add(1, Relaxed);
            self.left.lock().unwrap().1 -= 1;
            self.idle.notify_one();
        }
    }
}

impl Commits {
    fn over(&self, round: u64) -> bool {
        self.committed.load(Acquire) as u64 >= round || self.failed.load(Acquire)
    }
    /// Changes something and waits until that is durable; false where it failed.
    fn change_and_commit(&self) -> bool {
        let round = {
            let mut running = self.running.lock().unwrap();
            running.1 += 1;
            running.0
        };
        self.commit(round)
    }
    /// Waits for the running round, with no change of its own in it: there may be none at all.
    fn only_commit(&self) -> bool {
        let round = self.running.lock().unwrap().0;
        self.commit(round)
    }
    fn commit(&self, round: u64) -> bool {
        let mut seen = Seen::default();
        loop {
            match self.rounds.turn(round, &mut seen, || self.over(round)) {
                Turn::Over => return self.committed.load(Acquire) as u64 >= round,
                Turn::Help(work) => work.help(),
                Turn::Lead(lead) => {
                    if self.lead(lead) {
                        return true;
                    }
                }
            }
        }
    }
    /// Whether there was nothing to do.
    fn lead(&self, lead: Lead<'_, Arc<Shared>, rank::Work>) -> bool {
        let (round, changes) = {
            let mut running = self.running.lock().unwrap();
            let (round, changes) = *running;
            if changes == 0 {
                drop(running);
                assert!(self.over(round - 1), "a round was begun before the one before it was over");
                lead.nothing_to_do();
                return true;
            }
            *running = (round + 1, 0);
            (round, changes)
        };
        let work = Arc::new(Shared { left: Mutex::new((changes, 0)), idle: Condvar::new(), done: AtomicUsize::new(0) });
        lead.share(round, work.clone(), 1);
        work.help();
        lead.take_back();
        let mut left = work.left.lock().unwrap();
        while left.1 > 0 {
            left = work.idle.wait(left).unwrap();
        }
        drop(left);
        if round >= self.fails_from {
            self.failed.store(true, Release);
            return false;
        }
        if self.careless {
            lead.finish(round);
            self.committed.store(round as usize, Release);
            return false;
        }
        self.durable.fetch_add(work.done.load(Relaxed), Relaxed);
        self.committed.store(round as usize, Release);
        if round == self.fails_beside {
            self.failed.store(true, Release);
        }
        lead.finish(round);
        false
    }
    fn new(fails_from: u64, fails_beside: u64, careless: bool) -> Self {
        Self {
            rounds: Rounds::default(),
            running: Mutex::new((1, 0)),
            committed: AtomicUsize::new(0),
            durable: AtomicUsize::new(0),
            failed: AtomicBool::new(false),
            fails_from,
            fails_beside,
            careless,
        }
    }
}

/// Threads that each change something and wait until it is durable, so many times.
fn commits(threads: usize, times: usize, fails_from: u64, careless: bool) {
    let mut b = loom::model::Builder::new();
    b.preemption_bound = Some(2);
    b.check(move || {
        let c = Arc::new(Commits::new(fails_from, u64::MAX, careless));
        let act = move |c: &Commits| (0..times).filter(|_| c.change_and_commit()).count();
        let start = |_| {
            let c = c.clone();
            thread::spawn(move || act(&c))
        };
        let others: Vec<_> = (1..threads).map(start).collect();
        let durable = act(&c) + others.into_iter().map(|t| t.join().unwrap()).sum::<usize>();
        if fails_from < u64::MAX {
            assert!(durable < threads * times);
        } else if !careless {
            assert_eq!((durable, c.durable.load(Relaxed)), (threads * times, threads * times));
        }
    });
}

/// loom tells of threads of which none can go on.
#[test]
fn who_waits_for_a_round_is_woken() {
    commits(2, 2, u64::MAX, false);
    commits(3, 1, u64::MAX, false);
}

#[test]
fn a_round_that_fails_wakes_all() {
    commits(3, 1, 1, false);
    commits(2, 2, 2, false);
}

/// So many threads that change something, and so many that only wait for the running round; while the first round ends
/// something fails, or not.
fn waits(changing: usize, only: usize, fails_beside: u64) {
    let mut b = loom::model::Builder::new();
    b.preemption_bound = Some(2);
    b.check(move || {
        let c = Arc::new(Commits::new(u64::MAX, fails_beside, false));
        let start = |i| {
            let c = c.clone();
            thread::spawn(move || if i < changing { c.change_and_commit() } else { c.only_commit() })
        };
        let others: Vec<_> = (1..changing + only).map(start).collect();
        let first = c.change_and_commit();
        let done = others.into_iter().fold(first, |done, t| t.join().unwrap() & done);
        assert!(done || fails_beside < u64::MAX);
    });
}

/// Whoever finds that there was nothing to do lets the next one look.
#[test]
fn who_only_waits_for_the_running_round_is_woken() {
    waits(1, 2, u64::MAX);
    waits(2, 1, u64::MAX);
}

/// The one that the end of a round wakes to lead the next has nothing more to do then: the others must hear of it.
#[test]
fn what_fails_beside_a_round_wakes_all() {
    waits(3, 0, 1);
    waits(1, 2, 1);
}

#[test]
#[should_panic(expected = "before the one before it was over")]
fn a_leader_that_lets_go_too_early_is_seen() {
    commits(3, 1, u64::MAX, true);
}

/// A domain's gate and two transactions: operations put things into lists of their slots inside the gate; the flip, which keeps
/// them out, names the next transaction, and the committer gathers the parts of the one before.
struct Domain {
    gate: Doors,
    /// Guarded by the gate.
    running: UnsafeCell<usize>,
    transactions: [[Part; 2]; 2],
}

/// What threads of one slot put into a transaction.
struct Part {
    changed: AtomicBool,
    list: Mutex<Vec<u32>>,
    /// Blocks that are reserved.
    credits: AtomicU32,
    /// Writes of its data that are under way.
    io: AtomicU32,
    /// What such writes do, outside of the gate.
    written: UnsafeCell<u32>,
}

/// What goes wrong on purpose.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Wrong {
    Nothing,
    /// The flip does not look at the first slot.
    MissesASlot,
    /// An operation leaves the gate, and puts something into its list then.
    AddsOutside,
    /// A write of data says that it is done before it is.
    EndsEarly,
    /// Who sees that a write is done does not see what it did.
    EndIsRelaxed,
}

impl Part {
    fn new() -> Self {
        Self {
            changed: AtomicBool::new(false),
            list: Mutex::new(Vec::new()),
            credits: AtomicU32::new(0),
            io: AtomicU32::new(0),
            written: UnsafeCell::new(0),
        }
    }
    fn add(&self, thing: u32) {
        self.changed.store(true, Relaxed);
        self.list.lock().unwrap().push(thing);
        self.credits.fetch_add(1, Relaxed);
    }
}

impl Domain {
    /// An operation, where the gate is open: adds to its lists, and writes data when it has left. Of which transaction it is.
    fn operate(&self, slot: usize, wrong: Wrong) -> Option<usize> {
        if !self.gate.enter(slot) {
            self.gate.leave(slot);
            return None;
        }
        let tx = self.running.with(|r| unsafe { *r });
        let part = &self.transactions[tx][slot];
        if wrong != Wrong::AddsOutside {
            part.add(slot as u32);
        }
        part.io.fetch_add(1, Relaxed);
        self.gate.leave(slot);
        if wrong == Wrong::AddsOutside {
            part.add(slot as u32);
        }
        let write = || part.written.with_mut(|w| unsafe { *w += 1 });
        if wrong != Wrong::EndsEarly {
            write();
        }
        part.io.fetch_sub(1, if wrong == Wrong::EndIsRelaxed { Relaxed } else { Release });
        if wrong == Wrong::EndsEarly {
            write();
        }
        Some(tx)
    }

    /// The flip of the first transaction, and what its committer finds: how many things, and reservations.
    fn commit(&self, wrong: Wrong) -> (usize, u32) {
        self.gate.close();
        let mut slot = usize::from(wrong == Wrong::MissesASlot);
        while let Some(taken) = self.gate.first_inside(slot) {
            slot = taken;
            thread::yield_now();
        }
        self.running.with_mut(|r| unsafe { *r = 1 });
        let parts = &self.transactions[0];
        let credits = parts.iter().map(|p| p.credits.load(Relaxed)).sum();
        self.gate.open();
        // beside operations of the next one
        let changed = parts.iter().any(|p| p.changed.load(Relaxed));
        let found: usize = parts.iter().map(|p| std::mem::take(&mut *p.list.lock().unwrap()).len()).sum();
        assert!(changed || found == 0, "a transaction with changes that says it has none");
        let mut written = 0;
        for part in parts {
            while part.io.load(Acquire) > 0 {
                thread::yield_now();
            }
            written += part.written.with(|w| unsafe { *w }) as usize;
        }
        assert_eq!(written, found, "data that is not written");
        (found, credits)
    }
}

/// Two operations beside a commit, which finds what those of its transaction put in, and no more.
fn flip(wrong: Wrong) {
    let mut b = loom::model::Builder::new();
    b.preemption_bound = Some(2);
    b.check(move || {
        let parts = || [Part::new(), Part::new()];
        let d = Arc::new(Domain { gate: Doors::new(2), running: UnsafeCell::new(0), transactions: [parts(), parts()] });
        let start = |slot| {
            let d = d.clone();
            thread::spawn(move || d.operate(slot, wrong))
        };
        let operations: Vec<_> = (0..2).map(start).collect();
        let (found, credits) = d.commit(wrong);
        let of: Vec<_> = operations.into_iter().filter_map(|o| o.join().unwrap()).collect();
        let first = of.iter().filter(|tx| **tx == 0).count();
        assert_eq!((found, credits as usize), (first, first), "a part was missed");
        let next: usize = d.transactions[1].iter().map(|p| p.list.lock().unwrap().len()).sum();
        assert_eq!(next, of.len() - first);
    });
}

#[test]
fn a_commit_finds_what_operations_of_its_transaction_put_in() {
    flip(Wrong::Nothing);
}

#[test]
fn a_flip_that_goes_wrong_is_seen() {
    for wrong in [Wrong::MissesASlot, Wrong::AddsOutside, Wrong::EndsEarly, Wrong::EndIsRelaxed] {
        assert!(std::panic::catch_unwind(|| flip(wrong)).is_err(), "{wrong:?} was not seen");
    }
}

/// What threads that change one directory side by side say of it, in a part of each, and a look at the sum: who sees a change
/// sees what else the part says of it.
fn sums(counts_last: Ordering) {
    check(move || {
        struct Sums {
            changes: AtomicU32,
            entries: AtomicU32,
        }
        let parts: Arc<[Sums; 2]> =
            Arc::new([(); 2].map(|()| Sums { changes: AtomicU32::new(0), entries: AtomicU32::new(0) }));
        let start = |slot: usize| {
            let parts = parts.clone();
            thread::spawn(move || {
                for _ in 0..2 {
                    parts[slot].entries.fetch_add(1, Relaxed);
                    parts[slot].changes.fetch_add(1, counts_last);
                }
            })
        };
        let threads: Vec<_> = (0..2).map(start).collect();
        for part in parts.iter() {
            let changes = part.changes.load(Acquire);
            assert!(part.entries.load(Relaxed) >= changes, "a change of which not all is seen");
        }
        threads.into_iter().for_each(|t| t.join().unwrap());
    });
}

#[test]
fn who_sees_a_change_of_a_directory_sees_all_of_it() {
    sums(Release);
}

#[test]
#[should_panic(expected = "not all is seen")]
fn a_part_that_counts_without_order_is_seen() {
    sums(Relaxed);
}
