use super::beside::Taking;
use super::*;
use crate::abi::{self, init, op};
use crate::fs::MAX_BACKGROUND;
use crate::ops::tests::{ROOT, Served, request};
use crate::transport::DEFERRED_MAX;
use braidfs::{FallocMode, MkfsOptions};
use zerocopy::{FromZeros, IntoBytes};

const MIB: u64 = 1 << 20;

/// On a thread of its own, which has taken nothing yet.
fn on_a_thread(f: impl FnOnce() + Send) {
    std::thread::scope(|s| {
        s.spawn(f);
    });
}

#[test]
fn a_thread_looks_at_the_room_before_it_has_taken_much() {
    on_a_thread(|| {
        let tight = Tight::new(2);
        assert!(tight.is_look_due(0) && tight.is_look_due(0), "nobody has looked whether there are limits");
        tight.plain.store(true, Ordering::Relaxed);
        let every = UNSEEN_BYTES / REQUEST_BYTES;
        assert_eq!((1..=100).filter(|_| tight.is_look_due(1)).count() as u64, 100 / every);
        assert!(tight.is_look_due(UNSEEN_BYTES) && tight.is_look_due(u64::MAX));
        assert!(!tight.is_look_due(UNSEEN_BYTES - REQUEST_BYTES) && tight.is_look_due(0));
        assert!(!tight.is_look_due(0));
        tight.becomes_tight(1);
        assert!(tight.is_look_due(0) && tight.is_look_due(0));
    });
}

/// What all threads can take unseen is little of what a domain has more than the kernel may hold when it becomes tight.
#[test]
fn what_nobody_looks_at_is_little() {
    const { assert!(LARGE_BLOCKS * 4096 >= 512 * UNSEEN_BYTES) };
}

/// A bound that was restricted leaves the domain with so much room that nobody is asked, and is not raised at once.
#[test]
fn a_restricted_bound_is_no_longer_tight() {
    let domain = |bytes: u64| Domain { held: CachePadded::new((bytes / 4096).into()), ..Domain::default() };
    let (usual, least) = (domain(USUAL_BYTES), domain(LEAST_BYTES));
    let room = usual.tight_below() - 1;
    assert!(room >= least.roomy_from() && dirty::wanted(room * 4096, false) == LEAST_BYTES);
    assert!(usual.roomy_from() * 4096 <= 192 << 20 && dirty::wanted(usual.roomy_from() * 4096, false) == USUAL_BYTES);
    assert_eq!(least.tight_below() * 4096, 64 << 20);
}

/// A domain with files that were opened while there was room, on a mount that runs with OPEN.
struct Domained {
    s: Served,
    other: WireId,
    other_fh: u64,
    /// Written through the cache.
    cached: WireId,
    cached_fh: u64,
}

impl Domained {
    fn new(flags: u64) -> Self {
        let one = MkfsOptions { domains: Some(1), ..MkfsOptions::default() };
        let s = Served::of(init::SETXATTR_EXT | flags, (1 << 30) / 4096, &one);
        let [cached, other] = ["cached", "other"].map(|name| WireId(s.mknod(ROOT, name).nodeid));
        let [cached_fh, other_fh] = [cached, other].map(|id| s.open(op::OPEN, id).unwrap());
        assert!(s.fs.handles.has_cached_writer(cached.ino()));
        s.help();
        Self { s, other, other_fh, cached, cached_fh }
    }

    /// Leaves so many bytes, which nobody on the mount has seen yet.
    fn leave(&self, bytes: u64) {
        let ballast = WireId(self.s.mknod(ROOT, &format!("ballast{bytes}")).nodeid);
        let file = self.s.fs.vol.open(ballast.ino()).unwrap();
        let room = self.s.fs.vol.write_room(ballast.ino()) * 4096;
        self.s.fs.vol.fallocate(&file, FallocMode::Allocate { keep_size: false }, 0, room - bytes).unwrap();
        self.s.fs.vol.sync().unwrap();
        self.s.fs.vol.claim_room(ballast.ino(), self.s.fs.vol.write_room(ballast.ino())).unwrap();
    }

    /// Does what a helper thread is to do, also what that leaves for later.
    fn help_to_the_end(&self) {
        while let Ok(job) = self.s.jobs.try_recv() {
            job(&self.s.fs);
        }
    }

    fn is_tight(&self) -> bool {
        self.s.fs.tight.domains[0].tight.load(Ordering::SeqCst)
    }

