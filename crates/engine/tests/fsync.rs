//! What an fsync asks of the device, on which thread, and what a crash leaves of files that are synced together.

use braidfs::OpenHow;
use braidfs::device::{CountDevice, Device, Effect, Event, FaultDevice, Keep, MemDevice, Op, RecordDevice, Rule};
use braidfs::{Cred, DomainId, FallocMode, InodeNo, MkfsOptions, MountOptions, OpenFile, Overwrite, Placement};
use braidfs::{Volume, mkfs};
use braidfs_check::{FsckOptions, check};
use std::sync::Arc;
use std::time::Duration;

const PAGE: usize = 4096;

/// Ordinary files are not overwritten in place (tests/overwrite.rs has them).
fn options() -> MountOptions {
    MountOptions {
        background: false,
        overwrite: Overwrite::Log,
        commit_interval: Duration::from_secs(3600),
        ..MountOptions::default()
    }
}

/// 64 MiB in memory, formatted.
fn made(domains: u16) -> Arc<MemDevice> {
    let device = Arc::new(MemDevice::new(16384));
    let all: Vec<Arc<dyn Device>> = vec![device.clone()];
    let o = MkfsOptions { domains: Some(domains), group_bytes: Some(4 << 20), ..MkfsOptions::default() };
    mkfs::format(&all, &o).unwrap();
    device
}

fn mount(device: Arc<dyn Device>) -> Volume {
    Volume::mount(vec![device], options()).unwrap()
}

fn open(v: &Volume, path: &str) -> OpenFile {
    let how = OpenHow { read: true, write: true, create: true, mode: 0o644, ..OpenHow::default() };
    v.open_path(path.as_bytes(), how, &Cred::root()).unwrap()
}

/// Files of two blocks, durable.
fn files(v: &Volume, n: usize) -> Vec<OpenFile> {
    let all: Vec<OpenFile> = (0..n).map(|i| open(v, &format!("f{i}"))).collect();
    for f in &all {
        v.write(f, 0, &[1; 2 * PAGE]).unwrap();
    }
    v.sync().unwrap();
    all
}

#[test]
fn one_fsync_is_one_submission_and_one_flush() {
    let device = Arc::new(CountDevice::new(made(1)));
    let v = mount(device.clone());
    let f = &files(&v, 1)[0];
    for i in 0..50u8 {
        v.write(f, 0, &[i; PAGE]).unwrap();
        let before = device.counters();
        match i % 3 {
            0 => v.fsync(f.ino(), false).unwrap(),
            // on a busy machine the device may seem slow
            1 => v.fsync_here(f.ino(), true, 1).unwrap_or_else(|| v.fsync(f.ino(), true)).unwrap(),
            _ => v.fsync_start(f.ino(), false).wait().unwrap(),
        }
        let did = device.counters() - before;
        // the block, and the chunk of the journal that says where it is
        assert_eq!((did.batches, did.writes, did.write_blocks, did.flushes, did.reads), (1, 2, 2, 1, 0), "{i}");
        // and nothing where nothing changed
        v.fsync(f.ino(), false).unwrap();
        assert_eq!(device.counters() - before, did);
    }
}

/// A file of `blocks` blocks that are allocated, durably, and were never written.
fn allocated(v: &Volume, blocks: usize) -> OpenFile {
    let f = open(v, "allocated");
    v.fallocate(&f, FallocMode::Allocate { keep_size: false }, 0, (blocks * PAGE) as u64).unwrap();
    v.sync().unwrap();
    f
}

