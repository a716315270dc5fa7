//! What helper threads answer, as the kernel is told it.

use super::*;
use rustix::fs::{OFlags, fcntl_setfl};
use std::io::{PipeReader, Read as _};

/// A kernel that reads what it is told.
struct Kernel(PipeReader);

impl Kernel {
    fn of(s: &mut Served) -> Self {
        let (kernel, told) = std::io::pipe().unwrap();
        fcntl_setfl(&kernel, OFlags::NONBLOCK).unwrap();
        s.channel = Arc::new(Channel::new(told.into()));
        Self(kernel)
    }

    /// What it was told since it was asked last: notifications by their number, answers by their errno.
    fn told(&mut self) -> Vec<(bool, i32)> {
        let (mut bytes, mut part) = (Vec::new(), [0; 4096]);
        while let Ok(n) = self.0.read(&mut part) {
            bytes.extend_from_slice(&part[..n]);
        }
        let (mut rest, mut told) = (&bytes[..], Vec::new());
        while let Ok((head, _)) = abi::OutHeader::read_from_prefix(rest) {
            told.push((head.unique == 0, head.error.abs()));
            rest = &rest[head.len as usize..];
        }
        told
    }
}

impl Served {
    /// Does what the helper threads are to do, until there is nothing left.
    pub fn help(&self) {
        self.jobs.try_iter().for_each(|job| job(&self.fs));
    }

    pub fn handled(&self, frame: &[u8]) -> Result<Outcome, Errno> {
        let cx = Context::new(&self.channel, 1, None);
        self.fs.handle(&Request::parse(frame).unwrap(), &mut Answer::new(4096), &cx)
    }
}

/// Nobody.
const USER: u32 = 65534;

/// A `write` that waited for a quota is told of little room as any other: it was let through without a grant of room,
/// and what the kernel took was lost.
#[test]
fn what_waits_for_a_quota_needs_room_too() {
    let mut s = Served::without_open();
    let mut kernel = Kernel::of(&mut s);
    s.fs.vol.quota_change(braidfs::QuotaOwner::User(USER), |limits| limits.space = Some(3 << 20)).unwrap();
    let own = |name: &str| {
        let id = WireId(s.mknod(ROOT, name).nodeid);
        let owner = braidfs::SetAttr { uid: Some(USER), ..braidfs::SetAttr::default() };
        s.fs.vol.setattr(id.ino(), &owner).unwrap();
        id
    };
    let (first, second, third) = (own("first"), own("second"), own("third"));
    // by a thread that is gone when somebody looks: taken to write 2 MiB
    let ask = |id: WireId, thread: u32| {
        let arg = abi::GetattrIn { getattr_flags: abi::GETATTR_FH, dummy: 0, fh: 0 };
        let mut frame = request(op::GETATTR, id, arg.as_bytes());
        let (mut head, _) = abi::InHeader::read_from_prefix(&frame).unwrap();
        (head.uid, head.pid) = (USER, thread);
        frame[..size_of::<abi::InHeader>()].copy_from_slice(head.as_bytes());
        s.handled(&frame)
    };
    assert_eq!(ask(first, u32::MAX >> 2), Ok(Outcome::Reply));
    assert_eq!(ask(second, u32::MAX >> 3), Ok(Outcome::Deferred), "beside the first it is beyond the quota");
    kernel.told();
    s.help();
    assert_eq!(kernel.told().last(), Some(&(false, 0)), "within the quota, and there is room");
    // all but 1 MiB
    let other = WireId(s.mknod(ROOT, "other").nodeid);
    let file = s.fs.vol.open(other.ino()).unwrap();
    let room = s.fs.vol.write_room(other.ino()) * 4096;
    s.fs.vol.fallocate(&file, braidfs::FallocMode::Allocate { keep_size: false }, 0, room - (1 << 20)).unwrap();
    let granted = || {
        let mut granted = 0;
        s.fs.quota_grants.of(braidfs::QuotaOwner::User(USER)).tell(|blocks| granted = blocks);
        granted
    };
    assert_eq!(ask(third, u32::MAX >> 4), Ok(Outcome::Deferred));
    kernel.told();
    s.help();
    assert_eq!(kernel.told().last(), Some(&(false, libc::ENOSPC)), "within the quota, and there is no room");
    assert_eq!(granted(), 0, "what is refused is not granted");
}