    /// Somebody is about to `write` through the cache.
    fn ask(&self) -> Result<Outcome, Errno> {
        let arg = abi::GetattrIn { getattr_flags: abi::GETATTR_FH, dummy: 0, fh: self.cached_fh };
        self.s.handled(&request(op::GETATTR, self.cached, arg.as_bytes()))
    }

    fn allocate(&self, length: u64) -> Result<Outcome, Errno> {
        let arg = abi::FallocateIn { fh: self.other_fh, length, ..abi::FallocateIn::new_zeroed() };
        self.s.handled(&request(op::FALLOCATE, self.other, arg.as_bytes()))
    }
}

/// A helper thread may wait for WRITEs of the cache, for which the kernel keeps no place where all that it hands out at a time are
/// WRITEs that wait for a helper.
#[test]
fn writes_past_the_cache_that_wait_leave_the_kernel_places() {
    let t = Domained::new(0);
    t.leave(100 * MIB);
    let through = WireId(t.s.mknod(ROOT, "through").nodeid);
    let fh = t.s.open(op::OPEN, through).unwrap();
    assert!(!t.s.fs.handles.has_cached_writer(through.ino()), "there is little room: it is written through");
    t.s.help();
    t.leave(60 * MIB);
    assert_eq!(t.ask(), Ok(Outcome::Deferred));
    t.s.help();
    let write = |n: u64| {
        let mut arg = abi::WriteIn::new_zeroed();
        (arg.fh, arg.offset, arg.size, arg.write_flags) = (fh, n * 4096, 4096, abi::WRITE_LOCKOWNER);
        t.s.handled(&request(op::WRITE, through, &[arg.as_bytes(), &[1; 4096]].concat()))
    };
    let all: Vec<_> = (0..u64::from(MAX_BACKGROUND)).map(write).collect();
    let wait = usize::from(MAX_BACKGROUND) - 64;
    assert!(all[..wait].iter().all(|w| *w == Ok(Outcome::Deferred)), "{:?}", &all[..3]);
    assert!(all[wait..].iter().all(|w| *w == Err(Errno::NOSPC)), "{:?}", &all[wait..]);
    assert_eq!(t.allocate(MIB), Ok(Outcome::Deferred), "these the kernel hands out beside");
}

/// Where too many wait, what fits beside all that the kernel may hold is had at once.
#[test]
fn who_must_not_wait_takes_what_there_is() {
    let t = Domained::new(init::OVER_IO_URING);
    t.leave(300 * MIB);
    let waiting: Vec<_> = (0..DEFERRED_MAX).map(|_| t.s.fs.let_wait(false).unwrap()).collect();
    assert_eq!(t.allocate(200 * MIB), Err(Errno::NOSPC), "the kernel may hold 64 MiB, and threads store some more");
    assert_eq!(t.allocate(180 * MIB), Ok(Outcome::Reply));
    assert_eq!(t.s.fs.tight_taking(), 0);
    drop(waiting);
}

/// A helper thread has the kernel write back what was promised, which takes time: who is promised room meanwhile has it.
#[test]
fn what_is_promised_while_the_kernel_writes_back_is_not_taken() {
    let t = Domained::new(0);
    t.leave(120 * MIB);
    // the first to see it has all written back
    assert_eq!(t.allocate(MIB), Ok(Outcome::Deferred));
    t.help_to_the_end();
    let (fs, d) = (&t.s.fs, 0);
    assert!(t.is_tight() && !fs.tight.domains[d].unknown.load(Ordering::SeqCst));
    let need = fs.vol.own_room(DomainId(0)) - MIB / 4096;
    let written = fs.write_back_promised(d, &t.s.channel);
    assert!(fs.take_beside(d, need, Some(written)).is_some(), "nobody is promised anything");
    let asked = Instant::now();
    assert_eq!(t.ask(), Ok(Outcome::Reply), "there is more than the kernel may hold");
    assert!(fs.take_beside(d, need, Some(written)).is_none(), "that is lost then");
    assert!(fs.take_beside(d, need - 64 * MIB / 4096, Some(written)).is_some(), "beside it");
    // told to go on just before
    let written = fs.write_back_promised(d, &t.s.channel);
    if asked.elapsed() < IN_FLIGHT {
        assert!(fs.take_beside(d, need, Some(written)).is_none());
        assert!(fs.take_beside(d, need - MIB / 4096, Some(written)).is_some(), "2 MiB are left");
    }
    std::thread::sleep(IN_FLIGHT);
    let written = fs.write_back_promised(d, &t.s.channel);
    assert!(fs.take_beside(d, need, Some(written)).is_some());
}

