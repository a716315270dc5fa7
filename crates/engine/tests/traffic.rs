//! What reaches the device: bytes per empty file created, writes and flushes per small fsync. Counted, not timed, so it
//! holds on any machine. `make bench` shows the counts of more files.

use braidfs::OpenHow;
use braidfs::device::{CountDevice, Counters, Device, MemDevice};
use braidfs::{Cred, FileKind, InodeNo, MkfsOptions, MountOptions, NewNode, Result, Volume, mkfs};
use std::sync::Arc;
use std::time::Duration;

/// Most bytes written per empty file, commit and checkpoint included.
const GOAL_CREATE_BYTES: f64 = 512.0;
/// Most device writes of create, write 1 KiB, fsync.
const GOAL_FSYNC_WRITES: u64 = 3;
/// Most flushes of it.
const GOAL_FSYNC_FLUSHES: u64 = 1;

const BLOCK: u64 = 4096;
const MIB: f64 = (1 << 20) as f64;

/// A volume in memory behind a device that counts. Nothing happens in the background.
struct Counted {
    device: Arc<CountDevice>,
    volume: Volume,
}

impl Counted {
    fn make(bytes: u64) -> Self {
        let device = Arc::new(CountDevice::new(Arc::new(MemDevice::new(bytes / BLOCK))));
        let devices: Vec<Arc<dyn Device>> = vec![device.clone()];
        mkfs::format(&devices, &MkfsOptions::default()).unwrap();
        let commit_interval = Duration::from_secs(3600);
        let options = MountOptions { background: false, commit_interval, ..MountOptions::default() };
        Self { volume: Volume::mount(devices, options).unwrap(), device }
    }
    /// What `f` sends to the device.
    fn count(&self, f: impl FnOnce(&Volume) -> Result<()>) -> Counters {
        let before = self.device.counters();
        f(&self.volume).unwrap();
        self.device.counters() - before
    }
    /// What unmounting sends to the device.
    fn unmount(self) -> Counters {
        let before = self.device.counters();
        self.volume.unmount().unwrap();
        self.device.counters() - before
    }
}

/// Makes `files` empty files over `dirs` directories; bytes written per file, commit and checkpoint included.
fn creates(files: u64, dirs: u64) -> f64 {
    let c = Counted::make(2 << 30);
    let new = |kind, mode| NewNode { kind, mode, umask: 0, rdev: 0, target: b"" };
    let me = Cred::root();
    let committed = c.count(|v| {
        for d in 0..dirs {
            let dir = v.create(InodeNo::ROOT, format!("dir{d}").as_bytes(), &new(FileKind::Dir, 0o755), &me)?;
            for f in 0..files / dirs {
                v.create(dir.ino, format!("file-{f:06}").as_bytes(), &new(FileKind::File, 0o644), &me)?;
            }
        }
        v.sync()
    });
    let [commit, checkpoint] = [committed, c.unmount()].map(|n| (n.write_blocks * BLOCK) as f64);
    let per_file = (commit + checkpoint) / files as f64;
    println!(
        "{files} empty files in {dirs} directories: commit {:.1} MiB, checkpoint {:.1} MiB, {per_file:.0} bytes a file \
         (goal: {GOAL_CREATE_BYTES})",
        commit / MIB,
        checkpoint / MIB
    );
    per_file
}