/// A `write` that is refused because too many wait already keeps nothing of its owner's quota.
#[test]
fn who_must_not_wait_for_room_gives_back_its_quota() {
    let s = Served::with(WITHOUT_OPEN | abi::init::OVER_IO_URING, 16384);
    s.fs.vol.quota_change(braidfs::QuotaOwner::User(USER), |limits| limits.space = Some(3 << 20)).unwrap();
    let made = ["file", "other"].map(|name| WireId(s.mknod(ROOT, name).nodeid));
    let [id, other] = made;
    let owner = braidfs::SetAttr { uid: Some(USER), ..braidfs::SetAttr::default() };
    s.fs.vol.setattr(id.ino(), &owner).unwrap();
    let file = s.fs.vol.open(other.ino()).unwrap();
    let room = s.fs.vol.write_room(other.ino()) * 4096;
    s.fs.vol.fallocate(&file, braidfs::FallocMode::Allocate { keep_size: false }, 0, room - (1 << 20)).unwrap();
    let waiting: Vec<_> = std::iter::from_fn(|| s.fs.let_wait(false)).collect();
    let arg = abi::GetattrIn { getattr_flags: abi::GETATTR_FH, dummy: 0, fh: 0 };
    let mut frame = request(op::GETATTR, id, arg.as_bytes());
    let (mut head, _) = abi::InHeader::read_from_prefix(&frame).unwrap();
    (head.uid, head.pid) = (USER, u32::MAX >> 2);
    frame[..size_of::<abi::InHeader>()].copy_from_slice(head.as_bytes());
    assert_eq!(s.handled(&frame), Err(Errno::NOSPC));
    let mut granted = None;
    s.fs.quota_grants.of(braidfs::QuotaOwner::User(USER)).tell(|blocks| granted = Some(blocks));
    assert_eq!(granted, Some(0));
    drop(waiting);
}

/// A request of a thread of [`USER`]'s.
fn by_user(thread: u32, opcode: u32, id: WireId, arg: &[u8]) -> Vec<u8> {
    let mut frame = request(opcode, id, arg);
    let (mut head, _) = abi::InHeader::read_from_prefix(&frame).unwrap();
    (head.uid, head.pid) = (USER, thread);
    frame[..size_of::<abi::InHeader>()].copy_from_slice(head.as_bytes());
    frame
}

/// Of a file: a `write` through the cache asks.
fn asks(thread: u32, id: WireId) -> Vec<u8> {
    let arg = abi::GetattrIn { getattr_flags: abi::GETATTR_FH, dummy: 0, fh: 0 };
    by_user(thread, op::GETATTR, id, arg.as_bytes())
}

impl Served {
    /// A file of [`USER`]'s.
    fn of_user(&self, dir: WireId, name: &str) -> WireId {
        let id = WireId(self.mknod(dir, name).nodeid);
        let owner = braidfs::SetAttr { uid: Some(USER), ..braidfs::SetAttr::default() };
        self.fs.vol.setattr(id.ino(), &owner).unwrap();
        id
    }

    /// That has so many bytes at most.
    fn limit_user(&self, bytes: u64) {
        self.fs.vol.quota_change(braidfs::QuotaOwner::User(USER), |limits| limits.space = Some(bytes)).unwrap();
    }
}

/// Those that wait for what their owner was granted are as many as with little room: a helper may be waiting for WRITEs of the cache,
/// for which the kernel needs a place.
#[test]
fn direct_writes_that_wait_for_a_quota_leave_the_kernel_places() {
    let s = Served::without_open();
    s.limit_user(2 << 20);
    let (first, second) = (s.of_user(ROOT, "first"), s.of_user(ROOT, "second"));
    assert_eq!(s.handled(&asks(0, first)), Ok(Outcome::Reply), "2 MiB");
    let write = |n: u64| {
        let mut arg = abi::WriteIn::new_zeroed();
        (arg.offset, arg.size, arg.write_flags) = (n * 4096, 4096, abi::WRITE_LOCKOWNER);
        s.handled(&by_user(1, op::WRITE, second, &[arg.as_bytes(), &[1; 4096]].concat()))
    };
    let all: Vec<_> = (0..u64::from(crate::fs::MAX_BACKGROUND)).map(write).collect();
    let wait = usize::from(crate::fs::MAX_BACKGROUND) - 64;
    assert!(all[..wait].iter().all(|w| *w == Ok(Outcome::Deferred)), "{:?}", &all[..3]);
    assert!(all[wait..].iter().all(|w| *w == Err(Errno::DQUOT)), "{:?}", &all[wait..]);
    let arg = abi::FallocateIn { length: 1 << 20, ..abi::FallocateIn::new_zeroed() };
    let allocate = by_user(1, op::FALLOCATE, second, arg.as_bytes());
    assert_eq!(s.handled(&allocate), Ok(Outcome::Deferred), "these the kernel hands out beside");
}

