//! What tenants may read and write in a second, and soft limits: on clocks of the tests, counted at the device.

use braidfs::{
    Cred, Demand, DomainId, Error, InodeNo, MkfsOptions, MountOptions, OpenFile, Rate, Rates, SoftLimit, TenantBudget,
    Timestamp, Volume, Way, mkfs,
};
use braidfs_device::{CountDevice, Counters, Device};
use braidfs_testkit::small::{BLOCK, MIB, ROOT, close, file, holds, in_pieces, memory, piece, relocated};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

const SECOND: u64 = 1_000_000_000;
const GIB: u64 = 1 << 30;

/// A volume on a device that counts, with a clock that the test moves.
struct Bench {
    v: Option<Volume>,
    device: Arc<dyn Device>,
    count: Arc<CountDevice>,
    now: &'static AtomicU64,
}

macro_rules! bench {
    ($how:expr) => {{
        static NOW: AtomicU64 = AtomicU64::new(0);
        Bench::new(&NOW, MountOptions { rate_clock: Some(|| Duration::from_nanos(NOW.load(Relaxed))), ..$how })
    }};
}

fn paced() -> MountOptions {
    MountOptions {
        cache_bytes: 64 * MIB,
        background: false,
        paced_above: true,
        cached_above: true,
        ..Default::default()
    }
}

fn per_second(n: u64) -> Option<Rate> {
    Some(Rate { per_second: n, burst: None })
}

impl Bench {
    fn new(now: &'static AtomicU64, how: MountOptions) -> Self {
        let device = memory(256);
        let format = MkfsOptions { domains: Some(2), group_bytes: Some(4 * MIB), ..MkfsOptions::default() };
        mkfs::format(std::slice::from_ref(&device), &format).unwrap();
        let count = Arc::new(CountDevice::new(device.clone()));
        let v = Volume::mount(vec![count.clone()], how).unwrap();
        Self { v: Some(v), device, count, now }
    }

    fn v(&self) -> &Volume {
        self.v.as_ref().unwrap()
    }

    fn tenant(&self, name: &str, rates: Rates) -> (InodeNo, DomainId) {
        let budget = TenantBudget { rates, ..TenantBudget::default() };
        let t = self.v().tenant_create(ROOT, name.as_bytes(), 0o755, name, budget, &Cred::root()).unwrap();
        (t.root, t.domain)
    }

    fn now(&self) -> u64 {
        self.now.load(Relaxed)
    }

    /// Does `work` when its turn has come, by the clock, which is moved.
    fn paced<R>(&self, domain: DomainId, demand: Demand, work: impl FnOnce() -> R) -> R {
        let turn = self.v().come(domain, demand).unwrap();
        while let Some(due) = turn.due() {
            self.now.fetch_add(u64::try_from(due.as_nanos()).unwrap(), Relaxed);
        }
        let _paid = turn.go();
        work()
    }

    /// What the device is asked in ten seconds of `work`, and until all of it is there.
    fn ten_seconds(&self, mut work: impl FnMut(u64)) -> Counters {
        let (begin, before) = (self.now(), self.count.counters());
        let mut n = 0;
        while self.now() < begin + 10 * SECOND {
            work(n);
            n += 1;
        }
        self.v().sync().unwrap();
        self.count.counters() - before
    }

    fn close(mut self) {
        close(self.v.take().unwrap(), std::slice::from_ref(&self.device));
    }
}

/// Within 5 %.
fn about(is: u64, limit: u64) {
    assert!(is.abs_diff(limit) * 20 <= limit, "{is}, not {limit}");
}

