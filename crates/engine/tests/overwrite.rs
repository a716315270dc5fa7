//! Overwrites that an fsync writes in place: what they ask of the device, where they must not be, and what a crash leaves.

use braidfs::OpenHow;
use braidfs::device::{CountDevice, Counters, Device, Effect, FaultDevice, Keep, MemDevice, Op, RecordDevice, Rule};
use braidfs::{
    Cred, DataMode, FallocMode, MkfsOptions, MountOptions, OVERWRITE_BLOCKS, OpenFile, Overwrite, SetAttr, SetTime,
    Timestamp, Volume, mkfs,
};
use braidfs_check::{FsckOptions, check};
use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

const PAGE: usize = 4096;

thread_local!(static NOW: Cell<i64> = const { Cell::new(0) });

/// A clock that the test sets, of the thread that asks.
fn clock() -> Timestamp {
    Timestamp { sec: 1_700_000_000 + NOW.get(), nsec: 0 }
}

fn tick() {
    NOW.set(NOW.get() + 1);
}

fn options() -> MountOptions {
    MountOptions {
        background: false,
        serial: true,
        commit_interval: Duration::from_secs(3600),
        clock: Some(clock),
        ..MountOptions::default()
    }
}

fn formatted(data_checksums: bool) -> Arc<MemDevice> {
    let device = Arc::new(MemDevice::new(16384));
    let all: Vec<Arc<dyn Device>> = vec![device.clone()];
    let o = MkfsOptions { domains: Some(1), group_bytes: Some(4 << 20), data_checksums, ..MkfsOptions::default() };
    mkfs::format(&all, &o).unwrap();
    device
}

fn open(v: &Volume, path: &str) -> OpenFile {
    let how = OpenHow { read: true, write: true, create: true, mode: 0o644, ..OpenHow::default() };
    v.open_path(path.as_bytes(), how, &Cred::root()).unwrap()
}

/// A file of 32 blocks of ones, durable.
fn file(v: &Volume, path: &str) -> OpenFile {
    let f = open(v, path);
    v.write(&f, 0, &[1; 32 * PAGE]).unwrap();
    v.sync().unwrap();
    f
}

fn content(v: &Volume, path: &str) -> Vec<u8> {
    let mut all = vec![0; 40 * PAGE];
    let n = v.read(&open(v, path), 0, &mut all).unwrap();
    all.truncate(n);
    all
}

struct Counted {
    device: Arc<CountDevice>,
    v: Volume,
}

impl Counted {
    fn new(options: MountOptions, sums: bool) -> Self {
        let device = Arc::new(CountDevice::new(formatted(sums)));
        Self { v: Volume::mount(vec![device.clone()], options).unwrap(), device }
    }

    /// What `f` asks of the device: submissions, writes, blocks, flushes.
    fn asks(&self, f: impl FnOnce(&Volume)) -> (u64, u64, u64, u64) {
        let before = self.device.counters();
        f(&self.v);
        let Counters { batches, writes, write_blocks, flushes, .. } = self.device.counters() - before;
        (batches, writes, write_blocks, flushes)
    }

    /// Overwrites `blocks` blocks of the file with `value`, and what an fsync then asks.
    fn rewrite(&self, f: &OpenFile, value: u8, blocks: usize, data_only: bool) -> (u64, u64, u64, u64) {
        self.v.write(f, PAGE as u64, &vec![value; blocks * PAGE]).unwrap();
        self.asks(|v| v.fsync(f.ino(), data_only).unwrap())
    }
}

