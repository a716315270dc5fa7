//! Many files in the library: does one cost more than where there are few? A million in one directory take a minute (`make
//! million`), ten million in a tree some minutes and 5 GiB of room (`make ten-million`). Each runs alone, as CPU time and memory
//! are the process's.

use braidfs::OpenHow;
use braidfs::device::{Device, FileDevice, MemDevice, OpenHow as DeviceHow};
use braidfs::{Cred, MkfsOptions, MountOptions, Volume, mkfs};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// As in the programs.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;
/// So it keeps memory that was given back. Else each part but the first would be charged with the kernel's clearing of the
/// memory that its files take for the first time, as much per file in a small directory as in a large one.
const KEEP_MEMORY: (&str, &str) = ("MIMALLOC_PURGE_DELAY", "-1");

/// Files of a part; eight parts make a million.
const PART: u64 = 125_000;

/// CPU time of this process, microseconds.
fn cpu() -> f64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    t.tv_sec as f64 * 1e6 + t.tv_nsec as f64 / 1e3
}

/// CPU time per file of each part of creating and of unlinking `parts` parts, microseconds. Committed after each part.
fn run(parts: u64) -> (Vec<f64>, Vec<f64>) {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(2 << 20));
    mkfs::format(std::slice::from_ref(&device), &MkfsOptions::default()).unwrap();
    let options = MountOptions {
        background: false,
        commit_interval: Duration::from_secs(3600),
        cache_bytes: 4 << 30,
        ..MountOptions::default()
    };
    let v = Volume::mount(vec![device], options).unwrap();
    let me = Cred::root();
    v.mkdir_path(b"d", 0o755, &me).unwrap();
    let how = OpenHow { write: true, create: true, exclusive: true, mode: 0o644, ..OpenHow::default() };
    let each = |what: &str, f: &dyn Fn(&[u8])| -> Vec<f64> {
        let part = |p: u64| {
            let before = cpu();
            (p * PART..(p + 1) * PART).for_each(|i| f(format!("d/file-{i:07}").as_bytes()));
            v.sync().unwrap();
            let us = (cpu() - before) / PART as f64;
            println!("{what:8} {:>9} to {:>9}: {us:6.2} us of CPU time a file", p * PART, (p + 1) * PART);
            us
        };
        (0..parts).map(part).collect()
    };
    let made = each("create", &|name| drop(v.open_path(name, how, &me).unwrap()));
    // in the order of their numbers, as rm(1) does it
    let gone = each("unlink", &|name| v.unlink_path(name, &me).unwrap());
    v.unmount().unwrap();
    (made, gone)
}

#[test]
#[ignore = "a minute: make million"]
fn a_million_files_cost_as_much_each_as_a_hundred_thousand() {
    // the allocator asks once, before there is a main function
    if std::env::var_os(KEEP_MEMORY.0).is_none() {
        let me = std::env::current_exe().unwrap();
        let this = ["--ignored", "--nocapture", "--exact", "a_million_files_cost_as_much_each_as_a_hundred_thousand"];
        let done = Command::new(me).args(this).env(KEEP_MEMORY.0, KEEP_MEMORY.1).status();
        assert!(done.unwrap().success());
        return;
    }
    run(8); // memory that later runs use again
    let (_, few) = run(1);
    let (made, gone) = run(8);
    let mean = gone.iter().sum::<f64>() / gone.len() as f64;
    println!("create: the last part took {:.2} of the first", made[7] / made[0]);
    println!("unlink: of 1,000,000 files each took {:.2} of one of 125,000", mean / few[0]);
    assert!(made[7] <= 1.4 * made[0], "creates: {made:?}");
    assert!(mean <= 1.2 * few[0], "unlinks: {gone:?}, of 125,000 files {few:?}");
}

