//! Large batches of writes step back behind small syncs, on one device.
//!
//! A device serves what it has been given more or less in that order, and flushes what it has taken. So who syncs one block waits
//! for all that was submitted before, and a thread that writes a large file back has up to 32 MiB under way. The kernel
//! throttles its own write-back for that reason (block/blk-wbt.c), but not what comes past its cache.
//!
//! - *A small sync* says when it begins, before its write, and when its flush has ended ([`Throttle::sync`]).
//! - *A large batch* goes in waves ([`Throttle::enter`]). Each waits for the syncs that are under way when it comes, not for
//!   later ones, and not for long ([`HOLD`]): a sync and a wave take turns, and neither keeps the other off.
//! - *Where syncs come one after the other*, waves are short, and all batches together have no more under way than two of them: that is
//!   what a sync can find before it. How short follows the device: a wave shall take no longer than two syncs that find nothing
//!   before them, within [`PIECE_MIN`] and [`PIECE_BYTES`].
//! - *Half of the time is the syncs'*: after a wave the next one waits as long as that took, [`HOLD`] at most, unless no sync came for
//!   [`NEAR`], or the one that is under way began longer ago than [`HOLD`]. Else each sync of a thread that does one after the other
//!   would find a wave before its flush, and that thread would sync as fast as waves go, however short its own requests are.
//!
//! Who writes a lot, syncs it, and does so again has syncs one after the other, too: they cut no waves of that thread, and those
//! are not among what all batches together have under way.
//!
//! Where no sync is under way nothing waits, and where moreover no other thread's came lately nothing is cut. Batches that are not
//! large, and reads, pass. Does not promise an order between writes, nor anything of what other processes do.

use crate::thread_number;
use braidfs_sync::device::Mutex;
use braidfs_sync::{Condvar, rank};
use std::cell::RefCell;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::time::{Duration, Instant};

/// A sync that writes more bytes is none for which others step back, and a batch of no more is not held.
pub(crate) const SMALL_BYTES: usize = 256 << 10;
/// Bytes of a wave where syncs come one after the other: at most, and at least.
const PIECE_BYTES: usize = 512 << 10;
const PIECE_MIN: usize = 64 << 10;
/// Syncs with less than that between them come one after the other. Shorter than the time between two commits of the background,
/// whose records are written as small syncs are.
const LATELY: Duration = Duration::from_millis(50);
/// Longer no wave waits for syncs: one that takes longer has a slow device, and not the wave, before it.
const HOLD: Duration = Duration::from_millis(4);
/// Who has not begun or ended a sync for so long leaves the device to waves.
const NEAR: Duration = Duration::from_micros(250);
/// After a sync that found more before it than the least did, the least that is known grows by this part: what a device
/// once could is forgotten within some hundred syncs.
const FORGETS: u64 = 64;

/// See the module. On lines of its own: each sync of the device writes to it.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Throttle {
    opened: Instant,
    hold: Duration,
    /// Small syncs that began, and that ended.
    begun: AtomicU64,
    ended: AtomicU64,
    /// When one began or ended last, ns since `opened` and [`LATELY`].
    last: AtomicU64,
    /// The last two threads whose syncs came one after the other.
    near: [Near; 2],
    /// Nanoseconds that a sync takes which finds nothing before it; 0: not known.
    least: AtomicU64,
    /// Bytes of a short wave.
    piece: AtomicUsize,
    /// Until when it is the syncs' turn, in the time of `last`.
    theirs: AtomicU64,
    /// Bytes of large batches under way.
    under_way: Mutex<usize, rank::LargeBatches>,
    /// Waves that wait.
    waiting: AtomicUsize,
    changed: Condvar,
}

/// A thread whose syncs came one after the other. Of two threads that note themselves at once one may be forgotten.
#[derive(Debug)]
struct Near {
    /// Its [`thread_number`].
    who: AtomicU64,
    /// Until when waves of others are short for it, in the time of `last`.
    until: AtomicU64,
}

