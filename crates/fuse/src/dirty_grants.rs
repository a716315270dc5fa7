//! What the kernel may hold dirty in domains with little room, where it tells of no opens: what writers asked for.
//!
//! Nobody knows which files are open for writing. But in such a domain the kernel asks before each `write`
//! ([`crate::room`]). So it is known how much was granted, to which files, and to which threads, each of which is in one
//! `write` at a time. What was granted counts until the kernel has written the file back; a thread that was told to go on
//! and has not stored its bytes by then is *in flight*, and its grant, and its file, stay for the next time. A thread that
//! asks again, or is seen in another call than it asked in, has stored them.
//!
//! One lock for the whole mount: what one domain can claim another one can, too. It is taken only where there is little
//! room. Nobody looks what threads do under it ([`crate::looks`]).

use crate::looks::Looks;
use crate::node::WireId;
use crate::requester::{self, Call, Doing, Seen};
use braidfs::InodeNo;
use braidfs_sync::{Mutex, rank};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// So long after it was told to go on a `write` is taken to be under way, whose thread is not seen.
pub(crate) const LATELY: Duration = Duration::from_secs(2);
/// The same of a thread that runs, and may be in the midst of it: a long one waits for memory at times, and is seen to write then.
const RUNNING: Duration = Duration::from_secs(10);
/// So long what was found as the kernel had written back is good for others that wait, at least and at most: as long as it took.
const GOOD: [Duration; 2] = [Duration::from_micros(500), Duration::from_millis(20)];
/// Writers that are gone are forgotten when there are so many, and twice as many as stayed the last time.
const MANY: usize = 1024;

/// Who asks to write, and to which file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asker {
    pub id: WireId,
    /// 0: it is not known.
    pub thread: u32,
    /// The call that it asks in, where somebody looked.
    pub call: Option<Call>,
}

#[derive(Debug)]
struct Writer {
    id: WireId,
    call: Option<Call>,
    /// What it may take.
    blocks: u64,
    /// It is seen to write past the cache: what it does not take so the kernel does not hold.
    past_cache: bool,
    /// Another process told of it, which does not tell the call.
    handed: bool,
    told: Instant,
}

impl Writer {
    /// Whether it was granted for this file in this call.
    fn is_of(&self, id: WireId, call: Option<Call>) -> bool {
        self.id == id && (self.handed || self.call == call)
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct DirtyGrants(Mutex<Ledger, rank::Grants>);

#[derive(Debug, Default)]
struct Ledger {
    /// Blocks that the kernel may hold, or be about to hold, of what was granted here.
    granted: u64,
    /// Blocks that requests which are not written through the cache are taking: what they have by then counts twice.
    taking: u64,
    /// Files that have some of them.
    promised: HashMap<u64, WireId>,
    /// By thread; of an unknown one by [`NAMELESS`] and the inode.
    writers: HashMap<u64, Writer>,
    /// [`MANY`], or more.
    look_at: usize,
    /// What those did that were in flight at the last writing back, when that began, and until when it is good.
    last: Option<(InFlight, Instant, Instant)>,
}

/// What was granted and is not written back.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Left {
    /// Granted since the writing back began, or in flight.
    pub blocks: u64,
    /// Some of it to threads that are not seen, and are taken to write for [`LATELY`].
    pub unseen: bool,
    /// Some of it to threads that are seen to write, or to run: in time they are not in the way.
    pub writing: bool,
}

impl Left {
    /// The more of two, of different owners.
    pub fn or(self, other: Self) -> Self {
        Self {
            blocks: self.blocks.max(other.blocks),
            unseen: self.unseen | other.unseen,
            writing: self.writing | other.writing,
        }
    }
}

/// What those do that are in flight: see [`Left`].
#[derive(Debug, Clone, Copy, Default)]
struct InFlight {
    unseen: bool,
    writing: bool,
}

/// A writing back that has begun.
#[derive(Debug)]
#[must_use]
pub(crate) struct WritingBack {
    /// The files to write back.
    pub files: Vec<WireId>,
    /// What is no longer held when that is done.
    blocks: u64,
    in_flight: InFlight,
    begun: Instant,
}

/// Not a thread.
const NAMELESS: u64 = 1 << 63;

impl Asker {
    /// The key of the thread.
    fn key(&self) -> u64 {
        if self.thread == 0 { NAMELESS | self.id.ino().0 } else { self.thread.into() }
    }
}

/// What one process tells the next of it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct HandedGrants {
    granted: u64,
    /// Of files, what the kernel calls them.
    promised: Vec<u64>,
    /// Key, what the kernel calls the file, blocks.
    writers: Vec<(u64, u64, u64)>,
}

