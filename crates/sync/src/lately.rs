//! What threads did lately, in a list of each slot, and *rounds* that empty all lists into a common place where it is looked for.
//!
//! Who adds something moves no line of others. Who looks has a round made before, unless it can tell that nothing was added
//! that it asks for: [`Lately`] keeps, for things that one lock guards, the round in which one was added last and some
//! bits of their hashes. What is added and looked for with that lock held is found: a look that needs a round finds all
//! that was added before it, and waits for a round that is under way.
//!
//! Two pairs, each a store, a full fence, a look, on either side. Who adds puts the thing into its list, and then reads how many
//! rounds have begun and whether the mark of its kind is there; a round raises the number and takes all marks away, and then
//! looks which lists have something. So either the round finds the thing, or who added it knows of the round (and its
//! next look tells that the thing came after it) and renews the mark.
//!
//! `retain` may come at any moment and may miss what a round has in hand.

use crate::rank::Rank;
#[cfg(loom)]
use crate::rounds::loomed::Mutex;
use crate::slots::{Line, PerSlot};
#[cfg(loom)]
use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, fence};
use std::sync::atomic::Ordering::{self, AcqRel, Acquire, Relaxed, Release, SeqCst};
#[cfg(not(loom))]
use {
    crate::Mutex,
    std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, fence},
};

/// The memory for so many things stays with a list.
const LIST_MIN: usize = 64;

/// See the module. Lock ranks: `O` of a round, then `L` of a list.
#[cfg_attr(not(loom), derive(Debug))]
pub struct Lists<T, L: Rank<Key = ()>, O: Rank<Key = ()>> {
    lists: PerSlot<List<T, L>>,
    rounds: Line<Rounds<O>>,
    #[cfg(all(test, loom))]
    without: Option<Step>,
}

/// What the threads of one slot did lately.
#[cfg_attr(not(loom), derive(Debug))]
struct List<T, L: Rank<Key = ()>> {
    /// Whether there is anything.
    any: AtomicBool,
    things: Mutex<Vec<T>, L>,
}

/// Written by rounds only, but for the first mark of a kind after one.
#[cfg_attr(not(loom), derive(Debug))]
struct Rounds<O: Rank<Key = ()>> {
    /// Marks of what is in lists.
    marks: AtomicU64,
    /// Rounds that began.
    begun: AtomicU32,
    /// The last one that has ended.
    ended: AtomicU32,
    one: Mutex<(), O>,
}

/// What is known, under one lock, of things that were added lately with it held.
#[derive(Debug, Clone, Copy)]
pub struct Lately {
    /// The round that had begun when one was added last; [`UNKNOWN`] where there may be some of which nothing is known.
    round: u32,
    /// Bits of those that were added since.
    bits: u32,
}

/// [`Lately::round`].
const UNKNOWN: u32 = u32::MAX;

impl Lately {
    /// Of a lock that was not there before.
    pub const UNKNOWN: Self = Self { round: UNKNOWN, bits: 0 };

    /// One with `hash` was added when that round had begun ([`Lists::add`]).
    pub fn note(&mut self, hash: u64, round: u32) {
        if self.round == UNKNOWN {
            return;
        }
        if self.round != round {
            // a look waits for the end of that round, and what was added before it is in the common place then
            *self = Self { round, bits: 0 };
        }
        self.bits |= Self::bit(hash);
    }
    fn bit(hash: u64) -> u32 {
        1 << (hash >> 20 & 31)
    }
}

/// What models leave out of the protocol, to show that they would notice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// A thing is in its list before the list says that it has any.
    PutsBeforeItTells,
    /// Who adds does so before it reads the number of rounds and the marks.
    FenceOfWhoAdds,
    /// A round raises its number before it looks at lists.
    BeginsBeforeItLooks,
    /// It takes the marks away before it looks at lists.
    TakesMarksBeforeItLooks,
    /// What it raised and took away comes before its looks.
    FenceOfRounds,
    /// That a list is empty is said with the list locked.
    EmptyUnderLock,
    /// A round ends when all that it took is in its place.
    EndsAfterItPut,
    /// Who sees the end sees what was put there.
    EndReleases,
    /// Who sees that a mark is gone sees that a round took it.
    MarksTellOfRounds,
    /// Looks wait for a round that is under way.
    WaitsForRounds,
}