/// A `write` that comes while a request takes room that is there for both is told so at once, and a helper thread does other work
/// while there is not.
#[test]
fn who_waits_for_those_who_take_room_does_not_keep_the_helper() {
    let t = Domained::new(0);
    t.leave(100 * MIB);
    assert_eq!(t.allocate(MIB), Ok(Outcome::Deferred));
    t.help_to_the_end();
    let (domain, job) = (&t.s.fs.tight.domains[0], || t.s.jobs.try_recv().expect("it goes on")(&t.s.fs));
    let taking = Taking::of(domain, 50 * MIB / 4096);
    assert_eq!(t.ask(), Ok(Outcome::Deferred));
    job();
    assert!(t.s.jobs.try_recv().is_err(), "it fits beside");
    let more = Taking::of(domain, 49 * MIB / 4096);
    assert_eq!(t.ask(), Ok(Outcome::Deferred));
    job();
    job();
    drop((taking, more));
    job();
    assert!(t.s.jobs.try_recv().is_err());
    assert!(t.s.fs.handles.any_promised(|_| true));
}

/// Who replaces a file may do so to make room; a whiteout that is left needs some also then.
#[test]
fn a_whiteout_needs_room_also_where_a_file_is_replaced() {
    let t = Domained::new(0);
    ["a", "b", "c"].iter().for_each(|name| _ = t.s.mknod(ROOT, name));
    t.leave(120 * MIB);
    assert_eq!(t.allocate(MIB), Ok(Outcome::Deferred));
    t.help_to_the_end();
    assert!(t.is_tight());
    let rename = |names: &[u8], flags| {
        let arg = abi::Rename2In { newdir: ROOT.0, flags, padding: 0 };
        t.s.handled(&request(op::RENAME2, ROOT, &[arg.as_bytes(), names].concat()))
    };
    let whiteout = libc::RENAME_WHITEOUT;
    assert_eq!(t.ask(), Ok(Outcome::Reply), "the kernel may hold some");
    let taking = Taking::of(&t.s.fs.tight.domains[0], 100 * MIB / 4096);
    assert_eq!(rename(b"a\0b\0", whiteout), Ok(Outcome::Deferred));
    assert_eq!(rename(b"b\0c\0", 0), Ok(Outcome::Reply));
    drop(taking);
    t.help_to_the_end();
    assert_eq!(rename(b"c\0cached\0", whiteout), Ok(Outcome::Reply), "there is room");
}

/// A domain stays tight while requests are about to take what makes it so.
#[test]
fn a_domain_is_tight_while_its_room_is_being_taken() {
    let t = Domained::new(0);
    t.leave(100 * MIB);
    assert_eq!(t.allocate(MIB), Ok(Outcome::Deferred));
    t.help_to_the_end();
    assert!(t.is_tight());
    let (fs, channel) = (&t.s.fs, &t.s.channel);
    let taking = Taking::of(&fs.tight.domains[0], 50 * MIB / 4096);
    fs.watch_domain(0, 200 * MIB / 4096, channel);
    assert!(t.is_tight(), "150 MiB are left of it");
    drop(taking);
    fs.watch_domain(0, 200 * MIB / 4096, channel);
    assert!(!t.is_tight());
}

/// There was room enough when somebody looked, and is no more.
#[test]
fn what_is_granted_without_a_look_at_it_needs_room_enough_then() {
    let t = Domained::new(0);
    t.leave(100 * MIB);
    let asker = Asker { id: t.cached, thread: 1, call: None };
    let own = t.s.fs.own_room(t.cached.ino());
    assert!(own < t.s.fs.enough(t.cached.ino()));
    assert!(!t.s.fs.grant(asker, own + 1, true) && t.s.fs.grant(asker, own, true));
}

/// Of a range that has its blocks, zeros take no more than what the volume replaces at once.
#[test]
fn zeros_need_room_for_what_is_new() {
    let t = Domained::new(0);
    let file = t.s.fs.vol.open(t.other.ino()).unwrap();
    t.s.fs.vol.fallocate(&file, FallocMode::Allocate { keep_size: false }, 0, 300 * MIB).unwrap();
    t.leave(320 * MIB);
    let mode = libc::FALLOC_FL_ZERO_RANGE as u32;
    let arg = abi::FallocateIn { fh: t.other_fh, length: 300 * MIB, mode, ..abi::FallocateIn::new_zeroed() };
    let frame = request(op::FALLOCATE, t.other, arg.as_bytes());
    assert_eq!(t.s.handled(&frame), Ok(Outcome::Reply), "nothing is written back for it");
}