#[test]
fn it_is_done_by_the_thread_that_asks() {
    let mem = made(1);
    let device = Arc::new(RecordDevice::new(mem.snapshot()));
    let v = mount(device.clone());
    let f = &files(&v, 1)[0];
    let threads = |from: usize| -> Vec<u64> {
        device.log()[from..]
            .iter()
            .map(|e| match e {
                Event::Write { thread, .. } | Event::Discard { thread, .. } | Event::Flush { thread, .. } => *thread,
            })
            .collect()
    };
    let from = device.log_len();
    device.write(16383, &[0; PAGE]).unwrap();
    let own = threads(from)[0];
    let mut here = 0;
    for i in 0..2000 {
        v.write(f, 0, &[i as u8; PAGE]).unwrap();
        let from = device.log_len();
        match v.fsync_here(f.ino(), false, 1) {
            Some(done) => {
                done.unwrap();
                assert_eq!(threads(from), [own; 3], "two writes and a flush");
                here += 1;
            }
            // a busy machine held some up, so that the device seems slow
            None => v.fsync_start(f.ino(), false).wait().unwrap(),
        }
        if here == 20 {
            break;
        }
    }
    assert_eq!(here, 20);
    v.write(f, 0, &[9; PAGE]).unwrap();
    assert!(v.fsync_here(f.ino(), false, 0).is_none(), "no thread may wait");
    assert!(v.fsync_here(InodeNo::ROOT, false, 1).is_none(), "a directory commits");
    let large = open(&v, "large");
    v.write(&large, 0, &[9; 257 * PAGE]).unwrap();
    assert!(v.fsync_here(large.ino(), false, 1).is_none(), "much data");
    let from = device.log_len();
    v.fsync_start(f.ino(), false).wait().unwrap();
    let other = threads(from);
    assert!(other.len() == 3 && !other.contains(&own), "{other:?}");
}

#[test]
fn who_waits_together_flushes_together() {
    let device = Arc::new(FaultDevice::new(made(1), 1));
    let v = mount(device.clone());
    let all = files(&v, 40);
    for f in &all {
        v.write(f, 0, &[2; PAGE]).unwrap();
    }
    device.add(Rule::new(Op::Flush, Effect::Stall).times(1));
    let first = v.fsync_start(all[0].ino(), false);
    while device.stalled() == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    let before = device.counters();
    // one of them twice
    let waiting: Vec<_> = all[1..].iter().chain(&all[1..2]).map(|f| v.fsync_start(f.ino(), false)).collect();
    assert!(v.fsync_here(all[2].ino(), false, 4).is_none(), "they are many: it waits with them");
    assert_eq!(device.counters(), before, "the next group waits for the first");
    device.clear();
    first.wait().unwrap();
    waiting.into_iter().for_each(|t| t.wait().unwrap());
    let did = device.counters() - before;
    assert_eq!((did.batches, did.writes, did.flushes), (1, 2 * 39, 1));
}

#[test]
fn a_flush_that_fails_is_told_to_all_of_a_group() {
    let device = Arc::new(FaultDevice::new(made(1), 1));
    let v = mount(device.clone());
    let all = files(&v, 3);
    for f in &all {
        v.write(f, 0, &[2; PAGE]).unwrap();
    }
    device.add(Rule::new(Op::Flush, Effect::Fail(5)).times(1));
    let which: Vec<_> = all.iter().map(|f| (f.ino(), false)).collect();
    assert!(v.fsync_files(&which).iter().all(|r| r.is_err()));
    assert!(v.fsync_files(&which).iter().all(|r| r.is_err()), "nor later");
}

/// Two devices with faults, a domain on each.
fn two_devices() -> ([Arc<FaultDevice>; 2], Volume) {
    two_devices_mounted(false)
}

fn two_devices_mounted(serial: bool) -> ([Arc<FaultDevice>; 2], Volume) {
    let faulty = [0, 1].map(|_| Arc::new(FaultDevice::new(Arc::new(MemDevice::new(8192)), 1)));
    let all: Vec<Arc<dyn Device>> = faulty.iter().map(|d| d.clone() as Arc<dyn Device>).collect();
    let o = MkfsOptions { domains: Some(2), placement: Placement::Spread, ..MkfsOptions::default() };
    mkfs::format(&all, &o).unwrap();
    let v = Volume::mount(all, MountOptions { serial, ..options() }).unwrap();
    (faulty, v)
}

/// A durable file in this domain.
fn file_in(v: &Volume, domain: u16, name: &str) -> OpenFile {
    let mut all = (0..64).map(|i| open(v, &format!("{name}.{i}")));
    let f = all.find(|f| v.domain_of(f.ino()).unwrap() == DomainId(domain)).expect("a file of each domain");
    v.write(&f, 0, &[1; 2 * PAGE]).unwrap();
    v.sync().unwrap();
    f
}