impl HandedGrants {
    /// Nothing is granted.
    pub fn is_empty(&self) -> bool {
        self.granted == 0 && self.writers.is_empty()
    }
}

impl DirtyGrants {
    /// For another process.
    pub fn handed(&self) -> HandedGrants {
        let l = self.0.lock();
        HandedGrants {
            granted: l.granted,
            promised: l.promised.values().map(|id| id.0).collect(),
            writers: l.writers.iter().map(|(key, w)| (*key, w.id.0, w.blocks)).collect(),
        }
    }

    /// As it was in another process; the writers count as told just now.
    pub fn of_handed(handed: &HandedGrants) -> Self {
        let told = Instant::now();
        let writer = |&(key, id, blocks): &(u64, u64, u64)| {
            (key, Writer { id: WireId(id), call: None, blocks, past_cache: false, handed: true, told })
        };
        Self(Mutex::new(Ledger {
            granted: handed.granted,
            taking: 0,
            promised: handed.promised.iter().map(|id| (WireId(*id).ino().0, WireId(*id))).collect(),
            writers: handed.writers.iter().map(writer).collect(),
            look_at: MANY,
            last: None,
        }))
    }

    /// A thread asks to write so many blocks: grants them where they fit into `room` beside all that is granted. The room is
    /// looked at under the lock: else what was written back in between would count neither here nor there. So does `tell`, which
    /// is told how much is granted then.
    pub fn grant(&self, asker: Asker, blocks: u64, room: impl FnOnce() -> u64, tell: impl FnOnce(u64)) -> bool {
        self.grant_of(u64::MAX, asker, blocks, room, tell)
    }

    /// [`Self::grant`], where it makes no more than `most` blocks that are granted, or all of them.
    pub fn grant_of(
        &self,
        most: u64,
        asker: Asker,
        blocks: u64,
        room: impl FnOnce() -> u64,
        tell: impl FnOnce(u64),
    ) -> bool {
        let mut l = self.0.lock();
        let Asker { id, call, .. } = asker;
        if let Some(before) = l.writers.remove(&asker.key()).filter(|w| w.past_cache) {
            l.granted = l.granted.saturating_sub(before.blocks);
        }
        if l.writers.len() >= l.look_at.max(MANY) {
            l.forget_gone();
            l.look_at = 2 * l.writers.len();
        }
        let (before, taking) = (l.granted, l.taking);
        let few = |granted: &u64| before == 0 || *granted <= most;
        let granted = before.checked_add(blocks).filter(few).filter(|g| room() >= g.saturating_add(taking));
        tell(granted.unwrap_or(l.granted));
        let Some(granted) = granted else { return false };
        l.granted = granted;
        l.promised.insert(id.ino().0, id);
        l.writers
            .insert(asker.key(), Writer { id, call, blocks, past_cache: false, handed: false, told: Instant::now() });
        true
    }

    /// A request is about to take so many blocks past the cache: they are counted until [`Self::has_taken`], where they fit into
    /// `room` beside what is granted, or nothing is, so that who counts them knows better. `of`: the thread and its call, where the
    /// kernel has asked before that: of what was granted then they are taken now, and not by the cache. The call may have more
    /// requests under way at once, which have the rest. How many of them were granted to the call, for [`Self::take_less`].
    pub fn take(&self, of: Option<Asker>, blocks: u64, room: impl FnOnce() -> u64) -> Option<u64> {
        let mut l = self.0.lock();
        let key = of.filter(|of| of.thread != 0).map(|of| of.key());
        let writer = key.and_then(|key| l.writers.get(&key)).filter(|w| of.is_some_and(|of| w.is_of(of.id, of.call)));
        let own = writer.map_or(0, |w| w.blocks.min(blocks));
        let (granted, taking) = (l.granted.saturating_sub(own), l.taking.saturating_add(blocks));
        // what it was granted whole had room then, and some of that may be taken by now
        let fits = own == blocks || granted == 0 || room() >= granted.saturating_add(taking);
        if fits {
            (l.granted, l.taking) = (granted, taking);
            if let Some(writer) = key.filter(|_| own > 0).and_then(|key| l.writers.get_mut(&key)) {
                writer.blocks -= own;
                writer.past_cache = true;
            }
        }
        fits.then_some(own)
    }