impl Default for Throttle {
    fn default() -> Self {
        Self {
            opened: Instant::now(),
            hold: HOLD,
            begun: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            last: AtomicU64::new(0),
            near: [const { Near { who: AtomicU64::new(u64::MAX), until: AtomicU64::new(0) } }; 2],
            least: AtomicU64::new(0),
            piece: AtomicUsize::new(PIECE_BYTES / 4),
            theirs: AtomicU64::new(0),
            under_way: Mutex::new(0),
            waiting: AtomicUsize::new(0),
            changed: Condvar::new(),
        }
    }
}

impl Throttle {
    fn now(&self) -> u64 {
        // the first sync of all comes after none
        (self.opened.elapsed() + LATELY).as_nanos() as u64
    }

    /// A small sync begins.
    pub(crate) fn sync(self: &Arc<Self>) -> SmallSync {
        let now = self.now();
        let close = now.saturating_sub(self.last.swap(now, Relaxed)) < LATELY.as_nanos() as u64;
        if close {
            self.note(now);
        }
        self.begun.fetch_add(1, SeqCst);
        SmallSync { of: Arc::clone(self), close, began: now }
    }

    fn ended(&self, close: bool, began: u64) {
        let now = self.now();
        self.last.store(now, Relaxed);
        // of two that end at once one may be forgotten
        let (took, least) = (now.saturating_sub(began).max(1), self.least.load(Relaxed));
        self.least.store(if least == 0 { took } else { took.min(least + least / FORGETS + 1) }, Relaxed);
        if close {
            self.note(now);
        }
        self.ended.fetch_add(1, SeqCst);
        self.wake();
    }

    /// This thread's syncs come one after the other: in the place of the one that did so longer ago, if it has none.
    fn note(&self, now: u64) {
        let (me, until) = (thread_number(), |n: &&Near| n.until.load(Relaxed));
        let own = self.near.iter().find(|n| n.who.load(Relaxed) == me);
        if let Some(near) = own.or_else(|| self.near.iter().min_by_key(until)) {
            near.who.store(me, Relaxed);
            near.until.store(now + LATELY.as_nanos() as u64, Relaxed);
        }
    }

    fn wake(&self) {
        // either this sees who waits, or that one, with the lock, what has changed
        if self.waiting.load(SeqCst) > 0 {
            drop(self.under_way.lock());
            self.changed.notify_all();
        }
    }

    /// Whether syncs came one after the other lately, of a thread with such a number.
    fn was_near(&self, is_one: impl Fn(u64) -> bool) -> bool {
        let now = self.now();
        self.near.iter().any(|n| now < n.until.load(Relaxed) && is_one(n.who.load(Relaxed)))
    }

    /// Whether waves of this thread are short now.
    fn is_on(&self) -> bool {
        let me = thread_number();
        self.ended.load(SeqCst) < self.begun.load(SeqCst) || self.was_near(|who| who != me)
    }

    /// Whether waves are short now, but not those of this thread.
    fn is_for_others_only(&self) -> bool {
        let me = thread_number();
        self.was_near(|who| who == me) && !self.is_on()
    }

    /// Bytes that the next wave of a large batch should have, where it shall be short.
    pub(crate) fn short(&self) -> Option<usize> {
        self.is_on().then(|| self.piece.load(Relaxed))
    }

    /// Waits as long as it is the syncs' turn.
    fn leave_them_their_turn(&self) {
        loop {
            let (now, last) = (self.now(), self.last.load(Relaxed));
            let left = self.theirs.load(Relaxed).saturating_sub(now);
            let quiet = Duration::from_nanos(now.saturating_sub(last));
            // one that began long ago waits for something else, or never flushes
            let idle = quiet > HOLD || quiet > NEAR && self.ended.load(SeqCst) >= self.begun.load(SeqCst);
            if left == 0 || idle {
                return;
            }
            // not woken by each sync that ends: it would pay for that
            std::thread::sleep(Duration::from_nanos(left).min(NEAR));
        }
    }

