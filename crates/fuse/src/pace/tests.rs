//! Requests of a tenant in debt, asked as the kernel asks, on a volume in memory and a clock of the tests.

use super::*;
use crate::fs::Negotiated;
use crate::request::Outcome;
use braidfs::device::{Device, MemDevice};
use braidfs::{Cred, MkfsOptions, MountOptions, Rate, Rates, TenantBudget, Volume};
use rustix::io::Errno;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicU64;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

const MIB: u64 = 1 << 20;
const WITHOUT_OPEN: u64 = abi::init::SETXATTR_EXT | abi::init::NO_OPEN_SUPPORT | abi::init::NO_OPENDIR_SUPPORT;

struct Served {
    fs: BraidFs,
    channel: Arc<Channel>,
    answers: std::sync::Mutex<std::io::PipeReader>,
    now: &'static AtomicU64,
    /// How long each thread has run.
    ran: &'static AtomicU64,
    jobs: crate::helpers::Work,
    /// A directory and a file of tenant `t`, and of nobody.
    dir: WireId,
    file: WireId,
    other: WireId,
}

macro_rules! served {
    () => {
        served!(WITHOUT_OPEN)
    };
    ($flags:expr) => {{
        static NOW: AtomicU64 = AtomicU64::new(0);
        static RAN: AtomicU64 = AtomicU64::new(0);
        let clocks: [fn() -> Duration; 2] = [
            || Duration::from_nanos(NOW.load(Ordering::Relaxed)),
            || Duration::from_nanos(RAN.load(Ordering::Relaxed)),
        ];
        Served::new($flags, &NOW, &RAN, clocks)
    }};
}

fn id(a: &braidfs::Attr) -> WireId {
    WireId::new(a.ino, a.generation)
}

