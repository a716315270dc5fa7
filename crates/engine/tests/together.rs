//! What threads that wait do together: one checkpoint for all who need room in a journal.

use braidfs::device::{Device, Effect, FaultDevice, MemDevice, Op, Rule};
use braidfs::{Cred, MkfsOptions, MountOptions, OpenHow, Volume, mkfs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// 256 MiB in memory, formatted.
fn made(domains: u16, journal_bytes: u64) -> Arc<FaultDevice> {
    let device = Arc::new(FaultDevice::new(Arc::new(MemDevice::new(65536)), 1));
    let all: Vec<Arc<dyn Device>> = vec![device.clone()];
    let o = MkfsOptions { domains: Some(domains), journal_bytes: Some(journal_bytes), ..MkfsOptions::default() };
    mkfs::format(&all, &o).unwrap();
    device
}

fn mount(device: &Arc<FaultDevice>) -> Volume {
    let o = MountOptions { background: false, commit_interval: Duration::from_secs(3600), ..MountOptions::default() };
    Volume::mount(vec![device.clone()], o).unwrap()
}

fn create(v: &Volume, path: &str) {
    let how = OpenHow { read: true, write: true, create: true, mode: 0o644, ..OpenHow::default() };
    v.open_path(path.as_bytes(), how, &Cred::root()).unwrap();
}

/// Waits until `what` is the same for a while; its value.
fn settled(what: impl Fn() -> u64) -> u64 {
    let (mut last, mut same) = (what(), 0);
    while same < 20 {
        std::thread::sleep(Duration::from_millis(10));
        let now = what();
        same = if now == last { same + 1 } else { 0 };
        last = now;
    }
    last
}

/// All threads but one wait for the checkpoint that one writes, and that is enough for all of them.
#[test]
fn one_checkpoint_for_all_who_need_room() {
    const THREADS: usize = 8;
    let device = made(1, 1 << 20);
    let v = mount(&device);
    for t in 0..THREADS {
        v.mkdir_path(format!("{t}").as_bytes(), 0o755, &Cred::root()).unwrap();
    }
    v.sync().unwrap();
    // a checkpoint ends with the header, which nothing else writes
    let headers = v.super_block().domain_table.get();
    device.add(Rule::new(Op::Write, Effect::Stall).blocks(headers..headers + 2));
    let (stop, made) = (AtomicBool::new(false), AtomicU64::new(0));
    let before = v.domains()[0].checkpoints;
    std::thread::scope(|s| {
        let (v, stop, made) = (&v, &stop, &made);
        for t in 0..THREADS {
            s.spawn(move || {
                for i in 0.. {
                    create(v, &format!("{t}/{i}"));
                    made.fetch_add(1, Relaxed);
                    if stop.load(Relaxed) {
                        return;
                    }
                }
            });
        }
        while device.stalled() == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        settled(|| made.load(Relaxed));
        assert_eq!(device.stalled(), 1, "one writes the checkpoint");
        stop.store(true, Relaxed);
        device.clear();
    });
    assert_eq!(v.domains()[0].checkpoints - before, 1, "for {THREADS} threads");
    v.unmount().unwrap();
}