/// With OPEN the kernel asks for a file only through handles of its cache: what the thread was granted last is in the cache, where it
/// writes through another one now.
#[test]
fn a_write_through_another_handle_takes_nothing_that_was_granted() {
    let one = MkfsOptions { domains: Some(1), ..MkfsOptions::default() };
    let s = Served::of(abi::init::SETXATTR_EXT, (1 << 30) / 4096, &one);
    let file = s.of_user(ROOT, "f");
    let cached = s.open(op::OPEN, file).unwrap();
    s.limit_user(2 << 20);
    let through = s.open(op::OPEN, file).unwrap();
    let thread = u32::MAX >> 2;
    let ask = abi::GetattrIn { getattr_flags: abi::GETATTR_FH, dummy: 0, fh: cached };
    let ask = by_user(thread, op::GETATTR, file, ask.as_bytes());
    let write = |fh: u64| {
        let mut arg = abi::WriteIn::new_zeroed();
        (arg.fh, arg.size, arg.write_flags) = (fh, 4096, abi::WRITE_LOCKOWNER);
        s.handled(&by_user(thread, op::WRITE, file, &[arg.as_bytes(), &[1; 4096]].concat()))
    };
    let size = || s.fs.vol.getattr(file.ino()).unwrap().size;
    assert_eq!(s.handled(&ask), Ok(Outcome::Reply), "2 MiB");
    assert_eq!((write(through), size()), (Ok(Outcome::Deferred), 0));
    write(cached).unwrap();
    assert_eq!(size(), 4096, "of its own");
}

/// What was granted keeps FALLOCATE waiting: it does not where what its owner has replaced was in the way, and counts no more.
#[test]
fn allocating_within_a_quota_ends_replaced_files() {
    let two = MkfsOptions { domains: Some(2), ..MkfsOptions::default() };
    let mut s = Served::of(WITHOUT_OPEN, 32768, &two);
    let mut kernel = Kernel::of(&mut s);
    let dirs = ["a", "b"].map(|name| WireId(s.mkdir(ROOT, name).nodeid));
    let vol = &s.fs.vol;
    assert_ne!(vol.domain_of(dirs[0].ino()).unwrap(), vol.domain_of(dirs[1].ino()).unwrap());
    let (file, held) = (s.of_user(dirs[0], "f"), s.of_user(dirs[0], "held"));
    // nobody knows it who would have to forget it
    let node = |name: &[u8]| {
        let kind = braidfs::FileKind::File;
        let new = braidfs::NewNode { kind, mode: 0o644, umask: 0, rdev: 0, target: b"" };
        vol.create(dirs[1].ino(), name, &new, &braidfs::Cred { uid: USER, gid: USER, ..braidfs::Cred::root() })
            .unwrap()
            .ino
    };
    let old = node(b"f");
    let allocate = braidfs::FallocMode::Allocate { keep_size: false };
    vol.fallocate(&vol.open(old).unwrap(), allocate, 0, 4 << 20).unwrap();
    vol.sync().unwrap();
    s.limit_user(7 << 20);
    vol.rename(dirs[0].ino(), b"f", dirs[1].ino(), b"f", braidfs::RenameMode::Replace).unwrap();
    s.fs.watch_quotas(&s.channel);
    s.help();
    assert_eq!(s.handled(&asks(0, held)), Ok(Outcome::Reply), "2 MiB");
    let arg = abi::FallocateIn { length: 2 << 20, ..abi::FallocateIn::new_zeroed() };
    assert_eq!(s.handled(&by_user(1, op::FALLOCATE, file, arg.as_bytes())), Ok(Outcome::Deferred));
    kernel.told();
    s.jobs.try_recv().unwrap()(&s.fs);
    assert_eq!(kernel.told().last(), Some(&(false, 0)), "at once");
    assert!(s.jobs.try_recv().is_err());
}

/// A request that waited for a limit and then for room is not asked for the limit again.
#[test]
fn what_waited_for_a_quota_and_for_room_is_done() {
    use crate::{dirty_grants::Asker, within_quota::taking::TakingQuota};
    let mut s = Served::without_open();
    let mut kernel = Kernel::of(&mut s);
    let (held, file) = (WireId(s.mknod(ROOT, "held").nodeid), s.of_user(ROOT, "file"));
    let room = s.fs.vol.write_room(file.ino()) * 4096;
    s.limit_user(room);
    s.fs.watch_quotas(&s.channel);
    s.help();
    assert_eq!(s.handled(&asks(u32::MAX >> 2, held)), Ok(Outcome::Reply), "2 MiB of the room");
    let arg = abi::FallocateIn { length: room - (1 << 20), ..abi::FallocateIn::new_zeroed() };
    let frame = by_user(1, op::FALLOCATE, file, arg.as_bytes());
    let cx = Context::new(&s.channel, 1, None).with_quota(TakingQuota::default());
    let handled = s.fs.handle(&Request::parse(&frame).unwrap(), &mut Answer::new(4096), &cx);
    assert_eq!(handled, Ok(Outcome::Deferred));
    let asker = Asker { id: file, thread: 0, call: None };
    assert!(s.fs.quota_grants.of(braidfs::QuotaOwner::User(USER)).grant(asker, 512, || u64::MAX, drop));
    kernel.told();
    // room is made, and then it is handled
    (0..2).for_each(|_| s.jobs.try_recv().unwrap()(&s.fs));
    assert_eq!(kernel.told().last(), Some(&(false, 0)));
    assert!(s.jobs.try_recv().is_err());
}

