//! Inodes whose flags changed during this mount, for what the kernel does not know of it.
//!
//! FUSE has no place for inode flags: the kernel goes on as if there were none (`fs/fuse/ioctl.c` passes them through). Two
//! things follow for regular files, of which its writeback cache keeps data and times:
//! 1. Descriptors that were open for writing when a file became immutable still write into that cache. What the kernel has
//!    taken is written. To have it ask before it takes more, attributes of such a file are told without a time to live, as
//!    in [`crate::room`]: GETATTR with the handle comes before each `write`, and is refused where the asking thread is in
//!    such a call (a `read` across the end of the file asks the same). Stores to a shared map are never asked about.
//! 2. It keeps the change time of before (`fs/fuse/inode.c`, `fuse_get_cache_mask`), and may send that later on: the change
//!    time never falls behind that of the change of flags. To have the kernel take the new one, the inode is dropped from
//!    its memory when its last descriptor is closed, which is the one that `chattr` used, if nobody else has one.
//!
//! Both need to be told of opens and closes. A mount without them ([`crate::opened`]) makes no file immutable or append-only
//! ([`BraidFs::check_may_guard`]); the change time that other flags leave is shown by trying for a while after `chattr`. Where it
//! meets such a file all the same, which a version made that did not yet keep that there are some, it refuses writes that
//! ask, as in 1, appends to an append-only file, too, and has the next mount run with OPEN.
//!
//! Does not promise: to refuse a `write` of `io_uring`, or of a thread that `/proc` does not show; what it writes is kept.
//! That the new change time is shown: not while the file is open, not before Linux 6.18, some 0.1 ms late, and up to
//! half a second (or until the next close) where somebody's call or an O_PATH descriptor has the name just then, or another
//! program takes over.

use crate::abi;
use crate::fs::{BraidFs, errno};
use crate::helpers::{Kind, Whose};
use crate::node::WireId;
use crate::opened::Opened;
use braidfs::format::inode::{APPEND, IMMUTABLE};
use braidfs::{InodeNo, Timestamp};
use braidfs_sync::{Condvar, Mutex, rank};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// After a RELEASE the kernel still has to let go of the name: when inodes are dropped, and once more.
const DROP_AFTER: [Duration; 2] = [Duration::from_micros(200), Duration::from_millis(2)];
/// Without RELEASE, and where that was not enough since somebody was just looking at the file: so often it is tried, so long apart
/// first and at last.
const TRIES: u32 = 12;
const APART: [Duration; 2] = [Duration::from_millis(2), Duration::from_millis(64)];
/// The first of these is so many tries from a RELEASE.
const WITHOUT_RELEASE: u32 = DROP_AFTER.len() as u32;
/// One that is tried again may be tried so much earlier, with others.
const TOGETHER: Duration = Duration::from_millis(1);

/// More that are not immutable are not remembered (a `chattr -R` of a large tree): then these are forgotten.
const KEPT: usize = 1 << 16;

#[derive(Debug, Clone, Copy)]
struct Change {
    /// Of the inode, when its flags changed.
    ctime: Timestamp,
    immutable: bool,
    /// The kernel has yet to learn of `ctime`.
    unseen: bool,
}

/// Regular files. Of one that is gone the number may live on: then a change time may come out too late.
#[derive(Debug, Default)]
pub(crate) struct Flagged {
    files: Mutex<HashMap<u64, Change>, rank::FlaggedFiles>,
    /// How many: nearly always none, so that requests look at this only.
    count: AtomicUsize,
    /// Those that are immutable.
    immutable: AtomicUsize,
    /// Whether a mount that cannot guard such a file met one.
    met: AtomicBool,
    /// To be dropped from the kernel's memory.
    drop: Mutex<ToDrop, rank::FlaggedDrop>,
    /// One is due before the others.
    sooner: Condvar,
}

/// Inodes that the kernel is to drop.
#[derive(Debug, Default)]
struct ToDrop {
    /// The next one first: when it is due, which it is, and how often it was tried.
    by_time: BinaryHeap<Reverse<(Instant, u64, u32)>>,
    /// A helper thread has a job for them: one that waits until the first is due.
    has_job: bool,
}