/// A new file in this domain, below a new directory of the other one.
fn file_below_the_other(v: &Volume, domain: u16, name: &str) -> OpenFile {
    for i in 0..64 {
        let dir = format!("{name}.{i}");
        let d = v.mkdir_path(dir.as_bytes(), 0o755, &Cred::root()).unwrap();
        if v.domain_of(d.ino).unwrap() == DomainId(domain) {
            continue;
        }
        for k in 0..8 {
            let f = open(v, &format!("{dir}/{k}"));
            if v.domain_of(f.ino()).unwrap() == DomainId(domain) {
                v.write(&f, 0, &[3; 2 * PAGE]).unwrap();
                return f;
            }
        }
    }
    panic!("no file came into domain {domain}");
}

fn failed(v: &Volume) -> [bool; 2] {
    [0, 1].map(|d| v.domains()[d].failed.is_some())
}

/// What the first domain wrote has no flush of its own any more when its turn comes: a commit of it failed while the write to
/// the second device went on.
#[test]
fn a_domain_that_fails_while_another_is_written_is_told_to_its_files() {
    let (faulty, v) = two_devices();
    let (a, b, other) = (file_in(&v, 0, "a"), file_in(&v, 1, "b"), file_in(&v, 0, "other"));
    for f in [&a, &b, &other] {
        v.write(f, 0, &[2; PAGE]).unwrap();
    }
    faulty[1].add(Rule::new(Op::Write, Effect::Stall).times(1));
    let results = std::thread::scope(|s| {
        let both = s.spawn(|| v.fsync_files(&[(a.ino(), false), (b.ino(), false)]));
        while faulty[1].stalled() == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        faulty[0].add(Rule::new(Op::Flush, Effect::Fail(5)));
        // it waits for what the fsync writes to its device, and then flushes
        let commit = v.commit_domain(DomainId(0), false);
        faulty[1].clear();
        assert!(commit.is_err());
        both.join().unwrap()
    });
    assert_eq!(failed(&v), [true, false]);
    assert!(results[0].is_err(), "nothing flushed it");
    assert!(results[1].is_ok(), "{:?}", results[1]);
    v.crash();
}

/// Two files on two devices are synced together, and one of the devices cannot flush: the file on the other one is durable.
#[test]
fn a_flush_that_fails_is_told_to_the_files_of_its_device() {
    for serial in [false, true] {
        let (faulty, v) = two_devices_mounted(serial);
        let (sound, hurt) = (file_in(&v, 0, "sound"), file_in(&v, 1, "hurt"));
        v.sync().unwrap();
        for f in [&sound, &hurt] {
            v.write(f, 0, &[2; PAGE]).unwrap();
        }
        faulty[1].add(Rule::new(Op::Flush, Effect::Fail(5)).times(1));
        let results = v.fsync_files(&[(sound.ino(), false), (hurt.ino(), false)]);
        assert!(results[0].is_ok() && results[1].is_err(), "serial {serial}: {results:?}");
        assert_eq!(failed(&v), [false, true], "serial {serial}");
        // also what comes later
        v.write(&sound, 0, &[3; PAGE]).unwrap();
        v.fsync(sound.ino(), false).unwrap();
        // and its domain still takes groups
        let groups = || v.domains()[0].groups;
        let (before, mut at) = (groups(), 1 << 20);
        while groups() == before {
            v.write(&sound, at, &[5; 1 << 20]).unwrap();
            v.fsync(sound.ino(), false).unwrap();
            at += 1 << 20;
        }
        v.crash();
        let images: Vec<Arc<dyn Device>> = faulty.iter().map(|d| d.inner().clone()).collect();
        let v = Volume::mount(images, options()).unwrap();
        assert_eq!(content_of(&v, sound.ino())[..PAGE], [3; PAGE]);
        assert_eq!(v.getattr(sound.ino()).unwrap().size, at);
        v.unmount().unwrap();
    }
}