impl Served {
    fn new(flags: u64, now: &'static AtomicU64, ran: &'static AtomicU64, clocks: [fn() -> Duration; 2]) -> Self {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(1 << 17));
        braidfs::mkfs::format(std::slice::from_ref(&device), &MkfsOptions::default()).unwrap();
        let how = MountOptions {
            rate_clock: Some(clocks[0]),
            processor_clock: Some(clocks[1]),
            paced_above: true,
            cached_above: true,
            background: false,
            ..MountOptions::default()
        };
        let vol = Arc::new(Volume::mount(vec![device], how).unwrap());
        let (jobs, work) = crate::helpers::queue();
        let (answers, to) = std::io::pipe().unwrap();
        let fs = BraidFs::new(vol, Negotiated { flags, minor: abi::MINOR }, jobs);
        let channel = Arc::new(Channel::new(OwnedFd::from(to)));
        let budget = TenantBudget::default();
        let t = fs.vol.tenant_create(WireId::ROOT.ino(), b"t", 0o755, "t", budget, &Cred::root()).unwrap();
        let new = braidfs::NewNode { kind: braidfs::FileKind::File, mode: 0o644, umask: 0, rdev: 0, target: b"" };
        let file = fs.vol.create(t.root, b"f", &new, &Cred::root()).unwrap();
        let other = fs.vol.create(WireId::ROOT.ino(), b"other", &new, &Cred::root()).unwrap();
        for a in [&file, &other] {
            fs.vol.write(&fs.vol.open(a.ino).unwrap(), 0, &vec![7; 2 << 20]).unwrap();
        }
        fs.vol.sync().unwrap();
        let dir = id(&fs.vol.getattr(t.root).unwrap());
        let (file, other, answers) = (id(&file), id(&other), std::sync::Mutex::new(answers));
        Self { fs, channel, answers, now, ran, jobs: work, dir, file, other }
    }

    fn limit(&self, rates: Rates) {
        let t = self.fs.vol.tenant_change("t", |b| b.rates = rates).unwrap();
        self.fs.rates_changed(t.domain, &self.channel);
    }

    /// In debt of `seconds`, each way.
    fn in_debt(&self, seconds: u64) {
        let mib = Some(Rate { per_second: MIB, burst: Some(1) });
        self.limit(Rates { read_bps: mib, write_bps: mib, ..Rates::default() });
        let domain = self.fs.vol.domain_of(self.dir.ino()).unwrap();
        for way in [Way::Read, Way::Write] {
            // as if somebody else had done so much: it is not given back
            let turn =
                self.fs.vol.come(domain, Demand { way, bytes: seconds * MIB, requests: 0, ahead: false }).unwrap();
            std::mem::forget(turn);
        }
    }

    fn ask(&self, unique: u64, opcode: u32, node: WireId, args: &[&[u8]]) -> Result<Outcome, Errno> {
        let args = args.concat();
        let mut head = abi::InHeader::new_zeroed();
        (head.len, head.opcode, head.nodeid, head.unique) = (40 + args.len() as u32, opcode, node.0, unique);
        let frame = [head.as_bytes(), &args].concat();
        let cx = Context::new(&self.channel, unique, None);
        self.fs.serve(&Request::parse(&frame).unwrap(), &mut Answer::new(MIB as usize), &cx)
    }

    fn read(&self, unique: u64, node: WireId, size: u32) -> Result<Outcome, Errno> {
        let mut arg = abi::ReadIn::new_zeroed();
        arg.size = size;
        self.ask(unique, op::READ, node, &[arg.as_bytes()])
    }

    fn mknod(&self, unique: u64, dir: WireId, name: &str) -> Result<Outcome, Errno> {
        let arg = abi::MknodIn { mode: 0o100_644, rdev: 0, umask: 0, padding: 0 };
        self.ask(unique, op::MKNOD, dir, &[arg.as_bytes(), name.as_bytes(), b"\0"])
    }

    /// The next answer that was sent: of which request, error, bytes of the body.
    fn answer(&self) -> (u64, i32, usize) {
        let mut answers = self.answers.lock().unwrap();
        let mut head = [0; 16];
        answers.read_exact(&mut head).unwrap();
        let head = abi::OutHeader::read_from_bytes(&head).unwrap();
        let mut body = vec![0; head.len as usize - 16];
        answers.read_exact(&mut body).unwrap();
        (head.unique, head.error, body.len())
    }

    fn sleep(&self, ms: u64) {
        self.now.fetch_add(ms * 1_000_000, Ordering::Relaxed);
    }

    /// With a thread that serves what was parked.
    fn serving(&self, work: impl FnOnce()) {
        std::thread::scope(|s| {
            let fs = &self.fs;
            s.spawn(move || {
                let mut out = Answer::new(MIB as usize);
                fs.pacer.run(|turned| fs.serve_turned(turned, &mut out));
            });
            let end = EndOnDrop(&self.fs.pacer);
            work();
            drop(end);
        });
    }
}

