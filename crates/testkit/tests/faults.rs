//! Devices that fail: errors on reads, writes and flushes, short writes, a full or dead device, writes that are lost or go
//! astray, rotten bits. Seeds are fixed; `BRAIDFS_SEED` takes another.

use braidfs::namespace::paths::OpenHow;
use braidfs::{
    Cred, DomainId, Error, FileKind, MkfsOptions, MountOptions, NewNode, NodeId, OpenFile, Placement, Volume, mkfs,
};
use braidfs_device::{Device, Effect, FaultDevice, MemDevice, Op, Rule};
use braidfs_testkit::damage::sample::{change, fill_first, options};
use braidfs_testkit::damage::truth::{Truth, Verdict, compare, read_all};
use braidfs_testkit::ops::fill;
use braidfs_testkit::walk::fsck;
use std::sync::Arc;
use std::time::{Duration, Instant};

const EIO: i32 = 5;
const ENOSPC: i32 = 28;
/// What has not come by then does not come.
const PATIENCE: Duration = Duration::from_secs(60);

/// A volume of two domains on two devices, one domain's groups on each, and faults before both.
struct Two {
    inner: [Arc<MemDevice>; 2],
    faulty: [Arc<FaultDevice>; 2],
}

impl Two {
    fn new() -> Self {
        let inner = [0, 1].map(|_| Arc::new(MemDevice::new(8192)));
        let faulty = [0, 1].map(|i: usize| Arc::new(FaultDevice::new(inner[i].clone(), 7)));
        let two = Self { inner, faulty };
        let o = MkfsOptions { domains: Some(2), placement: Placement::Spread, ..MkfsOptions::default() };
        mkfs::format(&two.devices(), &o).unwrap();
        two
    }

    fn devices(&self) -> Vec<Arc<dyn Device>> {
        self.faulty.iter().map(|d| d.clone() as Arc<dyn Device>).collect()
    }

    /// The devices without their faults, after a crash or an unmount.
    fn healthy(&self) -> Vec<Arc<dyn Device>> {
        self.inner.iter().map(|d| Arc::new(MemDevice::from_image(d.snapshot())) as Arc<dyn Device>).collect()
    }

    fn mount(&self) -> Volume {
        Volume::mount(self.devices(), options()).unwrap()
    }
}

fn create(v: &Volume, name: &str) -> braidfs::Result<OpenFile> {
    let how = OpenHow { read: true, write: true, create: true, mode: 0o600, ..OpenHow::default() };
    v.open_path(name.as_bytes(), how, &Cred::root())
}

/// A new synced file in a directory of its own, both in `domain`.
fn file_in(v: &Volume, domain: u16, name: &str) -> OpenFile {
    for i in 0..64 {
        let f = create(v, &format!("{name}.{i}")).unwrap();
        if v.domain_of(f.ino()).unwrap() == DomainId(domain) {
            v.write(&f, 0, &fill(1, 0, 20_000)).unwrap();
            v.sync().unwrap();
            return f;
        }
    }
    panic!("no file came into domain {domain}");
}

fn content(v: &Volume, ino: NodeId) -> braidfs::Result<Vec<u8>> {
    let f = v.open(ino)?;
    let mut data = vec![0; v.getattr(ino)?.size as usize];
    let n = v.read(&f, 0, &mut data)?;
    data.truncate(n);
    Ok(data)
}