/// The same with OPEN, of a file that was open when its owner got a limit.
#[test]
fn with_open_a_write_that_is_refused_for_room_gives_back_its_quota() {
    let one = MkfsOptions { domains: Some(1), ..MkfsOptions::default() };
    let mut s = Served::of(abi::init::SETXATTR_EXT | abi::init::OVER_IO_URING, (1 << 30) / 4096, &one);
    let mut kernel = Kernel::of(&mut s);
    let file = s.of_user(ROOT, "f");
    let fh = s.open(op::OPEN, file).unwrap();
    s.limit_user(3 << 20);
    let ballast = s.fs.vol.open(WireId(s.mknod(ROOT, "ballast").nodeid).ino()).unwrap();
    let room = s.fs.vol.write_room(ballast.ino()) * 4096;
    let allocate = braidfs::FallocMode::Allocate { keep_size: false };
    s.fs.vol.fallocate(&ballast, allocate, 0, room - (1 << 20)).unwrap();
    s.fs.watch_room(file.ino(), u64::MAX, &s.channel);
    while let Ok(job) = s.jobs.try_recv() {
        job(&s.fs);
    }
    kernel.told();
    let ask = || {
        let arg = abi::GetattrIn { getattr_flags: abi::GETATTR_FH, dummy: 0, fh };
        s.handled(&by_user(u32::MAX >> 2, op::GETATTR, file, arg.as_bytes()))
    };
    let granted = || {
        let mut granted = None;
        s.fs.quota_grants.of(braidfs::QuotaOwner::User(USER)).tell(|blocks| granted = Some(blocks));
        granted
    };
    assert_eq!(ask(), Ok(Outcome::Deferred));
    assert_ne!(granted(), Some(0));
    s.help();
    assert_eq!((kernel.told().last(), granted()), (Some(&(false, libc::ENOSPC)), Some(0)));
    let _waiting: Vec<_> = std::iter::from_fn(|| s.fs.let_wait(false)).collect();
    assert_eq!((ask(), granted()), (Err(Errno::NOSPC), Some(0)));
}

/// What another request takes past the cache counts twice until that is done: nobody is refused for it before.
#[test]
fn who_takes_past_the_cache_waits_for_others_that_do() {
    use crate::dirty_grants::Asker;
    use crate::requester::{Doing, Seen};
    let mut s = Served::without_open();
    s.fs.looks = crate::looks::Looks::by(|_| Seen { doing: Doing::Writing(None), call: None });
    let mut kernel = Kernel::of(&mut s);
    s.limit_user(8 << 20);
    let (held, file) = (s.of_user(ROOT, "held"), s.of_user(ROOT, "file"));
    let ledger = s.fs.quota_grants.of(braidfs::QuotaOwner::User(USER));
    assert!(ledger.grant(Asker { id: held, thread: 1, call: None }, 512, || u64::MAX, drop));
    assert_eq!(ledger.take(None, 1024, || u64::MAX), Some(0));
    let arg = abi::FallocateIn { length: 4 << 20, ..abi::FallocateIn::new_zeroed() };
    assert_eq!(s.handled(&by_user(2, op::FALLOCATE, file, arg.as_bytes())), Ok(Outcome::Deferred));
    // longer than it waits for a `write`
    std::thread::sleep(std::time::Duration::from_millis(150));
    let next = || s.jobs.try_recv().map(|job| job(&s.fs));
    assert_eq!((next(), next()), (Ok(()), Ok(())));
    assert!(kernel.told().iter().all(|(notified, _)| *notified), "it is not answered");
    ledger.has_taken(1024);
    // and then for room
    while next().is_ok() {}
    assert_eq!(kernel.told().last(), Some(&(false, 0)));
    assert!(!ledger.is_taking());
}

/// One large `write` of an owner refuses no others that are within the limit, though it was granted more than is remembered, and
/// counts twice what is written back of it.
#[test]
fn who_asks_while_another_writes_much_waits_for_it() {
    use crate::dirty_grants::Asker;
    use crate::requester::{Doing, Seen};
    let mut s = Served::without_open();
    s.fs.looks = crate::looks::Looks::by(|_| Seen { doing: Doing::Writing(None), call: None });
    let mut kernel = Kernel::of(&mut s);
    let (held, file) = (s.of_user(ROOT, "held"), s.of_user(ROOT, "file"));
    let ledger = s.fs.quota_grants.of(braidfs::QuotaOwner::User(USER));
    let ask = || {
        let arg = abi::GetattrIn { getattr_flags: abi::GETATTR_FH, dummy: 0, fh: 0 };
        s.handled(&by_user(u32::MAX >> 2, op::GETATTR, file, arg.as_bytes()))
    };
    let next = || s.jobs.try_recv().map(|job| job(&s.fs));
    s.limit_user(100 << 30);
    s.fs.watch_quotas(&s.channel);
    s.help();
    assert!(ledger.grant(Asker { id: held, thread: 1, call: None }, (2 << 30) / 4096, || u64::MAX, drop));
    assert_eq!(ask(), Ok(Outcome::Deferred));
    s.help();
    assert_eq!(kernel.told().last(), Some(&(false, 0)), "there is room for both");
    s.limit_user(2 << 30);
    s.fs.watch_quotas(&s.channel);
    s.help();
    kernel.told();
    assert_eq!(ask(), Ok(Outcome::Deferred));
    // longer than for what was told to go on just before
    std::thread::sleep(std::time::Duration::from_millis(150));
    assert_eq!((next(), next()), (Ok(()), Ok(())));
    assert!(kernel.told().iter().all(|(notified, _)| *notified), "it is not answered");
    ledger.has_stored(1);
    s.help();
    assert_eq!(kernel.told().last(), Some(&(false, 0)));
}