struct EndOnDrop<'a>(&'a Pacer);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// Everything of the tenant that a program waits for is parked, in the order in which it came, and answered when it is due.
#[test]
fn a_tenant_in_debt_waits_and_its_neighbours_do_not() {
    let s = served!();
    s.in_debt(10);
    let sync = abi::FsyncIn::new_zeroed();
    let (mut mode, mut size) = (abi::SetattrIn::new_zeroed(), abi::SetattrIn::new_zeroed());
    (mode.valid, mode.mode) = (fattr::MODE, 0o640);
    (size.valid, size.size) = (fattr::SIZE | fattr::MODE, 5 << 20);
    let write = |flags: u32| {
        let mut arg = abi::WriteIn::new_zeroed();
        (arg.size, arg.write_flags) = (4096, flags);
        [arg.as_bytes(), &[9; 4096]].concat()
    };
    let wait = [
        s.read(1, s.file, 4096),
        s.ask(2, op::WRITE, s.file, &[&write(0)]),
        s.mknod(3, s.dir, "new"),
        s.ask(4, op::FSYNC, s.file, &[sync.as_bytes()]),
        s.ask(5, op::SETATTR, s.file, &[mode.as_bytes()]),
        s.ask(6, op::UNLINK, s.dir, &[b"new\0"]),
    ];
    assert_eq!(wait, [Ok(Outcome::Deferred); 6]);
    assert_eq!(s.fs.pacer.parked(), 6);
    // what the kernel holds locks for, or its flusher waits for
    let mut times = abi::SetattrIn::new_zeroed();
    times.valid = fattr::MTIME | fattr::CTIME;
    let get = abi::GetattrIn { getattr_flags: 0, dummy: 0, fh: 0 };
    let goes_on = [
        s.ask(11, op::WRITE, s.file, &[&write(abi::WRITE_CACHE)]),
        s.ask(12, op::SETATTR, s.file, &[times.as_bytes()]),
        s.ask(13, op::LOOKUP, s.dir, &[b"f\0"]),
        s.ask(14, op::GETATTR, s.file, &[get.as_bytes()]),
        s.ask(15, op::RENAME, s.dir, &[&s.dir.0.to_ne_bytes(), b"f\0g\0"]),
        s.ask(16, op::SETATTR, s.file, &[size.as_bytes()]),
        // and all that is of somebody else
        s.read(17, s.other, 4096),
        s.ask(18, op::WRITE, s.other, &[&write(0)]),
        s.mknod(19, WireId::ROOT, "x"),
    ];
    assert_eq!(goes_on, [Ok(Outcome::Reply); 9]);
    s.serving(|| {
        s.sleep(9_000);
        std::thread::sleep(3 * LOOK);
        assert_eq!(s.fs.pacer.parked(), 6, "not yet");
        s.sleep(2_000);
        let mut answers: Vec<_> = (0..5).map(|_| s.answer()).collect();
        // another way, another queue
        answers.sort_by_key(|a| a.0 == 1);
        let (_, writes) = (answers.pop().map(|a| assert_eq!((a.0, a.1, a.2), (1, 0, 4096))), answers);
        assert!(writes.iter().all(|a| a.1 == 0), "{writes:?}");
        let order: Vec<u64> = writes.iter().map(|a| a.0).filter(|n| ![2, 4].contains(n)).collect();
        assert!(order.is_sorted(), "{order:?}");
        let last = s.answer();
        assert_eq!(last.1, 0, "{last:?}");
    });
    assert_eq!(s.fs.vol.lookup(s.dir.ino(), b"new").unwrap_err().errno(), libc::ENOENT);
    assert!(s.jobs.try_iter().count() < 9);
}

/// Of those that the kernel counts only so many are parked: the next one is served at once.
#[test]
fn what_the_kernel_counts_is_bounded() {
    let s = served!();
    s.in_debt(100);
    for n in 0..MOST_OF_ONE_UNRAISED as u64 {
        assert_eq!(s.read(n, s.file, 4096), Ok(Outcome::Deferred));
    }
    assert_eq!(s.read(100, s.file, 4096), Ok(Outcome::Reply));
    assert_eq!(s.mknod(101, s.dir, "a"), Ok(Outcome::Deferred), "which the kernel does not count");
    // where the volume is closed nobody waits for ever
    s.fs.pacer.end();
    for _ in 0..=MOST_OF_ONE_UNRAISED {
        let (unique, error, _) = s.answer();
        assert!(error == -libc::EIO && unique != 100, "{unique}: {error}");
    }
    assert_eq!(s.read(102, s.file, 4096), Ok(Outcome::Reply), "nor is anything parked then");
}

/// The kernel holds a directory's lock while something is made in it, and a rename that wants that lock stops all others: nobody
/// waits for long with it where the mount is everybody's. A read holds nothing.
#[test]
fn who_has_a_lock_of_the_kernel_waits_for_a_moment() {
    let s = served!();
    s.in_debt(100);
    assert_eq!(s.read(1, s.file, 4096), Ok(Outcome::Deferred));
    assert_eq!(s.mknod(2, s.dir, "new"), Ok(Outcome::Deferred));
    s.serving(|| {
        let (unique, error, _) = s.answer();
        assert_eq!((unique, error, s.fs.pacer.parked()), (2, 0, 1), "though the clock stands");
    });
    assert!(s.fs.vol.lookup(s.dir.ino(), b"new").is_ok());
    let kinds = [Kind::Read, Kind::Write, Kind::Through, Kind::LockedRead, Kind::LockedWrite];
    assert!(kinds.iter().all(|k| k.over_own().longest().is_none()), "over its own mount it waits for its turn");
}