#[test]
fn bytes_written_are_as_many_as_allowed() {
    let b = bench!(paced());
    let (root, d) = b.tenant("t", Rates { write_bps: per_second(8 * MIB), ..Rates::default() });
    let f = file(b.v(), root, "f");
    let piece = vec![7; 100_000];
    let seen = b.ten_seconds(|n| {
        let write = || b.v().write(&f, n % 500 * 100_000, &piece).unwrap();
        b.paced(d, Demand::write(piece.len()), write);
        if n % 50 == 49 {
            b.paced(d, Demand::sync(), || b.v().fsync(f.ino(), false).unwrap());
        }
    });
    about(seen.write_blocks * BLOCK, 80 * MIB);
    let t = b.v().tenant("t").unwrap();
    about(t.written.bytes, seen.write_blocks * BLOCK);
    assert!(t.written.waits > 100 && t.read.waits == 0, "{t:?}");
    drop(f);
    b.close();
}

/// Small synchronous writes: what they cost are requests.
#[test]
fn requests_written_are_as_many_as_allowed() {
    let b = bench!(paced());
    let (root, d) = b.tenant("t", Rates { write_iops: per_second(200), ..Rates::default() });
    let f = file(b.v(), root, "f");
    let seen = b.ten_seconds(|n| {
        b.v().write(&f, n * 7 % 100 * BLOCK, &[n as u8; 4096]).unwrap();
        b.paced(d, Demand::sync(), || b.v().fsync(f.ino(), false).unwrap());
    });
    about(seen.writes, 2000);
    about(b.v().tenant("t").unwrap().written.requests, seen.writes);
    drop(f);
    b.close();
}

#[test]
fn bytes_and_requests_read_are_as_many_as_allowed() {
    let b = bench!(paced());
    let (root, d) = b.tenant("t", Rates::default());
    let f = file(b.v(), root, "f");
    for n in 0..32 {
        b.v().write(&f, n * MIB, &vec![n as u8; MIB as usize]).unwrap();
    }
    b.v().sync().unwrap();
    let mut buf = vec![0; 64 << 10];
    for (rates, bytes, requests) in [
        (Rates { read_bps: per_second(5 * MIB), ..Rates::default() }, Some(50 * MIB), None),
        (Rates { read_iops: per_second(150), read_bps: per_second(1 << 40), ..Rates::default() }, None, Some(1500)),
    ] {
        b.v().tenant_change("t", |t| t.rates = rates).unwrap();
        let seen = b.ten_seconds(|n| {
            let at = n * 13 % 500 * (64 << 10);
            let got = b.paced(d, Demand::read(buf.len()), || b.v().read_unnoted(&f, at, &mut buf).unwrap());
            assert_eq!((got, buf[0]), (64 << 10, (at / MIB) as u8));
        });
        bytes.inspect(|n| about(seen.read_blocks * BLOCK, *n));
        requests.inspect(|n| about(seen.reads, *n));
    }
    drop(f);
    b.close();
}

/// Many small files: what is charged is the metadata that a commit writes, and who comes after it waits for that. Nobody else
/// does.
#[test]
fn commits_are_debt_of_their_tenant_alone() {
    let b = bench!(paced());
    // a group that is claimed meanwhile is within the burst
    let rate = Rate { per_second: MIB, burst: Some(MIB / 2) };
    let (root, d) = b.tenant("t", Rates { write_bps: Some(rate), ..Rates::default() });
    let (_, free) = b.tenant("free", Rates::default());
    let (_, other) = b.tenant("other", Rates { write_bps: per_second(MIB), ..Rates::default() });
    for d in 0..b.v().domains().len() {
        b.v().commit_domain(DomainId(d as u16), true).unwrap();
    }
    b.now.fetch_add(100 * SECOND, Relaxed);
    let before = b.count.counters();
    for n in 0..3000 {
        let turn = b.v().come(d, Demand::change()).unwrap();
        assert_eq!(turn.due(), None, "nothing else is written yet");
        file(b.v(), root, &format!("a name that is not very short {n}"));
    }
    b.v().commit_domain(d, true).unwrap();
    let wrote = (b.count.counters() - before).write_blocks * BLOCK;
    let debt = b.v().tenant("t").unwrap().written.debt[0];
    about(debt, wrote);
    let due = b.v().come(d, Demand::change()).unwrap().due().expect("a wait");
    about(u64::try_from(due.as_nanos()).unwrap(), (debt - MIB / 2) * SECOND / MIB);
    assert!(b.v().come(free, Demand::write(1 << 30)).is_none());
    assert_eq!(b.v().come(other, Demand::change()).unwrap().due(), None);
    assert!(b.v().come(DomainId(0), Demand::write(1 << 30)).is_none());
    b.close();
}