impl ToDrop {
    /// An inode that was tried so often is tried once more, unless that was enough.
    fn add(&mut self, id: WireId, tried: u32) {
        let pause = match (DROP_AFTER.get(tried as usize), tried.saturating_sub(WITHOUT_RELEASE)) {
            (Some(pause), _) => *pause,
            (None, n) if n < TRIES => (APART[0] * (1 << n)).min(APART[1]),
            (None, _) => return,
        };
        // first ones are few: a close each
        if tried == 0 || self.by_time.len() < KEPT {
            self.by_time.push(Reverse((Instant::now() + pause, id.0, tried)));
        }
    }

    /// When the next one is due.
    fn next(&self) -> Option<Instant> {
        self.by_time.peek().map(|Reverse((due, ..))| *due)
    }

    /// Takes those that are due, or all.
    fn take(&mut self, all: bool) -> Vec<(WireId, u32)> {
        let (now, mut taken) = (Instant::now(), Vec::new());
        while let Some(&Reverse((due, id, tried))) = self.by_time.peek() {
            let early = if tried == 0 { Duration::ZERO } else { TOGETHER };
            if !all && due > now + early {
                break;
            }
            self.by_time.pop();
            taken.push((WireId(id), tried));
        }
        taken
    }
}

/// Whether a table of so many files, of which so many are immutable, is to be gone through for others to forget. It takes as long as there
/// are files: not for each that comes, however many of them stay.
fn is_full(files: usize, immutable: usize) -> bool {
    files - immutable >= KEPT
}

/// What one process tells the next of such files.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct HandedFlags {
    /// Inode, seconds and nanoseconds of the change, whether it is immutable, whether the kernel has yet to learn of it.
    files: Vec<(u64, i64, u32, bool, bool)>,
    met: bool,
}

impl Flagged {
    /// For another process.
    pub fn handed(&self) -> HandedFlags {
        let files = self.files.lock();
        let of = |(ino, c): (&u64, &Change)| (*ino, c.ctime.sec, c.ctime.nsec, c.immutable, c.unseen);
        HandedFlags { files: files.iter().map(of).collect(), met: self.met.load(Ordering::Relaxed) }
    }

    /// As it was in another process.
    pub fn of_handed(handed: &HandedFlags) -> Self {
        let of = |&(ino, sec, nsec, immutable, unseen): &(u64, i64, u32, bool, bool)| {
            (ino, Change { ctime: Timestamp { sec, nsec }, immutable, unseen })
        };
        let files: HashMap<u64, Change> = handed.files.iter().map(of).collect();
        Self {
            count: AtomicUsize::new(files.len()),
            immutable: AtomicUsize::new(files.values().filter(|c| c.immutable).count()),
            met: AtomicBool::new(handed.met),
            files: Mutex::new(files),
            ..Self::default()
        }
    }

    /// The flags of a file changed.
    pub fn note(&self, ino: InodeNo, ctime: Timestamp, immutable: bool) {
        let mut files = self.files.lock();
        let before = self.immutable.load(Ordering::Relaxed);
        if is_full(files.len(), before) {
            files.retain(|_, c| c.immutable);
        }
        let old = files.insert(ino.0, Change { ctime, immutable, unseen: true });
        self.count.store(files.len(), Ordering::Relaxed);
        let after = before + usize::from(immutable) - usize::from(old.is_some_and(|c| c.immutable));
        self.immutable.store(after, Ordering::Relaxed);
    }

    /// Whether flags of any file changed during this mount, as far as the kernel may not know it.
    pub fn any(&self) -> bool {
        self.count.load(Ordering::Relaxed) != 0
    }

    /// Whether the file became immutable during this mount.
    pub fn is_immutable(&self, ino: InodeNo) -> bool {
        self.immutable.load(Ordering::Relaxed) != 0 && self.files.lock().get(&ino.0).is_some_and(|c| c.immutable)
    }

    /// Whether the kernel has yet to learn of a change of the file.
    fn is_unseen(&self, ino: InodeNo) -> bool {
        self.any() && self.files.lock().get(&ino.0).is_some_and(|c| c.unseen)
    }

    /// It has asked anew, or will be told; or where `unseen` it has not let go of the file yet.
    pub fn set_unseen(&self, ino: InodeNo, unseen: bool) {
        if self.any()
            && let Some(change) = self.files.lock().get_mut(&ino.0)
        {
            change.unseen = unseen;
        }
    }