impl<T, L: Rank<Key = ()>, O: Rank<Key = ()>> Default for Lists<T, L, O> {
    fn default() -> Self {
        Self::with(crate::slots::count())
    }
}

impl<T, L: Rank<Key = ()>, O: Rank<Key = ()>> Lists<T, L, O> {
    fn with(slots: usize) -> Self {
        let list = |_| List { any: AtomicBool::new(false), things: Mutex::new(Vec::new()) };
        let rounds = Rounds {
            marks: AtomicU64::new(0),
            begun: AtomicU32::new(0),
            ended: AtomicU32::new(0),
            one: Mutex::new(()),
        };
        Self {
            lists: PerSlot::with(slots, list),
            rounds: Line(rounds),
            #[cfg(all(test, loom))]
            without: None,
        }
    }

    /// Always, but in models.
    #[inline(always)]
    fn does(&self, _step: Step) -> bool {
        #[cfg(all(test, loom))]
        return self.without != Some(_step);
        #[cfg(not(all(test, loom)))]
        true
    }
    #[inline(always)]
    fn order(&self, step: Step, order: Ordering) -> Ordering {
        if self.does(step) { order } else { Relaxed }
    }

    /// Adds a thing of a kind that has the bit `mark`; the round that had begun, for [`Lately::note`].
    pub fn add(&self, mark: u64, thing: T) -> u32 {
        self.add_to(self.lists.slot(), mark, thing)
    }

    fn add_to(&self, slot: usize, mark: u64, thing: T) -> u32 {
        let list = self.lists.part(slot);
        if !self.does(Step::PutsBeforeItTells) {
            list.any.store(true, Relaxed);
        }
        list.things.lock().push(thing);
        if self.does(Step::PutsBeforeItTells) {
            list.any.store(true, Relaxed);
        }
        // either a round that begins now finds the list, or this finds the round and what it took away
        if self.does(Step::FenceOfWhoAdds) {
            fence(SeqCst);
        }
        let rounds = &*self.rounds;
        let round = rounds.begun.load(Acquire);
        if rounds.marks.load(Relaxed) & mark == 0 {
            rounds.marks.fetch_or(mark, Release);
        }
        round
    }

    /// Sees to it that what was added of kinds with one of these marks is in the common place, where `put` puts it: all that was
    /// added under a lock that the caller has.
    pub fn merge(&self, marks: u64, put: impl FnMut(T)) {
        let rounds = &*self.rounds;
        let listed = rounds.marks.load(Acquire) & marks != 0;
        // the round that took the mark away has begun
        let under_way = || rounds.begun.load(Acquire) != rounds.ended.load(Acquire);
        if listed || self.does(Step::WaitsForRounds) && under_way() {
            self.round(put);
        }
    }

    /// [`Self::merge`] for one with `hash`, with the lock held that guards `lately`.
    pub fn merge_for(&self, marks: u64, hash: u64, lately: &mut Lately, put: impl FnMut(T)) {
        let rounds = &*self.rounds;
        let begun = rounds.begun.load(Acquire);
        if lately.round == UNKNOWN {
            self.merge(marks, put);
            *lately = Lately { round: begun, bits: 0 };
        } else if lately.bits & Lately::bit(hash) != 0 && lately.round == begun
            || self.does(Step::WaitsForRounds) && rounds.ended.load(Acquire) != begun
        {
            self.round(put);
        }
    }