/// Domain 1 fails by `rule` on its device; domain 0 must not notice, and domain 1 says so until it is mounted again.
fn one_domain_fails(rule: Rule, name: &str) {
    let two = Two::new();
    let v = two.mount();
    let (sound, hurt) = (file_in(&v, 0, "sound"), file_in(&v, 1, "hurt"));
    assert!(v.domains().iter().all(|d| d.failed.is_none()), "{name}");
    two.faulty[1].add(rule);
    // sooner or later what is written has to get to the device
    let failed = (0..50u32).find_map(|i| {
        let data = fill(2, 0, 20_000);
        let r = v.write(&hurt, 0, &data).map(|_| ()).and_then(|()| v.fsync(hurt.ino(), i % 2 == 1));
        r.and_then(|()| v.write(&hurt, 40_000 * u64::from(i), &data).map(|_| ())).and_then(|()| v.sync()).err()
    });
    let why = failed.unwrap_or_else(|| panic!("{name}: every fsync claimed success"));
    assert!(!why.to_string().is_empty());
    assert!(two.faulty[1].fired() > 0, "{name}");
    // The device is well again: the domain stays read-only and says why.
    two.faulty[1].clear();
    let again = v.fsync(hurt.ino(), false).expect_err("an fsync after a failed one claims success");
    assert!(matches!(again, Error::DomainFailed { domain: DomainId(1), .. }), "{name}: {again}");
    let write = v.write(&hurt, 0, b"x").expect_err("a failed domain takes writes");
    assert!(matches!(write, Error::DomainFailed { .. }), "{name}: {write}");
    assert_eq!(write.errno(), 30, "EROFS");
    let info = v.domains();
    assert!(info[1].failed.is_some() && info[0].failed.is_none(), "{name}: {info:?}");
    content(&v, hurt.ino()).unwrap_or_else(|e| panic!("{name}: what is there cannot be read: {e}"));
    // The other domain goes on.
    v.write(&sound, 0, &fill(3, 0, 30_000)).unwrap_or_else(|e| panic!("{name}: the sound domain: {e}"));
    v.fsync(sound.ino(), false).unwrap_or_else(|e| panic!("{name}: the sound domain: {e}"));
    let (sound, hurt) = (sound.ino(), hurt.ino());
    assert!(v.unmount().is_err(), "{name}: the unmount hides it");
    // A new mount starts from what is durable.
    let healthy = two.healthy();
    let v = Volume::mount(healthy.clone(), options()).unwrap_or_else(|e| panic!("{name}: {e}"));
    assert_eq!(content(&v, sound).unwrap(), fill(3, 0, 30_000), "{name}");
    let old = content(&v, hurt).unwrap();
    let whole = |seed| old.len() >= 20_000 && old[..20_000] == fill(seed, 0, 20_000)[..];
    assert!(whole(1) || whole(2), "{name}: neither the synced content nor the new one");
    let f = v.open(hurt).unwrap();
    v.write(&f, 0, b"again").unwrap();
    v.fsync(hurt, false).unwrap();
    drop(f);
    v.unmount().unwrap();
    fsck(&healthy).unwrap_or_else(|e| panic!("{name}: {e}"));
}

#[test]
fn a_failing_device_takes_its_domain_along_and_no_other() {
    one_domain_fails(Rule::new(Op::Write, Effect::Fail(EIO)), "write error");
    one_domain_fails(Rule::new(Op::Write, Effect::Fail(EIO)).times(1), "one write error");
    one_domain_fails(Rule::new(Op::Write, Effect::Fail(ENOSPC)), "full device");
    one_domain_fails(Rule::new(Op::Write, Effect::Short(0)), "short write");
    one_domain_fails(Rule::new(Op::Flush, Effect::Fail(EIO)).times(1), "one failed flush");
    one_domain_fails(Rule::new(Op::Flush, Effect::Fail(EIO)), "failed flush");
}