/// The same where there is little room.
#[test]
fn who_needs_room_while_another_writes_much_waits_for_it() {
    use crate::dirty_grants::Asker;
    use crate::requester::{Doing, Seen};
    let mut s = Served::without_open();
    s.fs.looks = crate::looks::Looks::by(|_| Seen { doing: Doing::Writing(None), call: None });
    let mut kernel = Kernel::of(&mut s);
    let [held, file] = ["held", "file"].map(|name| WireId(s.mknod(ROOT, name).nodeid));
    s.help();
    let room = s.fs.vol.write_room(file.ino());
    assert!(s.fs.dirty_grants.grant(Asker { id: held, thread: 1, call: None }, room, || u64::MAX, drop));
    kernel.told();
    assert_eq!(s.handled(&asks(u32::MAX >> 2, file)), Ok(Outcome::Deferred));
    // longer than for what was told to go on just before
    std::thread::sleep(std::time::Duration::from_millis(150));
    let next = || s.jobs.try_recv().map(|job| job(&s.fs));
    assert_eq!((next(), next()), (Ok(()), Ok(())));
    assert!(kernel.told().iter().all(|(notified, _)| *notified), "it is not answered");
    s.fs.dirty_grants.has_stored(1);
    s.help();
    assert_eq!(kernel.told().last(), Some(&(false, 0)));
}

/// What another does that was told to go on before that, for longer than one counts that is not seen.
const DOES: [fn(u32) -> crate::requester::Seen; 2] = {
    use crate::requester::{Doing, Seen};
    [|_| Seen { doing: Doing::Writing(None), call: None }, |_| Seen { doing: Doing::Running, call: None }]
};

fn granted_before(ledger: &crate::dirty_grants::DirtyGrants, id: WireId, blocks: u64) {
    let asker = crate::dirty_grants::Asker { id, thread: 1, call: None };
    assert!(ledger.grant(asker, blocks, || u64::MAX, drop));
    ledger.told_earlier(crate::dirty_grants::LATELY);
}

/// Who takes blocks past the cache waits for the `write`s of others, too, where only those are in its way; but not for one to a file
/// of which it has the lock: that waits for this.
#[test]
fn who_allocates_while_another_writes_much_waits_for_it() {
    for does in DOES {
        let mut s = Served::without_open();
        s.fs.looks = crate::looks::Looks::by(does);
        let mut kernel = Kernel::of(&mut s);
        s.limit_user(8 << 20);
        let (held, file) = (s.of_user(ROOT, "held"), s.of_user(ROOT, "file"));
        let ledger = s.fs.quota_grants.of(braidfs::QuotaOwner::User(USER));
        s.fs.watch_quotas(&s.channel);
        s.help();
        granted_before(&ledger, held, 2048);
        let allocates = |kernel: &mut Kernel, file: WireId| {
            kernel.told();
            let arg = abi::FallocateIn { length: 1 << 20, ..abi::FallocateIn::new_zeroed() };
            assert_eq!(s.handled(&by_user(2, op::FALLOCATE, file, arg.as_bytes())), Ok(Outcome::Deferred));
            // longer than for what was told to go on just before
            std::thread::sleep(std::time::Duration::from_millis(150));
            (0..2).filter_map(|_| s.jobs.try_recv().ok()).for_each(|job| job(&s.fs));
            kernel.told().into_iter().rfind(|(notified, _)| !notified)
        };
        let seen = does(1).doing;
        assert_eq!(allocates(&mut kernel, file), None, "{seen:?}: it is not answered");
        ledger.has_stored(1);
        s.help();
        assert_eq!(kernel.told().last(), Some(&(false, 0)), "{seen:?}");
        granted_before(&ledger, held, 2048);
        if seen == crate::requester::Doing::Running {
            assert_eq!(allocates(&mut kernel, held), None);
        } else {
            assert_eq!(allocates(&mut kernel, held), Some((false, libc::EDQUOT)));
        }
    }
}