    /// Empties all lists.
    #[cold]
    fn round(&self, mut put: impl FnMut(T)) {
        let rounds = &*self.rounds;
        let _one = rounds.one.lock();
        let round = rounds.begun.load(Relaxed).wrapping_add(1);
        let begin = || rounds.begun.store(round, Release);
        let take_marks = || _ = rounds.marks.swap(0, self.order(Step::MarksTellOfRounds, AcqRel));
        let end = || rounds.ended.store(round, self.order(Step::EndReleases, Release));
        if self.does(Step::BeginsBeforeItLooks) {
            begin();
        }
        if self.does(Step::TakesMarksBeforeItLooks) {
            take_marks();
        }
        if self.does(Step::FenceOfRounds) {
            fence(SeqCst);
        }
        if !self.does(Step::EndsAfterItPut) {
            end();
        }
        for list in self.lists.iter().filter(|l| l.any.load(Relaxed)) {
            let things = {
                let mut things = list.things.lock();
                if self.does(Step::EmptyUnderLock) {
                    list.any.store(false, Relaxed);
                }
                std::mem::take(&mut *things)
            };
            if !self.does(Step::EmptyUnderLock) {
                list.any.store(false, Relaxed);
            }
            things.into_iter().for_each(&mut put);
        }
        if !self.does(Step::TakesMarksBeforeItLooks) {
            take_marks();
        }
        if !self.does(Step::BeginsBeforeItLooks) {
            begin();
        }
        if self.does(Step::EndsAfterItPut) {
            end();
        }
    }

    /// Forgets what is not worth keeping and still in lists. What a round has in hand it may miss.
    pub fn retain(&self, mut keep: impl FnMut(&T) -> bool) {
        for list in self.lists.iter().filter(|l| l.any.load(Relaxed)) {
            let mut things = list.things.lock();
            things.retain(&mut keep);
            if things.capacity() > 4 * things.len().max(LIST_MIN) {
                let room = 2 * things.len();
                things.shrink_to(room);
            }
        }
    }
}

/// Marks of what a table has that a lock guards, perhaps the same for two kinds: most looks find nothing, and write nothing.
#[derive(Debug, Default)]
pub struct Marks(AtomicU64);