    /// The kernel says that the file last changed at `ctime`: the later of that and of the change of its flags.
    pub fn not_before(&self, ino: InodeNo, ctime: Timestamp) -> Timestamp {
        if self.count.load(Ordering::Relaxed) == 0 {
            return ctime;
        }
        let mut files = self.files.lock();
        match files.get(&ino.0).copied() {
            Some(c) if c.ctime > ctime => c.ctime,
            Some(c) if !c.immutable => {
                files.remove(&ino.0);
                self.count.store(files.len(), Ordering::Relaxed);
                ctime
            }
            _ => ctime,
        }
    }
}

impl BraidFs {
    /// Whether an inode may get these flags: `now` are those that it has.
    pub(crate) fn check_may_guard(&self, now: u32, flags: u32) -> Result<(), Errno> {
        if self.negotiated.opens() || flags & !now & (IMMUTABLE | APPEND) == 0 {
            return Ok(());
        }
        tracing::warn!("immutable and append-only files (chattr +i, +a) need a mount with the option `fileflags`");
        Err(Errno::OPNOTSUPP)
    }

    /// Such an inode was met.
    pub(crate) fn met_guarded(&self) {
        if self.negotiated.opens()
            || self.flagged.met.load(Ordering::Relaxed)
            || self.flagged.met.swap(true, Ordering::Relaxed)
        {
            return;
        }
        tracing::warn!("the volume has immutable or append-only files, which this mount cannot guard: mount it again");
        let keep = |fs: &Self| match fs.vol.note_guarded() {
            Ok(()) | Err(braidfs::Error::ReadOnly) => {}
            Err(e) => tracing::warn!(error = %e, "the next mount will not know of immutable files either"),
        };
        // Not sent only where the mount is ending.
        self.jobs.send(Kind::Drops, Whose::Mount, keep);
    }

    /// Whether a file takes a write at `offset` that the kernel's cache did not take before. With OPEN only one is looked at
    /// that was append-only when it was opened: as elsewhere, descriptors from before `chattr +a` write anywhere.
    pub(crate) fn takes_write(&self, opened: &Opened<'_>, offset: u64) -> Result<(), Errno> {
        let may_be_append_only = match opened.handle() {
            Some(handle) => handle.append_only,
            None => self.flagged.met.load(Ordering::Relaxed),
        };
        if !may_be_append_only {
            return Ok(());
        }
        let attr = self.vol.getattr(opened.ino()).map_err(errno)?;
        if attr.flags & APPEND != 0 && offset < attr.size { Err(Errno::PERM) } else { Ok(()) }
    }

    /// As [`Self::show_change`], where the kernel does not tell when the descriptor is closed: right after the change.
    pub(crate) fn show_change_soon(&self, id: WireId) {
        if !self.negotiated.opens() && self.negotiated.minor >= abi::MINOR_PRUNE {
            self.drop_soon(id, WITHOUT_RELEASE);
        }
    }

    /// Has the kernel drop an inode when that is due, as one that was tried so often.
    fn drop_soon(&self, id: WireId, tried: u32) {
        let mut list = self.flagged.drop.lock();
        let before = list.next();
        list.add(id, tried);
        if !std::mem::replace(&mut list.has_job, true) {
            self.send_drop_job();
        } else if list.next() != before {
            drop(list);
            self.flagged.sooner.notify_one();
        }
    }

    fn send_drop_job(&self) {
        // Not sent only where the mount is ending.
        self.jobs.send(Kind::Drops, Whose::Mount, |fs| fs.drop_due());
    }

    /// Waits until inodes are due, has the kernel drop those that nobody uses, and leaves the others for the next time; then there may
    /// be other work. An upgrade waits for all jobs: before one each is tried once more, and it is known of them that they are
    /// unseen, so that the next close of each tries again (without OPEN the next change of its flags).
    fn drop_due(&self) {
        let is_last = || self.upgrades.stop.is_asked();
        let mut list = self.flagged.drop.lock();
        let mut due = loop {
            let due = list.take(is_last());
            let Some(next) = list.next().filter(|_| due.is_empty()) else { break due };
            self.flagged.sooner.wait_for(&mut list, next.saturating_duration_since(Instant::now()));
        };
        drop(list);
        for (id, tried) in &due {
            if *tried == 0 {
                // until the kernel forgets it: whoever opens it meanwhile tries again at the close
                self.set_unseen(id.ino(), true);
            }
        }
        // what was tried before may be done by now
        due.retain(|(id, tried)| matches!(*tried, 0 | WITHOUT_RELEASE) || self.is_to_be_dropped(id.ino()));
        self.prune_everywhere(&due.iter().map(|(id, _)| *id).collect::<Vec<_>>());
        let mut list = self.flagged.drop.lock();
        if !is_last() {
            due.into_iter().for_each(|(id, tried)| list.add(id, tried + 1));
        }
        list.has_job = list.next().is_some();
        if list.has_job {
            self.send_drop_job();
        }
    }