/// The same where there is little room, also of what makes names or sets attributes.
#[test]
fn who_takes_room_while_another_writes_much_waits_for_it() {
    for does in DOES {
        let mut s = Served::without_open();
        s.fs.looks = crate::looks::Looks::by(does);
        let mut kernel = Kernel::of(&mut s);
        let [held, file] = ["held", "file"].map(|name| WireId(s.mknod(ROOT, name).nodeid));
        s.help();
        let allocate = abi::FallocateIn { length: 1 << 20, ..abi::FallocateIn::new_zeroed() };
        let make = abi::MknodIn { mode: 0o100_644, rdev: 0, umask: 0, padding: 0 };
        let attribute = abi::SetxattrIn { size: 1, flags: 0, setxattr_flags: 0, padding: 0 };
        let attribute = [attribute.as_bytes(), b"user.x\0v"].concat();
        let link = abi::LinkIn { oldnodeid: held.0 };
        let waits: [(u32, WireId, Vec<u8>); 3] = [
            (op::FALLOCATE, file, allocate.as_bytes().to_vec()),
            (op::MKNOD, ROOT, [make.as_bytes(), b"new\0"].concat()),
            (op::SETXATTR, file, attribute.clone()),
        ];
        let mut asks = |(opcode, id, arg): &(u32, WireId, Vec<u8>)| {
            kernel.told();
            assert_eq!(s.handled(&by_user(2, *opcode, *id, arg)), Ok(Outcome::Deferred));
            // longer than for what was told to go on just before
            std::thread::sleep(std::time::Duration::from_millis(150));
            (0..2).filter_map(|_| s.jobs.try_recv().ok()).for_each(|job| job(&s.fs));
            let early = kernel.told().into_iter().rfind(|(notified, _)| !notified);
            s.fs.dirty_grants.has_stored(1);
            s.help();
            (early, kernel.told().pop())
        };
        let seen = does(1).doing;
        for request in &waits {
            granted_before(&s.fs.dirty_grants, held, s.fs.vol.write_room(file.ino()));
            assert_eq!(asks(request), (None, Some((false, 0))), "{seen:?}: {}", op::name(request.0));
        }
        // of these the kernel holds the lock of the file that is written to
        for request in [(op::SETXATTR, held, attribute), (op::LINK, ROOT, [link.as_bytes(), b"link\0"].concat())] {
            granted_before(&s.fs.dirty_grants, held, s.fs.vol.write_room(file.ino()));
            let early = asks(&request).0;
            let refused = (seen != crate::requester::Doing::Running).then_some((false, libc::ENOSPC));
            assert_eq!(early, refused, "{seen:?}: {}", op::name(request.0));
        }
    }
}

/// Of many that wait for another `write` each sleeps while the others do.
#[test]
fn many_who_wait_are_looked_at_in_one_round() {
    const MANY: u32 = 64;
    for with_quota in [false, true] {
        let mut s = Served::without_open();
        s.fs.looks = crate::looks::Looks::by(DOES[0]);
        let mut kernel = Kernel::of(&mut s);
        let (held, file) = (s.of_user(ROOT, "held"), s.of_user(ROOT, "file"));
        if with_quota {
            s.limit_user(8 << 20);
            s.fs.watch_quotas(&s.channel);
            s.help();
            granted_before(&s.fs.quota_grants.of(braidfs::QuotaOwner::User(USER)), held, 2048);
        } else {
            s.help();
            granted_before(&s.fs.dirty_grants, held, s.fs.vol.write_room(file.ino()));
        }
        let since = std::time::Instant::now();
        (2..2 + MANY).for_each(|thread| assert_eq!(s.handled(&asks(thread, file)), Ok(Outcome::Deferred)));
        kernel.told();
        // they are looked at less often then
        std::thread::sleep(std::time::Duration::from_millis(150));
        let mut round = || {
            let begun = std::time::Instant::now();
            (0..MANY).for_each(|_| s.jobs.try_recv().expect("it waits")(&s.fs));
            assert!(kernel.told().iter().all(|(notified, _)| *notified), "it is not answered");
            begun.elapsed()
        };
        // on a busy machine it may take long at times
        let some = (0..10).any(|_| round() < MANY * std::time::Duration::from_millis(5) / 2);
        assert!(some, "with a limit: {with_quota}; {:?}", since.elapsed());
    }
}

