//! Bytes that reach the device per byte of the user where files live by random overwrites that are synced, on a volume that
//! is half full and more: over time, since what goes elsewhere costs cleaning and ever smaller extents later. Counted, not
//! timed; what the background does every 100 ms and at the commit interval is done every so many writes.

use braidfs::OpenHow;
use braidfs::device::{CountDevice, Device, MemDevice};
use braidfs::{Cred, MkfsOptions, MountOptions, OpenFile, Overwrite, Timestamp, Volume, mkfs};
use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

const BLOCK: u64 = 4096;
/// Of the device.
const BLOCKS: u64 = 256 << 10;
/// As aged_overwrite of `braidfs bench` has.
const FILES: u64 = 1;
/// Writes between two fsyncs.
const EVERY: u64 = 100;
/// Writes of 100 ms and of 5 s, of some 10,000 a second.
const LOOK: u64 = 1000;
const INTERVAL: u64 = 50_000;
/// What the background leaves free before it cleans.
const SEGMENTS: u64 = 4;

thread_local!(static NOW: Cell<i64> = const { Cell::new(0) });

fn clock() -> Timestamp {
    Timestamp { sec: 1_700_000_000 + NOW.get(), nsec: 0 }
}

/// See the module. Blocks written per block of the user, in each tenth of a run in which five times the free space is
/// written.
fn tenths(percent: u64, overwrite: Overwrite) -> Vec<f64> {
    let device = Arc::new(CountDevice::new(Arc::new(MemDevice::new(BLOCKS))));
    let devices: Vec<Arc<dyn Device>> = vec![device.clone()];
    mkfs::format(&devices, &MkfsOptions { domains: Some(1), ..MkfsOptions::default() }).unwrap();
    let options = MountOptions {
        background: false,
        serial: true,
        commit_interval: Duration::from_secs(3600),
        cache_bytes: 64 << 20,
        overwrite,
        clock: Some(clock),
        ..MountOptions::default()
    };
    let v = Volume::mount(devices, options).unwrap();
    let all = v.statfs().available;
    let blocks = all * percent / 100 / FILES;
    let how = OpenHow { read: true, write: true, create: true, mode: 0o644, ..OpenHow::default() };
    let files: Vec<OpenFile> =
        (0..FILES).map(|i| v.open_path(format!("f{i}").as_bytes(), how, &Cred::root()).unwrap()).collect();
    for f in &files {
        for b in (0..blocks).step_by(256) {
            v.write(f, b * BLOCK, &vec![1; ((blocks - b).min(256) * BLOCK) as usize]).unwrap();
        }
    }
    v.sync().unwrap();
    let mut rng = fastrand::Rng::with_seed(1);
    let page = [2u8; BLOCK as usize];
    let tenth = (all - blocks * FILES) / 2;
    let mut out = Vec::new();
    for t in 0..10 {
        let before = device.counters().write_blocks;
        for i in t * tenth..(t + 1) * tenth {
            let f = &files[rng.usize(..files.len())];
            v.write(f, rng.u64(..blocks) * BLOCK, &page).unwrap();
            if i % EVERY == EVERY - 1 {
                // a tick of the clock between two fsyncs
                NOW.set(NOW.get() + 1);
                v.fsync(f.ino(), false).unwrap();
            }
            if i % INTERVAL == INTERVAL - 1 {
                v.domains().iter().for_each(|d| v.commit_domain(braidfs::DomainId(d.domain), true).unwrap());
            }
            if i % LOOK == LOOK - 1 && v.domains().iter().any(|d| d.segments_free < SEGMENTS) {
                v.clean(1).unwrap();
            }
        }
        out.push((device.counters().write_blocks - before) as f64 / tenth as f64);
    }
    v.unmount().unwrap();
    out
}

#[test]
fn overwrites_cost_what_they_write() {
    for percent in [50, 80, 90] {
        let t = tenths(percent, Overwrite::Auto);
        println!("{percent} % full: {t:.2?}");
        assert!(t.iter().all(|t| *t < 1.1), "{percent} % full: {t:.2?}");
    }
}

/// What the rule above saves: everything goes to the log.
#[test]
#[ignore = "slow; for the figures of docs/testing.md"]
fn overwrites_that_go_to_the_log_cost_more() {
    for percent in [50, 80, 90] {
        let t = tenths(percent, Overwrite::Log);
        println!("{percent} % full, overwrite=log: {t:.2?}");
        assert!(t.last().is_some_and(|t| *t > 1.3), "{percent} % full: {t:.2?}");
    }
}