    /// A short wave took so long: it is the syncs' turn now, for as long, and later waves are shorter or longer.
    fn took(&self, bytes: usize, time: Duration) {
        let (piece, least) = (self.piece.load(Relaxed), self.least.load(Relaxed));
        if least == 0 || bytes > PIECE_BYTES || !self.is_on() {
            return;
        }
        self.theirs.fetch_max(self.now() + time.min(HOLD).as_nanos() as u64, Relaxed);
        let time = time.as_nanos() as u64;
        // of one that was shorter than it might have been nothing follows for longer ones
        if time > 2 * least && piece > PIECE_MIN {
            self.piece.store((piece / 2).max(PIECE_MIN), Relaxed);
        } else if time < least && bytes >= piece {
            self.piece.store((piece * 2).min(PIECE_BYTES), Relaxed);
        }
    }

    /// A wave of a large batch: waits until it may go. It is under way as long as what is returned lives.
    pub(crate) fn enter(&self, bytes: usize) -> Wave<'_> {
        self.leave_them_their_turn();
        let came = self.begun.load(SeqCst);
        let mut under_way = self.under_way.lock();
        self.waiting.fetch_add(1, SeqCst);
        let mut since = None;
        loop {
            let syncs = self.ended.load(SeqCst) < came;
            let full = *under_way > 0 && *under_way + bytes > 2 * self.piece.load(Relaxed);
            if !(syncs || full && self.is_on()) {
                break;
            }
            // what is under way is the device's business, and ends
            let waited = since.get_or_insert_with(Instant::now).elapsed();
            match self.hold.checked_sub(waited) {
                Some(left) if syncs => {
                    self.changed.wait_for(&mut under_way, left);
                }
                None if syncs && !full => break,
                _ => self.changed.wait(&mut under_way),
            }
        }
        self.waiting.fetch_sub(1, SeqCst);
        // else whoever is held for this thread's syncs would wait for its long waves, too
        let counted = if self.is_for_others_only() { 0 } else { bytes };
        *under_way += counted;
        Wave { of: self, bytes, counted, began: Instant::now() }
    }
}

/// A small sync that is under way.
#[derive(Debug)]
pub(crate) struct SmallSync {
    of: Arc<Throttle>,
    close: bool,
    began: u64,
}

impl Drop for SmallSync {
    fn drop(&mut self) {
        self.of.ended(self.close, self.began);
    }
}

/// A wave of a large batch that is under way.
#[derive(Debug)]
pub(crate) struct Wave<'a> {
    of: &'a Throttle,
    bytes: usize,
    /// Those of them that are among the bytes under way.
    counted: usize,
    began: Instant,
}

impl Drop for Wave<'_> {
    fn drop(&mut self) {
        self.of.took(self.bytes, self.began.elapsed());
        *self.of.under_way.lock() -= self.counted;
        self.of.wake();
    }
}

thread_local! {
    /// Small syncs of this thread, of several devices, between write and flush. One that never flushes ends with the next of
    /// the same device, or with the thread.
    static OWN: RefCell<Vec<SmallSync>> = const { RefCell::new(Vec::new()) };
}

/// Writes so many bytes for a sync of this thread. If it is a small one, [`flushed`] ends it; behind a write that failed no
/// flush follows, so that it is over.
///
/// # Errors
/// Of `write`.
pub(crate) fn through(
    throttle: &Arc<Throttle>,
    bytes: usize,
    write: impl FnOnce() -> io::Result<()>,
) -> io::Result<()> {
    if bytes > SMALL_BYTES {
        return write();
    }
    begin(throttle);
    write().inspect_err(|_| drop(flushed(throttle)))
}

fn begin(throttle: &Arc<Throttle>) {
    let sync = throttle.sync();
    // the error: the thread is ending, and nobody steps back for it
    let _ = OWN.try_with(|own| {
        let mut own = own.borrow_mut();
        own.retain(|s| !Arc::ptr_eq(&s.of, throttle));
        own.push(sync);
    });
}