/// While the kernel drops pages, which waits for reads of them, reads go on; they are paid for later.
#[test]
fn a_rush_lets_reads_go() {
    let s = served!();
    s.in_debt(100);
    assert_eq!(s.read(1, s.file, 65536), Ok(Outcome::Deferred));
    let domain = s.fs.domain_index(s.file.ino()).unwrap();
    s.serving(|| {
        let rush = s.fs.pacer.rush(domain);
        assert_eq!(s.answer(), (1, 0, 65536));
        assert_eq!(s.read(2, s.file, 4096), Ok(Outcome::Reply));
        drop(rush);
        assert_eq!(s.read(3, s.file, 4096), Ok(Outcome::Deferred));
        // a `write` of a user that is no direct one holds a page of the cache, too
        let mut arg = abi::WriteIn::new_zeroed();
        arg.size = 4096;
        let through = |n| s.ask(n, op::WRITE, s.file, &[arg.as_bytes(), &[9; 4096]]);
        assert_eq!(through(4), Ok(Outcome::Deferred));
        let rush = s.fs.pacer.rush(domain);
        let mut gone = [s.answer().0, s.answer().0];
        gone.sort_unstable();
        assert_eq!((gone, through(5)), ([3, 4], Ok(Outcome::Reply)));
        drop(rush);
        assert_eq!(s.read(6, s.file, 4096), Ok(Outcome::Deferred));
        assert!(s.fs.vol.tenant("t").unwrap().read.debt[0] > 100 * MIB);
        s.limit(Rates::default());
        assert_eq!(s.answer(), (6, 0, 4096), "without a limit nobody waits");
    });
}

/// Where writes are limited the kernel asks before each `write`, which waits; what comes of its cache is paid for then.
#[test]
fn writes_through_the_cache_wait_before_they_begin() {
    let s = served!();
    let ttl = |node: WireId| s.fs.attr_ttl(&s.fs.vol.getattr(node.ino()).unwrap());
    assert!(ttl(s.file) > 0);
    s.in_debt(10);
    assert!(ttl(s.file) == 0 && ttl(s.other) > 0);
    // no thread can be seen: it may be one that writes
    let get = abi::GetattrIn { getattr_flags: abi::GETATTR_FH, dummy: 0, fh: 0 };
    assert_eq!(s.ask(1, op::GETATTR, s.file, &[get.as_bytes()]), Ok(Outcome::Deferred));
    assert_eq!(s.ask(2, op::GETATTR, s.other, &[get.as_bytes()]), Ok(Outcome::Reply));
    s.serving(|| {
        s.sleep(11_000);
        let (unique, error, bytes) = s.answer();
        assert!(unique == 1 && error == 0 && bytes > 0);
    });
    let read = Some(Rate { per_second: MIB, burst: None });
    s.limit(Rates { read_bps: read, ..Rates::default() });
    assert!(ttl(s.file) > 0, "reads only");
}

/// Attributes of a file that nobody has open for writing are good for long. Where the kernel tells of opens it has to ask again
/// from the first one on that writes through the cache.
#[test]
fn who_opens_a_file_to_write_is_asked_before_the_first_write() {
    let s = served!(abi::init::SETXATTR_EXT);
    let write = Some(Rate { per_second: MIB, burst: None });
    s.limit(Rates { write_bps: write, ..Rates::default() });
    let ttl = |node: WireId| s.fs.attr_ttl(&s.fs.vol.getattr(node.ino()).unwrap());
    let open = |node, flags: i32| {
        let arg = abi::OpenIn { flags: flags as u32, open_flags: 0 };
        assert_eq!(s.ask(1, op::OPEN, node, &[arg.as_bytes()]), Ok(Outcome::Reply));
    };
    assert!(ttl(s.file) > 0);
    open(s.file, libc::O_RDONLY);
    open(s.other, libc::O_RDWR);
    s.channel.reply_empty(77);
    open(s.file, libc::O_WRONLY);
    s.channel.reply_empty(78);
    assert_eq!((s.answer().0, s.answer()), (77, (0, abi::NOTIFY_INVAL_INODE, size_of::<abi::InvalInodeOut>())));
    assert_eq!((s.answer().0, ttl(s.file)), (78, 0));
}

