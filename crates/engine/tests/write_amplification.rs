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
/// Of smaller ones.
const FEW_BLOCKS: u64 = 64 << 10;
const SMALL_BLOCKS: u64 = 24 << 10;
/// As aged_overwrite of `braidfs bench` has.
const FILES: u64 = 1;
/// Writes between two fsyncs.
const EVERY: u64 = 100;
/// Writes of 100 ms and of 5 s, of some 10,000 a second.
const LOOK: u64 = 1000;
const INTERVAL: u64 = 50_000;

thread_local!(static NOW: Cell<i64> = const { Cell::new(0) });

fn clock() -> Timestamp {
    Timestamp { sec: 1_700_000_000 + NOW.get(), nsec: 0 }
}

/// Which blocks are overwritten.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Load {
    /// Any, each as often.
    Even,
    /// Nine of ten writes go to a tenth of the blocks, which lie scattered over the file.
    Skewed,
}

impl Load {
    fn block(self, rng: &mut fastrand::Rng, blocks: u64) -> u64 {
        match self {
            Load::Skewed if rng.u8(..10) < 9 => rng.u64(..blocks / 10) * 10,
            _ => rng.u64(..blocks),
        }
    }
}

/// Per block of the user, in each tenth of a run: blocks written, and of these moved by the cleaner.
#[derive(Debug, Default)]
struct Tenths {
    written: Vec<f64>,
    moved: Vec<f64>,
}

impl Tenths {
    /// Means of the last four: how many commits fall into one of them differs.
    fn last(&self) -> (f64, f64) {
        let mean = |tenths: &[f64]| tenths[6..].iter().sum::<f64>() / 4.0;
        (mean(&self.written), mean(&self.moved))
    }
}

/// See the module. A run in which five times the free space is written.
fn tenths(percent: u64, overwrite: Overwrite, device_blocks: u64, load: Load) -> Tenths {
    let device = Arc::new(CountDevice::new(Arc::new(MemDevice::new(device_blocks))));
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
    let mut out = Tenths::default();
    let moved = || v.domains().iter().map(|d| d.cleaned_blocks).sum::<u64>();
    for t in 0..10 {
        let before = (device.counters().write_blocks, moved());
        for i in t * tenth..(t + 1) * tenth {
            let f = &files[rng.usize(..files.len())];
            v.write(f, load.block(&mut rng, blocks) * BLOCK, &page).unwrap();
            if i % EVERY == EVERY - 1 {
                // a tick of the clock between two fsyncs
                NOW.set(NOW.get() + 1);
                v.fsync(f.ino(), false).unwrap();
            }
            if i % INTERVAL == INTERVAL - 1 {
                v.domains().iter().for_each(|d| v.commit_domain(braidfs::DomainId(d.domain), true).unwrap());
            }
            if i % LOOK == LOOK - 1 {
                v.clean_as_needed().unwrap();
            }
        }
        out.written.push((device.counters().write_blocks - before.0) as f64 / tenth as f64);
        out.moved.push((moved() - before.1) as f64 / tenth as f64);
    }
    v.unmount().unwrap();
    out
}

#[test]
fn overwrites_cost_what_they_write() {
    for percent in [50, 80, 90] {
        let t = tenths(percent, Overwrite::Auto, BLOCKS, Load::Even).written;
        println!("{percent} % full: {t:.2?}");
        assert!(t.iter().all(|t| *t < 1.1), "{percent} % full: {t:.2?}");
    }
}

/// What the rule above saves: everything goes to the log. Logs recycle the slack of used segments, which moves nothing; the cleaner
/// takes what costs less than that (0.25 blocks moved per block and more when it took whatever was emptiest).
#[test]
fn overwrites_that_go_to_the_log_cost_more() {
    for load in [Load::Even, Load::Skewed] {
        for percent in [50, 80, 90] {
            let t = tenths(percent, Overwrite::Log, SMALL_BLOCKS, load);
            println!("{percent} % full, overwrite=log, {load:?}: {:.2?}, moved {:.2?}", t.written, t.moved);
            let (written, moved) = t.last();
            assert!(written > 1.15 && written < 1.6 && moved < 0.2, "{percent} % full: {t:.2?}");
        }
    }
}

#[test]
#[ignore = "slow; for the figures of docs/testing.md"]
fn the_same_on_larger_volumes() {
    for blocks in [FEW_BLOCKS, BLOCKS] {
        for load in [Load::Even, Load::Skewed] {
            for percent in [50, 80, 90] {
                let t = tenths(percent, Overwrite::Log, blocks, load);
                println!("{blocks} blocks, {percent} % full, {load:?}: {:.2?}, moved {:.2?}", t.written, t.moved);
            }
        }
    }
}
