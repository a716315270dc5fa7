//! One file that several threads overwrite, with and without a scheduler: no write is torn or lost, not by readers, not by
//! commits, and not by a crash.
//!
//! `BRAIDFS_SEED`, `BRAIDFS_THREAD_OPS` (per thread, default 20 000) for real threads; `BRAIDFS_SHARED_RUNS` (default 60) for
//! runs under the scheduler.

use braidfs::{MkfsOptions, MountOptions, SetAttr, Volume, mkfs};
use braidfs_device::{Device, MemDevice};
#[cfg(feature = "schedule")]
use braidfs_testkit::crash::shared::run;
use braidfs_testkit::env_number;
use braidfs_testkit::shared_file::{COMMON, PAGE, PAGES, common, create, stamped, stamps};
use braidfs_testkit::walk::fsck;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

/// Two that overwrite, two that look, and one that does all else to the file that concerns its pages, over many commits.
fn overwritten_over_commits(cached_above: bool) {
    let device: Arc<dyn Device> = Arc::new(MemDevice::soiled((128 << 20) / 4096));
    mkfs::format(std::slice::from_ref(&device), &MkfsOptions { domains: Some(1), ..MkfsOptions::default() }).unwrap();
    let options = MountOptions {
        commit_interval: Duration::from_millis(5),
        background: true,
        cached_above,
        ..MountOptions::default()
    };
    let v = Volume::mount(vec![device.clone()], options.clone()).unwrap();
    let ino = create(&v).unwrap();
    let ops = env_number("BRAIDFS_THREAD_OPS", 20_000) * 5;
    let (stop, next) = (AtomicBool::new(false), AtomicU64::new(1));
    // the last of its own page that each thread wrote
    let own: Vec<u64> = std::thread::scope(|s| {
        let writers: Vec<_> = (0..2)
            .map(|t| {
                let (v, next) = (&v, &next);
                s.spawn(move || {
                    let f = v.open(ino).unwrap();
                    let mut last = 0;
                    for n in 0..ops {
                        let stamp = next.fetch_add(1, SeqCst);
                        // some as those of a kernel's cache
                        let write = if n % 4 < 2 { Volume::write } else { Volume::write_accepted_keeping_times };
                        if n % 3 == 0 {
                            assert_eq!(write(v, &f, 0, &stamped(stamp, COMMON)).unwrap(), COMMON * PAGE);
                        } else {
                            let at = ((COMMON + t) * PAGE) as u64;
                            write(v, &f, at, &stamped(stamp, 1)).unwrap();
                            last = stamp;
                        }
                    }
                    last
                })
            })
            .collect();
        let others = [
            s.spawn(|| {
                let f = v.open(ino).unwrap();
                while !stop.load(SeqCst) {
                    let seen = common(&v, &f).unwrap();
                    assert!(seen.len() == 1, "torn: {seen:?}");
                }
            }),
            s.spawn(|| {
                let f = v.open(ino).unwrap();
                let mut buf = vec![0; PAGE];
                while !stop.load(SeqCst) {
                    // each writer's own page never goes back
                    let mut last = [0; 2];
                    for _ in 0..1000 {
                        for (t, last) in last.iter_mut().enumerate() {
                            v.read(&f, ((COMMON + t) * PAGE) as u64, &mut buf).unwrap();
                            let seen = stamps(&buf);
                            assert!(seen.len() == 1 && seen[0] >= *last, "{seen:?} after {last}");
                            *last = seen[0];
                        }
                    }
                }
            }),
            s.spawn(|| {
                let f = v.open(ino).unwrap();
                let mut n = 0u64;
                while !stop.load(SeqCst) {
                    n += 1;
                    match n % 5 {
                        0 => v.fsync(ino, n.is_multiple_of(2)).unwrap(),
                        1 => _ = v.append(&f, &[7; 100]).unwrap(),
                        2 => {
                            let size = Some((PAGES * PAGE) as u64 + n % 9000);
                            _ = v.setattr(ino, &SetAttr { size, ..SetAttr::default() }).unwrap();
                        }
                        3 => _ = v.setattr(ino, &SetAttr { mode: Some(0o600), ..SetAttr::default() }).unwrap(),
                        _ => std::thread::sleep(Duration::from_millis(n % 4)),
                    }
                }
            }),
        ];
        let own = writers.into_iter().map(|t| t.join()).collect::<Vec<_>>();
        stop.store(true, SeqCst);
        others.into_iter().for_each(|t| t.join().unwrap());
        own.into_iter().map(|r| r.unwrap()).collect()
    });
    assert!(v.domains().iter().all(|d| d.failed.is_none()));
    let look = |v: &Volume| {
        let f = v.open(ino).unwrap();
        let mut buf = vec![0; PAGES * PAGE];
        v.read(&f, 0, &mut buf).unwrap();
        buf
    };
    let before = look(&v);
    for (t, last) in own.iter().enumerate() {
        assert_eq!(stamps(&before[(COMMON + t) * PAGE..][..PAGE]), [*last]);
    }
    v.unmount().unwrap();
    fsck(std::slice::from_ref(&device)).unwrap();
    let v = Volume::mount(vec![device], options).unwrap();
    assert!(look(&v) == before, "what was written is there after a mount");
    v.unmount().unwrap();
}

#[test]
fn threads_overwrite_one_file_over_commits() {
    overwritten_over_commits(false);
}

#[test]
fn threads_overwrite_one_file_whose_written_pages_are_given_up() {
    overwritten_over_commits(true);
}

/// Crashes of threads that take turns by a schedule.
#[cfg(feature = "schedule")]
#[test]
fn every_crash_finds_whole_writes_and_what_was_synced() {
    let runs = env_number("BRAIDFS_SHARED_RUNS", 60);
    let first = env_number("BRAIDFS_SEED", 1);
    let all: Vec<(usize, u64)> =
        (first..first + runs).map(|seed| run(seed).unwrap_or_else(|e| panic!("{e}"))).collect();
    let crashes: usize = all.iter().map(|r| r.0).sum();
    let cleaned = all.iter().filter(|r| r.1 > 0).count();
    println!("{crashes} crashes of {runs} runs, {cleaned} with blocks that the cleaner moved");
    assert!(cleaned as u64 * 4 >= runs, "the cleaner has nothing to do");
}