/// On one device a failed flush is everybody's: nothing written since the last good one may be claimed.
#[test]
fn after_a_failed_flush_nothing_is_claimed() {
    for skip in 0..12 {
        let inner = Arc::new(MemDevice::new(12288));
        let faulty = Arc::new(FaultDevice::new(inner.clone(), 1));
        let devices = [faulty.clone() as Arc<dyn Device>];
        mkfs::format(&devices, &MkfsOptions { domains: Some(2), ..MkfsOptions::default() }).unwrap();
        let v = Volume::mount(devices.to_vec(), options()).unwrap();
        faulty.add(Rule::new(Op::Flush, Effect::Fail(EIO)).skip(skip).times(1));
        let mut durable = Vec::new();
        let mut failed = false;
        for i in 0..20u32 {
            let before = inner.snapshot();
            let done = create(&v, &format!("f{i}")).and_then(|f| {
                v.write(&f, 0, &fill(i, 0, 9000))?;
                v.fsync(f.ino(), false)?;
                Ok(f.ino())
            });
            match done {
                Ok(ino) if !failed => durable.push((ino, i)),
                Ok(_) => panic!("skip {skip}: fsync {i} claims success after a failed flush"),
                Err(_) if failed => {}
                Err(_) => {
                    failed = true;
                    // as the kernel does: what the flush did not write is gone
                    before.copy_to(&*inner).unwrap();
                }
            }
        }
        assert!(failed, "skip {skip}: no flush failed");
        v.crash();
        let image: Arc<dyn Device> = Arc::new(MemDevice::from_image(inner.snapshot()));
        let v = Volume::mount(vec![image.clone()], options()).unwrap();
        for (ino, i) in durable {
            assert_eq!(content(&v, ino).unwrap(), fill(i, 0, 9000), "skip {skip}: f{i} was synced");
        }
        v.unmount().unwrap();
        fsck(&[image]).unwrap();
    }
}

#[test]
fn a_dead_device_ends_in_errors() {
    let two = Two::new();
    let v = two.mount();
    let (sound, hurt) = (file_in(&v, 0, "sound"), file_in(&v, 1, "hurt"));
    two.faulty[1].stop();
    v.write(&sound, 0, &fill(4, 0, 5000)).unwrap();
    v.fsync(sound.ino(), false).unwrap();
    let _ = v.write(&hurt, 0, &fill(5, 0, 5000));
    assert!(v.fsync(hurt.ino(), false).is_err());
    assert!(v.sync().is_err());
    let (sound, hurt) = (sound.ino(), hurt.ino());
    assert!(v.unmount().is_err());
    let healthy = two.healthy();
    let v = Volume::mount(healthy.clone(), options()).unwrap();
    assert_eq!(content(&v, sound).unwrap()[..5000], fill(4, 0, 5000)[..]);
    assert_eq!(content(&v, hurt).unwrap(), fill(1, 0, 20_000));
    v.unmount().unwrap();
    fsck(&healthy).unwrap();
}

/// What cannot be read answers EIO, the rest is there; nothing has failed when it can be read again.
#[test]
fn unreadable_blocks_are_errors_where_they_lie() {
    let (device, truth) = healthy_volume();
    let faulty = Arc::new(FaultDevice::new(device.clone(), 3));
    let mut refused = 0;
    for first in (0..device.blocks()).step_by(64) {
        let Ok(v) = Volume::mount(vec![faulty.clone() as Arc<dyn Device>], options()) else {
            panic!("the volume cannot be mounted with all its blocks readable");
        };
        faulty.add(Rule::new(Op::Read, Effect::Fail(EIO)).blocks(first..first + 64));
        for (path, verdict) in compare(&v, &truth, true) {
            match verdict {
                Verdict::Right => {}
                Verdict::Refused(e) => {
                    refused += 1;
                    assert!(e.contains("error") || e.contains("read-only"), "{e}");
                }
                other => panic!("block {first}: {}: {other:?}", String::from_utf8_lossy(&path)),
            }
        }
        faulty.clear();
        for (path, verdict) in compare(&v, &truth, true) {
            assert_eq!(verdict, Verdict::Right, "block {first}: {}", String::from_utf8_lossy(&path));
        }
        v.unmount().unwrap();
    }
    assert!(refused > 100, "{refused}");
}

/// A mount whose reads fail is refused, wherever that happens, and leaves the volume as it was.
#[test]
fn a_mount_with_read_errors_changes_nothing() {
    let (device, truth) = healthy_volume();
    for skip in 0..40 {
        let faulty = Arc::new(FaultDevice::new(device.clone(), 3));
        faulty.add(Rule::new(Op::Read, Effect::Fail(EIO)).skip(skip).times(1));
        if let Ok(v) = Volume::mount(vec![faulty.clone() as Arc<dyn Device>], options()) {
            v.crash();
        }
    }
    let v = Volume::mount(vec![device.clone() as Arc<dyn Device>], options()).unwrap();
    assert!(compare(&v, &truth, true).values().all(|x| *x == Verdict::Right));
    v.unmount().unwrap();
    fsck(&[device]).unwrap();
}