/// The file and its directory are written at once: nobody knows what of them is on the device.
#[test]
fn a_write_for_two_domains_that_fails_is_told_to_both() {
    for serial in [false, true] {
        let device = Arc::new(FaultDevice::new(Arc::new(MemDevice::new(16384)), 1));
        let all: Vec<Arc<dyn Device>> = vec![device.clone()];
        let o = MkfsOptions { domains: Some(2), placement: Placement::Spread, ..MkfsOptions::default() };
        mkfs::format(&all, &o).unwrap();
        let v = Volume::mount(all, MountOptions { serial, ..options() }).unwrap();
        let sound = file_below_the_other(&v, 1, "sound");
        let before = device.counters();
        v.fsync(sound.ino(), false).unwrap();
        let did = device.counters() - before;
        assert_eq!((did.batches, did.flushes), (1, 1), "the file and its directory at once");
        let hurt = file_below_the_other(&v, 1, "hurt");
        device.add(Rule::new(Op::Write, Effect::Fail(5)).times(1));
        v.fsync(hurt.ino(), false).unwrap_err();
        assert_eq!((failed(&v), device.fired()), ([true, true], 1));
        v.fsync(hurt.ino(), false).unwrap_err();
        v.crash();
        let image: Arc<dyn Device> = device.inner().clone();
        let v = mount(image.clone());
        assert_eq!(content_of(&v, sound.ino()), [3; 2 * PAGE]);
        v.unmount().unwrap();
        clean(image, 0);
    }
}

/// One device of two fails, with the file or with the directory above it, on the write or on the flush.
#[test]
fn a_device_of_two_that_fails_in_an_fsync_is_told() {
    for (op, bad) in [(Op::Write, 0), (Op::Write, 1), (Op::Flush, 0), (Op::Flush, 1)] {
        let (faulty, v) = two_devices();
        let old = file_in(&v, 1 - bad as u16, "old");
        let hurt = file_below_the_other(&v, 1, "hurt");
        faulty[bad].add(Rule::new(op, Effect::Fail(5)).times(1));
        v.fsync(hurt.ino(), false).unwrap_err();
        assert_eq!(faulty[bad].fired(), 1);
        assert!(failed(&v)[bad], "{op:?} {bad}");
        v.fsync(hurt.ino(), false).unwrap_err();
        assert!(!failed(&v)[1 - bad], "{op:?} {bad}: the other one");
        v.write(&old, 0, &[4; 2 * PAGE]).unwrap();
        v.fsync(old.ino(), false).unwrap();
        v.crash();
        let images: Vec<Arc<dyn Device>> = faulty.iter().map(|d| d.inner().clone()).collect();
        let v = Volume::mount(images.clone(), options()).unwrap();
        assert_eq!(content_of(&v, old.ino()), [4; 2 * PAGE]);
        v.unmount().unwrap();
        let force = FsckOptions { repair: false, force: true };
        let found = check(&images, &force, &braidfs::JournalReplay, &|_, _, _| {}).unwrap();
        assert!(found.findings.is_empty(), "{op:?} {bad}: {:#?}", found.findings);
    }
}

fn content_of(v: &Volume, ino: InodeNo) -> Vec<u8> {
    let f = v.open(ino).unwrap();
    let mut all = vec![0; 4 * PAGE];
    let n = v.read(&f, 0, &mut all).unwrap();
    all.truncate(n);
    all
}

fn content(v: &Volume, path: &str) -> Option<Vec<u8>> {
    let how = OpenHow { read: true, ..OpenHow::default() };
    let f = v.open_path(path.as_bytes(), how, &Cred::root()).ok()?;
    let mut all = vec![0; 1 << 17];
    let n = v.read(&f, 0, &mut all).unwrap();
    all.truncate(n);
    Some(all)
}

/// What a crash after `upto` events leaves: of the writes that no flush covers none, all, or some and parts of some.
fn crashed(device: &RecordDevice, upto: usize, round: u32, random: &mut fastrand::Rng) -> Arc<dyn Device> {
    Arc::new(device.crash_image(upto, &mut |_| match round {
        0 => Keep::None,
        1 => Keep::Whole,
        _ => match random.u8(..4) {
            0 => Keep::None,
            1 => Keep::TornMask(random.u64(..)),
            _ => Keep::Whole,
        },
    }))
}