/// A tenant on which too much processor time was spent waits with all that it asks, also with what costs the device nothing: with
/// a look for a moment only. What cannot wait is charged all the same.
#[test]
fn a_tenant_without_time_left_waits() {
    let s = served!();
    assert!(s.fs.spend(s.file).is_none(), "nobody asks a clock before there is a limit");
    let tenth = Some(Rate { per_second: 100_000_000, burst: Some(1) });
    let t = s.fs.vol.tenant_change("t", |b| b.serving = tenth).unwrap();
    s.fs.rates_changed(t.domain, &s.channel);
    let runs = |node: WireId, ms: u64| {
        // as many requests
        for _ in 0..ms {
            let spending = s.fs.spend(node);
            s.ran.fetch_add(1_000_000, Ordering::Relaxed);
            drop(spending);
        }
    };
    runs(s.other, 500);
    let get = abi::GetattrIn { getattr_flags: 0, dummy: 0, fh: 0 };
    assert_eq!(s.ask(1, op::GETATTR, s.file, &[get.as_bytes()]), Ok(Outcome::Reply));
    runs(s.file, 1000);
    let (mut list, sync) = (abi::ReadIn::new_zeroed(), abi::FsyncIn::new_zeroed());
    list.size = 4096;
    let write = |flags: u32| {
        let mut arg = abi::WriteIn::new_zeroed();
        (arg.size, arg.write_flags) = (4096, flags);
        [arg.as_bytes(), &[9; 4096]].concat()
    };
    let mut ioctl = abi::IoctlIn::new_zeroed();
    (ioctl.cmd, ioctl.out_size) = (crate::control::STATS, 1 << 16);
    let wait = [
        s.read(2, s.file, 4096),
        s.ask(3, op::WRITE, s.file, &[&write(0)]),
        s.mknod(4, s.dir, "new"),
        s.ask(5, op::FSYNC, s.file, &[sync.as_bytes()]),
        s.ask(6, op::READDIR, s.dir, &[list.as_bytes()]),
        s.ask(7, op::LOOKUP, s.dir, &[b"f\0"]),
        s.ask(8, op::GETATTR, s.file, &[get.as_bytes()]),
        s.ask(9, op::STATFS, s.dir, &[]),
        s.ask(10, op::IOCTL, s.file, &[ioctl.as_bytes()]),
    ];
    assert_eq!(wait, [Ok(Outcome::Deferred); 9]);
    let goes_on = [
        s.ask(11, op::WRITE, s.file, &[&write(abi::WRITE_CACHE)]),
        s.ask(12, op::RENAME, s.dir, &[&s.dir.0.to_ne_bytes(), b"f\0g\0"]),
        s.read(13, s.other, 4096),
        s.ask(14, op::LOOKUP, WireId::ROOT, &[b"other\0"]),
        s.mknod(15, WireId::ROOT, "x"),
    ];
    assert_eq!(goes_on, [Ok(Outcome::Reply); 5]);
    s.serving(|| {
        let mut looks = [(); 4].map(|()| s.answer().0);
        looks.sort_unstable();
        assert_eq!((looks, s.fs.pacer.parked()), ([7, 8, 9, 10], 5), "though the clock stands");
        s.sleep(9_900);
        std::thread::sleep(3 * LOOK);
        assert_eq!(s.fs.pacer.parked(), 5, "not yet");
        s.sleep(300);
        let mut rest: Vec<_> = (0..5).map(|_| s.answer()).map(|a| (a.0, a.1)).collect();
        rest.sort_unstable();
        assert_eq!(rest, [2, 3, 4, 5, 6].map(|n| (n, 0)));
    });
    let served = s.fs.vol.tenant("t").unwrap().served;
    assert!(served.used == Duration::from_secs(1) && served.waits >= 5, "{served:?}");
    // the kernel asks before each `write`, too
    let ttl = |node: WireId| s.fs.attr_ttl(&s.fs.vol.getattr(node.ino()).unwrap());
    assert!(ttl(s.file) == 0 && ttl(s.other) > 0);
}