/// What moves so that a group becomes another tenant's costs that one, not its owner, whichever of them has limits.
#[test]
fn who_gets_a_group_pays_for_what_moves() {
    for owner_is_limited in [true, false] {
        let b = bench!(paced());
        let v = b.v();
        let limits = || Rates { read_bps: per_second(GIB), write_iops: per_second(SECOND), ..Rates::default() };
        let serving = Some(Rate { per_second: SECOND / 2, burst: Some(SECOND) });
        let (gives, _) = b.tenant("gives", if owner_is_limited { limits() } else { Rates::default() });
        let (takes, _) = b.tenant("takes", limits());
        v.tenant_change("takes", |t| t.serving = serving).unwrap();
        if owner_is_limited {
            v.tenant_change("gives", |t| t.serving = serving).unwrap();
        }
        let used = |name| {
            let t = v.tenant(name).unwrap();
            (t.read.bytes, t.written.requests, t.served.used)
        };
        let kept = in_pieces(v, gives, 200, || {});
        let f = file(v, takes, "f");
        let mut at = 0;
        while relocated(v) == 0 {
            let before = [used("gives"), used("takes")];
            assert_eq!(v.write(&f, at, &piece(at / MIB)).unwrap() as u64, MIB);
            at += MIB;
            let (after, moved) = ([used("gives"), used("takes")], relocated(v) * BLOCK);
            assert_eq!(after[0], before[0], "of {moved} bytes");
            assert!(after[1].0 - before[1].0 >= moved / 2, "{before:?} {after:?} {moved}");
            assert!(moved == 0 || after[1].1 > before[1].1 && after[1].2 > before[1].2, "{before:?} {after:?}");
        }
        kept.iter().for_each(|f| holds(v, f, MIB / 2));
        drop((kept, f));
        b.close();
    }
}

/// What is committed costs its tenant the processor time of whoever does it, and no other one; to write costs the caller his own.
#[test]
fn commits_cost_their_tenant_time() {
    let b = bench!(paced());
    let roots = ["one", "other"].map(|name| b.tenant(name, Rates::default()).0);
    let serving = Some(Rate { per_second: SECOND / 2, burst: Some(SECOND) });
    for name in ["one", "other"] {
        b.v().tenant_change(name, |t| t.serving = serving).unwrap();
    }
    b.v().sync().unwrap();
    let used = || ["one", "other"].map(|name| b.v().tenant(name).unwrap().served.used);
    let before = used();
    let f = file(b.v(), roots[0], "f");
    for n in 0..16 {
        b.v().write(&f, n * MIB, &vec![7; MIB as usize]).unwrap();
    }
    assert_eq!(used(), before);
    b.v().sync().unwrap();
    let after = used();
    assert!(after[0] > before[0] && after[1] == before[1], "{before:?} {after:?}");
    // a thread of a front end is asked about, in the library nobody waits
    let d = b.v().tenant("one").unwrap().domain;
    assert!(b.v().serving_limited(d) && b.v().come(d, Demand::sync()).is_some());
    let t = b.v().tenant("one").unwrap();
    assert_eq!((t.budget.serving, t.served.waits), (serving, 0));
    let least = b.v().tenant_change("one", |t| t.serving = Some(Rate { per_second: SECOND / 101, burst: None }));
    assert!(matches!(least, Err(Error::Invalid(_))));
    drop(f);
    b.close();
}

