//! Threads that each make their own change durable, on a device whose flush takes 200 µs: how many a second, how long one
//! takes, how many flushes and joiners there are for it. `make sync-bench` runs it, with and without helpers of commits.

use braidfs::device::{Device, Effect, FaultDevice, MemDevice, Op, Rule};
use braidfs::{Cred, InodeNo, MkfsOptions, MountOptions, OpenHow, Volume, mkfs};
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

const FLUSH: Duration = Duration::from_micros(200);

/// What a thread does again and again.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Act {
    /// Overwrites a block of a file of its own, and syncs that.
    Overwrite,
    /// Appends a block to it.
    Append,
    /// Makes a file with a block in a directory of its own, and syncs the directory: a commit.
    Create,
}

fn mount(domains: u16) -> (Arc<FaultDevice>, Volume) {
    let device = Arc::new(FaultDevice::new(Arc::new(MemDevice::new(1 << 19)), 1));
    let all: Vec<Arc<dyn Device>> = vec![device.clone()];
    let o = MkfsOptions { domains: Some(domains), journal_bytes: Some(32 << 20), ..MkfsOptions::default() };
    mkfs::format(&all, &o).unwrap();
    let v = Volume::mount(all, MountOptions::default()).unwrap();
    (device, v)
}

fn write(v: &Volume, path: &str, at: u64) -> InodeNo {
    let how = OpenHow { read: true, write: true, create: true, mode: 0o644, ..OpenHow::default() };
    let f = v.open_path(path.as_bytes(), how, &Cred::root()).unwrap();
    assert_eq!(v.write(&f, at, &[7; 4096]).unwrap(), 4096);
    f.ino()
}

fn sync(v: &Volume, act: Act, thread: usize, i: u64) {
    let own = format!("{thread}");
    match act {
        Act::Overwrite => v.fsync(write(v, &format!("{own}/f"), 0), true).unwrap(),
        Act::Append => v.fsync(write(v, &format!("{own}/f"), i % 4096 * 4096), false).unwrap(),
        Act::Create => {
            write(v, &format!("{own}/{i}"), 0);
            let dir = v.resolve(own.as_bytes(), true, &Cred::root()).unwrap().ino;
            v.fsync(dir, false).unwrap();
        }
    }
}

fn measure(act: Act, domains: u16, threads: usize, time: Duration) {
    let (device, v) = mount(domains);
    for t in 0..threads {
        v.mkdir_path(format!("{t}").as_bytes(), 0o755, &Cred::root()).unwrap();
        sync(&v, act, t, 0);
    }
    v.sync().unwrap();
    device.add(Rule::new(Op::Flush, Effect::Delay(FLUSH)));
    let count = |v: &Volume| v.domains().iter().fold((0, 0), |(c, j), d| (c + d.commits, j + d.joiners));
    let (before, flushes) = (count(&v), device.counters().flushes);
    let (stop, began) = (AtomicBool::new(false), Instant::now());
    let mut all: Vec<Duration> = std::thread::scope(|s| {
        let (v, stop) = (&v, &stop);
        let one = |t| {
            move || {
                // a sleep that ends when it should
                let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
                let mut took = Vec::new();
                for i in 1.. {
                    let began = Instant::now();
                    sync(v, act, t, i);
                    took.push(began.elapsed());
                    if stop.load(Relaxed) {
                        break;
                    }
                }
                took
            }
        };
        let all: Vec<_> = (0..threads).map(|t| s.spawn(one(t))).collect();
        std::thread::sleep(time);
        stop.store(true, Relaxed);
        all.into_iter().flat_map(|t| t.join().unwrap()).collect()
    });
    let seconds = began.elapsed().as_secs_f64();
    let after = count(&v);
    let (commits, joiners) = (after.0 - before.0, after.1 - before.1);
    let flushes = device.counters().flushes - flushes;
    device.clear();
    all.sort_unstable();
    let at = |part: f64| all[((all.len() - 1) as f64 * part) as usize].as_micros();
    println!(
        "| {act:?} | {domains} | {threads} | {:.0} | {} | {} | {:.1} | {commits} | {:.2} |",
        all.len() as f64 / seconds,
        at(0.5),
        at(0.99),
        all.len() as f64 / flushes as f64,
        if commits > 0 { joiners as f64 / commits as f64 } else { 0.0 },
    );
    v.unmount().unwrap();
}

#[test]
#[ignore = "figures: `make sync-bench`"]
fn syncs_of_many_threads() {
    let on = braidfs_sync::ablation::is_on(braidfs_sync::ablation::Switch::Leader);
    let ms = std::env::var("SYNC_BENCH_MS").ok().and_then(|s| s.parse().ok()).unwrap_or(1000);
    println!("\n{} each commit, flushes of {FLUSH:?}\n", if on { "one thread for" } else { "helpers in" });
    println!(
        "| act | domains | threads | syncs/s | p50 µs | p99 µs | syncs per flush | commits | joiners per commit |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    for act in [Act::Overwrite, Act::Append, Act::Create] {
        if on && act != Act::Create {
            continue; // they commit nothing
        }
        for domains in [1, 4] {
            for threads in [1, 2, 4, 8, 16, 32, 64] {
                measure(act, domains, threads, Duration::from_millis(ms));
            }
        }
    }
}