/// For a rename to another directory the kernel holds a lock of the whole mount, and where tenants share the mount, the lock of a
/// directory may be in the way of others' renames, too: these wait for room no longer than others may for them.
#[test]
fn what_holds_up_renames_waits_for_room_for_a_while_only() {
    let mut s = Served::without_open();
    // nobody is seen: these count for some seconds
    s.fs.looks = crate::looks::Looks::by(|_| crate::requester::Seen::NOTHING);
    let mut kernel = Kernel::of(&mut s);
    let held = WireId(s.mknod(ROOT, "held").nodeid);
    let [one, two] = ["one", "two"].map(|name| WireId(s.mkdir(ROOT, name).nodeid));
    s.mknod(one, "f");
    s.help();
    let mut answered = |(opcode, id, arg): (u32, WireId, Vec<u8>)| {
        let asker = crate::dirty_grants::Asker { id: held, thread: 1, call: None };
        assert!(s.fs.dirty_grants.grant(asker, 16384, || u64::MAX, drop));
        kernel.told();
        assert_eq!(s.handled(&by_user(2, opcode, id, &arg)), Ok(Outcome::Deferred));
        let mut looks = || {
            s.jobs.try_recv().expect("it waits")(&s.fs);
            kernel.told().into_iter().rfind(|(notified, _)| !notified)
        };
        let first = looks();
        std::thread::sleep(crate::pace::LOCKED_WAIT);
        let then = looks();
        s.fs.dirty_grants.has_stored(1);
        s.help();
        assert_eq!(s.fs.tight_taking(), 0);
        (first, then)
    };
    let rename = |newdir: WireId, from: &str, to: &str| {
        let arg = abi::RenameIn { newdir: newdir.0 };
        (op::RENAME, one, [arg.as_bytes(), format!("{from}\0{to}\0").as_bytes()].concat())
    };
    let mknod = |name: &[u8]| {
        let arg = abi::MknodIn { mode: 0o100_644, rdev: 0, umask: 0, padding: 0 };
        (op::MKNOD, ROOT, [arg.as_bytes(), name].concat())
    };
    let refused = (None, Some((false, libc::ENOSPC)));
    assert_eq!(answered(rename(two, "f", "f")), refused);
    assert!(s.lookup(one, b"f").unwrap().nodeid != 0 && s.lookup(two, b"f").unwrap().nodeid == 0);
    assert_eq!(answered(rename(one, "f", "g")), (None, None), "this one is the directory's alone");
    assert_eq!(answered(mknod(b"new\0")), (None, None));
    let budget = braidfs::TenantBudget { space: Some(16 << 20), ..braidfs::TenantBudget::default() };
    s.fs.vol.tenant_create(ROOT.ino(), b"t", 0o755, "t", budget, &braidfs::Cred::root()).unwrap();
    s.help();
    assert_eq!(answered(mknod(b"other\0")), refused);
    assert!(s.lookup(one, b"g").unwrap().nodeid != 0 && s.lookup(ROOT, b"other").unwrap().nodeid == 0);
}

/// What a `write` was granted is not taken by FALLOCATE: the kernel writes it back first, and what is under way keeps its room.
#[test]
fn allocating_leaves_what_was_granted() {
    let mut s = Served::without_open();
    let mut kernel = Kernel::of(&mut s);
    let make = |name: &str| WireId(s.mknod(ROOT, name).nodeid);
    let (held, other) = (make("held"), make("other"));
    let room = s.fs.vol.write_room(other.ino()) * 4096;
    let grant = |thread: u32| {
        let arg = abi::GetattrIn { getattr_flags: abi::GETATTR_FH, dummy: 0, fh: 0 };
        let mut frame = request(op::GETATTR, held, arg.as_bytes());
        let (mut head, _) = abi::InHeader::read_from_prefix(&frame).unwrap();
        head.pid = thread;
        frame[..size_of::<abi::InHeader>()].copy_from_slice(head.as_bytes());
        assert_eq!(s.handled(&frame), Ok(Outcome::Reply));
    };
    let allocate = |length: u64| {
        let arg = abi::FallocateIn { length, ..abi::FallocateIn::new_zeroed() };
        s.handled(&request(op::FALLOCATE, other, arg.as_bytes()))
    };
    let size = || s.fs.vol.getattr(other.ino()).unwrap().size;
    // of a thread that nobody sees, taken to write 2 MiB, and to be at it for a while
    grant(0);
    allocate(room - (4 << 20)).unwrap();
    // a group may have to be claimed first
    s.help();
    let told = kernel.told();
    assert!(told.iter().all(|t| *t == (false, 0)) && size() == room - (4 << 20), "{told:?}: beside it");
    assert_eq!(allocate(room - (2 << 20)), Ok(Outcome::Deferred));
    let mut told = Vec::new();
    while let Ok(job) = s.jobs.try_recv() {
        job(&s.fs);
        // not more than a pipe holds
        told.extend(kernel.told());
    }
    assert_eq!((told.pop(), size()), (Some((false, 0)), room - (2 << 20)));
    assert!(
        told.len() > 1 && told.iter().all(|t| *t == (true, abi::NOTIFY_INVAL_INODE)),
        "written back once and again"
    );
    // of one that is gone: 2 MiB are not there any more
    grant(u32::MAX >> 2);
    assert_eq!(allocate(room - (1 << 20)), Ok(Outcome::Deferred));
    s.help();
    let told = kernel.told();
    assert_eq!((told.first(), told.last()), (Some(&(true, abi::NOTIFY_INVAL_INODE)), Some(&(false, 0))));
    assert_eq!(size(), room - (1 << 20));
    assert_eq!(s.fs.tight_taking(), 0);
}

