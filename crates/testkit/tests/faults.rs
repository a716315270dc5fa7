//! Devices that fail: errors on reads, writes and flushes, short writes, a full or dead device, writes that are lost or go
//! astray, rotten bits. Seeds are fixed; `BRAIDFS_SEED` takes another.

#[path = "faults/compared.rs"]
mod compared;
#[path = "faults/names.rs"]
mod names;

use braidfs::OpenHow;
use braidfs::{
    Cred, DomainId, Error, FileKind, InodeNo, MkfsOptions, MountOptions, NewNode, OpenFile, Overwrite, Placement,
    SetAttr, Volume, mkfs,
};
use braidfs_device::{Device, Effect, FaultDevice, Keep, MemDevice, Op, RecordDevice, Rule};
use braidfs_testkit::damage::named::Named;
use braidfs_testkit::damage::sample::{change, fill_first, options};
use braidfs_testkit::damage::target::{Kind, targets};
use braidfs_testkit::damage::truth::{Truth, Verdict, compare, read_all};
use braidfs_testkit::ops::fill;
use braidfs_testkit::small::{copies_of, devices_of};
use braidfs_testkit::walk::fsck;
use std::collections::{BTreeMap, BTreeSet};
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
        let inner = [0, 1].map(|_| Arc::new(MemDevice::soiled(8192)));
        let faulty = [0, 1].map(|i: usize| Arc::new(FaultDevice::new(inner[i].clone(), 7)));
        let two = Self { inner, faulty };
        let o = MkfsOptions { domains: Some(2), placement: Placement::Spread, ..MkfsOptions::default() };
        mkfs::format(&two.devices(), &o).unwrap();
        two
    }

    fn devices(&self) -> Vec<Arc<dyn Device>> {
        devices_of(&self.faulty)
    }

    /// The devices without their faults, after a crash or an unmount.
    fn healthy(&self) -> Vec<Arc<dyn Device>> {
        copies_of(&self.inner)
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

fn content(v: &Volume, ino: InodeNo) -> braidfs::Result<Vec<u8>> {
    let f = v.open(ino)?;
    let mut data = vec![0; v.getattr(ino)?.size as usize];
    let n = v.read(&f, 0, &mut data)?;
    data.truncate(n);
    Ok(data)
}

/// The file can be written and synced again, and the volume unmounts clean.
fn goes_on(v: Volume, file: InodeNo, devices: &[Arc<dyn Device>], name: &str) {
    let f = v.open(file).unwrap();
    v.write(&f, 0, b"again").unwrap();
    v.fsync(file, false).unwrap();
    drop(f);
    v.unmount().unwrap();
    fsck(devices).unwrap_or_else(|e| panic!("{name}: {e}"));
}

/// The first domain takes another group for a file of it, and the file is durable.
fn grows(v: &Volume, long: &OpenFile, name: &str) {
    let groups = || v.domains()[0].groups;
    let (before, data) = (groups(), fill(4, 0, 1 << 20));
    for i in 0..64u64 {
        if groups() > before {
            break;
        }
        v.write(long, i << 20, &data).unwrap_or_else(|e| panic!("{name}: the sound domain at {i} MiB: {e}"));
        v.fsync(long.ino(), false).unwrap_or_else(|e| panic!("{name}: the sound domain at {i} MiB: {e}"));
    }
    assert!(groups() > before, "{name}: {before} groups");
}

/// Domain 1 fails by `rule` on its device; domain 0 must not notice, and domain 1 says so until it is mounted again.
fn one_domain_fails(rule: Rule, name: &str) {
    let two = Two::new();
    let v = two.mount();
    let (sound, hurt, long) = (file_in(&v, 0, "sound"), file_in(&v, 1, "hurt"), file_in(&v, 0, "long"));
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
    grows(&v, &long, name);
    let (sound, hurt) = (sound.ino(), hurt.ino());
    assert!(v.unmount().is_err(), "{name}: the unmount hides it");
    // A new mount starts from what is durable.
    let healthy = two.healthy();
    let v = Volume::mount(healthy.clone(), options()).unwrap_or_else(|e| panic!("{name}: {e}"));
    assert_eq!(content(&v, sound).unwrap(), fill(3, 0, 30_000), "{name}");
    let old = content(&v, hurt).unwrap();
    let whole = |seed| old.len() >= 20_000 && old[..20_000] == fill(seed, 0, 20_000)[..];
    assert!(whole(1) || whole(2), "{name}: neither the synced content nor the new one");
    goes_on(v, hurt, &healthy, name);
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

/// A write of which only a part arrives: whole blocks of a run, or a part of a block. Nothing is claimed that is not durable;
/// the domain says why it refuses, and what was synced before is there.
fn short_writes(effect: Effect, skip: u64, overwrite: Overwrite) -> bool {
    const TAIL: usize = 9000;
    let name = format!("{effect:?} after {skip} writes, overwrite {overwrite:?}");
    let two = Two::new();
    let v = Volume::mount(two.devices(), MountOptions { overwrite, ..options() }).unwrap();
    let (sound, hurt, log) = (file_in(&v, 0, "sound"), file_in(&v, 1, "hurt"), file_in(&v, 1, "log"));
    two.faulty[1].add(Rule::new(Op::Write, effect).skip(skip));
    // the newest version that was synced, and how much of the log
    let (mut version, mut logged, mut failed) = (1, 20_000, None);
    for i in 2..40u32 {
        let done = v
            .write(&hurt, 0, &fill(i, 0, 20_000))
            .and_then(|_| v.fsync(hurt.ino(), i % 2 == 1))
            .map(|()| version = i)
            .and_then(|()| v.write(&log, logged as u64, &fill(1, logged as u64, TAIL)))
            .and_then(|_| if i % 3 == 0 { v.sync() } else { v.fsync(log.ino(), false) })
            .map(|()| logged += TAIL);
        if let Err(e) = done {
            failed = Some(e);
            break;
        }
    }
    let Some(first) = failed else {
        v.unmount().unwrap_or_else(|e| panic!("{name}: {e}"));
        return false;
    };
    two.faulty[1].clear();
    let info = v.domains();
    let why = info[1].failed.clone().unwrap_or_else(|| panic!("{name}: {first}, and the domain takes writes"));
    assert!(why.contains("injected") && info[0].failed.is_none(), "{name}: {info:?}");
    let refused = |r: braidfs::Result<()>| match r {
        Err(Error::DomainFailed { domain: DomainId(1), why: w }) => assert_eq!(w, why, "{name}"),
        other => panic!("{name}: {other:?} after {first}"),
    };
    for f in [&hurt, &log] {
        refused(v.write(f, 0, b"x").map(drop));
        refused(v.fsync(f.ino(), false));
        refused(v.setattr(f.ino(), &SetAttr { size: Some(5), ..SetAttr::default() }).map(drop));
    }
    v.write(&sound, 0, &fill(3, 0, 30_000)).unwrap_or_else(|e| panic!("{name}: the sound domain: {e}"));
    v.fsync(sound.ino(), false).unwrap_or_else(|e| panic!("{name}: the sound domain: {e}"));
    let [sound, hurt, log] = [sound, hurt, log].map(|f| f.ino());
    assert!(v.unmount().is_err(), "{name}: the unmount hides it");
    let healthy = two.healthy();
    fsck(&healthy).unwrap_or_else(|e| panic!("{name}: {e}"));
    let v = Volume::mount(healthy.clone(), options()).unwrap_or_else(|e| panic!("{name}: {e}"));
    assert_eq!(content(&v, sound).unwrap(), fill(3, 0, 30_000), "{name}");
    let got = content(&v, hurt).unwrap();
    let versions = [version, version + 1].map(|i| fill(i, 0, 20_000));
    // what an fsync that failed wrote in place may be there in part
    let parts = || (0..20_000).all(|at| versions.iter().any(|v| v[at] == got[at]));
    let fits = versions.contains(&got) || (overwrite == Overwrite::Auto && got.len() == 20_000 && parts());
    assert!(fits, "{name}: version {version} was synced");
    let got = content(&v, log).unwrap();
    assert!(got.len() == logged || got.len() == logged + TAIL, "{name}: {} bytes, {logged} were synced", got.len());
    assert_eq!(got[..20_000], fill(1, 0, 20_000)[..], "{name}");
    let tails = (20_000..got.len()).step_by(TAIL);
    tails.for_each(|at| assert_eq!(got[at..at + TAIL], fill(1, at as u64, TAIL)[..], "{name}: the log at {at}"));
    goes_on(v, hurt, &healthy, &name);
    true
}

#[test]
fn short_writes_claim_nothing() {
    let parts = [512, 2048 + 100, 4096 + 1536, 3 * 4096 + 8].map(Effect::Torn);
    for effect in [Effect::Short(1), Effect::Short(2), Effect::Short(3)].into_iter().chain(parts) {
        for overwrite in [Overwrite::Auto, Overwrite::Log] {
            let failed = (0..10).filter(|skip| short_writes(effect, *skip, overwrite)).count();
            assert_eq!(failed, 10, "{effect:?}, {overwrite:?}: every fsync claimed success");
        }
    }
}

/// On one device a failed flush is everybody's: nothing written since the last good one may be claimed.
#[test]
fn after_a_failed_flush_nothing_is_claimed() {
    for skip in 0..12 {
        let inner = Arc::new(MemDevice::soiled(12288));
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

/// A mount one of whose reads fails is refused, or shows what is there but for what it cannot read; the next one shows all. Of a volume
/// that was unmounted, and of one that crashed with much to replay.
#[test]
fn a_mount_with_read_errors_changes_nothing() {
    for (name, (device, truth)) in [("unmounted", healthy_volume()), ("crashed", crashed_volume())] {
        let (mut refused, mut mounted, mut unread) = (0, 0, 0);
        for skip in 0.. {
            let copy = Arc::new(MemDevice::from_image(device.snapshot()));
            let faulty = Arc::new(FaultDevice::new(copy.clone(), 3));
            faulty.add(Rule::new(Op::Read, Effect::Fail(EIO)).skip(skip).times(1));
            let tried = Volume::mount(vec![faulty.clone() as Arc<dyn Device>], options());
            if faulty.fired() == 0 {
                // no mount reads so much
                tried.unwrap().crash();
                break;
            }
            let what = format!("{name}, read {skip} of the mount");
            match tried {
                Err(Error::Io(_)) => refused += 1,
                Err(e) => panic!("{what}: {e}"),
                Ok(v) => {
                    mounted += 1;
                    for (path, verdict) in compare(&v, &truth, true) {
                        match verdict {
                            Verdict::Right => {}
                            Verdict::Refused(_) => unread += 1,
                            other => panic!("{what}: {}: {other:?}", String::from_utf8_lossy(&path)),
                        }
                    }
                    v.crash();
                }
            }
            let v = Volume::mount(vec![copy.clone() as Arc<dyn Device>], options()).unwrap();
            for (path, verdict) in compare(&v, &truth, true) {
                assert_eq!(verdict, Verdict::Right, "{what}, then without: {}", String::from_utf8_lossy(&path));
            }
            v.unmount().unwrap();
            fsck(&[copy]).unwrap();
        }
        println!("{name}: {refused} mounts refused, {mounted} not, of which {unread} files could not be read");
        assert!(refused > 10, "{name}: {refused} mounts refused, {mounted} not");
    }
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
        device.add(Rule::new(op, Effect::Stall));
        let data = fill(2, 0, 20_000);
        std::thread::scope(|s| {
            v.write(&slow, 0, &data).unwrap();
            let sync = s.spawn(|| v.fsync(slow.ino(), false));
            until("the fsync comes to the device", || device.stalled() > 0);
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
            assert!(!sync.is_finished() && device.stalled() > 0, "{op:?}");
            device.clear();
            sync.join().unwrap().unwrap();
        });
        // held again while it is unmounted
        let (sound, slow) = (sound.ino(), slow.ino());
        device.add(Rule::new(op, Effect::Stall));
        std::thread::scope(|s| {
            let end = s.spawn(move || v.unmount());
            until("the unmount comes to the device", || device.stalled() > 0);
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

/// A directory in each domain, and a synced file of that domain in it.
fn homes(v: &Volume) -> BTreeMap<u16, (InodeNo, OpenFile)> {
    let mut out = BTreeMap::new();
    for i in 0..64 {
        let dir = make(v, InodeNo::ROOT, &format!("home {i}"), FileKind::Dir).unwrap();
        let d = v.domain_of(dir).unwrap().0;
        out.entry(d).or_insert_with(|| (dir, new_in(v, dir, d, "kept")));
    }
    assert_eq!(out.len(), v.domains().len());
    v.sync().unwrap();
    out
}

fn make(v: &Volume, dir: InodeNo, name: &str, kind: FileKind) -> braidfs::Result<InodeNo> {
    let new = NewNode { kind, mode: 0o700, umask: 0, rdev: 0, target: b"" };
    v.create(dir, name.as_bytes(), &new, &Cred::root()).map(|a| a.ino)
}

/// A new file of `domain` in `dir`, with content.
fn new_in(v: &Volume, dir: InodeNo, domain: u16, name: &str) -> OpenFile {
    for i in 0..64 {
        // where the file would come into a domain that has failed, that may be refused
        let Ok(ino) = make(v, dir, &format!("{name} {i}"), FileKind::File) else { continue };
        if v.domain_of(ino).unwrap() == DomainId(domain) {
            let f = v.open(ino).unwrap();
            v.write(&f, 0, &fill(1, 0, 9000)).unwrap();
            return f;
        }
    }
    panic!("no file comes into domain {domain}");
}

/// Bits rot under a mounted volume, in a node block or a table block of one domain. That domain goes read-only alone when it
/// meets it, and says why; the others go on.
#[test]
fn rotten_metadata_stops_its_domain_alone() {
    let (device, truth) = healthy_volume();
    let v = Volume::mount(vec![device.clone() as Arc<dyn Device>], options()).unwrap();
    let home: BTreeMap<u16, _> = homes(&v).into_iter().map(|(d, (dir, f))| (d, (dir, f.ino()))).collect();
    v.unmount().unwrap();
    let image = device.snapshot();
    let tables = [Kind::Node, Kind::NodeTable, Kind::Segments, Kind::Owners];
    let mut met: BTreeMap<Kind, BTreeSet<u16>> = BTreeMap::new();
    for t in targets(&image).unwrap().into_iter().filter(|t| t.current && tables.contains(&t.kind)) {
        let mine = t.domain.unwrap();
        let device = Arc::new(MemDevice::from_image(image.clone()));
        let v = Volume::mount(vec![device.clone() as Arc<dyn Device>], options()).unwrap();
        // in use already
        let open: BTreeMap<u16, OpenFile> =
            home.iter().filter(|(d, _)| **d != mine).map(|(d, (_, f))| (*d, v.open(*f).unwrap())).collect();
        let mut b = vec![0; 4096];
        device.read(t.block, &mut b).unwrap();
        b[1000] ^= 4;
        device.write(t.block, &b).unwrap();
        for (path, verdict) in compare(&v, &truth, true) {
            let told = matches!(verdict, Verdict::Right | Verdict::Refused(_));
            // the homes
            assert!(told || matches!(verdict, Verdict::Surplus(_)), "{}: {path:?}: {verdict:?}", t.what);
        }
        // the domain is used as the others are: what it refuses is its own affair
        let (dir, file) = home[&mine];
        let own = v.open(file).and_then(|f| {
            for i in 0..6 {
                make(&v, dir, &format!("more {i}"), FileKind::File)?;
            }
            v.write(&f, 0, &fill(2, 0, 200_000))?;
            v.fsync(file, false)?;
            v.sync()
        });
        for (d, f) in &open {
            v.write(f, 0, &fill(3, 0, 30_000)).unwrap_or_else(|e| panic!("{}: domain {d}: {e}", t.what));
            v.fsync(f.ino(), false).unwrap_or_else(|e| panic!("{}: domain {d}: {e}", t.what));
            let new = new_in(&v, home[d].0, *d, "new");
            v.fsync(new.ino(), false).unwrap_or_else(|e| panic!("{}: new in domain {d}: {e}", t.what));
        }
        let info = v.domains();
        for (d, i) in (0u16..).zip(&info) {
            assert!(d == mine || i.failed.is_none(), "{}: {info:?}", t.what);
        }
        let failed = info[usize::from(mine)].failed.clone();
        if let Some(why) = &failed {
            met.entry(t.kind).or_default().insert(mine);
            assert!(own.is_err(), "{}: failed, and nothing was refused", t.what);
            assert!(why.len() > 10 && why.contains(|c: char| c.is_ascii_digit()), "{}: {why:?}", t.what);
            let now = v.open(file).and_then(|f| v.write(&f, 0, b"x").map(drop));
            let now = now.expect_err("a failed domain takes writes");
            let says = matches!(&now, Error::DomainFailed { domain, why: w } if *domain == DomainId(mine) && w == why);
            assert!(says || matches!(now, Error::Corrupt(_)), "{}: {now}", t.what);
            assert!(v.sync().is_err(), "{}: a sync of a failed domain claims success", t.what);
        }
        drop(open);
        assert_eq!(v.unmount().is_err(), failed.is_some(), "{}", t.what);
        repair_ends(&device);
        let v = Volume::mount(vec![device as Arc<dyn Device>], options()).unwrap();
        for (d, (_, f)) in home.iter().filter(|(d, _)| **d != mine) {
            assert_eq!(content(&v, *f).unwrap(), fill(3, 0, 30_000), "{}: domain {d}", t.what);
        }
        v.unmount().unwrap();
    }
    println!("domains that stopped: {met:?}");
    // a mount looks for limits at the root directory: the block of the node table that has it is in memory before the damage
    for (kind, domains) in [(Kind::Node, home.len()), (Kind::NodeTable, home.len() - 1)] {
        assert!(met.get(&kind).map_or(0, BTreeSet::len) >= domains, "{kind:?}: {met:?}");
    }
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
    let device = Arc::new(MemDevice::soiled(12288));
    let d: Arc<dyn Device> = device.clone();
    mkfs::format(std::slice::from_ref(&d), &mkfs_options()).unwrap();
    populate(&d, || {}).unwrap();
    let v = Volume::mount(vec![d], options()).unwrap();
    let truth = read_all(&v).unwrap();
    v.unmount().unwrap();
    (device, truth)
}

/// The device of a volume that crashed, with all that was not flushed lost, and what a mount finds on it.
fn crashed_volume() -> (Arc<MemDevice>, Truth) {
    let record = Arc::new(RecordDevice::soiled(12288));
    let d: Arc<dyn Device> = record.clone();
    mkfs::format(std::slice::from_ref(&d), &mkfs_options()).unwrap();
    let v = Volume::mount(vec![d.clone()], options()).unwrap();
    fill_first(&v).unwrap();
    v.sync().unwrap();
    change(&v, 1).unwrap();
    v.commit_domain(DomainId(1), false).unwrap();
    change(&v, 2).unwrap();
    for path in ["a/blocks", "b/tree", "b/in-place", "a/made in round 2"] {
        v.fsync(v.resolve(path.as_bytes(), true, &Cred::root()).unwrap().ino, false).unwrap();
    }
    v.crash();
    let crashed = || Arc::new(record.crash_image(usize::MAX, &mut |_| Keep::None));
    let v = Volume::mount(vec![crashed() as Arc<dyn Device>], options()).unwrap();
    let truth = read_all(&v).unwrap();
    v.unmount().unwrap();
    (crashed(), truth)
}

/// What `fill_first` made and no `change` touched, but for the number of its links.
fn untouched(truth: &Truth) -> Truth {
    let device: Arc<dyn Device> = Arc::new(MemDevice::soiled(12288));
    mkfs::format(std::slice::from_ref(&device), &mkfs_options()).unwrap();
    let v = Volume::mount(vec![device], options()).unwrap();
    fill_first(&v).unwrap();
    let mut first = read_all(&v).unwrap();
    v.unmount().unwrap();
    let mut unlinked = truth.clone();
    first.values_mut().chain(unlinked.values_mut()).for_each(|e| e.stat.nlink = 0);
    first.retain(|path, e| unlinked.get(path) == Some(e));
    assert!(first.len() > 80, "{}", first.len());
    first
}

/// A device that lies while the volume is filled: on a volume with data checksums, which was unmounted, every file is right
/// or refused, or a finding of the check names it. (A table block whose last write was lost is whole and old: the check must
/// find it.) Where an operation failed, the filling ended there: then that is so of what was synced before the lies began
/// and not changed afterwards.
#[test]
fn lies_of_the_device_are_noticed() {
    let seed = braidfs_testkit::seed();
    println!("BRAIDFS_SEED={seed}");
    let (_, truth) = healthy_volume();
    let untouched = untouched(&truth);
    let mut rng = fastrand::Rng::with_seed(seed);
    let (mut noticed, mut late, mut harmless, mut wrong) = (0, 0, 0, Vec::new());
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
        let inner = Arc::new(MemDevice::soiled(12288));
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
        let check = braidfs_check::FsckOptions { repair: false, force: true };
        let checked = braidfs_check::check(&devices, &check, &braidfs::JournalReplay, &|_, _, _| {});
        let found = checked.as_ref().map_or(true, |r| !r.findings.is_empty());
        let named = checked.as_ref().map_or_else(|_| Named::default(), Named::of);
        let truth = if done.is_ok() { &truth } else { &untouched };
        let (mut bad, mut named_bad) = (Vec::new(), 0);
        let mut refused = done.is_err();
        match Volume::mount(devices.to_vec(), options()) {
            Ok(v) => {
                let verdicts = compare(&v, truth, done.is_ok());
                for (path, verdict) in &verdicts {
                    match verdict {
                        Verdict::Right => {}
                        Verdict::Refused(_) => refused = true,
                        // what was made, or was to be changed, after the first
                        Verdict::Surplus(_) if done.is_err() => {}
                        _ if named.covers(path, truth, &verdicts) => named_bad += 1,
                        // blocks that are overwritten in place have no checksums
                        _ if *path == b"b/in-place" => refused = true,
                        other => bad.push(format!("/{}: {other:?}", String::from_utf8_lossy(path))),
                    }
                }
                let _ = v.unmount();
            }
            Err(_) => refused = true,
        }
        late += usize::from(named_bad > 0);
        if !bad.is_empty() {
            let findings = checked.map_or_else(|e| e.to_string(), |r| format!("{:#?}", r.findings));
            wrong.push(format!("{i}: {effect:?}, {fired} times: {}; found: {findings}", bad.join("; ")));
        } else if fired == 0 || !(found || refused || named_bad > 0) {
            harmless += 1;
        } else {
            noticed += 1;
        }
        repair_ends(&image);
    }
    println!(
        "{noticed} noticed ({late} shown wrongly and named by the check), {harmless} harmless, {} not noticed",
        wrong.len()
    );
    assert!(wrong.is_empty(), "seed {seed}:\n{}", wrong.join("\n"));
    assert!(noticed > 60, "{noticed}");
}

/// A repair of whatever is left ends in a volume that the next check finds sound.
fn repair_ends(image: &Arc<MemDevice>) {
    let devices = [image.clone() as Arc<dyn Device>];
    let options = braidfs_check::FsckOptions { repair: true, force: true };
    let report = braidfs_check::check(&devices, &options, &braidfs::JournalReplay, &|_, _, _| {}).unwrap();
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
    let made = |i: u32| v.create(InodeNo::ROOT, format!("d{i}").as_bytes(), &new, &Cred::root()).unwrap().ino;
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