/// Files of a directory of the tree, and directories of one above.
const PER_DIR: u64 = 1000;
const DIRS: u64 = 100;
/// One file of so many is looked up.
const SPARSE: u64 = 100;
/// What the cache may take; what the process may beside it, as in `memory.rs`.
const CACHE: u64 = 512 << 20;
const BESIDE: u64 = 64 << 20;
/// The image that a process of its own is to make files on until it dies.
const LOAD: &str = "BRAIDFS_MILLION_LOAD";
const LOAD_TIME: Duration = Duration::from_secs(10);
const TREE_TEST: &str = "ten_million_files_in_a_tree_cost_as_much_each_as_the_first";

fn name(i: u64) -> String {
    format!("{}/file-{i:08}", directory(i / PER_DIR))
}

fn directory(number: u64) -> String {
    format!("{:03}/{:02}", number / DIRS, number % DIRS)
}

/// A number of `/proc/self/status`, in bytes.
fn memory(what: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix(what)).unwrap();
    line.split_whitespace().next().unwrap().parse::<u64>().unwrap() << 10
}

fn mount_image(image: &Path, what: &str) -> Volume {
    let (before, begun) = (cpu(), Instant::now());
    // not through the kernel's cache
    let device = FileDevice::open(image, DeviceHow { write: true, direct: true }).unwrap();
    let options = MountOptions { cache_bytes: CACHE, ..MountOptions::default() };
    let v = Volume::mount(vec![Arc::new(device)], options).unwrap();
    println!("{what}: {:.2?}, {:.2} s of CPU time", begun.elapsed(), (cpu() - before) / 1e6);
    v
}

/// CPU time of each of `n`, microseconds.
fn timed(what: &str, n: u64, work: impl FnOnce()) -> f64 {
    let (before, begun) = (cpu(), Instant::now());
    work();
    let (us, wall) = ((cpu() - before) / n as f64, begun.elapsed().as_secs_f64() * 1e6 / n as f64);
    println!("{what:24}: {us:6.2} us of CPU time a file, {wall:6.2} by the clock");
    us
}

struct Tree {
    files: u64,
    /// Memory of the process with an empty volume.
    idle: u64,
    /// Whether it was within its bound.
    fits: bool,
}

impl Tree {
    fn look_at_memory(&mut self, v: &Volume) {
        let (now, most, bound) = (memory("VmRSS:"), memory("VmHWM:"), self.idle + CACHE + BESIDE);
        let (now_mib, most, mib) = (now >> 20, most >> 20, bound >> 20);
        println!("memory {now_mib} MiB, at most so far {most}; bound {mib}; {:?}", v.cache_use());
        self.fits &= now <= bound;
    }

    /// Does `each` with each directory of the tree, in eight parts; CPU time per file of the first and the last.
    fn parts(
        &mut self,
        v: &mut Option<Volume>,
        what: &str,
        each: fn(&Volume, u64),
        after_first: impl Fn(&mut Option<Volume>),
    ) -> (f64, f64) {
        let step = self.files / PER_DIR / 8;
        let mut costs = Vec::new();
        for part in 0..8 {
            costs.push(timed(&format!("{what} {} of 8", part + 1), step * PER_DIR, || {
                let v = v.as_ref().unwrap();
                (part * step..(part + 1) * step).for_each(|d| each(v, d));
                v.sync().unwrap();
            }));
            self.look_at_memory(v.as_ref().unwrap());
            if part == 0 {
                after_first(v);
            }
        }
        println!("{what}: the last part took {:.2} of the first", costs[7] / costs[0]);
        (costs[0], costs[7])
    }
}

fn create(v: &Volume, directory: u64) {
    let me = Cred::root();
    let how = OpenHow { write: true, create: true, exclusive: true, mode: 0o644, ..OpenHow::default() };
    let path = self::directory(directory);
    if directory.is_multiple_of(DIRS) {
        v.mkdir_path(path.split('/').next().unwrap().as_bytes(), 0o755, &me).unwrap();
    }
    v.mkdir_path(path.as_bytes(), 0o755, &me).unwrap();
    let all = directory * PER_DIR..(directory + 1) * PER_DIR;
    all.for_each(|i| drop(v.open_path(name(i).as_bytes(), how, &me).unwrap()));
}