/// Threads write, read and sync at limits that change all the time, to none and to the lowest: no error, no byte lost.
#[test]
fn limits_change_under_load() {
    static NOT_USED: AtomicU64 = AtomicU64::new(0);
    let b = Bench::new(&NOT_USED, MountOptions { paced_above: false, ..paced() });
    let low = Rates {
        write_bps: Some(Rate { per_second: 64 << 10, burst: Some(1) }),
        read_bps: Some(Rate { per_second: 64 << 10, burst: Some(1) }),
        read_iops: per_second(10),
        write_iops: per_second(10),
    };
    let (root, _) = b.tenant("t", low);
    let v = b.v();
    let write = |k: u64| {
        let f: OpenFile = file(v, root, &format!("f{k}"));
        for n in 0..40 {
            assert_eq!(v.write(&f, n * BLOCK * 4, &[k as u8 + n as u8; 16384]).unwrap(), 16384);
            if n % 10 == 9 {
                v.fsync(f.ino(), false).unwrap();
            }
        }
        let mut buf = [0; 16384];
        for n in 0..40 {
            assert_eq!(v.read(&f, n * BLOCK * 4, &mut buf).unwrap(), 16384);
            assert!(buf.iter().all(|x| *x == k as u8 + n as u8));
        }
    };
    std::thread::scope(|s| {
        let all: Vec<_> = (0..4).map(|k| s.spawn(move || write(k))).collect();
        for n in 0u64.. {
            if all.iter().all(|t| t.is_finished()) {
                break;
            }
            let to = if n % 5 == 4 { Rates::default() } else { low };
            v.tenant_change("t", |t| t.rates = to).unwrap();
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    v.tenant_change("t", |t| t.rates = low).unwrap();
    let t = v.tenant("t").unwrap();
    assert!(t.written.waits > 0, "{t:?}");
    b.close();
}

#[test]
fn rates_stay_over_a_mount() {
    let b = bench!(paced());
    let rates = Rates {
        read_bps: Some(Rate { per_second: 100 * MIB, burst: Some(1) }),
        write_bps: per_second(1 << 50),
        read_iops: None,
        write_iops: Some(Rate { per_second: 10, burst: Some(1 << 50) }),
    };
    let soft_space = Some(SoftLimit { space: 3 * MIB, grace: Duration::from_secs(u32::MAX.into()) });
    let serving = Some(Rate { per_second: SECOND / 5, burst: Some(3) });
    let budget =
        TenantBudget { space: Some(3 * MIB), soft_space, rates, inodes: Some(7), serving, ..TenantBudget::default() };
    b.v().tenant_create(ROOT, b"t", 0o755, "t", budget, &Cred::root()).unwrap();
    for wrong in [
        TenantBudget { rates: Rates { read_bps: per_second(65535), ..rates }, ..budget },
        TenantBudget { rates: Rates { write_bps: per_second((1 << 50) + 1), ..rates }, ..budget },
        TenantBudget { rates: Rates { write_iops: per_second(9), ..rates }, ..budget },
        TenantBudget { rates: Rates { read_iops: Some(Rate { per_second: 10, burst: Some(0) }), ..rates }, ..budget },
        TenantBudget { soft_space: soft_space.map(|s| SoftLimit { space: MIB - 1, ..s }), ..budget },
        TenantBudget { soft_space: soft_space.map(|s| SoftLimit { space: 4 * MIB, ..s }), ..budget },
        TenantBudget {
            soft_space: soft_space.map(|s| SoftLimit { grace: Duration::from_secs(1 << 32), ..s }),
            ..budget
        },
    ] {
        assert!(matches!(b.v().tenant_set("t", wrong), Err(Error::Invalid(_))), "{wrong:?}");
    }
    let device = b.device.clone();
    b.close();
    let v = Volume::mount(vec![device.clone()], paced()).unwrap();
    let t = v.tenant("t").unwrap();
    assert_eq!(t.budget, budget);
    assert!(v.come(t.domain, Demand::write(1)).is_some() && v.rates_limited(t.domain, Way::Read), "from the mount on");
    v.tenant_change("t", |b| (b.rates, b.soft_space, b.serving) = Default::default()).unwrap();
    assert!(v.come(t.domain, Demand::write(1)).is_none());
    v.tenant_remove("t").unwrap();
    close(v, std::slice::from_ref(&device));
}

/// Writes until there is no room, or so many MiB.
fn write_mib(v: &Volume, f: &OpenFile, mib: u64) -> Result<(), Error> {
    let begin = v.getattr(f.ino()).unwrap().size;
    let mut at = begin;
    while at < begin + mib * MIB {
        at += v.write(f, at, &[1; 65536])? as u64;
    }
    v.sync()
}

/// A soft limit is exceeded for its grace, and is a hard one from then on until less is in use; also over a mount.
#[test]
fn a_soft_limit_is_a_hard_one_after_its_grace() {
    static SECONDS: AtomicI64 = AtomicI64::new(1_000_000);
    let clock = Some((|| Timestamp { sec: SECONDS.load(Relaxed), nsec: 0 }) as fn() -> Timestamp);
    let b = bench!(MountOptions { clock, ..paced() });
    let budget = |grace| {
        let soft_space = Some(SoftLimit { space: 4 * MIB, grace: Duration::from_secs(grace) });
        TenantBudget { space: Some(20 * MIB), soft_space, ..TenantBudget::default() }
    };
    let t = b.v().tenant_create(ROOT, b"t", 0o755, "t", budget(100), &Cred::root()).unwrap();
    let look = |v: &Volume| {
        v.look_at_soft_limits();
        let t = v.tenant("t").unwrap();
        (t.soft_exceeded_since, t.grace_is_over)
    };
    let f = file(b.v(), t.root, "f");
    write_mib(b.v(), &f, 2).unwrap();
    assert_eq!(look(b.v()), (None, false));
    write_mib(b.v(), &f, 4).unwrap();
    assert_eq!(look(b.v()), (Some(1_000_000), false));
    SECONDS.fetch_add(99, Relaxed);
    assert_eq!(look(b.v()), (Some(1_000_000), false));
    write_mib(b.v(), &f, 2).unwrap();
    SECONDS.fetch_add(1, Relaxed);
    assert_eq!(look(b.v()), (Some(1_000_000), true));
    assert!(matches!(write_mib(b.v(), &f, 2), Err(Error::NoSpace)));
    assert_eq!(b.v().statfs_of(t.root).unwrap().available, 0);
    drop(f);
    // the next mount knows it
    let device = b.device.clone();
    b.close();
    let how = MountOptions { clock, ..paced() };
    let v = Volume::mount(vec![device.clone()], how.clone()).unwrap();
    let t = v.tenant("t").unwrap();
    assert_eq!((t.soft_exceeded_since, t.grace_is_over), (Some(1_000_000), true));
    let f = v.open(v.lookup(t.root, b"f").unwrap().ino).unwrap();
    assert!(matches!(write_mib(&v, &f, 2), Err(Error::NoSpace)));
    // with less in use it begins anew
    v.setattr(f.ino(), &braidfs::SetAttr { size: Some(MIB), ..Default::default() }).unwrap();
    v.sync().unwrap();
    assert_eq!(look(&v), (None, false));
    write_mib(&v, &f, 6).unwrap();
    let since = u64::try_from(SECONDS.load(Relaxed)).unwrap();
    assert_eq!(look(&v), (Some(since), false));
    // a longer grace counts from when it began; one that is over at once is a hard limit
    v.tenant_set("t", budget(0)).unwrap();
    assert!(matches!(write_mib(&v, &f, 1), Err(Error::NoSpace)));
    v.tenant_set("t", budget(1000)).unwrap();
    assert_eq!(look(&v), (Some(since), false));
    write_mib(&v, &f, 1).unwrap();
    v.tenant_change("t", |b| b.soft_space = None).unwrap();
    assert_eq!(look(&v), (None, false));
    write_mib(&v, &f, 1).unwrap();
    drop(f);
    close(v, std::slice::from_ref(&device));
}