/// What crashed after `upto` events and was mounted and unmounted is without faults.
fn clean(device: Arc<dyn Device>, upto: usize) {
    let options = FsckOptions { repair: false, force: true };
    let found = check(&[device], &options, &braidfs::JournalReplay, &|_, _, _| {}).unwrap();
    assert!(found.findings.is_empty(), "at {upto}: {:#?}", found.findings);
}

/// Each file by itself is as before or as synced, whatever part of the group's writes a crash leaves; afterwards all are as
/// synced.
#[test]
fn any_crash_leaves_each_file_old_or_new() {
    let mem = made(3);
    let device = Arc::new(RecordDevice::new(mem.snapshot()));
    let v = mount(device.clone());
    v.mkdir_path(b"d", 0o755, &Cred::root()).unwrap();
    // overwritten, appended, within its inode, in place
    let names = ["d/over", "d/append", "d/inline", "placed"];
    let old = [vec![1; 5 * PAGE], vec![1; 5000], vec![1; 100], vec![1; 4 * PAGE]];
    for (name, old) in names.iter().zip(&old) {
        let f = open(&v, name);
        if *name == "placed" {
            v.fallocate(&f, FallocMode::Allocate { keep_size: false }, 0, 4 * PAGE as u64).unwrap();
        }
        v.write(&f, 0, old).unwrap();
    }
    v.sync().unwrap();
    let changes = [(PAGE, 2 * PAGE), (5000, 9000), (50, 20), (PAGE, 2 * PAGE)];
    let mut new = old.clone();
    let mut which = Vec::new();
    for ((name, new), (at, len)) in names.iter().zip(&mut new).zip(changes) {
        let f = open(&v, name);
        v.write(&f, at as u64, &vec![2; len]).unwrap();
        new.resize(new.len().max(at + len), 0);
        new[at..at + len].fill(2);
        which.push((f.ino(), false));
    }
    // one below a directory that is new, perhaps in another domain
    v.mkdir_path(b"d/e", 0o755, &Cred::root()).unwrap();
    let f = open(&v, "d/e/fresh");
    v.write(&f, 0, &[2; 6000]).unwrap();
    which.push((f.ino(), false));
    let from = device.log_len();
    assert!(v.fsync_files(&which).iter().all(|r| r.is_ok()));
    let end = device.log_len();
    v.crash();
    let flushes = device.flushes().iter().filter(|f| **f >= from).count();
    // also the data in place: where it lies was durable before
    assert_eq!(flushes, 1, "of {} events", end - from);

    let (mut random, mut states) = (fastrand::Rng::with_seed(1), [0u32; 2]);
    for upto in from..=end {
        for round in 0..24 {
            let crashed = crashed(&device, upto, round, &mut random);
            let v = mount(crashed.clone());
            for ((name, old), new) in names.iter().zip(&old).zip(&new) {
                let have = content(&v, name).unwrap_or_else(|| panic!("{name} is gone"));
                if *name == "placed" && upto < end {
                    let whole = have.iter().zip(old).zip(new).all(|((h, o), n)| h == o || h == n);
                    assert!(whole && have.len() == old.len(), "{name} at {upto}");
                    continue;
                }
                assert!(have == *new || (upto < end && have == *old), "{name} at {upto}: {} bytes", have.len());
                states[usize::from(have == *new)] += 1;
            }
            let fresh = content(&v, "d/e/fresh");
            assert!(fresh == Some(vec![2; 6000]) || (upto < end && fresh.is_none()), "a new file at {upto}");
            v.unmount().unwrap();
            clean(crashed, upto);
        }
    }
    assert!(states.iter().all(|n| *n > 50), "old and new states: {states:?}");
}