#[test]
fn an_overwrite_is_one_write_and_one_flush() {
    let c = Counted::new(options(), false);
    let f = file(&c.v, "f");
    for value in 2..20 {
        assert_eq!(c.rewrite(&f, value, 1, false), (1, 1, 1, 1));
        assert_eq!(c.asks(|v| v.fsync(f.ino(), false).unwrap()), (0, 0, 0, 0), "nothing changed");
    }
    // the time changed: the block and its record together, in one submission
    tick();
    assert_eq!(c.rewrite(&f, 20, 1, false), (1, 2, 2, 1));
    assert_eq!(c.rewrite(&f, 21, 1, false), (1, 1, 1, 1), "the same tick");
    // fdatasync leaves the time to the next fsync
    tick();
    assert_eq!(c.rewrite(&f, 22, 1, true), (1, 1, 1, 1));
    assert_eq!(c.asks(|v| v.fsync(f.ino(), true).unwrap()), (0, 0, 0, 0), "the data is durable");
    assert_eq!(c.asks(|v| v.fsync(f.ino(), false).unwrap()), (1, 1, 1, 1), "the time is not");
    assert_eq!(c.asks(|v| v.fsync(f.ino(), false).unwrap()), (0, 0, 0, 0));
    // a commit changes nothing about it
    c.v.write(&f, 0, &[23; PAGE]).unwrap();
    c.v.sync().unwrap();
    assert_eq!(c.rewrite(&f, 24, 1, false), (1, 1, 1, 1));
    assert_eq!(c.rewrite(&f, 25, OVERWRITE_BLOCKS, false).1, 1);
    // many are a part of an extent
    assert_eq!(c.rewrite(&f, 26, 3 * OVERWRITE_BLOCKS, false), (1, 1, 3 * OVERWRITE_BLOCKS as u64, 1));
}

/// Whole extents that are long are replaced elsewhere, as long as there is room; parts of them are overwritten, and so is
/// what is scattered.
#[test]
fn what_is_replaced_whole_goes_elsewhere() {
    let c = Counted::new(options(), false);
    let f = open(&c.v, "f");
    c.v.write(&f, 0, &[1; 100 * PAGE]).unwrap();
    c.v.sync().unwrap();
    let all = |value: u8, from: usize, to: usize, step: usize| {
        for b in (from..to).step_by(step) {
            c.v.write(&f, (b * PAGE) as u64, &[value; PAGE]).unwrap();
        }
        c.asks(|v| v.fsync(f.ino(), false).unwrap())
    };
    assert_eq!(all(2, 0, 100, 1), (1, 2, 101, 1), "elsewhere, and a record");
    // its mapping is not durable: elsewhere again, however few
    assert_eq!(all(3, 5, 6, 1), (1, 2, 2, 1));
    c.v.sync().unwrap();
    assert_eq!(all(4, 0, 100, 3), (1, 34, 34, 1), "scattered");
    assert_eq!(all(5, 10, 90, 1).2, 80, "parts of extents");
    // a volume with little room
    let full = open(&c.v, "full");
    let blocks = c.v.statfs().blocks * 7 / 10;
    c.v.write(&full, 0, &vec![1; blocks as usize * PAGE]).unwrap();
    c.v.sync().unwrap();
    assert_eq!(all(6, 0, 100, 1).2, 100, "all of it, where it lies");
}

/// From the first fsync on that overwrites a file a commit does, too; one of a file that nobody synced writes elsewhere.
#[test]
fn commits_do_as_fsyncs_did() {
    let c = Counted::new(options(), false);
    let f = file(&c.v, "f");
    let extents = |f: &OpenFile| c.v.extents(f.ino()).unwrap().len();
    let overwrite = |value: u8| {
        for b in (3..30).step_by(2) {
            c.v.write(&f, b * PAGE as u64, &[value; PAGE]).unwrap();
        }
        c.v.sync().unwrap();
        extents(&f)
    };
    assert_eq!(extents(&f), 1);
    c.rewrite(&f, 2, 1, false);
    tick();
    assert_eq!(overwrite(3), 1);
    // what is not durable is not overwritten
    c.v.setattr(f.ino(), &SetAttr { mode: Some(0o600), ..SetAttr::default() }).unwrap();
    assert!(overwrite(4) > 20);
    let g = file(&c.v, "g");
    c.v.write(&g, 5 * PAGE as u64, &[2; PAGE]).unwrap();
    c.v.sync().unwrap();
    assert_eq!(extents(&g), 3);
}