    /// A request that [took](Self::take) these blocks, of which so many were its call's `own`, does not take them.
    pub fn take_less(&self, of: Option<Asker>, blocks: u64, own: u64) {
        let mut l = self.0.lock();
        (l.granted, l.taking) = (l.granted.saturating_add(own), l.taking.saturating_sub(blocks));
        if let Some(of) = of
            && let Some(writer) = l.writers.get_mut(&of.key()).filter(|w| w.is_of(of.id, of.call))
        {
            writer.blocks += own;
        }
    }

    /// Whether the thread was granted some of the file last, in whichever call.
    pub fn has_granted(&self, asker: Asker) -> bool {
        self.0.lock().writers.get(&asker.key()).is_some_and(|w| w.id == asker.id)
    }

    /// The request is done.
    pub fn has_taken(&self, blocks: u64) {
        let mut l = self.0.lock();
        l.taking = l.taking.saturating_sub(blocks);
    }

    /// Whether a request is taking some.
    pub fn is_taking(&self) -> bool {
        self.0.lock().taking > 0
    }

    /// The `write` of a thread that was granted blocks just now does not come.
    pub fn take_back(&self, asker: Asker) {
        let mut l = self.0.lock();
        // one that is no longer in flight is taken to have stored them, and is written back
        if let Some(writer) = l.writers.remove(&asker.key()) {
            l.granted = l.granted.saturating_sub(writer.blocks);
        }
    }

    /// A thread is in another call than the one that it asked in last: what it was granted is stored, and counts until it is
    /// written back.
    pub fn has_stored(&self, thread: u32) {
        self.0.lock().writers.remove(&u64::from(thread));
    }

    /// Tells of the blocks that the kernel may hold, or be about to hold, of what was granted, while no more are.
    pub fn tell(&self, tell: impl FnOnce(u64)) {
        tell(self.0.lock().granted);
    }

    /// All that was granted was so much earlier.
    #[cfg(test)]
    pub(crate) fn told_earlier(&self, passed: Duration) {
        self.0.lock().writers.values_mut().for_each(|w| w.told -= passed);
    }

    /// Begins to have the kernel write back all that was granted by now. One at a time. `locked`: whoever is seen to write to this
    /// inode waits for its lock, and who asks this for the request that holds it need not wait for him.
    pub fn write_back(&self, looks: &Looks, locked: Option<InodeNo>) -> WritingBack {
        self.write_back_seeing(locked, |threads| looks.at(threads))
    }

    fn write_back_seeing(
        &self,
        locked: Option<InodeNo>,
        look: impl FnOnce(Vec<u32>) -> HashMap<u32, Seen>,
    ) -> WritingBack {
        let begun = Instant::now();
        let told: HashMap<u64, Instant> = self.0.lock().writers.iter().map(|(key, w)| (*key, w.told)).collect();
        let seen = look(told.keys().filter_map(|key| u32::try_from(*key).ok()).collect());
        let mut l = self.0.lock();
        let in_flight = l.keep_in_flight(&told, &seen, locked);
        let blocks = l.granted.saturating_sub(l.in_flight());
        let files = l.promised.drain().map(|(_, id)| id).collect();
        let still: Vec<WireId> = l.writers.values().map(|w| w.id).collect();
        l.promised.extend(still.into_iter().map(|id| (id.ino().0, id)));
        WritingBack { files, blocks, in_flight, begun }
    }