/// The small sync that this thread has begun: it ends where this is dropped.
pub(crate) fn flushed(throttle: &Arc<Throttle>) -> Option<SmallSync> {
    OWN.try_with(|own| {
        let mut own = own.borrow_mut();
        let at = own.iter().position(|s| Arc::ptr_eq(&s.of, throttle))?;
        Some(own.swap_remove(at))
    })
    .ok()
    .flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::thread;

    /// No wave goes on because it has waited for long.
    fn patient() -> Arc<Throttle> {
        Arc::new(Throttle { hold: Duration::from_secs(3600), ..Throttle::default() })
    }

    /// This thread's syncs come one after the other, and that is not forgotten within the hour.
    fn note_for_long(t: &Throttle) {
        t.note(t.now() + 3_600_000_000_000);
    }

    /// The same of another thread.
    fn syncs_elsewhere(t: &Throttle) {
        thread::scope(|s| s.spawn(|| note_for_long(t)).join()).unwrap();
    }

    fn until_one_waits(t: &Throttle) {
        while t.waiting.load(SeqCst) == 0 {
            thread::yield_now();
        }
        // it has the lock from before it counts itself until it waits
        drop(t.under_way.lock());
    }

    /// Nobody steps back for a sync whose write failed: no flush follows that would end it.
    #[test]
    fn a_sync_whose_write_failed_is_over() {
        let t = patient();
        let under_way = || t.begun.load(SeqCst) - t.ended.load(SeqCst);
        through(&t, 4096, || Err(io::ErrorKind::StorageFull.into())).unwrap_err();
        assert_eq!((t.begun.load(SeqCst), under_way()), (1, 0));
        through(&t, 4096, || Ok(())).unwrap();
        assert_eq!(under_way(), 1);
        drop(flushed(&t));
        through(&t, SMALL_BYTES + 1, || Ok(())).unwrap();
        assert_eq!((t.begun.load(SeqCst), under_way()), (2, 0));
    }

    /// A device that does one thing after the other, when it is told to: what it was given, in the order in which it was.
    struct Slow {
        log: Arc<std::sync::Mutex<Vec<&'static str>>>,
        go: Receiver<()>,
    }

    impl Slow {
        fn of(log: &Arc<std::sync::Mutex<Vec<&'static str>>>) -> (Sender<()>, Self) {
            let (tx, go) = channel();
            (tx, Self { log: Arc::clone(log), go })
        }
        fn does(&self, what: &'static str) {
            self.log.lock().unwrap().push(what);
            self.go.recv().unwrap();
        }
    }

    fn until_it_has(log: &std::sync::Mutex<Vec<&'static str>>, n: usize) {
        while log.lock().unwrap().len() < n {
            thread::yield_now();
        }
    }

    /// A batch of four pieces. When the first is under way a sync of a block begins: it finds no second one before it,
    /// and the flush neither.
    #[test]
    fn a_sync_finds_one_piece_before_it() {
        let t = patient();
        let log = Arc::default();
        let ((batch_goes, batch), (sync_goes, sync)) = (Slow::of(&log), Slow::of(&log));
        note_for_long(&t);
        thread::scope(|s| {
            s.spawn(|| {
                // (the receiver is this thread's)
                let batch = batch;
                for _ in 0..4 {
                    let _wave = t.enter(PIECE_BYTES);
                    batch.does("piece");
                }
            });
            until_it_has(&log, 1);
            s.spawn(|| {
                let sync = sync;
                begin(&t);
                sync.does("write");
                let _flushed = flushed(&t);
                sync.does("flush");
            });
            until_it_has(&log, 2);
            batch_goes.send(()).unwrap();
            until_one_waits(&t);
            sync_goes.send(()).unwrap();
            until_it_has(&log, 3);
            assert!(t.waiting.load(SeqCst) == 1, "between write and flush");
            sync_goes.send(()).unwrap();
            (0..3).for_each(|_| batch_goes.send(()).unwrap());
        });
        assert_eq!(*log.lock().unwrap(), ["piece", "write", "flush", "piece", "piece", "piece"]);
        assert_eq!(*t.under_way.lock(), 0);
    }

    #[test]
    fn without_a_sync_nothing_is_held_or_cut() {
        let t = patient();
        assert_eq!(t.short(), None);
        // as many as there are, however large
        let waves: Vec<_> = (0..8).map(|_| t.enter(32 << 20)).collect();
        assert_eq!(*t.under_way.lock(), 8 * (32 << 20));
        drop(waves);
        // one now and then, as the record of a commit
        drop(t.sync());
        assert_eq!(t.short(), None);
        drop(t.enter(32 << 20));
    }

    #[test]
    fn two_syncs_soon_after_another_come_one_after_the_other() {
        let t = patient();
        drop(t.sync());
        assert!(t.near.iter().all(|n| n.who.load(Relaxed) == u64::MAX));
        // (the machine may take its time between two)
        while t.near.iter().all(|n| n.who.load(Relaxed) != thread_number()) {
            drop(t.sync());
        }
        assert_eq!(t.near.iter().filter(|n| n.who.load(Relaxed) == thread_number()).count(), 1);
    }

    /// Who syncs what it wrote, again and again, is no other for itself, and does not have another forgotten.
    #[test]
    fn own_syncs_cut_no_own_waves() {
        let t = patient();
        (0..9).for_each(|_| note_for_long(&t));
        assert_eq!(t.short(), None);
        let of_another = || thread::scope(|s| s.spawn(|| t.short()).join()).unwrap();
        assert_eq!(of_another(), Some(PIECE_BYTES / 4));
        syncs_elsewhere(&t);
        (0..9).for_each(|_| note_for_long(&t));
        assert_eq!((t.short(), of_another()), (Some(PIECE_BYTES / 4), Some(PIECE_BYTES / 4)));
        // one that is not over is for all
        let alone = patient();
        let under_way = alone.sync();
        assert!(alone.short().is_some());
        drop(under_way);
        assert_eq!(alone.short(), None);
    }

    /// Somebody else's pieces do not wait until the long waves of a thread are over that syncs what it writes.
    #[test]
    fn long_waves_of_who_syncs_hold_nobody() {
        let t = patient();
        note_for_long(&t);
        let long = t.enter(32 << 20);
        thread::scope(|s| s.spawn(|| drop(t.enter(t.short().unwrap()))).join()).unwrap();
        assert_eq!(*t.under_way.lock(), 0);
        drop(long);
        assert_eq!(*t.under_way.lock(), 0);
    }

    #[test]
    fn a_wave_waits_for_syncs_of_before_and_for_no_later_one() {
        let t = patient();
        let before = t.sync();
        thread::scope(|s| {
            let wave = s.spawn(|| drop(t.enter(PIECE_BYTES)));
            until_one_waits(&t);
            let later = t.sync();
            thread::sleep(Duration::from_millis(20));
            assert!(!wave.is_finished());
            drop(before);
            wave.join().unwrap();
            drop(later);
        });
    }

    #[test]
    fn no_wave_waits_for_long() {
        let t = Arc::new(Throttle::default());
        let _forgotten = t.sync();
        let _first = t.enter(PIECE_MIN);
        drop(t.enter(PIECE_MIN));
    }

    /// Short ones where the device takes long for them, longer ones where it takes no longer than a sync.
    #[test]
    fn waves_are_as_long_as_two_syncs() {
        let t = patient();
        syncs_elsewhere(&t);
        t.least.store(100_000, Relaxed);
        let short = || t.short().unwrap();
        (0..9).for_each(|_| t.took(PIECE_MIN, Duration::from_micros(201)));
        assert_eq!(short(), PIECE_MIN);
        t.took(PIECE_MIN, Duration::from_micros(150));
        t.took(PIECE_MIN / 2, Duration::from_micros(10));
        assert_eq!(short(), PIECE_MIN, "the rest of a batch tells nothing of a longer wave");
        t.took(PIECE_MIN, Duration::from_micros(99));
        assert_eq!(short(), 2 * PIECE_MIN);
        (0..9).for_each(|_| t.took(PIECE_BYTES, Duration::from_micros(99)));
        assert_eq!(short(), PIECE_BYTES);
        // one that could not be cut tells nothing of those that are
        t.took(2 * PIECE_BYTES, Duration::from_secs(1));
        assert_eq!(short(), PIECE_BYTES);
    }

    /// What is known of the device follows it both ways.
    #[test]
    fn the_least_that_a_sync_takes_is_not_for_ever() {
        let t = patient();
        drop(t.sync());
        let least = || t.least.load(Relaxed);
        assert!(least() > 0);
        t.least.store(1, Relaxed);
        for n in 0..1000 {
            t.ended(false, t.now() - 1_000_000);
            assert!(least() > 1 + n.min(60), "{n}: {}", least());
        }
        assert!(least() >= 1_000_000);
        t.ended(false, t.now());
        assert!(least() < 1_000_000);
    }

    /// The next wave waits as long as one took, while syncs come; and goes where none does.
    #[test]
    fn half_of_the_time_is_the_syncs() {
        let t = patient();
        drop(t.sync());
        syncs_elsewhere(&t);
        t.took(PIECE_MIN, Duration::from_millis(4));
        let (turn, before) = (t.theirs.load(Relaxed), t.now());
        assert!(turn > before);
        let under_way = t.sync();
        t.leave_them_their_turn();
        assert!(t.now() >= turn, "a sync is under way");
        drop(under_way);
        t.theirs.store(u64::MAX, Relaxed);
        t.leave_them_their_turn(); // comes back
        assert!(t.now() > t.last.load(Relaxed) + NEAR.as_nanos() as u64);
        // without a sync a wave takes nothing from anybody
        let alone = patient();
        alone.took(PIECE_BYTES, Duration::from_millis(4));
        assert_eq!(alone.theirs.load(Relaxed), 0);
    }

    #[test]
    fn batches_share_what_may_be_under_way() {
        let t = Arc::new(Throttle::default());
        let _forgotten = t.sync();
        let most = AtomicUsize::new(0);
        thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| {
                    for _ in 0..5 {
                        let _wave = t.enter(PIECE_BYTES);
                        most.fetch_max(*t.under_way.lock(), SeqCst);
                        thread::yield_now();
                    }
                });
            }
        });
        let most = most.into_inner();
        assert!((PIECE_MIN..=PIECE_BYTES).contains(&most), "{most} bytes under way");
        // one that is longer than the window goes alone
        drop(t.enter(2 * PIECE_BYTES));
    }

    /// With rings, and without.
    #[test]
    fn a_device_has_small_syncs_go_first() {
        use crate::{BLOCK_BYTES, Device, FileDevice, WriteOp};
        let (small, large) = ([1; BLOCK_BYTES], vec![2; 4 << 20]);
        let dir = tempfile::tempdir().unwrap();
        for (name, rings) in [("rings", true), ("none", false)] {
            let dev = FileDevice::create(&dir.path().join(name), 16 << 20).unwrap().with_rings();
            let mut dev = if rings { dev } else { dev.without_io_uring() };
            dev.throttle = patient();
            dev.write_batch_through(&[WriteOp { block: 0, bufs: vec![&small] }]).unwrap();
            let mut out = vec![0; large.len()];
            thread::scope(|s| {
                let bufs = large.chunks(BLOCK_BYTES).collect();
                let batch = s.spawn(|| dev.write_batch(&[WriteOp { block: 16, bufs }]).unwrap());
                until_one_waits(&dev.throttle);
                // what is not large is not held
                dev.write(8, &small).unwrap();
                dev.read(16, &mut out).unwrap();
                assert!(out.iter().all(|b| *b == 0) && !batch.is_finished());
                dev.flush().unwrap();
                batch.join().unwrap();
            });
            dev.read(16, &mut out).unwrap();
            assert!(out == large);
        }
    }

    /// Two devices; a thread that does not flush, or ends.
    #[test]
    fn a_sync_ends_with_its_flush() {
        let (a, b) = (patient(), patient());
        let open = |t: &Throttle| t.begun.load(SeqCst) - t.ended.load(SeqCst);
        begin(&a);
        begin(&b);
        assert_eq!((open(&a), open(&b)), (1, 1));
        drop(flushed(&a));
        assert_eq!((open(&a), open(&b)), (0, 1));
        assert!(flushed(&a).is_none());
        begin(&b);
        assert_eq!(open(&b), 1);
        thread::scope(|s| s.spawn(|| begin(&a)).join()).unwrap();
        while open(&a) > 0 {
            thread::yield_now();
        }
        drop(flushed(&b));
        assert_eq!(open(&b), 0);
    }
}