#[test]
fn not_with_checksums_journaled_data_or_overwrite_log() {
    let modes: [(MountOptions, bool); 3] = [
        (options(), true),
        (MountOptions { data: DataMode::Journal, ..options() }, false),
        (MountOptions { overwrite: Overwrite::Log, ..options() }, false),
    ];
    for (options, sums) in modes {
        let c = Counted::new(options.clone(), sums);
        let f = file(&c.v, "f");
        for value in 2..6 {
            assert_eq!(c.rewrite(&f, value, 1, false), (1, 2, 2, 1), "{options:?}");
        }
    }
}

/// A file that is always overwritten in place has no record either where nothing but data changed, however much.
#[test]
fn a_file_with_reserved_blocks() {
    for overwrite in [Overwrite::Auto, Overwrite::Log] {
        let c = Counted::new(MountOptions { overwrite, ..options() }, false);
        let f = open(&c.v, "f");
        c.v.fallocate(&f, FallocMode::Allocate { keep_size: false }, 0, 32 * PAGE as u64).unwrap();
        c.v.write(&f, 0, &[1; 32 * PAGE]).unwrap();
        c.v.sync().unwrap();
        assert_eq!(c.rewrite(&f, 2, 20, false), (1, 1, 20, 1));
        tick();
        assert_eq!(c.rewrite(&f, 3, 1, false), (2, 2, 2, 1), "no flush between data and record");
        c.v.setattr(f.ino(), &SetAttr { mode: Some(0o600), ..SetAttr::default() }).unwrap();
        assert_eq!(c.rewrite(&f, 4, 1, false).3, 2, "other attributes: after the data");
    }
}

/// Of every change after which the next fsync must not write in place, or leave out its record, until it is committed.
#[test]
fn changes_are_not_left_out() {
    type Change = fn(&Volume, &OpenFile);
    let changes: [(&str, Change); 8] = [
        ("mode", |v, f| {
            v.setattr(f.ino(), &SetAttr { mode: Some(0o600), ..SetAttr::default() }).unwrap();
        }),
        ("cut", |v, f| {
            v.setattr(f.ino(), &SetAttr { size: Some(9000), ..SetAttr::default() }).unwrap();
        }),
        ("grown", |v, f| {
            v.write(f, 33 * PAGE as u64, &[9; 10]).unwrap();
        }),
        ("punched", |v, f| v.fallocate(f, FallocMode::PunchHole, 4 * PAGE as u64, 4096).unwrap()),
        ("zeroed", |v, f| v.fallocate(f, FallocMode::ZeroRange { keep_size: true }, 4 * PAGE as u64, 4096).unwrap()),
        ("collapsed", |v, f| v.fallocate(f, FallocMode::CollapseRange, 4 * PAGE as u64, 4096).unwrap()),
        ("inserted", |v, f| v.fallocate(f, FallocMode::InsertRange, 4 * PAGE as u64, 4096).unwrap()),
        ("attribute", |v, f| v.setxattr(f.ino(), b"user.a", b"1", braidfs::XattrMode::Set).unwrap()),
    ];
    for (what, change) in changes {
        let c = Counted::new(options(), false);
        let f = file(&c.v, "f");
        assert_eq!(c.rewrite(&f, 2, 1, false).1, 1, "{what}");
        let commits = || c.v.domains().iter().map(|d| d.commits).sum::<u64>();
        let before = commits();
        change(&c.v, &f);
        // a record, or a commit
        let asked = c.rewrite(&f, 3, 1, false);
        assert!(asked.1 >= 2 || commits() > before, "{what}: {asked:?}");
        c.v.sync().unwrap();
        assert_eq!(c.rewrite(&f, 4, 1, false).1, 1, "{what}");
    }
}