impl Marks {
    /// Whether the table may have something of a kind. Of what was added under a lock that the caller has it says so.
    pub fn has(&self, mark: u64) -> bool {
        self.0.load(Acquire) & mark != 0
    }
    /// Whether it has nothing.
    pub fn none(&self) -> bool {
        self.0.load(Acquire) == 0
    }
    /// The table, which the caller has locked, has something of a kind now.
    pub fn add(&self, mark: u64) {
        if !self.has(mark) {
            self.0.fetch_or(mark, Release);
        }
    }
    /// These are all marks of what the table, which the caller has locked, has now.
    pub fn are(&self, marks: u64) {
        self.0.store(marks, Release);
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use crate::rank::Unranked;
    use loom::sync::Arc;
    use loom::sync::Mutex as Lock;
    use loom::thread;

    /// The `n`th time that a name of a bucket was left.
    #[derive(Debug, Clone, Copy)]
    struct Left {
        bucket: usize,
        n: u32,
    }

    /// A bucket with one name: how often that was left, and what the bucket knows of it.
    struct Bucket {
        left: u32,
        lately: Lately,
    }

    /// One directory.
    struct Model {
        lists: Lists<Left, Unranked, Unranked>,
        buckets: [Lock<Bucket>; 2],
        /// As a part of the tables of the engine (`braid/vacated.rs`).
        table: Lock<Vec<Left>>,
        marks: Marks,
        /// What was left so often, or less often, is durable.
        durable: u32,
        /// The marks of the table are renewed without its lock.
        careless: bool,
    }

    /// Both buckets are of one directory.
    const DIR: u64 = 1;

    impl Model {
        fn put(&self, left: Left) {
            let mut table = self.table.lock().unwrap();
            table.push(left);
            self.marks.add(DIR);
        }
        /// As who takes a name: finds whoever left it last, unless that is durable.
        fn look(&self, bucket: usize, left: u32) {
            let all = if self.marks.has(DIR) { self.table.lock().unwrap().clone() } else { Vec::new() };
            let last = all.iter().filter(|l| l.bucket == bucket).map(|l| l.n).max().unwrap_or(0);
            assert!(
                last == left || left <= self.durable,
                "bucket {bucket} was left {left} times, the last seen is {last}"
            );
        }
        fn take(&self, bucket: usize) {
            let mut b = self.buckets[bucket].lock().unwrap();
            self.lists.merge_for(DIR, 0, &mut b.lately, |l| self.put(l));
            self.look(bucket, b.left);
        }
        fn leave(&self, slot: usize, bucket: usize) {
            let mut b = self.buckets[bucket].lock().unwrap();
            b.left += 1;
            let round = self.lists.add_to(slot, DIR, Left { bucket, n: b.left });
            b.lately.note(0, round);
        }
        /// By who has the directory for itself.
        fn take_alone(&self) {
            let buckets = self.buckets.each_ref().map(|b| b.lock().unwrap());
            self.lists.merge(DIR, |l| self.put(l));
            buckets.iter().enumerate().for_each(|(i, b)| self.look(i, b.left));
        }
        /// A commit.
        fn prune(&self) {
            let keep = |l: &Left| l.n > self.durable;
            let renew = |table: &[Left]| self.marks.are(if table.is_empty() { 0 } else { DIR });
            if !self.marks.none() {
                let mut table = self.table.lock().unwrap();
                table.retain(keep);
                if !self.careless {
                    renew(&table);
                } else {
                    let kept = table.clone();
                    drop(table);
                    renew(&kept);
                }
            }
            self.lists.retain(keep);
        }
        fn act(&self, slot: usize, op: u8) {
            match op {
                b'l' => self.leave(slot, 0),
                b'L' => self.leave(slot, 1),
                b't' => self.take(0),
                b'T' => self.take(1),
                b'd' => self.take_alone(),
                // as who looks in another directory
                b'r' => self.lists.round(|l| self.put(l)),
                _ => self.prune(),
            }
        }
    }

    struct Run {
        /// Before the threads begin.
        first: &'static [u8],
        threads: &'static [(usize, &'static [u8])],
        durable: u32,
        careless: bool,
    }

    /// Threads `l`eave the name of one bucket and `t`ake it (in capitals: the other one's), look with the `d`irectory for
    /// themselves, make a `r`ound for another one, and `c`ommit: each with its slot.
    fn run(run: Run, without: Option<Step>) {
        let mut b = loom::model::Builder::new();
        b.preemption_bound = Some(3);
        b.check(move || {
            let mut lists = Lists::with(2);
            lists.without = without;
            let bucket = || Lock::new(Bucket { left: 0, lately: Lately::UNKNOWN });
            let m = Arc::new(Model {
                lists,
                buckets: [bucket(), bucket()],
                table: Lock::new(Vec::new()),
                marks: Marks(AtomicU64::new(0)),
                durable: run.durable,
                careless: run.careless,
            });
            run.first.iter().for_each(|op| m.act(0, *op));
            let start = |(slot, ops): &(usize, &'static [u8])| {
                let (m, slot, ops) = (m.clone(), *slot, *ops);
                thread::spawn(move || ops.iter().for_each(|op| m.act(slot, *op)))
            };
            let threads: Vec<_> = run.threads.iter().map(start).collect();
            threads.into_iter().for_each(|t| t.join().unwrap());
            m.take(0);
            m.take_alone();
        });
    }

    fn plain(first: &'static [u8], threads: &'static [(usize, &'static [u8])], without: Option<Step>) {
        run(Run { first, threads, durable: 0, careless: false }, without);
    }

    #[test]
    fn who_takes_a_name_finds_who_left_it() {
        // both buckets know of a round
        plain(b"tT", &[(0, b"lt"), (1, b"LT")], None);
        plain(b"tTl", &[(0, b"tl"), (1, b"Lt")], None);
        plain(b"tTl", &[(1, b"tl"), (0, b"Lt")], None);
        plain(b"tT", &[(1, b"l"), (0, b"LTt")], None);
        plain(b"", &[(0, b"lt"), (1, b"tL")], None);
    }

    #[test]
    fn threads_of_one_slot() {
        plain(b"tT", &[(1, b"lt"), (1, b"LT")], None);
        plain(b"tTL", &[(1, b"l"), (1, b"Tt")], None);
    }

    #[test]
    fn three_threads() {
        plain(b"tTL", &[(1, b"l"), (0, b"T"), (0, b"t")], None);
        plain(b"TL", &[(1, b"l"), (0, b"T"), (0, b"d")], None);
        plain(b"tTL", &[(0, b"l"), (1, b"T"), (1, b"t")], None);
    }

    #[test]
    fn who_has_the_directory_for_itself_finds_all() {
        plain(b"tT", &[(0, b"lL"), (1, b"d")], None);
        plain(b"tTL", &[(0, b"l"), (1, b"Td")], None);
        plain(b"", &[(0, b"ld"), (1, b"Ld")], None);
        plain(b"l", &[(1, b"Ld"), (0, b"r")], None);
        plain(b"", &[(1, b"ll"), (0, b"rd")], None);
    }

    #[test]
    fn a_commit_forgets_only_what_is_durable() {
        let commit = |first, threads| run(Run { first, threads, durable: 1, careless: false }, None);
        commit(b"tl", &[(0, b"lt"), (1, b"c")]);
        commit(b"tTl", &[(0, b"lT"), (1, b"cd")]);
        commit(b"tTLl", &[(0, b"lT"), (1, b"ct")]);
        commit(b"tl", &[(0, b"lt"), (1, b"c"), (1, b"r")]);
    }

    #[test]
    #[should_panic(expected = "the last seen is")]
    fn a_commit_that_renews_marks_without_the_lock_is_seen() {
        run(Run { first: b"tld", threads: &[(0, b"ld"), (1, b"c")], durable: 1, careless: true }, None);
    }

    /// Each in a run that is right with it.
    fn seen_without(step: Step, first: &'static [u8], threads: &'static [(usize, &'static [u8])]) {
        plain(first, threads, None);
        let found = std::panic::catch_unwind(|| plain(first, threads, Some(step)));
        let text = found.err().and_then(|e| e.downcast::<String>().ok()).unwrap_or_default();
        assert!(text.contains("the last seen is"), "{step:?} left out, and nobody saw it: {text}");
    }

    #[test]
    fn a_step_that_is_left_out_is_seen() {
        seen_without(Step::PutsBeforeItTells, b"tTL", &[(1, b"l"), (0, b"Tt")]);
        seen_without(Step::FenceOfWhoAdds, b"tTL", &[(1, b"l"), (0, b"Tt")]);
        seen_without(Step::FenceOfRounds, b"tTL", &[(1, b"l"), (0, b"Tt")]);
        seen_without(Step::BeginsBeforeItLooks, b"tTL", &[(1, b"l"), (0, b"Tt")]);
        seen_without(Step::TakesMarksBeforeItLooks, b"tTL", &[(1, b"l"), (0, b"Td")]);
        seen_without(Step::EmptyUnderLock, b"tTL", &[(0, b"l"), (0, b"Tt")]);
        seen_without(Step::EndsAfterItPut, b"tTlL", &[(0, b"t"), (1, b"T")]);
        seen_without(Step::EndReleases, b"tTlL", &[(0, b"t"), (1, b"T")]);
        seen_without(Step::MarksTellOfRounds, b"l", &[(0, b"d"), (1, b"r")]);
        seen_without(Step::WaitsForRounds, b"tTlL", &[(0, b"t"), (1, b"T")]);
    }
}