    /// Has the kernel drop inodes over all connections. Jobs that sleep keep the channel of none of them: who ends a connection,
    /// or begins an upgrade, waits until nobody has it.
    fn prune_everywhere(&self, ids: &[WireId]) {
        if let Some(channel) = self.connections.main() {
            channel.prune(ids);
        }
    }

    /// A descriptor of a file was closed: where it was the last one since its flags changed, or since it was written
    /// past the kernel's cache ([`crate::past_cache`]), the kernel is made to forget what it knows.
    pub(crate) fn show_change(&self, id: WireId) {
        if self.negotiated.minor < abi::MINOR_PRUNE || !self.is_to_be_dropped(id.ino()) {
            return;
        }
        // of several closes the first one sees to it
        self.set_unseen(id.ino(), false);
        self.drop_soon(id, 0);
    }

    /// Whether the kernel knows an older change time of a file than there is, and nobody has it open.
    fn is_to_be_dropped(&self, ino: InodeNo) -> bool {
        (self.flagged.is_unseen(ino) || self.past_cache.is_unseen(ino)) && !self.vol.is_open(ino)
    }

    fn set_unseen(&self, ino: InodeNo, unseen: bool) {
        self.flagged.set_unseen(ino, unseen);
        self.past_cache.set_unseen(ino, unseen);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::op;
    use crate::ops::tests::{ROOT, Served, request};
    use rustix::fs::{OFlags, fcntl_setfl};
    use std::io::Read;
    use std::sync::Arc;
    use zerocopy::IntoBytes;

    fn at(sec: i64) -> Timestamp {
        Timestamp { sec, nsec: 5 }
    }

    #[test]
    fn change_times_do_not_fall_back() {
        let f = Flagged::default();
        let (a, b) = (InodeNo(7), InodeNo(8));
        assert_eq!(f.not_before(a, at(1)), at(1));
        f.note(a, at(10), false);
        f.note(b, at(10), true);
        assert_eq!((f.not_before(a, at(9)), f.not_before(a, at(11)), f.not_before(a, at(9))), (at(10), at(11), at(9)));
        assert!(f.is_immutable(b) && !f.is_immutable(a));
        f.note(b, at(12), false);
        assert!(!f.is_immutable(b));
    }

    /// Who ends a connection waits until nobody has its channel, and an upgrade until no job is left.
    #[test]
    fn who_tries_again_keeps_no_connection_and_lets_an_upgrade_begin() {
        // with room enough that opens are no work
        let s = Served::of(crate::abi::init::SETXATTR_EXT, 1 << 20, &braidfs::MkfsOptions::default());
        let id = WireId(s.mknod(ROOT, "f").nodeid);
        let close = || {
            let fh = s.open(op::OPEN, id).unwrap();
            s.jobs.try_iter().for_each(|job| job(&s.fs));
            assert_eq!(Arc::strong_count(&s.channel), 1);
            let arg = abi::ReleaseIn { fh, flags: 0, release_flags: 0, lock_owner: 0 };
            s.handled(&request(op::RELEASE, id, arg.as_bytes())).unwrap();
        };
        s.fs.flagged.note(id.ino(), at(1), false);
        close();
        let first = s.jobs.try_recv().expect("it is dropped");
        assert_eq!(Arc::strong_count(&s.channel), 1);
        first(&s.fs);
        let again = s.jobs.try_recv().expect("the kernel did not let go of it");
        assert_eq!(Arc::strong_count(&s.channel), 1);
        s.fs.upgrades.stop.ask().unwrap();
        again(&s.fs);
        assert!(s.jobs.try_recv().is_err(), "an upgrade is under way");
        s.fs.upgrades.stop.take_back();
        close();
        s.jobs.try_recv().expect("the next close tries again")(&s.fs);
        assert!(s.jobs.try_recv().is_ok());
    }

    /// Where somebody has a file's name for long, others are dropped meanwhile.
    #[test]
    fn who_is_tried_again_delays_no_other() {
        let mut s = Served::of(crate::abi::init::SETXATTR_EXT, 1 << 20, &braidfs::MkfsOptions::default());
        let (mut kernel, told) = std::io::pipe().unwrap();
        fcntl_setfl(&kernel, OFlags::NONBLOCK).unwrap();
        s.channel = Arc::new(crate::channel::Channel::new(told.into()));
        s.fs.connections.serve_main(&s.channel, &crate::MountConfig::new("test", "/nowhere"), &Arc::from(Vec::new()));
        let [held, other] = ["held", "other"].map(|name| WireId(s.mknod(ROOT, name).nodeid));
        // which one the kernel was told to drop first, since it was asked last
        let mut dropped = || {
            let mut told = Vec::new();
            _ = kernel.read_to_end(&mut told);
            let ids = told.get(size_of::<abi::OutHeader>() + size_of::<abi::PruneOut>()..);
            ids.and_then(|ids| Some(u64::from_ne_bytes(*ids.first_chunk()?)))
        };
        let drops_before = |_| {
            [held, other].iter().for_each(|id| s.fs.flagged.note(id.ino(), at(1), false));
            s.fs.show_change(held);
            // until it is long until the next time
            for _ in 0..8 {
                s.jobs.try_recv().expect("the kernel does not let go of it")(&s.fs);
            }
            assert_eq!(dropped(), Some(held.0));
            let next = s.jobs.try_recv().expect("it is tried again");
            std::thread::scope(|threads| {
                threads.spawn(|| next(&s.fs));
                std::thread::sleep(Duration::from_millis(5));
                s.fs.show_change(other);
            });
            let first = dropped();
            [held, other].iter().for_each(|id| s.fs.flagged.set_unseen(id.ino(), false));
            s.jobs.try_iter().for_each(|job| job(&s.fs));
            _ = dropped();
            first == Some(other.0)
        };
        // on a busy machine the first may be due before the other one comes
        assert!((0..10).any(drops_before));
    }

    /// A request has its slot from the beginning: whoever looked for one with a table of the front end locked would wait for
    /// requests that wait for the table.
    #[test]
    fn tables_are_below_the_slots_of_requests() {
        let f = Flagged::default();
        let slot = Mutex::<(), rank::ServingSlot>::new(());
        let held = slot.lock();
        f.note(InodeNo(1), at(1), true);
        drop(held);
        let files = f.files.lock();
        let inverted = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(slot.lock())));
        drop(files);
        assert_eq!(inverted.is_err(), braidfs_sync::CHECKED);
    }

    #[test]
    fn another_process_knows_the_same() {
        let f = Flagged::default();
        f.note(InodeNo(7), at(10), true);
        f.note(InodeNo(8), at(11), false);
        f.met.store(true, Ordering::Relaxed);
        let text = serde_json::to_string(&f.handed()).unwrap();
        let g = Flagged::of_handed(&serde_json::from_str(&text).unwrap());
        assert!(g.is_immutable(InodeNo(7)) && !g.is_immutable(InodeNo(8)) && g.met.load(Ordering::Relaxed));
        assert_eq!((g.not_before(InodeNo(8), at(9)), g.not_before(InodeNo(7), at(9))), (at(11), at(10)));
        g.note(InodeNo(7), at(12), false);
        assert_eq!((g.immutable.load(Ordering::Relaxed), g.count.load(Ordering::Relaxed)), (0, 2));
    }

    #[test]
    fn the_table_is_bounded() {
        let f = Flagged::default();
        f.note(InodeNo(1), at(1), true);
        for i in 2..2 * KEPT as u64 {
            f.note(InodeNo(i), at(1), false);
        }
        assert!(f.files.lock().len() <= KEPT && f.is_immutable(InodeNo(1)));
    }

    /// They must stay, and others of which the kernel does not know the change time come and go beside them.
    #[test]
    fn many_immutable_files_leave_room_for_others() {
        let (f, many) = (Flagged::default(), KEPT + 100);
        (1..=many as u64).for_each(|i| f.note(InodeNo(i), at(1), true));
        let other = InodeNo(1 << 30);
        f.note(other, at(10), false);
        assert_eq!(f.not_before(other, at(9)), at(10));
        assert!((1..=many as u64).all(|i| f.is_immutable(InodeNo(i))));
        assert!(!is_full(many + KEPT - 1, many) && is_full(many + KEPT, many), "nobody goes through it for each file");
    }
}