/// A crash at any moment of an fsync leaves old and new blocks, in parts at most; when it has returned all are new. Times
/// are as old or as new.
#[test]
fn a_crash_leaves_old_or_new_sectors() {
    for ticks in [false, true] {
        let device = Arc::new(RecordDevice::new(formatted(false).snapshot()));
        let v = Volume::mount(vec![device.clone()], options()).unwrap();
        let f = file(&v, "f");
        if ticks {
            tick();
        }
        v.write(&f, PAGE as u64, &[2; 3 * PAGE]).unwrap();
        v.write(&f, 9 * PAGE as u64, &[2; 100]).unwrap();
        let attr = v.setattr(f.ino(), &SetAttr { mtime: Some(SetTime::At(clock())), ..SetAttr::default() }).unwrap();
        let (from, new) = (device.log_len(), content(&v, "f"));
        v.fsync(f.ino(), false).unwrap();
        let end = device.log_len();
        assert_eq!(end - from, if ticks { 4 } else { 3 }, "two runs, a record, a flush");
        v.crash();
        let mut torn = 0;
        for upto in from..=end {
            for round in 0u64..16 {
                let crashed = device.crash_image(upto, &mut |i| match round {
                    0 => Keep::None,
                    1 => Keep::Whole,
                    _ => Keep::TornMask((round * 0x9e37_79b9).rotate_left(i as u32)),
                });
                let crashed: Arc<dyn Device> = Arc::new(crashed);
                let v = Volume::mount(vec![crashed.clone()], options()).unwrap();
                let have = content(&v, "f");
                assert_eq!(have.len(), new.len());
                assert!(have.iter().zip(&new).all(|(h, n)| h == n || *h == 1), "at {upto}");
                torn += usize::from(have != new && have.contains(&2));
                if upto == end {
                    let stat = v.lookup(braidfs::InodeNo::ROOT, b"f").unwrap();
                    assert!(have == new && stat.mtime == attr.mtime, "synced");
                }
                v.unmount().unwrap();
                let found = check(
                    &[crashed],
                    &FsckOptions { repair: false, force: true },
                    &braidfs::JournalReplay,
                    &|_, _, _| {},
                )
                .unwrap();
                assert!(found.findings.is_empty(), "at {upto}: {:#?}", found.findings);
            }
        }
        assert!(torn > 5, "{torn}");
    }
}

/// A sync promises what was written before it: it waits for blocks that an fsync has taken and not yet written, also where
/// the file's record was committed without them (`data=writeback`).
#[test]
fn a_sync_waits_for_what_an_fsync_overwrites() {
    for data in [DataMode::Ordered, DataMode::Writeback] {
        let device = Arc::new(FaultDevice::new(formatted(false), 1));
        let v = Volume::mount(vec![device.clone()], MountOptions { data, ..options() }).unwrap();
        let f = file(&v, "f");
        v.write(&f, PAGE as u64, &[2; PAGE]).unwrap();
        if data == DataMode::Writeback {
            v.commit_domain(v.domain_of(f.ino()).unwrap(), false).unwrap();
        }
        device.add(Rule::new(Op::Write, Effect::Stall).times(1));
        std::thread::scope(|s| {
            let fsync = s.spawn(|| v.fsync(f.ino(), true));
            while device.stalled() == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
            let (tell, told) = std::sync::mpsc::channel();
            let v = &v;
            s.spawn(move || tell.send(v.sync()));
            assert!(told.recv_timeout(Duration::from_millis(200)).is_err(), "the sync has returned, {data:?}");
            device.clear();
            told.recv_timeout(Duration::from_secs(60)).unwrap().unwrap();
            fsync.join().unwrap().unwrap();
        });
    }
}