/// Makes `files` new files with 1 KiB each in `dir`, fsync each; whether each keeps to the goals.
fn fsyncs(c: &Counted, case: &str, dir: &str, files: u64) -> bool {
    let (me, data) = (Cred::root(), [7u8; 1024]);
    let how = OpenHow { read: true, write: true, create: true, exclusive: true, mode: 0o644, ..OpenHow::default() };
    let one = |i| {
        c.count(|v| {
            let f = v.open_path(format!("{dir}/{i}").as_bytes(), how, &me)?;
            v.write(&f, 0, &data)?;
            v.fsync(f.ino(), false)
        })
    };
    let all: Vec<Counters> = (0..files).map(one).collect();
    let of = |count: fn(&Counters) -> u64| {
        let mean = all.iter().map(count).sum::<u64>() as f64 / files as f64;
        (mean, all.iter().map(count).max().unwrap_or(0))
    };
    let (writes, blocks, flushes) = (of(|n| n.writes), of(|n| n.write_blocks), of(|n| n.flushes));
    println!(
        "create, write 1 KiB, fsync {case}: {:.2} writes (at most {}; goal: {GOAL_FSYNC_WRITES}), {:.2} blocks, {:.2} \
         flushes (at most {}; goal: {GOAL_FSYNC_FLUSHES})",
        writes.0, writes.1, blocks.0, flushes.0, flushes.1
    );
    writes.1 <= GOAL_FSYNC_WRITES && flushes.1 <= GOAL_FSYNC_FLUSHES
}

/// Small fsyncs in an old directory, in a new one, and three new ones deep; whether all keep to the goals.
fn small_fsyncs(files: u64) -> bool {
    let c = Counted::make(1 << 30);
    let mkdir = |path: &[u8]| {
        c.volume.mkdir_path(path, 0o755, &Cred::root()).unwrap();
    };
    mkdir(b"old");
    c.volume.sync().unwrap();
    let old = fsyncs(&c, "in a directory that is durable", "old", files);
    mkdir(b"new");
    let new = fsyncs(&c, "in a directory just made", "new", files);
    mkdir(b"new/a");
    mkdir(b"new/a/b");
    old & new & fsyncs(&c, "three new directories deep", "new/a/b", files)
}

/// Flushes of an unmount, and of the mount that recovers the same from a crash, of a volume of so many domains; each of them
/// has changed.
fn flushes_of_all(domains: u16) -> [u64; 2] {
    let device = Arc::new(CountDevice::new(Arc::new(MemDevice::new((512 << 20) / BLOCK))));
    let devices: Vec<Arc<dyn Device>> = vec![device.clone()];
    let format = MkfsOptions { domains: Some(domains), group_bytes: Some(8 << 20), ..MkfsOptions::default() };
    mkfs::format(&devices, &format).unwrap();
    let options = MountOptions { background: false, serial: true, ..MountOptions::default() };
    let mount = || Volume::mount(devices.clone(), options.clone()).unwrap();
    let change = |v: &Volume, mode| {
        for d in 0..4 * domains {
            let name = format!("{mode:o}.{d}");
            v.mkdir_path(name.as_bytes(), mode, &Cred::root()).unwrap();
        }
        v.sync().unwrap();
        assert!(v.domains().iter().all(|d| d.commits > 0), "a domain has nothing to tell");
    };
    let v = mount();
    change(&v, 0o755);
    let before = device.counters();
    v.unmount().unwrap();
    let unmount = (device.counters() - before).flushes;
    let v = mount();
    change(&v, 0o700);
    v.crash();
    let before = device.counters();
    let v = mount();
    let recovery = (device.counters() - before).flushes;
    v.crash();
    [unmount, recovery]
}

/// What all domains do together is flushed once for all of them.
#[test]
fn more_domains_need_no_more_flushes_to_mount_and_unmount() {
    let [few, many] = [2, 16].map(flushes_of_all);
    println!("flushes of an unmount and of a recovery: {few:?} with 2 domains, {many:?} with 16");
    // home tables, headers that tell of them, headers that say clean
    assert_eq!((few[0], many[0]), (3, 3));
    assert_eq!(few[1], many[1]);
}

#[test]
fn an_empty_file_costs_at_most_512_bytes_on_the_device() {
    assert!(creates(20_000, 2) <= GOAL_CREATE_BYTES);
}

#[test]
fn a_small_fsync_takes_three_writes_and_one_flush() {
    assert!(small_fsyncs(50));
}

#[test]
#[ignore = "the same with more files: make bench"]
fn counts_of_many_files() {
    assert!(creates(100_000, 10) <= GOAL_CREATE_BYTES && small_fsyncs(100));
}
