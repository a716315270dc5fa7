//! A million files in one directory of the library: does a create, and an unlink, cost more than in a small one? Takes a
//! minute: `make million` runs it.

use braidfs::OpenHow;
use braidfs::device::{Device, MemDevice};
use braidfs::{Cred, MkfsOptions, MountOptions, Volume, mkfs};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

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
        let done = Command::new(me).args(["--ignored", "--nocapture"]).env(KEEP_MEMORY.0, KEEP_MEMORY.1).status();
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