/// What was accepted stays readable where the device fails to take it, and what lay there before never is.
#[test]
fn a_write_in_place_that_fails_shows_nothing_foreign() {
    for flags in [0, braidfs::format::inode::NOCOW] {
        let memory = formatted(false);
        let device = Arc::new(FaultDevice::new(memory, 7));
        let mount = || {
            let all: Vec<Arc<dyn Device>> = vec![device.clone()];
            Volume::mount(all, MountOptions { cache_bytes: 1 << 20, ..options() }).unwrap()
        };
        let v = mount();
        // another file's bytes wherever blocks are free
        let other = open(&v, "other");
        let mut at = 0;
        while let Ok(n) = v.write(&other, at, &[0xaa; 64 * PAGE]) {
            at += n as u64;
        }
        v.sync().unwrap();
        drop(other);
        v.unlink_path(b"other", &Cred::root()).unwrap();
        v.sync().unwrap();
        let big = open(&v, "big");
        v.write(&big, 0, &[7; 1024 * PAGE]).unwrap();
        let f = open(&v, "f");
        v.setattr(f.ino(), &SetAttr { flags: Some(flags), ..SetAttr::default() }).unwrap();
        v.fallocate(&f, FallocMode::Allocate { keep_size: false }, 0, 32 * PAGE as u64).unwrap();
        v.sync().unwrap();
        v.write(&f, 0, &[1; 8 * PAGE]).unwrap();
        device.add(Rule::new(Op::Write, Effect::Fail(5)));
        v.sync().unwrap_err();
        device.clear();
        // more than the cache holds
        for i in (0..1024).step_by(16) {
            v.read(&big, i * PAGE as u64, &mut [0; 16 * PAGE]).unwrap();
        }
        let mut got = vec![0; 32 * PAGE];
        v.read(&f, 0, &mut got).unwrap();
        assert!(got.iter().all(|b| [0, 1].contains(b)), "flags {flags}: {:?}", got.iter().find(|b| **b > 1));
        assert!(got[..8 * PAGE].iter().all(|b| *b == 1), "flags {flags}: what was written is gone");
    }
}

/// A crash undid a write that had been made in place. Its bytes behind the end of the file are never read, also where the file is
/// no longer overwritten in place when it grows.
#[test]
fn what_a_crash_undid_stays_hidden() {
    let device = formatted(false);
    let all: Vec<Arc<dyn Device>> = vec![device.clone()];
    let v = Volume::mount(all.clone(), options()).unwrap();
    let f = open(&v, "f");
    let flags =
        |v: &Volume, f: &OpenFile, flags| v.setattr(f.ino(), &SetAttr { flags: Some(flags), ..SetAttr::default() });
    flags(&v, &f, braidfs::format::inode::NOCOW).unwrap();
    let old = [&[1; PAGE][..], &[9; 1000]].concat();
    v.write(&f, 0, &old).unwrap();
    drop(f);
    v.unmount().unwrap();
    // the bytes that it had written
    let mut block = [0; PAGE];
    let is_tail = |at: &u64| device.read(*at, &mut block).is_ok() && block[..1000].iter().all(|b| *b == 9);
    let at = (0..device.blocks()).find(is_tail).unwrap();
    block[1000..2000].fill(0xee);
    device.write(at, &block).unwrap();
    let v = Volume::mount(all.clone(), options()).unwrap();
    let f = open(&v, "f");
    flags(&v, &f, 0).unwrap();
    v.setattr(f.ino(), &SetAttr { size: Some(2 * PAGE as u64), ..SetAttr::default() }).unwrap();
    drop(f);
    v.unmount().unwrap();
    let v = Volume::mount(all, options()).unwrap();
    let mut expected = old;
    expected.resize(2 * PAGE, 0);
    assert!(content(&v, "f") == expected, "bytes of the write that was undone");
}

/// Blocks that are written anew count once in what `stat` shows.
#[test]
fn blocks_of_an_overwrite_count_once() {
    let v = Volume::mount(vec![formatted(false)], options()).unwrap();
    let f = file(&v, "f");
    let blocks = |v: &Volume| v.getattr(f.ino()).unwrap().sectors;
    assert_eq!(blocks(&v), 32 * 8);
    v.write(&f, 0, &[2; 30 * PAGE]).unwrap();
    assert_eq!(blocks(&v), 32 * 8);
    v.write(&f, 30 * PAGE as u64, &[2; 10 * PAGE]).unwrap();
    assert_eq!(blocks(&v), 40 * 8);
    v.sync().unwrap();
    assert_eq!(blocks(&v), 40 * 8);
}