/// A loss of power may leave a block that was being written unreadable. It is of an fsync that had not come back: the volume is
/// mounted without that one, and the mount and a check say so, since it might be damage all the same.
#[test]
fn a_block_that_cannot_be_read_costs_its_fsync_alone() {
    let mem = made(2);
    let v = mount(mem.clone());
    for (name, value) in [("a", 1), ("b", 2)] {
        let f = open(&v, name);
        v.write(&f, 0, &[value; 16 * PAGE]).unwrap();
        v.fsync(f.ino(), false).unwrap();
    }
    v.crash();
    let (image, mut block) = (mem.snapshot(), vec![0; PAGE]);
    let is_of_b = |at: &u64| {
        image.read(*at, &mut block).unwrap();
        block == [2; PAGE]
    };
    // recovery writes to none so far behind
    let bad = image.used().filter(is_of_b).max().unwrap();
    let with_bad = || {
        let d = FaultDevice::new(Arc::new(MemDevice::from_image(image.clone())), 1);
        d.add(Rule::new(Op::Read, Effect::Fail(5)).blocks(bad..bad + 1));
        Arc::new(d)
    };
    let v = mount(with_bad());
    assert_eq!(content(&v, "a"), Some(vec![1; 16 * PAGE]));
    assert_eq!(content(&v, "b"), None);
    let tells = |told: &[String]| told.iter().filter(|t| t.contains("cannot be read")).count();
    assert_eq!(tells(v.recovery_traces()), 1, "{:?}", v.recovery_traces());
    v.unmount().unwrap();
    let how = FsckOptions { repair: false, force: true };
    let found = check(&[with_bad() as Arc<dyn Device>], &how, &braidfs::JournalReplay, &|_, _, _| {}).unwrap();
    assert_eq!(found.findings, vec![]);
    assert_eq!(tells(&found.notes), 1, "{:?}", found.notes);
}

/// Blocks that are only allocated get their data, and then the record that says so: whatever part of it a crash leaves, each
/// is of zeros or as written, and never what the device held there before.
#[test]
fn any_crash_leaves_allocated_blocks_empty_or_new() {
    let mem = Arc::new(MemDevice::new(16384));
    for b in 0..16384 {
        mem.write(b, &[0xee; PAGE]).unwrap();
    }
    let all: Vec<Arc<dyn Device>> = vec![mem.clone()];
    let o = MkfsOptions { domains: Some(2), group_bytes: Some(4 << 20), ..MkfsOptions::default() };
    mkfs::format(&all, &o).unwrap();
    let device = Arc::new(RecordDevice::new(mem.snapshot()));
    let v = mount(device.clone());
    let f = allocated(&v, 16);
    let from = device.log_len();
    // synced one after the other; the third by a commit, together with a block that nobody had allocated
    let steps: [&[usize]; 4] = [&[3], &[4, 9], &[0, 16], &[5, 12]];
    let (mut contents, mut ends) = (vec![vec![0; 16 * PAGE]], vec![from]);
    for (i, blocks) in steps.iter().enumerate() {
        let mut new = contents[i].clone();
        for b in *blocks {
            v.write(&f, (b * PAGE) as u64, &[i as u8 + 1; PAGE]).unwrap();
            new.resize(new.len().max((b + 1) * PAGE), 0);
            new[b * PAGE..(b + 1) * PAGE].fill(i as u8 + 1);
        }
        if i == 2 {
            v.sync().unwrap()
        } else {
            v.fsync(f.ino(), false).unwrap()
        }
        contents.push(new);
        ends.push(device.log_len());
    }
    v.crash();
    let (mut random, mut states) = (fastrand::Rng::with_seed(2), [0; 5]);
    for upto in from..=device.log_len() {
        let synced = ends.iter().filter(|e| **e <= upto).count() - 1;
        for round in 0..24 {
            let crashed = crashed(&device, upto, round, &mut random);
            let v = mount(crashed.clone());
            let have = content(&v, "allocated").unwrap();
            let state = contents.iter().rposition(|c| *c == have);
            let state = state.unwrap_or_else(|| panic!("at {upto}, {round}: neither old nor new"));
            assert!(state == synced || state == synced + 1, "at {upto}: state {state} where {synced} is durable");
            states[state] += 1;
            v.unmount().unwrap();
            clean(crashed, upto);
        }
    }
    assert!(states.iter().all(|n| *n > 10), "{states:?}");
}
