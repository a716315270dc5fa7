//! Memory: the resident set of an idle mount, and its growth by many new files under a cache budget. Alone in its file:
//! the resident set is the process's.

use braidfs::OpenHow;
use braidfs::device::{Device, FileDevice, OpenHow as DeviceHow};
use braidfs::{Cred, MkfsOptions, MountOptions, Volume, mkfs};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// As in the programs.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Most bytes of an idle mount.
const GOAL_IDLE: u64 = 64 << 20;
/// Most bytes per file, of files beyond those that fill the cache's budget: what the allocator keeps differs by some 25 MiB from
/// run to run, which is 250 bytes for each of 100,000. (An inode that stays takes 800, its name some 60.)
const GOAL_PER_FILE: f64 = 400.0;
/// Most bytes beside the budget, however many files there are: what the allocator keeps, and buffers of commits. (Ten runs of one
/// version ended 28 to 62 MiB above the idle mount, on a machine that was idle.)
const BESIDE: u64 = 64 << 20;
/// Files in one directory.
const FILES_PER_DIR: u64 = 10_000;

/// Resident bytes of this process.
fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = statm.split(' ').nth(1).unwrap().parse().unwrap();
    pages * rustix::param::page_size() as u64
}

/// [`resident`] when nothing more is given back: the background does that, some time after.
fn settled() -> u64 {
    let (mut least, mut since) = (resident(), Instant::now());
    while since.elapsed() < Duration::from_millis(700) {
        std::thread::sleep(Duration::from_millis(20));
        let now = resident();
        if now < least {
            (least, since) = (now, Instant::now());
        }
    }
    least
}

/// Mounts a fresh volume on an image with `budget` bytes of cache and makes `files` empty files.
fn files_keep_to_the_budget(files: u64, budget: u64) {
    // on a disk, where there is one: what a tmpfs holds is memory, too, though not ours
    let dir = tempfile::tempdir_in("/var/tmp").or_else(|_| tempfile::tempdir()).unwrap();
    let image = dir.path().join("image");
    let bytes = (files * 4096).next_power_of_two().max(1 << 30);
    drop(FileDevice::create(&image, bytes).unwrap());
    let device: Arc<dyn Device> = Arc::new(FileDevice::open(&image, DeviceHow { write: true, direct: true }).unwrap());
    mkfs::format(std::slice::from_ref(&device), &MkfsOptions::default()).unwrap();
    let v = Volume::mount(vec![device], MountOptions { cache_bytes: budget, ..MountOptions::default() }).unwrap();
    let (me, idle) = (Cred::root(), resident());
    let how = OpenHow { read: true, write: true, create: true, exclusive: true, mode: 0o644, ..OpenHow::default() };
    let (mut peak, mut half) = (idle, idle);
    for f in 0..files {
        if f == files / 2 {
            // what is under way does not count
            v.sync().unwrap();
            half = settled();
        }
        let dir = f / FILES_PER_DIR;
        if f % FILES_PER_DIR == 0 {
            v.mkdir_path(format!("{dir}").as_bytes(), 0o755, &me).unwrap();
            peak = peak.max(resident());
        }
        drop(v.open_path(format!("{dir}/file-{f:07}").as_bytes(), how, &me).unwrap());
    }
    peak = peak.max(resident());
    v.sync().unwrap();
    let after = settled();
    let per_file = after.saturating_sub(half) as f64 / (files - files / 2) as f64;
    let mib = |b: u64| b as f64 / f64::from(1 << 20);
    println!(
        "resident: {:.1} MiB idle (goal: {}); {files} files with {} MiB of cache: at most {:.1} MiB, {:.1} MiB at the end, \
         {per_file:.0} bytes a file of the second half (goal: {GOAL_PER_FILE})",
        mib(idle),
        GOAL_IDLE >> 20,
        budget >> 20,
        mib(peak),
        mib(after)
    );
    // what the volume itself counts varies with nothing
    let counted = v.cache_use();
    assert!(counted.data + counted.index <= budget, "{counted:?}");
    assert!(idle <= GOAL_IDLE && per_file <= GOAL_PER_FILE && after <= idle + budget + BESIDE);
    v.unmount().unwrap();
}

#[test]
fn memory_stays_near_its_budget() {
    // fewer files than `make bench` makes: the slope counts, and the budget is smaller in proportion
    files_keep_to_the_budget(200_000, 16 << 20);
}

#[test]
#[ignore = "a million files: make bench"]
fn memory_of_a_million_files() {
    files_keep_to_the_budget(1_000_000, 64 << 20);
}