    /// The kernel has written them back; what is left.
    pub fn written_back(&self, done: WritingBack) -> Left {
        let mut l = self.0.lock();
        l.granted = l.granted.saturating_sub(done.blocks);
        let (now, InFlight { unseen, writing }) = (Instant::now(), done.in_flight);
        l.last = Some((done.in_flight, done.begun, now + (now - done.begun).clamp(GOOD[0], GOOD[1])));
        Left { blocks: l.granted, unseen, writing }
    }

    /// What is left now, where the kernel has just written back all that was granted before `since`: of many that wait not each has
    /// that done. Who is to be refused has.
    pub fn left_lately(&self, since: Instant) -> Option<Left> {
        let l = self.0.lock();
        let (InFlight { unseen, writing }, begun, good) = l.last?;
        (begun >= since && Instant::now() < good).then_some(Left { blocks: l.granted, unseen, writing })
    }
}

impl Ledger {
    fn in_flight(&self) -> u64 {
        self.writers.values().map(|w| w.blocks).sum()
    }

    /// Forgets writers that have stored their bytes: those that were `seen`, and were told to go on when `told` says, as the
    /// others were after the look. What those do that stay.
    fn keep_in_flight(
        &mut self,
        told: &HashMap<u64, Instant>,
        seen: &HashMap<u32, Seen>,
        locked: Option<InodeNo>,
    ) -> InFlight {
        let mut in_flight = InFlight::default();
        self.writers.retain(|key, w| {
            if told.get(key) != Some(&w.told) {
                return true;
            }
            let seen = u32::try_from(*key).ok().and_then(|thread| seen.get(&thread));
            match seen.map_or(Doing::Unknown, |seen| seen.since(w.call)) {
                Doing::Writing(_) => {
                    in_flight.writing |= locked != Some(w.id.ino());
                    true
                }
                Doing::Other => false,
                Doing::Running => {
                    let lately = w.told.elapsed() < RUNNING;
                    in_flight.writing |= lately;
                    in_flight.unseen |= w.told.elapsed() < LATELY;
                    lately
                }
                Doing::Unknown => {
                    let lately = w.told.elapsed() < LATELY;
                    in_flight.unseen |= lately;
                    lately
                }
            }
        });
        in_flight
    }