/// Options of a mount as it is in use: threads in the background, and commits of their own.
fn busy_options() -> MountOptions {
    MountOptions { commit_interval: Duration::from_millis(20), cache_bytes: 64 << 20, ..MountOptions::default() }
}

/// Waits for something that has to come.
fn until(what: &str, mut ready: impl FnMut() -> bool) {
    let start = Instant::now();
    while !ready() {
        assert!(start.elapsed() < PATIENCE, "{what}: not in {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A device that answers nothing for a while holds up what needs it: not the other domains, not reads of what is in memory,
/// not writes into memory. When it answers again everything goes on, and an unmount that waited for it ends.
#[test]
fn a_held_device_holds_up_its_domain_alone() {
    for op in [Op::Write, Op::Flush] {
        let two = Two::new();
        let v = Volume::mount(two.devices(), busy_options()).unwrap();
        let (sound, slow) = (file_in(&v, 0, "sound"), file_in(&v, 1, "slow"));
        let device = &two.faulty[1];
        device.add(Rule::new(op, Effect::Hold));
        let data = fill(2, 0, 20_000);
        std::thread::scope(|s| {
            v.write(&slow, 0, &data).unwrap();
            let sync = s.spawn(|| v.fsync(slow.ino(), false));
            until("the fsync comes to the device", || device.held() > 0);
            // what is in memory can be read, and written where its commit is not about that file
            assert_eq!(content(&v, slow.ino()).unwrap(), data);
            let commits = v.domains()[0].commits;
            for i in 0..40u32 {
                let f = create(&v, &format!("more.{i}"));
                // created by turns in both domains: in the slow one too, in memory
                let f = f.unwrap();
                v.write(&f, 0, &fill(i, 0, 9000)).unwrap();
                if v.domain_of(f.ino()).unwrap() == DomainId(0) {
                    v.write(&sound, u64::from(i) * 9000, &fill(3, 0, 9000)).unwrap();
                    v.fsync(sound.ino(), false).unwrap();
                }
            }
            // the background goes on there, too
            v.write(&sound, 0, &fill(4, 0, 9000)).unwrap();
            until("the sound domain commits by itself", || v.domains()[0].commits > commits);
            assert!(!sync.is_finished() && device.held() > 0, "{op:?}");
            device.clear();
            sync.join().unwrap().unwrap();
        });
        // held again while it is unmounted
        let (sound, slow) = (sound.ino(), slow.ino());
        device.add(Rule::new(op, Effect::Hold));
        std::thread::scope(|s| {
            let end = s.spawn(move || v.unmount());
            until("the unmount comes to the device", || device.held() > 0);
            assert!(!end.is_finished());
            device.clear();
            until("the unmount ends", || end.is_finished());
            end.join().unwrap().unwrap();
        });
        let healthy = two.healthy();
        let v = Volume::mount(healthy.clone(), options()).unwrap();
        assert_eq!(content(&v, slow).unwrap(), data);
        assert_eq!(content(&v, sound).unwrap()[..9000], fill(4, 0, 9000)[..]);
        v.unmount().unwrap();
        fsck(&healthy).unwrap();
    }
}

/// Every answer takes its time: everything is right all the same, and ends.
#[test]
fn a_slow_device_is_only_slow() {
    let (device, truth) = healthy_volume();
    let faulty = Arc::new(FaultDevice::new(device.clone(), 3));
    for op in [Op::Read, Op::Write, Op::Flush, Op::Discard] {
        faulty.add(Rule::new(op, Effect::Delay(Duration::from_millis(30))).chance(0.02));
        faulty.add(Rule::new(op, Effect::Delay(Duration::from_micros(300))));
    }
    let v = Volume::mount(vec![faulty.clone() as Arc<dyn Device>], busy_options()).unwrap();
    std::thread::scope(|s| {
        let writers: Vec<_> = (0..3u32)
            .map(|t| {
                let v = &v;
                s.spawn(move || {
                    for i in 0..15u32 {
                        let f = create(v, &format!("by {t}, {i}")).unwrap();
                        v.write(&f, 0, &fill(t * 100 + i, 0, 12_000)).unwrap();
                        if i % 3 == 0 {
                            v.fsync(f.ino(), false).unwrap();
                        }
                    }
                })
            })
            .collect();
        writers.into_iter().for_each(|w| w.join().unwrap());
    });
    v.sync().unwrap();
    v.unmount().unwrap();
    assert!(faulty.fired() > 100, "{}", faulty.fired());
    let v = Volume::mount(vec![device.clone() as Arc<dyn Device>], options()).unwrap();
    for (t, i) in (0..3u32).flat_map(|t| (0..15).map(move |i| (t, i))) {
        let f = create(&v, &format!("by {t}, {i}")).unwrap();
        assert_eq!(content(&v, f.ino()).unwrap(), fill(t * 100 + i, 0, 12_000));
    }
    for (path, verdict) in compare(&v, &truth, true).into_iter().filter(|(p, _)| !p.starts_with(b"by ")) {
        assert_eq!(verdict, Verdict::Right, "{}", String::from_utf8_lossy(&path));
    }
    v.unmount().unwrap();
    fsck(&[device]).unwrap();
}

fn mkfs_options() -> MkfsOptions {
    MkfsOptions {
        domains: Some(3),
        group_bytes: Some(4 << 20),
        placement: Placement::Spread,
        data_checksums: true,
        ..MkfsOptions::default()
    }
}

fn populate(device: &Arc<dyn Device>, mut between: impl FnMut()) -> braidfs::Result<()> {
    let v = Volume::mount(vec![device.clone()], options())?;
    fill_first(&v)?;
    v.sync()?;
    between();
    for round in 1..=2 {
        change(&v, round)?;
        v.sync()?;
    }
    v.unmount()
}

fn healthy_volume() -> (Arc<MemDevice>, Truth) {
    let device = Arc::new(MemDevice::new(12288));
    let d: Arc<dyn Device> = device.clone();
    mkfs::format(std::slice::from_ref(&d), &mkfs_options()).unwrap();
    populate(&d, || {}).unwrap();
    let v = Volume::mount(vec![d], options()).unwrap();
    let truth = read_all(&v).unwrap();
    v.unmount().unwrap();
    (device, truth)
}

/// A device that lies while the volume is filled: on a volume with data checksums, which was unmounted, every file is
/// right, an operation failed, or the check finds something. (A table block whose last write was lost is whole and old:
/// the check must find it.)
#[test]
fn lies_of_the_device_are_noticed() {
    let seed = braidfs_testkit::seed();
    println!("BRAIDFS_SEED={seed}");
    let (_, truth) = healthy_volume();
    let mut rng = fastrand::Rng::with_seed(seed);
    let (mut noticed, mut harmless, mut wrong) = (0, 0, Vec::new());
    let effects = [
        (Op::Write, Effect::Lose),
        (Op::Write, Effect::Misdirect(1)),
        (Op::Write, Effect::Misdirect(-3)),
        (Op::Write, Effect::Misdirect(1000)),
        (Op::Write, Effect::FlipBit),
        (Op::Read, Effect::FlipBit),
        (Op::Read, Effect::Misdirect(5)),
    ];
    for i in 0..210 {
        let (op, effect) = effects[i % effects.len()];
        let inner = Arc::new(MemDevice::new(12288));
        let plain: Arc<dyn Device> = inner.clone();
        mkfs::format(std::slice::from_ref(&plain), &mkfs_options()).unwrap();
        let faulty = Arc::new(FaultDevice::new(inner.clone(), rng.u64(..)));
        let rule = Rule::new(op, effect).chance(0.3).times(1 + rng.u64(..4));
        let d: Arc<dyn Device> = faulty.clone();
        let done = populate(&d, || faulty.add(rule.clone()));
        let fired = faulty.fired();
        // the lies end here
        let image = Arc::new(MemDevice::from_image(inner.snapshot()));
        let devices = [image.clone() as Arc<dyn Device>];
        let checked = fsck(&devices);
        let mut bad = Vec::new();
        let mut refused = done.is_err();
        match Volume::mount(devices.to_vec(), options()) {
            Ok(v) => {
                for (path, verdict) in compare(&v, &truth, true) {
                    match verdict {
                        Verdict::Right => {}
                        Verdict::Refused(_) => refused = true,
                        // blocks that are overwritten in place have no checksums
                        _ if path == b"b/in-place" => refused = true,
                        other => bad.push(format!("/{}: {other:?}", String::from_utf8_lossy(&path))),
                    }
                }
                let _ = v.unmount();
            }
            Err(_) => refused = true,
        }
        if fired == 0 || (checked.is_ok() && !refused && bad.is_empty()) {
            harmless += 1;
        } else if done.is_err() || checked.is_err() || bad.is_empty() {
            noticed += 1;
        } else {
            wrong.push(format!("{i}: {effect:?}, {fired} times: {}", bad.join("; ")));
        }
        repair_ends(&image);
    }
    println!("{noticed} noticed, {harmless} harmless, {} not noticed", wrong.len());
    assert!(wrong.is_empty(), "seed {seed}:\n{}", wrong.join("\n"));
    assert!(noticed > 60, "{noticed}");
}

/// A repair of whatever is left ends in a volume that the next check finds sound.
fn repair_ends(image: &Arc<MemDevice>) {
    let devices = [image.clone() as Arc<dyn Device>];
    let options = braidfs::fsck::FsckOptions { repair: true, force: true };
    let report = braidfs::fsck::check(&devices, &options, &|_, _, _| {}).unwrap();
    assert_eq!(report.unfixed(), 0, "{:#?}", report.findings);
    fsck(&devices).unwrap();
}

/// A file of a sound domain below a new directory of one that fails: the fsync fails, and what it had prepared reaches the
/// device all the same.
#[test]
fn an_fsync_below_a_directory_of_a_failing_domain_keeps_the_data() {
    let two = Two::new();
    // what is stale shows
    for d in &two.inner {
        (0..d.blocks()).for_each(|b| d.write(b, &[0xaa; 4096]).unwrap());
    }
    mkfs::format(
        &two.devices(),
        &MkfsOptions { domains: Some(2), placement: Placement::Spread, ..MkfsOptions::default() },
    )
    .unwrap();
    let v = two.mount();
    let domain = |ino| v.domain_of(ino).unwrap().0;
    let f = (0..8).map(|i| create(&v, &format!("f{i}")).unwrap()).find(|f| domain(f.ino()) == 0).unwrap();
    let new = NewNode { kind: FileKind::Dir, mode: 0o700, umask: 0, rdev: 0, target: b"" };
    let made = |i: u32| v.create(NodeId::ROOT, format!("d{i}").as_bytes(), &new, &Cred::root()).unwrap().ino;
    let d = (0..8).map(made).find(|d| domain(*d) == 1).unwrap();
    v.link(f.ino(), d, b"f").unwrap();
    v.write(&f, 0, &fill(1, 0, 20_000)).unwrap();
    two.faulty[1].add(Rule::new(Op::Write, Effect::Fail(EIO)));
    assert!(v.fsync(f.ino(), false).is_err());
    assert!(v.sync().is_err());
    assert!(v.domains()[0].failed.is_none());
    let ino = f.ino();
    drop(f);
    assert!(v.unmount().is_err());
    let v = Volume::mount(two.healthy(), options()).unwrap();
    assert_eq!(content(&v, ino).unwrap(), fill(1, 0, 20_000));
}