/// Nor by what makes names or sets attributes.
#[test]
fn making_names_leaves_what_was_granted() {
    let mut s = Served::without_open();
    let mut kernel = Kernel::of(&mut s);
    let held = WireId(s.mknod(ROOT, "held").nodeid);
    let ballast = s.fs.vol.open(WireId(s.mknod(ROOT, "ballast").nodeid).ino()).unwrap();
    let room = s.fs.vol.write_room(held.ino()) * 4096;
    let allocate = braidfs::FallocMode::Allocate { keep_size: false };
    s.fs.vol.fallocate(&ballast, allocate, 0, room - (2 << 20)).unwrap();
    s.help();
    let makes: [&dyn Fn() -> Result<Outcome, Errno>; 3] = [
        &|| {
            let arg = abi::MknodIn { mode: 0o100_644, rdev: 0, umask: 0, padding: 0 };
            s.handled(&request(op::MKNOD, ROOT, &[arg.as_bytes(), b"new\0"].concat()))
        },
        &|| {
            let arg = abi::LinkIn { oldnodeid: held.0 };
            s.handled(&request(op::LINK, ROOT, &[arg.as_bytes(), b"link\0"].concat()))
        },
        &|| {
            let arg = abi::SetxattrIn { size: 1, flags: 0, setxattr_flags: 0, padding: 0 };
            s.handled(&request(op::SETXATTR, held, &[arg.as_bytes(), b"user.x\0v"].concat()))
        },
    ];
    for make in makes {
        // 2 MiB, of a thread that is gone
        assert_eq!(s.handled(&asks(u32::MAX >> 2, held)), Ok(Outcome::Reply));
        kernel.told();
        assert_eq!(make(), Ok(Outcome::Deferred));
        s.help();
        let told = kernel.told();
        assert_eq!(
            (told.first(), told.last()),
            (Some(&(true, abi::NOTIFY_INVAL_INODE)), Some(&(false, 0))),
            "{told:?}"
        );
        assert_eq!(s.fs.tight_taking(), 0);
    }
    assert!(s.lookup(ROOT, b"new").unwrap().nodeid != 0 && s.lookup(ROOT, b"link").unwrap().nodeid == held.0);
}

/// A FALLOCATE that fails may have made zeros of a part: the kernel has dropped its pages when it is told.
#[test]
fn pages_are_dropped_before_a_failed_hole_is_told() {
    let mut s = Served::new();
    let id = WireId(s.mknod(ROOT, "f").nodeid);
    let fh = s.open(op::OPEN, id).unwrap();
    let mut kernel = Kernel::of(&mut s);
    let fail = |mode: i32| {
        // of no length
        let arg = abi::FallocateIn { fh, mode: mode as u32, ..abi::FallocateIn::new_zeroed() };
        s.handled(&request(op::FALLOCATE, id, arg.as_bytes()))
    };
    assert_eq!(fail(0), Err(Errno::INVAL), "nothing changes by it");
    for mode in [libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, libc::FALLOC_FL_ZERO_RANGE] {
        assert_eq!(fail(mode), Ok(Outcome::Deferred));
        assert_eq!(kernel.told(), []);
        s.help();
        assert_eq!(kernel.told(), [(true, abi::NOTIFY_INVAL_INODE), (false, libc::EINVAL)]);
    }
}

/// The kernel goes on to tell the time that a file had before it was written past the cache: the volume's is not
/// lowered.
#[test]
fn times_from_before_a_write_past_the_cache_change_nothing() {
    let s = Served::new();
    let made = s.mknod(ROOT, "f");
    let id = WireId(made.nodeid);
    let fh = s.open(op::OPEN, id).unwrap();
    assert!(!s.fs.handles.has_cached_writer(id.ino()), "there is little room: it is written through");
    let write = || {
        std::thread::sleep(std::time::Duration::from_millis(20));
        let mut arg = abi::WriteIn::new_zeroed();
        (arg.fh, arg.size, arg.write_flags) = (fh, 1, abi::WRITE_LOCKOWNER);
        s.handled(&request(op::WRITE, id, &[arg.as_bytes(), b"x"].concat())).unwrap();
        let now = s.getattr(id).unwrap();
        (now.mtime, now.mtimensec)
    };
    let tell = |(sec, nsec): (i64, u32)| {
        let mut arg = abi::SetattrIn::new_zeroed();
        (arg.valid, arg.mtime, arg.mtimensec, arg.ctime) = (TIMES, sec, nsec, 1 << 40);
        s.ask(op::SETATTR, id, &[arg.as_bytes()]).unwrap();
        let now = s.getattr(id).unwrap();
        assert_eq!(now.ctime, 1 << 40);
        (now.mtime, now.mtimensec)
    };
    let before = (made.attr.mtime, made.attr.mtimensec);
    let first = write();
    assert!(first > before);
    assert_eq!(tell(before), first, "of a rename");
    let second = write();
    assert_eq!((tell(before), tell(first)), (second, second), "what it may know is between the two");
    assert_eq!(tell((4711, 5)), (4711, 5), "that nobody kept");
    assert_eq!(tell(before), before, "and now it is known");
    let third = write();
    assert_eq!(tell(before), third);
    assert_eq!(tell((third.0 + 1, 0)), (third.0 + 1, 0), "written through the cache");
    write();
    s.forget(&made, 1);
    assert_eq!(s.fs.past_cache.known(id.ino()), None, "the kernel asks anew");
}