    /// Forgets writers that cannot be in the midst of a `write` any more.
    fn forget_gone(&mut self) {
        self.writers.retain(|key, w| match u32::try_from(*key) {
            Ok(thread) => !requester::is_gone(thread),
            Err(_) => w.told.elapsed() < LATELY,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(n: u64) -> WireId {
        WireId::new(InodeNo(n), 1)
    }

    impl DirtyGrants {
        fn takes(&self, of: Option<Asker>, blocks: u64, room: impl FnOnce() -> u64) -> bool {
            self.take(of, blocks, room).is_some()
        }
    }

    /// A look at threads that do this.
    fn seeing(doing: impl Fn(u32) -> Doing) -> impl FnOnce(Vec<u32>) -> HashMap<u32, Seen> {
        move |threads| threads.into_iter().map(|t| (t, Seen { doing: doing(t), call: None })).collect()
    }

    fn by(file: u64, thread: u32) -> Asker {
        Asker { id: id(file), thread, call: None }
    }

    fn files(w: &WritingBack) -> Vec<u64> {
        let mut files: Vec<_> = w.files.iter().map(|id| id.ino().0).collect();
        files.sort_unstable();
        files
    }

    #[test]
    fn what_is_granted_counts_until_it_is_written_back() {
        let a = DirtyGrants::default();
        assert!(a.grant(by(10, 1), 60, || 100, drop) && a.grant(by(11, 2), 40, || 100, drop));
        assert!(!a.grant(by(12, 3), 1, || 100, drop));
        let w = a.write_back_seeing(None, seeing(|_| Doing::Other));
        assert_eq!(files(&w), [10, 11]);
        assert!(!a.grant(by(12, 3), 1, || 100, drop), "nothing is written yet");
        assert_eq!(a.written_back(w), Left { blocks: 0, unseen: false, writing: false });
        assert!(a.grant(by(12, 3), 100, || 100, drop));
    }

    #[test]
    fn what_is_taken_back_does_not_count() {
        let a = DirtyGrants::default();
        assert!(a.grant(by(10, 1), 60, || 100, drop) && a.grant(by(10, 2), 40, || 100, drop));
        a.take_back(by(10, 2));
        a.take_back(by(10, 3));
        assert!(!a.grant(by(10, 2), 41, || 100, drop) && a.grant(by(10, 2), 40, || 100, drop));
        // also while the rest is being written back
        let w = a.write_back_seeing(None, seeing(|t| if t == 2 { Doing::Writing(None) } else { Doing::Other }));
        a.take_back(by(10, 2));
        assert_eq!(a.written_back(w), Left { blocks: 0, unseen: false, writing: true });
    }

    #[test]
    fn what_goes_past_the_cache_fits_beside_it() {
        let a = DirtyGrants::default();
        assert!(a.takes(None, 500, || 100), "nothing is granted: who counts them tells");
        assert!(a.is_taking() && !a.grant(by(10, 1), 1, || 100, drop));
        a.has_taken(500);
        assert!(!a.is_taking() && a.grant(by(10, 1), 60, || 100, drop));
        assert!(
            !a.takes(None, 41, || 100)
                && a.takes(None, 40, || 100)
                && !a.takes(None, 1, || 100)
                && !a.grant(by(10, 2), 1, || 100, drop)
        );
        a.has_taken(40);
        assert!(a.grant(by(10, 2), 40, || 100, drop));
        let w = a.write_back_seeing(None, seeing(|_| Doing::Other));
        assert!(!a.takes(None, 1, || 100));
        assert_eq!(a.written_back(w).blocks, 0);
        assert!(a.takes(None, 1, || 0));
        // what a thread was granted for the call that it takes them in is its own
        a.has_taken(1);
        assert!(a.grant(by(10, 1), 60, || 100, drop) && a.grant(by(11, 2), 40, || 100, drop));
        assert!(!a.takes(Some(by(11, 1)), 60, || 100) && !a.takes(Some(by(10, 3)), 1, || 100), "another's");
        assert!(!a.takes(Some(by(10, 1)), 61, || 100) && a.takes(Some(by(10, 1)), 60, || 100));
        assert!(!a.takes(Some(by(10, 1)), 1, || 100), "once");
        a.has_taken(60);
        assert!(a.grant(by(10, 1), 60, || 100, drop));
    }

    /// Of two owners the second one refuses: what the call was granted by the first is the call's, as before.
    #[test]
    fn who_takes_less_has_its_grant_again() {
        let a = DirtyGrants::default();
        assert!(a.grant(by(10, 1), 60, || 100, drop) && a.grant(by(11, 2), 40, || 100, drop));
        let own = a.take(Some(by(10, 1)), 70, || 130);
        assert_eq!(own, Some(60));
        a.take_less(Some(by(10, 1)), 70, 60);
        assert!(!a.is_taking() && !a.grant(by(12, 3), 1, || 100, drop), "as much is granted as before");
        assert_eq!(a.take(Some(by(10, 1)), 60, || 0), Some(60), "and to whom it was");
        assert_eq!(a.take(None, 5, || 105), Some(0));
        a.take_less(None, 5, 0);
        a.has_taken(60);
        assert!(!a.is_taking() && a.grant(by(10, 1), 60, || 100, drop));
    }

    /// The bound is for what the kernel may hold: what goes past the cache is none of that, and a `write` alone is let in whole.
    #[test]
    fn what_is_taken_is_held_to_the_limit_alone() {
        let a = DirtyGrants::default();
        let grants = |thread, blocks| a.grant_of(100, by(10, thread), blocks, || 10_000, drop);
        assert_eq!(a.take(None, 5000, || 10_000), Some(0));
        assert!(grants(1, 60) && !grants(2, 41) && grants(2, 40));
        let w = a.write_back_seeing(None, seeing(|_| Doing::Other));
        assert_eq!(a.written_back(w).blocks, 0);
        assert!(!grants(1, 5001) && grants(1, 5000) && !grants(2, 1));
    }

    /// A direct write is several requests at once, the first of which leaves the others what its call was granted.
    #[test]
    fn the_requests_of_a_call_share_what_it_was_granted() {
        let a = DirtyGrants::default();
        assert!(a.grant(by(10, 1), 60, || 100, drop) && a.grant(by(11, 2), 40, || 100, drop));
        assert!(a.takes(Some(by(10, 1)), 25, || 100));
        assert!(!a.grant(by(12, 3), 1, || 100, drop), "the rest is granted still");
        // what the first has by now counts twice
        assert!(a.takes(Some(by(10, 1)), 25, || 75) && !a.takes(Some(by(10, 1)), 11, || 75), "10 are left of it");
        a.has_taken(50);
        assert!(a.takes(Some(by(10, 1)), 10, || 50) && !a.takes(Some(by(10, 1)), 1, || 50));
        a.has_taken(10);
        let mut granted = 0;
        a.tell(|blocks| granted = blocks);
        assert_eq!(granted, 40);
        // of another call of the thread, whose bytes the kernel holds
        let call =
            |n| requester::parse_call(&format!("1 0x{n} 0x1 0x1000 0x0 0x0 0x0 0x7ffff0000000 0x55550000")).unwrap();
        let in_call = |n| Asker { call: Some(call(n)), ..by(12, 4) };
        assert!(a.grant(in_call(3), 60, || 100, drop) && a.has_granted(by(12, 4)) && !a.has_granted(by(10, 4)));
        assert!(!a.takes(Some(in_call(5)), 1, || 100) && !a.takes(Some(by(12, 4)), 1, || 100));
        assert!(a.takes(Some(in_call(3)), 60, || 100));
        a.has_taken(60);
        // what a call did not take so is not in the cache either
        assert!(a.grant(by(10, 1), 20, || 100, drop) && a.takes(Some(by(10, 1)), 5, || 100));
        a.has_taken(5);
        assert!(!a.grant(by(10, 1), 56, || 95, drop) && a.grant(by(10, 1), 55, || 95, drop));
    }

    #[test]
    fn who_is_in_flight_is_written_back_again() {
        let a = DirtyGrants::default();
        assert!(a.grant(by(10, 1), 60, || 100, drop) && a.grant(by(11, 2), 40, || 100, drop));
        let w = a.write_back_seeing(None, seeing(|t| if t == 2 { Doing::Writing(None) } else { Doing::Other }));
        assert_eq!(files(&w), [10, 11]);
        assert_eq!(a.written_back(w), Left { blocks: 40, unseen: false, writing: true });
        assert!(!a.grant(by(10, 1), 61, || 100, drop) && a.grant(by(10, 1), 60, || 100, drop));
        let w = a.write_back_seeing(None, seeing(|_| Doing::Other));
        assert_eq!((files(&w), a.written_back(w).blocks), (vec![10, 11], 0));
        // one that asks again has stored what it was granted before
        assert!(a.grant(by(10, 1), 60, || 100, drop) && !a.grant(by(10, 1), 60, || 100, drop));
        let w = a.write_back_seeing(None, seeing(|_| Doing::Writing(None)));
        assert_eq!((files(&w), a.written_back(w).blocks), (vec![10], 0));
    }

    /// A look may take long, and writers go on meanwhile: what it saw says nothing of who was told to go on since.
    #[test]
    fn who_asks_during_a_look_is_in_flight() {
        let a = DirtyGrants::default();
        assert!(a.grant(by(10, 1), 50, || 100, drop));
        let w = a.write_back_seeing(None, |threads| {
            assert!(a.grant(by(10, 1), 20, || 100, drop) && a.grant(by(11, 2), 30, || 100, drop));
            seeing(|_| Doing::Other)(threads)
        });
        assert_eq!(files(&w), [10, 11]);
        assert_eq!(a.written_back(w), Left { blocks: 50, unseen: false, writing: false });
        // of a thread that was given up nothing is known
        let w = a.write_back_seeing(None, |_| HashMap::new());
        assert_eq!(a.written_back(w), Left { blocks: 50, unseen: true, writing: false });
    }

    #[test]
    fn who_is_not_seen_is_in_flight_a_while() {
        let a = DirtyGrants::default();
        assert!(a.grant(by(10, 0), 5, || 100, drop) && a.grant(by(11, 7), 5, || 100, drop));
        let w = a.write_back_seeing(None, seeing(|_| Doing::Unknown));
        assert_eq!(a.written_back(w), Left { blocks: 10, unseen: true, writing: false });
        a.told_earlier(2 * LATELY);
        let w = a.write_back_seeing(None, seeing(|_| Doing::Unknown));
        assert_eq!((files(&w), a.written_back(w)), (vec![10, 11], Left { blocks: 0, unseen: false, writing: false }));
        // a thread that is gone
        assert!(a.grant(by(3, u32::MAX >> 2), 5, || 100, drop));
        let w = a.write_back(&Looks::default(), None);
        assert_eq!(a.written_back(w).blocks, 0);
    }

    /// Who holds the lock of an inode need not wait for those that are seen in a `write` to it: they wait for the lock.
    #[test]
    fn who_writes_to_a_locked_inode_is_not_waited_for() {
        let a = DirtyGrants::default();
        assert!(a.grant(by(10, 1), 60, || 100, drop));
        let left_of = |a: &DirtyGrants, locked, doing| {
            let w = a.write_back_seeing(Some(InodeNo(locked)), seeing(move |_| doing));
            a.written_back(w)
        };
        let (left, writes) = (Left { blocks: 60, unseen: false, writing: true }, Doing::Writing(None));
        assert_eq!((left_of(&a, 11, writes), left_of(&a, 10, writes)), (left, Left { writing: false, ..left }));
        assert_eq!(left_of(&a, 10, Doing::Running), Left { unseen: true, ..left }, "it has written before");
        assert!(a.grant(by(11, 2), 40, || 100, drop));
        assert_eq!(left_of(&a, 10, writes), Left { blocks: 100, ..left });
    }

    /// A thread is seen in no call while it copies what it writes.
    #[test]
    fn who_runs_is_in_flight_longer() {
        let a = DirtyGrants::default();
        assert!(a.grant(by(10, 1), 60, || 100, drop));
        let left_after = |passed| {
            a.told_earlier(passed);
            let w = a.write_back_seeing(None, seeing(|_| Doing::Running));
            a.written_back(w)
        };
        assert_eq!(left_after(Duration::ZERO), Left { blocks: 60, unseen: true, writing: true });
        assert_eq!(left_after(LATELY), Left { blocks: 60, unseen: false, writing: true });
        assert_eq!(left_after(RUNNING), Left::default());
    }

    #[test]
    fn another_process_goes_on_with_what_was_granted() {
        let a = DirtyGrants::default();
        assert!(a.grant(by(10, 1), 60, || 100, drop) && a.grant(by(11, 0), 30, || 100, drop));
        let text = serde_json::to_string(&a.handed()).unwrap();
        let b = DirtyGrants::of_handed(&serde_json::from_str(&text).unwrap());
        assert!(!b.grant(by(12, 3), 11, || 100, drop) && b.grant(by(12, 3), 10, || 100, drop));
        let w = b.write_back_seeing(None, seeing(|t| if t == 1 { Doing::Writing(None) } else { Doing::Other }));
        assert_eq!(files(&w), [10, 11, 12]);
        assert_eq!(
            b.written_back(w),
            Left { blocks: 90, unseen: true, writing: true },
            "in flight, and one that is not seen"
        );
        // what it was granted in a call of which this process was not told is its own
        let call = requester::parse_call("1 0x3 0x1 0x1000 0x0 0x0 0x0 0x7ffff0000000 0x55550000");
        let in_call = |file| Some(Asker { call, ..by(file, 1) });
        assert!(!b.takes(in_call(12), 60, || 100) && b.takes(in_call(10), 60, || 100));
    }

    #[test]
    fn threads_that_are_gone_are_forgotten() {
        let a = DirtyGrants::default();
        // numbers that no thread has
        (0..10 * MANY as u32).for_each(|n| assert!(a.grant(by(10, u32::MAX / 2 - n), 5, || u64::MAX, drop)));
        assert!(a.0.lock().writers.len() <= MANY);
        assert!(!a.grant(by(10, 1), 1, || 50 * MANY as u64, drop), "what they were granted still counts");
    }
}