fn remove(v: &Volume, directory: u64) {
    let me = Cred::root();
    (directory * PER_DIR..(directory + 1) * PER_DIR).for_each(|i| v.unlink_path(name(i).as_bytes(), &me).unwrap());
    v.rmdir_path(self::directory(directory).as_bytes(), &me).unwrap();
}

/// Looks up some of `files`, with nothing cached.
fn look_up(v: &mut Option<Volume>, image: &Path, files: u64) -> f64 {
    v.take().unwrap().unmount().unwrap();
    let v = v.insert(mount_image(image, "mount after an unmount"));
    let (n, mut random) = (files / SPARSE, fastrand::Rng::with_seed(15));
    timed(&format!("look-up of {n} of {files}"), n, || {
        (0..n).for_each(|_| assert!(v.resolve(name(random.u64(..files)).as_bytes(), false, &Cred::root()).is_ok()));
    })
}

/// Makes files on an image until the process is gone, without an unmount.
fn load_and_die(image: &Path, files: u64) -> ! {
    let (v, begun) = (mount_image(image, "mount for the load"), Instant::now());
    let first = files / PER_DIR / DIRS * DIRS + DIRS;
    for directory in first.. {
        create(&v, directory);
        if begun.elapsed() > LOAD_TIME {
            println!("{} files made, and killed", (directory - first + 1) * PER_DIR);
            std::process::abort();
        }
    }
    unreachable!()
}

/// `BRAIDFS_MILLION_FILES`: fewer, a multiple of 8,000. `BRAIDFS_TMP`: where the image is made.
#[test]
#[ignore = "some minutes and 5 GiB of room: make ten-million"]
fn ten_million_files_in_a_tree_cost_as_much_each_as_the_first() {
    let files = std::env::var("BRAIDFS_MILLION_FILES").map_or(10_000_000, |n| n.parse().unwrap());
    if let Some(image) = std::env::var_os(LOAD) {
        load_and_die(Path::new(&image), files);
    }
    let place = std::env::var_os("BRAIDFS_TMP").unwrap_or_else(|| "/var/tmp".into());
    let dir = tempfile::tempdir_in(place).unwrap();
    let image = dir.path().join("image");
    let device = FileDevice::create(&image, (files * 4096).max(1 << 30)).unwrap();
    mkfs::format(&[Arc::new(device) as Arc<dyn Device>], &MkfsOptions::default()).unwrap();
    let mut v = Some(mount_image(&image, "mount of an empty volume"));
    let mut tree = Tree { files, idle: memory("VmRSS:"), fits: true };
    let looked = std::cell::Cell::new(0.0);
    let made = tree.parts(&mut v, "create", create, |v| looked.set(look_up(v, &image, files / 8)));
    let looked = (looked.get(), look_up(&mut v, &image, files));
    println!("look-up: the last took {:.2} of the first", looked.1 / looked.0);
    v.take().unwrap().unmount().unwrap();
    let me = std::env::current_exe().unwrap();
    let died = Command::new(me).args(["--ignored", "--nocapture", "--exact", TREE_TEST]).env(LOAD, &image).status();
    assert!(died.unwrap().signal().is_some(), "it failed before its end");
    let crashed = mount_image(&image, "mount after a crash");
    crashed.resolve(name(files - 1).as_bytes(), false, &Cred::root()).unwrap();
    // as the background does after a crash
    timed("a look at all names", files, || assert_eq!(crashed.collect_stale().unwrap().mended, 0));
    tree.look_at_memory(&crashed);
    crashed.unmount().unwrap();
    v = Some(mount_image(&image, "mount after an unmount"));
    let gone = tree.parts(&mut v, "unlink", remove, |_| ());
    v.take().unwrap().unmount().unwrap();
    for (what, (first, last)) in [("create", made), ("look-up", looked), ("unlink", gone)] {
        assert!(last <= 1.4 * first, "{what}: {first} and {last}");
    }
    assert!(tree.fits, "more memory than its bound");
}
